"""Configurations of LLaMA-Factory, as its examples write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import memplan
from memplan.cli import main
from memplan.plan.errors import PlanError

EXAMPLE = """\
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,alpaca_en_demo
template: qwen3_nothink
cutoff_len: 1024
overwrite_cache: true
output_dir: saves/out
plot_loss: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
bf16: true
ddp_timeout: 180000000
"""
SAME = ["--model=qwen3-4b-2507", "--trainer=transformers", "--gpu=h100", "--mbs=2", "--accumulation=8", "--seq=1024"]
SAME += ["--dtype=bf16", "--autocast", "--recompute=full", "--use-reentrant", "--optimizer=adamw_torch_fused"]
ADAPTERS = ["--autocast-parameters=bf16", "--lora-rank=8", "--lora-targets=all-linear", "--lora-dropout=0"]


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(["estimate", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["stages"][0]
    return {key: found[key] for key in ("static_bytes", "allocated_bytes", "reserved_bytes")}


@pytest.mark.parametrize(
    ("change", "flags"),
    [
        (("", ""), ADAPTERS),
        (("finetuning_type: lora", "finetuning_type: full"), ["--autocast-parameters=fp32"]),
        (
            ("bf16: true", "quantization_bit: 4\nbf16: true"),
            [*ADAPTERS, "--quantisation=nf4", "--double-quantisation"],
        ),
        (
            ("bf16: true", "fp16: true\nquantization_bit: 4"),
            [*ADAPTERS, "--quantisation=nf4", "--double-quantisation", "--dtype=fp16", "--autocast-parameters=fp16"],
        ),
        (("lora_target: all", "lora_target: q_proj,v_proj"), [*ADAPTERS, "--lora-targets=q_proj,v_proj"]),
        (("plot_loss: true", "flash_attn: fa2"), [*ADAPTERS, "--attention=flash_attention_2"]),
        (("plot_loss: true", "disable_gradient_checkpointing: true"), [*ADAPTERS, "--recompute=none"]),
        (("bf16: true", "pure_bf16: true"), [*ADAPTERS, "--no-autocast"]),
    ],
)
def test_it_is_what_the_flags_say(
    change: tuple[str, str],
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sft.yaml").write_text(EXAMPLE.replace(*change))
    Path("train.sh").write_text("FORCE_TORCHRUN=1 llamafactory-cli train sft.yaml\n")
    given = dict(flag.partition("=")[::2] for flag in [*SAME, *flags])
    if given["--recompute"] == "none":
        given.pop("--use-reentrant")
    if "--no-autocast" in given:
        given.pop("--autocast"), given.pop("--autocast-parameters")
    said = answer(capsys, *(f"{flag}={value}" if value else flag for flag, value in given.items()))
    assert answer(capsys, "sft.yaml", "--gpu=h100") == said
    assert answer(capsys, "train.sh", "--gpu=h100") == said


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("stage: sft", "stage: rm"), "sft.yaml:3: stage = rm: must be sft, pt or dpo: its value head stands beside"),
        (("stage: sft", "stage: kto"), "stage = kto: must be sft, pt or dpo: its KTO, whose loss is of all logits"),
        (("stage: sft", "stage: dpo\npref_loss: simpo"), "pref_loss = simpo: must be sigmoid, hinge, ipo or kto_pair"),
        (("stage: sft", "stage: dpo\nref_model: gpt2"), "ref_model: must be left out: a reference that is another"),
        (("stage: sft", "stage: dpo\nneat_packing: true"), "neat_packing = true: must be left out with stage dpo"),
        (("stage: sft", "stage: dpo\nenable_liger_kernel: true\ndeepspeed: zero3.json"), "zero3.json"),
        (("finetuning_type: lora", "finetuning_type: oft"), "finetuning_type = oft: must be lora or full"),
        (("plot_loss: true", "use_unsloth: true"), "sft.yaml:13: use_unsloth: must be left out: Unsloth's own layers"),
        (("plot_loss: true", "use_galore: true"), "use_galore: must be left out: GaLore is not modelled"),
        (("bf16: true", ""), "sft.yaml:1: bf16: must be true, or fp16 or pure_bf16: without, LLaMA-Factory loads"),
        (("bf16: true", "bf16: false\nquantization_bit: 4"), "bf16: must be true, or fp16 or pure_bf16"),
        (("plot_loss: true", "add_tokens: <one>"), "add_tokens: must be left out: new tokens resize the embedding"),
        (("plot_loss: true", "train_from_scratch: true"), "train_from_scratch: must be left out: a model that its"),
        (("plot_loss: true", "neat_packing: true"), "neat_packing = true: needs flash_attn: fa2: without, a mask of"),
        (("plot_loss: true", "quantization_bit: 3"), "quantization_bit = 3: must be None or 4 or 8"),
        (("plot_loss: true", "flash_attn: fast"), "flash_attn = fast: must be disabled or fa2 or fa3 or sdpa or auto"),
        (("cutoff_len: 1024", "cutoff_len: [1]"), "batch.seq = [1]: must be a whole number"),
        (("per_device_train_batch_size: 2", "per_device_train_batchsize: 2"), "per_device_train_batchsize = 2"),
    ],
)
def test_what_is_refused(
    change: tuple[str, str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sft.yaml").write_text(EXAMPLE.replace(*change))
    assert main(["estimate", "sft.yaml", "--gpu=h100"]) == 2
    told = capsys.readouterr().err
    assert line in told
    assert told.count("\n") == 1


def test_its_other_arguments_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of generation and of logs stand in files of training, too (``generating_args.py``)."""
    monkeypatch.chdir(tmp_path)
    Path("plain.yaml").write_text(EXAMPLE)
    Path("more.yaml").write_text(f"{EXAMPLE}temperature: 0.9\ndo_sample: true\nswanlab_project: mine\n")
    plain, more = (memplan.estimate(name, gpu="h100") for name in ("plain.yaml", "more.yaml"))
    assert plain.plan == more.plan
    assert [note.code for note in plain.warnings] == [note.code for note in more.warnings]


def test_dpo_is_the_loop_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters in fp32, reentrant checkpoints, both of a pair in one batch, and a reference that is the model without
    its adapters."""
    monkeypatch.chdir(tmp_path)
    text = EXAMPLE.replace("stage: sft", "stage: dpo\npref_beta: 0.1\npref_loss: sigmoid\nenable_liger_kernel: true")
    Path("dpo.yaml").write_text(text)
    plan = memplan.estimate("dpo.yaml", gpu="h100").plan
    assert (plan.trainer.loop, plan.loss.kind, plan.kernels.set) == ("llama-factory-dpo", "plain", "liger")
    assert plan.sequences == 2 * plan.batch.mbs
    assert plan.recompute.reentrant
    assert plan.runs_reference


def test_dpo_of_all_parameters_needs_one_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is in the checkpoint's dtype (``create_ref_model``), where the policy is trained in fp32."""
    monkeypatch.chdir(tmp_path)
    text = EXAMPLE.replace("stage: sft", "stage: dpo").replace("finetuning_type: lora", "finetuning_type: full")
    Path("dpo.yaml").write_text(text)
    with pytest.raises(PlanError, match="must be lora with stage dpo, or have pure_bf16"):
        memplan.estimate("dpo.yaml", gpu="h100")
    Path("dpo.yaml").write_text(text.replace("bf16: true", "pure_bf16: true"))
    assert memplan.estimate("dpo.yaml", gpu="h100").plan.precision.stored == "bf16"
    Path("zero.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    Path("dpo.yaml").write_text(text.replace("bf16: true", "pure_bf16: true\ndeepspeed: zero.json"))
    with pytest.raises(PlanError, match="llama-factory-dpo"):
        memplan.estimate("dpo.yaml", gpu="h100", gpus=2)


FSDP = """\
distributed_type: FSDP
num_processes: 2
mixed_precision: bf16
fsdp_config: {fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_use_orig_params: true}
"""


def test_four_bits_under_fsdp_are_stored_in_the_dtype_of_training(tmp_path: Path) -> None:
    """``bnb_4bit_quant_storage=compute_dtype`` (``model/model_utils/quantization.py``), as its example of FSDP1 needs.

    A rank of two stores half of what one GPU does, flat, in bf16, but for scales, which stay whole: 8 bits for 64
    weights, and fp32 for 256 scales. A layer has 2,560 x (2 x 4,096 + 2 x 1,024 + 3 x 9,728) quantised weights.
    """
    (tmp_path / "fsdp.yaml").write_text(FSDP, encoding="utf-8")
    (tmp_path / "sft.yaml").write_text(
        EXAMPLE.replace("bf16: true", "bf16: true\nquantization_bit: 4"), encoding="utf-8"
    )
    (tmp_path / "run.sh").write_text(
        "accelerate launch --config_file fsdp.yaml src/train.py sft.yaml\n", encoding="utf-8"
    )
    plan = memplan.read_plan(tmp_path / "run.sh")
    assert (plan.fsdp.version, plan.quantisation.kind, plan.quantisation.storage) == ("1", "nf4", "bf16")
    sharded = memplan.estimate(plan).to_dict()["stages"][0]["breakdown"]["parameters"]
    whole = memplan.estimate(memplan.read_plan(tmp_path / "sft.yaml")).to_dict()["stages"][0]["breakdown"]["parameters"]
    weights = 36 * 2560 * (2 * 4096 + 2 * 1024 + 3 * 9728)
    scales = weights // 64 + 4 * (weights // 64 // 256)
    assert sharded - whole // 2 == pytest.approx(scales // 2, rel=0.02)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            "infer_backend: huggingface",
            "x.yaml:3: infer_backend is of LLaMA-Factory's chat or export, which trains nothing",
        ),
        (
            "export_dir: merged\nexport_size: 5",
            "x.yaml:3: export_dir is of LLaMA-Factory's chat or export, which trains",
        ),
        (
            "finetuning_type: lora\nadapter_name_or_path: saves/lora\nexport_dir: merged",
            "x.yaml:5: export_dir is of LLaMA-Factory's chat or export, which trains",
        ),
        (
            "stage: sft\ndo_predict: true\ndo_train: false\nfinetuning_type: lora\nadapter_name_or_path: saves/lora",
            "x.yaml:4: do_predict is without do_train: LLaMA-Factory trains nothing",
        ),
        (
            "stage: sft\nfinetuning_type: lora\nadapter_name_or_path: saves/lora",
            "x.yaml:5: adapter_name_or_path: must be",
        ),
    ],
)
def test_files_that_train_nothing_and_adapters_that_are_loaded(
    more: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(f"model_name_or_path: Qwen/Qwen3-4B\ntemplate: qwen3_nothink\n{more}\n", encoding="utf-8")
    with pytest.raises(PlanError) as caught:
        memplan.read_plan("x.yaml")
    assert str(caught.value).startswith(says)
