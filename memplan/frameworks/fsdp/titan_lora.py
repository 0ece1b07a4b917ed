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
from ...plan.plan import Plan, ResolvedPlan
from ..base import Adaptable
from .titan import Titan, newest, titan_of_plan

ROUTER = "router"
LAST_NAMES = {HEAD: "lm_head", ROUTER: "gate"}
"""Of layers that may have no adapter here, whose modules are not modelled with one."""


def adaptable(plan: Plan) -> Mapping[str, tuple[Adaptable, ...]]:
    """By the last part of their names in torchtitan; all have an adapter where none is named."""
    spec, titan = plan.model, titan_of_plan(plan)
    if not newest(plan):
        problem = "must be left out, or with --fsdp-newest of Llama, Qwen 3 or DeepSeek V3 in bf16, with layers that "
        problem += "are not compiled, without tensor parallelism: no others are modelled "
        raise plan.wrong("lora.rank", f"{problem}(this is {titan.title} of {titan.release})")
    h, shared = spec.hidden, spec.shared_expert_ffn
    mixed = sum(map(spec.has_experts, range(spec.layers))) if spec.experts else 0
    sizes = {**linear_sizes(spec), ROUTER: (h, spec.experts)}
    sizes |= {"shared_gate": (h, shared), "shared_up": (h, shared), "shared_down": (shared, h)}
    times = {**dict.fromkeys(("gate", "up", "down"), spec.layers - mixed), HEAD: 1}
    times |= dict.fromkeys(("shared_gate", "shared_up", "shared_down"), mixed if shared else 0) | {ROUTER: mixed}
    found: dict[str, tuple[Adaptable, ...]] = {}
    for part, name in (*titan.linears, *LAST_NAMES.items()):
        if part in sizes and times.get(part, spec.layers):
            last, (inputs, outputs) = name.rpartition(".")[2], sizes[part]
            layer = Adaptable(part, outputs, inputs, times.get(part, spec.layers))
            found[last] = (*found.get(last, ()), layer)
    return found


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
    told = "with torchtitan's adapters"
    wrong = [name for part, name in LAST_NAMES.items() if part in adapted(plan)]
    if wrong:
        others = [one for one in plan.lora.targets or () if one not in LAST_NAMES.values()]
        others = others or [one for one in adaptable(plan) if one not in LAST_NAMES.values()]
        problem = f"must not name {wrong[0]} {told}: none is modelled on it (--lora-targets {','.join(others)})"
        raise plan.wrong("lora.targets", problem)
    quantised = plan.quantisation.kind
    plan.refuse(
        ("quantisation.kind", quantised != "none", f"must be none {told}: its frozen weights are not quantised"),
        ("lora.dora", plan.lora.dora, f"must be false {told}: there are none of that kind"),
        ("lora.dropout", plan.lora.dropout > 0, f"must be 0 {told}, which have none"),
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
