"""Megatron-Core's local layers (``--spec local``), and the fused kernels that they share with Transformer Engine's."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ...plan.spec import LINEAR
from ...tape.events import Category
from .. import ops, selecting
from ..autograd import Backward, Gradients, Recorder, Shape, Tensor, Unsummed, incoming, size_of
from ..gradients import fresh
from ..reductions import summed
from ..work import NOTHING, Operator, Stream, in_place, scaled_scores
from .ends import input_of, mask_id
from .shape import CoreShape

# -- fusions ---------------------------------------------------------------------------------------------


def bias_dropout_add(
    r: Recorder, x: Tensor, bias: Tensor | None, residual: Tensor, name: str, shape: CoreShape
) -> Tensor:
    """``get_bias_dropout_add``: ``residual + dropout(x + bias)``, in the dtype of the residual; in place in evaluation,
    if there is no bias (which requires a gradient).

    ``TransformerLayer`` runs it with gradients enabled even in a forward pass that is recomputed later
    (``bias_dropout_add_exec_handler``), so that its mask lives until the region's output has a new node.
    """
    if r.evaluates and bias is None and x.dtype == residual.dtype:
        return x
    enabled, r.grad_enabled = r.grad_enabled, r.grad_enabled or residual.node is not None
    function = _fused_bias_dropout_add if shape.bias_dropout_fusion else _unfused_bias_dropout_add
    out = function(r, x, bias, residual, name, 0.0 if r.evaluates else shape.spec.hidden_dropout)
    r.grad_enabled = enabled
    return out


def _fused_bias_dropout_add(
    r: Recorder, x: Tensor, bias: Tensor | None, residual: Tensor, name: str, p: float
) -> Tensor:
    """``bias_dropout_add_fused_train`` as Inductor compiles it: saves the mask alone.

    A seed is drawn into a tensor of its own. The gradient of the residual is the incoming one itself;
    without dropout in the same dtype that of ``x`` is, too.
    """
    seed = [r.empty((1,), "int64", f"{name}_seed")] if p > 0 else []
    mask = [r.empty(x.shape, "bool", f"{name}_mask")] if p > 0 else []
    out = r.empty(residual.shape, residual.dtype, f"{name}_residual")
    seed.clear()
    shape, dtype, has_bias = x.shape, x.dtype, bias is not None and bias.node is not None
    passes = p == 0 and x.dtype == residual.dtype

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        gradient = incoming(gradients)
        grad = gradient.alias(*shape) if passes else r.empty(shape, dtype, f"grad_{name}_dropout")
        grad_bias = [r.empty(shape[-1:], dtype, f"grad_{name}_bias")] if has_bias else []
        return [grad, *grad_bias, gradient]

    inputs = (x, bias, residual) if bias is not None and has_bias else (x, residual)
    out.node = r.node(inputs, mask, backward)
    return out


def _unfused_bias_dropout_add(
    r: Recorder, x: Tensor, bias: Tensor | None, residual: Tensor, name: str, p: float
) -> Tensor:
    """``bias_dropout_add_unfused``: three operators."""
    x = ops.cast(r, x, residual.dtype, f"{name}_cast")
    if bias is not None:
        bias = ops.cast(r, bias, residual.dtype, f"{name}_bias_cast")
        x = ops.add(r, x, bias, f"{name}_bias")
    out = ops.dropout(r, x, p, f"{name}_dropout")
    out = ops.add(r, residual, out, f"{name}_residual")
    return out  # noqa: RET504


def bias_gelu(r: Recorder, x: Tensor, bias: Tensor, name: str) -> Tensor:
    """``GeLUFunction``: saves input and bias; both receive one gradient, summed for the bias."""
    shape, dtype, bias_shape = x.shape, x.dtype, bias.shape
    return r.output((x, bias), (x, bias), _same_for_bias(shape, dtype, bias_shape, name), shape, dtype, f"{name}_gelu")


def bias_swiglu(r: Recorder, x: Tensor, bias: Tensor | None, name: str) -> Tensor:
    """``BiasSwiGLUFunction`` or ``SwiGLUFunction`` on (s, b, 2 f): saves input and bias, gives (s, b, f)."""
    shape, dtype = x.shape, x.dtype
    inputs = (x,) if bias is None else (x, bias)
    backward = fresh(x, f"grad_{name}_swiglu") if bias is None else _same_for_bias(shape, dtype, bias.shape, name)
    return r.output(inputs, inputs, backward, (*shape[:-1], shape[-1] // 2), dtype, f"{name}_swiglu")


def _same_for_bias(shape: Shape, dtype: str, bias: Shape, name: str) -> Backward:
    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        grad = r.empty(shape, dtype, f"grad_{name}_activation")
        gradients.clear()  # a Python function's incoming gradients end before the engine sums
        return [grad, Unsummed(grad.alias(), bias, f"grad_{name}_bias")]

    return backward


def ungated(r: Recorder, x: Tensor, name: str, shape: CoreShape) -> Tensor:
    """``F.gelu``, or ``openai_gelu`` (``transformer/utils.py``) and ``squared_relu`` (``activations.py``), which are
    compiled: saves its input."""
    kind = "squared_relu" if shape.spec.activation == "relu2" else "gelu"
    return ops.elementwise(r, f"{name}_{kind}", (x,), (x,))


def swiglu(r: Recorder, x: Tensor, name: str, *, clamped: bool = False) -> Tensor:
    """``MLP.forward.glu``: ``silu(gate) * (linear + offset)``, with a copy of ``linear`` though the offset is 0.
    ``quick_gelu`` in place of ``silu`` is one kernel, too (it is compiled). ``clamped``: both halves, before."""
    half = (*x.shape[:-1], x.shape[-1] // 2)
    gate, linear = ops.split(r, x, [half, half], f"{name}_chunk")
    if clamped:
        gate = selecting.clamped(r, gate, f"{name}_gate_clamped", bounds=1)
        linear = selecting.clamped(r, linear, f"{name}_linear_clamped", bounds=2)
    activated = ops.elementwise(r, f"{name}_silu", (gate,), (gate,))
    offset = ops.add_constant(r, linear, f"{name}_offset")
    return ops.multiply(r, activated, offset, f"{name}_swiglu")


# -- local -----------------------------------------------------------------------------------------------

FUSED_SOFTMAX_LONGEST = 4096
"""Longest row that ``FusedScaleMaskSoftmax.is_kernel_available`` admits."""


def memory_buffer(shape: CoreShape) -> Shape:
    """The largest tensor that the layers take from the ``"mpu"`` buffer, in ``shape.dtype``; ``(0,)`` if none does."""
    sizes: list[Shape] = [(0,)]
    if shape.sequence_parallel and shape.implementation == "local":
        sizes.append((shape.s, shape.b, shape.spec.hidden))
    if shape.attention == "local":
        sizes.append((shape.b * shape.spec.heads // shape.t, shape.s, max(shape.s, shape.keys)))
    return max(sizes, key=_elements)


def dummy_gradients(shape: CoreShape) -> frozenset[Shape]:
    """Shapes of the static stand-ins for weight gradients, one a shape, in ``shape.dtype``."""
    if not shape.gradient_fusion:
        return frozenset()
    spec, t, h = shape.spec, shape.t, shape.spec.hidden
    f = spec.ffn // t
    inner = 2 * f if spec.gated else f
    has_mlp = shape.experts is None and shape.kind in ("", "-") and not shape.replaced[1]
    mlp = {(inner, h), (h, f)} if has_mlp else set[Shape]()
    if LINEAR in shape.replaced:
        mlp |= {(h // t, h)}
    if shape.kind in ("-", "E") or shape.replaced[0]:
        return frozenset(mlp)
    attention = {(spec.qkv_features // t, h), (h, spec.attention_features // t)} if not spec.latent_kv_rank else set()
    inner_width = spec.attention_features // t
    crossing = {(inner_width, h), (2 * inner_width, h)} if shape.keys else set()
    return frozenset(attention | crossing | mlp)


def _elements(shape: Shape) -> int:
    n = 1
    for dim in shape:
        n *= dim
    return n


# -- linear -----------------------------------------------------------------------------------------


def linear(
    r: Recorder, x: Tensor, weight: Tensor, bias: Tensor | None, name: str, shape: CoreShape, *, columns: bool
) -> Tensor:
    """``LinearWithGradAccumulationAndAsyncCommunication``: saves its input as it came and the weight.

    ``columns`` of the weight's outputs are shared out; with sequence parallelism the input is a shard of the sequence
    then, gathered into the static buffer here and again in backward, where the gradient of the whole is
    reduce-scattered into a tensor of its own.
    """
    n, k = weight.shape
    parallel = shape.ranks.column if columns else shape.ranks.row
    saved, dtype, has_bias, fused = x.shape, x.dtype, bias is not None, shape.gradient_fusion
    gathers = columns and shape.sequence_parallel
    whole = (shape.s, *x.shape[1:]) if gathers else x.shape

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        grad = r.empty(whole, dtype, f"grad_{name}_input")
        shard = r.empty(saved, dtype, f"grad_{name}_scattered") if gathers else grad
        grad_weight = None if fused else r.empty((n, k), dtype, f"grad_{name}_weight")
        grad_bias = [summed(r, (prod(whole[:-1]), n), (n,), dtype, f"grad_{name}_bias")] if has_bias else []
        return [shard, grad_weight, *grad_bias]

    inputs = (x, weight) if bias is None else (x, weight, bias)
    work = parallel(prod(whole[:-1]), n, k, dtype, shape.added(r.summed))
    if has_bias:
        biased = size_of((*whole[:-1], n), dtype)  # a sum of its own, and a reduction of the gradient
        work = work.then((Stream(2 * biased),), (Stream(biased),))
    node = r.node(inputs, (x, weight), backward, work=work)
    out = r.empty((*whole[:-1], n), dtype, name)
    if has_bias:
        out = r.empty(out.shape, dtype, f"{name}_biased")
    return out.by(node)


def _parameters(r: Recorder, name: str, weight: Shape, dtype: str, bias: bool) -> tuple[Tensor, Tensor | None]:
    first = r.parameter(f"{name}.weight", weight, dtype)
    return first, r.parameter(f"{name}.bias", weight[:1], dtype) if bias else None


def column_linear(
    r: Recorder, x: Tensor, name: str, n: int, shape: CoreShape, *, bias: bool, skip_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """``ColumnParallelLinear`` with ``n`` outputs on this rank: (s, b, n), and the bias if it is not added."""
    weight, added = _parameters(r, name, (n, x.shape[-1]), shape.dtype, bias)
    kept = added if skip_bias else None
    out = linear(r, x, weight, None if skip_bias else added, name, shape, columns=True)
    return out, kept


def row_linear(r: Recorder, x: Tensor, name: str, shape: CoreShape, *, bias: bool) -> tuple[Tensor, Tensor | None]:
    """``RowParallelLinear`` to (s, b, h), all-reduced in place or reduce-scattered; its bias is not added."""
    weight, kept = _parameters(r, name, (shape.spec.hidden, x.shape[-1]), shape.dtype, bias)
    out = linear(r, x, weight, None, name, shape, columns=False)
    if not shape.sequence_parallel:
        return out, kept
    scattered = r.empty(shape.hidden, out.dtype, f"{name}_scattered")

    return scattered.by(r.node((out,), (), fresh(out, f"grad_{name}_gathered"), work=NOTHING)), kept


# -- norm -------------------------------------------------------------------------------------------


def norm(
    r: Recorder, x: Tensor, name: str, shape: CoreShape, *, strided: bool = False, transposed: bool = False
) -> Tensor:
    """``FusedLayerNorm`` (apex), or ``torch.nn.RMSNorm``, over the last dimension of ``x``.

    Both save their input and fp32 statistics of one row each: mean and inverse deviation, or the latter.
    In apex the gradients of weight and bias are summed from 16 parts each (``layer_norm_cuda_kernel.cu``).
    A ``strided`` input is copied (apex saves the copy, PyTorch drops it), a ``transposed`` gradient, too.
    """
    weights = [r.parameter(f"{name}.weight", x.shape[-1:], shape.dtype)]
    has_bias = shape.spec.norm == "layernorm"
    if has_bias:
        weights.append(r.parameter(f"{name}.bias", x.shape[-1:], shape.dtype))
    copy = [r.empty(x.shape, x.dtype, f"{name}_contiguous")] if strided else []
    out = r.empty(x.shape, x.dtype, name)
    statistics = [r.empty((*x.shape[:-1], 1), "fp32", f"{name}_mean")] if has_bias else []
    statistics.append(r.empty((*x.shape[:-1], 1), "fp32", f"{name}_rstd"))
    whole, dtype, count = x.shape, x.dtype, len(weights)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        again = [r.empty(whole, dtype, f"grad_{name}_contiguous")] if transposed else []
        again += [r.empty(whole, dtype, f"{name}_contiguous")] if strided and not has_bias else []
        made: list[Tensor | None] = [r.empty(whole, dtype, f"grad_{name}_input")]
        made += [r.empty(whole[-1:], dtype, f"grad_{name}_{part}") for part in ("weight", "bias")[:count]]
        if has_bias and r.kernel_workspaces:
            inside = [r.empty((16, whole[-1]), "fp32", f"grad_{name}_part", Category.WORKSPACES) for _ in range(2)]
            del inside
        again.clear()
        return made

    saved = copy[0] if copy and has_bias else x
    copy.clear()
    out.node = r.node((x, *weights), (saved, *statistics), backward)
    return out


# -- core attention ---------------------------------------------------------------------------------


def softmax_is_fused(b: int, s: int, heads: int, causal: bool, dtype: str, keys: int = 0) -> bool:
    """``FusedScaleMaskSoftmax.is_kernel_available`` for ``heads`` heads of this rank, s queries and, unless they are as
    many, ``keys`` keys."""
    keys = keys or s
    rows_per_block = 8 if keys <= 128 else 4  # apex scaled_masked_softmax.h, get_batch_per_block
    fits = 16 < keys <= FUSED_SOFTMAX_LONGEST and s % 4 == keys % 4 == 0 and (b * heads) % 4 == 0
    return dtype != "fp32" and fits and (b * heads if causal else s) % rows_per_block == 0


def _probabilities(r: Recorder, scores: Tensor, shape: CoreShape) -> Tensor:
    """``FusedScaleMaskSoftmax`` on (b, a/t, s, s): one kernel that saves its result and whose backward
    writes into its incoming gradient; or operators, with a causal mask of their own where none is given."""
    (_, heads, queries, keys), causal = scores.shape, shape.spec.causal
    if shape.masked_softmax_fusion and softmax_is_fused(shape.b, queries, heads, causal, shape.dtype, keys):
        out = r.empty(scores.shape, scores.dtype, "probabilities")
        return out.by(r.node((scores,), (out,), lambda r, gradients: gradients, work=in_place(out.shape, out.dtype, 3)))
    dtype, strided = scores.dtype, True
    if shape.softmax_in_fp32 and dtype != "fp32":
        scores, strided = ops.cast(r, scores, "fp32", "scores_fp32"), False
    if shape.query_key_layer_scaling:
        scores, strided = ops.scale(r, scores, "scores_scaled"), False
    mask = input_of(r, shape, mask_id(shape)) if shape.attention_mask else _causal_mask(r, shape.s) if causal else None
    if mask is not None:
        scores = filled(r, scores, mask, view=strided)
    probabilities = ops.softmax(r, scores, "probabilities_fp32")
    return ops.cast(r, probabilities, dtype, "probabilities")


def _causal_mask(r: Recorder, s: int) -> Tensor:
    """``get_default_causal_mask``: (s, s), by way of two in fp32."""
    return r.in_turn(((s, s), "fp32", "ones"), ((s, s), "fp32", "upper_triangle"), ((s, s), "bool", "causal_mask"))


def filled(r: Recorder, scores: Tensor, mask: Tensor, *, view: bool) -> Tensor:
    """``masked_fill_``, which saves the mask. Of a view (the scores as they come) autograd copies the gradient
    whole, and the slice that the view was (``CopySlices``)."""
    shape, dtype = scores.shape, scores.dtype

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        if not view:
            return [r.empty(shape, dtype, "grad_scores_masked")]
        whole = r.empty(shape, dtype, "grad_scores_copied")
        part = r.empty(shape, dtype, "grad_scores_slice")
        filled = r.empty(shape, dtype, "grad_scores_masked")
        del part, filled
        return [whole]

    work = Operator((Stream(2 * size_of(shape, dtype)),))
    return Tensor(scores.storage, shape, dtype, r.node((scores,), (mask,), backward, work=work))


def _scores(r: Recorder, q: Tensor, k: Tensor) -> Tensor:
    """``baddbmm`` of queries (s, b, a, d) and keys to (b, a, s, keys): saves both; the gradients of first query,
    then key are scaled out of place."""
    s, b, n, _ = q.shape
    dtype, sizes, out = q.dtype, {"query": q.shape, "key": k.shape}, (b, n, s, k.shape[0])

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        made: list[Tensor | None] = []
        for part, size in sizes.items():
            product = r.empty(size, dtype, f"grad_{part}_unscaled")
            made.append(r.empty(size, dtype, f"grad_{part}"))
            del product
        return made

    return r.output((q, k), (q, k), backward, out, dtype, "scores", work=scaled_scores(q.shape, out, dtype))


def _leaf(r: Recorder, x: Tensor, name: str) -> Tensor:
    """An input of a recomputed region, whose transposed gradient is copied when it arrives (``AccumulateGrad``)."""
    shape, dtype = x.shape, x.dtype
    node = r.node((x,), (), fresh(x, f"grad_{name}_copied"))
    return Tensor(x.storage, shape, dtype, node)


def core_attention(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Tensor:
    """``DotProductAttention.forward`` on (s, b, a/t, d) and (s, b, g/t, d): the context as (s, b, a d / t)."""
    s, b, n, d = q.shape
    again, repeats = "core_attn" in shape.recompute_modules, n > k.shape[2]
    if repeats:
        k = ops.expanded(r, k, q.shape, "key_repeated", copies=True)
        v = ops.expanded(r, v, q.shape, "value_repeated", copies=True)
    if again:
        q = _leaf(r, q, "query")
        k = k if repeats else _leaf(r, k, "key")
    if repeats and b > 1 and _is_slice(shape):
        q = ops.contiguous(r, q, q.shape, "query_contiguous")
    scores = _scores(r, q, k)
    probabilities = _probabilities(r, scores, shape)
    probabilities = ops.dropout(r, probabilities, shape.spec.attention_dropout, "attention_dropout")
    if again and not repeats:
        v = _leaf(r, v, "value")
    context = ops.matmul(r, probabilities, v, (b, n, s, d), "context")
    context = ops.contiguous(r, context, (s, b, n * d), "context_contiguous")
    return context  # noqa: RET504


def _is_slice(shape: CoreShape) -> bool:
    """The queries come as a slice of the projection's output: of one group, so that ``reshape`` made no copy."""
    changed = shape.spec.qk_norm or shape.spec.positions == "rotary"
    return shape.spec.kv_heads == shape.t and not changed
