"""Megatron-LM's arguments of precision, optimizer, recompute and offloading.

Megatron-LM's arguments of CUDA graphs (``validate_args``; ``cuda_graph_config.py``,
``normalize_cuda_graph_modules``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from ...plan.errors import ABSENT, Node, PlanError
from ...plan.megatron_section import GraphModule, OffloadModule
from ...plan.plan import Plan
from ..settings import Building, Reader, Row, elsewhere, switch
from . import sharding
from .hybrid import stages_of

_MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj", "gdn_norm_out")
_OTHER_MODULES = ("gdp_in_proj", "gdp_qkv", "mhc")
"""Further ones that ``transformer_config.py`` allows."""


def _precision(reader: Reader) -> None:
    """bf16 accumulates in fp32 unless it is told to reduce in bf16 or to keep its main gradients in it. Megatron-FSDP
    has an argument of its own."""
    settings = reader.settings
    if settings.has("--fp16") and settings.has("--bf16"):
        raise settings.wrong("--fp16", "must be left out with --bf16")
    dtype = put_dtype(reader)
    if sharding.runs_torch(reader):
        sharding.put_torch_dtype(reader, dtype)
        return
    if sharding.runs(reader):
        sharding.put_dtypes(reader, dtype)
        return
    accumulates = settings.has("--accumulate-allreduce-grads-in-fp32")
    reduces = dtype == "bf16" and settings.has("--grad-reduce-in-bf16")
    main = settings.word("--main-grads-dtype")
    in_fp32 = accumulates or (dtype == "bf16" and (main is None or main.value == "fp32"))
    names = ("--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16", "--main-grads-dtype")
    gradients = "fp32" if in_fp32 and not reduces else dtype
    where = settings.where(*reversed(names[:2]), names[2])
    reader.building.put("precision.gradients", Node(gradients, where), *names)


def put_dtype(reader: Reader) -> str:
    """Puts the dtype of the parameters, and returns it."""
    names = ("--fp16", "--bf16")
    dtype = next((name[2:] for name in names if reader.settings.has(name)), "fp32")
    reader.building.put("precision.dtype", Node(dtype, reader.settings.where(*names)), *names)
    return dtype


def _reduces_in_bf16(plan: Plan) -> bool:
    own = not (sharding.is_sharded(plan) or sharding.is_torch_sharded(plan))
    return own and plan.precision.dtype == plan.precision.gradients == "bf16"


def _accumulates_in_fp32(plan: Plan) -> bool:
    return not sharding.is_sharded(plan) and plan.precision.dtype != "fp32" and plan.precision.gradients == "fp32"


def its_optimizer(plan: Plan) -> Any:
    """Adam is AdamW there (``OptimizerConfig.decoupled_weight_decay``)."""
    return plan.optimizer.algorithm.megatron


def _deals_out(reader: Reader) -> int:
    """``dist_muon`` is Muon whose whole parameters are dealt out to ranks, as with ``--use-distributed-optimizer``
    (``arguments.py``, ``validate_args``: ``use_layer_wise_distributed_optimizer``)."""
    optimizer = reader.settings.word("--optimizer")
    return int(optimizer is not None and optimizer.value == "dist_muon")


def _recompute(reader: Reader) -> None:
    settings, building = reader.settings, reader.building
    name = "--recompute-granularity"
    mode = settings.word(name)
    if settings.has("--recompute-activations"):
        name, mode = "--recompute-activations", Node("selective", settings.where("--recompute-activations"))
    if settings.has(MOE_LAYER):
        _recompute_experts(reader, name, mode)
        return
    if mode is None:
        building.because(
            ("--recompute-method", "--recompute-num-layers", "--recompute-modules"),
            "no effect without --recompute-granularity",
        )
        return
    building.put("recompute.mode", mode, name)
    if mode.value == "selective":
        modules = settings.words("--recompute-modules")
        if modules is not None:
            kept = Node(_recomputed(building, modules), settings.where("--recompute-modules"))
            building.put("recompute.modules", kept, "--recompute-modules")
        return
    method = settings.word("--recompute-method")
    if method is None:
        raise mode.lacks("--recompute-method", "is missing: full recompute needs it, uniform or block")
    layers = settings.integer("--recompute-num-layers")
    if method.value == "block" and layers is not None and layers.value == 0:
        building.put("recompute.mode", Node("none", layers.origin), name, "--recompute-num-layers")
        building.because("--recompute-method", "block of 0 layers: none is recomputed")
        return
    building.put("recompute.method", method, "--recompute-method")
    building.put_said("recompute.layers", layers, "--recompute-num-layers")


MOE_LAYER = "--moe-layer-recompute"


def _recompute_experts(reader: Reader, name: str, mode: Node | None) -> None:
    """Selective recompute with ``moe`` among its modules, which are ``core_attn`` where none are named
    (``TransformerConfig.__post_init__``)."""
    settings, building, origin = reader.settings, reader.building, reader.settings.where(MOE_LAYER)
    if mode is not None and mode.value == "full":
        raise settings.wrong(MOE_LAYER, "must be left out with full recompute: Megatron stops with both")
    given = settings.words("--recompute-modules") or [Node("core_attn", origin)]
    building.put("recompute.mode", Node("selective", origin), name, MOE_LAYER)
    modules = Node(_recomputed(building, [*given, Node("moe", origin)]), origin)
    building.put("recompute.modules", modules, "--recompute-modules", MOE_LAYER)


def _recomputed(building: Building, modules: list[Node]) -> list[Node]:
    """Modules that are recomputed, each once; those of experts that the model has not are not there."""
    dense = not building.items["model.experts"].value
    kept: dict[object, Node] = {}
    for module in modules:
        if dense and module.value in ("moe", "shared_experts"):
            building.because("--recompute-modules", f"{module.value}: not in a layer of this model")
        elif module.value in _MODULES:
            kept[module.value] = module
        else:
            raise _no_module("--recompute-modules", module, _MODULES, _OTHER_MODULES)
    return list(kept.values())


def _no_module(name: str, module: Node, modelled: Sequence[str], others: Sequence[str]) -> PlanError:
    """That ``module`` of the argument ``name`` is none of ``modelled``: of Megatron's ``others``, or nobody's."""
    listed = ", ".join(modelled)
    problem = f"is not modelled yet; {listed} are" if module.value in others else f"must be one of {listed}"
    return module.wrong(name, problem, known=modelled)


def in_full(plan: Plan) -> bool:
    return plan.recompute.mode == "full"


def largest_chunk(plan: Plan) -> int:
    """Layers of the virtual stage of Megatron-Core that has most."""
    return max(len(chunk.layers) for stage in stages_of(plan) for chunk in stage)


OFFLOAD = "--optimizer-cpu-offload"


def _offload(reader: Reader) -> None:
    settings, name = reader.settings, "--optimizer-offload-fraction"
    if not settings.has(OFFLOAD):
        reader.building.because(name, f"no effect without {OFFLOAD}")
        return
    fraction = settings.number(name) or Node(1.0, settings.where(OFFLOAD))
    reader.building.put("megatron.optimizer_offload", fraction, OFFLOAD, name)


OFFLOADING = "--fine-grained-activation-offloading"


def _offloading(reader: Reader) -> None:
    """Modules whose saved tensors go to the host, each once."""
    settings, building, name = reader.settings, reader.building, "--offload-modules"
    if not settings.has(OFFLOADING):
        building.because((name, *_OFFLOADING_PARTS), f"no effect without {OFFLOADING}")
        return
    modules = settings.words(name)
    if not modules:
        problem = f"is missing: {OFFLOADING} needs modules, of {', '.join(OFFLOAD_MODULES)}"
        raise PlanError(name, ABSENT, problem, origin=settings.where(OFFLOADING))
    for module in modules:
        if module.value not in OFFLOAD_MODULES:
            raise _no_module(name, module, OFFLOAD_MODULES, _OTHER_OFFLOAD_MODULES)
    for part, plain in _OFFLOADING_PARTS.items():
        given = settings.number(part)
        if given is not None and given.value != plain:
            raise given.wrong(part, f"is not modelled yet; {plain} is")
    once = {module.value: module for module in modules}
    building.put("megatron.offload_modules", Node(list(once.values()), settings.where(name)), OFFLOADING, name)


OFFLOAD_MODULES = get_args(OffloadModule)
_OTHER_OFFLOAD_MODULES = ("fused_group_mlp", "gdp_qkv")
_OFFLOADING_PARTS = {"--delta-offload-bytes-across-pp-ranks": 0, "--activation-offload-fraction": 1}
"""Arguments that share out what goes to the host, and the value that leaves it as it is."""


def _has_offloading(plan: Plan) -> bool:
    return plan.megatron.offload_modules is not None


def _offloads(plan: Plan) -> bool:
    return plan.megatron.optimizer_offload > 0


def _precisely(plan: Plan) -> bool:
    return plan.optimizer.precision_aware


TRAINING = (
    switch(
        "--fp16", "precision.dtype", "PRECISION", read=_precision, value=lambda plan: plan.precision.dtype == "fp16"
    ),
    switch("--bf16", "precision.dtype", "PRECISION", read=elsewhere, value=lambda plan: plan.precision.dtype == "bf16"),
    switch("--grad-reduce-in-bf16", "precision.gradients", "PRECISION", read=elsewhere, value=_reduces_in_bf16),
    switch(
        "--accumulate-allreduce-grads-in-fp32",
        "precision.gradients",
        "PRECISION",
        read=elsewhere,
        value=_accumulates_in_fp32,
    ),
    Row(
        "--optimizer",
        "optimizer.name",
        "OPTIMIZER",
        "word",
        "adam",
        words={"adam": "adam", "sgd": "sgd", "muon": "muon", "dist_muon": "muon"},
        refused=dict.fromkeys(("lion", "soap", "adaptive_muon"), "is not modelled yet; adam, sgd and muon are"),
        value=its_optimizer,
    ),
    Row("--clip-grad", "megatron.clip_grad", "OPTIMIZER", "number"),
    switch("--use-distributed-optimizer", "layout.zero", "OPTIMIZER", {True: 1, False: 0}, default=_deals_out),
    Row(
        "--num-distributed-optimizer-instances",
        "megatron.distributed_optimizer_instances",
        "OPTIMIZER",
        when=lambda plan: plan.megatron.distributed_optimizer_instances > 1,
    ),
    switch("--use-precision-aware-optimizer", "optimizer.precision_aware", "OPTIMIZER"),
    switch(OFFLOAD, "megatron.optimizer_offload", "OPTIMIZER", read=_offload, value=_offloads),
    Row("--optimizer-offload-fraction", "megatron.optimizer_offload", "OPTIMIZER", read=elsewhere, when=_offloads),
    Row(
        "--cpu-offloading-num-layers",
        "megatron.offload_layers",
        "RECOMPUTE",
        when=lambda plan: plan.megatron.offload_layers > 0,
    ),
    switch(OFFLOADING, "megatron.offload_modules", "RECOMPUTE", read=_offloading, value=_has_offloading),
    Row(
        "--offload-modules",
        "megatron.offload_modules",
        "RECOMPUTE",
        read=elsewhere,
        when=_has_offloading,
        value=lambda plan: plan.megatron.offload_modules or (),
    ),
    Row(
        "--min-offloaded-tensor-size",
        "megatron.offload_least",
        "RECOMPUTE",
        without_effect=lambda reader: "" if reader.settings.has(OFFLOADING) else f"no effect without {OFFLOADING}",
        when=_has_offloading,
    ),
    Row("--main-params-dtype", "optimizer.main_parameters", "OPTIMIZER", "word", when=_precisely),
    Row("--exp-avg-dtype", "optimizer.exp_avg", "OPTIMIZER", "word", when=_precisely),
    Row("--exp-avg-sq-dtype", "optimizer.exp_avg_sq", "OPTIMIZER", "word", when=_precisely),
    Row(
        "--recompute-granularity",
        "recompute.mode",
        "RECOMPUTE",
        read=_recompute,
        when=lambda plan: plan.recompute.mode != "none",
    ),
    Row(
        "--recompute-modules",
        "recompute.modules",
        "RECOMPUTE",
        read=elsewhere,
        when=lambda plan: plan.recompute.mode == "selective",
        value=lambda plan: plan.recompute.modules or (),
    ),
    Row("--recompute-method", "recompute.method", "RECOMPUTE", read=elsewhere, when=in_full),
    Row(
        "--recompute-num-layers",
        "recompute.layers",
        "RECOMPUTE",
        read=elsewhere,
        when=in_full,
        value=lambda plan: plan.recompute.layers or largest_chunk(plan),
    ),
)


# -- graphs --------------------------------------------------------------------------------------------


IMPLEMENTATION, MODULES = "--cuda-graph-impl", "--cuda-graph-modules"
OLD_MODULES = "--cuda-graph-scope"
WARMUP, INFERENCE = "--cuda-graph-warmup-steps", "--inference-cuda-graph-scope"
OLDER = {"--enable-cuda-graph": "local", "--external-cuda-graph": "transformer_engine"}
"""Switches, and the implementation that they are today."""
KNOWN = get_args(GraphModule)


def _graphs(reader: Reader) -> None:
    settings, put = reader.settings, reader.building.put
    given = [Node(kind, settings.where(name)) for name, kind in OLDER.items() if settings.has(name)]
    said = settings.word(IMPLEMENTATION)
    node = said or next(iter(given), Node("none", settings.origin))
    if len(given) + (said is not None and said.value != "none") > 1:
        both = " and ".join(name for name in (*OLDER, IMPLEMENTATION) if settings.has(name))
        raise node.wrong(both, "must be one of them, as in Megatron-Core")
    names = (MODULES, OLD_MODULES)
    modules = [one for name in names for one in _each(settings.words(name) or [])]
    if all(map(settings.has, names)) and modules:
        raise modules[0].wrong(f"{OLD_MODULES} and {MODULES}", "must be one of them, as in Megatron-Core")
    older = {one.value: one for one in modules if str(one.value).startswith("full_iteration")}
    modules = [one for one in modules if one.value not in older]
    if "full_iteration" in older:
        if node.value == "transformer_engine":
            problem = "must be left out beside transformer_engine, as in Megatron-Core"
            raise PlanError(MODULES, "full_iteration", problem, origin=older["full_iteration"].origin)
        node, modules = Node("full_iteration", older["full_iteration"].origin), []
    inference = settings.word(INFERENCE)
    blocks = (inference is not None and inference.value == "block") or "full_iteration_inference" in older
    if node.value == "local" and blocks and not any(one.value != "full" for one in modules):
        node = Node("none", node.origin)  # layers make no graphs of their own then (``create_mcore_cudagraph_manager``)
    if node.value == "none":
        reader.building.because((*names, WARMUP, IMPLEMENTATION, *OLDER), f"no effect without {IMPLEMENTATION}")
        return
    put("megatron.cuda_graphs", node, IMPLEMENTATION, *OLDER)
    for one in modules:
        if one.value not in (*KNOWN, "full"):
            raise one.wrong(MODULES, f"must be {', '.join(KNOWN)}, or left out", known=KNOWN)
    if len(modules) > 1 and any(one.value == "full" for one in modules):
        raise PlanError(MODULES, "full", "must be alone, as in Megatron-Core", origin=modules[0].origin)
    parts = {one.value: one for one in modules if one.value != "full"}
    if parts:
        put("megatron.cuda_graph_modules", Node(list(parts.values()), settings.where(*names)), *names)
    reader.building.put_said("megatron.cuda_graph_warmup", settings.integer(WARMUP), WARMUP)


def _each(words: list[Node]) -> Iterator[Node]:
    for word in words:
        yield from (Node(part, word.origin) for part in str(word.value).strip("[]").split(",") if part)


def _graphed(plan: Plan) -> bool:
    return plan.megatron.cuda_graphs != "none"


ROWS = (
    Row(IMPLEMENTATION, "megatron.cuda_graphs", "LAYERS", "word", read=_graphs, when=_graphed),
    Row(
        MODULES,
        "megatron.cuda_graph_modules",
        "LAYERS",
        "word",
        read=elsewhere,
        when=lambda plan: _graphed(plan) and bool(plan.megatron.cuda_graph_modules),
        value=lambda plan: plan.megatron.cuda_graph_modules or (),
    ),
    Row(
        WARMUP,
        "megatron.cuda_graph_warmup",
        "LAYERS",
        read=elsewhere,
        when=lambda plan: _graphed(plan) and plan.megatron.cuda_graph_warmup != 3,
    ),
)
