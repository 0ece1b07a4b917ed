"""Static tensors that a stage has beside parameters, gradients and states: copies of weights, tables, buffers and
libraries' workspaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import filterfalse, groupby

from ...layers.autograd import Shape
from ...layers.megatron_core import (
    block,
    dispatch,
    ends,
    graphs,
    latent,
    local,
    mtp,
    t5,
    te_facts,
    te_low_context,
)
from ...layers.megatron_core.shape import CoreShape
from ...layers.module import hold_bytes
from ...tape.events import Category, Hold, Stretch
from ...tape.program import Kept
from ...values import NamedTuple, replace
from .from_plan import HOPPER
from .modules import is_layer, layer_shapes
from .states import Chunk


class Libraries(NamedTuple):
    """What decides the workspaces of libraries."""

    capability: tuple[int, int] | None
    cublas: tuple[Hold, ...]
    """PyTorch's, where a rank multiplies matrices through it."""


class Contents(NamedTuple):
    """What a stage holds, whatever the numbers of its layers: stages of equal contents keep the same."""

    shape: CoreShape
    layers: tuple[tuple[CoreShape, int], ...]
    """Equal neighbours together;"""
    others: frozenset[str]
    """and entries that are no layers."""
    chunks: int

    @property
    def depth(self) -> int:
        """How many layers."""
        return sum(count for _, count in self.layers)


def contents_of(shape: CoreShape, entries: tuple[tuple[str, ...], ...]) -> Contents:
    names = tuple([name for chunk in entries for name in chunk])
    runs = tuple([(kind, len(list(own))) for kind, own in groupby(layer_shapes(shape, names))])
    return Contents(shape, runs, frozenset(filterfalse(is_layer, names)), len(entries))


def copies_of(chunks: Sequence[Chunk]) -> list[Hold]:
    """Quantised copies of weights, which modules keep from micro-batch to micro-batch, and from step to step
    (``_fp8_workspaces``); with delayed scaling scales and amaxes of five tensors of every layer."""
    found: list[Hold] = []
    for chunk in chunks:
        for own, times in chunk:
            weights = [one for one in own if one.low is not None]
            once: list[Hold] = []
            for weight in weights:
                assert weight.low is not None
                parts = weight.low.state
                if not weight.low.parameters:
                    parts = (*weight.low.kept_of_weight(weight.shape), *parts)
                once += [
                    Hold(0, hold_bytes(one.shape, one.dtype), Category.BUFFERS, f"{weight.name}_{one.name}", *one[1:])
                    for one in parts
                ]
            found += once * times
    return found


def workspaces_of(
    contents: Contents, libraries: Libraries, copies: Sequence[Hold], trained: frozenset[Shape] | None = None
) -> list[Hold]:
    """Static tensors that the first iteration makes. Every chunk has rotary tables of its own. ``trained``: shapes of
    weights with a gradient, if not all have one; a frozen head gathers its input into a tensor of its own."""
    holds: list[Hold] = [*copies]
    shape, layers, names, chunks = contents
    for kind, count in layers:
        if kind.low_attention and "attn" in graphs.blocks(kind):
            holds += [
                Hold(0, hold_bytes(one.shape, one.dtype), Category.BUFFERS, f"attention_{one.name}", *one[1:])
                for one in te_low_context.state(kind)
            ] * count
    kinds = {kind for kind, _ in layers}
    kinds |= {t5.decoder_shape(kind) for kind in kinds if kind.decoder}
    dtype, has_layers, has_head = shape.dtype, bool(kinds), "head" in names
    shape = next((kind for kind in kinds if kind.experts is not None), replace(shape, experts=None))
    if shape.spec.latent_kv_rank:
        holds += latent.tables(shape, contents.depth + shape.spec.mtp_layers * ("mtp" in names))
    elif shape.spec.positions == "rotary":
        holds += ends.rotary_table(shape) * chunks
    gathered = [local.memory_buffer(shape)] * has_layers + [ends.gather_buffer(shape)] * (has_head and trained is None)
    gathered += [dispatch.gather_buffer(shape)]
    drained = ends.gather_buffer(shape) if has_head and shape.defers else (0,)
    if drained != (0,):  # two, in turn (``drain_embedding_wgrad_compute``)
        holds += [
            Hold(0, hold_bytes(drained, dtype), Category.COMMUNICATION_BUFFERS, "drain_buffer", drained, dtype)
        ] * 2
    sizes = [hold_bytes(size, dtype) for size in gathered if size != (0,)]
    if sizes:
        holds.append(Hold(0, max(sizes), Category.COMMUNICATION_BUFFERS, "global_memory_buffer", (), dtype))
    weights = {size for kind in kinds for size in block.dummy_gradients(kind)}
    if "mtp" in names and shape.gradient_fusion:
        further = replace(shape, kind=shape.spec.mtp_pattern)
        weights |= {mtp.projection(shape), *(block.dummy_gradients(further) if further.kind else ())}
    head = ends.dummy_gradient(shape) if has_head else None
    weights |= {head} if head is not None else set()
    if trained is not None:
        weights = {*trained} if shape.gradient_fusion else set()
    if shape.implementation == "transformer_engine":
        major = (libraries.capability or HOPPER)[0]
        for name, size in te_facts.kept(shape, major, sorted(weights)).items():
            category = Category.WORKSPACES if name.endswith("workspace") else Category.BUFFERS
            if libraries.capability is not None or category is not Category.WORKSPACES:
                holds.append(Hold(0, size, category, name))
    else:
        buffers = Category.BUFFERS
        holds += [Hold(0, hold_bytes(one, dtype), buffers, "dummy_gradient", one, dtype) for one in sorted(weights)]
    if has_head or (has_layers and shape.attention in ("local", "unfused")) or shape.implementation == "local":
        holds += libraries.cublas
    return holds


def with_static(kept: Kept, holds: Sequence[Hold], contents: Contents) -> Kept:
    """With what the first iteration leaves, and dispatchers of experts from one iteration to the next: while these run
    again, backward holds the order of tokens anyway."""
    shape, layers, every, orders = contents.shape, [*contents.layers], [*holds], list[Hold]()
    if "mtp" in contents.others:
        layers.append((next((one for one, _ in layers if one.experts), shape), shape.spec.mtp_layers))
    for layer, count in layers:
        stays, order = dispatch.remembered(layer)
        every += stays * count
        orders += order * count
    kept = replace(kept, workspaces=Stretch(every))
    if not orders:
        return kept
    carried = [Hold(-1 - at, *hold[1:]) for at, hold in enumerate(orders)]
    return replace(kept, step=Stretch([*carried, *kept.step]), carried=Stretch([*kept.carried, *carried]))
