"""A miniature of PyTorch's autograd that knows only who holds which storage, and until when.

A recipe is written like the module it describes and run once on tensors that have a shape, a dtype
and no elements. What makes its tape right is what makes PyTorch's memory what it is:

* a storage lives while a Python variable, a saved tensor or a gradient in flight refers to it, so
  the storages here are ordinary objects and CPython's reference counting ends them at the same
  line as in the real module. One thing is not relied upon, because it differs between Pythons: when
  the arguments of a call die that the caller does not name. Python 3.10, and any Python whose frames
  PyTorch's compiler evaluates, keep them until the call returns. Where a module ends an argument early,
  its recipe is two functions, and the caller deletes the name between them;
* a node saves exactly the tensors that ``tools/autograd/derivatives.yaml`` names for it;
* backward runs ready nodes newest first, gradient accumulators before all (``engine.cpp``,
  ``CompareNodeTaskTime``); what a node returns for a broadcast input is summed to its shape
  (``validate_outputs``), then the node's incoming gradients are dropped, then its saved tensors
  (``call_function``, ``evaluate_function``);
* a second gradient for the same tensor is added in place where the first has no other owner
  (``input_buffer.cpp``, ``can_accumulate_inplace``); fake tensors, being a subclass, never are, so
  a comparison with a fake-tensor trace switches that off.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from math import prod
from sys import getrefcount
from typing import TYPE_CHECKING

from ..tape.events import PRODUCT, Category, Drop, Event, Hold, Hook, Seam, Stretch, Tape, rounded
from ..values import dataclass
from .counting import Counting
from .graph import (
    Accumulate,
    Backward,
    Delayed,
    Gradients,
    Leaf,
    Node,
    Storage,
    Tensor,
    Unsummed,
    bytes_of,
    incoming,
    nothing,
)
from .reductions import summed
from .work import ITEMSIZE, SUM_OF_ROWS, Operator, Shape, Stream, issued, multiplies, size_of

if TYPE_CHECKING:
    from .kernels import Kernels
    from .megatron_core.offload import Group
    from .megatron_core.precision import Low
    from .recompute import Frame
    from .tuning import Adapters, Packed, Tuning


__all__ = [
    "ITEMSIZE", "Accumulate", "Backward", "Gradients", "Leaf", "Node", "Recorder", "Shape", "Storage", "Tensor",
    "Unsummed", "incoming", "size_of",
]  # fmt: skip

DERIVED = Operator()


@dataclass
class Recorder(Counting):
    """Runs recipes and keeps their tape."""

    accumulates_in_place: bool = True
    """As on CUDA; ``False`` as on fake tensors."""
    first: bool = True
    """Of the first micro-batch: gradients appear, rather than being added to."""
    present: frozenset[str] = frozenset()
    """Parameters that have a gradient already, from another module that shares them."""
    kernel_workspaces: bool = False
    """Also record what kernels allocate inside."""
    threads: int = 0
    """Of these, buffers of sums on a GPU that runs so many threads at a time; 0: unknown, and none."""
    masks_first: bool = True
    """Also with them, dropout makes its mask before its output."""
    consumes_gradients: bool = False
    """A hook adds every parameter's gradient to a static buffer as soon as it is there, and drops it."""
    events: list[Event] = field(default_factory=list)
    parameters: dict[str, Leaf] = field(default_factory=dict)
    grad_enabled: bool = True
    graphless: bool = False
    """What runs never has a graph, whatever is trained: parameters that come first there have no gradients."""
    evaluates: bool = False
    """As after ``model.eval()``: dropout hands its input on."""
    closed: bool = False
    next_id: int = 1
    sequence: int = 0
    saved_outside: set[int] = field(default_factory=set)
    """Ids of storages held before the recording that a node saved."""
    views_products: bool = True
    """The gradient of a linear layer's input is a view of a product of matrices, in which nothing is summed in place;
    ``False`` where a Python function of its own multiplies tensors of more dimensions (ZeRO-3's)."""
    frame: Frame | None = None
    """The recompute region that is being run, if any, or the module whose saved tensors go to the host;"""
    sent: list[Group] = field(default_factory=list)
    """what has gone there, and is not back;"""
    leaving: dict[str, Tensor] = field(default_factory=dict)
    """what is still being copied there."""
    kept: Storage | None = None
    """The gradient of the output, where a caller keeps it throughout backward."""
    prefix: str = ""
    """Put before the names of parameters, where a module holds several layers."""
    autocast: str | None = None
    """The dtype in which autocast computes (``layers.autocast``),"""
    stored: str | None = None
    """and that of parameters, which are not in that of the operators' inputs then."""
    casts: dict[str, Tensor] = field(default_factory=dict)
    """Autocast's cache: parameters in its dtype, by their names."""
    tuning: Tuning | None = None
    """What is trained, where that is not every parameter."""
    kernels: Kernels | None = None
    """What runs in the place of the model's Python operators."""
    unpacked: tuple[Storage, ...] = ()
    """While a node's backward function runs: what the node saved, in the order in which it was named."""
    seams: bool = False
    """Also record where hooks of frameworks run."""
    summed: str | None = None
    """dtype of the static buffers to which gradients are added, if that is not the gradients' own."""
    later_products: list[Delayed] | None = None
    """Products for gradients of weights that are computed behind the backward pass, where they are,"""
    delayed_experts: list[Delayed] | None = None
    """those of experts alone, while their forward pass runs,"""
    until_delayed: list[Tensor] | None = None
    """and what was recomputed for them, of the part of a layer that is run."""
    contexts: list[Tensor] = field(default_factory=list)
    """Tensors that end with the graph alone."""
    multiplies: bool = False
    """The next tensor is a product of matrices,"""
    multiplied: bool = False
    """and there has been one in this direction."""
    tells_first: bool = False
    """What was recorded depends on ``first``."""
    required: list[Leaf] = field(default_factory=list)
    """Leaves made by ``requires_grad_``, whose tensor and gradient live as long as the graph."""

    # -- storages ---------------------------------------------------------------------------------

    def empty(self, shape: Shape, dtype: str, name: str, category: Category = Category.TEMPORARIES) -> Tensor:
        """A new tensor. ``TEMPORARIES`` that outlive their forward pass become ``ACTIVATIONS``."""
        size = size_of(shape, dtype)
        if self.counts:
            self.makes(size, category)
        size = rounded(size)
        identity = self.next_id
        self.next_id += 1
        if self.counts:
            return Tensor(Storage(self, identity, size, category, -1), shape, dtype)
        storage = Storage(self, identity, size, category, len(self.events))
        self.events.append(Hold(identity, size, category, name, shape, dtype, self.pool))
        if self.multiplies:
            self._multiplied()
        return Tensor(storage, shape, dtype)

    def in_turn(self, *made: tuple[Shape, str, str] | tuple[Shape, str, str, Category]) -> Tensor:
        """The last of new tensors, each given as to ``empty``: when one is there, the one before it ends."""
        for one in made:
            last = self.empty(*one)
        return last

    def outside(
        self, shape: Shape, dtype: str, category: Category = Category.ACTIVATIONS, id: int = 0, drops: bool = False
    ) -> Tensor:
        """A tensor that was held before; with ``drops`` its end is an event here, else somebody else's."""
        owner = self if drops else _STATIC.recorder
        return Tensor(Storage(owner, id, rounded(size_of(shape, dtype)), category, -1), shape, dtype)

    def hand_over(self, tensor: Tensor) -> int:
        """Gives ``tensor`` to whoever comes next: its end is no event here. Returns its id."""
        tensor.storage.recorder = _STATIC.recorder
        return tensor.storage.id

    def end(self, tensor: Tensor) -> None:
        """Gives back the memory of ``tensor``, whoever still has it (``untyped_storage().resize_(0)``)."""
        if tensor.storage.recorder is self:
            self.dropped(tensor.storage)
            self.hand_over(tensor)

    def dropped(self, storage: Storage) -> None:
        if not self.closed:
            self.events.append(Drop(storage.id, storage.bytes, storage.category))

    def recategorise(self, storage: Storage, category: Category) -> None:
        if storage.at >= 0 and storage.category != category:
            hold = self.events[storage.at]
            assert isinstance(hold, Hold)
            self.events[storage.at] = hold._replace(category=category)
            storage.category = category

    def seam(self, name: str, hook: Hook | None = None, tensor: int = 0) -> None:
        self.events.append(Seam(name, hook, tensor))

    def tunes(self, kernel: str, size: int) -> None:
        """Triton's autotuner times variants of ``kernel``, whose name says what it tells launches apart by, when first
        it is launched. Beside each it holds ``size`` bytes, which it writes so that the L2 cache has nothing of use."""
        if self.kernel_workspaces:
            self.events.append(Seam(f"tunes/{kernel}", once=size))

    # -- graph ------------------------------------------------------------------------------------

    def parameter(
        self,
        name: str,
        shape: Shape,
        dtype: str,
        *,
        expert: bool = False,
        low: Low | None = None,
        gathered: str | None = None,
    ) -> Tensor:
        """A parameter: held elsewhere (static memory), its gradient accumulated here unless it is frozen."""
        dtype = (self.tuning and self.tuning.dtype_of(name)) or self.stored or dtype
        name = self.prefix + name
        leaf = self.parameters.get(name)
        if leaf is None:
            if self.tuning is not None and name in self.tuning.saved:
                self.original(name, shape, dtype)
            leaf = Leaf(name, shape, dtype, True, name in self.present or not self.first)
            leaf.trained = not self.graphless and (self.tuning is None or self.tuning.trains(name))
            leaf.expert, leaf.low, leaf.gathered = expert, low, gathered
            self.parameters[name] = leaf
        return Tensor(_STATIC, shape, dtype, leaf.node if leaf.trained else None)

    @property
    def adapters(self) -> Adapters:
        """What is on layers that have adapters."""
        assert self.tuning is not None
        assert self.tuning.adapters is not None
        return self.tuning.adapters

    def original(self, name: str, shape: Shape, dtype: str) -> None:
        """The frozen parameter of which ``name`` is a trained copy."""
        whole = f"{name.removesuffix('.weight')}.original.weight"
        self.parameters[whole] = leaf = Leaf(whole, shape, dtype, True, False)
        leaf.trained = False

    def quantised(self, name: str, shape: Shape, four_bit: Packed) -> None:
        """A frozen parameter in 4 bits, of which operators see temporaries alone."""
        self.parameter(name, shape, four_bit.dtype)
        self.parameters[self.prefix + name].four_bit = four_bit

    def leaf(self, tensor: Tensor, name: str = "input") -> tuple[Tensor, Leaf]:
        """``tensor`` as the start of a graph, with the leaf that receives its gradient."""
        leaf = Leaf(name, tensor.shape, tensor.dtype, False, False)
        return Tensor(tensor.storage, tensor.shape, tensor.dtype, leaf.node), leaf

    @contextmanager
    def without_graph(self) -> Iterator[None]:
        """``torch.no_grad()`` around modules of the model."""
        before = self.grad_enabled, self.graphless
        self.grad_enabled, self.graphless = False, True
        yield
        self.grad_enabled, self.graphless = before

    def entered(self, module: str, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The inputs of ``module``, one of several parameters, at whose ends a recorder may have hooks;"""
        return inputs

    def left(self, module: str, output: Tensor) -> Tensor:
        """and its output."""
        return output

    def embedded(self, tensor: Tensor) -> Tensor:
        """The embedding's output, which requires a gradient where the tuning says so (``enable_input_require_grads``):
        of one that no node made, tensor and gradient live until the graph ends."""
        asked = self.tuning is not None and self.tuning.input_requires_grad
        if not asked or not self.grad_enabled or tensor.node is not None:
            return tensor
        tensor, leaf = self.leaf(tensor)
        leaf.node.saved = (tensor.storage,)
        self.required.append(leaf)
        return tensor

    def keeps_in_context(self, x: Tensor) -> None:
        """The function that is made next has ``x`` in its context, if it has a backward: until the graph ends, but for
        one of a region that runs again, whose graph ends with it."""
        again = self.frame is not None and self.frame.again is not None
        if x.node is not None and self.grad_enabled and not again:
            self.contexts.append(x)

    def end_required(self) -> None:
        """The graph has ended."""
        while self.required:
            leaf = self.required.pop()
            leaf.take()
            leaf.node.saved = ()

    def node(
        self,
        inputs: Sequence[Tensor],
        saved: Sequence[Tensor],
        backward: Backward,
        outputs: int = 1,
        work: Operator = DERIVED,
    ) -> Node | None:
        """The backward node of an operator on ``inputs``; ``None`` where no gradient is needed. Unless ``work`` says
        otherwise, one kernel reads the inputs and writes what was made since the operator before, a view does nothing,
        and in backward a kernel for each gradient reads the incoming one, and all of them what was saved."""
        outputs_made = self.launches > 0
        if multiplies(work.forward):
            self.multiply()
        if outputs_made:
            self._did(inputs, 1, work.forward, issue=work.issue[0])
        node = self._linked(inputs, saved, backward, outputs, work)
        if not outputs_made:  # inputs are saved before the kernel runs: it does not, if recomputing ends with them
            self._did(inputs, 1, work.forward, issue=work.issue[0])
        return node

    def _linked(
        self,
        inputs: Sequence[Tensor],
        saved: Sequence[Tensor],
        backward: Backward,
        outputs: int,
        work: Operator,
    ) -> Node | None:
        if not self.grad_enabled:
            return None
        edges = tuple((tensor.node, tensor.slot) if tensor.node is not None else None for tensor in inputs)
        if not any(edges):
            return None
        self.sequence += 1
        node = Node(self.sequence, edges, (), backward, outputs)
        node.pool, node.prefix = self.pool, self.prefix
        node.multiplies = self.kernel_workspaces and multiplies(work.backward)
        if self.counts:
            node.work, node.read = work.backward, sum(bytes_of(x) for x in saved)
            node.issue = work.issue[1]
        dtypes = tuple([tensor.dtype for tensor in inputs])
        if self.autocast is not None or dtypes.count(dtypes[0]) < len(dtypes):
            node.dtypes = dtypes
        if self.frame is not None:
            return self.frame.node(node, saved)
        node.saved = tuple(tensor.storage for tensor in saved)[::-1]  # a tuple dies back to front
        for storage in node.saved:
            if storage.at < 0:
                self.saved_outside.add(storage.id)
        return node

    def keeps_apart(self, *held: list[Tensor]) -> None:
        """The node that is made next saves tensors ``held``, too, and lets go of them by itself."""
        if self.frame is not None:
            for one in held:
                self.frame.keeps_apart(one)

    def saved_by(self, node: Node) -> tuple[Storage, ...]:
        """What ``node`` saved, in the order in which it was named, for a reader before its backward function."""
        if node.frame is None:
            return node.saved[::-1]
        node.frame.unpack(self, node)
        saved, node.saved = node.saved, ()
        return saved

    def output(
        self,
        inputs: Sequence[Tensor],
        saved: Sequence[Tensor],
        backward: Backward,
        shape: Shape,
        dtype: str,
        name: str,
        category: Category = Category.TEMPORARIES,
        work: Operator = DERIVED,
    ) -> Tensor:
        """A fresh tensor that an operator on ``inputs`` makes once its backward node is there."""
        if self.counts and work.forward is None:
            moved = size_of(shape, dtype) + sum(bytes_of(x) for x in inputs)
            work = work._replace(forward=(Stream(moved, 1, category is Category.LOGITS, work.issue[0]),))
        node = self.node(inputs, saved, backward, work=work)
        return self.empty(shape, dtype, name, category).by(node)

    def multiply(self) -> None:
        """The next tensor is a product of matrices."""
        self.multiplies = self.kernel_workspaces and not self.multiplied

    def _multiplied(self) -> None:
        self.multiplies, self.multiplied = False, True
        self.seam(PRODUCT)

    def backward(self, output: list[Tensor], gradient: list[Tensor]) -> None:
        """Runs the graph below ``output[0]`` from ``gradient[0]``. Both lists are emptied, so that the
        caller's variables keep neither alive."""
        root = output.pop().node
        assert root is not None
        waiting = _dependencies(root)
        buffers: dict[Node, Gradients] = {root: [gradient.pop()]}
        ready: list[tuple[int, int, Node]] = [(-root.sequence, 0, root)]
        pushed, outer = 0, (self.pool, self.prefix)
        self.multiplies = self.multiplied = False
        del root
        while ready:
            node = heapq.heappop(ready)[2]
            arrived = buffers.pop(node)
            if isinstance(node, Accumulate):
                self._accumulate(node.leaf, arrived)
                del arrived, node
                continue
            self.pool, self.prefix = node.pool, node.prefix
            if node.frame is not None:
                node.frame.unpack(self, node)
            given = [one and Tensor(_STATIC, one.shape, one.dtype) for one in arrived] if self.counts else ()
            self.made, self.launches, self.of_loss = 0, 0, False
            self.unpacked = node.saved if node.frame is not None else node.saved[::-1]
            self.multiplies = node.multiplies and not self.multiplied
            returned = list(node.backward(self, arrived))
            self.unpacked = ()
            self._did(given, self.launches, node.work, node.read, node.issue)
            if node.frame is not None:
                node.saved = ()  # recomputed tensors belong to the node alone and die within its apply
            produced = self._summed(returned, node)
            del arrived
            node.saved = ()
            node.backward = nothing
            node.frame = None
            together, added = node.together or _squares(node, produced), list[Tensor]()
            for edge in node.inputs:
                produced_one = produced.pop()
                if edge is None:
                    del produced_one
                    continue
                target, slot = edge
                ended = waiting[target] == 1 and target not in buffers
                if produced_one is None and ended and isinstance(target, Accumulate):  # an operator has added it
                    del produced_one, target
                    continue
                buffer = buffers.setdefault(target, [None] * target.outputs)
                if produced_one is not None:
                    self._arrive(buffer, slot, produced_one, target)
                    if together and buffer[slot] is not produced_one:
                        added.append(produced_one)
                del produced_one
                waiting[target] -= 1
                if not waiting[target]:
                    pushed += 1
                    heapq.heappush(ready, (-target.sequence, pushed, target))
                del target, buffer
            added.reverse()  # a list ends its items last first
            del node, returned, produced, edge, added
        self.pool, self.prefix = outer

    def _summed(self, returned: list[Tensor | Unsummed | None], node: Node) -> Gradients:
        """What a node returned, last first; ``returned`` is emptied."""
        for at in range(len(returned)):
            one = returned[at]
            if isinstance(one, Unsummed):
                needed = node.inputs[at] is not None
                whole, dtype = one.gradient.shape, one.gradient.dtype
                returned[at] = summed(self, whole, one.shape, dtype, one.name) if needed else None
                rows = prod(whole) // max(1, prod(one.shape))
                self._did([one.gradient], 1, None, issue=SUM_OF_ROWS.of(prod(whole), rows))
            del one
            if node.dtypes and node.inputs[at] is not None:
                self._cast_back(returned, at, node.dtypes[at])
        produced: Gradients = [one for one in returned[::-1] if not isinstance(one, Unsummed)]
        returned.clear()
        return produced

    def _cast_back(self, returned: list[Tensor | Unsummed | None], at: int, dtype: str) -> None:
        """A gradient in the dtype of what it is the gradient of, where kernels have promoted another."""
        gradient = returned[at]
        if isinstance(gradient, Tensor) and gradient.dtype != dtype:
            empty = not prod(gradient.shape)
            cast = None if empty else self.empty(gradient.shape, dtype, "gradient_cast")
            returned[at] = cast or Tensor(_STATIC, gradient.shape, dtype)
            operand = (gradient.shape, gradient.dtype)
            self._did([gradient], 1, None, issue=issued((operand,), gradient.shape, dtype))

    def _arrive(self, buffer: Gradients, slot: int, gradient: Tensor, target: Node) -> None:
        """Adds ``gradient`` to what has arrived: in place in one that is no view and that nobody else refers to
        (torch 2.13, ``input_buffer.cpp``, ``can_accumulate_inplace``)."""
        held, in_place = buffer[slot], self.accumulates_in_place and not target.apart
        if held is not None and self.counts:
            self.work.append(Stream(3 * bytes_of(held)))
        if held is None:
            buffer[slot] = gradient
        elif in_place and getrefcount(held.storage) == 2:
            return
        elif in_place and getrefcount(gradient.storage) == 2:
            buffer[slot] = gradient
        else:
            _divided = self.empty(held.shape, held.dtype, "gradient_divided") if target.divides else None
            buffer[slot] = self.empty(held.shape, held.dtype, "gradient_sum")

    def _accumulate(self, leaf: Leaf, arrived: Gradients) -> None:
        gradient = arrived[0]
        arrived.clear()
        if gradient is None:
            return
        if self.counts and leaf.is_parameter and (self.consumes_gradients or self.has_gradient(leaf)):
            kept = self.summed or gradient.dtype
            self.work.append(Stream(bytes_of(gradient) + 2 * size_of(gradient.shape, kept)))
        if leaf.is_parameter and self.seams:
            self.seam(leaf.name, Hook.GRADIENT, gradient.storage.id)
        if not leaf.is_parameter:
            shared = leaf.copies and getrefcount(gradient.storage) > 2
            leaf.gradient = self.empty(gradient.shape, gradient.dtype, "gradient_copied") if shared else gradient
        elif not self.consumes_gradients and not self.has_gradient(leaf):
            self.recategorise(gradient.storage, Category.GRADIENTS)
            leaf.gradient = gradient
            leaf.has_gradient = True

    @property
    def first_microbatch(self) -> bool:
        """``first``, for recipes that read it."""
        self.tells_first = True
        return self.first

    def has_gradient(self, leaf: Leaf) -> bool:
        """A gradient of ``leaf`` is there already, as in every micro-batch but the first."""
        self.tells_first = True
        return leaf.has_gradient

    def arrives(self, parameter: Tensor, gradients: Gradients) -> None:
        """The gradient of ``parameter`` is there, outside of a backward pass. ``gradients`` is emptied."""
        assert isinstance(parameter.node, Accumulate)
        self._accumulate(parameter.node.leaf, gradients)

    # -- result -----------------------------------------------------------------------------------

    def settle(self, start: int = 0) -> None:
        """Ends a forward pass: what was recorded since ``start`` and is still held are activations."""
        alive = {event.tensor for event in self.events[start:] if isinstance(event, Hold)}
        alive -= {event.tensor for event in self.events[start:] if isinstance(event, Drop)}
        for at in range(start, len(self.events)):
            event = self.events[at]
            if isinstance(event, Hold) and event.category == Category.TEMPORARIES and event.tensor in alive:
                self.events[at] = event._replace(category=Category.ACTIVATIONS)

    def close(self) -> None:
        self.closed = True

    def tape(self, start: int = 0, end: int | None = None) -> Tape:
        """What was recorded from event ``start`` up to ``end``, with each drop in its hold's category."""
        categories = {event.tensor: event.category for event in self.events if isinstance(event, Hold)}
        return Stretch(
            event._replace(category=categories[event.tensor])
            if isinstance(event, Drop) and categories.get(event.tensor, event.category) is not event.category
            else event
            for event in self.events[start:end]
        )


class _Static(Recorder):
    """Where parameters' storages belong: never an event."""

    def dropped(self, storage: Storage) -> None:
        return


_STATIC = Storage(_Static(), 0, 0, Category.PARAMETERS, 0)


def _squares(node: Node, produced: Gradients) -> bool:
    """``x * x``, both of whose gradients go to one node: each lives until both have been added. Of two views of one
    tensor, whose nodes recipes leave out, gradients have other shapes, and end one after the other."""
    if len(produced) != 2 or node.inputs[0] is None or node.inputs[0] != node.inputs[1]:
        return False
    first, second = produced
    return first is not None and second is not None and first.shape == second.shape


def _dependencies(root: Node) -> dict[Node, int]:
    """How many gradients each node below ``root`` waits for."""
    count: dict[Node, int] = {}
    seen = {root}
    todo = [root]
    while todo:
        for edge in todo.pop().inputs:
            if edge is None:
                continue
            target = edge[0]
            count[target] = count.get(target, 0) + 1
            if target not in seen:
                seen.add(target)
                todo.append(target)
    return count
