"""An architecture without a recipe: a Hugging Face configuration that is read as data and learnt from traces."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, model_serializer

from .errors import ABSENT, Node, Origin, PlanError, one_line
from .hub import config_name
from .huggingface import QUANTISED
from .library import LEARNED, learned_models
from .models import model_path
from .notes import has_small_head
from .spec import MOST_LAYERS, ModelSpec
from .text import is_folder, is_there, read_text

STAND_IN = "llama-2-7b"
"""Takes its place while the rest of a plan is read."""
LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "max_target_positions", "max_source_positions")
BEHIND_PADDING = frozenset(
    {"roberta", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "camembert", "data2vec-text", "mpnet", "xmod"}
)
"""Whose positions begin behind the padding token's (transformers, ``create_position_ids_from_input_ids``): of 514
embeddings, 512 are of tokens."""
TOWERS = ("vision_config", "audio_config", "vision_tower", "thinker_config")
"""What a configuration calls what reads images and sound."""
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
CHANGES_NOTHING = frozenset(
    """
    _name_or_path architectures transformers_version torch_dtype dtype use_cache cache_implementation
    initializer_range initializer_factor rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon
    rope_theta rope_scaling rope_parameters rope_local_base_freq rotary_base query_pre_attn_scalar
    bos_token_id eos_token_id sep_token_id cls_token_id decoder_start_token_id pretraining_tp max_window_layers
    id2label label2id task_specific_params output_attentions output_hidden_states return_dict
    """.split()  # noqa: SIM905
)
"""Keys of a configuration on whose values no tensor's size depends."""
NO_LENGTH = 2**31
"""Longest sequence where the configuration names none, and the longest that it can name."""


MOST_PIXELS = 1 << 14
"""Along the side of an image."""


MEANINGLESS: Mapping[str, Any] = {
    **dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"), 1),
    **dict.fromkeys(("embedding_dropout", "attention_dropout", "hidden_dropout"), 0.0),
    **{"positions_max": NO_LENGTH, "norm": "layernorm", "positions": "none", "activation": "gelu"},
}
"""Fields that every spec has, and that say nothing of a traced one unless it is made with others."""


class TracedSpec(ModelSpec):
    """``layers`` is what ``--layers`` or the configuration say, if anything does (``counted``). No other size means
    anything: sizes are those of the traced tensors."""

    has_sizes = False

    family: str = Field(description="Hugging Face's model_type")
    config: dict[str, Any]
    """As it is written, but for ``layers``."""
    counted: bool
    changed: bool = False
    """``layers`` is not the configuration's own."""
    reason: str
    """Why there is no recipe."""
    digest: str
    """Of the configuration."""
    is_text_part: bool = False
    """The configuration is of a model that reads images, too, and this is its part that reads text."""
    small_head: str = ""
    """The class that the configuration was saved from, where its head is another than the language model's that is
    traced, and smaller."""

    @property
    def patches(self) -> int | None:
        """Those of an image and the class token before them (transformers, ``ViTEmbeddings``), where the model reads
        images and no text."""
        return patches_in(self.config)

    def __hash__(self) -> int:
        """Of what decides: a configuration is a mapping, which has none."""
        return hash((self.digest, self.layers, self.source))

    @model_serializer
    def _as_it_is(self) -> dict[str, Any]:
        layers = self.layers if self.counted else None
        names = {"name": self.name, "family": self.family, "layers": layers, "source": self.source}
        return {**names, "no_recipe": self.reason, "config": self.config}


def size_in(config: dict[str, Any], names: Sequence[str], most: int, path: Path) -> int | None:
    """The first of ``names`` that ``config`` gives a whole number, if any does; from 1 to ``most``."""
    name = next((name for name in names if type(config.get(name)) is int), None)
    if name is None:
        return None
    value: int = config[name]
    if not 1 <= value <= most:
        raise PlanError(name, value, f"must be a whole number from 1 to {most:,}", origin=Origin(str(path)))
    return value


def layers_name(config: dict[str, Any]) -> str | None:
    """What the configuration calls its number of layers, where it has one and says nothing of each of them."""
    name = next((name for name in LAYERS if type(config.get(name)) is int), None)
    if name is None or any(isinstance(value, list) and len(value) == config[name] for value in config.values()):
        return None
    return name


def traced_spec(model: Node, folder: Path, error: PlanError) -> TracedSpec:
    """The configuration that ``model`` names, of which ``error`` says that it has no recipe; raises ``error`` where
    it is about anything else. Of its sizes only ``layers`` can be changed."""
    items = dict(model.mapping)
    base = items.pop("base", None)
    path = _config_path(base, folder)
    if path is None or base is None or error.origin is None or error.origin.source != str(path):
        raise error
    config = _config(path, error)
    if config.get("quantization_config") is not None:
        raise PlanError("quantization_config", ABSENT, QUANTISED, origin=error.origin)
    is_text_part = _reads_text(config)
    config = config["text_config"] if is_text_part else config
    if not is_text_part and (tower := next((key for key in TOWERS if isinstance(config.get(key), dict)), None)):
        problem = f"is of a model with {tower}, which is not modelled, and has no text_config to plan alone; "
        raise PlanError("model_type", config["model_type"], f"{problem}models of text are", origin=error.origin)
    saved_from = config.get("architectures")
    heads = [one for one in saved_from if isinstance(one, str)] if isinstance(saved_from, list) else []
    known = built_in_like(config)
    name_there = name_of_built_in(path) or known
    config = learned_models()[known].configuration() if known else config
    if "auto_map" in config and not any(type(config.get(key)) is int for key in LENGTHS):
        raise error  # code of its own that is never run, and nothing that a model of transformers would name
    name = layers_name(config)
    for field, value in items.items():
        if field != "layers" or name is None:
            problem = f"cannot be changed: the architecture has no recipe ({error.field}); change {path}"
            if field == "labels":
                problem = (
                    "must be left out: the architecture is known only from traces of a language model, whose "
                    "head and loss take more than a classifier's"
                )
            raise value.wrong(f"model.{field}", problem)
        if type(value.value) is not int or not 1 <= value.value <= MOST_LAYERS:
            raise value.wrong("model.layers", f"must be a whole number from 1 to {MOST_LAYERS:,}")
        config = {**config, name: value.value}
    layers = size_in(config, LAYERS, MOST_LAYERS, path)
    from hashlib import sha256  # OpenSSL, which few commands need

    count = 1 if layers is None or name is None else layers
    return TracedSpec(
        **{**MEANINGLESS, "layers": count, "positions_max": _positions(config, path)},
        name=one_line(config_name(path).lower())[:100] or "model",
        family=one_line(config["model_type"]),
        source=name_of_built_in(path) or one_line(str(path)),
        is_text_part=is_text_part or (bool(name_there) and learned_models()[name_there].is_text_part),
        small_head=next(filter(has_small_head, heads), ""),
        config=config,
        counted=name is not None,
        changed="layers" in items,
        reason=str(PlanError(error.field, error.value, error.problem)),
        digest=sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
    )


def _reads_text(config: dict[str, Any]) -> bool:
    """Whether ``config`` is of a model with a part that reads text, which its ``text_config`` describes."""
    part = config.get("text_config")
    return isinstance(part, dict) and isinstance(part.get("model_type"), str)


def built_in_like(config: dict[str, Any]) -> str:
    """The learned model of the same sizes as ``config``, of which any key but those that change nothing is compared,
    and those that transformers would fill in may be missing; empty where there is none."""
    for name, one in learned_models().items():
        own = one.configuration()
        if own["model_type"] == config.get("model_type"):
            given, its = _that_counts(config, own), _that_counts(own, own)
            missing = {key for key in its if key not in given}
            if missing <= one.unsaid and all(its.get(key) == value for key, value in given.items()):
                return name
    return ""


def _that_counts(config: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """What of ``config`` changes a tensor, without lists of layers that say what other keys do, which may be those of
    ``like``."""
    derived: dict[str, Any] = {}
    whole = {**like, **config}
    layers = size if type(size := whole.get("num_hidden_layers")) is int and 0 < size <= MOST_LAYERS else 0
    window, every = whole.get("sliding_window"), whole.get("sliding_window_pattern")
    if type(every) is int and window:
        kinds = ("sliding_attention", "full_attention")
        derived["layer_types"] = [kinds[(at + 1) % every == 0] for at in range(layers)]
    elif not window or whole.get("use_sliding_window") is False:
        derived["layer_types"] = ["full_attention"] * layers
    if type(interval := whole.get("no_rope_layer_interval")) is int and interval > 0:
        derived["no_rope_layers"] = [int((at + 1) % interval != 0) for at in range(layers)]
    padded = () if config.get("model_type") in BEHIND_PADDING else ("pad_token_id",)
    return {
        key: value
        for key, value in config.items()
        if value is not None
        and key not in CHANGES_NOTHING
        and key not in padded
        and not (key in derived and value == derived[key])
    }


def _positions(config: dict[str, Any], path: Path) -> int:
    """The longest sequence."""
    found = length_in(config, path) or NO_LENGTH
    padding = config.get("pad_token_id", 1)
    if config["model_type"] in BEHIND_PADDING and type(padding) is int and 0 <= padding < found - 1:
        return found - padding - 1
    return found


def length_in(config: dict[str, Any], path: Path) -> int | None:
    """The longest sequence that the configuration names, or the one of an image."""
    return size_in(config, LENGTHS, NO_LENGTH, path) or patches_in(config)


def patches_in(config: dict[str, Any]) -> int | None:
    image, patch = config.get("image_size"), config.get("patch_size")
    if type(image) is not int or type(patch) is not int or not 0 < patch <= image <= MOST_PIXELS:
        return None
    return (image // patch) ** 2 + 1


def name_of_built_in(path: Path) -> str:
    """The learned model of which ``path`` is the configuration; empty where it is of none."""
    return path.parent.name if path.parent.parent == LEARNED and path.parent.name in learned_models() else ""


def known_from_traces(error: PlanError, model: Node) -> PlanError:
    """``error``, of the plan's ``model``, of which there is no recipe; of a learned one what to do with it."""
    base = model.mapping.get("base")
    name = name_of_built_in(Path(error.origin.source)) if error.origin is not None else ""
    if not name or base is None:
        return error
    return base.wrong(
        "model",
        "has no recipe, and is known from traces, which memplan estimate and suggest-partition take with "
        "framework single, most with ddp, deepspeed and fsdp, and memplan trace; models with a recipe go "
        "anywhere (`memplan models`)",
    )


def _config_path(base: Node | None, folder: Path) -> Path | None:
    if base is None or not isinstance(base.value, str):
        return None
    path = model_path(base.value, folder, base.origin)
    path = path / "config.json" if is_folder(path) else path
    return path if path.suffix == ".json" and is_there(path) else None


def _config(path: Path, error: PlanError) -> dict[str, Any]:
    """``error`` where it is none."""
    try:
        config = json.loads(read_text(path, "model"))
    except (ValueError, RecursionError):
        raise error from None
    if not isinstance(config, dict):
        raise error
    if "weight_map" in config:
        raise error
    if not isinstance(config.get("model_type"), str):
        raise PlanError("model_type", ABSENT, "is missing: transformers needs it", origin=Origin(str(path)))
    return config
