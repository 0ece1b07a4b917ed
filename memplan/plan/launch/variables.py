"""The variables of a script while it is followed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from .values import Cause, Ledger, Piece, Unknown, Value, is_known

Array: TypeAlias = "dict[str, Value]"
"""Items by key; of a plain array by ``"0"``, ``"1"`` and so on."""


@dataclass(slots=True)
class Variables:
    """The variables of a script. ``given`` (``--set``) stand over whatever the script says."""

    given: Mapping[str, Value]
    ledger: Ledger
    values: dict[str, Value | Array] = field(default_factory=dict)
    positional: list[Value] = field(default_factory=list)
    exported: set[str] = field(default_factory=set)

    def assign(self, name: str, value: Value | Array) -> None:
        """Sets ``name``; what is unknown in it can from now on be given by this name."""
        if isinstance(value, dict):
            self.values[name] = {key: self.ledger.made(self._named(item, name)) for key, item in value.items()}
        else:
            self.values[name] = self.ledger.made(self._named(value, name))

    def scalar(self, name: str) -> Value | None:
        """The value of ``name``, of its first item if it is an array, nothing if it is not set."""
        if name in self.given:
            return self.given[name]
        if name.isdigit():
            position = int(name)
            return self.positional[position - 1] if 0 < position <= len(self.positional) else None
        value = self.values.get(name)
        return next(iter(value.values()), None) if isinstance(value, dict) else value

    def items(self, name: str) -> Array | None:
        """All items of ``name``."""
        if name in ("@", "*"):
            count = max([len(self.positional), *(int(given) for given in self.given if given.isdigit())])
            return {str(n): value for n in range(1, count + 1) if (value := self.scalar(str(n))) is not None}
        found: Value | Array | None = self.given[name] if name in self.given else self.values.get(name)
        return found if isinstance(found, dict) or found is None else {"0": found}

    def _named(self, value: Value, name: str) -> Value:
        if is_known(value):
            return value
        pieces: list[Piece] = []
        for piece in value:
            for unknown in self.ledger.unknowns((piece,)):
                if not unknown.ask and unknown.cause is not Cause.CONDITION:
                    new = self.ledger.value(Unknown(unknown.shown, name, unknown.cause, unknown.origin))[0].text
                    old = self.ledger.value(unknown)[0].text
                    piece = Piece(piece.text.replace(old, new), piece.origin)
            pieces.append(piece)
        return tuple(pieces)
