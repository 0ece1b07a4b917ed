"""One training step of a real transformers model, followed on fake tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import transformers
from transformers import initialization, masking_utils

from . import delta_kernels
from .autocast import cuda_autocast, cuda_lists
from .tracer import Change, Follow, Trace, run

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Step:
    """A training step of a model whose optimizer states exist, as the changes of each stretch.

    Held bytes are counted from nothing: parameters, buffers, optimizer states and token ids are in ``before``.
    """

    parameters: int
    before: int
    forward: list[Change]
    """Up to the loss alone: the model's output, and with it the logits' variable, is gone."""
    backward: list[Change]
    optimizer: list[Change]
    """``step()`` and ``zero_grad()``; counters that PyTorch keeps on the host are left out."""


IDLE = ".indexer."
"""In the names of parameters that run without a graph (``DeepseekV32Indexer.forward``), and so have no gradients."""

_updates: dict[tuple[tuple[torch.Size, torch.dtype], ...], list[Change]] = {}
"""What AdamW's second step did, by the parameters' shapes and dtypes: it depends on nothing else. Where it is known,
both steps are left out, and the states are there from the start."""


def traced_step(
    config: transformers.PreTrainedConfig,
    b: int,
    s: int,
    dtype: str,
    *,
    flash: bool,
    recompute: bool,
    accumulates: bool = False,
    autocast: str | None = None,
    labels: int = 0,
    padded: bool = False,
    delta_kernels: bool = True,
) -> Step:
    """Traces ``ForCausalLM`` (``ForMaskedLM`` for BERT) of ``config`` on ids (b, s), with AdamW (foreach); with
    ``labels``, ``ForSequenceClassification`` and one label of each sequence.

    ``flash`` is transformers' ``sdpa``. With ``accumulates`` an earlier micro-batch has left gradients. ``autocast`` is
    the dtype of one around the model's call. ``padded`` hands the model an attention mask (b, s) with zeros.
    ``delta_kernels``: gated delta nets run their packages' kernels.
    """
    steps: list[Step] = []

    def body(trace: Trace, follow: Follow) -> None:
        model = _model(config, dtype, "sdpa" if flash else "eager", labels, delta_kernels)
        if recompute:
            model.activation_checkpointing_enable()
        parameters = list(model.parameters())
        reached = [parameter for name, parameter in model.named_parameters() if IDLE not in name]
        for tensor in (*parameters, *model.buffers()):
            follow.adopt(tensor, "state")
        key = tuple((parameter.shape, parameter.dtype) for parameter in parameters)
        optimizer, states = torch.optim.AdamW(parameters, foreach=True), []
        ids = of_ids = torch.randint(0, config.vocab_size, (b, s))
        if labels:
            of_ids = torch.randint(0, labels, (b,)) if labels > 1 else torch.rand(b, dtype=DTYPES[dtype])
        given = {"attention_mask": torch.ones((b, s), dtype=torch.int64)} if padded else {}
        if key in _updates:
            states = [torch.zeros_like(parameter) for parameter in reached for _ in range(2)]
        else:
            for parameter in reached:
                parameter.grad = torch.empty_like(parameter)
            update(optimizer, trace)
        if accumulates:
            for parameter in reached:
                parameter.grad = torch.empty_like(parameter)
        gc.collect()
        before, start = trace.live, len(trace.changes)
        with cuda_autocast(autocast):
            out = model(input_ids=ids, labels=of_ids, **given)
        loss = out.loss
        del out
        middle = len(trace.changes)
        with cuda_lists() if autocast else nullcontext():  # recompute enters autocast again
            loss.backward()
        end = len(trace.changes)
        if key not in _updates:
            update(optimizer, trace)
        del loss, states
        _updates.setdefault(key, trace.changes[end:])
        count = sum(parameter.numel() for parameter in parameters)
        changes = trace.changes
        steps.append(Step(count, before, changes[start:middle], changes[middle:end], _updates[key]))
        trace.changes = []

    with _quiet(), _unpacked(), _with_zeros() if padded else nullcontext():
        run(body)
    return steps[0]


def begin(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, trace: Trace) -> None:
    """The states of Adam as its first step makes them (``_init_group``)."""
    trace.host = True
    count = torch.tensor(0.0)
    trace.host = False
    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[parameter] = {"step": count, **moments}


def update(optimizer: torch.optim.Optimizer, trace: Trace, *, keeps_gradients: bool = False) -> None:
    """``step()`` and ``zero_grad()``; the counters of steps are on the host."""
    trace.host = True
    optimizer.step()
    trace.host = False
    optimizer.zero_grad(set_to_none=not keeps_gradients)


@contextmanager
def _unpacked() -> Iterator[None]:
    """Rows of one sequence each, which ``find_packed_sequence_indices`` cannot see on fake tensors."""
    find = masking_utils.find_packed_sequence_indices

    def found_none(position_ids: torch.Tensor) -> None:
        find(position_ids)

    with patch.object(masking_utils, "find_packed_sequence_indices", found_none):
        yield


@contextmanager
def _with_zeros() -> Iterator[None]:
    """Attention masks with zeros, which nobody looks for on fake tensors (``is_tracing``), where ``fast_all`` could not
    see them."""
    whole = masking_utils.fast_all

    def found_zeros(tensor: torch.Tensor) -> bool:
        whole(tensor)
        return False

    zeros = patch.object(masking_utils, "fast_all", found_zeros)
    with zeros, patch.object(masking_utils, "is_tracing", lambda _: False):
        yield


def _model(
    config: transformers.PreTrainedConfig, dtype: str, attention: str, labels: int = 0, kernels: bool = True
) -> Any:
    auto: Any = transformers.AutoModelForMaskedLM if config.model_type == "bert" else transformers.AutoModelForCausalLM
    if labels:
        auto = transformers.AutoModelForSequenceClassification
        config.num_labels, config.pad_token_id = labels, 0
    with initialization.no_init_weights():
        model = auto.from_config(config, dtype=DTYPES[dtype], attn_implementation=attention)
    model.tie_weights()
    if hasattr(config, "linear_num_value_heads"):
        delta_kernels.restore()
        if kernels:
            delta_kernels.install(model)
    model.config.use_cache = False
    return in_order(model).train()


def in_order(model: Any) -> Any:
    """Rotary tables of layers with a window first: Gemma 4 makes them in the order of a set of words, which is another
    one in each process (``Gemma4TextModel.forward``, ``unique_layer_types``)."""
    base = model.base_model
    if hasattr(base, "unique_layer_types"):
        base.unique_layer_types = sorted(base.unique_layer_types, reverse=True)
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers logs about configurations as small as these."""
    logging: Any = transformers.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
