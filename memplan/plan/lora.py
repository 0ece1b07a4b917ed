"""Which linear layers of a model there are, under the names that transformers gives them, and which LoRA targets."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .errors import PlanError
from .plan import Plan

ALL_LINEAR = "all-linear"
"""Every linear layer but the head (peft ``tuners_utils.py``, ``_maybe_include_all_linear_layers``)."""

_LLAMA: Mapping[str, str] = MappingProxyType(
    {
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "attention_output": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
)

_GPT2: Mapping[str, str] = MappingProxyType(
    {"qkv": "attn.c_attn", "attention_output": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
)

LINEAR_LAYERS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gpt2": _GPT2,
        "gpt": _GPT2,
        "bert": MappingProxyType(
            {
                "query": "attention.self.query",
                "key": "attention.self.key",
                "value": "attention.self.value",
                "attention_output": "attention.output.dense",
                "up": "intermediate.dense",
                "down": "output.dense",
                "transform": "cls.predictions.transform.dense",
            }
        ),
        **dict.fromkeys(("llama", "mistral", "qwen3", "qwen2", "gemma2"), _LLAMA),
        "phi3": MappingProxyType(
            {
                "qkv": "self_attn.qkv_proj",
                "attention_output": "self_attn.o_proj",
                "gate_up": "mlp.gate_up_proj",
                "down": "mlp.down_proj",
            }
        ),
        "opt": MappingProxyType(
            {
                "query": "self_attn.q_proj",
                "key": "self_attn.k_proj",
                "value": "self_attn.v_proj",
                "attention_output": "self_attn.out_proj",
                "up": "fc1",
                "down": "fc2",
            }
        ),
        "gpt_neox": MappingProxyType(
            {
                "qkv": "attention.query_key_value",
                "attention_output": "attention.dense",
                "up": "mlp.dense_h_to_4h",
                "down": "mlp.dense_4h_to_h",
            }
        ),
        "gptj": MappingProxyType(
            {
                "query": "attn.q_proj",
                "key": "attn.k_proj",
                "value": "attn.v_proj",
                "attention_output": "attn.out_proj",
                "up": "mlp.fc_in",
                "down": "mlp.fc_out",
            }
        ),
        "falcon": MappingProxyType(
            {
                "qkv": "self_attention.query_key_value",
                "attention_output": "self_attention.dense",
                "up": "mlp.dense_h_to_4h",
                "down": "mlp.dense_4h_to_h",
            }
        ),
    }
)
"""By family: linear layers as the recipes name them, and the ends of their names in transformers."""

DEFAULT_TARGETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gpt2": ("c_attn",),
        "gpt": ("c_attn",),
        "bert": ("query", "value"),
        **dict.fromkeys(("llama", "mistral", "qwen3", "qwen2", "gemma2", "opt", "gptj"), ("q_proj", "v_proj")),
        **dict.fromkeys(("gpt_neox", "falcon"), ("query_key_value",)),
    }
)
"""peft's own by family (``utils/constants.py``, ``TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING``)."""


NOT_ADAPTED = ("lm_head", "embed_tokens", "wte", "wpe", "embed_in", "embed_out", "word_embeddings", "decoder")
"""What targets may name in peft and is not modelled: embeddings and heads."""


def adapted(plan: Plan) -> frozenset[str]:
    """Linear layers that ``lora.targets`` names, as the recipes call them; empty without LoRA.

    A target names the layers whose name it is or ends with behind a dot (peft ``tuners_utils.py``,
    ``check_target_module_exists``).
    """
    if plan.lora.rank is None:
        return frozenset()
    names = LINEAR_LAYERS.get(plan.model.family, {})
    found: set[str] = set()
    targets = plan.lora.targets or ()
    if ALL_LINEAR in targets and len(targets) > 1:
        raise PlanError("lora.targets", list(targets), f"must be {ALL_LINEAR} alone, or names of linear layers")
    for target in targets:
        matched = {part for part, name in names.items() if target == ALL_LINEAR or f".{name}".endswith(f".{target}")}
        if not matched:
            last = dict.fromkeys(name.rpartition(".")[2] for name in names.values())
            named = f"its linear layers are {', '.join(last)}; {ALL_LINEAR} names them all"
            if target in NOT_ADAPTED:
                problem = f"must be a linear layer of a block: adapters on embedding and head are not modelled; {named}"
                raise PlanError("lora.targets", target, problem)
            problem = f"matches nothing in {plan.model.name}; {named}"
            raise PlanError("lora.targets", target, problem, known=(*last, ALL_LINEAR))
        found |= matched
    return frozenset(found)


def adapter_parameters(plan: Plan) -> int:
    """Elements of all adapters: ``r (k + n)`` for a layer with k inputs and n outputs."""
    spec, rank = plan.model, plan.lora.rank or 0
    h, f, heads = spec.hidden, spec.ffn, spec.head_dim
    sizes = {
        "qkv": h + spec.qkv_features,
        "query": h + spec.heads * heads,
        "key": h + spec.kv_heads * heads,
        "value": h + spec.kv_heads * heads,
        "attention_output": spec.heads * heads + h,
        "gate": h + f,
        "up": h + f,
        "gate_up": h + 2 * f,
        "down": f + h,
    }
    targets = adapted(plan)
    of_layer = sum(size for name, size in sizes.items() if name in targets)
    return rank * (spec.layers * of_layer + (2 * h if "transform" in targets else 0))
