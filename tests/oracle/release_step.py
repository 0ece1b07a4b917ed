"""One training step of a model of whichever transformers and peft are installed, followed on fake tensors."""

from __future__ import annotations

import gc
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import transformers

from .autocast import cuda_autocast, cuda_lists
from .tracer import Change, Follow, Trace, run

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def traced_release_step(
    settings: dict[str, Any],
    b: int,
    s: int,
    *,
    package: bool,
    recompute: bool,
    autocast: bool,
    rank: int | None,
    targets: list[str],
) -> dict[str, Any]:
    """Traces a model in bf16 on ids (b, s) with AdamW (foreach): parameters, bytes held before, and the signed bytes of
    forward and backward. ``package``: attention takes queries, keys and values as they are, as flash-attn does, else
    transformers' sdpa. ``recompute``: as ``gradient_checkpointing_enable`` does by itself. ``rank``: of LoRA's adapters
    on ``targets``, whose dropout is 0.1."""
    steps: list[dict[str, Any]] = []
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]

    def body(trace: Trace, follow: Follow) -> None:
        model = _model(settings, package)
        if recompute:
            model.gradient_checkpointing_enable()
            for module in model.modules():  # the generator's state is on the host
                if hasattr(module, "_gradient_checkpointing_func"):
                    func = module._gradient_checkpointing_func
                    func.keywords["preserve_rng_state"] = False
        if rank is not None:
            model = _adapted(model, rank, targets, recompute)
        parameters = list(model.parameters())
        trained = [one for one in parameters if one.requires_grad]
        for tensor in (*parameters, *model.buffers()):
            follow.adopt(tensor, "state")
        optimizer = torch.optim.AdamW(trained, foreach=True)
        ids = torch.randint(0, settings["vocab_size"], (b, s))
        for one in trained:
            one.grad = torch.empty_like(one)
        trace.host = True
        optimizer.step()
        trace.host = False
        optimizer.zero_grad()
        gc.collect()
        before, start = trace.live, len(trace.changes)
        with cuda_autocast("bf16" if autocast else None):
            out = model(input_ids=ids, labels=ids)
        loss = out.loss
        del out
        middle = len(trace.changes)
        with cuda_lists() if autocast else nullcontext():
            loss.backward()
        del loss
        end = len(trace.changes)
        changes = trace.changes
        losses = [at for at in range(middle, end) if _ends(changes[at], "aten.nll_loss_forward.default")]
        ended = {losses[-1], *(at for at in range(middle, end) if _ends(changes[at], "aten.ones_like.default"))}
        steps.append(
            {
                "parameters": sum(one.numel() for one in parameters),
                "before": before,
                "forward": [change.sign * change.bytes for change in changes[start:middle]],
                "backward": [changes[at].sign * changes[at].bytes for at in range(middle, end) if at not in ended],
            }
        )
        trace.changes = []

    with (
        patch.dict(os.environ, {"TRANSFORMERS_SDPA_FORCE_GQA": "1"}),
        patch.object(torch.nn.Module, "_apply", _apply),
        _unpacked(),
        patch.object(torch.nn.functional, "one_hot", _one_hot),
        _balanced(b * s, settings),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        run(body)
    return steps[0]


def _ends(change: Change, op: str) -> bool:
    """The loss, or its gradient, which end with the head in a plan."""
    return change.sign < 0 and change.op == op


def _one_hot(x: torch.Tensor, num_classes: int) -> torch.Tensor:
    """As on CUDA, without looking at the values (``Onehot.cpp``)."""
    return torch.zeros(*x.shape, num_classes, dtype=torch.int64).scatter_(-1, x.unsqueeze(-1), 1)


def _balanced(tokens: int, settings: dict[str, Any]) -> AbstractContextManager[Any]:
    """Every expert has as many rows, which fake tensors cannot say: indices are two views of one tensor."""
    if "num_local_experts" not in settings:
        return nullcontext()
    rows = tokens * settings["num_experts_per_tok"] // settings["num_local_experts"]
    where = torch.where

    def chosen(condition: torch.Tensor, *others: Any) -> Any:
        return where(condition, *others) if others else torch.empty(rows, 2, dtype=torch.int64).unbind(1)

    return patch.object(torch, "where", chosen)


def _unpacked() -> AbstractContextManager[Any]:
    """Rows of one sequence each, which newer releases look for, and cannot see on fake tensors."""
    try:
        from transformers import masking_utils
    except ImportError:
        return nullcontext()
    find = masking_utils.find_packed_sequence_indices

    def found_none(position_ids: torch.Tensor) -> None:
        find(position_ids)

    return patch.object(masking_utils, "find_packed_sequence_indices", found_none)


def _model(settings: dict[str, Any], package: bool) -> Any:
    config: Any = transformers.AutoConfig.for_model(**settings)
    config._attn_implementation = "sdpa"
    with patch.object(transformers.PreTrainedModel, "_init_weights", lambda *args: None):
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(parameter.detach().to(torch.bfloat16))
    model.config.use_cache = False
    if package:
        try:
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        except ImportError:
            return _by_class(model).train()
        if hasattr(transformers.models.gpt_bigcode.modeling_gpt_bigcode, "GPTBigCodeFlashAttention2"):
            _by_class(model)
        functions: Any = ALL_ATTENTION_FUNCTIONS
        functions["flash_attention_2"] = _as_they_are
        model.config._attn_implementation = "flash_attention_2"
    return model.train()


def _by_class(model: Any) -> Any:
    """Its attention in the family's own class, which hands (b, s, a, d) over."""
    from transformers.models.gpt_bigcode import modeling_gpt_bigcode as code

    def forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **named: Any
    ) -> torch.Tensor:
        heads = [one.transpose(1, 2) for one in (query, key, value)]
        out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    if isinstance(model, code.GPTBigCodeForCausalLM):
        code._flash_attention_forward = forward
        model.transformer._use_flash_attention_2, model.transformer._use_sdpa = True, False
        for block in model.transformer.h:
            block.attn.__class__ = code.GPTBigCodeFlashAttention2
            block.attn._flash_attn_uses_top_left_mask = False
    return model


def _as_they_are(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **others: Any
) -> tuple[torch.Tensor, None]:
    """As ``flash_attention_forward`` hands (b, a, s, d) over."""
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2), None


def _adapted(model: Any, rank: int, targets: list[str], recompute: bool) -> Any:
    import peft

    if recompute:
        model.enable_input_require_grads()
    settings = peft.LoraConfig(r=rank, target_modules=targets, lora_dropout=0.1)
    return peft.get_peft_model(model, settings)


def _apply(module: torch.nn.Module, function: Any, recurse: bool = True) -> Any:
    """``Module._apply``, which cannot put another fake tensor into a parameter that there is."""
    for inner in module.modules() if recurse else (module,):
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                inner._parameters[name] = torch.nn.Parameter(function(parameter.detach()), parameter.requires_grad)
    return module
