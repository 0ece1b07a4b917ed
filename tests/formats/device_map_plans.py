"""Plans of framework device-map."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from memplan.plan.module_names import modules
from memplan.plan.plan import Plan

from .plans import chosen, made, names, spec

TINY: dict[str, str] = {
    "gpt2": "gpt2",
    "gpt": "megatron-22b",
    "bert": "bert-large",
    "llama": "llama-3-8b",
    "mistral": "mistral-7b",
    "qwen3": "qwen3-8b",
    "qwen2": "qwen2.5-7b",
    "phi3": "phi-3-mini",
    "gemma": "gemma-2b",
    "gemma2": "gemma-2-9b",
    "opt": "opt-6.7b",
    "gpt_neox": "gpt-neox-20b",
    "gptj": "gpt-j-6b",
    "falcon": "falcon-7b",
    "mixtral": "mixtral-8x7b",
    "qwen2_moe": "qwen1.5-moe-a2.7b",
    "qwen3_moe": "qwen3-30b-a3b",
    "gpt_oss": "gpt-oss-20b",
    "olmoe": "olmoe-1b-7b",
    "granitemoe": "granite-3.0-1b-a400m",
    "deepseek_v2": "deepseek-v2-lite",
    "deepseek_v3": "deepseek-v3",
    "glm": "glm-4-9b-chat",
    "glm4": "glm-4-32b-0414",
    "glm4_moe": "glm-4.5-air",
    "dots1": "dots.llm1",
    "ernie4_5": "ernie-4.5-0.3b",
    "deepseek_v32": "deepseek-v3.2",
    "glm4_moe_lite": "glm-4.7-flash",
    "minimax_m2": "minimax-m2",
    "ministral3": "ministral-3-8b",
    "gemma3_text": "gemma-3-4b",
    "gemma4_text": "gemma-4-31b",
    "gemma4_unified_text": "gemma-4-31b",
    "exaone4": "exaone-4.0-32b",
    "olmo3": "olmo-3-7b",
    "starcoder2": "starcoder2-3b",
    "olmo2": "olmo-2-7b",
    "smollm3": "smollm3-3b",
    "seed_oss": "seed-oss-36b",
    "cohere": "command-r",
    "cohere2": "command-r7b",
    "granite": "granite-3.0-2b",
    "granitemoehybrid": "granite-4.0-micro",
    "qwen3_next": "qwen3-next-80b-a3b",
    "qwen3_5": "qwen3.5-9b",
    "qwen3_5_moe": "qwen3.5-35b-a3b",
    "gpt_bigcode": "santacoder",
    "llama4_text": "llama-4-scout",
}
"""A built-in model of each family."""


def tiny(family: str, layers: int, **changes: Any) -> dict[str, Any]:
    """A small model of ``family``."""
    kv_heads = 4 if family not in ("llama", "mistral", "qwen3", "qwen2", "gemma2", "falcon") else 2
    kv_heads = 1 if family in ("falcon", "gpt_bigcode") else kv_heads
    sizes = {"hidden": 64, "heads": 4, "kv_heads": kv_heads, "head_dim": 16, "ffn": 176, "vocab": 1003}
    if family == "gemma4_unified_text":
        sizes["family"] = family  # no model of its own is built in
    if family in ("gemma4_text", "gemma4_unified_text"):
        sizes["full_interval"] = layers  # its last layer sees all tokens
    if spec(TINY[family]).get("latent_kv_rank"):
        sizes |= {"head_dim": 48, "nope_head_dim": 32, "rope_head_dim": 16, "value_head_dim": 24}
        sizes |= {"latent_kv_rank": 40, "shared_expert_ffn": 96, "expert_ffn": 96, "experts": 16}
    return spec(TINY[family], **{"layers": layers, **sizes, "positions_max": 128, **changes})


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    family, layers = draw(st.sampled_from(sorted(modules().keys() & TINY.keys()))), draw(st.integers(1, 9))
    devices = draw(st.integers(1, layers))
    where = draw(st.lists(st.integers(0, devices - 1), min_size=layers, max_size=layers))
    where[:devices] = range(devices)
    placed = {device: [at for at, one in enumerate(where) if one == device] for device in range(devices)}
    tied = draw(st.booleans()) if family not in ("gptj", "gemma2") else family == "gemma2"
    return made(
        model=tiny(family, layers, name=draw(names), tied_embeddings=tied),
        framework="device-map",
        hardware=draw(chosen({"gpu": st.just("v100-16gb"), "gpus": st.integers(devices, 12)})),
        batch=draw(
            chosen(
                {
                    "mbs": st.integers(1, 3),
                    "seq": st.sampled_from([1, 7, 64]),
                    "accumulation": st.integers(1, 3),
                    "multiply_by_visible_gpus": st.booleans(),
                }
            )
        ),
        precision={"dtype": draw(st.sampled_from(["fp32", "bf16", "fp16"])), "autocast": draw(st.booleans())},
        optimizer=draw(
            chosen(
                {
                    "name": st.sampled_from(["adamw", "sgd", "adam8bit"]),
                    "weight_decay": st.sampled_from([0.0, 0.1]),
                    "momentum": st.sampled_from([0.0, 0.9]),
                }
            )
        ),
        recompute={"mode": draw(st.sampled_from(["none", "full"]))},
        lora=draw(chosen({"rank": st.sampled_from([1, 16])})),
        trainer=draw(chosen({"loop": st.just("transformers")})),
        environment=draw(chosen({"PYTORCH_CUDA_ALLOC_CONF": st.just("expandable_segments:True")})),
        device_map=draw(st.sampled_from([None, placed])),
        headroom=draw(st.sampled_from(["0", "5%"])),
    )
