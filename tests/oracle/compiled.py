"""Functions under ``torch.compile``, as far as memory is concerned.

AOTAutograd and Inductor partition the real function into a forward and a backward graph; each graph then allocates
its outputs and the seeds of its random numbers, as the one kernel does that Inductor makes of it. Partial sums
of a reduction that is split over blocks are not followed.
"""
# mypy: disable-error-code="no-untyped-call, arg-type"

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


@dataclass
class Graph:
    """One of the two graphs of a compiled function: what it allocates, in order, and what it returns."""

    made: list[tuple[str, tuple[int, ...], torch.dtype]]
    """Name, shape and dtype; names of seeds are not among the results."""
    results: list[str | int | None]
    """Names of what was made, or positions among the inputs."""
    inputs: int

    def __call__(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        made = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in self.made}
        return [given[one] if isinstance(one, int) else made[one] if one else None for one in self.results]


def _graph(module: torch.fx.GraphModule) -> Graph:
    inputs = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    results = [getattr(one, "name", None) for one in output.args[0]]
    made = []
    for node in module.graph.nodes:
        seeds = "inductor_seeds" in str(node.target)
        if node.op == "call_function" and (seeds or node.name in results):
            value = node.meta["val"]
            made.append((node.name, tuple(value.shape), value.dtype))
    return Graph(made, [inputs.index(one) if one in inputs else one for one in results], len(inputs))


@dataclass
class Compiled:
    """A function as AOTAutograd and Inductor partition it for arguments of some shapes."""

    forward: Graph
    backward: Graph | None
    order: list[int]
    """Which of the function's tensors each input of the forward graph is."""


def _partition(function: Callable[..., torch.Tensor], arguments: tuple[Any, ...], needs: list[bool]) -> Compiled:
    """Compiles ``function`` on small real tensors; the kernels themselves are not made."""
    from torch._inductor.compile_fx import compile_fx

    graphs: list[Graph] = []
    order: list[int] = []
    real = iter(needs)
    given = _mapped(arguments, lambda x: torch.zeros(x.shape, dtype=x.dtype, requires_grad=next(real)))
    addresses = [x.data_ptr() for x in _tensors(given)]

    def inner(module: torch.fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        graph = _graph(module)
        graphs.append(graph)

        def call(values: list[Any]) -> list[Any]:
            if not order:
                order.extend(addresses.index(x.data_ptr()) for x in values)
            return graph(values)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        return compile_fx(module, inputs, inner_compile=inner)

    torch._dynamo.reset()
    out = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*given)
    if out.requires_grad:
        out.backward(torch.zeros_like(out))
    return Compiled(graphs[0], graphs[1] if len(graphs) > 1 else None, order)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compiled: Compiled, *tensors: torch.Tensor) -> torch.Tensor:
        results = compiled.forward([tensors[at] for at in compiled.order])
        ctx.compiled, ctx.count = compiled, len(tensors)
        ctx.save_for_backward(*results[1:])
        assert results[0] is not None
        return results[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        compiled = ctx.compiled
        results = compiled.backward([*ctx.saved_tensors, gradient])
        back: list[torch.Tensor | None] = [None] * ctx.count
        for at, result in zip(compiled.order, results, strict=True):
            back[at] = result
        return None, *back


def _tensors(arguments: Any) -> list[torch.Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor)]


def _mapped(arguments: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return torch.utils._pytree.tree_map(lambda x: change(x) if isinstance(x, torch.Tensor) else x, arguments)


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Stands in for ``torch.compile``."""
    known: dict[Any, Compiled] = {}

    def call(*arguments: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():  # called by another such function
            return function(*arguments)
        tensors = _tensors(arguments)
        needs = [torch.is_grad_enabled() and x.requires_grad for x in tensors]
        others = [x for x in torch.utils._pytree.tree_leaves(arguments) if not isinstance(x, torch.Tensor)]
        key = (*((tuple(x.shape), x.dtype) for x in tensors), *needs, *others)
        if key not in known:
            with _disable_current_modes(), torch.set_grad_enabled(any(needs)):
                known[key] = _partition(function, arguments, needs)
        if any(needs):
            return _Run.apply(known[key], *tensors)  # type: ignore[no-any-return]
        (out,) = known[key].forward([tensors[at] for at in known[key].order])
        assert out is not None
        return out

    return call
