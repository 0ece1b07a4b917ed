"""Seconds of kernels that recipes have recorded (``layers.work``): products by waves of tiles, attention by its FLOPs,
memory-bound kernels by the bytes that they read and write, collectives by what nothing hides.

A product of (m, k) by (k, n) is cut into output tiles, which are dealt out to the multiprocessors; a tile at the edge
costs as much as a whole one, and the last wave as much as a full one (NVIDIA, Matrix Multiplication Background User's
Guide, sections 2.3 and 3: https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/).
Tensor cores want 16 bytes' worth of elements in every row (section 2.2); of other shapes they reach a small part of
their peak, or ordinary cores take them (``Efficiency.odd``). These take fp32, too, which PyTorch does not turn into
TF32 unless told to (``torch.backends.cuda.matmul.allow_tf32``), while Transformer Engine does (``Product.tf32``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf

from ...layers.work import Alone, Attention, Exchange, Kernel, Product, Scan, Stream, Together
from ...values import NamedTuple
from . import attention
from .collectives import Group, collective, group, send
from .power import Drawn
from .rates import Rates

CHANNELS = 24
"""Multiprocessors that NCCL's rings keep busy: a block each for two directions of twelve rings on NVLink
(``src/graph/search.cc``; ``NCCL_MAX_NCHANNELS`` of https://docs.nvidia.com/deeplearning/nccl/user-guide/)."""

PERSISTENT = 1 - 47 / 80
"""What those channels take from products on Hopper and later, whose kernels start one block on every multiprocessor and
no more: blocks that find theirs taken run when others have ended. A product on H100 beside an all-gather of 24 blocks
fell from 80 to 47 % of the peak (https://forums.developer.nvidia.com/t/337991, which mimics FSDP)."""

LARGEST = 256 * 128
"""Elements of the most efficient output tile, of which a multiprocessor holds one; of smaller ones it holds several
at once, which share its tensor cores."""

TILES = tuple((rows, columns, rows * columns) for rows, columns in ((256, 128), (128, 256), (128, 128), (64, 64)))
"""Rows, columns and elements of output tiles (cuBLAS has more; the guide's section 2.3)."""

SKINNY = (*TILES, (256, 16, 4096), (16, 256, 4096))
"""For products with a side below the smallest tile's, such as an adapter's."""

MOST_SPLITS = 8
"""Parts of the inner dimension that a product is cut into whose tiles fill up to as many waves, where that is faster;
parts' fp32 sums are written and read. So are gradients of weights: few tiles of long sums. In NVIDIA's sweeps of linear
layers (https://github.com/ai-dynamo/aiconfigurator, aic-core/src/aiconfigurator_core/systems/data) products of one to
two waves whose sums have 12,288 terms and more differ from the model's by 6 % in the mean on A100 (35 % without parts),
by 9 and 8 % on H100 and H200 (25, 28 %), by 5 to 7 % on Blackwell (30 to 40 %)."""

SCAN = 1.31
"""How much longer a state-space scan takes than its products and bytes say: the median of 77 scans of 8,192 tokens and
more on B200, 1.26 to 1.46 in the middle four fifths (aiconfigurator's sweep of ``mamba_chunk_scan_combined``,
TensorRT-LLM 1.3.0rc15, forward, FlashInfer's kernel; mamba_ssm's in Triton, and backward, were not swept)."""

ALIGNMENT = 16
"""Bytes that rows are multiples of where tensor cores multiply."""

LAUNCH = 3.8e-6
"""Seconds between the starts of kernels in a stream: a shorter one ends no sooner
(https://developer.nvidia.com/blog/cuda-graphs/, overlapped launches)."""

GAP = LAUNCH - 2.9e-6
"""Of these, those between the end of a kernel and the start of the next: the kernel took 2.9 microseconds there."""


def matmul(
    rates: Rates,
    m: int,
    n: int,
    k: int,
    batch: int = 1,
    element: float = 2,
    written: int | None = None,
    *,
    tokens: str = "",
    tf32: bool = False,
) -> float:
    """Seconds of ``batch`` products (m, k) x (k, n) of ``element`` bytes each; ``written`` bytes move for each
    element of the result, ``element`` unless said (a gradient that is added to in fp32: read and written, 8).
    ``tokens`` and ``tf32``: as of ``Product``; what ordinary cores take, they take in whole waves."""
    if not (m and n and k and batch):
        return 0.0
    multiple = ALIGNMENT / element
    aligned = not (n % multiple or (tokens != "m" and m % multiple) or (tokens != "k" and k % multiple))
    ordinary = element > 2 and not (aligned and tf32)
    sustained = rates.ordinary if element > 2 else rates.odd
    if aligned and tf32:
        sustained = rates.tf32
    elif aligned and not ordinary:
        # LLM.int8's products are of one byte where the plan computes in 16 bits, whose rate is what they at least have
        sustained = dict(rates.low).get(element, rates.matrix)
    work = 2.0 * k / (sustained / rates.processors)
    operands = batch * (m * k + k * n) * element / rates.memory
    result = batch * m * n * (element if written is None else written) / rates.memory
    partial = batch * m * n * 2 * 4 / rates.memory
    least = inf
    for rows, columns, area in TILES if min(m, n) >= 64 else SKINNY:
        tiles = batch * -(-m // rows) * -(-n // columns)
        full = work * tiles * area / rates.processors
        for split in range(1, 1 + (MOST_SPLITS if tiles < MOST_SPLITS * rates.processors else 1)):
            back = result + (split * partial if split > 1 else 0.0)
            behind = 0.0 if rates.overlapped_epilogue else back
            if max(full + behind, operands + back) >= least:
                break  # nor do full waves of more parts end before
            parts = tiles * split
            busiest = -(-parts // rates.processors) * area if ordinary else _busiest(parts, rates.processors, area)
            least = min(least, max(work * busiest / split + behind, operands + back))
    return max(least + GAP, LAUNCH)


def streamed(rates: Rates, moved: float, kernels: int = 1, issue: int = 0) -> float:
    """Seconds of ``kernels`` that read and write ``moved`` bytes together; ``issue`` as of ``Stream``."""
    if not moved:
        return 0.0
    return max(max(moved / rates.memory, issue * 1e-15 * rates.issue) + kernels * GAP, kernels * LAUNCH)


def _busiest(tiles: int, processors: int, area: int) -> int:
    """Elements that the busiest multiprocessor computes."""
    if tiles <= processors:
        return area
    at_once = LARGEST // area
    return -(-tiles // (processors * at_once)) * at_once * area


class Seconds(NamedTuple):
    """Of one pass of one module."""

    device: float = 0.0
    """Without what follows."""
    exposed: float = 0.0
    """Communication that nothing hides."""
    launches: int = 0


class Ranks(NamedTuple):
    """Sizes of the groups that share a layer: tensor- and context-parallel, of experts and of each expert's tensors."""

    t: int
    c: int = 1
    ep: int = 1
    etp: int = 1


def seconds(work: Sequence[tuple[Kernel, int]], rates: Rates, ranks: Ranks) -> Seconds:
    """Of kernels, each so often, on one of ``ranks``."""
    device, exposed, launches = 0.0, 0.0, 0
    for kernel, times in work:
        if isinstance(kernel, Exchange):
            exposed += times * kernel.times * exchanged(kernel, rates, ranks)
            launches += times * kernel.times
        else:
            device += times * alone(kernel, rates)
            launches += times * (1 if isinstance(kernel, Product) else kernel.launches)  # a group is one call
    return Seconds(device, exposed, launches)


def drawn(work: Sequence[tuple[Kernel, int]], rates: Rates) -> Drawn:
    """What ``work`` takes of the GPU, without collectives."""
    flops = moved = bound = other = 0.0
    for kernel, times in work:
        if isinstance(kernel, Exchange):
            continue
        spent = times * alone(kernel, rates)
        own = kernel.kernel if isinstance(kernel, Scan) else kernel
        if isinstance(own, Product):
            flops += times * own.flops * min(1.0, own.element / 2)
            bound += spent
            continue
        moved += times * own.bytes
        if isinstance(own, Attention):
            flops += times * own.flops * own.part
        if isinstance(own, Stream) and own.issue * 1e-15 * rates.issue * rates.memory < own.bytes:
            other += spent
        else:
            bound += spent
    return Drawn(flops, moved, bound, other)


@lru_cache(maxsize=1 << 16)
def alone(kernel: Alone, rates: Rates) -> float:
    """Seconds of what a GPU does by itself."""
    if isinstance(kernel, Scan):
        return SCAN * alone(kernel.kernel, rates)
    if isinstance(kernel, Product):
        m, n, k, times, element, written, rows, tf32, tokens = kernel
        spent = matmul(rates, m, n, k, times, element, written or None, tokens=tokens or rows, tf32=tf32)
        return max(spent, times * LAUNCH if rows else 0.0)
    if isinstance(kernel, Attention):
        rated = rates.efficient if kernel.efficient else (rates.attention_forward, rates.attention_backward)
        fused = rated[kernel.backward]
        spent = attention.seconds(kernel, fused, rates.processors)
        spent += GAP + streamed(rates, attention.beside(kernel))
        return max(spent, streamed(rates, kernel.bytes, kernel.launches))
    slower = rates.memory / rates.loss if kernel.loss else 1.0
    return streamed(rates, kernel.bytes * slower, kernel.launches, kernel.issue)


def exchanged(one: Exchange, rates: Rates, ranks: Ranks) -> float:
    """Exposed seconds of a collective, once: what is longer than the kernel beside it, and what its channels take from
    that."""
    if one.kind == "send":
        spent = send(rates, one.bytes, ranks.t * ranks.c > rates.node)
    else:
        of = across(one, ranks, rates.node)
        size = one.bytes + one.scores * one.choices[1] * of.local / of.ranks
        spent = collective(rates, one.kind, size, of, one.choices)
    if one.beside is None:
        return spent
    if one.parts and isinstance(one.beside, Product):
        return in_parts(spent, one.beside, one.parts, rates)
    meanwhile = one.beside.kernels if isinstance(one.beside, Together) else ((one.beside, 1),)
    return overlapped(rates, spent, sum(times * alone(kernel, rates) for kernel, times in meanwhile))


def in_parts(spent: float, product: Product, parts: int, rates: Rates) -> float:
    """Seconds by which a product takes longer whose operand or result goes round the ranks in ``parts``: the first part
    of its rows is computed while the second comes, the last one after that; smaller products fill fewer waves."""
    part = alone(product._replace(m=-(-product.m // parts)), rates)
    return part + (parts - 1) * max(part, spent / (parts - 1)) - alone(product, rates)


def across(one: Exchange, ranks: Ranks, node: int) -> Group:
    """Neighbours have one layer's tensors, or one expert's, then parts of a sequence, or experts
    (``parallel_state.py``, order ``tp-cp-ep-dp-pp`` of either kind of layer)."""
    size, stride = {
        "tp": (ranks.t, 1),
        "cp": (ranks.c, ranks.t),
        "etp": (ranks.etp, 1),
        "ep": (ranks.ep, ranks.etp),
        "experts": (ranks.ep * ranks.etp, 1),
    }[one.axis]
    return group(one.among or size, stride, node)


def overlapped(rates: Rates, communication: float, work: float) -> float:
    """Seconds by which a collective beside ``work`` makes that longer: what outlasts it, or what its channels take from
    that meanwhile."""
    taken = PERSISTENT if rates.persistent else CHANNELS / rates.processors
    return max(communication - work, communication * taken)
