"""Recipes of layers: each is run once, on tensors without elements, and leaves its tape."""
