"""Architectures whose layers are of several kinds in any order, cut sequences into chunks, loop over tokens, or keep
some parameters in fp32: learnt, and put beside direct traces at sizes that none was learnt at."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import transformers

from memplan.frameworks import framework
from memplan.layers.module import Options
from memplan.notices import warnings
from memplan.plan.errors import PlanError
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.trace.assembled import _with_layers
from memplan.trace.chunks import AnyFit, PerChunk, in_tokens
from memplan.trace.comparison import compared
from memplan.trace.fit import Fit, Polynomial
from memplan.trace.job import Job
from memplan.trace.learned import job_of
from memplan.trace.periods import LoopsError, learn
from memplan.trace.ranks import TRACED_RANK, at_rank
from memplan.trace.recording import Traced
from memplan.trace.worker import WORK, answered

from .test_fits import program_of, traced

CONV, ATTENTION, MAMBA = "conv", "full_attention", "mamba"
SIZED = {"vocab_size": 1003, "hidden_size": 64, "intermediate_size": 96}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TINY: dict[str, dict[str, Any]] = {
    "lfm2": {
        **SIZED,
        **HEADS,
        "layer_types": [CONV, CONV, ATTENTION, CONV, CONV, ATTENTION, CONV, CONV, CONV, ATTENTION, CONV, ATTENTION],
        "num_hidden_layers": 12,
        "max_position_embeddings": 640,
    },
    "mamba2": {
        **{"vocab_size": 1003, "hidden_size": 64, "num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1},
        **{"num_hidden_layers": 2, "chunk_size": 32, "expand": 2},
    },
    "mamba": {"vocab_size": 1003, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 2},
    "ernie4_5_moe": {
        **SIZED,
        **HEADS,
        **{"num_hidden_layers": 2, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
        **{"moe_layer_start_index": 1, "max_position_embeddings": 640, "pad_token_id": 0},
    },
}
LONGEST = 640
EAGER = frozenset({"mamba", "mamba2"})
POINTS = {"lfm2": ((4, 200), (1, 77)), "mamba2": ((4, 384), (1, 640)), "ernie4_5_moe": ((4, 200), (1, 150))}


def planned(kind: str, folder: Path, b: int, s: int, **flags: str) -> tuple[ResolvedPlan, Job]:
    config = transformers.AutoConfig.for_model(kind, **TINY[kind])
    config.to_json_file(folder / "config.json", use_diff=False)
    attention = {"attention": "eager"} if kind in EAGER else {}
    given = {"framework": "single", "model": str(folder), "mbs": str(b), "seq": str(s), "gbs": str(2 * b)}
    plan = resolve(read_plan(None, {**given, **attention, **flags}, traced=True).plan)
    return plan, job_of(plan)


def learnt(kind: str, folder: Path) -> dict[str, Any]:
    """JSON of the fit, and how many steps with how many layers were traced for it."""
    steps: list[tuple[int, int, str, int]] = []

    def noted(one: Job) -> Traced:
        steps.append((one.b, one.s, one.optimizer, one.config["num_hidden_layers"]))
        return traced(one)

    fit, _, _ = learn(planned(kind, folder, 1, 64)[1], noted, LONGEST)
    assert len(steps) == len(set(steps)), "no step is traced twice"
    return {"fit": fit.to_json(), "layers": sorted(Counter(layers for *_, layers in steps).items())}


RECORDED = Path(__file__).with_name("mixed_fits.json.gz")
"""``python -m tests.trace.test_mixed_layers`` learns them anew."""


@lru_cache(maxsize=1)
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(RECORDED.read_bytes()))
    return found


@lru_cache(maxsize=8)
def fit_of(kind: str) -> Fit:
    return AnyFit.from_json(recorded()[kind]["fit"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", POINTS)
def test_what_is_on_file_is_what_is_learnt(kind: str, tmp_path: Path) -> None:
    assert json.dumps(learnt(kind, tmp_path)) == json.dumps(recorded()[kind])


@pytest.mark.parametrize(("kind", "point"), [(kind, point) for kind, points in POINTS.items() for point in points])
def test_same_as_a_direct_trace(kind: str, point: tuple[int, int], tmp_path: Path) -> None:
    """To the byte: every named point, and every entry in every pass."""
    fit = fit_of(kind)
    plan, job = planned(kind, tmp_path, *point)
    program = program_of(plan, fit, Options())
    comparison = compared(traced(replace(job, b=point[0], s=point[1])), program)
    assert comparison.furthest == 0
    for row in comparison.rows:
        assert row.estimated is not None
        assert (row.traced.net, row.traced.peak) == (row.estimated.net, row.estimated.peak), row


def test_few_layers_are_traced() -> None:
    """All of them once to see which kinds there are, and at two points of each piece, which it is one of."""
    fit, layers = fit_of("lfm2"), dict(recorded()["lfm2"]["layers"])
    assert layers.pop(12) == 4
    assert all(count < 12 for count in layers)
    assert sum(layers.values()) > 4 * 4
    assert fit.verified == (12,)
    assert not fit.extends


@pytest.mark.parametrize(
    ("given", "cut"),
    [
        ({"hybrid_override_pattern": "M*M-M*ME"}, {"hybrid_override_pattern": "M*ME"}),
        ({"attn_layer_indices": [1, 6]}, {"attn_layer_indices": [1, 2]}),
        ({"hidden_act": "gelu_new"}, {"hidden_act": "gelu_new"}),
        ({"eos_token_id": [2, 7]}, {"eos_token_id": [2, 7]}),
    ],
)
def test_what_is_said_of_each_layer_is_cut_with_the_layers(
    given: dict[str, Any], cut: dict[str, Any], tmp_path: Path
) -> None:
    """Of eight layers the first and last two: not what is as long by chance."""
    job = replace(planned("lfm2", tmp_path, 1, 64)[1], config={"model_type": "lfm2"})
    written = {"num_hidden_layers": 8, "layer_types": [*"abcabcdd"], **given}
    made = _with_layers(job, written, 8, (0, 1, 6, 7))
    assert made == {"num_hidden_layers": 4, "layer_types": [*"abdd"], **cut}


def test_only_whole_chunks(tmp_path: Path) -> None:
    """What chunks hand to one another is (s / 32 + 1)² numbers for each head, which 32 does not divide."""
    fit = fit_of("mamba2")
    assert {one.domain.multiple for one in fit.pieces} == {128}
    made = [one for piece in fit.pieces for one in piece.polynomials if isinstance(one, PerChunk)]
    between = [one for one in made if one(2, 256) == 2 * 4 * 4 * (256 // 32 + 1) ** 2]
    assert between
    assert all(one(3, 640) in (3 * 4 * 4 * 21**2, 2 * 4 * 4 * 21**2, 4 * 4 * 21**2) for one in between)
    with pytest.raises(PlanError, match=r"batch\.seq = 200: is outside the verified range .* in steps of 128"):
        program_of(planned("mamba2", tmp_path, 2, 200)[0], fit, Options())


def test_polynomials_in_chunks() -> None:
    """Are in tokens where their coefficients allow it, stay what they are in JSON, and in a fit of any rank."""
    assert in_tokens(Polynomial((1, 0, 0, 0, 256, 0)), 128) == Polynomial((1, 0, 0, 0, 2, 0))
    square = in_tokens(Polynomial((0, 0, 0, 4, 8, 4)), 128)
    assert isinstance(square, PerChunk)
    assert [square(3, s) for s in (128, 256, 1280)] == [3 * 4 * 4, 3 * 4 * 9, 3 * 4 * 121]
    assert str(square) == "4 b + 8 bs + 4 bs², s in chunks of 128,"


def test_any_rank_in_chunks(tmp_path: Path) -> None:
    fit = fit_of("mamba2")
    (piece, *_) = fit.pieces
    of_rank = in_tokens(Polynomial((0, 0, 0, 0, TRACED_RANK, TRACED_RANK)), 128)
    scaled = at_rank(replace(fit, pieces=(replace(piece, polynomials=(of_rank,), work=None),)), 8)
    assert scaled.pieces[0].polynomials[0](2, 256) == 2 * 8 * (2 + 4)


def test_kernels_of_other_packages_are_told(tmp_path: Path) -> None:
    for kind, runs in (("lfm2", True), ("mamba2", True), ("ernie4_5_moe", False)):
        plan, _ = planned(kind, tmp_path, 2, 256)
        told = [one.code for one in warnings(plan, (program_of(plan, fit_of(kind), Options()),))]
        assert ("operators-traced" in told) == runs


def test_loops_over_tokens_end_soon(tmp_path: Path) -> None:
    """Of Mamba's scan without its kernel; what was traced is short."""
    lengths: list[int] = []

    def noted(one: Job) -> Traced:
        lengths.append(one.s)
        return traced(one)

    with pytest.raises(LoopsError, match=r"events at s = 16 and [0-9,]+ more with every 16 tokens more"):
        learn(planned("mamba", tmp_path, 1, 64)[1], noted, LONGEST)
    assert max(lengths) <= 48


def test_parameters_in_two_dtypes(tmp_path: Path) -> None:
    """Routers' weights are trained in fp32, and their biases are not trained; states and step are in each one's own
    dtype. Buckets of replicas would be of one dtype each."""
    fit = fit_of("ernie4_5_moe")
    kept = {
        one.name: one for piece in fit.pieces for kind in piece.kinds for one in kind.parameters if one.dtype == "fp32"
    }
    assert [one.trained for one in kept.values() if "gate.weight" in one.name] == [True]
    assert [one.trained for one in kept.values() if "bias" in one.name] == [False]
    plan, job = planned("ernie4_5_moe", tmp_path, 2, 96, optimizer="sgd")
    job = replace(job, b=2, s=96, optimizer="sgd", momentum=0.0, weight_decay=0.0)
    assert compared(traced(job), program_of(plan, fit, Options())).furthest == 0
    plan, _ = planned("ernie4_5_moe", tmp_path, 2, 96, framework="ddp", gpus="2", gbs="4")
    assert "whose buckets are not modelled" in framework("ddp").running.lacks(plan, fit)


def answer(kind: str, folder: Path, **changes: Any) -> dict[str, Any]:
    _, job = planned(kind, folder, 1, 64)
    return answered(WORK["learned"], {"job": replace(job, **changes).to_json(), "longest": 640})


def test_models_without_pytorchs_attention_say_so(tmp_path: Path) -> None:
    error = answer("mamba2", tmp_path, attention="flash")["error"]
    assert (
        error == "cannot be traced: transformers' Mamba2ForCausalLM takes none of PyTorch's kernels: --attention eager"
    )


def test_numbers_that_json_has_not(tmp_path: Path) -> None:
    """transformers writes infinity as a mapping."""
    _, job = planned("mamba2", tmp_path, 1, 64)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert job.config["time_step_limit"] == [0.0, float("inf")]


def test_length_is_asked_for(tmp_path: Path) -> None:
    """Also where the configuration is one of a family with a recipe elsewhere."""
    planned("mamba2", tmp_path, 1, 64)
    with pytest.raises(PlanError, match=r"batch\.seq: is missing, and the model's configuration names no maximum"):
        read_plan(None, {"framework": "single", "model": str(tmp_path)}, traced=True)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        made = {kind: learnt(kind, Path(folder)) for kind in POINTS}
    RECORDED.write_bytes(gzip.compress(json.dumps(made).encode(), mtime=0))
