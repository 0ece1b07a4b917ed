"""``ddp`` against real processes: sizes of every bucket, every tensor of an iteration, and each rank's states.

``ddp_torch_2_13.json`` is what ``tests/oracle/ddp.py`` measured with torch 2.13 on gloo, two ranks. Scalars are left
out; gradients are never added in place there, since the tracer's references keep storages from being autograd's alone.
"""

from __future__ import annotations

import json
from functools import cache
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import transformers

from memplan.frameworks.ddp import programs as ddp_programs, programs as ddp_zero, reducer as ddp
from memplan.frameworks.plain import programs as plain
from memplan.layers.module import Module, Options
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import ROUND, Drop, Hold, Tape, rounded
from memplan.tape.program import Program, fold_program, static

from ..oracle.ddp import CASES, RANKS, VOCAB, B, Case, S, measure
from ..oracle.deepspeed import SIZES, summary

Record = dict[str, Any]

GOLDEN: dict[str, list[Record]] = json.loads((Path(__file__).parent / "ddp_torch_2_13.json").read_text())

TIED = ("gpt2", "bert", "opt", "falcon", "gemma2")
"""Families whose head is tied here: the sum of its two gradients is a tensor of its own where storages are followed."""

WORD = 4 * VOCAB * 64
"""Bytes of the word embeddings."""

ONCE = {("gptj", 2): (12_288, -12_288)}
"""By case and stretch, what the plan holds and the process does not: under ``no_sync`` buffers are broadcast before
the first micro-batch only."""


FILLED = {("falcon-unused", 1): dict.fromkeys(("+24576", "-24576"), 6)}
"""Copies of the zeros that gradients are put into, which are made where storages are followed."""


@cache
def plan_of(name: str) -> Plan:
    case = CASES[name]
    config = transformers.AutoConfig.for_model(case.family, vocab_size=VOCAB, **SIZES[case.family])
    flags: dict[str, object] = {
        "framework": "ddp",
        "gpus": RANKS,
        "mbs": B,
        "seq": S,
        "gbs": RANKS * B * case.microbatches,
    }
    flags |= {"dtype": "fp32", "attention": "eager", "recompute": "full" if case.recompute else "none"}
    flags |= {"optimizer": case.optimizer, "optimizer-implementation": "foreach"}
    flags |= {"ddp-gradient-sync": not case.no_sync, **case.ddp, **(case.zero or {})}
    if case.optimizer == "momentum":
        flags |= {"optimizer": "sgd", "momentum": 0.9}
    if case.zero is not None:
        flags["zero"] = 1
    if hasattr(config, "linear_num_value_heads"):
        flags["delta-kernel"] = "fla"
    with TemporaryDirectory() as folder:
        config.to_json_file(Path(folder) / "config.json", use_diff=False)
        flags["model"] = folder
        return resolve(read_plan(None, {k.replace("_", "-"): str(v).lower() for k, v in flags.items()}).plan)


@cache
def program_of(name: str) -> Program:
    (program,) = ddp_programs.programs(plan_of(name), Options(accumulates_in_place=False))
    return program


def stretches(name: str) -> list[list[tuple[int, int]]]:
    """Forward and backward of every micro-batch."""
    program, count = program_of(name), CASES[name].microbatches
    result = []
    for microbatch in range(count):
        final = bool(program.last) and microbatch == count - 1
        modules = [span.module for span in (program.last if final else program.spans) for _ in span.names]
        result.append(changes(*(module.steady.forward for module in modules)))
        result.append(changes(*(_backward(module, microbatch == 0 or final) for module in reversed(modules))))
    return result


def _backward(module: Module, first: bool) -> Tape:
    return (module.first if first else module.steady).backward


def changes(*tapes: Tape) -> list[tuple[int, int]]:
    events = (event for tape in tapes for event in tape)
    return [(1 if isinstance(event, Hold) else -1, event.bytes) for event in events if isinstance(event, Hold | Drop)]


@pytest.mark.parametrize("name", CASES)
def test_every_bucket(name: str) -> None:
    held = [hold.bytes for hold in program_of(name).extra if hold.name == "ddp_bucket"]
    for record in GOLDEN[name]:
        real = record["rebuilt_buckets"] or record["initial_buckets"]
        assert held == [rounded(size) for size in real]


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_of_an_iteration(name: str) -> None:
    tied = CASES[name].family in TIED
    for record in GOLDEN[name]:
        for at, (found, real) in enumerate(zip(stretches(name), record["stretches"], strict=False)):
            for size in ONCE.get((name, at), ()):
                found = [change for change in found if change[0] * change[1] != size]
            ours = summary(found)
            for size, count in FILLED.get((name, at), {}).items():
                ours["sizes"][size] += count
            assert (ours["net"], ours["peak"]) == (real["net"], real["peak"])
            assert without_tables(ours) == without_tables(real) if tied else ours["sizes"] == real["sizes"]
            if not tied and at % 2 == 0:
                assert ours["windows"] == real["windows"]


def without_tables(summary: Record) -> dict[str, int]:
    return {size: count for size, count in summary["sizes"].items() if abs(int(size)) != WORD}


@pytest.mark.parametrize("name", CASES)
def test_what_is_held_between_iterations(name: str) -> None:
    """Labels are a tensor besides the ids; the map of used parameters is one that gloo's process has as well."""
    real = max(record["held"] for record in GOLDEN[name])
    assert static(program_of(name)).net - real == rounded(8 * B * S) - (ROUND if has_map(CASES[name]) else 0)


def has_map(case: Case) -> bool:
    """The tracer sees the map's copy on the host, too."""
    return bool(case.ddp.get("find_unused_parameters") or case.ddp.get("static_graph"))


@pytest.mark.parametrize("name", CASES)
def test_the_step(name: str) -> None:
    """Temporaries of the most loaded rank, over its own parameters with ZeroRedundancyOptimizer."""
    peak = summary(changes(program_of(name).step))["peak"]
    held = [record["held"] for record in GOLDEN[name]]
    assert peak == GOLDEN[name][held.index(max(held))]["stretches"][-1]["peak"]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.zero is not None])
def test_each_ranks_parameters_and_states(name: str) -> None:
    plan = plan_of(name)
    registered, _ = ddp.parameters(plain.layer_shape(plan), plan.model.layers, False)
    for own, record in zip(ddp_zero.owners(registered, RANKS), GOLDEN[name], strict=True):
        assert [parameter.elements for parameter in own] == record["owned"]
        holds = ddp_zero.states(own, plan.optimizer, "fp32")
        if plan.optimizer.name != "adafactor":
            assert sum(4 * prod(hold.shape) for hold in holds) == record["states"]


def test_each_ranks_memory() -> None:
    """Of both ranks, what each holds beyond the other is the difference of their states."""
    for name in ("zero", "zero-views", "zero-adafactor"):
        plan = plan_of(name)
        registered, _ = ddp.parameters(plain.layer_shape(plan), plan.model.layers, False)
        first, second = (
            sum(hold.bytes for hold in ddp_zero.states(own, plan.optimizer, "fp32"))
            for own in ddp_zero.owners(registered, RANKS)
        )
        assert first - second == GOLDEN[name][0]["held"] - GOLDEN[name][1]["held"]


def test_processes_still_do_what_was_measured() -> None:
    names = ("gpt2-views-no-sync",)
    for rank, found in enumerate(measure({name: CASES[name] for name in names})):
        for name in names:
            assert found[name] == GOLDEN[name][rank]


def test_views_need_as_much_less_as_gradients_take() -> None:
    plan = plan_of("default")
    views = plan.model_copy(update={"ddp": plan.ddp.model_copy(update={"gradient_as_bucket_view": True})})
    (copies,), (viewed,) = (ddp_programs.programs(one, Options()) for one in (plan, views))
    gradients = 1_066_752
    assert static(copies).net == static(viewed).net
    assert fold_program(copies).step_peak - fold_program(viewed).step_peak >= gradients
