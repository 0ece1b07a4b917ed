"""What a record says of its GPU that holds for other plans, too.

Only what has a name, and what a run measures apart from everything else. Never learned are the allocator's overhead,
which is no property of a GPU (the replay derives reserved bytes from the order of the plan's own tensors, and a
correction would hide where that is wrong), and efficiencies: seconds of whole steps do not tell products, collectives
and kernels that stream apart.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from ..device.measured import CONTEXT, LARGEST, NCCL, WORKSPACES, Measurement, Ran, code_of, holds_workspaces, setting
from .readings import RankReading, Run
from .record import Record


def facts_of(record: Record) -> tuple[Measurement, ...]:
    """What ``record`` teaches: nothing unless it ran to its end on GPUs of one kind that memplan knows."""
    run = record.run
    alike = len({rank.device for rank in run.ranks}) == 1
    release = re.match(r"([0-9]{1,3})\.([0-9]{1,3})", run.versions.torch)
    if run.device != "cuda" or run.world == "fake" or run.failures or run.gpu is None or not alike or release is None:
        return ()
    plan = record.estimate.to_json()["plan"]
    communicators = run.world == "real" and len(run.ranks) > 1
    ran = Ran(run.code, (int(release[1]), int(release[2])), len(run.ranks), record.hardware.nodes, communicators)
    return tuple(
        Measurement(name, run.gpu, setting(name, plan, ran), stage, size, record.time, record.id, _versions(run))
        for name, stage, size in _sizes(record)
        if 0 <= size <= LARGEST
    )


def _sizes(record: Record) -> Iterator[tuple[str, int | None, int]]:
    ranks = record.run.ranks
    contexts = [rank.context for rank in ranks if rank.context]
    if contexts:
        yield CONTEXT, None, max(contexts)
    same_code = record.run.code == code_of(record.ran.framework)
    workspaces = {rank.workspaces for rank in ranks}
    if same_code and len(workspaces) == 1 and not holds_workspaces(record.ran.framework):
        (size,) = workspaces
        if size is not None:
            yield WORKSPACES, None, size
    if same_code and _is_whole(record):
        for stage in sorted({rank.stage for rank in ranks}):
            yield NCCL, stage, max(rank.nccl or 0 for rank in ranks if rank.stage == stage)


def _is_whole(record: Record) -> bool:
    """Every rank of the plan ran in a process group of theirs, on machines as the plan has them, and was measured."""
    ranks, hardware = record.run.ranks, record.ran.hardware
    per_node = Counter(rank.host for rank in ranks)
    as_planned = len(ranks) == hardware.gpus and max(per_node.values()) == min(len(ranks), hardware.gpus_per_node)
    return record.run.world == "real" and len(ranks) > 1 and as_planned and all(map(_has_nccl, ranks))


def _has_nccl(rank: RankReading) -> bool:
    return rank.nccl is not None


def _versions(run: Run) -> str:
    """What of the machine a reader may compare with another."""
    named = (("torch", run.versions.torch), ("CUDA", run.versions.cuda), ("driver", run.versions.driver))
    return ", ".join(f"{name} {version}" for name, version in named if version)
