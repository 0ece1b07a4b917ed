"""Fields of Megatron-Bridge's configuration that Megatron-LM's arguments call otherwise.

``TransformerConfig`` and ``OptimizerConfig`` of Megatron-Core are the fields of both; what is not here has the name of
its argument, with underscores (``argument_utils.py`` makes arguments of the fields). Read in Megatron-Bridge of August
2026: ``models/gpt_provider.py``, ``training/config.py``, ``training/mixed_precision.py``, ``training/comm_overlap.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...plan.errors import Node
from ..settings import Table, parsed_line

SECTIONS = ("model", "ddp", "optimizer", "train")
"""Sections whose fields are arguments; of others memory does not depend, or they are read by themselves."""

LENGTHS = ("dataset.sequence_length", "dataset.seq_length", "model.seq_length")
"""Fields that say the length of a sequence: of the data in the order in which ``GPTDatasetConfig`` takes them."""

WITHOUT_ARGUMENT = {
    name: parsed_line(name, of, why)
    for name, of, why in (
        ("--fp8-dot-product-attention", Table.MODELLED, ""),
        ("--mamba-chunk-size", Table.MODELLED, ""),
        (
            "--fp8-multi-head-attention",
            Table.IRRELEVANT,
            "read by Transformer Engine's MultiheadAttention alone, which Megatron-Core does not build",
        ),
        ("--fp8-wgrad", Table.IRRELEVANT, "Transformer Engine 2 has no such choice, and reads none"),
    )
}
"""Fields that are read as arguments are; Megatron-LM's parser has none for them (``arguments.py``: ``exclude``)."""

TEACHER = "--export-kd-teacher-load"
DISTILLATION = ("model.teacher", "model.kd_config")
"""Fields of ``DistillationProvider`` alone (``models/distillation_provider.py``), refused as ``TEACHER`` is."""

RENAMED: Mapping[str, str] = {
    "num_moe_experts": "--num-experts",
    "layernorm_epsilon": "--norm-epsilon",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
    "overlap_p2p_comm_warmup_flush": "--overlap-p2p-communication-warmup-flush",
    "bucket_size": "--ddp-bucket-size",
    "nccl_ub": "--use-nccl-ub",
    "pad_buckets_for_high_nccl_busbw": "--ddp-pad-buckets-for-high-nccl-busbw",
    "fp8": "--fp8-format",
    "fp8_param": "--fp8-param-gather",
    "fp4": "--fp4-format",
    "fp4_param": "--fp4-param-gather",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "yarn_rotary_scaling_factor": "--rotary-scaling-factor",
}
"""The argument that says the same."""

FIELDS: Mapping[str, str] = {argument: field for field, argument in RENAMED.items()}


def field_of(argument: str) -> str:
    """What Megatron-Bridge calls an argument of Megatron-LM."""
    return FIELDS.get(argument, argument.removeprefix("--").replace("-", "_"))


TURNED_OFF: Mapping[str, tuple[str, ...]] = {
    "share_embeddings_and_output_weights": ("--untie-embeddings-and-output-weights",),
    "add_bias_linear": ("--disable-bias-linear",),
    "bias_activation_fusion": ("--no-bias-gelu-fusion", "--no-bias-swiglu-fusion"),
    "bias_dropout_fusion": ("--no-bias-dropout-fusion",),
    "masked_softmax_fusion": ("--no-masked-softmax-fusion",),
    "gradient_accumulation_fusion": ("--no-gradient-accumulation-fusion",),
    "apply_rope_fusion": ("--no-rope-fusion",),
    "overlap_p2p_comm": ("--no-overlap-p2p-communication",),
    "use_mamba_mem_eff_path": ("--disable-mamba-mem-eff-path",),
    "clone_scatter_output_in_embedding": ("--no-clone-scatter-output-in-embedding",),
    "check_for_nan_in_grad": ("--no-check-for-nan-in-loss-and-grad",),
}
"""Arguments that are given where the field is false."""

SAYS_NOTHING: Mapping[str, str] = {"moe_router_dtype": "bf16"}
"""Values of fields for which Megatron-Core does as if there were none (``router.py``: fp32 and fp64 are looked for)."""

_BY_ITSELF = """
    activation_func gated_linear_unit num_query_groups seq_length vocab_size should_pad_vocab
    make_vocab_size_divisible_by grad_reduce_in_fp32 transformer_layer_spec bf16 fp16 hybrid_stack_spec
    mamba_stack_spec cpu_offloading cpu_offloading_num_layers
"""
BY_ITSELF = frozenset(_BY_ITSELF.split())
"""Fields that ``reader`` reads."""

_IGNORED = """
    params_dtype pipeline_dtype autocast_dtype enable_autocast perform_initialization init_method embedding_init_method
    output_layer_init_method timers finalize_model_grads_func grad_scale_func moe_grad_scale_func mtp_grad_scale_func
    no_sync_func grad_sync_func param_sync_func use_te_rng_tracker tp_comm_bulk_wgrad tp_comm_bulk_dgrad
    tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs
    tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_overlap_cfg variable_seq_lengths batch_p2p_comm
    batch_p2p_sync deallocate_pipeline_outputs cpu_offloading_activations cpu_offloading_weights
    barrier_with_L1_time softmax_scale dsa_indexer_rotate_activation dsa_indexer_scoring_relu persist_layer_norm
    memory_efficient_layer_norm fused_single_qkv_rope tp_only_amax_red moe_router_topk_limited_devices
    cuda_graph_use_single_mempool cuda_graph_retain_backward_graph
    inference_sampling_seed hetereogenous_dist_checkpoint
    original_max_position_embeddings beta_fast beta_slow parallel_output rope_scaling seq_len_interpolation_factor
    yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow yarn_mscale
    yarn_mscale_all_dim yarn_correction_range_round_to_int scatter_embedding_sequence_parallel hf_model_id
    hf_model_revision mtp_enabled use_arbitrary_attention_mask
    async_tensor_model_parallel_allreduce config_logger_dir mlp_chunks_for_prefill
    generation_config
    align_param_gather num_buckets average_in_collective gradient_reduce_div_fusion
    fsdp_all_gather_in_start_param_sync preserve_fp32_weights
    store_param_remainders decoupled_weight_decay muon_split_qkv soap_shampoo_beta soap_use_kl_shampoo
    adaptive_muon_moment2_method adaptive_muon_beta2 adaptive_muon_eps pin_cpu_grads pin_cpu_params
    grad_norm_skip_threshold num_epochs check_optimizer_step_success skip_sync_grad_norm_across_mp exit_signal
    iterations_to_skip keep_mtp_spec_in_bf16
"""
IGNORED = frozenset(_IGNORED.split())
"""Fields on which memory does not depend, or whose effect another field's argument has."""

ACTIVATIONS: Mapping[tuple[str, bool], tuple[str, ...]] = {
    ("silu", True): ("--swiglu",),
    ("quick_gelu", True): ("--quick-geglu",),
    ("gelu", False): (),
    ("squared_relu", False): ("--squared-relu",),
}
"""Arguments by the activation's function, and whether it gates."""

_HALVES = {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1, "first_last_layers_bf16": True}
_TWO_EACH = {**_HALVES, "num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 2}
_SCALED: Mapping[str, Mapping[str, object]] = {
    "mixed": {},
    "with_fp8_delayed_scaling_mixed": {
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_amax_history_len": 1024,
        "fp8_param_gather": True,
    },
    "with_fp8_current_scaling_mixed": {
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
        "fp8_param_gather": True,
        **_HALVES,
    },
    "with_fp8_subchannel_scaling_mixed": {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    "with_mxfp8_mixed": {
        "fp8": "e4m3",
        "fp8_recipe": "mxfp8",
        "fp8_param_gather": True,
        "reuse_grad_buf_for_mxfp8_param_ag": True,
    },
}
_FP4 = {"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param_gather": True}
_BF16 = {"bf16": True, "grad_reduce_in_fp32": True}
_FP16 = {"fp16": True, "grad_reduce_in_fp32": False}
PRECISIONS: Mapping[str, Mapping[str, object]] = {
    **{f"bf16_{name}": {**_BF16, **fields} for name, fields in _SCALED.items()},
    **{f"fp16_{name}": {**_FP16, **fields} for name, fields in _SCALED.items()},
    "bf16_with_nvfp4_mixed": {**_BF16, **_FP4},
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": {
        **_BF16,
        **_SCALED["with_fp8_current_scaling_mixed"],
        **_TWO_EACH,
    },
    "nanov2_bf16_with_fp8_current_scaling_mixed": {
        **_BF16,
        **_SCALED["with_fp8_current_scaling_mixed"],
        **_TWO_EACH,
        "fp8_recipe": "blockwise",
    },
    "nemotron_3_super_bf16_with_nvfp4_mixed": {
        **_BF16,
        **_FP4,
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 0,
        "num_layers_at_end_in_bf16": 14,
    },
}
"""Every name of ``mixed_precision`` (``training/mixed_precision.py``: ``MIXED_PRECISION_RECIPES``)."""

LOW_DEFAULTS = {"fp8_dot_product_attention": False, "fp8_multi_head_attention": False, "fp8_wgrad": True}
UNSAID: Mapping[str, object] = {"fp8_recipe": "tensorwise", **LOW_DEFAULTS}
"""Defaults of ``MixedPrecisionConfig``, which it tells the model and the optimizer, too: ``fp8_recipe`` also where no
product is in 8 bits."""

LOW_PRECISION: Mapping[str, tuple[bool, str]] = {
    "disable_parameter_transpose_cache": (True, "quantised weights that are made in each micro-batch"),
}
"""With fp8 or fp4, and parameters in 16 bits: fields that must not have a value, and why. No argument of Megatron-LM
says them. Parameters in 8 bits are operands themselves (Transformer Engine's ``quantize_weight``)."""

PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")


def pattern_of(model: Mapping[str, Node]) -> Node | None:
    """What a hybrid's layers are."""
    return next((model[name] for name in PATTERNS if name in model and model[name].value), None)


_FUSED = {"bias_activation_fusion": True, "bias_dropout_fusion": True}
_UNFUSED = {"bias_activation_fusion": False, "bias_dropout_fusion": False, "apply_rope_fusion": False}
_OF_EXPERTS = {"moe_router_dtype": "fp32", "moe_shared_expert_overlap": True}
_LATENT = {**_UNFUSED, **_FUSED, **_OF_EXPERTS, "cross_entropy_fusion_impl": "te"}
_COMMON = {"cross_entropy_loss_fusion": True}
_HYBRID = {**_COMMON, **_OF_EXPERTS, "bias_activation_fusion": False}
_FURTHER = {"mtp_num_layers": 1, "mtp_hybrid_override_pattern": "*E", "mtp_use_repeated_layer": True}
"""Layers that predict further tokens, in ``config.json`` of Nemotron 3 Super and Ultra (``nemotron_h_bridge.py``:
``_hf_mtp_config``): one block of attention and experts, which recipes run twice. Megatron-LM's own test of Super has
the same layers (``nemotron3_super_release_gb200/model_config.yaml``: ``…/*E/*E``)."""
BRIDGES: Mapping[str, Mapping[str, object]] = {
    "llama": {**_COMMON, **_FUSED, "apply_rope_fusion": True},
    "deepseek-v3": {**_COMMON, **_LATENT, "mtp_num_layers": 1},
    "deepseek": {**_COMMON, **_LATENT},
    "moonlight": {**_COMMON, **_LATENT},
    "kimi": {**_COMMON, **_LATENT},
    "glm-4.5": {**_COMMON, **_UNFUSED, **_FUSED, **_OF_EXPERTS, "mtp_num_layers": 1},
    "gpt-oss": {**_COMMON, **_UNFUSED, "bias_activation_fusion": True},
    "nemotron-3-super": {**_HYBRID, **_FURTHER},
    "nemotron-3-ultra": {**_HYBRID, **_FURTHER},
    "nemotron": _HYBRID,
    "qwen3-next": {**_COMMON, **_UNFUSED, "moe_router_dtype": "fp32"},
    "qwen3.5": {**_COMMON, **_UNFUSED, "moe_router_load_balancing_type": "global_aux_loss", "mtp_num_layers": 1},
    "olmoe": {
        **_COMMON,
        **_UNFUSED,
        "moe_router_dtype": "fp32",
        "moe_permute_fusion": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
    },
    "": {**_COMMON, **_UNFUSED},
}
"""By what a model's name begins with, fields of which the class that translates its ``config.json`` gives other values
than Megatron-LM's parser (``models/*/*_bridge.py``: ``provider_bridge``, ``hf_config_to_model_config_kwargs``); what
none gives is as ``TransformerConfig`` and ``GPTModelProvider`` have it."""

_OF_GPT: Mapping[str, object] = {
    "gated_linear_unit": False,
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "share_embeddings_and_output_weights": True,
    **_COMMON,
    **_UNFUSED,
}
CLASSES: Mapping[str, Mapping[str, object]] = {
    "GPTModelProvider": _OF_GPT,
    "MLAModelProvider": _OF_GPT,
    "HybridModelProvider": {
        "gated_linear_unit": False,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "share_embeddings_and_output_weights": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "position_embedding_type": "none",
        "attention_backend": "flash",
        "seq_length": 8192,
        "bias_activation_fusion": False,
        **_COMMON,
    },
}
"""Defaults of providers' classes that are other than those of Megatron-LM's parser (``models/gpt_provider.py``,
``models/hybrid/hybrid_provider.py``)."""

MODELS_OF_CLASSES: Mapping[str, str] = {"OlMoEModelProvider": "allenai/OLMoE-1B-7B-0924"}
"""Providers' classes that have one model's sizes, and that model (``models/olmoe/olmoe_provider.py``)."""

OTHER_MODELS = (
    "vl",
    "omni",
    "vision",
    "audio",
    "asr",
    "llava",
    "mimo",
    "t5",
    "falconh1",
    "distillation",
)
OTHERS_LAYERS = (
    "gemma",
    "exaone",
    "step",
    "next",
    "nemotron_nas",
    "llamanemotron",
    "minimax",
    "glm5",
    "sarvam",
    "falcon",
)
"""Parts of a provider's name whose layers are not those of Megatron-Core's GPT."""
