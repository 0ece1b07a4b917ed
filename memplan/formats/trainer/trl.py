"""Which of trl's trainers a script or its arguments are of, and what its configuration says by default.

trl 1.16: ``scripts/`` (``trl dpo``, ``dpo.py``), ``trainer/dpo_config.py`` (``DPOConfig``).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...plan.errors import PlanError
from ...plan.node import Node
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

ALONE = ("precompute_ref_log_probs", "f_divergence_type", "ld_alpha", "discopop_tau", "rpo_alpha", "sync_ref_model")
"""Keys of ``DPOConfig`` that no other trainer has."""


def trainer_of(script: str, written: Node, asked: Asked) -> str:
    """trl's trainer, as a plan's ``trainer.loop``; empty for transformers' own, or trl's SFTTrainer."""
    named = asked.flags.get("trainer")
    if isinstance(named, str):
        return named if named in SCRIPTS.values() else ""
    if script in SCRIPTS or script.startswith("sft"):
        return SCRIPTS.get(script, "")
    if any(key in written.mapping for key in ALONE):
        return "dpo"
    if (node := written.mapping.get("beta")) is not None:
        problem = "belongs to several of trl's trainers: say which one (--trainer dpo)"
        raise PlanError("beta", node.plain(), problem, origin=node.origin)
    return ""


def with_defaults(written: Node, trainer: str) -> Node:
    """The arguments with those that ``DPOConfig`` has by default, and without what changes no memory. Other trainers
    are refused by name later."""
    if not trainer:
        return written
    given = {key: node for key, node in written.mapping.items() if key not in OF_DPO}
    own = {"gradient_checkpointing": True, "max_length": 1024, "bf16": "fp16" not in given}
    older = {"activation_checkpointing": "gradient_checkpointing"}
    known = {older.get(key, key) for key, node in given.items() if node.value is not None}
    unsaid = {key: Node(value, written.origin) for key, value in own.items() if key not in known}
    return Node({**unsaid, **given}, written.origin)
