"""What is recommended leaves memory free and needs no retry: jobs at random, of every size."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest

from memplan.device.gpus import GPUS
from memplan.device.measured import NOTHING
from memplan.estimate import estimate, judged_ends, judged_stages
from memplan.plan.errors import PlanError
from memplan.plan.library import model_specs
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.report.suggestion_words import difference_pieces
from memplan.result import Judged, Verdict
from memplan.search.answer import Sought, suggest
from memplan.search.changes import measured
from memplan.search.point import changed
from memplan.search.result import Found
from memplan.search.space import space_of
from memplan.search.time.hardware import SPEEDS
from memplan.verdict import Replays

FRAMEWORKS = ("fsdp", "deepspeed", "megatron", "ddp", "single", "megatron-deepspeed")


def job(random: Random) -> dict[str, str]:
    name = random.choice(FRAMEWORKS)
    gpus = 1 if name == "single" else 1 << random.randrange(11)
    batch = max(gpus, 1 << random.randrange(3, 9)) * random.choice((1, 2))
    return {
        "model": random.choice(list(model_specs())),
        "framework": name,
        "gpu": random.choice(list(SPEEDS)),
        "gpus": str(gpus),
        "gbs": str(batch),
        "seq": str(random.choice((512, 1024, 2048))),
        "dtype": random.choice(("bf16", "fp16")),
    }


def recommended(seed: int) -> bool:
    """Whether something was, which then leaves the reserve on every stage; jobs that no framework runs are passed
    over."""
    try:
        found = suggest(read_plan(None, job(Random(seed))).plan, {}, top=2)
    except PlanError:
        return False
    if not found.best:
        return False
    best, *others = found.best
    assert best.estimate is not None
    assert best.judged.verdict in (Verdict.FITS, Verdict.RETRIES, Verdict.UNKNOWN)
    if best.judged.retries:
        assert all(one.judged.retries for one in others if one.point.keeps_numerics)
        return True
    capacity = GPUS[best.estimate.plan.hardware.gpu or ""].process_bytes
    for stage in best.estimate.stages:
        most = stage.reserved if stage.device_range is None else stage.device_range[1]
        assert most is not None
        assert capacity - most >= max(2**30, int(capacity * 0.02)), best.estimate.plan
    alike = [one for one in found.best if one.point.keeps_numerics == best.point.keeps_numerics]
    fastest = min(one.seconds for one in alike if not one.judged.retries)
    assert best.seconds <= fastest * (1 + found.within)
    check_most_room(found)
    return True


def check_most_room(found: Found) -> None:
    """Of all layouts that are shown, none that counts as equally fast and keeps as much on the GPU as the fastest needs
    less than the recommended one, by what a recommendation keeps free: for less nobody changes."""
    best = found.best[0]
    alike = [one for one in found.best if one.point.keeps_numerics == best.point.keeps_numerics]
    fastest = min((one for one in alike if not one.judged.retries), key=lambda one: one.seconds)
    for one in alike:
        if one.seconds <= fastest.seconds * (1 + found.within) and one.is_safe and not one.judged.retries:
            moved = {path for extra in one.point.extras if extra.moves_states for path, _ in extra.fields}
            kept = {path for extra in fastest.point.extras if extra.moves_states for path, _ in extra.fields}
            assert moved - kept or one.needs > best.needs - found.gain, one.point
    assert best.point == fastest.point or best.needs <= fastest.needs - found.gain


def test_of_layouts_as_fast_that_offload_the_roomiest_is_recommended() -> None:
    """8 layers of Llama 3 under ZeRO-3 on 2 A10, with memory for nothing but offload: parameters and states on the CPU
    with mbs 2 are 2 % faster than states alone with mbs 1, which needs 5.6 GiB less."""
    job = {"model": "llama-3-8b", "layers": "8", "framework": "deepspeed", "gpu": "a10", "gpus": "2", "gbs": "16"}
    fixed = {"layout.zero": 3, "recompute.mode": "full", "loss.kind": "plain"}
    plan = read_plan(None, {**job, "seq": "4096", "zero": "3", "recompute": "full"}).plan
    found = suggest(plan, fixed)
    best, *others = found.best
    assert [extra.label for extra in best.point.extras] == ["optimizer on the CPU"]
    (fastest,) = (one for one in others if one.seconds < best.seconds)
    assert [extra.label for extra in fastest.point.extras] == ["optimizer and parameters on the CPU"]
    assert fastest.seconds < best.seconds <= fastest.seconds * (1 + found.within)
    assert estimate(best.plan).peak < estimate(fastest.plan).peak
    assert difference_pieces(fastest, best) == ["mbs 2", "optimizer and parameters on the CPU"]
    assert difference_pieces(best, fastest) == ["mbs 1", "optimizer on the CPU"]
    check_most_room(found)


SMALL = {"model": "llama-3.2-1b", "layers": "4", "gpu": "h100", "seq": "1024"}


def test_parameters_stay_gathered_where_gathering_takes_long() -> None:
    """Over 10 GB/s a layer takes longer to gather than to compute. Four layers of 60.8 million parameters are gathered
    twice and scattered once, embedding and head, which share 263 million, once each: kept until backward, 2 x 243 +
    2 x 263 million are sent in place of 3 x 243 + 2 x 263, at most 24 % less time. All GPUs are kept to one group of
    shards: two, which gather inside a node, are as fast. A plan that keeps parameters begins the same search, and one
    that fixes it keeps it."""
    job = {**SMALL, "framework": "fsdp", "gpus": "16", "network": "10", "gbs": "16"}
    one = {"fsdp.replicas": 1}
    best = suggest(read_plan(None, job).plan, one, top=1).best[0]
    assert not best.plan.fsdp.reshard_after_forward
    again = changed(best.plan, {"fsdp.reshard_after_forward": True})
    assert 1.1 < measured(again).seconds / best.seconds < 1.24
    assert estimate(best.plan).peak == best.device
    kept = read_plan(None, {**job, "reshard-after-forward": "false"}).plan
    assert suggest(kept, one, top=1).best[0].plan == best.plan
    fixed = suggest(read_plan(None, job).plan, {"fsdp.reshard_after_forward": True}, top=1).best[0]
    assert fixed.plan.fsdp.reshard_after_forward


@pytest.mark.parametrize(
    ("framework", "flags", "extra"),
    [
        ("fsdp", {"fsdp-offload": "true"}, "CPU offload"),
        (
            "deepspeed",
            {"zero": "3", "offload-optimizer": "cpu", "offload-param": "cpu"},
            "optimizer and parameters on the CPU",
        ),
    ],
)
def test_offload_is_where_a_search_starts(framework: str, flags: dict[str, str], extra: str) -> None:
    """A plan that keeps states on the CPU, though a GPU has room for them, is where a search starts: the answer is that
    of the plan without, and the plan as it was given is called by what it has. What is fixed stays."""
    job = {**SMALL, "framework": framework, "gpus": "2", "dp": "2", "gbs": "4"}
    plan = read_plan(None, {**job, **flags}).plan
    found = suggest(plan, {}, top=1)
    without = suggest(read_plan(None, job).plan, {}, top=1)
    assert found.given is not None
    assert [one.label for one in found.given.point.extras] == [extra]
    assert found.best[0].seconds == without.best[0].seconds < found.given.seconds / 2
    assert found.best[0].needs == without.best[0].needs
    section = "fsdp.offload" if framework == "fsdp" else "deepspeed.offload_optimizer"
    kept = suggest(plan, {section: plan.at(section)}, top=1)
    assert kept.best[0].plan.at(section) == plan.at(section)


def test_what_is_faster_but_for_retries_stays_in_a_short_list() -> None:
    """Of Qwen 2.5 7B on 8 H100, the roomiest of what is as fast is none of those that are shown: it stands before
    them, and leaves the last, which would be faster, in its place."""
    job = {"model": "qwen2.5-7b", "framework": "fsdp", "gpu": "h100", "gpus": "8", "gbs": "64", "seq": "2048"}
    found = suggest(read_plan(None, job).plan, {}, top=4)
    *others, last = found.best
    assert len(others) == 3
    assert all(not one.judged.retries for one in others)
    assert last.judged.verdict is Verdict.RETRIES
    assert last.seconds < min(one.seconds for one in others)
    assert found.ends_retries is not None


def test_a_mask_that_no_kernel_reads_is_left_out() -> None:
    """Llama 3 8B with 32,768 tokens under Megatron-Core: 1 GiB on the first stage, for no time; ``--fix`` keeps it. One
    of 2,048 tokens takes 4 MiB, for which no flag is named; Megatron's own attention reads it."""
    job = {"model": "llama-3-8b", "framework": "megatron", "gpu": "h100", "gpus": "8", "gbs": "16"}
    fixed = {"layout.tp": 8, "layout.pp": 1, "layout.cp": 1, "layout.vpp": 1}
    plan = read_plan(None, {**job, "tp": "8", "seq": "32768"}).plan
    without, kept = (
        suggest(plan, {**fixed, **more}, top=1).best[0]
        for more in ({}, {"megatron.attention_mask_in_dataloader": True})
    )
    assert [one.plan.megatron.attention_mask_in_dataloader for one in (without, kept)] == [False, True]
    assert without.seconds == kept.seconds
    assert 1 << 30 <= kept.needs - without.needs < 3 << 30
    for other in ({"seq": "2048"}, {"seq": "8192", "attention": "eager", "transformer-impl": "local"}):
        found = suggest(read_plan(None, {**job, "tp": "8", **other}).plan, fixed, top=1)
        assert all(one.plan.megatron.attention_mask_in_dataloader for one in (*found.best, found.closest) if one)


def test_peaks_are_of_the_moment_that_needs_most() -> None:
    """Evaluation of 64 sequences holds logits of all of them; each layout's own estimate says as much."""
    job = {"model": "gpt2", "framework": "ddp", "gpu": "a100-40gb", "gpus": "2", "gbs": "16", "seq": "512"}
    found = suggest(read_plan(None, {**job, "trainer": "transformers", "eval-mbs": "64"}).plan, {})
    assert len(found.best) > 1
    for one in found.best:
        whole = estimate(one.plan)
        moment, more = whole.worst
        assert moment == "evaluation"
        assert one.needs == whole.peak + more > whole.peak == one.reading


def test_every_recommendation_leaves_the_reserve() -> None:
    assert sum(recommended(seed) for seed in range(9)) > 2


@pytest.mark.slow
@pytest.mark.parametrize("first", range(8))
def test_every_recommendation_of_many_leaves_the_reserve(first: int) -> None:
    assert sum(recommended(seed) for seed in range(1000 + first, 1400, 8)) > 10


def test_where_bounds_leave_no_layout_the_closest_is_named() -> None:
    """It is no rule that refuses them: the answer was that no layout runs."""
    plan = read_plan(None, {"model": "llama-3-8b", "framework": "megatron", "gpu": "rtx-4090", "gbs": "32"}).plan
    found = suggest(plan, {})
    assert not found.best
    assert found.counts.too_large == found.counts.considered
    assert found.closest is not None
    assert found.closest.judged.verdict.fits is False


@pytest.mark.parametrize("framework", ["fsdp", "deepspeed"])
def test_a_fused_loss_is_searched_where_models_are_sharded(framework: str) -> None:
    """Logits of 8,192 tokens and 128,256 words take 3.9 GiB in fp32, which leave room for no larger micro-batch: the
    answer is no slower than that of the same job with Liger's loss from the start."""
    job = {"model": "llama-3-8b", "framework": framework, "gpu": "h100", "gpus": "8", "gbs": "64", "seq": "8192"}
    found = suggest(read_plan(None, job).plan, {}, top=1)
    other = suggest(read_plan(None, {**job, "loss": "liger"}).plan, {}, top=1)
    assert [extra.label for extra in found.best[0].point.extras] == ["Liger's fused loss"]
    assert found.best[0].seconds == other.best[0].seconds
    assert found.best[0].needs == other.best[0].needs


def test_stages_that_were_replayed_are_those_of_a_whole_estimate() -> None:
    """A search replays the ends of a layout before it replays the rest."""
    flags = {
        "model": "llama-3-8b",
        "framework": "megatron",
        "gpu": "h100-80gb",
        "gpus": "8",
        "gbs": "32",
        "seq": "1024",
    }
    plan = read_plan(None, {**flags, "tp": "2", "pp": "4", "vpp": "2"}).plan
    replays = Replays()
    device = judged_ends(resolve(plan), 0, replays=replays).device
    assert len(replays.endless) == 2
    whole = estimate(plan, replays=replays)
    assert len(replays.endless) == 4
    assert whole == estimate(plan)
    assert device == max(whole.stages[stage].device or 0 for stage in (0, 3))


def test_stages_that_do_the_same_in_two_layouts_are_replayed_once() -> None:
    """The kernel of the loss runs on the last stage alone: of the three others a second layout with another kernel
    needs no replay, within the device's memory neither; of the last it does, as of any stage with other sequences."""
    flags = {"model": "llama-3-8b", "framework": "megatron", "gpu": "h100-80gb", "gpus": "4", "pp": "4", "gbs": "32"}
    flags["capacity"] = "36GiB"
    replays, counts = Replays(), []
    for number, more in enumerate(({"seq": "2048"}, {"seq": "2048", "cross-entropy-fusion": "te"}, {"seq": "4096"})):
        plan = resolve(read_plan(None, flags | more).plan)
        found = list(judged_stages(plan, range(4), replays=replace(replays, plan=number)))
        assert found == list(judged_stages(plan, range(4)))
        counts.append((len(replays.endless), len(replays.within)))
    assert counts == [(4, 4), (5, 5), (9, 9)]


@pytest.mark.parametrize(
    ("conf", "steady_at"),
    [("", {True, False}), ("expandable_segments:True", {True, False}), ("max_split_size_mb:64", {True})],
)
def test_what_reserves_more_than_there_is_retries_or_fails(conf: str, steady_at: set[bool]) -> None:
    """Around the edge, in steps of 16 MiB: the verdict that leaves retries out says that a stage fits exactly where
    the replay within the device's memory needs none. With ``max_split_size_mb`` the allocator gives large blocks back
    before it counts a retry."""
    flags = {"model": "gpt2", "framework": "single", "gpu": "h100-80gb", "mbs": "1", "gbs": "2", "seq": "512"}
    plan = resolve(read_plan(None, flags | {"headroom": "0"}).plan)
    plan = plan.model_copy(update={"environment": {"PYTORCH_CUDA_ALLOC_CONF": conf} if conf else {}})
    (whole,) = estimate(plan).stages
    assert whole.device_range is not None
    seen = set()
    for more in range(-5, 3):
        hardware = plan.hardware.model_copy(update={"capacity": whole.device_range[1] + more * 2**24})
        there = plan.model_copy(update={"hardware": hardware})
        kept = Replays()
        told, untold = (
            next(judged_stages(there, (0,), tells_retries=tells, replays=kept)).judged for tells in (True, False)
        )
        assert estimate(there, replays=kept) == estimate(there)
        steady = told.verdict in (Verdict.FITS, Verdict.UNKNOWN) and not told.retries
        assert (untold.verdict in (Verdict.FITS, Verdict.UNKNOWN) and not untold.retries) == steady
        seen.add(steady)
    assert seen == steady_at


def test_a_fastest_layout_that_fails_between_its_ends_is_left_out() -> None:
    """Ends rule layouts out before all stages are replayed; the fastest one of which a stage between them does not fit
    is no answer, nor an alternative."""
    flags = {"model": "llama-3-8b", "framework": "megatron", "gpu": "h100-80gb", "gpus": "8", "gbs": "32"}
    fixed = {"layout.tp": 1, "layout.cp": 1, "layout.pp": 4, "batch.seq": 8192}
    sought = Sought(
        read_plan(None, {**flags, "seq": "8192"}).plan, fixed, "time", 4, lambda what, done, of: None, NOTHING
    )
    search = sought._search_of(sought._space)
    first, second, *_ = search.fastest(4)
    whole = replace(search.estimated(first), estimate=None, fullest_judged=Judged(Verdict.DOES_NOT_FIT))
    search._wholes[first.point, first.cut] = whole
    best = sought._fastest(search, 4, inf)
    assert search.is_refuted(first)
    assert (first.point, first.cut) not in [(one.point, one.cut) for one in best]
    assert second.point in [one.point for one in best]
    assert best[0].estimate is not None
    assert best[0].is_safe


def test_a_cut_that_is_too_large_with_what_lies_outside_is_cut_once_more() -> None:
    """Phi 4 on 4 H100, whose tensors fit in the first cut that is looked for, and CUDA and NCCL not beside them: 19 and
    21 layers fit, written by hand, and take 14 % less than any recompute of the same layout."""
    job = {"model": "phi-4", "framework": "megatron", "gpu": "h100", "gpus": "4", "gbs": "32", "seq": "4096"}
    job |= {"tp": "2", "pp": "2", "mbs": "1", "cross-entropy-fusion": "te", "headroom": "2%"}
    by_hand = read_plan(None, {**job, "sequence-parallel": "true", "pipeline-layout": "Et*19|t*21L"}).plan
    found = measured(by_hand, NOTHING)
    assert found.judged.verdict is Verdict.FITS
    fixed = {"layout.tp": 2, "layout.pp": 2, "layout.vpp": 1, "batch.mbs": 1, "megatron.cross_entropy_fusion": "te"}
    best, *_ = suggest(read_plan(None, job).plan, fixed).best
    assert best.judged.verdict is Verdict.FITS
    assert best.seconds <= found.seconds
    assert best.needs <= found.needs


def test_of_dense_layers_the_mlp_is_recomputed() -> None:
    """Beside flash attention, which stores no scores, recompute of the attention's core saves nothing; that of scores
    is tried where they are stored."""
    job = {"model": "llama-3-8b", "framework": "megatron", "gpu": "h100", "gpus": "8", "gbs": "64", "seq": "4096"}

    def tried(**more: str) -> list[tuple[str, ...]]:
        space = space_of(plan := read_plan(None, {**job, **more}).plan, resolve(plan), {})
        return [one.modules for one in space.recompute if one.mode == "selective"]

    assert tried() == [("mlp",)]
    assert tried(attention="eager") == [("core_attn",), ("core_attn", "mlp")]
