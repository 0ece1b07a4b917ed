"""The Trainer's arguments behind a training script that a shell script starts, and what its launchers say.

``torchrun``, ``deepspeed``, ``srun`` and ``accelerate launch`` in front of ``run_clm.py --model_name_or_path …``: words
are taken apart as ``HfArgumentParser`` does (``hf_argparser.py`` of transformers 5.23), where ``--bf16`` alone is true.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ...bash.origin import ScriptError
from ...bash.shell import read_script
from ...bash.values import Ledger, Reading, Value, is_known, origin_of, text
from ...plan.errors import Node, Origin, PlanError, refused, scalar, together
from ...plan.text import read_text
from ...values import dataclass
from ..accelerate import Accelerated, file_named
from ..accelerate_flags import configured, split_off
from ..files import node_of_written
from ..launch import Asked
from ..launchers import MAPPINGS, RUNNERS, Training, beside, found_from, is_trainer, training_in, unread
from ..recognised import holds_arguments
from ..settings import Given, needed, taken_apart
from ..training_scripts import with_unread
from . import swift
from .keys import READ
from .python import Script, python_in, script_in
from .trl import TRAINER, Loop


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


def started(content: str, source: str, folder: Path, asked: Asked) -> Started:
    """What the script ``content``, called ``source`` and read in ``folder``, starts."""
    try:
        reading = read_script(content.replace("\r\n", "\n"), source, asked.variables(), beside(folder))
        training = _training(reading, source, folder)
    except ScriptError as error:
        raise refused(error) from None
    given, loose = taken_apart(training.words, {}, training.origin)
    wrong: list[PlanError] = []
    read = READ if asked.names & {"gpus", "dp"} else READ | {"num_processes"}
    flags = with_written(dict(_entries(given, reading.ledger, wrong, read)), reading, wrong)
    said = _of_python(reading, folder, asked) if not flags else None
    base = said.arguments.mapping if said is not None else _of_file(flags, loose, folder)
    arguments = Node({**base, **flags}, training.origin)
    front = _of_launcher(training.launcher, training.origin)
    launcher = None if front is None else dict(_entries(front, reading.ledger, wrong, read))
    if wrong:
        raise with_unread(together(wrong), unread(reading))
    runners = {text(word).rpartition("/")[2] for word in training.launcher}
    by_trl = "trl" in runners
    if "swift" in runners and not swift.is_it(arguments):
        arguments = arguments.with_items({swift.MARKS[0]: Node(SWIFT_TRAINS.get(training.script), training.origin)})
    script = said.script if said is not None else training.script
    return with_launcher(Started(arguments, folder, training.gpus, script=script), launcher, by_trl=by_trl)


SWIFT_TRAINS = {"sft": "lora", "pt": "lora"}
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
        return training_in(reading, source, is_trainer(holds_arguments(folder)))
    except PlanError as error:
        with suppress(PlanError):
            return training_in(reading, source, python_in(folder))
        raise error from None


def _of_python(reading: Reading, folder: Path, asked: Asked) -> Script | None:
    """What a Python file that ``reading`` starts says itself."""
    words = [text(word) for one in reading.started for word in one.words]
    named = next((word for word in words if python_in(folder)(word)), None)
    if named is None:
        return None
    path = found_from(named, folder)
    return script_in(read_text(path), str(path), asked.names)


def with_launcher(found: Started, launcher: Mapping[str, Node] | None = None, *, by_trl: bool = True) -> Started:
    """``found`` with what ``launcher``'s flags of Accelerate say and, with ``by_trl``, those among the arguments, which
    trl passes on."""
    arguments, passed = split_off(found.arguments) if by_trl else (found.arguments, {})
    if launcher is None and not passed:
        return found
    accelerate = configured({**(launcher or {}), **passed}, arguments, found.folder)
    return replace(found, arguments=arguments, gpus=found.gpus or accelerate.processes, accelerate=accelerate)


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
        name = one.name.removeprefix("--").replace("-", "_")
        unknown = next((value for value in one.values if not is_known(value)), None)
        if unknown is not None:
            if name in read:
                where = origin_of(unknown, one.origin)
                wrong.append(needed(one.name, ledger.shown(unknown), ledger.unknowns(unknown)[0], where))
            continue
        values = [scalar(text(value), origin_of(value, one.origin)) for value in one.values]
        yield name, values[0] if len(values) == 1 else Node(values or True, one.origin)


def _of_launcher(launcher: Sequence[Value], origin: Origin) -> list[Given] | None:
    """Flags of ``accelerate launch``, if that starts the training; the last word may be the command that it runs."""
    words = [text(word) for word in launcher]
    at = next((n for n, word in enumerate(words) if word.rpartition("/")[2] in _ACCELERATE), None)
    if at is None:
        return None
    return taken_apart(launcher[at + 1 : len(words) - (words[-1] in RUNNERS)], {}, origin)[0]


_ACCELERATE = ("accelerate", "accelerate-launch", "accelerate.commands.launch")
