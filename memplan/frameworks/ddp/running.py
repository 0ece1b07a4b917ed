"""``DistributedDataParallel`` as it runs here, and around an architecture without a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ...layers.module import Module, Tapes
from ...plan.plan import ResolvedPlan
from ...tape.events import Category, Hold, rounded
from ...tape.program import Span, drop_all
from ...trace.fit import Fit
from ...trace.job import Replicated
from ..plain.learned import trained_dtypes
from ..plain.running import PlainRunning
from .programs import fullest_rank
from .reducer import bucket_sizes, limits


class DdpRunning(PlainRunning):
    def replicated(self, plan: ResolvedPlan, *, has_recipe: bool) -> Replicated | None:
        """Which rank needs most is found with a model's recipe."""
        if plan.layout.zero and not has_recipe:
            raise plan.wrong(
                "layout.zero", "must be 0 for an architecture without a recipe: the most loaded rank is unknown"
            )
        given = plan.ddp
        assert plan.layout.dp is not None
        return Replicated(
            ranks=plan.layout.dp,
            rank=fullest_rank(plan) if plan.layout.zero else 0,
            bucket_cap_mb=given.bucket_cap_mb,
            gradient_as_bucket_view=given.gradient_as_bucket_view,
            static_graph=given.static_graph,
            find_unused_parameters=given.find_unused_parameters,
            broadcast_buffers=given.broadcast_buffers,
            syncs_each=given.gradient_sync,
            zero=bool(plan.layout.zero),
            parameters_as_bucket_view=given.parameters_as_bucket_view,
        )

    def distinct(self, plan: ResolvedPlan, ranks: int) -> tuple[int, ...]:
        return (fullest_rank(plan),) if plan.layout.zero else super().distinct(plan, ranks)

    def check_learnt(self, plan: ResolvedPlan) -> None:
        super().check_learnt(plan)
        for name in ("gradient_as_bucket_view", "find_unused_parameters", "parameters_as_bucket_view"):
            if getattr(plan.ddp, name):
                raise plan.wrong(f"ddp.{name}", "must be false: not modelled for an architecture without a recipe")

    def lacks(self, plan: ResolvedPlan, fit: Fit) -> str:
        """Buckets have gradients of one dtype each (``compute_bucket_assignment_by_size``)."""
        dtypes = frozenset[str]().union(*map(trained_dtypes, fit.pieces))
        if plan.lora.rank is not None or len(dtypes) == 1:
            return ""
        return f"it trains parameters in {' and '.join(sorted(dtypes))}, whose buckets are not modelled"

    def learnt_front(self, plan: ResolvedPlan, buffers: Sequence[Hold]) -> tuple[Span, ...]:
        """DDP broadcasts buffers before every forward pass, through a flat copy of those of a dtype that has
        several."""
        if not plan.ddp.broadcast_buffers:
            return ()
        by_dtype = {one.dtype: [other.bytes for other in buffers if other.dtype == one.dtype] for one in buffers}
        flat = tuple(sum(sizes) for sizes in by_dtype.values() if len(sizes) > 1)
        return _through(flat) if flat else ()

    def learnt_buckets(self, plan: ResolvedPlan, ready: tuple[int, ...]) -> tuple[Hold, ...]:
        """DDP's second copy of gradients, in the order in which they are ready."""
        sizes = bucket_sizes(ready, *limits(plan.ddp))
        return tuple(Hold(0, rounded(size), Category.COMMUNICATION_BUFFERS, "ddp_bucket") for size in sizes)


@lru_cache(maxsize=64)
def _through(flat: tuple[int, ...]) -> tuple[Span, ...]:
    copies = [Hold(0, size, Category.COMMUNICATION_BUFFERS, "buffers_flat") for size in flat]
    tapes = Tapes(drop_all(copies, 1), (), 0, 0)
    return (Span(Module("broadcast", tapes, tapes, (), ()), ("broadcast",)),)
