"""Programs that do odd things to storages: the trace beside what PyTorch's own CPU allocator holds for the same code on
real tensors, and beside a count by hand.

One tensor is of 1 KiB (256 fp32 elements) unless a docstring says otherwise; a scalar takes a block of 512 B. Each
program stops at points; ``HELD`` says in units of 512 B what is held there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from memplan.tape.events import Hold
from memplan.trace.recording import BACKWARD, Place, Recording
from memplan.trace.storages import Follow, resizes_followed

from ..oracle.allocator import Program, held_by_allocator

BLOCK = 512
Points = Iterator[str]


@contextmanager
def followed() -> Iterator[Recording]:
    recording = Recording()
    follow = Follow(recording, lambda: Place(0, BACKWARD, ""))
    with FakeTensorMode(), follow, resizes_followed(follow):
        follow.calibrate()
        yield recording
    follow.close()


def held_by_trace(program: Program) -> list[tuple[str, int, int]]:
    """As ``held_by_allocator``, of the trace on fake tensors."""
    points: list[tuple[str, int, int]] = []
    live = seen = 0
    with followed() as recording:
        for name in program():
            most = live
            for event in recording.events[seen:]:
                live += event.bytes if isinstance(event, Hold) else -event.bytes
                most = max(most, live)
            points.append((name, live, most))
            seen = len(recording.events)
    return points


def leaf() -> torch.Tensor:
    return torch.ones(256, requires_grad=True)


class Broken(torch.nn.Module):
    """Compiled in two parts: what is between them runs in Python."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        torch._dynamo.graph_break()
        return (y.sin() * y).sum()


def graph_break() -> Points:
    """x and its exp y, which sin, the product and exp save, and sin(y), which the product saves; the sum."""
    x = leaf()
    total = torch.compile(Broken(), backend="eager")(x)
    yield "forward"
    total.backward()
    del total
    yield "backward"


class Cubed(torch.autograd.Function):
    """Saves its input, keeps x² as an attribute, and has a gradient for no second output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.squared = x * x
        return ctx.squared * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient.neg().mul_(ctx.squared).add_(x)


def custom_function() -> Points:
    """Forward: x, x² as an attribute, x³, and the sum. Without x³: x, x², sum. Then x's gradient besides, and
    the attribute lives until the graph goes with the sum."""
    x = leaf()
    cubed = Cubed.apply(x)
    total = cubed.sum()
    yield "forward"
    del cubed
    yield "without its output"
    total.backward()
    yield "backward"
    del total
    yield "graph gone"


class InPlace(torch.autograd.Function):
    """Negates its input where it lies."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.neg_()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient.neg()


def custom_function_in_place() -> Points:
    """x and its negative, which is negated in place and saved by ``pow``; the sum. Backward: x.grad instead of it."""
    x = leaf()
    total = InPlace.apply(x.neg()).pow(2).sum()
    yield "forward"
    total.backward()
    del total
    yield "backward"


def view_outlives_base() -> Points:
    """A base of 4 KiB as long as a view of an eighth of it lives; a copy of the view is 512 B."""
    base = torch.ones(1024)
    view = base[:128].view(8, 16).t()
    yield "both"
    del base
    yield "view"
    copied = view.contiguous()
    del view
    yield "copied"
    del copied
    yield "nothing"


def saved_view() -> Points:
    """``pow`` saves a chunk of x's exp; the whole exp (saved by ``exp``, too) lives until backward."""
    x = leaf()
    first, second = x.exp().chunk(2)
    total = (first**2).sum()
    del first, second
    yield "forward"
    total.backward()
    del total
    yield "backward"


def hook_keeps() -> Points:
    """A hook keeps the gradient of y: x, x.grad, and the one that was kept."""
    kept: list[torch.Tensor] = []
    x = leaf()
    y = x.neg()
    y.register_hook(kept.append)
    y.neg().sum().backward()
    del y
    yield "kept"
    kept.clear()
    yield "let go"


def forward_hook_keeps() -> Points:
    """A module's forward hook keeps its input; nothing else would, since the sum saves only a shape."""
    kept: list[Any] = []
    module = torch.nn.Identity()
    module.register_forward_hook(lambda module, args, output: kept.append(args[0]))
    x = leaf()
    total = module(x.neg()).sum()
    yield "kept"
    kept.clear()
    yield "let go"
    total.backward()
    del total
    yield "backward"


def packed_tensors() -> Points:
    """Saved-tensor hooks keep bf16: x, and exp's result in 512 B instead of 1 KiB, and the sum."""
    x = leaf()
    with saved_tensors_hooks(lambda kept: kept.to(torch.bfloat16), lambda packed: packed.to(torch.float32)):
        total = x.exp().sum()
    yield "forward"
    total.backward()
    del total
    yield "backward"


def retained_graph() -> Points:
    """x, exp(x), the sum; after a backward that retains, x.grad besides; after a second one, exp(x) has gone."""
    x = leaf()
    total = x.exp().sum()
    yield "forward"
    total.backward(retain_graph=True)
    yield "retained"
    total.backward()
    yield "backward"


def double_backward() -> Points:
    """x and exp(x) which both graphs save; its gradient; the ones that the product of the first backward saves are an
    expanded scalar, and the sum is one more. At last x and x.grad."""
    x = leaf()
    total = x.exp().sum()
    (gradient,) = torch.autograd.grad(total, x, create_graph=True)
    del total
    yield "gradient"
    gradient.sum().backward()
    del gradient
    yield "backward"


def in_place() -> Points:
    """x, and one tensor that is made by ``neg`` and then changed where it lies; ``relu_`` saves its result, which is
    it. Backward: x.grad besides."""
    x = leaf()
    y = x.neg()
    y[:128].zero_()
    y.neg_().relu_()
    yield "forward"
    y.sum().backward()
    yield "backward"
    del y
    yield "without y"


def data_swapped() -> Points:
    """``x.data = …`` gives x another storage (2 KiB); the old one (1 KiB) goes."""
    x = leaf()
    yield "before"
    x.data = torch.ones(512)
    yield "after"


def resized_storage() -> Points:
    """FSDP's way: a storage is resized to nothing, and back, while tensors and views refer to it."""
    x = torch.ones(256)
    view = x[10:]
    yield "whole"
    x.untyped_storage().resize_(0)
    yield "nothing"
    x.untyped_storage().resize_(1024)
    yield "whole again"
    del x
    yield "view"
    del view
    yield "gone"


def shared_storage() -> Points:
    """``set_`` makes y refer to x's storage; its own goes, and x's stays with y."""
    x, y = torch.ones(256), torch.ones(1024)
    yield "two"
    y.set_(x)
    yield "one"
    del x
    yield "y's"


def sums_of_gradients() -> Points:
    """y is used three times: its gradients are summed in the first. x, and exp(x) which all save (sin and cos save
    their input); the sum. After backward x and x.grad."""
    x = leaf()
    y = x.exp()
    total = (y.sin() + y.cos() + y).sum()
    del y
    yield "forward"
    total.backward()
    del total
    yield "backward"


def accumulated_gradients() -> Points:
    """The second backward adds to x.grad where it lies."""
    x = leaf()
    x.exp().sum().backward()
    yield "first"
    x.exp().sum().backward()
    yield "second"


def recomputed() -> Points:
    """Forward keeps x alone (and the sum); backward runs exp and sin again. The generator's state is left out: it is on
    the host with a GPU, too."""
    x = leaf()
    total = checkpoint(lambda y: y.exp().sin(), x, use_reentrant=False, preserve_rng_state=False).sum()
    yield "forward"
    total.backward()
    del total
    yield "backward"


def gathered_rows() -> Points:
    """x (4 KiB), indices (2 KiB of int64), what exp saves and the sum. ``gather``'s gradient is zeros of the whole that
    are added to in place."""
    x = torch.ones(1024, requires_grad=True)
    at = torch.zeros(256, dtype=torch.int64)
    total = x.gather(0, at).exp().sum()
    yield "forward"
    total.backward()
    del total
    yield "backward"


def chosen_rows() -> Points:
    """``index_select`` and indexing: gradients are zeros of the whole (4 KiB) that are added to in place."""
    x = torch.ones(1024, requires_grad=True)
    at = torch.zeros(256, dtype=torch.int64)
    y = x.exp()
    total = (y.index_select(0, at) + y[at]).sum()
    del y
    yield "forward"
    total.backward()
    del total
    yield "backward"


def largest() -> Points:
    """``topk`` saves its indices (2 KiB of int64); its gradient is zeros of the whole (4 KiB), filled in place."""
    x = torch.ones(1024, requires_grad=True)
    values, indices = x.exp().topk(256)
    total = values.exp().sum()
    del values, indices
    yield "forward"
    total.backward()
    del total
    yield "backward"


class Boxed(torch.Tensor):
    """A tensor that has its elements in two others, and no storage of its own."""

    first: torch.Tensor
    second: torch.Tensor

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Boxed:
        return torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: None, size: Any, stride: Any) -> Boxed:
        return Boxed(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parts = []
        for name in ("first", "second"):
            mine = tree_map(lambda one, name=name: getattr(one, name) if isinstance(one, Boxed) else one, args)
            parts.append(func(*mine, **(kwargs or {})))
        return Boxed(*parts)


def tensor_subclass() -> Points:
    """Two tensors inside, 2 KiB, then the exp of their negatives besides, which are there until then: 6 KiB at most.
    The wrapper, which says that it is of 1 KiB, has no bytes."""
    x = Boxed(torch.ones(256), torch.ones(256))
    yield "made"
    y = x.neg().exp()
    yield "exp"
    del x
    yield "y"
    del y
    yield "gone"


PROGRAMS: dict[Callable[[], Points], list[int]] = {
    graph_break: [7, 4],
    custom_function: [7, 5, 7, 4],
    custom_function_in_place: [5, 4],
    view_outlives_base: [8, 8, 1, 0],
    saved_view: [5, 4],
    hook_keeps: [6, 4],
    forward_hook_keeps: [5, 3, 4],
    packed_tensors: [4, 4],
    retained_graph: [5, 7, 5],
    double_backward: [7, 4],
    in_place: [4, 6, 4],
    data_swapped: [2, 4],
    resized_storage: [2, 0, 2, 2, 0],
    shared_storage: [10, 2, 2],
    sums_of_gradients: [5, 4],
    accumulated_gradients: [4, 4],
    recomputed: [3, 4],
    gathered_rows: [15, 20],
    chosen_rows: [21, 20],
    largest: [23, 16],
    tensor_subclass: [4, 8, 4, 0],
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_held_and_most(program: Callable[[], Points]) -> None:
    """At every point what is held is the count by hand, and that and the most since the point before are what the
    allocator gave out."""
    traced = held_by_trace(program)
    assert [live // BLOCK for _, live, _ in traced] == PROGRAMS[program]
    held_by_allocator(program)  # what PyTorch makes once and keeps is made
    assert traced == held_by_allocator(program)
