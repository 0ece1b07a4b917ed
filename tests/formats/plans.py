"""Plans of every framework, odd values among them, and what a round trip must keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import assume, strategies as st

from memplan.estimate import programs_of
from memplan.formats.exported import Exported, Target, exported
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.models import load_spec
from memplan.plan.plan import Plan
from memplan.plan.resolve import resolve
from memplan.tape.program import Folded, fold_program


def made(**sections: Any) -> Plan:
    """The plan with these sections; an example without one where memplan refuses it."""
    try:
        plan = Plan.model_validate(sections, strict=False)
        hardware = resolve(plan).hardware
        programs_of(resolve(plan), Options())
    except (PlanError, ValueError):
        assume(False)
    gpus, on_node = hardware.gpus or 1, hardware.gpus_per_node
    assume(gpus <= on_node or not gpus % on_node)  # no launcher starts others
    return plan


def folds(plan: Plan) -> list[Folded]:
    """The requested bytes of every stage: all that a search compares."""
    return [fold_program(program) for program in programs_of(resolve(plan), Options())]


def round_trip(plan: Plan, target: Target) -> Exported:
    """``plan`` exported; read back it needs the same bytes, category by category, at the same places."""
    done = exported(plan, target)
    assert done.says_its_command or not done.text.startswith("#")
    again = target.read(done.text, done.flags, done.settings)
    assert folds(again) == folds(plan)
    return done


def spec(base: str, /, **changes: Any) -> dict[str, Any]:
    """The built-in model ``base`` with fields changed."""
    return {**load_spec(base).model_dump(), "published_parameters": None, "source": "", **changes}


names = st.sampled_from(
    [
        "gpt2-xl",
        "my model",
        'a\'b "c" $(d) `e` \\f # g',
        "llama-3-8b",
        "ü–模型",
        "0x10",
        "-x",
        "a=b",
        "one\ntouch two",
        "EOT\nEOT",
        "\x7f\u2028\x1b[31m",
    ]
)
"""Names that a shell, TOML or YAML would take for something else."""


def chosen(choices: Mapping[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """A section with some of its fields, the others at their defaults."""
    return st.fixed_dictionaries({}, optional=dict(choices))
