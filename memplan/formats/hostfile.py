"""The GPUs that DeepSpeed's launcher takes of the hosts that a file lists, or that its own flags name.

deepspeed 0.19.8, ``launcher/runner.py``: ``parse_args``, ``_parse_hostfile``, ``parse_resource_filter`` and
``apply_num_nodes_and_gpus``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from ..bash.values import Value, is_known, origin_of, text
from ..plan.errors import Node
from ..values import dataclass

_LAUNCHERS = frozenset(("deepspeed", "deepspeed.launcher.runner"))
_SLOTS = re.compile(r"(\S+)\s+slots=([0-9]{1,6})")
_NAMED = re.compile(r"(?:[\w.-]+:[0-9]+(?:,[0-9]+)*@?)+")
"""Hosts that ``--include`` names with their GPUs, which needs no file."""
_NOWHERE = ("", "/dev/null")
"""Names of no file, which leave this machine's GPUs."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """What the launcher takes."""

    gpus: Node | None = None
    """All of them;"""
    per_node: Node | None = None
    """and of each host, where these have as many."""
    missing: str = ""
    """The file that lists the hosts, where it is not there."""


def hosts_of(launcher: Sequence[Value], read: Callable[[str], str | None]) -> Hosts:
    """What ``launcher`` takes of the file that it names, which ``read`` reads; nothing where it names neither file nor
    GPUs."""
    words = [text(word).rpartition("/")[2] for word in launcher]
    start = next((n for n, word in enumerate(words) if word in _LAUNCHERS), None)
    if start is None:
        return Hosts()
    said = {name: _said(launcher[start + 1 :], *names) for name, names in _FLAGS.items()}
    file, included = said["hostfile"], said["include"]
    if included is not None and _NAMED.fullmatch(str(included.value)):
        named = str(included.value).strip("@").split("@")
        return Hosts(Node(sum(1 + host.count(",") for host in named), included.origin))
    if file is None or file.value in _NOWHERE:
        return Hosts()
    content = read(file.value) if isinstance(file.value, str) else None
    if content is None:
        return Hosts(missing=str(file.value or "a file whose name is not known"))
    pool = {host: list(range(slots)) for host, slots in _listed(content, file).items()}
    for given in (included, said["exclude"]):
        pool = _filtered(pool, given, keeps=given is included) if given is not None and given.value else pool
    nodes, each = (_whole(said[name]) for name in ("nodes", "gpus"))
    taken = [each or len(slots) for slots in pool.values()][: nodes or None]
    return Hosts(Node(sum(taken), file.origin), Node(taken[0], file.origin) if len({*taken}) == 1 else None)


_FLAGS = {
    "hostfile": ("--hostfile", "-H"),
    "include": ("--include", "-i"),
    "exclude": ("--exclude", "-e"),
    "nodes": ("--num_nodes",),
    "gpus": ("--num_gpus",),
}


def _said(words: Sequence[Value], *names: str) -> Node | None:
    """The text of the flag that has one of ``names``; ``None`` in it where the script does not tell."""
    for at, word in enumerate(words):
        name, equals, rest = text(word).partition("=")
        if name in names:
            value = word if equals else next(iter(words[at + 1 : at + 2]), ())
            plain = (rest if equals else text(value)).strip("\"'")
            return Node(plain if is_known(value) else None, origin_of(value, word[0].origin))
    return None


def _whole(node: Node | None) -> int:
    return int(str(node.value)) if node is not None and str(node.value).isdecimal() else 0


def _listed(content: str, file: Node) -> Mapping[str, int]:
    """Hosts and how many GPUs each has."""
    found: dict[str, int] = {}
    for line in map(str.strip, content.splitlines()):
        if not line or line.startswith("#"):
            continue
        entry = _SLOTS.match(line)
        if entry is None or entry[1] in found:
            raise file.wrong(
                "--hostfile", f"has an entry that DeepSpeed refuses, {line[:60]!r}: HOST slots=N, each once"
            )
        found[entry[1]] = int(entry[2])
    if not found:
        raise file.wrong("--hostfile", "lists no host: HOST slots=N")
    return found


def _filtered(pool: Mapping[str, list[int]], said: Node, *, keeps: bool) -> dict[str, list[int]]:
    """``pool`` with the hosts and slots of ``said`` alone, or without them."""
    flag, left = ("--include", {}) if keeps else ("--exclude", dict(pool))
    for spec in str(said.value).strip("@").split("@"):
        host, _, slots = spec.partition(":")
        numbers = [int(one) for one in slots.split(",") if one.isdecimal()] or pool.get(host, [])
        if host not in pool or not {*numbers} <= {*pool[host]}:
            raise said.wrong(flag, f"names {spec[:60]}, which the hostfile does not list")
        left[host] = numbers if keeps else [one for one in pool[host] if one not in numbers]
    if not any(left.values()):
        raise said.wrong(flag, "leaves no GPU of the hostfile")
    return {host: slots for host, slots in left.items() if slots}
