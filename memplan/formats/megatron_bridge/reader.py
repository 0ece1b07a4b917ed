"""A run's configuration of Megatron-Bridge (``run_config.yaml``) as a plan.

``ConfigContainer.to_yaml`` writes it beside every checkpoint: dataclasses with their class (``_target_``), functions,
dtypes and enumerations by name. Its fields become the arguments of Megatron-LM that say the same, and these a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ...plan.errors import Node, PlanError
from ...plan.notes import Note
from ...plan.spoken import Spoken
from ...plan.text import folder_of, parse_yaml, path_of, text_at
from ..files import Words, words_of_node
from ..launch import Asked, Launch
from ..megatron.context import Family
from ..recognised import is_python, is_script
from ..training_scripts import launched
from . import overrides, table
from .adapters import section_of
from .arguments import FRAMEWORK, arguments, of_data
from .called import command_of, recipe_called
from .command import GPU_OF_BENCHMARK, gpu_of, of_python, started
from .packing import packed
from .recipes import RECIPE
from .starting import Job, as_it_starts, in_step


def read(place: str, asked: Asked) -> Launch:
    """The plan of the run whose configuration is at ``place``."""
    called = recipe_called(place)
    if called is not None and called[0]:
        place, asked = called[0], replace(asked, assignments=(*asked.assignments, f"{RECIPE[0]}={called[1]}"))
    if place:
        alone = called is not None and not called[0]
        text, name = (command_of(called[1]), place) if called is not None and alone else text_at(place)
        commanded = alone or is_script(text, name)
        folder = Path() if place == "-" else folder_of(path_of(place))
        root, recipe, found = Node({}, overrides.COMMAND_LINE), "", None
        if commanded:
            root, asked, recipe, found = started(text, name, folder, asked)
        elif is_python(name):
            found, asked = of_python(path_of(place), asked)
            root, recipe = found.root, found.name
        else:
            root = parse_yaml(text, name)
    else:
        commanded, root, recipe, found = True, Node({}, overrides.COMMAND_LINE), "", None
    root, told = overrides.laid_over(root, asked.overrides), tuple[Note, ...]()
    if found is not None:
        job = Job.asked(asked, gpu_of(asked.flags))
        root, told = as_it_starts(found, in_step(found, job.over(root)), job)
    if found is not None and found.model is not None:
        launch = _of_overrides(root, asked, recipe, whole=True)
        return replace(launch, notes=(*told, *launch.notes))
    if found is None and (overrides.are_overrides(root) or commanded):
        return _of_overrides(root, asked, recipe)
    if found is not None:
        root = overrides.below_model(root, table.CLASSES.get(str(root.mapping["model"].mapping["_target_"].value), {}))
    model = root.mapping.get("model")
    if model is None or not model.mapping:
        raise root.lacks("model", "is missing: this is no run configuration of Megatron-Bridge (run_config.yaml)")
    provider = _provider(model)
    _check_whole(model)
    given, notes = arguments(root, asked.strict)
    given.update(of_data(root))
    words = _words(given, root)
    words = replace(words, folder=words.folder if place == "-" else folder, unused=tuple(asked.variables()))
    family: Family = "gpt" if table.pattern_of(model.mapping) is None else "hybrid"
    launch = _with_engine(launched(words, replace(asked, format=FRAMEWORK), family, name=provider))
    launch = packed(_on_gpu(_with_adapters(launch, root), asked, root, recipe), root)
    return replace(launch, notes=(*told, *notes, *launch.notes), spoken=_spoken(launch))


ENGINE = "2.17"
"""Transformer Engine of the newest release, 0.6.0 (``uv.lock``: 2.17.1)."""


def _with_engine(launch: Launch) -> Launch:
    """With the release's Transformer Engine, unless attention is in 8 bits, which is modelled of newer ones alone."""
    plan = launch.source.plan
    section = plan.mapping.get("megatron", Node({}, plan.origin))
    attention = section.mapping.get("fp8_attention")
    if attention is not None and attention.value:
        return launch
    section = section.with_items({"transformer_engine": Node(ENGINE, plan.origin)})
    return replace(launch, source=replace(launch.source, plan=plan.with_items({"megatron": section})))


def _with_adapters(launch: Launch, root: Node) -> Launch:
    section = section_of(root)
    if section is None:
        return launch
    plan = launch.source.plan.with_items({"lora": section})
    return replace(launch, source=replace(launch.source, plan=plan))


def _on_gpu(launch: Launch, asked: Asked, root: Node, recipe: str) -> Launch:
    """On the GPU that a recipe's name says, where it says one, or the folder of the script that names it."""
    if not isinstance(gpu := asked.flags.get(GPU_OF_BENCHMARK), str):
        return launch
    plan = launch.source.plan.put("hardware.gpu", Node(gpu, root.origin))
    launch = replace(launch, source=replace(launch.source, plan=plan))
    if f"_{gpu.partition('-')[0]}_" in recipe:
        return launch
    problem = (
        f"{gpu} is taken, which Google's machines have that the script's folder is called after; --gpu says otherwise"
    )
    return replace(launch, notes=(Note("gpu-of-the-folder", problem), *launch.notes))


def _spoken(launch: Launch) -> Spoken | None:
    return None if launch.spoken is None else launch.spoken.called(table.field_of)


def _of_overrides(root: Node, asked: Asked, recipe: str, *, whole: bool = False) -> Launch:
    """The plan of a recipe's overrides, with the model that ``--model`` names; ``whole`` where the recipe is among
    them."""
    described, note = overrides.model_of(asked, root), None
    base = described.arguments
    if not whole:
        root, note = overrides.over_template(root, recipe), overrides.told(root, asked, recipe)
    root = overrides.over_bridge(root, str(asked.flags["model"]), base)
    given, notes = arguments(root, asked.strict, by_hand=not whole)
    given.update(of_data(root))
    if "--vocab-size" in given:
        base.pop("--padded-vocab-size")
    off = {name for name in base if name not in given and _is_turned_off(name, root)}
    every = {**{name: node for name, node in base.items() if name not in off}, **given}
    words = _words(every, root)
    words = replace(words, unused=tuple(asked.variables()))
    asked_of_megatron, named = replace(asked, format=FRAMEWORK), str(asked.flags["model"])
    launch = _with_engine(launched(words, asked_of_megatron, described.family, name=named))
    for name, node in described.beside.items():
        plan = launch.source.plan.put(f"model.{name}", node)
        launch = replace(launch, source=replace(launch.source, plan=plan))
    launch = packed(_on_gpu(_with_adapters(launch, root), asked, root, recipe), root)
    notes = (*([note] if note is not None else []), *notes, *launch.notes)
    return replace(launch, notes=notes, spoken=_spoken(launch), read=frozenset(("model",)))


def _is_turned_off(name: str, root: Node) -> bool:
    """Whether an override turns the argument ``name`` of the model off."""
    fields = root.mapping["model"].mapping if "model" in root.mapping else {}
    node = fields.get(name.removeprefix("--").replace("-", "_"))
    return node is not None and node.value in (None, False)


_DEFAULTS_OF_MEGATRON = (
    "GPTModelProvider",
    "GPTModelConfig",
    "MLAModelProvider",
    "HybridModelProvider",
    "MambaModelProvider",
)
"""Providers whose fields begin as Megatron-LM's arguments do; others set them in the class."""
_SAYS_ALWAYS = ("gated_linear_unit", "normalization", "add_bias_linear", "share_embeddings_and_output_weights")


def _check_whole(model: Node) -> None:
    """Refuses a configuration that leaves fields to the class of a provider, which is Python and not run."""
    target = model.mapping.get("_target_")
    named = str(target.value).rpartition(".")[2] if target is not None else ""
    missing = [name for name in _SAYS_ALWAYS if name not in model.mapping]
    if target is not None and missing and named not in _DEFAULTS_OF_MEGATRON:
        raise model.lacks(
            f"model.{missing[0]}",
            f"is missing, and {named} may set it: give the run_config.yaml that a run writes, where every field is"
            f"{', or these: ' + ', '.join(missing[1:]) if missing[1:] else ''}",
        )


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


def _words(given: Mapping[str, Node], root: Node) -> Words:
    whole = Node({"arguments": Node(dict(given), root.origin), **_environment(root)}, root.origin)
    return words_of_node(whole, FRAMEWORK, table.WITHOUT_ARGUMENT)


def _environment(root: Node) -> dict[str, Node]:
    found = root.mapping.get("env_vars")
    return {"environment": found} if found is not None and found.mapping else {}
