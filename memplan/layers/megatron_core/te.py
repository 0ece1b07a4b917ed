"""Transformer Engine's modules as Megatron-Core uses them (``megatron/core/extensions/transformer_engine.py``).

What Python makes is read from ``transformer_engine/pytorch/module/linear.py``, ``layernorm_linear.py``,
``ops/basic/layer_norm.py`` and ``rmsnorm.py``, what C++ makes from ``csrc/extensions``. 16-bit, without fp8, user
buffers or a delayed weight gradient. Under gradient accumulation fusion the GEMM adds the weight's gradient
to ``main_grad`` (fp32) and returns a dummy, which ``te_facts`` says the life of.

Shapes: s sequence, b micro-batch, h hidden, a heads, d head size, t tensor-parallel size, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ...tape.events import Category
from ..autograd import Gradients, Recorder, Shape, Tensor, Unsummed, size_of
from ..work import Exchange, Operator, Stream
from . import te_facts
from .shape import CoreShape

COMMUNICATION, LOGITS = Category.COMMUNICATION_BUFFERS, Category.LOGITS

Biased = tuple[Tensor, Tensor | None]
"""An output, and the bias that its reader adds."""


def norm(r: Recorder, x: Tensor, name: str, shape: CoreShape) -> Tensor:
    """``TENorm``: LayerNorm (weight and bias) or RMSNorm (weight) over the last dimension of ``x``.

    Saves the input and, in fp32, a row's mean (LayerNorm) and reciprocal deviation.
    """
    parameters = _norm_parameters(r, x, name, shape)
    statistics, out = _normalized(r, x, name, shape)
    like, dtype = x.shape, x.dtype
    names = [parameter.shape for parameter in parameters]

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        grads = [r.empty(like, dtype, f"grad_{name}_input")]
        grads += [r.empty(one, dtype, f"grad_{name}_parameter") for one in names]
        return grads

    out.node = r.node((x, *parameters), (x, *statistics), backward)
    return out


def column_linear(
    r: Recorder, x: Tensor, name: str, n: int, shape: CoreShape, *, bias: bool, skip_bias: bool
) -> Biased:
    """``TEColumnParallelLinear``: n outputs on this rank from (s, b, h), or from a shard that is gathered.

    With sequence parallelism only the shard is saved; it is gathered again for the weight's gradient.
    """
    weight = r.parameter(f"{name}.weight", (n, x.shape[-1]), x.dtype)
    own = [r.parameter(f"{name}.bias", (n,), x.dtype)] if bias else []
    added = [] if skip_bias else own
    like, full, dtype = x.shape, _whole(x, shape), x.dtype
    k, gathers, has_bias = x.shape[-1], shape.sequence_parallel, bool(added)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        total = [r.empty(full, dtype, f"{name}_gathered", COMMUNICATION)] if gathers else []
        whole = r.empty(full, dtype, f"grad_{name}_input")
        grad = r.empty(like, dtype, f"grad_{name}_scattered") if gathers else whole
        made = _weight_gradients(r, name, (n, k), dtype, shape, has_bias)
        total.clear()
        return [grad, *made]

    node = r.node((x, weight, *added), (x, weight), backward, work=_column(r, full, n, dtype, shape))
    total = [r.empty(full, dtype, f"{name}_gathered", COMMUNICATION)] if gathers else []
    out = r.empty((*full[:-1], n), dtype, name)
    total.clear()
    return out.by(node), own[0] if own and skip_bias else None


def row_linear(r: Recorder, x: Tensor, name: str, shape: CoreShape, *, bias: bool) -> Biased:
    """``TERowParallelLinear`` with ``skip_bias_add``: h outputs, all-reduced in place or reduce-scattered."""
    h, k, dtype = shape.spec.hidden, x.shape[-1], x.dtype
    weight = r.parameter(f"{name}.weight", (h, k), dtype)
    own = r.parameter(f"{name}.bias", (h,), dtype) if bias else None
    like, full, scatters = x.shape, (*x.shape[:-1], h), shape.sequence_parallel

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        total = [r.empty(full, dtype, f"grad_{name}_gathered", COMMUNICATION)] if scatters else []
        grad = r.empty(like, dtype, f"grad_{name}_input")
        made = _weight_gradients(r, name, (h, k), dtype, shape, False)
        total.clear()
        return [grad, *made]

    work = shape.ranks.row(prod(full[:-1]), h, k, dtype, shape.added(r.summed))
    node = r.node((x, weight), (x, weight), backward, work=work)
    out = r.empty(full, dtype, name)
    if scatters:
        out = r.empty((full[0] // shape.t, *full[1:]), dtype, f"{name}_scattered")
    return out.by(node), own


def norm_column_linear(
    r: Recorder, x: Tensor, name: str, norm_name: str, n: int, shape: CoreShape, *, bias: bool, skip_bias: bool
) -> Biased:
    """``TELayerNormColumnParallelLinear``: norm and linear in one node, which saves its input, the norm's
    output (a shard with sequence parallelism) and statistics.

    In backward the norm's output ends with the weight's gradient; the gradient of the norm's output is held
    until the norm's own gradients are there.
    """
    scales = _norm_parameters(r, x, norm_name, shape)
    weight = r.parameter(f"{name}.weight", (n, x.shape[-1]), x.dtype)
    own = [r.parameter(f"{name}.bias", (n,), x.dtype)] if bias else []
    added = [] if skip_bias else own
    like, full, dtype = x.shape, _whole(x, shape), x.dtype
    k, gathers, has_bias = x.shape[-1], shape.sequence_parallel, bool(added)
    scale_shapes = [scale.shape for scale in scales]
    statistics, normed = _normalized(r, x, norm_name, shape)
    cleared = [normed]
    frees = not gathers or te_facts.frees_gathered_norm_shard(shape.te)
    kept = () if frees else (normed,)
    del normed

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        total = [r.empty(full, dtype, f"{name}_gathered", COMMUNICATION)] if gathers else []
        whole = r.empty(full, dtype, f"grad_{name}_input")
        grad = r.empty(like, dtype, f"grad_{name}_scattered") if gathers else whole
        made = _weight_gradients(r, name, (n, k), dtype, shape, has_bias)
        cleared.clear()
        total.clear()
        grad_x = r.empty(like, dtype, f"grad_{norm_name}_input")
        grad_scales = [r.empty(one, dtype, f"grad_{norm_name}_parameter") for one in scale_shapes]
        del grad
        statistics.clear()
        return [grad_x, *grad_scales, *made]

    column, size = _column(r, full, n, dtype, shape), size_of(like, dtype)
    assert column.forward is not None
    assert column.backward is not None
    work = Operator((Stream(2 * size), *column.forward), (*column.backward, Stream(5 * size, 2)))
    node = r.node((x, *scales, weight, *added), (x, weight, *kept), backward, work=work)
    del kept
    total = [r.empty(full, dtype, f"{name}_gathered", COMMUNICATION)] if gathers else []
    out = r.empty((*full[:-1], n), dtype, name)
    total.clear()
    return out.by(node), own[0] if own and skip_bias else None


def fused_rope(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``fused_apply_rotary_pos_emb``: a fresh contiguous (s, b, a, d); saves the angles alone (a table that
    ``RotaryEmbedding`` keeps), and backward makes one fresh gradient."""
    like, dtype = x.shape, x.dtype
    return r.output((x,), (), lambda r, gradients: [r.empty(like, dtype, f"grad_{name}")], like, dtype, name)


def cross_entropy(r: Recorder, logits: Tensor, shape: CoreShape) -> Tensor:
    """``parallel_cross_entropy`` on (s, b, v/t): the fp32 loss (s, b), which its reader transposes.

    The kernel writes the gradient over the logits, which backward then returns; since 2.18 into an fp32
    tensor, which autograd casts (``triton/cross_entropy.py``).
    """
    s, b, _ = logits.shape
    rows, whole, dtype = s * b, logits.shape, logits.dtype
    loss = r.empty((rows,), "fp32", "loss")
    parts = [r.empty((3 * rows,), "fp32", "softmax_parts")]
    counted = te_facts.counts_tokens(shape.te)
    counts = [r.empty((1,), "int64", "tokens_not_ignored")] if counted else []
    apart = te_facts.loss_gradient_apart(shape.te)
    written = r.empty(whole, "fp32", "grad_logits_fp32", LOGITS) if apart else logits
    if counted:
        counts.append(r.empty((1,), "int64", "tokens_not_ignored_clamped"))
        del counts[0]
    if shape.t > 1:
        parts.append(r.empty((3 * rows * shape.t,), "fp32", "softmax_parts_gathered", COMMUNICATION))
    storage = written.storage
    copies = b > 1 and s > 1 and te_facts.loss_gradient_contiguous(shape.te)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        one = r.empty((), "fp32", "one")
        del one
        if copies:
            contiguous = r.empty((s, b), "fp32", "grad_loss_contiguous")
            del contiguous
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


def _column(r: Recorder, whole: Shape, n: int, dtype: str, shape: CoreShape) -> Operator:
    """A column-parallel product of the whole (s, b, k). Epilogues of the products add the bias and make its gradient
    (``general_gemm``, ``use_bias``)."""
    return shape.ranks.column(prod(whole[:-1]), n, whole[-1], dtype, shape.added(r.summed))


def _norm_parameters(r: Recorder, x: Tensor, name: str, shape: CoreShape) -> list[Tensor]:
    parts = ("weight", "bias") if shape.spec.norm == "layernorm" else ("weight",)
    return [r.parameter(f"{name}.{part}", x.shape[-1:], x.dtype) for part in parts]


def _normalized(r: Recorder, x: Tensor, name: str, shape: CoreShape) -> tuple[list[Tensor], Tensor]:
    """``layernorm_fwd`` and ``rmsnorm_fwd``: statistics before the output (``csrc/extensions/normalization.cpp``)."""
    rows = 1
    for dim in x.shape[:-1]:
        rows *= dim
    parts = ("mean", "rsigma") if shape.spec.norm == "layernorm" else ("rsigma",)
    statistics = [r.empty((rows,), "fp32", f"{name}_{part}") for part in parts]
    return statistics, r.empty(x.shape, x.dtype, name)


def _weight_gradients(
    r: Recorder, name: str, weight: Shape, dtype: str, shape: CoreShape, bias: bool
) -> list[Tensor | Unsummed | None]:
    """The wgrad GEMM's outputs: of the weight, and of the bias in the GEMM's output dtype."""
    if not shape.gradient_fusion:
        grad_w: Tensor | None = r.empty(weight, dtype, f"grad_{name}_weight")
        return [grad_w, *([r.empty(weight[:1], dtype, f"grad_{name}_bias")] if bias else [])]
    made: list[Tensor | Unsummed | None] = []
    if bias:
        wide = r.empty(weight[:1], "fp32", f"grad_{name}_bias_fp32")
        made.append(Unsummed(Tensor(wide.storage, wide.shape, dtype), weight[:1], f"grad_{name}_bias"))
        del wide
    fresh = te_facts.dummy_weight_gradient(shape.te) == "each backward"
    made.insert(0, r.empty(weight, dtype, f"grad_{name}_weight_dummy") if fresh else None)
    return made
