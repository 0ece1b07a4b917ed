"""Which layers each stage and virtual chunk of Megatron-Core holds.

``megatron/core/transformer/transformer_block.py`` (``get_num_layers_to_build``),
``transformer_layer.py`` (``get_transformer_layer_offset``), ``pipeline_parallel_layer_layout.py``, and
the checks of ``transformer_config.py`` (``__post_init__``) and ``megatron/training/arguments.py``
(``validate_args``). Layers are numbered along the model: chunk 0 of every stage, then chunk 1, ….

The embedding is in the first chunk of the first stage and the head (final norm, output layer, loss)
in the last chunk of the last, whatever a layout string says (``pre_process``, ``post_process``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

from ..values import dataclass, replace
from .errors import PlanError

FIRST, LAST = "pipeline.first_layers", "pipeline.last_layers"
COUNT_EMBEDDING, COUNT_LOSS = "pipeline.count_embedding", "pipeline.count_loss"
LAYOUT, VPP = "pipeline.layout", "layout.vpp"

LONGEST_WRITTEN = 10_000
LONGEST = 100_000
"""Characters of a layout string once its repetitions are written out."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one chunk of layers is made of, in order."""

    embedding: bool
    layers: tuple[int, ...]
    """Indices into the model's transformer layers, from 0."""
    head: bool
    """Final norm, output layer and loss."""
    further: bool = False
    """A layout string has the layers of multi-token prediction here."""

    @property
    def entries(self) -> tuple[str | int, ...]:
        """``"embedding"``, layer indices, ``"head"``."""
        return (*(("embedding",) if self.embedding else ()), *self.layers, *(("head",) if self.head else ()))


Stages = tuple[tuple[Chunk, ...], ...]
"""By stage, then by chunk."""


@lru_cache(maxsize=4096)
def stages(
    layers: int,
    pp: int,
    vpp: int | None = None,
    first_layers: int | None = None,
    last_layers: int | None = None,
    count_embedding: bool = False,
    count_loss: bool = False,
    layout: str | None = None,
) -> Stages:
    """The chunks of every stage; ``PlanError`` where Megatron-Core itself would stop.

    ``vpp`` is the number of chunks per stage (``None`` as 1, or as the layout string has it);
    ``first_layers`` and ``last_layers`` are ``--decoder-first/last-pipeline-num-layers``;
    ``count_embedding`` and ``count_loss`` are ``--account-for-embedding/loss-in-pipeline-split``.
    """
    if (first_layers is not None or last_layers is not None) and (count_embedding or count_loss):
        field = COUNT_EMBEDDING if count_embedding else COUNT_LOSS
        raise PlanError(field, True, "cannot be combined with pipeline.first_layers or pipeline.last_layers")
    if layout is not None:
        counts = _of_layout(layout, layers, pp, vpp, first_layers, last_layers, count_embedding, count_loss)
    else:
        chunks = 1 if vpp is None else vpp
        _check_vpp(chunks, pp)
        if first_layers is not None or last_layers is not None:
            counts = _uneven(layers, pp, chunks, first_layers, last_layers)
        else:
            counts = _even(layers, pp, chunks, count_embedding, count_loss)
    held = _numbered(counts, pp)
    return held if layout is None else _with_further(held, layout)


def _with_further(held: Stages, layout: str) -> Stages:
    """Layers of multi-token prediction (m) in the chunks where a layout string has them."""
    parts, pp = written_out(layout).split("|"), len(held)
    if "m" not in layout:
        return held
    return tuple(
        tuple(replace(one, further="m" in parts[chunk * pp + stage]) for chunk, one in enumerate(own))
        for stage, own in enumerate(held)
    )


def further_stage(layout: str | None, pp: int) -> int:
    """The stage that has the layers of multi-token prediction: the last, unless a layout string says other."""
    parts = written_out(layout).split("|") if layout is not None else []
    return next((at % pp for at, part in enumerate(parts) if "m" in part), pp - 1)


def virtual_stages(
    layers: int, pp: int, layers_per_chunk: int, count_embedding: bool = False, count_loss: bool = False
) -> int:
    """Chunks per stage from ``--num-layers-per-virtual-pipeline-stage`` (``validate_args``)."""
    per_stage, rest = divmod(layers + count_embedding + count_loss, pp)
    if rest:
        raise _not_divisible(layers, pp, count_embedding, count_loss)
    if layers_per_chunk < 1 or per_stage % layers_per_chunk:
        raise PlanError(
            VPP, layers_per_chunk, f"layers per virtual stage must divide the {per_stage} layers of a stage"
        )
    return per_stage // layers_per_chunk


def _check_vpp(chunks: int, pp: int) -> None:
    if chunks < 1:
        raise PlanError(VPP, chunks, "must be at least 1")
    if chunks > 1 and pp == 1:
        raise PlanError(VPP, chunks, "virtual stages need layout.pp above 1")


def _not_divisible(layers: int, pp: int, count_embedding: bool, count_loss: bool) -> PlanError:
    total = layers + count_embedding + count_loss
    counted = " with the embedding" * count_embedding + " with the loss" * count_loss
    if count_embedding or count_loss:
        field = COUNT_EMBEDDING if count_embedding else COUNT_LOSS
        return PlanError(field, True, f"makes {total} layers{counted}, which layout.pp = {pp} must divide")
    problem = f"must divide the {layers} layers, unless some stages have fewer, as with {_differing(layers, pp)}"
    return PlanError("layout.pp", pp, f"{problem} (or --first-layers, --last-layers, --pipeline-layout)")


def _differing(layers: int, pp: int) -> str:
    """Flags with which ``pp`` stages run ``layers``: embedding and loss in place of a layer each, else a last stage
    that has fewer."""
    for flags, counted in (("--count-embedding --count-loss", 2), ("--count-loss", 1)):
        if (layers + counted) % pp == 0:
            return flags
    each = -(-layers // pp)
    last = layers - (pp - 1) * each
    return f"--last-layers {last}" if last > 0 else f"--first-layers {layers - (pp - 1) * (layers // pp)}"


Counts = list[list[int]]
"""Layers by stage, then by chunk."""


def _even(layers: int, pp: int, chunks: int, count_embedding: bool, count_loss: bool) -> Counts:
    """Equal stages, of which embedding and loss may take the place of one layer each."""
    per_stage, rest = divmod(layers + count_embedding + count_loss, pp)
    if rest:
        raise _not_divisible(layers, pp, count_embedding, count_loss)
    if per_stage % chunks:
        raise PlanError(VPP, chunks, f"must divide the {per_stage} layers of a stage")
    counts = [[per_stage // chunks] * chunks for _ in range(pp)]
    counts[0][0] -= count_embedding
    counts[-1][-1] -= count_loss
    if counts[0][0] < 0 or counts[-1][-1] < 0:
        field = COUNT_EMBEDDING if counts[0][0] < 0 else COUNT_LOSS
        raise PlanError(field, True, f"takes more layers from a chunk than its {per_stage // chunks}")
    return counts


def _uneven(layers: int, pp: int, chunks: int, first: int | None, last: int | None) -> Counts:
    """First and last stage as given, the others equal."""
    given = [(FIRST, first), (LAST, last)]
    fixed = [(field, size) for field, size in given if size is not None]
    for field, size in fixed:
        if size <= 0:
            raise PlanError(field, size, "must be above 0")
        if size % chunks:
            raise PlanError(field, size, f"must be a multiple of layout.vpp = {chunks}")
    field, size = fixed[-1]
    middle, rest = pp - len(fixed), layers - sum(size for _, size in fixed)
    if middle < 0:
        raise PlanError(field, size, f"needs layout.pp of at least {len(fixed)}, not {pp}")
    if rest < 0 or bool(rest) != bool(middle):
        raise PlanError(field, size, f"leaves {rest} of {layers} layers for the {middle} middle stages")
    if not middle and chunks > 1 and pp > 1:
        raise PlanError(VPP, chunks, f"needs a stage between those of {FIRST} and {LAST}: layout.pp above {pp}")
    if middle and rest % middle:
        raise PlanError(field, size, f"leaves {rest} of {layers} layers, not a multiple of the {middle} middle stages")
    per_stage = rest // middle if middle else 0
    if per_stage % chunks:
        raise PlanError(VPP, chunks, f"must divide the {per_stage} layers of a middle stage")
    sizes = [*([first] if first is not None else ()), *[per_stage] * middle, *([last] if last is not None else ())]
    return [[size // chunks] * chunks for size in sizes]


def _of_layout(
    text: str,
    layers: int,
    pp: int,
    vpp: int | None,
    first: int | None,
    last: int | None,
    count_embedding: bool,
    count_loss: bool,
) -> Counts:
    """A string such as ``Et|(tt|)*6mL``: stages of chunk 0, then of chunk 1, …, separated by ``|``; layers of
    multi-token prediction (m) are where the loss is, or in the stage before (``validate_layer_layout``)."""
    others = {FIRST: first, LAST: last, COUNT_EMBEDDING: count_embedding or None, COUNT_LOSS: count_loss or None}
    for field, value in others.items():
        if value is not None:
            raise PlanError(LAYOUT, text, f"cannot be combined with {field}")
    parts = written_out(text).split("|")
    for char in "".join(parts):
        if char not in "EtmL":
            raise PlanError(
                LAYOUT, text, f"{char!r} is not allowed; use E, t, m, L, the separator | and repetitions *N"
            )
    if len(parts) % pp:
        raise PlanError(LAYOUT, text, f"has {len(parts)} stages, which layout.pp = {pp} must divide")
    chunks = len(parts) // pp
    if vpp is not None and vpp != chunks:
        raise PlanError(VPP, vpp, f"the layout string has {chunks} chunks per stage")
    _check_vpp(chunks, pp)
    flat = "".join(parts)
    if flat[:1] != "E" or flat.count("E") != 1:
        raise PlanError(LAYOUT, text, "must begin with the embedding E and have one E only")
    if flat[-1:] != "L" or flat.count("L") != 1:
        raise PlanError(LAYOUT, text, "must end with the loss L and have one L only")
    if further := flat.count("m"):
        if "t" in flat[flat.index("m") :]:
            raise PlanError(LAYOUT, text, "must have its layers of multi-token prediction m behind all layers t")
        if further not in (parts[-1].count("m"), parts[-2].count("m") if len(parts) > 1 else 0):
            problem = "must have every m (multi-token prediction) in the last stage, or every one in that before it"
            raise PlanError(LAYOUT, text, problem)
    if flat.count("t") != layers:
        raise PlanError(LAYOUT, text, f"has {flat.count('t')} layers t; the model has {layers}")
    return [[parts[chunk * pp + stage].count("t") for chunk in range(chunks)] for stage in range(pp)]


def layout_string(held: Stages) -> str:
    """The string that makes Megatron-Core hold ``held``, whatever cut it is: ``Et*3|(tt|)*29,L``.

    ``stages(…, layout=layout_string(held))`` is ``held`` again.
    """
    parts = [
        "E" * chunk.embedding + times("t", len(chunk.layers)) + "L" * chunk.head
        for number in range(len(held[0]))
        for chunk in (stage[number] for stage in held)
    ]
    *before, last = parts
    runs = [(part, len(list(equal))) for part, equal in groupby(before)]
    return "".join(f"({part}|)*{count}," if count > 1 else f"{part}|" for part, count in runs) + last


def times(letter: str, count: int) -> str:
    """So many of a letter in a layout string."""
    return f"{letter}*{count}" if count > 2 else letter * count


def written_out(text: str) -> str:
    """``text`` without commas and with repetitions unrolled: first ``(…)*N``, then ``x*N``."""

    def unroll(match: re.Match[str]) -> str:
        times = int(match[2][:7])
        if times * len(match[1]) > LONGEST:
            raise PlanError(LAYOUT, text, f"repeats {match[1]} {match[2]} times; at most {LONGEST} layers are read")
        return match[1] * times

    text = text.replace(",", "")
    if len(text) > LONGEST_WRITTEN:
        raise PlanError(LAYOUT, text, f"must be at most {LONGEST_WRITTEN:,} characters long")
    for repetition in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(repetition, unroll, text)
        if len(text) > LONGEST:
            raise PlanError(LAYOUT, text, f"is longer than {LONGEST} characters when written out")
    return text


def layout_text(counts: Sequence[Sequence[int]]) -> str:
    """``layout_string`` of so many layers by stage, then by chunk."""
    return layout_string(_numbered(counts, len(counts)))


def _numbered(counts: Sequence[Sequence[int]], pp: int) -> Stages:
    chunks = len(counts[0])
    held: list[list[Chunk]] = [[] for _ in range(pp)]
    at = 0
    for chunk in range(chunks):
        for stage in range(pp):
            size = counts[stage][chunk]
            is_last = stage == pp - 1 and chunk == chunks - 1
            held[stage].append(Chunk(stage == chunk == 0, tuple(range(at, at + size)), is_last))
            at += size
    return tuple(map(tuple, held))
