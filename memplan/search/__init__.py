"""Looking for partitions, layouts and recompute that fit, and ranking them by time."""
