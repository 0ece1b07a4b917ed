"""``--from megatron-bridge``: a run's configuration, beside the same plan as Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.arguments import plan_of_arguments
from memplan.commands.launched import flags_of_launch, read_given
from memplan.formats.megatron_bridge import table
from memplan.formats.megatron_bridge.overrides import is_override
from memplan.formats.megatron_bridge.reader import ENGINE
from memplan.formats.settings import arguments_of
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import ReadPlan, read_plan
from memplan.plan.resolve import resolve


def named(path: str) -> dict[str, Any]:
    """A function or dtype, as ``safe_yaml_representers`` writes it."""
    return {"_target_": path, "_call_": False}


MODEL = {
    "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
    "hf_model_id": "meta-llama/Meta-Llama-3-8B",
    "activation_func": named("torch.nn.functional.silu"),
    "add_bias_linear": False,
    "apply_rope_fusion": True,
    "attention_backend": {
        "_target_": "megatron.core.transformer.enums.AttnBackend",
        "_call_": True,
        "_args_": [1],
        "_name_": "flash",
    },
    "attention_dropout": 0.0,
    "bf16": True,
    "bias_activation_fusion": True,
    "bias_dropout_fusion": True,
    "context_parallel_size": 2,
    "cross_entropy_fusion_impl": "te",
    "cross_entropy_loss_fusion": True,
    "ffn_hidden_size": 14336,
    "fp8": None,
    "fp8_recipe": "delayed",
    "gated_linear_unit": True,
    "gradient_accumulation_fusion": True,
    "hidden_dropout": 0.0,
    "hidden_size": 4096,
    "init_method": {"_target_": "torch.nn.init.normal_", "_partial_": True, "_args_": [], "std": 0.02},
    "kv_channels": 128,
    "masked_softmax_fusion": False,
    "make_vocab_size_divisible_by": 128,
    "normalization": "RMSNorm",
    "num_attention_heads": 32,
    "num_layers": 8,
    "num_query_groups": 8,
    "params_dtype": named("torch.bfloat16"),
    "pipeline_model_parallel_size": 2,
    "position_embedding_type": "rope",
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn", "mlp"],
    "sequence_parallel": True,
    "seq_length": 4096,
    "share_embeddings_and_output_weights": False,
    "should_pad_vocab": True,
    "tensor_model_parallel_size": 2,
    "transformer_layer_spec": named("megatron.bridge.models.gpt_provider.default_layer_spec"),
    "virtual_pipeline_model_parallel_size": 2,
    "vocab_size": 128256,
}
CANONICAL = "megatron.bridge.peft.canonical_lora.CanonicalLoRA"

RUN = {
    "_target_": "megatron.bridge.training.config.ConfigContainer",
    "model": MODEL,
    "ddp": {
        "_target_": "megatron.core.distributed.distributed_data_parallel_config.DistributedDataParallelConfig",
        "grad_reduce_in_fp32": True,
        "check_for_nan_in_grad": False,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "use_distributed_optimizer": True,
    },
    "optimizer": {
        "_target_": "megatron.bridge.training.config.OptimizerConfig",
        "optimizer": "adam",
        "exp_avg_dtype": named("torch.bfloat16"),
        "exp_avg_sq_dtype": named("torch.bfloat16"),
        "use_distributed_optimizer": True,
        "use_precision_aware_optimizer": True,
        "clip_grad": 1.0,
        "lr": 3e-4,
    },
    "train": {"_target_": "…TrainingConfig", "micro_batch_size": 1, "global_batch_size": 16, "train_iters": 10},
    "dataset": {"_target_": "…GPTDatasetConfig", "sequence_length": 4096},
    "mixed_precision": "bf16_mixed",
    "checkpoint": {"save_interval": 500},
}
ARGUMENTS: dict[str, object] = {
    "--num-layers": 8,
    "--hidden-size": 4096,
    "--ffn-hidden-size": 14336,
    "--num-attention-heads": 32,
    "--group-query-attention": True,
    "--num-query-groups": 8,
    "--kv-channels": 128,
    "--max-position-embeddings": 4096,
    "--position-embedding-type": "rope",
    "--normalization": "RMSNorm",
    "--swiglu": True,
    "--disable-bias-linear": True,
    "--untie-embeddings-and-output-weights": True,
    "--attention-dropout": 0,
    "--hidden-dropout": 0,
    "--attention-backend": "flash",
    "--no-masked-softmax-fusion": True,
    "--cross-entropy-loss-fusion": True,
    "--cross-entropy-fusion-impl": "te",
    "--tensor-model-parallel-size": 2,
    "--sequence-parallel": True,
    "--pipeline-model-parallel-size": 2,
    "--num-virtual-stages-per-pipeline-rank": 2,
    "--context-parallel-size": 2,
    "--recompute-granularity": "selective",
    "--recompute-modules": "core_attn mlp",
    "--bf16": True,
    "--accumulate-allreduce-grads-in-fp32": True,
    "--use-distributed-optimizer": True,
    "--use-precision-aware-optimizer": True,
    "--fp8-recipe": "tensorwise",
    "--exp-avg-dtype": "bf16",
    "--exp-avg-sq-dtype": "bf16",
    "--overlap-grad-reduce": True,
    "--overlap-param-gather": True,
    "--no-check-for-nan-in-loss-and-grad": True,
    "--micro-batch-size": 1,
    "--global-batch-size": 16,
    "--seq-length": 4096,
    "--no-create-attention-mask-in-dataloader": True,
}


def read(folder: Path, content: object, **flags: str) -> ReadPlan:
    """The plan in ``content``, recognised without ``--from``."""
    (folder / "run_config.yaml").write_text(yaml.safe_dump(content))
    place = str(folder / "run_config.yaml")
    return read_given(place, flags_of_launch(place, None), {"gpus": "16", **flags})


def changed(**fields: object) -> dict[str, Any]:
    """The run with other fields of its model."""
    return {**RUN, "model": {**MODEL, **fields}}


def without_name(plan: Plan) -> Plan:
    return plan.model_copy(update={"model": plan.model.model_copy(update={"name": ""})})


HYBRID = {
    "_target_": "megatron.bridge.models.hybrid.hybrid_provider.HybridModelProvider",
    "activation_func": named("megatron.core.activations.squared_relu"),
    "gated_linear_unit": False,
    "hybrid_layer_pattern": "M-M*|M-M-",
    "hybrid_attention_ratio": 0.0,
    "is_hybrid_model": True,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "mamba_state_dim": 128,
    "mamba_num_groups": 8,
    "mamba_chunk_size": 128,
    "hybrid_stack_spec": named("megatron.bridge.models.hybrid.hybrid_provider.get_default_hybrid_stack_spec"),
    "use_mamba_mem_eff_path": True,
    "position_embedding_type": "none",
    "virtual_pipeline_model_parallel_size": None,
}
"""What a hybrid says in place of other fields."""


def test_context_parallelism_in_two_levels(tmp_path: Path) -> None:
    levels = {"context_parallel_size": 4, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2]}
    found = read(tmp_path, changed(**levels)).plan.megatron
    assert (found.cp_communication, found.cp_inner) == ("a2a+p2p", 2)


def test_a_hybrid_is_the_plan_of_its_arguments(tmp_path: Path) -> None:
    gone = ("--swiglu", "--num-layers", "--num-virtual-stages-per-pipeline-rank")
    same = {name: value for name, value in ARGUMENTS.items() if name not in gone}
    further = {
        "--squared-relu": True, "--hybrid-layer-pattern": "M-M*|M-M-", "--mamba-num-heads": 128,
        "--spec": ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
        "--recompute-modules": ["core_attn", "mlp"], "--position-embedding-type": "none",
    }  # fmt: skip
    expected = plan_of_arguments(
        {**same, **further}, gpus=16, family="hybrid", vocabulary=128256, flags={"gpus": "16", "te-version": ENGINE}
    )
    assert without_name(read(tmp_path, changed(**HYBRID)).plan) == without_name(expected.plan)
    others = {"use_mamba_mem_eff_path": False, "mamba_training_ssm_states_dtype": named("torch.float32")}
    given = read(tmp_path, changed(**{**HYBRID, **others})).plan.megatron
    assert (given.mamba_apart, given.mamba_states) == (True, "fp32")
    assert read(tmp_path, changed(**{**HYBRID, "mamba_chunk_size": 256})).plan.megatron.mamba_chunk == 256


def test_transformer_engine_is_the_releases(tmp_path: Path) -> None:
    """But for attention in 8 bits, which older ones do otherwise; a flag goes over it."""
    assert read(tmp_path, RUN).plan.megatron.transformer_engine == ENGINE
    eight = {**RUN, "mixed_precision": {**IN_8_BITS, "fp8_dot_product_attention": True}}
    assert read(tmp_path, eight, gpu="b200").plan.megatron.transformer_engine == "2.18"
    assert read(tmp_path, RUN, **{"te-version": "2.19"}).plan.megatron.transformer_engine == "2.19"


def test_a_run_is_the_plan_of_the_same_arguments(tmp_path: Path) -> None:
    found = read(tmp_path, RUN)
    arguments = {**ARGUMENTS, "--recompute-modules": ["core_attn", "mlp"]}
    expected = plan_of_arguments(arguments, gpus=16, vocabulary=128256, flags={"gpus": "16", "te-version": ENGINE})
    assert without_name(found.plan) == without_name(expected.plan)
    assert found.plan.model.name == "meta-llama/Meta-Llama-3-8B"
    assert not found.warnings
    assert found.plan.optimizer.fp8_recipe == "tensorwise"  # without a product in 8 bits, too


def test_every_name_is_an_argument() -> None:
    known = arguments_of("megatron")
    names = [*table.RENAMED.values(), *(name for several in table.TURNED_OFF.values() for name in several)]
    names += [name for several in table.ACTIVATIONS.values() for name in several]
    assert [name for name in names if name not in known] == []
    assert not {*table.RENAMED, *table.TURNED_OFF} & (table.IGNORED | table.BY_ITSELF)


def test_a_vocabulary_that_is_not_padded_is_taken_as_it_is(tmp_path: Path) -> None:
    plan = read(tmp_path, changed(should_pad_vocab=False, vocab_size=128258)).plan
    assert (plan.model.vocab, plan.megatron.vocab_multiple) == (128258, 1)


def test_gradients_that_are_reduced_in_bf16(tmp_path: Path) -> None:
    reduced = {**RUN, "ddp": {"grad_reduce_in_fp32": False}, "mixed_precision": None}
    assert read(tmp_path, reduced).plan.precision.gradients == "bf16"
    assert read(tmp_path, RUN).plan.precision.gradients == "fp32"


def test_what_has_no_argument_is_told(tmp_path: Path) -> None:
    (told,) = read(tmp_path, changed(novel_buffers=True)).warnings
    assert told.code == "argument-unknown"
    assert "model.novel_buffers" in told.message


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"_target_": "ConfigContainer"}, "model: is missing: this is no run configuration of Megatron-Bridge"),
        (
            changed(_target_="megatron.bridge.models.qwen_vl.qwen25_vl_provider.Qwen25VLModelProvider"),
            "model._target_ = Qwen25VLModelProvider: is not modelled yet; GPT's providers",
        ),
        ({**RUN, "mixed_precision": "bf16_blend"}, "mixed_precision = bf16_blend: must be one of bf16_mixed, "),
        (
            {**RUN, "peft": {"_target_": CANONICAL, "target_modules": ["linear_qkv"]}},
            "peft.target_modules = [linear_qkv]: must not name linear_qkv: CanonicalLoRA has linear_q, linear_k, ",
        ),
        (
            {**RUN, "peft": {"target_modules": ["linear_q"]}},
            "peft.target_modules = [linear_q]: must not name linear_q: only CanonicalLoRA has it",
        ),
        ({**RUN, "peft": {"a2a_experimental": True}}, "peft.a2a_experimental = true: must be false: another is not"),
        ({**RUN, "peft": {"dimm": 8}}, "peft.dimm: is no field of LoRA"),
        ({**RUN, "peft": {"target_modules": ["*.layers.0.*.linear_qkv"]}}, "peft.target_modules"),
        (changed(activation_func=named("torch.nn.functional.relu")), "model.activation_func = relu, gated: is not"),
        (changed(activation_func=None), "run_config.yaml:17: model.activation_func = gelu, gated: is not"),
        (changed(num_layers=None), "--num-layers: is missing"),
        (changed(hidden_size="wide"), "--hidden-size = wide: must be a whole number"),
    ],
)
def test_wrong_runs_are_one_line(tmp_path: Path, content: object, problem: str) -> None:
    with pytest.raises(PlanError) as found:
        read(tmp_path, content)
    assert problem in str(found.value)
    assert "\n" not in str(found.value)
    assert "run_config.yaml" in str(found.value)


def test_the_number_of_gpus_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "run_config.yaml").write_text(yaml.safe_dump(RUN))
    place = str(tmp_path / "run_config.yaml")
    with pytest.raises(PlanError, match="how many GPUs"):
        read_given(place, flags_of_launch(place, "megatron-bridge"), {})


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("bf16_with_fp8_delayed_scaling_mixed", {"fp8": "delayed", "amax_history": 1024, "fp8_parameters": True}),
        (
            "bf16-with-fp8-current-scaling-mixed",
            {"fp8": "tensorwise", "fp8_format": "hybrid", "first_16bit_layers": 1, "last_16bit_layers": 1},
        ),
        ("bf16_with_fp8_subchannel_scaling_mixed", {"fp8": "blockwise", "fp8_parameters": False}),
        ("bf16_with_mxfp8_mixed", {"fp8": "mxfp8", "fp8_format": "e4m3", "fp8_parameters": True}),
        ("bf16_with_nvfp4_mixed", {"fp4": "nvfp4", "fp8": None, "fp8_parameters": True}),
        ("nemotron_3_super_bf16_with_nvfp4_mixed", {"fp4": "nvfp4", "first_16bit_layers": 0, "last_16bit_layers": 14}),
        (
            {"_target_": "…MixedPrecisionConfig", "bf16": True, "fp8": "hybrid", "num_layers_at_start_in_bf16": 1},
            {"fp8": "tensorwise", "first_16bit_layers": 0},
        ),
    ],
)
def test_precisions_in_8_and_4_bits(name: str | dict[str, object], fields: dict[str, object], tmp_path: Path) -> None:
    """The last as ``_perf_precision`` has it: layers of both ends are counted, and not asked for."""
    given = {**RUN, "mixed_precision": name} if isinstance(name, str) else {
        **RUN, "mixed_precision": {**name, "fp8_recipe": "tensorwise", "first_last_layers_bf16": False}
    }  # fmt: skip
    found = read(tmp_path, given, gpu="b200")
    assert not found.warnings
    assert {field: getattr(found.plan.precision, field) for field in fields} == fields


IN_8_BITS = {"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise"}


def test_of_8_bits_what_is_not_modelled_is_refused(tmp_path: Path) -> None:
    field = "disable_parameter_transpose_cache"
    with pytest.raises(PlanError, match=f"model.{field} = true: is not modelled yet"):
        read(tmp_path, {**changed(**{field: True}), "mixed_precision": IN_8_BITS})
    assert not read(tmp_path, changed(**{field: True})).warnings
    stored = {**changed(**{field: True}), "mixed_precision": {**IN_8_BITS, "fp8_param": True}}
    assert read(tmp_path, stored).plan.precision.fp8_parameters


@pytest.mark.parametrize(("field", "value"), [("fp8_multi_head_attention", True), ("fp8_wgrad", False)])
def test_of_8_bits_what_nobody_reads_changes_nothing(field: str, value: bool, tmp_path: Path) -> None:
    """``MultiheadAttention`` is no module of Megatron-Core's, and recipes leave ``override_linear_precision`` out."""
    plain, found = (read(tmp_path, {**RUN, "mixed_precision": {**IN_8_BITS, **more}}) for more in ({}, {field: value}))
    assert found.plan == plain.plan
    assert not found.warnings


def test_attention_in_8_bits_is_as_mixed_precision_says(tmp_path: Path) -> None:
    """``update_config_with_precision_overrides`` writes each of its fields over the model's, defaults too."""
    said = {**IN_8_BITS, "fp8_dot_product_attention": True}
    found = read(tmp_path, {**RUN, "mixed_precision": said}, gpu="b200")
    assert (found.plan.megatron.fp8_attention, found.plan.precision.fp8) == (True, "tensorwise")
    assert not found.warnings
    of_model = changed(fp8_dot_product_attention=True)
    found = read(tmp_path, {**of_model, "mixed_precision": "bf16_with_fp8_delayed_scaling_mixed"})
    assert not found.plan.megatron.fp8_attention
    assert "model.fp8_dot_product_attention (" in found.warnings[0].message
    assert "is overwritten by mixed_precision" in found.warnings[0].message
    alone = changed(fp8_dot_product_attention=True, fp8="hybrid", fp8_recipe="delayed", attention_backend="auto")
    found = read(tmp_path, {**alone, "mixed_precision": None}, cp="1", gpu="b200")
    assert found.plan.megatron.fp8_attention
    blockwise = {**said, "fp8": "e4m3", "fp8_recipe": "blockwise"}
    found = read(tmp_path, {**RUN, "mixed_precision": blockwise}, gpu="b200")
    with pytest.raises(PlanError) as raised:
        resolve(found.plan)
    located = str(found.located(raised.value))
    assert "fp8_dot_product_attention: must be false with precision blockwise" in located


def test_graphs_and_activations_on_the_host(tmp_path: Path) -> None:
    """Parts that graphs run are written as members of an enumeration."""
    member = {"_target_": "megatron.core.transformer.enums.CudaGraphModule", "_call_": True, "_args_": [1]}
    graphs = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": [{**member, "_name_": "attn"}]}
    given = read(tmp_path, changed(**graphs), gpus="8").plan.megatron
    assert (given.cuda_graphs, given.cuda_graph_modules) == ("transformer_engine", ("attn",))
    offload = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}
    given = read(tmp_path, changed(**offload, min_offloaded_tensor_size=1000), gpus="8").plan.megatron
    assert (given.offload_modules, given.offload_least) == (("core_attn",), 1000)


def test_parameters_gathered_beside_passes_without_gradients(tmp_path: Path) -> None:
    """As NVIDIA's recipe of DeepSeek V3 on 1,024 H100s: only Megatron-LM's parser refuses it."""
    run = {**RUN, "comm_overlap": {"overlap_grad_reduce": False, "overlap_param_gather_with_optimizer_step": True}}
    found = read(tmp_path, run)
    given = found.plan.megatron
    assert (given.overlap_grad_reduce, given.overlap_param_gather, given.gather_in_step) == (False, False, False)
    assert any("timed as if it were false" in note.message for note in found.warnings)


def test_a_layout_of_lists_beside_virtual_stages(tmp_path: Path) -> None:
    """Recipes name layers in words, and say both; the model has 8 layers, on 2 ranks with 2 chunks each."""
    stages = [["embedding", *["decoder"] * 2], ["decoder"] * 2, ["decoder"] * 2, [*["decoder"] * 2, "loss"]]
    layout = read(tmp_path, changed(pipeline_model_parallel_layout=stages)).plan.layout
    written = read(tmp_path, changed(pipeline_model_parallel_layout="Ett|tt|tt|ttL")).plan.layout
    assert layout == written
    assert layout.vpp == 2
    with pytest.raises(PlanError, match="layout = encoder: must be embedding, decoder"):
        read(tmp_path, changed(pipeline_model_parallel_layout=[["embedding", "encoder"], ["loss"]]))


def test_errors_name_the_configurations_fields(tmp_path: Path) -> None:
    found = read(tmp_path, changed(expert_model_parallel_size=2))
    with pytest.raises(PlanError) as raised:
        resolve(found.plan)
    assert ": expert_model_parallel_size = 2: must be 1" in str(found.located(raised.value))


OVERRIDES: dict[str, dict[str, object]] = {
    "model": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
        "num_layers": 8,
        "seq_length": 4096,
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mlp"],
        "attention_backend": "flash",
        "masked_softmax_fusion": False,
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "te",
    },
    "train": {"micro_batch_size": 1, "global_batch_size": 16},
    "ddp": {"check_for_nan_in_grad": False},
    "optimizer": {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": "bf16",
        "exp_avg_sq_dtype": "bf16",
    },
}
"""What parts the run of ``RUN`` from Megatron-Bridge's template of recipes and the model's own configuration."""


def words(overrides: Mapping[str, Mapping[str, object]]) -> list[str]:
    """The overrides as a command line gives them."""
    return [f"{section}.{name}={value}" for section, fields in overrides.items() for name, value in fields.items()]


def overridden(*place: str, **flags: str) -> ReadPlan:
    found = place if len(place) > 1 else place[0]
    return read_given(found, flags_of_launch(found, None), {"gpus": "16", "model": "llama-3-8b", **flags})


def test_overrides_of_a_recipe_are_the_run_that_they_make(tmp_path: Path) -> None:
    run = read(tmp_path, changed(should_pad_vocab=False)).plan
    (tmp_path / "overrides.yaml").write_text(yaml.safe_dump(OVERRIDES))
    for found in (overridden(str(tmp_path / "overrides.yaml")), overridden(*words(OVERRIDES))):
        assert without_name(found.plan) == without_name(run)
        assert found.plan.model.layers == 8
        assert not found.warnings


def test_words_go_over_a_file_and_flags_over_both(tmp_path: Path) -> None:
    (tmp_path / "run_config.yaml").write_text(yaml.safe_dump(RUN))
    place = (str(tmp_path / "run_config.yaml"), "model.tensor_model_parallel_size=4", "++train.micro_batch_size=2")
    read = read_given(place, flags_of_launch(place, None), {"gpus": "16", "cp": "1"})
    assert (read.plan.layout.tp, read.plan.layout.cp, read.plan.batch.mbs, read.plan.batch.gbs) == (4, 1, 2, 16)


def test_what_no_override_says_is_told() -> None:
    found = overridden("model.tensor_model_parallel_size=4")
    (note,) = found.warnings
    assert "pp 1, cp 1, mbs 2, gbs 32, seq 4096" in note.message
    assert found.plan.layout.tp == 4
    assert found.plan.model.layers == 32
    assert "mbs" not in overridden("train.train_iters=10", mbs="1").warnings[0].message


def test_the_length_that_is_said_wins_over_the_templates() -> None:
    for word in ("model.seq_length=8192", "dataset.seq_length=8192", "dataset.sequence_length=8192"):
        found = overridden(word)
        assert found.plan.batch.seq == 8192
        assert not any("seq 4096" in note.message for note in found.warnings)


def test_lengths_of_model_and_data_that_differ_are_refused_with_both_places(tmp_path: Path) -> None:
    """``ConfigContainer.validate`` (``training/config.py``) asserts that they match."""
    with pytest.raises(PlanError) as found:
        read(tmp_path, changed(seq_length=16384))
    assert "dataset.sequence_length = 4096: must be model.seq_length, 16384 (" in str(found.value)
    assert str(found.value).count("run_config.yaml:") == 2
    assert "\n" not in str(found.value)
    with pytest.raises(PlanError, match=r"command line.*4096: must be model.seq_length, 8192 \(command line\)"):
        overridden("model.seq_length=8192", "dataset.seq_length=4096")


def test_a_switch_of_the_model_is_turned_off() -> None:
    words = ("model.qk_layernorm=false", "model.seq_length=2048")
    assert overridden(*words, model="qwen3-8b").plan.model.qk_norm is False
    assert overridden("model.seq_length=2048", model="qwen3-8b").plan.model.qk_norm is True


@pytest.mark.parametrize(
    ("place", "flags", "problem"),
    [
        (("model.num_layers=4",), {}, "overrides of a recipe.*--model NAME"),
        (("~model.num_layers",), {"model": "llama-3-8b"}, "deletes"),
        (
            ("peft=canonical",),
            {"model": "llama-3-8b"},
            "peft = canonical: is not modelled yet: LoRA, DoRA and CanonicalLoRA are",
        ),
        (("model.tensor_model_paralel_size=4",), {"model": "llama-3-8b"}, "did you mean tensor_model_parallel_size?"),
        (("mixed_precision=bf16_best",), {"model": "llama-3-8b"}, "mixed_precision = bf16_best: must be one of"),
        (("mixed_precision.fp8=hybrid",), {"model": "llama-3-8b"}, "mixed_precision=NAME: .*bf16_with_fp8_current"),
        (
            ("mixed_precision.fp8_recipe=mxfp8",),
            {"model": "llama-3-8b"},
            "mixed_precision=NAME: bf16_with_mxfp8_mixed, fp16_with_mxfp8_mixed$",
        ),
        (("mixed_precision=bf16_best",), {"model": "llama-3-8b"}, "one of .*fp16_with_mxfp8_mixed.*nanov2_"),
        (("mixed_precision=fp16_with_nvfp4_mixed",), {"model": "llama-3-8b"}, "must be one of "),
        (("mixed_precision=bf16_mixed", "mixed_precision.fp8=hybrid"), {"model": "llama-3-8b"}, "says by name"),
        (("model.seq_length=512",), {"model": "bert-large", "gpus": "8"}, "has no provider in Megatron-Bridge"),
        (("llama-3-8b-8gpu", "model.num_layers=4"), {}, "a field of a plan is given as a flag"),
    ],
)
def test_overrides_that_cannot_be_read(place: tuple[str, ...], flags: dict[str, str], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        read_given(place, flags_of_launch(place, None), flags)


@pytest.mark.parametrize(
    "plan",
    ["{model: {base: gpt2, num_layers: 2}}", "{model: {num_layers: 2}, optimizer: adamw}", "{model: gpt2, ddp: {}}"],
)
def test_a_plan_is_no_override(tmp_path: Path, plan: str) -> None:
    (tmp_path / "plan.yaml").write_text(plan)
    assert not flags_of_launch(str(tmp_path / "plan.yaml"), None).formats


def test_a_precision_is_named_by_one_word() -> None:
    assert overridden("mixed_precision=bf16_with_mxfp8_mixed", gpu="b200").plan.precision.fp8 == "mxfp8"
    assert overridden("mixed_precision=bf16_mixed").plan == overridden("train.train_iters=1").plan


def test_a_hybrid_is_named_too() -> None:
    plan = overridden("model.tensor_model_parallel_size=2", model="nemotron-h-8b").plan
    named = read_plan(None, {"model": "nemotron-h-8b", "framework": "megatron", "gpus": "16"}).plan
    assert (plan.model.family, plan.layout.tp) == ("hybrid", 2)
    assert plan.model.layer_pattern == named.model.layer_pattern
    assert plan.model.mamba_heads == named.model.mamba_heads


@pytest.mark.parametrize("name", ["nemotron-3-super-120b-a12b", "nemotron-3-ultra-550b-a55b"])
def test_a_hybrids_configuration_says_what_predicts_further_tokens(name: str) -> None:
    """``config.json`` has one shared block of attention and experts; recipes say alone that it runs twice
    (``nemotron_3_super_pretrain_config``: ``mtp_num_layers = 2``)."""
    for words, count in (("train.train_iters=1", 1), ("model.mtp_num_layers=2", 2), ("model.mtp_num_layers=0", 0)):
        model = overridden(words, model=name).plan.model
        assert (model.mtp_layers, model.mtp_pattern) == (count, "*E" if count else "")
        assert model.mtp_shared


def test_a_number_beside_a_pattern_of_its_own_is_told_as_read(capsys: pytest.CaptureFixture[str]) -> None:
    from memplan.cli import main

    words = ["--model", "nemotron-3-super-120b-a12b", "--gpus", "16", "model.mtp_num_layers=2"]
    assert main(["estimate", *words, "--explain-args"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--mtp-num-layers")]
    assert "model.mtp_pattern" in row


def test_layers_on_the_host_and_fused_operations_are_the_arguments_of_megatron(tmp_path: Path) -> None:
    """``cpu_offloading`` turns layers on the host on; the number alone does nothing (``TransformerConfig``)."""
    alone = {"pipeline_model_parallel_size": 1, "recompute_granularity": None, "recompute_modules": None}
    on = changed(**alone, cpu_offloading=True, cpu_offloading_num_layers=2)
    assert read(tmp_path, on).plan.megatron.offload_layers == 2
    off = changed(**alone, cpu_offloading=False, cpu_offloading_num_layers=2)
    assert read(tmp_path, off).plan.megatron.offload_layers == 0
    assert read(tmp_path, changed(use_transformer_engine_op_fuser=True)).plan.megatron.fuses_operations
    full = read(tmp_path, changed(use_transformer_engine_full_layer_spec=True))
    assert "use_transformer_engine_full_layer_spec" in " ".join(note.message for note in full.warnings)


def test_a_student_with_a_teacher_is_refused(tmp_path: Path) -> None:
    target = "megatron.bridge.models.distillation_provider.DistillationProvider"
    with pytest.raises(PlanError, match="DistillationProvider: is not modelled yet"):
        read(tmp_path, changed(_target_=target, teacher={"num_layers": 80}))


COMMAND = """#SBATCH --nodes=2
export NCCL_NVLS_ENABLE=0
for CONFIG in "2,4,True" "1,1,False"; do
  IFS=',' read -r TP PP SP <<< "$CONFIG"
  CMD="uv run python scripts/training/run_recipe.py --recipe ${RECIPE:-llama3_8b_pretrain_config} -mb 1"
  CMD="$CMD model.tensor_model_parallel_size=$TP model.pipeline_model_parallel_size=$PP model.sequence_parallel=$SP"
  srun --ntasks-per-node=8 bash -c "$CMD train.global_batch_size=64 dataset.seq_length=8192 checkpoint.save=$WHERE"
done
"""


def commanded(folder: Path, **flags: str) -> ReadPlan:
    """The plan of ``run.sh`` in ``folder``."""
    place = str(folder / "run.sh")
    return read_given(place, flags_of_launch(place, None), flags)


def test_a_script_of_a_recipe_is_its_overrides(tmp_path: Path) -> None:
    """``run_recipe.py`` as Megatron-Bridge's examples start it, in the first of their layouts."""
    (tmp_path / "run.sh").write_text(COMMAND)
    found = commanded(tmp_path)
    said = ("model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=4", "train.micro_batch_size=1")
    rest = ("model.sequence_parallel=true", "train.global_batch_size=64", "dataset.seq_length=8192")
    by_hand = overridden(*said, *rest, "env_vars.NCCL_NVLS_ENABLE=0")
    assert found.plan == by_hand.plan
    assert any("llama3_8b_pretrain_config is Python, which is not run" in one.message for one in found.warnings)


def test_yarn_is_called_otherwise(tmp_path: Path) -> None:
    """``yarn_rotary_scaling_factor`` of gpt-oss' provider (``gpt_oss_bridge.py``)."""
    given = changed(position_embedding_type="yarn", yarn_rotary_scaling_factor=32.0, yarn_beta_fast=32.0)
    assert read(tmp_path, given).plan.model.yarn_factor == 32


def test_a_script_that_puts_its_overrides_together_is_followed(tmp_path: Path) -> None:
    """As ``examples/models/gpt_oss/slurm_sft.sh`` and those of Nemotron 3 do: lines made one by ``tr`` and ``sed``, a
    size that a test chooses, and a checkpoint that may be there, which changes no memory."""
    script = """#SBATCH --nodes=2
SAVE=/results
if [ -f "$SAVE/latest.txt" ]; then MORE="checkpoint.load=$SAVE checkpoint.finetune=False"
else MORE="checkpoint.pretrained_checkpoint=/base"
fi
CP=2
OVERRIDES=" \\
  model.tensor_model_parallel_size=2 \\
  model.context_parallel_size=$CP   $MORE
  dataset.offline_packing_specs.pad_seq_to_mult=$([ "$CP" -gt 1 ] && echo $((CP * 2)) || echo 1) \\
  dataset.seq_length=4096"
CMD="python run_recipe.py --recipe nemotron_3_nano_pretrain_config"
CMD="$CMD $(echo "$OVERRIDES" | tr '\\n' ' ' | sed 's/  \\+/ /g')"
srun --ntasks-per-node=8 bash -c "$CMD"
"""
    (tmp_path / "run.sh").write_text(script)
    plan = commanded(tmp_path).plan
    assert (plan.model.name, plan.hardware.gpus, plan.batch.seq) == ("nemotron-3-nano-30b-a3b", 16, 4096)
    assert (plan.layout.tp, plan.layout.cp) == (2, 2)
    (tmp_path / "run.sh").write_text(script.replace("checkpoint.load", "train.micro_batch_size=4 checkpoint.load"))
    with pytest.raises(PlanError, match="cannot be decided"):
        commanded(tmp_path)


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        ("llama3_8b_pretrain_fp8_current_scaling_config", "says a precision below 16 bits"),
        (
            "llama3_8b_peft_config peft._target_=megatron.bridge.peft.mimo.OtherLoRA",
            "LoRA, DoRA and CanonicalLoRA are",
        ),
        ("deepseek_v9_pretrain_config", "name its model: --model NAME"),
        ("$UNKNOWN", "give it as --set UNKNOWN=value"),
    ],
)
def test_a_recipe_that_says_more_is_refused(recipe: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(COMMAND.replace("${RECIPE:-llama3_8b_pretrain_config}", recipe))
    with pytest.raises(PlanError, match=problem):
        commanded(tmp_path)


def test_parts_of_layers_are_asked_for_by_their_class(tmp_path: Path) -> None:
    lora = read(tmp_path, {**RUN, "peft": {"_target_": CANONICAL, "dim": 8}}).plan.lora
    assert (lora.rank, {*(lora.targets or ())}) == (
        8,
        {*("linear_q", "linear_k", "linear_v", "linear_proj"), *("linear_fc1_up", "linear_fc1_gate", "linear_fc2")},
    )
    (tmp_path / "run.sh").write_text(
        f"torchrun --nproc_per_node=8 run_recipe.py --recipe llama3_8b_peft_config peft._target_={CANONICAL}"
    )
    assert "linear_fc1_up" in (commanded(tmp_path).plan.lora.targets or ())


def test_adapters_of_a_run(tmp_path: Path) -> None:
    fields = {"_target_": "megatron.bridge.peft.lora.LoRA", "dim": 16, "alpha": 32, "target_modules": ["linear_qkv"]}
    lora = read(tmp_path, {**RUN, "peft": {**fields, "lora_dtype": None, "dropout_position": "pre"}}).plan.lora
    assert (lora.rank, lora.alpha, lora.targets) == (16, 32, ("linear_qkv",))
    assert read(tmp_path, {**RUN, "peft": None}).plan.lora.rank is None


@pytest.mark.parametrize(
    "recipe",
    [
        "llama3_8b_dora_config",
        "llama3_8b_peft_config peft._target_=megatron.bridge.peft.dora.DoRA",
        "llama3_8b_peft_config --peft_scheme dora",
        "llama3_8b --mode dora",
    ],
)
def test_norms_of_a_recipe_are_asked_for_by_its_name_or_an_option(tmp_path: Path, recipe: str) -> None:
    (tmp_path / "run.sh").write_text(f"torchrun --nproc_per_node=8 run_recipe.py --recipe {recipe} peft.dim=8")
    lora = commanded(tmp_path).plan.lora
    assert (lora.rank, lora.dora) == (8, True)


def test_a_recipe_with_adapters_begins_as_its_own_template(tmp_path: Path) -> None:
    """``_peft_common``."""
    (tmp_path / "run.sh").write_text("torchrun --nproc_per_node=8 run_recipe.py --recipe llama3_8b_peft_config")
    found = commanded(tmp_path)
    plan = found.plan
    assert (plan.lora.rank, plan.batch.mbs, plan.batch.gbs, plan.batch.seq) == (32, 1, 128, 2048)
    assert not plan.megatron.overlap_grad_reduce
    assert any("gbs 128, seq 2048, lora-rank 32" in one.message for one in found.warnings)
    (tmp_path / "run.sh").write_text("torchrun --nproc_per_node=8 run_recipe.py --recipe llama3_8b_sft_config")
    full = commanded(tmp_path)
    assert full.plan == plan.model_copy(update={"lora": full.plan.lora})
    assert full.plan.lora.rank is None
    for words, rank in (("_peft_config peft=none", None), ("_finetune_config --peft_scheme lora", 32)):
        (tmp_path / "run.sh").write_text(f"torchrun --nproc_per_node=8 run_recipe.py --recipe llama3_8b{words}")
        same = commanded(tmp_path).plan
        assert (same.lora.rank, same.batch) == (rank, plan.batch)


def test_a_recipe_of_a_benchmark_has_a_layout_of_its_own(tmp_path: Path) -> None:
    text = "torchrun --nproc_per_node=8 run_recipe.py --recipe llama3_8b_pretrain_8gpu_h100_bf16_config"
    (tmp_path / "run.sh").write_text(text)
    for flags in ({}, {"tp": "1"}):
        with pytest.raises(PlanError, match=r"says .*micro-batch size .*only its Python has"):
            commanded(tmp_path, **flags)
    with pytest.raises(PlanError, match=r"says a global batch size \(--gbs 128\), which only its Python has"):
        commanded(tmp_path, cp="2", seq="8192", mbs="1")
    assert commanded(tmp_path, tp="1", seq="8192", mbs="1", gbs="128").plan.hardware.gpus == 8
    text = "python setup_experiment.py -m llama -mr llama3_8b -ng 16 -g h100 -c fp8_cs -tp 2 -mb 1 -gb 32 -sl 8192"
    (tmp_path / "run.sh").write_text(text)
    plan = commanded(tmp_path).plan
    assert (plan.model.name, plan.hardware.gpus, plan.layout.tp, plan.batch.gbs) == ("llama-3-8b", 16, 2, 32)
    assert (plan.precision.fp8, plan.batch.seq, plan.hardware.gpu) == ("tensorwise", 8192, "h100-80gb")
    assert commanded(tmp_path, gpu="h200").plan.hardware.gpu == "h200"
    (tmp_path / "run.sh").write_text(text.replace("-ng 16", "-ng many"))
    with pytest.raises(PlanError, match="num_gpus = many: must be a whole number"):
        commanded(tmp_path)


def test_a_recipe_that_names_its_length_is_asked_for_it(tmp_path: Path) -> None:
    """``examples/training_features/long_context/qwen3_600m_sft_yarn_128k.sh``: 2,048 tokens of the template, and no
    context parallelism, were estimated."""
    text = (
        "torchrun --nproc_per_node=8 run_recipe.py --recipe qwen3_600m_sft_yarn_128k_config train.global_batch_size=8"
    )
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(PlanError, match=r"says a layout \(--tp 2\), a length \(--seq 131072\), which only its Python"):
        commanded(tmp_path)
    assert commanded(tmp_path, cp="8", seq="131072", gbs="1").plan.batch.seq == 131072
    (tmp_path / "run.sh").write_text("torchrun --nproc_per_node=8 run_recipe.py --recipe kimi_k2_pretrain_config -ep 8")
    assert commanded(tmp_path).plan.batch.seq == 4096


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ("-tp 2", {"tp": "2", "sequence-parallel": "true"}),
        ("-tp 1 -rl 4", {"recompute": "full", "recompute-method": "block", "recompute-layers": "4"}),
        ("-tp 1 --recompute_modules=layernorm,mlp", {"recompute": "selective", "recompute-modules": "layernorm,mlp"}),
        ("-tp 1 -ol 4 -vp None", {"offload-layers": "4"}),
        ("-tp 1 -pp 2 -vp 4", {"pp": "2", "vpp": "4"}),
        ("-tp 1 --num_layers 8 --use_megatron_fsdp false", {"layers": "8"}),
    ],
)
@pytest.mark.parametrize("script", ["custom_setup_experiment.py", "run_script.py"])
def test_options_of_a_benchmark_set_what_its_scripts_set(
    tmp_path: Path, options: str, flags: dict[str, str], script: str
) -> None:
    """``scripts/performance/utils/overrides.py`` (``set_user_overrides``)."""
    text = f"python scripts/performance/{script} -m llama -mr llama3_8b -ng 8 -g h100 -mb 1 -gb 32 -sl 8192"
    (tmp_path / "run.sh").write_text(f"{text} {options}")
    given = commanded(tmp_path).plan
    (tmp_path / "run.sh").write_text(f"{text} -tp 1")
    assert given == commanded(tmp_path, **flags).plan != commanded(tmp_path).plan


@pytest.mark.parametrize(
    ("recipe", "words", "gradients", "loss"),
    [
        ("llama3_8b", "", "bf16", "te"),
        ("llama3_8b", "-c fp8_cs", "bf16", "te"),
        ("llama3_8b", "--use_recipes", "fp32", "native"),
        ("llama3_8b", "mixed_precision=bf16_mixed", "fp32", "te"),
        ("llama3_8b", "-c bf16 model.cross_entropy_fusion_impl=native", "bf16", "native"),
        ("nemotronh_56b", "", "bf16", "native"),
    ],
)
def test_recipes_of_benchmarks_have_more_in_common_than_the_template(
    tmp_path: Path, recipe: str, words: str, gradients: str, loss: str
) -> None:
    """``perf_recipes/_common.py`` (``_benchmark_common``, ``_perf_precision``)."""
    text = f"python run_script.py -mr {recipe} -ng 64 -g h100 -mb 1 -gb 64 -sl 4096 -tp 1"
    (tmp_path / "run.sh").write_text(f"{text} {words}")
    plan = commanded(tmp_path).plan
    assert (plan.precision.gradients, plan.megatron.cross_entropy_fusion) == (gradients, loss)


def test_megatron_fsdp_of_a_benchmark_is_asked_for_by_an_option(tmp_path: Path) -> None:
    text = "python run_script.py -m llama -mr llama3_8b -ng 8 -g h100 -mb 1 -gb 32 -sl 8192 -tp 1"
    (tmp_path / "run.sh").write_text(f"{text} --use_megatron_fsdp true")
    assert commanded(tmp_path).plan.megatron.fsdp == "optim_grads_params"
    (tmp_path / "run.sh").write_text(f"{text} --first_k_dense_replace 2")
    with pytest.raises(PlanError, match="first_k_dense_replace = 2: is not read; --model names a model with"):
        commanded(tmp_path)


@pytest.mark.parametrize(
    ("folder", "gpu", "noted"),
    [
        ("a3ultra", "h200", True),
        ("a3mega", "h100-80gb", False),
        ("a4", "h100-80gb", False),
        ("h200", "h100-80gb", False),
    ],
)
def test_a_recipe_for_h100_in_the_folder_of_a_machine_is_for_its_gpu(
    tmp_path: Path, folder: str, gpu: str, noted: bool
) -> None:
    """Google's A3 Ultra has eight H200 (GPU machine types), and its recipes say ``--gpu h100``: Megatron-Bridge has
    none for H200. ``a4`` names no machine type; its recipes say ``--gpu b200``."""
    place = tmp_path / "training" / folder / "llama3_70b"
    place.mkdir(parents=True)
    command = "python run_script.py -m llama -mr llama3_8b -ng 8 --gpu h100 -mb 1 -gb 32 -sl 8192 -tp 1"
    (place / "run.sh").write_text(command)
    found = commanded(place)
    assert found.plan.hardware.gpu == gpu
    assert any(one.code == "gpu-of-the-folder" for one in found.warnings) is noted
    assert commanded(place, gpu="b200").plan.hardware.gpu == "b200"


@pytest.mark.parametrize("word", ["model.teacher.seq_length=4096", "model.kd_config.skip_lm_loss=true"])
def test_overrides_of_a_distillation_are_refused_as_megatrons_is(word: str) -> None:
    """As ``examples/distillation/llama/conf/llama32_3b-1b_distill_override_example.yaml`` has them."""
    path = word.rpartition(".")[0]
    with pytest.raises(PlanError, match=f"{path}: is distillation, and its teacher.*without it the student alone is"):
        overridden(word, "model.seq_length=4096", model="llama-3.2-1b")
    assert overridden(f"{path}=null", "model.seq_length=4096").plan.batch.seq == 4096


def test_an_override_is_no_file() -> None:
    assert is_override("model.pipeline_model_parallel_layout=[[embedding]]")
    assert not any(
        map(
            is_override,
            ("model.yaml", "train.sh", "ddp.yaml", "a/model.x=1", "layout.tp=4", "model=x", "mixed_precision"),
        )
    )


def test_a_provider_whose_class_says_more_is_asked_for_the_whole_configuration(tmp_path: Path) -> None:
    model = {**MODEL, "_target_": "megatron.bridge.models.llama.llama_provider.Llama3ModelProvider8B"}
    assert read(tmp_path, {**RUN, "model": model}).plan.model.activation == "swiglu"
    with pytest.raises(PlanError, match="Llama3ModelProvider8B may set it"):
        read(tmp_path, {**RUN, "model": {k: v for k, v in model.items() if k != "gated_linear_unit"}})
