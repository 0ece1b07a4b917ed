"""What ``fully_shard`` makes of parameters: units that are gathered together, the sizes of their buffers, and the
optimizer's states and step on shards.

``torch/distributed/fsdp/_fully_shard/`` of torch 2.13: ``_fsdp_param.py`` (``FSDPParam``: one parameter),
``_fsdp_param_group.py`` (``FSDPParamGroup``: a unit). Every parameter is cut along dimension 0 into as many
equal pieces as there are shards, the last ones padded or empty; rank 0 has the most.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache, partial
from itertools import compress

from ...layers.autograd import ITEMSIZE
from ...layers.module import Parameter
from ...optimizers.base import State, full, optimizer_states, step_temporaries
from ...plan.plan import Optimizer, Plan
from ...plan.releases import Version, parsed
from ...tape.events import Category, Stretch, rounded
from ...tape.program import drop_all
from ...values import NamedTuple, dataclass, replace
from ..plain import tuned

FULLY_SHARD: Version = (2, 4)
"""PyTorch that has ``fully_shard`` with a tensor for each parameter."""


def lacks_fully_shard(plan: Plan) -> bool:
    """The plan's PyTorch has ``FullyShardedDataParallel`` alone."""
    return plan.torch is not None and parsed(plan.torch) < FULLY_SHARD


class Cut(NamedTuple):
    """Into how many pieces a parameter is cut, along which dimension (``shard_placement_fn``)."""

    shards: int
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Sharding:
    """The arguments of ``fully_shard`` that change memory."""

    shards: int
    """Ranks that a parameter is cut across."""
    replicas: int = 1
    """Groups of such ranks that hold the same shards (HSDP)."""
    parameters: str = "fp32"
    """Dtype of the sharded parameters that have none of their own, and of what the optimizer sees."""
    compute: str = "bf16"
    """``MixedPrecisionPolicy.param_dtype``: of gathered parameters and their gradients."""
    reduce: str = "fp32"
    """``MixedPrecisionPolicy.reduce_dtype``: in which gradients are reduced and, unreduced, accumulated."""
    offload: bool = False
    """``CPUOffloadPolicy``: shards, their gradients and the optimizer live in host memory."""
    tensor: int = 1
    """Ranks among which tensor parallelism has cut parameters before (``DTensor``); a unit's are the local ones."""
    divides: bool = False
    """``set_gradient_divide_factor``: over one rank, which sends nothing, gradients are divided in a copy."""
    adapters: str = ""
    """Dtype of the shards that are trained, where all others are frozen."""
    whole_4bit: bool = False
    """4-bit weights are not sharded (``ignored_params``)."""
    experts: Cut | None = None
    """How an expert's parameters are cut, where ranks share experts."""
    scaled_before: bool = False
    """Shards that are gathered in 8 bits have their scales already."""

    def cut(self, parameter: Parameter) -> Cut:
        return self.experts if self.experts is not None and parameter.expert else Cut(self.shards)

    @property
    def trained(self) -> str:
        """Dtype of the shards that are trained, and of their gradients (``orig_dtype``)."""
        return self.adapters or self.parameters

    def casts(self, parameter: Parameter) -> bool:
        """Whether a parameter's shard is cast before it is gathered (``FSDPParam.param_dtype``)."""
        return (parameter.dtype or self.parameters) != self.compute

    def gathers(self, parameter: Parameter) -> str:
        """The dtype in which a parameter's shards are gathered."""
        return parameter.gathered or self.compute

    def width(self, reshard_after_forward: bool | int) -> int | None:
        """Ranks across which parameters are cut after forward; ``None`` where they stay whole
        (``_fsdp_init.py``, ``_get_post_forward_mesh_info``)."""
        if isinstance(reshard_after_forward, bool):
            return self.shards if reshard_after_forward else None
        return None if reshard_after_forward == 1 else reshard_after_forward


@dataclass(frozen=True)
class Unit:
    """What one call of ``fully_shard`` manages, and the modules it spans by their place in the model."""

    name: str
    parameters: tuple[Parameter, ...]
    first: int
    """The module before whose forward it is gathered, and behind whose backward it is reduced."""
    last: int
    reshard: bool = True
    """``reshard_after_forward``."""
    with_gradient: bool = True
    """Its inputs have gradients, which tell when its backward has ended; otherwise the end of backward does."""
    cut: Cut | None = None
    """How its experts are cut, where they are otherwise than other parameters."""
    inner: bool = False
    """It is in the middle of its module: of experts that ranks share."""
    beside: bool = False
    """It is the second group of parameters of its module's unit, of experts that ranks share
    (``ShardPlacementResult``): gathered behind the first one, and reduced before it."""
    next_forward: tuple[str, ...] = ()
    """Units that are gathered ahead in forward (``set_modules_to_forward_prefetch``),"""
    next_backward: tuple[str, ...] = ()
    """and in backward, in the place of the one that ran before (``set_modules_to_backward_prefetch``)."""
    only: tuple[str, ...] = ()
    """Modules whose parameters alone it takes, where another unit has the others of those that it spans."""
    narrow: bool = False
    """Its last module does more than what it wraps, at whose seams (``passing.OWN``) its forward ends and its backward
    begins: a table is looked up before masks are made, a head is followed by its loss."""
    among: int | None = None
    """An integer ``reshard_after_forward``. It has a field of its own, since units are keys of caches and 1 is True."""

    @property
    def resharding(self) -> bool | int:
        """``reshard_after_forward`` as PyTorch takes it."""
        return self.reshard if self.among is None else self.among

    @property
    def of_experts(self) -> bool:
        """Of a module that it and another unit hold together, it holds the experts' parameters."""
        return self.inner or self.beside

    @property
    def alone(self) -> bool:
        """One module holds it whole."""
        return self.first == self.last

    @cached_property
    def tables(self) -> dict[int, tuple[int, ...]]:
        return {}

    @cached_property
    def trained(self) -> tuple[bool, ...]:
        """Of each parameter, whether it has a gradient."""
        return tuple(one.trained for one in self.parameters)

    def shard_elements(self, shards: int) -> tuple[int, ...]:
        """Elements of rank 0's piece of each parameter, with padding."""
        found = self.tables.get(shards)
        if found is None:
            cuts = [self.cut if self.cut is not None and one.expert else Cut(shards) for one in self.parameters]
            pieces = [
                one.elements // one.shape[dim] * -(-one.shape[dim] // count)
                for one, (count, dim) in zip(self.parameters, cuts, strict=True)
            ]
            found = self.tables[shards] = tuple(pieces)
        return found

    def flat(self, shards: int) -> int:
        """Elements of one rank's part of the all-gather: one piece of every parameter."""
        return sum(self.shard_elements(shards))

    def gathered(self, sharding: Sharding) -> tuple[tuple[int, str], ...]:
        """Of each parameter, the elements of rank 0's piece and their dtype as they are gathered."""
        return tuple(zip(self.shard_elements(sharding.shards), map(sharding.gathers, self.parameters), strict=True))

    def reduced(self, shards: int) -> int:
        """Elements of one rank's part of the reduce-scatter: one piece of every parameter that is trained."""
        return sum(compress(self.shard_elements(shards), self.trained))

    @cached_property
    def crosswise(self) -> tuple[bool, ...]:
        """Of each parameter, whether its pieces are of another dimension than the first."""
        other = self.cut is not None and self.cut.dim > 0 and self.cut.shards > 1
        return tuple(other and one.expert for one in self.parameters)

    def ranks(self, shards: int) -> int:
        """That share a parameter of it, where ``shards`` share another unit's."""
        return self.cut.shards if self.cut is not None else shards


@lru_cache(maxsize=1 << 12)
def shard(parameter: Parameter, shards: int, dim: int = 0) -> Parameter:
    """Rank 0's piece: ceil(d / shards) rows of dimension ``dim`` (``_init_sharded_param``,
    ``padded_sharded_param_size``)."""
    shape = list(parameter.shape)
    shape[dim] = -(-shape[dim] // shards)
    return replace(parameter, shape=tuple(shape))


def shard_of(sharding: Sharding, parameter: Parameter) -> Parameter:
    """The same of one that may have four bits."""
    if parameter.four_bit is not None and sharding.whole_4bit:
        return parameter
    return shard(tuned.packed(parameter, sharding.compute), *sharding.cut(parameter))


def size(elements: int, dtype: str) -> int:
    """Bytes of so many elements, rounded as a request."""
    return rounded(elements * ITEMSIZE[dtype])


# -- the optimizer ----------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def sharded_states(optimizer: Optimizer, sharding: Sharding) -> tuple[State, ...]:
    """Parameters and the optimizer's states, each as rank 0's shard (``DTensor``'s local tensor)."""
    if sharding.adapters:
        return tuned.sharded_states(optimizer, sharding.parameters, partial(shard_of, sharding))
    whole = (
        full("parameter", Category.PARAMETERS, sharding.parameters),
        *optimizer_states(optimizer, sharding.parameters, embeddings_32bit=optimizer.embeddings_32bit),
    )
    return tuple(_of_shard(state, sharding) for state in whole)


def _of_shard(state: State, sharding: Sharding) -> State:
    return State(state.name, state.category, lambda parameter: state.size(shard(parameter, *sharding.cut(parameter))))


@lru_cache(maxsize=256)
def sharded_step(tensors: tuple[Parameter, ...], optimizer: Optimizer, sharding: Sharding) -> Stretch:
    """The optimizer's step on shards: foreach lists are of local tensors (``DTensor`` dispatches each)."""
    pieces = [shard(one, *sharding.cut(one)) for one in tensors if one.trained]
    return Stretch(drop_all(step_temporaries(optimizer, pieces, sharding.trained), 1))


def host_bytes(tensors: Sequence[Parameter], optimizer: Optimizer, sharding: Sharding) -> int:
    """Bytes of host memory that one rank's offloaded states take: shards and their gradients (pinned), and
    what the optimizer keeps."""
    if not sharding.offload:
        return 0
    states = sharded_states(optimizer, sharding)
    gradients = sum(shard(one, *sharding.cut(one)).bytes(sharding.trained) for one in tensors if one.trained)
    return gradients + sum(state.size(one) for state in states for one in tensors)
