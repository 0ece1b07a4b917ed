"""Small plans of torchtitan's Llama, traced."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.estimate import programs_of
from memplan.layers.module import Options
from memplan.plan.plan import Plan
from memplan.plan.read import Flags, read_plan
from memplan.plan.resolve import resolve
from memplan.tape.program import Program
from memplan.trace.comparison import Comparison, compared
from memplan.trace.framework import job_of_plan
from memplan.trace.recording import Traced
from memplan.trace.torchtitan_step import traced_torchtitan

TITAN = {"model": "llama-3-8b", "framework": "fsdp", "fsdp-code": "torchtitan"}
GROUPED = {"hidden": "192", "heads": "8", "kv-heads": "4", "head-dim": "24", "ffn": "448", "vocab": "1008"}
GROUPED |= {"layers": "3", "mbs": "2", "seq": "64"}
ONE_SEQUENCE = {"hidden": "128", "heads": "4", "kv-heads": "4", "head-dim": "32", "ffn": "320", "vocab": "1002"}
ONE_SEQUENCE |= {"layers": "3", "mbs": "1", "seq": "96"}
WIDE_HEADS = {"hidden": "96", "heads": "6", "kv-heads": "2", "head-dim": "64", "ffn": "224", "vocab": "514"}
WIDE_HEADS |= {"layers": "3", "mbs": "3", "seq": "32"}


@dataclass(frozen=True)
class Found:
    program: Program
    traced: Traced
    comparison: Comparison


def plan_of(flags: Flags) -> Plan:
    return resolve(read_plan(None, {**TITAN, **GROUPED, "dp": "4", **flags}).plan)


def found(flags: Flags, stage: int = 0) -> Found:
    plan = plan_of(flags)
    program = programs_of(plan, Options())[stage]
    traced = traced_torchtitan(job_of_plan(plan, stage=stage))
    return Found(program, traced, compared(traced, program))
