"""Linear layers of a model that is tuned in part: frozen weights, peft's LoRA, bitsandbytes' 4-bit weights.

peft 0.21: ``tuners/lora/layer.py`` (``Linear.forward``, of ``Conv1D`` too), ``tuners/lora/bnb.py``
(``Linear4bit.forward``). bitsandbytes 0.50: ``nn/modules.py`` (``Linear4bit.forward``), ``autograd/_functions.py``
(``MatMul4Bit``), ``backends/cuda/ops.py`` (``_dequant_linear_fallback``), ``functional.py`` (``dequantize_4bit``).
Shapes: x (…, k), weight (n, k), rank r.

peft's DoRA: a weight's direction is tuned by LoRA, and the norms of its rows are parameters of their own.

peft 0.21: ``tuners/lora/variants.py`` (``DoraLinearVariant.forward``), ``tuners/lora/dora.py`` (``DoraLinearLayer``),
``utils/integrations.py`` (``dequantize_module_weight``). The product of both matrices is that of a unit matrix (k, k)
by the two adapters' layers, whose graph holds it until the layer's forward ends; norms are of the whole weight, in the
adapters' dtype. Shapes: x (…, k), weight (n, k), rank r.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ..tape.events import Category, rounded
from ..values import NamedTuple, dataclass
from . import ops, work
from .autograd import Gradients, Recorder, Shape, Tensor, Unsummed, incoming, size_of
from .fused_lora import Functions, projected


def low_rank(r: Recorder, x: Tensor, layer: Layer, adapters: Adapters, of: str = "") -> Tensor:
    """``lora_A(x)``."""
    down = r.parameter(f"{layer.name}.lora_A.weight", (adapters.rank, x.shape[-1]), x.dtype)
    return ops.linear(r, x, down, name=f"{layer.name}_lora_a{of}")


def of_low_rank(r: Recorder, low: Tensor, layer: Layer, adapters: Adapters, of: str = "") -> Tensor:
    """``lora_B(low)``."""
    up = r.parameter(f"{layer.name}.lora_B.weight", (layer.n, adapters.rank), low.dtype)
    return ops.linear(r, low, up, name=f"{layer.name}_lora_b{of}")


def decomposed(r: Recorder, x: Tensor, result: Tensor, layer: Layer, adapters: Adapters) -> Tensor:
    """What is added to the base layer's ``result``. With dropout that is made again, of what dropout left of x."""
    name, stored = layer.name, result.dtype
    x = ops.dropout(r, x, adapters.dropout, f"{name}_lora_dropout")
    product, weight = _product_of_matrices(r, x, layer, adapters), _weight(r, x, layer, stored)
    norm = _norm(r, weight, product, name)
    magnitude = r.parameter(f"{name}.lora_magnitude_vector.weight", (layer.n,), x.dtype)
    scale = ops.elementwise(r, f"{name}_magnitude_scale", (magnitude, norm), (norm,)).view(1, layer.n)
    low = of_low_rank(r, low_rank(r, x, layer, adapters), layer, adapters)
    low = ops.copied_gradient(r, low, f"{name}_lora_b") if layer.strided else low
    if adapters.dropout:
        result = ops.linear(r, x, weight, name=f"{name}_again")
        result = ops.copied_gradient(r, result, f"{name}_again") if layer.strided else result
    elif layer.bias:
        bias = r.parameter(f"{name}.bias", (layer.n,), stored)
        result = ops.add(r, result, bias, f"{name}_without_bias")

    def of_base() -> Tensor:
        return ops.multiply(r, ops.add_constant(r, scale, f"{name}_magnitude_less_one"), result, f"{name}_base_scaled")

    def of_adapter() -> Tensor:
        return ops.scale(r, ops.multiply(r, scale, low, f"{name}_lora_by_magnitude"), f"{name}_lora_scaled")

    total = ops.add(r, of_base(), of_adapter(), f"{name}_dora")
    del product, weight, norm  # in variables until the function returns
    return total


def _product_of_matrices(r: Recorder, x: Tensor, layer: Layer, adapters: Adapters) -> Tensor:
    """``get_lora_weight``: (k, n), in the dtype of x."""
    k = x.shape[-1]
    unit = r.empty((k, k), adapters.dtype, f"{layer.name}_unit_matrix")
    product = of_low_rank(r, low_rank(r, unit, layer, adapters, "_of_unit"), layer, adapters, "_of_unit")
    del unit
    return ops.cast(r, product, x.dtype, f"{layer.name}_lora_weight")


def _weight(r: Recorder, x: Tensor, layer: Layer, stored: str) -> Tensor:
    """The base layer's, ``stored`` as it is or dequantised, in the dtype of x."""
    n, k, name = layer.n, x.shape[-1], layer.name
    packed = r.tuning.four_bit if r.tuning is not None else None
    if packed is not None:
        whole = packed.dequantised(r, n, k, f"{name}_dora")
    else:
        whole = r.parameter(f"{name}.weight", (n, k), stored)
    return ops.cast(r, whole, x.dtype, f"{name}_dora_weight")


def _norm(r: Recorder, weight: Tensor, product: Tensor, name: str) -> Tensor:
    """``get_weight_norm``: (n,), without a graph."""
    n, k = weight.shape
    return r.in_turn(
        ((k, n), product.dtype, f"{name}_lora_weight_scaled"),
        ((n, k), weight.dtype, f"{name}_updated_weight"),
        ((n,), weight.dtype, f"{name}_weight_norm"),
    )


BLOCK = 64
"""Elements of a 4-bit weight under one scale (``Params4bit``, ``blocksize``)."""

NESTED_BLOCK = 256
"""Scales under one scale of their own, with double quantisation (``quantize_4bit``)."""

ADAPTERS = (
    *(".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector.weight"),
    *(".lora_embedding_A", ".lora_embedding_B"),
    *(".adapter.linear_in.weight", ".adapter.linear_out.weight", ".adapter.weight_magnitude"),
)
"""What the names of adapters' parameters end with: peft's, and Megatron-Bridge's."""

CODE, NESTED_CODE = 16, 256
"""Entries of the tables of a 4-bit weight and of its 8-bit scales, in fp32."""


@dataclass(frozen=True, slots=True)
class Packed:
    """How a library keeps a weight (n, k) in 4 bits, and computes with it."""

    dtype: str
    """Of the whole weight."""

    def packed(self, shape: Shape) -> tuple[int, ...]:
        """Bytes of each tensor that FSDP1 can shard: the numbers, and where they are tensors, too, their zeros."""
        raise NotImplementedError

    def packed_bytes(self, shape: Shape) -> int:
        """Of all of them."""
        return sum(map(rounded, self.packed(shape)))

    def beside(self, shape: Shape) -> Mapping[str, int]:
        """Bytes, rounded, of the tensors that are kept whole beside it."""
        raise NotImplementedError

    @property
    def sent(self) -> int:
        """Buffers of a weight, which FSDP1 sends from rank 0 besides its parameters."""
        return 0

    def dequantised(self, r: Recorder, n: int, k: int, name: str) -> Tensor:
        """The whole weight."""
        raise NotImplementedError

    def linear(self, r: Recorder, x: Tensor, layer: Layer) -> Tensor:
        """The layer by itself,"""
        raise NotImplementedError

    def adapted(self, r: Recorder, x: Tensor, layer: Layer, adapters: Adapters) -> Tensor:
        """and wrapped in an adapter."""
        raise NotImplementedError

    @property
    def functions(self) -> Functions:
        """Unsloth's."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class FourBit(Packed):
    """bitsandbytes' way."""

    double: bool
    """Scales in 8 bits, with scales of their own."""
    copied: bool = True
    """Every weight has a copy of the table of 8-bit values of its scales."""
    issue: work.Issue = work.FOUR_BITS
    """Of the kernel that dequantises an element."""

    def packed(self, shape: Shape) -> tuple[int, ...]:
        return (-(-prod(shape) // 2),)

    def beside(self, shape: Shape) -> Mapping[str, int]:
        """``quant_state``: scales and the table of 4-bit values; of scales in 8 bits their scales, a table and an
        offset, too."""
        blocks = self.blocks(prod(shape))
        kept: dict[str, tuple[Shape, str]] = {"code": ((CODE,), "fp32")}
        kept["absmax"] = (blocks,), "uint8" if self.double else "fp32"
        if self.double:
            kept |= {"nested_absmax": ((-(-blocks // NESTED_BLOCK),), "fp32"), "offset": ((), "fp32")}
        if self.double and self.copied:
            kept["nested_code"] = ((NESTED_CODE,), "fp32")
        return {name: rounded(size_of(*like)) for name, like in kept.items()}

    def blocks(self, elements: int) -> int:
        return -(-elements // BLOCK)

    def dequantised(self, r: Recorder, n: int, k: int, name: str) -> Tensor:
        """``dequantize_4bit``: scales are shifted in place."""
        scales = r.empty((self.blocks(n * k),), "fp32", f"{name}_scales") if self.double else None
        weight = r.empty((n, k), self.dtype, f"{name}_dequantised")
        del scales
        return weight

    @property
    def functions(self) -> Functions:
        return Functions(self.fast_dequantised, overwrites=True, ahead=False, issue=self.issue)

    def fast_dequantised(self, r: Recorder, n: int, k: int, name: str) -> Tensor:
        """``fast_dequantize``."""
        weight = r.empty((n, k), self.dtype, f"{name}_dequantised")
        r.empty((self.blocks(n * k),), "fp32", f"{name}_scales")
        return weight

    def linear(self, r: Recorder, x: Tensor, layer: Layer) -> Tensor:
        return linear_four_bit(r, x, layer, self)

    def adapted(self, r: Recorder, x: Tensor, layer: Layer, adapters: Adapters) -> Tensor:
        return lora_four_bit(r, x, layer, adapters)


class Part(NamedTuple):
    """Part of a linear layer's outputs that has an adapter of its own: so many heads of a size each."""

    name: str
    heads: int
    size: int

    @property
    def outputs(self) -> int:
        return self.heads * self.size


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA on some linear layers."""

    rank: int
    targets: frozenset[str]
    """Linear layers as the recipes name them."""
    dropout: float
    dtype: str
    dora: bool = False
    """Weights are decomposed into magnitude and direction (``use_dora``)."""
    experts: frozenset[str] = frozenset()
    """Weights of stacked experts with adapters, as the recipes name them (``target_parameters``)."""
    scaled: bool = True
    """What they add is scaled by a number other than 1."""
    parts: tuple[tuple[str, tuple[Part, ...]], ...] = ()
    """Linear layers of which parts have adapters of their own."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What is trained of a module, and in what form the rest is kept."""

    base: bool = False
    """The model's own parameters are trained."""
    frozen: frozenset[str] = frozenset()
    """Those of them that are not, by the recipes' names."""
    adapters: Adapters | None = None
    saved: frozenset[str] = frozenset()
    """Parameters that are trained in a copy of their module, by the recipes' names (``modules_to_save``)."""
    four_bit: Packed | None = None
    """Linear layers are quantised, but for those of embedding and head."""
    fused: bool = False
    """Unsloth's functions run those layers of attention that have adapters."""
    compute: str = ""
    """Dtype in which quantised layers compute."""
    input_requires_grad: bool = False
    """The embedding's output requires a gradient (``enable_input_require_grads``)."""
    fp32: bool = False
    """Parameters are in fp32 (peft, ``utils/other.py``, ``prepare_model_for_kbit_training``),"""
    not_fp32: frozenset[str] = frozenset()
    """but for these, by the recipes' names."""

    def trains(self, name: str) -> bool:
        """Whether the parameter ``name`` is trained."""
        return name.endswith(ADAPTERS) or name in self.saved or (self.base and name not in self.frozen)

    def dtype_of(self, name: str) -> str | None:
        """The dtype of the parameter ``name``, where that is not the one of what it meets."""
        if self.adapters is not None and name.endswith(ADAPTERS):
            return self.adapters.dtype
        return "fp32" if self.fp32 and name not in self.not_fp32 else None

    def adapts(self, name: str) -> bool:
        """Whether the linear layer ``name`` has an adapter."""
        return self.adapters is not None and name in self.adapters.targets

    def replaces(self, name: str) -> bool:
        """Whether another module is in the place of the linear layer ``name``."""
        return self.four_bit is not None or self.adapts(name)


@dataclass(frozen=True, slots=True)
class Layer:
    """A ``Linear`` or ``Conv1D``."""

    name: str
    n: int
    """Outputs."""
    bias: bool
    strided: bool
    """The gradient arrives in a layout that matrix products have to copy."""
    conv1d: bool = False
    """A ``Conv1D``, which calls ``addmm`` itself."""
    weight: str = ""
    """Name of its weight, if not its own."""
    category: Category = Category.TEMPORARIES
    """Of its output."""


def tuned_linear(r: Recorder, x: Tensor, layer: Layer) -> Tensor:
    """``layer`` with 4-bit weights, or wrapped in an adapter, or both."""
    tuning = r.tuning
    assert tuning is not None
    if not tuning.adapts(layer.name):
        return base_layer(r, x, layer)
    assert tuning.adapters is not None
    if tuning.fused:
        return fused(r, x, layer)[0]
    wrapped = tuning.four_bit.adapted if tuning.four_bit is not None else lora
    return wrapped(r, x, layer, tuning.adapters)


def fused(r: Recorder, x: Tensor, *layers: Layer) -> list[Tensor]:
    """``layers`` of one input by a function of Unsloth."""
    tuning = r.tuning
    assert tuning is not None
    assert tuning.adapters is not None
    assert tuning.four_bit is not None
    return projected(r, x, layers, tuning.adapters, tuning.four_bit, tuning.four_bit.functions)


def base_layer(r: Recorder, x: Tensor, layer: Layer) -> Tensor:
    """What an adapter wraps."""
    if r.tuning is not None and r.tuning.four_bit is not None:
        return r.tuning.four_bit.linear(r, x, layer)
    return plain_linear(r, x, layer)


def plain_linear(r: Recorder, x: Tensor, layer: Layer) -> Tensor:
    """The layer as it is."""
    name, n = layer.name, layer.n
    weight = r.parameter(layer.weight or f"{name}.weight", (n, x.shape[-1]), x.dtype)
    bias = r.parameter(f"{name}.bias", (n,), x.dtype) if layer.bias else None
    out = ops.linear(r, x, weight, bias, name=name, conv1d=layer.conv1d, category=layer.category)
    return ops.copied_gradient(r, out, name) if layer.strided else out


# -- LoRA -------------------------------------------------------------------------------------------


def lora(r: Recorder, x: Tensor, layer: Layer, adapters: Adapters) -> Tensor:
    """``lora.Linear.forward``: the sum is in the wider dtype, and cast back."""
    result = base_layer(r, x, layer) if not layer.weight else plain_linear(r, x, layer)
    dtype = result.dtype
    x = ops.cast(r, x, adapters.dtype, f"{layer.name}_lora_input")
    result = promoted_sum(r, result, added(r, x, result, layer, adapters), f"{layer.name}_with_lora")
    return ops.cast(r, result, dtype, f"{layer.name}_lora_cast")


def adapted_embedding(r: Recorder, weight: Tensor, indices: Tensor, vocab: int) -> Tensor:
    """``lora.Embedding.forward``: behind the base layer's rows of ``weight`` (v, h), those of one matrix, seen the
    other way round, times the other."""
    adapters = r.adapters
    result = r.embedded(ops.embedding(r, weight, indices, "word_embeddings"))
    dtype, h = result.dtype, result.shape[-1]
    table = transposed(r, r.parameter("word.lora_embedding_A", (adapters.rank, vocab), dtype), "word.lora_embedding_A")
    up = r.parameter("word.lora_embedding_B", (h, adapters.rank), dtype)
    rows = ops.embedding(r, table, indices, "word_lora_a")
    output = ops.scale(r, ops.linear(r, rows, up, name="word_lora_b"), "word_lora_scaled")
    result = sum_with_leaf(r, result, output) if result.node is not None else promoted_sum(r, result, output, WITH_LORA)
    return ops.cast(r, result, dtype, "word_lora_cast")


WITH_LORA = "word_with_lora"


def sum_with_leaf(r: Recorder, x: Tensor, y: Tensor) -> Tensor:
    """``x + y`` where ``x`` is a leaf that requires a gradient: it keeps one of its own, cast or copied (torch's
    ``accumulate_grad.h``), for another reads the one that arrives."""
    shape, dtype = x.shape, x.dtype

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        return [r.empty(shape, dtype, f"grad_{WITH_LORA}_kept"), incoming(gradients)]

    return r.empty(shape, y.dtype, WITH_LORA).by(r.node((x, y), (), backward))


def transposed(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``x.T`` of a parameter (n, k): its first gradient is copied into the parameter's own layout (torch's
    ``accumulate_grad.h``, ``clone_obey_contract``); a later one is added as it lies."""
    shape, dtype, leaf = x.shape, x.dtype, r.parameters[r.prefix + name]

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        if r.has_gradient(leaf):
            return [incoming(gradients).view(*shape)]
        return [r.empty(shape, dtype, f"grad_{name}_laid_out")]

    return Tensor(x.storage, (shape[1], shape[0]), dtype, r.node((x,), (), backward))


@dataclass(frozen=True, slots=True)
class Factors:
    """``lhs @ rhs`` is what an adapter adds to the weight of each expert: (E, m, r) and (E, r, n)."""

    lhs: Tensor
    rhs: Tensor


def matrices(r: Recorder, name: str, shape: Shape, dtype: str) -> Factors:
    """The adapter's two parameters beside the weight ``name`` (E, m, n): (m, r E) and (r E, n)."""
    adapters = r.adapters
    e, m, n = shape
    down = r.parameter(f"{name}.lora_A.weight", (adapters.rank * e, n), dtype)
    return Factors(r.parameter(f"{name}.lora_B.weight", (m, adapters.rank * e), dtype), down)


def factors(r: Recorder, name: str, both: Factors, dtype: str) -> Factors:
    """``ParamWrapper.get_delta_factors``: views by expert, cast to the weight's dtype; the gradient of the first is
    laid out anew."""
    rank = r.adapters.rank
    (m, columns), n = both.lhs.shape, both.rhs.shape[-1]
    e = columns // rank
    up = ops.copied_gradient(r, both.lhs, f"{name}.lora_B").view(e, m, rank)
    lhs = ops.cast(r, up, dtype, f"{name}_lora_b_cast")
    return Factors(lhs, ops.cast(r, both.rhs.view(e, rank, n), dtype, f"{name}_lora_a_cast"))


def registered_once(r: Recorder, name: str, shape: Shape, dtype: str) -> None:
    """The whole weight, made without a graph where the adapter is registered as its parametrization
    (``torch/nn/utils/parametrize.py``, ``ParametrizationList``)."""
    r.empty(shape, dtype, f"{name}_registered")


def folded(r: Recorder, weight: Tensor, made: Factors | None, name: str) -> Tensor:
    """``torch.baddbmm(W, lhs, rhs, alpha=scaling)`` (``_LoraFactorsProxy.forward``): saves both factors."""
    if made is None:
        return weight
    scales = r.adapters.scaled
    lhs, rhs = made.lhs, made.rhs
    shapes, dtype = (lhs.shape, rhs.shape), weight.dtype
    e, m, n = weight.shape

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        grads = []
        for shape, of in zip(shapes, ("lora_b", "lora_a"), strict=True):
            grad = r.empty(shape, dtype, f"grad_{name}_{of}_unscaled")
            grads.append(r.empty(shape, dtype, f"grad_{name}_{of}") if scales else grad)
            del grad
        return [None, *grads]

    done = work.batched((e, m, n), lhs.shape[-1], dtype, needs_x=True, needs_y=True)
    return r.output((weight, lhs, rhs), (lhs, rhs), backward, weight.shape, dtype, f"{name}_with_lora", work=done)


def lora_four_bit(r: Recorder, x: Tensor, layer: Layer, adapters: Adapters) -> Tensor:
    """``lora.Linear4bit.forward``: the base layer's output is cloned, and the adapter's cast before they are added, but
    under autocast, which casts the adapter's own inputs."""
    result = base_layer(r, x, layer)
    result = cloned(r, result, f"{layer.name}_clone")
    converts = r.autocast is None
    if converts:
        x = ops.cast(r, x, adapters.dtype, f"{layer.name}_lora_input")
    if adapters.dora:
        dtype = result.dtype
        result = promoted_sum(r, result, added(r, x, result, layer, adapters), f"{layer.name}_with_lora")
        return ops.cast(r, result, dtype, f"{layer.name}_lora_cast") if converts else result
    output = delta(r, x, layer, adapters)
    if converts:
        output = ops.cast(r, output, result.dtype, f"{layer.name}_lora_cast")
    return ops.add(r, result, output, f"{layer.name}_with_lora")


def added(r: Recorder, x: Tensor, result: Tensor, layer: Layer, adapters: Adapters) -> Tensor:
    """What an adapter adds to the base layer's ``result``."""
    return decomposed(r, x, result, layer, adapters) if adapters.dora else delta(r, x, layer, adapters)


def delta(r: Recorder, x: Tensor, layer: Layer, adapters: Adapters) -> Tensor:
    """``lora_B(lora_A(dropout(x))) * scaling``."""
    return ops.scale(r, unscaled(r, x, layer, adapters), f"{layer.name}_lora_scaled")


def unscaled(r: Recorder, x: Tensor, layer: Layer, adapters: Adapters) -> Tensor:
    """``lora_B(lora_A(dropout(x)))``."""
    low = low_rank(r, ops.dropout(r, x, adapters.dropout, f"{layer.name}_lora_dropout"), layer, adapters)
    out = of_low_rank(r, low, layer, adapters)
    del low
    return ops.copied_gradient(r, out, f"{layer.name}_lora_b") if layer.strided else out


def promoted_sum(r: Recorder, x: Tensor, y: Tensor, name: str) -> Tensor:
    """``x + y`` of one shape and two dtypes, of which ``y``'s is the wider: the engine casts the gradient of ``x``
    (``engine.cpp``, ``validate_outputs``)."""
    if x.dtype == y.dtype:
        return ops.add(r, x, y, name)
    shape, dtype = x.shape, x.dtype

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        gradient = incoming(gradients)
        return [Unsummed(Tensor(gradient.storage, shape, dtype), shape, f"grad_{name}_cast"), gradient]

    return r.empty(x.shape, y.dtype, name).by(r.node((x, y), (), backward))


def cloned(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``x.clone()``: the gradient goes through."""
    return r.empty(x.shape, x.dtype, name).by(r.node((x,), (), lambda r, gradients: gradients))


# -- 4-bit weights ----------------------------------------------------------------------------------


def linear_four_bit(r: Recorder, x: Tensor, layer: Layer, four_bit: FourBit) -> Tensor:
    """``Linear4bit.forward``: in the compute dtype, which the bias has since the first call."""
    assert r.tuning is not None
    name, compute = layer.name, r.tuning.compute
    r.quantised(f"{name}.weight", (layer.n, x.shape[-1]), four_bit)
    if layer.bias:
        r.parameter(f"{name}.bias", (layer.n,), compute)
    dtype = x.dtype
    x = ops.cast(r, x, compute, f"{name}_compute_input")
    return ops.cast(r, matmul_four_bit(r, x, layer, four_bit), dtype, f"{name}_compute_cast")


def matmul_four_bit(r: Recorder, x: Tensor, layer: Layer, four_bit: FourBit) -> Tensor:
    """``MatMul4Bit``: saves nothing of x; both ways dequantise the whole weight. A strided gradient is not copied:
    ``matmul`` takes it batch by batch (``LinearAlgebra.cpp``, ``should_fold``)."""
    k, shape, dtype = x.shape[-1], x.shape, x.dtype
    name, n = layer.name, layer.n
    out = dequantised_product(r, x, n, four_bit, name)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        weight = four_bit.dequantised(r, n, k, name)
        weight = ops.cast(r, weight, dtype, f"{name}_weight_cast")
        grad_x = r.empty(shape, dtype, f"grad_{name}_input")
        del weight
        return [grad_x]

    done = work.linear_four_bit(prod(shape[:-1]), n, k, dtype, four_bit.dtype, four_bit.issue)
    out.node = r.node((x,), (), backward, work=done)
    return out


def dequantised_product(r: Recorder, x: Tensor, n: int, four_bit: FourBit, name: str) -> Tensor:
    """``gemm_4bit`` where it has no kernel of its own."""
    k = x.shape[-1]
    blocks = (four_bit.blocks(n * k),)
    scales = r.empty(blocks, "fp32", f"{name}_scales") if four_bit.double else None
    shifted = r.empty(blocks, "fp32", f"{name}_scales_shifted") if four_bit.double else None
    weight = r.empty((n, k), x.dtype, f"{name}_dequantised")
    out = r.empty((*x.shape[:-1], n), x.dtype, name)
    del shifted, scales, weight
    return out
