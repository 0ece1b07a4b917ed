"""What recipes record of kernels: by hand, and against what PyTorch runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import getmembers, isfunction, signature
from pathlib import Path
from typing import Any

import pytest

from memplan.frameworks import framework
from memplan.layers import ops, selecting
from memplan.layers.autograd import Recorder, Tensor
from memplan.layers.module import Passes, grown
from memplan.layers.work import (
    CAT_OF_ODD_ROWS,
    MIXED,
    REPEATED,
    SOFTMAX,
    SOFTMAX_BACKWARD,
    STRIDED,
    SUM_OF_ROWS,
    TOP_K,
    WIDENED,
    Attention,
    Exchange,
    Kernel,
    Product,
    Stream,
    Work,
    windowed,
)
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.search.time.shape import Entries, model_flops

from ..oracle.kernels import step
from .test_against_transformers import MODELS

A, B, C = 6, 8, 10
N = 2 * A * B
"""Bytes of (6, 8) in 16 bits."""

Operator = Callable[[Recorder, Callable[..., Tensor]], Tensor]


def without_issue(work: Work) -> Work:
    return [one._replace(issue=0) if isinstance(one, Stream) else one for one in work]


def once(operator: Operator) -> tuple[Work, Work]:
    """Kernels of ``operator`` on tensors with gradients: forward and backward."""
    r = Recorder(counts=True, closed=True)

    def given(*shape: int, dtype: str = "bf16") -> Tensor:
        return r.leaf(r.outside(shape, dtype))[0]

    out = operator(r, given)
    forward = len(r.work)
    r.backward([out.alias()], [r.outside(out.shape, out.dtype)])
    return r.work[:forward], r.work[forward:]


def moved(*sizes: float) -> list[Kernel]:
    """Kernels that move so many bytes each."""
    return [Stream(size) for size in sizes]


SMALL = 2 * A
"""Bytes of (6, 1)."""

EVERY: dict[str, tuple[Operator, Sequence[Kernel], Sequence[Kernel]]] = {
    "elementwise": (lambda r, x: ops.elementwise(r, "f", (x(A, B),)), moved(2 * N), moved(2 * N)),
    "add": (lambda r, x: ops.add(r, x(A, B), x(A, B)), moved(3 * N), ()),
    "add_in_place": (lambda r, x: ops.add_in_place(r, x(A, B), x(A, B)), moved(3 * N), ()),
    "add_constant": (lambda r, x: ops.add_constant(r, x(A, B)), moved(2 * N), ()),
    "scale": (lambda r, x: ops.scale(r, x(A, B)), moved(2 * N), moved(2 * N)),
    "multiply": (lambda r, x: ops.multiply(r, x(A, B), x(A, B)), moved(3 * N), moved(3 * N) * 2),
    "cast": (lambda r, x: ops.cast(r, x(A, B), "fp32", "wide"), moved(3 * N), moved(3 * N)),
    "contiguous": (lambda r, x: ops.contiguous(r, x(A, B), (B, A), "copy"), moved(2 * N), ()),
    "copied_gradient": (lambda r, x: ops.copied_gradient(r, x(A, B), "copy"), (), moved(2 * N)),
    "linear": (
        lambda r, x: ops.linear(r, x(A, B), x(C, B), x(C)),
        [Product(A, C, B, tokens="m")],
        [Product(A, B, C, tokens="m"), Product(C, B, A, tokens="k"), Stream(2 * A * C + 2 * C)],
    ),
    "matmul": (
        lambda r, x: ops.matmul(r, x(4, A, B), x(4, B, C), (4, A, C), "product"),
        [Product(A, C, B, 4)],
        [Product(B, C, A, 4), Product(A, B, C, 4)],
    ),
    "split": (lambda r, x: ops.split(r, x(A, B), [(A, B)], "all")[0], (), moved(2 * N)),
    "softmax": (lambda r, x: ops.softmax(r, x(A, B)), moved(2 * N), moved(3 * N)),
    "dropout": (lambda r, x: ops.dropout(r, x(A, B), 0.1), moved(2.5 * N), moved(2.5 * N)),
    "embedding": (
        lambda r, x: ops.embedding(r, x(100, B), r.outside((A,), "int64"), "rows"),
        moved(2 * N),
        moved(N + 200 * B + 8 * A),
    ),
    "layer_norm": (
        lambda r, x: ops.layer_norm(r, x(A, B), x(B), x(B), "norm"),
        moved(2 * N + 4 * B + 8 * A),
        [Stream(3 * N + N + 4 * B + N + 8 * A, 3)],
    ),
    "log_softmax": (lambda r, x: ops.log_softmax(r, x(A, B)), [Stream(4 * N, 1, True)], [Stream(4 * N, 1, True)]),
    "nll_loss": (
        lambda r, x: ops.nll_loss(r, x(A, B), r.outside((A,), "int64")),
        moved(2 * SMALL),
        [Stream(N, 2, True)],
    ),
    "power": (lambda r, x: ops.power(r, x(A, B)), moved(2 * N), [Stream(7 * N, 3)]),
    "tanh": (lambda r, x: ops.tanh(r, x(A, B)), moved(2 * N), moved(3 * N)),
    "mean_last": (lambda r, x: ops.mean_last(r, x(A, B)), moved(N + SMALL), moved(N + SMALL)),
    "rsqrt": (lambda r, x: ops.rsqrt(r, x(A, B)), moved(2 * N), [Stream(7 * N, 3)]),
    "alias": (lambda r, x: ops.alias(r, x(A, B)), (), ()),
    "sliced_whole": (lambda r, x: ops.sliced_whole(r, x(A, B), 2, "whole"), (), moved(2 * N) * 2),
    "slice_last": (lambda r, x: ops.slice_last(r, x(A, B), B // 2, "half"), (), moved(1.5 * N)),
    "cat_last": (lambda r, x: ops.cat_last(r, x(A, B), x(A, B), "both"), moved(4 * N), ()),
    "expanded": (
        lambda r, x: ops.expanded(r, x(A, B), (3 * A, B), "heads", copies=True),
        moved(4 * N),
        moved(4 * N),
    ),
    "entering": (
        lambda r, x: ops.scale(r, ops.entering(r, "linear", x(A, B), name="x")[0]),
        moved(2 * N),
        moved(2 * N),
    ),
}
"""Every operator, and what it does forward and backward on (6, 8) in 16 bits, by hand."""


def test_every_operator_is_here() -> None:
    own = [
        name
        for name, function in getmembers(ops, isfunction)
        if function.__module__ == ops.__name__ and not name.startswith("_") and "r" in signature(function).parameters
    ]
    assert set(own) - {"native_dropout"} == set(EVERY)  # which has no node of its own


@pytest.mark.parametrize("name", EVERY)
def test_what_an_operator_does(name: str) -> None:
    operator, forward, backward = EVERY[name]
    assert tuple(map(without_issue, once(operator))) == (list(forward), list(backward))


@pytest.mark.parametrize(
    ("operator", "forward", "backward"),
    [
        (lambda r, x: ops.scale(r, x(A, B)), [0], [0]),
        (
            lambda r, x: ops.multiply(r, x(A, B), x(B)),
            [STRIDED.of(A * B)],
            [0, STRIDED.of(A * B), SUM_OF_ROWS.of(A * B, A)],
        ),
        (lambda r, x: ops.multiply(r, x(A, B, dtype="fp32"), x(A, B)), [MIXED.of(A * B)], [0, MIXED.of(A * B), 0]),
        (lambda r, x: ops.cast(r, x(A, B), "fp32", "wide"), [WIDENED.of(A * B)], [0]),
        (lambda r, x: ops.cast(r, x(A, B, dtype="fp32"), "bf16", "narrow"), [0], [WIDENED.of(A * B)]),
        (lambda r, x: ops.softmax(r, x(A, B)), [SOFTMAX.of(A * B)], [SOFTMAX_BACKWARD.of(A * B)]),
        (lambda r, x: ops.cat_last(r, x(A, B), x(A, 1), "sinks"), [CAT_OF_ODD_ROWS.of(A * (B + 1))], []),
        (
            lambda r, x: selecting.clamped(r, x(A, B), "half", bounds=1),
            [STRIDED.of(A * B)],
            [0, STRIDED.of(A * B), STRIDED.of(A * B)],
        ),
        (
            lambda r, x: selecting.clamped(r, x(A, B), "half", bounds=2),
            [STRIDED.of(A * B)],
            [0, STRIDED.of(A * B), STRIDED.of(A * B), 0, STRIDED.of(A * B)],
        ),
        (
            lambda r, x: selecting.gathered(r, x(A, B), r.outside((4 * A,), "int64"), "biases"),
            [0],
            [REPEATED.of(0, 4)],
        ),
    ],
)  # fmt: skip
def test_what_an_operator_s_instructions_take(operator: Operator, forward: list[int], backward: list[int]) -> None:
    """A factor of other shape or dtype, and a wider result; a cast to 16 bits has a kernel of its own."""
    issued = [[one.issue for one in work if isinstance(one, Stream)] for work in once(operator)]
    assert issued == [forward, backward]


def test_a_clamp_s_gradient_by_hand() -> None:
    """``where((x >= low) & (x <= high), gradient, 0)`` of 48 numbers of two bytes: nought is written; 96 bytes are read
    and 48 of booleans written, twice; they are joined in place; then booleans and the gradient are read, 96 written."""
    _, backward = once(lambda r, x: selecting.clamped(r, x(6, 8), "half", bounds=2))
    assert [one.bytes for one in backward if isinstance(one, Stream)] == [2, 144, 144, 144, 240]


# -- layers ---------------------------------------------------------------------------------------------


def plan(**flags: object) -> ResolvedPlan:
    return resolve(read_plan(None, {name.replace("_", "-"): str(value) for name, value in flags.items()}).plan)


def entries(given: ResolvedPlan) -> Entries:
    return framework(given.framework).time.entries(given)


def totals(passes: Passes) -> tuple[float, int]:
    """Bytes and launches of memory-bound kernels."""
    streams = [(one, times) for one, times in (*passes.forward, *passes.backward) if isinstance(one, Stream)]
    return sum(times * one.bytes for one, times in streams), sum(times * one.launches for one, times in streams)


WITHOUT_DROPOUT: dict[str, dict[str, Any]] = {
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
"""The CPU's dropout is three kernels."""

FAMILIES = ("gpt2", "bert", "llama", "falcon", "phi3", "gemma", "gemma2")
MORE = 4
"""Kernels that LayerNorm's backward of a layer has more than the CPU's."""


@pytest.mark.parametrize("name", FAMILIES)
def test_against_what_pytorch_runs(name: str, tmp_path: Path) -> None:
    """FLOPs of a whole model and of one layer, the difference between two and one, are equal. So are kernels, but for
    LayerNorm's in backward; bytes are within a twentieth, as LayerNorm's kernels each read the gradient, and masks that
    all heads share are left out."""
    kind, settings = MODELS[name]
    b, s = 2, 32
    one, config = step(kind, settings | WITHOUT_DROPOUT.get(name, {}), 1, b, s)
    two, _ = step(kind, settings | WITHOUT_DROPOUT.get(name, {}), 2, b, s)
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    flags = {"framework": "single", "dtype": "bf16", "mbs": b, "accumulation": 2, "seq": s, "attention": "eager"}
    found = entries(plan(model=tmp_path, **flags))
    assert sum(part.flops for part in (found.embedding, found.layer, found.final_norm, found.head)) == one.flops
    layer = two - one
    assert found.layer.flops == layer.flops
    moved, launches = totals(found.layer)
    assert 0 <= launches - layer.kernels <= (0 if config.model_type in ("llama", "phi3", "gemma", "gemma2") else MORE)
    assert moved == pytest.approx(layer.bytes, rel=0.05)


@pytest.mark.parametrize("name", ["gemma4_text", "gemma4_text-keys-as-values"])
def test_layers_with_heads_of_their_own_against_what_pytorch_runs(name: str, tmp_path: Path) -> None:
    """As above, of three layers, the last of which sees all tokens, and of three more: two of one kind and one of the
    other. What a model needs is all that it runs with eager attention."""
    kind, settings = MODELS[name]
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    b, s = 2, 32
    three, config = step(kind, settings, 3, b, s)
    six, _ = step(kind, settings | {"layer_types": 2 * layers}, 6, b, s)
    four, _ = step(kind, settings | {"layer_types": ["sliding_attention", *layers]}, 4, b, s)
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    flags = {"framework": "single", "dtype": "bf16", "mbs": b, "accumulation": 2, "seq": s, "attention": "eager"}
    made = plan(model=tmp_path, **flags)
    found = entries(made)
    sliding, full = four - three, six - three
    assert found.layer.flops == sliding.flops
    assert 2 * found.layer.flops + found.dense.flops == full.flops
    moved, launches = totals(found.layer)
    assert launches == sliding.kernels
    assert moved == pytest.approx(sliding.bytes, rel=0.05)
    of_full = [
        one - 2 * other for one, other in zip((full.bytes, full.kernels), (sliding.bytes, sliding.kernels), strict=True)
    ]
    moved, launches = totals(found.dense)
    assert launches == of_full[1]
    assert moved == pytest.approx(of_full[0], rel=0.05)
    assert model_flops(made) == 2 * three.flops


def test_a_layer_of_transformer_engine_by_hand() -> None:
    """Llama 3 70B on 8 tensor-parallel ranks with sequence parallelism: n = 2 x 4096 tokens, h = 8192, 8 of 64 heads
    and 1 of 8 groups of 128 features, f = 28672 / 8. Queries, keys and values, the context's projection, both of the
    MLP; the hidden state is gathered twice and scattered twice forward, and gathered twice more backward."""
    given = {"model": "llama-3-70b", "framework": "megatron", "gpu": "h100-80gb", "tp": 8, "mbs": 2, "seq": 4096}
    found = entries(plan(**given, sequence_parallel="true")).layer
    n, h, f = 2 * 4096, 8192, 28672 // 8
    matrices = ((10 * 128, h), (h, 8 * 128), (2 * f, h), (h, f))
    forward = [Product(n, rows, columns, tokens="m") for rows, columns in matrices]
    assert [one for one, _ in found.forward if isinstance(one, Product)] == forward
    assert found.flops == 6 * n * sum(m * k for m, k in matrices) + 3.5 * 4.0 * 2 * 4096**2 * 8 * 128
    (fused,) = [one for one, _ in found.forward if isinstance(one, Attention)]
    assert (fused.flops, fused.part) == (4.0 * 2 * 4096**2 * 8 * 128, 0.5)
    weights = [one for one, _ in found.backward if isinstance(one, Product) and one.written]
    assert {(one.m, one.n, one.k, one.written) for one in weights} == {(m, k, n, 8) for m, k in matrices}

    def exchanged(passes: Sequence[tuple[Kernel, int]]) -> dict[str, int]:
        found: dict[str, int] = {}
        for one, times in passes:
            if isinstance(one, Exchange):
                assert one.bytes == 2 * n * h
                found[one.kind] = found.get(one.kind, 0) + times
        return found

    assert exchanged(found.forward) == {"all-gather": 2, "reduce-scatter": 2}
    assert exchanged(found.backward) == {"all-gather": 4, "reduce-scatter": 2}


RECOMPUTED = {
    "single": {"model": "llama-3-8b", "seq": 512, "recompute": "full"},
    "megatron": {"model": "llama-3-8b", "framework": "megatron", "seq": 512, "recompute": "full"},
    "torchtitan": {
        "model": "llama-3-8b",
        "framework": "fsdp",
        "fsdp_code": "torchtitan",
        "seq": 512,
        "recompute": "full",
    },
}


@pytest.mark.parametrize("name", RECOMPUTED)
def test_full_recompute_runs_products_of_forward_again(name: str) -> None:
    """But for the last one, of transformers and torchtitan: its output is not saved, and so not made again."""
    found = entries(plan(**RECOMPUTED[name], gpu="h100-80gb", dtype="bf16"))
    forward = sum(times * one.flops for one, times in found.layer.forward if isinstance(one, Product | Attention))
    last = 2.0 * 512 * 14336 * 4096 if name != "megatron" else 0.0
    assert found.recomputed.flops - found.layer.flops == forward - last


def test_torchtitans_policy_keeps_attention_and_every_second_product() -> None:
    """Of q, k, v, the output, gate, up and down the second, fourth and sixth run again."""
    flags = {"model": "llama-3-8b", "framework": "fsdp", "fsdp_code": "torchtitan", "seq": 512, "dtype": "bf16"}
    found = entries(plan(**flags, gpu="h100-80gb", recompute_per_operator="true"))
    again = 2.0 * 512 * 4096 * (1024 + 4096 + 14336)
    assert found.recomputed.flops - found.layer.flops == again


@pytest.mark.parametrize(
    "flags",
    [
        {"framework": "megatron", "model": "llama-3-8b", "tp": 2, "sequence_parallel": "true"},
        {"framework": "megatron", "model": "gpt2-xl", "transformer_impl": "local", "recompute": "selective"},
        {"framework": "fsdp", "fsdp_code": "torchtitan", "model": "llama-3-8b", "recompute_per_operator": "true"},
        {"framework": "deepspeed", "model": "bert-large"},
    ],
    ids=lambda flags: f"{flags['framework']}-{flags['model']}",
)
def test_work_grows_with_the_micro_batch(flags: dict[str, object]) -> None:
    """What is recorded of 12 sequences is what follows from 2 and 4."""
    of = {b: entries(plan(**flags, gpu="h100-80gb", dtype="bf16", seq=512, mbs=b)) for b in (2, 4, 12)}
    for two, four, twelve in zip(*(of[b].passes for b in (2, 4, 12)), strict=True):
        made = grown(two, four, 12)
        if made is not None:  # other kernels at 2: recorded
            assert (made.forward, made.backward) == (twelve.forward, twelve.backward)


@pytest.mark.parametrize(("s", "window"), [(8, 3), (64, 16), (16, 16), (16, 99)])
def test_scores_in_a_window(s: int, window: int) -> None:
    """Counted one by one, but for half of the diagonal, which a mask cuts through."""
    w = min(window, s)
    counted = sum(1 for query in range(s) for key in range(s) if 0 <= query - key < w)
    assert windowed(s, window, alternating=False) * s * s == pytest.approx(counted - w / 2)
    assert windowed(s, window, alternating=True) == pytest.approx((windowed(s, window, alternating=False) + 0.5) / 2)


def test_choices_without_gradient_take_their_time() -> None:
    """DeepSeek V3 of transformers: two best of 32 experts, four best of eight groups, eight best experts."""
    found = entries(plan(model="deepseek-v3", framework="deepspeed", gpu="h100-80gb", dtype="bf16", seq=512))
    chosen = [one.issue for one, _times in found.layer.forward if isinstance(one, Stream) and not one.launches]
    assert sum(chosen) == sum(TOP_K.of(512 * 8 * size, 512 * rows) for size, rows in ((32, 8), (1, 1), (32, 1)))
