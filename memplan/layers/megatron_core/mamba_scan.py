"""The scan of Mamba-2, chunk by chunk, over the kernels of mamba_ssm 2.3: ``ops/triton/ssd_combined.py``
(``_mamba_chunk_scan_combined_fwd``, ``_mamba_chunk_scan_combined_bwd``) and what it calls (``ssd_chunk_state.py``,
``ssd_chunk_scan.py``, ``ssd_bmm.py``, ``ssd_state_passing.py``). Shapes: see ``mamba``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from ...values import dataclass
from ..autograd import Recorder, Shape, Tensor, size_of
from ..work import Kernel, Operator, Product, Scan, Stream

CHUNK = 128
"""Tokens that the scan takes at once, unless others are said (``MambaMixer.__init__``: ``chunk_size``)."""
_LEAST = 32
"""Tokens of the smallest block that kernels sum into before they know theirs (``BLOCK_SIZE_M_min``)."""


@dataclass(frozen=True)
class Sizes:
    """Of one mixer on one rank."""

    b: int
    s: int
    a: int
    p: int
    g: int
    n: int
    multiprocessors: int
    kept: str
    """Dtype of states between chunks, when they have been passed on (``state_dtype``)."""
    chunk: int = CHUNK

    @property
    def d(self) -> int:
        return self.a * self.p

    @property
    def m(self) -> int:
        return self.d + 2 * self.g * self.n

    @property
    def features(self) -> int:
        """Of the input projection: gate z, x, B, C and dt."""
        return self.d + self.m + self.a

    @property
    def c(self) -> int:
        return -(-self.s // self.chunk)

    @property
    def parts(self) -> int:
        """Of a chunk, which kernels sum each for itself."""
        return -(-self.chunk // _LEAST)

    @cached_property
    def splits(self) -> int:
        """Parts of a group's heads that programs of a kernel sum each for itself (``nsplits``)."""
        heads = self.a // self.g
        each = max(min(-(-self.b * self.c * self.a // self.multiprocessors), heads), 1)
        return -(-heads // each)

    @property
    def states(self) -> Shape:
        return self.b, self.c, self.a, self.p * self.n

    @property
    def steps(self) -> Shape:
        """One number of a head for each token."""
        return self.b, self.a, self.c, self.chunk

    @property
    def group(self) -> Shape:
        """What a head's group has for each token."""
        return self.b, self.s, self.g, self.n

    @property
    def factors(self) -> Mapping[str, Shape]:
        """B, C and dt, as their gradients are made."""
        return {"B": self.group, "C": self.group, "dt": (self.b, self.s, self.a)}

    @property
    def scores(self) -> Shape:
        """Of tokens of a chunk for each other."""
        return self.b, self.c, self.g, self.chunk, self.chunk

    @property
    def inner(self) -> Shape:
        return self.b, self.s, self.d


def scan_forward(r: Recorder, at: Sizes) -> list[Tensor]:
    """``_mamba_chunk_scan_combined_fwd`` up to its last kernel: steps and their sums in fp32; states of chunks, which
    pass from chunk to chunk in fp32 and are then kept in ``at.kept``; last, the scores."""
    steps = [r.empty(at.steps, "fp32", name) for name in ("dt_softplus", "dA_cumsum")]
    chunks = r.empty(at.states, "fp32", "chunk_states")
    passed = r.empty(at.states, at.kept, "states")
    final = r.empty((at.b, at.a, at.p * at.n), "fp32", "final_states")
    del chunks
    return [*steps, passed, final, r.empty(at.scores, "fp32", "scores_of_chunks")]


def chunks_backward(r: Recorder, at: Sizes, dtype: str, *, gated: bool) -> list[Tensor | None]:
    """``_mamba_chunk_scan_combined_bwd``: gradients of dt's bias, A and D; without a gate, before these, of x, dt, B
    and C, which are given where there is one. Its variables live until it returns."""
    given = [] if gated else [r.empty(size, dtype, f"grad_{name}") for name, size in at.factors.items()]
    dt = r.empty((at.b, at.s, at.a), dtype, "dt_copied")
    steps = [r.empty(at.steps, "fp32", name) for name in ("dt_softplus_again", "dA_cumsum_again")]
    scores = r.empty(at.scores, "fp32", "scores_again")
    chunks = r.empty(at.states, "fp32", "chunk_states_again")
    states = r.empty(at.states, "fp32", "states_again")
    final = r.empty((at.b, at.a, at.p * at.n), "fp32", "final_states_again")
    del chunks
    ungated = grad_d = None
    if gated:
        parts = _parts(r, at)
        ungated = r.empty(at.inner, dtype, "grad_scan_ungated")
        wide = r.empty((at.a,), "fp32", "grad_D_fp32")
        grad_d = r.empty((at.a,), dtype, "grad_D")
        del wide, parts
    grad_states = r.empty(at.states, "fp32", "grad_states_fp32")
    narrow = [r.empty(at.states, at.kept, "grad_states")]
    narrow.append(states if at.kept == "fp32" else r.empty(at.states, at.kept, "states_converted"))
    blocks = r.empty((at.b, at.a, at.c, -(-at.p * at.n // 64)), "fp32", "grad_dA_blocks")
    summed = r.empty((at.b, at.a, at.c), "fp32", "grad_dA_chunks")
    del blocks, grad_states, states
    parts = _parts(r, at)
    given += [] if gated else [r.empty(at.inner, dtype, "grad_x")]
    grad_dt = r.empty(at.steps, "fp32", "grad_dt")
    parts = r.empty((at.a,), "fp32", "grad_D_of_features")
    parts = r.empty((at.a,), "fp32", "grad_D_fp32")
    of_x = r.empty((at.a,), dtype, "grad_D_again")
    del parts
    following, grad_b = _summed_over_heads(r, at, "B", at.group)
    previous, grad_c = _summed_over_heads(r, at, "C", at.group)
    grad_scores = _over_splits(r, at, "scores", at.scores)
    names = ("grad_dA_flipped", "grad_dA_summed", "grad_dA_previous")
    turned = r.in_turn(*((at.steps, "fp32", name) for name in names))
    within = r.in_turn(((at.b, at.a, at.c, at.parts, at.chunk), "fp32", "grad_dA_parts"), (at.steps, "fp32", "grad_dA"))
    r.empty(at.steps, "fp32", "grad_dA_both")
    small: list[Tensor | None] = [r.empty((at.a,), "fp32", f"grad_{name}") for name in ("dt_bias", "A")]
    if grad_d is None:
        grad_d = of_x
    del dt, steps, scores, final, ungated, narrow, summed, grad_dt
    del following, grad_b, previous, grad_c, grad_scores, turned, within, of_x
    return [*reversed(given), *small, grad_d]


def _parts(r: Recorder, at: Sizes) -> Tensor:
    return r.empty((at.parts, at.b, at.c, at.a, 1), "fp32", "grad_D_parts")


def _summed_over_heads(r: Recorder, at: Sizes, name: str, size: Shape) -> tuple[Tensor, Tensor]:
    """``_chunk_state_bwd_db`` and ``_chunk_scan_bwd_dC``: a gradient of the steps, and that of B or C in fp32."""
    of_steps = r.empty(at.steps, "fp32", f"grad_dA_of_{name}")
    return of_steps, _over_splits(r, at, name, size)


def _over_splits(r: Recorder, at: Sizes, name: str, size: Shape) -> Tensor:
    """The sum over heads of a group, of which programs have each a part."""
    return r.in_turn(((*size, at.splits), "fp32", f"grad_{name}_parts"), (size, "fp32", f"grad_{name}_fp32"))


def work_of(at: Sizes, dtype: str) -> Operator:
    """Convolution and scan with a gate in one operator, which makes both again in backward."""
    convolved, _ = convolution(at, dtype)
    forward, backward = _scan_kernels(at, dtype, gated=True)
    channels = Stream(4 * size_of((at.b, at.s, at.m), dtype))
    return Operator((convolved, *forward), (convolved, *backward, channels))


def convolution(at: Sizes, dtype: str) -> tuple[Stream, Stream]:
    """Forward and backward: it reads and writes channels, and in backward their gradients, too."""
    channels = size_of((at.b, at.s, at.m), dtype)
    return Stream(2 * channels), Stream(3 * channels)


def scan_work(at: Sizes, dtype: str) -> Operator:
    """The scan alone, without a gate."""
    forward, backward = _scan_kernels(at, dtype, gated=False)
    return Operator(tuple(forward), tuple(backward))


def _scan_kernels(at: Sizes, dtype: str, *, gated: bool) -> tuple[list[Kernel], list[Kernel]]:
    """Products of chunks: scores of a group's B and C, states of every head, what they and the chunk's own tokens give;
    in backward these again, and a product for the gradient of each factor."""
    heads, groups = at.b * at.c * at.a, at.b * at.c * at.g
    e, p, n, chunk = size_of((1,), dtype), at.p, at.n, at.chunk
    inner, states = size_of(at.inner, dtype), size_of(at.states, "fp32")
    steps = Stream(3 * size_of(at.steps, "fp32"))
    scores = Product(chunk, chunk, n, groups, e, 4)
    of_states = Product(p, n, chunk, heads, e, 4)
    passing = Stream(states + size_of(at.states, at.kept))
    by_states, by_tokens = Product(chunk, p, n, heads, e), Product(chunk, p, chunk, heads, e)
    again: list[Stream | Product] = [steps, scores, of_states, passing]
    back: list[Stream | Product] = [
        Stream((5 if gated else 3) * inner),
        of_states,
        Stream(3 * states),
        by_states,
        by_tokens,
        Product(chunk, n, p, 2 * heads, e, 4),
        Product(chunk, chunk, p, 2 * heads, e, 4),
        Product(chunk, n, chunk, 2 * groups, e),
        Stream(8 * size_of(at.steps, "fp32"), 8),
    ]
    forward: list[Kernel] = [Scan(one) for one in (*again, by_states, by_tokens, Stream((3 if gated else 2) * inner))]
    backward: list[Kernel] = [Scan(one) for one in (*again, *back)]
    return forward, backward
