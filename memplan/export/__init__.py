"""A plan in a framework's own words, so that what was planned is what runs.

One file for each target: it writes a configuration and says which reader reads it back. ``exported`` writes, reads
back, and refuses what was lost.
"""
