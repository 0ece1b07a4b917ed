"""The operands of one linear layer of Transformer Engine, from its forward product to its weight's gradient.

``pytorch/module/linear.py``, ``layernorm_linear.py``, ``base.py`` (``grad_output_preprocess``) and ``distributed.py``
(``gather_along_first_dim``). A layer's recipe asks for each tensor where the module makes it. In 16 bits operands are
tensors that others have, or gathered ones; in fewer they are copies (``precision``).
"""

from __future__ import annotations

from ...tape.events import Category
from ...values import NamedTuple
from ..autograd import Recorder, Shape, Tensor, Unsummed, size_of
from ..work import Operator
from .precision import BYTE, COMMUNICATION, Copy, Low, up
from .shape import CoreShape


class Linear(NamedTuple):
    """One linear layer on one rank."""

    name: str
    dtype: str
    like: Shape
    """Of the input, or of this rank's shard."""
    whole: Shape
    """Of the input of the product, (…, k)."""
    out: Shape
    """Of its output, (…, n), before ranks share it."""
    gathers: bool = False
    """Ranks hold shards of the input,"""
    scatters: bool = False
    """or of the output."""
    bias: bool = False
    """The product adds a bias, whose gradient is made here."""
    original: bool = False
    """The input is saved as it came."""
    category: Category = Category.TEMPORARIES
    """Of the output."""
    strided: bool = False
    """The output's gradient comes transposed, and is copied (``grad_output_preprocess``)."""
    trained: bool = True
    """The weight has a gradient,"""
    behind_norm: bool = False
    """and otherwise that of the output is quantised in both orientations all the same (``layernorm_linear.py``)."""

    @property
    def weight(self) -> Shape:
        return self.out[-1], self.whole[-1]


class Operands:
    """In 16 bits."""

    def __init__(self, shape: CoreShape, layer: Linear) -> None:
        self.shape, self.layer = shape, layer

    @property
    def apart(self) -> bool:
        """The product for the weight's gradient takes another tensor than the input that was saved."""
        return self.layer.gathers or self.shape.low is not None

    def fed(self, r: Recorder, x: Tensor) -> tuple[Tensor, ...]:
        """The input arrives; what the layer saves of it."""
        return (x,) if self.layer.trained else ()

    def normed(self, r: Recorder, name: str) -> Tensor | None:
        """The input is a norm's output, made here; returned if it is a tensor of its own."""
        return r.empty(self.layer.like, self.layer.dtype, name)

    def gathered(self, r: Recorder) -> list[Tensor]:
        """The input of the product, where ranks share it."""
        layer = self.layer
        return [r.empty(layer.whole, layer.dtype, f"{layer.name}_gathered", COMMUNICATION)] if layer.gathers else []

    def product(self, r: Recorder) -> Tensor:
        """The output."""
        return r.empty(self.layer.out, self.layer.dtype, self.layer.name, self.layer.category)

    def multiplied(self) -> None:
        """The forward pass is done."""

    def gradient(self, r: Recorder) -> list[Tensor]:
        """The output's gradient, where ranks share it."""
        layer = self.layer
        name = f"grad_{layer.name}_gathered"
        copy = [r.empty(layer.out, layer.dtype, f"grad_{layer.name}_contiguous")] if layer.strided else []
        return [r.empty(layer.out, layer.dtype, name, COMMUNICATION)] if layer.scatters else copy

    def again(self, r: Recorder) -> list[Tensor]:
        """The input for the weight's gradient, where ranks share it."""
        return self.gathered(r) if self.layer.trained else []

    def product_back(self, r: Recorder) -> Tensor:
        """The gradient of the product's input."""
        return r.empty(self.layer.whole, self.layer.dtype, f"grad_{self.layer.name}_input")

    def turned(self, r: Recorder, again: list[Tensor]) -> None:
        """Operands become those of the weight's gradient."""

    def product_of_weight(self, r: Recorder) -> None:
        """The product for the weight's gradient runs."""

    def bias_gradient(self, r: Recorder) -> Tensor | Unsummed:
        """The product for the weight's gradient makes that of the bias, in its output's dtype."""
        layer = self.layer
        if not self.shape.gradient_fusion:
            return r.empty(layer.weight[:1], layer.dtype, f"grad_{layer.name}_bias")
        wide = r.empty(layer.weight[:1], "fp32", f"grad_{layer.name}_bias_fp32")
        return Unsummed(Tensor(wide.storage, wide.shape, layer.dtype), layer.weight[:1], f"grad_{layer.name}_bias")

    def clear(self) -> None:
        """The weight's gradient is there, and the input that was saved for it ends."""

    def ended(self) -> None:
        """Backward returns."""

    def work(self, r: Recorder, done: Operator, *, normed: bool = False) -> Operator:
        """What the layer does, given its products and collectives; ``normed``: a norm's kernel makes its input."""
        return done


class LowOperands(Operands):
    """In 8 or 4 bits: the input and the output's gradient are quantised here, the weight is kept so."""

    def __init__(self, shape: CoreShape, layer: Linear, low: Low) -> None:
        super().__init__(shape, layer)
        self.low = low
        self.input, self.grad = Copy(), Copy()
        self.bias: list[Tensor] = []
        self.arriving: list[Tensor] = []
        self.unread: list[Tensor] = []
        self.of_rows = layer.gathers and low.per_tensor
        """Rows alone are gathered of a tensor with one scale, and so they are what is saved."""
        self.keeps_both = False

    def fed(self, r: Recorder, x: Tensor) -> tuple[Tensor, ...]:
        original = self.layer.original
        columns = self._read_later(r) and not original and not self.of_rows
        self.input = self.low.quantised(r, self.layer.like, self.layer.name, rows=True, columns=columns)
        r.keeps_apart(self.input.rows, self.input.columns)
        return (x,) if original and self.layer.trained else ()

    def _read_later(self, r: Recorder) -> bool:
        """Backward takes the input for the weight's gradient."""
        return r.grad_enabled and self.layer.trained

    def normed(self, r: Recorder, name: str) -> Tensor | None:
        """Written in 8 bits by the kernel with delayed scaling, else quantised from a tensor in 16."""
        columns = self._read_later(r) and not self.of_rows
        self.keeps_both = self.layer.gathers and self.low.recipe == "nvfp4"
        self.input = self.low.quantised(r, self.layer.like, name, rows=True, columns=columns)
        r.keeps_apart(self.input.rows, self.input.columns)
        if self.low.recipe != "delayed":
            r.empty(self.layer.like, self.layer.dtype, name)
        return None

    def gathered(self, r: Recorder) -> list[Tensor]:
        if not self.layer.gathers:
            return []
        copy, arrived = self._together(r, self.layer.whole, f"{self.layer.name}_gathered", rows=True, columns=False)
        del arrived
        return copy.rows

    def _together(
        self, r: Recorder, whole: Shape, name: str, *, rows: bool, columns: bool
    ) -> tuple[Copy, list[Tensor]]:
        """Copies of all ranks, and what arrives beside them: of scales or data that lie transposed each rank's part is
        put behind the one before, first (``_start_all_gather_fp8_blockwise``)."""
        low = self.low
        copy = low.quantised(r, whole, name, rows=rows, columns=columns, category=COMMUNICATION, scales=False)
        arrived = []
        if columns and low.transposes_in_vain:
            self.unread.append(r.empty(whole, BYTE, f"{name}_transposed", COMMUNICATION))
        if low.recipe == "blockwise":
            arrived += [r.empty(one.shape, one.dtype, f"{name}_arrived", COMMUNICATION) for one in copy.rows[1:]]
            arrived += [r.empty(one.shape, one.dtype, f"{name}_arrived", COMMUNICATION) for one in copy.columns[:1]]
        return copy, arrived

    def product(self, r: Recorder) -> Tensor:
        out, layer = super().product(r), self.layer
        self._scratch(r, *self._weight(columns=False), *self._unordered(layer.whole, layer.gathers, columns=False))
        return out

    def _weight(self, *, columns: bool) -> tuple[tuple[Shape, bool, bool], ...]:
        """The weight, likewise."""
        return () if self.low.weight_scales_prepared else ((self.layer.weight, columns, True),)

    def _unordered(self, shape: Shape, shared: bool, *, columns: bool) -> tuple[tuple[Shape, bool, bool], ...]:
        """An operand, where its scales are not yet as products want them: if ranks share it."""
        prepared = self.low.scales_prepared and not shared and self.low.recipe != "blockwise"
        return () if prepared else ((shape, columns, False),)

    def _scratch(self, r: Recorder, *operands: tuple[Shape, bool, bool]) -> None:
        self.low.scratch(r, self.layer.name, *operands)

    def multiplied(self) -> None:
        if self.layer.original or not self.layer.trained:
            self.input.clear()
        elif self.of_rows:
            self.input.columns.clear()
        elif not self.keeps_both:
            self.input.rows.clear()

    def gradient(self, r: Recorder) -> list[Tensor]:
        """With a bias its gradient is made before or with the copy (``bgrad_quantize``). Of a shard the copy of its
        rows is gathered, and transposed where products want that; other copies are gathered in both orientations."""
        layer, low, name = self.layer, self.low, f"grad_{self.layer.name}"
        if layer.bias:
            self.bias = [r.empty(layer.weight[:1], layer.dtype, f"{name}_bias")]
        if not layer.scatters:
            contiguous = super().gradient(r)
            self.grad = low.quantised(r, layer.out, name, rows=True, columns=self._turns_gradient)
            contiguous.clear()
            return []
        shard = (layer.out[0] // self.shape.t, *layer.out[1:])
        columns = self._turns_gradient
        mine = low.quantised(r, shard, f"{name}_shard", rows=True, columns=columns and not low.per_tensor)
        self.grad, arrived = self._together(r, layer.out, f"{name}_gathered", rows=True, columns=columns)
        if low.per_tensor:
            self.grad.shared += mine.shared
        mine.clear()
        del arrived
        return []

    @property
    def _turns_gradient(self) -> bool:
        """The output's gradient is quantised for the weight's, too."""
        return self.layer.trained or self.layer.behind_norm or self.layer.bias

    def again(self, r: Recorder) -> list[Tensor]:
        if not self.layer.trained:
            return []
        if self.layer.original:
            columns = not self.of_rows
            self.input = self.low.quantised(
                r, self.layer.like, f"{self.layer.name}_again", rows=self.low.per_tensor, columns=columns
            )
        if not self.layer.gathers:
            return []
        rows = self.low.per_tensor
        copy, self.arriving = self._together(
            r, self.layer.whole, f"{self.layer.name}_gathered", rows=rows, columns=not rows
        )
        return [*copy.rows, *copy.columns]

    def product_back(self, r: Recorder) -> Tensor:
        self.unread.clear()
        out, layer = super().product_back(r), self.layer
        self._scratch(r, *self._weight(columns=True), *self._unordered(layer.out, layer.scatters, columns=False))
        return out

    def product_of_weight(self, r: Recorder) -> None:
        layer = self.layer
        inputs = self._unordered(layer.whole, layer.gathers, columns=True)
        self._scratch(r, *inputs, *self._unordered(layer.out, layer.scatters, columns=True))

    def turned(self, r: Recorder, again: list[Tensor]) -> None:
        """What was gathered of rows is transposed where products want that."""
        layer = self.layer
        self.arriving.clear()
        if self.of_rows and self.low.turns and layer.trained:
            m, k = layer.whole[0], layer.whole[-1]
            for dim in layer.whole[1:-1]:
                m *= dim
            again.append(r.empty((k, m), BYTE, f"{layer.name}_transposed"))

    def bias_gradient(self, r: Recorder) -> Tensor | Unsummed:
        return self.bias.pop()

    def clear(self) -> None:
        self.input.clear()
        if self.layer.gathers and self.layer.trained and self.low.frees_gradient:
            self.grad.clear()

    def ended(self) -> None:
        self.grad.clear()

    def work(self, r: Recorder, done: Operator, *, normed: bool = False) -> Operator:
        """Casts beside the products, of the weight in the first micro-batch of a step."""
        layer, low = self.layer, self.low
        casts = [low.work(layer.like, normed=normed)]
        if r.counts and not low.parameters and r.first_microbatch:
            casts.append(low.work(layer.weight))
        return done.after(casts, (low.work(layer.out),))


class Members:
    """The operands of a grouped product (``pytorch/module/grouped_linear.py``) in 16 bits."""

    def __init__(self, shape: CoreShape, name: str, like: Shape, out: Shape, original: bool, trained: bool) -> None:
        self.shape, self.name, self.like, self.out, self.original = shape, name, like, out, original
        self.trained = trained
        """The weights have gradients."""

    def fed(self, r: Recorder, x: Tensor) -> tuple[Tensor, ...]:
        """The input arrives; what the layer saves of it."""
        return (x,) if self.trained else ()

    def multiplied(self) -> None:
        """The forward products are done."""

    def gradient(self, r: Recorder) -> None:
        """The output's gradient arrives."""

    def again(self, r: Recorder) -> None:
        """The products for the weights' gradients come."""

    def clear(self) -> None:
        """All is done."""

    def scratch(self, r: Recorder, weight: Shape, *, columns: bool) -> None:
        """Products with weights run."""

    def work(self, r: Recorder, done: Operator) -> Operator:
        return done


class LowMembers(Members):
    """In 8 or 4 bits: the rows of every expert are quantised for themselves (``split_quantize``), with a tensor for
    each where it has one scale, else all of an orientation in one (``bulk_allocate``)."""

    def __init__(
        self, shape: CoreShape, name: str, like: Shape, out: Shape, original: bool, trained: bool, low: Low, count: int
    ) -> None:
        super().__init__(shape, name, like, out, original, trained)
        self.low, self.count = low, count
        self.input, self.grad = Copy(), Copy()

    def _quantised(self, r: Recorder, shape: Shape, name: str, *, rows: bool, columns: bool) -> Copy:
        rows_each = -(-shape[0] // self.count)
        one = (rows_each, *shape[1:])
        if self.low.per_tensor:
            copy = Copy()
            for _ in range(self.count):
                member = self.low.quantised(r, one, name, rows=rows, columns=columns)
                copy.rows += member.rows
                copy.columns += member.columns
                copy.shared += member.shared
            return copy
        copy, parts = Copy(), self.low.parts(one)
        for wanted, group, place in ((rows, parts.rows, copy.rows), (columns, parts.columns, copy.columns)):
            if wanted:
                data, *scales = (size_of(part.shape, part.dtype) for part in group)
                whole = self.count * (up(data, 256) + sum(up(scale, 16) for scale in scales))
                place.append(r.empty((whole,), BYTE, f"{name}_{group[0].name}"))
        return copy

    def fed(self, r: Recorder, x: Tensor) -> tuple[Tensor, ...]:
        columns = r.grad_enabled and self.trained and not self.original
        self.input = self._quantised(r, self.like, self.name, rows=True, columns=columns)
        r.keeps_apart(self.input.rows, self.input.columns)
        return (x,) if self.original and self.trained else ()

    def multiplied(self) -> None:
        if self.original or not self.trained:
            self.input.clear()
        else:
            self.input.rows.clear()

    def gradient(self, r: Recorder) -> None:
        self.grad = self._quantised(r, self.out, f"grad_{self.name}", rows=True, columns=True)

    def again(self, r: Recorder) -> None:
        if self.original:
            rows = self.low.per_tensor
            self.input = self._quantised(r, self.like, f"{self.name}_again", rows=rows, columns=True)

    def clear(self) -> None:
        self.input.clear()
        self.grad.clear()

    def scratch(self, r: Recorder, weight: Shape, *, columns: bool) -> None:
        if not self.low.weight_scales_prepared:
            self.low.scratch(r, self.name, *[(weight, columns, True)] * self.count)

    def work(self, r: Recorder, done: Operator) -> Operator:
        return done.after((self.low.work(self.like),), (self.low.work(self.out),))


def members(shape: CoreShape, name: str, like: Shape, out: Shape, *, original: bool, trained: bool) -> Members:
    """``like`` and ``out``: rows of all experts of this rank, with as many features as the input and the output."""
    if shape.low is None:
        return Members(shape, name, like, out, original, trained)
    return LowMembers(shape, name, like, out, original, trained, shape.low, shape.local_experts)


def operands(shape: CoreShape, layer: Linear) -> Operands:
    return Operands(shape, layer) if shape.low is None else LowOperands(shape, layer, shape.low)
