"""A plan whose whole model runs by ``torch.compile``: which of them are modelled, what was learnt of them, and where.

Nothing is fitted: Inductor runs at the plan's own sizes (``trace.compiled_model``), once, and what it writes is kept
for later estimates.

Modules of a plan whose compiled graph hooks cut at every layer: each layer and the final norm is a graph of its own,
and so is what follows them, unless regions are compiled alone (``layers.compiled_parts``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...families import family
from ...families.base import place
from ...layers.autograd import Recorder, Tensor
from ...layers.compiled_model import CompiledModel, model
from ...layers.compiled_parts import CompiledParts, Part, run
from ...layers.fused_losses import head_weight
from ...layers.huggingface import LayerShape
from ...layers.module import Interface, Module, Options, Parameter, Run, build
from ...plan.errors import PlanError
from ...plan.framework_sections import BUCKET_MB
from ...plan.library import COMPILED
from ...plan.plan import ResolvedPlan
from ...plan.traced_spec import layers_name
from ...plan.tuning_checks import is_tuned
from ...trace import cache
from ...trace.framework import job_of_plan
from ...values import dataclass, replace
from .. import framework
from . import recipes

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
            "must be false with torch.compile and layer norms, which autocast runs in fp32 only on GPUs: not modelled",
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


# -- compiled parts ------------------------------------------------------------------------------------


def check_parts(plan: ResolvedPlan, shape: LayerShape) -> None:
    """``PlanError`` unless hooks leave one graph of every layer."""
    check(plan)
    spec = plan.model
    plan.refuse(
        (
            "compile",
            spec.positions != "rotary" or family(spec.family).tables_in_layers or shape.tables == "complex",
            "must be false where hooks cut the graph and layers are not given tables of rotary positions: not modelled",
        ),
        (
            "compile",
            spec.sliding_window or spec.nope_interval,
            "must be false where hooks cut the graph and layers are of several kinds: not modelled",
        ),
    )


@dataclass(frozen=True, eq=False, slots=True)
class Compiled:
    """The modules of a model in parts."""

    learnt: CompiledParts
    shape: LayerShape
    code: str
    options: Options
    layer_parameters: tuple[Parameter, ...]
    """As the model registers them."""

    def layer(self, ended: frozenset[int]) -> Module:
        """One layer, which ends the shared tensors ``ended``."""
        part, shape = self.learnt.parts["layer"], self.shape

        def recipe(r: Recorder, x: Tensor) -> Run:
            cos, sin = _tables(r, shape, ended)
            mask = self._mask(r, ended)
            (out,) = run(r, x, part, self._parameters(r, part), {"mask": mask, "cos": cos, "sin": sin})
            return Run(out)

        return build("layer", recipe, recipes.hidden_interface(shape), self.options)

    def ends(self, embedding: Module, norm: Module | None, head: Module) -> tuple[Module, Module | None, Module]:
        """In the place of those that run without the compiler."""
        assert norm is not None
        compiled = self.learnt.parts.get("head")
        return (
            embedding if compiled is None else self._embedding(),
            self._norm(norm.parameters),
            head if compiled is None else self._head(compiled),
        )

    def _embedding(self) -> Module:
        """As it is without the compiler, which makes the mask for all layers."""
        shape, eager = self.shape, recipes.embedding_recipe(self.shape, self.code)

        def recipe(r: Recorder, x: Tensor) -> Run:
            made = eager(r, x)
            made.shared[recipes.MASK] = r.empty((shape.b, 1, shape.s, shape.s), "bool", "causal_mask")
            return made

        tied = frozenset({"word.weight"}) if shape.spec.tied_embeddings else frozenset[str]()
        return build("embedding", recipe, Interface(None, shape.dtype), self.options, tied)

    def _norm(self, parameters: Sequence[Parameter]) -> Module:
        part, dtype = self.learnt.parts["norm"], self.shape.dtype

        def recipe(r: Recorder, x: Tensor) -> Run:
            own = [r.parameter(one.name, one.shape, dtype) for one in parameters]
            (out,) = run(r, x, part, own, {})
            return Run(out)

        return build("final_norm", recipe, recipes.hidden_interface(self.shape), self.options)

    def _head(self, part: Part) -> Module:
        shape = self.shape
        logits = shape.b * shape.s * shape.spec.vocab

        def recipe(r: Recorder, x: Tensor) -> Run:
            loss, returned = run(r, x, part, [head_weight(r, shape)], {}, logits)
            return Run(None, until_end=[returned], loss=loss)

        return build("head", recipe, recipes.hidden_interface(shape), self.options)

    def _mask(self, r: Recorder, ended: frozenset[int]) -> Tensor | None:
        if "head" not in self.learnt.parts:
            return None
        shape, drops = self.shape, recipes.MASK in ended and r.grad_enabled
        return r.outside((shape.b, 1, shape.s, shape.s), "bool", id=recipes.MASK, drops=drops)

    def _parameters(self, r: Recorder, part: Part) -> list[Tensor]:
        return [
            r.parameter(one.name, shape, self.shape.dtype)
            for one, (_, shape, _) in zip(self.layer_parameters, part.parameters, strict=True)
        ]


def _tables(r: Recorder, shape: LayerShape, ended: frozenset[int]) -> tuple[Tensor, Tensor]:
    shared = recipes.shared_tensors(r, shape, ended)
    assert shared.cos is not None
    assert shared.sin is not None
    return shared.cos, shared.sin


def compiled_of(plan: ResolvedPlan, shape: LayerShape, options: Options) -> Compiled | None:
    """Nothing where kernels are counted, whose times are those without the compiler."""
    if options.counts:
        return None
    check_parts(plan, shape)
    learnt = parts_of(plan)
    own = shape.of_layer(0)
    eager = recipes.layer_module(own, False, plan.code, replace(options, seams=False))
    registered = family(plan.model.family).registered
    parameters = sorted(eager.parameters, key=lambda one: place(one.name, registered))
    ours, theirs = [one.shape for one in parameters], [size for _, size, _ in learnt.parts["layer"].parameters]
    assert ours == theirs, "parameters are not those of the model"
    return Compiled(learnt, own, plan.code, options, tuple(parameters))
