"""torchtitan's Llama layers as ``torch.compile`` runs them: what Inductor's own code makes and lets go of, learnt by
``trace.compiled`` from torch 2.13.0 and shipped as ``compiled.json``.

Each direction is a list of tensors that begin (number, dtype, dimensions as products of named sizes, the kernel that
first has it) and that end (number). Tensor 0 is the output's gradient, 1 the layer's input, 2 the table of rotary
positions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from pathlib import Path

from ..plan.spec import ModelSpec
from ..values import NamedTuple, dataclass
from .autograd import ITEMSIZE, Gradients, Recorder, Shape, Tensor, incoming
from .float8 import Float8
from .huggingface import LayerShape
from .work import Kernel, Operator, Product, Stream, fused


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a layer and its micro-batch."""

    b: int
    s: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim


SUMMED = 128
"""Tokens of a part of a sum over them, at most (``choices.py``, ``reduction_split_factor``)."""
SPLITS_OF = 132 * 8
"""Programs that a mixed reduction is split into on an H100: 8 of each multiprocessor (``simd.py``,
``_codegen_mix_order_reduction``)."""


PROCESSORS, THREADS = 132, 2048
"""Multiprocessors of an H100, and threads of each."""


@lru_cache(maxsize=256)
def parts_of(rows: int, columns: int) -> int:
    """Parts in which Inductor reduces ``rows`` of ``columns`` each, if it does (``torch/_inductor/ir.py``,
    ``Reduction.num_splits``; ``choices.py``, ``reduction_split_factor``); 1: all at once."""
    if rows <= 32 or columns >= PROCESSORS * 64:
        return 1
    elements, device, most = rows * columns, 32 * PROCESSORS * THREADS, 512
    if elements < device:
        part = 32
    elif elements < most * PROCESSORS * THREADS:
        blocks = -(-(PROCESSORS * THREADS // 256) // -(-columns // 128))
        wanted = -(-rows // (4 * blocks))
        even = _nearest_divisor(rows, wanted)
        part = max(even, 32) if abs(wanted - even) < 20 else wanted
    else:
        even = _nearest_divisor(rows, most)
        part = even if abs(even - most) < 50 else most
    return -(-rows // (4 * part))


def _nearest_divisor(number: int, wanted: int) -> int:
    """The smaller one of two that are as near."""
    divisors = (at for at in range(1, number + 1) if number % at == 0)
    return min(divisors, key=lambda one: abs(one - wanted))


def parts(sizes: Sizes) -> dict[str, int]:
    """Names of numbers of parts in structures in float8, whose maxima are of rows: ``t/h``, of t rows of h columns."""
    t, h, k, f = sizes.b * sizes.s, sizes.hidden, sizes.kv_heads * sizes.head_dim, sizes.ffn
    of = {"t": t, "h": h, "k": k, "f": f}
    pairs = ("t/h", "t/k", "t/f", "h/h", "k/h", "f/h", "h/f")
    return {pair: parts_of(*(of[one] for one in pair.split("/"))) for pair in pairs}


def sizes_of(sizes: Sizes) -> dict[str, int]:
    """Names of ``compiled.json``: b, s, t = b s tokens, h hidden, a heads, g key heads, r = a / g, d features of a
    head, p = d / 2, k = g d, f of the feed-forward network, c parts of a sum over tokens (``_pick_split_size``)."""
    tokens, part = sizes.b * sizes.s, SUMMED
    if regime_of(sizes) == "mixed":
        part = min(max(1 << max(tokens // SPLITS_OF, 1).bit_length() - 1, 16), SUMMED)
    return {
        "2": 2,
        "b": sizes.b,
        "s": sizes.s,
        "t": tokens,
        "h": sizes.hidden,
        "a": sizes.heads,
        "g": sizes.kv_heads,
        "r": sizes.heads // sizes.kv_heads,
        "d": sizes.head_dim,
        "p": sizes.head_dim // 2,
        "k": sizes.kv_heads * sizes.head_dim,
        "f": sizes.ffn,
        "c": -(-tokens // part),
    }


def regime_of(sizes: Sizes) -> str:
    """``mixed``: gradients of a norm's input and weight are one kernel (``torch/_inductor/scheduler.py``,
    ``MixOrderReduction.can_fuse``); else ``plain``, and ``few`` where fewer tokens than features let Inductor order
    gradients of weights otherwise (``reorder_for_peak_memory``)."""
    tokens, hidden = sizes.b * sizes.s, sizes.hidden
    if tokens * hidden >= 5 * 2**20 and tokens >= max(2 * hidden, 4096) and hidden <= 16384:
        return "mixed"
    return "plain" if tokens >= hidden else "few"


class Begins(NamedTuple):
    """A tensor that a kernel is given to fill."""

    number: int
    dtype: str
    sizes: tuple[str, ...]
    name: str


@dataclass(frozen=True, eq=False, slots=True)
class Structure:
    """A layer in one regime. A tensor that ends stands by its number."""

    forward: tuple[Begins | int, ...]
    output: int
    saved: tuple[int, ...]
    backward: tuple[Begins | int, ...]
    gradients: tuple[int, ...]
    """Of the input and of each parameter."""
    work: tuple[tuple[str, ...], tuple[str, ...]]
    """Kernels of both directions: products of (m, n, k) and bytes of an operand's element, fused attention, and how
    many others there are, with bytes that they move of each size."""


ALIGNED = 64
"""Features that rows of every matrix are a multiple of: Inductor pads others (``config.padding_alignment_bytes``)."""

FLOAT8_REGIMES = ("mixed", "plain")
"""In which layers in float8 were learnt: with few tokens, ``plain`` is an upper bound."""
SKIPS = frozenset({"key", "value"})
"""Linear layers that may stay in bf16, all of them together."""

TORCH = "2.13.0"
"""The release whose code was followed."""


FILE = Path(__file__).with_suffix(".json")


@lru_cache(maxsize=1)
def structures() -> dict[str, Structure]:
    """By what is recomputed (``none``, ``op``, ``full``) and the regime."""
    written = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        name: Structure(
            tuple(map(_event, one["forward"])),
            one["output"],
            tuple(one["saved"]),
            tuple(map(_event, one["backward"])),
            tuple(one["gradients"]),
            (tuple(one["work"][0]), tuple(one["work"][1])),
        )
        for name, one in written.items()
    }


def _event(text: str) -> Begins | int:
    number, *rest = text.split()
    return Begins(int(number), rest[0], tuple(rest[1].split("*")), rest[2]) if rest else int(number)


def name_of(mode: str, sizes: Sizes, low: Float8 | None) -> str:
    """Of a layer's structure, among ``structures``."""
    regime = regime_of(sizes)
    if low is None:
        return f"{mode} {regime}"
    words = [mode, regime if regime in FLOAT8_REGIMES else FLOAT8_REGIMES[-1], low.recipe]
    words += ["kv"] if low.skips else []
    words += ["gathered"] if low.gathered else []
    return " ".join(words + (width_of(sizes) if low.recipe == "rowwise" else []))


def width_of(sizes: Sizes) -> list[str]:
    """Maxima of enough columns are not made in parts (``parts_of``), which changes what is fused: those of hidden and
    of feed-forward features."""
    widths = [parts_of(PROCESSORS, size) == 1 for size in (sizes.hidden, sizes.ffn)]
    return {0: ["narrow"], 1: [], 2: ["widest"]}[sum(widths)]


def parameters_of(spec: ModelSpec) -> tuple[tuple[str, Shape], ...]:
    """In the order of their use."""
    h, k, f = spec.hidden, spec.kv_heads * spec.head_dim, spec.ffn
    return (
        ("attention_norm.weight", (h,)),
        ("query.weight", (h, h)),
        ("key.weight", (k, h)),
        ("value.weight", (k, h)),
        ("attention_output.weight", (h, h)),
        ("mlp_norm.weight", (h,)),
        ("gate.weight", (f, h)),
        ("up.weight", (f, h)),
        ("down.weight", (h, f)),
    )


def kernels(lines: Sequence[str], shape: LayerShape, *, backward: bool) -> Sequence[Kernel]:
    """Of one direction; the last attention of ``backward`` is attention's."""
    sizes, found = sizes_in(shape), list[Kernel]()
    known = {**parts(sizes), **sizes_of(sizes), "1": 1}

    def value(name: str) -> int:
        return prod(known.get(one) or int(one) for one in name.split("*"))

    last = max((at for at, line in enumerate(lines) if line == "attention"), default=-1)
    heads = (sizes.b, sizes.s, sizes.heads, sizes.head_dim)
    of_attention = fused(heads, sizes.heads, sizes.s, shape.dtype, causal=True)
    for at, line in enumerate(lines):
        kind, *given = line.split()
        if kind == "attention":
            found.append(of_attention[backward and at == last])
        elif kind == "product":
            m, n, k = map(value, given[:3])
            found.append(Product(m, n, k, 1, int(given[3]), ITEMSIZE[shape.dtype]))
        else:
            moved = (one.split(":") for one in given[1:])
            found.append(Stream(sum(value(size) * int(count) for size, count in moved), int(given[0])))
    return found


def sizes_in(shape: LayerShape) -> Sizes:
    spec = shape.spec
    return Sizes(shape.b, shape.s, spec.heads, spec.kv_heads, spec.head_dim, spec.ffn)


def block(r: Recorder, x: Tensor, shape: LayerShape, mode: str, low: Float8 | None = None) -> Tensor:
    """A compiled ``TransformerBlock``, recomputed as ``mode`` says, of (b, s, h); ``low``: its linear layers are
    torchao's."""
    spec, sizes = shape.spec, sizes_in(shape)
    known = {**sizes_of(sizes), **(parts(sizes) if low is not None else {}), "1": 1}
    learnt = structures()[name_of(mode, sizes, low)]
    dtypes = {name: "fp8" if low is not None and low.gathers(name) else None for name, _ in parameters_of(spec)}
    parameters = [r.parameter(name, size, x.dtype, gathered=dtypes[name]) for name, size in parameters_of(spec)]
    if r.counts:
        return _counted(r, x, parameters, shape, learnt)
    live: dict[int, Tensor] = {1: x}

    def run(r: Recorder, events: Sequence[Begins | int]) -> None:
        for event in events:
            if isinstance(event, int):
                live.pop(event, None)
            elif all(known[name] > 1 for name in event.sizes if "/" in name):  # else at once, not in parts
                size = tuple([known.get(name) or int(name) for name in event.sizes])
                live[event.number] = r.empty(size, event.dtype, event.name)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        """What was saved is let go of one by one (``maybe_clear_saved_tensors``)."""
        live[0] = incoming(gradients)
        gradients.clear()
        run(r, learnt.backward)
        returned = [live[number] for number in learnt.gradients]
        live.clear()
        return returned

    run(r, learnt.forward)
    output = live.pop(learnt.output)
    node = r.node((x, *parameters), (), backward)
    for number in live.keys() - set(learnt.saved):
        del live[number]
    if node is None:
        live.clear()
    return output.by(node)


def _counted(r: Recorder, x: Tensor, parameters: Sequence[Tensor], shape: LayerShape, learnt: Structure) -> Tensor:
    """What its kernels do."""
    likes = [(one.shape, one.dtype) for one in (x, *parameters)]
    forward, backward = (kernels(lines, shape, backward=at > 0) for at, lines in enumerate(learnt.work))
    node = r.node(
        (x, *parameters), (), lambda r, _: [r.outside(*like) for like in likes], work=Operator(forward, backward)
    )
    return r.outside(*likes[0]).by(node)
