"""Tools whose configurations are not read: by what one is known, and which flags say what it says."""

from __future__ import annotations

from ..plan.errors import Node
from .elsewhere_commands import GRPO, LITGPT, OF_SCRIPTS
from .in_flags import Elsewhere

_OF_MCORE = "engine.override_transformer_config"
_SEQUENCE = "--sequence-parallel"
_NEOX = ("pipe_parallel_size", "model_parallel_size", "pos_emb", "data_impl", "rotary_pct", "train_data_paths")
_OF_TUNE = "--framework fsdp --fsdp-parameters bf16 --fsdp-reduce bf16 --gpus N"
"""torchtune's distributed recipes: ``fully_shard`` without mixed precision, of a model made in ``dtype``, which is bf16
(``torchtune/training/_distributed.py``, ``shard_model``); files of those for one GPU are called so."""
_ALL_LINEAR = "--lora-targets all-linear"
_BY_JAX = (("", "", "it trains by JAX, and memplan plans PyTorch alone"),)


def _of_tune(written: Node) -> Node:
    """torchtune's configuration with the linear layers of MLPs among those with adapters, where a switch says so
    (``torchtune/models/*/_component_builders.py``)."""
    model, mlp = written.mapping.get("model"), written.at("model.apply_lora_to_mlp")
    named = written.at("model.lora_attn_modules")
    if model is None or named is None or mlp is None or mlp.value is not True or not isinstance(named.value, list):
        return written
    names = [*named.value, *(Node(one, mlp.origin) for one in ("gate_proj", "up_proj", "down_proj"))]
    model = model.with_items({**model.mapping, "lora_attn_modules": Node(names, named.origin)})
    return written.with_items({**written.mapping, "model": model})


ELSEWHERE = (
    Elsewhere(
        "MaxText",
        ("base_emb_dim", "base_num_decoder_layers", "remat_policy", "scan_layers", "ici_fsdp_parallelism"),
        unmodelled=_BY_JAX,
    ),
    Elsewhere(
        "Levanter",
        ("tensor_parallel_axes", "initialize_from_hf", "num_train_steps", "tracker"),
        unmodelled=_BY_JAX,
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
            ("model.lora_attn_modules", "--lora-targets"),
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
            ("loss._component_", r".*\.GRPO", GRPO),
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
        completed=_of_tune,
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
            ("peft.target_modules", "--lora-targets"),
            ("optimizer._target_", "--optimizer"),
        ),
        before="--model NAME --framework fsdp --gpus N",
        shortened=r"(?:\w+\.)+(?=[A-Z]\w*$)",
        implied=(
            ("quantization.load_in_4bit", "True", "--quantisation nf4"),
            ("peft.match_all_linear", "True", _ALL_LINEAR),
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
            ("policy.megatron_cfg.optimizer.use_distributed_optimizer", "True", "--zero 1"),
            ("policy.dtensor_cfg.enabled", "True", "--framework fsdp"),
            ("grpo", "", GRPO),
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
        before="--framework megatron --zero 1",  # distributed_fused_adam_with_cosine_annealing
        asks=("--tp", "--pp", "--cp", "--mbs", "--gbs", "--seq"),  # the recipe's own
        implied=(("peft_scheme", "lora", "--lora-rank 32"),),
        recipe=r"\bllm\.(\w+)\.(?:pretrain|finetune)_recipe\b",
    ),
    Elsewhere(
        "NeMo",
        ("mcore_gpt", "encoder_seq_length", "megatron_amp_O2", "exp_manager"),
        (
            ("trainer.num_nodes", "--nodes"),
            ("trainer.devices", "--gpus-per-node"),
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
            ("model.activations_checkpoint_method", "--recompute-method"),
            ("model.activations_checkpoint_num_layers", "--recompute-layers"),
            ("model.virtual_pipeline_model_parallel_size", "--vpp"),
            ("model.expert_model_parallel_size", "--ep"),
        ),
        before="--framework megatron --model NAME",
        asks=("--nodes", "--gpus-per-node"),
        implied=(
            ("model.optim.name", "distributed_fused_adam", "--zero 1"),
            ("model.fp8", "True", "--fp8 delayed"),
            ("trainer.precision", "bf16", ""),
            ("model.peft.peft_scheme", "lora", "--lora-rank 32"),
        ),
        unmodelled=(
            ("model.peft.peft_scheme", "adapter|ptuning|ia3", "it trains adapters of another kind (peft_scheme)"),
        ),
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
            ("peft_config.target_modules", "--lora-targets"),
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
            ("_file_", r"(?i).*dpo[^/]*$", "--trainer dpo"),  # llamafactory-cli dpo FILE
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
            ("peft_config.target_modules", "--lora-targets"),
            ("model.peft_config.target_modules", "--lora-targets"),
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
            ("peft_config.target_modules", "--lora-targets"),
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
        implied=(
            *OF_SCRIPTS.implied,
            ("num_samples_per_prompt_rollout", "", GRPO),
            ("lora_rank", "[1-9]", _ALL_LINEAR),  # finetune.py and dpo_tune_cache.py name all seven
        ),
        files=OF_SCRIPTS.files,
    ),
    Elsewhere(
        "llama-cookbook",
        ("enable_fsdp", "peft_method", "batch_size_training"),
        OF_SCRIPTS.flags,
        before=OF_SCRIPTS.before,
        asks=OF_SCRIPTS.asks,
        implied=(
            *OF_SCRIPTS.implied,
            ("peft_method", "lora", "--lora-rank 8"),  # configs/peft.py
            ("enable_fsdp", "True", "--framework fsdp --recompute full"),  # configs/fsdp.py
        ),
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
            ("actor_rollout_ref.model.target_modules", "--lora-targets"),
            ("actor_rollout_ref.model.enable_gradient_checkpointing", "--recompute full"),
            ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", "--tp"),
            ("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size", "--pp"),
        ),
        before=GRPO,
        implied=(
            ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", "", "--framework megatron"),
            ("actor_rollout_ref.model.lora_rank", "[1-9]", _ALL_LINEAR),  # config/model/hf_model.yaml
        ),
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
            ("model.target_modules", "--lora-targets"),
            ("model.enable_gradient_checkpointing", "--recompute full"),
            ("model.use_liger", "--liger"),
        ),
        before="--framework fsdp --gpus N",
        implied=(("model.lora_rank", "[1-9]", _ALL_LINEAR),),
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
        "verl",
        ("max_token_len_per_gpu", "use_dynamic_bsz"),
        (
            ("model.path", "--model"),
            ("data.max_token_len_per_gpu", "--seq"),
            ("model.lora_rank", "--lora-rank"),
            ("model.target_modules", "--lora-targets"),
            ("model.enable_gradient_checkpointing", "--recompute full"),
            ("engine.tensor_model_parallel_size", "--tp"),
            ("engine.pipeline_model_parallel_size", "--pp"),
            ("engine.context_parallel_size", "--cp"),
            ("engine.expert_model_parallel_size", "--ep"),
            (f"{_OF_MCORE}.recompute_granularity", "--recompute"),
            (f"{_OF_MCORE}.recompute_method", "--recompute-method"),
            (f"{_OF_MCORE}.recompute_num_layers", "--recompute-layers"),
        ),
        before="--gpus N --mbs 1",
        otherwise=(
            # Megatron's engine has recompute of its own, and scripts of it say how layers are cut.
            ("model.enable_gradient_checkpointing|engine.tensor_model_parallel_size", "--recompute full"),
            ("data.max_token_len_per_gpu", "--seq 8192"),
            ("engine", "--framework fsdp"),
        ),
        implied=(("engine", "fsdp", "--framework fsdp"), ("engine", "megatron", "--framework megatron --zero 1")),
        unmodelled=(
            ("engine", "(?!fsdp|megatron)", "it trains by an engine of another kind"),
            ("engine.ulysses_sequence_parallel_size", "[2-9]|1.", "it cuts sequences over GPUs"),
            ("engine.optimizer_offload", "True", "it keeps the optimizer's states on the host (optimizer_offload)"),
            ("engine.param_offload", "True", "it keeps parameters on the host (param_offload)"),
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
