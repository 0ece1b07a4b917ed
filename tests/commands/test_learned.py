"""``memplan trace --learn`` and ``memplan estimate`` of an architecture without a recipe, as a user runs them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from memplan.cli import main
from memplan.estimate import fold
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.trace import cache, learned as lookup

SMALL: dict[str, Any] = {"vocab_size": 1003, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
SMALL |= {"intermediate_size": 96, "max_position_embeddings": 64}


def config(folder: Path, kind: str = "olmo", **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    transformers.AutoConfig.for_model(kind, **SMALL, **changes).to_json_file(folder / "config.json", use_diff=False)
    return str(folder / "config.json")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    lookup.forget()


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a wrong command prints."""
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.usefixtures("here")
def test_learnt_then_estimated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config(tmp_path / "mine")
    job = ["--model", path, "--mbs", "2", "--seq", "48", "--gpu", "a100-40gb"]
    before = error_of(capsys, "estimate", *job)
    assert "model_type = olmo: is not an architecture that is modelled" in before
    assert f"nothing was learnt of it for bf16, flash attention: `memplan trace --learn --model {path}`" in before

    assert main(["trace", "--learn", "--model", path, "--json"]) == 0
    learnt = json.loads(capsys.readouterr().out)
    assert learnt["layers"] == {"verified": [2], "any": False}
    assert [one["mbs"] for one in learnt["pieces"]] == [[2, None], [1, 1]]
    assert Path(learnt["file"]).is_file()

    assert main(["estimate", *job, "--json"]) == 0
    estimated = json.loads(capsys.readouterr().out)
    (stage,) = estimated["stages"]
    assert estimated["plan"]["model"]["family"] == "olmo"
    assert "hidden" not in estimated["plan"]["model"], "only what is known of it"
    assert sum(stage["breakdown"].values()) == stage["allocated_bytes"]
    assert stage["modules"] == ["embedding", "layer.0", "layer.1", "final_norm", "head"]
    assert stage["device_bytes"] > stage["reserved_bytes"] >= stage["allocated_bytes"] >= stage["requested_bytes"]
    workspaces = stage["breakdown"]["workspaces"]
    assert stage["moments"]["evaluation"] > stage["static_bytes"] - workspaces
    lines = [line for line in estimated["assumptions"] if line.startswith("from a trace of transformers")]
    assert lines[0].startswith(f"from a trace of transformers {transformers.__version__} on torch 2.")

    assert main(["trace", "--model", path, "--mbs", "2", "--seq", "48", "--json"]) == 0
    traced = {one["name"]: one["traced_bytes"] for one in json.loads(capsys.readouterr().out)["points"]}
    assert max(traced.values()) == stage["requested_bytes"]
    assert 0 <= stage["static_bytes"] - workspaces - traced["between steps"] < 2**20, "blocks that were not split"

    assert f"--model {path} --layers 3` traces it" in error_of(capsys, "estimate", *job, "--layers", "3"), "two alone"
    assert "nothing was learnt of it for fp32, flash attention" in error_of(capsys, "estimate", *job, "--dtype", "fp32")
    assert "batch.seq = 80: is outside the verified range" in error_of(capsys, "estimate", *job, "--seq", "80")
    assert (
        "framework = fsdp: must be single, ddp or deepspeed: its layers are handed tensors in fp32, which fully_shard"
        in error_of(capsys, "estimate", *job, "--framework", "fsdp", "--gpus", "2")
    )
    assert main(["estimate", *job, "--vary", "mbs=1,2,4", "--vary", "optimizer=adamw,adam8bit", "--json"]) == 0
    variants = json.loads(capsys.readouterr().out)["variants"]
    assert len({one["stages"][0]["requested_bytes"] for one in variants}) == 6
    without_torch(job)
    folds(path)

    known = cache.versions()
    monkeypatch.setattr(cache, "versions", lambda: known._replace(torch="2.99.0"))
    lookup.forget()
    assert f"what was learnt of it was of torch {known.torch} and" in error_of(capsys, "estimate", *job)


def without_torch(job: list[str]) -> None:
    """The estimate neither imports torch nor transformers."""
    code = "import sys; sys.modules.update(torch=None, transformers=None)\nfrom memplan.cli import main\n"
    code += f"raise SystemExit(main({['estimate', *job, '-q']!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"Fits: ")


def folds(path: str) -> None:
    """What a search calls, for many sizes: memory grows with both."""
    plans = [
        resolve(read_plan(None, {"model": path, "mbs": str(b), "seq": str(s)}, traced=True).plan)
        for b in (1, 2, 3)
        for s in (16, 32, 64)
    ]
    peaks = [fold(plan)[0].backward_peak for plan in plans]
    assert all(peaks[at] < peaks[at + 1] for at in range(8) if at % 3 < 2)
    assert all(peaks[at] < peaks[at + 3] for at in range(6))


@pytest.mark.usefixtures("here")
def test_what_cannot_be_learnt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Routing by values names the operator and the line of the model's code, and leaves no file."""
    experts = {"num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    path = config(tmp_path / "mine", "flex_olmo", **experts)
    written = json.loads(Path(path).read_text(encoding="utf-8")) | {"experts_implementation": "eager"}
    Path(path).write_text(json.dumps(written), encoding="utf-8")
    line = error_of(capsys, "trace", "--learn", "--model", path)
    assert "cannot be traced: " in line
    assert "modeling_flex_olmo.py:" in line
    assert not list(tmp_path.glob("cache/**/*.gz"))


ADAPTED = ["--model", "{}", "--lora-rank", "8", "--lora-targets", "q_proj"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trace", "--learn", "--model", "gpt2"], "model = gpt2: has a recipe: memplan estimate needs no trace of it"),
        (["trace", "--learn", "--model", "{}", "--hidden", "128"], "--hidden: model.hidden = 128: cannot be changed"),
        (["estimate", "--model", "{}", "--layers", "0"], "--layers: model.layers = 0: must be a whole number from 1"),
        (["estimate", "--model", "{}", "--trainer", "sft"], "trainer.loop = sft: must be none or transformers: trl"),
        (
            ["trace", "--learn", "--model", "{}", "--lora-rank", "8"],
            "lora.targets: is missing: peft has no default for model_type olmo; say --lora-targets all-linear",
        ),
        (["estimate", "--model", "{}", "--lora-targets", "q_proj"], "lora.targets = [q_proj]: needs lora.rank"),
        (
            ["estimate", "--model", "{}", "--quantisation", "nf4"],
            "must be none without adapters: quantised weights cannot be trained; give --lora-rank",
        ),
        (
            ["trace", "--learn", *ADAPTED, "--quantisation", "int8"],
            "quantisation.kind = int8: must be nf4, fp4 or none: other quantised weights are not modelled of an",
        ),
        (
            ["estimate", *ADAPTED, "--quantisation", "gptq", "--dtype", "fp16"],
            "quantisation.kind = gptq: must be nf4, fp4 or none: other quantised weights are not modelled of an",
        ),
        (
            ["trace", "--learn", *ADAPTED, "--quantisation", "nf4", "--versions", "bitsandbytes=0.45"],
            "versions.bitsandbytes = 0.45: must be left out: a trace runs the releases that are installed",
        ),
        (
            ["estimate", *ADAPTED, "--framework", "fsdp", "--gpus", "2", "--fsdp-version", "1"],
            "lora-rank 8, lora-targets q_proj: `memplan trace --learn --model",
        ),
        (
            ["estimate", *ADAPTED, "--framework", "fsdp", "--gpus=2", "--quantisation=nf4", "--kbit-preparation"],
            "quantisation.prepared = true: must be false with framework fsdp: trl and peft leave 4-bit models",
        ),
        (
            [
                "estimate",
                *ADAPTED,
                "--framework",
                "fsdp",
                "--gpus",
                "2",
                "--quantisation",
                "nf4",
                "--quant-storage=fp32",
            ],
            "quantisation.storage = fp32: must be bf16, or uint8 for weights that stay whole",
        ),
        (
            ["estimate", *ADAPTED, "--framework", "deepspeed", "--gpus", "2", "--zero", "3"],
            "--lora-dtype bf16 --framework deepspeed --zero 3` traces it once",
        ),
        (
            [
                "estimate",
                *ADAPTED,
                "--framework",
                "deepspeed",
                "--gpus",
                "2",
                "--quantisation=nf4",
                "--kbit-preparation",
            ],
            "quantisation.prepared = true: must be false with framework deepspeed: its engine casts what",
        ),
        (
            ["estimate", *ADAPTED, "--framework", "fsdp", "--gpus", "2", "--recompute", "full"],
            "--recompute full --lora-rank 8 --lora-targets q_proj --lora-dtype bf16` traces it once (needs torch and",
        ),
        (
            ["estimate", *ADAPTED, "--quantisation", "nf4", "--double-quantisation"],
            "--lora-targets q_proj --quantisation nf4 --double-quantisation` traces it once (needs torch and peft and",
        ),
        (
            [
                "estimate",
                *ADAPTED,
                "--modules-to-save",
                "lm_head",
                "--framework",
                "deepspeed",
                "--dp",
                "2",
                "--zero",
                "3",
            ],
            "lora.modules_to_save = [lm_head]: must be left out at stage 3, whose hooks at peft's wrapper",
        ),
        (
            ["estimate", *ADAPTED, "--modules-to-save", "lm_head", "--framework=fsdp", "--fsdp-version=1", "--dp", "2"],
            "lora.modules_to_save = [lm_head]: must be left out with fsdp.version 1, where each is a unit",
        ),
        (
            ["estimate", *ADAPTED, "--modules-to-save", "lm_head"],
            "--lora-targets q_proj --modules-to-save lm_head` traces it once",
        ),
        (
            ["suggest-partition", "--model", "{}", "--gpu", "h100", "--gbs", "8"],
            "nothing was learnt of it for bf16, flash attention: `memplan trace --learn",
        ),
    ],
)
def test_wrong_inputs(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = config(tmp_path / "mine")
    assert said in error_of(capsys, *(one.format(path) for one in arguments))


ASKED = {
    "nothing": [],
    "fp32": ["--dtype", "fp32"],
    "fp32 with flash": ["--dtype", "fp32", "--attention", "flash"],
    "autocast": ["--autocast"],
    "autocast over bf16": ["--autocast", "--autocast-parameters", "bf16"],
    "autocast in fp16": ["--autocast", "--dtype", "fp16", "--attention", "eager"],
    "parameters that are the default": ["--autocast", "--autocast-parameters", "fp32"],
    "eager and recomputed": ["--attention", "eager", "--recompute", "full"],
    "frozen": ["--freeze-embedding", "--freeze-layers", "1"],
    "frozen in fp32": ["--dtype", "fp32", "--freeze-layers", "2", "--layers", "3"],
    "adapters": ["--lora-rank", "8", "--lora-targets", "q_proj,v_proj", "--lora-dropout", "0.1"],
    "under DDP": ["--framework", "ddp", "--dp", "2", "--gbs", "16", "--recompute", "full"],
    "4-bit weights": ["--lora-rank", "8", "--lora-targets", "q_proj", "--quantisation", "fp4", "--double-quantisation"],
    "prepared": ["--lora-rank", "8", "--lora-targets", "q_proj", "--quantisation", "nf4", "--kbit-preparation"],
    "under ZeRO": [
        "--lora-rank",
        "8",
        "--lora-targets",
        "q_proj",
        "--framework",
        "deepspeed",
        "--dp",
        "2",
        "--zero",
        "2",
    ],
    "what changes no trace": ["--mbs", "2", "--optimizer", "sgd", "--momentum", "0.9", "--seq", "48"],
}
"""Plans, as flags of ``estimate``."""


@pytest.mark.parametrize("positions", [64, None])
@pytest.mark.parametrize("asked", ASKED)
def test_what_is_advised_is_what_was_asked_for(
    asked: str, positions: int | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = config(tmp_path / "my models")
    if positions is None:
        written = json.loads(Path(path).read_text(encoding="utf-8"))
        del written["max_position_embeddings"]
        Path(path).write_text(json.dumps(written), encoding="utf-8")
    flags = [*ASKED[asked], *(["--seq", "32"] if positions is None and "--seq" not in ASKED[asked] else [])]
    line = error_of(capsys, "estimate", "--model", path, *flags)
    command = shlex.split(re.findall("`(.*?)`", line)[0])
    assert command[:5] == ["memplan", "trace", "--learn", "--model", path]
    assert settings_under(command[3:]) == settings_under(["--model", path, *flags])
    assert len(command) <= 5 + len(flags), "no more than was asked for"


def settings_under(words: list[str]) -> lookup.Settings:
    """What a fit is kept under, of a plan that is read from flags."""
    flags: dict[str, str] = {}
    for at, word in enumerate(words):
        if word.startswith("--"):
            following = words[at + 1 : at + 2]
            flags[word[2:]] = "true" if not following or following[0].startswith("--") else following[0]
    plan = resolve(read_plan(None, flags, traced=True).plan)
    return lookup.settings_of(lookup.job_of(plan), plan.model.layers)


def test_what_was_not_learnt_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = config(tmp_path / "mine")
    asked = ["--autocast", "--autocast-parameters", "bf16", "--freeze-layers", "1", "--recompute", "full"]
    line = error_of(capsys, "estimate", "--model", path, *asked[:3], "--recompute", "full")
    assert "for bf16, flash attention, autocast, autocast-parameters bf16, recompute full: `" in line
    line = error_of(capsys, "estimate", "--model", path, *asked[3:])
    assert "for bf16, flash attention, recompute full, freeze-layers 1: `" in line


def test_no_longest_sequence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5", "num_layers": 1}', encoding="utf-8")
    line = error_of(capsys, "estimate", "--model", str(tmp_path))
    assert "batch.seq: is missing, and the model's configuration names no maximum sequence length" in line
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1}', encoding="utf-8")
    assert "there is no recipe of it: hidden_size: is missing" in error_of(capsys, "estimate", "--model", str(tmp_path))


@pytest.mark.parametrize("command", [["estimate"], ["trace", "--learn"]])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--framework", "megatron", "--dp", "8"], "framework = megatron: must be single, ddp, deepspeed or fsdp"),
        (
            ["--framework", "fsdp", "--dp", "8", "--fsdp-version", "1", "--autocast"],
            "precision.autocast = true: must be false with fsdp.version 1: mixed is not modelled",
        ),
        (
            ["--framework", "fsdp", "--dp", "8", "--no-gradient-sync", "--gbs", "64"],
            "fsdp.gradient_sync = false: must be true: gradients reduced once are not modelled",
        ),
        (
            ["--framework", "deepspeed", "--dp", "8", "--zero", "3", "--trainer", "sft"],
            "trainer.loop = sft: must be none or transformers: trl's loss is not",
        ),
        (
            ["--framework", "ddp", "--dp", "2", "--zero", "1"],
            "layout.zero = 1: must be 0: not modelled for an architecture without a recipe\n",
        ),
        (
            ["--trainer", "transformers", "--eval-batches", "2"],
            "trainer.evaluation_batches = 2: must be left out: not modelled for an architecture without a recipe",
        ),
        (["--framework", "ddp", "--dp", "2", "--gradient-as-bucket-view"], "ddp.gradient_as_bucket_view = true: must"),
    ],
)
def test_refused_without_a_trace(
    command: list[str],
    flags: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever was learnt; no process is started."""
    monkeypatch.setattr(sys, "executable", "/nowhere")
    path = config(tmp_path / "mine")
    assert said in error_of(capsys, *command, "--model", path, *flags)


@pytest.mark.parametrize("command", [["estimate"], ["trace", "--learn"]])
def test_home_that_is_not_known(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.VARIABLE, "~nosuchuser/x")
    monkeypatch.setattr(sys, "executable", "/nowhere")
    line = error_of(capsys, *command, "--model", config(tmp_path / "mine"), "--seq", "64")
    assert "environment: MEMPLAN_CACHE = ~nosuchuser/x: must be a directory: no home directory is known" in line
