"""What bitsandbytes' optimizers keep, on the device and in unified memory, beside the real ones on fake tensors."""

from __future__ import annotations

import pytest

from memplan.layers.module import Parameter
from memplan.optimizers.base import optimizer_states
from memplan.optimizers.bitsandbytes import managed_bytes, quantisation_maps
from memplan.plan.plan import Optimizer, OptimizerName

MODEL = [
    Parameter("word.weight", (4000, 48)),
    Parameter("norm.weight", (48,)),
    Parameter("small.weight", (85, 48)),
    Parameter("just.weight", (64, 64)),
    Parameter("odd.weight", (101, 99)),
    Parameter("large.weight", (1000, 100)),
    Parameter("larger.weight", (4100, 48)),
]
"""Below and from 4096 elements (8 bits), and below and from 100,000 (pages)."""


def on_device(optimizer: Optimizer) -> int:
    states = optimizer_states(optimizer, "bf16", embeddings_32bit=optimizer.embeddings_32bit)
    maps = sum(hold.bytes for hold in quantisation_maps(optimizer))
    return maps + sum(state.size(parameter) for parameter in MODEL for state in states)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("embeddings_32bit", [False, True])
@pytest.mark.parametrize("name", ["adamw", "adam8bit", "lion", "lion8bit"])
def test_states_equal_those_of_bitsandbytes(name: OptimizerName, embeddings_32bit: bool, paged: bool) -> None:
    """On bf16 parameters, exactly, but for maps, which the allocator rounds one by one."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    import torch
    from bitsandbytes import optim  # type: ignore[import-not-found, unused-ignore]

    from tests.oracle.optimizer_step import traced

    eight = name.endswith("8bit")
    kind = {"adamw": optim.AdamW32bit, "adam8bit": optim.AdamW8bit, "lion": optim.Lion32bit, "lion8bit": optim.Lion8bit}

    def make(tensors: list[torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
        manager = optim.GlobalOptimManager.get_instance()
        manager.initialize()
        made = kind[name](tensors, is_paged=paged)
        manager.register_parameters(tensors)
        if embeddings_32bit:
            manager.override_config(tensors[0], "optim_bits", 32)
        return [made]

    optimizer = Optimizer(
        name=name,
        implementation=None if eight else "bitsandbytes",
        block_size=256 if eight else None,
        embeddings_32bit=embeddings_32bit,
        paged=paged,
    )
    real = traced(make, MODEL, "bf16")
    assert on_device(optimizer) == real.states
    assert managed_bytes(optimizer, MODEL) == real.managed
    assert not real.second


def test_a_moment_costs_a_byte_and_a_scale_a_block() -> None:
    """2^22 elements: Adam 2 x (2^22 + 4 x 2^22 / 256), Lion the half, and 1 KiB of map for each."""
    n = 2**22
    large = [Parameter("large.weight", (2048, 2048))]
    adam, lion = (Optimizer(name=name, block_size=256) for name in ("adam8bit", "lion8bit"))
    for optimizer, moments in ((adam, 2), (lion, 1)):
        states = optimizer_states(optimizer, "bf16", embeddings_32bit=True)
        assert sum(state.size(large[0]) for state in states) == moments * (n + 4 * n // 256)
        assert sum(hold.bytes for hold in quantisation_maps(optimizer)) == moments * 1024
    paged = Optimizer(name="adam8bit", block_size=256, paged=True)
    states = optimizer_states(paged, "bf16", embeddings_32bit=True)
    assert sum(state.size(large[0]) for state in states) == 2 * 4 * n // 256
    assert managed_bytes(paged, large) == 2 * n
    assert managed_bytes(adam, large) == 0


def test_adafactor_keeps_rows_and_columns() -> None:
    """(4096, 1024) bf16: transformers' in fp32 4 (4096 + 1024) bytes and 512 for its scale, PyTorch's in bf16."""
    matrix = Parameter("up.weight", (4096, 1024))
    for implementation, expected in (("transformers", 4 * 5120 + 512), ("foreach", 2 * 5120)):
        optimizer = Optimizer.model_validate({"name": "adafactor", "implementation": implementation})
        states = optimizer_states(optimizer, "bf16", embeddings_32bit=True)
        assert sum(state.size(matrix) for state in states) == expected
