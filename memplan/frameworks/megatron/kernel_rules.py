"""Rules of kernels, modules, buffers and low precision."""

from __future__ import annotations

from ...device.gpus import GPUS
from ...layers.megatron_core import te_low_context
from ...layers.megatron_core.te_facts import LOW_PRECISION_SINCE, OLDEST_LOW_PRECISION
from ...plan.checks import listed
from ...plan.errors import PlanError
from ...plan.megatron_section import Megatron as MegatronSection
from ...plan.module_precision import EXPERTS, FURTHER, wide_modules, widens_further
from ...plan.plan import ResolvedPlan
from ...plan.spec import block_of, kinds_of
from .from_plan import OF_ATTENTION, low_attention, padded_vocab

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


def keeps_scores(megatron: MegatronSection) -> bool:
    """Whether the attention holds its scores in memory."""
    return megatron.transformer_impl == "local" or megatron.attention_backend in ("unfused", "local")


def check_kernels(plan: ResolvedPlan) -> None:
    """Implementations of the layers, and the attention and losses that each has."""
    megatron, field = plan.megatron, "megatron.attention_backend"
    if megatron.deterministic and megatron.cross_entropy_fusion != "none":
        raise plan.wrong(
            "megatron.cross_entropy_fusion",
            "must be none with megatron.deterministic: fused cross entropy is not deterministic",
        )
    local, back_end = megatron.transformer_impl == "local", megatron.attention_backend
    plan.refuse(
        (
            field,
            back_end == "local" and not local,
            "must be auto, flash, fused or unfused with transformer_impl transformer_engine",
        ),
        (
            field,
            local and back_end in ("flash", "fused"),
            "must be auto, unfused or local with transformer_impl local: local layers have their own attention",
        ),
    )
    _check_package(plan)
    wanted = "eager" if keeps_scores(megatron) else "flash"
    if plan.attention != wanted:
        what = "transformer_impl local" if local else f"attention_backend {back_end}"
        goes = (
            "" if local else f"; --attention-backend {'auto' if wanted == 'eager' else 'unfused'} goes with the other"
        )
        raise plan.wrong("attention", f"must be {wanted} with {what}{goes}")


def _check_package(plan: ResolvedPlan) -> None:
    """What of later releases of flash-attention is not modelled."""
    megatron, model = plan.megatron, plan.model
    refused = {
        "must be 2 with transformer_impl local: Transformer Engine has it": megatron.transformer_impl == "local",
        "must be 2 with packed sequences (megatron.packed): that combination is not modelled yet": megatron.packed,
        "must be 2 with latent attention: that combination is not modelled yet": bool(model.latent_kv_rank),
        "must be 2 or 4 with context parallelism, where 3 is not modelled yet (Transformer Engine takes 2 where "
        "4 is installed)": plan.layout.cp > 1 and megatron.flash_attention == "3",
    }
    if megatron.flash_attention != "2":
        plan.refuse_for("megatron.flash_attention", refused)


def check_modules(plan: ResolvedPlan) -> None:
    """Precision that differs from module to module, as far as it is modelled."""
    given, model = plan.megatron.precision_of, plan.model
    if given is None:
        return
    reasons = {
        "must be left out without precision.fp8 or fp4": plan.precision.low is None,
        "must be left out with delayed scaling: that combination is not modelled yet": plan.precision.low == "delayed",
        "must be left out with precision.fp8_parameters: that combination is not modelled yet": (
            plan.precision.fp8_parameters
        ),
        "must leave experts as they are (a pattern before it that ends in =low, such as *.experts.*=low): 16 bits in "
        "experts alone are not modelled yet": bool(model.experts)
        and any(not wide_modules(given, at).isdisjoint(EXPERTS) for at in range(model.layers)),
        "must be left out with experts.overlap_exchange or delay_wgrad: that combination is not modelled yet": (
            plan.experts.overlap_exchange or plan.experts.delay_wgrad
        ),
        f"must have {FURTHER}, and nothing before it that ends in =low, with multi-token prediction, of whose modules "
        "other precision is not modelled yet": model.mtp_layers > 0 and not widens_further(given),
        "must be left out with megatron.tp_comm_overlap: that combination is not modelled yet": (
            plan.megatron.tp_comm_overlap
        ),
        "must be left out with local layers: Transformer Engine's have it": plan.megatron.transformer_impl == "local",
        "must be left out with layers that differ (model.layer_blocks): that combination is not modelled yet": bool(
            model.layer_blocks
        ),
        "must be left out: only GPT and hybrids have it": model.family in ("bert", "t5"),
    }
    plan.refuse_for("megatron.precision_of", reasons)


def check_low_attention(plan: ResolvedPlan) -> None:
    """What Transformer Engine asks of attention in 8 bits (``get_attention_backend``, ``nvte_get_fused_attn_backend``
    with cuDNN 9.21 or later), as far as it is modelled."""
    megatron, model, low = plan.megatron, plan.model, low_attention(plan)
    if not megatron.fp8_attention:
        return
    if plan.precision.low is None:
        raise plan.wrong("megatron.fp8_attention", "must be false without precision.fp8 or fp4: it scales so")
    if low is None:
        return
    recipe = low.recipe
    gpu = GPUS[plan.hardware.gpu] if plan.hardware.gpu is not None else None
    capability = (gpu.compute_capability if gpu is not None else None) or (0, 0)
    version = tuple(int(part) for part in megatron.transformer_engine.split(".")[:2])
    features, values = model.head_dim, model.value_head_dim or model.head_dim
    heads, multiple = {features, values}, 32 if recipe == "mxfp8" else 16
    blackwell = capability >= (10, 0)
    sizes = heads == {128}
    if blackwell:
        sizes = not any(size % multiple for size in heads) and features <= 192 and values <= 128
    rows = {model.heads * features, model.kv_heads * features, model.kv_heads * values}
    cut, ranks = (plan.layout.cp, 1) if megatron.cp_communication == "a2a" else (1, plan.layout.cp)
    tokens = plan.batch.seq // ranks // (2 if ranks > 1 else 1)  # a step of the ring may have half of the keys
    if ranks > 1 and model.sliding_window is not None:  # keys of a chunk and of the window before it
        tokens += model.sliding_window - 1
    whole = not tokens % 128 and not any(plan.batch.mbs * one // (plan.layout.tp * cut) % 128 for one in rows)
    reasons = {
        "must be false without a GPU of NVIDIA's (--gpu): Hopper's and Blackwell's kernels differ": capability
        == (0, 0),
        f"must be false on {plan.hardware.gpu}: its compute capability 12.0 has no such attention": (
            capability == (12, 0)
        ),
        "must be false with fp32: bf16 and fp16 have it": plan.precision.dtype == "fp32",
        f"must be false with precision {plan.precision.low} unless NVTE_DPA_FP8_RECIPE names another recipe "
        f"({', '.join(OF_ATTENTION)}): Transformer Engine has no back end for it": recipe in ("blockwise", "nvfp4"),
        f"must be false with {recipe} scaling before Blackwell: Transformer Engine finds no back end": (
            recipe != "delayed" and not blackwell
        ),
        f"must be false with heads of {' and '.join(map(str, sorted(heads)))} features: cuDNN takes 128 on Hopper, "
        f"multiples of {multiple} up to 192, of values up to 128, on Blackwell": not sizes,
        "must be false with mxfp8 scaling of other than multiples of 128 tokens and features of all heads": (
            recipe == "mxfp8" and not whole
        ),
        "must be false before Transformer Engine 2.18, whose tensors are others": version < te_low_context.OLDEST,
        "must be false with megatron.attention_backend flash or unfused, which have 16 bits": (
            megatron.attention_backend not in ("auto", "fused")
        ),
        "must be false with packed sequences (megatron.packed): Transformer Engine has no back end for both": (
            megatron.packed
        ),
        "must be false with family t5: attention to other tokens in 8 bits is not modelled yet": model.family == "t5",
        "must be false with attention dropout on Blackwell, whose backward in 8 bits cuDNN refuses then "
        "(NVTE_FP8_DPA_BWD=0: in 16 bits)": blackwell and model.attention_dropout > 0 and low.backward,
        "must be false with learned sinks and deterministic algorithms: Transformer Engine finds no back end": (
            model.attention_sinks and plan.environment.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"
        ),
        "must be false with windows or learned sinks before Blackwell: cuDNN's 8 bits do not have them there": (
            not blackwell and (model.attention_sinks or model.sliding_window is not None)
        ),
        "must be false where the largest score is returned, which cuDNN's 8 bits do not do": (
            megatron.largest_logit or megatron.clips_queries
        ),
        "must be false with megatron.precision_of: that combination is not modelled yet": (
            megatron.precision_of is not None
        ),
        "must be false with activations on the host: that combination is not modelled yet": (
            megatron.offload_modules is not None or megatron.offload_layers > 0
        ),
        "must be false with multi-token prediction: with it, only mxfp8 scaling is modelled": (
            bool(model.mtp_layers) and recipe != "mxfp8"
        ),
        "must be false where NVTE_DPA_FP8CS_O_in_F16 is set: that combination is not modelled yet": (
            "NVTE_DPA_FP8CS_O_in_F16" in plan.environment
        ),
    }
    plan.refuse_for("megatron.fp8_attention", reasons)


def check_low_output(plan: ResolvedPlan) -> None:
    """What ``GPTModel`` and ``TELMHeadColumnParallelLinear`` ask of an output layer in 8 bits, as far as it is
    modelled."""
    megatron, model = plan.megatron, plan.model
    if not megatron.fp8_output:
        return
    reasons = {
        "needs precision.fp8 mxfp8, as in Megatron-Core": plan.precision.low != "mxfp8",
        "must be false with tied embeddings, as in Megatron-Core": model.tied_embeddings,
        "must be false with megatron.defer_embedding_wgrad, as in Megatron-Core": megatron.defer_embedding_wgrad,
        "must be false with megatron.logits_dtype, as in Megatron-Core": megatron.logits_dtype is not None,
        "must be false with megatron.detaches_heads, as in Megatron-Core": megatron.detaches_heads,
        f"must be false with {model.family}: only GPT's model has it": bool(model.layer_pattern)
        or model.family in ("bert", "t5"),
        "must be false with megatron.precision_of: that combination is not modelled yet": (
            megatron.precision_of is not None
        ),
        "must be false with Megatron-FSDP and PyTorch's FSDP 2: that combination is not modelled yet": (
            megatron.fsdp != "none" or megatron.torch_fsdp != "none"
        ),
        "must be false with megatron.tp_comm_overlap: that combination is not modelled yet": megatron.tp_comm_overlap,
        f"needs a vocabulary of a multiple of 32 on a rank, not {padded_vocab(plan) // plan.layout.tp}": (
            padded_vocab(plan) // plan.layout.tp % 32 > 0
        ),
    }
    plan.refuse_for("megatron.fp8_output", reasons)


OF_LOW_ATTENTION = ("NVTE_DPA_FP8_RECIPE", "NVTE_DPA_FP8DS_AMAX_HISTLEN", "NVTE_FP8_DPA_BWD")
"""Variables with which attention in 8 bits saves or keeps other tensors."""


def check_environment(plan: ResolvedPlan) -> None:
    """Variables that choose an attention back end say what the plan says."""
    back_end = plan.megatron.attention_backend
    for name, value in zip(SELECTORS, BACK_ENDS[back_end], strict=True):
        if plan.environment.get(name, value) != value:
            problem = f"must be {value} or left out: Megatron stops where it contradicts --attention-backend {back_end}"
            said = [one for one, values in BACK_ENDS.items() if _agree(plan, values)]
            problem += f"; choose the back end there ({', '.join(said or BACK_ENDS)})"
            raise plan.wrong(f"environment.{name}", problem)


def _agree(plan: ResolvedPlan, values: tuple[str, ...]) -> bool:
    """Whether no variable of the plan contradicts ``values`` of the selectors."""
    return all(plan.environment.get(name, value) == value for name, value in zip(SELECTORS, values, strict=True))


def check_user_buffers(plan: ResolvedPlan) -> None:
    """What ``validate_args`` asks of tensor-parallel exchanges beside products."""
    plan.refuse(
        (
            "megatron.tp_comm_overlap",
            plan.megatron.tp_comm_overlap and not (plan.layout.tp > 1 and plan.layout.sequence_parallel),
            "must be false without tensor and sequence parallelism (tp > 1, sequence_parallel)",
        ),
        (
            "megatron.tp_comm_overlap",
            plan.megatron.tp_comm_overlap and plan.megatron.transformer_impl == "local",
            "must be false with local layers: Transformer Engine has it",
        ),
    )


def check_buckets(plan: ResolvedPlan) -> None:
    """``DistributedDataParallelConfig.__post_init__``, ``validate_args``; Megatron-FSDP has buckets of its own."""
    megatron = plan.megatron
    if megatron.gather_in_step and not (plan.layout.vpp > 1 and plan.layout.zero and megatron.overlap_param_gather):
        raise plan.wrong(
            "megatron.gather_in_step", "needs virtual stages, the distributed optimizer and overlap_param_gather"
        )
    _check_fp32_sums(plan)
    _check_registration(plan)
    if megatron.buckets is None:
        return
    plan.refuse(
        ("megatron.buckets", megatron.bucket_size is not None, "must be left out with megatron.bucket_size"),
        ("megatron.buckets", megatron.fsdp != "none", "must be left out with Megatron-FSDP (megatron.fsdp)"),
    )


def _check_fp32_sums(plan: ResolvedPlan) -> None:
    """``_ParamAndGradBucketGroup.__init__``, ``DistributedDataParallelConfig.__post_init__``."""
    megatron = plan.megatron
    if megatron.fp32_gradients_of is not None and plan.precision.gradients == "fp32":
        raise plan.wrong("megatron.fp32_gradients_of", "must be left out with gradients in fp32, as in Megatron-Core")
    field = "megatron.fp32_gradients_of" if megatron.fp32_gradients_of is not None else "megatron.sums_in_fp32"
    if (megatron.sums_in_fp32 or megatron.fp32_gradients_of is not None) and megatron.fsdp != "none":
        raise PlanError(field, True, "must be left out with Megatron-FSDP, which sums gradients itself")
    if not megatron.sums_in_fp32:
        return
    plan.refuse(
        (
            "megatron.sums_in_fp32",
            megatron.distributed_optimizer_instances > 1,
            "must be false with several distributed_optimizer_instances, as in Megatron-Core",
        ),
        (
            "megatron.sums_in_fp32",
            megatron.overlap_grad_reduce and plan.layout.vpp > 1 and plan.precision.gradients != "fp32",
            "must be false with overlap_grad_reduce and virtual stages: that combination is not modelled yet",
        ),
    )


def _check_registration(plan: ResolvedPlan) -> None:
    """``DistributedDataParallelConfig.__post_init__``; ``nccl_allocator.py``."""
    field, megatron = "megatron.registers_buffers", plan.megatron
    if not megatron.registers_buffers:
        return
    segments = "expandable_segments:True" in plan.environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if segments and tuple(int(part) for part in plan.torch.split(".")[:2]) < (2, 11):
        raise plan.wrong(field, "must be false with expandable segments before PyTorch 2.11, as in Megatron-Core")


def _check_sharded_bytes(plan: ResolvedPlan, recipe: str) -> None:
    """Weights in 8 bits in Megatron-FSDP's buffers (``param_and_grad_buffer.py``)."""
    megatron = plan.megatron
    whole, double = megatron.fsdp == "optim_grads_params", megatron.doubles_buffers
    reasons = {
        "must be false (no --fp4-param-gather) with Megatron-FSDP, whose buffers have a byte for each element": (
            recipe == "nvfp4"
        ),
        "must be false (no --fp8-param-gather) with megatron.fsdp no_shard (--data-parallel-sharding-strategy): "
        "Megatron-FSDP has no buffer of weights then, and its first step stops": megatron.fsdp == "no_shard",
        "must be false (no --fp8-param-gather) with blockwise scaling (--fp8-recipe) and double buffers "
        "(--fsdp-double-buffer, --use-nccl-ub): its step gathers more than two layers at once, and stops": (
            recipe == "blockwise" and whole and double and plan.model.layers > 2
        ),
        "must be false (no --fp8-param-gather) with mxfp8 (--fp8-recipe), sharded parameters and multi-token "
        "prediction (--mtp-num-layers): columns of eh_proj are not gathered": (
            recipe == "mxfp8" and whole and plan.model.mtp_layers > 0
        ),
    }
    plan.refuse_for("precision.fp8_parameters", reasons)


MULTIPLES = {"mxfp8": (32, 32), "nvfp4": (16, 16)}
"""Tokens of a micro-batch on a rank, and features, are multiples of these: else of 8 and 16
(``assert_dim_for_fp8_exec``)."""


def check_low_precision(plan: ResolvedPlan) -> None:
    """What Megatron-Core (``transformer_config.py``, ``arguments.py``) and Transformer Engine ask of fp8 and fp4."""
    given, megatron, recipe = plan.precision, plan.megatron, plan.precision.low
    if recipe is None:
        if plan.experts.router_padding:
            raise plan.wrong("experts.router_padding", "needs precision.fp8 or precision.fp4")
        return
    field = "precision.fp4" if given.fp4 else "precision.fp8"
    if megatron.transformer_impl == "local":
        raise plan.wrong(field, "must be left out with local layers: Transformer Engine has it")
    version = tuple(int(part) for part in megatron.transformer_engine.split(".")[:2])
    if version < OLDEST_LOW_PRECISION:
        oldest = ".".join(map(str, OLDEST_LOW_PRECISION))
        raise plan.wrong(
            "megatron.transformer_engine",
            f"must be {oldest} or later with {field}: older ones have other copies, which have no recipe",
        )
    gpu = GPUS[plan.hardware.gpu] if plan.hardware.gpu is not None else None
    least = LOW_PRECISION_SINCE[recipe]
    if gpu is not None and gpu.compute_capability is not None and gpu.compute_capability < least:
        runs = [one for one, since in LOW_PRECISION_SINCE.items() if gpu.compute_capability >= since]
        problem = f"must be left out on {plan.hardware.gpu}: it needs compute capability {least[0]}.{least[1]}"
        problem += f"; this GPU runs {listed([f'--fp8 {one}' for one in runs], 'and') if runs else 'none in 8 bits'}"
        raise plan.wrong(field, problem)
    if megatron.fsdp != "none" and given.fp8_parameters:
        _check_sharded_bytes(plan, recipe)
    plan.refuse(
        (
            "precision.fp8_parameters",
            given.fp8_parameters and plan.layout.zero != 1,
            "must be false without the distributed optimizer (zero: 1)",
        ),
        (
            "precision.fp8_parameters",
            given.fp8_parameters and plan.optimizer.name == "muon",
            "must be false with muon: its step in 8 bits is not modelled",
        ),
    )
    for end in ("first", "last"):
        count = getattr(given, f"{end}_16bit_layers")
        plan.refuse(
            (
                f"precision.{end}_16bit_layers",
                count and recipe == "delayed",
                "must be left out with delayed scaling: Megatron-Core refuses it",
            ),
            (
                f"precision.{end}_16bit_layers",
                count > plan.model.layers // plan.layout.pp,
                f"must be at most {plan.model.layers // plan.layout.pp}, the layers of a stage",
            ),
        )
    _check_multiples(plan, field, recipe)
    if plan.recompute.mode == "selective" and recipe == "delayed":
        for module in ("moe_act", "layernorm"):
            if module in (plan.recompute.modules or ()):
                raise plan.wrong(
                    "recompute.modules",
                    f"must not have {module} with delayed scaling: Megatron-Core refuses it",
                )


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
        raise plan.wrong(field, f"needs a multiple of {rows} tokens on a rank; mbs x seq makes {tokens}")
    for name, size in sizes.items():
        if size % columns:
            raise plan.wrong(field, f"needs features in multiples of {columns}; {name} leaves {size} on a rank")
