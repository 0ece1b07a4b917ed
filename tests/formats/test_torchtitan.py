"""Plans as jobs of torchtitan."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from memplan.formats.exported import Exported, exported
from memplan.formats.torchtitan.exporter import TARGET
from memplan.formats.torchtitan.keys import RELEASES, key_of
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan

from .plans import round_trip
from .torchtitan_plans import plans

toml: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

JOB = {"model": "llama-3-8b", "framework": "fsdp", "fsdp-code": "torchtitan", "gpus": "8", "seq": "2048"}
NEW = {**JOB, "ends-apart": "true"}
PIPE = {**NEW, "gpus": "16", "pp": "4", "gbs": "16"}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(plans())
def test_what_is_exported_reads_back_as_the_plan(plan: Plan) -> None:
    done = round_trip(plan, TARGET)
    day = RELEASES[done.content["release"]]
    for section, keys in toml.loads(done.text).items():
        for name in keys:
            key = key_of(f"{section}.{name}")
            assert key is not None
            assert key.was(day)


def of(flags: dict[str, str], **more: str) -> tuple[Exported, dict[str, Any]]:
    done = round_trip(read_plan(None, {**flags, **more}).plan, TARGET)
    return done, toml.loads(done.text)


def test_a_flavour_is_named() -> None:
    done, job = of(NEW)
    assert job["model"] == {"name": "llama3", "flavor": "8B"}
    assert "no such flavour" not in done.text
    done, job = of(NEW, layers="7")
    assert job["model"]["flavor"] == "llama-3-8b"
    assert "torchtitan has no such flavour: give it one of 7 layers" in done.text
    assert done.command_line() == "memplan estimate --from torchtitan FILE --model llama-3-8b --layers 7"


def test_the_release_is_the_plans() -> None:
    assert of(NEW)[0].settings == ()
    assert of(JOB)[0].settings == ("torchtitan=0.1.0",)
    assert of(PIPE, **{"return-outputs": "true"})[0].settings == ("torchtitan=0.2.0",)


@pytest.mark.parametrize(
    ("flags", "release"), [({}, None), ({"return-outputs": "true"}, "0.2.0"), ({"ends-apart": "false"}, "0.1.0")]
)
def test_stages_of_no_named_release_are_the_newests(flags: dict[str, str], release: str | None) -> None:
    """Written for the newest release, the plan reads back as it is; other releases are written for where they are
    asked for."""
    done, job = of({**JOB, "gpus": "16", "pp": "4", "tp": "2", "gbs": "16", **flags})
    assert done.settings == (() if release is None else (f"torchtitan={release}",))
    assert job["parallelism"]["pipeline_parallel_degree"] == 4
    assert "module_fqns_per_model_part" not in job["parallelism"]
    assert ("pipeline_parallel_split_points" in job["parallelism"]) == (release == "0.1.0")


def test_stages_are_named_only_where_torchtitan_would_cut_elsewhere() -> None:
    """32 layers, embedding and head as one each, on 4 ranks: 9, 9, 8, 8."""
    own = "0,9,18,26,35"
    job = of(PIPE)[1]["parallelism"]
    assert "module_fqns_per_model_part" not in job
    assert of(PIPE, partition=own)[1]["parallelism"] == job
    named = of(PIPE, partition="0,8,17,26,35")[1]["parallelism"]["module_fqns_per_model_part"]
    assert named[0] == ["tok_embeddings", *(f"layers.{layer}" for layer in range(7))]
    assert named[-1][-2:] == ["norm", "output"]
    old = of({**PIPE, "ends-apart": "false", "return-outputs": "true"}, partition="0,8,17,26,35")[1]["parallelism"]
    assert old["pipeline_parallel_split_points"] == ["layers.7", "layers.16", "layers.25"]
    interleaved = of(PIPE, vpp="3")[1]["parallelism"]
    assert len(interleaved["module_fqns_per_model_part"]) == 12
    assert "module_fqns_per_model_part" not in of(PIPE, vpp="2")[1]["parallelism"]


def test_a_pipelines_batch_is_of_all_its_microbatches() -> None:
    training = of(PIPE, mbs="2", gbs="32")[1]["training"]
    assert training["local_batch_size"] == 8
    training = of(NEW, mbs="2", gbs="32")[1]["training"]
    assert (training["local_batch_size"], training["global_batch_size"]) == (2, 32)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"fsdp-code": "transformers", "ends-apart": "false"}, "fsdp.code = transformers: must be torchtitan"),
        ({"optimizer": "sgd"}, "optimizer.name = sgd: must be adam or adamw"),
        ({"dtype": "fp16"}, "precision.dtype = fp16: must be bf16 or fp32"),
        ({"gpus": "1"}, "layout.dp = 1: must be more than fsdp.replicas"),
        ({"fsdp-replicas": "8"}, "layout.dp = 8: must be more than fsdp.replicas"),
        ({"ends-apart": "false", "fsdp-parameters": "bf16"}, "fsdp.parameters = bf16: must be fp32"),
        (
            {"loss": "chunked"},
            "loss.kind = chunked: must be plain, or vocab-parallel with tensor parallelism: torchtitan has had",
        ),
        ({"gradient-sync": "false"}, "fsdp.gradient_sync = false: cannot be said in torchtitan's job configuration"),
        (
            {**PIPE, "ends-apart": "false", "return-outputs": "false"},
            "fsdp.ends_apart = false: must be true with stages (--ends-apart), or fsdp.return_outputs (",
        ),
        ({"framework": "ddp", "fsdp-code": "transformers", "ends-apart": "false"}, "framework = ddp: must be fsdp"),
    ],
)
def test_what_it_has_no_word_for_is_refused(flags: dict[str, str], line: str) -> None:
    with pytest.raises(PlanError) as caught:
        exported(read_plan(None, {**NEW, **flags}).plan, TARGET)
    assert str(caught.value).startswith(line)
