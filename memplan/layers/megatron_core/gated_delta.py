"""Gated delta nets in Megatron-Core: ``ssm/gated_delta_net/gdn.py`` (``GatedDeltaNet.forward``) and ``common.py``
(``_GDNBase``), over the kernels of flash-linear-attention (``layers/gated_delta.py``), or in deterministic mode over
PyTorch's operators (``gated_delta_torch``).

What the projection gives is saved whole: the convolution, which is made again in backward, and the compiled function
that prepares the rule's inputs (``jit_fuser``) read parts of it. The gated norm saves its input, the norm and the gate.
AOTAutograd decides what compiled functions save: inputs, not what is computed of them.

Shapes: s sequence, b micro-batch; on this rank: k key heads of d features, v value heads of e features,
m = 2 k d + v e channels of the convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ...values import replace
from .. import ops
from ..autograd import Gradients, Recorder, Shape, Tensor, size_of
from ..gated_delta import Sizes, convolution, rule
from ..gradients import fresh
from ..work import Operator, Stream
from . import mamba, te
from .gated_delta_torch import chunked
from .grouped import without_output
from .shape import CoreShape

MODULE = "self_attention"
IN, OUT, NORM = f"{MODULE}.in_proj", f"{MODULE}.out_proj", f"{MODULE}.out_norm"


def sizes_of(shape: CoreShape) -> Sizes:
    """Context parallelism gives every rank whole sequences of its part of the heads."""
    spec, ranks = shape.spec, shape.t * shape.cp
    k, v = spec.linear_key_heads // ranks, spec.linear_value_heads // ranks
    d, e = spec.linear_key_head_dim, spec.linear_value_head_dim
    return Sizes(shape.b, shape.s * shape.cp, k, v, d, e, spec.linear_conv_kernel)


def own_sizes(shape: CoreShape) -> Sizes:
    """As the projections have it, of a part of the tokens of each sequence."""
    return replace(sizes_of(replace(shape, cp=1)), s=shape.s)


def weights(shape: CoreShape) -> frozenset[Shape]:
    """Of the two projections on this rank."""
    own, h = own_sizes(shape), shape.spec.hidden
    return frozenset({(own.features, h), (h, own.v * own.e)})


def uncovered(shape: CoreShape) -> Iterator[str]:
    """What the recipe does not cover of models that have such layers."""
    spec = shape.spec
    others = {
        "local layers: Megatron-Core has them of Transformer Engine alone": shape.implementation == "local",
        f"{spec.activation}: Megatron-Core's convolution stops at all but silu (swiglu)": spec.activation != "swiglu",
        "latent attention in the others": spec.latent_kv_rank > 0,
        "packed sequences": shape.packed > 0,
        "CUDA graphs of layers in deterministic mode": shape.graphs is not None and shape.deterministic,
        "activations on the host": bool(shape.offload),
        "the exchange of tokens beside another micro-batch's computation": shape.overlap is not None,
        "norms that return the residual": shape.norm_takes_residual,
        "an MLP in parts": shape.mlp_chunks > 1,
        "fused operations": shape.fuses_operations,
        "Transformer Engine's activation functions": shape.te_activation,
    }
    yield from (f"gated delta nets with {name}" for name, applies in others.items() if applies)


def attention(r: Recorder, hidden: Tensor, shape: CoreShape) -> Tensor:
    """``forward``: (s, b, h), or (s / t, b, h) with sequence parallelism, to the same."""
    own = own_sizes(shape)
    numbers = [r.parameter(f"{MODULE}.{name}", (own.v,), shape.dtype) for name in ("dt_bias", "A_log")]
    # the gradient comes transposed, unless it went through an exchange
    strided = shape.b > 1 and shape.cp == 1
    x, _ = te.norm_column_linear(
        r, hidden, IN, f"{IN}.layer_norm", own.features, shape, bias=False, skip_bias=False, strided=strided
    )
    weight = r.parameter(f"{MODULE}.conv1d.weight", (own.m, 1, own.kernel), shape.dtype)
    given = [x]
    del x
    return _projected(r, *between(r, given, weight, numbers, shape), shape)


Normed = tuple[Tensor, Callable[[Recorder, Tensor], None], list[Tensor]]
"""What enters the output projection, what ends it there, and variables that live until attention returns."""


def _projected(
    r: Recorder, x: Tensor, discard: Callable[[Recorder, Tensor], None], held: list[Tensor], shape: CoreShape
) -> Tensor:
    out, _ = te.row_linear(r, x, OUT, shape, bias=False)
    discard(r, out)
    held.clear()
    return out


def between(r: Recorder, given: list[Tensor], weight: Tensor, numbers: list[Tensor], shape: CoreShape) -> Normed:
    """What is between the projections, (s / cp, b, features) to (s / cp, b, v e). ``given`` is emptied."""
    at, x = sizes_of(shape), given.pop()
    if shape.cp > 1:
        x = _to_heads(r, x, at, shape.cp)
        weight = _of_rank(r, weight, (at.m, 1, at.kernel), copies=True)
        numbers = [_of_rank(r, one, (at.v,), copies=False) for one in numbers]
    gate = (*at.heads[:2], at.v * at.e)
    x, gated, *features = ops.split(r, x, [at.channels, gate, at.heads, at.heads], "projected")
    mixed = (_plain_convolution if shape.deterministic else convolution)(r, x, weight, at)
    *read, z = _prepared(r, mixed, gated, features, numbers, shape)
    out = chunked(r, read) if shape.deterministic else rule(r, read, at)
    held = [x, mixed, *read, z, out]

    def region(r: Recorder, out: Tensor, z: Tensor) -> tuple[Tensor]:
        return (_gated_norm(r, out, z, at, shape),)

    if "gdn_norm_out" in shape.recompute_modules:
        (normed,), discard = without_output(r, (out, z), region)
        return normed, discard, held
    return *region(r, out, z), lambda r, x: None, held


# -- the convolution ---------------------------------------------------------------------------------------


def _plain_convolution(r: Recorder, x: Tensor, weight: Tensor, at: Sizes) -> Tensor:
    """``F.conv1d`` on a copy with channels first, padded at both ends, and ``silu`` of the tokens before the end: each
    saves its input."""
    dtype, turned, padded = x.dtype, (at.b, at.m, at.s), (at.b, at.m, at.s + at.kernel - 1)
    x = ops.contiguous(r, x, turned, "channels_first")

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        grad = r.empty(turned, dtype, "grad_convolution_input")
        return [grad, r.empty((at.m, 1, at.kernel), dtype, "grad_convolution_weight")]

    x = r.output((x, weight), (x, weight), backward, padded, dtype, "convolution")
    x = ops.slice_last(r, x, at.s, "convolution_tokens")
    return ops.elementwise(r, "convolution_silu", (x,), (x,)).view(*at.channels)


# -- what the rule reads -----------------------------------------------------------------------------------


def _prepared(
    r: Recorder, mixed: Tensor, gate: Tensor, features: Sequence[Tensor], numbers: Sequence[Tensor], shape: CoreShape
) -> list[Tensor]:
    """``_prepare_input_for_gated_delta_rule``, compiled: queries and keys (of a copy, ``l2norm``, repeated for every
    value head), values, decays in fp32, steps, and the gate, whose gradient passes as it is. It saves the normed ones,
    their reciprocal norms, and its small inputs. Gradients that are laid out otherwise, as those of deterministic mode,
    are copied first (AOTAutograd, ``coerce_to_expected_memory_format``)."""
    at, dtype, turned = sizes_of(shape), mixed.dtype, shape.deterministic
    joined = [r.empty(at.joined, dtype, "query_key")]
    normed = r.empty(at.joined, dtype, "query_key_normed")
    norms = r.empty(at.joined[:-1], "fp32", "reciprocal_norms")
    joined.clear()
    sizes = {"query": at.keys, "key": at.keys, "value": at.values, "decay": at.heads, "beta": at.heads}
    made = [r.empty(size, "fp32" if name == "decay" else dtype, name) for name, size in sizes.items()]
    made.append(r.empty(at.values, dtype, "gate"))
    small = [x.shape for x in numbers]

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        strided = [one for one in gradients[:-1] if one is not None] if turned else []
        copied = [r.empty(one.shape, one.dtype, "gradient_copied") for one in strided]
        together = r.empty(at.joined, dtype, "grad_query_key_normed")
        back = r.empty(at.joined, dtype, "grad_query_key")
        del together
        whole = r.empty(at.channels, dtype, "grad_convolution")
        del back, copied, strided
        own = [r.empty(size, dtype, "grad_number") for size in small]
        return [whole, gradients[-1], *(r.empty(at.heads, dtype, "grad_feature") for _ in features), *own]

    inputs = (mixed, gate, *features, *numbers)
    copies, one = sum(size_of(x.shape, x.dtype) for x in made), size_of(at.joined, dtype)
    done = Operator((Stream(2 * copies + 3 * one, 3),), (Stream(2 * copies + 4 * one, 3),))
    node = r.node(inputs, (*features, *numbers, norms, normed), backward, outputs=len(made), work=done)
    return [Tensor(x.storage, x.shape, x.dtype, node, slot) for slot, x in enumerate(made)]


# -- the gated norm -------------------------------------------------------------------------------------


def _gated_norm(r: Recorder, x: Tensor, gate: Tensor, at: Sizes, shape: CoreShape) -> Tensor:
    """``_gated_norm_and_a2a``: the norm of each head, outside of what is compiled; its product with ``silu`` of the
    gate, of which both are saved; in the order (s, b, …), a copy, and so is its gradient back, but of one sequence."""
    dtype, rows = x.dtype, (at.b * at.s * at.v, at.e)
    x = te.norm(r, x.view(*rows), NORM, shape)
    x = ops.elementwise(r, "gated", (x, gate.view(*rows)), (x, gate))
    size = (at.s, at.b, at.v * at.e)
    if 1 not in size[:2]:
        x = ops.copied_gradient(r, x, "gated")
        x = ops.contiguous(r, x, size, "gated_contiguous")
    assert x.dtype == dtype
    return mamba.to_tokens(r, x.view(*size), shape.cp) if shape.cp > 1 else x.view(*size)


# -- context parallelism -------------------------------------------------------------------------------------


def _to_heads(r: Recorder, x: Tensor, at: Sizes, cp: int) -> Tensor:
    """``a2a_cp_to_hp``: features in the order of ranks (``index_select``), exchanged at once to whole sequences of a
    part of them, and in the order of tokens."""
    like, dtype, size = x.shape, x.dtype, (at.s, at.b, at.features)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        return [r.empty(like, dtype, "grad_features_ordered")]

    x = r.output((x,), (), backward, like, dtype, "features_ordered")
    x = mamba.reordered(r, x, like, "parts")
    x = mamba.exchanged_by(r, x, slices=False).view(*size)
    return mamba.reordered(r, x, size, "projected")


def _of_rank(r: Recorder, x: Tensor, size: Shape, *, copies: bool) -> Tensor:
    """``get_parameter_local_cp``: a copy of parts, or a slice; backward fills a tensor of the whole size."""
    dtype = x.dtype
    node = r.node((x,), (), fresh(x, "grad_parameter_slice"))
    if copies:
        return r.empty(size, dtype, "parameter_of_rank").by(node)
    return Tensor(x.storage, size, dtype, node)
