"""Parts of transformer layers as Hugging Face transformers (5.x) writes them: projections, norms, attention, rotary.

A tensor that a module's Python keeps in a variable is kept here in a variable of the same scope, which is what
ends its life at the same line. Whether a tensor without a variable, made in a call's arguments, ends within the
call or behind it depends on Python's version: such a call has one of these at most, and does not end it early by
giving its name to another tensor.
Shapes: b micro-batch, s sequence, h hidden, a heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable

from ..families import family
from ..plan.releases import (
    ATTENTION_FUNCTIONS,
    CLAMPED_SLICES,
    GROUPED_SDPA,
    LIBRARIES,
    STRIDED_SDPA,
    WIDEST_FLASH,
    Version,
)
from ..plan.spec import ModelSpec
from ..tape.events import Category
from ..values import dataclass, replace
from . import ops, selecting, work
from .autograd import Recorder, Shape, Tensor
from .fused_attention import SECOND, Release, efficient_attention, flash_attention
from .tuning import Layer as Linear, plain_linear, tuned_linear

NEWEST = LIBRARIES["transformers"].newest


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One micro-batch of one architecture on one rank."""

    spec: ModelSpec
    b: int
    s: int
    dtype: str
    flash: bool
    stored: str = ""
    """dtype of buffers, and of parameters before they are cast for a forward pass; empty if it is ``dtype``."""
    transformers: Version = NEWEST
    """The release whose code this is."""
    reentrant: bool = False
    """Recomputed layers are so with reentrance."""
    package: str = ""
    """dtype to which a package's flash attention casts queries, keys and values; empty where sdpa takes them."""

    release: Release = SECOND
    """The package's."""
    mixture: bool = False
    """The layer has experts in place of an MLP."""
    turns: bool = True
    """Queries and keys have positions, in a model some of whose layers' have none."""
    linear: bool = False
    """The layer has a gated delta net in place of attention."""
    torch: Version = CLAMPED_SLICES
    """The PyTorch that runs it."""
    kernel: str = "flash"
    """What sdpa runs without a mask (``releases.sdpa_kernel``),"""
    masked_kernel: str = ""
    """and of layers that are handed one (``releases.masked_kernel``); else empty."""
    padded: bool = False
    """Sequences have padding, by which masks differ from one to the next and are in every layer."""
    window: bool = True
    """The layer has a mask, where some layers' attention has one."""
    full: bool = False
    """The layer sees all tokens, and has sizes of its own, which ``spec`` has then."""
    full_kernel: str = ""
    """``kernel`` of such layers."""
    expert_ranks: int = 1
    """Ranks that share a layer's experts, where torchtitan's layers run."""
    tensor: int = 1
    """Ranks of tensor parallelism that share a layer there,"""
    expert_parts: int = 1
    """and a part of each expert."""
    context: int = 1
    """Ranks of context parallelism, of whose sequences each has ``s`` tokens."""
    in_flight: bool = False
    """Several micro-batches may be between forward and backward."""

    @property
    def slices_whole(self) -> bool:
        """``x[..., :]`` is a slice of all of a dimension, and no alias, with a backward of its own."""
        return self.torch < CLAMPED_SLICES

    def of_layer(self, number: int) -> LayerShape:
        """Of the layer ``number``, from 0."""
        return self.of_kind(*self.kind_of(number))

    def kind_of(self, number: int) -> tuple[bool, bool, bool, bool, bool]:
        """What ``of_kind`` is asked for by the layer ``number``, from 0."""
        spec = self.spec
        window = self.padded or not (self.masked_kernel and spec.sees_all(number))
        full = spec.is_full(number)
        return spec.has_experts(number), spec.has_positions(number), spec.is_linear(number), window, full

    def of_kind(self, mixture: bool, turns: bool, linear: bool, window: bool = True, full: bool = False) -> LayerShape:
        """Of a layer with or without experts, with or without positions, with a gated delta net or attention, with
        a mask where others have one or without, and with the sizes of layers that see all tokens or others'."""
        same = (mixture, turns, linear, window, full) == (self.mixture, self.turns, self.linear, self.window, self.full)
        if same:
            return self
        own = replace(self, mixture=mixture, turns=turns, linear=linear, window=window, full=full)
        return replace(own, spec=self.spec.of_full_layers, kernel=self.full_kernel) if full else own

    @property
    def table(self) -> int:
        """Features of a row of the tables of rotary positions."""
        return self.turned // (2 if self.tables == "half" else 1)

    @property
    def table_rows(self) -> tuple[int, int]:
        """Sequences and tokens of these tables."""
        return self.b if family(self.spec.family).tables_of_each else 1, self.s

    @property
    def tables(self) -> str:
        """Their kind (``Family.tables``)."""
        return family(self.spec.family).tables

    @property
    def table_dtype(self) -> str:
        """Their dtype; complex numbers are two of it."""
        return "fp32" if self.tables == "complex" or family(self.spec.family).wide_tables else self.dtype

    @property
    def turned(self) -> int:
        """Features of a head that rotary positions turn."""
        return self.spec.rope_head_dim or self.spec.rotary_features

    @property
    def older(self) -> bool:
        """The layer is one of before its family's was written as Llama's."""
        return self.transformers < family(self.spec.family).as_llama_since

    @property
    def masked(self) -> bool:
        """sdpa is handed a mask."""
        return self.masked_kernel != "" and self.window

    @property
    def plain(self) -> bool:
        """sdpa runs operator by operator."""
        return self.flash and not self.masked and self.kernel == "math"

    @property
    def fused(self) -> bool:
        """One kernel runs attention."""
        return self.flash and not self.plain

    @property
    def repeats(self) -> bool:
        """sdpa's caller repeats heads of keys and values, beside a mask in all releases, and where the flash kernel
        does not take them (``use_gqa_in_sdpa``); in older layers every kernel's."""
        wide = self.spec.head_dim > WIDEST_FLASH
        does = self.older if self.package else self.masked or wide or self.transformers < GROUPED_SDPA
        return does and self.spec.heads > self.spec.kv_heads

    @property
    def lays_out_queries(self) -> bool:
        """sdpa's caller copies queries."""
        return not self.package and ATTENTION_FUNCTIONS <= self.transformers < STRIDED_SDPA

    @property
    def lays_out(self) -> bool:
        """The kernel's caller copies keys and values."""
        return self.repeats or self.lays_out_queries


@dataclass(slots=True)
class Shared:
    """Tensors that one forward pass makes once and every layer reads."""

    mask: Tensor | None = None
    """Additive mask (b or 1, 1, s, s), sdpa's (1, 1, s, s) of booleans, with padding (b, 1, s, s)."""
    cos: Tensor | None = None
    sin: Tensor | None = None
    position_ids: Tensor | None = None
    """(1, s), in OPT (b, s), where layers are handed them without reading them."""
    full_mask: Tensor | None = None
    """The mask of layers without a window, where ``mask`` is that of those with one."""
    full_tables: tuple[Tensor, Tensor | None] | None = None
    """Their cosines and sines, where they have positions of their own."""

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines, where layers are handed them."""
        assert self.cos is not None
        assert self.sin is not None
        return self.cos, self.sin


Layer = Callable[[Recorder, Tensor, Shared, LayerShape], Tensor]


# -- parts ------------------------------------------------------------------------------------------


def linear(
    r: Recorder, x: Tensor, name: str, n: int, bias: bool, *, strided: bool = False, conv1d: bool = False
) -> Tensor:
    """A ``Linear`` or ``Conv1D`` called ``name`` with ``n`` outputs.

    ``strided``: the gradient arrives in a layout that matrix products have to copy.
    """
    layer = Linear(name, n, bias, strided, conv1d)
    if r.tuning is not None and r.tuning.replaces(name):
        return tuned_linear(r, x, layer)
    return plain_linear(r, x, layer)


def layer_norm(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``nn.LayerNorm``, and apex' ``MixedFusedLayerNorm``: saves its input and fp32 mean and inverse deviation."""
    weight = r.parameter(f"{name}.weight", (x.shape[-1],), x.dtype)
    bias = r.parameter(f"{name}.bias", (x.shape[-1],), x.dtype)
    return ops.layer_norm(r, x, weight, bias, name)


def rms_norm(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``LlamaRMSNorm.forward``, or a kernel."""
    if r.kernels is None or r.kernels.norm is None:
        return eager_rms_norm(r, x, name)
    return r.kernels.norm(r, x, r.parameter(f"{name}.weight", (x.shape[-1],), x.dtype), name)


def eager_rms_norm(r: Recorder, x: Tensor, name: str, *, cast_last: bool = False) -> Tensor:
    """In fp32, by Python operators; with ``cast_last`` its weight's product, too (``GptOssRMSNorm.forward``)."""
    weight = r.parameter(f"{name}.weight", (x.shape[-1],), x.dtype)
    dtype = x.dtype
    hidden = ops.cast(r, x, "fp32", f"{name}_fp32")
    variance = ops.mean_last(r, ops.power(r, hidden, f"{name}_square"), f"{name}_variance")
    deviation = f"{name}_rstd"
    hidden = ops.multiply(
        r, hidden, ops.rsqrt(r, ops.add_constant(r, variance, f"{name}_eps"), deviation), f"{name}_normed"
    )
    if cast_last:
        return ops.cast(r, ops.multiply(r, weight, hidden, f"{name}_scaled"), dtype, name)
    return ops.multiply(r, weight, ops.cast(r, hidden, dtype, f"{name}_cast"), name)


def norm(r: Recorder, x: Tensor, spec: ModelSpec, name: str) -> Tensor:
    """The spec's, or one that the family has of its own."""
    if (own := family(spec.family).norm) is not None:
        return own(r, x, name)
    return rms_norm(r, x, name) if spec.norm == "rmsnorm" else layer_norm(r, x, name)


def gelu(r: Recorder, x: Tensor) -> Tensor:
    """``aten::gelu``: one kernel that saves its input."""
    return ops.elementwise(r, "gelu", (x,), (x,), issue=(work.GELU, work.GELU_BACKWARD))


def gelu_new(r: Recorder, x: Tensor) -> Tensor:
    """``NewGELUActivation``: ``0.5 x (1 + tanh(c (x + 0.044715 x³)))`` as eight Python operators."""

    def inner() -> Tensor:
        return ops.add(r, x, ops.scale(r, ops.power(r, x, "cube"), "cube_scaled"), "inner")

    half = ops.scale(r, x, "half_input")
    factor = ops.add_constant(r, ops.tanh(r, ops.scale(r, inner(), "inner_scaled")), "one_plus_tanh")
    out = ops.multiply(r, half, factor, "gelu")
    del half, factor
    return out


def gelu_fast(r: Recorder, x: Tensor) -> Tensor:
    """``FastGELUActivation``: ``0.5 x (1 + tanh(c x (1 + 0.044715 x x)))`` as nine Python operators."""

    def cubic() -> Tensor:
        return ops.add_constant(r, ops.multiply(r, ops.scale(r, x, "square_scaled"), x, "square"), "one_plus_square")

    def inner() -> Tensor:
        scaled = ops.scale(r, x, "input_scaled")
        return ops.multiply(r, scaled, cubic(), "inner")

    half = ops.scale(r, x, "half_input")
    factor = ops.add_constant(r, ops.tanh(r, inner()), "one_plus_tanh")
    out = ops.multiply(r, half, factor, "gelu")
    del half, factor
    return out


def silu(r: Recorder, x: Tensor) -> Tensor:
    """``aten::silu``: one kernel that saves its input."""
    return ops.elementwise(r, "silu", (x,), (x,))


def relu(r: Recorder, x: Tensor) -> Tensor:
    """``aten::relu``: one kernel that saves its result."""
    return ops.elementwise(r, "relu", (x,), saves_output=True)


def activation(r: Recorder, x: Tensor, spec: ModelSpec) -> Tensor:
    """The spec's, of a gated one that of the gate."""
    return {"gelu_new": gelu_new, "gelu_fast": gelu_fast, "relu": relu, "swiglu": silu}.get(spec.activation, gelu)(r, x)


# -- attention --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Heads:
    """Queries, keys or values as (b, a, s, d), and how they lie in memory."""

    tensor: Tensor
    transposed: bool
    """A view of (b, s, a, d), which a batched product copies unless b = 1."""
    expanded: bool = False
    """One head seen as many, which a cast lays out one by one."""

    def cast(self, tensor: Tensor) -> Heads:
        """As ``tensor``, into which autocast has cast them, or themselves."""
        return Heads(tensor, self.transposed and not (self.expanded and tensor is not self.tensor))


def batched(r: Recorder, x: Heads, name: str) -> Tensor:
    """As ``matmul`` folds batch and heads into one dimension: a copy where the layout forbids a view."""
    if x.transposed and x.tensor.shape[0] > 1:
        return ops.contiguous(r, x.tensor, x.tensor.shape, f"{name}_contiguous")
    return x.tensor


def product(r: Recorder, x: Heads, y: Heads, names: tuple[str, str], shape: Shape, name: str) -> Tensor:
    """``matmul`` of heads, whose copies end with it; autocast's casts keep the layout."""
    cast_x, cast_y = ops.entering(r, "matmul", x.tensor, y.tensor, name=f"{name}_operand")
    left, right = batched(r, x.cast(cast_x), names[0]), batched(r, y.cast(cast_y), names[1])
    out = ops.matmul(r, left, right, shape, name)
    del left, right
    return out


def eager_attention(
    r: Recorder, q: Heads, k: Heads, v: Heads, shared: Shared, shape: LayerShape
) -> tuple[Tensor, Tensor]:
    """``eager_attention_forward``: scores (b, a, s, s) in memory.

    Most families take the softmax in fp32, some in the scores' dtype.
    """
    spec = shape.spec
    b, a, s, _ = q.tensor.shape
    d = v.tensor.shape[-1]
    k, v = repeated(r, k, a, "key"), repeated(r, v, a, "value")
    scores = (b, a, s, s)
    weights = ops.scale(r, product(r, q, k, ("query", "key"), scores, "scores"), "scores_scaled")
    if spec.attention_softcap is not None:
        weights = ops.scale(r, weights, "scores_divided")
        weights = ops.tanh(r, weights, "scores_tanh")
        weights = ops.scale(r, weights, "scores_capped")
    if shared.mask is not None:
        weights = ops.add_constant(r, weights, "scores_masked", shared.mask)
    known = family(spec.family)
    if spec.attention_sinks:
        _variables, weights = sunk(r, weights, v.tensor.dtype)
    elif not known.softmax_in_dtype:
        weights = ops.cast(r, softmax_fp32(r, weights), q.tensor.dtype, "probabilities")
    else:
        weights = ops.softmax(r, weights, "probabilities")
        if known.casts_probabilities:
            weights = ops.cast(r, weights, v.tensor.dtype, "probabilities_cast")
    weights = ops.dropout(r, weights, spec.attention_dropout, "attention_dropout")
    out = product(r, Heads(weights, False), v, ("", "value"), (b, a, s, d), "context")
    if b > 1:
        out = ops.copied_gradient(r, out, "context")
    out = ops.contiguous(r, out, (b, s, a * d), "context_contiguous")
    return out, weights


def sunk(r: Recorder, weights: Tensor, dtype: str) -> tuple[tuple[Tensor, ...], Tensor]:
    """Scores (b, a, s, s) with a learned one of each head behind them, less the largest, through a softmax: what stays
    in variables, and the probabilities but for that of the sink, in ``dtype`` (``models/gpt_oss/modeling_gpt_oss.py``,
    ``eager_attention_forward``)."""
    b, a, s, _ = weights.shape
    sinks = r.parameter("sinks.logits", (a,), weights.dtype).view(1, a, 1, 1)
    sinks = ops.expanded(r, sinks, (b, a, s, 1), "sinks", copies=False)
    combined = ops.cat_last(r, weights, sinks, "scores_with_sinks")
    combined = ops.add(r, combined, selecting.largest_last(r, combined), "scores_less", negated=True)
    probabilities = ops.softmax(r, combined, "probabilities_with_sinks", combined.dtype)
    scores = ops.slice_last(r, probabilities, s, "probabilities")
    return (probabilities, combined), ops.cast(r, scores, dtype, "probabilities_cast")


def repeated(r: Recorder, x: Heads, a: int, name: str) -> Heads:
    """``repeat_kv``: ``expand`` then ``reshape``, a copy unless there is one head only; nothing to ``a`` heads."""
    b, heads, s, d = x.tensor.shape
    if heads == a:
        return x
    one = heads == 1
    return Heads(ops.expanded(r, x.tensor, (b, a, s, d), f"{name}_repeated", copies=not one), one, one)


def softmax_fp32(r: Recorder, x: Tensor, name: str = "") -> Tensor:
    """``softmax(x, dtype=float32)``: one kernel for fp16 on CUDA (``SoftMax.cpp``, ``half_to_float``), else a cast."""
    name = f"{name}_" if name else ""
    if x.dtype == "fp16":
        return ops.softmax(r, x, f"{name}probabilities_fp32", "fp32")
    return ops.softmax(r, ops.cast(r, x, "fp32", f"{name}scores_fp32"), f"{name}probabilities_fp32")


def attention(
    r: Recorder, q: Heads, k: Heads, v: Heads, shared: Shared, shape: LayerShape
) -> tuple[Tensor, Tensor | None]:
    """The attention that the plan names, on (b, a, s, d), giving (b, s, a d); flash's output lies as its queries."""
    if not shape.flash:
        return eager_attention(r, q, k, v, shared, shape)
    b, a, s, d = q.tensor.shape
    q, k, v = given(r, q, k, v, shape)
    causal = shape.spec.causal
    if shape.plain:
        return plain_attention(r, q, k, v, shape), None
    mask = shared.mask if shape.masked else None
    if (shape.masked_kernel if shape.masked else shape.kernel) == "memory-efficient":
        out = efficient_attention(r, q.tensor, k.tensor, v.tensor, causal=causal, mask=mask)
        return out.view(b, s, a * d), None
    out = flash_attention(r, q.tensor, k.tensor, v.tensor, causal=causal, release=shape.release, mask=mask)
    if q.transposed:
        return out.view(b, s, a * d), None
    out = ops.contiguous(r, out, (b, s, a * d), "attention_contiguous")
    return out, None


def plain_attention(r: Recorder, q: Heads, k: Heads, v: Heads, shape: LayerShape) -> Tensor:
    """``_scaled_dot_product_attention_math`` (``aten/src/ATen/native/transformers/attention.cpp``), giving (b, s, a d):
    queries and keys are scaled, each by the root; fewer heads of keys are repeated; scores are masked in place."""
    b, a, s, d = q.tensor.shape
    query = Heads(ops.scale(r, q.tensor, "query_scaled"), q.transposed)
    mask = _mask_of_zeros(r, s) if shape.spec.causal else None
    fewer = k.tensor.shape[1] < a
    if fewer:
        k, v = (
            Heads(ops.expanded(r, x.tensor, (b, a, s, d), f"{name}_repeated", copies=True), False)
            for x, name in ((k, "key"), (v, "value"))
        )
    weights = product(
        r, query, Heads(ops.scale(r, k.tensor, "key_scaled"), k.transposed), ("query", "key"), (b, a, s, s), "scores"
    )
    weights = _safe_softmax(r, weights)
    weights = ops.dropout(r, weights, shape.spec.attention_dropout, "attention_dropout")
    out = product(r, Heads(weights, False), v, ("", "value"), (b, a, s, d), "context")
    del k, v, query, mask, weights
    if b > 1:
        out = ops.copied_gradient(r, out, "context")
    return ops.contiguous(r, out, (b, s, a * d), "context_contiguous")


def _mask_of_zeros(r: Recorder, s: int) -> Tensor:
    """Zeros, and −∞ for what comes later, (s, s) fp32 (``convert_boolean_attn_mask``)."""
    earlier = r.in_turn(((s, s), "bool", "pairs"), ((s, s), "bool", "pairs_before"))
    zero, lowest = (r.empty((), "fp32", name) for name in ("zero", "lowest"))
    mask = r.empty((s, s), "fp32", "causal_mask")
    del lowest, zero, earlier
    return mask


def _safe_softmax(r: Recorder, scores: Tensor) -> Tensor:
    """``_safe_softmax``: a softmax, and zeros for rows that see nothing, which are looked for."""
    out = ops.softmax(r, scores, "probabilities")
    if r.kernel_workspaces:
        kinds = (("softmax", "fp32"), ("rows_masked", "bool"))
        made = [r.empty(out.shape, dtype, name, Category.WORKSPACES) for name, dtype in kinds]
        del made
    return out


def given(r: Recorder, q: Heads, k: Heads, v: Heads, shape: LayerShape) -> tuple[Heads, Heads, Heads]:
    """As the kernel's caller hands them over: a package's in 16 bits (``integrations/flash_attention.py``); sdpa's of
    earlier releases with heads repeated and laid out one by one (``integrations/sdpa_attention.py``)."""
    if shape.repeats:
        k, v = repeated(r, k, shape.spec.heads, "key"), repeated(r, v, shape.spec.heads, "value")
    if shape.package:
        names = ("query", "key", "value")
        cast = [ops.cast(r, x.tensor, shape.package, f"{name}_flash") for x, name in zip((q, k, v), names, strict=True)]
        return Heads(cast[0], q.transposed), Heads(cast[1], k.transposed), Heads(cast[2], v.transposed)
    if shape.lays_out_queries:
        return laid_out(r, q, "query"), laid_out(r, k, "key"), laid_out(r, v, "value")
    return q, k, v


def laid_out(r: Recorder, x: Heads, name: str) -> Heads:
    """``x.contiguous()``."""
    if not x.transposed:
        return x
    return Heads(ops.contiguous(r, x.tensor, x.tensor.shape, f"{name}_contiguous"), False)


def weights_before(r: Recorder, shape: LayerShape, dtype: str | None = None) -> Tensor | None:
    """The attention weights that the layer before returned, which the model holds until this one returns.

    In training they are saved; in evaluation they count here, in every layer as if one were before it.
    """
    pairs = (shape.b, shape.spec.heads, shape.s, shape.s)
    return None if r.grad_enabled else r.empty(pairs, dtype or shape.dtype, "probabilities_of_layer_before")


def rotate_half(r: Recorder, x: Tensor, name: str) -> Tensor:
    half = x.shape[-1] // 2
    first = ops.slice_last(r, x, half, f"{name}_first_half")
    second = ops.slice_last(r, x, x.shape[-1] - half, f"{name}_second_half")
    return ops.cat_last(r, ops.scale(r, second, f"{name}_negated"), first, f"{name}_rotated")


def rotary_one(r: Recorder, x: Tensor, shared: Shared, name: str, made: str = "rotary") -> Tensor:
    """``x * cos + rotate_half(x) * sin``, which is called ``made``."""
    cos, sin = shared.tables
    kept = ops.multiply(r, x, cos, f"{name}_cos")
    turned = ops.multiply(r, rotate_half(r, x, name), sin, f"{name}_sin")
    return ops.add(r, kept, turned, f"{name}_{made}", issue=work.STRIDED)  # heads before tokens, and behind


def rotary(r: Recorder, q: Tensor, k: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
    """``apply_rotary_pos_emb``: five operators each."""
    q_out = rotary_one(r, q, shared, "query")
    k_out = rotary_one(r, k, shared, "key")
    return q_out, k_out


def halves(r: Recorder, x: Tensor, n: int, name: str) -> tuple[Tensor, Tensor]:
    """``x[..., :n], x[..., n:]``; all of a tensor is an alias of it."""
    d = x.shape[-1]
    first = ops.alias(r, x) if n == d else ops.slice_last(r, x, n, f"{name}_turned")
    return first, ops.slice_last(r, x, d - n, f"{name}_passed")


def rotary_of_halves(r: Recorder, first: Tensor, second: Tensor, tables: tuple[Tensor, Tensor], name: str) -> Tensor:
    """Two halves of a head's features by the same angles, (…, d / 2) each."""
    cos, sin = tables

    def turned(x: Tensor, y: Tensor, part: str, *, negated: bool) -> Tensor:
        kept = ops.multiply(r, x, cos, f"{name}_{part}_cos")
        return ops.add(r, kept, ops.multiply(r, y, sin, f"{name}_{part}_sin"), f"{name}_{part}", negated=negated)

    out = turned(first, second, "first", negated=True)
    return ops.cat_last(r, out, turned(second, first, "second", negated=False), f"{name}_rotary")
