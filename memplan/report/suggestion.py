"""``memplan suggest-partition``: the recommended layout, why this one, memory against time, and what was searched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..frameworks import framework
from ..plan.errors import shown
from ..plan.fields import plan_fields
from ..plan.notes import SEQ_DEFAULT, VOCAB_UNUSED, says_choice
from ..plan.resolve import resolve
from ..result import Estimate, Notice, Verdict
from ..search.changes import Method
from ..search.result import Found, Offer, Suggestion
from ..search.time import StepTime, best_published, cost_of_step, cost_of_tokens
from ..search.time.stand_in import STAND_IN, lacks_network
from ..values import dataclass
from .estimate import first_notes, verdict
from .names import retry_words, size, stage_word
from .printing import (
    BAD,
    CAUTION,
    DOT,
    FAINT,
    GOOD,
    Breakable,
    Pieces,
    entries,
    folded,
    left,
    plain_table,
    put,
    put_line,
    right,
    spaced,
    titled,
    written_lines,
)
from .stages import stage_tables
from .suggestion_tables import (
    alternatives,
    changes_table,
    compact_stages,
    cuts_table,
    front_table,
    gpu_hours,
    retry_marks,
    units,
    worth,
)
from .suggestion_words import (
    beside_training,
    comparison_words,
    cut_words,
    difference_pieces,
    gpus_words,
    layout_pieces,
    part,
    rough,
    same_layout,
    speed_words,
    time_unit,
)

SHOWN = 8
"""Points of the front, and changes, that are printed without ``-v``."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found, and what stands beside it in print."""

    found: Found
    methods: tuple[Method, ...] = ()
    """The recommended layout cut by others."""
    notes: tuple[Notice, ...] = ()
    """Of how the plan was read."""
    assumptions: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    """Files."""
    offers: tuple[Offer, ...] = ()
    """Of every framework, where the plan names none."""
    started: tuple[str, ...] = ()
    """Flags of fields that the search chose: where it started."""
    flags: str = ""
    """Flags that make the recommended layout of the plan."""

    def warnings(self, stated: Suggestion | None) -> list[Notice]:
        """Of the plan, and of the estimate and the time of ``stated``."""
        if stated is None:
            return list(self.notes)
        estimate = stated.estimate
        return [
            *_too_fast(stated),
            *_untimed(stated),
            *self.notes,
            *(estimate.warnings if estimate is not None else ()),
        ]


def _too_fast(stated: Suggestion) -> Iterator[Notice]:
    """Nobody has published a step that makes as much of this GPU."""
    if stated.step is None:
        return
    plan = resolve(stated.plan)
    dtype, experts = plan.precision.low or plan.precision.dtype, plan.model.experts > 0
    best = best_published(plan.hardware.gpu or "", dtype, stated.step.mfu_halved, experts=experts)
    if best is not None:
        mfu, published = 100 * stated.step.mfu_halved, 100 * best.value
        digits = 0 if round(mfu) > round(published) else 1
        yield Notice(
            "mfu-above-published",
            f"the predicted MFU of {mfu:.{digits}f} %, with half of causal scores, is above the best published one "
            f"known for {plan.hardware.gpu} in 16 bits, {published:.{digits}f} % ({best.source}): expect a slower step",
        )


def _untimed(stated: Suggestion) -> Iterator[Notice]:
    """What trl's loops run beside the model's own passes."""
    trainer = stated.plan.trainer
    left_out = trainer.kind.untimed
    if stated.step is None or not left_out or trainer.precompute_ref_log_probs:
        return
    yield Notice("not-timed", f"the step's time leaves out {left_out}: expect a slower step")


def print_suggestion(answer: Answer, console: Console, *, verbose: bool = False, quiet: bool = False) -> None:
    """Prints the answer; ``quiet`` only its first line, with the framework that nobody named, ``verbose`` every stage,
    rule and assumption."""
    if quiet:
        found = answer.found
        stated = _stated(found)
        chosen = [found.base.framework] if answer.offers else []
        pieces = [*chosen, *_pieces(found, stated)] if stated else []
        put_line(console, Text.assemble(*_headline(found), DOT.join(pieces)))
    else:
        put(console, *suggestion_report(answer, console, verbose))


def suggestion_report(answer: Answer, console: Console, verbose: bool = False) -> Iterator[RenderableType]:
    """The recommended layout, and what follows it, for ``console``'s width."""
    found = answer.found
    word, said = _headline(found)
    stated = _stated(found)
    first, *rest = _pieces(found, stated) if stated is not None else [""]
    yield Pieces([Text.assemble(word, said, first), *rest])
    yield Pieces(_job(found), style=FAINT)
    yield from _start(answer)
    yield Text()
    if stated is not None:
        yield from _layout(stated, console, verbose, found.error, answer.flags if found.best else "")
    if answer.offers:
        yield from _offers(answer.offers)
    if found.best:
        yield from _why(found, console)
    if found.changes:
        yield from _changes(found, verbose)
    if answer.methods and found.best:
        yield from spaced(*cuts_table(answer.methods, found.best[0]))
    if len(found.front) > 1 and found.front[0].timed:
        yield from spaced(*front_table(found.front, console, SHOWN if not verbose else None))
    yield from spaced(
        *_search(found, verbose, one_of_several=bool(answer.offers)),
        *_notes(answer, stated, verbose),
        *written_lines(answer.written),
    )


def _start(answer: Answer) -> Iterator[RenderableType]:
    """What may surprise, where the search started, and what the plan as given would have run into."""
    yield from first_notes(notice for notice in answer.notes if not says_choice(notice.code))
    if answer.started:
        names = ",".join(one.split()[0] for one in answer.started)
        yield Text(
            f"Started from {', '.join(answer.started)}, which the search may change; --fix {names} keeps it.", FAINT
        )
    refused = answer.found.given_refused
    if refused is not None:
        yield Text(f"The plan as given does not run: {refused}", CAUTION)


def _offers(offers: Sequence[Offer]) -> Iterator[RenderableType]:
    """The best layout in each framework that has one, best first; then frameworks in which nothing fits, with what the
    closest layout needs. Those that do not train the model, or not on these GPUs, are left out."""
    ranked = sorted((offer for offer in offers if offer.refused is None), key=lambda offer: offer.rank)
    found = [(offer, one) for offer in ranked if (one := offer.best or offer.closest) is not None]
    bests = [one for _, one in found]
    if len(bests) < 2 or ranked[0].best is None:
        return
    unit, time = units(bests, bests[0])
    table = plain_table(
        left("framework"), folded("its best layout"), *map(right, (f"step {time.name}", f"peak {unit.name}")), folded()
    )
    for offer, best in found:
        other = f"{best.plan.precision.dtype} parameters only, none in fp32"
        caution = [*retry_marks(best), *([] if offer.keeps_fp32 else [Text(other, CAUTION)])]
        marks = Text(", ").join(caution) if offer.best is not None else Text(_too_little(best), BAD)
        layout = Pieces(layout_pieces(best))
        table.add_row(offer.framework, layout, time.figure(best.seconds), unit.figure(best.needs), marks)
    yield from titled("In each framework", table)


def _too_little(closest: Suggestion) -> str:
    """Of the closest layout, where a framework has none that fits."""
    return "does not fit" if not closest.fits else "not sure to fit"


def _stated(found: Found) -> Suggestion | None:
    """The layout that the report is about."""
    return found.best[0] if found.best else found.closest


def _pieces(found: Found, stated: Suggestion) -> list[str]:
    """The layout, and on how many GPUs where that was the question."""
    changed = [] if stated.point.keeps_numerics else ["changes the numerics"]
    return [*([gpus_words(stated.plan)] if found.objective == "gpus" else []), *layout_pieces(stated), *changed]


def _headline(found: Found) -> tuple[tuple[str, str], str]:
    """The verdict, and what stands between it and the layout."""
    if found.best:
        estimate = found.best[0].estimate
        if estimate is None or estimate.fits:
            return ("Recommended", f"bold {GOOD}"), ": "
        return ("Recommended, may fit", f"bold {CAUTION}"), ": "
    if found.closest is None:
        return ("Nothing fits", f"bold {BAD}"), ", and no layout runs"
    kept = f"with {found.keeps_free} kept free (--headroom 0 keeps nothing free), " if found.keeps_free else ""
    if found.closest.fits and not found.closest.is_safe:
        return ("Nothing is sure to fit", f"bold {CAUTION}"), f": {kept}the closest is "
    over = found.closest.needs - found.limit
    why = (
        f"{size(over)} too much on the closest{beside_training(found.closest.judged)}"
        if over > 0
        else f"the closest has too little for {_moments(found.closest)}"
    )
    why = (
        f"with {found.keeps_free} kept free (--headroom 0 keeps nothing free), {why}"
        if found.keeps_free and _is_almost(found)
        else why
    )
    return ("Nothing fits", f"bold {BAD}"), f": {why}, "


def _is_almost(found: Found) -> bool:
    """The closest layout is too large only because memory is kept free by default."""
    return found.closest is not None and found.capacity is not None and found.closest.needs <= found.capacity


def _moments(closest: Suggestion) -> str:
    """Moments in which a request fails: ``evaluation``."""
    return " and ".join(dict.fromkeys(failure.moment for failure in closest.judged.failures)) or "its tensors"


def _job(found: Found) -> list[str]:
    """What is given and kept: ``bigscience-104b-250k · megatron-deepspeed · 128 × v100-32gb · gbs 2048 · …``."""
    plan = found.base
    most = "up to " if found.objective == "gpus" else ""
    named = [plan.framework, *framework(plan.framework).described(plan)]
    parts = [plan.model.name, *named, f"{most}{plan.hardware.gpus or 1:,} × {plan.hardware.gpu}"]
    parts += [f"gbs {plan.batch.gbs}", f"seq {plan.batch.seq}", plan.precision.named, plan.optimizer.name]
    kept = f"{found.keeps_free} kept free" if found.keeps_free else f"headroom {plan.headroom}"
    parts += [kept] if plan.headroom != "0" else []
    parts += [{"time": "the fastest", "memory": "the least memory", "gpus": "the fewest GPUs"}[found.objective]]
    return [*parts, *(f"{_field_name(path)} {_short(value)} fixed" for path, value in found.fixed.items())]


def _field_name(path: str) -> str:
    fields = plan_fields()
    return fields[path].flag[2:] if path in fields else path


def _short(value: object) -> str:
    text = ",".join(map(str, value)) if isinstance(value, tuple) else shown(value)
    return text if len(text) <= 24 else f"{text[:23]}…"


# -- the recommended one -----------------------------------------------------------------------------------


def _layout(
    suggestion: Suggestion, console: Console, verbose: bool, error: float, flags: str
) -> Iterator[RenderableType]:
    estimate, step = suggestion.estimate, suggestion.step
    facts = Table.grid(left(style=FAINT), folded(ratio=1), padding=(0, 2, 0, 0))
    if step is not None and suggestion.timed:
        facts.add_row("step", _speed(suggestion, step, error))
        facts.add_row("time", _parts(suggestion, step))
        facts.add_row("costs", _costs(suggestion, step))
    if estimate is not None:
        facts.add_row("memory", verdict(estimate))
    beside = _on_each_node(estimate) if estimate is not None else []
    if beside:
        facts.add_row("node", Pieces(beside))
    if suggestion.cut and len(suggestion.cut) > 1:
        stages = f"on {len(suggestion.cut)} {stage_word(suggestion.plan)}s"
        facts.add_row("layers", f"{cut_words(suggestion.cut)} {stages}")
        field = framework(suggestion.plan.framework).cut_field(suggestion.plan, whole=verbose)
        if field:
            facts.add_row("cut", field)
    if flags:
        facts.add_row("flags", Breakable(flags))
    yield facts
    if estimate is None:
        return
    yield from spaced(
        *(stage_tables(estimate, console, folded=False) if verbose else compact_stages(estimate, console))
    )


def _on_each_node(estimate: Estimate) -> list[str]:
    """What a node's ranks take of it beside its devices."""
    takes = (
        (max(stage.host for stage in estimate.stages), "host memory"),
        (max(stage.nvme for stage in estimate.stages), "NVMe"),
    )
    return [f"{size(most)} of {name}" for most, name in takes if most]


def _speed(suggestion: Suggestion, step: StepTime, error: float) -> Pieces:
    rates = f"{rough(step.tokens_per_second)} tokens/s", f"{rough(step.tokens_per_second_per_gpu)} per GPU"
    time = Text(time_unit(suggestion.seconds).text(suggestion.seconds), "bold")
    whole, halved = part(step.mfu), part(step.mfu_halved)
    mfu = f"MFU {whole}" if whole == halved else f"MFU {whole} ({halved} with half of causal scores)"
    return Pieces([time, f"± {part(error)}", *rates, mfu])


def _parts(suggestion: Suggestion, step: StepTime) -> Pieces:
    """Shares of the step's time, the largest first."""
    experts = suggestion.plan.model.experts > 0
    times = {
        "compute": step.compute,
        "recompute": step.recompute,
        "exchanges in layers" if experts else "tensor parallel": step.tensor_parallel,
        "bubble": step.pipeline_bubble,
        "sends": step.pipeline_send,
        "data parallel": step.data_parallel,
        "optimizer": step.optimizer,
        "offload": step.offload,
    }
    shares = sorted(((time / step.total, name) for name, time in times.items()), reverse=True)
    return Pieces([f"{name} {part(share)}" for share, name in shares if share >= 0.005])


def _costs(suggestion: Suggestion, step: StepTime) -> Pieces:
    """GPU-hours of a step and of a billion tokens, and what they cost where a price is known."""
    plan = resolve(suggestion.plan)
    prices = cost_of_step(plan, step), cost_of_tokens(plan, step)
    figures = (plan.hardware.gpus or 1) * step.total / 3600, gpu_hours(suggestion, step)
    texts = [f"{rough(hours)} GPU-hours" for hours in figures]
    texts = [text if cost is None else f"{rough(cost)} ({text})" for text, cost in zip(texts, prices, strict=True)]
    price = [] if plan.hardware.price is None else [f"at {plan.hardware.price:g} for a GPU-hour"]
    return Pieces([f"{texts[0]} a step", f"{texts[1]} for a billion tokens", *price])


# -- why ----------------------------------------------------------------------------------------------------


def _why(found: Found, console: Console) -> Iterator[RenderableType]:
    best, *others = found.best
    if others or found.given is not None:
        yield from titled("Why this one", alternatives(found), *worth(found))
        yield from _passed_over(found)
    yield from _faster_with_retries(found)
    yield from _ends_retries(found)
    given = found.given
    if given is not None and not same_layout(given, best):
        fits = "" if given.fits else ", and does not fit"
        fits = f", and keeps less than {found.keeps_free} free" if found.given_keeps_too_little else fits
        yield Text(f"The plan as given is {comparison_words(given, best)}{fits}.")
    elif given is not None:
        yield Text("The recommended layout is the plan as given.")


def _ends_retries(found: Found) -> Iterator[RenderableType]:
    """That a setting of the allocator takes its retries from a layout, and how fast that is then."""
    after = found.ends_retries
    if after is None:
        return
    best = found.best[0]
    which = "The layout that needs retries"
    if best.judged.verdict is not Verdict.RETRIES and after.timed and best.timed and not same_layout(after, best):
        which += f", {speed_words(after.seconds, best.seconds)},"
    yield Text(
        f"{which} needs none with expandable segments (--env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True): "
        f"{size(after.needs)} on the device."
    )


def _passed_over(found: Found) -> Iterator[Text]:
    """Why layouts are not recommended that are faster, or as fast and need less."""
    best, *others = found.best
    if not best.timed or not best.point.keeps_numerics:
        return
    longest = (1 + found.within) * min(one.seconds for one in found.best if not one.judged.retries)
    better = [
        one
        for one in others
        if one.seconds < best.seconds or (one.seconds <= longest and one.needs < best.needs and one.is_safe)
    ]
    if any(not one.point.keeps_numerics for one in better):
        yield Text("A layout that changes the numerics is recommended only where no other layout fits.", FAINT)
    roomier = [one for one in better if one.point.keeps_numerics and one.needs < best.needs]
    if any(one.point.moved - best.point.moved for one in roomier):
        yield Text("Among equally fast layouts, those that offload more than the fastest are not recommended.", FAINT)


def _faster_with_retries(found: Found) -> Iterator[Text]:
    """That the fastest layout fits with retries alone, which no time counts."""
    best, *others = found.best
    retrying = [one for one in others if one.judged.verdict is Verdict.RETRIES and one.seconds < best.seconds]
    if not best.timed or best.judged.retries or not retrying:
        return
    one = min(retrying, key=lambda one: one.seconds)
    yield Text(
        f"{DOT.join(difference_pieces(one, best))} is {speed_words(one.seconds, best.seconds)} and runs, but "
        f"{retry_words(one.judged)}; predicted times do not include retries (0.04 to 0.15 s each on "
        f"an H100), so a layout without retries is recommended first."
    )


def _changes(found: Found, verbose: bool) -> Iterator[RenderableType]:
    stuck = found.closest if found.closest is not None else found.given
    if stuck is None:
        return
    yield Text()
    whose = "the closest layout" if found.closest is not None else "the plan as given, which does not fit"
    shown: Sequence[object] = found.changes if verbose else found.changes[:SHOWN]
    more = len(found.changes) - len(shown)
    yield Text.assemble((f"Single changes of {whose}", "bold"), (f" ({more} more with -v)" if more else "", FAINT))
    yield changes_table(stuck, found.changes[: len(shown)])


# -- how it was found -----------------------------------------------------------------------------------------


def _search(found: Found, verbose: bool, *, one_of_several: bool) -> Iterator[RenderableType]:
    counts, refused = found.counts, sum(found.counts.refused.values())
    where = f" of {found.base.framework}" if one_of_several else ""
    yield Text(
        f"Searched {counts.total:,} layouts{where} in {found.seconds:.2f} s: {refused:,} break a framework's rule, "
        f"{counts.too_large:,} are too large by a lower bound, {counts.slower:,} are slower or no smaller, "
        f"{counts.folded:,} were computed to the byte, {counts.replayed:,} of these were replayed in the allocator.",
        FAINT,
    )
    if verbose and counts.refused:
        rules = sorted(counts.refused.items(), key=lambda rule: (-rule[1], rule[0]))
        yield from titled("Excluded by a rule", entries([(f"{count:,}", rule) for rule, count in rules], FAINT))


def _notes(answer: Answer, stated: Suggestion | None, verbose: bool) -> Iterator[RenderableType]:
    estimate = stated.estimate if stated is not None else None
    first = {SEQ_DEFAULT, VOCAB_UNUSED}  # said above
    warnings = [notice for notice in answer.warnings(stated) if notice.code not in first]
    if warnings:
        yield from spaced(entries([(notice.code, notice.message) for notice in warnings], CAUTION))
    step = stated.step if stated is not None and stated.timed else None
    assumed = [*answer.assumptions, *(step.assumptions if step is not None else ())]
    assumed += estimate.assumptions if estimate is not None else ()
    if assumed and verbose:
        yield from titled("Assumed")
        for assumption in assumed:
            yield Padding(Text(assumption), (0, 0, 0, 2))
    elif assumed:
        times = "Times are computed from published figures, not measured"
        if stated is not None and not stated.timed:
            gpu = stated.plan.hardware.gpu
            what = "network adapters beside" if lacks_network(stated.plan, stated.point.gpus) else "the speed of"
            times = f"Nobody has published {what} {gpu}: layouts are ranked as on {STAND_IN}, without times"
        yield Text(f"{times}; {len(assumed)} assumptions with -v.", FAINT)
