"""An independent witness: what PyTorch's own CPU allocator gave out and took back while real code ran on real tensors.

Nothing is followed and no mode sees operators: the allocator reports every block to PyTorch's profiler
(``c10/core/CPUAllocator.cpp``, ``reportMemoryUsageToProfiler``), with its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.profiler import ProfilerActivity, profile, record_function

from memplan.tape.events import rounded

Program = Callable[[], Iterator[str]]
"""Code that stops at named points. Without numbers in arithmetic: ``x * 2`` makes a tensor of the number, which is on
the host with a GPU, too."""
_POINT = "point: "


def held_by_allocator(program: Program) -> list[tuple[str, int, int]]:
    """Name, bytes held, and the most bytes held since the point before, at each point of ``program``;
    every block is rounded up to 512, as CUDA's would be."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as watched:
        for name in program():
            with record_function(_POINT + name):
                pass
    results = watched.profiler.kineto_results
    points: list[tuple[str, int, int]] = []
    live = most = 0
    for event in sorted(results.events(), key=lambda one: one.start_ns()):
        name, size = event.name(), event.nbytes()
        if name == "[memory]":
            live += rounded(size) if size > 0 else -rounded(-size)
            most = max(most, live)
        elif name.startswith(_POINT):
            points.append((name.removeprefix(_POINT), live, most))
            most = live
    return points
