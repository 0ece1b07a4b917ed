"""Whole layers whose saved tensors the host keeps (``--cpu-offloading-num-layers``).

``megatron/core/transformer/transformer_block.py`` enters Transformer Engine's context around every layer
(``transformer_engine/pytorch/cpu_offload.py``, ``DefaultOffloadSynchronizer``, from 2.10 on). Of N layers the first
k go:

* What autograd saves in one is kept by its state alone, if it has enough elements (``_check_if_offload``); views go as
  what they are views of. It ends before the forward of layer N - k + j (``finish_offload_map``), by when its copy has
  been waited for.
* It comes back, all of it at once, before the backward of layer N - 1 - k + j (``start_reload_map``), on the main
  stream, and ends before the backward of the layer below, or when all of backward has ended (``bwd_step``,
  ``finish_part_of_bwd``). What the layer's own backward empties ends there (``clear_tensor_data`` of ``linear.py`` and
  ``layernorm_linear.py``): outputs of norms within linear layers, and inputs in 8 or 4 bits.

A quantised tensor goes in its parts (``push_tensor``, ``prepare_for_saving``): data, and scales with enough elements;
weights and their copies stay (``mark_not_offload``).

The first layer's input is the model's own variable, too, which ends with its forward (``GPTModel.forward``).

Beside Megatron-FSDP hooks of both run around a layer. Before its forward the offloading's context is entered first;
before its backward the hook on the output tensor, which gathers, runs ahead of the one on its node, which fetches
(``register_multi_grad_hook`` of ``megatron_fsdp.py`` and ``synchronization_function``; ``call_tensor_pre_hooks`` and
``call_pre_hooks`` of PyTorch's ``engine.cpp``); when backward has ended Megatron-FSDP's callback is the older one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod

from ...layers.module import Module, Tapes
from ...tape.events import INPUT, Drop, Event, Hold, Hook, Scope, Seam, Tape, insert
from ...tape.program import Chunk, Span
from ...values import replace

LEAST = 256 * 1024
"""Elements of the smallest tensor that goes."""

LAYER = "layer."

_CLEARED = re.compile(r"linear_(qkv|fc1)\.layer_norm|_(fp8|fp8_transposed|rows|columns|row_scales|column_scales)$")
"""Names of what backward empties: within a norm's linear layer, and parts of quantised inputs."""


Around = Mapping[tuple[Hook, int], list[Event]]
"""What happens around the modules of a chunk, by hooks and the modules' places."""


def _inserted(around: Around, tape: Tape, place: int, keeps: bool) -> Tape:
    """``keeps``: seams stay for hooks of others, which run before these but ahead of a forward."""

    def at(seam: Seam) -> Sequence[Event]:
        assert seam.hook is not None
        own = around.get((seam.hook, place), ())
        if not keeps:
            return own
        return (*own, seam) if seam.hook is Hook.BEFORE_FORWARD else (seam, *own)

    return insert(tape, at)


@lru_cache(maxsize=1 << 12)
def with_offload(chunk: Chunk, count: int, keeps: bool = False) -> tuple[Chunk, int]:
    """``chunk`` of a whole model whose first ``count`` layers are kept by the host, and bytes there. ``keeps``: there
    are hooks of others, too."""
    released, batch, *spans, ended = chunk.spans
    modules = [(span.module, name) for span in spans for name in span.names]
    places = [at for at, (_, name) in enumerate(modules) if name.startswith(LAYER)]
    tapes = [module.steady for module, _ in modules]
    around, host, number = defaultdict[tuple[Hook, int], list[Event]](list), 0, 0
    for at in range(count):
        place, released_at = places[at], places[len(places) - count + at]
        reloaded_at, below = places[len(places) - 1 - count + at], places[at - 1] if at else place - 1
        given = _made(tapes[place - 1], tapes[place - 1].output)
        for held in (*_saved(tapes[place]), *([given] if _ends(tapes[place].backward, INPUT) else [])):
            if prod(held.shape) < LEAST:
                continue
            first, again = Scope.COPIES.id(2 * number), Scope.COPIES.id(2 * number + 1)
            number += 1
            host += pinned(held.bytes)
            is_input = held is given
            if is_input:
                tapes[place - 1] = _renamed(tapes[place - 1], held.tensor, first)
            else:
                tapes[place] = _renamed(tapes[place], held.tensor, first)
            cleared = _CLEARED.search(held.name) is not None
            tapes[place] = _ended(tapes[place], INPUT if is_input else first, again if cleared else None)
            ends = Drop(first, held.bytes, held.category)
            if is_input and not at:
                around[Hook.AFTER_FORWARD, len(modules) - 1].append(ends)
            else:
                around[Hook.BEFORE_FORWARD, released_at].append(ends)
            back = held._replace(tensor=again, name=f"{held.name}/reloaded")
            around[Hook.BEFORE_BACKWARD, reloaded_at].append(back)
            if not cleared:
                hook = Hook.BEFORE_BACKWARD if at else Hook.AFTER_BACKWARD
                around[hook, below].append(Drop(again, held.bytes, held.category))
    for events in around.values():  # what has come back for the layer above ends first
        events.sort(key=lambda event: isinstance(event, Hold))
    own = [
        Span(_with(module, _around(tapes[at], around, at, keeps), keeps), (name,))
        for at, (module, name) in enumerate(modules)
    ]
    return Chunk((released, batch, *own, ended)), host


def pinned(size: int) -> int:
    """Bytes of host memory that a request takes (``CachingHostAllocator``): the next power of two."""
    return 1 << (size - 1).bit_length()


def _saved(tapes: Tapes) -> list[Hold]:
    """What a layer's forward leaves for its backward, but for its output."""
    left: dict[int, Hold] = {}
    for event in tapes.forward:
        if isinstance(event, Hold):
            left[event.tensor] = event
        elif isinstance(event, Drop):
            left.pop(event.tensor, None)
    return [held for id, held in left.items() if id > 0 and id != tapes.output and _ends(tapes.backward, id)]


def _ends(tape: Tape, id: int) -> bool:
    return any(isinstance(event, Drop) and event.tensor == id for event in tape)


def _made(tapes: Tapes, id: int) -> Hold:
    return next(event for event in tapes.forward if isinstance(event, Hold) and event.tensor == id)


def _renamed(tapes: Tapes, id: int, other: int) -> Tapes:
    """With another id for a tensor of its own."""

    def named(tape: Tape) -> Tape:
        return tuple(
            event._replace(tensor=other) if not isinstance(event, Seam) and event.tensor == id else event
            for event in tape
        )

    output = other if tapes.output == id else tapes.output
    return replace(tapes, forward=named(tapes.forward), backward=named(tapes.backward), output=output)


def _ended(tapes: Tapes, id: int, other: int | None) -> Tapes:
    """With the end of ``other`` in backward in the place of that of ``id``, if there is one."""
    kept = (
        one._replace(tensor=other) if other is not None and isinstance(one, Drop) and one.tensor == id else one
        for one in tapes.backward
        if other is not None or not (isinstance(one, Drop) and one.tensor == id)
    )
    return replace(tapes, backward=tuple(kept))


def _around(tapes: Tapes, around: Around, place: int, keeps: bool) -> Tapes:
    forward, backward = (_inserted(around, tape, place, keeps) for tape in (tapes.forward, tapes.backward))
    return replace(tapes, forward=forward, backward=backward)


def _with(module: Module, tapes: Tapes, keeps: bool) -> Module:
    evaluation = module.evaluation if keeps else insert(module.evaluation, lambda _: ())
    return replace(module, first=tapes, steady=tapes, evaluation=evaluation)
