"""What linear layers of Transformer Engine make of their operands: nothing in 16 bits, quantised copies in 8 or 4.

A copy has up to two orientations. Products forward and for the input's gradient read rows, the product for the
weight's gradient reads columns; where each has scales of its own, or the GPU multiplies transposed operands only
(Hopper), that is two tensors of the same elements. Shapes of data and scales are those of
``pytorch/csrc/quantizer.cpp`` (``create_tensor``, ``get_scale_shape``); which orientation lives until when is in
``module/linear.py``, ``layernorm_linear.py`` and ``distributed.py`` (``_all_gather_fp8`` and its like).

Shapes: m rows (tokens, or a weight's outputs), k features.
"""

from __future__ import annotations

from math import prod
from typing import Literal

from ...tape.events import Category
from ...values import NamedTuple, dataclass
from ..autograd import Recorder, Shape, Tensor
from ..work import Stream

Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"]

COMMUNICATION, WORKSPACES = Category.COMMUNICATION_BUFFERS, Category.WORKSPACES

BYTE = "uint8"
BLOCK, MX, NV = 128, 32, 16
"""Elements that share a scale: in one dimension or (weights, block scaling) in two."""


class Part(NamedTuple):
    """A tensor of a copy."""

    name: str
    shape: Shape
    dtype: str


class Parts(NamedTuple):
    """The tensors of a copy: of rows, of columns, and of both."""

    rows: tuple[Part, ...]
    columns: tuple[Part, ...]
    shared: tuple[Part, ...] = ()


def up(n: int, multiple: int) -> int:
    """``n`` rounded up."""
    return -(-n // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Low:
    """A quantisation of linear layers' operands."""

    recipe: Recipe
    turns: bool
    """Hopper, Ada: products take rows of both operands only, so that a tensor with one scale is kept transposed, too
    (``nvte_is_non_tn_fp8_gemm_supported``)."""
    te: tuple[int, int]
    parameters: bool = False
    """Weights are stored so, and in no other way (``fp8_model_init``)."""
    history: int = 1
    """Delayed scaling: amaxes that are kept of each tensor."""

    @property
    def per_tensor(self) -> bool:
        """One scale of a whole tensor."""
        return self.recipe in ("delayed", "tensorwise")

    @property
    def element(self) -> float:
        """Bytes of an operand's element."""
        return 0.5 if self.recipe == "nvfp4" else 1.0

    @property
    def multiple(self) -> int:
        """Rows of a grouped product's members are multiples of it (``Fp8Padding``)."""
        return {"mxfp8": 32, "nvfp4": 128}.get(self.recipe, 16)

    @property
    def scales_prepared(self) -> bool:
        """Scales are quantised into the order in which products want them (``optimize_for_gemm``),"""
        return self.te >= (2, 12)

    @property
    def state(self) -> tuple[Part, ...]:
        """What delayed scaling keeps of one linear layer's tensors, three forward and two backward
        (``DelayedScalingRecipeState``)."""
        if self.recipe != "delayed":
            return ()
        return tuple(
            part
            for count in (3, 2)
            for part in (Part("scale", (count,), "fp32"), Part("amax_history", (self.history, count), "fp32"))
        )

    @property
    def weight_scales_prepared(self) -> bool:
        """and those of weights, too (``_enable_weight_preswizzle``)."""
        return self.recipe == "mxfp8" and self.te >= (2, 18) and not self.parameters

    @property
    def transposes_in_vain(self) -> bool:
        """``make_empty`` of a tensor with one scale gives room for the transposed one, which nothing reads where
        products take operands as they are."""
        return self.per_tensor and not self.turns and self.te < (2, 16)

    @property
    def frees_gradient(self) -> bool:
        """``layernorm_linear.py`` ends the output's quantised gradient before the norm's backward where ranks share
        the input."""
        return self.te >= (2, 18)

    def parts(self, shape: Shape, *, weight: bool = False) -> Parts:
        """Both orientations of a copy of ``shape``, (…, k)."""
        m, k = prod(shape[:-1]), shape[-1]
        if self.per_tensor:
            data, turned = Part("fp8", (m, k), BYTE), Part("fp8_transposed", (k, m), BYTE)
            return Parts((data,), (turned,) if self.turns else (data,), (Part("scale_inverse", (1,), "fp32"),))
        if self.recipe == "blockwise":
            if weight:
                rows: Shape = (-(-m // BLOCK), up(-(-k // BLOCK), 4))
                columns: Shape = (-(-k // BLOCK), up(-(-m // BLOCK), 4))
            else:
                rows, columns = (-(-k // BLOCK), up(m, 4)), (-(-m // BLOCK), up(k, 4))
            return Parts(*self._two((m, k), (k, m), rows, columns, "fp32"))
        if self.recipe == "mxfp8":
            return Parts(*self._two((m, k), (m, k), (up(m, 128), up(k // MX, 4)), (up(m // MX, 4), up(k, 128)), BYTE))
        rows, columns = (up(m, 128), up(-(-k // NV), 4)), (up(k, 128), up(-(-m // NV), 4))
        first, second = self._two((m, k // 2), (k, m // 2), rows, columns, BYTE)
        amax = Part("amax", (1,), "fp32")
        return Parts((*first, amax), (*second, amax))

    @staticmethod
    def _two(
        data: Shape, turned: Shape, rows: Shape, columns: Shape, scale: str
    ) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
        return (
            (Part("rows", data, BYTE), Part("row_scales", rows, scale)),
            (Part("columns", turned, BYTE), Part("column_scales", columns, scale)),
        )

    def kept_of_weight(self, shape: Shape) -> tuple[Part, ...]:
        """A weight's copies, in both orientations: the cache of a module (``_fp8_workspaces``), which the first
        micro-batch of a step writes again, or the weight itself."""
        parts = self.parts(shape, weight=True)
        return tuple(dict.fromkeys((*parts.rows, *parts.columns, *parts.shared)))

    def beside_rows(self, shape: Shape) -> tuple[Part, ...]:
        """What a weight that is stored so has beside the data of its rows, which a buffer holds: scales. MXFP8's
        columns are no copy of its rows: a buffer holds them, too (``two_buffers``)."""
        parts = self.parts(shape, weight=True)
        return (*parts.rows[1:], *(parts.columns[1:] if self.two_buffers else ()), *parts.shared)

    def made_of_rows(self, shape: Shape) -> tuple[Part, ...]:
        """What is made of these rows where a product reads columns (``post_all_gather_processing``)."""
        parts = self.parts(shape, weight=True)
        return () if self.two_buffers else tuple(part for part in parts.columns if part not in parts.rows)

    def amaxes(self, shape: Shape) -> int:
        """Bytes of what ranks find largest in a weight that all of them have shards of: in fp32 for each scale, or
        block of 16 x 16 of NVFP4; those of both orientations of MXFP8 in 16 bits (``tensor/utils.py``,
        ``_cast_master_weights_to_fp8_mxfp8_scaling`` and its like)."""
        if self.recipe == "nvfp4":
            return 4 * prod(-(-size // NV) for size in shape)
        parts = self.parts(shape, weight=True)
        scales = sum(prod(part.shape) for part in (*parts.rows[1:], *parts.columns[1:]))
        return 4 if self.per_tensor else 2 * scales if self.two_buffers else 4 * prod(parts.rows[1].shape)

    @property
    def two_buffers(self) -> bool:
        """Rows and columns are quantised apart, with the same shape (``fp8_need_transpose_data``)."""
        return self.recipe == "mxfp8"

    def quantised(
        self,
        r: Recorder,
        shape: Shape,
        name: str,
        *,
        rows: bool,
        columns: bool,
        category: Category = Category.TEMPORARIES,
        scales: bool = True,
    ) -> Copy:
        """Allocates a copy. ``scales``: with a scale of its own, where a tensor has one."""
        parts, copy = self.parts(shape), Copy()
        made = {}
        for wanted, group, place in ((rows, parts.rows, copy.rows), (columns, parts.columns, copy.columns)):
            for part in group if wanted else ():
                if part not in made:
                    made[part] = r.empty(part.shape, part.dtype, f"{name}_{part.name}", category)
                place.append(made[part])
        copy.shared += [r.empty(part.shape, part.dtype, f"{name}_{part.name}") for part in parts.shared if scales]
        return copy

    def scratch(self, r: Recorder, name: str, *operands: tuple[Shape, bool, bool]) -> list[Tensor]:
        """Scales in the order that a product wants, while it runs, of operands with others: each a shape, whether
        its columns are read, and whether it is a weight (``swizzle_scales_for_gemm``). Block scaling has other scales
        on Blackwell, made likewise (``convert_block_scaling_to_mxfp8_tensor``)."""
        if self.per_tensor or (self.recipe == "blockwise" and self.turns):
            return []
        found = []
        for shape, columns, weight in operands:
            if self.recipe == "blockwise":
                m, k = prod(shape[:-1]), shape[-1]
                first, last = (k, m) if columns else (m, k)
                size: Shape = (up(first, 128), up(-(-last // MX), 4))
            else:
                parts = self.parts(shape, weight=weight)
                size = (parts.columns if columns else parts.rows)[1].shape
            found.append(r.empty(size, BYTE, f"{name}_scales_ordered", WORKSPACES))
        return found

    def work(self, shape: Shape, copies: int = 2, *, normed: bool = False) -> Stream:
        """A cast of ``shape`` from 16 bits; one scale of a whole tensor is found in a pass before it, but that of
        delayed scaling, which is known, and that of what is ``normed``, which the norm's kernel finds
        (``normalization.cpp``, ``FUSED_NORM_AMAX_FP8``). NVFP4 has one, too, beside those of blocks: of the Hadamard
        transform, so that no kernel before finds it (``NVFP4Quantizer.quantize_impl``:
        ``nvte_hadamard_transform_amax``, of a weight ``nvte_compute_amax``; then both orientations in one kernel,
        ``nvte_quantize_with_hadamard_transform``)."""
        elements = prod(shape)
        looks = self.recipe == "nvfp4" or (self.recipe == "tensorwise" and not normed)
        return Stream(elements * ((4.0 if looks else 2.0) + copies * self.element), 2 if looks else 1)


@dataclass(frozen=True, slots=True)
class LowAttention:
    """In what attention multiplies."""

    recipe: Recipe
    backward: bool = True
    """Its gradients, too, are in 8 bits (``NVTE_FP8_DPA_BWD``)."""
    history: int = 1
    """Amaxes that are kept of each tensor, where it scales by those of earlier steps."""


class Copy:
    """A quantised copy while it lives; dropped tensors end."""

    __slots__ = ("columns", "rows", "shared")

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self.columns: list[Tensor] = []
        self.shared: list[Tensor] = []

    def clear(self) -> None:
        self.rows.clear()
        self.columns.clear()
        self.shared.clear()
