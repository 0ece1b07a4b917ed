"""``ds_config.json``: DeepSpeed's configuration as the sections of a plan, every value with its origin.

Keys and defaults: ``runtime/config.py``, ``runtime/zero/config.py`` and ``offload_config.py`` of DeepSpeed 0.19.
``"auto"`` is filled in by Hugging Face's Trainer (``integrations/deepspeed.py``): three sizes follow from the
model's hidden size h (h², 0.9 h², 10 h); what follows from its command line has to be given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import field
from typing import Any

from ...optimizers import algorithm, algorithms
from ...optimizers.base import Algorithm, DeepspeedType
from ...plan.errors import ABSENT, Node, Origin, PlanError, Value, guessed, nearest, wrong_at
from ...plan.framework_sections import Deepspeed
from ...plan.plan import Plan
from ...values import dataclass
from ..settings import Building, Keys, Reader, Row, elsewhere, positive, read_rows

AUTO = "auto"

HIDDEN: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda h: h * h,
    "stage3_prefetch_bucket_size": lambda h: int(0.9 * h * h),
    "stage3_param_persistence_threshold": lambda h: 10 * h,
}
"""Sizes that the Trainer puts for ``auto``, from the model's hidden size."""

ASKED = {
    "train_micro_batch_size_per_gpu": (("batch.mbs",), "--mbs N"),
    "gradient_accumulation_steps": (("batch.accumulation", "batch.gbs"), "--accumulation N"),
    "fp16.enabled": (("precision.dtype",), "--dtype"),
    "bf16.enabled": (("precision.dtype",), "--dtype"),
    "optimizer.type": (("optimizer.name",), "--optimizer NAME"),
}
"""The plan's fields that answer, and the flag to ask for, where only the Trainer's command line has the value."""

SIZES = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
)
SWITCHES = (
    "contiguous_gradients",
    "overlap_comm",
    "reduce_scatter",
    "round_robin_gradients",
    "memory_efficient_linear",
)
WITHOUT_ALIAS = {
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "model_persistence_threshold": "stage3_model_persistence_threshold",
}

ELSEWHERE: dict[str, Value] = {
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "zero_hpz_partition_size": 1,
    "mics_shard_size": -1,
    "stage3_module_granularity_threshold": 0,
    "stage3_use_all_reduce_for_fetch_params": False,
    "stage3_allgather_sequential": False,
    "use_multi_rank_bucket_allreduce": True,
    "parameter_alignment": False,
    "legacy_stage1": False,
    "zenflow": None,
}
"""Keys that change memory and are modelled at their defaults only."""

WITHOUT_EFFECT = frozenset(
    {
        "stage",
        "allgather_partitions",
        "compute_grad_norm",
        "load_from_fp32_weights",
        "elastic_checkpoint",
        "ignore_unused_parameters",
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
        "pipeline_loading_checkpoint",
        "override_module_apply",
        "log_trace_cache_warnings",
        "enable_sanity_checks",
        "save_muon_momentum_buffer_in_memory",
        "mics_hierarchical_params_gather",
        "leaf_module",
        "cpu_offload_use_pin_memory",
        "cpu_offload",
        "cpu_offload_param",
        "cpu_offload_params",
        "offload_optimizer",
        "offload_param",
    }
)
"""Keys that are known, and read elsewhere or without effect on a training step's memory."""

NOT_MODELLED = (
    "tensor_parallel",
    "expert_parallel",
    "sequence_parallel_size",
    "hybrid_engine",
    "compression_training",
    "weight_quantization",
    "torch_autocast",
    "amp",
    "compile",
    "communication_data_type",
)
"""Top-level sections that change memory."""

SECTIONS = ("fp16", "bf16", "data_types", "optimizer", "zero_optimization")
"""Those that are read."""

PARTS_NOT_MODELLED = (
    "fp16.auto_cast",
    "fp16.fp16_master_weights_and_grads",
    "bf16.immediate_grad_update",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
    "zero_optimization.offload_optimizer.super_offload",
)
"""Switches that change memory where they are on."""

ZERO = "zero_optimization"

_LOADED = {"fp32": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
_ENDS = ("offload_optimizer", "offload_param")
_OF_ENDS: dict[str, tuple[str, ...]] = {
    "offload_optimizer": (
        *("device", "nvme_path", "pin_memory", "buffer_count", "ratio"),
        *("pipeline_read", "pipeline_write", "fast_init", "cpuadam_cores_perc", "super_offload"),
    ),
    "offload_param": ("device", "nvme_path", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu"),
}
"""Keys that ``offload_config.py`` has; it forbids others."""
_OLDER = {"offload_optimizer": ("cpu_offload",), "offload_param": ("cpu_offload_param", "cpu_offload_params")}
NVME = "/local_nvme"
"""A place for ``nvme_path``, which no plan has."""


@dataclass(slots=True)
class Configuration(Keys):
    """``ds_config.json``: null says nothing, and ``auto`` is what the Trainer makes of it."""

    root: Node
    hidden: int | None
    """The model's hidden size."""
    fields: Collection[str]
    """Plan fields that flags set."""
    asked: dict[str, None] = field(default_factory=dict)
    """Plan fields that ``auto`` leaves to flags."""
    lacking: dict[str, list[str]] = field(default_factory=dict)
    """Flags that nobody gave, and why each is needed: the settings that are ``auto``."""

    def node(self, name: str) -> Node | None:
        node = self.root.at(name)
        if node is None or node.value is None:
            return None
        return self._answered(name, node) if node.value == AUTO else node

    def _answered(self, path: str, node: Node) -> Node | None:
        key = path.rpartition(".")[2]
        if key in HIDDEN and path.startswith(f"{ZERO}."):
            if self.hidden is None:
                self.lack("--model NAME", f"{key} is auto")
                return None
            return Node(HIDDEN[key](self.hidden), node.origin)
        if path in ASKED:
            names, flag = ASKED[path]
            if not {*names} & {*self.fields}:
                self.lack(flag, f"{path} is auto")
            self.asked.update(dict.fromkeys(names))
        return None

    def lack(self, flag: str, why: str) -> None:
        """Keeps that ``flag`` is needed; ``check`` asks for all of them at once."""
        reasons = self.lacking.setdefault(flag, [])
        if why not in reasons:
            reasons.append(why)

    def check(self) -> None:
        """``PlanError`` that names every flag that is lacking."""
        if self.lacking:
            asked = [f"{flag} ({', '.join(paths)})" for flag, paths in self.lacking.items()]
            named = ", ".join(asked[:-1]) + " and " * (len(asked) > 1) + asked[-1]
            raise wrong_at(self.origin.source, f"needs {named}")

    def switch(self, path: str) -> Node | None:
        return self.value(Row(path, "", kind="switch"))

    def on(self, path: str) -> bool:
        node = self.switch(path)
        return node is not None and node.value is True

    def refuse(self, path: str, problem: str, node: Node | None = None) -> PlanError:
        """An error about what stands at ``path``."""
        found = node or self.root.at(path) or self.root
        value = ABSENT if isinstance(found.value, dict) else found.plain()
        return PlanError(path, value, problem, origin=found.origin)


# -- what is read otherwise than as it is -------------------------------------------------------------


def _dtype(reader: Reader) -> None:
    config: Configuration = reader.settings
    if config.on("fp16.enabled") and config.on("bf16.enabled"):
        raise config.refuse("bf16.enabled", "contradicts fp16.enabled: one of them")
    for dtype in ("fp16", "bf16"):
        section = config.root.mapping.get(dtype)
        if section is not None and config.on(f"{dtype}.enabled"):
            reader.building.put("precision.dtype", Node(dtype, section.origin))
            return
    if "precision.dtype" not in config.asked:
        reader.building.put("precision.dtype", "fp32")


def _whole_batch(reader: Reader) -> None:
    config: Configuration = reader.settings
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, *parts = (integer(config, name, 1) for name in ("train_batch_size", *names))
    if whole is None:
        return
    for part, name in zip(parts, names, strict=True):
        if part is not None and positive("", whole) % positive("", part):
            raise config.refuse("train_batch_size", f"must be a multiple of {name} ({part.value})")
    reader.building.put("batch.gbs", whole)


def integer(config: Configuration, path: str, least: int) -> Node | None:
    """The whole number at ``path``."""
    node = config.value(Row(path, ""))
    if node is not None and isinstance(node.value, int) and node.value < least:
        raise node.wrong(path, f"must be at least {least}")
    return node


def _optimizer(reader: Reader) -> None:
    config: Configuration = reader.settings
    building = reader.building
    node = config.node("optimizer.type")
    if node is None:
        return
    known = {one.deepspeed.name.lower(): (one, one.deepspeed) for one in algorithms() if one.deepspeed}
    if (found := known.get(str(node.value).lower())) is None:
        raise node.wrong("optimizer.type", f"is not modelled; {', '.join(sorted(known))} are", known=known)
    optimizer, made = found
    mode = config.switch("optimizer.params.adam_w_mode")
    if made.decoupled is not None and (mode is None or mode.value):
        optimizer = algorithm(made.decoupled)
    building.put("optimizer.name", Node(optimizer.name, node.origin))
    building.put_said("optimizer.implementation", _implementation(config, optimizer, made, node.origin))
    for key in ("momentum", "weight_decay") if optimizer.has_momentum else ("weight_decay",):
        building.put_said(f"optimizer.{key}", config.node(f"optimizer.params.{key}"))
    wide = config.switch("optimizer.params.fp32_optimizer_states")
    if wide is not None and wide.value is False:
        raise config.refuse("optimizer.params.fp32_optimizer_states", "is not modelled")


def _implementation(config: Configuration, optimizer: Algorithm, made: DeepspeedType, origin: Origin) -> Node | None:
    """Which of PyTorch's implementations runs, where it is PyTorch's optimizer."""
    asked = made.torch_switch is not None and config.on(f"optimizer.params.{made.torch_switch}")
    if made.kernel is not None and not asked:
        return None
    foreach, fused = config.switch("optimizer.params.foreach"), config.switch("optimizer.params.fused")
    way = optimizer.torch_default
    if foreach is not None:
        way = "foreach" if foreach.value else "for-loop"
    if fused is not None and fused.value:
        way, foreach = "fused", fused
    if foreach is not None or made.kernel is not None or way != optimizer.implementations[0]:
        return Node(way, foreach.origin if foreach is not None else origin)
    return None


def _device(end: str) -> Callable[[Reader], None]:
    """Where the ``end`` of an update goes, with what each stage of ZeRO allows."""

    def read(reader: Reader) -> None:
        config: Configuration = reader.settings
        path, stage = f"{ZERO}.{end}.device", reader.building.size("layout.zero")
        device = config.node(path)
        for old in _OLDER[end]:
            if config.on(f"{ZERO}.{old}"):
                if config.has(f"{ZERO}.{end}"):
                    raise config.refuse(f"{ZERO}.{old}", f"contradicts {end}: one of them")
                device = Node("cpu", config.where(f"{ZERO}.{old}"))
        if device is None or device.value == "none":
            return
        if device.value not in ("cpu", "nvme"):
            raise config.refuse(path, "must be none, cpu or nvme", device)
        least = 1 if end == "offload_optimizer" and device.value == "cpu" else 3
        if stage < least:
            problem = f"needs stage 3, not {stage}" if least == 3 else "needs stage 1, 2 or 3, not 0"
            raise config.refuse(path, problem, device)
        if device.value == "nvme" and not config.has(f"{ZERO}.{end}.nvme_path"):
            raise PlanError(f"{ZERO}.{end}.nvme_path", None, "must be given for nvme", origin=device.origin)
        reader.building.put(f"deepspeed.{end}", device)

    return read


def _ratio(reader: Reader) -> None:
    path = f"{ZERO}.offload_optimizer.ratio"
    ratio = reader.settings.value(Row(path, "", kind="number"))
    if ratio is not None:
        if not 0 <= ratio.value <= 1:
            raise ratio.wrong(path, "must be from 0 to 1")
        reader.building.put("deepspeed.offload_optimizer_ratio", ratio)


# -- the table ----------------------------------------------------------------------------------------


def _steps(plan: Plan) -> int:
    assert plan.batch.gbs is not None
    assert plan.layout.dp is not None
    return plan.batch.gbs // (plan.batch.mbs * plan.layout.dp)


def _sums_are_said(plan: Plan) -> bool:
    said = plan.deepspeed.gradient_accumulation_dtype is not None
    return said or plan.precision.gradients != plan.precision.dtype


def _is_told(name: str, stages: tuple[int, ...]) -> Callable[[Plan], bool]:
    """Whether an export names what ``stages`` read, or whatever else is not at its default."""
    default = Deepspeed.model_fields[name].default
    return lambda plan: plan.layout.zero in stages or getattr(plan.deepspeed, name) != default


_TOLD = {
    **dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), (1, 2, 3)),
    **dict.fromkeys((name for name in SIZES if name.startswith("stage3_") or name == "sub_group_size"), (3,)),
    "stage3_model_persistence_threshold": (),
}


def _size(name: str) -> Row:
    older = tuple(f"{ZERO}.{old}" for old, new in WITHOUT_ALIAS.items() if new == name)
    least = 1 if name == "reduce_bucket_size" else 0
    told = _is_told(name, _TOLD[name])
    return Row(f"{ZERO}.{name}", f"deepspeed.{name}", ZERO, older=older, least=least, when=told)


def _offload(end: str) -> Iterator[Row]:
    """Keys of one of the sections that say where states or parameters go."""

    def unused(reader: Reader) -> str:
        return "" if f"deepspeed.{end}" in reader.building.items else "nothing is offloaded"

    def row(key: str, name: str, **more: Any) -> Row:
        return Row(
            f"{ZERO}.{end}.{key}",
            f"deepspeed.{name}",
            ZERO,
            when=lambda plan: bool(getattr(plan.deepspeed, end) != "none"),
            **more,
        )

    yield row("device", end, read=_device(end))
    path = f"{ZERO}.{end}.nvme_path"
    yield Row(
        path, "", ZERO, read=elsewhere, value=lambda plan: NVME if getattr(plan.deepspeed, end) == "nvme" else None
    )
    yield row("pin_memory", f"{end}_pin", kind="switch", without_effect=unused)
    for key in ("buffer_count",) if end == "offload_optimizer" else ("buffer_count", "buffer_size", "max_in_cpu"):
        yield row(key, f"{end}_{key}", least=0, without_effect=unused)
    if end == "offload_optimizer":
        yield row("ratio", f"{end}_ratio", read=_ratio, without_effect=unused)


ROWS = (
    Row("train_micro_batch_size_per_gpu", "batch.mbs", "batch", least=1),
    Row("gradient_accumulation_steps", "", "batch", read=elsewhere, value=_steps),
    Row("train_batch_size", "batch.gbs", read=_whole_batch),
    Row("fp16.enabled", "", "fp16", read=_dtype, value=lambda plan: plan.precision.dtype == "fp16" or None),
    Row("bf16.enabled", "", "bf16", read=elsewhere, value=lambda plan: plan.precision.dtype == "bf16" or None),
    Row(
        "data_types.grad_accum_dtype",
        "deepspeed.gradient_accumulation_dtype",
        "data_types",
        "word",
        words=_LOADED,
        when=_sums_are_said,
        value=lambda plan: plan.precision.gradients,
    ),
    Row("gradient_clipping", "deepspeed.gradient_clipping", "engine", "any"),  # its default was 0 before it was 1
    Row("optimizer.type", "optimizer.name", read=_optimizer),
    Row(f"{ZERO}.stage", "layout.zero", ZERO, read=elsewhere),
    *map(_size, SIZES),
    *(Row(f"{ZERO}.{name}", f"deepspeed.{name}", ZERO, "switch", when=_is_told(name, ())) for name in SWITCHES),
    *(row for end in _ENDS for row in _offload(end)),
)


def configuration_of(
    written: Node, building: Building, *, hidden: int | None = None, given: Collection[str] = frozenset()
) -> Configuration:
    """The settings in ``written``, put into ``building``. ``hidden``: the model's hidden size; ``given``: plan fields
    that are known from elsewhere."""
    if not isinstance(written.value, dict):
        raise written.wrong("", "must be a mapping, as a ds_config.json is")
    config = Configuration({}, written.origin, written, hidden, given)
    _check_sections(config)
    building.put("framework", "deepspeed")
    stage = integer(config, f"{ZERO}.stage", 0) or Node(
        0, (config.root.at(f"{ZERO}.stage") or config.root.at(ZERO) or written).origin
    )
    if isinstance(stage.value, int) and stage.value > 3:
        raise stage.wrong(f"{ZERO}.stage", "must be from 0 to 3")
    building.put("layout.zero", stage)
    read_rows(ROWS, Reader(config, building))
    return config


def _check_sections(config: Configuration) -> None:
    """Refuses keys that change memory and are not modelled, and keys of ZeRO that DeepSpeed has not."""
    root = config.root
    for name in SECTIONS:
        node = root.mapping.get(name)
        if node is not None and node.value is not None and not isinstance(node.value, dict):
            raise config.refuse(name, "must be a mapping")
    for name in NOT_MODELLED:
        node = root.mapping.get(name)
        off = node is None or node.value in (None, False, 1) or node.value == {}
        if node is not None and not off and not _is_switched_off(node):
            raise node.wrong(name, "is not modelled")
    for path in ("data_types.param_dtype", "data_types.buffer_dtype"):
        if config.has(path):
            raise config.refuse(path, "is not modelled")
    for path in PARTS_NOT_MODELLED:
        if config.on(path):
            raise config.refuse(path, "is not modelled")
    for end, names in _OF_ENDS.items():
        for name, node in (root.at(f"{ZERO}.{end}") or Node({}, root.origin)).mapping.items():
            if name not in names:
                raise node.lacks(f"{ZERO}.{end}.{name}", guessed("is no key of DeepSpeed", nearest(name, names)))
    section = root.mapping.get(ZERO)
    known = (*SIZES, *SWITCHES, *ELSEWHERE, *WITHOUT_EFFECT)
    for name, node in section.mapping.items() if section is not None else ():
        if name in ELSEWHERE:
            if node.plain() != ELSEWHERE[name]:
                raise node.wrong(f"{ZERO}.{name}", "is not modelled")
        elif name not in known and name not in WITHOUT_ALIAS:
            raise node.wrong(f"{ZERO}.{name}", guessed("is no key of DeepSpeed", nearest(name, known)))


def _is_switched_off(section: Node) -> bool:
    """Whether it says that it is not on, as every section does that is off by default."""
    enabled = section.mapping.get("enabled", section.mapping.get("deepcompile"))
    return enabled is not None and enabled.value is False
