"""Megatron-LM's arguments as a plan: its own defaults and derivations, argument by argument.

Defaults and derivations are those of ``validate_args`` (``megatron/training/arguments.py``), of
``core_transformer_config_from_args`` (``argument_utils.py``) and of the builders (``gpt_builders.py``,
``examples/bert/pretrain_bert.py``).
"""

from __future__ import annotations

from ..errors import ABSENT, PlanError
from ..megatron_layout import virtual_stages, written_out
from ..node import Node
from .building import Building
from .megatron_model import Context, model_fields, needs, positive
from .settings import Settings

_MODULES = ("core_attn", "layernorm", "mlp")


def megatron_plan(settings: Settings, context: Context) -> Building:
    """The plan of a training that ``settings`` start."""
    building = Building(settings.origin)
    building.put("framework", Node("megatron", settings.origin))
    for step in (model_fields, _layout, _pipeline, _batch, _precision, _optimizer, _recompute, _layers, _training):
        step(building, settings, context)
    return building


def _layout(building: Building, settings: Settings, context: Context) -> None:
    for path, name in (
        ("layout.tp", "--tensor-model-parallel-size"),
        ("layout.pp", "--pipeline-model-parallel-size"),
        ("layout.cp", "--context-parallel-size"),
        ("layout.ep", "--expert-model-parallel-size"),
    ):
        node = settings.integer(name) or Node(1, settings.origin)
        positive(name, node)
        building.put(path, node, name)
    name = "--sequence-parallel"
    useful = settings.has(name) and building.items["layout.tp"].value != 1
    building.put("layout.sequence_parallel", Node(useful, settings.where(name)), name)
    distributed = settings.has("--use-distributed-optimizer")
    building.put(
        "layout.zero",
        Node(int(distributed), settings.where("--use-distributed-optimizer")),
        "--use-distributed-optimizer",
    )
    if context.gpus is not None:
        building.put("hardware.gpus", context.gpus)
    if context.gpus_per_node is not None:
        building.put("hardware.gpus_per_node", context.gpus_per_node)


def _pipeline(building: Building, settings: Settings, context: Context) -> None:
    for path, name in (
        ("pipeline.first_layers", "--decoder-first-pipeline-num-layers"),
        ("pipeline.last_layers", "--decoder-last-pipeline-num-layers"),
    ):
        node = settings.integer(name)
        if node is not None:
            building.put(path, node, name)
    building.put(
        "pipeline.count_embedding",
        settings.switch("--account-for-embedding-in-pipeline-split"),
        "--account-for-embedding-in-pipeline-split",
    )
    building.put(
        "pipeline.count_loss",
        settings.switch("--account-for-loss-in-pipeline-split"),
        "--account-for-loss-in-pipeline-split",
    )
    chunks, name = _chunks(building, settings)
    building.put("layout.vpp", chunks, *([name] if name else []))
    layout = settings.word("--pipeline-model-parallel-layout")
    if layout is not None:
        building.put("pipeline.layout", layout, "--pipeline-model-parallel-layout")
    group, overlap = "--microbatch-group-size-per-virtual-pipeline-stage", "--no-overlap-p2p-communication"
    warm_up = "--overlap-p2p-communication-warmup-flush"
    if chunks.value == 1:
        for unused in (group, overlap, warm_up):
            building.because(unused, "no effect without virtual stages")
        return
    size = settings.integer(group)
    if size is not None:
        building.put("pipeline.group", size, group)
    building.put("pipeline.overlap_p2p", settings.switch(overlap, inverted=True), overlap)
    building.put("pipeline.overlap_p2p_warmup", settings.switch(warm_up), warm_up)


def _chunks(building: Building, settings: Settings) -> tuple[Node, str]:
    """Virtual stages of a rank, and the argument that they come from."""
    layout, virtual, layers = (
        "--pipeline-model-parallel-layout",
        "--num-virtual-stages-per-pipeline-rank",
        "--num-layers-per-virtual-pipeline-stage",
    )
    given = [name for name in (layers, virtual, layout) if settings.has(name)]
    if len(given) > 1:
        problem = f"must be left out with {given[0]}: only one of them says how many virtual stages there are"
        raise PlanError(given[1], ABSENT, problem, origin=settings.where(given[1]))
    pp = positive("--pipeline-model-parallel-size", building.items["layout.pp"])
    if not given:
        return Node(1, settings.origin), ""
    node = settings.word(layout) if given[0] == layout else settings.integer(given[0])
    assert node is not None
    if given[0] == virtual:
        positive(virtual, node)
        return node, virtual
    try:
        chunks = _counted_chunks(building, node, pp, by_layout=given[0] == layout)
    except PlanError as error:
        raise PlanError(given[0], node.value, error.problem, origin=node.origin) from None
    return Node(chunks, node.origin), given[0]


def _counted_chunks(building: Building, node: Node, pp: int, *, by_layout: bool) -> int:
    """Virtual stages of a rank from a layout string, or from how many layers each has."""
    if not by_layout:
        layers = positive("--num-layers", building.items["model.layers"])
        counted = [bool(building.items[f"pipeline.count_{end}"].value) for end in ("embedding", "loss")]
        return virtual_stages(layers, pp, node.value if isinstance(node.value, int) else 0, *counted)
    stages = written_out(str(node.value)).count("|") + 1
    if stages % pp:
        raise PlanError("", stages, f"has {stages} stages, which the {pp} ranks of the pipeline must divide")
    return stages // pp


def _batch(building: Building, settings: Settings, context: Context) -> None:
    mbs = needs(settings, "--micro-batch-size")
    building.put("batch.mbs", mbs, "--micro-batch-size")
    gbs = settings.integer("--global-batch-size")
    if gbs is not None:
        building.put("batch.gbs", gbs, "--global-batch-size")
    elif context.gpus is not None:
        gpus = positive("--gpus", context.gpus)
        ranks = 1
        for name in ("tp", "pp", "cp"):
            ranks *= positive(name, building.items[f"layout.{name}"])
        dp = max(gpus // ranks, 1)
        building.put("batch.gbs", Node(positive("--micro-batch-size", mbs) * dp, mbs.origin))
    name = "--seq-length" if settings.has("--seq-length") else "--encoder-seq-length"
    building.put("batch.seq", needs(settings, "--seq-length", "--encoder-seq-length"), name)


def _precision(building: Building, settings: Settings, context: Context) -> None:
    """bf16 accumulates in fp32 unless it is told to reduce in bf16 or to keep its main gradients in it."""
    fp16, bf16 = settings.has("--fp16"), settings.has("--bf16")
    if fp16 and bf16:
        raise PlanError("--fp16", ABSENT, "must be left out with --bf16", origin=settings.where("--fp16"))
    dtype = "fp16" if fp16 else "bf16" if bf16 else "fp32"
    building.put("precision.dtype", Node(dtype, settings.where("--fp16", "--bf16")), "--fp16", "--bf16")
    accumulates = settings.has("--accumulate-allreduce-grads-in-fp32")
    reduces = bf16 and settings.has("--grad-reduce-in-bf16")
    main = settings.word("--main-grads-dtype")
    in_fp32 = accumulates or (bf16 and (main is None or main.value == "fp32"))
    names = ("--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16", "--main-grads-dtype")
    gradients = "fp32" if in_fp32 and not reduces else dtype
    building.put("precision.gradients", Node(gradients, settings.where(*reversed(names[:2]), names[2])), *names)


def _optimizer(building: Building, settings: Settings, context: Context) -> None:
    name = "--optimizer"
    kind = settings.word(name) or Node("adam", settings.origin)
    if kind.value not in ("adam", "sgd"):
        raise PlanError(name, kind.value, "is not modelled yet; adam and sgd are", origin=kind.origin)
    building.put("optimizer.name", kind, name)
    aware = settings.switch("--use-precision-aware-optimizer")
    building.put("optimizer.precision_aware", aware, "--use-precision-aware-optimizer")
    for path, name in (
        ("optimizer.main_parameters", "--main-params-dtype"),
        ("optimizer.exp_avg", "--exp-avg-dtype"),
        ("optimizer.exp_avg_sq", "--exp-avg-sq-dtype"),
    ):
        node = settings.word(name)
        if node is not None:
            building.put(path, node, name)


def _recompute(building: Building, settings: Settings, context: Context) -> None:
    name = "--recompute-granularity"
    mode = settings.word(name)
    if settings.has("--recompute-activations"):
        name, mode = "--recompute-activations", Node("selective", settings.where("--recompute-activations"))
    if mode is None:
        for unused in ("--recompute-method", "--recompute-num-layers", "--recompute-modules"):
            building.because(unused, "no effect without --recompute-granularity")
        return
    building.put("recompute.mode", mode, name)
    if mode.value == "selective":
        modules = settings.words("--recompute-modules")
        if modules is not None:
            kept = _recomputed(building, modules)
            building.put(
                "recompute.modules", Node(list(kept), settings.where("--recompute-modules")), "--recompute-modules"
            )
        return
    method = settings.word("--recompute-method")
    if method is None:
        problem = "is missing: full recompute needs it, uniform or block"
        raise PlanError("--recompute-method", ABSENT, problem, origin=mode.origin)
    layers = settings.integer("--recompute-num-layers")
    if method.value == "block" and layers is not None and layers.value == 0:
        building.put("recompute.mode", Node("none", layers.origin), name, "--recompute-num-layers")
        building.because("--recompute-method", "block of 0 layers: none is recomputed")
        return
    building.put("recompute.method", method, "--recompute-method")
    if layers is not None:
        building.put("recompute.layers", layers, "--recompute-num-layers")


def _recomputed(building: Building, modules: list[Node]) -> tuple[Node, ...]:
    """Modules of a dense layer that are recomputed; those of experts and latent attention are not there."""
    kept: dict[object, Node] = {}
    for module in modules:
        if module.value in _MODULES:
            kept[module.value] = module
        elif module.value in ("moe", "moe_act", "shared_experts", "mla_up_proj"):
            building.because("--recompute-modules", f"{module.value}: not in a dense layer")
        else:
            problem = f"is not modelled yet; {', '.join(_MODULES)} are"
            raise PlanError("--recompute-modules", module.value, problem, origin=module.origin, known=_MODULES)
    return tuple(kept.values())


def _layers(building: Building, settings: Settings, context: Context) -> None:
    """Implementations: Transformer Engine's or local ones, and what is fused."""
    put, switch = building.put, settings.switch
    put("megatron.transformer_impl", *_implementation(settings, context))
    backend = settings.word("--attention-backend")
    if backend is not None:
        put("megatron.attention_backend", backend, "--attention-backend")
    version = settings.integer("--flash-attention-version")
    if version is not None and version.value != 2:
        problem = "is not modelled yet; flash-attention 2 is"
        raise PlanError("--flash-attention-version", version.value, problem, origin=version.origin)
    bias = bool(building.items["model.mlp_bias"].value)
    gelu = switch("--no-bias-gelu-fusion", inverted=True)
    put("megatron.bias_gelu_fusion", Node(bool(gelu.value) and bias, gelu.origin), "--no-bias-gelu-fusion")
    rotary = building.items["model.positions"].value == "rotary"
    rope = switch("--no-rope-fusion", inverted=True)
    put("megatron.rope_fusion", Node(bool(rope.value) and rotary, rope.origin), "--no-rope-fusion")
    for path, name in (
        ("bias_swiglu_fusion", "--no-bias-swiglu-fusion"),
        ("bias_dropout_fusion", "--no-bias-dropout-fusion"),
        ("masked_softmax_fusion", "--no-masked-softmax-fusion"),
        ("gradient_accumulation_fusion", "--no-gradient-accumulation-fusion"),
        ("attention_mask_in_dataloader", "--no-create-attention-mask-in-dataloader"),
    ):
        put(f"megatron.{path}", switch(name, inverted=True), name)
    for path, name in (
        ("rotary_interleaved", "--rotary-interleaved"),
        ("query_key_layer_scaling", "--apply-query-key-layer-scaling"),
        ("fp32_residual", "--fp32-residual-connection"),
        ("per_token_loss", "--calculate-per-token-loss"),
        ("deterministic", "--deterministic-mode"),
    ):
        put(f"megatron.{path}", switch(name), name)
    softmax = ("--attention-softmax-in-fp32", "--apply-query-key-layer-scaling")
    put("megatron.attention_softmax_in_fp32", Node(any(map(settings.has, softmax)), settings.where(*softmax)), *softmax)
    fused, whose = "--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl"
    kind = settings.word(whose) or Node("native", settings.where(fused))
    put("megatron.cross_entropy_fusion", kind if settings.has(fused) else Node("none", settings.origin), fused, whose)
    _context_communication(building, settings)


def _implementation(settings: Settings, context: Context) -> tuple[Node, str]:
    """BERT's script reads ``--spec``, GPT's ``--transformer-impl`` unless a specification of layers is named."""
    spec = settings.words("--spec") or []
    local = bool(spec) and spec[0].value == "local"
    if context.family == "bert" or local:
        return Node("local" if local else "transformer_engine", settings.where("--spec")), "--spec"
    if spec:
        problem = "names a specification of layers, which is not modelled; leave it out for Megatron's own, or local"
        raise PlanError("--spec", spec[0].value, problem, origin=spec[0].origin)
    name = "--transformer-impl"
    node = settings.word(name) or Node("transformer_engine", settings.origin)
    if node.value == "inference_optimized":
        raise PlanError(name, node.value, "is not for training; transformer_engine and local are", origin=node.origin)
    return node, name


def _context_communication(building: Building, settings: Settings) -> None:
    name = "--cp-comm-type"
    kinds = settings.words(name)
    if kinds is None:
        return
    if building.items["layout.cp"].value == 1:
        building.because(name, "no effect with one context-parallel rank")
        return
    different = {kind.value for kind in kinds}
    if len(different) != 1 or not different <= {"p2p", "a2a"}:
        shown = " ".join(str(kind.value) for kind in kinds)
        problem = "is not modelled yet; p2p or a2a, the same for every layer, is"
        raise PlanError(name, shown, problem, origin=settings.where(name))
    building.put("megatron.cp_communication", kinds[0], name)


def _training(building: Building, settings: Settings, context: Context) -> None:
    """The loop around the model: reductions, clipping and what is counted for the log."""
    put = building.put
    for path, name in (
        ("overlap_grad_reduce", "--overlap-grad-reduce"),
        ("overlap_param_gather", "--overlap-param-gather"),
        ("log_num_zeros_in_grad", "--log-num-zeros-in-grad"),
        ("log_params_norm", "--log-params-norm"),
    ):
        put(f"megatron.{path}", settings.switch(name), name)
    for path, name in (
        ("distributed_optimizer_instances", "--num-distributed-optimizer-instances"),
        ("bucket_size", "--ddp-bucket-size"),
    ):
        node = settings.integer(name)
        if node is not None:
            put(f"megatron.{path}", node, name)
    clip = settings.number("--clip-grad")
    if clip is not None:
        put("megatron.clip_grad", clip, "--clip-grad")
    name = "--no-check-for-nan-in-loss-and-grad"
    scale = settings.number("--loss-scale")
    dynamic = settings.has("--fp16") and not (scale is not None and scale.value)
    put("megatron.check_for_nan", Node(not (settings.has(name) or dynamic), settings.where(name, "--fp16")), name)
