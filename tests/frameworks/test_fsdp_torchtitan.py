"""torchtitan's Llama under ``fully_shard``, against the same operators run on fake tensors."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from memplan.estimate import detail
from memplan.frameworks.fsdp import programs as fsdp
from memplan.frameworks.fsdp.torchtitan import ActivationCheckpointing, torchtitan_model
from memplan.frameworks.fsdp.units import Sharding
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve

from ..oracle import fsdp as oracle
from ..oracle.torchtitan import Sizes, builder
from .every_event import check_every_event

SIZES = Sizes(hidden=192, heads=6, kv_heads=2, ffn=448, vocab=1003, layers=4, b=2, s=64)


@dataclass(frozen=True)
class Case:
    recompute: ActivationCheckpointing
    ends_apart: bool = False
    reshard_ends: bool = False
    sizes: Sizes = SIZES
    shards: int = 8


MHA = Sizes(hidden=128, heads=4, kv_heads=4, ffn=320, vocab=515, layers=3, b=1, s=96)
MQA = Sizes(hidden=96, heads=3, kv_heads=1, ffn=256, vocab=771, layers=2, b=3, s=37)
CASES = {
    "none": Case(ActivationCheckpointing("none")),
    "none-mha": Case(ActivationCheckpointing("none"), sizes=MHA, shards=3),
    "none-mqa": Case(ActivationCheckpointing("none"), sizes=MQA, shards=2),
    "op-mqa": Case(ActivationCheckpointing("op"), sizes=MQA, shards=2),
    "full-mha": Case(ActivationCheckpointing("full"), sizes=MHA, shards=3),
    "full-mqa": Case(ActivationCheckpointing("full"), sizes=MQA, shards=2),
    "op": Case(ActivationCheckpointing("op")),
    "op-ends-apart": Case(ActivationCheckpointing("op"), ends_apart=True),
    "none-ends-resharded": Case(ActivationCheckpointing("none"), ends_apart=True, reshard_ends=True),
    "op-ends-resharded": Case(ActivationCheckpointing("op"), ends_apart=True, reshard_ends=True, sizes=MQA, shards=2),
    "op-mha": Case(ActivationCheckpointing("op"), sizes=MHA, shards=3),
    "full": Case(ActivationCheckpointing("full")),
    "every-second-layer-ends-apart": Case(ActivationCheckpointing("full", 2), ends_apart=True),
}


def plan_of(given: Sizes, **flags: str) -> Plan:
    """A plan for ``given``, as a cut of Llama 2."""
    plan = resolve(
        read_plan(
            None,
            {
                "model": "llama-3-8b",
                "framework": "single",
                "dtype": "bf16",
                "mbs": str(given.b),
                "seq": str(given.s),
                "layers": str(given.layers),
                "attention": "flash",
                "optimizer": "adamw",
                **flags,
            },
        ).plan
    )
    changed = {"hidden": given.hidden, "heads": given.heads, "kv_heads": given.kv_heads, "ffn": given.ffn}
    spec = plan.model.model_copy(update={**changed, "head_dim": given.head_dim, "vocab": given.vocab})
    return plan.model_copy(update={"model": spec})


@pytest.fixture(params=CASES.values(), ids=list(CASES), scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    assert isinstance(request.param, Case)
    return request.param


def test_every_event(case: Case) -> None:
    plan = plan_of(case.sizes)
    batch = plan.batch.model_copy(update={"gbs": case.sizes.b * case.shards})
    layout = plan.layout.model_copy(update={"dp": case.shards})
    plan = plan.model_copy(update={"batch": batch, "layout": layout})
    options, ends = (
        Options(accumulates_in_place=False),
        {"ends_apart": case.ends_apart, "reshard_ends": case.reshard_ends},
    )
    model = torchtitan_model(plan, options, case.recompute, **ends)
    program = fsdp.program(plan, model, Sharding(case.shards))
    modes = [case.recompute.of(layer) for layer in range(case.sizes.layers)]
    sharding = oracle.Sharding(case.shards)
    steps = oracle.traced(builder(case.sizes, sharding, modes, **ends), sharding)
    check_every_event(program, steps)


@pytest.mark.parametrize(
    ("flags", "says"),
    [({"model": "gpt2"}, "no recipe in torchtitan's code"), ({"attention": "eager"}, "must be flash")],
)
def test_what_has_no_recipe_is_refused(flags: dict[str, str], says: str) -> None:
    plan = resolve(read_plan(None, {"model": "llama-3-8b", "framework": "single", "dtype": "bf16", **flags}).plan)
    with pytest.raises(PlanError, match=says):
        torchtitan_model(plan, Options(), ActivationCheckpointing())


def titan(**flags: str) -> Plan:
    job = {"model": "llama-3-8b", "framework": "fsdp", "fsdp-code": "torchtitan", "gpus": "4", "layers": "2"}
    return resolve(read_plan(None, {**job, "seq": "256", "gbs": "4", "reshard-root": "true", **flags}).plan)


def test_chunks_reshard_norm_and_head_by_themselves() -> None:
    """``ChunkedLossWrapper`` leaves ``set_reshard_after_forward(True)`` behind, whatever the policy was."""
    newest = {"fsdp-newest": "true", "loss": "chunked"}
    always, default = (titan(**newest, **{"reshard-root": value}) for value in ("true", "false"))
    assert detail(always, 0) == detail(default, 0)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({}, "unless fsdp.ends_apart is true: norm and head are no unit"),
        ({"pp": "2"}, "unless layout.pp is 1: in stages"),
        ({"ends-apart": "true", "reshard-after-forward": "false"}, "unless fsdp.reshard_after_forward is true"),
    ],
)
def test_a_policy_without_a_model_is_refused(flags: dict[str, str], says: str) -> None:
    with pytest.raises(PlanError, match=f"fsdp.reshard_root = true: must be false .* {says}"):
        titan(**flags)
