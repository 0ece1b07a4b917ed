"""BigScience's Megatron-DeepSpeed: its arguments, and the DeepSpeed configuration that they name."""
