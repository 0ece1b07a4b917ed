"""Mixtures of experts as transformers (5.x) writes them: routers, and experts by ``experts_implementation``
(``integrations/moe.py``).

All experts of a layer are two parameters, (E, 2f, h) and (E, h, f). Shapes: n tokens of a micro-batch, k experts of a
token, N = n k rows, E experts, h hidden, f an expert's inner width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..plan.spec import ModelSpec
from . import ops, selecting, work
from .autograd import Recorder, Tensor
from .gradients import needed
from .huggingface import LayerShape, activation, linear, softmax_fp32
from .tuning import Factors, factors, folded, matrices, registered_once
from .work import ITEMSIZE, Shape

MODULE = "mixture"
"""Router and experts."""

ROUTER, EXPERTS, ACTIVATION = "router", "experts", "experts.activation"
"""Modules of which it is made; and the one in the experts, which has no parameters."""

GATE_UP, DOWN = "experts.gate_up", "experts.down"

Routed = tuple[Tensor, Tensor, Tensor]
"""Logits (n, E), weights and indices (n, k)."""

Mixed = tuple[Tensor, Tensor | None]
"""(b, s, h), and logits that the layer is given, which it holds until it returns."""

Router = Callable[[Recorder, Tensor, ModelSpec], Routed]

Gate = Callable[[Recorder, Tensor, ModelSpec], Tensor]
"""(N, 2f) to (N, f)."""


# -- routers ----------------------------------------------------------------------------------------


def logits_of(r: Recorder, hidden: Tensor, spec: ModelSpec) -> Tensor:
    """``F.linear`` of rows (n, h)."""
    weight = r.parameter("router.weight", (spec.experts, spec.hidden), hidden.dtype)
    bias = r.parameter("router.bias", (spec.experts,), hidden.dtype) if spec.mlp_bias else None
    return ops.linear(r, hidden, weight, bias, name="router_logits")


def fp32_weights(r: Recorder, hidden: Tensor, spec: ModelSpec) -> Routed:
    """``MixtralTopKRouter.forward``: probabilities of the chosen, normed, in fp32."""
    logits = logits_of(r, ops.alias(r, hidden), spec)
    probabilities = ops.softmax(r, ops.cast(r, logits, "fp32", "router_logits_fp32"), "router_probabilities")
    weights, indices = selecting.top_k(r, probabilities, spec.expert_top_k, "chosen")
    return logits, normed(r, weights), indices


def cast_weights(r: Recorder, hidden: Tensor, spec: ModelSpec) -> Routed:
    """``Qwen3MoeTopKRouter.forward``: normed or not (``norm_topk_prob``), then in the dtype of logits."""
    logits = logits_of(r, ops.alias(r, hidden), spec)
    probabilities = softmax_fp32(r, logits, "router")
    weights, indices = selecting.top_k(r, probabilities, spec.expert_top_k, "chosen")
    if not spec.router_score_first:
        weights = normed(r, weights)
    weights = ops.cast(r, weights, logits.dtype, "chosen_cast")
    return logits, weights, indices


def grouped_softmax(r: Recorder, hidden: Tensor, spec: ModelSpec) -> Routed:
    """``DeepseekV2TopkRouter.forward``: in fp32; scores of experts outside the best groups are nought."""
    logits = fp32_logits(r, hidden, spec)
    scores = softmax_fp32(r, logits, "router")
    if spec.router_groups:
        groups = (scores.shape[0], spec.router_groups)
        _best = r.empty(groups, "fp32", "group_scores"), saved(r, groups, "group_scores_indices")
        masks, _variables = outside_groups(r, scores.shape, spec)
        scores = ops.elementwise(r, "router_scores", (scores,), (masks.pop(),))
    weights, indices = selecting.top_k(r, scores, spec.expert_top_k, "chosen")
    weights = ops.scale(r, weights, "chosen_scaled")
    return logits, weights, indices


def grouped_sigmoid(r: Recorder, hidden: Tensor, spec: ModelSpec) -> Routed:
    """``DeepseekV3TopkRouter.forward``: in fp32; chosen by scores and a bias without gradient, from the best groups,
    perhaps the only one. What the choice saves is for no backward."""
    logits = fp32_logits(r, hidden, spec)
    scores = ops.elementwise(r, "router_scores", (logits,), saves_output=True)
    _choice: tuple[Tensor, ...] = (r.empty(scores.shape, "fp32", "scores_for_choice"),)
    groups = (scores.shape[0], spec.router_groups or 1)
    of_group = (*groups, scores.shape[1] // groups[1])
    two = r.empty((*groups, 2), "fp32", "best_of_group")
    of_two = saved(r, two.shape, "best_of_group_indices")
    _best = r.empty(groups, "fp32", "group_scores"), of_two
    del two, of_two
    masks, _variables = outside_groups(r, scores.shape, spec)
    within = [r.empty(scores.shape, "fp32", "scores_within_groups")]
    within += masks if keeps(r) else []
    masks.clear()
    _choice = tuple(within)
    del within
    for shape in (of_group, scores.shape):
        r.ran(work.Stream(0, 0, issue=selecting.top_k_issue(shape)))
    top = r.empty((groups[0], spec.expert_top_k), "fp32", "chosen_values")
    indices = r.empty(top.shape, "int64", "chosen_indices")
    del top
    weights = selecting.gathered(r, scores, indices, "chosen")
    total = ops.add_constant(r, selecting.sum_last(r, weights, "chosen_sum"), "chosen_sum_eps")
    weights = selecting.divided_in_place(r, weights, total, "chosen_normed")
    weights = ops.scale(r, weights, "chosen_scaled")
    return logits, weights, indices


def fp32_logits(r: Recorder, hidden: Tensor, spec: ModelSpec) -> Tensor:
    """``F.linear(hidden_states.type(torch.float32), self.weight.type(torch.float32))``."""
    wide = ops.cast(r, ops.alias(r, hidden), "fp32", "router_input_fp32")
    weight = r.parameter("router.weight", (spec.experts, spec.hidden), hidden.dtype)
    weight = ops.cast(r, weight, "fp32", "router_weight_fp32")
    return ops.linear(r, wide, weight, name="router_logits")


def keeps(r: Recorder) -> bool:
    """Nodes keep what they save while their outputs live, though no backward will ask for it; not so in the forward
    pass of a layer that will be recomputed."""
    return r.grad_enabled and (r.frame is None or r.frame.again is not None)


def saved(r: Recorder, shape: Shape, name: str) -> Tensor | None:
    """Indices that such a node saves."""
    made = r.empty(shape, "int64", name)
    return made if keeps(r) else None


def outside_groups(r: Recorder, shape: Shape, spec: ModelSpec) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Where experts are not of the best groups, one mask (n, E) of bool; and what stays in variables."""
    n, groups = shape[0], spec.router_groups or 1
    r.ran(work.Stream(0, 0, issue=selecting.top_k_issue((n, groups))))
    values = r.empty((n, spec.router_group_top_k or 1), "fp32", "chosen_groups_values")
    chosen = r.empty(values.shape, "int64", "chosen_groups")
    del values
    of_groups = r.empty((n, groups), "fp32", "group_mask")
    of_experts = r.empty(shape, "fp32", "score_mask") if groups > 1 else of_groups
    outside = r.in_turn((shape, "bool", "inside_groups"), (shape, "bool", "outside_groups"))
    return [outside], (of_experts, of_groups, chosen)


def normed(r: Recorder, weights: Tensor) -> Tensor:
    """``weights /= weights.sum(-1, keepdim=True)``."""
    return selecting.divided_in_place(r, weights, selecting.sum_last(r, weights, "chosen_sum"), "chosen_normed")


# -- before transformers 5, one module for each expert ------------------------------------------------


def looped(r: Recorder, x: Tensor, shape: LayerShape, names: Sequence[str]) -> Mixed:
    """``SparseMoeBlock.forward`` of transformers 4: one expert after the other, whose linear layers (gate, up, down)
    have ``names``, adds its rows to the sum. Logits are returned."""
    spec, dtype = shape.spec, x.dtype
    hidden = ops.alias(r, x)
    hidden = hidden.alias(shape.b * shape.s, spec.hidden)
    logits = linear(r, hidden, "router", spec.experts, False)
    weights, indices = selecting.top_k(r, softmax_fp32(r, logits, "router"), spec.expert_top_k, "chosen")
    if not spec.router_score_first:
        weights = normed(r, weights)
    weights = ops.cast(r, weights, dtype, "chosen_cast")
    final = r.empty(hidden.shape, dtype, "experts_output")
    mask = r.empty((*indices.shape, spec.experts), "int64", "expert_mask")
    for expert, rows in enumerate(balanced(shape)):
        places = r.empty((2, rows), "int64", "rows_of_expert")
        state = selecting.picked(r, hidden, places, (rows, spec.hidden), "rows")
        own = [f"experts.{expert}.{name}" for name in names]
        made = ops.multiply(
            r,
            one_expert(r, state, spec, own, spec.expert_ffn),
            selecting.picked(r, weights, places, (rows, 1), "row_weights"),
            "rows_weighted",
        )
        final = selecting.added_rows(r, final, places, ops.cast(r, made, dtype, "rows_cast"))
    out = final.view(*x.shape)
    del mask
    return out, logits


def one_expert(r: Recorder, x: Tensor, spec: ModelSpec, names: Sequence[str], width: int) -> Tensor:
    """``w2(act_fn(w1(x)) * w3(x))``."""
    gate, up, down = names
    inner = activation(r, linear(r, x, gate, width, False), spec)
    inner = ops.multiply(r, inner, linear(r, x, up, width, False), "gated")
    return linear(r, inner, down, spec.hidden, False)


def balanced(shape: LayerShape) -> list[int]:
    """Rows of each expert where all have as many."""
    rows, experts = shape.b * shape.s * shape.spec.expert_top_k, shape.spec.experts
    return [(rows + experts - 1 - at) // experts for at in range(experts)]


# -- experts ----------------------------------------------------------------------------------------


def mixture(
    r: Recorder, x: Tensor, shape: LayerShape, router: Router, *, gate: Gate | None = None, returns: bool = False
) -> Mixed:
    """``SparseMoeBlock.forward``: (b, s, h) to the same; its variables hold what the router gave until it returns.

    ``gate``: the experts' activation, if not of two halves. ``returns``: the layer is given weights.
    """
    (x,) = r.entered(MODULE, x)
    hidden = ops.alias(r, x)
    hidden = hidden.alias(shape.b * shape.s, shape.spec.hidden)
    logits, weights, indices = routed(r, hidden, shape.spec, router)
    out = by_experts(r, hidden, indices, weights, shape, gate or gated)
    given = weights if returns else None
    del logits, weights, indices
    return r.left(MODULE, out.view(*x.shape)), given


def routed(r: Recorder, hidden: Tensor, spec: ModelSpec, router: Router) -> Routed:
    """What ``router`` gives; of its logits there is no gradient."""
    (hidden,) = r.entered(ROUTER, hidden)
    logits, weights, indices = router(r, hidden, spec)
    return logits, r.left(ROUTER, weights), indices


def by_experts(r: Recorder, hidden: Tensor, indices: Tensor, weights: Tensor, shape: LayerShape, gate: Gate) -> Tensor:
    """The experts' output, whose hooks run once their function's variables have ended."""
    hidden, weights = r.entered(EXPERTS, hidden, weights)
    return r.left(EXPERTS, grouped_mm(r, hidden, indices, weights, shape, gate))


def gated(r: Recorder, x: Tensor, spec: ModelSpec) -> Tensor:
    """``_default_apply_gate``: ``act_fn(gate) * up`` of two halves."""
    half = (*x.shape[:-1], x.shape[-1] // 2)
    gate, up = ops.split(r, x, [half, half], "gate_up")
    (gate,) = r.entered(ACTIVATION, gate)
    inner = r.left(ACTIVATION, activation(r, gate, spec))
    return ops.multiply(r, inner, up, "gated")


def with_shared(r: Recorder, hidden: Tensor, shape: LayerShape, router: Router) -> Mixed:
    """``DeepseekV3MoE.forward``: and experts that take every token."""
    spec = shape.spec
    (hidden,) = r.entered(MODULE, hidden)
    residuals, rows = hidden, (shape.b * shape.s, spec.hidden)
    _logits, weights, indices = routed(r, hidden.alias(*rows), spec, router)
    hidden = ops.alias(r, hidden)
    hidden = hidden.alias(*rows)
    hidden = by_experts(r, hidden, indices, weights, shape, gated).view(*residuals.shape)
    names = ("shared_gate", "shared_up", "shared_down")
    hidden = ops.add(r, hidden, one_expert(r, residuals, spec, names, spec.shared_expert_ffn), "experts_and_shared")
    return r.left(MODULE, hidden), None


def with_opened(r: Recorder, x: Tensor, shape: LayerShape, router: Router) -> Mixed:
    """``Qwen3NextSparseMoeBlock.forward``: an expert that takes every token, by a gate of its own, and runs first."""
    spec = shape.spec
    (x,) = r.entered(MODULE, x)
    hidden = ops.alias(r, x)
    hidden = hidden.alias(shape.b * shape.s, spec.hidden)
    shared = one_expert(r, hidden, spec, ("shared_gate", "shared_up", "shared_down"), spec.shared_expert_ffn)
    _logits, weights, indices = routed(r, hidden, spec, router)
    out = by_experts(r, hidden, indices, weights, shape, gated)
    shared = ops.multiply(r, opened(r, hidden), shared, "shared_opened")
    out = ops.add(r, out, shared, "experts_and_shared")
    return r.left(MODULE, out.view(*x.shape)), None


def opened(r: Recorder, hidden: Tensor) -> Tensor:
    """How far the gate of that expert is open: ``F.sigmoid(self.shared_expert_gate(hidden_states))``, (n, 1)."""
    return ops.elementwise(r, "shared_sigmoid", (linear(r, hidden, "shared_opens", 1, False),), saves_output=True)


def parameters(
    r: Recorder, spec: ModelSpec, name: str, sizes: tuple[int, int], dtype: str
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of every expert's projection ``name`` to (n, k)."""
    weight = r.parameter(name, (spec.experts, *sizes), dtype)
    return weight, r.parameter(f"{name}_bias", (spec.experts, sizes[0]), dtype) if spec.mlp_bias else None


def grouped_mm(r: Recorder, hidden: Tensor, indices: Tensor, weights: Tensor, shape: LayerShape, gate: Gate) -> Tensor:
    """``grouped_mm_experts_forward``: rows sorted by expert, one grouped product for each projection. No tensor's size
    depends on which experts tokens go to."""
    spec, k = shape.spec, shape.spec.expert_top_k
    n, experts = hidden.shape[0], (shape.spec.experts,)
    rows = (n * k,)
    f, h = spec.expert_ffn, spec.hidden
    gate_up, gate_up_bias = parameters(r, spec, GATE_UP, (2 * f, h), hidden.dtype)
    down, down_bias = parameters(r, spec, DOWN, (h, f), hidden.dtype)
    adapters = wrapped(r, {GATE_UP: gate_up, DOWN: down})
    scales = weights.view(*rows)
    sorted_ids = r.empty(rows, "int64", "expert_ids_sorted")
    order = r.empty(rows, "int64", "row_order")
    selected = selecting.gathered(r, hidden, r.empty(rows, "int64", "token_of_row"), "rows")
    sorted_scales = selecting.gathered(r, scales, order, "row_weights")
    ids = r.empty(rows, "int32", "expert_ids_int32")
    counts = r.empty(experts, "int32", "tokens_of_expert")
    offsets = r.empty(experts, "int32", "expert_offsets")
    biases = gate_up_bias and selecting.gathered(r, gate_up_bias, sorted_ids, "gate_up_biases")
    gate_up = folded(r, gate_up, adapters.get(GATE_UP), GATE_UP)
    out = biased(r, grouped_product(r, selected, gate_up, offsets, "experts_gate_up"), biases)
    out = gate(r, out, spec)
    biases = down_bias and selecting.gathered(r, down_bias, sorted_ids, "down_biases")
    down = folded(r, down, adapters.get(DOWN), DOWN)
    out = biased(r, grouped_product(r, out, down, offsets, "experts_down"), biases)
    weighted = ops.multiply(r, out, sorted_scales.view(*rows, 1), "rows_weighted")
    inverse = r.empty(rows, "int64", "row_order_inverse")
    r.empty(rows, "int64", "row_numbers")
    weighted = selecting.gathered(r, weighted, inverse, "rows_restored")
    final = selecting.sum_of_rows(r, weighted, k)
    result = ops.cast(r, final, hidden.dtype, "experts_output")
    del sorted_ids, order, selected, sorted_scales, ids, counts
    return result


def wrapped(r: Recorder, weights: Mapping[str, Tensor]) -> dict[str, Factors]:
    """What peft's wrappers around the experts make before these run, for each of ``weights`` that has an adapter: the
    outermost, that of the last weight, first."""
    targets = r.tuning.adapters.experts if r.tuning is not None and r.tuning.adapters is not None else frozenset()
    of = {name: matrices(r, name, weight.shape, weight.dtype) for name, weight in weights.items() if name in targets}
    made = {}
    for name, both in reversed(of.items()):
        made[name] = factors(r, name, both, weights[name].dtype)
        registered_once(r, name, weights[name].shape, weights[name].dtype)
    return made


def biased(r: Recorder, x: Tensor, biases: Tensor | None) -> Tensor:
    return x if biases is None else ops.add_in_place(r, x, biases)


def grouped_product(r: Recorder, x: Tensor, weight: Tensor, offsets: Tensor, name: str) -> Tensor:
    """``grouped_mm(x.to(weight.dtype), weight.transpose(-2, -1), offs=offsets)`` of (N, in) with (E, out, in), which
    autocast does not know; the gradient of ``mat2`` comes before that of ``self``."""
    x = ops.cast(r, x, weight.dtype, f"{name}_input_cast")
    e, n, k = weight.shape
    like, dtype = x.shape, weight.dtype
    needs_x, needs_weight = x.node is not None, weight.node is not None
    backward = needed((x, f"grad_{name}_input"), (weight, f"grad_{name}_weight"), last_first=True)
    rows, size = -(-like[0] // e), ITEMSIZE[dtype]
    of_input = work.Product(rows, k, n, e, size, tokens="m")
    of_weight = work.Product(n, k, rows, e, size, tokens="k")
    done = [*([of_input] if needs_x else []), *([of_weight] if needs_weight else [])]
    products = work.Operator((work.Product(rows, n, k, e, size, tokens="m"),), done)
    saves = [offsets, *([weight] if needs_x else []), *([x] if needs_weight else [])]
    return r.output((x, weight), saves, backward, (like[0], n), dtype, name, work=products)
