"""``memplan estimate --from torchtitan``: jobs of several releases, as their configurations are written."""

# ruff: noqa: E501 (tables of configurations and the lines that they get)

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.measured import plan_of
from memplan.cli import main
from memplan.commands.launched import LaunchFlags, launched_plan, read_launched
from memplan.plan.errors import Origin, PlanError
from memplan.plan.launch.torchtitan_file import parse_toml
from memplan.plan.launch.torchtitan_keys import NEWEST, Era, era_of, key_of, keys
from memplan.plan.launch.torchtitan_pipeline import stages
from memplan.plan.launch.torchtitan_settings import Settings
from memplan.plan.node import Node
from memplan.plan.read import ReadPlan
from memplan.plan.resolve import resolve

DECEMBER_2024 = """
[job]
description = "8B"  # as the preset of commit 9dec370

[model]
name = "llama3"
flavor = "8B"
norm_type = "rmsnorm"
tokenizer_path = "./tokenizer/original/tokenizer.model"

[optimizer]
name = "AdamW"
lr = 3e-4

[training]
batch_size = 1
seq_len = 8192
max_norm = 1.0
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
compile = false

[experimental]
context_parallel_degree = 1
pipeline_parallel_degree = 1

[checkpoint]
enable_checkpoint = false
interval_type = "steps"
async_mode = "disabled"

[activation_checkpoint]
mode = 'selective'
selective_ac_option = 'op'

[float8]
enable_float8_linear = false
"""

SUMMER_2024 = """
[model]
name = "llama2"
flavor = "7B"
[optimizer]
name = "Adam"
fused = true
[training]
batch_size = 4
seq_len = 4096
data_parallel_degree = -1
tensor_parallel_degree = 1
enable_loss_parallel = true
[experimental]
pipeline_parallel_degree = 1
[activation_checkpoint]
mode = "selective"
selective_ac_option = "3"
"""

RELEASE_0_1 = """
[model]
name = "llama3"
flavor = "70B"
tokenizer_path = "./assets/tokenizer/original/tokenizer.model"
[optimizer]
name = "AdamW"
implementation = "foreach"
[lr_scheduler]
lr_min = 0.0
[training]
local_batch_size = 8
global_batch_size = 256
seq_len = 8192
mixed_precision_param = "bfloat16"
compile = false
[parallelism]
data_parallel_shard_degree = 8
data_parallel_replicate_degree = 2
fsdp_reshard_after_forward = "never"
[activation_checkpoint]
mode = "full"
[checkpoint]
last_save_model_weights_only = false
"""

RELEASE_0_2 = """
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
converters = []
[training]
local_batch_size = 8
seq_len = 8192
dtype = "bfloat16"
enable_cpu_offload = false
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
pipeline_parallel_schedule = "1F1B"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = false
components = ["model", "loss"]
[quantize.linear.float8]
filter_fqns = ["output"]
[debug]
deterministic = false
"""

SAVED: dict[str, Any] = {
    "model_spec": {
        "name": "llama3",
        "flavor": "8B",
        "model": {"dim": 4096, "vocab_size": 128256, "layers": [{"w": None}] * 32, "enable_weight_tying": False},
    },
    "dump_folder": "./outputs",
    "tokenizer": {},
    "dataloader": {"dataset": {"source": {"path": "c4"}}, "seed": 42},
    "optimizer": {
        "param_groups": [
            {"pattern": ".*", "optimizer_name": "AdamW", "optimizer_kwargs": {"lr": 3e-4, "weight_decay": 0.1}}
        ],
        "implementation": "fused",
        "optimizer_factory_kwargs_by_name": {},
    },
    "training": {
        "num_tokens_per_microbatch_per_dp_rank": 16384,
        "num_tokens_per_train_step": -1,
        "max_context_length": 8192,
        "disable_cuda_graphs": True,
        "dtype": "float32",
    },
    "parallelism": {"data_parallel_shard_degree": -1, "spmd_backend": "spmd_types", "pipeline_parallel_degree": 1},
    "activation_checkpoint": {"preserve_rng_state": True, "determinism_check": "default", "debug": False},
    "compile": {"enable": False, "components": ["model", "loss"]},
    "override": {"imports": []},
}
"""The shape of what ``Trainer.Config.to_dict`` writes on 21 August 2026, with full recompute."""

Read = Callable[..., ReadPlan]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Reads a configuration with flags; ``over`` as ``--set``."""
    monkeypatch.chdir(tmp_path)

    def read(config: object, *over: str, strict: bool = False, vocab: int | None = None, **flags: str) -> ReadPlan:
        text = config if isinstance(config, str) else json.dumps(config, indent=1)
        name = "job.toml" if isinstance(config, str) else "job.json"
        (tmp_path / name).write_text(text, encoding="utf-8")
        given = {"gpus": "8", **{flag.replace("_", "-"): value for flag, value in flags.items()}}
        given = {flag: value for flag, value in given.items() if value}
        return launched_plan(read_launched(name, LaunchFlags("torchtitan", over, strict, vocab), given), given)

    return read


def refusal(read: Read, config: object, *over: str, **given: Any) -> str:
    def resolved() -> None:
        found = read(config, *over, **given)
        try:
            resolve(found.plan)
        except PlanError as error:
            raise error.located(found.origins) from None

    with pytest.raises(PlanError) as caught:
        resolved()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def codes(found: ReadPlan) -> list[str]:
    return [note.code for note in found.warnings]


def saved(**changes: Any) -> dict[str, Any]:
    """``SAVED`` with sections, or parts of them, replaced."""
    return {
        **SAVED,
        **{
            name: {**SAVED.get(name, {}), **value}
            if isinstance(value, dict) and name != "activation_checkpoint"
            else value
            for name, value in changes.items()
        },
    }


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
    assert (plan.fsdp.ends_apart, plan.optimizer.name, codes(found)) == (True, "adamw", ["recipes-older"])
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
    assert "needs" not in refusal(read, config)
    assert refusal(read, config).endswith(
        "says the vocabulary, and is not read: give its number of tokens as --vocab-size N"
    )


# -- layouts ------------------------------------------------------------------------------------------


def pipelined(*lines: str, batch: int = 8) -> str:
    """A job of release 0.2.2 with four pipeline stages."""
    return "\n".join(
        [
            "[training]",
            f"local_batch_size = {batch}",
            "[parallelism]",
            "pipeline_parallel_degree = 4",
            *lines,
            "[debug]",
        ]
    )


def test_pipelines(read: Read) -> None:
    """Embedding and head count as a layer each; micro-batches of one sequence; parameters stay whole."""
    flags = {"model": "llama-3-8b", "recompute": "none"}
    plan = read(pipelined(), **flags).plan
    assert (plan.layout.pp, plan.layout.vpp, plan.pipeline.schedule) == (4, 1, "1f1b")
    assert plan.pipeline.partition == (0, 9, 18, 26, 35)
    assert (plan.batch.mbs, plan.batch.gbs, plan.fsdp.reshard_after_forward) == (1, 16, False)
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
    more = config.replace(
        "[checkpoint]", 'pipeline_parallel_split_points = ["layers.2", "layers.9", "norm"]\n[checkpoint]'
    )
    assert read(more, "experimental.pipeline_parallel_microbatches=8").plan.pipeline.partition == (0, 3, 10, 33, 35)


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


# -- what is wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "over", "given", "line"),
    [
        (DECEMBER_2024, ("training.compile=true",), {}, "--set: training.compile = true: is not modelled: Inductor's partitioner"),
        (DECEMBER_2024.replace("compile = false", "compile = true"), (), {}, "job.toml:22: training.compile = true: is not modelled: Inductor's"),
        (RELEASE_0_2.replace("enable = false\n", "enable = true\n"), (), {}, "job.toml:21: compile.enable = true: is not modelled"),
        (RELEASE_0_2, (), {"gpus": ""}, "job.toml:13: parallelism.data_parallel_shard_degree = -1: takes the GPUs that are left"),
        (RELEASE_0_2, (), {"gpus": "1"}, "job.toml:13: parallelism.data_parallel_shard_degree: means one rank without fully_shard"),
        (RELEASE_0_2, ("parallelism.data_parallel_replicate_degree=8",), {}, "--set: parallelism.data_parallel_replicate_degree: means DDP"),
        (RELEASE_0_1, (), {"gpus": "8"}, "hardware.gpus = 8: must be tp x pp x dp x cp"),
        (RELEASE_0_2, ("training.batch_size=2",), {}, "training.batch_size = 2: is no key of torchtitan 0.2.2 (2026-02-20): it went on 2025-06-05"),
        (RELEASE_0_2, ("trainin.seq_len=2",), {}, "--set: trainin.seq_len is no key of torchtitan's; did you mean training.seq_len?"),
        (RELEASE_0_2, ("torchtitan=9",), {}, "--set: torchtitan = 9: must be a release (0.1.0, 0.2.0, 0.2.1, 0.2.2) or a day"),
        (RELEASE_0_2, ("NGPU=4",), {}, "--set: 4 GPUs are not the 8 of --gpus"),
        (RELEASE_0_2, ("NGPU=x",), {}, "--set: NGPU = x: must be a number of GPUs"),
        (RELEASE_0_2, ("training.seq_len",), {}, "--set: training.seq_len must be NAME=value"),
        (RELEASE_0_2, ("activation_checkpoint.mode=memory_budget",), {}, "activation_checkpoint.mode = memory_budget: is not modelled"),
        (RELEASE_0_2, ("activation_checkpoint.selective_ac_option=two",), {}, "must be op, or a number"),
        (RELEASE_0_2, ("parallelism.fsdp_reshard_after_forward=always",), {}, "must be default or never: that norm and head"),
        (RELEASE_0_2, ("optimizer.early_step_in_backward=true",), {}, "optimizer.early_step_in_backward = true: is not modelled: each gradient"),
        (RELEASE_0_2, ("training.global_batch_size=100",), {}, "--set: batch.gbs = 100: must be a multiple of mbs 8 x dp 8 = 64"),
        (RELEASE_0_2.replace('"8B"', '"8B_flex"'), (), {}, "job.toml:4: model.flavor = 8B_flex: has another attention"),
        (RELEASE_0_2.replace('"8B"', '"9B"'), (), {}, "job.toml:4: model.flavor = 9B: of model llama3 has no sizes here"),
        (RELEASE_0_2.replace("local_batch_size = 8", "local_batch_size = 1.5"), (), {}, "job.toml:8: training.local_batch_size = 1.5: must be a whole number"),
        (RELEASE_0_2, ("model.converters=float8",), {"strict": True}, "model.converters = float8: is not modelled yet and may push"),
        (RELEASE_0_2 + "sede = 1\n", (), {"strict": True}, "job.toml:27: debug.sede = 1: is no key of torchtitan 0.2.2 (2026-02-20); did you mean debug.seed?"),
        ("[model]\nname = llama3\n", (), {}, "job.toml:2: is not valid TOML: invalid value"),
        ("[model]\nname = 'a'\nname = 'b'\n", (), {}, "job.toml:3: is not valid TOML: cannot overwrite a value"),
        ("a = " + "[" * 5000, (), {}, "job.toml: is nested too deeply"),
        ("  \n", (), {}, "job.toml: is empty"),
        ("[tool]\nname = 'a'\n", (), {}, "job.toml: has none of the keys of torchtitan's configuration"),
        ({"model": "gpt2", "framework": "fsdp"}, (), {}, "job.json: is a plan, not a configuration of torchtitan; leave out --from"),
        (SUMMER_2024, ("torchtitan=2024-03-01",), {}, "job.toml:7: optimizer.fused = true: is no key of torchtitan of 2024-03-01: it came on 2024-06-06; --set torchtitan="),
        ("[training]\nsequence_parallel_degree = 1\n", (), {}, "job.toml: is read as torchtitan of 2024-03-24, which had FSDP1"),
        (saved(training={"disable_cuda_graphs": False}), (), {}, "training.disable_cuda_graphs = false: is not modelled: torchtitan's graphs"),
        (saved(activation_checkpoint={"force_recompute_mm_shapes_by_fqns": []}), (), {}, "activation_checkpoint = selective: is not modelled with torchtitan of 2026-08-21, which keeps every matrix product"),
        (saved(model_spec={"model": {"dim": 2048}}), (), {}, "model_spec.model.dim = 2048: is not the 4096 of the flavour"),
        (saved(model_spec={"model": {"layers": [{"wq": {"rank": 8, "alpha": 16.0}}] * 32}}), (), {}, "model_spec.model.layers: have LoRA adapters"),
        (saved(optimizer={"param_groups": [{"optimizer_name": "DistMuon"}]}), (), {}, "optimizer.param_groups: must be one group of Adam or AdamW"),
        (saved(optimizer={"implementation": "fused_opt_states_bf16"}), (), {}, "optimizer.implementation = fused_opt_states_bf16: is not modelled"),
        (saved(training={"num_tokens_per_microbatch_per_dp_rank": 1000}), (), {}, "= 1000: must be a multiple of training.max_context_length"),
        (pipelined('pipeline_parallel_schedule = "ZBVZeroBubble"'), (), {"model": "llama-3-8b"}, "job.toml:5: parallelism.pipeline_parallel_schedule = ZBVZeroBubble: must be 1F1B, GPipe or Interleaved1F1B"),
        (pipelined("pipeline_parallel_layers_per_stage = 3"), (), {"model": "llama-3-8b"}, "needs one of the stages on every rank, and there are 12 for 4 ranks"),
        (pipelined("pipeline_parallel_microbatch_size = 3"), (), {"model": "llama-3-8b"}, "= 3: must divide the batch of 8"),
        (pipelined('module_fqns_per_model_part = [["layers.0"], ["norm"]]'), (), {"model": "llama-3-8b"}, "must name tok_embeddings, layers.0 to layers.31, norm and output in this order"),
        (pipelined('pipeline_parallel_split_points = ["layers.99"]'), ("torchtitan=0.1.0",), {"model": "llama-3-8b"}, "= layers.99: is no module of a model of 32 layers"),
    ],
)  # fmt: skip
def test_one_line_for_what_is_wrong(
    read: Read, config: object, over: tuple[str, ...], given: dict[str, Any], line: str
) -> None:
    assert line in refusal(read, config, *over, **given)


def test_notes(read: Read) -> None:
    config = (
        RELEASE_0_2.replace("converters = []", 'converters = ["float8"]') + "\n[checkpoint]\nasync_mode = 'async'\n"
    )
    found = read(config + "[extra]\nmine = 1\n")
    assert codes(found) == ["argument-not-modelled", "argument-unknown", "recipes-older"]
    assert found.warnings[0].message.startswith("model.converters = [float8] (job.toml:6) is not modelled yet")
    config = config.replace("[checkpoint]\n", "[checkpoint]\nenable = true\n")
    assert "a copy of parameters and optimizer states on the host" in read(config).warnings[1].message
    stale = RELEASE_0_2.replace("[training]\n", "[training]\nwarmup_steps = 2\n")
    assert "training.warmup_steps: no keys of torchtitan 0.2.2 (2026-02-20), and left out" in [
        note.message for note in read(stale).warnings
    ]


# -- keys and days ------------------------------------------------------------------------------------


def test_every_key_says_why_or_which_way() -> None:
    assert len(keys()) == 287
    for key in keys().values():
        assert key.since < key.until
        if key.table.value == "irrelevant":
            assert key.why
        if key.table.value == "not-modelled":
            assert key.why.partition(": ")[0] in ("more", "less", "either", "refused")
    assert all(key_of(condition) for key in keys().values() for condition in key.conditions)


@given(st.sampled_from([key for key in keys().values() if key.since < "2026-02-23"]))
def test_a_toml_with_one_key_is_of_a_day_that_has_it(key: Any) -> None:
    """Its day is a release's if any has the key."""
    era = era_of([key.name], is_json=False, version=None)
    assert key.was(era.day)
    assert (" 0." in era.label) == any(key.was(day) for day in ("2025-06-17", "2025-10-17", "2025-12-26", "2026-02-20"))


@given(
    st.integers(1, 60),
    st.integers(2, 8),
    st.booleans(),
    st.sampled_from(["2024-12-26", "2025-06-17", "2026-02-20"]),
)
def test_stages_are_in_order_and_even(layers: int, pp: int, several: bool, day: str) -> None:
    origin = Origin("job.toml")
    name = ("experimental" if day < "2025" else "parallelism") + ".pipeline_parallel_schedule"
    schedule = Node("Interleaved1F1B" if several else "1F1B", origin)
    settings = Settings({name: schedule}, origin, Era(day, ""))
    if layers + (2 if day > "2025" else 0) < pp * (2 if several else 1):
        with pytest.raises(PlanError, match="too many"):
            stages(settings, layers, pp)
        return
    cut = stages(settings, layers, pp)
    assert cut.first[0] == 0
    assert cut.first[-1] == layers + 3
    assert len(cut.first) - 1 == pp * cut.chunks
    sizes = [after - before for before, after in zip(cut.first, cut.first[1:], strict=False)]
    sizes[-1] -= 1
    if day > "2025":
        assert max(sizes) - min(sizes) <= 1


def test_lines_of_toml() -> None:
    text = "a = 1\n[s.t]  # section\nb = [\n 1,\n]\n'c.d' = 2\n\"e\" = '''\nx = 1\n'''\n[[many]]\nf = 2020-01-01\n"
    nodes = parse_toml(text, "f.toml").mapping
    section = nodes["s"].mapping["t"]
    assert [str(node.origin) for node in (nodes["a"], section, section.mapping["b"])] == [
        "f.toml:1",
        "f.toml:2",
        "f.toml:3",
    ]
    assert str(section.mapping["e"].origin) == "f.toml:7"
    assert nodes["many"].plain() == [{"f": "2020-01-01"}]


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
    assert explained["compile.enable"]["table"] == "not-modelled"
    assert main((*command, "--set", "compile.enable=true")) == 2
    assert capsys.readouterr().err.startswith("--set: compile.enable = true: is not modelled: Inductor's")
