"""Layers of Megatron-Core on one rank, in both implementations: ``local`` and ``transformer_engine``."""
