"""Configurations of Axolotl, as its examples write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import memplan
from memplan.cli import main

QLORA = """
base_model: NousResearch/Llama-3.2-1B
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
sequence_len: 2048
sample_packing: true
micro_batch_size: 1
gradient_accumulation_steps: 4
optimizer: adamw_bnb_8bit
bf16: auto
gradient_checkpointing: true
attn_implementation: flash_attention_2
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
num_epochs: 1
learning_rate: 2e-4
"""
CUT_PLUGIN = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
PAIRS = QLORA.replace("sample_packing: true", "rl: dpo")
FULL = """
base_model: NousResearch/Llama-3.2-1B
sequence_len: 1024
micro_batch_size: 2
gradient_accumulation_steps: 1
flash_attention: true
plugins:
  - axolotl.integrations.liger.LigerPlugin
liger_rope: true
liger_rms_norm: true
liger_glu_activation: true
liger_fused_linear_cross_entropy: true
"""
CUT = FULL.replace("LigerPlugin\n", f"LigerPlugin\n  - {CUT_PLUGIN}\n").replace(
    "liger_fused_linear_cross_entropy: true\n", ""
)
"""Pieces of Liger beside Apple's loss."""
SHARDED = """
base_model: NousResearch/Llama-3.2-1B
sequence_len: 1024
micro_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
flash_attention: true
fsdp_version: 2
fsdp_config:
  reshard_after_forward: true
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""

REWARD = """
base_model: Qwen/Qwen2.5-0.5B
model_type: AutoModelForSequenceClassification
num_labels: 1
reward_model: true
center_rewards_coefficient: 0.01
datasets:
  - path: argilla/distilabel-intel-orca-dpo-pairs
    type: bradley_terry.chat_template
sequence_len: 1024
micro_batch_size: 2
gradient_accumulation_steps: 4
bf16: true
attn_implementation: flash_attention_2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    Path("config.yml").write_text(text)
    assert main(["estimate", "config.yml"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


def test_qlora_is_what_its_builder_makes_of_it(folder: Path) -> None:
    """``core/builders`` and ``loaders``: the Trainer under autocast, adapters of peft, NF4 quantised twice, reentrant
    checkpoints; said here in the Trainer's and trl's arguments."""
    Path("qlora.yml").write_text(QLORA)
    ours = memplan.estimate("qlora.yml")
    said = {
        **{"model_name_or_path": "NousResearch/Llama-3.2-1B", "dtype": "bfloat16", "bf16": True, "max_length": 2048},
        **{"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "optim": "adamw_bnb_8bit"},
        **{"use_peft": True, "lora_r": 32, "lora_dropout": 0.05, "lora_target_modules": "all-linear"},
        **{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True},
        **{"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        **{"attn_implementation": "flash_attention_2"},
    }
    Path("said.json").write_text(json.dumps(said))
    theirs = memplan.estimate("said.json")
    assert ours.plan.quantisation.double
    assert ours.plan.lora.rank == 32
    assert ours.plan.lora.alpha == 16
    assert ours.stages[0].allocated == theirs.stages[0].allocated


def test_full_training_with_pieces_of_liger(folder: Path) -> None:
    """bf16 is ``auto`` where it is left out, and so is the fused AdamW."""
    Path("full.yml").write_text(FULL)
    plan = memplan.estimate("full.yml").plan
    assert (plan.precision.dtype, plan.precision.autocast) == ("bf16", True)
    assert (plan.kernels.set, plan.loss.kind) == ("liger", "liger")
    assert plan.batch.mbs == 2
    assert plan.optimizer.implementation == "fused"


@pytest.mark.parametrize("model", ["unsloth/gemma-2-2b", "NousResearch/Llama-3.2-1B"])
@pytest.mark.parametrize(("said", "mlp"), [("liger_glu_activation: true\n", "liger"), ("", "eager")])
def test_ligers_gate_is_what_the_models_function_calls_it(model: str, said: str, mlp: str, folder: Path) -> None:
    """``integrations/liger/plugin.py``: one key, geglu or swiglu by the function's signature."""
    text = FULL.replace("liger_glu_activation: true\n", said)
    Path("full.yml").write_text(text.replace("NousResearch/Llama-3.2-1B", model))
    plan = memplan.estimate("full.yml").plan
    assert (plan.kernels.norm, plan.kernels.mlp) == ("liger", mlp)


@pytest.mark.parametrize("attention", ["flash_attention: true", "sdp_attention: true", ""])
def test_cut_cross_entropy_is_its_plugin(attention: str, folder: Path) -> None:
    """Its plugin's argument is on by default (``CutCrossEntropyArgs``). Norms, embeddings and head go to bf16 whatever
    the attention is (``_configure_embedding_dtypes``), so that the 1,235,814,400 parameters, their gradients and
    AdamW's two states take 2 bytes each; Liger's other pieces stay."""
    Path("cut.yml").write_text(CUT.replace("flash_attention: true", attention))
    found = memplan.estimate("cut.yml")
    plan = found.plan
    assert (plan.kernels.set, plan.loss.kind, plan.precision.autocast) == ("liger", "cut", True)
    assert found.stages[0].static == pytest.approx(6 * 1_235_814_400, rel=0.01)
    Path("off.yml").write_text(CUT + "cut_cross_entropy: false\n")
    off = memplan.estimate("off.yml")
    assert off.plan.loss.kind == "plain"
    assert found.peak < off.peak


def test_cut_cross_entropy_beside_adapters(folder: Path) -> None:
    """QLoRA of Llama 3.2 1B: the plain loss has logits of 2,048 tokens by 128,256 words in fp32 and more than once, the
    cut loss none."""
    Path("plain.yml").write_text(QLORA)
    Path("cut.yml").write_text(f"{QLORA}plugins:\n  - {CUT_PLUGIN}\ncut_cross_entropy: true\n")
    plain, cut = memplan.estimate("plain.yml"), memplan.estimate("cut.yml")
    assert (cut.plan.loss.kind, cut.plan.lora.rank) == ("cut", 32)
    assert plain.peak - cut.peak > 2 * 4 * 2048 * 128_256


@pytest.mark.parametrize(
    ("said", "dtype"),
    [
        ("bf16: auto", "bf16"),
        ("bf16: auto\nfp16: true", "fp16"),
        ("bf16: auto\nfp16: false", "bf16"),
        ("bf16: false\nfp16: true", "fp16"),
        ("fp16: true", "fp16"),
    ],
)
def test_bf16_is_found_unless_fp16_is_asked_for(said: str, dtype: str, folder: Path) -> None:
    """``resolve_dtype`` of ``utils/config/__init__.py``; ``bf16`` is ``auto`` by default."""
    Path("it.yml").write_text(QLORA.replace("bf16: auto", said))
    precision = memplan.estimate("it.yml").plan.precision
    assert (precision.dtype, precision.parameters, precision.autocast) == (dtype, dtype, True)


@pytest.mark.parametrize(
    ("change", "flags", "expected"),
    [
        (("fsdp_version: 2\n", ""), {}, ("1", True, True)),
        (("fsdp_version: 2\n", "fsdp_version: 1\n"), {}, ("1", True, True)),
        (("  reshard_after_forward: true", "  version: 2"), {}, ("2", False, False)),
        (("fsdp_version: 2\n", ""), {"fsdp_version": 2}, ("2", False, False)),
    ],
)
def test_a_sharded_model_is_of_fsdp_1_unless_it_says_more(
    change: tuple[str, str], flags: dict[str, int], expected: tuple[str, bool, bool], folder: Path
) -> None:
    """``check_fsdp_version_in_fsdp_config``: "pin axolotl's FSDP1 default explicitly". Accelerate runs it under
    autocast, over flat parameters in fp32; checkpoints are reentrant as elsewhere (``normalize_config``). Between
    iterations a rank of four has a quarter of Llama 3.2 1B (1,235,814,400 parameters) in fp32 with AdamW's states:
    12 bytes each."""
    Path("sharded.yml").write_text(SHARDED.replace(*change) + "gradient_checkpointing: true\n")
    found = memplan.estimate("sharded.yml", gpus=4, **flags)
    plan = found.plan
    assert (plan.fsdp.version, plan.precision.autocast, bool(plan.recompute.reentrant)) == expected
    assert found.stages[0].static == pytest.approx(12 * 1_235_814_400 / 4, rel=0.01)


@pytest.mark.parametrize("said", ["", "gradient_checkpointing: false\n", "precompute_ref_log_probs: true\n"])
def test_pairs_are_a_loop_of_its_own(said: str, folder: Path) -> None:
    """``core/builders/rl.py``: trl's DPOTrainer, which makes the adapters, in bf16 beside 4-bit weights; checkpoints
    are not reentrant (``normalize_config``)."""
    recomputed = "gradient_checkpointing: true\n"
    Path("pairs.yml").write_text(PAIRS.replace(recomputed, said or recomputed))
    plan = memplan.estimate("pairs.yml", gpu="h100").plan
    assert (plan.trainer.loop, plan.batch.mbs, plan.batch.seq) == ("axolotl-dpo", 1, 2048)
    assert (plan.recompute.mode, bool(plan.recompute.reentrant)) == ("none" if "false" in said else "full", False)
    assert (plan.lora.dtype, plan.quantisation.prepared) == ("bf16", False)
    assert plan.trainer.precompute_ref_log_probs is ("precompute" in said)


def test_a_sharded_model(folder: Path) -> None:
    Path("sharded.yml").write_text(SHARDED)
    plan = memplan.estimate("sharded.yml", gpus=4).plan
    assert (plan.framework, plan.layout.dp) == ("fsdp", 4)


@pytest.mark.parametrize(
    "said", ["", "gradient_checkpointing: false\n", "gradient_checkpointing: true\n", "adapter: lora\n"]
)
def test_a_reward_model_is_what_trl_makes_of_it(said: str, folder: Path) -> None:
    """``core/builders/causal.py``: trl's RewardTrainer, whose configuration recomputes unless told not to, reentrant
    where Axolotl is told to; peft trains a copy of the head (``loaders/adapter.py``, ``_get_peft_task_type``)."""
    Path("reward.yml").write_text(REWARD + said)
    ours = memplan.estimate("reward.yml", gpu="h100")
    off, on = ("gradient_checkpointing: false" in said), ("gradient_checkpointing: true" in said)
    given = {
        **{"model_name_or_path": "Qwen/Qwen2.5-0.5B", "dtype": "bfloat16", "bf16": True, "max_length": 1024},
        **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "optim": "adamw_torch_fused"},
        **{"attn_implementation": "flash_attention_2", "gradient_checkpointing": not off},
        **({"gradient_checkpointing_kwargs": {"use_reentrant": True}} if on else {}),
        **({"use_peft": True, "lora_dropout": 0.0, "lora_modules_to_save": "score"} if "lora" in said else {}),
    }
    Path("said.json").write_text(json.dumps(given))
    theirs = memplan.estimate("said.json", trainer="reward", gpu="h100")
    assert (ours.plan.trainer.loop, ours.plan.model.labels) == ("reward", 1)
    assert ours.plan.recompute == theirs.plan.recompute
    assert (ours.plan.recompute.mode, bool(ours.plan.recompute.reentrant)) == ("none" if off else "full", on)
    assert ours.stages[0] == theirs.stages[0]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (QLORA + "rl: grpo\n", "rl = grpo: must be left out: Axolotl puts kernels of its own into this loss"),
        (QLORA + "rl: dpo\n", "sample_packing = true: must be left out with rl dpo"),
        (PAIRS + "reward_model: true\n", "reward_model = true: must be left out with rl dpo"),
        (PAIRS + "dpo_padding_free: true\n", "dpo_padding_free = true: must be left out with rl dpo"),
        (PAIRS + "dpo_use_weighting: true\n", "dpo_use_weighting = true: must be left out with rl dpo"),
        (PAIRS + "dpo_loss_type: [sigmoid, sft]\n", "must be without sft: a cross entropy of the chosen logits"),
        (PAIRS + "rl_adapter_ref_model: true\n", "rl_adapter_ref_model = true: must be left out with rl dpo"),
        (QLORA + "rl: kto\n", "rl = kto: must be left out: KTO's loss in the trl that it pins"),
        (REWARD.replace("num_labels: 1", "num_labels: 2"), "num_labels = 2: must be 1 with reward_model"),
        (REWARD + "sample_packing: true\n", "sample_packing = true: must be false with reward_model"),
        (REWARD.replace("SequenceClass", "TokenClass"), "must be AutoModelForSequenceClassification, or left out"),
        (QLORA.replace("adapter: qlora", "adapter: llama-adapter"), "adapter = llama-adapter: must be lora or qlora"),
        (QLORA.replace("load_in_4bit: true", "load_in_4bit: false"), "adapter = qlora: needs load_in_4bit: true"),
        (QLORA + "load_in_8bit: true\n", "load_in_8bit = true: must be left out with adapter qlora"),
        (QLORA.replace("adapter: qlora", "adapter: lora"), "load_in_4bit = true: must be left out, or the adapter be"),
        (FULL + "load_in_4bit: true\n", "load_in_4bit = true: must be left out, or the adapter be qlora"),
        (QLORA.replace("flash_attention_2", "sdpa"), "attn_implementation = sdpa: must be flash_attention_2"),
        (QLORA + "context_parallel_size: 2\n", "context_parallel_size = 2: must be 1"),
        (QLORA.replace("gradient_checkpointing: true", "gradient_checkpointing: offload"), "must be true or false"),
        (FULL.replace("flash_attention: true", "sdp_attention: true"), "keeps norms, embeddings and head in fp32"),
        (FULL + "bf16: full\n", "bf16 = full: must be true, false or auto"),
        (
            FULL + "cut_cross_entropy: true\n",
            "needs axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin among",
        ),
        (CUT + "liger_cross_entropy: true\n", "liger_cross_entropy = true: must be false with CutCrossEntropyPlugin"),
        (CUT + "cut_cross_entropy: true\n", "config.yml:13: plugins = CutCrossEntropyPlugin: needs bf16 or fp16"),
        (CUT + "bf16: false\n", "config.yml:9: plugins = CutCrossEntropyPlugin: needs bf16 or fp16"),
        (
            CUT + "rl: dpo\nprocess_reward_model: true\n",
            ": plugins = CutCrossEntropyPlugin: must be left out with rl and reward_model",
        ),
        (QLORA + "process_reward_model: true\nlisa_n_layers: 4\n", "2 errors: (1) "),
        (QLORA + "model_type: AutoModelForTokenClassification\n", "must be AutoModelForCausalLM: heads other"),
        (SHARDED + "dp_shard_size: 4\n", "dp_shard_size = 4: must be the number of GPUs, 1 (--gpus N)"),
        (QLORA + "selective_checkpointing: true\n", "selective_checkpointing: must be left out: checkpoints that keep"),
        (QLORA + "context_parapllel_size: 2\n", "is no key that is read; did you mean context_parallel_size?"),
        (QLORA + "max_seq_length: 4096\n", "max_seq_length: is no key of Axolotl; did you mean sequence_len?"),
        (QLORA + "optim_target_modules: [q_proj]\n", "optim_target_modules: must be left out: optimizers of some"),
    ],
)
def test_what_is_not_modelled_is_refused(
    text: str, line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert line in told(text, capsys)


def test_keys_that_nobody_knows_are_told(folder: Path) -> None:
    """Those without effect are passed over, as is a key without a value, and an evaluation of no more sequences."""
    silent = (
        "wandb_project: mine\nval_set_size: 0.05\neval_batch_size: 1\nspecial_tokens:\n  pad_token: x\ntrainer_cls:\n"
    )
    Path("silent.yml").write_text(QLORA + silent)
    told = (
        "full_finetune: true\ntokens: [one]\neval_batch_size: 4\nplugins:\n  - mine.TeacherPlugin\n  - a.LigerPlugin\n"
    )
    Path("told.yml").write_text(QLORA + told)
    files = ("silent.yml", "told.yml")
    before, after = ({note.message.partition(" (")[0] for note in memplan.estimate(one).warnings} for one in files)
    assert after - before == {"full_finetune", "tokens", "eval_batch_size", "plugins"}


def test_accumulation_as_the_whole_batch_says_it(folder: Path) -> None:
    """``normalize_config``: ``batch_size`` over ``micro_batch_size``, where the steps are left out."""
    Path("old.yml").write_text(FULL.replace("gradient_accumulation_steps: 1", "batch_size: 8"))
    assert memplan.estimate("old.yml").plan.batch.accumulation == 4


def test_arguments_of_the_trainer_that_it_hands_on_are_read(folder: Path) -> None:
    """``core/builders/base.py``: ``optim_args``, as text where it is a mapping, and ``accelerator_config``."""
    said = "optimizer: sgd\noptim_args:\n  momentum: 0.9\naccelerator_config:\n  split_batches: false\n"
    Path("it.yml").write_text(FULL + said)
    assert memplan.estimate("it.yml").plan.optimizer.momentum == 0.9
