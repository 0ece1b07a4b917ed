"""The worker as a process: what it answers, how it dies, and what the environment lacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from memplan.plan.errors import LackingError, PlanError
from memplan.trace import run
from memplan.trace.job import Job
from memplan.trace.run import planned, traced

ROOT = Path(__file__).resolve().parents[2]
TINY = {"layers": "2", "hidden": "64", "heads": "4", "kv-heads": "4", "head-dim": "16", "ffn": "160", "vocab": "1003"}


TITAN = {"model": "llama-3-8b", **TINY, "framework": "fsdp", "fsdp-code": "torchtitan", "mbs": "1", "seq": "32"}
TITAN["vocab"] = "1004"


def job(**flags: str) -> Job:
    return planned(None, {"model": "gpt2", **TINY, "mbs": "1", "seq": "32", **flags}).job


def test_answer() -> None:
    found = traced(job(), "gpt2")
    assert found.torch
    assert found.transformers
    assert found.outline.blocks == ("transformer.h",)
    assert found.setup.net > 0
    assert found.substitutions


@pytest.mark.usefixtures("here")
def test_model_that_transformers_does_not_know() -> None:
    unknown = Job.from_json({**job().to_json(), "config": {"model_type": "no-such-model"}})
    with pytest.raises(PlanError, match=r"^model = mine: cannot be traced: transformers [\d.]+: .*no-such-model"):
        traced(unknown, "mine")


@pytest.mark.usefixtures("here")
def test_model_that_reads_values() -> None:
    """An operator that needs elements names itself and the module that called it."""
    config = {"model_type": "mixtral", "vocab_size": 1003, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes = {"num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4}
    routed = {**config, **sizes, "experts_implementation": "eager"}
    expected = r"traced: aten\.nonzero\.default .* in model\.layers\.0\.mlp\.experts \(modeling_mixtral\.py:\d+"
    with pytest.raises(PlanError, match=expected) as caught:
        traced(Job.from_json({**job(attention="eager").to_json(), "config": routed}), "mixtral")
    assert "\n" not in str(caught.value)


def as_worker(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    """A Python that runs ``body`` whatever it is asked to."""
    script = folder / "python"
    script.write_text(f"#!{sys.executable}\n{body}\n", encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setattr(run.sys, "executable", str(script))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import os; os.abort()", r"ended by SIGABRT$"),
        ("import os; os.kill(os.getpid(), 9)", r"ended by SIGKILL, which Linux sends where memory runs out$"),
        ("import sys; sys.exit('no memory\\nleft')", "ended with 1: left"),
    ],
)
def test_death_of_the_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, said: str) -> None:
    as_worker(monkeypatch, tmp_path, body)
    with pytest.raises(PlanError, match=said) as caught:
        traced(job(), "gpt2")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_worker_without_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real one, with 700 MB of addresses; where it fails is up to the dynamic linker."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nulimit -v 700000\nexec {sys.executable} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setattr(run.sys, "executable", str(script))
    with pytest.raises((PlanError, LackingError), match=r"cannot be (traced|imported)") as caught:
        traced(job(), "gpt2")
    assert "\n" not in str(caught.value)


def test_missing_and_old_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(found: dict[str, str], package: str) -> str:
        if package not in found:
            raise PackageNotFoundError(package)
        return found[package]

    monkeypatch.setattr(run, "version", lambda package: version({"torch": "2.13.0+cpu"}, package))
    with pytest.raises(LackingError, match=r"needs transformers, which is not installed: pip install"):
        traced(job(), "gpt2")
    monkeypatch.setattr(run, "version", lambda package: version({"torch": "2.5.1"}, package))
    with pytest.raises(LackingError, match=r"needs torch 2\.6 or later, not 2\.5\.1: pip install"):
        traced(job(), "gpt2")


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_packages_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str) -> None:
    """Installed for another Python, say: it is what is missing, not the model."""
    (tmp_path / f"{package}.py").write_text("raise ImportError('no libfoo.so\\nin sight')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    with pytest.raises(
        LackingError, match=rf"needs {package}, which cannot be imported \(no libfoo\.so\): pip install"
    ):
        traced(job(), "gpt2")


def test_offload_cannot_be_traced() -> None:
    flags = {
        "model": "llama-3-8b",
        "layers": "2",
        "seq": "64",
        "framework": "fsdp",
        "gpus": "2",
        "fsdp-offload": "true",
    }
    with pytest.raises(
        PlanError, match=r"--fsdp-offload: fsdp.offload = true: must be false: a trace's tensors are on"
    ):
        planned(None, flags)


def test_torchtitan_needs_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = planned(None, {**TITAN, "tp": "2", "dp": "2"}).job

    def version(package: str) -> str:
        assert package == "torch"
        return found

    monkeypatch.setattr(run, "version", version)
    found = "2.10.1"
    with pytest.raises(LackingError, match=r"needs torch 2\.11 or later, not 2\.10\.1: pip install"):
        traced(sharded, "llama")
    found = "2.12.1"
    with pytest.raises(LackingError, match=r"needs torch 2\.13 or later, not 2\.12\.1: pip install"):
        traced(planned(None, {**TITAN, "pp": "2", "gbs": "2"}).job, "llama")
    found = "2.13.0+cpu"
    answer = traced(sharded, "llama")
    assert (answer.transformers, answer.outline.blocks) == ("", ("layers",))


def test_interrupted(tmp_path: Path) -> None:
    """Ctrl-C ends the worker with its parent, quietly, and leaves no file."""
    command = [sys.executable, "-m", "memplan.cli", "trace", "--model", "llama-3-8b", "--seq", "2048"]
    events = tmp_path / "events.jsonl"
    process = subprocess.Popen(
        [*command, "--events", str(events)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )
    time.sleep(2.5)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)
    assert out == b""
    assert list(tmp_path.iterdir()) == []
    assert is_gone(process.pid)


def is_gone(group: int) -> bool:
    """Whether no process of ``group`` is left, within ten seconds."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
