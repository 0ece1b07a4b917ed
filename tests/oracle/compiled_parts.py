"""A model of transformers whose layers, final norm and loss run Inductor's own code, in functions as AOTAutograd makes
them (``compiled_layer``): what ``torch.compile`` leaves between hooks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from memplan.trace.compiled_parts import Found, layers_of, path_of
from memplan.trace.inductor import code_of


def compiled(model: Any, parts: dict[str, Found]) -> Any:
    """``model``, which calls its compiled ``parts`` instead of its modules."""
    layer, norm = function_of(parts["layer"]), function_of(parts["norm"])
    for module in layers_of(model):
        module.forward = lambda hidden, own=module, **given: run(layer, parts["layer"], own, hidden, given)[0]  # type: ignore[assignment]
    last = model.model.norm
    last.forward = lambda hidden: run(norm, parts["norm"], last, hidden, {})[0]
    if "head" in parts:
        head = function_of(parts["head"])

        def forward(input_ids: torch.Tensor, labels: torch.Tensor, **given: torch.Tensor) -> Any:
            hidden = model.model(input_ids=input_ids, **given).last_hidden_state
            loss, logits = run(head, parts["head"], model, hidden, {"labels": labels, "num_items_in_batch": count()})
            return SimpleNamespace(loss=loss, logits=logits)

        model.forward = forward
    return model


def count() -> torch.Tensor:
    return torch.ones((), dtype=torch.int64)


def run(function: Any, found: Found, module: Any, hidden: torch.Tensor, given: dict[str, Any]) -> Any:
    """``function`` of what Dynamo's names say."""
    cos, sin = given.get("position_embeddings", (None, None))
    named = {"position_embeddings_0": cos, "position_embeddings_1": sin, **given}

    def of(name: str) -> Any:
        if "parameters" in name:
            return module.get_parameter(path_of(name))
        return next((value for word, value in named.items() if word in name), hidden)

    return function(*map(of, found.inputs))


def function_of(found: Found) -> Any:
    forward, backward = found.directions["forward"], found.directions["backward"]
    inputs = [node for node in forward.graph.nodes if node.op == "placeholder"]
    (out,) = [node for node in forward.graph.nodes if node.op == "output"]
    read = [node.name for node in backward.graph.nodes if node.op == "placeholder"]
    outputs = sum("tangent" in name for name in read)
    saved = [node.name for node in out.args[0][outputs:]]
    codes = code_of(forward, is_backward=False), code_of(backward, is_backward=True)

    class Compiled(torch.autograd.Function):
        boxed_grads_call = True

        @staticmethod
        def forward(ctx: Any, *given: torch.Tensor) -> Any:
            returned = [*codes[0].call([*given])]
            ctx.save_for_backward(*returned[outputs:])
            return tuple(returned[:outputs])

        @staticmethod
        def backward(ctx: Any, gradients: list[torch.Tensor]) -> Any:
            known = dict(zip(saved, ctx.saved_tensors, strict=True))
            ctx.maybe_clear_saved_tensors()
            arguments = [known.pop(name) if name in known else gradients.pop(0) for name in read]
            returned = codes[1].call(arguments)
            return tuple(returned[: len(inputs)])

    return Compiled.apply
