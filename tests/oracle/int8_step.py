"""One training step of a transformers model with bitsandbytes' 8-bit weights and peft's adapters.

Tensors are real and on the CPU; storages are followed as elsewhere. Operators of bitsandbytes run the lines of its CUDA
back end, without its kernels; products are zeros, which have no outliers.
"""

from __future__ import annotations

import ast
import warnings
from contextlib import nullcontext
from importlib.util import find_spec
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional
from unittest.mock import patch

import bitsandbytes
import peft
import torch
import transformers
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.quantizers.base import get_keys_to_not_convert

from .four_bit_step import _step
from .tracer import Follow, Trace, cuda_behaviour
from .training_step import Step, _model, _quiet, _unpacked

CONTEXT = SimpleNamespace(get_context=lambda device: None)
"""cuBLAS's, which no kernel reads here."""


def _kernels() -> dict[str, Any]:
    """The functions of ``backends/cuda/ops.py``, else ``backends/default/ops.py``, by their operators' names."""
    spec = find_spec("bitsandbytes")
    assert spec is not None
    assert spec.origin is not None
    found: dict[str, Any] = {}
    for backend in ("default", "cuda"):
        source = Path(spec.origin).with_name("backends") / backend / "ops.py"
        names: dict[str, Any] = {"torch": torch, "prod": prod, "Optional": Optional, "_get_raw_stream": lambda index: 0}
        names |= {"_cuda_device_of": lambda x: nullcontext(), "ct": SimpleNamespace(c_int32=int)}
        names["lib"] = SimpleNamespace(
            cint8_vector_quant=lambda *given: None,
            cdequant_mm_int32_fp16=lambda *given: None,
            cigemmlt_32=lambda *given: 0,
        )
        names["CUBLAS_Context"] = SimpleNamespace(get_instance=lambda: CONTEXT)
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef) or "int8" not in ast.unparse(node):
                continue
            operators = [ast.literal_eval(one.args[0]) for one in node.decorator_list if isinstance(one, ast.Call)]
            node.decorator_list = []
            exec(compile(ast.Module([node], []), str(source), "exec"), names)
            found |= {str(one).partition("::")[2]: names[node.name] for one in operators}
    return found


class FollowInt8(Follow):
    """Sees what operators on 8-bit weights do on CUDA."""

    kernels = _kernels()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "bitsandbytes":
            name = func._schema.name.partition("::")[2]
            with self:
                made = self.kernels[name](*args, **(kwargs or {}))
                return made.zero_() if isinstance(made, torch.Tensor) else made
        return super().__torch_dispatch__(func, types, args, kwargs)


def on_cuda(a: Any, b: Any, out: Any = None, state: Any = None, threshold: float = 0.0, bias: Any = None) -> Any:
    """``bitsandbytes.matmul`` where tensors are not on a CPU."""
    return bitsandbytes.autograd._functions.MatMul8bitLt.apply(a, b, out, bias, state)


def traced_int8_step(
    config: transformers.PreTrainedConfig,
    b: int,
    s: int,
    dtype: str,
    adapters: peft.LoraConfig,
    *,
    prepared: bool,
    recompute: bool,
    reentrant: bool = False,
) -> Step:
    """Traces the model of ``config`` on ids (b, s), with AdamW (foreach) on fp32 adapters; eager attention."""
    trace = Trace()
    with (
        _quiet(),
        _unpacked(),
        cuda_behaviour(),
        warnings.catch_warnings(),
        patch.object(bitsandbytes, "matmul", on_cuda),
        FollowInt8(trace) as follow,
    ):
        warnings.simplefilter("ignore")
        model = _quantised(_model(config, dtype, "eager"))
        if prepared:
            model = peft.prepare_model_for_kbit_training(model, recompute, {"use_reentrant": reentrant})
        elif recompute:
            model.activation_checkpointing_enable()
        model = peft.get_peft_model(model, adapters).train()
        ids = torch.randint(0, config.vocab_size, (b, s))
        with torch.no_grad():
            model(input_ids=ids, labels=ids)  # biases take the inputs' dtype in the first pass
        return _step(model, ids, trace, follow)


def _quantised(model: Any) -> Any:
    """As ``from_pretrained`` with a ``BitsAndBytesConfig`` leaves it (``Bnb8bitQuantize.convert``), of weights so small
    that no input has outliers."""
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter) if parameter.dim() == 1 else torch.nn.init.normal_(parameter, std=0.02)
    settings = transformers.BitsAndBytesConfig(load_in_8bit=True)
    loaded = dict(model.named_modules())
    replaced = replace_with_bnb_linear(model, get_keys_to_not_convert(model), settings)
    for name, module in replaced.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear8bitLt):
            old = loaded[name]
            weight = old.weight.detach() if isinstance(old, torch.nn.Linear) else old.weight.detach().T
            kept = bitsandbytes.nn.Int8Params(torch.zeros(weight.shape, dtype=torch.int8), requires_grad=False)
            kept.CB, kept.SCB = kept.data, torch.ones(weight.shape[0])
            module.weight = kept
            if old.bias is not None:
                module.bias = torch.nn.Parameter(old.bias.detach(), requires_grad=False)
    replaced.is_loaded_in_8bit = True
    return replaced
