"""A plan as Megatron-Core's own configurations: what ``megatron/training/arguments.py`` and ``gpt_builders.py`` make
of a launch script's arguments."""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from ...plan.plan import Plan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
POSITIONS = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}
FIRST_SCALE = 2.0**10
"""Of losses in fp16: small enough that the first step is applied, and optimizer states exist after it."""


def transformer_config(plan: Plan) -> TransformerConfig:
    """``core_transformer_config_from_args``."""
    megatron, layout = plan.megatron, plan.layout
    dtype = DTYPES[plan.precision.dtype]
    return TransformerConfig(
        **_architecture(plan),
        **_parallelism(plan),
        **_recompute(plan),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        attention_backend=AttnBackend[megatron.attention_backend],
        deterministic_mode=megatron.deterministic,
        gradient_accumulation_fusion=megatron.gradient_accumulation_fusion,
        bias_activation_fusion=_fuses_activation(plan),
        bias_dropout_fusion=megatron.bias_dropout_fusion,
        apply_rope_fusion=megatron.rope_fusion and plan.model.positions == "rotary",
        rotary_interleaved=megatron.rotary_interleaved,
        masked_softmax_fusion=megatron.masked_softmax_fusion,
        attention_softmax_in_fp32=megatron.attention_softmax_in_fp32 or megatron.query_key_layer_scaling,
        apply_query_key_layer_scaling=megatron.query_key_layer_scaling,
        fp32_residual_connection=megatron.fp32_residual,
        cross_entropy_loss_fusion=megatron.cross_entropy_fusion != "none",
        cross_entropy_fusion_impl="te" if megatron.cross_entropy_fusion == "te" else "native",
        calculate_per_token_loss=megatron.per_token_loss,
        cp_comm_type=megatron.cp_communication if layout.cp > 1 else None,
    )


def _architecture(plan: Plan) -> dict[str, Any]:
    spec = plan.model
    return {
        "num_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_query_groups": spec.kv_heads,
        "kv_channels": spec.head_dim,
        "ffn_hidden_size": spec.ffn,
        "normalization": NORMS[spec.norm],
        "qk_layernorm": spec.qk_norm,
        "gated_linear_unit": spec.gated,
        "activation_func": torch.nn.functional.silu if spec.activation == "swiglu" else torch.nn.functional.gelu,
        "add_bias_linear": spec.mlp_bias,
        "add_qkv_bias": spec.attention_bias,
        "hidden_dropout": spec.hidden_dropout,
        "attention_dropout": spec.attention_dropout,
    }


def _parallelism(plan: Plan) -> dict[str, Any]:
    layout, pipeline = plan.layout, plan.pipeline
    interleaved = layout.vpp > 1
    overlap = pipeline.overlap_p2p and interleaved
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if interleaved else None,
        "context_parallel_size": layout.cp,
        "sequence_parallel": layout.sequence_parallel,
        "num_layers_in_first_pipeline_stage": pipeline.first_layers,
        "num_layers_in_last_pipeline_stage": pipeline.last_layers,
        "account_for_embedding_in_pipeline_split": pipeline.count_embedding,
        "account_for_loss_in_pipeline_split": pipeline.count_loss,
        "pipeline_model_parallel_layout": pipeline.layout,
        "microbatch_group_size_per_vp_stage": pipeline.group,
        "overlap_p2p_comm": overlap,
        "batch_p2p_comm": not overlap,
        "overlap_p2p_comm_warmup_flush": pipeline.overlap_p2p_warmup,
        "deallocate_pipeline_outputs": True,
    }


def _recompute(plan: Plan) -> dict[str, Any]:
    given = plan.recompute
    if given.mode == "full":
        of_stage = plan.model.layers // (plan.layout.pp * plan.layout.vpp)
        layers = given.layers or (1 if given.method == "uniform" else of_stage)
        return {"recompute_granularity": "full", "recompute_method": given.method, "recompute_num_layers": layers}
    if given.mode == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(given.modules or ("core_attn",))}
    return {}


def _fuses_activation(plan: Plan) -> bool:
    if plan.model.activation == "swiglu":
        return plan.megatron.bias_swiglu_fusion
    return plan.megatron.bias_gelu_fusion and plan.model.mlp_bias


def layer_spec(plan: Plan) -> Any:
    """Of every transformer layer (``gpt_builders.py``)."""
    if plan.megatron.transformer_impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=plan.model.qk_norm)
    return get_gpt_layer_local_spec(qk_layernorm=plan.model.qk_norm, normalization=NORMS[plan.model.norm])


def ddp_config(plan: Plan, *, checks: bool) -> DistributedDataParallelConfig:
    """``get_model`` of ``megatron/training/training.py``; ``checks`` for NaN where the plan does."""
    megatron, layout = plan.megatron, plan.layout
    assert layout.dp is not None
    default = max(40_000_000, 1_000_000 * layout.dp * layout.cp)
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=plan.precision.gradients == "fp32",
        overlap_grad_reduce=megatron.overlap_grad_reduce,
        overlap_param_gather=megatron.overlap_param_gather,
        use_distributed_optimizer=layout.zero == 1,
        num_distributed_optimizer_instances=megatron.distributed_optimizer_instances,
        check_for_nan_in_grad=megatron.check_for_nan and checks,
        bucket_size=(megatron.bucket_size or default) if megatron.overlap_grad_reduce else None,
    )


def optimizer_config(plan: Plan) -> OptimizerConfig:
    """``get_megatron_optimizer_config``."""
    given, megatron = plan.optimizer, plan.megatron
    dtype = DTYPES[plan.precision.dtype]
    aware: dict[str, Any] = {}
    if given.precision_aware:
        names = {
            "main_params_dtype": given.main_parameters,
            "exp_avg_dtype": given.exp_avg,
            "exp_avg_sq_dtype": given.exp_avg_sq,
        }
        aware = {name: torch.uint8 if value == "fp8" else DTYPES[value] for name, value in names.items()}
        aware |= {"use_precision_aware_optimizer": True, "main_grads_dtype": DTYPES[plan.precision.gradients or "fp32"]}
    return OptimizerConfig(
        optimizer="sgd" if given.name == "sgd" else "adam",
        decoupled_weight_decay=given.name != "adam",
        lr=1e-4,
        min_lr=0.0,
        weight_decay=given.weight_decay if given.weight_decay is not None else 0.01,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        initial_loss_scale=FIRST_SCALE,
        clip_grad=megatron.clip_grad,
        log_num_zeros_in_grad=megatron.log_num_zeros_in_grad,
        use_distributed_optimizer=plan.layout.zero == 1,
        overlap_param_gather=megatron.overlap_param_gather,
        **aware,
    )
