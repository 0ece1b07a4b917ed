"""Other code than torch's own, which a validation can run: Megatron-Core's."""
