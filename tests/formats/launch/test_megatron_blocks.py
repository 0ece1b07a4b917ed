"""Launch scripts whose layers differ (``--heterogeneous-layers-config-path``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.arguments import plan_of_arguments
from memplan.frameworks.megatron.programs import programs
from memplan.layers.module import Options
from memplan.plan.count import parameters
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.resolve import resolve
from memplan.search.time.shape import model_flops

PATH, TEXT = "--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json"


def block(group: int | None, ffn: float | None, *, attention: str = "", mlp: str = "") -> dict[str, Any]:
    """As Llama-Nemotron's ``config.json`` has it."""
    kinds = [{"no_op": kind == "none", "replace_with_linear": kind == "linear"} for kind in (attention, mlp)]
    return {"attention": {"n_heads_in_group": group, **kinds[0]}, "ffn": {"ffn_mult": ffn, **kinds[1]}}


BLOCKS = [
    block(4, 2.625),
    block(None, 1.3125, attention="none"),
    block(4, None, mlp="linear"),
    block(None, None, attention="none", mlp="none"),
]


def configuration(blocks: list[dict[str, Any]] = BLOCKS, **more: object) -> dict[str, Any]:
    return {
        "hidden_act": "silu", "num_hidden_layers": len(blocks), "hidden_size": 1024, "num_attention_heads": 16,
        "tie_word_embeddings": False, "rope_theta": 500000.0, "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
        "block_configs": blocks, **more,
    }  # fmt: skip


def read(given: dict[str, Any], gpus: int = 1, **more: object) -> Plan:
    arguments: dict[str, Any] = {
        "--num-layers": 4, "--hidden-size": 1024, "--num-attention-heads": 16, "--seq-length": 4096,
        "--max-position-embeddings": 4096, "--micro-batch-size": 1, "--global-batch-size": 1, "--bf16": True,
        "--group-query-attention": True, "--num-query-groups": 4, "--swiglu": True, "--normalization": "RMSNorm",
        "--position-embedding-type": "rope", "--use-rotary-position-embeddings": True, "--rotary-base": 500000,
        "--use-rope-scaling": True, "--untie-embeddings-and-output-weights": True, "--disable-bias-linear": True,
        **given,
    }  # fmt: skip
    arguments |= {f"--{name.replace('_', '-')}": value for name, value in more.items()}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    return plan_of_arguments(arguments, gpus=gpus, family="gpt", vocabulary=32000).plan


def from_text(**more: object) -> dict[str, Any]:
    return {PATH: "not-read.json", TEXT: json.dumps(configuration(**more))}  # type: ignore[arg-type]


def test_layers_are_those_of_the_file(tmp_path: Path) -> None:
    """Widths are two thirds of ``ffn_mult`` hidden sizes, up to a multiple of 256: 2 x 2.625 x 1024 / 3 = 1792."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(configuration()))
    for given in ({PATH: str(file)}, from_text()):
        model = read(given).model
        assert model.layer_blocks == ("4:1792", "none:1024", "4:linear", "none:none")
        assert (model.kv_heads, model.ffn) == (4, 1792)


def test_parameters_are_those_of_the_program() -> None:
    """By hand: attention has h (16 + 2 x 4) 64 + h h weights, an MLP 3 h f, a linear layer h h, and each a norm."""
    h, plan = 1024, read(from_text())
    attention = h * (16 + 8) * 64 + h * h + h
    blocks = 2 * attention + (3 * h * 1792 + h) + (3 * h * 1024 + h) + (h * h + h)
    assert parameters(plan.model) == blocks + 2 * 32000 * h + h
    (program,) = programs(resolve(plan), Options())
    modules = {id(span.module): span for span in program.order.chunks[0].spans}  # type: ignore[attr-defined]
    held = sum(len(span.names) * sum(one.elements for one in span.module.parameters) for span in modules.values())
    assert held == parameters(plan.model)


def test_flops_are_those_of_each_layer() -> None:
    """6 for each weight of a matrix, and 12 h for each token that a query of an attention sees."""
    h, plan = 1024, resolve(read(from_text()))
    weights = 2 * (h * 24 * 64 + h * h) + 3 * h * (1792 + 1024) + h * h + 32000 * h
    assert model_flops(plan) == pytest.approx(4096 * (6 * weights + 2 * 12 * h * 4096))


def test_text_alone_leaves_layers_alike() -> None:
    """``gpt_builder`` asks for the path; the arguments are compared all the same."""
    assert read({TEXT: json.dumps(configuration())}).model.layer_blocks == ()
    with pytest.raises(PlanError, match="must be 4, as"):
        read({TEXT: json.dumps(configuration())}, num_layers=3)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"num_layers": 5}, "--num-layers = 5: must be 4"),
        ({"use_rope_scaling": None}, "--use-rope-scaling: must be given"),
        ({"rotary_base": 10000}, "--rotary-base = 10000.0: must be 500000"),
        ({"num_query_groups": 8}, "--num-query-groups = 8: must be 4"),
        ({"normalization": "LayerNorm"}, "--normalization = LayerNorm: must be RMSNorm"),
        ({"num_experts": 4}, "--num-experts: must be left out"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers: must be left out"),
    ],
)
def test_arguments_that_the_file_contradicts(more: dict[str, object], line: str) -> None:
    with pytest.raises(PlanError) as refused:
        read(from_text(), **more)
    assert line in str(refused.value)


@pytest.mark.parametrize(
    ("blocks", "line"),
    [
        ([block(4, 1.0), block(8, 1.0), *BLOCKS[2:]], "must be 4, as in other layers"),
        ([block(4, 1.0, mlp="none"), *BLOCKS[1:]], "block_configs[0].ffn = 768: must have no size"),
        ([block(4, -1.0), *BLOCKS[1:]], "block_configs[0].ffn.ffn_mult = -1.0: must be a number above 0"),
        ([{"attention": {"n_heads_in_group": 4}}, *BLOCKS[1:]], "block_configs[0].ffn: is missing"),
        ([{"ffn": {"ffn_mult": 1.0}}, *BLOCKS[1:]], "n_heads_in_group: is missing"),
        ([block(None, 1.0, attention="none")] * 4, "must be a whole number in one layer at least"),
    ],
)
def test_wrong_blocks(blocks: list[dict[str, Any]], line: str) -> None:
    with pytest.raises(PlanError) as refused:
        read({PATH: "not-read.json", TEXT: json.dumps(configuration(blocks))})
    assert line in str(refused.value)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"sequence_parallel": True}, "adds zeros to tokens instead of features"),
        ({"cuda_graph_impl": "transformer_engine"}, "layers that differ with CUDA graphs"),
        ({"recompute_granularity": "selective", "recompute_modules": "mlp"}, "layers that differ with recomputed"),
        ({"mlp_chunks_for_training": 2}, "layers that differ with an MLP in parts"),
        ({"qk_clip": True}, "megatron.clips_queries = true: must be false with layers that differ"),
        (
            {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim"},
            "must be none with layers that differ",
        ),
    ],
)
def test_what_layers_that_differ_have_not(more: dict[str, object], line: str) -> None:
    with pytest.raises(PlanError) as refused:
        programs(resolve(read(from_text(), 2, tensor_model_parallel_size=2, **more)), Options())
    assert line in str(refused.value)


def test_a_stage_of_empty_layers_alone() -> None:
    given = {PATH: "not-read.json", TEXT: json.dumps(configuration([BLOCKS[0], BLOCKS[3], BLOCKS[3], BLOCKS[1]]))}
    plan = read(given, 4, pipeline_model_parallel_size=4, global_batch_size=4)
    with pytest.raises(PlanError, match=r"leaves a pipeline stage with layer\.1 alone"):
        programs(resolve(plan), Options())
