"""Names of values as other tools write them, made the names that a plan holds.

Case, hyphens and underscores do not matter. A name that could be two things is refused with both; one that nothing
knows stays as it is, and validation refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeAlias

from .errors import ABSENT, Origin, PlanError
from .fields import Kind, PlanField
from .node import Node

_DTYPES = {
    **dict.fromkeys(("bfloat16", "bfloat"), "bf16"),
    **dict.fromkeys(("float16", "half", "f16"), "fp16"),
    **dict.fromkeys(("float32", "float", "f32"), "fp32"),
}
"""PyTorch's names, without ``torch.``."""

_ATTENTION = {
    **dict.fromkeys(("flash-attention", "flash-attn"), "flash"),
    "fa2": "flash_attention_2",
    "fa3": "flash_attention_3",
    "sdpa": None,
}
"""transformers' ``attn_implementation``. ``sdpa`` takes the best kernel there is, as a plan does that names none."""

_FRAMEWORKS = dict.fromkeys(("fsdp2", "fully-shard", "fully-sharded-data-parallel"), "fsdp")

_QUANTISED = dict.fromkeys(("4bit", "int4", "bnb4bit", "bnb", "bitsandbytes", "qlora"), "nf4")
"""``load_in_4bit``, with the type that everybody takes."""

_ELSEWHERE: Mapping[str, Mapping[str, str | None]] = {
    "attention": _ATTENTION,
    "framework": _FRAMEWORKS,
    "quantisation.kind": _QUANTISED,
}
"""By path of a field; ``None`` stands for the field left out."""

_OF_TRL = "is not modelled of trl's trainers: {}; what SFTTrainer runs is --trainer transformers --versions trl=1.9.0"
_TWO_MODELS = _OF_TRL.format("a reference model, pairs of sequences in one batch, log-probabilities of their tokens")

_REFUSED: Mapping[str, Mapping[str, str]] = {
    "trainer.loop": {
        "sft": "is trl's SFTTrainer: --trainer transformers --versions trl=1.9.0",
        **dict.fromkeys(("kto", "orpo", "cpo", "simpo", "bco"), _TWO_MODELS),
        **dict.fromkeys(("reward", "prm"), _OF_TRL.format("a head with one score, pairs of sequences in one batch")),
        **dict.fromkeys(
            ("ppo", "rloo", "onlinedpo", "gkd"),
            _OF_TRL.format("generation between steps, and log-probabilities of what was generated"),
        ),
    },
    "quantisation.kind": {
        **dict.fromkeys(("int8", "8bit", "llmint8"), "is not modelled: bitsandbytes' 8-bit weights; nf4 and fp4 are"),
        **dict.fromkeys(
            ("awq", "hqq", "aqlm", "eetq", "quanto", "torchao", "fp8", "mxfp4"),
            "is not modelled: of quantised weights under adapters nf4, fp4 and gptq are",
        ),
    },
}
"""What other tools have and is refused by name, written plainly, by path of a field."""

Flags: TypeAlias = "Mapping[str, str | tuple[str, ...]]"

_MAKERS = re.compile(r"(?i)nvidia|geforce|tesla|amd|instinct")
_THOUSANDS = re.compile(r"([1-9][0-9]{0,5})\s*([kKmM])")
_LENGTHS = frozenset({"batch.seq", "model.positions_max"})


def respelled(field: PlanField, node: Node) -> Node:
    """``node``, the value of ``field``, with its name as a plan writes it."""
    if not isinstance(node.value, str):
        return node
    if field.path == "hardware.gpu":
        return _renamed(node, _gpu(node))
    if field.kind is Kind.CHOICE:
        return _choice(field, node)
    if field.path in _LENGTHS and (match := _THOUSANDS.fullmatch(node.value)):
        return Node(int(match[1]) << (10 if match[2] in "kK" else 20), node.origin, node.text)
    return node


def with_optimizer(plan: Node) -> Node:
    """``plan`` with the Trainer's name of an optimizer (``adamw_torch_fused``) as the fields that it stands for."""
    section = plan.mapping.get("optimizer")
    name = section.mapping.get("name") if section is not None else None
    if section is None or name is None or not isinstance(name.value, str):
        return plan
    from ..optimizers import ROOMS, not_modelled, trainer_names

    if name.value in ROOMS:
        return plan
    called: dict[str, Mapping[str, Any]] = {plain(name): fields for name, fields in trainer_names().items()}
    found = called.get(plain(name.value))
    if found is None:
        why = not_modelled(plain(name.value))
        if why:
            raise PlanError("optimizer.name", name.value, why, origin=name.origin)
        return plan
    fields = {key: Node(value, name.origin) for key, value in found.items()}
    for key, node in section.mapping.items():
        if key != "name" and key in fields and fields[key].value != node.value:
            problem = f"is {found[key]} with optimizer {name.value}; name the optimizer {found['name']} to choose it"
            raise PlanError(f"optimizer.{key}", node.plain(), problem, origin=node.origin)
    return plan.with_items({"optimizer": Node({**section.mapping, **fields}, section.origin)})


_SEVERAL_GPUS = re.compile(r"\s*([0-9]{1,6})\s*[xX×*]\s*(.+?)\s*|\s*(.*?)\s*[xX×*]\s*([0-9]{1,6})\s*")


def with_said_at_once(flags: Flags) -> Flags:
    """``flags`` where each says one thing: ``--gpu 8xh100`` is ``gpu`` and ``gpus``, ``--framework torchtitan`` a
    framework and whose code runs on it."""
    from ..frameworks import STAND_FOR

    named = flags.get("framework")
    stands_for = STAND_FOR.get(plain(named), {}) if isinstance(named, str) else {}
    for name, value in stands_for.items():
        said = flags.get(name, value) if name != "framework" else value
        if said != value:
            raise PlanError("", ABSENT, f"{said} is not the {value} of --framework {named}", origin=Origin(f"--{name}"))
    return with_counted_gpus({**flags, **stands_for})


def with_counted_gpus(flags: Flags) -> Flags:
    """``flags`` where ``gpu`` is a name alone: ``8xh100`` is ``gpu`` h100 and ``gpus`` 8."""
    named = flags.get("gpu")
    match = _SEVERAL_GPUS.fullmatch(named) if isinstance(named, str) else None
    if match is None or not isinstance(named, str):
        return flags
    from ..device.gpus import GPUS

    origin = Origin("--gpu")
    name, count = match[2] or match[3], match[1] or match[4]
    if _gpu(Node(named, origin)) in GPUS or _gpu(Node(name, origin)) not in GPUS:
        return flags
    said = flags.get("gpus", count)
    if said != count:
        raise PlanError("hardware.gpus", said, f"is not the {count} of --gpu {named}", origin=Origin("--gpus"))
    return {**flags, "gpu": name, "gpus": count}


def plain(name: str) -> str:
    """What stays of a name in which case, hyphens, underscores, dots, colons and blanks do not matter."""
    return re.sub(r"[-_.:\s]", "", name.lower())


def meant(wanted: str, names: Iterable[tuple[str, Collection[str]]]) -> list[str]:
    """Those of ``names`` that are ``wanted`` once written plainly, or are also called so."""
    wanted = plain(wanted)
    return [name for name, also in names if wanted in {plain(other) for other in (name, *also)}]


def _choice(field: PlanField, node: Node) -> Node:
    name = str(node.value)
    if name in field.choices:
        return node
    same = meant(name, ((choice, ()) for choice in field.choices))
    if same:
        return _renamed(node, same[0])
    why = _REFUSED.get(field.path, {}).get(plain(name))
    if why is not None:
        raise PlanError(field.path, name, why, origin=node.origin)
    known = {plain(other): value for other, value in _ELSEWHERE.get(field.path, {}).items()}
    if plain(name) in known:
        return _renamed(node, known[plain(name)])
    dtype = _DTYPES.get(plain(name.lower().removeprefix("torch.")))
    return _renamed(node, dtype) if dtype in field.choices else node


def _renamed(node: Node, name: str | None) -> Node:
    return Node(name, node.origin, node.text)


def _gpu(node: Node) -> str:
    from ..device.gpus import ALSO_CALLED, GPUS

    name = str(node.value)
    if name in GPUS:
        return name
    bare = _MAKERS.sub("", name)
    found = meant(bare, ((gpu.name, (_MAKERS.sub("", gpu.title), *ALSO_CALLED[gpu.name])) for gpu in GPUS.values()))
    if len(found) > 1:
        raise PlanError("hardware.gpu", name, f"could be {' or '.join(found)}; name one", origin=node.origin)
    return found[0] if found else name
