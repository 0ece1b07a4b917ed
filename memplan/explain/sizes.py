"""Without a plan: what of the known models has the size in a message. Logits factor as tokens × vocabulary × bytes,
scores of attention as sequences × heads × length² × bytes, matrices as their two sides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from ..plan.library import model_specs
from ..values import dataclass
from .clues import Clues
from .message import Size

SEGMENT = 2 << 20
"""Large requests are rounded to it (``kRoundLarge``)."""
LEAST = 24 << 20
"""Bytes below which too much has any size."""
ROUND_TOKENS = 1024
"""Tokens of a batch are taken to be a multiple of this, where no frame says which model it is."""
MOST_TOKENS = 1 << 17
MOST = 4


@dataclass(frozen=True, slots=True)
class Guess:
    """A tensor that has the size."""

    what: str
    """``logits``, ``attention scores`` or ``weights``."""
    factors: str
    """``16,384 tokens × 128,256 × 2 bytes``."""
    of: str
    """Models that have it."""


class _Spec(NamedTuple):
    name: str
    vocab: int
    hidden: int
    ffn: int
    heads: int


@lru_cache(maxsize=1)
def _specs() -> tuple[_Spec, ...]:
    """Sizes of the built-in models, read without checking: they are this package's own files."""
    found = []
    for name, path in model_specs().items():
        numbers = dict(re.findall(r"^(vocab|hidden|ffn|heads): *(\d+)", path.read_text(encoding="utf-8"), re.MULTILINE))
        if len(numbers) == 4:
            found.append(_Spec(name, *(int(numbers[key]) for key in ("vocab", "hidden", "ffn", "heads"))))
    return tuple(found)


def guesses(tried: Size, clues: Clues) -> tuple[Guess, ...]:
    """What may have been asked for, the likeliest first."""
    if tried.most < LEAST:
        return ()
    about = next((one.name for one in clues.about), "")
    named = _named(clues)
    specs = named or _specs()
    matrices = clues.phase in ("loading", "step") or about in ("dequantised weights", "the MLP")
    kinds = {
        "the logits": [_logits(tried, specs, clues, named=bool(named))],
        "attention": [_scores(tried, specs)],
        "weights that are moved to the GPU": [_matrices(tried, specs)],
    }
    every = [_logits(tried, specs, clues, named=False), _scores(tried, specs), _matrices(tried, specs)]
    chosen = kinds.get(about, every[2:] if matrices else every)
    if about and about not in kinds and not matrices:
        chosen = every[2:] if about == "gathered parameters" else []  # flat tensors have any size
    return tuple([guess for kind in chosen for guess in list(kind)[: MOST if len(chosen) == 1 else 2]])


def _named(clues: Clues) -> tuple[_Spec, ...]:
    """The models whose code the frames name: ``transformers/models/qwen2/modeling_qwen2.py``."""
    for file in [*([clues.frame.file] if clues.frame else []), *clues.files]:
        match = re.search(r"modeling_([a-z0-9]{2,30})\.py", file)
        if match:
            return tuple(one for one in _specs() if one.name.replace("-", "").startswith(match[1].replace("_", "")))
    return ()


def _fits(tried: Size, size: int) -> bool:
    return tried.is_printed_of(-(-size // SEGMENT) * SEGMENT)


def _logits(tried: Size, specs: tuple[_Spec, ...], clues: Clues, *, named: bool) -> Iterator[Guess]:
    """Roundest numbers of tokens first; of a known model any number. Megatron pads vocabularies and cuts them."""
    megatron = any("megatron" in file.lower() for file in clues.files)
    found: list[tuple[tuple[int, ...], str, str]] = []
    for vocab in dict.fromkeys(spec.vocab for spec in specs):
        for parts in (1, 2, 4, 8) if megatron else (1,):
            padded = -(-vocab // (128 * parts)) * 128 * parts if megatron else vocab
            for width in (4, 2):
                row = padded // parts * width
                tokens = _roundest(max((tried.least - SEGMENT) // row, 1), tried.most // row)
                if (
                    not 0 < tokens <= MOST_TOKENS
                    or not _fits(tried, tokens * row)
                    or (tokens % ROUND_TOKENS and not named)
                ):
                    continue
                split = f" / {parts}" if parts > 1 else ""
                order = parts, -min(tokens & -tokens, 1 << 12), clues.fp32 and width == 2, tokens
                factors = f"{tokens:,} tokens × {padded:,}{split} × {width} bytes"
                found.append((order, factors, _models(specs, vocab)))
    for _, factors, models in sorted(found):
        yield Guess("logits", factors, models)


def _roundest(least: int, most: int) -> int:
    """The number from ``least`` to ``most`` with the most factors of 2; 0 where there is none."""
    for power in range(24, -1, -1):
        number = most >> power << power
        if number >= least and number:
            return number
    return 0


def _models(specs: tuple[_Spec, ...], vocab: int) -> str:
    names = [one.name for one in specs if one.vocab == vocab]
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 2 else " and ".join(names)


def _scores(tried: Size, specs: tuple[_Spec, ...]) -> Iterator[Guess]:
    heads: dict[int, str] = {}
    for spec in specs:
        heads.setdefault(spec.heads, spec.name)
    found = []
    for count, name in heads.items():
        for width in (2, 4):
            for length in (512, 1024, 2048, 4096, 8192, 16384, 32768):
                one = count * length * length * width
                batch = tried.most // one
                if 1 <= batch <= 64 and batch & batch - 1 == 0 and _fits(tried, batch * one):
                    found.append((batch, -length, width, count, name))
    for batch, length, width, count, name in sorted(found):
        many = f"{batch} sequences × " if batch > 1 else ""
        yield Guess(
            "attention scores", f"{many}{count} heads × {-length:,}² × {width} bytes", f"{name}, eager attention"
        )


def _matrices(tried: Size, specs: tuple[_Spec, ...]) -> Iterator[Guess]:
    told = set()
    for spec in specs:
        for side, what in ((spec.ffn, "MLP"), (spec.vocab, "embedding or head")):
            for half_bytes, text in ((8, "4 bytes"), (4, "2 bytes"), (1, "half a byte")):
                if (side, spec.hidden, half_bytes) in told or not _fits(tried, side * spec.hidden * half_bytes // 2):
                    continue
                told.add((side, spec.hidden, half_bytes))
                yield Guess("weights", f"{side:,} × {spec.hidden:,} × {text}", f"{what} of {spec.name}")
