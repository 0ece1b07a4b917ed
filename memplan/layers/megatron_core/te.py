"""Transformer Engine's modules as Megatron-Core uses them (``megatron/core/extensions/transformer_engine.py``).

What Python makes is read from ``transformer_engine/pytorch/module/linear.py``, ``layernorm_linear.py``,
``ops/basic/layer_norm.py`` and ``rmsnorm.py``, what C++ makes from ``csrc/extensions``. Without user buffers. What
becomes of the operands of products is in ``operands``: ``precision`` decides it. Under gradient accumulation fusion the
GEMM adds the weight's gradient to ``main_grad`` (fp32) and returns a dummy, which ``te_facts`` says the life of.

Shapes: s sequence, b micro-batch, h hidden, a heads, d head size, t tensor-parallel size, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ...tape.events import Category
from ..autograd import Gradients, Recorder, Shape, Tensor, Unsummed, size_of
from ..gradients import fresh, fresh_each
from ..work import Exchange, Operator, Stream
from . import te_facts
from .operands import Linear, Operands, operands
from .shape import CoreShape

COMMUNICATION, LOGITS = Category.COMMUNICATION_BUFFERS, Category.LOGITS

Biased = tuple[Tensor, Tensor | None]
"""An output, and the bias that its reader adds."""


def norm(r: Recorder, x: Tensor, name: str, shape: CoreShape, *, strided: bool = False) -> Tensor:
    """``TENorm``: LayerNorm (weight and bias) or RMSNorm (weight) over the last dimension of ``x``.

    Saves the input and, in fp32, a row's mean (LayerNorm) and reciprocal deviation. Of a ``strided`` input it saves a
    copy (``ops/basic/rmsnorm.py``, ``op_forward``: ``input_.contiguous()``; before 2.8 ``ops/_common.py``,
    ``convert_tensor``).
    """
    parameters = _norm_parameters(r, x, name, shape)
    saved = r.empty(x.shape, x.dtype, f"{name}_contiguous") if strided else x
    statistics, out = _statistics(r, x, name, shape), r.empty(x.shape, x.dtype, name)
    like, dtype = x.shape, x.dtype
    names = [parameter.shape for parameter in parameters]

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        grads = [r.empty(like, dtype, f"grad_{name}_input")]
        grads += [r.empty(one, dtype, f"grad_{name}_parameter") for one in names]
        return grads

    out.node = r.node((x, *parameters), (saved, *statistics), backward)
    return out


def norm_and_residual(r: Recorder, x: Tensor, name: str, shape: CoreShape) -> tuple[Tensor, Tensor]:
    """``TEFusedResidualRMSNorm``: the norm, and ``x`` once more for the residual connection, whose gradient waits for
    the norm's and is added to it in the same kernel (``ops/fused/backward_add_rmsnorm.py``)."""
    (weight,) = _norm_parameters(r, x, name, shape)
    statistics, out = _statistics(r, x, name, shape), r.empty(x.shape, x.dtype, name)
    size = size_of(x.shape, x.dtype)
    backward = fresh_each((x, f"grad_{name}_input"), (weight, f"grad_{name}_parameter"))
    work = Operator((Stream(2 * size),), (Stream(4 * size, 2),))
    node = r.node((x, weight), (x, *statistics), backward, outputs=2, work=work)
    return out.by(node), Tensor(x.storage, x.shape, x.dtype, node, 1)


def activation(r: Recorder, x: Tensor, name: str, shape: CoreShape) -> Tensor:
    """``TEActivationOp``: ``SwiGLU`` or ``GELU`` (``ops/basic``), which save their input."""
    like, dtype, width = x.shape, x.dtype, x.shape[-1] // (2 if shape.spec.gated else 1)

    return r.output((x,), (x,), fresh(x, f"grad_{name}_activation"), (*like[:-1], width), dtype, f"{name}_activation")


def column_linear(
    r: Recorder,
    x: Tensor,
    name: str,
    n: int,
    shape: CoreShape,
    *,
    bias: bool,
    skip_bias: bool,
    original: bool = False,
    category: Category = Category.TEMPORARIES,
) -> Biased:
    """``TEColumnParallelLinear``: n outputs on this rank from (s, b, h), or from a shard that is gathered.

    With sequence parallelism only the shard is saved; it is gathered again for the weight's gradient. ``original``:
    in 8 bits, too, it is saved as it came.
    """
    shape = shape.within(name)
    weight = r.parameter(f"{name}.weight", (n, x.shape[-1]), x.dtype, low=shape.low)
    own = [r.parameter(f"{name}.bias", (n,), x.dtype)] if bias else []
    added = [] if skip_bias else own
    full, gathers = _whole(x, shape), shape.sequence_parallel
    out, trained = (*full[:-1], n), weight.node is not None
    layer = Linear(name, x.dtype, x.shape, full, out, gathers, bias=bool(added), original=original, category=category)
    fed = operands(shape, layer._replace(trained=trained))
    layer = fed.layer

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        return _column_backward(r, fed, shape, gradients, (weight, *added))

    saved = fed.fed(r, x)
    node = r.node((x, weight, *added), (*saved, weight), backward, work=fed.work(r, _column(r, layer, shape)))
    return _multiplied(r, fed).by(node), own[0] if own and skip_bias else None


def row_linear(r: Recorder, x: Tensor, name: str, shape: CoreShape, *, bias: bool, original: bool = False) -> Biased:
    """``TERowParallelLinear`` with ``skip_bias_add``: h outputs, all-reduced in place or reduce-scattered."""
    shape = shape.within(name)
    h, k, dtype = shape.spec.hidden, x.shape[-1], x.dtype
    weight = r.parameter(f"{name}.weight", (h, k), dtype, low=shape.low)
    own = r.parameter(f"{name}.bias", (h,), dtype) if bias else None
    full, scatters = (*x.shape[:-1], h), shape.sequence_parallel
    trained = weight.node is not None
    layer = Linear(name, dtype, x.shape, x.shape, full, scatters=scatters, original=original, trained=trained)
    fed = operands(shape, layer)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        return _column_backward(r, fed, shape, gradients, (weight,))

    low = shape.low.element if shape.low is not None else None
    done = shape.te_ranks.row(prod(full[:-1]), h, k, dtype, shape.added(r.summed), low, trained=trained)
    saved = fed.fed(r, x)
    node = r.node((x, weight), (*saved, weight), backward, work=fed.work(r, done))
    return _multiplied(r, fed).by(node), own


def _multiplied(r: Recorder, fed: Operands) -> Tensor:
    """The forward product, of an input that is gathered for it, or with an output that is scattered."""
    layer, total = fed.layer, fed.gathered(r)
    out = fed.product(r)
    total.clear()
    if layer.scatters:
        out = r.empty((layer.out[0] // fed.shape.t, *layer.out[1:]), layer.dtype, f"{layer.name}_scattered")
    fed.multiplied()
    return out


def _column_backward(
    r: Recorder, fed: Operands, shape: CoreShape, gradients: Gradients, parameters: Sequence[Tensor]
) -> list[Tensor | Unsummed | None]:
    """Gradients of the input, or of this rank's shard, and of ``parameters``: the weight, and a bias."""
    total = [*fed.gradient(r), *fed.again(r)]
    whole = fed.product_back(r)
    layer = fed.layer
    grad = r.empty(layer.like, layer.dtype, f"grad_{layer.name}_scattered") if layer.gathers else whole
    fed.turned(r, total)
    if r.later_products is not None:
        held: list[Any] = [*total, *_operands_held(fed, gradients), *([] if fed.apart else r.unpacked)]
        total.clear()
        return [grad, *_later(r, fed, shape, held, parameters)]
    made = _weight_gradients(r, fed, shape)
    total.clear()
    fed.clear()
    fed.ended()
    return [grad, *made]


def norm_column_linear(
    r: Recorder,
    x: Tensor,
    name: str,
    norm_name: str,
    n: int,
    shape: CoreShape,
    *,
    bias: bool,
    skip_bias: bool,
    strided: bool = False,
) -> Biased:
    """``TELayerNormColumnParallelLinear``: norm and linear in one node, which saves its input, the norm's
    output (a shard with sequence parallelism) and statistics. ``strided``: its gradient comes transposed.

    In backward the norm's output ends with the weight's gradient; the gradient of the norm's output is held
    until the norm's own gradients are there.
    """
    shape = shape.within(name)
    scales = _norm_parameters(r, x, norm_name, shape)
    weight = r.parameter(f"{name}.weight", (n, x.shape[-1]), x.dtype, low=shape.low)
    own = [r.parameter(f"{name}.bias", (n,), x.dtype)] if bias else []
    added = [] if skip_bias else own
    like, full, dtype = x.shape, _whole(x, shape), x.dtype
    gathers = shape.sequence_parallel
    layer = Linear(name, dtype, like, full, (*full[:-1], n), gathers=gathers, bias=bool(added), strided=strided)
    layer = layer._replace(trained=weight.node is not None, behind_norm=True)
    fed = operands(shape, layer)
    scale_shapes = [scale.shape for scale in scales]
    statistics = _statistics(r, x, norm_name, shape)
    normed = fed.normed(r, norm_name)
    cleared = [] if normed is None else [normed]
    frees = not (gathers and layer.trained) or shape.te >= te_facts.FREES_GATHERED_NORM_SHARD
    kept = () if frees else tuple(cleared)
    r.keeps_apart(cleared)
    del normed

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        total = [*fed.gradient(r), *fed.again(r)]
        whole = fed.product_back(r)
        grad = r.empty(like, dtype, f"grad_{name}_scattered") if gathers else whole
        fed.turned(r, total)
        delays = r.later_products is not None
        if delays:
            held: list[Any] = [*total, *_operands_held(fed, gradients), *([] if fed.apart else cleared)]
            made = _later(r, fed, shape, held, (weight, *added))
        else:
            made = _weight_gradients(r, fed, shape)
        cleared.clear()
        total.clear()
        if not delays:
            fed.clear()
        grad_x = r.empty(like, dtype, f"grad_{norm_name}_input")
        grad_scales = [r.empty(one, dtype, f"grad_{norm_name}_parameter") for one in scale_shapes]
        del grad
        statistics.clear()
        if not delays:
            fed.ended()
        return [grad_x, *grad_scales, *made]

    work = behind_norm(fed.work(r, _column(r, layer, shape), normed=True), size_of(like, dtype))
    node = r.node((x, *scales, weight, *added), (x, weight, *kept), backward, work=work)
    del kept
    out = _multiplied(r, fed).by(node)
    if not layer.trained:
        cleared.clear()
    return out, own[0] if own and skip_bias else None


def norm_column_linear_showing(
    r: Recorder, x: Tensor, name: str, norm_name: str, n: int, shape: CoreShape, *, bias: bool, skip_bias: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The same of a frozen weight, with the norm's output (``return_layernorm_output``): gathered where ranks have
    shards (``return_layernorm_output_gathered``), but with user buffers. The shard is saved in any case, or its copy
    in 8 bits; of what was gathered the gradient is not read (``layernorm_linear.py``, until 2.18)."""
    shape = shape.within(name)
    scales = _norm_parameters(r, x, norm_name, shape)
    weight = r.parameter(f"{name}.weight", (n, x.shape[-1]), x.dtype, low=shape.low)
    own = [r.parameter(f"{name}.bias", (n,), x.dtype)] if bias else []
    added = [] if skip_bias else own
    like, full, dtype, gathers = x.shape, _whole(x, shape), x.dtype, shape.sequence_parallel
    layer = Linear(name, dtype, like, full, (*full[:-1], n), gathers=gathers, bias=bool(added))
    fed = operands(shape, layer._replace(trained=False, behind_norm=True))
    statistics = _statistics(r, x, norm_name, shape)
    normed = r.empty(like, dtype, norm_name)
    together = gathers and not shape.user_buffers
    shown = r.empty(full, dtype, f"{name}_gathered") if together else normed
    kept = shape.low.quantised(r, like, name, rows=True, columns=False) if shape.low is not None else None
    held: list[Tensor] = [normed] if kept is None else [*kept.rows, *kept.shared]
    total: list[Tensor] = []
    del normed, kept
    if shape.low is not None and together:
        total = shape.low.quantised(r, full, f"{name}_gathered", rows=True, columns=False).rows
    elif gathers and not together:
        total = fed.gathered(r)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        passing = fed.gradient(r)
        whole = fed.product_back(r)
        grad = r.empty(like, dtype, f"grad_{name}_scattered") if gathers else whole
        made = _weight_gradients(r, fed, shape)
        passing.clear()
        if not together:
            grad = r.empty(like, dtype, f"grad_{norm_name}_sum")
        grad_x = r.empty(like, dtype, f"grad_{norm_name}_input")
        grad_scales = [r.empty(one.shape, dtype, f"grad_{norm_name}_parameter") for one in scales]
        del grad
        statistics.clear()
        fed.ended()
        return [grad_x, *grad_scales, *made]

    work = behind_norm(fed.work(r, _column(r, fed.layer, shape)), size_of(like, dtype))
    node = r.node((x, *scales, weight, *added), (x, weight, *held), backward, outputs=2, work=work)
    held.clear()
    out = fed.product(r)
    total.clear()
    shown = Tensor(shown.storage, shown.shape, dtype, node, 1)
    return out.by(node), own[0] if own and skip_bias else None, shown


def fused_rope(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``fused_apply_rotary_pos_emb``: a fresh contiguous (s, b, a, d); saves the angles alone (a table that
    ``RotaryEmbedding`` keeps), and backward makes one fresh gradient."""
    like, dtype = x.shape, x.dtype
    return r.output((x,), (), fresh(x, f"grad_{name}"), like, dtype, name)


def cross_entropy(r: Recorder, logits: Tensor, shape: CoreShape) -> Tensor:
    """``parallel_cross_entropy`` on (s, b, v/t): the fp32 loss (s, b), which its reader transposes.

    The kernel writes the gradient over the logits, which backward then returns; since 2.18 into an fp32
    tensor, which autograd casts (``triton/cross_entropy.py``).
    """
    s, b, _ = logits.shape
    rows, whole, dtype = s * b, logits.shape, logits.dtype
    loss = r.empty((rows,), "fp32", "loss")
    parts = [r.empty((3 * rows,), "fp32", "softmax_parts")]
    counted = shape.te >= te_facts.COUNTS_TOKENS
    counts = [r.empty((1,), "int64", "tokens_not_ignored")] if counted else []
    apart = shape.te >= te_facts.LOSS_GRADIENT_APART
    written = r.empty(whole, "fp32", "grad_logits_fp32", LOGITS) if apart else logits
    if counted:
        counts.append(r.empty((1,), "int64", "tokens_not_ignored_clamped"))
        del counts[0]
    if shape.t > 1:
        parts.append(r.empty((3 * rows * shape.t,), "fp32", "softmax_parts_gathered", COMMUNICATION))
    storage = written.storage
    copies = b > 1 and s > 1 and shape.te >= te_facts.LOSS_GRADIENT_CONTIGUOUS

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        r.empty((), "fp32", "one")
        if copies:
            r.empty((s, b), "fp32", "grad_loss_contiguous")
        if apart and dtype != "fp32":
            return [r.empty(whole, dtype, "grad_logits", LOGITS)]
        return [Tensor(storage, whole, dtype)]

    size, kept = size_of(whole, dtype), size_of(whole, written.dtype)
    gathered = [Exchange("all-gather", 12.0 * rows * shape.t)] if shape.t > 1 else []
    cast = [Stream(kept + size, 1, True)] if kept != size else []
    work = Operator((Stream(2 * size + kept, 2, True), *gathered), (Stream(2 * kept, 1, True), *cast))
    loss.node = r.node((logits,), (written,), backward, work=work)
    return loss.view(s, b)


# -- parts ------------------------------------------------------------------------------------------


def _whole(x: Tensor, shape: CoreShape) -> Shape:
    """Shape of ``x`` after the all-gather of sequence parallelism, if any."""
    return (x.shape[0] * shape.t, *x.shape[1:]) if shape.sequence_parallel else x.shape


def behind_norm(done: Operator, size: int) -> Operator:
    """What the function of a norm, whose input has ``size`` bytes, and of layers behind it does."""
    return done.after((Stream(2 * size),), ()).then((), (Stream(5 * size, 2),))


def _column(r: Recorder, layer: Linear, shape: CoreShape) -> Operator:
    """A column-parallel product of the whole (s, b, k). Epilogues of the products add the bias and make its gradient
    (``general_gemm``, ``use_bias``)."""
    n, k = layer.weight
    low = shape.low.element if shape.low is not None else None
    rows, added = prod(layer.whole[:-1]), shape.added(r.summed)
    return shape.te_ranks.column(rows, n, k, layer.dtype, added, low, trained=layer.trained)


def _norm_parameters(r: Recorder, x: Tensor, name: str, shape: CoreShape) -> list[Tensor]:
    parts = ("weight", "bias") if shape.spec.norm == "layernorm" else ("weight",)
    return [r.parameter(f"{name}.{part}", x.shape[-1:], x.dtype) for part in parts]


def _statistics(r: Recorder, x: Tensor, name: str, shape: CoreShape) -> list[Tensor]:
    """``layernorm_fwd`` and ``rmsnorm_fwd`` make them before the output (``csrc/extensions/normalization.cpp``)."""
    parts = ("mean", "rsigma") if shape.spec.norm == "layernorm" else ("rsigma",)
    return [r.empty((prod(x.shape[:-1]),), "fp32", f"{name}_{part}") for part in parts]


def _operands_held(fed: Operands, gradients: Gradients) -> Gradients:
    """The output's gradient, where the product for the weight's takes it as it came."""
    layer, low = fed.layer, fed.shape.low is not None
    return [] if low or layer.scatters or layer.strided else [gradients[0]]


def _later(
    r: Recorder, fed: Operands, shape: CoreShape, held: list[Any], parameters: Sequence[Tensor]
) -> list[Tensor | Unsummed | None]:
    """The product for the weight's gradient waits for ``backward_dw``, with its operands (``WeightGradStore``)."""
    layer = fed.layer

    def product(r: Recorder) -> list[tuple[Tensor, Gradients]]:
        made = _weight_gradients(r, fed, shape, dummy=False)
        held.clear()
        fed.clear()
        fed.ended()
        whole = [one.gradient if isinstance(one, Unsummed) else one for one in made]
        return [(parameter, [one]) for parameter, one in zip(parameters, whole, strict=True)]

    assert r.later_products is not None
    r.later_products.append(product)
    return [_dummy(r, layer, shape), *[None] * (len(parameters) - 1)]


def _dummy(r: Recorder, layer: Linear, shape: CoreShape) -> Tensor | None:
    """What autograd is given in place of a weight's gradient that the product adds to ``main_grad``."""
    fresh = shape.gradient_fusion and te_facts.dummy_weight_gradient(shape.te) == "each backward"
    return r.empty(layer.weight, layer.dtype, f"grad_{layer.name}_weight_dummy") if fresh else None


def _weight_gradients(
    r: Recorder, fed: Operands, shape: CoreShape, *, dummy: bool = True
) -> list[Tensor | Unsummed | None]:
    """The wgrad GEMM's outputs: of the weight, and of the bias. ``dummy``: autograd waits for the first."""
    layer = fed.layer
    if not layer.trained:
        return [None, *([fed.bias_gradient(r)] if layer.bias and shape.low is not None else [None] * layer.bias)]
    if not shape.gradient_fusion:
        grad_w: Tensor | None = r.empty(layer.weight, layer.dtype, f"grad_{layer.name}_weight")
        fed.product_of_weight(r)
        return [grad_w, *([fed.bias_gradient(r)] if layer.bias else [])]
    made = [fed.bias_gradient(r)] if layer.bias else []
    fed.product_of_weight(r)
    return [_dummy(r, layer, shape) if dummy else None, *made]
