"""What a plan's GPUs and links sustain: published peaks times the parts of them that kernels and links reach.

Every default part is from somebody's microbenchmark of kernels or links, none from a training step. A sustained rate is
what remains on random numbers once the power limit holds; where only a best case has been published it is that.

How far predicted steps were from measured ones, by the medians of ``benchmarks/timing.py`` (docs/timing.md), and the
fastest steps that anybody published.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from ...device.gpus import GPUS, MULTIPROCESSORS
from ...frameworks import framework
from ...plan.errors import ABSENT, PlanError
from ...plan.resolved import ResolvedPlan
from ...values import dataclass
from .attention import Fused, kernels_of
from .hardware import EIGHT, FOUR, GIGA, GRACES, LOW_PRECISION, SPEEDS, Figure
from .host import GRACE

PUBLISHED_ERRORS: Mapping[str, float] = MappingProxyType(
    {"a100-40gb": 0.025, "a100-80gb": 0.026, "h100-80gb": 0.060, "b200": 0.071}
)
"""Median of the absolute relative errors of dense steps in 16 bits, by GPU."""


ERROR_OF_EXPERTS = 0.111
"""The same of models with experts and of hybrids, over all GPUs: each has too few of them for a median of its own."""


ERROR_OF_ADAPTERS = 0.053
"""The same of LoRA on weights in 16 bits, on A100."""


def published_error(plan: ResolvedPlan) -> float:
    """Median relative error of a step's time on the plan's GPU; the largest published one where no step on it was
    compared, or none of the plan's loop (one of trl's)."""
    if plan.model.experts or plan.model.layer_pattern:
        return ERROR_OF_EXPERTS
    largest = max(PUBLISHED_ERRORS.values())
    if plan.trainer.kind.own_loss:
        return largest
    dense = PUBLISHED_ERRORS.get(plan.hardware.gpu or "", largest)
    return dense if plan.lora.rank is None else max(dense, ERROR_OF_ADAPTERS)


_FOUNDRY = "MPT-7B on 8 GPUs, https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md"
BEST_MFU: Mapping[str, Figure] = MappingProxyType(
    {
        "a100-40gb": Figure(0.642, _FOUNDRY),
        "a100-80gb": Figure(0.642, _FOUNDRY),
        "h100-80gb": Figure(
            0.54,
            "GPT-3 175B on 128 GPUs, https://newsletter.semianalysis.com/p/h100-vs-gb200-nvl72-training-benchmarks",
        ),
        "b200": Figure(0.382, "Llama 3 70B of 12 layers on 8 GPUs, https://github.com/MooreThreads/SimuMax"),
    }
)
"""The highest MFU of dense training in 16 bits that was found, by GPU; of an A100 the chip's, whatever its memory."""

BEST_MFU_OF_EXPERTS: Mapping[str, Figure] = MappingProxyType(
    {"h100-80gb": Figure(0.493, "Mixtral 8x22B in Megatron-Core, https://arxiv.org/abs/2504.14960")}
)
"""The same of models with experts."""


def best_published(gpu: str, dtype: str, mfu: float, *, experts: bool = False) -> Figure | None:
    """The highest published MFU of ``gpu``, where ``mfu`` in ``dtype`` is above it: of models with ``experts``, if one
    is known, or of those without."""
    best = {**BEST_MFU, **(BEST_MFU_OF_EXPERTS if experts else {})}.get(gpu) if dtype in ("bf16", "fp16") else None
    return best if best is not None and mfu > best.value else None


class Fraction(NamedTuple):
    """A part of a peak, from 0 to 1, and where it was measured."""

    value: float
    source: str


class Low(NamedTuple):
    """Parts of the peaks in fewer bits that their products sustain."""

    whole: float
    """8 bits, a scale for each tensor."""
    blocks: float
    """8 bits, a scale for each block."""
    four: float
    source: str
    sixteen: float | None = None
    """What products in 16 bits reach beside them; ``None``: as ``Efficiency.matrix``."""

    def of(self, size: float, *, blocks: bool) -> float:
        """Of elements of so many bytes."""
        return self.four if size == FOUR else self.blocks if blocks else self.whole


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Parts of the published peaks that are sustained; ``sources`` say where each is from."""

    matrix: float
    """Of the tensor cores' peak, by a large product whose tiles fill every wave."""
    memory: float
    """Of the memory's bandwidth, by a kernel that streams."""
    attention_forward: Fused
    """Of the tensor cores' peak, by fused attention kernels."""
    attention_backward: Fused
    link: float
    """Of the links' bandwidth, by NCCL's rings."""
    network: float
    """Of the network adapters' line rate, by NCCL."""
    host: float
    """Of the bandwidth to the host, by copies of pinned memory."""
    loss: float | None = None
    """Of the memory's bandwidth, by kernels of the cross entropy; ``None``: as ``memory``."""
    collective: float | None = None
    """Seconds that a collective over links takes besides its steps; ``None``: as NCCL's own model has it."""
    hop: float | None = None
    """Seconds of each of its steps, without the bytes."""
    exchange: float | None = None
    """Of the links' bandwidth, by NCCL's all-to-alls; ``None``: as ``link``."""
    low: Low | None = None
    """``None``: as ``matrix``."""
    sources: tuple[str, ...] = ()


_MAMF = "https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/README.md (MAMF table)"
_SIMUMAX_A100 = (
    "https://github.com/MooreThreads/SimuMax/blob/main/configs/system/a100_pcie.json (median of a sweep of 183 "
    "products on the PCIe card, as parts of what tiles and waves leave; on the SXM module 8192^3 on random numbers "
    "reaches 258 of 312, https://www.thonking.ai/p/strangely-matrix-multiplications)"
)
_SEMIANALYSIS = (
    "https://semianalysis.com/2024/12/22/mi300x-vs-h100-vs-h200-benchmark-part-1-training/ (Llama 70B's products on "
    "random numbers: H100 and H200 about 720, MI300X about 620 TFLOP/s, in fp8 H100 and H200 about "
    "1,280; best cases in the MAMF table: 794.5, 668.4)"
)
_MARKIDIS = "https://arxiv.org/abs/1803.04014 (cuBLAS: 83 TFLOP/s; the PCIe card's peak is 112)"
_B200 = "https://github.com/MooreThreads/SimuMax/blob/main/configs/system/b200_bf16_ceperm.json"
_SIMUMAX = (
    f"{_B200} (median of a sweep of 514 products, as parts of what tiles and waves leave; the best case in the MAMF "
    "table is 0.776)"
)
_SWEEPS = (
    "https://github.com/ai-dynamo/aiconfigurator/tree/main/aic-core/src/aiconfigurator_core/systems/data (NVIDIA's "
    "own sweeps of TensorRT-LLM 1.3.0rc20's linear layers on random numbers)"
)
_SWEPT = f"{_SWEEPS}, the median of products with 4,096 rows and more, as parts of what tiles and waves leave"
_GUIDE = (
    "https://github.com/NVIDIA/TransformerEngine/blob/main/docs/examples/gemm_profiling/gemm_profiling.rst (a layer's "
    "products on B300, 100 times, operands quantised before: 13.10 ms in bf16 and 12.76 in another run, 6.81 in fp8 "
    "with a scale for each tensor, 7.16 in MXFP8, 3.76 in NVFP4)"
)
_SUSTAINED = 0.680 / 0.730
"""What cuBLAS sustains on B300 in that guide of what the sweeps' short runs reach: bf16 0.671 and 0.689 of the peak, as
parts of what tiles and waves leave;"""
_WHOLE, _BLOCKS, _FOUR = 0.645 / 0.630, 0.614 / 0.740, 0.375 / 0.300
"""fp8, MXFP8 and NVFP4. Other Blackwells: in the same ratio. Of GB200 the authors of its grouped products state 2,672
TFLOP/s in MXFP8, 0.534 of the peak (NVIDIA/Megatron-LM, docs/discussions/deepseek-v3-gb200-optimization)."""
_ASSUMED = "no product measured on this GPU was found: the median of those that were"

_MATRIX: Mapping[str, Fraction] = MappingProxyType(
    {
        "v100-16gb": Fraction(83 / 112, _MARKIDIS),
        "v100-32gb": Fraction(83 / 112, _MARKIDIS),
        "a100-40gb": Fraction(0.80, _SIMUMAX_A100),
        "a100-80gb": Fraction(0.80, _SIMUMAX_A100),
        "h100-80gb": Fraction(720 / 989.5, _SEMIANALYSIS),
        "h100-96gb": Fraction(828.6 / 989, _MAMF),
        "h200": Fraction(720 / 989.5, _SEMIANALYSIS),
        "b200": Fraction(0.504, _SIMUMAX),
        "gb200": Fraction(0.683 * _SUSTAINED, f"{_SWEPT}; {_GUIDE}"),
        "b300": Fraction(0.730 * _SUSTAINED, f"{_SWEPT}; {_GUIDE}"),
        "gb300": Fraction(0.787 * _SUSTAINED, f"{_SWEPT}; {_GUIDE}"),
        "l40s": Fraction(0.669, _SWEPT),
        "mi300x": Fraction(620 / 1307.4, _SEMIANALYSIS),
    }
)

_HOPPER_EIGHT = 1280 / 1979
"""H100 and H200, fp8 with a scale for each tensor, Llama 70B's products on random numbers (``_SEMIANALYSIS``); the
sweeps' short runs reach 0.725 and 0.690."""


def _blackwell(whole: float, blocks: float, four: float, sixteen: float | None = None) -> Low:
    """What Transformer Engine's kernels sustain where the sweeps' reach these parts."""
    own = None if sixteen is None else sixteen * _SUSTAINED
    return Low(whole * _WHOLE, blocks * _BLOCKS, four * _FOUR, f"{_SWEEPS}; {_GUIDE}", own)


_LOW: Mapping[str, Low] = MappingProxyType(
    {
        "h100-80gb": Low(_HOPPER_EIGHT, 0.751 / 0.725 * _HOPPER_EIGHT, 0.0, _SEMIANALYSIS),
        "h200": Low(_HOPPER_EIGHT, 0.687 / 0.690 * _HOPPER_EIGHT, 0.0, _SEMIANALYSIS),
        "b200": _blackwell(0.590, 0.669, 0.468, 0.715),
        "gb200": _blackwell(0.549, 0.641, 0.465),
        "b300": _blackwell(0.630, 0.740, 0.300),
        "gb300": _blackwell(0.648, 0.739, 0.334),
        "l40s": Low(0.655, 0.334, 0.0, _SWEEPS),
    }
)
"""The same sweeps, and those of SGLang 0.5.14 beside them (but of B300, where it repeats GB300's): the faster kernels.
A layer's time is that of its product and of its input's quantisation, whose bytes are taken off: 5 for each element
with a scale for the whole tensor, which is looked for first, otherwise those that are read and written. Beside products
in fewer bits B200's in 16 are of the sweep, too: SimuMax's node, which ``_MATRIX`` has, reaches 0.7 of that."""

_PARANUMAL = "https://www.paranumal.com/single-post/2018/02/08/rough-n-ready-roofline-nvidia-v100-edition"
_DISSECTED = "https://arxiv.org/abs/2402.13499"
_ADA = Fraction(929.8 / 1008, f"{_DISSECTED} (RTX 4090: 929.8 of 1008 GB/s)")
_AMPERE = Fraction(1407.2 / 1555, f"{_DISSECTED} (A100 40 GB: 1407.2 of 1555 GB/s)")
_HOPPER = Fraction(1861.5 / 2039, f"{_DISSECTED} (H100 PCIe: 1861.5 of 2039 GB/s)")
_MEMORY: Mapping[tuple[int, int], Fraction] = MappingProxyType(
    {
        (7, 0): Fraction(790 / 900, f"{_PARANUMAL} (V100: 790 of 900 GB/s)"),
        (8, 0): _AMPERE,
        (8, 6): _AMPERE,
        (8, 9): _ADA,
        (9, 0): _HOPPER,
        (10, 0): Fraction(0.666 * 8000 / 7700, f"{_B200} (bandwidth, default: 0.666 of 8000 GB/s)"),
    }
)
"""By compute capability, of which the minor number counts for 8 only."""

_NO_MEMORY = Fraction(_HOPPER.value, f"none found for this GPU; as {_HOPPER.source}")

_TOPO = "https://github.com/NVIDIA/nccl/blob/master/src/graph/topo.h"
_NO_LINK = Fraction(20.0 / 25, f"none found for this GPU; as V100's in {_TOPO} (20.0 of 25 GB/s)")
_LINK: Mapping[int, Fraction] = MappingProxyType(
    {
        7: Fraction(20.0 / 25, f"{_TOPO} (V100: 20.0 of 25 GB/s of a link)"),
        8: Fraction(208 / 300, "https://github.com/NVIDIA/nccl-tests/issues/178, 149 (A100: 208 and 200 of 300 GB/s)"),
        9: Fraction(370 / 450, "https://github.com/NVIDIA/nccl-tests/issues/212 (H100: 370 of 450 GB/s)"),
        10: Fraction(0.6735 * 2**30 / 1e9, f"{_B200} (all_gather: 0.6735 of 900 GiB/s)"),
    }
)
"""By the major number of the compute capability: bus bandwidth of NCCL's rings."""

_EXCHANGE: Mapping[int, float] = MappingProxyType({8: 203 / 300, 9: 317 / 450, 10: 563 / 900})
"""Of 512 MiB among 8 GPUs: 2,313, 1,480 and 834 microseconds (A100, H100, B200: nccl_perf of the same folders)."""

_BLACKWELL = (0.28, 23.1e-6, 9.2e-6)
"""B200, from the same file: ``ce_fusion``; ``fixed_latency_us`` and ``latency_us`` of ``all_gather``."""
_HOST = 12.0 / 16.0
_PCI = "https://github.com/NVIDIA/nccl/blob/master/src/graph/topo.h (PCI_BW: 12.0 of the 16 GB/s of PCIe 3)"
_NETWORK = 0.96
_NET = "https://github.com/NVIDIA/nccl-tests/issues/119 (8 A100, 4 x 200 Gb/s a node: 96 of 100 GB/s)"


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def default(
    gpu: str, capability: tuple[int, int] | None, *, fused_kernels: bool = False, older: bool = False
) -> Efficiency:
    """Of ``gpu`` (a name of ``memplan.device.gpus``); ``fused_kernels`` where Transformer Engine chooses
    the attention's, ``older`` before FlashAttention-2."""
    matrix = _MATRIX.get(gpu) or Fraction(_median([one.value for one in _MATRIX.values()]), _ASSUMED)
    major, minor = capability or (0, 0)
    memory = _MEMORY.get((major, minor if major == 8 else 0), _NO_MEMORY)
    link = _LINK.get(major, _NO_LINK)
    forward, backward, attention = kernels_of(major, matrix.value, fused_kernels=fused_kernels, older=older)
    sources = (
        f"products reach {matrix.value:.0%} of the peak: {matrix.source}",
        f"memory {memory.value:.0%}: {memory.source}",
        f"attention {forward.rate:.0%} and {backward.rate:.0%}: {attention}",
        f"links {link.value:.0%}: {link.source}",
        f"network adapters {_NETWORK:.0%}: {_NET}",
        f"host {_HOST:.0%}: {_PCI}",
    )
    loss, base, hop = _BLACKWELL if gpu == "b200" else (None, None, None)
    return Efficiency(
        matrix.value,
        memory.value,
        forward,
        backward,
        link.value,
        _NETWORK,
        _HOST,
        loss,
        base,
        hop,
        _EXCHANGE.get(major),
        _LOW.get(gpu),
        sources,
    )


RACK = 8
"""GPUs above which links join the nodes of a rack."""


@dataclass(frozen=True, slots=True, eq=False)
class Rates:
    """Rates of one GPU and of its links; FLOP/s, and bytes/s in one direction. One object for equal ones, so that
    caches need not look inside."""

    peak: float
    """Published, of products in the plan's dtype, or in fp8 or fp4 where linear layers have it; what MFU refers to."""
    matrix: float
    """Sustained by large products whose tiles fill every wave."""
    ordinary: float
    """Sustained by fp32 products on ordinary cores."""
    low: tuple[tuple[float, float], ...]
    """The same as ``matrix`` of products whose operands' elements have fewer bytes: bytes, FLOP/s."""
    attention_forward: Fused
    attention_backward: Fused
    memory: float
    processors: int
    overlapped_epilogue: bool
    """Blackwell: kernels write a tile while they compute the next one. On Hopper cuBLAS' warp groups share a tile
    (``sm90_xmma_gemm_…_warpgroupsize2x1x1_…``), so that none computes while they write it."""
    persistent: bool
    """Hopper and later: kernels of products start one block on every multiprocessor and no more."""
    link: float
    exchange: float
    """Of links, in an all-to-all."""
    link_gpus: int
    """GPUs that the links join; others are reached through host or network."""
    host: float
    network: float | None
    node: int
    """GPUs of a node, or of a rack whose GPUs are joined by links."""
    loss: float
    """Bytes/s of the cross entropy's kernels."""
    collective: float | None
    hop: float | None
    """Seconds of a collective over links, and of each of its steps, where they were measured."""
    host_slower: float
    """Seconds of the host, as a multiple of a Xeon's."""


IN_BLOCKS = ("blockwise", "mxfp8", "nvfp4")
"""Recipes with a scale for each block: NVFP4's layers in 8 bits too."""

FLASH2 = (2, 2)
"""PyTorch whose fused attention is FlashAttention-2 (https://pytorch.org/blog/pytorch2-2/)."""


def before(plan: ResolvedPlan, version: tuple[int, int]) -> bool:
    """Whether ``plan`` runs a PyTorch before ``version``."""
    if plan.torch is None:
        return False
    major, minor, *_ = (int(part) for part in plan.torch.split("."))
    return (major, minor) < version


def rates_of(plan: ResolvedPlan, efficiency: Efficiency | None = None) -> Rates:
    """Rates of the GPU that ``plan`` names. ``PlanError`` where there is none, or nobody published its speed."""
    gpu = plan.hardware.gpu
    if gpu is None:
        raise PlanError("hardware.gpu", ABSENT, "is missing: the time of a step depends on the GPU (--gpu h100-80gb)")
    fused, older = framework(plan.framework).time.fused_attention, before(plan, FLASH2)
    dtype = plan.quantisation.compute or plan.precision.dtype
    network = None if plan.hardware.network is None else plan.hardware.network * GIGA
    return _rates(gpu, dtype, _low_of(plan), plan.hardware.gpus_per_node, network, (fused, older), efficiency)


def _low_of(plan: ResolvedPlan) -> tuple[float, bool] | None:
    """Bytes of an element of linear layers' products in fewer than 16 bits, and whether each block has a scale."""
    if plan.precision.low is None:
        return None
    return FOUR if plan.precision.fp4 else EIGHT, plan.precision.low in IN_BLOCKS


@lru_cache(maxsize=1024)
def _rates(
    gpu: str,
    dtype: str,
    low: tuple[float, bool] | None,
    node: int,
    network: float | None,
    attention: tuple[bool, bool],
    efficiency: Efficiency | None,
) -> Rates:
    speed, processors = SPEEDS.get(gpu), MULTIPROCESSORS.get(gpu)
    if speed is None or processors is None:
        known = ", ".join(sorted(set(SPEEDS) & set(MULTIPROCESSORS)))
        raise PlanError("hardware.gpu", gpu, f"has no published speed, and so no time; these have: {known}")
    capability = GPUS[gpu].compute_capability
    major, _ = capability or (0, 0)
    parts = efficiency or default(gpu, capability, fused_kernels=attention[0], older=attention[1])
    fp32 = _published(gpu, speed.fp32, "fp32 rate")
    if dtype == "fp32":
        peak = fp32
    else:
        if dtype == "bf16" and not speed.bf16:
            problem = f"must be fp16 or fp32 on {gpu}: its tensor cores do not take bf16, and no rate is published"
            raise PlanError("precision.dtype", dtype, problem)
        peak = _published(gpu, speed.matrix, "tensor rate")
    if network is None and speed.network is not None:
        network = speed.network.value
    memory = _published(gpu, speed.memory, "memory bandwidth")
    faster = LOW_PRECISION.get(gpu, {})
    if low is not None and low[0] not in faster:
        kind = "fp8" if low[0] == EIGHT else "fp4"
        raise PlanError("hardware.gpu", gpu, f"has no published rate of {kind}, and so no time")
    return Rates(
        peak=peak if low is None else faster[low[0]].value,
        matrix=peak * (parts.matrix if low is None or parts.low is None else parts.low.sixteen or parts.matrix),
        ordinary=fp32 * parts.matrix,
        low=()
        if low is None
        else tuple(
            (size, one.value * (parts.low.of(size, blocks=low[1]) if parts.low else parts.matrix))
            for size, one in faster.items()
        ),
        attention_forward=parts.attention_forward.of(peak),
        attention_backward=parts.attention_backward.of(peak),
        memory=memory * parts.memory,
        processors=processors,
        overlapped_epilogue=capability is None or capability >= (10, 0),
        persistent=major >= 9,
        link=0.0 if speed.link is None else speed.link.value * parts.link,
        exchange=0.0 if speed.link is None else speed.link.value * (parts.exchange or parts.link),
        link_gpus=speed.link_gpus,
        host=_published(gpu, speed.host, "bandwidth to the host") * parts.host,
        network=None if network is None else network * parts.network,
        node=max(node, speed.link_gpus) if speed.link_gpus > RACK else node,
        loss=memory * (parts.memory if parts.loss is None else parts.loss),
        collective=parts.collective,
        hop=parts.hop,
        host_slower=GRACE if gpu in GRACES else 1.0,
    )


def _published(gpu: str, figure: Figure | None, what: str) -> float:
    if figure is None:
        raise PlanError("hardware.gpu", gpu, f"has no published {what}, and so no time")
    return figure.value


def assumptions(plan: ResolvedPlan, efficiency: Efficiency | None = None) -> tuple[str, ...]:
    """What was assumed of machine and kernels, a line each."""
    gpu = plan.hardware.gpu
    assert gpu is not None
    system, notes = SPEEDS[gpu].system, []
    crosses = (plan.hardware.gpus or 1) > plan.hardware.gpus_per_node
    if crosses and plan.hardware.network is None and system is not None:
        notes.append(f"network: {system} (hardware.network says otherwise)")
    fused, older = framework(plan.framework).time.fused_attention, before(plan, FLASH2)
    parts = efficiency or default(gpu, GPUS[gpu].compute_capability, fused_kernels=fused, older=older)
    if (low := _low_of(plan)) is not None:
        reached = "the part of their peak that those in 16 bits reach"
        if parts.low is not None:
            reached = f"{parts.low.of(low[0], blocks=low[1]):.0%} of their peak: {parts.low.source}"
        notes.append(f"products in {plan.precision.low} reach {reached}")
    return (*notes, *parts.sources)
