"""Layers that differ from one another (``heterogeneous_layer_specs.py``): each against the real one, event by event."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from .test_local_layer import LLAMA, NO_BIAS, compare, shape_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed")


@pytest.fixture(autouse=True)
def _stand_ins() -> Iterator[None]:
    from ...oracle.megatron import megatron_with_stand_ins

    with megatron_with_stand_ins():
        yield


BLOCKS = ("2:640", "2:1280", "none:640", "2:none", "linear:640", "2:linear", "linear:linear", "none:linear")
PARALLEL: dict[str, dict[str, Any]] = {"alone": {}, "tensor-parallel": {"t": 2, "gradient_fusion": True}}


@pytest.mark.parametrize("ranks", PARALLEL)
@pytest.mark.parametrize("text", BLOCKS)
def test_real_layer(text: str, ranks: str) -> None:
    compare(shape_of(LLAMA, PARALLEL[ranks]), False, text)


@pytest.mark.parametrize("text", ["2:1280", "none:640", "2:none"])
def test_real_layer_with_sequence_parallelism(text: str) -> None:
    """LayerNorm, since RMSNorm has none in local layers."""
    compare(shape_of({"activation": "swiglu", **NO_BIAS}, {"t": 2, "sequence_parallel": True}), False, text)


def test_real_linear_layers_stop_with_sequence_parallelism() -> None:
    """``F.pad`` counts dimensions from the last: the first one gets the zeros of the others' features."""
    with pytest.raises(RuntimeError, match="broadcast"):
        compare(shape_of({"activation": "swiglu", **NO_BIAS}, {"t": 2, "sequence_parallel": True}), False, "2:linear")


@pytest.mark.parametrize("text", ["none:640", "linear:none", "linear:linear"])
def test_real_recomputed_layer(text: str) -> None:
    compare(shape_of(LLAMA, {}), True, text)


def test_linear_layers_with_a_bias() -> None:
    compare(shape_of({"activation": "swiglu"}, {}), False, "linear:linear")


@pytest.mark.parametrize("whole", [False, True])
def test_a_layer_with_nothing(whole: bool) -> None:
    """As in Llama-3.1-Nemotron-Ultra, half of whose layers are empty."""
    compare(shape_of(LLAMA, {}), whole, "none:none")
