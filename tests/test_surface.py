"""``import memplan``: the command line's answers as values."""

from __future__ import annotations

import inspect
import io
import json
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import memplan
import memplan.estimate  # a module of the same name: the function stays
from memplan.cli import main
from memplan.records.database import open_database

ROOT = Path(__file__).parents[1]
JOB: dict[str, object] = {"model": "llama-3-8b", "gpus": 8, "gpu": "h100", "framework": "fsdp"}
SECTIONS: dict[str, object] = {
    "model": {"base": "llama-3-8b", "layers": 4},
    "framework": "megatron",
    "hardware": {"gpu": "A100-80GB", "gpus": 4},
    "layout": {"tp": 2},
    "batch": {"mbs": 1, "gbs": 8, "seq": "2k"},
    "optimizer": "adam",
    "environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
}

_SPREAD = ["--model=gpt2", "--tp=2", "--gpus=2", "--sequence-parallel", "--framework=megatron"]


def commanded(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) in (0, 1)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_import_is_quick_and_brings_nothing() -> None:
    code = (
        "import sys, time; before = set(sys.modules); start = time.process_time(); import memplan;"
        "print(1000 * (time.process_time() - start), *set(sys.modules) - before)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True) for _ in range(3)]
    assert {name for run in runs for name in run.stdout.split()[1:]} == {"memplan"}
    assert min(float(run.stdout.split()[0]) for run in runs) < 20


def test_every_name_is_there_and_functions_stay_functions() -> None:
    assert {name for name in memplan.__all__ if getattr(memplan, name, None) is None} == set()
    assert set(memplan.__all__) <= set(dir(memplan))
    assert callable(memplan.estimate)
    with pytest.raises(AttributeError, match="no attribute 'estimat'"):
        memplan.estimat  # type: ignore[attr-defined]  # noqa: B018


def test_names_and_arguments_are_those_that_are_promised() -> None:
    """docs/python.md says every function with its arguments and their defaults; a name that is there stays."""
    errors, answers = {"PlanError", "LackingError"}, {"Plan", "Estimate", "Suggestion", "Explanation", "Record"}
    functions = {"read_plan", "estimate", "suggest", "explain", "validate"}
    assert set(memplan.__all__) == {"__version__", *errors, *answers, *functions}
    promised = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    for name in sorted(functions):
        signature = inspect.signature(getattr(memplan, name))
        said = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
        words = str(signature.replace(parameters=said)).replace("'", '"')
        result = str(signature.return_annotation).rpartition(".")[2]
        assert f"`{name}{words.partition(' -> ')[0]} -> {result}`" in promised
    for name in sorted(answers - {"Plan"}):
        assert {"to_dict", "to_html"} <= set(dir(getattr(memplan, name)))


@pytest.mark.parametrize(
    ("given", "fields", "arguments"),
    [
        (JOB, {}, ["--model", "llama-3-8b", "--gpus", "8", "--gpu", "h100", "--framework", "fsdp"]),
        (None, {**JOB, "mbs": 2}, ["--model", "llama-3-8b", "--gpus=8", "--gpu=h100", "--framework=fsdp", "--mbs=2"]),
        ("gpt2-xl-4gpu", {"recompute": "full"}, ["gpt2-xl-4gpu", "--recompute", "full"]),
        ({"model": "gpt2", "gpus": 2}, {}, ["--model", "gpt2", "--gpus", "2"]),  # whose framework is chosen
        (
            {"model": "gpt2", "sequence-parallel": True, "tp": 2, "gpus": 2, "framework": "megatron"},
            {"env": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}},
            [*_SPREAD, "--env", "CUBLAS_WORKSPACE_CONFIG=:4096:8"],
        ),
        (
            {"model": "gpt2", "device_map": {0: "0-5", 1: "6-11"}, "framework": "device-map"}, {},
            ["--model", "gpt2", "--framework", "device-map", "--device-map", "{0: 0-5, 1: 6-11}"],
        ),
    ],
)  # fmt: skip
def test_an_estimate_is_the_commands(
    given: Any, fields: dict[str, Any], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = commanded(capsys, "estimate", *arguments)
    assert memplan.estimate(given, **fields).to_dict() == expected
    plan = memplan.read_plan(given, **fields)
    assert memplan.estimate(plan).to_dict() == expected
    assert memplan.estimate(pickle.loads(pickle.dumps(plan))).to_dict() == expected


def test_sections_are_those_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(SECTIONS), encoding="utf-8")
    expected = commanded(capsys, "estimate", str(tmp_path / "plan.json"))
    assert memplan.estimate(SECTIONS).to_dict() == expected
    assert memplan.estimate(tmp_path / "plan.json").to_dict() == expected
    assert memplan.estimate(memplan.read_plan(SECTIONS), mbs=2).to_dict() == commanded(
        capsys, "estimate", str(tmp_path / "plan.json"), "--mbs", "2"
    )


def test_a_launch_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.json"
    script.write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}), encoding="utf-8")
    plan = memplan.read_plan(script, from_="deepspeed", model="gpt2", gpus=4, mbs=2)
    words = ["--from", "deepspeed", str(script), "--model", "gpt2", "--gpus", "4", "--mbs", "2", "--gpu", "h100"]
    assert memplan.estimate(plan, gpu="h100").to_dict() == commanded(capsys, "estimate", *words)


def test_a_plan_that_was_changed_is_read_as_it_is() -> None:
    plan = memplan.read_plan(JOB)
    wider = plan.model_copy(update={"batch": plan.batch.model_copy(update={"mbs": 2})})
    assert memplan.estimate(wider) == memplan.estimate(plan, mbs=2)
    assert memplan.estimate(wider, seq=2048).peak == memplan.estimate(plan, mbs=2, seq=2048).peak
    assert memplan.read_plan(plan) == plan


def test_a_suggestion_is_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    def without_time(found: dict[str, Any]) -> dict[str, Any]:
        return {**found, "search": {**found["search"], "seconds": None}}

    job = {**JOB, "layers": 4, "gbs": 16}
    words = [f"--{name}={value}" for name, value in job.items()]
    expected = commanded(capsys, "suggest-partition", *words, "--mbs=2", "--fix=recompute=full", "--objective=memory")
    found = memplan.suggest(job, mbs=2, fix=["recompute=full"], objective="memory")
    assert without_time(found.to_dict()) == without_time(expected)
    assert found.plan is not None
    assert memplan.estimate(found.plan).peak == found.found.best[0].needs
    assert repr(found).startswith("<Recommended: ")
    chosen = memplan.suggest(model="gpt2", gpus=2, gpu="h100", gbs=8)
    assert "frameworks" in chosen.to_dict()


def test_what_is_left_open_is_left_to_the_search() -> None:
    """``--mbs auto`` of the command line."""
    job = {**JOB, "layers": 2, "gbs": 8}
    left, opened = (memplan.suggest({**job}, **more, top=1).plan for more in ({}, {"mbs": "auto"}))
    assert left is not None
    assert left == opened


@pytest.mark.usefixtures("here")
def test_a_run_is_kept_as_the_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEMPLAN_DATA", str(tmp_path))
    job = {"model": "gpt2", "layers": 2, "seq": 64, "attention": "eager", "framework": "single"}
    run = memplan.validate(job, device="fake")
    assert run.verdict == "agrees"
    assert run.to_dict() == commanded(capsys, "runs", run.id)
    assert repr(run) == f"<Run {run.id}: agrees>"
    with open_database() as database:
        assert database.ids() == [run.id]


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"gpu": "h1000"}, "argument gpu: hardware.gpu = h1000: is not a known GPU"),
        ({"gpuz": 8}, "argument: gpuz: is not a field of a plan; did you mean gpu?"),
        ({"gpus_per_nod": 4}, "argument: gpus_per_nod: is not a field of a plan; did you mean gpus_per_node?"),
        ({"layout": {"tp": "x"}}, "argument layout: layout.tp = x: must be a whole number"),
        ({"sequence_parallel": "maybe"}, "argument sequence_parallel: layout.sequence_parallel = maybe: must be"),
        ({"tp": 3, "framework": "megatron"}, "argument gpus: hardware.gpus = 8: must be a multiple of tp"),
        ({7: 8}, "plan: 7 is no name of a field"),
        ({"model": "no<b>such"}, "argument model: model = no<b>such: is neither"),
    ],
)
def test_errors_name_the_argument(fields: dict[str, object], line: str) -> None:
    with pytest.raises(memplan.PlanError) as error:
        memplan.estimate({**JOB, **fields})
    assert str(error.value).startswith(line)


def test_an_answer_prints_as_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "gpt2-xl-4gpu"]) in (0, 1)
    expected = capsys.readouterr().out
    found = memplan.estimate("gpt2-xl-4gpu")
    out = io.StringIO()
    Console(file=out, width=80, highlight=False).print(found, end="")
    assert out.getvalue() == expected
    assert str(found).split() != []
    assert repr(found) == f"<{expected.splitlines()[0]}>" or repr(found)[1:40] == expected[:39]


def test_an_answer_is_the_commands_page(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert main(["estimate", "gpt2-xl-4gpu", "--html", str(out)]) in (0, 1)
    assert memplan.estimate("gpt2-xl-4gpu").to_html() == out.read_text(encoding="utf-8")


def test_an_explanation_has_a_page() -> None:
    said = "CUDA out of memory. Tried to allocate 3.82 GiB <script>alert(1)</script>"
    html = memplan.explain(said, "bigscience-104b-250k", mbs=8).to_html()
    assert "logits_fp32" in html
    assert "<script>alert" not in html


def test_html_of_a_notebook_escapes_names(tmp_path: Path) -> None:
    place = tmp_path / "<script>alert(1)<"
    place.mkdir()
    config = json.loads((ROOT / "tests/golden/configs/gpt2.json").read_text(encoding="utf-8"))
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    html = memplan.estimate(model=place)._repr_html_()
    assert "&lt;script&gt;" in html
    assert "<script>" not in html


# -- the sweep ------------------------------------------------------------------------------------------------


def test_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((ROOT / "docs/sweep.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names: dict[str, Any] = {}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        assert cell["outputs"] == []
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert len(cells) >= 4
    rows = names["rows"]
    assert {row["fits"] for row in rows} == {True, False}
    for one, more in pairwise(rows):
        assert one["seq"] != more["seq"] or one["recompute"] != more["recompute"] or one["peak"] < more["peak"]
    assert isinstance(names["found"], memplan.Suggestion)
    assert capsys.readouterr().out


def test_launch_files_are_known_by_what_stands_in_them(tmp_path: Path) -> None:
    file = tmp_path / "arguments.json"
    file.write_text('{"model_name_or_path": "gpt2", "per_device_train_batch_size": 2, "block_size": 512}')
    found = memplan.read_plan(file, gpus=4)
    assert (found.framework, found.batch.mbs, found.batch.seq) == ("ddp", 2, 512)
    assert found.model_dump() == memplan.read_plan(file, from_="trainer", gpus=4).model_dump()


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"batch_size": 4}, "argument: batch_size: is not a field of a plan; did you mean mbs?"),
        ({"gradient_checkpointing": True}, "did you mean recompute full?"),
        ({"foo": 1, "bf16": True}, "2 errors: (1) argument: foo: is not a field of a plan (2) argument: bf16: "),
        ({"gpu": "a100", "dtype": "fp33"}, "2 errors: (1) argument gpu: hardware.gpu = a100: "),
    ],
)
def test_errors_of_values_in_python_name_arguments(fields: dict[str, object], line: str) -> None:
    for given in ((memplan.estimate, {"model": "gpt2", **fields}), (memplan.estimate, {"model": "gpt2"}, fields)):
        function, plan, *more = given
        with pytest.raises(memplan.PlanError) as caught:
            function(plan, **(more[0] if more else {}))
        assert line in str(caught.value)
        assert "command line" not in str(caught.value)


def test_no_flags_in_errors_of_python() -> None:
    for call in (
        lambda: memplan.estimate(),
        lambda: memplan.suggest({"model": "gpt2"}),
        lambda: memplan.suggest({"model": "gpt2"}, gpus="auto"),
        lambda: memplan.estimate("x"),
    ):
        with pytest.raises(memplan.PlanError) as caught:
            call()
        assert "command line" not in str(caught.value)
        assert "--" not in str(caught.value)


def test_a_command_in_an_error_of_python_stays_one(tmp_path: Path) -> None:
    written = tmp_path / "tune.yaml"
    written.write_text("model: {_component_: torchtune.models.llama3_1.llama3_1_8b}\nbatch_size: 2\n")
    with pytest.raises(memplan.PlanError, match=r"memplan estimate --model llama-3\.1-8b --mbs 2 .*--gpus N$"):
        memplan.estimate(written)


def test_wrong_kinds_of_values_in_python() -> None:
    with pytest.raises(memplan.PlanError, match=r"a plan is a path, an example's name, .*, not 3$"):
        memplan.estimate(3)  # type: ignore[arg-type]
    for message in (None, Path("run.log")):
        with pytest.raises(memplan.PlanError, match="argument: message: is the text of a message or a log"):
            memplan.explain(message)  # type: ignore[arg-type]


@pytest.mark.parametrize("fix", [3, [3], ["tp", None]])
def test_what_is_kept_is_said_by_names(fix: object) -> None:
    with pytest.raises(memplan.PlanError, match=r"argument: fix = (3|None): must be names of fields"):
        memplan.suggest(model="gpt2", gpu="h100", gpus=2, gbs=8, fix=fix)  # type: ignore[arg-type]


def test_names_of_other_tools_in_python() -> None:
    found = memplan.estimate({"model": "gpt2", "num_gpus": 2}, per_device_train_batch_size=2, framework="ddp")
    assert (found.plan.hardware.gpus, found.plan.batch.mbs) == (2, 2)
