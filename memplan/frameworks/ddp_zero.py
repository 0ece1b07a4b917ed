"""``ZeroRedundancyOptimizer`` (``distributed/optim/zero_redundancy_optimizer.py``): whole tensors, one owner each.

Every rank updates the parameters that it owns, so it alone has their states and their step's temporaries, and then
broadcasts them in place. Parameters stay whole everywhere; with ``parameters_as_bucket_view`` they are views of one
flat tensor for each owner.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..layers.module import Parameter, hold_bytes
from ..plan.plan import Optimizer
from ..tape import Category, Hold
from .states import optimizer_states


def owners(parameters: Sequence[Parameter], ranks: int) -> list[list[Parameter]]:
    """Parameters of each rank: the largest first, each to the rank that has the fewest elements
    (``_partition_parameters``)."""
    result: list[list[Parameter]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for parameter in sorted(parameters, key=lambda one: one.elements, reverse=True):
        rank = sizes.index(min(sizes))
        result[rank].append(parameter)
        sizes[rank] += parameter.elements
    return result


def states(own: Sequence[Parameter], optimizer: Optimizer, dtype: str) -> tuple[Hold, ...]:
    """What the owner's optimizer keeps."""
    kinds = optimizer_states(optimizer, dtype, embeddings_32bit=optimizer.embeddings_32bit)
    holds = (state.hold(parameter, 0, dtype) for parameter in own for state in kinds)
    return tuple(hold for hold in holds if hold is not None)


def parameter_buckets(owned: Sequence[Sequence[Parameter]], dtype: str) -> tuple[Hold, ...]:
    """``_build_param_buckets``: one for each owner; without parameters a tensor of one number."""
    sizes = [sum(parameter.elements for parameter in own) for own in owned]
    return tuple(
        Hold(0, hold_bytes((size or 1,), dtype), Category.PARAMETERS, "parameter_bucket", (size or 1,), dtype)
        for size in sizes
    )
