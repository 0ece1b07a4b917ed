"""Recipes against the code that they describe: every event of a training step of real transformers models.

The trace and the tapes are equal event by event, size by size, but for differences that have a name:

* token ids and labels are two tensors in a plan and one in the trace;
* the loss and its gradient (512 B each) live in the caller's variables, and end with the head in a plan;
* the two gradients of a tied weight are summed in place on a GPU, out of place on fake tensors;
* where several tensors end at once, with nothing held in between, their order is that of a frame's variables
  in one and of a module's list in the other. Within a layer the order is compared, too, but of gated delta nets, whose
  kernels are stand-ins, or run without, transformers' own operators: variables of two functions end there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import pytest
import transformers

from memplan.families import family as family_of
from memplan.frameworks.plain import programs as plain
from memplan.layers.module import Module, Options
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Drop, Hold, Tape, rounded
from memplan.tape.program import Program, fold_program

from ..oracle.tracer import Change
from ..oracle.training_step import Step, traced_step

LAYERS, VOCAB = 3, 1003
GPT2 = {"vocab_size": VOCAB, "n_layer": LAYERS, "n_head": 3, "n_embd": 96, "n_inner": 320, "n_positions": 160}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
BERT = {
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 3,
    "hidden_size": 96,
    "intermediate_size": 320,
    "max_position_embeddings": 160,
}
LLAMA = {**BERT, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 48, "hidden_size": 192}
LLAMA |= {"intermediate_size": 448}
PHI3 = {**LLAMA, "head_dim": 32, "pad_token_id": 0, "eos_token_id": 0}
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
WHOLE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}
GLM = {**LLAMA, "head_dim": 32, "pad_token_id": 0, "eos_token_id": 0}
GEMMA2 = {**LLAMA, "sliding_window": 40}
UNCAPPED: dict[str, Any] = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True}
UNCAPPED |= {"attention_dropout": 0.1, "num_key_value_heads": 6, "tie_word_embeddings": False}
GEMMA3 = {**LLAMA, "sliding_window": 160, "sliding_window_pattern": 3}
WINDOWED = UNCAPPED | {"final_logit_softcapping": 30.0, "sliding_window_pattern": 6}
GEMMA4: dict[str, Any] = {**LLAMA, "sliding_window": 160, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
GEMMA4 |= {"global_head_dim": 272, "hidden_size_per_layer_input": 0}
MIXED: dict[str, Any] = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 80}
EXAONE4 = {**LLAMA, "sliding_window": 160, "sliding_window_pattern": 2, "bos_token_id": 0, "eos_token_id": 0}
OLMO3 = {**LLAMA, "sliding_window": 160, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
STARCODER2 = {**LLAMA, "sliding_window": 160}
SMOLLM3 = {**LLAMA, "no_rope_layer_interval": 2, "pad_token_id": 0}
SEED_OSS = {**LLAMA, "attention_dropout": 0.0}
COHERE = {name: value for name, value in LLAMA.items() if name != "head_dim"}
COHERE2 = {**COHERE, "sliding_window": 160, "sliding_window_pattern": 2}
NO_WINDOW: dict[str, Any] = {
    "sliding_window": None,
    "layer_types": ["full_attention"] * LAYERS,
    "num_key_value_heads": 6,
    "tie_word_embeddings": True,
}
OPT = {name: value for name, value in BERT.items() if name != "intermediate_size"} | {"ffn_dim": 320, "dropout": 0.0}
NEOX = {**BERT, "num_attention_heads": 3}
GPTJ = {**GPT2, "rotary_dim": 16}
TIED = {"tie_word_embeddings": True}
MIXTRAL = {**LLAMA, "num_local_experts": 4, "sliding_window": None}
QWEN3_MOE: dict[str, Any] = {**LLAMA, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 80}
MINIMAX = {**MIXTRAL, "num_experts_per_tok": 3, "bos_token_id": 0, "eos_token_id": 0}
OLMOE = {**QWEN3_MOE, "num_key_value_heads": 3, "head_dim": 32, "norm_topk_prob": False}
SCALES = {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 8.0}
GRANITE_MOE = {**MIXTRAL, **SCALES, **TIED}
GRANITE_4 = {**LLAMA, **SCALES, "head_dim": 32, "num_local_experts": 0, "shared_intermediate_size": 448}
GRANITE_4 |= {"position_embedding_type": "rope", "layer_types": ["full_attention"] * LAYERS}
DEEPSEEK: dict[str, Any] = {**BERT, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 448}
DEEPSEEK |= {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 80, "n_shared_experts": 2}
DEEPSEEK |= {"kv_lora_rank": 40, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24, "q_lora_rank": None}
DEEPSEEK |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
GROUPS = {"n_group": 4, "topk_group": 2, "q_lora_rank": 56, "topk_method": "group_limited_greedy"}
INDEXED = DEEPSEEK | {"q_lora_rank": 56, "index_n_heads": 3, "index_head_dim": 24, "index_topk": 20}
GLM4_MOE: dict[str, Any] = {**LLAMA, "head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 3}
GLM4_MOE |= {"moe_intermediate_size": 80, "n_shared_experts": 2, "first_k_dense_replace": 1, "use_qk_norm": True}
DOTS1: dict[str, Any] = {**GLM4_MOE, "norm_topk_prob": True}
GPT_OSS = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 40}
LLAMA4: dict[str, Any] = {**LLAMA, "intermediate_size": 80, "intermediate_size_mlp": 448, "num_local_experts": 4}
LLAMA4 |= {"num_experts_per_tok": 1, "no_rope_layer_interval": 2, "attention_chunk_size": 160}
DELTA: dict[str, Any] = {**LLAMA, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
DELTA |= {"linear_value_head_dim": 24, "full_attention_interval": 3, "head_dim": 32}
OF_EACH: dict[str, Any] = {"full_attention_interval": 2, "num_key_value_heads": 6, "linear_num_key_heads": 4}
OF_EACH |= {"attention_bias": True, "attention_dropout": 0.1}
OPENED: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 80}
OPENED |= {"shared_expert_intermediate_size": 112}
QWEN2_MOE: dict[str, Any] = {**LLAMA, **OPENED, "head_dim": 32}
FALCON = {**BERT, "ffn_hidden_size": 320, "bos_token_id": 0, "eos_token_id": 0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2),
    "gpt2-untied": ("gpt2", GPT2 | {"tie_word_embeddings": False, "activation_function": "gelu"}),
    "gpt_bigcode": ("gpt_bigcode", GPT2),
    "gpt_bigcode-untied-fast": ("gpt_bigcode", GPT2 | {"tie_word_embeddings": False, "attn_pdrop": 0.0}),
    "bert": ("bert", BERT),
    "llama": ("llama", LLAMA),
    "llama-mha-biased": ("llama", LLAMA | {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True}),
    "llama-tied-dropout": ("llama", LLAMA | {"tie_word_embeddings": True, "attention_dropout": 0.1}),
    "mistral": ("mistral", LLAMA | {"sliding_window": 160}),
    "mistral-no-window": ("mistral", LLAMA | {"sliding_window": None, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", LLAMA),
    "qwen3-tied": ("qwen3", LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "qwen2": ("qwen2", LLAMA),
    "qwen2-tied-dropout": ("qwen2", LLAMA | {"tie_word_embeddings": True, "attention_dropout": 0.1}),
    "phi3": ("phi3", PHI3),
    "phi3-partial-dropout": ("phi3", PHI3 | {"num_key_value_heads": 6, "resid_pdrop": 0.1, **PARTIAL}),
    "gemma": ("gemma", LLAMA),
    "gemma-biased-untied-dropout": (
        "gemma",
        LLAMA
        | {"attention_bias": True, "attention_dropout": 0.1, "num_key_value_heads": 6, "tie_word_embeddings": False},
    ),
    "gemma-one-key": ("gemma", LLAMA | {"num_key_value_heads": 1}),
    "gemma2": ("gemma2", GEMMA2),
    "gemma2-uncapped-biased-dropout": ("gemma2", GEMMA2 | UNCAPPED),
    "gemma3_text": ("gemma3_text", GEMMA3),
    "gemma3_text-all-windowed-biased-dropout": ("gemma3_text", GEMMA3 | WINDOWED | {"attention_dropout": 0.1}),
    "exaone4": ("exaone4", EXAONE4),
    "exaone4-no-window-tied-dropout": ("exaone4", EXAONE4 | NO_WINDOW | {"attention_dropout": 0.1}),
    "exaone4-one-key": ("exaone4", EXAONE4 | {"num_key_value_heads": 1}),
    "exaone4-six-keys": ("exaone4", EXAONE4 | {"num_key_value_heads": 6}),
    "olmo3": ("olmo3", OLMO3),
    "olmo3-all-windowed-biased-dropout": (
        "olmo3",
        OLMO3
        | {"layer_types": ["sliding_attention"] * LAYERS, "attention_bias": True, "attention_dropout": 0.1}
        | {"num_key_value_heads": 6, "tie_word_embeddings": True},
    ),
    "olmo3-one-key": ("olmo3", OLMO3 | {"num_key_value_heads": 1}),
    "olmo2": ("olmo2", LLAMA),
    "olmo2-biased-tied-dropout": (
        "olmo2",
        LLAMA
        | {"attention_bias": True, "attention_dropout": 0.1, "num_key_value_heads": 6, "tie_word_embeddings": True},
    ),
    "olmo2-one-key": ("olmo2", LLAMA | {"num_key_value_heads": 1}),
    "smollm3": ("smollm3", SMOLLM3),
    "smollm3-biased-untied-dropout": (
        "smollm3",
        SMOLLM3
        | {"attention_bias": True, "mlp_bias": True, "attention_dropout": 0.1, "num_key_value_heads": 6}
        | {"tie_word_embeddings": False, "no_rope_layer_interval": 3},
    ),
    "smollm3-one-key": ("smollm3", SMOLLM3 | {"num_key_value_heads": 1}),
    "seed_oss": ("seed_oss", SEED_OSS),
    "seed_oss-unbiased-tied-undropped": (
        "seed_oss",
        SEED_OSS
        | {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "residual_dropout": 0.0}
        | {"attention_dropout": 0.1, "num_key_value_heads": 6, "tie_word_embeddings": True},
    ),
    "seed_oss-one-key": ("seed_oss", SEED_OSS | {"num_key_value_heads": 1}),
    "cohere": ("cohere", COHERE),
    "cohere-normed-biased-untied-dropout": (
        "cohere",
        LLAMA
        | {"use_qk_norm": True, "attention_bias": True, "attention_dropout": 0.1, "num_key_value_heads": 6}
        | {"tie_word_embeddings": False},
    ),
    "cohere-normed": ("cohere", LLAMA | {"use_qk_norm": True}),
    "cohere-normed-one-key": ("cohere", LLAMA | {"use_qk_norm": True, "num_key_value_heads": 1}),
    "cohere2": ("cohere2", COHERE2),
    "cohere2-biased-untied-dropout": (
        "cohere2",
        COHERE2
        | {"attention_bias": True, "attention_dropout": 0.1, "num_key_value_heads": 6, "tie_word_embeddings": False}
        | {"sliding_window_pattern": 4},
    ),
    "cohere2-one-key": ("cohere2", COHERE2 | {"num_key_value_heads": 1}),
    "gemma3_text-one-key": ("gemma3_text", GEMMA3 | {"num_key_value_heads": 1}),
    "opt": ("opt", OPT),
    "opt-dropout": ("opt", OPT | {"dropout": 0.1, "attention_dropout": 0.1, "tie_word_embeddings": False}),
    "gpt_neox": ("gpt_neox", NEOX),
    "gpt_neox-dropout": (
        "gpt_neox",
        NEOX | {"hidden_act": "gelu_fast", "hidden_dropout": 0.1, "attention_dropout": 0.1},
    ),
    "gpt_neox-sequential-tied": ("gpt_neox", NEOX | {"use_parallel_residual": False, "tie_word_embeddings": True}),
    "gptj": ("gptj", GPTJ),
    "gptj-dropout-tied": ("gptj", GPTJ | {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1, **TIED}),
    "falcon": ("falcon", FALCON),
    "mixtral": ("mixtral", MIXTRAL),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE | {"norm_topk_prob": True}),
    "qwen3_moe-unnormed-tied-dense": (
        "qwen3_moe",
        QWEN3_MOE | {"mlp_only_layers": [1], "attention_dropout": 0.1, **TIED},
    ),
    "qwen2_moe": ("qwen2_moe", QWEN2_MOE),
    "qwen2_moe-normed-unbiased-tied-dense-dropout": (
        "qwen2_moe",
        QWEN2_MOE
        | {"norm_topk_prob": True, "qkv_bias": False, "decoder_sparse_step": 2, "attention_dropout": 0.1}
        | {"num_key_value_heads": 6, **TIED},
    ),
    "qwen2_moe-one-key": ("qwen2_moe", QWEN2_MOE | {"mlp_only_layers": [1], "num_key_value_heads": 1}),
    "olmoe": ("olmoe", OLMOE),
    "granite": ("granite", LLAMA | SCALES | {"head_dim": 32}),
    "granite-dropout-biased": (
        "granite",
        LLAMA | SCALES | TIED | {"head_dim": 32, "attention_dropout": 0.1, "attention_bias": True, "mlp_bias": True},
    ),
    "granitemoe": ("granitemoe", GRANITE_MOE),
    "granitemoehybrid": ("granitemoehybrid", GRANITE_4),
    "granitemoehybrid-biased-dropout-tied": (
        "granitemoehybrid",
        GRANITE_4 | {"attention_bias": True, "attention_dropout": 0.1, "num_key_value_heads": 6, **TIED},
    ),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "falcon-dropout-untied": ("falcon", FALCON | {"hidden_dropout": 0.1, "tie_word_embeddings": False}),
    "deepseek_v2": ("deepseek_v2", DEEPSEEK | GROUPS),
    "deepseek_v2-lite": ("deepseek_v2", DEEPSEEK),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK | GROUPS),
    "deepseek_v32": ("deepseek_v32", INDEXED),
    "deepseek_v32-one-width-groups-dropout": (
        "deepseek_v32",
        INDEXED | {"v_head_dim": 48, "n_group": 4, "topk_group": 2, "attention_dropout": 0.1, **TIED},
    ),
    "glm": ("glm", GLM),
    "glm-whole-unbiased-tied-dropout": (
        "glm",
        GLM | WHOLE | TIED | {"num_key_value_heads": 6, "attention_dropout": 0.1, "attention_bias": False},
    ),
    "glm-one-key": ("glm", GLM | {"num_key_value_heads": 1}),
    "glm4": ("glm4", GLM),
    "glm4-whole-unbiased-tied-dropout": (
        "glm4",
        GLM | WHOLE | TIED | {"attention_dropout": 0.1, "attention_bias": False, "num_key_value_heads": 6},
    ),
    "glm4-one-key": ("glm4", GLM | {"num_key_value_heads": 1}),
    "glm4_moe": ("glm4_moe", GLM4_MOE),
    "ernie4_5": ("ernie4_5", LLAMA),
    "ernie4_5-biased-untied": (
        "ernie4_5",
        LLAMA | {"use_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 6},
    ),
    "ernie4_5-one-key": ("ernie4_5", LLAMA | {"num_key_value_heads": 1}),
    "dots1": ("dots1", DOTS1),
    "dots1-biased-groups-tied-dropout": (
        "dots1",
        DOTS1
        | {"attention_bias": True, "attention_dropout": 0.1, "num_key_value_heads": 6, "n_group": 4, "topk_group": 2}
        | {"first_k_dense_replace": 2, **TIED},
    ),
    "dots1-one-key": ("dots1", DOTS1 | {"num_key_value_heads": 1, "n_shared_experts": 1}),
    "glm4_moe_lite": ("glm4_moe_lite", {**DEEPSEEK, "q_lora_rank": 56}),
    "glm4_moe_lite-one-width": ("glm4_moe_lite", {**DEEPSEEK, "v_head_dim": 48}),
    "glm4_moe_lite-groups-dropout": ("glm4_moe_lite", DEEPSEEK | GROUPS | {"attention_dropout": 0.1}),
    "minimax_m2": ("minimax_m2", MINIMAX | PARTIAL),
    "minimax_m2-whole-tied-dropout": ("minimax_m2", MINIMAX | TIED | {"attention_dropout": 0.1}),
    "ministral3": ("ministral3", LLAMA),
    "ministral3-window-tied": ("ministral3", LLAMA | TIED | {"sliding_window": 160, "num_key_value_heads": 6}),
    "glm4_moe-air-groups": (
        "glm4_moe",
        GLM4_MOE | {"use_qk_norm": False, "attention_bias": True, "n_group": 4, "topk_group": 2, "n_shared_experts": 1},
    ),
    "llama4_text": ("llama4_text", LLAMA4),
    "llama4_text-dense-unnormed-dropout": (
        "llama4_text",
        LLAMA4
        | {"interleave_moe_layer_step": 2, "use_qk_norm": False, "attention_dropout": 0.1, "head_dim": 32}
        | {"no_rope_layer_interval": 3, "num_key_value_heads": 6, **TIED},
    ),
    "llama4_text-biased": (
        "llama4_text",
        LLAMA4 | {"moe_layers": [0], "attention_bias": True, "num_experts_per_tok": 2, "num_key_value_heads": 1},
    ),
    "qwen3_5": ("qwen3_5", DELTA),
    "qwen3_5-mha-biased-tied": ("qwen3_5", DELTA | TIED | OF_EACH),
    "qwen3_5-one-key": ("qwen3_5", DELTA | {"num_key_value_heads": 1, "linear_num_key_heads": 1, **PARTIAL}),
    "qwen3_5_moe": ("qwen3_5_moe", DELTA | OPENED),
    "qwen3_next": ("qwen3_next", DELTA | OPENED),
    "qwen3_next-unnormed-dense-tied": (
        "qwen3_next",
        DELTA | OPENED | TIED | OF_EACH | {"norm_topk_prob": False, "mlp_only_layers": [1]},
    ),
    "qwen3_next-one-key": ("qwen3_next", DELTA | OPENED | {"linear_num_key_heads": 1, "num_key_value_heads": 1}),
    "deepseek_v3-moonlight-dropout": ("deepseek_v3", DEEPSEEK | {"attention_dropout": 0.1}),
    "starcoder2": ("starcoder2", STARCODER2),
    "starcoder2-dropout-untied-unbiased": (
        "starcoder2",
        STARCODER2
        | {"residual_dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.1, "num_key_value_heads": 6}
        | {"tie_word_embeddings": False, "use_bias": False, "sliding_window": None, "hidden_act": "gelu_new"},
    ),
    "starcoder2-one-key": ("starcoder2", STARCODER2 | {"num_key_value_heads": 1, "residual_dropout": 0.1}),
    "gemma4_text": ("gemma4_text", GEMMA4),
    "gemma4_text-keys-as-values": (
        "gemma4_text",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 30.0},
    ),
    "gemma4_text-biased-untied-dropout": (
        "gemma4_text",
        GEMMA4
        | {"attention_bias": True, "attention_dropout": 0.1, "num_key_value_heads": 6, "tie_word_embeddings": False}
        | {"global_head_dim": 32},
    ),
    "gemma4_text-one-key": ("gemma4_text", GEMMA4 | {"num_key_value_heads": 1, "attention_k_eq_v": True}),
    "gemma4_unified_text": ("gemma4_unified_text", GEMMA4),
    "gemma4_text-experts": ("gemma4_text", GEMMA4 | MIXED | {"attention_k_eq_v": True}),
    "gemma4_text-experts-untied": (
        "gemma4_text",
        GEMMA4 | MIXED | {"attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 6},
    ),
}
MASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral-masked": ("mistral", LLAMA | {"sliding_window": 37}),
    "mixtral-masked-one-key": ("mixtral", MIXTRAL | {"sliding_window": 30, "num_key_value_heads": 1}),
    "phi3-masked-dropout": ("phi3", PHI3 | {"sliding_window": 30, "attention_dropout": 0.1}),
    "ministral3-masked-six-keys": ("ministral3", LLAMA | {"sliding_window": 30, "num_key_value_heads": 6}),
    "gemma3_text-masked": ("gemma3_text", GEMMA3 | {"sliding_window": 30, "head_dim": 32}),
    "cohere2-masked": ("cohere2", COHERE2 | {"sliding_window": 30}),
    "exaone4-masked": ("exaone4", EXAONE4 | {"sliding_window": 30}),
    "olmo3-masked": ("olmo3", OLMO3 | {"sliding_window": 30}),
    "starcoder2-masked-dropout": (
        "starcoder2",
        STARCODER2
        | {"sliding_window": 30, "attention_dropout": 0.1, "residual_dropout": 0.1, "embedding_dropout": 0.1},
    ),
    "gemma4_text-masked": ("gemma4_text", GEMMA4 | {"sliding_window": 30}),
    "gemma4_text-masked-keys-as-values": (
        "gemma4_text",
        GEMMA4 | {"sliding_window": 30, "attention_k_eq_v": True, "num_global_key_value_heads": 3},
    ),
}
"""With a sliding window that is no longer than the sequence, where sdpa is handed a mask; of Gemma 3, EXAONE 4 and
OLMo 3 some layers have none."""
EVERY = MODELS | MASKED
SHAPES = ((1, 64), (2, 128), (3, 37))
MODES = (("fp32", "eager"), ("bf16", "eager"), ("bf16", "flash"), ("fp32", "flash"))


@dataclass(frozen=True)
class Case:
    """One model in one setting; ``b`` sequences of ``s`` tokens."""

    model: str
    b: int
    s: int
    dtype: str
    attention: str
    recompute: str
    labels: int = 0
    padded: bool = False
    eager: bool = False
    """Gated delta nets run transformers' own operators, without flash-linear-attention and causal-conv1d."""

    @property
    def flags(self) -> dict[str, str]:
        """Which of the two a plan is told."""
        linear = "linear_num_value_heads" in EVERY[self.model][1]
        return {"delta-kernel": "eager" if self.eager else "fla"} if linear else {}

    def __str__(self) -> str:
        classifies = (
            f"-labels-{self.labels}" if self.labels else "-padded" if self.padded else "-own" if self.eager else ""
        )
        return f"{self.model}-{self.b}x{self.s}-{self.dtype}-{self.attention}-recompute-{self.recompute}{classifies}"


DROPS_SCORES = {
    "llama-tied-dropout", "qwen2-tied-dropout", "granite-dropout-biased", "qwen3_moe-unnormed-tied-dense",
    "gpt_bigcode", "gpt_bigcode-untied-fast", "minimax_m2-whole-tied-dropout",
}  # fmt: skip
"""With fewer heads of keys: ``_scaled_dot_product_attention_math``'s dropout is several operators on a CPU."""
SETTINGS = tuple((*mode, recompute) for recompute in ("none", "full") for mode in MODES)
IN_EVERY_SHAPE = tuple(name for name, (family, _) in MODELS.items() if name == family)


def cases(in_every_shape: Sequence[str]) -> list[Case]:
    """Every model in every setting that its family has; shapes in turn but for some models."""
    return [
        Case(model, *shape, *setting)
        for at_model, model in enumerate(MODELS)
        for at_setting, setting in enumerate(SETTINGS)
        for at_shape, shape in enumerate(SHAPES)
        if model in in_every_shape or (at_model + at_setting + at_setting // 3) % 3 == at_shape
        if setting[1] == "eager" or not family_of(MODELS[model][0]).no_flash
        if setting[2] == "none" or not family_of(MODELS[model][0]).returns_weights
        if setting[:2] != ("fp32", "flash") or model not in DROPS_SCORES
    ]


CLASSIFIERS = [
    Case(model, *shape, *setting, labels)
    for model in IN_EVERY_SHAPE
    if family_of(MODELS[model][0]).classifies and family_of(MODELS[model][0]).mixture is None
    for shape, setting, labels in (
        (SHAPES[0], ("bf16", "eager", "none"), 2),
        (SHAPES[1], ("fp32", "eager", "none"), 1),
        (SHAPES[2], ("bf16", "flash", "full"), 5),
    )
    if setting[1] == "eager" or not family_of(MODELS[model][0]).no_flash
]
"""Models for sequence classification: a cross entropy over labels, or of one score a squared error."""
WITH_MASKS = [
    Case(model, *shape, dtype, "flash", recompute)
    for model in MASKED
    for shape in SHAPES
    for dtype in ("bf16", "fp32")
    for recompute in ("none", "full")
]
SEVERAL = ((2, 64), *SHAPES[1:])
PADDED = [
    Case(model, *shape, *setting, padded=True)
    for at, model in enumerate(model for model, (kind, _) in EVERY.items() if family_of(kind).padded)
    for shape, setting in zip(
        (*SEVERAL[at % 3 :], *SEVERAL[: at % 3]),
        (("bf16", "flash", "none"), ("fp32", "flash", "full"), ("bf16", "eager", "none")),
        strict=True,
    )
    if setting[1] == "eager" or not family_of(EVERY[model][0]).no_flash
]
"""Batches with padding, whose masks are in every layer, of all families that are modelled with it."""
LINEAR = tuple(name for name, (_, settings) in MODELS.items() if "linear_num_value_heads" in settings)
OWN = [
    Case(model, *(*SHAPES, (1, 100))[(at + turn) % 4], "bf16", attention, recompute, eager=True)
    for at, model in enumerate(LINEAR)
    for turn, (attention, recompute) in enumerate(
        (("flash", "none"), ("eager", "full"), ("flash", "full"), ("eager", "none"))
    )
]
"""Gated delta nets without their packages, in every shape with one chunk or several, whole or padded."""
CASES = [*cases(IN_EVERY_SHAPE), *CLASSIFIERS, *WITH_MASKS, *PADDED, *OWN]
IN_EACH_SHAPE = ("gpt2", "llama")
EACH_TIME: frozenset[Case] = frozenset(
    case
    for case in cases(IN_EACH_SHAPE)
    if case.model in IN_EACH_SHAPE
    or (case.recompute == "full")
    == bool((list(MODELS).index(case.model) + MODES.index((case.dtype, case.attention))) % 2)
    or family_of(MODELS[case.model][0]).returns_weights
)
EACH_TIME |= {case for at, case in enumerate(OWN) if at % 5 == 0}
EACH_TIME |= {case for case in CLASSIFIERS if case.model in ("llama", "bert")}
EACH_TIME |= {case for at, case in enumerate(WITH_MASKS) if at % 12 in (0, 9)}
OFTEN_PADDED = ("gpt2", "llama", "mistral-masked", "qwen3", "phi3", "gemma3_text")
EACH_TIME |= {
    case for case in PADDED if case.model in OFTEN_PADDED and case.dtype == "bf16" and case.attention == "flash"
}
"""Two models in everything; of the others every mode once, with recompute and without it in turn. The rest is slow:
other shapes and the other half of recompute, in which models differ by nothing of their own."""


@dataclass(frozen=True)
class Event:
    """A hold (+1) or drop (−1) of a tape, and whose it is."""

    sign: int
    bytes: int
    module: Module
    name: str


@dataclass(frozen=True)
class Compared:
    """A step as the plan tells it and as it was traced."""

    program: Program
    step: Step
    ids: int
    """Bytes of the labels, or of a classifier's attention mask and token types, which the trace does not hold."""
    linear: bool = False
    """The middle layer has a gated delta net."""

    def events(self, backward: bool) -> list[Event]:
        spans = reversed(self.program.spans) if backward else self.program.spans
        modules = [span.module for span in spans for _ in span.names]
        return [
            event
            for module in modules
            for event in named(module, module.first.backward if backward else module.steady.forward)
        ]

    def at_middle_layer(self, backward: bool) -> slice:
        """Where the middle layer is among the events of the plan."""
        spans = [span for span in self.program.spans for _ in span.names]
        middle = [at for at, span in enumerate(spans) if span.names[0].startswith("layer.")][LAYERS // 2]
        before = spans[middle + 1 :] if backward else spans[:middle]
        lengths = [len(without_scalars(own_events(span.module, backward))) for span in (*before, spans[middle])]
        return slice(sum(lengths[:-1]), sum(lengths))


def own_events(module: Module, backward: bool) -> list[Event]:
    return list(named(module, module.first.backward if backward else module.steady.forward))


def named(module: Module, tape: Tape) -> Iterator[Event]:
    names = {event.tensor: event.name for event in (*module.first.forward, *tape) if isinstance(event, Hold)}
    for event in tape:
        if isinstance(event, Hold | Drop):
            name = names.get(event.tensor, "")
            yield Event(1 if isinstance(event, Hold) else -1, event.bytes, module, name)


def config_of(model: str) -> transformers.PreTrainedConfig:
    """The configuration of ``model``, as transformers calls its family."""
    kind, settings = EVERY[model]
    read = family_of(kind).config
    return transformers.AutoConfig.for_model((read and read.model_type) or kind, **settings)


def compared(case: Case, folder: Path, accumulates: bool = False) -> Compared:
    """``case`` planned from its ``config.json``, and traced."""
    config = config_of(case.model)
    config.to_json_file(folder / "config.json", use_diff=False)
    flags = {
        "model": str(folder),
        "framework": "single",
        "dtype": case.dtype,
        "mbs": str(case.b),
        "seq": str(case.s),
        "attention": case.attention,
        "recompute": case.recompute,
        "optimizer": "adamw",
        "labels": str(case.labels),
        "padding": str(case.padded).lower(),
        **case.flags,
    }
    plan = resolve(read_plan(None, flags).plan)
    (program,) = plain.programs(plan, Options(accumulates_in_place=False))
    flash, recompute = case.attention != "eager", case.recompute == "full"
    step = traced_step(
        config,
        case.b,
        case.s,
        case.dtype,
        flash=flash,
        recompute=recompute,
        accumulates=accumulates,
        labels=case.labels,
        padded=case.padded,
        delta_kernels=not case.eager,
    )
    beside = 2 if case.labels and plan.model.token_types else 1
    linear = plan.model.is_linear(LAYERS // 2)
    return Compared(program, step, beside * rounded(8 * case.b * case.s), linear)


# -- differences that have a name -------------------------------------------------------------------


def without_scalars(events: Iterable[Event]) -> list[Event]:
    """The plan's events without the ends of the loss and of its gradient."""
    return [event for event in events if event.sign > 0 or event.name not in ("loss", "grad_loss", "total_loss")]


def without_grad_loss(changes: Iterable[Change]) -> list[Change]:
    """The trace's without the end of the loss's gradient; the loss itself ends after the step."""
    return [change for change in changes if change.sign > 0 or change.op != "aten.ones_like.default"]


def without_sum_of_tied(changes: Sequence[Change], word: tuple[int, ...]) -> list[Change]:
    """The trace's with the sum of a tied weight's gradients taken in place, in the first of them."""
    tables = [change for change in changes if change.sign > 0 and change.shape == word]
    of_leaf = [change.storage for change in tables if change.dtype == tables[-1].dtype]
    if len(of_leaf) < 3:
        return list(changes)
    of_head, _, total = of_leaf
    kept = {(1, total), (-1, of_head)}
    return [change for change in changes if (change.sign, change.storage) not in kept]


def traced_backward(case: Compared, word: tuple[int, ...]) -> list[Change]:
    return without_sum_of_tied(without_grad_loss(case.step.backward), word)


def word_shape(program: Program) -> tuple[int, ...]:
    return next(p.shape for p in program.parameter_tensors() if p.name == "word.weight")


# -- readings ---------------------------------------------------------------------------------------


def sizes(events: Iterable[Event | Change]) -> list[int]:
    return [event.sign * event.bytes for event in events]


def drops_sorted(sizes: Iterable[int]) -> list[int]:
    """Signed sizes with those that end at once in order of size."""
    runs = groupby(sizes, lambda size: size < 0)
    return [size for ended, run in runs for size in (sorted(run) if ended else run)]


def peak(start: int, sizes: Iterable[int]) -> int:
    highest = held = start
    for size in sizes:
        held += size
        highest = max(highest, held)
    return highest


# -- the comparison ---------------------------------------------------------------------------------


@pytest.fixture(
    params=[pytest.param(case, marks=[] if case in EACH_TIME else [pytest.mark.slow]) for case in CASES],
    ids=str,
    scope="module",
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    return compared(request.param, tmp_path_factory.mktemp("model"))


def test_step_of_real_model(case: Compared) -> None:
    """Parameters, what is held and when, and every event of forward and backward."""
    program, step = case.program, case.step
    folded = fold_program(program)
    assert program.parameters() == step.parameters
    assert folded.static == step.before + case.ids
    assert folded.after_forward == step.before + case.ids + sum(sizes(step.forward))

    forward, backward = case.events(False), without_scalars(case.events(True))
    traced = traced_backward(case, word_shape(program))
    assert drops_sorted(sizes(forward)) == drops_sorted(sizes(step.forward))
    assert drops_sorted(sizes(backward)) == drops_sorted(sizes(traced))

    both = sizes(forward + backward)
    assert peak(folded.static, both) == peak(step.before, sizes(step.forward + traced)) + case.ids
    assert folded.backward_peak == peak(folded.static, sizes(forward + case.events(True)))

    after = step.before + sum(sizes(step.forward + step.backward))
    loss = rounded(4)
    assert folded.step_peak == peak(after, sizes(step.optimizer)) + case.ids - loss
    assert after + sum(sizes(step.optimizer)) == step.before


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_gemma_2_by_the_package(recompute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn takes the cap of the scores as a number (``flash_attn_func``'s ``softcap``), and what it is handed and
    keeps is what PyTorch's kernel is and does, which stands here for it; transformers has no sdpa for the family."""
    functions: Any = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    sdpa = functions["sdpa"]
    monkeypatch.setitem(functions, "sdpa", lambda *given, softcap, **named: sdpa(*given, **named))
    monkeypatch.setattr(transformers.Gemma2PreTrainedModel, "_supports_sdpa", True)
    test_step_of_real_model(compared(Case("gemma2", 2, 37, "bf16", "flash_attention_2", recompute), tmp_path))


@pytest.mark.parametrize("model", MODELS)
def test_later_microbatch_of_real_model(model: str, tmp_path: Path) -> None:
    """Backward where gradients are there already: a tied head's waits for the embedding's, and is not dropped."""
    case = compared(Case(model, *SHAPES[0], "fp32", "eager", "none"), tmp_path, accumulates=True)
    program, step = case.program, case.step
    modules = [span.module for span in reversed(program.spans) for _ in span.names]
    backward = without_scalars(event for module in modules for event in named(module, module.steady.backward))
    traced = traced_backward(case, word_shape(program))
    assert sorted(sizes(backward)) == sorted(sizes(traced))
    forward = sizes(step.forward)
    assert peak(0, forward + sizes(backward)) == peak(0, forward + sizes(traced))


def test_middle_layer_of_real_model(case: Compared) -> None:
    """The middle layer's events in their order, and what its forward leaves for backward."""
    program, step = case.program, case.step
    at = case.at_middle_layer(False)
    forward = step.forward[at]
    in_order = drops_sorted if case.linear else list
    assert in_order(sizes(forward)) == in_order(sizes(case.events(False)[at]))
    assert left(forward) == left_by_tape(case.events(False)[at][0].module.steady.forward)

    at = case.at_middle_layer(True)
    backward = traced_backward(case, word_shape(program))
    assert in_order(sizes(backward[at])) == in_order(sizes(without_scalars(case.events(True))[at]))


DTYPES = {"float32": "fp32", "bfloat16": "bf16", "uint64": "int64", "complex64": "fp32"}
"""A complex number is two of fp32."""


def left(changes: Sequence[Change]) -> Counter[tuple[int, str]]:
    """Elements and dtype of what is held at the end and was not at the start."""
    ended = {change.storage for change in changes if change.sign < 0}
    return Counter(
        (prod(change.shape) * (1 + (change.dtype == "complex64")), DTYPES.get(change.dtype, change.dtype))
        for change in changes
        if change.sign > 0 and change.storage not in ended
    )


def left_by_tape(tape: Tape) -> Counter[tuple[int, str]]:
    ended = {event.tensor for event in tape if isinstance(event, Drop)}
    return Counter(
        (prod(event.shape), event.dtype) for event in tape if isinstance(event, Hold) and event.tensor not in ended
    )
