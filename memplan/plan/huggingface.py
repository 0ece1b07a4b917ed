"""A Hugging Face ``config.json`` as a model spec. Only data is read: code that it names is never run.

What a configuration leaves out has the default of its class in transformers 5.23
(``models/*/configuration_*.py``); the sizes that every saved configuration carries are required, since
a default would silently be another model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from .errors import ABSENT, PlanError, one_line, shown
from .node import Node, Scalar
from .notes import Note

LARGEST = 2**31
"""Elements in one dimension."""
MOST_LAYERS = 100_000

_REQUIRED = object()
_HEADS_ASSUMED = re.compile(r"(ForCausalLM|LMHeadModel|ForMaskedLM|ForPreTraining|(?<!Heads)Model)$")
"""Classes with the head that is estimated, or with none."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu_new",
    "silu": "swiglu",
    "swish": "swiglu",
}


@dataclass(frozen=True, slots=True)
class _Key:
    """Where a spec field is found: names in order of precedence, and the class's default."""

    names: tuple[str, ...]
    default: object = _REQUIRED


@dataclass(frozen=True, slots=True)
class _Family:
    """How configurations of one ``model_type`` are read."""

    keys: Mapping[str, _Key]
    constants: Mapping[str, Scalar]
    activation: _Key | None = None
    activations: tuple[str, ...] = ()
    refused: Mapping[str, Scalar] = field(default_factory=dict)
    """Settings that change the model in ways that are not modelled, with the value that is."""


def _key(*names: str, default: object = _REQUIRED) -> _Key:
    return _Key(names, default)


_LLAMA_KEYS = {
    "layers": _key("num_hidden_layers"),
    "hidden": _key("hidden_size"),
    "heads": _key("num_attention_heads"),
    "kv_heads": _key("num_key_value_heads", default=None),
    "head_dim": _key("head_dim", default=None),
    "ffn": _key("intermediate_size"),
    "vocab": _key("vocab_size"),
    "positions_max": _key("max_position_embeddings", default=2048),
    "attention_bias": _key("attention_bias", default=False),
    "mlp_bias": _key("mlp_bias", default=False),
    "tied_embeddings": _key("tie_word_embeddings", default=False),
    "attention_dropout": _key("attention_dropout", default=0.0),
}
_LLAMA_CONSTANTS: Mapping[str, Scalar] = {
    "norm": "rmsnorm",
    "positions": "rotary",
    "embedding_dropout": 0.0,
    "hidden_dropout": 0.0,
}
_SILU = _key("hidden_act", default="silu")

FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "gpt2": _Family(
            keys={
                "layers": _key("n_layer", "num_hidden_layers"),
                "hidden": _key("n_embd", "hidden_size"),
                "heads": _key("n_head", "num_attention_heads"),
                "ffn": _key("n_inner", default=None),
                "vocab": _key("vocab_size"),
                "positions_max": _key("n_positions", "max_position_embeddings", default=1024),
                "tied_embeddings": _key("tie_word_embeddings", default=True),
                "embedding_dropout": _key("embd_pdrop", default=0.1),
                "attention_dropout": _key("attn_pdrop", default=0.1),
                "hidden_dropout": _key("resid_pdrop", default=0.1),
            },
            constants={"norm": "layernorm", "positions": "learned"},
            activation=_key("activation_function", default="gelu_new"),
            activations=("gelu", "gelu_new", "gelu_pytorch_tanh"),
            refused={
                "add_cross_attention": False,
                "reorder_and_upcast_attn": False,
                "scale_attn_weights": True,
            },
        ),
        "bert": _Family(
            keys={
                "layers": _key("num_hidden_layers"),
                "hidden": _key("hidden_size"),
                "heads": _key("num_attention_heads"),
                "ffn": _key("intermediate_size"),
                "vocab": _key("vocab_size"),
                "positions_max": _key("max_position_embeddings", default=512),
                "token_types": _key("type_vocab_size", default=2),
                "embedding_dropout": _key("hidden_dropout_prob", default=0.1),
                "attention_dropout": _key("attention_probs_dropout_prob", default=0.1),
                "hidden_dropout": _key("hidden_dropout_prob", default=0.1),
            },
            constants={
                "norm": "layernorm",
                "norm_place": "post",
                "positions": "learned",
                "causal": False,
                "embedding_norm": True,
                "final_norm": False,
                "mlm_head": True,
            },
            activation=_key("hidden_act", default="gelu"),
            activations=("gelu", "gelu_new", "gelu_pytorch_tanh"),
            refused={
                "is_decoder": False,
                "add_cross_attention": False,
                "tie_word_embeddings": True,
                "position_embedding_type": "absolute",
                "chunk_size_feed_forward": 0,
            },
        ),
        "bloom": _Family(
            keys={
                "layers": _key("n_layer", "num_hidden_layers"),
                "hidden": _key("n_embed", "hidden_size"),
                "heads": _key("n_head", "num_attention_heads"),
                "vocab": _key("vocab_size"),
                "positions_max": _key("seq_length", default=2048),
                "tied_embeddings": _key("tie_word_embeddings", default=True),
                "attention_dropout": _key("attention_dropout", default=0.0),
                "hidden_dropout": _key("hidden_dropout", default=0.0),
            },
            constants={
                "norm": "layernorm",
                "positions": "alibi",
                "activation": "gelu",
                "embedding_norm": True,
                "embedding_dropout": 0.0,
            },
        ),
        "llama": _Family(
            keys={**_LLAMA_KEYS, "attention_output_bias": _LLAMA_KEYS["attention_bias"]},
            constants=_LLAMA_CONSTANTS,
            activation=_SILU,
            activations=("silu", "swish"),
        ),
        "mistral": _Family(
            keys={
                **{name: key for name, key in _LLAMA_KEYS.items() if not name.endswith("_bias")},
                "kv_heads": _key("num_key_value_heads", default=8),
                "positions_max": _key("max_position_embeddings", default=131_072),
                "sliding_window": _key("sliding_window", default=4096),
            },
            constants={
                **_LLAMA_CONSTANTS,
                "attention_bias": False,
                "attention_output_bias": False,
                "mlp_bias": False,
            },
            activation=_SILU,
            activations=("silu", "swish"),
        ),
        "qwen3": _Family(
            keys={
                **{name: key for name, key in _LLAMA_KEYS.items() if name != "mlp_bias"},
                "attention_output_bias": _LLAMA_KEYS["attention_bias"],
                "kv_heads": _key("num_key_value_heads", default=32),
                "head_dim": _key("head_dim", default=128),
                "positions_max": _key("max_position_embeddings", default=32_768),
            },
            constants={**_LLAMA_CONSTANTS, "mlp_bias": False, "qk_norm": True},
            activation=_SILU,
            activations=("silu", "swish"),
            refused={"use_sliding_window": False},
        ),
    }
)
"""What is known, by ``model_type``."""


def spec_of_config(config: Node, path: Path) -> Node:
    """The mapping of spec fields that the configuration in ``path`` describes."""
    family_name, family = _family(config)
    _refuse_what_is_not_modelled(config, family)
    origin = config.origin
    items = {name: Node(value, origin) for name, value in family.constants.items()}
    items["name"] = Node(_name(path), origin)
    items["family"] = Node(family_name, origin)
    items["source"] = Node(str(path), origin)
    for name, key in family.keys.items():
        items[name] = _value(config, name, key)
    if family.activation is not None:
        items["activation"] = _activation(config, family.activation, family.activations)
    return Node(_with_derived_sizes(items, config), origin)


def warnings_of_config(config: Node, path: Path) -> tuple[Note, ...]:
    """What to tell about a configuration that was read but is more than its ``model_type``."""
    notes = []
    if "auto_map" in config.mapping:
        read = f"read as a plain {config.mapping['model_type'].plain()}"
        message = f"{path} names code of its own (auto_map), which was not run: it is {read}"
        notes.append(Note("custom-code", message))
    other = [name for name in _architectures(config) if not _HEADS_ASSUMED.search(name)]
    if other:
        message = f"{path} is a {shown(other[0])}: a language-model head and its loss are assumed in place of its own"
        notes.append(Note("head-assumed", one_line(message)))
    return tuple(notes)


def _architectures(config: Node) -> list[str]:
    """Names of the classes that the configuration was saved from."""
    node = config.mapping.get("architectures")
    items = node.value if node is not None and isinstance(node.value, list) else []
    return [item.value for item in items if isinstance(item.value, str)]


def _family(config: Node) -> tuple[str, _Family]:
    node = config.mapping.get("model_type")
    known = f"known are {', '.join(FAMILIES)}"
    if node is None:
        raise PlanError("model_type", ABSENT, f"is missing; {known}", origin=config.origin)
    if not isinstance(node.value, str) or node.value not in FAMILIES:
        code = " (code named in auto_map is never run)" if "auto_map" in config.mapping else ""
        problem = f"is not an architecture that is modelled{code}; {known}"
        raise PlanError("model_type", node.plain(), problem, origin=node.origin)
    return node.value, FAMILIES[node.value]


def _name(path: Path) -> str:
    stem = path.resolve().parent.name if path.name == "config.json" else path.stem
    return stem.lower()[:100] or "model"


def _refuse_what_is_not_modelled(config: Node, family: _Family) -> None:
    for name, modelled in family.refused.items():
        node = config.mapping.get(name)
        if node is not None and node.value is not None and node.value != modelled:
            wanted = str(modelled).lower()
            raise PlanError(name, node.plain(), f"is not modelled; only {wanted} is", origin=node.origin)
    if family.constants.get("mlm_head"):
        _refuse_next_sentences(config)
    _refuse_experts(config)
    quantised = config.mapping.get("quantization_config")
    if quantised is not None and quantised.value is not None:
        problem = "is set: training on a quantised checkpoint is not modelled; remove it to plan the model itself"
        raise PlanError("quantization_config", ABSENT, problem, origin=quantised.origin)
    layer_types = config.mapping.get("layer_types")
    if layer_types is not None and isinstance(layer_types.value, list):
        kinds = sorted({str(item.value) for item in layer_types.value})
        if len(kinds) > 1:
            problem = f"mixes {', '.join(kinds)}; only models whose layers are all alike are modelled"
            raise PlanError("layer_types", ABSENT, problem, origin=layer_types.origin)


def _refuse_next_sentences(config: Node) -> None:
    """BERT's pre-training has a second head and loss."""
    for name in _architectures(config):
        if name.endswith("ForPreTraining"):
            problem = "is not modelled: it adds a next-sentence head and loss; BertForMaskedLM is"
            raise PlanError("architectures", name, problem, origin=config.mapping["architectures"].origin)


def _refuse_experts(config: Node) -> None:
    for name in _EXPERTS:
        node = config.mapping.get(name)
        if node is not None and isinstance(node.value, int) and node.value > 1:
            problem = "must be 1 or left out: a mixture of experts is not modelled; dense models are"
            raise PlanError(name, node.value, problem, origin=node.origin)


def _value(config: Node, spec_field: str, key: _Key) -> Node:
    name = next((name for name in key.names if name in config.mapping), key.names[0])
    node = config.mapping.get(name)
    if node is None:
        if key.default is _REQUIRED:
            raise PlanError(name, ABSENT, f"is missing (the model's {spec_field})", origin=config.origin)
        assert key.default is None or isinstance(key.default, (bool, int, float))
        return Node(key.default, config.origin)
    if node.value is None and (key.default is None or spec_field in _MAY_BE_NULL):
        return node
    allowed, accepts = _RULES.get(spec_field, _SIZE_RULE)
    if not accepts(node.value):
        raise PlanError(name, node.plain(), f"must be {allowed}", origin=node.origin)
    return node


_Rule = tuple[str, Callable[[object], bool]]


def _whole(least: int, most: int) -> _Rule:
    return f"a whole number from {least} to {most:,}", lambda value: type(value) is int and least <= value <= most


_MAY_BE_NULL = ("sliding_window", "kv_heads")
_SIZE_RULE = _whole(1, LARGEST)
_PROBABILITY_RULE: _Rule = (
    "a probability: at least 0 and less than 1",
    lambda value: type(value) in (int, float) and 0 <= value < 1,  # type: ignore[operator]
)
_SWITCH_RULE: _Rule = ("true or false", lambda value: isinstance(value, bool))
_RULES: Mapping[str, _Rule] = {
    "layers": _whole(1, MOST_LAYERS),
    "token_types": _whole(0, LARGEST),
    **dict.fromkeys(("embedding_dropout", "attention_dropout", "hidden_dropout"), _PROBABILITY_RULE),
    **dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias", "tied_embeddings"), _SWITCH_RULE),
}


def _activation(config: Node, key: _Key, modelled: tuple[str, ...]) -> Node:
    name = key.names[0]
    node = config.mapping.get(name)
    value = key.default if node is None else node.value
    origin = config.origin if node is None else node.origin
    if not isinstance(value, str) or value not in modelled:
        problem = f"is not an activation that is modelled here; {', '.join(modelled)} are"
        raise PlanError(name, value, problem, origin=origin)
    return Node(_ACTIVATIONS[value], origin)


def _with_derived_sizes(items: dict[str, Node], config: Node) -> dict[str, Node]:
    hidden, heads = items["hidden"].value, items["heads"].value
    assert isinstance(hidden, int)
    assert isinstance(heads, int)
    for name in ("kv_heads", "head_dim", "ffn"):
        if name in items and items[name].value is not None:
            continue
        if name == "head_dim" and hidden % heads:
            problem = f"must be divided by the number of attention heads ({heads})"
            key = next(key for key in ("n_embed", "n_embd", "hidden_size") if key in config.mapping)
            raise PlanError(key, hidden, problem, origin=items["hidden"].origin)
        derived = {"kv_heads": heads, "head_dim": hidden // heads, "ffn": 4 * hidden}[name]
        items[name] = Node(derived, items["hidden"].origin)
    return items
