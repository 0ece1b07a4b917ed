"""trl's fused head beside trl 1.16's own, event by event (``tests/oracle/trl_step.py`` wrote what that holds)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from memplan.layers.autograd import Recorder
from memplan.layers.log_probabilities import of_labels, summed
from memplan.tape.events import Event, Hold, Seam

from .test_against_transformers import drops_sorted

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "trl_head_steps.json").read_text())
DTYPES = {"bfloat16": "bf16", "float32": "fp32"}


@pytest.mark.parametrize("recorded", CASES, ids=lambda one: "-".join(str(x) for x in one["case"].values()))
def test_head_holds_what_trls_does(recorded: dict[str, Any]) -> None:
    case = recorded["case"]
    r = Recorder(accumulates_in_place=False, autocast="bf16" if case["autocast"] else None)
    x, _ = r.leaf(r.outside((case["b"], case["s"], case["h"]), DTYPES[case["dtype"]]))
    weight = r.parameter("head.weight", (case["v"], case["h"]), DTYPES[case["stored"]])
    if not case["trained"]:
        weight.node = None
    found, others = of_labels(r, x, weight, case["outputs"][1:])
    loss = summed(r, found)
    del found, x
    others.clear()
    middle = len(r.events)
    gradient = [r.empty((), "fp32", "grad_loss")]
    r.backward([loss.alias()], gradient)
    del loss
    assert drops_sorted(sizes(r.events[:middle], r.events)) == drops_sorted(recorded["forward"])
    assert drops_sorted(sizes(r.events[middle:], r.events)) == drops_sorted(recorded["backward"])


def sizes(events: Sequence[Event], every: Sequence[Event]) -> list[int]:
    """Without numbers, and the indices that ``nonzero`` makes inside an operator."""
    holds = [event for event in every if isinstance(event, Hold)]
    inside = {hold.tensor for hold in holds if not hold.shape or hold.name == "label_indices"}
    told = [event for event in events if not isinstance(event, Seam) and event.tensor not in inside]
    return [event.bytes if isinstance(event, Hold) else -event.bytes for event in told]
