"""What an optimizer's step takes while it runs: recipes on storages without elements (``layers.autograd``).

Each recipe runs the lines of one real step in their order, over parameters that all have a gradient and
states; a variable ends where Python's ends. Numbers of no dimension on the device count 512 bytes each.

PyTorch: ``torch/optim/sgd.py``, ``adam.py``, ``_adafactor.py``, ``_muon.py``; transformers:
``optimization.py`` (``Adafactor.step``). Fused kernels, apex and bitsandbytes allocate nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..layers.autograd import Recorder, Tensor
from ..layers.module import Parameter
from ..plan.plan import Optimizer
from ..tape import Drop, Hold, Tape
from .groups import is_hidden_matrix

NEWTON_SCHULZ_STEPS = 5
"""``torch.optim.Muon``'s ``ns_steps``."""

Parameters = Sequence[Parameter]


def step_temporaries(optimizer: Optimizer, parameters: Iterable[Parameter], dtype: str) -> list[Hold]:
    """Tensors alive at the peak of the step itself, over parameters (and gradients) of ``dtype``."""
    return alive_at_peak(step_tape(optimizer, tuple(parameters), dtype))


def step_tape(optimizer: Optimizer, parameters: Parameters, dtype: str) -> Tape:
    """The step's events from its first line to its return."""
    r = Recorder(grad_enabled=False)
    recipe = STEPS.get((optimizer.name, optimizer.implementation))
    if recipe is not None:
        recipe(r, parameters, dtype, decay_of(optimizer))
    return r.tape()


def decay_of(optimizer: Optimizer) -> bool:
    """Whether weights decay; by default as the optimizer's constructor has it, which only AdamW's and Muon's do."""
    if optimizer.weight_decay is None:
        return optimizer.name in ("adamw", "muon")
    return optimizer.weight_decay > 0


def alive_at_peak(tape: Tape) -> list[Hold]:
    """The tensors that ``tape`` holds where it first holds most, in order of appearance."""
    live = peak = 0
    at = -1
    for index, event in enumerate(tape):
        if isinstance(event, Hold):
            live += event.bytes
            if live > peak:
                peak, at = live, index
        elif isinstance(event, Drop):
            live -= event.bytes
    holds = {event.tensor: event for event in tape[: at + 1] if isinstance(event, Hold)}
    for event in tape[: at + 1]:
        if isinstance(event, Drop):
            del holds[event.tensor]
    return list(holds.values())


def like(r: Recorder, parameter: Parameter, dtype: str, name: str) -> Tensor:
    """A fresh tensor like ``parameter``."""
    return r.empty(parameter.shape, dtype, name)


def number(r: Recorder, dtype: str, name: str) -> Tensor:
    """A tensor of no dimension."""
    return r.empty((), dtype, name)


# -- SGD and Adam -----------------------------------------------------------------------------------


def sgd_for_loop(r: Recorder, parameters: Parameters, dtype: str, decay: bool) -> None:
    """``_single_tensor_sgd``: a decayed gradient ends when the next parameter's takes its variable."""
    grad = None
    for parameter in parameters:
        del grad
        grad = like(r, parameter, dtype, "decayed_gradient") if decay else None
    del grad


def sgd_foreach(r: Recorder, parameters: Parameters, dtype: str, decay: bool) -> None:
    """``_multi_tensor_sgd``: decay copies all gradients."""
    grads = [like(r, parameter, dtype, "decayed_gradient") for parameter in parameters] if decay else []
    del grads


def adam_for_loop(r: Recorder, parameters: Parameters, dtype: str, decay: bool) -> None:
    """``_single_tensor_adam``: the square root and its quotient, beside the quotient of the parameter before."""
    grad = denominator = None
    for parameter in parameters:
        del grad
        grad = like(r, parameter, dtype, "decayed_gradient") if decay else None
        root = like(r, parameter, dtype, "exp_avg_sq_sqrt")
        quotient = like(r, parameter, dtype, "denominator")
        del root
        denominator = quotient
        del quotient
    del grad, denominator


def adamw_for_loop(r: Recorder, parameters: Parameters, dtype: str, decay: bool) -> None:
    """Decay is in place."""
    adam_for_loop(r, parameters, dtype, False)


def adam_foreach(r: Recorder, parameters: Parameters, dtype: str, decay: bool) -> None:
    """``_multi_tensor_adam``: decay copies all gradients, and the copies end before the square roots appear."""
    grads = [like(r, parameter, dtype, "decayed_gradient") for parameter in parameters] if decay else []
    del grads
    roots = [like(r, parameter, dtype, "exp_avg_sq_sqrt") for parameter in parameters]
    del roots


def adamw_foreach(r: Recorder, parameters: Parameters, dtype: str, decay: bool) -> None:
    """Decay is in place."""
    adam_foreach(r, parameters, dtype, False)


# -- Adafactor --------------------------------------------------------------------------------------


def adafactor_for_loop(r: Recorder, parameters: Parameters, dtype: str, decay: bool) -> None:
    """``_single_tensor_adafactor``: the estimated variance becomes the update in place, under two names."""
    update = estimate = row_mean = col_mean = squared = None
    for parameter in parameters:
        norm = number(r, dtype, "norm")
        del norm
        if len(parameter.shape) > 1:
            row_mean = r.empty((*parameter.shape[:-1], 1), dtype, "row_mean")
            col_mean = r.empty((*parameter.shape[:-2], 1, parameter.shape[-1]), dtype, "col_mean")
            estimate = like(r, parameter, dtype, "var_estimate")
            mean = r.empty((*parameter.shape[:-2], 1, 1), dtype, "row_var_mean")
            del mean
        else:
            squared = like(r, parameter, dtype, "grad_squared")
            estimate = like(r, parameter, dtype, "var_estimate")
        update = estimate
        norm = number(r, dtype, "update_norm")
        del norm
    del row_mean, col_mean, squared, update, estimate


def adafactor_foreach(r: Recorder, parameters: Parameters, dtype: str, decay: bool) -> None:
    """``_multi_tensor_adafactor``: matrices and vectors are two groups; the updates of the first one live on
    until the second one's take their variable."""
    is_matrix = [len(parameter.shape) > 1 for parameter in parameters]
    updates: list[Tensor] = []
    estimates: list[Tensor] = []
    for matrices in dict.fromkeys(is_matrix):
        group = [parameter for parameter, matrix in zip(parameters, is_matrix, strict=True) if matrix == matrices]
        for _ in group:
            norm = number(r, dtype, "norm")
            del norm
        if matrices:
            means = [r.empty((*p.shape[:-1], 1), dtype, "row_mean") for p in group]
            del means
            means = [r.empty((*p.shape[:-2], 1, p.shape[-1]), dtype, "col_mean") for p in group]
            del means
            estimates = [like(r, parameter, dtype, "var_estimate") for parameter in group]
            means = [r.empty((*p.shape[:-2], 1, 1), dtype, "row_var_mean") for p in group]
            del means
        else:
            squared = [like(r, parameter, dtype, "grad_squared") for parameter in group]
            del squared
            estimates = [like(r, parameter, dtype, "var_estimate") for parameter in group]
        updates = estimates
        for _ in group:
            norm = number(r, dtype, "update_norm")
            del norm
    del updates, estimates


def adafactor_transformers(r: Recorder, parameters: Parameters, dtype: str, decay: bool) -> None:
    """``Adafactor.step`` without first moment and ``scale_parameter`` (the Trainer's choice): one parameter at a
    time in fp32, gradient and parameter cast if they are not, and every variable held until it is taken anew."""
    grad = data = update = rows = columns = rms = None
    for parameter in parameters:
        shape, factored = parameter.shape, len(parameter.shape) > 1
        del grad
        grad = like(r, parameter, "fp32", "gradient_fp32") if dtype != "fp32" else None
        del data
        data = like(r, parameter, "fp32", "parameter_fp32") if dtype != "fp32" else None
        norm = number(r, "fp32", "norm")
        rms = number(r, "fp32", "rms_of_state")  # takes the place of the state's
        del rms, norm
        square = like(r, parameter, "fp32", "gradient_squared")
        plus_eps = like(r, parameter, "fp32", "gradient_squared_eps")
        del square
        update = plus_eps
        del plus_eps
        if factored:
            for mean_shape in (shape[:-1], (*shape[:-2], shape[-1])):
                mean = r.empty(mean_shape, "fp32", "mean_of_squares")
                del mean
            mean = r.empty((*shape[:-2], 1), "fp32", "mean_of_rows")
            rows = r.empty(shape[:-1], "fp32", "row_factor")
            del mean
            columns = r.empty((*shape[:-2], 1, shape[-1]), "fp32", "column_factor")
            product = like(r, parameter, "fp32", "update")
            del rows, columns
            update = product
            del product
        else:
            update = like(r, parameter, "fp32", "update")
        norm = number(r, "fp32", "update_norm")
        rms = number(r, "fp32", "update_rms")
        del norm
        clipped = number(r, "fp32", "update_clip")
        del rms, clipped
        negative = like(r, parameter, "fp32", "negative_update")
        del negative
    del grad, data, update


# -- Muon -------------------------------------------------------------------------------------------


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


Step = Callable[[Recorder, Parameters, str, bool], None]
"""Recipe of a step over parameters of a dtype, with or without weight decay."""


def no_temporaries(r: Recorder, parameters: Parameters, dtype: str, decay: bool) -> None:
    """One kernel that updates parameters and states in place."""


STEPS: dict[tuple[str, str | None], Step] = {
    ("sgd", "for-loop"): sgd_for_loop,
    ("sgd", "foreach"): sgd_foreach,
    ("adam", "for-loop"): adam_for_loop,
    ("adam", "foreach"): adam_foreach,
    ("adamw", "for-loop"): adamw_for_loop,
    ("adamw", "foreach"): adamw_foreach,
    ("adafactor", "for-loop"): adafactor_for_loop,
    ("adafactor", "foreach"): adafactor_foreach,
    ("adafactor", "transformers"): adafactor_transformers,
    ("muon", "for-loop"): muon(adamw_for_loop),
    ("muon", "foreach"): muon(adamw_foreach),
    ("muon", "fused"): muon(no_temporaries),
}
"""By optimizer and implementation; those that are not here allocate nothing."""
