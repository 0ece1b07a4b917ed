"""One label and one colour for each thing that memory is for, the same in every bar and table.

States of the model are cool, what a forward pass leaves behind is warm, and what PyTorch cannot see
is grey. The tones are of middle lightness, to be read on dark and on light terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from rich.text import Text

from ..result import BeyondAllocated, StageEstimate
from ..tape.events import Category
from ..values import dataclass

COLOURS: dict[Category, str] = {
    Category.PARAMETERS: "#4e8fce",
    Category.MAIN_PARAMETERS: "#86b6e4",
    Category.GRADIENTS: "#5aa66c",
    Category.OPTIMIZER_STATES: "#8f7cc8",
    Category.BUFFERS: "#a39584",
    Category.INPUTS: "#c9b18e",
    Category.ACTIVATIONS: "#e8a04c",
    Category.LOGITS: "#dc5f5f",
    Category.TEMPORARIES: "#d9c04f",
    Category.GATHERED_PARAMETERS: "#5eb1b0",
    Category.COMMUNICATION_BUFFERS: "#b573a8",
    Category.WORKSPACES: "#9b7b63",
    Category.BLOCK_ROUNDING: "#96928c",
}
CACHE = "allocator_cache"
BEYOND_COLOURS = {
    CACHE: "#83868c",
    "cuda_context": "#6f7379",
    "nccl": "#5f6369",
    "other": "#51555b",
}
SPECIAL_LABELS = {"cuda_context": "CUDA context", "nccl": "NCCL"}

GOOD, BAD, CAUTION, FAINT = "green", "red", "yellow", "dim"
"""Styles of verdicts, warnings and what stands in the background."""


@dataclass(frozen=True, slots=True)
class Share:
    """One part of a stage's memory: its JSON key and its bytes."""

    key: str
    size: int

    @property
    def label(self) -> str:
        return label(self.key)

    @property
    def colour(self) -> str:
        return BEYOND_COLOURS[self.key] if self.key in BEYOND_COLOURS else COLOURS[Category[self.key.upper()]]


def label(key: str) -> str:
    """A JSON key as words: ``optimizer states``, ``CUDA context``."""
    return SPECIAL_LABELS.get(key, key.replace("_", " "))


def allocated_shares(stage: StageEstimate) -> tuple[Share, ...]:
    """Every category that the stage uses; sums to ``allocated`` (``requested`` where that is not known)."""
    return tuple(Share(category.key, size) for category in Category if (size := stage.of(category)))


def beyond_shares(stage: StageEstimate) -> tuple[tuple[Share, ...], tuple[Share, ...]]:
    """What lies between allocated and reserved, and what between reserved and device, where known."""
    known = ((part.name, getattr(stage.beyond, part.name)) for part in fields(BeyondAllocated))
    parts = tuple(Share(key, size) for key, size in known if size)
    return tuple(part for part in parts if part.key == CACHE), tuple(part for part in parts if part.key != CACHE)


def span_of(stage: StageEstimate, key: str) -> tuple[int, int] | None:
    """The least and the most that a part outside PyTorch's allocator takes, where these differ."""
    found = [one for one in stage.outside if one.part == key]
    least, most = sum(one.least for one in found), sum(one.most for one in found)
    return (least, most) if least < most else None


def unknown_beyond(stage: StageEstimate) -> tuple[str, ...]:
    """Labels of what the device holds and nobody could say how much of."""
    return tuple(label(part.name) for part in fields(BeyondAllocated) if getattr(stage.beyond, part.name) is None)


def shares(stage: StageEstimate) -> tuple[Share, ...]:
    """The stage's headline reading in parts."""
    cache, others = beyond_shares(stage)
    return (
        *allocated_shares(stage),
        *(cache if stage.reserved is not None else ()),
        *(others if stage.device is not None else ()),
    )


FILLED, EMPTY, LIMIT = "■", "·", "│"
SWATCH = "■"


def bar(parts: Sequence[Share], scale: int, width: int, limit: int | None = None) -> Text:
    """``parts`` (bytes) drawn so that ``scale`` bytes fill ``width`` cells, with a mark at ``limit`` bytes.

    A cell takes the colour of the share at its middle, so the stretches are right to half a cell.
    Between the last share and the limit there are dots: what is still free.
    """
    text = Text(no_wrap=True)
    ends, total = [], 0
    for part in parts:
        total += part.size
        ends.append(total)
    limit_cell = None if limit is None else min(width - 1, limit * width // max(scale, 1))
    index = 0
    for cell in range(width):
        middle = (2 * cell + 1) * scale // (2 * width)
        while index < len(ends) and ends[index] <= middle:
            index += 1
        if cell == limit_cell:
            text.append(LIMIT, style=f"bold {BAD}" if total > (limit or 0) else "bold")
        elif index < len(parts):
            text.append(FILLED, style=parts[index].colour)
        elif limit_cell is not None and cell < limit_cell:
            text.append(EMPTY, style="dim")
        else:
            text.append(" ")
    return text
