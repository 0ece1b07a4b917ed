"""Recipes run with DeepSpeed's hooks: seams where a module that has parameters begins and ends.

``parameter_offload.py`` (``_register_deepspeed_module``): hooks before and behind every module's forward,
and, as autograd nodes at its output and its input, before and behind its backward. A module here is a
``Linear``, a norm or an embedding, known by the parameters that its operator reads.
``stage3.py`` and ``stage_1_and_2.py`` (``create_reduce_and_remove_grad_hooks``,
``create_gradient_handling_hooks``): a hook behind every parameter's gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..layers.autograd import Accumulate, Backward, Gradients, Leaf, Node, Recorder, Shape, Tensor, Unsummed
from ..layers.module import Parameter
from ..layers.recompute import Frame
from ..tape import Category, Seam


class Mark(NamedTuple):
    """What a seam of a hooked tape says."""

    kind: str
    """``fetch``, ``release``, or ``gradient``."""
    backward: bool
    name: str
    """The module's, or the parameter's whose gradient has arrived."""
    tensor: int = 0
    """Id of the gradient."""

    def seam(self) -> Seam:
        return Seam(f"zero:{self.kind}:{int(self.backward)}:{self.name}:{self.tensor}")


def mark_of(seam: Seam) -> Mark | None:
    """The mark of a seam; ``None`` for seams of others."""
    if not seam.name.startswith("zero:"):
        return None
    _, kind, backward, name, tensor = seam.name.split(":")
    return Mark(kind, backward == "1", name, int(tensor))


@dataclass
class Hooked(Recorder):
    """A recorder whose tape has seams where DeepSpeed's hooks run."""

    modules: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Parameters of each module, by the name of its weight."""
    without_input: set[str] = field(default_factory=set)
    """Modules whose input needs no gradient: their backward ends unnoticed."""
    shapes: dict[str, Shape] = field(default_factory=dict)
    due: str = ""
    """A module that ends with the next tensor, or with its output of that name."""
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Names of outputs that come later than the next tensor, by the name of the module's weight."""
    remaining: dict[str, int] = field(default_factory=dict)
    """Gradients that each module still waits for."""
    bias_first: bool = False
    """A ``Linear``'s bias gets its gradient before its weight does (``addmm(bias, input, weight)``; the weight's goes
    through a transpose): not so under ZeRO-3's own linear function."""
    held_back: tuple[Leaf, Gradients] | None = None

    def parameter(self, name: str, shape: Shape, dtype: str) -> Tensor:
        self.shapes.setdefault(name, shape)
        if len(shape) == 1 and name.endswith(".weight"):
            self.seam_of(Mark("fetch", False, name))
        return super().parameter(name, shape, dtype)

    def seam_of(self, mark: Mark) -> None:
        self.events.append(mark.seam())

    def node(
        self, inputs: Sequence[Tensor], saved: Iterable[Tensor], backward: Backward, outputs: int = 1
    ) -> Node | None:
        leaves = (x.node.leaf for x in inputs if isinstance(x.node, Accumulate))
        names = tuple(leaf.name for leaf in leaves if leaf.is_parameter)
        if not names:
            return super().node(inputs, saved, backward, outputs)
        module = min(names, key=lambda name: not name.endswith(".weight"))
        self.modules[module] = names
        alone = len(names) == len(inputs)
        if alone:
            self.without_input.add(module)
        if len(self.shapes[module]) > 1:
            self.seam_of(Mark("fetch", False, module))
        node = super().node(inputs, saved, self._announced(module, backward), outputs)
        if node is not None and node.frame is not None:
            node.backward = backward
            node.frame = _Announced(node.frame, module)
        output_first = len(self.shapes[module]) == 1 and len(names) > 1
        if output_first:
            self.seam_of(Mark("release", False, module))
        else:
            self.due = module
        return node

    def empty(self, shape: Shape, dtype: str, name: str, category: Category = Category.TEMPORARIES) -> Tensor:
        tensor = super().empty(shape, dtype, name, category)
        if self.due and self.outputs.get(self.due, name) == name:
            due, self.due = self.due, ""
            self.seam_of(Mark("release", False, due))
        return tensor

    def _announced(self, module: str, backward: Backward) -> Backward:
        """``backward`` behind the fetch of ``module``."""

        def announced(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
            assert isinstance(r, Hooked)
            r.seam_of(Mark("fetch", True, module))
            return backward(r, gradients)

        return announced

    def _accumulate(self, leaf: Leaf, arrived: Gradients) -> None:
        gradient = arrived[0]
        if not leaf.is_parameter or gradient is None:
            super()._accumulate(leaf, arrived)
            return
        module = next(name for name, names in self.modules.items() if leaf.name in names)
        matrix = len(leaf.shape) > 1 and len(self.modules[module]) > 1
        if self.bias_first and matrix and module not in self.without_input and self.held_back is None:
            self.held_back = (leaf, [gradient])
            arrived.clear()
            return
        self.seam_of(Mark("gradient", True, leaf.name, gradient.storage.id))
        del gradient
        super()._accumulate(leaf, arrived)
        left = self.remaining.get(module, len(self.modules[module])) - 1
        self.remaining[module] = left
        if not left and module not in self.without_input:
            self.seam_of(Mark("release", True, module))
        if self.held_back is not None and not matrix:
            self._accumulate(*self.held_back)
            self.held_back = None

    def parameters_of(self) -> tuple[Parameter, ...]:
        """All parameters, in the order in which the recipe names them."""
        return tuple(Parameter(leaf.name, leaf.shape) for leaf in self.parameters.values())


class _Announced(Frame):
    """A recompute region that a module's backward enters: the module is fetched before it is run again."""

    __slots__ = ("inner", "module")

    def __init__(self, inner: Frame, module: str) -> None:
        self.inner = inner
        self.module = module

    def unpack(self, recorder: Recorder, node: Node) -> None:
        assert isinstance(recorder, Hooked)
        recorder.seam_of(Mark("fetch", True, self.module))
        self.inner.unpack(recorder, node)
