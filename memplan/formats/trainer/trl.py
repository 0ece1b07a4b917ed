"""Which of trl's trainers a script or its arguments are of, and what its configuration says by default.

trl 1.16: ``scripts/`` (``trl dpo``, ``dpo.py``), ``trainer/dpo_config.py`` (``DPOConfig``), ``trainer/grpo_config.py``
(``GRPOConfig``).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...plan.errors import Node, PlanError
from ..launch import Asked

SCRIPTS: Mapping[str, str] = MappingProxyType(
    {
        "dpo": "dpo",
        "kto": "kto",
        "orpo": "orpo",
        "cpo": "cpo",
        "reward": "reward",
        "reward_modeling": "reward",
        "prm": "prm",
        "grpo": "grpo",
        "rloo": "rloo",
        "ppo": "ppo",
        "dpo_online": "online-dpo",
        "gkd": "gkd",
    }
)
"""Trainers by the names of trl's commands and scripts; ``sft`` has the Trainer's own loss."""

OF_DPO = frozenset(
    """
    beta loss_type loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef label_smoothing use_weighting
    discopop_tau sync_ref_model ref_model_mixup_alpha ref_model_sync_steps truncation_mode pad_token pad_to_multiple_of
    dataset_num_proc disable_dropout max_prompt_length max_completion_length precompute_ref_batch_size rpo_alpha
    router_aux_loss_coef dataset_train_split dataset_test_split dataset_streaming
    """.split()  # noqa: SIM905 - one a line would be a page
)
"""Keys of ``DPOConfig`` and of its script that change numbers of one for each sequence, or nothing."""

OF_GRPO = frozenset(
    """
    num_generations num_generations_eval shuffle_dataset pad_to_multiple_of generation_batch_size steps_per_generation
    temperature top_p top_k min_p generation_kwargs chat_template_kwargs repetition_penalty cache_implementation
    vllm_model_impl vllm_structured_outputs_regex vllm_guided_decoding_regex vllm_server_base_url vllm_server_host
    vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length
    vllm_tensor_parallel_size num_iterations epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos
    vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg importance_sampling_level reward_weights
    multi_objective_aggregation scale_rewards loss_type mask_truncated_completions sync_ref_model ref_model_mixup_alpha
    ref_model_sync_steps top_entropy_quantile max_tool_calling_iterations vllm_importance_sampling_correction
    vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
    vllm_importance_sampling_cap off_policy_mask_threshold use_bias_correction_kl log_completions log_multimodal
    num_completions_to_print log_unique_prompts log_completions_hub_repo reward_model_name_or_path reward_funcs
    router_aux_loss_coef dataset_train_split dataset_test_split dataset_streaming dataset_num_proc
    """.split()  # noqa: SIM905 - one a line would be a page
)
"""Keys of ``GRPOConfig`` and of its script of generation, or that change a few numbers for each token, or nothing."""

ALONE = ("precompute_ref_log_probs", "f_divergence_type", "ld_alpha", "discopop_tau", "rpo_alpha")
"""Keys of ``DPOConfig`` that no other trainer has."""

ALONE_OF_GRPO = ("steps_per_generation", "importance_sampling_level", "num_generations_eval", "top_entropy_quantile")
"""Keys of ``GRPOConfig`` that DPO's has not. RLOO's shares a few, and is told by its script."""

OF_SEVERAL = ("beta", "num_generations", "max_completion_length", "use_vllm", "vllm_mode", "sync_ref_model")
"""Keys that several of trl's trainers have, and transformers' has not."""


def trainer_of(script: str, written: Node, asked: Asked) -> str:
    """trl's trainer, as a plan's ``trainer.loop``; empty for transformers' own, or trl's SFTTrainer."""
    named = asked.flags.get("trainer")
    if isinstance(named, str):
        return named if named in SCRIPTS.values() else ""
    if script in SCRIPTS or script.startswith("sft"):
        return SCRIPTS.get(script, "")
    if any(key in written.mapping for key in ALONE):
        return "dpo"
    if any(key in written.mapping for key in ALONE_OF_GRPO):
        return "grpo"
    for key in OF_SEVERAL:
        if (node := written.mapping.get(key)) is not None:
            problem = "belongs to several of trl's trainers: say which one (--trainer dpo or grpo)"
            raise PlanError(key, node.plain(), problem, origin=node.origin)
    return ""


def with_defaults(written: Node, trainer: str) -> Node:
    """The arguments with those that ``DPOConfig`` or ``GRPOConfig`` has by default, and without what changes no memory.
    Other trainers are refused by name later."""
    if not trainer:
        return written
    without = OF_GRPO if trainer == "grpo" else OF_DPO
    given = {key: node for key, node in written.mapping.items() if key not in without}
    own: dict[str, bool | int] = {"gradient_checkpointing": True, "bf16": "fp16" not in given}
    own |= {"max_completion_length": 256} if trainer == "grpo" else {"max_length": 1024}
    older = {"activation_checkpointing": "gradient_checkpointing"}
    known = {older.get(key, key) for key, node in given.items() if node.value is not None}
    unsaid = {key: Node(value, written.origin) for key, value in own.items() if key not in known}
    return Node({**unsaid, **given}, written.origin)
