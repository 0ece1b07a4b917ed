"""Kernels of a router's logits (``moe_utils.py``, ``RouterGatingLinearFunction``, over ``te_general_gemm``)."""

from __future__ import annotations

from memplan.layers.megatron_core.router import gating_work
from memplan.layers.work import WIDENED, Product, Stream

T, E, H = 4096, 256, 7168
"""A sequence of DeepSeek-V3."""


def test_one_dtype_has_no_casts() -> None:
    work = gating_work(T, E, H, "bf16", "bf16")
    assert work.forward == (Product(T, E, H),)
    assert work.backward == (Product(T, H, E), Product(E, H, T))


def test_logits_in_fp32_are_of_16_bit_factors_and_gradients_of_tf32() -> None:
    """Input and weight are read in 2 bytes and written in 4, and their gradients the other way: 6 bytes an element."""
    work = gating_work(T, E, H, "bf16", "fp32")
    assert work.forward == (Product(T, E, H, 1, 2, 4),)
    gradients = (Product(T, H, E, 1, 4, tf32=True), Product(E, H, T, 1, 4, tf32=True))
    widened = (Stream(6 * T * H, issue=WIDENED.of(T * H)), Stream(6 * E * H, issue=WIDENED.of(E * H)))
    assert work.backward == (*widened, *gradients, Stream(6 * T * H), Stream(6 * E * H))


def test_fp64_is_no_tensor_cores() -> None:
    """``torch.mm`` on copies, forward, too."""
    work = gating_work(T, E, H, "bf16", "fp64")
    assert Product(T, E, H, 1, 8) in (work.forward or ())
    assert not any(isinstance(one, Product) and one.tf32 for one in (*(work.forward or ()), *(work.backward or ())))


def test_all_in_fp32_is_tf32() -> None:
    """``cublaslt_gemm.cu``: where both factors and the result are in fp32."""
    work = gating_work(T, E, H, "fp32", "fp32")
    assert all(isinstance(one, Product) and one.tf32 for one in (*(work.forward or ()), *(work.backward or ())))
