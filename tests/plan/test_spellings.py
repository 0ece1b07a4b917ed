"""Names as other tools write them, and frameworks that nobody named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from memplan.device.gpus import ALSO_CALLED, GPUS
from memplan.estimate import estimate
from memplan.frameworks import IMPLIED_BY, ROOMS
from memplan.optimizers import ROOMS as ROOMS_OF_OPTIMIZERS, trainer_names
from memplan.plan import implied
from memplan.plan.errors import PlanError
from memplan.plan.fields import Kind, by_flag, plan_fields
from memplan.plan.library import hub_ids, model_specs, nicknames
from memplan.plan.near_misses import MEANT, SAME, likely
from memplan.plan.notes import FRAMEWORK_CHOSEN
from memplan.plan.plan import Plan
from memplan.plan.read import ReadPlan, read_plan
from memplan.plan.spellings import plain


def read(**flags: str) -> ReadPlan:
    return read_plan(None, {"model": "gpt2", **{name.replace("_", "-"): value for name, value in flags.items()}})


def plan(**flags: str) -> Plan:
    return read(**flags).plan


@pytest.mark.parametrize(
    ("written", "gpu"),
    [
        ("h100", "h100-80gb"),
        ("H100", "h100-80gb"),
        ("A100-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("4090", "rtx-4090"),
        ("RTX4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("a10g", "a10g"),
        ("A10", "a10"),
        ("Tesla T4", "t4"),
        ("gh200-96gb", "h100-96gb"),
        ("GH200 144GB", "gh200-144gb"),
        ("2080ti", "rtx-2080-ti"),
        ("RTX 3090 Ti", "rtx-3090-ti"),
        ("rtx_a6000", "rtx-a6000"),
    ],
)
def test_gpus(written: str, gpu: str) -> None:
    assert plan(gpu=written).hardware.gpu == gpu


@pytest.mark.parametrize(
    ("written", "both"),
    [
        ("a100", "a100-40gb or a100-80gb"),
        ("V100", "v100-16gb or v100-32gb"),
        ("GH200", "h100-96gb or gh200-144gb"),
    ],
)
def test_a_name_of_two_gpus_asks_which(written: str, both: str) -> None:
    with pytest.raises(PlanError, match=f"could be {both}; name one"):
        plan(gpu=written)


def test_every_gpu_is_known_by_its_driver() -> None:
    assert set(ALSO_CALLED) == set(GPUS)
    for gpu in GPUS.values():
        assert plan(gpu=gpu.title).hardware.gpu == gpu.name
        assert plan(gpu=gpu.title.upper().replace("-", " ")).hardware.gpu == gpu.name


@pytest.mark.parametrize(
    ("flag", "written", "means"),
    [
        ("dtype", "bfloat16", "bf16"),
        ("dtype", "torch.bfloat16", "bf16"),
        ("dtype", "BF16", "bf16"),
        ("dtype", "float32", "fp32"),
        ("dtype", "half", "fp16"),
        ("attention", "flash-attention-2", "flash_attention_2"),
        ("attention", "FA3", "flash_attention_3"),
        ("attention", "Eager", "eager"),
        ("attention", "sdpa", "flash"),
        ("optimizer", "AdamW", "adamw"),
        ("recompute", "FULL", "full"),
        ("framework", "Megatron_DeepSpeed", "megatron-deepspeed"),
        ("seq", "8k", 8192),
        ("seq", "128K", 131072),
    ],
)
def test_values(flag: str, written: str, means: object) -> None:
    path = by_flag()[flag].path.split(".")
    value: Any = plan(**{flag: written})
    for name in path:
        value = getattr(value, name)
    assert value == means


@pytest.mark.parametrize(
    "name", [name for name in trainer_names() if plain(name) not in map(plain, ROOMS_OF_OPTIMIZERS)]
)
def test_optimizers_of_the_trainer(name: str) -> None:
    for written in (name, name.upper(), name.replace("_", "-")):
        optimizer = plan(optimizer=written).optimizer
        assert {key: getattr(optimizer, key) for key in trainer_names()[name]} == trainer_names()[name]


def test_an_optimizer_that_another_field_contradicts() -> None:
    with pytest.raises(PlanError, match="is fused with optimizer adamw_torch_fused; name the optimizer adamw"):
        plan(optimizer="adamw_torch_fused", optimizer_implementation="foreach")
    assert plan(optimizer="adamw_torch_fused", optimizer_implementation="fused").optimizer.implementation == "fused"


CHOICES = [field for field in plan_fields().values() if field.kind is Kind.CHOICE and field.flag]


@given(st.sampled_from(CHOICES), st.data())
def test_case_and_hyphens_of_a_choice_do_not_matter(field: Any, data: st.DataObject) -> None:
    from memplan.plan.errors import scalar
    from memplan.plan.normalise import field_value
    from memplan.plan.read import COMMAND_LINE

    choice = data.draw(st.sampled_from(field.choices))
    written = data.draw(st.sampled_from((choice.upper(), choice.replace("-", "_"), choice.replace("_", "-"))))
    assert field_value(field, scalar(written, COMMAND_LINE)).value == choice


# -- models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("llama3-8b", "llama-3-8b"),
        ("Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-405B-Instruct", "llama-3-405b"),
        ("Meta-Llama-3-8B", "llama-3-8b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("Qwen3-8B-Base", "qwen3-8b"),
        ("qwen3-235b", "qwen3-235b-a22b"),
        ("qwen-3-30b", "qwen3-30b-a3b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("openai-community/gpt2-xl", "gpt2-xl"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b-v0.3"),
    ],
)
def test_models(written: str, name: str) -> None:
    assert plan(model=written).model.name == name


@pytest.mark.parametrize(
    ("written", "name", "billions"),
    [
        ("deepseek-r1:1.5b", "deepseek-r1-qwen-1.5b", 1.78),
        ("deepseek-r1:7b", "qwen2.5-7b", 7.62),
        ("deepseek-r1:14b", "qwen2.5-14b", 14.8),
        ("deepseek-r1:32b", "qwen2.5-32b", 32.8),
        ("deepseek-r1:70b", "llama-3.3-70b", 70.6),
        ("deepseek-r1:671b", "deepseek-v3", 671),
        ("deepseek-v2:16b", "deepseek-v2-lite", 15.7),
        ("r1 distill llama 70b", "llama-3.3-70b", 70.6),
        ("llama3.1 70b instruct", "llama-3.1-70b", 70.6),
        ("llama4:16x17b", "llama-4-scout", 108),
        ("llama3.3:latest", "llama-3.3-70b", 70.6),
        ("qwen 3 30b a3b", "qwen3-30b-a3b", 30.5),
        ("gpt oss 120b", "gpt-oss-120b", 117),
        ("mistral nemo", "mistral-nemo-12b", 12.2),
        ("mistral-small3.2:24b", "mistral-small-3.1-24b", 23.6),
        ("phi3:14b", "phi-3-medium", 14.0),
        ("phi3.5:3.8b", "phi-3.5-mini", 3.82),
        ("starcoder:7b", "starcoderbase-7b", 7.3),
        ("granite4:micro", "granite-4.0-micro", 3.4),
        ("qwen3:4b-instruct-2507", "qwen3-4b-2507", 4.02),
        ("qwen3-coder:30b", "qwen3-coder-30b-a3b", 30.5),
        ("gemma3:27b-it-qat", "gemma-3-27b", 27.0),
        ("mistral:7b", "mistral-7b-v0.3", 7.248),
        ("Mistral:latest", "mistral-7b-v0.3", 7.248),
        ("command-r:35b", "command-r-08-2024", 32.3),
        ("command-r-plus:104b", "command-r-plus", 104),
        ("smollm2:latest", "smollm2-1.7b", 1.71),
        ("gemma3:latest", "gemma-3-4b", 3.88),
        ("deepseek-r1:latest", "qwen3-8b", 8.19),
        ("qwen3:30b", "qwen3-30b-a3b-2507", 30.5),
    ],
)
def test_names_of_ollama_and_nicknames(written: str, name: str, billions: float) -> None:
    """As many parameters as Ollama's library or the model's card names."""
    from memplan.plan.count import parameters

    spec = plan(model=written).model
    assert spec.name == name
    assert parameters(spec) == pytest.approx(billions * 1e9, rel=0.015)


@pytest.mark.parametrize("written", ["Mistral-7B", "mistral7b", "mistralai/Mistral-7B-v0.1", "mistral:v0.1"])
def test_a_name_without_a_colon_is_not_ollamas(written: str) -> None:
    """Its ``mistral:7b`` is version 0.3, which has 768 more words."""
    assert (plan(model=written).model.name, plan(model=written).model.vocab) == ("mistral-7b", 32_000)
    assert plan(model="mistral:7b").model.vocab == 32_768


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("deepseek-r1:8b", "could be qwen3-8b or llama-3.1-8b; name one|could be llama-3.1-8b or qwen3-8b; name one"),
        ("mistral", "name one"),
        ("gemma3n:e4b", "layers that share keys and values"),
        ("exaone-deep:32b", "whose code came with its weights"),
        ("mlx-community/DeepSeek-R1-Distill-Qwen-7B-4bit", "in 16 bits it is qwen2.5-7b"),
        ("RedHatAI/Llama-3.3-70B-Instruct-quantized.w4a16", "in 16 bits it is llama-3.3-70b"),
        ("nvidia/DeepSeek-R1-FP4", "in 16 bits it is deepseek-v3"),
        ("opt 175b", "neither a built-in model"),
        ("qwen1.5-72b", "neither a built-in model"),
    ],
)
def test_a_name_that_is_no_models_is_not_taken_for_another(written: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        plan(model=written)


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3-4B-Instruct-2507",
        "Qwen3-30B-A3B-Thinking-2507",
        "Qwen3-235B-A22B-Instruct-2507",
        "Qwen3-Coder-30B-A3B-Instruct",
    ],
)
def test_releases_of_july_2025_reach_further(name: str) -> None:
    """Their cards: 262,144 tokens natively, and the sizes of those of April, whose limit is 40,960."""
    from memplan.plan.count import parameters

    later = plan(model=f"Qwen/{name}").model
    before = plan(model=later.name.removesuffix("-2507").replace("coder-", "")).model
    assert (later.positions_max, before.positions_max) == (262_144, 40_960)
    assert parameters(later) == parameters(before)


def test_nicknames_are_no_models_or_repositories() -> None:
    """Which they would hide."""
    known = {one.lower() for name, ids in hub_ids().items() for one in (name, *ids)}
    assert not known & {one for also in nicknames().values() for one in also}


def test_a_repository_belongs_to_one_model() -> None:
    everywhere = [one.lower() for ids in hub_ids().values() for one in ids]
    assert len(everywhere) == len(set(everywhere))
    for name, ids in hub_ids().items():
        called = (*ids, name.upper())
        assert all(read_plan(None, {"model": one}, traced=True).plan.model.name == name for one in called)


def test_the_owner_of_a_repository_matters() -> None:
    with pytest.raises(PlanError, match=r"hf download somebody/Llama-3\.2-1B config\.json; llama-3\.2-1b is built in"):
        plan(model="somebody/Llama-3.2-1B")


CONFIG = """{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
"num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64}"""


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_the_local_cache_of_the_hub(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Laid out as huggingface_hub does: snapshots are links to blobs, and refs name the commit."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    below = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}[variable]
    folder = tmp_path / below / "models--somebody--tiny-llama"
    for name in ("blobs", "refs", "snapshots/0abc"):
        (folder / name).mkdir(parents=True)
    (folder / "blobs/f00").write_text(CONFIG)
    (folder / "refs/main").write_text("0abc")
    (folder / "snapshots/0abc/config.json").symlink_to(folder / "blobs/f00")
    found = plan(model="somebody/tiny-llama").model
    assert (found.name, found.hidden) == ("tiny-llama", 64)
    with pytest.raises(PlanError, match="not in the local Hugging Face cache"):
        plan(model="somebody/other")


def test_a_file_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama3-8b").mkdir()
    (tmp_path / "llama3-8b/config.json").write_text(CONFIG)
    assert plan(model="llama3-8b").model.hidden == 64


# -- the framework -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "framework", "because"),
    [
        ({}, "single", None),
        ({"gpus": "1", "tp": "1", "zero": "0"}, "single", None),
        ({"gpus": "8"}, "fsdp", "gpus 8"),
        ({"dp": "4"}, "fsdp", "dp 4"),
        ({"tp": "4"}, "megatron", "tp 4"),
        ({"pp": "2", "gpus": "8"}, "megatron", "pp 2"),
        ({"vpp": "2"}, "megatron", "vpp 2"),
        ({"fp8": "delayed", "gpus": "8"}, "megatron", "fp8 delayed"),
        ({"tp": "4", "zero": "1"}, "megatron-deepspeed", "tp 4 and zero 1"),
        ({"zero": "3", "gpus": "8"}, "deepspeed", "zero 3"),
        ({"offload_optimizer": "cpu"}, "deepspeed", "deepspeed"),
        ({"fsdp_offload": "true", "tp": "2"}, "fsdp", "fsdp"),
        ({"gpus": "8", "framework": "ddp"}, "ddp", None),
        ({"gpus": "8", "model": "qwen3.5-27b"}, "fsdp", "gpus 8"),
    ],
)
def test_a_framework_that_nobody_named(flags: dict[str, str], framework: str, because: str | None) -> None:
    found = read(**flags)
    assert found.plan.framework == framework
    told = [note.message for note in found.warnings if note.code == FRAMEWORK_CHOSEN]
    assert told == ([] if because is None else [f"no framework was named: {framework}, because of {because}"])


def test_a_framework_that_is_the_only_one_shards_as_the_usual_one_does() -> None:
    """Megatron-LM's distributed optimizer, unless one GPU, the optimizer or the plan says otherwise."""
    found = read(model="mamba2-1.3b", gpus="8")
    (told,) = [note.message for note in found.warnings if note.code == FRAMEWORK_CHOSEN]
    assert told.endswith("which has a recipe of mamba2, with the distributed optimizer (--zero 1)")
    whole: dict[str, str]
    for whole in ({}, {"gpus": "8", "optimizer": "sgd"}, {"gpus": "8", "framework": "megatron"}):
        assert read(model="mamba2-1.3b", **whole).plan.layout.zero == 0
    assert found.plan.layout.zero == 1
    assert implied.meant(found.plan) != "megatron", "--zero 1 alone is DeepSpeed's: ways out name the framework"


@pytest.mark.parametrize("model", ["mamba2-1.3b", "kimi-k2"])
def test_a_framework_that_has_the_recipe(model: str) -> None:
    """The only one."""
    found = read(model=model)
    (told,) = [note.message for note in found.warnings if note.code == FRAMEWORK_CHOSEN]
    assert told == f"no framework was named: megatron, which has a recipe of {found.plan.model.family}"


@pytest.mark.parametrize(
    ("flags", "framework", "because"),
    [
        ({"model": "bert-large", "gpus": "8"}, "ddp", "because of gpus 8: fsdp has no recipe of bert"),
        ({"model": "bloom-1.1b", "gpus": "8"}, "megatron-deepspeed", "which has a recipe of bloom"),
        ({"model": "bloom-1.1b", "gpus": "8", "tp": "2"}, "megatron-deepspeed", "which has a recipe of bloom"),
        ({"model": "gpt-j-6b", "gpus": "8", "tp": "2"}, "megatron", "because of tp 2"),
    ],
)
def test_a_framework_that_nobody_named_has_the_recipe(flags: dict[str, str], framework: str, because: str) -> None:
    """GPT-J, which FSDP shards and no Megatron has, is refused where tensor parallelism is asked for."""
    found = read(**flags)
    (told,) = [note.message for note in found.warnings if note.code == FRAMEWORK_CHOSEN]
    assert told == f"no framework was named: {framework}, {because}"
    assert implied.meant(found.plan) == found.plan.framework == framework


@pytest.mark.parametrize(
    ("model", "framework"),
    [("whisper-tiny", "ddp"), ("bart-base", "ddp"), ("t5-small", "fsdp")],
)
def test_what_was_learnt_and_cannot_be_sharded_is_replicated(model: str, framework: str) -> None:
    """Whisper's positions are not trained, and BART's buffers are not those of the shards' dtype: of these
    ``fully_shard`` is not known, and nobody asked for it by name."""
    flags = {"model": model, "gpus": "8", "gpu": "h100"}
    found = read_plan(None, flags, traced=True)
    assert (found.plan.framework, found.chosen_framework is not None) == (framework, True)
    named = read_plan(None, {**flags, "framework": framework}, traced=True)
    assert estimate(found.plan).peak == estimate(named.plan).peak
    if framework == "ddp":
        assert "; not fsdp: it" in str(found.chosen_framework)
        asked = read_plan(None, {**flags, "fsdp-version": "2"}, traced=True).plan
        with pytest.raises(PlanError, match="must be single, ddp or deepspeed"):
            estimate(asked)


def test_what_is_not_sharded_is_run_elsewhere() -> None:
    with pytest.raises(PlanError, match=r"fsdp yet; it has one in single, ddp, deepspeed, device-map, megatron \("):
        estimate(plan(model="bert-large", gpus="8", framework="fsdp"))


def test_what_implies_a_framework_is_a_field_or_a_section() -> None:
    for name, groups in IMPLIED_BY:
        assert name in ROOMS
        for path in (path for paths in groups for path in paths):
            assert path in plan_fields() or path in Plan.model_fields


def test_an_error_says_why_the_plan_has_its_framework(capsys: pytest.CaptureFixture[str]) -> None:
    from memplan.cli import main

    assert main(["estimate", "--model", "gpt2", "--tp", "5"]) == 2
    assert "(no framework was named: megatron, because of tp 5)" in capsys.readouterr().err


def test_an_architecture_without_a_recipe_shows_no_sizes_of_a_stand_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from memplan.cli import main

    (tmp_path / "config.json").write_text(CONFIG.replace('"llama"', '"olmo"'))
    for flags in (["--tp", "4"], ["--ep", "4"], ["--experts-imbalance", "1.5"]):  # whose experts nobody read
        assert main(["estimate", "--model", str(tmp_path), *flags]) == 2
        assert "under others this architecture has no recipe" in capsys.readouterr().err


LONG, PARALLEL = ("tensor", "pipeline", "context", "expert"), ("--tp", "--pp", "--cp", "--ep")

# -- flags and sizes ---------------------------------------------------------------------------------------


def test_flags_that_other_tools_have_point_to_flags_here() -> None:
    own = {field.flag for field in plan_fields().values() if field.flag}
    assert not own & MEANT.keys()
    for meant in MEANT.values():
        assert {word for word in meant.split() if word.startswith("--")} <= own
    assert not own & SAME.keys()
    assert not MEANT.keys() & SAME.keys()
    read_as = {flag.partition("=")[0] for flag in SAME.values()}
    assert read_as <= own | {f"--no-{flag[2:]}" for flag in own}


@pytest.mark.parametrize(
    ("written", "flag"),
    [
        *((f"--{long}-parallel-degree", flag) for long, flag in zip(LONG, PARALLEL, strict=True)),
        *((f"--{long}-model-parallel-size", flag) for long, flag in zip(LONG[:2], PARALLEL[:2], strict=True)),
        ("--virtual-pipeline-model-parallel-size", "--vpp"),
        ("--r", "--lora-rank"),
        ("--per-device-train-batch-size", "--mbs"),
    ],
)
def test_flags_of_megatron_torchtitan_and_peft(written: str, flag: str) -> None:
    """torchtitan's ``parallelism`` calls sizes degrees (``config/configs.py``)."""
    assert SAME[written] == flag


@pytest.mark.parametrize(
    ("written", "flags"),
    [
        ("--adamw", "--optimizer adamw"),
        ("--distributed", "--framework"),
        ("--ac", "--recompute full"),
        ("--zero3", "--zero 3"),
        ("--bs", "--mbs"),
        ("--ctx", "--seq"),
        ("--4bit", "--quantisation nf4"),
        ("--bf16", "--dtype bf16"),
    ],
)
def test_words_that_people_type_name_a_flag(written: str, flags: str) -> None:
    assert likely(written, ()) == flags


@given(st.integers(1, 2**20 - 1))
def test_a_memory_size_needs_a_unit(size: int) -> None:
    with pytest.raises(PlanError, match="needs a unit"):
        plan(capacity=str(size))
    from memplan.plan.sizes import headroom_bytes

    with pytest.raises(PlanError, match="needs a unit"):
        headroom_bytes(str(size), 80 << 30)


def test_every_model_has_its_repository() -> None:
    """But for those that nobody published as one."""
    without = {"bert-5.1b", "bigscience-104b", "bigscience-104b-250k", "gpt3-175b", "muse-glimmer-30b"}
    without |= {name for name in model_specs() if name.startswith("megatron-")}
    assert {name for name, ids in hub_ids().items() if not ids} == without


@pytest.mark.parametrize(
    ("flag", "name", "says"),
    [
        ("optimizer", "galore_adamw_8bit", "projected to a low rank"),
        ("optimizer", "ao_adamw_fp8", "torchao's states in fp8"),
        ("optimizer", "dist_muon", "--optimizer muon --zero 1"),
        ("trainer", "BCO", "classifier of prompts"),
        ("trainer", "prm", "scores of steps"),
        ("trainer", "ppo", "generation"),
        ("quantisation", "hqq", "gptq, awq or int8"),
    ],
)
def test_what_others_have_is_refused_by_name(flag: str, name: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        read_plan(None, {"model": "llama-3-8b", "lora-rank": "8", flag: name})


@pytest.mark.parametrize("written", ["4bit", "4-bit", "bnb_4bit", "int4"])
def test_four_bits_are_nf4(written: str) -> None:
    assert read_plan(None, {"model": "gpt2", "lora-rank": "8", "quantisation": written}).plan.quantisation.kind == "nf4"


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("./models/Qwen3-8B", "no such file; qwen3-8b is built in: --model qwen3-8b"),
        ("/data/Meta-Llama-3-8B-Instruct/", "no such file; llama-3-8b is built in: --model llama-3-8b"),
        ("/x/models--meta-llama--Llama-3.1-8B", "no such file; llama-3.1-8b is built in: --model llama-3.1-8b"),
        ("/data/nothing", "no such file"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "qwen2.5-7b is built in, in 4 bits with --quantisation gptq"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "qwen2.5-7b is built in"),
        ("Qwen/Qwen3.5-27B-FP8", "in 16 bits it is qwen3.5-27b: --model qwen3.5-27b"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "in 16 bits it is llama-3.1-8b: --model llama-3.1-8b"),
        ("Qwen/Qwen3-VL-4B-Thinking", "its text part has the sizes of qwen3-4b: --model qwen3-4b"),
        ("granite-4", "did you mean granite-4.0-1b or granite-4.0-350m?"),
        ("whisper-large", "did you mean whisper-large-v2 or whisper-large-v3?"),
    ],
)
def test_a_name_of_nothing_here_says_what_is_built_in(name: str, ends: str) -> None:
    with pytest.raises(PlanError) as caught:
        read_plan(None, {"model": name})
    assert str(caught.value).endswith(ends)


def test_a_model_of_images_says_that_its_text_part_is_planned_with_its_configuration() -> None:
    with pytest.raises(
        PlanError, match=r"\(hf download Qwen/Qwen3-VL-2B-Instruct config.json\) its text part is planned"
    ):
        read_plan(None, {"model": "Qwen/Qwen3-VL-2B-Instruct"})


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3.6-27B", "Qwen/Qwen3.5-27B-Base", "unsloth/Qwen3.6-27B", "google/gemma-3-27b-it"]
)
def test_a_repository_of_images_and_text_is_planned_by_its_text(name: str) -> None:
    """Qwen 3.6 says 64 layers of 5,120 by 17,408, 24 heads of 256 for 4 keys, 16 and 48 heads of gated delta nets and a
    vocabulary of 248,320 in its ``config.json``, as Qwen 3.5 does."""
    assert [note.message for note in read(model=name).warnings if note.code == "text-part"] == [
        f"{name} reads images, too: only its text part is planned, without the vision tower and projector"
    ]
    assert (read(model=name).plan.model.hidden == 5120) is ("Qwen" in name)


def test_a_recipe_that_is_none_says_how_recipes_are_called(capsys: pytest.CaptureFixture[str]) -> None:
    from memplan.cli import main

    assert main(["estimate", "--recipe", "llama3_8b_pretrain"]) == 2
    assert "every name ends in _config" in capsys.readouterr().err


def test_losses_of_trl_that_are_not_modelled_name_those_that_are() -> None:
    for loop, why in (("bco", "a classifier of prompts"), ("prm", "scores of steps"), ("gold", "a teacher")):
        with pytest.raises(PlanError, match=f"{why}.*; sft, dpo, kto, orpo, cpo, simpo, grpo, rloo and reward are$"):
            plan(trainer=loop)
