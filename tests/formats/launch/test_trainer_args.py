"""``--from trainer``."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from memplan.formats.accelerate import OF_TRL
from memplan.formats.launch import Asked, Launch, launched_plan
from memplan.formats.settings import LEFT
from memplan.formats.trainer.arguments import EVALUATION
from memplan.formats.trainer.keys import NOTED, READ, REFUSED, WITHOUT_EFFECT
from memplan.formats.trainer.reader import launched, read
from memplan.formats.trainer.script import Started
from memplan.formats.trainer.table import OPTIMIZER, PRECISION, ROWS
from memplan.optimizers import trainer_names
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import ReadPlan, build_plan
from memplan.plan.resolve import resolve
from memplan.plan.text import parse_yaml


def launch(folder: Path, arguments: object, strict: bool = False, **flags: str) -> Launch:
    file = folder / "arguments.json"
    file.write_text(json.dumps(arguments))
    return read(str(file), Asked(flags=flags, strict=strict))


def plan(folder: Path, arguments: object, **flags: str) -> Plan:
    given = {"model": "gpt2", **flags}
    return resolve(build_plan(launch(folder, arguments, **given).source, given).plan)


def test_every_argument_of_the_trainer_is_known() -> None:
    """And in one table alone."""
    tables = [READ, REFUSED.keys(), NOTED.keys(), WITHOUT_EFFECT]
    names = {field.name for field in fields(TrainingArguments)} - {"_n_gpu"}
    assert names <= {name for table in tables for name in table}
    counted = [name for table in (READ, NOTED.keys(), WITHOUT_EFFECT) for name in table]
    assert len(counted) == len(set(counted))


def test_defaults_are_the_trainers(tmp_path: Path) -> None:
    defaults = {field.name: field.default for field in fields(TrainingArguments)}
    rows = [row for row in (*ROWS, *PRECISION, *OPTIMIZER, *EVALUATION) if row.default is not LEFT]
    assert len(rows) == 3
    for row in rows:
        assert defaults[row.name] == row.default
    assert defaults["optim"] == "adamw_torch_fused"
    found = plan(tmp_path, {})
    assert (found.batch.mbs, found.batch.gbs, found.precision.dtype) == (8, 8, "fp32")
    assert (found.optimizer.name, found.optimizer.implementation) == ("adamw", "fused")
    assert found.trainer.loop == "transformers"


def test_evaluation_is_part_of_a_plan_that_evaluates(tmp_path: Path) -> None:
    """By default the Trainer does not; what it would evaluate with stands in every file that it writes itself."""
    size, strategy = "per_device_eval_batch_size", "eval_strategy"
    cases: list[tuple[dict[str, object], int | None]] = [
        ({}, None), ({strategy: "steps"}, 8), ({"do_eval": True}, 8), ({size: 4}, None),
        ({size: 4, strategy: "no"}, None), ({size: 4, strategy: "epoch"}, 4),
        ({size: 4, "do_eval": True}, 4), ({size: 4, "do_eval": False}, None),
    ]  # fmt: skip
    for arguments, expected in cases:
        assert plan(tmp_path, arguments).trainer.evaluation_mbs == expected


def test_evaluation_of_engines_has_its_own_batch(tmp_path: Path) -> None:
    """Larger than training's, as the Trainer's default of 8 often is; logits that metrics keep are not counted."""
    config: dict[str, object] = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    for engine in ({"fsdp": "full_shard"}, {"deepspeed": config}):
        arguments = {**engine, "bf16": True, "per_device_train_batch_size": 1, "eval_strategy": "steps"}
        found = plan(tmp_path, {**arguments, "eval_accumulation_steps": 5}, gpus="2").trainer
        assert (found.loop, found.evaluation_mbs, found.evaluation_batches) == ("none", 8, None)


def test_arguments_become_fields(tmp_path: Path) -> None:
    arguments = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "bf16": True,
        "gradient_checkpointing": True,
        "optim": "paged_adamw_8bit",
        "max_seq_length": 512,
        "dtype": "bfloat16",
        "per_device_eval_batch_size": 3,
        "eval_strategy": "steps",
        "eval_accumulation_steps": 5,
    }
    found = plan(tmp_path, arguments, gpus="2")
    assert (found.framework, found.batch.gbs, found.batch.seq) == ("ddp", 16, 512)
    assert (found.precision.autocast, found.precision.dtype, found.precision.stored) == (True, "bf16", "bf16")
    assert (found.optimizer.name, found.optimizer.paged, found.optimizer.block_size) == ("adam8bit", True, 256)
    assert found.recompute.mode == "full"
    assert (found.trainer.evaluation_batches, found.trainer.evaluation_mbs) == (5, 3)


def test_what_the_trainer_writes_is_read(tmp_path: Path) -> None:
    """A file as ``TrainingArguments`` has every key in it, at its default."""
    written = {field.name: field.default for field in fields(TrainingArguments) if _is_plain(field.default)}
    assert launch(tmp_path, written, model="gpt2").notes == ()


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float))


@pytest.mark.parametrize(
    "said", [{"torch_compile": True}, {"torch_compile_backend": "inductor"}, {"torch_compile_mode": "default"}]
)
def test_a_compiled_model_is_one_by_any_of_three_arguments(said: dict[str, object], tmp_path: Path) -> None:
    assert plan(tmp_path, {**said, "bf16": True}).compile
    assert not plan(tmp_path, dict.fromkeys(said, None)).compile


def test_flags_override_arguments(tmp_path: Path) -> None:
    assert plan(tmp_path, {"gradient_accumulation_steps": 4}, gbs="16").batch.gbs == 16
    assert plan(tmp_path, {}, framework="device-map", gpus="2").framework == "device-map"


def test_every_optimizer_is_one_of_the_trainers(tmp_path: Path) -> None:
    assert set(trainer_names()) <= {name.value for name in OptimizerNames}
    for name in trainer_names():
        plan(tmp_path, {"optim": name})


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"my_own_setting": 1e-5}, "argument-unknown"),
        ({"torch_empty_cache_steps": 4}, "argument-not-modelled"),
        ({"use_cache": True}, "argument-not-modelled"),
        ({"eval_strategy": "epoch"}, "evaluation-logits"),
    ],
)
def test_what_is_assumed_is_said(arguments: dict[str, object], code: str, tmp_path: Path) -> None:
    assert code in {note.code for note in launch(tmp_path, arguments, model="gpt2").notes}


@pytest.mark.parametrize("key", ["gradient_checkpointing", "activation_checkpointing"])
def test_checkpoints_turn_the_cache_off(key: str, tmp_path: Path) -> None:
    """``GradientCheckpointingLayer.__call__`` sets ``use_cache`` of what it hands on to false."""
    told = {note.code for note in launch(tmp_path, {"use_cache": True, key: True}, model="gpt2").notes}
    assert "argument-not-modelled" not in told


def test_ligers_pieces_are_read_as_transformers_passes_them(tmp_path: Path) -> None:
    """``liger_kernel_config``: keywords of ``apply_liger_kernel``, all others as Liger has them."""
    config = {"swiglu": False, "fused_linear_cross_entropy": False, "cross_entropy": True}
    arguments = {"use_liger_kernel": True, "liger_kernel_config": config, "dtype": "bfloat16"}
    read = plan(tmp_path, arguments, model="llama-3-8b")
    given = read.kernels
    assert (given.norm, given.rope, given.mlp, read.loss.kind) == ("liger", "liger", "eager", "liger-cross-entropy")
    whole = plan(tmp_path, {"use_liger_kernel": True, "dtype": "bfloat16"}, model="llama-3-8b")
    assert (whole.kernels.mlp, whole.loss.kind) == ("liger", "liger")


@pytest.mark.parametrize(
    ("optim", "given", "momentum"),
    [
        ("sgd", "momentum=0.9, nesterov=false", 0.9),
        ("sgd", {"momentum": 0.5}, 0.5),
        ("sgd", "weight_decay=0.1", 0.0),
        ("adamw_torch", "momentum=0.9", 0.0),
    ],
)
def test_momentum_is_among_the_optimizers_arguments(optim: str, given: object, momentum: float, tmp_path: Path) -> None:
    """``_get_sgd`` reads it, and Adam's function does not: every parameter has a buffer then."""
    read = plan(tmp_path, {"optim": optim, "optim_args": given}, model="gpt2")
    assert read.optimizer.momentum == momentum


def test_momentum_is_not_read_before_the_trainer_takes_it(tmp_path: Path) -> None:
    """Up to 5.2 ``_get_sgd`` returns ``torch.optim.SGD`` with the learning rate alone, and nesterov is no matter."""
    arguments = {"optim": "sgd", "optim_args": "momentum=0.9,nesterov=true"}
    read = plan(tmp_path, arguments, model="gpt2", versions="transformers=5.2.0")
    assert read.optimizer.momentum == 0
    with pytest.raises(PlanError, match="must be without nesterov"):
        plan(tmp_path, arguments, model="gpt2", versions="transformers=5.3.0")


def test_ligers_gate_of_gemma_has_another_name(tmp_path: Path) -> None:
    """``apply_liger_kernel_to_gemma2(geglu=…)``; ``layer_norm`` is of towers for images."""
    arguments = {
        "use_liger_kernel": True,
        "dtype": "bfloat16",
        "liger_kernel_config": {"geglu": False, "layer_norm": True},
    }
    given = plan(tmp_path, arguments, model="gemma-2-9b").kernels
    assert (given.norm, given.rope, given.mlp) == ("liger", "liger", "eager")


@pytest.mark.parametrize(
    ("model", "config", "mlp"),
    [
        ("llama-3-8b", {"geglu": False}, "liger"),
        ("llama-3-8b", {"swiglu": False, "geglu": True}, "eager"),
        ("gemma-2-9b", {"swiglu": False}, "liger"),
        ("gemma-2-9b", {"swiglu": True, "geglu": False}, "eager"),
        ("gemma-2-9b", {"swiglu": False, "geglu": False}, "eager"),
    ],
)
def test_a_piece_that_the_models_function_does_not_take_is_passed_over(
    model: str, config: dict[str, object], mlp: str, tmp_path: Path
) -> None:
    """``_apply_liger_kernel`` keeps the arguments that are in the function's signature."""
    given = {"use_liger_kernel": True, "dtype": "bfloat16", "liger_kernel_config": config}
    assert plan(tmp_path, given, model=model).kernels.mlp == mlp


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"optim": "galore_adamw"}, "optim = galore_adamw"),
        ({"deepspeed": "no.json"}, "deepspeed = no.json: no such file"),
        ({"lerning_rate": 1e-5}, "lerning_rate = 1e-05: is no key that is read; did you mean learning_rate?"),
        ({"model": "gpt2"}, "did you mean model_max_length or model_name_or_path?"),
        ({"fsdp": "hybrid_shard"}, "FULL_SHARD"),
        ({"fsdp": "full_shard", "fsdp_config": {"version": 3}}, "fsdp_version = 3: must be 1 or 2"),
        ({"fsdp": True, "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP"}}, "TRANSFORMER_BASED_WRAP"),
        ({"bf16": True, "fp16": True}, "one autocast"),
        ({"bf16": "yes"}, "true or false"),
        ({"optim": "sgd", "optim_args": "momentum=0.9,nesterov=True"}, "must be without nesterov"),
        ({"parallelism_config": {"tp_size": 2}}, "Accelerate's parallelism is not modelled around the Trainer"),
        ({"optim": "sgd", "optim_args": "momentum=much"}, "must have a number as momentum"),
        (
            {"use_liger_kernel": True, "liger_kernel_config": {"cross_entropy": True}},
            "must be false unless fused_linear_cross_entropy is",
        ),
        ({"use_liger_kernel": True, "liger_kernel_config": {"group_norm": True}}, "group_norm = true: is not modelled"),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}}, "offload = true"),
        ({"torch_compile": False, "torch_compile_mode": "max-autotune"}, "max-autotune: must be default"),
        ({"torch_compile_backend": "aot_eager"}, "torch_compile_backend = aot_eager: must be inductor"),
        ({"attn_implementation": "flex_attention"}, "attention = flex_attention: is not modelled"),
        ({"dtype": "int8", "bf16": True}, "float16 or auto"),
        ({"framework": "single"}, "leave out --from"),
        ([1], "mapping"),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(arguments: object, says: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=says) as caught:
        plan(tmp_path, arguments)
    assert "\n" not in str(caught.value)


def test_strict_refuses_what_is_only_noted(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="strict"):
        launch(tmp_path, {"torch_empty_cache_steps": 4}, strict=True, model="gpt2")


PACKED: dict[str, object] = {"per_device_train_batch_size": 4, "max_length": 1024, "packing": True, "bf16": True}


@pytest.mark.parametrize(
    ("more", "attention", "codes"),
    [
        ({}, "flash_attention_2", ["packed-rows", "padding-free"]),
        ({"packing_strategy": "bfd_split"}, "flash_attention_2", ["packed-rows", "padding-free"]),
        ({"packing_strategy": "wrapped"}, None, ["packed-rows"]),
        ({"packing": False, "padding_free": True}, "flash_attention_2", ["padding-free"]),
        ({"attn_implementation": "flash_attention_3"}, "flash_attention_3", ["packed-rows", "padding-free"]),
        ({"packing": False}, None, []),
    ],
)
def test_packed_rows_are_full_ones(more: dict[str, object], attention: str | None, codes: list[str]) -> None:
    read = trained({**PACKED, **more})
    assert (read.plan.batch.mbs, read.plan.batch.seq, read.plan.attention) == (4, 1024, attention)
    assert [note.code for note in read.warnings if note.code in ("packed-rows", "padding-free")] == codes
    assert not any("is no key" in note.message or "not modelled" in note.message for note in read.warnings)


def test_packing_needs_a_kernel_that_takes_documents() -> None:
    with pytest.raises(PlanError, match="attn_implementation = sdpa: must be flash_attention_2 or flash_attention_3"):
        trained({**PACKED, "attn_implementation": "sdpa"})


def trained(arguments: dict[str, object]) -> ReadPlan:
    flags = {"model": "llama-3-8b"}
    found = Started(parse_yaml(json.dumps(arguments), "arguments.json"), Path())
    return launched_plan(launched(found, Asked("trainer", flags)), flags)


def test_one_row_of_all_tokens_is_reshaped_without_copies() -> None:
    """Rotary products keep the order in memory of what the linear layers made, so that a row's queries and keys are
    contiguous where transformers flattens them (``_flash_attention_forward``)."""
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    made = torch.randn(1, 6, 8, 16).transpose(1, 2)
    angles = torch.randn(1, 6, 16)
    rotated, _ = llama.apply_rotary_pos_emb(made, made, angles, angles)
    for states in (made, rotated):
        row = states.transpose(1, 2)
        assert row.reshape(-1, 8, 16).data_ptr() == row.data_ptr()


PEFT = {"model_name_or_path": "meta-llama/Llama-3.1-8B", "use_peft": True, "load_in_4bit": True, "bf16": True}


def test_adapters_and_four_bits_of_trls_scripts(tmp_path: Path) -> None:
    """With the defaults of ``ModelConfig``: rank 16, dropout 0.05, nf4."""
    made = plan(tmp_path, {**PEFT, "lora_target_modules": ["c_attn"], "use_bnb_nested_quant": True})
    assert (made.lora.rank, made.lora.dropout, made.lora.targets) == (16, 0.05, ("c_attn",))
    assert (made.quantisation.kind, made.quantisation.double) == ("nf4", True)
    assert plan(tmp_path, {**PEFT, "use_peft": False, "load_in_4bit": False, "lora_r": 8}).lora.rank is None
    more = {"lora_alpha": 8, "lora_modules_to_save": ["lm_head"], "use_dora": True, "use_rslora": True}
    made = plan(tmp_path, {**PEFT, **more}, model="llama-3-8b")
    assert (made.lora.alpha, made.lora.dora, made.lora.rslora) == (8, True, True)
    assert made.lora.modules_to_save == ("lm_head",)


def test_frozen_shards_stay_as_loaded_and_uint8_is_not_cut(tmp_path: Path) -> None:
    sharded = {**PEFT, "fsdp": "full_shard", "fsdp_config": {"version": 2}}
    made = plan(tmp_path, sharded, gpus="4")
    assert (made.fsdp.parameters, made.lora.dtype, made.quantisation.storage) == ("bf16", "fp32", "uint8")
    made = plan(tmp_path, {**sharded, "bnb_4bit_quant_storage": "bfloat16", "dtype": "float32"}, gpus="4")
    assert (made.fsdp.parameters, made.quantisation.storage) == ("fp32", "bf16")


DPO = {"model_name_or_path": "meta-llama/Llama-3.1-8B", "per_device_train_batch_size": 2, "use_peft": True}


def test_pairs_of_trls_dpo(tmp_path: Path) -> None:
    """With the defaults of ``DPOConfig``: bf16, gradient checkpointing, 1,024 tokens."""
    made = plan(tmp_path, {**DPO, "beta": 0.1, "loss_type": "ipo", "precompute_ref_log_probs": True})
    assert (made.trainer.loop, made.trainer.precompute_ref_log_probs, made.batch.seq) == ("dpo", True, 1024)
    assert (made.recompute.mode, made.precision.autocast) == ("full", True)
    made = plan(tmp_path, {**DPO, "beta": 0.1, "fp16": True, "gradient_checkpointing": False}, trainer="dpo")
    assert (made.recompute.mode, made.precision.dtype, made.sequences) == ("none", "fp16", 4)
    with pytest.raises(PlanError, match="several of trl's trainers"):
        plan(tmp_path, {**DPO, "beta": 0.1})
    assert plan(tmp_path, {**DPO, "eval_strategy": "steps"}, trainer="dpo").trainer.evaluation_mbs == 8


REWARD = {"model_name_or_path": "Qwen/Qwen2.5-7B", "per_device_train_batch_size": 2, "use_peft": True}


def test_scores_of_trls_reward_trainer(tmp_path: Path) -> None:
    """With the defaults of ``RewardConfig``: bf16, gradient checkpointing, 1,024 tokens; peft trains a copy of the head
    for sequence classification alone."""
    made = plan(tmp_path, {**REWARD, "center_rewards_coefficient": 0.01, "lora_task_type": "SEQ_CLS"})
    assert (made.trainer.loop, made.batch.seq, made.sequences) == ("reward", 1024, 4)
    assert (made.recompute.mode, made.precision.autocast, made.model.labels) == ("full", True, 1)
    assert made.lora.modules_to_save == ("score",)
    given = {**REWARD, "lora_task_type": "SEQ_CLS", "lora_modules_to_save": ["wte"]}
    assert plan(tmp_path, given, trainer="reward").lora.modules_to_save == ("wte", "score")
    assert plan(tmp_path, REWARD, trainer="reward").lora.modules_to_save is None
    given = {**REWARD, "max_completion_length": 64, "eval_strategy": "steps"}
    assert plan(tmp_path, given, trainer="grpo").trainer.evaluation_mbs == 8
    given = {**REWARD, "eval_strategy": "steps"}
    assert plan(tmp_path, given, trainer="reward").trainer.evaluation_mbs == 8
    assert plan(tmp_path, given, trainer="reward", **{"eval-mbs": "2"}).trainer.evaluation_mbs == 2
    made = plan(tmp_path, {**REWARD, "use_liger_kernel": True}, trainer="reward", model="llama-3-8b")
    assert (made.kernels.norm, made.loss.kind) == ("liger", "plain")


@pytest.mark.parametrize(
    ("script", "own", "loop"),
    [
        ("online_dpo", "--reward_model_path other", "online-dpo"),
        ("distillation", "--teacher_model_name_or_path other", "distillation"),
        ("sdpo", "--num_generations 8", "sdpo"),
    ],
)
def test_a_trainer_that_is_not_modelled_is_named_before_its_arguments(
    script: str, own: str, loop: str, tmp_path: Path
) -> None:
    """trl 1.16's ``examples/scripts``: their own arguments are near to other trainers' keys."""
    command = f"python examples/scripts/{script}.py --model_name_or_path gpt2 {own}\n"
    (tmp_path / "train.sh").write_text(command)
    with pytest.raises(PlanError, match=f"trainer.loop = {loop}: is not modelled of trl's trainers"):
        build_plan(read(str(tmp_path / "train.sh"), Asked(flags={})).source, {})


def test_a_command_line_has_mappings_as_json(tmp_path: Path) -> None:
    """``TrainingArguments.__post_init__``, ``_VALID_DICT_FIELDS``, to which trl adds ``model_init_kwargs``."""
    script = tmp_path / "train.sh"

    def made(words: str) -> Plan:
        script.write_text(f"trl sft --model_name_or_path gpt2 --max_length 512 --gradient_checkpointing {words}\n")
        return build_plan(read(str(script), Asked(flags={})).source, {}).plan

    assert made("""--gradient_checkpointing_kwargs '{"use_reentrant": true}'""").recompute.reentrant is True
    assert made("""--gradient_checkpointing_kwargs '{"use_reentrant": false}'""").recompute.reentrant is False
    loaded = made("""--model_init_kwargs '{"dtype": "bfloat16", "attn_implementation": "eager"}'""")
    assert (loaded.precision.parameters, loaded.attention) == ("bf16", "eager")
    with pytest.raises(PlanError, match=r"train\.sh:1: gradient_checkpointing_kwargs: is not valid YAML"):
        made("""--gradient_checkpointing_kwargs '{"use_reentrant": '""")


def test_sft_makes_no_logits_since_trl_1_15(tmp_path: Path) -> None:
    """Liger's layers are left then, but not its loss; of an earlier release the loss is the model's."""
    command = "trl sft --model_name_or_path gpt2 --max_length 512"
    (tmp_path / "train.sh").write_text(f"{command} --eval_strategy steps --loss_type chunked_nll\n")

    def made(**flags: str) -> Plan:
        given = {"model": "gpt2", **flags}
        return resolve(build_plan(read(str(tmp_path / "train.sh"), Asked(flags=given)).source, given).plan)

    newest, earlier = made(), made(versions="trl=1.9.0")
    assert (newest.trainer.loop, newest.trainer.evaluation_mbs) == ("sft", 8)
    assert (earlier.trainer.loop, earlier.batch.seq) == ("transformers", 512)
    (tmp_path / "train.sh").write_text(f"{command} --use_liger_kernel true\n")
    assert made(model="llama-3-8b").loss.kind == "plain"
    (tmp_path / "train.sh").write_text(f"{command} --loss_type dft\n")
    with pytest.raises(PlanError, match="must be nll"):
        made()


def test_a_frozen_head_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("trl reward --model_name_or_path gpt2 --use_peft --max_length 512\n")
    assert "head-frozen" in [note.code for note in read(str(tmp_path / "train.sh"), Asked()).notes]


GRPO = {"model_name_or_path": "Qwen/Qwen2.5-7B", "per_device_train_batch_size": 8, "num_generations": 8}


def test_groups_of_trls_grpo(tmp_path: Path) -> None:
    """With the defaults of ``GRPOConfig``: bf16, gradient checkpointing, completions of 256 tokens, no reference."""
    made = plan(tmp_path, {**GRPO, "temperature": 0.7}, trainer="grpo")
    trainer = made.trainer
    assert (trainer.completion_length, trainer.generation_memory, trainer.keeps_reference) == (256, 0, False)
    assert (made.recompute.mode, made.precision.autocast, made.sequences) == ("full", True, 8)
    given = {**GRPO, "steps_per_generation": 4, "max_prompt_length": 256, "max_completion_length": 512, "beta": 0.04}
    made = plan(tmp_path, {**given, "use_vllm": True, "vllm_mode": "server"})
    assert (made.trainer.loop, made.batch.seq, made.trainer.keeps_reference) == ("grpo", 768, True)
    given = {**GRPO, "steps_per_generation": 4, "sync_ref_model": True, "beta": 0.04}
    assert plan(tmp_path, given).trainer.loop == "grpo"
    for key in ("num_generations", "max_completion_length", "use_vllm"):
        with pytest.raises(PlanError, match=f"{key} = .* several of trl's trainers"):
            plan(tmp_path, {"model_name_or_path": "gpt2", key: 4})
    with pytest.raises(PlanError, match="cast_lm_head_to_fp32 = true: must be false"):
        plan(tmp_path, {**GRPO, "cast_lm_head_to_fp32": True}, trainer="grpo")
    with pytest.raises(PlanError, match="needs --generation-memory"):
        plan(tmp_path, {**GRPO, "use_vllm": True, "vllm_mode": "colocate"}, trainer="grpo")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("trl dpo", "dpo"),
        ("accelerate launch -m trl dpo", "dpo"),
        ("trl reward", "reward"),
        ("python scripts/sft.py", "sft"),
    ],
)
def test_trls_commands(command: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(f"{command} --model_name_or_path gpt2 --bf16 --max_length 512\n")
    source = read(str(tmp_path / "train.sh"), Asked()).source
    assert resolve(build_plan(source, {"model": "gpt2"}).plan).trainer.loop == says


@pytest.mark.parametrize(
    ("command", "framework", "gpus"),
    [
        ("trl dpo --num_processes 8", "ddp", 8),
        ("accelerate launch --num_processes 4 trl dpo", "ddp", 4),
        ("accelerate launch --num_processes 4 --mixed_precision bf16 llamafactory-cli train", "ddp", 4),
        ("trl sft --num_machines 2 --num_processes 16 --main_process_port 1", "ddp", 16),
        ("trl sft --accelerate_config zero3", "deepspeed", 8),
        ("trl sft --accelerate_config fsdp2 --num_processes 4", "fsdp", 4),
        ("trl dpo --accelerate_config single_gpu", "single", 1),
        ("trl sft --config_file accelerate.yaml", "fsdp", 2),
        ("trl sft --config sft.yaml --num_processes 6", "deepspeed", 6),
    ],
)
def test_the_launchers_flags_behind_a_command_of_trl(command: str, framework: str, gpus: int, tmp_path: Path) -> None:
    """trl passes on what its parser does not know, of the file of ``--config``, too."""
    (tmp_path / "accelerate.yaml").write_text("{distributed_type: FSDP, num_processes: 2, fsdp_config: {}}")
    (tmp_path / "sft.yaml").write_text("{model_name_or_path: gpt2, accelerate_config: zero1}")
    (tmp_path / "train.sh").write_text(f"{command} --model_name_or_path gpt2 --max_length 512\n")
    found = read(str(tmp_path / "train.sh"), Asked())
    assert [note.code for note in found.notes if "unknown" in note.code] == []
    made = resolve(build_plan(found.source, {"model": "gpt2"}).plan)
    assert (made.framework, made.hardware.gpus) == (framework, gpus)
    with pytest.raises(PlanError, match="none of trl's configurations: single_gpu"):
        plan(tmp_path, {"model_name_or_path": "gpt2", "accelerate_config": "zero4"})


def test_processes_that_nobody_knows_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("trl sft --num_processes $N --model_name_or_path gpt2 --max_length 512\n")
    with pytest.raises(PlanError, match="--set N="):
        read(str(tmp_path / "train.sh"), Asked())
    assert read(str(tmp_path / "train.sh"), Asked(flags={"gpus": "8"})).source


def test_every_launcher_configuration_of_trl_is_one_that_is_read(tmp_path: Path) -> None:
    """Processes, bf16 and sharding as in ``trl/accelerate_configs``; one that runs alone is bf16, too."""
    for name in OF_TRL:
        made = plan(tmp_path, {"model_name_or_path": "gpt2", "accelerate_config": name, "bf16": True, "max_length": 64})
        assert made.hardware.gpus == (1 if name == "single_gpu" else 8)
        assert made.layout.zero == (int(name[-1]) if name.startswith("zero") else 0)


def test_8_bit_weights_and_experts_weights_are_read(tmp_path: Path) -> None:
    eight = {**PEFT, "load_in_4bit": False, "load_in_8bit": True}
    assert plan(tmp_path, eight).quantisation.kind == "int8"
    with pytest.raises(PlanError, match="load_in_4bit"):
        plan(tmp_path, {**eight, "load_in_4bit": True})
    with pytest.raises(PlanError, match="stacks of experts"):
        plan(tmp_path, {**PEFT, "lora_target_parameters": ["experts.down_proj"]})


def test_the_engine_keeps_a_model_that_it_is_not_told_to_cast(tmp_path: Path) -> None:
    """``_configure_distributed_model`` of DeepSpeed's ``runtime/engine.py`` casts for fp16 and bf16 alone; its check of
    the dtype of parameters returns at once."""
    given = {"model_name_or_path": "gpt2", "deepspeed": {"zero_optimization": {"stage": 2}}}
    loaded = {**given, "torch_dtype": "bfloat16"}
    with pytest.raises(PlanError, match="dtype = bf16: must be float32 where neither the arguments nor DeepSpeed's"):
        plan(tmp_path, loaded, gpus="2")
    for told in ({"bf16": True}, {"deepspeed": {**given["deepspeed"], "bf16": {"enabled": True}}}):  # type: ignore[dict-item]
        assert plan(tmp_path, {**loaded, **told}, gpus="2").precision.dtype == "bf16"
    assert plan(tmp_path, loaded, gpus="2", dtype="bf16").precision.dtype == "bf16"
    assert plan(tmp_path, given, gpus="2").precision.dtype == "fp32"
    assert "loaded-dtype" in [note.code for note in launch(tmp_path, given, gpus="2").notes]


@pytest.mark.parametrize(
    ("trainer", "named"),
    [
        ("OnlineDPO", "online-dpo"),
        ("XPO", "xpo"),
        ("NashMD", "nash-md"),
        ("BCO", "bco"),
    ],
)
def test_other_trainers_of_trl_are_refused_by_name(trainer: str, named: str, tmp_path: Path) -> None:
    """Not taken for transformers' own, whose memory is another."""
    script = f"from trl import {trainer}Config, {trainer}Trainer\n"
    script += f'{trainer}Trainer("gpt2", args={trainer}Config(per_device_train_batch_size=2)).train()\n'
    (tmp_path / "own.py").write_text(script)
    with pytest.raises(PlanError, match=f"trainer.loop = {named}: is not modelled of trl's trainers"):
        build_plan(read(str(tmp_path / "own.py"), Asked()).source, {})


@pytest.mark.parametrize(
    ("trainer", "said", "loop"),
    [
        ("KTO", "", "kto"),
        ("ORPO", "", "orpo"),
        ("CPO", "", "cpo"),
        ("CPO", "loss_type='simpo', cpo_alpha=0.5", "cpo"),
        ("CPO", "loss_type='simpo', cpo_alpha=0.0", "simpo"),
        ("CPO", "loss_type='alphapo'", "simpo"),
        ("RLOO", "max_completion_length=128", "rloo"),
    ],
)
def test_trainers_of_trl_are_loops(trainer: str, said: str, loop: str, tmp_path: Path) -> None:
    """``experimental/cpo/cpo_config.py``: a cross entropy unless its weight is 0, as for alphapo; RLOO has a reference
    unless its beta is 0. What a trainer is given by name is loaded in fp32, but by those of ``trl.experimental``."""
    script = f"from trl import {trainer}Config, {trainer}Trainer\n"
    script += f"args = {trainer}Config(per_device_train_batch_size=2, {said})\n"
    (tmp_path / "own.py").write_text(f'{script}{trainer}Trainer("gpt2", args=args, train_dataset=d).train()\n')
    found = resolve(build_plan(read(str(tmp_path / "own.py"), Asked()).source, {}).plan)
    assert (found.trainer.loop, found.batch.mbs, found.recompute.mode) == (loop, 2, "full")
    assert found.precision.stored == "fp32"  # gpt2's checkpoint, too
    assert (found.trainer.keeps_reference, found.trainer.completion_length) == (
        (True, 128) if loop == "rloo" else (False, None)
    )


@pytest.mark.parametrize(("weight", "loop"), [("", "cpo"), (" --cpo_alpha 0.0", "simpo")])
def test_a_script_is_simpo_without_a_cross_entropy_alone(weight: str, loop: str, tmp_path: Path) -> None:
    """Whatever it is called: ``CPOConfig.cpo_alpha`` is 1 by default."""
    command = f"python simpo.py --model_name_or_path gpt2 --per_device_train_batch_size 2 --loss_type simpo{weight}\n"
    (tmp_path / "train.sh").write_text(command)
    assert build_plan(read(str(tmp_path / "train.sh"), Asked()).source, {}).plan.trainer.loop == loop


def test_orpos_four_bits_are_prepared(tmp_path: Path) -> None:
    """``experimental/orpo/orpo_trainer.py``: adapters stay in fp32 there."""
    (tmp_path / "own.py").write_text(
        """
from trl import ORPOConfig, ORPOTrainer
model = AutoModelForCausalLM.from_pretrained("gpt2", quantization_config=BitsAndBytesConfig(load_in_4bit=True))
args = ORPOConfig(per_device_train_batch_size=2, max_length=512)
ORPOTrainer(model, args=args, train_dataset=d, peft_config=LoraConfig(r=8)).train()
"""
    )
    found = resolve(build_plan(read(str(tmp_path / "own.py"), Asked()).source, {}).plan)
    assert (found.quantisation.prepared, found.lora.dtype, found.trainer.loop) == (True, "fp32", "orpo")


@pytest.mark.parametrize("command", ["simpo", "orpo", "env", "vllm-serve"])
def test_other_commands_of_trl_are_no_training(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(f"trl {command} --model_name_or_path gpt2 --per_device_train_batch_size 2\n")
    with pytest.raises(PlanError, match=f"trl {command}, which is none"):
        build_plan(read(str(tmp_path / "train.sh"), Asked()).source, {})
