"""Forward passes of Megatron-Core beside backward passes of other micro-batches, layer by layer.

``megatron/core/pipeline_parallel/combined_1f1b.py``, in the place of both passes of the steady phase; passes of the
ramps run alone. ``TransformerModelChunkSchedulePlan.run`` exchanges between stages once both passes are through their
layers (``post_forward``, ``post_backward``), before the loss of one and the embedding of the other.
"""

from __future__ import annotations

from .megatron_interleaved import FINALIZE, Input, Interleaved, Output, Rank, Tensor, action


class Beside(Interleaved):
    """Interleaved stages (``combined_1f1b_schedule_for_interleaved_pipelining``)."""

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
