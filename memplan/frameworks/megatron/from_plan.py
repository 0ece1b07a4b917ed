"""A plan as what Megatron-Core's layers and states are built from: sizes, kernels, precision, how states are kept."""

from __future__ import annotations

from typing import Any

from ...device.gpus import GPUS, MULTIPROCESSORS
from ...layers.fused_attention import Release
from ...layers.megatron_core import (
    te_facts,
)
from ...layers.megatron_core.graphs import parts_of_own
from ...layers.megatron_core.precision import Low, LowAttention, Recipe
from ...layers.megatron_core.shape import CoreAttention, CoreShape, ExpertShape, Overlap, Version
from ...layers.megatron_core.te_attention import backend
from ...plan.errors import PlanError
from ...plan.module_precision import widens_further
from ...plan.plan import ResolvedPlan
from ...plan.spec import of_any_depth
from .fsdp import Sharding
from .memory_rules import counts_on_device
from .modules import stage_entries
from .states import BUCKET_ALIGNMENT, WIDE_ALIGNMENT, Rules, bucket_size

HOPPER = (9, 0)
"""Compute capability that is assumed where no GPU is named."""

RECIPES: dict[str, Recipe] = {
    "delayed": "delayed", "tensorwise": "tensorwise", "blockwise": "blockwise", "mxfp8": "mxfp8", "nvfp4": "nvfp4"
}  # fmt: skip


def padded_vocab(plan: ResolvedPlan) -> int:
    """``vocab_size_with_padding``: up to a multiple of ``make_vocab_size_divisible_by`` times t."""
    multiple = plan.megatron.vocab_multiple * plan.layout.tp
    return -(-plan.model.vocab // multiple) * multiple


def core_shape(plan: ResolvedPlan) -> CoreShape:
    """Sizes and choices of one micro-batch on one rank."""
    megatron, layout, spec = plan.megatron, plan.layout, plan.model
    te = _transformer_engine(megatron.transformer_engine)
    recompute, local_layers = plan.recompute, megatron.transformer_impl == "local"
    return CoreShape(
        spec=of_any_depth(spec),
        b=1 if megatron.packed else plan.batch.mbs,
        s=plan.batch.seq // layout.cp * (plan.batch.mbs if megatron.packed else 1),
        packed=plan.batch.mbs if megatron.packed else 0,
        t=layout.tp,
        dtype=plan.precision.dtype,
        vocab=padded_vocab(plan),
        cp=layout.cp,
        **_context_ways(plan),
        sequence_parallel=layout.sequence_parallel,
        implementation=megatron.transformer_impl,
        te=te,
        deterministic=megatron.deterministic,
        deterministic_attention=_deterministic_attention(plan),
        gradient_fusion=megatron.gradient_accumulation_fusion,
        bias_activation_fusion=megatron.bias_swiglu_fusion
        if spec.activation == "swiglu"
        else megatron.bias_gelu_fusion and spec.activation != "relu2",
        weighted_fusion=plan.experts.squared_relu_fusion,
        bias_dropout_fusion=megatron.bias_dropout_fusion,
        rope_fusion=megatron.rope_fusion and not _scales_angles(plan),
        rotary_interleaved=megatron.rotary_interleaved,
        masked_softmax_fusion=megatron.masked_softmax_fusion,
        softmax_in_fp32=megatron.attention_softmax_in_fp32 or megatron.query_key_layer_scaling,
        query_key_layer_scaling=megatron.query_key_layer_scaling,
        cross_entropy="unfused" if megatron.cross_entropy_fusion == "none" else megatron.cross_entropy_fusion,
        fp32_residual=megatron.fp32_residual,
        recompute_modules=(recompute.modules or ()) if recompute.mode == "selective" else (),
        offload=megatron.offload_modules or (),
        offload_least=megatron.offload_least,
        graphs=_graphs(plan),
        defers=megatron.defer_embedding_wgrad,
        attention_mask=megatron.attention_mask_in_dataloader and not megatron.packed,
        clones_embedding=megatron.clone_scattered_embedding,
        per_token_loss=megatron.per_token_loss,
        logits=megatron.logits_dtype,
        largest_logit=_largest_logit(plan),
        detaches_heads=megatron.detaches_heads and spec.mtp_layers > 0,
        mixes_states=megatron.mixes_states and spec.mtp_layers > 0,
        te_activation=megatron.te_activation,
        fuses_operations=megatron.fuses_operations,
        norm_takes_residual=megatron.norm_takes_residual,
        joint_latent_down=megatron.joint_latent_down,
        mlp_chunks=megatron.mlp_chunks,
        mamba_apart=megatron.mamba_apart,
        mamba_states=megatron.mamba_states,
        mamba_chunk=megatron.mamba_chunk,
        distributes=megatron.distribute_saved,
        decoder=plan.batch.decoder_seq or 0,
        experts=expert_shape(plan),
        core=_version(plan.experts.megatron_core),
        low=low_of(plan, te),
        low_attention=low_attention(plan),
        low_head=megatron.fp8_output,
        precision_of=megatron.precision_of or (),
        wide_further=widens_further(megatron.precision_of or ()),
        starts=_chunk_starts(plan) if megatron.precision_of else (),
        sixteen_bit=plan.precision.wide_layers,
        layers=spec.layers if any(plan.precision.wide_layers) else 0,
        attention=_attention(plan, te),
        flash=_flash_release(plan, te),
        overlap=_overlap(plan),
        multiprocessors=132 if local_layers else MULTIPROCESSORS.get(plan.hardware.gpu or "", 132),
    )


SCALED_APART = (0, 16)
"""Megatron-Core that knows that Transformer Engine's fused rotary positions have no ``mscale``: it runs operators
(``rope_utils.py``, ``apply_rotary_pos_emb``: "is not supported by TE's fused RoPE"); before, the kernel without it."""


def _scales_angles(plan: ResolvedPlan) -> bool:
    """Sines and cosines times ``0.1 ln(factor) + 1`` (``_yarn_get_concentration_factor_from_config``). Latent attention
    has kernels of its own, which know it."""
    factor = plan.model.yarn_factor or 1.0
    return factor > 1 and not plan.model.latent_kv_rank and _version(plan.experts.megatron_core) >= SCALED_APART


def _context_ways(plan: ResolvedPlan) -> dict[str, Any]:
    """Two levels with one rank in either are the other one alone (``attn_forward_func_with_cp``)."""
    way, inner = plan.megatron.cp_communication, plan.megatron.cp_inner or 1
    if way != "a2a+p2p":
        return {"cp_communication": way}
    return {"cp_communication": "a2a"} if inner >= plan.layout.cp else {"cp_communication": "p2p", "cp_inner": inner}


def _graphs(plan: ResolvedPlan) -> tuple[str, ...] | None:
    """Parts of layers that graphs run; all, where there are none."""
    modules = plan.megatron.cuda_graph_modules or ()
    if plan.megatron.cuda_graphs == "local":
        return parts_of_own(modules, hybrid=bool(plan.model.layer_pattern))
    return modules if plan.megatron.cuda_graphs == "transformer_engine" else None


def _chunk_starts(plan: ResolvedPlan) -> tuple[int, ...]:
    """The first layer of every chunk that has one."""
    chunks = (chunk for stage in stage_entries(plan) for chunk in stage)
    layers = ([int(name[6:]) for name in chunk if name.startswith("layer.")] for chunk in chunks)
    return tuple(sorted(chunk[0] for chunk in layers if chunk))


def _attention(plan: ResolvedPlan, te: Version) -> CoreAttention:
    """What the layers' implementation attends with."""
    megatron, spec = plan.megatron, plan.model
    if megatron.transformer_impl == "local":
        return "local"
    if plan.precision.dtype == "fp32" and not spec.causal:
        raise plan.wrong(
            "precision.dtype",
            "must be bf16 or fp16 with Transformer Engine's attention of padded tokens, whose fp32 has no recipe",
        )
    assert megatron.attention_backend != "local"
    chosen = backend(
        megatron.attention_backend,
        te=te,
        capability=_capability(plan),
        dtype=plan.precision.dtype,
        head_dim=spec.head_dim,
        value_dim=spec.value_head_dim,
        dropout=spec.attention_dropout,
        deterministic=_deterministic_attention(plan),
        sinks=spec.attention_sinks,
        flash_installed=not _largest_logit(plan),
    )
    if chosen == "flash" and not spec.causal:
        raise plan.wrong("megatron.attention_backend", _flash_of_padded(plan))
    return chosen


def _flash_of_padded(plan: ResolvedPlan) -> str:
    """Why flash attention is refused behind a padding mask, where Transformer Engine packs sequences for it."""
    told = "flash attention packs sequences that have a padding mask (BERT, T5), which is not modelled"
    if plan.megatron.attention_backend == "flash":
        return f"must be auto or fused: {told}"
    gpu = f"on {plan.hardware.gpu}" if plan.hardware.gpu is not None else "here"
    if not _deterministic_attention(plan):
        return f"means flash attention {gpu}, where cuDNN's comes second or has no such heads; {told}: must be fused"
    dropout, gets = "", "megatron.attention_backend fused without that variable runs cuDNN's"
    if _capability(plan) >= (10, 0):
        dropout = f" with attention dropout {plan.model.attention_dropout:g}"
        gets = "--attention-dropout 0, or no such variable, runs cuDNN's"
    why = f"cuDNN's is not deterministic there{dropout} (NVTE_ALLOW_NONDETERMINISTIC_ALGO=0)"
    return f"means flash attention {gpu}: {why}, and {told}; {gets}"


def _flash_release(plan: ResolvedPlan, te: Version) -> Release:
    installed = int(plan.megatron.flash_attention)
    return te_facts.flash_release(
        installed if plan.environment.get(f"NVTE_FLASH_ATTN_V{installed}") != "0" else te_facts.SECOND,
        te,
        _capability(plan),
        head_dim=plan.model.head_dim,
        dropout=plan.model.attention_dropout,
        deterministic=_deterministic_attention(plan),
        context_parallel=plan.layout.cp > 1,
    )


def _capability(plan: ResolvedPlan) -> te_facts.Capability:
    gpu = GPUS[plan.hardware.gpu] if plan.hardware.gpu is not None else None
    return (gpu.compute_capability if gpu is not None else None) or HOPPER


def _largest_logit(plan: ResolvedPlan) -> bool:
    """Whether attention returns the largest score of each head."""
    return plan.megatron.largest_logit or plan.megatron.clips_queries


def _overlap(plan: ResolvedPlan) -> Overlap | None:
    """Of the exchange of tokens beside another micro-batch."""
    given = plan.experts
    if not given.overlap_exchange:
        return None
    return Overlap(given.delay_wgrad, given.early_attention_release, plan.megatron.fsdp != "none")


def _deterministic_attention(plan: ResolvedPlan) -> bool:
    return plan.environment.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"


def low_of(plan: ResolvedPlan, te: Version) -> Low | None:
    """In what linear layers multiply, if that is not the plan's dtype. MXFP8 and NVFP4 mean a Blackwell where no GPU is
    named."""
    given, recipe = plan.precision, plan.precision.low
    if recipe is None:
        return None
    gpu = GPUS[plan.hardware.gpu] if plan.hardware.gpu is not None else None
    capability = (gpu.compute_capability if gpu is not None else None) or te_facts.LOW_PRECISION_SINCE[recipe]
    turns = not ((10, 0) <= capability < (12, 0) or capability >= (13, 0))
    return Low(RECIPES[recipe], turns, te, given.fp8_parameters, given.amax_history)


OF_ATTENTION: dict[str, Recipe | None] = {
    "F16": None, "DelayedScaling": "delayed", "Float8CurrentScaling": "tensorwise", "MXFP8BlockScaling": "mxfp8"
}  # fmt: skip
"""``NVTE_DPA_FP8_RECIPE``; unless it is set attention has that of linear layers
(``DotProductAttention.init_fp8_metadata``)."""


def low_attention(plan: ResolvedPlan) -> LowAttention | None:
    """In what attention multiplies, if that is not the plan's dtype."""
    own, environment = plan.precision.low, plan.environment
    if not plan.megatron.fp8_attention or own is None:
        return None
    named = environment.get("NVTE_DPA_FP8_RECIPE", "")
    recipe = OF_ATTENTION[named] if named in OF_ATTENTION else RECIPES[own]
    history = environment.get("NVTE_DPA_FP8DS_AMAX_HISTLEN", "1")
    kept = plan.precision.amax_history if own == recipe == "delayed" else int(history) if history.isdecimal() else 1
    return LowAttention(recipe, environment.get("NVTE_FP8_DPA_BWD", "1") != "0", kept) if recipe is not None else None


def expert_shape(plan: ResolvedPlan) -> ExpertShape | None:
    """Choices of layers with experts, where the model has them."""
    given, layout = plan.experts, plan.layout
    if not plan.model.experts:
        return None
    etp = layout.etp or layout.tp
    named = {"balanced": 1.0, "worst": float(layout.ep)}
    factors = [named.get(one) or float(one) for one in given.imbalance.split(",")]
    return ExpertShape(
        ep=layout.ep,
        etp=etp,
        dispatcher=given.flex_backend if given.dispatcher == "flex" else given.dispatcher,
        grouped=given.grouped_gemm and plan.megatron.transformer_impl != "local",
        permute_fusion=given.permute_fusion,
        shared_overlap=given.shared_expert_overlap,
        capacity_factor=given.capacity_factor,
        padded=given.pad_to_capacity,
        imbalance=factors[-1],
        imbalances=tuple(factors) if len(factors) > 1 else (),
        apart=layout.ep > 1 or etp != layout.tp,
        router_pads=given.router_padding,
        grouped_tensor=counts_on_device(plan),
        shared_chain=given.shared_chain,
        rank_capacity=given.rank_capacity,
        jitters=given.input_jitter,
        router_fusion=given.router_fusion,
        wgrad_beside=given.wgrad_beside_dispatch,
    )


def _transformer_engine(text: str) -> Version:
    version = _version(text)
    if not te_facts.OLDEST <= version <= te_facts.NEWEST:
        oldest, newest = (".".join(map(str, known)) for known in (te_facts.OLDEST, te_facts.NEWEST))
        raise PlanError("megatron.transformer_engine", text, f"must be a version from {oldest} to {newest}")
    return version


def _version(text: str) -> Version:
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


def rules(plan: ResolvedPlan) -> Rules:
    """How the plan's states are kept."""
    layout, megatron, optimizer = plan.layout, plan.megatron, plan.optimizer
    ranks = layout.dp * layout.cp
    size = megatron.bucket_size if megatron.bucket_size is not None else bucket_size(ranks)
    cut = megatron.overlap_grad_reduce and not megatron.gather_in_step  # ``disable_bucketing`` (``dist_utils.py``)
    return Rules(
        dtype=plan.precision.dtype,
        gradients=plan.precision.gradients,
        distributed=layout.zero == 1,
        shards=ranks // megatron.distributed_optimizer_instances,
        bucket=size if cut else None,
        buckets=megatron.buckets if cut else None,
        optimizer=optimizer.name,
        in_torch=optimizer if optimizer.implementation == "foreach" else None,
        precision_aware=optimizer.precision_aware,
        main_parameters=optimizer.main_parameters,
        exp_avg=optimizer.exp_avg,
        exp_avg_sq=optimizer.exp_avg_sq,
        counts_zeros=megatron.log_num_zeros_in_grad,
        te=_transformer_engine(megatron.transformer_engine),
        low=low_of(plan, _transformer_engine(megatron.transformer_engine)),
        fp8_recipe=optimizer.fp8_recipe or plan.precision.fp8,
        expert_shards=max(1, expert_replicas(plan) // megatron.distributed_optimizer_instances),
        sharded=megatron.fsdp != "none",
        alignment=WIDE_ALIGNMENT if megatron.pad_buckets else BUCKET_ALIGNMENT,
        offload=megatron.optimizer_offload,
        clips=megatron.clips_queries,
        registers=megatron.registers_buffers,
        sums_in_fp32=megatron.sums_in_fp32 and plan.precision.gradients != "fp32",
        wide_gradients=megatron.fp32_gradients_of or (),
    )


def sharding_of(plan: ResolvedPlan) -> Sharding | None:
    """Megatron-FSDP's, where it runs."""
    given, own = plan.megatron, rules(plan)
    if given.fsdp == "none":
        return None
    return Sharding(
        strategy=given.fsdp,
        ranks=own.shards,
        expert_ranks=own.expert_shards,
        outer=given.distributed_optimizer_instances if given.fsdp_outer == "optim" else 1,
        communication=given.fsdp_communication or own.gradients,
        bucket=own.bucket,
        capacity=given.fsdp_unit_size,
        double_buffer=given.doubles_buffers,
        meta=given.fsdp_meta_device,
        stops=given.log_params_norm,
        fused=given.gradient_accumulation_fusion,
        keeps_columns=given.fsdp_keep_transposes,
        registers=given.registers_buffers,
        max_pool=given.fsdp_max_pool,
        persists=given.fsdp_persistent,
    )


def expert_replicas(plan: ResolvedPlan) -> int:
    """Ranks that have the same experts: the expert-data-parallel size, of tp cp dp = etp ep edp."""
    layout = plan.layout
    return layout.tp * layout.cp * layout.dp // (layout.ep * (layout.etp or layout.tp))
