"""``ddp``: buckets and owners by hand, what holds for every plan, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from memplan.estimate import estimate
from memplan.frameworks.ddp import programs as ddp_programs
from memplan.frameworks.ddp.programs import owners, parameter_buckets
from memplan.frameworks.ddp.reducer import MIB, bucket_sizes
from memplan.layers.module import Options, Parameter
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Category
from memplan.tape.program import fold_program, static

GPT2 = {"model": "gpt2", "framework": "ddp", "gpus": 4, "seq": 128, "layers": 3}


def plan(**flags: object) -> Plan:
    merged = {name.replace("_", "-"): str(value).lower() for name, value in (GPT2 | flags).items()}
    return resolve(read_plan(None, merged).plan)


def test_buckets_by_hand() -> None:
    """1 MiB, then 25 MiB at least: 3 gradients of 20 MiB give 20 and 40; with a cap of 20 there are three."""
    assert bucket_sizes([20 * MIB] * 3) == [20 * MIB, 40 * MIB]
    assert bucket_sizes([20 * MIB] * 3, 20 * MIB, 20 * MIB) == [20 * MIB] * 3
    assert bucket_sizes([]) == []


@given(st.lists(st.integers(1, 10**7), max_size=40), st.integers(1, 10**7), st.integers(1, 10**7))
def test_buckets_hold_every_gradient_once(gradients: list[int], first: int, cap: int) -> None:
    found = bucket_sizes(gradients, first, cap)
    assert sum(found) == sum(gradients)
    for limit, size in zip([first, *[cap] * len(found)], found[:-1], strict=False):
        assert size >= limit


def test_owners_by_hand() -> None:
    """Sizes 5, 4, 3, 3, 1 on two ranks: 5 | 4, 5 | 4 3, 5 3 | 4 3, 5 3 | 4 3 1."""
    parameters = [Parameter(str(n), (n,)) for n in (3, 1, 5, 4, 3)]
    first, second = owners(parameters, 2)
    assert [one.elements for one in first] == [5, 3]
    assert [one.elements for one in second] == [4, 3, 1]
    assert [hold.bytes for hold in parameter_buckets([first, second, []], "fp32")] == [512, 512, 512]


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 9))
def test_every_parameter_has_one_owner(sizes: list[int], ranks: int) -> None:
    parameters = [Parameter(str(at), (size,)) for at, size in enumerate(sizes)]
    owned = owners(parameters, ranks)
    assert sorted(one.name for own in owned for one in own) == sorted(one.name for one in parameters)
    totals = [sum(one.elements for one in own) for own in owned]
    assert max(totals) - min(totals) <= max(sizes, default=0)


@pytest.mark.parametrize(
    "model", ["gpt2", "llama-3-8b", "gemma-2-9b", "opt-6.7b", "gpt-j-6b", "falcon-7b", "bert-large"]
)
@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("sync", [True, False])
def test_views_in_every_schedule(model: str, microbatches: int, sync: bool) -> None:
    """Without copies, gradients are in buckets alone; under no_sync they are there twice, as they are by default."""
    flags = {"model": model, "gbs": 4 * microbatches, "ddp_gradient_sync": sync, "seq": 64}
    peaks, statics = {}, {}
    for views in (False, True):
        (made,) = ddp_programs.programs(plan(**flags, gradient_as_bucket_view=views), Options())
        peaks[views], statics[views] = fold_program(made).peak, static(made).net
    assert statics[True] == statics[False]
    assert peaks[True] <= peaks[False]
    if sync or microbatches == 1:
        assert peaks[True] < peaks[False]
    (stage,) = estimate(plan(**flags, gradient_as_bucket_view=True)).stages
    assert sum(stage.breakdown) == stage.allocated
    assert stage.of(Category.GRADIENTS) >= 2 * stage.parameters


def test_states_are_divided() -> None:
    """GPT-2's word embedding is a third of 3 layers' parameters: its owner has no other."""
    whole, shared = (estimate(plan(optimizer="adamw", zero=zero)).stages[0] for zero in (0, 1))
    word = 50257 * 768
    assert whole.of(Category.OPTIMIZER_STATES) == pytest.approx(4 * whole.parameters, rel=0.001)
    assert shared.of(Category.OPTIMIZER_STATES) == pytest.approx(4 * word, rel=0.001)
    assert shared.parameters == whole.parameters


def test_looking_for_unused_parameters_copies_the_logits() -> None:
    given, found = (estimate(plan(find_unused_parameters=unused)).stages[0] for unused in (False, True))
    assert found.requested >= given.requested
    assert any("clones the model's output" in line for line in estimate(plan(find_unused_parameters=True)).assumptions)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"zero": 2}, "layout.zero = 2: must be at most 1 with framework ddp; deepspeed has ZeRO-"),
        ({"parameters_as_bucket_view": True}, "belongs to ZeroRedundancyOptimizer (layout.zero: 1)"),
        ({"zero": 1, "optimizer": "adam8bit"}, "optimizer.name = adam8bit: must be PyTorch's sgd, adam, adamw"),
        ({"zero": 1, "optimizer": "muon"}, "optimizer.name = muon: must be PyTorch's sgd, adam, adamw, adafactor"),
        ({"zero": 1, "optimizer": "adafactor"}, "optimizer.implementation = transformers: must be PyTorch's"),
        ({"framework": "single", "gpus": 1, "bucket_cap_mb": 5}, "ddp.bucket_cap_mb = 5.0: must be left out"),
        ({"bucket_cap_mb": 0}, "--bucket-cap-mb: ddp.bucket_cap_mb = 0"),
        (
            {"gradient_as_bucket_view": True, "ddp_gradient_sync": False, "loss": "liger"},
            "ddp.gradient_sync = false: must be true for losses other than plain",
        ),
    ],
)
def test_refusals(flags: dict[str, object], line: str) -> None:
    merged = {name.replace("_", "-"): str(value).lower() for name, value in (GPT2 | flags).items()}
    with pytest.raises(PlanError) as caught:
        estimate(read_plan(None, merged).plan)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
