"""The gated delta rule and its convolution on fake tensors: flash-linear-attention's own Python, with Triton's kernels
left out.

``python -m tests.oracle.gated_delta FILE`` writes to FILE what they hold and drop. ``MEMPLAN_FLA_SOURCE`` names a
folder with the package ``fla``; nothing is built, and what it imports beside the rule is made up.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.layers.megatron_core.gated_delta_cases import CASES, TORCH_SIZES, Case, torch_inputs

from .mamba import _Ended, _Kernel, _of_triton
from .tracer import Follow, Trace, cuda_behaviour
from .transformer_engine import run_backward
from .triton_functions import _Anything

SOURCE = "MEMPLAN_FLA_SOURCE"
READ = (
    "ops.utils.cumsum", "ops.common.chunk_delta_h", "ops.common.chunk_o", "ops.gated_delta_rule.wy_fast",
    "ops.gated_delta_rule.chunk_fwd", "modules.l2norm", "ops.gated_delta_rule.chunk", "modules.conv.triton.ops",
)  # fmt: skip
"""Modules whose own code runs, in the order of their imports."""


class _Made(types.ModuleType):
    """A module of which nothing is read: decorators do nothing, switches are off."""

    __path__: list[str] = []  # noqa: RUF012 - of a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith(("IS_", "USE_", "TRITON_")):
            return False
        return _Anything()


def _plain(function: Any = None, **_: Any) -> Any:
    return function if callable(function) else lambda function: function


def _guarded(function: Any = None, **_: Any) -> Any:
    """``input_guard``, which holds what it makes contiguous until the function returns; with exceptions, none are
    made."""

    def guarded(*given: Any, **named: Any) -> Any:
        processed = [one.contiguous() if isinstance(one, torch.Tensor) else one for one in given]
        return function(*processed, **named)

    return guarded if callable(function) else lambda function: function


def load(path: Path) -> tuple[Any, Any]:
    """The modules of the rule and of the convolution."""
    importlib.import_module("torch._inductor.test_operators")  # looks for the real Triton
    for name in ("triton", "triton.language"):
        sys.modules[name] = _of_triton(name)
    sys.modules["triton"].jit = lambda function=None, **_: _Kernel() if function else lambda _: _Kernel()  # type: ignore[attr-defined]
    sys.modules["einops"] = _Made("einops")
    made: Any = None
    for name in ("", *READ):
        parts = f"fla.{name}".strip(".").split(".")
        for end in range(1, len(parts) + 1):
            package = ".".join(parts[:end])
            if package not in sys.modules and package != f"fla.{name}":
                sys.modules[package] = _Made(package)
    others = ("utils", "ops.backends", "modules.backends", "ops.common.backends", "ops.utils", "ops.utils.cache")
    unread = ("constant", "index", "op", "softplus")
    for name in (*others, *(f"ops.utils.{one}" for one in unread), "ops.cp", "ops.cp.chunk_delta_h"):
        sys.modules.setdefault(f"fla.{name}", _Made(f"fla.{name}"))
    for name in (
        "ops.common.chunk_scaled_dot_kkt",
        "ops.common.gate",
        "ops.gated_delta_rule.gate",
        "modules.conv.triton.kernels",
    ):
        sys.modules[f"fla.{name}"] = _Made(f"fla.{name}")
    utils: Any = sys.modules["fla.utils"]
    utils.autocast_custom_fwd = utils.autocast_custom_bwd = _plain
    utils.input_guard = _guarded
    utils.check_shared_mem, utils.autotune_cache_kwargs = (lambda *_: True), {}
    sys.modules["fla.ops.cp"].FLACPContext = object  # type: ignore[attr-defined]
    for name in ("ops.backends", "modules.backends", "ops.common.backends"):
        sys.modules[f"fla.{name}"].dispatch = lambda _: _plain  # type: ignore[attr-defined]
    sys.modules["fla.ops.utils.cache"].fla_cache_autotune = lambda *_, **__: lambda kernel: kernel  # type: ignore[attr-defined]
    kernels: Any = sys.modules["fla.modules.conv.triton.kernels"]
    for name in ("bwd", "fwd", "states_fwd", "update"):
        setattr(kernels, f"causal_conv1d_{name}_kernel", _Kernel())
    kernels.compute_dh0_kernel = _Kernel()
    for name in READ:
        spec = importlib.util.spec_from_file_location(
            f"fla.{name}", path.joinpath("fla", *name.split(".")).with_suffix(".py")
        )
        assert spec is not None
        assert spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        sys.modules[f"fla.{name}"] = made
        spec.loader.exec_module(made)
        if name == "ops.utils.cumsum":
            sys.modules["fla.ops.utils"].chunk_local_cumsum = made.chunk_local_cumsum  # type: ignore[attr-defined]
    return sys.modules["fla.ops.gated_delta_rule.chunk"], made


def measured(case: Case, rule: Any, convolution: Any) -> list[list[int]]:
    """Signed sizes of what is held (+) and dropped (-), forward and backward."""
    if case.part.startswith("packed"):
        return _packed(case, rule, convolution)
    if case.part == "grouped rule":
        apply = rule.ChunkGatedDeltaRuleFunction.apply
        flags = (1.0, None, False, False, None, None, None, True)
        return _traced(lambda: _given(case), lambda *x: apply(*x, *flags)[0])
    if case.part == "rule":
        return _traced(lambda: _given(case), lambda *x: rule.ChunkGatedDeltaRuleFunction.apply(*x, 1.0, None, False)[0])
    apply = convolution.CausalConv1dFunction.apply
    return _traced(lambda: _given(case), lambda *x: apply(*x, None, None, None, False, "silu")[0])


def _packed(case: Case, rule: Any, convolution: Any) -> list[list[int]]:
    """The same of one row, with tables of sequences and of their chunks that are made outside."""
    at, one = case.at, replace(case, b=1, s=case.b * case.s)
    ends = torch.zeros(at.b + 1, dtype=torch.int32)
    chunks = torch.zeros(at.b * at.c, 2, dtype=torch.int32)
    if case.part == "packed rule":
        apply = rule.ChunkGatedDeltaRuleFunction.apply
        return _traced(lambda: _given(one), lambda *x: apply(*x, 1.0, None, False, False, ends, None, chunks, True)[0])
    apply = convolution.CausalConv1dFunction.apply
    return _traced(lambda: _given(one), lambda *x: apply(*x, None, None, None, False, "silu", ends, None, chunks)[0])


def measured_in_torch(sizes: Sequence[tuple[tuple[int, ...], str]]) -> list[list[int]]:
    """The same of ``torch_chunk_gated_delta_rule`` of the Megatron-Core that is installed, which asks for packages that
    are not: its lines alone are run."""
    found = importlib.util.find_spec("megatron.core")
    assert found is not None
    assert found.submodule_search_locations is not None
    text = Path(found.submodule_search_locations[0], "ssm", "gated_delta_net.py").read_text()
    names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(text[text.index("def torch_chunk_gated_delta_rule") :], names)
    types = {"bf16": torch.bfloat16, "fp32": torch.float32}

    def given() -> list[torch.Tensor]:
        return [torch.empty(size, dtype=types[dtype], requires_grad=True) for size, dtype in sizes]

    return _traced(given, lambda *x: names["torch_chunk_gated_delta_rule"](*x)[0])


def _traced(given: Callable[[], list[torch.Tensor]], function: Callable[..., torch.Tensor]) -> list[list[int]]:
    """Of ``function`` of inputs whose gradients end there."""
    trace = Trace()
    with ExitStack() as stack:
        for one in (FakeTensorMode(allow_non_fake_inputs=True), cuda_behaviour(), Follow(trace)):
            stack.enter_context(one)
        inputs = [_Ended.apply(x) for x in given()]  # type: ignore[no-untyped-call]
        start = len(trace.changes)
        out = function(*inputs)
        middle = len(trace.changes)
        gradient = torch.empty_like(out)
        again = len(trace.changes)
        run_backward((out,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        parts = trace.changes[start:middle], trace.changes[again:]
        return [[change.sign * change.bytes for change in part] for part in parts]


def _given(case: Case) -> list[torch.Tensor]:
    at = case.at

    def made(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, requires_grad=True)

    if case.part == "grouped rule":
        q, k, v = made(*at.channels).split([at.k * at.d, at.k * at.d, at.v * at.e], dim=-1)
        rows = [q.view(at.groups), k.view(at.groups), v.view(at.values)]
        return [*rows, made(*at.heads, dtype=torch.float32), made(*at.heads)]
    if case.part == "packed convolution":
        return [made(at.b, at.s, at.m), made(at.m, at.kernel)]
    if case.part == "convolution":
        return [made(at.s, at.b, at.features).transpose(0, 1)[..., : at.m], made(at.m, at.kernel)]
    return [made(*at.keys), made(*at.keys), made(*at.values), made(*at.heads, dtype=torch.float32), made(*at.heads)]


def main(file: Path) -> None:
    modules = load(Path(os.environ[SOURCE]))
    found = {str(case): measured(case, *modules) for case in CASES}
    found["torch"] = measured_in_torch(torch_inputs(TORCH_SIZES[0]))
    file.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
