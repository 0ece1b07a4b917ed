"""Scripts in the style of BigScience's, with their here-documents, become plans of megatron-deepspeed."""

from __future__ import annotations

from pathlib import Path

from memplan.formats.launch import Asked
from memplan.formats.training_scripts import read as read_script
from memplan.plan.read import build_plan
from memplan.plan.resolve import resolve

from ...plan.outcomes import error_of
from .reading import launch, plan
from .scripts import BIGSCIENCE, SMALL, script


def test_bigscience() -> None:
    read = launch(BIGSCIENCE, "megatron-deepspeed", vocabulary=None)
    built = build_plan(read.source, {}).plan
    assert (built.framework, built.hardware.gpus, built.hardware.gpus_per_node) == ("megatron-deepspeed", 128, 8)
    assert (built.layout.tp, built.layout.pp, built.layout.zero) == (4, 8, 1)
    assert (built.batch.mbs, built.batch.gbs, built.batch.seq) == (2, 2048, 2048)
    assert (built.model.layers, built.model.vocab, built.model.positions, built.model.embedding_norm) == (
        38,
        50257,
        "alibi",
        True,
    )
    assert (built.precision.dtype, built.precision.gradients) == ("bf16", "bf16")
    assert (built.recompute.mode, built.recompute.layers) == ("full", 1)
    assert built.pipeline.partition == "type:transformer|embedding"
    assert [note.code for note in read.notes] == ["variable-unset"]
    assert resolve(built).layout.dp == 4


def test_the_configuration_knows_the_scripts_lines() -> None:
    origins = dict(launch(BIGSCIENCE, "megatron-deepspeed").source.plan.origins())
    lines = BIGSCIENCE.splitlines()
    assert '"stage": $ZERO_STAGE' in lines[(origins["layout.zero"].line or 0) - 1]
    assert lines[(origins["batch.mbs"].line or 0) - 1] == "MICRO_BATCH_SIZE=2"
    assert lines[(origins["model.hidden"].line or 0) - 1].strip().startswith("--hidden-size 5120")


def test_zero_and_gradients() -> None:
    without = BIGSCIENCE.replace("ZERO_STAGE=1", "ZERO_STAGE=0")
    assert plan(without, "megatron-deepspeed").precision.gradients == "fp32"
    wider = BIGSCIENCE.replace('"bf16": {', '"data_types": {"grad_accum_dtype": "fp32"},\n  "bf16": {')
    assert plan(wider, "megatron-deepspeed").precision.gradients == "fp32"
    unknown = BIGSCIENCE.replace("ZERO_STAGE=1\n", "")
    assert "--set ZERO_STAGE=value" in error_of(lambda: plan(unknown, "megatron-deepspeed"))


def test_a_configuration_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    (tmp_path / "train.sh").write_text(
        f"deepspeed --num_gpus 8 pretrain_gpt.py {SMALL} --fp16 --deepspeed_config ds.json"
    )
    read = read_script(str(tmp_path / "train.sh"), Asked("megatron-deepspeed"))
    built = build_plan(read.source, {}).plan
    assert (built.layout.zero, built.precision.gradients, built.hardware.gpus) == (1, "fp16", 8)


def test_what_is_refused() -> None:
    def error(arguments: str) -> str:
        return error_of(lambda: plan(script(arguments=arguments), "megatron-deepspeed"))

    assert "--glu-activation = geglu: is not modelled yet; swiglu is" in error("--glu-activation geglu")
    assert "pretrain_bert.py is not modelled yet" in error_of(
        lambda: plan(f"deepspeed --num_gpus 8 pretrain_bert.py {SMALL}", "megatron-deepspeed")
    )
    assert error("--deepspeed_config nothere.json").endswith("--deepspeed_config = nothere.json: no such file")
    eight_bit = plan(script(arguments="--use-bnb-optimizer --zero-stage 1"), "megatron-deepspeed")
    assert (eight_bit.optimizer.name, eight_bit.optimizer.embeddings_32bit) == ("adam8bit", False)


def test_what_only_a_fork_has_is_refused_where_it_makes_another_model() -> None:
    """Microsoft's Megatron-DeepSpeed, with any value and without DeepSpeed, too, and BigCode's Megatron-LM, in which
    with the value that it begins with nothing differs."""

    def refused(arguments: str, framework: str = "megatron-deepspeed") -> str:
        return error_of(lambda: plan(f"deepspeed --num_gpus 8 pretrain_gpt.py {SMALL} --fp16 {arguments}", framework))

    for one in ("--swiglu", "--normalization rmsnorm", "--num-experts 64", "--ds-sequence-parallel-size 4"):
        assert f"{one.split()[0]}: is of Microsoft's Megatron-DeepSpeed" in refused(one)
    for one in ("--num-experts 1", "--ds-sequence-parallel-size 1", "--lr-warmup-tokens 3000"):
        assert f"{one.split()[0]}: is of Microsoft's Megatron-DeepSpeed" in refused(one)
    for one in ("--no-pipeline-parallel", "--num-key-value-heads 8"):
        assert f"{one.split()[0]}: is of Microsoft's Megatron-DeepSpeed" in refused(one, "megatron")
    assert "--num-query-groups 1 in its place" in refused("--attention-head-type multiquery", "megatron")
    assert "Megatron-LM's is --ffn-hidden-size" in refused("--intermediate-size 11008", "megatron")
    plan(f"deepspeed --num_gpus 8 pretrain_gpt.py {SMALL} --fp16 --attention-head-type multihead", "megatron")
