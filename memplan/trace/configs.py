"""A model spec as the Hugging Face configuration that reads back as it: ``plan.huggingface``, the other way."""

from __future__ import annotations

from typing import Any

from ..plan.errors import PlanError
from ..plan.huggingface import ACTIVATIONS
from ..plan.huggingface_families import FAMILIES
from ..plan.spec import ModelSpec


def config_of_spec(spec: ModelSpec) -> dict[str, Any]:
    """Keys and values of a ``config.json``; ``PlanError`` where the family has none that says the same."""
    family = FAMILIES.get(spec.family)
    if family is None:
        problem = f"has no Hugging Face configuration; these have: {', '.join(FAMILIES)}"
        raise PlanError("model.family", spec.family, problem)
    config: dict[str, Any] = {"model_type": spec.family}
    for name, value in family.constants.items():
        if getattr(spec, name) != value:
            problem = f"must be {str(value).lower()}: a configuration of {spec.family} cannot say otherwise"
            raise PlanError(f"model.{name}", getattr(spec, name), problem)
    for name, key in family.keys.items():
        _put(config, key.names[0], _written(spec, name))
    if family.activation is not None:
        wanted = "gelu" if spec.activation == "geglu" else spec.activation
        known = [given for given in family.activations if ACTIVATIONS[given] == wanted]
        if not known:
            raise PlanError("model.activation", spec.activation, f"must be one that {spec.family} has")
        config[family.activation.names[0]] = known[0]
    return config


def _written(spec: ModelSpec, name: str) -> object:
    if name == "blocks":
        return spec.blocks == "parallel"
    if name == "rotary_fraction" and spec.family == "gptj":
        return spec.rotary_features
    value: object = getattr(spec, name)
    return value


def _put(config: dict[str, Any], name: str, value: object) -> None:
    """``section.name`` is in a mapping of its own; rotary parameters name their type."""
    section, _, rest = name.partition(".")
    if not rest:
        config[name] = value
        return
    inner = config.setdefault(section, {})
    if section == "rope_parameters":
        inner |= {"rope_type": "default", "rope_theta": 10_000.0}
    inner[rest] = value
