"""Where a plan does not fit: the cheapest changes with which it does.

Changes are those of ``proposals``. Each is folded, which takes milliseconds; then, from the cheapest on, those whose
tensors fit are replayed, until enough of different kinds are found. Beside these, changes that cost little time for
what they gain are added up until they fit together. Where too few are found, others are tried on top of those that gain
most. What fits with retries alone is named where the plan itself does not run, and counts as something that costs more
than time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf

from ..device.measured import Measured, least_context
from ..estimate import judged_ends
from ..plan.checks import listed
from ..plan.errors import PlanError
from ..plan.fields import flags_of
from ..plan.implied import meant
from ..plan.plan import Plan, ResolvedPlan
from ..plan.resolve import resolve
from ..plan.sizes import headroom_bytes
from ..result import Estimate, Verdict, WayOut
from ..values import NamedTuple, replace
from .changes import proposals, stated
from .framework import Proposal
from .point import changed
from .result import Suggestion

WAYS = 3
"""That are named."""
TOGETHER = 3
"""Changes that are tried on top of one another; those that are added up may be more."""
MOST_REPLAYED = 16
"""Changes, of all rounds together: no bound tells before a replay what the allocator's cache adds to tensors that fit,
and of 173 plans that did not fit none had to replay more than eight to name one or two changes at a time."""
LAYERS = 6000
"""Layers that are folded, of all plans together, before no further changes are tried together: a second or two."""

LITTLE = 0.5
"""Less than this part of a step's time is little: full recompute, or half a micro-batch, not what passes the host."""
COSTS_BESIDE_TIME = 0.25
"""What a change of the training's numbers, of the GPUs or of their number, or each retry of an iteration counts as in
the order of the ways, in parts of a step's time: a rule of this list, which changes no figure. Those before the
allocator settles count as one."""
ANOTHER_JOB = 1.0
"""And other or more GPUs, or adapters that are trained in place of the weights."""

_OF_ANOTHER_JOB = ("hardware.", "lora.rank")
_GPU = "hardware.gpu"


class _Room(NamedTuple):
    """Bytes of a GPU that a plan may take."""

    whole: int
    tensors: int

    @classmethod
    def of(cls, plan: ResolvedPlan, known: Measured) -> _Room:
        capacity = plan.hardware.capacity or 0
        limit = capacity - headroom_bytes(plan.headroom, capacity)
        return cls(limit, limit - least_context(plan, known))


class _Tried:
    """A change, or several, folded."""

    __slots__ = ("after", "proposed", "room", "slower")

    def __init__(self, proposed: tuple[Proposal, ...], after: Suggestion, given: Suggestion, room: _Room) -> None:
        self.proposed, self.after, self.room = proposed, after, room
        self.slower = after.seconds / given.seconds - 1 if after.timed and given.timed else None

    @property
    def what(self) -> str:
        return listed([one.what for one in self.proposed], "and")

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(path for one in self.proposed for path in one.fields)

    @property
    def kind(self) -> frozenset[str]:
        """What tells one kind of change from another: more or less recompute are one, tp and pp are two."""
        return frozenset(path if path.startswith("layout.") else path.partition(".")[0] for path in self.paths)

    @property
    def costs_more(self) -> bool:
        """Than time."""
        return any(one.costs for one in self.proposed)

    @property
    def costs_little(self) -> bool:
        """Little time, and nothing else."""
        return not self.costs_more and (self.slower or 0.0) < LITTLE

    @property
    def degree(self) -> str:
        """Of a single change, what it does more or less of than others, if anything."""
        return self.proposed[0].degree_of

    @property
    def degrees(self) -> frozenset[str]:
        """Of several."""
        return frozenset(one.degree_of for one in self.proposed if one.degree_of)

    @property
    def is_replayed(self) -> bool:
        return self.after.fullest_judged is not None

    @property
    def fits(self) -> bool:
        """Without a retry, once it is replayed and as far as is known."""
        return self.is_replayed and self.after.is_safe and not self.retries

    @property
    def retries(self) -> int:
        return self.after.judged.retries

    def does_as_much(self, more: _Tried) -> bool:
        """``more`` changes what this does and something besides, which ends no retry."""
        names = {one.what for one in more.proposed}
        is_part = {one.what for one in self.proposed} < names
        return is_part and self.after.judged.retries_in_iteration <= more.after.judged.retries_in_iteration

    @property
    def may_fit(self) -> bool:
        """As far as is known."""
        return self.fits if self.is_replayed else self.after.requested <= self.room.tensors

    @property
    def on_another(self) -> bool:
        """On another GPU, which need not be less to fit."""
        return any(_GPU in one.fields for one in self.proposed)

    @property
    def price(self) -> tuple[float, int, int]:
        """Smaller is cheaper."""
        another = ANOTHER_JOB * any(
            path.startswith(_OF_ANOTHER_JOB) and path != "hardware.capacity" for path in self._bought
        )
        retries = max(self.after.judged.retries_in_iteration, min(1, self.retries))
        beside = COSTS_BESIDE_TIME * (sum(bool(one.costs) for one in self.proposed) + retries)
        slower = self.slower or 0.0
        return (max(slower, 0.0) if beside else slower) + beside + another, len(self.proposed), -self.after.requested

    @property
    def _bought(self) -> Iterator[str]:
        return (path for one in self.proposed if one.costs for path in one.fields)

    def way(self, given: Suggestion, *, named: bool) -> WayOut:
        """``named``: the plan names its framework; else a flag does, where these fields would mean another one."""
        fields = {path: value for one in self.proposed for path, value in one.fields.items()}
        framework = self.after.plan.framework
        always = {} if named or meant(self.after.plan) == framework else {"framework": framework}
        return WayOut(
            what=self.what,
            fields=tuple(fields.items()),
            flags=flags_of(given.plan, {**always, **fields}, always),
            judged=self.after.judged,
            gained=given.needs - self.after.needs,
            needs=self.after.needs,
            slower=self.slower,
            costs=", ".join(one.costs for one in self.proposed if one.costs),
        )


def ways_out(plan: Plan, estimate: Estimate, known: Measured, *, named: bool = True) -> tuple[WayOut, ...]:
    """For a ``plan`` whose ``estimate`` does not fit, is tight or needs retries: those that make it fit, the cheapest
    first; where none does, what gains most, and last another GPU on which it fits as it is. ``named``: the plan says
    its framework itself."""
    if estimate.capacity is None or not estimate.judged.verdict.is_short:
        return ()
    room = _Room.of(estimate.plan, known)
    try:
        given = replace(stated(plan), estimate=estimate)
        every = list(proposals(given, room.tensors))
    except PlanError:
        return ()
    changes = _Changes(given, every, room, known, is_stuck=estimate.judged.verdict is not Verdict.RETRIES)
    found: list[_Tried] = []
    folded = [one for proposal in every for one in changes.folded((proposal,))]
    single = tried = [one for one in folded if not one.on_another]
    folds = LAYERS // plan.model.layers - len(single)
    by_gain = [one.proposed[0] for one in sorted(single, key=_least)]
    by_gain += [one for one in every if one not in by_gain and _GPU not in one.fields]  # what needs another one to run
    most = {one.degree_of: one for one in reversed(by_gain)}
    by_gain = [one for one in by_gain if not one.degree_of or most[one.degree_of] is one]
    for together in range(1, TOGETHER + 1):
        found += map(changes.no_more_than_enough, changes.fitting(tried, found))
        if together == 1:
            found += changes.added_up(single, found)
        if len(found) >= WAYS or not changes.left or (found and together > 1):
            break
        kinds = {one.kind for one in found}
        enough = {one.what for one in (*found, *(other for other in folded if other.kind in kinds and other.may_fit))}
        others = [one for one in by_gain if one.what not in enough]
        starts = [one for one in tried if all(part in by_gain for part in one.proposed)]
        tried = list(islice(changes.on_top_of(starts, others), max(0, folds)))
        folds -= len(tried)
    whole = [one for one in folded if one.proposed[0] in by_gain]
    of_kind = {one.kind: one for one in sorted(whole, key=_least, reverse=True)}
    best = [one for one in sorted(of_kind.values(), key=_least)[:WAYS] if one.after.requested < given.requested]
    found = found or [one for one in best if changes.replay(one)]
    elsewhere = [*islice((one for one in folded if one.on_another and not found and changes.replay(one)), 1)]
    if found or changes.retrying:
        return tuple(one.way(given, named=named) for one in _cheapest(found or elsewhere, changes.retrying))
    for one in best:
        changes.replay(one, tells_tight=True)
    here = [one for one in sorted(best, key=lambda one: one.after.needs) if one.after.needs < given.needs]
    return tuple(one.way(given, named=named) for one in (*here[: WAYS - len(elsewhere)], *elsewhere))


def _cheapest(found: Sequence[_Tried], retrying: Sequence[_Tried]) -> list[_Tried]:
    """The cheapest of what was ``found`` to fit, and of what fits with retries: of that, changes of another kind that
    are single ones or cheaper than some of ``found``, and need fewer retries than a part of them. One of ``found`` is
    among them where there is one."""
    kinds, dearest = {one.kind for one in found}, max((one.price for one in found), default=(inf,))
    worth = [
        one
        for one in retrying
        if one.kind not in kinds
        and (len(one.proposed) == 1 or one.price < dearest)
        and not any(part.does_as_much(one) for part in retrying)
    ]
    others = {one.kind: one for one in reversed(worth)}
    best = sorted((*found, *others.values()), key=lambda one: one.price)[:WAYS]
    if found and all(one.retries for one in best):
        best[-1] = min(found, key=lambda one: one.price)
    return best


class _Changes:
    """Changes of a plan that does not fit: ``every`` one that is proposed of ``given``, which has ``room``."""

    def __init__(
        self, given: Suggestion, every: Sequence[Proposal], room: _Room, known: Measured, *, is_stuck: bool
    ) -> None:
        self.given, self.every, self.room, self.known = given, every, room, known
        self.is_stuck = is_stuck
        """It does not run as it is."""
        self._folded: dict[frozenset[str], list[_Tried]] = {}
        self.left = MOST_REPLAYED
        """How many more may be replayed."""
        self.retrying: list[_Tried] = []
        """What was found to fit with retries alone, where that is better than ``given``; the cheapest first."""

    def folded(self, together: tuple[Proposal, ...]) -> list[_Tried]:
        """What comes of them, if the framework runs them; on another GPU within its own memory."""
        key = frozenset(one.what for one in together)
        if key not in self._folded:
            plan = self.given.plan
            for one in together:
                plan = changed(plan, one.fields)
            try:
                after = stated(plan)
                room = self.room if plan.hardware == self.given.plan.hardware else _Room.of(resolve(plan), self.known)
                self._folded[key] = [_Tried(together, after, self.given, room)]
            except PlanError:
                self._folded[key] = []
        return self._folded[key]

    def fitting(self, tried: Sequence[_Tried], known: Sequence[_Tried]) -> list[_Tried]:
        """The cheapest that fit, of other kinds than one another and those that are ``known``."""
        found: list[_Tried] = []
        kinds, wanted = {one.kind for one in known}, WAYS - len(known)
        for one in sorted(tried, key=lambda one: one.price):
            if len(found) >= wanted or not self.left:
                break
            if one.after.requested <= one.room.tensors and one.kind not in kinds and self.tells_fit(one):
                found.append(one)
                kinds.add(one.kind)
        return found

    def added_up(self, single: Sequence[_Tried], enough: Sequence[_Tried]) -> list[_Tried]:
        """Changes that fit together, beside those that are ``enough`` alone: of what costs little time, and nothing
        else, that which gains most for it. Each further way, if too few are known, is without what gained most in the
        one before."""
        found: list[_Tried] = []
        worth = [one for one in single if one.costs_little and self._gain(one) > 0 and not one.may_fit]
        most = {one.degree: one for one in sorted(worth, key=self._gain)}
        worth = [one for one in worth if not one.degree or most[one.degree] is one]
        worth.sort(key=lambda one: (one.slower or 0.0) / self._gain(one))
        while len(worth) > 1 and self.left and (not found or len(found) + len(enough) < WAYS):
            together = self._together(worth)
            if together is None:
                break
            if together.kind not in {one.kind for one in (*found, *enough)}:
                found.append(together)
            parts = [one for one in worth if one.proposed[0] in together.proposed or one.degree in together.degrees]
            worth.remove(max(parts, key=self._gain))
        return found

    def _gain(self, one: _Tried) -> int:
        return self.given.requested - one.after.requested

    def _together(self, worth: Sequence[_Tried]) -> _Tried | None:
        """The first of ``worth`` until they fit, each in the place of what it clashes with; then no more of them than
        is enough, and none that the others can do without."""
        latest: _Tried | None = None
        for one in worth:
            before = () if latest is None else latest.proposed
            kept = [part for part in before if not _clash(one.proposed[0], (part,))]
            for tried in self.folded((*kept, *one.proposed)):
                if latest is None or tried.after.requested < latest.after.requested:
                    latest = tried
                    if latest.may_fit:
                        self.tells_fit(latest)
            if latest is not None and latest.fits:
                break
        if latest is None or not latest.fits:
            return None
        fewer = self.no_more_than_enough(self._without_others(latest, worth))
        less = self._without_others(self.no_more_than_enough(latest), worth)
        return min(fewer, less, key=lambda one: one.price)

    def _without_others(self, together: _Tried, worth: Sequence[_Tried]) -> _Tried:
        """Without those of ``worth`` that the others can do without, what gains least for its time first."""
        for one in reversed(worth):
            rest = tuple(part for part in together.proposed if part is not one.proposed[0])
            if len(rest) in (0, len(together.proposed)):  # it is alone, or not among them
                continue
            for tried in self.folded(rest):
                if tried.may_fit and self.tells_fit(tried):
                    together = tried
        return together

    def no_more_than_enough(self, one: _Tried) -> _Tried:
        """``one``, which fits, or a cheaper one with less of what it does."""
        parts = one.proposed
        others = [
            tried
            for at, part in enumerate(parts if len(parts) > 1 else ())
            for other in self.every
            if part.degree_of and other.degree_of == part.degree_of and other != part
            for tried in self.folded((*parts[:at], other, *parts[at + 1 :]))
            if tried.price < one.price and tried.may_fit
        ]
        return next(filter(self.tells_fit, sorted(others, key=lambda other: other.price)), one)

    def tells_fit(self, one: _Tried) -> bool:
        """``replay``, as long as any are left."""
        if one.is_replayed or not self.left:
            return one.fits
        self.left -= 1
        return self.replay(one)

    def replay(self, one: _Tried, *, tells_tight: bool = False) -> bool:
        """Whether its fullest stage and those at the ends fit without a retry, as far as is known; what they need is
        kept."""
        plan = resolve(one.after.plan)
        one.after = one.after.replayed(judged_ends(plan, one.after.fullest, self.known, tells_tight=tells_tight))
        if self.is_stuck and one.after.is_safe and one.retries and one not in self.retrying:
            self.retrying.append(one)
        return one.fits

    def on_top_of(self, tried: Sequence[_Tried], others: Sequence[Proposal]) -> Iterator[_Tried]:
        """``others`` beside the one of ``tried`` that gains most of those that do not fit, and beside that of them
        which costs time alone."""
        short = [one for one in tried if one.after.requested < self.given.requested and not one.may_fit]
        starts = [sorted(some, key=_least)[:1] for some in (short, [one for one in short if not one.costs_more])]
        begun: set[frozenset[str]] = set()
        for start in (one for some in starts for one in some):
            for other in others:
                together = (*start.proposed, other)
                names = frozenset(one.what for one in together)
                if _clash(other, start.proposed) or names in begun:
                    continue
                begun.add(names)
                yield from self.folded(together)


def _clash(proposal: Proposal, others: Sequence[Proposal]) -> bool:
    """It gives a field another value than one of ``others`` does, or does all or a part of what that does."""
    given = proposal.fields.items()
    return any(
        any(other.fields.get(path, value) != value for path, value in given)
        or given <= other.fields.items()
        or other.fields.items() <= given
        for other in others
    )


def _least(one: _Tried) -> tuple[int, tuple[float, int, int]]:
    return one.after.requested, one.price


__all__ = ["ways_out"]
