"""Seconds of one transformer layer on one rank, operator by operator; and of embedding, final norm, head with its loss,
and sends between stages.

Letters: ``b`` micro-batch, ``s`` sequence, ``h`` hidden, ``a`` heads, ``d`` features of a head, ``f`` the MLP's
width, ``t`` tensor-, ``c`` context-parallel size.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import log
from typing import NamedTuple

from ...families import family
from ...frameworks import framework
from ...plan.resolved import ResolvedPlan
from ...values import dataclass
from . import kernels
from .collectives import collective, group, send
from .kernels import Seconds, linear, matmul, streamed, streams
from .rates import Efficiency, Rates, rates_of
from .shape import Shape, shape_of, without_recompute

CHANNELS = 24
"""Multiprocessors that NCCL's rings keep busy: a block each for two directions of twelve rings on NVLink
(``src/graph/search.cc``; ``NCCL_MAX_NCHANNELS`` of https://docs.nvidia.com/deeplearning/nccl/user-guide/)."""


HOST_OPERATOR = 7e-6
"""Seconds that PyTorch needs on the host for the simplest operator that autograd follows
(https://github.com/pytorch/pytorch/issues/41383)."""

HOST_WAIT = 6.7e-6
"""Seconds by which a kernel takes longer if the host waits for it: 9.6 instead of 2.9 microseconds
(https://developer.nvidia.com/blog/cuda-graphs/)."""


class LayerTimes(NamedTuple):
    """Seconds of one micro-batch of one entry on one rank, communication of tensor and context parallelism included."""

    forward: float
    backward: float
    recompute: float
    """What recompute adds to backward where the entry is recomputed."""
    parallel: float = 0.0
    """The part of forward and backward that is exposed communication."""
    recomputed_parallel: float = 0.0
    """The part of recompute that is."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A layer taken apart, as recompute wants it."""

    norms: Seconds
    projections: Seconds
    """Queries, keys and values, and the attention's output."""
    core: Seconds
    """Scores, softmax and context."""
    mlp: Seconds
    residuals: Seconds
    communication: Seconds

    @property
    def whole(self) -> Seconds:
        total = self.norms + self.projections
        for part in (self.core, self.mlp, self.residuals, self.communication):
            total = total + part
        return total


def layer_times(shape: Shape, rates: Rates) -> LayerTimes:
    """One layer of the model."""
    parts, whole = _parts_and_whole(without_recompute(shape), rates)
    again, again_parallel = _recompute(parts, shape)
    forward = with_host(shape, whole.forward + whole.forward_parallel, whole.forward_kernels)
    backward = with_host(shape, whole.backward + whole.backward_parallel, whole.backward_kernels)
    kernels = round(whole.forward_kernels * again / whole.forward)
    return LayerTimes(
        forward,
        backward,
        with_host(shape, again + again_parallel, kernels),
        whole.forward_parallel + whole.backward_parallel,
        again_parallel,
    )


def with_host(shape: Shape, device: float, kernels: int) -> float:
    """Seconds of a pass of so many kernels: the host runs ahead of the device, unless it is the slower one; where it
    waits for every kernel (``CUDA_LAUNCH_BLOCKING``), its time and the waiting add up."""
    host = kernels * HOST_OPERATOR
    return device + host + kernels * HOST_WAIT if shape.blocking else max(device, host)


def _recompute(parts: Parts, shape: Shape) -> tuple[float, float]:
    """Seconds that backward takes longer, and of them in communication."""
    if shape.recompute == "full":
        return parts.whole.forward, parts.whole.forward_parallel
    if shape.recompute == "per-operator":
        # Attention and every second product are kept (torchtitan, ``activation_checkpoint.py``).
        beside = parts.norms.forward + parts.residuals.forward
        return beside + (parts.projections.forward + parts.mlp.forward) / 2, parts.communication.forward_parallel
    if shape.recompute != "selective":
        return 0.0, 0.0
    modules = shape.modules or ("core_attn",)
    again = {
        "core_attn": (parts.core.forward, parts.core.forward_parallel),
        "layernorm": (parts.norms.forward, 0.0),
        "mlp": (parts.mlp.forward, parts.communication.forward_parallel / 2),
    }
    return sum(again[name][0] for name in modules), sum(again[name][1] for name in modules)


@lru_cache(maxsize=1 << 14)
def _parts_and_whole(shape: Shape, rates: Rates) -> tuple[Parts, Seconds]:
    parts = parts_of(shape, rates)
    return parts, parts.whole


def parts_of(shape: Shape, rates: Rates) -> Parts:
    """The layer's parts."""
    spec, t, tokens = shape.spec, shape.t, shape.tokens
    h, f = spec.hidden, spec.ffn // t
    queries, keys = spec.attention_features // t, max(1, spec.kv_heads // t) * spec.head_dim
    biased = spec.mlp_bias
    into = _sum(linear(shape, rates, h, n, name, spec.attention_bias) for name, n in _inputs(shape, queries, keys))
    up = _sum(linear(shape, rates, h, n, name, biased) for name, n in _ups(shape, f))
    out = linear(shape, rates, queries, h, "attention_output", spec.attention_output_bias)
    down = linear(shape, rates, f, h, "down", biased)
    sharded = shape.sharded_tokens * h
    norms = 1 if spec.blocks == "parallel_one_norm" else 4 if spec.norm_place == "both" else 2
    rope = streams(rates, kernels.rotary(shape), tokens * (queries + keys) * spec.rotary_fraction)
    heads = streams(rates, kernels.norm(shape), tokens * (queries + keys)) if spec.qk_norm else Seconds()
    return Parts(
        norms=streams(rates, kernels.norm(shape), sharded).times(norms),
        projections=_sum((into, out, rope, heads)),
        core=attention(shape, rates),
        mlp=_sum((up, down, streams(rates, kernels.activation(shape), tokens * f))),
        residuals=streams(rates, kernels.residual(shape), sharded).times(2),
        communication=_communication(shape, rates, into, up),
    )


def _inputs(shape: Shape, queries: int, keys: int) -> list[tuple[str, int]]:
    """Names and widths of the products that queries, keys and values are."""
    if shape.code.joined_inputs or "qkv" in family(shape.spec.family).linear_layers:
        return [("qkv", queries + 2 * keys)]
    return [("query", queries), ("key", keys), ("value", keys)]


def _ups(shape: Shape, f: int) -> list[tuple[str, int]]:
    """Of those that lead to the MLP's inner layer."""
    if not shape.spec.gated:
        return [("up", f)]
    if shape.code.joined_inputs or "gate_up" in family(shape.spec.family).linear_layers:
        return [("gate_up", 2 * f)]
    return [("gate", f), ("up", f)]


def attention(shape: Shape, rates: Rates) -> Seconds:
    """From queries, keys and values to the context."""
    spec, b, t, c, e = shape.spec, shape.b, shape.t, shape.c, shape.element
    a, d, rows, columns = spec.heads // t, spec.head_dim, shape.s // shape.c, shape.s
    copied = streams(rates, kernels.copies(shape), shape.tokens * a * d)
    if shape.flash:
        flops = 4.0 * b * a * d * rows * seen(shape)
        moved = e * shape.tokens * d * (2 * a + 2 * max(1, spec.kv_heads // t) * c)
        forward = max(flops / rates.attention_forward, streamed(rates, moved))
        backward = max(2.5 * flops / rates.attention_backward, streamed(rates, 2 * moved, 2))
        kernel = Seconds(forward, backward, 0.0, 0.0, 1, 3)
    else:
        scores = float(b * a * rows * columns)
        first, second = matmul(rates, rows, columns, d, b * a, e), matmul(rates, rows, d, columns, b * a, e)
        # Backward: context to scores and to values; scores to queries and to keys.
        back = matmul(rates, rows, columns, d, b * a, e) + 3 * matmul(rates, rows, d, columns, b * a, e)
        kernel = Seconds(first + second, back, 0.0, 0.0, 2, 4) + streams(rates, kernels.scores(shape), scores)
    exchanged = _context_parallel(shape, rates, kernel) if c > 1 else Seconds()
    return kernel + copied + exchanged


def seen(shape: Shape) -> float:
    """Keys that a query attends to, on average."""
    s, window = shape.s, shape.spec.sliding_window
    whole = s / 2 if shape.spec.causal else float(s)
    if window is None or window >= s:
        return whole
    limited = window - window * window / (2 * s) if shape.spec.causal else float(window)
    return (whole + limited) / 2 if shape.spec.alternating_windows else limited


def _context_parallel(shape: Shape, rates: Rates, kernel: Seconds) -> Seconds:
    """Keys and values around a ring, beside the kernel while it works on what is there, and every part's output added
    to those before it (``AttnFuncWithCPAndKVP2P`` of Transformer Engine, ``flash_attn_fwd_out_correction``); or heads
    for tokens, all to all, which nothing hides (``attn_forward_func_with_cp``)."""
    spec, t, c, e = shape.spec, shape.t, shape.c, shape.element
    keys = 2 * shape.tokens * max(1, spec.kv_heads // t) * spec.head_dim * e
    around = group(c, t, rates.node)
    if shape.all_to_all:
        queries = shape.tokens * spec.heads // t * spec.head_dim * e
        exchanged = collective(rates, "all-to-all", keys + 2 * queries, around)
        return Seconds(0.0, 0.0, exchanged, exchanged)
    across = t * c > rates.node
    forward, backward = (c - 1) * send(rates, keys, across), (c - 1) * send(rates, 2 * keys, across)
    hidden = (c - 1) / c
    outputs = 3 * shape.tokens * (spec.heads // t) * spec.head_dim * e  # two read, one written
    added = (c - 1) * streamed(rates, outputs, 2)
    gradients = (c - 1) * streamed(rates, outputs + 3 * keys, 3)
    exposed = beside(rates, forward, hidden * kernel.forward), beside(rates, backward, hidden * kernel.backward)
    return Seconds(added, gradients, *exposed)


def _communication(shape: Shape, rates: Rates, into: Seconds, up: Seconds) -> Seconds:
    """Exposed communication of tensor parallelism: two all-reduces each way; with sequence parallelism an all-gather
    and a reduce-scatter for each, and another all-gather of what backward needs again, hidden behind its products.

    Megatron-Core and Megatron-LM since 2022 run a column-parallel layer's reduction beside its weight gradient
    (``LinearWithGradAccumulationAndAsyncCommunication``), which is about half of the layer's backward; the product
    lacks the multiprocessors that the collective's channels take meanwhile.
    """
    if shape.t == 1:
        return Seconds()
    across = group(shape.t, 1, rates.node)
    blocks = 1 if shape.spec.blocks == "parallel_one_norm" and not shape.code.reduces_blocks_apart else 2
    count = blocks * (2 if shape.sequence_parallel else 1)
    if not shape.sequence_parallel:
        one = collective(rates, "all-reduce", shape.hidden_bytes, across)
        if not shape.code.overlapped:
            return Seconds(0.0, 0.0, blocks * one, blocks * one, count, count)
        exposed = beside(rates, one, into.backward / 2) + beside(rates, one, up.backward / 2)
        return Seconds(0.0, 0.0, blocks * one, exposed, count, count)
    gather = collective(rates, "all-gather", shape.hidden_bytes, across)
    scatter = collective(rates, "reduce-scatter", shape.hidden_bytes, across)
    forward = blocks * (gather + scatter)
    if not shape.code.overlapped:
        return Seconds(0.0, 0.0, forward, forward, count, count)
    exposed = sum(
        beside(rates, gather, one.backward / 2) + beside(rates, scatter, one.backward / 2) for one in (into, up)
    )
    return Seconds(0.0, 0.0, forward, blocks * gather + exposed, count, 2 * count)


def beside(rates: Rates, communication: float, work: float) -> float:
    """Seconds that communication beside ``work`` costs: what is longer, and what its channels take from ``work``."""
    return max(0.0, communication - work) + min(communication, work) * CHANNELS / rates.processors


def _sum(parts: Iterable[Seconds]) -> Seconds:
    total = Seconds()
    for part in parts:
        total = total + part
    return total


@dataclass(frozen=True, slots=True)
class EntryTimes:
    """Seconds of one micro-batch through each kind of entry of the layer list, on one rank."""

    embedding: LayerTimes
    layer: LayerTimes
    final_norm: LayerTimes
    head: LayerTimes
    """Output layer and loss."""
    send: float
    """A hidden state from one stage to the next, or its gradient back."""


def entry_times(plan: ResolvedPlan, efficiency: Efficiency | None = None) -> EntryTimes:
    """Of a resolved plan. Plans that agree in model, GPU, dtype, shards, micro-batch, recompute and the code that
    runs them share one value, however many stages, replicas and layers they have."""
    layout, rates = plan.layout, rates_of(plan, efficiency)
    across = layout.pp > 1 and layout.tp * layout.cp * layout.pp * (layout.dp or 1) > rates.node
    staged = layout.pp > 1 or not framework(plan.framework).time.pipelined
    return times_of(shape_of(plan), rates, staged, across, plan.loss.logits_to_keep)


@lru_cache(maxsize=1 << 14)
def times_of(
    shape: Shape, rates: Rates, staged: bool, across_nodes: bool, logits_to_keep: int | None = None
) -> EntryTimes:
    """``staged`` where hidden states go from stage to stage, ``across_nodes`` where stages are on several nodes."""
    embedding, final_norm, head = _ends(without_recompute(shape), rates, logits_to_keep)
    send = send_time(shape, rates, across_nodes) if staged else 0.0
    return EntryTimes(embedding, layer_times(shape, rates), final_norm, head, send)


@lru_cache(maxsize=1 << 14)
def _ends(shape: Shape, rates: Rates, logits_to_keep: int | None) -> tuple[LayerTimes, LayerTimes, LayerTimes]:
    """Embedding, final norm and head, which nobody recomputes."""
    norm = _alone(_norm(shape, rates)) if shape.spec.final_norm else LayerTimes(0.0, 0.0, 0.0)
    return embedding_times(shape, rates), norm, head_times(shape, rates, logits_to_keep)


def send_time(shape: Shape, rates: Rates, across_nodes: bool) -> float:
    """Whole, or a tensor-parallel rank's part of it, which Megatron of 2021 and DeepSpeed gather again behind it."""
    if not shape.scattered_sends or shape.t == 1:
        return send(rates, shape.hidden_bytes, across_nodes)
    part = send(rates, shape.hidden_bytes / shape.t, across_nodes)
    if shape.sequence_parallel:
        return part
    return part + collective(rates, "all-gather", shape.hidden_bytes, group(shape.t, 1, rates.node))


def embedding_times(shape: Shape, rates: Rates) -> LayerTimes:
    """Rows looked up, summed over ranks of the vocabulary, dropped out; backward sorts tokens and adds up rows."""
    spec, e = shape.spec, shape.element
    elements = shape.tokens * spec.hidden
    drops = 2 * e + kernels.MASK if spec.embedding_dropout else 0
    tables = 2 if spec.positions == "learned" else 1
    forward = streamed(rates, (2 * e * tables + drops) * elements, tables + 1)
    kept = 4 if shape.gradients == "fp32" else e
    weight = shape.vocab // shape.t * spec.hidden
    rows = (2 * e * tables + drops) * elements + (e + 2 * kept) * weight
    backward = 0.0 if shape.rank else streamed(rates, rows, 2 * tables + 2)
    if spec.embedding_norm:
        norm = _norm(shape, rates)
        forward, backward = forward + norm.forward, backward + norm.backward
    parallel, back = 0.0, 0.0
    if shape.t > 1:
        kind = "reduce-scatter" if shape.sequence_parallel else "all-reduce"
        across = group(shape.t, 1, rates.node)
        parallel = collective(rates, kind, shape.hidden_bytes, across)
        back = collective(rates, "all-gather", shape.hidden_bytes, across) if shape.sequence_parallel else 0.0
    return LayerTimes(forward + parallel, backward + back, 0.0, parallel + back)


def head_times(shape: Shape, rates: Rates, logits_to_keep: int | None = None) -> LayerTimes:
    """The output layer, its loss, and what BERT has in front of it."""
    spec = shape.spec
    tokens = shape.tokens if logits_to_keep is None else shape.b * logits_to_keep
    if shape.loss == "adaptive-softmax":
        whole = _adaptive(shape, rates, tokens)
    else:
        columns = shape.vocab // shape.t
        whole = linear(shape, rates, spec.hidden, columns, tokens=tokens)
        if shape.loss == "cut":
            # Logits are computed again for the gradients, and never written.
            whole = whole + Seconds(0.0, matmul(rates, tokens, columns, spec.hidden, 1, shape.element))
        whole = whole + _loss(shape, rates, float(tokens * columns))
    if spec.mlm_head:
        whole = whole + linear(shape, rates, spec.hidden, spec.hidden) + _norm(shape, rates)
    forward, backward = _head_communication(shape, rates, whole)
    return LayerTimes(whole.forward + forward, whole.backward + backward, 0.0, forward + backward)


def _loss(shape: Shape, rates: Rates, logits: float) -> Seconds:
    slower = rates.memory / rates.loss
    return streams(rates, kernels.cross_entropy(shape), logits * slower)


def _head_communication(shape: Shape, rates: Rates, whole: Seconds) -> tuple[float, float]:
    """Vocabulary-parallel logits: the gradient of their input is summed over ranks; maximum, sum and the label's logit
    of every token, too. Sequence parallelism gathers the input for both passes and scatters its gradient."""
    if shape.t == 1 or shape.loss == "adaptive-softmax":
        return 0.0, 0.0
    across = group(shape.t, 1, rates.node)
    reductions = 3 * collective(rates, "all-reduce", 4.0 * shape.tokens, across)
    hidden = whole.backward / 2 if shape.code.overlapped else 0.0
    if not shape.sequence_parallel:
        return reductions, beside(rates, collective(rates, "all-reduce", shape.hidden_bytes, across), hidden)
    gather = collective(rates, "all-gather", shape.hidden_bytes, across)
    scatter = collective(rates, "reduce-scatter", shape.hidden_bytes, across)
    return reductions + gather, beside(rates, gather, hidden) + beside(rates, scatter, hidden)


def _adaptive(shape: Shape, rates: Rates, tokens: int) -> Seconds:
    """A head over the frequent tokens and the clusters, and tails for the tokens that fall into them: their part under
    Zipf's law, by which ``resolve`` chooses cutoffs."""
    spec, edges = shape.spec, (*shape.cutoffs, shape.vocab)
    first, tails = edges[0], len(edges) - 1
    total = linear(shape, rates, spec.hidden, first + tails, tokens=tokens)
    total = total + _loss(shape, rates, float(tokens * (first + tails)))
    everything = log(edges[-1]) + 0.5772
    for number in range(tails):
        inner = max(1, int(spec.hidden / shape.div_value ** (number + 1)))
        size = edges[number + 1] - edges[number]
        here = max(1, int(tokens * log(edges[number + 1] / edges[number]) / everything))
        total = total + linear(shape, rates, spec.hidden, inner, tokens=here)
        total = total + linear(shape, rates, inner, size, tokens=here)
        total = total + _loss(shape, rates, float(here * size))
    return total


def _norm(shape: Shape, rates: Rates) -> Seconds:
    return streams(rates, kernels.norm(shape), float(shape.sharded_tokens * shape.spec.hidden))


def _alone(seconds: Seconds) -> LayerTimes:
    return LayerTimes(seconds.forward, seconds.backward, 0.0)
