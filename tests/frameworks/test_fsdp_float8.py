"""torchao's float8 in torchtitan's models, against torchao's own code as it ran on fake tensors
(``tests/oracle/float8.py``)."""

from __future__ import annotations

import gzip
import json
from functools import cache
from typing import Any

import pytest

from memplan.estimate import programs_of
from memplan.frameworks.fsdp import programs as fsdp
from memplan.frameworks.fsdp.torchtitan import ActivationCheckpointing, recipes, torchtitan_model
from memplan.frameworks.fsdp.units import Sharding
from memplan.layers.float8 import Float8
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import ROUND, Drop, Hold
from memplan.tape.program import fold_program
from memplan.trace.framework import job_of_plan

from ..layers.test_against_transformers import drops_sorted, named, sizes, without_scalars
from ..oracle.float8 import CASES, RECORDED, Case
from ..oracle.titan_models import Sizes as OfQwen
from . import test_fsdp_titan, test_fsdp_torchtitan


@cache
def recorded() -> Any:
    return json.loads(gzip.decompress(RECORDED.read_bytes()))


def plan_of(case: Case) -> ResolvedPlan:
    given = case.sizes
    plan: Any = (test_fsdp_titan if isinstance(given, OfQwen) else test_fsdp_torchtitan).plan_of(given)
    changes: dict[str, dict[str, object]] = {
        "batch": {"gbs": given.b * case.shards},
        "layout": {"dp": case.shards},
        "precision": {"fp8": case.recipe},
        "loss": {"kind": "chunked", "chunks": case.chunks} if case.chunks else {},
        "fsdp": {"code": "torchtitan", "filter_fqns": case.filters, "float8_all_gather": case.gathered},
    }
    return plan.model_copy(  # type: ignore[no-any-return]
        update={name: getattr(plan, name).model_copy(update=changed) for name, changed in changes.items()}
    )


@pytest.mark.parametrize("name", CASES)
def test_every_event(name: str) -> None:
    """Of a layer whose weights are gathered in 8 bits, and which is not recomputed, autograd keeps the scales of
    forward till each weight's own backward; here they end as the weights are gathered anew."""
    case, steps = CASES[name], recorded()[name]
    plan = plan_of(case)
    recompute = ActivationCheckpointing(case.recompute)  # type: ignore[arg-type]
    model = torchtitan_model(plan, Options(accumulates_in_place=False), recompute, ends_apart=True)
    program = fsdp.program(plan, model, Sharding(case.shards))
    modules = [span.module for span in program.spans for _ in span.names]
    forward = [event for module in modules for event in named(module, module.steady.forward)]
    backward = [event for module in modules[::-1] for event in named(module, module.first.backward)]
    pairs = ((forward, steps["forward"]), (without_scalars(backward), steps["backward"]))
    late = case.gathered and case.recompute != "full"
    for ours, theirs in pairs:
        found, known = (drops_sorted(one) for one in (sizes(ours), theirs))
        if late:
            found, known = ([one for one in each if one != -ROUND] for each in (found, known))
        assert drops_sorted(found) == drops_sorted(known)
    folded = fold_program(program)
    scalars = 2 * ROUND + (7 * ROUND if late else 0)  # of the loss
    assert folded.static == steps["before"]
    assert folded.after_forward == steps["levels"][0]
    assert 0 <= max(steps["peaks"][:2]) - folded.backward_peak <= scalars
    assert folded.step_peak == steps["peaks"][2]


LLAMA = {"model": "llama-3-8b", "framework": "fsdp", "fsdp-code": "torchtitan", "gpus": "8", "gpu": "h100-80gb"}
LLAMA |= {"layers": "2", "seq": "4096", "mbs": "1", "fp8": "tensorwise"}


def resolved(**flags: str) -> ResolvedPlan:
    return resolve(read_plan(None, {**LLAMA, **flags}).plan)


def test_casts_by_hand() -> None:
    """The product of a weight's gradient (f, h) stands beside two casts of the gradient (t, f), one of the weight, one
    of the input (t, h), their copies (f, t) and (h, t), and, with scales by rows, a tensor in fp32 as large as itself;
    a cast takes two tensors in fp32."""
    t, h, f = 4096, 4096, 14336
    for recipe, scales in (("tensorwise", 0), ("rowwise", 4 * f * h)):
        tape = recipes(resolved(fp8=recipe)).block("none", Options()).steady.backward
        held: dict[int, int] = {}
        most = 0
        for event in tape:
            if isinstance(event, Hold):
                held[event.tensor] = event.bytes
                if event.name == "grad_gate_weight":
                    most = sum(held.values())
            elif isinstance(event, Drop):
                held.pop(event.tensor, None)
        mine = 2 * t * f + f * h + t * h + t * (f + h) + scales + 2 * f * h + 2 * t * h
        assert 0 < most - mine < 12 * t * f  # the gradients that wait, and scalars


def test_small_layers_by_torchao() -> None:
    """``_auto_filter_for_tensorwise`` and ``_auto_filter_for_rowwise``, of Llama 3 8B: keys and values alone."""
    for recipe in ("tensorwise", "rowwise"):
        of = Float8(recipe, auto=True)
        taken = {(n, k): of.takes("", n, k) for n, k in ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))}
        assert [size for size, one in taken.items() if not one] == [(1024, 4096)]
    assert not Float8("rowwise", auto=True).takes("", 4096, 2048)
    assert Float8("tensorwise", auto=True).takes("", 4096, 2048)
    assert not Float8("tensorwise").takes("", 515, 4096)


def test_gathering_in_8_bits_halves_layers() -> None:
    """But not norms: what a layer holds while it runs."""
    plain, low = (
        programs_of(resolved(**{"enable-fsdp-float8-all-gather": one}), Options())[0] for one in ("false", "true")
    )
    wide = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096
    for made, size in ((plain, 2), (low, 1)):
        layer = next(span.module for span in made.spans if span.module.name == "layer")
        outputs = [one for one in layer.steady.forward if isinstance(one, Hold) and one.name == "all_gather_output"]
        assert outputs[0].bytes == size * wide + 2 * 2 * 4096


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"fsdp-code": "transformers"}, r"precision\.fp8 = tensorwise: needs torchtitan's layers"),
        (
            {"fp8": "delayed"},
            r"precision\.fp8 = delayed: must be left out or tensorwise, rowwise, rowwise_with_gw_hp or mxfp8",
        ),
        ({"tp": "2"}, r"precision\.fp8 = tensorwise: must be left out with tensor parallelism"),
        ({"gpu": "a100-80gb"}, r"hardware\.gpu = a100-80gb: must have products in 8 bits"),
        ({"seq": "4095"}, r"must be rowwise_with_gw_hp, or left out, unless a micro-batch, .* tokens, not 4,095"),
        (
            {"ends-apart": "true", "loss": "chunked", "seq": "1040", "filter-fqns": "attention.wo"},
            "multiple of 16 tokens, not 130",
        ),
        ({"model": "qwen3-30b-a3b"}, r"precision\.fp8 = tensorwise: must be left out with torchtitan's qwen3"),
        ({"fp8": "rowwise_with_gw_hp", "filter-fqns": "auto_filter_small_kn"}, "must be another with auto_filter"),
        ({"fp8": "rowwise", "enable-fsdp-float8-all-gather": "true"}, "must be with tensorwise scaling only"),
        ({"fsdp-offload": "true", "enable-fsdp-float8-all-gather": "true"}, r"must be left out with fsdp\.offload"),
        ({"precompute-float8-dynamic-scale-for-fsdp": "true"}, r"fsdp\.float8_scales = true: must be false without"),
        ({"fp8-parameters": "true"}, r"precision\.fp8_parameters = true: must be left out"),
    ],
)
def test_refused(flags: dict[str, str], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        programs_of(resolved(**flags), Options())


def test_filters_need_float8() -> None:
    flags = {name: value for name, value in LLAMA.items() if name != "fp8"}
    with pytest.raises(PlanError, match=r"fsdp\.filter_fqns = .*: must be left out without precision\.fp8"):
        resolve(read_plan(None, {**flags, "filter-fqns": "output"}).plan)


def test_does_not_run_here() -> None:
    with pytest.raises(PlanError, match=r"precision\.fp8 = tensorwise: must be left out: no torchao runs here"):
        job_of_plan(resolved())
