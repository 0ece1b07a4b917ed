"""Unsloth's functions for LoRA on 4-bit weights: by hand, and beside fms-acceleration's own code on fake tensors."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memplan.layers.autograd import Recorder, Tensor
from memplan.layers.fused_lora import work_of
from memplan.layers.quantised import Gptq
from memplan.layers.tuning import Adapters, FourBit, Layer, Packed, Tuning, fused
from memplan.layers.work import Product
from memplan.tape.events import Drop, Hold, Seam, Tape, fold
from tests.oracle.optimizer_step import DTYPES
from tests.oracle.tracer import Change
from tests.oracle.triton_functions import Excursions, excursion, followed, loaded

B, S, K, RANK = 2, 1024, 256, 4
OUTPUTS = {"query": 256, "key": 64, "value": 64}
FMS = "fms_acceleration_foak"
BNB, GPTQ = FourBit("bf16", True), Gptq("fp16", 128, casts=False, flushed=256_000_000)
SLACK = 16 * RANK * K * 4
"""Adapters' gradients: the engine casts them, and lays them out anew."""


def recorded(packed: Packed, names: list[str], dropout: float) -> Excursions:
    return Excursions(*((one.net, one.peak) for one in map(fold, tapes(packed, names, dropout))))


def tapes(packed: Packed, names: list[str], dropout: float, *, kernels: bool = False) -> tuple[Tape, Tape]:
    """Of forward and of backward. ``kernels``: as CUDA's allocate."""
    adapters = Adapters(RANK, frozenset(names), dropout, "fp32")
    tuning = Tuning(adapters=adapters, four_bit=packed, fused=True)
    r = Recorder(accumulates_in_place=False, autocast=packed.dtype, tuning=tuning, kernel_workspaces=kernels)
    x, _ = r.leaf(r.outside((B, S, K), packed.dtype))
    outputs = fused(r, x, *(Layer(name, OUTPUTS[name], False, False) for name in names))
    forward, middle = r.tape(), len(r.events)
    given = [r.outside(one.shape, one.dtype) for one in outputs]
    root = Tensor(x.storage, (), "fp32", r.node(outputs, (), lambda r, gradients: given))
    r.backward([root], [r.outside((), "fp32")])
    backward = r.tape(middle)
    r.close()
    return forward, backward


def test_queries_keys_and_values_by_hand() -> None:
    """Forward leaves the outputs and what dropout left for each of them; its peak is in the last, where dropout makes
    a mask of one byte an element."""
    forward, backward = recorded(BNB, [*OUTPUTS], 0.1)
    tokens = B * S
    left = 2 * tokens * (sum(OUTPUTS.values()) + 3 * K)
    assert forward[0] == left
    assert forward[1] == left + tokens * K
    assert backward[0] == -2 * tokens * 3 * K + sum(4 * RANK * (K + n) for n in OUTPUTS.values())


def test_products_by_hand() -> None:
    """Forward and backward multiply the tokens with each weight once. Of an adapter's two matrices each is in one
    product forward, and in three backward: gradients of both, and of the input."""
    layers = [Layer(name, n, False, False) for name, n in OUTPUTS.items()]
    adapters, tokens = Adapters(RANK, frozenset(OUTPUTS), 0.1, "fp32"), B * S
    done = work_of(tokens, K, layers, adapters, "bf16", BNB.functions)
    low = sum(2 * tokens * RANK * (K + n) for n in OUTPUTS.values())
    whole = sum(2 * tokens * K * n for n in OUTPUTS.values())
    for kernels, times in ((done.forward, 1), (done.backward, 3)):
        assert sum(one.flops for one in kernels or () if isinstance(one, Product)) == whole + times * low


def test_gptq_dequantises_all_three_weights_first() -> None:
    whole = 2 * K * sum(OUTPUTS.values())
    ahead = recorded(GPTQ, [*OUTPUTS], 0.0).forward[1] - recorded(BNB, [*OUTPUTS], 0.0).forward[1]
    assert ahead == pytest.approx(whole, abs=SLACK)


def test_without_dropout_one_input_is_saved() -> None:
    tokens = B * S
    assert recorded(BNB, [*OUTPUTS], 0.0).forward[0] == 2 * tokens * sum(OUTPUTS.values())


def test_the_mask_of_dropout_comes_before_what_it_leaves() -> None:
    """``dropout_cuda`` (``Dropout.cu``) makes the mask, then the result; fake tensors the other way round."""
    forward, _ = tapes(BNB, ["query"], 0.1, kernels=True)
    made = [one.name for one in forward if isinstance(one, Hold) and "dropout" in one.name]
    assert made == ["query_lora_dropout_mask", "query_lora_dropout"]


def test_a_kernel_of_gptq_is_tuned_for_each_number_of_elements() -> None:
    """``triton.autotune`` of ``dequant_kernel_248`` with ``key=["numels"]``: keys have as many elements as values."""
    forward, _ = tapes(GPTQ, [*OUTPUTS], 0.1, kernels=True)
    tuned = {one.name: one.once for one in forward if isinstance(one, Seam) and one.once}
    assert tuned == {f"tunes/fast_lora/{n * K}": 256_000_000 for n in (256, 64)}
    assert not any(isinstance(one, Seam) and one.once for tape in tapes(GPTQ, [*OUTPUTS], 0.1) for one in tape)


def test_a_packed_weight_of_gptq() -> None:
    """Of 4096 inputs and 14336 outputs in groups of 128: half a byte an element; 32 zeros of half a byte and 32 scales
    of 2 bytes for each output; 4 bytes for each input."""
    weight = (14336, 4096)
    assert GPTQ.packed(weight) == (14336 * 4096 // 2, 14336 * 32 // 2)
    assert GPTQ.packed_bytes(weight) == 14336 * 4096 // 2 + 14336 * 32 // 2
    assert GPTQ.beside(weight) == {"scales": 14336 * 32 * 2, "g_idx": 4096 * 4}


# -- beside their own code --------------------------------------------------------------------------


def _bitsandbytes() -> Any:
    """``fast_lora``, with a library that dequantises nothing."""
    utils = loaded(FMS, "fused_ops.unsloth_lora.utils")
    for name in ("cdequantize_blockwise_fp32", "cdequantize_blockwise_bf16_nf4", "get_ptr"):
        setattr(utils, name, lambda *args: None)
    utils.torch, utils.ctypes = torch, ctypes  # which it imports beside bitsandbytes
    return loaded(FMS, "fused_ops.unsloth_lora.bnb.fast_lora")


def _weight(n: int) -> tuple[Any, ...]:
    """Of bitsandbytes, packed, with its state."""
    blocks = -(-n * K // 64)
    inner = SimpleNamespace(absmax=None, code=None, blocksize=256)
    state = SimpleNamespace(
        absmax=torch.empty(blocks, device="meta"), shape=(n, K), dtype=torch.bfloat16, blocksize=64, offset=0.0,
        state2=inner,
    )  # fmt: skip
    return torch.empty(n * K // 2, 1, dtype=torch.uint8, device="meta"), state


def _packed(n: int) -> tuple[Any, ...]:
    """Of GPTQ, with its bits."""
    shapes = ((K // 8, n), (K // 128, n), (K // 128, n // 8), (K,))
    return (*(torch.empty(shape, device="meta") for shape in shapes), 4)


def real(packed: Packed, names: list[str], dropout: float) -> tuple[list[Change], list[Change]]:
    bits = packed is BNB
    module = _bitsandbytes() if bits else loaded(FMS, "fused_ops.unsloth_lora.gptq.fast_lora")
    function = module.LoRA_QKV if len(names) > 1 else module.LoRA_W
    drops = [torch.nn.Dropout(dropout) if dropout else torch.nn.Identity() for _ in names]
    weight = _weight if bits else _packed

    def run(x: torch.Tensor, *adapters: torch.Tensor) -> Any:
        given: list[Any] = []
        for at, name in enumerate(names):
            given += [*weight(OUTPUTS[name]), None, adapters[2 * at], adapters[2 * at + 1], 1.0]
        return function.apply(x, *given, *drops)

    dtype = DTYPES[packed.dtype]
    likes = [((B, S, K), dtype)]
    likes += [(shape, torch.float32) for name in names for shape in ((RANK, K), (OUTPUTS[name], RANK))]
    return followed(run, likes, autocast=dtype)


@pytest.mark.skipif(find_spec(FMS) is None, reason=f"{FMS} is not installed")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("names", [[*OUTPUTS], ["query"]], ids=["qkv", "o"])
@pytest.mark.parametrize("packed", [BNB, GPTQ], ids=["bitsandbytes", "gptq"])
def test_as_their_own_code(packed: Packed, names: list[str], dropout: float) -> None:
    changes = real(packed, names, dropout)
    mine, theirs = recorded(packed, names, dropout), Excursions(*map(excursion, changes))
    for one, other in zip((*mine.forward, *mine.backward), (*theirs.forward, *theirs.backward), strict=True):
        assert abs(one - other) <= SLACK, (mine, theirs)
    for tape, of in zip(tapes(packed, names, dropout), changes, strict=True):
        assert in_order(tape) == [one.sign * one.bytes for one in of if one.bytes > SLACK and not _is_given(one)]


def in_order(tape: Tape) -> list[int]:
    """Bytes of what is larger than ``SLACK``, negative where it ends."""
    sizes = ((1 if isinstance(one, Hold) else -1) * one.bytes for one in tape if isinstance(one, Hold | Drop))
    return [size for size in sizes if abs(size) > SLACK]


def _is_given(change: Change) -> bool:
    """A packed weight, which the caller makes anew."""
    return change.op == "aten.empty.memory_format" and change.dtype != "float16" and change.dtype != "bfloat16"
