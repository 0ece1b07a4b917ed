"""The training command among those that a shell script starts, and what its launchers say.

``torchrun``, ``python -m torch.distributed.run`` and ``launch``, ``deepspeed``, ``srun``, ``mpirun``, ``accelerate``
and plain ``python`` all end in the training script and its arguments; what stands before it says at most how many
processes there are, and which variables they get.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from ..bash.origin import ScriptError
from ..bash.shell import Beside, read_script
from ..bash.values import Reading, Started, Unknown, Value, is_known, origin_of, text
from ..plan.errors import ABSENT, Node, Origin, PlanError, one_line, refused, scalar, wrong_at
from ..plan.notes import Note
from ..plan.text import is_there, path_of, read_text
from ..values import dataclass
from .elsewhere import ELSEWHERE
from .elsewhere_commands import LITGPT, OF_FILES, OF_MEGATRON, OF_SCRIPTS
from .hostfile import hosts_of
from .in_flags import Elsewhere, in_flags, started_as
from .settings import taken_apart

_SOURCED = (".sh", ".bash", ".slurm", ".sbatch", ".env", ".conf", ".cfg")


def beside(folder: Path) -> Beside:
    """Scripts that one in ``folder`` sources or runs: those in that folder or below it, or where it is started from
    (``found_from``), by names that say that they are some (a virtual environment's ``activate`` is none)."""

    def read(name: str) -> tuple[str, str] | None:
        if Path(name).is_absolute() or ".." in Path(name).parts or not name.endswith(_SOURCED):
            return None
        path = found_from(name, folder)
        return (read_text(path), str(path)) if is_there(path) else None

    return read


def found_from(name: str, folder: Path) -> Path:
    """The file that a script in ``folder`` calls ``name``: from there, from where it is started, or, as projects start
    their scripts, from a folder above it that has the folder and the file."""
    above = folder.resolve().parents if "/" in name else ()
    places = (path_of(name, one) for one in (folder, Path(), *above))
    return next((path for path in places if is_there(path)), path_of(name, folder))


def unread(reading: Reading) -> tuple[str, ...]:
    """Each script that the one of ``reading`` sources and that was not read; a virtual environment's ``activate`` sets
    nothing that matters."""
    return tuple(
        f"{name} (line {where.line}) is sourced, and not found below the script's folder"
        for name, where in reading.sourced
        if name.endswith(_SOURCED)
    )


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

_TRAINER_MARKS = frozenset(
    [
        "--model_name_or_path",
        "--per_device_train_batch_size",
        "--output_dir",
        "--num_train_epochs",
        "--learning_rate",
        *("--tuner_type", "--train_type", "--sft_type", "--lora_rank", "--torch_dtype"),
    ]
)
"""Those of a command that runs Hugging Face's Trainer."""

_DEEPSPEED_MARKS = ("--deepspeed", "--zero-stage", "--deepspeed_config")
"""Arguments that Megatron-DeepSpeed has and Megatron-LM has not."""


_TORCHTITAN = re.compile(r"(?:.*/)?run_train\.sh|torchtitan\.train|(?:.*/)?torchtitan/train\.py")


def runs_torchtitan(word: str) -> bool:
    """Whether ``word`` of a command is what runs torchtitan."""
    return _TORCHTITAN.fullmatch(word) is not None


_OF_BRIDGE = ("run_recipe.py", "setup_experiment.py", "custom_setup_experiment.py", "run_script.py")


def runs_bridge(word: str) -> bool:
    """Whether ``word`` of a command is what runs Megatron-Bridge's recipes."""
    return word.rpartition("/")[2] in _OF_BRIDGE


def gpus_of(started: Started, at: int) -> str:
    """How many GPUs the launcher in front of word ``at`` of a command says; empty where it says nothing."""
    found = _product(
        _number_of(started.words[:at], _NODES) or Node(1, started.origin),
        _number_of(started.words[:at], _PER_NODE),
        started.origin,
    )
    return str(found.value) if found is not None else ""


def is_trainer(holds_arguments: IsMark) -> IsMark:
    """Whether a word is an argument by which a command that runs the Trainer is known, or a file that
    ``holds_arguments`` of it."""
    return lambda word: word.partition("=")[0] in _TRAINER_MARKS or holds_arguments(word)


def started_by(
    content: str, source: str, given: Mapping[str, str], folder: Path, holds_arguments: IsMark, says_itself: IsMark
) -> str:
    """The format of the arguments with which the script ``content`` starts a training: Megatron's where nothing
    speaks for another. ``says_itself`` a Python file in which the Trainer's arguments stand."""
    try:
        reading = read_script(content.replace("\r\n", "\n"), source, given, beside(folder))
    except ScriptError as error:
        raise refused(error) from None
    for started in reading.started:
        if any(runs_torchtitan(text(word)) for word in started.words):
            return "torchtitan"
        if any(runs_bridge(text(word)) for word in started.words):
            return "megatron-bridge"
        if not {text(word).rpartition("/")[2] for word in started.words}.isdisjoint(_OF_TRAINER):
            return "trainer"
        if (start := _script_of(started.words, is_megatron)) is not None:
            names = {text(word).partition("=")[0] for word in started.words[start:]}
            return "megatron-deepspeed" if names & {*_DEEPSPEED_MARKS} else "megatron"
        if _script_of(started.words, is_trainer(holds_arguments)) is not None:
            return "trainer"
    if any(_script_of(started.words, says_itself) is not None for started in reading.started):
        return "trainer"
    return "megatron"


_OF_TRAINER = frozenset(("trl", "llamafactory-cli", "axolotl", "axolotl.cli.train", "swift"))
"""Commands that run the Trainer, whatever their flags are called."""
_BY_ENVIRONMENT = ("swift", "llamafactory-cli")
"""Those that start torchrun themselves, with as many processes as variables say (``swift/cli/main.py``,
``llamafactory/launcher.py``)."""
_ON_ALL = frozenset(
    ("accelerate", "accelerate-launch", "accelerate.commands.launch", "axolotl", "deepspeed", "llamafactory-cli", "trl")
)
"""Launchers that start a process on every GPU that they find, where nothing says how many."""
_ONE_EACH = re.compile(r"(?:--nproc[_-]per[_-]node=)?(?:gpu|auto)")
"""What has ``torchrun`` do so."""
_ALONE = re.compile(r"(?:.*/)?(?:python[0-9.]*|env|nohup)|-[a-z]+|[A-Z_]+=.*", re.DOTALL)
"""Words in front of a script that one process runs."""
_SCRIPT = re.compile(r"(?:.*/)?([\w.-]+)\.py")
_PASSED = re.compile(r"(?:-x|-e|--env=|--export=(?:ALL,)?)?([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
_PER_NODE_OF_LAUNCHERS = ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--num-gpus")
_PER_NODE = (*_PER_NODE_OF_LAUNCHERS, "--gpus-per-node", "--gpus_per_node")
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
    others: tuple[str, ...] = ()
    """Where the script starts further trainings, which are not read, or what else makes them."""
    on_all: bool = False
    """There is a process on every GPU that the launcher finds, and nothing says how many these are."""
    unsaid: PlanError | None = None
    """What would say how many GPUs there are, and is not known: hosts that nothing here lists, a value."""

    @property
    def notes(self) -> tuple[Note, ...]:
        """That the script starts further trainings."""
        told = one_line(f"only the first training at {self.origin} was read; {'; '.join(self.others)}")
        return (Note("several-trainings", told),) if self.others else ()

    def spread(self) -> tuple[int, int] | None:
        """Processes, and GPUs that they see, where these are several for each: ``python`` alone, and ``swift``, whose
        ``is_mp`` (``swift/utils/env.py``) spreads each model over its share then."""
        seen, runners = _visible(self.environment), [text(word) for word in self.launcher]
        alone = all(_ALONE.fullmatch(word) for word in runners)
        processes = self.gpus.value if self.gpus is not None else 1
        if not (alone or "swift" in runners) or seen is None or not isinstance(processes, int):
            return None
        return (processes, seen) if seen >= 2 * processes else None


IsMark: TypeAlias = "Callable[[str], bool]"
"""Whether a word behind a training script is one by which it is known."""


def is_megatron(word: str) -> bool:
    """Whether ``word`` is an argument by which a training command of Megatron is known."""
    return word.partition("=")[0] in _MARKS


def training_in(reading: Reading, source: str, folder: Path, marks: IsMark = is_megatron) -> Training:
    """The command in ``reading`` of a script in ``folder`` that trains, known by one of its words; the first of
    several."""
    found = [(one, start) for one in reading.started if (start := _script_of(one.words, marks)) is not None]
    if not found:
        raise _no_training(reading, source)
    started, start = found[0]
    launcher, job = started.words[:start], started.job
    hosts = hosts_of(launcher, partial(_hostfile, reading, folder))
    per_node = hosts.per_node or _number_of(launcher, _PER_NODE)
    said = any(text(word).partition("=")[0] in (*_NODES, *_NODES_OF_SRUN) for word in launcher)
    alone = None if hosts.missing else Node(1, started.origin)
    nodes = _number_of(launcher, (*_NODES, *_NODES_OF_SRUN)) if said else alone
    if not said and per_node is not None and _number_of(launcher, _PER_NODE_OF_LAUNCHERS) is None:
        nodes = _of_job(job, "SLURM_NNODES", nodes)  # srun's own flags, on each node of the job
    gpus = hosts.gpus or _product(nodes, per_node, started.origin)
    if gpus is None and per_node is None and not hosts.missing:
        is_told = any(text(word).partition("=")[0] in _PER_NODE_OF_LAUNCHERS for word in launcher)
        gpus = None if is_told else _processes(launcher, nodes if said else None, job, started.origin)
        gpus = gpus or _gpus_of_job(job, started.origin)
    environment = {**started.environment, **_passed(launcher)}
    if gpus is None and _reads_environment(launcher):
        per_node = _of_job(environment, "NPROC_PER_NODE")
        gpus = _gpus_of_environment(environment, started.origin)
    on_all = gpus is None and per_node is None and _starts_on_all(launcher)
    seen = _visible(environment)
    if on_all and seen is not None and nodes is not None:
        gpus, on_all = _product(nodes, Node(seen, started.origin), started.origin), False
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
        _others([one for one, _ in found]),
        on_all,
        _unsaid(started, launcher, hosts.missing, reading, environment) if gpus is None else None,
    )


def _others(found: Sequence[Started]) -> tuple[str, ...]:
    """What else starts trainings beside the first of ``found``: other lines, and its own, where it starts several that
    differ."""
    first, *rest = found
    again = [one for one in rest if one.origin == first.origin and _seen_of(one) != _seen_of(first)]
    lines = {one.origin for one in rest} - {first.origin}
    shown = [str(origin.line or origin) for origin in sorted(lines, key=lambda o: o.line or 0)]
    told = [f"others start at line {', '.join(shown)}"] if shown else []
    if again:
        which = f"; --set {first.loops[-1]}=value reads another round of its loop" if first.loops else ""
        told.append(f"its line starts {len(again)} more with other values{which}")
    return tuple(told)


def _seen_of(started: Started) -> tuple[list[str], dict[str, str]]:
    return [*map(text, started.words)], {name: text(value) for name, value in started.job.items()}


_OF_NUMBERS = (*_NODES, *_NODES_OF_SRUN, *_PER_NODE, *_PROCESSES, *_PER_NODE_OF_SRUN)


def _unsaid(
    started: Started, launcher: Sequence[Value], hosts: str, reading: Reading, environment: Mapping[str, Value]
) -> PlanError | None:
    """Why nobody knows how many GPUs the command has; nothing where nothing begins to say it."""
    if hosts:
        problem = "is not here, and lists the hosts that the launcher starts on: say --gpus N for all of them"
        return PlanError("--hostfile", hosts, problem, origin=started.origin)
    for flag, value in pairwise([*launcher, ()]):
        name, equals, _ = text(flag).partition("=")
        value = flag if equals else value
        if name in _OF_NUMBERS and (unknowns := reading.ledger.unknowns(value)):
            return _needed(unknowns[0], started)
    counts = [started.job.get(name, ()) for name in _COUNTS_OF_JOB]
    if _reads_environment(launcher):
        counts += [environment.get(name, ()) for name in _COUNTS_OF_ENVIRONMENT]
    unknowns = [one for value in counts for one in reading.ledger.unknowns(value)]
    return _needed(unknowns[0], started) if unknowns else None


_COUNTS_OF_JOB = ("SLURM_NNODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_GPUS", "SLURM_GPUS_ON_NODE")


_COUNTS_OF_ENVIRONMENT = ("NNODES", "NPROC_PER_NODE")


def _reads_environment(launcher: Sequence[Value]) -> bool:
    """Whether ``_COUNTS_OF_ENVIRONMENT`` say how many processes are started."""
    return not {text(word).rpartition("/")[2] for word in launcher}.isdisjoint(_BY_ENVIRONMENT)


def _needed(unknown: Unknown, started: Started) -> PlanError:
    problem = f"is needed, and {unknown.why}{' or' if unknown.ask else '; give it as'} --gpus N"
    return PlanError("hardware.gpus", ABSENT, problem, origin=started.origin)


def _hostfile(reading: Reading, folder: Path, name: str) -> str | None:
    """The text of the file ``name``, which the script writes itself or finds."""
    if (written := reading.files.get(name)) is not None:
        return text(written) if is_known(written) else None
    path = found_from(name, folder)
    return read_text(path) if is_there(path) else None


def _starts_on_all(launcher: Sequence[Value]) -> bool:
    words = [text(word) for word in launcher]
    return any(word.rpartition("/")[2] in _ON_ALL or _ONE_EACH.fullmatch(word) for word in words)


def _visible(environment: Mapping[str, Value]) -> int | None:
    """GPUs that ``CUDA_VISIBLE_DEVICES`` names."""
    value = environment.get("CUDA_VISIBLE_DEVICES")
    listed = text(value).split(",") if value is not None and is_known(value) else []
    return len(listed) if all(one.strip() for one in listed) and listed else None


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


def _gpus_of_job(job: Mapping[str, Value], origin: Origin) -> Node | None:
    """GPUs that a job of Slurm asks for: in all, or on each node."""
    nodes = _of_job(job, "SLURM_NNODES", Node(1, origin))
    return _of_job(job, "SLURM_GPUS") or _product(nodes, _of_job(job, "SLURM_GPUS_ON_NODE"), origin)


def _of_job(job: Mapping[str, Value], name: str, otherwise: Node | None = None) -> Node | None:
    """What ``job`` says; ``otherwise`` where it says nothing, and nothing where what it says is not known."""
    value = job.get(name)
    if not value:
        return otherwise
    return scalar(text(value), value[0].origin) if is_known(value) else None


RUNNERS = ("-m", "trl", "llamafactory-cli", "axolotl", "swift")
"""Words before the name of what trains, where that is no file."""


_TRAINS = frozenset(
    (
        *(("swift", command) for command in ("sft", "pt", "rlhf")),
        *(("llamafactory-cli", "train"), ("axolotl", "train")),
        *(("trl", command) for command in ("sft", "dpo", "grpo", "kto", "reward", "rloo")),
    )
)
"""Commands that train, whatever their flags are called."""
_IDLE = frozenset(
    (tool, command)
    for tool, commands in (
        ("swift", "infer merge-lora web-ui deploy rollout sample export eval app"),
        ("llamafactory-cli", "export chat api webchat webui eval"),
        ("axolotl", "preprocess inference merge-lora merge-sharded-fsdp-weights evaluate lm-eval quantize vllm-serve"),
    )
    for command in commands.split()
)
"""Commands of what trains that train nothing."""


def _script_of(words: Sequence[Value], is_mark: IsMark) -> int | None:
    """Position of the training script: the command of a tool that trains, or the last Python file or module up to the
    first word that ``is_mark``."""
    pairs = [(text(before).rpartition("/")[2], text(word)) for before, word in pairwise(words)]
    commands = [n + 1 for n, one in enumerate(pairs) if one in _TRAINS]
    if commands and is_mark is not is_megatron:
        return commands[0]
    first = next((n for n, word in enumerate(words) if is_mark(text(word))), None)
    if first is None or any(one in _IDLE for one in pairs[:first]):
        return None
    files = [n for n, word in enumerate(words[: first + 1]) if _SCRIPT.fullmatch(text(word))]
    modules = [
        n + 1
        for n, word in enumerate(words[: first - 1])
        if text(word) in RUNNERS and not text(words[n + 1]).startswith("-")  # a flag's value: --model_author swift
    ]
    return next(iter(files[-1:] or modules[-1:]), None)


def _name_of(word: Value) -> str:
    match = _SCRIPT.fullmatch(text(word))
    return match[1] if match is not None else text(word).rpartition(".")[2]


def _no_training(reading: Reading, source: str) -> PlanError:
    origin = Origin(source)
    if reading.undecided:
        return _depends(reading.undecided[0])
    for started in reading.started:
        for before, word in zip(((), *started.words), started.words, strict=False):
            unknowns = reading.ledger.unknowns(word)
            if unknowns and unknowns[0].ask and len(text(word)) == 1 and not text(before).startswith("-"):
                return wrong_at(unknowns[0].origin, f"starts no training that can be read: {unknowns[0].why}")
    for started in reading.started:
        pairs = [*pairwise([text(word) for word in started.words])]
        if _PREFERENCES in pairs:
            return wrong_at(
                started.origin, "starts ms-swift's training on preferences under Megatron, which is not modelled"
            )
        by_jax = next(
            (one for one in map(_BY_JAX.match, (text(started.words[n]) for n in _scripts(started.words))) if one), None
        )
        if by_jax is not None:
            return wrong_at(started.origin, f"starts {by_jax[1]}, which trains by JAX, and memplan plans PyTorch alone")
        own = next((_OWN_COMMANDS[one] for pair in pairs for one in (pair, pair[:1]) if one in _OWN_COMMANDS), None)
        if own is not None:
            name, tool = own
            given = _arguments(started.words)
            model = next(
                (word for word in started.words[2:3] if is_known(word) and not text(word).startswith("-")), None
            )
            if model:  # litgpt finetune_lora MODEL
                given = given.with_items({"checkpoint_dir": scalar(text(model), started.origin), **given.mapping})
            if (gpus := _gpus_of_environment(started.environment, started.origin)) is not None:
                given = given.with_items({"_gpus_": gpus, **given.mapping})
            problem = in_flags(tool, given, f"starts {name}, whose command is not read")
            return wrong_at(started.origin, problem)
    for started in reading.started:
        said = _hydra(started.words)
        parts = {part for name in said.mapping for part in name.split(".")}
        known = {
            tool: sum(key in said.mapping for key, _ in tool.flags) + SEVERAL * (not parts.isdisjoint(tool.marks))
            for tool in ELSEWHERE
        }
        tool = max(ELSEWHERE, key=lambda one: known[one])
        if known[tool] >= SEVERAL:
            problem = in_flags(tool, said, f"starts {tool.name}, whose configuration is not read")
            return wrong_at(started.origin, problem)
    own_ones = [(one, at, _arguments(one.words[at + 1 :])) for one in reading.started for at in _scripts(one.words)]
    found = max(own_ones, key=lambda one: len(one[2].mapping), default=None)
    if found is not None and len(found[2].mapping) >= SEVERAL:
        run, at, said = found
        script, names = reading.ledger.shown(run.words[at]), ", ".join([*said.mapping][:5])
        what = f"starts no training that can be read: {script} takes arguments of its own ({names})"
        by_deepspeed = any(text(word).rpartition("/")[2] == "deepspeed" for word in run.words[:at])
        given = started_as(said, f"{source}/{script}", by_deepspeed=by_deepspeed)
        return wrong_at(run.origin, in_flags(OF_SCRIPTS, given, what))
    if reading.perhaps:
        return _depends(reading.perhaps[0])
    what = "starts no training that can be read: no command runs a Python file with arguments such as "
    what += "--per_device_train_batch_size or --num-layers"
    missing = [
        f"{name}, which line {where.line} runs, is not found below the script's folder"
        for name, where in reading.missing
    ]
    what = "; ".join([what, *unread(reading)[:1], *missing[:1], *_files_given(reading)[:1]])
    return wrong_at(origin, what)


def _depends(unknown: Unknown) -> PlanError:
    remedy = f"give --set {unknown.ask}=value" if unknown.ask else "keep the branch that applies"
    return wrong_at(
        unknown.origin,
        f"whether training starts depends on {unknown.shown}, which cannot be decided; {remedy}, or give the "
        "files of settings that it starts the training with: memplan estimate CONFIG.yaml ACCELERATE.yaml",
    )


MAPPINGS = (".json", ".yaml", ".yml")
"""Endings of files that hold a mapping."""


SEVERAL = 3
"""Arguments that are not known: a script that takes so many has a parser of its own."""
_PREFERENCES = ("megatron", "rlhf")
_BY_JAX = re.compile(r"(?i)(?:.*/)?(maxtext|levanter|easylm|t5x)[./]")
"""Files and modules of tools that train by JAX."""
_OWN_COMMANDS: Mapping[tuple[str, ...], tuple[str, Elsewhere]] = {
    ("tune",): ("torchtune", OF_FILES),
    ("automodel",): ("NeMo AutoModel", OF_FILES),
    ("litgpt",): ("LitGPT", LITGPT),
    ("autotrain",): ("AutoTrain", OF_SCRIPTS),
    ("xtuner",): ("XTuner", OF_SCRIPTS),
    ("ludwig",): ("Ludwig", OF_SCRIPTS),
    ("megatron", "sft"): ("ms-swift's Megatron", OF_MEGATRON),
    ("megatron", "pt"): ("ms-swift's Megatron", OF_MEGATRON),
}
"""Commands, with what follows them where that says which, that are not read."""


def _scripts(words: Sequence[Value]) -> list[int]:
    """Position of the Python file or module that ``words`` run."""
    files = [n for n, word in enumerate(words) if _SCRIPT.fullmatch(text(word))]
    modules = [n + 1 for n, word in enumerate(words[:-1]) if text(word) in ("-m", "--module")]
    own = [n for n in modules if not text(words[n]).startswith(_LAUNCHING_MODULES)]
    return own[:1] if own and own[0] < min(files, default=len(words)) else files[:1] or modules[-1:]


_LAUNCHING_MODULES = ("torch.distributed.", "accelerate.", "deepspeed.")


def _gpus_of_environment(environment: Mapping[str, Value], origin: Origin) -> Node | None:
    """GPUs of a job whose launcher reads ``NPROC_PER_NODE`` and ``NNODES``."""
    counts = (_of_job(environment, "NNODES", Node(1, origin)), _of_job(environment, "NPROC_PER_NODE"))
    for name, count in zip(_COUNTS_OF_ENVIRONMENT, counts, strict=True):
        if count is not None and not (type(count.value) is int and count.value > 0):
            raise count.wrong(name, "must be a whole number of 1 or more")
    return _product(*counts, origin)


def _arguments(words: Sequence[Value]) -> Node:
    """What stands in a command behind its script, by names without hyphens; several values of one are a list."""
    origin = Origin("")
    known = [one for one in taken_apart(words, {}, origin)[0] if all(map(is_known, one.values))]
    items = {
        one.name.removeprefix("--").replace("-", "_"): scalar(text(one.values[0]), one.origin)
        if len(one.values) == 1
        else Node([scalar(text(value), one.origin) for value in one.values] or True, one.origin)
        for one in known
    }
    return Node(items, origin)


def _hydra(words: Sequence[Value]) -> Node:
    """``model.micro_batch_size=2`` and the like among ``words``, and the recipe that ``--factory`` names."""
    pairs = [(text(word), word) for word in words if is_known(word)]
    items = {
        name.lstrip("+~"): scalar(value, word[0].origin)
        for (name, equals, value), word in ((one.partition("="), word) for one, word in pairs)
        if equals and not name.startswith("-") and word
    }
    factory = next((after for (before, _), (after, _) in pairwise(pairs) if before == "--factory"), None)
    return Node({**items, **({"_factory_": scalar(factory, Origin(""))} if factory else {})}, Origin(""))


def _files_given(reading: Reading) -> list[str]:
    """Files of arguments that a Python file is given."""
    return [
        f"{reading.ledger.shown(word)}, which line {started.origin.line} gives it, is not there or holds no arguments "
        "that are read"
        for started in reading.started
        for word in started.words
        if text(word).endswith(MAPPINGS)
    ]


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
    return Node(nodes.whole * per_node.whole, origin)


def _passed(words: Sequence[Value]) -> dict[str, Value]:
    """``NAME=value`` among a launcher's words, as ``env``, ``mpirun -x`` and containers take them."""
    passed: dict[str, Value] = {}
    for word in words:
        match = _PASSED.fullmatch(text(word))
        if match is not None:
            passed[match[1]] = (word[0]._replace(text=match[2]),) if word else ()
    return passed
