"""What is trained of FSDP1's flat parameters on one rank, and the optimizer's states of it.

With ``use_orig_params``, as the Trainer has it (transformers 5.23, ``training_args.py``, ``_process_fsdp_args``), an
optimizer is given each parameter, of which a rank has the part that its shard of the flat one covers: all of it, a
piece, or nothing, and then no gradient (torch 2.13, ``_flat_param.py``, ``_use_sharded_views``). PyTorch's optimizers
take as much for the pieces as for the shard. bitsandbytes' do not: a piece of an embedding has states in fp32, as the
Trainer asks for (``register_module_override``), and so has a piece of fewer than 4,096 elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from ...families.base import place
from ...layers.module import Parameter
from ...layers.tuning import ADAPTERS
from ...optimizers.base import State, optimizer_states
from ...optimizers.bitsandbytes import managed_bytes
from ...plan.plan import Optimizer
from ...tape.events import Category, rounded
from ...tape.program import Span
from ...values import dataclass, replace
from ..plain.tuned import kept_beside
from .modules import MODEL


@dataclass(frozen=True, slots=True)
class Flat:
    """A unit: bytes on all ranks, with those of the modules that it spans by their place."""

    name: str
    first: int
    last: int
    whole: int
    """Of the gathered flat parameter, in the dtype of compute."""
    trained: int
    """Elements that are trained; 0 where the unit is frozen."""
    reshard: bool = True
    holder: str = ""
    """Its first parameter, which stands for the flat one where each parameter's states are counted."""
    inner: bool = False
    """It is in the middle of its module: none is."""
    narrow: bool = False
    """Its module does more than what it wraps: of none is that told."""
    parts: tuple[int, ...] = ()
    """Bytes of each parameter."""
    members: tuple[Parameter, ...] = ()
    """Its parameters, in the order in which they lie in the flat one."""
    sent: int = 0
    """Buffers that rank 0 sends, too, while the unit is wrapped."""
    kept: tuple[int, int] = (0, 0)
    """Bytes of input and of the output's gradient, which a frozen unit's hook keeps."""

    @property
    def with_gradient(self) -> bool:
        """The root's end is that of backward."""
        return self.name != MODEL

    @property
    def key(self) -> str:
        """What its holder is called among those of all units."""
        return f"{self.name}/{self.holder}"


Units = tuple[Flat, ...]
"""Those that are no adapters'."""


def units_held(
    spans: Sequence[Span], units: Sequence[Flat], registered: tuple[str, ...] = ()
) -> tuple[tuple[Span, ...], Units]:
    """``spans``, one for each module, in which each unit's holder is called by its ``key``: layers may be of several
    kinds whose parameters have the same names. And the units that are no adapters', with their parameters in the order
    in which modules are ``registered``."""

    def ordered(unit: Flat) -> Flat:
        return replace(unit, members=tuple(sorted(unit.members, key=lambda one: place(one.name, registered))))

    own = tuple(ordered(unit) for unit in units if not is_adapter(unit.holder))
    holders = {unit.first: unit for unit in own if unit.name != MODEL}
    root = next((unit for unit in own if unit.name == MODEL), None)
    made = []
    for at, span in enumerate(spans):
        unit = holders.get(at, root)
        names = [one.name for one in span.module.parameters]
        if unit is not None and unit.holder in names:
            number = names.index(unit.holder)
            parameters = list(span.module.parameters)
            parameters[number] = replace(parameters[number], name=unit.key)
            span = Span(replace(span.module, parameters=tuple(parameters)), span.names)
            root = None if unit is root else root
        made.append(span)
    return tuple(made), own


def is_adapter(name: str) -> bool:
    """Whatever peft calls the adapter, which it registers as ``default``."""
    return name.replace(".default", "").endswith(ADAPTERS)


def piece(parameter: Parameter, ranks: int, dtype: str) -> Parameter:
    """Rank 0's part of a trained parameter that is a unit, as large as that of any other rank together."""
    return Parameter(parameter.name, (-(-parameter.elements // ranks),), dtype)


def covered(unit: Flat, ranks: int, rank: int, dtype: str) -> tuple[Parameter, ...]:
    """The pieces of a trained unit's parameters that ``rank`` has."""
    share = -(-unit.trained // ranks)
    first, last, at = rank * share, (rank + 1) * share, 0
    found = []
    for one in unit.members:
        size = min(last, at + one.elements) - max(first, at)
        if size > 0:
            found.append(Parameter(one.name, (size,), dtype))
        at += one.elements
    return tuple(found)


def fullest(states: Sequence[State], units: Units, ranks: int, dtype: str) -> int:
    """The rank whose pieces of all ``units`` have the most states."""
    sizes, of_members = [0] * ranks, dict[tuple[Parameter, ...], list[int]]()
    for unit in units:
        if unit.members not in of_members:
            made = (covered(unit, ranks, rank, dtype) for rank in range(ranks))
            of_members[unit.members] = [sum(state.size(one) for one in own for state in states) for own in made]
        sizes = [size + more for size, more in zip(sizes, of_members[unit.members], strict=True)]
    return sizes.index(max(sizes))


@lru_cache(maxsize=64)
def trained_of(optimizer: Optimizer, ranks: int, units: Units, dtype: str) -> Mapping[str, tuple[Parameter, ...]]:
    """By ``key`` of a trained unit what the optimizer is given of it, on the rank that needs most."""
    trained = tuple(unit for unit in units if unit.trained)
    if not optimizer.of_bitsandbytes:
        return {unit.key: (Parameter(unit.holder, (-(-unit.trained // ranks),), dtype),) for unit in trained}
    states = optimizer_states(optimizer, dtype, embeddings_32bit=optimizer.embeddings_32bit)
    rank = fullest(states, trained, ranks, dtype)
    return {unit.key: covered(unit, ranks, rank, dtype) for unit in trained}


def managed_states(
    optimizer: Optimizer, tensors: Sequence[Parameter], ranks: int, of_adapters: int, units: Units, dtype: str
) -> int:
    """Bytes of paged states in unified memory, of a rank on average: those of embeddings are the first ranks'."""
    if not optimizer.paged:
        return 0
    adapters = [piece(one, of_adapters, dtype) for one in tensors if one.trained and is_adapter(one.name)]
    kinds = Counter(replace(unit, name="", first=0, last=0) for unit in units if unit.trained)
    made = {unit: [one for rank in range(ranks) for one in covered(unit, ranks, rank, dtype)] for unit in kinds}
    together = sum(count * managed_bytes(optimizer, made[unit]) for unit, count in kinds.items())
    return managed_bytes(optimizer, adapters) + -(-together // ranks)


def pieces_of(
    optimizer: Optimizer, tensors: Sequence[Parameter], ranks: int, of_adapters: int, units: Units, dtype: str
) -> tuple[Parameter, ...]:
    """What the optimizer updates here: of each adapter's weight, which ``of_adapters`` ranks share, and of each trained
    unit."""
    own = trained_of(optimizer, ranks, units, dtype)
    parts = ((piece(one, of_adapters, dtype),) if is_adapter(one.name) else own.get(one.name, ()) for one in tensors)
    return tuple(part for one, made in zip(tensors, parts, strict=True) if one.trained for part in made)


@lru_cache(maxsize=64)
def flat_states(optimizer: Optimizer, ranks: int, of_adapters: int, units: Units, trained: str) -> tuple[State, ...]:
    """Shards, what 4-bit weights keep beside them, whole, and the optimizer's states on shards. A unit is one tensor,
    which its first parameter stands for (``units_held``); ``of_adapters`` ranks share an adapter's weight."""
    own = trained_of(optimizer, ranks, units, trained)
    shares = {unit.key: _share(unit, ranks, trained) for unit in units}

    def sharded(parameter: Parameter) -> int:
        if is_adapter(parameter.name):
            return piece(parameter, of_adapters, trained).bytes(trained)
        return shares.get(parameter.name, 0)

    def of(state: State) -> State:
        def size(parameter: Parameter) -> int:
            if is_adapter(parameter.name):
                return state.size(piece(parameter, of_adapters, trained))
            return sum(map(state.size, own.get(parameter.name, ())))

        return State(state.name, state.category, size)

    kept = optimizer_states(optimizer, trained, embeddings_32bit=optimizer.embeddings_32bit)
    return (State("parameter", Category.PARAMETERS, sharded), *kept_beside(), *map(of, kept))


def _share(unit: Flat, ranks: int, trained: str) -> int:
    """Bytes of a rank's shard."""
    if unit.trained:
        return Parameter(unit.holder, (-(-unit.trained // ranks),)).bytes(trained)
    return rounded(-(-unit.whole // ranks))
