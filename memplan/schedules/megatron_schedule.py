"""In which order a rank of Megatron-Core runs its passes, and which tensors between stages live when.

``megatron/core/pipeline_parallel/schedules.py`` (``forward_backward_no_pipelining``,
``forward_backward_pipelining_without_interleaving``, ``forward_backward_pipelining_with_interleaving``)
and ``p2p_communication.py``. What a schedule adds to the passes of its micro-batches is decided by
when its variables let go of a tensor, so the order is run here on tensors without elements, held by
variables of the same scope, and CPython ends them at the same point. What they hold:

* ``input``: a received hidden state, allocated before it is needed, kept in a list until its
  backward has ended, and further by the graph of the output (``AccumulateGrad`` holds its leaf) until
  that is let go. A chunk's ``TransformerBlock.input_tensor`` (``set_input_tensor``) keeps the last one,
  with its gradient, until the chunk's next forward: through the optimizer step.
* ``output``: what a chunk computes. After it was sent, its data is replaced by one element
  (``deallocate_output_tensor``: a ``stub``), which stays until its backward has ended; with
  overlapped communication that happens only when the next forward begins, after a backward.
* ``output_grad``: a received gradient, allocated behind a forward pass, kept throughout backward.
* ``input_grad``: the gradient of ``input``, kept until the next backward's replaces it.
* ``report``: loss and token count of a micro-batch on the last stage (``forward_data_store``).

The request of an uncoalesced send or receive holds its tensor as long as it exists itself
(``ProcessGroupNCCL.cpp``, ``pointToPoint``: ``work->outputs_``).

Where passes take turns (``Beside``), two pieces in a row, of a forward and a backward pass, are all that these
two do up to the exchange between stages, and the next two the rest.

``trace(schedule)`` gives the actions: behind a pass comes the ``output`` or ``input_grad`` that it leaves.
``megatron_fold.reduced`` shortens a schedule to what does not repeat. The interleaved schedule itself is in
``megatron_interleaved``.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache

from ..plan.errors import PlanError
from ..tape.program import Action
from .megatron_interleaved import (
    FINALIZE,
    KINDS,
    Input,
    Interleaved,
    Kind,
    Output,
    Rank,
    Schedule,
    Tensor,
    action,
    deallocate,
)


class Beside(Interleaved):
    """Forward passes beside backward passes of other micro-batches, layer by layer, in interleaved stages
    (``combined_1f1b.py``, ``combined_1f1b_schedule_for_interleaved_pipelining``): in the place of both passes of the
    steady phase; passes of the ramps run alone. ``TransformerModelChunkSchedulePlan.run`` exchanges between stages once
    both passes are through their layers (``post_forward``, ``post_backward``), before the loss of one and the embedding
    of the other."""

    def _pair(self, forward_k: int, backward_k: int) -> tuple[Output | None, Tensor | None]:
        rank, overlap = self.rank, self.plan.overlap
        if overlap:
            self._before(forward_k)
        microbatch, chunk = self.table[forward_k]
        inputs, outputs = self.input_tensors[chunk], self.output_tensors[chunk]
        if not self.receives[chunk] and len(inputs) == len(outputs):
            inputs.append(None)
        given = inputs[len(outputs)]
        back = self.chunks_back[backward_k]
        received: Input | None = self.input_tensors[back].pop(0)
        output_back = self.output_tensors[back].popleft()  # noqa: F841  (held until both passes have ended)
        grads = self.output_tensor_grads[back]
        output_grad = grads.popleft() if grads else None  # noqa: F841
        number = self.backwards[back]
        self.backwards[back] += 1
        rank.inputs[chunk] = given
        pair = action("forward_piece", chunk, microbatch), action("backward_piece", back, number)
        rank.events += pair
        output: Output | None = Output(given, Tensor(rank, "output", chunk) if self.sends[chunk] else None)
        assert output is not None
        outputs.append(output)
        grad: Tensor | None = None
        if received is not None:
            grad = received.grad = Tensor(rank, "input_grad", back)
        if overlap:
            self._between(forward_k, backward_k)
            self._behind(backward_k, grad)
        rank.events += pair
        if not self.sends[chunk]:
            rank.reports.append(Tensor(rank, "report", chunk))
            output = None if overlap else output
        return output, grad


def one_stage_beside(rank: Rank) -> None:
    """Without a pipeline (``combined_1f1b_schedule_for_no_pipelining``)."""
    rank.forward(0, 0, None)
    for microbatch in range(1, rank.plan.microbatches):
        pair = action("forward_piece", 0, microbatch), action("backward_piece", 0, microbatch - 1)
        rank.events += (*pair, *pair)
        rank.reports.append(Tensor(rank, "report", 0))
    rank.backward(0, rank.plan.microbatches - 1, None)
    rank.events.append(FINALIZE)


__all__ = ["KINDS", "Kind", "Schedule", "schedule", "trace"]


@lru_cache(maxsize=1 << 16)
def schedule(
    stage: int,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    group: int | None = None,
    overlap: bool = True,
    overlap_warmup: bool = False,
    beside: bool = False,
) -> Schedule:
    """The schedule of one rank; ``PlanError`` where Megatron-Core itself would stop.

    ``group`` defaults to ``stages`` (``model_parallel_config.py``). Without interleaving,
    ``overlap`` is switched off as ``validate_args`` does.
    """
    if chunks == 1:
        if overlap_warmup:
            raise PlanError("pipeline.overlap_p2p_warmup", True, "needs the interleaved schedule: layout.vpp above 1")
        if beside and stages > 1:
            raise PlanError("layout.vpp", 1, "must be above 1 with experts.overlap_exchange and pipeline stages")
        return Schedule(stage, stages, 1, microbatches, stages, False, False, beside)
    if stages < 2 or (stages == 2 and not overlap):
        least = "2" if overlap else "3 without overlapped p2p communication"
        raise PlanError("layout.vpp", chunks, f"the interleaved schedule needs layout.pp of at least {least}")
    if overlap_warmup and not overlap:
        raise PlanError("pipeline.overlap_p2p_warmup", True, "needs pipeline.overlap_p2p")
    size = stages if group is None else group
    if not stages <= size <= microbatches:
        allowed = f"must be from {stages} (layout.pp) to {microbatches} (micro-batches of an iteration)"
        if microbatches < stages:
            raise PlanError("layout.vpp", chunks, f"needs at least {stages} micro-batches, there are {microbatches}")
        raise PlanError("pipeline.group", group, allowed)
    if 0 < microbatches % size < stages:
        raise PlanError(
            "pipeline.group" if group is not None else "layout.vpp",
            size if group is not None else chunks,
            f"{microbatches} micro-batches in groups of {size} leave {microbatches % size}: "
            f"must leave none, or at least {stages} (layout.pp)",
        )
    return Schedule(stage, stages, chunks, microbatches, size, overlap, overlap_warmup, beside)


@lru_cache(maxsize=128)
def trace(plan: Schedule) -> tuple[Action, ...]:
    """The events of the second iteration: what the first left in the chunks is there when it begins. Kept of as many
    plans as 128 stages have.

    It ends with the schedule's return, when only inputs in chunks (with gradients) and reports are left.
    """
    rank = Rank(plan)
    for chunk in range(plan.chunks):
        if plan.receives(chunk):
            left = rank.inputs[chunk] = Input(rank, "input", chunk)
            left.grad = Tensor(rank, "input_grad", chunk)
            del left
    rank.events.clear()
    if plan.chunks == 1:
        (one_stage_beside if plan.beside else _one_chunk)(rank)
    else:
        (Beside if plan.beside else Interleaved)(rank).run(rank)
    events = tuple(rank.events)
    rank.closed = True
    return events


def _one_chunk(rank: Rank) -> None:
    """Without pipelining, and 1F1B. Variables named as in the framework outlive their iteration of the loop."""
    plan = rank.plan
    receives, sends = not plan.first, not plan.last
    inputs: deque[Input | None] = deque()
    outputs: deque[Output | None] = deque()
    input_tensor: Input | None = None
    output_tensor: Output | None
    for i in range(plan.warmup):
        input_tensor = rank.receive(receives, 0)
        output_tensor = rank.forward(0, i, input_tensor)
        inputs.append(input_tensor)
        outputs.append(output_tensor)
        deallocate(output_tensor)
    remaining = plan.microbatches - plan.warmup
    if remaining:
        input_tensor = rank.receive(receives, 0)
    for i in range(remaining):
        output_tensor = rank.forward(0, plan.warmup + i, input_tensor)
        output_tensor_grad = rank.receive_gradient(sends, 0)
        inputs.append(input_tensor)
        outputs.append(output_tensor)
        deallocate(output_tensor)
        input_tensor = inputs.popleft()
        output_tensor = outputs.popleft()
        input_tensor_grad = rank.backward(0, i, input_tensor)
        input_tensor = rank.receive(receives and i < remaining - 1, 0)
    for i in range(remaining, plan.microbatches):
        input_tensor = inputs.popleft()
        output_tensor = outputs.popleft()
        output_tensor_grad = rank.receive_gradient(sends, 0)
        input_tensor_grad = rank.backward(0, i, input_tensor)
    rank.events.append(FINALIZE)
    del output_tensor_grad, input_tensor_grad
