"""When two plans are one: field by field, but for spellings that mean the same.

What may differ, and why it changes neither the job nor its estimate, stands here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..frameworks.fsdp_stages import partition
from ..frameworks.megatron_deepspeed import parallel_shape, stage_bounds
from ..plan.environment import is_followed
from ..plan.fields import plan_fields
from ..plan.framework_sections import Deepspeed, Megatron
from ..plan.megatron_layout import stages
from ..plan.plan import Plan

DESCRIPTIONS = frozenset({"model.published_parameters", "model.source"})
"""Fields of a spec that describe it, and have no flag."""

MEGATRONS = ("megatron", "megatron-deepspeed")


def differences(plan: Plan, other: Plan) -> Iterator[str]:
    """Paths of the fields in which two plans, every default of them filled in, say different things."""
    first, second = settled(plan), settled(other)
    for path in plan_fields():
        if path != "model" and path not in DESCRIPTIONS and value_at(first, path) != value_at(second, path):
            yield path


def value_at(plan: Plan, path: str) -> Any:
    """The value of the field with the dotted ``path``."""
    value: Any = plan
    for name in path.split("."):
        value = getattr(value, name)
    return value


def settled(plan: Plan) -> Plan:
    """``plan`` with one spelling of what has several, and with the default of what has no effect."""
    batch, optimizer = plan.batch, plan.optimizer
    updates: dict[str, Any] = {
        "batch": batch.model_copy(update={"accumulation": None}),  # gbs says it
        "environment": {name: text for name, text in plan.environment.items() if is_followed(name, plan)},
    }
    if plan.framework in MEGATRONS and optimizer.name == "adamw":  # both have AdamW alone, and call it adam
        updates["optimizer"] = optimizer.model_copy(update={"name": "adam"})
    if plan.framework in MEGATRONS and plan.model.activation == "gelu_new":  # theirs, which is fused, is the tanh form
        updates["model"] = plan.model.model_copy(update={"activation": "gelu"})
    if plan.framework == "deepspeed":
        updates["deepspeed"] = _settled_deepspeed(plan)
    if plan.framework == "fsdp" and plan.fsdp.code == "torchtitan":
        updates |= _settled_torchtitan(plan)
    if plan.framework == "megatron-deepspeed":  # whatever method makes it, the cut is the cut
        _, bounds = stage_bounds(plan, parallel_shape(plan))
        updates["pipeline"] = plan.pipeline.model_copy(update={"partition": tuple(bounds)})
    if plan.framework == "megatron":
        updates["megatron"] = _settled_megatron(plan)
        updates["recompute"] = _settled_recompute(plan)
    return plan.model_copy(update=updates)


def _settled_deepspeed(plan: Plan) -> Deepspeed:
    """Two fields name the dtype of gradients; what nobody offloads has no place."""
    given = plan.deepspeed
    unused = [end for end in ("offload_optimizer", "offload_param") if getattr(given, end) == "none"]
    changes: dict[str, Any] = {
        name: field.default
        for name, field in Deepspeed.model_fields.items()
        if any(name.startswith(f"{end}_") for end in unused)
    }
    return given.model_copy(update={**changes, "gradient_accumulation_dtype": plan.precision.gradients})


def _settled_megatron(plan: Plan) -> Megatron:
    """Fusions of what the model has not, and what Megatron-LM turns off by itself (``validate_args``)."""
    model, given, changes = plan.model, plan.megatron, {}
    if model.gated or not model.mlp_bias:
        changes["bias_gelu_fusion"] = False
    if not model.gated:
        changes["bias_swiglu_fusion"] = False
    if model.positions != "rotary":
        changes["rope_fusion"] = False
    if plan.precision.dtype == "fp16":  # dynamic loss scaling finds them
        changes["check_for_nan"] = False
    softmax = given.attention_softmax_in_fp32 or given.query_key_layer_scaling
    settled: dict[str, Any] = {**changes, "attention_softmax_in_fp32": softmax}
    if plan.layout.cp == 1:
        settled["cp_communication"] = "p2p"
    return given.model_copy(update=settled)


def _settled_recompute(plan: Plan) -> Any:
    """A block that is recomputed whole is as many layers as the largest chunk has."""
    recompute = plan.recompute
    if recompute.mode != "full" or recompute.method != "block":
        return recompute
    most = largest_chunk(plan)
    return recompute.model_copy(update={"layers": most if recompute.layers is None else min(recompute.layers, most)})


def largest_chunk(plan: Plan) -> int:
    """Layers of the virtual stage of Megatron-Core that has most."""
    pipeline, layout = plan.pipeline, plan.layout
    found = stages(
        plan.model.layers,
        layout.pp,
        layout.vpp,
        pipeline.first_layers,
        pipeline.last_layers,
        pipeline.count_embedding,
        pipeline.count_loss,
        pipeline.layout,
    )
    return max(len(chunk.layers) for stage in found for chunk in stage)


def _settled_torchtitan(plan: Plan) -> dict[str, Any]:
    """Selective recompute of every n-th layer is full recompute of those; stages by their entries; AdamW decays in
    place, and Adam either does or not."""
    optimizer, recompute, pipeline = plan.optimizer, plan.recompute, plan.pipeline
    updates: dict[str, Any] = {}
    if recompute.mode == "selective" and not plan.fsdp.per_operator:
        updates["recompute"] = recompute.model_copy(update={"mode": "full", "layers": 1})
    if optimizer.name == "adamw" or not optimizer.weight_decay:
        updates["optimizer"] = optimizer.model_copy(update={"weight_decay": None})
    if plan.layout.pp > 1:
        updates["pipeline"] = pipeline.model_copy(update={"partition": titan_edges(plan)})
    return updates


def titan_edges(plan: Plan) -> tuple[int, ...]:
    """The first entry of every stage in the list embedding, layers, norm, head, and its length."""
    if not isinstance(plan.pipeline.partition, str):
        return tuple(int(edge) for edge in plan.pipeline.partition)
    _, *inner, _ = partition(plan)
    return (0, *(layer + 1 for layer in inner), plan.model.layers + 3)
