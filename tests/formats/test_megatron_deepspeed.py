"""Plans as launch scripts of BigScience's Megatron-DeepSpeed; cuts against DeepSpeed's own ``PipelineModule``."""

from __future__ import annotations

import logging
import sys
import warnings
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from memplan.formats.exported import Exported, exported
from memplan.formats.megatron_deepspeed.pipe_methods import STAGES, cut_today, method_of, python_of
from memplan.formats.megatron_deepspeed.script import TARGET
from memplan.frameworks.megatron_deepspeed.programs import parallel_shape, stage_bounds
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.schedules.partition import Entry

from .megatron_deepspeed_plans import plans
from .plans import round_trip

UNFILTERED = [HealthCheck.filter_too_much, HealthCheck.too_slow]


@settings(max_examples=40, deadline=None, suppress_health_check=UNFILTERED)
@given(plans())
def test_what_is_exported_reads_back_as_the_plan(plan: Plan) -> None:
    round_trip(plan, TARGET)


def of(**flags: str) -> Exported:
    return round_trip(read_plan("bigscience-104b-250k", flags).plan, TARGET)


def test_the_example() -> None:
    done = of()
    assert "--pp-partition-method 'type:embed|transformer'" in done.text
    assert done.content["stages"] is None
    assert done.command_line().endswith("--vocab 250100 --model-name bigscience-104b-250k --gpu v100-32gb")


def test_a_list_that_a_method_makes_is_that_method() -> None:
    cut = ",".join(map(str, [0, *range(4, 65, 2), 69]))
    assert "--pp-partition-method 'type:embed|transformer'" in of(partition=cut).text
    assert "type:embed|transformer'" in of(partition="type:embed:1|transformer:1").text


def test_any_other_list_is_a_class() -> None:
    cut = ",".join(map(str, [0, 5, *range(6, 65, 2), 69]))
    done = of(partition=cut)
    assert "--pp-partition-method" not in done.text
    assert f"cat > {STAGES}.py" in done.text
    assert "FIRST = [0, 5, 6, 8" in done.text
    assert f"--partition {cut}" in done.command_line()


def test_weights_are_another_method_of_deepspeeds() -> None:
    """60 layers and embeddings of twice the weight, of which DeepSpeed itself would read ``type:embed``: entries that
    stand beside the embeddings count for the second half."""
    done = of(layers="60", partition="type:embed:2|transformer:1")
    assert "--pp-partition-method 'type:transformer|embed|float16'" in done.text
    done = of(pp="8", gpus="32", partition="type:embed:5|transformer:1")
    assert "--pp-partition-method" not in done.text
    assert "FIRST = [0, 7, 16, 25, 34, 43, 52, 61]" in done.text
    assert "--partition 'type:embed:5|transformer:1'" in done.command_line()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"loss": "adaptive-softmax"}, "loss.kind = adaptive-softmax: cannot be said in the arguments of BigScience's"),
        ({"schedule": "gpipe"}, "pipeline.schedule = gpipe: cannot be said"),
        ({"recompute-method": "block"}, "recompute.method = block: cannot be said"),
        ({"recompute": "selective"}, "recompute.mode = selective: cannot be said"),
        ({"weight-decay": "0.1"}, "optimizer.weight_decay = 0.1: cannot be said"),
    ],
)
def test_what_it_has_no_word_for_is_refused(flags: dict[str, str], line: str) -> None:
    with pytest.raises(PlanError) as caught:
        exported(read_plan("bigscience-104b-250k", flags).plan, TARGET)
    assert str(caught.value).startswith(line)


# -- DeepSpeed's own partitioner ------------------------------------------------------------------------


def pipe() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("deepspeed.runtime.pipe.module", reason="DeepSpeed is not installed")


def specs(entries: list[Entry], module: Any) -> list[Any]:
    """DeepSpeed's layer list: specifications of modules of these classes and sizes, and functions of these names."""
    import torch

    def build(self: torch.nn.Module, size: int) -> None:
        torch.nn.Module.__init__(self)
        self.weight = torch.nn.Parameter(torch.empty(size, device="meta"))

    made: list[Any] = []
    for entry in entries:
        if entry.parameters:
            kind = type(entry.kind, (torch.nn.Module,), {"__init__": build})
            made.append(module.LayerSpec(kind, entry.parameters))
        else:
            function: Any = lambda x: x  # noqa: E731
            function.__name__ = entry.kind
            made.append(function)
    return made


def bounds_of(kind: Any, layers: list[Any], stages: int, method: str) -> list[int]:
    """The cut that ``_partition_layers`` of ``kind`` makes, put together from what every stage's first rank builds."""
    topology = pytest.importorskip("deepspeed.runtime.pipe.topology")
    logging.disable(logging.INFO)
    edges = []
    for rank in range(stages):
        held = kind.__new__(kind)
        pipe().nn.Module.__init__(held)
        held._layer_specs, held.num_stages, held.global_rank = layers, stages, rank
        held._topo, held.loss_fn = topology.PipeDataParallelTopology(num_pp=stages, num_dp=1), None
        held._partition_layers(method=method)
        edges.append((held._local_start, held._local_stop))
    logging.disable(logging.NOTSET)
    assert all(stop == start for (_, stop), (start, _) in pairwise(edges))
    return [*(start for start, _ in edges), edges[-1][1]]


def planned(layers: int, stages: int, method: str) -> tuple[list[Entry], list[int]]:
    flags = {"layers": str(layers), "pp": str(stages), "gpus": str(4 * stages), "partition": method}
    plan = resolve(read_plan("bigscience-104b-250k", {**flags, "hidden": "64", "heads": "4", "vocab": "1003"}).plan)
    return stage_bounds(plan, parallel_shape(plan))


METHODS = ("uniform", "parameters", "type:transformer", "type:embed|transformer")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("layers", "stages"), [(12, 4), (13, 4), (7, 3), (6, 6)])
def test_methods_are_todays_deepspeeds(method: str, layers: int, stages: int) -> None:
    module = pipe()
    entries, _ = planned(layers, stages, "type:transformer")
    assert bounds_of(module.PipelineModule, specs(entries, module), stages, method) == cut_today(
        method, entries, stages
    )


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, list[int]]:
    layers, stages = draw(st.integers(2, 12)), draw(st.integers(2, 5))
    inner = draw(st.lists(st.integers(1, layers + 5), min_size=stages - 1, max_size=stages - 1, unique=True))
    return layers, [0, *sorted(inner), layers + 7]


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=30, deadline=None)
@given(cuts())
def test_deepspeed_makes_any_cut(cut: tuple[int, list[int]]) -> None:
    """By the method that was found, or else by the class that was written."""
    module = pipe()
    layers, bounds = cut
    entries, _ = planned(layers, 1, "type:transformer")
    stages, method = len(bounds) - 1, method_of(bounds, entries)
    kind = module.PipelineModule if method is not None else written(python_of(bounds), module)
    assert bounds_of(kind, specs(entries, module), stages, method or "type:transformer") == bounds


def written(source: str, module: Any) -> Any:
    """The class of ``source``, over DeepSpeed's own where Megatron-DeepSpeed's would be."""
    place = "megatron.model.gpt_model"
    stand_in = ModuleType(place)
    stand_in.GPTModelPipe = module.PipelineModule  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name) for name in ("megatron", "megatron.model", place)}
    sys.modules |= {"megatron": ModuleType("megatron"), "megatron.model": ModuleType("megatron.model"), place: stand_in}
    try:
        names: dict[str, Any] = {}
        exec(compile(source, f"{STAGES}.py", "exec"), names)
        return names["GPTModelPipe"]
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old
