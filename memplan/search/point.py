"""A point of the space of layouts: one value of every axis."""

from __future__ import annotations

from typing import Any, NamedTuple


class Recomputing(NamedTuple):
    """How much is computed again in backward; fields as in the section ``recompute``."""

    mode: str = "none"
    method: str = "uniform"
    layers: int | None = None

    def __str__(self) -> str:
        if self.mode == "full" and self.method == "block":
            return f"full on {self.layers} layers"
        return self.mode


NO_RECOMPUTE = Recomputing()


class Extra(NamedTuple):
    """Fields that are changed together, and what a person calls that."""

    label: str
    fields: tuple[tuple[str, Any], ...]
    keeps_numerics: bool = True
    least_zero: int = 0
    """The smallest ZeRO stage that it goes with."""
    changes_passes: bool = False
    """Forward and backward take another time."""
    moves_states: bool = False
    """States or parameters are kept elsewhere than on the GPU."""
    groups: int = 1
    """Groups of replicas that it makes, each of two or more."""


class Point(NamedTuple):
    """One value of every axis."""

    tp: int
    cp: int
    pp: int
    vpp: int
    dp: int
    zero: int
    mbs: int
    recompute: Recomputing
    extras: tuple[Extra, ...] = ()

    @property
    def keeps_numerics(self) -> bool:
        return all(extra.keeps_numerics for extra in self.extras)

    @property
    def order(self) -> tuple[object, ...]:
        """Smaller sizes and fewer changes first: what decides between equals."""
        changes = len(self.extras), tuple(extra.label for extra in self.extras)
        recompute = self.recompute.mode, self.recompute.layers or 0
        return (*changes, self.tp, self.cp, self.pp, self.vpp, -self.zero, self.mbs, *recompute)

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.dp
