"""Layers' inputs that tensor-parallel ranks share out (``--distribute-saved-activations``): by hand, and against
Megatron-Core's own ``CheckpointFunction`` on the CPU, as one of four ranks of a fake process group.

The latter is skipped where ``megatron.core`` is not on the path; no GPU is needed. Live bytes are compared behind
forward and behind backward.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock
from warnings import catch_warnings, simplefilter

import pytest
import torch

from memplan.estimate import estimate
from memplan.layers import ops
from memplan.layers.autograd import Recorder, Tensor
from memplan.layers.megatron_core.distributed import distributed
from memplan.plan.errors import PlanError
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.search.time.step import step_time
from memplan.tape.events import fold

from .test_overlapped_real import Storages

RANKS, ROWS, H = 4, 64, 128

FLAGS = {
    "model": "llama-3-8b", "layers": "8", "framework": "megatron", "gpus": "8", "tp": "4", "mbs": "1", "gbs": "8",
    "seq": "8192", "dtype": "bf16", "zero": "1", "gpu": "h100-80gb", "recompute": "full", "sequence-parallel": "false",
}  # fmt: skip


def plan(**flags: str) -> ResolvedPlan:
    given = {**FLAGS, **{name.replace("_", "-"): value for name, value in flags.items()}}
    return resolve(read_plan(None, given).plan)


def test_each_rank_keeps_its_part_of_every_layers_input() -> None:
    """Of 8 layers each keeps a quarter of (8192, 1, 4096) in bf16 in place of all, where the head peaks."""
    whole, shared = (estimate(plan(**more)).stages[0] for more in ({}, {"distribute_saved_activations": "true"}))
    assert whole.peak.module == shared.peak.module == "head"
    assert whole.requested - shared.requested == 8 * 8192 * 4096 * 2 * 3 // 4


def test_gathers_take_time() -> None:
    assert step_time(plan(distribute_saved_activations="true")).total > step_time(plan()).total


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"tp": "1"}, "tensor parallelism"), ({"recompute": "none"}, "full recompute"),
        ({"sequence_parallel": "true"}, "sequence parallelism"), ({"pp": "2"}, "pipeline"),
    ],
)  # fmt: skip
def test_what_is_refused(flags: dict[str, str], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        plan(distribute_saved_activations="true", **flags)


def of_recipe() -> list[int]:
    r = Recorder(first=False)
    given, leaf = r.leaf(r.outside((ROWS, H), "fp32"))
    x = ops.scale(r, given, "input")
    out = distributed(RANKS, r, lambda r, x: _region(r, x), (x,))
    del x
    live = [fold(r.tape()).net]
    r.hand_over(out)
    handed = ROWS * H * 4
    r.backward([out], [r.outside((ROWS, H), "fp32")])
    leaf.take()
    return [*live, fold(r.tape()).net - handed]


def _region(r: Recorder, x: Tensor) -> Tensor:
    return ops.scale(r, ops.elementwise(r, "gelu", (x,), (x,)), "scaled")


def of_megatron() -> list[int]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with catch_warnings():
        simplefilter("ignore")
        random = pytest.importorskip("megatron.core.tensor_parallel.random", exc_type=ImportError)
        from megatron.core import parallel_state
    torch.distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    with ExitStack() as patches:
        patches.enter_context(mock.patch("torch.cuda.current_device", return_value="cpu"))
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS, create_gloo_process_groups=False)
        patches.callback(torch.distributed.destroy_process_group)
        patches.callback(parallel_state.destroy_model_parallel)
        for name in ("_get_all_rng_states", "_set_all_rng_states"):
            patches.enter_context(mock.patch.object(random, name, return_value=()))
        patches.enter_context(mock.patch.object(random, "_fork_rng", return_value=nullcontext()))
        given, gradient = torch.randn(ROWS, H, requires_grad=True), torch.randn(ROWS, H)
        storages = patches.enter_context(Storages())

        def region(x: Any) -> Any:
            return torch.nn.functional.gelu(x) * 2

        x = given * 2
        out = random.checkpoint(region, True, x)
        del x
        live = [storages.live()]
        out.backward(gradient)
        given.grad = None
        del out
        live.append(storages.live())
    return live


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_holds_what_megatrons_holds() -> None:
    assert of_recipe() == of_megatron() == [ROWS * H * 4 * 5 // 4, 0]
