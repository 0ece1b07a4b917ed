"""Programs of learnt architectures under ZeRO-3, beside recipes, which are compared with DeepSpeed's engine, and where
there is none beside that engine itself (``tests/frameworks/deepspeed_0_19_8.json``)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import transformers

from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.replay import replay
from memplan.cli import main
from memplan.estimate import programs_of
from memplan.frameworks.deepspeed import learned
from memplan.layers.module import Options
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.program import Program, fold_evaluation, fold_program
from memplan.trace import cache, learned as lookup
from memplan.trace.fit import Fit
from memplan.trace.framework import job_of_plan
from memplan.trace.gathering import gathering
from memplan.trace.job import Job
from memplan.trace.learned import job_of
from memplan.trace.learning import learn
from memplan.trace.ranks import at_rank
from memplan.trace.recording import Traced
from memplan.trace.step import traced_step

from ..frameworks.test_deepspeed import changes
from ..oracle.deepspeed import LEARNED, SIZES, Case, summary
from .test_fits import plan_of, program_of, traced
from .test_step import SCALARS

RECORDED = Path(__file__).with_name("gathered_fits.json.gz")
"""Fits with marks: ``python -m tests.trace.test_fits_gathered [NAME …]`` learns them anew."""
VERSIONS = "peft 0.21.2, transformers 5.23.0, torch 2.13.0"
LONGEST = 256
POINTS = ("static", "after_forward", "backward_peak", "step_peak", "peak")
ADAPTERS = {"lora-rank": "8", "lora-targets": "all-linear", "lora-dtype": "bf16", "dtype": "bf16"}
OF_RECIPES: dict[str, tuple[str, dict[str, str]]] = {
    "llama": ("llama", {"recompute": "none"}),
    "llama-recompute": ("llama", {}),
    "llama-adapters": ("llama", ADAPTERS),
    "bert": ("bert", {}),
}
"""Families that have both, and flags."""
MEASURED = Path(__file__).with_name("deepspeed_0_19_8.json")
"""What the engine ran: ``python -m tests.oracle.deepspeed FILE CASE …``."""


@lru_cache(maxsize=1)
def on_file() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(gzip.decompress(RECORDED.read_bytes()))
    assert data["versions"] == VERSIONS
    return data["fits"]  # type: ignore[no-any-return]


@lru_cache(maxsize=16)
def fit_of(name: str) -> Fit:
    return Fit.from_json(on_file()[name])


@lru_cache(maxsize=8)
def learnt(name: str) -> Fit:
    """As a user has it learnt."""
    if name in OF_RECIPES:
        family, flags = OF_RECIPES[name]
        job = replace(job_of_plan(plan_of(family, 1, 64, **{"layers": "3", **flags})), gathers=True)
        fit, _, _ = learn(job, traced, LONGEST)
    else:
        with plan_of_case(LEARNED[name]) as plan:
            fit, _, _ = learn(replace(job_of_plan(plan), gathers=True), as_followed, SHORT)
    return Fit.from_json(json.loads(json.dumps(fit.to_json())))


def as_followed(job: Job) -> Traced:
    """Whoever follows the engine's storages keeps gradients from being summed in place."""
    with gathering():
        return traced_step(job, sums_in_place=False, evaluates=True)


SHORT = 128
"""Tokens that the models of the engine's cases take."""


@contextmanager
def plan_of_case(case: Case) -> Iterator[ResolvedPlan]:
    config = transformers.AutoConfig.for_model(case.family, vocab_size=1000, **SIZES[case.family])
    section = {f"{name.replace('_', '-')}": str(value).lower() for name, value in case.zero.items()}
    flags = {"framework": "deepspeed", "dp": str(case.ranks), "zero": str(case.stage), "dtype": case.dtype, **section}
    flags |= {"mbs": "2", "gbs": str(2 * case.ranks * case.microbatches), "seq": "32", "attention": "eager"}
    flags |= {"recompute": "full" if case.recompute else "none", "optimizer-implementation": "foreach"}
    if case.lora:
        flags |= {"lora-rank": "4", "lora-targets": case.lora}
    with TemporaryDirectory() as folder:
        config.to_json_file(Path(folder) / "config.json", use_diff=False)
        yield resolve(read_plan(None, {"model": folder, **flags}, traced=True).plan)


def programs(name: str, **flags: str) -> tuple[ResolvedPlan, Program]:
    family, own = OF_RECIPES[name]
    sizes = {"layers": "3", "framework": "deepspeed", "zero": "3", "dp": "4", "gbs": "8", **own, **flags}
    plan = plan_of(family, 2, 77, **sizes)
    return plan, program_of(plan, fit_of(name), Options(kernel_workspaces=True))


SMALL = {
    "stage3-param-persistence-threshold": "100",
    "stage3-prefetch-bucket-size": "10000",
    "stage3-max-live-parameters": "40000",
    "stage3-max-reuse-distance": "20000",
    "reduce-bucket-size": "20000",
}
OFFLOADED = {"offload-param": "cpu", "offload-optimizer": "cpu"}


@pytest.mark.parametrize("flags", [{}, SMALL, {**SMALL, **OFFLOADED, "gbs": "24"}], ids=["default", "small", "offload"])
@pytest.mark.parametrize("name", OF_RECIPES)
def test_same_as_the_recipe(name: str, flags: dict[str, str]) -> None:
    """But for the loss and its gradient: what is gathered, reduced and kept, on the host, too."""
    plan, made = programs(name, **flags)
    (recipe,) = programs_of(plan, Options(kernel_workspaces=True))
    ours, theirs = fold_program(made), fold_program(recipe)
    for point in POINTS:
        assert abs(getattr(ours, point) - getattr(theirs, point)) <= SCALARS, point
    assert abs((fold_evaluation(made) or 0) - (fold_evaluation(recipe) or 0)) <= SCALARS
    assert (made.elements, made.host, made.nvme) == (recipe.elements, recipe.host, recipe.nvme)


def test_same_as_the_recipe_in_the_allocator() -> None:
    plan, made = programs("llama", **SMALL)
    (expected,), (found,) = (replay([one], AllocatorSettings(), ()) for one in (programs_of(plan, Options())[0], made))
    assert abs(found.allocated - expected.allocated) <= SCALARS
    assert found.static == expected.static


@pytest.mark.parametrize("name", LEARNED)
def test_same_as_the_engine(name: str) -> None:
    """Event by event on the rank that needs most; with adapters a few of what is gathered ahead come in other groups,
    as many bytes in all, as in recipes. An iteration's peak is so, too, but for the scalars of engine and loss."""
    case = LEARNED[name]
    with plan_of_case(case) as plan:
        made = program_of(plan, at_rank(fit_of(name), plan.lora.rank), Options(accumulates_in_place=False))
    measured = max(json.loads(MEASURED.read_text())["cases"][name], key=lambda record: record["peak"])
    tapes = [span.module.first for span in made.spans]
    passes = {"forward": [one.forward for one in tapes], "backward": [one.backward for one in reversed(tapes)]}
    compared = ("net", "peak") if case.lora else ("net", "peak", "sizes")
    for phase, parts in passes.items():
        found, expected = summary(changes(*parts)), measured["phases"][f"0/{phase}"]
        assert [found[key] for key in compared] == [expected[key] for key in compared], phase
    assert -SCALARS <= measured["peak"] - fold_program(made).peak <= FEW_SCALARS


FEW_SCALARS = 3072
"""Bytes of losses, norms and PyTorch's step counters, which are on the CPU."""


def test_estimated_and_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a user has it who had it learnt: the report says what is gathered, and a search tries stage 3."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    lookup.forget()
    with plan_of_case(Case(3, family="helium", zero=LEARNED["z3-smollm3"].zero)) as plan:
        fit, _, _ = learn(job_of(plan), as_followed, SHORT)
        cache.store(lookup.kept_as(job_of(plan), fit), fit)
        model = str(plan.model.source)
        flags = ["--model", model, "--framework", "deepspeed", "--zero", "3", "--gpus", "2", "--seq", "32", "--json"]
        flags += ["--attention", "eager", "--gbs", "8", "--gpu", "h100", "--stage3-param-persistence-threshold", "100"]
        assert main(["estimate", *flags]) == 0
        (said,) = [one for one in json.loads(capsys.readouterr().out)["warnings"] if one["code"] == "zero3-gathering"]
        whole = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 176)
        assert f"every pass gathers {whole:,}, and 256 are never sharded" in said["message"]
        assert main(["suggest-partition", *flags, "--fix", "zero"]) == 0
        found = json.loads(capsys.readouterr().out)["recommended"]
        assert found["seconds"] > 0


def test_stacked_experts_are_refused() -> None:
    """Autograd keeps views of them, which outlive what is gathered."""
    fit = fit_of("llama")
    (piece, *_) = fit.pieces
    kind = piece.kinds[1]
    stacked = replace(kind, parameters=(replace(kind.parameters[0], shape=(4, 8, 8)), *kind.parameters[1:]))
    there = replace(fit, pieces=(replace(piece, kinds=(piece.kinds[0], stacked, *piece.kinds[2:])),))
    plan = plan_of("llama", 2, 77, framework="deepspeed", zero="3", dp="2", gbs="4")
    assert "is a stack of matrices" in learned.lacks(plan, there)
    assert learned.lacks(plan, fit) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OF_RECIPES, *LEARNED])
def test_what_is_on_file_is_what_is_learnt(name: str) -> None:
    pytest.importorskip("peft", reason="peft is not installed (the extra dev has it)")
    assert json.dumps(learnt(name).to_json()) == json.dumps(fit_of(name).to_json())


def record(names: list[str]) -> None:
    """Writes ``RECORDED``, of ``names`` or of all."""
    known = json.loads(gzip.decompress(RECORDED.read_bytes()))["fits"] if names else {}
    known |= {name: learnt(name).to_json() for name in names or [*OF_RECIPES, *LEARNED]}
    data = json.dumps({"versions": VERSIONS, "fits": known}, separators=(",", ":"))
    RECORDED.write_bytes(gzip.compress(data.encode(), 9, mtime=0))


if __name__ == "__main__":
    import sys

    record(sys.argv[1:])
