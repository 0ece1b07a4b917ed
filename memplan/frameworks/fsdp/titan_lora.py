"""torchtitan's adapters: which linear layers may have one, and what is trained.

``torchtitan/components/lora.py`` (``LoRAConverter.convert``) of 21 August 2026 (commit b5bcd76): layers are found by
the last part of their names, or all of them, the head among these; whatever has no adapter is frozen, the embedding and
norms, too. Adapters are parameters like any others: their shards are in ``training.dtype``, and ``fully_shard`` gathers
them with their layer's frozen ones. No hook makes the embedding's output require a gradient, so that backward ends at
the first layer's adapters.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...layers.tuning import Adapters, Tuning
from ...plan.lora import HEAD, adapted, linear_sizes
from ...plan.plan import Plan
from ...plan.resolved import ResolvedPlan
from ..base import Adaptable
from .titan import Titan, newest, titan_of_plan

LM_HEAD = "lm_head"


def adaptable(plan: Plan) -> Mapping[str, tuple[Adaptable, ...]]:
    """By the last part of their names in torchtitan; all have an adapter where none is named."""
    sizes, titan = linear_sizes(plan.model), titan_of_plan(plan)
    found: dict[str, tuple[Adaptable, ...]] = {}
    for part, name in titan.linears:
        if part in sizes:
            inputs, outputs = sizes[part]
            layer = Adaptable(part, outputs, inputs, plan.model.layers)
            found[name.rpartition(".")[2]] = (*found.get(name.rpartition(".")[2], ()), layer)
    inputs, outputs = sizes[HEAD]
    return {**found, LM_HEAD: (Adaptable(HEAD, outputs, inputs, 1),)}


def tuning_of(plan: ResolvedPlan) -> Tuning | None:
    """What is trained; nothing where all of it is."""
    if plan.lora.rank is None:
        return None
    return Tuning(adapters=Adapters(plan.lora.rank, adapted(plan), 0.0, plan.precision.dtype))


def check(plan: ResolvedPlan) -> None:
    """Refuses what adapters are not modelled with."""
    if plan.lora.rank is None:
        return
    layout, given = plan.layout, plan.fsdp
    titan, told = titan_of_plan(plan), "with torchtitan's adapters"
    if HEAD in adapted(plan):
        others = [one for one in plan.lora.targets or () if one != LM_HEAD] or [*adaptable(plan)][:-1]
        problem = f"must not name {LM_HEAD} {told}, by which the head is frozen: --lora-targets {','.join(others)}"
        raise plan.wrong("lora.targets", problem)
    plan.refuse(
        ("lora.dora", plan.lora.dora, f"must be false {told}: there are none of that kind"),
        ("lora.dropout", plan.lora.dropout > 0, f"must be 0 {told}, which have none"),
        (
            "fsdp.newest",
            not newest(plan) or plan.model.experts > 0,
            f"must be true {told}, of Llama or Qwen 3 without experts, in bf16, with layers that are not compiled, "
            f"without tensor parallelism: no others are modelled (this is {titan.title} of {titan.release})",
        ),
        ("layout.pp", layout.pp > 1, f"must be 1 {told}: stages of frozen layers are not modelled"),
        ("layout.cp", layout.cp > 1, f"must be 1 {told}: not modelled together"),
        ("precision.fp8", plan.precision.low is not None, f"must be left out {told}: not modelled together"),
        ("fsdp.offload", given.offload, f"must be false {told}: not modelled together"),
    )


def registering(titan: Titan, tuning: Tuning | None) -> tuple[str, ...]:
    """Names of a layer's parameters in the order in which ``fully_shard`` takes them: modules within a module come
    before its own (``_get_managed_modules``, ``_fsdp_init.py``), and adapters are within their layer."""
    if tuning is None:
        return titan.registered
    return tuple(name for one in titan.registered for name in (f"{one}.lora_A", f"{one}.lora_B", one))
