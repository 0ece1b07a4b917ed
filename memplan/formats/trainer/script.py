"""The Trainer's arguments behind a training script that a shell script starts, and what its launchers say.

``torchrun``, ``deepspeed``, ``srun`` and ``accelerate launch`` in front of ``run_clm.py --model_name_or_path …``: words
are taken apart as ``HfArgumentParser`` does (``hf_argparser.py`` of transformers 5.23), where ``--bf16`` alone is true.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path

from ...bash.origin import ScriptError
from ...bash.shell import read_script
from ...bash.values import Ledger, Reading, Value, is_known, origin_of, text
from ...plan.errors import ABSENT, Node, Origin, PlanError, one_line, refused, scalar, together, wrong_at
from ...plan.notes import Note
from ...plan.text import is_there, read_text
from ...values import dataclass
from ..accelerate import Accelerated, changes_memory, configured, file_named, split_off
from ..files import node_of_written
from ..launch import Asked
from ..launchers import MAPPINGS, RUNNERS, Training, beside, found_from, is_trainer, training_in, unread
from ..recognised import holds_arguments
from ..settings import Given, needed, taken_apart
from ..training_scripts import matters, with_unread
from . import swift
from .examples import BY_HAND
from .keys import NOTED, READ, REFUSED, WITHOUT_EFFECT
from .pins import Pins
from .python import Script, UnreadError, positions_in, python_in, script_in, takes_arguments
from .trl import LOOPS, TRAINER, Loop


@dataclass(frozen=True, slots=True)
class Started:
    """The Trainer's arguments, and what is said in front of them."""

    arguments: Node
    """A mapping."""
    folder: Path
    """What relative paths start from."""
    gpus: Node | None = None
    accelerate: Accelerated | None = None
    script: str = ""
    """Name of what is started."""
    loop: Loop = TRAINER
    on_all: bool = False
    """The launcher starts a process on every GPU that it finds, and nothing says how many."""
    environment: Mapping[str, Node] = field(default_factory=dict)
    """Variables that the scripts set and that may change memory."""
    notes: tuple[Note, ...] = ()
    said: Script | None = None
    """The Python file that is started, where it was read."""
    called: str = ""
    """Name of what is started, whatever trainer it has."""
    by_deepspeed: bool = False
    """DeepSpeed's own launcher starts it."""
    pins: Pins = field(default_factory=dict)
    """Releases that its files ask for."""


def started(content: str, source: str, folder: Path, asked: Asked) -> Started:
    """What the script ``content``, called ``source`` and read in ``folder``, starts."""
    try:
        reading = read_script(content.replace("\r\n", "\n"), source, asked.variables(), beside(folder))
        training = _training(reading, source, folder)
    except ScriptError as error:
        raise refused(error) from None
    _check_spread(training, asked)
    given, loose = taken_apart(_spelt_out(training, reading, folder), {}, training.origin)
    wrong: list[PlanError] = []
    read = READ if asked.names & {"gpus", "dp"} else READ | {"num_processes"}
    flags = with_written(dict(_entries(given, reading.ledger, wrong, read)), reading, wrong)
    placed, rest = _by_place(training, loose, {_key(one) for one in given}, reading, folder)
    flags |= {name: scalar(text(word), origin_of(word, training.origin)) for name, word in placed if is_known(word)}
    said = _of_python(reading, folder, asked) if not flags else None
    notes = (*training.notes, *rest)
    base = said.arguments.mapping if said is not None else _of_file(flags, loose, folder)
    if said is None:
        try:
            unknown = [_key(one) for one in given if not all(map(is_known, one.values))]
            unknown += [name for name, word in placed if not is_known(word)]
            said = _beside(training.script, reading, folder, asked, {**base, **flags}, unknown)
        except UnreadError as error:  # the command alone says the job then
            problem = f"{training.script}.py is no Python that can be read ({error.origin}): what it does beside its "
            notes = (*notes, Note("not-followed", f"{problem}arguments is left out"))
        flags = {name: node for name, node in flags.items() if said is None or name not in said.used}
        base = {**(said.arguments.mapping if said is not None else {}), **base}
    arguments = Node({**base, **flags, **_compiled(training)}, training.origin)
    front = _of_launcher(training.launcher, training.origin)
    decisive = {name for name in map(_key, front or ()) if changes_memory(name)}
    launcher = None if front is None else dict(_entries(front, reading.ledger, wrong, read | decisive))
    if wrong:
        raise with_unread(together(wrong), unread(reading))
    runners = {text(word).rpartition("/")[2] for word in training.launcher}
    by_trl = "trl" in runners
    if "swift" in runners and arguments.mapping.keys().isdisjoint(swift.MARKS):
        arguments = arguments.with_items({swift.MARKS[0]: Node(SWIFT_TRAINS.get(training.script), training.origin)})
    script = (said.script if said is not None else "") or training.script
    command = text(training.launcher[-1]).rpartition("/")[2] if training.launcher else ""
    if command == "trl" and not any(script in one.scripts and not one.experimental for one in LOOPS):
        problem = (
            f"starts trl {one_line(script)}, which is none of its commands that are followed: "
            "sft, dpo, kto, grpo, rloo, reward"
        )
        raise wrong_at(training.origin, problem)
    named = script.endswith(BY_HAND) or any(script in one.scripts for one in LOOPS)
    if not (named or runners & {*RUNNERS} or arguments.mapping.keys() & TRAINS):
        raise wrong_at(
            training.origin,
            f"starts {script}.py, whose arguments ({', '.join([*arguments.mapping][:6])}) say nothing of a training; "
            "if it trains, say the job in flags, such as --model NAME --mbs 1 --seq 2048",
        )
    variables = {
        name: Node(text(value), origin_of(value, training.origin))
        for name, value in training.environment.items()
        if matters(name) and is_known(value)
    }
    if said is not None:
        variables |= said.environment
    found = Started(arguments, folder, training.gpus, None, script, TRAINER, training.on_all, variables)
    found = replace(found, said=said, called=training.script, notes=notes, by_deepspeed="deepspeed" in runners)
    return with_launcher(found, launcher, by_trl=by_trl)


TRAINS = frozenset(
    """
    per_device_train_batch_size num_train_epochs max_steps learning_rate do_train gradient_accumulation_steps bf16 fp16
    gradient_checkpointing deepspeed fsdp fsdp_config optim train_file max_train_samples lora_r lora_rank use_peft
    stage tuner_type
    """.split()  # noqa: SIM905 - as in ``keys``
)
"""Arguments that only a training has: a script that converts a model takes its name and a folder, too."""


def _check_spread(training: Training, asked: Asked) -> None:
    """Refuses hosts that nobody lists, and several GPUs for a process, unless a flag says who runs where."""
    if training.unsaid is not None and not asked.names & {"gpus", "dp"}:
        raise training.unsaid
    spread = training.spread()
    if spread is None or asked.names & {"gpus", "dp", "framework"}:
        return
    processes, seen = spread
    if "swift" in {text(word) for word in training.launcher}:
        how = f"ms-swift spreads a model over {seen // processes} of them by a device map"
    else:
        how = "transformers wraps the model in DataParallel"
    problem = (
        f"names {seen} GPUs for {processes} process{'es' * (processes > 1)}: {how}, which is not read; of a process on "
        f"each GPU say --gpus {seen}, of one GPU --gpus 1"
    )
    raise PlanError("CUDA_VISIBLE_DEVICES", ABSENT, problem, origin=training.origin)


REGIONS = "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"
_SWITCHED_ON = ("y", "yes", "t", "true", "on", "1")
"""As accelerate reads switches in the environment (``utils/environment.py``, ``str_to_bool``)."""


def _compiled(training: Training) -> dict[str, Node]:
    """``TorchDynamoPlugin`` reads a variable where the Trainer's arguments say nothing; ``accelerate launch`` sets it
    anew (``utils/launch.py`` of accelerate 1.15)."""
    by_accelerate = any(text(word).rpartition("/")[2].startswith("accelerate") for word in training.launcher)
    backend = training.environment.get("ACCELERATE_DYNAMO_BACKEND")
    if backend is None or by_accelerate or text(backend).upper() in ("NO", ""):
        return {}
    regions = training.environment.get(REGIONS)
    if regions is not None and text(regions).lower() in _SWITCHED_ON:
        problem = "is read of accelerate launch alone (--dynamo_use_regional_compilation); elsewhere leave it out, and"
        raise scalar(text(regions), origin_of(regions, training.origin)).wrong(
            REGIONS, f"{problem} say --compile-regions"
        )
    return {"torch_compile_backend": scalar(text(backend), origin_of(backend, training.origin))}


SWIFT_TRAINS = {"sft": "lora", "pt": "lora", "rlhf": "lora"}
"""What ``swift``'s commands train, unless said."""
_WRITTEN = ("deepspeed", "fsdp_config")
"""Arguments that name a file of settings."""


def with_written(flags: dict[str, Node], reading: Reading, wrong: list[PlanError]) -> dict[str, Node]:
    """``flags`` where one names a file that the script writes itself, a here-document: what stands in it."""
    found = dict(flags)
    for name in _WRITTEN:
        node = flags.get(name)
        content = reading.files.get(str(node.value)) if node is not None else None
        if node is None or content is None:
            continue
        if not is_known(content):
            unknown = reading.ledger.unknowns(content)[0]
            wrong.append(needed(f"--{name}", str(node.value), unknown, node.origin))
        else:
            found[name] = node_of_written(content, node.origin)
    return found


def _training(reading: Reading, source: str, folder: Path) -> Training:
    """The command that trains: with the Trainer's arguments, or by a Python file in which they stand."""
    try:
        return training_in(reading, source, folder, is_trainer(holds_arguments(folder)))
    except PlanError as error:
        with suppress(PlanError):
            return training_in(reading, source, folder, python_in(folder))
        raise error from None


def _of_python(reading: Reading, folder: Path, asked: Asked) -> Script | None:
    """What a Python file that ``reading`` starts says itself."""
    words = [text(word) for one in reading.started for word in one.words]
    named = next((word for word in words if python_in(folder)(word)), None)
    if named is None:
        return None
    path = found_from(named, folder)
    return script_in(read_text(path), str(path), asked.names, {})


def _beside(
    name: str, reading: Reading, folder: Path, asked: Asked, flags: Mapping[str, Node], unknown: Collection[str]
) -> Script | None:
    """What the Python file that is started with ``flags``, and with ``unknown`` ones, does by itself, where it is at
    hand."""
    content, path = _content(name, reading, folder)
    return script_in(content, path, asked.names, flags, unknown) if takes_arguments(content) else None


def _content(name: str, reading: Reading, folder: Path) -> tuple[str, str]:
    """The Python file ``name`` that is started, and its path; nothing where it is not at hand."""
    words = (text(word) for one in reading.started for word in one.words)
    places = (found_from(word, folder) for word in words if word.endswith(f"{name}.py"))
    path = next((place for place in places if is_there(place)), None)
    return (read_text(path), str(path)) if path is not None else ("", "")


_OPTIONS = re.compile(r"""add_argument\(\s*((?:["']-[\w-]+["']\s*,?\s*)+)""")


def _spelt_out(training: Training, reading: Reading, folder: Path) -> list[Value]:
    """The words of ``training`` with short options (``-m``) by the long names that the Python file declares."""
    long: dict[str, str] = {}
    if any(text(word).startswith("-") and text(word)[1:2].isalpha() for word in training.words):
        for declared in _OPTIONS.finditer(_content(training.script, reading, folder)[0]):
            names = re.findall(r"-[\w-]+", declared[1])
            full = next((name for name in names if name.startswith("--")), "")
            long |= {name: full for name in names if full and name != full}
    return [
        (word[0]._replace(text=long[text(word)]),) if word and text(word) in long else word for word in training.words
    ]


def with_launcher(found: Started, launcher: Mapping[str, Node] | None = None, *, by_trl: bool = True) -> Started:
    """``found`` with what ``launcher``'s flags of Accelerate say and, with ``by_trl``, those among the arguments, which
    trl passes on."""
    arguments, passed = split_off(found.arguments) if by_trl else (found.arguments, {})
    if launcher is None and not passed:
        return found
    accelerate = configured({**(launcher or {}), **passed}, arguments, found.folder)
    return replace(found, arguments=arguments, gpus=found.gpus or accelerate.processes, accelerate=accelerate)


def _by_place(
    training: Training, loose: Sequence[Value], named: Collection[str], reading: Reading, folder: Path
) -> tuple[list[tuple[str, Value]], tuple[Note, ...]]:
    """Words behind the script that are arguments by their place alone, less those ``named`` by flags; and a note of
    words that are left: neither such an argument, nor a file, nor a name with a value."""
    words = [word for word in loose if not (text(word).endswith(MAPPINGS) or "=" in text(word)) and text(word)]
    declared = positions_in(_content(training.script, reading, folder)[0]) if words else []
    open_still = [name for name in declared if name not in named]
    rest = [reading.ledger.shown(word) for word in words[len(open_still) :]]
    several = f"{' '.join(rest[:8])}{' …' if len(rest) > 8 else ''} ({training.origin})"
    verb = "belongs" if len(rest) == 1 else "belong"
    notes = (Note("argument-loose", one_line(f"{several} {verb} to no argument that is known")),) if rest else ()
    return [*zip(open_still, words, strict=False)], notes


def _of_file(flags: dict[str, Node], loose: Sequence[Value], folder: Path) -> Mapping[str, Node]:
    """What stands in the file of arguments that is given: the one word behind the script (``HfArgumentParser``'s
    ``parse_json_file``), or ``--config`` (``TrlParser``), over which flags are."""
    named = flags.get("config")
    if named is None or not str(named.value).endswith(MAPPINGS):
        files = [word for word in loose if is_known(word) and text(word).endswith(MAPPINGS)]
        if not files:
            return {}
        named = Node(text(files[0]), origin_of(files[0], Origin("")))
    flags.pop("config", None)
    return {**file_named(named, folder, "config", "the Trainer's arguments").mapping, **_overridden(loose)}


def _overridden(loose: Sequence[Value]) -> dict[str, Node]:
    """``key=value`` behind the file, as ``llamafactory-cli`` takes them (``hparams/parser.py``: ``read_args``)."""
    found: dict[str, Node] = {}
    for word in loose:
        name, equals, value = text(word).partition("=")
        if equals and is_known(word) and name.isidentifier():
            found[name] = scalar(value, origin_of(word, Origin("")))
    return found


def _entries(
    given: Sequence[Given], ledger: Ledger, wrong: list[PlanError], read: Collection[str]
) -> Iterator[tuple[str, Node]]:
    """Keys and values; those of ``read`` that are not known are asked for in ``wrong``."""
    for one in given:
        name = _key(one)
        unknown = next((value for value in one.values if not is_known(value)), None)
        if unknown is not None:
            if name in read:
                where = origin_of(unknown, one.origin)
                wrong.append(needed(one.name, ledger.shown(unknown), ledger.unknowns(unknown)[0], where))
            continue
        values = [scalar(text(value), origin_of(value, one.origin)) for value in one.values]
        if not values and name.startswith("no_") and name[3:] in _TRUE:  # HfArgumentParser's, of what is true by itself
            yield name[3:], Node(False, one.origin)
            continue
        yield name, values[0] if len(values) == 1 else Node(values or True, one.origin)


def _key(given: Given) -> str:
    return given.name.removeprefix("--").replace("-", "_")


_TRUE = frozenset({*READ, *REFUSED, *NOTED, *WITHOUT_EFFECT})


def _of_launcher(launcher: Sequence[Value], origin: Origin) -> list[Given] | None:
    """Flags of ``accelerate launch``, if that starts the training; the last word may be the command that it runs."""
    words = [text(word) for word in launcher]
    at = next((n for n, word in enumerate(words) if word.rpartition("/")[2] in _ACCELERATE), None)
    if at is None:
        return None
    return taken_apart(launcher[at + 1 : len(words) - (words[-1] in RUNNERS)], {}, origin)[0]


_ACCELERATE = ("accelerate", "accelerate-launch", "accelerate.commands.launch")
