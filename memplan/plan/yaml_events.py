"""YAML (and so JSON) to nodes that know their lines.

Documents that are nothing but ``field: value`` and sections of such lines, as most plans and specs are, are read here;
all others by ``yaml_parser``, which takes longer to import than a plan takes to read.
"""

from __future__ import annotations

from ..bash.budget import Budget
from ..bash.origin import ScriptError
from ..values import pattern
from .errors import VALUE, Node, Origin, refused, scalar

_LINE = pattern(
    r"(?P<section>  )?(?P<key>[A-Za-z0-9_]+):"
    r"(?: (?:\"(?P<quoted>[^\"\\]*)\"|(?P<plain>[A-Za-z0-9.](?:[-A-Za-z0-9_.,;/+()| ]*[-A-Za-z0-9_.,;/+()|])?)))?"
)
"""A line of a simple document: a field, alone or in a section, with a value that has one meaning in all of YAML."""


def parse_yaml(text: str, source: str, *, line: bool = True) -> Node:
    """The document in ``text``. ``source`` is what errors call it; ``line`` whether they add the line."""
    try:
        simple = _simple(text, source, line)
    except ScriptError as error:
        raise refused(error) from None
    if simple is not None:
        return simple
    from .yaml_parser import parse_events

    return parse_events(text, source, line)


def _simple(text: str, source: str, numbered: bool) -> Node | None:
    """The document, if each of its lines is empty, a comment, or ``_LINE``; a section has at least one field."""
    if not (text.isascii() and text.replace("\n", "").isprintable()):
        return None
    root: dict[str, Node] = {}
    section: dict[str, Node] | None = None
    budget = Budget(Origin(source))
    for number, line in enumerate(text.split("\n"), 1):
        if not line or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            return None
        inside, key, quoted, plain = found.groups()
        into = section if inside else root
        if into is None or key in into or (section == {} and not inside):
            return None
        origin = Origin(source, number if numbered else None)
        budget.make(1, 0, origin, steps=VALUE)
        if quoted is None and plain is None:
            if inside:
                return None
            into[key] = Node(section := {}, origin)
            continue
        into[key] = scalar(plain, origin) if quoted is None else Node(quoted, origin)
        section = section if inside else None
    if not root or section == {}:
        return None
    return Node(root, next(iter(root.values())).origin)
