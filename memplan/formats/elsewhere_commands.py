"""Commands, scripts and notebooks of tools whose configurations are not read: which flags say what they say."""

from __future__ import annotations

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
        ("model.gradient_checkpointing_enable", "--recompute full"),
        ("gradient_accumulation_steps", "--accumulation"),
        ("zero_stage", "--zero"),
        ("lora_r", "--lora-rank"),
        ("lora_rank", "--lora-rank"),
        ("lora_dim", "--lora-rank"),
        ("gradient_checkpointing", "--recompute full"),
        ("actor_gradient_checkpointing", "--recompute full"),
        ("ds.param_dtype", "--dtype"),
    ),
    before="--gpus N",
    asks=("--mbs", "--seq"),
    implied=(
        *(
            (one, "True|4bit|int4", "--quantisation nf4")
            for one in ("load_in_4bit", "use_4bit_quantization", "use_qlora", "quantization")
        ),
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
OF_MEGATRON = Elsewhere(
    "ms-swift's Megatron",
    (),
    (
        ("model", "--model"),
        ("tensor_model_parallel_size", "--tp"),
        ("pipeline_model_parallel_size", "--pp"),
        ("context_parallel_size", "--cp"),
        ("expert_model_parallel_size", "--ep"),
        ("sequence_parallel", "--sequence-parallel "),
        ("micro_batch_size", "--mbs"),
        ("global_batch_size", "--gbs"),
        ("max_length", "--seq"),
        ("expert_tensor_parallel_size", "--etp"),
        ("recompute_granularity", "--recompute"),
        ("recompute_method", "--recompute-method"),
        ("recompute_num_layers", "--recompute-layers"),
        ("cross_entropy_loss_fusion", "--cross-entropy-fusion native"),
        ("padding_free", "--packed-sequences "),
        ("fp8_recipe", "--fp8"),
        ("lora_rank", "--lora-rank"),
    ),
    before="--framework megatron --zero 1 --gpus N",
    otherwise=(
        ("recompute_granularity", "--recompute selective"),
        ("micro_batch_size", "--mbs 1"),
        ("global_batch_size", "--gbs 16"),
        ("cross_entropy_loss_fusion", "--cross-entropy-fusion native"),
        ("padding_free", "--packed-sequences"),
    ),
)
"""Defaults: ``swift/megatron/arguments/megatron_args.py`` of ms-swift 4."""
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
