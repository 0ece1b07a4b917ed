"""PyTorch's caching allocator, and the replay of programs in it."""
