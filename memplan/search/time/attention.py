"""Rates of fused attention kernels, from the charts of those who wrote them, and seconds of one kernel.

A block of threads takes one tile of queries (backward: of keys) through all tiles of the other side, or up to the
diagonal where attention is causal. Of causal attention the diagonal's tiles are computed whole, and the longest block
runs on while others have ended; of other attention the last wave costs as much as a full one. So one rate describes
both: on H100 FlashAttention-2 reaches 370 TFLOP/s without and 335 with a causal mask (arXiv 2407.08608, figure 5,
16 heads of 16,384 tokens), which are 381 and 378 of such tiles.
"""

from __future__ import annotations

from ...layers.work import Attention
from ...values import NamedTuple

KEYS = 128
"""Keys of a tile."""
WIDTHS = (32, 64, 96, 128, 192, 256)
"""Features of heads that FlashAttention has kernels for (``static_switch.h``, ``HEADDIM_SWITCH``)."""
CUDNN_WIDTHS = (64, 128, 192, 256)
"""cuDNN's: on an H100 heads of 80 and 96 features took what heads of 128 take, within 3 %, and 160 what 192 take
(``benchmarks/measured_kernels_h100.json``)."""
NARROW, BROAD = 64, 128
"""Features of heads: up to the first, and beyond the second, rates are apart."""


class Fused(NamedTuple):
    """One direction of a kernel. Rates are parts of the tensor cores' peak, or FLOP/s."""

    rate: float
    """Of heads of 128 features, all multiprocessors at work on whole tiles."""
    narrow: float
    """Of heads of up to 64."""
    fixed: float = 0.0
    """What a block does besides, in tiles: what 512 tokens lose against 16,384."""
    tail: float = 1.0
    """Part of a causal block with all tiles in which other multiprocessors are idle."""
    queries: int = 128
    """Of a tile."""
    widths: tuple[int, ...] = WIDTHS
    """Features of heads that it is made for; others take as long as the next larger ones."""
    broad: float = 1.0
    """Part of the rate that heads of more than 128 features reach."""

    def of(self, peak: float) -> Fused:
        """In FLOP/s."""
        return self._replace(rate=self.rate * peak, narrow=self.narrow * peak)


class Kernels(NamedTuple):
    """Both directions, and who measured them."""

    forward: Fused
    backward: Fused
    source: str


_SIMUMAX = "https://github.com/MooreThreads/SimuMax/blob/main/configs/system/"
_FLASH3 = "https://arxiv.org/abs/2407.08608 (H100, figures 5 and 6, 16,384 tokens, without mask, 0.97 of full waves"
_TAIL = 1 / 3
"""Backward on 64 to 4 heads (A100) and 128 to 8 (B200): sdp_bwd of SimuMax's sweeps; forward needs a whole block's."""

AMPERE = Kernels(
    Fused(0.73, 0.64, 0.9),
    Fused(0.63, 0.57, 2.0, _TAIL),
    "https://arxiv.org/abs/2307.08691 (FlashAttention-2 on A100: up to 73 % forward, 63 % backward; heads of 64 "
    "features slower in the ratio that they have on H100)",
)
HOPPER = Kernels(
    Fused(0.386, 0.338, 0.9), Fused(0.336, 0.303, 2.0, _TAIL), f"{_FLASH3}: FlashAttention-2 370 and 322 TFLOP/s)"
)
HOPPER_NEWEST = Kernels(
    Fused(0.355, 0.31, 0.9),
    HOPPER.backward,
    "benchmarks/measured_kernels_h200.json and _h100.json (FlashAttention-2 of torch 2.11 with CUDA 13: of heads "
    "of 64 and 128 features forward has 0.92 of what its authors' charts show, backward the same)",
)
_BROAD = 0.7
"""Backward of cuDNN, heads of 160 to 256 features: the median of ``benchmarks/measured_kernels_h100.json``, where 192
without a mask have 0.53 and 256 with a causal one 0.83."""
HOPPER_CUDNN = Kernels(
    Fused(0.62, 0.43, 0.9, widths=CUDNN_WIDTHS),
    Fused(0.538, 0.451, 2.4, _TAIL, widths=CUDNN_WIDTHS, broad=_BROAD),
    f"{_FLASH3}: cuDNN 595 and 516 TFLOP/s)",
)
HOPPER_CUDNN_NEWEST = Kernels(
    Fused(0.69, 0.455, 0.9, widths=CUDNN_WIDTHS),
    Fused(0.64, 0.475, 2.4, _TAIL, widths=CUDNN_WIDTHS, broad=_BROAD),
    "benchmarks/measured_kernels_h200.json (an H200, torch 2.11 with cuDNN for CUDA 13: medians of the shapes there)",
)
_FP32 = Kernels(
    Fused(0.51, 0.51, 0.9),
    Fused(0.65, 0.65, 2.0, _TAIL),
    "benchmarks/measured_kernels_h200.json (fp32, 8 x 12 causal heads of 64 features and 1,024 tokens in a step of "
    "GPT-2 on an H200, torch 2.11: 635 and 1,290 microseconds, as parts of the ordinary cores' peak)",
)
_EFFICIENT = (0.186 / 0.386, 0.150 / 0.336)
"""Of FlashAttention-2's rates, forward and backward, PyTorch's memory-efficient kernel has this part in 16 bits: on an
H100 (``benchmarks/measured_kernels_h100.json``: medians of 9 shapes of heads of 112 and 128 features)."""
_EFFICIENT_BROAD = 0.25
"""Its backward of wider heads, as a part of that: 16 heads of 192 features (values of 128) and 2,048 tokens took 2.47
milliseconds there, in a step of DeepSeek V2 Lite: the one shape that was measured."""
BLACKWELL = Kernels(
    Fused(0.60, 0.34, 0.9, queries=256),
    Fused(0.44, 0.36, 2.4, _TAIL),
    f"{_SIMUMAX}b200_bf16_ceperm.json (sdp_fwd and sdp_bwd of 16 to 128 heads; heads of 64 features slower as in "
    "https://github.com/Dao-AILab/flash-attention/pull/2605 and, backward, on H100)",
)
_OLDER = "; FlashAttention 1, which PyTorch has before 2.2, half as fast: abstract of https://arxiv.org/abs/2307.08691"


def kernels_of(major: int, matrix: float, *, fused_kernels: bool, older: bool, newest: bool = False) -> Kernels:
    """Of GPUs whose compute capability begins with ``major``; ``matrix``: part of the peak that its products sustain.
    ``fused_kernels``: cuDNN's, of the ``newest`` release or one before; ``older``: before FlashAttention-2."""
    if major == 10:
        return BLACKWELL
    if major in (8, 9):
        cudnn = HOPPER_CUDNN_NEWEST if newest else HOPPER_CUDNN
        flash = HOPPER_NEWEST if newest else HOPPER
        newer = AMPERE if major == 8 else cudnn if fused_kernels else flash
        limit = min(1.0, matrix / 0.8) if major == 8 else 1.0
        slower = 0.5 if older and not fused_kernels else 1.0
        parts = (newer.forward.of(limit * slower), newer.backward.of(limit * slower))
        return Kernels(*parts, newer.source + (_OLDER if slower < 1 else ""))
    half, ratio = 0.5 * matrix, 0.63 / 0.73
    none = "no measured fused attention was found for this GPU: half the rate of a matrix product"
    return Kernels(Fused(half, half), Fused(half * ratio, half * ratio), none)


def memory_efficient(major: int, dtype: str) -> tuple[Fused, Fused] | None:
    """Of PyTorch's memory-efficient kernel, forward and backward; ``None``: no rate of it is known."""
    if dtype == "fp32":
        return _FP32.forward, _FP32.backward
    flash = {8: AMPERE, 9: HOPPER}.get(major)
    if flash is None:
        return None
    forward, backward = _EFFICIENT
    return flash.forward.of(forward), flash.backward.of(backward)._replace(broad=_EFFICIENT_BROAD)


def beside(kernel: Attention) -> float:
    """Bytes that backward's kernels before and behind move: the context and its gradient read, fp32 gradients of the
    queries filled with zeros, then read and written in 16 bits (``flash_bwd_preprocess_kernel.h``)."""
    return 14.0 * kernel.heads * kernel.queries * kernel.features if kernel.backward else 0.0


def seconds(kernel: Attention, fused: Fused, processors: int) -> float:
    """Of ``kernel``, in ``fused`` (FLOP/s)."""
    rows, columns = -(-kernel.queries // fused.queries), -(-kernel.keys // KEYS)
    wide = next((size for size in fused.widths if size >= kernel.features), kernel.features) / kernel.features
    tile = wide * kernel.flops / (kernel.heads * kernel.queries * kernel.keys) * fused.queries * KEYS
    if kernel.part < 1:
        every = kernel.heads * (rows * (kernel.part * columns + fused.fixed) + columns / 2)
        tiles = every / processors + fused.tail * columns
    else:
        tiles = -(-kernel.heads * rows // processors) * (columns + fused.fixed)
    rate = fused.narrow if kernel.features <= NARROW else fused.rate
    return tiles * tile * processors / (rate * (fused.broad if kernel.features > BROAD else 1.0))
