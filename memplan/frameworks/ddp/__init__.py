"""PyTorch's DistributedDataParallel."""
