"""PyTorch's fully_shard, on transformers' models and torchtitan's Llama."""
