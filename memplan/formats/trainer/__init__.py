"""Arguments of Hugging Face's Trainer, in a file or behind the script that a shell script starts."""
