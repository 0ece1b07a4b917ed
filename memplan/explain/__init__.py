"""What ran out of memory: from a message or a log, with a plan or without; and a run's own snapshot beside a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..allocator.memory import printed
from ..device.gpus import GPUS
from ..device.measured import NOTHING, Measured, held_workspaces
from ..estimate import allocator_settings, estimate, evaluation_programs, kernel_programs, programs_of
from ..layers.module import Options
from ..layers.work import ITEMSIZE
from ..plan.count import parameters
from ..plan.errors import ABSENT, PlanError, wrong_at
from ..plan.plan import Plan, ResolvedPlan
from ..plan.resolve import resolve
from ..result import Estimate, Notice, WayOut
from ..search.ways_out import ways_out
from .causes import causes
from .clues import clues, guesses
from .compared import Compared, alone, compared
from .log import Reported, reports
from .message import OutOfMemory
from .requests import Candidate, Explanation, is_then, ranked, requests_of
from .snapshot import read_snapshot, reported
from .written import MOST_STAGES, snapshot_of


def explain(message: str | bytes | Iterable[bytes], plan: Plan | None = None, known: Measured = NOTHING) -> Explanation:
    """What the out-of-memory ``message`` was about: one line, a traceback, or a whole log, in pieces if it is large.

    With a ``plan`` it names the tensor that asked, what else was in memory then, and the smallest changes that end it.
    ``PlanError`` where there is no such message, or the plan contradicts itself.
    """
    pieces = [message.encode("utf-8", "replace")] if isinstance(message, str) else message
    return explained(reports([pieces] if isinstance(pieces, bytes) else pieces), plan, known)


def explained(
    found: tuple[Reported, ...], plan: Plan | None, known: Measured = NOTHING, *, named: bool = True
) -> Explanation:
    """What the messages of one log were about. ``named``: the plan says its framework itself."""
    if not found:
        raise PlanError(
            "",
            ABSENT,
            "has no out-of-memory message (CUDA out of memory, torch.OutOfMemoryError, NCCL's, HIP's, Killed)",
        )
    first = max(found, key=lambda one: (one.message.tried is not None, bool(one.frames)))
    told = clues(first.frames)
    ranks = tuple(sorted({one.rank for one in found if one.rank is not None}))
    made = Explanation(first, ranks, len(found), told, causes(first, told))
    if plan is None:
        return replace(made, guesses=guesses(first.message, told), wanted=_wanted(first, planned=False))
    return _with_plan(made, plan, known, named)


def _with_plan(made: Explanation, plan: Plan, known: Measured, named: bool) -> Explanation:
    base = _on_gpu_of(plan, made.reported.message)
    estimated = estimate(base, known)
    estimated = replace(estimated, ways_out=_ways_out(base, estimated, made, known, named))
    resolved = resolve(base)
    best, near = _candidates(made, resolved, estimated, known)
    return replace(
        made,
        causes=(
            *_far_apart(made, best),
            *made.causes,
            *_other_code(made, best),
            *_other_moment(made, best),
            *_other_gpu(resolved, made.reported.message),
            *_on_host(made.reported.message, estimated),
        ),
        plan=resolved,
        candidates=tuple(best),
        nearest=tuple(near),
        guesses=() if best else guesses(made.reported.message, made.clues, resolved.model),
        estimate=estimated,
        wanted=_wanted(made.reported, planned=True),
    )


def _ways_out(plan: Plan, estimated: Estimate, made: Explanation, known: Measured, named: bool) -> tuple[WayOut, ...]:
    """What ends it; also where the plan fits by its estimate, although the run died: then what needs as much less as
    the run had and asked for beyond the plan, or at least what it asked for."""
    message = made.reported.message
    if message.of_host or made.clues.phase in ("checkpoint", "loading"):
        return ()
    if estimated.fits is not True or message.request is None:
        return ways_out(plan, estimated, known, named=named)
    had = message.in_process or message.reserved or message.allocated or 0
    needs = max(stage.headline for stage in estimated.stages)
    short = max(had + message.request - needs, message.request)
    harder = plan.model_copy(update={"headroom": str(estimated.headroom + short)})
    return ways_out(harder, estimate(harder, known), known, named=named)


APART = 0.25
"""Parts of what the message says is allocated by which a plan of the same run may be off at that moment."""


def _far_apart(made: Explanation, best: list[Candidate]) -> Iterator[Notice]:
    """Where the plan has much more or less allocated when the tensor is asked for than the message says."""
    said = made.reported.message.allocated
    if said is None or not best:
        return
    least, most = best[0].allocated
    nearest = least if said < least else most if said > most else said
    if abs(nearest - said) <= APART * said:
        return
    larger, smaller = ("plan", "run") if nearest > said else ("run", "plan")
    more = (
        f"does the {larger} have a larger batch, sequence or model than the {smaller}, less recompute or sharding, or "
        f"{'no quantisation' if larger == 'plan' else 'more on its GPU'}?"
    )
    named = made.clues.about and is_then(best[0].phase, made.clues.phase or best[0].phase)
    so = "the size and the traceback name the tensor" if named else "the tensor is a guess by its size"
    yield Notice(
        "far-apart",
        f"the plan has {printed(nearest)} allocated at that moment, the message says {printed(said)}: the plan is not "
        f"this run ({more}); {so}, and the memory listed below is the plan's, not the run's",
    )


def _other_moment(made: Explanation, best: list[Candidate]) -> Iterator[Notice]:
    """Where the plan has the size, but not at the moment that the frames prove."""
    if best and made.clues.phase and not is_then(best[0].phase, made.clues.phase):
        yield Notice(
            "another-moment",
            f"the traceback is in {made.clues.phase}, where the plan makes no request of this size; it makes one in "
            f"{best[0].phase}",
        )


def _other_code(made: Explanation, best: list[Candidate]) -> Iterator[Notice]:
    """Where the traceback is about something that the plan has nowhere in this size: the run is another one."""
    about = next(iter(made.clues.about), None)
    if made.reported.message.tried is None or about is None or made.clues.phase == "checkpoint":
        return  # plans have no such moment
    if any(about.tensor.search(f"{one.modules[0]} {one.tensor} {one.category} {one.phase}") for one in best):
        return
    yield Notice(
        "not-in-the-plan",
        f"the traceback names {about.name}, but the plan has none of this size: does the plan have the run's "
        "optimizer, attention, batch and sequence?",
    )


def _other_gpu(plan: ResolvedPlan, message: OutOfMemory) -> Iterator[Notice]:
    """Where the message's GPU has another memory than the plan's."""
    has, said = plan.hardware.capacity, message.capacity
    if has is not None and said is not None and abs(has - said) > has // 16:
        yield Notice(
            "other-gpu",
            f"the GPU of the message has {printed(said)}, the plan's has {printed(has)}: name the run's GPU with --gpu",
        )


def _on_host(message: OutOfMemory, estimated: Estimate) -> Iterator[Notice]:
    """What the plan takes of the memory that ran out."""
    if not message.of_host or message.who == "shared":
        return
    plan = estimated.plan
    taken = max(stage.host for stage in estimated.stages)
    whole = parameters(plan.model) * ITEMSIZE[plan.precision.stored]
    ranks = min(plan.hardware.gpus_per_node, plan.hardware.gpus)
    offloads = f"offloads states that take {printed(taken)} of a node's memory" if taken else "offloads nothing"
    yield Notice(
        "host-estimate",
        f"the plan {offloads}; while loading, a process that reads all parameters in {plan.precision.stored} takes "
        f"{printed(whole)}, {ranks} of a node {printed(ranks * whole)} if each does; code, data and file caches come "
        "on top",
    )


def _candidates(
    made: Explanation, plan: ResolvedPlan, estimated: Estimate, known: Measured
) -> tuple[list[Candidate], list[Candidate]]:
    programs = kernel_programs(plan)
    evaluated = evaluation_programs(plan, programs_of(plan, Options()))
    rank = made.reported.rank
    found = requests_of(
        programs, evaluated, allocator_settings(plan), held_workspaces(plan, known), plan.precision.dtype, rank
    )
    return ranked(found, made.reported, made.clues, estimated.failures)


def _on_gpu_of(plan: Plan, message: OutOfMemory) -> Plan:
    """``plan`` on the GPU that the message names by its memory, where it names none itself."""
    if plan.hardware.gpu is not None or plan.hardware.capacity is not None or message.capacity is None:
        return plan
    apart = {name: abs(gpu.process_bytes - message.capacity) for name, gpu in GPUS.items()}
    nearest = min(apart, key=apart.__getitem__)  # of those of one size the first, which the others are variants of
    change = {"gpu": nearest} if apart[nearest] < 1 << 27 else {"capacity": message.capacity}
    return plan.model_copy(update={"hardware": plan.hardware.model_copy(update=change)})


def compare_snapshot(
    data: bytes, plan: Plan | None = None, stage: int | None = None, known: Measured = NOTHING
) -> tuple[Compared, Explanation | None]:
    """A run's memory snapshot (its bytes) beside ``plan``, or beside one ``stage`` of it: of the device that held most;
    and what failed in it, if anything has. Nothing in ``data`` is executed or imported."""
    run = max(read_snapshot(data), key=lambda one: (bool(one.failed), one.peak))
    failed = reported(run)
    explanation = explained((failed,), plan, known) if failed is not None else None
    if plan is None:
        return alone(run), explanation
    resolved = resolve(plan)
    programs = kernel_programs(resolved)
    if stage is not None and not 0 <= stage < len(programs):
        raise wrong_at("--stage", f"{stage} must be a stage from 0 to {len(programs) - 1}")
    workspaces = held_workspaces(resolved, known)
    return compared(run, programs, allocator_settings(resolved), workspaces, stage), explanation


def written_snapshot(plan: ResolvedPlan, known: Measured = NOTHING) -> bytes:
    """The plan's stages in the format of PyTorch's memory viewer, each as a device."""
    programs = kernel_programs(plan)
    if len(programs) > MOST_STAGES:
        step = (len(programs) - 1) / (MOST_STAGES - 1)
        programs = tuple(programs[round(at * step)] for at in range(MOST_STAGES))
    return snapshot_of(programs, allocator_settings(plan), held_workspaces(plan, known))


def _wanted(reported: Reported, *, planned: bool) -> tuple[str, ...]:
    """What would tell more."""
    wanted = []
    if not planned:
        wanted.append("a plan or launch file names the tensor: memplan explain LOG plan.yaml, or --from FORMAT FILE")
    if reported.message.of_host:
        return () if planned else ("with a plan or launch file: what it takes of the host's memory",)
    if not reported.frames:
        wanted.append("the traceback above the message says which line asked")
    if reported.message.tried is not None and reported.message.allocated is None:
        wanted.append("the whole message says what was allocated, reserved and free")
    return tuple(wanted)


__all__ = ["Candidate", "Explanation", "compare_snapshot", "explain", "explained", "written_snapshot"]
