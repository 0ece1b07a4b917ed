"""DeepSpeed's configuration, ``ds_config.json``."""
