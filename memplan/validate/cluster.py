"""How a run's ranks are started, and which rank of which run this process is where ``torchrun`` or ``srun`` started it.

A batch script is no rank, though Slurm gives it ``SLURM_PROCID=0`` and the job's ``SLURM_NTASKS``; only ``srun`` sets
the variables of a step (``SLURM_STEP_NODELIST``, ``SLURM_STEP_NUM_TASKS``; "OUTPUT ENVIRONMENT VARIABLES" of srun's
manual). Neither is the shell of ``srun --pty``, a step of one task.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

from ..plan.errors import ABSENT, Origin, PlanError
from ..values import dataclass

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
VARIABLES: Mapping[str, tuple[str, str]] = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}
"""In which each says a process's rank, and of how many."""
PORTS = range(20_000, 30_000)
"""From which a job's port is chosen: below those that Linux gives out by itself (32768 on), and clear of PyTorch's
29500 by more than chance would have it for most jobs."""


@dataclass(frozen=True, slots=True)
class Membership:
    """A process's place in a run that something else started."""

    launcher: Literal["torchrun", "srun"]
    rank: int
    world: int
    local_rank: int
    """Its device's number among those that it sees."""
    address: str
    """Host of rank 0, where all meet."""
    port: int

    @property
    def variables(self) -> dict[str, str]:
        """By which PyTorch's ``env://`` finds the others."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def membership(environment: Mapping[str, str], gpus: int) -> Membership | None:
    """The place of the process that has this environment, or ``None`` if nothing started it as a rank. ``PlanError``
    where the run is of another size than ``gpus``, or its variables contradict each other."""
    if all(environment.get(name) for name in TORCHRUN):
        found = _by_torchrun(environment)
    elif environment.get("SLURM_STEP_NODELIST") and environment.get("SLURM_PROCID"):
        if _count(environment, "SLURM_STEP_NUM_TASKS") == 1:
            return None
        found = _by_srun(environment)
    else:
        return None
    _check(found, gpus)
    return found


def _by_torchrun(environment: Mapping[str, str]) -> Membership:
    return Membership(
        "torchrun",
        _count(environment, "RANK"),
        _count(environment, "WORLD_SIZE"),
        _count(environment, "LOCAL_RANK"),
        environment["MASTER_ADDR"],
        _count(environment, "MASTER_PORT"),
    )


def _by_srun(environment: Mapping[str, str]) -> Membership:
    address = environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"])
    given = "MASTER_PORT" if environment.get("MASTER_PORT") else None
    return Membership(
        "srun",
        _count(environment, "SLURM_PROCID"),
        _count(environment, "SLURM_STEP_NUM_TASKS"),
        0 if _sees_one_gpu(environment) else _count(environment, "SLURM_LOCALID"),
        address,
        _count(environment, given) if given else port_of(environment),
    )


def _sees_one_gpu(environment: Mapping[str, str]) -> bool:
    """Slurm shows a task its own GPUs alone where it binds them (``--gpus-per-task``, ``--gpu-bind``)."""
    return len(environment.get("CUDA_VISIBLE_DEVICES", ",").split(",")) == 1


def _check(found: Membership, gpus: int) -> None:
    rank, world = VARIABLES[found.launcher]
    origin = Origin("environment")
    if found.world != gpus:
        raise PlanError(
            world,
            found.world,
            f"must be {gpus}, the GPUs of the run: {found.launcher} started {found.world} processes",
            origin=origin,
        )
    if found.rank >= found.world:
        raise PlanError(rank, found.rank, f"must be below {world} = {found.world}", origin=origin)


def _count(environment: Mapping[str, str], *names: str) -> int:
    """The first of them that is set."""
    for name in names:
        text = environment.get(name)
        if text:
            if text.isascii() and text.isdecimal():
                return int(text)
            raise PlanError(name, text, "must be a whole number", origin=Origin("environment"))
    raise PlanError(
        names[0],
        ABSENT,
        "must be set: other variables say that this process is a rank of a run",
        origin=Origin("environment"),
    )


def port_of(environment: Mapping[str, str]) -> int:
    """A port that all ranks of a job step find without asking each other, and that other jobs on the same machine are
    not likely to have: of the job's and the step's numbers."""
    job = _count(environment, "SLURM_JOB_ID", "SLURM_JOBID")
    step = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID") or "0"
    # consecutive jobs are 7 apart, which shares no factor with the range, so that the steps of one job come between
    return PORTS[(7 * job + (int(step) if step.isdecimal() else 0)) % len(PORTS)]


def first_host(nodes: str) -> str:
    """The first of a Slurm list: ``gpu03`` of ``gpu[03-07,12],x1``."""
    return hosts_of(nodes)[0]


_ENTRY = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def hosts_of(nodes: str) -> tuple[str, ...]:
    """All of a Slurm list, in its order (``scontrol show hostnames``): brackets hold numbers and ranges, as wide as
    their first number is written, and a name can have several of them."""
    entries = _ENTRY.findall(nodes)
    if not nodes or ",".join(entries) != nodes:
        raise _unreadable(nodes)
    return tuple(host for entry in entries for host in _expanded(entry, nodes))


def _expanded(entry: str, nodes: str) -> list[str]:
    before, bracket, rest = entry.partition("[")
    if not bracket:
        return [entry]
    inside, _, after = rest.partition("]")
    numbers = [number for piece in inside.split(",") for number in _numbers(piece, nodes)]
    return [f"{before}{number}{tail}" for number in numbers for tail in (_expanded(after, nodes) if after else [""])]


def _numbers(piece: str, nodes: str) -> list[str]:
    found = _RANGE.fullmatch(piece)
    if found is None:
        raise _unreadable(nodes)
    first, last = found[1], found[2] or found[1]
    if int(last) < int(first):
        raise _unreadable(nodes)
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _unreadable(nodes: str) -> PlanError:
    return PlanError(
        "SLURM_STEP_NODELIST",
        nodes,
        "must be host names with numbers in brackets, as gpu[03-07,12],x1",
        origin=Origin("environment"),
    )


RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which PyTorch finds a process group."""


def _guarded(folder: Path, worker: str, *rank: int) -> list[str]:
    """The command of a guard and its worker."""
    return ["-m", "memplan.validate.guards", "guard", str(folder), worker, *map(str, rank)]


def _alone(given: Mapping[str, str]) -> dict[str, str]:
    """``given`` without what another launcher left in it, flags of the elastic launcher (``PET_*``) included."""
    return {
        name: value
        for name, value in given.items()
        if name not in RENDEZVOUS and not name.startswith(("TORCHELASTIC_", "PET_"))
    }


@dataclass(frozen=True, slots=True)
class Elastic:
    """All ranks of this machine at once, by PyTorch's elastic launcher. With several machines the same command runs on
    each of them; who hosts the rendezvous finds its own name in ``endpoint``, and the launcher gives out the ranks
    unless ``node_rank`` fixes them."""

    per_node: int
    nodes: int = 1
    endpoint: str = "localhost:0"
    """Host and port of the rendezvous; port 0 is any that is free, on one machine."""
    node_rank: int | None = None
    run_id: str = "memplan"
    """The same on all machines, and another one for each run that meets at the same endpoint."""

    def commands(self, folder: Path, worker: str) -> list[list[str]]:
        launcher = [sys.executable, "-m", "torch.distributed.run"]
        size = ["--nnodes", str(self.nodes), "--nproc-per-node", str(self.per_node), "--max-restarts", "0"]
        return [[*launcher, *size, *self._rendezvous(), *_guarded(folder, worker)]]

    def _rendezvous(self) -> list[str]:
        if self.node_rank is None:
            return ["--rdzv-backend", "c10d", "--rdzv-endpoint", self.endpoint, "--rdzv-id", self.run_id]
        host, _, port = self.endpoint.rpartition(":")
        return ["--node-rank", str(self.node_rank), "--master-addr", host, "--master-port", port]

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """One thread for each rank unless told otherwise: what the launcher does, too, with a warning."""
        return {"OMP_NUM_THREADS": "1", **_alone(given)}


@dataclass(frozen=True, slots=True)
class InTurn:
    """One rank after the other, each a process without a process group, until one fails."""

    ranks: tuple[int, ...]

    def commands(self, folder: Path, worker: str) -> list[list[str]]:
        return [[sys.executable, *_guarded(folder, worker, rank)] for rank in self.ranks]

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        return _alone(given)


@dataclass(frozen=True, slots=True)
class Joined:
    """The one rank that ``torchrun`` or ``srun`` started this process as."""

    membership: Membership

    def commands(self, folder: Path, worker: str) -> list[list[str]]:
        return [[sys.executable, *_guarded(folder, worker, self.membership.rank)]]

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """With torchrun's as it is: its workers meet at a store of the launcher's own."""
        return {**given, **self.membership.variables}


Way: TypeAlias = Elastic | InTurn | Joined
