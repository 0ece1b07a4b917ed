"""Kernels in the place of Python operators, by hand and beside their own code on fake tensors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from memplan.layers import kernels, ops
from memplan.layers.autograd import Recorder, Tensor
from memplan.layers.kernels import LIGER_ROPE, UNSLOTH_ROPE, RmsNorm
from memplan.tape.events import fold
from tests.oracle.optimizer_step import DTYPES
from tests.oracle.triton_functions import PROCESSORS, Excursions, loaded, traced

B, S, H, A, KV, D, V = 2, 64, 128, 4, 2, 32, 1000
Recipe = Callable[..., list[Tensor]]
Like = tuple[tuple[int, ...], str]

FMS, LIGER = "fms_acceleration_foak", "liger_kernel"


def needs(package: str) -> Any:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


def recorded(recipe: Recipe, likes: Sequence[Like], autocast: str | None = None) -> Excursions:
    """Net and peak of both passes, of tensors, outputs and gradients that the caller keeps."""
    r = Recorder(accumulates_in_place=False, autocast=autocast)
    inputs, leaves = zip(*(r.leaf(r.outside(shape, dtype)) for shape, dtype in likes), strict=True)
    outputs = recipe(r, *inputs)
    forward = r.tape()
    middle = len(r.events)
    given = [r.outside(one.shape, one.dtype) for one in outputs]
    root = Tensor(inputs[0].storage, (), "fp32", r.node(outputs, (), lambda r, gradients: given))
    r.backward([root], [r.outside((), "fp32")])
    backward = r.tape(middle)
    assert leaves[0].gradient is not None
    r.close()
    both = (fold(tape) for tape in (forward, backward))
    return Excursions(*((one.net, one.peak) for one in both))


def norm(one: RmsNorm) -> Recipe:
    return lambda r, x, weight: [one(r, x, weight, "norm")]


X: Like = ((B, S, H), "bf16")
HEADS: list[Like] = [((B, A, S, D), "bf16"), ((B, KV, S, D), "bf16")]
LOGITS: Like = ((B * S, V), "fp32")
ROW = B * S * H * 2
"""Bytes of hidden states."""


def test_a_norm_leaves_its_output_and_deviations_and_writes_its_gradient_in_place() -> None:
    """(b, s, h) in 16 bits and b s numbers of 4 bytes."""
    forward, backward = recorded(lambda r, x: [RmsNorm()(r, x, r.outside((H,), "bf16"), "norm")], [X])
    assert forward == (ROW + 4 * B * S, ROW + 4 * B * S)
    assert backward == (-4 * B * S, 0)


@pytest.mark.parametrize(("sums_frozen", "peak"), [(True, 108 * H * 4 + 512 + 512), (False, 0)])
def test_every_processor_sums_a_gradient_of_ligers_weight(sums_frozen: bool, peak: int) -> None:
    """108 x h fp32, and their sum in fp32 and in 16 bits; of a frozen weight before 0.8.5 alone."""
    norm = RmsNorm(PROCESSORS, sums_frozen)
    _, backward = recorded(lambda r, x: [norm(r, x, r.outside((H,), "bf16"), "norm")], [X])
    assert backward == (-4 * B * S, peak)


@pytest.mark.parametrize("rope", [UNSLOTH_ROPE, LIGER_ROPE])
def test_queries_and_keys_turn_in_place(rope: kernels.Rope) -> None:
    def turn(copied: tuple[bool, bool]) -> Recipe:
        return lambda r, q, k, *tables: list(rope(r, q, k, (), copied))

    assert recorded(turn((False, False)), HEADS) == ((0, 0), (0, 0))
    q, k = B * A * S * D * 2, B * KV * S * D * 2
    assert recorded(turn((True, True)), HEADS).backward == (q + k, q + k)


def test_a_gate_is_written_over() -> None:
    forward, backward = recorded(lambda r, a, b: [kernels.liger_swiglu(r, a, b)], [X, X])
    assert (forward, backward) == ((ROW, ROW), (0, 0))


@pytest.mark.parametrize("entropy", kernels.CROSS_ENTROPIES.values())
def test_the_gradient_of_logits_is_written_over_them(entropy: kernels.CrossEntropy) -> None:
    def loss(r: Recorder, logits: Tensor) -> list[Tensor]:
        return [entropy(r, logits, r.outside((B * S,), "int64"))]

    forward, backward = recorded(loss, [LOGITS])
    assert forward[1] <= 4 * 4 * B * S + 1024
    assert backward[1] == 0


# -- beside their own code --------------------------------------------------------------------------


def compare(recipe: Recipe, function: Callable[..., Any], likes: Sequence[Like], *, scalars: int = 0) -> None:
    """Peaks and what is left, up to ``scalars`` numbers in blocks of 512 bytes."""
    mine = recorded(recipe, likes)
    real = traced(function, [(shape, DTYPES[dtype]) for shape, dtype in likes])
    for one, other in zip((*mine.forward, *mine.backward), (*real.forward, *real.backward), strict=True):
        assert abs(one - other) <= 512 * scalars, (mine, real)


def rotary(rope: kernels.Rope) -> Recipe:
    return lambda r, q, k, *tables: list(rope(r, ops.scale(r, q), ops.scale(r, k), (), (False, False)))


@needs(FMS)
def test_unsloths_norm() -> None:
    function = loaded(FMS, "kernels.unsloth.rms_layernorm").Fast_RMS_Layernorm
    weight = torch.ones(H, dtype=torch.bfloat16)
    compare(
        lambda r, x: [RmsNorm()(r, x, r.outside((H,), "bf16"), "norm")],
        lambda x: function.apply(x, weight, 1e-5),
        [X],
    )


@needs(FMS)
def test_unsloths_rope() -> None:
    rope = loaded(FMS, "kernels.unsloth.rope_embedding").fast_rope_embedding

    def real(q: torch.Tensor, k: torch.Tensor, *tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned: tuple[torch.Tensor, torch.Tensor] = rope((q * 2.0).transpose(1, 2), (k * 2.0).transpose(1, 2), *tables)
        return turned

    likes: list[Like] = [((B, S, A, D), "bf16"), ((B, S, KV, D), "bf16"), *2 * [((1, S, D), "bf16")]]
    compare(rotary(UNSLOTH_ROPE), real, likes)


@needs(FMS)
def test_unsloths_cross_entropy() -> None:
    loss = loaded(FMS, "kernels.unsloth.cross_entropy_loss").FastCrossEntropyLoss()
    labels = torch.zeros(B * S, dtype=torch.int64)
    compare(
        lambda r, x: [kernels.unsloth_cross_entropy(r, ops.scale(r, x), r.outside((B * S,), "int64"))],
        lambda x: loss(x * 2.0, labels),
        [LOGITS],
        scalars=3,
    )


@needs(LIGER)
def test_ligers_norm() -> None:
    function = loaded(LIGER, "ops.rms_norm").LigerRMSNormFunction
    compare(
        norm(RmsNorm(PROCESSORS)), lambda x, weight: function.apply(x, weight, 1e-5), [X, ((H,), "bf16")], scalars=1
    )


@needs(LIGER)
def test_ligers_norm_of_gemma_does_not_write_over_the_gradient() -> None:
    """``LigerRMSNormForGemma2``: 1 is added to the weight, all is in fp32, and not in place."""
    function = loaded(LIGER, "ops.rms_norm").LigerRMSNormFunction
    compare(
        lambda r, x, weight: [RmsNorm(PROCESSORS)(r, x, weight, "norm", in_place=False)],
        lambda x, weight: function.apply(x, weight, 1e-6, 1.0, "gemma", False),
        [X, ((H,), "bf16")],
        scalars=1,
    )


@needs(LIGER)
def test_ligers_geglu_takes_what_its_swiglu_takes() -> None:
    function = loaded(LIGER, "ops.geglu").LigerGELUMulFunction
    compare(
        lambda r, a, b: [kernels.liger_swiglu(r, ops.scale(r, a), ops.scale(r, b))],
        lambda a, b: function.apply(a * 2.0, b * 2.0),
        [X, X],
    )


@needs(LIGER)
def test_ligers_rope() -> None:
    function = loaded(LIGER, "ops.rope").LigerRopeFunction

    def real(q: torch.Tensor, k: torch.Tensor, *tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned: tuple[torch.Tensor, torch.Tensor] = function.apply(
            (q * 2.0).transpose(1, 2), (k * 2.0).transpose(1, 2), *tables
        )
        return turned

    likes: list[Like] = [((B, S, A, D), "bf16"), ((B, S, KV, D), "bf16"), *2 * [((1, S, D), "bf16")]]
    compare(rotary(LIGER_ROPE), real, likes)


@needs(LIGER)
def test_ligers_swiglu() -> None:
    function = loaded(LIGER, "ops.swiglu").LigerSiLUMulFunction
    compare(
        lambda r, a, b: [kernels.liger_swiglu(r, ops.scale(r, a), ops.scale(r, b))],
        lambda a, b: function.apply(a * 2.0, b * 2.0),
        [X, X],
    )


@needs(LIGER)
@pytest.mark.parametrize(
    "model",
    ["gemma3_text", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "gemma3_text-one-key"))],
)
def test_a_step_of_gemma_that_liger_patches(model: str) -> None:
    """``apply_liger_kernel_to_gemma2`` and ``…_to_gemma3_text``: every event, in ``tests/oracle/liger_models.py``."""
    subprocess.run([sys.executable, "-m", "tests.oracle.liger_models", model], check=True, timeout=300)
