"""What the graph of an autograd is made of: storages, tensors, the nodes that compute gradients, and leaves that these
arrive at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..tape.events import Category
from ..values import NamedTuple
from .work import Shape, Work, size_of

if TYPE_CHECKING:
    from .autograd import Recorder
    from .megatron_core.precision import Low
    from .recompute import Frame
    from .tuning import Packed


class Storage:
    """Memory behind one or more tensors; its death is an event on the tape."""

    __slots__ = ("at", "bytes", "category", "id", "recorder")

    def __init__(self, recorder: Recorder, id: int, size: int, category: Category, at: int) -> None:
        self.recorder = recorder
        self.id = id
        self.bytes = size
        self.category = category
        self.at = at
        """Where its hold is among the recorder's events; −1 if it was held before."""

    def __del__(self) -> None:
        self.recorder.dropped(self)


class Tensor:
    """A shape and a dtype over a storage, with the node that computes its gradient."""

    __slots__ = ("base", "dtype", "node", "shape", "slot", "storage")

    def __init__(self, storage: Storage, shape: Shape, dtype: str, node: Node | None = None, slot: int = 0) -> None:
        self.base: Storage | None = None
        """That of the tensor that this is a view of, which PyTorch keeps beside it."""
        self.storage = storage
        self.shape = shape
        self.dtype = dtype
        self.node = node
        self.slot = slot
        """Which output of ``node`` this is."""

    def view(self, *shape: int) -> Tensor:
        """The same storage and gradient under another shape (view, transpose, expand)."""
        seen = Tensor(self.storage, shape, self.dtype, self.node, self.slot)
        seen.base = self.storage
        return seen

    def alias(self, *shape: int) -> Tensor:
        """The tensor itself under another name; ``shape`` where broadcasting leaves more dimensions than elements."""
        return Tensor(self.storage, shape or self.shape, self.dtype, self.node, self.slot)

    def by(self, node: Node | None) -> Tensor:
        """The tensor, as the output of ``node``, the last that its operator makes."""
        self.storage.recorder.made = self.storage.recorder.launches = 0
        self.node = node
        return self


class Unsummed(NamedTuple):
    """The gradient of a broadcast input at the full shape, which the engine still has to sum."""

    gradient: Tensor
    shape: Shape
    name: str


def bytes_of(x: Tensor) -> int:
    """Of its elements; its storage may be larger."""
    return size_of(x.shape, x.dtype)


Gradients = list["Tensor | None"]

Delayed = Callable[["Recorder"], list[tuple["Tensor", Gradients]]]
"""A product for gradients of weights, run later than the rest of its layer's backward: parameters and gradients."""

Backward = Callable[["Recorder", Gradients], Sequence["Tensor | Unsummed | None"]]


def incoming(gradients: Gradients) -> Tensor:
    """The gradient of an operator's first output, where there is one."""
    gradient = gradients[0]
    assert gradient is not None
    return gradient


class Node:
    """One backward function: what it saved, and how it turns gradients of outputs into those of inputs."""

    __slots__ = (
        "__weakref__", "apart", "backward", "divides", "dtypes", "frame", "inputs", "issue", "multiplies", "outputs",
        "pool", "prefix", "read", "saved", "sequence", "together", "work",
    )  # fmt: skip

    def __init__(
        self,
        sequence: int,
        inputs: tuple[Edge | None, ...],
        saved: tuple[Storage, ...],
        backward: Backward,
        outputs: int,
    ) -> None:
        self.dtypes: tuple[str, ...] = ()
        """Of the inputs, where gradients have to be cast to them."""
        self.sequence = sequence
        self.inputs = inputs
        self.saved = saved
        self.backward = backward
        self.outputs = outputs
        self.frame: Frame | None = None
        """Where the saved tensors come from when they are recomputed, or on the host."""
        self.work: Work | None = None
        """What its backward function does, where that does not follow from tensors,"""
        self.read = 0
        """and bytes of the tensors that it saved."""
        self.issue = 0
        """As of ``Operator``."""
        self.pool = 0
        """The stream whose memory its backward function takes,"""
        self.prefix = ""
        """and what stands before the names of the parameters that it reads again, where it recomputes a region."""
        self.multiplies = False
        """Its backward function multiplies matrices."""
        self.together = False
        """Gradients of its inputs live until all have been added, as PyTorch's do (torch 2.13, ``engine.cpp``,
        ``evaluate_function``); of other nodes, where recipes leave out those of views, each until it has been."""
        self.apart = False
        """Gradients of its outputs are of a tensor subclass (``DTensor``), which is never added to in place,"""
        self.divides = False
        """and one of two is divided before, as every rank has it whole and of the other a part of the sum."""


Edge = tuple[Node, int]
"""A node, and which of its outputs."""


class Accumulate(Node):
    """The end of a path: adds into a parameter's gradient, or hands back a layer's input gradient."""

    __slots__ = ("leaf",)

    def __init__(self, leaf: Leaf) -> None:
        super().__init__(2**62, (), (), nothing, 1)
        self.leaf = leaf


def nothing(recorder: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
    return ()


class Leaf:
    """A tensor that gradients arrive at: a parameter, or a layer's input."""

    __slots__ = (
        "copies", "dtype", "expert", "four_bit", "gathered", "gradient", "has_gradient", "is_parameter", "low", "name",
        "node", "shape", "trained",
    )  # fmt: skip

    def __init__(self, name: str, shape: Shape, dtype: str, is_parameter: bool, has_gradient: bool) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.is_parameter = is_parameter
        self.has_gradient = has_gradient
        """A gradient is there already (every micro-batch but the first)."""
        self.trained = True
        """Gradients arrive; ``False`` for a frozen parameter."""
        self.expert = False
        """Ranks that share a parameter are those of an expert."""
        self.four_bit: Packed | None = None
        """How a quantised parameter is stored."""
        self.low: Low | None = None
        """In what its products read it, where that is not the parameter itself."""
        self.gathered: str | None = None
        """The dtype in which shards of it are gathered, where that is not the one of compute."""
        self.copies = False
        """A gradient that others have, too, is copied (``accumulate_grad.h``, ``accumulateGrad``)."""
        self.gradient: Tensor | None = None
        self.node = Accumulate(self)

    def take(self) -> Tensor | None:
        """The gradient, which the leaf then no longer holds."""
        gradient, self.gradient = self.gradient, None
        return gradient
