"""What operators do, recorded while recipes yield tensors: products, attention, memory-bound kernels, collectives.

``search.time`` turns these into seconds. Bytes of a memory-bound operator follow from its tensors: a kernel reads every
operand once and writes every result once (``Recorder.node``). What does something else says so, in an ``Operator``.

Sizes of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

from ..values import NamedTuple, dataclass

ITEMSIZE = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "int64": 8, "int32": 4, "bool": 1, "uint8": 1, "fp8": 1}
"""Bytes of one element."""

Shape = tuple[int, ...]


def size_of(shape: Shape, dtype: str) -> int:
    """Bytes that a tensor requests, before rounding."""
    return prod(shape) * ITEMSIZE[dtype]


# -- work ----------------------------------------------------------------------------------------------


class Stream(NamedTuple):
    """Memory-bound kernels."""

    bytes: float
    """Read and written by all of them."""
    launches: int = 1
    loss: bool = False
    """Of logits or what a loss makes of them."""
    issue: int = 0
    """Femtoseconds that an H200's multiprocessors take for their instructions, however fast the memory is."""


class Issue(NamedTuple):
    """Femtoseconds of an H200 for each row and element of a kernel that is bound by its instructions."""

    element: int
    row: int = 0

    def of(self, elements: int, rows: int = 0) -> int:
        return self.element * elements + self.row * rows


STRIDED, WIDENED, MIXED = Issue(3100), Issue(2830), Issue(3950)
"""PyTorch 2.11's kernels, each timed alone on an H200 on 26 November 2026 (``benchmarks/measured_kernels_h200.json``
and profiles of training steps there): element-wise ones whose operands do not all have the result's shape
(``elementwise_kernel``, which computes an index for each); casts to a wider dtype, and operands of two dtypes
(``unrolled_elementwise_kernel``, which looks at each element's). fp32 to 16 bits has a kernel of its own, as fast as
the memory (``Copy.cu``, ``bfloat16_copy_kernel_cuda``)."""
SUM_OF_ROWS = Issue(320, 2_000_000)
GELU, GELU_BACKWARD, DROPOUT = Issue(1295), Issue(1720), Issue(1660)
SOFTMAX, SOFTMAX_BACKWARD = Issue(3150), Issue(2850)
SOFTMAX_OF_ODD_ROWS, CAT_OF_ODD_ROWS = Issue(5500), Issue(6200)
"""Rows of 2,049 elements in 16 bits, of which loads of 16 bytes are out of step: scores with gpt-oss' sinks, in a
training step there."""
REPEATED = Issue(0, 3_900_000_000)
"""For each gradient that is added to one and the same row (``indexing_backward_kernel``, which takes them one by one):
256 of 2,880 and of 5,760 elements in 1.0 ms, biases of its experts in the same step."""
TOP_K = Issue(44_500, 1_900_000)
"""``torch.topk`` of rows: what is left of 137, 252, 293 and 458 microseconds for 16,384 rows of 128, 256, 288 and 512
logits on an H100 (torch 2.11, https://github.com/FlashML-org/FreeToken/pull/319) without softmax, cast and norm."""
FOUR_BITS = Issue(1100)
"""bitsandbytes' ``kDequantizeBlockwise`` (NF4 to bf16) in a step of Llama 3 8B there: 64.6 microseconds for 58.7
million elements, 20.2 for 16.8, 6.3 for 4.2."""
FOUR_BITS_BY_BRANCHES = Issue(1850)
"""The same before bitsandbytes 0.48, where a table replaced branches: on A100 and H100 it is 1.36 to 2.07 times as fast
(https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1747), 1.68 in the geometric mean of these two."""
FOUR_BIT_CALLS, FOUR_BIT_CALLS_BACKWARD = 4, 3
"""Operators in whose time the host calls a 4-bit linear layer (``Linear4bit.forward``, ``MatMul4Bit``, the library's
own operators in Python) beside its kernels: 106 microseconds forward, 57 backward, by seven of a Llama's layer with
LoRA, as of ``search.time.host.TRANSFORMERS_OPERATOR`` (bitsandbytes 0.50.2)."""
LAYER_NORM, LAYER_NORM_BACKWARD = Issue(1256, 1_290_000), Issue(2170, 5_000_000)


def issued(operands: Sequence[tuple[Shape, str]], shape: Shape, dtype: str) -> int:
    """``Stream.issue`` of an element-wise kernel on ``operands``, shape and dtype of each."""
    n = prod(shape)
    if any(own != dtype for _, own in operands):
        widens = ITEMSIZE[operands[0][1]] < ITEMSIZE[dtype]
        return MIXED.of(n) if len(operands) > 1 else WIDENED.of(n) if widens else 0
    return STRIDED.of(n) if any(1 < prod(own) < n for own, _ in operands) else 0


class Product(NamedTuple):
    """``times`` products (m, k) x (k, n)."""

    m: int
    n: int
    k: int
    times: int = 1
    element: float = 2
    """Bytes of an element."""
    written: int = 0
    """Bytes that move for each element of the result, where those are not ``element``: 8 for a gradient that is added
    to one in fp32."""
    rows: Literal["", "m", "k"] = ""
    """Of grouped products, each a kernel of its own, the size that is a group's rows."""
    tf32: bool = False
    """Tensor cores multiply operands in fp32, as TF32."""
    tokens: Literal["", "m", "k"] = ""
    """The size that counts tokens: lines of memory, whose length it leaves alone, so that it may be any number."""

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.times

    def regrouped(self, factor: int) -> Product:
        """The same rows in so many times the groups, if they are in groups."""
        if not self.rows:
            return self
        return self._replace(times=self.times * factor, **{self.rows: getattr(self, self.rows) // factor})


class Attention(NamedTuple):
    """A fused kernel from queries, keys and values to the context, or back."""

    flops: float
    """Of all scores."""
    part: float
    """Of them that are computed: half where attention is causal."""
    bytes: float
    heads: int
    """Of queries, of all sequences."""
    queries: int
    keys: int
    """Of each head."""
    features: int
    launches: int = 1
    efficient: bool = False
    """PyTorch's memory-efficient kernel runs it."""

    @property
    def backward(self) -> bool:
        """Sums of outputs and their gradients, the gradients, and the queries' in 16 bits: three kernels."""
        return self.launches > 1


class Scan(NamedTuple):
    """A kernel of a state-space scan, whose own code multiplies and moves bytes slower than libraries do."""

    kernel: Stream | Product

    @property
    def flops(self) -> float:
        return self.kernel.flops if isinstance(self.kernel, Product) else 0.0

    @property
    def launches(self) -> int:
        return 1 if isinstance(self.kernel, Product) else self.kernel.launches


class Together(NamedTuple):
    """Kernels that run while one collective does, each so often."""

    kernels: tuple[tuple[Stream | Product | Attention | Scan, int], ...]


Alone = Stream | Product | Attention | Scan
"""What a GPU does by itself."""

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]

Axis = Literal["tp", "cp", "ep", "etp", "experts"]
"""Ranks that take part: of a layer's tensors, of its sequence, of experts, of one expert, or of these two together."""


class Exchange(NamedTuple):
    """A collective of the ranks that share a layer."""

    kind: Kind
    bytes: float
    """Of the whole tensor: what an all-gather gives and a reduce-scatter takes."""
    axis: Axis = "tp"
    beside: Alone | Together | None = None
    """What runs meanwhile."""
    times: int = 1
    """How often."""
    choices: tuple[int, int] = (0, 0)
    """Of an all-to-all whose rows go to ranks that have one of so many of so many experts, and cross the network once
    for each node."""
    scores: float = 0.0
    """Bytes that go along with all rows for each expert of the NVLink domain that they are sent to."""
    among: int = 0
    """Of so many neighbours of ``axis``; 0: of all."""
    parts: int = 0
    """In how many parts it goes from rank to rank while the product beside computes those that are there, by the GPUs'
    copy engines; 0: whole, by kernels."""


Kernel = Alone | Exchange
Work = Sequence[Kernel]


class Calls(NamedTuple):
    """How often the host starts something."""

    linear: int = 0
    """Products of linear layers; a group of them is one call."""
    others: int = 0

    def plus(self, *further: Calls) -> Calls:
        return Calls(self.linear + sum(one.linear for one in further), self.others + sum(one.others for one in further))

    def times(self, factor: int) -> Calls:
        return Calls(factor * self.linear, factor * self.others)


NO_CALLS = Calls()


def calls(kernel: Kernel) -> Calls:
    """Of one run of ``kernel``."""
    if isinstance(kernel, Product):
        return Calls(1, 0)
    return Calls(0, kernel.times if isinstance(kernel, Exchange) else kernel.launches)


def multiplies(work: Work | None) -> bool:
    """Whether a library multiplies matrices."""
    kernels = [one.beside if isinstance(one, Exchange) and one.beside is not None else one for one in work or ()]
    return any(isinstance(one, Product) for one in kernels)


class Operator(NamedTuple):
    """What an operator does in each direction; ``None`` where that follows from its tensors."""

    forward: Work | None = None
    backward: Work | None = None
    issue: tuple[int, int] = (0, 0)
    """As of ``Stream``, of what follows from tensors in each direction."""

    def after(self, forward: Work, backward: Work) -> Operator:
        """Other kernels run first in each direction."""
        return Operator((*forward, *(self.forward or ())), (*backward, *(self.backward or ())))

    def then(self, forward: Work, backward: Work) -> Operator:
        """Other kernels run last."""
        return Operator((*(self.forward or ()), *forward), (*(self.backward or ()), *backward))


def exchanged(kind: Kind, size: float, back: Kind, axis: Axis = "tp") -> Operator:
    """A collective of ``size`` bytes, and its gradient's."""
    return Operator((Exchange(kind, size, axis),), (Exchange(back, size, axis),))


NOTHING = Operator((), ())
"""Of what runs other operators."""


def linear(
    tokens: int, n: int, k: int, dtype: str, *, needs_x: bool = True, needs_weight: bool = True, written: int = 0
) -> Operator:
    """A product with a weight (n, k); backward has one for each gradient that is needed."""
    product, of_input, of_weight = products(tokens, n, k, dtype, written)
    return Operator((product,), [*([of_input] if needs_x else []), *([of_weight] if needs_weight else [])])


def products(
    tokens: int, n: int, k: int, dtype: str, written: int = 0, low: float | None = None
) -> tuple[Product, Product, Product]:
    """Forward, and for the gradients of input and weight. ``low``: bytes of an operand's element, where that is not of
    ``dtype``, which results are."""
    e = ITEMSIZE[dtype]
    size, out = (e, 0) if low is None else (low, e)
    return (
        Product(tokens, n, k, 1, size, out, tokens="m"),
        Product(tokens, k, n, 1, size, out, tokens="m"),
        Product(n, k, tokens, 1, size, written or out, tokens="k"),
    )


def linear_four_bit(tokens: int, n: int, k: int, dtype: str, whole: str, issue: Issue = FOUR_BITS) -> Operator:
    """bitsandbytes' product with a 4-bit weight (n, k), which is dequantised to ``whole`` before each, by a kernel that
    takes ``issue`` an element."""
    unpacked = Stream((0.5 + ITEMSIZE[whole]) * n * k, issue=issue.of(n * k))
    product = linear(tokens, n, k, dtype, needs_weight=False)
    calls = Stream(0, FOUR_BIT_CALLS), Stream(0, FOUR_BIT_CALLS_BACKWARD)
    return product.after((calls[0], unpacked), (calls[1], unpacked))


def batched(shape: Shape, k: int, dtype: str, *, needs_x: bool = True, needs_y: bool = True) -> Operator:
    """Products (m, k) x (k, n) that give ``shape``, (…, m, n)."""
    *batch, m, n = shape
    count, e = prod(batch), ITEMSIZE[dtype]
    back = [Product(k, n, m, count, e)] if needs_y else []
    return Operator((Product(m, n, k, count, e),), [*back, *([Product(m, k, n, count, e)] if needs_x else [])])


@dataclass(frozen=True, slots=True)
class Ranks:
    """How ``t`` tensor-parallel ranks share linear layers, as Megatron has them."""

    t: int
    sequence: bool
    """Sequence parallelism: an all-gather and a reduce-scatter in place of an all-reduce."""
    beside: bool = False
    """A column-parallel layer's collectives run beside its products
    (``LinearWithGradAccumulationAndAsyncCommunication``)."""
    buffers: bool = False
    """Other collectives of both kinds of layers go round in parts beside theirs (Transformer Engine's user buffers,
    ``ring_exchange``: ``comm_gemm_overlap.cpp``, ``split_overlap_ag`` and ``split_overlap_rs``)."""

    def column(
        self,
        tokens: int,
        n: int,
        k: int,
        dtype: str,
        written: int = 0,
        low: float | None = None,
        *,
        trained: bool = True,
    ) -> Operator:
        """Reads a hidden state of ``k`` features that all ranks need whole, in elements of ``low`` bytes. Of a weight
        that is not ``trained`` there is no gradient."""
        product, of_input, of_weight = products(tokens, n, k, dtype, written, low)
        weights = (of_weight,) if trained else ()
        if self.t == 1:
            return Operator((product,), (of_input, *weights))
        size = tokens * k * ITEMSIZE[dtype]
        gathered = size if low is None else tokens * k * low
        hidden, weight = (of_input, of_weight if trained else None) if self.beside else (None, None)
        if not self.sequence:
            return Operator((product,), (of_input, Exchange("all-reduce", size, beside=weight), *weights))
        again = [Exchange("all-gather", gathered, beside=hidden)] if trained else []
        scattered = Exchange("reduce-scatter", size, beside=weight)
        first = self._round("all-gather", gathered, product)
        return Operator((first, product), (*again, of_input, scattered, *weights))

    def row(
        self,
        tokens: int,
        n: int,
        k: int,
        dtype: str,
        written: int = 0,
        low: float | None = None,
        *,
        trained: bool = True,
    ) -> Operator:
        """Writes a hidden state of ``n`` features that is summed over ranks, whose gradient is gathered in elements of
        ``low`` bytes. Likewise."""
        product, of_input, of_weight = products(tokens, n, k, dtype, written, low)
        weights = (of_weight,) if trained else ()
        size = tokens * n * ITEMSIZE[dtype]
        gathered = size if low is None else tokens * n * low
        if self.t == 1:
            return Operator((product,), (of_input, *weights))
        if not self.sequence:
            return Operator((product, Exchange("all-reduce", size)), (of_input, *weights))
        back = self._round("all-gather", gathered, of_input)
        return Operator((product, self._round("reduce-scatter", size, product)), (back, of_input, *weights))

    def _round(self, kind: Kind, size: float, product: Product) -> Exchange:
        """A collective of ``product``'s operand or result, which nothing hides but user buffers."""
        return Exchange(kind, size, beside=product, parts=self.t) if self.buffers else Exchange(kind, size)


def looked_up(shape: Shape, dtype: str) -> Operator:
    """Rows of a table, copied."""
    return Operator((Stream(2 * size_of(shape, dtype)),))


def scaled_scores(heads: Shape, shape: Shape, dtype: str) -> Operator:
    """``baddbmm`` of queries and keys, each of shape ``heads`` (…, d), whose scaled gradients are of their own."""
    done = batched(shape, heads[-1], dtype)
    return Operator(done.forward, [*(done.backward or ()), Stream(4 * size_of(heads, dtype), 2)])


def in_place(shape: Shape, dtype: str, passes: int) -> Operator:
    """Backward reads and writes tensors of ``shape`` so often, and makes none."""
    return Operator(None, (Stream(passes * size_of(shape, dtype)),))


def parallel_cross_entropy(shape: Shape, t: int, *, cast: bool = False) -> Operator:
    """Megatron's, on a rank's part of fp32 logits, which it overwrites: the maximum; less it; exponentials; their sum;
    the quotient, eight passes of reading or writing. Backward multiplies the softmax with the loss's gradient. Maximum,
    sum and the label's logit of every token are summed over ranks. ``cast``: of 16-bit logits, and back."""
    size, rows = float(size_of(shape, "fp32")), size_of(shape[:-1], "fp32")
    sums = [Exchange("all-reduce", rows, times=3)] if t > 1 else []
    forward: list[Kernel] = [Stream(8 * size, 5, True), *sums]
    backward: list[Kernel] = [Stream(2 * size, 2, True)]
    if cast:
        forward, backward = [Stream(1.5 * size, 1, True), *forward], [*backward, Stream(1.5 * size, 1, True)]
    return Operator(forward, backward)


def attention(
    shape: Shape,
    kv_heads: int,
    keys: int,
    dtype: str,
    *,
    causal: bool,
    values: int = 0,
    part: float | None = None,
    efficient: bool = False,
) -> Operator:
    """As ``fused``; ``part`` of the scores is computed, where that is less than causality leaves."""
    pair = fused(shape, kv_heads, keys, dtype, causal=causal, values=values)
    kernels = (one._replace(efficient=efficient) for one in pair)
    forward, backward = (one if part is None else one._replace(part=min(part, one.part)) for one in kernels)
    return Operator((forward,), (backward,))


def windowed(s: int, window: int, *, alternating: bool) -> float:
    """Part of s x s scores that is in a causal ``window``, in every layer or in every second of them: their mean."""
    w = min(window, s)
    part = (w * s - w * w / 2) / (s * s)
    return (part + 0.5) / 2 if alternating else part


def fused(
    shape: Shape, kv_heads: int, keys: int, dtype: str, *, causal: bool, values: int = 0
) -> tuple[Attention, Attention]:
    """A fused kernel on b sequences of s queries with a heads of d features, ``shape`` (b, s, a, d), and ``keys`` keys
    each, with ``values`` features of a value where these are others: two products forward, one of them with values;
    five backward, two of them with values (scores are computed again)."""
    b, s, a, d = shape
    v, one = values or d, 2.0 * b * s * keys * a
    part, e = 0.5 if causal else 1.0, ITEMSIZE[dtype]
    moved, sizes = float(e * (d + v) * b * (s * a + keys * kv_heads)), (b * a, s, keys, d)
    back = Attention(one * (3 * d + 2 * v), part, 2 * moved, *sizes, 3)
    return Attention(one * (d + v), part, moved, *sizes), back
