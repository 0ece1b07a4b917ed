"""torchtitan's DeepSeek V3 of today under ``fully_shard``, against the same operators run on fake tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memplan.frameworks.fsdp import programs as fsdp
from memplan.frameworks.fsdp.titan_experts import cut_of_experts
from memplan.frameworks.fsdp.torchtitan import ActivationCheckpointing, torchtitan_model
from memplan.frameworks.fsdp.units import Sharding
from memplan.layers.module import Options

from ..oracle import fsdp as oracle, titan_gpt_oss
from ..oracle.titan_gpt_oss import expert_meshes
from ..oracle.titan_models import Sizes
from ..oracle.titan_newest import DeepSeek
from .every_event import check_every_event
from .test_fsdp_titan import LATENT, V3, plan_of

V2 = replace(LATENT, layers=2)


@pytest.mark.parametrize(
    ("recompute", "chunks", "given", "ranks"),
    [
        ("none", 0, V2, 1),
        ("op", 2, replace(V3, layers=2), 4),
        pytest.param("full", 2, V2, 2, marks=pytest.mark.slow),
        pytest.param("op", 0, LATENT, 1, marks=pytest.mark.slow),
        pytest.param("none", 0, replace(V2, experts=4), 2, marks=pytest.mark.slow),
    ],
)
def test_every_event(recompute: str, chunks: int, given: Sizes, ranks: int) -> None:
    plan = plan_of(given)
    updates: dict[str, dict[str, object]] = {"fsdp": {"newest": True}, "layout": {"ep": ranks, "dp": 8}}
    updates |= {"batch": {"gbs": 8 * given.b}}
    if chunks:
        updates["loss"] = {"kind": "chunked", "chunks": chunks}
    plan = plan.model_copy(update={name: getattr(plan, name).model_copy(update=one) for name, one in updates.items()})
    policy = ActivationCheckpointing(recompute)  # type: ignore[arg-type]
    model = torchtitan_model(plan, Options(accumulates_in_place=False), policy, ends_apart=True)
    shares = ranks > 1
    cut = cut_of_experts(plan) if shares else None
    program = fsdp.program(plan, model, Sharding(8, divides=shares, experts=cut))
    sharding = oracle.Sharding(8)
    build = titan_gpt_oss.builder(given, sharding, [recompute] * given.layers, chunks, ranks=ranks, decoder=DeepSeek)
    check_every_event(
        program, oracle.traced(build, sharding, of=(lambda _: expert_meshes(8, ranks)) if shares else None)
    )
