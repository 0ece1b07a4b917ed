"""Recordings as values: categories, places, tapes, JSON and snapshots, on random histories."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from memplan.tape.events import Category, Drop, Hold, Seam, fold
from memplan.trace.recording import BACKWARD, FORWARD, OPTIMIZER, SETUP, Place, Recording, as_lines, snapshot

PLACES = [
    SETUP,
    *[
        Place(microbatch, phase, module, phase == BACKWARD and bool(module))
        for microbatch in (0, 1)
        for phase in (FORWARD, BACKWARD)
        for module in ("", "model.layers.0", "model.layers.1.mlp", "lm_head")
    ],
    Place(1, OPTIMIZER, ""),
]


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    """Holds and drops in the order of a step; what is dropped was held."""
    recording = Recording()
    alive: list[Hold] = []
    for place in PLACES:
        for number in range(draw(st.integers(0, 4))):
            if alive and draw(st.booleans()):
                hold = alive.pop(draw(st.integers(0, len(alive) - 1)))
                recording.add(Drop(hold.tensor, hold.bytes, hold.category), place)
            else:
                tensor = len(recording.events) * 10 + number
                size = 512 * draw(st.integers(1, 50))
                hold = Hold(tensor, size, Category.TEMPORARIES, "aten.mul.Tensor", (2, size // 8), "float32")
                alive.append(hold)
                recording.add(hold, place)
    if alive:
        recording.marks[alive[0].tensor] = draw(st.sampled_from(list(Category)))
    return recording


@given(recordings())
def test_categories_sum_and_change_no_size(recording: Recording) -> None:
    categorised = recording.categorised(vocab=64)
    before, after = fold(recording.events), fold(categorised.events)
    assert (before.net, before.peak) == (after.net, after.peak)
    assert sum(after.peak_by) == after.peak
    assert all(size >= 0 for size in after.peak_by)
    holds = {event.tensor: event.category for event in categorised.events if isinstance(event, Hold)}
    for event in categorised.events:
        assert event.category is holds[event.tensor], "a drop has its hold's category"


@given(recordings())
def test_phases_compose_to_the_whole(recording: Recording) -> None:
    whole = fold(recording.events)
    net = peak = 0
    for microbatch, phase in dict.fromkeys(place[:2] for place in PLACES):
        part = recording.of(microbatch, phase)
        peak = max(peak, net + part.peak)
        net += part.net
    assert (net, peak) == (whole.net, whole.peak)
    assert fold(recording.tape()).net == whole.net


@given(recordings())
def test_json_lines_and_seams(recording: Recording) -> None:
    again = Recording.from_json(json.loads(json.dumps(recording.to_json())))
    assert (again.events, again.places, again.live) == (recording.events, recording.places, recording.live)
    lines = [json.loads(line) for line in as_lines(recording).splitlines()]
    assert sum(line["bytes"] * (1 if line["event"] == "hold" else -1) for line in lines) == recording.live
    seams = [event.name for event in recording.tape() if isinstance(event, Seam)]
    assert len(seams) == len(set(recording.places)), "one for every place that has events"


def test_what_forward_leaves_is_an_activation() -> None:
    recording = Recording()
    kept, gone, later = (Hold(number, 512, Category.TEMPORARIES) for number in (1, 2, 3))
    forward, backward = Place(0, FORWARD, "a"), Place(0, BACKWARD, "a")
    recording.add(kept, forward)
    recording.add(gone, forward)
    recording.add(Drop(2, 512, Category.TEMPORARIES), forward)
    recording.add(later, backward)
    found = [event.category for event in recording.categorised().events if isinstance(event, Hold)]
    assert found == [Category.ACTIVATIONS, Category.TEMPORARIES, Category.TEMPORARIES]


@settings(deadline=None, max_examples=20)
@given(recordings())
def test_snapshot_is_what_the_viewer_reads(recording: Recording) -> None:
    """PyTorch's own memory viewer: its history, its segments, its page."""
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    taken = snapshot(recording)
    (history,) = taken["device_traces"]
    assert sum(entry["action"] == "alloc" for entry in history) == sum(isinstance(e, Hold) for e in recording.events)
    live = sum(block["size"] for s in taken["segments"] for block in s["blocks"] if block["state"] != "inactive")
    assert live == recording.live
    for segment in taken["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    assert "viz" in viewer.trace_plot(taken)
    assert "viz" in viewer.segment_plot(taken)
    viewer.trace(taken)
    viewer.segsum(taken)
