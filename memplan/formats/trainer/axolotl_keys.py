"""Axolotl's keys that are not translated: refused, told, or without effect.

All fields of ``AxolotlInputConfig`` (``src/axolotl/utils/schemas``) and of the arguments of its ``integrations`` as of
July 2026, and those of older releases that stand in its examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_WHOLE_LOGITS = (
    "Axolotl puts kernels of its own into this loss of the trl that it pins, 1.9, and these are not modelled; with "
    "trl's own code, which is, it is --versions trl=1.9.0,transformers=5.16.1 --trainer "
)
OF_LOOPS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("grpo", "gdpo"), f"{_WHOLE_LOGITS}grpo on a file of trl's arguments"),
        **{name: f"{_WHOLE_LOGITS}{name} on a file of trl's arguments" for name in ("orpo", "simpo")},
        "kto": "KTO's loss in the trl that it pins, 1.9, is of all logits, and not modelled; that of trl 1.15, by "
        "tiles, is --trainer kto on a file of trl's arguments",
        "ebft": "EBFT, a loss of Axolotl's own, is not modelled",
    }
)
"""Other values of ``rl`` than dpo and ipo, and why each is refused: trl 1.9 (``trainer/grpo_trainer.py``) calls
``selective_log_softmax`` and ``entropy_from_logits`` on ``outputs.logits``, in whose place Axolotl 0.19 puts kernels
that save the logits and a number for each token, and make their gradient at once (``loaders/patch_manager.py``,
``_apply_trl_trainer_utils_patches``; ``monkeypatch/trainer/utils.py``)."""
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "chunked_cross_entropy": "a loss in chunks of Axolotl's own is not modelled",
        "tiled_mlp": "an MLP that runs in tiles is not modelled",
        "activation_offloading": "activations that are kept on the host are not modelled",
        "layer_offloading": "layers that are kept on the host are not modelled",
        "lora_on_cpu": "adapters that are loaded on the host are not modelled",
        "quantize_moe_experts": "experts in 4 bits are not modelled",
        "relora": "ReLoRA is not modelled",
        "unfrozen_parameters": "parameters chosen by pattern are not modelled; --freeze-layers N is",
        "qat": "training for a quantised model is not modelled",
        "fp8": "torchao's float8 is not modelled here",
        "unsloth_cross_entropy_loss": "Unsloth's own functions are not modelled",
        "unsloth_lora_mlp": "Unsloth's own functions are not modelled",
        "unsloth_lora_qkv": "Unsloth's own functions are not modelled",
        "processor_type": "models of more than text are not modelled",
        "process_reward_model": "heads that score steps are not modelled",
        "lisa_n_layers": "LISA, which trains other layers by turns, is not modelled",
        "peft_layers_to_transform": "adapters of only some layers are not modelled",
        "gptq": "weights that are quantised already are not read here; --quantisation gptq over a plan is",
        "use_eaft": "a loss weighed by entropy is not modelled",
        "fused_attn_kernel": "Axolotl's own kernels of attention are not modelled",
        **dict.fromkeys(
            ("use_scattermoe", "use_sonicmoe", "llama4_linearized_experts"),
            "Axolotl's own kernels of experts are not modelled",
        ),
        "use_onebitllms": "layers of one bit are not modelled",
        "selective_checkpointing": "checkpoints that keep some operations are not modelled",
        "deepcompile": "DeepSpeed's compiler is not modelled",
        "flash_attn_fuse_mlp": "an MLP in one operation is not modelled",
        "flash_attn_cross_entropy": "flash-attention's cross entropy is not modelled",
        "flash_optimum": "BetterTransformer is not modelled",
        "model_quantization_config": "a base in MXFP4 or FP8 is not modelled",
        "nonexpert_quantization": "a base in MXFP4 or FP8 is not modelled",
        "peft_layer_replication": "layers that are repeated are not modelled",
        "peft_trainable_token_indices": "training only some tokens of an embedding is not modelled",
        "lora_rank_pattern": "ranks that differ by module are not modelled",
        "scaling_softmax": "scaled softmax is not modelled",
        "s2_attention": "shifted short attention is not modelled",
        "use_kernels": "kernels of the Hub are not modelled",
        "fp32_norms": "norms that are sharded in fp32 are not modelled",
        "kd_trainer": "a teacher's logits are not modelled",
        "dense_mixer": "its own routing of experts is not modelled",
        "hatchery": "the training runs on another machine",
        "nemo_gym_enabled": "reinforcement learning by NeMo Gym is not modelled",
        **dict.fromkeys(
            ("expert_backend", "use_dsv4_kernels", "use_glm_dsa_kernels"),
            "Axolotl's own kernels of a model are not modelled",
        ),
        **dict.fromkeys(
            ("gemma4_fp8_nonexpert", "gemma4_nf4_nonexpert", "nvfp4_merge_aware"),
            "layers in fewer bits are not modelled",
        ),
    }
)
"""Keys that change the estimate, and why one that is set is refused."""
PLUGINS: Mapping[str, str] = MappingProxyType(
    {
        "GrokfastPlugin": "a moving average of gradients is not modelled",
        "SpectrumPlugin": "parameters chosen by pattern are not modelled; --freeze-layers N is",
        "KDPlugin": "a teacher's logits are not modelled",
        "LLMCompressorPlugin": "sparse weights are not modelled",
        "DenseMixerPlugin": "its own routing of experts is not modelled",
        "DiffusionPlugin": "a loss of diffusion is not modelled",
        "ExpertParallelPlugin": "its experts on several GPUs are not modelled",
        "MoraPlugin": "MoRA is not modelled",
        "HatcheryPlugin": "the training runs on another machine",
        "NemoGymPlugin": REFUSED["nemo_gym_enabled"],
    }
)
"""Of ``integrations``, by class: those that change the estimate, and why."""
CUT_PLUGIN = "CutCrossEntropyPlugin"
HARMLESS_PLUGINS = frozenset({CUT_PLUGIN, "LigerPlugin", "KernelsPlugin", "SwanLabPlugin", "LMEvalPlugin"})
"""Plugins that do nothing by themselves, or whose keys say what they do."""
_WHOLE = "the model is assumed to lie whole, or sharded as the file says, on each GPU"
_VOCABULARY = "the vocabulary is assumed to be the model's; a larger one is --vocab N"
_OVERRIDDEN = "the model is assumed to be what its own config.json says"
_KERNEL = "the attention is assumed to be what attn_implementation says"
NOTED: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        **dict.fromkeys(("device_map", "max_memory", "gpu_memory_limit"), ((None, "auto"), _WHOLE)),
        **dict.fromkeys(("resize_token_embeddings_to_32x", "shrink_embeddings"), ((None, False), _VOCABULARY)),
        "tokens": ((None,), _VOCABULARY),
        **dict.fromkeys(
            ("overrides_of_model_config", "overrides_of_model_kwargs", "model_config", "model_kwargs", "rope_scaling"),
            ((None,), _OVERRIDDEN),
        ),
        **dict.fromkeys(
            ("gemma4_hybrid_attn_impl", "large_head_attention", "flash_attn_d512", "sdpa_varlen"),
            ((None, False, "sdpa"), _KERNEL),
        ),
        "flex_attn_compile_kwargs": ((None,), "flex attention is assumed to be compiled as by default"),
        "batch_flattening": ((None, False), "batches are assumed to be padded"),
        "trainer_cls": ((None,), "the trainer is assumed to be Axolotl's own"),
        "bnb_config_kwargs": ((None,), "the base is assumed to be NF4, quantised twice, and stored in bf16"),
        "peft": ((None,), "adapters are assumed to be initialised as by default"),
        "peft_autocast_adapter_dtype": ((None, True), "adapters are assumed to be trained in fp32"),
        "peft_layers_pattern": ((None, []), "adapters are assumed to be in every layer"),
        "embeddings_skip_upcast": ((None, False), "embeddings are assumed to be cast as by default"),
        "eval_batch_size": ((None,), "its larger evaluation is not modelled; the estimate is of training"),
        "eval_sequence_len": ((None,), "its longer evaluation is not modelled; the estimate is of training"),
        "experts_implementation": ((None,), "experts are assumed to run as transformers runs them by default"),
        "freeze_mm_modules": ((None, False), "the model is assumed to read only text"),
        "lora_embedding_kernel": ((None, False), "peft's layers are taken"),
        "liger_rms_norm_gated": ((None, False), "norms with a gate are assumed to be the model's own"),
        "liger_use_token_scaling": ((None, False), "the loss is assumed to weigh tokens alike"),
        "plugins": ((None, []), "what plugins do that are not Axolotl's own is not known"),
    }
)
"""Keys that are not modelled and change a detail: values that do nothing, and the assumption."""

WITHOUT_EFFECT = frozenset(
    """
    strict auto_resume_from_checkpoints mean_resizing_embeddings reinit_weights trl vllm ebft quantization
    dynamic_checkpoint center_rewards_coefficient dpo_use_weighting dpo_label_smoothing dpo_use_liger_kernel
    dpo_padding_free dpo_loss_type dpo_loss_weights datasets test_datasets shuffle_merged_datasets
    shuffle_before_merging_datasets dataset_prepared_path dataset_shard_num dataset_shard_idx skip_prepare_dataset
    num_dataset_shards_to_save pretraining_dataset dataset_processes dataset_exact_deduplication
    dataset_keep_in_memory push_dataset_to_hub hf_use_auth_token device world_size ddp do_causal_lm_eval
    eval_causal_lm_metrics do_bench_eval bench_dataset bench_split loss_watchdog_threshold loss_watchdog_patience
    gc_steps gc_collect_steps fp8_enable_fsdp_float8_all_gather float32 excess_length_strategy min_sample_len
    max_prompt_len sample_packing_group_size sample_packing_bin_size sample_packing_sequentially
    sample_packing_mp_start_method eval_sample_packing pad_to_sequence_len curriculum_sampling use_pose
    pose_split_on_token_ids pose_max_context_len pose_num_chunks pretrain_multipack_buffer_size
    pretrain_multipack_attn pretraining_sample_concatenation streaming_multipack_buffer_size scaling_softmax_factor
    scaling_softmax_bias chunked_cross_entropy_num_chunks eaft_alpha eaft_k tiled_mlp_num_shards
    tiled_mlp_use_original_mlp fp32_norm_classes fsdp_final_state_dict_type val_set_size heads_k_stride
    ring_attn_func special_tokens added_tokens_overrides torch_compile_options torch_compile_backend torch_compile_mode
    evals_per_epoch saves_per_epoch
    save_first_step early_stopping_patience use_tensorboard profiler_steps profiler_steps_start include_tkps
    orpo_alpha simpo_gamma cpo_alpha kto_desirable_weight kto_undesirable_weight rl_beta low_cpu_mem_usage
    chat_template_jinja chat_template_kwargs eot_tokens default_system_message fix_untrained_tokens is_preprocess
    preprocess_iterable total_num_tokens total_supervised_tokens sample_packing_eff_est axolotl_config_path
    is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_qwen_derived_model generate_samples
    num_generation_samples generation_max_new_tokens generation_temperature generation_top_p generation_top_k
    generation_prompt_ratio generation_do_sample base_model_config cls_model_config tokenizer_config
    tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common tokenizer_type processor_kwargs
    tokenizer_save_jinja_files experimental_skip_move_to_device model_quantization_config_kwargs lora_model_dir
    lora_fan_in_fan_out lora_alpha_pattern peft_init_lora_weights peft_ensure_weight_tying
    qlora_sharded_model_loading loraplus_lr_ratio loraplus_lr_embedding merge_lora merge_method relora_prune_ratio
    relora_prune_method relora_cpu_offload jagged_restart_steps jagged_restart_warmup_steps
    jagged_restart_anneal_steps train_on_inputs embedding_lr embedding_lr_scale torchdistx_path lr_scheduler
    lr_quadratic_warmup cosine_min_lr_ratio cosine_constant_lr_ratio lr_div_factor lr_groups adam_epsilon2
    adam_beta3 dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of qgalore_rank qgalore_update_proj_gap
    qgalore_scale qgalore_proj_type qgalore_proj_quant qgalore_proj_bits qgalore_proj_group_size
    qgalore_cos_threshold qgalore_gamma_proj qgalore_queue_size num_epochs use_wandb wandb_name wandb_run_id
    wandb_mode wandb_watch wandb_log_model use_mlflow mlflow_tracking_uri mlflow_experiment_name mlflow_run_name
    hf_mlflow_log_artifacts use_comet comet_api_key comet_workspace comet_project_name comet_experiment_key
    comet_mode comet_online comet_experiment_config use_trackio trackio_project_name trackio_run_name
    use_otel_metrics otel_metrics_host otel_metrics_port lisa_step_interval lisa_layers_attribute gradio_title
    gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens gradio_temperature use_ray ray_run_name
    ray_num_workers resources_per_worker image_size image_resize_algorithm role_boundaries
    revision_of_model max_packed_sequence_len noisy_embedding_alpha dpo_beta eval_table_size eval_max_new_tokens
    dpo_use_logits_to_keep dpo_generate_during_eval dpo_norm_loss rpo_alpha flash_attn_rms_norm lm_eval_tasks
    lm_eval_batch_size lm_eval_post_train lm_eval_model nemo_gym_dir nemo_gym_auto_clone nemo_gym_config_paths
    nemo_gym_head_port nemo_gym_server_timeout nemo_gym_verify_timeout nemo_gym_run_timeout nemo_gym_datasets
    nemo_gym_auto_start nemo_gym_model_name nemo_gym_multi_turn nemo_gym_max_turns moe_grouped_backend
    moe_dequant_chunk_size moe_bnb_fast dsv4_fp8_nonexpert_mode dsv4_fp8_lora_kernel dsv4_shared_mlp_lora_kernel
    dsv4_bf16_all dsv4_fp4_grouped_mode nvfp4_merge_aware_start_step kd_ce_alpha kd_alpha kd_temperature kd_beta
    kd_normalize_topk kd_online_server_base_url kd_online_topk kd_online_server kd_online_timeout kd_temperature_min
    expert_parallel_backend expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes
    expert_parallel_token_capacity expert_parallel_fallback_on_unsupported spectrum_top_fraction spectrum_model_name
    recipe save_compressed grokfast_alpha grokfast_lamb use_swanlab swanlab_project swanlab_experiment_name
    swanlab_description swanlab_mode swanlab_workspace swanlab_api_key swanlab_log_model swanlab_web_host
    swanlab_api_host swanlab_lark_webhook_url swanlab_lark_secret swanlab_log_completions
    swanlab_completion_log_interval swanlab_completion_max_buffer revision pad_to_multiple_of diffusion
    mora llmcompressor debug eta_min adam_eps gptq_groupsize gptq_model_v1 gptq_disable_exllama
    sample_packing_seq_len_multiplier base_model_ignore_patterns precompute_ref_log_probs liger_layer_norm
    """.split()  # noqa: SIM905 - as a list it would be a line a word
)
"""Keys without effect on the memory of a training step, or of keys that are refused."""
