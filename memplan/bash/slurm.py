"""What a script asks Slurm for: the variables of its job, and the kind of its GPUs.

sbatch's manual: options of ``#SBATCH`` lines, up to the first line that is a command, and of the command line, which
stand over them; the variables under "Output environment variables".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from .origin import Origin
from .values import Cause, Ledger, Piece, Unknown, Value, is_known, text

Request = Mapping[str, Value]
"""What is asked for, by the first of its names in ``_NAMES``."""

_NAMES = {
    "--nodes": ("--nodes", "-N"),
    "--ntasks": ("--ntasks", "-n"),
    "--ntasks-per-node": ("--ntasks-per-node", "--tasks-per-node"),
    "--gpus-per-node": ("--gpus-per-node",),
    "--gpus-per-task": ("--gpus-per-task",),
    "--gpus": ("--gpus", "-G"),
    "--gres": ("--gres",),
}
_OPTIONS = {name: option for option, names in _NAMES.items() for name in names}
_VARIABLES = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--gres": ("SLURM_GPUS_ON_NODE",),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "--gpus-per-task": ("SLURM_GPUS_PER_TASK",),
    "--gpus": ("SLURM_GPUS",),
}
_DIRECTIVE = re.compile(r"#SBATCH[ \t]+(.*)")
_WORD = re.compile(r"(?:[^\s\"'#]|\"[^\"]*\"|'[^']*'|(?<=[^\s])#)+|#.*")
_TOGETHER = re.compile(r"(-[NnG])=?(.+)")
"""``-N4``."""
_NUMBER = re.compile(r"\d{1,9}")
_RANGE = re.compile(r"\d{1,9}(?:[-,:]\d{1,9})+")
"""``--nodes=2-4``, ``--nodes=2,4,8``."""
_GPUS = re.compile(r"(?:[A-Za-z][\w.-]*:)*(\d{1,9})(?:\([^()]*\))?")
_HETEROGENEOUS = ("hetjob", "packjob")
_KIND = re.compile(
    r"(?:--gpus-per-node|--gpus-per-task|--gpus|-G|--gres)[= \t]*(?:gpu:)?([A-Za-z][\w.-]*)(?::\d+)?(?![\w:.-])"
    r"|(?:--constraint|-C)[= \t]*[\"']?([\w.&|-]+)"
)
"""The kind of GPU: ``--gres=gpu:h100:8``, ``--gpus-per-node=a100:4``, ``-C a100``."""
_SUBMITS = re.compile(r"^[^#\n\"']*?(?<![\w./-])sbatch[ \t]+((?:[^\\\n]|\\[\s\S])*)", re.MULTILINE)
"""A command of ``sbatch`` and all its lines: ``JOB=$(sbatch --parsable --gres=gpu:h100:8 \\``."""
_SUBMITTED = re.compile(r"(?<![^\s/])[\w.${}-]+\.(?:sh|bash|slurm|sbatch)(?!\S)|<<|--wrap")
"""Where the flags of ``sbatch`` end."""


def requested(script: str, source: str, ledger: Ledger) -> Request:
    """What the ``#SBATCH`` lines of ``script`` ask for. Not known is what stands behind the first command, where sbatch
    reads no more, and what each part of a heterogeneous job asks for by itself."""
    found: dict[str, Value] = {}
    parts = False
    for directive, origin, is_read in _directives(script, source):
        words = [word.strip("\"'") for word in _WORD.findall(directive) if not word.startswith("#")]
        parts = parts or words[:1] in ([_HETEROGENEOUS[0]], [_HETEROGENEOUS[1]])
        for option, said in _said(words, origin, ledger):
            if is_read:
                found[option] = said
            elif option not in found:
                found[option] = _open(option, f"{option} of line {origin.line}", Cause.LATE, origin, ledger)
    if parts:
        return {
            option: _open(option, "#SBATCH hetjob", Cause.OTHER, one[0].origin, ledger) for option, one in found.items()
        }
    return found


def requested_by(words: Sequence[Value], origin: Origin, ledger: Ledger) -> Request:
    """What the flags among ``words`` of a command line of ``sbatch`` ask for."""
    return dict(_said([*map(text, words)], origin, ledger)) if "sbatch" in map(text, words) else {}


def variables_of(request: Request) -> dict[str, Value]:
    """Variables that the job has. Nodes that nobody names are as many as hold all tasks, or GPUs, so many on each."""
    asked = dict(request)
    for every, each in (("--ntasks", "--ntasks-per-node"), ("--gpus", "--gpus-per-node")):
        whole, part = _whole(asked, every), _whole(asked, each)
        if "--nodes" not in asked and whole and part and whole % part == 0:
            asked["--nodes"] = (asked[every][0]._replace(text=str(whole // part)),)
    nodes, tasks = _whole(asked, "--nodes"), _whole(asked, "--ntasks-per-node")
    if "--ntasks" not in asked and nodes and tasks:
        asked["--ntasks"] = (asked["--nodes"][0]._replace(text=str(nodes * tasks)),)
    return {name: asked[option] for option, names in _VARIABLES.items() if option in asked for name in names}


def slurm_kinds(script: str, source: str) -> list[Piece]:
    """What the directives of ``script`` say of the kind of GPU, or of nodes: ``h100``."""
    return [
        Piece(word, origin)
        for directive, origin, _ in _directives(script, source)
        for word in _kinds(directive.partition("#")[0])
    ]


def submitted_kinds(script: str, source: str) -> list[Piece]:
    """What the flags of ``sbatch`` say of it, of every command of ``script`` that submits a job."""
    return [
        Piece(word, Origin(source, script.count("\n", 0, command.start(1)) + 1))
        for command in (_SUBMITS.finditer(script) if "sbatch" in script else ())
        for word in _kinds(_SUBMITTED.split(command[1])[0])
    ]


def _kinds(flags: str) -> Iterator[str]:
    for option in _KIND.finditer(flags):
        for word in re.split(r"[&|]", option[1] or option[2]):
            if word and word != "gpu":
                yield word


def _directives(script: str, source: str) -> Iterator[tuple[str, Origin, bool]]:
    """Each directive, where it stands, and whether sbatch reads it: no command stands in front of it."""
    is_read = True
    for number, line in enumerate(script.split("\n"), 1) if "#SBATCH" in script else ():
        directive = _DIRECTIVE.match(line)
        if directive is not None:
            yield directive[1], Origin(source, number), is_read
        is_read = is_read and (not line.strip() or line.lstrip().startswith("#"))


def _said(words: Sequence[str], origin: Origin, ledger: Ledger) -> Iterable[tuple[str, Value]]:
    """Each option among ``words``, with the number that it asks for."""
    for word, behind in pairwise([*words, ""]):
        name, equals, said = word.partition("=")
        together = _TOGETHER.fullmatch(word) if name not in _OPTIONS else None
        name, said = together.groups() if together is not None else (name, said if equals else behind)
        option = _OPTIONS.get(name)
        if option is None:
            continue
        number = _count(option, said)
        if ledger.unknowns((Piece(said, origin),)):
            yield option, (Piece(said, origin),)
        elif number is not None:
            yield option, (Piece(number, origin),)
        elif option == "--nodes" and _RANGE.fullmatch(said):
            yield option, _open(option, f"--nodes={said}", Cause.RANGE, origin, ledger)


def _count(option: str, said: str) -> str | None:
    """The number in ``said``: of GPUs where other resources stand beside them."""
    if "--g" not in option:
        first, _, last = said.partition("-")
        return first if _NUMBER.fullmatch(first) and last in ("", first) else None
    one_each = {"gpu": "gpu:1"} if option == "--gres" else {}
    items = [one_each.get(item, item) for item in said.split(",")]
    counts = [
        int(found[1])
        for item in items
        if (option != "--gres" or item.startswith("gpu")) and (found := _GPUS.fullmatch(item))
    ]
    return str(sum(counts)) if counts else None


def _open(option: str, shown: str, cause: Cause, origin: Origin, ledger: Ledger) -> Value:
    return ledger.value(Unknown(shown, _VARIABLES[option][0], cause, origin))


def _whole(request: Request, option: str) -> int:
    value = request.get(option)
    return int(text(value)) if value is not None and is_known(value) else 0
