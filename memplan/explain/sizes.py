"""Without a plan: what of the known models has the size in a message. Logits factor as tokens × vocabulary × bytes,
scores of attention as sequences × heads × length² × bytes, matrices as their two sides.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from ..plan.library import model_specs
from ..values import dataclass
from .clues import Clues
from .message import OutOfMemory, Size

SEGMENT = 2 << 20
"""Large requests are rounded to it (``kRoundLarge``)."""
LEAST = 24 << 20
"""Bytes below which too much has any size."""
USUAL_TOKENS = tuple(
    sorted(factor << power for factor, powers in ((1, range(9, 18)), (3, range(9, 16))) for power in powers)
)
"""Micro-batch × sequence as people choose them, from 512 to 131,072: powers of two, and three times such."""
BYTES_A_PARAMETER = 1 / 16
"""Half a byte on each of eight GPUs: a model with more parameters would not be in what the message says is
allocated."""
MOST = 3


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
    layers: int

    @property
    def parameters(self) -> int:
        """About as many: attention's four and the MLP's three matrices, embedding and head."""
        return self.layers * self.hidden * (4 * self.hidden + 3 * self.ffn) + 2 * self.vocab * self.hidden


@lru_cache(maxsize=1)
def _specs() -> tuple[_Spec, ...]:
    """Sizes of the built-in models, read without checking: they are this package's own files."""
    found = []
    fields = _Spec._fields[1:]
    wanted = re.compile(rf"^({'|'.join(fields)}): *(\d+)", re.MULTILINE)
    for name, path in model_specs().items():
        numbers = dict(wanted.findall(path.read_text(encoding="utf-8")))
        if "hidden" in numbers:
            numbers.setdefault("ffn", 4 * int(numbers["hidden"]))
        if len(numbers) == len(fields):
            found.append(_Spec(name, *(int(numbers[key]) for key in fields)))
    return tuple(found)


def guesses(message: OutOfMemory, clues: Clues) -> tuple[Guess, ...]:
    """What may have been asked for, the likeliest first; nothing where the frames are of something else, or many things
    have this size as well."""
    tried = message.tried
    if tried is None or tried.most < LEAST:
        return ()
    about = next((one.name for one in clues.about), "")
    allowed = (message.allocated or 1 << 60) / BYTES_A_PARAMETER
    named = _named(clues)
    specs = named or tuple(one for one in _specs() if one.parameters <= allowed)
    if about == "the logits" or (not about and clues.phase in ("", "forward", "backward")):
        found = _logits(tried, specs, clues, named=bool(named))
    elif about == "attention":
        found = _scores(tried, specs)
    elif about in ("dequantised weights", "weights that are moved to the GPU") or clues.phase == "loading":
        found = _matrices(tried, specs)
    else:
        return ()
    return tuple(islice(found, MOST if about else 2))


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
    """Of a usual number of tokens, the vocabulary of most models first; of the model that a frame names any number,
    the roundest. In fp32, which losses compute in, or in 16 bits and twice as many. Megatron pads vocabularies and
    cuts them."""
    megatron = any("megatron" in file.lower() for file in clues.files)
    known = Counter(spec.vocab for spec in specs)
    found: list[tuple[tuple[int, ...], str, str]] = []
    for vocab, models in known.items():
        for parts in (1, 2, 4, 8) if megatron else (1,):
            padded = -(-vocab // (128 * parts)) * 128 * parts if megatron else vocab
            row = padded // parts * 4
            usual = [tokens for tokens in USUAL_TOKENS if _fits(tried, tokens * row)]
            tokens = (
                usual[0] if usual else named and _roundest(max((tried.least - SEGMENT) // row, 1), tried.most // row)
            )
            if not tokens or not _fits(tried, tokens * row):
                continue
            split = f" / {parts}" if parts > 1 else ""
            factors = f"{tokens:,} tokens × {padded:,}{split} × 4 bytes, or {2 * tokens:,} × 2 bytes"
            found.append(((parts, -models), factors, _models(specs, vocab)))
    for _, factors, names in sorted(found):
        yield Guess("logits", factors, names)


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
