"""``megatron``: Megatron-Core."""

from __future__ import annotations

from collections.abc import Mapping

from ...device.facts import Cause
from ...plan.megatron_layout import stages, times
from ...plan.plan import AttentionImplementation, Hardware, Layout, LossKind, Plan, Recompute, ResolvedPlan
from ...plan.section import Dtype
from ..base import SHARDED, Adaptable, Framework, Parts, Supports
from .kernel_rules import OF_LOW_ATTENTION, SELECTORS, keeps_scores
from .memory_rules import CHAIN, COMPARED, DISTRIBUTED
from .rules import RULES

DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Variables that ``--deterministic-mode`` sets unless somebody else has (``megatron/training/determinism.py``)."""


SAVING = (
    "saving or loading a checkpoint casts every state that is no fp32 to fp32, all of them at once (the distributed "
    "optimizer's get_unscaled_state)"
)
OPTIMIZER_ASSUMPTIONS = {
    "sgd": ("SGD with momentum (one fp32 state a parameter)",),
    "muon": (
        "Muon of emerging-optimizers on matrices but embedding and output layer, Adam on the rest; with zero 1 whole "
        "parameters dealt out to ranks by size (--no-use-layer-wise-param-layout)",
    ),
}


class Megatron(Framework):
    name = "megatron"
    parts = Parts(
        ".searching:MegatronSearch",
        ".timing:MegatronTime",
        ".validating:MegatronRunning",
        notices=".notices:notices",
        assumptions=".notices:assumptions",
        communicators=".communicators:communicators",
    )
    configuration = "megatron"
    measured_code = "megatron"
    own_streams = True
    holds_workspaces = True
    supports = Supports(
        compiled="Megatron-LM has no setting that compiles a model, and compiles its own fused functions in any case",
        loops=(),
        decoder_lengths=True,
        sizes=frozenset({"tp", "pp", "dp", "cp", "vpp", "ep"}),
        tp_divides=("heads", "ffn", "hidden"),
        mixtures_refused={
            "index_heads": "Megatron-Core has the indexer (--experimental-attention-variant dsa), with a loss that "
            "trains it (--dsa-indexer-loss-coeff) and kernels of its own, which are not modelled; of transformers' "
            "layers, single and fsdp have it"
        },
        mixtures=("experts", "latent_kv_rank", "mtp_layers", "layer_pattern", "layer_blocks", "linear_interval"),
        zero=(0, 1),
        sequence_parallel=True,
        sections=("megatron", "experts", "lora"),
        environment=(*SELECTORS, *OF_LOW_ATTENTION, *COMPARED, CHAIN),
        pipeline=(
            "first_layers",
            "last_layers",
            "count_embedding",
            "count_loss",
            "layout",
            "group",
            "overlap_p2p",
            "overlap_p2p_warmup",
        ),
        optimizers=("sgd", "adam", "adamw", "muon"),
        implementations=("apex", "foreach"),
        default_implementations={"sgd": "apex", "adam": "apex", "adamw": "apex", "muon": None},
        optimizer_fields=frozenset({"precision_aware", "main_parameters", "exp_avg", "exp_avg_sq", "fp8_recipe"}),
        losses=("vocab-parallel",),
        losses_refused=dict.fromkeys(
            ("plain", "liger", "cut", "chunked"), "megatron.cross_entropy_fusion names a fused kernel"
        ),
        last_logits=False,
        autocast=False,
        low_precision=("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"),
        reentrant=False,
        gradients_in_fp32=True,
        code_2020=False,
        recompute_modules=(
            "core_attn",
            "layernorm",
            "mlp",
            "moe",
            "moe_act",
            "shared_experts",
            "mla_up_proj",
            "gdn_norm_out",
        ),
    )

    def zero_where_chosen(self, optimizer: str) -> int:
        """The distributed optimizer, where it has this one."""
        return int(optimizer in DISTRIBUTED)

    def default_layout(self, plan: Plan) -> Layout:
        """``pipeline.layout`` says how many chunks a stage has; layers that run with tensor parallelism only where the
        sequence is cut, too, have it cut unless the plan says otherwise."""
        layout, text = plan.layout, plan.pipeline.layout
        needs = bool(plan.model.experts or plan.model.latent_kv_rank) and layout.tp > 1
        if needs and "sequence_parallel" not in layout.model_fields_set:
            layout = layout.model_copy(update={"sequence_parallel": True})
        if plan.model.experts and layout.etp is None:
            layout = layout.model_copy(update={"etp": layout.tp})
        if plan.megatron.fsdp != "none":
            layout = layout.model_copy(update={"zero": 1})  # ``validate_args``
        if text is None or layout.vpp > 1:
            return layout
        (first, *_) = stages(plan.model.layers, layout.pp, None, layout=text)
        return layout.model_copy(update={"vpp": len(first)})

    def described(self, plan: Plan) -> list[str]:
        megatron = plan.megatron
        parts = [f"Megatron-FSDP {megatron.fsdp}"] if megatron.fsdp != "none" else []
        parts += ["FSDP2"] if megatron.torch_fsdp != "none" else []
        return [*parts, f"CUDA graphs {megatron.cuda_graphs}"] if megatron.cuda_graphs != "none" else parts

    def default_gradients(self, plan: Plan) -> Dtype:
        """bf16 gradients are accumulated in fp32 (``validate_args``), but for Megatron-FSDP's and FSDP2's."""
        megatron = plan.megatron
        wide = plan.precision.dtype == "bf16" and megatron.fsdp == megatron.torch_fsdp == "none"
        return "fp32" if wide else plan.precision.stored

    def default_loss(self, plan: Plan) -> LossKind:
        return "vocab-parallel"

    def default_attention(self, plan: Plan) -> AttentionImplementation:
        return "eager" if keeps_scores(plan.megatron) else "flash"

    def default_recompute(self, plan: Plan) -> Recompute:
        recompute = super().default_recompute(plan)
        if recompute.mode == "selective" and recompute.modules is None:
            return recompute.model_copy(update={"modules": ("core_attn",)})
        return recompute

    def default_sections(self, plan: Plan, hardware: Hardware, layout: Layout) -> dict[str, object]:
        changed: dict[str, object] = {}
        pipeline: dict[str, object] = {}
        if layout.vpp > 1 and plan.pipeline.group is None:
            pipeline["group"] = layout.pp
        if (text := _whole_layout(plan)) != plan.pipeline.layout:
            pipeline["layout"] = text
        if pipeline:
            changed["pipeline"] = plan.pipeline.model_copy(update=pipeline)
        given = plan.megatron
        # ``attention: eager`` is a way to ask for the unfused back end; ``flash`` leaves the choice among the others.
        if plan.attention == "eager" and given.transformer_impl != "local" and given.attention_backend == "auto":
            given = changed["megatron"] = given.model_copy(update={"attention_backend": "unfused"})
        # experts with biases run without it alone (``TEGroupedMLP``)
        if plan.model.experts and plan.model.mlp_bias and "bias_dropout_fusion" not in given.model_fields_set:
            changed["megatron"] = given.model_copy(update={"bias_dropout_fusion": False})
        # its gradients are in no buffer that a product could add to (``validate_args``)
        if given.torch_fsdp != "none" and "gradient_accumulation_fusion" not in given.model_fields_set:
            now = changed.get("megatron", given)
            assert isinstance(now, type(given))
            changed["megatron"] = now.model_copy(update={"gradient_accumulation_fusion": False})
        sinks = plan.model.attention_sinks or plan.model.sliding_window is not None
        if sinks and layout.cp > 1 and "cp_communication" not in given.model_fields_set:
            now = changed.get("megatron", given)
            assert isinstance(now, type(given))
            changed["megatron"] = now.model_copy(update={"cp_communication": "a2a"})  # no other way knows both
        if given.deterministic:
            changed["environment"] = {**DETERMINISTIC, **plan.environment}
        return changed

    def check(self, plan: ResolvedPlan) -> None:
        for rule in RULES if plan.model.has_sizes else ():  # sizes of no recipe say nothing: it is refused as such
            rule(plan)

    def buffers_outside(self, plan: ResolvedPlan) -> tuple[Cause, ...]:
        sends = plan.model.experts and plan.experts.dispatcher == "flex"
        if not (sends or plan.megatron.tp_comm_overlap):
            return ()
        from ...device.facts import Cause
        from ...layers.megatron_core import flex
        from .communicators import USER_BUFFERS, user_buffers
        from .from_plan import core_shape

        shape, causes = core_shape(plan), []
        if (found := flex.outside(shape)) is not None:
            causes.append(Cause("other", found[0], found[1], found[1], flex.SOURCE))
        if plan.megatron.tp_comm_overlap:
            size = user_buffers(shape)
            causes.append(Cause("other", "user buffers", size, size, USER_BUFFERS))
        return tuple(causes)

    def vocab_multiple(self, plan: Plan) -> int:
        """``vocab_size_with_padding``: ``make_vocab_size_divisible_by`` times t."""
        return plan.megatron.vocab_multiple * plan.layout.tp

    own_layers = True

    def adapters_by(self, plan: Plan) -> str | None:
        return "Megatron-Bridge 0.6"

    def adaptable(self, plan: Plan) -> Mapping[str, tuple[Adaptable, ...]]:
        from .adapters import adaptable

        return adaptable(plan)

    def logits_vocab(self, plan: ResolvedPlan) -> int:
        """Transformer Engine's cross entropy makes no fp32 copy of the logits."""
        return 0 if plan.megatron.cross_entropy_fusion == "te" else super().logits_vocab(plan)

    def optimizer_assumptions(self, plan: ResolvedPlan) -> tuple[str, ...]:
        return OPTIMIZER_ASSUMPTIONS.get(plan.optimizer.name, ())

    def saving(self, plan: ResolvedPlan) -> str:
        return SAVING if plan.optimizer.precision_aware else super().saving(plan)

    def sharded(self, plan: ResolvedPlan) -> str:
        strategy = plan.megatron.fsdp
        if plan.megatron.torch_fsdp != "none":
            return SHARDED[3]
        return super().sharded(plan) if strategy == "none" else f"Megatron-FSDP: {strategy}"

    def zero_words(self, stage: int) -> str:
        return "distributed optimizer" if stage else "states on every replica"

    def cut_field(self, plan: Plan, *, whole: bool) -> str:
        layout = _whole_layout(plan)
        return f"--pipeline-layout '{layout}'" if layout is not None else ""


def _whole_layout(plan: Plan) -> str | None:
    """The layout string with layers of multi-token prediction, without which ``validate_layer_layout`` stops."""
    text, further = plan.pipeline.layout, plan.model.mtp_layers
    if text is None or not further or "m" in text or not text.endswith("L"):
        return text
    return f"{text[:-1]}{times('m', further)}L"


FRAMEWORK = Megatron()
