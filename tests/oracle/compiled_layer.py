"""torchtitan's layer that runs Inductor's own code, in a function as AOTAutograd makes one
(``torch/_functorch/_aot_autograd/runtime_wrappers.py``, ``CompiledFunction``): gradients are given in a list that it
empties, and what was saved is let go of as backward begins (``maybe_clear_saved_tensors``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memplan.layers.compiled import Sizes
from memplan.trace import compiled
from memplan.trace.inductor import code_of
from memplan.trace.job import Checkpointing

ORDER = ("wq", "wk", "wv", "wo"), ("w1", "w3", "w2")


class CompiledBlock(nn.Module):
    """``block`` with its parameters, whose code is Inductor's."""

    def __init__(self, block: Any, mode: Checkpointing, sizes: Sizes) -> None:
        super().__init__()
        self.attention, self.feed_forward = block.attention, block.feed_forward
        self.attention_norm, self.ffn_norm = block.attention_norm, block.ffn_norm
        self.function = _function(mode, sizes)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        attention = [getattr(self.attention, name).weight for name in ORDER[0]]
        mlp = [getattr(self.feed_forward, name).weight for name in ORDER[1]]
        out: torch.Tensor = self.function(x, table, self.attention_norm.weight, *attention, self.ffn_norm.weight, *mlp)
        return out


def _function(mode: Checkpointing, sizes: Sizes) -> Any:
    graphs, _ = compiled.traced(mode, sizes)
    places = [node for node in graphs.forward.graph.nodes if node.op == "placeholder"]
    numbers = compiled._numbers(places)
    (out,) = [node for node in graphs.forward.graph.nodes if node.op == "output"]
    saved = [node.name for node in out.args[0][1:]]
    read = [node.name for node in graphs.backward.graph.nodes if node.op == "placeholder"]
    forward = code_of(graphs.forward, is_backward=False, reuse=True)
    backward = code_of(graphs.backward, is_backward=True, reuse=True)

    class Compiled(torch.autograd.Function):
        boxed_grads_call = True

        @staticmethod
        def forward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:
            result, *kept = forward.call([given[number - 1] for number in numbers])
            ctx.save_for_backward(*kept)
            output: torch.Tensor = result
            return output

        @staticmethod
        def backward(ctx: Any, gradients: list[torch.Tensor]) -> Any:
            known = dict(zip(saved, ctx.saved_tensors, strict=True))
            ctx.maybe_clear_saved_tensors()
            arguments = [known.pop(name) if name in known else gradients.pop() for name in read]
            returned = backward.call(arguments)
            made = dict(zip(numbers, returned, strict=True))
            return tuple(made[number] for number in range(1, len(numbers) + 1))

    return Compiled.apply
