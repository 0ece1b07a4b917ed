"""One training step of a transformers model with autoawq's 4-bit weights and peft's adapters.

Tensors are real and on the CPU; storages are followed as elsewhere. ``WQLinear_GEMM`` and its function are autoawq's
own; its two kernels are what they allocate (autoawq_kernels, ``awq_ext/quantization/gemm_cuda_gen.cu``). peft has only
gptqmodel's layers wrapped today, by the same class.
"""

from __future__ import annotations

import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import peft
import torch
import transformers
from peft.tuners.lora import awq as wrapper
from transformers.quantizers.base import get_keys_to_not_convert

from .four_bit_step import _step
from .tracer import Follow, Trace, cuda_behaviour
from .training_step import Step, _model, _quiet, _unpacked

EIGHT = 8
"""Numbers in an int32."""


def dequantize_weights_cuda(qweight: Any, scales: Any, *rest: Any) -> torch.Tensor:
    return torch.zeros(qweight.shape[0], qweight.shape[1] * EIGHT, dtype=scales.dtype)


def gemm_forward_cuda(x: torch.Tensor, qweight: Any, scales: Any, zeros: Any, parts: int) -> torch.Tensor:
    return torch.zeros(parts, x.shape[0], qweight.shape[1] * EIGHT, dtype=x.dtype).sum(0)


KERNELS = SimpleNamespace(dequantize_weights_cuda=dequantize_weights_cuda, gemm_forward_cuda=gemm_forward_cuda)


class HalfSoftmax(torch.autograd.Function):
    """``softmax(x, dtype=torch.float32)`` of fp16 on CUDA, where one kernel casts, too (``SoftMax.cpp``, ``softmax``;
    ``half_to_float``)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (out,) = ctx.saved_tensors
        return torch.zeros(out.shape, dtype=torch.float16)


def softmax(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    return HalfSoftmax.apply(x)


def layers() -> Any:
    """autoawq's module, without the rest of the package, which asks for what today's transformers lacks."""
    for name in ("awq", "awq.utils", "awq.modules", "awq.modules.linear"):
        module = ModuleType(name)
        module.__path__ = []
        sys.modules.setdefault(name, module)
    given = {
        "awq.utils.module": {"try_import": lambda name: (KERNELS, "")},
        "awq.utils.utils": {"get_best_device": lambda: "cpu"},
        "awq.utils.packing_utils": {"dequantize_gemm": None},
    }
    for name, values in given.items():
        sys.modules[name] = module = ModuleType(name)
        vars(module).update(values)
    from importlib.metadata import distribution
    from importlib.util import module_from_spec, spec_from_file_location

    path = distribution("autoawq").locate_file("awq/modules/linear/gemm.py")
    spec = spec_from_file_location("awq.modules.linear.gemm", str(path))
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def traced_awq_step(
    config: transformers.PreTrainedConfig, b: int, s: int, adapters: peft.LoraConfig, *, group: int, recompute: bool
) -> Step:
    """Traces the model of ``config`` in fp16 on ids (b, s), with AdamW (foreach) on fp32 adapters; eager attention."""
    trace, kind = Trace(), layers().WQLinear_GEMM
    with (
        _quiet(),
        _unpacked(),
        cuda_behaviour(),
        warnings.catch_warnings(),
        patch.object(torch.nn.functional, "softmax", softmax),
        patch.object(wrapper, "is_gptqmodel_available", lambda: True),
        patch.object(wrapper, "is_gptqmodel_awq_layer", lambda module: isinstance(module, kind)),
        Follow(trace) as follow,
    ):
        warnings.simplefilter("ignore")
        model = _quantised(_model(config, "fp16", "eager"), kind, group)
        if recompute:
            model.activation_checkpointing_enable()
        model = peft.get_peft_model(model, adapters).train()
        ids = torch.randint(0, config.vocab_size, (b, s))
        step = _step(model, ids, trace, follow)
        packed = [one for one in model.modules() if isinstance(one, kind)]
        count = sum(one.in_features * one.out_features + (one.bias is not None) * one.out_features for one in packed)
        return Step(step.parameters + count, step.before, step.forward, step.backward, step.optimizer)


def _quantised(model: Any, kind: Any, group: int) -> Any:
    kept = get_keys_to_not_convert(model)
    for name, module in [*model.named_modules()]:
        if isinstance(module, torch.nn.Linear) and not any(name.startswith(one) for one in kept):
            made = kind(4, group, module.in_features, module.out_features, module.bias is not None, "cpu")
            model.set_submodule(name, made)
    model.requires_grad_(False)
    return model
