"""``megatron/core/transformer/moe/token_dispatcher.py``: tokens on their way to experts and back, sorted by
``moe_utils.py`` or by Transformer Engine (``pytorch/permutation.py``, ``triton/permutation.py``).

Shapes: T tokens of this rank, P rows that it sends, N rows that its experts have, E experts, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from ...tape.events import Category, Hold
from .. import ops
from ..autograd import Gradients, Recorder, Shape, Tensor, size_of
from ..gradients import fresh, fresh_each
from ..graph import Delayed
from ..module import hold_bytes
from ..work import NOTHING, Exchange, exchanged
from .mappings import moved
from .shape import CoreShape

COMMUNICATION = Category.COMMUNICATION_BUFFERS

Experts = Callable[[Recorder, Tensor, Tensor], Tensor]
"""From rows and their probabilities to rows."""

Dispatched = tuple[Tensor, list[Tensor]]

KEPT_UNTIL = (0, 16)
"""Megatron-Core since when the experts' output ends before rows are put in their places."""


def dispatched(
    r: Recorder, hidden: Tensor, probabilities: Tensor, chosen: Tensor, experts: Experts, shape: CoreShape
) -> Dispatched:
    """(s, b, h) through the experts that each token was sent to, to the same shape; and what ``MoELayer.forward``'s
    variables hold until it returns."""
    way = _all_gathered if shape.mixture.dispatcher == "allgather" else _all_to_all
    return way(r, hidden, probabilities, chosen, experts, shape)


# -- all-to-all ----------------------------------------------------------------------------------------


def _all_to_all(
    r: Recorder, hidden: Tensor, probabilities: Tensor, chosen: Tensor, experts: Experts, shape: CoreShape
) -> Dispatched:
    """``MoEAlltoAllTokenDispatcher``. Held are the sorted and the received rows; up to Megatron-Core 0.15, which puts
    rows in their places within ``combine``, the experts' output, too."""
    rows, own = shape.routed, hidden.shape
    flat = hidden.view(rows.own, own[-1])
    _count_rows(r, shape)
    sent, weights, order = _permuted(r, flat, probabilities, chosen, shape)
    waiting: list[Delayed] | None = [] if shape.experts is not None and shape.experts.wgrad_beside else None
    if waiting is not None:
        sent = _with_products(r, sent, waiting)
    received, arrived = _exchanged(r, sent, rows.received, shape), _exchanged(r, weights, rows.received, shape)
    r.delayed_experts = waiting
    out = _local(r, received, arrived, experts, shape)
    r.delayed_experts = None
    back = _exchanged(r, out, rows.sent, shape)
    held = [sent, weights, received, arrived]
    if shape.core < KEPT_UNTIL:
        held.append(out)
    del out
    return unpermuted(r, back, order, rows.own, shape).view(*own), held


def _with_products(r: Recorder, x: Tensor, waiting: list[Delayed]) -> Tensor:
    """``_RegisterDelayedWgradForExperts``: ``x`` itself; behind the exchange in backward come the products that wait,
    whose gradients hooks take once all are there."""

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        made = [pair for product in waiting for pair in product(r)]
        waiting.clear()
        while made:
            r.arrives(*made.pop(0))
        return gradients

    return Tensor(x.storage, x.shape, x.dtype, r.node((x,), (), backward, work=NOTHING))


def preprocessed(
    r: Recorder, hidden: Tensor, probabilities: Tensor, chosen: Tensor, shape: CoreShape
) -> tuple[Tensor, Tensor, Tensor]:
    """``dispatch_preprocess``: sorted rows, their probabilities, and what restores the order."""
    _count_rows(r, shape)
    return _permuted(r, hidden.view(shape.routed.own, hidden.shape[-1]), probabilities, chosen, shape)


def exchanged_rows(r: Recorder, x: Tensor, count: int, shape: CoreShape) -> Tensor:
    """``token_dispatch`` of one tensor, or ``token_combine``."""
    return _exchanged(r, x, count, shape)


def through_experts(r: Recorder, received: Tensor, arrived: Tensor, experts: Experts, shape: CoreShape) -> Tensor:
    """``routed_experts_compute``: rows of all ranks by local expert, the experts, and rows as they came."""
    return _local(r, received, arrived, experts, shape)


def remembered(shape: CoreShape) -> tuple[list[Hold], list[Hold]]:
    """Attributes of a layer's ``MoEAlltoAllTokenDispatcher`` until its next forward (``dispatch_preprocess``):
    probabilities and which tokens go where; and what restores their order, which backward needs, too."""
    experts = shape.experts
    if experts is None or experts.dispatcher != "alltoall":
        return [], []
    every = (shape.routed.own, shape.spec.experts)
    order = ((every[0], 2 * every[1] + 1), "int32") if experts.permute_fusion else ((shape.routed.sent,), "int64")
    parts = (every, shape.spec.router_dtype or shape.dtype), (every, "bool"), order
    probabilities, chosen, restores = (
        Hold(0, hold_bytes(size, dtype), Category.BUFFERS, f"dispatcher_{name}", size, dtype)
        for name, (size, dtype) in zip(("probabilities", "routing_map", "order"), parts, strict=True)
    )
    return [probabilities, chosen], [restores]


def _count_rows(r: Recorder, shape: CoreShape) -> None:
    """``preprocess``: how many tokens every rank has for every expert, int64, where that is not the capacity."""
    experts = shape.mixture
    ranks = experts.ep * experts.etp
    if ranks > 1 and not experts.padded:
        r.ran(Exchange("all-gather", 8.0 * shape.spec.experts * ranks, "experts"))


def _local(r: Recorder, received: Tensor, arrived: Tensor, experts: Experts, shape: CoreShape) -> Tensor:
    """``routed_experts_compute``: rows of all ranks by local expert, the experts, and rows as they came."""
    rows = shape.routed
    taken, weights = _gathered(r, received, rows.held, shape), _gathered(r, arrived, rows.held, shape)
    if shape.local_experts > 1:
        taken, weights = _sorted(r, taken, weights, shape)
    out = experts(r, taken, weights)
    if shape.local_experts > 1:
        out = _sorted_back(r, out, shape)
    return _scattered(r, out, rows.received, weights.dtype, shape)


def _permuted(
    r: Recorder, x: Tensor, probabilities: Tensor, chosen: Tensor, shape: CoreShape
) -> tuple[Tensor, Tensor, Tensor]:
    """``permute`` with probabilities: rows (P, h), their probabilities (P,) and what restores the order."""
    if shape.mixture.permute_fusion:
        return permuted_at_once(r, x, probabilities, chosen, shape.routed.sent)
    count, whole, dtype = shape.routed.sent, (prod(probabilities.shape),), probabilities.dtype
    transposed = [r.empty(probabilities.shape[::-1], "bool", "routing_map_transposed")]
    flat = r.in_turn((whole, "bool", "routing_map_sorted"), (whole, "int64", "routing_order"))
    kept = flat.view(count)
    order = r.empty((count,), "int64", "sorted_indices")
    copy = r.empty(probabilities.shape[::-1], dtype, "probabilities_transposed")

    weights = r.output(
        (probabilities,),
        (kept,),
        fresh(probabilities, "grad_probabilities_permuted"),
        (count,),
        dtype,
        "permuted_probabilities",
    )
    del copy, flat, kept
    transposed.clear()
    return _selected(r, x, order), weights, order


def _selected(r: Recorder, x: Tensor, order: Tensor) -> Tensor:
    """``index_select`` of rows: saves the indices; backward adds into zeros of the whole."""
    return r.output(
        (x,), (order,), fresh(x, "grad_permuted_tokens"), (*order.shape, x.shape[-1]), x.dtype, "permuted_tokens"
    )


def permuted_at_once(
    r: Recorder, x: Tensor, probabilities: Tensor, chosen: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``moe_permute_mask_map_forward``: saves the map of rows (T, 2 E + 1) in int32."""
    tokens, experts = probabilities.shape
    rows = r.empty((tokens, 2 * experts + 1), "int32", "row_id_map")
    r.empty((experts, -(-tokens // 1024)), "int32", "row_id_workspace")
    out = r.empty((count, x.shape[-1]), x.dtype, "permuted_tokens")
    weights = r.empty((count,), probabilities.dtype, "permuted_probabilities")
    gradients = fresh_each((x, "grad_permuted_tokens"), (probabilities, "grad_probabilities"))
    node = r.node((x, probabilities), (rows,), gradients, outputs=2)
    out.node, weights.node, weights.slot = node, node, 1
    return out, weights, rows


def unpermuted(r: Recorder, x: Tensor, order: Tensor, tokens: int, shape: CoreShape) -> Tensor:
    """``unpermute``: rows are added at their tokens' places, (T, h); saves what says where. Deterministic
    ``index_add_`` saves the rows, too, whose shape its backward takes (``derivatives.yaml``, ``expand_as(source)``)."""
    kept: tuple[Tensor, ...] = (order,)
    dtype, whole = x.dtype, (tokens, x.shape[-1])

    if not shape.mixture.permute_fusion and shape.deterministic:
        out = r.in_turn((whole, dtype, "unpermuted_zeros"), (whole, dtype, "unpermuted_tokens"))
        kept = (order, x)
    else:
        out = r.empty(whole, dtype, "unpermuted_tokens")
    return out.by(r.node((x,), kept, fresh(x, "grad_unpermuted_tokens")))


def _exchanged(r: Recorder, x: Tensor, count: int, shape: CoreShape) -> Tensor:
    """``all_to_all``: a fresh tensor in either direction, and ``x`` itself where there is one rank."""
    one = shape.mixture.ep == 1
    return x if one else moved(r, x, count, "all-to-all", ("exchanged", "grad_exchanged"), "ep")


def _gathered(r: Recorder, x: Tensor, count: int, shape: CoreShape) -> Tensor:
    """All-gather over ranks of one expert; backward reduce-scatters."""
    one = shape.mixture.etp == 1
    return x if one else moved(r, x, count, "all-gather", ("gathered", "grad_gathered"), "etp")


def _scattered(r: Recorder, x: Tensor, count: int, wide: str, shape: CoreShape) -> Tensor:
    """Reduce-scatter over ranks of one expert, in the dtype of probabilities."""
    if shape.mixture.etp == 1:
        return x
    dtype = x.dtype
    x = ops.cast(r, x, wide, "reduced_cast")
    out = moved(r, x, count, "reduce-scatter", ("reduced", "grad_reduced"), "etp")
    return ops.cast(r, out, dtype, "reduced_back")


def _sorted(r: Recorder, x: Tensor, weights: Tensor, shape: CoreShape) -> tuple[Tensor, Tensor]:
    """``sort_chunks_by_idxs``, or a transposed copy where every expert has as many rows: fresh tensors; the fused
    kernel saves a map of rows in int32."""
    fused = shape.mixture.permute_fusion and not shape.mixture.padded
    rows = [r.empty((x.shape[0],), "int32", "chunk_row_id_map")] if fused else []
    if fused:
        tokens = r.empty(x.shape, x.dtype, "sorted_tokens")
        scales = r.empty(weights.shape, weights.dtype, "sorted_probabilities")
        node = r.node((x, weights), rows, fresh_each((x, "grad_sorted"), (weights, "grad_sorted")), outputs=2)
        tokens.node, scales.node, scales.slot = node, node, 1
        return tokens, scales
    return _copied(r, x, "sorted_tokens", shape), _copied(r, weights, "sorted_probabilities", shape)


def _sorted_back(r: Recorder, x: Tensor, shape: CoreShape) -> Tensor:
    """The same of the experts' output."""
    if not shape.mixture.permute_fusion or shape.mixture.padded:
        return _copied(r, x, "tokens_in_order", shape)
    rows, like, dtype = r.empty((x.shape[0],), "int32", "chunk_row_id_map_back"), x.shape, x.dtype
    out = r.empty(like, dtype, "tokens_in_order")
    return out.by(r.node((x,), (rows,), fresh(x, "grad_restored")))


def _copied(r: Recorder, x: Tensor, name: str, shape: CoreShape) -> Tensor:
    """``split`` and ``cat``, whose gradient is put together again; or ``transpose`` and ``contiguous``, whose gradient
    is copied by the exchange before."""
    like, dtype = x.shape, x.dtype
    return r.output((x,), (), fresh(x, f"grad_{name}"), like, dtype, name)


# -- all-gather ----------------------------------------------------------------------------------------


def gather_buffer(shape: CoreShape) -> Shape:
    """The static buffer that tokens are gathered into, (T ep etp, h); ``(0,)`` if they are not."""
    experts = shape.experts
    if experts is None or experts.dispatcher != "allgather" or experts.ep * experts.etp == 1:
        return (0,)
    return (shape.routed.own * experts.ep * experts.etp, shape.spec.expert_hidden)


def _all_gathered(
    r: Recorder, hidden: Tensor, probabilities: Tensor, chosen: Tensor, experts: Experts, shape: CoreShape
) -> Dispatched:
    """``MoEAllGatherTokenDispatcher``: every rank has all tokens and takes those of its experts."""
    spec, choices, own = shape.spec, shape.experts, hidden.shape
    assert choices is not None
    ranks, local = choices.ep * choices.etp, shape.local_experts
    tokens = shape.routed.own * ranks
    flat = hidden.view(shape.routed.own, own[-1])
    if ranks > 1:
        chosen = r.empty((tokens, spec.experts), "bool", "routing_map_gathered")
        names = ("probabilities_gathered", "grad_probabilities_gathered")
        probabilities = moved(r, probabilities, tokens, "all-gather", names, "experts")
        flat = _gathered_tokens(r, flat, tokens)
    mine = r.empty((tokens, local), "bool", "local_map")
    part = _part(r, probabilities, (tokens, local))
    transposed = [r.empty((local, tokens), "bool", "routing_map_transposed")]
    whole = r.in_turn(((local * tokens,), "bool", "routing_map_sorted"), ((local * tokens,), "int64", "routing_order"))
    order = r.empty((shape.routed.held,), "int64", "sorted_indices")
    del whole
    transposed.clear()
    taken = _selected(r, flat, order)
    weights = _masked(r, part, shape.routed.held)
    del chosen
    out = experts(r, taken, weights)
    back = unpermuted(r, out, order, tokens, shape)
    if ranks > 1:
        back = _reduced(r, back, shape.routed.own, weights.dtype)
    return back.view(*own), [probabilities, flat, mine, part, weights]


def _gathered_tokens(r: Recorder, x: Tensor, tokens: int) -> Tensor:
    """Into the static buffer, in backward, too, where the gradient is summed in it."""
    like, dtype, whole = x.shape, x.dtype, (tokens, x.shape[1])
    node = r.node(
        (x,),
        (),
        lambda r, gradients: [r.outside(like, dtype, Category.TEMPORARIES, 0)],
        work=exchanged("all-gather", size_of(whole, dtype), "reduce-scatter", "experts"),
    )
    out = r.outside(whole, dtype, COMMUNICATION, 0)
    out.node = node
    return out


def _part(r: Recorder, x: Tensor, size: Shape) -> Tensor:
    """Columns of the rank's experts, copied; backward fills the whole."""
    return r.output(
        (x,),
        (),
        fresh(x, "grad_local_probabilities"),
        size,
        x.dtype,
        "local_probabilities",
    )


def _masked(r: Recorder, x: Tensor, count: int) -> Tensor:
    """``x.T.contiguous().masked_select(map.T.contiguous())``: saves both copies."""
    turned = ops.contiguous(r, x, x.shape[::-1], "local_probabilities_transposed")
    mask = r.empty(x.shape[::-1], "bool", "local_map_transposed")
    gradient = fresh(turned, "grad_probabilities_selected")
    return r.output((turned,), (turned, mask), gradient, (count,), x.dtype, "permuted_probabilities")


def _reduced(r: Recorder, x: Tensor, tokens: int, wide: str) -> Tensor:
    """Reduce-scatter over all ranks, in the dtype of probabilities."""
    dtype = x.dtype
    x = ops.cast(r, x, wide, "unpermuted_cast")
    out = moved(r, x, tokens, "reduce-scatter", ("tokens_scattered", "grad_tokens_gathered"), "experts")
    return ops.cast(r, out, dtype, "tokens_scattered_back")
