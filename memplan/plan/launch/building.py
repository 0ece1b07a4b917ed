"""A plan put together field by field from arguments, remembering which argument became which field."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import Origin, shown
from ..node import Node


@dataclass(slots=True)
class Building:
    """``items`` is the plan so far by dotted path; ``became`` what was made of each argument."""

    origin: Origin
    items: dict[str, Node] = field(default_factory=dict)
    became: dict[str, list[str]] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    """Code and message of what the reader should be told."""

    def put(self, path: str, node: Node, *names: str) -> None:
        """Sets ``path`` of the plan; the arguments ``names`` became it."""
        self.items[path] = node
        for name in names:
            self.because(name, f"{path} = {shown(node.plain())}")

    def because(self, name: str, text: str) -> None:
        """Says what became of the argument ``name``."""
        self.became.setdefault(name, []).append(text)

    def note(self, code: str, message: str) -> None:
        """Tells the reader something that is no error."""
        self.notes.append((code, message))

    def plan(self) -> Node:
        """The plan as a mapping of sections."""
        sections: dict[str, Node] = {}
        for path, node in self.items.items():
            section, _, name = path.rpartition(".")
            if not section:
                sections[name] = node
                continue
            before = sections.get(section, Node({}, self.origin))
            sections[section] = before.with_items({name: node})
        return Node(sections, self.origin)
