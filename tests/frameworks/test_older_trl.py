"""trl's trainers before 1.0, and SFTTrainer before 1.15: their own code on tiny real models
(``tests/oracle/trl_older_step.py``), with the transformers of their time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from memplan import cli
from memplan.estimate import evaluation_programs, programs_of
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.tape.events import Drop, Hold
from memplan.tape.program import Program, fold_evaluation, static

from ..oracle.trl_older_step import DEEP, WIDE
from ..oracle.trl_step import COMPLETION, LENGTH, PAIRS, RANK, SAMPLES
from .test_preferences import GROUPED, plan

STEPS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "trl_older_steps.json").read_text())


def peaks(program: Program) -> list[int]:
    """Of forward, with what runs once autocast has ended, and of backward, beyond what is held before."""
    live, found = 0, [0, 0]
    for backward in (0, 1):
        for span in reversed(program.spans) if backward else program.spans:
            tapes = span.module.first
            for _ in span.names:
                for event in tapes.backward if backward else tapes.forward + tapes.end:
                    if isinstance(event, Hold | Drop):
                        live += event.bytes if isinstance(event, Hold) else -event.bytes
                        found[backward] = max(found[backward], live)
    return found


def flags_of(step: dict[str, Any], folder: Path) -> dict[str, object]:
    sizes = {name: value for name, value in (DEEP if step["deep"] else WIDE).items() if name != "model_type"}
    transformers.LlamaConfig(**sizes).to_json_file(folder / "config.json", use_diff=False)
    flags: dict[str, object] = {"model": folder, "trainer": step["loop"], "seq": LENGTH, "attention": "flash"}
    flags |= {"dtype": "bf16", "versions": f"trl={step['trl']},transformers={step['transformers']}"}
    flags |= {"mbs": PAIRS if step["loop"] == "dpo" else SAMPLES}
    flags |= {**GROUPED, "completion_length": COMPLETION} if step["loop"] == "grpo" else {}
    flags |= {"keeps_reference": "true"} if "scored" in step else {}
    flags |= {"lora_rank": RANK, "lora_targets": "q_proj,v_proj"} if step["adapters"] else {}
    flags |= {"recompute": "full", "use_reentrant": "true"} if step["recompute"] else {}
    flags |= {"precompute_ref_log_probs": "true"} if step["precomputed"] else {}
    return flags | ({"autocast": "true"} if step["autocast"] else {})


@pytest.mark.parametrize(
    "step", STEPS, ids=lambda one: "-".join((one["trl"], one["loop"], *(k for k, v in one.items() if v is True)))
)
def test_step_of_trls_trainers(step: dict[str, Any], tmp_path: Path) -> None:
    """Of large vocabularies within a tenth of a percent: labels, masks and sums are a few hundred numbers each. Where
    logits are small, ids that are concatenated and flushed are 0.5 % of a reference's pass, five
    of 3 KiB. SFTTrainer before 0.22 leaves the cache of an evaluation to the model, which is not counted."""
    chosen = plan(**flags_of(step, tmp_path))
    (program,) = programs_of(chosen, Options(accumulates_in_place=False))
    forward, backward = peaks(program)
    assert forward == pytest.approx(step["forward"], rel=6e-3 if step["deep"] else 2e-3)
    assert backward == pytest.approx(step["backward"], rel=1e-3)
    if "evaluation" in step:
        (evaluation,) = evaluation_programs(chosen, (program,))
        found = (fold_evaluation(evaluation) or 0) - static(evaluation).net
        near = {"abs": 20_000} if step["deep"] else {"rel": 4e-3}
        assert found == pytest.approx(step["evaluation"], **near)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"trainer": "dpo", "versions": "trl=0.9.6"}, r"must be 0\.10 to 1\.13 or 1\.15"),
        ({"trainer": "grpo", "versions": "trl=0.14.0", **GROUPED}, r"must be 0\.15 to 1\.13 or 1\.15"),
        ({"trainer": "reward", "versions": "trl=0.20.0"}, r"must be 0\.24 to 1\.16"),
        ({"trainer": "sft", "versions": "trl=0.12.0,transformers=4.45.0"}, r"must be 4\.46 or later with trl 0\.12"),
    ],
)
def test_what_is_refused(flags: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        programs_of(plan(**flags), Options())


def test_reference_at_once() -> None:
    """Before 0.14 of Llama 3 8B two pairs of 512 tokens: while the reference runs, log-probabilities of the policy wait
    in bf16, and its own logits, their copy and their ``log_softmax`` are there; from 0.15 on its log-probabilities are
    of one sequence and the next."""
    (before,), (since,) = (
        programs_of(plan(recompute="full", lora_rank=8, versions=f"trl={trl},transformers={transformers}"), Options())
        for trl, transformers in (("0.13.0", "4.48.0"), ("0.18.0", "4.51.0"))
    )
    row = 512 * 128_256 * 2
    assert peaks(before)[0] - peaks(since)[0] == pytest.approx((4 + 4 + 4 + 4 - 4 - 4 - 2) * row, rel=0.02)


SCRIPT = """
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B-Instruct", torch_dtype="bfloat16")
DPOTrainer(model, args=DPOConfig(output_dir="o", per_device_train_batch_size=2)).train()
"""


@pytest.mark.parametrize(
    ("trl", "says"),
    [("0.13.0", "seq 512 · bf16 · "), ("0.17.0", "seq 1024 · bf16 · "), ("0.24.0", "seq 1024 · bf16 autocast · ")],
)
def test_defaults_of_a_release(trl: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``max_length`` was 512, and bf16 and checkpoints were off."""
    (tmp_path / "dpo.py").write_text(SCRIPT)
    versions = f"trl={trl},transformers={'4.57.0' if trl == '0.24.0' else '4.51.0'}"
    cli.main(["estimate", str(tmp_path / "dpo.py"), "--gpu", "h200", "--layers", "2", "--versions", versions])
    printed = capsys.readouterr().out
    assert says in printed
    assert ("· full" in printed) == (trl == "0.24.0")


@pytest.mark.parametrize("said", ['loss_type=["sigmoid", "bco_pair", "sft"]', "use_weighting=True"])
def test_losses_that_take_logits_once_more(said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``_compute_loss`` up to 1.14: a cross entropy of the chosen logits, two sums over exponentials of all; since 1.15
    both are of log-probabilities that tiles make."""
    (tmp_path / "dpo.py").write_text(SCRIPT.replace('output_dir="o"', f'output_dir="o", {said}'))
    words = ["estimate", str(tmp_path / "dpo.py"), "--gpu", "h200", "--layers", "2", "--quiet"]
    assert cli.main([*words, "--versions", "trl=1.9.0,transformers=5.16.1"]) == 2
    assert "must be left out before trl 1.15, where it" in capsys.readouterr().err
    assert cli.main(words) == 0


GROUPED_8B = {**GROUPED, "seq": 512, "mbs": 8, "keeps_reference": "true", "recompute": "full", "use_reentrant": "false"}


@pytest.mark.parametrize("more", [{}, {"framework": "deepspeed", "zero": 2, "gpus": 2}], ids=["one", "zero-2"])
def test_reference_within_the_loss(more: dict[str, object]) -> None:
    """Of 0.18, with adapters, of 8 completions of 256 tokens of Llama 3 8B in bf16: while the reference's logits, which
    are of one token more, are divided, the policy's ``log_softmax`` is there."""
    (before,), (within,) = (
        programs_of(plan(**GROUPED_8B, lora_rank=8, versions=f"trl={trl},transformers=4.51.3", **more), Options())
        for trl in ("0.17.0", "0.18.2")
    )
    row = 8 * 256 * 128_256 * 2
    assert peaks(within)[0] - peaks(before)[0] == pytest.approx(row, rel=0.2)
