"""``single``, ``ddp`` and ``device-map``: what is refused, and what the frameworks add."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.estimate import detail, estimate
from memplan.frameworks.plain.programs import programs as programs_of
from memplan.layers.module import SHARED, Module, Options
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Category, Drop, Hold
from memplan.tape.program import Program

SMALL = {"model": "gpt2", "layers": "3", "gpu": "a100-80gb", "seq": "128", "attention": "eager"}


def plan(**flags: object) -> Plan:
    merged = {**SMALL, **{k.replace("_", "-"): str(v) for k, v in flags.items()}}
    return resolve(read_plan(None, merged).plan)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"model": "bloom-176b", "framework": "single"}, "has no recipe in framework single"),
        ({"recompute": "selective"}, "whole layers"),
        ({"recompute": "full", "recompute_layers": 2}, "uniform with layers 1"),
        ({"dtype": "fp32", "attention": "flash_attention_2"}, "fp16 and bf16 only"),
        ({"model": "mistral-7b", "attention": "flash", "seq": 8192}, "sliding window of 4096"),
        ({"model": "mistral-7b", "attention": "flash", "seq": 4096}, "sliding window of 4096"),
        ({"dtype": "bf16", "gradients": "fp32"}, "precision.gradients"),
        ({"loss": "adaptive-softmax"}, "loss.kind"),
    ],
)
def test_what_has_no_recipe_is_refused_in_one_line(flags: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        estimate(plan(**flags))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ddp_adds_buckets_as_large_as_the_gradients() -> None:
    mib = 2**20
    one, two = estimate(plan(framework="single")), estimate(plan(framework="ddp", gpus=2))
    added = two.stages[0].of(Category.COMMUNICATION_BUFFERS)
    gradients = two.stages[0].parameters * 2
    assert gradients <= added <= gradients + 512 * 64
    assert two.stages[0].static - one.stages[0].static == pytest.approx(added, abs=4 * mib)  # blocks round
    assert two.stages[0].device is not None
    assert not one.stages[0].beyond.nccl
    assert two.stages[0].beyond.nccl


def test_expandable_segments_leave_no_rest_in_blocks() -> None:
    plain = estimate(plan(dtype="fp32"))
    expandable = estimate(plan(dtype="fp32", env="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"))
    assert expandable.stages[0].requested == plain.stages[0].requested
    assert expandable.stages[0].of(Category.BLOCK_ROUNDING) <= plain.stages[0].of(Category.BLOCK_ROUNDING)


def test_a_wrong_allocator_setting_names_its_variable() -> None:
    with pytest.raises(PlanError, match="PYTORCH_CUDA_ALLOC_CONF"):
        estimate(plan(env="PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:few"))


TIED_SUM = 50257 * 768 * 2
"""The sum of the tied table's two gradients, which counts as a workspace until they end. Bytes."""


def test_without_a_gpu_there_is_nothing_to_fit_into() -> None:
    flags = {k: v for k, v in SMALL.items() if k != "gpu"}
    result = estimate(resolve(read_plan(None, flags).plan))
    assert result.fits is None
    assert result.stages[0].device is None
    assert result.stages[0].of(Category.WORKSPACES) == TIED_SUM


def test_workspaces_follow_the_environment() -> None:
    """``:4096:8``: eight times 4096 KiB = 32 MiB (33,554,432 bytes); the default is 8,519,680 on an A100.

    Each once for the main thread's handle and once for autograd's.
    """
    by_default = estimate(plan()).stages[0].of(Category.WORKSPACES)
    larger = estimate(plan(env="CUBLAS_WORKSPACE_CONFIG=:4096:8")).stages[0].of(Category.WORKSPACES)
    assert by_default == TIED_SUM + 2 * 8_519_680
    assert larger == TIED_SUM + 2 * 33_554_432


def test_optimizers_cost_what_they_keep() -> None:
    """bf16 parameters: SGD nothing, Adam 2 x 2 bytes, 8-bit Adam 2 bytes and 8 per 256."""
    sgd, adam = estimate(plan(optimizer="sgd")), estimate(plan(optimizer="adamw"))
    eight = estimate(plan(optimizer="adam8bit", embeddings_32bit="false"))
    p = sgd.stages[0].parameters
    states = Category.OPTIMIZER_STATES
    assert sgd.stages[0].of(states) == 0
    assert adam.stages[0].of(states) == pytest.approx(4 * p, rel=1e-3)
    assert eight.stages[0].of(states) == pytest.approx(2 * p + 8 * p / 256, rel=5e-3)


def test_a_detail_of_a_stage_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match="from 0 to 0"):
        detail(plan(), 1)


def test_detail_tapes_name_every_tensor_with_shape_and_dtype() -> None:
    tapes = detail(plan(), 0)
    assert [tape.module for tape in tapes][:2] == ["embedding", "layer.0"]
    assert tapes[-1].phase == "step"
    for tape in tapes:
        for event in tape.events:
            assert getattr(event, "name", "held") != ""


FAMILIES = st.sampled_from(["gpt2", "llama-3-8b", "qwen3-8b", "bert-large", "mistral-7b"])


@settings(max_examples=40, deadline=None)
@given(
    FAMILIES,
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([16, 33, 128]),
    st.sampled_from(["fp32", "bf16", "fp16"]),
    st.sampled_from(["none", "full"]),
    st.sampled_from(["eager", "flash"]),
    st.integers(1, 3),
    st.sampled_from(["single", "ddp", "device-map"]),
)
def test_any_small_plan_has_readings_in_order_and_categories_that_sum(
    model: str,
    layers: int,
    b: int,
    s: int,
    dtype: str,
    recompute: str,
    attention: str,
    microbatches: int,
    framework: str,
) -> None:
    if attention == "flash" and dtype == "fp32":
        attention = "eager"
    gpus = {"single": 1, "ddp": 2, "device-map": min(2, layers)}[framework]
    replicas = gpus if framework == "ddp" else 1
    flags = {
        "model": model,
        "layers": layers,
        "mbs": b,
        "gbs": b * microbatches * replicas,
        "seq": s,
        "dtype": dtype,
        "recompute": recompute,
        "attention": attention,
        "framework": framework,
        "gpu": "h100-80gb",
        "gpus": gpus,
        "hidden": 64,
        "heads": 4,
        "kv-heads": 4 if model in ("gpt2", "bert-large") else 2,
        "head-dim": 16,
        "ffn": 96,
        "vocab": 1000,
    }
    result = estimate(resolve(read_plan(None, {k: str(v) for k, v in flags.items()}).plan))
    for stage in result.stages:
        assert stage.allocated is not None
        assert stage.reserved is not None
        assert stage.requested <= stage.allocated <= stage.reserved
        assert sum(stage.breakdown) == stage.allocated
        evaluation = stage.moments["evaluation"]
        assert evaluation is not None
        assert evaluation <= stage.allocated


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model", ["gemma-3-4b", "gemma-2-9b", "llama-4-scout", "llama-3-8b"])
def test_what_modules_share_begins_and_ends_once(model: str, recompute: str) -> None:
    """A mask or table of one kind of layers, or a tied gradient that waits, is no other tensor under the same id; the
    first layer of its kind, the sixth of Gemma 3's with all tokens, is the last to end it."""
    (program,) = programs_of(plan(model=model, layers=8, recompute=recompute), Options())
    alive: set[int] = set()
    steps = [module.steady.forward for module in modules_of(program)]
    for event in chain(*steps, *(module.steady.backward for module in reversed(modules_of(program)))):
        if isinstance(event, Hold | Drop) and event.tensor <= SHARED:
            assert (event.tensor in alive) == isinstance(event, Drop), event
            alive ^= {event.tensor}
    assert not alive


def modules_of(program: Program) -> list[Module]:
    return [span.module for span in program.spans for _ in span.names]
