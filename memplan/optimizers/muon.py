"""Muon of PyTorch (``torch/optim/_muon.py``) on the matrices of the layers, AdamW on everything else."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from ..layers.autograd import Recorder, Tensor
from ..layers.module import Parameter
from ..tape.events import Category
from .adam import OPTIMIZERS as ADAMS, adamw_for_loop, adamw_foreach
from .base import EMBEDDINGS, Algorithm, Parameters, State, Step, Steps, full, like, number

if TYPE_CHECKING:
    from ..plan.plan import Optimizer


HEAD = "head.weight"

NEWTON_SCHULZ_STEPS = 5
"""``torch.optim.Muon``'s ``ns_steps``."""


def is_hidden_matrix(parameter: Parameter) -> bool:
    """Whether Muon takes it: matrices, but for embeddings and the head ("an optimizer for 2D parameters of neural
    network hidden layers")."""
    return len(parameter.shape) == 2 and parameter.name not in (*EMBEDDINGS, HEAD)


def muon(adamw: Step) -> Step:
    """``torch.optim.Muon`` on hidden matrices, then AdamW on the rest."""

    def step(r: Recorder, parameters: Parameters, dtype: str, decay: bool) -> None:
        muon_matrices(r, [parameter for parameter in parameters if is_hidden_matrix(parameter)], dtype)
        adamw(r, [parameter for parameter in parameters if not is_hidden_matrix(parameter)], dtype, decay)

    return step


def muon_matrices(r: Recorder, parameters: Parameters, dtype: str) -> None:
    """``_single_tensor_muon`` with Nesterov momentum; the update before is held until the next one is there."""
    update = None
    for parameter in parameters:
        update = like(r, parameter, dtype, "nesterov_update")
        update = newton_schulz(r, update, parameter)
    del update


def newton_schulz(r: Recorder, update: Tensor, parameter: Parameter) -> Tensor:
    """``_zeropower_via_newtonschulz`` in bf16 on (m, n), m <= n: two (m, m) and one (m, n) product a round."""
    m, n = sorted(parameter.shape)
    ortho = update if update.dtype == "bf16" else r.empty(parameter.shape, "bf16", "orthogonal_update")
    norm = number(r, "bf16", "norm")
    clamped = number(r, "bf16", "norm_clamped")
    del norm, clamped
    gram = gram_update = None
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = r.empty((m, m), "bf16", "gram_matrix")
        gram_update = r.empty((m, m), "bf16", "gram_update")
        ortho = r.empty((m, n), "bf16", "orthogonal_update")
    del gram, gram_update
    return ortho


def no_temporaries(r: Recorder, parameters: Parameters, dtype: str, decay: bool) -> None:
    """One kernel that updates parameters and states in place."""


class Muon(Algorithm):
    """Its implementation is that of the AdamW beside it."""

    name = "muon"
    implementations = ("foreach", "for-loop", "fused")
    steps: ClassVar[Steps] = {
        "for-loop": muon(adamw_for_loop),
        "foreach": muon(adamw_foreach),
        "fused": muon(no_temporaries),
    }
    decays = True
    megatron = "muon"

    def moments(self, optimizer: Optimizer) -> int:
        return 1

    def states(self, optimizer: Optimizer, dtype: str, *, embeddings_32bit: bool) -> tuple[State, ...]:
        beside = ADAMS["adamw"].states(optimizer, dtype, embeddings_32bit=embeddings_32bit)
        momentum = full("momentum_buffer", Category.OPTIMIZER_STATES, dtype)
        return (_only(momentum, True), *(_only(state, False) for state in beside))

    def assumptions(self, optimizer: Optimizer) -> tuple[str, ...]:
        return (
            "torch.optim.Muon on the matrices of the layers, its Newton-Schulz rounds in bf16; AdamW on embeddings, "
            "head, norms and biases",
        )


@lru_cache(maxsize=64)
def _only(state: State, hidden_matrices: bool) -> State:
    """``state`` of hidden matrices alone (Muon), or of the others alone (AdamW beside it)."""

    def size(parameter: Parameter) -> int:
        return state.size(parameter) if is_hidden_matrix(parameter) == hidden_matrices else 0

    return State(state.name, state.category, size)


OPTIMIZERS = {"muon": Muon()}
