"""A Hugging Face ``config.json`` as a model spec. Only data is read: code that it names is never run.

What each family's configuration says, and its defaults: ``families``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..families import families, family as family_of
from ..families.base import REQUIRED, Config, Key
from ..values import pattern
from .block_configs import KEY as BLOCKS, blocks_of
from .config_layers import (
    LARGEST,
    MIXED,
    SIZE_RULE,
    Rule,
    dense_layers_of,
    hybrid_layers,
    of_full_layers,
    whole,
)
from .errors import ABSENT, Node, PlanError, one_line
from .hub import config_name
from .notes import Note, further_layers, head_assumed, text_part
from .spec import MOST_LAYERS, block_of

_HEADS_ASSUMED = pattern(r"(ForCausalLM|LMHeadModel|ForMaskedLM|ForPreTraining|(?<!Heads)(?<!Reward)Model)$")
"""Classes with the head that is estimated, or with none."""
_CLASSIFIER = pattern(r"ForSequenceClassification$")
ROTARY_FEATURES = "rotary_dim"
"""It names the features that rotary positions turn, not their part of a head."""
_SOUND = "audio_config"
"""What reads sound beside a part that reads text."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_fast",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "swiglu",
    "swish": "swiglu",
}


def spec_of_config(config: Node, path: Path) -> Node:
    """The mapping of spec fields that the configuration in ``path`` describes."""
    whole, (family_name, config, family) = config, _read_as(config)
    _refuse_quantised(whole, family)
    _refuse_what_is_not_modelled(config, family)
    origin = config.origin
    items = {name: Node(value, origin) for name, value in family.constants.items()}
    items["name"] = Node(_name(path), origin)
    items["family"] = Node(family_name, origin)
    items["source"] = Node(one_line(str(path)), origin)
    for name, key in family.keys.items():
        items[name] = _value(config, name, key)
    if isinstance(items.get("blocks", Node(None, origin)).value, bool):
        items["blocks"] = Node("parallel" if items["blocks"].value else "sequential", items["blocks"].origin)
    if family.activation is not None:
        items["activation"] = _activation(config, family.activation, family.activations, gated=family.gated_gelu)
    if "mamba_heads" in items:
        items |= hybrid_layers(items)
    for name, other in _INTERVALS.items():
        if name in items:
            items[name] = _interval(config, items[name], other)
    if family.keys.keys() >= _WINDOWED:
        items["nope_interval"] = _of_windowed(config, items["sliding_window"])
    if family.layers_differ:
        items |= _blocks(items, config)
    if "mixed" in items:
        items |= _of_experts(items, config, family)
    if "full_head_dim" in items:
        items |= of_full_layers(items, config)
    items = _with_derived_sizes(items, config)
    if "mamba_heads" in items:
        items |= _mixture(items)
    elif "experts" in items:
        items |= _mixture(items)
        items["dense_layers"] = dense_layers_of(config, items)
    if (labels := _labels(config, family_name)) is not None:
        items["labels"] = labels
    if (rotary := family.keys.get("rotary_fraction")) is not None and _found(config, rotary) == ROTARY_FEATURES:
        items = _with_rotary_fraction(items)
    _refuse_another_number_of_layers(config, items["layers"])
    return Node(items, origin)


def _labels(config: Node, family: str) -> Node | None:
    """How many labels a classifier of sequences has, where the configuration was saved from one: the pairs of
    ``id2label``, 2 unless it says (``configuration_utils.py``); several of one sequence are refused."""
    classifies = family_of(family).classifies and any(map(_CLASSIFIER.search, _architectures(config)[:1]))
    if not classifies:
        return None
    kind = config.mapping.get("problem_type")
    if kind is not None and kind.value == "multi_label_classification":
        problem = "is not modelled: one label of a sequence is, or one score"
        raise PlanError("problem_type", kind.plain(), problem, origin=kind.origin)
    names, number = config.mapping.get("id2label"), config.mapping.get("num_labels")
    if names is not None and isinstance(names.value, dict) and names.value:
        return Node(len(names.value), names.origin)
    return (
        number if number is not None and number.value is not None else Node(2, config.mapping["architectures"].origin)
    )


def warnings_of_config(config: Node, path: Path) -> tuple[Note, ...]:
    """What to tell about a configuration that was read but is more than its ``model_type``."""
    notes = []
    name, part, family = _read_as(config)
    if part is not config:
        notes.append(text_part(str(path), "sound" if _SOUND in config.mapping else "images"))
        notes += _tied_otherwise(config, part, family, path)
    notes += _further(part, family, path)
    if (method := _quantised(config) or _quantised(part)) is not None and method in family.published_in:
        message = f"{path} names weights that are published in {method}: training in 16 bits casts them back"
        notes.append(Note("published-quantised", one_line(message)))
    if "auto_map" in config.mapping:
        read = f"read as a plain {config.mapping['model_type'].plain()}"
        message = f"{path} names code of its own (auto_map), which was not run: it is {read}"
        notes.append(Note("custom-code", message))
    other = [name for name in _architectures(config) if part is config and not _HEADS_ASSUMED.search(name)]
    if other and _labels(config, name) is None:
        notes.append(head_assumed(str(path), other[0]))
    return tuple(notes)


def _tied_otherwise(config: Node, part: Node, family: Config, path: Path) -> list[Note]:
    """What is told where the whole model ties its head, or does not, and the class of the text part alone would not, or
    would: each looks at its own configuration (``PreTrainedModel.get_expanded_tied_weights_keys``)."""
    whole, key = config.mapping.get("tie_word_embeddings"), family.keys["tied_embeddings"]
    alone = _value(part, "tied_embeddings", key)
    if whole is None or not isinstance(whole.value, bool) or whole.value is alone.value:
        return []
    said, own = (f"{key.names[0]} = {str(value).lower()}" for value in (whole.value, alone.value))
    message = f"{path} says {said} of the whole model, and its text part alone has {own}: --tied-embeddings decides"
    return [Note("text-part-tied", one_line(message))]


def _further(config: Node, family: Config, path: Path) -> list[Note]:
    """What is told of layers that predict further tokens, where no class of the family in transformers has them."""
    nodes = {name: config.mapping.get(name) for name in ("mtp_num_hidden_layers", "num_nextn_predict_layers")}
    return [
        further_layers(str(path), name, node.value)
        for name, node in nodes.items()
        if "mtp_layers" not in family.keys and node is not None and isinstance(node.value, int) and node.value > 0
    ]


def _architectures(config: Node) -> list[str]:
    """Names of the classes that the configuration was saved from."""
    node = config.mapping.get("architectures")
    items = node.value if node is not None and isinstance(node.value, list) else []
    return [item.value for item in items if isinstance(item.value, str)]


def known_types() -> tuple[str, ...]:
    """Every ``model_type`` that is read."""
    return tuple(_by_type())


def _by_type() -> dict[str, str]:
    """The family of every ``model_type``."""
    return {one.config.model_type or one.name: one.name for one in families() if one.config is not None}


def _family(config: Node) -> tuple[str, Config]:
    node = config.mapping.get("model_type")
    found = family_of(node.value).config if node is not None and isinstance(node.value, str) else None
    if node is not None and found is not None and found.model_type in ("", node.value):
        return str(node.value), found
    types = _by_type()
    if node is not None and (name := types.get(str(node.value))) is not None and (read := family_of(name).config):
        return name, read
    part = config.at("text_config.model_type")
    inner = types.get(str(part.value), "") if part is not None else ""
    its = family_of(inner).config
    if node is not None and its is not None and not its.constants.get("mlm_head"):  # which reads what others write
        return str(node.value), Config(keys={}, constants={}, text_part=inner)
    known = f"known are {', '.join(types)}"
    if node is None:
        raise config.lacks("model_type", f"is missing; {known}")
    code = " (code named in auto_map is never run)" if "auto_map" in config.mapping else ""
    raise node.wrong("model_type", f"is not an architecture that is modelled{code}; {known}")


def _read_as(config: Node) -> tuple[str, Node, Config]:
    """The family of what is planned, its configuration, which may be a part of ``config``, and how that is read."""
    name, family = _family(config)
    return (family.text_part, *_text_part(config, family)) if family.text_part else (name, config, family)


def _text_part(config: Node, family: Config) -> tuple[Node, Config]:
    """The configuration of what reads text, and how it is read."""
    part, read = config.mapping.get("text_config"), family_of(family.text_part).config
    assert read is not None
    if part is None or not isinstance(part.value, dict):
        raise config.lacks("text_config", f"must be a mapping: the {family.text_part} of the model")
    return part, read


QUANTISED = "is set: training on a quantised checkpoint is not modelled; remove it (adapters on it: --quantisation)"


def _quantised(config: Node) -> str | None:
    """How the weights that ``config`` was published with are quantised."""
    node = config.at("quantization_config.quant_method")
    return node.value if node is not None and isinstance(node.value, str) else None


def _name(path: Path) -> str:
    return one_line(config_name(path).lower())[:100] or "model"


def _refuse_what_is_not_modelled(config: Node, family: Config) -> None:
    for name, modelled in family.refused.items():
        node = config.at(name)
        if node is not None and node.value is not None and node.value != modelled:
            wanted = "null" if modelled is None else str(modelled).lower()
            given = ABSENT if isinstance(node.value, dict | list) else node.plain()
            raise PlanError(name, given, f"is not modelled; only {wanted} is", origin=node.origin)
    _refuse_other_than_wanted(config, family)
    _refuse_narrow_embedding(config)
    if family.constants.get("mlm_head"):
        _refuse_next_sentences(config)
    if "experts" not in family.keys:
        _refuse_experts(config)
    _refuse_quantised(config, family)
    _refuse_other_layer_types(config, family)


def _refuse_quantised(config: Node, family: Config) -> None:
    """What stands beside the part that reads text holds for the whole model."""
    quantised = config.mapping.get("quantization_config")
    if quantised is not None and quantised.value is not None and _quantised(config) not in family.published_in:
        raise quantised.lacks("quantization_config", QUANTISED)


def _refuse_other_than_wanted(config: Node, family: Config) -> None:
    """Settings of which the default is not modelled say what is."""
    for name, modelled in family.wanted.items():
        node, only = config.mapping.get(name), " or ".join(map(str, modelled))
        if node is None:
            raise config.lacks(name, f"is missing; only {only} is modelled")
        items = node.value if isinstance(node.value, list) else [node]
        if others := [item for item in items if item.value not in modelled]:
            raise others[0].wrong(name, f"is not modelled; only {only} is")


def _refuse_other_layer_types(config: Node, family: Config) -> None:
    """Layers are all alike, or have a sliding window in turn, from the first, or positions but for every n-th."""
    layer_types = config.mapping.get("layer_types")
    if family.keys.keys() & _INTERVALS.keys():
        return
    if family.keys.keys() >= _WINDOWED:
        return
    if "nope_interval" in family.keys:
        _refuse_other_positions(config, family)
        return
    if layer_types is None or not isinstance(layer_types.value, list):
        return
    types = [str(item.value) for item in layer_types.value]
    if family.constants.get("alternating_windows"):
        if types != [("sliding_attention", "full_attention")[i % 2] for i in range(len(types))]:
            raise layer_types.lacks(
                "layer_types", "is not modelled; only sliding_attention and full_attention in turn are"
            )
    elif len(set(types)) > 1:
        raise layer_types.lacks(
            "layer_types", f"mixes {', '.join(sorted(set(types)))}; only models whose layers are all alike are modelled"
        )


def _refuse_another_number_of_layers(config: Node, layers: Node) -> None:
    """As transformers does (``PreTrainedConfig.validate_layer_type``)."""
    kinds = config.mapping.get("layer_types")
    if kinds is not None and isinstance(kinds.value, list) and len(kinds.value) != layers.value:
        raise kinds.lacks("layer_types", f"must name all {layers.plain()} layers, not {len(kinds.value)}")


_INTERVALS = {"linear_interval": "linear_attention", "full_interval": "sliding_attention"}
"""Fields that say every how many layers one has full attention, and what the others have."""


_WINDOWED = {"nope_interval", "sliding_window"}
"""Fields of a family whose layers without positions are those without a window."""


def _of_windowed(config: Node, window: Node) -> Node:
    """Every how many layers one has neither window nor positions; 0 where none has a window, and all turn."""
    pattern = config.mapping.get("sliding_window_pattern", Node(4, config.origin))
    named = config.mapping.get("layer_types")
    kinds = named.value if named is not None and isinstance(named.value, list) else []
    if window.value is None:
        if named is not None and any(str(one.value) != "full_attention" for one in kinds):
            raise named.lacks("layer_types", "must be only full_attention where sliding_window is null")
        return Node(0, window.origin)
    allowed, accepts = whole(1, MOST_LAYERS)
    if not kinds and not accepts(pattern.value):
        raise pattern.wrong("sliding_window_pattern", f"must be {allowed} where layer_types is missing")
    return _interval(config, pattern, "sliding_attention")


def _interval(config: Node, given: Node, other: str) -> Node:
    """Every how many layers one has full attention, the others ``other``: as ``layer_types`` says, if it does."""
    node = config.mapping.get("layer_types")
    if node is None or not isinstance(node.value, list):
        return given
    full = [str(one.value) == "full_attention" for one in node.value]
    interval = full.index(True) + 1 if True in full else len(full) + 1
    known = all(str(one.value) in ("full_attention", other) for one in node.value)
    if not known or full != [(layer + 1) % interval == 0 for layer in range(len(full))]:
        raise node.lacks(
            "layer_types", f"is not modelled; only full_attention in every n-th layer, and {other} in the others, is"
        )
    return Node(interval, node.origin)


def _refuse_other_positions(config: Node, family: Config) -> None:
    """Layers without positions come at the interval that the configuration says, and see all tokens."""
    interval = _value(config, "nope_interval", family.keys["nope_interval"]).whole
    tuned = config.mapping.get("attn_temperature_tuning")
    if tuned is not None and not tuned.value:
        raise tuned.wrong(
            "attn_temperature_tuning",
            "is not modelled; only layers without positions whose queries are scaled by positions are",
        )
    turned = "chunked_attention" if "attention_chunk" in family.keys else "full_attention"
    for name, kinds in (("no_rope_layers", (0, 1)), ("layer_types", ("full_attention", turned))):
        node = config.mapping.get(name)
        given = [one.value for one in node.value] if node is not None and isinstance(node.value, list) else []
        if node is not None and given and given != [kinds[bool((i + 1) % interval)] for i in range(len(given))]:
            raise node.lacks(
                name, f"is not modelled; only every {interval}th layer without positions (no_rope_layer_interval) is"
            )


def _refuse_narrow_embedding(config: Node) -> None:
    """OPT 350M's embedding is narrower than its layers."""
    width, hidden = config.mapping.get("word_embed_proj_dim"), config.mapping.get("hidden_size")
    if width is not None and hidden is not None and width.value not in (None, hidden.value):
        raise width.wrong("word_embed_proj_dim", f"is not modelled; only the hidden size ({hidden.plain()}) is")


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
            raise node.wrong(name, "must be 1 or left out: a mixture of experts is not modelled; dense models are")


GREEDY = "greedy"
"""DeepSeek V2's choice of experts (``topk_method``) that knows no groups, whatever their number."""


def _mixture(items: dict[str, Node]) -> dict[str, Node]:
    """What follows from others: shared experts are as wide as routed ones, one group is none, and scores that are
    normalised over the chosen experts are those of a softmax over them alone."""
    found: dict[str, Node] = {}
    if (normalises := items.pop("router_normalises", None)) is not None:
        found["router_score_first"] = Node(not normalises.value, normalises.origin)
    if (shared := items.pop("shared_experts", None)) is not None:
        width = items["expert_ffn"].whole
        found["shared_expert_ffn"] = Node(width * shared.value if isinstance(shared.value, int) else 0, shared.origin)
    for name in ("router_groups", "router_group_top_k", "latent_q_rank", "router_aux_loss", "expert_latent"):
        if name in items and items[name].value is None:
            found[name] = Node(0, items[name].origin)
    if "router_loss" in items and items["router_loss"].value is None:
        found["router_loss"] = Node(False, items["router_loss"].origin)
    method = items.pop("router_method", None)
    if method is not None and method.value != GREEDY and items["router_groups"].value in (None, 1):
        raise method.wrong("topk_method", f"needs groups of experts, n_group above 1; without groups it is {GREEDY}")
    one = "router_groups" in items and items["router_groups"].value == 1
    if one or (method is not None and method.value == GREEDY):
        found["router_groups"] = found["router_group_top_k"] = Node(0, items["router_groups"].origin)
    return found


def _blocks(items: dict[str, Node], config: Node) -> dict[str, Node]:
    """Sizes of each layer; the model has those of the first that has them, and the widest."""
    heads, hidden = items["heads"].whole, items["hidden"].whole
    found = blocks_of(config, heads, hidden, None, None)
    each = [block_of(str(one.value)) for one in found]
    widest = max(one.ffn for one in each) or 4 * hidden
    groups = next((one.kv_heads for one in each if one.kv_heads), heads)
    origin = config.mapping[BLOCKS].origin
    return {"layer_blocks": Node(found, origin), "kv_heads": Node(groups, origin), "ffn": Node(widest, origin)}


def _of_experts(items: dict[str, Node], config: Node, family: Config) -> dict[str, Node]:
    """Sizes of experts, which count only where a switch says that there are some."""
    mixed, names = items.pop("mixed"), ("experts", "expert_top_k", "expert_ffn")
    for name in names if mixed.value else ():
        if items[name].value is None:
            raise config.lacks(_found(config, family.keys[name]), f"is missing (the model's {name})")
    return {} if mixed.value else {name: Node(0, mixed.origin) for name in names}


def _found(config: Node, key: Key) -> str:
    """The name by which the configuration says what ``key`` reads, or the first of them."""
    return next((name for name in key.names if config.at(name) is not None), key.names[0])


def _value(config: Node, spec_field: str, key: Key) -> Node:
    name = _found(config, key)
    node = config.at(name)
    if node is None:
        if key.default is REQUIRED:
            raise config.lacks(name, f"is missing (the model's {spec_field})")
        assert key.default is None or isinstance(key.default, (bool, int, float, str))
        return Node(key.default, config.origin)
    if node.value is None and (key.default is None or spec_field in _MAY_BE_NULL):
        return node
    allowed, accepts = _RULES.get(name, _RULES.get(spec_field, SIZE_RULE))
    if not accepts(node.value):
        raise node.wrong(name, f"must be {allowed}{', not text' if isinstance(node.value, str) else ''}")
    return node


def _is_pattern(value: object) -> bool:
    return isinstance(value, (str, list)) and 0 < len(value) <= MOST_LAYERS


_MAY_BE_NULL = (
    "sliding_window", "kv_heads", "attention_softcap", "logit_softcap", "latent_q_rank", "router_groups",
    "router_group_top_k", "layers", "experts", "shared_experts", "router_aux_loss", "router_loss",
    "attention_chunk", "activation_clamp", "yarn_factor",
)  # fmt: skip
_PROBABILITY_RULE: Rule = (
    "a probability: at least 0 and less than 1",
    lambda value: type(value) in (int, float) and 0 <= value < 1,  # type: ignore[operator]
)
_POSITIVE_RULE: Rule = (
    "a number above 0",
    lambda value: type(value) in (int, float) and value > 0,  # type: ignore[operator]
)
_COEFFICIENT_RULE: Rule = (
    "a number of at least 0",
    lambda value: type(value) in (int, float) and value >= 0,  # type: ignore[operator]
)
_FRACTION_RULE: Rule = (
    "a number above 0 and up to 1",
    lambda value: type(value) in (int, float) and 0 < value <= 1,  # type: ignore[operator]
)
_SWITCH_RULE: Rule = ("true or false", lambda value: isinstance(value, bool))
_RULES: Mapping[str, Rule] = {
    "layers": whole(1, MOST_LAYERS),
    "token_types": whole(0, LARGEST),
    "rotary_fraction": _FRACTION_RULE,
    ROTARY_FEATURES: SIZE_RULE,
    "mlp_layer_types": (
        f"a list of {MIXED} and dense",
        lambda value: isinstance(value, list) and all(one.value in (MIXED, "dense") for one in value),
    ),
    "expert_layers": (
        "a list of layers, numbered from 0",
        lambda value: isinstance(value, list) and all(type(one.value) is int for one in value),
    ),
    **dict.fromkeys(("nope_interval", "linear_interval"), whole(1, MOST_LAYERS)),
    "full_interval": whole(2, MOST_LAYERS),
    "top_k_experts": whole(0, LARGEST),
    "layer_types": ("a list of kinds of layers", lambda value: isinstance(value, list)),
    "layer_pattern": (
        "the kinds of all layers, in letters or as a list",
        _is_pattern,
    ),
    "mtp_layers": whole(0, 16),
    "mtp_pattern": ("the kinds of these layers, in letters or as a list", _is_pattern),
    **dict.fromkeys(("experts", "expert_ffn", "shared_expert_ffn"), whole(0, LARGEST)),
    **dict.fromkeys(("attention_softcap", "logit_softcap", "activation_clamp", "yarn_factor"), _POSITIVE_RULE),
    **dict.fromkeys(("router_aux_loss", "router_z_loss"), _COEFFICIENT_RULE),
    **dict.fromkeys(("shared_experts", "first_dense", "latent_q_rank"), whole(0, LARGEST)),
    "router_scaling": _POSITIVE_RULE,
    "router_method": (f"{GREEDY} or group_limited_greedy", lambda value: value in (GREEDY, "group_limited_greedy")),
    **dict.fromkeys(("embedding_dropout", "attention_dropout", "hidden_dropout"), _PROBABILITY_RULE),
    **dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias", "tied_embeddings", "blocks"), _SWITCH_RULE),
    **dict.fromkeys(("qk_norm", "router_normalises", "router_loss", "keys_as_values", "mixed"), _SWITCH_RULE),
}


def _activation(config: Node, key: Key, modelled: tuple[str, ...], *, gated: bool) -> Node:
    name = key.names[0]
    node = config.mapping.get(name)
    value = key.default if node is None else node.value
    origin = config.origin if node is None else node.origin
    if not isinstance(value, str) or value not in modelled:
        problem = f"is not an activation that is modelled here; {', '.join(modelled)} are"
        raise PlanError(name, value, problem, origin=origin)
    return Node("geglu" if gated else ACTIVATIONS[value], origin)


def _with_derived_sizes(items: dict[str, Node], config: Node) -> dict[str, Node]:
    hidden, heads = items["hidden"].whole, items["heads"].whole
    if "latent_kv_rank" in items:
        latent = items["nope_head_dim"].whole + items["rope_head_dim"].whole
        items["head_dim"] = Node(latent, items["nope_head_dim"].origin)
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


def _with_rotary_fraction(items: dict[str, Node]) -> dict[str, Node]:
    """The part of a head that turns, where the configuration names its features."""
    features, d = items["rotary_fraction"], items["head_dim"].whole
    if features.whole > d or features.whole % 2:
        raise features.wrong("rotary_dim", f"must be even and at most {d}, the size of a head")
    return {**items, "rotary_fraction": Node(features.whole / d, features.origin)}
