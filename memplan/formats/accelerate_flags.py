"""What the flags of ``accelerate launch`` say, which are also those that trl's commands pass on.

accelerate 1.15, ``commands/launch.py`` (``launch_command_parser``, ``_validate_launch_command``); trl 1.16,
``cli/commands/training.py`` (whatever the trainer's parser does not know is the launcher's),
``cli/accelerate_config.py`` (``--accelerate_config``) and ``accelerate_configs/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..plan.errors import Node, PlanError
from ..plan.yaml_events import parse_yaml
from .accelerate import READ, WITHOUT_EFFECT, WITHOUT_EFFECT_ON_FSDP, Accelerated, accelerated, file_named
from .launchers import found_from

_PARTS = {
    "use_fsdp": ("distributed_type", "FSDP"),
    "use_deepspeed": ("distributed_type", "DEEPSPEED"),
    "multi_gpu": ("distributed_type", "MULTI_GPU"),
}
_OF_DEEPSPEED = (
    "zero_stage",
    "offload_optimizer_",
    "offload_param_",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "deepspeed_",
    "zero3_",
)
_GROUPS = "parallelism_config_"
_SECTIONS = {"fsdp_config": ("fsdp_",), "parallelism_config": (_GROUPS,), "deepspeed_config": _OF_DEEPSPEED}
_FILES = ("config_file", "accelerate_config")
_OF_TRAINER = frozenset({"gradient_accumulation_steps", "debug"})
"""Flags that the Trainer's parser has, too, and takes."""

_BEGIN = """
distributed_type: {}
mixed_precision: bf16
num_processes: 8
"""
OF_TRL: Mapping[str, str] = {
    "single_gpu": _BEGIN.format("'NO'"),
    "multi_gpu": _BEGIN.format("MULTI_GPU"),
    **{
        f"zero{stage}": f"{_BEGIN.format('DEEPSPEED')}deepspeed_config: {{zero_stage: {stage}{more}}}\n"
        for stage, more in ((1, ", gradient_accumulation_steps: 1"), (2, ""), (3, ""))
    },
    "fsdp1": f"{_BEGIN.format('FSDP')}fsdp_config: {{fsdp_version: 1, fsdp_backward_prefetch: BACKWARD_PRE}}\n",
    "fsdp2": f"{_BEGIN.format('FSDP')}fsdp_config: {{fsdp_version: 2, fsdp_reshard_after_forward: true}}\n",
}
"""Configurations that trl ships, by name: what of them changes memory."""


def split_off(arguments: Node) -> tuple[Node, dict[str, Node]]:
    """The Trainer's arguments among ``arguments`` of a command of trl, and the launcher's."""
    given = {key: node for key, node in arguments.mapping.items() if _is_launchers(key)}
    return Node({key: node for key, node in arguments.mapping.items() if key not in given}, arguments.origin), given


def _is_launchers(key: str) -> bool:
    known = key in READ or key in WITHOUT_EFFECT or key in _FILES or key in _PARTS
    parts = ("fsdp_", "dynamo_", _GROUPS, *_OF_DEEPSPEED)
    return (known or key.startswith(parts)) and key != "fsdp_config" and key not in _OF_TRAINER


def changes_memory(flag: str) -> bool:
    """Whether what ``flag`` of the launcher says is in what ``configured`` makes of it."""
    parts = ("fsdp_", "dynamo_", _GROUPS, *_OF_DEEPSPEED)
    known = flag in (*_FILES, *_PARTS, "mixed_precision") or flag.startswith(parts)
    without = flag in WITHOUT_EFFECT or flag.removeprefix("fsdp_") in WITHOUT_EFFECT_ON_FSDP
    return known and not without and flag != "gradient_clipping"


def configured(flags: Mapping[str, Node], origin: Node, folder: Path) -> Accelerated:
    """What the launcher's ``flags`` say, over the file that one of them names; ``origin`` stands for the command."""
    items, file = {}, next((flags[name] for name in _FILES if name in flags), None)
    if file is not None:
        written, folder = _file(file, folder)
        items = dict(written.mapping)
    for name, node in flags.items():
        section = next((part for part, begins in _SECTIONS.items() if name.startswith(begins)), "")
        if name in _PARTS and node.value is True:
            items[_PARTS[name][0]] = Node(_PARTS[name][1], node.origin)
        elif section:
            items[section] = items.get(section, Node({}, node.origin)).with_items({name: node})
        elif name in ("num_processes", "mixed_precision") or name.startswith("dynamo_"):
            items[name] = node
    return accelerated(Node(items, origin.origin), folder)


def _file(file: Node, folder: Path) -> tuple[Node, Path]:
    """The configuration that ``file`` names, or trl ships under that name, and what its paths start from."""
    name = str(file.value)
    place = found_from(name, folder)
    if not place.exists() and name in OF_TRL:
        return parse_yaml(OF_TRL[name], f"{name} of trl"), folder
    try:
        return file_named(file, folder, "--config_file", "Accelerate's configuration"), place.parent
    except PlanError as error:
        if place.exists() or name.endswith((".yaml", ".yml", ".json")):
            raise
        problem = f"is no file here, and none of trl's configurations: {', '.join(OF_TRL)}"
        raise PlanError("accelerate_config", name, problem, origin=file.origin) from error
