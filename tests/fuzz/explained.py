"""Logs and memory snapshots from random numbers."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from random import Random

from memplan.explain import compare_snapshot, explain, written_snapshot
from memplan.explain.snapshot import is_snapshot
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve

from .driver import Target
from .texts import SIGNS, mutated, repeated, text

ISSUES = Path(__file__).parents[1] / "explain" / "issues.jsonl"
_ROWS = [json.loads(line) for line in ISSUES.read_text(encoding="utf-8").splitlines()]
_FRAMES = [frame for row in _ROWS for frame in row["frames"]]
_PIECES = (
    *[row["message"] for row in _ROWS],
    *[f'  File "/opt/{frame}", line 7, in forward\n    logits = logits.float()' for frame in _FRAMES],
    "Traceback (most recent call last):", "[rank3]: ", "[default0]:", " 19%|█▉| 3237/16700 [3:34:12<38:35, 10.32s/it]",
    "\r", "\x1b[31m", "│ /opt/x.py:512 in forward │", "❱ 512 │ x", "CUDA out of memory. ", "Tried to allocate ",
    "99999999999999 GiB",
)  # fmt: skip
_PLAN = read_plan(None, {"model": "gpt2", "framework": "single", "mbs": "1", "seq": "64", "layers": "1"}).plan
_WRITTEN = written_snapshot(resolve(_PLAN))
_PLAIN = pickle.loads(_WRITTEN)


def _log(random: Random) -> str:
    match random.randrange(4):
        case 0:
            return repeated(random, _PIECES) + random.choice(_PIECES)
        case 1:
            return text(random, (*SIGNS, *_PIECES), 60)
    lines = "\n".join(random.choice(_PIECES) for _ in range(random.randrange(1, 40)))
    return mutated(random, lines, (*SIGNS, *_PIECES))


def _snapshot(random: Random) -> bytes:
    match random.randrange(4):
        case 0:
            data = bytearray(_WRITTEN)
            for _ in range(random.choice((1, 1, 2, 8))):
                data[random.randrange(len(data))] = random.randrange(256)
            return bytes(data[: random.randrange(len(data))] if random.random() < 0.2 else data)
        case 1:
            return b"\x80\x04" + random.randbytes(random.randrange(400)) + b"."
        case 2:
            return mutated(random, json.dumps(_PLAIN)[: random.randrange(20, 4000)]).encode("utf-8", "replace")
    trace = list(_PLAIN["device_traces"][0])
    random.shuffle(trace)
    for entry in random.sample(trace, min(5, len(trace))):
        entry = dict(entry, **{random.choice(list(entry)): random.choice([None, -1, 1 << 70, "x", [], {}, 2.5])})
        trace.append(entry)
    return pickle.dumps({**_PLAIN, "device_traces": [trace[: random.randrange(len(trace))]]})


def _compared(data: bytes) -> object:
    is_snapshot(data)
    return compare_snapshot(data, _PLAN)


TARGETS = (
    Target("logs", _log, lambda log: explain(log, None)),
    Target("snapshots", _snapshot, _compared),
)
