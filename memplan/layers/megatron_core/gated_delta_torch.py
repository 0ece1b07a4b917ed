"""The gated delta rule in PyTorch's own operators, chunk by chunk, as Megatron-Core runs it in deterministic mode
(``megatron/core/ssm/gated_delta_net``, ``torch_chunk_gated_delta_rule``). Everything is in fp32 but what enters and
leaves; rows of each chunk's inverse are written one after the other into one tensor (``CopySlices``).

Shapes: b micro-batch, s tokens, a heads, d and e features of a key and of a value, c chunks of 64 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from .. import ops
from ..autograd import Gradients, Recorder, Shape, Tensor, Unsummed, incoming, size_of
from ..gated_delta import CHUNK
from ..gradients import by_way_of, fresh
from ..work import Operator, Stream


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

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        return [r.empty(like, "fp32", "grad_filled")]

    if not in_place:
        return r.output((x,), (mask,), backward, like, "fp32", "filled")
    return Tensor(x.storage, like, "fp32", r.node((x,), (mask,), backward, work=Operator((Stream(2 * size),))))


def _triangle(r: Recorder) -> Tensor:
    """``triu`` of ones."""
    ones = [r.empty((CHUNK, CHUNK), "bool", "ones")]
    mask = r.empty((CHUNK, CHUNK), "bool", "triangle")
    ones.clear()
    return mask


def _cumulative(r: Recorder, x: Tensor) -> Tensor:
    """``cumsum``, whose backward is one from the other end."""
    backward = by_way_of(*((x.shape, "fp32", f"grad_decay_{made}") for made in ("flipped", "summed", "cumulative")))
    return r.output((x,), (), backward, x.shape, "fp32", "decay_cumulative")
