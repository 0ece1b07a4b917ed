"""Losses without all logits, beside their own code on fake tensors."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from itertools import accumulate
from typing import Literal

import pytest
from hypothesis import given, settings, strategies as st

from memplan.estimate import detail, estimate
from memplan.layers import fused_losses
from memplan.layers.autograd import Recorder, Tensor
from memplan.layers.fused_losses import HeadLoss, liger_chunk
from memplan.layers.huggingface import LayerShape
from memplan.layers.module import Interface, Module, Options, Run, build
from memplan.layers.tuning import Tuning
from memplan.layers.work import Product
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.plan.spec import ModelSpec
from memplan.tape.events import Category, Drop, Hold, Tape
from tests.oracle.fused_losses import (
    Loss,
    Sizes,
    chunked,
    cut,
    cut_is_forked,
    last_tokens,
    liger as real_liger,
    traced_loss,
)
from tests.oracle.tracer import Change

SIZES = [
    Sizes(b, s, h, v, dtype)
    for b, s, h, v in ((2, 40, 32, 200), (1, 64, 64, 1000), (3, 32, 256, 300), (2, 128, 128, 128))
    for dtype in ("bf16", "fp32")
]


def spec(h: int, v: int) -> ModelSpec:
    flags = {"model": "llama-3-8b", "hidden": h, "vocab": v, "heads": 4, "kv-heads": 2, "head-dim": 16, "ffn": 64}
    return read_plan(None, {name: str(value) for name, value in flags.items()}).plan.model


def head(sizes: Sizes, loss: HeadLoss, tuning: Tuning | None = None, counts: Literal["", "first"] = "") -> Module:
    shape = LayerShape(spec(sizes.h, sizes.v), sizes.b, sizes.s, sizes.weight or sizes.dtype, False)

    def recipe(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        computed, returned = fused_losses.head(r, x, shape, loss)
        return Run(None, until_end=returned, loss=computed)

    interface = Interface((sizes.b, sizes.s, sizes.h), sizes.dtype)
    return build("head", recipe, interface, Options(accumulates_in_place=False, tuning=tuning, counts=counts))


def of_tape(tape: Tape) -> list[int]:
    events = [event for event in tape if isinstance(event, Hold | Drop)]
    return [event.bytes if isinstance(event, Hold) else -event.bytes for event in events]


def of_trace(changes: list[Change]) -> list[int]:
    return [change.sign * change.bytes for change in changes]


def drops_sorted(sizes: list[int]) -> list[int]:
    """Signed sizes with those that end at once in order of size."""
    result: list[int] = []
    run: list[int] = []
    for size in sizes:
        if size > 0:
            result += [*sorted(run), size]
            run = []
        else:
            run.append(size)
    return result + sorted(run)


def peak(sizes: list[int]) -> int:
    return max(accumulate(sizes, initial=0))


def check(sizes: Sizes, mine: HeadLoss, real: Loss, ends_with_loss: int = 0) -> None:
    """Every event of forward; of backward its peak and what it leaves, the loss (of 512 bytes) aside, with which
    ``ends_with_loss`` bytes end."""
    module, trace = head(sizes, mine), traced_loss(real, sizes)
    assert drops_sorted(of_tape(module.first.forward)) == drops_sorted(of_trace(trace.forward))
    backward = of_tape(module.first.backward)
    assert peak(backward) == peak(of_trace(trace.backward))
    assert sum(backward) == sum(of_trace(trace.backward)) - 512 - ends_with_loss


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_liger(sizes: Sizes, fp32: bool, capability: tuple[int, int]) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    pytest.importorskip("liger_kernel", reason="Liger is not installed")
    if tuple(map(int, version("liger_kernel").split("."))) < (0, 8, 3):
        pytest.skip("Liger is older than 0.8.3")
    mine = HeadLoss("liger", fp32_accumulators=fp32, fused_addmm=capability >= (8, 0))
    check(sizes, mine, real_liger(fp32=fp32, capability=capability))


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_liger_with_a_frozen_weight(sizes: Sizes, fp32: bool) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    pytest.importorskip("liger_kernel", reason="Liger is not installed")
    if tuple(map(int, version("liger_kernel").split("."))) < (0, 8, 3):
        pytest.skip("Liger is older than 0.8.3")
    module = head(sizes, HeadLoss("liger", fp32_accumulators=fp32), Tuning())
    trace = traced_loss(real_liger(fp32=fp32, capability=(8, 0)), sizes, trained=False)
    assert drops_sorted(of_tape(module.first.forward)) == drops_sorted(of_trace(trace.forward))
    assert peak(of_tape(module.first.backward)) == peak(of_trace(trace.backward))
    assert not any(event.category is Category.GRADIENTS for event in module.first.forward if isinstance(event, Hold))


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_cut(sizes: Sizes, fp32: bool) -> None:
    """Of the main branch: the release of January 2025 has other locks."""
    cut_of(forked=False)
    valids = -(-8 * sizes.b * (sizes.s - 1) // 512) * 512
    check(sizes, HeadLoss("cut", fp32_accumulators=fp32), cut(fp32=fp32), ends_with_loss=valids)


def cut_of(*, forked: bool) -> None:
    """Skips without Apple's cut cross entropy, or Axolotl's fork of it."""
    pytest.importorskip("triton", reason="Triton is not installed")
    pytest.importorskip("cut_cross_entropy.vocab_parallel", reason="cut cross entropy is not installed")
    if cut_is_forked() is not forked:
        pytest.skip("the cut cross entropy that is installed is the other one")


@pytest.mark.parametrize("trained", [False, True])
def test_cut_makes_no_gradient_of_a_frozen_weight(trained: bool) -> None:
    """128 tokens with labels of 129, h = 64, v = 1024, in bf16. At the peak of backward there are the loss's gradient
    (512 bytes), the order of words (4 v), the hidden states' gradient (2 * 129 * 64 = 16,512, rounded to 16,896) with
    one lock (512); of a weight that is trained its gradient, too (2 v h), with 8 locks (512)."""
    sizes = Sizes(1, 129, 64, 1024, "bf16")
    backward = head(sizes, HeadLoss("cut"), None if trained else Tuning()).first.backward
    assert peak(of_tape(backward)) == 512 + 4 * 1024 + 16_896 + 512 + trained * (2 * 1024 * 64 + 512)


@pytest.mark.parametrize(("kind", "frozen", "trained"), [("liger", 2, 3), ("cut", 3, 4)])
def test_products_of_a_frozen_head(kind: str, frozen: int, trained: int) -> None:
    """Logits, the gradient of hidden states, and that of a weight that is trained; cut cross entropy makes the logits
    again in backward. Each multiplies 128 tokens, or for ``cut`` those with labels, by 64 by 1,024."""
    sizes = Sizes(1, 128, 64, 1024, "bf16")
    for tuning, count in ((Tuning(), frozen), (None, trained)):
        work = head(sizes, HeadLoss(kind), tuning, "first").work
        made = [(one, times) for one, times in (*work.forward, *work.backward) if isinstance(one, Product)]
        multiplied = sum(times * one.times * one.m * one.n * one.k for one, times in made)
        assert multiplied == count * (127 if kind == "cut" else 128) * 64 * 1024


CUT_SIZES = [replace(sizes, weight="bf16") for sizes in SIZES]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("sizes", CUT_SIZES, ids=str)
def test_cut_of_axolotl(sizes: Sizes, fp32: bool, trained: bool) -> None:
    """Its weight is in 16 bits, and frozen beside adapters; hidden states are in fp32 behind layer norms under
    autocast. Every event of forward; of backward its peak, and what it leaves, but for the loss, its gradient, and the
    indices of tokens, which the function's context keeps as long as the caller has the loss."""
    cut_of(forked=True)
    indices = -(-8 * sizes.b * (sizes.s - 1) // 512) * 512
    module = head(sizes, HeadLoss("cut", fp32_accumulators=fp32), None if trained else Tuning())
    trace = traced_loss(cut(fp32=fp32), sizes, trained=trained)
    assert drops_sorted(of_tape(module.first.forward)) == drops_sorted(of_trace(trace.forward))
    backward = of_tape(module.first.backward)
    cast = (0, indices + 512) if sizes.dtype == "fp32" else (0,)  # the cast's gradient comes behind all others
    assert peak(of_trace(trace.backward)) - peak(backward) in cast
    assert sum(backward) == sum(of_trace(trace.backward)) - 512 - indices


@pytest.mark.parametrize("trained", [False, True])
def test_cut_of_axolotl_in_evaluation(trained: bool) -> None:
    """A weight that is trained has mean logits without a graph, too: a parameter requires its gradient there."""
    cut_of(forked=True)
    sizes = Sizes(2, 40, 32, 200, "bf16")
    module = head(sizes, HeadLoss("cut"), None if trained else Tuning())
    trace = traced_loss(cut(fp32=False), sizes, trained=trained, backward=False)
    ends = [-512]  # the loss, which the caller of the trace keeps
    assert drops_sorted(of_tape(module.evaluation)) == drops_sorted(of_trace(trace.forward) + ends)
    assert [event.name for event in module.evaluation if "average" in getattr(event, "name", "")] == (
        ["logit_average"] if trained else []
    )


@pytest.mark.parametrize("chunks", [1, 4, 8])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_chunked(sizes: Sizes, chunks: int) -> None:
    check(sizes, HeadLoss("chunked", chunks=chunks), chunked(chunks))


@pytest.mark.parametrize("kept", [1, 7, 32])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_logits_to_keep(sizes: Sizes, kept: int) -> None:
    """The trace also copies the labels that the caller would have cut. The loss of 512 bytes, which a caller keeps,
    ends at once here."""
    module, trace = head(sizes, HeadLoss(logits_to_keep=kept)), traced_loss(last_tokens(kept), sizes)
    labels = next(change for change in trace.forward if change.op == "aten.clone.default" and change.dtype == "int64")
    forward = [change for change in trace.forward if change.storage != labels.storage]
    assert drops_sorted(of_tape(module.first.forward)) == drops_sorted(of_trace(forward))
    assert 0 <= peak(of_trace(trace.backward)) - peak(of_tape(module.first.backward)) <= 512


SMALL = {"model": "llama-3-8b", "layers": "2", "gpu": "a100-80gb", "seq": "512", "hidden": "256", "heads": "4"} | {
    "kv-heads": "2",
    "head-dim": "64",
    "ffn": "512",
}


def plan(**flags: object) -> Plan:
    return resolve(read_plan(None, SMALL | {k.replace("_", "-"): str(v) for k, v in flags.items()}).plan)


KINDS = ("liger", "cut", "chunked")


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["single", "device-map", "ddp"]),
    st.sampled_from([*KINDS, "plain"]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["bf16", "fp32"]),
    st.booleans(),
    st.sampled_from(["none", "full"]),
)
def test_an_iteration_leaves_nothing_behind_and_readings_are_in_order(
    framework: str, kind: str, mbs: int, microbatches: int, dtype: str, tied: bool, recompute: str
) -> None:
    if framework == "ddp" and kind == "chunked":
        framework = "single"
    gpus = {"single": 1, "device-map": 2, "ddp": 2}[framework]
    gbs = mbs * microbatches * (gpus if framework == "ddp" else 1)
    flags = {"framework": framework, "gpus": gpus, "mbs": mbs, "gbs": gbs, "dtype": dtype, "loss": kind}
    asked = plan(**flags, tied_embeddings=str(tied).lower(), recompute=recompute)
    result = estimate(asked)
    for stage in result.stages:
        assert stage.allocated is not None
        assert stage.reserved is not None
        assert stage.requested <= stage.allocated <= stage.reserved
        assert sum(stage.breakdown) == stage.allocated
    whole = estimate(plan(**{**flags, "loss": "plain"}, tied_embeddings=str(tied).lower(), recompute=recompute))
    assert result.stages[0].parameters == whole.stages[0].parameters
    assert result.peak <= whole.peak
    assert all(getattr(event, "name", "held") for tape in detail(asked, 0) for event in tape.events)


def test_a_chunk_of_liger_is_as_large_as_the_hidden_states() -> None:
    """Llama 3: 8192 tokens over ceil(128256 / 4096) = 32 are 256 a chunk, whose logits take 65,667,072 bytes."""
    assert liger_chunk(8192, 4096, 128_256) == 256
    assert liger_chunk(16_384, 4096, 32_000) == 2048  # the example of Liger's own comment
    assert liger_chunk(1, 4096, 128_256) == 1
    held = head(Sizes(1, 8192, 4096, 128_256, "bf16"), HeadLoss("liger")).first.forward
    assert max(e.bytes for e in held if isinstance(e, Hold) and e.category is Category.LOGITS) == 65_667_072


@pytest.mark.parametrize(
    ("liger", "fp32", "beside"),
    [
        ((0, 6, 1), False, 0),
        ((0, 6, 2), False, 2 + 4),
        ((0, 8, 0), True, 2 + 4),
        ((0, 8, 2), False, 2 + 4),
        ((0, 8, 2), True, 0),
        ((0, 8, 3), False, 0),
    ],
)
def test_older_versions_of_liger_hold_products_and_two_chunks(liger: tuple[int, ...], fp32: bool, beside: int) -> None:
    """bf16, 512 tokens in chunks of 64: the peak beside what a version from 0.8.3 holds, in bytes."""
    sizes = Sizes(1, 512, 256, 2048, "bf16")
    forward = head(sizes, HeadLoss("liger", liger=liger, fp32_accumulators=fp32)).first.forward
    newest = head(sizes, HeadLoss("liger", fp32_accumulators=fp32)).first.forward
    logits = [event.bytes for event in forward if isinstance(event, Hold) and event.category is Category.LOGITS]
    assert logits == ([64 * 2048 * 2] if liger >= (0, 8, 3) else 8 * [64 * 2048 * 2])
    largest = max(e.bytes for e in forward if isinstance(e, Hold) and "weight_chunk" in e.name) if beside else 0
    assert largest == (2048 * 256 * 4 if beside else 0)
    if beside and not fp32:
        assert peak(of_tape(forward)) == peak(of_tape(newest)) + beside * 2048 * 256


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            {"loss": "liger", "framework": "megatron-deepspeed"},
            "with framework megatron-deepspeed; single, ddp, device-map, deepspeed and fsdp have liger",
        ),
        ({"loss": "cut", "framework": "megatron"}, "must be vocab-parallel with framework megatron"),
        ({"loss": "chunked", "framework": "ddp", "gpus": 2}, "with framework ddp: chunks run backward within forward"),
        ({"loss": "chunked", "loss_chunks": 7}, "must divide the 512 tokens"),
        ({"loss": "plain", "loss_chunks": 4}, "needs loss.kind chunked, not plain"),
        ({"loss": "chunked", "loss_fp32_accumulators": "true"}, "needs loss.kind liger or cut"),
        ({"loss": "liger", "liger_version": "0.5.2"}, "must be at least 0.5.3"),
        (
            {"loss": "liger", "liger_version": "0.6.1", "loss_fp32_accumulators": "true"},
            "Liger 0.6.2 and later support fp32 accumulators",
        ),
        ({"loss": "cut", "liger_version": "0.8.2"}, "needs loss.kind liger"),
        ({"loss": "cut", "seq": 1}, "must be at least 2"),
        ({"loss": "liger", "logits_to_keep": 4}, "needs a causal model and loss.kind plain"),
        ({"logits_to_keep": 513}, "must be at most the 512 tokens"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(flags: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(**flags)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fewer_logits_take_less() -> None:
    """Of 512 tokens in bf16 the logits of 1: the head's gradient of the weight remains."""
    whole, one = estimate(plan()), estimate(plan(logits_to_keep=1))
    assert one.peak < whole.peak
    assert one.stages[0].of(Category.LOGITS) <= 4 * 4 * 128_256
