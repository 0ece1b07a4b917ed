"""``megatron``: Megatron-Core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...device.gpus import GPUS
from ...layers.megatron_core.te_facts import LOW_PRECISION_SINCE, OLDEST_LOW_PRECISION
from ...plan.errors import ABSENT, PlanError
from ...plan.layer_blocks import LINEAR, block_of, kinds_of
from ...plan.megatron_layout import stages, times, written_out
from ...plan.module_precision import EXPERTS, wide_modules
from ..base import SHARDED, Framework, Supports

if TYPE_CHECKING:
    from ...device.facts import Cause
    from ...layers.module import Options
    from ...plan.framework_sections import Megatron as MegatronSection
    from ...plan.plan import AttentionImplementation, Hardware, Layout, LossKind, Plan, Recompute
    from ...plan.resolved import ResolvedPlan
    from ...plan.section import Dtype
    from ...result import Notice
    from ...search.framework import FrameworkSearch
    from ...search.time.framework import FrameworkTime
    from ...tape.program import Program
    from ...trace.framework import FrameworkRunning
    from ..base import Communicator

DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Variables that ``--deterministic-mode`` sets unless somebody else has (``megatron/training/determinism.py``)."""

SELECTORS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
BACK_ENDS = {
    "auto": ("1", "1", "1"),
    "flash": ("1", "0", "0"),
    "fused": ("0", "1", "0"),
    "unfused": ("0", "0", "1"),
    "local": ("0", "0", "0"),
}
"""``SELECTORS`` as Megatron sets them for each attention back end (``LanguageModule._set_attention_backend``); it stops
where one of them is set otherwise."""


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
    configuration = "megatron"
    measured_code = "megatron"
    holds_workspaces = True
    supports = Supports(
        loops=(),
        sizes=frozenset({"tp", "pp", "dp", "cp", "vpp", "ep"}),
        tp_divides=("heads", "ffn", "hidden"),
        mixtures=("experts", "latent_kv_rank", "mtp_layers", "layer_pattern", "layer_blocks"),
        zero=(0, 1),
        sequence_parallel=True,
        sections=("megatron", "experts"),
        environment=SELECTORS,
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
        implementations=("apex",),
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
        recompute_modules=("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj"),
    )

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
        if given.deterministic:
            changed["environment"] = {**DETERMINISTIC, **plan.environment}
        return changed

    def check(self, plan: ResolvedPlan) -> None:
        for rule in RULES:
            rule(plan)

    def communicators(self, plan: ResolvedPlan, stage: int) -> tuple[Communicator, ...]:
        from .communicators import communicators

        return communicators(plan, stage)

    def buffers_outside(self, plan: ResolvedPlan) -> tuple[Cause, ...]:
        sends = plan.model.experts and plan.experts.dispatcher == "flex"
        if not (sends or plan.megatron.tp_comm_overlap):
            return ()
        from ...device.facts import Cause
        from ...layers.megatron_core import flex, user_buffers
        from .programs import core_shape

        shape, causes = core_shape(plan), []
        if (found := flex.outside(shape)) is not None:
            causes.append(Cause("other", found[0], found[1], found[1], flex.SOURCE))
        if plan.megatron.tp_comm_overlap:
            size = user_buffers.outside(shape)
            causes.append(Cause("other", "user buffers", size, size, user_buffers.SOURCE))
        return tuple(causes)

    def vocab_multiple(self, plan: Plan) -> int:
        """``vocab_size_with_padding``: ``make_vocab_size_divisible_by`` times t."""
        return plan.megatron.vocab_multiple * plan.layout.tp

    own_layers = True

    def logits_vocab(self, plan: ResolvedPlan) -> int:
        """Transformer Engine's cross entropy makes no fp32 copy of the logits."""
        return 0 if plan.megatron.cross_entropy_fusion == "te" else super().logits_vocab(plan)

    def optimizer_assumptions(self, plan: ResolvedPlan) -> tuple[str, ...]:
        return OPTIMIZER_ASSUMPTIONS.get(plan.optimizer.name, ())

    def notices(self, plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
        from .notices import notices

        return notices(plan, programs)

    def assumptions(self, plan: ResolvedPlan) -> tuple[str, ...]:
        from .notices import assumptions

        return assumptions(plan)

    def saving(self, plan: ResolvedPlan) -> str:
        return SAVING if plan.optimizer.precision_aware else super().saving(plan)

    def programs(self, plan: ResolvedPlan, options: Options) -> tuple[Program, ...]:
        from . import programs

        return programs.programs(plan, options)

    @cached_property
    def search(self) -> FrameworkSearch:
        from .searching import MegatronSearch

        return MegatronSearch()

    @cached_property
    def running(self) -> FrameworkRunning:
        from .validating import MegatronRunning

        return MegatronRunning()

    @cached_property
    def time(self) -> FrameworkTime:
        from .timing import MegatronTime

        return MegatronTime()

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


def keeps_scores(megatron: MegatronSection) -> bool:
    """Whether the attention holds its scores in memory."""
    return megatron.transformer_impl == "local" or megatron.attention_backend in ("unfused", "local")


def check_distributed(plan: ResolvedPlan) -> None:
    """What the distributed optimizer has, and what belongs to it."""
    megatron, ranks, sharded = plan.megatron, plan.layout.dp * plan.layout.cp, plan.layout.zero == 1
    field, instances = "megatron.distributed_optimizer_instances", megatron.distributed_optimizer_instances
    if instances > 1 and not sharded:
        raise PlanError(field, instances, "must be 1 without the distributed optimizer (zero: 1)")
    if ranks % instances:
        raise PlanError(field, instances, f"must divide dp x cp = {ranks}")
    if megatron.overlap_param_gather and not (sharded and (megatron.overlap_grad_reduce or megatron.fsdp != "none")):
        problem = "must be false without " + (
            "megatron.overlap_grad_reduce" if sharded else "the distributed optimizer (zero: 1)"
        )
        raise PlanError("megatron.overlap_param_gather", True, problem)


def check_sharding(plan: ResolvedPlan) -> None:
    """Megatron-FSDP, as far as it is modelled."""
    megatron, layout = plan.megatron, plan.layout
    if megatron.fsdp == "none":
        for name, value in megatron.changed():
            if name.startswith("fsdp_"):
                raise PlanError(f"megatron.{name}", value, "must be left out without Megatron-FSDP (megatron.fsdp)")
        return
    for name in ("pp", "vpp"):
        if getattr(layout, name) > 1:
            problem = "must be 1 with Megatron-FSDP, which is not modelled with pipeline parallelism yet"
            raise PlanError(f"layout.{name}", getattr(layout, name), problem)
    if plan.optimizer.name == "muon" or plan.optimizer.precision_aware:
        name = "precision_aware" if plan.optimizer.precision_aware else "name"
        problem = "must be adam or sgd with main parameters of Megatron-FSDP's own; others are not modelled with it yet"
        raise PlanError(f"optimizer.{name}", getattr(plan.optimizer, name), problem)
    if plan.model.mtp_layers:
        problem = "must be 0 with Megatron-FSDP: multi-token prediction is not modelled with it yet"
        raise PlanError("model.mtp_layers", plan.model.mtp_layers, problem)
    if plan.recompute.mode == "full" and plan.recompute.method == "uniform" and (plan.recompute.layers or 1) > 1:
        problem = "must be 1 with Megatron-FSDP: layers that are recomputed together are not modelled with it yet"
        raise PlanError("recompute.layers", plan.recompute.layers, problem)
    if megatron.fsdp == "no_shard" and megatron.fsdp_meta_device:
        problem = "must be false with megatron.fsdp no_shard, which shards no parameters"
        raise PlanError("megatron.fsdp_meta_device", True, problem)
    instances = megatron.distributed_optimizer_instances
    if megatron.fsdp_outer == "optim" and (megatron.fsdp != "optim_grads_params" or instances == 1):
        problem = "needs megatron.fsdp optim_grads_params and megatron.distributed_optimizer_instances above 1"
        raise PlanError("megatron.fsdp_outer", "optim", problem)
    reduced = megatron.fsdp_communication or plan.precision.gradients
    if reduced != plan.precision.gradients and (megatron.fsdp in ("no_shard", "optim") or instances > 1):
        problem = f"must be {plan.precision.gradients}, as precision.gradients, unless gradients are sharded among all "
        raise PlanError("megatron.fsdp_communication", reduced, f"{problem}ranks: a cast copy is not modelled yet")


def check_torch_sharding(plan: ResolvedPlan) -> None:
    """PyTorch's FSDP2: what ``validate_args`` and ``validate_optimizer`` ask of it, and as far as it is modelled."""
    megatron, model, beside = plan.megatron, plan.model, "with PyTorch's FSDP2 (megatron.torch_fsdp)"
    if megatron.torch_fsdp == "none":
        if megatron.torch_fsdp_host_init:
            problem = "must be false without PyTorch's FSDP2 (megatron.torch_fsdp)"
            raise PlanError("megatron.torch_fsdp_host_init", True, problem)
        return
    refused: dict[str, tuple[object, bool]] = {
        "layout.pp": (1, plan.layout.pp > 1),
        "layout.vpp": (1, plan.layout.vpp > 1),
        "layout.ep": (1, plan.layout.ep > 1),
        "layout.zero": (0, plan.layout.zero > 0),
        "model.tied_embeddings": ("false", model.tied_embeddings),
        "precision.dtype": ("bf16 or fp32", plan.precision.dtype == "fp16"),
        "optimizer.name": ("adam, adamw or sgd", plan.optimizer.name == "muon"),
        "megatron.fsdp": ("none", megatron.fsdp != "none"),
        "megatron.gradient_accumulation_fusion": ("false", megatron.gradient_accumulation_fusion),
    }
    for field, (wanted, applies) in refused.items():
        if applies:
            raise PlanError(field, _value(plan, field), f"must be {wanted} {beside}, as in Megatron-Core")
    if plan.precision.gradients != plan.precision.stored:
        problem = f"must be {plan.precision.stored} {beside}, which is told no dtype but the parameters'"
        raise PlanError("precision.gradients", plan.precision.gradients, problem)
    missing: dict[str, bool] = {
        "model.experts": model.experts > 0,
        "model.latent_kv_rank": model.latent_kv_rank is not None and model.latent_kv_rank > 0,
        "model.mtp_layers": model.mtp_layers > 0,
        "model.layer_pattern": bool(model.layer_pattern),
        "model.family": model.family in ("bert", "t5"),
        "precision.fp8": plan.precision.fp8 is not None,
        "precision.fp4": plan.precision.fp4 is not None,
        "megatron.cuda_graphs": megatron.cuda_graphs != "none",
        "megatron.offload_modules": megatron.offload_modules is not None,
        "megatron.optimizer_graph": megatron.optimizer_graph,
        "megatron.distribute_saved": megatron.distribute_saved,
        "megatron.registers_buffers": megatron.registers_buffers,
        "megatron.clips_queries": megatron.clips_queries,
        "megatron.packed": megatron.packed,
        "recompute.layers": plan.recompute.mode == "full"
        and plan.recompute.method == "uniform"
        and (plan.recompute.layers or 1) > 1,
    }
    for field, applies in missing.items():
        if applies:
            problem = f"must be {'1' if field == 'recompute.layers' else 'left out'} {beside}: it is not modelled yet"
            raise PlanError(field, _value(plan, field), problem)
    buffers = {
        "buckets": None, "bucket_size": None, "pad_buckets": False, "sums_in_fp32": False, "fp32_gradients_of": None
    }  # fmt: skip
    for name, default in buffers.items():
        if (value := getattr(megatron, name)) != default:
            problem = f"must be left out {beside}: it belongs to Megatron's own buffers of gradients"
            raise PlanError(f"megatron.{name}", list(value) if isinstance(value, tuple) else value, problem)


def _value(plan: ResolvedPlan, field: str) -> Any:
    section, _, name = field.partition(".")
    value = getattr(getattr(plan, section), name)
    return list(value) if isinstance(value, tuple) else value


def check_decoder(plan: ResolvedPlan) -> None:
    """An encoder-decoder, as far as it is modelled: ``pretrain_t5.py`` itself refuses a pipeline."""
    t5, seq = plan.model.family == "t5", plan.batch.decoder_seq
    if t5 is (seq is None):
        problem = (
            "is needed with family t5 (--decoder-seq)"
            if t5
            else f"must be left out: {plan.model.name} has no decoder of its own"
        )
        raise PlanError("batch.decoder_seq", ABSENT if t5 else seq, problem)
    if not t5:
        return
    for name in ("pp", "vpp", "cp"):
        if getattr(plan.layout, name) > 1:
            problem = "must be 1 with family t5" + (", which has no pipeline" if name != "cp" else "")
            raise PlanError(f"layout.{name}", getattr(plan.layout, name), problem)
    if plan.recompute.mode == "full":
        raise PlanError("recompute.mode", "full", "must be none or selective with family t5: no more is modelled yet")
    if plan.megatron.fsdp != "none":
        raise PlanError("megatron.fsdp", plan.megatron.fsdp, "must be none with family t5: it is not modelled yet")


def check_kernels(plan: ResolvedPlan) -> None:
    """Implementations of the layers, and the attention and losses that each has."""
    megatron, field = plan.megatron, "megatron.attention_backend"
    if megatron.deterministic and megatron.cross_entropy_fusion != "none":
        problem = "must be none with megatron.deterministic: fused cross entropy is not deterministic"
        raise PlanError("megatron.cross_entropy_fusion", megatron.cross_entropy_fusion, problem)
    local, back_end = megatron.transformer_impl == "local", megatron.attention_backend
    if back_end == "local" and not local:
        raise PlanError(
            field, "local", "must be auto, flash, fused or unfused with transformer_impl transformer_engine"
        )
    if local and back_end in ("flash", "fused"):
        problem = "must be auto, unfused or local with transformer_impl local: local layers have their own attention"
        raise PlanError(field, back_end, problem)
    wanted = "eager" if keeps_scores(megatron) else "flash"
    if plan.attention != wanted:
        what = "transformer_impl local" if local else f"attention_backend {back_end}"
        raise PlanError("attention", plan.attention, f"must be {wanted} with {what}")


def check_hybrid(plan: ResolvedPlan) -> None:
    """A hybrid, as far as it is modelled; its stages follow from the pattern."""
    model, megatron = plan.model, plan.megatron
    if model.activation == "relu2" and model.mlp_bias and megatron.bias_gelu_fusion:
        raise PlanError("megatron.bias_gelu_fusion", True, "must be false with relu2 and biases, which it does not add")
    if "M" not in model.layer_pattern + model.mtp_pattern:
        for name in ("mamba_apart", "mamba_states"):
            if value := getattr(megatron, name):
                raise PlanError(f"megatron.{name}", value, "must be left out: the model has no Mamba-2 layers")
    if not model.layer_pattern:
        return
    if megatron.offload_modules is not None:
        problem = "must be left out with a hybrid: its activations on the host are not modelled yet"
        raise PlanError("megatron.offload_modules", list(megatron.offload_modules), problem)
    if "M" in model.layer_pattern + model.mtp_pattern:
        _check_mamba(plan)


def _check_mamba(plan: ResolvedPlan) -> None:
    """How ranks share heads and groups (``MambaMixer`` and ``MambaContextParallel``, ``__init__``)."""
    tp, cp, heads, groups = plan.layout.tp, plan.layout.cp, plan.model.mamba_heads, plan.model.mamba_groups
    if heads % tp or groups % tp:
        raise PlanError("layout.tp", tp, f"must divide the {heads} Mamba heads and their groups ({groups})")
    if heads // tp % cp:
        raise PlanError("layout.cp", cp, f"must divide the {heads // tp} Mamba heads of a rank")
    if groups // tp % cp and cp % (groups // tp):
        problem = f"must divide the {groups // tp} groups of Mamba heads of a rank, or be divided by them"
        raise PlanError("layout.cp", cp, problem)


def check_modules(plan: ResolvedPlan) -> None:
    """Precision that differs from module to module, as far as it is modelled."""
    given, model = plan.megatron.precision_of, plan.model
    if given is None:
        return
    reasons = {
        "must be left out without precision.fp8 or fp4": plan.precision.low is None,
        "must be left out with delayed scaling, beside which it is not modelled yet": plan.precision.low == "delayed",
        "must be left out with precision.fp8_parameters, beside which it is not modelled yet": (
            plan.precision.fp8_parameters
        ),
        "must leave experts as they are (a pattern before it that ends in =low, such as *.experts.*=low): 16 bits in "
        "experts alone are not modelled yet": bool(model.experts)
        and any(not wide_modules(given, at).isdisjoint(EXPERTS) for at in range(model.layers)),
        "must be left out with experts.overlap_exchange or delay_wgrad, beside which it is not modelled yet": (
            plan.experts.overlap_exchange or plan.experts.delay_wgrad
        ),
        "must be left out with multi-token prediction, of which it is not modelled yet": bool(model.mtp_layers),
        "must be left out with megatron.tp_comm_overlap, beside which it is not modelled yet": (
            plan.megatron.tp_comm_overlap
        ),
        "must be left out with local layers: Transformer Engine's have it": plan.megatron.transformer_impl == "local",
        "must be left out with layers that differ (model.layer_blocks), of which it is not modelled yet": bool(
            model.layer_blocks
        ),
        "must be left out: only GPT and hybrids have it": model.family in ("bert", "t5"),
    }
    for problem, applies in reasons.items():
        if applies:
            raise PlanError("megatron.precision_of", list(given), problem)


def check_blocks(plan: ResolvedPlan) -> None:
    """How tensor-parallel ranks share layers that differ (``attention.py``, ``mlp.py``, ``linear_replacements.py``)."""
    model, layout, megatron = plan.model, plan.layout, plan.megatron
    if model.layer_blocks and megatron.fsdp != "none":
        problem = "must be none with layers that differ (model.layer_blocks), whose units are not modelled yet"
        raise PlanError("megatron.fsdp", megatron.fsdp, problem)
    if model.layer_blocks and megatron.clips_queries:
        problem = "must be false with layers that differ (model.layer_blocks), of which it is not modelled yet"
        raise PlanError("megatron.clips_queries", True, problem)
    for text in kinds_of(model.layer_blocks):
        own = block_of(text)
        if own.kv_heads and own.kv_heads % layout.tp and layout.tp % own.kv_heads:
            problem = f"must divide the {own.kv_heads} key/value heads of layers {text}, or be a multiple of them"
            raise PlanError("layout.tp", layout.tp, problem)
        if own.ffn % layout.tp:
            raise PlanError("layout.tp", layout.tp, f"must divide the {own.ffn} features of the MLP of layers {text}")
        if LINEAR in own.replaced and layout.tp > 1 and layout.sequence_parallel:
            problem = f"must be false with linear layers (model.layer_blocks {text}): Megatron-Core stops, because it "
            raise PlanError("layout.sequence_parallel", True, f"{problem}adds zeros to tokens instead of features")
        if LINEAR in own.replaced and plan.megatron.tp_comm_overlap:
            problem = f"must be false with linear layers (model.layer_blocks {text}), which have no user buffers"
            raise PlanError("megatron.tp_comm_overlap", True, problem)


def check_groups(plan: ResolvedPlan) -> None:
    """Tensor-parallel ranks share key/value heads out, or several have one (``transformer_config.py``)."""
    groups, tp = plan.model.kv_heads, plan.layout.tp
    if groups % tp and tp % groups:
        problem = f"must divide the {groups} key/value heads, or be a multiple of them"
        raise PlanError("layout.tp", tp, problem)


def check_context_parallel(plan: ResolvedPlan) -> None:
    megatron, cp = plan.megatron, plan.layout.cp
    if megatron.transformer_impl == "local" and cp > 1:
        raise PlanError("layout.cp", cp, "must be 1 with transformer_impl local")
    heads = max(min(plan.model.heads, plan.model.kv_heads) // plan.layout.tp, 1)
    if megatron.cp_communication == "a2a" and heads % cp:
        problem = (
            f"must divide the {heads} key/value heads of a rank, because a2a distributes heads; p2p has no such limit"
        )
        raise PlanError("layout.cp", cp, problem)


def check_virtual_stages(plan: ResolvedPlan) -> None:
    for name, value in plan.pipeline.changed():
        if plan.layout.vpp == 1 and name in ("group", "overlap_p2p", "overlap_p2p_warmup"):
            raise PlanError(f"pipeline.{name}", value, "needs virtual stages (vpp > 1)")


def check_further_layers(plan: ResolvedPlan) -> None:
    """A layout string names as many layers of multi-token prediction as there are, or none."""
    layout, wanted = plan.pipeline.layout, plan.model.mtp_layers
    named = 0 if layout is None else written_out(layout).count("m")
    if layout is not None and named not in (0, wanted):
        problem = f"has {named} layers m of multi-token prediction; the model has {wanted} (mtp_layers)"
        raise PlanError("pipeline.layout", layout, problem)


def check_environment(plan: ResolvedPlan) -> None:
    """Variables that choose an attention back end say what the plan says."""
    back_end = plan.megatron.attention_backend
    for name, value in zip(SELECTORS, BACK_ENDS[back_end], strict=True):
        if plan.environment.get(name, value) != value:
            problem = f"must be {value} or left out: Megatron stops where it contradicts --attention-backend {back_end}"
            problem += f"; choose the back end there ({', '.join(BACK_ENDS)})"
            raise PlanError(f"environment.{name}", plan.environment[name], problem)


def check_optimizer(plan: ResolvedPlan) -> None:
    """Transformer Engine's (or apex') FusedAdam, with the distributed optimizer in dtypes of choice."""
    optimizer = plan.optimizer
    if not optimizer.algorithm.precision_aware:
        if plan.layout.zero == 1 and optimizer.name != "muon":
            problem = "must be adam, adamw or muon with the distributed optimizer (zero: 1): it supports no other"
            raise PlanError("optimizer.name", optimizer.name, problem)
        if optimizer.precision_aware:
            problem = f"must be false with {optimizer.name}: only FusedAdam is precision-aware"
            raise PlanError("optimizer.precision_aware", True, problem)
    _check_offload(plan)
    if optimizer.precision_aware:
        check_state_dtypes(plan)
        if plan.layout.zero != 1:
            problem = "must be false without the distributed optimizer (zero: 1)"
            raise PlanError("optimizer.precision_aware", True, problem)
        return
    for name in ("main_parameters", "exp_avg", "exp_avg_sq"):
        if getattr(optimizer, name) != "fp32":
            problem = "must be fp32 without optimizer.precision_aware (--precision-aware-optimizer)"
            raise PlanError(f"optimizer.{name}", getattr(optimizer, name), problem)
    if optimizer.fp8_recipe is not None:
        problem = "needs optimizer.precision_aware (--precision-aware-optimizer), the one optimizer that asks for it"
        raise PlanError("optimizer.fp8_recipe", optimizer.fp8_recipe, problem)


def _check_offload(plan: ResolvedPlan) -> None:
    """The optimizer's states on the host (``validate_args``); ``HybridDeviceOptimizer`` keeps them in fp32."""
    optimizer, field = plan.optimizer, "megatron.optimizer_offload"
    if not plan.megatron.optimizer_offload:
        return
    if not optimizer.precision_aware:
        problem = "must be 0 without optimizer.precision_aware, whose code Megatron-Core's offload needs"
        raise PlanError(field, plan.megatron.optimizer_offload, problem)
    for name in ("main_parameters", "exp_avg", "exp_avg_sq"):
        if getattr(optimizer, name) != "fp32":
            problem = f"must be fp32 with {field}: offloaded states have no other dtype"
            raise PlanError(f"optimizer.{name}", getattr(optimizer, name), problem)
    if plan.precision.fp8_parameters:
        problem = "must be 0 with parameters in 8 bits: their offload is not modelled yet"
        raise PlanError(field, plan.megatron.optimizer_offload, problem)


def check_offloading(plan: ResolvedPlan) -> None:
    """Activations on the host (``transformer_config.py``, ``arguments.py``): of GPT's layers of Transformer Engine."""
    field, modules, recompute = "megatron.offload_modules", plan.megatron.offload_modules, plan.recompute
    if modules is None:
        return
    again = recompute.modules or () if recompute.mode == "selective" else ()
    reasons = {
        "must be left out with local layers: Transformer Engine's have it": plan.megatron.transformer_impl == "local",
        "must be left out: only GPT's have it here": plan.model.family in ("bert", "t5")
        or bool(plan.model.layer_pattern)
        or bool(plan.model.layer_pattern),
        "must be left out with full recompute, beside which it is not modelled": recompute.mode == "full",
        "must have core_attn beside attn_proj: core attention's backward reads its output": "attn_proj" in modules
        and "core_attn" not in modules,
        "must not have expert_fc1 or moe_act, whose layer is recomputed whole (recompute.modules moe)": "moe" in again
        and not {"expert_fc1", "moe_act"}.isdisjoint(modules),
    }
    for problem, applies in reasons.items():
        if applies:
            raise PlanError(field, list(modules), problem)


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
        "must be 0 before Transformer Engine 2.10, whose offloading is another": te < (2, 10),
        "must be 0 with NVTE_CPU_OFFLOAD_V1=1, Transformer Engine's offloading before 2.10, which is not modelled": (
            plan.environment.get("NVTE_CPU_OFFLOAD_V1") == "1"
        ),
    }
    missing = {
        "another model than GPT": model.family in ("bert", "t5") or bool(model.layer_pattern),
        "experts, latent attention or multi-token prediction": bool(
            model.experts or model.latent_kv_rank or model.mtp_layers
        ),
        "fp8 and fp4": plan.precision.low is not None,
        "context parallelism": plan.layout.cp > 1,
        "unfused attention": plan.attention != "flash",
        "CUDA graphs": megatron.cuda_graphs != "none",
        "Megatron-FSDP or PyTorch's FSDP2": megatron.fsdp != "none" or megatron.torch_fsdp != "none",
        "the fuser of operations": megatron.fuses_operations,
        "norms that return the residual": megatron.norm_takes_residual,
        "MLPs in chunks": megatron.mlp_chunks > 1,
    }
    refused |= {f"must be 0 with {what}: it is not modelled yet": applies for what, applies in missing.items()}
    for problem, applies in refused.items():
        if applies:
            raise PlanError(field, count, problem)


def check_user_buffers(plan: ResolvedPlan) -> None:
    """What ``validate_args`` asks of tensor-parallel exchanges beside products."""
    if plan.megatron.tp_comm_overlap and not (plan.layout.tp > 1 and plan.layout.sequence_parallel):
        problem = "must be false without tensor and sequence parallelism (tp > 1, sequence_parallel)"
        raise PlanError("megatron.tp_comm_overlap", True, problem)
    if plan.megatron.tp_comm_overlap and plan.megatron.transformer_impl == "local":
        raise PlanError("megatron.tp_comm_overlap", True, "must be false with local layers: Transformer Engine has it")


def check_buckets(plan: ResolvedPlan) -> None:
    """``DistributedDataParallelConfig.__post_init__``, ``validate_args``; Megatron-FSDP has buckets of its own."""
    megatron = plan.megatron
    if megatron.gather_in_step and not (plan.layout.vpp > 1 and plan.layout.zero and megatron.overlap_param_gather):
        problem = "needs virtual stages, the distributed optimizer and overlap_param_gather"
        raise PlanError("megatron.gather_in_step", True, problem)
    _check_fp32_sums(plan)
    _check_registration(plan)
    if megatron.buckets is None:
        return
    if megatron.bucket_size is not None:
        raise PlanError("megatron.buckets", megatron.buckets, "must be left out with megatron.bucket_size")
    if megatron.fsdp != "none":
        raise PlanError("megatron.buckets", megatron.buckets, "must be left out with Megatron-FSDP (megatron.fsdp)")


def _check_fp32_sums(plan: ResolvedPlan) -> None:
    """``_ParamAndGradBucketGroup.__init__``, ``DistributedDataParallelConfig.__post_init__``."""
    megatron = plan.megatron
    if megatron.fp32_gradients_of is not None and plan.precision.gradients == "fp32":
        problem = "must be left out with gradients in fp32, as in Megatron-Core"
        raise PlanError("megatron.fp32_gradients_of", list(megatron.fp32_gradients_of), problem)
    field = "megatron.fp32_gradients_of" if megatron.fp32_gradients_of is not None else "megatron.sums_in_fp32"
    if (megatron.sums_in_fp32 or megatron.fp32_gradients_of is not None) and megatron.fsdp != "none":
        raise PlanError(field, True, "must be left out with Megatron-FSDP, which sums gradients itself")
    if not megatron.sums_in_fp32:
        return
    if megatron.distributed_optimizer_instances > 1:
        problem = "must be false with several distributed_optimizer_instances, as in Megatron-Core"
        raise PlanError("megatron.sums_in_fp32", True, problem)
    if megatron.overlap_grad_reduce and plan.layout.vpp > 1 and plan.precision.gradients != "fp32":
        problem = "must be false with overlap_grad_reduce and virtual stages, with which it is not modelled yet"
        raise PlanError("megatron.sums_in_fp32", True, problem)


def _check_registration(plan: ResolvedPlan) -> None:
    """``DistributedDataParallelConfig.__post_init__``; ``nccl_allocator.py``."""
    field, megatron = "megatron.registers_buffers", plan.megatron
    if not megatron.registers_buffers:
        return
    segments = "expandable_segments:True" in plan.environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if segments and tuple(int(part) for part in plan.torch.split(".")[:2]) < (2, 11):
        raise PlanError(field, True, "must be false with expandable segments before PyTorch 2.11, as in Megatron-Core")
    if megatron.fsdp != "none":
        raise PlanError(
            field,
            True,
            "must be false with Megatron-FSDP, whose buffers from NCCL (--use-nccl-ub) are not modelled yet",
        )


def check_graphs(plan: ResolvedPlan) -> None:
    """CUDA graphs (``transformer_config.py``, ``arguments.py``), of Transformer Engine's layers."""
    megatron, modules, field = plan.megatron, plan.megatron.cuda_graph_modules, "megatron.cuda_graphs"
    if megatron.cuda_graphs == "none" or (modules is not None and megatron.cuda_graphs == "full_iteration"):
        if modules is not None:
            problem = "must be left out without cuda_graphs: transformer_engine"
            raise PlanError("megatron.cuda_graph_modules", list(modules), problem)
        return
    layers = megatron.cuda_graphs == "transformer_engine"
    segments = "expandable_segments:True" in plan.environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    whole = not modules or "moe" in modules
    reasons = {
        "must be none with local layers": megatron.transformer_impl == "local",
        "must be none: graphs of other models than GPT and hybrids are not modelled": plan.model.family
        in ("bert", "t5"),
        "must be none with Megatron-FSDP, beside which graphs are not modelled yet": megatron.fsdp != "none",
        "must be none with activations on the host, beside which graphs are not modelled yet": megatron.offload_modules
        is not None,
        "needs NCCL_GRAPH_REGISTER=0 beside expandable segments, as Megatron-Core does": layers
        and segments
        and plan.environment.get("NCCL_GRAPH_REGISTER") != "0",
        "needs cuda_graph_modules without moe, or experts padded to a capacity (pad_to_capacity)": layers
        and whole
        and plan.model.experts > 0
        and not plan.experts.pad_to_capacity,
    }
    for problem, applies in reasons.items():
        if applies:
            raise PlanError(field, megatron.cuda_graphs, problem)


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
    for problem, applies in reasons.items():
        if megatron.optimizer_graph and applies:
            raise PlanError(field, True, problem)


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
        "must be false with family t5, of which it is not modelled yet": plan.model.family == "t5",
    }
    for problem, applies in reasons.items():
        if applies:
            raise PlanError("megatron.distribute_saved", True, problem)


def check_deferral(plan: ResolvedPlan) -> None:
    """What ``model_parallel_config.py`` asks of deferred weight gradients of the head."""
    megatron, field = plan.megatron, "megatron.defer_embedding_wgrad"
    if not megatron.defer_embedding_wgrad:
        if megatron.wgrad_deferral_limit:
            raise PlanError(
                "megatron.wgrad_deferral_limit", megatron.wgrad_deferral_limit, f"must be 0 without {field}"
            )
        return
    if plan.layout.pp == 1:
        raise PlanError(field, True, "must be false without pipeline parallelism (pp > 1), as in Megatron-Core")
    if not megatron.gradient_accumulation_fusion:
        raise PlanError(field, True, "must be false without gradient_accumulation_fusion, as in Megatron-Core")
    if megatron.fsdp != "none" or plan.model.mtp_layers:
        problem = "must be false with Megatron-FSDP or multi-token prediction, beside which it is not modelled"
        raise PlanError(field, True, problem)


def check_state_dtypes(plan: ResolvedPlan) -> None:
    """What FusedAdam keeps states in (``fused_adam.py``, ``__init__``)."""
    optimizer, te = plan.optimizer, tuple(int(part) for part in plan.megatron.transformer_engine.split(".")[:2])
    if plan.precision.dtype == "fp32":
        problem = "must be false with fp32 parameters: precision-aware states of fp32 parameters are not modelled"
        raise PlanError("optimizer.precision_aware", True, problem)
    if optimizer.main_parameters not in ("fp32", "fp16"):
        raise PlanError("optimizer.main_parameters", optimizer.main_parameters, "must be fp32 or fp16")
    for name in ("exp_avg", "exp_avg_sq"):
        if getattr(optimizer, name) == "bf16" and te < (2, 3):
            raise PlanError(f"optimizer.{name}", "bf16", "must be fp32, fp16 or fp8 before Transformer Engine 2.3")


def _possible(plan: ResolvedPlan, ranks: int, etp: int) -> str:
    """What to write in place of an ``ep`` that ``ranks`` cannot be divided into, ``etp`` ranks for each expert."""
    ep, tp, experts = plan.layout.ep, plan.layout.tp, plan.model.experts
    works = [size for size in range(1, ranks // etp + 1) if ranks % (size * etp) == 0 and experts % size == 0]
    narrow = "; --etp 1 allows this one (etp is tp where none is given)" if etp == tp > 1 and ranks % ep == 0 else ""
    return (
        f": ep {', '.join(map(str, works[-4:]))} {'works' if len(works) == 1 else 'work'}{narrow}" if works else narrow
    )


def check_experts(plan: ResolvedPlan) -> None:
    """How experts are divided over ranks (``parallel_state.py``), and what depends on there being any."""
    model, layout, given = plan.model, plan.layout, plan.experts
    ranks, etp = layout.tp * layout.cp * layout.dp, layout.etp or layout.tp
    if not model.experts:
        for name, value in (("ep", layout.ep), ("etp", layout.etp or 1)):
            if value > 1:
                raise PlanError(f"layout.{name}", value, f"must be 1: {model.name} has no experts")
        for name, value in given.changed():
            raise PlanError(f"experts.{name}", value, f"must be left out: {model.name} has no experts")
        return
    if model.experts % layout.ep:
        raise PlanError("layout.ep", layout.ep, f"must divide the {model.experts} experts of {model.name}")
    if ranks % (layout.ep * etp):
        problem = f"times etp {etp} must divide tp x cp x dp = {ranks}, the ranks of a pipeline stage"
        raise PlanError("layout.ep", layout.ep, f"{problem}{_possible(plan, ranks, etp)}")
    if model.expert_ffn % etp:
        raise PlanError("layout.etp", etp, f"must divide the {model.expert_ffn} features of an expert (expert_ffn)")
    if model.shared_expert_ffn % layout.tp:
        problem = f"must divide the {model.shared_expert_ffn} features of shared experts (shared_expert_ffn)"
        raise PlanError("layout.tp", layout.tp, problem)
    if given.pad_to_capacity and given.capacity_factor is None:
        raise PlanError("experts.pad_to_capacity", True, "needs experts.capacity_factor")
    instances = plan.megatron.distributed_optimizer_instances
    if ranks // (layout.ep * etp) % instances:
        problem = f"must divide the {ranks // (layout.ep * etp)} replicas of each expert"
        raise PlanError("megatron.distributed_optimizer_instances", instances, problem)
    check_imbalance(plan)


def check_overlap(plan: ResolvedPlan) -> None:
    """The exchange of tokens beside another micro-batch's computation (``transformer_config.py``, ``arguments.py``,
    ``mcore_fsdp_adapter.py``), as far as it is modelled."""
    given, megatron, recompute = plan.experts, plan.megatron, plan.recompute
    _check_delays(plan, _version(megatron.transformer_engine))
    if not given.overlap_exchange:
        for name in ("delay_wgrad", "early_attention_release"):
            if getattr(given, name):
                raise PlanError(f"experts.{name}", True, "must be false without experts.overlap_exchange")
        return
    field, whole = "experts.overlap_exchange", megatron.fsdp == "optim_grads_params"
    modules = recompute.modules or () if recompute.mode == "selective" else ()
    reasons = {
        "must be false without expert parallelism (ep > 1)": plan.layout.ep == 1,
        "must be false without interleaved stages (vpp > 1) where there is a pipeline": plan.layout.pp > 1
        and plan.layout.vpp == 1,
        "must be false with the allgather dispatcher": given.dispatcher == "allgather",
        "must be false with the flex dispatcher, beside which it is not modelled yet": given.dispatcher == "flex",
        "must be false with full recompute": recompute.mode == "full",
        "must be false while experts are recomputed (recompute.modules moe)": "moe" in modules,
        "must be false with experts.shared_expert_overlap": given.shared_expert_overlap,
        "must be false with fp32: bf16 and fp16 have it": plan.precision.dtype == "fp32",
        "must be false with more than one layer of multi-token prediction": plan.model.mtp_layers > 1,
        "must be false before PyTorch 2.6, with which it hangs": _version(plan.torch) < (2, 6),
        "must be false with CUDA graphs, beside which it is not modelled yet": megatron.cuda_graphs != "none",
        "must be false with activations on the host, beside which it is not modelled yet": megatron.offload_modules
        is not None,
        "must be false for hybrids, of which it is not modelled yet": bool(plan.model.layer_pattern),
        "must be false with deferred weight gradients of the head, beside which it is not modelled yet": (
            megatron.defer_embedding_wgrad
        ),
        "must be false with norms that return the residual (megatron.norm_takes_residual), beside which it is not "
        "modelled yet": megatron.norm_takes_residual,
        "must be false with Megatron-FSDP's double buffers": megatron.fsdp_double_buffer,
        "must be false with sharded parameters (megatron.fsdp) and several micro-batches: gathers for two at once are "
        "not modelled yet": whole and plan.microbatches > 1,
    }
    for problem, applies in reasons.items():
        if applies:
            raise PlanError(field, True, problem)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def _check_delays(plan: ResolvedPlan, te: tuple[int, ...]) -> None:
    """Products for gradients of weights that run later, and the Transformer Engine that they need."""
    given, megatron = plan.experts, plan.megatron
    if given.delay_wgrad and given.wgrad_beside_dispatch:
        problem = "must be false with experts.delay_wgrad: Megatron-Core has one or the other"
        raise PlanError("experts.wgrad_beside_dispatch", True, problem)
    beside, fused = given.wgrad_beside_dispatch, megatron.gradient_accumulation_fusion or megatron.fsdp != "none"
    if beside and (given.overlap_exchange or given.dispatcher != "alltoall" or not given.grouped_gemm or not fused):
        problem = (
            "must be false with experts.overlap_exchange, a dispatcher other than alltoall or without "
            "experts.grouped_gemm, and, but for Megatron-FSDP, without gradient_accumulation_fusion"
        )
        raise PlanError("experts.wgrad_beside_dispatch", True, problem)
    for name in ("delay_wgrad", "wgrad_beside_dispatch"):
        if not getattr(given, name):
            continue
        if megatron.transformer_impl == "local":
            raise PlanError(f"experts.{name}", True, "must be false with local layers: Transformer Engine's have it")
        reasons = {
            (2, 8): "with overlap_grad_reduce" if megatron.overlap_grad_reduce and name == "delay_wgrad" else "",
            (2, 7): "" if megatron.gradient_accumulation_fusion else "without gradient_accumulation_fusion",
            (2, 3): "at all",
        }
        for least, why in reasons.items():
            if why and te < least:
                wanted = ".".join(map(str, least))
                problem = (
                    f"must be false before Transformer Engine {wanted} {why}: this plan has {'.'.join(map(str, te))}"
                )
                raise PlanError(f"experts.{name}", True, problem)


def check_imbalance(plan: ResolvedPlan) -> None:
    """One factor is of the most loaded rank; several are of each layer that has experts."""
    given, model = plan.experts, plan.model
    if given.imbalance in ("balanced", "worst"):
        return
    factors = given.imbalance.split(",")
    layers = sum(map(model.has_experts, range(model.layers)))
    if len(factors) > 1 and len(factors) != layers:
        problem = f"has {len(factors)} factors; one for each of the {layers} layers with experts is wanted"
        raise PlanError("experts.imbalance", given.imbalance, problem)
    if len(factors) == 1 and float(given.imbalance) < 1.0:
        problem = "must be balanced, worst, or a factor of at least 1: the most loaded rank has at least the mean"
        raise PlanError("experts.imbalance", given.imbalance, problem)


MULTIPLES = {"mxfp8": (32, 32), "nvfp4": (16, 16)}
"""Tokens of a micro-batch on a rank, and features, are multiples of these: else of 8 and 16
(``assert_dim_for_fp8_exec``)."""


def check_low_precision(plan: ResolvedPlan) -> None:
    """What Megatron-Core (``transformer_config.py``, ``arguments.py``) and Transformer Engine ask of fp8 and fp4."""
    given, megatron, recipe = plan.precision, plan.megatron, plan.precision.low
    if recipe is None:
        if plan.experts.router_padding:
            raise PlanError("experts.router_padding", True, "needs precision.fp8 or precision.fp4")
        return
    field = "precision.fp4" if given.fp4 else "precision.fp8"
    if megatron.transformer_impl == "local":
        raise PlanError(field, recipe, "must be left out with local layers: Transformer Engine has it")
    version = tuple(int(part) for part in megatron.transformer_engine.split(".")[:2])
    if version < OLDEST_LOW_PRECISION:
        oldest = ".".join(map(str, OLDEST_LOW_PRECISION))
        problem = f"must be {oldest} or later with {field}: older ones have other copies, which have no recipe"
        raise PlanError("megatron.transformer_engine", megatron.transformer_engine, problem)
    gpu = GPUS[plan.hardware.gpu] if plan.hardware.gpu is not None else None
    least = LOW_PRECISION_SINCE.get(recipe, (8, 9))
    if gpu is not None and gpu.compute_capability is not None and gpu.compute_capability < least:
        problem = f"must be left out on {plan.hardware.gpu}: it needs compute capability {least[0]}.{least[1]}"
        raise PlanError(field, recipe, problem)
    if megatron.fsdp != "none" and given.fp8_parameters:
        blackwell = gpu is not None and gpu.compute_capability is not None and gpu.compute_capability >= (10, 0)
        if recipe not in ("delayed", "tensorwise") or not blackwell:
            problem = (
                "must be false with Megatron-FSDP, but for delayed or tensorwise scaling on Blackwell: its buffers of "
                "transposed weights are not modelled yet"
            )
            raise PlanError("precision.fp8_parameters", True, problem)
    if given.fp8_parameters and plan.layout.zero != 1:
        raise PlanError("precision.fp8_parameters", True, "must be false without the distributed optimizer (zero: 1)")
    if given.fp8_parameters and plan.optimizer.name == "muon":
        raise PlanError("precision.fp8_parameters", True, "must be false with muon: its step in 8 bits is not modelled")
    for end in ("first", "last"):
        count = getattr(given, f"{end}_16bit_layers")
        if count and recipe == "delayed":
            problem = "must be 0 with delayed scaling: Megatron-Core refuses it"
            raise PlanError(f"precision.{end}_16bit_layers", count, problem)
        if count > plan.model.layers // plan.layout.pp:
            problem = f"must be at most {plan.model.layers // plan.layout.pp}, the layers of a stage"
            raise PlanError(f"precision.{end}_16bit_layers", count, problem)
    _check_multiples(plan, field, recipe)
    if plan.recompute.mode == "selective" and recipe == "delayed":
        for module in ("moe_act", "layernorm"):
            if module in (plan.recompute.modules or ()):
                problem = f"must not have {module} with delayed scaling: Megatron-Core refuses it"
                raise PlanError("recompute.modules", list(plan.recompute.modules or ()), problem)


def _check_multiples(plan: ResolvedPlan, field: str, recipe: str) -> None:
    model, layout = plan.model, plan.layout
    rows, columns = MULTIPLES.get(recipe, (8, 16))
    tokens = plan.batch.mbs * plan.batch.seq // layout.cp // (layout.tp if layout.sequence_parallel else 1)
    sizes = {"model.hidden": model.hidden}
    if not model.layer_blocks:
        sizes["model.ffn"] = model.ffn // layout.tp
    for text in kinds_of(model.layer_blocks):
        sizes[f"model.layer_blocks {text}"] = block_of(text).ffn // layout.tp
    if model.experts:
        sizes["model.expert_ffn"] = model.expert_ffn // (layout.etp or layout.tp)
    if tokens % rows:
        problem = f"needs a multiple of {rows} tokens on a rank; mbs x seq makes {tokens}"
        raise PlanError(field, recipe, problem)
    for name, size in sizes.items():
        if size % columns:
            raise PlanError(field, recipe, f"needs features in multiples of {columns}; {name} leaves {size} on a rank")


RULES = (
    check_low_precision,
    check_experts,
    check_overlap,
    check_optimizer,
    check_offloading,
    check_layer_offload,
    check_deferral,
    check_step_graph,
    check_saved,
    check_groups,
    check_blocks,
    check_modules,
    check_buckets,
    check_graphs,
    check_user_buffers,
    check_decoder,
    check_hybrid,
    check_distributed,
    check_sharding,
    check_torch_sharding,
    check_kernels,
    check_context_parallel,
    check_virtual_stages,
    check_further_layers,
    check_environment,
)

FRAMEWORK = Megatron()
