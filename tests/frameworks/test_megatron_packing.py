"""Packed sequences (``--sft``, ``--dataloader-inter-document-masking``): what differs from whole ones, by hand."""

from __future__ import annotations

import pytest

from memplan.estimate import estimate
from memplan.frameworks.megatron.from_plan import core_shape
from memplan.frameworks.megatron.modules import layer_shape_of, layers_module, module_shapes
from memplan.frameworks.megatron.programs import programs
from memplan.layers.module import Module, Options
from memplan.tape.events import Drop, Hold, Tape

from .test_megatron import plan, refusal
from .test_megatron_choices import MIXTURE

S, B, H, A, D = 256, 2, 256, 16, 16


def of_layer(**flags: object) -> Module:
    given = plan(mbs=B, **flags)
    return layers_module((layer_shape_of(module_shapes(core_shape(given))[0], 0),), Options(kernel_workspaces=True))


def sizes(tape: Tape) -> list[int]:
    return [one.bytes for one in tape if isinstance(one, Hold)]


def test_a_layer_of_packed_sequences_is_one_of_a_long_sequence() -> None:
    """cuDNN's attention of (s b, 1) tokens takes as many bytes as that of (s, b)."""
    flags = {"gpu": "h100-80gb"}
    packed, whole = of_layer(packed_sequences="true", **flags), of_layer(**flags)
    assert sizes(packed.first.forward) == sizes(whole.first.forward)
    assert sizes(packed.first.backward) == sizes(whole.first.backward)


def test_flash_attention_of_packed_sequences_copies_nothing() -> None:
    """What (s, b) tokens need in another order, packed ones have already; sums have 128 rows more for each sequence."""
    flags = {"gpu": "a100-80gb"}
    packed, whole = of_layer(packed_sequences="true", **flags), of_layer(**flags)
    copies = ("batch_first", "context_contiguous")
    assert any(one.name.endswith(copies) for one in whole.first.forward if isinstance(one, Hold))
    assert not any(one.name.endswith(copies) for one in packed.first.forward if isinstance(one, Hold))
    rows = {one.name: one.shape for one in packed.first.backward if isinstance(one, Hold)}
    assert rows["softmax_d"] == (1, A, S * B + 128 * B)
    assert rows["dq_accum"][2] == S * B + 128 * B


def batches(**flags: object) -> dict[str, list[tuple[str, int]]]:
    """Names and bytes of what arrives on each of two stages, and stays."""
    found: dict[str, list[tuple[str, int]]] = {}
    for program in programs(plan(pp=3, layers=6, gpu="h100-80gb", **flags), Options()):
        (batch,) = (s.module for s in program.order.chunks[0].spans if s.module.name == "batch")  # type: ignore[attr-defined]
        ended = {event.tensor for event in batch.first.forward if isinstance(event, Drop)}
        holds = [one for one in batch.first.forward if isinstance(one, Hold) and one.tensor not in ended]
        found[str(program.stage)] = [(one.name, one.bytes) for one in holds]
    return found


def test_every_stage_knows_the_documents() -> None:
    """Of one sequence s + 1 int32, a view of what the data loader pads; of two the beginnings of all, one tensor."""
    one = batches(packed_sequences="true")
    assert one["0"] == [("position_ids", 8 * S), ("tokens", 8 * S), ("documents", 1536)]
    assert one["1"] == [("documents", 1536)]
    assert one["2"] == [("labels", 8 * S), ("loss_mask", 4 * S), ("documents", 1536)]
    assert batches(packed_sequences="true", mbs=2)["1"] == [("documents", 512)]
    assert batches()["1"] == []


def test_tables_of_angles_are_many() -> None:
    """32 of at most s rows of d features in fp32: as many lengths of a longest document are remembered."""
    held = [
        sum(one.name == "rotary_angles" for one in program.kept.workspaces if isinstance(one, Hold))
        for flags in ({"packed_sequences": "true"}, {})
        for program in programs(plan(mbs=B, gpu="h100-80gb", **flags), Options())
        if program.kept is not None
    ]
    assert held == [32, 1]
    static = [estimate(plan(gpu="h100-80gb", **one)).stages[0].static for one in ({"packed_sequences": "true"}, {})]
    assert static[0] - static[1] == 31 * 4 * S * D - 512, "the lengths of whole sequences are not kept"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"cp": 2}, "context parallelism"),
        ({"transformer_impl": "local"}, "local layers"),
        ({"attention_backend": "unfused"}, "unfused attention"),
        ({"mbs": 2, "dp": 2, "ep": 2, **MIXTURE}, "several sequences"),
    ],
)
def test_refused(flags: dict[str, object], said: str) -> None:
    assert said in refusal(packed_sequences="true", gpu="h100-80gb", **flags)
