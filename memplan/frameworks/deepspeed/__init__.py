"""DeepSpeed's ZeRO on a Hugging Face model."""
