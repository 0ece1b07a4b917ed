"""Plans as Megatron-LM's arguments."""

from __future__ import annotations

import json
import warnings

import pytest
from hypothesis import HealthCheck, given, settings

from memplan.formats.exported import Exported, exported
from memplan.formats.megatron.script import TARGET
from memplan.formats.settings import Table, arguments_of
from memplan.plan.errors import PlanError
from memplan.plan.megatron_layout import layout_string, stages
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan

from .megatron_plans import plans
from .plans import round_trip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(plans())
def test_what_is_exported_reads_back_as_the_plan(plan: Plan) -> None:
    done = round_trip(plan, TARGET)
    known = arguments_of("megatron")
    for arguments in done.content["arguments"].values():
        for name, value in arguments.items():
            assert known[name].is_switch == (value is True), name


def of(name: str = "llama-3-405b-1024gpu", **flags: str) -> Exported:
    return round_trip(
        read_plan(name or None, {key.replace("_", "-"): value for key, value in flags.items()}).plan, TARGET
    )


def test_ends_counted_of_a_hybrid_in_one_stage() -> None:
    """Stages of a hybrid are those of its pattern: where there is one, counting its ends says nothing."""
    flags = {"framework": "megatron", "gpus": "8", "tp": "8", "mbs": "1", "gbs": "1", "seq": "512"}
    plan = read_plan(None, {**flags, "model": "nemotron-h-8b"}).plan
    pipeline = plan.pipeline.model_copy(update={"count_embedding": True, "count_loss": True})
    done = round_trip(plan.model_copy(update={"pipeline": pipeline}), TARGET)
    assert "--account-for" not in done.text


def test_layers_that_differ() -> None:
    """As the text of a configuration, with what Megatron's parser asks for beside it."""
    done = of(
        "", model="llama-3.3-nemotron-super-49b", framework="megatron", tp="8", gpus="8", seq="512", gbs="1", mbs="1"
    )
    model = done.content["arguments"]["MODEL"]
    blocks = json.loads(model["--heterogeneous-layers-config-encoded-json"])["block_configs"]
    assert len(blocks) == 80
    assert blocks[6]["attention"] == {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False}
    assert model["--use-rope-scaling"] is True


def test_yarn_by_its_factor() -> None:
    """``--rotary-scaling-factor`` is also latent attention's, which has no positions of whole heads."""
    flags = {"framework": "megatron", "gpus": "8", "seq": "512", "gbs": "8", "mbs": "1", "bias-dropout-fusion": "false"}
    plan = read_plan(None, {**flags, "model": "gpt-oss-20b", "ep": "8"}).plan
    done = round_trip(plan, TARGET)
    assert "--position-embedding-type yarn" in done.text
    assert "--rotary-scaling-factor 32.0" in done.text
    plain = of("", **flags, model="qwen3-30b-a3b", ep="8").content["arguments"]["MODEL"]
    assert (plain["--position-embedding-type"], "--rotary-scaling-factor" in plain) == ("rope", False)


def test_kernels_and_states_of_mamba_layers() -> None:
    flags = {
        "framework": "megatron",
        "gpus": "8",
        "tp": "8",
        "mbs": "1",
        "gbs": "1",
        "seq": "512",
        "model": "nemotron-h-8b",
    }
    others = {"disable_mamba_mem_eff_path": "true", "mamba_training_ssm_states_dtype": "fp32"}
    hybrid = of("", **flags, **others).content["arguments"]["HYBRID"]
    assert hybrid["--disable-mamba-mem-eff-path"] is True
    assert hybrid["--mamba-training-ssm-states-dtype"] == "fp32"


def test_modules_of_their_own_precision_are_in_a_file_that_is_not_written() -> None:
    flags = {"model": "llama-3-8b", "framework": "megatron", "gpus": "1", "fp8": "tensorwise", "gbs": "1", "mbs": "1"}
    plan = read_plan(None, {**flags, "seq": "512", "precision-of-modules": "*fc1=16bit"}).plan
    with pytest.raises(PlanError, match="precision_of"):
        round_trip(plan, TARGET)


def test_the_example() -> None:
    done = of()
    modelled = {name for name, one in arguments_of("megatron").items() if one.table is Table.MODELLED}
    for group, arguments in done.content["arguments"].items():
        assert group == "YOURS" or arguments.keys() <= modelled
    parallel = done.content["arguments"]["PARALLEL"]
    assert parallel["--num-virtual-stages-per-pipeline-rank"] == "8"
    assert parallel["--account-for-loss-in-pipeline-split"] is True
    assert "torchrun --nproc_per_node 8 --nnodes 128" in done.text


def test_a_part_of_a_node_is_one_node() -> None:
    done = of(gpus="128", gbs="128", tp="4", pp="16", vpp="1", gpus_per_node="256")
    assert "--nproc_per_node 128 --nnodes 1" in done.text
    assert "--gpus-per-node 256" in done.command_line()


@pytest.mark.parametrize(
    ("pipeline", "argument"),
    [
        ({"first_layers": "30", "last_layers": "32"}, "--decoder-first-pipeline-num-layers 30"),
        ({"layout": "Et*31|(t*32|)*2,t*31L"}, "--pipeline-model-parallel-layout 'Et*31|(t*32|)*2,t*31L'"),
        ({"layout": "E|t*126||L"}, "--pipeline-model-parallel-layout 'E|t*126||L'"),
        ({"count_embedding": True, "count_loss": True}, "--account-for-embedding-in-pipeline-split"),
    ],
)
def test_stages(pipeline: dict[str, object], argument: str) -> None:
    plan = read_plan("llama-3-405b-1024gpu", {"pp": "4", "vpp": "1", "gpus": "32", "gbs": "32"}).plan
    wanted = {name: int(value) if str(value).isdigit() else value for name, value in pipeline.items()}
    section = plan.pipeline.model_copy(update={"count_embedding": False, "count_loss": False, **wanted})
    assert argument in round_trip(plan.model_copy(update={"pipeline": section}), TARGET).text


def test_a_search_can_have_any_cut() -> None:
    """62 layers over 4 stages of 2 chunks, unequal on purpose, are a layout that Megatron-Core reads as that cut."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        core = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    held = stages(62, 4, layout="Et*5|t*9|t*8|t*8|t*8|t*8|t*8|t*8L")
    text = layout_string(held)
    plan = read_plan("llama-3-405b-1024gpu", {"layers": "62", "pp": "4", "vpp": "2", "gpus": "32", "gbs": "32"}).plan
    section = plan.pipeline.model_copy(update={"count_embedding": False, "count_loss": False, "layout": text})
    done = round_trip(plan.model_copy(update={"pipeline": section}), TARGET)
    written = done.content["arguments"]["PARALLEL"]["--pipeline-model-parallel-layout"]
    parsed = core.PipelineParallelLayerLayout.parse_str_to_list(written)
    assert [len(part) for part in parsed] == [6, 9, 8, 8, 8, 8, 8, 9]


def test_bert_is_pretrain_bert() -> None:
    flags = {"model": "bert-5.1b", "framework": "megatron", "gpus": "8", "tp": "2"}
    plan = read_plan(None, {**flags, "norm-place": "pre", "embedding-norm": "false", "final-norm": "true"}).plan
    done = round_trip(plan, TARGET)
    assert "pretrain_bert.py" in done.text
    assert "--position-embedding-type" not in done.text


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"logit_softcap": "30"}, "model.logit_softcap = 30.0: must be left out"),
        ({"hidden_dropout": "0.1"}, "model.embedding_dropout = 0.0: cannot be said in Megatron-LM's arguments"),
        ({"env": "A-B=1"}, "environment.A-B = 1: cannot be exported by a shell"),
        ({"gpus": "2048", "gbs": "2048", "gpus_per_node": "3"}, "hardware.gpus = 2048: must be a multiple of hard"),
    ],
)
def test_what_it_has_no_word_for_is_refused(flags: dict[str, str], line: str) -> None:
    given = {name.replace("_", "-"): value for name, value in flags.items()}
    with pytest.raises(PlanError) as caught:
        exported(read_plan("llama-3-405b-1024gpu", given).plan, TARGET)
    assert str(caught.value).startswith(line)
