"""Plans of runs whose arguments a table holds, as of measured ones and of tests."""

from __future__ import annotations

from collections.abc import Mapping

from memplan.formats.files import words_of_node
from memplan.formats.launch import Asked
from memplan.formats.megatron.context import Family
from memplan.formats.training_scripts import launched
from memplan.plan.errors import Node, Origin
from memplan.plan.read import ReadPlan, build_plan


def plan_of_arguments(
    arguments: Mapping[str, object],
    environment: Mapping[str, object] | None = None,
    *,
    gpus: int,
    family: Family = "gpt",
    vocabulary: int | None = None,
    framework: str = "megatron",
    flags: Mapping[str, str] | None = None,
) -> ReadPlan:
    """The plan of a run whose ``arguments`` are a mapping, ``{"--num-layers": 12, "--bf16": True}``.

    ``vocabulary`` is the number of the tokenizer's tokens, before padding, where arguments do not say it.
    Warnings whose code is ``argument-not-modelled`` or ``argument-unknown`` name what the estimate leaves out.
    """
    source = Origin("arguments")
    words = words_of_node(Node.of(arguments, source), framework)
    variables = {name: Node(str(value), source) for name, value in (environment or {}).items()}
    asked = Asked(framework, {**(flags or {}), "gpus": str(gpus)}, vocab_size=vocabulary)
    launch = launched(words, asked, family, variables)
    read = build_plan(launch.source, flags or {})
    return ReadPlan(read.plan, read.origins, (*launch.notes, *read.warnings))
