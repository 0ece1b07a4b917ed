"""One training step of a transformers model of which some parameters are frozen, followed on fake tensors."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import transformers

from .tracer import Follow, Trace, run
from .training_step import Step, _model, _quiet, _unpacked, update

Tune = Callable[[Any], Any]
"""Freezes parameters of a model, or wraps it."""


def traced_tuned_step(
    config: transformers.PreTrainedConfig,
    b: int,
    s: int,
    dtype: str,
    tune: Tune,
    *,
    flash: bool,
    recompute: bool,
    accumulates: bool = False,
    labels: int = 0,
) -> Step:
    """Traces the model of ``config`` on ids (b, s) once ``tune`` has been at it, with AdamW (foreach) on what is
    trained; the loss and its graph end before the step, as in the Trainer. With ``accumulates`` an earlier micro-batch
    has left gradients."""
    steps: list[Step] = []

    def body(trace: Trace, follow: Follow) -> None:
        model = _model(config, dtype, "sdpa" if flash else "eager", labels, kernels=False)
        if recompute:
            model.activation_checkpointing_enable()
        model = tune(model).train()
        parameters = list(model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        for tensor in (*parameters, *model.buffers()):
            follow.adopt(tensor, "state")
        optimizer = torch.optim.AdamW(trained, foreach=True)
        ids = torch.randint(0, config.vocab_size, (b, s))
        of_ids = torch.randint(0, labels, (b,)) if labels else ids
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        update(optimizer, trace)
        for parameter in trained if accumulates else ():
            parameter.grad = torch.empty_like(parameter)
        gc.collect()
        before, start = trace.live, len(trace.changes)
        out = model(input_ids=ids, labels=of_ids)
        loss = out.loss
        del out
        middle = len(trace.changes)
        loss.backward()
        del loss
        end = len(trace.changes)
        update(optimizer, trace)
        count = sum(parameter.numel() for parameter in parameters)
        changes = trace.changes
        steps.append(Step(count, before, changes[start:middle], changes[middle:end], changes[end:]))
        trace.changes = []

    with (
        _quiet(),
        patch.dict(os.environ, {} if hasattr(config, "attention_k_eq_v") else {"TRANSFORMERS_SDPA_FORCE_GQA": "1"}),
        _unpacked(),
        patch.object(torch.nn.Module, "_apply", _apply),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        run(body)
    return steps[0]


def _apply(module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """``Module._apply``, which cannot put another fake tensor into a parameter that there is."""
    for inner in module.modules() if recurse else (module,):
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                applied = torch.nn.Parameter(function(parameter.detach()), parameter.requires_grad)
                inner._parameters[name] = applied
    return module


def lora(rank: int, targets: tuple[str, ...], dropout: float, adapter_dtype: str | None, **more: Any) -> Tune:
    """peft's adapters; with ``adapter_dtype`` fp32 as it casts them, else in the model's, and ``more`` settings."""

    def tune(model: Any) -> Any:
        import peft

        named = "all-linear" if targets == ("all-linear",) else list(targets)
        fan = model.config.model_type == "gpt2"
        settings = peft.LoraConfig(r=rank, target_modules=named, lora_dropout=dropout, fan_in_fan_out=fan, **more)
        made = peft.get_peft_model(model, settings, autocast_adapter_dtype=adapter_dtype == "fp32")
        for name, module in made.named_modules():
            if name.endswith("modules_to_save.default"):  # the storage of a copied fake tensor is not followed
                for kind, parameter in list(module.named_parameters()):
                    setattr(module, kind, torch.nn.Parameter(torch.empty_like(parameter)))
        return made

    return tune


def frozen(embedding: bool, layers: int) -> Tune:
    """Frozen tables (and their norm), and the first layers."""

    def tune(model: Any) -> Any:
        base = model.base_model
        if embedding:
            for name, parameter in base.named_parameters():
                if any(part in name for part in EMBEDDINGS):
                    parameter.requires_grad_(False)
        for layer in blocks(model)[:layers]:
            layer.requires_grad_(False)
        return model

    return tune


EMBEDDINGS = ("wte", "wpe", "embed_tokens", "embed_positions", "embed_in", "word_embeddings", "embeddings.")


def blocks(model: Any) -> Any:
    """The list of layers of a model of any family."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len)
