"""Everything that a GPU is asked in one go: what memplan estimates, measured case by case."""
