"""Facts of Transformer Engine by version: what it keeps between iterations, and where its tensors changed.

Each has its source (file and function of the release named) and the first version that it holds for. Bytes are
as requested, before rounding. Versions are (major, minor): 2.0 to 2.20.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from ...tape.events import rounded
from ..autograd import Shape, size_of
from ..fused_attention import Call, Release, inside
from .shape import CoreShape, Version

OLDEST, NEWEST = (2, 0), (2, 20)
"""Versions whose sources were read."""

MIB = 1024**2


def cublas_workspace(te: Version, compute_capability: int) -> int:
    """Bytes of the one cuBLAS workspace of a process, made by the first GEMM and kept.

    ``get_cublas_workspace_size_bytes``: ``pytorch/module/base.py`` up to 2.9, ``cpp_extensions/gemm.py`` since.
    ``compute_capability`` is the major one: 8 A100, 9 H100, 10 B200.
    """
    if compute_capability < 9:
        return 4 * MIB
    return 32 * MIB + (1024 if te >= (2, 8) else 0)


GROUPED_STREAMS = 4
"""Streams of a grouped product, each with a workspace of its own (``get_multi_stream_cublas_workspace``; since 2.9
``get_cublas_workspace`` with ``grouped_gemm``; ``common/util/multi_stream.cpp``, ``nvte_get_num_compute_streams``)."""

DummyGradient = Literal["none", "each backward", "kept"]


def dummy_weight_gradient(te: Version) -> DummyGradient:
    """What a linear returns for a weight whose gradient went into ``main_grad``.

    2.0: nothing; 2.1 and 2.2: ``torch.empty`` of the weight's shape and dtype, each time; since 2.3 one tensor
    for each shape and dtype, kept for good (``module/base.py``, ``get_dummy_wgrad``).
    """
    if te < (2, 1):
        return "none"
    return "each backward" if te < (2, 3) else "kept"


# From these versions on:
COUNTS_TOKENS = (2, 12)
"""``triton/cross_entropy.py`` counts the tokens that are not ignored, in two int64 scalars."""

LOSS_GRADIENT_CONTIGUOUS = (2, 11)
"""``triton/cross_entropy.py`` copies a strided gradient of the loss."""

LOSS_GRADIENT_APART = (2, 18)
"""``triton/cross_entropy.py`` writes the gradient into an fp32 tensor of its own, made in forward; before it over the
logits."""

SOFTMAX_BACKWARD_APART = (2, 19)
"""``csrc/extensions/softmax.cpp`` writes into a fresh tensor; before it over the incoming gradient."""

FREES_GATHERED_NORM_SHARD = (2, 8)
"""``layernorm_linear.py`` frees the norm's own output with the gathered one, after the weight's gradient; before it
(with sequence parallelism) with the node."""

OLDEST_NORM_WITH_RESIDUAL = (2, 8)
"""Before it the norm and the sum of gradients are two operators in backward (``ops/fused/backward_add_rmsnorm.py``)."""

OLDEST_LARGEST_SCORE = (2, 9)
"""``return_max_logit`` of ``DotProductAttention``."""

OLDEST_LOW_PRECISION = (2, 14)
"""Before it fp8 and fp4 have other copies and gathers, which no recipe covers."""

LOW_PRECISION_SINCE = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0), "nvfp4": (10, 0)}
"""Compute capability from which GPUs have a recipe (``quantization.py``, ``check_recipe_support``)."""

OLDEST_TWO_LEVELS = (2, 15)
"""Before it ``AttnFuncWithCPAndKVP2P`` exchanges the output again in backward."""

OLDEST_FROZEN = (2, 8)
"""Before it nobody has compared layers whose weights have no gradient."""

OLDEST_CONTEXT_PARALLEL = (2, 8)
"""Before it ``context_parallel.py`` keeps keys and values in one stacked tensor, which no recipe covers."""


OLDEST_PADDED_VALUES = (2, 17)
"""Before it flash attention 2 is not for values whose heads are smaller than those of keys
(``dot_product_attention.py``, ``_pad_qkv_head_dim``, since commit 8a5af978)."""

CONTEXT_PARALLEL_OUTPUT_IN_4D = (2, 15)
"""Before it ``context_parallel.py`` gives (b s, a, d), so that a transposed gradient is copied."""

CONTEXT_PARALLEL_TAKES_VALUES = (2, 15)
"""Values may have another head size than keys, whatever the way (``attn_forward_func_with_cp``)."""

ALL_GATHER_KEEPS_WHOLE = (2, 15)
"""``AttnFuncWithCPAndKVAllGather`` saves its whole output; before it the outputs of its two steps."""

ALL_GATHER_MAKES_TWO = (2, 18)
"""It makes a second output, for packed sequences alone."""

MASK_IN_BOOL = (2, 6)
"""Before it ``get_full_mask`` takes the difference of two ``torch.where`` in int64."""


def backward_workspaces(
    b: int, s: int, a: int, d: int, shape: CoreShape, *, grouped: bool
) -> list[tuple[str, Shape, str]]:
    """What a back end allocates inside its backward: name, shape and dtype.

    flash-attn 2 (``flash_api.cpp``, ``mha_bwd``): the gradient of the queries in fp32, once for each split if
    deterministic (⌈multiprocessors / (b a)⌉ splits), and with fewer key heads (``grouped``) dk and dv of
    every query head. cuDNN: Σ dO·O and, unless deterministic, the accumulator of dQ, which its front end adds
    (``node/scaled_dot_product_flash_attention.h``, ``get_fe_workspace_size_node``); what the engine inside cuDNN
    asks for besides is not published. Later releases of flash-attn: ``fused_attention.allocates``.
    """
    if shape.attention == "flash" and shape.flash.number > SECOND:
        heads = shape.spec.kv_heads * a // shape.spec.heads if grouped else a
        call = Call((b, a, s, d), heads, shape.dtype, shape.spec.causal, shape.deterministic_attention)
        return list(inside(shape.flash, call))
    if shape.attention == "fused":
        return [("cudnn_workspace", (b, a, s, 1 if shape.deterministic_attention else 1 + d), "fp32")]
    rows, columns = flash_rows(s, shape), -(-d // 32) * 32 if d <= 192 else 256
    splits = -(-shape.multiprocessors // (b * a)) if shape.deterministic_attention else 1
    expanded = [(name, (b, s, a, d), shape.dtype) for name in ("dk_expanded", "dv_expanded")]
    return [("dq_accum", (splits, b, rows, a, columns), "fp32"), *(expanded if grouped else [])]


def flash_rows(s: int, shape: CoreShape) -> int:
    """Rows of flash-attn 2's sums of s queries: a multiple of 128; of packed sequences 128 more for each document
    (``mha_varlen_bwd``), of which there is at least one in a sequence."""
    return s + 128 * shape.packed if shape.packed else -(-s // 128) * 128


# -- what stays between iterations ------------------------------------------------------------------


def kept(shape: CoreShape, compute_capability: int, weights: Iterable[Shape]) -> dict[str, int]:
    """Bytes, rounded as requests, of every tensor that Transformer Engine makes once and keeps, by name.

    ``weights`` are the shapes on this rank of weights that a Transformer Engine linear has: qkv, projection and the
    two of the MLP. Nothing else stays without fp8: handles of cuBLAS and cuDNN are outside PyTorch's allocator, random
    states end with their backward, and ``_extra_state`` is empty.
    """
    tensors = {"te_cublas_workspace": rounded(cublas_workspace(shape.te, compute_capability))}
    if shape.experts is not None and shape.experts.grouped:
        each = tensors["te_cublas_workspace"]
        tensors |= {f"te_grouped_{stream}_cublas_workspace": each for stream in range(GROUPED_STREAMS)}
    if shape.spec.causal and not shape.packed:  # get_full_cu_seqlens: b + 1 int32, the same for queries and keys
        tensors["te_cu_seqlens"] = rounded(4 * (shape.b + 1))
    if shape.gradient_fusion and dummy_weight_gradient(shape.te) == "kept":
        for weight in dict.fromkeys(weights):
            size = "x".join(map(str, weight))
            tensors[f"te_dummy_weight_gradient_{size}"] = rounded(size_of(weight, shape.dtype))
    if shape.cp > 1 and shape.cp_communication == "p2p" and shape.attention == "fused":
        for part in ("", "_half"):  # _get_cu_seqlens_info_with_cp
            tensors[f"te_cu_seqlens_of_rank{part}"] = rounded(4 * (shape.b + 1))
    trading = shape.cp if shape.cp_communication == "a2a" else shape.cp_inner
    if trading > 1:
        for part in ("before", "after"):  # get_seq_chunk_ids_for_reordering_*_attn
            tensors[f"te_chunk_ids_{part}"] = rounded(4 * 2 * trading)
        if shape.spec.attention_sinks:  # flash_attn_a2a_communicate_softmax_offset
            tensors["te_chunk_ids_of_sinks"] = rounded(4 * shape.cp)
    return tensors


# -- the choice of a back end -----------------------------------------------------------------------

Capability = tuple[int, int]
"""Compute capability: (9, 0) H100, (10, 0) B200 and GB200."""

CUDNN_DETERMINISTIC_ON_BLACKWELL = (9, 18, 1)


def fused_is_possible(
    te: Version,
    capability: Capability,
    *,
    dtype: str,
    head_dim: int,
    value_dim: int,
    dropout: float,
    deterministic: bool,
    cudnn: tuple[int, int, int],
) -> bool:
    """cuDNN attention can train it: no bias, ALiBi or window, (s, b, a, d), causal or padding mask
    (``common/fused_attn/fused_attn.cpp``, ``nvte_get_fused_attn_backend``; ``dot_product_attention/utils.py``,
    ``get_attention_backend``).

    Heads of values may be of another size, and on Blackwell 192 features of queries go with 128 of values.
    Deterministic: not before Hopper; on Blackwell not from 2.7 to 2.11, since then without dropout from
    cuDNN 9.18.1.
    """
    largest = 256 if capability == (9, 0) else 128
    latent = (head_dim, value_dim) == (192, 128) and capability >= (10, 0) and cudnn >= (9, 11, 0)
    if dtype == "fp32" or capability < (8, 0) or head_dim % 8 or value_dim % 8:
        return False
    if max(head_dim, value_dim) > largest and not latent:
        return False
    if not deterministic:
        return True
    if capability < (10, 0):
        return capability >= (9, 0)
    if te < (2, 12):
        return te < (2, 7)
    return dropout == 0.0 and cudnn >= CUDNN_DETERMINISTIC_ON_BLACKWELL


SECOND = 2
"""Release of flash-attention that saves a random state, and gives Σ dO·O back."""

OLDEST_FOURTH = (2, 15)
"""Before it flash-attn 4 is not looked for."""


def flash_release(
    installed: int,
    te: Version,
    capability: Capability,
    *,
    head_dim: int,
    dropout: float,
    deterministic: bool,
    context_parallel: bool,
) -> Release:
    """The release of flash-attention that ``get_attention_backend`` takes, with 2 beside the one that is
    ``installed``: 3 on Hopper alone, with deterministic algorithms for heads of fewer than 256 features; 4 from Hopper
    on, without context parallelism, with the heads that it trains (``flash_attn/cute/interface.py``,
    ``_validate_head_dims``), on Blackwell's smaller GPUs not deterministic; both without dropout."""
    hopper, major = capability == (9, 0), capability[0]
    third = hopper and not (deterministic and head_dim >= 256)
    wide = head_dim <= 128 or hopper or head_dim == 256
    fourth = te >= OLDEST_FOURTH and capability >= (9, 0) and wide and not context_parallel
    possible = {3: third, 4: fourth and not (deterministic and major == 12)}
    taken = installed if possible.get(installed) and not dropout else SECOND
    return Release(taken, major if taken > 3 else Release().major)


def flash_is_possible(capability: Capability, *, dtype: str, head_dim: int) -> bool:
    """flash-attn 2 (from 2.7.3, which Blackwell asks for) can train it, deterministic or not
    (``dot_product_attention/utils.py``, ``get_attention_backend``)."""
    return dtype != "fp32" and capability >= (8, 0) and head_dim % 8 == 0 and head_dim <= 256
