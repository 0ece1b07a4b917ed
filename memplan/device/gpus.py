"""GPUs that plans can name, with the memory that their drivers show.

``capacity_bytes`` is the total of ``nvidia-smi`` (``rocm-smi`` for AMD). Drivers from 510 on count
their own share in it, so a process gets less: ``usable_bytes``, the total of ``cudaMemGetInfo`` and of
PyTorch's out-of-memory messages, where somebody has published it. Compute capabilities are those of
https://developer.nvidia.com/cuda-gpus.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..values import dataclass, pattern
from .facts import cuda_context

_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One model of GPU. Sizes in bytes."""

    name: str
    title: str
    """As the driver writes it."""
    capacity_bytes: int
    compute_capability: tuple[int, int] | None
    """``None`` for GPUs that do not run CUDA."""
    context_bytes: int | None
    """The bare context as somebody read it (``facts.cuda_context``); ``None`` where nobody has published a reading."""
    sources: tuple[str, ...]
    """Of the capacity, and of what is usable."""
    usable_bytes: int | None = None
    note: str = ""

    @property
    def has_bf16(self) -> bool:
        """Tensor cores take bf16: from Ampere on."""
        return self.compute_capability is None or self.compute_capability >= (8, 0)

    @property
    def process_bytes(self) -> int:
        """What a process gets: the total that PyTorch sees, where somebody has published it."""
        return self.capacity_bytes if self.usable_bytes is None else self.usable_bytes


def _gpu(
    name: str,
    title: str,
    mebibytes: int,
    compute_capability: tuple[int, int] | None,
    *sources: str,
    usable: float | None = None,
    note: str = "",
) -> Gpu:
    """``usable`` in GiB, often to 0.01 only, as PyTorch's messages print it."""
    context = cuda_context(name)
    return Gpu(
        name,
        title,
        mebibytes * _MIB,
        compute_capability,
        context.bytes if context else None,
        tuple(source if source.startswith("https") else f"https://github.com/{source}" for source in sources),
        None if usable is None else round(usable * _GIB),
        note,
    )


_MODAL = "modal-labs/modal-client/pull/2797"
_SYSTEMS = "ai-dynamo/aiconfigurator/blob/main/aic-core/src/aiconfigurator_core/systems"
_CAPTURES = "utkuozdemir/nvidia_gpu_exporter/tree/main/internal/captures"

_GPUS = (
    _gpu(
        "v100-16gb",
        "Tesla V100-SXM2-16GB",
        16_160,
        (7, 0),
        "4paradigm/k8s-vgpu-scheduler/issues/7",
        "cvg/nice-slam/issues/43",
        usable=16_160 / 1024,
        note="driver 440",
    ),
    _gpu(
        "v100-32gb",
        "Tesla V100-SXM2-32GB",
        32_510,
        (7, 0),
        "https://gist.github.com/c0dc1ce096bdccf9efde304d024a4d2e",
        "deepspeedai/DeepSpeed/issues/3312",
        "vllm-project/vllm/pull/4021",
        usable=32_510 / 1024,
        note="driver 440; 550 counts 32,768 MiB",
    ),
    _gpu(
        "a100-40gb",
        "NVIDIA A100-SXM4-40GB",
        40_960,
        (8, 0),
        _MODAL,
        "bottlerocket-os/bottlerocket/issues/3873",
        usable=42_298_834_944 / _GIB,
        note="drivers before 510: 40,536 MiB",
    ),
    _gpu(
        "a100-80gb",
        "NVIDIA A100-SXM4-80GB",
        81_920,
        (8, 0),
        _MODAL,
        "lianqi1008/Control-GIC/issues/6",
        usable=79.14,
    ),
    _gpu(
        "a800-80gb",
        "NVIDIA A800-SXM4-80GB",
        81_920,
        (8, 0),
        "dexmal/dexbotic/issues/41",
        usable=79.14,
        note="the chip and the memory of a100-80gb, whose usable memory is taken",
    ),
    _gpu(
        "h100-80gb",
        "NVIDIA H100 80GB HBM3",
        81_559,
        (9, 0),
        _CAPTURES,
        _MODAL,
        "vllm-project/vllm/issues/27508",
        usable=79.11,
    ),
    _gpu(
        "h100-pcie",
        "NVIDIA H100 PCIe",
        81_559,
        (9, 0),
        "https://www.nvidia.com/en-us/data-center/h100/",
        usable=79.11,
        note="the memory of h100-80gb, as which it is counted; no reading of the card was found",
    ),
    _gpu(
        "h800",
        "NVIDIA H800",
        81_559,
        (9, 0),
        "NVIDIA/DCGM/issues/120",
        _CAPTURES,
        usable=79.11,
        note="the chip and the memory of h100-80gb, whose usable memory is taken",
    ),
    _gpu(
        "h100-94gb",
        "NVIDIA H100 NVL",
        95_830,
        (9, 0),
        "vllm-project/vllm/issues/28143",
        "ali-vilab/VACE/issues/56",
        usable=93.00,
    ),
    _gpu(
        "h100-96gb",
        "NVIDIA GH200 480GB",
        97_871,
        (9, 0),
        "NVIDIA/apex/issues/1833",
        note="read on a GH200, whose H100 has 96 GB; no reading of an H100 with 96 GB beside an x86 host was found",
    ),
    _gpu(
        "gh200-144gb",
        "NVIDIA GH200 144G HBM3e",
        145_920,
        (9, 0),
        "NVIDIA/mig-parted/pull/139",
        note="what PyTorch's get_device_properties gives; no reading of nvidia-smi was found",
    ),
    _gpu(
        "h20",
        "NVIDIA H20",
        97_871,
        (9, 0),
        "sgl-project/sglang/issues/12373",
        "NVIDIA/apex/issues/1833",
        note="96 GB; nvidia-smi counts as much as on a GH200",
    ),
    _gpu("h200", "NVIDIA H200", 143_771, (9, 0), _CAPTURES, "vllm-project/vllm/issues/34553", usable=139.80),
    _gpu(
        "b200",
        "NVIDIA B200",
        183_359,
        (10, 0),
        "sgl-project/sglang/issues/27487",
        "unslothai/unsloth/pull/8669",
        usable=182_633 / 1024,
    ),
    _gpu("gb200", "NVIDIA GB200", 189_471, (10, 0), "vllm-project/vllm/issues/24272"),
    _gpu("b300", "NVIDIA B300 SXM6 AC", 275_040, (10, 3), f"{_SYSTEMS}/b300_sxm.yaml"),
    _gpu("gb300", "NVIDIA GB300", 284_208, (10, 3), f"{_SYSTEMS}/gb300.yaml"),
    _gpu("l40s", "NVIDIA L40S", 46_068, (8, 9), _CAPTURES, _MODAL, usable=44.39, note="usable: total less reserved"),
    _gpu(
        "l40",
        "NVIDIA L40",
        46_068,
        (8, 9),
        "QwenLM/Qwen3-VL/issues/2097",
        usable=44.40,
        note="the chip and the memory of l40s, which nvidia-smi counts alike",
    ),
    _gpu(
        "l20",
        "NVIDIA L20",
        46_068,
        (8, 9),
        "lipku/LiveTalking/issues/545",
        usable=44.40,
        note="48 GB with ECC, counted as on an l40, whose usable memory is taken; no reading of nvidia-smi was found",
    ),
    _gpu(
        "a40",
        "NVIDIA A40",
        46_068,
        (8, 6),
        "https://www.nvidia.com/en-us/data-center/a40/",
        usable=44.40,
        note="48 GB with ECC, counted as on an l40, whose usable memory is taken; no reading of nvidia-smi was found",
    ),
    _gpu("a10", "NVIDIA A10", 23_028, (8, 6), _MODAL),
    _gpu(
        "a10g",
        "NVIDIA A10G",
        23_028,
        (8, 6),
        "huggingface/text-generation-inference/issues/206",
        note="drivers before 510: 22,731 MiB",
    ),
    _gpu(
        "a30",
        "NVIDIA A30",
        24_094,
        (8, 0),
        "google/RB-Modulation/issues/5",
        note="the total of PyTorch's out-of-memory messages, 23.53 GiB",
    ),
    _gpu("l4", "NVIDIA L4", 23_034, (8, 9), _MODAL, "NVIDIA/TensorRT-LLM/issues/2398"),
    _gpu("t4", "Tesla T4", 15_360, (7, 5), _MODAL, "mbzuai-oryx/GeoPixel/issues/5", usable=14.58),
    _gpu("mi300x", "AMD Instinct MI300X", 196_592, None, "ROCm/legacy-rocm-build/issues/4750", note="rocm-smi"),
    _gpu(
        "mi250x",
        "AMD Instinct MI250X",
        65_520,
        None,
        "ROCm/legacy-rocm-build/issues/4563",
        note="one of its two dies, which is a GPU of its own to PyTorch; rocminfo",
    ),
    _gpu(
        "mi325x",
        "AMD Instinct MI325X",
        262_128,
        None,
        "vllm-project/vllm/issues/41962",
        note="the total of PyTorch's out-of-memory messages, 255.98 GiB",
    ),
    _gpu(
        "mi355x",
        "AMD Instinct MI355X",
        294_896,
        None,
        "SemiAnalysisAI/InferenceX/pull/2522",
        note="the total of PyTorch's out-of-memory messages, 287.98 GiB",
    ),
    _gpu(
        "rtx-5090",
        "NVIDIA GeForce RTX 5090",
        32_607,
        (12, 0),
        "noonghunna/club-3090/issues/1261",
        "Wan-Video/Wan2.1/issues/465",
        usable=31.37,
    ),
    _gpu(
        "rtx-4090",
        "NVIDIA GeForce RTX 4090",
        24_564,
        (8, 9),
        "RLinf/RLinf/issues/255",
        "ali-vilab/VGen/issues/104",
        "vllm-project/vllm/issues/42049",
        usable=23.52,
        note="usable: 23.64 GiB with older drivers",
    ),
    _gpu("rtx-4080", "NVIDIA GeForce RTX 4080", 16_376, (8, 9), _CAPTURES, "ultralytics/ultralytics/issues/20123"),
    _gpu(
        "rtx-3090",
        "NVIDIA GeForce RTX 3090",
        24_576,
        (8, 6),
        "NVlabs/sionna/blob/main/examples/Discover_Sionna.ipynb",
        "noonghunna/club-3090/issues/1128",
        "GaoLii/DSP/issues/10",
        usable=23.70,
        note="drivers before 510: 24,268 MiB",
    ),
    _gpu("rtx-3090-ti", "NVIDIA GeForce RTX 3090 Ti", 24_564, (8, 6), "noonghunna/club-3090/issues/353"),
    _gpu(
        "rtx-3060",
        "NVIDIA GeForce RTX 3060",
        12_288,
        (8, 6),
        "geerlingguy/raspberry-pi-pcie-devices/issues/790",
        note="12 GB",
    ),
    _gpu(
        "rtx-2080-ti",
        "NVIDIA GeForce RTX 2080 Ti",
        11_018,
        (7, 5),
        "JDAI-CV/image-captioning/issues/11",
        note="the total of PyTorch's out-of-memory messages, 10.76 GiB",
    ),
    _gpu(
        "rtx-pro-6000",
        "NVIDIA RTX PRO 6000 Blackwell",
        97_887,
        (12, 0),
        "ggml-org/llama.cpp/pull/23604",
        usable=97_247 / 1024,
    ),
    _gpu(
        "rtx-6000-ada",
        "NVIDIA RTX 6000 Ada Generation",
        46_068,
        (8, 9),
        "DINGYANB/MTVCrafter/issues/21",
        usable=44.43,
        note="with ECC; without 49,140 MiB",
    ),
    _gpu(
        "rtx-a6000",
        "NVIDIA RTX A6000",
        49_140,
        (8, 6),
        "NVlabs/sionna/blob/main/tutorials/phy/Discover_Sionna.ipynb",
        "ultralytics/ultralytics/issues/19084",
        usable=48_670 / 1024,
    ),
)

GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.name: gpu for gpu in _GPUS})
"""By name, data centres first."""

MULTIPROCESSORS: Mapping[str, int] = MappingProxyType(
    {
        "v100-16gb": 80, "v100-32gb": 80, "a100-40gb": 108, "a100-80gb": 108, "h100-80gb": 132, "h100-94gb": 132,
        "h100-96gb": 132, "h200": 132, "b200": 148, "gb200": 152,
        "b300": 148, "gb300": 152, "l40s": 142, "a10": 72, "a10g": 80, "l4": 58,
        "t4": 40, "mi300x": 304, "rtx-5090": 170, "rtx-4090": 128, "rtx-3090": 82, "rtx-pro-6000": 188, "rtx-a6000": 84,
        "gh200-144gb": 132, "a30": 56, "rtx-3090-ti": 84, "rtx-3060": 28, "rtx-2080-ti": 68,
        "h800": 132, "h20": 78, "a800-80gb": 108, "rtx-6000-ada": 142, "mi325x": 304, "mi355x": 256,
        "l40": 142, "l20": 92, "a40": 84, "rtx-4080": 76, "mi250x": 110, "h100-pcie": 114,
    }
)  # fmt: skip
"""Streaming multiprocessors, of SXM modules where a GPU has them, from NVIDIA's architecture white papers; AMD:
compute units, from the data sheet."""

_RESIDENT = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}


def runtime_of(name: str | None) -> tuple[str, str]:
    """What runs kernels on the GPU called ``name``, and the library of its collective operations."""
    found = GPUS.get(name or "")
    return ("HIP", "RCCL") if found is not None and found.compute_capability is None else ("CUDA", "NCCL")


def resident_threads(capability: tuple[int, int]) -> int:
    """Of a multiprocessor (CUDA C++ Programming Guide, table of compute capabilities)."""
    return _RESIDENT.get(capability, 2048)


def threads_of(gpu: str) -> int:
    """How many threads an NVIDIA GPU runs at a time; 0 where its multiprocessors are not known, and of AMD's, whose
    kernels go by other rules."""
    capability = GPUS[gpu].compute_capability
    return 0 if capability is None else MULTIPROCESSORS.get(gpu, 0) * resident_threads(capability)


SHARED = MappingProxyType(
    dict.fromkeys(("gb10", "dgx-spark", "thor", "agx-thor", "jetson-agx-orin"), "its memory is the host's, too")
)
"""GPUs without memory of their own, of which a job gets what the system leaves."""

NO_GPU = pattern(
    r"(?i)(?:tpu|gaudi|hpu|habana|trainium|trn[0-9]|inferentia|ascend|910b|npu|apple|mps$"
    r"|m[1-5](?:$|[- ](?:pro|max|ultra)))"
)
"""What trains and has no caching allocator of CUDA or HIP, by how its name begins."""

ALSO_CALLED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "v100-16gb": ("v100", "v100-pcie-16gb"), "v100-32gb": ("v100", "v100-pcie-32gb"),
        "a100-40gb": ("a100", "a100-sxm", "a100-sxm-40gb", "a100-pcie", "a100-pcie-40gb", "a100-40gb-pcie"),
        "a100-80gb": ("a100", "a100-sxm", "a100-sxm-80gb", "a100-pcie", "a100-pcie-80gb", "a100-80gb-pcie"),
        "h100-80gb": ("h100", "h100-sxm", "h100-sxm5", "h100-sxm-80gb", "h100-sxm5-80gb", "h100-80gb-sxm5"),
        "h100-pcie": ("h100-pcie-80gb", "h100-80gb-pcie"),
        "h100-94gb": ("h100-nvl-94gb",), "h100-96gb": ("gh200", "gh200-96gb", "gh200-480gb"),
        "gh200-144gb": ("gh200", "gh200-144g", "gh200-141gb"), "a30": ("a30-24gb",),
        "rtx-3090-ti": ("3090-ti", "rtx-3090-ti-24gb"), "rtx-3060": ("3060", "rtx-3060-12gb", "3060-12gb"),
        "rtx-2080-ti": ("2080-ti", "rtx-2080-ti-11gb"), "h200": ("h200-141gb", "h200-sxm"),
        "b200": ("b200-180gb", "b200-192gb"), "gb200": ("gb200-192gb", "gb200-nvl72", "gb200-nvl36", "gb200-nvl4"),
        "b300": ("b300-288gb",), "gb300": ("gb300-288gb", "gb300-nvl72"), "l40s": ("l40s-48gb",), "a10": ("a10-24gb",),
        "a10g": ("a10g-24gb",), "l4": ("l4-24gb",), "t4": ("t4-16gb",), "mi300x": ("mi300x-192gb",),
        "h800": ("h800-80gb", "h800-sxm"), "h20": ("h20-96gb",), "a800-80gb": ("a800", "a800-sxm4-80gb"),
        "mi325x": ("mi325x-256gb",), "mi355x": ("mi355x-288gb",), "rtx-6000-ada": ("rtx6000-ada", "6000-ada"),
        "rtx-5090": ("5090", "rtx-5090-32gb"), "rtx-4090": ("4090", "rtx-4090-24gb"),
        "rtx-3090": ("3090", "rtx-3090-24gb"), "l40": ("l40-48gb",), "l20": ("l20-48gb",), "a40": ("a40-48gb",),
        "mi250x": ("mi250",),
        "rtx-4080": ("4080", "4080-super", "rtx-4080-super", "rtx-4080-16gb"),
        "rtx-pro-6000": ("rtx-6000-pro",), "rtx-a6000": ("a6000", "a6000-48gb"),
    }
)  # fmt: skip
"""Other names that people write, without the maker's; one that two GPUs share asks which. Cards of an SXM module's chip
and memory, as A100's and V100's, go by its name; H100's card has fewer multiprocessors, and is another GPU."""


def of_series(name: str) -> tuple[str, ...]:
    """Those of ``GPUS`` that begin with the letters and the number of ``name``, as ``h100 pcie`` does."""
    series = _SERIES.match(name.lower())
    return tuple(gpu for gpu in GPUS if series is not None and gpu.startswith(series[0]))


def alike(name: str) -> tuple[str, ...]:
    """Those of ``GPUS`` that ``name``, which is none of them, may be meant for: of its series, or with its number."""
    numbers, once = {*_NUMBER.findall(name)}, _TWICE.sub(r"\1", name)
    numbered = tuple(gpu for gpu in GPUS if not numbers or numbers & {*_NUMBER.findall(gpu)})
    return of_series(name) or numbered or of_series(once)


_NUMBER = pattern(r"[0-9]+")
_TWICE = pattern(r"([0-9])\1$")
_SERIES = pattern(r"[a-z]+[0-9]+")
