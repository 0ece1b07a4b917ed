"""A cut into pipeline stages as a ``partition_method`` of DeepSpeed's, or as the lines of Python that make it.

``deepspeed/runtime/pipe/module.py`` (``PipelineModule._partition_layers``): ``uniform``, ``parameters`` and
``type:REGEX`` with a weight of 0 or 1 for every entry. A regular expression ends at its first colon there
(``method.split(':')[1]``), so that weights are lost in silence. What a method makes has changed: ``partition_uniform``
gave what is left over to the last stage and now to the first ones, ``partition_balanced`` kept the largest stage small
and now keeps largest and smallest close (``deepspeed/runtime/utils.py`` of 0.5 and 0.19).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from ...plan.errors import PlanError
from ...schedules.partition import Entry, balanced_2023, partition, type_weights, uniform

TYPES = ("transformer", "embed", "norm", "float16")
"""Parts of the names of the layer list's classes and functions, each of other entries."""
PREFERRED = ("type:transformer", "type:embed|transformer", "parameters")


def has_no_weights(method: str) -> bool:
    """DeepSpeed reads ``method`` as it is meant: there are no weights in it."""
    return ":" not in method.removeprefix("type:")


def cut_today(method: str, entries: Sequence[Entry], stages: int) -> list[int]:
    """Stage boundaries by ``method`` of DeepSpeed 0.19."""
    name = method.lower()
    if name == "uniform":
        return uniform_today(len(entries), stages)
    weights = (
        [float(entry.parameters) for entry in entries]
        if name == "parameters"
        else type_weights(name.removeprefix("type:"), entries)
    )
    return uniform_today(len(entries), stages) if len(entries) <= stages else balanced_2023(weights, stages)


def uniform_today(entries: int, stages: int) -> list[int]:
    """``partition_uniform`` of 0.19: equal stages, of which the first ones have one entry more."""
    if entries <= stages:
        return uniform(entries, stages)
    size, rest = divmod(entries, stages)
    return [stage * size + min(stage, rest) for stage in range(stages + 1)]


def method_of(bounds: Sequence[int], entries: Sequence[Entry]) -> str | None:
    """The method that makes ``bounds`` in DeepSpeed of 2021 and of today; ``None`` where none does in both."""
    stages = len(bounds) - 1
    for method in _methods():
        try:
            before, now = partition(method, entries, stages), cut_today(method, entries, stages)
        except PlanError:  # a type that the list has not
            continue
        if before == now == list(bounds):
            return method
    return None


def _methods() -> Iterator[str]:
    yield from PREFERRED
    for size in range(1, len(TYPES) + 1):
        for types in combinations(TYPES, size):
            yield f"type:{'|'.join(types)}"


STAGES = "planned_stages"
"""The module with stages that no partition method makes."""
CLASS = '''\
"""Stages of the pipeline as memplan has planned them.

In pretrain_gpt.py: from {module} import GPTModelPipe
"""

from megatron.model.gpt_model import GPTModelPipe as WithMethod


class GPTModelPipe(WithMethod):
    """DeepSpeed's PipelineModule with explicit stages instead of a partition method."""

    FIRST = {first}
    """The first entry of every stage in the layer list."""

    def _partition_layers(self, method="uniform"):
        self.parts = [*self.FIRST, len(self._layer_specs)]
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])
'''


def python_of(bounds: Sequence[int]) -> str:
    """The module that makes the cut whatever DeepSpeed's methods do."""
    return CLASS.format(module=STAGES, first=list(bounds[:-1]))
