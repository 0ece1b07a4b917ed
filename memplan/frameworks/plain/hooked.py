"""Models of transformers with a seam wherever a hook of a submodule or a parameter runs, as DeepSpeed and DDP see them
(``hooked_recorder``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property, lru_cache

from ...families import family as family_of
from ...families.base import Submodules
from ...layers import fused_losses
from ...layers.autograd import Recorder, Tensor
from ...layers.fused_losses import PLAIN, HeadLoss
from ...layers.huggingface import LayerShape
from ...layers.module import Interface, Module, Options, Parameter, Recipe, Run, recorded, recorder_of
from ...tape.events import INPUT
from ...values import dataclass, replace
from . import preferences
from .hooked_recorder import NONE, HookedRecorder
from .programs import layer_names
from .recipes import (
    EMBEDDED,
    embedding_recipe,
    hidden_interface,
    keeps_embedded,
    layer_recipe,
    leaves_embedding,
    norm_recipe,
    returns,
    seen_by_all,
    unseen,
    with_kept_input,
    with_leaf,
)
from .tuned import packed

TIED = "word.weight"
"""The parameter that a tied head shares with the embedding."""

MOST_SUBMODULES = 4096
"""Of one instance of a module."""


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
    leaf: str = ""
    """The submodule that is a leaf,"""
    parts: tuple[str, ...] = ()
    """and others of several operators."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One module of the model, by name."""

    name: str
    hooked: HookedModule

    def qualified(self, parameter: str, tied: bool) -> str:
        return parameter if tied and parameter == TIED else f"{self.name}/{parameter}"


@dataclass(frozen=True)
class Model:
    """The modules of a model and its parameters by id, which is their place in ``model.parameters()``."""

    instances: tuple[Instance, ...]
    """In the order in which they run forward, the frame's return as one of them."""
    parameters: tuple[Parameter, ...]
    ids: dict[str, int]
    tied: bool
    dtype: str
    outside: str = ""
    """The head's weight, where the model's own forward reads it and no submodule's."""
    makers: Mapping[int, int] = field(default_factory=dict)
    """Places of the instances that make gradients, by tensor, where every tensor has a number of its own: that of a
    tied weight is the head's."""

    def id_of(self, instance: Instance, name: str) -> int:
        return self.ids[instance.qualified(name, self.tied)]

    def bytes(self, id: int) -> int:
        return self.parameters[id].bytes(self.dtype)

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """Ids of the parameters that have a gradient."""
        return tuple(id for id, one in enumerate(self.parameters) if one.trained)

    @cached_property
    def frozen(self) -> tuple[int, ...]:
        return tuple(id for id, one in enumerate(self.parameters) if not one.trained)

    @cached_property
    def _reads(self) -> dict[tuple[int, str], tuple[int, tuple[int, ...]]]:
        return {}

    def reads(self, at: int, submodule: str) -> tuple[int, tuple[int, ...]]:
        """Number of the submodule of instance ``at`` that has the weight ``submodule``, and ids of its parameters."""
        found = self._reads.get((at, submodule))
        if found is None:
            instance = self.instances[at]
            names = instance.hooked.reads
            ids = tuple(self.id_of(instance, name) for name in names[submodule])
            found = self._reads[at, submodule] = at * MOST_SUBMODULES + list(names).index(submodule), ids
        return found


@lru_cache(maxsize=64)
def model_of(
    shape: LayerShape, layers: int, options: Options, recompute: bool, bias_first: bool, loss: HeadLoss = PLAIN
) -> Model:
    """The model of ``layers`` layers."""
    instances = _instances(shape, layers, recompute, options, bias_first, loss)
    tied = shape.spec.tied_embeddings
    order = _registered(instances, shape.spec.family, tied)
    ids = {name: id for id, name in enumerate(order)}
    outside = loss.reads_weight and (TIED if tied else "head.weight")
    return Model(instances, tuple(order.values()), ids, tied, shape.dtype, outside or "")


def with_adapters(own: Submodules, targets: frozenset[str]) -> Submodules:
    """Those of peft's, too: around each layer with an adapter its wrapper, and the dropout, or what stands for it, in
    front of the adapter; around the model ``PeftModel``."""

    def more(given: Mapping[str, int], added: Mapping[str, int]) -> dict[str, int]:
        return {name: given.get(name, 0) + added.get(name, 0) for name in (*given, *added)}

    wrappers = dict.fromkeys(targets, 1)
    return replace(
        own,
        before_forward=more(own.before_forward, {**wrappers, **{f"{one}.lora_A": 1 for one in targets}, "word": 1}),
        before_backward=more(own.before_backward, {**{f"{one}.lora_B": 1 for one in targets}, "head": 1}),
        after_backward=more(own.after_backward, {f"{one}.lora_A": 1 for one in targets}),
    )


def without_activation(own: Submodules) -> Submodules:
    """Those of a layer whose SwiGLU is one kernel: between the products of gate and up no activation runs
    (``LigerSwiGLUMLP.forward``)."""
    forward = {"gate": own.after_forward.get("gate", 0) - 1}
    backward = {"up": own.after_backward.get("up", 0) - 1}
    return replace(
        own, after_forward={**own.after_forward, **forward}, after_backward={**own.after_backward, **backward}
    )


def _hooked(
    name: str,
    recipe: Recipe,
    interface: Interface,
    options: Options,
    family: str,
    bias_first: bool,
    present: frozenset[str] = frozenset(),
    outputs: Mapping[str, str] | None = None,
) -> HookedModule:
    """As ``layers.module.build``, with hooks in every role."""
    submodules = family_of(family).submodules or {}
    if options.kernels is not None and options.kernels.gated is not None and "layer" in submodules:
        submodules = {**submodules, "layer": without_activation(submodules["layer"])}
    if options.tuning is not None and options.tuning.adapters is not None:
        submodules = {**submodules, name: with_adapters(submodules.get(name, NONE), options.tuning.adapters.targets)}

    def recorder(first: bool, grad_enabled: bool) -> HookedRecorder:
        return recorder_of(
            HookedRecorder,
            options,
            present,
            first,
            grad_enabled,
            views_products=bias_first or not grad_enabled,
            seams=True,
            submodules=submodules.get(name, NONE),
            bias_first=bias_first,
            outputs=outputs or {},
            registered=family_of(family).registered,
        )

    module, seen = recorded(name, recipe, interface, options, recorder, present)
    own = (Parameter(leaf.name, leaf.shape, None, leaf.trained, leaf.four_bit) for leaf in seen.parameters.values())
    compute = options.tuning.compute if options.tuning is not None else ""
    read = tuple(packed(one, compute) for one in own)
    parts = seen.submodules.leaf, seen.submodules.parts
    return HookedModule(module, dict(seen.modules), frozenset(seen.without_input), read, *parts)


@lru_cache(maxsize=256)
def _layer(
    shape: LayerShape,
    recompute: bool,
    options: Options,
    bias_first: bool,
    ended: frozenset[int],
    requires_grad: bool,
) -> HookedModule:
    recipe = layer_recipe(shape, recompute, ended)
    return _hooked("layer", recipe, hidden_interface(shape, requires_grad), options, shape.spec.family, bias_first)


@lru_cache(maxsize=256)
def _ends(
    shape: LayerShape, options: Options, bias_first: bool, head_loss: HeadLoss
) -> tuple[HookedModule, HookedModule | None, HookedModule]:
    """Embedding, final norm (``None`` for post-norm models), head with loss."""
    spec = shape.spec

    def head(r: Recorder, x: Tensor) -> Run:
        loss, returned = fused_losses.head(r, x, shape, head_loss)
        if head_loss.measured is not None:
            head_loss.measured(r, returned[0])
        return Run(None, until_end=returned, loss=loss)

    interface = hidden_interface(shape)
    tied = frozenset({TIED}) if spec.tied_embeddings else frozenset()
    outputs = {TIED: "embedding_scaled"} if family_of(spec.family).scale_in_embedding else {}
    how = (options, spec.family, bias_first)
    last = _hooked("head", head, interface, *how)
    return (
        _hooked("embedding", embedding_recipe(shape), Interface(None, shape.dtype), *how, tied, outputs),
        _hooked("final_norm", norm_recipe(shape), interface, *how) if spec.final_norm else None,
        replace(last, module=preferences.returning(last.module, head_loss)),
    )


def _instances(
    shape: LayerShape, layers: int, recompute: bool, options: Options, bias_first: bool, loss: HeadLoss
) -> tuple[Instance, ...]:
    embedding, norm, head = _ends(shape, options, bias_first, loss)

    def layer(number: int, ended: frozenset[int] = frozenset()) -> HookedModule:
        return _layer(shape.of_layer(number), recompute, options, bias_first, ended, number > needed)

    def trains(number: int) -> bool:
        own = _layer(shape.of_layer(number), recompute, options, bias_first, frozenset(), False)
        return any(one.trained for one in own.module.parameters)

    needed = -1 if embedding.module.first.backward else next(filter(trains, range(layers)), layers)

    made = frozenset(hold.tensor for hold in embedding.module.shares) - {EMBEDDED}
    row, kept = [], frozenset[int]()
    for number in range(layers):
        inner = layer(number)
        keeps = made if recompute else made & seen_by_all(inner.module.saved_shared)
        fresh = keeps - kept - unseen(made, sees_all=shape.spec.sees_all(number))
        row.append(layer(number, fresh) if fresh else inner)
        kept |= fresh
    foremost, *others = row
    if keeps_embedded(shape):
        saved = not any(getattr(event, "tensor", 0) == INPUT for event in foremost.module.first.forward)
        leaf = leaves_embedding(options.tuning, shape)
        kept = kept | {EMBEDDED} if saved or leaf else kept - {EMBEDDED}
        foremost = replace(foremost, module=with_kept_input(foremost.module))
        if leaf:
            begun, first = with_leaf(embedding.module, foremost.module)
            embedding, foremost = replace(embedding, module=begun), replace(foremost, module=first)
    closing = HookedModule(returns(embedding.module, kept), {}, frozenset(), ())
    return (
        Instance("embedding", embedding),
        *(Instance(name, one) for name, one in zip(layer_names(layers), (foremost, *others), strict=True)),
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


def _registered(model: Sequence[Instance], family: str, tied: bool) -> dict[str, Parameter]:
    """Every parameter once, by its qualified name, in the order of ``model.parameters()``.

    ``modeling_llama.py``: attention, feed-forward, then the two norms; ``modeling_bert.py``: position before
    token-type embeddings, the prediction head's bias before its transform; others: ``Family.registered``.
    """
    result: dict[str, Parameter] = {}
    known = family_of(family)
    layer = (known.submodules or {}).get("layer", NONE)
    own, others = layer.own, [one for one in known.registered if one not in layer.own]
    at = others.index(layer.own_before) if layer.own_before else 0
    orders = {
        **REGISTERED,
        "layer": (*others[:at], *own, *others[at:]),
        **({"head": BERT_HEAD} if family == "bert" else {}),
    }
    if known.norm_before_layers:
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
    return result
