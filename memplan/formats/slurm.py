"""The GPU that a job of Slurm asks for, in the ``#SBATCH`` lines of its script or by the flags of ``sbatch``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..bash.slurm import slurm_kinds, submitted_kinds
from ..plan.errors import Node, PlanError
from ..plan.spellings import gpus_called
from ..plan.text import is_there, path_of, text_at
from .launch import Asked, Launch

_GPU = "hardware.gpu"


def with_gpu_of_job(launch: Launch, places: Iterable[str], asked: Asked) -> Launch:
    """``launch`` with the GPU that one of the scripts at ``places`` asks for (``--gres=gpu:h100:8``,
    ``--constraint=h100``), where neither a flag nor the file itself names one. Flags of ``sbatch`` stand over lines of
    the job; commands of ``sbatch`` that ask for several GPUs name none. A name of two GPUs is refused with both."""
    hardware = launch.source.plan.mapping.get("hardware", Node({}, launch.source.plan.origin))
    if {"gpu", "capacity"} & (asked.names | hardware.mapping.keys()):
        return launch
    for place in places:
        if place != "-" and not is_there(path_of(place)):  # the name of something in a file
            continue
        text, name = text_at(place)
        submitted = [kind for kind in submitted_kinds(text, name) if gpus_called(kind.text)]
        if len({kind.text.lower() for kind in submitted}) > 1:
            return launch
        for kind in submitted or slurm_kinds(text, name):
            found = gpus_called(kind.text)
            if len(found) > 1:
                problem = f"could be {' or '.join(found)}; say which with --gpu"
                raise PlanError(_GPU, kind.text, problem, origin=kind.origin)
            if found:
                named = hardware.with_items({"gpu": Node(found[0], kind.origin)})
                source = replace(launch.source, plan=launch.source.plan.with_items({"hardware": named}))
                told = f"the GPU is {found[0]}, the {kind.text} of {kind.origin} (--gpu names another)"
                return replace(launch, source=source, assumptions=(*launch.assumptions, told))
    return launch
