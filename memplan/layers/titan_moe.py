"""torchtitan's mixture of experts: router, reordering of tokens, grouped experts, shared experts.

``torchtitan/models/moe/moe.py`` (``TokenChoiceTopKRouter``, ``TokenReorderer``, ``GroupedExperts``, ``MoE``),
``utils.py`` (``_permute``, ``_unpermute``, ``indices_padding_wrapper``), ``kernels.py``
(``generate_permute_indices``) of release 0.2.2. Shapes: n = b s tokens of a micro-batch, k experts of a token,
N = n k rows, E experts of all ranks, e of this one, h hidden, f an expert's inner width, L rows with padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from ..plan.spec import ModelSpec
from ..tape.events import Category, Hook
from . import experts, ops, selecting, tensor_parallel as tp
from .autograd import Gradients, Recorder, Tensor, size_of
from .gradients import fresh, viewed, watched
from .huggingface import LayerShape, silu
from .torchtitan import Operator, Policy
from .work import Exchange, exchanged

ALIGNED = 8
"""In bf16 an expert's rows are padded to a multiple of this (``TOKEN_GROUP_ALIGN_SIZE_M``)."""

EXPERTS = "experts"
"""The module of grouped experts, whose parameters ``fully_shard`` may have in a unit of their own."""

GATE, DOWN, UP = "experts.w1", "experts.w2", "experts.w3"


Placed = Literal["here", "parts", "whole"]
"""Where an input lies: on one rank; as a part on each of several; or whole on each, with a gradient to be summed."""


def fused_rms_norm(r: Recorder, x: Tensor, name: str, *, strided: bool = False, placed: Placed = "here") -> Tensor:
    """``nn.RMSNorm`` as one kernel (``aten/src/ATen/native/cuda/layer_norm_kernel.cu``, ``_fused_rms_norm``): saves
    input, weight, and the reciprocal deviation in fp32. ``strided``: a view of part of a tensor, which the kernel's
    caller copies (``expect_contiguous``) in both directions. ``placed``: in parts, the weight's gradient is a sum over
    ranks; whole, the incoming gradient is summed first (``_math_ops.py``, ``_fused_rms_norm_backward``)."""
    weight = r.parameter(f"{name}.weight", (x.shape[-1],), x.dtype)
    shape, dtype, tag = x.shape, x.dtype, f"/{tp.PARTIAL}" if placed == "parts" else ""
    trained = weight.node is not None

    def inside(r: Recorder) -> None:
        if strided and r.kernel_workspaces:
            r.empty(shape, dtype, f"{name}_input_contiguous", Category.WORKSPACES)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        _whole = r.empty(shape, dtype, f"grad_{name}_reduced") if placed == "whole" else None
        if placed == "whole":
            r.ran(Exchange("all-reduce", size_of(shape, dtype)))
        inside(r)
        grad_x = r.empty(shape, dtype, f"grad_{name}")
        return [grad_x, r.empty(shape[-1:], dtype, f"grad_{name}_weight{tag}") if trained else None]

    inside(r)
    out = r.empty(shape, dtype, name)
    deviation = r.empty((*shape[:-1], 1), "fp32", f"{name}_rstd")
    return out.by(r.node((x, weight), (x, weight, deviation), backward))


# -- router -----------------------------------------------------------------------------------------


def router(r: Recorder, x: Tensor, spec: ModelSpec, policy: Policy) -> tuple[Tensor, Tensor, Tensor]:
    """``TokenChoiceTopKRouter.forward`` of (n, h): scores (n, k) in fp32, experts (n, k), and how many rows each of
    them gets (E,). The bias that balances them (``load_balance_coeff``) is there in every model of torchtitan."""
    scores = policy.linear(r, x, "router", spec.experts)
    scores = scored(r, ops.cast(r, scores, "fp32", "router_logits_fp32"), spec)
    choice = ops.add_constant(r, scores, "scores_for_choice")
    if spec.router_groups:
        choice = of_best_groups(r, choice, spec)
    _values, chosen = selecting.top_k(r, choice, spec.expert_top_k, "chosen")
    top = selecting.gathered(r, scores, chosen, "top_scores")
    if normalises(spec):
        total = ops.add_constant(r, selecting.sum_last(r, top, "top_scores_sum"), "top_scores_denominator")
        top = selecting.divided(r, top, total, "top_scores_normed")
    top = ops.scale(r, top, "top_scores_scaled")
    return top, chosen, counted(r, spec)


def normalises(spec: ModelSpec) -> bool:
    """``route_norm``: scores of the chosen are divided by their sum."""
    return not spec.router_score_first


def scored(r: Recorder, logits: Tensor, spec: ModelSpec) -> Tensor:
    """Softmax or sigmoid, in fp32."""
    if spec.router_score == "softmax":
        return ops.softmax(r, logits, "router_scores")
    return ops.elementwise(r, "router_scores", (logits,), saves_output=True)


def top_k(r: Recorder, x: Tensor, k: int, name: str, policy: Policy | None) -> tuple[Tensor, Tensor]:
    """Values and indices, which selective recompute keeps under ``policy``."""
    if policy is None:
        return selecting.top_k(r, x, k, name)
    values: list[Tensor] = []

    def indices(r: Recorder) -> Tensor:
        best, chosen = selecting.top_k(r, x, k, name)
        values.append(best)
        return chosen

    chosen = policy.run(r, indices)
    return values.pop(), chosen


def of_best_groups(r: Recorder, scores: Tensor, spec: ModelSpec, policy: Policy | None = None) -> Tensor:
    """``_get_node_limited_routing_scores``: −∞ for experts outside the groups whose two best are the best."""
    n, every = scores.shape
    groups, size = spec.router_groups, every // spec.router_groups
    grouped = scores.view(n, groups, size)
    two, _of_two = top_k(r, grouped, 2, "best_of_group", policy)
    best = selecting.sum_last(r, two, "group_scores").view(n, groups)
    _best, chosen = top_k(r, best, spec.router_group_top_k, "chosen_groups", policy)
    _of_two = chosen
    mask = r.empty((n, groups), "bool", "group_mask")
    masked = ops.elementwise(r, "scores_in_groups", (grouped,), (mask,))
    return masked.view(n, every)


def counted(r: Recorder, spec: ModelSpec) -> Tensor:
    """``torch.histc`` of int64: (E,) of the same."""
    return r.empty((spec.experts,), "int64", "rows_of_expert")


def reordered(r: Recorder, top: Tensor, chosen: Tensor, spec: ModelSpec, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """``TokenReorderer.forward``: scores (N,) and rows' places (N,) by expert, and how many rows each expert gets; of
    one of so many parts of the tokens (``ReordererSequenceParallel``)."""
    if parts > 1:
        return _reordered_part(r, part_of_rows(r, top, parts), part_of_rows(r, chosen, parts), spec)
    rows = chosen.shape[0] * chosen.shape[1]
    counts = counted(r, spec)
    order = r.in_turn(((rows,), "int64", "experts_sorted"), ((rows,), "int64", "row_order"))
    return selecting.gathered(r, top.view(rows), order, "row_scores"), order, counts


def _reordered_part(r: Recorder, top: Tensor, chosen: Tensor, spec: ModelSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Places are those among all tokens."""
    scores, order, counts = reordered(r, top, chosen, spec, 1)
    return scores, r.empty(order.shape, "int64", "row_order_of_all"), counts


def part_of_rows(r: Recorder, x: Tensor, parts: int) -> Tensor:
    """The first of so many equal parts, a view; the gradient is that of all rows, nought elsewhere."""
    whole, dtype = x.shape, x.dtype
    node = r.node((x,), (), fresh(x, "grad_part_of_rows"))
    return Tensor(x.storage, (whole[0] // parts, *whole[1:]), dtype, node)


# -- experts ----------------------------------------------------------------------------------------


def permute_indices(r: Recorder, ranks: int, e: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """``generate_permute_indices``: for each of L places the row that goes there, each expert's rows, a multiple of 8,
    and where they end; from ``ranks`` ranks whose experts are e here."""
    starts = r.in_turn(((ranks * e,), "int64", "rows_summed"), ((ranks * e,), "int64", "row_starts"))
    total = r.in_turn(((e,), "int64", "rows_of_local_expert"), ((e,), "int64", "rows_at_least"))
    sizes = rounded_up(r, e)
    ends = r.empty((e,), "int64", "row_ends")
    begins = r.empty((e,), "int64", "row_begins")
    places = r.empty((length,), "int32", "permuted_indices")
    in_words = r.empty((e,), "int32", "row_ends_int32")
    del begins, ends, total, starts
    return places, sizes, in_words


def rounded_up(r: Recorder, e: int) -> Tensor:
    """``((total + alignment - 1) // alignment * alignment).to(int32)``: each result ends with the next operator."""
    _made = r.empty((e,), "int64", "rows_plus")
    for step in ("rows_plus_less_one", "rows_divided", "rows_multiplied"):
        _made = r.empty((e,), "int64", step)
    return r.empty((e,), "int32", "padded_rows_of_expert")


def padded_length(rows: int, e: int, aligned: int = ALIGNED) -> int:
    """``_permute``: room for each expert's padding, in multiples of ``aligned``."""
    return -(-(rows + e * aligned) // aligned) * aligned


def permuted(r: Recorder, x: Tensor, ranks: int, e: int, aligned: int = ALIGNED) -> tuple[Tensor, Tensor, Tensor]:
    """``_permute`` of N rows: (L, h) by expert, with padding from a row of zeros; the places; rows of each."""
    rows, h = x.shape
    places, sizes, _ends = permute_indices(r, ranks, e, padded_length(rows, e, aligned))
    x = with_zeros(r, x)
    x = picked_rows(r, x, places, (places.shape[0], h))
    return x, places, sizes


def with_zeros(r: Recorder, x: Tensor) -> Tensor:
    """``vstack`` of x and a row of zeros; the gradient of x is a view."""
    rows, h = x.shape
    zeros = r.empty((h,), x.dtype, "row_of_zeros")
    made = r.empty((rows + 1, h), x.dtype, "rows_and_zeros")
    made = made.by(r.node((x,), (), viewed(x)))
    del zeros
    return made


def picked_rows(r: Recorder, x: Tensor, places: Tensor, shape: tuple[int, int]) -> Tensor:
    """``x[places]`` with int32 places, which the kernel takes in int64 (``make_info`` of
    ``TensorAdvancedIndexing.cpp``)."""
    if r.kernel_workspaces:
        r.empty(places.shape, "int64", "rows_padded_places_int64", Category.WORKSPACES)
    return selecting.picked(r, x, places, shape, "rows_padded")


def unpermuted(r: Recorder, out: Tensor, places: Tensor, rows: int) -> Tensor:
    """``_unpermute``: rows where they were, without the row of zeros."""
    h = out.shape[-1]
    whole = r.empty((rows + 1, h), out.dtype, "rows_unpermuted")
    whole = put(r, whole, places, out, "rows_unpermuted")
    dtype = whole.dtype
    node = r.node((whole,), (), fresh(whole, "grad_rows_unpermuted_slice"))
    return Tensor(whole.storage, (rows, h), dtype, node)


def put(r: Recorder, x: Tensor, places: Tensor, values: Tensor, name: str) -> Tensor:
    """``x[places] = values`` of a tensor without a gradient: saves the places; the gradient is what stands there."""
    like, dtype = values.shape, values.dtype
    node = r.node((x, values), (places,), lambda r, gradients: [None, r.empty(like, dtype, f"grad_{name}_values")])
    return Tensor(x.storage, x.shape, x.dtype, node)


def weights_of(r: Recorder, spec: ModelSpec, e: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """``w1`` (e, f, h), ``w2`` (e, h, f) and ``w3`` (e, f, h)."""
    f, h = spec.expert_ffn, spec.hidden
    shapes = {GATE: (e, f, h), DOWN: (e, h, f), UP: (e, f, h)}
    gate, down, up = (r.parameter(name, shape, dtype, expert=True) for name, shape in shapes.items())
    return gate, down, up


Multiply = Callable[[Recorder, Tensor, Tensor, Tensor, str], Tensor]
"""Rows of experts with their weights."""


def grouped(r: Recorder, x: Tensor, sizes: Tensor, spec: ModelSpec, multiply: Multiply | None = None) -> Tensor:
    """``_run_experts_grouped_mm`` of (L, h); ``spec``: of this rank's part of each expert. ``multiply``: in place of
    ``_grouped_mm``."""
    e, times = sizes.shape[0], multiply or product
    gate, down, up = weights_of(r, spec, e, x.dtype)
    offsets = r.empty((e,), "int32", "expert_offsets")
    h = silu(r, times(r, x, gate, offsets, "experts_gate"))
    h = ops.multiply(r, h, times(r, x, up, offsets, "experts_up"), "experts_gated")
    return ops.cast(r, times(r, h, down, offsets, "experts_down"), x.dtype, "experts_output")


def product(r: Recorder, x: Tensor, weight: Tensor, offsets: Tensor, name: str) -> Tensor:
    """``_grouped_mm`` of ``x.bfloat16()`` with ``weight.bfloat16()``."""
    weight = ops.cast(r, weight, "bf16", f"{name}_weight_bf16")
    return experts.grouped_product(r, x, weight, offsets, name)


def padded_experts(r: Recorder, x: Tensor, spec: ModelSpec) -> Tensor:
    """``indices_padding_wrapper``: all experts are here."""
    made, places, sizes = permuted(r, x, 1, spec.experts)
    out = grouped(r, made, sizes, spec)
    return unpermuted(r, out, places, x.shape[0])


# -- expert parallelism -----------------------------------------------------------------------------

AGAIN = f"{EXPERTS}/again"
"""The seam of the experts' forward when it is recomputed."""


def exchanged_experts(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy) -> tuple[Tensor, Tensor | None]:
    """``GroupedExperts`` under ``ExpertParallel`` (``torchtitan/distributed/expert_parallel.py``), of N rows: those of
    its own experts come from all ranks, as many as go, and their outputs go back. Also what the last all-to-all sends,
    which is held until its output has been waited for.

    ``fully_shard``'s hooks run around exchange and experts (``torch/distributed/fsdp/_fully_shard/_fsdp_state.py``).
    """
    spec, ranks, rows = shape.spec, shape.expert_ranks, x.shape[0]
    e = spec.experts // ranks
    again = r.frame is not None and r.frame.again is not None
    seam(r, AGAIN if again else EXPERTS, Hook.BEFORE_FORWARD)
    x = hooked(r, x, Hook.AFTER_BACKWARD)
    if shape.expert_parts > 1:
        x = tp.summed_back(r, x, "rows")
    counts = sent(policy, r, lambda r: r.empty((spec.experts,), "int64", "rows_of_rank"))
    splits = [r.empty((ranks,), "int64", name) for name in ("rows_to_ranks", "rows_from_ranks")]
    splits.clear()
    received = sent(policy, r, lambda r: all_to_all(r, x, "rows_exchanged"))
    padded, sizes, kept = exchanged_rows(r, received, padded_length(rows, e), ranks, e, own=shape.in_flight)
    del received, counts
    made = grouped(r, padded, sizes, spec)
    whole = unpermuted(r, made, kept, rows)
    out = sent(policy, r, lambda r: all_to_all(r, whole, "experts_exchanged"))
    del made, padded, sizes
    out = hooked(r, out, Hook.BEFORE_BACKWARD)
    seam(r, AGAIN if again else EXPERTS, Hook.AFTER_FORWARD)
    if policy.again and policy.keeps and policy.keeps_exchanged:
        return out, None  # nothing is sent again
    return out, Tensor(whole.storage, whole.shape, whole.dtype)


def sent(policy: Policy, r: Recorder, operator: Operator) -> Tensor:
    """An all-to-all, whose output selective recompute keeps where its list has it."""
    return policy.run(r, operator) if policy.keeps_exchanged else operator(r)


def exchanged_rows(
    r: Recorder, x: Tensor, length: int, ranks: int, e: int, *, own: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``_permute``; the places take the place of those that the module has from the pass before. ``own``: that pass may
    still be in flight, and has its own; the module's are counted besides, though they are the last pass's."""
    h = x.shape[-1]
    kept = None if own else r.outside((length,), "int32")
    places, sizes, _ends = permute_indices(r, ranks, e, length)
    x = with_zeros(r, x)
    taken = kept or places
    x = picked_rows(r, x, taken, (length, h))
    del places
    return x, sizes, taken


def all_to_all(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``all_to_all_single_autograd``: one tensor in either direction."""
    shape, dtype = x.shape, x.dtype
    node = r.node(
        (x,),
        (),
        fresh(x, f"grad_{name}"),
        work=exchanged("all-to-all", size_of(shape, dtype), "all-to-all", "ep"),
    )
    return r.empty(shape, dtype, name).by(node)


def seam(r: Recorder, name: str, hook: Hook) -> None:
    if r.seams:
        r.seam(name, hook)


def hooked(r: Recorder, x: Tensor, hook: Hook) -> Tensor:
    """``x`` itself, with a hook that runs when its gradient comes."""
    return watched(r, x, lambda r: seam(r, EXPERTS, hook))


# -- the module -------------------------------------------------------------------------------------


def mixture(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy) -> Tensor:
    """``MoE.forward`` of (b, s, h). Under tensor parallelism the sum over ranks of its outputs is that of the module
    (``torchtitan/models/llama4/infra/parallelize.py``, ``apply_moe_ep_tp``): each has a part of every expert, or all of
    some and the rows of a part of the tokens."""
    spec, whole, dtype = shape.spec, x.shape, x.dtype
    n, k, parts = shape.b * shape.s, spec.expert_top_k, shape.tensor // shape.expert_parts
    x = x.view(n, spec.hidden)
    top, chosen, _counts = router(r, x, spec, policy)
    scores, order, _counts = reordered(r, top, chosen, spec, parts)
    tokens = r.empty((n * k // parts,), "int64", "token_of_row")
    routed = selecting.gathered(r, x, tokens, "rows")
    del tokens
    if spec.router_weighs_inputs:
        routed = weighed(r, routed, scores)
    stashed: Tensor | None = None
    if shape.expert_ranks > 1:
        out, stashed = exchanged_experts(r, routed, shape, policy)
    else:
        out = padded_experts(r, tp.summed_back(r, routed, "rows") if shape.tensor > 1 else routed, spec)
    shared = shared_experts(r, x, shape, policy) if spec.shared_expert_ffn else None
    unsorted = r.empty((n * k, spec.hidden), dtype, "rows_unsorted")
    del stashed
    unsorted = put(r, unsorted, order, out, "rows_unsorted")
    summed = selecting.sum_of_rows(r, unsorted, k) if spec.router_weighs_inputs else weighed_sum(r, top, unsorted, k)
    if shared is not None:
        return ops.add(r, shared, summed, "experts_and_shared").view(*whole)
    return summed.view(*whole)


def weighed(r: Recorder, rows: Tensor, scores: Tensor) -> Tensor:
    """``score_before_experts``: what experts get times the scores, in fp32."""
    wide = ops.cast(r, rows, "fp32", "rows_fp32")
    made = ops.multiply(r, wide, scores.view(rows.shape[0], 1), "rows_weighed")
    del wide
    return ops.cast(r, made, rows.dtype, "rows_weighed_cast")


def weighed_sum(r: Recorder, top: Tensor, rows: Tensor, k: int) -> Tensor:
    """``bmm`` of scores (n, 1, k) and rows (n, k, h) in fp32."""
    n, h = rows.shape[0] // k, rows.shape[1]
    made = ops.matmul(
        r, top.view(n, 1, k), ops.cast(r, rows.view(n, k, h), "fp32", "rows_fp32"), (n, 1, h), "experts_sum"
    )
    return ops.cast(r, made, rows.dtype, "experts_output").view(n, h)


def shared_experts(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy) -> Tensor:
    """``FeedForward.forward`` of every token; the gradient of each part's input is summed over ranks."""
    width = shape.spec.shared_expert_ffn

    def widened(name: str) -> Tensor:
        return policy.linear(r, tp.summed_back(r, x, name) if shape.tensor > 1 else x, name, width)

    gate = silu(r, widened("shared_gate"))
    gate = ops.multiply(r, gate, widened("shared_up"), "shared_gated")
    return policy.linear(r, gate, "shared_down", shape.spec.hidden)
