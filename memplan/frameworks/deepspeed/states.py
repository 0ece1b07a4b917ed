"""What ZeRO keeps on one rank between iterations: how parameters lie, and what is on the device, the host and NVMe.

Layout: sizes in elements, dp ranks. Stages 1 and 2 (``stage_1_and_2.py``, ``__init__``): a group's parameters one
behind the other, padded to a multiple of 2 · dp (``nccl_start_alignment_factor``), cut into dp equal shares. Stage 3
(``partition_parameters.py``, ``_partition_param``): every parameter alone, ceil(n / dp) on each rank;
``stage3.py``, ``_create_fp16_sub_groups``: a sub-group is closed by the shard that takes it to ``sub_group_size``.

States: stages 1, 2: ``stage_1_and_2.py``, ``__init__``, ``initialize_optimizer_states``. Stage 3: ``stage3.py``,
``_create_fp16_partitions_with_defragmentation``, ``_create_fp32_partitions``, ``_setup_for_real_optimizer``,
``_post_step``. NVMe (read, not measured): ``swap_tensor/optimizer_utils.py``, ``partitioned_param_swapper.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from ...layers.autograd import ITEMSIZE
from ...layers.module import Parameter
from ...optimizers.base import optimizer_states
from ...optimizers.bitsandbytes import managed_bytes
from ...plan.plan import Optimizer
from ...tape.events import Category, Hold, rounded
from ...values import NamedTuple, dataclass
from ..plain.hooked import Model
from .config import Zero
from .hooks import sharded

ALIGNMENT = 2
"""``nccl_start_alignment_factor``."""


class Slice(NamedTuple):
    """The part of a parameter that lies in a rank's share."""

    id: int
    start: int
    elements: int


@dataclass(frozen=True)
class Group:
    """A flat parameter group."""

    name: str
    ids: tuple[int, ...]
    """Parameters in the order of the flat tensor."""
    sizes: tuple[int, ...]
    dp: int

    @cached_property
    def padded(self) -> int:
        multiple = ALIGNMENT * self.dp
        return -(-sum(self.sizes) // multiple) * multiple

    @cached_property
    def share(self) -> int:
        """Elements that each rank updates."""
        return self.padded // self.dp

    @cached_property
    def places(self) -> dict[int, int]:
        """Where each parameter is in the group."""
        return {id: at for at, id in enumerate(self.ids)}

    @cached_property
    def offsets(self) -> list[int]:
        """First element of each parameter in the flat tensor."""
        offsets, at = [], 0
        for size in self.sizes:
            offsets.append(at)
            at += size
        return offsets

    def share_of(self, rank: int) -> list[Slice]:
        """What lies in the share of ``rank``, padding left out (``get_partition_info``)."""
        low, high = rank * self.share, (rank + 1) * self.share
        result = []
        for id, size, offset in zip(self.ids, self.sizes, self.offsets, strict=True):
            start, end = max(low, offset), min(high, offset + size)
            if start < end:
                result.append(Slice(id, start - offset, end - start))
        return result

    def pieces(self, id: int) -> list[tuple[int, int]]:
        """(rank, elements) of each share that parameter ``id`` lies in, in order."""
        at = self.places[id]
        offset, size = self.offsets[at], self.sizes[at]
        return [
            (rank, min(offset + size, (rank + 1) * self.share) - max(offset, rank * self.share))
            for rank in range(offset // self.share, (offset + size - 1) // self.share + 1)
        ]


def touched(parts: Sequence[Group], dp: int) -> list[int]:
    """By rank: elements of all parameters that its shares have a part of."""
    totals = [0] * dp
    for part in parts:
        for id, size in zip(part.ids, part.sizes, strict=True):
            for rank, _ in part.pieces(id):
                totals[rank] += size
    return totals


def groups(parameters: Sequence[Parameter], kind: str, dp: int, *, round_robin: bool = False) -> tuple[Group, ...]:
    """One group, or weights that decay and the rest; ids are places in ``parameters``."""
    ids = [id for id, one in enumerate(parameters) if one.trained]
    if kind == "one":
        split = {"all": list(ids)}
    else:
        split = {
            "decay": [id for id in ids if parameters[id].decays],
            "no_decay": [id for id in ids if not parameters[id].decays],
        }
    return tuple(
        Group(name, tuple(order), tuple(parameters[id].elements for id in order), dp)
        for name, members in split.items()
        if members
        for order in [_round_robin(members, dp) if round_robin else members]
    )


def _round_robin(ids: list[int], dp: int) -> list[int]:
    """``_round_robin_reorder``: every dp-th parameter of the group beside the last."""
    return [id for start in range(dp) for id in ids[start::dp]]


def shard(elements: int, dp: int) -> int:
    """Elements of a stage-3 parameter on each rank: ceil(n / dp)."""
    return -(-elements // dp)


def sub_groups(members: Sequence[int], sizes: Sequence[int], dp: int, limit: int) -> tuple[tuple[int, ...], ...]:
    """Ids of each sub-group of a parameter group; ``sizes`` by id."""
    shards = {id: shard(sizes[id], dp) for id in members}
    if limit >= sum(shards.values()):
        return (tuple(members),)
    result: list[tuple[int, ...]] = []
    current: list[int] = []
    size = 0
    for id in members:
        current.append(id)
        size += shards[id]
        if size >= limit:
            result.append(tuple(current))
            current, size = [], 0
    return (*result, tuple(current)) if current else tuple(result)


# -- states -----------------------------------------------------------------------------------------


LEAST_SWAPPED = 2**20
"""Bytes of fp32 parameters below which a sub-group stays on the host (``MIN_AIO_BYTES``)."""


@dataclass(frozen=True)
class Placed:
    """Tensors that a rank keeps, by where they lie."""

    device: tuple[Hold, ...]
    host: tuple[Hold, ...] = ()
    nvme: tuple[Hold, ...] = ()
    managed: int = 0
    """Bytes of a paged optimizer's states, in CUDA's unified memory: bitsandbytes takes a flat tensor as it takes a
    parameter (``optim/optimizer.py``, ``get_state_buffer``)."""

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
    """DeepSpeed's FusedAdam, for which (and apex') alone ``_configure_fp16_optimizer`` makes parameters flat; PyTorch's
    fused AdamW, which a script may pass, is another class."""
    made = optimizer.algorithm.deepspeed
    own = made is not None and made.kernel == "fused_adam"
    return own and optimizer.implementation is None


def replicated(model: Model, groups: Sequence[Group], optimizer: Optimizer, dtype: str) -> Placed:
    """Stage 0: flat groups without padding, with fp32 ones beside them; plain tensors for fp32, or with
    PyTorch's own optimizers (``unfused_optimizer.py``: an fp32 tensor for each)."""
    holds = frozen(model, dtype)
    if dtype == "fp32" or not is_fused_adam(optimizer):
        for parameter in map(model.parameters.__getitem__, model.trained):
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


def frozen(model: Model, dtype: str) -> list[Hold]:
    """Parameters that are not trained stay as they are, one by one."""
    return [
        flat(one.name, Category.PARAMETERS, one.elements, dtype)
        for one in map(model.parameters.__getitem__, model.frozen)
    ]


def partitioned(
    model: Model, groups: Sequence[Group], zero: Zero, optimizer: Optimizer, dtype: str, sums: int = 0
) -> Placed:
    """Stages 1 and 2: whole flat parameters, a share of everything else.

    With the optimizer on the host: fp32 share, its gradient and its states, a 16-bit copy of the share, and a
    gradient as large as the largest parameter on either side; ``sums`` elements of gradients that accumulate there.
    """
    device = frozen(model, dtype)
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
        largest = max(model.parameters[id].elements for id in model.trained)
        device.append(flat("gradient_to_host", Category.COMMUNICATION_BUFFERS, largest, dtype))
        host.append(flat("gradient_from_device", Category.COMMUNICATION_BUFFERS, largest, dtype))
        if sums:
            host.append(flat("accumulated_gradients", Category.GRADIENTS, sums, dtype))
    shares = [Parameter(group.name, (group.share,)) for group in groups]
    return Placed(tuple(device), tuple(map(exact, host)), managed=managed_bytes(optimizer, shares))


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
    total = sum(shards[id] for id in model.trained)
    kept = Category.PARAMETERS
    alone = [flat("frozen_shard", kept, shards[id], dtype) for id in model.frozen]
    (device if zero.offload_param == "none" else host if zero.offload_param == "cpu" else nvme).extend(alone)
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
    stepped = [Parameter("sub_group", (sum(shards[id] for id in sub),)) for sub in subs]
    managed = managed_bytes(optimizer, stepped)
    return Placed(tuple(device), tuple(map(exact, host)), tuple(map(exact, nvme)), managed)


def without_optimizer(model: Model, zero: Zero, dp: int, buffers: Sequence[Hold]) -> Placed:
    """A model that is not trained: each parameter by itself, cut at stage 3 (``DeepSpeedZeRoOffload``)."""
    kept, dtype, sizes = Category.PARAMETERS, model.dtype, [one.elements for one in model.parameters]
    if zero.stage < 3:
        return Placed((*(flat("reference", kept, size, dtype) for size in sizes), *buffers))
    shards = tuple(flat("reference_shard", kept, shard(size, dp), dtype) for size in sizes)
    persistent = [shard(one.elements, dp) * dp for one in sharded(model, zero) if one.persists and dp > 1]
    whole = (flat("persistent", Category.GATHERED_PARAMETERS, size, dtype) for size in persistent)
    there, on_host, on_nvme = (shards if zero.offload_param == where else () for where in ("none", "cpu", "nvme"))
    return Placed((*there, *whole, *buffers), tuple(map(exact, on_host)), tuple(map(exact, on_nvme)))


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


# -- initialisation ---------------------------------------------------------------------------------


def initialisation_peak(model: Model, groups: Sequence[Group], besides: int, capacity: int | None) -> int:
    """What the device holds while the engine builds ``DeepSpeedZeroOptimizer`` (stages 1 and 2), in bytes from nothing.

    ``stage_1_and_2.py``, ``__init__`` and ``initialize_optimizer_states``. The model comes whole, in the dtype that it
    trains in. Group after group is copied into its flat tensor, after which its own tensors end; the rank's share is
    cloned and cast to fp32, and fp32 gradients of every share are made and dropped again. Where the device has no room
    for the flat tensor (``available_memory``), parameters go to the host first, and nothing is there twice.

    ``besides``: the model's buffers; ``capacity``: the device's, if it is known.
    """
    size = ITEMSIZE[model.dtype]
    live = highest = besides + sum(parameter.bytes(model.dtype) for parameter in model.parameters)
    for group in groups:
        own = sum(model.bytes(id) for id in group.ids)
        flat, share = rounded(group.padded * size), rounded(group.share * size)
        padding = rounded((group.padded - sum(group.sizes)) * size) if group.padded != sum(group.sizes) else 0
        fits = capacity is None or capacity - live >= flat
        highest = max(highest, live + padding + flat if fits else live)
        live += flat - own
        wide = rounded(4 * group.share)
        highest = max(highest, live + share + (wide if model.dtype != "fp32" else 0))
        live += wide
    return max(highest, live + sum(rounded(4 * group.share) for group in groups))
