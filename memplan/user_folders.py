"""Directories of the user's own, as the XDG base directories have them. Light: every estimate asks for one."""

from __future__ import annotations

import os
from pathlib import Path

from .plan.errors import ABSENT, Origin, PlanError


def user_folder(variable: str, base: str, otherwise: str, what: str) -> Path:
    """What the environment's ``variable`` names, else ``memplan`` in what ``base`` does, else in ``otherwise``.
    ``PlanError`` where that is in a home directory which nobody knows; ``what`` is there, in words."""
    given, root = os.environ.get(variable), os.environ.get(base)
    try:
        if given:
            return Path(given).expanduser()
        folder = Path(root) if root and Path(root).is_absolute() else Path(otherwise).expanduser()
    except RuntimeError:
        problem = "must be a directory: no home directory is known for what it begins with"
        if not given:
            problem = f"is needed: it names the directory of {what}, and no home directory is known"
        raise PlanError(variable, given or ABSENT, problem, origin=Origin("environment")) from None
    return folder / "memplan"
