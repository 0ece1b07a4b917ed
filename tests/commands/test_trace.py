"""``memplan trace`` as a user runs it; most traces without a process of their own."""

from __future__ import annotations

import json
import pickle
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import transformers

from memplan.cli import main
from memplan.trace import run

TINY = ["--layers=2", "--hidden=64", "--heads=4", "--kv-heads=4", "--head-dim=16", "--ffn=160", "--vocab=1003"]
GPT2 = ["trace", "--model", "gpt2", *TINY, "--mbs", "1", "--seq", "32"]


@pytest.mark.usefixtures("here")
def test_files_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    events, snapshot = tmp_path / "events.jsonl", tmp_path / "memory.pickle"
    assert main([*GPT2, "--json", "--events", str(events), "--snapshot", str(snapshot)]) == 0
    answer = json.loads(capsys.readouterr().out)
    points = {one["name"]: one for one in answer["points"]}
    assert points["between steps"]["traced_bytes"] == points["between steps"]["estimated_bytes"]
    apart = [abs(one["traced_bytes"] - one["estimated_bytes"]) for one in answer["points"]]
    assert max(apart) <= 1024
    layers = [one for one in answer["modules"] if one["module"].startswith("layer.")]
    assert len(layers) == 4
    assert all(one["traced"] == one["estimated"] for one in layers)
    assert sum(answer["breakdown"].values()) >= max(one["traced_bytes"] for one in answer["points"])
    lines = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == answer["events"]
    assert set(pickle.loads(snapshot.read_bytes())) == {"segments", "device_traces", "allocator_settings"}


@pytest.mark.parametrize(
    "flags",
    [
        ["--framework", "ddp", "--gpus", "8", "--autocast", "--gradient-as-bucket-view"],
        ["--lora-rank", "4", "--trainer", "transformers"],
    ],
)
@pytest.mark.usefixtures("here")
def test_files_of_replicas_and_adapters(flags: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    events, snapshot = tmp_path / "events.jsonl", tmp_path / "memory.pickle"
    assert main([*GPT2, *flags, "--json", "--events", str(events), "--snapshot", str(snapshot)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert max(abs(one["traced_bytes"] - one["estimated_bytes"]) for one in answer["points"]) <= 1024
    assert len(events.read_text(encoding="utf-8").splitlines()) == answer["events"]
    assert pickle.loads(snapshot.read_bytes())["device_traces"][0]


@pytest.mark.usefixtures("here")
def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT2, "--gbs", "2", "--no-color"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Close: trace and estimate differ by at most")
    assert "layers 0–1" in out
    assert "backward, mb 1" in out


TITAN = ["trace", "--model", "llama-3-8b", "--framework", "fsdp", "--fsdp-code", "torchtitan", "--dp", "2"]
TITAN += [
    "--hidden=64",
    "--heads=4",
    "--kv-heads=2",
    "--head-dim=16",
    "--ffn=160",
    "--vocab=1003",
    "--mbs=1",
    "--seq=32",
]
PIPELINE = [*TITAN, "--layers=3", "--pp=3", "--gbs=8", "--partition=0,2,3,6"]


@pytest.mark.usefixtures("here")
def test_stage_of_a_pipeline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """torchtitan's code: every pass and layer of one rank, to the byte."""
    events, snapshot = tmp_path / "events.jsonl", tmp_path / "memory.pickle"
    assert main([*PIPELINE, "--stage=1", "--json", "--events", str(events), "--snapshot", str(snapshot)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["transformers"] is None
    assert answer["job"]["torchtitan"]["stages"]["rank"] == 1
    assert all(one["traced_bytes"] == one["estimated_bytes"] for one in answer["points"])
    assert all(one["traced"] == one["estimated"] for one in answer["modules"])
    assert {one["module"] for one in answer["modules"]} == {"start", "stage 1", "layer.1"}
    assert any("NCCL" in one for one in answer["substitutions"])
    lines = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == answer["events"]
    assert {line["phase"] for line in lines} == {"setup", "forward", "backward", "between", "reduce", "step"}
    assert set(pickle.loads(snapshot.read_bytes())) == {"segments", "device_traces", "allocator_settings"}


@pytest.mark.usefixtures("here")
def test_table_of_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """Micro-batches that look alike share a line."""
    assert main([*PIPELINE, "--stage=2", "--no-color"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Equal: trace and estimate")
    assert "memplan's modules of torchtitan's Llama" in out
    assert "stage 2 of 3" in " ".join(out.split())
    assert "forward, mb 1–3" in out
    assert "forward, mb 2" not in out


def test_stage_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PIPELINE, "--stage=3"]) == 2
    assert capsys.readouterr().err.endswith("--stage: must be from 0 to 2, not 3\n")


@pytest.mark.usefixtures("here")
def test_model_without_a_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = transformers.AutoConfig.for_model("olmo", **SMALL)
    made.to_json_file(tmp_path / "config.json", use_diff=False)
    assert main(["trace", "--model", str(tmp_path), "--mbs", "2", "--seq", "32", "--layers", "3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["no_recipe"].startswith("model_type = olmo: is not an architecture that is modelled")
    assert answer["plan"] is None
    assert all(one["estimated_bytes"] is None for one in answer["points"])
    assert {one["module"] for one in answer["modules"]} == {"embedding", "layer.0", "layer.1", "layer.2", "head"}


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--hidden", "64"], "--hidden: changes an architecture with a recipe, which this one has not"),
        (["--kv-heads=2"], "--kv-heads: changes an architecture with a recipe, which this one has not"),
        (["--layers", "x"], "model.layers = x: "),
        (["--layers", "0"], "model.layers = 0: "),
        (["--optimizer", "lion"], "optimizer.name = lion: must be one of sgd, adam, adamw, adafactor"),
        (
            ["--framework", "ddp", "--gpus=2", "--zero=1"],
            "layout.zero = 1: must be 0 for an architecture without a recipe",
        ),
    ],
)
def test_wrong_inputs_without_a_recipe(
    flags: list[str], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    transformers.AutoConfig.for_model("olmo", **SMALL).to_json_file(tmp_path / "config.json", use_diff=False)
    assert main(["trace", "--model", str(tmp_path), "--mbs", "2", "--seq", "32", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert line in captured.err
    assert captured.err.count("\n") == 1


SMALL = {"vocab_size": 1003, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
SMALL |= {"intermediate_size": 96, "max_position_embeddings": 64}


@pytest.mark.usefixtures("here")
def test_model_that_leaves_fake_tensors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One line: the operator, the module, the line of the model's code."""
    made = transformers.AutoConfig.for_model("jetmoe", **SMALL, num_key_value_heads=2)
    made.to_json_file(tmp_path / "config.json", use_diff=False)
    assert main(["trace", "--model", str(tmp_path), "--mbs", "1", "--seq", "16", "--attention", "eager"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "cannot be traced: aten." in captured.err
    assert ", in model.layers.0." in captured.err
    assert "(modeling_jetmoe.py:" in captured.err
    assert captured.err.count("\n") == 1


def test_missing_package_ends_with_3(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(run, "version", version)
    assert main(GPT2) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "needs torch, which is not installed: pip install" in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--framework", "megatron"], "framework = megatron: must be one of single, ddp, fsdp"),
        (["--model", "megatron-22b"], "model.family = gpt: "),
        (["--optimizer", "lion"], "optimizer.name = lion: must be one of sgd, adam, adamw, adafactor"),
        (["--loss", "liger"], "loss.kind = liger: must be plain"),
        (["--code", "2020", "--attention", "eager", "--dtype", "fp32"], "code = 2020: must be current"),
        (["--recompute", "selective"], "recompute.mode = selective: must be none or full"),
        (
            ["--trainer", "transformers", "--eval-batches", "2"],
            "trainer.evaluation_batches = 2: must be left out: a trace is of a training step, without evaluation",
        ),
        (
            ["--framework", "device-map", "--gpus", "2"],
            "framework = device-map: must be one of single, ddp, fsdp: layers",
        ),
        (
            ["--framework", "fsdp", "--fsdp-code", "torchtitan"],
            "model.family = gpt2: has no recipe in torchtitan's code",
        ),
        (["--stage", "1"], "--stage: must be 0: there is no pipeline (pp 1), not 1"),
        (["--stage", "first"], "--stage"),
        (["--model", "no-such-model"], "model = no-such-model: "),
        (["--seq", "0"], "batch.seq = 0: "),
        (["--events", "/no/such/folder/events"], "/no/such/folder/events: there is no folder /no/such/folder"),
        (["--snapshot", str(Path(__file__))], "is there already; --overwrite replaces it"),
        (["--eventz", "x"], "--eventz: "),
    ],
)
def test_wrong_inputs(flags: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT2, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert line in captured.err
    assert captured.err.count("\n") == 1
