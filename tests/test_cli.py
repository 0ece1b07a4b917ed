"""The command line: exit codes, one line for every wrong input, and output that others can read."""

# ruff: noqa: E501 (tables of inputs and the lines that they get)

from __future__ import annotations

import importlib.util
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from memplan import __version__
from memplan.cli import main
from memplan.plan.fields import by_flag
from memplan.plan.library import examples, model_specs
from memplan.plan.read import read_plan

Run = Callable[..., tuple[int, str, str]]

needs_estimate = pytest.mark.skipif(
    importlib.util.find_spec("memplan.estimate") is None, reason="memplan.estimate is not there yet"
)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``memplan`` in an empty folder: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["estimate", "nothere.yaml"], "nothere.yaml: no such file"),
        (["estimate"], "command line: model: is missing: name one"),
        (["estimate", "."], ".: is a directory; name a file in it"),
        (["estimate", "--model", "lama-3-8b"], "--model: model = lama-3-8b: is neither a built-in model"),
        (["estimate", "--model", "gpt2", "--tp", "-1"], "--tp: layout.tp = -1: must be at least 1"),
        (["estimate", "--model", "gpt2", "--tp", "1.5"], "--tp: layout.tp = 1.5: must be a whole number"),
        (["estimate", "--model", "gpt2", "--gbs", "9" * 30], "--gbs: batch.gbs = 999999999999999999999999999999: must "
        "be at most"),
        (["estimate", "--tpp", "3"], "--tpp: is not a flag of memplan estimate; did you mean --tp?"),
        (["estimate", "--from", "megatron", "x"], "x: no such file"),
        (["estimate", "--model", "gpt2", "--gpu", "A100"], "could be a100-40gb or a100-80gb; name one"),
        (["estimate", "--model", "gpt2", "--capacity", "3furlongs"], "--capacity: hardware.capacity = 3furlongs: must "
        "be bytes, or a size with a unit (KiB"),
        (["estimate", "--zzzzzz"], "--zzzzzz: is not a flag of memplan estimate; --help-all lists them"),
        (["estimate", "--json=x"], "option '--json' does not take a value"),
        (["estimate", "--tp"], "--tp: needs a value: tensor-parallel size"),
        (["estimate", "a", "b"], "command line: a and b are no launch files of one job; --compare puts plans side by "
        "side"),
        (["estimate", "a.json", "b.yaml", "--gpu", "h100"], "a.json: no such file"),
        (["estimat"], "memplan: no such command 'estimat'"),
        (["estimate", "llama-3-8b", "--vary", "optimser=adam"], "--vary: 'optimser' is not a field that can vary"),
        (["estimate", "llama-3-8b", "--vary", "tp"], "--vary: tp: needs values, as --vary tp=A,B"),
        (["estimate", "llama-3-8b", "--compare", "llama-3-8b"], "command line: plan = llama-3-8b: is there twice"),
        (["estimate", "llama-3-8b", "--compare", "nothere.yaml"], "nothere.yaml: no such file"),
        (["estimate", "llama-3-8b", "--vary", "mbs=" + ",".join(map(str, range(1, 99)))], "--vary: makes 98 variants; "
        "at most 64"),
        (["estimate", "llama-3-8b", "--detail", "x"], "memplan estimate: invalid value for '--detail'"),
        (["estimate", "llama-3-8b", "--mbs", "100000000"], "--mbs: batch.mbs = 100000000: needs "),
        (["estimate", "llama-3-8b", "--detail", "0", "--vary", "mbs=1,2"], "--detail shows one plan's stage"),
        (["init", "--model", "gpt2", "--tp", "x"], "--tp: layout.tp = x: must be a whole number"),
        (["init", "--example", "lama"], "--example: example = lama: is not a built-in example"),
        (["init", "nofolder/plan.yaml"], "nofolder/plan.yaml: there is no folder nofolder"),
    ],
)  # fmt: skip
def test_wrong_input_gives_one_line_and_2(run: Run, arguments: list[str], line: str) -> None:
    code, out, err = run(*arguments)
    assert line in err
    assert (code, out, err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("form", [[], ["--json"], ["--csv"]])
def test_a_variant_that_is_refused_is_told_in_a_line_and_the_others_are_answered(run: Run, form: list[str]) -> None:
    code, out, err = run("estimate", "gpt2-xl-8gpu", "--vary", "mbs=1,x", *form)
    assert (code, err) == (2, "--vary mbs: batch.mbs = x: must be a whole number\n")
    assert "mbs=1" in out


BAD_PLANS = {
    "syntax": ("model: gpt2\nlayout: {tp: 1\n", "plan.yaml:2: is not valid YAML"),
    "unknown field": ("model: gpt2\nlayout: {tpp: 1}\n", "plan.yaml:2: layout.tpp: is not a field"),
    "negative": ("model: gpt2\nbatch: {mbs: -1}\n", "plan.yaml:2: batch.mbs = -1: must be at least 1"),
    "zero": ("model: gpt2\nbatch: {seq: 0}\n", "plan.yaml:2: batch.seq = 0: must be at least 1"),
    "huge": ("model: {base: gpt2, layers: 100001}\n", "plan.yaml:1: model.layers = 100001: must be at most 1,024"),
    "not whole": ("model: gpt2\nbatch: {mbs: 1.5}\n", "plan.yaml:2: batch.mbs = 1.5: must be a whole number"),
    "latin": (b"model: gpt2 # \xe9\n", "plan.yaml:1: is not UTF-8 text"),
    "laughs": (
        "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
        "takes more work to read than the limit of 4,000,000 steps",
    ),
    "empty": ("", "plan.yaml: is empty"),
    "auto_map": ("model: evil\n", "evil/config.json:1: model_type = evil: is not an architecture that is modelled "
    "(code"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_wrong_plan_gives_one_line_and_2(run: Run, name: str) -> None:
    text, line = BAD_PLANS[name]
    Path("plan.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    Path("evil").mkdir()
    Path("evil/config.json").write_text('{"model_type": "evil", "auto_map": {"AutoConfig": "code.Evil"}}')
    Path("evil/code.py").write_text("open('ran', 'w')")
    code, out, err = run("estimate", "plan.yaml")
    assert line in err
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert not Path("ran").exists()


@needs_estimate
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("model: bigscience-104b\nframework: megatron-deepspeed\nlayout:\n  tp: 7\n", "plan.yaml:4: layout.tp = 7: "
        "must divide the 80"),
        ("model: gpt2\nframework: megatron-deepspeed\nlayout: {pp: 13}\n", "plan.yaml:3: layout.pp = 13: must be at "
        "most the 12"),
        ("model: gpt2\nframework: megatron-deepspeed\nlayout: {pp: 2}\npipeline: {partition: "
        "'0,9,12'}\n", "plan.yaml:4: pipeline.partition"),
        ("model: gpt2\nframework: device-map\ndevice_map: {0: 0-4, 1: 6-11}\n", "plan.yaml:3: device_map: misses "
        "layer 5"),
        ("model: gpt2\nhardware: {gpu: h100-80}\n", "plan.yaml:2: hardware.gpu = h100-80: is not a known GPU"),
    ],
)  # fmt: skip
def test_a_contradiction_gives_one_line_and_2(run: Run, text: str, line: str) -> None:
    Path("plan.yaml").write_text(text)
    code, out, err = run("estimate", "plan.yaml")
    assert line in err
    assert (code, out, err.count("\n")) == (2, "", 1)


@needs_estimate
def test_estimate_says_whether_it_fits(run: Run) -> None:
    code, out, err = run("estimate", "llama-3-8b")
    assert (code, err) == (0, "")
    assert out
    assert run("estimate", "llama-3-8b", "--gpu", "v100-16gb")[0] == 1
    assert run("estimate", "--model", "gpt2")[0] == 0


@needs_estimate
def test_json_is_the_only_thing_on_standard_output(run: Run) -> None:
    code, out, err = run("estimate", "llama-3-8b", "--json")
    found = json.loads(out)
    assert (code, err, found["schema"], found["fits"]) == (0, "", 1, True)
    assert found["plan"]["layout"]["dp"] == 1
    assert "\x1b" not in out


@needs_estimate
def test_plans_and_values_stand_side_by_side(run: Run) -> None:
    code, out, _ = run("estimate", "llama-3-8b", "--vary", "optimizer=adamw,adam8bit", "mbs=1,2", "--json")
    variants = json.loads(out)["variants"]
    assert [variant["name"] for variant in variants] == [
        f"optimizer={name} mbs={mbs}" for name in ("adamw", "adam8bit") for mbs in (1, 2)
    ]
    assert code == (0 if all(variant["fits"] for variant in variants) else 1)
    _, out, _ = run("estimate", "--compare", "gpt2-xl-4gpu", "gpt2-xl-8gpu", "--json")
    assert [variant["name"] for variant in json.loads(out)["variants"]] == ["gpt2-xl-4gpu", "gpt2-xl-8gpu"]
    code, out, _ = run("estimate", "llama-3-8b", "--compare", "gpt2-xl-4gpu", "--no-color")
    assert "gpt2-xl-4gpu" in out
    assert "\x1b" not in out


@needs_estimate
@pytest.mark.parametrize("name", examples())
def test_every_example_is_estimated(run: Run, name: str) -> None:
    code, out, err = run("estimate", name, "--json")
    assert code in (0, 1)
    assert err == ""
    assert json.loads(out)["stages"]


@needs_estimate
def test_detail_shows_one_stage(run: Run) -> None:
    code, out, err = run("estimate", "llama-3-8b", "--detail", "0")
    assert (code, err) == (0, "")
    assert "layer.0" in out
    code, _, err = run("estimate", "llama-3-8b", "--detail", "1")
    assert (code, err.count("\n")) == (2, 1)


@needs_estimate
def test_code_of_a_configuration_is_not_run_and_a_warning_says_so(run: Run) -> None:
    sizes = {
        "vocab_size": 100,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    Path("config.json").write_text(
        json.dumps({"model_type": "llama", "auto_map": {"AutoConfig": "code.Evil"}, **sizes})
    )
    Path("code.py").write_text("open('ran', 'w')")
    code, out, _ = run("estimate", "--model", "config.json", "--json")
    assert code == 0
    assert any("was not run" in warning["message"] for warning in json.loads(out)["warnings"])
    assert not Path("ran").exists()


@needs_estimate
def test_what_a_plan_leaves_open_or_says_in_vain_is_told(run: Run) -> None:
    flags = ("--model", "llama-3-405b", "--layers", "1", "--env", "PYTORCH_CUDA_ALLOC_CNF=a")
    code, out, _ = run("estimate", *flags, "--json")
    warnings = [(warning["code"], warning["message"]) for warning in json.loads(out)["warnings"]]
    assert code == 0
    assert warnings[:2] == [
        (
            "environment-ignored",
            "PYTORCH_CUDA_ALLOC_CNF is not read by memplan; did you mean PYTORCH_CUDA_ALLOC_CONF?",
        ),
        ("seq-default", "seq is 4096, because no length was given; the model's maximum is 131072 tokens"),
    ]


def test_standard_input_can_be_read_only_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"model: gpt2")))
    code, out, err = run("estimate", "-", "--compare", "-")
    assert (code, out) == (2, "")
    assert "standard input: can be read only once" in err


def test_version_and_help(run: Run) -> None:
    assert run("--version") == (0, f"memplan {__version__}\n", "")
    for arguments in ([], ["--help"], ["-h"]):
        code, out, err = run(*arguments)
        assert (code, err) == (0, "")
        assert "suggest-partition" in out


def test_the_whole_help_of_estimate_has_every_flag(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    code, out, _ = run("estimate", "--help-all")
    assert code == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    for name in by_flag():
        assert f"--{name}" in plain or f"--no-{name}" in plain


@pytest.mark.parametrize("command", ["estimate", "suggest-partition", "validate", "explain", "export"])
def test_the_help_fits_two_screens(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Of 80 columns; the flags that most people use, a line each."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(command, "--help")
    lines = out.splitlines()
    assert code == 0
    assert len(lines) <= 50
    assert "<" not in out
    assert f"\nFor example: memplan {command} " in out
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("  --") for line in lines) >= 20
    assert lines[-1] == f"All flags: memplan {command} --help-all"
    assert len(run(command, "--help-all")[1].splitlines()) > 400


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("memplan sug", {"suggest-partition"}),
        ("memplan estimate --gpu h100", {"h100-80gb", "h100-94gb", "h100-96gb", "h100-pcie"}),
        ("memplan estimate --model smollm2-1", {"smollm2-1.7b", "smollm2-135m"}),
        ("memplan estimate --framework meg", {"megatron", "megatron-deepspeed"}),
        ("memplan estimate bigscience", {"bigscience-104b-250k"}),
        ("memplan validate --lora-r", {"--lora-rank"}),
        ("memplan explain run.log big", {"bigscience-104b-250k"}),
        ("memplan estimate --compare big", {"bigscience-104b-250k"}),
        ("memplan estimate --from torch", {"torchtitan"}),
        ("memplan export --to dev", {"device-map"}),
        ("memplan estimate --vary optimizer-im", {"optimizer-implementation="}),
        ("memplan estimate --vary dtype=", {"dtype=fp32", "dtype=fp16", "dtype=bf16"}),
        ("memplan estimate --vary dtype=bf16,fp", {"dtype=bf16,fp32", "dtype=bf16,fp16"}),
        ("memplan estimate --vary mbs=1,", set()),
    ],
)
def test_a_shell_completes(run: Run, monkeypatch: pytest.MonkeyPatch, words: str, offered: set[str]) -> None:
    monkeypatch.setenv("_MEMPLAN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    code, out, _ = run()
    assert (code, {*out.split()}) == (0, offered)


def test_models_lists_every_spec(run: Run) -> None:
    code, out, _ = run("models")
    assert code == 0
    assert all(name in out for name in model_specs())
    _, out, _ = run("models", "--json")
    assert {model["name"]: model["parameters"] for model in json.loads(out)}["bert-5.1b"] == 5_125_136_643


def test_gpus_lists_every_gpu(run: Run) -> None:
    code, out, _ = run("gpus")
    assert code == 0
    assert "v100-32gb" in out
    assert "32,510" in out
    _, out, _ = run("gpus", "--json")
    assert {gpu["name"] for gpu in json.loads(out)} >= {"a100-80gb", "h100-80gb", "h200"}


def test_schema_is_json(run: Run) -> None:
    code, out, _ = run("schema")
    assert code == 0
    assert json.loads(out)["title"] == "memplan plan"


def test_init_writes_a_plan_that_reads_back(run: Run) -> None:
    code, out, err = run(
        "init", "plan.yaml", "--model", "llama-3-8b", "--gpu", "h200", "--env", "A=1", "--env", "B=x y"
    )
    assert (code, out, err) == (0, "", "")
    plan = read_plan("plan.yaml").plan
    assert (plan.model.name, plan.hardware.gpu, plan.environment) == ("llama-3-8b", "h200", {"A": "1", "B": "x y"})
    _, out, _ = run("init")
    assert out.startswith("# A plan for memplan")


def test_init_never_overwrites_unless_told(run: Run) -> None:
    Path("plan.yaml").write_text("mine")
    code, _, err = run("init", "plan.yaml")
    assert (code, err) == (2, "plan.yaml: is there already; --overwrite replaces it\n")
    assert Path("plan.yaml").read_text() == "mine"
    assert run("init", "plan.yaml", "--force")[0] == 0
    assert Path("plan.yaml").read_text().startswith("# A plan")
    assert [path.name for path in Path().iterdir()] == ["plan.yaml"]


def test_init_copies_an_example(run: Run) -> None:
    assert run("init", "plan.yaml", "--example", "gpt2-xl-4gpu")[0] == 0
    assert read_plan("plan.yaml").plan == read_plan("gpt2-xl-4gpu").plan


WORDS = st.sampled_from(
    [*(f"--{name}" for name in by_flag()), "--json", "--vary", "--compare", "-v", "llama-3-8b", "--"]
)
ARGUMENTS: Any = st.lists(WORDS | st.text(max_size=6) | st.integers(-9, 99).map(str) | st.just("tp=1,2"), max_size=6)


@needs_estimate
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=ARGUMENTS)
@example(arguments=["~\0"])
def test_any_arguments_give_a_result_or_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", None)
    code = main(["estimate", *arguments])
    captured = capsys.readouterr()
    assert code in (0, 1, 2)
    if code == 2:
        assert captured.err.count("\n") == 1
    else:
        assert captured.err == ""


def test_the_shells_allocator_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the machine on which memplan runs, and changes no figure unless the plan has it."""
    plain = run("estimate", "--model", "gpt2", "--gpu", "h100")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    code, out, err = run("estimate", "--model", "gpt2", "--gpu", "h100")
    assert (code, out) == plain[:2]
    assert "expandable_segments:True of this shell is not in the plan: --env PYTORCH_CUDA_ALLOC_CONF=" in err
    assert run("estimate", "--model", "gpt2", "--gpu", "h100", "-q")[2] == ""
    assert run("estimate", "--model", "gpt2", "--env", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")[2] == ""
