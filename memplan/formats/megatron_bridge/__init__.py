"""Megatron-Bridge's run configuration."""
