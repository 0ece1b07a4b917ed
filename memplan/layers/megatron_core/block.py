"""``megatron/core/transformer/transformer_layer.py``, ``TransformerLayer.forward``: GPT's and BERT's layer.

Parameters are named, and come, as in the module: Megatron's gradient buffers follow that order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..autograd import Gradients, Leaf, Recorder, Tensor
from ..recompute import recomputed_reentrant
from . import fusions, local, mlp
from .attention import PROJECTION, QKV, attention
from .shape import CoreShape

INPUT_NORM, MLP_NORM = "input_layernorm", "pre_mlp_layernorm"

Discard = Callable[[Recorder, Tensor], None]


def uncovered(shape: CoreShape) -> Iterator[str]:
    """What these recipes do not cover of ``shape``: reasons, as sentences without a full stop."""
    spec = shape.spec
    if spec.kv_heads < shape.t:
        yield "fewer key/value heads than tensor-parallel ranks: queries, keys and values are gathered first"
    if spec.norm_place == "post":
        yield "norms after each block"
    if "mlp" in shape.recompute_modules and spec.mlp_bias:
        yield "recompute of an MLP with biases: Megatron-Core's own backward does not end"
    if shape.fp32_residual:
        yield "fp32 residual connections: linear layers refuse fp32 inputs beside 16-bit weights without autocast"
    if shape.implementation == "local" and spec.norm == "rmsnorm" and shape.sequence_parallel:
        yield "RMSNorm with sequence parallelism: PyTorch's norm, which the local implementation takes, refuses it"
    if shape.attention == "local" and shape.cp > 1:
        yield "context parallelism with Megatron-Core's own attention"


def layer(r: Recorder, hidden: Tensor, shape: CoreShape) -> Tensor:
    """(s, b, h), or (s/t, b, h) with sequence parallelism, to the same. Callers hold ``hidden`` until it returns."""
    summed = _attention(r, hidden, shape)
    return _mlp(r, summed, shape)


def _attention(r: Recorder, hidden: Tensor, shape: CoreShape) -> Tensor:
    """``_forward_attention``: its variables hold the norm's and the attention's output until it returns."""
    normed, discard = _norm(r, hidden, INPUT_NORM, shape)
    attended, bias = attention(r, normed, shape, "" if shape.implementation == "local" else f"{QKV}.layer_norm")
    discard(r, attended)
    return fusions.bias_dropout_add(r, attended, bias, hidden, PROJECTION, shape)


def _mlp(r: Recorder, hidden: Tensor, shape: CoreShape) -> Tensor:
    """``_forward_mlp``: likewise."""
    normed, discard = _norm(r, hidden, MLP_NORM, shape)
    norm_name = "" if shape.implementation == "local" else f"{mlp.FC1}.layer_norm"
    bias: Tensor | None = None
    if "mlp" in shape.recompute_modules:
        fed = recomputed_reentrant(r, lambda r, x: mlp.mlp(r, x, shape, norm_name)[0], (normed,))
    else:
        fed, bias = mlp.mlp(r, normed, shape, norm_name)
    discard(r, fed)
    return fusions.bias_dropout_add(r, fed, bias, hidden, mlp.FC2, shape)


def _norm(r: Recorder, x: Tensor, name: str, shape: CoreShape) -> tuple[Tensor, Discard]:
    """The norm before a block, and what ends its output behind it; Transformer Engine's is in the projection."""
    if shape.implementation != "local":
        return x, lambda r, x: None
    if "layernorm" in shape.recompute_modules:
        return _without_output(r, x, lambda r, x: local.norm(r, x, name, shape))
    return local.norm(r, x, name, shape), lambda r, x: None


def _without_output(r: Recorder, x: Tensor, region: Callable[[Recorder, Tensor], Tensor]) -> tuple[Tensor, Discard]:
    """``CheckpointWithoutOutput`` (``tensor_parallel/random.py``): the output's memory ends in forward and
    is there again when the gradient of a later tensor arrives, until the region's own backward is done.
    """
    enabled, r.grad_enabled = r.grad_enabled, False
    out = region(r, x)
    r.grad_enabled = enabled
    part = (x.storage, x.shape, x.dtype)
    held: list[tuple[Tensor, Leaf]] = []

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        gradient = gradients[0]
        assert gradient is not None
        again, leaf = held.pop()
        r.backward([again.alias()], [gradient.alias()])
        del again
        return [leaf.take()]

    out.node = r.node((x,), (x,), backward)

    def recompute(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        start = len(r.events)
        r.seam("recompute")
        again, leaf = r.leaf(Tensor(*part))
        held.append((region(r, again), leaf))
        r.settle(start)
        return gradients

    def discard(r: Recorder, later: Tensor) -> None:
        r.dropped(out.storage)
        r.hand_over(out)
        later.node = r.node((later,), (), recompute)

    return out, discard
