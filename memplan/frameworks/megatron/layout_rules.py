"""Rules of how ranks share a model: sharding, encoder-decoders, hybrids, context, stages, experts and their overlap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...plan.errors import ABSENT, PlanError
from ...plan.megatron_layout import further_stage, written_out
from ...plan.spec import LINEAR, block_of, kinds_of

if TYPE_CHECKING:
    from ...plan.plan import ResolvedPlan


def check_distributed(plan: ResolvedPlan) -> None:
    """What the distributed optimizer has, and what belongs to it."""
    megatron, ranks, sharded = plan.megatron, plan.layout.dp * plan.layout.cp, plan.layout.zero == 1
    field, instances = "megatron.distributed_optimizer_instances", megatron.distributed_optimizer_instances
    plan.refuse(
        (field, instances > 1 and not sharded, "must be 1 without the distributed optimizer (zero: 1)"),
        (field, ranks % instances, f"must divide dp x cp = {ranks}"),
        (
            "megatron.overlap_param_gather",
            megatron.overlap_param_gather
            and not (sharded and (megatron.overlap_grad_reduce or megatron.fsdp != "none")),
            "must be false without "
            + ("megatron.overlap_grad_reduce" if sharded else "the distributed optimizer (zero: 1)"),
        ),
    )


def check_sharding(plan: ResolvedPlan) -> None:
    """Megatron-FSDP, as far as it is modelled."""
    megatron, layout = plan.megatron, plan.layout
    if megatron.fsdp == "none":
        for name, _ in megatron.changed():
            if name.startswith("fsdp_"):
                raise plan.wrong(f"megatron.{name}", "must be left out without Megatron-FSDP (megatron.fsdp)")
        return
    for name in ("pp", "vpp"):
        if getattr(layout, name) > 1:
            raise plan.wrong(
                f"layout.{name}",
                "must be 1 with Megatron-FSDP (--use-megatron-fsdp): its hooks return views of a stage's output, which "
                "Megatron-Core's schedules refuse to let go (deallocate_output_tensor)",
            )
    own = {
        "name": ("adam or sgd", plan.optimizer.name == "muon"),
        "main_parameters": ("fp32", plan.optimizer.main_parameters != "fp32"),
    }
    for name, (wanted, applies) in own.items():
        if applies:
            raise plan.wrong(
                f"optimizer.{name}", f"must be {wanted} with Megatron-FSDP, which has main parameters of its own"
            )
    plan.refuse(
        (
            "recompute.layers",
            plan.recompute.mode == "full" and plan.recompute.method == "uniform" and (plan.recompute.layers or 1) > 1,
            "must be 1 with Megatron-FSDP: layers that are recomputed together are not modelled with it yet",
        ),
        (
            "megatron.fsdp_meta_device",
            megatron.fsdp == "no_shard" and megatron.fsdp_meta_device,
            "must be false with megatron.fsdp no_shard, which shards no parameters",
        ),
    )
    instances = megatron.distributed_optimizer_instances
    if megatron.fsdp_outer == "optim" and (megatron.fsdp != "optim_grads_params" or instances == 1):
        raise plan.wrong(
            "megatron.fsdp_outer",
            "needs megatron.fsdp optim_grads_params and megatron.distributed_optimizer_instances above 1",
        )
    reduced = megatron.fsdp_communication or plan.precision.gradients
    if reduced != plan.precision.gradients and (megatron.fsdp in ("no_shard", "optim") or instances > 1):
        raise plan.wrong(
            "megatron.fsdp_communication",
            f"must be {plan.precision.gradients}, as precision.gradients, unless gradients are sharded among all "
            "ranks: a cast copy is not modelled yet",
        )


def check_torch_sharding(plan: ResolvedPlan) -> None:
    """PyTorch's FSDP2: what ``validate_args`` and ``validate_optimizer`` ask of it, and as far as it is modelled."""
    megatron, model, beside = plan.megatron, plan.model, "with PyTorch's FSDP2 (megatron.torch_fsdp)"
    if megatron.torch_fsdp == "none":
        if megatron.torch_fsdp_host_init:
            raise plan.wrong(
                "megatron.torch_fsdp_host_init", "must be false without PyTorch's FSDP2 (megatron.torch_fsdp)"
            )
        return
    refused: dict[str, tuple[object, bool]] = {
        "layout.pp": (1, plan.layout.pp > 1),
        "layout.vpp": (1, plan.layout.vpp > 1),
        "layout.ep": (1, plan.layout.ep > 1),
        "layout.zero": (0, plan.layout.zero > 0),
        "model.tied_embeddings": ("false", model.tied_embeddings),
        "precision.dtype": ("bf16 or fp32", plan.precision.dtype == "fp16"),
        "optimizer.name": ("adam, adamw or sgd", plan.optimizer.name == "muon"),
        "megatron.fsdp": ("none", megatron.fsdp != "none"),
        "megatron.gradient_accumulation_fusion": ("false", megatron.gradient_accumulation_fusion),
    }
    for field, (wanted, applies) in refused.items():
        if applies:
            raise plan.wrong(field, f"must be {wanted} {beside}, as in Megatron-Core")
    if plan.precision.gradients != plan.precision.stored:
        raise plan.wrong(
            "precision.gradients",
            f"must be {plan.precision.stored} {beside}, which is told no dtype but the parameters'",
        )
    missing: dict[str, bool] = {
        "model.experts": model.experts > 0,
        "model.latent_kv_rank": model.latent_kv_rank is not None and model.latent_kv_rank > 0,
        "model.mtp_layers": model.mtp_layers > 0,
        "model.layer_pattern": bool(model.layer_pattern),
        "model.family": model.family in ("bert", "t5"),
        "precision.fp8": plan.precision.fp8 is not None,
        "precision.fp4": plan.precision.fp4 is not None,
        "megatron.cuda_graphs": megatron.cuda_graphs != "none",
        "megatron.offload_modules": megatron.offload_modules is not None,
        "megatron.optimizer_graph": megatron.optimizer_graph,
        "megatron.distribute_saved": megatron.distribute_saved,
        "megatron.registers_buffers": megatron.registers_buffers,
        "megatron.clips_queries": megatron.clips_queries,
        "megatron.packed": megatron.packed,
        "recompute.layers": plan.recompute.mode == "full"
        and plan.recompute.method == "uniform"
        and (plan.recompute.layers or 1) > 1,
    }
    for field, applies in missing.items():
        if applies:
            raise plan.wrong(
                field,
                f"must be {'1' if field == 'recompute.layers' else 'left out'} {beside}: it is not modelled yet",
            )
    buffers = {
        "buckets": None, "bucket_size": None, "pad_buckets": False, "sums_in_fp32": False, "fp32_gradients_of": None
    }  # fmt: skip
    for name, default in buffers.items():
        if getattr(megatron, name) != default:
            raise plan.wrong(
                f"megatron.{name}",
                f"must be left out {beside}: it belongs to Megatron's own buffers of gradients",
            )


def check_decoder(plan: ResolvedPlan) -> None:
    """An encoder-decoder, as far as it is modelled: ``pretrain_t5.py`` itself refuses a pipeline."""
    t5, seq = plan.model.family == "t5", plan.batch.decoder_seq
    if t5 is (seq is None):
        raise PlanError(
            "batch.decoder_seq",
            ABSENT if t5 else seq,
            "is needed with family t5 (--decoder-seq)"
            if t5
            else f"must be left out: {plan.model.name} has no decoder of its own",
        )
    if not t5:
        return
    for name in ("pp", "vpp", "cp"):
        if getattr(plan.layout, name) > 1:
            raise plan.wrong(
                f"layout.{name}", "must be 1 with family t5" + (", which has no pipeline" if name != "cp" else "")
            )
    plan.refuse(
        (
            "recompute.mode",
            plan.recompute.mode == "full",
            "must be none or selective with family t5: no more is modelled yet",
        ),
        ("megatron.fsdp", plan.megatron.fsdp != "none", "must be none with family t5: it is not modelled yet"),
    )


def check_hybrid(plan: ResolvedPlan) -> None:
    """A hybrid, as far as it is modelled; its stages follow from the pattern."""
    model, megatron = plan.model, plan.megatron
    if model.activation == "relu2" and model.mlp_bias and megatron.bias_gelu_fusion:
        raise plan.wrong("megatron.bias_gelu_fusion", "must be false with relu2 and biases, which it does not add")
    if "M" not in model.layer_pattern + model.mtp_pattern:
        for name in ("mamba_apart", "mamba_states", "mamba_chunk"):
            if getattr(megatron, name) != type(megatron).model_fields[name].default:
                raise plan.wrong(f"megatron.{name}", "must be left out: the model has no Mamba-2 layers")
    if not model.layer_pattern:
        return
    if megatron.offload_modules is not None:
        raise plan.wrong(
            "megatron.offload_modules",
            "must be left out with a hybrid: its activations on the host are not modelled yet",
        )
    if "M" in model.layer_pattern + model.mtp_pattern:
        _check_mamba(plan)


def _check_mamba(plan: ResolvedPlan) -> None:
    """How ranks share heads and groups (``MambaMixer`` and ``MambaContextParallel``, ``__init__``)."""
    tp, cp, heads, groups = plan.layout.tp, plan.layout.cp, plan.model.mamba_heads, plan.model.mamba_groups
    plan.refuse(
        ("layout.tp", heads % tp or groups % tp, f"must divide the {heads} Mamba heads and their groups ({groups})"),
        ("layout.cp", heads // tp % cp, f"must divide the {heads // tp} Mamba heads of a rank"),
        (
            "layout.cp",
            groups // tp % cp and cp % (groups // tp),
            f"must divide the {groups // tp} groups of Mamba heads of a rank, or be divided by them",
        ),
    )


def check_blocks(plan: ResolvedPlan) -> None:
    """How tensor-parallel ranks share layers that differ (``attention.py``, ``mlp.py``, ``linear_replacements.py``)."""
    model, layout, megatron = plan.model, plan.layout, plan.megatron
    plan.refuse(
        (
            "megatron.fsdp",
            model.layer_blocks and megatron.fsdp != "none",
            "must be none with layers that differ (model.layer_blocks), whose units are not modelled yet",
        ),
        (
            "megatron.clips_queries",
            model.layer_blocks and megatron.clips_queries,
            "must be false with layers that differ (model.layer_blocks): that combination is not modelled yet",
        ),
    )
    for text in kinds_of(model.layer_blocks):
        own = block_of(text)
        plan.refuse(
            (
                "layout.tp",
                own.kv_heads and own.kv_heads % layout.tp and layout.tp % own.kv_heads,
                f"must divide the {own.kv_heads} key/value heads of layers {text}, or be a multiple of them",
            ),
            ("layout.tp", own.ffn % layout.tp, f"must divide the {own.ffn} features of the MLP of layers {text}"),
            (
                "layout.sequence_parallel",
                LINEAR in own.replaced and layout.tp > 1 and layout.sequence_parallel,
                f"must be false with linear layers (model.layer_blocks {text}): Megatron-Core stops, because it adds "
                "zeros to tokens instead of features",
            ),
            (
                "megatron.tp_comm_overlap",
                LINEAR in own.replaced and plan.megatron.tp_comm_overlap,
                f"must be false with linear layers (model.layer_blocks {text}), which have no user buffers",
            ),
        )


def check_groups(plan: ResolvedPlan) -> None:
    """Tensor-parallel ranks share key/value heads out, or several have one (``transformer_config.py``)."""
    groups, tp = plan.model.kv_heads, plan.layout.tp
    if groups % tp and tp % groups:
        raise plan.wrong("layout.tp", f"must divide the {groups} key/value heads, or be a multiple of them")


def check_context_parallel(plan: ResolvedPlan) -> None:
    megatron, cp = plan.megatron, plan.layout.cp
    if megatron.transformer_impl == "local" and cp > 1:
        raise plan.wrong("layout.cp", "must be 1 with transformer_impl local")
    if cp > 1:
        _check_context_way(plan)
        if megatron.cp_communication == "a2a+p2p" and megatron.cp_inner is None:
            problem = "needs megatron.cp_inner (--cp-inner), the first of Megatron-LM's "
            problem += "--hierarchical-context-parallel-sizes, without which it does not start"  # validate_args
            raise plan.wrong("megatron.cp_communication", problem)
    heads, inner = max(min(plan.model.heads, plan.model.kv_heads) // plan.layout.tp, 1), megatron.cp_inner or 1
    if megatron.cp_communication == "a2a" and heads % cp:
        problem = f"must divide the {heads} key/value heads of a rank, because a2a distributes heads"
        if not plan.model.attention_sinks:  # ``_check_context_way``
            other = "p2p" if plan.model.sliding_window is None else "all_gather"
            problem += f"; --cp-communication {other} has no such limit"
        raise plan.wrong("layout.cp", problem)
    refused = {
        "must be 1 without megatron.cp_communication a2a+p2p": megatron.cp_communication != "a2a+p2p",
        f"must divide layout.cp {cp}: the ring has the rest": cp > 1 and cp % inner > 0,
        f"must divide the {heads} key/value heads of a rank, which it distributes": cp > 1 and heads % inner > 0,
        "must be 1 with hybrids: Megatron-Core's Mamba layers and gated delta nets trade heads among all ranks": bool(
            plan.model.layer_pattern or plan.model.linear_interval
        ),
    }
    if inner > 1:
        plan.refuse_for("megatron.cp_inner", refused)


def _check_context_way(plan: ResolvedPlan) -> None:
    """Ways that know windows and sinks (``attn_forward_func_with_cp`` of Transformer Engine)."""
    model, way = plan.model, plan.megatron.cp_communication
    windows = model.sliding_window is not None
    take = "(--cp-communication a2a)"
    refused = {
        f"must be a2a with learned sinks: Transformer Engine's other ways do not know them {take}": (
            model.attention_sinks and way != "a2a"
        ),
        f"must be a2a or all_gather with sliding windows: a ring does not know them {take}": windows and "p2p" in way,
    }
    plan.refuse_for("megatron.cp_communication", refused)


def check_virtual_stages(plan: ResolvedPlan) -> None:
    for name, _ in plan.pipeline.changed():
        if plan.layout.vpp == 1 and name in ("group", "overlap_p2p", "overlap_p2p_warmup"):
            raise plan.wrong(f"pipeline.{name}", "needs virtual stages (vpp > 1)")


def check_further_layers(plan: ResolvedPlan) -> None:
    """A layout string names as many layers of multi-token prediction as there are, or none."""
    layout, wanted = plan.pipeline.layout, plan.model.mtp_layers
    named = 0 if layout is None else written_out(layout).count("m")
    if layout is not None and named not in (0, wanted):
        raise plan.wrong(
            "pipeline.layout", f"has {named} layers m of multi-token prediction; the model has {wanted} (mtp_layers)"
        )


def _possible(plan: ResolvedPlan, ranks: int, etp: int) -> str:
    """What to write in place of an ``ep`` that ``ranks`` cannot be divided into, ``etp`` ranks for each expert."""
    ep, tp, experts = plan.layout.ep, plan.layout.tp, plan.model.experts
    works = [size for size in range(1, ranks // etp + 1) if ranks % (size * etp) == 0 and experts % size == 0]
    narrow = "; --etp 1 allows this one (etp is tp where none is given)" if etp == tp > 1 and ranks % ep == 0 else ""
    return (
        f": ep {', '.join(map(str, works[-4:]))} {'works' if len(works) == 1 else 'work'}{narrow}" if works else narrow
    )


def check_experts(plan: ResolvedPlan) -> None:
    """How experts are divided over ranks (``parallel_state.py``), and what depends on there being any."""
    model, layout, given = plan.model, plan.layout, plan.experts
    ranks, etp = layout.tp * layout.cp * layout.dp, layout.etp or layout.tp
    if not model.experts:
        for name, value in (("ep", layout.ep), ("etp", layout.etp or 1)):
            if value > 1:
                raise plan.wrong(f"layout.{name}", f"must be 1: {model.name} has no experts")
        for name, _ in given.changed():
            raise plan.wrong(f"experts.{name}", f"must be left out: {model.name} has no experts")
        return
    if model.experts % layout.ep:
        raise plan.wrong("layout.ep", f"must divide the {model.experts} experts of {model.name}")
    if ranks % (layout.ep * etp):  # no rule of a table: what is possible takes long to find where ranks are many
        problem = f"must divide tp x cp x dp = {ranks}, the ranks of a pipeline stage"
        if layout.ep == 1:
            raise plan.wrong("layout.etp", problem)
        raise plan.wrong("layout.ep", f"times etp {etp} {problem}{_possible(plan, ranks, etp)}")
    if model.expert_ffn % etp:
        raise PlanError("layout.etp", etp, f"must divide the {model.expert_ffn} features of an expert (expert_ffn)")
    plan.refuse(
        (
            "layout.tp",
            model.shared_expert_ffn % layout.tp,
            f"must divide the {model.shared_expert_ffn} features of shared experts (shared_expert_ffn)",
        ),
        (
            "experts.pad_to_capacity",
            given.pad_to_capacity and given.capacity_factor is None,
            "needs experts.capacity_factor",
        ),
        (
            "megatron.distributed_optimizer_instances",
            ranks // (layout.ep * etp) % plan.megatron.distributed_optimizer_instances,
            f"must divide the {ranks // (layout.ep * etp)} replicas of each expert",
        ),
    )
    check_imbalance(plan)


PIECES = frozenset({"mlp", "moe"})
"""Parts of a layer that run apart from attention, which no graph may run then."""


def check_overlap(plan: ResolvedPlan) -> None:
    """The exchange of tokens beside another micro-batch's computation (``transformer_config.py``, ``arguments.py``,
    ``mcore_fsdp_adapter.py``), as far as it is modelled."""
    given, megatron, recompute = plan.experts, plan.megatron, plan.recompute
    _check_delays(plan, _version(megatron.transformer_engine))
    if not given.overlap_exchange:
        for name in ("delay_wgrad", "early_attention_release"):
            if getattr(given, name):
                raise plan.wrong(f"experts.{name}", "must be false without experts.overlap_exchange")
        return
    field, whole = "experts.overlap_exchange", megatron.fsdp == "optim_grads_params"
    modules = recompute.modules or () if recompute.mode == "selective" else ()
    reasons = {
        "must be false without expert parallelism (ep > 1)": plan.layout.ep == 1,
        "must be false without interleaved stages (vpp > 1) where there is a pipeline": plan.layout.pp > 1
        and plan.layout.vpp == 1,
        "must be false with the allgather dispatcher": given.dispatcher == "allgather",
        "must be false with full recompute": recompute.mode == "full",
        "must be false while experts are recomputed (recompute.modules moe)": "moe" in modules,
        "must be false with experts.shared_expert_overlap": given.shared_expert_overlap,
        "must be false with fp32: bf16 and fp16 have it": plan.precision.dtype == "fp32",
        "must be false with more than one layer of multi-token prediction": plan.model.mtp_layers > 1,
        "must be false with multi-token prediction in a stage before that of the loss (pipeline.layout), where it is "
        "not modelled yet": further_stage(plan.pipeline.layout, plan.layout.pp) < plan.layout.pp - 1,
        "must be false before PyTorch 2.6, with which it hangs": _version(plan.torch) < (2, 6),
        "must be false with graphs of MLPs or experts (megatron.cuda_graph_modules without mlp and moe)": (
            megatron.cuda_graphs == "transformer_engine"
            and not PIECES.isdisjoint(megatron.cuda_graph_modules or PIECES)
        ),
        "must be false with Megatron-Core's own graphs, which parts of layers do not call": megatron.cuda_graphs
        == "local",
        "must be false for hybrids: that combination is not modelled yet": bool(plan.model.layer_pattern),
        "must be false with deferred weight gradients of the head: that combination is not modelled yet": (
            megatron.defer_embedding_wgrad
        ),
        "must be false with norms that return the residual (megatron.norm_takes_residual): that combination is not "
        "modelled yet": megatron.norm_takes_residual,
        "must be false with Megatron-FSDP's double buffers": megatron.doubles_buffers,
        "must be false with sharded parameters (megatron.fsdp) and several micro-batches: gathers for two at once are "
        "not modelled yet": whole and plan.microbatches > 1,
    }
    plan.refuse_for(field, reasons)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def _check_delays(plan: ResolvedPlan, te: tuple[int, ...]) -> None:
    """Products for gradients of weights that run later, and the Transformer Engine that they need."""
    given, megatron = plan.experts, plan.megatron
    if given.delay_wgrad and given.wgrad_beside_dispatch:
        raise plan.wrong(
            "experts.wgrad_beside_dispatch",
            "must be false with experts.delay_wgrad: Megatron-Core has one or the other",
        )
    beside, fused = given.wgrad_beside_dispatch, megatron.gradient_accumulation_fusion or megatron.fsdp != "none"
    if beside and (given.overlap_exchange or given.dispatcher != "alltoall" or not given.grouped_gemm or not fused):
        raise plan.wrong(
            "experts.wgrad_beside_dispatch",
            "must be false with experts.overlap_exchange, a dispatcher other than alltoall or without "
            "experts.grouped_gemm, and, but for Megatron-FSDP, without gradient_accumulation_fusion",
        )
    for name in ("delay_wgrad", "wgrad_beside_dispatch"):
        if not getattr(given, name):
            continue
        if megatron.transformer_impl == "local":
            raise plan.wrong(f"experts.{name}", "must be false with local layers: Transformer Engine's have it")
        reasons = {
            (2, 8): "with overlap_grad_reduce" if megatron.overlap_grad_reduce and name == "delay_wgrad" else "",
            (2, 7): "" if megatron.gradient_accumulation_fusion else "without gradient_accumulation_fusion",
            (2, 3): "at all",
        }
        for least, why in reasons.items():
            if why and te < least:
                wanted = ".".join(map(str, least))
                raise plan.wrong(
                    f"experts.{name}",
                    f"must be false before Transformer Engine {wanted} {why}: this plan has {'.'.join(map(str, te))}",
                )


def check_imbalance(plan: ResolvedPlan) -> None:
    """One factor is of the most loaded rank; several are of each layer that has experts."""
    given, model = plan.experts, plan.model
    if given.imbalance in ("balanced", "worst"):
        return
    factors = given.imbalance.split(",")
    layers = sum(map(model.has_experts, range(model.layers)))
    plan.refuse(
        (
            "experts.imbalance",
            len(factors) > 1 and len(factors) != layers,
            f"has {len(factors)} factors; one for each of the {layers} layers with experts is wanted",
        ),
        (
            "experts.imbalance",
            len(factors) == 1 and float(given.imbalance) < 1.0,
            "must be balanced, worst, or a factor of at least 1: the most loaded rank has at least the mean",
        ),
    )
