"""Commands, scripts and notebooks of tools whose configurations are not read: which flags say what they say."""

from __future__ import annotations

from ..plan.errors import Node
from .in_flags import Elsewhere

GRPO = "--trainer grpo --generation-memory SIZE"
"""Nothing of a configuration says what generation keeps beside the training."""
OF_SCRIPTS = Elsewhere(
    "a script",
    (),
    (
        ("model_name_or_path", "--model"),
        ("model_name", "--model"),
        ("max_seq_length", "--seq"),
        ("max_seq_len", "--seq"),
        ("max_length", "--seq"),
        ("max_len", "--seq"),
        ("data.max_len", "--seq"),
        ("max_context_width", "--seq"),
        ("context_length", "--seq"),
        ("block_size", "--seq"),
        ("seq_len", "--seq"),
        ("seq_length", "--seq"),
        ("pretrain", "--model"),
        ("model", "--model"),
        ("model.model_name_or_path", "--model"),
        ("per_device_train_batch_size", "--mbs"),
        ("batch_size", "--mbs"),
        ("batch_size_training", "--mbs"),
        ("micro_train_batch_size", "--mbs"),
        ("train.micro_batch_size", "--mbs"),
        ("train.batch_size", "--gbs"),
        ("ds.zero_stage", "--zero"),
        ("ds.adam_offload", "--offload-optimizer cpu"),
        ("ds.attn_implementation", "--attention"),
        ("ds.use_liger_kernel", "--liger"),
        ("ds.lora.rank", "--lora-rank"),
        ("ds.lora.target_modules", "--lora-targets"),
        ("model.gradient_checkpointing_enable", "--recompute full"),
        ("gradient_accumulation_steps", "--accumulation"),
        ("zero_stage", "--zero"),
        ("lora_r", "--lora-rank"),
        ("lora_rank", "--lora-rank"),
        ("lora_dim", "--lora-rank"),
        ("lora_target_modules", "--lora-targets"),
        ("target_modules", "--lora-targets"),
        ("gradient_checkpointing", "--recompute full"),
        ("actor_gradient_checkpointing", "--recompute full"),
        ("ds.param_dtype", "--dtype"),
    ),
    before="--gpus N",
    asks=("--mbs", "--seq"),
    implied=(
        *(
            (one, "True|4bit|int4", "--quantisation nf4")
            for one in ("load_in_4bit", "use_4bit_quantization", "use_qlora", "quantization", "ds.load_in_4bit")
        ),
        ("ds.lora.rank", "[1-9]", "--lora-targets all-linear"),  # openrlhf/cli/train_sft.py
        ("deepspeed", r"(?!(?i:none|false|0)$)(?!.*\.json$)", "--framework deepspeed --zero N"),
        ("only_optimize_lora", "True", ""),
        ("_called_", r"(?i).*dpo", "--trainer dpo"),
        ("_called_", r"(?i).*(?:reward|train_rm)", "--trainer reward"),
        ("_called_", r"(?i).*grpo", GRPO),
    ),
    files=("deepspeed_config", "ds_config", "deepspeed"),
    unmodelled=(
        *(
            (one, "", "it trains an actor and a critic beside other models (PPO)")
            for one in (
                *("critic_model_name_or_path", "critic.model_name_or_path", "critic.num_nodes"),
                *("critic_zero_stage", "actor_zero_stage", "actor_learning_rate"),
            )
        ),
        (
            "lora_module_name!only_optimize_lora",
            "",
            "it trains the model beside its adapters (no only_optimize_lora)",
        ),
    ),
)
"""Of a training script with arguments of its own: what many call so."""


def _of_swift(written: Node) -> Node:
    """``MegatronArguments`` with what it makes of keys that mean something only beside others
    (``swift/megatron/arguments/megatron_args.py``, ``__post_init__``): adapters are trained where ``tuner_type`` says
    so, in 8 bits where ``fp8_format`` stands, and the kernel of attention has its release in its name."""
    items, origin = {**written.mapping}, written.origin

    def says(key: str, *values: object) -> bool:
        return key in items and str(items[key].value).lower() in values

    def leave_out(*keys: str) -> None:
        for key in keys:
            items.pop(key, None)

    trains = items.get("tuner_type", items.get("train_type", Node("full", origin)))
    if "adapters" in items or "mcore_adapter" in items:
        items["lora_rank"] = Node("N", origin)  # as its adapter_config.json says
    elif trains.value == "full":
        leave_out("lora_rank", "target_modules", "use_rslora", "modules_to_save")
    else:
        items.setdefault("lora_rank", Node(8, origin))
    if says("target_modules", "all-linear"):
        leave_out("target_modules")  # Megatron-Bridge's own
    if "fp8_format" in items:
        items.setdefault("fp8_recipe", Node("delayed", origin))
    else:
        leave_out("fp8_recipe", "fp8_param_gather")
    if says("optimizer_cpu_offload", "true"):
        items.setdefault("optimizer_offload_fraction", Node(1, origin))
    else:
        leave_out("optimizer_offload_fraction")
    if says("cross_entropy_loss_fusion", "false"):
        items["cross_entropy_fusion_impl"] = Node("none", origin)
    kernel, _, release = str(items["attention_backend"].value if "attention_backend" in items else "").partition("_")
    if release.isdecimal():
        items |= {"attention_backend": Node(kernel, origin), "_release_": Node(release, origin)}
    if says("use_megatron_fsdp", "true"):
        items.setdefault("data_parallel_sharding_strategy", Node("optim_grads_params", origin))
    else:
        leave_out("data_parallel_sharding_strategy")
    return Node(items, origin)


_OF_CORE = (
    ("tensor_model_parallel_size", "--tp"),
    ("pipeline_model_parallel_size", "--pp"),
    ("virtual_pipeline_model_parallel_size", "--vpp"),
    ("context_parallel_size", "--cp"),
    ("expert_model_parallel_size", "--ep"),
    ("expert_tensor_parallel_size", "--etp"),
    ("sequence_parallel", "--sequence-parallel "),
    ("recompute_granularity", "--recompute"),
    ("recompute_method", "--recompute-method"),
    ("recompute_num_layers", "--recompute-layers"),
    ("recompute_modules", "--recompute-modules"),
    ("overlap_grad_reduce", "--overlap-grad-reduce "),
    ("overlap_param_gather", "--overlap-param-gather "),
    ("moe_token_dispatcher_type", "--moe-dispatcher"),
    ("moe_permute_fusion", "--moe-permute-fusion "),
    ("moe_shared_expert_overlap", "--moe-shared-expert-overlap "),
)
"""What several tools call as Megatron-Core does."""
OF_MEGATRON = Elsewhere(
    "ms-swift's Megatron",
    (),
    (
        ("model", "--model"),
        *_OF_CORE,
        ("decoder_first_pipeline_num_layers", "--first-layers"),
        ("decoder_last_pipeline_num_layers", "--last-layers"),
        ("account_for_embedding_in_pipeline_split", "--count-embedding "),
        ("account_for_loss_in_pipeline_split", "--count-loss "),
        ("pipeline_model_parallel_layout", "--pipeline-layout"),
        ("microbatch_group_size_per_vp_stage", "--microbatch-group-size"),
        ("micro_batch_size", "--mbs"),
        ("global_batch_size", "--gbs"),
        ("max_length", "--seq"),
        ("cross_entropy_fusion_impl", "--cross-entropy-fusion"),
        ("attention_backend", "--attention-backend"),
        ("_release_", "--flash-attention-release"),
        ("apply_rope_fusion", "--rope-fusion "),
        ("padding_free", "--packed-sequences "),
        ("fp8_recipe", "--fp8"),
        ("fp8_format", "--fp8-format"),
        ("fp8_param_gather", "--fp8-parameters "),
        ("fp4_format", "--fp4 nvfp4"),
        ("lora_rank", "--lora-rank"),
        ("target_modules", "--lora-targets"),
        ("optimizer_offload_fraction", "--optimizer-offload-fraction"),
        ("use_precision_aware_optimizer", "--precision-aware-optimizer "),
        ("main_params_dtype", "--main-params-dtype"),
        ("main_grads_dtype", "--gradients"),
        ("exp_avg_dtype", "--exp-avg-dtype"),
        ("exp_avg_sq_dtype", "--exp-avg-sq-dtype"),
        ("data_parallel_sharding_strategy", "--megatron-fsdp"),
        ("cp_comm_type", "--cp-communication"),
        ("tp_comm_overlap", "--tp-comm-overlap "),
        ("moe_router_dtype", "--router-dtype"),
        ("moe_expert_capacity_factor", "--moe-capacity-factor"),
        ("moe_pad_expert_input_to_capacity", "--moe-pad-to-capacity "),
        ("mtp_num_layers", "--mtp-layers"),
    ),
    before="--framework megatron --zero 1 --gpus N",
    otherwise=(
        ("recompute_granularity", "--recompute selective"),
        ("micro_batch_size", "--mbs 1"),
        ("global_batch_size", "--gbs 16"),
        ("cross_entropy_fusion_impl", "--cross-entropy-fusion native"),
        ("attention_backend", "--attention-backend flash"),
        ("apply_rope_fusion", "--no-rope-fusion"),
        ("padding_free", "--packed-sequences"),
    ),
    implied=(
        ("moe_grouped_gemm", "(?i)false", "--no-moe-grouped-gemm"),
        ("apply_rope_fusion", "(?i)false", "--no-rope-fusion"),
        ("moe_enable_deepep", "(?i)true", "--moe-dispatcher flex"),
        ("optimizer", "sgd", "--optimizer sgd"),
        ("optimizer", ".*muon", "--optimizer muon"),
        ("use_megatron_fsdp", "(?i)true", ""),
        ("optimizer_cpu_offload", "(?i)true", ""),
        ("fp16", "(?i)true", "--dtype fp16"),
        ("use_distributed_optimizer", "(?i)true", ""),
    ),
    unmodelled=(
        ("use_distributed_optimizer", "(?i)false", "its optimizer is not distributed, as --zero 1 is"),
        ("task_type", "(?!causal_lm)", "its head is another than a language model's (task_type)"),
    ),
    completed=_of_swift,
)
"""Keys and defaults: ``swift/megatron/arguments/megatron_args.py`` of ms-swift 4.6."""


def _of_factory(written: Node) -> Node:
    """LLaMA-Factory's arguments, of which those of adapters mean something only where they are trained."""
    items = {**written.mapping}
    if "finetuning_type" in items and items["finetuning_type"].value != "lora":
        items = {key: node for key, node in items.items() if not key.startswith("lora_")}
    else:
        items.setdefault("lora_rank", Node(8, written.origin))
    if "lora_target" in items and items["lora_target"].value == "all":
        del items["lora_target"]  # Megatron-Bridge's own
    return Node(items, written.origin)


OF_FACTORY = Elsewhere(
    "LLaMA-Factory's training by Megatron",
    (),
    (
        ("model_name_or_path", "--model"),
        *_OF_CORE,
        ("per_device_train_batch_size", "--mbs"),
        ("gradient_accumulation_steps", "--accumulation"),
        ("cutoff_len", "--seq"),
        ("lora_rank", "--lora-rank"),
        ("apply_rope_fusion", "--rope-fusion "),
        ("cross_entropy_loss_fusion", "--cross-entropy-fusion native"),
    ),
    before="--framework megatron --gpus N",
    implied=(
        ("use_distributed_optimizer", "(?i)true", "--zero 1"),
        ("moe_grouped_gemm", "(?i)false", "--no-moe-grouped-gemm"),
        ("fp16", "(?i)true", "--dtype fp16"),
    ),
    otherwise=(("per_device_train_batch_size", "--mbs 8"), ("cutoff_len", "--seq 2048")),
    unmodelled=(
        ("stage", "(?!sft|pt)", "it trains by another loss than that of words (stage)"),
        ("finetuning_type", "(?!lora|full)", "it trains a part of the parameters (finetuning_type)"),
        ("mixed_precision", "(?!bf16)", "its recipe of precision (mixed_precision)"),
    ),
    completed=_of_factory,
)
"""``hparams/megatron_bridge_args.py`` and ``training_args.py`` of LLaMA-Factory, and mcore_adapter's of the same
names."""
LITGPT = Elsewhere(
    "LitGPT",
    ("lora_query", "logger_name"),
    (
        ("checkpoint_dir", "--model"),
        ("train.micro_batch_size", "--mbs"),
        ("train.global_batch_size", "--gbs"),
        ("train.max_seq_length", "--seq"),
        ("lora_r", "--lora-rank"),
        ("devices", "--gpus"),
    ),
    shortened="checkpoints/",
    implied=(("quantize", "bnb.nf4", "--quantisation nf4"),),
)
OF_FILES = Elsewhere("", (), instead="give the file of its configuration, as it is copied or downloaded")
"""Of a command that names a configuration."""
OF_UNSLOTH = Elsewhere(
    "Unsloth",
    (),
    (
        ("model_name", "--model"),
        ("max_seq_length", "--seq"),
        ("max_length", "--seq"),
        ("per_device_train_batch_size", "--mbs"),
        ("gradient_accumulation_steps", "--accumulation"),
        ("r", "--lora-rank"),
        ("target_modules", "--lora-targets"),
        ("max_completion_length", "--completion-length"),
        ("optim", "--optimizer"),
        ("use_gradient_checkpointing", "--recompute full"),
    ),
    implied=(
        ("load_in_4bit", "True", "--quantisation nf4"),
        ("DPOTrainer", "", "--trainer dpo"),
        ("GRPOTrainer", "", GRPO),
    ),
)
"""Keywords of its notebooks."""
