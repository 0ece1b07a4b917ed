"""Rules of parts that not all models have: gated delta nets, routers, experts in one grouped tensor or one chain of
operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...device.gpus import GPUS
from ...plan.errors import PlanError

if TYPE_CHECKING:
    from ...plan.plan import Plan
    from ...plan.resolved import ResolvedPlan


def check_delta(plan: ResolvedPlan) -> None:
    """How ranks share heads (``TransformerConfig.__post_init__``, which asks it of hybrids, too, but for ``gdn2``), and
    what products in 8 bits ask of the projection (``_GDNBase.__init__``)."""
    model, layout = plan.model, plan.layout
    has_delta = model.linear_interval > 0 or "G" in model.layer_pattern + model.mtp_pattern
    if "gdn_norm_out" in (plan.recompute.modules or ()) and not has_delta:
        raise PlanError("recompute.modules", "gdn_norm_out", "must be left out: the model has no gated delta nets")
    if not has_delta:
        return
    ranks = layout.tp * layout.cp
    for heads, what in ((model.linear_key_heads, "keys"), (model.linear_value_heads, "values")):
        if heads % ranks:
            raise plan.wrong(
                f"layout.{'tp' if heads % layout.tp else 'cp'}",
                f"must divide, tp and cp together, the {heads} heads of {what} of gated delta nets",
            )
    q = model.linear_key_heads * model.linear_key_head_dim
    features = 2 * (q + model.linear_value_heads * (model.linear_value_head_dim + 1))
    multiple = 32 if plan.precision.fp8 == "mxfp8" or plan.precision.fp4 else 16
    if (plan.precision.fp8 or plan.precision.fp4) and features // layout.tp % multiple:
        raise plan.wrong(
            "precision.fp8",
            f"must be left out: {features // layout.tp} features of a gated delta net's projection on a rank are "
            f"no multiple of {multiple}",
        )
    if plan.megatron.fsdp != "none" or plan.megatron.torch_fsdp != "none":
        name = "fsdp" if plan.megatron.fsdp != "none" else "torch_fsdp"
        raise plan.wrong(f"megatron.{name}", "must be none with gated delta nets, whose units are not modelled yet")


def check_router(plan: ResolvedPlan) -> None:
    """How tokens choose experts (``TransformerConfig.__post_init__``; of groups ``group_limited_topk`` in
    ``moe/moe_utils.py``, which takes an equal share of a token's experts from each that is chosen)."""
    model, given = plan.model, plan.experts
    if not model.experts:
        return
    softmax, sinkhorn = model.router_score == "softmax", model.router_balancing == "sinkhorn"
    groups, chosen = model.router_groups, model.router_group_top_k or 1
    share, size = model.expert_top_k // chosen, model.experts // (groups or 1)
    plan.refuse(
        (
            "model.router_score_first",
            softmax and model.expert_top_k == 1 and not (model.router_score_first or sinkhorn),
            "must be true with one expert for each token, as in Megatron-Core: the softmax of one score is always 1",
        ),
        (
            "model.router_expert_bias",
            softmax and model.router_expert_bias,
            "must be false with model.router_score softmax, as in Megatron-Core",
        ),
        (
            "model.router_group_top_k",
            groups and share > size,
            f"must be larger: {share} of a token's {model.expert_top_k} experts come from each group, which has {size}",
        ),
        (
            "experts.capacity_factor",
            sinkhorn and given.capacity_factor is not None,
            "must be left out with model.router_balancing sinkhorn, as in Megatron-Core",
        ),
        (
            "experts.router_padding",
            given.router_padding and given.dispatcher == "allgather",
            "must be false with the allgather dispatcher, as in Megatron-Core",
        ),
    )


CHAIN = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"
"""Environment variable without which Transformer Engine runs operations of a chain of experts one after the other
(``pytorch/ops/fused/grouped_mlp.py``, ``is_supported``)."""


def chains_experts(plan: Plan) -> bool:
    """A rank's experts are one chain of operations (``use_transformer_engine_op_fuser``)."""
    return plan.megatron.fuses_operations and plan.model.experts > 0 and plan.experts.grouped_gemm


def counts_on_device(plan: Plan) -> bool:
    """The host does not know experts' numbers of rows: a chain is on a grouped tensor
    (``TransformerConfig.__post_init__``)."""
    return plan.experts.grouped_tensor or chains_experts(plan)


def check_chain(plan: ResolvedPlan) -> None:
    """Experts in one chain of operations, whose kernels are Blackwell's."""
    field = "megatron.fuses_operations" if chains_experts(plan) else "experts.shared_chain"
    if field == "experts.shared_chain" and not plan.experts.shared_chain:
        return
    if plan.experts.shared_chain and not plan.model.shared_expert_ffn:
        raise plan.wrong("experts.shared_chain", "must be false: the model has no shared experts")
    gpu = GPUS[plan.hardware.gpu].compute_capability if plan.hardware.gpu is not None else None
    reasons = {
        "with local layers: Transformer Engine's have it": plan.megatron.transformer_impl == "local",
        f"with experts unless {CHAIN}=1: operations that run one after the other are not modelled yet": (
            plan.environment.get(CHAIN, "0") == "0"
        ),
        "off Blackwell (compute capability 10), whose kernels it is modelled with": gpu is not None and gpu[0] != 10,
        "with sharded parameters, with which it is not modelled yet": {plan.megatron.fsdp, plan.megatron.torch_fsdp}
        != {"none"},
    }
    for how, applies in reasons.items():
        if applies:
            raise PlanError(field, True, f"must be false {how}")


def check_grouped_tensor(plan: ResolvedPlan) -> None:
    """Experts in one grouped tensor, and a budget of rows (``transformer_config.py``; Transformer Engine's
    ``module/grouped_linear.py``, ``is_module_grouped_tensor_path_supported``), as far as they are modelled."""
    given, megatron = plan.experts, plan.megatron
    gpu = GPUS[plan.hardware.gpu].compute_capability if plan.hardware.gpu is not None else None
    if given.rank_capacity is not None:
        beside = {
            "with experts.grouped_tensor or megatron.fuses_operations alone": not counts_on_device(plan),
            "with the flex dispatcher over HybridEP alone": given.dispatcher != "flex"
            or given.flex_backend != "hybridep",
            "without a capacity of each expert": given.capacity_factor is not None,
            "without ranks that divide experts (etp 1)": (plan.layout.etp or plan.layout.tp) > 1,
        }
        reasons = {f"must be left out: it is modelled {how}": applies for how, applies in beside.items()}
        plan.refuse_for("experts.rank_capacity", reasons)
    if not given.grouped_tensor:
        return
    reasons = {
        "must be false without experts.grouped_gemm": not given.grouped_gemm,
        "must be false with local layers: Transformer Engine's have it": megatron.transformer_impl == "local",
        "must be false before Transformer Engine 2.19, whose grouped layers cannot be told": (
            tuple(map(int, megatron.transformer_engine.split(".")[:2])) < (2, 19)
        ),
        "must be false with fp8 or fp4, with which it is not modelled yet": plan.precision.low is not None,
        "must be false with fp32, which it does not take": plan.precision.dtype == "fp32",
        "must be false below compute capability 9.0, which it does not run on": gpu is not None and gpu < (9, 0),
        "must be false with DeepEP, whose permutation pads rows then: it is not modelled yet": (
            given.dispatcher == "flex" and given.flex_backend != "hybridep"
        ),
        "must be false with products for gradients of weights that run later, with which it is not modelled yet": (
            given.delay_wgrad or given.wgrad_beside_dispatch
        ),
        "must be false with activations on the host, with which it is not modelled yet": (
            megatron.offload_modules is not None
        ),
    }
    plan.refuse_for("experts.grouped_tensor", reasons)
