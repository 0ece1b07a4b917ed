"""What the time of a step depends on: the shape of a layer's work, what stages hold, and the FLOPs of products."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import product

from ...families import family
from ...frameworks import framework
from ...layers.module import NO_PASSES, Parameter, Passes, grown
from ...layers.work import ITEMSIZE as ITEMSIZE, Attention
from ...plan.lora import saved
from ...plan.plan import Recompute, ResolvedPlan
from ...plan.spec import LINEAR, NONE, ModelSpec, block_of, kinds_of as blocks_of, of_any_depth
from ...values import NamedTuple, dataclass, replace
from .host import Host
from .kernels import Ranks

KINDS = "M*-GE"
"""Kinds of a hybrid's layers, as its pattern calls them."""

WITH_DELTA = ("*E", "GE", "*-", "G-")
"""Kinds of layers where some have a gated delta net (G) in place of attention, and experts or an MLP behind it."""


def kinds_of(spec: ModelSpec) -> Sequence[str]:
    """Kinds of layers that ``Entries.kinds`` counts apart: a hybrid's, or those of different sizes; else none."""
    return KINDS if spec.layer_pattern else WITH_DELTA if spec.linear_interval else blocks_of(spec.layer_blocks)


def held_kinds(spec: ModelSpec, layers: Sequence[int]) -> list[str]:
    """The kind of each of ``layers``, where there are any."""
    if spec.linear_interval:
        return ["*G"[spec.is_linear(layer)] + "-E"[spec.has_experts(layer)] for layer in layers]
    of_kind = spec.layer_pattern or spec.layer_blocks
    return [of_kind[layer] for layer in layers] if of_kind else []


class Entries(NamedTuple):
    """What the kernels of a model's modules do for one micro-batch on one rank."""

    embedding: Passes
    layer: Passes
    recomputed: Passes
    """A layer whose forward pass backward runs again, whole or in part, if the plan recomputes any."""
    final_norm: Passes
    head: Passes
    """Output layer and loss; before them what predicts further tokens, unless that is apart."""
    dense: Passes = NO_PASSES
    """A layer with an MLP where others have experts, without a mask where others' attention has one, or with attention
    where others have gated delta nets,"""
    dense_recomputed: Passes = NO_PASSES
    """and one whose forward pass backward runs again."""
    further: Passes = NO_PASSES
    """What predicts further tokens, in a stage before the last."""
    kinds: tuple[tuple[Passes, Passes], ...] = ()
    """Layers of every kind (``kinds_of``), plain and recomputed, in place of ``layer``; where those at the ends keep 16
    bits, all others and then these, each as ``of_layers`` has them. Of transformers' layers those of further kinds."""
    wide: int = 0
    """How many of ``kinds``, the last ones, are of those ends: these run by themselves, and so at a clock of their own,
    while layers of other kinds take turns."""

    @property
    def passes(self) -> tuple[Passes, ...]:
        """All but those of ``kinds``."""
        return tuple(one for one in self if isinstance(one, Passes))

    @property
    def of_layers(self) -> tuple[tuple[Passes, Passes], ...]:
        """Layers of every kind, plain and recomputed, where all or none are in ``kinds``."""
        return self.kinds or self.each[:2]

    @property
    def each(self) -> tuple[tuple[Passes, Passes], ...]:
        """Layers plain and recomputed, as ``StageWork.counts`` counts them."""
        return (self.layer, self.recomputed), (self.dense, self.dense_recomputed), *self.kinds


@dataclass(frozen=True, slots=True)
class Shape:
    """One micro-batch on one rank. Equal shapes take equal time."""

    spec: ModelSpec
    entries: Entries
    ranks: Ranks
    tokens: int
    """Of a rank, in regions that tensor parallelism does not shard."""
    element: int
    """Bytes of an element of activations."""
    vocab: int
    """With padding."""
    sequence_parallel: bool
    scattered_sends: bool
    """Between stages every rank sends its ``1 / t`` of a hidden state."""
    overlapped_sends: bool
    """Sends between interleaved stages run beside their passes."""
    host: Host
    """How its code is run."""

    @property
    def hidden_bytes(self) -> int:
        """Of the hidden state of one micro-batch."""
        return self.tokens * self.spec.hidden * self.element


def shape_of(plan: ResolvedPlan) -> Shape:
    """The shape of a resolved plan. ``PlanError`` for what takes a time that is not modelled."""
    _check(plan)
    layout, own = plan.layout, framework(plan.framework)
    return Shape(
        spec=of_any_depth(plan.model),
        entries=own.time.entries(plan),
        ranks=Ranks(layout.tp, layout.cp, layout.ep, layout.etp or layout.tp),
        tokens=plan.sequences * plan.batch.seq // layout.cp,
        element=ITEMSIZE[plan.precision.dtype],
        vocab=plan.padded_vocab,
        sequence_parallel=layout.sequence_parallel,
        scattered_sends=own.time.scattered_sends(plan),
        overlapped_sends=own.time.overlapped_sends(plan, layout.vpp),
        host=own.time.host(plan)._replace(blocking=plan.environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")),
    )


ROUNDED = frozenset({"liger", "adaptive-softmax"})
"""Losses whose work does not grow in step with the tokens: chunks are powers of two, clusters get whole tokens."""


class Shapes:
    """The shapes of a resolved plan by the size of its micro-batch, which ``accumulates`` or not."""

    def __init__(self, plan: ResolvedPlan, accumulates: bool) -> None:
        self.plan, self.times = plan, 2 if accumulates else 1
        self.rounding = 1.0 if plan.loss.kind in ROUNDED else framework(plan.framework).time.rounding(plan)
        """As of ``FrameworkTime.rounding``."""
        self.known: dict[int, Shape] = {}

    def of(self, b: int) -> Shape:
        """Of ``b`` sequences. Recorded of 1, 2, 4 and odd numbers; others follow from 2 and 4."""
        if b not in self.known:
            self.known[b] = (self._grown(b) if not self.rounding and b > 4 and b % 2 == 0 else None) or self.recorded(b)
        return self.known[b]

    def recorded(self, b: int) -> Shape:
        batch = self.plan.batch.model_copy(update={"mbs": b, "gbs": b * self.times})
        return shape_of(self.plan.model_copy(update={"batch": batch}))

    def _grown(self, b: int) -> Shape | None:
        two, four = self.of(2), self.of(4)
        if two.entries.kinds:
            return None
        entries = [grown(one, other, b) for one, other in zip(two.entries.passes, four.entries.passes, strict=True)]
        if None in entries:
            return None
        return replace(two, entries=Entries._make((*entries, (), 0)), tokens=two.tokens * b // 2)


def _check(plan: ResolvedPlan) -> None:
    plan.refuse(
        (
            "frozen.layers",
            plan.frozen.embedding or plan.frozen.layers,
            "must be 0 where time is asked for: frozen layers are not timed",
        ),
        ("fsdp.recompute_every", plan.fsdp.recompute_every > 1, "must be 1 where time is asked for"),
    )


class StageWork(NamedTuple):
    """Entries of one chunk of a stage."""

    layers: int
    recomputed: int = 0
    """Layers whose forward pass backward runs again, whole or in part."""
    embedding: bool = False
    final_norm: bool = False
    head: bool = False
    dense: int = 0
    """Of the layers, those of ``Entries.dense``,"""
    dense_recomputed: int = 0
    """and of those that are recomputed."""
    further: bool = False
    """What predicts further tokens, where that is not with the head."""
    kinds: tuple[tuple[int, int], ...] = ()
    """Of layers that ``Entries.kinds`` tells apart, how many are of each kind, and how many of these are recomputed."""

    @property
    def counts(self) -> tuple[tuple[int, int], ...]:
        """The same of ``Entries.each``."""
        dense, again = self.dense, self.dense_recomputed
        return (self.layers - dense, self.recomputed - again), (dense, again), *self.kinds


Work = tuple[tuple[StageWork, ...], ...]
"""By stage, then by chunk."""


def work_of(plan: ResolvedPlan) -> Work:
    """The stages of a resolved plan, as its framework cuts it. ``PlanError`` where it cannot."""
    return framework(plan.framework).time.stages(plan)


Wide = tuple[int, int]
"""Layers at the beginning of a model, and at its end, that keep 16 bits where others have products in 8 or 4."""


def named(names: Sequence[str], spec: ModelSpec, recompute: Recompute, wide: Wide = (0, 0)) -> StageWork:
    """Entries of these ``names``."""
    layers = [int(name.removeprefix("layer.")) for name in names if name.startswith("layer.")]
    again = recomputed(recompute, len(layers))
    dense = _dense(spec, layers)
    ends = ("embedding" in names, "final_norm" in names, "head" in names)
    further = "mtp" in names and "head" not in names
    kinds = counts_of_kinds(spec, layers, again, wide)
    return StageWork(len(layers), again, *ends, sum(dense), sum(dense[:again]), further, kinds)


def _dense(spec: ModelSpec, layers: Sequence[int]) -> list[bool]:
    """Which of ``layers`` have an MLP where others have experts."""
    return [bool(spec.experts) and not spec.has_experts(layer) for layer in layers]


def counts_of_kinds(spec: ModelSpec, layers: Sequence[int], again: int, wide: Wide) -> tuple[tuple[int, int], ...]:
    """``StageWork.kinds`` of ``layers``, the first of which run ``again``."""
    kinds: Sequence[object] = kinds_of(spec)
    held: Sequence[object] = held_kinds(spec, layers)
    if any(wide):
        first, behind = wide[0], spec.layers - wide[1]
        if not kinds:
            kinds, held = (False, True), _dense(spec, layers)
        kinds = tuple(product((False, True), kinds))
        held = [(not first <= layer < behind, kind) for layer, kind in zip(layers, held, strict=True)]
    return tuple((held.count(kind), held[:again].count(kind)) for kind in kinds)


def recomputed(recompute: Recompute, layers: int) -> int:
    """Of ``layers`` of a chunk."""
    if recompute.mode == "none":
        return 0
    if recompute.mode == "full" and recompute.method == "block" and recompute.layers is not None:
        return min(layers, recompute.layers)
    return layers


class Elements(NamedTuple):
    """Parameters of a stage on one rank."""

    held: int
    trained: int
    experts: int
    """Of those that are trained, those that other ranks share than a layer's."""


@lru_cache(maxsize=4096)
def elements(entries: Entries, work: tuple[StageWork, ...]) -> Elements:
    """Ends that share a weight have it once; further tokens in another chunk have an embedding of theirs."""
    ends = {
        (at if chunk.further else -1, parameter.name): parameter
        for at, chunk in enumerate(work)
        for present, entry in (
            (chunk.embedding, entries.embedding),
            (chunk.final_norm, entries.final_norm),
            (chunk.head, entries.head),
            (chunk.further, entries.further),
        )
        for parameter in entry.parameters * present
    }
    parts = [(counted(ends.values()), 1)]
    parts += [(one, n) for chunk in work for one, (n, _) in zip(of_each(entries), chunk.counts, strict=False) if n]
    return Elements(*(sum(times * own[at] for own, times in parts) for at in range(3)))


@lru_cache(maxsize=4096)
def of_each(entries: Entries) -> tuple[Elements, ...]:
    """Parameters of a layer of each kind."""
    return tuple([_of_passes(once) for once, _ in entries.each])


@lru_cache(maxsize=1 << 14)
def _of_passes(own: Passes) -> Elements:
    """Of one module, of hundreds of parameters where a rank has as many experts."""
    return counted(own.parameters)


def counted(parameters: Collection[Parameter]) -> Elements:
    """Of these ``parameters`` together."""
    trained = [one for one in parameters if one.trained]
    experts = sum(one.elements for one in trained if one.expert)
    return Elements(sum(one.elements for one in parameters), sum(one.elements for one in trained), experts)


def needed_flops(
    plan: ResolvedPlan, entries: Entries, work: Sequence[Sequence[StageWork]], *, halves: bool = False
) -> float:
    """``model_flops``, which ``halves`` causal scores or not; where no size of a layer is known, of the products that
    its operators made, and three times what fused attention computes forward, whose backward computes scores again."""
    if plan.model.has_sizes:
        return model_flops(plan, halves=halves)
    parts = [(one, 1) for one in (entries.embedding, entries.final_norm, entries.head)]
    for chunk in (chunk for stage in work for chunk in stage):
        parts += [(once, n) for (once, _), (n, _) in zip(entries.each, chunk.counts, strict=False)]
    whole = sum(times * needed_of(one) for one, times in parts)
    return whole * plan.microbatches * (plan.layout.dp or 1)


def needed_of(passes: Passes) -> float:
    """FLOPs of a module without scores that attention's backward computes again: gradients of its two products are
    twice as many as these."""
    scores = [
        sum(times * one.flops for one, times in counted if isinstance(one, Attention))
        for counted in (passes.forward, passes.backward)
    ]
    return passes.flops + 2 * scores[0] - scores[1]


def model_flops(plan: ResolvedPlan, *, halves: bool = False) -> float:
    """FLOPs of a step's products, forward and backward: 6 for each weight of a matrix and token that goes through it,
    and 6 for each layer and score, and feature of a key or value (arXiv 2205.05198, appendix A, where both have as
    many); it ``halves`` causal scores as Megatron-LM does (``num_floating_point_operations``), or counts them whole. A
    layer that predicts further tokens has a projection of two hidden states and a head of its own. A weight that
    adapters leave frozen has no gradient, so 4; the adapters' own products, below 1 %, are left out."""
    spec, seq = plan.model, plan.batch.seq / (2 if halves and plan.model.causal else 1)
    head, further = (spec.labels or spec.vocab) * spec.hidden, spec.mtp_layers
    head += spec.hidden**2 if spec.mlm_head and not spec.labels else 0
    if spec.layer_pattern:
        blocks = spec.layer_pattern + spec.mtp_pattern * further
        own = sum(_block_flops(spec, kind, seq) for kind in blocks)
        return plan.tokens_of_step * (own + 6.0 * ((1 + further) * head + further * 2 * spec.hidden**2))
    if spec.layer_blocks:
        own = sum(_differing_flops(spec, text, seq) for text in spec.layer_blocks)
        return plan.tokens_of_step * (own + 6.0 * head)
    layers = spec.layers + further
    dense = sum(not spec.has_experts(layer) for layer in range(spec.layers))
    mixtures = layers - dense
    dense = spec.layers if family(spec.family).mlp_beside_experts else dense
    mlps = dense * (3 if spec.gated else 2) * spec.hidden * spec.ffn + mixtures * _mixture_weights(spec)
    linear = sum(map(spec.is_linear, range(spec.layers)))
    layers -= linear
    weights = layers * _attention_weights(spec) + mlps + (1 + further) * head + further * 2 * spec.hidden**2
    scores = layers * (spec.heads * spec.head_dim + spec.attention_features)
    if full := sum(map(spec.is_full, range(spec.layers))):
        of_full = spec.of_full_layers
        values = of_full.kv_heads * of_full.head_dim * spec.hidden if spec.keys_as_values else 0
        weights += full * (_attention_weights(of_full) - values - _attention_weights(spec))
        scores += full * 2 * (of_full.attention_features - spec.attention_features)
    indexed = layers * _indexer_weights(spec, seq)
    frozen = 0 if plan.lora.rank is None else weights - head * ("head.weight" in saved(plan))
    rules = linear * _block_flops(spec, "G", seq) if linear else 0.0
    return plan.tokens_of_step * (6.0 * weights - 2.0 * frozen + 6.0 * scores * seq + rules + 2.0 * indexed)


def _block_flops(spec: ModelSpec, kind: str, seq: float) -> float:
    """The same of a token in a hybrid's layer; of a scan 7 forward for each inner feature and state, as Megatron-LM
    counts them (``training.py``, ``mamba_layer_flops``), and so of a gated delta net a convolution and four products of
    a value head's features with each other."""
    h, d, up = spec.hidden, spec.mamba_inner, 3 if spec.gated else 2
    if kind == "M":
        projected = 2 * d + 2 * spec.mamba_groups * spec.mamba_state_dim + spec.mamba_heads
        return 6.0 * h * (projected + d) + 21.0 * d * spec.mamba_state_dim
    if kind == "G":
        heads, e = spec.linear_value_heads, spec.linear_value_head_dim
        q, v = spec.linear_key_heads * spec.linear_key_head_dim, heads * e
        convolved = spec.linear_conv_kernel * (2 * q + v)
        return 6.0 * (h * (2 * q + 3 * v + 2 * heads) + convolved + 4 * heads * e**2)
    if kind == "*":
        return 6.0 * (_attention_weights(spec) + 2 * spec.attention_features * seq)
    return 6.0 * (up * h * spec.ffn if kind == "-" else _mixture_weights(spec))


def _differing_flops(spec: ModelSpec, text: str, seq: float) -> float:
    """The same of a layer whose sizes are its own."""
    own = block_of(text)
    sized = spec.model_copy(update={"kv_heads": own.kv_heads, "ffn": own.ffn})
    attention, mlp = _block_flops(sized, "*", seq), _block_flops(sized, "-", seq)
    linear = 6.0 * spec.hidden**2
    return {"": attention, LINEAR: linear, NONE: 0.0}[own.attention] + {"": mlp, LINEAR: linear, NONE: 0.0}[own.mlp]


def _mixture_weights(spec: ModelSpec) -> int:
    """Of a token's way through a router, its experts, projections to these and back, shared experts, and their gate."""
    h, latent, up = spec.hidden, spec.expert_latent, 3 if spec.gated else 2
    chosen = up * spec.expert_hidden * spec.expert_top_k * spec.expert_ffn
    return h * (spec.experts + 2 * latent + up * spec.shared_expert_ffn + spec.shared_expert_gate) + chosen


def _attention_weights(spec: ModelSpec) -> int:
    """Of the matrices around a layer's attention; latent attention's lead through lower ranks."""
    h, out = spec.hidden, spec.attention_features
    if not spec.latent_kv_rank:
        return h * (spec.qkv_features + out)
    q, kv, queries = spec.latent_q_rank, spec.latent_kv_rank, spec.heads * spec.head_dim
    down = q * (h + queries) if q else h * queries
    return down + h * (kv + spec.rope_head_dim) + kv * (spec.heads * spec.nope_head_dim + out) + h * out


def _indexer_weights(spec: ModelSpec, seq: float) -> float:
    """Of an indexer's matrices and, for each of its heads, the products with ``seq`` keys and their sum: all of them
    forward alone."""
    n, d = spec.index_heads, spec.index_head_dim
    return spec.latent_q_rank * n * d + spec.hidden * (n + d) + n * (d + 1) * seq if n else 0


def recomputed_flops(plan: ResolvedPlan, entries: Entries, work: Sequence[Sequence[StageWork]]) -> float:
    """FLOPs of products that backward computes again, on all ranks."""
    layout, more = plan.layout, [second.flops - first.flops for first, second in entries.each]
    counts = (chunk.counts for stage in work for chunk in stage)
    again = sum(n * one for kinds in counts for one, (_, n) in zip(more, kinds, strict=False))
    return again * plan.microbatches * layout.tp * layout.cp * (layout.dp or 1)
