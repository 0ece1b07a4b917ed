"""``ds_config.json``: DeepSpeed's configuration as the sections of a plan, every value with its origin.

Keys and defaults: ``runtime/config.py``, ``runtime/zero/config.py`` and ``offload_config.py`` of DeepSpeed 0.19.
``"auto"`` is filled in by Hugging Face's Trainer (``integrations/deepspeed.py``): three sizes follow from the
model's hidden size h (h², 0.9 h², 10 h); what follows from its command line has to be given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from .errors import Origin, PlanError, nearest
from .node import Node, Value

AUTO = "auto"

HIDDEN: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda h: h * h,
    "stage3_prefetch_bucket_size": lambda h: int(0.9 * h * h),
    "stage3_param_persistence_threshold": lambda h: 10 * h,
}
"""What the Trainer puts for ``auto``."""

ASKED = {
    "train_micro_batch_size_per_gpu": ("batch.mbs", "--mbs"),
    "gradient_accumulation_steps": ("batch.gbs", "--gbs"),
    "fp16.enabled": ("precision.dtype", "--dtype"),
    "bf16.enabled": ("precision.dtype", "--dtype"),
    "optimizer.type": ("optimizer.name", "--optimizer"),
}
"""The plan's field, and its flag, for values that only the Trainer's command line has."""

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
"""What changes memory and is modelled at its default only."""

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
)
"""Switches that change memory where they are on."""

OPTIMIZERS = {"adam": "adam", "adamw": "adamw", "sgd": "sgd", "lion": "lion", "adafactor": "adafactor"}
"""DeepSpeed's own, or PyTorch's of that name (``_configure_basic_optimizer``)."""

ZERO = "zero_optimization"


@dataclass(frozen=True, slots=True)
class DeepSpeedConfig:
    """What a configuration says: sections of a plan, and fields of ZeRO by the names of ``Zero``."""

    plan: Node
    zero: dict[str, Node]
    steps: Node | None = None
    """``gradient_accumulation_steps``: without ``train_batch_size``, gbs = mbs · steps · dp."""
    asked: tuple[str, ...] = ()
    """Plan fields that ``auto`` leaves to what was given."""


@dataclass
class _Reader:
    root: Node
    hidden: int | None
    given: Collection[str]
    asked: list[str] = field(default_factory=list)

    # -- values -----------------------------------------------------------------------------------

    def at(self, path: str) -> Node | None:
        """The node at a dotted path; ``None`` for nothing, null and ``auto`` that was given otherwise."""
        node: Node | None = self.root
        for name in path.split("."):
            node = node.mapping.get(name) if node is not None else None
        if node is None or node.value is None:
            return None
        return self._answered(path, node) if node.value == AUTO else node

    def _answered(self, path: str, node: Node) -> Node | None:
        key = path.rpartition(".")[2]
        if key in HIDDEN and path.startswith(f"{ZERO}."):
            if self.hidden is None:
                raise PlanError(path, AUTO, "follows from the hidden size: name the model", origin=node.origin)
            return Node(HIDDEN[key](self.hidden), node.origin)
        if path in ASKED:
            name, flag = ASKED[path]
            if name not in self.given:
                problem = f"is filled in from the Trainer's arguments: say {flag}"
                raise PlanError(path, AUTO, problem, origin=node.origin)
            self.asked.append(name)
        return None

    def integer(self, path: str, least: int) -> Node | None:
        """A whole number, also as 5e8."""
        node = self.at(path)
        if node is None:
            return None
        value = node.value
        whole = isinstance(value, float) and value.is_integer()
        if isinstance(value, bool) or not (isinstance(value, int) or whole):
            raise PlanError(path, node.plain(), "must be a whole number", origin=node.origin)
        assert isinstance(value, (int, float))
        if value < least:
            raise PlanError(path, value, f"must be at least {least}", origin=node.origin)
        return Node(int(value), node.origin)

    def switch(self, path: str) -> Node | None:
        node = self.at(path)
        if node is not None and not isinstance(node.value, bool):
            raise PlanError(path, node.plain(), "must be true or false", origin=node.origin)
        return node

    def on(self, path: str) -> bool:
        node = self.switch(path)
        return node is not None and node.value is True

    # -- sections ---------------------------------------------------------------------------------

    def stage(self) -> int:
        node = self.integer(f"{ZERO}.stage", 0)
        if node is None:
            return 0
        assert isinstance(node.value, int)
        if node.value > 3:
            raise PlanError(f"{ZERO}.stage", node.value, "must be from 0 to 3", origin=node.origin)
        return node.value

    def precision(self) -> Iterator[tuple[str, Node]]:
        """``dtype`` and, where it is another, that of accumulated gradients."""
        if self.on("fp16.enabled") and self.on("bf16.enabled"):
            node = self.root.mapping["bf16"]
            raise PlanError("bf16.enabled", True, "contradicts fp16.enabled: one of them", origin=node.origin)
        for dtype in ("fp16", "bf16"):
            section = self.root.mapping.get(dtype)
            if section is not None and self.on(f"{dtype}.enabled"):
                yield "dtype", Node(dtype, section.origin)
                return
        asked = "precision.dtype" in self.asked
        if not asked:
            yield "dtype", Node("fp32", self.root.origin)

    def batch(self) -> Iterator[tuple[str, Node]]:
        micro = self.integer("train_micro_batch_size_per_gpu", 1)
        steps = self.integer("gradient_accumulation_steps", 1)
        whole = self.integer("train_batch_size", 1)
        if micro is not None:
            yield "mbs", micro
        if whole is None:
            return
        for part, name in ((micro, "train_micro_batch_size_per_gpu"), (steps, "gradient_accumulation_steps")):
            assert isinstance(whole.value, int)
            if part is not None and isinstance(part.value, int) and whole.value % part.value:
                problem = f"must be a multiple of {name} ({part.value})"
                raise PlanError("train_batch_size", whole.value, problem, origin=whole.origin)
        yield "gbs", whole

    def optimizer(self) -> Iterator[tuple[str, Node]]:
        node = self.at("optimizer.type")
        if node is None:
            return
        name = OPTIMIZERS.get(str(node.value).lower())
        if name is None:
            problem = f"is not modelled; {', '.join(sorted(OPTIMIZERS))} are"
            raise PlanError("optimizer.type", node.plain(), problem, origin=node.origin, known=OPTIMIZERS)
        decoupled = self.switch("optimizer.params.adam_w_mode")
        if name == "adam" and (decoupled is None or decoupled.value):
            name = "adamw"  # adam_w_mode is on by default
        yield "name", Node(name, node.origin)
        yield from self.implementation(name, node.origin)
        for key in ("momentum", "weight_decay") if name == "sgd" else ("weight_decay",):
            number = self.at(f"optimizer.params.{key}")
            if number is not None:
                yield key, number
        wide = self.switch("optimizer.params.fp32_optimizer_states")
        if wide is not None and wide.value is False:
            raise PlanError("optimizer.params.fp32_optimizer_states", False, "is not modelled", origin=wide.origin)

    def implementation(self, name: str, origin: Origin) -> Iterator[tuple[str, Node]]:
        """Which of PyTorch's implementations runs, where it is PyTorch's optimizer."""
        of_torch = name in ("sgd", "adafactor") or (
            name in ("adam", "adamw") and self.on("optimizer.params.torch_adam")
        )
        if not of_torch:
            return
        foreach, fused = self.switch("optimizer.params.foreach"), self.switch("optimizer.params.fused")
        way = "for-loop" if name == "adafactor" else "foreach"  # PyTorch's defaults
        if foreach is not None:
            way = "foreach" if foreach.value else "for-loop"
        if fused is not None and fused.value:
            way, foreach = "fused", fused
        if name != "sgd" or foreach is not None:
            yield "implementation", Node(way, foreach.origin if foreach is not None else origin)

    def zero(self, stage: int) -> Iterator[tuple[str, Node]]:
        section = self.root.mapping.get(ZERO)
        for name, node in section.mapping.items() if section is not None else ():
            known = name in SIZES or name in SWITCHES or name in WITHOUT_ALIAS or name in WITHOUT_EFFECT
            if name in ELSEWHERE:
                if node.plain() != ELSEWHERE[name]:
                    raise PlanError(f"{ZERO}.{name}", node.plain(), "is not modelled", origin=node.origin)
            elif not known:
                names = (*SIZES, *SWITCHES, *ELSEWHERE, *WITHOUT_EFFECT)
                near = nearest(name, names)
                problem = "is no key of DeepSpeed" + (f"; did you mean {near}?" if near else "")
                raise PlanError(f"{ZERO}.{name}", node.plain(), problem, origin=node.origin)
        for name in SIZES:
            size = self.integer(f"{ZERO}.{name}", 1 if name == "reduce_bucket_size" else 0)
            if size is not None:
                yield name, size
        for short, name in WITHOUT_ALIAS.items():
            size = self.integer(f"{ZERO}.{short}", 0)
            if size is not None:
                yield name, size
        for name in SWITCHES:
            switch = self.switch(f"{ZERO}.{name}")
            if switch is not None:
                yield name, switch
        yield from self.offload("offload_optimizer", ("cpu_offload",), stage)
        yield from self.offload("offload_param", ("cpu_offload_param", "cpu_offload_params"), stage)

    def offload(self, name: str, older: tuple[str, ...], stage: int) -> Iterator[tuple[str, Node]]:
        """Where states or parameters go, with what each stage allows."""
        device = self.at(f"{ZERO}.{name}.device")
        section = self.at(f"{ZERO}.{name}")
        for old in older:
            if self.on(f"{ZERO}.{old}"):
                node = self.root.mapping[ZERO].mapping[old]
                if section is not None:
                    raise PlanError(f"{ZERO}.{old}", True, f"contradicts {name}: one of them", origin=node.origin)
                device = Node("cpu", node.origin)
        if device is None or device.value == "none":
            return
        path = f"{ZERO}.{name}.device"
        if device.value not in ("cpu", "nvme"):
            raise PlanError(path, device.plain(), "must be none, cpu or nvme", origin=device.origin)
        least = 1 if name == "offload_optimizer" and device.value == "cpu" else 3
        if stage < least:
            problem = f"needs stage 3, not {stage}" if least == 3 else "needs stage 1, 2 or 3, not 0"
            raise PlanError(path, device.value, problem, origin=device.origin)
        if device.value == "nvme" and self.at(f"{ZERO}.{name}.nvme_path") is None:
            raise PlanError(f"{ZERO}.{name}.nvme_path", None, "must be given for nvme", origin=device.origin)
        yield name, device
        pin = self.switch(f"{ZERO}.{name}.pin_memory")
        if pin is not None:
            yield f"{name}_pin", pin
        sizes = ("buffer_count",) if name == "offload_optimizer" else ("buffer_count", "buffer_size", "max_in_cpu")
        for key in sizes:
            size = self.integer(f"{ZERO}.{name}.{key}", 0)
            if size is not None:
                yield f"{name}_{key}", size
        ratio = self.at(f"{ZERO}.offload_optimizer.ratio") if name == "offload_optimizer" else None
        if ratio is not None:
            if isinstance(ratio.value, bool) or not isinstance(ratio.value, (int, float)) or not 0 <= ratio.value <= 1:
                raise PlanError(f"{ZERO}.{name}.ratio", ratio.plain(), "must be from 0 to 1", origin=ratio.origin)
            yield "offload_optimizer_ratio", ratio


SUMS = {"fp32": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}


def read_deepspeed_config(
    written: Node, *, hidden: int | None = None, given: Collection[str] = frozenset()
) -> DeepSpeedConfig:
    """The configuration in ``written``. ``hidden``: the model's hidden size; ``given``: plan fields that flags set."""
    if not isinstance(written.value, dict):
        raise PlanError("", written.plain(), "must be a mapping, as a ds_config.json is", origin=written.origin)
    reader = _Reader(written, hidden, given)
    for name in SECTIONS:
        node = written.mapping.get(name)
        if node is not None and node.value is not None and not isinstance(node.value, dict):
            raise PlanError(name, node.plain(), "must be a mapping", origin=node.origin)
    for name in NOT_MODELLED:
        node = written.mapping.get(name)
        off = node is None or node.value in (None, False, 1) or node.value == {}
        if node is not None and not off and not _is_switched_off(node):
            raise PlanError(name, node.plain(), "is not modelled", origin=node.origin)
    for path in ("data_types.param_dtype", "data_types.buffer_dtype"):
        cast = reader.at(path)
        if cast is not None:
            raise PlanError(path, cast.plain(), "is not modelled", origin=cast.origin)
    for path in PARTS_NOT_MODELLED:
        if reader.on(path):
            section, _, key = path.partition(".")
            raise PlanError(path, True, "is not modelled", origin=_origin(written, section, key))
    stage = reader.stage()
    sections = {
        "layout": {"zero": Node(stage, _origin(written, ZERO, "stage"))},
        "batch": dict(reader.batch()),
        "precision": dict(reader.precision()),
        "optimizer": dict(reader.optimizer()),
    }
    zero = dict(reader.zero(stage))
    sums = reader.at("data_types.grad_accum_dtype")
    if sums is not None:
        if str(sums.value) not in SUMS:
            problem = "must be fp32, fp16 or bf16"
            raise PlanError("data_types.grad_accum_dtype", sums.plain(), problem, origin=sums.origin)
        zero["gradient_accumulation_dtype"] = Node(SUMS[str(sums.value)], sums.origin)
    clipping = reader.at("gradient_clipping")
    if clipping is not None:
        zero["gradient_clipping"] = clipping
    items = {name: Node(fields, written.origin) for name, fields in sections.items() if fields}
    framework = Node("deepspeed", written.origin)
    steps = reader.integer("gradient_accumulation_steps", 1)
    plan = Node({"framework": framework, **items}, written.origin)
    return DeepSpeedConfig(plan, zero, steps, tuple(dict.fromkeys(reader.asked)))


def _is_switched_off(section: Node) -> bool:
    """Whether it says that it is not on, as every section does that is off by default."""
    enabled = section.mapping.get("enabled", section.mapping.get("deepcompile"))
    return enabled is not None and enabled.value is False


def _origin(root: Node, *names: str) -> Origin:
    node = root
    for name in names:
        node = node.mapping.get(name, node)
    return node.origin
