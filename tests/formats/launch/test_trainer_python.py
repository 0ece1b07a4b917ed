"""A training script in Python is parsed: what it says is what the same arguments in JSON say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memplan.commands.launched import flags_of_launch, read_given
from memplan.formats.trainer.python import _DEFAULTS, holds_arguments, script_in
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan

TRAIN = """
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
NAME, STEPS = "meta-llama/Llama-3.2-3B", 4
PER_GPU = 2 * 2
common = dict(learning_rate=2e-5, optim="adamw_torch")
model = AutoModelForCausalLM.from_pretrained(NAME_, torch_dtype=torch.bfloat16, attn_implementation="sdpa")
args = TrainingArguments("out", per_device_train_batch_size=PER_GPU, gradient_accumulation_steps=8, bf16=True, **common)
Trainer(model=model, args=args, train_dataset=make(rows=3)).train()
""".replace("NAME, STEPS", "NAME_").replace('"meta-llama/Llama-3.2-3B", 4', '"meta-llama/Llama-3.2-3B"')
SAME = {
    "model_name_or_path": "meta-llama/Llama-3.2-3B", "torch_dtype": "bfloat16", "attn_implementation": "sdpa",
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "bf16": True, "optim": "adamw_torch",
}  # fmt: skip
QLORA = """
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16")
model = AutoModelForCausalLM.from_pretrained("mistralai/Mistral-7B-v0.3", quantization_config=bnb)
lora = LoraConfig(r=64, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
config = SFTConfig(max_length=2048, per_device_train_batch_size=2, optim="paged_adamw_8bit")
SFTTrainer(model=model, args=config, peft_config=lora)
"""


def plan_of(folder: Path, name: str, text: str, **flags: str) -> Plan:
    place = folder / name
    place.write_text(text, encoding="utf-8")
    return read_given(str(place), flags_of_launch(str(place), None), flags).plan


def refusal(text: str, *asked: str) -> str:
    with pytest.raises(PlanError) as caught:
        script_in(text, "train.py", asked)
    return str(caught.value)


def test_a_script_is_its_arguments(tmp_path: Path) -> None:
    assert plan_of(tmp_path, "train.py", TRAIN) == plan_of(tmp_path, "train.json", json.dumps(SAME))


def notebook(*cells: str, kind: str = "code") -> str:
    lines = [cell.strip("\n").splitlines(keepends=True) for cell in cells]
    return json.dumps({"cells": [{"cell_type": kind, "source": one} for one in lines], "nbformat": 4}, indent=1)


def test_a_notebook_is_the_code_of_its_cells(tmp_path: Path) -> None:
    head, args, call = TRAIN.partition("args =")
    magics = "%%capture\n!pip install -U trl \\\n  peft\nif True:\n    %env X=1\nfiles = !ls\ntorch?"
    other = "%%bash\npython train.py"
    text = notebook(magics, head, other, args + call)
    assert plan_of(tmp_path, "train.ipynb", text) == plan_of(tmp_path, "train.py", TRAIN)
    with pytest.raises(PlanError, match=r"wrong\.ipynb:(\d+): model = nothing/here") as caught:
        plan_of(tmp_path, "wrong.ipynb", notebook(magics, TRAIN.replace("meta-llama/Llama-3.2-3B", "nothing/here")))
    line = (tmp_path / "wrong.ipynb").read_text(encoding="utf-8").splitlines()[int(str(caught.value).split(":")[1]) - 1]
    assert "from_pretrained(NAME_" in line


@pytest.mark.parametrize("text", ["[]", "{", '{"cells": 1}', "[" * 100_000])
def test_what_is_no_notebook_is_said(text: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no notebook that can be read"):
        plan_of(tmp_path, "x.ipynb", text)


def test_names_given_anew_behind_the_training_are_another_models(tmp_path: Path) -> None:
    later = f"{TRAIN}NAME_ = 'me/tuned'\nmodel = AutoModelForCausalLM.from_pretrained(NAME_)\n"
    assert plan_of(tmp_path, "later.py", later) == plan_of(tmp_path, "train.py", TRAIN)
    mode = TRAIN.replace("args =", "pretrained = model\npretrained.train()\nargs =").replace("trainer.train()", "go()")
    assert plan_of(tmp_path, "mode.py", mode) == plan_of(tmp_path, "train.py", TRAIN)
    assert "NAME_, which only the running script knows" in refusal(later.replace(".train()", ".evaluate()"))


def test_a_job_of_unsloth_is_said_in_flags() -> None:
    text = """
from unsloth import FastLanguageModel
length = 2048
model, tokenizer = FastLanguageModel.from_pretrained("x", max_seq_length=length, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16, use_gradient_checkpointing="unsloth")
SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=2, optim="adamw_8bit"))
"""
    same = "--seq 2048 --mbs 2 --lora-rank 16 --optimizer adamw_8bit --recompute full --quantisation nf4"
    assert refusal(text).endswith(f"say the job in flags: memplan estimate {same}")
    named = text.replace('"x"', 'model_name="unsloth/Meta-Llama-3.1-8B-bnb-4bit"')
    assert refusal(named).endswith(f"--model unsloth/Meta-Llama-3.1-8B-bnb-4bit {same}")


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("model.resize_token_embeddings(-5)", "resize_token_embeddings = -5: must be at least 1"),
        ("model.resize_token_embeddings(True)", None),
        ("model.resize_token_embeddings(128320)", None),
    ],
)
def test_a_number_of_rows_is_one(call: str, line: str | None, tmp_path: Path) -> None:
    text = TRAIN.replace("args =", f"{call}\nargs =")
    if line is None:
        assert plan_of(tmp_path, "rows.py", text).model.vocab in (128256, 128320)
    else:
        with pytest.raises(PlanError, match=line):
            plan_of(tmp_path, "rows.py", text)


def test_a_classifier_without_labels_is_none(tmp_path: Path) -> None:
    text = TRAIN.replace("AutoModelForCausalLM", "AutoModelForSequenceClassification")
    text = text.replace("from_pretrained(NAME_", "from_pretrained('bert-base-uncased', num_labels=0")
    with pytest.raises(PlanError, match="num_labels = 0: must be at least 1"):
        plan_of(tmp_path, "labels.py", text)


def test_a_dtype_by_its_name_is_known(tmp_path: Path) -> None:
    by_name = TRAIN.replace("torch_dtype=torch.bfloat16", "torch_dtype=kind").replace(
        "PER_GPU =", 'kind = getattr(torch, "bfloat16")\nPER_GPU ='
    )
    assert plan_of(tmp_path, "named.py", by_name) == plan_of(tmp_path, "train.py", TRAIN)


@pytest.mark.parametrize(
    ("flags", "framework"),
    [({"gpus": "1"}, "single"), ({"gpus": "2"}, "ddp"), ({"gpus": "2", "dp": "2"}, "ddp"), ({"dp": "1"}, "single")],
)
def test_one_process_needs_no_launcher(flags: dict[str, str], framework: str, tmp_path: Path) -> None:
    assert plan_of(tmp_path, "train.py", TRAIN, **flags).framework == framework


def test_adapters_and_weights_in_four_bits(tmp_path: Path) -> None:
    same = {
        "model_name_or_path": "mistralai/Mistral-7B-v0.3", "use_peft": True, "lora_r": 64, "lora_dropout": 0.1,
        "lora_target_modules": ["q_proj", "v_proj"], "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": "bfloat16", "max_length": 2048, "per_device_train_batch_size": 2,
        "optim": "paged_adamw_8bit", "gradient_checkpointing": True, "bf16": True,
    }  # fmt: skip
    assert plan_of(tmp_path, "sft.py", QLORA) == plan_of(tmp_path, "sft.json", json.dumps(same), trainer="sft")


def test_preparation_for_four_bits_is_its_flag(tmp_path: Path) -> None:
    """peft's function checkpoints layers, too, unless it is told not to."""
    prepared = QLORA.replace("lora = ", "model = prepare_model_for_kbit_training(model)\nlora = ")
    same = plan_of(tmp_path, "sft.py", QLORA, **{"kbit-preparation": "true"})
    assert plan_of(tmp_path, "prepared.py", prepared) == same
    off = prepared.replace("_training(model)", "_training(model, use_gradient_checkpointing=False)")
    off = off.replace("max_length=2048", "gradient_checkpointing=False")
    on = off.replace("model, use_gradient_checkpointing=False", "model")
    assert [plan_of(tmp_path, "p.py", text).recompute.mode for text in (off, on)] == ["none", "full"]


REWARD = """
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer
model = AutoModelForSequenceClassification.from_pretrained("Qwen/Qwen2.5-7B", num_labels=1)
RewardTrainer(model=model, args=RewardConfig(per_device_train_batch_size=4, max_length=2048))
"""


def test_a_reward_model_is_one_that_scores_sequences(tmp_path: Path) -> None:
    same = {"model_name_or_path": "Qwen/Qwen2.5-7B", "per_device_train_batch_size": 4, "max_length": 2048}
    same |= {"gradient_checkpointing": True, "bf16": True, "dtype": "auto"}  # trl's defaults, and transformers'
    assert plan_of(tmp_path, "r.py", REWARD) == plan_of(tmp_path, "r.json", json.dumps(same), trainer="reward")
    assert "trains a AutoModelForSequenceClassification" in refusal(REWARD.replace("Reward", "SFT"))


def test_a_classifier_has_labels(tmp_path: Path) -> None:
    """As many as ``num_labels`` says, or 2, whatever model a flag names; peft trains its head."""
    text = TRAIN.replace("AutoModelForCausalLM", "AutoModelForSequenceClassification")
    two, five = (
        plan_of(tmp_path, "c.py", text),
        plan_of(tmp_path, "d.py", text.replace("NAME_,", "NAME_, num_labels=5,")),
    )
    assert (two.model.labels, five.model.labels, two.trainer.loop) == (2, 5, "transformers")
    assert plan_of(tmp_path, "c.py", TRAIN, labels="2") == two
    assert plan_of(tmp_path, "d.py", text, model="qwen2.5-0.5b").model.labels == 2
    adapters = "model = get_peft_model(model, LoraConfig(r=8, task_type=TaskType.SEQ_CLS))\nargs ="
    assert plan_of(tmp_path, "e.py", text.replace("args =", adapters)).lora.modules_to_save == ("score",)
    assert "num_labels: is n(), which only the running script knows: say it with --labels" in refusal(
        text.replace("NAME_,", "NAME_, num_labels=n(),")
    )
    several = text.replace("NAME_,", "NAME_, num_labels=5, problem_type='multi_label_classification',")
    assert "one label of a sequence is modelled" in refusal(several)


def test_defaults_of_peft_and_transformers() -> None:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

    lora, weights = LoraConfig(), BitsAndBytesConfig(load_in_4bit=True)  # type: ignore[no-untyped-call]
    assert _DEFAULTS["LoraConfig"] == {"lora_r": lora.r, "lora_dropout": lora.lora_dropout, "use_peft": True}
    assert _DEFAULTS["BitsAndBytesConfig"] == {
        "bnb_4bit_quant_type": weights.bnb_4bit_quant_type,
        "bnb_4bit_compute_dtype": str(weights.bnb_4bit_compute_dtype).removeprefix("torch."),
    }


@pytest.mark.parametrize(
    "line", ["model.compile()", "model = torch.compile(model)", "step = partial(torch.compile)(f)"]
)
def test_compiled_code_is_not_passed_over(line: str, tmp_path: Path) -> None:
    changed = TRAIN.replace("args =", f"{line}\nargs =")
    with pytest.raises(PlanError, match="is called by the script itself"):
        plan_of(tmp_path, "train.py", changed)
    plan_of(tmp_path, "train.py", changed.replace(line, "pattern = re.compile('a')"))


def test_a_flag_stands_before_what_compiles(tmp_path: Path) -> None:
    mode = TRAIN.replace("bf16=True", 'bf16=True, torch_compile_mode="max-autotune"')
    with pytest.raises(PlanError, match="must be default"):
        plan_of(tmp_path, "train.py", mode)
    assert not plan_of(tmp_path, "train.py", mode, **{"torch-compile": "false"}).compile


@pytest.mark.parametrize(
    ("runner", "compiles"),
    [
        ("torchrun --nproc_per_node 2", True),
        ("accelerate launch --num_processes 2", False),
        ("accelerate launch --num_processes 2 --dynamo_backend inductor", True),
    ],
)
def test_accelerates_variable_compiles_unless_its_launcher_sets_it(runner: str, compiles: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    script = f"export ACCELERATE_DYNAMO_BACKEND=inductor\n{runner} train.py\n"
    assert plan_of(tmp_path, "run.sh", script).compile == compiles


def test_accelerates_variable_of_regions_is_refused_without_its_launcher(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    name = "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"
    for value in ("true", "ON"):
        script = f"export ACCELERATE_DYNAMO_BACKEND=inductor {name}={value}\ntorchrun --nproc_per_node 2 train.py\n"
        with pytest.raises(PlanError, match=f"{name} = {value}: is read of accelerate launch alone"):
            plan_of(tmp_path, "run.sh", script)
    script = f"export ACCELERATE_DYNAMO_BACKEND=inductor {name}=off\ntorchrun --nproc_per_node 2 train.py\n"
    assert plan_of(tmp_path, "run.sh", script).compile


def test_a_launcher_in_front_of_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    alone = plan_of(tmp_path, "train.py", TRAIN, gpus="4", framework="ddp")
    assert plan_of(tmp_path, "run.sh", "torchrun --nproc_per_node 4 train.py\n") == alone


def test_what_only_the_running_script_knows_is_asked_for_at_once() -> None:
    text = "args = TrainingArguments(per_device_train_batch_size=a.b, bf16=can(), learning_rate=a.lr)"
    found = refusal(text)
    assert found.startswith("2 errors: (1) train.py:1: per_device_train_batch_size: is a.b, which only the running")
    assert "(2) train.py:1: bf16: is can(), which only the running script knows: say it with --dtype bf16" in found
    assert script_in(text, "train.py", ("mbs", "dtype")).arguments.value == {}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("print(1)", "is Python, in which no TrainingArguments stand"),
        (
            "a = TrainingArguments()\nfor p in model.h.parameters():\n    p.requires_grad = False",
            "train.py:3: freezes parameters (model.h.parameters()), which only the running script knows",
        ),
        ("a = TrainingArguments()\nmodel.lm_head.requires_grad_(False)", "freezes parameters"),
        ("TrainingArguments(", "train.py:1: is no Python that can be read"),
        (
            "a = TrainingArguments('x')\nb = SFTConfig('y')",
            "train.py:2: makes the Trainer's arguments in lines 1 and 2",
        ),
        ("TrainingArguments(**vars(args))", "train.py:1: takes what the script computes (**vars(args))"),
        ("from unsloth import FastLanguageModel\nSFTConfig()", "is of unsloth: Unsloth's layers"),
        ("TrainingArguments()\nTrainer(optimizers=(o, s))", "train.py:2: optimizers: is an optimizer that the script"),
        (
            "TrainingArguments()\nAutoModelForTokenClassification.from_pretrained('bert')",
            "train.py:2: trains a AutoModelForTokenClassification",
        ),
        ("import sentence_transformers\nSFTConfig()", "is of sentence_transformers: its losses of pairs"),
        (
            "from peft import IA3Config\nSFTConfig()\nIA3Config()",
            "train.py:3: makes a IA3Config: of peft's methods only LoRA is modelled",
        ),
        (
            "SFTConfig()\nHqqConfig(nbits=4)",
            "train.py:2: loads weights as HqqConfig has them: nf4, fp4, int8, gptq and awq are modelled",
        ),
        ("SFTConfig()\nMxfp4Config()", "train.py:2: loads weights as Mxfp4Config has them"),
        ("SFTConfig()\nLoraConfig(r=8, rank_pattern={'q': 4})", "train.py:2: makes a LoraConfig with rank_pattern"),
        (
            "SFTConfig()\nkw = dict(layers_to_transform=[1])\nLoraConfig(**kw)",
            "train.py:3: makes a LoraConfig with layers_to_transform",
        ),
        (
            "SFTConfig()\nSFTTrainer(peft_config=of(args))",
            "train.py:2: takes adapters from of(args), which only the running script knows: say it with --lora-rank",
        ),
        ("SFTConfig()\nget_peft_model(m, of(args))", "train.py:2: takes adapters from of(args)"),
        ("SFTConfig()\nPeftModel.from_pretrained(m, 'a/b')", "train.py:2: takes adapters from 'a/b'"),
        (
            "SFTConfig()\nAutoModelForCausalLM.from_pretrained('a/b', quantization_config=of(args))",
            "train.py:2: takes weights from of(args), which only the running script knows: say it with --quantisation",
        ),
        ("SFTConfig(torch_compile=f())", "which only the running script knows: say it with --torch-compile"),
        ("SFTConfig(bf16=x)\nfor x in (True, False): pass", "bf16: is x, which only the running script knows"),
        ("x = True\nx = False\nSFTConfig(bf16=x)", "bf16: is x, which only the running script knows"),
        ("def f(x=True):\n    SFTConfig(bf16=x)", "bf16: is x, which only the running script knows"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, part: str) -> None:
    assert part in refusal(text)


def test_a_mapping_that_stands_in_the_script(tmp_path: Path) -> None:
    """As OpenAI's recipe of gpt-oss has it: what is read of the mapping is known, and the rest is not looked at."""
    text = """
weights = Mxfp4Config(dequantize=True)
how = dict(attn_implementation="eager", dtype=torch.bfloat16, quantization_config=weights, use_cache=False)
model = AutoModelForCausalLM.from_pretrained("openai/gpt-oss-20b", **how)
adapters = LoraConfig(r=8, target_modules="all-linear", target_parameters=["experts.down_proj"])
SFTConfig(per_device_train_batch_size=2, max_length=2048)
"""
    found = script_in(text, "train.py", ()).arguments.mapping
    shown = {key: node.plain() for key, node in found.items() if not isinstance(node.value, list)}
    assert shown["attn_implementation"] == "eager"
    assert shown["dtype"] == "bfloat16"
    assert [one.value for one in found["lora_target_parameters"].value] == ["experts.down_proj"]
    changed = text.replace("model =", "how['dtype'] = None; model =")
    assert "takes what the script computes (**how)" in refusal(changed)


def test_nothing_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = f"open({str(mark)!r}, 'w')\nTrainingArguments(output_dir=open({str(mark)!r}, 'w'))"
    assert holds_arguments(text)
    assert script_in(text, "train.py", ()).arguments.value == {}
    assert not mark.exists()


@pytest.mark.parametrize("model", ["Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-0.6B"])
def test_routers_without_their_loss(tmp_path: Path, model: str) -> None:
    """``SFTTrainer`` writes its ``router_aux_loss_coef`` over the model's, 0.001 of Qwen 3 with experts."""
    text = f'args = SFTConfig("out", router_aux_loss_coef={{}})\nSFTTrainer("{model}", args=args).train()\n'
    assert plan_of(tmp_path, "train.py", text.format("0.0")).model.router_aux_loss == 0
    loss = plan_of(tmp_path, "train.py", text.format("0.001")).model.router_aux_loss
    assert loss == (0.001 if "30B" in model else 0)


@pytest.mark.parametrize("written", ["paged_adamw_8bit", "adamw_torch_fused", "adafactor", "rmsprop"])
@pytest.mark.parametrize(
    ("said", "implementation", "paged"), [("adamw_bnb_8bit", None, False), ("paged_adamw_8bit", None, True)]
)
def test_an_optimizer_that_a_flag_says_is_the_flag_s_alone(
    tmp_path: Path, written: str, said: str, implementation: str | None, paged: bool
) -> None:
    """Of ``optim`` in the script nothing is left, neither pages nor an implementation."""
    text = f'args = SFTConfig("out", optim="{written}")\nSFTTrainer("gpt2", args=args).train()\n'
    found = plan_of(tmp_path, "train.py", text, optimizer=said).optimizer
    assert (found.name, found.implementation, found.paged) == ("adam8bit", implementation, paged)
