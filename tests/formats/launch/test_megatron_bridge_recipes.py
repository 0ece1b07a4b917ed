"""Recipes of Megatron-Bridge, followed in a checkout that is written here, beside the plan that they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.commands.launched import flags_of_launch, read_given
from memplan.formats.megatron_bridge.recipes import checkout_of, file_of, is_recipe
from memplan.plan.errors import PlanError
from memplan.plan.read import ReadPlan
from memplan.plan.resolve import resolve

COMMON = """
from megatron.bridge.training.config import ConfigContainer, DistributedDataParallelConfig, OptimizerConfig
from megatron.bridge.training.config import GPTDatasetConfig, RNGConfig, TokenizerConfig, TrainingConfig

def _adam(lr=1e-4):
    optimizer = OptimizerConfig(optimizer="adam", lr=lr, clip_grad=1.0, use_distributed_optimizer=True)
    return optimizer, SchedulerConfig()

def _pretrain_common() -> ConfigContainer:
    optimizer, scheduler = _adam()
    return ConfigContainer(
        model=None,
        train=TrainingConfig(global_batch_size=32, micro_batch_size=2),
        optimizer=optimizer,
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        dataset=GPTDatasetConfig(seq_length=4096),
        tokenizer=TokenizerConfig(use_tokenizer_vocab_size=True),
        rng=RNGConfig(seed=1234),
        comm_overlap=None,
        mixed_precision="bf16_mixed",
    )
"""
RECIPES = """
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.peft.base import PEFT
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.flex_dispatcher_backend import apply_flex_dispatcher_backend

def _layout(pp, vp):
    twelve, thirteen = ["decoder"] * 12, ["decoder"] * 13
    known = {
        (1, 1): None,
        (2, 1): [["embedding"] + ["decoder"] * 20, ["decoder"] * 28 + ["loss"]],
        (2, 2): [["embedding"] + twelve, twelve, twelve, twelve + ["loss"]],
        (4, 1): [["embedding"] + thirteen, thirteen, thirteen, ["decoder"] * 9 + ["loss"]],
    }
    vp = 1 if vp is None else vp
    if (pp, vp) not in known:
        raise ValueError(f"no layout for {pp} and {vp}")
    layout = known[(pp, vp)]
    if layout is not None:
        layout = list([list(stage) for stage in layout])
    return layout

def llama3_8b_pretrain_8gpu_h100_bf16_config() -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").get_model_config()
    cfg.tokenizer.tokenizer_type = "NullTokenizer"
    cfg.tokenizer.vocab_size = 32000
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.sequence_parallel = True
    cfg.model.seq_length = 8192
    cfg.dataset.seq_length = 8192
    cfg.train.micro_batch_size = 1
    cfg.optimizer.exp_avg_dtype = torch.float32
    cfg.logger.tensorboard_dir = os.environ["LOGS"]
    return cfg

def qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config() -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("Qwen/Qwen3-30B-A3B").to_megatron_provider(load_weights=False)
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.expert_model_parallel_size = 8
    cfg.model._pipeline_model_parallel_layout_builder = _layout
    cfg.model.pipeline_model_parallel_layout = _layout(2, cfg.model.virtual_pipeline_model_parallel_size)
    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=False)
    apply_flex_dispatcher_backend(cfg.model, "deepep")
    if getattr(cfg.model, "num_moe_experts", None) != 128:
        cfg.model.moe_token_dispatcher_type = "alltoall"
    return cfg

def llama3_8b_peft_1gpu_h100_bf16_config(peft_scheme="lora") -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").get_model_config()
    if isinstance(peft_scheme, str) and peft_scheme.lower() in ["lora", "dora"]:
        cfg.peft = default_scheme(peft_scheme, dim=8)
        cfg.peft.target_modules = ["linear_qkv"]
    return cfg

def default_scheme(scheme, **given):
    if scheme == "dora":
        return DoRA(**given)
    return LoRA(**given)

def llama3_8b_pretrain_4gpu_h100_bf16_config() -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").get_model_config()
    cfg.model.tensor_model_parallel_size = int(os.environ["TP"])
    return cfg

def qwen3_8b_sft_4gpu_h100_bf16_config() -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.train.micro_batch_size = 1
    cfg.model = AutoBridge.from_hf_pretrained("Qwen/Qwen3-8B").to_megatron_provider(load_weights=False)
    cfg.dataset = GPTSFTDatasetConfig(
        seq_length=2048,
        enable_offline_packing=True,
        offline_packing_specs=PackedSequenceSpecs(packed_sequence_size=2048, pad_seq_to_mult=1),
    )
    if cfg.model.context_parallel_size > 1:
        cfg.dataset.offline_packing_specs.pad_seq_to_mult = cfg.model.context_parallel_size * 2
    return cfg

def qwen3_vl_8b_sft_1gpu_h100_bf16_config() -> ConfigContainer:
    return _pretrain_common()

def ministral3_3b_sft_1gpu_h100_bf16_config() -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("mistralai/Ministral-3-3B").to_megatron_provider(load_weights=False)
    cfg.model.freeze_vision_model = False
    return cfg

def vanilla_pretrain_1gpu_h100_bf16_config() -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = GPTModelProvider(num_layers=4, hidden_size=512, num_attention_heads=8, seq_length=4096, vocab_size=512)
    return cfg
"""
ALIASES = """
from megatron.bridge.recipes.llama.h100.llama3 import (
    llama3_8b_pretrain_8gpu_h100_bf16_config as llama3_8b_pretrain_config,
)
"""
PERFORMANCE = """
from megatron.bridge.recipes.llama.llama3 import llama3_8b_pretrain_config
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.mixed_precision import get_mixed_precision_config

def _common(cfg: ConfigContainer) -> None:
    if hasattr(cfg.model, "use_transformer_engine_op_fuser") and cfg.model.use_transformer_engine_op_fuser:
        cfg.model.use_transformer_engine_op_fuser = False
    if not isinstance(cfg.mixed_precision, str):
        cfg.mixed_precision.grad_reduce_in_fp32 = False
    graph = getattr(cfg.model, "cuda_graph_impl", None)
    scopes = getattr(cfg.model, "cuda_graph_scope", None) or []
    names = {one if isinstance(one, str) else getattr(one, "name", "") for one in scopes}
    if graph is not None or names:
        cfg.rng.te_rng_tracker = cfg.model.use_te_rng_tracker = graph != "none"

def llama3_8b_pretrain_64gpu_h100_fp8cs_config() -> ConfigContainer:
    cfg = llama3_8b_pretrain_config()
    cfg.mixed_precision = get_mixed_precision_config("bf16_with_fp8_current_scaling_mixed")
    cfg.train.global_batch_size = 128
    _common(cfg)
    return cfg
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "recipes/common.py": COMMON,
        "recipes/llama/llama3.py": ALIASES,
        "recipes/llama/h100/llama3.py": RECIPES,
        "perf_recipes/llama/h100/llama3.py": PERFORMANCE,
    }
    for name, text in files.items():
        path = tmp_path / "src" / "megatron" / "bridge" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def started(checkout: Path, recipe: str, *words: str, **flags: str) -> ReadPlan:
    (checkout / "train.sh").write_text(f"python scripts/training/run_recipe.py --recipe {recipe} {' '.join(words)}\n")
    place = str(checkout / "train.sh")
    return read_given(place, flags_of_launch(place, None), flags)


def alone(checkout: Path, *assignments: str, **flags: str) -> ReadPlan:
    place = str(checkout / "src/megatron/bridge/recipes/llama/h100/llama3.py")
    return read_given(place, flags_of_launch(place, None, assignments), flags)


def test_a_recipe_says_layout_length_batch_and_gpus(checkout: Path) -> None:
    """The name has the GPUs; the vocabulary is the NullTokenizer's, padded to 128 x tp 2 = 256."""
    read = started(checkout, "llama3_8b_pretrain_8gpu_h100_bf16_config")
    plan = resolve(read.plan)
    assert (plan.layout.tp, plan.layout.dp, plan.batch.mbs, plan.batch.gbs, plan.batch.seq) == (2, 4, 1, 32, 8192)
    assert (plan.hardware.gpu, plan.hardware.gpus, plan.layout.zero) == ("h100-80gb", 8, 1)
    assert (plan.model.layers, plan.model.vocab) == (32, 32000)
    assert plan.precision.gradients == "fp32"
    assert not any(note.code == "recipe-not-read" for note in read.warnings)


def test_what_follows_the_recipe_stands_over_it(checkout: Path) -> None:
    name = "llama3_8b_pretrain_8gpu_h100_bf16_config"
    words = ("model.tensor_model_parallel_size=4", "-mb 2", "optimizer.use_precision_aware_optimizer=false")
    plan = resolve(started(checkout, name, *words, gpus="16").plan)
    assert (plan.layout.tp, plan.batch.mbs, plan.hardware.gpus) == (4, 2, 16)


def test_what_a_start_writes_is_of_the_recipe_with_what_stands_over_it(checkout: Path) -> None:
    """The data's length stands over the model's, the tokenizer's vocabulary over the model's, and what
    ``CommOverlapConfig`` sets up over ``ddp`` (``run_recipe.py`` lays overrides over a recipe before)."""
    name = "llama3_8b_pretrain_8gpu_h100_bf16_config"
    assert resolve(started(checkout, name, "dataset.seq_length=2048").plan).batch.seq == 2048
    assert resolve(started(checkout, name, "tokenizer.vocab_size=64000").plan).model.vocab == 64000
    experts = "qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config"
    for words, bucket in (("comm_overlap.bucket_size=4096", 4096), ("ddp.bucket_size=4096", 128 * 1024 * 1024)):
        assert resolve(started(checkout, experts, words).plan).megatron.bucket_size == bucket


def test_a_checkout_is_found_from_a_folder_in_it(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = checkout / "scripts" / "training"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    package = checkout_of([Path()])
    assert package is not None
    assert file_of("llama3_8b_pretrain_config", package) is not None
    assert checkout_of([checkout / "examples/models/nemotron/nemotron_3/super"]) == package


def test_a_file_of_recipes_is_one_that_the_command_names(checkout: Path) -> None:
    by_file = alone(checkout, "RECIPE=llama3_8b_pretrain_8gpu_h100_bf16_config").plan
    assert by_file == started(checkout, "llama3_8b_pretrain_8gpu_h100_bf16_config").plan
    with pytest.raises(
        PlanError, match=r"RECIPE: is missing: the file has 8 functions; say which as llama3\.py:NAME, or with --set"
    ):
        alone(checkout)
    with pytest.raises(PlanError, match="did you mean llama3_8b_pretrain_8gpu_h100_bf16_config"):
        alone(checkout, "RECIPE=llama3_8b_pretrain_8gpu_h100_bf1_config")


def test_experts_layouts_of_stages_and_functions_of_the_library(checkout: Path) -> None:
    """20 and 28 layers; a dispatcher on a GPU that has it; buckets of 128 MiB of ``CommOverlapConfig.setup``; SwiGLU,
    dropout and rotary positions without the fusions that Qwen's bridge does not ask for."""
    plan = resolve(started(checkout, "qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config").plan)
    assert (plan.layout.pp, plan.layout.ep, plan.experts.dispatcher) == (2, 8, "flex")
    assert plan.pipeline.layout == "E" + 20 * "t" + "|" + 28 * "t" + "L"
    assert plan.megatron.bucket_size == 128 * 1024 * 1024
    fusions = (plan.megatron.bias_swiglu_fusion, plan.megatron.bias_dropout_fusion, plan.megatron.rope_fusion)
    assert fusions == (False, False, False)


def test_other_stages_have_the_recipes_own_layout_of_them(checkout: Path) -> None:
    """``sync_model_pipeline_layout``: 13 layers on each of four stages, where (2, 2) would be as many chunks."""
    name = "qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config"
    four = "E" + 13 * "t" + "|" + 13 * "t" + "|" + 13 * "t" + "|" + 9 * "t" + "L"
    plan = resolve(started(checkout, name, "-pp 4", gpus="32").plan)
    assert (plan.layout.pp, plan.layout.vpp, plan.pipeline.layout) == (4, 1, four)
    plan = resolve(started(checkout, name, "model.virtual_pipeline_model_parallel_size=2").plan)
    assert (plan.layout.pp, plan.layout.vpp, plan.pipeline.layout) == (
        2,
        2,
        "|".join(("E" + 12 * "t", 12 * "t", 12 * "t", 12 * "t" + "L")),
    )
    with pytest.raises(
        PlanError, match=r"llama3.py:\d+: model.pipeline_model_parallel_size = 8: has no layout for pp 8"
    ):
        started(checkout, name, "-pp 8", gpus="64")
    own = '"model.pipeline_model_parallel_layout=Et*24|t*24L"'
    assert started(checkout, name, own).plan.pipeline.layout == "Et*24|t*24L"


def test_benchmarks_are_followed_through_the_recipes_that_they_change(checkout: Path) -> None:
    plan = resolve(started(checkout, "llama3_8b_pretrain_64gpu_h100_fp8cs_config").plan)
    assert (plan.precision.fp8, plan.precision.gradients) == ("tensorwise", "bf16")
    assert (plan.hardware.gpus, plan.batch.gbs, plan.layout.tp) == (64, 128, 2)
    fusions = (plan.megatron.bias_swiglu_fusion, plan.megatron.bias_dropout_fusion, plan.megatron.rope_fusion)
    assert fusions == (True, True, True)


def test_adapters_of_a_recipe(checkout: Path) -> None:
    plan = resolve(started(checkout, "llama3_8b_peft_1gpu_h100_bf16_config").plan)
    assert (plan.lora.rank, plan.lora.targets, plan.lora.dora) == (8, ("linear_qkv",), False)
    for option in ("--mode dora", "--peft_scheme dora"):
        assert started(checkout, "llama3_8b_peft_1gpu_h100_bf16_config", option).plan.lora.dora


def test_a_provider_begins_as_its_class_does(checkout: Path) -> None:
    plan = resolve(started(checkout, "vanilla_pretrain_1gpu_h100_bf16_config").plan)
    assert (plan.model.layers, plan.model.mlp_bias, plan.model.tied_embeddings) == (4, True, True)
    assert plan.megatron.cross_entropy_fusion == "native"


def test_packed_sets_are_packed_where_they_are_modelled(checkout: Path) -> None:
    """Rotary positions are unfused there, as Qwen's bridge leaves them."""
    recipe = "qwen3_8b_sft_4gpu_h100_bf16_config"
    read = started(checkout, recipe)
    assert read.plan.megatron.packed is True
    assert (read.plan.batch.seq, read.plan.megatron.rope_fusion) == (2048, False)
    whole = started(checkout, recipe, "model.context_parallel_size=2")
    assert whole.plan.megatron.packed is False
    (note,) = [one for one in whole.warnings if one.code == "packing-not-modelled"]
    assert "taken as whole ones: has no recipe for packed sequences with context parallelism" in note.message
    assert started(checkout, recipe, "dataset.enable_offline_packing=false").plan.megatron.packed is False
    with pytest.raises(PlanError, match=r"micro_batch_size = 2: must be 1 with packed sequences \(.*llama3.py:\d+\)"):
        started(checkout, recipe, "train.micro_batch_size=2")


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        (
            "llama3_8b_pretrain_4gpu_h100_bf16_config",
            r"llama3.py:\d\d: model.tensor_model_parallel_size: is int\(os.environ\['TP'\]\), which only running code "
            "knows: say it behind the file, model.tensor_model_parallel_size=VALUE",
        ),
        ("qwen3_vl_8b_sft_1gpu_h100_bf16_config", r"has more than a language model \(vl\), which is not modelled"),
        ("ministral3_3b_sft_1gpu_h100_bf16_config", r"has more than a language model \(vision\), which is not"),
    ],
)
def test_one_line_for_what_only_running_code_knows(checkout: Path, recipe: str, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        started(checkout, recipe)
    if "TP" in problem:
        assert resolve(started(checkout, recipe, "model.tensor_model_parallel_size=4").plan).layout.tp == 4


def test_without_a_checkout_a_recipe_is_asked_for_as_before(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="which only its Python has"):
        started(tmp_path, "llama3_8b_pretrain_8gpu_h100_bf16_config", gpus="8")


def test_which_file_holds_a_recipe(checkout: Path) -> None:
    package = checkout_of([checkout / "scripts" / "training"])
    assert package is not None
    found = file_of("llama3_8b_pretrain_config", package)
    assert found is not None
    assert found.parts[-2:] == ("llama", "llama3.py")
    assert file_of("nobodys_config", package) is None
    assert file_of("a b", package) is None
    assert is_recipe(RECIPES)
    assert is_recipe(ALIASES)
    assert not is_recipe(f"{ALIASES}\nif __name__ == '__main__':\n    pretrain(llama3_8b_pretrain_config())\n")


def test_a_file_that_gives_recipes_other_names(checkout: Path) -> None:
    """Names without hardware, as ``recipes/llama/llama3.py`` has them."""
    place = str(checkout / "src/megatron/bridge/recipes/llama/llama3.py")

    def named(*assignments: str, **flags: str) -> ReadPlan:
        return read_given(place, flags_of_launch(place, None, assignments), flags)

    read = named("RECIPE=llama3_8b_pretrain_config", gpus="8", gpu="h100-80gb")
    assert read.plan == started(checkout, "llama3_8b_pretrain_8gpu_h100_bf16_config").plan
    with pytest.raises(PlanError, match=r"RECIPE = llama3_8b_pretrain_confg: .*did you mean llama3_8b_pretrain_config"):
        named("RECIPE=llama3_8b_pretrain_confg", gpus="8")
    with pytest.raises(PlanError, match=r"llama/llama3.py: hardware.gpus: is needed"):
        named("RECIPE=llama3_8b_pretrain_config")
    common = str(checkout / "src/megatron/bridge/recipes/common.py")
    with pytest.raises(PlanError, match="RECIPE: has no function that returns a ConfigContainer"):
        read_given(common, flags_of_launch(common, None), {})


@pytest.mark.parametrize(
    ("words", "guess"),
    [
        ("run_recipe.py --recipe llama3_8b_pretrain_8gpu_h100_bf16_confg", "llama3_8b_pretrain_8gpu_h100_bf16_config"),
        ("run_recipe.py --model llama3_9b --mode pretrain", "llama3_8b_pretrain_config"),
        ("setup_experiment.py -mr llama3_9b -ng 48 -g h100 -c fp8_cs", "llama3_8b_pretrain_64gpu_h100_fp8cs_config"),
    ],
)
def test_a_name_that_the_checkout_lacks(checkout: Path, words: str, guess: str) -> None:
    """``load_recipe`` stops there; before, the template of recipes was estimated in its place."""
    (checkout / "train.sh").write_text(f"python scripts/training/{words}\n")
    place = str(checkout / "train.sh")
    with pytest.raises(PlanError, match=f"is no recipe of the checkout that holds .*; did you mean {guess}"):
        read_given(place, flags_of_launch(place, None), {"gpus": "8"})
    taken = read_given(
        place, flags_of_launch(place, None), {"gpus": "8", "model": "llama-3-8b", "seq": "4096"} | LAYOUT
    )
    assert taken.plan.model.layers == 32


LAYOUT = {"tp": "2", "mbs": "1", "gbs": "128"}


def test_a_models_stem_and_a_mode_name_a_recipe(checkout: Path) -> None:
    (checkout / "train.sh").write_text("python scripts/training/run_recipe.py --model llama3_8b --mode pretrain\n")
    place = str(checkout / "train.sh")
    read = read_given(place, flags_of_launch(place, None), {"gpus": "8", "gpu": "h100-80gb"})
    assert read.plan == started(checkout, "llama3_8b_pretrain_8gpu_h100_bf16_config").plan


def test_the_models_length_follows_the_data(checkout: Path) -> None:
    """``sync_model_dataset_sequence_length``; a length of the model alone is undone there, and refused here."""
    name = "llama3_8b_pretrain_8gpu_h100_bf16_config"
    for words in ("--seq_length 4096", "dataset.seq_length=4096"):
        assert started(checkout, name, words).plan.batch.seq == 4096
    with pytest.raises(PlanError, match=r"dataset.seq_length = 8192: must be model.seq_length, 4096"):
        started(checkout, name, "model.seq_length=4096")


def test_overrides_of_a_recipe_name_fields(checkout: Path) -> None:
    problem = r"train.sh:1: model.tensor_model_parallell_size: is no field .*; did you mean tensor_model_parallel_size"
    with pytest.raises(PlanError, match=problem):
        started(checkout, "llama3_8b_pretrain_8gpu_h100_bf16_config", "model.tensor_model_parallell_size=4")
