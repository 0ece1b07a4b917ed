"""Precision that differs from module to module (``--te-precision-config-file``)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.arguments import plan_of_arguments
from memplan.estimate import estimate
from memplan.frameworks.megatron.from_plan import core_shape
from memplan.frameworks.megatron.modules import layer_shape_of
from memplan.layers.autograd import Recorder, Tensor
from memplan.layers.megatron_core import block
from memplan.layers.megatron_core.shape import CoreShape
from memplan.layers.module import Interface, Module, Options, Run, build
from memplan.plan.errors import PlanError
from memplan.plan.module_precision import EXPERTS, MODULES, names_layers, wide_modules
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.search.time import entry_times
from memplan.tape.events import Drop, Hold, Tape

NAME = "--te-precision-config-file"
FLAGS = {
    "model": "llama-3-8b", "framework": "megatron", "layers": "4", "seq": "2048", "tp": "2", "dp": "2",
    "sequence-parallel": "true", "fp8": "mxfp8", "gpu": "b200", "mbs": "1", "gbs": "8",
}  # fmt: skip


def shape_of(*patterns: str, **flags: str) -> CoreShape:
    given = {**FLAGS, **({"precision-of-modules": ",".join(patterns)} if patterns else {}), **flags}
    return core_shape(resolve(read_plan(None, given).plan))


def of_layer(shape: CoreShape) -> Module:
    def recipe(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(block.layer(r, x, shape))

    return build("layer", recipe, Interface(shape.hidden, shape.dtype), Options(keeps_input=True))


def sizes(tape: Tape) -> list[int]:
    return [one.bytes if isinstance(one, Hold) else -one.bytes for one in tape if isinstance(one, Hold | Drop)]


def test_a_layer_with_every_module_in_16_bits_is_one_in_16_bits() -> None:
    shape = layer_shape_of(shape_of("*=16bit"), 0)
    assert shape.wide == {*MODULES, *EXPERTS}
    one, other = of_layer(shape), of_layer(replace(shape, low=None, wide=frozenset()))
    for mine, theirs in ((one.first.forward, other.first.forward), (one.first.backward, other.first.backward)):
        assert sizes(mine) == sizes(theirs)
    assert not any(parameter.low for parameter in one.parameters)


def test_what_one_module_keeps_in_16_bits() -> None:
    """By hand, of 2048 tokens and 7168 features of the MLP's inner layer on a rank: 2 bytes of an element are kept, in
    place of 1, and of one for each 32 of a column's tokens, its scale."""
    given, without = (of_layer(layer_shape_of(shape_of(*one), 0)) for one in (["*linear_fc2=16bit"], []))
    elements = 2048 * 7168
    more = given.first.forward_fold.net - without.first.forward_fold.net
    assert more == elements * 2 - elements - elements // 32


@pytest.mark.parametrize("model", ["deepseek-v2-lite", "nemotron-3-super-120b-a12b"])
def test_around_experts_all_is_as_in_16_bits(model: str) -> None:
    """Layers without experts, or with those of a hybrid that has no layer E, are those in 16 bits; around experts no
    other linear layer has a weight in 8 bits, and experts' products are as without it."""
    flags = {"model": model, "layers": "", "tp": "1", "sequence-parallel": "false", "dp": "8", "ep": "8", "zero": "1"}
    patterns = ("*.experts.*=low", "*=16bit")
    given = {**FLAGS, **flags, "precision-of-modules": ",".join(patterns)}
    given.pop("layers")
    plan = resolve(read_plan(None, given).plan)
    shape = core_shape(plan)
    routed = next(layer for layer in range(plan.model.layers) if plan.model.has_experts(layer))
    for layer in (0, routed):
        own = layer_shape_of(shape, layer)
        names = [one.name for one in of_layer(own).parameters if one.low is not None]
        assert all(".experts." in name for name in names)
        assert bool(names) is (layer == routed)
    without = of_layer(replace(layer_shape_of(shape, 0), low=None, wide=frozenset()))
    assert sizes(of_layer(layer_shape_of(shape, 0)).first.backward) == sizes(without.first.backward)


def test_layers_are_numbered_within_a_stage() -> None:
    """``named_modules`` of each stage's model begins with its own layer 0."""
    shape = shape_of("*layers.0.*=16bit", "*=low", pp="2")
    assert [bool(layer_shape_of(shape, layer).wide) for layer in range(4)] == [True, False, True, False]


def test_the_first_pattern_that_matches_counts() -> None:
    second = {one for one in (*MODULES, *EXPERTS) if one.startswith("mlp.") and "fc1" not in one}
    assert wide_modules(("*fc1*=low", "*mlp*=16bit"), 3) == second
    assert wide_modules(("*layers.1*=16bit",), 1) == wide_modules(("*layers.1*=16bit",), 10) == {*MODULES, *EXPERTS}
    assert not names_layers(["*fc1*=16bit"])
    assert names_layers(["*layers.3.*=16bit"])


def test_time_is_between_that_of_both() -> None:
    def seconds(*patterns: str, **flags: str) -> float:
        given = {**FLAGS, **({"precision-of-modules": ",".join(patterns)} if patterns else {}), **flags}
        layer = entry_times(resolve(read_plan(None, given).plan)).layer
        return layer.forward + layer.backward

    assert seconds() < seconds("*linear_fc2*=16bit") < seconds("*=16bit")
    with pytest.raises(PlanError, match="must not tell layers apart"):
        seconds("*layers.0.*=16bit")


CONFIGURATION = """
configs:
  wide: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
  same:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {fp8_quantization_recipe: mxfp8, fp8_format: e4m3}
matchers:
  off: {type: glob, pattern: "*qkv*", config: wide}
  fc2: {type: glob, enabled: true, pattern: "*linear_fc2*", config: wide}
  rest: {type: glob, enabled: true, pattern: "*", config: same}
"""


def read(text: str, folder: Path, **more: object) -> Plan:
    (folder / "precision.yaml").write_text(text)
    arguments: dict[str, Any] = {
        "--num-layers": 2, "--hidden-size": 1024, "--num-attention-heads": 16, "--seq-length": 1024,
        "--max-position-embeddings": 1024, "--micro-batch-size": 1, "--global-batch-size": 1, "--bf16": True,
        "--fp8-format": "e4m3", "--fp8-recipe": "mxfp8", NAME: str(folder / "precision.yaml"),
    }  # fmt: skip
    arguments |= {f"--{name.replace('_', '-')}": value for name, value in more.items()}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    return plan_of_arguments(arguments, gpus=1, family="gpt", vocabulary=32000).plan


def test_a_file_is_its_enabled_matchers(tmp_path: Path) -> None:
    plan = read(CONFIGURATION, tmp_path)
    assert plan.megatron.precision_of == ("*linear_fc2*=16bit", "*=low")
    assert estimate(plan).stages[0].requested > 0


@pytest.mark.parametrize(
    ("change", "more"),
    [
        (("pattern: \"*linear_fc2*\", config: wide", "pattern: \"*linear_fc2*\", config: same"), {}),
        (("training_recipe: {}", "training_recipe: {override_quantized_autocast: false}"), {}),
        (("", ""), {"fp8_format": None, "fp8_recipe": None}),
    ],
)  # fmt: skip
def test_files_that_change_nothing(change: tuple[str, str], more: dict[str, object], tmp_path: Path) -> None:
    assert read(CONFIGURATION.replace(*change), tmp_path, **more).megatron.precision_of is None


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("type: glob, enabled: true, pattern: \"*\"", "type: regex, enabled: true, pattern: \"*\"", "must be glob"),
        ("config: same}", "config: none}", "must be one of configs: wide, same"),
        (", pattern: \"*\"", "", "matchers.rest.pattern: is missing"),
        ("TEQuantizationParams, training", "Other, training", "must be TEQuantizationParams"),
        ("training_recipe: {}", "evaluation_recipe: {}", "configs.wide.training_recipe: is missing"),
        ("training_recipe: {}", "training_recipe: null", "must be a mapping; {} is 16 bits"),
        ("recipe: mxfp8,", "recipe: delayed,", "must not be delayed"),
        ("recipe: mxfp8,", "recipe: blockwise,", "must be mxfp8, as in the run"),
        ("recipe: mxfp8,", "recipe: mxfp9,", "must be one of tensorwise"),
        ("fp8_format: e4m3", "fp4_quantization_recipe: nvfp4", "Megatron refuses both"),
        ("fp8_format: e4m3", "fp8_param: true", "must be false: parameters of single modules"),
        ("fp8_format: e4m3", "override_nonquantized_autocast: true", "must be false: single modules"),
        ("fp8_format: e4m3", "format: e4m3", "is no field of a recipe"),
        ("fp8_format: e4m3}", "fp8_format: e4m3}\n    evaluation_recipe: {}", "another precision in evaluation"),
    ],
)  # fmt: skip
def test_wrong_files(old: str, new: str, line: str, tmp_path: Path) -> None:
    assert old in CONFIGURATION
    with pytest.raises(PlanError) as refused:
        read(CONFIGURATION.replace(old, new), tmp_path)
    assert line in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"fp8": "null"}, "must be left out without precision.fp8 or fp4"),
        ({"fp8": "delayed"}, "must be left out with delayed scaling"),
        ({"fp8-parameters": "true", "zero": "1"}, "must be left out with precision.fp8_parameters"),
        ({"experts": "4", "expert-top-k": "2", "expert-ffn": "1024"}, "must leave experts as they are"),
        ({"tp-comm-overlap": "true"}, "must be left out with megatron.tp_comm_overlap"),
        ({"mtp-layers": "1"}, "must have mtp.*=16bit, and nothing before it that ends in =low"),
    ],
)
def test_what_modules_of_their_own_have_not(flags: dict[str, str], line: str) -> None:
    with pytest.raises(PlanError) as refused:
        estimate(read_plan(None, {**FLAGS, "precision-of-modules": "*=16bit", **flags}).plan)
    assert line in str(refused.value)
