"""``megatron/core/pipeline_parallel/fine_grained_activation_offload.py``: what modules of a layer save goes to the host
when they are done, and comes back in backward.

A group begins where a module does (``FineGrainedOffloadingGroupStartFunction``): everything that autograd saves in it
is the group's. At its end (``bulk_offload_group``) tensors of enough elements are copied to the host, and those that
the module names end at once, whoever still has them. In backward a group's start fetches the group that was sent last
before it (``bulk_reload``); a tensor that is not there yet when a node asks for it is fetched then (``tensor_pop``).

Copies run on streams of their own, and memory of a tensor that was sent is free once its copy is done
(``record_stream``): here, when the layer behind sends the same group, as if copies just kept up with layers. So every
layer begins with what one like it has sent (``on_the_way``). The group that a layer finds fetched ahead is fetched when
its backward begins. A layer's input that the schedule keeps stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from math import prod

from ...tape.events import INPUT, Category, Hold
from ...values import NamedTuple, replace
from ..autograd import Node, Recorder, Shape, Storage, Tensor, size_of
from ..gradients import watched
from ..recompute import Frame
from .shape import CoreShape

LATENT, EXPERTS = ("attn_norm",), ("mlp_norm", "expert_fc1", "moe_act")
"""Modules that layers have with latent attention alone, whose norm stands apart, and with experts alone."""

WHOLE = 0.5
"""Share of its storage from which on a strided view goes to the host with all of it (``BASE_OFFLOAD_MIN_COVERAGE``)."""

Commit = Callable[[Sequence[Tensor]], None]
"""The module's end: its group goes to the host, and with it the memory of tensors that it names."""


class Away(NamedTuple):
    """A tensor on the host."""

    shape: Shape
    dtype: str
    name: str


AHEAD = Away((), "uint8", "")
"""Stands for what has not been sent."""


class Group(Frame):
    """What one module saves (``OffloadTensorGroup``): where the tensors of the nodes in it come from."""

    __slots__ = ("apart", "least", "left", "name", "saved", "waiting")

    def __init__(self, name: str, least: int) -> None:
        self.name, self.least = name, least
        """Elements of the smallest tensor that goes."""
        self.left: dict[int, int] = {}
        """Bytes of storages that have gone, by their ids."""
        self.saved: dict[Node, list[Tensor | Away]] = {}
        self.waiting: list[list[Tensor]] = []
        """What the node that is made next keeps apart,"""
        self.apart: dict[Node, list[tuple[list[Tensor], Away]]] = {}
        """and on the host, of each node."""

    def node(self, node: Node, saved: Sequence[Tensor]) -> Node:
        """Called for each node that the module makes."""
        if saved:
            node.frame = self
            self.saved[node] = [Tensor(x.storage, x.shape, x.dtype) for x in saved]
            lists, self.waiting = self.waiting, []
            self.apart[node] = [(held, AHEAD) for held in lists]
        return node

    def keeps_apart(self, held: list[Tensor]) -> None:
        """The node that is made next saves tensors ``held``, too, and lets go of them by itself."""
        self.waiting.append(held)

    def unpack(self, r: Recorder, node: Node) -> None:
        """Gives ``node`` its saved tensors, fetching those that nobody has."""
        if node in self.saved:
            self._fetch_apart(r, node)
            node.saved = tuple([_here(r, one).storage for one in self.saved.pop(node)])

    def _fetch_apart(self, r: Recorder, node: Node) -> None:
        for held, one in self.apart.pop(node, ()):
            if one is not AHEAD:
                held.append(_here(r, one))

    def send(self, r: Recorder, named: Sequence[Tensor]) -> None:
        """To the host; memory of tensors ``named`` ends."""
        for node, held in self.saved.items():
            for at, one in enumerate(held):
                if isinstance(one, Tensor) and self._goes(r, one):
                    held[at] = self._sent(r, one)
            del one
            lists = [own for own, _ in self.apart.pop(node)]
            self.apart[node] = [(own, self._sent(r, x)) for own in lists for x in own if self._goes(r, x)]
            for own in lists:
                own[:] = [x for x in own if not self._goes(r, x)]
        for one in named:
            if self._goes(r, one):
                self.left[one.storage.id] = one.storage.bytes
                r.end(one)

    def _goes(self, r: Recorder, x: Tensor) -> bool:
        known = x.storage.at >= 0 or x.storage.id == INPUT
        return known and x.storage.recorder is r and prod(x.shape) >= self.least

    def _sent(self, r: Recorder, x: Tensor) -> Away:
        """A strided view goes with all of its storage, or is put together first."""
        size, storage = size_of(x.shape, x.dtype), x.storage
        name = _name(r, storage)
        self.left[storage.id] = storage.bytes
        if storage.bytes < size + 512:
            return Away(x.shape, x.dtype, name)
        if size >= WHOLE * storage.bytes:
            return Away((storage.bytes,), "uint8", name)
        r.empty(x.shape, x.dtype, f"{name}_contiguous")
        return Away(x.shape, x.dtype, name)

    def fetch(self, r: Recorder) -> None:
        """All of it."""
        for node, held in self.saved.items():
            self._fetch_apart(r, node)
            held[:] = [_here(r, one) for one in held]


def _name(r: Recorder, storage: Storage) -> str:
    hold = r.events[storage.at] if storage.at >= 0 else None
    return hold.name if isinstance(hold, Hold) else "input"


def _here(r: Recorder, one: Tensor | Away) -> Tensor:
    if isinstance(one, Tensor):
        return one
    return r.empty(one.shape, one.dtype, f"{one.name}_reloaded", Category.ACTIVATIONS)


def groups_of(shape: CoreShape, *, experts: bool) -> tuple[str, ...]:
    """Modules of a layer whose groups go to the host, as ``_set_offload_modules`` finds them there."""
    own = LATENT * bool(shape.spec.latent_kv_rank) + ("qkv_linear", "core_attn", "attn_proj") + EXPERTS * experts
    recomputed = ("core_attn",) if "core_attn" in shape.recompute_modules else ()
    return tuple(name for name in own if name in shape.offload and name not in recomputed)


Layer = Callable[[Recorder, Tensor, CoreShape], Tensor]


@lru_cache(maxsize=256)
def sent_by(layer: Layer, shape: CoreShape) -> Mapping[str, int]:
    """Bytes that a layer like this one sends, by group."""
    r = Recorder(first=False)
    x, _ = r.leaf(r.empty(shape.hidden, shape.dtype, "input"))
    out = layer(r, x, replace(shape, offload_kept=()))
    found = {one.name: sum(one.left.values()) for one in r.sent}
    r.close()
    del out
    return found


def on_the_way(r: Recorder, layer: Layer, shape: CoreShape) -> None:
    """A layer begins: groups of the one before are still being copied."""
    if shape.offload and r.grad_enabled and not r.counts:
        r.leaving = {
            name: r.empty((size,), "uint8", f"{name}_on_the_way", Category.ACTIVATIONS)
            for name, size in sent_by(layer, replace(shape, offload_kept=())).items()
        }


@contextmanager
def group(r: Recorder, x: Tensor, name: str, shape: CoreShape) -> Iterator[tuple[Tensor, Commit]]:
    """The module ``name`` with its input ``x``, as it is in the module."""
    kept = shape.offload_kept if shape.offload_kept and r.first_microbatch else ()
    if name not in shape.offload or name in kept or not r.grad_enabled or r.counts:

        def arrived(named: Sequence[Tensor]) -> None:
            r.leaving.pop(name, None)

        yield x, arrived
        return
    here, sent = Group(name, shape.offload_least), r.sent

    def commit(named: Sequence[Tensor]) -> None:
        r.leaving.pop(name, None)
        here.send(r, named)
        sent.append(here)

    x = watched(r, x, partial(_fetched, sent))
    outer, r.frame = r.frame, here
    yield x, commit
    r.frame = outer


def fetched_ahead(r: Recorder, x: Tensor) -> Tensor:
    """A layer's output: before its backward the group that was sent last is on its way back."""
    return watched(r, x, partial(_fetched, r.sent)) if r.sent else x


def _fetched(sent: list[Group], r: Recorder) -> None:
    if sent:
        sent.pop().fetch(r)
