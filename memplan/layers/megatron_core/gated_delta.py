"""Gated delta nets in Megatron-Core: ``ssm/gated_delta_net/gdn.py`` (``GatedDeltaNet.forward``) and ``common.py``
(``_GDNBase``), over the kernels of flash-linear-attention (``layers/gated_delta.py``), or in deterministic mode over
PyTorch's operators (``chunked``).

What the projection gives is saved whole: the convolution, which is made again in backward, and the compiled function
that prepares the rule's inputs (``jit_fuser``) read parts of it. The gated norm saves its input, the norm and the gate.
AOTAutograd decides what compiled functions save: inputs, not what is computed of them.

Shapes: s sequence, b micro-batch; on this rank: k key heads of d features, v value heads of e features,
m = 2 k d + v e channels of the convolution.

The gated delta rule in PyTorch's own operators, chunk by chunk, as Megatron-Core runs it in deterministic mode
(``megatron/core/ssm/gated_delta_net``, ``torch_chunk_gated_delta_rule``). Everything is in fp32 but what enters and
leaves; rows of each chunk's inverse are written one after the other into one tensor (``CopySlices``).

Shapes: b micro-batch, s tokens, a heads, d and e features of a key and of a value, c chunks of 64 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

from ...values import replace
from .. import ops
from ..autograd import Gradients, Recorder, Shape, Tensor, Unsummed, incoming, size_of
from ..gated_delta import CHUNK, Sizes, convolution, rule
from ..gradients import by_way_of, each, fresh
from ..work import Operator, Stream
from . import mamba, te
from .grouped import without_output
from .shape import CoreShape


def chunked(r: Recorder, given: Sequence[Tensor]) -> Tensor:
    """Queries and keys (b, s, a, d), values (b, s, a, e), logarithms of decays and steps (b, s, a) to (b, s, a, e)."""
    return _read(r, _by_chunks(r, given), given[2].shape, given[2].dtype)


def _by_chunks(r: Recorder, given: Sequence[Tensor]) -> list[Tensor]:
    """Queries, keys, values and what ``_factors`` makes: (b, a, c, 64, …)."""
    q, k, v, beta, g = _wide(r, given)
    b, a, s = q.shape[:3]
    c = -(-s // CHUNK)
    size = (b, a, c * CHUNK)

    def padded(x: Tensor, name: str) -> Tensor:
        like = x.shape
        return r.empty((*size, *like[3:]), "fp32", f"{name}_padded").by(
            r.node((x,), (), lambda r, gradients: [r.empty(like, "fp32", f"grad_{name}_padded")])
        )

    q = padded(q, "query")
    k = padded(k, "key")
    v = padded(v, "value")
    beta = padded(beta, "beta")
    g = padded(g, "decay")
    q = ops.scale(r, q, "query_scaled")
    steps = beta.view(*size, 1)
    del beta
    of_values = ops.multiply(r, v, steps, "value_beta")
    of_keys = ops.multiply(r, k, steps, "key_beta")
    del steps
    q, k, v, of_keys, of_values = (x.view(b, a, c, CHUNK, x.shape[-1]) for x in (q, k, v, of_keys, of_values))
    decay = [g.view(b, a, c, CHUNK)]
    del g
    return [q, k, *_factors(r, k, of_keys, of_values, decay)]


def _wide(r: Recorder, given: Sequence[Tensor]) -> list[Tensor]:
    """Heads before tokens, in fp32."""
    q, k, v, g, beta = given
    named = {"query": q, "key": k, "value": v, "beta": beta, "decay": g}
    wide = []
    for name, x in named.items():
        b, s, a, *rest = x.shape
        turned = x.view(b, a, s, *rest)
        if 1 not in (s, a):
            turned = ops.contiguous(r, x, (b, a, s, *rest), f"{name}_by_head")
        wide.append(ops.cast(r, turned, "fp32", f"{name}_fp32"))
        del turned
    return wide


def _factors(r: Recorder, k: Tensor, of_keys: Tensor, of_values: Tensor, decay: list[Tensor]) -> list[Tensor]:
    """Values and keys that decay within each chunk, decays and what they are between two of its tokens."""
    b, a, c, _, d = k.shape
    square, head = (b, a, c, CHUNK, CHUNK), (b, a, c, CHUNK)
    mask = [_triangle(r)]
    g = _cumulative(r, decay.pop())
    between = _subtracted(r, g.view(*head, 1), g.view(*head[:3], 1, CHUNK), square, "decay_between")
    between = _lower(r, between, "decay_lower")
    between = ops.elementwise(r, "decay_exp", (between,), saves_output=True)
    between = _lower(r, between, "decay_mask")
    inverse = ops.matmul(r, of_keys, k, square, "keys_by_keys")
    inverse = ops.multiply(r, inverse, between, "keys_decayed")
    inverse = _filled(r, inverse, mask[0])
    inverse = ops.scale(r, inverse, "inverse")
    inverse = _inverted(r, inverse)
    eye = [r.empty((CHUNK, CHUNK), "fp32", "eye")]
    inverse = ops.add_constant(r, inverse, "inverse_and_eye")
    eye.clear()
    values = ops.matmul(r, inverse, of_values, of_values.shape, "values_of_chunks")
    grown = ops.elementwise(r, "decay_of_tokens", (g,), saves_output=True).view(*head, 1)
    rows = ops.multiply(r, of_keys, grown, "keys_grown")
    del grown
    keys = ops.matmul(r, inverse, rows, (*head, d), "keys_of_chunks")
    return [values, keys, g, between]


def _inverted(r: Recorder, x: Tensor) -> Tensor:
    """Row i of every chunk's matrix, from the rows above it."""
    *rest, n, _ = x.shape
    for i in range(1, n):
        row = _part(r, _part(r, x, (*rest, n), "row"), (*rest, i), "row_left")
        row = ops.contiguous(r, row, row.shape, "row_cloned")
        above = _part(r, _part(r, x, (*rest, i, n), "rows_above"), (*rest, i, i), "rows_above_left")
        above = ops.contiguous(r, above, above.shape, "rows_above_cloned")
        x = _assigned(r, x, ops.add(r, row, _summed(r, row, above, (*rest, i)), "row_added"), "inverse")
    return x


def _summed(r: Recorder, row: Tensor, above: Tensor, size: Shape) -> Tensor:
    """``(row.unsqueeze(-1) * above).sum(-2)``."""
    whole = above.shape
    products = ops.multiply(r, row.view(*size, 1), above, "row_products")
    return r.empty(size, "fp32", "row_summed").by(
        r.node((products,), (), lambda r, gradients: [incoming(gradients).alias(*whole)])
    )


def _read(r: Recorder, whole: list[Tensor], like: Shape, dtype: str) -> Tensor:
    """What queries of each chunk read of the state before it and of the chunk itself; each chunk leaves another state.
    Variables of the last chunk live until the end."""
    q, k, v, keys, g, decay = whole
    whole.clear()
    (b, s, a, e), c, d = like, q.shape[2], q.shape[-1]
    rows, square = (b, a, CHUNK), (b, a, CHUNK, CHUNK)
    state = r.empty((b, a, d, e), "fp32", "state")
    out = r.empty((b, a, c, CHUNK, e), "fp32", "rule_out")
    mask = _triangle(r)
    for _ in range(c):
        q_i, k_i, v_i = (_part(r, x, (*rows, x.shape[-1]), n) for x, n in ((q, "query"), (k, "key"), (v, "value")))
        scores = ops.matmul(r, q_i, k_i, square, "scores")
        scores = ops.multiply(r, scores, _part(r, decay, square, "decay_mask"), "scores_decayed")
        scores = _filled(r, scores, mask, in_place=True)
        old = ops.matmul(r, _part(r, keys, (*rows, d), "keys_of_chunk"), state, (*rows, e), "values_old")
        new = _subtracted(r, v_i, old, (*rows, e), "values_new")
        grown = ops.elementwise(r, "decay_exp", (_part(r, g, rows, "decay").view(*rows, 1),), saves_output=True)
        turned = ops.multiply(r, q_i, grown, "query_decayed")
        del grown
        between = ops.matmul(r, turned, state, (*rows, e), "read_of_state")
        del turned
        out = _assigned(r, out, _added(r, between, scores, new, (*rows, e)), "rule_out")
        state = _next(r, state, (k_i, new, g))
    del state
    out = out.view(b, a, c * CHUNK, e)
    if s % CHUNK:
        out = _part(r, out, (b, a, s, e), "rule")
    turned = out.view(*like) if 1 in (s, a) else ops.contiguous(r, out, like, "rule_contiguous")
    return ops.cast(r, turned, dtype, "rule_cast")


def _added(r: Recorder, between: Tensor, scores: Tensor, new: Tensor, size: Shape) -> Tensor:
    return ops.add(r, between, ops.matmul(r, scores, new, size, "read_of_chunk"), "read")


def _next(r: Recorder, state: Tensor, of_chunk: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The state decays, and takes the chunk's keys and values."""
    (k, new, g), (b, a) = of_chunk, state.shape[:2]
    rows = (b, a, CHUNK)
    last = _part(r, _part(r, g, rows, "decay"), (b, a), "decay_last").view(b, a, 1, 1)
    last = ops.elementwise(r, "decay_last_exp", (last,), saves_output=True)
    kept = ops.multiply(r, state, last, "state_decayed")
    del last
    left = _part(r, _part(r, g, rows, "decay"), (b, a), "decay_last").view(b, a, 1)
    left = _subtracted(r, left, _part(r, g, rows, "decay"), rows, "decay_left")
    left = ops.elementwise(r, "decay_left_exp", (left,), saves_output=True)
    written = ops.multiply(r, k, left.view(*rows, 1), "keys_decayed")
    del left
    taken = ops.matmul(r, written, new, state.shape, "state_taken")
    return ops.add(r, kept, taken, "state_next")


# -- operators that only this has ------------------------------------------------------------------------


def _part(r: Recorder, x: Tensor, size: Shape, name: str) -> Tensor:
    """A slice or one index of ``x``, whose gradient fills zeros as large as ``x``."""
    node = r.node((x,), (), fresh(x, f"grad_{name}_part"))
    return Tensor(x.storage, size, x.dtype, node)


def _assigned(r: Recorder, base: Tensor, x: Tensor, name: str) -> Tensor:
    """``base[…] = x``: in backward ``CopySlices`` copies the whole gradient, and its part, in place of which the whole
    then has zeros, if anything was there before that has a gradient."""
    whole, part, before = base.shape, x.shape, base.node is not None

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        kept = r.empty(whole, "fp32", f"grad_{name}_copied")
        own = r.empty(part, "fp32", f"grad_{name}_slice")
        zeros = r.empty(part, "fp32", f"grad_{name}_zeros") if before else None
        del zeros
        return [kept if before else None, own]

    size = size_of(part, "fp32")
    node = r.node((base, x), (), backward, work=Operator((Stream(2 * size),)))
    return Tensor(base.storage, whole, base.dtype, node)


def _subtracted(r: Recorder, x: Tensor, y: Tensor, size: Shape, name: str) -> Tensor:
    """``x - y``, each of which may be broadcast."""
    shapes = x.shape, y.shape

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        gradient = incoming(gradients)
        both = gradient, r.empty(size, "fp32", f"grad_{name}_negated")
        return [
            one if prod(shape) == prod(size) else Unsummed(one, shape, f"grad_{name}_sum")
            for one, shape in zip(both, shapes, strict=True)
        ]

    return r.output((x, y), (), backward, size, "fp32", name)


def _lower(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``tril``."""
    return ops.elementwise(r, name, (x,))


def _filled(r: Recorder, x: Tensor, mask: Tensor, *, in_place: bool = False) -> Tensor:
    """``masked_fill``: saves the mask."""
    like, size = x.shape, size_of(x.shape, "fp32")

    backward = each((like, "fp32", "grad_filled"))
    if not in_place:
        return r.output((x,), (mask,), backward, like, "fp32", "filled")
    return Tensor(x.storage, like, "fp32", r.node((x,), (mask,), backward, work=Operator((Stream(2 * size),))))


def _triangle(r: Recorder) -> Tensor:
    """``triu`` of ones."""
    return r.in_turn(((CHUNK, CHUNK), "bool", "ones"), ((CHUNK, CHUNK), "bool", "triangle"))


def _cumulative(r: Recorder, x: Tensor) -> Tensor:
    """``cumsum``, whose backward is one from the other end."""
    backward = by_way_of(*((x.shape, "fp32", f"grad_decay_{made}") for made in ("flipped", "summed", "cumulative")))
    return r.output((x,), (), backward, x.shape, "fp32", "decay_cumulative")


# -- gated delta ---------------------------------------------------------------------------------------


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
        "local layers: Megatron-Core has them only with Transformer Engine": shape.implementation == "local",
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

    weights = (at.m, 1, at.kernel), dtype, "grad_convolution_weight"
    backward = each((turned, dtype, "grad_convolution_input"), weights)
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
        back = r.in_turn((at.joined, dtype, "grad_query_key_normed"), (at.joined, dtype, "grad_query_key"))
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
    like, size = x.shape, (at.s, at.b, at.features)
    x = r.output((x,), (), fresh(x, "grad_features_ordered"), like, x.dtype, "features_ordered")
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
