"""Storages followed through what real code does to them: each case has its bytes counted by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memplan.tape.events import Drop, Hold
from memplan.trace.recording import BACKWARD, Place, Recording
from memplan.trace.storages import Follow, resizes_followed

KIB = 1024


@contextmanager
def followed(phase: str = BACKWARD) -> Iterator[tuple[Recording, Follow]]:
    recording = Recording()
    follow = Follow(recording, lambda: Place(0, phase, ""))
    with FakeTensorMode(), follow, resizes_followed(follow):
        follow.calibrate()
        yield recording, follow
    follow.close()


def held(recording: Recording) -> list[int]:
    return [event.bytes if isinstance(event, Hold) else -event.bytes for event in recording.events]


def test_a_storage_counts_once_and_rounded() -> None:
    with followed() as (recording, _):
        x = torch.empty(1000)
        y = x.view(10, 100).t()[2:]
        x.add_(1)
        assert held(recording) == [4096]
        del x
        assert recording.live == 4096, "the view keeps its base's storage"
        del y
    assert held(recording) == [4096, -4096]


def test_empty_tensors_are_none() -> None:
    with followed() as (recording, _):
        x = torch.empty(0)
        y = x + 1
        del x, y
    assert not recording.events


def test_a_storage_that_grows_is_copied() -> None:
    with followed() as (recording, _):
        x = torch.empty(256)
        x.resize_(512)
        assert held(recording) == [KIB, 2 * KIB, -KIB]
        x.resize_(128)
        assert recording.live == 2 * KIB, "a smaller shape keeps its storage"


def test_resizing_to_nothing_frees_and_back_allocates() -> None:
    """What FSDP does to gathered parameters."""
    with followed() as (recording, _):
        x = torch.empty(256)
        storage = x.untyped_storage()
        storage.resize_(0)
        assert recording.live == 0
        storage.resize_(KIB)
        assert recording.live == KIB
        del x, storage
    assert held(recording) == [KIB, -KIB, KIB, -KIB]


class Doubled(torch.autograd.Function):
    """Keeps an attribute besides what it saves."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.kept = x * 3
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2 + ctx.kept


def test_custom_function_keeps_its_attributes() -> None:
    with followed() as (recording, _):
        x = torch.empty(256, requires_grad=True)
        y = Doubled.apply(x)  # type: ignore[no-untyped-call]
        assert recording.live == 3 * KIB
        total = y.sum()
        del y
        assert recording.live == 2 * KIB + 512, "x, what the function keeps, and the sum"
        total.backward()  # type: ignore[no-untyped-call]
        assert recording.live == 3 * KIB + 512, "x.grad came; the attribute lives as long as the graph"
        del total
        assert recording.live == 2 * KIB


def test_hook_that_keeps_a_gradient() -> None:
    kept: list[torch.Tensor] = []
    with followed() as (recording, _):
        x = torch.empty(256, requires_grad=True)
        y = x * 2
        y.register_hook(kept.append)
        (y * 2).sum().backward()
        del y
        assert recording.live == 3 * KIB, "x, its gradient, and the one that the hook kept"
        kept.clear()
        assert recording.live == 2 * KIB


def test_retained_graph_keeps_what_was_saved() -> None:
    with followed() as (recording, _):
        x = torch.empty(256, requires_grad=True)
        total = x.exp().sum()
        total.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        assert recording.live == 3 * KIB + 512, "x, exp(x), x.grad and the sum"
        total.backward()  # type: ignore[no-untyped-call]
        assert recording.live == 2 * KIB + 512


def test_double_backward() -> None:
    with followed() as (recording, _):
        x = torch.empty(256, requires_grad=True)
        (gradient,) = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
        assert recording.live >= 3 * KIB, "x, exp(x) which the gradient's graph saves, and the gradient"
        gradient.sum().backward()  # type: ignore[no-untyped-call]
        del gradient
        assert recording.live == 2 * KIB


def two_uses(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return (y.sin() + y.cos()).sum()


def same_gradient_twice(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return (y + y.sin() + y).sum()


@pytest.mark.parametrize(("code", "in_place", "apart"), [(two_uses, 6, 7), (same_gradient_twice, 5, 6)])
def test_gradients_that_meet_are_summed_in_place(
    code: Callable[[torch.Tensor], torch.Tensor], in_place: int, apart: int
) -> None:
    """As on a GPU where nobody else refers to one of them (``input_buffer.cpp``); each sum apart is a tensor more."""
    counts = []
    for sums_in_place in (True, False):
        with followed() as (recording, follow):
            follow.sums_in_place = sums_in_place
            x = torch.empty(256, requires_grad=True)
            before = len(recording.events)
            code(x).backward()
            del x
            held_by_backward = [e for e in recording.events[before:] if isinstance(e, Hold) and e.bytes == KIB]
            counts.append(len(held_by_backward))
    assert counts[0] < counts[1]


def test_every_hold_is_dropped_once() -> None:
    with followed() as (recording, _):
        x = torch.empty(64, 64, requires_grad=True)
        for _ in range(3):
            torch.softmax(x @ x, -1).sum().backward()  # type: ignore[no-untyped-call]
        del x
    ended = [event.tensor for event in recording.events if isinstance(event, Drop)]
    assert sorted(ended) == sorted(event.tensor for event in recording.events if isinstance(event, Hold))
    assert recording.live == 0
