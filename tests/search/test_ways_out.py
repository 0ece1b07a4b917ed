"""Ways out of plans that do not fit, against the estimates of the changed plans."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from memplan.cli import main
from memplan.device.measured import NOTHING
from memplan.estimate import estimate
from memplan.plan.read import read_plan
from memplan.result import Verdict
from memplan.search.changes import proposals, stated
from memplan.search.point import changed
from memplan.search.ways_out import WAYS, ways_out
from memplan.values import replace

TOO_LARGE: dict[str, tuple[str | None, dict[str, str]]] = {
    "a pipeline": ("bigscience-104b-250k", {"mbs": "8"}),
    "fsdp": ("llama-3-8b-8gpu", {"mbs": "4"}),
    "ddp": (None, {"model": "llama-3-8b", "framework": "ddp", "gpus": "8", "gpu": "h100"}),
    "megatron": (None, {"model": "llama-3-8b", "framework": "megatron", "gpus": "8", "gpu": "h100", "mbs": "4"}),
    "fine-tuning": (None, {"model": "llama-3-8b", "gpu": "rtx-4090", "trainer": "transformers"}),
    "evaluation": (
        None,
        {"model": "gpt2-large", "gpu": "a100-40gb", "trainer": "transformers", "eval-mbs": "256", "seq": "1024"},
    ),
    "deepspeed": (None, {"model": "llama-3-8b", "framework": "deepspeed", "gpus": "4", "gpu": "a100-40gb"}),
    "tensor parallel": (
        None,
        {
            **{"model": "mistral-7b", "framework": "megatron", "gpus": "8", "gpu": "a100-40gb"},
            **{"tp": "2", "seq": "8192"},
        },
    ),
    "adapters": (
        None,
        {
            **{"model": "qwen3-8b", "framework": "fsdp", "gpus": "4", "gpu": "l40s", "mbs": "8", "seq": "2048"},
            **{"lora-rank": "16"},
        },
    ),
    "adapters in stages": (
        None,
        {
            **{
                "model": "llama-3-8b",
                "layers": "4",
                "framework": "megatron",
                "gpu": "a100-40gb",
                "gpus": "2",
                "pp": "2",
            },
            **{"mbs": "8", "gbs": "64", "seq": "8192", "lora-rank": "16"},
        },
    ),
    "no recipe": (None, {"model": "phi-2", "gpu": "rtx-4090", "seq": "2048"}),
    "no recipe, sharded": (
        None,
        {"model": "olmo-7b", "framework": "fsdp", "gpus": "4", "gpu": "a100-40gb", "mbs": "2"},
    ),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_is_named_fits(name: str) -> None:
    """Each is what the estimate of the changed plan says, retries included, and a step trains on as much: one of half
    the sequences would take half the time. One of them at least needs no retry."""
    plan = read_plan(*TOO_LARGE[name], traced=True).plan
    whole = estimate(plan)
    assert whole.fits is False
    ways = ways_out(plan, whole, NOTHING)
    assert 0 < len(ways) <= WAYS
    assert all(way.fits for way in ways)
    for way in ways:
        after = estimate(changed(plan, dict(way.fields)))
        assert after.plan.batch.gbs == whole.plan.batch.gbs, way.what
        assert after.judged == way.judged, way.what
        assert way.gained > 0
        assert way.needs == after.peak + after.worst[1], way.what
    assert any(not way.judged.retries for way in ways)
    assert len({way.what for way in ways}) == len(ways)
    slower = [way.slower for way in ways if not way.costs and way.slower is not None and not way.judged.retries]
    assert slower == sorted(slower)


def test_a_long_sequence_needs_no_mask() -> None:
    """The first stage of Llama 3.1 70B holds a mask of 131,072 x 131,072 bytes, 16 GiB; its attention does not read it,
    so nothing is slower without."""
    flags = {"model": "llama-3.1-70b", "framework": "megatron", "gpu": "h100-80gb", "gpus": "256", "seq": "131072"}
    sizes = {"tp": "8", "cp": "8", "pp": "4", "gbs": "8", "zero": "1", "sequence-parallel": "true"}
    plan = read_plan(None, {**flags, **sizes, "cross-entropy-fusion": "te"}).plan
    way = ways_out(plan, estimate(plan), NOTHING)[0]
    assert (way.what, way.fits) == ("no attention mask", True)
    assert way.gained >= 16 << 30
    assert estimate(changed(plan, dict(way.fields))).judged == way.judged


def test_another_gpu_is_a_way_out_where_nothing_else_is() -> None:
    """It is judged by its own memory: a layer's fp32 scores alone are more than a V100 has left beside the states."""
    flags = {"model": "mistral-7b", "framework": "megatron", "gpu": "v100-32gb", "gpus": "2", "tp": "2", "seq": "4096"}
    plan = read_plan(None, {**flags, "mbs": "2", "gbs": "2"}).plan
    *others, way = ways_out(plan, estimate(plan), NOTHING)
    assert not any(other.fits or "hardware.gpu" in dict(other.fields) for other in others)
    assert (way.what, way.fits) == ("h200", True)
    after = estimate(changed(plan, dict(way.fields)))
    assert after.judged.verdict is Verdict.FITS
    assert way.needs == after.peak


@pytest.mark.parametrize(
    "flags",
    [
        {"model": "llama-3-405b", "framework": "megatron", "gpu": "rtx-4090", "seq": "1024"},
        {"model": "qwen2.5-72b", "framework": "ddp", "gpu": "rtx-3060", "seq": "2048"},
    ],
)
def test_what_is_not_enough_needs_what_its_estimate_says(flags: dict[str, str]) -> None:
    """The blocks that the allocator keeps in its cache, too: a change can fill them or leave them."""
    plan = read_plan(None, {"layers": "4", "gpus": "2", **flags}).plan
    whole = estimate(plan)
    ways = ways_out(plan, whole, NOTHING)
    assert ways
    assert not any(way.fits for way in ways)
    for way in ways:
        assert way.needs == pytest.approx(estimate(changed(plan, dict(way.fields))).peak, rel=3e-4), way.what
        assert way.gained == whole.peak - way.needs
    assert [way.needs for way in ways] == sorted(way.needs for way in ways)


def test_what_gains_most_is_replayed_after_cheaper_ones_that_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many that were: what fits is not called too large (Qwen3 8B on 512 H800, of whose ways five were not
    enough and full recompute was)."""
    monkeypatch.setattr("memplan.search.ways_out.MOST_REPLAYED", 0)
    plan = read_plan(None, {"model": "gpt2", "gpu": "rtx-3060", "seq": "1024", "mbs": "64", "layers": "4"}).plan
    ways = ways_out(plan, estimate(plan), NOTHING)
    assert ways
    for way in ways:
        after = estimate(changed(plan, dict(way.fields)))
        assert way.fits
        assert after.judged.verdict is Verdict.FITS


@pytest.mark.parametrize(
    ("flags", "what", "dearer"),
    [
        (
            {"model": "llama-3-8b", "gpu": "a100-40gb", "gpus": "8", "tp": "2", "pp": "2", "mbs": "4", "seq": "4096"},
            "micro-batch 4 → 1 and distributed optimizer",
            {"layout.tp": 4, "recompute.mode": "selective", "recompute.modules": ("mlp",)},
        ),
        (
            {"model": "llama-3-70b", "gpu": "h100", "gpus": "32", "tp": "8", "pp": "2", "mbs": "2", "gbs": "64"},
            "sequence parallelism and distributed optimizer",
            {"recompute.mode": "full", "layout.zero": 1},
        ),
        (
            {"model": "qwen3-30b-a3b", "gpu": "h100", "gpus": "16", "ep": "8", "mbs": "2", "gbs": "64"},
            "distributed optimizer, pp 1 → 2 and full recompute of 6 of 48 layers",
            {"layout.tp": 2, "layout.dp": None, "layout.sequence_parallel": True, "layout.zero": 1},
        ),
    ],
)
def test_what_costs_little_is_added_up(flags: dict[str, str], what: str, dearer: dict[str, object]) -> None:
    """Changes that are not enough alone, nor without any one of them, come before a ``dearer`` one that is: what gains
    most, with one change on top."""
    plan = read_plan(None, {"framework": "megatron", "seq": "4096", **flags}).plan
    whole = estimate(plan)
    way = ways_out(plan, whole, NOTHING)[0]
    assert (way.what, way.fits, way.costs) == (what, True, "")
    assert estimate(changed(plan, dict(way.fields))).judged.verdict is Verdict.FITS
    given = replace(stated(plan), estimate=whole)
    of_it = [one for one in proposals(given, 1 << 60) if dict(way.fields).items() >= one.fields.items()]
    assert len(of_it) == what.count(",") + 2
    for left_out in of_it:
        rest = {path: value for one in of_it if one != left_out for path, value in one.fields.items()}
        assert estimate(changed(plan, rest)).judged.verdict is not Verdict.FITS
    other = changed(plan, {"batch.gbs": whole.plan.batch.gbs, **dearer})
    assert estimate(other).fits
    assert way.slower is not None
    assert stated(other).seconds > given.seconds * (1 + way.slower) * 1.05


def test_what_fits_with_retries_alone_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama 3 8B with 9,000 tokens on 8 A100 does not run. With Liger's loss it does, if the allocator gives cached
    memory back at first; with expandable segments beside that, which cost nothing, it need not: own estimates of the
    plan with the flags that are printed say the same."""
    words = ["--model", "llama-3-8b", "--framework", "fsdp", "--gpu", "a100-80gb", "--gpus", "8", "--seq", "9000"]
    assert main(["estimate", *words, "--mbs", "1", "--json"]) == 1
    ways = {way["change"]: way for way in json.loads(capsys.readouterr().out)["ways_out"]}
    assert ways.keys() == {"Liger's fused loss and expandable segments", "full recompute", "Liger's fused loss"}
    assert [way["verdict"] for way in ways.values()] == ["fits", "fits", "fits-with-retries"]
    for way in ways.values():
        assert main(["estimate", *words, "--mbs", "1", *shlex.split(way["flags"]), "--json"]) == 0
        after = json.loads(capsys.readouterr().out)
        found = [after[key] for key in ("verdict", "retries_per_iteration", "peak_bytes")]
        assert found == [way[key] for key in ("verdict", "retries_per_iteration", "peak_bytes")]
    assert main(["estimate", *words, "--mbs", "1"]) == 1
    told = capsys.readouterr().out
    assert "fits with retries at" in told
    assert all(f"\n  {way['flags']}\n" in told for way in ways.values())


def test_a_way_keeps_a_framework_that_nobody_named(capsys: pytest.CaptureFixture[str]) -> None:
    """``--zero 1`` beside ``--tp 8`` means Megatron-DeepSpeed, which has a recipe of GPT-3, too: its attention keeps
    all scores."""
    words = ["--model", "gpt3-175b", "--layers", "38", "--tp", "8", "--pp", "2", "--gpus", "64", "--gpu", "a100-80gb"]
    assert main(["estimate", *words, "--json"]) == 1
    given = json.loads(capsys.readouterr().out)
    assert given["plan"]["framework"] == "megatron"
    assert [way["flags"] for way in given["ways_out"] if "--zero" in way["flags"]] == ["--framework megatron --zero 1"]
    for way in given["ways_out"]:
        main(["estimate", *words, *shlex.split(way["flags"]), "--json"])
        after = json.loads(capsys.readouterr().out)
        assert (after["plan"]["framework"], after["verdict"]) == ("megatron", way["verdict"])
    assert main(["explain", "CUDA out of memory. Tried to allocate 9.00 GiB", *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [way["flags"] for way in told["ways_out"]] == [way["flags"] for way in given["ways_out"]]


def test_layers_around_experts_are_divided_where_those_fill_the_ranks() -> None:
    """Megatron-Core takes EP x ETP that divides TP x CP x DP (``parallel_state.py``): with EP 8 on 8 GPUs an expert
    stays whole, which it does not by default beside TP 2."""
    flags = {"model": "qwen3-30b-a3b", "framework": "megatron", "gpu": "h100-80gb", "gpus": "8", "ep": "8"}
    plan = read_plan(None, {**flags, "seq": "4096"}).plan
    (way,) = ways_out(plan, estimate(plan), NOTHING)
    fields = dict(way.fields)
    assert (way.fits, fields["layout.tp"], fields["layout.etp"]) == (True, 2, 1)
    assert estimate(changed(plan, fields)).judged == way.judged


def test_what_ends_no_retry_is_not_added_to_what_runs() -> None:
    """DeepSeek V3 on 512 H100 runs with full recompute and twice the expert ranks, two retries an iteration; a loss in
    chunks beside that leaves two, and expandable segments one, which is cheaper."""
    flags = {"model": "deepseek-v3", "framework": "fsdp", "fsdp-code": "torchtitan", "gpu": "h100"}
    plan = read_plan(None, {**flags, "gpus": "512", "ep": "8", "pp": "8"}).plan
    first, second = ways_out(plan, estimate(plan), NOTHING)
    assert second.what == "full recompute and ep 8 → 16"
    assert first.what == "full recompute, ep 8 → 16 and expandable segments"
    assert [way.judged.retries_in_iteration for way in (first, second)] == [1, 2]
    assert first.slower == second.slower


def test_no_more_is_changed_than_is_enough() -> None:
    """GPT-2 XL with 32 sequences on A100 of 40 GB: half of them, and half of these, do not fit; an eighth does, so that
    nobody is told to take one. Under Megatron-Core as few eighths of the layers are recomputed as make it fit."""
    flags = {"model": "gpt2-xl", "framework": "ddp", "gpus": "8", "gpu": "a100-40gb", "mbs": "32", "seq": "1024"}
    plan = read_plan(None, flags).plan
    ways = {way.what for way in ways_out(plan, estimate(plan), NOTHING)}
    fitting = [
        size
        for size in (16, 8, 4, 2, 1)
        if estimate(read_plan(None, {**flags, "mbs": str(size), "gbs": "256"}).plan).fits
    ]
    assert f"micro-batch 32 → {fitting[0]}" in ways
    assert not any(f"micro-batch 32 → {size}" in ways for size in fitting[1:])
    flags = {"model": "llama-3-8b", "framework": "megatron", "gpus": "2", "gpu": "h100", "layers": "24", "tp": "2"}
    plan = read_plan(None, {**flags, "seq": "16384", "sequence-parallel": "true"}).plan
    (way,) = (way for way in ways_out(plan, estimate(plan), NOTHING) if "recompute" in way.what)
    fields = dict(way.fields)
    assert estimate(changed(plan, fields)).judged.verdict is Verdict.FITS
    less = {**fields, "recompute.layers": fields["recompute.layers"] - 3}
    if not less["recompute.layers"]:
        less = {path: value for path, value in fields.items() if not path.startswith("recompute.")}
    assert estimate(changed(plan, less)).judged.verdict is not Verdict.FITS


def test_nothing_is_added_to_what_is_enough() -> None:
    """Granite 8B under DeepSpeed without ZeRO: each stage of it is enough, and the cheapest is named. Another stage
    with half of the micro-batch is no way beside it."""
    flags = {"model": "granite-3.1-8b", "framework": "deepspeed", "gpus": "6", "gpu": "h200", "gbs": "48", "mbs": "4"}
    plan = read_plan(None, {**flags, "seq": "2048", "zero": "0"}).plan
    for zero in ("1", "2", "3"):
        assert estimate(read_plan(None, {**flags, "seq": "2048", "zero": zero}).plan).fits
    named = [way.what for way in ways_out(plan, estimate(plan), NOTHING)]
    assert named == ["ZeRO-1"]


def test_what_fits_with_retries_has_ways_that_end_them() -> None:
    plan = read_plan("llama-3-8b-8gpu", {"mbs": "1", "seq": "7800"}).plan
    whole = estimate(plan)
    ways = ways_out(plan, whole, NOTHING)
    assert whole.fits
    assert whole.judged.verdict is Verdict.RETRIES
    assert ways
    assert all(way.fits and not way.judged.retries for way in ways)


def test_expandable_segments_are_a_way_out_where_the_cache_is_in_the_way() -> None:
    """They make no tensor smaller and cost no time: what they gain is what the allocator keeps in pieces, and the plan
    with them needs no retry."""
    flags = {"mbs": "1", "gbs": "64", "loss": "liger", "headroom": "2%"}
    plan = read_plan("llama-3-8b-8gpu", flags).plan
    whole = estimate(plan)
    assert whole.judged.verdict is Verdict.RETRIES
    way, *_ = ways_out(plan, whole, NOTHING)
    assert (way.what, way.slower, way.costs) == ("expandable segments", 0, "")
    assert way.flags == "--env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    after = estimate(read_plan("llama-3-8b-8gpu", {**flags, "env": way.flags.split()[1]}).plan)
    assert after.judged.verdict is Verdict.FITS
    assert after.judged == way.judged
    assert after.stages[0].requested == whole.stages[0].requested
    assert way.gained == whole.peak - after.peak


def test_a_pipeline_over_nodes_whose_network_nobody_has_published_has_ways_out() -> None:
    """The changes of its cut are ranked, too, as on another network."""
    flags = {"model": "gpt2", "framework": "megatron", "gpus": "16", "pp": "2", "gpu": "rtx-3090", "seq": "1024"}
    plan = read_plan(None, {**flags, "mbs": "64", "gbs": "512", "layers": "4"}).plan
    ways = ways_out(plan, estimate(plan), NOTHING)
    assert ways
    assert all(way.slower is None for way in ways)


def test_beside_an_unknown_context_a_way_out_may_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """As its own estimate says, which has no verdict; and the message is that of PyTorch for such GPUs."""
    words = ["estimate", "--model", "pythia-12b", "--framework", "device-map", "--gpus", "2", "--gpu", "mi250x"]
    words += ["--layers", "8", "--mbs", "24"]
    assert main(words) == 1
    shown = capsys.readouterr().out
    assert "may fit" in shown
    assert "HIP out of memory" in shown
    assert main([*words, "--json"]) == 1
    assert {way["fits"] for way in json.loads(capsys.readouterr().out)["ways_out"]} == {None}


def test_what_changes_training_says_so() -> None:
    plan = read_plan(*TOO_LARGE["fine-tuning"]).plan
    (way, *_) = ways_out(plan, estimate(plan), NOTHING)
    assert way.what == "QLoRA and full recompute"
    assert way.costs == "only adapters of rank 16 are trained, on weights of 4 bits"


def test_fine_tuning_on_a_small_card_has_adapters() -> None:
    """On one GPU without the Trainer, too; nobody is told to fine-tune who trains on more; Megatron has none."""
    for flags in ({}, {"framework": "ddp", "gpus": "2", "trainer": "transformers", "autocast": "true"}):
        plan = read_plan(None, {"model": "llama-3-8b", "gpu": "rtx-4090", "seq": "2048", **flags}).plan
        ways = ways_out(plan, estimate(plan), NOTHING)
        assert any("QLoRA" in way.what and way.fits for way in ways)
        assert all("only adapters of rank 16" in way.costs for way in ways if "LoRA" in way.what)
    plan = read_plan(None, {"model": "phi-4", "gpu": "a40", "seq": "1024"}).plan
    (way, *_) = (one for one in ways_out(plan, estimate(plan), NOTHING) if "LoRA" in one.what)
    assert dict(way.fields)["lora.targets"] == ("all-linear",)
    assert "(--lora-targets all-linear)" in way.costs
    for flags in ({"framework": "megatron"}, {"framework": "fsdp", "gpus": "2"}):
        plan = read_plan(None, {"model": "llama-3-8b", "gpu": "rtx-4090", "seq": "2048", **flags}).plan
        assert not any("LoRA" in way.what for way in ways_out(plan, estimate(plan), NOTHING))


def test_who_trains_weights_is_told_of_recompute_before_adapters() -> None:
    """Recompute runs a forward pass again, about a third of a step, and trains the same."""
    plan = read_plan(None, {"model": "gemma-2-9b", "gpu": "h200"}).plan
    found = [way.what for way in ways_out(plan, estimate(plan), NOTHING)]
    assert found[0] == "full recompute"
    assert any("LoRA" in what for what in found[1:])


def test_what_ddp_cannot_hold_is_for_frameworks_that_shard() -> None:
    flags = {"model": "llama-3-8b", "gpu": "h100", "gpus": "8", "framework": "ddp", "recompute": "full"}
    plan = read_plan(None, {**flags, "trainer": "transformers", "autocast": "true", "autocast-parameters": "fp32"}).plan
    named = [way.what for way in ways_out(plan, estimate(plan), NOTHING)]
    assert {"framework fsdp", "framework deepspeed, ZeRO-2"} <= {*named}
    alone = read_plan(None, {**flags, "gpus": "1"}).plan
    assert not any("framework" in way.what for way in ways_out(alone, estimate(alone), NOTHING))


def test_another_framework_runs_the_same_trainer() -> None:
    """A loss of pairs and its reference model are the job's: without them a plan fits for another reason.
    LLaMA-Factory's loss is modelled in no framework that shards."""
    flags = {"model": "llama-3.2-3b", "gpu": "a100-40gb", "gpus": "8", "mbs": "4", "seq": "1024", "recompute": "full"}
    flags |= {"autocast": "true", "autocast-parameters": "fp32", "framework": "ddp"}
    plan = read_plan(None, {**flags, "trainer": "dpo"}).plan
    found = [way for way in ways_out(plan, estimate(plan), NOTHING) if way.what.startswith("framework")]
    assert {"framework fsdp", "framework deepspeed, ZeRO-3"} <= {way.what for way in found}
    assert all("trainer.loop" not in dict(way.fields) for way in found)
    other = read_plan(None, {**flags, "trainer": "llama-factory-dpo"}).plan
    assert not any(way.what.startswith("framework") for way in ways_out(other, estimate(other), NOTHING))


def test_evaluation_has_its_own() -> None:
    plan = read_plan(*TOO_LARGE["evaluation"]).plan
    ways = ways_out(plan, estimate(plan), NOTHING)
    assert ways[0].what.startswith("evaluation batch 256 → ")
    assert ways[0].slower == 0


def test_a_job_need_not_evaluate() -> None:
    """65,536 tokens of 128,256 logits in fp32, 31.3 GiB twice, are evaluation's: Liger's loss trains without them."""
    flags = {"model": "llama-3-8b", "layers": "2", "framework": "fsdp", "gpus": "2", "gpu": "h100", "seq": "65536"}
    plan = read_plan(None, {**flags, "mbs": "1", "recompute": "full", "loss": "liger"}).plan
    (way,) = [one for one in ways_out(plan, estimate(plan), NOTHING) if one.what == "no evaluation"]
    assert (way.flags, way.fits, way.slower) == ("--eval-mbs 0", True, 0)
    after = estimate(changed(plan, dict(way.fields)))
    assert (after.judged.verdict, after.worst[0]) == (Verdict.FITS, "steady")
    assert way.needs == after.peak
    assert way.gained > 31 << 30
    (said,) = [notice.message for notice in after.warnings if notice.code == "evaluation-exceeds-steady"]
    assert said.endswith("the verdict leaves evaluation out, because the plan has none")


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (
            {"model": "llama-3-70b", "tp": "4", "gpus": "64", "gpu": "b200", "seq": "32768", "gbs": "128"},
            "distributed optimizer and tp 4 → 8",
        ),
        (
            {"model": "gpt3-175b", "tp": "8", "pp": "8", "gpus": "64", "gpu": "a100-40gb", "seq": "2048", "gbs": "64"},
            "full recompute and pp 8 → 16 on 128 GPUs",
        ),
    ],
)
def test_models_of_many_layers_have_ways_together(flags: dict[str, str], what: str) -> None:
    """80 layers left so few folds that pairs were not tried; and one replica cannot give half of itself to a model:
    175 billion parameters with 18 bytes each on 64 GPUs are 45.8 GiB of 39.4, whatever is recomputed."""
    plan = read_plan(None, {"framework": "megatron", **flags}).plan
    ways = {way.what: way for way in ways_out(plan, estimate(plan), NOTHING)}
    assert ways[what].fits
    assert ways[what].costs == ("twice the GPUs" if "128 GPUs" in what else "")
    assert estimate(changed(plan, dict(ways[what].fields))).judged.verdict is Verdict.FITS


def test_where_none_is_enough_the_most_that_is_gained_is_named() -> None:
    plan = read_plan(None, {"model": "llama-3-70b", "gpu": "rtx-4090", "seq": "8192"}).plan
    ways = ways_out(plan, estimate(plan), NOTHING)
    assert ways
    assert not any(way.fits for way in ways)
    assert [way.gained for way in ways] == sorted((way.gained for way in ways), reverse=True)


def test_of_a_plan_that_fits_there_are_none() -> None:
    plan = read_plan("llama-3-8b-8gpu", {"mbs": "1", "recompute": "full"}).plan
    whole = estimate(plan)
    assert whole.fits
    assert ways_out(plan, whole, NOTHING) == ()


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["estimate", "bigscience-104b-250k", "--mbs=8", *words])
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, captured.out


@pytest.mark.parametrize("flag", ["", "-v"])
def test_the_report_ends_with_them(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = answer(capsys, *([flag] if flag else []))
    assert code == 1
    *_, last = out.split("Changes that help")
    assert "micro-batch 8 → " in last
    assert out.endswith("memplan suggest-partition searches all layouts.\n")


def test_in_json_and_not_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = answer(capsys, "--json")
    found: list[dict[str, Any]] = json.loads(out)["ways_out"]
    assert code == 1
    assert found[0]["fits"] is True
    assert found[0]["fields"]["batch.mbs"] < 8
    assert answer(capsys, "-q")[1].count("\n") == 1
