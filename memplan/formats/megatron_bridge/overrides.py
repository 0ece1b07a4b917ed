"""Megatron-Bridge's overrides: a file or words (``model.tensor_model_parallel_size=4``) laid over a recipe.

Recipes are Python, which is not run: the model is named by ``--model``, and what no override says is as the template of
pretraining recipes has it (``recipes/common.py``: ``_pretrain_common``). Words follow Hydra's grammar, as
``training/utils/omegaconf_utils.py`` (``parse_hydra_overrides``) and ``scripts/training/run_recipe.py`` take them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from ...plan.errors import ABSENT, Node, Origin, PlanError, together
from ...plan.fields import by_flag
from ...plan.hub import twin
from ...plan.notes import Note
from ...plan.text import parse_yaml
from ...values import dataclass
from ..launch import Asked
from ..megatron.context import Family
from . import table
from .adapters import RANK, section_of
from .arguments import check_field, said_at

_SECTIONS = """
    model train validation optimizer scheduler ddp dataset logger tokenizer checkpoint rng dist comm_overlap
    mixed_precision peft profiling straggler ft inprocess_restart nvrx_straggler rerun_state_machine tensor_inspect
    env_vars
"""
SECTIONS = frozenset(_SECTIONS.split())
"""Fields of ``ConfigContainer``."""
_WORD = re.compile(
    rf"(~|\+{{0,2}})((?:{'|'.join(sorted(SECTIONS))})(?=\.)|mixed_precision|peft)((?:\.\w+)*)(?:=(.*))?", re.DOTALL
)
"""Of sections as a whole those that recipes name by a word: ``mixed_precision=bf16_with_mxfp8_mixed``."""
COMMAND_LINE = Origin("command line")
_OF_MODEL = re.compile(r"\w+_parallel_size|seq_length|sequence_parallel|recompute_\w+|num_layers|hidden_size")
_OF_TRAINING = frozenset(("micro_batch_size", "global_batch_size", "train_iters"))
HINTS = (
    "_parallel_size",
    "train:",
    '"train"',
    "seq_length",
    "sequence_parallel",
    "recompute_",
    "num_layers",
    "hidden_size",
)
"""One of them is in the text of every file that ``are_overrides`` knows."""

TEMPLATE: Mapping[str, Mapping[str, object]] = {
    "train": {"micro_batch_size": 2, "global_batch_size": 32},
    "ddp": {
        "check_for_nan_in_grad": True,
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "use_distributed_optimizer": True,
    },
    "optimizer": {"optimizer": "adam", "use_distributed_optimizer": True, "clip_grad": 1.0},
    "dataset": {"seq_length": 4096},
}
"""What pretraining recipes begin with; ``mixed_precision`` is ``bf16_mixed`` there."""
FINE_TUNING: Mapping[str, Mapping[str, object]] = {
    **TEMPLATE,
    "train": {"micro_batch_size": 1, "global_batch_size": 128},
    "ddp": {"check_for_nan_in_grad": True, "grad_reduce_in_fp32": True, "use_distributed_optimizer": True},
    "dataset": {"seq_length": 2048},
}
"""The same of recipes that fine-tune (``_sft_common``), with adapters or without (``_peft_common``)."""
_FINE_TUNES = re.compile(r"_(?:sft|finetune|peft|lora|dora)(?:_|$)")
PRECISION = "bf16_mixed"
_TOLD = {
    "model.tensor_model_parallel_size": "tp",
    "model.pipeline_model_parallel_size": "pp",
    "model.context_parallel_size": "cp",
    "train.micro_batch_size": "mbs",
    "train.global_batch_size": "gbs",
    "dataset.seq_length": "seq",
}
"""Fields that recipes choose by themselves, and their flags."""


def _template(root: Node, recipe: str) -> Mapping[str, Mapping[str, object]]:
    return FINE_TUNING if section_of(root) is not None or _FINE_TUNES.search(recipe) else TEMPLATE


def is_override(word: str) -> bool:
    """Whether ``word`` of a command line is an override, and no file."""
    return _WORD.fullmatch(word) is not None and ("=" in word or word.startswith("~"))


def are_overrides(written: Node) -> bool:
    """Whether a file is a mapping of some of ``ConfigContainer``'s fields, without the classes that a run writes."""
    fields = written.mapping
    if not fields or not fields.keys() <= SECTIONS:
        return False
    plain = (name for name, node in fields.items() if not isinstance(node.value, dict) and node.value is not None)
    if {*plain} - {"mixed_precision", "comm_overlap"}:
        return False  # optimizer: adamw is a plan's
    model = fields["model"].mapping if "model" in fields else {}
    if model.keys() & {"base", "name", "family"}:
        return False
    train = fields["train"].mapping if "train" in fields else {}
    return bool(train.keys() & _OF_TRAINING) or any(_OF_MODEL.fullmatch(key) for key in model)


def laid_over(root: Node, words: Sequence[str], origin: Origin = COMMAND_LINE) -> Node:
    """``root`` with the overrides ``words`` in their places, the last of each first in rank."""
    for word in words:
        match = _WORD.fullmatch(word)
        assert match is not None
        sign, section, path, value = match.groups()
        keys = [section, *filter(None, path.split("."))]
        if sign == "~":
            raise PlanError(".".join(keys), ABSENT, "is not read: an override that deletes (~)", origin=origin)
        if section == "mixed_precision" and path and not _is_mapping(root.mapping.get(section)):
            names = [name for name, fields in table.PRECISIONS.items() if fields.get(keys[-1]) == value]
            problem = (
                "is a field of what the recipe says by name; name the precision as a whole, mixed_precision=NAME: "
                f"{', '.join(names or table.PRECISIONS)}"
            )
            raise PlanError(".".join(keys), ABSENT, problem, origin=origin)
        found = parse_yaml(value, ".".join(keys), line=False) if value else Node(None, origin)
        node = Node(found.value, origin, found.text)
        if len(keys) == 2 and keys[1] not in (root.mapping[section].mapping if section in root.mapping else {}):
            check_field(section, keys[1], node)
        root = _placed(root, keys, node)
    return root


def _placed(node: Node, keys: Sequence[str], value: Node) -> Node:
    first, *rest = keys
    if not rest:
        return node.with_items({first: value})
    below = node.mapping.get(first)
    inner = below if below is not None and _is_mapping(below) else Node({}, value.origin)
    return node.with_items({first: _placed(inner, rest, value)})


def _is_mapping(node: Node | None) -> bool:
    return node is not None and isinstance(node.value, dict)


def over_template(root: Node, recipe: str) -> Node:
    """``root`` with what recipes like ``recipe`` begin with below it."""
    for section, fields in _template(root, recipe).items():
        given = root.mapping.get(section, Node({}, root.origin))
        below = {
            name: Node(value, given.origin)
            for name, value in fields.items()
            if isinstance(value, (bool, int, float, str))
        }
        if section == "dataset" and any(said_at(root, path) for path in table.LENGTHS):
            below = {}
        root = root.with_items({section: Node({**below, **given.mapping}, given.origin)})
    return (
        root
        if "mixed_precision" in root.mapping
        else root.with_items({"mixed_precision": Node(PRECISION, root.origin)})
    )


def over_bridge(root: Node, named: str, given: Collection[str]) -> Node:
    """``root`` with what Megatron-Bridge makes of the configuration of the model ``named`` below the fields of
    ``model``; ``given`` are Megatron-LM's arguments that describe it."""
    known = twin(named, Node(named, root.origin)) or named
    fields = next(fields for name, fields in table.BRIDGES.items() if known.startswith(name))
    shared = "--moe-shared-expert-intermediate-size" in given
    made = {name: value for name, value in fields.items() if shared or name != "moe_shared_expert_overlap"}
    return below_model(
        root, {name: one for name, one in made.items() if "--num-experts" in given or name[:4] != "moe_"}
    )


def below_model(root: Node, fields: Mapping[str, object]) -> Node:
    """``root`` with ``fields`` below those of its model."""
    model = root.mapping.get("model", Node({}, root.origin))
    return root.with_items({"model": Node({**Node.of(fields, model.origin).mapping, **model.mapping}, model.origin)})


def model_of(asked: Asked, root: Node) -> Described:
    """The model of ``--model``."""
    named = asked.flags.get("model")
    if not isinstance(named, str):
        problem = (
            "is missing: these are overrides of a recipe, which is Python and not run; name its model: --model NAME"
        )
        missing = [PlanError("model", ABSENT, problem, origin=root.origin)]
        if not asked.names & {"gpus", "dp"}:
            missing.append(root.lacks("hardware.gpus", "is missing: give it as --gpus N"))
        raise together(missing)
    return arguments_of_model(named)


@dataclass(frozen=True, slots=True)
class Described:
    """A model as Megatron-LM's arguments say it."""

    arguments: dict[str, Node]
    family: Family
    """Which script trains it."""
    beside: dict[str, Node]
    """Fields of a plan's model that no argument says: a layer of Megatron-Bridge's own (``OLMoESelfAttention``)."""


def arguments_of_model(named: str) -> Described:
    """The model ``named``."""
    from ...plan.read import read_plan
    from ...plan.resolve import resolve
    from ..megatron.script import write

    plan = resolve(read_plan(None, {"model": named, "framework": "megatron", "gpus": "1"}).plan)
    content, origin = write(plan).content, Origin("--model")
    family = _FAMILIES.get(str(content["script"]))
    if family is None:
        raise PlanError("model", named, "has no provider in Megatron-Bridge; GPT's kin and hybrids have", origin=origin)
    groups = content["arguments"]
    assert isinstance(groups, dict)
    found = {
        name: Node([Node(one, origin) for one in value] if isinstance(value, list) else value, origin)
        for group in _GROUPS
        for name, value in groups.get(group, {}).items()
        if name != "--make-vocab-size-divisible-by"
    }
    over = plan.model.qk_norm_over
    beside = {"qk_norm_over": Node(over, origin)} if plan.model.qk_norm and over == "heads" else {}
    return Described({**found, "--padded-vocab-size": Node(plan.model.vocab, origin)}, family, beside)


_GROUPS = ("MODEL", "EXPERTS", "LATENT", "HYBRID", "LAYERS")
"""Of arguments that Megatron-Core's exporter writes: those that a model's configuration says."""
_FAMILIES: Mapping[str, Family] = {"pretrain_gpt.py": "gpt", "pretrain_hybrid.py": "hybrid"}


def told(root: Node, asked: Asked, recipe: str) -> Note | None:
    """Which of a recipe's own choices no override says, and what is taken; ``recipe`` is its name, where that is
    known."""
    left, template = list[str](), _template(root, recipe)
    for path, flag in _TOLD.items():
        paths, (section, _, field) = table.LENGTHS if path in table.LENGTHS else (path,), path.partition(".")
        if not any(said_at(root, one) for one in paths) and flag not in asked.names and flag in by_flag():
            left.append(f"{flag} {template.get(section, {}).get(field, 1)}")
    if section_of(root) is not None and "dim" not in root.mapping["peft"].mapping and "lora-rank" not in asked.names:
        left.append(f"lora-rank {RANK}")
    if not left and not recipe:
        return None
    what = f"{recipe} is Python, which is not run; what it says beside the overrides is" if recipe else ""
    problem = (
        f"{what or 'not among the overrides, and'} taken as Megatron-Bridge's template of recipes has it"
        f"{': ' if left else ''}{', '.join(left)}; where the recipe says other, give the flags"
    )
    return Note("recipe-not-read", problem)
