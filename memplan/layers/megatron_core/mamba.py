"""Mamba-2 in Megatron-Core: ``ssm/mamba_layer.py`` (``MambaLayer.forward``) and ``mamba_mixer.py`` (``MambaMixer``,
``_ssm_training``), over the kernels of mamba_ssm 2.3 (``ops/triton/ssd_combined.py``, ``ssd_chunk_state.py``,
``ssd_chunk_scan.py``, ``ssd_bmm.py``, ``ssd_state_passing.py``, ``layernorm_gated.py``) and of causal_conv1d 1.6.

``MambaSplitConv1dScanCombinedFn`` saves its input and the scan's output before its gate; convolution and states are
made again in backward. With ``--disable-mamba-mem-eff-path`` both are operators of their own. Variables of functions
live until these return, and so do those here.

Shapes: s sequence, b micro-batch; on this rank: a heads of p features, d = a p, g groups of n states, m = d + 2 g n
channels of the convolution, c chunks of 128 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from ...tape.events import Category
from ...values import replace
from .. import ops
from ..autograd import Gradients, Recorder, Shape, Tensor, size_of
from ..gradients import fresh, viewed
from ..work import Operator, exchanged
from . import adapters, local
from .mamba_scan import Sizes, chunks_backward, convolution, scan_forward, scan_work, work_of
from .shape import CoreShape

COMMUNICATION = Category.COMMUNICATION_BUFFERS

IN, OUT, NORM = "mixer.in_proj", "mixer.out_proj", "mixer.norm"

CONVOLUTION = 4
"""Tokens under the convolution."""
CONVOLUTIONS = ("conv1d_weight", "conv1d_bias")

OfRank = Callable[[str], Tensor]
"""Gives a parameter of the mixer's own, or the context-parallel rank's part of it."""


def sizes_of(shape: CoreShape) -> Sizes:
    """Context parallelism gives every rank whole sequences of its part of the heads, and a group at least."""
    spec, t, cp = shape.spec, shape.t, shape.cp
    groups = max(1, spec.mamba_groups // t // cp)
    a = spec.mamba_heads // t // cp
    kept = shape.mamba_states or shape.dtype
    p, n = spec.mamba_head_dim, spec.mamba_state_dim
    return Sizes(shape.b, shape.s * cp, a, p, groups, n, shape.multiprocessors, kept, shape.mamba_chunk)


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
    x, _ = adapters.column_linear(
        r, hidden, IN, f"{IN}.layer_norm", own.features, shape, bias=False, skip_bias=False, strided=strided
    )
    if shape.cp > 1:
        x = _to_heads(r, x, own, sizes_of(shape), shape.cp)
    y = _scanned(r, x, parameters, shape)
    out, _ = adapters.row_linear(r, y, OUT, shape, bias=False)
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
    """``_ssm_training``, sequence by sequence; ``_static_prefill`` where convolution and scan are apart."""
    at = sizes_of(shape)

    def of_rank(name: str) -> Tensor:
        return own[name] if shape.cp == 1 else _of_rank(r, own[name], at, name)

    x = _by_sequence(r, x, (at.b, at.s, at.features), "zxbcdt")
    return (_apart if shape.mamba_apart else _together)(r, x, of_rank, shape)


def _decay(r: Recorder, of_rank: OfRank) -> Tensor:
    """A, of ``A_log``."""
    decay = ops.cast(r, of_rank("A_log"), "fp32", "A_log_fp32")
    decay = ops.elementwise(r, "A_exp", (decay,), saves_output=True)
    return ops.scale(r, decay, "A")


def _together(r: Recorder, x: Tensor, of_rank: OfRank, shape: CoreShape) -> Tensor:
    at, decay = sizes_of(shape), _decay(r, of_rank)
    weights = [of_rank(name) for name in CONVOLUTIONS]
    bias = ops.cast(r, of_rank("dt_bias"), "fp32", "dt_bias_fp32")
    y = _scan(r, x, (*weights, bias, decay, of_rank("D")), at)
    del weights, bias, decay
    y = _by_sequence(r, y, (at.s, at.b, at.d), "scan_contiguous")
    if shape.cp > 1:
        y = to_tokens(r, y, shape.cp)
    return _norm(r, y, None, own_sizes(shape))


def _by_sequence(r: Recorder, x: Tensor, size: Shape, name: str) -> Tensor:
    """``rearrange(…).contiguous()``, between (s, b, …) and (b, s, …): a copy, but of one sequence."""
    return x.view(*size) if 1 in size[:2] else ops.contiguous(r, x, size, name)


# -- the scan ------------------------------------------------------------------------------------------


def _scan(r: Recorder, x: Tensor, others: Sequence[Tensor], at: Sizes) -> Tensor:
    """``mamba_split_conv1d_scan_combined`` with the gate, without norm and output projection."""
    dtype = x.dtype
    copied = at.features % 8 != 0
    convolved = _convolved(r, at, dtype, copied)
    kept = scan_forward(r, at)
    out = r.empty(at.inner, dtype, "scan")
    ungated = r.empty(at.inner, dtype, "scan_ungated")
    del kept[-1]  # the scores end with the function that multiplies them
    likes = {name: one.shape for name, one in zip(CONVOLUTIONS, others, strict=False)}

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        return _scan_backward(r, at, dtype, likes, copied)

    node = r.node((x, *others), (x, *others, ungated), backward, work=work_of(at, dtype))
    del kept, convolved, ungated
    return out.by(node)


def _convolved(r: Recorder, at: Sizes, dtype: str, copied: bool) -> Tensor:
    """``causal_conv1d_fwd_function``: (b, s, m). Rows of channels that do not begin at a multiple of 8 elements are
    copied first (``ensure_stride``)."""
    made = [r.empty((at.b, at.s, at.m), dtype, "convolution_input")] if copied else []
    out = r.empty((at.b, at.s, at.m), dtype, "convolution")
    made.clear()
    return out


def _scan_backward(
    r: Recorder, at: Sizes, dtype: str, weights: Mapping[str, Shape], copied: bool
) -> list[Tensor | None]:
    """``MambaSplitConv1dScanCombinedFn.backward``."""
    convolved = _convolved(r, at, dtype, copied)
    grad = r.empty((at.b, at.s, at.features), dtype, "grad_zxbcdt")
    channels = r.empty((at.b, at.s, at.m), dtype, "grad_convolution")
    small = chunks_backward(r, at, dtype, gated=True)
    again = ("convolution_input_again", "grad_convolution_input") if copied else ()
    made = [r.empty((at.b, at.s, at.m), dtype, name) for name in again]
    narrow = _weights_backward(r, weights, dtype)
    made.clear()
    del convolved, channels
    return [grad, *narrow, *small]


def _weights_backward(r: Recorder, weights: Mapping[str, Shape], dtype: str) -> list[Tensor]:
    """Of the convolution (``causal_conv1d_bwd_function``): gradients in fp32, then in ``dtype``."""
    wide = [r.empty(size, "fp32", f"grad_{name}_fp32") for name, size in weights.items()]
    narrow = []
    for name, size in weights.items():
        narrow.append(r.empty(size, dtype, f"grad_{name}"))
        del wide[0]
    return narrow


# -- convolution and scan apart --------------------------------------------------------------------------


def _apart(r: Recorder, x: Tensor, of_rank: OfRank, shape: CoreShape) -> Tensor:
    """What the projection gave is cut in pieces that are copied; convolution (``causal_conv1d_fn``), scan
    (``mamba_chunk_scan_combined``) and the norm with the gate each save what they read."""
    at, decay = sizes_of(shape), _decay(r, of_rank)
    groups, size = (at.b, at.s, at.g * at.n), (at.s, at.b, at.d)
    z, channels, dt = ops.split(r, x, [at.inner, (at.b, at.s, at.m), (at.b, at.s, at.a)], "zxbcdt")
    channels = ops.contiguous(r, channels, (at.b, at.m, at.s), "channels_first")
    channels = _convolution(r, channels, [of_rank(name) for name in CONVOLUTIONS], at)
    channels = ops.contiguous(r, channels, (at.b, at.s, at.m), "channels_last")
    y, first, second = ops.split(r, channels, [at.inner, groups, groups], "convolution")
    y = ops.contiguous(r, y, at.inner, "x")
    dt = ops.contiguous(r, dt, dt.shape, "dt")
    first = ops.contiguous(r, first, at.group, "B")
    second = ops.contiguous(r, second, at.group, "C")
    z = ops.contiguous(r, z, at.inner, "gate")
    skip = of_rank("D")
    bias = ops.cast(r, of_rank("dt_bias"), "fp32", "dt_bias_fp32")
    y = _scan_alone(r, (y, dt, first, second, bias, decay, skip), at)
    y = _by_sequence(r, y, size, "scan_contiguous")
    if shape.cp > 1:
        y = to_tokens(r, y, shape.cp)
    z = _by_sequence(r, z, size, "gate_contiguous")
    if shape.cp > 1:
        z = to_tokens(r, z, shape.cp)
    return _norm(r, y, z, own_sizes(shape))


def _convolution(r: Recorder, x: Tensor, weights: Sequence[Tensor], at: Sizes) -> Tensor:
    """``CausalConv1dFn``: saves its input; gradients of its weights are summed in fp32."""
    dtype, like = x.dtype, x.shape
    likes = {name: weight.shape for name, weight in zip(CONVOLUTIONS, weights, strict=True)}
    forward, back = convolution(at, dtype)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        grad = r.empty(like, dtype, "grad_convolution_input")
        return [grad, *_weights_backward(r, likes, dtype)]

    done = Operator((forward,), (back,))
    return r.output((x, *weights), (x, *weights), backward, like, dtype, "convolution", work=done)


def _scan_alone(r: Recorder, factors: Sequence[Tensor], at: Sizes) -> Tensor:
    """``MambaChunkScanCombinedFn`` without a gate: saves its factors, its result, and the sums of its steps."""
    dtype = factors[0].dtype
    kept = scan_forward(r, at)
    out = r.empty(at.inner, dtype, "scan")
    del kept[-1]  # the scores end with the function that multiplies them

    work = scan_work(at, dtype)
    node = r.node(
        factors, (*factors, out, kept[1]), lambda r, gradients: chunks_backward(r, at, dtype, gated=False), work=work
    )
    del kept
    return out.by(node)


def _norm(r: Recorder, x: Tensor, gate: Tensor | None, own: Sizes) -> Tensor:
    """``layernorm_gated.py``, ``RMSNorm`` over each group: saves input, gate and reciprocal deviations. The weight's
    gradient is summed by as many programs as fill the device (``_layer_norm_bwd``)."""
    weight = r.parameter(f"{NORM}.weight", (own.d,), x.dtype)
    dtype, like, gated = x.dtype, x.shape, gate is not None
    out = r.empty(like, dtype, NORM)
    rows, groups = prod(like[:-1]), own.g
    deviations = r.empty((rows * groups,), "fp32", f"{NORM}_rsigma")
    warps = min(max(_power_of_two(own.d // groups) // 256, 1), 8)
    programs = -(-own.multiprocessors * -(-4 // warps) // groups)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        grad = r.empty(like, dtype, f"grad_{NORM}_input")
        grad_z = r.empty(like, dtype, f"grad_{NORM}_gate") if gated else None
        parts = r.empty((programs, own.d), "fp32", f"grad_{NORM}_parts")
        total = r.empty((own.d,), "fp32", f"grad_{NORM}_weight_fp32")
        grad_w = r.empty((own.d,), dtype, f"grad_{NORM}_weight")
        del parts, total
        return [grad, grad_w] if grad_z is None else [grad, grad_w, grad_z]

    inputs = (x, weight) if gate is None else (x, weight, gate)
    return out.by(r.node(inputs, (*inputs, deviations), backward))


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
    out = r.empty(whole, x.dtype, "zxbcdt_together").by(r.node(parts, (), viewed(*parts)))
    return reordered(r, out, whole, "zxbcdt")


def to_tokens(r: Recorder, y: Tensor, cp: int) -> Tensor:
    """``post_conv_ssm`` and ``_all_to_all_hp2cp``: (s, b, d / cp) back to (s / cp, b, d), put side by side behind the
    exchange."""
    s, b, d = y.shape
    y = reordered(r, y, y.shape, "scan")
    received = exchanged_by(r, y, slices=False)
    return reordered(r, received, (s // cp, b, d * cp), "exchanged")


def _cp2hp(r: Recorder, x: Tensor, size: Shape) -> Tensor:
    """``_all_to_all_cp2hp``: parts of a slice are put one behind the other first; the gradient comes as a slice."""
    return exchanged_by(r, reordered(r, x, x.shape, "exchanged"), slices=True).view(*size)


def reordered(r: Recorder, x: Tensor, size: Shape, name: str) -> Tensor:
    """``cat`` of parts of ``x``, whose gradients are views that ``split``'s backward puts together, as in
    ``_undo_attention_load_balancing`` and ``_redo_…``."""
    dtype, name = x.dtype, f"{name}_reordered"
    return r.output((x,), (), fresh(x, f"grad_{name}"), size, dtype, name)


def exchanged_by(r: Recorder, x: Tensor, *, slices: bool) -> Tensor:
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
    node = r.node((x,), (), fresh(x, f"grad_{name}_slice"))
    if convolution:
        return r.empty(size, dtype, f"{name}_of_rank").by(node)
    return Tensor(x.storage, size, dtype, node)
