"""Releases that a job's files name are told, with the flag that follows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memplan.cli import main

SCRIPT = """from trl import SFTConfig, SFTTrainer
args = SFTConfig(per_device_train_batch_size=1, max_length=1024, bf16=True, gradient_checkpointing=True)
trainer = SFTTrainer(model="meta-llama/Llama-3.2-1B", args=args)
trainer.train()
"""
CODE = "releases-pinned"


def _told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, str], int]:
    assert main(["estimate", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return {one["code"]: one["message"] for one in found["warnings"]}, found["peak_bytes"]


def test_a_notebook_that_installs_a_release_is_told_of_the_flag_that_follows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """trl 0.12 holds logits that 1.16 never makes: the flag, as it is printed, says another plan."""
    cells = [
        {"cell_type": "code", "source": ['%pip install "transformers==4.46.3" "trl==0.12.1"\n']},
        {"cell_type": "code", "source": SCRIPT.splitlines(keepends=True)},
    ]
    place = tmp_path / "tune.ipynb"
    place.write_text(json.dumps({"cells": cells}, indent=1))
    told, newest = _told(capsys, str(place))
    flag = "--versions transformers=4.46.3,trl=0.12.1"
    assert told[CODE].startswith("tune.ipynb asks for transformers 4.46.3, trl 0.12.1")
    assert told[CODE].endswith(f"give {flag}")
    followed, older = _told(capsys, str(place), *flag.split())
    assert CODE not in followed
    assert older > newest


def test_requirements_beside_a_script_are_told_and_the_nearest_release_that_is_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "requirements.txt").write_text("torch>=2.4\ntransformers[torch]==4.44.2\npeft~=0.12.0\ntrl==0.8.6\n")
    place = tmp_path / "tune.py"
    place.write_text(SCRIPT)
    told, _ = _told(capsys, str(place))
    flag = "--versions transformers=4.45,peft=0.12.0,trl=0.10"
    assert f"give {flag}; of transformers 4.45 is the nearest that is followed" in told[CODE]
    followed, _ = _told(capsys, str(place), *flag.split())
    assert CODE not in followed


def test_ranges_and_other_packages_pin_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "requirements.txt").write_text("trl>=0.12\nsentence-transformers==3.4.1\npeft\nmy.trl==0.9.6\n")
    place = tmp_path / "tune.py"
    place.write_text(SCRIPT)
    told, _ = _told(capsys, str(place))
    assert CODE not in told


def test_an_argument_that_newer_releases_have_no_more_says_an_older_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``SFTConfig`` of trl 0.20 has ``max_length`` alone; what is pinned says more than that."""
    place = tmp_path / "tune.py"
    place.write_text(SCRIPT.replace("max_length", "max_seq_length"))
    told, newest = _told(capsys, str(place))
    assert told[CODE].startswith("max_seq_length is an argument of trl before 0.20")
    assert told[CODE].endswith("--versions trl=0.19.1,transformers=4.53.0")
    followed, older = _told(capsys, str(place), "--versions", "trl=0.19.1,transformers=4.53.0")
    assert CODE not in followed
    assert older > newest
    (tmp_path / "requirements.txt").write_text("trl==0.12.2\n")
    told, _ = _told(capsys, str(place))
    assert told[CODE].startswith("requirements.txt asks for trl 0.12.2")
