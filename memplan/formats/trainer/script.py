"""The Trainer's arguments behind a training script that a shell script starts, and what its launchers say.

``torchrun``, ``deepspeed``, ``srun`` and ``accelerate launch`` in front of ``run_clm.py --model_name_or_path …``: words
are taken apart as ``HfArgumentParser`` does (``hf_argparser.py`` of transformers 5.23), where ``--bf16`` alone is true.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ...bash.origin import ScriptError
from ...bash.shell import read_script
from ...bash.values import Ledger, Value, is_known, origin_of, text
from ...plan.errors import Origin, PlanError, refused, together
from ...plan.node import Node, scalar
from ...values import dataclass
from ..accelerate import Accelerated, accelerated, file_named
from ..launch import Asked
from ..launchers import MAPPINGS, beside, is_trainer, training_in, unread
from ..recognised import found_from, holds_arguments
from ..settings import Given, needed, taken_apart
from ..training_scripts import with_unread
from .tables import READ


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


def started(content: str, source: str, folder: Path, asked: Asked) -> Started:
    """What the script ``content``, called ``source`` and read in ``folder``, starts."""
    try:
        reading = read_script(content.replace("\r\n", "\n"), source, asked.variables(), beside(folder))
        training = training_in(reading, source, is_trainer(holds_arguments(folder)))
    except ScriptError as error:
        raise refused(error) from None
    given, loose = taken_apart(training.words, {}, training.origin)
    wrong: list[PlanError] = []
    flags = dict(_entries(given, reading.ledger, wrong))
    arguments = Node({**_of_file(flags, loose, folder), **flags}, training.origin)
    found = _accelerate(training.launcher, training.origin, reading.ledger, folder, wrong)
    if wrong:
        raise with_unread(together(wrong), unread(reading))
    return Started(
        arguments, folder, training.gpus or (found.processes if found is not None else None), found, training.script
    )


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
    return file_named(named, folder, "config", "the Trainer's arguments").mapping


def _entries(given: Sequence[Given], ledger: Ledger, wrong: list[PlanError]) -> Iterator[tuple[str, Node]]:
    """Keys and values; those that are read and not known are asked for in ``wrong``."""
    for one in given:
        name = one.name.removeprefix("--").replace("-", "_")
        unknown = next((value for value in one.values if not is_known(value)), None)
        if unknown is not None:
            if name in READ:
                where = origin_of(unknown, one.origin)
                wrong.append(needed(one.name, ledger.shown(unknown), ledger.unknowns(unknown)[0], where))
            continue
        values = [scalar(text(value), origin_of(value, one.origin)) for value in one.values]
        yield name, values[0] if len(values) == 1 else Node(values or True, one.origin)


_PARTS = {
    "use_fsdp": ("distributed_type", "FSDP"),
    "use_deepspeed": ("distributed_type", "DEEPSPEED"),
    "multi_gpu": ("distributed_type", "MULTI_GPU"),
}
_OF_DEEPSPEED = (
    "zero_stage",
    "offload_",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "deepspeed_config_file",
)


def _accelerate(
    launcher: Sequence[Value], origin: Origin, ledger: Ledger, folder: Path, wrong: list[PlanError]
) -> Accelerated | None:
    """The configuration with which ``accelerate launch`` starts: its file, and its flags over it."""
    words = [text(word) for word in launcher]
    at = next((n for n, word in enumerate(words) if word.rpartition("/")[2] == "accelerate"), None)
    if at is None:
        return None
    given, _ = taken_apart(launcher[at + 1 :], {}, origin)
    flags = dict(_entries(given, ledger, wrong))
    file = flags.pop("config_file", None)
    written = Node({}, origin)
    if file is not None:
        written = file_named(file, folder, "--config_file", "Accelerate's configuration")
        folder = found_from(str(file.value), folder).parent
    items = dict(written.mapping)
    for name, node in flags.items():
        section = (
            "fsdp_config" if name.startswith("fsdp_") else "deepspeed_config" if name.startswith(_OF_DEEPSPEED) else ""
        )
        if name in _PARTS and node.value is True:
            items[_PARTS[name][0]] = Node(_PARTS[name][1], node.origin)
        elif section:
            items[section] = items.get(section, Node({}, node.origin)).with_items({name: node})
        elif name in ("num_processes", "mixed_precision", "dynamo_backend"):
            items[name] = node
    return accelerated(Node(items, written.origin), folder)
