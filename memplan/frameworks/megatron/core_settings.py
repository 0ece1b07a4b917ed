"""A plan as Megatron-Core's own configurations: what ``megatron/training/arguments.py`` and ``gpt_builders.py`` make
of a launch script's arguments.

Nothing is left out of an iteration for it; ``validating.ON_CPU`` names every place, for reports.
"""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from ...plan.plan import ResolvedPlan
from ...trace.storages import Follow
from ...trace.substitutions import cuda_behaviour_of_real
from .states import bucket_size

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
POSITIONS = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}
FIRST_SCALE = 2.0**10
"""Of losses in fp16: small enough that the first step is applied, and optimizer states exist after it."""


def transformer_config(plan: ResolvedPlan) -> TransformerConfig:
    """``core_transformer_config_from_args``."""
    megatron, layout = plan.megatron, plan.layout
    dtype = DTYPES[plan.precision.dtype]
    return TransformerConfig(
        **_architecture(plan),
        **_parallelism(plan),
        **_recompute(plan),
        transformer_impl=megatron.transformer_impl,
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


def _architecture(plan: ResolvedPlan) -> dict[str, Any]:
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


def _parallelism(plan: ResolvedPlan) -> dict[str, Any]:
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


def _recompute(plan: ResolvedPlan) -> dict[str, Any]:
    given = plan.recompute
    if given.mode == "full":
        of_stage = plan.model.layers // (plan.layout.pp * plan.layout.vpp)
        layers = given.layers or (1 if given.method == "uniform" else of_stage)
        return {"recompute_granularity": "full", "recompute_method": given.method, "recompute_num_layers": layers}
    if given.mode == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(given.modules or ("core_attn",))}
    return {}


def _fuses_activation(plan: ResolvedPlan) -> bool:
    if plan.model.activation == "swiglu":
        return plan.megatron.bias_swiglu_fusion
    return plan.megatron.bias_gelu_fusion and plan.model.mlp_bias


def layer_spec(plan: ResolvedPlan) -> Any:
    """Of every transformer layer (``gpt_builders.py``)."""
    if plan.megatron.transformer_impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=plan.model.qk_norm)
    return get_gpt_layer_local_spec(qk_layernorm=plan.model.qk_norm, normalization=NORMS[plan.model.norm])


def ddp_config(plan: ResolvedPlan, *, checks: bool) -> DistributedDataParallelConfig:
    """``get_model`` of ``megatron/training/training.py``; ``checks`` for NaN where the plan does."""
    megatron, layout = plan.megatron, plan.layout
    default = bucket_size(layout.dp * layout.cp)
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=plan.precision.gradients == "fp32",
        overlap_grad_reduce=megatron.overlap_grad_reduce,
        overlap_param_gather=megatron.overlap_param_gather,
        use_distributed_optimizer=layout.zero == 1,
        num_distributed_optimizer_instances=megatron.distributed_optimizer_instances,
        check_for_nan_in_grad=megatron.check_for_nan and checks,
        bucket_size=(megatron.bucket_size or default) if megatron.overlap_grad_reduce else None,
    )


def optimizer_config(plan: ResolvedPlan) -> OptimizerConfig:
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
        optimizer=given.algorithm.megatron,
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


NUMBERS = {"torch.FloatTensor", "torch.HalfTensor", "torch.BFloat16Tensor"}
FACTORIES = frozenset((torch.tensor, torch.zeros, torch.ones, torch.empty, torch.full))


class _Device(TorchFunctionMode):
    """Tensors that are asked of a GPU are on the CPU. Single numbers that are asked of none are on a GPU's host, and do
    not count."""

    def __init__(self, follow: Follow | None) -> None:
        super().__init__()
        self.follow = follow

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
            if function is torch.tensor:  # copied to a GPU from the host
                return function(*args, **kwargs).clone()
        if self.follow is None or device is not None or function not in FACTORIES:
            return function(*args, **kwargs)
        before, self.follow.host = self.follow.host, True
        try:
            return function(*args, **kwargs)
        finally:
            self.follow.host = before


@contextmanager
def on_cpu(follow: Follow | None) -> Iterator[None]:
    """While Megatron-Core is built and runs on the host. What it compiles runs operator by operator."""
    type_of = torch.Tensor.type

    def typed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As a tensor on a GPU names its type, which optimizers tell parameters by."""
        name = type_of(tensor, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.") if name in NUMBERS else name

    def state_set(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    def from_group(group: Any, _: str, *args: Any, **kwargs: Any) -> DeviceMesh:
        return mesh_of(group, "cpu", *args, **kwargs)

    mesh_of = DeviceMesh.from_group
    logger = logging.getLogger(random.__name__)
    level = logger.level
    changes: tuple[tuple[Any, str, Any], ...] = (
        (torch.cuda, "current_device", lambda: "cpu"),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", lambda *_: torch.get_rng_state()),
        (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
        (torch.Tensor, "type", typed),
        (DeviceMesh, "from_group", from_group),
        (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", state_set),
    )
    with ExitStack() as stack:
        logger.setLevel(logging.ERROR)  # of every state it says that it is the host's, too
        stack.callback(logger.setLevel, level)
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(cuda_behaviour_of_real())
        stack.enter_context(_Device(follow))
        yield
