"""Commands and flags that have a name and no code yet: they say so instead of not being there."""

from __future__ import annotations

import typer

from ..plan.errors import ABSENT, Origin, PlanError

PLANNED = {
    "validate": "Run the plan for real, briefly, and print measured beside estimated.",
}
"""What each will do, by name."""


def not_built_yet(context: typer.Context) -> int:
    name = context.info_name
    raise PlanError(
        "", ABSENT, "is not built yet; memplan estimate and suggest-partition are", origin=Origin(f"memplan {name}")
    )
