"""Tools whose configurations are not read: by what one is known, and which flags say what it says."""

from __future__ import annotations

from ..values import NamedTuple


class Elsewhere(NamedTuple):
    """A tool whose configurations are not read."""

    name: str
    marks: tuple[str, ...]
    """As of ``Format``, at the top or one level below."""
    flags: tuple[tuple[str, str], ...] = ()
    """Keys, dotted where they are below the top, and the flags here that say the same; one with a value of its own
    stands for a key that is on."""
    before: str = ""
    """Flags that every file of it comes to."""
    shortened: str = ""
    """What is cut off the front of a value, as a regular expression."""
    implied: tuple[tuple[str, str, str], ...] = ()
    """Keys, what their value begins with, and flags that this means."""
    unmodelled: tuple[tuple[str, str, str], ...] = ()
    """Keys, what their value begins with, and what is trained then that no flag says; ``a!b`` is a where b is off."""
    otherwise: tuple[tuple[str, str], ...] = ()
    """Keys that are on where a configuration leaves them out, and flags that this means."""
    asks: tuple[str, ...] = ()
    """Flags that stand with N where a configuration says nothing of them: the tool's own default is not known."""
    recipe: str = ""
    """A regular expression of what Python files of it call, and of the model's name in that."""
    instead: str = ""
    """What to give in its place, where that is no flags."""
    files: tuple[str, ...] = ()
    """Keys whose value may be a file of JSON that is read: the first one is given beside the flags."""


_GRPO = "--trainer grpo --generation-memory SIZE"
"""Nothing of a configuration says what generation keeps beside the training."""
_SEQUENCE = "--sequence-parallel"
_NEOX = ("pipe_parallel_size", "model_parallel_size", "pos_emb", "data_impl", "rotary_pct", "train_data_paths")
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
        ("_called_", r"(?i).*grpo", _GRPO),
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
        ("GRPOTrainer", "", _GRPO),
    ),
)
"""Keywords of its notebooks."""
_OF_TUNE = "--framework fsdp --fsdp-parameters bf16 --fsdp-reduce bf16 --gpus N"
"""torchtune's distributed recipes: ``fully_shard`` without mixed precision, of a model made in ``dtype``, which is bf16
(``torchtune/training/_distributed.py``, ``shard_model``); files of those for one GPU are called so."""
_BY_JAX = "memplan plans PyTorch alone: say the same job of PyTorch in flags (memplan estimate --help)"
ELSEWHERE = (
    Elsewhere(
        "a configuration of MaxText, which trains by JAX",
        ("base_emb_dim", "base_num_decoder_layers", "remat_policy", "scan_layers", "ici_fsdp_parallelism"),
        instead=_BY_JAX,
    ),
    Elsewhere(
        "a configuration of Levanter, which trains by JAX",
        ("tensor_parallel_axes", "initialize_from_hf", "num_train_steps", "tracker"),
        instead=_BY_JAX,
    ),
    Elsewhere(
        "torchtune",
        ("_component_",),
        (
            ("model._component_", "--model"),
            ("tokenizer.max_seq_len", "--seq"),
            ("dataset.max_seq_len", "--seq"),
            ("batch_size", "--mbs"),
            ("gradient_accumulation_steps", "--accumulation"),
            ("dtype", "--dtype"),
            ("model.lora_rank", "--lora-rank"),
            ("max_generated_tokens", "--completion-length"),
            ("optimizer._component_", "--optimizer"),
            ("enable_activation_checkpointing", "--recompute full"),
        ),
        shortened=r"(?:[\w]+\.)+(?:q?lora_)?",
        implied=(
            ("_file_", r"(?!.*(?:single_device|eval|generat|quant))", _OF_TUNE),
            ("optimizer.fused", "True", "--optimizer-implementation fused"),
            ("model._component_", r".*\.qlora_", "--quantisation nf4"),
            ("loss._component_", r".*\.DPOLoss", "--trainer dpo"),
            ("model.apply_lora_to_mlp", "True", "--lora-targets q_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"),
            ("loss._component_", r".*\.GRPO", _GRPO),
        ),
        unmodelled=(
            ("policy_model", "", "it trains an actor and a critic beside other models (PPO)"),
            ("teacher_model", "", "it distils from a teacher"),
            ("quantizer._component_", r".*QAT", "it trains with fake quantisation"),
            ("optimizer_in_bwd", "True", "it steps in backward, tensor by tensor (optimizer_in_bwd)"),
            ("enable_activation_offloading", "True", "it keeps activations on the host (enable_activation_offloading)"),
            ("fsdp_cpu_offload", "True", "it keeps parameters on the host (fsdp_cpu_offload)"),
            ("enable_fp8_training", "True", "it trains in float8"),
            ("compile", "True", "it compiles layers of its own (compile)"),
            ("_file_", r".*(?:eval|generat|quantization)", "it trains nothing"),
            ("tensor_parallel_dim", "[2-9]|1.", "it cuts layers over GPUs (tensor_parallel_dim)"),
            ("context_parallel_dim", "[2-9]|1.", "it cuts sequences over GPUs (context_parallel_dim)"),
        ),
    ),
    Elsewhere(
        "NeMo AutoModel",
        ("step_scheduler",),
        (
            ("model.pretrained_model_name_or_path", "--model"),
            ("model.config.pretrained_model_name_or_path", "--model"),
            ("packed_sequence.packed_sequence_size", "--seq"),
            ("dataset.seq_length", "--seq"),
            ("dataset.seq_len", "--seq"),
            ("step_scheduler.local_batch_size", "--mbs"),
            ("step_scheduler.global_batch_size", "--gbs"),
            ("distributed.tp_size", "--tp"),
            ("distributed.cp_size", "--cp"),
            ("distributed.pp_size", "--pp"),
            ("distributed.ep_size", "--ep"),
            ("distributed.activation_checkpointing", "--recompute full"),
            ("peft.dim", "--lora-rank"),
            ("optimizer._target_", "--optimizer"),
        ),
        before="--model NAME --framework fsdp --gpus N",
        shortened=r"(?:\w+\.)+(?=[A-Z]\w*$)",
        implied=(
            ("quantization.load_in_4bit", "True", "--quantisation nf4"),
            ("model._target_", r".*SequenceClassification", "--labels N"),
        ),
        unmodelled=(("teacher_model", "", "it distils from a teacher"),),
    ),
    Elsewhere(
        "ChatLearn",
        ("runtime_args", "policy_trainer", "sample_per_episode"),
        (
            ("models.policy_trainer.num_gpu", "--gpus"),
            ("models.policy_trainer.tensor_model_parallel_size", "--tp"),
            ("models.policy_trainer.pipeline_model_parallel_size", "--pp"),
            ("models.policy_trainer.expert_model_parallel_size", "--ep"),
            ("models.policy_trainer.seq_length", "--seq"),
            ("runtime_args.train_micro_batch_size", "--mbs"),
            ("runtime_args.train_global_batch_size", "--gbs"),
        ),
        before="--model NAME",
        implied=(
            ("runtime_args.train_backend", "megatron", "--framework megatron"),
            ("runtime_args.train_backend", "fsdp", "--framework fsdp"),
        ),
    ),
    Elsewhere(
        "NeMo-RL",
        (
            *("policy", "num_prompts_per_step", "train_global_batch_size", "train_micro_batch_size"),
            *("max_total_sequence_length", "dtensor_cfg", "megatron_cfg"),
        ),
        (
            ("policy.model_name", "--model"),
            ("cluster.num_nodes", "--nodes"),
            ("cluster.gpus_per_node", "--gpus-per-node"),
            ("policy.train_micro_batch_size", "--mbs"),
            ("policy.train_global_batch_size", "--gbs"),
            ("policy.max_total_sequence_length", "--seq"),
            ("policy.megatron_cfg.tensor_model_parallel_size", "--tp"),
            ("policy.megatron_cfg.pipeline_model_parallel_size", "--pp"),
            ("policy.megatron_cfg.context_parallel_size", "--cp"),
            ("policy.megatron_cfg.expert_model_parallel_size", "--ep"),
            ("policy.dtensor_cfg.activation_checkpointing", "--recompute full"),
            ("policy.megatron_cfg.activation_checkpointing", "--recompute full"),
        ),
        before="--model NAME",
        implied=(
            ("policy.megatron_cfg.enabled", "True", "--framework megatron"),
            ("policy.dtensor_cfg.enabled", "True", "--framework fsdp"),
            ("grpo", "", _GRPO),
            ("dpo", "", "--trainer dpo"),
            ("rm", "", "--trainer reward"),
        ),
        unmodelled=(
            ("ppo", "", "it trains an actor and a critic beside other models (PPO)"),
            ("distillation", "", "it distils from a teacher"),
        ),
    ),
    Elsewhere(
        "NeMo 2",
        ("_factory_",),
        (
            ("_factory_", "--model"),
            ("trainer.num_nodes", "--nodes"),
            ("num_nodes", "--nodes"),
            ("trainer.devices", "--gpus-per-node"),
            ("num_gpus_per_node", "--gpus-per-node"),
            ("trainer.strategy.tensor_model_parallel_size", "--tp"),
            ("trainer.strategy.pipeline_model_parallel_size", "--pp"),
            ("trainer.strategy.virtual_pipeline_model_parallel_size", "--vpp"),
            ("trainer.strategy.context_parallel_size", "--cp"),
            ("trainer.strategy.expert_model_parallel_size", "--ep"),
            ("data.seq_length", "--seq"),
            ("data.micro_batch_size", "--mbs"),
            ("data.global_batch_size", "--gbs"),
        ),
        before="--framework megatron",
        implied=(("peft_scheme", "lora", "--lora-rank 32"),),
        recipe=r"\bllm\.(\w+)\.(?:pretrain|finetune)_recipe\b",
    ),
    Elsewhere(
        "NeMo",
        ("mcore_gpt", "encoder_seq_length", "megatron_amp_O2", "exp_manager"),
        (
            ("model.tensor_model_parallel_size", "--tp"),
            ("model.pipeline_model_parallel_size", "--pp"),
            ("model.context_parallel_size", "--cp"),
            ("model.micro_batch_size", "--mbs"),
            ("model.global_batch_size", "--gbs"),
            ("model.encoder_seq_length", "--seq"),
            ("model.num_layers", "--layers"),
            ("model.hidden_size", "--hidden"),
            ("model.ffn_hidden_size", "--ffn"),
            ("model.num_attention_heads", "--heads"),
            ("model.num_query_groups", "--kv-heads"),
            ("model.sequence_parallel", "--sequence-parallel "),
            ("model.activations_checkpoint_granularity", "--recompute"),
        ),
        before="--framework megatron --model NAME --gpus N",
    ),
    Elsewhere(
        "GPT-NeoX",
        (*_NEOX, *(name.replace("_", "-") for name in _NEOX)),
        tuple(
            (name, flag)
            for one, flag in (
                ("seq_length", "--seq"),
                ("train_micro_batch_size_per_gpu", "--mbs"),
                ("gradient_accumulation_steps", "--accumulation"),
                ("zero_optimization.stage", "--zero"),
                ("checkpoint_activations", "--recompute full"),
                ("model_parallel_size", "--tp"),
                ("pipe_parallel_size", "--pp"),
                ("num_layers", "--layers"),
                ("hidden_size", "--hidden"),
                ("num_attention_heads", "--heads"),
            )
            for name in dict.fromkeys((one, one.replace("_", "-")))
        ),
        before="--framework megatron-deepspeed --model NAME --gpus N",
        implied=(("output_layer_parallelism", "column", ""), ("output-layer-parallelism", "column", "")),
    ),
    Elsewhere(
        "LLaMA-Factory v1",
        ("model_class", "dist_config", "kernel_config"),
        (
            ("model", "--model"),
            ("micro_batch_size", "--mbs"),
            ("global_batch_size", "--gbs"),
            ("cutoff_len", "--seq"),
            ("peft_config.r", "--lora-rank"),
            ("enable_activation_checkpointing", "--recompute full"),
        ),
        before="--gpus N",
        files=("dist_config.config_file",),
        otherwise=(("enable_activation_checkpointing", "--recompute full"),),
        implied=(
            ("dist_config.name", "fsdp2", "--framework fsdp"),
            ("dist_config.name", "deepspeed", "--framework deepspeed --zero N"),
            ("quant_config.quantization_bit", "4", "--quantisation nf4"),
            ("quant_config.quantization_bit", "8", "--quantisation int8"),
            ("kernel_config.name", "liger", "--liger"),
        ),
        unmodelled=(
            ("peft_config.name", "freeze", "it trains a few layers alone"),
            ("dist_config.name", "fsdpturbo", "it shards experts by a library of its own (fsdpturbo)"),
            ("optim_config.name", "muon", "it trains by Muon"),
            ("cp_size", "[2-9]|1.", "it cuts sequences over GPUs"),
        ),
    ),
    Elsewhere(
        "LLM Foundry or OLMo",
        ("device_train_microbatch_size", "global_train_batch_size"),
        (
            ("model.pretrained_model_name_or_path", "--model"),
            ("model.n_layers", "--layers"),
            ("model.d_model", "--hidden"),
            ("model.n_heads", "--heads"),
            ("model.max_seq_len", "--seq"),
            ("model.max_sequence_length", "--seq"),
            ("max_seq_len", "--seq"),
            ("device_train_microbatch_size", "--mbs"),
            ("global_train_batch_size", "--gbs"),
            ("fsdp_config.activation_checkpointing", "--recompute full"),
            ("fsdp.activation_checkpointing", "--recompute full"),
            ("peft_config.r", "--lora-rank"),
            ("model.peft_config.r", "--lora-rank"),
        ),
        before="--framework fsdp --fsdp-version 1 --fsdp-reduce bf16 --model NAME --gpus N",
        implied=(
            ("precision", "amp_bf16", ""),
            *(
                (f"{section}.{key}", value, flags)
                for section in ("fsdp_config", "fsdp")
                for key, value, flags in (
                    ("sharding_strategy", "FULL_SHARD", ""),
                    ("mixed_precision", "PURE", ""),  # parameters in fp32, gathered and reduced in 16 bits
                    ("sharding_strategy", "SHARD_GRAD_OP", "--no-reshard-after-forward"),
                    ("backward_prefetch", "BACKWARD_PRE", "--fsdp-backward-prefetch pre"),
                )
            ),
        ),
        unmodelled=(
            ("fsdp_config.activation_cpu_offload", "True", "it keeps activations on the host (activation_cpu_offload)"),
            ("fsdp_config.cpu_offload", "True", "it keeps parameters on the host (cpu_offload)"),
        ),
    ),
    Elsewhere(
        "OLMo-core",
        ("TransformerConfig",),
        (("TransformerConfig", "--model"), ("SEQUENCE_LENGTH", "--seq"), ("DEFAULT_SEQUENCE_LENGTH", "--seq")),
        before="--framework fsdp --gpus N --mbs N",
        recipe=r"\bTransformerConfig\.(\w*\d\w*)\(",
    ),
    Elsewhere(
        "ArcticTraining",
        ("name_or_path",),
        (
            ("model.name_or_path", "--model"),
            ("data.max_length", "--seq"),
            ("micro_batch_size", "--mbs"),
            ("gradient_accumulation_steps", "--accumulation"),
            ("deepspeed.zero_optimization.stage", "--zero"),
            ("deepspeed.zero_optimization.offload_optimizer.device", "--offload-optimizer"),
            ("peft_config.r", "--lora-rank"),
        ),
        before="--framework deepspeed --gpus N",
    ),
    Elsewhere(
        "nanotron",
        ("data_stages", "accumulate_grad_in_fp32"),
        (
            ("model.model_config.num_hidden_layers", "--layers"),
            ("model.model_config.hidden_size", "--hidden"),
            ("model.model_config.intermediate_size", "--ffn"),
            ("model.model_config.num_attention_heads", "--heads"),
            ("model.model_config.num_key_value_heads", "--kv-heads"),
            ("model.model_config.vocab_size", "--vocab"),
            ("tokens.sequence_length", "--seq"),
            ("tokens.micro_batch_size", "--mbs"),
            ("tokens.batch_accumulation_per_replica", "--accumulation"),
            ("parallelism.tp", "--tp"),
            ("parallelism.pp", "--pp"),
            ("parallelism.dp", "--dp"),
            ("parallelism.context_parallel_size", "--cp"),
            ("parallelism.expert_parallel_size", "--ep"),
            ("parallelism.recompute_layer", "--recompute full"),
            ("optimizer.zero_stage", "--zero"),
        ),
        before="--framework megatron --model NAME",
        implied=(("parallelism.tp_mode", "REDUCE_SCATTER", _SEQUENCE), ("model.dtype", "bfloat16", "")),
    ),
    Elsewhere(
        "Open-Instruct",
        ("use_slow_tokenizer", "dataset_mixer_list", "mixer_list"),
        OF_SCRIPTS.flags,
        before=OF_SCRIPTS.before,
        asks=OF_SCRIPTS.asks,
        implied=(*OF_SCRIPTS.implied, ("num_samples_per_prompt_rollout", "", _GRPO)),
        files=OF_SCRIPTS.files,
    ),
    Elsewhere(
        "llama-cookbook",
        ("enable_fsdp", "peft_method", "batch_size_training"),
        OF_SCRIPTS.flags,
        before=OF_SCRIPTS.before,
        asks=OF_SCRIPTS.asks,
        implied=(*OF_SCRIPTS.implied, ("peft_method", "lora", "--lora-rank 8")),  # configs/peft.py
    ),
    LITGPT,
    Elsewhere(
        "verl",
        ("actor_rollout_ref",),
        (
            ("actor_rollout_ref.model.path", "--model"),
            ("trainer.nnodes", "--nodes"),
            ("trainer.n_gpus_per_node", "--gpus-per-node"),
            ("data.max_prompt_length+data.max_response_length", "--seq"),
            ("data.max_response_length", "--completion-length"),
            ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "--mbs"),
            ("actor_rollout_ref.model.lora_rank", "--lora-rank"),
            ("actor_rollout_ref.model.enable_gradient_checkpointing", "--recompute full"),
            ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", "--tp"),
            ("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size", "--pp"),
        ),
        before=_GRPO,
        implied=(("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", "", "--framework megatron"),),
        unmodelled=(("critic.model.path", "", "it trains an actor and a critic beside other models (PPO)"),),
    ),
    Elsewhere(
        "verl",
        ("partial_pretrain",),
        (
            ("model.partial_pretrain", "--model"),
            ("data.max_length", "--seq"),
            ("data.micro_batch_size_per_gpu", "--mbs"),
            ("model.lora_rank", "--lora-rank"),
            ("model.enable_gradient_checkpointing", "--recompute full"),
            ("model.use_liger", "--liger"),
        ),
        before="--framework fsdp --gpus N",
        otherwise=(
            ("model.enable_gradient_checkpointing", "--recompute full"),
            ("data.max_length", "--seq 1024"),
            ("data.micro_batch_size_per_gpu", "--mbs 4"),
        ),
        unmodelled=(
            ("ulysses_sequence_parallel_size", "[2-9]|1.", "it cuts sequences over GPUs"),
            ("model.fsdp_config.cpu_offload", "True", "it keeps parameters on the host (cpu_offload)"),
        ),
    ),
    Elsewhere(
        "a checkpoint's weights, and no configuration",
        ("weight_map",),
        instead="give the config.json beside it, or name the model (--model)",
    ),
    Elsewhere(
        "a layer over other files (defaults), and no configuration",
        ("defaults",),
        instead="say the job in flags (memplan estimate --help)",
    ),
)
