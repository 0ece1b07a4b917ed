"""What is put in the place of CUDA's operators: each against PyTorch's own dispatch for CUDA tensors as far as a build
without CUDA has it (forward, without gradients), its allocator, or a count by hand from ``derivatives.yaml``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody
from torch._subclasses.fake_tensor import FakeTensorMode

from memplan.tape.events import Hold, rounded
from memplan.trace.recording import FORWARD, Place, Recording
from memplan.trace.storages import Follow
from memplan.trace.substitutions import SUBSTITUTIONS, NotOnCudaError, cuda_behaviour

from ..oracle.allocator import held_by_allocator

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@contextmanager
def followed(device: str = "cpu") -> Iterator[Recording]:
    """With CPU tensors in the place of CUDA's, or fake CUDA tensors."""
    recording = Recording()
    follow = Follow(recording, lambda: Place(0, FORWARD, ""), device=device)
    with FakeTensorMode(allow_non_fake_inputs=True), cuda_behaviour() if device == "cpu" else nullcontext(), follow:
        follow.calibrate()
        yield recording
    follow.close()


# -- against PyTorch's dispatch for CUDA -----------------------------------------------------------------


def made(device: str, *shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def on(device: str, code: Callable[[torch.Tensor], Any], dtype: torch.dtype) -> Any:
    return code(made(device, 2, 6, 64, dtype=dtype))


def layer_norm(device: str, dtype: torch.dtype) -> Any:
    weight = made(device, 64, dtype=dtype)
    return on(device, lambda x: F.layer_norm(x, (64,), weight, weight), dtype)


def group_norm(device: str) -> Any:
    return on(device, lambda x: F.group_norm(x, 2, made(device, 6, dtype=FP16), made(device, 6, dtype=FP16)), FP16)


def plain_attention(device: str, *, causal: bool, groups: int) -> Any:
    """With rows of 5 features, which no kernel but plain operators takes."""
    x, y = made(device, 2, 4, 8, 5), made(device, 2, 4 // groups, 8, 5)
    mask = None if causal else torch.ones(2, 1, 8, 8, dtype=torch.bool, device=device)
    return F.scaled_dot_product_attention(x, y, y, mask, is_causal=causal, enable_gqa=groups > 1)


def loss(device: str) -> Any:
    labels = torch.zeros(12, dtype=torch.int64, device=device)
    return F.cross_entropy(made(device, 12, 64, dtype=BF16), labels)


def embedded(device: str) -> Any:
    return F.embedding(torch.zeros(2, 6, dtype=torch.int64, device=device), made(device, 50, 64))


LIKE_CUDA: dict[str, Callable[[str], Any]] = {
    "dropout": partial(on, code=lambda x: F.dropout(x, 0.1), dtype=BF16),
    "dropout of everything": partial(on, code=lambda x: F.dropout(x, 1.0), dtype=FP32),
    "dropout in place": partial(on, code=lambda x: F.dropout(x, 0.1, inplace=True), dtype=FP32),
    "softmax fp16 to fp32": partial(on, code=lambda x: F.softmax(x, -1, dtype=FP32), dtype=FP16),
    "softmax bf16 to fp32": partial(on, code=lambda x: F.softmax(x, -1, dtype=FP32), dtype=BF16),
    "method softmax": partial(on, code=lambda x: x.softmax(-1, FP32), dtype=FP16),
    "softmax without a dtype": partial(on, code=lambda x: torch.softmax(x, dim=-1), dtype=FP16),
    "log_softmax fp16 to fp32": partial(on, code=lambda x: torch.log_softmax(x, 1, dtype=FP32), dtype=FP16),
    "logsigmoid": partial(on, code=F.logsigmoid, dtype=FP32),
    "layer norm, bf16": partial(layer_norm, dtype=BF16),
    "layer norm, fp64": partial(layer_norm, dtype=torch.float64),
    "group norm, fp16": group_norm,
    "loss": loss,
    "plain attention, masked": partial(plain_attention, causal=False, groups=1),
    "plain attention, causal, grouped": partial(plain_attention, causal=True, groups=2),
    "gelu and silu": partial(on, code=lambda x: F.silu(F.gelu(x)), dtype=BF16),
    "embedding": embedded,
    "convolution": lambda device: F.conv1d(made(device, 2, 6, 64), made(device, 6, 6, 3)),
}


@pytest.mark.parametrize("case", LIKE_CUDA)
def test_like_cuda_forward(case: str) -> None:
    """The same storages as on fake CUDA tensors, in all and at the end. (With gradients, and where a kernel of CUDA's
    is chosen, a build without CUDA cannot.) A mask is added in place but under a mode, which sees a sum apart."""
    made, left = [], []
    for device in ("cpu", "cuda"):
        with followed(device) as recording, torch.no_grad():
            kept = LIKE_CUDA[case](device)
            made.append(Counter(event.bytes for event in recording.events if isinstance(event, Hold)))
            left.append(recording.live)
            del kept
    assert left[0] == left[1]
    apart = Counter([rounded(2 * 4 * 8 * 8 * 4)] if case.startswith("plain attention") else [])
    assert made[0] + apart == made[1]


# -- by hand ---------------------------------------------------------------------------------------------


def kept(code: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[int]:
    """Bytes of storages that forward of ``code`` leaves behind, besides ``inputs``."""
    with followed() as recording:
        fake = [torch.empty_like(one).requires_grad_(one.is_floating_point()) for one in inputs]
        before = len(recording.events)
        out = code(*fake)
        after = recording.events[before:]
        ended = {event.tensor for event in after if not isinstance(event, Hold)}
        sizes = [event.bytes for event in after if isinstance(event, Hold) and event.tensor not in ended]
        del out
    return sorted(sizes)


def heads(a: int, s: int, d: int, dtype: torch.dtype, b: int = 2) -> torch.Tensor:
    return (
        torch.empty(b, a, s, d, dtype=dtype, device="meta").to("cpu") if False else torch.zeros(b, a, s, d, dtype=dtype)
    )


RNG = [512, 512]
"""A seed and an offset."""


def attended(*inputs: torch.Tensor, **how: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(*inputs, **how)


def test_flash_attention() -> None:
    """Output, log-sum-exp (b, a, s) fp32, random state; with fewer key heads as they are."""
    q, k = heads(4, 50, 64, BF16), heads(2, 50, 64, BF16)
    expected = sorted([rounded(2 * 4 * 50 * 64 * 2), rounded(2 * 4 * 50 * 4), *RNG])
    assert kept(partial(attended, is_causal=True), q, q, q) == expected
    assert kept(partial(attended, is_causal=True, enable_gqa=True), q, k, k) == expected


def test_flash_attention_pads_heads() -> None:
    """Heads of 60 features are copied to 64: query, key and value as they are saved, and the output that is cut."""
    q = heads(4, 50, 60, BF16)
    expected = sorted([rounded(2 * 4 * 50 * 64 * 2)] * 4 + [rounded(2 * 4 * 50 * 4), *RNG])
    assert kept(partial(attended, is_causal=True), q, q.clone(), q.clone()) == expected


@pytest.mark.parametrize(
    ("query", "keys", "how"),
    [
        (heads(4, 50, 64, FP32), heads(4, 50, 64, FP32), {"is_causal": True}),
        (heads(4, 50, 264, BF16), heads(4, 50, 264, BF16), {}),
        (heads(4, 50, 64, BF16), heads(4, 20, 64, BF16), {"is_causal": True}),
    ],
    ids=["fp32", "wide heads", "not square"],
)
def test_memory_efficient_attention(query: torch.Tensor, keys: torch.Tensor, how: dict[str, Any]) -> None:
    """Output, log-sum-exp whose rows are padded to 64 (a multiple of 32), random state."""
    expected = sorted([rounded(query.numel() * query.element_size()), rounded(2 * 4 * 64 * 4), *RNG])
    assert kept(partial(attended, **how), query, keys, keys) == expected


@pytest.mark.parametrize(("s", "copies"), [(64, False), (50, True)])
def test_memory_efficient_attention_with_a_mask(s: int, copies: bool) -> None:
    """A mask of booleans becomes one of scores, (b, 1, s, s); of every head and padded to 16 where s is no multiple."""
    q = heads(4, s, 64, BF16)
    mask = torch.ones(2, 1, s, s, dtype=torch.bool)
    scores = rounded(2 * 4 * s * 64 * 2) if copies else rounded(2 * s * s * 2)
    expected = sorted([rounded(2 * 4 * s * 64 * 2), rounded(2 * 4 * 64 * 4), scores, *RNG])
    assert kept(lambda q, mask: attended(q, q, q, mask), q, mask) == expected


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_rms_norm(dtype: torch.dtype) -> None:
    """Output and the reciprocal deviation of every row in fp32; input and weight are saved as they are."""
    x, weight = torch.zeros(2, 300, 64, dtype=dtype), torch.zeros(64, dtype=dtype)
    expected = sorted([rounded(x.numel() * x.element_size()), rounded(2 * 300 * 4)])
    assert kept(lambda x, weight: F.rms_norm(x, (64,), weight, 1e-6), x, weight) == expected
    assert (
        kept(lambda x, weight: torch.nn.RMSNorm(64)(x) if False else torch.rms_norm(x, [64], weight), x, weight)
        == expected
    )


def test_rms_norm_backward() -> None:
    """A gradient of the input and one of the weight."""
    with followed() as recording:
        x, module = torch.zeros(2, 300, 64, requires_grad=True), torch.nn.RMSNorm(64)
        out = module(x).sum()
        before = recording.live
        out.backward()
        assert recording.live == before - rounded(2 * 300 * 4) + rounded(2 * 300 * 64 * 4) + rounded(64 * 4)


def test_batch_norm() -> None:
    """Statistics of every channel in fp32 (300 x 4 B), twice; and the output, of 16 bits."""
    x, running = torch.zeros(2, 300, 8, dtype=BF16), torch.zeros(300)
    found = kept(lambda x: F.batch_norm(x, running.clone(), running.clone(), training=True), x)
    assert found.count(rounded(300 * 4)) == 2 + 2, "and the running ones, which this makes"


def test_half_softmax_and_its_gradient() -> None:
    """Scores of 16 bits and probabilities of 32; backward has no gradient of the scores in fp32."""
    with followed() as recording:
        x = torch.zeros(100, 128, dtype=FP16, requires_grad=True)
        out = F.softmax(x, -1, dtype=FP32)
        gradient = torch.ones_like(out)
        before = len(recording.events)
        out.backward(gradient)
        sizes = [event.bytes for event in recording.events[before:] if isinstance(event, Hold)]
    assert sizes == [100 * 128 * 2]


def linear_of_strided() -> Iterator[str]:
    """A projection of a transposed tensor: the bias is added where the product is."""
    x, weight, bias = torch.ones(4, 32, 64, requires_grad=True), torch.ones(128, 64), torch.ones(128)
    out = F.linear(x.transpose(0, 1), weight, bias)
    yield "made"
    del out
    yield "gone"


def test_bias_is_added_in_place() -> None:
    """As PyTorch's allocator has it without a mode."""
    live: list[tuple[int, int]] = []
    with followed() as recording:
        most = held = seen = 0
        for _ in linear_of_strided():
            most = held
            for event in recording.events[seen:]:
                held += event.bytes if isinstance(event, Hold) else -event.bytes
                most = max(most, held)
            seen = len(recording.events)
            live.append((held, most))
    held_by_allocator(linear_of_strided)
    assert live == [(now, most) for _, now, most in held_by_allocator(linear_of_strided)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grouped_products_as_real_ones(dtype: torch.dtype) -> None:
    """Of rows by groups, and of the gradients of weights."""
    offsets = torch.tensor([16, 32], dtype=torch.int32)
    for x, y in (((32, 16), (2, 16, 8)), ((16, 32), (32, 8))):
        real = torch._grouped_mm(torch.ones(x, dtype=dtype), torch.ones(y, dtype=dtype), offs=offsets)
        with followed():
            fake = torch._grouped_mm(torch.ones(x, dtype=dtype), torch.ones(y, dtype=dtype), offs=offsets.clone())
            assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


def test_recurrent_layers_are_refused() -> None:
    with followed(), pytest.raises(NotOnCudaError, match=r"^lstm is cuDNN's on CUDA"):
        torch.nn.LSTM(8, 8)(torch.zeros(3, 2, 8))


def test_functions_are_themselves_again() -> None:
    before = (F.dropout, F.linear, torch.softmax, torch.Tensor.softmax, torch._VF.lstm)
    with cuda_behaviour():
        assert F.dropout is not before[0]
    assert (F.dropout, F.linear, torch.softmax, torch.Tensor.softmax, torch._VF.lstm) == before


def test_every_substitution_is_listed_once() -> None:
    words = (
        *("dropout", "attention", "softmax", "rms_norm", "layer_norm", "logsigmoid", "grouped", "in place"),
        *("counters", "autocast", "all-reduce", "4-bit", "8-bit", "Adafactor", "key heads"),
    )
    assert len(SUBSTITUTIONS) == len(words)
    assert all(word in text for word, text in zip(words, SUBSTITUTIONS, strict=True))
