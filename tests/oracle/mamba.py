"""Megatron-Core's Mamba mixer between its projections, on fake tensors: its own Python, mamba_ssm's and
causal_conv1d's, with kernels of Triton and CUDA left out.

``python -m tests.oracle.mamba FILE`` writes to FILE what they hold and drop. ``MEMPLAN_MAMBA_SOURCE`` names a folder
with the packages ``mamba_ssm``, ``causal_conv1d`` and ``einops``; nothing is built.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memplan.layers.megatron_core.mamba import CONVOLUTION
from memplan.layers.megatron_core.mamba_scan import Sizes
from tests.layers.megatron_core.mamba_cases import CASES, Case

from .tracer import Follow, Trace
from .transformer_engine import on_a_gpu, parallel, run_backward
from .triton_functions import _Triton

SOURCE = "MEMPLAN_MAMBA_SOURCE"


class _Kernel:
    """A Triton kernel that was tuned: it does nothing."""

    configs = (SimpleNamespace(kwargs={"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64}),)
    best_config = SimpleNamespace(kwargs={"BLOCK_SIZE_M": 64, "BLOCK_SIZE": 256})

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: None


def _of_triton(name: str) -> types.ModuleType:
    module = _Triton(name)
    module.__version__ = "3.5.0"
    module.jit = lambda function=None, **_: _Kernel()  # type: ignore[attr-defined]
    module.autotune = module.heuristics = lambda *_, **__: lambda kernel: kernel  # type: ignore[attr-defined]
    module.Config = lambda kwargs, **_: SimpleNamespace(kwargs=kwargs)  # type: ignore[attr-defined]
    return module


def load(path: Path) -> Any:
    """Megatron-Core's ``mamba_mixer`` over the packages at ``path``."""
    sys.path.insert(0, str(path))
    importlib.import_module("torch._inductor.test_operators")  # looks for the real Triton, as does
    importlib.import_module("megatron.core")
    for name in ("triton", "triton.language"):
        sys.modules[name] = _of_triton(name)
    for package in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "mamba_ssm.utils", "causal_conv1d"):
        module = types.ModuleType(package)
        module.__path__ = [str(path.joinpath(*package.split(".")))]
        sys.modules[package] = module
    sys.modules["causal_conv1d"].causal_conv1d_fn = None  # type: ignore[attr-defined]
    sys.modules["causal_conv1d_cuda"] = SimpleNamespace(  # type: ignore[assignment]
        causal_conv1d_fwd=lambda *_: None, causal_conv1d_bwd=lambda *_: None
    )
    with patch.object(torch.library, "custom_op", lambda *_, **__: lambda function: function):
        importlib.import_module("causal_conv1d.cpp_functions")
    scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    mixer: Any = importlib.import_module("megatron.core.ssm.mamba_mixer")
    einops: Any = importlib.import_module("einops")
    mixer.rearrange, mixer.scan = einops.rearrange, scan
    mixer.causal_conv1d_fn = importlib.import_module("causal_conv1d.causal_conv1d_interface").causal_conv1d_fn
    context: Any = importlib.import_module("megatron.core.ssm.mamba_context_parallel")
    context.repeat, context.rearrange, context.HAVE_EINOPS = einops.repeat, einops.rearrange, True
    return mixer


def measured(case: Case, mixer: Any) -> list[list[int]]:
    """Signed sizes of what the mixer holds (+) and drops (-), forward and backward."""
    trace = Trace()
    with ExitStack() as stack:
        for one in (FakeTensorMode(allow_non_fake_inputs=True), on_a_gpu(), Follow(trace)):
            stack.enter_context(one)
        module, x = _module(case, mixer)
        start = len(trace.changes)
        out = _forward(module, [x], mixer, case)
        middle = len(trace.changes)
        gradient = torch.empty_like(out)
        again = len(trace.changes)
        run_backward((out,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        end = len(trace.changes)
        parts = trace.changes[start:middle], trace.changes[again:end]
        return [[change.sign * change.bytes for change in part] for part in parts]


class _Ended(torch.autograd.Function):
    """An input whose gradient ends here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:  # type: ignore[override]
        return None


def _forward(module: Any, given: list[torch.Tensor], mixer: Any, case: Case) -> torch.Tensor:
    """``MambaMixer.forward`` between the projections. Newer releases hand the states' dtype to the scan, and have
    ``_ssm_prefill`` as ``_static_prefill``."""
    x: torch.Tensor = _Ended.apply(given[0])  # type: ignore[no-untyped-call]
    if module.cp.cp_size > 1:
        x = module.cp.pre_conv_ssm(x)
    dtype = {None: None, "fp32": torch.float32}[case.kept]
    for name in ("mamba_split_conv1d_scan_combined", "mamba_chunk_scan_combined"):
        setattr(mixer, name, partial(getattr(mixer.scan, name), state_dtype=dtype))
    if case.apart:
        return mixer.MambaMixer._ssm_prefill(module, x, None, None)  # type: ignore[no-any-return]
    return mixer.MambaMixer._ssm_training(module, x)  # type: ignore[no-any-return]


def _module(case: Case, mixer: Any) -> tuple[Any, torch.Tensor]:
    own: Sizes = case.own
    norm = importlib.import_module("mamba_ssm.ops.triton.layernorm_gated").RMSNorm

    def made(*size: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.empty(size, dtype=torch.bfloat16))

    context: Any = importlib.import_module("megatron.core.ssm.mamba_context_parallel").MambaContextParallel
    cp = context.__new__(context)
    convolution = SimpleNamespace(weight=made(own.m, 1, CONVOLUTION), bias=made(own.m))
    context.__init__(
        cp,
        cp_group=parallel(case.cp) if case.cp > 1 else SimpleNamespace(size=lambda: 1),
        d_inner_local_tp=own.d, nheads_local_tp=own.a, ngroups_local_tp=own.g, d_state=own.n,
        conv1d_cp1=convolution, dt_bias_cp1=made(own.a), A_log_cp1=made(own.a), D_cp1=made(own.a), D_has_hdim=False,
    )  # fmt: skip
    weights = norm(own.d, eps=1e-5, group_size=own.d // own.g, norm_before_gate=False, dtype=torch.bfloat16)
    module = SimpleNamespace(
        cp=cp, conv1d=SimpleNamespace(bias=None), D_has_hdim=False, headdim=own.p, chunk_size=own.chunk,
        activation="silu", norm_before_gate=False, rmsnorm=True, norm=weights, d_state=own.n,
    )  # fmt: skip
    return module, torch.empty((own.s, own.b, own.features), dtype=torch.bfloat16, requires_grad=True)


def main(file: Path) -> None:
    mixer = load(Path(os.environ[SOURCE]))
    file.write_text(json.dumps({str(case): measured(case, mixer) for case in CASES}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
