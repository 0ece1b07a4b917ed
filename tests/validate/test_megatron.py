"""Plans of Megatron-Core, run by its own code on this machine's CPU, beside what memplan estimates for them.

Skipped where ``megatron.core`` is not installed.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from memplan.cli import main
from memplan.estimate import programs_of
from memplan.layers.module import Options
from memplan.plan.errors import LackingError, PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.records.readings import Run
from memplan.result import Estimate
from memplan.tape.events import Category
from memplan.trace.comparison import Row, compared
from memplan.trace.recording import FORWARD
from memplan.trace.surroundings import Surroundings
from memplan.validate.native import planned
from memplan.validate.run import Where, prepared, run

if find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")

MODEL: dict[str, Any] = {
    "name": "small",
    "family": "gpt",
    "layers": 4,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 4,
    "head_dim": 16,
    "ffn": 256,
    "vocab": 1000,
    "positions_max": 64,
    "norm": "layernorm",
    "positions": "learned",
    "activation": "gelu",
    "embedding_dropout": 0.1,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "tied_embeddings": False,
}
UNFUSED = {
    "transformer_impl": "local",
    "attention_backend": "local",
    "gradient_accumulation_fusion": False,
    "bias_gelu_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
}
PLAN: dict[str, Any] = {
    "framework": "megatron",
    "model": MODEL,
    "batch": {"mbs": 2, "gbs": 4, "seq": 64},
    "precision": {"dtype": "fp32"},
    "attention": "eager",
    "megatron": UNFUSED,
}
SMALL = 4 * 512
"""Single numbers: the loss that ``scale_loss`` multiplies, its gradient, and what a micro-batch reports."""


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Plans from a file and flags, as the command reads them."""

    def plan_of(base: dict[str, Any] = PLAN, **flags: str) -> Plan:
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(base))
        return read_plan(str(file), flags).plan

    return plan_of


# -- what is refused -------------------------------------------------------------------------------------


def test_plans_of_others_are_refused(read: Any) -> None:
    with pytest.raises(PlanError, match=r"framework = ddp: must be megatron: .*--with torch"):
        planned("megatron", read(PLAN | {"framework": "ddp", "megatron": {}, "attention": None}), "cpu")


def test_what_only_cuda_has_is_refused_in_one_line(read: Any) -> None:
    fused = UNFUSED | {"bias_gelu_fusion": True, "cross_entropy_fusion": "native"}
    with pytest.raises(PlanError) as caught:
        planned("megatron", read(PLAN | {"megatron": fused}, tp="2", gpus="2"), "cpu")
    message = str(caught.value)
    assert "\n" not in message
    assert "megatron.bias_gelu_fusion true (must be false), megatron.cross_entropy_fusion native" in message
    with pytest.raises(PlanError, match=r"must be cuda or cpu"):
        planned("megatron", read(), "fake")


def test_the_command_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the plan as it is where nothing is said: Transformer Engine's layers, and everything fused."""
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"framework": "megatron", "model": MODEL, "batch": PLAN["batch"]}))
    assert main(["validate", str(file), "--with", "megatron", "--device", "cpu", "--no-records"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "megatron.transformer_impl transformer_engine (must be local)" in error


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="Transformer Engine is installed")
def test_layers_that_are_not_installed(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # A stand-in of tests/oracle/megatron.py, where its tests ran in this process before.
    monkeypatch.delitem(sys.modules, "fused_weight_gradient_mlp_cuda", raising=False)
    engine = {"transformer_impl": "transformer_engine", "gradient_accumulation_fusion": False}
    with pytest.raises(LackingError, match="layers need Transformer Engine"):
        planned("megatron", read(PLAN | {"megatron": engine, "precision": {"dtype": "bf16"}}), "cuda")
    with pytest.raises(LackingError, match="gradient_accumulation_fusion needs apex"):
        planned("megatron", read(PLAN | {"megatron": UNFUSED | {"gradient_accumulation_fusion": True}}), "cuda")


# -- real processes --------------------------------------------------------------------------------------


def measured(plan: Plan, gpus: int, *, emulates: bool = False) -> tuple[Run, Estimate]:
    where = Where(gpus=gpus, device="cpu", emulates=emulates, warmup=1, steps=1, code="megatron", patience=120.0)
    asked = prepared(plan, where)
    return run(asked, lambda progress: None, lambda what, at, of: None), asked.estimate


def check(found: Run, estimated: Estimate, sent: int = 0) -> None:
    """Static bytes of a stage's fullest rank are equal; peaks differ by single numbers, at most, and by what gloo's
    threads have ``sent`` and not let go of."""
    assert found.failures == ()
    assert found.code == "megatron"
    for stage in estimated.stages:
        own = [rank for rank in found.ranks if rank.stage == stage.stage]
        assert max(rank.static or 0 for rank in own) == stage.static
        assert stage.requested is not None
        assert -SMALL <= max(rank.requested or 0 for rank in own) - stage.requested <= SMALL + sent
    assert any("PyTorch's" in note or "torch.optim" in note for note in found.notes) or find_spec("apex") is not None
    assert any("torch.cuda.current_device is the CPU" in note for note in found.notes)


@pytest.mark.slow  # in every run: one rank alone, the last stage event by event, and two replicas over gloo
def test_tensor_and_pipeline_parallel(place: Path, read: Any) -> None:
    """Four processes, and gloo between them."""
    plan = read(layers="2", tp="2", pp="2", gpus="4")
    found, estimated = measured(plan, 4)
    check(found, estimated, sent=4 * 64 * 2 * 64)
    assert [rank.rank for rank in found.ranks] == [0, 1, 2, 3]
    losses = [rank.losses for rank in found.ranks]
    assert losses[:2] == [(), ()]
    assert losses[2] == losses[3]
    assert losses[2][-1] < losses[2][0]


def test_one_rank_alone(place: Path, read: Any) -> None:
    """Losses of zeros mean nothing, and none are told."""
    found, estimated = measured(read(layers="2", tp="2", gpus="2"), 1, emulates=True)
    check(found, estimated)
    assert found.world == "emulated"
    assert [(rank.rank, rank.apart, rank.losses) for rank in found.ranks] == [(0, None, ())]
    assert any("zeros" in note for note in found.notes)


def test_distributed_optimizer(place: Path, read: Any) -> None:
    plan = read(layers="1", dtype="bf16", dp="2", zero="1", gpus="2", gbs="8")
    found, estimated = measured(plan, 2)
    check(found, estimated)
    first, second = found.ranks
    assert first.losses[-1] < first.losses[0]
    fullest = max(rank.breakdown["main_parameters"] for rank in (first, second))
    assert fullest == estimated.stages[0].breakdown[Category.MAIN_PARAMETERS]


@pytest.mark.slow  # event by event in every run
def test_two_shards_of_fsdp2(place: Path, read: Any) -> None:
    """``TorchFullyShardedDataParallel`` over gloo."""
    plan = read(layers="2", dtype="bf16", dp="2", gpus="2", gbs="8", **{"torch-fsdp": "reshard"})
    found, estimated = measured(plan, 2)
    check(found, estimated)
    first, second = found.ranks
    assert first.losses[-1] < first.losses[0]
    for category in (Category.PARAMETERS, Category.MAIN_PARAMETERS, Category.OPTIMIZER_STATES):
        assert first.breakdown[category.key] == estimated.stages[0].breakdown[category]
        assert second.breakdown[category.key] == estimated.stages[0].breakdown[category]


# -- event by event --------------------------------------------------------------------------------------

CASES: dict[str, tuple[dict[str, str], int]] = {
    "whole": ({}, 0),
    "first stage": ({"pp": "2", "gpus": "2"}, 0),
    "last stage, recompute": ({"pp": "2", "gpus": "2", "recompute": "full", "recompute-layers": "2"}, 1),
    "chunks": ({"pp": "2", "vpp": "2", "gpus": "2"}, 1),
    "tensor parallel, selective, bf16": ({"tp": "2", "gpus": "2", "dtype": "bf16", "recompute": "selective"}, 0),
    "FSDP2": ({"torch-fsdp": "reshard", "gpus": "2", "gbs": "8"}, 0),
    "FSDP2, bf16, kept": ({"torch-fsdp": "keep", "gpus": "2", "gbs": "8", "dtype": "bf16"}, 0),
    "FSDP2, recompute": ({"torch-fsdp": "reshard", "gpus": "4", "gbs": "16", "dtype": "bf16", "recompute": "full"}, 0),
    "FSDP2, tp": ({"torch-fsdp": "reshard", "tp": "2", "gpus": "4", "gbs": "8", "recompute": "selective"}, 0),
}


def rows_of(plan: Plan, rank: int) -> list[Row]:
    from memplan.frameworks.megatron.core_followed import followed

    program = programs_of(plan, Options())[rank]
    traced = followed(plan, rank, program, Surroundings(fake=False))
    return [row for row in compared(traced, program).rows if row.estimated is not None]


@pytest.mark.parametrize("case", CASES)
def test_layers_do_what_their_recipes_say(read: Any, case: str) -> None:
    """To the byte, but for single numbers."""
    flags, rank = CASES[case]
    rows = rows_of(resolve(read(**flags)), rank)
    layers = [row for row in rows if row.entry.startswith("layer.")]
    assert {row.microbatch for row in layers} == {0, 1}
    for row in rows:
        assert row.estimated is not None
        if row.phase == FORWARD and (row in layers or row.entry in ("embedding", "batch")):
            assert (row.traced.net, row.traced.peak) == (row.estimated.net, row.estimated.peak), row.entry
        elif row in layers:
            assert abs(row.traced.net - row.estimated.net) <= SMALL, row.entry
            assert row.traced.peak == row.estimated.peak, row.entry
    assert max(abs(missing(rows, microbatch)) for microbatch in (0, 1)) <= SMALL


UNITS: dict[str, dict[str, str]] = {
    "bf16": {"dtype": "bf16"},
    "kept": {"dtype": "bf16", "torch-fsdp": "keep"},
    "recompute": {"dtype": "bf16", "recompute": "full"},
    "selective": {"recompute": "selective", "positions": "rotary"},
}


@pytest.mark.parametrize("case", UNITS)
def test_an_output_layer_that_is_a_unit_of_fsdp2(read: Any, case: str) -> None:
    """As beside Transformer Engine's layers, here behind local ones: the output layer, and none of theirs, is given to
    ``fully_shard``. The real passes hold what the estimate's do, but for single numbers."""
    from megatron.core.distributed import torch_fully_sharded_data_parallel as real
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from memplan.frameworks.megatron import core_training
    from memplan.frameworks.megatron.core_followed import followed
    from memplan.frameworks.megatron.modules import stage_entries
    from memplan.frameworks.megatron.programs import stages_of

    class Output(ColumnParallelLinear):  # type: ignore[misc, unused-ignore]
        """Told from those of layers."""

    units = {real.TransformerLayer, real.LanguageModelEmbedding, real.RotaryEmbedding, Output}

    class Sharded(core_training.Sharded):
        def __init__(self, config: Any, settings: Any, module: Any) -> None:
            getattr(module, "module", module).output_layer.__class__ = Output
            super().__init__(config, settings, module, sub_modules_to_wrap=units)

    base = PLAN | {"megatron": UNFUSED | {"rope_fusion": False}}
    given = resolve(read(base, **{"torch-fsdp": "reshard", "gpus": "2", "gbs": "8"} | UNITS[case]))
    stages = stages_of(given, Options())
    assert stages.torch_fsdp is not None
    stages = replace(stages, torch_fsdp=replace(stages.torch_fsdp, wraps_head=True))
    estimated = stages.program(0, stage_entries(given)[0])
    with patch.object(core_training, "Sharded", Sharded):
        found = compared(followed(given, 0, estimated, Surroundings(fake=False)), estimated)
    between = found.points[0]
    assert between.traced == between.estimated
    rows = [row for row in found.rows if row.estimated is not None]
    assert {row.microbatch for row in rows} == {0, 1}
    for row in rows:
        assert row.estimated is not None
        assert abs(row.traced.peak - row.estimated.peak) <= SMALL, row.entry
        assert abs(row.traced.net - row.estimated.net) <= SMALL, row.entry


def missing(rows: list[Row], microbatch: int) -> int:
    """What a micro-batch leaves of which the estimate knows nothing."""
    own = [row for row in rows if row.microbatch == microbatch]
    return sum(row.traced.net - row.estimated.net for row in own if row.estimated is not None)


def test_evaluation_leaves_nothing(read: Any) -> None:
    import torch

    from memplan.frameworks.megatron.core_training import training_of
    from memplan.trace.recording import SETUP, Recording
    from memplan.trace.step import Watch
    from memplan.trace.storages import Follow

    recording = Recording()
    with Follow(recording, lambda: SETUP, device="cpu", fake=False) as follow:
        with training_of(resolve(read(layers="1")), 0, Surroundings(fake=False)) as training:
            training.iterate(Watch())
            before = recording.live
            with torch.no_grad():
                training.evaluate()
            assert recording.live == before
            assert all(chunk.training for chunk in training.chunks)
        follow.close()
