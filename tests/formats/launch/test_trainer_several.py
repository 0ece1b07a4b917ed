"""What a training script makes twice, or under a condition, is asked for: neither the first nor the last counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.commands.launched import flags_of_launch, read_given
from memplan.formats.launch import Asked
from memplan.formats.trainer.python import script_in
from memplan.formats.trainer.reader import read as read_launch
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan

IMPORTS = "from trl import *\nfrom peft import LoraConfig\nfrom transformers import AutoModelForCausalLM\n"
HEAD = f"{IMPORTS}args = SFTConfig()\n"
SFT = "SFTTrainer(model='Qwen/Qwen3-0.6B', args=args)"


def plan_of(folder: Path, text: str, **flags: str) -> Plan:
    place = folder / "train.py"
    place.write_text(text, encoding="utf-8")
    return read_given(str(place), flags_of_launch(str(place), None), flags).plan


def refusal(text: str, *asked: str) -> str:
    with pytest.raises(PlanError) as caught:
        script_in(text, "train.py", asked)
    return str(caught.value)


@pytest.mark.parametrize(
    ("code", "kinds"),
    [
        (f"one = {SFT}\none.train()\ntwo = {SFT.replace('0.6B', '4B')}\ntwo.train()", ("SFT", 5, "SFT", 7)),
        (
            f"trainer = {SFT}\ntrainer.train()\ntwo = DPOTrainer(model='Qwen/Qwen3-4B')\ntwo.train()",
            ("SFT", 5, "DPO", 7),
        ),
        (f"def main():\n    {SFT}.train()\n    DPOTrainer(model='Qwen/Qwen3-4B').train()", ("SFT", 6, "DPO", 7)),
        (f"if KIND:\n    trainer = {SFT}\nelse:\n    trainer = DPOTrainer(model='x')\n", ("SFT", 6, "DPO", 8)),
    ],
)
def test_several_trainers_are_several_jobs(code: str, kinds: tuple[str, int, str, int]) -> None:
    first, line, second, last = kinds
    problem = (
        f"train.py:{last}: makes a {first}Trainer in line {line} and a {second}Trainer in line {last}, each of them"
    )
    assert problem in refusal(HEAD + code)


def test_branches_of_one_condition_are_one_trainer(tmp_path: Path) -> None:
    branches = f"if QUICK:\n    trainer = {SFT}\nelse:\n    trainer = {SFT}\ntrainer.train()\n"
    assert plan_of(tmp_path, HEAD + branches) == plan_of(tmp_path, f"{HEAD}{SFT}.train()\n")


def test_a_trainer_behind_the_training_evaluates(tmp_path: Path) -> None:
    later = f"trainer = {SFT}\ntrainer.train()\ntuned = {SFT}\ntuned.evaluate()\n"
    assert plan_of(tmp_path, HEAD + later) == plan_of(tmp_path, f"{HEAD}{SFT}.train()\n")


def test_adapters_made_otherwise_or_perhaps_are_asked_for(tmp_path: Path) -> None:
    two = f"{HEAD}one = LoraConfig(r=8)\ntwo = LoraConfig(r=64)\n{SFT[:-1]}, peft_config=one if SMALL else two)\n"
    assert (
        "train.py:6: LoraConfig: is made in line 5, too, and otherwise: keep one, or say it with --lora-rank"
        in refusal(two)
    )
    assert plan_of(tmp_path, two, **{"lora-rank": "32"}).lora is not None
    perhaps = f"{HEAD}lora = None\nif WANTED:\n    lora = LoraConfig(r=8)\n{SFT[:-1]}, peft_config=lora)\n"
    assert "train.py:7: LoraConfig: is made where only the running script knows: say it with --lora-rank" in refusal(
        perhaps
    )
    same = two.replace("64", "8")
    assert plan_of(tmp_path, same).lora == plan_of(tmp_path, same.replace("two = LoraConfig(r=8)\n", "")).lora
    once = refusal(perhaps.replace("r=8", "r=int(RANK)"))
    assert "lora_r: is int(RANK), which only the running script knows: say it with --lora-rank" in once
    assert once.count("--lora-rank") == 1
    computed = f"{HEAD}{SFT[:-1]}, peft_config=LoraConfig(r=int(RANK), lora_alpha=2 * int(RANK)))\n"
    assert "lora_alpha: is 2 * int(RANK), which only the running script knows: say it with --lora-alpha" in (
        refusal(computed)
    )
    said = plan_of(tmp_path, computed, **{"lora-rank": "32", "lora-alpha": "64"}).lora
    assert (said.rank, said.alpha) == (32, 64)


LOADS = "{0} = AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-{1}', dtype='{2}')\n"


def test_the_model_that_the_trainer_is_given_is_the_one(tmp_path: Path) -> None:
    first, second = LOADS.format("base", "0.6B", "float32"), LOADS.format("model", "4B", "bfloat16")
    train = "SFTTrainer(model=model, args=args).train()\n"
    assert plan_of(tmp_path, HEAD + first + second + train) == plan_of(tmp_path, HEAD + second + train)


def test_models_loaded_in_several_ways_are_asked_for(tmp_path: Path) -> None:
    loads = [LOADS.format("    model", size, dtype) for size, dtype in (("0.6B", "float32"), ("4B", "bfloat16"))]
    text = f"{HEAD}if SMALL:\n{loads[0]}else:\n{loads[1]}SFTTrainer(model=model, args=args)\n"
    told = refusal(text)
    assert "model: differs between the models that are loaded in lines 6 and 8: keep" in told
    assert "or say it with --model" in told
    assert "dtype: differs between" in told
    assert "or say it with --autocast-parameters" in told
    said = {"model": "qwen3-4b", "autocast-parameters": "bf16"}
    assert plan_of(tmp_path, text, **said) == plan_of(
        tmp_path, HEAD + loads[1].strip() + "\nSFTTrainer(model, args=args)\n"
    )


MODEL_CONFIG = """
from trl import GRPOConfig, GRPOTrainer, ModelConfig, get_peft_config
given = ModelConfig(model_name_or_path="Qwen/Qwen2.5-3B-Instruct", use_peft=True, load_in_4bit=True)
args = GRPOConfig(max_prompt_length=256, max_completion_length=1024, per_device_train_batch_size=1)
GRPOTrainer(model=given.model_name_or_path, args=args, peft_config=get_peft_config(given)).train()
"""


def test_arguments_of_a_model_that_the_script_makes_itself(tmp_path: Path) -> None:
    """trl's ``ModelConfig``: adapters of rank 16 by default, where ``get_peft_config`` takes them; 4-bit weights, which
    only ``get_quantization_config`` would take, are not loaded by this script."""
    plan = plan_of(tmp_path, MODEL_CONFIG)
    assert plan.lora is not None
    assert (plan.lora.rank, plan.quantisation.kind) == (16, "none")
    weights = MODEL_CONFIG.replace("peft_config=", "quantization_config=get_quantization_config(given), peft_config=")
    assert plan_of(tmp_path, weights).quantisation.kind == "nf4"
    nobody = MODEL_CONFIG.replace("given = ModelConfig", "OTHER = Other")
    told = refusal(nobody)
    assert (
        "takes adapters from get_peft_config(given), which only the running script knows: say it with --lora-rank"
        in told
    )
    twice = MODEL_CONFIG.replace("args =", "other = ModelConfig()\nargs =")
    assert "makes trl's ModelConfig in lines 3 and 4" in refusal(twice)


def test_what_a_trainer_of_trl_was_given_itself(tmp_path: Path) -> None:
    """``model_init_kwargs`` of ``SFTTrainer`` (trl before 0.13), and an optimizer's class (transformers from 4.47)."""
    plan = plan_of(tmp_path, f"{HEAD}{SFT[:-1]}, model_init_kwargs=dict(dtype='bfloat16', load_in_4bit=True))\n")
    assert (plan.precision.parameters, plan.quantisation.kind) == ("bf16", "nf4")
    own = f"{HEAD}{SFT[:-1]}, optimizer_cls_and_kwargs=(Adam, dict(lr=1)))\n"
    assert "optimizer_cls_and_kwargs: is an optimizer that the script makes itself" in refusal(own)
    assert plan_of(tmp_path, own, optimizer="sgd").optimizer.name == "sgd"


LOADED = "model = AutoModelForCausalLM.from_pretrained(NAME)\nSFTTrainer(model=model"


def test_a_name_given_the_same_value_again_has_it(tmp_path: Path) -> None:
    once = f"{HEAD}NAME = 'Qwen/Qwen3-4B'\nSFTTrainer(model=NAME, args=args).train()\n"
    assert plan_of(tmp_path, once.replace("NAME =", "NAME = 'Qwen/Qwen3-4B'\nNAME =")) == plan_of(tmp_path, once)
    anew = once.replace("NAME =", "NAME = 'Qwen/Qwen3-8B'\nNAME =").replace("SFTTrainer(model=NAME", LOADED)
    assert "model_name_or_path: is NAME, which only the running script knows" in refusal(anew)


def test_plans_are_for_gpus(tmp_path: Path) -> None:
    text = f"{HEAD}device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
    text = text.replace("SFTConfig()", "SFTConfig(optim='paged_adamw_8bit' if torch.cuda.is_available() else 'sgd')")
    assert plan_of(tmp_path, f"{text}{SFT}.train()\n").optimizer.name == "adam8bit"


TRAINS = "accelerate launch train.py --model_name_or_path gpt2 --per_device_train_batch_size {} --output_dir out\n"


@pytest.mark.parametrize(
    ("script", "others"),
    [
        (TRAINS.format(1) + TRAINS.format(16), "others start at line 2"),
        (f"for size in 1 16; do\n  {TRAINS.format('$size')}done\n", "its line starts 1 more with other values"),
        (f"for seed in 1 2; do\n  {TRAINS.format(1)}done\n", ""),
    ],
)
def test_further_trainings_of_a_script_are_told(script: str, others: str, tmp_path: Path) -> None:
    """A loop that trains the same again is one training."""
    place = tmp_path / "train.sh"
    place.write_text(script, encoding="utf-8")
    launch = read_launch(str(place), Asked("trainer", {"gpus": "1"}))
    told = [note.message for note in launch.notes if note.code == "several-trainings"]
    assert [one.split("; ")[1] for one in told] == ([others] if others else [])


BY_PLACE = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
def train(base_model="gpt2", size=4):
    model = AutoModelForCausalLM.from_pretrained(base_model)
    Trainer(model=model, args=TrainingArguments(per_device_train_batch_size=size, output_dir="out")).train()
{}
"""
FIRE = BY_PLACE.format("import fire\nfire.Fire(train)")
ARGPARSE = """
parser = argparse.ArgumentParser()
parser.add_argument("base_model")
parser.add_argument("size", type=int, default=4)
args = parser.parse_args()
model = AutoModelForCausalLM.from_pretrained(args.base_model)
Trainer(model=model, args=TrainingArguments(per_device_train_batch_size=args.size, output_dir="out")).train()
"""


@pytest.mark.parametrize("code", [FIRE, ARGPARSE], ids=["fire", "argparse"])
@pytest.mark.parametrize(
    ("words", "size", "rest"),
    [
        ("Qwen/Qwen3-0.6B 16", 16, ""),
        ("Qwen/Qwen3-0.6B --size 16", 16, ""),
        ("Qwen/Qwen3-0.6B 16 more of it", 16, "more of it (train.sh:1) belong to no argument that is known"),
    ],
)
def test_arguments_by_their_place(
    code: str, words: str, size: int, rest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(code, encoding="utf-8")
    Path("train.sh").write_text(f"python train.py {words}\n", encoding="utf-8")
    plan = read_given("train.sh", flags_of_launch("train.sh", None), {}).plan
    assert (plan.model.name, plan.batch.mbs) == ("qwen3-0.6b", size)
    notes = read_launch("train.sh", Asked("trainer")).notes
    assert [note.message for note in notes if note.code == "argument-loose"] == ([rest] if rest else [])


def test_a_place_whose_word_is_not_known_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FIRE, encoding="utf-8")
    (tmp_path / "train.sh").write_text('python train.py "$(cat name)" 16\n', encoding="utf-8")
    with pytest.raises(PlanError, match="model_name_or_path: is base_model, which only the running script knows"):
        read_given(str(tmp_path / "train.sh"), flags_of_launch(str(tmp_path / "train.sh"), None), {})


@pytest.mark.parametrize("made", ["LoraConfig(r=64)", "BitsAndBytesConfig(load_in_4bit=True)"])
def test_what_nothing_is_given_is_no_part_of_the_job(tmp_path: Path, made: str) -> None:
    """A configuration of adapters, or of weights, that neither trainer nor model takes changes nothing."""
    assert plan_of(tmp_path, f"{HEAD}unused = {made}\n{SFT}.train()\n") == plan_of(tmp_path, f"{HEAD}{SFT}.train()\n")
    taken = f"{HEAD}lora = LoraConfig(r=64)\n{SFT[:-1]}, peft_config=lora).train()\n"
    assert plan_of(tmp_path, taken).lora.rank == 64
