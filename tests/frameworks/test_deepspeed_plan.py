"""Framework ``deepspeed`` from a plan: its fields, what is refused under their names, and what the report says."""

from __future__ import annotations

import pytest

from memplan.estimate import estimate
from memplan.families import families
from memplan.frameworks.deepspeed import engine as deepspeed
from memplan.frameworks.deepspeed.config import Zero, zero_of
from memplan.frameworks.deepspeed.engine import fullest_rank, program_of_rank, programs
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.report.json import to_json
from memplan.result import Estimate
from memplan.tape.events import Category, Drop, Hold, Scope
from memplan.tape.program import fold_program

GPT2 = {"model": "gpt2", "framework": "deepspeed", "gpus": "2", "seq": "128"}


def estimated(source: str | None = None, **flags: str) -> Estimate:
    read = read_plan(source, {name.replace("_", "-"): value for name, value in flags.items()})
    try:
        return estimate(read.plan)
    except PlanError as error:
        raise error.located(read.origins) from None


def notice(report: Estimate, code: str) -> str:
    (found,) = [notice.message for notice in report.warnings if notice.code == code]
    return found


def test_a_plan_as_the_framework_reads_it() -> None:
    flags = {**GPT2, "zero": "3", "overlap-comm": "false", "grad-accum-dtype": "fp32", "param-groups": "decay"}
    plan = resolve(read_plan(None, flags).plan)
    assert plan.precision.gradients == "fp32"
    assert plan.optimizer.implementation is None
    expected = Zero(stage=3, overlap_comm=False, gradient_accumulation_dtype="fp32", groups="decay")
    assert zero_of(plan) == expected
    assert resolve(plan) == plan


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("gbs", ["2", "6"])
def test_every_stage_is_estimated(stage: str, dtype: str, gbs: str) -> None:
    (found,) = estimated(**GPT2, zero=stage, dtype=dtype, gbs=gbs, layers="3", gpu="h100-80gb").stages
    assert found.allocated is not None
    assert found.requested <= found.allocated
    assert sum(found.breakdown) == found.allocated
    whole = 124_439_808 - 9 * 7_087_872
    assert found.parameters == (whole if stage != "3" else whole // 2)


def test_a_plan_gives_what_the_framework_does_of_itself() -> None:
    plan = resolve(read_plan(None, {**GPT2, "zero": "2", "reduce-bucket-size": "1000000"}).plan)
    (ours,) = programs(plan, Options())
    _, theirs = deepspeed.fullest(plan, Options(), Zero(stage=2, reduce_bucket_size=1_000_000))
    assert fold_program(ours) == fold_program(theirs)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"zero": "1", "overlap-comm": "true"}, "--overlap-comm: deepspeed.overlap_comm = true: is not modelled at"),
        ({"zero": "2", "contiguous-gradients": "false"}, "--contiguous-gradients: deepspeed.contiguous_gradients"),
        ({"zero": "2", "offload-param": "cpu"}, "--offload-param: deepspeed.offload_param = cpu: needs stage 3, not 2"),
        ({"offload-optimizer": "cpu"}, "deepspeed.offload_optimizer = cpu: needs stage 1, 2 or 3, not 0"),
        ({"zero": "3", "allgather-bucket-size": "3"}, "deepspeed.allgather_bucket_size = 3: must be even"),
        ({"zero": "3", "reduce-bucket-size": "0"}, "deepspeed.reduce_bucket_size = 0: must be at least 1"),
        (
            {"zero": "3", "offload-optimizer": "cpu", "offload-optimizer-ratio": "0.5"},
            "--offload-optimizer-ratio: deepspeed.offload_optimizer_ratio = 0.5: must be 1",
        ),
        ({"gradients": "fp32"}, "--gradients: precision.gradients = fp32: must be bf16 at stage 0"),
        (
            {"grad-accum-dtype": "fp32"},
            "--grad-accum-dtype: deepspeed.gradient_accumulation_dtype = fp32: must be bf16",
        ),
        ({"zero": "2", "gradients": "fp32", "grad-accum-dtype": "bf16"}, "must be fp32, as precision.gradients"),
        ({"zero": "2", "grad-accum-dtype": "fp16"}, "--grad-accum-dtype: deepspeed.gradient_accumulation_dtype = fp16"),
        ({"zero": "2", "gradients": "fp16"}, "--gradients: precision.gradients = fp16: must be bf16 or fp32"),
        ({"zero": "3", "optimizer-implementation": "apex"}, "left out, it is DeepSpeed's own FusedAdam"),
        ({"zero": "3", "optimizer": "muon"}, "DeepSpeed's own Muon takes whole matrices out of ZeRO's buckets"),
        ({"zero": "0", "optimizer": "adam8bit"}, "is not supported at stage 0, where parameters are not flat"),
        ({"zero": "2", "optimizer": "adafactor", "offload-optimizer": "cpu"}, "must be adam, adamw, lion or sgd with"),
        ({"zero": "2", "optimizer": "lion", "optimizer-implementation": "bitsandbytes"}, "must be left out for lion"),
        (
            {"model": "falcon-7b", "zero": "3"},
            "layout.zero = 3: must be 0, 1 or 2 with family falcon: its linear layers",
        ),
        ({"model": "falcon-7b", "zero": "2", "recompute": "full"}, "must be none for family falcon"),
        ({"zero": "3", "recompute": "full", "recompute-layers": "2"}, "--recompute-layers: recompute.layers = 2: must"),
        ({"zero": "3", "recompute": "full", "recompute-method": "block"}, "recompute.method = block: must be uniform"),
        ({"zero": "3", "recompute": "selective"}, "recompute.mode = selective"),
        ({"tp": "2"}, "--tp: layout.tp = 2: must be 1 with framework deepspeed"),
        ({"code": "2020", "dtype": "fp32", "attention": "eager"}, "code = 2020: must be current"),
        (
            {"framework": "ddp", "zero": "3"},
            "--zero: layout.zero = 3: must be at most 1 with framework ddp; deepspeed has ZeRO-",
        ),
        ({"framework": "ddp", "param-groups": "decay"}, "--param-groups: deepspeed.groups = decay: must be left out"),
    ],
)
def test_what_is_wrong_names_the_fields_of_the_plan(flags: dict[str, str], line: str) -> None:
    with pytest.raises(PlanError) as caught:
        estimated(**{**GPT2, **flags})
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["qwen2.5-7b", "phi-3-mini", "gemma-2-9b", "opt-6.7b", "gpt-neox-20b", "gpt-j-6b"])
@pytest.mark.parametrize("optimizer", ["lion", "adafactor", "lion8bit"])
def test_families_and_optimizers(model: str, optimizer: str) -> None:
    flags = {"model": model, "framework": "deepspeed", "gpus": "4", "zero": "3", "seq": "256", "layers": "2"}
    (found,) = estimated(**flags, optimizer=optimizer).stages
    shares = {"lion": 4, "adafactor": 4, "lion8bit": 1 + 4 / 256}
    states = shares[optimizer] * found.parameters
    assert found.of(Category.OPTIMIZER_STATES) == pytest.approx(states, rel=0.001)


@pytest.mark.parametrize("stage", ["1", "2", "3"])
@pytest.mark.parametrize("bucket", ["1000", "1000000", "500000000"])
def test_no_tensor_that_outlives_its_module_is_held_twice(stage: str, bucket: str) -> None:
    """A tied gradient larger than the bucket is copied while it is still there, where states are on the host."""
    flags = {**GPT2, "zero": stage, "reduce-bucket-size": bucket, "gbs": "4", "offload-optimizer": "cpu"}
    (made,) = programs(resolve(read_plan(None, {**flags, "layers": "3"}).plan), Options())
    for microbatch in range(2):
        held: dict[int, int] = {}
        tapes = [span.module.first if microbatch == 0 else span.module.steady for span in made.spans]
        for event in (
            e for tape in (*(t.forward for t in tapes), *(t.backward for t in reversed(tapes))) for e in tape
        ):
            if isinstance(event, Hold) and event.tensor <= Scope.GATHERED.id():
                assert event.tensor not in held
                held[event.tensor] = event.bytes
            elif isinstance(event, Drop) and event.tensor <= Scope.GATHERED.id():
                assert held.pop(event.tensor) == event.bytes
    (stage_of,) = estimated(**{**flags, "layers": "3", "gpu": "h100-80gb"}).stages
    assert sum(stage_of.breakdown) == stage_of.allocated


def test_bert_of_the_story() -> None:
    """A layer of 78,676,480 parameters: 157,352,960 bytes, of which 66,560 of norms and biases stay whole."""
    report = estimated("bert-5.1b-zero3")
    (stage,) = report.stages
    assert report.fits
    assert stage.parameters == pytest.approx(5_125_136_643 / 8, rel=1e-6)
    gathering = notice(report, "zero3-gathering")
    for number in ("78,676,480", "9,834,560", "157,352,960", "157,286,400", "66,560"):
        assert number in gathering
    assert "bytes over the network" in notice(report, "zero3-traffic")
    assert stage.of(Category.GATHERED_PARAMETERS) > 0


def test_nothing_is_gathered_by_one_rank_or_below_stage_3() -> None:
    for flags in ({"gpus": "1", "zero": "3"}, {"zero": "2"}):
        codes = {notice.code for notice in estimated(**{**GPT2, **flags}).warnings}
        assert not codes & {"zero3-gathering", "zero3-traffic"}


def test_trl_forces_reentrant_checkpoints_beside_adapters() -> None:
    """Under ZeRO-3, since 0.28 (``sft_trainer.py``)."""
    flags = {**GPT2, "zero": "3", "lora-rank": "8", "recompute": "full"}
    for own, told in (
        ({"versions": "trl=0.28.0"}, True),
        ({"versions": "trl=0.27.0"}, False),
        ({"trainer": "dpo"}, True),
        ({"trainer": "dpo", "zero": "2"}, False),
        ({}, False),
    ):
        codes = {one.code for one in estimated(**{**flags, **own}).warnings}
        assert ("checkpoints-when-sharded" in codes) is told


def test_host_and_nvme_of_a_node() -> None:
    flags = {**GPT2, "gpus": "16", "gpus-per-node": "8", "zero": "3", "offload-optimizer": "nvme"}
    report = estimated(**flags)
    (stage,) = report.stages
    plan = resolve(read_plan(None, flags).plan)
    host, nvme = deepspeed.host_bytes(plan, Zero(stage=3, offload_optimizer="nvme"))
    assert (stage.host, stage.nvme) == (8 * host, 8 * nvme)
    assert stage.nvme > 0
    (shown,) = to_json(report)["stages"]
    assert (shown["host_bytes"], shown["nvme_bytes"]) == (stage.host, stage.nvme)
    assert f"{stage.nvme:,}" in notice(report, "zero-offloaded")


def test_initialisation_is_known_where_it_was_measured() -> None:
    """One group in bf16, twice at first: 4 P, which is more than a flat 2 P, a share and its gradients of 4 S each."""
    flags = {**GPT2, "gpus": "4", "layers": "2"}
    (stage,) = estimated(**flags, zero="2").stages
    assert stage.moments["initialisation"] == pytest.approx(4 * stage.parameters, rel=0.002)
    for others in ({"zero": "3"}, {"zero": "0"}, {"zero": "2", "offload-optimizer": "cpu"}):
        found = estimated(**{**flags, **others})
        assert found.stages[0].moments["initialisation"] is None
        assert any(line.startswith("peak of initialisation unknown") for line in found.assumptions)


def test_assumptions_name_the_release() -> None:
    told = " ".join(estimated(**GPT2, zero="3").assumptions)
    assert "DeepSpeed 0.19" in told
    assert "ZeRO++" in told
    assert "optimizer states have the parameters' dtype" not in told


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_the_estimate_is_of_the_rank_that_needs_most(stage: str) -> None:
    plan = resolve(read_plan(None, {**GPT2, "gpus": "4", "zero": stage, "layers": "3"}).plan)
    (most,) = programs(plan, Options())
    peaks = [fold_program(program_of_rank(plan, Options(), rank)).peak for rank in range(4)]
    assert max(peaks) == fold_program(most).peak == peaks[fullest_rank(plan)]


@pytest.mark.parametrize(("stage", "sums"), [("2", 2), ("3", 0)])
def test_where_gradients_are_summed_apart(stage: str, sums: int) -> None:
    """PyTorch's linear layer returns views as gradients, of which two sums of each layer cannot be in place; ZeRO-3's
    own linear function returns none."""
    plan = resolve(read_plan(None, {**GPT2, "model": "llama-3-8b", "zero": stage, "layers": "2"}).plan)
    (made,) = programs(plan, Options())
    (layer, *_) = [span.module for span in made.spans if "layer.0" in span.names]
    names = [event.name for event in layer.first.backward if isinstance(event, Hold)]
    assert names.count("gradient_sum") == sums


def test_which_mixtures_deepspeed_takes_as_a_leaf() -> None:
    """``DEFAULT_LEAF_MODULE_CLASSES`` (0.19.8): blocks of Mixtral, Qwen 2 and Qwen 3."""
    taken = [one for one in families() if one.covers and not one.no_zero3 and one.submodules]
    leaves = {one.name for one in taken if one.submodules and one.submodules["layer"].leaf}
    assert leaves == {"mixtral", "qwen3_moe"}
    parts = {one.name for one in taken if one.submodules and one.submodules["layer"].parts}
    latent, normed = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite"}, {"gemma4_text", "gemma4_unified_text"}
    assert parts == latent | normed | {
        "olmoe",
        "granitemoe",
        "glm4_moe",
        "dots1",
        "minimax_m2",
        "llama4_text",
        "gpt_oss",
    }
