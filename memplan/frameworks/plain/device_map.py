"""``device-map``: one process whose layers lie on several devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ...plan.errors import ABSENT, PlanError
from ..base import PYTORCH_SECTIONS, Framework, Parts, Supports

if TYPE_CHECKING:
    from ...plan.plan import Hardware, Layout, Plan, ResolvedPlan


class DeviceMap(Framework):
    name = "device-map"
    parts = Parts(".searching:DeviceMapSearch", ".timing:DeviceMapTime", ".running:DeviceMapRunning")
    stage_word = "device"
    configuration = "device-map"
    supports = Supports(
        mixtures=("experts", "latent_kv_rank", "index_heads", "linear_interval"),
        several_gpus_of_a_process=True,
        sections=(*PYTORCH_SECTIONS, "device_map"),
        loops=("transformers",),
    )

    def default_gpus(self, plan: Plan) -> int:
        """As many as the map has devices."""
        if plan.hardware.gpus is not None:
            return plan.hardware.gpus
        if not plan.device_map:
            raise PlanError(
                "hardware.gpus",
                ABSENT,
                "is missing: device-map needs the number of devices (--gpus 4) or the map itself (device_map)",
            )
        return len(plan.device_map)

    def default_sections(self, plan: Plan, hardware: Hardware, layout: Layout) -> dict[str, object]:
        if plan.device_map is not None or hardware.gpus is None:
            return {}
        return {"device_map": equal_shares(plan.model.layers, hardware.gpus)}

    def check(self, plan: ResolvedPlan) -> None:
        check_map(plan)
        if plan.quantisation.kind in ("int8", "awq"):
            weights = "8-bit" if plan.quantisation.kind == "int8" else "AWQ's"
            raise plan.wrong(
                "quantisation.kind",
                f"must be none, nf4, fp4 or gptq on a device map: {weights} weights are modelled in single and ddp",
            )

    def layout_assumptions(self, plan: ResolvedPlan) -> tuple[str, ...]:
        return (
            "embedding and head are on the first device, final norm on the last; "
            "masks and rotary tables that later devices copy are not counted",
        )

    def cut_field(self, plan: Plan, *, whole: bool) -> str:
        if plan.device_map is None:
            return ""
        held = (f"{device}: {_range(layers)}" for device, layers in plan.device_map.items())
        return f"--device-map '{{{', '.join(held)}}}'"


def _range(layers: Sequence[int]) -> str:
    """``0-11``; one by one where they do not follow one another."""
    if layers and list(layers) == list(range(layers[0], layers[-1] + 1)) and len(layers) > 1:
        return f"{layers[0]}-{layers[-1]}"
    return str(list(layers))


def equal_shares(layers: int, devices: int) -> dict[int, tuple[int, ...]]:
    """Consecutive layers in shares that differ by at most one, the larger ones first."""
    if devices > layers:
        raise PlanError("hardware.gpus", devices, f"must be at most the model's {layers} layers, one for each device")
    share, larger = divmod(layers, devices)
    starts = [device * share + min(device, larger) for device in range(devices + 1)]
    return {device: tuple(range(starts[device], starts[device + 1])) for device in range(devices)}


def check_map(plan: ResolvedPlan) -> None:
    """Refuses a map that forgets or repeats a layer, skips a device or names what is not there."""
    placed, gpus, node = plan.device_map or {}, plan.hardware.gpus, plan.hardware.gpus_per_node
    if gpus > node:
        raise plan.wrong(
            "hardware.gpus", f"must be at most hardware.gpus_per_node ({node}): a device map is one process on one node"
        )
    if sorted(placed) != list(range(len(placed))) or not placed:
        raise PlanError("device_map", list(placed), "must name devices 0, 1, 2, … without a gap")
    if len(placed) > gpus:
        raise PlanError("device_map", ABSENT, f"names {len(placed)} devices, and hardware.gpus is {gpus}")
    _check_layers(placed, plan.model.layers)


def _check_layers(placed: dict[int, tuple[int, ...]], layers: int) -> None:
    for device, on_device in placed.items():
        if not on_device:
            raise PlanError(f"device_map.{device}", [], "must hold at least one layer")
        outside = [layer for layer in on_device if not 0 <= layer < layers]
        if outside:
            raise PlanError(
                f"device_map.{device}", ABSENT, f"names {_layers(outside)}, and the model has layers 0 to {layers - 1}"
            )
    times = Counter(layer for on_device in placed.values() for layer in on_device)
    repeated = [layer for layer in range(layers) if times[layer] > 1]
    if repeated:
        raise PlanError("device_map", ABSENT, f"repeats {_layers(repeated)}; place every layer on exactly one device")
    forgotten = [layer for layer in range(layers) if not times[layer]]
    if forgotten:
        raise PlanError("device_map", ABSENT, f"misses {_layers(forgotten)}; place every layer on exactly one device")


def _layers(layers: Iterable[int]) -> str:
    """``layer 20`` or ``layers 3, 4, 5, … (12 of them)``."""
    numbers = list(layers)
    text = ", ".join(str(number) for number in numbers[:8])
    if len(numbers) == 1:
        return f"layer {text}"
    return f"layers {text}" if len(numbers) <= 8 else f"layers {text}, … ({len(numbers)} of them)"


FRAMEWORK = DeviceMap()
