"""The configuration that a shell script starts torchtitan with, and what it says over it.

``NGPU=8 CONFIG_FILE=train.toml ./run_train.sh --training.seq_len 4096`` (``run_train.sh`` of torchtitan 0.2), and
``torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file train.toml``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...bash.origin import ScriptError
from ...bash.shell import read_script
from ...bash.values import Started, Value, is_known, text
from ...plan.errors import ABSENT, Origin, PlanError, refused
from ..launch import Asked
from ..launchers import beside, gpus_of, runs_torchtitan
from ..recognised import found_from
from ..settings import needed, taken_apart

_FILE = "--job.config_file"
_WITHOUT_FILE = ("--module", "--config")
"""Of torchtitan since its configurations are Python."""


def started(content: str, source: str, folder: Path, asked: Asked) -> tuple[str, Asked]:
    """The place of the configuration, and ``asked`` with what the script says of it in front of its own."""
    try:
        reading = read_script(content.replace("\r\n", "\n"), source, asked.variables(), beside(folder))
    except ScriptError as error:
        raise refused(error) from None
    found = next((one for one in reading.started if _at(one) is not None), None)
    if found is None:
        problem = "starts no torchtitan: neither run_train.sh nor torchtitan.train"
        raise PlanError("", ABSENT, problem, origin=Origin(source))
    at = _at(found) or 0
    given, _ = taken_apart(found.words[at + 1 :], {}, found.origin)
    said: dict[str, Value] = {one.name: one.values[0] if one.values else () for one in given}
    file = said.pop(_FILE, None) or found.environment.get("CONFIG_FILE")
    if file is None or not is_known(file):
        by_python = next((name for name in _WITHOUT_FILE if name in said), "")
        why = f"{by_python} is Python, which is not run; give the config.json that a run saves" if by_python else ""
        problem = why or "names no configuration that is known: CONFIG_FILE or --job.config_file"
        raise PlanError("", ABSENT, problem, origin=found.origin)
    for name, value in said.items():
        if unknowns := reading.ledger.unknowns(value):
            raise needed(name, reading.ledger.shown(value), unknowns[0], found.origin)
    over = [f"{name.removeprefix('--')}={text(value) or 'true'}" for name, value in said.items()]
    gpus = gpus_of(found, at) or text(found.environment.get("NGPU", ()))
    if gpus and asked.gpus is None:
        over.append(f"NGPU={gpus}")
    own = [one for one in asked.assignments if "." in one.partition("=")[0]]
    return str(found_from(text(file), folder)), replace(asked, assignments=(*over, *own))


def _at(one: Started) -> int | None:
    return next((n for n, word in enumerate(one.words) if runs_torchtitan(text(word))), None)
