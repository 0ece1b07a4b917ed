"""Experts as one chain of Transformer Engine's operations: product, activation with the rows' probabilities, product
(``pytorch/ops/fused/grouped_mlp.py``, ``_GroupedMLP_CuTeGEMMBase``), in MXFP8 on Blackwell, whose kernels are those of
cuDNN's front end (``grouped_gemm_glu``, ``_dglu``, ``_srelu``, ``_dsrelu``, ``_quant``). ``TEGroupedMLP``
(``_fused_forward``) and ``FusedSharedExpertMLP`` of Megatron-Core run it.

The first kernel writes its product in 16 bits, the activation's result in 8 bits by rows and by columns; its backward
likewise makes the gradient of the first product in 8 bits alone. What products read by rows ends with the pass.

Shapes: N rows of all experts of this rank, e of them here, h features of a row, f an expert's inner width on this rank,
w what the first product makes of it: 2 f before a gate, else f.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod

from ...values import dataclass
from ..autograd import Gradients, Recorder, Shape, Tensor
from ..graph import Delayed
from ..work import ITEMSIZE, Operator, Product, Stream
from .precision import BYTE, Copy, Low, up
from .shape import CoreShape

OLDEST = (2, 17)
"""Before it forward and backward were operations of two files."""
OLDEST_SHARED = (2, 19)
"""Before it even shared experts' rows need probabilities (``_grouped_mlp_unit_activation_scale``)."""
WITHOUT_ONES = OUTPUT_FIRST = (2, 19)
"""From it on, with cuDNN's front end of 1.27, products take no probabilities of one; the output comes before scales."""
FEATURES, ROWS = 64, 128
"""Of what features and rows have to be multiples (the same; ``fuser_forward``)."""
WORD = "int64"

Weights = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Of the first products and of the second."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The chain of one layer, with what both directions know."""

    name: str
    low: Low
    count: int
    """e."""
    rows: int
    """N."""
    first: Shape
    """(w, h), of one expert;"""
    second: Shape
    """(h, f)."""
    again: bool
    """The second product's input is made again in backward (``activation_recompute_in_mlp``: ReLU² alone)."""

    def ordered(self, r: Recorder, weight: Shape, *, columns: bool) -> list[Tensor]:
        """Scales of all weights in the order that products want, with pointers to them and to their data
        (``swizzle_scales_and_pack_ptrs_for_discrete_weights``)."""
        if self.count == 1:
            return self.low.scratch(r, self.name, (weight, columns, True))
        parts = self.low.parts(weight, weight=True)
        size = (parts.columns if columns else parts.rows)[1].shape
        scales = r.empty((self.count, up(size[0] * size[1], 16)), BYTE, f"{self.name}_scales_ordered")
        return [scales, r.empty((2 * self.count,), WORD, f"{self.name}_pointers")]

    def ones(self, r: Recorder, shape: CoreShape) -> Tensor | None:
        """Probabilities of products that have none."""
        asks = self.count > 1 and shape.te < WITHOUT_ONES
        return r.empty((self.rows,), "fp32", f"{self.name}_ones") if asks else None

    def both(self, r: Recorder, features: int, name: str) -> Copy:
        """What a kernel writes in 8 bits: data by rows and by columns, and then the scales of each."""
        parts = self.low.parts((self.rows, features))
        pairs = zip(parts.rows, parts.columns, strict=True)
        made = [r.empty(one.shape, one.dtype, f"{name}_{one.name}") for pair in pairs for one in pair]
        copy = Copy()
        copy.rows, copy.columns = made[::2], made[1::2]
        return copy


def uncovered(shape: CoreShape) -> Iterator[str]:
    """What this recipe does not cover of ``shape``."""
    experts, spec = shape.experts, shape.spec
    if experts is None:
        return
    chains = shape.fuses_operations and experts.grouped
    widths = [spec.expert_ffn // shape.expert_ranks] * chains
    widths += [spec.shared_expert_ffn // shape.t] * experts.shared_chain
    if not widths:
        return
    low = shape.low
    others = {
        "without parameters in MXFP8 (--fp8 mxfp8 --fp8-parameters; Megatron's --fp8-param-gather)": low is None
        or not (low.two_buffers and low.parameters),
        "with layers or modules in 16 bits": any(shape.sixteen_bit) or bool(shape.precision_of),
        "before Transformer Engine 2.17 (--te-version says which)": shape.te < OLDEST,
        "of shared experts before Transformer Engine 2.19 (--te-version says which)": experts.shared_chain
        and shape.te < OLDEST_SHARED,
        f"with {spec.activation}": spec.activation
        not in (("swiglu",) if experts.shared_chain else ("swiglu", "relu2")),
        "with a clamped activation": spec.activation_clamp is not None,
        "with biases": spec.mlp_bias,
        "with squared ReLU and probabilities apart (--use-fused-weighted-squared-relu)": (
            spec.activation == "relu2" and not shape.weighted_fusion
        ),
        f"with features that are no multiple of {FEATURES}": any(n % FEATURES for n in (*widths, spec.expert_hidden)),
        f"with a number of tokens that is no multiple of {ROWS}": experts.shared_chain and shape.s * shape.b % ROWS > 0,
        "with activations on the host": bool(shape.offload),
        "with DeepEP": experts.dispatcher == "deepep" and chains,
        "with ranks that divide an expert, which Megatron-Core refuses": chains and shape.expert_ranks > 1,
        "with inputs times scores, which Megatron-Core refuses": chains and spec.router_weighs_inputs,
    }
    yield from (f"experts as one chain of operations {how}" for how, applies in others.items() if applies)


def experts(
    r: Recorder,
    x: Tensor,
    scale: Tensor | None,
    weights: Weights,
    name: str,
    shape: CoreShape,
) -> Tensor:
    """(N, h), and the probability of each row (N,), to (N, h)."""
    assert shape.low is not None
    count, like, dtype = len(weights[0]), x.shape, x.dtype
    first, second = weights[0][0].shape, weights[1][0].shape
    rows, (wide, h), f = prod(like[:-1]), first, second[1]
    recomputes = not shape.spec.gated and "moe_act" in shape.recompute_modules
    chain = Chain(name, shape.low, count, rows, first, second, recomputes)
    bounds = up(4 * count, 16) + 5 * up(8 * (count + 1), 16)  # splits_to_offsets_multi
    offsets = [r.empty((bounds,), BYTE, f"{name}_offsets")] if scale is not None else []
    fed = chain.low.quantised(r, (rows, h), f"{name}_fc1", rows=True, columns=r.grad_enabled)
    narrow = None
    if scale is not None and scale.dtype != dtype:
        narrow = r.empty(scale.shape, dtype, f"{name}_probabilities")
    orders = chain.ordered(r, first, columns=False)
    inner = [r.empty((rows, wide), dtype, f"{name}_fc1")]
    made = chain.both(r, f, f"{name}_fc2")
    own = [*weights[0], *weights[1]]
    kept = inner, fed.columns, [] if recomputes else made.columns
    for held in kept:
        r.keeps_apart(held)
    queue = (r.delayed_experts, weights) if scale is not None else None
    backward = partial(_backward, chain=chain, kept=kept, like=like, dtype=dtype, scale=scale, shape=shape, queue=queue)
    given = (x, *own) if scale is None else (x, scale, *own)
    saved = (*offsets, *([] if scale is None else [scale]))
    node = r.node(given, saved, backward, work=_work(chain, dtype, shape.added(r.summed)))
    ones = chain.ones(r, shape)
    if shape.te < OUTPUT_FIRST:
        orders += chain.ordered(r, second, columns=False)
    out = r.empty(like, dtype, f"{name}_fc2")
    if shape.te >= OUTPUT_FIRST:
        later = chain.ordered(r, second, columns=False)
        orders += later if count > 1 else []  # one product's end with it
        del later
    fed.rows.clear()
    made.rows.clear()
    del narrow, orders, ones
    return out.by(node)


def _backward(
    r: Recorder,
    gradients: Gradients,
    *,
    chain: Chain,
    kept: tuple[list[Tensor], list[Tensor], list[Tensor]],
    like: Shape,
    dtype: str,
    scale: Tensor | None,
    shape: CoreShape,
    queue: tuple[list[Delayed] | None, Weights] | None,
) -> Sequence[Tensor | None]:
    """``fuser_backward``. ``clear_tensor_data`` ends no input early: the second is a view of what a kernel made.
    ``queue``: where products for gradients of weights wait, if they do, and the weights; those of shared experts never
    do."""
    inner, first_fed, second_fed = kept
    wide, (h, f) = chain.first[0], chain.second
    arrived = chain.low.quantised(r, (chain.rows, h), f"grad_{chain.name}_fc2", rows=True, columns=True)
    sized: list[Tensor] = []
    if scale is not None:
        if scale.dtype != "fp32":
            sized.append(r.empty(scale.shape, "fp32", f"{chain.name}_probabilities_fp32"))
        sized.append(r.empty(scale.shape, "fp32", f"grad_{chain.name}_probabilities_fp32"))
    orders = chain.ordered(r, chain.second, columns=True)
    of_inner = chain.both(r, wide, f"grad_{chain.name}_fc1")
    if chain.again:
        parts = chain.low.parts((chain.rows, f)).columns
        second_fed += [r.empty(one.shape, one.dtype, f"{chain.name}_fc2_{one.name}_again") for one in parts]
    of_scale = None if scale is None else r.empty(scale.shape, dtype, f"grad_{chain.name}_probabilities")
    of_second = _weights(r, chain, chain.second, "fc2", dtype, shape)
    later = None if queue is None else r.later_products if queue[0] is None else queue[0]
    if later is not None and queue is not None:
        of_second = _wait(later, queue[1][1], of_second, [second_fed, arrived.rows, arrived.columns])
    ones = chain.ones(r, shape)
    again = chain.ordered(r, chain.first, columns=True) if chain.count > 1 else []
    grad = r.empty(like, dtype, f"grad_{chain.name}_input")
    if chain.count == 1:
        again = chain.ordered(r, chain.first, columns=True)
        again.clear()  # with the product
    of_first = _weights(r, chain, chain.first, "fc1", dtype, shape)
    if later is None or queue is None:
        first_fed.clear()
    else:
        of_first = _wait(later, queue[1][0], of_first, [first_fed, of_inner.rows, of_inner.columns])
    del again, orders, ones, arrived, of_inner, sized
    inner.clear()
    if later is None:
        second_fed.clear()
    return [grad, *([] if scale is None else [of_scale]), *of_first, *of_second]


def _wait(queue: list[Delayed], weights: Sequence[Tensor], made: Gradients, held: Sequence[list[Tensor]]) -> Gradients:
    """The products wait, with their operands and what they are to fill (``wgrad_store.put``)."""
    fills = [*made]

    def products(r: Recorder) -> list[tuple[Tensor, Gradients]]:
        every = [*fills]
        fills.clear()
        for one in held:
            one.clear()
        return [(weight, [gradient]) for weight, gradient in zip(weights, every, strict=True)]

    queue.append(products)
    made.clear()
    return [None] * len(weights)


def _weights(r: Recorder, chain: Chain, size: Shape, name: str, dtype: str, shape: CoreShape) -> Gradients:
    """Weights' gradients in one tensor; with gradient accumulation fusion they are added to ``main_grad``, and dummies
    that are kept for good stand in."""
    if not shape.gradient_fusion:
        whole = r.empty((chain.count, *size), dtype, f"grad_{chain.name}_{name}_weights")
        return [whole.alias(*size) for _ in range(chain.count)]
    return [None] * chain.count


def _work(chain: Chain, dtype: str, added: int) -> Operator:
    """Products of 8 bits by 8 bits, and what kernels write beside them: of the activation two copies in 8 bits, in
    backward its input, which is read, and two copies of that size."""
    each, count, low, out = -(-chain.rows // chain.count), chain.count, chain.low, ITEMSIZE[dtype]
    (wide, h), (_, f), size = chain.first, chain.second, chain.low.element

    def product(m: int, n: int, k: int, made: float, rows: str) -> Product:
        return Product(m, n, k, count, size, made, rows=rows)  # type: ignore[arg-type]

    copies = 2 * size * chain.rows
    forward = (
        low.work((chain.rows, h)), product(each, wide, h, out, "m"), Stream(copies * f),
        product(each, h, f, out, "m"),
    )  # fmt: skip
    backward = (
        low.work((chain.rows, h)), product(each, f, h, 0, "m"), Stream((copies + out * chain.rows) * wide),
        product(h, f, each, added or out, "k"), product(each, h, wide, out, "m"),
        product(wide, h, each, added or out, "k"),
    )  # fmt: skip
    return Operator(forward, backward)
