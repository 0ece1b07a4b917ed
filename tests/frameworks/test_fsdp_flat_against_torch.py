"""FSDP1's own hooks on frozen layers: what they keep alive in backward, and when they gather."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from memplan.estimate import programs_of
from memplan.layers.module import Options
from memplan.optimizers.bitsandbytes import MIN_8BIT_SIZE
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Category, rounded
from memplan.tape.program import static

LAYERS, CPU = 4, torch.device("cpu")


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """This process is rank 0 of two, whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


class Model(torch.nn.Module):
    """Frozen layers, each a unit that is recomputed, on an input that requires a gradient."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.counts: list[int] = []
        frozen = [torch.nn.Linear(8, 8, bias=False).requires_grad_(False) for _ in range(LAYERS)]
        self.layers = torch.nn.ModuleList(
            FullyShardedDataParallel(one, use_orig_params=True, device_id=CPU) for one in frozen
        )
        self.root = torch.nn.Linear(8, 8, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.root(x).requires_grad_()
        for layer in self.layers:
            x = checkpoint.checkpoint(layer, x, use_reentrant=self.reentrant)
            x.register_hook(lambda gradient: self.counts.append(gathered(self)))
        return x.sum()


def gathered(model: Any) -> int:
    """Layers whose flat parameter is there as a whole."""
    flats = [layer._handle.flat_param._full_param_padded for layer in model.layers]
    return sum(flat.untyped_storage().size() > 0 for flat in flats)


@pytest.mark.usefixtures("two_ranks")
def test_a_frozen_units_hook_keeps_leaves_and_their_gradients() -> None:
    leaves: list[weakref.ref[torch.Tensor]] = []
    found: list[tuple[int, int]] = []
    detach = checkpoint.detach_variable

    def detached(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        made = detach(inputs)
        leaves.append(weakref.ref(made[0]))
        alive = [leaf() for leaf in leaves]
        found.append(
            (sum(one is not None for one in alive), sum(one is not None and one.grad is not None for one in alive))
        )
        return made

    with warnings.catch_warnings(), patch.object(checkpoint, "detach_variable", detached):
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(Model(reentrant=True), use_orig_params=True, device_id=CPU)
        model(torch.randn(2, 8)).backward()
    assert found == [(n, n - 1) for n in range(1, LAYERS + 1)]
    assert all(leaf() is None for leaf in leaves)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(("reentrant", "most"), [(True, 1), (False, 3)])
def test_layers_gathered_at_once_in_backward(reentrant: bool, most: int) -> None:
    """The next one is gathered ahead, before the last one ends, unless forward ran without a graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = FullyShardedDataParallel(Model(reentrant), use_orig_params=True, device_id=CPU)
        loss = model(torch.randn(2, 8))
        inner = model.module
        for layer in inner.layers:
            layer.module.register_forward_hook(lambda *args: inner.counts.append(gathered(inner)))
        loss.backward()
    assert max(inner.counts) == most


@pytest.mark.parametrize("tied", [False, True])
def test_pieces_of_parameters_on_each_rank(tied: bool) -> None:
    """What bitsandbytes' optimizers see of a Llama on four ranks, wrapped as Accelerate does."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=1003, tie_word_embeddings=tied,
    )  # fmt: skip
    sizes = {"hidden": "64", "heads": "4", "kv-heads": "2", "head-dim": "16", "ffn": "160", "vocab": "1003"}
    shape = {"model": "llama-2-7b", "layers": "2", **sizes, "tied-embeddings": str(tied).lower(), "dtype": "fp32"}
    flags = {**shape, "framework": "fsdp", "fsdp-version": "1", "gpus": "4", "optimizer": "adam8bit"}
    plan = resolve(read_plan(None, flags).plan)
    (program,) = programs_of(plan, Options())
    held: list[int] = []
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            policy = ModuleWrapPolicy({LlamaDecoderLayer})
            model: Any = FullyShardedDataParallel(
                LlamaForCausalLM(config), auto_wrap_policy=policy, use_orig_params=True, device_id=CPU
            )
        dist.destroy_process_group()
        table = model.module.get_input_embeddings().weight
        pieces = [(one, one.numel()) for one in model.parameters() if one.numel()]
        bytes_of = (
            4 * size if one is table or size < MIN_8BIT_SIZE else rounded(size) + rounded(4 * -(-size // 256))
            for one, size in pieces
        )
        held.append(sum(2 * rounded(size) for size in bytes_of))
    maps = 2 * 256 * 4
    assert len(set(held)) == 4
    assert static(program).net_by[Category.OPTIMIZER_STATES] == max(held) + maps
