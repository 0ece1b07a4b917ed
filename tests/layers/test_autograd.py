"""The miniature autograd, by hand and by property. Stories name a hold ``+name`` and a drop ``-name``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st

from memplan.frameworks.plain import programs as plain
from memplan.layers import ops
from memplan.layers.autograd import Recorder, Tensor
from memplan.layers.module import Interface, Module, Options, Run, Tapes, build
from memplan.layers.recompute import recomputed, recomputed_reentrant
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import GRAD_OUTPUT, INPUT, Category, Drop, Hold, Seam, Tape, fold
from memplan.tape.program import fold_program

Body = Callable[[Recorder, Tensor], Tensor]
N = 256
"""Rows and features: a tensor is (256, 256) fp32, 262,144 bytes, unless it says otherwise."""


def module(body: Body, *, in_place: bool = True) -> Module:
    def recipe(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(body(r, x))

    return build("module", recipe, Interface((N, N), "fp32"), Options(accumulates_in_place=in_place))


def stories(tapes: Tapes) -> tuple[list[str], list[str]]:
    """Forward and backward."""
    names = {INPUT: "input", GRAD_OUTPUT: "grad_output"}
    names |= {event.tensor: event.name for event in tapes.forward + tapes.backward if isinstance(event, Hold)}

    def told(tape: Tape) -> list[str]:
        return [
            event.name if isinstance(event, Seam) else ("+-"[isinstance(event, Drop)] + names[event.tensor])
            for event in tape
        ]

    return told(tapes.forward), told(tapes.backward)


def linear(r: Recorder, x: Tensor, name: str, weight: str = "") -> Tensor:
    return ops.linear(r, x, r.parameter(weight or f"{name}.weight", (N, N), x.dtype), name=name)


def gelu(r: Recorder, x: Tensor) -> Tensor:
    return ops.elementwise(r, "gelu", (x,), (x,))


def feed_forward(r: Recorder, x: Tensor) -> Tensor:
    return linear(r, gelu(r, linear(r, x, "up")), "down")


# -- by hand ----------------------------------------------------------------------------------------


def test_linear_and_gelu() -> None:
    """``gelu(x W)``: W's node saves x, gelu's its input.

    Backward: gelu makes its input's gradient, then drops the gradient that came and what it saved; ``mm`` makes the
    weight's gradient, then x's. In tensors from the start of backward: 1, 0, −1, 0, 1, 0, −1; so the peak is one.
    """
    made = module(lambda r, x: gelu(r, linear(r, x, "up")))
    forward, backward = stories(made.first)
    assert forward == ["+up", "+gelu"]
    assert backward == [
        "+grad_gelu",
        "-grad_output",
        "-up",
        "+grad_up_weight",
        "+grad_up_input",
        "-grad_gelu",
        "-input",
    ]
    size = 4 * N * N
    assert (fold(made.first.forward).net, fold(made.first.backward).net) == (2 * size, -size)
    assert fold(made.first.backward).peak == size
    assert fold(made.steady.backward).net == -2 * size, "the weight's gradient is added to, and dropped"


@pytest.mark.parametrize(
    ("in_place", "backward"),
    [
        (True, ["+grad_scaled", "-grad_scaled"]),
        (False, ["+grad_scaled", "+gradient_sum", "-grad_output", "-grad_scaled"]),
    ],
)
def test_residual(in_place: bool, backward: list[str]) -> None:
    """``x + c x``: x receives the sum's gradient itself and ``c`` times it.

    In place the latter is added into the former, which becomes the input's gradient.
    """
    tapes = module(lambda r, x: ops.add(r, x, ops.scale(r, x)), in_place=in_place).first
    assert stories(tapes) == (["+scaled", "+add", "-scaled", "-input"], backward)
    assert (tapes.grad_input == GRAD_OUTPUT) is in_place


@pytest.mark.parametrize("in_place", [True, False])
def test_tied_parameter(in_place: bool) -> None:
    """``(x W) W``: both gradients arrive at one accumulator, which adds them once and keeps one tensor."""
    tapes = module(lambda r, x: linear(r, linear(r, x, "one", "w"), "two", "w"), in_place=in_place).first
    summed = ["-grad_one_weight"] if in_place else ["+gradient_sum", "-grad_two_weight", "-grad_one_weight"]
    assert stories(tapes)[1] == [
        "+grad_two_weight",
        "+grad_two_input",
        "-grad_output",
        "-one",
        "+grad_one_weight",
        "+grad_one_input",
        "-grad_two_input",
        "-input",
        *summed,
    ]
    assert fold(tapes.backward).net_by[Category.GRADIENTS] == 4 * N * N


def test_recompute_stops_early() -> None:
    """Without re-entry: forward leaves only its output; backward makes ``up`` and ``gelu`` again but not ``down``,
    whose node saves its input, the last one of all, before it makes its output."""
    tapes = module(lambda r, x: recomputed(r, lambda: feed_forward(r, x))).first
    forward, backward = stories(tapes)
    assert forward == ["+up", "+gelu", "-up", "+down", "-gelu"]
    assert backward == [
        "recompute",
        "+up",
        "+gelu",
        "+grad_down_weight",
        "+grad_down_input",
        "-gelu",
        "-grad_output",
        "+grad_gelu",
        "-up",
        "-grad_down_input",
        "+grad_up_weight",
        "+grad_up_input",
        "-grad_gelu",
        "-input",
    ]


def test_recompute_with_re_entry_runs_the_whole_region() -> None:
    """``CheckpointFunction``: ``down`` is made again, too, and the incoming gradient outlives the inner backward."""
    tapes = module(lambda r, x: recomputed_reentrant(r, feed_forward, (x,))).first
    forward, backward = stories(tapes)
    assert forward == ["+up", "+gelu", "-up", "+down", "-gelu"]
    assert backward[:4] == ["recompute", "+up", "+gelu", "+down"]
    assert backward.index("-grad_output") > backward.index("+grad_up_input")
    assert backward.index("-down") > backward.index("+grad_up_input")


# -- by property ------------------------------------------------------------------------------------

STEPS: dict[str, Body] = {
    "linear": lambda r, x: linear(r, x, "linear"),
    "biased": lambda r, x: ops.linear(
        r, x, r.parameter("biased.weight", (N, N), x.dtype), r.parameter("biased.bias", (N,), x.dtype)
    ),
    "tied": lambda r, x: linear(r, x, "tied"),
    "gelu": gelu,
    "tanh": ops.tanh,
    "scale": ops.scale,
    "dropout": lambda r, x: ops.dropout(r, x, 0.1),
    "residual": lambda r, x: ops.add(r, x, gelu(r, x)),
    "square": lambda r, x: ops.multiply(r, x, x),
    "power": ops.power,
    "cast": lambda r, x: ops.cast(r, ops.cast(r, x, "bf16", "down"), "fp32", "up"),
    "norm": lambda r, x: ops.layer_norm(
        r, x, r.parameter("norm.weight", (N,), x.dtype), r.parameter("norm.bias", (N,), x.dtype), "norm"
    ),
}

recipes = st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6)


def chain(names: list[str]) -> Body:
    def body(r: Recorder, x: Tensor) -> Tensor:
        for at, name in enumerate(names):
            r.prefix = "" if name == "tied" else f"{at}."
            x = STEPS[name](r, x)
        return x

    return body


def left_behind(tape: Tape) -> dict[int, Hold]:
    """What ``tape`` leaves held; every drop is of something that is held, or came from outside, and only once."""
    held: dict[int, Hold] = {}
    ended = set()
    for event in tape:
        if isinstance(event, Hold):
            assert event.tensor not in held
            held[event.tensor] = event
        elif isinstance(event, Drop):
            assert event.tensor not in ended
            ended.add(event.tensor)
            hold = held.pop(event.tensor, None)
            assert hold is not None or event.tensor in (INPUT, GRAD_OUTPUT)
            assert hold is None or (hold.bytes, hold.category) == (event.bytes, event.category)
    return held


@settings(deadline=None, derandomize=True)
@given(recipes, st.sampled_from(["none", "recomputed", "reentrant"]), st.booleans())
def test_every_hold_is_dropped_once_or_handed_over(names: list[str], recompute: str, in_place: bool) -> None:
    inner = chain(names)

    def body(r: Recorder, x: Tensor) -> Tensor:
        if recompute == "recomputed":
            return recomputed(r, lambda: inner(r, x))
        if recompute == "reentrant":
            return recomputed_reentrant(r, inner, (x,))
        return inner(r, x)

    made = module(body, in_place=in_place)
    for tapes in (made.first, made.steady):
        held = left_behind(tapes.forward + tapes.backward)
        handed_over = {tapes.output, tapes.grad_input} - {GRAD_OUTPUT}
        assert handed_over <= held.keys()
        gradients = [hold for id, hold in held.items() if id not in handed_over]
        assert all(hold.category is Category.GRADIENTS for hold in gradients)
        expected = made.parameters if tapes is made.first else ()
        assert sorted(hold.bytes for hold in gradients) == sorted(p.bytes("fp32") for p in expected)
    assert len(left_behind(made.evaluation)) == int(set(names) != {"dropout"}), "or the input itself"


BASES = {"gpt2": "gpt2", "bert": "bert-large", "llama": "llama-3-8b", "mistral": "mistral-7b", "qwen3": "qwen3-8b"}


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    family=st.sampled_from(sorted(BASES)),
    heads=st.sampled_from([1, 2, 3, 4, 6]),
    groups=st.integers(1, 3),
    width=st.sampled_from([8, 16, 40, 64]),
    layers=st.integers(1, 5),
    b=st.integers(1, 3),
    s=st.integers(1, 70),
    dtype_and_attention=st.sampled_from([("fp32", "eager"), ("fp16", "eager"), ("bf16", "eager"), ("bf16", "flash")]),
    recompute=st.sampled_from(["none", "full"]),
    framework=st.sampled_from(["single", "ddp", "device-map"]),
    gpus=st.integers(1, 3),
    in_place=st.booleans(),
)
def test_steady_iteration_nets_zero(
    family: str,
    heads: int,
    groups: int,
    width: int,
    layers: int,
    b: int,
    s: int,
    dtype_and_attention: tuple[str, str],
    recompute: str,
    framework: str,
    gpus: int,
    in_place: bool,
) -> None:
    """``fold_program`` asserts it; three micro-batches are a first, a steady and a last one."""
    dtype, attention = dtype_and_attention
    grouped = family in ("llama", "mistral", "qwen3")
    count = {"single": 1, "ddp": gpus, "device-map": min(gpus, layers)}[framework]
    plan = {
        "model": BASES[family],
        "layers": layers,
        "hidden": heads * groups * width,
        "heads": heads * groups,
        "kv-heads": heads if grouped else heads * groups,
        "head-dim": width,
        "ffn": 3 * width,
        "vocab": 301,
        "framework": framework,
        "gpus": count,
        "mbs": b,
        "gbs": 3 * b * (count if framework == "ddp" else 1),
        "seq": s,
        "dtype": dtype,
        "attention": attention,
        "recompute": recompute,
    }
    resolved = resolve(read_plan(None, {flag: str(value) for flag, value in plan.items()}).plan)
    for program in plain.programs(resolved, Options(accumulates_in_place=in_place)):
        folded = fold_program(program)
        assert folded.peak >= folded.after_forward >= folded.static
