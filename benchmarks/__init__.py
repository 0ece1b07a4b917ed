"""Accuracy and speed of memplan, runnable by anyone: ``python benchmarks/accuracy.py``, ``python benchmarks/speed.py``."""
