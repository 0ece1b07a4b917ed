"""What a plan's GPUs and links sustain: published peaks times the parts of them that kernels and links reach.

Where default parts are from: ``efficiency``. None is from a published training step.

How far predicted steps were from measured ones, by the medians of ``benchmarks/timing.py`` (docs/timing.md), and the
fastest steps that anybody published.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from ...device.gpus import GPUS, MULTIPROCESSORS
from ...frameworks import framework
from ...plan.errors import ABSENT, PlanError
from ...plan.plan import ResolvedPlan
from ...plan.releases import CUDNN_ATTENTION, DEPRIORITIZED
from ...values import NamedTuple, dataclass
from .attention import Fused, memory_efficient
from .efficiency import SAME_CHIP, Efficiency, Power, default, unmeasured
from .hardware import EIGHT, FOUR, GIGA, GRACES, LOW_PRECISION, SPEEDS, Figure
from .host import GRACE

REPLICAS, DIVIDED, DIVIDED_LOW = "whole layers", "Megatron's layers", "Megatron's layers in 8 or 4 bits"
EXPERTS, ADAPTERS = "experts and hybrids", "adapters"

PUBLISHED_ERRORS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        REPLICAS: {"a100-40gb": 0.024, "a100-80gb": 0.020, "h100-80gb": 0.021, "h100-96gb": 0.089},
        DIVIDED: {"a100-80gb": 0.031, "b200": 0.068, "h100-80gb": 0.080},
        DIVIDED_LOW: {"h100-80gb": 0.034, "gb300": 0.040},
        ADAPTERS: {"a100-80gb": 0.015, "h200": 0.119},
    }
)
"""Median of the absolute relative errors of steps, by what they are steps of and by GPU, of two and more: of PyTorch's
layers whole on a GPU (plain, or sharded by FSDP) and of those that Megatron divides, dense in 16 bits unless said. Few
are those of H100 in 16 bits under Megatron, three on 8,192 and 16,384 GPUs, and those of H100s with 500 W, two."""

ERRORS_OF_ONE: Mapping[str, float] = MappingProxyType({"h200": 0.029})
"""The same where steps on one GPU alone were compared; some of H200's gave figures (``efficiency.POWER``)."""

ERROR_OF_EXPERTS = 0.080
"""The same of models with experts and of hybrids, over all GPUs: each has too few of them for a median of its own."""


def compared(plan: ResolvedPlan) -> str:
    """Which steps the plan's is one of: a key of ``PUBLISHED_ERRORS``, ``EXPERTS``, or empty where none of its code and
    layout was compared with a measured one."""
    own, layout = framework(plan.framework).time.compared, plan.layout
    if plan.model.experts or plan.model.layer_pattern:
        return EXPERTS
    if plan.loop.own_loss or not own:
        return ""
    if plan.lora.rank is not None:
        return ADAPTERS
    if own == DIVIDED:
        return DIVIDED if plan.precision.low is None else DIVIDED_LOW
    return REPLICAS if layout.tp * layout.cp * layout.pp == 1 and plan.precision.low is None else ""


def published_error(plan: ResolvedPlan) -> float:
    """Median relative error of a step's time on the plan's GPU; the largest published one of its code where none on it
    was compared, none of its layout, none on more than one GPU where the plan has more, or none of its loop (one of
    trl's); of adapters beside experts, of which none was, the larger of the two. Where not even products were measured
    on it, how far those of other GPUs are from what stands in."""
    gpu, kind = plan.hardware.gpu or "", compared(plan)
    unknown = unmeasured(gpu) if gpu in SPEEDS else None
    if unknown is not None:
        return unknown
    if kind == EXPERTS:
        adapts = plan.lora.rank is not None
        return max(ERROR_OF_EXPERTS, max(PUBLISHED_ERRORS[ADAPTERS].values()) if adapts else 0.0)
    code, alone = framework(plan.framework).time.compared or REPLICAS, plan.hardware.gpus == 1
    dense = {
        **PUBLISHED_ERRORS.get(code if kind == ADAPTERS else kind, {}),
        **(ERRORS_OF_ONE if alone and kind else {}),
    }
    error = dense.get(gpu, max(PUBLISHED_ERRORS[code].values()))
    if plan.lora.rank is None:
        return error
    adapted = PUBLISHED_ERRORS[ADAPTERS]
    return max(error, adapted.get(gpu, max(adapted.values())))


def error_between_layouts(plan: ResolvedPlan) -> float:
    """How far two layouts of ``plan`` may be apart whose times are equal: the least median error of dense steps on its
    GPU. By what all steps of some code are wrong alike, as Megatron's on thousands of H100 are, their order is not."""
    own = published_error(plan)
    if compared(plan) == EXPERTS:
        return own
    gpu = plan.hardware.gpu or ""
    return min([own, *(of_code[gpu] for of_code in PUBLISHED_ERRORS.values() if gpu in of_code)])


_FOUNDRY = "MPT-3B of 512 tokens on 8 GPUs, https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md"
_GPT3 = Figure(
    0.54, "GPT-3 175B on 128 H100, https://newsletter.semianalysis.com/p/h100-vs-gb200-nvl72-training-benchmarks"
)
_MIXTRAL = Figure(0.493, "Mixtral 8x22B on H100 in Megatron-Core, https://arxiv.org/abs/2504.14960")
BEST_MFU: Mapping[str, Figure] = MappingProxyType(
    {
        "a100-40gb": Figure(0.627, _FOUNDRY),
        "a100-80gb": Figure(0.627, _FOUNDRY),
        "h100-80gb": _GPT3,
        "h200": _GPT3,
        "b200": Figure(0.369, "Llama 3 70B of 12 layers on 8 GPUs, https://github.com/MooreThreads/SimuMax"),
    }
)
"""The highest MFU of dense training in 16 bits that was found, by GPU; a chip's whatever its memory. It has half of
causal scores (``StepTime.mfu_halved``), so that long sequences are not above it for what no kernel computes: MosaicML's
and SimuMax's steps, which count them whole, were counted anew. Of GPT-3's 2,048 tokens half of the scores are 1.4 %."""

BEST_MFU_OF_EXPERTS: Mapping[str, Figure] = MappingProxyType({"h100-80gb": _MIXTRAL, "h200": _MIXTRAL})
"""The same of models with experts."""


def best_published(gpu: str, dtype: str, mfu: float, *, experts: bool = False) -> Figure | None:
    """The highest published MFU of ``gpu``, where ``mfu`` in ``dtype`` is above it by a tenth of a per cent at least:
    of models with ``experts``, if one is known, or of those without."""
    known = {**BEST_MFU, **(BEST_MFU_OF_EXPERTS if experts else {})}
    best = known.get(SAME_CHIP.get(gpu, gpu)) if dtype in ("bf16", "fp16") else None
    return best if best is not None and round(mfu, 3) > best.value else None


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
    odd: float
    """Sustained by products in 16 bits whose rows are no whole 16 bytes."""
    tf32: float
    """Sustained by products in TF32: the part of their peak that those in 16 bits reach; ordinary cores', where there
    are none."""
    low: tuple[tuple[float, float], ...]
    """The same as ``matrix`` of products whose operands' elements have fewer bytes: bytes, FLOP/s."""
    attention_forward: Fused
    attention_backward: Fused
    efficient: tuple[Fused, Fused]
    """Of the memory-efficient kernel, forward and backward."""
    memory: float
    issue: float
    """Seconds that multiprocessors take for what an H200's take one for."""
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
    power: Power | None
    """``None``: the other rates are sustained ones."""
    host_slower: float
    """Seconds of the host, as a multiple of a Xeon's."""


IN_BLOCKS = ("blockwise", "mxfp8", "nvfp4")
"""Recipes with a scale for each block: NVFP4's layers in 8 bits too."""

FLASH2 = (2, 2)
"""PyTorch whose own fused attention is FlashAttention-2 (https://pytorch.org/blog/pytorch2-2/)."""

NVJET = (2, 8)
"""PyTorch whose wheels, unless one asks for others, are of CUDA 12.8 or later, whose cuBLAS has ``nvjet`` kernels in
place of ``sm90_xmma_gemm`` (https://forums.developer.nvidia.com/t/348958)."""
CUDA_12_1, CUDA_12_4 = (2, 1), (2, 5)
"""Those of CUDA 12.1, with cuBLAS 12.1.3.1 (https://github.com/pytorch/pytorch/issues/114911), and of 12.4."""

HALF_AS_WIDE = ((7, 0), (7, 5), (8, 0))
"""Compute capabilities whose multiprocessors have 64 fp32 cores, where others have 128 (CUDA programming guide)."""

WIDE_LOADS = (2, 7)
"""PyTorch whose kernels load 16 bytes at a time on Hopper (https://github.com/pytorch/pytorch/pull/145746)."""


def as_validated(plan: ResolvedPlan) -> ResolvedPlan:
    """``plan`` with the attention of ``memplan validate``, which turns cuDNN's off
    (``trace.surroundings.without_cudnn_attention``)."""
    return plan.model_copy(update={"environment": {**plan.environment, DEPRIORITIZED: "1"}})


def before(plan: ResolvedPlan, version: tuple[int, ...]) -> bool:
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
    dtype = plan.quantisation.compute or plan.precision.dtype
    network = None if plan.hardware.network is None else plan.hardware.network * GIGA
    return _rates(gpu, dtype, _low_of(plan), plan.hardware.gpus_per_node, network, _software(plan), efficiency)


class Software(NamedTuple):
    """What of a job's software its kernels' rates depend on: as of ``efficiency.default``."""

    fused_kernels: bool
    older: bool
    narrow: bool
    newest: bool
    early: bool
    any_shape: bool


def _software(plan: ResolvedPlan) -> Software:
    fused = framework(plan.framework).time.fused_attention
    older = before(plan, FLASH2) and plan.attention != "flash_attention_2"
    preferred = plan.attention == "flash" and not plan.environment.get(DEPRIORITIZED)
    cudnn = fused or (preferred and not before(plan, CUDNN_ATTENTION))
    early = before(plan, CUDA_12_4) and not before(plan, CUDA_12_1)
    any_shape = not before(plan, CUDA_12_1)
    return Software(cudnn, older, not fused and before(plan, WIDE_LOADS), not before(plan, NVJET), early, any_shape)


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
    software: Software,
    efficiency: Efficiency | None,
) -> Rates:
    speed, processors = SPEEDS.get(gpu), MULTIPROCESSORS.get(gpu)
    if speed is None or processors is None:
        known = ", ".join(sorted(set(SPEEDS) & set(MULTIPROCESSORS)))
        raise PlanError("hardware.gpu", gpu, f"has no published speed, and so no time; these have: {known}")
    capability = GPUS[gpu].compute_capability
    major, minor = capability or (0, 0)
    parts = efficiency or default(gpu, capability, **software._asdict())
    fp32 = _published(gpu, speed.fp32, "fp32 rate")
    h200 = _published("h200", SPEEDS["h200"].fp32, "fp32 rate")
    tensor = _published("h200", SPEEDS["h200"].matrix, "tensor rate")
    if dtype == "fp32":
        peak = fp32
    else:
        if dtype == "bf16" and not speed.bf16:
            raise PlanError(
                "precision.dtype",
                dtype,
                f"must be fp16 or fp32 on {gpu}: its tensor cores do not take bf16, and no rate is published",
            )
        peak = _published(gpu, speed.matrix, "tensor rate")
    if network is None and speed.network is not None:
        network = speed.network.value
    memory = _published(gpu, speed.memory, "memory bandwidth")
    ordinary = fp32 * (parts.matrix if parts.ordinary is None else parts.ordinary)
    issue = h200 / fp32 * (64 if (major, minor) in HALF_AS_WIDE else 128) / 128
    matrix = peak * (parts.matrix if low is None or parts.low is None else parts.low.sixteen or parts.matrix)
    faster = LOW_PRECISION.get(gpu, {})
    if low is not None and low[0] not in faster:
        kind = "fp8" if low[0] == EIGHT else "fp4"
        raise PlanError("hardware.gpu", gpu, f"has no published rate of {kind}, and so no time")
    efficient = memory_efficient(major, dtype) or (parts.attention_forward, parts.attention_backward)
    return Rates(
        peak=peak if low is None else faster[low[0]].value,
        matrix=matrix,
        ordinary=ordinary,
        odd=ordinary if parts.odd is None else min(matrix, tensor * parts.odd / issue),
        tf32=ordinary if speed.tf32 is None else speed.tf32.value * parts.matrix,
        low=()
        if low is None
        else tuple(
            (size, one.value * (parts.low.of(size, blocks=low[1]) if parts.low else parts.matrix))
            for size, one in faster.items()
        ),
        attention_forward=(efficient[0] if dtype == "fp32" else parts.attention_forward).of(peak),
        attention_backward=(efficient[1] if dtype == "fp32" else parts.attention_backward).of(peak),
        efficient=(efficient[0].of(peak), efficient[1].of(peak)),
        memory=memory * parts.memory,
        issue=issue,
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
        power=parts.power,
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
    parts = efficiency or default(gpu, GPUS[gpu].compute_capability, **_software(plan)._asdict())
    if (low := _low_of(plan)) is not None:
        reached = "the part of their peak that those in 16 bits reach"
        if parts.low is not None:
            reached = f"{parts.low.of(low[0], blocks=low[1]):.0%} of their peak: {parts.low.source}"
        notes.append(f"products in {plan.precision.low} reach {reached}")
    return (*notes, *parts.sources)
