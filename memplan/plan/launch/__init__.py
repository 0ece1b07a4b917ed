"""Launch files of Megatron-LM and Megatron-DeepSpeed, read as plans: shell scripts, argument lists, mappings; and
DeepSpeed's ``ds_config.json`` (``ds_config``) and torchtitan's TOML or saved JSON (``torchtitan``).

From the file to the plan: ``files`` finds the words (``shell`` reads scripts, ``launchers`` finds the
training among what they start), ``settings`` takes them apart, ``tables`` says what each argument means
for memory, ``megatron`` and ``deepspeed`` make fields of them, and ``read`` puts it together.
"""

from .read import Choices, Explained, Launch, plan_of_arguments, read_launch

__all__ = ["Choices", "Explained", "Launch", "plan_of_arguments", "read_launch"]
