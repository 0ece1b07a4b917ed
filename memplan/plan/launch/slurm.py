"""What ``#SBATCH`` lines say about a job: the variables that Slurm sets by them."""

from __future__ import annotations

import re

from ..errors import Origin
from .values import Piece, Value

_DIRECTIVE = re.compile(r"^#SBATCH[ \t]+(.*)$", re.MULTILINE)
_OPTION = re.compile(
    r"(--nodes|-N|--ntasks-per-node|--ntasks|-n|--gpus-per-node|--gres)[= \t]*(?:gpu:)?(?:[a-z]\w*:)?(\d+)\b"
)
_VARIABLES = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "-N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "-n": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "--gres": ("SLURM_GPUS_ON_NODE",),
}


def slurm_variables(script: str, source: str) -> dict[str, Value]:
    """Variables of the job that the directives of ``script`` ask for."""
    found: dict[str, Value] = {}
    for directive in _DIRECTIVE.finditer(script):
        origin = Origin(source, script.count("\n", 0, directive.start()) + 1)
        for option in _OPTION.finditer(directive[1].partition("#")[0]):
            found.update(dict.fromkeys(_VARIABLES[option[1]], (Piece(option[2], origin),)))
    return found
