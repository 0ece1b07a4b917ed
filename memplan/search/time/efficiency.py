"""What parts of published peaks kernels and links sustain, each from a microbenchmark of kernels or links.

Two figures were set from training steps of an H200 of our own: what it draws for its work (``POWER``: watts, not times)
and the instructions of ``foreach`` AdamW in bf16 (``optimizers.adam``). None is from a published step.

A sustained rate is what remains on random numbers once the power limit holds; where only a best case has been published
it is that.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...values import NamedTuple, dataclass
from .attention import Fused, kernels_of
from .hardware import FOUR


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


class Power(NamedTuple):
    """Watts of a GPU at its full clock: always, for each FLOP/s in 16 bits, and for each byte/s of its memory."""

    limit: float
    """What it stays within."""
    always: float
    flop: float
    byte: float
    exponent: float
    """Of the clock, in the energy of an operation."""


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
    ordinary: float | None = None
    """Of the ordinary cores' peak, by products; ``None``: as ``matrix``."""
    odd: float | None = None
    """Of an H200's tensor cores' peak, by products whose rows are no whole 16 bytes, on its multiprocessors: others do
    it in proportion; ``None``: ordinary cores do."""
    power: Power | None = None
    """``None``: rates are sustained ones."""
    sources: tuple[str, ...] = ()


_SIMUMAX_A100 = (
    "https://github.com/MooreThreads/SimuMax/blob/main/configs/system/a100_pcie.json (median of a sweep of 183 "
    "products on the PCIe card, relative to the limit by tiles and waves; on the SXM module 8192^3 on random numbers "
    "reaches 258 of 312, https://www.thonking.ai/p/strangely-matrix-multiplications)"
)
_SEMIANALYSIS = (
    "https://semianalysis.com/2024/12/22/mi300x-vs-h100-vs-h200-benchmark-part-1-training/ (Llama 70B's products on "
    "random numbers: H100 and H200 about 720, MI300X about 620 TFLOP/s, in fp8 H100 and H200 about 1,280; best cases "
    "in the MAMF table: 794.5, 668.4)"
)
_FILE = "benchmarks/measured_kernels_h200.json"
_OWN = (
    f"{_FILE} (an H200, torch 2.11 with cuBLAS 13, 26 November 2026: median of 95 products of 10 GFLOP and more that "
    "end before the clock falls, relative to the limit by tiles and waves)"
)
_TRITON = (
    "https://github.com/triton-lang/triton/issues/2339 (H100, September 2023, cuBLAS in fp16: 2,048 x 2,048 x 2,048, "
    "4,096 x 4,096 and 8,192 x 8,192 reach 515, 614 and 722 TFLOP/s; median, relative to the limit by tiles and waves)"
)
_MARKIDIS = "https://arxiv.org/abs/1803.04014 (cuBLAS: 83 TFLOP/s; the PCIe card's peak is 112)"
_B200 = "https://github.com/MooreThreads/SimuMax/blob/main/configs/system/b200_bf16_ceperm.json"
_SIMUMAX = (
    f"{_B200} (median of a sweep of 514 products, relative to the limit by tiles and waves; the best case in the MAMF "
    "table is 0.776)"
)
_SWEEPS = (
    "https://github.com/ai-dynamo/aiconfigurator/tree/main/aic-core/src/aiconfigurator_core/systems/data (NVIDIA's own "
    "sweeps of TensorRT-LLM 1.3.0rc20's linear layers on random numbers)"
)
_SWEPT = f"{_SWEEPS}, the median of products with 4,096 rows and more, relative to the limit by tiles and waves"
_GUIDE = (
    "https://github.com/NVIDIA/TransformerEngine/blob/main/docs/examples/gemm_profiling/gemm_profiling.rst (a layer's "
    "products on B300, 100 times, operands quantised before: 13.10 ms in bf16 and 12.76 in another run, 6.81 in fp8 "
    "with a scale for each tensor, 7.16 in MXFP8, 3.76 in NVFP4)"
)
_SUSTAINED = 0.677 / 0.710
"""What cuBLAS sustains on B300 in that guide of what the sweeps' short runs reach: bf16 0.668 and 0.686 of the peak, as
parts of what tiles and waves leave;"""
_WHOLE, _BLOCKS, _FOUR = 0.643 / 0.616, 0.611 / 0.735, 0.374 / 0.289
"""fp8, MXFP8 and NVFP4. Other Blackwells: in the same ratio. Of GB200 the authors of its grouped products state 2,672
TFLOP/s in MXFP8, 0.534 of the peak (NVIDIA/Megatron-LM, docs/discussions/deepseek-v3-gb200-optimization)."""
_ASSUMED = "no measured matrix product was found for this GPU: the median of the other GPUs"

_MATRIX: Mapping[str, Fraction] = MappingProxyType(
    {
        "v100-16gb": Fraction(83 / 112, _MARKIDIS),
        "v100-32gb": Fraction(83 / 112, _MARKIDIS),
        "a100-40gb": Fraction(0.80, _SIMUMAX_A100),
        "a100-80gb": Fraction(0.80, _SIMUMAX_A100),
        "h100-80gb": Fraction(720 / 989.5, _SEMIANALYSIS),
        "h200": Fraction(720 / 989.5, _SEMIANALYSIS),
        "b200": Fraction(0.493, _SIMUMAX),
        "gb200": Fraction(0.665 * _SUSTAINED, f"{_SWEPT}; {_GUIDE}"),
        "b300": Fraction(0.710 * _SUSTAINED, f"{_SWEPT}; {_GUIDE}"),
        "gb300": Fraction(0.772 * _SUSTAINED, f"{_SWEPT}; {_GUIDE}"),
        "l40s": Fraction(0.668, _SWEPT),
        "mi300x": Fraction(620 / 1307.4, _SEMIANALYSIS),
    }
)

_NEWEST: Mapping[str, Fraction] = MappingProxyType({"h100-80gb": Fraction(0.86, _OWN), "h200": Fraction(0.86, _OWN)})
"""Where cuBLAS has ``nvjet`` kernels, before the power limit."""
_EARLY: Mapping[str, Fraction] = MappingProxyType(dict.fromkeys(_NEWEST, Fraction(0.677, _TRITON)))
"""The same where cuBLAS is 12.1, whose kernels for Hopper NVIDIA's notes do not tell apart from those of 12.0.2 and
12.3; products of 10 GFLOP and more, as of ``_OWN``. With the power limit four of Llama 70B with 16,384 rows are 6 % too
fast to 5 % too slow (https://github.com/meta-pytorch/float8_experimental/pull/100)."""

_ORDINARY = 50.06 / 66.9
"""The same GPU, fp32: a product of 4,096 x 4,096 x 4,096."""
_ODD = 121 / 989.5
"""The same GPU: 50,257 columns (``cutlass_75_tensorop_bf16_s1688gemm_bf16_…_align1``), forward 96 TFLOP/s,
gradients 134 to 146; three in a step of GPT-2 and of GPT-2 XL 119 to 122. Later GPUs
run it, too. In 2022 A100s took heads of 108 and 150 features as slowly as ordinary cores (BigScience's trials, within
3 % in the median). NVIDIA's guide has tensor cores take any rows from cuBLAS 11 on. Where PyTorch comes with CUDA 12,
the kernel, which is made for Turing, is taken from ``TURING`` on: with 2.4.1 on A100 a vocabulary of 32,001 costs what
it says (foundation-model-stack's steps of Mistral 7B)."""
TURING = (7, 5)

POWER = Power(690, 311, 0.71e-12, 61e-12, 1.41)
"""The same GPU, limited to 700 W, which it held at 690. Watts of four training steps for seconds on end (Llama 3 8B of
8 layers 688, GPT-2 XL 586, GPT-2 under autocast 498, Llama with 8-bit Adam 479) and of a copy (563) are those of this
sum within 3 %: it was set from them. Products of random numbers, which alone would take 880 W, fall to 0.845 of their
speed (672 to 684 TFLOP/s): the exponent."""

SAME_CHIP: Mapping[str, str] = MappingProxyType(
    {
        "a800-80gb": "a100-80gb",
        "h800": "h100-80gb",
        "h100-96gb": "h100-80gb",
        "gh200-144gb": "h200",
        "mi325x": "mi300x",
    }
)
"""GPUs whose products are computed by another one's chip, with other memory or fewer links. Of a GH200 its owner sets
the limit (450 to 1,000 W for GPU, memory and Grace together: its data sheet); taken is an H200's of 700 W, so that the
same chip is as fast. Its best product is 828.6 TFLOP/s (stas00/ml-engineering's MAMF table; H100's is 794.5); what it
sustains nobody published."""


def _measured(gpu: str, newest: bool = False, early: bool = False) -> Fraction | None:
    chip = SAME_CHIP.get(gpu, gpu)
    return {**_MATRIX, **(_NEWEST if newest else _EARLY if early else {})}.get(chip)


def unmeasured(gpu: str) -> float | None:
    """Where nobody measured products on ``gpu``: how far GPUs on which somebody did are from the median that stands
    in, at most; as a part of it."""
    if _measured(gpu) is not None:
        return None
    parts = [one.value for one in _MATRIX.values()]
    return max(abs(part / _median(parts) - 1) for part in parts)


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
        "b200": _blackwell(0.575, 0.660, 0.455, 0.696),
        "gb200": _blackwell(0.533, 0.633, 0.453),
        "b300": _blackwell(0.616, 0.735, 0.289),
        "gb300": _blackwell(0.628, 0.734, 0.324),
        "l40s": Low(0.653, 0.334, 0.0, _SWEEPS),
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
_ELEMENTS = "https://github.com/pytorch/pytorch/pull/145746 (H100 SXM, bf16, 2^29 elements: means of relu and gelu"
_HOPPER = Fraction((3033 + 2888) / 2 / 3350, f"{_ELEMENTS}, 3033 and 2888 of 3350 GB/s)")
_HOPPER_NARROW = Fraction((2915 + 2549) / 2 / 3350, f"{_ELEMENTS} before it, 2915 and 2549 of 3350 GB/s)")
"""PyTorch's kernels load 8 bytes at a time of elements in 16 bits before 2.7, and 16 since, on Hopper alone. Streams
of the PCIe card reach 0.913 (arXiv 2402.13499)."""
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
_NCCL = "https://github.com/ai-dynamo/aiconfigurator, aic-core/src/aiconfigurator_core/systems/data, nccl_perf"
_LINK: Mapping[int, Fraction] = MappingProxyType(
    {
        7: Fraction(20.0 / 25, f"{_TOPO} (V100: 20.0 of 25 GB/s of a link)"),
        8: Fraction(221 / 300, f"{_NCCL} (A100: 221 of 300 GB/s beside a rank's own part)"),
        9: Fraction(370 / 450, "https://github.com/NVIDIA/nccl-tests/issues/212 (H100: 370 of 450 GB/s)"),
        10: Fraction(0.6735 * 2**30 / 1e9, f"{_B200} (all_gather: 0.6735 of 900 GiB/s)"),
    }
)
"""By the major number of the compute capability: bus bandwidth of NCCL's rings."""

_EXCHANGE: Mapping[int, float] = MappingProxyType({8: 203 / 300, 9: 317 / 450, 10: 563 / 900})
"""Of 512 MiB among 8 GPUs: 2,313, 1,480 and 834 microseconds (A100, H100, B200: nccl_perf of the same folders)."""

_BLACKWELL = (0.28, 23.1e-6, 9.2e-6)
"""B200, from the same file: ``ce_fusion``; ``fixed_latency_us`` and ``latency_us`` of ``all_gather``."""
_HOST = Fraction(12.0 / 16.0, f"{_TOPO} (PCI_BW: 12.0 of the 16 GB/s of PCIe 3)")
_HOST_HOPPER = Fraction(55.4 / 64, f"{_FILE} (an H200: 256 MiB of pinned memory, either way)")
_NETWORK = 0.96
_NET = "https://github.com/NVIDIA/nccl-tests/issues/119 (8 A100, 4 x 200 Gb/s a node: 96 of 100 GB/s)"


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def default(
    gpu: str,
    capability: tuple[int, int] | None,
    *,
    fused_kernels: bool = False,
    older: bool = False,
    narrow: bool = False,
    newest: bool = False,
    early: bool = False,
    any_shape: bool = False,
) -> Efficiency:
    """Of ``gpu`` (a name of ``memplan.device.gpus``); ``fused_kernels`` where cuDNN has attention's, ``older`` before
    FlashAttention-2, ``narrow`` where PyTorch loads 8 bytes at a time, ``newest`` where cuBLAS has ``nvjet``, ``early``
    where it is 12.1, ``any_shape`` where it is 12 or later."""
    limited = (newest or early) and SAME_CHIP.get(gpu, gpu) in _NEWEST
    matrix = _measured(gpu, newest, early) or Fraction(_median([one.value for one in _MATRIX.values()]), _ASSUMED)
    major, minor = capability or (0, 0)
    memory = _MEMORY.get((major, minor if major == 8 else 0), _NO_MEMORY)
    if narrow and memory is _HOPPER:
        memory = _HOPPER_NARROW
    link = _LINK.get(major, _NO_LINK)
    host = _HOST_HOPPER if major == 9 else _HOST
    forward, backward, attention = kernels_of(
        major, matrix.value, fused_kernels=fused_kernels, older=older, newest=newest
    )
    sources = (
        f"matrix products reach {matrix.value:.0%} of the peak: {matrix.source}",
        *((f"the clock falls where a layer would draw more than {POWER.limit:.0f} W",) if limited else ()),
        f"memory {memory.value:.0%}: {memory.source}",
        f"attention {forward.rate:.0%} and {backward.rate:.0%}: {attention}",
        f"links {link.value:.0%}: {link.source}",
        f"network adapters {_NETWORK:.0%}: {_NET}",
        f"host {host.value:.0%}: {host.source}",
    )
    loss, base, hop = _BLACKWELL if gpu == "b200" else (None, None, None)
    return Efficiency(
        matrix.value,
        memory.value,
        forward,
        backward,
        link.value,
        _NETWORK,
        host.value,
        loss,
        base,
        hop,
        _EXCHANGE.get(major),
        _LOW.get(SAME_CHIP.get(gpu, gpu)),
        _ORDINARY if major == 9 else None,
        _ODD if major >= 9 or (any_shape and (major, minor) >= TURING) else None,
        POWER if limited else None,
        sources,
    )
