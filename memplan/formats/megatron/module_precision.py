"""``--te-precision-config-file``: recipes of Transformer Engine for modules whose names match patterns
(``quantization/quant_config.py``, ``RecipeConfig``; ``extensions/transformer_engine.py``, ``TEQuantizationRecipe``)."""

from __future__ import annotations

from collections.abc import Mapping

from ...plan.errors import ABSENT, Node, PlanError
from ...plan.module_precision import LOW, WIDE
from ...plan.text import parse_yaml, read_text
from ..settings import Reader, Row

NAME = "--te-precision-config-file"
TYPE, KIND = "transformer_engine_config_type", "TEQuantizationParams"
FP8, FP4 = "fp8_quantization_recipe", "fp4_quantization_recipe"
OVERRIDES, ENABLES = "override_quantized_autocast", "override_nonquantized_autocast"
FIELDS = frozenset(
    {FP8, FP4, OVERRIDES, ENABLES, "custom_recipe_factory", "fp8_format", "tp_only_amax_red", "fp8_param", "fp4_param"}
)
RECIPES = {FP8: ("tensorwise", "blockwise", "mxfp8", "delayed", "custom"), FP4: ("nvfp4", "custom")}


def read(reader: Reader) -> None:
    settings, building = reader.settings, reader.building
    place = settings.word(NAME)
    if place is None:
        return
    path = reader.context.found(place.value)
    if path is None:
        raise place.wrong(NAME, "is not here: the precision of modules is in it")
    run = next((items.value for one in ("fp4", "fp8") if (items := building.items.get(f"precision.{one}"))), None)
    found = _patterns(parse_yaml(read_text(path, NAME), str(path)), None if run is None else str(run))
    if run is None:
        building.because(NAME, "no effect without --fp8-format or --fp4-format: no recipe is for products in 16 bits")
    elif any(one.endswith(f"={WIDE}") for one in found):
        building.put("megatron.precision_of", Node([Node(one, place.origin) for one in found], place.origin), NAME)
    else:
        building.because(NAME, f"every module has {run}, as without it")


def _patterns(root: Node, run: str | None) -> list[str]:
    """Of matchers that are enabled, in their order."""
    configs, matchers = (root.mapping.get(name) for name in ("configs", "matchers"))
    known = configs.mapping if configs is not None else {}
    found = []
    for name, matcher in (matchers.mapping if matchers is not None else {}).items():
        given = matcher.mapping
        enabled = given.get("enabled")
        if enabled is None or not enabled.value:
            continue
        kind, pattern, config = (_text(given, name, field, matcher) for field in ("type", "pattern", "config"))
        if kind.value != "glob":
            raise kind.wrong(f"matchers.{name}.type", "must be glob: Megatron has no other match type")
        if set(str(pattern.value)) & set(",= \t\n"):
            raise pattern.wrong(
                f"matchers.{name}.pattern", "has a comma, an equals sign or a space, which no module's name has"
            )
        if str(config.value) not in known:
            raise config.wrong(
                f"matchers.{name}.config", f"must be one of configs: {', '.join(known) or 'there are none'}"
            )
        chosen = str(config.value)
        found.append(f"{pattern.value}={_of_config(known[chosen], f'configs.{chosen}', run)}")
    return found


def _text(given: Mapping[str, Node], name: str, field: str, matcher: Node) -> Node:
    node = given.get(field)
    if node is None or node.value in (None, ""):
        raise matcher.lacks(f"matchers.{name}.{field}", "is missing")
    return node


def _of_config(config: Node, name: str, run: str | None) -> str:
    """What it makes of a module in training; evaluation must be alike."""
    given = dict(config.mapping)
    kind = given.pop(TYPE, None)
    if kind is None or kind.value != KIND:
        value, where = (ABSENT, config.origin) if kind is None else (kind.plain(), kind.origin)
        raise PlanError(f"{name}.{TYPE}", value, f"must be {KIND}", origin=where)
    if other := given.keys() - {"training_recipe", "evaluation_recipe"}:
        raise config.lacks(f"{name}.{min(other)}", "is no key of it; training_recipe and evaluation_recipe are")
    if "training_recipe" not in given:
        raise config.lacks(f"{name}.training_recipe", "is missing")
    results = {part: _of_recipe(node, f"{name}.{part}", run) for part, node in given.items()}
    if len(set(results.values())) > 1:
        raise given["evaluation_recipe"].lacks(
            f"{name}.evaluation_recipe",
            "must be as training_recipe: another precision in evaluation is not modelled yet",
        )
    return results["training_recipe"]


def _of_recipe(node: Node, name: str, run: str | None) -> str:
    """Without a recipe a module's products are in 16 bits (``_get_fp8_autocast_for_quant_recipe``)."""
    if not isinstance(node.value, dict):
        raise node.wrong(name, "must be a mapping; {} is 16 bits")
    given = node.mapping
    if other := given.keys() - FIELDS:
        raise given[min(other)].wrong(
            f"{name}.{min(other)}", f"is no field of a recipe; {', '.join(sorted(FIELDS))} are"
        )
    recipes = [(field, given[field]) for field in (FP8, FP4) if field in given and given[field].value is not None]
    if len(recipes) > 1:
        raise recipes[1][1].wrong(f"{name}.{FP4}", f"must be left out with {FP8}: Megatron refuses both")
    for field in ("fp8_param", "fp4_param"):
        if field in given and given[field].value:
            raise given[field].wrong(
                f"{name}.{field}", "must be false: parameters of single modules in 8 or 4 bits are not modelled yet"
            )
    for field, recipe in recipes:
        _check_recipe(recipe, f"{name}.{field}", RECIPES[field])
    overrides, enables = _is(given, OVERRIDES, True), _is(given, ENABLES, False)
    if enables and recipes:
        raise given[ENABLES].wrong(
            f"{name}.{ENABLES}",
            "must be false: single modules in 8 or 4 bits where others have 16 are not modelled yet",
        )
    if run is None or not overrides:
        return LOW
    if not recipes:
        return WIDE
    field, recipe = recipes[0]
    if recipe.value != run:
        raise recipe.wrong(
            f"{name}.{field}",
            f"must be {run}, as in the run, or left out (16 bits): other recipes are not modelled yet",
        )
    return LOW


def _is(given: Mapping[str, Node], field: str, default: bool) -> bool:
    return bool(given[field].value) if field in given else default


def _check_recipe(recipe: Node, name: str, known: tuple[str, ...]) -> None:
    if recipe.value not in known:
        raise recipe.wrong(name, f"must be one of {', '.join(known[:-1])}")
    if recipe.value == "delayed":
        problem = "must not be delayed: Megatron refuses it for single modules"
        raise PlanError(name, "delayed", problem, origin=recipe.origin)
    if recipe.value == "custom":
        raise PlanError(name, "custom", "is not modelled: it is code of your own", origin=recipe.origin)


ROWS = (Row(NAME, "megatron.precision_of", "PRECISION", "word", read=read, when=lambda _: False),)
