"""Every candidate's peak against that of ``estimate`` for the plan that would be written, framework by framework."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from memplan.estimate import estimate
from memplan.frameworks import ROOMS
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.plan.write import plan_yaml
from memplan.search.candidates import Clock
from memplan.search.changes import point_of
from memplan.search.search import Candidate, Search
from memplan.search.space import filled, space_of

from .at_random import at_random

Flags = dict[str, str]

TINY = {"layers": "5", "hidden": "256", "ffn": "512", "heads": "4", "kv-heads": "4", "head-dim": "64", "seq": "256"}
ODD = {"layers": "3", "hidden": "192", "ffn": "520", "heads": "6", "kv-heads": "2", "head-dim": "32", "seq": "190"}
LLAMA = {**TINY, "model": "llama-2-7b", "vocab": "32000", "dtype": "bf16"}
GPT2 = {**TINY, "model": "gpt2", "dtype": "fp16"}
QWEN = {**ODD, "model": "qwen3-8b", "vocab": "5003", "dtype": "bf16"}
NEOX = {**TINY, "model": "gpt-neox-20b", "vocab": "9001", "dtype": "bf16", "attention": "eager"}
BERT = {**TINY, "model": "bert-large", "vocab": "7000", "dtype": "fp32"}
GEMMA = {**ODD, "model": "gemma-2-9b", "vocab": "12000", "dtype": "bf16", "attention": "eager"}
TITAN = {"fsdp-code": "torchtitan"}

JOBS: dict[str, tuple[Flags, ...]] = {
    "single": (
        {**LLAMA, "gbs": "64"},
        {**GPT2, "gbs": "96", "autocast": "true"},
        {**QWEN, "gbs": "60", "optimizer": "adafactor"},
        {**NEOX, "gbs": "128", "optimizer": "sgd"},
        {**BERT, "gbs": "64"},
        {**GEMMA, "gbs": "36"},
        {**LLAMA, "gbs": "720", "trainer": "transformers"},
        {**LLAMA, "gbs": "5040", "lora-rank": "8"},
        {**GPT2, "gbs": "5040", "vocab": "15000"},
        {**LLAMA, "gbs": "5040", "optimizer": "lion"},
        {**QWEN, "gbs": "5040"},
        {**LLAMA, "gbs": "5040", "dtype": "fp32"},
    ),
    "ddp": (
        {**LLAMA, "gpus": "4", "gbs": "64"},
        {**GPT2, "gpus": "8", "gbs": "960", "gradient-as-bucket-view": "true"},
        {**QWEN, "gpus": "3", "gbs": "180", "static-graph": "true"},
        {**LLAMA, "gpus": "4", "gbs": "1440", "gradient-as-bucket-view": "true", "ddp-gradient-sync": "false"},
        {**NEOX, "gpus": "2", "gbs": "720", "bucket-cap-mb": "3"},
        {**BERT, "gpus": "4", "gbs": "2880"},
        {**QWEN, "gpus": "6", "gbs": "4320", "parameters-as-bucket-view": "true", "zero": "1"},
        {**LLAMA, "gpus": "16", "gbs": "5760", "optimizer": "sgd"},
        {**GEMMA, "gpus": "2", "gbs": "1440"},
    ),
    "device-map": (
        {**LLAMA, "gpus": "2", "gbs": "720"},
        {**GPT2, "gpus": "3", "gbs": "720"},
        {**LLAMA, "gpus": "4", "gbs": "5040", "layers": "9"},
        {**GPT2, "gpus": "4", "gbs": "5040", "layers": "8", "autocast": "true"},
        {**QWEN, "gpus": "2", "gbs": "5040", "layers": "6"},
        {**LLAMA, "gpus": "5", "gbs": "5040", "layers": "7", "optimizer": "sgd"},
        {**NEOX, "gpus": "3", "gbs": "5040", "layers": "6"},
        {**GPT2, "gpus": "2", "gbs": "5040", "optimizer": "adafactor"},
    ),
    "megatron": (
        {**LLAMA, "gpus": "8", "gbs": "16"},
        {**LLAMA, "gpus": "16", "gbs": "24", "layers": "9", "gpus-per-node": "4"},
        {**GPT2, "gpus": "8", "gbs": "16", "layers": "6"},
        {**QWEN, "gpus": "4", "gbs": "12", "layers": "6"},
    ),
    "megatron-deepspeed": (
        {**GPT2, "gpus": "8", "gbs": "48"},
        {**GPT2, "gpus": "16", "gbs": "96", "layers": "8", "dtype": "bf16"},
        {**GPT2, "gpus": "4", "gbs": "60", "layers": "7", "optimizer": "adam8bit"},
        {**GPT2, "gpus": "12", "gbs": "144", "layers": "10", "dtype": "bf16", "gradients": "fp32"},
    ),
    "deepspeed": (
        {**LLAMA, "gpus": "4", "gbs": "48"},
        {**GPT2, "gpus": "8", "gbs": "96"},
        {**QWEN, "gpus": "3", "gbs": "180", "grad-accum-dtype": "fp32"},
        {**LLAMA, "gpus": "4", "gbs": "240", "reduce-bucket-size": "100000", "param-groups": "decay"},
        {**NEOX, "gpus": "2", "gbs": "120"},
        {**BERT, "gpus": "4", "gbs": "144", "dtype": "fp16"},
        {**LLAMA, "gpus": "16", "gbs": "960", "optimizer": "lion"},
        {**GEMMA, "gpus": "2", "gbs": "96", "overlap-comm": "true"},
        {**GPT2, "gpus": "5", "gbs": "300", "round-robin-gradients": "true"},
        {**QWEN, "gpus": "8", "gbs": "1440", "sub-group-size": "200000", "stage3-max-live-parameters": "300000"},
    ),
    "fsdp": (
        {**LLAMA, "gpus": "4", "gbs": "48"},
        {**GPT2, "gpus": "8", "gbs": "480", "fsdp-parameters": "fp32"},
        {**QWEN, "gpus": "3", "gbs": "180", "gradient-sync": "false"},
        {**LLAMA, "gpus": "4", "gbs": "240", "fsdp-replicas": "2"},
        {**LLAMA, "gpus": "8", "gbs": "96", "layers": "8", "gpus-per-node": "4", **TITAN},
        {**LLAMA, "gpus": "8", "gbs": "32", "layers": "6", "ends-apart": "true", **TITAN},
        {**LLAMA, "gpus": "4", "gbs": "48", "layers": "7", "schedule": "gpipe", **TITAN},
        {**LLAMA, "gpus": "16", "gbs": "96", "layers": "8", "gpus-per-node": "4", "recompute-every": "2", **TITAN},
        {**LLAMA, "gpus": "6", "gbs": "96", "layers": "6", "gpus-per-node": "2", **TITAN},
        {**LLAMA, "gpus": "16", "gbs": "960", "layers": "16", "gpus-per-node": "8", **TITAN},
    ),
}  # fmt: skip
ALL = 1000
SAMPLE = 20, 2
"""So many candidates, of so many jobs."""


@pytest.mark.parametrize("framework", JOBS)
def test_a_sample_of_candidates(framework: str, tmp_path: Path) -> None:
    many, jobs = SAMPLE
    _compare(framework, JOBS[framework][:jobs], many, tmp_path / "plan.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("framework", JOBS)
def test_a_thousand_candidates(framework: str, tmp_path: Path) -> None:
    _compare(framework, JOBS[framework], ALL, tmp_path / "plan.yaml")


def _compare(framework: str, jobs: Sequence[Flags], many: int, file: Path) -> None:
    """Bytes exactly, of every stage of the plan as ``--write`` writes it."""
    compared = 0
    for number, job in enumerate(jobs):
        search = _search({**job, "framework": framework})
        random = Random(number)
        share = -(-(many - compared) // (len(jobs) - number))
        for candidate in islice(_buildable(search, random), share):
            suggestion = search.folded(candidate)
            assert suggestion is not None
            file.write_text(plan_yaml(suggestion.plan))
            plan = read_plan(str(file)).plan
            requested = [stage.requested for stage in estimate(plan).stages]
            assert suggestion.requested == max(requested), candidate
            assert suggestion.fullest == requested.index(max(requested)), candidate
            assert candidate.floor <= suggestion.requested, candidate
            limit = int(suggestion.requested * random.uniform(0.5, 1.1))
            known, _ = search.space.search.fullest(resolve(plan), limit)
            assert (known > limit) == (suggestion.requested > limit), candidate
            compared += 1
    assert compared == many


def _search(flags: Flags) -> Search:
    base = read_plan(None, {"gpu": "a100-40gb", **flags}).plan
    space = space_of(base, filled(base), {})
    return Search(space, Clock(space), 1 << 46, 1 << 45, lambda what, done, of: None)


def _buildable(search: Search, random: Random) -> Iterator[Candidate]:
    """Candidates that the framework does not refuse, in an order at random; where a cut or a number of recomputed
    layers can be chosen to fit, behind each what is chosen for less memory than it needs."""
    for candidate in at_random(search, random):
        suggestion = search.folded(candidate)
        if suggestion is None:
            continue
        yield candidate
        limit = int(suggestion.requested * random.uniform(0.7, 0.99))
        for one in search._fitted(candidate, limit):
            yield from search._chosen(one)


def test_jobs_name_every_framework() -> None:
    assert set(JOBS) == set(ROOMS)


def test_layers_are_timed_alone_without_what_needs_stages() -> None:
    """On one stage without virtual ones, which Megatron-Core has none of these with: no reason to refuse the plan."""
    given = {
        **LLAMA, "layers": "4", "framework": "megatron", "gpu": "h100-80gb", "gpus": "8", "pp": "2", "vpp": "2",
        "zero": "1", "gbs": "16", "defer-embedding-wgrad-compute": "true", "wgrad-deferral-limit": "2",
        "overlap-p2p": "true", "overlap-p2p-warmup": "true", "overlap-grad-reduce": "true",
        "overlap-param-gather": "true", "overlap-param-gather-with-optimizer-step": "true",
    }  # fmt: skip
    plan = resolve(read_plan(None, given).plan)
    assert Clock(space_of(plan, plan, {})).ratios(point_of(plan))


def test_no_layout_with_experts_is_faster_than_its_bound() -> None:
    """GLM-4.5's 160 experts get 204.8 rows each of 4,096 tokens, whole ones: 51.2 where four ranks share a sequence."""
    job = {"model": "glm-4.5", "layers": "6", "framework": "megatron", "gpu": "h100-80gb", "gpus": "16", "gbs": "32"}
    base = read_plan(None, {**job, "seq": "4096"}).plan
    clock = Clock(space_of(base, filled(base), {"layout.vpp": 1}))
    points = list(clock.space)
    bounds = {point: (clock.least(point), clock.fastest(point)[1]) for point in Random(1).sample(points, 60)}
    assert all(0 < least <= seconds for least, seconds in bounds.values())
    assert max(least / seconds for least, seconds in bounds.values()) > 0.8


def test_nothing_is_said_of_a_cut_that_nobody_chooses() -> None:
    """Layers of blocks of their own come in any number of kinds, of which no two are an MLP and experts."""
    job = {"model": "llama-3.3-nemotron-super-49b", "framework": "megatron", "gpu": "h100-80gb", "gpus": "16"}
    base = read_plan(None, {**job, "gbs": "32", "seq": "4096"}).plan
    clock = Clock(space_of(base, filled(base), {}))
    assert not clock.chooses_cut
    assert clock.least(next(iter(clock.space))) == 0
