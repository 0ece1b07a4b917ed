"""One training step of a transformers model with bitsandbytes' 4-bit weights and peft's adapters.

Tensors are real and on the CPU, because ``Params4bit`` takes no fake ones; storages are followed as elsewhere.
``gemm_4bit`` runs the lines of bitsandbytes' CUDA back end that dequantise a whole weight, without its kernels.
"""

from __future__ import annotations

import ast
import gc
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import bitsandbytes
import peft
import torch
import transformers
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.quantizers.base import get_keys_to_not_convert

from .tracer import Follow, Trace, cuda_behaviour
from .training_step import DTYPES, Step, _model, _quiet, _unpacked, update


def _fallback() -> Any:
    """``_dequant_linear_fallback`` of ``backends/cuda/ops.py``, which cannot be imported without CUDA; its kernels
    write nothing."""
    spec = find_spec("bitsandbytes")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).with_name("backends") / "cuda" / "ops.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    (function,) = (
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "_dequant_linear_fallback"
    )
    names: dict[str, Any] = {"torch": torch, "_dequantize_blockwise_impl": _nothing, "_dequantize_4bit_impl": _nothing}
    exec(compile(ast.Module([function], []), str(source), "exec"), names)
    return names[function.name]


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class FollowFourBit(Follow):
    """Sees what ``gemm_4bit`` does on CUDA."""

    fallback = staticmethod(_fallback())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.bitsandbytes.gemm_4bit.default:
            with self:
                return self.fallback(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_layer_norm_backward.default:  # the CPU's statistics are in the input's dtype
            gradient, x, shape, mean, rstd, *rest = args
            args = (gradient, x, shape, mean.to(x.dtype), rstd.to(x.dtype), *rest)
        return super().__torch_dispatch__(func, types, args, kwargs)


def traced_four_bit_step(
    config: transformers.PreTrainedConfig,
    b: int,
    s: int,
    dtype: str,
    adapters: peft.LoraConfig,
    *,
    double: bool,
    compute: str,
    prepared: bool,
    recompute: bool,
    kind: str = "nf4",
) -> Step:
    """Traces the model of ``config`` on ids (b, s), with AdamW (foreach) on fp32 adapters; eager attention."""
    trace = Trace()
    bitsandbytes.functional.name2qmap.clear()
    with (
        _quiet(),
        _unpacked(),
        cuda_behaviour(),
        warnings.catch_warnings(),
        FollowFourBit(trace) as follow,
    ):
        warnings.simplefilter("ignore")
        model = _quantised(_model(config, dtype, "eager"), double, compute, kind)
        if prepared:
            model = peft.prepare_model_for_kbit_training(model, recompute, {"use_reentrant": False})
        elif recompute:
            model.activation_checkpointing_enable()
        model = peft.get_peft_model(model, adapters).train()
        ids = torch.randint(0, config.vocab_size, (b, s))
        with torch.no_grad():
            model(input_ids=ids, labels=ids)  # biases take the compute dtype in the first pass
        return _step(model, ids, trace, follow)


LOOKED_AT = ("aten.eq.Scalar", "aten.all.default")
"""Whether rows are packed is looked at, which fake tensors cannot tell: two numbers that end at once."""


def _step(model: Any, ids: torch.Tensor, trace: Trace, follow: Follow) -> Step:
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=True)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    update(optimizer, trace)
    gc.collect()
    before, start = trace.live, len(trace.changes)
    out = model(input_ids=ids, labels=ids)
    loss = out.loss
    del out
    middle = len(trace.changes)
    loss.backward()
    del loss
    end = len(trace.changes)
    update(optimizer, trace)
    count = sum(_elements(parameter) for parameter in parameters)
    changes = trace.changes
    forward = [change for change in changes[start:middle] if change.op not in LOOKED_AT]
    step = Step(count, before, forward, changes[middle:end], changes[end:])
    trace.changes = []
    return step


def _elements(parameter: torch.Tensor) -> int:
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def _quantised(model: Any, double: bool, compute: str, kind: str) -> Any:
    """As ``from_pretrained`` with a ``BitsAndBytesConfig`` leaves it (``Bnb4bitQuantize.convert``)."""
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=DTYPES[compute],
    )
    loaded = dict(model.named_modules())
    replaced = replace_with_bnb_linear(model, get_keys_to_not_convert(model), settings)
    for name, module in replaced.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            old = loaded[name]
            weight = old.weight.detach()
            if not isinstance(old, torch.nn.Linear):
                weight = weight.T
            kept = {key: value for key, value in module.weight.__dict__.items() if not key.startswith("_")}
            module.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, **kept).to("cpu")
            if old.bias is not None:
                module.bias = torch.nn.Parameter(old.bias.detach(), requires_grad=False)
    replaced.is_loaded_in_4bit = True
    return replaced
