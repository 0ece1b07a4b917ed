"""A plan whose whole model runs by ``torch.compile``: which of them are modelled, what was learnt of them, and where.

Nothing is fitted: Inductor runs at the plan's own sizes (``trace.compiled_model``), once, and what it writes is kept
for later estimates.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...layers.compiled_model import CompiledModel, model
from ...layers.compiled_parts import CompiledParts
from ...layers.module import Interface, Module, Options, build
from ...plan.errors import PlanError
from ...plan.framework_sections import BUCKET_MB
from ...plan.library import COMPILED
from ...plan.resolved import ResolvedPlan
from ...plan.traced_spec import layers_name
from ...plan.tuning_checks import is_tuned
from ...trace import cache
from ...trace.framework import job_of_plan
from ...values import replace
from .. import framework

CODE = 1
"""Of what is learnt: a larger one makes files of the smaller ones stale."""
TURNS = 3
"""Depths that differ by a multiple of this are learnt as one (``trace.compiled_model.STEPS``)."""

KNOWN = "with torch.compile, which is modelled with nothing else"


def check(plan: ResolvedPlan) -> None:
    """``PlanError`` unless one graph of Inductor's is the whole model's step, and is the one that would run."""
    spec, precision, trainer = plan.model, plan.precision, plan.trainer
    rules: tuple[tuple[bool, str, str], ...] = (
        (not spec.has_sizes, "compile", "must be false of an architecture without a recipe: not modelled"),
        (is_tuned(plan), "compile", "must be false with adapters, quantised or frozen parameters: not modelled"),
        (
            any(True for _ in plan.kernels.changed()),
            "compile",
            "must be false with kernels that are not PyTorch's: not modelled",
        ),
        (bool(spec.experts), "compile", "must be false with experts: their routing cuts the graph, not modelled"),
        (plan.attention != "flash", "attention", f"must be flash (sdpa) {KNOWN}"),
        (precision.dtype != "bf16", "precision.dtype", f"must be bf16 {KNOWN}"),
        (plan.loss.kind != "plain", "loss.kind", f"must be plain {KNOWN}"),
        (trainer.kind.own_loss, "trainer.loop", f"must be none or transformers {KNOWN}"),
        (bool(spec.labels), "model.labels", "must be left out with torch.compile: not modelled"),
        (
            bool(plan.recompute.reentrant),
            "recompute.reentrant",
            "must be false with torch.compile, which reentrant checkpoints break into many graphs",
        ),
        (
            precision.autocast and spec.norm != "rmsnorm",
            "precision.autocast",
            "must be false with torch.compile and layer norms, which autocast runs in fp32 on GPUs alone: not modelled",
        ),
        (
            trainer.evaluation_batches is not None or (trainer.evaluation_mbs or 0) > plan.batch.mbs,
            "trainer.evaluation_batches",
            "must be left out with torch.compile, and evaluation's batches no larger than training's: not modelled",
        ),
        (
            bool(spec.embedding_dropout or spec.attention_dropout or spec.hidden_dropout),
            "compile",
            "must be false with dropout: not modelled (--embedding-dropout, --attention-dropout, --hidden-dropout 0)",
        ),
    )
    for wrong, field, problem in rules:
        if wrong:
            raise plan.wrong(field, problem)


def settings_of(plan: ResolvedPlan) -> dict[str, Any]:
    """What tells one compiled graph from another, whatever its depth."""
    job = job_of_plan(without_compiler(plan))
    name = layers_name(job.config)
    config = {key: value for key, value in job.config.items() if key != name}
    fields = {"b": job.b, "s": job.s, "dtype": job.dtype, "autocast": job.autocast, "recompute": job.recompute}
    fields["trainer"] = job.trainer is not None
    if cut_at_layers(plan):  # of any number of them
        return {"compiled": CODE, "config": config, **fields, "parts": "regions" if plan.compile_regions else "layers"}
    if job.ddp is not None:  # buckets may cut no two layers alike
        fields["bucket_cap_mb"] = float(job.ddp.bucket_cap_mb or BUCKET_MB)
    turn = plan.model.layers % TURNS if job.ddp is None else plan.model.layers
    return {"compiled": CODE, "config": config, **fields, "layers": turn}


def cut_at_layers(plan: ResolvedPlan) -> bool:
    """Hooks of the framework cut the graph at every layer."""
    return framework(plan.framework).supports.compiled_as == "layers"


def without_compiler(plan: ResolvedPlan) -> ResolvedPlan:
    """The same without the compiler, of one micro-batch: what a trace knows."""
    return plan.model_copy(update={"compile": False, "compile_regions": False})


def _shipped(name: str) -> list[dict[str, Any]]:
    """Settings of what ships of the model ``name``."""
    found = (cache.shipped(path) for path in sorted((COMPILED / name).glob(f"*{cache.SUFFIX}")))
    return [data["settings"] for data in found if data is not None]


def _words(settings: dict[str, Any]) -> str:
    """``mbs 1 and seq 4096 in bf16, autocast over fp32, trainer transformers``."""
    told = {
        "autocast": f"autocast over {settings['dtype']}",
        "trainer": "trainer transformers",
        "recompute": "recompute full",
    }
    parts = [settings["autocast"] or settings["dtype"], *(word for key, word in told.items() if settings[key])]
    if "bucket_cap_mb" in settings:
        parts.append(f"under ddp with buckets of {settings['bucket_cap_mb']:g} MiB")
    if "parts" in settings:
        parts.append("under fsdp in regions" if settings["parts"] == "regions" else "under fsdp")
    return f"mbs {settings['b']} and seq {settings['s']} in {', '.join(parts)}"


def learnt_of(plan: ResolvedPlan) -> CompiledModel:
    """``PlanError`` with the command that learns it, where nobody has."""
    found: CompiledModel | None = cache.load(settings_of(plan), CompiledModel)
    if found is None or (plan.model.layers != found.layers and not found.repeats):
        raise _not_learnt(plan, f"{plan.model.layers} layers with ")
    if plan.model.layers < found.layers:
        raise plan.wrong("model.layers", f"must be at least {found.layers} with torch.compile: fewer were not learnt")
    return found


def parts_of(plan: ResolvedPlan) -> CompiledParts:
    """The same of a model that hooks cut at every layer."""
    found: CompiledParts | None = cache.load(settings_of(plan), CompiledParts)
    if found is None:
        raise _not_learnt(plan)
    return found


def _not_learnt(plan: ResolvedPlan, layers: str = "") -> PlanError:
    settings = settings_of(plan)
    alike = (one for one in _shipped(plan.model.name) if one.keys() == settings.keys())
    ships = ", or with ".join(map(_words, alike))
    return plan.wrong(
        "compile",
        f"was not learnt of {layers}{_words(settings)}: `memplan trace --learn` with the "
        "same plan and flags runs Inductor on it once (needs torch 2.13 and transformers, no GPU)"
        f"{f'; it ships learnt with {ships}' if ships else ''}",
    )


def learn(
    plan: ResolvedPlan, report: Callable[[int, int], None] = lambda done, of: None
) -> CompiledModel | CompiledParts:
    """Runs Inductor for the resolved ``plan`` in a process of its own."""
    from ...trace.run import answer_of, check_packages

    check(plan)
    check_packages({"torch": (2, 13)})
    job, data = job_of_plan(without_compiler(plan)), {"layers": plan.model.layers, "regions": plan.compile_regions}
    found = answer_of("compiled", job, data, plan.model.name, report)["compiled"]
    return CompiledParts.from_json(found) if cut_at_layers(plan) else CompiledModel.from_json(found)


def kept(plan: ResolvedPlan, report: Callable[[int, int], None]) -> Path:
    """Learns, and keeps it for later estimates; where."""
    cache.folder()  # before what takes long is in vain
    return cache.store(settings_of(plan), learn(plan, report))


def module(plan: ResolvedPlan, options: Options) -> Module:
    """The whole model."""
    check(plan)
    learnt, layers, dtype = learnt_of(plan), plan.model.layers, plan.precision.stored
    plain = replace(options, autocast=None, converts_outputs=False)  # the graph casts by itself
    return build("model", lambda r, _: model(r, learnt, layers, dtype), Interface(None, dtype), plain)
