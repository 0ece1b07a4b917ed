"""Hugging Face modules as DeepSpeed's engine runs them: the recipes of ``plain`` with hooks, and their parameters
in the order in which the model registers them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from ..layers import ends
from ..layers.autograd import Recorder, Tensor
from ..layers.huggingface import LayerShape
from ..layers.module import (
    INPUT,
    SHARED,
    Interface,
    Module,
    Options,
    Parameter,
    Recipe,
    Run,
    _hold,
    _tapes,
    evaluation_tape,
)
from ..layers.module import LEFT as LEFT_IN_FRAME
from .plain import (
    COS,
    EMBEDDED,
    FULL_MASK,
    MASK,
    POSITIONS,
    SIN,
    hidden_interface,
    keeps_embedded,
    layer_names,
    layer_recipe,
    returns,
    with_kept_input,
)
from .registration import LAYERS, NORM_BEFORE_LAYERS
from .zero_recorder import Hooked

TIED = "word.weight"
"""The parameter that a tied head shares with the embedding."""


@dataclass(frozen=True, eq=False)
class HookedModule:
    """A module whose tapes have seams where hooks run, and what its submodules read."""

    module: Module
    reads: dict[str, tuple[str, ...]]
    """Parameters of each submodule, by the name of its weight."""
    unhooked: frozenset[str]
    """Submodules whose backward ends unnoticed."""
    parameters: tuple[Parameter, ...]
    """All that it reads, a tied one too."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One module of the model, by name."""

    name: str
    hooked: HookedModule

    def qualified(self, parameter: str, tied: bool) -> str:
        return parameter if tied and parameter == TIED else f"{self.name}/{parameter}"


def hooked(
    name: str,
    recipe: Recipe,
    interface: Interface,
    options: Options,
    bias_first: bool,
    present: frozenset[str] = frozenset(),
    outputs: Mapping[str, str] = MappingProxyType({}),
) -> HookedModule:
    """As ``layers.module.build``, with hooks in every role."""

    def recorder(first: bool) -> Hooked:
        return Hooked(
            options.accumulates_in_place,
            first,
            present,
            options.kernel_workspaces,
            options.consumes_gradients,
            views_products=bias_first,
            bias_first=bias_first,
            outputs=outputs,
        )

    first, seen, run = _tapes(recipe, interface, recorder(True), options)
    steady, _, _ = _tapes(recipe, interface, recorder(False), options)
    assert isinstance(seen, Hooked)
    own = tuple(parameter for parameter in seen.parameters_of() if parameter.name not in present)
    module = Module(
        name,
        first,
        steady,
        evaluation_tape(recipe, interface, Hooked(grad_enabled=False, outputs=outputs)),
        own,
        tuple(_hold(first, id) for id in range(LEFT_IN_FRAME, LEFT_IN_FRAME - len(run.left), -1)),
        tuple(_hold(first, id) for id in run.shared),
        frozenset(id for id in seen.saved_outside if id <= SHARED),
    )
    return HookedModule(module, dict(seen.modules), frozenset(seen.without_input), seen.parameters_of())


@lru_cache(maxsize=256)
def layer_module(
    shape: LayerShape, recompute: bool, options: Options, bias_first: bool, ended: frozenset[int]
) -> HookedModule:
    recipe = layer_recipe(shape, recompute, ended)
    return hooked("layer", recipe, hidden_interface(shape), options, bias_first)


@lru_cache(maxsize=256)
def end_modules(
    shape: LayerShape, options: Options, bias_first: bool
) -> tuple[HookedModule, HookedModule | None, HookedModule]:
    """Embedding, final norm (``None`` for post-norm models), head with loss."""
    spec = shape.spec

    def embed(r: Recorder, x: Tensor | None) -> Run:
        embedded = ends.EMBEDDINGS[spec.family](r, shape)
        shared = embedded.shared
        kept = embedded.hidden if keeps_embedded(shape) else None
        ids = {POSITIONS: shared.position_ids, EMBEDDED: kept, MASK: shared.mask, COS: shared.cos, SIN: shared.sin}
        ids[FULL_MASK] = shared.full_mask
        return Run(embedded.hidden, embedded.frame, ids)

    def head(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        loss, logits = ends.head(r, x, shape)
        return Run(None, until_end=[logits], loss=loss)

    def norm(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(ends.final_norm(r, x, shape))

    interface = hidden_interface(shape)
    tied = frozenset({TIED}) if spec.tied_embeddings else frozenset()
    outputs = {TIED: "embedding_scaled"} if spec.embedding_scale else {}
    return (
        hooked("embedding", embed, Interface(None, shape.dtype), options, bias_first, tied, outputs),
        hooked("final_norm", norm, interface, options, bias_first) if spec.final_norm else None,
        hooked("head", head, interface, options, bias_first),
    )


def instances(
    shape: LayerShape, layers: int, recompute: bool, options: Options, *, bias_first: bool
) -> tuple[Instance, ...]:
    """The model's modules in the order in which they run forward, the frame's return as one of them."""
    embedding, norm, head = end_modules(shape, options, bias_first)
    layer = layer_module(shape, recompute, options, bias_first, frozenset())
    made = frozenset(hold.tensor for hold in embedding.module.shares)
    kept = made if recompute else layer.module.saved_shared
    foremost = layer_module(shape, recompute, options, bias_first, kept - {FULL_MASK})
    if keeps_embedded(shape):
        saved = not any(getattr(event, "tensor", 0) == INPUT for event in foremost.module.first.forward)
        kept = kept | {EMBEDDED} if saved else kept - {EMBEDDED}
        foremost = HookedModule(
            with_kept_input(foremost.module), foremost.reads, foremost.unhooked, foremost.parameters
        )
    begin = [foremost]
    if FULL_MASK in kept:
        kept = kept if layers > 1 else kept - {FULL_MASK}
        begin.append(layer_module(shape, recompute, options, bias_first, frozenset({FULL_MASK})))
    begin += [layer] * (layers - len(begin))
    names = layer_names(layers)
    closing = HookedModule(returns(embedding.module, kept), {}, frozenset(), ())
    return (
        Instance("embedding", embedding),
        *(Instance(name, one) for name, one in zip(names, begin, strict=False)),
        *([Instance("final_norm", norm)] if norm is not None else []),
        Instance("return", closing),
        Instance("head", head),
    )


REGISTERED = {
    "embedding": ("word", "position", "token_type", "embedding_norm"),
    "head": ("transform", "transform_norm", "head"),
}
"""Where modules of embeddings and heads register in another order than they run."""

BERT_HEAD = ("head.bias", *REGISTERED["head"])
"""The bias of BERT's head is its own, the decoder's is an alias."""


def registered(model: Sequence[Instance], family: str, tied: bool) -> tuple[tuple[str, Parameter], ...]:
    """Every parameter once, with its qualified name, in the order of ``model.parameters()``.

    ``modeling_llama.py``: attention, feed-forward, then the two norms; ``modeling_bert.py``: position before
    token-type embeddings, the prediction head's bias before its transform; others: ``registration``.
    """
    result: dict[str, Parameter] = {}
    orders = {**REGISTERED, "layer": LAYERS[family], **({"head": BERT_HEAD} if family == "bert" else {})}
    if family in NORM_BEFORE_LAYERS:
        model = sorted(model, key=lambda one: {"embedding": 0, "final_norm": 1}.get(one.name, 2))
    for instance in model:
        order = orders.get(instance.hooked.module.name, ())

        def place(parameter: Parameter, order: tuple[str, ...] = order) -> int:
            for at, name in enumerate(order):
                if parameter.name == name or parameter.name.startswith(f"{name}."):
                    return at
            return len(order)

        for parameter in sorted(instance.hooked.parameters, key=place):
            result.setdefault(instance.qualified(parameter.name, tied), parameter)
    return tuple(result.items())
