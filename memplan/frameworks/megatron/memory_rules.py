"""Rules of what moves or keeps memory: optimizer states, recompute, offloading, CUDA graphs, deferred gradients.

Rules of parts that not all models have: gated delta nets, routers, experts in one grouped tensor or one chain of
operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...device.gpus import GPUS
from ...plan.errors import PlanError

if TYPE_CHECKING:
    from ...plan.plan import Plan, ResolvedPlan


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
            f"must be left out: {features // layout.tp} features of a gated delta net's projection on a rank are no "
            f"multiple of {multiple}",
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


DISTRIBUTED = ("adam", "adamw", "muon")
"""Optimizers whose states Megatron-LM shards."""
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
        "with sharded parameters: that combination is not modelled yet": {plan.megatron.fsdp, plan.megatron.torch_fsdp}
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
            "only with experts.grouped_tensor or megatron.fuses_operations": not counts_on_device(plan),
            "only with the flex dispatcher over HybridEP": given.dispatcher != "flex"
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
        "must be false with fp8 or fp4: that combination is not modelled yet": plan.precision.low is not None,
        "must be false with fp32, which it does not take": plan.precision.dtype == "fp32",
        "must be false below compute capability 9.0, which it does not run on": gpu is not None and gpu < (9, 0),
        "must be false with DeepEP, whose permutation pads rows then: it is not modelled yet": (
            given.dispatcher == "flex" and given.flex_backend != "hybridep"
        ),
        "must be false with products for gradients of weights that run later: that combination is not modelled yet": (
            given.delay_wgrad or given.wgrad_beside_dispatch
        ),
        "must be false with activations on the host: that combination is not modelled yet": (
            megatron.offload_modules is not None
        ),
    }
    plan.refuse_for("experts.grouped_tensor", reasons)


# -- memory rules --------------------------------------------------------------------------------------


def check_optimizer(plan: ResolvedPlan) -> None:
    """Transformer Engine's (or apex') FusedAdam, with the distributed optimizer in dtypes of choice."""
    optimizer = plan.optimizer
    if not optimizer.algorithm.precision_aware:
        plan.refuse(
            (
                "optimizer.name",
                plan.layout.zero == 1 and optimizer.name not in DISTRIBUTED,
                "must be adam, adamw or muon with the distributed optimizer (zero: 1): it supports no other",
            ),
            (
                "optimizer.precision_aware",
                optimizer.precision_aware,
                f"must be false with {optimizer.name}: only FusedAdam is precision-aware",
            ),
        )
    _check_offload(plan)
    plan.refuse(
        (
            "optimizer.implementation",
            optimizer.implementation == "foreach" and (optimizer.precision_aware or plan.megatron.fsdp != "none"),
            "must be apex with optimizer.precision_aware and megatron.fsdp: torch.optim steps neither",
        ),
        (
            "optimizer.implementation",
            optimizer.implementation == "foreach" and plan.megatron.transformer_impl != "local",
            "must be apex with Transformer Engine's layers (--transformer-impl): where it is installed, its FusedAdam "
            "steps, not torch.optim's",
        ),
    )
    if optimizer.precision_aware:
        check_state_dtypes(plan)
        if plan.layout.zero != 1:
            raise plan.wrong("optimizer.precision_aware", "must be false without the distributed optimizer (zero: 1)")
        return
    for name in ("main_parameters", "exp_avg", "exp_avg_sq"):
        if getattr(optimizer, name) != "fp32":
            raise plan.wrong(
                f"optimizer.{name}", "must be fp32 without optimizer.precision_aware (--precision-aware-optimizer)"
            )
    if optimizer.fp8_recipe is not None:
        raise plan.wrong(
            "optimizer.fp8_recipe",
            "needs optimizer.precision_aware (--precision-aware-optimizer), the one optimizer that asks for it",
        )


def _check_offload(plan: ResolvedPlan) -> None:
    """The optimizer's states on the host (``validate_args``); ``HybridDeviceOptimizer`` keeps them in fp32."""
    optimizer, field = plan.optimizer, "megatron.optimizer_offload"
    if not plan.megatron.optimizer_offload:
        return
    if not optimizer.precision_aware:
        raise plan.wrong(field, "must be 0 without optimizer.precision_aware, whose code Megatron-Core's offload needs")
    for name in ("main_parameters", "exp_avg", "exp_avg_sq"):
        if getattr(optimizer, name) != "fp32":
            raise plan.wrong(f"optimizer.{name}", f"must be fp32 with {field}: offloaded states have no other dtype")
    if plan.precision.fp8_parameters:
        raise plan.wrong(field, "must be 0 with parameters in 8 bits: their offload is not modelled yet")


def check_recomputed(plan: ResolvedPlan) -> None:
    """Modules that ``transformer_config.py`` (``__post_init__``) refuses to recompute."""
    again, given, model = plan.recompute.modules or (), plan.experts, plan.model
    reasons = {
        "must not have shared_experts with experts.shared_expert_overlap, as in Megatron-Core": "shared_experts"
        in again
        and model.shared_expert_ffn > 0
        and given.shared_expert_overlap,
        "must not have moe_act without experts in one grouped product (experts.grouped_gemm), as in Megatron-Core": (
            "moe_act" in again and not (model.experts and given.grouped_gemm)
        ),
        "must not have mla_up_proj without latent attention, as in Megatron-Core": "mla_up_proj" in again
        and not model.latent_kv_rank,
    }
    plan.refuse_for("recompute.modules", reasons)
    if not model.mtp_layers or plan.recompute.mode != "full" or plan.recompute.method != "uniform":
        return
    plan.refuse(
        (
            "recompute.layers",
            (plan.recompute.layers or 1) > 1,
            "must be 1 with multi-token prediction, as in Megatron-Core",
        ),
        (
            "recompute.mode",
            plan.megatron.fsdp != "none",
            "must not be full with multi-token prediction and megatron.fsdp: that combination is not modelled yet",
        ),
    )


OFFLOAD_V1, GRAPH_REGISTER = COMPARED = ("NVTE_CPU_OFFLOAD_V1", "NCCL_GRAPH_REGISTER")
"""Variables that Megatron-Core compares with what a plan has, and that change no memory by themselves."""


def check_offloading(plan: ResolvedPlan) -> None:
    """Activations on the host (``transformer_config.py``, ``arguments.py``): of GPT's layers of Transformer Engine."""
    field, modules, recompute = "megatron.offload_modules", plan.megatron.offload_modules, plan.recompute
    if modules is None:
        return
    if plan.environment.get(OFFLOAD_V1, "1") != "1":
        raise plan.wrong(
            f"environment.{OFFLOAD_V1}",
            f"must be 1 with {field}: Megatron-LM stops otherwise from Transformer Engine 2.10 on",
        )
    again = recompute.modules or () if recompute.mode == "selective" else ()
    reasons = {
        "must be left out with local layers: Transformer Engine's have it": plan.megatron.transformer_impl == "local",
        "must be left out: only GPT's have it here": plan.model.family in ("bert", "t5")
        or bool(plan.model.layer_pattern),
        "must be left out with full recompute: that combination is not modelled": recompute.mode == "full",
        "must have core_attn beside attn_proj: core attention's backward reads its output": "attn_proj" in modules
        and "core_attn" not in modules,
        "must not have expert_fc1 or moe_act, whose layer is recomputed whole (recompute.modules moe)": "moe" in again
        and not {"expert_fc1", "moe_act"}.isdisjoint(modules),
    }
    plan.refuse_for(field, reasons)


def check_layer_offload(plan: ResolvedPlan) -> None:
    """Whole layers on the host: what ``transformer_config.py``, ``tensor_parallel/layers.py`` and Transformer Engine's
    ``cpu_offload.py`` ask, and as far as it is modelled."""
    field, megatron, model = "megatron.offload_layers", plan.megatron, plan.model
    count, te = megatron.offload_layers, tuple(int(part) for part in megatron.transformer_engine.split(".")[:2])
    if not count:
        return
    refused = {
        f"must be less than the {model.layers} layers, as in Megatron-Core": count >= model.layers,
        "must be 0 with pipeline parallelism (pp, vpp), as in Megatron-Core": plan.layout.pp > 1 or plan.layout.vpp > 1,
        "must be 0 with recompute, as in Megatron-Core": plan.recompute.mode != "none",
        "must be 0 with local layers, as in Megatron-Core: Transformer Engine's have it": megatron.transformer_impl
        == "local",
        "must be 0 with megatron.offload_modules, as in Megatron-Core: there is one or the other": (
            megatron.offload_modules is not None
        ),
        "must be 0 with CUDA graphs of layers, as in Megatron-Core": (
            megatron.cuda_graphs in ("transformer_engine", "local")
        ),
        "must be 0 before Transformer Engine 2.10, whose offloading is another": te < (2, 10),
        "must be 0 with NVTE_CPU_OFFLOAD_V1=1, Transformer Engine's offloading before 2.10, which is not modelled": (
            plan.environment.get(OFFLOAD_V1) == "1"
        ),
    }
    missing = {
        "another model than GPT": model.family in ("bert", "t5") or bool(model.layer_pattern),
        "experts, latent attention or multi-token prediction": bool(
            model.experts or model.latent_kv_rank or model.mtp_layers
        ),
        "context parallelism": plan.layout.cp > 1,
        "unfused attention": plan.attention != "flash",
        "a CUDA graph of the iteration": megatron.cuda_graphs != "none",
        "PyTorch's FSDP2": megatron.torch_fsdp != "none",
        "the fuser of operations": megatron.fuses_operations,
        "norms that return the residual": megatron.norm_takes_residual,
        "MLPs in chunks": megatron.mlp_chunks > 1,
    }
    refused |= {f"must be 0 with {what}: it is not modelled yet": applies for what, applies in missing.items()}
    plan.refuse_for(field, refused)


def check_graphs(plan: ResolvedPlan) -> None:
    """CUDA graphs (``transformer_config.py``, ``arguments.py``, ``cuda_graphs.py``)."""
    megatron, modules, field = plan.megatron, plan.megatron.cuda_graph_modules, "megatron.cuda_graphs"
    kind, recompute, experts = megatron.cuda_graphs, plan.recompute, plan.model.experts > 0
    of_layers = kind in ("transformer_engine", "local")
    if modules is not None and not of_layers:
        raise plan.wrong(
            "megatron.cuda_graph_modules", "must be left out without megatron.cuda_graphs transformer_engine or local"
        )
    if kind == "none":
        return
    _check_modules(plan, modules or ())
    segments = "expandable_segments:True" in plan.environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    hybrid = bool(plan.model.layer_pattern)
    routed = plan.experts
    counts = routed.dispatcher != "flex" and not counts_on_device(plan) and not routed.pad_to_capacity
    whole = not modules or "moe" in modules or (kind == "local" and not hybrid and "attn" in modules)
    again = recompute.modules or () if recompute.mode == "selective" else ()
    reasons = {
        "must be local or none with local layers": megatron.transformer_impl == "local" and kind != "local",
        "must be none: graphs of other models than GPT and hybrids are not modelled": plan.model.family
        in ("bert", "t5"),
        "must be none with Megatron-FSDP: graphs are not modelled with it yet": megatron.fsdp != "none",
        "must not be local with activations on the host other than expert_fc1 and moe_act, as in Megatron-Core": (
            kind == "local" and not {*(megatron.offload_modules or ())} <= {"expert_fc1", "moe_act"}
        ),
        "must be none with activations on the host: graphs are not modelled with it yet": megatron.offload_modules
        is not None,
        "needs megatron.check_for_nan false (--no-check-for-nan-in-loss-and-grad), as in Megatron-Core": not of_layers
        and megatron.check_for_nan,
        "must be full_iteration or none with full recompute, as in Megatron-Core": of_layers
        and recompute.mode == "full",
        "must not run moe_router with experts that are recomputed (recompute.modules moe), as in Megatron-Core": kind
        == "transformer_engine"
        and "moe" in again
        and "moe_router" in (modules or ()),
        "needs NCCL_GRAPH_REGISTER=0 beside expandable segments, as Megatron-Core does": kind == "transformer_engine"
        and segments
        and plan.environment.get(GRAPH_REGISTER) != "0",
        "needs megatron.cuda_graph_modules without moe, or padded experts (experts.pad_to_capacity)": kind
        == "transformer_engine"
        and whole
        and experts
        and not plan.experts.pad_to_capacity,
        "needs padded experts (experts.pad_to_capacity): it captures layers whole, and no graph waits for numbers of "
        "rows": kind == "local" and whole and experts and not routed.pad_to_capacity,
        "needs padded experts (experts.pad_to_capacity), experts.dispatcher flex or experts.grouped_tensor: the host "
        "waits for numbers of rows otherwise (MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize), which no graph "
        "can hold": not of_layers and experts and counts,
        **_dropout_again(plan, modules or (), again),
    }
    plan.refuse_for(field, reasons)


def _dropout_again(plan: ResolvedPlan, modules: Sequence[str], again: Sequence[str]) -> dict[str, bool]:
    """``Graphed recompute module doesn't accept random number``."""
    spec = plan.model

    def graphed(part: str) -> bool:
        return not modules or part in modules

    hidden = any(part in again and graphed(part) for part in ("mlp", "moe"))
    return {
        "must be none with dropout in attention that is recomputed, as in Megatron-Core": spec.attention_dropout > 0
        and graphed("attn")
        and "core_attn" in again,
        "must be none with hidden dropout beside an MLP or experts that are recomputed, as in Megatron-Core": (
            spec.hidden_dropout > 0 and hidden
        ),
    }


def _check_modules(plan: ResolvedPlan, modules: Sequence[str]) -> None:
    """Parts of layers that there are, and that go together (``transformer_config.py``, ``__post_init__``)."""
    model, given, router = plan.model, plan.experts, "moe_router" in modules
    padded = given.capacity_factor is not None and given.pad_to_capacity
    reads = given.dispatcher == "alltoall" and (given.capacity_factor is not None or given.router_padding)
    reasons = {
        "must not have both moe and moe_router": "moe" in modules and router,
        "must have moe_router beside moe_preprocess": "moe_preprocess" in modules
        and not router
        and plan.megatron.cuda_graphs != "local",
        "must have moe and moe_router with experts only": not model.experts and ("moe" in modules or router),
        "must not have mlp: the model has no dense layer": "mlp" in modules
        and model.experts > 0
        and not model.layer_pattern
        and all(map(model.has_experts, range(model.layers))),
        "must have moe with padded experts only (experts.pad_to_capacity)": "moe" in modules and not padded,
        "must not have moe_preprocess with a capacity or padded rows and alltoall": "moe_preprocess" in modules
        and not padded
        and reads,
    }
    for problem, applies in reasons.items():
        if applies:
            raise PlanError("megatron.cuda_graph_modules", list(modules), f"{problem}, as in Megatron-Core")


def check_step_graph(plan: ResolvedPlan) -> None:
    """The step as a CUDA graph (``optimizer_cuda_graph.py``: "for ADAM optimizer")."""
    megatron, optimizer, field = plan.megatron, plan.optimizer, "megatron.optimizer_graph"
    reasons = {
        "must be false with another optimizer than adam and adamw": optimizer.name not in ("adam", "adamw"),
        "must be false with fp16: the host waits for what the step finds of overflows, which no graph can have": (
            plan.precision.dtype == "fp16"
        ),
        "must be false with states on the host, which steps copy": megatron.optimizer_offload > 0,
        "must be false with Megatron-FSDP: that combination is not modelled yet": megatron.fsdp != "none",
    }
    if megatron.optimizer_graph:
        plan.refuse_for(field, reasons)


def check_saved(plan: ResolvedPlan) -> None:
    """Inputs of layers on all tensor-parallel ranks (``arguments.py``, ``transformer_config.py``)."""
    if not plan.megatron.distribute_saved:
        return
    layout, low = plan.layout, plan.precision.low
    reasons = {
        "must be false without tensor parallelism (tp > 1)": layout.tp == 1,
        "must be false without full recompute": plan.recompute.mode != "full",
        "must be false with sequence parallelism, which divides inputs anyway": layout.sequence_parallel,
        "must be false with pipeline stages: that combination is not modelled yet": layout.pp > 1,
        "must be false with fp8 and fp4, whose recompute is Transformer Engine's own": low is not None,
        "must be false with family t5: that combination is not modelled yet": plan.model.family == "t5",
    }
    plan.refuse_for("megatron.distribute_saved", reasons)


def check_deferral(plan: ResolvedPlan) -> None:
    """What ``model_parallel_config.py`` asks of deferred weight gradients of the head."""
    megatron, field = plan.megatron, "megatron.defer_embedding_wgrad"
    if not megatron.defer_embedding_wgrad:
        if megatron.wgrad_deferral_limit:
            raise plan.wrong("megatron.wgrad_deferral_limit", f"must be 0 without {field}")
        return
    plan.refuse(
        (field, plan.layout.pp == 1, "must be false without pipeline parallelism (pp > 1), as in Megatron-Core"),
        (
            field,
            not megatron.gradient_accumulation_fusion,
            "must be false without gradient_accumulation_fusion, as in Megatron-Core",
        ),
        (
            field,
            megatron.fsdp != "none" or plan.model.mtp_layers,
            "must be false with Megatron-FSDP or multi-token prediction: that combination is not modelled",
        ),
    )


def check_state_dtypes(plan: ResolvedPlan) -> None:
    """What FusedAdam keeps states in (``fused_adam.py``, ``__init__``)."""
    optimizer, te = plan.optimizer, tuple(int(part) for part in plan.megatron.transformer_engine.split(".")[:2])
    plan.refuse(
        (
            "optimizer.precision_aware",
            plan.precision.dtype == "fp32",
            "must be false with fp32 parameters: precision-aware states of fp32 parameters are not modelled",
        ),
        ("optimizer.main_parameters", optimizer.main_parameters not in ("fp32", "fp16"), "must be fp32 or fp16"),
    )
    for name in ("exp_avg", "exp_avg_sq"):
        if getattr(optimizer, name) == "bf16" and te < (2, 3):
            raise plan.wrong(f"optimizer.{name}", "must be fp32, fp16 or fp8 before Transformer Engine 2.3")
