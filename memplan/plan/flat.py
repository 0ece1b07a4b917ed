"""Keys at the top of a plan's file that belong into a section: ``tp: 4`` is ``layout: {tp: 4}``.

They are called as flags are (``mbs``), or as other tools call a flag (``micro_batch_size``). What may only be meant is
refused, with the key that says it.
"""

from __future__ import annotations

from collections.abc import Iterator

from .errors import Node, PlanError, together
from .fields import by_flag, plan_fields, sections
from .notes import Note
from .spellings import gpus_named

_DOCUMENT = frozenset({"$schema", "extends"})


def nested(plan: Node) -> tuple[Node, tuple[Note, ...]]:
    """``plan`` with every flat key in its section, and what is told of those that change nothing."""
    plan = _renamed(plan)
    own = {path.partition(".")[0] for path in plan_fields()} | _DOCUMENT
    flat = {key: node for key, node in plan.mapping.items() if key not in own}
    if not flat:
        return plan, ()
    items = {key: node for key, node in plan.mapping.items() if key in own}
    notes: list[Note] = []
    wrong: list[PlanError] = []
    for key, node in flat.items():
        told = f"{key} ({node.origin}) changes no memory and is left out"
        try:
            path = _path(key, node)
            if path:
                _put(items, path, key, node)
        except PlanError as error:
            wrong.append(error)
            continue
        if path is None:
            items[key] = node
        elif not path:
            notes.append(Note("changes-nothing", told))
    if wrong:
        raise together([*wrong, *_strange(items, own)])
    return Node(items, plan.origin), tuple(notes)


def _renamed(plan: Node) -> Node:
    """``plan`` where a section calls a field of its own as other tools do: ``batch: {micro_batch_size: 2}``."""
    from .near_misses import SAME

    fields, items = plan_fields(), dict(plan.mapping)
    for name, section in plan.mapping.items():
        made: dict[str, Node] = {}
        for key, node in section.mapping.items():
            same = SAME.get(f"--{key.replace('_', '-')}", "") if f"{name}.{key}" not in fields else ""
            field = by_flag().get(same[2:])
            renamed = field is not None and field.section == name and field.name not in section.mapping
            made[field.name if field is not None and renamed else key] = node
        if made.keys() != section.mapping.keys():
            items[name] = Node(made, section.origin)
    return Node(items, plan.origin)


def with_counted_gpus(plan: Node) -> Node:
    """``plan`` where ``hardware: {gpu: 8xh100}`` is a name and a number."""
    named = plan.at("hardware.gpu")
    found = gpus_named(named.value) if named is not None and isinstance(named.value, str) else None
    if named is None or found is None:
        return plan
    name, count, each = found
    said = {"gpus": count} if each is None else {"gpus": count, "gpus_per_node": each}
    for field, value in said.items():
        node = plan.at(f"hardware.{field}")
        if node is not None and node.value != value:
            raise node.wrong(f"hardware.{field}", f"is not the {value} of hardware.gpu = {named.value}")
    apart: dict[str, str | int] = {"gpu": name, **said}
    for field, part in apart.items():
        plan = plan.put(f"hardware.{field}", Node(part, named.origin))
    return plan


def _path(key: str, node: Node) -> str | None:
    """The field that ``key`` is; empty where it changes nothing, ``None`` where nobody knows it."""
    from .near_misses import CHANGES_NOTHING, MEANT, NOT_MODELLED, SAME

    flag = f"--{key.replace('_', '-')}"
    if flag in CHANGES_NOTHING:
        return ""
    said, _, value = SAME.get(flag, flag).partition("=")
    field = by_flag().get(said[2:])
    if field is not None and (not value or node.value is True):
        return field.path if not value else f"{field.path}={value}"
    meant = MEANT.get(flag, SAME.get(flag))
    if meant is not None:
        raise node.wrong(key, f"is not a field; write {_in_a_plan(meant)}")
    if flag in NOT_MODELLED:
        raise node.wrong(key, NOT_MODELLED[flag])
    return None


def _put(items: dict[str, Node], path: str, key: str, node: Node) -> None:
    """Sets the field at ``path``, unless its section says another thing."""
    path, equals, value = path.partition("=")
    node = Node(value, node.origin) if equals else node
    if path == "model":
        section, name = "model", "base"
    else:
        section, _, name = path.rpartition(".")
    if not section:
        items[name] = node
        return
    before = items.get(section, Node({}, node.origin))
    if not isinstance(before.value, dict):
        short = "base" if section == "model" else getattr(sections()[section], "shorthand", None)
        before = Node({short: before} if short is not None and before.value is not None else {}, before.origin)
    said = before.mapping.get(name)
    if said is not None and said.plain() != node.plain():
        raise node.wrong(key, f"is the same field as {path}, which is {said.plain()} at {said.origin}; give one")
    items[section] = before.with_items({name: node})


def _in_a_plan(flags: str) -> str:
    """``--dtype bf16`` as a plan has it: ``precision: {dtype: bf16}``."""
    words = flags.split()
    made: list[str] = []
    while words:
        word = words.pop(0)
        field = by_flag().get(word[2:]) if word.startswith("--") else None
        if field is None:
            return flags
        value = words.pop(0) if words and not words[0].startswith("--") else "…"
        made.append(f"{field.section}: {{{field.name}: {value}}}" if field.section else f"{field.name}: {value}")
    return ", ".join(made)


def _strange(items: dict[str, Node], own: set[str]) -> Iterator[PlanError]:
    """Keys that nobody knows."""
    for key, node in items.items():
        if key not in own:
            known = {*own, *(flag.replace("-", "_") for flag in by_flag())}
            yield node.lacks(key, "is not a field of a plan", known=known)
