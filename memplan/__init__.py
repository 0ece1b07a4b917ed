"""memplan: a memory planner and partition advisor for training large models on many GPUs.

    >>> import memplan
    >>> plan = memplan.read_plan({"model": "llama-3-8b", "gpus": 8, "gpu": "h100", "framework": "fsdp"})
    >>> memplan.estimate(plan, mbs=4).fits
    False

What follows is the whole surface (docs/python.md); each name is imported when it is first used.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from .plan.errors import LackingError as LackingError, PlanError as PlanError
    from .surface.answers import (
        Estimate as Estimate,
        Explanation as Explanation,
        Record as Record,
        Suggestion as Suggestion,
        estimate as estimate,
        explain as explain,
        suggest as suggest,
        validate as validate,
    )
    from .surface.plans import Plan as Plan, read_plan as read_plan

else:
    ModuleType = type(sys)  # ``types`` is one more import while an interrupt is Python's own to show

__version__ = "0.1.0"

_PLACES = {
    "Estimate": "surface.answers",
    "Explanation": "surface.answers",
    "LackingError": "plan.errors",
    "Plan": "surface.plans",
    "PlanError": "plan.errors",
    "Record": "surface.answers",
    "Suggestion": "surface.answers",
    "estimate": "surface.answers",
    "explain": "surface.answers",
    "read_plan": "surface.plans",
    "suggest": "surface.answers",
    "validate": "surface.answers",
}
"""Each name of the surface, and the module that has it."""

__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found: object = getattr(import_module(f".{_PLACES[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})


class _Package(ModuleType):
    """Keeps the surface's functions where modules within have their names: the import of one sets it as an attribute
    here, which would hide ``memplan.estimate`` and ``memplan.validate``."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _PLACES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
