"""Probes of the campaign on what stands in for ``torch.cuda`` and the driver here: what they would say of a GPU that
does as memplan has it, and of one that does not."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.campaign import allocator, edges, kernels, libraries, marked
from benchmarks.campaign.allocator import Limit, Modelled, Request, State
from memplan.allocator.caching import AllocatorSettings
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.search.time.rates import rates_of
from memplan.validate.devices import Device
from tests.oracle import cuda_allocator
from tests.oracle.caching_allocator import CachingAllocator
from tests.oracle.cuda_allocator import TORCH

MIB = 1 << 20
TOTAL = 143_000 * MIB
PROGRAM = (
    Request(0, 300),
    Request(1, 30 * MIB),
    Request(2, 5 * MIB),
    Request(1, None),
    Request(3, 29 * MIB),
    Request(0, None),
)


class Cuda:
    """What a probe uses of ``torch.cuda``: memplan's allocator, refusing beyond the fraction that was set. ``wastes``:
    bytes that every request takes besides, which memplan's does not."""

    def __init__(self, wastes: int = 0) -> None:
        self.inner, self.wastes = CachingAllocator(), wastes
        self.sizes: dict[int, int] = {}
        self.limit, self.ooms, self.next, self.emptied = TOTAL, 0, 1, 0

    def init(self) -> None: ...

    def mem_get_info(self) -> tuple[int, int]:
        return TOTAL, TOTAL

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        self.limit = int(fraction * TOTAL)

    def empty_cache(self) -> None:
        self.emptied += 1
        self.inner.empty_cache()

    def caching_allocator_alloc(self, size: int) -> int:
        if self.inner.allocated + size > self.limit:
            self.ooms += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")
        address, self.next = self.next, self.next + 1
        self.inner.allocate(address, size + self.wastes)
        return address

    def caching_allocator_delete(self, address: int) -> None:
        self.inner.free(address)

    def memory_stats_as_nested_dict(self) -> dict[str, Any]:
        sizes = {"allocated_bytes": self.inner.allocated, "reserved_bytes": self.inner.reserved}
        counts = {"num_alloc_retries": 7, "num_ooms": 3 + self.ooms}  # of what ran before in the process
        return {**{name: {"all": {"current": size}} for name, size in sizes.items()}, **counts}

    def memory_snapshot(self) -> list[dict[str, Any]]:
        """A segment for 20 MiB lies below the older one for 30 MiB."""
        kinds = [("small", 5), ("large", 9), ("large", 4)]
        return [{"address": address, "segment_type": kind} for kind, address in kinds]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cuda]:
    """Puts one in place of ``torch.cuda``."""

    def made(**given: Any) -> Cuda:
        stub = Cuda(**given)
        stand_in = SimpleNamespace(cuda=stub, OutOfMemoryError=torch.OutOfMemoryError)
        monkeypatch.setitem(sys.modules, "torch", stand_in)
        return stub

    return made


# -- the allocator ------------------------------------------------------------------------------------------


def test_equal_at_every_request(cuda: Callable[..., Cuda]) -> None:
    stub = cuda()
    found = allocator.outcomes(range(3), 120, AllocatorSettings(), None, allocator.Real)
    assert [outcome.apart for _, outcome in found] == [None] * 3
    readings = allocator.readings(found)
    assert all(reading.exact for reading in readings)
    assert [reading.name for reading in readings[:4]] == [f"{name}, program 0" for name in State._fields]
    assert readings[0].measured > 100 * MIB
    assert stub.inner.reserved == 0


def test_the_first_request_that_differs_is_named(cuda: Callable[..., Cuda], monkeypatch: pytest.MonkeyPatch) -> None:
    """And whether segments lay in the order of their age, by which blocks of equal size are told apart."""
    cuda(wastes=512)
    monkeypatch.setattr(allocator, "program", lambda seed, length: list(PROGRAM))
    ((_, outcome),) = allocator.outcomes([0], 0, AllocatorSettings(), None, allocator.Real)
    assert outcome.apart == 0
    assert outcome.why.startswith("request 0, 300 bytes: State(allocated=1024")
    assert "State(allocated=512" in outcome.why
    assert outcome.why.endswith("addresses of segments did not rise with their age")


def test_requests_that_are_refused_are_counted(cuda: Callable[..., Cuda]) -> None:
    """A limit is told as a fraction of the device's memory, and is that limit again to the byte."""
    stub = cuda()
    limit = Limit(33 * MIB, TOTAL)
    real = allocator.Real(limit)
    assert stub.limit == 33 * MIB
    outcome = allocator.compared(PROGRAM, real, None)
    assert outcome.real == State(30 * MIB + 512, 32 * MIB, 0, 1)
    assert outcome.modelled is None
    real.close()
    assert stub.inner.allocated == 0


def test_one_that_refuses_alone_parts_ways() -> None:
    class Stingy(Modelled):
        def allocate(self, key: int, size: int) -> bool:
            return size != 5 * MIB and super().allocate(key, size)

    outcome = allocator.compared(PROGRAM, Stingy(CachingAllocator()), Modelled(CachingAllocator()))
    assert outcome.apart == 2
    assert outcome.real.allocated < (outcome.modelled or outcome.real).allocated


def test_limits_leave_too_little_for_what_is_reserved() -> None:
    """So that there is something to retry; and they are no multiple of a segment."""
    for seed in range(5):
        requests = allocator.program(seed, 200)
        whole = CachingAllocator()
        for request in requests:
            if request.size is None:
                whole.free(request.key)
            else:
                whole.allocate(request.key, request.size)
        limit = allocator.limit_for(requests, AllocatorSettings(), seed)
        assert 0 < limit < whole.peak_reserved
        assert limit % (2 * MIB) == MIB
        assert int(Limit(limit, TOTAL).fraction * TOTAL) == limit
        assert whole.allocated == 0


def test_memplan_s_allocator_under_a_limit() -> None:
    """5 MiB find no segment of 20 beside the 30 that are live."""
    model = allocator.modelled(AllocatorSettings(), Limit(33 * MIB, TOTAL))
    outcome = allocator.compared(PROGRAM, model, None)
    assert outcome.real == State(30 * MIB + 512, 32 * MIB, 1, 1)


def asked(request: Request) -> cuda_allocator.Request:
    if request.size is None:
        return cuda_allocator.Request("free", request.key)
    return cuda_allocator.Request("allocate", request.key, request.size)


@pytest.mark.skipif(TORCH not in os.environ, reason=f"needs the allocator of a CUDA build of torch in {TORCH}")
@pytest.mark.parametrize("conf", allocator.CONF.values())
@pytest.mark.parametrize("limited", [False, True])
def test_pytorch_s_own_allocator_says_the_same(conf: str, limited: bool, tmp_path: Path) -> None:
    """On a runtime that only counts bytes, whose addresses rise: also with a torch before 2.13."""
    build = cuda_allocator.built(Path(os.environ[TORCH]), tmp_path)
    settings = AllocatorSettings.parse(conf)
    for seed in range(4):
        requests = allocator.program(seed, 1500)
        limit = Limit(allocator.limit_for(requests, settings, seed), TOTAL) if limited else None
        fraction = "" if limit is None else f",per_process_memory_fraction:{limit.fraction!r}"
        ends = [asked(request) for request in requests]
        counts, _ = cuda_allocator.counted(build, ends, f"{conf}{fraction}".lstrip(","), TOTAL)
        model, refused = allocator.modelled(settings, limit), set[int]()
        for at, (request, real) in enumerate(zip(requests, counts, strict=True)):
            if request.size is not None:
                refused |= set() if model.allocate(request.key, request.size) else {request.key}
            elif request.key not in refused:
                model.free(request.key)
            assert model.state() == State(*real), (seed, at, request)


def test_the_settings_of_every_variant_are_modelled() -> None:
    for conf in allocator.CONF.values():
        AllocatorSettings.parse(conf)


# -- libraries ----------------------------------------------------------------------------------------------


def test_each_library_has_what_it_added() -> None:
    """The context is what the driver shows more than before, without the allocator's segments; then each library's
    first use adds to either."""
    state = {"used": 100, "allocated": 0, "reserved": 0}

    def takes(**more: int) -> Callable[[], None]:
        def run() -> None:
            for name, size in more.items():
                state[name] += size

        return run

    device = libraries.Device(*(lambda name=name: state[name] for name in state), lambda: None)  # type: ignore[misc]

    def fails() -> None:
        raise RuntimeError("No available kernel")

    uses = [
        libraries.Use("cuBLAS", takes(used=60, reserved=40, allocated=32), 33),
        libraries.Use("cuDNN", fails, 0),
        libraries.Use("sort", takes(used=5), 0),
    ]
    start = takes(used=502, reserved=2, allocated=1)
    found = {one.name: (one.measured, one.estimated) for one in libraries.measured(start, lambda: uses, 518, device)}
    assert found == {
        "context, bare": (500, 518),
        "cuBLAS, workspace": (32, 33),
        "cuBLAS, beside the allocator": (20, None),
        "sort, workspace": (0, 0),
        "sort, beside the allocator": (5, None),
        "context, with all kernels": (525, None),
    }


def test_uses_of_libraries_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, all but the attention kernels that only CUDA has."""
    monkeypatch.setattr(torch, "randn", _on_a_cpu(torch.randn))
    uses = list(libraries.uses_of(torch, {"cublas_workspace": 7, "cublaslt_workspace": 5}))
    assert [use.takes for use in uses] == [0, 7, 0, 5, 7, 0, 0, 0, 0, 0]
    ran = []
    for use in uses:
        if "attention" not in use.name:
            use.what()
            ran.append(use.name)
    assert len(ran) == 7


def _on_a_cpu(made: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *sizes, device="", **more: made(*(min(size, 64) for size in sizes), **more)


# -- kernels ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rates() -> Any:
    return rates_of(resolve(read_plan(None, {"model": "llama-3-8b", "gpu": "h200"}).plan))


@pytest.mark.parametrize("kind", kernels.KINDS)
def test_kernels_run_and_are_predicted(kind: str, rates: Any) -> None:
    small = list(kernels.KINDS[kind](torch, "cpu", True))
    assert len({kernel.name for kernel in _large(kind)}) == len(small) == len(list(_large(kind)))
    assert kernels.seconds(torch, small[0], "cpu", 1) > 0
    assert all(1e-6 < kernel.predicted(rates) < 1 for kernel in _large(kind))


def _large(kind: str) -> Iterator[kernels.Kernel]:
    return kernels.KINDS[kind](torch, "cpu", False)


def test_a_shape_that_fails_costs_only_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def products(torch: Any, device: str, small: bool) -> Iterator[kernels.Kernel]:
        yield kernels.Kernel("bad", lambda: (torch.ones(2, 3), torch.ones(2, 3)), torch.mm, 24, lambda rates: 1.0)
        yield kernels.Kernel("good", lambda: (torch.ones(2, 2), torch.ones(2, 2)), torch.mm, 16, lambda rates: 1.0)

    monkeypatch.setitem(kernels.KINDS, "products", products)
    monkeypatch.setattr(sys, "argv", ["kernels", "products", "--device", "cpu"])
    assert kernels.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["readings"]] == ["good"]
    assert found["note"].startswith("bad: mat1 and mat2 shapes cannot be multiplied")


def test_times_between_events() -> None:
    """Several calls, divided by how many there were; milliseconds."""
    ran: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None:
            ran.append("record")

        def elapsed_time(self, end: object) -> float:
            return 10.0

    stub = SimpleNamespace(cuda=SimpleNamespace(Event=Event, synchronize=lambda: ran.append("synchronize")))
    assert kernels._on_a_gpu(stub, ran.append, ("run",)) == pytest.approx(0.01 / kernels.IN_A_ROW)
    assert ran == ["synchronize", "record", *["run"] * kernels.IN_A_ROW, "record", "synchronize"]


# -- tests that need a GPU --------------------------------------------------------------------------------


def test_tests_that_failed_are_named() -> None:
    report = """<testsuites><testsuite tests="4">
      <testcase name="good"/><testcase name="away"><skipped message="no driver"/></testcase>
      <testcase name="bad"><failure message="assert 1 == 2&#10;more">x</failure></testcase>
      <testcase name="worse"><error message="no module">x</error></testcase></testsuite></testsuites>"""
    (reading,), note = marked.outcome(report)
    assert (reading.measured, reading.estimated) == (1, 3)
    assert note == "1 skipped; bad: assert 1 == 2; worse: no module"


# -- verdicts at the edge -----------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [0, 1, 2, 3, 17, 64, 100])
def test_the_largest_that_fits(last: int) -> None:
    assert edges.largest(lambda size: size <= last) == last


@pytest.mark.parametrize("gpu", ["h200", "t4", None])
def test_the_largest_micro_batch_fits_the_gpu_and_the_next_does_not(gpu: str | None) -> None:
    """Also of a GPU whose context nobody has published, or that memplan does not know."""
    flags = {"model": "gpt2", "seq": "1024", "dtype": "bf16"}
    fits = edges.fitting(flags, gpu, 10 << 30)
    most = edges.largest(fits)
    assert 0 < most < 64
    assert (fits(most), fits(most + 1)) == (True, False)


def record(failures: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> dict[str, Any]:
    stage = {"requested_bytes": 10, "allocated_bytes": 12, "reserved_bytes": 20}
    return {"run": {"failures": failures, "ranks": ranks}, "estimate": {"stages": [stage], "verdict": "fits"}}


def test_what_an_edge_says() -> None:
    """It ran as memplan said; it ran out of memory as memplan said; and neither."""
    rank = {"stage": 0, "requested": 10, "allocated": None, "reserved": 21}
    full = {"kind": "out-of-memory", "message": "CUDA out of memory"}
    ran, note = edges.readings(4, True, record([], [rank]))
    assert [(one.name, one.measured, one.estimated) for one in ran] == [
        ("out of memory at mbs 4", 0, 0),
        ("requested at mbs 4", 10, 10),
        ("reserved at mbs 4", 21, 20),
    ]
    assert note == "mbs 4, estimated fits: it ran"
    (failed,), _ = edges.readings(5, False, record([full], []))
    assert failed.exact
    (wrong,), note = edges.readings(4, True, record([full], []))
    assert (wrong.measured, wrong.estimated) == (1, 0)
    assert "CUDA out of memory" in note
    _, note = edges.readings(4, True, record([{"kind": "error", "message": "no kernel"}], []))
    assert note == "mbs 4 failed otherwise: no kernel"


def test_both_edges_are_tried(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tried: list[int] = []

    def run(flags: dict[str, str], mbs: int, device: str) -> dict[str, Any]:
        tried.append(mbs)
        return record([], [])

    h200 = Device(0, "GPU-0", "NVIDIA H200", "580.1", TOTAL, 0, TOTAL)
    monkeypatch.setattr(edges, "first_device", lambda: h200)
    monkeypatch.setattr(edges, "tried", run)
    monkeypatch.setattr(sys, "argv", ["edges", "--model", "gpt2", "--seq", "1024", "--dtype", "bf16"])
    assert edges.main() == 0
    low, high = tried
    assert high == low + 1
    found = json.loads(capsys.readouterr().out)["readings"]
    assert [(one["measured"], one["estimated"]) for one in found] == [(0, 0), (0, 1)]
