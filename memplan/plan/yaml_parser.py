"""YAML of any shape to nodes, from the events of PyYAML's parser.

Nodes are built with a budget for depth and for the size after aliases are expanded, so no document can take more time
or memory than its length deserves. Only plain data is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from ..bash.origin import Budget, ScriptError
from .errors import VALUE, Node, Origin, PlanError, refused, scalar, wrong_at

DEEPEST = 32
"""Nesting that a document may have."""
_TOO_DEEP = f"is nested more than {DEEPEST} deep"

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_events(text: str, source: str, line: bool) -> Node:
    """As ``text.parse_yaml``."""
    builder = _Builder(source, line)
    if source.endswith(".json"):
        text = text.replace("\t", " ")
    try:
        return builder.build(yaml.parse(text, Loader=_Loader))
    except ScriptError as error:
        raise refused(error) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = Origin(source, min(mark.line, text.rstrip("\n").count("\n")) + 1 if mark and line else None)
        if "nesting depth" in str(error.problem):  # libyaml's own limit, from PyYAML 6.0.4 on
            raise wrong_at(where, _TOO_DEEP) from None
        raise wrong_at(where, f"is not valid YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        at = text.count("\n", 0, error.position) + 1 if isinstance(error.position, int) else None
        raise wrong_at(
            Origin(source, at if line else None), "contains a control character, which YAML does not allow"
        ) from None
    except UnicodeError:
        raise wrong_at(source, "is not valid Unicode text") from None


def _is_argument(key: str) -> bool:
    return key.startswith("--")


class _Builder:
    """One pass over the events of one document."""

    def __init__(self, source: str, lines: bool) -> None:
        self._source = source
        self._lines = lines
        self._anchors: dict[str, tuple[Node, int]] = {}
        self._size = 0
        self._budget = Budget(Origin(source))

    def build(self, events: Iterator[Any]) -> Node:
        root: Node | None = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent) and root is not None:
                raise self._refused(event, "holds a second document after `---`; a plan is one document")
            if isinstance(event, yaml.NodeEvent):
                root = self._node(event, events, 0)
        if root is None or root.text == "":
            raise wrong_at(self._source, "is empty")
        return root

    def _node(self, event: Any, events: Iterator[Any], depth: int) -> Node:
        origin = self._origin(event)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        if event.tag is not None and event.tag != "!":
            raise self._refused(event, f"has the YAML tag {event.tag}; only plain values are read")
        if depth > DEEPEST:
            raise self._refused(event, _TOO_DEEP)
        before = self._size
        self._count(event, 1)
        if isinstance(event, yaml.ScalarEvent):
            node = scalar(event.value, origin) if event.implicit[0] else Node(event.value, origin)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = Node(self._items(events, depth), origin)
        else:
            node = Node(self._pairs(events, depth), origin)
        if event.anchor is not None:
            self._anchors[event.anchor] = (node, self._size - before)
        return node

    def _items(self, events: Iterator[Any], depth: int) -> list[Node]:
        items: list[Node] = []
        for event in events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            items.append(self._node(event, events, depth + 1))
        return items

    def _pairs(self, events: Iterator[Any], depth: int) -> dict[str, Node]:
        """The fields of a mapping. Of a command line's arguments the last one counts, as for argparse, and those of
        another mapping may be merged."""
        pairs: dict[str, Node] = {}
        for event in events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            key = self._key(event)
            if key in pairs and not _is_argument(key):
                raise self._refused(event, f"gives {key} twice (first on line {pairs[key].origin.line}); keep one")
            node = self._node(next(events), events, depth + 1)
            if key == "<<":
                if not isinstance(node.value, dict) or not all(map(_is_argument, node.value)):
                    raise self._refused(event, "uses a merge key (<<); write the fields out, or use `extends: PLAN`")
                pairs = {**node.value, **pairs}
                continue
            pairs[key] = Node(node.value, self._origin(event), node.text)
        return pairs

    def _key(self, event: Any) -> str:
        if not isinstance(event, yaml.ScalarEvent):
            raise self._refused(event, "has a list or a mapping as a field's name")
        return str(event.value)

    def _alias(self, event: Any) -> Node:
        if event.anchor not in self._anchors:
            raise self._refused(event, f"repeats *{event.anchor}, which is not complete or not defined above")
        node, size = self._anchors[event.anchor]
        self._count(event, size)
        return node

    def _count(self, event: Any, size: int) -> None:
        self._size += size
        self._budget.make(size, 0, self._origin(event), steps=VALUE * size)

    def _origin(self, event: Any) -> Origin:
        return Origin(self._source, event.start_mark.line + 1 if self._lines else None)

    def _refused(self, event: Any, problem: str) -> PlanError:
        return wrong_at(self._origin(event), problem)
