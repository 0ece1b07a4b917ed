"""DeepSpeed's own estimate of model states, and what it leaves out of ours.

``estimate_zero2_model_states_mem_needs`` (``stage_1_and_2.py``) and ``estimate_zero3_model_states_mem_needs``
(``stage3.py``); https://deepspeed.readthedocs.io/en/latest/memory.html. P parameters, N ranks, L the largest layer;
bytes of one rank's device. Both are for 16-bit parameters and Adam.

* Stage 2: 2P + 18P/N, the 18 being 2 (16-bit gradients) + 4 (fp32 gradients) + 4 (fp32 parameters) + 8 (states):
  all that is alive in the middle of the step, of a model without padding whose shares end with parameters.
* Stage 3: 4L + 18P/N. Parameters are 2 of the 18 there, so that it misses the 16-bit gradient shards, 2P/N, which
  are a tensor of their own (``grad_partitions_flat_buffer``).

Neither counts activations, buckets, the flat copy of the gradients before their cast, norms in fp64, or more
than a layer of gathered parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

PARAMETERS, GRADIENTS, WIDE_GRADIENTS, MAIN, STATES = 2, 2, 4, 4, 8
"""Bytes per parameter."""


@dataclass(frozen=True, slots=True)
class Documented:
    """Bytes per device and per node."""

    device: int
    host: int


def zero2(parameters: int, gpus_per_node: int, nodes: int = 1, *, offload: bool = False) -> Documented:
    """The documented formula of stage 2; the host's share has its safety factor of 1.5."""
    gpus = gpus_per_node * nodes
    if offload:
        return Documented(PARAMETERS * parameters, int(parameters * max(4 * gpus, 16) * 1.5))
    sharded = (GRADIENTS + WIDE_GRADIENTS + MAIN + STATES) * parameters
    return Documented(PARAMETERS * parameters + sharded // gpus, int(parameters * 4 * gpus_per_node * 1.5))


def zero3(
    parameters: int,
    largest_layer: int,
    gpus_per_node: int,
    nodes: int = 1,
    *,
    offload: bool = False,
    offload_parameters: bool = False,
) -> Documented:
    """The documented formula of stage 3, where the model is made under ``zero.Init``."""
    gpus = gpus_per_node * nodes
    layer = 4 * largest_layer
    if offload and offload_parameters:
        return Documented(layer, int(parameters * 18 / nodes * 1.5))
    if offload:
        return Documented(layer + 2 * parameters // gpus, int(parameters * 16 / nodes * 1.5))
    return Documented(layer + 18 * parameters // gpus, int(largest_layer * 4 * gpus_per_node * 1.5))


def counted_alike(stage: int, parameters: int, ranks: int) -> int:
    """What stays on a device, and the gradients in the middle of the step, by the names that DeepSpeed counts:
    stage 2's formula, and stage 3's without the layer and with the 16-bit gradient shards that it misses."""
    share = GRADIENTS + WIDE_GRADIENTS + MAIN + STATES
    if stage == 2:
        return PARAMETERS * parameters + share * parameters // ranks
    return (PARAMETERS + share) * parameters // ranks
