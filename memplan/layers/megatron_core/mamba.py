"""Mamba-2 in Megatron-Core: ``ssm/mamba_layer.py`` (``MambaLayer.forward``) and ``mamba_mixer.py`` (``MambaMixer``,
``_ssm_training``), over the kernels of mamba_ssm 2.3 (``ops/triton/ssd_combined.py``, ``ssd_chunk_state.py``,
``ssd_chunk_scan.py``, ``ssd_bmm.py``, ``ssd_state_passing.py``, ``layernorm_gated.py``) and of causal_conv1d 1.6.

``MambaSplitConv1dScanCombinedFn`` saves its input and the scan's output before its gate; convolution and states are
made again in backward. Variables of its functions live until these return, and so do those here.

Shapes: s sequence, b micro-batch; on this rank: a heads of p features, d = a p, g groups of n states, m = d + 2 g n
channels of the convolution, c chunks of 128 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod

from ...tape.events import Category
from ...values import dataclass
from .. import ops
from ..autograd import Gradients, Recorder, Shape, Tensor, incoming, size_of
from ..work import Kernel, Operator, Product, Scan, Stream, exchanged
from . import local, te
from .shape import CoreShape

COMMUNICATION = Category.COMMUNICATION_BUFFERS

IN, OUT, NORM = "mixer.in_proj", "mixer.out_proj", "mixer.norm"

CHUNK = 128
"""Tokens that the scan takes at once (``MambaMixer.__init__``)."""
CONVOLUTION = 4
"""Tokens under the convolution."""
PARTS = CHUNK // 32
"""Parts of a chunk that kernels sum into before they know their block size (``BLOCK_SIZE_M_min``)."""


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
        return -(-self.s // CHUNK)

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
        return self.b, self.a, self.c, CHUNK

    @property
    def group(self) -> Shape:
        """What a head's group has for each token."""
        return self.b, self.s, self.g, self.n

    @property
    def scores(self) -> Shape:
        """Of tokens of a chunk for each other."""
        return self.b, self.c, self.g, CHUNK, CHUNK

    @property
    def inner(self) -> Shape:
        return self.b, self.s, self.d


def sizes_of(shape: CoreShape) -> Sizes:
    """Context parallelism gives every rank whole sequences of its part of the heads, and a group at least."""
    spec, t, cp = shape.spec, shape.t, shape.cp
    groups = max(1, spec.mamba_groups // t // cp)
    a = spec.mamba_heads // t // cp
    return Sizes(shape.b, shape.s * cp, a, spec.mamba_head_dim, groups, spec.mamba_state_dim, shape.multiprocessors)


def own_sizes(shape: CoreShape) -> Sizes:
    """As the projections have it, of a part of the tokens of each sequence."""
    return replace(sizes_of(replace(shape, cp=1)), s=shape.s)


def weights(shape: CoreShape) -> frozenset[Shape]:
    """Of the two projections on this rank."""
    whole = own_sizes(shape)
    return frozenset({(whole.features, shape.spec.hidden), (shape.spec.hidden, whole.d)})


def layer(r: Recorder, hidden: Tensor, shape: CoreShape) -> Tensor:
    """(s, b, h), or (s/t, b, h) with sequence parallelism, to the same."""
    mixed = _mixer(r, hidden, shape)
    return local.bias_dropout_add(r, mixed, None, hidden, OUT, shape)


def _mixer(r: Recorder, hidden: Tensor, shape: CoreShape) -> Tensor:
    """``forward``. The projection's gradient comes transposed, unless it went through an exchange."""
    own = own_sizes(shape)
    parameters = _parameters(r, own, shape)
    strided = shape.b > 1 and shape.cp == 1
    x, _ = te.norm_column_linear(
        r, hidden, IN, f"{IN}.layer_norm", own.features, shape, bias=False, skip_bias=False, strided=strided
    )
    if shape.cp > 1:
        x = _to_heads(r, x, own, sizes_of(shape), shape.cp)
    y = _scanned(r, x, parameters, shape)
    out, _ = te.row_linear(r, y, OUT, shape, bias=False)
    return out


def between(r: Recorder, x: Tensor, shape: CoreShape) -> Tensor:
    """What is between the projections, (s / cp, b, d + m + a) to (s / cp, b, d)."""
    parameters = _parameters(r, own_sizes(shape), shape)
    if shape.cp > 1:
        x = _to_heads(r, x, own_sizes(shape), sizes_of(shape), shape.cp)
    return _scanned(r, x, parameters, shape)


def _parameters(r: Recorder, own: Sizes, shape: CoreShape) -> dict[str, Tensor]:
    """Those of the mixer itself, which register before those of its modules. All are in the model's dtype
    (``Float16Module``)."""
    sizes: dict[str, Shape] = {
        "conv1d_weight": (own.m, 1, CONVOLUTION),
        "conv1d_bias": (own.m,),
        "dt_bias": (own.a,),
        "A_log": (own.a,),
        "D": (own.a,),
    }
    return {name: r.parameter(f"mixer.{name}", size, shape.dtype) for name, size in sizes.items()}


def _scanned(r: Recorder, x: Tensor, own: Mapping[str, Tensor], shape: CoreShape) -> Tensor:
    """``_ssm_training``: sequence by sequence."""
    at = sizes_of(shape)

    def of_rank(name: str) -> Tensor:
        return own[name] if shape.cp == 1 else _of_rank(r, own[name], at, name)

    x = _by_sequence(r, x, (at.b, at.s, at.features), "zxbcdt")
    decay = ops.cast(r, of_rank("A_log"), "fp32", "A_log_fp32")
    decay = ops.elementwise(r, "A_exp", (decay,), saves_output=True)
    decay = ops.scale(r, decay, "A")
    weights = [of_rank(name) for name in ("conv1d_weight", "conv1d_bias")]
    bias = ops.cast(r, of_rank("dt_bias"), "fp32", "dt_bias_fp32")
    y = _scan(r, x, (*weights, bias, decay, of_rank("D")), at)
    del weights, bias, decay
    y = _by_sequence(r, y, (at.s, at.b, at.d), "scan_contiguous")
    if shape.cp > 1:
        y = _to_tokens(r, y, shape.cp)
    return _norm(r, y, own_sizes(shape), shape)


def _by_sequence(r: Recorder, x: Tensor, size: Shape, name: str) -> Tensor:
    """``rearrange(…).contiguous()``, between (s, b, …) and (b, s, …): a copy, but of one sequence."""
    return x.view(*size) if 1 in size[:2] else ops.contiguous(r, x, size, name)


# -- the scan ------------------------------------------------------------------------------------------


def _scan(r: Recorder, x: Tensor, others: Sequence[Tensor], at: Sizes) -> Tensor:
    """``mamba_split_conv1d_scan_combined`` with the gate, without norm and output projection."""
    dtype = x.dtype
    copied = at.features % 8 != 0
    convolved = _convolved(r, at, dtype, copied)
    kept = _scan_forward(r, at, dtype)
    out = r.empty(at.inner, dtype, "scan")
    ungated = r.empty(at.inner, dtype, "scan_ungated")
    del kept[-1]  # the scores end with the function that multiplies them
    likes = {name: one.shape for name, one in zip(("conv1d_weight", "conv1d_bias"), others, strict=False)}

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        return _scan_backward(r, at, dtype, likes, copied)

    node = r.node((x, *others), (x, *others, ungated), backward, work=_work(at, dtype))
    del kept, convolved, ungated
    return out.by(node)


def _convolved(r: Recorder, at: Sizes, dtype: str, copied: bool) -> Tensor:
    """``causal_conv1d_fwd_function``: (b, s, m). Rows of channels that do not begin at a multiple of 8 elements are
    copied first (``ensure_stride``)."""
    made = [r.empty((at.b, at.s, at.m), dtype, "convolution_input")] if copied else []
    out = r.empty((at.b, at.s, at.m), dtype, "convolution")
    made.clear()
    return out


def _scan_forward(r: Recorder, at: Sizes, dtype: str) -> list[Tensor]:
    """``_mamba_chunk_scan_combined_fwd`` up to its last kernel: steps and their sums in fp32; states of chunks, which
    pass from chunk to chunk in fp32 and are then kept in ``dtype``; last, the scores."""
    steps = [r.empty(at.steps, "fp32", name) for name in ("dt_softplus", "dA_cumsum")]
    chunks = r.empty(at.states, "fp32", "chunk_states")
    passed = r.empty(at.states, dtype, "states")
    final = r.empty((at.b, at.a, at.p * at.n), "fp32", "final_states")
    del chunks
    return [*steps, passed, final, r.empty(at.scores, "fp32", "scores_of_chunks")]


def _scan_backward(
    r: Recorder, at: Sizes, dtype: str, weights: Mapping[str, Shape], copied: bool
) -> list[Tensor | None]:
    """``MambaSplitConv1dScanCombinedFn.backward``."""
    convolved = _convolved(r, at, dtype, copied)
    grad = r.empty((at.b, at.s, at.features), dtype, "grad_zxbcdt")
    channels = r.empty((at.b, at.s, at.m), dtype, "grad_convolution")
    small = _chunks_backward(r, at, dtype)
    again = ("convolution_input_again", "grad_convolution_input") if copied else ()
    made = [r.empty((at.b, at.s, at.m), dtype, name) for name in again]
    wide = [r.empty(size, "fp32", f"grad_{name}_fp32") for name, size in weights.items()]
    narrow = []
    for name, size in weights.items():
        narrow.append(r.empty(size, dtype, f"grad_{name}"))
        del wide[0]
    made.clear()
    del convolved, channels
    return [grad, *narrow, *small]


def _chunks_backward(r: Recorder, at: Sizes, dtype: str) -> list[Tensor | None]:
    """``_mamba_chunk_scan_combined_bwd``: gradients of dt's bias, A and D. Its variables live until it returns."""
    dt = r.empty((at.b, at.s, at.a), dtype, "dt_copied")
    steps = [r.empty(at.steps, "fp32", name) for name in ("dt_softplus_again", "dA_cumsum_again")]
    scores = r.empty(at.scores, "fp32", "scores_again")
    chunks = r.empty(at.states, "fp32", "chunk_states_again")
    states = r.empty(at.states, "fp32", "states_again")
    final = r.empty((at.b, at.a, at.p * at.n), "fp32", "final_states_again")
    del chunks
    parts = _parts(r, at)
    ungated = r.empty(at.inner, dtype, "grad_scan_ungated")
    wide = r.empty((at.a,), "fp32", "grad_D_fp32")
    grad_d = r.empty((at.a,), dtype, "grad_D")
    del wide, parts
    grad_states = r.empty(at.states, "fp32", "grad_states_fp32")
    narrow = [r.empty(at.states, dtype, name) for name in ("grad_states", "states_converted")]
    blocks = r.empty((at.b, at.a, at.c, -(-at.p * at.n // 64)), "fp32", "grad_dA_blocks")
    summed = r.empty((at.b, at.a, at.c), "fp32", "grad_dA_chunks")
    del blocks, grad_states, states
    parts = _parts(r, at)
    grad_dt = r.empty(at.steps, "fp32", "grad_dt")
    parts = r.empty((at.a,), "fp32", "grad_D_of_features")
    parts = r.empty((at.a,), "fp32", "grad_D_fp32")
    unread = r.empty((at.a,), dtype, "grad_D_again")
    del parts
    following, grad_b = _summed_over_heads(r, at, "B", at.group)
    previous, grad_c = _summed_over_heads(r, at, "C", at.group)
    grad_scores = _over_splits(r, at, "scores", at.scores)
    turned = r.empty(at.steps, "fp32", "grad_dA_flipped")
    turned = r.empty(at.steps, "fp32", "grad_dA_summed")
    turned = r.empty(at.steps, "fp32", "grad_dA_previous")
    split = r.empty((at.b, at.a, at.c, PARTS, CHUNK), "fp32", "grad_dA_parts")
    within = r.empty(at.steps, "fp32", "grad_dA")
    del split
    both = r.empty(at.steps, "fp32", "grad_dA_both")
    del both
    small: list[Tensor | None] = [r.empty((at.a,), "fp32", f"grad_{name}") for name in ("dt_bias", "A")]
    del dt, steps, scores, final, ungated, narrow, summed, grad_dt
    del following, grad_b, previous, grad_c, grad_scores, turned, within, unread
    return [*small, grad_d]


def _parts(r: Recorder, at: Sizes) -> Tensor:
    return r.empty((PARTS, at.b, at.c, at.a, 1), "fp32", "grad_D_parts")


def _summed_over_heads(r: Recorder, at: Sizes, name: str, size: Shape) -> tuple[Tensor, Tensor]:
    """``_chunk_state_bwd_db`` and ``_chunk_scan_bwd_dC``: a gradient of the steps, and that of B or C in fp32."""
    of_steps = r.empty(at.steps, "fp32", f"grad_dA_of_{name}")
    return of_steps, _over_splits(r, at, name, size)


def _over_splits(r: Recorder, at: Sizes, name: str, size: Shape) -> Tensor:
    """The sum over heads of a group, of which programs have each a part."""
    parts = r.empty((*size, at.splits), "fp32", f"grad_{name}_parts")
    out = r.empty(size, "fp32", f"grad_{name}_fp32")
    del parts
    return out


def _norm(r: Recorder, x: Tensor, own: Sizes, shape: CoreShape) -> Tensor:
    """``layernorm_gated.py``, ``RMSNorm`` without a gate, over each group: saves input and reciprocal deviations. The
    weight's gradient is summed by as many programs as fill the device (``_layer_norm_bwd``)."""
    weight = r.parameter(f"{NORM}.weight", (own.d,), x.dtype)
    dtype, like = x.dtype, x.shape
    out = r.empty(like, dtype, NORM)
    rows, groups = prod(like[:-1]), own.g
    deviations = r.empty((rows * groups,), "fp32", f"{NORM}_rsigma")
    warps = min(max(_power_of_two(own.d // groups) // 256, 1), 8)
    programs = -(-own.multiprocessors * -(-4 // warps) // groups)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        grad = r.empty(like, dtype, f"grad_{NORM}_input")
        parts = r.empty((programs, own.d), "fp32", f"grad_{NORM}_parts")
        total = r.empty((own.d,), "fp32", f"grad_{NORM}_weight_fp32")
        grad_w = r.empty((own.d,), dtype, f"grad_{NORM}_weight")
        del parts, total
        return [grad, grad_w]

    return out.by(r.node((x, weight), (x, weight, deviations), backward))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


# -- context parallelism -------------------------------------------------------------------------------


def _to_heads(r: Recorder, x: Tensor, own: Sizes, at: Sizes, cp: int) -> Tensor:
    """``pre_conv_ssm``: every part of (s / cp, b, d + m + a) for itself to whole sequences of a part of its features,
    put together, and in the order of tokens. A group that several ranks need is repeated."""
    s, b, _ = x.shape
    group = own.g * own.n
    widths = (own.d, own.d, group, group, own.a)
    parts = ops.split(r, x, [(s, b, width) for width in widths], "zxbcdt")
    repeated = at.g * cp // own.g
    for place in range(len(parts)):
        if place == 2 and repeated > 1:
            for one in (2, 3):
                parts[one] = ops.expanded(r, parts[one], (s, b, group * repeated), "group_repeated", copies=True)
        parts[place] = _cp2hp(r, parts[place], (s * cp, b, parts[place].shape[-1] // cp))
    whole = (s * cp, b, at.features)
    likes = [part.shape for part in parts]
    out = r.empty(whole, x.dtype, "zxbcdt_together")
    out = out.by(r.node(parts, (), lambda r, gradients: [incoming(gradients).view(*like) for like in likes]))
    return _reordered(r, out, whole, "zxbcdt")


def _to_tokens(r: Recorder, y: Tensor, cp: int) -> Tensor:
    """``post_conv_ssm`` and ``_all_to_all_hp2cp``: (s, b, d / cp) back to (s / cp, b, d), put side by side behind the
    exchange."""
    s, b, d = y.shape
    y = _reordered(r, y, y.shape, "scan")
    received = _exchanged(r, y, slices=False)
    return _reordered(r, received, (s // cp, b, d * cp), "exchanged")


def _cp2hp(r: Recorder, x: Tensor, size: Shape) -> Tensor:
    """``_all_to_all_cp2hp``: parts of a slice are put one behind the other first; the gradient comes as a slice."""
    return _exchanged(r, _reordered(r, x, x.shape, "exchanged"), slices=True).view(*size)


def _reordered(r: Recorder, x: Tensor, size: Shape, name: str) -> Tensor:
    """``cat`` of parts of ``x``, whose gradients are views that ``split``'s backward puts together, as in
    ``_undo_attention_load_balancing`` and ``_redo_…``."""
    like, dtype, name = x.shape, x.dtype, f"{name}_reordered"
    return r.output((x,), (), lambda r, gradients: [r.empty(like, dtype, f"grad_{name}")], size, dtype, name)


def _exchanged(r: Recorder, x: Tensor, *, slices: bool) -> Tensor:
    """``_AllToAll``; of a gradient that is a slice it makes a contiguous copy."""
    like, dtype = x.shape, x.dtype

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        sent = r.empty(like, dtype, "grad_exchange_sent", COMMUNICATION) if slices else None
        received = r.empty(like, dtype, "grad_exchange_received", COMMUNICATION)
        del sent
        return [received]

    done = exchanged("all-to-all", size_of(like, dtype), "all-to-all", "cp")
    return r.output((x,), (), backward, like, dtype, "exchange_received", COMMUNICATION, done)


def _of_rank(r: Recorder, x: Tensor, at: Sizes, name: str) -> Tensor:
    """``_slice_conv_param``, a copy, and ``_slice_vector_param``, a view; backward fills a tensor of the whole size."""
    whole, dtype = x.shape, x.dtype
    convolution = name.startswith("conv1d")
    size = (at.m if convolution else at.a, *whole[1:])
    node = r.node((x,), (), lambda r, gradients: [r.empty(whole, dtype, f"grad_{name}_slice")])
    if convolution:
        return r.empty(size, dtype, f"{name}_of_rank").by(node)
    return Tensor(x.storage, size, dtype, node)


# -- work ----------------------------------------------------------------------------------------------


def _work(at: Sizes, dtype: str) -> Operator:
    """Convolution, and products of chunks: scores of a group's B and C, states of every head, what they and the
    chunk's own tokens give; in backward these again, and a product for the gradient of each factor."""
    heads, groups = at.b * at.c * at.a, at.b * at.c * at.g
    e, p, n = size_of((1,), dtype), at.p, at.n
    convolution = Stream(2 * size_of((at.b, at.s, at.m), dtype))
    inner, states = size_of(at.inner, dtype), size_of(at.states, "fp32")
    steps = Stream(3 * size_of(at.steps, "fp32"))
    scores = Product(CHUNK, CHUNK, n, groups, e, 4)
    of_states = Product(p, n, CHUNK, heads, e, 4)
    passing = Stream(states + states * e // 4)
    by_states, by_tokens = Product(CHUNK, p, n, heads, e), Product(CHUNK, p, CHUNK, heads, e)
    again: list[Stream | Product] = [steps, scores, of_states, passing]
    back: list[Stream | Product] = [
        Stream(5 * inner),
        of_states,
        Stream(3 * states),
        by_states,
        by_tokens,
        Product(CHUNK, n, p, 2 * heads, e, 4),
        Product(CHUNK, CHUNK, p, 2 * heads, e, 4),
        Product(CHUNK, n, CHUNK, 2 * groups, e),
        Stream(8 * size_of(at.steps, "fp32"), 8),
    ]
    forward: list[Kernel] = [Scan(one) for one in (*again, by_states, by_tokens, Stream(3 * inner))]
    backward: list[Kernel] = [Scan(one) for one in (*again, *back)]
    channels = Stream(4 * size_of((at.b, at.s, at.m), dtype))
    return Operator((convolution, *forward), (convolution, *backward, channels))
