"""Releases that a plan names: what follows from them, which are refused, and runs that were measured with them."""

from __future__ import annotations

import pytest

from memplan.cli import main
from memplan.estimate import estimate
from memplan.plan.errors import PlanError
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.releases import TRANSFORMERS_OF_TRL, needed, prefers_cudnn, transformers_of
from memplan.plan.resolve import resolve
from memplan.trace.framework import job_of_plan


def plan(**flags: str) -> ResolvedPlan:
    settings = {"model": "mistral-7b", **{name.replace("_", "-"): value for name, value in flags.items()}}
    return resolve(read_plan(None, settings).plan)


@pytest.mark.parametrize(
    ("versions", "reentrant"),
    [
        ("", False),
        ("transformers=4.57.1", True),
        ("transformers=5.23", False),
        ("transformers=4.57.1,trl=0.26.2", True),
        ("transformers=4.57.1,trl=0.27.0", False),
    ],
)
def test_reentrance_is_the_releases(versions: str, reentrant: bool) -> None:
    assert plan(recompute="full", versions=versions).recompute.reentrant is reentrant
    assert plan(recompute="full", versions=versions, use_reentrant="true").recompute.reentrant is True
    assert plan(versions=versions).recompute.reentrant is None


def test_trl_casts_adapters_beside_4_bit_weights_since_0_26() -> None:
    flags = {"lora_rank": "8", "quantisation": "nf4", "autocast": "true"}
    assert plan(**flags, versions="trl=0.25.1,transformers=4.57.1").lora.dtype == "fp32"
    assert plan(**flags, versions="trl=0.26.0,transformers=4.57.1").lora.dtype == "bf16"


@pytest.mark.parametrize(
    ("trl", "model", "found"),
    [
        ("0.11.4", "llama-3-8b", "4.45"),
        ("0.13.0", "llama-3-8b", "4.47"),
        ("0.13.0", "qwen2.5-7b", "4.48"),
        ("0.18.2", "qwen2.5-7b", "4.52"),
        ("1.0.0", "qwen2.5-7b", "4.57"),
        ("1.1.0", "qwen2.5-7b", None),
        ("0.18.2", "falcon-7b", None),
    ],
)
def test_transformers_of_an_older_trl(trl: str, model: str, found: str | None) -> None:
    """The newest of its time, though none older than the family's layers; of a family whose layers are known of the
    newest alone, that. What is named stands."""
    flags = {"model": model, "trainer": "dpo", "framework": "single"}
    read = read_plan(None, {**flags, "versions": f"trl={trl}"})
    assert resolve(read.plan).versions.get("transformers") == found
    told = [one.message for one in read.warnings if one.code == "release-assumed"]
    assert [one.split(" is ")[0] for one in told] == ([f"transformers {found}"] if found else [])
    named = read_plan(None, {**flags, "versions": f"trl={trl},transformers=5.23"})
    assert resolve(named.plan).versions["transformers"] == "5.23"
    assert not [one for one in named.warnings if one.code == "release-assumed"]


def test_bounds_of_trl_hold_what_is_assumed() -> None:
    """Each is at least what trl's metadata asks for, and below 5 as long as trl asks for that."""
    for first, its in TRANSFORMERS_OF_TRL:
        assert needed("trl", first)["transformers"][:2] <= its < (5, 0)
    assert transformers_of("1.0.0") == (4, 57)
    assert transformers_of("1.1.0") is None


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"versions": "transformers=4.30.0"}, "must be 4.45 to 5.23"),
        ({"versions": "transformers=9.1"}, "must be 4.45 to 5.23"),
        ({"versions": "transformers=4.x"}, "must be a release such as 4.48.1"),
        ({"versions": "unsloth=2025.1"}, "is no library whose releases are followed"),
        ({"versions": "transformers"}, "must be NAME=VALUE"),
        ({"versions": "trl=0.19.0,transformers=4.48.1"}, "must be 4.51 or later with trl 0.19.0"),
        ({"model": "llama-3-8b", "trainer": "sft", "versions": "trl=0.9.6"}, "must be 0.10 to 1.16: the releases"),
        ({"versions": "transformers=5.0.0,accelerate=1.0.1"}, "must be 1.1 or later with transformers 5.0.0"),
        ({"torch": "abc"}, "must be a release such as 2.6"),
        ({"torch": "1.0"}, "must be 1.6 or later: nothing older is modelled"),
        ({"versions": "torch=2.6", "torch": "2.4"}, "must be 2.4"),
        ({"model": "qwen2.5-7b", "versions": "transformers=4.47.1"}, "must be 4.48 or later for family qwen2"),
        ({"model": "gemma-3-1b", "versions": "transformers=4.50"}, "must be 5.23 or later for family gemma3_text"),
        (
            {"model": "llama-3-8b", "versions": "transformers=4.48.1", "attention": "eager"},
            "masks of releases before 4.53",
        ),
        ({"model": "gpt2-xl", "framework": "megatron", "versions": "peft=0.13"}, "whose model's code is its own"),
        (
            {"model": "gpt2-xl", "framework": "megatron", "recompute": "full", "use_reentrant": "true"},
            "must be left out",
        ),
        ({"attention": "flex_attention"}, "is not modelled"),
    ],
)
def test_what_is_not_followed_is_one_line(flags: dict[str, str], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        estimate(read_plan(None, {"model": "mistral-7b", **{k.replace("_", "-"): v for k, v in flags.items()}}).plan)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_newer_torch_is_taken_as_the_newest_that_is_known() -> None:
    said = "torch 2.99 is assumed to behave like 2.13, the newest release that memplan knows"
    for torch, is_said in (("2.99", True), ("2.13.0", False)):
        found = estimate(read_plan(None, {"model": "gpt2", "layers": "2", "seq": "64", "torch": torch}).plan)
        assert (said in found.assumptions) == is_said


@pytest.mark.parametrize("torch", ["9.9", "2.14", "2.14.0", "2.13.1", "2.13.0", "2.13", "2.6"])
def test_a_torch_that_nobody_knows_is_told_in_the_first_lines(torch: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A patch of a known release is that release."""
    assert main(["estimate", "--model=gpt2", "--layers=2", "--seq=64", "--gpu=h100", f"--torch={torch}"]) == 0
    printed = capsys.readouterr()
    first = " ".join(printed.out.partition("\n\n")[0].split())
    said = f"torch {torch} is assumed to behave like 2.13, the newest release that memplan knows"
    assert (said in first) == (torch in ("9.9", "2.14", "2.14.0")), printed


MEASURED = {
    "gpu": "a100-80gb",
    "trainer": "transformers",
    "recompute": "full",
    "attention": "flash_attention_2",
    "seq": "4096",
    "versions": "transformers=4.48.1,peft=0.13.2,trl=0.13.0,bitsandbytes=0.43.3",
}
LORA = {"lora_rank": "16", "lora_targets": "q_proj,k_proj,v_proj,o_proj", "lora_dropout": "0.1"}
FOUR_BIT = {**LORA, "quantisation": "nf4", "double_quantisation": "true", "autocast": "true"}


@pytest.mark.parametrize(
    ("flags", "mbs", "peak", "after"),
    [
        ({}, "4", 72_434_837_504, 43_467_876_352),
        (LORA, "4", 26_704_571_904, 14_664_493_056),
        (LORA, "8", 38_742_912_512, 14_664_886_272),
        (FOUR_BIT, "4", 16_373_838_336, 4_306_496_512),
        (FOUR_BIT, "8", 28_412_178_944, 4_306_889_728),
        ({**FOUR_BIT, "kbit_preparation": "true"}, "4", 20_669_338_112, 4_307_028_992),
        ({**FOUR_BIT, "kbit_preparation": "true"}, "8", 37_002_646_016, 4_307_422_208),
    ],
)
def test_measured_runs(flags: dict[str, str], mbs: str, peak: int, after: int) -> None:
    """Mistral 7B on an A100 in foundation-model-stack's benchmark of fms-acceleration (``scripts/benchmarks/refs``):
    allocated at the peak of training, and after it, with an attention mask that plans do not have."""
    (stage,) = estimate(plan(**MEASURED, **flags, mbs=mbs)).stages
    assert stage.allocated == pytest.approx(peak, rel=3e-5)
    assert stage.static + 8 * int(mbs) * 4096 == pytest.approx(after, abs=100 * 512)


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"versions": "transformers=4.57.1"}, "versions.transformers"),
        ({"attention": "flash_attention_2"}, "attention"),
        ({"recompute": "full", "use_reentrant": "true"}, "recompute.reentrant"),
    ],
)
def test_a_trace_runs_what_is_installed(flags: dict[str, str], field: str) -> None:
    with pytest.raises(PlanError) as caught:
        job_of_plan(plan(**{"seq": "64", "layers": "2", **flags}))
    assert caught.value.field == field


def test_a_trace_follows_adapters_under_autocast() -> None:
    """``tests/trace/test_fits.py`` compares what it finds with recipes."""
    job = job_of_plan(plan(seq="64", layers="2", lora_rank="8", autocast="true"))
    assert job.autocast == "bf16"
    assert job.tuned is not None


def test_masks_of_chunks_of_older_releases() -> None:
    given = {"model": "llama-4-scout", "layers": "2", "seq": "1024", "versions": "transformers=4.57.1"}
    assert estimate(plan(**given, attention="flash")).stages
    with pytest.raises(PlanError, match="masks of chunks of releases before") as caught:
        estimate(plan(**given, attention="eager"))
    assert caught.value.field == "attention"


@pytest.mark.parametrize(
    ("flags", "cudnn"),
    [
        ({"gpu": "h100-80gb"}, True),
        ({"gpu": "b200"}, True),
        ({"gpu": "a100-80gb"}, False),
        ({}, False),
        ({"gpu": "h100-80gb", "torch": "2.10"}, False),
        ({"gpu": "h100-80gb", "dtype": "fp32"}, False),
        ({"gpu": "h100-80gb", "head-dim": "256"}, False),
        ({"gpu": "h100-80gb", "attention-dropout": "0.1"}, False),
        ({"gpu": "h100-80gb", "attention-dropout": "0.125"}, True),
    ],
    ids=str,
)
def test_sdpa_prefers_cudnn(flags: dict[str, str], cudnn: bool) -> None:
    """``check_prefer_cudnn_attention`` and ``can_use_cudnn_attention`` of ``sdp_utils.cpp``."""
    read = read_plan(None, {"model": "llama-3-8b", "seq": "512", "dtype": "bf16"} | flags)
    assert prefers_cudnn(resolve(read.plan)) is cudnn


@pytest.mark.parametrize("framework", ["megatron", "fsdp"])
def test_a_kernel_by_transformers_name_is_not_taken_elsewhere(framework: str) -> None:
    """That of the second release is what other code runs, too, as long as nothing says another."""
    flags = {"model": "llama-3-8b", "framework": framework, "gpus": "8", "tp": "8", "fsdp-code": "torchtitan"}
    flags = {name: value for name, value in flags.items() if framework == "fsdp" or name != "fsdp-code"}
    assert resolve(read_plan(None, {**flags, "attention": "flash_attention_2"}).plan).attention == "flash"
    with pytest.raises(PlanError, match=r"is transformers' name of a kernel.* --flash-attention-release 3 or 4"):
        resolve(read_plan(None, {**flags, "attention": "flash_attention_4"}).plan)
