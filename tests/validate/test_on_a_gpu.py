"""What a validation does on a GPU, as far as it can be seen without one: driver and ``torch.cuda`` are made up here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memplan.plan.errors import LackingError, PlanError
from memplan.plan.read import read_plan
from memplan.tape.events import Category
from memplan.trace.surroundings import Surroundings
from memplan.validate import clean, devices as validate_devices, run
from memplan.validate.devices import Device, Process
from memplan.validate.run import Where, prepared

MIB, GIB = 1 << 20, 1 << 30
GPT = {"model": "gpt2", "layers": "2", "seq": "128", "dtype": "bf16", "framework": "single"}
TITAN = {"model": "llama-3-8b", "layers": "8", "seq": "128", "framework": "fsdp", "fsdp-code": "torchtitan"}


def device(**changes: Any) -> Device:
    given: dict[str, Any] = {"name": "NVIDIA H200", "total": 143_771 * MIB, "used": 0, "free": 143_156 * MIB}
    return Device(index=0, uuid="GPU-0", driver="580.95.05", **{**given, **changes})


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    """This machine has these, and a PyTorch for them."""
    found = [device()]
    monkeypatch.setattr(validate_devices, "devices", lambda: tuple(found))
    monkeypatch.setattr(run, "version", lambda package: "2.13.0+cu130")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


def ready(where: Where | None = None, **flags: str) -> run.Prepared:
    return prepared(read_plan(None, {**GPT, **flags}).plan, where or Where(gpus=1), {})


@pytest.mark.usefixtures("gpus")
def test_the_estimate_is_for_the_gpu_that_is_here() -> None:
    """Whatever GPU the plan is for."""
    found = ready(gpu="a100-80gb")
    assert (found.gpu, found.world, found.driver) == ("h200", "real", "580.95.05")
    hardware = found.native.runs.hardware
    assert (hardware.gpu, hardware.capacity) == ("h200", 143_771 * MIB)
    assert found.native.runs.torch == "2.13"
    (stage,) = found.estimate.stages
    assert stage.beyond.cuda_context is not None
    assert stage.beyond.cuda_context > 518 * MIB  # of a bare context on an H200, and then its kernels
    summed = 2 * 50257 * 768  # the tied table's gradients, while the third tensor is their sum
    assert stage.breakdown[Category.WORKSPACES] == 64 * MIB + summed


def test_a_gpu_without_a_row(gpus: list[Device]) -> None:
    """It is measured, and what only a row would tell is left open."""
    gpus[:] = [device(name="NVIDIA X1", total=50 * GIB, free=50 * GIB)]
    found = ready()
    assert found.gpu is None
    assert found.native.runs.hardware.capacity == 50 * GIB
    (stage,) = found.estimate.stages
    assert stage.beyond.cuda_context is None
    assert stage.device is None


def test_a_gpu_in_use(gpus: list[Device]) -> None:
    gpus[:] = [device(used=3 * GIB, processes=(Process(17, "python3", 3 * GIB),))]
    with pytest.raises(
        LackingError, match=r"GPU 0 \(NVIDIA H200\) is in use: 3\.00 GiB by process 17 \(python3, 3\.00 GiB\)"
    ):
        ready()
    assert ready(Where(gpus=1, shares=True)).world == "real"


@pytest.mark.usefixtures("gpus")
def test_an_instance_of_a_gpu() -> None:
    plan = read_plan(None, GPT).plan
    with pytest.raises(PlanError, match=r"must name whole GPUs: instances \(MIG\) are not measured yet"):
        prepared(plan, Where(gpus=1), {"CUDA_VISIBLE_DEVICES": "MIG-1234"})


def test_a_plan_that_would_run_out_of_memory(gpus: list[Device]) -> None:
    gpus[:] = [device(free=100 * MIB)]
    with pytest.raises(PlanError, match=r"NVIDIA H200\) has 100 MiB free: it would run out of memory; --force"):
        ready()
    assert ready(Where(gpus=1, forces=True)).world == "real"


def test_a_pytorch_without_cuda(gpus: list[Device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "version", lambda package: "2.13.0+cpu")
    with pytest.raises(LackingError, match=r"torch 2\.13\.0\+cpu is built without CUDA"):
        ready()


@pytest.mark.usefixtures("gpus")
def test_chosen_stages() -> None:
    plan = read_plan(None, {**TITAN, "pp": "4", "gpus": "4", "gbs": "4"}).plan
    assert prepared(plan, Where(gpus=1, stages=(3, 1)), {}).ranks == (1, 3)
    assert prepared(plan, Where(gpus=1), {}).ranks == (0, 1, 2, 3)
    with pytest.raises(PlanError, match="--stage: 4 must be from 0 to 3"):
        prepared(plan, Where(gpus=1, stages=(4,)), {})
    with pytest.raises(PlanError, match="--stage: is for ranks that take turns"):
        prepared(plan, Where(gpus=4, device="cpu", stages=(1,)), {})


# -- torch.cuda ---------------------------------------------------------------------------------------------


class Cuda:
    """A device whose figures are written by who uses it. Bytes."""

    def __init__(self) -> None:
        self.allocated = self.peak = self.reserved = self.context = self.others = 0
        self.workspace = 0
        self.calls: list[str] = []

    def holds(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.allocated)

    def used(self) -> int:
        return self.others + self.context + self.reserved

    def clear(self) -> None:
        self.allocated -= self.workspace

    def reset(self) -> None:
        self.peak = self.allocated

    def start(self) -> None:
        self.calls.append("init")
        self.context = 500 * MIB


class Training:
    """Parameters of 10 MiB; an iteration peaks 6 MiB above, and the first makes 20 MiB of states and a workspace."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.iterations = cuda, 0
        cuda.holds(10 * MIB)

    def iterate(self, watch: Any) -> None:
        self.iterations += 1
        for phase, size in (("forward", 4 * MIB), ("backward", 6 * MIB), ("step", 1 * MIB)):
            watch.begins(phase, 0)
            if self.iterations == 1 and phase == "forward":
                self.cuda.workspace = 2 * MIB
                self.cuda.holds(2 * MIB)
                self.cuda.context += 30 * MIB  # kernels
            self.cuda.holds(size)
            self.cuda.holds(-size)
            if self.iterations == 1 and phase == "step":
                self.cuda.holds(20 * MIB)

    def evaluate(self) -> None:
        self.cuda.holds(3 * MIB)
        self.cuda.holds(-3 * MIB)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    stub = Cuda()
    values: dict[str, Any] = {
        "set_device": lambda index: stub.calls.append(f"device {index}"),
        "init": stub.start,
        "synchronize": lambda: None,
        "reset_peak_memory_stats": stub.reset,
        "memory_allocated": lambda: stub.allocated,
        "max_memory_allocated": lambda: stub.peak,
        "memory_reserved": lambda: stub.reserved,
        "max_memory_reserved": lambda: stub.reserved,
        "empty_cache": lambda: stub.calls.append("empty"),
    }
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", stub.clear, raising=False)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, device="cpu", **more: empty(*sizes, **more))
    return stub


def measured(cuda: Cuda, *, communicates: bool = False, driver: bool = True) -> clean.Clean:
    @contextmanager
    def built() -> Iterator[Training]:
        if communicates:
            cuda.context += 100 * MIB  # communicators
        yield Training(cuda)

    def used() -> int | None:
        return cuda.used() if driver else None

    within = Surroundings(fake=False, device="cuda", warmup=2)
    return clean.measured(built(), within, 3, 0, used, lambda what: None, communicates=communicates, gives_back=True)


def test_what_a_rank_reads(cuda: Cuda) -> None:
    """The headline is of the timed iterations alone, the context of a rank without communicators of the end, with
    kernels, and what others use of the device is not its own."""
    cuda.others = 70 * MIB
    found = measured(cuda)
    assert (found.allocated, found.static, found.workspaces) == (38 * MIB, 32 * MIB, 2 * MIB)
    assert (found.context, found.nccl) == (530 * MIB, None)
    assert found.device_bytes == 530 * MIB + cuda.reserved
    assert len(found.seconds) == 3
    moments = {moment.name: (moment.allocated, moment.end) for moment in found.moments}
    assert moments["initialisation"] == (10 * MIB, 10 * MIB)
    assert moments["iteration"] == (38 * MIB, 32 * MIB)
    assert moments["forward"] == (36 * MIB, 32 * MIB)
    assert moments["backward"] == (38 * MIB, 32 * MIB)
    assert moments["step"] == (33 * MIB, 32 * MIB)
    assert moments["evaluation"] == (35 * MIB, 32 * MIB)
    assert cuda.calls == ["device 0", "init", "empty", "empty"]


def test_communicators_are_what_came_after_the_context(cuda: Cuda) -> None:
    """With the kernels that were loaded meanwhile."""
    found = measured(cuda, communicates=True)
    assert (found.context, found.nccl) == (500 * MIB, 130 * MIB)


def test_a_driver_that_does_not_say(cuda: Cuda) -> None:
    found = measured(cuda, driver=False)
    assert (found.context, found.nccl, found.device_bytes) == (None, None, None)
    assert found.allocated == 38 * MIB


def test_a_driver_that_is_too_old(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch says so in the first line of its error, which is what a rank tells."""

    def refuses() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020). Please update")

    monkeypatch.setattr(torch.cuda, "init", refuses)
    with pytest.raises(RuntimeError, match="too old") as raised:
        measured(cuda)
    told: list[Any] = []
    from memplan.validate.worker import _tell

    _tell(raised.value, SimpleNamespace(failed=lambda kind, message, **more: told.append((kind, message))))  # type: ignore[arg-type]
    assert told == [("error", f"RuntimeError: {raised.value}")]
