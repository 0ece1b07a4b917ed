"""An architecture without a recipe: a Hugging Face configuration that is read as data and learnt from traces."""

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import Field, model_serializer

from .errors import ABSENT, Node, Origin, PlanError, one_line
from .hub import config_name
from .library import LEARNED, learned_models
from .models import model_path
from .spec import MOST_LAYERS, Activation, LayerCount, ModelSpec, Norm, Positions, Probability, Size
from .text import is_folder, is_there, read_text

STAND_IN = "llama-2-7b"
"""Takes its place while the rest of a plan is read."""
LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "max_source_positions")
BEHIND_PADDING = frozenset(
    {"roberta", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "camembert", "data2vec-text", "mpnet", "xmod"}
)
"""Whose positions begin behind the padding token's (transformers, ``create_position_ids_from_input_ids``): of 514
embeddings, 512 are of tokens."""
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
NO_LENGTH = 2**31
"""Longest sequence where the configuration names none, and the longest that it can name."""


class TracedSpec(ModelSpec):
    """``layers`` is what ``--layers`` or the configuration say, if anything does (``counted``). No other size means
    anything: sizes are those of the traced tensors."""

    has_sizes = False

    family: str = Field(description="Hugging Face's model_type")
    layers: LayerCount = 1
    hidden: Size = 1
    heads: Size = 1
    kv_heads: Size = 1
    head_dim: Size = 1
    ffn: Size = 1
    vocab: Size = 1
    positions_max: Size = NO_LENGTH
    norm: Norm = "layernorm"
    positions: Positions = "none"
    activation: Activation = "gelu"
    embedding_dropout: Probability = 0.0
    attention_dropout: Probability = 0.0
    hidden_dropout: Probability = 0.0

    config: dict[str, Any]
    """As it is written, but for ``layers``."""
    counted: bool
    changed: bool = False
    """``layers`` is not the configuration's own."""
    reason: str
    """Why there is no recipe."""
    digest: str
    """Of the configuration."""

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
    if "auto_map" in config and not any(type(config.get(key)) is int for key in LENGTHS):
        raise error  # code of its own that is never run, and nothing that a model of transformers would name
    name = layers_name(config)
    for field, value in items.items():
        if field != "layers" or name is None:
            problem = f"cannot be changed: the architecture has no recipe ({error.field}); change {path}"
            raise PlanError(f"model.{field}", value.plain(), problem, origin=value.origin)
        if type(value.value) is not int or not 1 <= value.value <= MOST_LAYERS:
            problem = f"must be a whole number from 1 to {MOST_LAYERS:,}"
            raise PlanError("model.layers", value.plain(), problem, origin=value.origin)
        config = {**config, name: value.value}
    layers = size_in(config, LAYERS, MOST_LAYERS, path)
    return TracedSpec(
        name=one_line(config_name(path).lower())[:100] or "model",
        family=one_line(config["model_type"]),
        layers=layers if layers is not None and name is not None else 1,
        positions_max=_positions(config, path),
        source=name_of_built_in(path) or one_line(str(path)),
        config=config,
        counted=name is not None,
        changed="layers" in items,
        reason=str(PlanError(error.field, error.value, error.problem)),
        digest=sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
    )


def _positions(config: dict[str, Any], path: Path) -> int:
    """The longest sequence."""
    found = size_in(config, LENGTHS, NO_LENGTH, path) or NO_LENGTH
    padding = config.get("pad_token_id", 1)
    if config["model_type"] in BEHIND_PADDING and type(padding) is int and 0 <= padding < found - 1:
        return found - padding - 1
    return found


def name_of_built_in(path: Path) -> str:
    """The learned model of which ``path`` is the configuration; empty where it is of none."""
    return path.parent.name if path.parent.parent == LEARNED and path.parent.name in learned_models() else ""


def known_from_traces(error: PlanError, model: Node) -> PlanError:
    """``error``, of the plan's ``model``, of which there is no recipe; of a learned one what to do with it."""
    base = model.mapping.get("base")
    name = name_of_built_in(Path(error.origin.source)) if error.origin is not None else ""
    if not name or base is None:
        return error
    problem = "has no recipe, and is known from traces, which memplan estimate and suggest-partition take with "
    problem += "framework single, most with ddp, deepspeed and fsdp, and memplan trace; models with a recipe go "
    problem += "anywhere (`memplan models`)"
    return PlanError("model", base.plain(), problem, origin=base.origin)


def _config_path(base: Node | None, folder: Path) -> Path | None:
    if base is None or not isinstance(base.value, str):
        return None
    path = model_path(base.value, folder)
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
