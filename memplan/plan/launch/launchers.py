"""Among the commands that a script starts, the one that trains; its launchers' own arguments are consumed here.

``torchrun``, ``python -m torch.distributed.run`` and ``launch``, ``deepspeed``, ``srun``, ``mpirun``,
``accelerate`` and plain ``python`` all end in the training script and its arguments; what stands before
it says at most how many processes there are, and which variables they get.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ABSENT, Origin, PlanError
from ..node import Node
from ..yaml_nodes import scalar
from .reading import Reading
from .values import Value, is_known, origin_of, text

_MARKS = frozenset(
    [
        "--num-layers",
        "--encoder-num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--seq-length",
        "--micro-batch-size",
        "--global-batch-size",
        "--tensor-model-parallel-size",
        "--pipeline-model-parallel-size",
        "--max-position-embeddings",
        "--use-checkpoint-args",
        "--hybrid-layer-pattern",
        "--yaml-cfg",
    ]
)
"""Arguments by which a training command is known."""

_SCRIPT = re.compile(r"(?:.*/)?([\w.-]+)\.py")
_PASSED = re.compile(r"(?:-x|-e|--env=|--export=(?:ALL,)?)?([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
_PER_NODE = ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--num-gpus", "--gpus-per-node", "--gpus_per_node")
_NODES = ("--nnodes", "--num_nodes", "--num-nodes", "--num_machines")
_NODES_OF_SRUN = ("--nodes", "-N")
_PROCESSES = ("-n", "-np", "--np", "--ntasks", "--num_processes")
_PER_NODE_OF_SRUN = ("--ntasks-per-node",)


@dataclass(frozen=True, slots=True)
class Training:
    """A training command: its script's name, the words after it, and what its launchers say."""

    script: str
    words: tuple[Value, ...]
    origin: Origin
    gpus: Node | None
    gpus_per_node: Node | None
    environment: Mapping[str, Value]
    others: tuple[Origin, ...] = ()
    """Where the script starts further trainings, which are not read."""


def training_in(reading: Reading, source: str) -> Training:
    """The command in ``reading`` that trains; the first of several."""
    found = [(started, start) for started in reading.started if (start := _script_of(started.words)) is not None]
    if not found:
        raise _no_training(reading, source)
    started, start = found[0]
    others = {other.origin for other, _ in found[1:]} - {started.origin}
    launcher = started.words[:start]
    per_node = _node(launcher, _PER_NODE)
    said = any(text(word).partition("=")[0] in (*_NODES, *_NODES_OF_SRUN) for word in launcher)
    nodes = _node(launcher, (*_NODES, *_NODES_OF_SRUN)) if said else Node(1, started.origin)
    gpus = _product(nodes, per_node, started.origin)
    if gpus is None and per_node is None:
        gpus = _processes(launcher, nodes if said else None, reading.job, started.origin)
    environment = {**started.environment, **_passed(launcher)}
    script = _name_of(started.words[start])
    words = started.words[start + 1 :]
    return Training(
        script, words, started.origin, gpus, per_node, environment, tuple(sorted(others, key=lambda o: o.line or 0))
    )


def _processes(launcher: Sequence[Value], nodes: Node | None, job: Mapping[str, Value], origin: Origin) -> Node | None:
    """Processes that ``srun`` or ``mpirun`` starts, one for each GPU; what ``srun`` leaves open the job says."""
    total = _node(launcher, _PROCESSES)
    tasks = _node(launcher, _PER_NODE_OF_SRUN)
    if total is not None or not any(text(word).rpartition("/")[2] == "srun" for word in launcher):
        return total or _product(nodes, tasks, origin)
    if nodes is None and tasks is None and "SLURM_NTASKS" in job:
        return _of_job(job, "SLURM_NTASKS")
    nodes = nodes or _of_job(job, "SLURM_NNODES")
    return _product(nodes, tasks or _of_job(job, "SLURM_NTASKS_PER_NODE"), origin)


def _of_job(job: Mapping[str, Value], name: str) -> Node | None:
    value = job.get(name)
    return scalar(text(value), value[0].origin) if value else None


def _script_of(words: Sequence[Value]) -> int | None:
    """Position of the training script: the last Python file or module before the first argument of a training."""
    first = next((n for n, word in enumerate(words) if text(word).partition("=")[0] in _MARKS), None)
    if first is None:
        return None
    files = [n for n, word in enumerate(words[:first]) if _SCRIPT.fullmatch(text(word))]
    modules = [n + 1 for n, word in enumerate(words[: first - 1]) if text(word) == "-m"]
    return next(iter(files[-1:] or modules[-1:]), None)


def _name_of(word: Value) -> str:
    match = _SCRIPT.fullmatch(text(word))
    return match[1] if match is not None else text(word).rpartition(".")[2]


def _no_training(reading: Reading, source: str) -> PlanError:
    origin = Origin(source)
    if reading.undecided:
        unknown = reading.undecided[0]
        remedy = f"; give --set {unknown.ask}=value" if unknown.ask else "; keep the branch that applies"
        problem = f"whether training starts depends on {unknown.shown}, which cannot be decided{remedy}"
        return PlanError("", ABSENT, problem, origin=unknown.origin)
    for started in reading.started:
        for before, word in zip(((), *started.words), started.words, strict=False):
            unknowns = reading.ledger.unknowns(word)
            if unknowns and unknowns[0].ask and len(text(word)) == 1 and not text(before).startswith("-"):
                problem = f"starts no training that can be read: {unknowns[0].why}"
                return PlanError("", ABSENT, problem, origin=unknowns[0].origin)
    what = "starts no training that can be read: no command runs a Python file with arguments such as --num-layers"
    if reading.sourced:
        name, where = reading.sourced[0]
        what = f"{what}; {name} (line {where.line}) is not followed"
    return PlanError("", ABSENT, what, origin=origin)


def _node(words: Sequence[Value], names: Iterable[str]) -> Node | None:
    """The whole number that one of ``names`` has among ``words``; the last is the innermost launcher's."""
    names = tuple(names)
    for position in range(len(words) - 1, -1, -1):
        name, equals, rest = text(words[position]).partition("=")
        if name not in names:
            continue
        value = words[position] if equals else words[position + 1] if position + 1 < len(words) else ()
        plain = rest if equals else text(value)
        node = scalar(plain, origin_of(value, words[position][0].origin))
        return node if is_known(value) and type(node.value) is int and node.value > 0 else None
    return None


def _product(nodes: Node | None, per_node: Node | None, origin: Origin) -> Node | None:
    if nodes is None or per_node is None:
        return None
    assert isinstance(nodes.value, int)
    assert isinstance(per_node.value, int)
    return Node(nodes.value * per_node.value, origin)


def _passed(words: Sequence[Value]) -> dict[str, Value]:
    """``NAME=value`` among a launcher's words, as ``env``, ``mpirun -x`` and containers take them."""
    passed: dict[str, Value] = {}
    for word in words:
        match = _PASSED.fullmatch(text(word))
        if match is not None:
            passed[match[1]] = (word[0]._replace(text=match[2]),) if word else ()
    return passed
