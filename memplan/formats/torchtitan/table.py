"""A torchtitan configuration as a plan of framework fsdp.

``torchtitan/train.py`` and ``torchtitan/models/llama3/infra/parallelize.py`` of release 0.2.2, and their forerunners:
``train.py`` and ``torchtitan/parallelisms/parallelize_llama.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from ...frameworks import framework
from ...plan.errors import ABSENT, Node, PlanError, wrong_at
from ...plan.models import load_spec
from ...plan.plan import Plan
from ..settings import Building, Reader, Row, elsewhere, later, read_rows, switch
from .keys import NO_FSDP2, NO_TOML, key_of
from .low_precision import CONVERTERS, read_adapters, read_low
from .settings import Settings
from .stages import (
    DECODERS,
    FLAVOURS,
    OTHER_ATTENTION,
    SIZED,
    TEST_TOKENIZER,
    VARLEN,
    flavour_of,
    parts,
    split_points,
    torchtitans_own,
    without_recipe,
)

ENDS_APART = "2025-07-28"
"""The day from which embedding, and norm with head, are units of their own (``apply_fsdp``)."""
PER_OPERATOR = "2026-03-23"
"""The day from which selective recompute is per operator alone, and keeps every second product as before
(``_get_custom_policy``)."""
OUTPUTS_DROPPED = "2025-10-22"
"""The day from which the last stage keeps no logits (``train.py``, ``pp_schedule.step(return_outputs=False)``)."""
GRAPHS = "training.disable_cuda_graphs"
LOSS_COMPILED = "2025-04-02"
"""The day from which a compiled job's loss is, too."""
FUSED = "2025-02-24"
"""The day from which the optimizer is fused by default."""

BATCH = ("training.local_batch_size", "training.batch_size")
GLOBAL_BATCH = "training.global_batch_size"
TOKENS = "training.num_tokens_per_microbatch_per_dp_rank"
ALL_TOKENS = "training.num_tokens_per_train_step"
LENGTH = ("training.max_context_length", "training.seq_len")
SHARD = tuple(f"{section}.data_parallel_shard_degree" for section in ("parallelism", "training"))
SHARD = (*SHARD, "training.data_parallel_degree")
REPLICATE = tuple(f"{section}.data_parallel_replicate_degree" for section in ("parallelism", "training"))
TP = ("parallelism.tensor_parallel_degree", "training.tensor_parallel_degree", "training.sequence_parallel_degree")
PP = tuple(f"{section}.pipeline_parallel_degree" for section in ("parallelism", "experimental", "training"))
CP = tuple(f"{section}.context_parallel_degree" for section in ("parallelism", "experimental"))
RESHARD = tuple(f"{section}.fsdp_reshard_after_forward" for section in ("parallelism", "training"))
SEQUENCE = "parallelism.enable_sequence_parallel"
LOSS_WHOLE = tuple(f"{section}.disable_loss_parallel" for section in ("parallelism", "training"))

EP, ETP = "parallelism.expert_parallel_degree", "parallelism.expert_tensor_parallel_degree"
EXCHANGE = ("parallelism.expert_parallel_comm_backend", "model_spec.moe_comm_backend")

IMPLEMENTATION = ("optimizer.implementation", "optimizer.fused")
COMPILE = ("compile.enable", "training.compile")
COMPONENTS = "compile.components"

DTYPES = {"bfloat16": "bf16", "float32": "fp32"}


def torchtitan_plan(settings: Settings, gpus: Node | None, vocabulary: Node | None, flags: Collection[str]) -> Building:
    """The plan of the job that ``settings`` are of; ``flags`` are names of fields that the user gives beside them."""
    if settings.era.day < NO_FSDP2:
        raise wrong_at(
            settings.origin, f"is read as {settings.era.label}, which had FSDP1; fully_shard came on {NO_FSDP2}"
        )
    building = Building(settings.origin)
    building.put("framework", "fsdp")
    building.put("fsdp.code", "torchtitan")
    building.put("fsdp.ends_apart", settings.era.day >= ENDS_APART)
    _model(building, settings, vocabulary, flags)
    building.put_said("hardware.gpus", gpus)
    read_rows(ROWS, Reader(settings, building, flags))
    return building


# -- model --------------------------------------------------------------------------------------------


def _unknown(settings: Settings, name: Node, flavour: Node) -> PlanError:
    """What is wrong with a flavour that has no sizes here, or a vision tower."""
    family, plain = str(name.value), str(flavour.value)
    decoder = DECODERS.get((family, plain))
    known = [size for one, size in (*FLAVOURS, *DECODERS) if one == family]
    if not known:
        return without_recipe(family, name.origin, settings.name("model_spec.name", "model.name"))
    problem = f"of model {family} has no sizes here ({', '.join(known)}): name a model with --model"
    if decoder is not None:
        alone = "a larger one's decoder alone" if plain.startswith("debug") else "its decoder alone"
        problem = f"of model {family} has a vision tower, which is not modelled: --model {decoder} estimates {alone}"
    return PlanError(settings.name("model_spec.flavor", "model.flavor"), plain, problem, origin=flavour.origin)


def _model(building: Building, settings: Settings, vocabulary: Node | None, flags: Collection[str]) -> None:
    names, flavours = ("model_spec.name", "model.name"), ("model_spec.flavor", "model.flavor")
    path, name = "model.tokenizer_path", settings.word(*names, default="llama3")
    building.because(path, "the tokenizer's vocabulary")
    building.put_said("model.vocab", vocabulary)
    if "model" in flags:
        building.because((*names, *flavours), "--model instead")
        return
    flavour = settings.word(*flavours, default="debugmodel")
    key = settings.name(*flavours)
    plain = str(flavour.value)
    if plain.endswith(OTHER_ATTENTION):
        problem = "has another attention than the recipe's; name a flavour without"
        raise PlanError(key, plain, problem, origin=flavour.origin)
    family = str(name.value)
    found = flavour_of(family, plain, settings.era.day)
    if found is None:
        raise _unknown(settings, name, flavour)
    if family == VARLEN and settings.era.day < NO_TOML:
        problem = f"keeps its layers in bf16 in {settings.era.label}, which is not modelled; later code is"
        raise PlanError(settings.name(*names), family, problem, origin=name.origin)
    spec, sizes = found
    debug = plain.startswith("debugmodel")
    building.put("model.base", Node(spec, flavour.origin))
    building.because((*names, *flavours), f"model = {'torchtitan-debugmodel' if debug else spec}")
    if debug:
        building.put("model.name", Node("torchtitan-debugmodel", flavour.origin))
        for field, size in sizes.items():
            if field != "vocab" or vocabulary is None:
                building.put(f"model.{field}", Node(size, flavour.origin))
    _saved_sizes(building, settings, spec, sizes)
    tokenizer = settings.word(path, default="") if settings.era.day < SIZED else Node("", settings.origin)
    if "model.vocab" in building.items or "vocab" in flags:
        return
    file, tokens = TEST_TOKENIZER
    if str(tokenizer.value).rpartition("/")[2] == file:
        building.put("model.vocab", Node(tokens, tokenizer.origin), path)
    elif "test" in str(tokenizer.value) or (debug and "vocab" not in sizes):
        problem = "says the vocabulary, and is not read: give its number of tokens as --vocab-size N"
        raise PlanError(path, tokenizer.value or ABSENT, problem, origin=tokenizer.origin)


def expert_ranks(settings: Settings, plan: Plan) -> Node | None:
    """Ranks that share the experts of a model that has some, by all-to-all of NCCL."""
    if not plan.model.experts or not settings.has(EP):
        return None
    degree = settings.integer(EP, default=1)
    for name in EXCHANGE:
        backend = settings.word(name, default="standard")
        if backend.value != "standard":
            why = "what other libraries allocate for the exchange of rows is not modelled"
            if degree.value == 1:  # update_ep_token_dispatcher_config; parallelize_deepseekv3 before
                why = "torchtitan itself refuses others where no ranks share experts"
            raise backend.wrong(name, f"must be standard: {why} (--set {name}=standard takes PyTorch's)")
    return degree


def expert_parts(settings: Settings) -> Node | None:
    """Ranks that have a part of each expert, where others share experts."""
    degree = settings.integer(ETP, default=1)
    return None if degree.value == 1 or settings.integer(EP, default=1).value == 1 else degree


def _saved_sizes(building: Building, settings: Settings, spec: str, sizes: dict[str, int]) -> None:
    """Sizes of the model in a saved configuration, which must be the flavour's."""
    prefix = "model_spec.model."
    given = {name.removeprefix(prefix): node for name, node in settings.given.items() if name.startswith(prefix)}
    known = load_spec(spec)
    for name, expected in (("dim", sizes.get("hidden", known.hidden)), ("layers", sizes.get("layers", known.layers))):
        node = given.get(name)
        found = len(node.value) if node is not None and isinstance(node.value, list) else node and node.value
        if node is not None and found != expected:
            problem = f"is not the {expected} of the flavour; name a model with --model"
            raise PlanError(prefix + name, found, problem, origin=node.origin)
    if "vocab_size" in given and "model.vocab" not in building.items:
        building.put("model.vocab", settings.integer(f"{prefix}vocab_size", default=1), f"{prefix}vocab_size")
    if "enable_weight_tying" in given:
        name = f"{prefix}enable_weight_tying"
        building.put("model.tied_embeddings", settings.switch(name), name)
    adapted = given.get("layers")
    if adapted is not None and _has(adapted, {"rank", "alpha"}):
        raise adapted.lacks(f"{prefix}layers", "have LoRA adapters, which are not read")
    for name in given:
        building.because(prefix + name, "the flavour's sizes")


def _has(node: Node, names: set[str]) -> bool:
    """Whether a mapping somewhere in ``node`` has all ``names``."""
    children = node.value if isinstance(node.value, list) else list(node.mapping.values())
    return names <= node.mapping.keys() or any(_has(child, names) for child in children)


# -- layout and batch ---------------------------------------------------------------------------------


def _shards(reader: Reader) -> None:
    settings, building = reader.settings, reader.building
    shards = settings.optional(*SHARD)
    if shards is not None:
        ranks = shards.value * building.size("fsdp.replicas")
        building.put("layout.dp", Node(ranks, shards.origin), *SHARD)
    elif "hardware.gpus" not in building.items and not {"gpus", "dp"} & {*reader.context}:
        name = settings.name(*SHARD)
        found = settings.given.get(name)
        problem = "takes the GPUs that are left: say how many there are with --gpus N"
        raise PlanError(name, found.plain() if found else ABSENT, problem, origin=settings.where(name))
    building.because(SHARD, "layout.dp: the GPUs that are left")


def _reshard(reader: Reader) -> None:
    settings, building = reader.settings, reader.building
    policy = settings.word(*RESHARD, default="default", choices=("default", "always", "never"))
    if policy.value == "always" and settings.era.day < ENDS_APART:
        problem = "must be default or never: that the last layer is resharded, too, is not modelled"
        raise PlanError(settings.name(*RESHARD), "always", problem, origin=policy.origin)
    if policy.value == "always":
        building.put("fsdp.reshard_root", Node(True, policy.origin), *RESHARD)
    if policy.value == "never":
        building.put("fsdp.reshard_after_forward", Node(False, policy.origin), *RESHARD)
    building.because(RESHARD, "fsdp.reshard_after_forward: false with pipeline stages")


def _policy(plan: Plan) -> str:
    if plan.fsdp.reshard_root:
        return "always"
    return "default" if _in_stages(plan) or plan.fsdp.reshard_after_forward else "never"


def _graphs(reader: Reader) -> None:
    """On unless a configuration turns them off, since they are there."""
    key = key_of(GRAPHS)
    if key is not None and key.was(reader.settings.era.day):
        off = reader.settings.switch(GRAPHS)
        reader.building.put("fsdp.cuda_graphs", Node(not off.value, off.origin), GRAPHS)


def _local_batch(plan: Plan) -> int:
    """A pipeline's batch is of all its micro-batches; otherwise a rank accumulates up to the global one."""
    assert plan.batch.gbs is not None
    assert plan.layout.dp is not None
    return plan.batch.gbs // plan.layout.dp if plan.layout.pp > 1 else plan.batch.mbs


def _in_stages(plan: Plan) -> bool:
    return plan.layout.pp > 1


def _in_release_0_2(plan: Plan) -> bool:
    return plan.fsdp.ends_apart


def _staged(key: str, path: str, *, older: str = "", **more: Any) -> Row:
    """A key of pipelines, which is read once flags are known."""
    names = (f"{older}.{key}",) if older else ()
    told = later(f"with pipeline stages: {path}")
    return Row(f"parallelism.{key}", path, "parallelism", older=names, without_effect=told, when=_in_stages, **more)


def _schedule(plan: Plan) -> str:
    return "Interleaved1F1B" if plan.layout.vpp > 1 else {"1f1b": "1F1B", "gpipe": "GPipe"}[plan.pipeline.schedule]


def titan_edges(plan: Plan) -> tuple[int, ...]:
    """The first entry of every stage in the list embedding, layers, norm, head, and its length."""
    if not isinstance(plan.pipeline.partition, str):
        return tuple(int(edge) for edge in plan.pipeline.partition)
    _, *inner, _ = framework(plan.framework).stage_edges(plan)
    return (0, *(layer + 1 for layer in inner), plan.model.layers + 3)


def _own_stages(plan: Plan) -> tuple[int, ...] | None:
    """The stages, where torchtitan would cut elsewhere by itself."""
    edges = titan_edges(plan)
    return None if edges == torchtitans_own(plan.model.layers, plan.layout.pp, plan.layout.vpp) else edges


def _split_points(plan: Plan) -> list[str] | None:
    edges = _own_stages(plan)
    return None if edges is None or _in_release_0_2(plan) else split_points(edges, plan.model.layers)


def _module_names(plan: Plan) -> list[list[str]] | None:
    edges = _own_stages(plan)
    return None if edges is None or not _in_release_0_2(plan) else parts(edges, plan.model.layers)


# -- optimizer, recompute, loss -----------------------------------------------------------------------


def _optimizer(reader: Reader) -> None:
    settings, building = reader.settings, reader.building
    if "optimizer" in reader.context:
        building.because(("optimizer.param_groups", "optimizer.name"), "--optimizer instead")
        building.because("optimizer.weight_decay", "AdamW decays in place")
        _implementation(settings, building)
        return
    kind, _ = _group(settings) if settings.has("optimizer.param_groups") else _named(settings)
    building.because("optimizer.param_groups", "optimizer.name")
    building.put("optimizer.name", Node(str(kind.value).lower(), kind.origin), "optimizer.name")
    building.because("optimizer.weight_decay", "AdamW decays in place")
    _implementation(settings, building)


def decay_of(settings: Settings, plan: Plan) -> Node | None:
    """The job's weight decay, where the plan's optimizer, which a flag may have named, does not decay in place."""
    if plan.optimizer.algorithm.decays:
        return None
    if not settings.has("optimizer.param_groups"):
        return _named_decay(settings)
    with suppress(PlanError):  # of groups that a flag stands over
        return _group(settings)[1]
    return None


def _implementation(settings: Settings, building: Building) -> None:
    building.put("optimizer.implementation", _way(settings), *IMPLEMENTATION)


def _way(settings: Settings) -> Node:
    """How the optimizer's step runs."""
    name, old = IMPLEMENTATION
    if settings.has(old) or (settings.era.day < FUSED and not settings.has(name)):
        fused = settings.switch(old)
        return Node("fused" if fused.value else "foreach", fused.origin)
    way = settings.word(name, default="fused", choices=("for-loop", "foreach", "fused", "fused_opt_states_bf16"))
    if way.value == "fused_opt_states_bf16":
        raise way.wrong(name, f"is not modelled: states in bf16 (--set {name}=fused has them in fp32)")
    return way


def _named(settings: Settings) -> tuple[Node, Node]:
    name = settings.word("optimizer.name", default="AdamW", choices=("Adam", "AdamW"))
    return name, _named_decay(settings)


def _named_decay(settings: Settings) -> Node:
    return settings.number("optimizer.weight_decay", default=0.1)


def _group(settings: Settings) -> tuple[Node, Node]:
    """Optimizer and decay of the last group of parameters (``ParamGroupConfig``), which takes what no other does.
    Others may be of Adam or AdamW, too, where the step is fused: it holds nothing but states, which are alike."""
    name = "optimizer.param_groups"
    node = settings.given[name]
    groups = node.value if isinstance(node.value, list) else []
    kinds = {str(group.mapping["optimizer_name"].value) for group in groups if "optimizer_name" in group.mapping}
    if not groups and settings.has("optimizer.name"):
        return _named(settings)
    if not groups or not kinds <= {"Adam", "AdamW"} or (len(groups) > 1 and _way(settings).value != "fused"):
        raise node.lacks(name, "must be one group of Adam or AdamW, or several that are fused: others are not modelled")
    for group in groups:
        more = group.mapping.get("optimizer_kwargs")
        given = more.mapping if more is not None else {}
        own = next((one for one in ("fused", "foreach", "amsgrad", "capturable") if one in given), None)
        if own is not None:
            raise given[own].wrong(f"{name}.{own}", "must be left out")
    kind = group.mapping.get("optimizer_name", Node("AdamW", node.origin))
    return kind, given.get("weight_decay", Node(0.01 if kind.value == "AdamW" else 0.0, node.origin))


def _decay(plan: Plan) -> float:
    default = 0.01 if plan.optimizer.algorithm.decays else 0.0
    return default if plan.optimizer.weight_decay is None else plan.optimizer.weight_decay


def _recompute(reader: Reader) -> None:
    settings, building, flags = reader.settings, reader.building, reader.context
    key, option = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
    own = {"recompute", "recompute-per-operator", "recompute-every"} & {*flags}
    mode = _mode(settings)
    building.because(_POLICY, f"--{min(own)} instead" if own else f"{mode.value} recompute")
    building.because("activation_checkpoint.early_stop", "the estimate stops early")
    if own:
        building.because((key, option), f"--{min(own)} instead")
        return
    if mode.value == "memory_budget":
        raise mode.wrong(key, "is not modelled: Inductor's partitioner chooses what is saved for backward")
    if mode.value != "selective":
        building.put("recompute.mode", mode, key)
        building.because(option, f"no effect with {mode.value}")
        return
    every = settings.first(option)
    per_operator = settings.era.day >= PER_OPERATOR
    node = every[1] if every is not None else Node("op" if per_operator else "2", settings.origin)
    plain = str(node.value)
    if plain == "op":
        building.put("fsdp.per_operator", Node(True, node.origin), option, key)
        return
    if not plain.isascii() or not plain.isdigit() or len(plain) > 6:
        raise node.wrong(option, "must be op, or a number: every n-th layer is recomputed")
    building.put("recompute.mode", Node("full", mode.origin), key)
    building.put("fsdp.recompute_every", Node(int(plain) or 1, node.origin), option)


_POLICY = (
    "activation_checkpoint",
    "activation_checkpoint.memory_budget",
    "activation_checkpoint.force_recompute_mm_shapes_by_fqns",
)


def _mode(settings: Settings) -> Node:
    """The mode: by name, or since June 2026 by what its configuration has (``FullAC``, ``SelectiveAC`` …)."""
    modes = ("selective", "full", "none", "memory_budget")
    if settings.has("activation_checkpoint.mode"):
        return settings.word("activation_checkpoint.mode", default="selective", choices=modes)
    for name, mode in zip(_POLICY, ("none", "memory_budget", "selective"), strict=True):
        node = settings.given.get(name)
        if node is not None:
            return Node(mode, node.origin)
    policy = settings.given.get("activation_checkpoint.determinism_check")
    return Node("full", policy.origin) if policy is not None else Node("selective", settings.origin)


def _loss(reader: Reader) -> None:
    name = "loss.num_chunks"
    if reader.settings.has(name):
        chunks = reader.settings.integer(name, default=8)
        reader.building.put("loss.kind", Node("chunked", chunks.origin), name)
        reader.building.put("loss.chunks", chunks, name)


def _compile(reader: Reader) -> None:
    on, components = _compiled(reader.settings)
    reader.building.put("fsdp.compile", Node(bool(on.value) and "model" in components, on.origin), *COMPILE)
    reader.building.because(COMPONENTS, "fsdp.compile, fsdp.compile_loss")


def _compiled(settings: Settings) -> tuple[Node, Sequence[str]]:
    """Whether a job is compiled, and what of it."""
    return settings.switch(*COMPILE), settings.words(COMPONENTS) if settings.has(COMPONENTS) else ("model", "loss")


def compiled_loss(settings: Settings, plan: Plan) -> Node:
    """Since April 2025 a compiled job's loss is, too (``build_cross_entropy_loss``), also if a flag compiles it."""
    on, components = _compiled(settings)
    compiled = (bool(on.value) or plan.fsdp.compile) and settings.era.day >= LOSS_COMPILED
    return Node(compiled and "loss" in components, on.origin)


def _components(plan: Plan) -> list[str] | None:
    parts = {"model": plan.fsdp.compile, "loss": plan.fsdp.compile_loss}
    return [name for name, on in parts.items() if on] if any(parts.values()) else None


def _recompute_mode(plan: Plan) -> str:
    every = plan.recompute.mode != "none" and plan.fsdp.recompute_every > 1
    return "selective" if plan.fsdp.per_operator or every else "none" if plan.recompute.mode == "none" else "full"


def _recompute_option(plan: Plan) -> str | None:
    if _recompute_mode(plan) != "selective":
        return None
    return "op" if plan.fsdp.per_operator else str(plan.fsdp.recompute_every)


ROWS = (
    Row(
        "optimizer.name",
        "optimizer.name",
        "optimizer",
        read=_optimizer,
        value=lambda plan: plan.optimizer.algorithm.torchtitan,
    ),
    Row("optimizer.implementation", "optimizer.implementation", "optimizer", read=elsewhere),
    Row("optimizer.weight_decay", "optimizer.weight_decay", "optimizer", read=elsewhere, value=_decay),
    Row(
        BATCH[0],
        "batch.mbs",
        "training",
        older=(BATCH[1], TOKENS),
        without_effect=later("batch.mbs"),
        value=_local_batch,
    ),
    Row(
        GLOBAL_BATCH,
        "batch.gbs",
        "training",
        older=(ALL_TOKENS,),
        without_effect=later("batch.gbs"),
        when=lambda plan: not _in_stages(plan),
    ),
    Row("training.seq_len", "batch.seq", "training", default=2048, older=("training.max_context_length",)),
    Row("training.dtype", "fsdp.parameters", "training", "word", "fp32", DTYPES, when=_in_release_0_2),
    Row("training.mixed_precision_param", "precision.dtype", "training", "word", "bf16", DTYPES),
    Row("training.mixed_precision_reduce", "fsdp.reduce", "training", "word", "fp32", DTYPES),
    switch("training.enable_cpu_offload", "fsdp.offload", "training"),
    Row(GRAPHS, "fsdp.cuda_graphs", read=_graphs),
    Row(REPLICATE[0], "fsdp.replicas", "parallelism", default=1, older=REPLICATE[1:]),
    Row(
        SHARD[0],
        "layout.dp",
        "parallelism",
        read=_shards,
        value=lambda plan: (plan.layout.dp or 1) // plan.fsdp.replicas,
    ),
    Row(
        RESHARD[0],
        "fsdp.reshard_after_forward",
        "parallelism",
        read=_reshard,
        value=_policy,
    ),
    Row(TP[0], "layout.tp", "parallelism", default=1, older=TP[1:]),
    Row(
        LOSS_WHOLE[0],
        "loss.kind",
        "parallelism",
        older=(LOSS_WHOLE[1], "training.enable_loss_parallel"),
        without_effect=later("with tensor parallelism: loss.kind"),
        value=lambda plan: plan.layout.tp > 1 and plan.loss.kind == "plain",
    ),
    Row(PP[0], "layout.pp", "parallelism", default=1, older=PP[1:]),
    Row(CP[0], "layout.cp", "parallelism", default=1, older=CP[1:]),
    Row(
        SEQUENCE, "layout.sequence_parallel", without_effect=later("with tensor parallelism: layout.sequence_parallel")
    ),
    _staged("pipeline_parallel_schedule", "pipeline and layout.vpp", older="experimental", value=_schedule),
    _staged("pipeline_parallel_microbatch_size", "batch.mbs", older="experimental", value=lambda plan: plan.batch.mbs),
    _staged("pipeline_parallel_split_points", "pipeline and layout.vpp", older="experimental", value=_split_points),
    _staged("module_fqns_per_model_part", "pipeline and layout.vpp", value=_module_names),
    _staged("pipeline_parallel_microbatches", "batch.mbs", older="experimental", value=elsewhere),
    _staged("pipeline_parallel_layers_per_stage", "pipeline and layout.vpp", older="experimental", value=elsewhere),
    _staged(
        "pipeline_parallel_first_stage_less_layers", "pipeline and layout.vpp", older="experimental", value=elsewhere
    ),
    _staged("pipeline_parallel_last_stage_less_layers", "pipeline", value=elsewhere),
    _staged("num_pp_microbatches", "batch.gbs", value=elsewhere),
    Row(
        "activation_checkpoint.mode", "recompute.mode", "activation_checkpoint", read=_recompute, value=_recompute_mode
    ),
    Row(
        "activation_checkpoint.selective_ac_option",
        "",
        "activation_checkpoint",
        read=elsewhere,
        value=_recompute_option,
    ),
    Row(
        COMPILE[0],
        "fsdp.compile",
        "compile",
        older=COMPILE[1:],
        read=_compile,
        value=lambda plan: plan.fsdp.compile or plan.fsdp.compile_loss,
        when=lambda plan: plan.fsdp.compile or plan.fsdp.compile_loss,
    ),
    Row(COMPONENTS, "fsdp.compile_loss", "compile", read=elsewhere, value=_components),
    Row(CONVERTERS[0], "precision.fp8", older=CONVERTERS[1:], read=read_low),
    Row("model_spec.lora.rank", "lora.rank", read=read_adapters),
    Row("loss.num_chunks", "loss.chunks", read=_loss),
)
