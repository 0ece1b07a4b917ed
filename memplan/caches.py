"""What functions keep of earlier plans (``lru_cache``), forgotten after so many of them.

Caches are bounded by entries, and one entry of a large plan can take a megabyte.
"""

from __future__ import annotations

import sys
from itertools import count
from typing import Any

PLANS, SEARCHES = 128, 8
"""Estimates, and searches, after which caches are emptied."""

_plans, _searches = count(1), count(1)


def begin_plan() -> None:
    """A plan is estimated."""
    if not next(_plans) % PLANS:
        forget()


def begin_search() -> None:
    """Layouts of a plan are searched."""
    if not next(_searches) % SEARCHES:
        forget()


def forget() -> None:
    """Empties every bounded cache of this package. Those without a bound hold its own tables, and stay."""
    for function in _bounded():
        function.cache_clear()


def kept() -> int:
    """Entries of the bounded caches."""
    return sum(function.cache_info().currsize for function in _bounded())


def _bounded() -> list[Any]:
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{__package__}.")]
    return list({id(one): one for module in modules for one in vars(module).values() if _is_bounded(one)}.values())


def _is_bounded(one: Any) -> bool:
    parameters = getattr(one, "cache_parameters", None)
    return callable(parameters) and not isinstance(one, type) and parameters()["maxsize"] is not None
