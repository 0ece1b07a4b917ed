"""What a search asks of a framework: axes and rules, how a point becomes a plan, what stages may hold, and bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..estimate import fold
from ..frameworks import framework
from ..plan.errors import PlanError
from ..plan.plan import Plan, ResolvedPlan
from ..plan.resolve import resolve
from ..values import NamedTuple
from .cuts import Criteria, Fields, Holds, Ratios, StageLayers
from .lower_bounds import Beside, LayerNeeds, LowerBounds, States
from .point import NO_RECOMPUTE, Extra, Point, Recomputing

if TYPE_CHECKING:
    from .space import Space

MOST_CONTEXT = 16
"""Context-parallel ranks: more than published runs of up to 128k tokens use."""
MOST_EXPERT_RANKS = 64
"""Expert-parallel ranks: as many as the largest published runs of DeepSeek V3 use (arXiv 2412.19437, section 3.2)."""
MOST_CHUNKS = 8
"""Virtual stages of a rank that are tried."""


class Proposal(NamedTuple):
    """A change of a plan in words, and the fields that it sets, by their paths."""

    what: str
    fields: Mapping[str, Any]
    costs: str = ""
    """What it costs beside time."""
    degree_of: str = ""
    """What it does more or less of than others, if any: no more of that is proposed than is enough."""


class FrameworkSearch:
    """One framework, as a search sees it. What stands here holds for plain PyTorch on one GPU."""

    chooses_cut = False
    """The search chooses what each stage holds."""
    zero_of_one_rank = False
    """ZeRO stages differ even where there is one rank."""
    stops_early = False
    """``fullest`` with ``enough`` may be less than the whole answer."""
    shares_shapes = False
    """What a layer does depends on neither stages nor replicas."""
    expandable_segments = True
    """The PyTorch that the framework runs on has the allocator's expandable segments."""
    flash_attention = True
    """Its models can run flash attention."""

    def searched(self, base: Plan) -> bool:
        """Whether layouts and cuts of such a model are searched, and its times known."""
        return base.model.has_sizes or _has_work(base)

    def check_model(self, plan: ResolvedPlan, *, timed: bool) -> None:
        """``PlanError`` where a model that only traces know is not searched here, or has no time though it is to be
        ``timed``."""
        if plan.model.has_sizes:
            return
        running = framework(plan.framework).running
        if not running.learns:
            running.check_learnt(plan)
        if not running.learnt_work(plan) and timed:
            raise PlanError("model", plan.model.name, UNTIMED)

    # -- axes ----------------------------------------------------------------------------------------------

    def sizes(self, plan: ResolvedPlan) -> frozenset[str]:
        """Sizes of the layout that are tried."""
        return framework(plan.framework).supports.sizes

    def zero(self, plan: ResolvedPlan) -> tuple[int, ...]:
        """ZeRO stages that are tried, in their order."""
        own = framework(plan.framework)
        return own.supports.zero if plan.model.has_sizes else own.running.learnt_zero(plan, own.supports.zero)

    def parallel_sizes(self, plan: ResolvedPlan, gpus: int) -> dict[str, tuple[int, ...]]:
        """Values of every size of the layout on so many GPUs."""
        model, tried = plan.model, self.sizes(plan)
        within_node = min(gpus, plan.hardware.gpus_per_node)
        divided = [getattr(model, name) for name in (*framework(plan.framework).supports.tp_divides, "kv_heads")]
        axes = {
            "tp": [t for t in divisors(gpus) if t <= within_node and not any(size % t for size in divided)],
            "cp": [1 << bit for bit in range(gpus.bit_length()) if 1 << bit <= min(gpus, MOST_CONTEXT)],
            "pp": [pp for pp in divisors(gpus) if pp <= model.layers],
            "vpp": range(1, MOST_CHUNKS + 1),
            "ep": [ep for ep in divisors(model.experts or 1) if ep <= min(gpus, MOST_EXPERT_RANKS)],
        }
        found = {name: tuple(values) if name in tried else (1,) for name, values in axes.items()}
        divided = [t for t in found["tp"] if not (model.expert_ffn or 1) % t]
        found["etp"] = tuple(divided) if model.experts and "ep" in tried else (1,)
        return found | {"zero": self.zero(plan)}

    def divides_experts(self, tp: int, ep: int, etp: int) -> bool:
        """Whether so many ranks may have a part of each expert, unless the plan says how many: experts are divided like
        the layers around them, or not at all."""
        return etp in (1, tp)

    def recomputing(self, plan: ResolvedPlan) -> tuple[Recomputing, ...]:
        """Ways to recompute. How many layers, where that can be chosen, is found by the search."""
        return NO_RECOMPUTE, Recomputing("full")

    def extras(self, plan: ResolvedPlan) -> list[tuple[Extra, ...]]:
        """Choices beside layout, batch and recompute, alternatives of one another in a group."""
        return [*fused_losses(plan), *eight_bit_adam(plan)]

    def free(self, plan: ResolvedPlan) -> tuple[Extra, ...]:
        """What every layout takes that does not say otherwise: it costs neither time nor numbers."""
        return ()

    # -- points --------------------------------------------------------------------------------------------

    def completed(self, base: Plan) -> Plan:
        """``base`` with what other fields of it need in order to run."""
        return base

    def without_extras(self, base: Plan) -> Iterator[Mapping[str, Any]]:
        """Fields of ``base`` as they are without each of the extras that it has, where layouts are searched of both."""
        return without_fused_loss(base)

    def replicas(self, space: Space, ranks: int) -> tuple[int, int]:
        """Replicas of so many ranks each, and GPUs that are left."""
        return divmod(space.gpus, ranks)

    def unrunnable(self, space: Space, tp: int, cp: int, pp: int, vpp: int, microbatches: int) -> str:
        """The rule of this framework alone by which a layout would not start; empty where it would."""
        return ""

    def fields(self, space: Space, point: Point) -> Mapping[str, Any]:
        """Further fields of a plan that ``point`` decides."""
        return {}

    # -- cuts ----------------------------------------------------------------------------------------------

    def of(self, plan: Plan) -> FrameworkSearch:
        """The same for the model of ``plan``."""
        return self

    def check_cut(self, plan: ResolvedPlan) -> None:
        """``PlanError`` where nobody chooses cuts and the stages of a resolved plan cannot hold its layers, whatever
        its other sizes."""

    def cut_fields(self, cut: StageLayers) -> Fields:
        """The fields of a plan that say what its stages hold."""
        return ()

    def placed(self, space: Space, point: Point) -> StageLayers | None:
        """What stages hold where memory alone decides it, because every cut takes the same time."""
        return None

    def cut(
        self, plan: ResolvedPlan, ratios: Ratios, limit: int | None, criteria: Criteria, holds: Holds | None
    ) -> StageLayers | None:
        """The best cut by ``criteria``; see ``cuts.fitting`` and ``cuts.smallest``."""
        raise plan.wrong("framework", "has no stages whose cut can be chosen")

    def other_cuts(self) -> Iterator[Proposal]:
        """Cuts that the framework's own methods make, by their names."""
        return iter(())

    # -- memory --------------------------------------------------------------------------------------------

    def fullest(self, plan: ResolvedPlan, enough: int | None = None) -> tuple[int, int]:
        """Requested bytes of the fullest stage of a resolved plan, and which that is: of several the first. Where that
        is more than ``enough`` bytes and ``stops_early``, some stage that needs more, and what it needs at least."""
        largest, at = max((folded.peak, -stage) for stage, folded in enumerate(fold(plan)))
        return largest, -at

    def layer_needs(self, plan: ResolvedPlan) -> LayerNeeds:
        """Of a resolved plan: one layer of a stage in the middle, where the search chooses cuts."""
        raise NotImplementedError

    def beside_layers(self, plan: ResolvedPlan) -> Beside:
        """Of a resolved plan, where the search chooses cuts: what of it is known."""
        return Beside()

    def states(self, plan: ResolvedPlan) -> States:
        """Of a resolved plan, where the search chooses cuts."""
        raise NotImplementedError

    @property
    def bounds_layers(self) -> bool:
        """What a layer needs bounds a stage of whatever cut (``layer_needs``)."""
        return self.chooses_cut

    def lower_bounds(self, space: Space) -> LowerBounds:
        """What the points of a space need at least, where nobody chooses cuts."""
        return LowerBounds(space)

    # -- changes -------------------------------------------------------------------------------------------

    def more_recompute(self, plan: ResolvedPlan) -> Iterator[Proposal]:
        """Steps from no recompute towards full recompute."""
        return iter(())

    def elsewhere(self, plan: ResolvedPlan) -> Iterator[Proposal]:
        """What this framework need not make; the same job in other ones, where it cannot shard what they do."""
        return iter(())


UNTIMED = "has no time: what was learnt of it does not say what its operators do; --objective memory and gpus need none"


def _has_work(base: Plan) -> bool:
    """Whether what was learnt of a model says how long it takes."""
    try:
        return framework(base.framework).running.learnt_work(resolve(base))
    except PlanError:
        return False


def fused_losses(plan: ResolvedPlan) -> list[tuple[Extra, ...]]:
    """Liger's loss in place of transformers' own, which holds all logits."""
    if plan.loss.kind != "plain" or plan.loss.logits_to_keep or not plan.model.has_sizes:
        return []
    return [(Extra("Liger's fused loss", (("loss.kind", "liger"),), changes_passes=True),)]


def without_fused_loss(base: Plan) -> Iterator[Mapping[str, Any]]:
    """Back from Liger's loss, of which ``base`` says no more than its name."""
    if base.loss.kind == "liger" and base.loss.model_fields_set == {"kind"}:
        yield {"loss.kind": "plain"}


def eight_bit_adam(plan: ResolvedPlan, fields: Fields = ()) -> list[tuple[Extra, ...]]:
    """bitsandbytes' Adam in place of another Adam; ``fields`` are set beside it."""
    name = plan.optimizer.algorithm.in_8_bits
    if name is None:
        return []
    fields = (("optimizer.name", name), ("optimizer.implementation", None), *fields)
    return [(Extra("8-bit Adam", fields, keeps_numerics=False),)]


def divisors(number: int) -> tuple[int, ...]:
    small = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return tuple(sorted({*small, *(number // one for one in small)}))
