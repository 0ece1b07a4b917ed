"""``memplan estimate --from torchtitan``: what becomes of a job's configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.measured import plan_of
from memplan.cli import main
from memplan.formats.torchtitan.keys import NEWEST
from memplan.frameworks.fsdp.programs import check_settings
from memplan.plan.resolve import resolve
from memplan.search.space import filled, space_of

from .torchtitan_jobs import (
    DECEMBER_2024,
    RELEASE_0_1,
    RELEASE_0_2,
    SAVED,
    SUMMER_2024,
    Read,
    codes,
    pipelined,
    reader,
    refusal,
    saved,
)


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    return reader(tmp_path, monkeypatch)


# -- releases -----------------------------------------------------------------------------------------


def test_the_measured_job_of_december_2024(read: Read) -> None:
    """The plan behind row torchtitan/llama3.1-8b-fsdp8 of the benchmarks."""
    found = read(DECEMBER_2024, "training.batch_size=2", gpu="h100-96gb")
    row = plan_of(
        None,
        model="llama-3-8b",
        framework="fsdp",
        fsdp_code="torchtitan",
        recompute_per_operator="true",
        gpus=8,
        gpu="h100-96gb",
        dtype="bf16",
        mbs=2,
        gbs=16,
        seq=8192,
    )
    assert resolve(found.plan) == resolve(row)
    assert found.warnings == ()
    (assumed,) = found.assumptions
    assert assumed.startswith("torchtitan of 2025-02-13: the newest code with all keys of the file (which were keys")
    assert (str(found.origins["fsdp.per_operator"]), str(found.origins["batch.seq"])) == ("job.toml:35", "job.toml:17")


def test_before_release_0_1(read: Read) -> None:
    """Every third layer recomputed; Adam decays with a copy, fused by a switch; the norm is December's."""
    plan = read(SUMMER_2024).plan
    assert (plan.model.name, plan.model.vocab, plan.batch.mbs, plan.batch.gbs) == ("llama-2-7b", 32000, 4, 32)
    assert (plan.recompute.mode, plan.fsdp.recompute_every, plan.fsdp.ends_apart) == ("full", 3, False)
    assert (plan.optimizer.name, plan.optimizer.implementation, plan.optimizer.weight_decay) == ("adam", "fused", 0.1)
    assert read(SUMMER_2024.replace("fused = true\n", "")).plan.optimizer.implementation == "foreach"
    assert "recipes-older" not in codes(read(SUMMER_2024))


def test_release_0_1(read: Read) -> None:
    found = read(RELEASE_0_1, gpus="")
    plan = resolve(found.plan)
    assert found.assumptions[0].startswith("torchtitan 0.1.0 (2025-06-17): the newest release with all keys")
    assert (plan.hardware.gpus, plan.layout.dp, plan.fsdp.replicas) == (16, 16, 2)
    assert (plan.batch.mbs, plan.batch.gbs, plan.recompute.mode) == (8, 256, "full")
    assert (plan.fsdp.reshard_after_forward, plan.fsdp.ends_apart) == (False, False)
    assert (plan.optimizer.implementation, codes(found)) == ("foreach", ["recipes-older"])


def test_release_0_2(read: Read) -> None:
    found = read(RELEASE_0_2)
    plan = found.plan
    assert found.assumptions[0].startswith("torchtitan 0.2.2 (2026-02-20)")
    assert (plan.optimizer.implementation, plan.fsdp.parameters, plan.precision.dtype) == ("fused", "bf16", "bf16")
    assert (plan.fsdp.ends_apart, plan.fsdp.per_operator, plan.batch.mbs) == (True, True, 8)
    assert read(RELEASE_0_2, "torchtitan=0.2.0").assumptions[0] == "torchtitan 0.2.0 (2025-10-17): as --set says"
    always = read(RELEASE_0_2, "parallelism.fsdp_reshard_after_forward=always").plan
    assert (plan.fsdp.reshard_root, always.fsdp.reshard_root) == (False, True)


def test_saved_configurations(read: Read) -> None:
    """JSON: release 0.2.2's has the TOML's sections; that of August 2026 counts tokens and names no policy."""
    old = {
        "job": {"save_config_file": "config.json"},
        "model": {"name": "llama3", "flavor": "8B", "converters": [], "tokenizer_path": None},
        "training": {"local_batch_size": 2, "seq_len": 4096, "dataloader": {"num_workers": 0}},
        "activation_checkpoint": {"mode": "none", "early_stop": False},
    }
    found = read(old)
    assert found.assumptions[0].startswith("torchtitan 0.2.2")
    assert (found.plan.recompute.mode, found.plan.batch.mbs, str(found.origins["batch.seq"])) == (
        "none",
        2,
        "job.json:13",
    )
    found = read(SAVED)
    plan = found.plan
    assert found.assumptions[0].startswith(f"torchtitan of {NEWEST}")
    assert (plan.batch.mbs, plan.batch.gbs, plan.batch.seq, plan.recompute.mode) == (2, 16, 8192, "full")
    assert (plan.fsdp.ends_apart, plan.optimizer.name, codes(found)) == (
        True,
        "adamw",
        ["attention-other"],
    )
    selective = saved(activation_checkpoint={"force_recompute_mm_shapes_by_fqns": ["moe.router.gate"]})
    assert read(selective).plan.fsdp.per_operator
    assert read(saved(activation_checkpoint=None)).plan.recompute.mode == "none"
    assert read(saved(loss={"num_chunks": 4, "loss_fn": {}})).plan.loss.kind == "chunked"
    assert read(saved(training={"num_tokens_per_train_step": 65536 * 8})).plan.batch.gbs == 64


def test_debug_models_take_their_vocabulary_from_code_or_tokenizer(read: Read) -> None:
    config = RELEASE_0_2.replace('"8B"', '"debugmodel"')
    model = read(config).plan.model
    assert (model.layers, model.hidden, model.ffn, model.vocab, model.head_dim) == (6, 256, 768, 2048, 16)
    config = DECEMBER_2024.replace('"8B"', '"debugmodel"')
    assert read(config, vocab=2256).plan.model.vocab == 2256
    assert read(config, vocab=2256).plan.model.layers == 8
    own = config.replace("original/tokenizer", "assets/test_tiktoken")
    assert read(own).plan.model.vocab == 2256  # tests/assets/test_tiktoken.model: 2,000 lines, and 256 special tokens
    assert "needs" not in refusal(read, config)
    assert refusal(read, config).endswith(
        "says the vocabulary, and is not read: give its number of tokens as --vocab-size N"
    )


# -- layouts ------------------------------------------------------------------------------------------


def test_pipelines(read: Read) -> None:
    """Embedding and head count as a layer each; micro-batches of one sequence; parameters stay whole."""
    flags = {"model": "llama-3-8b", "recompute": "none"}
    plan = read(pipelined(), **flags).plan
    assert (plan.layout.pp, plan.layout.vpp, plan.pipeline.schedule) == (4, 1, "1f1b")
    assert plan.pipeline.partition == (0, 9, 18, 26, 35)
    assert (plan.batch.mbs, plan.batch.gbs, plan.fsdp.reshard_after_forward) == (1, 16, False)
    assert not plan.fsdp.return_outputs
    plan = read(
        pipelined('pipeline_parallel_schedule = "Interleaved1F1B"', "pipeline_parallel_microbatch_size = 2"), **flags
    ).plan
    assert (plan.layout.vpp, plan.batch.mbs, len(plan.pipeline.partition)) == (2, 2, 9)
    plan = read(pipelined('pipeline_parallel_schedule = "GPipe"'), layers="4", **flags).plan
    assert (plan.pipeline.schedule, plan.pipeline.partition) == ("gpipe", (0, 2, 4, 5, 7))
    plan = read(
        pipelined('module_fqns_per_model_part = [["tok_embeddings"], ["layers.0"], ["layers.1"], ["norm", "output"]]'),
        layers="2",
        **flags,
    ).plan
    assert plan.pipeline.partition == (0, 1, 2, 3, 5)
    assert read(pipelined(), pp="1", **flags).plan.batch.mbs == 8


def test_older_pipelines(read: Read) -> None:
    """December 2024: as many micro-batches as stages in December, embedding and head count as nothing."""
    config = DECEMBER_2024.replace("batch_size = 1", "batch_size = 8").replace(
        "pipeline_parallel_degree = 1", "pipeline_parallel_degree = 4"
    )
    plan = read(config, "torchtitan=2024-12-26").plan
    assert (plan.batch.mbs, plan.batch.gbs, plan.pipeline.partition) == (2, 16, (0, 9, 17, 25, 35))
    assert plan.fsdp.return_outputs, "the last stage kept its logits until October 2025"
    more = config.replace(
        "[checkpoint]", 'pipeline_parallel_split_points = ["layers.2", "layers.9", "norm"]\n[checkpoint]'
    )
    assert read(more, "experimental.pipeline_parallel_microbatches=8").plan.pipeline.partition == (0, 3, 10, 33, 35)


@pytest.mark.parametrize(("release", "kept"), [("0.2.0", True), ("0.2.1", False)])
def test_stages_that_a_flag_asks_for_are_those_of_the_files_release(read: Read, release: str, kept: bool) -> None:
    over = f"torchtitan={release}"
    for found in (read(RELEASE_0_2, over, pp="4"), read(RELEASE_0_2, over, "parallelism.pipeline_parallel_degree=4")):
        given = resolve(found.plan).fsdp
        assert (given.ends_apart, given.return_outputs) == (True, kept)
    assert not read(RELEASE_0_2, over, pp="4", **{"return-outputs": "false"}).plan.fsdp.return_outputs


@pytest.mark.parametrize(("release", "kept"), [("0.2.0", True), ("0.2.1", False)])
def test_stages_that_a_search_tries_are_those_of_the_files_release(read: Read, release: str, kept: bool) -> None:
    """Of a job without stages, whose own estimate has no outputs to keep."""
    plan = read(RELEASE_0_2, f"torchtitan={release}", gpu="h100", gbs="64").plan
    assert not resolve(plan).fsdp.return_outputs
    space = space_of(plan, filled(plan), {"layout.pp": 4})
    given = resolve(space.plan(next(iter(space)))).fsdp
    assert (given.ends_apart, given.return_outputs) == (True, kept)


def test_adam_that_a_flag_asks_for_decays_as_the_job_does(read: Read) -> None:
    """``OptimizersContainer.Config.weight_decay`` is 0.1 by default; AdamW decays in place whatever it is."""
    own = RELEASE_0_2 + "\n[optimizer]\nweight_decay = 0.0\n"
    decays = [read(config, optimizer="adam").plan.optimizer.weight_decay for config in (RELEASE_0_2, own, SAVED)]
    assert decays == [0.1, 0.0, 0.1]
    assert read(RELEASE_0_2, optimizer="adam", **{"weight-decay": "0.2"}).plan.optimizer.weight_decay == 0.2
    assert read(RELEASE_0_2, optimizer="adamw").plan.optimizer.weight_decay is None


def test_a_budget_of_tokens_is_of_the_length_that_a_flag_says(read: Read) -> None:
    """16,384 tokens of a rank and 524,288 of a step, of sequences of 8,192 tokens or of half as many."""
    job = saved(training={"num_tokens_per_train_step": 65536 * 8})
    batches = [read(job, **flags).plan.batch for flags in ({}, {"seq": "4096"})]
    assert [(one.mbs, one.gbs, one.seq) for one in batches] == [(2, 64, 8192), (4, 128, 4096)]


def test_tensor_parallel_ranks_have_their_part_of_the_loss(read: Read) -> None:
    def kind(config: object, *over: str, **flags: str) -> object:
        return read(config, *over, **flags).plan.loss.kind

    assert kind(RELEASE_0_2) is None
    assert kind(RELEASE_0_2, tp="2") == "vocab-parallel"
    assert kind(RELEASE_0_2, "parallelism.disable_loss_parallel=true", tp="2") == "plain"
    assert kind(SUMMER_2024, tp="2") == "vocab-parallel"
    assert kind(SUMMER_2024, "training.enable_loss_parallel=false", tp="2") == "plain"
    assert kind(SAVED, tp="2") == "vocab-parallel"
    assert kind(RELEASE_0_2, tp="2", loss="plain") == "plain"
    whole = saved(parallelism={"enable_sequence_parallel": False})
    assert "sequence_parallel" in read(whole, tp="2").plan.layout.model_fields_set
    assert "sequence_parallel" not in read(whole).plan.layout.model_fields_set


def test_flags_lie_over_the_file(read: Read) -> None:
    plan = read(RELEASE_0_2, mbs="2", seq="512", recompute="full", model="llama-3-70b").plan
    assert (plan.batch.mbs, plan.batch.gbs, plan.batch.seq, plan.model.name) == (2, 16, 512, "llama-3-70b")
    assert (plan.recompute.mode, plan.fsdp.per_operator) == ("full", False)
    assert read(RELEASE_0_2, "NGPU=4", gpus="").plan.batch.gbs == 32
    assert read(saved(activation_checkpoint={"force_recompute_mm_shapes_by_fqns": []}), recompute="none").plan


def test_notes(read: Read) -> None:
    config = RELEASE_0_2.replace("deterministic = false", "deterministic = true")
    config += "\n[checkpoint]\nasync_mode = 'async'\n"
    found = read(config + "[extra]\nmine = 1\n")
    assert codes(found) == ["argument-not-modelled", "argument-unknown", "recipes-older"]
    assert found.warnings[0].message.startswith("debug.deterministic = true (job.toml:26) is not modelled yet")
    config = config.replace("[checkpoint]\n", "[checkpoint]\nenable = true\n")
    assert "a copy of parameters and optimizer states on the host" in read(config).warnings[1].message
    stale = RELEASE_0_2.replace("[training]\n", "[training]\nwarmup_steps = 2\n")
    assert "training.warmup_steps: no keys of torchtitan 0.2.2 (2026-02-20), and left out" in [
        note.message for note in read(stale).warnings
    ]


# -- the command --------------------------------------------------------------------------------------


def test_the_command(read: Read, capsys: pytest.CaptureFixture[str]) -> None:
    read(RELEASE_0_2)
    command = ("estimate", "--from", "torchtitan", "job.toml", "--gpus", "4", "--layers", "2", "--seq", "64")
    assert main((*command, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["fsdp"]["code"] == "torchtitan"
    assert found["assumptions"][0].startswith("torchtitan 0.2.2 (2026-02-20)")
    assert main((*command, "--vary", "mbs=1,2", "--json")) == 0
    variants = json.loads(capsys.readouterr().out)["variants"]
    assert [variant["plan"]["batch"]["gbs"] for variant in variants] == [4, 8]
    assert main((*command, "--explain-args", "--json")) == 0
    explained = {row["argument"]: row for row in json.loads(capsys.readouterr().out)["arguments"]}
    assert explained["training.local_batch_size"]["became"] == "batch.mbs"
    assert explained["training.dtype"]["became"] == "fsdp.parameters = bf16"
    assert explained["compile.enable"]["became"] == "fsdp.compile = false"


def test_compiled_jobs(read: Read) -> None:
    """Layers and loss are parts (``compile.components``); before April 2025 the loss was not compiled. --compile asks
    for what ``compile.enable`` does."""

    def parts(text: str, *settings: str, **flags: str) -> tuple[bool, bool]:
        given = read(text, *settings, **flags).plan.fsdp
        return given.compile, given.compile_loss

    on = "compile.enable=true"
    assert parts(RELEASE_0_2) == (False, False)
    assert parts(RELEASE_0_2, on) == (True, True)
    assert parts(RELEASE_0_2, on, "compile.components=loss") == (False, True)
    assert parts(DECEMBER_2024, "training.compile=true") == (True, False)
    assert parts(RELEASE_0_2, compile="true") == (True, True)
    assert parts(RELEASE_0_2, "compile.components=model", compile="true") == (True, False)
    assert parts(RELEASE_0_2, on, compile="false") == (False, True)
    assert parts(DECEMBER_2024, compile="true") == (True, False)


def test_the_default_optimizer_runs_on_the_host(read: Read) -> None:
    """PyTorch's fused AdamW has a kernel for CPUs (``_get_fused_kernels_supported_devices``)."""
    plan = resolve(read(RELEASE_0_2, "training.enable_cpu_offload=true").plan)
    check_settings(plan, plan.fsdp)
    assert (plan.fsdp.offload, plan.optimizer.implementation) == (True, "fused")


def test_float8(read: Read) -> None:
    """Of linear layers; what is not modelled is refused."""

    def fp8(*settings: str) -> str | None:
        return read(RELEASE_0_2, *settings).plan.precision.fp8

    on, converter = "compile.enable=true", "model.converters=quantize.linear.float8"
    head = "quantize.linear.float8.filter_fqns=output"
    assert fp8(on, converter, head) == "tensorwise"
    assert fp8(converter, head, "quantize.linear.float8.recipe_name=rowwise") == "rowwise"
    assert fp8(converter, head) == "tensorwise"
    for settings in (
        (converter, head, "quantize.linear.float8.emulate=true"),
        ("model.converters=quantize.linear.float8,quantize.grouped_mm.float8",),
        ("model.converters=quantize.linear.mx",),
    ):
        assert "torchao's float8, MXFP8 or NVFP4 of linear layers is the only converter" in refusal(
            read, RELEASE_0_2, *settings
        )
    own = "quantize.linear.float8"
    gathers = (f"{own}.enable_fsdp_float8_all_gather=true", f"{own}.precompute_float8_dynamic_scale_for_fsdp=true")
    given = read(RELEASE_0_2, converter, f"{own}.filter_fqns=output,auto_filter_small_kn", *gathers).plan.fsdp
    assert (given.filter_fqns, given.filters_small) == (("output", "auto_filter_small_kn"), True)
    assert (given.float8_all_gather, given.float8_scales) == (True, True)
    assert read(RELEASE_0_2.replace('filter_fqns = ["output"]', ""), converter).plan.fsdp.filter_fqns == ()
    old = read(DECEMBER_2024, "float8.enable_float8_linear=true").plan
    assert (old.precision.fp8, old.fsdp.filter_fqns) == ("tensorwise", None)
    delayed = ("float8.enable_float8_linear=true", "float8.scaling_type_input=delayed")
    assert "float8.enable_float8_linear = true: is not modelled" in refusal(read, DECEMBER_2024, *delayed)
    assert read(SUMMER_2024, "training.fp8_linear=false", "torchtitan=2024-07-15").warnings == ()


# -- scripts ------------------------------------------------------------------------------------------


BY_TORCHRUN = """\
#!/bin/bash
NGPU=${NGPU:-"8"}
CONFIG_FILE=${CONFIG_FILE:-"./train.toml"}
torchrun --nproc_per_node=${NGPU} --rdzv_backend c10d -m torchtitan.train --job.config_file ${CONFIG_FILE} "$@"
"""


def quiet(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["estimate", *words, "--gpu=b200", "-q"])
    told = capsys.readouterr()
    return code, told.out + told.err


def test_a_script_that_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.toml").write_text(RELEASE_0_2)
    Path("run.sh").write_text("NGPU=8 CONFIG_FILE=./train.toml ./run_train.sh\n")
    Path("torchrun.sh").write_text(BY_TORCHRUN)
    Path("shorter.sh").write_text("CONFIG_FILE=train.toml ./run_train.sh --training.seq_len 1024\n")
    said = quiet(capsys, "train.toml", "--gpus=8")
    assert said[0] == 1  # 70B on 8 GPUs
    assert quiet(capsys, "run.sh") == said
    assert quiet(capsys, "torchrun.sh") == said
    Path("beside.sh").write_text('NGPU=8 CONFIG_FILE=${CONFIG_FILE:-"$(dirname "$0")/train.toml"} ./run_train.sh\n')
    assert quiet(capsys, "beside.sh") == said
    assert quiet(capsys, "torchrun.sh", "--gpus=4") == quiet(capsys, "train.toml", "--gpus=4")
    assert quiet(capsys, "torchrun.sh", "--set", "NGPU=4") == quiet(capsys, "train.toml", "--gpus=4")
    shorter = quiet(capsys, "train.toml", "--gpus=8", "--set", "training.seq_len=1024")
    assert quiet(capsys, "shorter.sh", "--gpus=8") == shorter
    assert shorter != said


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("NGPU=8 CONFIG_FILE=none.toml ./run_train.sh", "none.toml: no such file"),
        ("NGPU=8 CONFIG_FILE=$X ./run_train.sh", "run.sh:1: names no configuration that is known: MODULE and CONFIG"),
        (
            "NGPU=8 ./run_train.sh --module llama3 --config llama3_8b",
            "run.sh:1: --module = llama3: is in torchtitan/models",
        ),
        ("NGPU=8 CONFIG_FILE=train.toml ./run_train.sh --training.seqlen 8", "did you mean training.seq_len?"),
        (
            "NGPU=8 CONFIG_FILE=train.toml ./run_train.sh --training.seq_len $L",
            "--training.seq_len: is needed, and $L is not set",
        ),
    ],
)
def test_a_script_that_cannot_be_read(
    script: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.toml").write_text(RELEASE_0_2)
    Path("run.sh").write_text(f"{script}\n")
    code, told = quiet(capsys, "run.sh")
    assert (code, told.count("\n")) == (2, 1)
    assert line in told
