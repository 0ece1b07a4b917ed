"""The recipes of transformers' models as modules: embedding, layers, final norm, and head with its loss; and layers in
a row, of which some are trained and some are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import TypeGuard

from ...families import family
from ...layers import ends, fused_losses, ops
from ...layers.autograd import Accumulate, Recorder, Shape, Tensor
from ...layers.ends import Embedding
from ...layers.fused_losses import PLAIN, HeadLoss
from ...layers.huggingface import Layer, LayerShape, Shared
from ...layers.module import SHARED, Interface, Module, Options, Recipe, Run, Tapes, build
from ...layers.recompute import recomputed, recomputed_reentrant
from ...layers.tuning import Tuning
from ...plan.plan import ResolvedPlan
from ...tape.events import INPUT, Drop, Event, Hook, Tape, behind, drops
from ...tape.program import Span
from ...values import NamedTuple, replace
from .tuned import frozen_layer

MASK, COS, SIN, POSITIONS = SHARED, SHARED - 1, SHARED - 2, SHARED - 3
"""Ids of the tensors that a forward pass makes once for all layers."""

OF_FULL = {MASK: SHARED - 5, COS: SHARED - 7, SIN: SHARED - 8}
"""Ids of what layers without a sliding window read in the place of these, where others have one."""

TABLES = frozenset((COS, SIN, OF_FULL[COS], OF_FULL[SIN]))
"""Ids of rotary tables, of whichever layers."""

EMBEDDED = SHARED - 4
"""Id of the first layer's input where ``model.forward`` keeps it in a variable (``inputs_embeds``)."""


def shared_tensors(r: Recorder, shape: LayerShape, ended: frozenset[int]) -> Shared:
    """The shared tensors as a layer sees them: held by others, but for those in ``ended``, which end with it."""
    spec, s = shape.spec, shape.s
    rotary = spec.positions == "rotary"
    dtype, table = shape.dtype, (*shape.table_rows, shape.table)
    known = family(spec.family)
    tables = rotary and not known.tables_in_layers and not shape.older

    def outside(shape: Shape, dtype: str, id: int, *, of_full: bool = False) -> Tensor:
        own = OF_FULL.get(id, id)
        id = own if own in ended or of_full else id
        return r.outside(shape, dtype, id=id, drops=id in ended and r.grad_enabled)

    mask = None
    if spec.causal and not shape.flash:
        mask = outside((shape.b, 1, s, s), dtype, MASK, of_full=spec.limits_turned and not shape.turns)
    elif shape.masked:
        mask = outside((shape.b if shape.padded else 1, 1, s, s), "bool", MASK)
    return Shared(
        mask,
        outside(table, shape.table_dtype, COS) if tables else None,
        outside(table, shape.table_dtype, SIN) if tables and shape.tables != "complex" else None,
        outside((shape.b if known.positions_of_each else 1, s), "int64", POSITIONS)
        if known.takes_positions(r)
        else None,
    )


@lru_cache(maxsize=1024)
def layer_module(
    shape: LayerShape,
    recompute: bool,
    code: str,
    options: Options,
    ended: frozenset[int] = frozenset(),
    requires_grad: bool = True,
    dtype: str = "",
) -> Module:
    """One layer of the family, on hidden states in ``dtype`` if these are not as the embedding gives them. The first
    one is the last to let go of shared tensors: ``ended``."""
    interface = hidden_interface(shape, requires_grad, options.autocast, dtype)
    casts = casts_tables(shape, options)
    recipe = layer_recipe(shape, recompute, ended, code, casts=casts)
    return build("layer", recipe, replace(interface, begins=not casts), options)


def layer_recipe(
    shape: LayerShape, recompute: bool, ended: frozenset[int], code: str = "current", *, casts: bool = False
) -> Recipe:
    """One layer of the family, recomputed in backward where ``recompute``. ``casts``: its hooks cast rotary tables."""
    recipe_of, _ = transformers_code(shape, code)

    def recipe(r: Recorder, x: Tensor) -> Run:
        shared, given = shared_tensors(r, shape, ended), list[Tensor]()
        if casts:
            given = [ops.cast(r, one, shape.dtype, "table_handed") for one in shared.tables]
            shared = replace(shared, cos=given[0], sin=given[1])
            if r.seams:
                r.seam("layer", Hook.BEFORE_FORWARD)
        hidden = x
        if recompute and shape.reentrant:
            return Run(recomputed_reentrant(r, lambda r, x: recipe_of(r, x, shared, shape), (hidden,)), given=given)
        if recompute:
            return Run(recomputed(r, lambda: recipe_of(r, hidden, shared, shape)), given=given)
        return Run(recipe_of(r, x, shared, shape), given=given)

    return recipe


def casts_tables(shape: LayerShape, options: Options) -> bool:
    """Whether hooks before every layer cast the rotary tables that it is handed (torch, ``FSDPState._pre_forward``)."""
    return options.casts_given and family(shape.spec.family).wide_tables and shape.dtype != shape.table_dtype


def transformers_code(shape: LayerShape, code: str = "current") -> tuple[Layer, Embedding]:
    """Layer and embedding of the family, of today or of ``code``."""
    known = family(shape.spec.family)
    assert known.layer is not None
    assert known.embedding is not None
    return known.older if code == "2020" and known.older is not None else (known.layer, known.embedding)


def unseen(shared: frozenset[int], *, sees_all: bool) -> frozenset[int]:
    """Those of the tensors ``shared`` that layers of another kind read in the place of one's own."""
    return frozenset(of_full if not sees_all else id for id, of_full in OF_FULL.items() if of_full in shared)


def seen_by_all(ids: frozenset[int]) -> frozenset[int]:
    """``ids`` of what a layer reads, with those of what layers of another kind read in their place."""
    return ids | {OF_FULL[id] for id in ids if id in OF_FULL}


def keeps_embedded(shape: LayerShape) -> bool:
    """Without dropout the embedding's output is the first layer's input; of BERT it is ``embedding_output``."""
    return family(shape.spec.family).keeps_embedding or _passes_embeddings_on(shape)


def _passes_embeddings_on(shape: LayerShape) -> bool:
    return shape.spec.positions == "rotary" and not shape.spec.embedding_dropout


def leaves_embedding(tuning: Tuning | None, shape: LayerShape) -> bool:
    """Whether the embedding's output requires a gradient without having a node."""
    asked = tuning is not None and tuning.input_requires_grad and not tuning.trains("word.weight")
    asked = asked and tuning is not None and not tuning.adapts("word")
    scaled = shape.spec.embedding_scale and not family(shape.spec.family).scale_in_embedding
    return asked and _passes_embeddings_on(shape) and not scaled


@lru_cache(maxsize=1024)
def with_kept_input(layer: Module) -> Module:
    """``layer`` as the first one, whose input is ``EMBEDDED`` and ends when the model returns if no node saved it."""

    def renamed(tape: Tape) -> Tape:
        return tuple(event._replace(tensor=EMBEDDED) if is_drop_of_input(event) else event for event in tape)

    return layer.changed(lambda tape: tuple(event for event in tape if not is_drop_of_input(event)), renamed)


def is_drop_of_input(event: Event) -> TypeGuard[Drop]:
    """The module's input ends."""
    return isinstance(event, Drop) and event.tensor == INPUT


def hidden_interface(
    shape: LayerShape, requires_grad: bool = True, autocast: str | None = None, dtype: str = ""
) -> Interface:
    """Hidden states between layers; BERT's come out of a LayerNorm, which autocast runs in fp32."""
    from_norm = autocast is not None and (shape.spec.norm_place, shape.spec.norm) == ("post", "layernorm")
    dtype = dtype or ("fp32" if from_norm else shape.dtype)
    return Interface((shape.b, shape.s, shape.spec.hidden), dtype, requires_grad)


def embedding_recipe(shape: LayerShape, code: str = "current") -> Recipe:
    """The family's embedding, and what layers share."""
    _, embedding = transformers_code(shape, code)

    def recipe(r: Recorder, x: Tensor) -> Run:
        embedded = embedding(r, shape)
        shared = embedded.shared
        kept = embedded.hidden if keeps_embedded(shape) else None
        ids = {POSITIONS: shared.position_ids, EMBEDDED: kept, MASK: shared.mask, COS: shared.cos, SIN: shared.sin}
        of_full = (shared.full_mask, *(shared.full_tables or (None, None)))
        ids |= zip(OF_FULL.values(), of_full, strict=True)
        frame = [tensor for tensor in embedded.frame if not isinstance(tensor.node, Accumulate)]
        return Run(embedded.hidden, frame, ids)

    return recipe


def norm_recipe(shape: LayerShape) -> Recipe:
    """The norm behind the layers."""
    return lambda r, x: Run(ends.final_norm(r, x, shape))


@lru_cache(maxsize=1024)
def end_modules(
    shape: LayerShape,
    code: str,
    options: Options,
    head_loss: HeadLoss = PLAIN,
    requires_grad: bool = True,
    dtype: str = "",
) -> tuple[Module, Module | None, Module]:
    """Embedding, final norm (``None`` for post-norm models), head with loss.

    ``requires_grad``: a layer before the norm is trained, or the embedding. ``dtype``: of the hidden states that layers
    leave, if not as the embedding gives them.
    """
    spec = shape.spec

    def head(r: Recorder, x: Tensor) -> Run:
        loss, returned = fused_losses.head(r, x, shape, head_loss)
        if options.autocast == "fp16":
            loss = ops.elementwise(r, "loss_scaled", (loss,), (loss,))  # ``GradScaler.scale``
        if options.converts_outputs and not head_loss.converts_itself:
            return Run(None, converted=returned, loss=loss, measured=head_loss.measured)
        if head_loss.measured is not None:
            head_loss.measured(r, returned[0])
        return Run(None, until_end=returned, loss=loss)

    interface = hidden_interface(shape, requires_grad, options.autocast, dtype)
    tuning = options.tuning
    normed = spec.final_norm and (tuning is None or tuning.trains("final_norm.weight"))
    tied = frozenset({"word.weight"}) if spec.tied_embeddings else frozenset()
    last_norm = build("final_norm", norm_recipe(shape), interface, options) if spec.final_norm else None
    given = last_norm.first.output_dtype if last_norm is not None else interface.dtype
    return (
        build("embedding", embedding_recipe(shape, code), Interface(None, shape.dtype), options, tied),
        last_norm,
        build("head", head, replace(interface, dtype=given, requires_grad=requires_grad or normed), options),
    )


@lru_cache(maxsize=1024)
def returns(embedding: Module, kept: frozenset[int]) -> Module:
    """What ends when ``model.forward`` returns: the variables of its frame, and shared tensors that no
    layer keeps (those that were saved, or are needed to recompute, end with the first layer's backward)."""
    frame = drops(embedding.left)
    tapes = Tapes(frame + drops(hold for hold in embedding.shares if hold.tensor not in kept), (), 0, 0)
    return Module("return", tapes, tapes, frame + drops(embedding.shares), ())


# -- layers in a row -------------------------------------------------------------------------------------


class LayerKind(NamedTuple):
    """Layers that do the same."""

    options: Options
    requires_grad: bool
    """Their input requires a gradient."""
    dtype: str = ""
    """Of their input, if not as the embedding gives it."""
    mixture: bool = False
    """They have experts."""
    turns: bool = True
    """They have positions."""
    linear: bool = False
    """They have gated delta nets."""
    window: bool = True
    """They have a mask, where some layers' attention has one."""
    full: bool = False
    """They see all tokens, and have sizes of their own."""


Kinds = list[tuple[LayerKind, int]]
"""Kinds of layers in a row, and how many of a kind follow one another."""

Row = list[tuple[Module, int]]
"""Modules in a row, and how many equal ones follow one another."""

Make = Callable[[LayerKind, frozenset[int]], Module]
"""A layer of a kind, and the shared tensors that it ends."""


def kinds_of(
    plan: ResolvedPlan,
    options: Options,
    from_start: bool,
    numbers: Iterable[int],
    trains: Callable[[LayerKind], bool],
    later: str = "",
) -> Kinds:
    """Those of the layers ``numbers``.

    Nothing before the first layer that is trained requires a gradient, unless the embedding's output does:
    ``from_start``. ``trains``: a layer of that kind has parameters that are trained; adapters of attention leave out
    layers without any. ``later``: dtype of what a layer leaves to the next one, if not as the embedding gives it.
    """
    numbers = tuple(numbers)
    tuning, ahead = options.tuning, plan.frozen.layers
    frozen = replace(options, tuning=frozen_layer(tuning)) if tuning is not None else options
    masked = plan.masks_windows

    def kind(i: int, requires_grad: bool) -> LayerKind:
        own = frozen if i < ahead else options
        spec = plan.model
        window = not (masked and spec.sees_all(i))
        of_layer = spec.has_experts(i), spec.has_positions(i), spec.is_linear(i), window, spec.is_full(i)
        return LayerKind(own, requires_grad, later if i else "", *of_layer)

    needed, layers = -1, plan.model.layers
    if tuning is not None and not from_start:
        needed = next((i for i in range(ahead, layers) if trains(kind(i, False))), layers)
    return [(same, len(tuple(equal))) for same, equal in groupby(kind(i, i > needed) for i in numbers)]


def layer_row(
    make: Make, kinds: Kinds, everything: frozenset[int], recompute: bool, see_all: Sequence[bool]
) -> tuple[Row, frozenset[int]]:
    """Modules of layers of these ``kinds``, and those of the shared tensors ``everything`` that they keep. ``see_all``:
    of each layer, whether it is of the second of two kinds (``ModelSpec.sees_all``).

    Each is ended by the first layer that reads and keeps it; with ``recompute`` a layer that has a backward keeps all.
    """
    row: Row = []
    ended: frozenset[int] = frozenset()
    number = 0
    for kind, count in kinds:
        inner = make(kind, frozenset())
        all_kept = recompute and inner.first.backward
        keeps = everything if all_kept else everything & seen_by_all(inner.saved_shared)
        behind = number + count
        while number < behind and keeps - ended:
            fresh = keeps - ended - unseen(everything, sees_all=see_all[number])
            row.append((make(kind, fresh) if fresh else inner, 1))
            ended |= fresh
            number += 1
        row.append((inner, behind - number))
        number = behind
    equal = groupby(row, key=lambda one: one[0])
    return [(module, count) for module, same in equal if (count := sum(one[1] for one in same))], ended


def layers(row: Row, names: tuple[str, ...]) -> tuple[Span, ...]:
    """The modules of ``row`` under ``names``."""
    spans = []
    for module, count in row:
        spans.append(Span(module, names[:count]))
        names = names[count:]
    return tuple(spans)


@lru_cache(maxsize=1024)
def with_leaf(embedding: Module, layer: Module) -> tuple[Module, Module]:
    """An embedding whose output requires a gradient without having a node, and the first layer, which has it as its
    input under the id ``EMBEDDED``: it ends with the graph, behind the embedding's backward."""
    (output,) = (hold for hold in embedding.shares if hold.tensor == EMBEDDED)

    def is_drop(event: Event) -> bool:
        return isinstance(event, Drop) and event.tensor == EMBEDDED

    def ended(tape: Tape) -> Tape:
        return behind(tape, (Drop(EMBEDDED, output.bytes, output.category),))

    def kept(tape: Tape) -> Tape:
        return tuple(event for event in tape if not is_drop(event))

    return embedding.changed(backward=ended), layer.changed(backward=kept)
