"""Megatron-Core's interleaved schedule, and where a rank stands in it."""

from __future__ import annotations

from collections import deque
from dataclasses import field
from functools import lru_cache
from typing import Literal

from ..tape.program import Action, What
from ..values import dataclass

# -- megatron rank ---------------------------------------------------------------------------------------

Kind = Literal["input", "output", "stub", "output_grad", "input_grad", "report"]
KINDS: tuple[Kind, ...] = ("input", "output", "stub", "output_grad", "input_grad", "report")


@lru_cache(maxsize=1 << 16)
def action(what: What, chunk: int, number: int, tensor: Kind | None = None) -> Action:
    """The schedules of all stages name the same passes and tensors: one object for equal ones. Tensors between stages
    are numbered by kind, in order of appearance; their chunk is the one that receives or makes them."""
    return Action(what, chunk, number, tensor)


FINALIZE = Action("reduce", 0)
"""``finalize_model_grads``, with the schedule's variables still bound."""


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
    beside: bool = field(default=False, repr=False)
    """Forward passes take turns with backward passes of other micro-batches, layer by layer
    (``overlap_moe_expert_parallel_comm``): one more forward pass comes first, so that the two do not depend on one
    another."""

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
        wanted += self.beside
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
        self.events: list[Action] = []
        self.numbers = dict.fromkeys(KINDS, 0)
        self.closed = False
        self.sends = [plan.sends(chunk) for chunk in range(plan.chunks)]
        """By chunk."""
        self.inputs: dict[int, Input | None] = {}
        """``TransformerBlock.input_tensor`` of each chunk."""
        self.reports: list[Tensor] = []

    def receive(self, wanted: bool, chunk: int) -> Input | None:
        """A buffer for a hidden state (``_communicate``, ``tensor_recv_prev``)."""
        return Input(self, "input", chunk) if wanted else None

    def receive_gradient(self, wanted: bool, chunk: int) -> Tensor | None:
        """A buffer for the gradient of an output (``tensor_recv_next``)."""
        return Tensor(self, "output_grad", chunk) if wanted else None

    def forward(self, chunk: int, microbatch: int, input: Input | None) -> Output:
        """A pass, and its output or loss."""
        self.inputs[chunk] = input
        self.events.append(action("forward", chunk, microbatch))
        if self.sends[chunk]:
            return Output(input, Tensor(self, "output", chunk))
        self.reports.append(Tensor(self, "report", chunk))
        return Output(input, None)

    def backward(self, chunk: int, microbatch: int, input: Input | None) -> Tensor | None:
        """A pass; the gradient of its input, which the input holds, too (``retain_grad``)."""
        self.events.append(action("backward", chunk, microbatch))
        if input is None:
            return None
        input.grad = Tensor(self, "input_grad", chunk)
        return input.grad


class Tensor:
    """Held by Python's variables; its death is an event."""

    __slots__ = ("chunk", "kind", "number", "rank")

    def __init__(self, rank: Rank, kind: Kind, chunk: int) -> None:
        self.rank = rank
        self.kind = kind
        self.chunk = chunk
        self.number = number = rank.numbers[kind]
        rank.numbers[kind] = number + 1
        rank.events.append(action("begin", chunk, number, kind))

    def __del__(self) -> None:
        if not self.rank.closed:
            self.rank.events.append(action("end", self.chunk, self.number, self.kind))


class Input(Tensor):
    """A received hidden state: a leaf, whose gradient autograd attaches to it."""

    __slots__ = ("grad",)

    def __init__(self, rank: Rank, kind: Kind, chunk: int) -> None:
        super().__init__(rank, kind, chunk)
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
        output.data = Tensor(output.data.rank, "stub", output.data.chunk)


# -- megatron interleaved --------------------------------------------------------------------------------


class _Request:
    """An asynchronous send or receive, which holds its tensor."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor | None) -> None:
        self.tensor = tensor


class Interleaved:
    """One iteration. Attributes are the variables that its nested functions share."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        plan = self.plan = rank.plan
        self.table = table(plan)
        self.total = len(self.table)
        self.sends, self.receives = rank.sends, [plan.receives(chunk) for chunk in range(plan.chunks)]
        self.chunks = [chunk for _, chunk in self.table]
        """Of each forward pass,"""
        self.chunks_back = [plan.chunks - 1 - chunk for chunk in self.chunks]
        """and of each backward pass."""
        self.last = plan.chunks - 1
        self.input_tensors: list[list[Input | None]] = [[] for _ in range(plan.chunks)]
        self.output_tensors: list[deque[Output | None]] = [deque() for _ in range(plan.chunks)]
        self.output_tensor_grads: list[deque[Tensor | None]] = [deque() for _ in range(plan.chunks)]
        spare = plan.group - plan.stages + 1
        self.fwd_recv_buffer: list[Input | None] = [None] * (spare if plan.first else 1)
        self.bwd_recv_buffer: list[Tensor | None] = [None] * (spare if plan.last else 1)
        self.recv_prev_wait_handles: deque[_Request] = deque()
        self.recv_next_wait_handles: deque[_Request] = deque()
        self.send_prev_wait_handle: _Request | None = None
        self.output_tensor: Output | None = None
        self.input_tensor_grad: Tensor | None = None
        self.backwards = [0] * plan.chunks

    def run(self, rank: Rank) -> None:
        """One iteration."""
        plan = self.plan
        self.waited: list[_Request | None] = [None, None]
        self.received: list[Tensor | None] = [None, None]
        self.input_tensors[0].append(rank.receive(plan.receives(0), 0))
        remaining = self.total - plan.warmup
        for k in range(plan.warmup):
            self._warm_up(k)
        for k in range(remaining):
            (self._steady_overlapped if plan.overlap else self._steady)(k)
        deallocate(self.output_tensor)
        if not remaining:
            self.output_tensor_grads[-1].append(rank.receive_gradient(plan.sends(self.last), self.last))
        for k in range(remaining, self.total):
            self._cool_down(k)
        rank.events.append(FINALIZE)
        for name in tuple(vars(self)):
            if name not in ("rank", "plan"):
                delattr(self, name)

    # -- which pass is next -------------------------------------------------------------------------

    def _expects(self, k: int) -> tuple[bool, int]:
        """``recv_tensor_from_previous_stage``: does an input arrive during forward pass k, and for which chunk."""
        plan = self.plan
        if not plan.first:
            return k < self.total - 1, self.chunks[(k + 1) % self.total]
        ahead = plan.stages - 1
        chunk = self.chunks[(k + 1 if k < ahead else k - ahead) % self.total]
        return ahead <= k < self.total - 1 and chunk != self.last, chunk + 1

    def _expects_back(self, k: int) -> tuple[bool, int]:
        """The same of a gradient during backward pass k."""
        plan = self.plan
        if not plan.last:
            return True, self.chunks_back[(k + 1) % self.total]
        ahead = plan.stages - 1
        chunk = self.chunks_back[(k + 1 if k < ahead else k - ahead) % self.total]
        return k >= ahead and chunk != 0, chunk - 1

    # -- passes -------------------------------------------------------------------------------------

    def _forward(self, k: int) -> Output:
        microbatch, chunk = self.table[k]
        inputs, outputs = self.input_tensors[chunk], self.output_tensors[chunk]
        if not self.receives[chunk] and len(inputs) == len(outputs):
            inputs.append(None)
        output = self.rank.forward(chunk, microbatch, inputs[len(outputs)])
        outputs.append(output)
        return output

    def _backward(self, k: int) -> Tensor | None:
        chunk = self.chunks_back[k]
        input = self.input_tensors[chunk].pop(0)
        output = self.output_tensors[chunk].popleft()  # noqa: F841  (held until the pass has ended)
        grads = self.output_tensor_grads[chunk]
        grad = grads.popleft() if grads else None  # noqa: F841
        microbatch = self.backwards[chunk]
        self.backwards[chunk] += 1
        return self.rank.backward(chunk, microbatch, input)

    # -- phases -------------------------------------------------------------------------------------

    def _warm_up(self, k: int) -> None:
        plan, rank = self.plan, self.rank
        ahead = plan.overlap_warmup
        if ahead and k and self.receives[self.chunks[k]]:
            self.waited[0] = self.recv_prev_wait_handles.popleft()
        arrives, chunk = self._expects(k)
        slot = k % len(self.fwd_recv_buffer)
        if ahead and not plan.first:
            self._receive_overlapped(slot, arrives, chunk)
        self.output_tensor = self._forward(k)
        if not self.sends[self.chunks[k]]:
            self.output_tensor = None
        last = k == plan.warmup - 1 and plan.warmup < self.total
        if not ahead:
            received = rank.receive(arrives, chunk)
            if last and not plan.overlap:
                gradient = rank.receive_gradient(not plan.last, self.last)
                self.received[1] = gradient
                self.output_tensor_grads[-1].append(gradient)
                del gradient
            self.received[0] = received
            if arrives:
                self.input_tensors[chunk].append(received)
            del received
            deallocate(self.output_tensor)
        else:
            if plan.first:
                self._receive_overlapped(slot, arrives, chunk)
            deallocate(self.output_tensor)
            self._put(chunk, slot, arrives)
        if last and plan.overlap:
            self._receive_gradient_overlapped(-1, (not plan.last, self.last))
            if not plan.last:
                self.output_tensor_grads[-1].append(self.bwd_recv_buffer[-1])

    def _steady(self, k: int) -> None:
        """Without overlap: both passes, then one exchange in both directions."""
        plan, rank = self.plan, self.rank
        forward_k = plan.warmup + k
        self.output_tensor, self.input_tensor_grad = self._pair(forward_k, k)
        if not self.sends[self.chunks[forward_k]]:
            self.output_tensor = None
        arrives, chunk = self._expects(forward_k)
        returns, chunk_back = self._expects_back(k)
        received, gradient = rank.receive(arrives, chunk), rank.receive_gradient(returns, chunk_back)
        self.received[0] = received
        self.received[1] = gradient
        deallocate(self.output_tensor)
        if arrives:
            self.input_tensors[chunk].append(received)
        if returns:
            self.output_tensor_grads[chunk_back].append(gradient)

    def _steady_overlapped(self, k: int) -> None:
        """With overlap: each pass is followed by its own exchange, waited for by the next of its kind."""
        self.output_tensor, self.input_tensor_grad = self._pair(self.plan.warmup + k, k)

    def _pair(self, forward_k: int, backward_k: int) -> tuple[Output | None, Tensor | None]:
        """``forward_backward_helper_wrapper``: the variables of the pair before are replaced when it returns."""
        overlap = self.plan.overlap
        if overlap:
            self._before(forward_k)
        output: Output | None = self._forward(forward_k)
        if overlap:
            self._between(forward_k, backward_k)
            if not self.sends[self.chunks[forward_k]]:
                output = None
        grad = self._backward(backward_k)
        if overlap:
            self._behind(backward_k, grad)
        return output, grad

    def _before(self, forward_k: int) -> None:
        """A pair of passes with overlap begins;"""
        if self.receives[self.chunks[forward_k]] and self.recv_prev_wait_handles:
            self.recv_prev_wait_handles.popleft()
        deallocate(self.output_tensor)

    def _between(self, forward_k: int, backward_k: int) -> None:
        """its forward pass has ended;"""
        arrives, chunk = self._expects(forward_k)
        slot = forward_k % len(self.fwd_recv_buffer)
        self._receive_overlapped(slot, arrives, chunk)
        self._put(chunk, slot, arrives)
        if self.sends[self.chunks_back[backward_k]] and self.recv_next_wait_handles:
            self.recv_next_wait_handles.popleft()

    def _behind(self, backward_k: int, grad: Tensor | None) -> None:
        """and its backward pass."""
        self._return_overlapped(
            backward_k, backward_k % len(self.bwd_recv_buffer), grad, self._expects_back(backward_k)
        )

    def _cool_down(self, k: int) -> None:
        plan, rank = self.plan, self.rank
        ahead = plan.overlap_warmup
        if k and self.sends[self.chunks_back[k]] and (ahead or self.recv_next_wait_handles):
            self.waited[1] = self.recv_next_wait_handles.popleft()
        returns, chunk = self._expects_back(k)
        returns = returns and k < self.total - 1
        slot = k % len(self.bwd_recv_buffer)
        if ahead and not plan.last:
            self._receive_gradient_overlapped(slot, (returns, chunk))
        self.input_tensor_grad = self._backward(k)
        if not ahead:
            gradient = rank.receive_gradient(returns, chunk)
            self.received[1] = gradient
            if returns:
                self.output_tensor_grads[chunk].append(gradient)
        elif plan.last:
            self._return_overlapped(k, slot, self.input_tensor_grad, (returns, chunk))
        else:
            self.send_prev_wait_handle = _request(self.input_tensor_grad)
            self._put_gradient(chunk, slot, returns)

    # -- exchanges ----------------------------------------------------------------------------------

    def _receive_overlapped(self, slot: int, arrives: bool, chunk: int) -> None:
        self.fwd_recv_buffer[slot] = self.rank.receive(arrives, chunk)
        if arrives:
            self.recv_prev_wait_handles.append(_Request(self.fwd_recv_buffer[slot]))

    def _put(self, chunk: int, slot: int, arrives: bool) -> None:
        if arrives:
            self.input_tensors[chunk].append(self.fwd_recv_buffer[slot])
            self.fwd_recv_buffer[(slot + 1) % len(self.fwd_recv_buffer)] = None

    def _receive_gradient_overlapped(self, slot: int, expected: tuple[bool, int]) -> None:
        self.bwd_recv_buffer[slot] = self.rank.receive_gradient(*expected)
        if expected[0]:
            self.recv_next_wait_handles.append(_Request(self.bwd_recv_buffer[slot]))

    def _return_overlapped(self, k: int, slot: int, grad: Tensor | None, expected: tuple[bool, int]) -> None:
        self.bwd_recv_buffer[slot] = self.rank.receive_gradient(*expected)
        self.send_prev_wait_handle = _request(grad)
        if expected[0]:
            self.recv_next_wait_handles.append(_Request(self.bwd_recv_buffer[slot]))
        self._put_gradient(expected[1], slot, expected[0])

    def _put_gradient(self, chunk: int, slot: int, returns: bool) -> None:
        if returns:
            self.output_tensor_grads[chunk].append(self.bwd_recv_buffer[slot])
            self.bwd_recv_buffer[(slot + 1) % len(self.bwd_recv_buffer)] = None


def _request(tensor: Tensor | None) -> _Request | None:
    return None if tensor is None else _Request(tensor)


def table(plan: Schedule) -> list[tuple[int, int]]:
    """``get_schedule_table``: (micro-batch, chunk) of each forward pass; backward mirrors the chunks."""
    microbatches, group = plan.microbatches, plan.group
    return [
        (microbatch, chunk)
        for start in range(0, microbatches, group)
        for chunk in range(plan.chunks)
        for microbatch in range(start, min(start + group, microbatches))
    ]
