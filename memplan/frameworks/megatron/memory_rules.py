"""Rules of what moves or keeps memory: optimizer states, recompute, offloading, CUDA graphs, deferred gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...plan.errors import PlanError
from .part_rules import counts_on_device

if TYPE_CHECKING:
    from ...plan.resolved import ResolvedPlan


def check_optimizer(plan: ResolvedPlan) -> None:
    """Transformer Engine's (or apex') FusedAdam, with the distributed optimizer in dtypes of choice."""
    optimizer = plan.optimizer
    if not optimizer.algorithm.precision_aware:
        plan.refuse(
            (
                "optimizer.name",
                plan.layout.zero == 1 and optimizer.name != "muon",
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
            "must be apex with Transformer Engine's layers (--transformer-impl): where it is installed, its "
            "FusedAdam steps, not torch.optim's",
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
    if (plan.recompute.layers or 1) > 1:
        raise plan.wrong("recompute.layers", "must be 1 with multi-token prediction, as in Megatron-Core")
    if plan.megatron.fsdp != "none":
        raise plan.wrong(
            "recompute.mode",
            "must not be full with multi-token prediction and megatron.fsdp, with which that is not modelled yet",
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
        "must be left out with full recompute, beside which it is not modelled": recompute.mode == "full",
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
        "must be none with Megatron-FSDP, beside which graphs are not modelled yet": megatron.fsdp != "none",
        "must not be local with activations on the host other than expert_fc1 and moe_act, as in Megatron-Core": (
            kind == "local" and not {*(megatron.offload_modules or ())} <= {"expert_fc1", "moe_act"}
        ),
        "must be none with activations on the host, beside which graphs are not modelled yet": megatron.offload_modules
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
        "must have mlp with dense layers only, of which there is none": "mlp" in modules
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
        "must be false with Megatron-FSDP, beside which it is not modelled yet": megatron.fsdp != "none",
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
        "must be false with pipeline stages, beside which it is not modelled yet": layout.pp > 1,
        "must be false with fp8 and fp4, whose recompute is Transformer Engine's own": low is not None,
        "must be false with family t5, with which it is not modelled yet": plan.model.family == "t5",
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
            "must be false with Megatron-FSDP or multi-token prediction, beside which it is not modelled",
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
