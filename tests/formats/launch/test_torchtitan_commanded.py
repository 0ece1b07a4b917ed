"""torchtitan's own command line, given to memplan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memplan.cli import main
from memplan.formats import as_settings

MADE = Path(__file__).parents[2] / "golden" / "launch" / "torchtitan_registry.py"
REGISTRY = "torchtitan/models/llama3/config_registry.py"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that torchtitan's configurations are found from."""
    file = tmp_path / REGISTRY
    file.parent.mkdir(parents=True)
    file.write_text(MADE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return file


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("--module llama3 --config selective", f"--set=CONFIG=selective --from=torchtitan {REGISTRY}"),
        ("--module=llama3", f"--from=torchtitan {REGISTRY}"),
        ("--from torchtitan x --config selective", "--from torchtitan x --set=CONFIG=selective"),
        ("job.toml --compile.enable --gpus 8", "job.toml --set=compile.enable=true --gpus 8"),
        ("--compile.enable job.toml", "--set=compile.enable=true job.toml"),
        ("job.toml --compile.no-enable", "job.toml --set=compile.enable=false"),
        ("job.py --training.seq-len=4096", "job.py --set=training.seq_len=4096"),
        ("job.py --training.local_batch_size 2", "job.py --set=training.local_batch_size=2"),
        ("--job.config_file a.toml --metrics.x 1", "--set=metrics.x=1 --from=torchtitan a.toml"),
        ("--from megatron torchtitan/a.txt --config x", "--from megatron torchtitan/a.txt --config x"),
        ("train.py --config accelerate.yaml", "train.py --config accelerate.yaml"),
        ("train.py --model.foo 1", "train.py --model.foo 1"),
        ("gpt2 --training.seq_len 4096", "gpt2 --training.seq_len 4096"),
    ],
)
def test_flags_as_memplan_takes_them(checkout: Path, said: str, meant: str) -> None:
    """A file of another tool, or none, takes no key of torchtitan's."""
    assert as_settings(said.split()) == meant.split()


def test_it_is_the_job_that_the_file_and_settings_are(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    over = ("training.max_context_length", "4096")
    answers = []
    for words in (
        [REGISTRY, "--set", "CONFIG=selective", "--set", "=".join(over)],
        ["--module", "llama3", "--config", "selective", f"--{over[0]}", over[1]],
        ["--from", "torchtitan", "selective", f"--{over[0]}={over[1]}"],
    ):
        assert main(["estimate", *words, "--gpus", "8", "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert [one["plan"]["batch"] for one in answers] == [answers[0]["plan"]["batch"]] * 3
    assert [one["stages"] for one in answers] == [answers[0]["stages"]] * 3
    assert answers[0]["plan"]["batch"]["seq"] == 4096


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--from torchtitan nowhere", "nowhere: no such file, and no configuration of torchtitan's here"),
        ("--module llama9 --config x", "--module = llama9: is in torchtitan/models/llama9/config_registry.py, which"),
        (
            "--module graph_trainer.llama3 --config x",
            "graph_trainer.llama3: is in graph_trainer/llama3/config_registry.py",
        ),
        ("--module llama3 --config selectiv", "CONFIG = selectiv: is no function of this file that is followed; did"),
        ("--module llama3 --config selective --training.seqlen 1", "training.seqlen is no key of torchtitan's"),
    ],
)
def test_one_line_for_what_is_not_there(
    checkout: Path, capsys: pytest.CaptureFixture[str], words: str, line: str
) -> None:
    assert main(["estimate", *words.split(), "--gpus", "8"]) == 2
    told = capsys.readouterr().err
    assert line in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("module", ["llama3", "llama9"])
def test_a_command_without_settings_has_none_of_its_flags(
    capsys: pytest.CaptureFixture[str], checkout: Path, module: str
) -> None:
    """Whether the module's file is there or not."""
    assert main(["validate", "--module", module, "--config", "selective"]) == 2
    assert "--module: is not a flag of memplan validate" in capsys.readouterr().err


def test_a_module_of_an_experiment_is_found(checkout: Path) -> None:
    """``graph_trainer.llama3`` of ``torchtitan/experiments`` (``ConfigManager``)."""
    file = "torchtitan/experiments/graph_trainer/llama3/config_registry.py"
    Path(file).parent.mkdir(parents=True)
    Path(file).write_text(checkout.read_text(encoding="utf-8"), encoding="utf-8")
    assert as_settings(["--module", "graph_trainer.llama3"]) == ["--from=torchtitan", file]
