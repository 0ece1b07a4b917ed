"""Releases that a job's own files name: ``pip install "trl==0.12.1"`` in a notebook, the dependencies of a script, or
``requirements.txt`` beside it.

They are told, and not followed by themselves: what is installed where the job runs may be another release.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ...plan.errors import PlanError, shown
from ...plan.notes import RELEASES_PINNED, Note
from ...plan.releases import LIBRARIES, Version, parsed, shown as written
from ...plan.text import is_there, path_of, read_bytes, read_text
from ...plan.training_loops import Releases, TrainingLoop
from ..recognised import ENDING, LARGEST_NOTEBOOK, is_python

Pins = Mapping[str, tuple[str, str]]
"""The release of each library, and the name of the file that asks for it."""
_NAMED = ("trl", "transformers", "peft", "accelerate", "bitsandbytes")
"""Libraries whose releases decide which code of a model and its loss runs."""
_PIN = re.compile(
    rf"(?<![\w./-])({'|'.join(_NAMED)})(?:\[[\w, -]{{0,60}}\])? ?[=~]= ?(\d{{1,3}}(?:\.\d{{1,3}}){{1,2}})(?![\w.])"
)
_BESIDE = "requirements.txt"


def pinned_by(place: str, folder: Path) -> Pins:
    """What the job at ``place`` in ``folder`` asks for: its own file goes before the one beside it."""
    found: dict[str, tuple[str, str]] = {}
    own = path_of(place) if is_python(place) else None
    for path in (own, folder / _BESIDE):
        if path is None or not is_there(path):
            continue
        for library, version in _PIN.findall(_text(path)):
            found.setdefault(library, (version, path.name))
    return found


def _text(path: Path) -> str:
    """Nothing where nobody can read it: then it says nothing of the job."""
    try:
        if path.suffix == ENDING:
            return read_bytes(path, largest=LARGEST_NOTEBOOK, what="a notebook").decode("utf-8", "replace")
        return read_text(path)
    except PlanError:
        return ""


def told_of(pins: Pins, loop: TrainingLoop) -> tuple[Note, ...]:
    """What is said of ``pins`` to who names no releases, with the flag that names those that are followed."""
    of_loop = {library: pin for library, pin in pins.items() if library != "trl" or loop.run_by_trl}
    if not of_loop:
        return ()
    follows: dict[str, tuple[Releases, ...]] = {
        library: ((LIBRARIES[library].oldest, LIBRARIES[library].newest),) for library in of_loop
    }
    if "trl" in follows:
        follows["trl"] = loop.follows
    given, others = [], []
    for library, (version, _) in of_loop.items():
        nearest = _followed(parsed(version), follows[library])
        given.append(f"{library}={version if nearest is None else written(nearest)}")
        if nearest is not None:
            others.append(f"; of {library} {written(nearest)} is the nearest that is followed")
    named = ", ".join(f"{library} {version}" for library, (version, _) in of_loop.items())
    files = " and ".join(dict.fromkeys(shown(file) for _, file in of_loop.values()))
    message = f"{files} asks for {named}, and the newest releases are planned, which may need other memory"
    return (Note(RELEASES_PINNED, f"{message}: give --versions {','.join(given)}{''.join(others)}"),)


def told_by_keys(keys: Collection[str], loop: TrainingLoop) -> tuple[Note, ...]:
    """What is said of the first argument that says an older release by itself."""
    for key in loop.lost.keys() & keys if loop.run_by_trl else ():
        message = (
            f"{key} is an argument of trl before {written(loop.lost[key])}, and the newest release is planned, whose "
            "loss needs other memory: give what runs, as --versions trl=0.19.1,transformers=4.53.0"
        )
        return (Note(RELEASES_PINNED, message),)
    return ()


def _followed(version: Version, spans: Sequence[Releases]) -> Version | None:
    """The release next to ``version`` that one of ``spans``, in order, ends or begins with; nothing where it is in
    one."""
    if any(oldest <= version[:2] <= newest for oldest, newest in spans):
        return None
    return next((newest for _, newest in reversed(spans) if newest < version), spans[0][0])
