"""The recipe of the Mamba mixer against Megatron-Core's, mamba_ssm's and causal_conv1d's own Python, event by event.

``mamba_golden.json`` holds what ``tests.oracle.mamba`` measured. With ``MEMPLAN_MAMBA_SOURCE`` naming a folder with
these packages, it is measured again. Of cases with context parallelism slices of parameters are left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from memplan.layers.megatron_core import block
from memplan.layers.megatron_core.shape import CoreShape
from memplan.layers.module import Interface, Module, Options, Run, build, hold_bytes
from memplan.plan.count import parameters

from .mamba_cases import CASES, Case, run
from .test_te_modules import drops_sorted, sizes

FILE = Path(__file__).with_name("mamba_golden.json")
GOLDEN: dict[str, list[list[int]]] = json.loads(FILE.read_text())
SLICES = 8192
"""Bytes of the largest slice of a parameter."""
SOURCE = "MEMPLAN_MAMBA_SOURCE"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_recipe_is_the_real_mixer(case: Case) -> None:
    own, shape = case.own, case.shape
    given = (own.s, own.b, own.features)
    made = build("mamba", lambda r, x: run(r, x, shape), Interface(given, "bf16"), Options(accumulates_in_place=False))
    least = SLICES if case.cp > 1 else 0
    forward, backward = ([size for size in part if abs(size) > least] for part in GOLDEN[str(case)])
    assert drops_sorted(sizes(made.first.forward, least)) == drops_sorted(forward)
    ended = -hold_bytes(given, "bf16")  # the input's gradient, which is another's here
    assert drops_sorted([*sizes(made.first.backward, least), ended]) == drops_sorted(backward)


@pytest.mark.skipif(SOURCE not in os.environ, reason=f"{SOURCE} names no sources of mamba_ssm and causal_conv1d")
def test_golden_figures_are_those_of_the_source(tmp_path: Path) -> None:
    again = tmp_path / FILE.name
    subprocess.run([sys.executable, "-m", "tests.oracle.mamba", str(again)], check=True, cwd=Path(__file__).parents[3])
    assert json.loads(again.read_text()) == GOLDEN


def test_what_a_layer_keeps_and_has() -> None:
    """By hand, of 2 sequences of 384 tokens, 512 features, 8 heads of 64, 2 groups of 96 states: the projection gives
    512 + 512 + 2 x 2 x 96 + 8 = 1416 features. Kept are the layer's input, its norm, the projection's output, the scan
    before its gate, the gated scan, and its norm: in 16 bits 768 (512 + 512 + 1416 + 3 x 512) x 2 bytes; in fp32 the
    deviations of 768 rows, and of 1536, of two groups each; three tensors of a number for each head, of 512 bytes."""
    shape = Case().shape

    layer = of_layer(shape)
    kept = 768 * (512 + 512 + 1416 + 3 * 512) * 2 + 4 * (768 + 1536) + 3 * 512
    assert layer.first.forward_fold.net == kept
    norm, count = 512, sum(parameter.elements for parameter in layer.parameters)
    convolution, numbers = 896 * 5, 3 * 8
    assert count == 512 * 1416 + convolution + numbers + 512 + 512 * 512 + norm
    ends = 2 * 1024 * 512 if not shape.spec.tied_embeddings else 1024 * 512
    assert parameters(shape.spec) == count + ends + norm


def test_what_a_layer_keeps_with_convolution_and_scan_apart() -> None:
    """Of the same layer: not the projection's output, but the convolution's input of 512 + 2 x 192 channels, the
    scan's x, B, C (192 each) and dt (8), and the gate; sums of steps in fp32. What the scan gives is kept as it
    left the scan and as the norm reads it. States of chunks in fp32 are no tensors that are kept."""
    shape = replace(Case().shape, mamba_apart=True)
    layer = of_layer(shape)
    pieces = 896 + 512 + 2 * 192 + 8 + 512
    kept = 768 * (512 + 512 + pieces + 3 * 512) * 2 + 4 * (768 + 1536) + 3 * 512 + 4 * 768 * 8
    assert layer.first.forward_fold.net == kept
    assert of_layer(replace(shape, mamba_states="fp32")).first.forward_fold.net == kept


def of_layer(shape: CoreShape) -> Module:
    return build(
        "layer",
        lambda r, x: Run(block.layer(r, x, replace(shape, kind="M"))),  # type: ignore[arg-type]
        Interface((384, 2, 512), "bf16"),
        Options(keeps_input=True),
    )
