"""Which optimizers PyTorch itself runs on ``DTensor`` shards: those that ``fsdp`` refuses fail, but for Muon."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ..oracle.fsdp import ResizedFollow, Sharding, fake_ranks, mesh_of, run
from ..oracle.tracer import Trace

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
    with pytest.raises((RuntimeError, NotImplementedError), match=r"placement|DTensor|sharding strategy"):
        stepped(FAILING[name])


def test_momentum_is_kept_as_shards() -> None:
    optimizer = stepped(lambda parameters: torch.optim.SGD(parameters, momentum=0.9, foreach=True))
    kept = [state["momentum_buffer"]._local_tensor.shape for state in optimizer.state.values()]
    assert kept == [(2 * H // 4, H), (2 * H // 4,)]
