"""What transformers' Trainer adds to a plain training loop, where Accelerate runs the model.

transformers 5.23, ``trainer.py`` (``_run_epoch``, ``training_step``, ``_clip_grad_norm``, ``evaluation_loop``,
``prediction_step``) and ``trainer_pt_utils.py`` (``EvalLoopContainer``); Accelerate 1.15, ``utils/operations.py``
(``ConvertOutputsToFp32``); torch 2.13, ``nn/utils/clip_grad.py`` and ``aten/src/ATen/native/cuda/ForeachReduceOp.cu``.

The step of an optimizer over whole parameters, and what a loss scaler and the Trainer put around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from ...layers.autograd import Recorder
from ...layers.huggingface import LayerShape
from ...layers.module import Parameter, hold_bytes
from ...optimizers.base import step_temporaries
from ...plan.plan import Optimizer, ResolvedPlan
from ...tape.events import Category, Hold, Stretch, Tape, rounded
from ...tape.program import drop_all

CHUNK = 65_536
"""Elements of a tensor that one block of a foreach kernel takes (``kChunkSize``)."""

SCALARS = tuple(
    Hold(0, rounded(size), Category.BUFFERS, name, (), dtype)
    for name, size, dtype in (("tr_loss", 4, "fp32"), ("grad_norm", 4, "fp32"), ("num_items_in_batch", 8, "int64"))
)
"""Numbers in variables of ``_run_epoch``."""

NOT_TRACED = (
    "must be none or transformers: trl's loss is not modelled for an architecture without a recipe (model_type {}); "
    "--trainer transformers has the model's own loss, of all logits"
)
"""Why a loop does not run an architecture that traces alone know."""


def check_learnt(plan: ResolvedPlan) -> None:
    """Refuses what was not traced of the loop: evaluation, and losses of trl's trainers."""
    if plan.trainer.kind.own_loss:
        raise plan.wrong("trainer.loop", NOT_TRACED.format(plan.model.family))
    for name, value in plan.trainer.changed_here():
        if value is not None and name != "loop":
            raise plan.wrong(f"trainer.{name}", "must be left out: not modelled for an architecture without a recipe")


def runs(plan: ResolvedPlan) -> bool:
    """Whether the Trainer runs the model."""
    return plan.trainer.loop != "none"


def converts_outputs(plan: ResolvedPlan) -> bool:
    """Whether the logits are cast to fp32 once autocast has ended (``ConvertOutputsToFp32``)."""
    return runs(plan) and plan.precision.autocast


def clipping(parameters: Sequence[Parameter], dtype: str, *, kernel_workspaces: bool) -> Tape:
    """``clip_grad_norm_`` of gradients in ``dtype`` on one device, which runs before every step: with
    ``max_grad_norm`` 0, too, against infinity. Gradients are multiplied in place.

    Inside, ``_foreach_norm`` allocates an fp32 number for every chunk of the largest gradient, for every gradient.
    """
    r = Recorder(grad_enabled=False)
    inside = None
    if kernel_workspaces and parameters:
        chunks = max(-(-parameter.elements // CHUNK) for parameter in parameters)
        inside = r.empty((len(parameters) * chunks,), "fp32", "norms_of_chunks", Category.WORKSPACES)
    norms = [r.empty((), dtype, f"{parameter.name}/norm") for parameter in parameters]
    del inside
    stacked = r.empty((len(parameters),), dtype, "norms")
    total = r.empty((), dtype, "total_norm")
    del stacked, norms
    shifted = r.empty((), dtype, "total_norm_eps")
    inverse = r.empty((), dtype, "total_norm_inverse")
    coefficient = r.empty((), dtype, "clip_coefficient")
    del inverse, shifted
    r.empty((), dtype, "clip_coefficient_clamped")
    del coefficient, total
    return r.tape()


def step_by_groups(optimizer: Optimizer, parameters: Sequence[Parameter], dtype: str) -> list[Hold]:
    """What the step of two groups takes at its peak, weights that decay and the rest, one after the other
    (``get_decay_parameter_names``); transformers' Adafactor is one loop over both."""
    if optimizer.implementation == "transformers":
        return step_temporaries(optimizer, parameters, dtype)
    taken = []
    for decays in (True, False):
        group = [parameter for parameter in parameters if parameter.decays == decays]
        taken.append(step_temporaries(_of_group(optimizer, decays), group, dtype))
    return max(taken, key=lambda holds: sum(hold.bytes for hold in holds))


def _of_group(optimizer: Optimizer, decays: bool) -> Optimizer:
    """``optimizer`` with the decay of a group; the Trainer's default is none."""
    decay = (optimizer.weight_decay or 0.0) if decays else 0.0
    return optimizer.model_copy(update={"weight_decay": decay})


def kept_logits(plan: ResolvedPlan, shape: LayerShape) -> tuple[int, int]:
    """Bytes that evaluation holds during its last forward pass, and when the last batch has been appended, where
    metrics are computed from all logits.

    ``evaluation_batches`` = k of one batch's logits (of all ranks, gathered) are on the device: k - 1 in one tensor,
    and the last batch's in a variable, too; then the new tensor of k beside the k - 1 and the new ones.
    """
    batches = plan.trainer.evaluation_batches
    if batches is None:
        return 0, 0
    dtype = "fp32" if plan.precision.autocast else shape.dtype
    ranks = plan.layout.dp if plan.framework == "ddp" else 1

    def of(count: int) -> int:
        """Logits, and labels, of ``count`` batches."""
        rows = count * ranks * shape.b
        if not rows:
            return 0
        tokens = (rows,) if shape.spec.labels else (rows, shape.s)
        return hold_bytes((*tokens, shape.spec.labels or shape.spec.vocab), dtype) + hold_bytes(tokens, "int64")

    during = of(batches - 1) + (of(1) if batches > 2 else 0)
    return during, of(batches - 1) + of(1) + (of(batches) if batches > 1 else 0)


# -- step ----------------------------------------------------------------------------------------------


SCALER = (
    Hold(0, rounded(4), Category.BUFFERS, "loss_scale", (), "fp32"),
    Hold(0, rounded(4), Category.BUFFERS, "growth_tracker", (), "int32"),
)
"""What ``torch.amp.GradScaler`` keeps, which fp16 autocast comes with (``torch/amp/grad_scaler.py``)."""

FOUND_INF = Hold(10**9, rounded(4), Category.TEMPORARIES, "found_inf", (), "fp32")
"""From ``unscale_`` to ``update``; gradients are unscaled in place."""

TakesStep = Callable[[Optimizer, Sequence[Parameter], str], list[Hold]]
"""What the step over parameters of one dtype takes."""

Groups = tuple[tuple[tuple[Parameter, ...], int], ...]
"""Parameters of each module of a device, and how many such modules follow one another."""


@lru_cache(maxsize=128)
def registered(groups: Groups) -> Groups:
    """As the model registers them: the table of words first, also where the head, which shares it, lists it."""
    word = tuple(one for parameters, _ in groups for one in parameters if one.name == "word.weight")
    rest = ((tuple(one for one in parameters if one.name != "word.weight"), count) for parameters, count in groups)
    return ((word, 1), *((parameters, count) for parameters, count in rest if parameters))


def tensors_of(groups: Groups) -> list[Parameter]:
    return [parameter for parameters, count in groups for _ in range(count) for parameter in parameters]


@lru_cache(maxsize=128)
def optimizer_step(groups: Groups, optimizer: Optimizer, dtype: str) -> Stretch:
    """The step over all parameters, whatever the batch."""
    return Stretch(drop_all(of_each_dtype(optimizer, tensors_of(groups), dtype, step_temporaries), 1))


def of_each_dtype(optimizer: Optimizer, parameters: list[Parameter], dtype: str, step: TakesStep) -> list[Hold]:
    """What the step over parameters of several dtypes takes, one dtype after another: tensors in variables of the loop
    last until the next dtype's are there (``optim/adam.py``, ``_multi_tensor_adam``)."""
    by_dtype: dict[str, list[Parameter]] = {}
    for one in parameters:
        by_dtype.setdefault(one.dtype or dtype, []).append(one)
    return [hold for own, those in by_dtype.items() for hold in step(optimizer, those, own)]


@lru_cache(maxsize=128)
def trainer_step(groups: Groups, optimizer: Optimizer, dtype: str, kernel_workspaces: bool) -> tuple[Stretch, int]:
    """The same behind the clipping of gradients, and how many events those are."""
    parameters = tensors_of(groups)
    clipped = clipping(parameters, dtype, kernel_workspaces=kernel_workspaces)
    begin = 1 + sum(isinstance(event, Hold) for event in clipped)
    step = drop_all(of_each_dtype(optimizer, parameters, dtype, step_by_groups), begin)
    return Stretch((*clipped, *step)), len(clipped)
