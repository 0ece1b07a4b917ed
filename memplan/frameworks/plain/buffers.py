"""What a model of transformers holds besides parameters: its inputs and its registered buffers."""

from __future__ import annotations

from collections.abc import Sequence

from ...families import family
from ...layers.huggingface import LayerShape
from ...layers.module import hold_bytes
from ...plan.releases import release
from ...plan.resolved import ResolvedPlan
from ...plan.training_loops import NONE
from ...tape.events import Category, Hold, rounded


def inputs(shape: LayerShape, stage: int, names: Sequence[str] = NONE.inputs) -> list[Hold]:
    """Token ids and labels, (b, s) int64 each, on the first device."""
    if stage:
        return []
    size = hold_bytes((shape.b, shape.s), "int64")
    return [Hold(0, size, Category.INPUTS, name, (shape.b, shape.s), "int64") for name in names]


def buffers(plan: ResolvedPlan, stage: int) -> list[Hold]:
    """Registered buffers: rotary frequencies, BERT's position and token-type ids, the masks of 2020's GPT-2."""
    spec = plan.model
    kept = Category.BUFFERS
    result: list[Hold] = []
    if plan.code == "2020":
        assert plan.device_map is not None or plan.framework != "device-map"
        count = len(plan.device_map[stage]) if plan.device_map is not None else spec.layers
        n = spec.positions_max
        for _ in range(count):
            result.append(Hold(0, hold_bytes((n, n), "uint8"), kept, "causal_mask", (1, 1, n, n), "uint8"))
            result.append(Hold(0, rounded(4), kept, "masked_bias", (), "fp32"))
    if spec.router_expert_bias:
        placed = plan.device_map[stage] if plan.device_map is not None else range(spec.layers)
        size = (spec.experts,)
        bias = Hold(0, hold_bytes(size, "fp32"), kept, "e_score_correction_bias", size, "fp32")
        result += [bias] * sum(map(spec.has_experts, placed))
    if family(spec.family).tables_in_layers:
        count = len(plan.device_map[stage]) if plan.device_map is not None else spec.layers
        table = (spec.positions_max, spec.rotary_features)
        result += [Hold(0, hold_bytes(table, "fp32"), kept, "embed_positions", table, "fp32") for _ in range(count)]
        return result
    if stage:
        return result
    if spec.positions == "rotary":
        pairs = ((spec.rope_head_dim or spec.rotary_features) // 2,)
        older = release(plan, "transformers") < family(spec.family).as_llama_since
        names = ["inv_freq"] * spec.layers if older else ["inv_freq", "original_inv_freq"]
        result += [Hold(0, hold_bytes(pairs, "fp32"), kept, name, pairs, "fp32") for name in names]
    if family(spec.family).scale_in_embedding:
        result.append(Hold(0, rounded(4), kept, "embedding_scale", (), "fp32"))
    if family(spec.family).mask_buffer:
        n = spec.positions_max
        result.append(Hold(0, hold_bytes((n, n), "bool"), kept, "bias", (n, n), "bool"))
    if spec.token_types:
        n = spec.positions_max
        result += [
            Hold(0, hold_bytes((n,), "int64"), kept, name, (1, n), "int64")
            for name in ("position_ids", "token_type_ids")
        ]
    return result
