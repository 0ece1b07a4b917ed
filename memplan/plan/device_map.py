"""Layers placed on devices by hand: every layer on exactly one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .errors import ABSENT, PlanError
from .plan import Plan


def equal_shares(layers: int, devices: int) -> dict[int, tuple[int, ...]]:
    """Consecutive layers in shares that differ by at most one, the larger ones first."""
    if devices > layers:
        raise PlanError("hardware.gpus", devices, f"must be at most the model's {layers} layers, one for each device")
    share, larger = divmod(layers, devices)
    starts = [device * share + min(device, larger) for device in range(devices + 1)]
    return {device: tuple(range(starts[device], starts[device + 1])) for device in range(devices)}


def check_device_map(plan: Plan) -> None:
    """Refuses a map that forgets or repeats a layer, skips a device or names what is not there."""
    placed, gpus = plan.device_map, plan.hardware.gpus
    if placed is None:
        return
    if plan.framework != "device-map":
        problem = f"places layers by hand, which framework {plan.framework} does not do; device-map does"
        raise PlanError("device_map", ABSENT, problem)
    assert gpus is not None
    if sorted(placed) != list(range(len(placed))) or not placed:
        wanted = "must name devices 0, 1, 2, … without a gap"
        raise PlanError("device_map", list(placed), wanted)
    if len(placed) > gpus:
        raise PlanError("device_map", ABSENT, f"names {len(placed)} devices, and hardware.gpus is {gpus}")
    _check_layers(placed, plan.model.layers)


def _check_layers(placed: dict[int, tuple[int, ...]], layers: int) -> None:
    for device, on_device in placed.items():
        if not on_device:
            raise PlanError(f"device_map.{device}", [], "must hold at least one layer")
        outside = [layer for layer in on_device if not 0 <= layer < layers]
        if outside:
            problem = f"names {_layers(outside)}, and the model has layers 0 to {layers - 1}"
            raise PlanError(f"device_map.{device}", ABSENT, problem)
    times = Counter(layer for on_device in placed.values() for layer in on_device)
    repeated = [layer for layer in range(layers) if times[layer] > 1]
    if repeated:
        raise PlanError("device_map", ABSENT, f"repeats {_layers(repeated)}; place every layer on exactly one device")
    forgotten = [layer for layer in range(layers) if not times[layer]]
    if forgotten:
        raise PlanError("device_map", ABSENT, f"forgets {_layers(forgotten)}; place every layer on exactly one device")


def _layers(layers: Iterable[int]) -> str:
    """``layer 20`` or ``layers 3, 4, 5, … (12 of them)``."""
    numbers = list(layers)
    text = ", ".join(str(number) for number in numbers[:8])
    if len(numbers) == 1:
        return f"layer {text}"
    return f"layers {text}" if len(numbers) <= 8 else f"layers {text}, … ({len(numbers)} of them)"
