"""``memplan explain`` as a user calls it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from memplan.cli import main

from .score import issues

MESSAGE = issues()[0].message


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["explain", *arguments, "--no-records"])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_the_story_that_the_project_began_with(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(issues()[0].text)
    code, out, _ = explained(capsys, str(log), "bigscience-104b-250k", "--mbs", "8")
    assert code == 0
    assert out.startswith("Out of memory: logits_fp32 in head, forward, stage 31 asked for 3.82 GiB")
    for told in ("fragmentation", "Changes that help", "8×2048×62592", "the traceback names the logits"):
        assert told in " ".join(out.split())
    assert explained(capsys, str(log), "bigscience-104b-250k", "--mbs", "8", "-q")[1].count("\n") == 1


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be"])
def test_a_log_that_powershell_wrote(encoding: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_bytes(f"\ufeffstep 1\n{MESSAGE}\n".encode(encoding))
    code, out, _ = explained(capsys, str(log), "-q")
    assert (code, out) == (0, "Out of memory: a request asked for 3.82 GiB, 1.65 GiB free of 15.78 GiB\n")


def test_a_pasted_line_and_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = explained(capsys, MESSAGE)
    assert code == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(MESSAGE.encode())))
    assert explained(capsys, "-") == (code, out, "")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(MESSAGE.encode())))
    assert explained(capsys) == (code, out, "")


def test_json_has_the_figures_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = explained(capsys, issues()[0].text.replace("\n", " \n"), "bigscience-104b-250k", "--mbs", "8", "--json")
    told = json.loads(out)
    assert told["schema"] == 1
    assert told["asked"][0]["tensor"] == "logits_fp32"
    assert told["asked"][0]["request_bytes"] == 8 * 2048 * 62592 * 4
    assert told["asked"][0]["stages"] == [31]
    assert told["ways_out"][0]["fits"]
    assert [cause["code"] for cause in told["causes"]] == ["far-apart", "fragmentation", "other-gpu"]


def test_the_rank_that_failed_says_which_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """Every stage of a pipeline asks for 640 MiB; ranks 4 to 7 are stage 1."""
    message = MESSAGE.replace("3.82 GiB", "640.00 MiB")
    stages = []
    for rank in (0, 5, 127):
        text = f"[rank{rank}]: {message}"
        _, out, _ = explained(capsys, text, "bigscience-104b-250k", "--mbs", "8", "--json")
        told = json.loads(out)
        assert told["message"]["rank"] == rank
        stages.append(told["asked"][0]["stages"])
    assert [rank // 4 in found for rank, found in zip((0, 5, 127), stages, strict=True)] == [True] * 3
    assert stages[0] != stages[2]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b"\x00\x01\x02 out of memory", "is a binary file: neither a log nor a memory snapshot"),
        (b"iteration 1: all is well\n", "has no out-of-memory message"),
    ],
)
def test_what_cannot_be_explained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, problem: str
) -> None:
    log = tmp_path / "log"
    log.write_bytes(content)
    code, out, error = explained(capsys, str(log))
    assert (code, out) == (2, "")
    assert error.count("\n") == 1
    assert error.startswith(f"{log}: {problem}")


def test_a_plan_that_is_wrong_is_said_as_estimate_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = explained(capsys, MESSAGE, "--model", "llama-2-7b", "--gpu", "nonesuch")
    assert code == 2
    assert "hardware.gpu = nonesuch" in error
    assert explained(capsys, "no-such-file")[2] == "no-such-file: no such file\n"
    assert explained(capsys, "-", "-")[0] == 2


FUSED_ADAM = """Traceback (most recent call last):
  File "/opt/megatron/core/optimizer/distrib_optimizer.py", line 1, in step
    self.optimizer.step()
  File "/opt/transformer_engine/pytorch/optimizers/fused_adam.py", line 9, in initialize_state
    state["exp_avg"] = torch.zeros_like(p)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1002.00 MiB. GPU 0 has a total capacity of 79.11 GiB of
which 1.10 GiB is free.
"""


def test_the_line_of_code_tells_tensors_of_one_size_apart(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--model",
        "llama-3-8b",
        "--framework",
        "megatron",
        "--gpus",
        "8",
        "--tp",
        "2",
        "--mbs",
        "1",
        "--seq",
        "4096",
    ]
    told = json.loads(explained(capsys, FUSED_ADAM, *words, "--json")[1])
    assert (told["asked"][0]["tensor"], told["asked"][0]["phase"]) == ("exp_avg", "step")
    assert {one["tensor"] for one in told["asked"]} == {"exp_avg", "exp_avg_sq"}, "logits are not of the step"
    other = FUSED_ADAM.replace('"exp_avg"', '"exp_avg_sq"')
    told = json.loads(explained(capsys, other, *words, "--json")[1])
    assert told["asked"][0]["tensor"] == "exp_avg_sq"


LOST = MESSAGE.replace("3.82 GiB", "1.96 GiB").replace("7.34 GiB", "{allocated}").replace("15.78 GiB", "23.52 GiB")
LORA = ["--model", "llama-3-8b", "--gpu", "rtx-4090", "--lora-rank", "16", "--recompute", "full"]


def test_what_is_not_sure_is_not_said_as_a_fact_and_a_run_that_died_gets_ways_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without frames four tensors of the head have 4,096 × 128,256 × 4 bytes; the plan fits, and the run died."""
    out = " ".join(explained(capsys, LOST.format(allocated="21.07 GiB"), *LORA)[1].split())
    assert out.startswith("Out of memory: most likely ")
    assert "more in the plan have this size" in out
    assert "far-apart" not in out
    assert "The estimate says that the plan fits, and the run died" in out
    assert "Changes that help" in out
    assert out.count("For more:") == 1
    assert json.loads(explained(capsys, LOST.format(allocated="21.07 GiB"), *LORA, "--json")[1])["ways_out"]


def test_a_moment_that_a_frame_proves_outvotes_the_memory_and_a_gap_is_said_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    frame = '  File "/opt/transformers/loss/loss_utils.py", line 36, in fixed_cross_entropy\n'
    code = "    loss = nn.functional.cross_entropy(source, target)\n"
    _, out, _ = explained(capsys, frame + code + LOST.format(allocated="9.00 GiB"), *LORA, "--json")
    told = json.loads(out)
    assert [(one["tensor"], one["phase"]) for one in told["asked"]] == [
        ("log_probabilities", "forward"),
        ("logits_fp32", "forward"),
    ]
    assert told["causes"][0]["code"] == "far-apart"


def test_nothing_given_says_how_to_use_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    code, _, err = explained(capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert "memplan explain train.log" in err


def test_what_the_traceback_proves_goes_before_the_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors of the message's size in other moments do not make the first sentence: frames of trl before it fused its
    head (``selective_log_softmax``), 1,024 x 151,936 x 4 bytes = 593.5 MiB."""
    log = tmp_path / "run.log"
    log.write_text(
        "Traceback (most recent call last):\n"
        '  File "/opt/trl/trainer/grpo_trainer.py", line 1480, in compute_loss\n'
        "    return self._compute_loss(model, inputs)\n"
        '  File "/opt/trl/trainer/utils.py", line 1448, in selective_log_softmax\n'
        "    row_logps = F.log_softmax(row_logits, dim=-1)\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 594.00 MiB. GPU 0 has a total capacity of 19.60 "
        "GiB of which 200.00 MiB is free. Including non-PyTorch memory, this process has 19.20 GiB memory in use. Of "
        "the allocated memory 18.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated.\n"
    )
    flags = "--model qwen3-0.6b --grpo --completion-length 1024 --seq 1536 --generation-memory 0 --mbs 8 --autocast"
    main(["explain", str(log), *flags.split()])
    first = " ".join(capsys.readouterr().out.split())
    assert first.startswith("Out of memory: what the traceback names, the logits in the forward pass, which the plan")
    assert "the size and the traceback name the tensor" not in first
