"""``--from accelerate``: Accelerate's configuration file as a plan, and what it adds to a Trainer's arguments.

Keys and defaults: ``commands/config/config_args.py`` and ``utils/dataclasses.py`` (``DeepSpeedPlugin``,
``FullyShardedDataParallelPlugin``) of accelerate 1.15; what FSDP 2 makes of a model: ``fsdp2_prepare_model`` of
``utils/fsdp_utils.py``, which shards parameters in fp32 under mixed precision, and reduces in the lower one.

What the flags of ``accelerate launch`` say, which are also those that trl's commands pass on.

accelerate 1.15, ``commands/launch.py`` (``launch_command_parser``, ``_validate_launch_command``); trl 1.16,
``cli/commands/training.py`` (whatever the trainer's parser does not know is the launcher's),
``cli/accelerate_config.py`` (``--accelerate_config``) and ``accelerate_configs/``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from ..frameworks import framework as framework_of
from ..plan.errors import ABSENT, Guesses, Node, PlanError, guessed, nearest, wrong_at
from ..plan.normalise import normalised
from ..plan.notes import Note
from ..plan.read import Source
from ..plan.text import folder_of, parse_yaml, path_of, read_text, text_at
from ..values import dataclass
from .deepspeed.reader import ds_config_in
from .exported import Compiler, compiled
from .launch import Asked, Launch, left_out
from .launchers import found_from
from .settings import Building, Keys, Reader, Row, elsewhere, read_rows

WITHOUT_EFFECT = frozenset(
    """
    compute_environment debug downcast_bf16 enable_cpu_affinity machine_rank main_process_ip main_process_port
    main_training_function num_machines rdzv_backend rdzv_conf same_network gpu_ids tpu_env tpu_use_cluster
    tpu_use_sudo tpu_name tpu_zone commands command_file tpu_vm max_restarts monitor_interval mpirun_config
    zero3_init_flag use_parallelism_config
    """.split()  # noqa: SIM905 - a list of that many lines reads no better
)
"""Keys of the file without effect on a rank's memory."""

REFUSED: Mapping[str, str] = {
    "megatron_lm_config": "Accelerate's Megatron-LM is not modelled; --from megatron reads Megatron-LM's own scripts",
    "fp8_config": "fp8 is not modelled under Accelerate yet",
    "ipex_config": "it is for Intel's devices",
    "use_cpu": "there is no GPU then",
}
"""Sections that change memory, and why they are not read."""

READ = (
    "distributed_type",
    "mixed_precision",
    "num_processes",
    "fsdp_config",
    "parallelism_config",
    "deepspeed_config",
    "dynamo_config",
    "dynamo_backend",
)

_DISTRIBUTED = {"NO": "single", "MULTI_GPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "deepspeed"}
_ALONE = ("NO", "DistributedType.NO", False, None)
"""What ``distributed_type`` says of one process."""

WITHOUT_EFFECT_ON_FSDP = frozenset(
    """
    transformer_layer_cls_to_wrap transformer_cls_names_to_wrap backward_prefetch forward_prefetch use_orig_params
    state_dict_type sync_module_states cpu_ram_efficient_loading limit_all_gathers
    min_num_params xla xla_fsdp_v2 xla_fsdp_grad_ckpt xla_fsdp_settings
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class Accelerated:
    """What an Accelerate configuration decides; a node is nothing where it says nothing."""

    framework: str
    processes: Node | None
    precision: Node | None
    """``bf16``, ``fp16`` or ``no``."""
    fsdp: Keys | None
    """Where it shards so: by names without ``fsdp_``."""
    deepspeed: Node | None
    """Where DeepSpeed runs: as a ``ds_config.json``."""
    kind: Node
    """``distributed_type``."""
    compiler: Compiler | None = None
    """What turns ``torch.compile`` on."""

    @property
    def shards(self) -> bool:
        """The model is not whole on every GPU."""
        return self.fsdp is not None or self.deepspeed is not None


def read(place: str, asked: Asked) -> Launch:
    """The plan in the configuration at ``place``; the model and the batch are flags."""
    text, name = text_at(place)
    written = parse_yaml(text.expandtabs(2), name)
    return launched(written, Path() if place == "-" else folder_of(path_of(place)), asked)


def launched(written: Node, folder: Path, asked: Asked) -> Launch:
    """The plan in the configuration ``written``, whose relative paths start from ``folder``."""
    if not isinstance(written.value, dict):
        raise wrong_at(written.origin, "must be a mapping, as Accelerate's configuration is")
    if written.mapping.keys() & {"model", "framework", "extends"}:
        raise wrong_at(written.origin, "is a plan, not Accelerate's configuration; leave out --from")
    notes = tuple(_unread(written, strict=asked.strict))
    found = accelerated(written, folder)
    building = Building(written.origin)
    if found.processes is not None and not asked.names & {"gpus", "dp"}:
        building.put("hardware.gpus", found.processes)
    if found.compiler is not None:
        found.compiler.put(building)
    if found.deepspeed is not None:
        launch = ds_config_in(with_precision(found.deepspeed, found.precision), asked, building)
        return replace(launch, notes=(*notes, *launch.notes))
    if found.kind.value not in _ALONE and found.processes is None and not asked.names & {"gpus", "dp"}:
        raise wrong_at(written.origin.source, "needs --gpus N (nothing here says how many there are)")
    building.put("framework", found.framework)
    dtype = mixed(found.precision)
    if found.fsdp is not None:
        adapted = "lora-rank" in asked.names
        shard(building, found.fsdp, dtype, Node("fp32", written.origin), asked, newest=1, adapted=adapted)
    elif dtype is not None:
        building.put("precision.dtype", dtype)
        building.put("precision.autocast", Node(True, dtype.origin))
    else:
        building.put("precision.dtype", "fp32")
    notes = (*notes, *(Note(*note) for note in building.notes))
    return Launch(Source(normalised(building.plan()), Path()), notes)


def accelerated(written: Node, folder: Path) -> Accelerated:
    """``written``, the configuration in ``folder``, taken apart."""
    for key, why in REFUSED.items():
        node = written.mapping.get(key)
        if node is not None and node.value not in (None, {}, False, "false"):
            raise node.lacks(key, f"must be left out: {why}")
    for key in _SECTIONS:
        section = written.mapping.get(key)
        if section is not None and section.value is not None and not isinstance(section.value, dict):
            raise section.wrong(key, "must be a mapping, as accelerate config writes it")
    dynamo = dict(written.mapping.get("dynamo_config", written).mapping)
    if "backend" in dynamo:
        dynamo = {f"dynamo_{key}": node for key, node in dynamo.items()}
    kind = written.mapping.get("distributed_type", Node("NO", written.origin))
    named = "NO" if kind.value in (False, None) else str(kind.value).removeprefix("DistributedType.")
    framework = _DISTRIBUTED.get(named)
    if framework is None:
        raise kind.wrong("distributed_type", f"must be one of {', '.join(_DISTRIBUTED)}")
    processes = written.mapping.get("num_processes")
    if processes is not None and processes.value is None:  # as where it is left out: all GPUs of the machine
        processes = None
    if processes is not None and (type(processes.value) is not int or processes.value < 1):
        raise processes.wrong("num_processes", "must be a whole number from 1 on")
    if processes is not None and "distributed_type" in written.mapping and named == "NO":
        processes = Node(1, processes.origin)  # simple_launcher
    sections = framework_of(framework).supports.sections
    shards = "fsdp" in sections
    fsdp = written.mapping.get("fsdp_config", Node({}, written.origin))
    groups = _groups(written, processes, is_sharded=shards)
    deepspeed = written.mapping.get("deepspeed_config", Node({}, kind.origin))
    return Accelerated(
        framework,
        processes,
        written.mapping.get("mixed_precision"),
        sharding_keys(fsdp.with_items(groups)) if shards else None,
        ds_config(deepspeed, folder) if "deepspeed" in sections else None,
        kind,
        compiled(dynamo, "dynamo_"),
    )


_NO_GROUPS = {
    "tp_size": "layers over GPUs: --framework fsdp --fsdp-code torchtitan --tp N is closest",
    "cp_size": "sequences over GPUs: --framework fsdp --fsdp-code torchtitan --fsdp-newest --cp N is closest",
    "sp_size": "sequences over GPUs (Ulysses); without it, --seq with a GPU's part of one is the closest",
}
"""Sizes of Accelerate's other parallelism, and what it cuts."""
_REPLICAS = "parallelism_config_dp_replicate_size"


def _groups(written: Node, processes: Node | None, *, is_sharded: bool) -> dict[str, Node]:
    """Replicas of shards, as ``parallelism_config`` says them, among the keys of ``fsdp_config``. They are the mesh of
    ``fully_shard`` (``fsdp_dim_names`` of ``parallelism_config.py``), must come to all processes
    (``_validate_accelerator``), and are for FSDP 2 alone; sequences are cut by DeepSpeed, too
    (``_validate_launch_command``). Where all sizes are 1 nothing is asked for."""
    section = written.mapping.get("parallelism_config")
    if section is None or not section.mapping:
        return {}
    given = {key.removeprefix("parallelism_config_"): node for key, node in section.mapping.items()}
    sizes = {name: given.get(name, Node(1, section.origin)) for name in ("dp_replicate_size", "dp_shard_size")}
    for name in (*sizes, *_NO_GROUPS):
        size = given.get(name, Node(1, section.origin))
        if type(size.value) is not int or size.value < 1:
            raise size.wrong(name, "must be a whole number from 1 on")
        if name in _NO_GROUPS and size.value > 1:
            problem = "must be 1: of Accelerate's parallelism replicas of shards are modelled alone; it cuts "
            raise size.wrong(name, problem + _NO_GROUPS[name])
    total = math.prod(size.value for size in sizes.values() if isinstance(size.value, int))
    if total == 1:
        return {}
    if not is_sharded:
        raise section.lacks("parallelism_config", "must be left out: Accelerate takes it with FSDP 2 alone")
    if processes is not None and total != processes.value:
        raise section.lacks(
            "parallelism_config",
            f"comes to {total} GPUs, and num_processes is {processes.plain()}: Accelerate stops where they differ",
        )
    replicas = sizes["dp_replicate_size"]
    return {_REPLICAS: replicas} if replicas.value != 1 else {}


def sharding_keys(section: Node) -> Keys:
    """The keys of ``fsdp_config``, without ``fsdp_`` before their names, and switches that are text as what they
    mean (``str_to_bool``)."""
    words = {"true": True, "false": False}
    return Keys(
        {
            key.removeprefix("fsdp_"): Node(words.get(str(node.value).lower(), node.value), node.origin)
            if isinstance(node.value, str)
            else node
            for key, node in section.mapping.items()
            if node.value is not None
        },
        section.origin,
    )


# -- FSDP -----------------------------------------------------------------------------------------------


def _resharded(reader: Reader) -> None:
    """FSDP 2 takes true or false, FSDP 1 a strategy; the Trainer translates (``_apply_legacy_fsdp_to_config``)."""
    node = reader.settings.node("reshard_after_forward") or reader.settings.node("sharding_strategy")
    if node is None:
        return
    meant = {"full_shard": True, "1": True, "shard_grad_op": False, "2": False}
    value = node.value if isinstance(node.value, bool) else meant.get(str(node.value).lower())
    if value is None:
        problem = (
            "must be true (FULL_SHARD) or false (SHARD_GRAD_OP)"
            "; replicas of shards are modelled of FSDP 2, where parallelism_config says dp_replicate_size"
        )
        name = "reshard_after_forward" if reader.settings.has("reshard_after_forward") else "sharding_strategy"
        raise node.wrong(f"fsdp_{name}", problem)
    reader.building.put("fsdp.reshard_after_forward", Node(value, node.origin))


def _wrapped(reader: Reader) -> None:
    node = reader.settings.node("auto_wrap_policy")
    if node is not None and str(node.value).upper() != "TRANSFORMER_BASED_WRAP":
        raise node.wrong(
            "fsdp_auto_wrap_policy", "must be TRANSFORMER_BASED_WRAP: other units than layers are not modelled"
        )


def _recomputed(reader: Reader) -> None:
    node = reader.settings.value(Row("activation_checkpointing", "", kind="switch"))
    if node is None or not node.value:
        return
    if "compile" in reader.building.items:
        raise node.wrong(
            "fsdp_activation_checkpointing",
            "must be false with torch.compile, which passes over layers in torch's CheckpointWrapper: these run as "
            "without it; transformers' gradient_checkpointing is compiled",
        )
    reader.building.put("recompute.mode", Node("full", node.origin))
    reader.building.put(
        "recompute.reentrant", Node(False, node.origin)
    )  # CheckpointImpl.NO_REENTRANT, in every release


FSDP_ROWS = (
    Row("reshard_after_forward", "fsdp.reshard_after_forward", older=("sharding_strategy",), read=_resharded),
    Row("cpu_offload", "fsdp.offload", kind="switch", older=("offload_params",)),
    Row("auto_wrap_policy", "", read=_wrapped),
    Row("activation_checkpointing", "recompute.mode", read=_recomputed),
    Row("version", "", read=elsewhere),
    Row(_REPLICAS, "fsdp.replicas"),
)


def shard(
    building: Building,
    settings: Keys,
    dtype: Node | None,
    loaded: Node,
    asked: Asked,
    *,
    newest: int,
    adapted: bool = False,
) -> None:
    """Puts what ``fsdp_config`` says, for a model of dtype ``loaded`` under mixed precision of ``dtype``, if any.
    ``newest``: the version of FSDP where neither a flag nor the file names one. ``adapted``: adapters alone are
    trained, and nobody says in which dtype the model is loaded."""
    version = asked.whole("fsdp-version") or settings.node("version") or Node(newest, settings.origin)
    if str(version.value) not in ("1", "2"):
        raise version.wrong("fsdp_version", "must be 1 or 2")
    known = {name for row in FSDP_ROWS for name in row.names} | WITHOUT_EFFECT_ON_FSDP
    for key, node in settings.given.items():
        if key not in known:
            guess = nearest(key, known)
            if guess is not None:
                raise node.lacks(f"fsdp_{key}", f"is no key; did you mean fsdp_{guess}?")
            building.note("argument-unknown", f"fsdp_{key} ({node.origin}) is no key that is read")
    building.put("precision.dtype", dtype or loaded)
    if str(version.value) == "1":
        _flat(building, settings, dtype, version)
    else:
        _fully_shard(building, settings, dtype, loaded, adapted)
    read_rows(FSDP_ROWS, Reader(settings, building))


def without_reentrance(building: Building) -> None:
    """Reentrant checkpoints as the others, under an engine beside which they are not modelled; a note says so."""
    found = building.items.get("recompute.reentrant")
    if found is not None and found.value is True:
        building.put("recompute.reentrant", Node(False, found.origin), "use_reentrant")
        building.note(
            "checkpoints-when-sharded",
            f"reentrant checkpoints ({found.origin}) of a sharded model are assumed to hold as much as others do",
        )


def _fully_shard(building: Building, settings: Keys, dtype: Node | None, loaded: Node, adapted: bool) -> None:
    """FSDP 2: shards of what is trained are in fp32 under mixed precision, in which the gradients are reduced; what is
    frozen stays as it was loaded."""
    without_reentrance(building)
    building.put("fsdp.reshard_root", Node(True, settings.origin))
    if not adapted:
        trained = dtype is not None and "lora.rank" not in building.items
        building.put("fsdp.parameters", Node("fp32", dtype.origin) if dtype is not None and trained else loaded)
    building.put("fsdp.reduce", dtype or loaded)
    if dtype is not None:
        building.note(
            "accelerate-autocast",
            "the copy of the logits in fp32 that Accelerate makes of a model's outputs (convert_outputs_to_fp32) is "
            "not counted under FSDP 2 yet",
        )


def _flat(building: Building, settings: Keys, dtype: Node | None, version: Node) -> None:
    """FSDP 1, with autocast beside its own mixed precision."""
    building.put("fsdp.version", Node("1", version.origin))
    if dtype is not None:
        building.put("precision.autocast", Node(True, dtype.origin))
    for key, harmless, what in _NOT_COUNTED:
        node = settings.node(key)
        if node is not None and node.value is not harmless:
            building.note("argument-not-modelled", f"fsdp_{key} ({node.origin}) is not modelled: {what}")
    ahead = settings.node("backward_prefetch") or Node("NO_PREFETCH", settings.origin)
    name = str(ahead.value).upper()
    if name.isdigit() and 0 < int(name) <= len(BACKWARD_PREFETCH):
        name = list(BACKWARD_PREFETCH)[int(name) - 1]
    if name not in BACKWARD_PREFETCH:
        raise ahead.wrong("fsdp_backward_prefetch", f"must be one of {', '.join(BACKWARD_PREFETCH)}")
    building.put("fsdp.backward_prefetch", Node(BACKWARD_PREFETCH[name], ahead.origin))


_NOT_COUNTED = (
    ("forward_prefetch", False, "each unit's pass begins with the next unit gathered, too, which is not counted"),
    ("limit_all_gathers", True, "gathers that run ahead of the pass are not held back, and are not counted"),
)
"""Keys, what does nothing, and what another value does (``_pre_forward_unshard`` and ``_unshard`` of PyTorch's
``distributed/fsdp/_runtime_utils.py``)."""
BACKWARD_PREFETCH = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post", "NO_PREFETCH": "none"}
"""In Accelerate's order, by whose numbers they go too (``FSDP_BACKWARD_PREFETCH`` of ``utils/constants.py``)."""


# -- DeepSpeed ------------------------------------------------------------------------------------------


def ds_config(section: Node, folder: Path) -> Node:
    """``deepspeed_config`` as a ``ds_config.json``: the file that it names, or what ``DeepSpeedPlugin`` makes of its
    keys."""
    given = {key: node for key, node in section.mapping.items() if node.value is not None}
    file = given.get("deepspeed_config_file")
    if file is not None and file.value != "none":
        return ds_file(file, folder)
    origin = section.origin

    def offload(part: str) -> Node:
        device = given.get(f"offload_{part}_device", Node("none", origin))
        path = given.get(f"offload_{part}_nvme_path")
        return Node({"device": device, **({"nvme_path": path} if path is not None else {})}, device.origin)

    auto = Node("auto", origin)
    zero = {
        "stage": given.get("zero_stage", Node(2, origin)),
        "offload_optimizer": offload("optimizer"),
        "offload_param": offload("param"),
    }
    found = {
        "train_micro_batch_size_per_gpu": auto,
        "gradient_accumulation_steps": given.get("gradient_accumulation_steps", auto),
        "zero_optimization": Node(zero, origin),
    }
    if "gradient_clipping" in given:
        found["gradient_clipping"] = given["gradient_clipping"]
    return Node(found, origin)


def ds_file(file: Node, folder: Path) -> Node:
    """The ``ds_config.json`` that ``file`` names, or holds."""
    return file if isinstance(file.value, dict) else file_named(file, folder, "deepspeed", "a ds_config.json")


def file_named(file: Node, folder: Path, field: str, what: str) -> Node:
    """The JSON or YAML of the file that ``file``, the value of ``field``, names, from ``folder`` or from here."""
    if not isinstance(file.value, str):
        raise file.wrong(field, f"must be the path to {what}")
    path = found_from(file.value, folder)
    try:
        return parse_yaml(read_text(path).expandtabs(2), str(path))
    except PlanError as error:
        if error.origin is not None and error.origin.line is not None:
            raise
        raise file.wrong(field, error.problem) from None


def with_precision(config: Node, precision: Node | None) -> Node:
    """A ``ds_config.json`` with the mixed precision that Accelerate puts into it (``set_mixed_precision``)."""
    dtype = mixed(precision)
    items: dict[str, Node] = {}
    for name in ("bf16", "fp16"):
        section, enabled = config.mapping.get(name), config.at(f"{name}.enabled")
        if section is None and dtype is None:
            continue
        if enabled is None or enabled.value == "auto":
            on = Node(dtype is not None and dtype.value == name, (dtype or config).origin)
            items[name] = Node({**(section.mapping if section is not None else {}), "enabled": on}, on.origin)
    return config.with_items(items)


def mixed(precision: Node | None) -> Node | None:
    """``mixed_precision`` as a dtype; nothing for ``no``, which YAML may take for false."""
    if precision is None or precision.value in (False, None, "no"):
        return None
    if precision.value not in ("bf16", "fp16"):
        raise precision.wrong("mixed_precision", "must be no, bf16 or fp16: fp8 is not modelled under Accelerate yet")
    return precision


def _unread(written: Node, *, strict: bool) -> Iterable[Note]:
    known = (*READ, *REFUSED, *WITHOUT_EFFECT)
    guesses = Guesses(lambda key: nearest(key, known))
    for key, node in written.mapping.items():
        if key not in known and not key.startswith(("dynamo_", "tpu_")):
            guess = guesses.of(key)
            problem = guessed("is no key that is read", guess)
            if guess is not None:  # Accelerate refuses whatever it does not know (load_config_from_file)
                raise node.lacks(key, problem)
            yield left_out("argument-unknown", key, ABSENT, problem, node.origin, strict=strict)


# -- accelerate flags ----------------------------------------------------------------------------------


_PARTS = {
    "use_fsdp": ("distributed_type", "FSDP"),
    "use_deepspeed": ("distributed_type", "DEEPSPEED"),
    "multi_gpu": ("distributed_type", "MULTI_GPU"),
}
_OF_DEEPSPEED = (
    "zero_stage",
    "offload_optimizer_",
    "offload_param_",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "deepspeed_",
    "zero3_",
)
_GROUPS = "parallelism_config_"
_SECTIONS = {"fsdp_config": ("fsdp_",), "parallelism_config": (_GROUPS,), "deepspeed_config": _OF_DEEPSPEED}
_FILES = ("config_file", "accelerate_config")
_OF_TRAINER = frozenset({"gradient_accumulation_steps", "debug", "fsdp_config", "parallelism_config"})
"""Flags that the Trainer's parser has, too, and takes."""

_BEGIN = """
distributed_type: {}
mixed_precision: bf16
num_processes: 8
"""
OF_TRL: Mapping[str, str] = {
    "single_gpu": _BEGIN.format("'NO'"),
    "multi_gpu": _BEGIN.format("MULTI_GPU"),
    **{
        f"zero{stage}": f"{_BEGIN.format('DEEPSPEED')}deepspeed_config: {{zero_stage: {stage}{more}}}\n"
        for stage, more in ((1, ", gradient_accumulation_steps: 1"), (2, ""), (3, ""))
    },
    "fsdp1": f"{_BEGIN.format('FSDP')}fsdp_config: {{fsdp_version: 1, fsdp_backward_prefetch: BACKWARD_PRE}}\n",
    "fsdp2": f"{_BEGIN.format('FSDP')}fsdp_config: {{fsdp_version: 2, fsdp_reshard_after_forward: true}}\n",
}
"""Configurations that trl ships, by name: what of them changes memory."""


def split_off(arguments: Node) -> tuple[Node, dict[str, Node]]:
    """The Trainer's arguments among ``arguments`` of a command of trl, and the launcher's."""
    given = {key: node for key, node in arguments.mapping.items() if _is_launchers(key)}
    return Node({key: node for key, node in arguments.mapping.items() if key not in given}, arguments.origin), given


def _is_launchers(key: str) -> bool:
    known = key in READ or key in WITHOUT_EFFECT or key in _FILES or key in _PARTS
    parts = ("fsdp_", "dynamo_", _GROUPS, *_OF_DEEPSPEED)
    return (known or key.startswith(parts)) and key not in _OF_TRAINER


def changes_memory(flag: str) -> bool:
    """Whether what ``flag`` of the launcher says is in what ``configured`` makes of it."""
    parts = ("fsdp_", "dynamo_", _GROUPS, *_OF_DEEPSPEED)
    known = flag in (*_FILES, *_PARTS, "mixed_precision") or flag.startswith(parts)
    without = flag in WITHOUT_EFFECT or flag.removeprefix("fsdp_") in WITHOUT_EFFECT_ON_FSDP
    return known and not without and flag != "gradient_clipping"


def configured(flags: Mapping[str, Node], origin: Node, folder: Path) -> Accelerated:
    """What the launcher's ``flags`` say, over the file that one of them names; ``origin`` stands for the command."""
    items, file = {}, next((flags[name] for name in _FILES if name in flags), None)
    if file is not None:
        written, folder = _file(file, folder)
        items = dict(written.mapping)
    for name, node in flags.items():
        section = next((part for part, begins in _SECTIONS.items() if name.startswith(begins)), "")
        if name in _PARTS and node.value is True:
            items[_PARTS[name][0]] = Node(_PARTS[name][1], node.origin)
        elif section:
            items[section] = items.get(section, Node({}, node.origin)).with_items({name: node})
        elif name in ("num_processes", "mixed_precision") or name.startswith("dynamo_"):
            items[name] = node
    return accelerated(Node(items, origin.origin), folder)


def _file(file: Node, folder: Path) -> tuple[Node, Path]:
    """The configuration that ``file`` names, or trl ships under that name, and what its paths start from."""
    name = str(file.value)
    place = found_from(name, folder)
    if not place.exists() and name in OF_TRL:
        return parse_yaml(OF_TRL[name], f"{name} of trl"), folder
    try:
        return file_named(file, folder, "--config_file", "Accelerate's configuration"), place.parent
    except PlanError as error:
        if place.exists() or name.endswith((".yaml", ".yml", ".json")):
            raise
        problem = f"is no file here, and none of trl's configurations: {', '.join(OF_TRL)}"
        raise PlanError("accelerate_config", name, problem, origin=file.origin) from error
