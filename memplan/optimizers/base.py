"""What memplan asks of an optimizer. Each has an object, in a file beside this one, that answers.

An optimizer says what it keeps for a parameter, what its step allocates while it runs, how many bytes the step moves,
and what other tools call it. Which optimizers a framework runs is in the framework's own table.

What an optimizer keeps for every parameter. Sizes in bytes, per tensor.

What an optimizer's step takes while it runs: its recipe on storages without elements (``layers.autograd``).

Fused kernels, apex and bitsandbytes allocate nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from ..layers.autograd import Recorder, Tensor
from ..layers.module import Parameter
from ..tape.events import Category, Drop, Hold, Tape, rounded
from ..values import dataclass

if TYPE_CHECKING:
    from ..plan.plan import Optimizer


EMBEDDINGS = ("word.weight", "position.weight", "token_type.weight")
"""Parameters of embedding modules, as the recipes name them."""


@dataclass(frozen=True, slots=True)
class State:
    """One tensor that is kept for each parameter."""

    name: str
    category: Category
    size: Callable[[Parameter], int]
    """Bytes for a parameter, rounded; 0 where it has none."""

    def hold(self, parameter: Parameter, tensor: int, dtype: str = "") -> Hold | None:
        size = self.size(parameter)
        if not size:
            return None
        return Hold(tensor, size, self.category, f"{parameter.name}/{self.name}", parameter.shape, dtype)


@lru_cache(maxsize=64)
def full(name: str, category: Category, dtype: str) -> State:
    """A tensor like the parameter, in ``dtype``."""
    return State(name, category, lambda parameter: parameter.bytes(dtype))


STEP = State("step", Category.OPTIMIZER_STATES, lambda _: rounded(4))
"""The step count of a fused optimizer, one fp32 number for each parameter."""


def optimizer_states(optimizer: Optimizer, dtype: str, *, embeddings_32bit: bool) -> tuple[State, ...]:
    """States of ``optimizer`` on the device, over parameters of ``dtype``; none of one that never has a gradient, which
    steps pass over (``if p.grad is not None`` in each ``_init_group`` of ``torch.optim``)."""
    made = optimizer.algorithm.states(optimizer, dtype, embeddings_32bit=embeddings_32bit)
    return tuple(State(one.name, one.category, _of_trained(one)) for one in made)


def _of_trained(state: State) -> Callable[[Parameter], int]:
    return lambda parameter: state.size(parameter) if parameter.trained else 0


Parameters = Sequence[Parameter]

Step = Callable[[Recorder, Parameters, str, bool], None]
"""Recipe of a step over parameters (and gradients) of a dtype, with or without weight decay: the lines of the real step
in their order, where a variable ends when Python's ends. All parameters have a gradient and states; a number of no
dimension on the device counts 512 bytes."""

Steps = Mapping[str | None, Step]

FieldsByName = Mapping[str, Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class DeepspeedType:
    """How DeepSpeed makes the optimizer (``runtime/engine.py``, ``_configure_basic_optimizer``)."""

    name: str
    """``optimizer.type`` of its configuration."""
    kernel: str | None = None
    """The kernel of DeepSpeed's own implementation (``ops/op_builder``); ``None`` where PyTorch's runs."""
    torch_switch: str | None = None
    """The parameter that asks for PyTorch's in place of DeepSpeed's own."""
    decoupled: str | None = None
    """The optimizer that this type is unless ``adam_w_mode`` is off."""
    tested: bool = False
    """ZeRO takes it unasked (``runtime/zero/utils.py``, ``ZERO_SUPPORTED_OPTIMIZERS``)."""
    offloads: bool = True
    """Its step on the host is modelled."""


class Algorithm(ABC):
    """One optimizer; a plan's section ``optimizer`` has its settings.

    A file overrides what differs; what stands here holds for an optimizer of PyTorch that no other tool names.
    """

    name: ClassVar[str]
    implementations: ClassVar[tuple[str | None, ...]]
    """The default first; ``None`` where there is one alone."""
    steps: ClassVar[Steps] = {}
    """By implementation; those that are not here allocate nothing while they run."""

    eight_bit: ClassVar[bool] = False
    """States are bytes, with a scale for every block (bitsandbytes)."""
    block_sizes: ClassVar[tuple[int, ...]] = ()
    """Elements of a state that may share one scale, the default first; none where there are no scales,"""
    block_sizes_are: ClassVar[str] = ""
    """and whose sizes these are."""
    decays: ClassVar[bool] = False
    """Weights decay unless the plan says otherwise, as in the optimizer's constructor."""
    has_momentum: ClassVar[bool] = False
    """``optimizer.momentum`` is its field."""
    precision_aware: ClassVar[bool] = False
    """Transformer Engine has it with states in dtypes of choice."""
    in_8_bits: ClassVar[str | None] = None
    """The same optimizer with 8-bit states, which a search may propose."""

    torch: ClassVar[str | None] = None
    """Its class in ``torch.optim``, if it takes all parameters: what a trace runs."""
    bitsandbytes: ClassVar[str | None] = None
    """Its class in ``bitsandbytes.optim`` with 8-bit states, which a trace runs, too."""
    torch_default: ClassVar[str] = "foreach"
    """Which implementation PyTorch takes unasked on CUDA."""
    trainer: ClassVar[FieldsByName] = {}
    """Values of the Trainer's ``optim``, and the fields of a plan that each stands for."""
    classes: ClassVar[FieldsByName] = {}
    """Other libraries' classes, called otherwise, and older names of the Trainer, and the fields of a plan that each
    stands for. apex's ``FusedAdam`` (``apex/optimizers/fused_adam.py``) and DeepSpeed's (``ops/adam/fused_adam.py``)
    decay weights as AdamW unless ``adam_w_mode`` is off."""
    deepspeed: ClassVar[DeepspeedType | None] = None
    """``None``: the training script makes it."""
    megatron: ClassVar[str | None] = None
    """``--optimizer`` of Megatron-LM."""
    torchtitan: ClassVar[str | None] = None
    """``optimizer.name`` of torchtitan."""

    def step_of(self, optimizer: Optimizer) -> Step | None:
        """The recipe of its step, where that allocates."""
        return self.steps.get(optimizer.implementation)

    @abstractmethod
    def moments(self, optimizer: Optimizer) -> int:
        """States with as many elements as the parameter."""

    @abstractmethod
    def states(self, optimizer: Optimizer, dtype: str, *, embeddings_32bit: bool) -> tuple[State, ...]:
        """What is kept on the device for each parameter of ``dtype``."""

    def bytes_moved(self, optimizer: Optimizer, main: int, gradient: int) -> float:
        """Bytes that the step reads and writes for each parameter: its gradient (of ``gradient`` bytes) once, the
        parameter (of ``main`` bytes) and its states twice."""
        return gradient + 2.0 * self.moments(optimizer) * (1 if self.eight_bit else main) + 2 * main

    def issue(self, optimizer: Optimizer, main: int) -> int:
        """Femtoseconds for each parameter that an H200's multiprocessors take for the step's instructions."""
        return 0

    def assumptions(self, optimizer: Optimizer) -> tuple[str, ...]:
        """What an estimate takes for granted."""
        return ()


# -- steps ---------------------------------------------------------------------------------------------


def step_temporaries(optimizer: Optimizer, parameters: Iterable[Parameter], dtype: str) -> list[Hold]:
    """Tensors alive at the peak of the step itself, over parameters (and gradients) of ``dtype``."""
    return alive_at_peak(step_tape(optimizer, tuple(parameters), dtype))


def step_tape(optimizer: Optimizer, parameters: Sequence[Parameter], dtype: str) -> Tape:
    """The step's events from its first line to its return."""
    r = Recorder(grad_enabled=False)
    recipe = optimizer.algorithm.step_of(optimizer)
    if recipe is not None:
        recipe(r, parameters, dtype, decay_of(optimizer))
    return r.tape()


def decay_of(optimizer: Optimizer) -> bool:
    """Whether weights decay; by default as the optimizer's constructor has it."""
    return optimizer.algorithm.decays if optimizer.weight_decay is None else optimizer.weight_decay > 0


def alive_at_peak(tape: Tape) -> list[Hold]:
    """The tensors that ``tape`` holds where it first holds most, in order of appearance."""
    live = peak = 0
    at = -1
    for index, event in enumerate(tape):
        if isinstance(event, Hold):
            live += event.bytes
            if live > peak:
                peak, at = live, index
        elif isinstance(event, Drop):
            live -= event.bytes
    holds = {event.tensor: event for event in tape[: at + 1] if isinstance(event, Hold)}
    for event in tape[: at + 1]:
        if isinstance(event, Drop):
            del holds[event.tensor]
    return list(holds.values())


def like(r: Recorder, parameter: Parameter, dtype: str, name: str) -> Tensor:
    """A fresh tensor like ``parameter``."""
    return r.empty(parameter.shape, dtype, name)


def number(r: Recorder, dtype: str, name: str) -> Tensor:
    """A tensor of no dimension."""
    return r.empty((), dtype, name)
