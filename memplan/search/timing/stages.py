"""What every stage of a plan works on: how many layers, how many of them recomputed, and which ends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ...plan import count
from ...plan.plan import Plan
from ...plan.spec import ModelSpec


class StageWork(NamedTuple):
    """Entries of one chunk of a stage."""

    layers: int
    recomputed: int = 0
    """Layers whose forward pass backward runs again, whole or in part."""
    embedding: bool = False
    final_norm: bool = False
    head: bool = False


Work = tuple[tuple[StageWork, ...], ...]
"""By stage, then by chunk."""


def work_of(plan: Plan) -> Work:
    """The stages of a resolved plan, as its framework cuts it. ``PlanError`` where it cannot."""
    if plan.framework == "megatron":
        from ...frameworks.megatron import stage_entries

        return tuple(tuple(_named(chunk, plan) for chunk in stage) for stage in stage_entries(plan))
    if plan.framework == "megatron-deepspeed":
        from ...frameworks.megatron_deepspeed import parallel_shape, stage_bounds

        entries, bounds = stage_bounds(plan, parallel_shape(plan))
        names = [entry.name for entry in entries]
        return tuple((_named(names[low:high], plan),) for low, high in pairwise(bounds))
    if plan.framework == "device-map":
        return _devices(plan)
    if plan.framework == "fsdp" and plan.layout.pp > 1:
        return _torch_stages(plan)
    layers = plan.model.layers
    return ((StageWork(layers, _recomputed(plan, layers), True, plan.model.final_norm, True),),)


def _named(names: Sequence[str], plan: Plan) -> StageWork:
    layers = sum(name.startswith("layer.") for name in names)
    recomputed = _recomputed(plan, layers)
    size = plan.recompute.layers or 1
    grouped = plan.framework == "megatron-deepspeed" and plan.recompute.method == "uniform" and size > 1
    if recomputed and grouped and plan.recompute.mode == "full":
        # Only a group of transformer layers alone is recomputed (``PipelineModule.forward``).
        kinds = [name for name in names if name not in ("to_float16", "to_fp32")]
        groups = [kinds[start : start + size] for start in range(0, len(kinds), size)]
        recomputed = sum(len(one) for one in groups if all(name.startswith("layer.") for name in one))
    return StageWork(layers, recomputed, "embedding" in names, "final_norm" in names, "head" in names)


def _recomputed(plan: Plan, layers: int) -> int:
    """Of ``layers`` of a chunk."""
    recompute = plan.recompute
    if recompute.mode == "none":
        return 0
    if recompute.mode == "full" and recompute.method == "block" and recompute.layers is not None:
        return min(layers, recompute.layers)
    return layers


def _devices(plan: Plan) -> Work:
    """Devices of a map; the embedding, and a head that is tied to it, are on the first, an untied one on the last."""
    assert plan.device_map is not None
    held = [len(plan.device_map[device]) for device in sorted(plan.device_map)]
    last, tied = len(held) - 1, plan.model.tied_embeddings
    return tuple(
        (StageWork(n, _recomputed(plan, n), not at, at == last, at == (0 if tied else last)),)
        for at, n in enumerate(held)
    )


def _torch_stages(plan: Plan) -> Work:
    from ...frameworks.fsdp_stages import partition

    edges, pp, chunks = partition(plan), plan.layout.pp, plan.layout.vpp
    total = pp * chunks
    sizes = [high - low for low, high in pairwise(edges)]

    def work(at: int) -> StageWork:
        last = at == total - 1
        return StageWork(sizes[at], _recomputed(plan, sizes[at]), not at, last, last)

    return tuple(tuple(work(chunk * pp + stage) for chunk in range(chunks)) for stage in range(pp))


@lru_cache(maxsize=4096)
def elements(spec: ModelSpec, work: tuple[StageWork, ...], tp: int, vocab: int, positions_twice: bool = False) -> float:
    """Parameters of a stage on one tensor-parallel rank; the last of several stages has a tied weight of its own, and
    with ``positions_twice`` (Megatron-DeepSpeed's ``EmbeddingPipe``) the learned positions, too."""
    h = spec.hidden
    one_norm = count.norm(spec)
    norms = 1 if spec.blocks == "parallel_one_norm" else 4 if spec.norm_place == "both" else 2
    whole = norms * one_norm + h * (spec.attention_output_bias + spec.mlp_bias)
    layer = (count.layer(spec) - whole) / tp + whole
    word = vocab * h / tp
    positions = (spec.positions_max + spec.position_offset) * h if spec.positions == "learned" else 0
    beside = positions + spec.token_types * h + (one_norm if spec.embedding_norm else 0)
    first = any(chunk.embedding for chunk in work)
    total = word + beside if first else 0.0
    for chunk in work:
        total += chunk.layers * layer
        total += one_norm if chunk.final_norm and spec.final_norm else 0
        if chunk.head:
            tied = spec.tied_embeddings
            total += 0 if tied and first else word
            total += positions if tied and not first and positions_twice else 0
            total += (h * h + h + one_norm + spec.vocab) if spec.mlm_head else 0
    return total
