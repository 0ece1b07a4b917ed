"""A framework is one room and a line in the registry: a toy, in this file, is estimated, searched and reported."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest

from memplan.cli import main
from memplan.estimate import detail
from memplan.frameworks import ROOMS, Framework, Supports, framework, frameworks
from memplan.frameworks.plain import programs as plain
from memplan.frameworks.plain.timing import PlainTime
from memplan.layers.module import Module, Options, Tapes
from memplan.optimizers.base import State, full
from memplan.plan.errors import PlanError
from memplan.plan.fields import plan_fields
from memplan.plan.plan import Plan, ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.plan.schema import plan_schema
from memplan.result import Notice
from memplan.schedules.one_chunk import one_chunk
from memplan.search.framework import FrameworkSearch
from memplan.search.point import Extra
from memplan.search.time.collectives import collective
from memplan.search.time.framework import FrameworkTime
from memplan.search.time.updates import Exchange, Replicas
from memplan.tape.events import Category, Hold, Hook, Seam, Tape, insert, rounded
from memplan.tape.program import Program, Span, drop_all
from memplan.trace.framework import FrameworkRunning, OtherRunning


class ToySearch(FrameworkSearch):
    """Beside sizes and ZeRO stages, which ``Supports`` says, an axis of its own."""

    def extras(self, plan: ResolvedPlan) -> list[tuple[Extra, ...]]:
        return [(Extra("SGD", (("optimizer.name", "sgd"), ("optimizer.implementation", None)), keeps_numerics=False),)]


class ToyTime(PlainTime):
    def exposed(self, replicas: Replicas, rank: Exchange) -> float:
        """Gradients are summed one by one, and nothing hides it."""
        size = rank.trained * replicas.gradient
        return rank.microbatches * collective(replicas.rates, "all-reduce", size, replicas.across)


class Toy(Framework):
    """Replicas of plain PyTorch that send every gradient through a buffer of its own, and keep a copy of parameters in
    fp32, which ZeRO-1 divides among them."""

    name = "toy"
    supports = Supports(sizes=frozenset({"dp"}), zero=(0, 1), sections=(), optimizers=("sgd", "adamw"))

    def check(self, plan: ResolvedPlan) -> None:
        if plan.layout.dp > 64:
            raise PlanError("layout.dp", plan.layout.dp, "must be at most 64 with toys")

    def programs(self, plan: ResolvedPlan, options: Options) -> tuple[Program, ...]:
        (made,) = plain.programs(plan, replace(options, seams=True))
        order = one_chunk(tuple(Span(sending(one.module), one.names) for one in made.spans), made.microbatches)
        copied = copy_of_parameters(plan.layout.dp if plan.layout.zero else 1)
        return (replace(made, order=order, ranks=tuple(range(plan.layout.dp)), states=(*made.states, copied)),)

    def notices(self, plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
        if plan.layout.zero == 0 and plan.layout.dp > 1:
            yield Notice("toy-copies", "every toy has a whole copy of the parameters; zero 1 divides it")

    def assumptions(self, plan: ResolvedPlan) -> tuple[str, ...]:
        return ("toys share",)

    def described(self, plan: Plan) -> list[str]:
        return ["wooden"]

    @cached_property
    def search(self) -> FrameworkSearch:
        return ToySearch()

    @cached_property
    def time(self) -> FrameworkTime:
        return ToyTime()

    @cached_property
    def running(self) -> FrameworkRunning:
        return OtherRunning()


FRAMEWORK = Toy()


def copy_of_parameters(owners: int) -> State:
    whole = full("copy", Category.MAIN_PARAMETERS, "fp32")
    return replace(whole, size=lambda parameter: rounded(-(-whole.size(parameter) // owners)))


def sending(module: Module) -> Module:
    """``module`` with a buffer at the seam where a gradient has arrived."""

    def tapes(one: Tapes) -> Tapes:
        held = {event.tensor: event for event in one.backward if isinstance(event, Hold)}

        def sent(seam: Seam) -> Tape:
            if seam.hook is not Hook.GRADIENT or seam.tensor not in held:
                return ()
            size = held[seam.tensor].bytes
            return drop_all([Hold(0, size, Category.COMMUNICATION_BUFFERS, "toy_sent")], module.largest_id + 1)

        return replace(one, forward=insert(one.forward, nothing), backward=insert(one.backward, sent))

    evaluation = insert(module.evaluation, nothing)
    return replace(module, first=tapes(module.first), steady=tapes(module.steady), evaluation=evaluation)


def nothing(seam: Seam) -> Tape:
    return ()


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(ROOMS, "toy", __name__)
    plan_fields.cache_clear()
    yield
    framework.cache_clear()
    plan_fields.cache_clear()


JOB = {"model": "gpt2", "layers": "2", "seq": "64", "framework": "toy", "gpus": "4", "gpu": "a100-80gb"}


def plan(**flags: str) -> Plan:
    return read_plan(None, JOB | flags).plan


def answer(capsys: pytest.CaptureFixture[str], command: str, *flags: str) -> dict[str, Any]:
    job = [f"--{name}={value}" for name, value in JOB.items()]
    assert main([command, *job, *flags, "--json"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(("zero", "owners"), [("0", 1), ("1", 4)])
def test_a_new_framework_is_estimated_and_reported(capsys: pytest.CaptureFixture[str], zero: str, owners: int) -> None:
    found = answer(capsys, "estimate", f"--zero={zero}")
    (stage,) = found["stages"]
    assert stage["breakdown"]["main_parameters"] == pytest.approx(4 * stage["parameters"] / owners, rel=0.01)
    assert stage["ranks"] == [0, 1, 2, 3]
    assert ("toy-copies" in [one["code"] for one in found["warnings"]]) == (owners == 1)
    assert "toys share" in found["assumptions"]
    assert found["plan"]["framework"] == "toy"


@pytest.mark.parametrize("command", ["estimate", "suggest-partition --gbs=8"])
def test_its_tables_have_its_words(capsys: pytest.CaptureFixture[str], command: str) -> None:
    job = [f"--{name}={value}" for name, value in JOB.items()]
    assert main([*command.split(), *job, "--no-color"]) == 0
    printed = capsys.readouterr().out
    assert "gpt2 · toy" in printed
    assert ("every toy has a whole copy" in printed) == (command == "estimate")


def test_its_buffers_are_at_the_seams() -> None:
    """One for each gradient as it arrives, of its size."""
    held = [event for one in detail(plan(), 0) for event in one.events if isinstance(event, Hold)]
    sent = [event.bytes for event in held if event.name == "toy_sent"]
    arrived = [event.bytes for event in held if event.category is Category.GRADIENTS]
    assert len(sent) >= len(arrived) > 20
    assert max(sent) == max(arrived) == rounded(50257 * 768 * 2)


def test_a_new_framework_is_searched(capsys: pytest.CaptureFixture[str]) -> None:
    """Two ZeRO stages, micro-batch sizes, ways to recompute and optimizers; for less memory, copies are divided."""
    found = answer(capsys, "suggest-partition", "--gbs=8", "--objective=memory")
    assert found["search"]["total"] == 2**4
    assert found["recommended"]["plan"]["framework"] == "toy"
    assert found["recommended"]["layout"]["zero"] == 1


def test_its_communication_takes_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Once a micro-batch."""
    answers = [answer(capsys, "suggest-partition", "--gbs=8", "--fix=zero=0", f"--fix=mbs={mbs}") for mbs in (1, 2)]
    two, one = (found["recommended"]["parts_seconds"]["data_parallel"] for found in answers)
    assert two == pytest.approx(2 * one)
    assert one > 0


def test_what_it_has_not_is_refused() -> None:
    for flags, says in (
        ({"tp": "2"}, "layout.tp = 2: must be 1 with framework toy; "),
        ({"optimizer": "lion"}, "optimizer.name"),
        ({"gpus": "128"}, "must be at most 64 with toys"),
        ({"bucket-cap-mb": "10"}, "must be left out with framework toy; "),
        ({"framework": "top"}, "must be one of single, ddp, .*fsdp, toy; did you mean toy"),
    ):
        with pytest.raises(PlanError, match=says):
            resolve(plan(**flags))


def test_the_schema_has_it() -> None:
    assert "toy" in plan_schema()["properties"]["framework"]["enum"]


def test_every_framework_says_what_it_is() -> None:
    for one in frameworks():
        assert framework(one.name) is one
        assert one.supports.zero[0] == 0
        assert one.supports.default_implementations.keys() <= set(one.supports.optimizers or ())
        assert isinstance(one.search, FrameworkSearch)
        assert isinstance(one.time, FrameworkTime)
        assert isinstance(one.running, FrameworkRunning)


@pytest.mark.parametrize("name", ROOMS)
def test_every_part_that_a_room_names_is_there(name: str) -> None:
    one = framework(name)
    assert all(callable(one._loaded(part)) for part in one.parts if part)
