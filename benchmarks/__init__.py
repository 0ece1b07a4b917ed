"""Accuracy and speed of memplan, runnable by anyone: ``accuracy.py`` and ``speed.py``."""
