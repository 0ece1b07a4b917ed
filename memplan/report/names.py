"""Names and sizes as reports print them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise

from ..frameworks import framework
from ..plan.plan import Plan
from ..result import Judged
from ..values import dataclass

# -- units -----------------------------------------------------------------------------------------------

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MINUS = "−"
UNKNOWN = "?"


def size(count: int) -> str:
    """``count`` bytes with a unit: ``23.45 GiB``, ``612 MiB``, ``1.5 KiB``, ``40 B``.

    A unit is left for the next larger one where its figure would otherwise round to 1,024.
    """
    magnitude = abs(count)
    sign = MINUS if count < 0 else ""
    if magnitude >= GIB - MIB / 2:
        return f"{sign}{magnitude / GIB:,.2f} GiB"
    if magnitude >= 10 * MIB:
        return f"{sign}{magnitude / MIB:.0f} MiB"
    if magnitude >= MIB - KIB / 20:
        return f"{sign}{magnitude / MIB:.1f} MiB"
    if magnitude >= KIB:
        return f"{sign}{magnitude / KIB:.1f} KiB"
    return f"{sign}{magnitude} B"


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a whole table, so that its figures can be compared and need no unit of their own."""

    name: str
    bytes: int
    decimals: int

    def figure(self, count: int | None) -> str:
        """``count`` bytes without the unit: ``23.45``, ``−1.33``; ``?`` where not known."""
        if count is None:
            return UNKNOWN
        figure = f"{abs(count) / self.bytes:,.{self.decimals}f}"
        return MINUS + figure if count < 0 and figure.strip("0.") else figure

    def prints(self, count: int) -> bool:
        """Whether ``count`` bytes are more than a zero in this unit."""
        return bool(self.figure(abs(count)).strip("0."))

    def change(self, count: int) -> str:
        """A difference of ``count`` bytes, signed: ``+0.50``, ``−4.10``, ``0`` for none."""
        if not count:
            return "0"
        return self.figure(count) if count < 0 else f"+{self.figure(count)}"


GIBS, MIBS = Unit("GiB", GIB, 2), Unit("MiB", MIB, 1)
MEANING = {"GiB": "GiB (2^30 bytes)", "MiB": "MiB (2^20 bytes)"}
"""Of each unit's name."""


def unit_for(largest: int) -> Unit:
    """GiB to 10 MiB for what fills a GPU; MiB to a tenth below 2 GiB."""
    return GIBS if largest >= 2 * GIB else MIBS


def percent(part: int, whole: int) -> str:
    """``part`` of ``whole`` to a tenth: ``12.3``."""
    return f"{100 * part / whole:.1f}" if whole else "0.0"


def elements(count: int) -> str:
    """A parameter count to three digits: ``1.45 B``, ``362 M``, ``80.4 K``, ``512``."""
    for magnitude, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= 0.9995 * magnitude:
            figure = count / magnitude
            decimals = 2 if figure < 9.995 else 1 if figure < 99.95 else 0
            return f"{figure:,.{decimals}f} {letter}"
    return str(count)


def exact(count: int) -> str:
    """``count`` with thousands separated: ``4,102,029,312``."""
    return f"{count:,}".replace("-", MINUS)


# -- names -----------------------------------------------------------------------------------------------

DASH = "–"


def kind_of(module: str) -> str:
    """The module without its number: ``layer`` of ``layer.12``; other names as they are."""
    kind, _, number = module.rpartition(".")
    return kind if kind and number.isdecimal() else module


def _numbered(module: str) -> tuple[str, bool]:
    """Its kind, and whether it has a number."""
    kind = kind_of(module)
    return kind, kind != module


def span(first: int | str, last: int | str) -> str:
    """``3–7``, or ``3`` where both ends are the same."""
    return f"{first}" if first == last else f"{first}{DASH}{last}"


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The stretches of consecutive ``numbers``, each as its first and last."""
    for _, pairs in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in pairs]
        yield members[0], members[-1]


def modules_text(modules: Sequence[str]) -> str:
    """``embedding, layer.0, layer.1, layer.2`` as ``embedding, layers 0–2``, in the stage's order."""
    parts = []
    for (kind, numbered), members in groupby(modules, key=_numbered):
        if not numbered:
            count = len(list(members))
            parts.append(kind if count == 1 else f"{count} × {kind}")
            continue
        runs = list(_runs(int(name.rpartition(".")[2]) for name in members))
        several = len(runs) > 1 or runs[0][0] != runs[0][1]
        plural = "s" * (several and not kind.endswith("s"))
        parts.append(f"{kind}{plural} " + ", ".join(_shortened(runs)))
    return ", ".join(parts)


def in_order(modules: Sequence[str]) -> list[str]:
    """``modules`` with neighbours of one kind in the order of their numbers: those of several virtual stages."""
    result: list[str] = []
    for (_, numbered), members in groupby(modules, key=_numbered):
        named = [*members]
        result += sorted(named, key=lambda name: int(name.rpartition(".")[2])) if numbered else named
    return result


def numbers_text(numbers: Iterable[int]) -> str:
    """``0, 2–5`` of ascending ``numbers``."""
    return ", ".join(span(*run) for run in _runs(numbers))


def _shortened(runs: Sequence[tuple[int, int]]) -> list[str]:
    """``15, 31, …, 111`` where more than three stretches are equal and equally far apart, as virtual stages are."""
    texts = [span(*run) for run in runs]
    steps = {(later[0] - run[0], later[1] - run[1]) for run, later in pairwise(runs)}
    return texts if len(runs) <= 3 or len(steps) > 1 else [*texts[:2], "…", texts[-1]]


def ranks_text(ranks: Sequence[int]) -> str:
    """``4–7`` where the ranks are consecutive, else how many they are: ``×16``."""
    runs = list(_runs(sorted(ranks)))
    return span(*runs[0]) if len(runs) == 1 else f"×{len(ranks)}"


def stage_word(plan: Plan) -> str:
    """What a row of the table is: a pipeline stage, or a device of a device map."""
    return framework(plan.framework).stage_word


def plan_text(plan: Plan) -> str:
    """The plan in a line: ``gpt2-xl · single · mbs 1 · seq 1024 · fp32 · adamw``."""
    layout, batch = plan.layout, plan.batch
    degrees = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "ep": layout.ep, "vpp": layout.vpp}
    parts = [plan.model.name, *_who(plan)]
    parts += [f"{name} {degree}" for name, degree in degrees.items() if degree not in (None, 1)]
    parts += [f"zero {layout.zero}"] if layout.zero else []
    parts += [f"mbs {batch.mbs}"]
    parts += [f"gbs {batch.gbs}"] if batch.gbs is not None else []
    parts += [f"seq {batch.seq or plan.model.positions_max}", plan.precision.named, plan.optimizer.name]
    parts += [f"{plan.recompute.mode} recompute"] if plan.recompute.mode != "none" else []
    parts += [f"{framework(plan.framework).attention_words(plan)} attention"]
    return " · ".join([*parts, *_tuning(plan)])


def _who(plan: Plan) -> list[str]:
    """The framework, and what of it makes another plan."""
    parts = [plan.framework, *framework(plan.framework).described(plan), *(["compiled"] if plan.compile else [])]
    title = plan.trainer.kind.title
    return [*parts, title] if title else parts


def _tuning(plan: Plan) -> list[str]:
    """What is trained, where that is not everything, and what the rest is stored as."""
    parts = [f"{'DoRA' if plan.lora.dora else 'LoRA'} {plan.lora.rank}"] if plan.lora.rank is not None else []
    parts += [str(plan.quantisation.kind)] if plan.quantisation.kind != "none" else []
    frozen = ["embedding"] if plan.frozen.embedding else []
    frozen += [f"{plan.frozen.layers} layers"] if plan.frozen.layers else []
    return [*parts, f"frozen {' and '.join(frozen)}"] if frozen else parts


def retry_words(judged: Judged) -> str:
    """How often cached memory is given back."""
    if not judged.retries_in_iteration:
        return f"the allocator gives cached memory back {_times(judged.retries)} in the first iterations, then no more"
    least = "at least " if judged.at_least else ""
    return f"the allocator gives cached memory back {least}{_times(judged.retries_in_iteration)} in every iteration"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
