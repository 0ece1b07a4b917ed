"""Steps of models with gated delta nets: what their kernels do, and how long it takes."""

from __future__ import annotations

from typing import Any

import pytest

from memplan.frameworks import framework
from memplan.layers.gated_delta import Sizes, work_of
from memplan.layers.work import Attention
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.search.time import step_time, work_of as stages_of
from memplan.search.time.shape import WITH_DELTA, elements, model_flops, shape_of

LORA = {"lora-rank": "8", "lora-targets": "q_proj,v_proj"}


def plan(layers: int = 4, **more: Any) -> ResolvedPlan:
    flags = {"model": "qwen3-next-80b-a3b", "layers": str(layers), "framework": "megatron", "gpu": "h100-80gb"}
    flags |= {"seq": "4096", "gbs": "8", "zero": "1", "gpus": "8", "ep": "8"}
    return resolve(read_plan(None, {**flags, **{name.replace("_", "-"): value for name, value in more.items()}}).plan)


def test_the_rules_kernels_by_hand() -> None:
    """Of a chunk of 64 tokens, forward 2 x 64 x 64 (2 d + 2 e + d) FLOPs between tokens and 2 x 64 x 3 d e with states:
    the keys' scores, the inverse with keys and values, the state before and behind it, queries' scores and values.
    Megatron-LM's formula counts 4 products of a head's features with each other for each token, here 3."""
    d = e = 128
    at = Sizes(1, 640, 2, 4, d, e, 4)
    chunks, between, states = 10 * 4, 2 * 64 * 64 * (3 * d + 2 * e), 2 * 64 * 3 * d * e
    forward, backward = (sum(one.flops for one in part or ()) for part in work_of(at, "bf16")[:2])  # type: ignore[union-attr]
    assert forward == chunks * (between + states)
    again = 2 * 64 * 64 * (d + e) + 2 * 64 * 2 * d * e
    assert backward > chunks * again + 2 * (forward - chunks * 2 * 64 * 64 * d)


def test_kernels_do_what_the_model_needs() -> None:
    """FLOPs of the recipes' products beside Megatron-LM's formula, of a rank and micro-batch: those of chunks beside
    its four for each head, token and feature, and what backward computes again."""
    made = plan()
    entries = shape_of(made).entries
    (chunk,) = stages_of(made)[0]
    assert [count for count, _ in chunk.kinds] == [1, 3, 0, 0]
    assert len(WITH_DELTA) == len(entries.kinds)
    layers = sum(count * own.flops for (count, _), (own, _) in zip(chunk.kinds, entries.kinds, strict=True))
    assert (layers + entries.head.flops) * made.batch.gbs == pytest.approx(model_flops(made), rel=0.06)


def test_time_is_that_of_each_kind() -> None:
    four, eight, twelve = (step_time(plan(layers)) for layers in (4, 8, 12))
    assert twelve.compute - eight.compute == pytest.approx(eight.compute - four.compute, rel=1e-6)
    again = step_time(plan(recompute="selective", recompute_modules="gdn_norm_out"))
    assert 0 < again.recompute < four.compute * 0.05
    assert again.mfu < four.mfu


@pytest.mark.parametrize(("code", "adapters"), [("transformers", {}), ("torchtitan", {}), ("transformers", LORA)])
def test_layers_with_attention_are_timed_apart_from_nets(code: str, adapters: dict[str, str]) -> None:
    """Qwen 3.5 9B has attention in 8 of 32 layers, and nets in the others; adapters of ``q_proj`` and ``v_proj`` are in
    those 8 alone: 8 features of 4,096 in, and 2 x 16 heads (with their gates) or 4 heads of 256 features out."""
    flags = {"model": "qwen3.5-9b", "framework": "fsdp", "fsdp-code": code, "gpus": "8", "gpu": "h100-80gb", **adapters}
    made = resolve(read_plan(None, {**flags, "seq": "4096"}).plan)
    own, ((work,),) = framework("fsdp").time, stages_of(made)
    assert (work.layers, work.dense) == (32, 8)
    entries = own.entries(made)
    attention = [
        any(isinstance(one, Attention) for one, _ in layer.forward) for layer in (entries.layer, entries.dense)
    ]
    assert attention == [False, True]
    if adapters:
        assert elements(entries, (work,)).trained == 8 * 8 * (4096 + 2 * 16 * 256 + 4096 + 4 * 256)
