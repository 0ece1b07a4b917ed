"""``megatron/core/transformer/moe/experts.py``: the experts of a rank, in one grouped product (``TEGroupedMLP``, over
Transformer Engine's ``pytorch/module/grouped_linear.py``) or one after the other (``SequentialMLP``).

Shapes: N rows of all experts of this rank, e of them here, h features of a row, f an expert's inner width on this rank
(twice that before SwiGLU).

``CheckpointWithoutOutput`` (``megatron/core/tensor_parallel/random.py``): a region whose outputs end once they have
been read, and are there again when backward needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

from ...values import replace
from .. import ops, selecting
from ..autograd import Gradients, Leaf, Recorder, Shape, Tensor
from ..gradients import fresh, fresh_each, viewed
from ..work import ITEMSIZE, NOTHING, SUM_OF_ROWS, Operator, Product, Stream, issued
from . import adapters, grouped_chain, local, offload, te, te_facts
from .operands import members
from .precision import up
from .shape import GROUPED_ROWS, CoreShape

Discard = Callable[[Recorder, Tensor], None]

Region = Callable[..., tuple[Tensor, ...]]


def without_output(r: Recorder, inputs: Sequence[Tensor], region: Region) -> tuple[tuple[Tensor, ...], Discard]:
    """The outputs of ``region``, whose memory ends in forward with ``discard`` and is there again when the gradient of
    the tensor that this is given arrives, until the region's own backward is done.
    """
    enabled, r.grad_enabled = r.grad_enabled, False
    outputs = region(r, *inputs)
    r.grad_enabled = enabled
    parts = [(x.shape, x.dtype) for x in inputs]
    held: list[tuple[list[Tensor], list[Leaf]]] = []
    until_delayed = r.until_delayed

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        again, leaves = held.pop()
        given = [one and one.alias() for one in gradients]
        if len(again) == 1 and given[0] is not None:
            r.backward([again.pop()], [given.pop()])  # type: ignore[list-item]
        else:
            r.backward([joined(r, again, given)], [r.outside((), "fp32")])
        again.clear()
        return [leaf.take() for leaf in leaves]

    node = r.node(inputs, inputs, backward, outputs=len(outputs), work=NOTHING)
    for slot, out in enumerate(outputs):
        out.node, out.slot = node, slot

    def recompute(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        start = len(r.events)
        r.seam("recompute")
        assert node is not None
        again = [r.leaf(Tensor(saved, *part)) for saved, part in zip(r.saved_by(node), parts, strict=True)]
        held.append((list(region(r, *(x for x, _ in again))), [leaf for _, leaf in again]))
        if until_delayed is not None:
            until_delayed.extend(one.alias() for one in held[-1][0])
        r.settle(start)
        return gradients

    def discard(r: Recorder, later: Tensor) -> None:
        for out in outputs:
            r.end(out)
        later.node = r.node((later,), (), recompute, work=NOTHING)

    return outputs, discard


def joined(r: Recorder, outputs: Sequence[Tensor], gradients: Gradients) -> Tensor:
    """A root above several ``outputs``, whose backward hands each its gradient (``torch.autograd.backward``)."""
    given = [*gradients]

    def backward(r: Recorder, _: Gradients) -> Sequence[Tensor | None]:
        handed = [*given]
        given.clear()
        return handed

    gradients.clear()
    root = r.outside((), "fp32")
    root.node = r.node(outputs, (), backward, work=NOTHING)
    return root


FC1, FC2 = "linear_fc1", "linear_fc2"
EXPERTS = "mlp.experts"
"""A rank's experts, as one module."""


@lru_cache(maxsize=128)
def parameters(shape: CoreShape, name: str = "") -> tuple[tuple[str, Shape], ...]:
    """Names and shapes of what a rank's experts have, in the order in which they register; of one linear layer alone
    where that has a ``name``."""
    return tuple(one for one in _parameters(shape) if not name or f".{name}." in one[0])


def _parameters(shape: CoreShape) -> Iterator[tuple[str, Shape]]:
    experts, inner, h = shape.mixture, shape.spec.expert_ffn // shape.expert_ranks, shape.spec.expert_hidden
    first = inner * (2 if shape.spec.gated else 1)
    weights = ((FC1, (first, h)), (FC2, (h, inner)))
    biases = shape.spec.mlp_bias
    if experts.grouped:
        for name, weight in weights:
            yield from ((f"mlp.experts.{name}.weight{i}", weight) for i in range(shape.local_experts))
            yield from ((f"mlp.experts.{name}.bias{i}", weight[:1]) for i in range(shape.local_experts * biases))
        return
    for i in range(shape.local_experts):
        yield from ((f"mlp.experts.local_experts.{i}.{name}.weight", weight) for name, weight in weights)


def dummy_gradients(shape: CoreShape) -> frozenset[Shape]:
    """Shapes of the static stand-ins for the gradients of experts' weights (``get_dummy_wgrad``)."""
    weights = (size for name, size in parameters(shape) if ".weight" in name)
    return frozenset(weights) if shape.gradient_fusion else frozenset()


def experts(r: Recorder, x: Tensor, weights: Tensor, shape: CoreShape) -> Tensor:
    """(N, h) and the probability of each row (N,) to (N, h). With ``moe_apply_probs_on_input`` rows are multiplied
    by it in its dtype and cast back, and it is one from then on."""
    if shape.spec.router_weighs_inputs:
        wide = ops.multiply(r, x, weights.view(*weights.shape, 1), "expert_input_weighted")
        x = ops.cast(r, wide, x.dtype, "expert_input")
        del wide
        weights = r.empty(weights.shape, weights.dtype, "probabilities_of_one")
    return _grouped(r, x, weights, shape) if shape.mixture.grouped else _sequential(r, x, weights, shape)


def _grouped(r: Recorder, x: Tensor, weights: Tensor, shape: CoreShape) -> Tensor:
    """``TEGroupedMLP.forward``. In 8 bits each expert's rows are padded to a multiple first, and its output is without
    the padding again."""
    rows, total = x.shape[0], padded_rows(x.shape[0], shape)
    pads = total is not None
    if total is not None:
        x, weights = _with_rows(r, x, total, "expert_padded"), _with_rows(r, weights, total, "probabilities_padded")
    if shape.fuses_operations:
        own = _own(r, FC1, shape), _own(r, FC2, shape)
        out = grouped_chain.experts(r, x, weights, own, "experts", shape)
        return _with_rows(r, out, rows, "expert_unpadded") if pads else out
    with offload.group(r, x, "expert_fc1", shape) as (x, commit):
        inner = linear(r, x, FC1, shape)
    commit([x])
    scale = weights.view(*weights.shape, 1)
    recomputed = "moe_act" in shape.recompute_modules
    discard: Discard | None = None
    with offload.group(r, inner, "moe_act", shape) as (inner, commit):
        if recomputed:
            (activation,), discard = without_output(r, (inner, scale), lambda r, x, y: (activated(r, x, y, shape),))
        else:
            activation = activated(r, inner, scale, shape)
    out = linear(r, activation, FC2, shape, original=recomputed)
    if discard is not None:
        discard(r, out)
    commit([inner])
    out = _biased(r, out, weights, shape)
    return _with_rows(r, out, rows, "expert_unpadded") if pads else out


def padded_rows(rows: int, shape: CoreShape) -> int | None:
    """Rows of this rank's experts, each padded to what quantised products or grouped tensors want (``Fp8Padding``);
    ``None`` where nothing is copied for it: in other products in 16 bits, behind a router or HybridEP that pads
    (``skip_routed_expert_padding``), and where a capacity is such a multiple."""
    experts, count, multiple = shape.mixture, shape.local_experts, shape.multiple_of_rows
    if not multiple or experts.router_pads or experts.dispatcher == "hybridep":
        return None
    total = up(-(-rows // count), multiple) * count
    return None if (experts.padded or experts.grouped_tensor) and total == rows else total


def _with_rows(r: Recorder, x: Tensor, rows: int, name: str) -> Tensor:
    """A copy with padding or without, whose gradient is a copy, too."""
    return r.output((x,), (), fresh(x, f"grad_{name}"), (rows, *x.shape[1:]), x.dtype, name)


def activated(r: Recorder, x: Tensor, scale: Tensor, shape: CoreShape) -> Tensor:
    """``bias_act_func``: rows (…, f) times their probabilities (…, 1), in the dtype of ``x``. Fused SwiGLU
    (``weighted_bias_swiglu_impl``, ``weighted_bias_quick_geglu_impl``) and ReLU² (``weighted_squared_relu_impl``) save
    both inputs; else, and behind Transformer Engine's own activations, the product is in the wider dtype, and cast
    back."""
    clamped = shape.spec.activation_clamp is not None
    if shape.spec.gated and shape.bias_activation_fusion:
        return _weighted(r, _clamped(r, x) if clamped else x, scale, x.shape[-1] // 2)
    if shape.spec.activation == "relu2" and shape.weighted_fusion:
        return _weighted(r, x, scale, x.shape[-1])
    if shape.te_activation:
        made = te.activation(r, x, FC1, shape)
    else:
        made = local.swiglu(r, x, FC1, clamped=clamped) if shape.spec.gated else local.ungated(r, x, FC1, shape)
    wide = ops.multiply(r, made, scale, "expert_weighted")
    del made
    return ops.cast(r, wide, x.dtype, "expert_weighted_cast")


def _clamped(r: Recorder, x: Tensor) -> Tensor:
    """Both halves clamped, and put together again."""
    half = (*x.shape[:-1], x.shape[-1] // 2)
    gate, linear = ops.split(r, x, [half, half], "expert_chunk")
    gate = selecting.clamped(r, gate, "expert_gate_clamped", bounds=1)
    linear = selecting.clamped(r, linear, "expert_linear_clamped", bounds=2)
    return ops.cat_last(r, gate, linear, "expert_clamped")


def _weighted(r: Recorder, x: Tensor, scale: Tensor, width: int) -> Tensor:
    like, dtype = x.shape, x.dtype

    return r.output(
        (x, scale),
        (x, scale),
        fresh_each((x, "grad_expert_swiglu"), (scale, "grad_expert_probabilities")),
        (*like[:-1], width),
        dtype,
        "expert_swiglu",
    )


def linear(r: Recorder, x: Tensor, name: str, shape: CoreShape, *, original: bool = False) -> Tensor:
    """``GroupedLinear``: saves its input; backward makes the input's gradient and those of all weights, which the
    products add to ``main_grad`` under gradient accumulation fusion. Every expert's product is a kernel of its own, on
    one of several streams (``multi_stream_cublas_gemm``), so that their tiles fill waves together."""
    count, dtype = shape.local_experts, x.dtype
    own = _own(r, name, shape)
    weight = own[0].shape
    biased = len(own) > count and name == FC1
    taken = own if biased else own[:count]
    (n, k), like = weight, x.shape
    trained = own[0].node is not None
    fed = members(shape, f"experts_{name}", like, (like[0], n), original=original, trained=trained)

    waiting = r.delayed_experts
    grouped_tensor = shape.experts is not None and shape.experts.grouped_tensor
    counts = r.empty((3, count + 1), "int64", f"experts_{name}_offsets") if grouped_tensor else None

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        fed.gradient(r)
        grad = r.empty(like, dtype, f"grad_experts_{name}_input")
        fed.scratch(r, weight, columns=True)
        fresh = te_facts.dummy_weight_gradient(shape.te) == "each backward"
        made: Gradients = []
        packed = not shape.gradient_fusion and counts is not None
        whole = r.empty((count, *weight), dtype, f"grad_experts_{name}_weights") if packed else None
        for _ in range(count):
            if whole is not None:
                made.append(whole.alias(*weight))
            elif not shape.gradient_fusion:
                made.append(r.empty(weight, dtype, f"grad_experts_{name}_weight"))
            else:
                made.append(r.empty(weight, dtype, f"grad_experts_{name}_weight_dummy") if fresh else None)
        fed.again(r)
        if waiting is not None or r.later_products is not None:
            held: list[Any] = [*gradients, *r.unpacked] if shape.low is None else []
            return [grad, *later(r, held, made), *[None] * (count * biased)]
        fed.clear()
        return [grad, *made, *(r.empty((n,), dtype, f"grad_experts_{name}_bias") for _ in range(count * biased))]

    def of_input(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        """Of frozen weights (``weights_requires_grad``)."""
        fed.gradient(r)
        grad = r.empty(like, dtype, f"grad_experts_{name}_input")
        fed.scratch(r, weight, columns=True)
        fed.clear()
        return [grad, *[None] * len(taken)]

    def later(r: Recorder, held: list[Any], made: Gradients) -> Gradients:
        """Products wait for ``backward_dw``, with their operands and what they are to fill."""
        fills = [None] * count if shape.gradient_fusion else [*made]
        made = made if shape.gradient_fusion else [None] * count

        def products(r: Recorder) -> list[tuple[Tensor, Gradients]]:
            every: Gradients = [*fills, *(r.empty((n,), dtype, f"grad_experts_{name}_bias") for _ in taken[count:])]
            fills.clear()
            held.clear()
            fed.clear()
            return [(parameter, [one]) for parameter, one in zip(taken, every, strict=True)]

        queue = waiting if waiting is not None else r.later_products
        assert queue is not None
        queue.append(products)
        return made

    saved = (*fed.fed(r, x), *((counts,) if counts is not None else ()))
    done = fed.work(r, _products(like[0], n, k, dtype, shape, r))
    if not trained and done.backward is not None:
        done = done._replace(backward=done.backward[:-1])
    node = r.node((x, *taken), (*saved, *taken), backward if trained else of_input, work=done)
    out = r.empty((like[0], n), dtype, f"experts_{name}")
    fed.scratch(r, weight, columns=False)
    fed.multiplied()
    out = out.by(node)
    return (
        adapters.of_experts(r, out, x, f"{EXPERTS}.{name}", shape) if adapters.adapts(r, f"{EXPERTS}.{name}") else out
    )


def _own(r: Recorder, name: str, shape: CoreShape) -> list[Tensor]:
    """Parameters of all experts in one of their two linear layers."""
    return [r.parameter(one, size, shape.dtype) for one, size in parameters(shape, name)]


def _products(rows: int, n: int, k: int, dtype: str, shape: CoreShape, r: Recorder) -> Operator:
    """Of as many ``rows`` for every expert, (N / e, k) and (k, n)."""
    count, written = shape.local_experts, shape.added(r.summed)
    if shape.experts is not None and shape.experts.rank_capacity is not None:
        mean = -(-shape.routed.sent // count)
        rows = min(rows, up(mean, GROUPED_ROWS) * count)  # the counts say how many rows of the budget there are
    each, size, out = -(-rows // count), float(ITEMSIZE[dtype]), 0
    if shape.low is not None:
        size, out = shape.low.element, ITEMSIZE[dtype]
    products = (
        Product(each, k, n, count, size, out, rows="m"),
        Product(n, k, each, count, size, written or out, rows="k"),
    )
    return Operator((Product(each, n, k, count, size, out, rows="m"),), products)


def _biased(r: Recorder, x: Tensor, weights: Tensor, shape: CoreShape) -> Tensor:
    """``_apply_bias``: each expert's bias times the probability of its rows, put together again."""
    if not shape.spec.mlp_bias:
        return x
    biases = [r.parameter(f"mlp.experts.{FC2}.bias{i}", x.shape[-1:], shape.dtype) for i in range(shape.local_experts)]
    like, dtype, kind, one, h = x.shape, x.dtype, weights.dtype, weights.shape, x.shape[-1]
    trained = [bias.node is not None for bias in biases]

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        wide = r.empty(like, kind, "grad_experts_bias_scaled")
        grads = [r.empty((h,), dtype, "grad_experts_bias") if one else None for one in trained]
        probabilities = r.empty(one, kind, "grad_experts_probabilities")
        del wide
        return [gradients[0], probabilities, *grads]

    out = r.in_turn((like, kind, "experts_bias_scaled"), (like, dtype, "experts_biased"))
    return out.by(r.node((x, weights, *biases), (weights,), backward, work=_of_biases(like, dtype, kind, len(biases))))


def _of_biases(shape: Shape, dtype: str, kind: str, experts: int) -> Operator:
    """Kernels of ``torch.cat([t + b * p for …]).to(dtype)``: rows and biases in ``dtype``, probabilities in ``kind``.

    Forward an expert's bias times its rows' probabilities, and the sum with its rows, two kernels an expert; all rows
    put together, and cast. Backward the gradient is cast to ``kind``, each expert's part back for its rows, multiplied
    with the probabilities and summed over rows for its bias, whose sum is cast, multiplied with the bias and summed
    over features for the probabilities; gradients of rows and of probabilities are put together. Operands of one shape
    and dtype, and casts to a narrower one, are as fast as the memory; others are not (``work.issued``)."""
    n, rows, low, wide = prod(shape), shape[0], ITEMSIZE[dtype], ITEMSIZE[kind]
    row, column, whole = ((1, shape[1]), dtype), ((rows, 1), kind), (shape, kind)
    casts = kind != dtype
    forward = [
        Stream(wide * n, experts, issue=issued((row, column), shape, kind)),
        Stream((low + 2 * wide) * n, experts, issue=issued(((shape, dtype), whole), shape, kind)),
        Stream(2 * wide * n),
    ]
    backward = [
        Stream(2 * wide * n, experts, issue=issued((whole, column), shape, kind)),
        Stream(wide * n, 2 * experts if casts else experts),
        Stream(2 * wide * n, experts, issue=issued((whole, row), shape, kind)),
        Stream(wide * n, experts, issue=SUM_OF_ROWS.of(n, rows)),
        Stream(2 * low * n),
        Stream(2 * wide * rows),
    ]
    if casts:
        forward.append(Stream((wide + low) * n))
        narrowed = Stream((wide + low) * n, experts)
        backward = [Stream((low + wide) * n, issue=issued(((shape, dtype),), shape, kind)), narrowed, *backward]
    return Operator(forward, backward)


def _sequential(r: Recorder, x: Tensor, weights: Tensor, shape: CoreShape) -> Tensor:
    """``SequentialMLP.forward``: linear layers, without collectives of their own."""
    alone, count = replace(shape, t=1, sequence_parallel=False), shape.local_experts
    if count == 1:
        return _expert(r, x, weights, 0, alone)
    size = -(-x.shape[0] // count)
    size = up(size, shape.low.multiple) if shape.low is not None else size
    tokens = ops.split(r, x, [(size, x.shape[1])] * count, "expert_tokens")
    scales = ops.split(r, weights, [(size,)] * count, "expert_probabilities")
    made = [_expert(r, one, scale, i, alone) for i, (one, scale) in enumerate(zip(tokens, scales, strict=True))]
    out = r.empty(x.shape, x.dtype, "experts_together")
    out.node = r.node(made, (), viewed(*made))
    del made, tokens, scales
    return out


def _expert(r: Recorder, x: Tensor, weights: Tensor, i: int, shape: CoreShape) -> Tensor:
    """``MLP.forward`` with a scale of each token; each variable is the next tensor."""
    name = f"mlp.experts.local_experts.{i}"
    f = shape.spec.expert_ffn // shape.expert_ranks * (2 if shape.spec.gated else 1)
    inner = column_linear(r, x, f"{name}.{FC1}", f, shape)
    inner = activated(r, inner, weights.view(*weights.shape, 1), shape)
    return row_linear(r, inner, f"{name}.{FC2}", shape)


def column_linear(r: Recorder, x: Tensor, name: str, n: int, shape: CoreShape, *, original: bool = False) -> Tensor:
    """The first projection of experts that are modules of their own (``column_parallel_linear`` of ``backends.py``)."""
    if shape.implementation == "local":
        return local.column_linear(r, x, name, n, shape, bias=False, skip_bias=True)[0]
    return adapters.column_linear(r, x, name, "", n, shape, bias=False, skip_bias=True, original=original)[0]


def row_linear(r: Recorder, x: Tensor, name: str, shape: CoreShape) -> Tensor:
    """The second (``row_parallel_linear``)."""
    module = local.row_linear if shape.implementation == "local" else adapters.row_linear
    return module(r, x, name, shape, bias=False)[0]
