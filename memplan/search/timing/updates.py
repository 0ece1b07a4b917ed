"""Seconds of what happens once a step: gradients between replicas, gathered parameters, the optimizer, and offload.

Communication that a framework runs beside backward or forward counts only as far as it is longer than these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...plan.lora import adapter_parameters
from ...plan.plan import Plan
from .collectives import Group, collective, group
from .ends import EntryTimes
from .matmul import streamed
from .rates import Rates
from .shape import ITEMSIZE, Shape
from .stages import StageWork, elements

FOREACH = 80
"""Bytes of fp32 that PyTorch's ``foreach`` and ``for-loop`` Adam move for each parameter, kernel by kernel: decay 8,
``lerp_`` 12, ``mul_`` and ``addcmul_`` 24, ``sqrt``, division and addition 20, ``addcdiv_`` 16."""

HOST_ADAM = 0.257e-9
"""Seconds a parameter of DeepSpeed's CPU Adam with a whole node's cores; PyTorch's takes ``HOST_ADAM_TORCH``
(arXiv 2101.06840, table 4: 10 billion parameters in 2.57 and 14.76 s)."""
HOST_ADAM_TORCH = 1.476e-9

NVME = 25.6e9
"""Bytes/s of a node's NVMe (arXiv 2104.07857, figure 2b: 16 GPUs at 1.6 GB/s)."""

BUCKET = 25 * 2**20
"""Bytes of DDP's bucket, the last of which nothing hides."""


class Updates(NamedTuple):
    """Seconds a step, exposed."""

    data_parallel: float = 0.0
    optimizer: float = 0.0
    offload: float = 0.0

    @property
    def total(self) -> float:
        return self.data_parallel + self.optimizer + self.offload


@dataclass(frozen=True, slots=True)
class Replicas:
    """How a plan's replicas keep states and exchange gradients. Built once for a family of plans."""

    plan: Plan
    shape: Shape
    rates: Rates

    @property
    def ranks(self) -> int:
        """Ranks that gradients are summed over."""
        layout = self.plan.layout
        return (layout.dp or 1) * layout.cp

    @property
    def across(self) -> Group:
        return group(self.ranks, self.plan.layout.tp, self.rates.node)

    @property
    def gradient(self) -> int:
        """Bytes of a gradient's element between replicas."""
        plan = self.plan
        if plan.framework == "fsdp":
            return ITEMSIZE[plan.fsdp.reduce]
        if plan.framework == "megatron":
            return ITEMSIZE[plan.precision.gradients or "fp32"]
        return ITEMSIZE[plan.precision.stored]


def updates(
    replicas: Replicas, work: tuple[StageWork, ...], times: EntryTimes, microbatches: int, staged: bool
) -> Updates:
    """Of the rank that holds ``work``; ``staged`` where it is one stage of several."""
    plan, shape = replicas.plan, replicas.shape
    held = elements(shape.spec, work, shape.t, shape.vocab, plan.framework == "megatron-deepspeed")
    trained = held if plan.lora.rank is None else float(adapter_parameters(plan))
    forward, backward = _passes(work, times)
    if plan.framework in ("single", "device-map"):
        exposed = 0.0
    elif plan.framework == "fsdp" or (plan.framework == "deepspeed" and plan.layout.zero == 3):
        exposed = _sharded(replicas, work, times, held, trained / held, microbatches)
    elif plan.framework == "ddp":
        exposed = _ddp(replicas, trained, backward, microbatches)
    else:
        exposed = _replicated(replicas, trained, forward, backward, microbatches)
    if staged and shape.spec.tied_embeddings and plan.layout.pp > 1:
        exposed += _tied(replicas, work)
    owned = trained / _owners(replicas)
    passes = streamed(replicas.rates, held * buffer_bytes(plan, replicas.ranks))
    return Updates(
        exposed, _optimizer(replicas, owned) + passes, _offload(replicas, owned, held / _owners(replicas), microbatches)
    )


def _passes(work: tuple[StageWork, ...], times: EntryTimes) -> tuple[float, float]:
    """Forward and backward of the layers of a stage, once."""
    layers, recomputed = sum(chunk.layers for chunk in work), sum(chunk.recomputed for chunk in work)
    return layers * times.layer.forward, layers * times.layer.backward + recomputed * times.layer.recompute


def _owners(replicas: Replicas) -> int:
    """Ranks that share the states of a parameter."""
    plan = replicas.plan
    if plan.framework == "fsdp":
        return (plan.layout.dp or 1) // plan.fsdp.replicas
    if plan.layout.zero == 0:
        return 1
    if plan.framework == "megatron":
        return replicas.ranks // plan.megatron.distributed_optimizer_instances
    return plan.layout.dp or 1


def _replicated(replicas: Replicas, held: float, forward: float, backward: float, microbatches: int) -> float:
    """Megatron and ZeRO 0 to 2: gradients are summed, whole or to their owners, who give the parameters back."""
    plan, rates, across = replicas.plan, replicas.rates, replicas.across
    summed, parameter = held * replicas.gradient, held * ITEMSIZE[plan.precision.dtype]
    if plan.layout.zero == 0:
        reduced, gathered = collective(rates, "all-reduce", summed, across), 0.0
    else:
        reduced = collective(rates, "reduce-scatter", summed, across)
        gathered = collective(rates, "all-gather", parameter, across)
    if plan.framework == "megatron":
        if plan.megatron.overlap_grad_reduce:
            size = plan.megatron.bucket_size or max(40_000_000, 1_000_000 * replicas.ranks)
            reduced = _beside(reduced, backward, size / held)
        if plan.megatron.overlap_param_gather:
            gathered = _beside(gathered, forward, 0.0)
        return reduced + gathered
    if plan.framework == "deepspeed":
        if plan.deepspeed.overlap_comm:
            reduced = _beside(reduced, backward, plan.deepspeed.reduce_bucket_size / held)
        return reduced * (microbatches if plan.layout.zero == 2 else 1) + gathered
    return reduced + gathered


def _beside(communication: float, work: float, tail: float) -> float:
    """What is left of communication that runs beside ``work``, but for its last part, ``tail`` of it."""
    last = communication * min(1.0, tail)
    return max(communication - work, last)


def _ddp(replicas: Replicas, held: float, backward: float, microbatches: int) -> float:
    """Buckets are summed while backward goes on; ``ZeroRedundancyOptimizer`` broadcasts what its owners updated."""
    plan, rates, across = replicas.plan, replicas.rates, replicas.across
    size = held * replicas.gradient
    reduced = _beside(collective(rates, "all-reduce", size, across), backward, BUCKET / size)
    parameters = held * ITEMSIZE[plan.precision.stored]
    shared = collective(rates, "all-gather", parameters, across) if plan.layout.zero else 0.0
    return reduced * (microbatches if plan.ddp.gradient_sync else 1) + shared


def _sharded(
    replicas: Replicas, work: tuple[StageWork, ...], times: EntryTimes, held: float, trained: float, microbatches: int
) -> float:
    """FSDP and ZeRO-3: each layer is gathered while the one before it runs, and its gradients are scattered while the
    next backward runs. What is longer than a layer's pass is exposed, and so are the first gather and last scatter.
    ``trained`` is the part of the parameters that has gradients."""
    plan, rates, shape = replicas.plan, replicas.rates, replicas.shape
    fsdp, owners = plan.framework == "fsdp", _owners(replicas)
    shards = group(owners, plan.layout.tp, rates.node)
    layers = sum(chunk.layers for chunk in work) or 1
    layer = elements(shape.spec, (StageWork(1),), shape.t, shape.vocab)
    ends = max(0.0, held - layers * layer)

    def gathered(count: float) -> float:
        return collective(rates, "all-gather", count * shape.element, shards)

    def scattered(count: float) -> float:
        size = count * trained * replicas.gradient
        between = group(plan.fsdp.replicas if fsdp else 1, plan.layout.tp * owners, rates.node)
        return collective(rates, "reduce-scatter", size, shards) + collective(
            rates, "all-reduce", size / owners, between
        )

    again = gathered(layer) if not fsdp or plan.fsdp.reshard_after_forward else 0.0
    recomputed = times.layer.recompute * min(1.0, sum(chunk.recomputed for chunk in work) / layers)
    forward = layers * max(0.0, gathered(layer) - times.layer.forward) + gathered(ends)
    backward = layers * max(0.0, again + scattered(layer) - times.layer.backward - recomputed) + scattered(ends)
    if plan.layout.pp > 1:
        return forward + backward
    return microbatches * forward + (1 if fsdp and not plan.fsdp.gradient_sync else microbatches) * backward


def _tied(replicas: Replicas, work: tuple[StageWork, ...]) -> float:
    """The gradients of a tied weight are summed between the first and the last stage."""
    if not any(chunk.embedding or chunk.head for chunk in work):
        return 0.0
    shape, rates = replicas.shape, replicas.rates
    size = shape.vocab // shape.t * shape.spec.hidden * replicas.gradient
    return collective(rates, "all-reduce", float(size), group(2, rates.node, rates.node))


def _optimizer(replicas: Replicas, owned: float) -> float:
    """Bytes of gradients, states and parameters that the step reads and writes, at the memory's bandwidth."""
    plan = replicas.plan
    if plan.framework == "deepspeed" and plan.deepspeed.offload_optimizer != "none":
        owned *= 1 - plan.deepspeed.offload_optimizer_ratio
    if plan.framework == "fsdp" and plan.fsdp.offload:
        return 0.0
    return streamed(replicas.rates, owned * step_bytes(plan)) if owned else 0.0


def buffer_bytes(plan: Plan, ranks: int) -> float:
    """Bytes that Megatron's passes over the whole gradient buffer move for each parameter, once a step: it is set to
    zero, looked through for NaN, and divided by the number of replicas (``param_and_grad_buffer.py``, ``reset`` and
    ``start_grad_sync``)."""
    if plan.framework != "megatron":
        return 0.0
    gradient = ITEMSIZE[plan.precision.gradients or "fp32"]
    looks = 1 if plan.megatron.check_for_nan else 0
    divides = 2 if ranks > 1 and not plan.megatron.per_token_loss else 0
    return float(gradient * (1 + looks + divides))


def step_bytes(plan: Plan) -> float:
    """Bytes that a parameter's update moves."""
    optimizer, dtype = plan.optimizer, ITEMSIZE[plan.precision.stored]
    mixed = plan.framework in ("megatron", "megatron-deepspeed", "deepspeed") and plan.precision.dtype != "fp32"
    main = 4 if mixed or (plan.framework == "fsdp" and plan.fsdp.parameters == "fp32") else dtype
    gradient = ITEMSIZE[plan.precision.gradients or "fp32"]
    states = {"sgd": 1 if optimizer.momentum else 0, "lion": 1, "lion8bit": 1, "muon": 1, "adafactor": 0}.get(
        optimizer.name, 2
    )
    width = 1 if optimizer.name.endswith("8bit") else main
    if optimizer.implementation in ("foreach", "for-loop") and optimizer.name in ("adam", "adamw"):
        moved = FOREACH * main / 4
    else:
        moved = gradient + 2.0 * states * width + 2 * main
    if mixed:
        # Gradients: their norm, and the copy to fp32; parameters: the copy back.
        moved += gradient + (gradient + 4 if gradient < 4 else 2 * gradient) + ITEMSIZE[plan.precision.dtype]
    return moved


def _offload(replicas: Replicas, owned: float, shard: float, microbatches: int) -> float:
    """Copies between device and host, and the update there: DeepSpeed's CPU Adam shares the node's cores."""
    plan, rates = replicas.plan, replicas.rates
    together = min(plan.hardware.gpus_per_node, plan.hardware.gpus or 1)
    if plan.framework == "fsdp" and plan.fsdp.offload:
        parameter, gradient = ITEMSIZE[plan.fsdp.parameters], ITEMSIZE[plan.fsdp.reduce]
        copies = (shard * 2 * parameter * microbatches + owned * gradient) / rates.host
        return copies + owned * together * HOST_ADAM_TORCH
    if plan.framework != "deepspeed":
        return 0.0
    given, element = plan.deepspeed, ITEMSIZE[plan.precision.dtype]
    total = 0.0
    if given.offload_optimizer != "none":
        away = owned * given.offload_optimizer_ratio
        total += away * (element + element) / rates.host + away * together * HOST_ADAM
        if given.offload_optimizer == "nvme":
            total += away * together * 24 / NVME
    if given.offload_param != "none":
        copies = 2 * microbatches * shard * element
        total += copies / rates.host if given.offload_param == "cpu" else copies * together / NVME
    return total
