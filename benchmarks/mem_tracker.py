"""PyTorch's own trackers beside ``memplan trace``: MemTracker and FSDPMemTracker of ``torch.distributed._tools``.

    python benchmarks/mem_tracker.py

Needs torch and transformers. Both follow storages of the same step on fake tensors, each in a run of its own. What is
left when differences with a name are taken out is printed, and is nothing:

* MemTracker rounds storages of CUDA devices alone; on fake CPU tensors it counts bytes as they are;
* it counts the step counters of an optimizer, 4 bytes a parameter, wherever they are; on a GPU they are on the host
  (unless the optimizer is fused or capturable), and a trace leaves them out;
* it sees the CPU's layer norm, whose statistics of 16-bit tensors are of 16 bits; CUDA's are fp32, and a trace's, too;
* like every mode that sees operators it keeps autograd from summing gradients in place; a trace does that itself, and
  is compared without (``sums_in_place=False``).
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from memplan.tape.events import Category, Hold, rounded  # noqa: E402
from memplan.trace.job import Job  # noqa: E402
from memplan.trace.recording import FORWARD, Recording  # noqa: E402
from memplan.trace.run import planned  # noqa: E402

COUNTER = 4
"""Bytes of a step counter."""
NORM = "aten.native_layer_norm.default"
COUNTING = ("adam", "adamw", "adafactor")
NAMES = {"Parameter": Category.PARAMETERS, "Buffer": Category.BUFFERS, "Optstate": Category.OPTIMIZER_STATES}
"""Categories that both have, at the tracker's names."""
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint64": 8, "bool": 1}


@dataclass(frozen=True)
class Reading:
    """Bytes, of storages as they are: not rounded up."""

    before: int
    after_forward: int
    peak: int
    after: int
    peak_by: Mapping[str, int]
    """By the tracker's categories."""

    def less(self, other: Reading) -> tuple[int, int, int, int]:
        """How much more than ``other`` at each of its points."""
        mine, others = ((one.before, one.after_forward, one.peak, one.after) for one in (self, other))
        return tuple(a - b for a, b in zip(mine, others, strict=True))  # type: ignore[return-value]


def tracked(job: Job) -> Reading:
    """The second step of ``job``, with one micro-batch, as PyTorch's tracker sees it."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker

    from memplan.trace.distributed import rank_of, shard
    from memplan.trace.models import example_inputs, made
    from memplan.trace.step import environment, optimizer_of
    from memplan.trace.substitutions import cuda_behaviour

    with environment(), rank_of(job) as mesh, FakeTensorMode(allow_non_fake_inputs=True), cuda_behaviour():
        model: Any = made(job)
        shard(job, model, mesh)
        optimizer = optimizer_of(job, [one for one in model.parameters() if one.requires_grad])
        inputs = example_inputs(job, model)
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        tracker: Any
        if job.fsdp is None:
            tracker = MemTracker()
            tracker.track_external(model, optimizer, *inputs.values())
        else:
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs(tuple(inputs.values()))
        with tracker, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Module is None")  # a loss that is a module of its own has gone
            before = _total(tracker)
            loss = model(**inputs).loss
            forward = _total(tracker)
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
            gc.collect()
            after = _total(tracker)
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
        by = {str(getattr(kind, "value", kind)): size for kind, size in snapshot.items()}
    return Reading(before, forward, by.pop("Total"), after, by)


def _total(tracker: Any) -> int:
    (snapshot,) = tracker.get_tracker_snapshot().values()
    return int(snapshot["Total"])


def traced(job: Job) -> Reading:
    """The same of the trace, with what the tracker counts in another way counted in its way."""
    from memplan.trace.step import traced_step

    recording = traced_step(job, sums_in_place=False).recording
    parameters = sum(event.name == "parameter" for event in recording.events if isinstance(event, Hold))
    counters = COUNTER * parameters if job.optimizer in COUNTING else 0
    before, forward, peak, after, by = _folded(recording, wide=job.dtype == "fp32")
    by["Optstate"] += counters
    return Reading(before + counters, forward + counters, peak + counters, after + counters, by)


def _folded(recording: Recording, *, wide: bool) -> tuple[int, int, int, int, dict[str, int]]:
    """What is held before the step, after forward, at most, and at the end, in bytes of storages as they are; unless
    ``wide``, statistics of layer norms are of 16 bits."""
    sizes: dict[int, int] = {}
    by = dict.fromkeys(Category, 0)
    live = peak = before = forward = 0
    peak_by = dict(by)
    for event, place in zip(recording.events, recording.places, strict=True):
        if isinstance(event, Hold):
            sizes[event.tensor] = prod(event.shape) * ITEM[event.dtype]
            assert rounded(sizes[event.tensor]) == event.bytes, f"{event} is of a larger storage"
            if not wide and event.name == NORM and event.shape[-1] == 1:
                sizes[event.tensor] //= 2
        change = sizes[event.tensor] if isinstance(event, Hold) else -sizes[event.tensor]
        live += change
        by[event.category] += change
        before = live if not place.phase else before
        forward = live if place.phase == FORWARD else forward
        if place.phase and live > peak:
            peak, peak_by = live, dict(by)
    return before, forward, peak, live, {name: peak_by[category] for name, category in NAMES.items()}


PLANS = {
    "gpt2, fp32, eager": {"model": "gpt2", "dtype": "fp32", "attention": "eager"},
    "gpt2, bf16, flash": {"model": "gpt2", "dtype": "bf16", "attention": "flash"},
    "bert-large, fp32, recompute": {"model": "bert-large", "dtype": "fp32", "attention": "eager", "recompute": "full"},
    "qwen3-8b, 4 layers, bf16": {"model": "qwen3-8b", "layers": "4", "dtype": "bf16", "seq": "2048"},
    "gpt2 on 8 GPUs": {"model": "gpt2", "framework": "fsdp", "gpus": "8"},
    "llama-3-8b, 4 layers, on 8 GPUs": {"model": "llama-3-8b", "layers": "4", "framework": "fsdp", "gpus": "8"},
}
COMMON = {"framework": "single", "mbs": "2", "seq": "512"}


def main() -> int:
    print(f"{'plan':36} {'MemTracker, MiB':>16} {'trace, MiB':>12} {'left without a name':>20}")
    for name, flags in PLANS.items():
        job = planned(None, {**COMMON, **flags}).job
        theirs, ours = tracked(job), traced(job)
        left = max(map(abs, theirs.less(ours)))
        print(f"{name:36} {theirs.peak / 2**20:16.2f} {ours.peak / 2**20:12.2f} {left:18} B")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
