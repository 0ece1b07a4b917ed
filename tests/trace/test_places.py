"""Which module an operator belongs to."""

from __future__ import annotations

from threading import Thread

import torch
from torch.utils.checkpoint import checkpoint

from memplan.trace.places import Places
from memplan.trace.recording import BACKWARD, FORWARD


class Recomputed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x, use_reentrant=False)
        return self.second(x)


def test_backward_has_a_thread_of_its_own_on_a_gpu() -> None:
    """Nodes that are recomputed in it are numbered from 0, and those of forward keep their modules."""
    model = Recomputed()
    places, seen = Places(model), list[str]()
    with places.followed():
        places.phase = FORWARD
        loss = model(torch.ones(1, 2)).sum()
        places.phase = BACKWARD
        second = loss.grad_fn.next_functions[0][0]
        first = second.next_functions[1][0]
        for node in (second, first):
            node.register_prehook(lambda _: seen.append(places().module))
        for _ in range(2):
            backward = Thread(target=lambda: loss.backward(retain_graph=True))
            backward.start()
            backward.join()
    assert seen == ["second", "first"] * 2
    assert places.begins == sorted(places.begins)
