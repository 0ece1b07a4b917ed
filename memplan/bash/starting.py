"""Commands that a launch script starts: Python files, which are kept, and other scripts, followed as processes of
their own, in a shell, by ``sbatch`` or ``srun``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

from .conditions import RUNS_PYTHON
from .origin import Origin
from .slurm import Request, requested, requested_by, variables_of
from .syntax import Simple
from .values import ExitError, LeaveError, Piece, Started, Value, cleaned, is_known, is_position, text

if TYPE_CHECKING:
    from .shell import Shell

_WORD = 10
"""Steps of a word of a command that is started."""
_VARIABLE = 20
"""Steps of a variable that is exported to a command."""

_SHELL = re.compile(r"(?:.*/)?(?:bash|sh|zsh|dash|ksh)")
_READS = re.compile(rf"{_SHELL.pattern}|sbatch")
"""Commands that run the script on their standard input."""
_SCRIPT = re.compile(r"\.(?:sh|bash|slurm|sbatch)$")
_LAUNCHERS = ("srun", "nohup")
"""Commands that run the one behind them,"""
_NO_PYTHON = {"--no-python", "--no_python"}
"""and what has ``torchrun`` run it as it stands."""


class Starting:
    """What ``shell`` starts, and the job that it is a part of."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.failed: ValueError | None = None
        """Why the first of the scripts that are followed could not be read."""
        self._running: set[str] = set()
        self._launcher: tuple[Value, ...] = ()
        self._job: Mapping[str, Value] = {}

    def ask(self, request: Request) -> None:
        """What is followed from here on is part of a job that makes this ``request`` of Slurm."""
        self._job = variables_of(request)
        self.shell.variables.values |= self._job

    def start(self, words: list[Value], command: Simple) -> None:
        """Keeps a command that runs a Python file; follows one that is given to another shell, or to ``sbatch``."""
        self.shell.budget.spend(_WORD * len(words))
        if self.reads(words, command, lambda: self.shell.written.input_of(command.redirects)):
            return
        for position, word in enumerate(words[:-2]):
            if _SHELL.fullmatch(text(word)):
                flags = position + 1
                while flags < len(words) - 1 and text(words[flags]).startswith("-"):
                    flags += 1
                    if "c" in text(words[flags - 1]):
                        self._launch(words[:position], words[flags], command.origin)
                        return
        wrapped = _wrapped(words) if text(words[0]) == "sbatch" else None
        if wrapped is not None:
            with self._job_of(words, command):
                self.shell.variables.values |= (passed := _exported_by(words))
                self.shell.variables.exported = self.shell.variables.exported | passed.keys()
                self._launch([], wrapped, command.origin)
            return
        if self._runs_a_script(words, command):
            return
        if text(words[0]) in _REPEATS or not any(RUNS_PYTHON.search(text(word)) for word in words):
            return
        self.shell.budget.spend(_VARIABLE * len(self.shell.variables.exported))
        environment = {
            name: value
            for name in sorted(self.shell.variables.exported)
            if (value := self.shell.variables.scalar(name)) is not None
        }
        for assignment in command.assignments:
            environment[assignment.name] = self.shell.expansion.one(assignment.value)
        given = {name: value for name, value in self.shell.variables.given.items() if name.startswith("SLURM_")}
        job = {**self._job, **given}
        words = [*self._launcher, *words]
        self.shell.reading.started.append(Started((*words,), environment, command.origin, job, (*self.shell.loops,)))

    def reads(self, words: list[Value], command: Simple, of: Callable[[], Value | None]) -> bool:
        """Follows ``of()``, the standard input of a shell or of ``sbatch``."""
        flags = "".join(text(word)[1:2] for word in words[1:])
        plain = words and _READS.fullmatch(text(words[0])) and all(text(word).startswith("-") for word in words[1:])
        if not plain or "c" in flags or (given := of()) is None:
            return False
        with self._job_of(words, command, text(given)):
            self._launch([], given, command.origin)
        return True

    @contextmanager
    def _job_of(self, words: list[Value], command: Simple, script: str = "", source: str = "") -> Iterator[None]:
        """What is followed within is the job that the command ``words`` start: one of its own by ``sbatch``, or where
        there is none yet. Nothing comes back."""
        variables = self.shell.variables
        before = self._job, variables.values, variables.exported
        variables.values = dict(variables.values)
        try:
            if text(words[0]) == "sbatch" or not self._job:
                ledger, origin = self.shell.reading.ledger, command.origin
                asked = {**requested(script, source or origin.source, ledger), **requested_by(words, origin, ledger)}
                self.ask(asked)
            yield
        finally:
            self._job, variables.values, variables.exported = before

    def _runs_a_script(self, words: list[Value], command: Simple) -> bool:
        """Follows ``bash train.sh 8 4096``, ``./train.sh`` and ``srun bash train.sh`` as a process of its own: what is
        exported, and no more, goes to it, and nothing comes back. A job's own flags (``sbatch --nodes=4 …``)
        stand over its lines. A script that cannot be read matters only where no other one starts anything."""
        at = next((n for n, word in enumerate(words) if _SCRIPT.search(text(word))), None)
        launcher = self._in_front(words[:at]) if at is not None else None
        if at is None or launcher is None:
            return False
        word = words[at]
        name = text(word) if is_known(word) else beside_the_script(self.shell.reading.ledger.shown(word))
        name = name.removeprefix("./")
        if not name or name in self._running or RUNS_PYTHON.search(name):
            return False
        variables, functions = self.shell.variables, dict(self.shell.functions)
        before, given = (
            (variables.values, variables.positional, variables.exported, variables.given),
            variables.exported,
        )
        passed = {name: value for name, value in variables.values.items() if name in given or name in self._job}
        of_command = {one.name: self.shell.expansion.one(one.value) for one in command.assignments}
        of_command |= _exported_by(words[:at])
        passed |= of_command
        started_by = self._launcher
        self._running.add(name)
        try:
            made = self.shell.reading.files.get(name, self.shell.reading.files.get(f"./{name}"))
            found = self.shell.beside(name) if made is None else (text(made), command.origin.source)
            if found is None:
                self.shell.reading.missing.append((name, command.origin))
                return False
            variables.values, variables.positional = dict(passed), words[at + 1 :]
            variables.given = {name: value for name, value in variables.given.items() if not is_position(name)}
            variables.exported = {*given, *of_command}
            self.shell.functions.clear()
            self._launcher = (*started_by, *launcher)
            with self._job_of(words[:at] or words, command, *found):
                if made is None:
                    self.shell.follow_file(cleaned(found[0]), found[1])
                else:
                    self.shell.follow(made, command.origin)
        except (ExitError, LeaveError):
            pass
        except ValueError as error:
            self.failed = self.failed or error
        finally:
            variables.values, variables.positional, variables.exported, variables.given = before
            self.shell.functions.clear()
            self.shell.functions.update(functions)
            self._launcher = started_by
            self._running.discard(name)
        return True

    @staticmethod
    def _in_front(words: list[Value]) -> list[Value] | None:
        """What launches the shell whose command ``words`` begin; nothing where they are another command's."""
        names = [text(word) for word in words]
        shell = next((n for n, name in enumerate(names) if _READS.fullmatch(name)), None)
        if shell is not None:
            of_sbatch = "sbatch" in names
            behind = [before for before, name in pairwise(names[shell:]) if not name.startswith("-")]
            if any(not of_sbatch or not before.startswith("-") or "=" in before for before in behind):
                return None
            if of_sbatch and not all(map(is_known, words[shell:])):
                return None
        launcher = words[:shell]
        return launcher if not launcher or names[0] in _LAUNCHERS or _NO_PYTHON & {*names} else None

    def _launch(self, launcher: list[Value], script: Value, origin: Origin) -> None:
        before, self._launcher = self._launcher, (*self._launcher, *launcher)
        try:
            self.shell.follow(script, origin)
        finally:
            self._launcher = before


_BESIDE = re.compile(r"(?:\$\(dirname [^()]*\)|\$PWD)/+([\w.-][\w./-]*)")
"""A file beside the script, by ``OWN_FOLDER`` or the folder of what a variable holds."""


def beside_the_script(shown: str) -> str:
    """The path from the script's folder that ``shown``, a word that is not known, means; empty if it means none."""
    found = _BESIDE.fullmatch(shown)
    return found[1] if found is not None else ""


def _wrapped(words: list[Value]) -> Value | None:
    """The script that ``sbatch --wrap "srun bash train.sh"`` is given (man sbatch)."""
    for word, behind in pairwise([*words, ()]):
        if text(word) == "--wrap":
            return behind
        if word[:1] and word[0].text.startswith("--wrap="):
            return (word[0]._replace(text=word[0].text.removeprefix("--wrap=")), *word[1:])
    return None


_EXPORTS = re.compile(r"(?:^|,)([A-Za-z_]\w*)=([^,]*)")


def _exported_by(words: list[Value]) -> dict[str, Value]:
    """Variables that ``--export=ALL,TP=8,PP=2`` of ``sbatch`` or ``srun`` gives the script (man sbatch)."""
    found: dict[str, Value] = {}
    for before, word in pairwise([(), *words]):
        name, equals, said = text(word).partition("=")
        said = said if name == "--export" and equals else text(word) if text(before) == "--export" else ""
        found |= {one[1]: (Piece(one[2], word[0].origin),) for one in _EXPORTS.finditer(said)}
    return found


_REPEATS = frozenset(
    {
        "echo",
        "printf",
        "cat",
        "ls",
        "cp",
        "mv",
        "ln",
        "rm",
        "mkdir",
        "cd",
        "chmod",
        "grep",
        "sed",
        "awk",
        "tee",
        "which",
    }
)
"""Commands that run none of the files that they name."""
