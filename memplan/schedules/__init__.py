"""How a model is cut into stages, and in which order a stage runs its micro-batches."""
