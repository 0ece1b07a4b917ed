"""What trl's DPOTrainer, SFTTrainer and RewardTrainer hold under ``fully_shard``, and DPOTrainer under FSDP1, on real
tensors of the CPU, rank 0 of several whose collectives do nothing: written to JSON, since trl is no dependency.

The policy is sharded as Accelerate shards it, layer by layer; a second model as trl shards it (``models/utils.py``,
``prepare_fsdp``): one unit of ``fully_shard``, or wrapped as the policy by FSDP1. Run with trl 1.16 (and datasets)
importable, or with 1.13 for its loss of whole logits: ``python -m tests.oracle.trl_fsdp``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch.distributed.fsdp import FullyShardedDataParallel, _flat_param, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from .fsdp import ResizedFollow, Sharding, fake_ranks, mesh_of, resizing, shard_ends
from .tracer import Trace
from .trl_step import LENGTH, LLAMA, OUTPUTS, PAIRS, SAMPLES, averaged, fused, paired, policy, scored, scorer
from .tuned_step import blocks

STEPS = Path(__file__).parents[1] / "frameworks" / "trl_fsdp_steps.json"
ALONE_STEPS = Path(__file__).parents[1] / "frameworks" / "trl_fsdp_alone_steps.json"
FLAT_STEPS = Path(__file__).parents[1] / "frameworks" / "trl_flat_steps.json"
WHOLE_STEPS = Path(__file__).parents[1] / "frameworks" / "trl_whole_fsdp_steps.json"
RANKS = 4


def step(
    *, adapters: bool, precomputed: bool, recompute: bool, mixed: bool, reshard: bool, apart: bool = False
) -> dict[str, Any]:
    """Bytes before the second iteration, and how much more its forward with the loss and its backward hold at most."""
    add_head = fused()
    stored = torch.float32 if mixed else torch.bfloat16
    sharding = Sharding(shards=RANKS, original="bf16", param_dtype="bf16", reduce_dtype="bf16")
    model, base = policy(adapters=adapters, recompute=recompute)
    reference: Any = None
    if not adapters and not precomputed:
        reference = transformers.AutoModelForCausalLM.from_config(base.config, dtype=stored).eval()
        add_head(reference)
    add_head(base, outputs=tuple(OUTPUTS))
    model.to(stored)
    with fake_ranks(RANKS):
        mesh = mesh_of(sharding)
        for layer in blocks(base):
            fully_shard(layer, mesh=mesh, mp_policy=sharding.policy, reshard_after_forward=reshard)
        whole(model, {"mesh": mesh, "mp_policy": sharding.policy}, reshard, apart)
        if reference is not None:
            fully_shard(reference, mesh=mesh, mp_policy=sharding.policy, reshard_after_forward=reshard)
            reference.eval()
        loss = paired(model, reference, precomputed=precomputed)
        ids = torch.randint(0, base.config.vocab_size, (2 * PAIRS, LENGTH))
        ones = torch.ones_like(ids)
        inputs = {"input_ids": ids, "attention_mask": ones, "completion_mask": ones.clone()}
        if precomputed:
            inputs |= {"ref_chosen_logps": torch.zeros(PAIRS), "ref_rejected_logps": torch.zeros(PAIRS)}
        trace = Trace()
        follow = ResizedFollow(trace)
        models = [one for one in (model, reference) if one is not None]
        for tensor in (*(x for one in models for x in (*one.parameters(), *one.buffers())), *inputs.values()):
            follow.adopt(tensor, "given")
        with follow, resizing(follow):
            for _ in range(2):
                before, start = trace.live, len(trace.changes)
                found = loss(model, inputs)
                middle = len(trace.changes)
                found.backward()
                del found
                for one in model.parameters():
                    one.grad = None
        live, most = 0, [0, 0]
        for at, change in enumerate(trace.changes[start:], start):
            live += change.sign * change.bytes
            most[at >= middle] = max(most[at >= middle], live)
    how = {"adapters": adapters, "precomputed": precomputed, "recompute": recompute, "mixed": mixed, "reshard": reshard}
    how |= {"apart": True} if apart else {}
    return how | {"before": before, "forward": most[0], "backward": most[1]}


def whole(model: Any, how: dict[str, Any], reshard: bool, apart: bool) -> None:
    """The model, behind its layers; as Accelerate does since 1.14, if ``apart``."""
    if apart:
        shard_ends(model, how, reshard)
        fully_shard(model, **how)
    else:
        fully_shard(model, **how, reshard_after_forward=reshard)


def alone(*, loop: str, adapters: bool, recompute: bool, apart: bool = False) -> dict[str, Any]:
    """The same of ``SFTTrainer`` and ``RewardTrainer``, which have no reference, in 16 bits."""
    add_head = fused()
    if loop == "reward":
        model = scorer(LLAMA, "bfloat16", adapters=adapters, recompute=recompute)
        base = model.get_base_model() if adapters else model
    else:
        model, base = policy(adapters=adapters, recompute=recompute)
        add_head(base, outputs=("log_probs", "entropy", "is_top1"))
    how: dict[str, Any] = {"loop": loop, "adapters": adapters, "recompute": recompute}
    how |= {"apart": True} if apart else {}
    made = partial(scored, pairs=PAIRS) if loop == "reward" else partial(averaged, samples=SAMPLES)
    return how | sharded(model, base, partial(made, length=LENGTH), apart=apart)


def sharded(
    model: Any, base: Any, made: Callable[[Any], tuple[Callable[[Any, Any], Any], dict[str, Any]]], *, apart: bool
) -> dict[str, Any]:
    """Peaks of the loss of ``model``, in 16 bits and shards, and its backward; ``made`` has loss and batch for it."""
    model.to(torch.bfloat16)
    sharding = Sharding(shards=RANKS, original="bf16", param_dtype="bf16", reduce_dtype="bf16")
    with fake_ranks(RANKS):
        mesh = mesh_of(sharding)
        for one in blocks(base):
            fully_shard(one, mesh=mesh, mp_policy=sharding.policy, reshard_after_forward=True)
        whole(model, {"mesh": mesh, "mp_policy": sharding.policy}, True, apart)
        loss, inputs = made(model)
        trace = Trace()
        follow = ResizedFollow(trace)
        for tensor in (*model.parameters(), *model.buffers(), *inputs.values()):
            follow.adopt(tensor, "given")
        with follow, resizing(follow):
            for _ in range(2):
                start = len(trace.changes)
                found = loss(model, inputs)
                middle = len(trace.changes)
                found.backward()
                del found
                for one in model.parameters():
                    one.grad = None
    live, most = 0, [0, 0]
    for at, change in enumerate(trace.changes[start:], start):
        live += change.sign * change.bytes
        most[at >= middle] = max(most[at >= middle], live)
    return {"forward": most[0], "backward": most[1]}


@contextlib.contextmanager
def resizing_flat(follow: ResizedFollow) -> Iterator[None]:
    """FSDP1's ``_alloc_storage`` and ``_free_storage`` reported to ``follow``."""
    alloc, free = _flat_param._alloc_storage, _flat_param._free_storage

    def allocated(tensor: torch.Tensor, size: torch.Size) -> None:
        there = tensor.untyped_storage().size() > 0
        alloc(tensor, size)
        if not there:
            follow.adopt(tensor, "fsdp.unsharded")

    def freed(tensor: torch.Tensor) -> None:
        if tensor.untyped_storage().size():
            follow.freed(tensor)
        free(tensor)

    with patch.object(_flat_param, "_alloc_storage", allocated), patch.object(_flat_param, "_free_storage", freed):
        yield


def flat_step(*, adapters: bool, precomputed: bool, recompute: bool) -> dict[str, Any]:
    """The same under FSDP1, in 16 bits, of a policy that is trained whole, and of a second model, whose root stays."""
    add_head = fused()
    model, base = policy(adapters=adapters, recompute=recompute)
    model.to(torch.bfloat16)
    models = [model]
    if not adapters and not precomputed:
        reference: Any = transformers.AutoModelForCausalLM.from_config(base.config, dtype=torch.bfloat16).eval()
        add_head(reference)
        models.append(reference)
    add_head(base, outputs=tuple(OUTPUTS))
    wraps = partial(transformer_auto_wrap_policy, transformer_layer_cls={type(blocks(base)[0])})
    if adapters:
        from peft.utils.other import fsdp_auto_wrap_policy

        wraps = fsdp_auto_wrap_policy(model)
    with fake_ranks(RANKS):
        wrapped: list[Any] = [
            FullyShardedDataParallel(one, auto_wrap_policy=wraps, use_orig_params=True, device_id=torch.device("cpu"))
            for one in models
        ]
        for one in wrapped[1:]:
            one.eval()
        loss = paired(wrapped[0], wrapped[1] if wrapped[1:] else None, precomputed=precomputed)
        ids = torch.randint(0, base.config.vocab_size, (2 * PAIRS, LENGTH))
        ones = torch.ones_like(ids)
        inputs = {"input_ids": ids, "attention_mask": ones, "completion_mask": ones.clone()}
        if precomputed:
            inputs |= {"ref_chosen_logps": torch.zeros(PAIRS), "ref_rejected_logps": torch.zeros(PAIRS)}
        trace = Trace()
        follow = ResizedFollow(trace)

        def passed() -> torch.Tensor:
            for one in wrapped[0].parameters():
                one.grad = None
            return loss(wrapped[0], inputs)

        passed().backward()
        units = FullyShardedDataParallel
        flats: list[Any] = [unit._handle.flat_param for one in wrapped for unit in units.fsdp_modules(one)]
        kept = [one._full_param_padded for one in flats if one._full_param_padded.untyped_storage().size()]
        for one in wrapped[0].parameters():
            one.grad = None
        buffers = [x for one in models for x in one.buffers()]
        for tensor in (*(one._local_shard for one in flats), *kept, *buffers, *inputs.values()):
            follow.adopt(tensor, "given")
        with follow, resizing_flat(follow):
            before, start = trace.live, len(trace.changes)
            found = passed()
            middle = len(trace.changes)
            found.backward()
        live, most = 0, [0, 0]
        for at, change in enumerate(trace.changes[start:], start):
            live += change.sign * change.bytes
            most[at >= middle] = max(most[at >= middle], live)
    how = {"adapters": adapters, "precomputed": precomputed, "recompute": recompute}
    return how | {"before": before, "forward": most[0], "backward": most[1]}


def of_whole_logits() -> None:
    """Of a release before 1.15, 1.13."""
    how = {"mixed": False, "reshard": True}
    steps = [
        step(adapters=True, precomputed=False, recompute=True, **(how | {"mixed": True})),
        step(adapters=False, precomputed=False, recompute=False, **how),
        step(adapters=False, precomputed=True, recompute=False, **(how | {"reshard": False})),
        step(adapters=False, precomputed=False, recompute=True, **(how | {"mixed": True})),
    ]
    steps += [
        {"flat": True, **flat_step(adapters=a, precomputed=p, recompute=r)}
        for a, p, r in ((False, False, False), (False, True, True), (True, False, True))
    ]
    WHOLE_STEPS.write_text(json.dumps(steps, indent=1) + "\n")


def main() -> None:
    import trl.trainer.utils as utils

    both = (False, True)
    if not hasattr(utils, "add_fused_lm_head"):
        of_whole_logits()
        return
    steps = [
        step(adapters=a, precomputed=p, recompute=r, mixed=r, reshard=s)
        for a in both
        for p in both
        for r in both
        for s in both
    ]
    steps += [
        step(adapters=a, precomputed=p, recompute=r, mixed=r, reshard=True, apart=True)
        for a in both
        for p in both
        for r in both
    ]
    STEPS.write_text(json.dumps(steps, indent=1) + "\n")
    steps = [
        alone(loop=one, adapters=a, recompute=r, apart=apart)
        for apart in both
        for one in ("sft", "reward")
        for a in both
        for r in both
    ]
    ALONE_STEPS.write_text(json.dumps(steps, indent=1) + "\n")
    steps = [flat_step(adapters=a, precomputed=p, recompute=r) for a in both for p in both for r in both]
    FLAT_STEPS.write_text(json.dumps(steps, indent=1) + "\n")


if __name__ == "__main__":
    main()
