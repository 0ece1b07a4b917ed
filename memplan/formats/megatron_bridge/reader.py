"""A run's configuration of Megatron-Bridge (``run_config.yaml``) as a plan.

``ConfigContainer.to_yaml`` writes it beside every checkpoint: dataclasses with their class (``_target_``), functions,
dtypes and enumerations by name. Its fields become the arguments of Megatron-LM that say the same, and these a plan.
"""

from __future__ import annotations

from dataclasses import replace

from ...plan.errors import ABSENT, Node, PlanError
from ...plan.text import folder_of, path_of, text_at
from ...plan.yaml_events import parse_yaml
from ..files import words_of_node
from ..launch import Asked, Launch
from ..megatron.context import Family
from ..training_scripts import launched
from . import table
from .arguments import FRAMEWORK, arguments


def read(place: str, asked: Asked) -> Launch:
    """The plan of the run whose configuration is at ``place``."""
    text, name = text_at(place)
    root = parse_yaml(text, name)
    model = root.mapping.get("model")
    if model is None or not model.mapping:
        problem = "is missing: this is no run configuration of Megatron-Bridge (run_config.yaml)"
        raise PlanError("model", ABSENT, problem, origin=root.origin)
    provider = _provider(model)
    given, notes = arguments(root, asked.strict)
    words = words_of_node(Node({"arguments": Node(given, root.origin), **_environment(root)}, root.origin), FRAMEWORK)
    folder = words.folder if place == "-" else folder_of(path_of(place))
    words = replace(words, folder=folder, unused=tuple(asked.variables()))
    family: Family = "gpt" if table.pattern_of(model.mapping) is None else "hybrid"
    launch = launched(words, replace(asked, format=FRAMEWORK), family, name=provider)
    return replace(launch, notes=(*notes, *launch.notes))


def _provider(model: Node) -> str:
    """What the model is called: by the Hub, or its provider's class. Refuses those whose layers are others."""
    target, hub = model.mapping.get("_target_"), model.mapping.get("hf_model_id")
    named = str(target.value).rpartition(".")[2] if target is not None else "arguments"
    plain = named.lower().replace("modelprovider", "").replace("modelconfig", "")
    if target is not None and any(part in plain for part in (*table.OTHER_MODELS, *table.OTHERS_LAYERS)):
        problem = (
            "is not modelled yet; GPT's providers (GPTModelProvider, MLAModelProvider and those of such models) and "
            "HybridModelProvider are"
        )
        raise PlanError("model._target_", named, problem, origin=target.origin)
    return str(hub.value) if hub is not None and hub.value else named


def _environment(root: Node) -> dict[str, Node]:
    found = root.mapping.get("env_vars")
    return {"environment": found} if found is not None and found.mapping else {}
