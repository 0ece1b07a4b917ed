"""Random programs of requests on PyTorch's real allocator and on memplan's, compared after every request.

    python -m benchmarks.campaign.allocator [--conf expandable|split] [--limited] [--programs N] [--length N]

Sizes and lives are drawn with fixed seeds. Free blocks of equal size are told apart by age here (torch 2.13), in older
releases by address; where a program parts ways, the note says whether its segments' addresses rose with their age.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.memory import DeviceMemory, OutOfMemoryError
from tests.oracle.caching_allocator import CachingAllocator

from .readings import Reading, answer

KIB, MIB = 1 << 10, 1 << 20
SEGMENT = 2 * MIB
"""What the allocator takes from the device is a multiple of this."""
MOST_LIVE = 6 << 30
"""Bytes of a program's tensors at once."""
CONF = {
    "": "",
    "expandable": "expandable_segments:True",
    "split": "max_split_size_mb:64,roundup_power2_divisions:4",
}


class Request(NamedTuple):
    """A tensor begins, or ends where ``size`` is ``None``."""

    key: int
    size: int | None


class State(NamedTuple):
    """Bytes, and counts."""

    allocated: int
    reserved: int
    retries: int
    refused: int
    """Requests that ended in an error."""


class Allocator(Protocol):
    """One that runs programs: the real one, or a model of it."""

    def allocate(self, key: int, size: int) -> bool:
        """Whether there was memory."""
        ...

    def free(self, key: int) -> None: ...

    def state(self) -> State: ...


# -- programs -----------------------------------------------------------------------------------------------


def program(seed: int, length: int) -> list[Request]:
    """``length`` requests: many small ones, some of hundreds of MiB; what is live ends in any order."""
    chance, live, held, made = random.Random(seed), dict[int, int](), 0, list[Request]()
    for key in range(length):
        size = _size(chance)
        while live and (held + size > MOST_LIVE or chance.random() < 0.48):
            ended = chance.choice(list(live))
            held -= live.pop(ended)
            made.append(Request(ended, None))
        live[key] = size
        held += size
        made.append(Request(key, size))
    return made + [Request(key, None) for key in live]


def _size(chance: random.Random) -> int:
    kind = chance.random()
    if kind < 0.40:
        return chance.randint(1, MIB)
    if kind < 0.70:
        return chance.randint(MIB, 10 * MIB)
    return chance.randint(10 * MIB, 200 * MIB) if kind < 0.95 else chance.randint(200 * MIB, 900 * MIB)


# -- memplan's ----------------------------------------------------------------------------------------------


class Modelled:
    """memplan's allocator."""

    def __init__(self, inner: CachingAllocator) -> None:
        self.inner = inner

    def allocate(self, key: int, size: int) -> bool:
        try:
            self.inner.allocate(key, size)
        except OutOfMemoryError:
            return False
        return True

    def free(self, key: int) -> None:
        self.inner.free(key)

    def state(self) -> State:
        inner = self.inner
        return State(inner.allocated, inner.reserved, inner.retries, inner.ooms)


class Limit(NamedTuple):
    """What ``torch.cuda.set_per_process_memory_fraction`` is told."""

    bytes: int
    total: int
    """Of the device."""

    @property
    def fraction(self) -> float:
        """Of ``total``; half a byte more, so that rounding down gives ``bytes`` again."""
        return (self.bytes + 0.5) / self.total


def modelled(settings: AllocatorSettings, limit: Limit | None) -> Allocator:
    if limit is None:
        return Modelled(CachingAllocator(settings))
    limited = replace(settings, memory_fraction=limit.fraction)
    return Modelled(CachingAllocator(limited, DeviceMemory(limit.total, limit.total)))


# -- PyTorch's ----------------------------------------------------------------------------------------------


class Real:
    """PyTorch's, on the first device. Nothing else of this process may ask it for memory."""

    def __init__(self, limit: Limit | None) -> None:
        import torch

        self.torch: Any = torch
        self.cuda: Any = torch.cuda
        self.addresses: dict[int, int] = {}
        self.rose: bool = True
        self.cuda.init()
        self.cuda.set_per_process_memory_fraction(1.0 if limit is None else limit.fraction)
        self.cuda.empty_cache()
        self.before = self._counts()
        self._newest: dict[bool, int] = {}
        self._segments: set[int] = set()

    def allocate(self, key: int, size: int) -> bool:
        try:
            self.addresses[key] = self.cuda.caching_allocator_alloc(size)
        except self.torch.OutOfMemoryError:
            return False
        return True

    def free(self, key: int) -> None:
        self.cuda.caching_allocator_delete(self.addresses.pop(key))

    def state(self) -> State:
        stats = self.cuda.memory_stats_as_nested_dict()
        return State(
            stats["allocated_bytes"]["all"]["current"],
            stats["reserved_bytes"]["all"]["current"],
            stats["num_alloc_retries"] - self.before[0],
            stats["num_ooms"] - self.before[1],
        )

    def _counts(self) -> tuple[int, int]:
        stats = self.cuda.memory_stats_as_nested_dict()
        return stats["num_alloc_retries"], stats["num_ooms"]

    def look(self) -> None:
        """Notes whether new segments lie above older ones of their kind."""
        for segment in self.cuda.memory_snapshot():
            address, small = segment["address"], segment["segment_type"] == "small"
            if address not in self._segments:
                self._segments.add(address)
                self.rose &= address > self._newest.get(small, 0)
                self._newest[small] = max(address, self._newest.get(small, 0))

    def close(self) -> None:
        for key in list(self.addresses):
            self.free(key)
        self.cuda.empty_cache()


# -- side by side -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """A program on both."""

    real: State
    """At its end, with the peaks of sizes."""
    modelled: State | None
    apart: int | None
    """The first request after which they differ."""
    why: str = ""


def compared(requests: Sequence[Request], real: Allocator, model: Allocator | None) -> Outcome:
    """Runs ``requests`` on both. A request that one refuses is not made again; the other then has it alone."""
    peaks, apart, why = [State(0, 0, 0, 0)] * 2, None, ""
    refused: list[set[int]] = [set(), set()]
    for at, request in enumerate(requests):
        states = []
        for which, allocator in enumerate((real, model)):
            if allocator is None:
                continue
            if request.size is not None:
                if not allocator.allocate(request.key, request.size):
                    refused[which].add(request.key)
            elif request.key not in refused[which]:
                allocator.free(request.key)
            state = allocator.state()
            states.append(state)
            peaks[which] = _higher(peaks[which], state)
        if apart is None and len(states) == 2 and states[0] != states[1]:
            apart = at
            what = "the end of a tensor" if request.size is None else f"{request.size:,} bytes"
            why = f"request {at}, {what}: {states[0]} measured, {states[1]} estimated"
    return Outcome(peaks[0], peaks[1] if model is not None else None, apart, why)


def _higher(peak: State, now: State) -> State:
    return State(max(peak.allocated, now.allocated), max(peak.reserved, now.reserved), now.retries, now.refused)


def limit_for(requests: Iterable[Request], settings: AllocatorSettings, seed: int) -> int:
    """Bytes between what the program has live and what it would reserve; an odd number of MiB, so that rounding a
    fraction of the device's memory changes nothing."""
    allocator = CachingAllocator(settings)
    for request in requests:
        if request.size is None:
            allocator.free(request.key)
        else:
            allocator.allocate(request.key, request.size)
    low, high = allocator.peak_allocated, allocator.peak_reserved
    part = random.Random(seed).uniform(-0.1, 0.9)
    return max(1, int(low + part * (high - low)) // SEGMENT) * SEGMENT + MIB


Runs = Callable[[Limit | None], Allocator]


def outcomes(
    seeds: Iterable[int], length: int, settings: AllocatorSettings, total: int | None, real: Runs
) -> list[tuple[Hashable, Outcome]]:
    """Of a program for each seed; ``total``: under a limit, on a device with so many bytes."""
    found: list[tuple[Hashable, Outcome]] = []
    for seed in seeds:
        requests = program(seed, length)
        limit = None if total is None else Limit(limit_for(requests, settings, seed), total)
        allocator = real(limit)
        outcome = compared(requests, allocator, modelled(settings, limit))
        if outcome.apart is not None and isinstance(allocator, Real):
            outcome = _again(requests, outcome, real, limit)
        if isinstance(allocator, Real):
            allocator.close()
        found.append((seed, outcome))
    return found


def _again(requests: Sequence[Request], outcome: Outcome, real: Runs, limit: Limit | None) -> Outcome:
    """Where segments lay, up to where the program parted ways."""
    allocator = real(limit)
    assert isinstance(allocator, Real)
    assert outcome.apart is not None
    missing = set()
    for request in requests[: outcome.apart + 1]:
        if request.size is None:
            if request.key not in missing:
                allocator.free(request.key)
        elif not allocator.allocate(request.key, request.size):
            missing.add(request.key)
        allocator.look()
    allocator.close()
    order = "rose with their age" if allocator.rose else "did not rise with their age"
    return Outcome(outcome.real, outcome.modelled, outcome.apart, f"{outcome.why}; addresses of segments {order}")


def readings(found: Iterable[tuple[Hashable, Outcome]]) -> list[Reading]:
    """Peaks of sizes and the counts at the end, program by program."""
    made = []
    for seed, outcome in found:
        known = outcome.modelled
        for name in State._fields:
            unit: Any = "bytes" if name in ("allocated", "reserved") else "count"
            estimated = None if known is None else getattr(known, name)
            made.append(Reading(f"{name}, program {seed}", unit, getattr(outcome.real, name), estimated))
    return made


def device_memory() -> int:
    """Bytes of the first device, as ``setMemoryFraction`` counts them."""
    import torch

    return int(torch.cuda.mem_get_info()[1])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--conf", choices=tuple(CONF), default="")
    parser.add_argument("--limited", action="store_true")
    parser.add_argument("--programs", type=int, default=10)
    parser.add_argument("--length", type=int, default=1500)
    given = parser.parse_args()
    conf = CONF[given.conf]
    os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    os.environ["PYTORCH_ALLOC_CONF"] = conf  # read when torch is imported
    total = device_memory() if given.limited else None
    found = outcomes(range(given.programs), given.length, AllocatorSettings.parse(conf), total, Real)
    apart = [f"program {seed}: {outcome.why}" for seed, outcome in found if outcome.apart is not None]
    equal = len(found) - len(apart)
    print(json.dumps(answer(readings(found), "; ".join([f"{equal} of {len(found)} equal at every request", *apart]))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
