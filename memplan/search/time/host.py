"""Seconds of the host, which starts what the device runs: Python of PyTorch and Transformer Engine, autograd, launches.

The host runs ahead of the device unless it is the slower one. It cannot run ahead of what it has to read from the
device: how many rows each expert has (``MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize``, DeepEP's and
HybridEP's dispatch), so that what comes behind in a forward pass waits for both. A CUDA graph is one call.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...layers.work import Calls, Exchange, Kernel, Product
from ...values import NamedTuple

HOST_OPERATOR = 7e-6
"""Seconds that PyTorch needs on the host for the simplest operator that autograd follows
(https://github.com/pytorch/pytorch/issues/41383)."""

_ON_CPU = 2.36e-6
"""What such an operator, a sum of two tensors of 512 elements, takes on the CPU of what follows (an AMD EPYC)."""

TRANSFORMERS_OPERATOR = 22.2e-6 - _ON_CPU + HOST_OPERATOR
"""Seconds of an operator that modules of transformers call forward: a layer's on that CPU, in fp32 and of tensors so
small that their arithmetic is nothing, over its operators, of GPT-NeoX; Llama's took 17.4, GPT-2's 28.4 (user and
system time, the least of twelve; torch 2.11, transformers 5.23)."""

TRANSFORMERS_BACKWARD = 12.0e-6 - _ON_CPU + HOST_OPERATOR
"""The same where autograd calls them: of GPT-NeoX; Llama's took 8.2, GPT-2's 13.4."""

HOST_WAIT = 5.8e-6
"""Seconds by which a kernel and the gap behind it take longer if the host waits: 9.6 instead of 3.8 microseconds
(https://developer.nvidia.com/blog/cuda-graphs/)."""

GRACE = 37.08 / 13.48
"""How much slower a Grace is: ``torch.nn.Linear`` forward on GB200 beside a DGX H100's Xeon 8480C
(https://github.com/NVIDIA/TransformerEngine/issues/2053)."""

TE_LINEAR = 99.66e-6 / GRACE
"""Seconds of Transformer Engine's ``Linear`` forward on such a Xeon; on GB200 99.66 microseconds (the same issue)."""

TE_EXPERT = (966.6e-6 / 2 - TE_LINEAR) / 4
"""Seconds for each expert in a ``GroupedLinear`` of Transformer Engine, forward, beside those of a linear layer: two of
them with four experts each on the host of a B300 take 966.6 microseconds under a profiler
(https://github.com/NVIDIA/TransformerEngine/issues/2939). On that of an H800 one takes about a millisecond (issue
1499), most of it for calls for every expert. Of a Grace no figure was found: it counts the same."""

BACKWARD = 2.1 / 1.2
"""How much longer the backward pass of a block of experts takes the host
(https://github.com/NVIDIA/TransformerEngine/issues/2897)."""


class Host(NamedTuple):
    """How a framework's code runs."""

    linear: float = HOST_OPERATOR
    """Seconds of a linear layer's forward,"""
    expert: float = 0.0
    """and of each expert's part in that of a group."""
    operator: float = HOST_OPERATOR
    """Seconds of any other operator's forward,"""
    back: float = HOST_OPERATOR
    """and of one that backward calls."""
    replays: bool = False
    """A CUDA graph launches the whole iteration."""
    reads: bool = True
    """It reads how many rows each expert has: not where all have as many (``MoEAlltoAllTokenDispatcher.preprocess``,
    ``drop_and_pad``)."""
    blocking: bool = False
    """The host waits for every kernel (``CUDA_LAUNCH_BLOCKING``), so that nothing runs beside its Python."""


TRANSFORMER_ENGINE = Host(TE_LINEAR, TE_EXPERT)
PYTHON_MODULES = Host(operator=TRANSFORMERS_OPERATOR, back=TRANSFORMERS_BACKWARD)


def seconds(work: Sequence[tuple[Kernel, int]], host: Host, slower: float, backward: bool, replayed: Calls) -> float:
    """Of what is called in ``work``, but for what graphs have ``replayed``. A linear layer has one product forward, two
    in backward."""
    share, operator = (BACKWARD / 2, host.back) if backward else (1.0, host.operator)
    linear, others, experts = -replayed.linear, -replayed.others, 0
    for kernel, times in work:
        if not isinstance(kernel, Product):
            others += times * (kernel.times if isinstance(kernel, Exchange) else kernel.launches)
        else:
            linear += times
            experts += times * kernel.times if kernel.rows else 0
    ordinary = max(0, linear) * max(operator, share * host.linear) + max(0, others) * operator
    return slower * ordinary + experts * share * host.expert
