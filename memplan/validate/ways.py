"""The ways in which a run's ranks are started."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from .cluster import Membership

RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which PyTorch finds a process group."""


def _guarded(folder: Path, worker: str, *rank: int) -> list[str]:
    """The command of a guard and its worker."""
    return ["-m", "memplan.validate.guard", str(folder), worker, *map(str, rank)]


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
