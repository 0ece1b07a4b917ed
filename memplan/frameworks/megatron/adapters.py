"""Megatron-Bridge's low-rank adapters (0.6.0, ``src/megatron/bridge/peft``): which layers have them, what is trained,
and what is not modelled with them.

``base.py`` (``PEFT.__call__``) freezes the model before it wraps linear layers, so that gradient buffers and the
optimizer see adapters alone (``DistributedDataParallel.__init__``: ``param.requires_grad``). ``recompute.py``
(``maybe_enable_recompute_inputs_grad``): where layers are recomputed whole the embedding's output requires a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...layers.megatron_core import latent, te_facts
from ...layers.megatron_core.adapters import of_attention, of_gated
from ...layers.megatron_core.block import FC1, FC2, PROJECTION, QKV
from ...layers.megatron_core.grouped import EXPERTS
from ...layers.megatron_core.mamba import IN, OUT
from ...layers.megatron_core.moe import SHARED
from ...layers.tuning import Adapters, Part, Tuning
from ...plan.errors import PlanError
from ...plan.lora import PARTS, adapted
from ...plan.plan import Plan, ResolvedPlan
from ...plan.spec import ModelSpec
from ..base import Adaptable


def adaptable(plan: Plan) -> Mapping[str, tuple[Adaptable, ...]]:
    """By the last part of their names, which ``target_modules`` gives (``ModuleMatcher.match``). A name by default that
    this model has no layer of matches nothing. A rank's experts share an adapter, which all expert-parallel ranks have
    alike (``share_expert_adapters``)."""
    spec, twice = plan.model, 2 if plan.model.gated else 1
    further = 1 if spec.mtp_shared else spec.mtp_layers  # a layer like the last, or those of a pattern
    pattern = spec.layer_pattern + spec.mtp_pattern * further if spec.layer_pattern else ""
    kinds = [spec.has_experts(one) for one in range(spec.layers)] if spec.experts else [False] * spec.layers
    kinds += kinds[-1:] * further
    attending, dense = (pattern.count("*"), pattern.count("-")) if pattern else (len(kinds), kinds.count(False))
    routed = pattern.count("E") if pattern else kinds.count(True)

    def fed(name: str, width: int, times: int, features: int = spec.hidden) -> list[Adaptable]:
        sizes = {FC1: (twice * width, features), FC2: (features, width)}
        return [Adaptable(f"{name}.{one.rpartition('.')[2]}", *size, times) for one, size in sizes.items() if times]

    layers = [
        *fed("mlp", spec.ffn, dense),
        *fed(EXPERTS, spec.expert_ffn, routed, spec.expert_hidden),
        *fed(SHARED, spec.shared_expert_ffn, routed if spec.shared_expert_ffn else 0),
    ]
    named = {
        "linear_qkv": [Adaptable(QKV, spec.qkv_features, spec.hidden, attending)],
        "linear_proj": [Adaptable(PROJECTION, spec.hidden, spec.attention_features, attending)],
        **{name: [one for one in layers if one.part.endswith(name)] for name in ("linear_fc1", "linear_fc2")},
    }
    if spec.latent_kv_rank:
        named |= _latent(plan, len(kinds))
    elif not pattern and not spec.experts:
        named |= _canonical(spec, len(kinds))
    if mamba := pattern.count("M"):
        inner = spec.mamba_heads * spec.mamba_head_dim
        features = 2 * inner + 2 * spec.mamba_groups * spec.mamba_state_dim + spec.mamba_heads
        named["in_proj"] = [Adaptable(IN, features, spec.hidden, mamba)]
        named["out_proj"] = [Adaptable(OUT, spec.hidden, inner, mamba)]
    return {name: tuple([one for one in several if one.times]) for name, several in named.items()}


def _parts(spec: ModelSpec) -> Mapping[str, tuple[str, tuple[Part, ...]]]:
    """Layers of a dense model of which parts have adapters of their own (``canonical_lora.py``), as the recipes call
    them, and the parts."""
    of_qkv = of_attention(spec.heads, spec.kv_heads, spec.head_dim)
    plain = sum(one.outputs for one in of_qkv) == spec.qkv_features
    attention = {"linear_qkv": (QKV, of_qkv)} if plain else {}
    return attention | ({"linear_fc1": (FC1, of_gated(spec.ffn))} if spec.gated else {})


def _canonical(spec: ModelSpec, layers: int) -> dict[str, list[Adaptable]]:
    return {
        name: [Adaptable(layer, part.outputs, spec.hidden, layers, unasked=False)]
        for whole, (layer, parts) in _parts(spec).items()
        for name, part in zip(PARTS[whole], parts, strict=True)
    }


def _latent(plan: Plan, layers: int) -> dict[str, list[Adaptable]]:
    """Projections of latent attention, which has no ``linear_qkv``."""
    spec = plan.model
    heads, q, kv = spec.heads, spec.latent_q_rank, spec.latent_kv_rank
    keys = spec.nope_head_dim + spec.rope_head_dim
    sizes = {
        latent.KV_DOWN: (kv + spec.rope_head_dim, spec.hidden),
        latent.KV_UP: (heads * (spec.nope_head_dim + spec.value_head_dim), kv),
        latent.PROJECTION: (spec.hidden, heads * spec.value_head_dim),
    }
    sizes |= (
        {latent.Q_DOWN: (q, spec.hidden), latent.Q_UP: (heads * keys, q)}
        if q
        else {latent.Q: (heads * keys, spec.hidden)}
    )
    made = {name.rpartition(".")[2]: [Adaptable(name, *size, layers)] for name, size in sizes.items()}
    return {"linear_qkv": [], **made}


def tuning_of(plan: ResolvedPlan) -> Tuning | None:
    """What is trained of a layer; ``None`` where all of it is."""
    lora = plan.lora
    if lora.rank is None:
        return None
    assert lora.dtype is not None
    targets = {*(lora.targets or ())}
    parts = tuple(parts for whole, parts in _parts(plan.model).items() if targets & {*PARTS[whole]})
    adapters = Adapters(lora.rank, adapted(plan), lora.dropout, lora.dtype, dora=lora.dora, parts=parts)
    return Tuning(adapters=adapters, input_requires_grad=plan.recompute.mode == "full")


_MODELLED = {
    "layout.etp": "; --etp 1 is, and without --etp it is tp",
    "megatron.cuda_graphs": "; transformer_engine of mlp alone (--cuda-graph-modules mlp) is, where attention alone has"
    " adapters",
}
"""Of fields that are modelled in part: the part that is."""


def check_adapters(plan: ResolvedPlan) -> None:
    """Refuses what no recipe has frozen weights or adapters of."""
    rank = plan.lora.rank
    if rank is None:
        return
    if rank % plan.layout.tp:
        raise PlanError("lora.rank", rank, f"must be a multiple of tp {plan.layout.tp}, whose ranks divide it")
    if plan.lora.dora:
        plan.refuse_for("lora.dora", _refuses_norms(plan))
    _check_canonical(plan)
    for field, applies in _not_modelled(plan):
        if applies:
            raise plan.wrong(field, f"is not modelled yet with adapters (lora.rank){_MODELLED.get(field, '')}")


def _check_canonical(plan: ResolvedPlan) -> None:
    """``CanonicalLoRA``: what stops it, and DoRA, which it has not."""
    targets, tp = plan.lora.targets or (), plan.layout.tp
    every = [one for parts in PARTS.values() for one in parts]
    if not {*targets} & {*every}:
        return
    if plan.lora.dora:
        raise plan.wrong("lora.dora", f"must be false with parts of layers in lora.targets ({', '.join(every)})")
    for whole, parts in PARTS.items():
        named, has = ", ".join(parts), {*parts} & {*targets}
        if whole in targets:
            problem = f"must not name {whole} beside parts of layers, as CanonicalLoRA asserts; it has {named}"
            raise PlanError("lora.targets", list(targets), problem)
        if has and has != {*parts}:
            problem = f"must have all of {named}, or none: CanonicalLoRA stops at one that is missing"
            raise PlanError("lora.targets", list(targets), problem)
    tokens = plan.batch.seq // plan.layout.cp * plan.batch.mbs
    if {*PARTS["linear_qkv"]} & {*targets} and tokens % tp:
        raise plan.wrong("layout.tp", f"must divide a rank's {tokens} tokens with parts of linear_qkv in lora.targets")


def _refuses_norms(plan: ResolvedPlan) -> dict[str, bool]:
    """Why DoRA, which reads the whole weight of a layer (``DoRALinear._get_weight_norm``), is not modelled."""
    model = plan.model
    return {
        "must be false with lora.dropout, which runs the base layer twice: it is not modelled yet": plan.lora.dropout
        > 0,
        "must be false with fp8 or fp4: that combination is not modelled yet": plan.precision.low is not None,
        "must be false with adapters of experts, whose grouped layers have no weight that it reads": bool(
            adapted(plan) & {f"{EXPERTS}.linear_fc1", f"{EXPERTS}.linear_fc2"}
        ),
        "must be false with latent attention: that combination is not modelled yet": bool(model.latent_kv_rank),
        "must be false with hybrids: that combination is not modelled yet": bool(model.layer_pattern),
    }


def _not_modelled(plan: ResolvedPlan) -> Iterator[tuple[str, object]]:
    model, megatron, optimizer = plan.model, plan.megatron, plan.optimizer
    te = tuple(map(int, megatron.transformer_engine.split(".")[:2]))
    yield "megatron.transformer_engine", te < te_facts.OLDEST_FROZEN
    yield "megatron.transformer_impl", megatron.transformer_impl == "local"
    yield "model.causal", not model.causal
    yield from _of_experts(plan)
    yield "recompute.modules", _recomputes_leaf(plan)
    for name in ("linear_interval", "layer_blocks"):
        yield f"model.{name}", getattr(model, name)
    for name in ("fsdp", "torch_fsdp"):
        yield f"megatron.{name}", getattr(megatron, name) != "none"
    yield "megatron.cuda_graphs", megatron.cuda_graphs != "none" and not _graphs_are_frozen(plan)
    names = ("optimizer_offload", "offload_modules", "offload_layers", "defer_embedding_wgrad", "logits_dtype")
    for name in (*names, "fuses_operations", "fp32_gradients_of", "clips_queries", "detaches_heads", "mixes_states"):
        yield f"megatron.{name}", getattr(megatron, name)
    yield "optimizer.name", optimizer.name == "muon"
    yield "megatron.joint_latent_down", megatron.joint_latent_down
    if model.layer_pattern:  # ``recompute.py`` knows no hybrids; a transposed gradient is one of one sequence alone
        yield "recompute.mode", plan.recompute.mode == "full"
        yield "batch.mbs", plan.batch.mbs > 1
        yield "model.layer_pattern", "G" in model.layer_pattern
    yield "precision.fp4", plan.precision.fp4


def _graphs_are_frozen(plan: ResolvedPlan) -> bool:
    """Graphs run MLPs alone, behind attention that alone has adapters: then no graph has a parameter that is trained
    (Transformer Engine's ``graph.py``, ``_run_warmup_backward``, leaves out those without a gradient), and what it is
    given has a gradient in every layer, as when it is captured (``module.py``, ``get_layer_static_inputs``)."""
    megatron = plan.megatron
    return (
        megatron.cuda_graphs == "transformer_engine"
        and set(megatron.cuda_graph_modules or ()) == {"mlp"}
        and not plan.model.layer_pattern
        and all(name.startswith("self_attention.") for name in adapted(plan))
    )


def _recomputes_leaf(plan: ResolvedPlan) -> bool:
    """The first layer recomputes something whose input requires no gradient. ``CheckpointWithoutOutput`` then has no
    inputs, since autograd keeps none (``tensor_parallel/random.py``, ``_recompute``), and a reentrant checkpoint
    (``mlp``, ``moe``) hands adapters no gradient."""
    modules, names = frozenset(plan.recompute.modules or ()), adapted(plan)
    if plan.model.latent_kv_rank:
        later = "mla_up_proj" in modules and not names & {latent.Q_DOWN, latent.KV_DOWN}
        if later or "layernorm" in modules:
            return True
    if any(one.startswith("self_attention.") for one in names):
        return False
    needs = {"mlp", "moe", *(("layernorm",) if plan.model.experts else ())}
    return bool(modules & needs) or ("moe_act" in modules and f"{EXPERTS}.linear_fc1" not in names)


def _of_experts(plan: ResolvedPlan) -> Iterator[tuple[str, object]]:
    """Adapters of a rank's grouped experts, whole ones, and of shared experts beside no
    exchange."""
    if not plan.model.experts:
        return
    given, model = plan.experts, plan.model
    yield "precision.fp8", plan.precision.fp8 and model.mlp_bias
    for name in ("overlap_exchange", "delay_wgrad", "wgrad_beside_dispatch", "grouped_tensor", "shared_chain"):
        yield f"experts.{name}", getattr(given, name)
    if adapted(plan) & {f"{EXPERTS}.linear_fc1", f"{EXPERTS}.linear_fc2"}:
        yield "experts.grouped_gemm", not given.grouped_gemm
        yield "layout.etp", (plan.layout.etp or plan.layout.tp) > 1
        yield "experts.shared_expert_overlap", given.shared_expert_overlap and plan.layout.sequence_parallel
