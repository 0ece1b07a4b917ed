"""Seconds of kernels by shape, beside what the time model says of them: the median of repeated calls.

    python -m benchmarks.campaign.kernels products|attention|elementwise|updates [--device cpu]

Operands are random numbers, and several sets of them take turns where one would stay in the cache. On a CPU shapes are
small, and nothing is predicted.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from memplan.layers.work import Alone, fused
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.search.time.kernels import alone, matmul, streamed
from memplan.search.time.rates import Rates, rates_of
from memplan.validate.devices import devices, gpu_of, visible

from .readings import Reading, answer

CACHE = 1 << 27
"""Bytes of operands that no GPU's cache holds (H200: 60 MB, B200: 126)."""
REPEATS = 20
ITEMSIZE = {"bf16": 2, "fp32": 4}


class Kernel(NamedTuple):
    """Something to time."""

    name: str
    make: Callable[[], tuple[Any, ...]]
    """One set of operands."""
    run: Callable[..., object]
    bytes: int
    """Of a set."""
    predicted: Callable[[Rates], float]
    """Seconds."""


PRODUCTS = (
    ("bf16", 8192, 8192, 8192),
    ("bf16", 4096, 4096, 4096),
    ("bf16", 8192, 28672, 4096),
    ("bf16", 8192, 4096, 14336),
    ("bf16", 8192, 6144, 4096),
    ("bf16", 4096, 4096, 8192),
    ("bf16", 2048, 128256, 4096),
    ("bf16", 4096, 6400, 1600),
    ("bf16", 4096, 1600, 6400),
    ("bf16", 4096, 50257, 1600),
    ("bf16", 8192, 16, 4096),
    ("bf16", 512, 512, 512),
    ("fp32", 4096, 4096, 4096),
    ("fp32", 2048, 6400, 1600),
)
"""Dtype, m, n, k: large ones, then those of Llama 3 8B, GPT-2 XL and an adapter."""

ATTENTION = (
    (1, 32, 8192, 128, True),
    (4, 32, 2048, 128, True),
    (2, 32, 4096, 128, True),
    (8, 25, 1024, 64, True),
    (16, 16, 512, 64, False),
)
"""b, heads, s, features of a head, causal."""


def products(torch: Any, device: str, small: bool) -> Iterator[Kernel]:
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    for dtype, *sizes in PRODUCTS:
        m, n, k = (min(size, 64) if small else size for size in sizes)
        e = ITEMSIZE[dtype]

        def make(m: int = m, n: int = n, k: int = k, kind: Any = dtypes[dtype]) -> tuple[Any, ...]:
            return torch.randn(m, k, device=device, dtype=kind), torch.randn(k, n, device=device, dtype=kind)

        def predicted(rates: Rates, m: int = m, n: int = n, k: int = k, e: int = e) -> float:
            return matmul(rates, m, n, k, 1, e)

        yield Kernel(f"product {dtype} {m}x{n}x{k}", make, torch.mm, e * (m * k + k * n), predicted)


def attention(torch: Any, device: str, small: bool) -> Iterator[Kernel]:
    """Forward, and forward with backward."""
    for b, heads, length, d, causal in ATTENTION:
        s = 64 if small else length
        heads = 2 if small else heads
        size = 2 * b * heads * s * d
        name = f"attention b {b}, {heads} heads of {d}, s {s}{', causal' if causal else ''}"

        def make(shape: tuple[int, ...] = (b, heads, s, d)) -> tuple[Any, ...]:
            return tuple(torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

        def forward(q: Any, k: Any, v: Any, causal: bool = causal) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        def both(q: Any, k: Any, v: Any, forward: Callable[..., Any] = forward) -> None:
            torch.autograd.grad(forward(q, k, v), (q, k, v), torch.empty_like(q))

        passes = fused((b, s, heads, d), heads, s, "bf16", causal=causal)

        def ahead(rates: Rates, passes: Sequence[Alone] = passes) -> float:
            return alone(passes[0], rates)

        def whole(rates: Rates, passes: Sequence[Alone] = passes) -> float:
            return sum(alone(one, rates) for one in passes)

        yield Kernel(f"{name}, forward", make, forward, 3 * size, ahead)
        yield Kernel(f"{name}, both passes", make, both, 3 * size, whole)


def elementwise(torch: Any, device: str, small: bool) -> Iterator[Kernel]:
    """Bytes that each reads and writes, for an element of 2 bytes."""
    rows, columns, vocab = (64, 64, 512) if small else (16384, 4096, 50257)
    n, functional = rows * columns, torch.nn.functional

    def matrix() -> tuple[Any, ...]:
        return (torch.randn(rows, columns, device=device, dtype=torch.bfloat16),)

    def two() -> tuple[Any, ...]:
        return (*matrix(), *matrix())

    def normed() -> tuple[Any, ...]:
        return (*matrix(), *(torch.randn(columns, device=device, dtype=torch.bfloat16) for _ in range(2)))

    def scored() -> tuple[Any, ...]:
        tokens = max(1, rows // 8)
        return torch.randn(tokens, vocab, device=device), torch.randint(0, vocab, (tokens,), device=device)

    def norm(x: Any, weight: Any, bias: Any) -> Any:
        return functional.layer_norm(x, (columns,), weight, bias)

    def streams(moved: float) -> Callable[[Rates], float]:
        return lambda rates: streamed(rates, moved)

    logits = max(1, rows // 8) * vocab
    yield Kernel("copy", matrix, torch.clone, 2 * n, streams(4.0 * n))
    yield Kernel("sum of two", two, torch.add, 4 * n, streams(6.0 * n))
    yield Kernel("GELU", matrix, functional.gelu, 2 * n, streams(4.0 * n))
    yield Kernel("SiLU", matrix, functional.silu, 2 * n, streams(4.0 * n))
    yield Kernel("layer norm", normed, norm, 2 * n, streams(4.0 * n))
    yield Kernel("softmax", matrix, lambda x: torch.softmax(x, -1), 2 * n, streams(4.0 * n))
    yield Kernel("to fp32", matrix, lambda x: x.float(), 2 * n, streams(6.0 * n))
    yield Kernel("dropout", matrix, lambda x: functional.dropout(x, 0.1), 2 * n, streams(5.0 * n))
    yield Kernel("cross entropy, fp32", scored, functional.cross_entropy, 4 * logits, streams(12.0 * logits))
    yield Kernel("one small kernel", lambda: (torch.ones(8, device=device),), lambda x: x + 1, CACHE, streams(1.0))


UPDATES = ("foreach", "fused", "for-loop")


def updates(torch: Any, device: str, small: bool) -> Iterator[Kernel]:
    """A step of AdamW over 400 million parameters in tensors as Llama's: 4 numbers read, 3 written."""
    sizes = [(64, 64)] * 4 if small else [(4096, 4096), (14336, 4096), (14336, 4096), (4096,)] * 3
    elements = sum(torch.Size(size).numel() for size in sizes)
    for name, dtype, e in (("fp32", torch.float32, 4), ("bf16", torch.bfloat16, 2)):
        for how in UPDATES:

            def make(dtype: Any = dtype, how: str = how) -> tuple[Any, ...]:
                parameters = [torch.nn.Parameter(torch.randn(size, device=device, dtype=dtype)) for size in sizes]
                for one in parameters:
                    one.grad = torch.randn_like(one)
                optimizer = torch.optim.AdamW(parameters, foreach=how == "foreach", fused=how == "fused")
                optimizer.step()
                return (optimizer,)

            def predicted(rates: Rates, moved: float = 7.0 * e * elements) -> float:
                return streamed(rates, moved)

            yield Kernel(f"AdamW {how} {name}", make, lambda optimizer: optimizer.step(), CACHE, predicted)


# -- time ---------------------------------------------------------------------------------------------------


def seconds(torch: Any, kernel: Kernel, device: str, repeats: int = REPEATS) -> float:
    """The median, behind calls that load kernels."""
    sets = [kernel.make() for _ in range(max(1, min(4, CACHE // max(1, kernel.bytes))))]
    for operands in (sets * 3)[:3]:
        kernel.run(*operands)
    timed = _on_a_gpu if device == "cuda" else _on_a_cpu
    return median(timed(torch, kernel.run, sets[at % len(sets)]) for at in range(repeats))


def _on_a_gpu(torch: Any, run: Callable[..., object], operands: Sequence[Any]) -> float:
    """Several calls between two events, so that a short kernel's launch is hidden behind the one before."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(IN_A_ROW):
        run(*operands)
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / IN_A_ROW


IN_A_ROW = 5


def _on_a_cpu(torch: Any, run: Callable[..., object], operands: Sequence[Any]) -> float:
    began = time.perf_counter()
    run(*operands)
    return time.perf_counter() - began


KINDS: dict[str, Callable[[Any, str, bool], Iterator[Kernel]]] = {
    "products": products,
    "attention": attention,
    "elementwise": elementwise,
    "updates": updates,
}


def rates_here(dtype: str) -> Rates | None:
    """Of the GPU that is here; ``None`` where memplan knows no speed of it."""
    shown = visible(devices(), os.environ)[0]
    gpu = gpu_of(shown.name, shown.total)
    if gpu is None:
        return None
    try:
        return rates_of(resolve(read_plan(None, {"model": "llama-3-8b", "gpu": gpu, "dtype": dtype}).plan))
    except PlanError:
        return None


def main() -> int:
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=tuple(KINDS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    on_a_gpu = given.device == "cuda"
    found, failed = [], []
    for kernel in KINDS[given.kind](torch, given.device, not on_a_gpu):
        rates = rates_here("fp32" if "fp32" in kernel.name else "bf16") if on_a_gpu else None
        try:
            taken = seconds(torch, kernel, given.device, REPEATS if on_a_gpu else 3)
        except RuntimeError as error:  # one shape must not cost the others
            failed.append(f"{kernel.name}: {str(error).partition(chr(10))[0]}")
            continue
        found.append(Reading(kernel.name, "seconds", taken, None if rates is None else kernel.predicted(rates)))
    print(json.dumps(answer(found, "; ".join(failed))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
