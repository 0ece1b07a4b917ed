"""A rank of DeepSpeed's engine that also writes down which storages came and went, into ``RANK.json``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from memplan.tape.events import Drop, Hold, Tape
from memplan.tape.program import Program
from memplan.trace.recording import BACKWARD, FORWARD, Traced
from memplan.validate.run_files import TASK, Telling
from memplan.validate.worker import Rank, Task

PLACE = "EVENTS"
"""Names the folder of those files, in the environment."""


class Kept(Rank):
    traced: Traced

    def _followed(self, program: Program) -> Traced:
        self.traced = super()._followed(program)
        return self.traced


def changes(events: Iterable[Any]) -> list[int]:
    """Bytes, negative of what ends."""
    signed = {Hold: 1, Drop: -1}
    return [signed[type(event)] * event.bytes for event in events if type(event) in signed]


def measured(traced: Traced, microbatch: int, phase: str) -> list[int]:
    recording = traced.recording
    zipped = zip(recording.events, recording.places, strict=True)
    return changes(event for event, place in zipped if place[:2] == (microbatch, phase))


def estimated(program: Program, microbatch: int, phase: str) -> list[int]:
    tapes = [one.module.steady if microbatch else one.module.first for one in program.spans for _ in one.names]
    backward: list[Tape] = [tape.backward for tape in reversed(tapes)]
    parts = [tape.forward for tape in tapes] if phase == FORWARD else backward
    return changes(event for part in parts for event in part)


def main(folder: Path, rank: int, place: Path) -> int:
    task = Task.model_validate_json((folder / TASK).read_bytes())
    telling = Telling(folder, rank)
    own = Kept(task, rank, telling)
    first = own.reading()
    own.losses.clear()
    reading = own.reading()  # on a GPU, too, the engine that is followed comes behind another one
    assert first.requested == reading.requested
    program = own.native.program(rank)
    passes = {
        f"{microbatch}/{phase}": [make(source, microbatch, phase) for make, source in pairs]
        for microbatch in range(min(2, program.microbatches))
        for phase in (FORWARD, BACKWARD)
        for pairs in [((measured, own.traced), (estimated, program))]
    }
    (place / f"{rank}.json").write_text(json.dumps(passes))
    telling.result(reading)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main(Path(sys.argv[1]), int(sys.argv[2]), Path(os.environ[PLACE])))
