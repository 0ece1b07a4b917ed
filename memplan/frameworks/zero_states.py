"""What ZeRO keeps between iterations: on the device, on the host and on NVMe, for one rank.

Stages 1, 2: ``stage_1_and_2.py``, ``__init__``, ``initialize_optimizer_states``. Stage 3: ``stage3.py``,
``_create_fp16_partitions_with_defragmentation``, ``_create_fp32_partitions``, ``_setup_for_real_optimizer``,
``_post_step``. NVMe (read, not measured): ``swap_tensor/optimizer_utils.py``, ``partitioned_param_swapper.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..layers.autograd import ITEMSIZE
from ..layers.module import Parameter
from ..plan.plan import Optimizer
from ..tape import Category, Hold, rounded
from .states import optimizer_states
from .zero_config import Zero
from .zero_layout import Group, shard
from .zero_weave import Model, sharded

LEAST_SWAPPED = 2**20
"""Bytes of fp32 parameters below which a sub-group stays on the host (``MIN_AIO_BYTES``)."""


@dataclass(frozen=True)
class Placed:
    """Tensors that a rank keeps, by where they lie."""

    device: tuple[Hold, ...]
    host: tuple[Hold, ...] = ()
    nvme: tuple[Hold, ...] = ()

    def on(self, where: str) -> int:
        """Bytes on ``device``, ``host`` or ``nvme``."""
        holds: tuple[Hold, ...] = getattr(self, where)
        return sum(hold.bytes for hold in holds)


def flat(name: str, category: Category, elements: int, dtype: str) -> Hold:
    return Hold(0, rounded(elements * ITEMSIZE[dtype]), category, name, (elements,), dtype)


def exact(hold: Hold) -> Hold:
    """As the host keeps it: its allocator does not round to 512 B."""
    return hold._replace(bytes=hold.shape[0] * ITEMSIZE[hold.dtype])


def states_of(optimizer: Optimizer, name: str, elements: int) -> Iterator[Hold]:
    """Optimizer states over one flat fp32 tensor. DeepSpeed's FusedAdam and CPUAdam count steps in Python."""
    return states_of_parameter(optimizer, Parameter(name, (elements,)))


def states_of_parameter(optimizer: Optimizer, parameter: Parameter) -> Iterator[Hold]:
    """States over fp32, of a parameter whose shape counts: Adafactor factors matrices, which flat tensors are not."""
    for state in optimizer_states(optimizer, "fp32", embeddings_32bit=False):
        hold = state.hold(parameter, 0, "fp32")
        if hold is not None and state.name != "step":
            yield hold


def is_fused_adam(optimizer: Optimizer) -> bool:
    """DeepSpeed's FusedAdam or apex', for which alone ``_configure_fp16_optimizer`` makes parameters flat."""
    return optimizer.name in ("adam", "adamw") and optimizer.implementation in (None, "fused", "apex")


def replicated(model: Model, groups: Sequence[Group], optimizer: Optimizer, dtype: str) -> Placed:
    """Stage 0: flat groups without padding, with fp32 ones beside them; plain tensors for fp32, or with
    PyTorch's own optimizers (``unfused_optimizer.py``: an fp32 tensor for each)."""
    holds: list[Hold] = []
    if dtype == "fp32" or not is_fused_adam(optimizer):
        for parameter in model.parameters:
            holds.append(flat(parameter.name, Category.PARAMETERS, parameter.elements, dtype))
            if dtype != "fp32":
                holds.append(flat(f"{parameter.name}/main", Category.MAIN_PARAMETERS, parameter.elements, "fp32"))
            holds += states_of_parameter(optimizer, parameter)
        return Placed(tuple(holds))
    for group in groups:
        size = sum(group.sizes)
        holds.append(flat(f"{group.name}/parameters", Category.PARAMETERS, size, dtype))
        holds.append(flat(f"{group.name}/main_parameters", Category.MAIN_PARAMETERS, size, "fp32"))
        holds += states_of(optimizer, group.name, size)
    return Placed(tuple(holds))


def partitioned(
    model: Model, groups: Sequence[Group], zero: Zero, optimizer: Optimizer, dtype: str, sums: int = 0
) -> Placed:
    """Stages 1 and 2: whole flat parameters, a share of everything else.

    With the optimizer on the host: fp32 share, its gradient and its states, a 16-bit copy of the share, and a
    gradient as large as the largest parameter on either side; ``sums`` elements of gradients that accumulate there.
    """
    device: list[Hold] = []
    host: list[Hold] = []
    away = zero.offload_optimizer != "none"
    for group in groups:
        device.append(flat(f"{group.name}/parameters", Category.PARAMETERS, group.padded, dtype))
        kept = [
            flat(f"{group.name}/main_parameters", Category.MAIN_PARAMETERS, group.share, "fp32"),
            *states_of(optimizer, group.name, group.share),
        ]
        if away:
            kept.append(flat(f"{group.name}/gradients_fp32", Category.GRADIENTS, group.share, "fp32"))
            kept.append(flat(f"{group.name}/parameters_of_share", Category.PARAMETERS, group.share, dtype))
        (host if away else device).extend(kept)
    if away:
        largest = max(parameter.elements for parameter in model.parameters)
        device.append(flat("gradient_to_host", Category.COMMUNICATION_BUFFERS, largest, dtype))
        host.append(flat("gradient_from_device", Category.COMMUNICATION_BUFFERS, largest, dtype))
        if sums:
            host.append(flat("accumulated_gradients", Category.GRADIENTS, sums, dtype))
    return Placed(tuple(device), tuple(map(exact, host)))


def sharded_states(
    model: Model,
    zero: Zero,
    dp: int,
    groups: Sequence[Sequence[Sequence[int]]],
    optimizer: Optimizer,
    dtype: str,
    accumulates: str,
) -> Placed:
    """Stage 3: ``groups`` are the sub-groups of each parameter group.

    The shards of all parameters are one flat tensor (on the host one per parameter group, pinned); persistent
    parameters are whole besides. fp32 parameters too have an fp32 copy: a device's name is compared with a device.
    """
    device: list[Hold] = []
    host: list[Hold] = []
    nvme: list[Hold] = []
    shards = [shard(parameter.elements, dp) for parameter in model.parameters]
    total = sum(shards)
    kept = Category.PARAMETERS
    if zero.offload_param == "none":
        device.append(flat("parameter_shards", kept, total, dtype))
    else:
        sizes = [[sum(shards[id] for id in sub) for sub in group] for group in groups]
        on_host, on_nvme = parameters_away(zero, sizes)
        host += [flat("parameter_shards", kept, size, dtype) for size in on_host]
        nvme += [flat("parameter_shards", kept, size, dtype) for size in on_nvme]
    if zero.offload_param == "nvme":
        swapped = zero.offload_param_buffer_count * zero.offload_param_buffer_size
        host.append(flat("parameter_swap_buffers", Category.COMMUNICATION_BUFFERS, swapped, dtype))
    for parameter in sharded(model, zero):
        if parameter.persists and dp > 1:
            whole = shards[parameter.id] * dp
            device.append(flat("persistent", Category.GATHERED_PARAMETERS, whole, dtype))
    if zero.contiguous_gradients:
        device.append(flat("ipg_bucket", Category.COMMUNICATION_BUFFERS, zero.reduce_bucket_size, dtype))
    subs = [sub for group in groups for sub in group]
    away = zero.offload_optimizer
    for at, sub in enumerate(subs):
        size = sum(shards[id] for id in sub)
        name = f"sub_group.{at}"
        holds = [flat(f"{name}/main_parameters", Category.MAIN_PARAMETERS, size, "fp32")]
        holds += states_of(optimizer, name, size)
        if away != "none":
            holds.append(flat(f"{name}/gradients_fp32", Category.GRADIENTS, size, "fp32"))
        swapped_out = away == "nvme" and 4 * size >= LEAST_SWAPPED
        (nvme if swapped_out else device if away == "none" else host).extend(holds)
    gradients = flat("gradient_shards", Category.GRADIENTS, total, accumulates)
    (device if away == "none" else host).append(gradients)
    if away == "nvme":
        largest = zero.offload_optimizer_buffer_count * max(sum(shards[id] for id in sub) for sub in subs)
        host.append(flat("optimizer_swap_buffers", Category.COMMUNICATION_BUFFERS, largest, "fp32"))
    return Placed(tuple(device), tuple(map(exact, host)), tuple(map(exact, nvme)))


def parameters_away(zero: Zero, groups: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Elements on the host, one flat tensor per parameter group, and on NVMe, by sub-group
    (``_create_param_groups_fp16_flat_cpu_memory``); ``groups``: shards of each sub-group."""
    on_host: list[int] = []
    on_nvme: list[int] = []
    passed = 0
    for subs in groups:
        room = sum(subs)
        if zero.offload_param == "nvme" and passed + room > zero.offload_param_max_in_cpu:
            room = max(0, zero.offload_param_max_in_cpu - passed)
        passed += sum(subs)
        offset = 0
        for size in subs:
            if offset + size > room:
                on_nvme.append(size)
            offset += size
        on_host.append(max(room, 1))
    return on_host, on_nvme
