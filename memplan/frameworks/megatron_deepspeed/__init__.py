"""BigScience's Megatron-DeepSpeed of 2021."""
