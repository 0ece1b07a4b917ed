"""Megatron-LM's configuration in YAML (``--yaml-cfg``), which stands in place of its arguments.

``megatron/training/yaml_arguments.py``: fields of ``TransformerConfig`` under ``language_model``, those of
``ModelParallelConfig`` under ``model_parallel``, and all other arguments by their names, with underscores. Gradients
are in fp32 with bf16 (``validate_yaml``). Read as Megatron-Bridge's configuration is, which has the same fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ...plan.errors import Node, PlanError
from ...plan.notes import Note
from ...plan.text import parse_yaml, text_at
from ..files import Words, words_of_node
from ..megatron_bridge.arguments import arguments
from ..megatron_bridge.table import BY_ITSELF, WITHOUT_ARGUMENT
from ..settings import Settings

ARGUMENT = "--yaml-cfg"
_ACTIVATIONS = {"swiglu": ("silu", True), "squaredrelu": ("squared_relu", False), "gelu": ("gelu", False)}


def in_place_of(words: Words, strict: bool) -> tuple[Words, tuple[Note, ...]]:
    """``words`` with the arguments of the file that they name in place of their own, if they do, and what is left
    out."""
    given = Settings(words.given, words.ledger, words.origin).word(ARGUMENT)
    if given is None:
        return words, ()
    place = str(given.value)
    path = words.folder / place
    if not path.is_file():
        problem = "is not a file here: it holds all arguments of the training"
        raise PlanError(ARGUMENT, place, problem, origin=given.origin)
    text, name = text_at(str(path))
    root = parse_yaml(text, name)
    if "language_model" not in root.mapping:
        problem = "has no section language_model: this is no configuration of Megatron-LM's --yaml-cfg"
        raise PlanError(ARGUMENT, place, problem, origin=root.origin)
    named, notes = arguments(Node(_sections(root), root.origin), strict)
    found = words_of_node(Node({"arguments": Node(named, root.origin)}, root.origin), "megatron", WITHOUT_ARGUMENT)
    return replace(words, given=found.given, loose=[]), notes


def _sections(root: Node) -> dict[str, Node]:
    """Those of Megatron-Bridge that say the same."""
    plain = {name: node for name, node in root.mapping.items() if not node.mapping}
    parallel = root.mapping.get("model_parallel", root).mapping
    model = {**root.mapping["language_model"].mapping, **parallel}
    model |= {name: node for name, node in plain.items() if name in BY_ITSELF}
    model |= {"should_pad_vocab": Node(True, root.origin), **dict(_activation(model))}
    if "tokenizer_type" in plain and plain["tokenizer_type"].value != "NullTokenizer":
        model.pop("vocab_size", None)  # the tokenizer's file says
    bf16 = parallel.get("bf16")
    reduced = {"grad_reduce_in_fp32": Node(True, bf16.origin)} if bf16 is not None and bf16.value is True else {}
    return {
        "model": Node(model, root.origin),
        "train": Node(plain, root.origin),
        "ddp": Node(reduced, root.origin),
    }


def _activation(model: Mapping[str, Node]) -> Iterator[tuple[str, Node]]:
    node = model.get("activation_func")
    if node is None:
        return
    if str(node.value) not in _ACTIVATIONS:
        raise node.wrong("language_model.activation_func", f"must be one of {', '.join(_ACTIVATIONS)}")
    function, gated = _ACTIVATIONS[str(node.value)]
    yield "activation_func", Node({"_target_": Node(function, node.origin)}, node.origin)
    yield "gated_linear_unit", Node(gated, node.origin)
