"""memplan: a memory planner and partition advisor for training large models on many GPUs."""

__version__ = "0.1.0"
