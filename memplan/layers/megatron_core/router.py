"""``megatron/core/transformer/moe/router.py``, ``TopKRouter``, and the functions of ``moe_utils.py`` that it calls:
logits of every token for every expert, their scores, the choice, and losses that balance it.

Shapes: T tokens of this rank (s b / t), E experts, k experts of a token, h hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import ops
from ..autograd import Gradients, Recorder, Shape, Tensor, Unsummed, incoming
from ..gradients import fresh, fresh_each
from ..selecting import top_k_issue
from ..work import ITEMSIZE, WIDENED, Operator, Product, Stream, Work, size_of
from .shape import CoreShape

WEIGHT = "mlp.router.weight"


def route(r: Recorder, hidden: Tensor, shape: CoreShape) -> tuple[Tensor, Tensor]:
    """Probabilities (T, E) and the booleans (T, E) of the experts that tokens go to."""
    spec = shape.spec
    if shape.experts is not None and shape.experts.jitters:
        hidden = _jittered(r, hidden)
    logits = gating(r, hidden, shape)
    logits = logits.view(shape.routed.own, spec.experts)
    if spec.router_z_loss and r.grad_enabled:
        logits = with_loss(r, logits, _z_loss(r, logits))
    if spec.router_balancing == "sinkhorn":
        probabilities, chosen = _sinkhorn(r, logits, shape)
    elif shape.experts is not None and shape.experts.router_fusion:
        probabilities, chosen = _fused_top_k(r, logits)
    else:
        probabilities, chosen = _top_k(r, logits, shape)
    if shape.experts is not None and shape.experts.capacity_factor is not None:
        probabilities, chosen = _dropped(r, probabilities, chosen, shape)
    if r.grad_enabled and spec.router_aux_loss and spec.router_balancing.endswith("aux_loss"):
        fused = shape.experts is not None and shape.experts.router_fusion
        loss = (_fused_balancing_loss if fused else _balancing_loss)(r, logits, shape)
        probabilities = with_loss(r, probabilities, loss)
    return probabilities, chosen


def _jittered(r: Recorder, x: Tensor) -> Tensor:
    """``apply_input_jitter``: times numbers that ``torch.distributions.Uniform.rsample`` makes (``low + rand * (high -
    low)``), which backward reads."""
    like, dtype = x.shape, x.dtype
    made = [r.empty(like, dtype, "router_noise_random"), r.empty(like, dtype, "router_noise_scaled")]
    noise = r.empty(like, dtype, "router_noise")
    made.clear()

    return r.output((x,), (noise,), fresh(x, "grad_router_jittered"), like, dtype, "router_jittered")


def gating(r: Recorder, x: Tensor, shape: CoreShape) -> Tensor:
    """``RouterGatingLinearFunction``: saves the input and the weight as they are; logits are in the router's dtype,
    and backward makes both factors of its products in it. Transformer Engine multiplies 16-bit factors as they are,
    fp32 ones as TF32 (``cublaslt_gemm.cu``, ``cublas_gemm``)."""
    spec, e = shape.spec, shape.spec.experts
    weight = r.parameter(WEIGHT, (e, spec.hidden), shape.dtype)
    bias = [r.parameter("mlp.router.bias", (e,), shape.dtype)] if spec.mlp_bias else []
    dtype, like, given = spec.router_dtype or x.dtype, x.shape, x.dtype
    tokens = shape.routed.own

    def as_router(r: Recorder, size: Shape, name: str) -> list[Tensor]:
        return [r.empty(size, dtype, name)] if dtype != given else []

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        wide = as_router(r, (e, spec.hidden), "router_weight_cast")
        grad = r.empty(like, dtype, "grad_router_input")
        wide.clear()
        wide = as_router(r, like, "router_input_cast")
        grad_weight = r.empty((e, spec.hidden), dtype, "grad_router_weight")
        wide.clear()
        if dtype != given:
            grad = r.empty(like, given, "grad_router_input_cast")
            grad_weight = r.empty((e, spec.hidden), given, "grad_router_weight_cast")
        return [grad, grad_weight, *(r.empty((e,), given, "grad_router_bias") for _ in bias)]

    if dtype == "fp64":  # no kernel of Transformer Engine: ``torch.mm`` on copies
        copies = [r.empty(like, dtype, "router_input_cast"), r.empty((e, spec.hidden), dtype, "router_weight_cast")]
    else:
        copies = []
    done = gating_work(tokens, e, spec.hidden, given, dtype)
    out = r.empty((*like[:-1], e), dtype, "router_logits")
    copies.clear()
    return out.by(r.node((x, weight, *bias), (x, weight), backward, work=done))


def gating_work(tokens: int, e: int, h: int, given: str, dtype: str) -> Operator:
    """Products of ``tokens`` rows in ``given`` that give logits of ``e`` experts in ``dtype``. Where it is another one,
    backward casts input and weight to it, and their gradients back; in fp64, which PyTorch multiplies, forward does."""
    size, tf32 = ITEMSIZE[dtype], dtype == "fp32"
    products = Product(tokens, h, e, 1, size, tf32=tf32), Product(e, h, tokens, 1, size, tf32=tf32)
    if dtype == given:
        return Operator((Product(tokens, e, h, 1, size, tf32=tf32),), products)
    moved = (ITEMSIZE[given] + size) * h
    widened = [Stream(float(moved * rows), issue=WIDENED.of(rows * h)) for rows in (tokens, e)]
    back: Work = (*widened, *products, Stream(float(moved * tokens)), Stream(float(moved * e)))
    if dtype == "fp64":
        return Operator((*widened, Product(tokens, e, h, 1, size)), back)
    return Operator((Product(tokens, e, h, 1, ITEMSIZE[given], size),), back)


def _top_k(r: Recorder, logits: Tensor, shape: CoreShape) -> tuple[Tensor, Tensor]:
    """``topk_routing_with_score_function``: computed in fp32, given back in the logits' dtype."""
    spec, k = shape.spec, shape.spec.expert_top_k
    few = (logits.shape[0], k)
    if spec.router_score == "sigmoid":
        wide = ops.cast(r, logits, "fp32", "router_logits_fp32")
        scores = ops.elementwise(r, "router_scores", (wide,), (), saves_output=True)
        del wide
        probs, indices = _chosen_scores(r, scores, shape)
        if k > 1:
            probs = _normalised(r, probs)
    elif spec.router_score_first:
        scores = ops.softmax(r, ops.cast(r, logits, "fp32", "router_logits_fp32"), "router_scores")
        probs, indices = _best(r, scores, shape)
    else:
        scores, indices = _best(r, logits, shape)
        probs = ops.softmax(r, ops.cast(r, scores, "fp32", "router_chosen_fp32"), "router_probabilities")
    del scores
    if spec.router_scaling is not None:
        probs = ops.scale(r, probs, "router_probabilities_scaled")
    probs = ops.cast(r, probs, logits.dtype, "router_probabilities_cast")
    assert probs.shape == few
    spread = _placed if shape.deterministic else _spread
    return spread(r, probs, indices, logits.shape), _map(r, logits)


def _fused_top_k(r: Recorder, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Transformer Engine's ``FusedTopkScoreFunction`` (``pytorch/router.py``, ``csrc/extensions/router.cpp``):
    probabilities in the logits' dtype; saves the map and the scores of all experts in fp32."""
    like, dtype = logits.shape, logits.dtype
    probabilities = r.empty(like, dtype, "router_probabilities_spread")
    chosen, scores = r.empty(like, "bool", "routing_map"), r.empty(like, "fp32", "router_scores")

    return probabilities.by(r.node((logits,), (chosen, scores), fresh(logits, "grad_router_logits"))), chosen


def _fused_balancing_loss(r: Recorder, logits: Tensor, shape: CoreShape) -> Tensor:
    """``FusedComputeScoresForMoEAuxLoss``, which saves scores in fp32 beside those that it returns, and
    ``FusedAuxLoss``, which saves two numbers and the tokens of each expert."""
    like = logits.shape
    scores = r.empty(like, "fp32", "aux_scores")
    chosen, inner = r.empty(like, "bool", "routing_map"), r.empty(like, "fp32", "aux_scores_inner")

    scores.node = r.node((logits,), (inner,), fresh(logits, "grad_aux_logits"))
    experts = like[1] * (shape.b if shape.spec.router_balancing == "seq_aux_loss" else 1)
    tokens = r.empty((experts,), "int64", "tokens_per_expert")
    loss, numbers = r.empty((), "fp32", "aux_loss"), r.empty((2,), "fp32", "aux_numbers")
    del chosen
    return loss.by(r.node((scores,), (numbers, tokens), fresh(scores, "grad_aux_scores")))


def _chosen_scores(r: Recorder, scores: Tensor, shape: CoreShape) -> tuple[Tensor, Tensor]:
    """Sigmoid scores of the chosen experts, whom a bias may have chosen."""
    if not shape.spec.router_expert_bias:
        return _best(r, scores, shape)
    biased = ops.add_constant(r, scores, "router_scores_biased")
    _, indices = _best(r, biased, shape)
    del biased
    few, dtype = indices.shape, scores.dtype
    gathered = r.output(
        (scores,), (scores, indices), fresh(scores, "grad_router_gathered"),
        few, dtype, "router_gathered",
    )  # fmt: skip
    return gathered, indices


def _best(r: Recorder, scores: Tensor, shape: CoreShape) -> tuple[Tensor, Tensor]:
    """``torch.topk`` along experts: values, and their int64 indices, which are saved; first of groups, where experts
    are in some (``group_limited_topk``)."""
    spec, like, dtype = shape.spec, scores.shape, scores.dtype
    if spec.router_groups:
        mask = r.empty(like, "bool", "router_group_mask")
        scores = ops.elementwise(r, "router_scores_masked", (scores,), (mask,))
        del mask
    few = (like[0], spec.expert_top_k)
    values = r.empty(few, dtype, "router_best")
    indices = r.empty(few, "int64", "router_indices")
    chosen = Operator(issue=(top_k_issue(like), 0))
    values.node = r.node((scores,), (indices,), fresh(scores, "grad_router_best"), work=chosen)
    return values, indices


def _normalised(r: Recorder, scores: Tensor) -> Tensor:
    """``scores / (scores.sum(-1) + 1e-20)``: saves both factors; the gradient of the sum is added to that of scores."""
    one, dtype, like = (scores.shape[0], 1), scores.dtype, scores.shape
    total = r.empty(one, dtype, "router_sum")
    total.node = r.node((scores,), (), lambda r, gradients: [incoming(gradients).alias(*like)])
    total = ops.add_constant(r, total, "router_sum_positive")

    backward = fresh_each((scores, "grad_router_normalised"), (total, "grad_router_sum"))
    return r.output((scores, total), (scores, total), backward, like, dtype, "router_normalised")


def _spread(r: Recorder, probs: Tensor, indices: Tensor, whole: Shape) -> Tensor:
    """``zeros_like(logits).scatter(1, indices, probs)``: saves the indices; backward gathers."""
    dtype = probs.dtype
    out = r.in_turn((whole, dtype, "router_zeros"), (whole, dtype, "router_probabilities_spread"))
    return out.by(r.node((probs,), (indices,), fresh(probs, "grad_router_spread")))


def _placed(r: Recorder, probs: Tensor, indices: Tensor, whole: Shape) -> Tensor:
    """``zeros_like(logits).index_put_((rows, indices), probs)`` of deterministic algorithms: saves rows, too."""
    out = r.empty(whole, probs.dtype, "router_probabilities_spread")
    rows = r.empty((whole[0], 1), "int64", "router_rows")
    return out.by(r.node((probs,), (rows, indices), fresh(probs, "grad_router_spread")))


def _map(r: Recorder, logits: Tensor) -> Tensor:
    """``zeros_like(logits).int().scatter(1, indices, 1).bool()``."""
    return r.in_turn(
        (logits.shape, logits.dtype, "routing_map_zeros"),
        (logits.shape, "int32", "routing_map_int32"),
        (logits.shape, "int32", "routing_map_scattered"),
        (logits.shape, "bool", "routing_map"),
    )


def _sinkhorn(r: Recorder, logits: Tensor, shape: CoreShape) -> tuple[Tensor, Tensor]:
    """``sinkhorn_load_balancing``: rows and columns are normalised in fp32 without a graph; the probability is the
    sigmoid (k = 1) or softmax of the logits where the map has the expert."""
    made = [r.empty(logits.shape, "fp32", f"sinkhorn_{part}") for part in ("logits", "cost", "scaled", "normalised")]
    indices = r.empty((logits.shape[0], shape.spec.expert_top_k), "int64", "router_indices")
    made.clear()
    if shape.spec.expert_top_k == 1:
        scores = ops.elementwise(r, "router_scores", (logits,), (), saves_output=True)
    else:
        wide = ops.cast(r, logits, "fp32", "router_logits_fp32")
        scores = ops.cast(r, ops.softmax(r, wide, "router_scores_fp32"), logits.dtype, "router_scores")
        del wide
    chosen = _map(r, logits)
    del indices
    return ops.multiply(r, scores, chosen, "router_probabilities"), chosen


def _dropped(r: Recorder, probs: Tensor, chosen: Tensor, shape: CoreShape) -> tuple[Tensor, Tensor]:
    """``apply_router_token_dropping``: every expert's most probable tokens, as many as its capacity."""
    experts = shape.mixture
    assert experts.capacity_factor is not None
    capacity = min(shape.capacity, probs.shape[0])
    made = [r.empty((capacity, probs.shape[1]), probs.dtype, "capacity_best")]
    made += [r.empty((capacity, probs.shape[1]), "int64", "capacity_indices")]
    made += [r.empty(probs.shape, probs.dtype, "capacity_zeros"), r.empty(probs.shape, probs.dtype, "capacity_map")]
    mask = r.empty(probs.shape, "bool", "capacity_mask")
    made.clear()
    if not experts.padded:
        mask = r.empty(probs.shape, "bool", "routing_map_dropped")
    return ops.multiply(r, probs, mask, "router_probabilities_dropped"), mask


def _balancing_loss(r: Recorder, logits: Tensor, shape: CoreShape) -> Tensor:
    """``compute_routing_scores_for_aux_loss`` and ``switch_load_balancing_loss_func``: scores of all experts in fp32,
    which are saved, their sum over tokens, and its product with the tokens of each expert (in each sequence, where
    that is what is balanced)."""
    wide = ops.cast(r, logits, "fp32", "aux_logits_fp32")
    if shape.spec.router_score == "softmax":
        scores = ops.softmax(r, wide, "aux_scores")
    else:
        scores = _normalised(r, ops.elementwise(r, "aux_scores", (wide,), (), saves_output=True))
    del wide
    r.ran(Stream(size_of(scores.shape, "fp32"), issue=top_k_issue(scores.shape)))
    best = [r.empty((logits.shape[0], shape.spec.expert_top_k), kind, "aux_best") for kind in ("fp32", "int64")]
    chosen = _map(r, logits)
    best.clear()
    experts = logits.shape[1] * (shape.b if shape.spec.router_balancing == "seq_aux_loss" else 1)
    tokens = r.empty((experts,), "int64", "tokens_per_expert")
    like = scores.shape
    summed = r.empty((experts,), "fp32", "aux_summed")
    summed.node = r.node((scores,), (), lambda r, gradients: [incoming(gradients).alias(*like)])
    product = ops.multiply(r, summed, tokens, "aux_product")
    del chosen, summed, tokens, scores
    return _number(r, product, "aux_loss")


def _z_loss(r: Recorder, logits: Tensor) -> Tensor:
    """``z_loss_func``: the mean square of each token's log-sum-exp."""
    rows, like, dtype = (logits.shape[0],), logits.shape, logits.dtype
    out = r.empty(rows, dtype, "z_logsumexp")

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        product = r.in_turn(
            (like, dtype, "z_difference"), (like, dtype, "z_exponential"), (like, dtype, "grad_z_logits")
        )
        return [product]

    out.node = r.node((logits,), (logits, out), backward)
    square = ops.power(r, out, "z_square")
    return _number(r, square, "z_loss")


def _number(r: Recorder, x: Tensor, name: str) -> Tensor:
    """A sum or mean over all elements, times a coefficient."""
    like, dtype = x.shape, x.dtype
    total = r.empty((), dtype, f"{name}_sum")
    total.node = r.node((x,), (), lambda r, gradients: [incoming(gradients).alias(*like)])
    return ops.scale(r, total, name)


def with_loss(r: Recorder, x: Tensor, loss: Tensor, name: str = "router_loss") -> Tensor:
    """``MoEAuxLossAutoScaler`` and ``MTPLossAutoScaler``: ``x`` itself, whose backward begins that of the loss, too."""
    of_loss = fresh(loss, f"grad_{name}")

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        return [incoming(gradients), *of_loss(r, gradients)]

    return Tensor(x.storage, x.shape, x.dtype, r.node((x, loss), (loss,), backward))
