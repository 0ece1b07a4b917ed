"""Bounds from below of frameworks whose cut nobody chooses, against the fold."""

from __future__ import annotations

from random import Random
from statistics import median

import pytest
from hypothesis import given, settings, strategies as st

from memplan.estimate import fold
from memplan.frameworks.fsdp.bounds import _Walk
from memplan.frameworks.megatron.modules import layer_forward, layers_module, module_shapes
from memplan.frameworks.megatron.programs import stages_of
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.search.lower_bounds import EXACT, Growing, Needs
from memplan.search.space import Space, filled, space_of
from memplan.tape.events import rounded
from memplan.values import replace

TINY = {
    "layers": "6", "hidden": "256", "ffn": "712", "heads": "4", "kv-heads": "4", "head-dim": "64", "vocab": "5000",
    "seq": "250", "gpu": "a100-40gb", "gpus-per-node": "4",
}  # fmt: skip
LLAMA = {**TINY, "model": "llama-2-7b", "dtype": "bf16"}
GPT2 = {**TINY, "model": "gpt2", "seq": "130"}
QWEN = {**TINY, "model": "qwen2.5-7b", "dtype": "bf16"}
VIEWS = {"framework": "ddp", "gpus": "4", "gbs": "48", "gradient-as-bucket-view": "true"}
TITAN = {**LLAMA, "framework": "fsdp", "fsdp-code": "torchtitan"}
EXPERTS = {
    **TINY, "model": "qwen3-30b-a3b", "dtype": "bf16", "framework": "fsdp", "fsdp-code": "torchtitan", "gpu": "h200",
    "experts": "8", "expert-top-k": "2", "expert-ffn": "320", "seq": "256",
}  # fmt: skip
DELTA = {
    "model": "qwen3-next-80b-a3b", "layers": "8", "experts": "8", "expert-top-k": "2", "seq": "256", "gpu": "h200",
    "framework": "megatron", "dtype": "bf16",
}  # fmt: skip
HYBRID = {
    **TINY, "model": "nemotron-h-8b", "layers": "6", "layer-pattern": "M-M*M-", "mamba-heads": "8", "mamba-groups": "4",
    "mamba-state-dim": "64", "hidden": "1024", "framework": "megatron", "dtype": "bf16", "gpu": "h200", "seq": "256",
}  # fmt: skip
DEEPSPEED = {"framework": "deepspeed", "gpus": "4", "gbs": "24"}
SPACES: dict[str, tuple[dict[str, str], float]] = {
    "single": ({**LLAMA, "framework": "single", "gbs": "24"}, 0.97),
    "single, GPT-2 with autocast": ({**GPT2, "framework": "single", "gbs": "24", "autocast": "true"}, 0.97),
    "single, adapters": ({**LLAMA, "framework": "single", "gbs": "12", "lora-rank": "8"}, 0.97),
    "single, Trainer": ({**LLAMA, "framework": "single", "gbs": "24", "trainer": "transformers"}, 0.97),
    "ddp": ({**LLAMA, "framework": "ddp", "gpus": "4", "gbs": "96"}, 0.97),
    "ddp, views": ({**GPT2, **VIEWS, "dtype": "fp16"}, 0.97),
    "ddp, no_sync": ({**LLAMA, **VIEWS, "ddp-gradient-sync": "false"}, 0.97),
    "device-map": ({**LLAMA, "framework": "device-map", "gpus": "3", "gbs": "24"}, 0.3),
    "deepspeed": ({**LLAMA, **DEEPSPEED}, 0.7),
    "deepspeed, one layer": ({**LLAMA, **DEEPSPEED, "layers": "1"}, 0.7),
    "deepspeed, biases": ({**QWEN, **DEEPSPEED, "gpus": "3"}, 0.7),
    "deepspeed, GPT-2": ({**GPT2, **DEEPSPEED, "dtype": "fp16", "gpus": "8"}, 0.7),
    "deepspeed, fp32 sums": ({**LLAMA, **DEEPSPEED, "grad-accum-dtype": "fp32"}, 0.6),
    "deepspeed, small buckets": ({**LLAMA, **DEEPSPEED, "reduce-bucket-size": "100000", "overlap-comm": "true"}, 0.7),
    "deepspeed, adapters": ({**LLAMA, **DEEPSPEED, "lora-rank": "8"}, 0.6),
    "fsdp": ({**LLAMA, "framework": "fsdp", "gpus": "4", "gbs": "48"}, 0.8),
    "fsdp, GPT-2": ({**GPT2, "framework": "fsdp", "gpus": "8", "gbs": "48"}, 0.8),
    "fsdp, one rank": ({**LLAMA, "framework": "fsdp", "gpus": "1", "gbs": "12"}, 0.7),
    "fsdp, replicas": ({**LLAMA, "framework": "fsdp", "gpus": "4", "gbs": "48", "fsdp-replicas": "2"}, 0.8),
    "fsdp, groups": ({**LLAMA, "framework": "fsdp", "gpus": "12", "gbs": "144", "gpus-per-node": "2"}, 0.8),
    "fsdp, groups of bf16 shards": (
        {**LLAMA, "framework": "fsdp", "gpus": "8", "gbs": "48", "gpus-per-node": "2", "fsdp-parameters": "bf16"},
        0.8,
    ),
    "fsdp, bf16 shards": ({**LLAMA, "framework": "fsdp", "gpus": "4", "gbs": "48", "fsdp-parameters": "bf16"}, 0.8),
    "fsdp, no_sync": ({**LLAMA, "framework": "fsdp", "gpus": "4", "gbs": "48", "gradient-sync": "false"}, 0.7),
    "fsdp, resharded root": ({**LLAMA, "framework": "fsdp", "gpus": "4", "gbs": "48", "reshard-root": "true"}, 0.8),
    "fsdp, kept": ({**LLAMA, "framework": "fsdp", "gpus": "4", "gbs": "48", "reshard-after-forward": "false"}, 0.8),
    "fsdp, kept in part": ({**LLAMA, "framework": "fsdp", "gpus": "4", "gbs": "48", "reshard-to": "2"}, 0.8),
    "fsdp, adapters": ({**LLAMA, "framework": "fsdp", "gpus": "8", "gbs": "64", "lora-rank": "8"}, 0.9),
    "torchtitan": ({**TITAN, "gpus": "8", "gbs": "96"}, 0.7),
    "torchtitan, every second": ({**TITAN, "gpus": "8", "gbs": "96", "recompute-every": "2"}, 0.7),
    "torchtitan, old stages": ({**TITAN, "gpus": "8", "gbs": "96", "ends-apart": "false"}, 0.7),
    "torchtitan, all resharded": (
        {**TITAN, "gpus": "8", "gbs": "96", "ends-apart": "true", "reshard-root": "true"},
        0.7,
    ),
    "torchtitan, chunks": (
        {**TITAN, "gpus": "8", "gbs": "96", "seq": "256", "ends-apart": "true", "loss": "chunked"},
        0.5,
    ),
    "torchtitan, experts": ({**EXPERTS, "gpus": "8", "gbs": "96"}, 0.5),
    "megatron, hybrid": ({**HYBRID, "gpus": "4", "gbs": "8"}, 0.3),
    "megatron, gated delta nets": ({**DELTA, "gpus": "4", "gbs": "32"}, 0.3),
    "torchtitan, GPipe": ({**TITAN, "gpus": "8", "gbs": "96", "schedule": "gpipe"}, 0.6),
}  # fmt: skip


def space(name: str) -> Space:
    base = read_plan(None, SPACES[name][0]).plan
    return space_of(base, filled(base), {})


SLOW = ("torchtitan, chunks",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SPACES], ids=list(SPACES)
)
@pytest.mark.parametrize("many", [32, pytest.param(120, marks=pytest.mark.slow)])
def test_no_layout_needs_less(name: str, many: int) -> None:
    """And bounds are near what layouts need, or they would leave none out."""
    whole = space(name)
    floor, points = whole.search.lower_bounds(whole), list(whole)
    Random(3).shuffle(points)
    shares: list[float] = []
    for point in points:
        try:
            peak = max(stage.peak for stage in fold(resolve(whole.plan(point))))
        except PlanError:
            continue
        assert floor(point) <= peak, point
        shares.append(floor(point) / peak)
        if len(shares) == many:
            break
    assert len(shares) >= 8
    assert median(shares) > SPACES[name][1]


@pytest.mark.parametrize("name", ["fsdp", "ddp"])
def test_a_bound_that_is_enough_is_on_the_same_side(name: str) -> None:
    """Looked at in whatever order, and equal where it is no more than that."""
    whole = space(name)
    points = Random(3).sample(list(whole), 12)
    exact = [whole.search.lower_bounds(whole)(point) for point in points]
    enough = sorted(exact)[6]
    floor = whole.search.lower_bounds(whole)
    for point, least in zip(points, exact, strict=True):
        assert min(floor(point, enough), enough + 1) == min(least, enough + 1)


def test_a_checkpoint_of_a_refused_layout_has_no_bound() -> None:
    """As its iterations have none: 4 ranks cannot share 2 groups of Mamba heads."""
    flags = {**HYBRID, "gpus": "8", "gbs": "16", "heads": "8", "kv-heads": "8", "mamba-groups": "2"}
    base, bounds = read_plan(None, flags).plan, dict[int, float]()
    needs = Needs(space_of(base, filled(base), {}))
    for point in needs.space:
        bounds[point.tp] = max(bounds.get(point.tp, 0), needs.saved(point))
    assert bounds[4] == 0 < bounds[2]


def test_layers_that_are_alike_are_walked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = space("fsdp, groups")
    points = Random(3).sample(list(whole), 8)
    at_once = [whole.search.lower_bounds(whole)(point) for point in points]
    monkeypatch.setattr(_Walk, "runs", lambda walk, modules: [(at, 1) for at in range(len(modules))])
    assert at_once == [whole.search.lower_bounds(whole)(point) for point in points]


MEGATRON = {"framework": "megatron", "gpus": "8", "gbs": "16", "seq": "1024", "gpu": "h100-80gb"}


@pytest.mark.parametrize(
    "flags",
    [
        {"model": "llama-3-8b", "tp": "2", "sequence-parallel": "true"},
        {"model": "llama-3-8b", "recompute": "full"},
        {"model": "llama-3-8b", "fp8": "delayed", "tp": "2"},
        {"model": "llama-3-8b", "tp": "2", "recompute": "full", "distribute-saved-activations": "true"},
        {"model": "gpt2", "transformer-impl": "local", "recompute": "selective"},
        {"model": "mixtral-8x7b", "ep": "2", "recompute": "selective"},
        {"model": "deepseek-v3", "ep": "8", "recompute": "selective", "recompute-modules": "moe,layernorm,mla_up_proj"},
        {"model": "deepseek-v3", "ep": "8", "recompute": "full"},
        {"model": "llama-3-8b", "lora-rank": "8"},
        {"model": "qwen3-next-80b-a3b", "ep": "8"},
    ],
    ids=lambda flags: " ".join(flags.values()),
)
def test_a_forward_pass_alone_is_that_of_the_whole_module(flags: dict[str, str]) -> None:
    """Of a layer, and of one without experts: its parameters, and what it leaves for backward."""
    plan = resolve(read_plan(None, {**MEGATRON, **flags}).plan)
    job = stages_of(plan, Options()).job
    options, again = replace(job.options, keeps_input=False, drops_gradient=True), plan.recompute.mode == "full"
    whole, _ = module_shapes(job.shape)
    for shape in (whole, whole.fewest_experts[0], replace(whole, experts=None)):
        module = layers_module((shape,), options, recomputed=again)
        assert layer_forward(shape, options, again) == (module.parameters, module.steady.forward_fold.net)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 9999), st.booleans()), max_size=8), min_size=1), st.integers(2, 200))
def test_sums_of_tensors_lie_above_the_line(moments: list[list[tuple[int, bool]]], sequences: int) -> None:
    """Whatever tensors are alive at which moment, some in proportion to the sequences and some not."""

    def measured(many: int) -> tuple[int, ...]:
        return (max(sum(rounded(size * many if grows else size) for size, grows in one) for one in moments),)

    growing = Growing(measured, 8)
    assert growing.at(sequences) <= measured(sequences)[0]
    if sequences <= EXACT:
        assert growing.at(sequences) == measured(sequences)[0]
