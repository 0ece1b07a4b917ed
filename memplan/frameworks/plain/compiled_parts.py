"""Modules of a plan whose compiled graph hooks cut at every layer: each layer and the final norm is a graph of its own,
and so is what follows them, unless regions are compiled alone (``layers.compiled_parts``)."""

from __future__ import annotations

from collections.abc import Sequence

from ...families import family
from ...families.base import place
from ...layers.autograd import Recorder, Tensor
from ...layers.compiled_parts import CompiledParts, Part, run
from ...layers.fused_losses import head_weight
from ...layers.huggingface import LayerShape
from ...layers.module import Interface, Module, Options, Parameter, Run, build
from ...plan.resolved import ResolvedPlan
from ...values import dataclass, replace
from . import recipes
from .compiled import check, parts_of


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
            parameters = self._parameters(r, part)
            (out,) = run(r, x, part, parameters, {"mask": mask, "cos": cos, "sin": sin})
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
