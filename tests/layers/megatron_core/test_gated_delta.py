"""Gated delta nets against flash-linear-attention's and Megatron-Core's own Python, event by event, and by hand.

``gated_delta_golden.json`` holds what ``tests.oracle.gated_delta`` measured of the former (0.5.2, commit bc3b101). With
``MEMPLAN_FLA_SOURCE`` naming a folder with the package, it is measured again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from memplan.layers.autograd import Recorder, Tensor
from memplan.layers.megatron_core import block, gated_delta
from memplan.layers.megatron_core.shape import CoreShape
from memplan.layers.module import Interface, Module, Options, Run, build
from memplan.plan.count import parameters
from memplan.tape.events import Drop, Hold, rounded

from .gated_delta_cases import CASES, TORCH_SIZES, Case, TorchSize, run, shape, torch_inputs
from .test_te_modules import drops_sorted

FILE = Path(__file__).with_name("gated_delta_golden.json")
GOLDEN: dict[str, list[list[int]]] = json.loads(FILE.read_text())
SOURCE = "MEMPLAN_FLA_SOURCE"


def recorded(sizes: list[tuple[tuple[int, ...], str]], recipe: Any) -> list[list[int]]:
    """Signed sizes of what ``recipe`` holds and drops, forward and backward, of inputs whose gradients end there."""
    r = Recorder(accumulates_in_place=False)
    given = [r.outside(size, dtype) for size, dtype in sizes]
    leaves = [r.leaf(x)[0] for x in given]
    ended = [Tensor(x.storage, x.shape, x.dtype, r.node((x,), (), lambda r, gradients: [None])) for x in leaves]
    out = recipe(r, ended)
    middle = len(r.events)
    r.backward([out.alias()], [r.outside(out.shape, out.dtype)])
    parts = r.events[:middle], r.events[middle:]
    kinds = (Hold, Drop)
    return [
        [one.bytes if isinstance(one, Hold) else -one.bytes for one in part if isinstance(one, kinds)] for part in parts
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_those_of_flash_linear_attention(case: Case) -> None:
    at = case.at
    read = [(at.keys, "bf16"), (at.keys, "bf16"), (at.values, "bf16"), (at.heads, "fp32"), (at.heads, "bf16")]
    if case.part == "grouped rule":
        read[:2] = [(at.groups, "bf16")] * 2
    if "convolution" in case.part:
        read = [(at.channels, "bf16"), ((at.m, 1, at.kernel), "bf16")]
    own = recorded(read, partial(run, case=case))
    assert list(map(drops_sorted, own)) == list(map(drops_sorted, GOLDEN[str(case)]))


@pytest.mark.skipif(SOURCE not in os.environ, reason=f"{SOURCE} names no source of flash-linear-attention")
def test_golden_figures_are_those_of_the_source(tmp_path: Path) -> None:
    again = tmp_path / FILE.name
    command = [sys.executable, "-m", "tests.oracle.gated_delta", str(again)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[3])
    assert json.loads(again.read_text()) == GOLDEN


def in_torch(size: TorchSize) -> list[list[int]]:
    return recorded(torch_inputs(size), gated_delta.chunked)


def test_deterministic_rule_is_megatron_cores() -> None:
    assert list(map(drops_sorted, in_torch(TORCH_SIZES[0]))) == list(map(drops_sorted, GOLDEN["torch"]))


@pytest.mark.slow
@pytest.mark.parametrize("size", TORCH_SIZES, ids=str)
def test_deterministic_rule_is_traced_again(size: TorchSize) -> None:
    """``torch_chunk_gated_delta_rule`` of the installed release, whose lines are those of the commit that is cited."""
    pytest.importorskip("megatron.core", exc_type=ImportError)
    from ...oracle.gated_delta import measured_in_torch

    real = measured_in_torch(torch_inputs(size))
    assert list(map(drops_sorted, in_torch(size))) == list(map(drops_sorted, real))
    assert size != TORCH_SIZES[0] or real == GOLDEN["torch"]


# -- by hand -----------------------------------------------------------------------------------------------

TOKENS, H, Q, V, HEADS = 2 * 384, 512, 4 * 64, 8 * 64, 8
"""Of the layer of ``shape``: features of all queries and of all values."""


def of_layer(of: CoreShape) -> Module:
    """Its attention, with the norm before and the residual connection behind it."""
    interface = Interface((of.local_s, of.b, H), "bf16")

    def recipe(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(block.attention_block(r, x, of))

    return build("layer", recipe, interface, Options(keeps_input=True))


def kept(of: CoreShape) -> int:
    return of_layer(of).first.forward_fold.net


def test_what_a_layer_keeps_and_has() -> None:
    """In 16 bits its input and its norm; the projection, of 2 Q + 2 V + 2 x 8 features; queries and keys, normed, and
    each repeated for 8 heads of 64; values, the gate, what the rule gives, its norm, and their product; steps; each
    chunk's inverse, 64 numbers of a head for each token. In fp32 deviations of rows and of heads, reciprocal norms of 8
    heads of queries and keys, and sums of decays."""
    of = shape()
    wide = H + H + (2 * Q + 2 * V + 2 * HEADS) + 2 * Q + 2 * (HEADS * 64) + 5 * V + HEADS + 64 * HEADS
    assert kept(of) == TOKENS * (2 * wide + 4 * (1 + HEADS + 2 * 4 + HEADS))
    layer = of_layer(of)
    count = sum(one.elements for one in layer.parameters)
    assert count == H + H * (2 * Q + 2 * V + 16) + 4 * (2 * Q + V) + 2 * HEADS + 64 + V * H
    whole = parameters(of.spec)
    attention = 2 * H * (2 * 512 // 8 * 0 + 512) + 2 * H * 128 + H
    assert whole == 3 * count + attention + 4 * (3 * H * 1024 + H) + 2 * 1024 * H + H


def test_names_and_order_of_parameters() -> None:
    """``named_parameters`` of ``GatedDeltaNet``: its own, then those of modules in the order of ``__init__``."""
    names = [one.name.removeprefix("self_attention.") for one in of_layer(shape()).parameters]
    assert names == [
        "dt_bias", "A_log", "in_proj.layer_norm.weight", "in_proj.weight", "conv1d.weight", "out_norm.weight",
        "out_proj.weight",
    ]  # fmt: skip


def test_ranks_share_heads() -> None:
    """Tensor parallelism halves all but the norm's input and output; context parallelism exchanges to whole sequences
    of half of the heads, and keeps what it exchanges beside."""
    half = kept(shape(t=2, sequence_parallel=True))
    assert 2 * half - kept(shape()) <= 2048
    divided = kept(shape(s=192, cp=2))
    features = 2 * (2 * Q + 2 * V + 2 * HEADS) * TOKENS // 2
    assert abs(2 * divided - kept(shape())) <= 2 * 512 * 16, features


def test_recompute_of_the_gated_norm() -> None:
    """``gdn_norm_out`` keeps neither the norm, nor its deviations, nor the product."""
    saved = kept(shape()) - kept(shape(recompute_modules=("gdn_norm_out",)))
    assert saved == TOKENS * (2 * 2 * V + 4 * HEADS)


def test_deterministic_mode_keeps_each_row_of_the_inverse() -> None:
    """Rows of every chunk's matrix, and the squares above them that they are made of, are saved in fp32: the sum of i
    and i squared for i up to 63."""
    of = replace(shape(), deterministic=True)
    layer = of_layer(of)
    rows = [
        x for x in layer.first.forward if isinstance(x, Hold) and x.name.startswith(("row_cloned", "rows_above_cloned"))
    ]
    chunks = 2 * HEADS * 384 // 64
    assert sum(one.bytes for one in rows) == sum(rounded(4 * chunks * n) for i in range(1, 64) for n in (i, i * i))
    assert kept(of) > 3 * kept(shape())


def test_gradients_of_backward_end() -> None:
    """All that forward keeps is gone behind backward but the input's gradient."""
    for of in (
        shape(),
        replace(shape(), deterministic=True),
        shape(s=192, cp=2),
        shape(recompute_modules=("gdn_norm_out",)),
    ):
        layer = of_layer(of)
        gradients = sum(-(-2 * one.elements // 512) * 512 for one in layer.parameters)
        assert layer.first.forward_fold.net + layer.first.backward_fold.net - gradients <= TOKENS * H * 2
