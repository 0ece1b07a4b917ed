"""``megatron/core/transformer/transformer_layer.py``, ``TransformerLayer.forward``: GPT's and BERT's layer, with its
attention (``attention.py``, ``SelfAttention.forward``), rotary positions (``rope_utils.py``) and MLP (``mlp.py``).

Parameters are named, and come, as in the module: Megatron's gradient buffers follow that order.
Shapes: s sequence, b micro-batch, a heads, g key/value heads, d head size, t tensor-parallel size, f the MLP's inner
width on this rank (ffn / t; twice that before SwiGLU).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache

from ...tape.events import Category
from ...values import replace
from .. import ops
from ..autograd import Gradients, Recorder, Shape, Tensor, size_of
from ..gradients import by_way_of, fresh, viewed
from ..recompute import recomputed_reentrant
from ..work import STRIDED, exchanged
from . import (
    adapters,
    fused_mlp,
    gated_delta,
    graphs,
    latent,
    local,
    mamba,
    moe,
    offload,
    replaced,
    t5,
    te,
    te_attention,
    te_context,
)
from .ends import keep_mask
from .grouped import Discard, without_output
from .shape import CoreShape

INPUT_NORM, CROSS_NORM, MLP_NORM = "input_layernorm", "pre_cross_attn_layernorm", "pre_mlp_layernorm"
QKV, PROJECTION = "self_attention.linear_qkv", "self_attention.linear_proj"
FC1, FC2 = "mlp.linear_fc1", "mlp.linear_fc2"


@lru_cache(maxsize=1024)
def dummy_gradients(shape: CoreShape) -> frozenset[Shape]:
    """Shapes of the static stand-ins for weight gradients of a layer."""
    if len(shape.kind) > 1:
        return frozenset().union(*map(dummy_gradients, kinds_of(shape)))
    if shape.kind == "M":
        return mamba.weights(shape) if shape.gradient_fusion else frozenset()
    attention = latent.dummy_gradients(shape) if shape.spec.latent_kv_rank else frozenset()
    if shape.has_delta and shape.gradient_fusion:
        attention = gated_delta.weights(shape)
    return local.dummy_gradients(shape) | attention | moe.dummy_gradients(shape)


def kinds_of(shape: CoreShape) -> tuple[CoreShape, ...]:
    """The layers of a hybrid that predict one token further, each as it is."""
    return tuple(replace(shape, kind=kind, experts=shape.experts if kind == "E" else None) for kind in shape.kind)


def layer(r: Recorder, hidden: Tensor, shape: CoreShape) -> Tensor:
    """(s, b, h), or (s/t, b, h) with sequence parallelism, to the same. Callers hold ``hidden`` until it returns."""
    begins(r, shape)
    return offload.fetched_ahead(r, _layer(r, hidden, shape))


def begins(r: Recorder, shape: CoreShape) -> None:
    """A layer begins while what the one before has sent to the host is being copied."""
    offload.on_the_way(r, _layer, shape)


def _layer(r: Recorder, hidden: Tensor, shape: CoreShape) -> Tensor:
    """A hybrid's has one block (``hybrid_layer_specs.py``, ``hybrid_stack_spec``), and identities for others."""
    if len(shape.kind) > 1:
        outer = r.prefix
        for at, one in enumerate(kinds_of(shape)):
            r.prefix = f"{outer}{at}."
            hidden = _layer(r, hidden, one)
        r.prefix = outer
        return hidden
    if shape.kind == "M":
        with graphs.captured(r, shape, "mamba"):
            return mamba.layer(r, hidden, shape)
    attention, mlp = shape.replaced
    if attention:
        hidden = replaced.block(r, hidden, replaced.ATTENTION, attention, shape)
    elif shape.kind not in ("-", "E"):
        with graphs.captured(r, shape, "attn"):
            hidden = attention_block(r, hidden, shape)
    if mlp:
        return replaced.block(r, hidden, replaced.MLP, mlp, shape)
    if shape.kind in ("*", "G"):
        return hidden
    fed = hidden if shape.kind else graphs.copied(r, hidden, shape)
    with graphs.captured(r, shape, "mlp" if shape.experts is None else "moe"):
        return mlp_block(r, fed, shape)


def attention_block(r: Recorder, hidden: Tensor, shape: CoreShape) -> Tensor:
    """``_forward_attention``: its variables hold the norm's and the attention's output until it returns."""
    with offload.group(r, hidden, "attn_norm", shape) as (hidden, commit):
        apart = bool(shape.spec.latent_kv_rank) and not shape.joint_latent_down
        normed, residual, discard = _norm(r, hidden, INPUT_NORM, shape, apart=apart)
    if shape.has_delta:
        attended, bias = gated_delta.attention(r, normed, shape), None
    elif shape.spec.latent_kv_rank:
        attended, bias = latent.attention(r, normed, shape)
    else:
        attended, bias = attention(r, normed, shape, "" if shape.implementation == "local" else f"{QKV}.layer_norm")
    discard(r, attended)
    summed = local.bias_dropout_add(r, attended, bias, residual, PROJECTION, shape)
    commit([hidden])
    if not shape.keys:
        return summed
    held = [attended]
    del attended
    return _cross_attention(r, summed, held, shape)


def _cross_attention(r: Recorder, hidden: Tensor, held: list[Tensor], shape: CoreShape) -> Tensor:
    """``_run_cross_attention``: to the output of an encoder. What ``held`` of the attention before has the variable in
    which its own output comes (since 0.20 one more, until it returns)."""
    normed, _, discard = _norm(r, hidden, CROSS_NORM, shape, apart=True)
    t5.parameters_first(r, shape)
    q, k, v = t5.query_key_value(r, normed, shape)
    context = _core_attention(r, q, k, v, t5.crossing(shape))
    del q, k, v
    attended, bias = row_linear(r, context, t5.PROJECTION, shape, bias=shape.spec.attention_output_bias)
    del context
    held.clear()
    discard(r, attended)
    return local.bias_dropout_add(r, attended, bias, hidden, t5.PROJECTION, shape)


def mlp_block(r: Recorder, hidden: Tensor, shape: CoreShape) -> Tensor:
    """``_forward_mlp``: likewise."""
    routed = shape.experts is not None
    with (
        graphs.captured(r, shape, "moe_router") if routed else nullcontext(),
        offload.group(r, hidden, "mlp_norm", shape) as (hidden, commit),
    ):
        normed, residual, discard = _norm(r, hidden, MLP_NORM, shape, apart=shape.experts is not None)
    norm_name = "" if shape.implementation == "local" else f"{FC1}.layer_norm"
    bias: Tensor | None = None
    if shape.experts is not None:
        fed = moe.layer(r, normed, shape)
    elif "mlp" in shape.recompute_modules:
        fed = recomputed_reentrant(r, lambda r, x: mlp(r, x, shape, norm_name)[0], (normed,))
    elif shape.mlp_chunks > 1:
        fed, bias = _in_chunks(r, normed, shape, norm_name)
    else:
        fed, bias = mlp(r, normed, shape, norm_name)
    discard(r, fed)
    with graphs.captured(r, shape, graphs.POSTPROCESS) if routed else nullcontext():
        out = local.bias_dropout_add(r, fed, bias, residual, FC2, shape)
    commit([hidden])
    return out


def _in_chunks(r: Recorder, x: Tensor, shape: CoreShape, norm_name: str) -> tuple[Tensor, Tensor | None]:
    """``_forward_mlp_run``: parts of the sequence, each through the MLP, whose outputs are put together."""
    s, *rest = x.shape
    rows = -(-s // min(shape.mlp_chunks, s))
    parts: list[Shape] = [(min(rows, s - at), *rest) for at in range(0, s, rows)]
    outputs = [mlp(r, part, shape, norm_name) for part in ops.split(r, x, parts, "mlp_chunk")]
    made = [out for out, _ in outputs]
    node = r.node(made, (), viewed(*made))
    return r.empty((s, *made[0].shape[1:]), x.dtype, "mlp_chunks_joined").by(node), outputs[0][1]


def norm_of_mlp(r: Recorder, x: Tensor, shape: CoreShape) -> tuple[Tensor, Discard]:
    """``pre_mlp_layernorm`` in front of experts, and what ends its output."""
    normed, _, discard = _norm(r, x, MLP_NORM, shape, apart=True)
    return normed, discard


def _norm(r: Recorder, x: Tensor, name: str, shape: CoreShape, *, apart: bool) -> tuple[Tensor, Tensor, Discard]:
    """The norm before a block, what the residual connection takes, and what ends the norm's output behind the block;
    Transformer Engine's norm is in the projection, unless it stands ``apart``. Of the latter GPT's specifications of
    layers alone let some return the residual (``has_residual``)."""
    if shape.implementation != "local" and not apart:
        return x, x, lambda r, x: None
    if shape.norm_takes_residual and shape.implementation != "local" and not shape.kind and name != CROSS_NORM:
        return *te.norm_and_residual(r, x, name, shape), lambda r, x: None
    norm = local.norm if shape.implementation == "local" else te.norm
    if "layernorm" in shape.recompute_modules:
        (out,), discard = without_output(r, (x,), lambda r, x: (norm(r, x, name, shape),))
        return out, x, discard
    return norm(r, x, name, shape), x, lambda r, x: None


def column_linear(
    r: Recorder,
    x: Tensor,
    name: str,
    norm_name: str,
    n: int,
    shape: CoreShape,
    *,
    bias: bool,
    skip_bias: bool,
) -> tuple[Tensor, Tensor | None]:
    """n outputs on this rank and the bias that is not added yet. With ``norm_name`` the norm is in it."""
    if shape.implementation == "local":
        return local.column_linear(r, x, name, n, shape, bias=bias, skip_bias=skip_bias)
    return adapters.column_linear(r, x, name, norm_name, n, shape, bias=bias, skip_bias=skip_bias)


def row_linear(
    r: Recorder, x: Tensor, name: str, shape: CoreShape, *, bias: bool, original: bool = False
) -> tuple[Tensor, Tensor | None]:
    """h outputs of what this rank has of the inputs, and the bias that is not added yet."""
    if shape.implementation == "local":
        return local.row_linear(r, x, name, shape, bias=bias)
    return adapters.row_linear(r, x, name, shape, bias=bias, original=original)


# -- attention ---------------------------------------------------------------------------------------


def attention(r: Recorder, hidden: Tensor, shape: CoreShape, norm_name: str = "") -> tuple[Tensor, Tensor | None]:
    """(s, b, h) to (s, b, h) and the bias that is not added yet. With ``norm_name`` the projection to
    queries, keys and values has the norm in it."""
    has_bias = shape.spec.attention_output_bias
    _in_order(r, shape)
    with offload.group(r, hidden, "qkv_linear", shape) as (hidden, commit):
        split = query_key_value(r, hidden, shape, norm_name)
    commit([])
    q, k, v, *gate = split
    if shape.spec.positions == "rotary" and shape.turns:
        q = rotary(r, q, "query", shape)
        k = rotary(r, k, "key", shape)
    if "core_attn" in shape.recompute_modules:
        context = recomputed_reentrant(r, lambda r, q, k, v: _core_attention(r, q, k, v, shape), (q, k, v))
        keep_mask(r, shape)
    else:
        with offload.group(r, q, "core_attn", shape) as (q, commit):
            context = _core_attention(r, q, k, v, shape)
        commit([q, k, v])
    if gate:
        context = _gated(r, context, gate.pop())
    if shape.implementation == "local":
        return row_linear(r, context, PROJECTION, shape, bias=has_bias)
    with offload.group(r, context, "attn_proj", shape) as (context, commit):
        out = row_linear(r, context, PROJECTION, shape, bias=has_bias, original=shape.saves_original)
    commit([context])
    return out


def _gated(r: Recorder, x: Tensor, gate: Tensor) -> Tensor:
    """``_apply_output_gate``, compiled (``jit_fuser``): ``x * sigmoid(gate)``, whose factors are saved."""
    return ops.elementwise(r, "attention_gated", (x, gate), (x, gate))


def _core_attention(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Tensor:
    module = local.core_attention if shape.attention == "local" else te_attention.core_attention
    return module(r, q, k, v, shape)


def _in_order(r: Recorder, shape: CoreShape) -> None:
    """``Attention.__init__`` makes core attention and the output projection before ``SelfAttention.__init__`` the other
    one: parameters, and so buckets of gradients, are in that order."""
    spec = shape.spec
    if spec.attention_sinks:
        r.parameter(te_context.SINKS, (spec.heads // shape.t,), shape.dtype)
    low = shape.within(PROJECTION).low
    r.parameter(f"{PROJECTION}.weight", (spec.hidden, spec.attention_features // shape.t), shape.dtype, low=low)
    if spec.attention_output_bias:
        r.parameter(f"{PROJECTION}.bias", (spec.hidden,), shape.dtype)
    if adapters.adapts(r, PROJECTION):
        adapters.parameters(r, PROJECTION, spec.hidden, spec.attention_features, shape, columns=False)


def query_key_value(r: Recorder, hidden: Tensor, shape: CoreShape, norm_name: str) -> tuple[Tensor, ...]:
    """``get_query_key_value_tensors``: q (s, b, a/t, d), k and v (s, b, g/t, d), and a gate like q where there is one.

    All are views of one tensor, group by group the group's queries, its key and its value; only with several
    groups of several queries the queries are copied, as no view has that shape.
    """
    spec, t = shape.spec, shape.t
    s, b, a, g, d = shape.s, shape.b, spec.heads // t, spec.kv_heads // t, spec.head_dim
    n = spec.qkv_features // t
    mixed, _ = column_linear(r, hidden, QKV, norm_name, n, shape, bias=spec.attention_bias, skip_bias=False)
    if spec.kv_heads < t:
        return _of_one_group(r, mixed, shape)
    q, *gate, k, v = _split(r, mixed, [(s, b, a, d)] * (1 + spec.attention_gate) + [(s, b, g, d)] * 2, shape)
    if a > g:
        q = _regrouped(r, q, shape, copies=g > 1)
    if spec.qk_norm:
        q, k = _normed(r, q, k, shape)
    if a > g > 1 and gate:
        gate = [ops.contiguous(r, gate.pop(), (s, b, a, d), "gate")]
    return q, k, v, *gate


def _of_one_group(r: Recorder, mixed: Tensor, shape: CoreShape) -> tuple[Tensor, Tensor, Tensor]:
    """With fewer groups than ranks a rank has a part of one: all parts are gathered, and of its group's queries it
    takes its own, beside the key and the value that several ranks share. All are views of what was gathered."""
    spec = shape.spec
    s, b, own, d = shape.s, shape.b, spec.heads // spec.kv_heads, spec.head_dim
    whole = _gathered_last(r, mixed, shape)
    del mixed
    group = _cut(r, whole, (s, b, (own + 2) * d), "qkv_gathered")
    q, k, v = _split(r, group, [(s, b, own, d), (s, b, 1, d), (s, b, 1, d)], shape)
    return _cut(r, q, (s, b, spec.heads // shape.t, d), "query_of_group"), k, v


def _gathered_last(r: Recorder, x: Tensor, shape: CoreShape) -> Tensor:
    """``all_gather_last_dim_from_tensor_parallel_region`` (``tensor_parallel/mappings.py``): parts that were received
    one behind the other are put side by side; the gradient is put the other way, and reduce-scattered."""
    like, dtype, t = x.shape, x.dtype, shape.t
    whole = (*like[:-1], t * like[-1])
    backward = by_way_of(
        ((t * like[0] * like[1], like[2]), dtype, "grad_qkv_turned", Category.COMMUNICATION_BUFFERS),
        (like, dtype, "grad_qkv_scattered", Category.COMMUNICATION_BUFFERS),
    )
    joined = r.in_turn(
        ((t * like[0], *like[1:]), dtype, "qkv_received", Category.COMMUNICATION_BUFFERS),
        (whole, dtype, "qkv_gathered"),
    )
    done = exchanged("all-gather", size_of(whole, dtype), "reduce-scatter")
    return joined.by(r.node((x,), (), backward, work=done))


def _cut(r: Recorder, x: Tensor, size: Shape, name: str) -> Tensor:
    """A slice, whose gradient fills zeros as large as ``x``."""
    node = r.node((x,), (), fresh(x, f"grad_{name}"))
    return Tensor(x.storage, size, x.dtype, node)


def _normed(r: Recorder, q: Tensor, k: Tensor, shape: CoreShape) -> tuple[Tensor, Tensor]:
    """``q_layernorm`` and ``k_layernorm`` over the features of one head; of all heads together in Megatron-Bridge's
    ``OLMoESelfAttention``, on copies (s, b, a d); without a weight for Llama 4 (``L2Norm``)."""
    names = ("self_attention.q_layernorm", "self_attention.k_layernorm")
    if shape.spec.qk_norm_over == "head_without_weight":
        return _l2_normed(r, q, "query"), _l2_normed(r, k, "key")
    if shape.spec.qk_norm_over == "heads":
        joined = (ops.contiguous(r, x, (*x.shape[:2], x.shape[2] * x.shape[3]), "heads_joined") for x in (q, k))
        first, second = (te.norm(r, x, name, shape) for x, name in zip(joined, names, strict=True))
        return first.view(*q.shape), second.view(*k.shape)
    strided = not q.shape[2] > k.shape[2] > 1
    if shape.implementation != "local":
        first = te.norm(r, q, names[0], shape, strided=strided)
        return first, te.norm(r, k, names[1], shape, strided=True)
    transposed = "core_attn" not in shape.recompute_modules
    unchanged = transposed and shape.spec.positions != "rotary"
    q = local.norm(r, q, names[0], shape, strided=strided, transposed=unchanged)
    k = local.norm(r, k, names[1], shape, strided=True, transposed=unchanged and q.shape == k.shape)
    return q, k


def _l2_normed(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``torch_norm.py``, ``L2Norm``, compiled (``jit_fuser``): saves its input and each head's reciprocal root mean."""
    like, dtype = x.shape, x.dtype
    root = r.empty((*like[:-1], 1), "fp32", f"{name}_reciprocal_root")

    return r.output((x,), (x, root), fresh(x, f"grad_{name}_normed"), like, dtype, f"{name}_normed")


def _split(r: Recorder, x: Tensor, shapes: Sequence[Shape], shape: CoreShape) -> list[Tensor]:
    """``torch.split``, whose backward concatenates.

    Transformer Engine until 2.2 has ``_SplitAlongDim``, which Megatron prefers in both implementations: it
    concatenates nothing where the gradients are neighbours in one tensor already. Since 2.3 it has another name,
    which Megatron does not import (``extensions/transformer_engine.py``).
    """
    whole, dtype, joins = x.shape, x.dtype, shape.te <= (2, 2)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        first = gradients[0]
        if joins and first is not None and all(one is not None and one.storage is first.storage for one in gradients):
            return [first.view(*whole)]
        return [r.empty(whole, dtype, "grad_qkv")]

    node = r.node((x,), (), backward, outputs=len(shapes))
    return [Tensor(x.storage, one, dtype, node, slot) for slot, one in enumerate(shapes)]


def _regrouped(r: Recorder, x: Tensor, shape: CoreShape, *, copies: bool) -> Tensor:
    """``reshape`` of (s, b, g/t, a d / g) queries to (s, b, a/t, d), and of their gradient back, which is
    a copy where core attention itself returns it: transposed."""
    out = r.empty(x.shape, x.dtype, "query") if copies else Tensor(x.storage, x.shape, x.dtype)
    whole, dtype = x.shape, x.dtype
    changed = shape.spec.qk_norm or shape.spec.positions == "rotary" or "core_attn" in shape.recompute_modules
    transposed = shape.attention == "local" and not changed

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        return [r.empty(whole, dtype, "grad_query_grouped")] if transposed else gradients

    out.node = r.node((x,), (), backward)
    return out


INDEXED = (STRIDED, STRIDED)
"""Of kernels in both directions whose operands are parts of rows, or one row for all heads."""


def rotary(r: Recorder, x: Tensor, name: str, shape: CoreShape) -> Tensor:
    """``apply_rotary_pos_emb`` on (s, b, heads, d): Transformer Engine's kernel, or operators."""
    if shape.rope_fusion:
        return te.fused_rope(r, x, name)
    turned, d = shape.spec.rotary_features, x.shape[-1]
    whole, x = x, ops.slice_last(r, x, turned, f"{name}_turned") if turned < d else x
    rest = ops.slice_last(r, whole, d - turned, f"{name}_rest")
    del whole
    rows = _packed_rows(r, name, shape) if shape.packed else None
    cos = latent.table(r, f"{name}_cos", shape, shape.spec.rotary_features)
    sin = latent.table(r, f"{name}_sin", shape, shape.spec.rotary_features)
    plain = ops.elementwise(r, f"{name}_times_cos", (x,), (cos,), issue=INDEXED)
    rotated = _rotated(r, x, name, shape.rotary_interleaved)
    rotated = ops.elementwise(r, f"{name}_times_sin", (rotated,), (sin,), issue=INDEXED)
    x = ops.add(r, plain, rotated, f"{name}_embedded")
    del plain, rotated
    x = ops.cat_last(r, x, rest, f"{name}_cat")
    del rows
    return x


def _packed_rows(r: Recorder, name: str, shape: CoreShape) -> tuple[Tensor, ...]:
    """Each token's row of the table of angles, (s, 1, 1, d) in fp32, and the variables with which it was found, as long
    as ``_apply_rotary_pos_emb_thd`` runs: seven (s,) int64 and small ones of documents (``rope_utils.py``, since June
    2026)."""
    tokens, documents = (shape.s,), (shape.packed + 1,)
    held = [r.empty(tokens, "int64", f"{name}_token")]
    held += [r.empty(documents, "int64", f"{name}_documents"), r.empty((shape.packed,), "int64", f"{name}_lengths")]
    held.append(r.empty(documents, "int64", f"{name}_local_documents"))
    summed = [r.empty((shape.packed,), "int64", f"{name}_lengths_summed")]
    summed.clear()
    document = r.in_turn(
        (tokens, "int64", f"{name}_document_above"),
        (tokens, "int64", f"{name}_document_found"),
        (tokens, "int64", f"{name}_document"),
    )
    names = ("document_start", "position", "document_length", "document_global_start", "row")
    held += [document, *(r.empty(tokens, "int64", f"{name}_{one}") for one in names)]
    return (*held, r.empty((*tokens, 1, 1, shape.spec.rotary_features), "fp32", f"{name}_angles"))


def _rotated(r: Recorder, x: Tensor, name: str, interleaved: bool) -> Tensor:
    """``_rotate_half``: halves or every second feature, the second negated, put together again."""
    half = (*x.shape[:-1], x.shape[-1] // 2)
    if interleaved:
        first, second = (ops.slice_last(r, x, half[-1], f"{name}_{part}") for part in ("even", "odd"))
    else:
        first, second = ops.split(r, x, [half, half], f"{name}_chunk")
    negated = ops.elementwise(r, f"{name}_negated", (second,), issue=INDEXED)
    return ops.cat_last(r, negated, first, f"{name}_rotated")


# -- MLP ---------------------------------------------------------------------------------------------


def mlp(r: Recorder, hidden: Tensor, shape: CoreShape, norm_name: str = "") -> tuple[Tensor, Tensor | None]:
    """(s, b, h) to (s, b, h) and the bias that is not added yet. With ``norm_name`` the first
    projection has the norm in it."""
    if fused_mlp.runs(shape):
        return fused_mlp.mlp(r, hidden, shape), None
    has_bias = shape.spec.mlp_bias
    f = shape.spec.ffn // shape.t * (2 if shape.spec.gated else 1)
    x, bias = column_linear(r, hidden, FC1, norm_name, f, shape, bias=has_bias, skip_bias=True)
    gated = shape.spec.gated
    if shape.te_activation:
        x = te.activation(r, x if bias is None else ops.add(r, x, bias, f"{FC1}_bias"), FC1, shape)
    elif shape.bias_activation_fusion and gated:
        x = local.bias_swiglu(r, x, bias, FC1)
    elif shape.bias_activation_fusion and bias is not None:
        x = local.bias_gelu(r, x, bias, FC1)
    else:
        if bias is not None:
            x = ops.add(r, x, bias, f"{FC1}_bias")
        x = local.swiglu(r, x, FC1) if gated else local.ungated(r, x, FC1, shape)
    return row_linear(r, x, FC2, shape, bias=has_bias)
