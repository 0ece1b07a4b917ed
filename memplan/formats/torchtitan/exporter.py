"""A plan as a job's TOML of torchtitan.

Sections and keys: ``torchtitan/config/job_config.py`` of releases 0.2.0 and 0.2.2 and ``torchtitan/config_manager.py``
of 0.1.0; where each was a key is in ``formats/arguments/torchtitan.txt``. The release is the newest whose code is
the plan's: embedding and head are units of their own from July 2025, and the last stage of a pipeline keeps no logits
from 22 October 2025 (``torchtitan/train.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ...plan.errors import PlanError
from ...plan.fields import by_flag
from ...plan.models import load_spec
from ...plan.plan import Plan, ResolvedPlan
from ...plan.read import Flags
from ..exported import PLACE, Draft, Target, comment, head, model_flags, sizes_of
from ..launch import Asked, launched_plan
from .keys import RELEASES, configuration_of
from .reader import torchtitan_of
from .settings import VERSION
from .stages import FLAVOURS
from .table import DTYPES, ROWS, titan_edges

LLAMA = "llama-3-8b"
"""A model of the family that a job can name without a flavour."""

Sections = dict[str, dict[str, Any]]


def write(plan: ResolvedPlan) -> Draft:
    """The job of ``plan``."""
    _refuse(plan)
    release = _release(plan)
    flavour = _flavour(plan)
    if flavour is None and plan.model.family != load_spec(LLAMA).family:
        problem = "is no flavour of torchtitan's: its sizes cannot be written into a job"
        raise PlanError("model", plan.model.name, problem)
    name, flavor = flavour or ("llama3", plan.model.name)
    sections: Sections = {"model": {"name": name, "flavor": flavor}}
    for row in ROWS:
        value = row.written(plan)
        if value is not None:
            sections.setdefault(row.group, {})[row.name.removeprefix(f"{row.group}.")] = value
    if plan.layout.ep > 1:
        sections.setdefault("parallelism", {})["expert_parallel_degree"] = plan.layout.ep
        if (plan.layout.etp or 1) > 1:
            sections["parallelism"]["expert_tensor_parallel_degree"] = plan.layout.etp
    lines = [*_head(plan, release, known=flavour is not None)]
    for name, keys in sections.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in keys.items())]
    settings = () if release == max(RELEASES) else (f"{VERSION}={release}",)
    flags = {} if flavour else model_flags(plan.model)
    return Draft("\n".join(lines) + "\n", {"release": release, "config": sections}, flags, settings)


def _refuse(plan: ResolvedPlan) -> None:
    """Refuses a plan that torchtitan would read as another one, with the reason."""
    given, optimizer = plan.fsdp, plan.optimizer
    plan.refuse(
        (
            "fsdp.code",
            given.code != "torchtitan",
            "must be torchtitan (--fsdp-code): its jobs train its own models; "
            "--to deepspeed or --to megatron writes other frameworks' files",
        ),
        (
            "optimizer.name",
            optimizer.algorithm.torchtitan is None,
            "must be adam or adamw: torchtitan has no other by name",
        ),
        (
            "lora.rank",
            plan.lora.rank is not None,
            "must be left out: torchtitan's TOML had no adapters (its Python has)",
        ),
        (
            "loss.kind",
            plan.loss.kind == "chunked",
            "must be plain, or vocab-parallel with tensor parallelism: torchtitan has had chunks since April 2026, and "
            "its jobs are Python since February 2026, which is read (--from torchtitan) and not written",
        ),
    )
    for path, dtype in (
        ("precision.dtype", plan.precision.dtype),
        ("fsdp.reduce", given.reduce),
        ("fsdp.parameters", given.parameters),
    ):
        if dtype not in DTYPES.values():
            raise PlanError(path, dtype, f"must be {' or '.join(DTYPES.values())}: torchtitan takes no other")
    if plan.layout.dp == given.replicas:
        raise plan.wrong(
            "layout.dp", "must be more than fsdp.replicas: torchtitan's releases shard nothing on one rank"
        )


def _release(plan: ResolvedPlan) -> str:
    """The newest release that runs the model as the plan has it."""
    given = plan.fsdp
    if given.ends_apart:
        return "0.2.0" if given.return_outputs else max(RELEASES)
    plan.refuse(
        (
            "fsdp.parameters",
            given.parameters != "fp32",
            "must be fp32 without fsdp.ends_apart: before July 2025 torchtitan kept its parameters in no other",
        ),
        (
            "fsdp.ends_apart",
            plan.layout.pp > 1 and not given.return_outputs,
            "must be true with stages (--ends-apart), or fsdp.return_outputs (--return-outputs): releases whose last "
            "stage keeps no logits have the embedding, and norm with head, as units of their own",
        ),
    )
    return "0.1.0"


def _flavour(plan: ResolvedPlan) -> tuple[str, str] | None:
    """torchtitan's names of the model, where it has it."""
    fields = [field.name for field in by_flag().values() if field.section == "model" and field.name != "name"]
    for names, spec in FLAVOURS.items():
        known = load_spec(spec)
        if all(getattr(known, name) == getattr(plan.model, name) for name in fields):
            return names
    return None


# -- text ---------------------------------------------------------------------------------------------


def _head(plan: ResolvedPlan, release: str, *, known: bool) -> Iterator[str]:
    spec = plan.model
    yield from head(f"{spec.name}: torchtitan {release} on {sizes_of(plan, 'tp', 'pp', 'vpp', 'dp')}.")
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
    """The plan that ``--from torchtitan`` reads from the job."""
    asked = Asked(flags=flags, assignments=settings)
    return launched_plan(torchtitan_of(*configuration_of(text, "job.toml"), asked), flags).plan


def settled(plan: ResolvedPlan) -> dict[str, Any]:
    """Selective recompute of every n-th layer is full recompute of those; stages by their entries; AdamW decays in
    place, and Adam either does or not; no release has the newest layers."""
    if plan.fsdp.code != "torchtitan":
        return {}
    optimizer, recompute, pipeline = plan.optimizer, plan.recompute, plan.pipeline
    updates: dict[str, Any] = {}
    if recompute.mode == "selective" and not plan.fsdp.per_operator:
        updates["recompute"] = recompute.model_copy(update={"mode": "full", "layers": 1})
    if optimizer.name == "adamw" or not optimizer.weight_decay:
        updates["optimizer"] = optimizer.model_copy(update={"weight_decay": None})
    if plan.fsdp.newest:
        updates["fsdp"] = plan.fsdp.model_copy(update={"newest": False})
    if plan.layout.pp > 1:
        updates["pipeline"] = pipeline.model_copy(update={"partition": titan_edges(plan)})
    return updates


TARGET = Target(
    name="torchtitan",
    framework="fsdp",
    what="torchtitan's job configuration",
    write=write,
    read=read,
    command=("--from", "torchtitan", PLACE),
    beside=frozenset({"hardware", "model", "headroom", "torch", "environment"}),
    settled=settled,
)
