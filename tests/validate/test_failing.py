"""Which of several ranks failed first, from what they left: texts as gloo, NCCL and PyTorch print them."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.validate.failing import LINES, failures_of, hung, last_lines, raised, stack
from memplan.validate.run_files import Progress, RankFiles, write_json

GLOO = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4"
)
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:328, "
    "remote process exited or there was a network error, NCCL version 2.21.5"
)
RESET = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:34216: Connection "
    "reset by peer. This is typically caused by a remote worker crashing."
)
STORE = "torch.distributed.DistNetworkError: failed to recv, got 0 bytes"


def traceback(error: str, prefix: str = "") -> str:
    lines = ("Traceback (most recent call last):", '  File "worker.py", line 3, in main', "    step()", error)
    return "".join(f"{prefix}{line}\n" for line in lines)


def left(folder: Path, rank: int, at: float, code: int = 1, log: str = "") -> None:
    files = RankFiles(folder, rank)
    files.log.write_text(log, encoding="utf-8")
    write_json(files.end, {"code": code, "at": at})


@pytest.mark.parametrize("consequence", [GLOO, RESET, NCCL, STORE])
def test_consequences(tmp_path: Path, consequence: str) -> None:
    """Even if they were noted sooner than the death that caused them."""
    left(tmp_path, 0, 1.0, log=traceback(consequence, "[rank0]: "))
    left(tmp_path, 1, 1.1, code=-9)
    left(tmp_path, 2, 1.2, code=-15)
    (failure,) = failures_of(tmp_path, 9.0, {})
    assert (failure.rank, failure.kind) == (1, "died")


def test_watchdog(tmp_path: Path) -> None:
    """NCCL's ends the process by an exception of C++ that nobody catches."""
    what = (
        "NCCL error: remote process exited or there was a network error, NCCL version 2.14.3\n"
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
    )
    log = f"terminate called after throwing an instance of 'std::runtime_error'\n  what():  {what}\n"
    left(tmp_path, 0, 1.0, code=-6, log=f"{log}Fatal Python error: Aborted\n\nThread 0x01 (most recent call first):\n")
    left(tmp_path, 1, 1.1, code=-11)
    (failure,) = failures_of(tmp_path, 9.0, {})
    assert (failure.rank, failure.message) == (1, "ended by SIGSEGV")
    RankFiles(tmp_path, 1).end.unlink()
    (failure,) = failures_of(tmp_path, 9.0, {})
    assert failure.message == f"ended by SIGABRT: {what.splitlines()[0]}"


def test_consequences_alone(tmp_path: Path) -> None:
    """The cause was on another machine: the first who noticed speaks."""
    left(tmp_path, 0, 1.1, log=traceback(NCCL))
    left(tmp_path, 1, 1.0, log=traceback(GLOO))
    (failure,) = failures_of(tmp_path, 9.0, {})
    assert (failure.rank, failure.message) == (1, GLOO)


def test_several_that_failed_by_themselves(tmp_path: Path) -> None:
    out = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"
    left(tmp_path, 0, 1.2, log=traceback(out, "[rank0]: "))
    left(tmp_path, 1, 1.1, log=traceback("ValueError: mine"))
    assert [(one.rank, one.kind, one.message) for one in failures_of(tmp_path, 9.0, {})] == [
        (1, "error", "ValueError: mine"),
        (0, "out-of-memory", out),
    ]


def test_what_came_after_the_run_was_ended(tmp_path: Path) -> None:
    left(tmp_path, 0, 5.1, code=-15)
    left(tmp_path, 1, 5.2, code=-9)
    assert failures_of(tmp_path, 5.0, {}) == ()


def test_ended_from_outside(tmp_path: Path) -> None:
    """SIGTERM that did not come from here, as a scheduler sends it to one rank."""
    left(tmp_path, 0, 1.0, code=-15)
    (failure,) = failures_of(tmp_path, 9.0, {})
    assert failure.message == "ended by SIGTERM"


def test_traceback_of_who_then_hangs(tmp_path: Path) -> None:
    RankFiles(tmp_path, 0).log.write_text(traceback("KeyError: 'x'"), encoding="utf-8")
    (failure,) = failures_of(tmp_path, 9.0, {0: 1.0})
    assert (failure.kind, failure.message) == ("error", "KeyError: 'x'")


def test_traceback_that_did_not_matter(tmp_path: Path) -> None:
    left(tmp_path, 0, 2.0, code=0, log=traceback("KeyError: 'x'"))
    assert failures_of(tmp_path, 9.0, {0: 1.0}) == ()


def test_chained_errors() -> None:
    first = traceback("KeyError: 'x'")
    second = traceback("memplan.validate.Odd: what the user is to read")
    printed = f"{first}\nDuring handling of the above exception, another exception occurred:\n\n{second}bye\n"
    assert raised(tuple(printed.splitlines())) == "memplan.validate.Odd: what the user is to read"
    assert raised(("ValueError: of a log", "no traceback")) is None


def test_lines_are_the_last_that_are_not_blank(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"{number}\n\n" for number in range(100_000)), encoding="utf-8")
    assert last_lines(log) == tuple(str(number) for number in range(100_000 - LINES, 100_000))


DUMP = """\
working
Fatal Python error: Aborted

Thread 0x00007f0000000001 (most recent call first):
  File "/lib/threading.py", line 1 in wait

Current thread 0x00007f0000000002 (most recent call first):
  File "/lib/torch/distributed/distributed_c10d.py", line 5356 in barrier
  File "worker.py", line 9 in main

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""


def test_stack(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(DUMP, encoding="utf-8")
    lines = stack(log)
    assert lines[0].startswith("Current thread")
    assert [line.strip().rpartition(" ")[2] for line in lines[1:]] == ["barrier", "main"]


def test_who_is_hung(tmp_path: Path) -> None:
    """Not the one that was silent for longest, if it waits in a collective for another; nor one that is done."""
    for rank, dump in ((0, DUMP), (1, DUMP.replace("distributed_c10d", "optim")), (2, "")):
        RankFiles(tmp_path, rank).log.write_text(dump, encoding="utf-8")
    progress = (Progress(0, "step 1", 1.0), Progress(1, "step 1", 2.0), Progress(2, "done", 0.5, done=True))
    failure = hung(tmp_path, progress, 600)
    assert (failure.rank, failure.when) == (1, "step 1")
    assert failure.message == (
        "nothing happened for 600 s; it stood outside of any collective, while rank 0 waited in one"
    )
    failure = hung(tmp_path, progress[::2], 600)
    assert (failure.rank, failure.message) == (0, "nothing happened for 600 s; it stood in a collective")
    assert hung(tmp_path, (), 5).message == "no rank began anything in 5 s"
