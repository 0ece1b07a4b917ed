"""A recorder whose tape has seams where hooks of submodules and parameters run.

A submodule is a ``Linear``, a norm or an embedding, known by the weight that its operator reads; or one without
parameters, of which only the moment counts (``submodules``). DeepSpeed (``parameter_offload.py``,
``_register_deepspeed_module``) has hooks before and behind every submodule's forward and, as autograd nodes at its
output and its input, before and behind its backward; ``stage3.py``, ``stage_1_and_2.py`` and DDP's reducer have one
behind every parameter's gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from ...families.base import Submodules, place
from ...layers.autograd import DERIVED, Accumulate, Backward, Gradients, Leaf, Node, Recorder, Shape, Tensor, Unsummed
from ...layers.recompute import Frame
from ...layers.tuning import Packed
from ...layers.work import NOTHING, Operator
from ...tape.events import Category, Hook
from ...values import dataclass

if TYPE_CHECKING:
    from ...layers.megatron_core.precision import Low

NONE = Submodules()

MATRIX = 2
"""Dimensions of weights whose products DeepSpeed's linear function makes."""

SAVED = "/saved"
"""What the name of a gathered weight ends with that a node has saved, from its parameter's release on."""

NO_PARAMETERS = ""
"""Name of every submodule without parameters at a seam."""

BASE = "base"
"""Name of the base model at one, where its own forward reads the embedding's weight."""


@dataclass
class HookedRecorder(Recorder):
    """A recorder whose tape has seams where hooks of submodules and parameters run."""

    submodules: Submodules = NONE
    """Submodules without parameters."""
    modules: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Parameters of each submodule, by the name of its weight."""
    without_input: set[str] = field(default_factory=set)
    """Submodules whose input needs no gradient: their backward ends unnoticed."""
    due: str = ""
    """A submodule that ends with the next tensor, or with its output of that name."""
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Names of outputs that come later than the next tensor, by the name of the submodule's weight."""
    remaining: dict[str, int] = field(default_factory=dict)
    """Gradients that each submodule still waits for: of its parameters, or of a part's inputs."""
    bias_first: bool = False
    """A ``Linear``'s bias gets its gradient before its weight does (``addmm(bias, input, weight)``; the weight's goes
    through a transpose): not so under ZeRO-3's own linear function."""
    held_back: tuple[Leaf, Gradients] | None = None
    in_backward: bool = False
    frozen: dict[int, tuple[Tensor, str]] = field(default_factory=dict)
    """Parameters that have no gradient, by the identity of what operators take."""
    leaf_of: str = ""
    """The submodule whose output is a leaf that requires a gradient."""
    packed: str = ""
    """A 4-bit weight that the next node's product is of."""
    registered: tuple[str, ...] = ()
    """Modules of a layer in the order of their parameters."""
    inside: list[str] = field(default_factory=list)
    """Parts that are running, the innermost last: the hooks are theirs, not their operators'."""
    delayed: list[tuple[Leaf, Gradients]] = field(default_factory=list)
    """Gradients of a leaf module's parameters, which wait for its backward to end."""
    products: list[tuple[Node, int, Leaf]] = field(default_factory=list)
    """Nodes of a part that have saved a weight, which of those made again, and whose that is."""

    def before(self, module: str, hook: Hook = Hook.BEFORE_FORWARD) -> None:
        """``module`` begins, behind those without parameters that run directly before it."""
        going_back = hook is Hook.BEFORE_BACKWARD
        recomputing = self.in_backward and not going_back
        self.pass_by(self.submodules.before(module, backward=going_back, recomputing=recomputing), hook)
        base = self.submodules.base_ends if going_back else self.submodules.base_begins
        if base and module.startswith(base):
            self.seam(BASE, hook)
        self.seam(module, hook)

    def behind(self, module: str, hook: Hook = Hook.AFTER_FORWARD) -> None:
        """``module`` ends, and those without parameters run that are directly behind it."""
        self.seam(module, hook)
        backward = hook is Hook.AFTER_BACKWARD
        if not backward and self.submodules.base_ends and module.startswith(self.submodules.base_ends):
            self.seam(BASE, hook)
        self.pass_by(self.submodules.behind(module, backward=backward), Hook.BEFORE_FORWARD)

    def pass_by(self, count: int, hook: Hook) -> None:
        for _ in range(count):
            self.seam(NO_PARAMETERS, hook)

    # -- leaf modules, and others of several operators ------------------------------------------------

    def is_leaf(self, module: str) -> bool:
        """ZeRO-3 takes it as one."""
        return module == self.submodules.leaf and not self.bias_first

    def is_part(self, module: str) -> bool:
        """Its hooks run where it begins and ends as a whole."""
        return self.is_leaf(module) or (module in self.submodules.parts and not self.bias_first)

    def entered(self, module: str, *inputs: Tensor) -> tuple[Tensor, ...]:
        if not self.is_part(module):
            return inputs
        self.before(module)
        self.inside.append(module)
        self.modules.setdefault(module, ())
        self.remaining[module] = sum(x.node is not None for x in inputs)

        def ended(r: Recorder, gradients: Gradients) -> Gradients:
            self.remaining[module] -= 1
            if not self.remaining[module]:
                for leaf, arrived in sorted(self.delayed, key=lambda one: place(one[0].name, self.registered)):
                    Recorder._accumulate(self, leaf, arrived)
                self.delayed.clear()
                self.behind(module, Hook.AFTER_BACKWARD)
            return gradients

        return tuple(Tensor(x.storage, x.shape, x.dtype, self._linked((x,), (), ended, 1, NOTHING)) for x in inputs)

    def left(self, module: str, output: Tensor) -> Tensor:
        """A weight that a product has saved outlives its parameter's release, unless the product itself makes it again
        (``LinearFunctionForZeroStage3``)."""
        if not self.is_part(module):
            return output
        self.inside.pop()
        self.behind(module)
        for node, at, leaf in self.products if self.modules[module] else ():
            kept = super().empty(leaf.shape, leaf.dtype, f"{leaf.name}{SAVED}", Category.GATHERED_PARAMETERS)
            if self.frame is not None and self.frame.again is not None:
                self.frame.again[at] = (*self.frame.again[at], kept.storage)
            else:
                node.saved = (*node.saved, kept.storage)
            del kept
        if self.modules[module]:
            self.products.clear()

        def begun(r: Recorder, gradients: Gradients) -> Gradients:
            self.before(module, Hook.BEFORE_BACKWARD)
            return gradients

        return Tensor(output.storage, output.shape, output.dtype, self._linked((output,), (), begun, 1, NOTHING))

    def _inside(
        self,
        names: Sequence[str],
        inputs: Sequence[Tensor],
        saved: Sequence[Tensor],
        backward: Backward,
        outputs: int,
        work: Operator,
    ) -> Node | None:
        """A node of parameters ``names`` of a part."""
        node = super().node(inputs, saved, backward, outputs, work)
        if node is not None and node.frame is None and not self.submodules.products_of_leaves:
            at = len(self.frame.again) - 1 if self.frame and self.frame.again else 0
            owners = (self.parameters[name] for name in names)
            self.products += [(node, at, leaf) for leaf in owners if len(leaf.shape) > MATRIX]
        return node

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
        if self.inside:
            part = self.inside[-1]
            self.modules[part] = tuple(dict.fromkeys((*self.modules[part], name)))
        elif len(shape) == 1 and name.endswith(".weight"):
            self.before(name)
        made = super().parameter(name, shape, dtype, expert=expert, low=low, gathered=gathered)
        if not self.parameters[self.prefix + name].trained:
            self.frozen[id(made)] = made, self.prefix + name
        return made

    def quantised(self, name: str, shape: Shape, four_bit: Packed) -> None:
        super().quantised(name, shape, four_bit)
        self.packed = self.prefix + name
        self.before(self.packed)

    def node(
        self,
        inputs: Sequence[Tensor],
        saved: Sequence[Tensor],
        backward: Backward,
        outputs: int = 1,
        work: Operator = DERIVED,
    ) -> Node | None:
        if self.packed:
            return self._of_packed(inputs, saved, backward, outputs, work)
        names = tuple(dict.fromkeys(filter(None, map(self._parameter, inputs))))
        if names and self.inside:
            return self._inside(names, inputs, saved, backward, outputs, work)
        if not names:
            return super().node(inputs, saved, backward, outputs, work)
        module = min(names, key=lambda name: not name.endswith(".weight"))
        self.modules[module] = names
        if not any(x.node is not None and not self._parameter(x) for x in inputs):
            self.without_input.add(module)
        is_matrix = len(self.parameters[module].shape) > 1
        if is_matrix:
            self.before(module)
        node = self._hooked(module, inputs, saved, backward, outputs, work)
        if not is_matrix and len(names) > 1:
            self.behind(module)
        else:
            self.due = module
        return node

    def embedded(self, tensor: Tensor) -> Tensor:
        made = super().embedded(tensor)
        if made is not tensor:
            self.leaf_of = next(reversed(self.modules))
        return made

    def _hooked(
        self,
        module: str,
        inputs: Sequence[Tensor],
        saved: Sequence[Tensor],
        backward: Backward,
        outputs: int,
        work: Operator,
    ) -> Node | None:
        """A node between the hooks before and behind the backward of ``module``."""
        ended = self._ended(module, backward)
        node = super().node(inputs, saved, self._announced(module, ended), outputs, work)
        if node is not None and node.frame is not None:
            node.backward = ended
            node.frame = _Announced(node.frame, module)
        return node

    def _of_packed(
        self, inputs: Sequence[Tensor], saved: Sequence[Tensor], backward: Backward, outputs: int, work: Operator
    ) -> Node | None:
        """The product with a 4-bit weight, which is there already."""
        module, self.packed = self.packed, ""
        self.modules[module] = tuple(name for name in self.parameters if name.rpartition(".")[0] == module[:-7])
        node = self._hooked(module, inputs, saved, backward, outputs, work)
        self.behind(module)
        return node

    def _parameter(self, x: Tensor) -> str:
        """Its name, if ``x`` is one."""
        if isinstance(x.node, Accumulate):
            return x.node.leaf.name if x.node.leaf.is_parameter else ""
        return self.frozen[id(x)][1] if id(x) in self.frozen else ""

    def empty(self, shape: Shape, dtype: str, name: str, category: Category = Category.TEMPORARIES) -> Tensor:
        self.pass_by(self.submodules.at.get(name, 0), Hook.BEFORE_FORWARD)
        tensor = super().empty(shape, dtype, name, category)
        if self.due and self.outputs.get(self.due, name) == name:
            due, self.due = self.due, ""
            self.behind(due)
        return tensor

    def backward(self, output: list[Tensor], gradient: list[Tensor]) -> None:
        self.in_backward = True
        super().backward(output, gradient)

    def _announced(self, module: str, backward: Backward) -> Backward:
        """``backward`` behind the hook before the backward of ``module``."""

        def announced(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
            self.before(module, Hook.BEFORE_BACKWARD)
            return backward(r, gradients)

        return announced

    def _ended(self, module: str, backward: Backward) -> Backward:
        """``backward`` in front of the hook behind the backward of ``module``, where no gradient of its own sets that
        off."""
        if any(self.parameters[name].trained for name in self.modules[module]) or module in self.without_input:
            return backward

        def ended(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
            made = backward(r, gradients)
            self.behind(module, Hook.AFTER_BACKWARD)
            return made

        return ended

    def _accumulate(self, leaf: Leaf, arrived: Gradients) -> None:
        if not leaf.is_parameter or arrived[0] is None:
            if self.leaf_of and any(leaf is one for one in self.required):
                self.before(self.leaf_of, Hook.BEFORE_BACKWARD)
            super()._accumulate(leaf, arrived)
            return
        module = next(name for name, names in self.modules.items() if leaf.name in names)
        if self.is_leaf(module):
            self.delayed.append((leaf, [arrived.pop()]))
            return
        matrix = len(leaf.shape) > 1 and len(self.modules[module]) > 1
        if self.bias_first and matrix and module not in self.without_input and self.held_back is None:
            self.held_back = (leaf, [arrived.pop()])
            return
        super()._accumulate(leaf, arrived)
        if self.is_part(module):
            return
        left = self.remaining.get(module, len(self.modules[module])) - 1
        self.remaining[module] = left
        if not left and module not in self.without_input:
            self.behind(module, Hook.AFTER_BACKWARD)
        if self.held_back is not None and not matrix:
            self._accumulate(*self.held_back)
            self.held_back = None


class _Announced(Frame):
    """A recompute region that a submodule's backward enters: its hook runs before the region is run again."""

    __slots__ = ("inner", "module")

    def __init__(self, inner: Frame, module: str) -> None:
        self.inner = inner
        self.module = module

    def unpack(self, recorder: Recorder, node: Node) -> None:
        assert isinstance(recorder, HookedRecorder)
        recorder.before(self.module, Hook.BEFORE_BACKWARD)
        self.inner.unpack(recorder, node)
