"""A plan as a job's TOML of torchtitan.

Sections and keys: ``torchtitan/config/job_config.py`` of releases 0.2.0 and 0.2.2 and ``torchtitan/config_manager.py``
of 0.1.0; where each was a key is in ``plan/launch/arguments/torchtitan.txt``. The release is the newest whose code is
the plan's: embedding and head are units of their own from July 2025, and the last stage of a pipeline keeps no logits
from 22 October 2025 (``torchtitan/train.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .. import __version__
from ..plan.completion import launched_plan
from ..plan.errors import Origin, PlanError
from ..plan.fields import by_flag
from ..plan.launch.torchtitan import Said, torchtitan_of
from ..plan.launch.torchtitan_file import configuration_of
from ..plan.launch.torchtitan_keys import RELEASES
from ..plan.launch.torchtitan_models import FLAVOURS
from ..plan.launch.torchtitan_settings import VERSION
from ..plan.models import load_spec
from ..plan.node import Node
from ..plan.plan import Plan
from ..plan.read import Flags
from .beside import model_flags
from .exported import PLACE, READ_BACK, Draft, Target
from .sameness import titan_edges
from .script import comment
from .titan_stages import parts, split_points, torchtitans_own

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
Sections = dict[str, dict[str, Any]]


def write(plan: Plan) -> Draft:
    """The job of ``plan``."""
    _refuse(plan)
    release = _release(plan)
    flavour = _flavour(plan)
    sections: Sections = {
        "model": {"name": flavour[0], "flavor": flavour[1]} if flavour else _unnamed(plan),
        "optimizer": _optimizer(plan),
        "training": _training(plan, release),
        "parallelism": _parallelism(plan, release),
        "activation_checkpoint": _recompute(plan),
    }
    lines = [*_head(plan, release, known=flavour is not None)]
    for name, keys in sections.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in keys.items())]
    settings = () if release == max(RELEASES) else (f"{VERSION}={release}",)
    flags = {} if flavour else model_flags(plan.model)
    return Draft("\n".join(lines) + "\n", {"release": release, "config": sections}, flags, settings)


def _refuse(plan: Plan) -> None:
    """What would be read as something else, with the reason."""
    given, optimizer = plan.fsdp, plan.optimizer.name
    if given.code != "torchtitan":
        raise PlanError("fsdp.code", given.code, "must be torchtitan: its jobs train its own models")
    if optimizer not in ("adam", "adamw"):
        raise PlanError("optimizer.name", optimizer, "must be adam or adamw: torchtitan has no other by name")
    for path, dtype in (
        ("precision.dtype", plan.precision.dtype),
        ("fsdp.reduce", given.reduce),
        ("fsdp.parameters", given.parameters),
    ):
        if dtype not in DTYPES:
            raise PlanError(path, dtype, f"must be {' or '.join(DTYPES)}: torchtitan takes no other")
    if plan.layout.dp == given.replicas:
        problem = "must be more than fsdp.replicas: torchtitan's releases shard nothing on one rank"
        raise PlanError("layout.dp", plan.layout.dp, problem)


def _release(plan: Plan) -> str:
    """The newest release that runs the model as the plan has it."""
    given = plan.fsdp
    if given.ends_apart:
        return "0.2.0" if given.return_outputs else max(RELEASES)
    if given.parameters != "fp32":
        problem = "must be fp32 without fsdp.ends_apart: before July 2025 torchtitan kept its parameters in no other"
        raise PlanError("fsdp.parameters", given.parameters, problem)
    if plan.layout.pp > 1 and not given.return_outputs:
        problem = "must be true with stages and without fsdp.ends_apart: torchtitan changed the latter first"
        raise PlanError("fsdp.return_outputs", False, problem)
    return "0.1.0"


def _flavour(plan: Plan) -> tuple[str, str] | None:
    """torchtitan's names of the model, where it has it."""
    fields = [field.name for field in by_flag().values() if field.section == "model" and field.name != "name"]
    for names, spec in FLAVOURS.items():
        known = load_spec(spec)
        if all(getattr(known, name) == getattr(plan.model, name) for name in fields):
            return names
    return None


def _unnamed(plan: Plan) -> dict[str, Any]:
    return {"name": "llama3", "flavor": plan.model.name}


def _optimizer(plan: Plan) -> dict[str, Any]:
    optimizer = plan.optimizer
    default = 0.01 if optimizer.name == "adamw" else 0.0
    return {
        "name": {"adam": "Adam", "adamw": "AdamW"}[optimizer.name],
        "implementation": optimizer.implementation,
        "weight_decay": default if optimizer.weight_decay is None else optimizer.weight_decay,
    }


def _training(plan: Plan, release: str) -> dict[str, Any]:
    """A pipeline's batch is of all its micro-batches; otherwise a rank accumulates up to the global one."""
    batch, given = plan.batch, plan.fsdp
    assert batch.gbs is not None
    assert plan.layout.dp is not None
    sizes: dict[str, Any] = {"local_batch_size": batch.mbs, "global_batch_size": batch.gbs}
    if plan.layout.pp > 1:
        sizes = {"local_batch_size": batch.gbs // plan.layout.dp}
    stored = {} if release == "0.1.0" else {"dtype": DTYPES[given.parameters]}
    return {
        **sizes,
        "seq_len": batch.seq,
        **stored,
        "mixed_precision_param": DTYPES[plan.precision.dtype],
        "mixed_precision_reduce": DTYPES[given.reduce],
        "enable_cpu_offload": given.offload,
    }


def _parallelism(plan: Plan, release: str) -> dict[str, Any]:
    layout, given = plan.layout, plan.fsdp
    assert layout.dp is not None
    keys: dict[str, Any] = {
        "data_parallel_replicate_degree": given.replicas,
        "data_parallel_shard_degree": layout.dp // given.replicas,
        "fsdp_reshard_after_forward": "never" if layout.pp == 1 and not given.reshard_after_forward else "default",
        "tensor_parallel_degree": layout.tp,
        "disable_loss_parallel": layout.tp > 1 and plan.loss.kind == "plain",
        "pipeline_parallel_degree": layout.pp,
        "context_parallel_degree": layout.cp,
    }
    return {**keys, **_pipeline(plan, release)} if layout.pp > 1 else keys


def _pipeline(plan: Plan, release: str) -> dict[str, Any]:
    """Schedule and micro-batches; the stages where torchtitan would cut elsewhere by itself."""
    layout, layers = plan.layout, plan.model.layers
    schedule = "Interleaved1F1B" if layout.vpp > 1 else {"1f1b": "1F1B", "gpipe": "GPipe"}[plan.pipeline.schedule]
    keys = {"pipeline_parallel_schedule": schedule, "pipeline_parallel_microbatch_size": plan.batch.mbs}
    edges = titan_edges(plan)
    if edges == torchtitans_own(layers, layout.pp, layout.vpp):
        return keys
    if release == "0.1.0":
        return {**keys, "pipeline_parallel_split_points": split_points(edges, layers)}
    return {**keys, "module_fqns_per_model_part": parts(edges, layers)}


def _recompute(plan: Plan) -> dict[str, Any]:
    if plan.fsdp.per_operator:
        return {"mode": "selective", "selective_ac_option": "op"}
    if plan.recompute.mode == "none":
        return {"mode": "none"}
    if plan.fsdp.recompute_every > 1:
        return {"mode": "selective", "selective_ac_option": str(plan.fsdp.recompute_every)}
    return {"mode": "full"}


# -- text ---------------------------------------------------------------------------------------------


def _head(plan: Plan, release: str, *, known: bool) -> Iterator[str]:
    spec, layout = plan.model, plan.layout
    sizes = ", ".join(f"{name} {getattr(layout, name)}" for name in ("tp", "pp", "vpp", "dp"))
    yield from comment(f"{spec.name}: torchtitan {release} on {plan.hardware.gpus:,} GPUs ({sizes}).")
    yield f"# Written by memplan {__version__}. Estimate it with"
    yield READ_BACK
    yield "# Not in a plan, and yours to add: the tokenizer (hf_assets_path), data, steps, learning rate, checkpoints."
    if not known:
        yield from comment(
            f"torchtitan has no such flavour: give it one of {spec.layers} layers, hidden size {spec.hidden}, "
            f"{spec.heads} heads, {spec.kv_heads} of keys and values, {spec.ffn} features in the MLP and "
            f"{spec.vocab} tokens."
        )


def _toml(value: Any) -> str:
    """A value of TOML: its strings are JSON's, and so are its lists."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + "".join(f"    {_toml(item)},\n" for item in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def read(text: str, flags: Flags, settings: tuple[str, ...]) -> Plan:
    """What ``--from torchtitan`` makes of the job."""
    gpus = flags.get("gpus")
    node = Node(int(gpus), Origin("--gpus")) if isinstance(gpus, str) else None
    said = Said(settings, flags, gpus=node)
    return launched_plan(torchtitan_of(*configuration_of(text, "job.toml"), said), flags).plan


TARGET = Target(
    name="torchtitan",
    framework="fsdp",
    what="torchtitan's job configuration",
    write=write,
    read=read,
    command=("--from", "torchtitan", PLACE),
    beside=frozenset({"hardware", "model", "headroom", "torch", "environment"}),
)
