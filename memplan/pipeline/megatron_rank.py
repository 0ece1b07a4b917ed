"""A rank of Megatron-Core's pipeline while its schedule runs: tensors without elements, and the events so far.

Variables hold them as they hold the real ones; see ``megatron_schedule``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

Kind = Literal["input", "output", "stub", "output_grad", "input_grad", "report"]
KINDS: tuple[Kind, ...] = ("input", "output", "stub", "output_grad", "input_grad", "report")


class Call(NamedTuple):
    """A forward (``F``) or backward (``B``) pass of one micro-batch through one chunk of layers."""

    what: str
    chunk: int
    microbatch: int


class Change(NamedTuple):
    """A tensor between stages begins (``sign`` 1) or ends (−1). Numbered by kind, in order of appearance."""

    sign: int
    kind: Kind
    number: int


@lru_cache(maxsize=1 << 16)
def _call(what: str, chunk: int, microbatch: int) -> Call:
    """The schedules of all stages name the same passes: one object for equal ones."""
    return Call(what, chunk, microbatch)


@lru_cache(maxsize=1 << 16)
def _change(sign: int, kind: Kind, number: int) -> Change:
    return Change(sign, kind, number)


class Finalize(NamedTuple):
    """``finalize_model_grads``, with the schedule's variables still bound."""


Event = Call | Change | Finalize


@dataclass(frozen=True, slots=True)
class Schedule:
    """What decides the order of passes on one rank. Made by ``schedule``, which checks it."""

    stage: int
    stages: int
    chunks: int
    """Virtual stages of the rank; 1 without interleaving."""
    microbatches: int
    group: int
    """Micro-batches in a row per chunk, ``microbatch_group_size_per_vp_stage``."""
    overlap: bool
    """``overlap_p2p_comm``: only with interleaving."""
    overlap_warmup: bool
    """``overlap_p2p_comm_warmup_flush``."""

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def warmup(self) -> int:
        """Forward passes before the first backward's own; ``get_pp_rank_microbatches``."""
        behind = self.stages - self.stage - 1
        wanted = behind if self.chunks == 1 else 2 * behind + (self.chunks - 1) * self.group
        return min(wanted, self.microbatches * self.chunks)

    def receives(self, chunk: int) -> bool:
        """The chunk's input comes from another stage."""
        return not (self.first and chunk == 0)

    def sends(self, chunk: int) -> bool:
        """The chunk's output goes to another stage."""
        return not (self.last and chunk == self.chunks - 1)


class Rank:
    """One rank: what its chunks and its caller hold, and the events so far."""

    def __init__(self, plan: Schedule) -> None:
        self.plan = plan
        self.events: list[Event] = []
        self.numbers = dict.fromkeys(KINDS, 0)
        self.closed = False
        self.inputs: dict[int, Input | None] = {}
        """``TransformerBlock.input_tensor`` of each chunk."""
        self.reports: list[Tensor] = []

    def receive(self, wanted: bool) -> Input | None:
        """A buffer for a hidden state (``_communicate``, ``tensor_recv_prev``)."""
        return Input(self) if wanted else None

    def receive_gradient(self, wanted: bool) -> Tensor | None:
        """A buffer for the gradient of an output (``tensor_recv_next``)."""
        return Tensor(self, "output_grad") if wanted else None

    def forward(self, chunk: int, microbatch: int, input: Input | None) -> Output:
        """A pass, and its output or loss."""
        self.inputs[chunk] = input
        self.events.append(_call("F", chunk, microbatch))
        if self.plan.sends(chunk):
            return Output(input, Tensor(self, "output"))
        self.reports.append(Tensor(self, "report"))
        return Output(input, None)

    def backward(self, chunk: int, microbatch: int, input: Input | None) -> Tensor | None:
        """A pass; the gradient of its input, which the input holds, too (``retain_grad``)."""
        self.events.append(_call("B", chunk, microbatch))
        if input is None:
            return None
        input.grad = Tensor(self, "input_grad")
        return input.grad


class Tensor:
    """Held by Python's variables; its death is an event."""

    __slots__ = ("kind", "number", "rank")

    def __init__(self, rank: Rank, kind: Kind) -> None:
        self.rank = rank
        self.kind = kind
        self.number = number = rank.numbers[kind]
        rank.numbers[kind] = number + 1
        rank.events.append(_change(1, kind, number))

    def __del__(self) -> None:
        if not self.rank.closed:
            self.rank.events.append(_change(-1, self.kind, self.number))


class Input(Tensor):
    """A received hidden state: a leaf, whose gradient autograd attaches to it."""

    __slots__ = ("grad",)

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank, "input")
        self.grad: Tensor | None = None


class Output:
    """A chunk's output, whose data can be replaced, or its loss (without data: the loss's layer counts it).

    Its graph ends in the input (``AccumulateGrad`` holds the leaf), also after backward.
    """

    __slots__ = ("data", "graph")

    def __init__(self, graph: Input | None, data: Tensor | None) -> None:
        self.graph = graph
        self.data = data


def deallocate(output: Output | None) -> None:
    if output is not None and output.data is not None:
        output.data = Tensor(output.data.rank, "stub")
