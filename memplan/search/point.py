"""A point of the space of layouts, one value of every axis; and fields of a plan by their paths (``layout.tp``)."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from ..plan.plan import Plan
from ..values import NamedTuple


class Recomputing(NamedTuple):
    """How much is computed again in backward; fields as in the section ``recompute``."""

    mode: str = "none"
    method: str = "uniform"
    layers: int | None = None
    modules: tuple[str, ...] = ()
    """Of selective recompute; empty: as the plan has it."""

    @property
    def kind(self) -> tuple[str, tuple[str, ...]]:
        """What is recomputed of a layer, whichever layers these are."""
        return self.mode, self.modules

    def __str__(self) -> str:
        if self.mode == "full" and self.method == "block":
            return f"full on {self.layers} layers"
        return " ".join((self.mode, *self.modules))


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
    lacking: str = ""
    """What is said of a layout that lacks it; empty: that it is without what the label says."""


_KEEPS_NUMERICS = attrgetter("keeps_numerics")


class Point(NamedTuple):
    """One value of every axis."""

    tp: int
    cp: int
    pp: int
    vpp: int
    dp: int
    ep: int
    etp: int
    zero: int
    mbs: int
    recompute: Recomputing
    extras: tuple[Extra, ...] = ()

    @property
    def keeps_numerics(self) -> bool:
        return all(map(_KEEPS_NUMERICS, self.extras))

    @property
    def moved(self) -> frozenset[tuple[str, Any]]:
        """What is kept elsewhere than on the GPU: fields of a plan, as one extra can move what another moves and
        more."""
        return frozenset([field for extra in self.extras if extra.moves_states for field in extra.fields])

    @property
    def order(self) -> tuple[object, ...]:
        """Smaller sizes and fewer changes first: what decides between equals."""
        changes = len(self.extras), tuple(extra.label for extra in self.extras)
        recompute = self.recompute.mode, self.recompute.layers or 0, self.recompute.modules
        sizes = self.tp, self.cp, self.pp, self.vpp, self.etp, self.ep
        return (*changes, *sizes, -self.zero, self.mbs, *recompute)

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.dp


# -- fields of a plan -------------------------------------------------------------------------------------


def changed(plan: Plan, fields: Mapping[str, Any]) -> Plan:
    """``plan`` with other values of some fields, by their paths."""
    sections: dict[str, dict[str, Any]] = {}
    update: dict[str, Any] = {}
    for path, value in fields.items():
        section, _, name = path.rpartition(".")
        if section:
            sections.setdefault(section, {})[name] = value
        else:
            update[path] = value
    for name, values in sections.items():
        update[name] = updated(getattr(plan, name), values)
    return plan.model_copy(update=update)


UNCUT: Mapping[str, Any] = {
    "first_layers": None, "last_layers": None, "count_embedding": False, "count_loss": False, "layout": None,
    "group": None, "partition": "type:transformer",
}  # fmt: skip
"""Fields that cut a model into stages in one particular way, taken back where the number of stages is another."""


UNCUT_FIELDS = {f"pipeline.{name}": value for name, value in UNCUT.items()}


def updated(section: Any, values: Mapping[str, Any]) -> Any:
    """``section`` with ``values``; those that are its defaults count as not set, as if nobody had said them."""
    copied = section.model_copy(update=values)
    defaults = {name for name in values if getattr(copied, name) == type(section).model_fields[name].default}
    copied.__pydantic_fields_set__.difference_update(defaults)
    return copied
