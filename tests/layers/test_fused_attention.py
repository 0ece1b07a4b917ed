"""PyTorch's memory-efficient attention: what autograd saves, masks among it, and what backward allocates inside."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional

from memplan.layers import ops
from memplan.layers.autograd import Recorder, Tensor
from memplan.layers.fused_attention import (
    Call,
    Release,
    allocates,
    efficient_attention,
    flash_attention,
    inside,
    scores_of,
)
from memplan.layers.module import Interface, Options, Run, Tapes, build
from memplan.layers.work import Attention, Stream
from memplan.tape.events import Category, Drop, Hold, rounded

from ..oracle.tracer import Follow, Trace, run
from .test_against_transformers import sizes

SHAPES = ((2, 4, 96, 24), (1, 3, 37, 64), (3, 2, 130, 128))
"""b, a, s, d."""


def recipe(b: int, a: int, s: int, d: int, *, inside: bool = False) -> Tapes:
    """Of one tensor as queries, keys and values."""

    def attended(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(efficient_attention(r, x, x, x))

    return build("attention", attended, Interface((b, a, s, d), "fp32"), Options(kernel_workspaces=inside)).first


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_the_operator(shape: tuple[int, int, int, int]) -> None:
    """Output, log-sum-exp of rows up to a multiple of 32, two scalars; three gradients, which are summed in place."""
    forward: list[int] = []

    def body(trace: Trace, follow: Follow) -> None:
        x = torch.empty(shape, requires_grad=True)
        trace.changes = []
        out = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        forward.extend(sizes(trace.changes))
        gradient = torch.empty_like(out)
        trace.changes = []
        torch.autograd.backward([out], [gradient])

    traced = run(body)
    tapes = recipe(*shape)
    held = [event.bytes for event in tapes.forward if isinstance(event, Hold)]
    assert held == [size for size in forward if size > 0]
    held = [event.bytes for event in tapes.backward if isinstance(event, Hold) and event.name.startswith("grad_")]
    assert held == [size for size in sizes(traced.changes) if size > 0][:3]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_mask_is_kept_as_scores(shape: tuple[int, int, int, int]) -> None:
    """Two numbers and the scores that PyTorch's own function makes of booleans on a CPU, here of (b, 1, s, s): 0 or
    minus infinity in the queries' dtype. Rows of 37 and 130 are copied into 40 and 136; the first are not."""
    b, _, s, _ = shape
    made: list[tuple[tuple[int, ...], str]] = []

    def body(trace: Trace, follow: Follow) -> None:
        x, mask = torch.empty(shape, dtype=torch.bfloat16), torch.ones((1, 1, s, s), dtype=torch.bool)
        trace.changes = []
        torch._C._nn.scaled_dot_product_attention(x, x, x, mask.expand(b, -1, s, s))
        made.extend((change.shape, change.op.split(".")[1]) for change in trace.changes if change.sign > 0)

    run(body)
    assert made[:3] == [((), "scalar_tensor"), ((), "scalar_tensor"), ((b, 1, s, s), "where")]

    r = Recorder()
    (bias,) = scores_of(r, r.empty((1, 1, s, s), "bool", "mask"), r.empty(shape, "bf16", "query"), aligned=8)
    holds = [event.shape for event in r.events if isinstance(event, Hold)]
    assert holds[2:] == [(), (), (b, 1, s, s), *([bias.shape] if s % 8 else [])]
    assert bias.shape == (b, 1, s, -(-s // 8) * 8)


def test_cudnn_keeps_a_mask_without_padding() -> None:
    """b = 2, 4 heads of 64, 37 tokens in bf16: 2 x 37 x 37 x 2 bytes of scores beside output and log-sum-exp, and all
    scores computed; the memory-efficient kernel has rows of 40."""

    def attended(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(flash_attention(r, x, x, x, mask=r.outside((1, 1, 37, 37), "bool", Category.INPUTS)))

    interface = Interface((2, 4, 37, 64), "bf16")
    tapes = build("attention", attended, interface, Options()).first
    work = build("attention", attended, interface, Options(counts="first")).work
    ended = {event.tensor for event in tapes.forward if isinstance(event, Drop)}
    kept = {e.name: e.bytes for e in tapes.forward if isinstance(e, Hold) and e.tensor not in ended}
    assert kept["mask_scores"] == rounded(2 * 37 * 37 * 2)
    assert kept["attention"] == rounded(2 * 4 * 37 * 64 * 2)
    assert kept["attention_logsumexp"] == rounded(2 * 4 * 37 * 4)
    (kernel,) = (one for one, _ in work.forward if isinstance(one, Attention))
    assert kernel.part == 1
    (scores,) = (one for one, _ in work.forward if isinstance(one, Stream))
    assert scores.bytes == 2 * 37 * 37 * (1 + 2)


def test_inside() -> None:
    """d = 128: one product of (b, s, a, d), its sums, and tiles of 128 × 64 and 4 words; 100 rows are one tile's."""
    made = {e.name: e.shape for e in recipe(2, 3, 100, 128, inside=True).backward if _is_inside(e)}
    assert made == {
        "output_times_gradient": (2, 100, 3, 128),
        "delta_transposed": (2, 100, 3),
        "delta": (2, 3, 100),
        "grad_q_tiles": (2, 3, 2, 128 * 64 + 4),
    }


@pytest.mark.parametrize(
    ("size", "width", "dtype", "accumulated"),
    [
        (256, 256, "bf16", True),
        (512, 512, "fp16", True),
        (192, 64, "bf16", True),
        (192, 128, "bf16", False),
        (128, 128, "bf16", False),
        (256, 256, "fp32", False),
    ],
)
def test_wide_heads_are_summed_up_in_memory(size: int, width: int, dtype: str, accumulated: bool) -> None:
    """``fmha_cutlassF_bf16_aligned_32x128_gmem_sm80``, the kernel of heads beyond 128 features, has (b, s, a, d) of
    fp32 while it runs; in fp32 its output is that."""

    def attended(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        values = x if width == size else ops.slice_last(r, x, width, "value")
        return Run(efficient_attention(r, x, x, values))

    made = Interface((1, 4, 300, size), dtype)
    for counted in (False, True):
        forward = build("attention", attended, made, Options(kernel_workspaces=counted)).first.forward
        found = [one for one in forward if isinstance(one, Hold) and one.category is Category.WORKSPACES]
        assert [(one.name, one.shape, one.dtype) for one in found] == (
            [("attention_accumulated", (1, 300, 4, width), "fp32")] if accumulated and counted else []
        )
        assert all(one.end in forward for one in found)


def test_inside_of_values_of_another_size() -> None:
    """DeepSeek's 128 heads of 192 with values of 128 in bf16, 300 tokens: 3 tiles of 128 rows by 3 of 64 columns, each
    with 4 words besides; 200 // 128 = 1 part of 64 keys, whose gradients have 256 columns, and values' 128."""

    def attended(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(efficient_attention(r, x, x, ops.slice_last(r, x, 128, "value")))

    tapes = build("attention", attended, Interface((1, 128, 300, 192), "bf16"), Options(kernel_workspaces=True)).first
    made = {e.name: e.shape for e in tapes.backward if _is_inside(e)}
    assert made == {"delta": (1, 128, 300), "gradient_tiles": (1, 128, 3 * 3 * (128 * 64 + 4) + 64 * (256 + 128))}
    held = {e.name: e.shape for e in (*tapes.forward, *tapes.backward) if isinstance(e, Hold)}
    assert held["attention"] == held["grad_v"] == (1, 128, 300, 128)
    assert held["grad_q"] == held["grad_k"] == (1, 128, 300, 192)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 300), st.integers(1, 48).map(lambda one: 4 * one))
def test_tiles_cover_the_gradient_of_queries(b: int, a: int, s: int, d: int) -> None:
    tapes = recipe(b, a, s, d, inside=True)
    tiles = next(e for e in tapes.backward if isinstance(e, Hold) and e.name == "grad_q_tiles")
    assert tiles.bytes >= 4 * b * a * s * d
    assert tapes.backward_fold.net == recipe(b, a, s, d).backward_fold.net


def _is_inside(event: object) -> bool:
    return isinstance(event, Hold) and event.category is Category.WORKSPACES


def test_flash_attn_3_sums_gradients_of_keys_and_values_in_fp32() -> None:
    """4 query heads of 128 features over 2 key heads, 100 tokens: blocks of 64 queries and of 128 keys."""
    r = Recorder()
    allocates(r, Release(3), Call((2, 4, 100, 128), 2, "bf16"))
    held = {event.name: event.bytes for event in r.events if isinstance(event, Hold)}
    rows = 2 * 4 * 128 * 4
    sums = 2 * 2 * 128 * 128 * 4
    assert held == {
        "softmax_d": rows,
        "softmax_lse_log2": rows,
        "dq_accum": rows * 128,
        "dk_accum": sums,
        "dv_accum": sums,
        "dq_semaphore": 512,
    }
    assert all(event.category is Category.WORKSPACES for event in r.events)


@pytest.mark.parametrize(
    ("major", "d", "rows", "key_rows"),
    [
        (9, 64, 128, 128),
        (9, 128, 128, 128),
        (9, 192, 128, 192),
        (10, 64, 128, 128),
        (10, 128, 128, 256),
        (12, 128, 128, 128),
    ],
)
def test_flash_attn_4_fills_the_blocks_of_the_gpu(major: int, d: int, rows: int, key_rows: int) -> None:
    """4 query heads over 2 key heads, 100 tokens. Blocks of queries and of keys: Hopper 128 and 128 with 64
    features, 64 and 128 with 128, 64 and 96 with 192; Blackwell 128 and 128, of keys two together from 128
    features on; its smaller GPUs 64 and 64."""
    held = {name: shape for name, shape, _ in inside(Release(4, major), Call((2, 4, 100, d), 2, "bf16"))}
    assert held == {
        "dq_accum": (2, 4, rows, d),
        "dpsum": (2, 4, rows),
        "lse_log2": (2, 4, rows),
        "dk_accum": (2, 2, key_rows, d),
        "dv_accum": (2, 2, key_rows, d),
    }


def test_flash_attn_4_has_a_kernel_of_its_own_for_256_features_on_blackwell() -> None:
    held = [name for name, _, _ in inside(Release(4, 10), Call((2, 4, 100, 256), 2, "bf16"))]
    assert held == ["dpsum", "lse_log2"]


def test_deterministic_kernels_wait_for_one_another() -> None:
    """256 tokens: of release 3 four blocks of queries and two of keys; of release 4 on Blackwell two of each, and two
    thread blocks that work together."""
    call = Call((2, 4, 256, 128), 2, "bf16", deterministic=True)
    third, fourth = (
        {name: shape for name, shape, _ in inside(release, call)} for release in (Release(3), Release(4, 10))
    )
    assert [third[f"d{part}_semaphore"] for part in "qkv"] == [(4, 2, 4), (2, 2, 2), (2, 2, 2)]
    assert [fourth[f"d{part}_semaphore"] for part in "qkv"] == [(2, 4, 2, 2), (2, 2, 2, 2), (2, 2, 2, 2)]
