"""``MoEFlexTokenDispatcher`` (``token_dispatcher.py``) over DeepEP (``_DeepepManager``) or HybridEP
(``_HybridEPManager``), whose kernels send every token once to each rank that has experts for it (``fused_a2a.py``).

What DeepEP makes in PyTorch is read from ``csrc/legacy/buffer.hpp``, HybridEP from ``csrc/hybrid_ep/hybrid_ep.cu`` and
``executor/executor.cu`` of its branch; the buffers that both hold outside of PyTorch: ``flex_buffers``.

Shapes: T tokens of this rank, k experts of a token, E experts, e of them here, R expert-parallel ranks, N tokens that
arrive, P rows that the rank's experts have, h hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from math import ceil, comb

from ...values import dataclass
from .. import ops
from ..autograd import Backward, Gradients, Recorder, Tensor, size_of
from ..gradients import fresh, fresh_each
from ..work import Exchange, Operator, Stream, Work
from . import dispatch
from .shape import CoreShape

NVLINK_PEERS = 8
"""Ranks of a node, as DeepEP and HybridEP's handles count them (``LEGACY_NUM_MAX_NVL_PEERS``)."""


def arriving(shape: CoreShape) -> int:
    """N: tokens of all ranks that have an expert here, where each chooses k of E with equal chances. With more rows
    than the mean there are as many times more of them, but never more than all."""
    experts, spec = shape.mixture, shape.spec
    k, e, every = spec.expert_top_k, shape.local_experts, spec.experts
    some = 1 - comb(every - e, k) / comb(every, k)
    rows_of_one = k * e / every / some
    return min(shape.routed.own * experts.ep, ceil(shape.routed.held / rows_of_one))


def dispatched(
    r: Recorder, hidden: Tensor, probabilities: Tensor, chosen: Tensor, experts: dispatch.Experts, shape: CoreShape
) -> dispatch.Dispatched:
    """(s, b, h) through the experts that each token was sent to, to the same shape; held are the tokens that arrived,
    and their probabilities."""
    own = hidden.shape
    flat = hidden.view(shape.routed.own, own[-1])
    way = _deep_ep if shape.mixture.dispatcher == "deepep" else _hybrid_ep
    out, held = way(r, flat, probabilities, experts, shape)
    return out.view(*own), held


# -- in parts ------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Flight:
    """What a dispatcher's manager has of tokens on their way (``_comm_manager``), until they are back."""

    indices: Tensor | None = None
    """Of the experts that tokens were sent to, and of those that are here; DeepEP's."""
    handle: list[Tensor] = field(default_factory=list)


def preprocessed(r: Recorder, hidden: Tensor, probabilities: Tensor, shape: CoreShape) -> tuple[Tensor, Tensor, Flight]:
    """``dispatch_preprocess``: tokens (T, h), and probabilities of the chosen experts, or of all."""
    flight = Flight()
    if shape.mixture.dispatcher == "deepep":
        probabilities, flight.indices = _chosen(r, probabilities, shape)
    return hidden.view(shape.routed.own, hidden.shape[-1]), probabilities, flight


def sent(r: Recorder, tokens: Tensor, probabilities: Tensor, flight: Flight, shape: CoreShape) -> tuple[Tensor, Tensor]:
    """``token_dispatch``: what arrived, and its probabilities."""
    if flight.indices is None:
        received, weights, flight.handle = _sent_by_hybrid_ep(r, tokens, probabilities, shape)
        return received, weights
    wide = ops.cast(r, probabilities, "fp32", "token_probabilities_fp32")
    n = arriving(shape)
    flight.handle = _layout(r, shape, n)
    received, weights, flight.indices = _sent(r, tokens, wide, flight.indices, n, flight.handle, shape)
    return received, weights


def through_experts(
    r: Recorder, received: Tensor, weights: Tensor, experts: dispatch.Experts, flight: Flight, shape: CoreShape
) -> Tensor:
    """``routed_experts_compute``."""
    if flight.indices is None:
        return experts(r, received, weights)
    return _through_sorted(r, received, weights, flight.indices, experts, shape)


def back(r: Recorder, x: Tensor, flight: Flight, shape: CoreShape) -> Tensor:
    """``token_combine``: (T, h)."""
    out = _combined(r, x, flight.handle, shape)
    flight.indices, flight.handle = None, []
    return out


# -- DeepEP --------------------------------------------------------------------------------------------


def _deep_ep(
    r: Recorder, x: Tensor, probabilities: Tensor, experts: dispatch.Experts, shape: CoreShape
) -> dispatch.Dispatched:
    n = arriving(shape)
    handle = _layout(r, shape, n)
    received, few, indices = _sent(r, x, *_top_k(r, probabilities, shape), n, handle, shape)
    out = _through_sorted(r, received, few, indices, experts, shape)
    return _combined(r, out, handle, shape), [received, few]


def _through_sorted(
    r: Recorder, received: Tensor, few: Tensor, indices: Tensor, experts: dispatch.Experts, shape: CoreShape
) -> Tensor:
    """Tokens (N, h) in rows by expert, and back."""
    whole = _multihot(r, few, indices, shape)
    del indices
    taken, weights, order = dispatch.permuted_at_once(r, received, whole, whole, shape.routed.held)
    del whole
    out = experts(r, taken, weights)
    del taken, weights
    return dispatch.unpermuted(r, out, order, arriving(shape), shape)


def _top_k(r: Recorder, probabilities: Tensor, shape: CoreShape) -> tuple[Tensor, Tensor]:
    """The chosen experts' probabilities (T, k) in fp32, and their indices."""
    values, indices = _chosen(r, probabilities, shape)
    return ops.cast(r, values, "fp32", "token_probabilities_fp32"), indices


def _chosen(r: Recorder, probabilities: Tensor, shape: CoreShape) -> tuple[Tensor, Tensor]:
    """``setup_metadata``: the chosen experts' probabilities (T, k), and their indices in int64."""
    dtype, few = probabilities.dtype, (probabilities.shape[0], shape.spec.expert_top_k)
    values, indices = r.empty(few, dtype, "token_probabilities"), r.empty(few, "int64", "token_indices")

    values.node = r.node((probabilities,), (indices,), fresh(probabilities, "grad_token_probabilities"))
    return values, indices


def _layout(r: Recorder, shape: CoreShape, n: int) -> list[Tensor]:
    """``get_dispatch_layout`` and what ``dispatch`` hands on to ``combine`` and to both backward passes."""
    ranks, tokens = shape.mixture.ep, shape.routed.own
    nodes = max(1, ranks // NVLINK_PEERS)
    handle = [r.empty((tokens, ranks), "bool", "tokens_in_ranks")]
    if nodes == 1:
        handle += [r.empty((n,), "int32", "received_indices"), r.empty((tokens, ranks), "int32", "send_head")]
    else:
        handle.append(r.empty((8 * n,), "bool", "received_meta"))  # two int32 of each token
        handle.append(r.empty((tokens, nodes), "int32", "send_head_of_nodes"))
        arrived = min(n, tokens * nodes)
        handle.append(r.empty((arrived, NVLINK_PEERS), "int32", "send_head_in_node"))
    return handle


def _sent(
    r: Recorder, x: Tensor, few: Tensor, indices: Tensor, n: int, handle: list[Tensor], shape: CoreShape
) -> tuple[Tensor, Tensor, Tensor]:
    """``FusedDispatch``: tokens (N, h), the probabilities of their experts here and their indices (N, k)."""
    size = (n, few.shape[1])
    received = r.empty((n, x.shape[1]), x.dtype, "tokens_received")
    arrived, where = r.empty(size, "int64", "received_token_indices"), r.empty(size, "fp32", "received_probabilities")
    del indices

    node = r.node((x, few), handle, _gradients_sent(x, few), outputs=2, work=_exchange(received, shape))
    received.node, where.node, where.slot = node, node, 1
    return received, where, arrived


def _multihot(r: Recorder, few: Tensor, indices: Tensor, shape: CoreShape) -> Tensor:
    """``_indices_to_multihot``: probabilities (N, e) in fp32; saves where they came from and where they go."""
    size, like, rows = (few.shape[0], shape.local_experts), few.shape, shape.routed.held
    zeros = [r.empty(size, "int64", "multihot_map")]
    out = r.empty(size, "fp32", "multihot_probabilities")
    mask = [r.empty(like, "bool", "received_mask")]
    columns, lines = r.empty((rows,), "int64", "expert_of_row"), r.empty((rows,), "int64", "token_of_row")
    taken = [r.empty((rows,), "int64", f"place_of_row_{part}") for part in ("token", "choice")]
    values = [r.empty((rows,), "fp32", "row_probabilities")]
    values.clear()
    chosen = r.empty(size, "bool", "multihot_map_bool")
    zeros.clear()
    mask.clear()
    del chosen, indices

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        grad = r.in_turn(((rows,), "fp32", "grad_row_probabilities"), (like, "fp32", "grad_received_probabilities"))
        return [grad]

    return out.by(r.node((few,), (columns, lines, *taken), backward))


# -- HybridEP ------------------------------------------------------------------------------------------


def _hybrid_ep(
    r: Recorder, x: Tensor, probabilities: Tensor, experts: dispatch.Experts, shape: CoreShape
) -> dispatch.Dispatched:
    """``dispatch_with_permute`` and ``combine_with_unpermute``: rows arrive sorted by expert."""
    taken, weights, handle = _sent_by_hybrid_ep(r, x, probabilities, shape)
    return _combined(r, experts(r, taken, weights), handle, shape), [taken, weights]


def _sent_by_hybrid_ep(
    r: Recorder, x: Tensor, probabilities: Tensor, shape: CoreShape
) -> tuple[Tensor, Tensor, list[Tensor]]:
    tokens, ranks, count = shape.routed.own, shape.mixture.ep, shape.routed.held
    everyone = (tokens * ranks, shape.local_experts)
    wide = ops.cast(r, probabilities, "fp32", "token_probabilities_fp32")
    handle = [
        r.empty((tokens, ranks), "int32", "sparse_to_dense_map"),
        r.empty(everyone, "bool", "local_expert_routing_map"),
        r.empty(everyone, "int32", "dense_to_expert_map"),
    ]
    taken = r.empty((count, x.shape[1]), x.dtype, "rows_received")
    weights = r.empty((count,), "fp32", "received_probabilities")
    forward, backward = _hybrid_exchanges(taken, shape, scored=True)
    work = Operator((*_hybrid_metadata(shape), *forward), backward)
    node = r.node((x, wide), handle, _gradients_sent(x, wide), outputs=2, work=work)
    taken.node, weights.node, weights.slot = node, node, 1
    return taken, weights, handle


def _hybrid_metadata(shape: CoreShape) -> Work:
    """``metadata_preprocessing``: every rank gets which experts all tokens go to, a byte for each, and looks through
    them twice for the places of tokens on ranks and of rows by expert (``executor.cu``, ``allgather_routing_map``;
    ``hybrid_ep_backend.cuh``, ``scan``)."""
    tokens, ranks, spec = shape.routed.own, shape.mixture.ep, shape.spec
    whole = float(tokens * ranks * spec.experts)
    made = 4 * tokens * ranks + 5 * tokens * ranks * shape.local_experts
    return Exchange("all-to-all", whole, "ep"), Stream(2 * whole + made, 2)


def _hybrid_exchanges(rows: Tensor, shape: CoreShape, *, scored: bool) -> tuple[Work, Work]:
    """Tokens to ``rows`` by expert, and back, in either direction of autograd. In kernels of their own HybridEP copies
    between its buffer and rows by expert (``executor.cu``, ``dispatch_postprocess``, ``combine_preprocess``).
    ``scored``: with each token go its probabilities for all experts of the NVLink domain in fp32, and back come their
    gradients, rows of zeros but for the rank's own (``hybrid_ep_backend.cuh``, ``S2G_warp_group_device_function``;
    ``permute.cu``, ``unpermute_kernel``)."""
    n, spec = arriving(shape), shape.spec
    size = n * size_of(rows.shape[1:], rows.dtype)
    scores = 4.0 * n if scored else 0.0
    sent = Exchange("all-to-all", size, "ep", choices=(spec.expert_top_k, spec.experts), scores=scores)
    sorts = Stream(size + size_of(rows.shape, rows.dtype))
    return (sent, sorts), (sorts, sent)


# -- both ----------------------------------------------------------------------------------------------


def _gradients_sent(x: Tensor, wide: Tensor) -> Backward:
    """Of tokens, and of their probabilities in fp32."""
    return fresh_each((x, "grad_tokens_sent"), (wide, "grad_token_probabilities_fp32"))


def _combined(r: Recorder, x: Tensor, handle: list[Tensor], shape: CoreShape) -> Tensor:
    """``FusedCombine`` or ``HybridEPCombine``: (T, h); backward sends gradients as tokens were sent."""
    size, gradient = (shape.routed.own, x.shape[1]), fresh(x, "grad_rows_combined")
    return r.output((x,), handle, gradient, size, x.dtype, "tokens_combined", work=_exchange(x, shape))


def _exchange(x: Tensor, shape: CoreShape) -> Operator:
    """A token crosses the network once for each node, and links once for each rank
    (``csrc/kernels/legacy/internode.cu``, ``csrc/hybrid_ep``)."""
    if shape.mixture.dispatcher == "hybridep":
        there, back = _hybrid_exchanges(x, shape, scored=False)
        return Operator(back, there)
    size = arriving(shape) * size_of(x.shape[1:], x.dtype)
    sent = Exchange("all-to-all", size, "ep", choices=(shape.spec.expert_top_k, shape.spec.experts))
    return Operator((sent,), (sent,))


# -- outside of PyTorch --------------------------------------------------------------------------------

Config = tuple[int, int]
"""Tokens that a channel receives at once through NVLink, and by RDMA."""

CONFIGS: dict[int, Config] = {
    **dict.fromkeys((2, 4, 8), (256, 128)),
    16: (288, 128), **dict.fromkeys((24, 32, 48, 64), (288, 128)),
    96: (480, 128), 128: (560, 128), **dict.fromkeys((144, 160), (720, 128)),
}  # fmt: skip
"""By ranks (``deep_ep/buffers/legacy.py``, ``get_dispatch_config``, ``get_combine_config``)."""

SOURCE = (
    "deepseek-ai/DeepEP csrc/legacy/config.hpp, deep_ep/buffers/legacy.py; csrc/hybrid_ep/buffer/intranode.cu of its "
    "branch hybrid-ep"
)
DEEP_EP_SMS = 20
"""``set_deepep_num_sms`` where nobody says otherwise."""
MOST_CHOICES = MOST_SCALES = 128
SEND_CHUNKS = {16: (20, 12), **dict.fromkeys((24, 32, 48, 64), (8, 8)), **dict.fromkeys((96, 128, 144, 160), (12, 8))}
"""RDMA tokens sent at once, of dispatch and combine: what is received is a multiple of them."""


def deep_ep_buffers(ranks: int, hidden: int) -> int:
    """Bytes of DeepEP's NVLink buffer (``cudaMalloc``) and RDMA buffer (NVSHMEM), for 16-bit tokens
    (``csrc/legacy/config.hpp``, ``get_nvl_buffer_size_hint``, ``get_rdma_buffer_size_hint``)."""
    received, by_rdma = CONFIGS[ranks]
    channels, nodes, peers = DEEP_EP_SMS // 2, max(ranks // NVLINK_PEERS, 1), min(ranks, NVLINK_PEERS)
    of_token = 2 * hidden + 8 + 8 * MOST_CHOICES + 4 * MOST_CHOICES + 4 * MOST_SCALES
    nvlink = channels * peers * ((2 * nodes + 3) * 4 + received * of_token)
    if ranks <= NVLINK_PEERS:
        return _padded(nvlink)
    most = max(-(-by_rdma // send) * send for send in SEND_CHUNKS[ranks])
    rdma = channels * nodes * ((NVLINK_PEERS * 2 + 2) * 2 * 4 + 2 * most * (of_token + 16))
    return _padded(nvlink) + _padded(rdma)


def hybrid_ep_buffers(tokens: int, ranks: int, hidden: int, experts: int) -> int:
    """Bytes of HybridEP's buffer within an NVLink domain, which dispatch and combine share, for ``tokens`` of each rank
    and 16 bits (``csrc/hybrid_ep/buffer/intranode.cu``, ``allocate_combine_buffers``, ``allocate_dispatch_buffers``):
    every token of every rank, its probabilities for all experts, and its scales."""
    return tokens * ranks * (2 * hidden + 4 * experts + 4 * (hidden // 128))


def _padded(size: int) -> int:
    return -(-size // 128) * 128


def outside(shape: CoreShape) -> tuple[str, int] | None:
    """Name and bytes of the buffer that the dispatcher holds outside of PyTorch."""
    experts, h = shape.experts, shape.spec.expert_hidden
    if experts is None or not experts.flex:
        return None
    if experts.dispatcher == "deepep":
        return "DeepEP's buffer", deep_ep_buffers(experts.ep, h)
    return "HybridEP's buffer", hybrid_ep_buffers(shape.routed.own, experts.ep, h, shape.spec.experts)
