"""Norms of queries and keys: what they save of the projection's output."""

import pytest

from memplan.frameworks.megatron.programs import programs
from memplan.layers.module import Options
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Drop, Hold

S, B, D = 256, 2, 128


@pytest.mark.parametrize(("heads", "groups", "copied"), [(16, 8, False), (16, 1, True), (8, 8, True)])
def test_norms_save_copies_of_slices_and_not_the_projections_output(heads: int, groups: int, copied: bool) -> None:
    """Keys are a slice, whose copy s b g d Transformer Engine's norm saves; so are queries, unless several groups of
    several had to be copied before. Nothing keeps the output of linear_qkv: values are copied for flash-attention."""
    sizes = {"hidden": "1024", "heads": str(heads), "kv-heads": str(groups), "head-dim": str(D)}
    flags = {"model": "qwen3-0.6b", "layers": "1", "seq": str(S), "mbs": str(B), "gbs": str(B), "gpus": "1", **sizes}
    plan = resolve(read_plan(None, {**flags, "framework": "megatron", "attention-backend": "flash"}).plan)
    (program,) = programs(plan, Options())
    layer = next(span.module for span in program.spans if span.names[0] == "layer.0")
    held: dict[int, Hold] = {}
    for event in layer.steady.forward:
        if isinstance(event, Hold):
            held[event.tensor] = event
        elif isinstance(event, Drop):
            held.pop(event.tensor, None)
    kept = {one.name: one.bytes for one in held.values()}
    assert "self_attention.linear_qkv" not in kept
    assert kept["self_attention.k_layernorm_contiguous"] == 2 * S * B * groups * D
    assert kept.get("self_attention.q_layernorm_contiguous", 0) == 2 * S * B * heads * D * copied
