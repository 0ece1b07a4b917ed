"""What is tuned of a model of fake tensors: peft's adapters, bitsandbytes' 4-bit weights, and frozen parts.

Modules, autograd functions and ``QuantState`` are bitsandbytes' own. Two things are put in place of others: a weight is
an ordinary parameter with a ``quant_state``, since ``Params4bit`` is a tensor subclass and fake tensors take no other;
and ``gemm_4bit`` is the product of a dequantised weight, since its kernels are CUDA's (``backends/cuda/ops.py``,
``_dequant_linear_fallback``; bitsandbytes 0.50).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings, simplefilter

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..plan.lora import ALL_LINEAR
from ..tape.events import Category
from .job import FourBitWeights, Job, Tuned
from .models import DTYPES, UnknownModelError, outline_of
from .storages import Follow

KEPT = ("compress_statistics", "quant_type", "quant_storage", "blocksize")
"""What peft asks of a weight."""


def quantised(given: FourBitWeights, model: Any) -> Any:
    """``model`` as ``from_pretrained`` with a ``BitsAndBytesConfig`` leaves it (``Bnb4bitQuantize.convert``). Biases
    have the dtype that the first pass gives them."""
    import transformers
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    settings = transformers.BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type=given.kind,
        bnb_4bit_use_double_quant=given.double,
        bnb_4bit_compute_dtype=DTYPES[given.compute],
    )
    _make_table(given, fakes=isinstance(next(model.parameters()), FakeTensor))
    loaded = dict(model.named_modules())
    with _disable_current_modes():
        model = replace_with_bnb_linear(model, get_keys_to_not_convert(model), settings)
    for name, module in _four_bit(model):
        old = loaded[name]
        matrix = old.weight.detach() if isinstance(old, torch.nn.Linear) else old.weight.detach().T
        module.weight = packed(matrix, module.weight)
        _cast_bias(module, old.bias, given.compute)
    model.is_loaded_in_4bit = True
    return model


def _make_table(given: FourBitWeights, *, fakes: bool) -> None:
    """On fake tensors: ``create_dynamic_map`` reads back what it computes, 256 numbers in fp32, whatever they are."""
    name2qmap = _library("functional").name2qmap
    name2qmap.clear()
    if given.double and fakes:
        name2qmap["dynamic"] = torch.zeros(256)


def prepared(given: FourBitWeights, model: Any, recompute: bool) -> Any:
    """peft's ``prepare_model_for_kbit_training``, which casts what is not quantised to fp32; but for biases of
    quantised layers, which the first pass casts back."""
    peft: Any = import_module("peft")
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                module._parameters[name] = torch.nn.Parameter(parameter.detach().float(), requires_grad=False)
    model.tie_weights()
    with catch_warnings():
        simplefilter("ignore")  # older names that peft asks transformers for
        model = peft.prepare_model_for_kbit_training(model, recompute, {"use_reentrant": False})
    for _, module in _four_bit(model):
        _cast_bias(module, module.bias, given.compute)
    return model


def _cast_bias(module: Any, bias: torch.Tensor | None, dtype: str) -> None:
    if bias is not None:
        module.bias = torch.nn.Parameter(bias.detach().to(DTYPES[dtype]), requires_grad=False)


def packed(matrix: torch.Tensor, like: Any) -> torch.nn.Parameter:
    """``matrix`` (n, k) as ``Params4bit._quantize`` packs it: two numbers a byte, scales beside it."""
    numbers, state = _library("functional").quantize_4bit(
        matrix.contiguous(), compress_statistics=like.compress_statistics, quant_type=like.quant_type
    )
    weight: Any = torch.nn.Parameter(numbers, requires_grad=False)
    weight.quant_state = state
    for name in KEPT:
        setattr(weight, name, getattr(like, name, None))
    return weight  # type: ignore[no-any-return]


def follow_scales(model: Any, follow: Follow) -> None:
    """Scales and tables of every weight belong to it; bitsandbytes' own table of 8-bit values is there once."""
    for _, module in _four_bit(model):
        for tensor in _tensors(module.weight.quant_state):
            follow.adopt(tensor, "quant_state", Category.PARAMETERS)
    for table in _library("functional").name2qmap.values():
        follow.adopt(table, "dynamic_map", Category.BUFFERS)


def _four_bit(model: Any) -> list[tuple[str, Any]]:
    kind = _library("nn").Linear4bit
    return [(name, one) for name, one in model.named_modules() if isinstance(one, kind)]


def _library(module: str) -> Any:
    return import_module(f"bitsandbytes.{module}")


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    for value in vars(state).values():
        if isinstance(value, torch.Tensor):
            yield value
    if state.state2 is not None:
        yield from _tensors(state.state2)


class Dequantising(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Above a ``Follow``: what ``gemm_4bit`` does on CUDA where it has no kernel of its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.bitsandbytes.gemm_4bit.default:
            return dequantised_product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def dequantised_product(
    x: torch.Tensor,
    packed: torch.Tensor,
    shape: Sequence[int],
    scales: torch.Tensor,
    block: int,
    kind: str,
    bias: torch.Tensor | None = None,
    absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None,
    absmax_offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x`` (…, k) by the weight of ``shape`` (n, k): scales in fp32, the whole weight, the product."""
    held = [scales]
    if absmax_8bit is not None and absmax_offset is not None:
        held = [_scales(absmax_8bit, scales, absmax_code)]
        held.append(held[0] + absmax_offset)
    if isinstance(x, FakeTensor):
        weight = torch.empty(tuple(shape), dtype=x.dtype, device=x.device)
    else:
        weight = torch.ops.bitsandbytes.dequantize_4bit(packed, held[-1], block, kind, tuple(shape), x.dtype)
    out = torch.nn.functional.linear(x, weight, bias)
    del held  # scales are in variables until the function returns
    return out


def _scales(numbers: torch.Tensor, scales: torch.Tensor, code: torch.Tensor | None) -> torch.Tensor:
    """Scales in fp32 of their 8-bit numbers; of fake ones any."""
    if isinstance(numbers, FakeTensor) or code is None:
        return torch.empty_like(numbers, dtype=torch.float32)
    found: torch.Tensor = torch.ops.bitsandbytes.dequantize_blockwise(numbers, scales, code, 256, torch.float32)
    return found


EMBEDDINGS = ("wte", "wpe", "embed_tokens", "embed_positions", "embed_in", "word_embeddings", "embeddings.")
"""Parts of the names of embedding tables, and of what is beside them, in transformers."""


def tuned(job: Job, model: Any) -> Any:
    """``model`` as the job trains it: wrapped by peft, with frozen parts, or as it is."""
    given = job.tuned
    if given is None:
        return model
    if given.rank is not None:
        if given.four_bit is not None:
            model = quantised(given.four_bit, model)
            if given.four_bit.prepared:
                model = prepared(given.four_bit, model, job.recompute)
        model = with_adapters(given, model)
    else:
        freeze(given, model)
    return model.train()


def dequantising(job: Job) -> AbstractContextManager[Any]:
    """What 4-bit weights need above a ``Follow``; to be entered before it is calibrated."""
    if job.tuned is None or job.tuned.four_bit is None:
        return nullcontext()
    mode: Any = Dequantising
    return mode()  # type: ignore[no-any-return]


def follow_frozen(job: Job, model: Any, follow: Follow) -> None:
    """What weights keep beside themselves."""
    if job.tuned is not None and job.tuned.four_bit is not None:
        follow_scales(model, follow)


def with_adapters(given: Tuned, model: Any) -> Any:
    import peft

    assert given.rank is not None
    settings = peft.LoraConfig(
        r=given.rank,
        target_modules=ALL_LINEAR if given.targets == [ALL_LINEAR] else given.targets,
        lora_dropout=given.dropout,
        use_dora=given.dora,
        modules_to_save=given.saved or None,
        target_parameters=given.parameters or None,
        lora_alpha=given.alpha,  # type: ignore[arg-type]  # any number
        use_rslora=given.rslora,
        fan_in_fan_out=model.config.model_type == "gpt2",
    )
    with modules_of_fakes(), catch_warnings():
        simplefilter("ignore")  # older names that peft asks transformers for
        return peft.get_peft_model(model, settings, autocast_adapter_dtype=given.adapters == "fp32")


def freeze(given: Tuned, model: Any) -> None:
    if given.embedding:
        tables = {id(one) for one in model.get_input_embeddings().parameters()}
        for name, parameter in model.base_model.named_parameters():
            if id(parameter) in tables or any(part in name for part in EMBEDDINGS):
                parameter.requires_grad_(False)
    if not given.layers:
        return
    blocks = outline_of(model).blocks
    if len(blocks) != 1:
        raise UnknownModelError(f"the first {given.layers} layers are of one list, and it has {len(blocks)} of them")
    layers: Any = model.get_submodule(blocks[0])
    for layer in layers[: given.layers]:
        layer.requires_grad_(False)


@contextmanager
def modules_of_fakes() -> Iterator[None]:
    """``Module._apply`` puts new parameters in place of old ones: fake tensors cannot take each other's place inside
    one (``param.data = …``)."""

    def apply(module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        for inner in module.modules() if recurse else (module,):
            for name, parameter in inner._parameters.items():
                if parameter is not None and not hasattr(parameter, "quant_state"):
                    applied = torch.nn.Parameter(function(parameter.detach()), parameter.requires_grad)
                    inner._parameters[name] = applied
        return module

    with patch.object(torch.nn.Module, "_apply", apply):
        yield
