"""trl's DPOTrainer and GRPOTrainer: their own losses on tiny real models (``tests/oracle/trl_step.py``), and
what is counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from memplan.estimate import estimate, evaluation_programs, programs_of
from memplan.frameworks.plain.programs import layer_shape
from memplan.frameworks.plain.trainer import SCALARS
from memplan.layers.module import Options
from memplan.plan.count import parameters
from memplan.plan.errors import PlanError
from memplan.plan.framework_sections import Trainer
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Category, Drop, Hold, rounded
from memplan.tape.program import Program, fold_evaluation, static

from ..oracle.trl_step import COMPLETION, EVALUATED, LENGTH, MODEL, PAIRS, RANK, SAMPLES

STEPS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "trl_dpo_steps.json").read_text())
GROUPED_STEPS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "trl_grpo_steps.json").read_text())

WHOLE_STEPS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "trl_whole_steps.json").read_text())

OF_LLAMA_FACTORY: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "llama_factory_dpo_steps.json").read_text()
)
ALONE_STEPS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "trl_fsdp_alone_steps.json").read_text())
FLAT_STEPS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "trl_flat_steps.json").read_text())
SHARDED_STEPS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "trl_fsdp_steps.json").read_text())
WHOLE_FSDP_STEPS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "trl_whole_fsdp_steps.json").read_text())
RANKS = 4
MIXED_STEPS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "trl_sft_expert_steps.json").read_text())
AVERAGED_STEPS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "trl_sft_steps.json").read_text())
SCORED_STEPS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "trl_reward_steps.json").read_text())


GROUPED: dict[str, object] = {"trainer": "grpo", "completion_length": 256, "generation_memory": 0}


def plan(**flags: object) -> Any:
    merged = {"model": "llama-3-8b", "trainer": "dpo", "gpu": "h100-80gb", "seq": "512", "mbs": "2", **flags}
    return resolve(read_plan(None, {name.replace("_", "-"): str(value) for name, value in merged.items()}).plan)


def peaks(program: Program) -> tuple[int, int]:
    """Of forward and of backward, beyond what is held before."""
    live, found = 0, [0, 0]
    for backward in (0, 1):
        for span in reversed(program.spans) if backward else program.spans:
            tapes = span.module.first
            for _ in span.names:
                for event in tapes.backward if backward else tapes.forward:
                    if isinstance(event, Hold | Drop):
                        live += event.bytes if isinstance(event, Hold) else -event.bytes
                        found[backward] = max(found[backward], live)
    return found[0], found[1]


@pytest.mark.parametrize("step", STEPS, ids=lambda one: "-".join(name for name, value in one.items() if value is True))
def test_step_of_trls_trainer(step: dict[str, Any], tmp_path: Path) -> None:
    """Within a thousandth: labels, sums of rows and metrics are a few hundred numbers each."""
    transformers.LlamaConfig(**MODEL).to_json_file(tmp_path / "config.json", use_diff=False)
    flags: dict[str, object] = {"model": tmp_path, "mbs": PAIRS, "seq": LENGTH, "attention": "eager"}
    flags |= {"lora_rank": RANK, "lora_targets": "q_proj,v_proj"} if step["adapters"] else {}
    flags |= {"recompute": "full"} if step["recompute"] else {}
    flags |= {"precompute_ref_log_probs": "true"} if step["precomputed"] else {}
    chosen = plan(**flags, eval_mbs=EVALUATED * PAIRS)
    (program,) = programs_of(chosen, Options())
    (evaluation,) = evaluation_programs(chosen, (program,))
    assert (fold_evaluation(evaluation) or 0) - static(evaluation).net == pytest.approx(step["evaluation"], rel=4e-4)
    assert peaks(program) == pytest.approx((step["forward"], step["backward"]), rel=1e-3)
    kept = sum(one.bytes(one.dtype or "bf16") for one in program.parameter_tensors())
    held = kept + sum(one.bytes for one in program.extra if one.category is not Category.INPUTS)
    ids = 3 * 8 * 2 * PAIRS * LENGTH
    assert held == pytest.approx(step["before"] - ids, rel=1e-3)


@pytest.mark.parametrize(
    "step", WHOLE_STEPS, ids=lambda one: "-".join((one["trl"], one["loop"], *(k for k, v in one.items() if v is True)))
)
def test_step_of_trls_trainers_before_tiles(step: dict[str, Any], tmp_path: Path) -> None:
    """Within a thousandth of trl's own code (``tests/oracle/trl_whole_step.py``); a mode that sees operators adds
    gradients to new tensors."""
    transformers.LlamaConfig(**MODEL).to_json_file(tmp_path / "config.json", use_diff=False)
    flags: dict[str, object] = {
        "model": tmp_path,
        "seq": LENGTH,
        "attention": "eager",
        "versions": f"trl={step['trl']}",
    }
    flags |= {"mbs": PAIRS} if step["loop"] == "dpo" else {**GROUPED, "mbs": SAMPLES, "completion_length": COMPLETION}
    flags |= {"dtype": "fp32"} if step["dtype"] == "float32" and not step["autocast"] else {"dtype": "bf16"}
    flags |= {"autocast": "true"} if step["autocast"] else {}
    flags |= {"lora_rank": RANK, "lora_targets": "q_proj,v_proj"} if step["adapters"] else {}
    flags |= {"recompute": "full"} if step["recompute"] else {}
    flags |= {"precompute_ref_log_probs": "true"} if step.get("precomputed") else {}
    chosen = plan(**flags)
    (program,) = programs_of(chosen, Options(accumulates_in_place=False))
    assert peaks(program) == pytest.approx((step["forward"], step["backward"]), rel=1e-3)
    if step["loop"] == "dpo":
        (evaluation,) = evaluation_programs(chosen, (program,))
        found = (fold_evaluation(evaluation) or 0) - static(evaluation).net
        near = 2e-3 if step["autocast"] else 1e-3  # autocast's copies of layers' weights end with each layer
        assert found == pytest.approx(step["evaluation"], rel=near)


@pytest.mark.parametrize(
    "step", OF_LLAMA_FACTORY, ids=lambda one: "-".join(name for name, value in one.items() if value is True)
)
def test_step_of_llama_factorys_dpo(step: dict[str, Any], tmp_path: Path) -> None:
    """Its own code (``tests/oracle/llama_factory_step.py``), within 0.02 %: clones end in between."""
    transformers.LlamaConfig(**MODEL).to_json_file(tmp_path / "config.json", use_diff=False)
    flags: dict[str, object] = {"model": tmp_path, "mbs": PAIRS, "seq": LENGTH, "attention": "eager"}
    flags |= {"trainer": "llama-factory-dpo", "dtype": "bf16"}
    flags |= {"lora_rank": RANK, "lora_targets": "q_proj,v_proj"} if step["adapters"] else {}
    flags |= {"recompute": "full"} if step["recompute"] else {}
    (program,) = programs_of(plan(**flags), Options())
    assert peaks(program) == pytest.approx((step["forward"], step["backward"]), rel=2e-4)
    kept = sum(one.bytes(one.dtype or "bf16") for one in program.parameter_tensors())
    held = kept + sum(one.bytes for one in program.extra if one.category is not Category.INPUTS)
    assert held == pytest.approx(step["before"] - 3 * 8 * 2 * PAIRS * LENGTH, rel=1e-3)


@pytest.mark.parametrize(
    "step", GROUPED_STEPS, ids=lambda one: "-".join(k for k, value in one.items() if value is True)
)
def test_step_of_trls_grpo_trainer(step: dict[str, Any], tmp_path: Path) -> None:
    """Forward to the byte; backward but for a few numbers of the loss, and an evaluation of three times as many."""
    transformers.LlamaConfig(**MODEL).to_json_file(tmp_path / "config.json", use_diff=False)
    flags: dict[str, object] = {"model": tmp_path, "mbs": SAMPLES, "seq": LENGTH, "attention": "eager"}
    flags |= {"trainer": "grpo", "completion_length": COMPLETION, "generation_memory": 0}
    flags |= {"lora_rank": RANK, "lora_targets": "q_proj,v_proj"} if step["adapters"] else {}
    flags |= {"recompute": "full"} if step["recompute"] else {}
    chosen = plan(**flags, eval_mbs=EVALUATED * SAMPLES)
    (program,) = programs_of(chosen, Options())
    forward, backward = peaks(program)
    assert (forward, backward) == (step["forward"], pytest.approx(step["backward"], rel=2e-4))
    (evaluation,) = evaluation_programs(chosen, (program,))
    found = (fold_evaluation(evaluation) or 0) - static(evaluation).net
    assert found == pytest.approx(step["evaluation"], rel=1e-3)


@pytest.mark.parametrize(
    "step",
    SCORED_STEPS,
    ids=lambda one: "-".join(k for k in (one["config"]["model_type"], *one) if one.get(k, True) is True),
)
def test_step_of_trls_reward_trainer(step: dict[str, Any], tmp_path: Path) -> None:
    """Forward to the byte, and what is held before; backward but for two numbers: the loss and its gradient; an
    evaluation of three times as many pairs as near."""
    transformers.AutoConfig.for_model(**step["config"]).to_json_file(tmp_path / "config.json", use_diff=False)
    flags: dict[str, object] = {"model": tmp_path, "mbs": PAIRS, "seq": LENGTH, "attention": "eager"}
    flags |= {"trainer": "reward", "dtype": {"float32": "fp32", "bfloat16": "bf16"}[step["dtype"]]}
    adapted = {"lora_rank": RANK, "lora_targets": "q_proj,v_proj", "modules_to_save": "score"}
    flags |= adapted if step["adapters"] else {}
    flags |= {"recompute": "full"} if step["recompute"] else {}
    chosen = plan(**flags, eval_mbs=EVALUATED * PAIRS)
    (program,) = programs_of(chosen, Options())
    forward, backward = peaks(program)
    mask = (
        4 * 2 * PAIRS * LENGTH if step["config"]["model_type"] == "opt" else 0
    )  # OPT makes one where it is given none
    assert (forward - mask, backward) == (step["forward"], pytest.approx(step["backward"], abs=1024))
    (evaluation,) = evaluation_programs(chosen, (program,))
    held = (fold_evaluation(evaluation) or 0) - static(evaluation).net - EVALUATED * mask
    assert held == pytest.approx(step["evaluation"], abs=1024)
    kept = sum(one.bytes(one.dtype or str(flags["dtype"])) for one in program.parameter_tensors())
    numbers = {one.name for one in SCALARS}
    assert kept + sum(one.bytes for one in program.extra if one.name not in numbers) == step["before"]


@pytest.mark.parametrize(
    ("model", "dropouts"), [("gpt2", (0.0, 0.0, 0.0)), ("opt-6.7b", (0.0, 0.0, 0.1)), ("llama-3-8b", (0.0, 0.0, 0.0))]
)
def test_dropout_is_off_where_it_is_a_module(model: str, dropouts: tuple[float, ...]) -> None:
    """OPT's is a function (``modeling_opt.py``), which ``disable_dropout_in_model`` does not find."""
    spec = layer_shape(plan(model=model, trainer="reward")).spec
    assert (spec.embedding_dropout, spec.attention_dropout, spec.hidden_dropout) == dropouts


def test_a_head_of_one_score() -> None:
    """Llama 3 8B without its head of 128,256 rows and with one row of 4,096."""
    resolved = plan(trainer="reward")
    assert parameters(resolved.model) == 8_030_261_248 - 128_255 * 4096
    (program,) = programs_of(resolved, Options())
    assert sum(one.elements for one in program.parameter_tensors()) == parameters(resolved.model)
    assert resolve(resolved) == resolved
    with pytest.raises(PlanError, match=r"needs trainer\.loop none, transformers or reward"):
        resolve(resolved.model_copy(update={"trainer": Trainer(loop="dpo")}))


def test_evaluation_of_a_classifier_keeps_scores() -> None:
    """Of 4,000 batches of 2 sequences 3 scores and a label each: a few hundred KiB, where words would take GiBs."""
    kept = [
        programs_of(plan(trainer="transformers", labels=3, framework="single", **own), Options())[0].evaluated
        for own in ({}, {"eval_batches": 4000})
    ]
    of = [rounded(rows * 3 * 2) + rounded(rows * 8) for rows in (7998, 2, 8000)]
    assert kept == [(0, 0), (of[0] + of[1], sum(of))]


def test_parameters_of_berts_classifier() -> None:
    """``BertForSequenceClassification`` of bert-large-uncased with two labels has 335,143,938."""
    resolved = plan(model="bert-large", trainer="transformers", labels=2, framework="single")
    (program,) = programs_of(resolved, Options())
    assert parameters(resolved.model) == 335_143_938 == program.parameters()


@pytest.mark.parametrize(
    "flags",
    [
        {"framework": "ddp", "gpus": 2, "trainer": "transformers"},
        {"framework": "fsdp", "gpus": 2, "fsdp_version": 1, "trainer": "transformers"},
        {"framework": "fsdp", "gpus": 2, "trainer": "none"},
        {"framework": "deepspeed", "gpus": 2, "zero": 2, "trainer": "none"},
        {"framework": "deepspeed", "gpus": 2, "zero": 3, "trainer": "none"},
    ],
    ids=lambda flags: "-".join(str(value) for value in flags.values()),
)
def test_a_classifier_needs_what_a_reward_model_does(flags: dict[str, object]) -> None:
    """Both have two sequences at once: the loss of labels differs from that of a pair by tensors of a few numbers."""
    flags = {"model": "qwen2.5-0.5b", "recompute": "full", "dtype": "bf16", **flags}
    needs = []
    for own in ({"labels": 1, "mbs": 2}, {"trainer": "reward", "mbs": 1}):
        (program,) = programs_of(plan(**{**flags, **own}), Options())
        needs.append(peaks(program))
    assert needs[0] == pytest.approx(needs[1], abs=64 * 512)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"model": "mixtral-8x7b"}, "must be left out with experts"),
        ({"lora_rank": 8, "use_dora": "true"}, "must be left out with DoRA"),
        ({"loss": "liger"}, "must be left out with loss.kind liger"),
        ({"trainer": "sft"}, "needs trainer.loop none, transformers or reward"),
        ({"framework": "megatron", "trainer": "none"}, "must be left out with framework megatron"),
        ({"model": "granite-3.1-2b"}, "no class for sequence classification of family granite"),
        (
            {"model": "bert-large", "lora_rank": 8, "framework": "deepspeed", "gpus": 2, "zero": 2, "trainer": "none"},
            "must be left out with adapters under deepspeed",
        ),
        ({"model": "bert-large", "framework": "deepspeed", "gpus": 2, "zero": 3, "trainer": "none"}, "under ZeRO-3"),
        ({"model": "bert-large", "trainer": "reward", "labels": 0}, "no class for sequence classification"),
        ({"torch_compile": "true"}, "must be left out with torch.compile"),
    ],
)
def test_what_is_refused_of_a_classifier(flags: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        programs_of(plan(**{"trainer": "transformers", "framework": "single", "labels": 2, **flags}), Options())


@pytest.mark.parametrize(
    "step", AVERAGED_STEPS, ids=lambda one: "-".join(k for k, value in one.items() if value is True)
)
def test_step_of_trls_sft_trainer(step: dict[str, Any], tmp_path: Path) -> None:
    """Forward to the byte, and what is held before; backward but for a few numbers."""
    transformers.LlamaConfig(**MODEL).to_json_file(tmp_path / "config.json", use_diff=False)
    flags: dict[str, object] = {"model": tmp_path, "mbs": SAMPLES, "seq": LENGTH, "attention": "eager"}
    flags |= {"trainer": "sft"}
    flags |= {"lora_rank": RANK, "lora_targets": "q_proj,v_proj"} if step["adapters"] else {}
    flags |= {"recompute": "full"} if step["recompute"] else {}
    (program,) = programs_of(plan(**flags), Options())
    forward, backward = peaks(program)
    assert (forward, backward) == (step["forward"], pytest.approx(step["backward"], rel=2e-4))
    kept = sum(one.bytes(one.dtype or "bf16") for one in program.parameter_tensors())
    numbers = {one.name for one in SCALARS}
    assert kept + sum(one.bytes for one in program.extra if one.name not in numbers) == step["before"]


@pytest.mark.parametrize(
    "step", MIXED_STEPS, ids=lambda one: f"{one['config']['model_type']}{'-adapters' * one['adapters']}"
)
def test_step_of_trls_sft_trainer_with_experts(step: dict[str, Any], tmp_path: Path) -> None:
    """Forward to the byte; backward but for a number."""
    sizes = {name: value for name, value in step["config"].items() if name != "model_type"}
    config = transformers.AutoConfig.for_model(step["config"]["model_type"], **sizes)
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    flags: dict[str, object] = {"model": tmp_path, "mbs": SAMPLES, "seq": LENGTH, "attention": "eager"}
    flags |= {"trainer": "sft", "router_aux_loss": 0}
    flags |= {"lora_rank": RANK, "lora_targets": "q_proj,v_proj", "recompute": "full"} if step["adapters"] else {}
    (program,) = programs_of(plan(**flags), Options())
    assert peaks(program) == (step["forward"], pytest.approx(step["backward"], abs=512))


@pytest.mark.parametrize(
    "step", SHARDED_STEPS, ids=lambda one: "-".join(k for k, value in one.items() if value is True)
)
def test_step_of_trls_trainer_under_fully_shard(step: dict[str, Any], tmp_path: Path) -> None:
    """A second model is one unit, which is gathered whole; adapters' reference is the policy, layer by layer. Labels
    and metrics are a few numbers each."""
    transformers.LlamaConfig(**MODEL).to_json_file(tmp_path / "config.json", use_diff=False)
    flags: dict[str, object] = {"model": tmp_path, "mbs": PAIRS, "seq": LENGTH, "attention": "eager"}
    flags |= {"framework": "fsdp", "gpus": RANKS, "dtype": "bf16", "fsdp_reduce": "bf16"}
    stored = "fp32" if step["mixed"] else "bf16"
    flags |= {"fsdp_parameters": stored}
    flags |= {"lora_rank": RANK, "lora_targets": "q_proj,v_proj", "lora_dtype": stored} if step["adapters"] else {}
    flags |= {"recompute": "full"} if step["recompute"] else {}
    flags |= {"precompute_ref_log_probs": "true"} if step["precomputed"] else {}
    flags |= {"reshard_root": "true"} if step["reshard"] else {"reshard_after_forward": "false"}
    flags |= {"versions": "accelerate=1.15" if step.get("apart") else "accelerate=1.13"}
    (program,) = programs_of(plan(**flags), Options())
    forward, backward = peaks(program)
    tiles = step.get("apart") and step["adapters"] and step["mixed"]  # cast, beside all that the loss makes
    assert (forward, backward) == pytest.approx((step["forward"], step["backward"]), rel=2e-3 if tiles else 3e-4)


@pytest.mark.parametrize(
    "step", WHOLE_FSDP_STEPS, ids=lambda one: "-".join(k for k, value in one.items() if value is True)
)
def test_step_before_tiles_under_fsdp(step: dict[str, Any], tmp_path: Path) -> None:
    """Under FSDP2, and flat under FSDP1: hooks run where the model has returned, before there is a loss, and behind the
    loss's backward. A mode that sees operators adds gradients to new tensors."""
    transformers.LlamaConfig(**MODEL).to_json_file(tmp_path / "config.json", use_diff=False)
    flags: dict[str, object] = {"model": tmp_path, "mbs": PAIRS, "seq": LENGTH, "attention": "eager"}
    flags |= {"framework": "fsdp", "gpus": RANKS, "dtype": "bf16", "versions": "trl=1.13.0"}
    stored = "fp32" if step.get("mixed") else "bf16"
    if step.get("flat"):
        flags |= {"fsdp_version": 1}
    else:
        flags |= {"fsdp_reduce": "bf16", "fsdp_parameters": stored}
        flags |= (
            {"reshard_root": "true", "ends_apart": "false"} if step["reshard"] else {"reshard_after_forward": "false"}
        )
    flags |= {"lora_rank": RANK, "lora_targets": "q_proj,v_proj", "lora_dtype": stored} if step["adapters"] else {}
    flags |= {"recompute": "full"} if step["recompute"] else {}
    flags |= {"precompute_ref_log_probs": "true"} if step["precomputed"] else {}
    (program,) = programs_of(plan(**flags), Options(accumulates_in_place=False))
    assert peaks(program) == pytest.approx((step["forward"], step["backward"]), rel=1e-4)


@pytest.mark.parametrize("step", FLAT_STEPS, ids=lambda one: "-".join(k for k, value in one.items() if value is True))
def test_step_of_trls_trainer_under_fsdp1(step: dict[str, Any], tmp_path: Path) -> None:
    """A second model's root stays gathered; what is held before differs from that without one by its shards and this
    root."""
    transformers.LlamaConfig(**MODEL).to_json_file(tmp_path / "config.json", use_diff=False)
    flags: dict[str, object] = {"model": tmp_path, "mbs": PAIRS, "seq": LENGTH, "attention": "eager"}
    flags |= {"framework": "fsdp", "fsdp_version": 1, "gpus": RANKS, "dtype": "bf16"}
    flags |= {"lora_rank": RANK, "lora_targets": "q_proj,v_proj", "lora_dtype": "bf16"} if step["adapters"] else {}
    flags |= {"recompute": "full"} if step["recompute"] else {}
    flags |= {"precompute_ref_log_probs": "true"} if step["precomputed"] else {}
    (program,) = programs_of(plan(**flags), Options())
    forward, backward = peaks(program)
    assert (forward, backward) == (pytest.approx(step["forward"], rel=3e-4), step["backward"])
    (without,) = (
        one["before"]
        for one in FLAT_STEPS
        if one == {**one, "recompute": step["recompute"], "adapters": step["adapters"]} and one["precomputed"]
    )
    if not step["adapters"]:
        held = sum(one.bytes for one in program.extra if one.name.startswith("reference/"))
        assert held == step["before"] - without


@pytest.mark.parametrize(
    "step", ALONE_STEPS, ids=lambda one: "-".join((one["loop"], *(k for k, value in one.items() if value is True)))
)
def test_step_of_a_trainer_without_a_reference_under_fully_shard(step: dict[str, Any], tmp_path: Path) -> None:
    """Forward to the byte; backward but for two numbers."""
    transformers.LlamaConfig(**MODEL).to_json_file(tmp_path / "config.json", use_diff=False)
    pairs = step["loop"] == "reward"
    flags: dict[str, object] = {"model": tmp_path, "seq": LENGTH, "attention": "eager", "trainer": step["loop"]}
    flags |= {"mbs": PAIRS if pairs else SAMPLES, "framework": "fsdp", "gpus": RANKS, "dtype": "bf16"}
    flags |= {"fsdp_reduce": "bf16", "fsdp_parameters": "bf16", "reshard_root": "true"}
    flags |= {"versions": "accelerate=1.15" if step.get("apart") else "accelerate=1.13"}
    adapted = {"lora_rank": RANK, "lora_targets": "q_proj,v_proj", "lora_dtype": "bf16"}
    flags |= adapted | ({"modules_to_save": "score"} if pairs else {}) if step["adapters"] else {}
    flags |= {"recompute": "full"} if step["recompute"] else {}
    (program,) = programs_of(plan(**flags), Options())
    forward, backward = peaks(program)
    assert (forward, backward) == (step["forward"], pytest.approx(step["backward"], abs=1024))


def test_a_second_model_is_gathered_whole_under_fsdp2() -> None:
    """Of 8,030,261,248 parameters on 8 ranks: a gather of 2 bytes each and its copies, and shards of 4 bytes."""
    flags: dict[str, object] = {"framework": "fsdp", "gpus": 8, "recompute": "full", "dtype": "bf16"}
    without, second = (
        programs_of(plan(**flags, **own), Options())[0] for own in ({"precompute_ref_log_probs": "true"}, {})
    )
    held = sum(one.bytes for one in second.extra) - sum(one.bytes for one in without.extra)
    assert held == pytest.approx(8_030_261_248 / 8 * 4, rel=1e-4)
    assert peaks(second)[0] > 4 * 8_030_261_248
    assert peaks(without)[0] < 2 * 8_030_261_248
    assert any("as one unit" in one.message for one in estimate(plan(**flags)).warnings)


def test_evaluation_of_sft_makes_no_logits() -> None:
    """64 sequences of 512 tokens would have 64 x 512 x 128,256 fp32 logits, 15.7 GiB; a tile of 4,096 x 32,768 has
    256 MiB, and one hidden state of all tokens 256 MiB."""
    trained, evaluated = (
        estimate(plan(trainer="sft", **given)).stages[0].moments["evaluation"] for given in ({}, {"eval_mbs": 64})
    )
    assert trained is not None
    assert evaluated is not None
    assert 0 < evaluated - trained < 8 << 30


def test_generation_and_a_reference_are_kept_beside() -> None:
    """8,030,261,248 parameters of two bytes; an engine's 20 GiB."""
    given: dict[str, object] = {"trainer": "grpo", "completion_length": 256, "generation_memory": 0}
    without, reference, adapters, engine = (
        estimate(plan(**given | more)).stages[0].static
        for more in (
            {},
            {"keeps_reference": "true"},
            {"keeps_reference": "true", "lora_rank": 8},
            {"generation_memory": "20GiB"},
        )
    )
    assert reference - without == pytest.approx(2 * 8_030_261_248, rel=1e-4)
    assert adapters < without
    assert engine - without == 20 << 30


AHEAD: dict[str, object] = {"trainer": "dpo", "precompute_ref_log_probs": "true"}


@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("loop", [{**GROUPED, "generation_memory": "1GiB"}, AHEAD], ids=["grpo", "dpo"])
def test_sharded_head_makes_what_it_does_alone(version: str, loop: dict[str, object]) -> None:
    """Hooks gather around a pass of the policy; the tensors of its head are those of one GPU, and generation's share
    and a batch's masks are held as there."""
    skipped = (Category.GATHERED_PARAMETERS, Category.COMMUNICATION_BUFFERS, Category.GRADIENTS)

    def made(**more: object) -> tuple[list[int], list[int]]:
        (program,) = programs_of(plan(layers=2, **loop, **more), Options())
        tapes = program.spans[-1].module.first
        own = (event for tape in (tapes.forward, tapes.backward) for event in tape if isinstance(event, Hold))
        kept = [one.bytes for one in program.extra if one.name in ("generation", "completion_mask")]
        return sorted(one.bytes for one in own if one.category not in skipped), kept

    sharded = made(framework="fsdp", gpus=4, fsdp_version=version)
    assert sharded == made()
    assert sharded[1]


def test_reference_is_a_second_model_but_with_adapters() -> None:
    """8,030,261,248 parameters of two bytes, and nothing where adapters are turned off or it ran before."""
    parameters = [
        estimate(plan(**more)).stages[0].of(Category.PARAMETERS)
        for more in ({}, {"precompute_ref_log_probs": "true"}, {"lora_rank": 8})
    ]
    assert parameters[0] - parameters[1] == pytest.approx(2 * 8_030_261_248, rel=1e-4)
    assert parameters[2] == pytest.approx(parameters[1], rel=2e-3)


def test_batches_are_of_pairs() -> None:
    one = plan(gbs=8)
    assert (one.sequences, one.microbatches, one.lora.dtype) == (4, 4, None)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"model": "bert-large"}, "no head for causal"),
        ({"model": "mixtral-8x7b"}, "with experts"),
        ({"loss": "liger"}, "must be plain"),
        (
            {"versions": "trl=1.14.0"},
            r"must be 0\.10 to 1\.13 or 1\.15 to 1\.16: the releases .* followed of trl in trainer.loop dpo",
        ),
        (
            {"versions": "trl=1.14.0", **GROUPED},
            r"must be 0\.15 to 1\.13 or 1\.15 to 1\.16: .* of trl in trainer.loop grpo",
        ),
        ({"lora_rank": 8, "use_dora": "true"}, "both together are not modelled"),
        ({"trainer": "llama-factory-dpo", "eval_mbs": 3}, r"evaluation_mbs = 3: must be at most batch\.mbs, 2"),
        ({"eval_batches": 3}, "evaluation_batches = 3: must be left out with trainer.loop dpo"),
        ({"framework": "fsdp", "gpus": 4, "reshard_to": 2}, "must be left out with the reference"),
        (
            {"framework": "fsdp", "gpus": 2, **GROUPED, "keeps_reference": "true"},
            "must be false without adapters under FSDP2",
        ),
        ({"framework": "fsdp", "gpus": 2, "fsdp_code": "torchtitan", **GROUPED}, "torchtitan"),
        (
            {"framework": "deepspeed", "gpus": 2, "zero": 1, "trainer": "transformers"},
            "none, sft, dpo, orpo, cpo, simpo, grpo, rloo or reward with",
        ),
        ({"trainer": "transformers", "precompute_ref_log_probs": "true"}, "needs trainer.loop dpo, kto or axolotl-dpo"),
        ({"trainer": "bco"}, "not modelled of trl's trainers"),
        ({"trainer": "grpo"}, r"needs --completion-length \(tokens .* and --generation-memory"),
        ({"trainer": "grpo", "completion_length": 256}, "needs --generation-memory"),
        (
            {"trainer": "grpo", "completion_length": 512, "generation_memory": 0},
            "must be less than the sequence length",
        ),
        ({"trainer": "grpo", "completion_length": 256, "generation_memory": 40}, "needs a unit: 40GiB"),
        ({"completion_length": 256}, "needs trainer.loop grpo or rloo"),
        ({"trainer": "ppo"}, "generation between steps"),
    ],
)
def test_what_is_refused(flags: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        programs_of(plan(**flags), Options())
