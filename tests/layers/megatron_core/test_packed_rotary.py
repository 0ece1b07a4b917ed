"""Rotary positions of packed sequences without their fused kernel, beside what Megatron-LM's own function allocates."""

from __future__ import annotations

from memplan.layers.autograd import Recorder, Tensor
from memplan.layers.megatron_core import block
from memplan.layers.megatron_core.shape import CoreShape
from memplan.layers.module import Interface, Options, Run, build
from memplan.plan.spec import ModelSpec
from memplan.tape.events import Hold

from .test_local_layer import GPT, LLAMA

SPEC = ModelSpec(**(GPT | LLAMA | {"hidden": 128, "heads": 2, "kv_heads": 2, "head_dim": 64, "positions": "rotary"}))
ROW = ("int64", (256,))
ANGLES = ("fp32", (256, 1, 1, 64))
BEGUN = [
    ROW,
    ("int64", (2,)),
    ("int64", (1,)),
    ("int64", (2,)),
    ("int64", (1,)),
    *[ROW] * 8,
    ANGLES,
]
"""What ``_apply_rotary_pos_emb_thd`` (``megatron/core/models/common/embeddings/rope_utils.py`` of 22 August 2026)
allocates for one document of 256 tokens before it turns anything, as a dispatch mode saw it on a CPU."""
TABLES = [ANGLES, ANGLES, ("bf16", (256, 1, 1, 64))]
"""Of cosines, and again of sines."""


def tape(packed: int, s: int = 256) -> list[tuple[str, str, tuple[int, ...]]]:
    """Whether a tensor begins or ends, its dtype and its sizes."""
    shape = CoreShape(
        SPEC, vocab=1024, implementation="transformer_engine", attention="flash", b=1, s=s, t=1, dtype="bf16",
        gradient_fusion=False, rope_fusion=False, packed=packed,
    )  # fmt: skip

    def recipe(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(block.rotary(r, x.view(s, 1, 2, 64), "query", shape))

    found, live = list[tuple[str, str, tuple[int, ...]]](), dict[int, tuple[str, tuple[int, ...]]]()
    for event in build("rotary", recipe, Interface((s, 1, 128), "bf16"), Options()).steady.forward:
        if isinstance(event, Hold):
            live[event.tensor] = (event.dtype, event.shape)
        if event.tensor in live:
            found.append(("begins" if isinstance(event, Hold) else "ends", *live[event.tensor]))
    return found


def test_each_token_looks_up_its_row() -> None:
    """Seven (256,) int64 live with (256, 1, 1, 64) fp32 and four small ones until the function returns."""
    whole, packed = tape(0), tape(1)
    begun = [(dtype, size) for kind, dtype, size in packed if kind == "begins"]
    assert begun[: len(BEGUN)] == BEGUN
    assert begun[len(BEGUN) : len(BEGUN) + 6] == TABLES * 2
    assert begun[len(BEGUN) :] == [(dtype, size) for kind, dtype, size in whole if kind == "begins"]
    last = [(dtype, size) for _, dtype, size in packed[-11:]]
    small = [("int64", (2,)), ("int64", (1,)), ("int64", (2,))]
    assert {kind for kind, _, _ in packed[-11:]} == {"ends"}
    assert sorted(last) == sorted([*[ROW] * 7, *small, ANGLES])


def test_rows_are_of_tokens_and_not_of_documents() -> None:
    """Four documents of 64 tokens: the same rows, and beginnings of five."""
    assert [size for _, dtype, size in tape(4) if dtype == "int64"].count((256,)) == 18
    assert ("begins", "int64", (5,)) in tape(4)
