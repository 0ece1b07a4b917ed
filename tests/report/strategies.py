"""Any estimate at all, for properties of the report."""

from __future__ import annotations

from hypothesis import strategies as st

from memplan.result import BeyondAllocated, Estimate, Notice, Peak, StageEstimate
from memplan.tape.events import Category

from .fabricated import PLAN, judged_by_size

sizes = st.one_of(st.just(0), st.integers(0, 2**20), st.integers(0, 2**40))
words = st.text(alphabet="abcdefgh_ []/é−", min_size=1, max_size=30).filter(str.strip)
modules = st.one_of(
    st.sampled_from(["embedding", "head", "final_norm", "float16_to_fp32"]),
    st.integers(0, 999).map(lambda number: f"layer.{number}"),
)
peaks = st.builds(
    Peak,
    moment=st.just("steady"),
    phase=st.sampled_from(["forward", "backward", "step"]),
    module=modules,
    tensor=st.one_of(st.just(""), words),
    microbatch=st.one_of(st.none(), st.integers(0, 4096)),
    upper_bound=st.booleans(),
)


@st.composite
def stages(draw: st.DrawFn, number: int) -> StageEstimate:
    """A stage whose readings add up, some of them not known."""
    breakdown = tuple(draw(sizes) for _ in Category)
    known = draw(st.sampled_from(["device", "reserved", "allocated", "requested"]))
    cache, context, nccl, other = (draw(sizes) for _ in range(4))
    allocated = sum(breakdown) if known != "requested" else None
    reserved = sum(breakdown) + cache if known in ("reserved", "device") else None
    device = sum(breakdown) + cache + context + nccl + other if known == "device" else None
    first = draw(st.integers(0, 20_000))
    return StageEstimate(
        stage=number,
        ranks=tuple(first + step * draw(st.sampled_from([1, 1, 8])) for step in range(draw(st.integers(1, 5)))),
        modules=tuple(draw(st.lists(modules, min_size=1, max_size=6))),
        parameters=draw(sizes),
        requested=sum(breakdown),
        allocated=allocated,
        reserved=reserved,
        device=device,
        static=draw(sizes),
        peak=draw(peaks),
        breakdown=breakdown,
        beyond=BeyondAllocated(
            cache if reserved is not None else None,
            context if device is not None else None,
            nccl if device is not None else None,
            other if device is not None else None,
        ),
        moments={"steady": sum(breakdown), "initialisation": draw(st.one_of(st.none(), sizes))},
        in_flight=draw(st.integers(1, 64)),
    )


@st.composite
def estimates(draw: st.DrawFn) -> Estimate:
    """An estimate of one to six stages, with or without a GPU to fit into."""
    capacity = draw(st.one_of(st.none(), st.integers(1, 2**40)))
    headroom = draw(st.integers(0, capacity)) if capacity else 0
    built = tuple(draw(stages(number)) for number in range(draw(st.integers(1, 6))))
    estimate = Estimate(
        plan=PLAN,
        capacity=capacity,
        headroom=headroom,
        stages=built,
        warnings=tuple(draw(st.lists(st.builds(Notice, words, words), max_size=2))),
        assumptions=tuple(draw(st.lists(words, max_size=5))),
    )
    return judged_by_size(estimate)
