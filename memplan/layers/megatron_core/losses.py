"""From logits to the loss of one micro-batch in Megatron-Core.

Vocabulary-parallel cross entropy: ``megatron/core/tensor_parallel/cross_entropy.py`` (unfused),
``fusions/fused_cross_entropy.py`` (native, through ``torch.compile``), Transformer Engine's in ``te``. Around it
``LanguageModule.compute_language_model_loss`` (``models/common/language_module/language_module.py``), and
behind it ``pretrain_gpt.py``, ``loss_func``, with ``schedules.py``, ``forward_step_calc_loss``.
Collectives work in place. Shapes: s sequence, b micro-batch, n = s b, v padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...tape.events import Category
from .. import ops
from ..autograd import Gradients, Recorder, Shape, Tensor, size_of
from ..gradients import each, viewed
from ..tensor_parallel import masked
from ..work import Exchange, Operator, Stream, parallel_cross_entropy
from . import te
from .shape import CoreShape

INPUTS, LOGITS, WORKSPACES = Category.INPUTS, Category.LOGITS, Category.WORKSPACES


def language_model_loss(r: Recorder, logits: Tensor, shape: CoreShape) -> Tensor:
    """``compute_language_model_loss``: the fp32 loss (b, s) of logits (s, b, v/t), which the caller still holds.

    The labels (b, s) are transposed by a copy, the loss back by another, unless b or s is 1.
    """
    s, b = logits.shape[:2]
    copies = b > 1 and s > 1
    labels = [r.empty((s, b), "int64", "labels_transposed")] if copies else []
    if shape.cross_entropy == "te":
        loss = te.cross_entropy(r, logits, shape)
    elif shape.cross_entropy == "native":
        loss = native_cross_entropy(r, logits, shape.t)
    else:
        loss = unfused_cross_entropy(r, logits, shape)
    out = ops.contiguous(r, loss, (b, s), "loss_transposed") if copies else loss.view(b, s)
    labels.clear()
    return out


def unfused_cross_entropy(r: Recorder, logits: Tensor, shape: CoreShape) -> Tensor:
    """``_VocabParallelCrossEntropy``: the loss (s, b) of (s, b, v/t) logits, all in one fp32 copy of them.

    The maximum is subtracted, the exponential taken and the division done in place; the softmax, the mask of
    foreign targets and the targets are saved. Backward turns the softmax into the gradient, which
    autograd casts to the logits' dtype while the node still holds the fp32 one (``engine.cpp``,
    ``validate_outputs``). Logits in fp32 are overwritten themselves.
    """
    s, b = logits.shape[:2]
    n, whole, dtype = s * b, logits.shape, logits.dtype
    softmax = _upcast(r, logits)
    maximum = r.empty((s, b), "fp32", "logits_max")
    r.empty((s, b), "int64", "logits_argmax")
    names = ("target_below", "target_above", "target_mask", "target_cloned", "masked_target")
    outside, target = masked(r, (s, b), names)
    rows = r.empty((n,), "int64", "arange")
    predicted = r.in_turn(((n,), "fp32", "predicted_logits_picked"), ((n,), "fp32", "predicted_logits"))
    total = r.empty((s, b), "fp32", "sum_exp_logits")
    del rows
    loss = r.in_turn(((s, b), "fp32", "log_sum_exp_logits"), ((s, b), "fp32", "loss_per_token"))
    in_place = softmax.storage if dtype == "fp32" else None

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        _softmax_to_gradient(r, n, shape.deterministic)
        gradients.clear()  # a Python function's arguments end before its results are cast
        if in_place is not None:
            return [Tensor(in_place, whole, dtype)]
        return [r.empty(whole, dtype, "grad_logits", LOGITS)]

    work = parallel_cross_entropy(whole, shape.t, cast=dtype != "fp32")
    loss.node = r.node((logits,), (softmax, outside, target), backward, work=work)
    del maximum, predicted, total
    return loss


def _upcast(r: Recorder, logits: Tensor) -> Tensor:
    """``logits.float()`` outside of autograd."""
    if logits.dtype == "fp32":
        return Tensor(logits.storage, logits.shape, "fp32")
    return r.empty(logits.shape, "fp32", "logits_fp32", LOGITS)


def _softmax_to_gradient(r: Recorder, n: int, deterministic: bool) -> None:
    """``prepare_gradient_calculation_operands`` and ``calculate_gradients``: what they need beside the softmax."""
    rows = r.empty((n,), "int64", "arange")
    update = r.in_turn(((n,), "fp32", "target_mask_fp32"), ((n,), "fp32", "softmax_update"))
    picked = r.empty((n,), "fp32", "softmax_picked")
    if deterministic and r.kernel_workspaces:
        sorted_indices(r, n, dims=2)
    del picked, rows, update


def sorted_indices(r: Recorder, n: int, dims: int = 1) -> list[Tensor]:
    """What ``index_put_`` still holds when it has sorted ``n`` linear indices over ``dims`` dimensions.

    It sorts to accumulate, and in deterministic mode (``aten/src/ATen/native/cuda/Indexing.cu``,
    ``computeLinearIndex``, ``index_put_with_sort_kernel``); ``cub``'s radix sort needs a second pair of buffers.
    """
    linear = []
    for _ in range(dims):
        wrapped = r.empty((n,), "int64", "index_wrapped", WORKSPACES)
        linear.append(r.empty((n,), "int64", "index_linear", WORKSPACES))
        del wrapped, linear[1:]
    kept = [r.empty((n,), "int64", name, WORKSPACES) for name in ("indices_sorted", "indices_original")]
    rows = r.empty((n,), "int64", "indices_range", WORKSPACES)
    r.empty((2 * n,), "int64", "radix_sort_buffers", WORKSPACES)
    del rows
    return linear + kept


def native_cross_entropy(r: Recorder, logits: Tensor, t: int) -> Tensor:
    """``fused_vocab_parallel_cross_entropy``: the loss (s, b) of (s, b, v/t) logits, compiled by Inductor.

    Forward works in one fp32 copy of the logits as the unfused one does. In backward Inductor cannot put
    ``index_put`` in place, because the saved softmax is written again behind it, so the softmax is copied
    in fp32; the gradient is always bf16.
    """
    s, b = logits.shape[:2]
    n, whole, dtype = s * b, logits.shape, logits.dtype
    softmax = _upcast(r, logits)
    maximum = r.empty((s, b), "fp32", "logits_max")
    outside = r.empty((s, b), "bool", "target_mask")
    target = r.empty((s, b), "int64", "masked_target")
    picked, predicted = r.empty((n,), "fp32", "predicted_logits_picked"), r.empty((s, b), "fp32", "predicted_logits")
    sums = r.empty((2 * s, b), "fp32", "predicted_logits_sum_exp_logits")
    del picked, predicted
    loss = r.empty((s, b), "fp32", "loss_per_token")

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        grad = r.in_turn(
            (whole, "fp32", "softmax_copied", LOGITS),
            (whole, "bf16", "grad_logits_bf16" if dtype != "bf16" else "grad_logits", LOGITS),
        )
        gradients.clear()
        if dtype != "bf16":
            grad = r.empty(whole, dtype, "grad_logits", LOGITS)
        return [grad]

    loss.node = r.node((logits,), (softmax, outside, target), backward, work=_native(whole, dtype, t))
    del maximum, sums
    return loss


def _native(shape: Shape, dtype: str, t: int) -> Operator:
    """Three kernels read the logits, and write them in fp32, for the maximum; read those, less it, for exponentials and
    their sum; and divide. Backward copies the softmax and writes the gradient from it."""
    wide, size = size_of(shape, "fp32"), size_of(shape, dtype)
    sums = [Exchange("all-reduce", size_of(shape[:-1], "fp32"), times=2)] if t > 1 else []
    return Operator((Stream(size + 5 * wide, 3, True), *sums), (Stream(3 * wide + size, 2, True),))


def gpt_loss(r: Recorder, per_token: Tensor, loss_mask: Tensor, *, per_token_loss: bool) -> Tensor:
    """``loss_func`` on the loss (b, s) and the fp32 mask (b, s): a scalar.

    The mask is saved. Without ``--calculate-per-token-loss`` the sum is divided by the number of tokens, an int32
    scalar that is saved, and by that of micro-batches. The report of one micro-batch (two fp32) ends here; it
    really ends with the iteration (512 B a micro-batch).
    """
    b, s = per_token.shape
    masked = ops.multiply(r, per_token.view(b * s), loss_mask.view(b * s), "masked_loss")
    loss = total(r, masked, "loss")
    del masked
    count = r.in_turn(((), "fp32", "tokens"), ((), "fp32", "tokens_cloned"), ((), "int32", "tokens_int32"))
    report = r.in_turn(((), "fp32", "loss_cloned"), ((2,), "fp32", "loss_report"))
    if not per_token_loss:
        divisor = r.empty((), "int32", "tokens_clamped")
        loss.node = r.node((loss,), (divisor,), scalar_gradient)
        del divisor
        loss.node = r.node((loss,), (), scalar_gradient)
    del count, report
    return loss


def total(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``x.sum()``: its gradient is expanded without memory."""
    return r.empty((), x.dtype, name).by(r.node((x,), (), viewed(x)))


scalar_gradient = each(((), "fp32", "grad_loss_scaled"))
"""Of a scalar that was multiplied or divided in place."""
