"""Plans that several tests time."""

from __future__ import annotations

from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve


def plan(source: str | None = None, /, **flags: object) -> Plan:
    """Resolved, from flags with hyphens for underscores."""
    return resolve(read_plan(source, {name.replace("_", "-"): str(value) for name, value in flags.items()}).plan)


def megatron_22b(**flags: object) -> Plan:
    """The 22B model of arXiv 2205.05198, tables 3 and 4: 8 A100, four sequences at a time."""
    sizes = {"hidden": 6144, "layers": 48, "heads": 64, "kv_heads": 64, "head_dim": 96, "ffn": 24576, "vocab": 51200}
    own = {"framework": "megatron", "transformer_impl": "local", "attention": "eager", "dtype": "fp16", "torch": "1.12"}
    batch = {"gpu": "a100-80gb", "gpus": 8, "tp": 8, "mbs": 4, "gbs": 4, "seq": 2048}
    return plan(None, model="gpt3-175b", **{**sizes, **own, **batch, **flags})


EVERY_FRAMEWORK = {
    "single": {"model": "llama-3-8b", "framework": "single", "gpu": "b200", "seq": 2048},
    "ddp": {"model": "gpt2-xl", "framework": "ddp", "gpu": "a100-80gb", "gpus": 8, "dtype": "bf16"},
    "device-map": {"model": "gpt2-xl", "framework": "device-map", "gpu": "v100-16gb", "gpus": 4, "dtype": "fp32"},
    "megatron": {
        "model": "llama-3-70b",
        "framework": "megatron",
        "gpu": "h100-80gb",
        "gpus": 64,
        "tp": 8,
        "pp": 4,
        "vpp": 5,
        "gbs": 64,
        "sequence_parallel": "true",
        "zero": 1,
    },
    "megatron-deepspeed": {
        "model": "bigscience-104b",
        "framework": "megatron-deepspeed",
        "gpu": "v100-32gb",
        "gpus_per_node": 4,
        "gpus": 256,
        "tp": 4,
        "pp": 32,
        "gbs": 2048,
        "dtype": "fp16",
        "recompute": "full",
        "attention": "eager",
        "zero": 1,
    },
    "deepspeed": {"model": "llama-3-8b", "framework": "deepspeed", "gpu": "a100-80gb", "gpus": 16, "zero": 3},
    "fsdp": {"model": "llama-3-8b", "framework": "fsdp", "gpu": "h100-80gb", "gpus": 16, "seq": 4096},
}
"""A plan of each framework."""
