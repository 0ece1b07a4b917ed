"""torchtitan's CUDA graph of forward and backward (``training.disable_cuda_graphs`` is false by default).

``torchtitan/distributed/cudagraph.py`` (``CUDAGraphWrapper.__call__``) and ``trainer.py`` (``train_step``,
``_validate_cuda_graphs``) of 21 August 2026 (commit b5bcd76). The first call runs as it is, on a stream of its own; the
second is captured, behind ``empty_cache`` (``torch/cuda/graphs.py``, ``graph.__enter__``), and all others replay it.
What the captured call allocates is in a memory pool of its own, on every stream that takes part, which nothing else
takes from and which is never given back. Sharded gradients stay (``zero_grad(set_to_none=False)``), so that every
backward adds to them, and so does the captured batch beside each new one, which is copied over it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from ...layers.counting import GRAPHS
from ...layers.module import Module, Tapes
from ...plan.plan import ResolvedPlan
from ...tape.events import Category, Hold, Stretch, Tape
from ...tape.program import Span
from ...values import replace
from .units import Sharding, Unit, size


def check(plan: ResolvedPlan) -> None:
    """Refuses what torchtitan refuses, and what is not modelled."""
    given, layout = plan.fsdp, plan.layout
    if not given.cuda_graphs:
        return
    if given.code != "torchtitan":
        raise plan.wrong("fsdp.cuda_graphs", "must be false with transformers' code; torchtitan has such a graph")
    off = "--set training.disable_cuda_graphs=true (--no-fsdp-cuda-graphs) turns them off"
    for name, size_of, what in (("pp", layout.pp, "pipeline stages"), ("ep", layout.ep, "all-to-all of experts' rows")):
        if size_of > 1:
            raise plan.wrong(
                f"layout.{name}",
                f"must be 1 with CUDA graphs, as torchtitan itself demands: they take no {what}; {off}",
            )
    if given.offload:
        raise plan.wrong(
            "fsdp.offload", f"must be false with CUDA graphs: copies to the host within them are not modelled; {off}"
        )


def pooled(spans: Iterable[Span]) -> tuple[Span, ...]:
    """``spans``, each of whose micro-batches adds to gradients, with all that they hold in the graph's pool."""
    return tuple(replace(span, module=_pooled(span.module)) for span in spans)


@lru_cache(maxsize=1024)
def _pooled(module: Module) -> Module:
    steady = _tapes(module.steady)
    return replace(module, first=steady, steady=steady)


def _tapes(own: Tapes) -> Tapes:
    return replace(own, forward=_in_pool(own.forward), backward=_in_pool(own.backward))


def _in_pool(tape: Tape) -> Tape:
    return Stretch(one._replace(stream=one.stream + GRAPHS) if isinstance(one, Hold) else one for one in tape)


def gradients(units: Sequence[Unit], sharding: Sharding) -> tuple[Hold, ...]:
    """Sharded ones: views of what a unit's first reduction gave, or of its copy in the shards' dtype."""
    every = [unit.reduced(sharding.shards) for unit in units if unit.parameters]
    kind, dtype = Category.GRADIENTS, sharding.trained
    return tuple(Hold(0, size(one, dtype), kind, "sharded_gradient", (one,), dtype) for one in every if one)
