"""The axes of the space: which values of which fields a framework has."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from ..plan.plan import Plan
from .point import NO_RECOMPUTE, Extra, Recomputing


def parallel_sizes(plan: Plan, gpus: int) -> dict[str, tuple[int, ...]]:
    """Values of every size in the section ``layout`` that a framework can have on so many GPUs."""
    framework, model, one = plan.framework, plan.model, (1,)
    sizes: dict[str, tuple[int, ...]] = {"tp": one, "cp": one, "pp": one, "vpp": one, "zero": (0,)}
    deep = tuple(pp for pp in divisors(gpus) if pp <= model.layers)
    within_node = min(gpus, plan.hardware.gpus_per_node)
    divided = (model.heads, model.kv_heads, model.ffn, model.hidden)
    wide = tuple(t for t in divisors(gpus) if t <= within_node and not any(size % t for size in divided))
    if framework in ("megatron", "megatron-deepspeed"):
        sizes |= {"tp": wide, "pp": deep, "zero": (1,) if plan.optimizer.precision_aware else (1, 0)}
    if framework == "megatron":
        longest = _powers(gpus) if plan.attention == "flash" else one
        sizes |= {"cp": tuple(cp for cp in longest if cp <= MOST_CONTEXT), "vpp": tuple(range(1, MOST_CHUNKS + 1))}
    if framework == "fsdp" and plan.fsdp.code == "torchtitan":
        whole = tuple(t for t in wide if not plan.model.vocab % t)
        sizes |= {"tp": whole, "pp": deep, "vpp": tuple(range(1, MOST_CHUNKS + 1))}
    if framework == "deepspeed":
        sizes["zero"] = (0, 1, 2, 3)
    if framework == "ddp":
        sizes["zero"] = (0, 1)
    return sizes


MOST_CONTEXT = 16
"""Context-parallel ranks: more than published runs of up to 128k tokens use."""
MOST_CHUNKS = 8
"""Virtual stages of a rank that are tried."""


def recomputing(plan: Plan) -> tuple[Recomputing, ...]:
    """Ways to recompute that a framework has. How many layers, where that can be chosen, is found by the search."""
    none, full = NO_RECOMPUTE, Recomputing("full")
    if plan.framework == "megatron":
        return none, Recomputing("selective"), full
    if plan.framework == "megatron-deepspeed":
        return none, full
    if plan.framework == "fsdp" and plan.fsdp.code == "torchtitan":
        return none, Recomputing("selective"), full
    return none, full


def combined_extras(plan: Plan, fixed: Mapping[str, Any]) -> tuple[tuple[Extra, ...], ...]:
    """Every combination of one choice of each group, none of them first."""
    groups = [
        group
        for group in extras_of(plan)
        if group and not any(path in fixed for one in group for path, _ in one.fields)
    ]
    combined = product(*[(None, *group) for group in groups])
    return tuple(tuple(extra for extra in choice if extra is not None) for choice in combined)


def extras_of(plan: Plan) -> list[tuple[Extra, ...]]:
    """Choices beside layout, batch and recompute, alternatives of one another in a group."""
    fields: tuple[tuple[str, Any], ...]
    framework, groups = plan.framework, list[tuple[Extra, ...]]()
    adam = plan.optimizer.name in ("adam", "adamw")
    if framework == "megatron" and plan.megatron.cross_entropy_fusion == "none":
        fused = "te" if plan.megatron.transformer_impl == "transformer_engine" else "native"
        groups.append((Extra("fused cross entropy", (("megatron.cross_entropy_fusion", fused),), changes_passes=True),))
    if framework == "megatron" and adam and not plan.optimizer.precision_aware and plan.precision.dtype == "bf16":
        fields = (("optimizer.precision_aware", True), ("optimizer.exp_avg", "bf16"), ("optimizer.exp_avg_sq", "bf16"))
        groups.append((Extra("Adam states in bf16", fields, keeps_numerics=False, least_zero=1),))
    if framework == "megatron-deepspeed" and plan.loss.kind == "vocab-parallel":
        fields = (("loss.kind", "adaptive-softmax"),)
        groups.append((Extra("adaptive softmax", fields, keeps_numerics=False, changes_passes=True),))
    if framework == "deepspeed" and plan.deepspeed.offload_optimizer == "none":
        groups.append((_OFFLOAD_STATES, _OFFLOAD_ALL))
    if framework == "fsdp" and not plan.fsdp.offload:
        groups.append((Extra("CPU offload", (("fsdp.offload", True),), moves_states=True),))
    if framework == "fsdp":
        groups.append(tuple(_hybrid(count) for count in _replicas(plan) if count != plan.fsdp.replicas))
    if framework in ("single", "ddp", "device-map") and plan.loss.kind == "plain" and not plan.loss.logits_to_keep:
        groups.append((Extra("Liger's fused loss", (("loss.kind", "liger"),), changes_passes=True),))
    if framework not in ("megatron", "fsdp") and adam:
        fields = (("optimizer.name", "adam8bit"), ("optimizer.implementation", None))
        if framework == "megatron-deepspeed":
            fields = (*fields, ("optimizer.embeddings_32bit", False))
        groups.append((Extra("8-bit Adam", fields, keeps_numerics=False),))
    return groups


_OFFLOAD_STATES = Extra(
    "optimizer on the CPU", (("deepspeed.offload_optimizer", "cpu"),), least_zero=1, moves_states=True
)
_OFFLOAD_ALL = Extra(
    "optimizer and parameters on the CPU",
    (("deepspeed.offload_optimizer", "cpu"), ("deepspeed.offload_param", "cpu")),
    least_zero=3,
    moves_states=True,
)


def _replicas(plan: Plan) -> tuple[int, ...]:
    """Groups of ranks that hold the same shards: those that are whole nodes, or one group of all."""
    nodes, rest = divmod(plan.hardware.gpus or 1, plan.hardware.gpus_per_node)
    return divisors(nodes) if nodes > 1 and not rest else (1,)


def _hybrid(count: int) -> Extra:
    label = f"HSDP ×{count}" if count > 1 else "one group of shards"
    return Extra(label, (("fsdp.replicas", count),), groups=count)


def makes_groups(shards: int, count: int) -> bool:
    """So many replicas are so many groups of several."""
    return shards > count and shards % count == 0


def divisors(number: int) -> tuple[int, ...]:
    small = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return tuple(sorted({*small, *(number // one for one in small)}))


def _powers(limit: int) -> tuple[int, ...]:
    return tuple(1 << bit for bit in range(limit.bit_length()) if 1 << bit <= limit)
