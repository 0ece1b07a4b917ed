"""How often the right tensor comes first: ``python -m tests.explain.score`` prints each of ``issues.jsonl`` (chosen
before the ranking was written), of ``issues_later.jsonl``, ``issues_third.jsonl`` and ``issues_fourth.jsonl``
(before they were tried)."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from memplan.commands.launched import LaunchFlags, read_given
from memplan.explain import Explanation, explain
from memplan.plan.plan import Plan

ISSUES, LATER, THIRD, FOURTH = (
    Path(__file__).with_name(f"issues{name}.jsonl") for name in ("", "_later", "_third", "_fourth")
)


@dataclass(frozen=True)
class Issue:
    """A public issue: its message, the frames of its traceback, and what its frames and sizes show to be right."""

    issue: str
    message: str
    frames: list[str]
    plan: list[str] | None
    right: str
    why: str
    script: str = ""
    log: str = ""
    """The log as it is in the issue, where it is no plain traceback; ``MESSAGE`` among it stands for the message."""

    @property
    def text(self) -> str:
        """A log with the traceback and the message."""
        if self.log:
            return self.log.replace("MESSAGE", self.message) if "MESSAGE" in self.log else self.log + self.message
        lines = ["Traceback (most recent call last):"] if self.frames else []
        for frame in self.frames:
            place, _, code = frame.partition(": ")
            file, _, function = place.rpartition(":")
            lines += [f'  File "/opt/{file}", line 7, in {function}', *([f"    {code}"] if code else [])]
        return "\n".join([*lines, self.message])

    def read_plan(self) -> Plan | None:
        """The plan of its words; ``FILE`` among them stands for its script."""
        if self.plan is None:
            return None
        words, place, form, vocab = iter(self.plan), None, None, None
        flags: dict[str, str] = {}
        for word in words:
            if word == "--from":
                form = next(words)
            elif word == "--vocab-size":
                vocab = int(next(words))
            elif word.startswith("--"):
                flags[word[2:]] = next(words)
            else:
                place = _written(self.script, ".sh" if form else ".yaml") if word == "FILE" else word
        return read_given(place, LaunchFlags((form,) if form else (), (), False, vocab), flags).plan


@cache
def _written(text: str, suffix: str) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=suffix, delete=False) as file:
        file.write(text)
    return file.name


def issues(file: Path = ISSUES) -> list[Issue]:
    return [Issue(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def answer(issue: Issue) -> tuple[str, Explanation]:
    """What ``explain`` says first, in words, and all that it says."""
    found = explain(issue.text, issue.read_plan())
    if issue.plan is not None:
        best = found.candidates[0] if found.candidates else None
        return (f"{best.phase} {best.modules[0]} {best.tensor} {best.category}" if best else "nothing"), found
    told = [about.name for about in found.clues.about[:1]]
    told += [f"{guess.what} {guess.factors}" for guess in found.guesses]
    told += [f"{cause.code}: {cause.message}" for cause in found.causes]
    return "; ".join(told), found


def is_right(issue: Issue, said: str) -> bool:
    return re.search(issue.right, said) is not None


def main() -> None:
    for file in (ISSUES, LATER, THIRD, FOURTH):
        right = {True: 0, False: 0}
        every = issues(file)
        for issue in every:
            said, _ = answer(issue)
            good = is_right(issue, said)
            right[issue.plan is not None] += good
            name = issue.issue.removeprefix("https://github.com/")
            print("ok  " if good else "MISS", name, "|", issue.right, "|", said[:150])
        planned = sum(issue.plan is not None for issue in every)
        without = len(every) - planned
        print(f"{file.name}: with a configuration {right[True]} of {planned}, without {right[False]} of {without}")


if __name__ == "__main__":
    main()
