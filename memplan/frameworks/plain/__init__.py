"""Plain PyTorch: one process, on one GPU or on several by a map of devices."""
