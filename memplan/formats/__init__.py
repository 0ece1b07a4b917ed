"""The configurations of frameworks: each is a room that reads it as a plan, writes a plan as it, or both.

To add one is to add its module and a line in ``FORMATS``. A reader's module has ``read(place, asked)``, a writer's
``TARGET``; they are imported when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from ..values import NamedTuple

if TYPE_CHECKING:
    from .exported import Target
    from .launch import Asked, Launch


class Format(NamedTuple):
    """Where a configuration is read and written, and what the command line says of it."""

    name: str
    reader: str = ""
    """The module of ``--from``; empty for one that is only written."""
    writer: str = ""
    """The module of ``--to``; empty for one that is only read."""
    example: str = "train.sh"
    """A file, and the flags that it needs."""
    marks: tuple[str, ...] = ()
    """Keys of which a file has one at its top, by which it is known without ``--from``."""
    takes_settings: bool = True
    """``--set`` and ``--vocab-size`` mean something."""
    commanded: str = ""
    """The module that knows the flags of the tool's own command line."""


FORMATS = {
    one.name: one
    for one in (
        Format(
            "megatron",
            ".training_scripts",
            ".megatron.script",
            marks=("MODEL_ARGS", "--num-layers", "num-layers", "--hidden-size", "hidden-size"),
        ),
        Format("megatron-bridge", ".megatron_bridge.reader", example="run_config.yaml", marks=("_target_",)),
        Format("megatron-deepspeed", ".training_scripts", ".megatron_deepspeed.script"),
        Format(
            "deepspeed",
            ".deepspeed.reader",
            ".deepspeed.exporter",
            example="ds_config.json --model gpt2",
            marks=("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"),
            takes_settings=False,
        ),
        Format(
            "torchtitan",
            ".torchtitan.reader",
            ".torchtitan.exporter",
            example="llama3_8b.toml",
            marks=("activation_checkpoint", "parallelism"),
            commanded=".torchtitan.commanded",
        ),
        Format(
            "trainer",
            ".trainer.reader",
            example="arguments.json --model gpt2",
            marks=(
                "per_device_train_batch_size",
                "model_name_or_path",
                "output_dir",
                "finetuning_type",
                "cutoff_len",
                "base_model",
                "sequence_len",
                "sample_packing",
                "tuner_type",
                "train_type",
                "sft_type",
            ),
        ),
        Format(
            "accelerate",
            ".accelerate",
            example="accelerate.yaml --model gpt2",
            marks=("distributed_type", "compute_environment"),
            takes_settings=False,
        ),
        Format("device-map", writer=".device_map"),
    )
}
"""By the names of ``--from`` and ``--to``."""

ALSO_CALLED = {
    **dict.fromkeys(
        (
            "hf",
            "huggingface",
            "transformers",
            "trl",
            "llama-factory",
            "llamafactory",
            "sft",
            "axolotl",
            "ms-swift",
            "swift",
        ),
        "trainer",
    ),
    **dict.fromkeys(("megatron-lm", "megatron-core", "mcore"), "megatron"),
    **dict.fromkeys(("titan", "fsdp2"), "torchtitan"),
    **dict.fromkeys(("ds", "ds-config", "zero"), "deepspeed"),
    "bridge": "megatron-bridge",
}
"""Other names of formats."""

READ = tuple(name for name, one in FORMATS.items() if one.reader)
WRITTEN = tuple(name for name, one in FORMATS.items() if one.writer)


def reader(name: str) -> Callable[[str, Asked], Launch]:
    """The function that reads a file of the format ``name``, one of ``READ``."""
    found: Callable[[str, Asked], Launch] = import_module(FORMATS[name].reader, __package__).read
    return found


def target(name: str) -> Target:
    """The writer of the format ``name``, one of ``WRITTEN``."""
    found: Target = import_module(FORMATS[name].writer, __package__).TARGET
    return found


def as_settings(words: Sequence[str]) -> list[str]:
    """``words`` of a command line, where flags of a tool's own are ``--set`` and its file."""
    made = [*words]
    for one in FORMATS.values():
        if one.commanded:
            made = import_module(one.commanded, __package__).as_settings(made, one.name)
    return made
