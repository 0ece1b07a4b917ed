"""``--heterogeneous-layers-config-path`` and ``--heterogeneous-layers-config-encoded-json``: layers that differ, in a
file in the form of Llama-Nemotron's ``config.json``, or as that text (``arguments.py``,
``validate_model_config_args_from_heterogeneous_config``; ``gpt_builders.py``)."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ...plan.block_configs import KEY, blocks_of, require, written
from ...plan.errors import ABSENT, Node, PlanError
from ...plan.plan import Plan
from ...plan.spec import block_of
from ...plan.text import parse_yaml, read_text
from ..settings import Reader, Row, elsewhere

PATH, TEXT = "--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json"
ALIKE = "layers-alike"

Wanted = tuple[str, object, object]
"""An argument, its value, and what the configuration says that it must be."""


def _whole(value: object) -> bool:
    return type(value) is int and value > 0


def _number(value: object) -> bool:
    return type(value) in (int, float)


def read(reader: Reader) -> None:
    """The text counts before the file, but layers differ only where there is a path, too."""
    settings, building = reader.settings, reader.building
    names = [name for name in (TEXT, PATH) if settings.has(name)]
    if not names:
        return
    name = names[0]
    if reader.context.family != "gpt":
        raise settings.wrong(name, "must be left out: layers that differ are modelled only for pretrain_gpt.py")
    config = _configuration(reader, name)
    _check(reader, config, name)
    if PATH not in names:
        message = f"{TEXT} without {PATH}: Megatron checks it, and builds layers that are all alike"
        building.note(ALIKE, message)
        building.because(TEXT, f"layers are all alike without {PATH}")
        return
    for other in ("--num-experts", "--mtp-num-layers", "--multi-latent-attention"):
        if settings.has(other):
            raise settings.wrong(other, f"must be left out with {PATH}: the combination is refused or not modelled")
    sizes = (building.size(f"model.{size}") for size in ("heads", "hidden", "kv_heads", "ffn"))
    blocks = blocks_of(config, *sizes)
    widest = max(block_of(str(block.value)).ffn for block in blocks)
    building.items["model.ffn"] = Node(widest or building.size("model.ffn"), settings.where(name))
    building.put("model.layer_blocks", Node(blocks, settings.where(name)), *names)


def _configuration(reader: Reader, name: str) -> Node:
    place = reader.settings.word(name)
    if name == TEXT:
        node = parse_yaml(str(place.value), f"{TEXT}.json", line=False)
    else:
        path = reader.context.found(place.value)
        if path is None:
            raise place.wrong(name, "is not here: the model's layers are in it")
        node = parse_yaml(read_text(path, name), str(path))
    if not node.mapping:
        raise place.wrong(name, f"must be a mapping in JSON, with {KEY}")
    return node


def _check(reader: Reader, config: Node, name: str) -> None:
    """What Megatron compares with its arguments, and stops where they differ."""
    require(config, "hidden_act", "silu", lambda value: value == "silu")
    for argument, given, wanted in _wanted(reader, config):
        if given != wanted:
            shown = ABSENT if given in (None, False) else given
            plain = int(wanted) if isinstance(wanted, float) and wanted.is_integer() else wanted
            must = "be given" if wanted is True else "be left out" if wanted is False else f"be {plain}"
            problem = f"must {must}, as {name} says; Megatron stops where they differ"
            raise PlanError(argument, shown, problem, origin=reader.settings.where(argument))


def _wanted(reader: Reader, config: Node) -> Iterator[Wanted]:
    settings, items = reader.settings, reader.building.items
    heads = require(config, "num_attention_heads", "a whole number", _whole)
    theta = require(config, "rope_theta", "a number", _number)
    scaling = require(config, "rope_scaling", "a mapping with factor", lambda value: isinstance(value, dict))
    factor = require(scaling, "factor", "a number", _number)
    for switched in ("--swiglu", "--group-query-attention", "--use-rope-scaling", "--use-rotary-position-embeddings"):
        yield switched, settings.has(switched), True
    yield "--normalization", _word(reader, "--normalization", "LayerNorm"), "RMSNorm"
    yield "--position-embedding-type", _word(reader, "--position-embedding-type", "learned_absolute"), "rope"
    yield "--rotary-percent", _given(reader, "--rotary-percent", 1.0), 1.0
    sizes = (("--num-layers", "layers", "num_hidden_layers"), ("--hidden-size", "hidden", "hidden_size"))
    for argument, field, key in sizes:
        yield argument, items[f"model.{field}"].value, require(config, key, "a whole number", _whole).value
    yield "--num-attention-heads", items["model.heads"].value, heads.value
    tied = require(config, "tie_word_embeddings", "true or false", lambda value: isinstance(value, bool))
    yield (
        "--untie-embeddings-and-output-weights", settings.has("--untie-embeddings-and-output-weights"), not tied.value
    )  # fmt: skip
    yield "--rotary-base", _given(reader, "--rotary-base", 10000), theta.value
    yield "--rope-scaling-factor", _given(reader, "--rope-scaling-factor", 8.0), factor.value
    yield "--num-query-groups", items["model.kv_heads"].value, heads.whole // _heads_in_group(config)


def _heads_in_group(config: Node) -> int:
    """Of every layer that says them, which must be equal."""
    key, found = "n_heads_in_group", dict[object, Node]()
    blocks = config.mapping.get(KEY)
    for at, block in enumerate(blocks.value if blocks is not None and isinstance(blocks.value, list) else ()):
        node = block.at(f"attention.{key}")
        if node is None:
            raise block.lacks(f"{KEY}[{at}].attention.{key}", "is missing, and Megatron's parser asks for it")
        if node.value is not None:
            found.setdefault(node.value, node)
    if len(found) > 1:
        value, node = list(found.items())[1]
        problem = f"must be {next(iter(found))}, as in other layers: Megatron's parser refuses others"
        raise PlanError(f"{KEY}.attention.{key}", str(value), problem, origin=node.origin)
    size = next(iter(found), None)
    if not isinstance(size, int) or size < 1:
        raise config.lacks(f"{KEY}.attention.{key}", "must be a whole number in one layer at least")
    return size


def _word(reader: Reader, name: str, default: str) -> object:
    node = reader.settings.word(name)
    return default if node is None else node.value


def _given(reader: Reader, name: str, default: float) -> object:
    node = reader.settings.number(name)
    return default if node is None else node.value


# -- written -------------------------------------------------------------------------------------------


def differs(plan: Plan) -> bool:
    return bool(plan.model.layer_blocks)


def _text(plan: Plan) -> str:
    """As Megatron's parser wants it, with its own defaults of rotary positions."""
    model = plan.model
    return json.dumps(
        {
            "hidden_act": "silu",
            "num_hidden_layers": model.layers,
            "hidden_size": model.hidden,
            "num_attention_heads": model.heads,
            "tie_word_embeddings": model.tied_embeddings,
            "rope_theta": 10000,
            "rope_scaling": {"factor": 8.0},
            KEY: written(model.layer_blocks, model.heads),
        },
        separators=(",", ":"),
    )


ROWS = (
    Row(PATH, "model.layer_blocks", "MODEL", "word", read=read, value=lambda _: "block_configs.json", when=differs),
    Row(TEXT, "model.layer_blocks", "MODEL", "word", read=elsewhere, value=_text, when=differs),
)

BESIDE = ("--use-rope-scaling", "--use-rotary-position-embeddings")
"""Switches that Megatron asks for beside layers that differ."""
