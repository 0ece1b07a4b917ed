"""The kind of a launch file, and its words: a shell script, a list of arguments, or a mapping.

Among the commands that a script starts, the one that trains is found, and its launchers' own arguments are read:
``torchrun``, ``python -m torch.distributed.run`` and ``launch``, ``deepspeed``, ``srun``, ``mpirun``, ``accelerate``
and plain ``python`` all end in the training script and its arguments; what stands before it says at most how many
processes there are, and which variables they get.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

from ..bash.budget import Budget
from ..bash.origin import ScriptError
from ..bash.shell import Beside, read_script
from ..bash.values import Cause, Ledger, Piece, Reading, Unknown, Value, cleaned, is_known, origin_of, text
from ..plan.errors import ABSENT, Origin, PlanError, refused
from ..plan.node import Node, scalar
from ..plan.text import STANDARD_INPUT, folder_of, is_there, path_of, read_standard_input, read_text
from ..plan.yaml_nodes import parse_yaml
from ..values import dataclass
from .rows import Argument, arguments_of
from .settings import Given, taken_apart

_MAGIC = {"%PDF": "a PDF", "\x7fELF": "a program", "PK\x03\x04": "an archive", "{\\rtf": "a document"}
_PYTHON = re.compile(r"\s*(?:#!.*python|(?:import|from) [\w.]+(?: import .*)?$|def \w+\(|class \w+)", re.MULTILINE)
_KEY = re.compile(r"[\"']?(?:--)?[\w-]+[\"']?\s*:(?:\s|$)")
_COMMENT = re.compile(r"\s*(?:#.*)?$")
_PART_OF_WORD = re.compile(
    r"""(?P<plain>[^\s\\'"]+)|(?P<single>'[^']*')|(?P<double>"[^"\\]*(?:\\.[^"\\]*)*")|(?P<escape>\\(?:[^\n]|\Z))""",
    re.DOTALL,
)
_BETWEEN_WORDS = re.compile(r"(?:\s+|\\\n|#[^\n]*)*")
_WORD = 100
"""Steps of an argument: what becomes of it later is among them."""
_PART = 20
"""Steps of a part of a word."""
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_SECTIONS = ("MODEL_ARGS", "arguments")
_ENVIRONMENTS = ("ENV_VARS", "environment")


@dataclass(frozen=True, slots=True)
class Words:
    """Arguments of a training command, taken apart, and what was found around them."""

    given: list[Given]
    loose: list[Value]
    ledger: Ledger
    origin: Origin
    folder: Path = field(default_factory=Path)
    training: Training | None = None
    environment: Mapping[str, Value] = field(default_factory=dict)
    files: Mapping[str, Value] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    """Variables given from outside that the file does not mention."""
    unread: tuple[str, ...] = ()
    """What it sources and was not read, in words."""


def read_words(name: str, framework: str, given: Mapping[str, str]) -> Words:
    """The arguments in the file ``name``, or on standard input for ``-``. ``given`` are variables from outside."""
    if name == "-":
        content, source, folder = read_standard_input(), STANDARD_INPUT, Path()
    else:
        path = path_of(name)
        content, source, folder = read_text(path), str(path), folder_of(path)
    words = words_of(content, source, framework, given, folder)
    return replace(words, unused=not_in(content, given) if given else ())


def not_in(content: str, names: Iterable[str]) -> tuple[str, ...]:
    """Those of ``names`` that are not in ``content``; a positional parameter may be meant by ``$@`` and the like."""
    found = set(re.findall(r"[A-Za-z0-9_]+", content))
    numbers = set(re.findall(r"\$\{?([0-9]+)", content))
    any_number = re.search(r"\$(?:\{?[@*#]|\{[0-9])|\bshift\b", content) is not None
    return tuple(name for name in names if not ((any_number or name in numbers) if name.isdigit() else name in found))


def words_of(content: str, source: str, framework: str, given: Mapping[str, str], folder: Path | None = None) -> Words:
    """The arguments in ``content``, which errors call ``source``."""
    try:
        return _words_of(content, source, framework, given, folder or Path())
    except ScriptError as error:
        raise refused(error) from None


def _words_of(content: str, source: str, framework: str, given: Mapping[str, str], folder: Path) -> Words:
    _refuse_what_is_none(content, source)
    arguments = arguments_of(framework)
    content = content.replace("\r\n", "\n")
    first = next((line.strip() for line in content.splitlines() if not _COMMENT.fullmatch(line)), "")
    origin = Origin(source)
    ledger = Ledger(Budget(origin))
    if source.endswith((".yaml", ".yml", ".json")) or first.startswith(("{", "[")) or _KEY.match(first):
        root = parse_yaml(content, source)
        if not isinstance(root.value, list) or not any(str(item.value).startswith("--") for item in root.value):
            return _mapping(root, arguments, given, folder)
        listed = ((_written(item), item.origin) for item in root.value)
        return _list(listed, arguments, given, ledger, origin, folder)
    if first.startswith("-"):
        return _list(_listed(content, source, ledger.budget), arguments, given, ledger, origin, folder)
    reading = read_script(content, source, given, beside(folder))
    training = training_in(reading, source)
    reading.ledger.budget.spend(_WORD * len(training.words), training.origin)
    taken, loose = taken_apart(training.words, arguments, training.origin)
    return Words(
        taken,
        loose,
        reading.ledger,
        training.origin,
        folder,
        training,
        training.environment,
        reading.files,
        unread=unread(reading),
    )


def _list(
    words: Iterable[tuple[str, Origin]],
    arguments: Mapping[str, Argument],
    given: Mapping[str, str],
    ledger: Ledger,
    origin: Origin,
    folder: Path,
) -> Words:
    """The arguments in a bare list of them."""
    values = [_expanded(word, where, ledger, given) for word, where in words]
    ledger.budget.spend(_WORD * len(values))
    taken, loose = taken_apart(values, arguments, origin)
    return Words(taken, loose, ledger, origin, folder)


_SOURCED = (".sh", ".bash", ".env", ".conf", ".cfg")


def beside(folder: Path) -> Beside:
    """Scripts that one in ``folder`` sources: those in that folder or below it, by names that say that they are some (a
    virtual environment's ``activate`` is none)."""

    def read(name: str) -> tuple[str, str] | None:
        path = folder / name
        inside = not Path(name).is_absolute() and ".." not in path.parts and name.endswith(_SOURCED)
        return (read_text(path), str(path)) if inside and is_there(path) else None

    return read


def unread(reading: Reading) -> tuple[str, ...]:
    """Each script that the one of ``reading`` sources and that was not read; a virtual environment's ``activate`` sets
    nothing that matters."""
    return tuple(
        f"{name} (line {where.line}) is sourced, and not found below the script's folder"
        for name, where in reading.sourced
        if name.endswith(_SOURCED)
    )


def words_of_mapping(arguments: Mapping[str, object], framework: str, source: str = "arguments") -> Words:
    """The arguments in a mapping of Python values: ``{"--num-layers": 12, "--bf16": True}``."""
    origin = Origin(source)
    node = Node({name: _node(value, origin) for name, value in arguments.items()}, origin)
    return _mapping(node, arguments_of(framework), {}, Path())


def words_of_node(root: Node, framework: str) -> Words:
    """The arguments in a mapping that a file holds: ``arguments``, and ``environment`` beside them."""
    return _mapping(root, arguments_of(framework), {}, Path())


def _refuse_what_is_none(content: str, source: str) -> None:
    origin = Origin(source)
    for magic, what in _MAGIC.items():
        if content.startswith(magic):
            raise PlanError("", ABSENT, f"is {what}, not a launch script", origin=origin)
    if "\0" in content:
        raise PlanError("", ABSENT, "is a binary file, not a launch script", origin=origin)
    if not content.strip():
        raise PlanError("", ABSENT, "is empty", origin=origin)
    start = "\n".join(
        line for line in content[:4096].splitlines() if not _COMMENT.fullmatch(line) or line.startswith("#!")
    )
    if source.endswith(".py") or _PYTHON.match(start):
        raise PlanError("", ABSENT, "is a Python file; name the shell script that starts it", origin=origin)


def _listed(content: str, source: str, budget: Budget) -> Iterator[tuple[str, Origin]]:
    """The words of a bare list of arguments, over one line or many, with comments and quotes but no shell."""
    at, line = 0, 1
    while True:
        between = _BETWEEN_WORDS.match(content, at)
        if between is not None:
            at, line = between.end(), line + between[0].count("\n")
        if at == len(content):
            return
        parts: list[str] = []
        origin = Origin(source, line)
        while (match := _PART_OF_WORD.match(content, at)) is not None:
            budget.spend(_PART, origin)
            parts.append(_unquoted(match.lastgroup, match[0]))
            at, line = match.end(), line + match[0].count("\n")
        if content[at : at + 1] in ("'", '"'):
            raise PlanError("", ABSENT, "ends inside a quotation", origin=Origin(source, line))
        yield "".join(parts), origin


def _unquoted(kind: str | None, written: str) -> str:
    if kind == "double":
        return re.sub(r'\\(?:(["\\])|\n)', lambda escape: escape[1] or "", written[1:-1])
    return written[1:-1] if kind == "single" else written[1:] if kind == "escape" else written


def _expanded(word: str, origin: Origin, ledger: Ledger, given: Mapping[str, str]) -> Value:
    """``word`` with ``$NAME`` and ``${NAME}`` replaced by what was given, or unknown."""
    pieces: list[Piece] = []
    at = 0
    word = cleaned(word)
    for match in _VARIABLE.finditer(word):
        name = match[1] or match[2]
        pieces.append(Piece(word[at : match.start()], origin))
        if name in given:
            pieces.append(Piece(cleaned(given[name]), Origin(f"--set {name}")))
        else:
            pieces.extend(ledger.value(Unknown(f"${name}", name, Cause.UNSET, origin)))
        at = match.end()
    pieces.append(Piece(word[at:], origin))
    return tuple(piece for piece in pieces if piece.text) or (Piece("", origin),)


def _mapping(root: Node, arguments: Mapping[str, Argument], given: Mapping[str, str], folder: Path) -> Words:
    """``{"--num-layers": 12}``, ``{"num-layers": 12}``, or Megatron's ``{MODEL_ARGS: …, ENV_VARS: …}``."""
    ledger = Ledger(Budget(root.origin))
    if not isinstance(root.value, dict):
        raise PlanError("", ABSENT, "is no mapping of arguments to values", origin=root.origin)
    if "framework" in root.mapping and not arguments.keys() & root.mapping.keys():
        raise PlanError("", ABSENT, "is a plan, not a launch file; leave out --from", origin=root.origin)
    section = next((root.mapping[name] for name in _SECTIONS if name in root.mapping), root)
    if not isinstance(section.value, dict):
        raise PlanError("", ABSENT, "is no mapping of arguments to values", origin=section.origin)
    variables = next((root.mapping[name] for name in _ENVIRONMENTS if name in root.mapping), Node({}, root.origin))
    environment = {
        name: _expanded(_written(node), node.origin, ledger, given)
        for name, node in variables.mapping.items()
        if not isinstance(node.value, (dict, list))
    }
    taken = [
        entry
        for key, node in section.mapping.items()
        if (entry := _entry(key, node, arguments, ledger, given)) is not None
    ]
    return Words(taken, [], ledger, root.origin, folder, None, environment)


def _entry(
    key: str, node: Node, arguments: Mapping[str, Argument], ledger: Ledger, given: Mapping[str, str]
) -> Given | None:
    name = key if key.startswith("--") else f"--{key}"
    name = name if name in arguments else name.replace("_", "-") if name.replace("_", "-") in arguments else name
    argument = arguments.get(name)
    if node.value is None or node.value is False:
        return None
    if node.value is True and (argument is None or argument.is_switch):
        return Given(name, argument, (), node.origin)
    if isinstance(node.value, dict):
        raise PlanError(name, ABSENT, "must be a value or a list of values", origin=node.origin)
    if isinstance(node.value, list):
        values = [(_written(item), item.origin) for item in node.value]
    else:
        plain = _written(node)
        several = argument is not None and argument.count and plain.startswith("[") and plain.endswith("]")
        values = (
            [(word, node.origin) for word in plain[1:-1].replace(",", " ").split()]
            if several
            else [(plain, node.origin)]
        )
    return Given(name, argument, tuple(_expanded(word, where, ledger, given) for word, where in values), node.origin)


def _written(node: Node) -> str:
    if isinstance(node.value, (dict, list)):
        raise PlanError("", ABSENT, "holds a list or mapping where a value should be", origin=node.origin)
    if node.text is not None:
        return node.text
    return str(node.value)


def _node(value: object, origin: Origin) -> Node:
    if value is None or isinstance(value, (str, bool, int, float)):
        return Node(value, origin)
    if isinstance(value, (list, tuple)):
        return Node([_node(item, origin) for item in value], origin)
    raise PlanError("", ABSENT, f"cannot be an argument's value: {type(value).__name__}", origin=origin)


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
"""Arguments by which a training command of Megatron is known."""

TRAINER_MARKS = frozenset(
    ["--model_name_or_path", "--per_device_train_batch_size", "--output_dir", "--num_train_epochs", "--learning_rate"]
)
"""Those of a command that runs Hugging Face's Trainer."""

_DEEPSPEED_MARKS = ("--deepspeed", "--zero-stage", "--deepspeed_config")
"""Arguments that Megatron-DeepSpeed has and Megatron-LM has not."""


def started_by(content: str, source: str, given: Mapping[str, str], folder: Path) -> str:
    """The format of the arguments with which the script ``content`` starts a training: Megatron's where nothing
    speaks for another."""
    try:
        reading = read_script(content.replace("\r\n", "\n"), source, given, beside(folder))
    except ScriptError as error:
        raise refused(error) from None
    for started in reading.started:
        if (start := _script_of(started.words, _MARKS)) is not None:
            names = {text(word).partition("=")[0] for word in started.words[start:]}
            return "megatron-deepspeed" if names & {*_DEEPSPEED_MARKS} else "megatron"
        if _script_of(started.words, TRAINER_MARKS) is not None:
            return "trainer"
    return "megatron"


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
    launcher: tuple[Value, ...] = ()
    """The words in front of the script."""
    others: tuple[Origin, ...] = ()
    """Where the script starts further trainings, which are not read."""


def training_in(reading: Reading, source: str, marks: Collection[str] = _MARKS) -> Training:
    """The command in ``reading`` that trains, known by one of the arguments ``marks``; the first of several."""
    found = [(one, start) for one in reading.started if (start := _script_of(one.words, marks)) is not None]
    if not found:
        raise _no_training(reading, source)
    started, start = found[0]
    others = {other.origin for other, _ in found[1:]} - {started.origin}
    launcher = started.words[:start]
    per_node = _number_of(launcher, _PER_NODE)
    said = any(text(word).partition("=")[0] in (*_NODES, *_NODES_OF_SRUN) for word in launcher)
    nodes = _number_of(launcher, (*_NODES, *_NODES_OF_SRUN)) if said else Node(1, started.origin)
    gpus = _product(nodes, per_node, started.origin)
    if gpus is None and per_node is None:
        gpus = _processes(launcher, nodes if said else None, reading.job, started.origin)
    environment = {**started.environment, **_passed(launcher)}
    script = _name_of(started.words[start])
    words = started.words[start + 1 :]
    return Training(
        script,
        words,
        started.origin,
        gpus,
        per_node,
        environment,
        launcher,
        tuple(sorted(others, key=lambda o: o.line or 0)),
    )


def _processes(launcher: Sequence[Value], nodes: Node | None, job: Mapping[str, Value], origin: Origin) -> Node | None:
    """Processes that ``srun`` or ``mpirun`` starts, one for each GPU; what ``srun`` leaves open the job says."""
    total = _number_of(launcher, _PROCESSES)
    tasks = _number_of(launcher, _PER_NODE_OF_SRUN)
    if total is not None or not any(text(word).rpartition("/")[2] == "srun" for word in launcher):
        return total or _product(nodes, tasks, origin)
    if nodes is None and tasks is None and "SLURM_NTASKS" in job:
        return _of_job(job, "SLURM_NTASKS")
    nodes = nodes or _of_job(job, "SLURM_NNODES")
    return _product(nodes, tasks or _of_job(job, "SLURM_NTASKS_PER_NODE"), origin)


def _of_job(job: Mapping[str, Value], name: str) -> Node | None:
    value = job.get(name)
    return scalar(text(value), value[0].origin) if value else None


def _script_of(words: Sequence[Value], marks: Collection[str]) -> int | None:
    """Position of the training script: the last Python file or module before the first argument of a training, one of
    ``marks``."""
    first = next((n for n, word in enumerate(words) if text(word).partition("=")[0] in marks), None)
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
    what = "; ".join([what, *unread(reading)[:1]])
    return PlanError("", ABSENT, what, origin=origin)


def _number_of(words: Sequence[Value], names: Iterable[str]) -> Node | None:
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
