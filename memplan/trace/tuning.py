"""peft's adapters on a model of fake tensors, and frozen parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings, simplefilter

import torch

from ..plan.lora import ALL_LINEAR
from .four_bit import Dequantising, follow_scales, prepared, quantised
from .job import Job
from .models import UnknownModelError
from .outline import outline_of
from .storages import Follow
from .tuned import Tuned

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
