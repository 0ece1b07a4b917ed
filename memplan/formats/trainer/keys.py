"""Every key of ``TrainingArguments`` (``training_args.py`` of transformers 5.23) and of the example scripts' model and
data arguments: which are read, refused, told, or without effect."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

K_BIT = "prepare_model_for_kbit_training"
"""A call of a training script, in the place of an argument."""
RESIZED = "resize_token_embeddings"
"""Another one: the rows that the embedding has then, or the expression that says them where it is computed."""

LOADED_BY, FROM_PRETRAINED, FROM_SCRATCH = "model loaded by", "from_pretrained", "a configuration"
"""And the call that makes the model, which is no argument either."""

READ = frozenset(
    {
        K_BIT,
        RESIZED,
        LOADED_BY,
        "device_map",
        "reward_model_name_or_path",
        "task_name",
        "do_regression",
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "accelerator_config",
        "gradient_accumulation_steps",
        "weight_decay",
        "max_length",
        "max_seq_length",
        "model_max_length",
        "block_size",
        "max_completion_length",
        "max_prompt_length",
        "beta",
        "loss_type",
        "router_aux_loss_coef",
        "use_vllm",
        "vllm_mode",
        "vllm_enable_sleep_mode",
        "cast_lm_head_to_fp32",
        "optim",
        "optim_args",
        "bf16",
        "fp16",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "activation_checkpointing",
        "activation_checkpointing_kwargs",
        "attn_implementation",
        "experts_implementation",
        "use_flash_attention_2",
        "torch_dtype",
        "dtype",
        "eval_accumulation_steps",
        "prediction_loss_only",
        "model_name_or_path",
        "config_name",
        "deepspeed",
        "fsdp",
        "fsdp_config",
        "use_liger_kernel",
        "liger_kernel_config",
        "cut_cross_entropy",
        "packing",
        "packing_strategy",
        "padding_free",
        "use_peft",
        "lora_r",
        "lora_dropout",
        "lora_alpha",
        "precompute_ref_log_probs",
        "use_dora",
        "use_rslora",
        "lora_target_modules",
        "lora_modules_to_save",
        "lora_task_type",
        "num_labels",
        "torch_compile",
        "torch_compile_backend",
        "torch_compile_mode",
        "lora_target_parameters",
        "load_in_4bit",
        "load_in_8bit",
        "bnb_4bit_quant_type",
        "use_bnb_nested_quant",
        "bnb_4bit_quant_storage",
        "bnb_4bit_compute_dtype",
    }
)
"""Keys whose values are looked at."""

REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        "label_smoothing_factor": ((None, 0, 0.0), "the Trainer's own loss is not modelled; the model's is"),
        "neftune_noise_alpha": ((None,), "noise on the embeddings is not modelled"),
        "config_overrides": ((None,), "a model made of a kind and sizes is described by flags: --layers, --hidden"),
        "parallelism_config": ((None,), "Accelerate's parallelism is not modelled around the Trainer"),
        "optim_target_modules": ((None,), "optimizers of some modules (GaLore, APOLLO) are not modelled"),
        "use_cpu": ((None, False), "there is no device then"),
        "activation_offloading": ((None, False), "activations that trl keeps on the host are not modelled"),
        "lora_bias": ((None, "none"), "biases that are trained beside adapters are not modelled"),
    }
)
"""Keys that change the estimate: values that do nothing, and why another value is refused."""

NOTED: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        "auto_find_batch_size": ((None, False), "the batch size is found at run time; per_device_train_batch_size is"),
        "torch_empty_cache_steps": ((None,), "the cache is emptied behind forward: less is reserved than estimated"),
        "ddp_bucket_cap_mb": ((None, 25), "buckets are assumed to be 25 MiB"),
        "ddp_static_graph": ((None, False), "DDP is assumed to have no static graph"),
        "bf16_full_eval": ((None, False), "evaluation outside of training casts the model, and is not modelled"),
        "fp16_full_eval": ((None, False), "evaluation outside of training casts the model, and is not modelled"),
        **dict.fromkeys(
            ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"),
            ((None, False), "Axolotl may run adapters by kernels of its own, which save less; peft's layers are taken"),
        ),
        "full_determinism": (
            (None, False),
            "flash-attention keeps several sums of dQ then, and cuBLAS a smaller workspace; neither is counted",
        ),
        "use_cache": (
            (None, False),
            "copies of all keys and values, which the model returns where no checkpoints are on, are not counted",
        ),
        "max_target_length": (
            (None,),
            "the decoder's rows are taken to be as long as the encoder's, max_source_length; shorter ones take less",
        ),
        "batch_eval_metrics": ((None, False), "logits are not kept then; leave out --eval-batches"),
        "predict_with_generate": ((None, False), "evaluation generates text, whose keys and values are not counted"),
        "eval_do_concat_batches": ((None, True), "logits are assumed to be concatenated, batch by batch"),
    }
)
"""Keys that are not modelled and change a detail: values that do nothing, and the assumption."""

IDLE_BESIDE: Mapping[str, tuple[str, ...]] = {"use_cache": ("gradient_checkpointing", "activation_checkpointing")}
"""Of these keys, those that turn them off: a layer with checkpoints is handed no cache in training
(``GradientCheckpointingLayer.__call__`` of transformers' ``modeling_layers.py``)."""

WITHOUT_EFFECT = frozenset(
    """
    output_dir overwrite_output_dir num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs
    warmup_steps warmup_ratio adam_beta1 adam_beta2 adam_epsilon max_grad_norm average_tokens_across_devices
    tf32 logging_strategy logging_steps
    sortish_sampler generation_max_length generation_num_beams generation_config
    logging_first_step logging_dir log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level
    log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
    trackio_static_space_id eval_strategy evaluation_strategy eval_steps eval_delay eval_on_start
    eval_use_gather_object include_for_metrics include_tokens_per_second save_only_model save_strategy save_steps
    save_safetensors save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub hub_token hub_private_repo
    hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end metric_for_best_model
    greater_is_better ignore_data_skip restore_callback_states_from_checkpoint seed data_seed
    dataloader_drop_last dataloader_num_workers dataloader_pin_memory
    dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
    remove_unused_columns label_names train_sampling_strategy group_by_length length_column_name
    ddp_find_unused_parameters ddp_broadcast_buffers ddp_backend ddp_timeout debug skip_memory_metrics
    do_train do_eval do_predict resume_from_checkpoint local_rank dataset_name dataset_config dataset_config_name
    train_file validation_file test_file low_cpu_mem_usage ignore_mismatched_sizes pad_to_max_length
    max_predict_samples fim_rate fim_spm_rate max_train_samples max_eval_samples preprocessing_num_workers model_type
    tokenizer_name cache_dir use_fast_tokenizer model_revision token trust_remote_code overwrite_cache
    validation_split_percentage
    source_lang target_lang source_prefix forced_bos_token ignore_pad_token_for_loss text_column summary_column
    keep_linebreaks streaming use_cpu_amp fp16_backend half_precision_backend fp16_opt_level torchdynamo mp_parameters
    eval_packing
    dataset_num_proc dataset_mixer dataset_mixture dataset_splits chat_template dataset_train_split dataset_test_split
    dataset_streaming dataset_prompt_column hub_model_revision system_prompt callbacks benchmarks wandb_entity
    dataset_kwargs dataset_text_field eos_token pad_token wandb_project wandb_run_group
    code_language code_eval_test_batch_size code_eval_scoring_mode vllm_device
    past_index ray_scope no_cuda use_mps_device jit_mode_eval auto_find_batch_size_ratio chat_template_path
    """.split()  # noqa: SIM905 - a list this long would be a hundred lines
)
"""Keys without effect on the memory of a training step; ``max_grad_norm`` is one, for the norm is always taken."""

OF_LOOPS_BY_HAND = frozenset(
    ("num_warmup_steps", "max_train_steps", "with_tracking", "checkpointing_steps", "use_slow_tokenizer")
)
"""Arguments without effect on memory of scripts that train in a loop of their own, as transformers'
``run_*_no_trainer.py``."""
OF_OWN_LOOPS = OF_LOOPS_BY_HAND | frozenset(
    (
        *("lora_dim", "lora_module_name", "only_optimize_lora", "zero_stage", "max_seq_len", "data_split"),
        *("dropout", "actor_dropout", "deepspeed_config"),
    )
)
"""Arguments that show such a loop: those, and some of DeepSpeed-Chat's ``main.py``."""
