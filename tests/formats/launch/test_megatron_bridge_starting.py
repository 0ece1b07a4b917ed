"""What the launchers of Megatron-Bridge write into a recipe, and recipes that are named in the place of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.commands.launched import flags_of_launch, placed, read_given
from memplan.formats.megatron_bridge.recipes import file_of
from memplan.plan.errors import PlanError
from memplan.plan.read import ReadPlan
from memplan.plan.resolve import resolve

from .test_megatron_bridge_recipes import checkout, started

__all__ = ["checkout"]

EXPERTS = "qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config"
LOW = "llama3_8b_pretrain_64gpu_h100_fp8cs_config"
BENCHMARKS = """
from megatron.bridge.recipes.llama.h100.llama3 import llama3_8b_pretrain_8gpu_h100_bf16_config
from megatron.bridge.training.config import ConfigContainer, GPTSFTDatasetConfig

def llama3_8b_sft_4gpu_b200_bf16_config() -> ConfigContainer:
    cfg = llama3_8b_pretrain_8gpu_h100_bf16_config()
    cfg.dataset = GPTSFTDatasetConfig(seq_length=2048, enable_offline_packing=True)
    cfg.optimizer.use_precision_aware_optimizer = False
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_layout = "Et*10|t*22L"
    return cfg

def olmoe_7b_pretrain_8gpu_b200_bf16_config() -> ConfigContainer:
    cfg = llama3_8b_pretrain_8gpu_h100_bf16_config()
    cfg.model = OlMoEModelProvider(tensor_model_parallel_size=1, expert_model_parallel_size=8)
    cfg.tokenizer.vocab_size = cfg.model.vocab_size
    return cfg

def qwen35_text_9b_pretrain_8gpu_b200_bf16_config() -> ConfigContainer:
    cfg = llama3_8b_pretrain_8gpu_h100_bf16_config()
    text = AutoConfig.from_pretrained("Qwen/Qwen3.5-9B-Base").text_config
    text.architectures = ["Qwen3_5ForCausalLM"]
    cfg.model = AutoBridge.from_hf_config(text).to_megatron_provider(load_weights=False)
    cfg.tokenizer.vocab_size = 248320
    return cfg
"""


@pytest.fixture
def benchmarks(checkout: Path) -> Path:
    path = checkout / "src/megatron/bridge/perf_recipes/llama/b200/llama3.py"
    path.parent.mkdir(parents=True)
    path.write_text(BENCHMARKS)
    return checkout


def named(place: str, *assignments: str, **flags: str) -> ReadPlan:
    return read_given(place, flags_of_launch(place, None, assignments), flags)


def test_a_recipe_is_named_in_the_place_of_a_file(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    own, file = "llama3_8b_pretrain_8gpu_h100_bf16_config", "src/megatron/bridge/recipes/llama/h100/llama3.py"
    expected = named(file, f"RECIPE={own}").plan
    for place in (own, f"megatron.bridge.recipes.llama.{own}", f"{file}:{own}", f"{file}::{own}"):
        assert named(place).plan == expected
    assert placed([file, own]) == f"{file}:{own}"
    assert placed(["scripts/training/run_recipe.py", own]) == f"scripts/training/run_recipe.py:{own}"
    assert named(f"scripts/training/run_recipe.py:{own}").plan == expected
    with pytest.raises(PlanError, match=f"is no recipe of the checkout that holds .*did you mean {own}"):
        named("llama3_8b_pretrain_9gpu_h100_bf16_config")


def test_benchmarks_have_as_many_sequences_a_rank_on_other_gpus(checkout: Path) -> None:
    """128 sequences on dp 32 = 64 GPUs / tp 2: 4 a rank. Recipes of the library keep theirs."""
    assert started(checkout, LOW).plan.batch.gbs == 128
    read = started(checkout, LOW, gpus="128")
    assert read.plan.batch.gbs == 256
    (note,) = [one for one in read.warnings if one.code == "batch-scaled"]
    assert "256 sequences a step: the recipe has 128 for dp 32, and its launcher scales them to dp 64" in note.message
    assert started(checkout, LOW, dp="64").plan.batch.gbs == 256
    assert started(checkout, LOW, tp="4").plan.batch.gbs == 64
    assert started(checkout, LOW, "-tp 4", "-gb 32").plan.batch.gbs == 32
    assert started(checkout, LOW, gpus="128", gbs="512").plan.batch.gbs == 512
    assert started(checkout, "llama3_8b_pretrain_8gpu_h100_bf16_config", gpus="16").plan.batch.gbs == 32


def test_benchmarks_in_bf16_have_the_precision_aware_adam_and_whole_sequences(benchmarks: Path) -> None:
    """``_apply_benchmark_runtime_defaults`` and ``_apply_benchmark_dataset_defaults`` stand over the recipe."""
    name = "llama3_8b_sft_4gpu_b200_bf16_config"
    plan = resolve(started(benchmarks, name).plan)
    assert (plan.optimizer.precision_aware, plan.megatron.packed, plan.batch.seq) == (True, False, 2048)
    said = started(benchmarks, name, "optimizer.use_precision_aware_optimizer=false")
    assert not resolve(said.plan).optimizer.precision_aware
    assert not resolve(started(benchmarks, LOW).plan).optimizer.precision_aware


def test_sizes_of_flags_are_overrides_of_a_recipe(checkout: Path) -> None:
    """A layout of the recipe's own follows them, where a plan of other stages had kept it."""
    assert started(checkout, EXPERTS, pp="4", gpus="32").plan == started(checkout, EXPERTS, "-pp 4", gpus="32").plan
    two = "model.virtual_pipeline_model_parallel_size=2"
    assert started(checkout, EXPERTS, vpp="2").plan == started(checkout, EXPERTS, two).plan
    with pytest.raises(PlanError, match="has no layout for pp 8"):
        started(checkout, EXPERTS, pp="8", gpus="64")


def test_a_layout_that_is_written_out_has_to_fit(benchmarks: Path) -> None:
    name = "llama3_8b_sft_4gpu_b200_bf16_config"
    problem = (
        r"llama3.py:\d+: model.pipeline_model_parallel_layout = Et\*10\|t\*22L: is the recipe's own, of 2 chunks, "
        "which pp 4 does not have: say model.pipeline_model_parallel_layout=null, or another"
    )
    with pytest.raises(PlanError, match=problem):
        started(benchmarks, name, pp="4", gpus="8")
    plan = started(benchmarks, name, "model.pipeline_model_parallel_layout=null", pp="4", gpus="8").plan
    assert (plan.layout.pp, plan.pipeline.layout) == (4, None)


def test_deepep_is_all_to_all_on_grace_blackwell(checkout: Path) -> None:
    """``apply_flex_dispatcher_backend`` by the GPU; one that the recipe itself sets stops there."""
    for gpu, dispatcher in (("h100", "flex"), ("b200", "flex"), ("gb200", "alltoall"), ("gb300", "alltoall")):
        assert started(checkout, EXPERTS, gpu=gpu).plan.experts.dispatcher == dispatcher
    words = ("model.moe_token_dispatcher_type=flex", "model.moe_flex_dispatcher_backend=deepep")
    with pytest.raises(PlanError, match="moe_flex_dispatcher_backend = deepep: must be hybridep on gb200"):
        started(checkout, EXPERTS, *words, gpu="gb200")


def test_fine_tuning_with_context_parallelism_sums_the_loss_over_tokens(checkout: Path) -> None:
    recipe = "qwen3_8b_sft_4gpu_h100_bf16_config"
    assert not started(checkout, recipe).plan.megatron.per_token_loss
    assert started(checkout, recipe, "model.context_parallel_size=2").plan.megatron.per_token_loss
    assert started(checkout, recipe, cp="2").plan.megatron.per_token_loss


def test_models_by_a_class_and_by_the_text_of_a_repository(benchmarks: Path) -> None:
    """OLMoE's class has its sizes; Qwen 3.5's text one ``mtp_num_hidden_layers``."""
    plan = resolve(started(benchmarks, "olmoe_7b_pretrain_8gpu_b200_bf16_config").plan)
    assert (plan.model.experts, plan.model.qk_norm_over, plan.model.vocab, plan.layout.ep) == (64, "heads", 50304, 8)
    plan = resolve(started(benchmarks, "qwen35_text_9b_pretrain_8gpu_b200_bf16_config").plan)
    assert (plan.model.linear_interval, plan.model.layers, plan.model.mtp_layers) == (4, 32, 1)


def test_the_launchers_of_slurm_say_how_many_gpus_there_are(checkout: Path) -> None:
    """``scripts/training/train.sh`` starts ``setup_experiment.py``, which has options of its own; the one of
    ``scripts/performance`` takes a benchmark for other GPUs where none is for these, and scales its batch."""
    scripts = checkout / "scripts" / "training"
    scripts.mkdir(parents=True)
    (scripts / "train.sh").write_text('exec uv run python "${SCRIPT_DIR}/setup_experiment.py" "$@"\n')
    own, where = "llama3_8b_pretrain_8gpu_h100_bf16_config", "--nodes 2 --gpus-per-node 8 --account A --partition P"
    for launcher, more in (("./scripts/training/train.sh", "--mode pretrain"), ("python setup_experiment.py", "")):
        (checkout / "job.sh").write_text(f"{launcher} {where} --recipe {own} {more} model.context_parallel_size=2\n")
        plan = resolve(named(str(checkout / "job.sh")).plan)
        assert (plan.hardware.gpus, plan.layout.tp, plan.layout.cp, plan.layout.dp) == (16, 2, 2, 4)
    words = "-m llama -mr llama3_8b -ng 48 -g h100 -c fp8_cs -gn 8"
    (checkout / "job.sh").write_text(f"python scripts/performance/setup_experiment.py {words}\n")
    read = named(str(checkout / "job.sh"))
    assert (read.plan.hardware.gpus, read.plan.batch.gbs) == (48, 128 // 32 * 24)


def test_a_benchmark_that_borrows_a_recipe_does_not_hold_it(checkout: Path) -> None:
    path = checkout / "src/megatron/bridge/perf_recipes/llama/common.py"
    path.write_text("from megatron.bridge.recipes.llama.llama3 import (\n    one as llama3_8b_pretrain_config,\n)\n")
    found = file_of("llama3_8b_pretrain_config", checkout / "src/megatron/bridge")
    assert found is not None
    assert found.parts[-3:] == ("recipes", "llama", "llama3.py")


def test_where_data_lie_need_not_be_known(checkout: Path) -> None:
    """``dataset.path="${ENERGON_PATH}"`` of ``examples/models/qwen/qwen3_vl/peft_energon.sh``."""
    recipe = "llama3_8b_pretrain_8gpu_h100_bf16_config"
    for path in ("dataset.path=$DATA", "dataset.dataset_root=$DATA/x", "dataset.source.dataset_name=$NAME"):
        assert started(checkout, recipe, path).plan == started(checkout, recipe).plan
    with pytest.raises(PlanError, match=r"dataset.seq_length = .*: is needed, and \$LENGTH is not set"):
        started(checkout, recipe, "dataset.seq_length=$LENGTH")
