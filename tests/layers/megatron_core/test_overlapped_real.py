"""What parts of a layer hold between one another, against Megatron-Core's own ``TransformerLayerNode`` on the CPU.

Skipped where ``megatron.core`` is not on the path; no GPU is needed. Four parts with operators in the place of
attention, exchanges and experts hand tensors to one another as a layer's parts do: inputs that give their memory back,
a residual, an output of shared experts and probabilities that later parts read. Live bytes are compared behind every
part, forward and backward, and once the layer has been let go: those of storages that PyTorch holds, and those of the
recorder's tape.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock
from warnings import catch_warnings, simplefilter

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memplan.layers import ops
from memplan.layers.autograd import Recorder, Tensor
from memplan.layers.megatron_core.overlapped import STREAM, Part
from memplan.tape.events import fold

with catch_warnings():
    simplefilter("ignore")
    pytest.importorskip("megatron.core.models.gpt.fine_grained_callables", exc_type=ImportError)
    from megatron.core.models.gpt import fine_grained_callables
    from megatron.core.pipeline_parallel import utils

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, H = 64, 128

Live = list[int]


class Storages(TorchDispatchMode):
    """Every storage that operators have made since it was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in given:
                ref = StorageWeakRef(one.untyped_storage())
                self.found[ref.cdata] = ref
        return out

    def live(self) -> int:
        """Bytes."""
        alive = (ref for ref in self.found.values() if not ref.expired())
        return sum(torch.UntypedStorage._new_with_weak_ptr(ref.cdata).nbytes() for ref in alive)


def of_megatron(*, shared: bool) -> Live:
    """Live bytes behind every part."""
    own = SimpleNamespace(moe_token_dispatcher_type="alltoall", moe_flex_dispatcher_backend=None, cuda_graph_scope=[])
    state = SimpleNamespace()
    weights = [torch.nn.Parameter(torch.randn(H, H)) for _ in range(2)]
    for one in weights:
        one.grad = torch.zeros_like(one)

    def pre(node: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        attended = torch.nn.functional.linear(x, weights[0])
        hidden = attended + x
        rows, probabilities = torch.nn.functional.gelu(hidden), torch.sigmoid(hidden) * 2
        state.residual = node.detach(hidden)
        state.shared = node.detach(torch.nn.functional.gelu(attended)) if shared else None
        return rows, probabilities

    def dispatch(node: Any, rows: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        state.probabilities = node.detach(probabilities * 2)
        return rows * 2

    def mlp(node: Any, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rows * 2, weights[1]) * state.probabilities

    def combine(node: Any, rows: torch.Tensor) -> torch.Tensor:
        out = rows * 2
        out = out + state.shared if state.shared is not None else out
        out = state.residual + out
        state.residual = state.shared = None
        return out

    def node(name: str, run: Callable[..., Any]) -> Any:
        further = {"config": own, "is_moe": True}
        made = fine_grained_callables.TransformerLayerNode(None, None, state, None, run, name=name, extra_args=further)
        made.manual_release_grads = False  # gone since 0.17
        return made

    x, gradient = torch.randn(ROWS, H, requires_grad=True), torch.randn(ROWS, H)
    live: Live = []
    with ExitStack() as patches, Storages() as storages:
        for name in ("torch.cuda.stream", "torch.cuda.nvtx.range_push", "torch.cuda.nvtx.range_pop"):
            patches.enter_context(mock.patch(name, return_value=nullcontext()))
        patches.enter_context(mock.patch.object(utils, "stream_acquire_context", return_value=nullcontext()))
        patches.enter_context(mock.patch.object(torch.Tensor, "record_stream"))
        names = ("pre_dispatch_computation", "moe_dispatch", "mlp", "moe_combine")
        nodes = [node(*one) for one in zip(names, (pre, dispatch, mlp, combine), strict=True)]
        given: Any = x
        for one in nodes:
            given = one.forward(given)
            live.append(storages.live())
        given = gradient
        for one in reversed(nodes):
            given = one.backward(given)
            live.append(storages.live())
        del one
        nodes.clear()
        vars(state).clear()
        live.append(storages.live())
    return live


def of_recipe(*, shared: bool) -> Live:
    r, live = Recorder(first=False), Live()
    state: dict[str, Tensor] = {}
    weights = [r.parameter(f"w{at}", (H, H), "fp32") for at in range(2)]
    pre, dispatch, *_ = parts = [Part(pool, False) for pool in (0, STREAM, 0, STREAM)]

    def first(x: Tensor) -> tuple[Tensor, ...]:
        attended = ops.linear(r, x, weights[0], name="attended")
        hidden = ops.add(r, attended, x, "hidden")
        rows = ops.elementwise(r, "rows", (hidden,), (hidden,))
        probabilities = ops.scale(r, ops.elementwise(r, "scores", (hidden,), (), saves_output=True), "probabilities")
        state["residual"] = pre.detach(r, hidden)
        if shared:
            state["shared"] = pre.detach(r, ops.elementwise(r, "shared", (attended,), (attended,)))
        return rows, probabilities

    def second(rows: Tensor, probabilities: Tensor) -> tuple[Tensor, ...]:
        state["probabilities"] = dispatch.detach(r, ops.scale(r, probabilities, "probabilities_sent"))
        return (ops.scale(r, rows, "rows_sent"),)

    def third(rows: Tensor) -> tuple[Tensor, ...]:
        out = ops.linear(r, ops.scale(r, rows, "sorted"), weights[1], name="out")
        return (ops.multiply(r, out, state.pop("probabilities"), "weighted"),)

    def fourth(rows: Tensor) -> tuple[Tensor, ...]:
        out = ops.scale(r, rows, "back")
        if shared:
            out = ops.add(r, out, state.pop("shared"), "with_shared")
        return (ops.add(r, state.pop("residual"), out, "summed"),)

    given: tuple[Tensor, ...] = (r.leaf(r.outside((ROWS, H), "fp32"))[0],)
    for at, (part, run) in enumerate(zip(parts, (first, second, third, fourth), strict=True)):
        given = part.forward(r, run, given, frees=at > 0)
        live.append(fold(r.tape()).net)
    given = ()
    gradients: list[Tensor | None] = [r.outside((ROWS, H), "fp32")]
    for part in reversed(parts):
        gradients = part.backward(r, gradients)
        live.append(fold(r.tape()).net)
    for part in parts:
        part.release()
    live.append(fold(r.tape()).net)
    return live


@pytest.mark.parametrize("shared", [False, True])
def test_parts_hold_what_nodes_hold(shared: bool) -> None:
    assert of_recipe(shared=shared) == of_megatron(shared=shared)
