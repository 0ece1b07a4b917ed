"""ms-swift's files and commands: each means the Trainer's arguments that ms-swift itself makes of it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from memplan.estimate import estimate
from memplan.formats import reader
from memplan.formats.launch import Asked, launched_plan
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.resolve import resolve


def plan_of(text: str, folder: Path, name: str = "sft.sh", **flags: str) -> Plan:
    (folder / name).write_text(text, encoding="utf-8")
    return launched_plan(reader("trainer")(str(folder / name), Asked("trainer", flags)), flags).plan


COMMAND = "swift sft --model Qwen/Qwen2.5-7B-Instruct --train_type lora --dataset x --max_length 2048"


def test_what_it_has_by_default(tmp_path: Path) -> None:
    """``TunerArguments`` and ``TrainArgumentsMixin``: rank 8 on all linear layers, checkpoints, 16 sequences a step."""
    plan = plan_of(COMMAND, tmp_path)
    assert plan.framework == "single"
    assert plan.lora is not None
    assert (plan.lora.rank, plan.lora.targets, plan.lora.dropout) == (8, ("all-linear",), 0.05)
    assert (plan.batch.mbs, plan.batch.gbs or plan.batch.accumulation, plan.batch.seq) == (1, 16, 2048)
    assert (plan.precision.dtype, plan.precision.autocast, plan.precision.parameters) == ("bf16", True, "bf16")
    assert plan.recompute.mode == "full"


def test_checkpoints_are_reentrant_unless_the_command_says_more(tmp_path: Path) -> None:
    """``_fix_gradient_checkpointing``: kwargs that say ``use_reentrant`` stand, JSON on a command line."""
    assert plan_of(COMMAND, tmp_path).recompute.reentrant is True
    words = """--gradient_checkpointing_kwargs '{"use_reentrant": false}'"""
    assert plan_of(f"{COMMAND} {words}", tmp_path).recompute.reentrant is False


def test_variables_say_how_many_processes(tmp_path: Path) -> None:
    plan = plan_of(f"NPROC_PER_NODE=4 NNODES=2 {COMMAND} --per_device_train_batch_size 2 --deepspeed zero3", tmp_path)
    assert (plan.framework, plan.hardware.gpus, plan.batch.accumulation) == ("deepspeed", 8, 1)
    assert plan.deepspeed is not None
    assert (plan.layout.zero, plan.deepspeed.overlap_comm) == (3, False)


def test_a_number_of_nodes_that_is_not_known_is_asked_for(tmp_path: Path) -> None:
    """``examples/train/multi-node/dlc/train.sh``: once taken for one node."""
    text = f"NNODES=$WORLD_SIZE NPROC_PER_NODE=8 {COMMAND} --deepspeed zero3"
    for one in (text, text.removesuffix(" --deepspeed zero3"), text.replace("_NODE=8", "_NODE=$G")):
        with pytest.raises(PlanError, match=r"hardware\.gpus: is needed, and \$WORLD_SIZE .* --gpus N"):
            plan_of(one, tmp_path)
    for count in ("abc", "1.5", "0"):
        with pytest.raises(PlanError, match=f"NNODES = {count}: must be a whole number of 1 or more"):
            plan_of(text.replace("$WORLD_SIZE", count), tmp_path)
    assert plan_of(text.replace("$WORLD_SIZE", "3"), tmp_path).hardware.gpus == 24
    assert plan_of(text, tmp_path, gpus="16").hardware.gpus == 16


def test_its_file_is_the_same_as_its_command(tmp_path: Path) -> None:
    file = "model: Qwen/Qwen2.5-7B-Instruct\ntrain_type: lora\ndataset: [x]\nmax_length: 2048\n"
    file += "quant_bits: 4\nquant_method: bnb\n"
    command = f"{COMMAND} --quant_bits 4 --quant_method bnb --target_modules all-linear"
    assert plan_of(file, tmp_path, "sft.yaml") == plan_of(command, tmp_path)


def test_packed_rows_have_a_length_of_their_own(tmp_path: Path) -> None:
    """``BaseArguments.__post_init__``: ``packing_length`` is ``max_length`` where it is left out, and means nothing
    without packing."""
    words = f"{COMMAND} --packing_length 8192 --attn_impl flash_attn"
    assert plan_of(f"{words} --packing true", tmp_path).batch.seq == 8192
    assert plan_of(words, tmp_path).batch.seq == 2048


@pytest.mark.parametrize(
    ("words", "loss"),
    [
        ("", "liger"),
        ("--loss_scale last_round+ignore_empty_think", "liger"),
        ("--loss_scale react", "plain"),
        ("--loss_scale last_round+hermes", "plain"),
        ("--loss_scale react --is_binary_loss_scale true", "liger"),
        ("--enable_channel_loss true", "plain"),
    ],
)
def test_a_loss_that_weighs_tokens_is_not_ligers(words: str, loss: str, tmp_path: Path) -> None:
    """``compute_loss``: "loss function defined in Liger Kernel will not take effect"; its layers do."""
    plan = resolve(plan_of(f"{COMMAND} --use_liger_kernel true {words}", tmp_path))
    assert (plan.loss.kind, plan.kernels.norm) == (loss, "liger")


def test_a_flag_names_another_optimizer_than_the_file(tmp_path: Path) -> None:
    """``adamw_torch`` is PyTorch's foreach, and the Trainer's own default its fused kernel."""
    plan = plan_of(f"{COMMAND} --optim adamw_torch_fused", tmp_path, optimizer="adamw_torch")
    assert (plan.optimizer.name, plan.optimizer.implementation) == ("adamw", "foreach")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--tuner_backend unsloth", "Unsloth"),
        ("--lora_dtype bfloat16", "fp32"),
        ("--sequence_parallel_size 4", "sequence parallelism"),
        ("--quant_method hqq --quant_bits 4", "must be bnb, or left out"),
        ("--quant_method fp8", "must be bnb, or left out"),
        ("--quant_bits 4", "needs quant_method: bnb, without which ms-swift quantises nothing"),
        ("--quantization_bit 3", "must be 4 or 8"),
        ("--adapters output/checkpoint-100", "as large as their adapter_config.json says"),
        ("--trainable_parameters lm_head", "parameters chosen by name"),
        ("--experts_impl eager", "must be grouped_mm"),
        ("--fsdp ./fsdp2.json", "names a file of FSDP's settings"),
        ("--micro_batch_size 1", "memplan estimate --framework megatron --zero 1 --gpus N --model qwen2.5-7b"),
        ("--rlhf_type dpo", "--trainer dpo"),
    ],
)
def test_what_is_not_modelled_is_refused(words: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=problem):
        plan_of(f"{COMMAND} {words}", tmp_path)


def test_routers_have_a_loss_where_there_are_any(tmp_path: Path) -> None:
    """``_prepare_inputs``: of ``is_moe_model`` alone, where ``output_router_logits`` is an argument of the model's
    class, as it is not of DeepSeek V3's in transformers; refused where a ``config.json`` that says so is."""
    asked = f"{COMMAND} --router_aux_loss_coef 1e-3".replace("--train_type lora", "--train_type full")
    dense, without = "Qwen2.5-7B-Instruct", asked.replace("--router_aux_loss_coef 1e-3", "")
    assert plan_of(asked, tmp_path) == plan_of(without, tmp_path)
    mixture, other = asked.replace(dense, "Qwen3-30B-A3B"), asked.replace("Qwen/" + dense, "deepseek-ai/DeepSeek-V3")
    with pytest.raises(PlanError, match=r"model\.router_loss = true: must be false \(output_router_logits\)"):
        estimate(plan_of(mixture, tmp_path))
    assert not plan_of(mixture.replace("1e-3", "0"), tmp_path).model.router_loss
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

    assert "output_router_logits" not in inspect.signature(DeepseekV3ForCausalLM.forward).parameters
    assert "output_router_logits" in inspect.signature(Qwen3MoeForCausalLM.forward).parameters
    assert resolve(plan_of(other, tmp_path)).model == resolve(plan_of(without, tmp_path, model="deepseek-v3")).model


def test_a_name_of_swift_starts_nothing(tmp_path: Path) -> None:
    """``--model_author swift`` of ``examples/megatron/fp8/lora.sh``, whose command is ``megatron sft``."""
    text = "megatron sft --model Qwen/Qwen3-8B --model_author swift --model_name it --tuner_type lora --lora_rank 8\n"
    with pytest.raises(PlanError, match="starts ms-swift's Megatron, whose command is not read"):
        plan_of(text, tmp_path)
