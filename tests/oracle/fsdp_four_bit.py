"""An iteration on bitsandbytes' 4-bit weights and peft's adapters under PyTorch's ``fully_shard``.

Tensors are real and on the CPU, as in ``four_bit_step``; weights are packed into bf16, which ``fully_shard`` can cut.
"""

from __future__ import annotations

import gc
import warnings
from typing import Any
from unittest.mock import patch

import bitsandbytes
import peft
import torch
import transformers
from torch.distributed.fsdp import fully_shard

from .four_bit_step import LOOKED_AT, FollowFourBit, _quantised
from .fsdp import ResizedFollow, Sharding, Steps, _cut, fake_ranks, mesh_of, resizing
from .tracer import Trace, cuda_behaviour
from .training_step import _model, _quiet, _unpacked, update
from .tuned_step import blocks


class _Follow(FollowFourBit, ResizedFollow):
    """Sees what ``gemm_4bit`` does on CUDA, and storages that are resized."""


def traced_sharded_four_bit(
    config: transformers.PreTrainedConfig,
    b: int,
    s: int,
    adapters: peft.LoraConfig,
    sharding: Sharding,
    *,
    double: bool,
    recompute: bool,
) -> Steps:
    """The second iteration of one micro-batch of ids (b, s), with AdamW (foreach) on fp32 adapters; eager attention."""
    trace, steps = Trace(), Steps()
    bitsandbytes.functional.name2qmap.clear()
    settings = transformers.BitsAndBytesConfig

    def in_bf16(**given: Any) -> Any:
        return settings(**given, bnb_4bit_quant_storage=torch.bfloat16)

    with _quiet(), _unpacked(), warnings.catch_warnings(), fake_ranks(sharding.shards):
        warnings.simplefilter("ignore")
        mesh = mesh_of(sharding)
        with (
            cuda_behaviour(),
            _Follow(trace) as follow,
            resizing(follow),
            patch.object(transformers, "BitsAndBytesConfig", in_bf16),
        ):
            whole = _quantised(_model(config, "bf16", "eager"), double, "bf16", "nf4")
            if recompute:
                whole.activation_checkpointing_enable()
            model = peft.get_peft_model(whole, adapters).train()
            for module in (*blocks(whole), model):
                fully_shard(module, mesh=mesh, mp_policy=sharding.policy)
            optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], foreach=True)
            ids = torch.randint(0, config.vocab_size, (b, s))
            gc.collect()
            for _ in range(2):
                trace.changes, steps.before, steps.stretches = [], trace.live, []
                loss = model(input_ids=ids, labels=ids).loss
                trace.changes = [one for one in trace.changes if one.op not in LOOKED_AT]
                _cut(trace, steps)
                loss.backward()
                del loss
                _cut(trace, steps)
                update(optimizer, trace)
                _cut(trace, steps)
                steps.end = trace.live
    return steps
