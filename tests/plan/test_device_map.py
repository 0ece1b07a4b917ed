"""Layers placed by hand: each on exactly one device."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from memplan.frameworks.plain.device_map import equal_shares
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve

from .outcomes import error_of

ON_4_GPUS = "{0: 0-10, 1: '11-19, 21-23', 2: 24-36, 3: 37-47}"
ON_8_GPUS = "{0: 0-4, 1: 5-10, 2: 11-16, 3: '17-19, 21-23', 4: 24-29, 5: 30-35, 6: 36-41, 7: 42-47}"


def refusal(device_map: str, folder: Path) -> str:
    path = folder / "plan.yaml"
    path.write_text(f"model: gpt2-xl\nframework: device-map\ndevice_map: {device_map}\n")
    read = read_plan(str(path))
    with pytest.raises(PlanError) as caught:
        resolve(read.plan)
    return str(caught.value.located(read.origins)).removeprefix(str(folder))


@pytest.mark.parametrize("device_map", [ON_4_GPUS, ON_8_GPUS])
def test_the_maps_of_2020_forget_layer_20(device_map: str, tmp_path: Path) -> None:
    assert refusal(device_map, tmp_path) == (
        "/plan.yaml:3: device_map: misses layer 20; place every layer on exactly one device"
    )


@pytest.mark.parametrize(
    ("device_map", "line"),
    [
        ("{0: 0-40, 1: 40-47}", "device_map: repeats layer 40; place every layer on exactly one device"),
        ("{0: 0-10, 1: 20-47}", "device_map: misses layers 11, 12, 13, 14, 15, 16, 17, 18, … (9 of them)"),
        ("{0: 0-47, 2: 3}", "device_map = [0, 2]: must name devices 0, 1, 2, … without a gap"),
        ("{0: 0-47, 1: []}", "device_map.1 = []: must hold at least one layer"),
        ("{0: 0-48}", "device_map.0: names layer 48, and the model has layers 0 to 47"),
        ("{0: [-1, 0-47]}", "device_map.0: names layer -1, and the model has layers 0 to 47"),
        ("{0: 0-23, 1: 24-47}\nhardware: {gpus: 1}", "device_map: names 2 devices, and hardware.gpus is 1"),
        (
            "{0: 0-47}\nhardware: {gpus: 16}",
            "hardware.gpus = 16: must be at most hardware.gpus_per_node (8): a device map is one process on one node",
        ),
    ],
)
def test_what_is_wrong_is_named(device_map: str, line: str, tmp_path: Path) -> None:
    assert line in refusal(device_map, tmp_path)


def test_a_map_belongs_to_its_framework() -> None:
    read = read_plan(None, {"model": "gpt2", "framework": "single", "device-map": "{0: 0-11}"})
    with pytest.raises(PlanError, match="must be left out with framework single; device-map has layers placed by hand"):
        resolve(read.plan)


@given(st.integers(1, 200), st.integers(1, 64))
def test_equal_shares_hold_every_layer_once_and_differ_by_one(layers: int, devices: int) -> None:
    if devices > layers:
        with pytest.raises(PlanError, match="must be at most"):
            equal_shares(layers, devices)
        return
    shares = equal_shares(layers, devices)
    assert [layer for device in range(devices) for layer in shares[device]] == list(range(layers))
    assert max(map(len, shares.values())) - min(map(len, shares.values())) <= 1


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 1_023), min_size=1, max_size=100))
def test_layers_are_limited_on_all_devices_together(lasts: list[int]) -> None:
    """A plan of many devices, each with a long range, is refused before its layers are made."""
    written = "{" + ", ".join(f"{device}: 0-{last}" for device, last in enumerate(lasts)) + "}"
    said = error_of(lambda: read_plan(None, {"model": "gpt2", "framework": "device-map", "device-map": written}))
    assert ("1,024 on all devices" in said) == (sum(lasts) + len(lasts) > 1_024)
