"""What was learnt of compiled layers, beside Inductor's own code of other sizes."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.compiled import FILE
from memplan.layers.autograd import ITEMSIZE
from memplan.layers.compiled import Sizes, regime_of, sizes_of
from memplan.trace.compiled import MODES, learnt
from memplan.trace.job import Checkpointing

pytestmark = pytest.mark.slow
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
    known = {**sizes_of(sizes), "1": 1}
    hidden = 2 * sizes.b * sizes.s * sizes.hidden
    of = {0: hidden, 1: hidden}
    result = []
    live = hidden
    for direction in ("forward", "backward"):
        peak = live
        for event in found[direction]:
            number, *rest = event.split()
            if rest:
                of[int(number)] = ITEMSIZE[rest[0]]
                for name in rest[1].split("*"):
                    of[int(number)] *= known[name]
            live += of[int(number)] if rest else -of[int(number)]
            peak = max(peak, live)
        result += [peak, live]
    return tuple(result)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_peaks_are_those_of_inductors_code(mode: Checkpointing, name: str) -> None:
    """With buffers that are taken again, and without."""
    sizes = SIZES[name]
    shipped = json.loads(FILE.read_text(encoding="utf-8"))
    ours = levels(shipped[f"{mode} {regime_of(sizes)}"], sizes)
    assert ours == levels(learnt(mode, sizes), sizes), asdict(sizes)
    again = levels(learnt(mode, sizes, reuse=True), sizes)
    assert (ours[0], ours[2]) == (again[0], again[2])
