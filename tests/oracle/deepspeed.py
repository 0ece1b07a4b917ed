"""DeepSpeed's own engine on CPUs: real processes, gloo, a tiny transformers model, storages followed through a step.

``python -m tests.oracle.deepspeed FILE [CASE …]`` measures every case and writes what the tests compare with. One
rank is ``python -m tests.oracle.deepspeed CASE RANKFILE``, started by ``measure`` with torch.distributed's
environment. fp16 is refused on most CPUs. Two things that only CPUs do are left out: tensors on the meta device,
and the whole copy that gloo makes of a tensor to scatter it (first seen as the output of ``split``).
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

AVAILABLE = importlib.util.find_spec("deepspeed") is not None
"""Whether DeepSpeed is installed: ``pip install deepspeed`` with ``DS_BUILD_OPS=0`` (10 MB, no CUDA needed)."""

LEAST = 513
"""Smaller storages are scalars, which the engine makes many of."""

WINDOWS = 12

SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 176,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 128,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "bert": {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "max_position_embeddings": 128,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}
OF_LLAMA = SIZES["llama"]
GROUPED = {name: value for name, value in OF_LLAMA.items() if name != "tie_word_embeddings"}
PLAIN = {name: value for name, value in GROUPED.items() if name != "num_key_value_heads"}
UNNAMED = {name: value for name, value in PLAIN.items() if name != "intermediate_size"}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0}
DEEPSEEK = {
    **OF_LLAMA,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 56,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "group_limited_greedy",
}
SIZES |= {
    "qwen2": OF_LLAMA,
    "qwen3": {**OF_LLAMA, "head_dim": 16, "tie_word_embeddings": True},
    "phi3": {**OF_LLAMA, "pad_token_id": 0, "eos_token_id": 0},
    "gemma": {**GROUPED, "head_dim": 16},
    "gemma2": {**GROUPED, "head_dim": 16, "sliding_window": 16},
    "glm": {**OF_LLAMA, **TOKENS, "pad_token_id": 0, "head_dim": 16},
    "glm4": {**OF_LLAMA, **TOKENS, "pad_token_id": 0, "head_dim": 16, "attention_bias": False},
    "opt": {**UNNAMED, "ffn_dim": 176, "dropout": 0.0},
    "gpt_neox": PLAIN,
    "granite": {**OF_LLAMA, "residual_multiplier": 0.5},
    "gptj": {**SIZES["gpt2"], **TOKENS, "n_inner": 176, "rotary_dim": 8},
    "falcon": {**PLAIN, **TOKENS, "ffn_hidden_size": 176},
    "mixtral": {**OF_LLAMA, "num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {
        **OF_LLAMA,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen2_moe": {
        **OF_LLAMA,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "mlp_only_layers": [1],
    },
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), DEEPSEEK),
    "ernie4_5": {**GROUPED, "head_dim": 16},
    "dots1": {**DEEPSEEK, "num_key_value_heads": 2, "head_dim": 16, "norm_topk_prob": True},
    "glm4_moe": {**DEEPSEEK, "num_key_value_heads": 2, "head_dim": 16},
    "llama4_text": {
        **OF_LLAMA,
        "head_dim": 16,
        "intermediate_size": 48,
        "intermediate_size_mlp": 176,
        "num_local_experts": 4,
        "moe_layers": [0, 1],
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 64,
    },
    "gpt_oss": {
        **OF_LLAMA,
        "head_dim": 16,
        "intermediate_size": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "olmoe": {**OF_LLAMA, "intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_text": {
        **OF_LLAMA,
        "head_dim": 16,
        "full_attention_interval": 3,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
    },
    "helium": {**OF_LLAMA, **TOKENS, "head_dim": 16},
    "smollm3": {**OF_LLAMA, "pad_token_id": 0, "no_rope_layer_interval": 2},
    "exaone4": {**OF_LLAMA, **TOKENS, "head_dim": 16, "sliding_window": 16, "sliding_window_pattern": 3},
    "olmo3": {
        **OF_LLAMA,
        **TOKENS,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "starcoder2": {**OF_LLAMA, "sliding_window": 16},
    "olmo2": {**OF_LLAMA, **TOKENS},
    "seed_oss": {**OF_LLAMA, **TOKENS, "head_dim": 16, "attention_dropout": 0.0},
    "cohere": {**OF_LLAMA, **TOKENS, "use_qk_norm": True},
    "cohere2": {**OF_LLAMA, **TOKENS, "sliding_window": 16, "sliding_window_pattern": 2},
    "gemma3_text": {**GROUPED, "head_dim": 16, "sliding_window": 16, "sliding_window_pattern": 3},
    "gemma4_text": {
        **GROUPED,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
    },
    "granitemoehybrid": {
        **OF_LLAMA,
        "residual_multiplier": 0.5,
        "num_local_experts": 0,
        "shared_intermediate_size": 176,
        "position_embedding_type": "rope",
        "layer_types": ["full_attention"] * 3,
    },
    "granitemoe": {**OF_LLAMA, "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Architectures, all with 1000 tokens."""

SMALL = {"reduce_bucket_size": 20000, "allgather_bucket_size": 20000}
"""Buckets that hold several small tensors, but not the large ones."""

SMALL_3 = {
    "stage3_prefetch_bucket_size": 10000,
    "stage3_param_persistence_threshold": 100,
    "stage3_max_live_parameters": 40000,
    "stage3_max_reuse_distance": 20000,
    **SMALL,
}


EVERY_LINEAR = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
RANK = 4
"""Of adapters."""

COMPLETION = 24
"""Tokens of GRPO's completions."""

ON_HOST = {"offload_optimizer": {"device": "cpu"}}


@dataclass(frozen=True)
class Case:
    """A run: model, ranks, and DeepSpeed's section. Micro-batches of 2 sequences of 32 tokens."""

    stage: int
    ranks: int = 2
    family: str = "llama"
    dtype: str = "bf16"
    zero: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 1
    groups: str = "one"
    recompute: bool = False
    fused: bool = False
    """DeepSpeed's FusedAdam, or CPUAdam, compiled at first use; else PyTorch's foreach AdamW."""
    sums: str | None = None
    """``grad_accum_dtype``."""
    optimizer: str = "adamw"
    """One of ``OPTIMIZERS``."""
    lora: str = ""
    """Linear layers with peft's adapters, by their names."""
    trainer: str = ""
    """``dpo`` or ``grpo``: whose loss of trl's it is (needs trl 1.16); with one pair, or two completions."""
    liger: Literal["", "layers", "all"] = ""
    """Liger's kernels, which do nothing here, in the place of the layers' operators, or of the loss, too."""


CASES: dict[str, Case] = {
    "z3": Case(3, zero=SMALL_3),
    "z3-recompute": Case(3, zero=SMALL_3, recompute=True),
    "z3-gpt2": Case(3, family="gpt2", dtype="fp32", zero=SMALL_3),
    "z3-bert": Case(3, family="bert", dtype="fp32", zero={**SMALL_3, "stage3_param_persistence_threshold": 1000}),
    "z3-4": Case(3, 4, zero=SMALL_3, microbatches=2),
    "z3-sums": Case(3, zero=SMALL_3, microbatches=2, sums="fp32"),
    "z3-sub-groups": Case(3, 4, zero={**SMALL_3, "sub_group_size": 30000}, groups="decay"),
    "z3-default": Case(3),
    "z2": Case(2, zero=SMALL),
    "z2-groups": Case(2, zero=SMALL, microbatches=3, groups="decay"),
    "z2-overlap-4": Case(2, 4, zero={**SMALL, "overlap_comm": True}, groups="decay"),
    "z2-sums": Case(2, zero=SMALL, microbatches=2, sums="fp32"),
    "z2-gpt2": Case(2, family="gpt2", dtype="fp32", zero=SMALL),
    "z1": Case(1, zero=SMALL),
    "z1-4": Case(1, 4, zero=SMALL, microbatches=2, groups="decay"),
    "z1-sums": Case(1, zero=SMALL, microbatches=2, sums="fp32"),
    "z2-offload": Case(2, zero={**SMALL, **ON_HOST}, microbatches=2, fused=True),
    "z3-offload": Case(3, zero={**SMALL_3, **ON_HOST, "offload_param": {"device": "cpu"}}, fused=True),
    "z3-qwen2": Case(3, family="qwen2", zero=SMALL_3),
    "z3-phi3": Case(3, family="phi3", zero=SMALL_3),
    "z3-gemma2": Case(3, family="gemma2", zero=SMALL_3),
    "z3-opt": Case(3, family="opt", dtype="fp32", zero=SMALL_3),
    "z3-gpt_neox": Case(3, family="gpt_neox", dtype="fp32", zero=SMALL_3),
    "z3-granite": Case(3, family="granite", zero=SMALL_3),
    "z3-granitemoehybrid": Case(3, family="granitemoehybrid", zero=SMALL_3),
    "z3-granitemoehybrid-recompute": Case(3, family="granitemoehybrid", zero=SMALL_3, recompute=True),
    "z2-granitemoehybrid": Case(2, family="granitemoehybrid", zero=SMALL, microbatches=2),
    "z3-gptj": Case(3, family="gptj", dtype="fp32", zero=SMALL_3),
    "z3-phi3-recompute": Case(3, family="phi3", zero=SMALL_3, recompute=True),
    "z3-gemma2-recompute": Case(3, family="gemma2", zero=SMALL_3, recompute=True),
    "z3-opt-recompute": Case(3, family="opt", dtype="fp32", zero=SMALL_3, recompute=True),
    "z3-gpt_neox-recompute": Case(3, family="gpt_neox", dtype="fp32", zero=SMALL_3, recompute=True),
    "z2-phi3": Case(2, family="phi3", zero=SMALL),
    "z2-gemma2": Case(2, family="gemma2", zero=SMALL),
    "z3-exaone4": Case(3, family="exaone4", zero=SMALL_3),
    "z3-exaone4-recompute": Case(3, family="exaone4", zero=SMALL_3, recompute=True),
    "z2-qwen3_5": Case(2, family="qwen3_5_text", zero=SMALL, microbatches=2),
    "z2-exaone4": Case(2, family="exaone4", zero=SMALL, microbatches=2),
    "z3-olmo3": Case(3, family="olmo3", zero=SMALL_3),
    "z3-olmo3-recompute": Case(3, family="olmo3", zero=SMALL_3, recompute=True),
    "z3-olmo3-adapters": Case(3, family="olmo3", zero=SMALL_3, recompute=True, lora=EVERY_LINEAR),
    "z2-olmo3": Case(2, family="olmo3", zero=SMALL, microbatches=2),
    "z3-starcoder2": Case(3, family="starcoder2", dtype="fp32", zero=SMALL_3),
    "z3-starcoder2-recompute": Case(3, family="starcoder2", dtype="fp32", zero=SMALL_3, recompute=True),
    "z3-starcoder2-adapters": Case(
        3, family="starcoder2", dtype="fp32", zero=SMALL_3, recompute=True, lora="q_proj,o_proj,c_fc,c_proj"
    ),
    "z2-starcoder2": Case(2, family="starcoder2", dtype="fp32", zero=SMALL, microbatches=2),
    "z3-smollm3": Case(3, family="smollm3", zero=SMALL_3),
    "z3-smollm3-recompute": Case(3, family="smollm3", zero=SMALL_3, recompute=True),
    "z3-smollm3-adapters": Case(3, family="smollm3", zero=SMALL_3, recompute=True, lora=EVERY_LINEAR),
    "z3-gemma3_text": Case(3, family="gemma3_text", zero=SMALL_3),
    "z3-gemma3_text-recompute": Case(3, family="gemma3_text", zero=SMALL_3, recompute=True),
    "z3-gemma3_text-adapters": Case(3, family="gemma3_text", zero=SMALL_3, recompute=True, lora=EVERY_LINEAR),
    "z2-gemma3_text": Case(2, family="gemma3_text", zero=SMALL),
    "z3-gemma4_text": Case(3, family="gemma4_text", zero=SMALL_3),
    "z3-gemma4_text-recompute": Case(3, family="gemma4_text", zero=SMALL_3, recompute=True),
    "z3-gemma4_text-adapters": Case(3, family="gemma4_text", zero=SMALL_3, recompute=True, lora=EVERY_LINEAR),
    "z2-gemma4_text": Case(2, family="gemma4_text", zero=SMALL, microbatches=2),
    "z3-gemma": Case(3, family="gemma", zero=SMALL_3),
    "z3-gemma-recompute": Case(3, family="gemma", zero=SMALL_3, recompute=True),
    "z3-gemma-adapters": Case(3, family="gemma", zero=SMALL_3, recompute=True, lora=EVERY_LINEAR),
    "z2-gemma": Case(2, family="gemma", zero=SMALL, microbatches=2),
    "z3-glm4": Case(3, family="glm4", zero=SMALL_3),
    "z3-glm4-recompute": Case(3, family="glm4", zero=SMALL_3, recompute=True),
    "z3-glm4-adapters": Case(3, family="glm4", zero=SMALL_3, recompute=True, lora="q_proj,v_proj"),
    "z2-glm4": Case(2, family="glm4", zero=SMALL, microbatches=2),
    "z3-glm": Case(3, family="glm", zero=SMALL_3),
    "z3-glm-recompute": Case(3, family="glm", zero=SMALL_3, recompute=True),
    "z2-glm": Case(2, family="glm", zero=SMALL, microbatches=2),
    "z1-opt": Case(1, family="opt", dtype="fp32", zero=SMALL),
    "z2-gpt_neox": Case(2, family="gpt_neox", dtype="fp32", zero=SMALL),
    "z2-gptj": Case(2, family="gptj", dtype="fp32", zero=SMALL),
    "z1-falcon": Case(1, family="falcon", dtype="fp32", zero=SMALL, microbatches=2),
    "z2-momentum": Case(2, zero=SMALL, optimizer="momentum", groups="decay"),
    "z1-adafactor": Case(1, zero=SMALL, optimizer="adafactor"),
    "z3-adafactor": Case(3, zero={**SMALL_3, "sub_group_size": 30000}, optimizer="adafactor-transformers"),
    "z0-adafactor": Case(0, dtype="fp32", optimizer="adafactor-transformers"),
    "z2-lion": Case(2, zero=SMALL, optimizer="lion"),
    "z0-lion": Case(0, optimizer="lion"),
    "z2-adam8bit": Case(2, zero=SMALL, optimizer="adam8bit", groups="decay"),
    "z3-lion8bit": Case(3, zero=SMALL_3, optimizer="lion8bit"),
    "z3-mixtral": Case(3, family="mixtral", zero=SMALL_3),
    "z3-mixtral-recompute": Case(3, family="mixtral", zero=SMALL_3, microbatches=2, recompute=True),
    "z3-qwen3_moe": Case(3, family="qwen3_moe", groups="decay"),
    "z2-qwen2_moe": Case(2, family="qwen2_moe", zero=SMALL, microbatches=2),
    "z3-olmoe": Case(3, family="olmoe", zero=SMALL_3),
    "z3-olmoe-recompute": Case(3, family="olmoe", zero=SMALL_3, microbatches=2, recompute=True),
    "z3-granitemoe": Case(3, family="granitemoe", zero=SMALL_3),
    "z3-deepseek_v3": Case(3, family="deepseek_v3", zero=SMALL_3),
    "z3-deepseek_v3-recompute": Case(3, family="deepseek_v3", microbatches=2, recompute=True),
    "z3-deepseek_v2": Case(3, family="deepseek_v2", zero=SMALL_3),
    "z3-deepseek_v2-recompute": Case(3, family="deepseek_v2", zero=SMALL_3, recompute=True),
    "z3-deepseek_v3-adapters": Case(3, family="deepseek_v3", zero=SMALL_3, lora="q_b_proj,o_proj"),
    "z3-glm4_moe": Case(3, family="glm4_moe", zero=SMALL_3),
    "z3-ernie4_5": Case(3, family="ernie4_5", zero=SMALL_3),
    "z2-ernie4_5": Case(2, family="ernie4_5", zero=SMALL, microbatches=2),
    "z3-dots1": Case(3, family="dots1", zero=SMALL_3),
    "z2-dots1": Case(2, family="dots1", zero=SMALL, microbatches=2),
    "z3-llama4_text": Case(3, family="llama4_text", zero=SMALL_3),
    "z3-llama4_text-recompute": Case(3, family="llama4_text", zero=SMALL_3, microbatches=2, recompute=True),
    "z2-llama4_text": Case(2, family="llama4_text", zero=SMALL, microbatches=2),
    "z1-llama4_text": Case(1, family="llama4_text", dtype="fp32", zero=SMALL),
    "z3-gpt_oss": Case(3, family="gpt_oss", zero=SMALL_3),
    "z3-gpt_oss-recompute": Case(3, 4, family="gpt_oss", zero=SMALL_3, microbatches=2, recompute=True),
    "z2-gpt_oss": Case(2, family="gpt_oss", zero=SMALL, microbatches=2),
    "z1-gpt_oss": Case(1, family="gpt_oss", zero=SMALL, recompute=True),
    "z2-mixtral": Case(2, family="mixtral", zero=SMALL),
    "z1-qwen3_moe": Case(1, family="qwen3_moe", zero=SMALL),
    "z2-deepseek_v3": Case(2, family="deepseek_v3", zero=SMALL, microbatches=2),
    "z1-deepseek_v2": Case(1, family="deepseek_v2", zero=SMALL),
    "z0": Case(0),
    "z0-fused": Case(0, fused=True),
    "z3-adapters": Case(3, zero=SMALL_3, lora="q_proj,v_proj"),
    "z3-adapters-all": Case(3, 4, zero=SMALL_3, microbatches=2, lora=EVERY_LINEAR),
    "z3-adapters-recompute": Case(3, zero=SMALL_3, recompute=True, lora="q_proj,v_proj"),
    "z3-adapters-default": Case(3, recompute=True, lora=EVERY_LINEAR),
    "z2-adapters": Case(2, zero=SMALL, lora=EVERY_LINEAR),
    "z2-adapters-recompute": Case(2, zero=SMALL, microbatches=2, recompute=True, lora="q_proj,v_proj"),
    "z1-adapters": Case(1, zero=SMALL, lora="q_proj,v_proj"),
    "z0-adapters": Case(0, lora="q_proj,v_proj"),
    "z3-dpo": Case(3, zero=SMALL_3, trainer="dpo"),
    "z3-dpo-default": Case(3, recompute=True, microbatches=2, trainer="dpo"),
    "z3-dpo-adapters": Case(3, zero=SMALL_3, lora="q_proj,v_proj", trainer="dpo"),
    "z3-dpo-adapters-recompute": Case(3, zero=SMALL_3, recompute=True, lora=EVERY_LINEAR, trainer="dpo"),
    "z2-dpo": Case(2, zero=SMALL, trainer="dpo"),
    "z2-dpo-adapters": Case(2, zero=SMALL, lora="q_proj,v_proj", trainer="dpo"),
    "z3-liger": Case(3, zero=SMALL_3, microbatches=2, liger="all"),
    "z3-liger-recompute": Case(3, recompute=True, liger="all"),
    "z3-liger-layers": Case(3, zero=SMALL_3, liger="layers"),
    "z3-liger-tied": Case(3, family="qwen3", zero=SMALL_3, liger="all"),
    "z3-liger-adapters": Case(3, zero=SMALL_3, lora="q_proj,v_proj", liger="all"),
    "z2-liger": Case(2, zero=SMALL, microbatches=2, liger="all"),
    "z1-liger": Case(1, zero=SMALL, recompute=True, liger="all"),
    "z0-liger": Case(0, liger="all"),
    "z3-grpo": Case(3, zero=SMALL_3, recompute=True, trainer="grpo"),
}

# Cases whose layers traces say, too: ``tests/trace/deepspeed_0_19_8.json``.
LEARNED: dict[str, Case] = {name: case for name, case in CASES.items() if case.family == "smollm3"}


def configuration(case: Case) -> dict[str, Any]:
    """``ds_config.json``."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.microbatches,
        "zero_optimization": {"stage": case.stage, **case.zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
    if case.dtype != "fp32":
        config[case.dtype] = {"enabled": True}
    if case.fused:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-4}}
    if case.sums:
        config["data_types"] = {"grad_accum_dtype": case.sums}
    return config


def summary(changes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """What two tapes are compared by: net, peak, the peak of each twelfth, and how often each size comes and goes."""
    changes = [(sign, size) for sign, size in changes if size >= LEAST]
    live, curve = 0, [0]
    for sign, size in changes:
        live += sign * size
        curve.append(live)
    n = len(curve)
    windows = [max(curve[i * n // WINDOWS : (i + 1) * n // WINDOWS] or [0]) for i in range(WINDOWS)]
    sizes = Counter(f"{sign * size:+d}" for sign, size in changes)
    return {"net": live, "peak": max(curve), "windows": windows, "sizes": dict(sorted(sizes.items()))}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(case: str) -> list[dict[str, Any]]:
    """One record per rank."""
    port = free_port()
    ranks = (CASES | LEARNED)[case].ranks
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(ranks):
            here = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
            there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
            environment = {**os.environ, **here, **there, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "tests.oracle.deepspeed", case, f"{folder}/{rank}"]
            with Path(f"{folder}/{rank}.log").open("w") as log:
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        failed = [rank for rank, process in enumerate(started) if process.wait(timeout=600)]
        if failed:
            raise RuntimeError(Path(f"{folder}/{failed[0]}.log").read_text()[-2000:])
        return [json.loads(Path(f"{folder}/{rank}").read_text()) for rank in range(ranks)]


def optimizer_of(name: str, parameters: Any) -> Any:
    """A client's optimizer. Lion is DeepSpeed's own, whose CUDA kernel, which allocates nothing, is left out."""
    import torch
    import transformers

    if name in ("adam8bit", "lion8bit"):
        bitsandbytes: Any = import_module("bitsandbytes")
        return {"adam8bit": bitsandbytes.optim.AdamW8bit, "lion8bit": bitsandbytes.optim.Lion8bit}[name](parameters)
    if name == "lion":
        fused_lion: Any = import_module("deepspeed.ops.lion.fused_lion")
        kernel = SimpleNamespace(multi_tensor_lion=lambda *tensors: None)
        fused_lion.FusedLionBuilder = lambda: SimpleNamespace(load=lambda: kernel)
        fused_lion.get_accelerator = lambda: SimpleNamespace(IntTensor=torch.IntTensor)
        return fused_lion.FusedLion(parameters)
    if name == "momentum":
        return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, foreach=True)
    if name == "adafactor":
        return torch.optim.Adafactor(parameters, foreach=True)
    if name == "adafactor-transformers":
        adafactor: Any = transformers.optimization.Adafactor
        return adafactor(parameters, scale_parameter=False, relative_step=False, lr=1e-3)
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=True)


def run_rank(case: Case) -> dict[str, Any]:
    """Four iterations on this rank; the last one's summaries."""
    import torch
    import transformers

    from . import delta_kernels, triton_functions
    from .tracer import Follow, Trace
    from .training_step import in_order

    deepspeed: Any = import_module("deepspeed")
    logging: Any = transformers.logging
    torch.set_num_threads(1)
    logging.set_verbosity_error()

    class OnDevice(Follow):  # type: ignore[no-untyped-call]
        """Without what only CPUs do."""

        def adopt(self, tensor: torch.Tensor, op: str) -> None:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if (tensor.is_meta or op == "aten.split.Tensor") and key not in self.seen:
                self.seen[key] = weakref.finalize(storage, self.seen.pop, key, None)
                return
            super().adopt(tensor, op)

    deepspeed.init_distributed()
    trace = Trace()
    places: dict[str, tuple[int, int]] = {}

    def mark(name: str) -> None:
        gc.collect()
        places[name] = (len(trace.changes), trace.live)

    with OnDevice(trace) as follow:
        config = transformers.AutoConfig.for_model(case.family, vocab_size=1000, **SIZES[case.family])
        config.use_cache = False
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[case.dtype]
        auto: Any = transformers.AutoModelForMaskedLM if case.family == "bert" else transformers.AutoModelForCausalLM
        model = in_order(auto.from_config(config, dtype=dtype, attn_implementation="eager")).train()
        if hasattr(config, "linear_num_value_heads"):
            delta_kernels.install(model)
        if case.liger:
            patches = triton_functions.kept("liger_kernel", "transformers.monkey_patch")
            patches._apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=case.liger == "all")
        if case.recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if case.lora:
            peft: Any = import_module("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=case.lora.split(",")))
        for tensor in (*model.parameters(), *model.buffers()):
            follow.adopt(tensor, "state")
        ids = torch.randint(0, config.vocab_size, (2, 32))
        parameters: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
        shapes = [list(parameter.shape) for parameter in model.parameters()]
        if case.groups == "decay":
            parameters = [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
            ]
        chosen: dict[str, Any] = {"model_parameters": parameters}
        if not case.fused:
            chosen = {"optimizer": optimizer_of(case.optimizer, parameters)}
        own = model.get_base_model() if case.lora else model

        def loss_of(engine: Any) -> Any:
            return engine(input_ids=ids, labels=ids).loss

        if case.trainer:
            loss_of, kept = trl_loss(case, model, own, ids)
            for tensor in kept:
                follow.adopt(tensor, "state")
        given = len(trace.changes)
        engine, *_ = deepspeed.initialize(model=model, config=configuration(case), **chosen)
        built = len(trace.changes)
        del chosen, parameters
        for iteration in range(4):
            for microbatch in range(case.microbatches):
                last = iteration == 3
                if last:
                    mark(f"{microbatch}/forward")
                loss = loss_of(engine)
                if last:
                    mark(f"{microbatch}/backward")
                engine.backward(loss)
                del loss
                if last:
                    mark(f"{microbatch}/step")
                engine.step()
        mark("end")
    changes = [(change.sign, change.bytes) for change in trace.changes]
    order = list(places.items())
    phases = {name: summary(changes[at : after[1][0]]) for (name, (at, _)), after in pairwise(order)}
    building = list(accumulate((sign * size for sign, size in changes[: places["0/forward"][0]]), initial=0))
    begin, static = places["0/forward"]
    live = peak = static
    for sign, size in changes[begin : places["end"][0]]:
        live += sign * size
        peak = max(peak, live)
    return {
        "static": static,
        "initialise": {"before": building[given], "peak": max(building[given : built + 1])},
        "peak": peak,
        "shapes": shapes,
        "phases": phases,
        "optimizer": type(engine.optimizer).__name__,
    }


def trl_loss(case: Case, model: Any, own: Any, ids: Any) -> tuple[Any, list[Any]]:
    """What trl computes with an engine, and tensors that are kept for it: the reference is an engine, too."""
    import torch
    import transformers

    from . import trl_step

    add_head = trl_step.fused()
    models: Any = import_module("trl.models.utils")
    config = configuration(case)
    alive = transformers.integrations.HfDeepSpeedConfig(config)
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=config))
    ones = torch.ones_like(ids)
    reference = None
    if case.trainer == "grpo":
        add_head(own, outputs=("log_probs", "entropy"))
        loss, inputs = trl_step.grouped(model, *ids.shape, COMPLETION)
        return lambda engine, alive=alive: loss(engine, inputs), [*inputs.values()]
    if not case.lora:
        reference = type(own)(own.config).to(own.dtype).eval()
        add_head(reference)
        reference = models.prepare_deepspeed(reference, SimpleNamespace(state=state))
    add_head(own, outputs=tuple(trl_step.OUTPUTS))
    loss = trl_step.paired(model, reference, precomputed=False)
    inputs = {"input_ids": ids, "attention_mask": ones, "completion_mask": ones.clone()}
    return lambda engine, alive=alive: loss(engine, inputs), [*inputs.values()]


def main(arguments: Sequence[str]) -> None:
    every = CASES | LEARNED
    if len(arguments) == 2 and arguments[0] in every:
        Path(arguments[1]).write_text(json.dumps(run_rank(every[arguments[0]])))
        return
    records = {name: measure(name) for name in (arguments[1:] or CASES)}
    found = {"deepspeed": importlib.metadata.version("deepspeed"), "cases": records}
    Path(arguments[0]).write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
