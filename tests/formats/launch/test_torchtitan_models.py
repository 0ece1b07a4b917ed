"""Jobs of torchtitan's Qwen 3 and DeepSeek V3: flavours, experts, and what is told of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.frameworks.fsdp.torchtitan import check
from memplan.plan.errors import PlanError
from memplan.plan.resolve import resolve

from .torchtitan_jobs import Read, codes, reader, refusal

DEEPSEEK = """
[model]
name = "deepseek_v3"
flavor = "16B"
hf_assets_path = "./assets/hf/deepseek-moe-16b-base"

[training]
local_batch_size = 4
seq_len = 4096

[parallelism]
data_parallel_shard_degree = -1
expert_parallel_degree = 1

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
"""As the preset of release 0.2.2, without expert parallelism and torch.compile."""
QWEN = DEEPSEEK.replace("deepseek_v3", "qwen3").replace("16B", "30B-A3B")


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    return reader(tmp_path, monkeypatch)


def test_deepseek_v3(read: Read) -> None:
    found = read(DEEPSEEK, gpu="h200")
    plan = resolve(found.plan)
    assert (plan.model.name, plan.batch.mbs, plan.layout.dp) == ("deepseek-v2-lite", 4, 8)
    assert plan.fsdp.ends_apart
    assert plan.fsdp.per_operator
    assert codes(found) == ["attention-other"]


def test_qwen3(read: Read) -> None:
    found = read(QWEN, gpu="h200")
    assert resolve(found.plan).model.name == "qwen3-30b-a3b"
    assert found.warnings == ()


def test_a_model_to_debug_with(read: Read) -> None:
    spec = resolve(read(DEEPSEEK, "model.flavor=debugmodel").plan).model
    sizes = (spec.layers, spec.hidden, spec.heads, spec.ffn, spec.vocab, spec.latent_kv_rank, spec.head_dim)
    assert sizes == (6, 256, 16, 1024, 2048, 512, 192)
    assert (spec.experts, spec.expert_top_k, spec.expert_ffn, spec.shared_expert_ffn) == (8, 3, 256, 512)
    spec = resolve(read(QWEN, "model.flavor=debugmodel_moe").plan).model
    assert (spec.experts, spec.expert_ffn, spec.head_dim, spec.kv_heads) == (64, 768, 128, 8)


def test_ranks_that_share_experts(read: Read) -> None:
    ranks = "parallelism.expert_parallel_degree=8"
    assert resolve(read(DEEPSEEK, ranks, gpu="h200").plan).layout.ep == 8
    assert resolve(read(QWEN, ranks, model="llama-3-8b").plan).layout.ep == 1
    other = "parallelism.expert_parallel_comm_backend=deepep"
    assert "must be standard" in refusal(read, DEEPSEEK, ranks, other, gpu="h200")


def test_stages_whose_ranks_share_experts(read: Read) -> None:
    """As the preset of 671B: interleaved, two stages on every rank, with experts that the stage's ranks share."""
    stages = ("parallelism.pipeline_parallel_degree=2", "parallelism.pipeline_parallel_schedule=Interleaved1F1B")
    plan = resolve(read(DEEPSEEK, *stages, "parallelism.expert_parallel_degree=4", gpu="h200").plan)
    assert (plan.layout.pp, plan.layout.vpp, plan.layout.dp, plan.layout.ep) == (2, 2, 4, 4)
    check(plan)


def test_gpt_oss_until_0_2_2(read: Read) -> None:
    job = DEEPSEEK.replace("deepseek_v3", "gpt_oss").replace("16B", "20b")
    assert "model.name = gpt_oss: keeps its layers in bf16 in torchtitan 0.2.2" in refusal(read, job, gpu="h200")


def test_a_weight_that_is_tied_before_it_was_in_one_unit(read: Read) -> None:
    says = "model.tied_embeddings = true: must be false: torchtitan 0.2.2 (2026-02-20) shards embedding and head apart"
    assert says in refusal(read, QWEN, "model.flavor=4B", gpu="h200")


def test_an_unknown_flavour(read: Read) -> None:
    assert "of model deepseek_v3 has no sizes here" in refusal(read, DEEPSEEK, "model.flavor=7B", gpu="h200")


@pytest.mark.parametrize(
    ("job", "over", "says"),
    [
        (
            DEEPSEEK,
            "parallelism.context_parallel_degree=2",
            "layout.cp = 2: must be 1 with torchtitan's deepseek_v3, which is modelled without context parallelism",
        ),
        (QWEN, "training.mixed_precision_param=float32", "precision.dtype = fp32: must be bf16"),
    ],
)
def test_what_has_no_recipe(read: Read, job: str, over: str, says: str) -> None:
    plan = read(job, over, gpu="h200").plan
    with pytest.raises(PlanError, match=says):
        check(resolve(plan))
