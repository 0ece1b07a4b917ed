"""How fast GPUs are on paper: figures of data sheets and white papers, each with its address.

Rates per GPU: FLOP/s without sparsity, bytes/s in one direction of a link, in full duplex where it has one. Numbers
of multiprocessors and compute capabilities are in ``memplan.device.gpus``. ``None`` where nobody has
published a figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...values import NamedTuple, dataclass

TERA, GIGA = 1e12, 1e9


class Figure(NamedTuple):
    """A published number in base units, and where it is."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Speed:
    """One model of GPU, as its maker states it."""

    matrix: Figure | None
    """Tensor cores: fp16 or bf16 in, fp32 accumulated."""
    tf32: Figure | None
    fp32: Figure | None
    """Ordinary cores; AMD: matrix cores."""
    memory: Figure | None
    link: Figure | None
    """NVLink, or Infinity Fabric: all links of a GPU together."""
    link_gpus: int
    """GPUs that the links join; 1 where there are none."""
    host: Figure | None
    """To the host: PCIe, or NVLink-C2C."""
    network: Figure | None
    """Network adapters of the system named in ``system``, for each of its GPUs: an assumption that
    ``hardware.network`` of a plan overrides."""
    system: str | None
    bf16: bool = True
    """Tensor cores take bf16."""


_V100 = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_DGX1 = "https://images.nvidia.com/content/technologies/deep-learning/pdf/Datasheet-DGX1.pdf"
_A100 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_AMPERE = "https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf"
_DGX_A100 = "https://docs.nvidia.com/dgx/dgxa100-user-guide/introduction-to-dgxa100.html"
_HOPPER = "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper"
_H100 = "https://www.nvidia.com/en-us/data-center/h100/"
_DGX_H100 = "https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html"
_GH200 = "https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip"
_H800 = "https://arxiv.org/abs/2505.09343, section 4.1"
_H200 = "https://www.nvidia.com/en-us/data-center/h200/"
_BLACKWELL = "https://resources.nvidia.com/en-us-blackwell-architecture/datasheet"
_DGX_B200 = "https://resources.nvidia.com/en-us-dgx-systems/dgx-b200-datasheet"
_GB200 = "https://www.nvidia.com/en-us/data-center/gb200-nvl72/"
_ULTRA = "https://github.com/ai-dynamo/aiconfigurator/blob/main/aic-core/src/aiconfigurator_core/systems"
_B300, _GB300 = (f"{_ULTRA}/{name}.yaml, after NVIDIA's Blackwell Ultra data sheet" for name in ("b300_sxm", "gb300"))
_L40S = "https://www.nvidia.com/en-us/data-center/l40s/"
_L40 = "https://www.nvidia.com/en-us/data-center/l40/"
_A30 = "https://www.nvidia.com/en-us/data-center/products/a30-gpu/"
_A40 = "https://www.nvidia.com/en-us/data-center/a40/"
_A10 = "https://www.nvidia.com/en-us/data-center/products/a10-gpu/"
_A10G = "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf"
_L4 = "https://www.nvidia.com/en-us/data-center/l4/"
_T4 = "https://www.nvidia.com/en-us/data-center/tesla-t4/"
_MI300X = (
    "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf"
)
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_GA102 = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf"
_A800 = "https://tweakers.net/nieuws/203182/nvidia-introduceert-a800-gpu-voor-china-die-niet-onder-exportrestricties-vs-valt.html"
_H20 = (
    "https://www.tomshardware.com/pc-components/gpus/new-nvidia-ai-gpus-designed-to-get-around-us-export-bans-come-to-"
    "china-h20-l20-and-l2-to-fill-void-left-by-restricted-models"
)
_MI325X = "https://www.amd.com/en/products/accelerators/instinct/mi300/mi325x.html"
_MI355X = "https://www.amd.com/en/products/accelerators/instinct/mi350/mi355x.html"
_TURING = (
    "https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/technologies/turing-architecture/"
    "NVIDIA-Turing-Architecture-Whitepaper.pdf"
)
_ADA_PRO = (
    "https://images.nvidia.com/aem-dam/en-zz/Solutions/technologies/"
    "NVIDIA-ADA-GPU-PROVIZ-Architecture-Whitepaper_1.1.pdf"
)
_BLACKWELL_PRO = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/design-visualization/quadro-product-literature/"
    "NVIDIA-RTX-Blackwell-PRO-GPU-Architecture-v1.0.pdf"
)
_RTX_BLACKWELL = (
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
)


def _speed(
    source: str,
    matrix: float | None,
    tf32: float | None,
    fp32: float | None,
    memory: float | None,
    host: float | None,
    *,
    link: float | None = None,
    link_gpus: int = 1,
    link_source: str | None = None,
    network: tuple[float, str, str] | None = None,
    bf16: bool = True,
) -> Speed:
    """Compute in TFLOP/s, the rest in GB/s; ``network`` with its system and that system's source."""

    def figure(value: float | None, unit: float) -> Figure | None:
        return None if value is None else Figure(value * unit, source)

    return Speed(
        figure(matrix, TERA),
        figure(tf32, TERA),
        figure(fp32, TERA),
        figure(memory, GIGA),
        None if link is None else Figure(link * GIGA, link_source or source),
        link_gpus,
        figure(host, GIGA),
        None if network is None else Figure(network[0] * GIGA, network[2]),
        None if network is None else network[1],
        bf16,
    )


_DGX_1 = (6.25, "DGX-1: 4 x 100 Gb/s InfiniBand for 8 GPUs", _DGX1)
_DGX_A = (25.0, "DGX A100: 8 x 200 Gb/s InfiniBand for 8 GPUs", _DGX_A100)
_DGX_H = (50.0, "DGX H100 and H200: 8 x 400 Gb/s InfiniBand for 8 GPUs", _DGX_H100)
_H800_NODE = (50.0, "DeepSeek's nodes: 8 x 400 Gb/s InfiniBand for 8 H800", _H800)
_TETON = (
    50.0,
    "Grand Teton: 400 Gb/s for each H100 of 96 GB",
    "https://github.com/pytorch/torchtitan/blob/main/docs/performance.md",
)
_DGX_B = (50.0, "DGX B200: 8 x 400 Gb/s InfiniBand for 8 GPUs", _DGX_B200)
_NVL72 = (50.0, "GB200 NVL72: 4 x 400 Gb/s InfiniBand for the 4 GPUs of a tray", _GB200)
_DGX_B300 = (100.0, "DGX B300: 800 Gb/s for each GPU", _B300)
_NVL72_300 = (100.0, "GB300 NVL72: 800 Gb/s InfiniBand for each GPU", _GB300)

SPEEDS: Mapping[str, Speed] = MappingProxyType(
    {
        "v100-16gb": _speed(_V100, 125, None, 15.7, 900, 16, link=150, link_gpus=8, network=_DGX_1, bf16=False),
        "v100-32gb": _speed(_V100, 125, None, 15.7, 900, 16, link=150, link_gpus=8, network=_DGX_1, bf16=False),
        "a100-40gb": _speed(_AMPERE, 312, 156, 19.5, 1555, 32, link=300, link_gpus=8, network=_DGX_A),
        "a100-80gb": _speed(_A100, 312, 156, 19.5, 2039, 32, link=300, link_gpus=8, network=_DGX_A),
        "a800-80gb": _speed(_A100, 312, 156, 19.5, 2039, 32, link=200, link_gpus=8, link_source=_A800),
        "h100-80gb": _speed(_HOPPER, 989.4, 494.7, 66.9, 3350, 64, link=450, link_gpus=8, network=_DGX_H),
        "h800": _speed(
            _HOPPER, 989.4, 494.7, 66.9, 3350, 64, link=200, link_gpus=8, link_source=_H800, network=_H800_NODE
        ),
        "h100-pcie": _speed(_HOPPER, 756, 378, 51, 2000, 64, link=300, link_gpus=2),
        "h100-94gb": _speed(_H100, 835.5, 417.5, 60, 3900, 64, link=300, link_gpus=2),
        "h100-96gb": _speed(_GH200, 989.4, 494.7, 67, 4000, 450, link=450, link_gpus=8, network=_TETON),
        "gh200-144gb": _speed(_GH200, 989.4, 494.7, 67, 4900, 450, link=450, link_gpus=8, network=_TETON),
        "h200": _speed(_H200, 989.4, 494.7, 67, 4800, 64, link=450, link_gpus=8, network=_DGX_H),
        "h20": _speed(_H20, 148, 74, 44, 4000, 64, link=450, link_gpus=8),
        "b200": _speed(_BLACKWELL, 2250, 1100, 75, 7700, 64, link=900, link_gpus=8, network=_DGX_B),
        "gb200": _speed(_GB200, 2500, 1250, 80, 8000, 225, link=900, link_gpus=72, network=_NVL72),
        "b300": _speed(_B300, 2250, 1125, 75, 7750, 128, link=900, link_gpus=8, network=_DGX_B300),
        "gb300": _speed(_GB300, 2500, 1250, 80, 8000, 225, link=900, link_gpus=72, network=_NVL72_300),
        "l40s": _speed(_L40S, 362.05, 183, 91.6, 864, 32),
        "l40": _speed(_L40, 181.05, 90.5, 90.5, 864, 32),
        "l20": _speed(_H20, 119.5, 59.8, 59.8, 864, 32),
        "a30": _speed(_A30, 165, 82, 10.3, 933, 32, link=100, link_gpus=2),
        "a40": _speed(_A40, 149.7, 74.8, 37.4, 696, 32, link=56.25, link_gpus=2),
        "a10": _speed(_A10, 125, 62.5, 31.2, 600, 32),
        "a10g": _speed(_A10G, 70, 35, 35, 600, 32),
        "l4": _speed(_L4, 121, 60, 30.3, 300, 32),
        "t4": _speed(_T4, 65, None, 8.1, 320, 16, bf16=False),
        "mi300x": _speed(_MI300X, 1307.4, 653.7, 163.4, 5300, 64, link=448, link_gpus=8),
        "mi325x": _speed(_MI325X, 1307.4, 653.7, 163.4, 6000, 64, link=448, link_gpus=8),
        "mi355x": _speed(_MI355X, 2516.6, None, 157.3, 8000, 64, link=537.6, link_gpus=8),
        "rtx-5090": _speed(_RTX_BLACKWELL, 209.5, 104.8, 104.8, 1792, 64),
        "rtx-4090": _speed(_ADA, 165.2, 82.6, 82.6, 1008, 32),
        "rtx-4080": _speed(_ADA, 97.5, 48.7, 48.7, 716.8, 32),
        "rtx-3090-ti": _speed(_ADA, 80, 40, 40, 1008, 32, link=56.25, link_gpus=2, link_source=_GA102),
        "rtx-3090": _speed(_GA102, 71, 35.6, 35.6, 936, 32, link=56.25, link_gpus=2),
        "rtx-2080-ti": _speed(_TURING, 56.9, None, 14.2, 616, 16, link=50, link_gpus=2, bf16=False),
        "rtx-pro-6000": _speed(_BLACKWELL_PRO, 503.8, 251.9, 126, 1792, 64),
        "rtx-6000-ada": _speed(_ADA_PRO, 364.2, 182.1, 91.1, 960, 32),
        "rtx-a6000": _speed(_GA102, 154.8, 77.4, 38.7, 768, 32, link=56.25, link_gpus=2),
    }
)
"""By the names of ``memplan.device.gpus``; GPUs that are not here have no published figures that were found."""

GRACES = frozenset({"gh200-144gb", "gb200", "gb300"})
"""GPUs whose host is a Grace."""

EIGHT, FOUR = 1.0, 0.5
"""Bytes of an element of products in 8 and 4 bits."""


def _low(source: str, eight: float, four: float | None = None) -> Mapping[float, Figure]:
    """Tensor cores in TFLOP/s: fp8 in, fp32 accumulated, and fp4 with a scale for each block."""
    found = {EIGHT: Figure(eight * TERA, source)}
    return found if four is None else {**found, FOUR: Figure(four * TERA, source)}


LOW_PRECISION: Mapping[str, Mapping[float, Figure]] = MappingProxyType(
    {
        "h100-80gb": _low(_HOPPER, 1978.9),
        "h800": _low(_HOPPER, 1978.9),
        "h100-94gb": _low(_H100, 1671),
        "h100-96gb": _low(_GH200, 1979),
        "h200": _low(_H200, 1979),
        "b200": _low(_BLACKWELL, 4500, 9000),
        "gb200": _low(_GB200, 5000, 10000),
        "b300": _low(_B300, 4500, 14000),
        "gb300": _low(_GB300, 5000, 15000),
        "l40s": _low(_L40S, 733),
        "l4": _low(_L4, 242.5),
        "rtx-4090": _low(_ADA, 330.3),
        "rtx-5090": _low(_RTX_BLACKWELL, 419, 1676),
        "gh200-144gb": _low(_GH200, 1979),
        "h20": _low(_H20, 296),
        "l20": _low(_H20, 239),
        "rtx-4080": _low(_ADA, 194.9),
        "rtx-pro-6000": _low(_BLACKWELL_PRO, 1007.6, 2015),
        "rtx-6000-ada": _low(_ADA_PRO, 728.5),
        "mi300x": _low(_MI300X, 2614.9),
        "mi325x": _low(_MI325X, 2614.9),
        "mi355x": _low(_MI355X, 5033.2, 10066.3),
    }
)
"""Without sparsity, by the bytes of an operand's element; sheets that state it with sparsity alone say twice that."""
