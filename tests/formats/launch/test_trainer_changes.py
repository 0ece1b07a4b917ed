"""What a script does to its model beside the Trainer's arguments is read, or asked for."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from memplan.commands.launched import flags_of_launch, read_given
from memplan.formats.trainer.python import script_in
from memplan.formats.trainer.settled import Settled
from memplan.formats.trainer.syntax import UNKNOWN
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.resolve import resolve

from .test_trainer_python import QLORA, plan_of, refusal

TRAIN = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B")
args = TrainingArguments("out", per_device_train_batch_size=4, bf16=True)
Trainer(model=model, args=args).train()
"""
SAID = {"model_name_or_path": "meta-llama/Llama-3.2-1B", "per_device_train_batch_size": 4, "bf16": True}
BEHIND = "args = Tr"


def with_line(line: str) -> str:
    """``TRAIN`` with ``line`` behind the model."""
    return TRAIN.replace(BEHIND, f"{line}\n{BEHIND}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("model = model.to(torch.bfloat16).cuda()", {"dtype": "bfloat16"}),
        ("model.to('cuda', dtype=torch.bfloat16)", {"dtype": "bfloat16"}),
        ("model.to('cuda')", {}),
        ("teacher.half()", {}),
        ("model.gradient_checkpointing_enable({'use_reentrant': True})",
         {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        ("model.set_attn_implementation('eager')", {"attn_implementation": "eager"}),
        ("apply_liger_kernel_to_llama()", {"use_liger_kernel": True}),
        ("apply_liger_kernel_to_llama(rope=False)",
         {"use_liger_kernel": True, "liger_kernel_config": {"rope": False}}),
        ("apply_liger_kernel_to_gemma2(geglu=False)",
         {"use_liger_kernel": True, "liger_kernel_config": {"geglu": False}}),
    ],
)  # fmt: skip
def test_a_call_is_the_argument_that_does_the_same(line: str, said: dict[str, object], tmp_path: Path) -> None:
    same = plan_of(tmp_path, "train.json", json.dumps({**SAID, **said}))
    assert plan_of(tmp_path, "train.py", with_line(line)) == same


def test_experts_that_run_otherwise_are_refused(tmp_path: Path) -> None:
    """``experts_implementation`` in each place where transformers takes it; its own default is what is modelled."""
    for name in ("eager", "batched_mm"):
        line = f"model.set_experts_implementation('{name}')"
        with pytest.raises(PlanError, match=f"experts_implementation = {name}: must be grouped_mm, or left out"):
            plan_of(tmp_path, "train.py", with_line(line))
    loaded = TRAIN.replace("1B", '1B", experts_implementation="eager')
    with pytest.raises(PlanError, match="experts_implementation = eager: must be grouped_mm"):
        plan_of(tmp_path, "train.py", loaded)
    same = plan_of(tmp_path, "train.py", TRAIN)
    assert plan_of(tmp_path, "train.py", with_line("model.set_experts_implementation('grouped_mm')")) == same


def test_arguments_that_are_set_later(tmp_path: Path) -> None:
    later = TRAIN.replace("Trainer(", "args.per_device_train_batch_size = 2\nTrainer(")
    assert plan_of(tmp_path, "train.py", later).batch.mbs == 2
    assert "set_training: sets several" in refusal(
        TRAIN.replace("Trainer(", "args.set_training(batch_size=2)\nTrainer(")
    )


def test_rows_of_the_embedding(tmp_path: Path) -> None:
    """Rounded up as transformers does it; a tokenizer's number is told, not guessed."""
    line = "model.resize_token_embeddings(130_001, pad_to_multiple_of=64)"
    assert plan_of(tmp_path, "train.py", with_line(line)).model.vocab == -(-130_001 // 64) * 64
    place = tmp_path / "train.py"
    place.write_text(with_line("model.resize_token_embeddings(len(tokenizer))"), encoding="utf-8")
    read = read_given(str(place), flags_of_launch(str(place), None), {})
    assert read.plan.model.vocab == 128_256
    assert any("len(tokenizer) rows" in note.message for note in read.warnings)


def test_labels_of_a_configuration(tmp_path: Path) -> None:
    loaded = 'AutoModelForSequenceClassification.from_pretrained("bert-base-uncased", config=config)'
    script = TRAIN.replace('AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B")', loaded).replace(
        "model = ", 'config = AutoConfig.from_pretrained("bert-base-uncased", num_labels=20)\nmodel = '
    )
    assert plan_of(tmp_path, "train.py", script).model.labels == 20


@pytest.mark.parametrize("text", ["train.sh", "train.py"])
def test_variables_of_the_environment(text: str, tmp_path: Path) -> None:
    """Blocks that expand are the allocator's, whoever sets them."""
    if text == "train.py":
        script = TRAIN.replace(
            "import torch", 'import torch, os\nos.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"'
        )
    else:
        script = "export PYTORCH_ALLOC_CONF=expandable_segments:True NCCL_DEBUG=INFO\npython run_clm.py --do_train"
        script += " --model_name_or_path gpt2 --per_device_train_batch_size 1\n"
    assert plan_of(tmp_path, text, script).environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


OWN_LOSS = """
class Distilling(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        outputs = model(**inputs)
        return outputs.loss + distance(outputs.logits)
Distilling(
"""
LOGGING = """
class Logging(Trainer):
    def compute_loss(self, model, inputs, **rest):
        loss = super().compute_loss(model, inputs, **rest)
        print(loss)
        return loss
Logging(
"""
OPTIMIZER = LOGGING.lstrip().replace("compute_loss", "create_optimizer").replace("super()", "other")
DPO = """
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2-0.5B-Instruct")
ref = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2-{size}-Instruct")
DPOTrainer(model=model, ref_model=ref, args=DPOConfig("out"))
"""
INT8_REFERENCE = DPO.format(size="0.5B").replace('")\nDPO', '", load_in_8bit=True)\nDPO')
GRPO = """
args = GRPOConfig("out", per_device_train_batch_size=8)
GRPOTrainer(model="Qwen/Qwen2-0.5B-Instruct", reward_funcs=[score, "RLHFlow/ArmoRM-Llama3-8B-v0.1"], args=args)
"""


@pytest.mark.parametrize(
    ("text", "part", "way_out"),
    [
        (TRAIN.replace("Trainer(model", OWN_LOSS.lstrip() + "model"), "Distilling.compute_loss: is a loss", "loss"),
        (TRAIN.replace("args=args", "args=args, compute_loss_func=mine"), "compute_loss_func: is a loss", "loss"),
        (TRAIN.replace("Trainer(model", OPTIMIZER + "model"), "Logging.create_optimizer: is an optimizer", "optimizer"),
        (DPO.format(size="1.5B"), "ref_model: is loaded otherwise", "trainer"),
        (DPO.format(size="1.5B").replace("model=model, ref_model=ref", "model, ref"), "is loaded otherwise", "trainer"),
        (INT8_REFERENCE, "ref_model: is loaded otherwise", "trainer"),
        (with_line("model.to(torch_dtype)"), "to: is torch_dtype", "autocast-parameters"),
        (TRAIN.replace(".from_pretrained", ".from_config"), "from_config: is made from a configuration", "model"),
    ],
)  # fmt: skip
def test_what_the_script_does_by_itself_is_asked_for(text: str, part: str, way_out: str) -> None:
    assert part in refusal(text)
    script_in(text, "train.py", [way_out])


@pytest.mark.parametrize("loop", ["dpo", "kto"])
def test_a_reference_that_is_another_has_the_trainer_s_own_way_out(loop: str) -> None:
    text = DPO.format(size="1.5B").replace("DPO", loop.upper())
    assert f"--trainer {loop} takes such a one in its place" in refusal(text)


def test_what_changes_nothing_is_passed_over(tmp_path: Path) -> None:
    same = plan_of(tmp_path, "train.json", json.dumps(SAID))
    assert plan_of(tmp_path, "train.py", TRAIN.replace("Trainer(model", LOGGING.lstrip() + "model")) == same
    assert plan_of(tmp_path, "dpo.py", DPO.format(size="0.5B")).trainer is not None


def test_a_model_of_rewards_beside_the_policy(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is a model beside the policy"):
        plan_of(tmp_path, "grpo.py", GRPO)
    assert plan_of(tmp_path, "grpo.py", GRPO, **{"generation-memory": "16GiB"}).trainer is not None


def test_a_model_spread_over_gpus_is_no_replica_on_each(tmp_path: Path) -> None:
    spread = TRAIN.replace('Llama-3.2-1B"', 'Llama-3.2-1B", device_map="auto"')
    assert plan_of(tmp_path, "train.py", spread).framework == "single"
    with pytest.raises(PlanError, match="device_map = auto: spreads the model"):
        plan_of(tmp_path, "train.py", spread, gpus="4")
    assert plan_of(tmp_path, "train.py", spread, gpus="4", framework="ddp").framework == "ddp"


PARSED = """
import torch, transformers
from dataclasses import dataclass, field
from peft import LoraConfig, get_peft_model
@dataclass
class ModelArguments:
    model_name: str = field(default="meta-llama/Llama-2-7b-hf")
    lora: bool = True
    targets: list = field(default_factory=lambda: ["q_proj", "v_proj"])
    train_file_path: str = ""
@dataclass
class TrainingArguments(transformers.TrainingArguments):
    model_max_length: int = field(default=512)
parser = transformers.HfArgumentParser((ModelArguments, TrainingArguments))
ours, args = parser.parse_args_into_dataclasses()
dtype = torch.bfloat16 if args.bf16 else torch.float32
model = transformers.AutoModelForCausalLM.from_pretrained(ours.model_name, torch_dtype=dtype)
if ours.lora:
    model = get_peft_model(model, LoraConfig(r=64, target_modules=ours.targets))
trainer = transformers.Trainer(model=model, args=args, **data)
"""
COMMAND = "torchrun --nproc_per_node 2 train.py --bf16 True --per_device_train_batch_size 4 --output_dir x"


def started(folder: Path, flags: str, text: str = PARSED) -> Plan:
    (folder / "train.py").write_text(text, encoding="utf-8")
    return plan_of(folder, "run.sh", f"{COMMAND} {flags}\n")


def test_what_a_script_does_with_its_command_line(tmp_path: Path) -> None:
    """Its own arguments, their defaults, and the conditions that they decide; no flag says the adapters."""
    plan = started(tmp_path, "--train_file_path x")
    assert (plan.lora.rank, plan.lora.targets) == (64, ("q_proj", "v_proj"))
    assert (plan.batch.seq, plan.model.name, plan.precision.parameters) == (512, "llama-2-7b", "bf16")
    without = started(tmp_path, "--lora False --model_name meta-llama/Llama-3.2-1B --model_max_length 1024")
    assert without.lora.rank is None
    assert (without.batch.seq, without.model.name) == (1024, "llama-3.2-1b")


def test_a_condition_that_nothing_decides_is_asked_for(tmp_path: Path) -> None:
    text = PARSED.replace("if ours.lora", "if is_large(model)")
    with pytest.raises(PlanError, match="LoraConfig: is made where only the running script knows"):
        started(tmp_path, "", text)


def test_adapters_of_the_arguments_are_trls_own(tmp_path: Path) -> None:
    """``get_peft_config`` reads the flags, and says nothing that they do not."""
    text = """
from trl import SFTConfig, SFTTrainer, TrlParser, get_peft_config
script, args, model = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config()
SFTTrainer(model=model.model_name_or_path, args=args, peft_config=get_peft_config(model))
"""
    named = "--model_name_or_path meta-llama/Llama-3.2-1B --max_length 256 --no_remove_unused_columns"
    assert started(tmp_path, named, text).lora.rank is None
    assert started(tmp_path, f"{named} --use_peft --lora_r 4", text).lora.rank == 4


@pytest.mark.parametrize(
    ("test", "holds"),
    [
        ("a.x", True), ("not a.x", False), ("a.x and a.y", None), ("a.x or a.y", True), ("a.z is not None", False),
        ("a.n == 4", True), ("a.n != 4", False), ("'70B' in a.name", True), ("a.n > 3", None), ("f()", None),
    ],
)  # fmt: skip
def test_conditions(test: str, holds: bool | None) -> None:
    settled = Settled(ast.parse(""), {}, {}, {"x": True, "z": None, "n": 4, "name": "Llama-70B"})
    assert settled.holds(ast.parse(test, mode="eval").body) is holds


@pytest.mark.parametrize(
    ("said", "value"),
    [("a.n * 2 - 1", 7), ("64 // a.n + 1", 17), ("a.n // 0", UNKNOWN), ("a.other * 2", UNKNOWN), ("a.n / 2", UNKNOWN)],
)
def test_numbers_of_arguments(said: str, value: object) -> None:
    """``per_device_eval_batch_size=args.bs * 2``."""
    assert Settled(ast.parse(""), {}, {}, {"n": 4}).value(ast.parse(said, mode="eval").body) is value


def test_an_earlier_release_of_trl_as_the_command_line_has_it(tmp_path: Path) -> None:
    """Flags that may be given several times come as a tuple."""
    (tmp_path / "run.sh").write_text("trl sft --model_name_or_path gpt2 --max_length 512\n", encoding="utf-8")
    place, flags = str(tmp_path / "run.sh"), {"versions": ("trl=1.9.0",)}
    assert read_given(place, flags_of_launch(place, None), flags).plan.trainer.loop == "transformers"


@pytest.mark.parametrize(
    ("said", "dtype", "autocast"),
    [("--mixed_precision bf16", "bf16", True), ("--mixed_precision no", "fp32", None), ("", "fp32", None)],
)
def test_the_precision_of_a_launcher(said: str, dtype: str, autocast: bool | None, tmp_path: Path) -> None:
    """``TrainingArguments`` takes it from the environment where neither of its own is on."""
    command = f"accelerate launch {said} --num_processes 1 run_clm.py --model_name_or_path gpt2 --do_train"
    plan = plan_of(tmp_path, "run.sh", f"{command}\n")
    assert (plan.precision.dtype, plan.precision.autocast or None) == (dtype, autocast)
    assert plan.batch.seq == 1024  # run_clm.py's own
    assert plan_of(tmp_path, "run.sh", f"{command} --fp16\n").precision.dtype == "fp16"


@pytest.mark.parametrize(
    ("script", "flags", "labels"),
    [
        ("run_glue.py", "--task_name mnli", 3), ("run_glue.py", "--task_name stsb", 1), ("run_xnli.py", "", 3),
        ("run_glue_no_trainer.py", "--task_name sst2", 2), ("run_classification.py", "--do_regression True", 1),
    ],
)  # fmt: skip
def test_example_scripts_of_classifiers(script: str, flags: str, labels: int, tmp_path: Path) -> None:
    """They train no language model; their rows are of 128 tokens."""
    command = f"python {script} --model_name_or_path bert-base-cased --do_train {flags}\n"
    plan = plan_of(tmp_path, "run.sh", command)
    assert (plan.model.labels, plan.batch.seq) == (labels, 128)


@pytest.mark.parametrize(
    ("script", "part"),
    [
        ("run_ner.py", "trains a classifier of tokens"), ("run_swag_no_trainer.py", "trains a model of multiple"),
        ("run_image_classification.py", "trains a model of images"), ("run_classification.py", "say --labels N"),
    ],
)  # fmt: skip
def test_example_scripts_of_other_heads(script: str, part: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=part):
        plan_of(tmp_path, "run.sh", f"python {script} --model_name_or_path bert-base-cased --do_train\n")


def test_a_trainer_of_trls_without_arguments_has_its_defaults(tmp_path: Path) -> None:
    """The first example of its documentation; the model's name may stand first."""
    for given in ('model="Qwen/Qwen2.5-0.5B"', '"Qwen/Qwen2.5-0.5B"'):
        plan = plan_of(tmp_path, "sft.py", f"from trl import SFTTrainer\nSFTTrainer({given}, train_dataset=rows)\n")
        assert (plan.trainer.loop, plan.batch.mbs, plan.batch.seq) == ("sft", 8, 1024)
    wrong = DPO.format(size="0.5B").replace('ref_model=ref, args=DPOConfig("out")', 'ref_model="gpt2"')
    assert "ref_model: is another model than the policy" in refusal(wrong)


def test_settings_of_a_model_that_trl_loads(tmp_path: Path) -> None:
    script = 'SFTTrainer("Qwen/Qwen2.5-0.5B", args=SFTConfig(model_init_kwargs={"dtype": "bfloat16"}))\n'
    same = {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "model_init_kwargs": {"dtype": "bfloat16"}, "bf16": True}
    read = plan_of(tmp_path, "sft.json", json.dumps(same), trainer="sft")
    assert read.precision.parameters == "bf16"
    assert plan_of(tmp_path, "sft.py", script) == read


def test_a_loss_of_few_scores_is_small_whatever_it_is(tmp_path: Path) -> None:
    """Weights of classes are what people write one for; the list of labels may stand in the script."""
    loaded = 'labels = ["a", "b", "c"]\nmodel = AutoModelForSequenceClassification.from_pretrained('
    text = TRAIN.replace("model = AutoModelForCausalLM.from_pretrained(", loaded).replace('1B")', '1B", num_labels=N)')
    own = text.replace("Trainer(model", OWN_LOSS.lstrip() + "model")
    assert plan_of(tmp_path, "train.py", own.replace("=N", "=len(labels)")).model.labels == 3
    assert "num_labels: is N, which only" in refusal(own)
    script_in(own, "train.py", ["labels"])


def test_a_script_of_a_command_line_is_given_by_its_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PARSED, encoding="utf-8")
    assert "give a shell script with the command that starts it" in refusal(PARSED)
    (tmp_path / "train.py").write_text(PARSED.replace("class TrainingArguments(", "class Ours ("), encoding="utf-8")
    with pytest.raises(PlanError, match="give a shell script with the command that starts it"):
        flags_of_launch(str(tmp_path / "train.py"), None)


def test_adapters_that_trl_casts_beside_another_dtype(tmp_path: Path) -> None:
    """They are refused with what can be said instead."""
    text = QLORA.replace("max_length=2048", "max_length=2048, bf16=False")
    with pytest.raises(PlanError, match=r"since 0.26, and is not modelled in fp32: train in bf16 .* --lora-dtype fp32"):
        resolve(plan_of(tmp_path, "sft.py", text))


FIRE = """
import fire, torch, transformers
from peft import LoraConfig, get_peft_model
def train(base_model="", batch_size: int = 128, micro_batch_size: int = 4, lora_r: int = 8):
    steps = batch_size // micro_batch_size
    model = transformers.LlamaForCausalLM.from_pretrained(base_model, load_in_8bit=True, torch_dtype=torch.float16)
    model = get_peft_model(model, LoraConfig(r=lora_r, target_modules=["q_proj"]))
    args = transformers.TrainingArguments("out", per_device_train_batch_size=micro_batch_size,
                                          gradient_accumulation_steps=steps, fp16=True)
    transformers.Trainer(model=model, args=args).train()
fire.Fire(train)
"""
ARGPARSE = TRAIN.replace("model = ", """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--half", action="store_true")
said = parser.parse_args()
model = """).replace("=4", "=said.batch_size").replace("default=said.batch_size", "default=4")  # fmt: skip


def test_arguments_of_fire_and_argparse(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FIRE, encoding="utf-8")
    command = "python train.py --base_model huggyllama/llama-7b --micro_batch_size 8 --lora_r 16\n"
    plan = plan_of(tmp_path, "run.sh", command)
    assert (plan.model.name, plan.batch.mbs, plan.batch.accumulation) == ("llama-7b", 8, 16)
    assert (plan.lora.rank, plan.quantisation.kind, plan.precision.dtype) == (16, "int8", "fp16")
    (tmp_path / "train.py").write_text(ARGPARSE, encoding="utf-8")
    assert plan_of(tmp_path, "run.sh", "python train.py --batch-size 8\n").batch.mbs == 8
    assert plan_of(tmp_path, "run.sh", "python train.py\n").batch.mbs == 4


@pytest.mark.parametrize(
    ("declared", "given", "mbs"),
    [
        ('"-b", "--batch-size"', "-b 8", 8), ('"--batch-size", "-b"', "-b 8", 8),
        ('"--size", dest="batch_size"', "--size 8", 8),
        ('"--small", dest="batch_size"', "", 4),
    ],
)  # fmt: skip
def test_options_by_other_names(declared: str, given: str, mbs: int, tmp_path: Path) -> None:
    """``argparse`` names the argument by ``dest``, or by its first long option."""
    (tmp_path / "train.py").write_text(ARGPARSE.replace('"--batch-size"', declared), encoding="utf-8")
    assert plan_of(tmp_path, "run.sh", f"python train.py {given}\n").batch.mbs == mbs


@pytest.mark.parametrize(
    ("declared", "given", "on"),
    [
        ('"--no-bf", dest="bf", action="store_false"', "", True), ('"--bf", action="store_false"', "--bf", False),
        ('"--bf", action=argparse.BooleanOptionalAction, default=True', "--no-bf", False),
        ('"--no-bf", dest="bf", action="store_false"', "--no-bf", False), ('"--bf", action="store_true"', "--bf", True),
    ],
)  # fmt: skip
def test_switches_that_turn_off(declared: str, given: str, on: bool, tmp_path: Path) -> None:
    for said, wanted in (("said.bf", on), ("not said.bf", not on)):
        text = ARGPARSE.replace('"--half", action="store_true"', declared).replace("bf16=True", f"bf16={said}")
        (tmp_path / "train.py").write_text(text, encoding="utf-8")
        assert bool(plan_of(tmp_path, "run.sh", f"python train.py {given}\n").precision.autocast) is wanted


def test_what_a_condition_leaves_out_is_not_set(tmp_path: Path) -> None:
    later = "if {}:\n    args.per_device_train_batch_size = 2\nTrainer("
    texts = [
        TRAIN.replace("Trainer(model", later.format(test) + "model") for test in ("False", '__name__ == "__main__"')
    ]
    assert [plan_of(tmp_path, "train.py", text).batch.mbs for text in texts] == [4, 2]
    asked = refusal(TRAIN.replace("Trainer(model", later.format("many()") + "model"))
    assert "per_device_train_batch_size: is set anew under many(), which only the running script knows" in asked


def test_a_loss_that_adds_to_its_bases_is_the_scripts_own(tmp_path: Path) -> None:
    """The name holds the base's loss first, deeper in the method than what is added to it."""
    own = (
        OWN_LOSS.split("def ")[0]
        + "def compute_loss(self, model, inputs, **more):\n        with torch.autocast('cuda'):\n"
    )
    own += "            loss = super().compute_loss(model, inputs)\n        {}return loss\nOwn("
    assert "is a loss of the script's own" in refusal(
        TRAIN.replace("Trainer(model", own.format("loss = loss + 1\n        ") + "model")
    )
    assert plan_of(tmp_path, "train.py", TRAIN.replace("Trainer(model", own.format("") + "model")).batch.mbs == 4


def test_the_environment_by_update(tmp_path: Path) -> None:
    text = f"import os\nos.environ.update({{'PYTORCH_CUDA_ALLOC_CONF': 'expandable_segments:True'}})\n{TRAIN}"
    assert plan_of(tmp_path, "train.py", text).environment


def test_a_script_of_many_functions_is_walked_once() -> None:
    """3,000 functions took 85 s while each looked for fire's calls anew."""
    text = ARGPARSE + "".join(f"def f{n}(a):\n    return g(a)\n" for n in range(1000))
    steps: list[bool] = []
    walk = ast.walk

    def counted(node: ast.AST) -> Iterator[ast.AST]:
        steps.append(isinstance(node, ast.Module))
        return walk(node)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ast, "walk", counted)
        Settled(ast.parse(text), {}, {}, {})
    assert sum(steps) < 10


@pytest.mark.parametrize("flag", ["--config_file", "--mixed_precision", "--use_fsdp", "--zero_stage"])
def test_flags_of_a_launcher_that_are_not_known_are_asked_for(flag: str, tmp_path: Path) -> None:
    """Without them the job was assumed to be DDP in fp32; those without effect may be what they are."""
    command = (
        "P=$(cat file)\naccelerate launch {} $P --main_process_port $P --fsdp_state_dict_type $P --num_processes 1"
    )
    command += " run_clm.py --model_name_or_path gpt2 --do_train\n"
    with pytest.raises(PlanError, match=f"{flag}: is needed, .*--set P=value") as raised:
        plan_of(tmp_path, "run.sh", command.format(flag))
    assert len(raised.value.errors) == 1
    assert plan_of(tmp_path, "run.sh", command.format("--machine_rank")).precision.dtype == "fp32"


def test_a_script_of_a_newer_python_leaves_the_command(tmp_path: Path) -> None:
    """Its arguments say the job; a note says that what the script does besides is left out."""
    (tmp_path / "train.py").write_text(PARSED + "\nexcept A, B:\n", encoding="utf-8")
    command = "python train.py --model_name_or_path gpt2 --per_device_train_batch_size 2 --max_length 512 --bf16\n"
    (tmp_path / "run.sh").write_text(command, encoding="utf-8")
    place = str(tmp_path / "run.sh")
    read = read_given(place, flags_of_launch(place, None), {"gpus": "1"})
    assert read.plan.batch.mbs == 2
    assert any("train.py is no Python that can be read" in note.message for note in read.warnings)


LATER = """
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
ours, args = HfArgumentParser((Ours, TrainingArguments)).parse_args_into_dataclasses()
model = AutoModelForCausalLM.from_pretrained(ours.name, attn_implementation=ours.attn)
args.gradient_checkpointing = True
Trainer(model=model, args=args).train()
"""


def test_what_is_set_behind_the_parser_stands_over_the_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LATER, encoding="utf-8")
    command = "python train.py --output_dir o --bf16 --gradient_checkpointing False --name gpt2 --attn {}\n"
    plan = plan_of(tmp_path, "run.sh", command.format("eager"))
    assert (plan.recompute.mode, plan.attention) == ("full", "eager")
    with pytest.raises(PlanError, match="attn_implementation: is ours"):
        plan_of(tmp_path, "run.sh", command.format("$UNSET"))


def test_lists_that_double_with_each_name_end() -> None:
    """2^40 items, were they written out."""
    names = ["v0 = [1, 2]", *(f"v{at} = [v{at - 1}, v{at - 1}]" for at in range(1, 41))]
    script = "\n".join([*names, 'Trainer(model=m, args=TrainingArguments("x", fsdp_config=v40))'])
    head = 'from transformers import *\nm = AutoModelForCausalLM.from_pretrained("gpt2")\n'
    assert "fsdp_config: is v40, which only the running script knows" in refusal(head + script)


@pytest.mark.parametrize("launcher", ["python", "torchrun --nproc_per_node 1", "accelerate launch --num_processes 1"])
def test_a_module_is_started_as_a_file_is(launcher: str, tmp_path: Path) -> None:
    flags = "--model_name_or_path gpt2 --per_device_train_batch_size 2 --max_seq_length 512 --bf16\n"
    started = [plan_of(tmp_path, "run.sh", f"{launcher} {what} {flags}") for what in ("-m recipes.train", "train.py")]
    assert started[0] == started[1]
    assert started[0].batch.mbs == 2
