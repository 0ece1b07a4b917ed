"""peft's DoRA: a weight's direction is tuned by LoRA, and the norms of its rows are parameters of their own.

peft 0.21: ``tuners/lora/variants.py`` (``DoraLinearVariant.forward``), ``tuners/lora/dora.py`` (``DoraLinearLayer``),
``utils/integrations.py`` (``dequantize_module_weight``). The product of both matrices is that of a unit matrix (k, k)
by the two adapters' layers, whose graph holds it until the layer's forward ends; norms are of the whole weight, in the
adapters' dtype. Shapes: x (…, k), weight (n, k), rank r.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import ops
from .autograd import Recorder, Tensor

if TYPE_CHECKING:
    from .tuning import Adapters, Layer


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
    scaled = r.empty((k, n), product.dtype, f"{name}_lora_weight_scaled")
    updated = r.empty((n, k), weight.dtype, f"{name}_updated_weight")
    del scaled
    norm = r.empty((n,), weight.dtype, f"{name}_weight_norm")
    del updated
    return norm
