"""Seconds of what is no transformer layer: embedding, final norm, head with its loss, and sends between stages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log

from ...plan.plan import Plan
from . import operators
from .collectives import collective, group, send
from .efficiency import Efficiency
from .layer import LayerTimes, beside, layer_times
from .linear import linear
from .matmul import matmul, streamed
from .rates import Rates, rates_of
from .seconds import Seconds, streams
from .shape import Shape, shape_of


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


def entry_times(plan: Plan, efficiency: Efficiency | None = None) -> EntryTimes:
    """Of a resolved plan. Plans that agree in model, GPU, dtype, shards, micro-batch, recompute and the code that
    runs them share one value, however many stages, replicas and layers they have."""
    layout, rates = plan.layout, rates_of(plan, efficiency)
    across = layout.pp > 1 and layout.tp * layout.cp * layout.pp * (layout.dp or 1) > rates.node
    staged = layout.pp > 1 or plan.framework == "device-map"
    return times_of(shape_of(plan), rates, staged, across, plan.loss.logits_to_keep)


@lru_cache(maxsize=1 << 14)
def times_of(
    shape: Shape, rates: Rates, staged: bool, across_nodes: bool, logits_to_keep: int | None = None
) -> EntryTimes:
    """``staged`` where hidden states go from stage to stage, ``across_nodes`` where stages are on several nodes."""
    return EntryTimes(
        embedding=embedding_times(shape, rates),
        layer=layer_times(shape, rates),
        final_norm=_alone(_norm(shape, rates)) if shape.spec.final_norm else LayerTimes(0.0, 0.0, 0.0),
        head=head_times(shape, rates, logits_to_keep),
        send=send_time(shape, rates, across_nodes) if staged else 0.0,
    )


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
    drops = 2 * e + operators.MASK if spec.embedding_dropout else 0
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
    return streams(rates, operators.cross_entropy(shape), logits * slower)


def _head_communication(shape: Shape, rates: Rates, whole: Seconds) -> tuple[float, float]:
    """Vocabulary-parallel logits: the gradient of their input is summed over ranks; maximum, sum and the label's logit
    of every token, too. Sequence parallelism gathers the input for both passes and scatters its gradient."""
    if shape.t == 1 or shape.loss == "adaptive-softmax":
        return 0.0, 0.0
    across = group(shape.t, 1, rates.node)
    reductions = 3 * collective(rates, "all-reduce", 4.0 * shape.tokens, across)
    hidden = whole.backward / 2 if shape.overlapped else 0.0
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
    return streams(rates, operators.norm(shape), float(shape.sharded_tokens * shape.spec.hidden))


def _alone(seconds: Seconds) -> LayerTimes:
    return LayerTimes(seconds.forward, seconds.backward, 0.0)
