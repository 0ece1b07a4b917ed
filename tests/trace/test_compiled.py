"""What was learnt of compiled layers, beside Inductor's own code of other sizes."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from memplan.estimate import programs_of
from memplan.layers.autograd import ITEMSIZE
from memplan.layers.compiled import FILE, SKIPS, Sizes, name_of, parts, parts_of, regime_of, sizes_of
from memplan.layers.float8 import Float8
from memplan.layers.module import Options
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.trace import torchtitan
from memplan.trace.comparison import ENDS, compared
from memplan.trace.framework import job_of_plan
from memplan.trace.job import Checkpointing
from memplan.trace.recording import EMBEDDING, FINAL_NORM, HEAD
from memplan.trace.torchtitan_step import traced_torchtitan

from .test_step import SCALARS
from .titan_cases import TITAN

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Inductor's own, as it is imported
MODES: tuple[Checkpointing, ...] = ("none", "op", "full")
EIGHT = {"heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14336}
SEVENTY = {"heads": 64, "kv_heads": 8, "head_dim": 128, "ffn": 28672}
LARGEST = {"heads": 128, "kv_heads": 8, "head_dim": 128, "ffn": 53248}
ONE = {"heads": 32, "kv_heads": 8, "head_dim": 64, "ffn": 8192}
SIZES = {
    "8b": Sizes(2, 8192, **EIGHT),
    "8b-long": Sizes(1, 131072, **EIGHT),
    "8b-short": Sizes(1, 4096, **EIGHT),
    "8b-few": Sizes(1, 2048, **EIGHT),
    "70b": Sizes(2, 8192, **SEVENTY),
    "70b-few": Sizes(1, 4096, **SEVENTY),
    "405b": Sizes(2, 8192, **LARGEST),
    "1b": Sizes(2, 8192, **ONE),
}


def levels(found: dict[str, Any], sizes: Sizes) -> tuple[int, ...]:
    """Bytes: the peak of forward, what it leaves, the peak of backward, what that leaves."""
    known = {**parts(sizes), **sizes_of(sizes), "1": 1}
    hidden = 2 * sizes.b * sizes.s * sizes.hidden
    of = {0: hidden, 1: hidden}
    result = []
    live = hidden
    for direction in ("forward", "backward"):
        peak = live
        for event in found[direction]:
            number, *rest = event.split()
            if rest:
                names = rest[1].split("*")
                at_once = any("/" in name and known[name] == 1 for name in names)  # not in parts
                of[int(number)] = (
                    0 if at_once else ITEMSIZE[rest[0]] * prod(known.get(one) or int(one) for one in names)
                )
            live += of[int(number)] if rest else -of[int(number)]
            peak = max(peak, live)
        result += [peak, live]
    return tuple(result)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_peaks_are_those_of_inductors_code(mode: Checkpointing, name: str) -> None:
    """With buffers that are taken again, and without."""
    from memplan.trace.compiled import learnt

    sizes = SIZES[name]
    shipped = json.loads(FILE.read_text(encoding="utf-8"))
    ours = levels(shipped[f"{mode} {regime_of(sizes)}"], sizes)
    assert ours == levels(learnt(mode, sizes), sizes), asdict(sizes)
    again = levels(learnt(mode, sizes, reuse=True), sizes)
    assert ours[0] == again[0]
    most = 1.02 if regime_of(sizes) == "few" else 1.0  # Inductor's estimate of a peak is not the allocator's
    assert ours[2] <= again[2] <= most * ours[2]


@pytest.mark.parametrize("rows", [64, 1000, 4096, 14336, 16384, 131072])
@pytest.mark.parametrize("columns", [128, 1024, 3584, 4096, 8192])
def test_parts_of_maxima_are_inductors(rows: int, columns: int) -> None:
    from torch._inductor import choices

    from memplan.trace.inductor import H100

    gpu = SimpleNamespace(**vars(H100), warp_size_or_default=H100.warp_size)
    with patch("torch._inductor.choices.DeviceProperties.create", lambda _: gpu):
        split = choices.InductorChoices.reduction_split_factor(torch.device("cuda"), rows, columns, False)
    assert parts_of(rows, columns) == split


LOW: dict[str, tuple[Float8, str, Checkpointing]] = {
    "gathered": (Float8("tensorwise", gathered=True), "8b", "op"),
    "rowwise": (Float8("rowwise"), "8b", "op"),
    "rowwise-70b": (Float8("rowwise"), "70b", "none"),
    "rowwise-405b": (Float8("rowwise"), "405b", "op"),
    "rowwise-1b": (Float8("rowwise"), "1b", "op"),
    "rowwise-kv": (Float8("rowwise", SKIPS), "8b", "full"),
    "gw_hp": (Float8("rowwise_with_gw_hp"), "8b", "none"),
    "rowwise-short": (Float8("rowwise"), "8b-short", "op"),
}


@pytest.mark.parametrize("name", LOW)
def test_peaks_of_layers_in_float8(name: str) -> None:
    """With few tokens the peak of backward is an upper bound, by up to a tenth (``FLOAT8_REGIMES``)."""
    pytest.importorskip("torchao")
    from memplan.trace.compiled import learnt

    low, of, mode = LOW[name]
    sizes = SIZES[of]
    shipped = json.loads(FILE.read_text(encoding="utf-8"))
    ours, theirs = (levels(one, sizes) for one in (shipped[name_of(mode, sizes, low)], learnt(mode, sizes, low)))
    most = 1.1 if regime_of(sizes) != "mixed" else 1.0
    assert (ours[0], ours[1], ours[3]) == (theirs[0], theirs[1], theirs[3])
    assert theirs[2] <= ours[2] <= most * theirs[2]


SMALL = {"hidden": "512", "heads": "8", "kv-heads": "2", "head-dim": "64", "ffn": "1408", "vocab": "1008"}
SMALL |= {"layers": "3", "mbs": "2", "seq": "5440", "dp": "4"}
OWN: dict[str, dict[str, str]] = {
    "none": {},
    "op": {"recompute-per-operator": "true"},
    "full": {"recompute": "full"},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_runs_inductors_code(mode: Checkpointing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ``fully_shard``, with buffers that are taken again: every named point and every layer, but for scalars of
    the loss."""
    from ..oracle.compiled_layer import CompiledBlock

    flags = {**TITAN, **SMALL, **OWN[mode]}
    (program,) = programs_of(resolve(read_plan(None, {**flags, "compile": "true"}).plan), Options())
    sizes = Sizes(2, 5440, 8, 2, 64, 1408)
    monkeypatch.setattr(torchtitan, "recomputed", lambda block, *_: CompiledBlock(block, mode, sizes))
    found = compared(traced_torchtitan(job_of_plan(resolve(read_plan(None, flags).plan))), program)
    for point in found.points:
        assert point.estimated is not None
        assert 0 <= point.traced - point.estimated <= SCALARS, point
    for row in found.rows:
        assert row.estimated is not None
        apart = SCALARS if row.entry in (EMBEDDING, FINAL_NORM, HEAD, *ENDS) else 0
        assert abs(row.traced.net - row.estimated.net) <= apart, row
        assert abs(row.traced.peak - row.estimated.peak) <= apart, row
