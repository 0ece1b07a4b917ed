"""Which optimizers PyTorch itself runs on ``DTensor`` shards: those that ``fsdp`` refuses fail, but for Muon."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ..oracle import fsdp
from ..oracle.fsdp import ResizedFollow, Sharding, fake_ranks, mesh_of, run
from ..oracle.tracer import Change, Trace
from ..oracle.training_step import update

H = 64


def step(make: Any, mesh: DeviceMesh) -> Any:
    """The optimizer of a sharded linear layer after its first step."""
    model = torch.nn.Linear(H, 2 * H)
    fully_shard(model, mesh=mesh)
    optimizer = make(list(model.parameters()))
    model(torch.randn(4, H)).sum().backward()
    optimizer.step()
    return optimizer


def stepped(make: Any) -> Any:
    found = []

    def body(trace: Trace, follow: ResizedFollow) -> None:
        found.append(step(make, mesh))

    with fake_ranks(4):
        mesh = mesh_of(Sharding(4))
        run(body)
    return found[0]


adafactor: Any = transformers.optimization.Adafactor
FAILING = {
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, foreach=False),
    "adafactor-foreach": lambda parameters: torch.optim.Adafactor(parameters, foreach=True),
    "adafactor-transformers": lambda parameters: adafactor(
        parameters, scale_parameter=False, relative_step=False, lr=1e-3
    ),
    "sgd-fused": lambda parameters: torch.optim.SGD(parameters, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("name", FAILING)
def test_what_fails_on_shards(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: 1.0)
    monkeypatch.setattr(fsdp, "ADAM", set())
    with pytest.raises((RuntimeError, NotImplementedError), match=r"placement|DTensor|sharding strategy"):
        stepped(FAILING[name])


def test_momentum_is_kept_as_shards() -> None:
    optimizer = stepped(lambda parameters: torch.optim.SGD(parameters, momentum=0.9, foreach=True))
    kept = [state["momentum_buffer"]._local_tensor.shape for state in optimizer.state.values()]
    assert kept == [(2 * H // 4, H), (2 * H // 4,)]


@pytest.mark.parametrize("sharding", [Sharding(3), Sharding(4, replicas=2)], ids=["shards", "replicas"])
def test_lists_of_local_tensors_are_what_shards_come_to(sharding: Sharding, monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW's second step as ``DTensor`` runs it, and the shorter way that traces take: parameters that are cut evenly,
    unevenly, and of which this rank has all."""

    def traced(weight_decay: float) -> list[Change]:
        found: list[list[Change]] = []

        def body(trace: Trace, follow: ResizedFollow) -> None:
            model = torch.nn.Sequential(torch.nn.Linear(H, 7), torch.nn.Linear(7, 1))
            fully_shard(model, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True, weight_decay=weight_decay)
            for _ in range(2):
                model(torch.randn(4, H)).sum().backward()
                trace.changes = []
                update(optimizer, trace)
            found.append(trace.changes)

        with fake_ranks(sharding.shards * sharding.replicas):
            mesh = mesh_of(sharding)
            run(body)
        return found[0]

    shorter = [traced(decay) for decay in (0.0, 0.1)]
    monkeypatch.setattr(fsdp, "ADAM", set())
    assert shorter == [traced(decay) for decay in (0.0, 0.1)]
    assert len(shorter[0]) > 8
