"""A record for others to read: the same figures, without what says who ran it, and where.

The database keeps what happened, because whoever ran it needs the name of the host that failed. A file that is
shared has ``node-0``, ``node-1`` in place of hosts, ``~`` in place of the home directory, and not the last lines that a
rank printed, which can hold anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .readings import Failure, Run
from .record import Record, to_text


def shared_text(record: Record) -> str:
    """The file that is shared."""
    return to_text(shareable(record))


def shareable(record: Record) -> Record:
    """``record`` without names of hosts, the home directory's path, and what ranks printed."""
    hosts = _hosts(record.run)
    changed = record.model_copy(update={"run": _run(record.run, hosts), "command": _cleaned(record.command, hosts)})
    data = changed.model_dump(mode="python", by_alias=True, exclude={"estimate"})
    return Record.model_validate(_without_home({**data, "estimate": record.estimate.to_json()}, _home()))


def _hosts(run: Run) -> dict[str, str]:
    """What stands for each host, by its full and its short name."""
    hosts = list(dict.fromkeys(rank.host for rank in run.ranks if rank.host))
    full = {host: f"node-{number}" for number, host in enumerate(hosts)}
    return {**{host.partition(".")[0]: node for host, node in full.items()}, **full}


def _run(run: Run, hosts: Mapping[str, str]) -> Run:
    """Names of hosts are looked for where they can be, and nowhere else: one could be called ``megatron``."""
    ranks = tuple(rank.model_copy(update={"host": hosts.get(rank.host, "")}) for rank in run.ranks)
    return run.model_copy(update={"ranks": ranks, "failures": tuple(_failure(one, hosts) for one in run.failures)})


def _failure(failure: Failure, hosts: Mapping[str, str]) -> Failure:
    changes = {"message": _cleaned(failure.message, hosts), "when": _cleaned(failure.when, hosts), "lines": ()}
    return failure.model_copy(update=changes)


def _cleaned(text: str, names: Mapping[str, str]) -> str:
    """``text`` with each of ``names`` replaced where it stands as a word, the longest first."""
    for name in sorted(filter(None, names), key=len, reverse=True):
        text = names[name].join(re.split(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text))
    return text


def _home() -> str:
    try:
        home = str(Path.home())
    except RuntimeError:
        return ""
    return home if len(home) > 1 else ""


def _without_home(value: Any, home: str) -> Any:
    if isinstance(value, str):
        return _cleaned(value, {home: "~"})
    if isinstance(value, Mapping):
        return {_without_home(key, home): _without_home(item, home) for key, item in value.items()}
    return type(value)(_without_home(item, home) for item in value) if isinstance(value, (list, tuple)) else value
