"""The search: optimal partitions, the space of layouts, how long a step takes, and what to do where nothing fits."""
