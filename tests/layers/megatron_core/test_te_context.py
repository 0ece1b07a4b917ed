"""Context parallelism by hand beside Transformer Engine's source (``context_parallel.py``, above all
``AttnFuncWithCPAndKVAllGather``)."""

from __future__ import annotations

import pytest

from memplan.layers.autograd import Recorder, Tensor
from memplan.layers.megatron_core import te_context
from memplan.layers.megatron_core.shape import ContextCommunication, CoreShape, Version
from memplan.layers.module import Interface, Module, Options, Run, build
from memplan.plan.errors import PlanError
from memplan.plan.spec import ModelSpec
from memplan.tape.events import Drop, Hold

from .test_local_layer import GPT

S, A, G, D, CP = 512, 8, 2, 32, 4
QUERY, KEYS = 2 * S * A * D, 2 * S * G * D
STATISTICS = 4 * A * S // 2
"""Bytes of queries, of keys, and of one step's statistics."""


def attention(te: Version, way: ContextCommunication = "all_gather", d_v: int = D) -> Module:
    """On one sequence of 512 tokens a rank, 8 heads of 32 and 2 key/value heads with ``d_v`` features of a value, four
    ranks; cuDNN's."""
    spec = ModelSpec(**{**GPT, "heads": A, "kv_heads": G, "head_dim": D, "value_head_dim": d_v if d_v != D else 0})
    shape = CoreShape(
        spec, 1, S, 1, "bf16", 1024, cp=CP, cp_communication=way, attention="fused", te=te,
        gradient_fusion=False, rope_fusion=False,
    )  # fmt: skip

    def recipe(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        k, v = (r.empty((S, 1, G, d), "bf16", name).by(x.node) for name, d in (("key", D), ("value", d_v)))
        return Run(te_context.core_attention(r, x.view(S, 1, A, D), k, v, shape))

    return build("attention", recipe, Interface((S, 1, A * D), "bf16"), Options())


def left(module: Module) -> list[tuple[str, int]]:
    """What forward leaves, by name."""
    held: dict[int, Hold] = {}
    for event in module.steady.forward:
        if isinstance(event, Hold):
            held[event.tensor] = event
        elif isinstance(event, Drop):
            held.pop(event.tensor, None)
    return sorted((hold.name, hold.bytes) for hold in held.values())


def test_up_to_2_14_the_steps_outputs_are_saved() -> None:
    """q is the input, k and v are its own; the whole output is another tensor than those of the two steps."""
    states = [("rng_state", 512)] * 2
    saved = [
        ("context", QUERY),
        *[("context_of_step", QUERY // 2)] * 2,
        ("cu_seqlens_of_chunk", 512),
        ("key", KEYS),
        *states,
    ]
    assert left(attention((2, 11))) == [*saved, *[("softmax_statistics", STATISTICS)] * 2, ("value", KEYS)]


def test_since_2_15_the_output_is_saved_itself() -> None:
    names = [name for name, _ in left(attention((2, 17)))]
    assert names.count("context") == 1
    assert "context_of_step" not in names


@pytest.mark.parametrize("te", [(2, 11), (2, 17), (2, 18)])
def test_what_is_there_at_once(te: Version) -> None:
    """Forward, beyond the input: keys and values, and of all four ranks, gathered and put in order one after the other
    (three of them at once at most), or in order with the output and the two steps' halves, since 2.18 with a second
    one. Backward: the gradients of all ranks' keys and values, and those gathered again."""
    module = attention(te)
    two = te >= (2, 18)
    kept = 2 * KEYS + 2 * CP * KEYS
    small = 2 * STATISTICS + 3 * 512  # beside statistics two random states, and a chunk's lengths
    assert module.steady.forward_fold.peak == kept + (2 + two) * QUERY + small
    steps = QUERY + 2 * (KEYS * CP + KEYS // 2)
    begun = 2 * CP * KEYS * 2 + QUERY + steps
    assert module.steady.backward_fold.peak >= begun


@pytest.mark.parametrize("way", ["p2p", "a2a", "all_gather"])
def test_a_value_may_have_another_size_than_a_key(way: ContextCommunication) -> None:
    """As in latent attention: the output, and what is saved of it, has half of a query's features; a step of the ring
    takes keys and values in one buffer, and as many bytes in backward with their gradients twice."""
    module = attention((2, 17), way, D // 2)
    saved = dict(left(module))
    contexts = [size for name, size in left(module) if name.startswith("context")]
    assert contexts == [QUERY // 2] * (2 if way == "a2a" else 1)
    if way == "p2p":
        assert saved["keys_and_values_received"] == KEYS + KEYS // 2
        made = [event for event in module.steady.backward if isinstance(event, Hold)]
        pairs = [event.bytes for event in made if event.name == "keys_values_and_gradients"]
        assert pairs == [2 * (KEYS + KEYS // 2)] * 2
        return
    with pytest.raises(PlanError, match="must be p2p with latent attention before"):
        attention((2, 14), way, D // 2)
