"""How ranks share the experts of torchtitan's models, and the units that ``fully_shard`` makes of them."""

from __future__ import annotations

from collections.abc import Sequence

from ...layers import titan_moe
from ...layers.huggingface import LayerShape
from ...layers.module import hold_bytes
from ...plan.framework_sections import Fsdp
from ...plan.plan import ResolvedPlan
from ...tape.events import Category, Hold
from ...values import replace
from .titan import Titan, titan_of
from .units import Cut, Unit


def cut_of_experts(plan: ResolvedPlan) -> Cut:
    """Ranks that hold the same experts, which ``fully_shard`` cuts along dimension 1 if there are more ranks than
    experts (``apply_fsdp``, ``_experts_shard_placement_fn``)."""
    ranks = ranks_of_experts(plan)
    return Cut(max(1, ranks // plan.layout.ep), int(ranks > plan.model.experts))


def parts_of_experts(plan: ResolvedPlan) -> int:
    """Ranks that have a part of each expert: those of tensor parallelism where nothing else shares experts
    (``TensorParallel``), or as many as is said, all of them or one (``ParallelDims``, ``etp``)."""
    return plan.layout.tp if plan.layout.ep == 1 else plan.layout.etp or 1


def shards_of(plan: ResolvedPlan) -> int:
    """Ranks that share parameters: those of data and of context parallelism (``ParallelDims.build_mesh``, ``fsdp``)."""
    return plan.layout.dp // plan.fsdp.replicas * plan.layout.cp


def ranks_of_experts(plan: ResolvedPlan) -> int:
    """Those among which whole experts are dealt out (``ParallelDims.build_mesh``, ``efsdp`` and ``ep``)."""
    return shards_of(plan) * plan.layout.tp // parts_of_experts(plan)


def crosswise(plan: ResolvedPlan) -> bool:
    """Whether experts that no ranks share are cut along another dimension than a layer's other parameters
    (``apply_fsdp_to_decoder``)."""
    spec = plan.model
    return bool(spec.experts) and titan_of(spec).groups_experts and shards_of(plan) > spec.experts


def check_expert_ranks(plan: ResolvedPlan, given: Fsdp, shards: int) -> None:
    """Refuses ranks that cannot share experts."""
    spec, ep = plan.model, plan.layout.ep
    plan.refuse(
        (
            "layout.ep",
            given.code != "torchtitan",
            "must be 1 with transformers' code; torchtitan's has expert parallelism",
        ),
        ("layout.ep", not spec.experts, f"must be 1: {spec.name} has no experts"),
        ("layout.ep", spec.experts % ep, f"must divide the {spec.experts} experts"),
    )
    tp, etp = plan.layout.tp, parts_of_experts(plan)
    if etp not in (1, tp):
        problem = "must be 1" if tp == 1 else f"must be 1 or tp ({tp})"
        raise plan.wrong("layout.etp", f"{problem}: torchtitan has no other part of an expert on a rank")
    if ranks_of_experts(plan) % ep:
        among = f", {tp // etp} ranks of tensor parallelism each" if etp < tp else ""
        context = " × cp" if plan.layout.cp > 1 else ""
        raise plan.wrong("layout.ep", f"must divide the {shards} shards (dp / fsdp.replicas{context}){among}")
    for field, kept in (("fsdp.offload", False), ("fsdp.gradient_sync", True), ("fsdp.reshard_after_forward", True)):
        staged = field == "fsdp.reshard_after_forward" and plan.layout.pp > 1  # where it is what torchtitan has
        if plan.at(field) is not kept and not staged:
            raise plan.wrong(field, f"must be {str(kept).lower()} with ep {ep}: otherwise it is not modelled")
    pieces, dim = cut_of_experts(plan)
    for name, least in (("expert_ffn", pieces * etp), ("hidden", pieces)):
        if dim and getattr(spec, name) % least:
            raise plan.wrong(
                f"model.{name}", f"must be a multiple of {least}: with more shards than experts they are cut along it"
            )
    rows = plan.batch.mbs * plan.batch.seq // (plan.layout.cp * tp // etp) * spec.expert_top_k
    if rows % ep:
        raise plan.wrong("batch.mbs", f"must give rows of experts that ep {ep} divides, not {rows}")


def with_experts(
    blocks: Sequence[Unit],
    mixed: Sequence[bool],
    cut: Cut,
    *,
    first: tuple[str, ...] = ("embedding",),
    last: tuple[str, ...] = ("ends",),
) -> list[Unit]:
    """Units of blocks, each followed by that of its experts if it has some (``mixed``), and what they gather ahead
    (``apply_fsdp``): ``first`` are units before the blocks, ``last`` those behind them."""
    both = [(one.name, f"{one.name}.experts") if has else (one.name,) for one, has in zip(blocks, mixed, strict=True)]
    result: list[Unit] = []
    for at, (block, has) in enumerate(zip(blocks, mixed, strict=True)):
        after = both[at + 1] if at + 1 < len(both) else last
        before = both[at - 1] if at else first
        result.append(replace(block, next_forward=after, next_backward=before))
        if has:
            result.append(Unit(both[at][-1], (), block.first, block.last, block.reshard, cut=cut, inner=True))
    return result


def with_groups(
    blocks: Sequence[Unit],
    mixed: Sequence[bool],
    cut: Cut,
    *,
    first: tuple[str, ...] = ("embedding",),
    last: tuple[str, ...] = ("ends",),
) -> list[Unit]:
    """Units of blocks, each followed by the second group of its parameters, of experts if it has some (``mixed``), and
    what they gather ahead (``apply_fsdp_to_decoder``): in forward the first group first, in backward the second.
    ``first`` are units before the blocks, ``last`` those behind them."""
    names = [(one.name, f"{one.name}.experts") if has else (one.name,) for one, has in zip(blocks, mixed, strict=True)]
    after = [*names[1:], last]
    before = [first, *(one[::-1] for one in names[:-1])]
    result: list[Unit] = []
    for block, (own, *second), following, preceding in zip(blocks, names, after, before, strict=True):
        if not second:
            result.append(replace(block, next_forward=following, next_backward=preceding))
            continue
        result.append(replace(block, next_backward=(own,)))  # the second group alone gathers ahead
        experts = Unit(second[0], (), block.first, block.last, block.reshard, cut=cut, beside=True)
        result.append(replace(experts, next_forward=following, next_backward=preceding))
    return result


def groups_of(units: Sequence[Unit], at: int) -> tuple[str, ...]:
    """Names of the groups of the first (0) or the last (-1) block among ``units``, as ``with_groups`` made them; of the
    last one as they are gathered in backward."""
    own = [one for one in units if (one.first, one.last) == (units[at].first, units[at].last)]
    return tuple(one.name for one in (own if at == 0 else own[::-1]))


def places(shape: LayerShape, titan: Titan, layers: range) -> tuple[Hold, ...]:
    """What ``ExpertParallel`` keeps of the last pass (``permuted_indices``), of every layer with experts."""
    spec, ranks = shape.spec, shape.expert_ranks
    if ranks == 1 or titan.groups_experts:
        return ()
    tokens = shape.b * shape.s * shape.expert_parts // shape.tensor
    rows = titan_moe.padded_length(tokens * spec.expert_top_k, spec.experts // ranks)
    one = Hold(0, hold_bytes((rows,), "int32"), Category.BUFFERS, "permuted_indices", (rows,), "int32")
    return (one,) * sum(map(spec.has_experts, layers))
