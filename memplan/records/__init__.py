"""Records of validated runs: what was planned, estimated and measured, kept for the next estimate.

``record`` is one of them and its file, ``database`` all of them, and what they say of a GPU. Nothing here
imports torch, and SQLite is imported only where there is a database.
"""
