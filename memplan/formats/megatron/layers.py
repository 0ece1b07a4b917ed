"""Megatron-LM's arguments of implementations of layers, and of the loop around the model."""

from __future__ import annotations

from collections.abc import Callable

from ...plan.errors import ABSENT, Node, PlanError
from ...plan.plan import Plan
from ..settings import OFF, Reader, Row, elsewhere, switch
from . import channels, hybrid
from .experts import COLUMNS, INTERLEAVED
from .low_precision import FP8, PARAMETERS, RECIPE


def _implementation(reader: Reader) -> None:
    """BERT's script reads ``--spec``, GPT's ``--transformer-impl`` unless a specification of layers is named."""
    settings, path = reader.settings, "megatron.transformer_impl"
    spec = settings.words("--spec") or []
    if reader.context.family == "hybrid":
        _hybrid_spec(reader, spec)
        return
    local = bool(spec) and spec[0].value == "local"
    if reader.context.family == "bert" or local:
        chosen = Node("local" if local else "transformer_engine", settings.where("--spec"))
        reader.building.put(path, chosen, "--spec")
        return
    if spec:
        raise spec[0].wrong(
            "--spec",
            "names a specification of layers, which is not modelled; leave it out for Megatron's own, or local",
        )
    name = "--transformer-impl"
    node = settings.word(name) or Node("transformer_engine", settings.origin)
    if node.value == "inference_optimized":
        raise node.wrong(name, "is not for training; transformer_engine and local are")
    reader.building.put(path, node, name)


def _hybrid_spec(reader: Reader, spec: list[Node]) -> None:
    """``hybrid_builder`` takes layers from ``--spec`` alone, and those that there are from Transformer Engine."""
    if not spec or spec[-1].value not in hybrid.STACKS:
        given = " ".join(str(one.value) for one in spec) or ABSENT
        problem = (
            f"must be {' '.join(hybrid.SPEC)}: hybrids need a specification of layers, and others are not modelled"
        )
        raise PlanError("--spec", given, problem, origin=reader.settings.where("--spec"))
    reader.building.put("megatron.transformer_impl", Node("transformer_engine", spec[0].origin), "--spec")


def _fused_where(name: str, path: str, condition: str, wanted: object, when: Callable[[Plan], bool]) -> Row:
    """A fusion that ``name`` turns off; there is one where the model's field ``condition`` is ``wanted``."""

    def read(reader: Reader) -> None:
        there = reader.building.items[condition].value == wanted and not reader.settings.has(name)
        reader.building.put(path, Node(there, reader.settings.where(name)), name)

    return switch(name, path, "LAYERS", OFF, read=read, when=when)


def _softmax(reader: Reader) -> None:
    names = ("--attention-softmax-in-fp32", "--apply-query-key-layer-scaling")
    wide = any(map(reader.settings.has, names))
    reader.building.put("megatron.attention_softmax_in_fp32", Node(wide, reader.settings.where(*names)), *names)


def _fused_loss(reader: Reader) -> None:
    settings = reader.settings
    fused, whose = "--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl"
    kind = settings.word(whose) or Node("native", settings.where(fused))
    kind = kind if settings.has(fused) else Node("none", settings.origin)
    reader.building.put("megatron.cross_entropy_fusion", kind, fused, whose)


def _check_for_nan(reader: Reader) -> None:
    """Dynamic loss scaling turns it off by itself."""
    settings, name = reader.settings, "--no-check-for-nan-in-loss-and-grad"
    scale = settings.number("--loss-scale")
    dynamic = settings.has("--fp16") and not (scale is not None and scale.value)
    checks = Node(not (settings.has(name) or dynamic), settings.where(name, "--fp16"))
    reader.building.put("megatron.check_for_nan", checks, name)


def _wide_gradients(reader: Reader) -> None:
    name = "--ddp-param-name-patterns-for-fp32-local-accumulation"
    patterns = reader.settings.words(name)
    if patterns:
        reader.building.put("megatron.fp32_gradients_of", Node(patterns, reader.settings.where(name)), name)


def _packing(reader: Reader) -> None:
    """``pretrain_gpt.py``: conversations, or documents of a text; the former want no attention mask of the data loader
    (``SFTDataset``)."""
    settings, names = reader.settings, ("--sft", "--dataloader-inter-document-masking")
    if not any(map(settings.has, names)):
        return
    if reader.context.family not in ("gpt", "hybrid"):
        reader.building.because(names, "not read by this model's script")
        return
    without = "--no-create-attention-mask-in-dataloader"
    if settings.has(names[0]) and not any(map(settings.has, (without, names[1]))):
        raise settings.wrong(names[0], f"needs {without}: Megatron stops with a mask of packed conversations")
    given = next(filter(settings.has, names))
    reader.building.put("megatron.packed", Node(True, settings.where(given)), *filter(settings.has, names))


CHAIN = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"


def _fuser(reader: Reader) -> None:
    """Of a model with experts its dense MLPs are as without it (``get_gpt_decoder_layer_specs``); its experts are a
    chain of operations, which is modelled where it is one of Blackwell's kernels in MXFP8."""
    settings, name = reader.settings, "--use-transformer-engine-op-fuser"
    if not settings.has(name):
        return
    if reader.building.items["model.experts"].value and not _chains(reader):
        said = f"{name} is not modelled yet with experts, and may push memory either way: their products and activation"
        where = f"parameters in MXFP8 and {CHAIN}=1"
        reader.building.note("argument-not-modelled", f"{said} are other operations then; with {where} it is modelled")
        reader.building.because(name, f"not modelled yet with experts without {where}: estimated as without it")
        return
    reader.building.put("megatron.fuses_operations", Node(True, settings.where(name)), name)


def _chains(reader: Reader) -> bool:
    """Experts meet what ``fuse_grouped_mlp_ops`` asks of them in Transformer Engine."""
    settings, given = reader.settings, (reader.context.environment or {}).get(CHAIN)
    recipe, interleaved = settings.word(RECIPE), settings.integer(COLUMNS)
    return (
        given is not None
        and str(given.value) != "0"
        and settings.has(FP8)
        and settings.has(PARAMETERS)
        and recipe is not None
        and recipe.value == "mxfp8"
        and (not settings.has("--swiglu") or (interleaved is not None and interleaved.value == INTERLEAVED))
        and settings.has("--disable-bias-linear")
    )


def _sharp(reader: Reader) -> None:
    settings, name, which = reader.settings, "--use-sharp", "--sharp-enabled-group"
    if not settings.has(name):
        return
    group = settings.word(which)
    if group is not None and group.value == "dp_replica":
        raise group.wrong(which, "is not modelled yet; dp is")
    reader.building.put("megatron.sharp", Node(True, settings.where(name)), name)


def _is_bert(plan: Plan) -> bool:
    return plan.model.family == "bert"


def _fuses_loss(plan: Plan) -> bool:
    return plan.megatron.cross_entropy_fusion != "none"


def _without_ranks(reader: Reader) -> str:
    return "no effect with one tensor-parallel rank" if reader.building.size("layout.tp") == 1 else ""


LAYERS = (
    Row(
        "--spec",
        "megatron.transformer_impl",
        "LAYERS",
        read=_implementation,
        when=lambda plan: hybrid.is_hybrid(plan) or (_is_bert(plan) and plan.megatron.transformer_impl == "local"),
        value=lambda plan: hybrid.SPEC if hybrid.is_hybrid(plan) else "local",
    ),
    Row(
        "--transformer-impl",
        "megatron.transformer_impl",
        "LAYERS",
        read=elsewhere,
        when=lambda plan: not _is_bert(plan),
    ),
    Row(
        "--attention-backend",
        "megatron.attention_backend",
        "LAYERS",
        "word",
        when=lambda plan: plan.megatron.attention_backend != "auto",
    ),
    switch("--deterministic-mode", "megatron.deterministic", "LAYERS"),
    switch("--no-gradient-accumulation-fusion", "megatron.gradient_accumulation_fusion", "LAYERS", OFF),
    _fused_where(
        "--no-bias-gelu-fusion",
        "megatron.bias_gelu_fusion",
        "model.mlp_bias",
        True,
        lambda plan: plan.model.mlp_bias and plan.model.activation != "swiglu",
    ),
    switch(
        "--no-bias-swiglu-fusion",
        "megatron.bias_swiglu_fusion",
        "LAYERS",
        OFF,
        when=lambda plan: plan.model.activation == "swiglu",
    ),
    switch("--no-bias-dropout-fusion", "megatron.bias_dropout_fusion", "LAYERS", OFF),
    _fused_where(
        "--no-rope-fusion",
        "megatron.rope_fusion",
        "model.positions",
        "rotary",
        lambda plan: plan.model.positions == "rotary",
    ),
    switch("--no-masked-softmax-fusion", "megatron.masked_softmax_fusion", "LAYERS", OFF),
    switch("--rotary-interleaved", "megatron.rotary_interleaved", "LAYERS"),
    switch("--apply-query-key-layer-scaling", "megatron.query_key_layer_scaling", "LAYERS"),
    switch(
        "--attention-softmax-in-fp32",
        "megatron.attention_softmax_in_fp32",
        "LAYERS",
        read=_softmax,
        when=lambda plan: not plan.megatron.query_key_layer_scaling,
    ),
    switch("--fp32-residual-connection", "megatron.fp32_residual", "LAYERS"),
    switch("--no-clone-scatter-output-in-embedding", "megatron.clone_scattered_embedding", "LAYERS", OFF),
    switch("--log-max-attention-logit", "megatron.largest_logit", "LAYERS"),
    switch("--sft", "megatron.packed", read=_packing),
    switch("--dataloader-inter-document-masking", "megatron.packed", "LAYERS", read=elsewhere),
    switch("--use-te-activation-func", "megatron.te_activation", "LAYERS"),
    switch("--use-transformer-engine-op-fuser", "megatron.fuses_operations", "LAYERS", read=_fuser),
    switch("--qk-clip", "megatron.clips_queries", "LAYERS"),
    switch("--fused-residual-rmsnorm", "megatron.norm_takes_residual", "LAYERS"),
    Row(
        "--output-logit-dtype",
        "megatron.logits_dtype",
        "LAYERS",
        "word",
        when=lambda plan: plan.megatron.logits_dtype is not None,
    ),
    Row(
        "--mlp-chunks-for-training",
        "megatron.mlp_chunks",
        "LAYERS",
        when=lambda plan: plan.megatron.mlp_chunks > 1,
    ),
    switch("--calculate-per-token-loss", "megatron.per_token_loss", "LAYERS"),
    switch("--no-create-attention-mask-in-dataloader", "megatron.attention_mask_in_dataloader", "LAYERS", OFF),
    switch(
        "--cross-entropy-loss-fusion", "megatron.cross_entropy_fusion", "LAYERS", read=_fused_loss, value=_fuses_loss
    ),
    Row("--cross-entropy-fusion-impl", "megatron.cross_entropy_fusion", "LAYERS", read=elsewhere, when=_fuses_loss),
    switch("--use-nccl-ub", "megatron.registers_buffers", "REDUCTION"),
    switch("--use-sharp", "megatron.sharp", "REDUCTION", read=_sharp),
    Row("--nccl-communicator-config-path", "megatron.nccl_blocks", read=channels.read),
    switch("--ddp-reduce-scatter-with-fp32-accumulation", "megatron.sums_in_fp32", "REDUCTION"),
    Row(
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        "megatron.fp32_gradients_of",
        "REDUCTION",
        read=_wide_gradients,
        value=lambda plan: plan.megatron.fp32_gradients_of or (),
        when=lambda plan: plan.megatron.fp32_gradients_of is not None,
    ),
    switch("--ddp-pad-buckets-for-high-nccl-busbw", "megatron.pad_buckets", "REDUCTION"),
    switch(
        "--tp-comm-overlap",
        "megatron.tp_comm_overlap",
        "REDUCTION",
        without_effect=_without_ranks,
    ),
    switch("--optimizer-cuda-graph", "megatron.optimizer_graph", "REDUCTION"),
    Row(
        "--empty-unused-memory-level",
        "megatron.empty_cache",
        "REDUCTION",
        when=lambda plan: plan.megatron.empty_cache > 0,
    ),
    switch("--distribute-saved-activations", "megatron.distribute_saved", "LAYERS"),
    switch("--defer-embedding-wgrad-compute", "megatron.defer_embedding_wgrad", "REDUCTION"),
    Row(
        "--wgrad-deferral-limit",
        "megatron.wgrad_deferral_limit",
        "REDUCTION",
        when=lambda plan: plan.megatron.wgrad_deferral_limit > 0,
    ),
    switch("--overlap-grad-reduce", "megatron.overlap_grad_reduce", "REDUCTION"),
    switch("--overlap-param-gather", "megatron.overlap_param_gather", "REDUCTION"),
    Row("--ddp-bucket-size", "megatron.bucket_size", "REDUCTION"),
    Row("--ddp-num-buckets", "megatron.buckets", "REDUCTION", when=lambda plan: plan.megatron.buckets is not None),
    switch("--overlap-param-gather-with-optimizer-step", "megatron.gather_in_step", "REDUCTION"),
    switch("--log-num-zeros-in-grad", "megatron.log_num_zeros_in_grad", "REDUCTION"),
    switch("--log-params-norm", "megatron.log_params_norm", "REDUCTION"),
    switch(
        "--no-check-for-nan-in-loss-and-grad",
        "megatron.check_for_nan",
        "REDUCTION",
        OFF,
        read=_check_for_nan,
        when=lambda plan: plan.precision.dtype != "fp16",
    ),
)
