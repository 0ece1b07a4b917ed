"""trl's KTOTrainer, RLOOTrainer, CPOTrainer and ORPOTrainer: their own losses on tiny real models
(``tests/oracle/trl_alone_step.py``), and what is counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from memplan.estimate import evaluation_programs, programs_of
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.tape.program import fold_evaluation, static

from ..oracle.trl_step import COMPLETION, EVALUATED, LENGTH, MODEL, PAIRS, RANK, SAMPLES
from .test_preferences import RANKS, peaks, plan

STEPS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "trl_alone_steps.json").read_text())
OF_AXOLOTL: list[dict[str, Any]] = json.loads((Path(__file__).parent / "axolotl_dpo_steps.json").read_text())
OF_COMPLETIONS: dict[str, object] = {"completion_length": COMPLETION, "generation_memory": 0}


def named(step: dict[str, Any]) -> str:
    said = [name for name, value in step.items() if value is True]
    return "-".join((step["trl"], step["loop"], step.get("dtype", "bfloat16"), *said))


@pytest.mark.parametrize("step", STEPS, ids=named)
def test_step_of_trls_trainer(step: dict[str, Any], tmp_path: Path) -> None:
    """Within a thousandth: labels, sums of rows and metrics are a few hundred numbers each."""
    transformers.LlamaConfig(**MODEL).to_json_file(tmp_path / "config.json", use_diff=False)
    of_pairs = step["loop"] in ("orpo", "cpo", "simpo")
    size = PAIRS if of_pairs else SAMPLES
    flags: dict[str, object] = {"model": tmp_path, "trainer": step["loop"], "seq": LENGTH, "attention": "eager"}
    flags |= {"mbs": size, "eval_mbs": EVALUATED * size, "versions": f"trl={step['trl'].removesuffix('.0')}"}
    flags |= OF_COMPLETIONS if step["loop"] == "rloo" else {}
    flags |= {"dtype": "fp32"} if step.get("dtype") == "float32" and not step["autocast"] else {"dtype": "bf16"}
    flags |= {"autocast": "true"} if step.get("autocast") else {}
    flags |= {"lora_rank": RANK, "lora_targets": "q_proj,v_proj"} if step["adapters"] else {}
    flags |= {"recompute": "full"} if step["recompute"] else {}
    flags |= {"precompute_ref_log_probs": "true"} if step.get("precomputed") else {}
    if step.get("sharded"):
        flags |= {"framework": "fsdp", "gpus": RANKS, "fsdp_reduce": "bf16", "fsdp_parameters": "bf16"}
        flags |= {"reshard_root": "true", "versions": "trl=1.16,accelerate=1.15"}
        flags |= {"lora_dtype": "bf16"} if step["adapters"] else {}
    chosen = plan(**flags)
    (program,) = programs_of(chosen, Options(accumulates_in_place=False))
    assert peaks(program) == pytest.approx((step["forward"], step["backward"]), rel=1e-3)
    if step.get("sharded"):
        return
    (evaluation,) = evaluation_programs(chosen, (program,))
    near = 3e-3 if step.get("autocast") else 1e-3  # autocast's copies of layers' weights end with each layer
    assert (fold_evaluation(evaluation) or 0) - static(evaluation).net == pytest.approx(step["evaluation"], rel=near)


@pytest.mark.parametrize(
    "step", OF_AXOLOTL, ids=lambda one: "-".join(name for name, value in one.items() if value is True)
)
def test_step_of_axolotls_dpo(step: dict[str, Any], tmp_path: Path) -> None:
    """Its own functions in trl's loss (``tests/oracle/axolotl_step.py``), within a thousandth."""
    transformers.LlamaConfig(**MODEL).to_json_file(tmp_path / "config.json", use_diff=False)
    flags: dict[str, object] = {"model": tmp_path, "trainer": "axolotl-dpo", "seq": LENGTH, "attention": "eager"}
    flags |= {"mbs": PAIRS, "eval_mbs": EVALUATED * PAIRS, "autocast": "true" if step["autocast"] else "false"}
    flags |= {"lora_rank": RANK, "lora_targets": "q_proj,v_proj"} if step["adapters"] else {}
    flags |= {"recompute": "full"} if step["recompute"] else {}
    flags |= {"precompute_ref_log_probs": "true"} if step["precomputed"] else {}
    chosen = plan(**flags)
    (program,) = programs_of(chosen, Options(accumulates_in_place=False))
    assert peaks(program) == pytest.approx((step["forward"], step["backward"]), rel=1e-3)
    (evaluation,) = evaluation_programs(chosen, (program,))
    near = 3e-3 if step["autocast"] else 1e-3
    assert (fold_evaluation(evaluation) or 0) - static(evaluation).net == pytest.approx(step["evaluation"], rel=near)


def test_likelihood_is_what_simpo_has_not() -> None:
    """Two pairs of Llama 3 8B, 512 tokens, 128,256 words, 4,096 features: once hidden states have ended, CPO's cross
    entropy copies the logits of two sequences but for their last tokens, and makes log-probabilities of these. In
    backward the gradient of all logits waits while that of the two sequences is laid into zeros of them, and these into
    zeros of all; SimPO's is laid into these at once, from all but the last tokens."""
    word = 128_256 * 2
    of_half, hidden = 2 * 511 * word, 4 * 512 * 4096 * 2
    cpo, simpo = (
        programs_of(plan(trainer=one, lora_rank=8, recompute="full"), Options())[0] for one in ("cpo", "simpo")
    )
    forward, backward = (one - other for one, other in zip(peaks(cpo), peaks(simpo), strict=True))
    assert forward == pytest.approx(2 * of_half - hidden, rel=1e-3)
    assert backward == pytest.approx((2 * 512 + 4) * word, rel=1e-3)


def test_kto_needs_no_more_than_its_own_passes() -> None:
    """What scores mismatched completions ends before the policy's pass, and before the reference's: beside DPO's of as
    many sequences there is a batch of three tensors more, (4, 512) int64 each."""
    one, other = (
        programs_of(plan(trainer=loop, mbs=mbs, lora_rank=8), Options())[0] for loop, mbs in (("kto", 4), ("dpo", 2))
    )
    more = sum(hold.bytes for hold in one.extra) - sum(hold.bytes for hold in other.extra)
    assert more == 3 * 4 * 512 * 8
    assert peaks(one) == pytest.approx(peaks(other), rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"trainer": "kto", "framework": "fsdp", "gpus": 2}, "trainer.loop = kto: must be none, transformers, sft"),
        ({"trainer": "kto", "framework": "deepspeed", "gpus": 2}, "trainer.loop = kto: must be none, sft, dpo"),
        ({"trainer": "kto", "versions": "trl=1.13.0"}, r"must be 1\.15 to 1\.16"),
        ({"trainer": "orpo", "versions": "trl=0.29.0"}, r"must be 1\.0 to 1\.16"),
        ({"trainer": "rloo"}, "needs --completion-length"),
        ({"trainer": "cpo", "precompute_ref_log_probs": "true"}, "needs trainer.loop dpo, kto or axolotl-dpo"),
        (
            {"trainer": "cpo", "lora_rank": 8, "quantisation": "nf4"},
            r"prepared = false: must be true .*--kbit-preparation",
        ),
        (
            {"trainer": "orpo", "lora_rank": 8, "quantisation": "int8"},
            "must be none, nf4 or fp4 with trainer.loop orpo",
        ),
        ({"trainer": "simpo", "model": "mixtral-8x7b"}, "must be none, transformers or sft with experts"),
    ],
)
def test_what_is_refused(flags: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        programs_of(plan(**flags), Options())
