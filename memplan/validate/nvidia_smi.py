"""What ``nvidia-smi`` says about GPUs, where the driver's library cannot be asked itself."""

from __future__ import annotations

import csv
import subprocess

from ..plan.errors import LackingError, one_line
from ..report.units import MIB
from .devices import INSTEAD, Device, Process

GPUS = ("index", "uuid", "name", "driver_version", "memory.total", "memory.used", "memory.free")
PROCESSES = ("gpu_uuid", "pid", "process_name", "used_gpu_memory")
SECONDS = 30
"""That it may take: a driver that nothing keeps loaded needs several for eight GPUs."""


def devices_by_nvidia_smi(why: str) -> tuple[Device, ...]:
    """All that it shows. ``LackingError`` where it cannot; ``why`` the library could not be asked."""
    gpus = _asked(["--query-gpu=" + ",".join(GPUS)], why)
    return parsed(gpus, _asked(["--query-compute-apps=" + ",".join(PROCESSES)], why))


def _asked(question: list[str], why: str) -> str:
    command = ["nvidia-smi", *question, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        said = f"does not answer in {SECONDS} s" if isinstance(error, subprocess.TimeoutExpired) else "cannot be run"
        raise _missing(f"{why}, and nvidia-smi {said}") from None
    if answer.returncode:
        said = (answer.stdout + answer.stderr).decode(errors="replace").strip().partition("\n")[0]
        raise _missing(f"nvidia-smi says: {said}")
    return answer.stdout.decode(errors="replace")


def _missing(why: str) -> LackingError:
    return LackingError(one_line(f"no CUDA device here: {why}; {INSTEAD}"))


def parsed(gpus: str, processes: str) -> tuple[Device, ...]:
    """From the tables of both questions, without header and units: MiB."""
    return tuple(
        Device(
            index=int(index),
            uuid=uuid,
            name=name,
            driver=driver,
            total=int(total) * MIB,
            used=int(used) * MIB,
            free=int(free) * MIB,
            processes=tuple(_process(row) for row in _rows(processes) if row[0] == uuid),
        )
        for index, uuid, name, driver, total, used, free in _rows(gpus)
    )


def _process(row: list[str]) -> Process:
    """Names of other containers' processes are ``[Not Found]``, and sizes that the driver does not tell ``[N/A]``."""
    _, pid, name, used = row
    return Process(int(pid), None if name.startswith("[") else name, int(used) * MIB if used.isdigit() else None)


def _rows(table: str) -> list[list[str]]:
    return [row for row in csv.reader(table.splitlines(), skipinitialspace=True) if row]
