"""bitsandbytes' 4-bit weights in traces: beside the estimate, and beside recorded steps of the real library."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from memplan.plan.errors import LackingError
from memplan.plan.read import read_plan
from memplan.tape.events import Category, rounded
from memplan.trace import run
from memplan.trace.recording import FORWARD
from memplan.trace.run import planned
from memplan.trace.step import traced_step
from memplan.validate.native import native

from ..layers.test_four_bit import CASES, RECORDED, B, Case, S
from ..layers.tuned_comparison import config_of
from .equality import assert_equal
from .test_step import model_flags, of, sizes

QLORA = {"lora-rank": "8", "lora-targets": "all-linear", "lora-dropout": "0.1", "dtype": "bf16", "attention": "eager"}
SETTINGS: dict[str, dict[str, str]] = {
    "double": {"quantisation": "nf4", "double-quantisation": "true", "gbs": "4"},
    "prepared": {"quantisation": "nf4", "double-quantisation": "true", "kbit-preparation": "true", "recompute": "full"},
    "fp4": {"quantisation": "fp4", "compute-dtype": "fp32", "mbs": "3", "seq": "37"},
    "ddp": {"quantisation": "nf4", "double-quantisation": "true", "framework": "ddp", "gpus": "4", "gbs": "8"},
}


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 3, and how to get it; a job without 4-bit weights needs none."""
    flags = {**model_flags("llama"), **QLORA, "layers": "2", "mbs": "1", "seq": "32", **SETTINGS["double"]}
    job = planned(None, {**flags, "framework": "single"}).job
    assert job.tuned is not None
    assert job.tuned.packages == ("peft", "bitsandbytes")
    monkeypatch.setattr(run, "version", lambda package: {"bitsandbytes": "0.45.0"}.get(package, "99.0"))
    with pytest.raises(LackingError, match=r"needs bitsandbytes 0\.50 or later, not 0\.45\.0: pip install 'bitsan"):
        run.traced(job, "llama")
    sharded = native(read_plan(None, {**flags, "framework": "fsdp", "gpus": "2"}).plan).job(0)
    monkeypatch.setattr(run, "version", lambda package: {"torch": "2.11.0"}.get(package, "99.0"))
    with pytest.raises(LackingError, match=r"needs torch 2\.13 or later, not 2\.11\.0"):
        run.traced(sharded, "llama")


@pytest.fixture(autouse=True)
def _library(request: pytest.FixtureRequest) -> None:
    if request.function is not test_without_the_library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "phi3", "gpt_neox"])
def test_trace_equals_estimate(family: str, setting: str) -> None:
    assert_equal(*of(**(model_flags(family) | QLORA | SETTINGS[setting])))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_tensors_as_the_real_library(case: Case, tmp_path: Path) -> None:
    """Parameters, what is held, and every tensor of forward of a step on ``Params4bit`` and the lines of ``gemm_4bit``
    that CUDA runs."""
    recorded: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))["steps"][str(case)]
    config_of(case.model).to_json_file(tmp_path / "config.json", use_diff=False)
    flags = {"model": str(tmp_path), "framework": "single", "optimizer": "adamw", **case.flags()}
    traced = traced_step(planned(None, flags).job)
    assert traced.outline.parameters == recorded["parameters"]
    assert traced.setup.net == recorded["before"] + rounded(8 * B * S)
    forward = [
        event
        for event, place in zip(traced.recording.events, traced.recording.places, strict=True)
        if place.phase == FORWARD
    ]
    assert sorted(sizes(forward)) == sorted(recorded["forward"])


def test_two_numbers_a_byte() -> None:
    job, program = of(**model_flags("llama"), **QLORA, **SETTINGS["double"])
    setup = traced_step(job).setup.net_by
    packed = sum(one.elements for one in program.parameter_tensors() if one.four_bit is not None)
    rest = sum(2 * one.elements for one in program.parameter_tensors() if one.four_bit is None and not one.trained)
    assert setup[Category.PARAMETERS] > packed // 2 + rest
    assert setup[Category.BUFFERS] >= rounded(4 * 256)
