"""PyTorch's operators as recipes use them: what each allocates, saves, and does in backward.

What a node saves is in ``tools/autograd/derivatives.yaml``; where an operator is a composite, the
C++ that composes it is named. Gradients of one node are computed in the alphabetical order of its
arguments' names, as the code generator writes them (``mat2`` before ``self``). Shapes are those of
the real tensors; b micro-batch, s sequence, h hidden, a heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from ..tape.events import Category
from . import work
from .autocast import cached_name, cast_to, promoted, set_by_autocast
from .autograd import Gradients, Recorder, Shape, Tensor, Unsummed, incoming, size_of
from .gradients import by_way_of, fresh, needed, viewed
from .reductions import table_gradient

TEMPORARIES = Category.TEMPORARIES


def entering(r: Recorder, operator: str, *inputs: Tensor, name: str) -> tuple[Tensor, ...]:
    """The inputs of ``operator`` as autocast hands them over: last cast first, as arguments are evaluated."""
    dtype = cast_to(r, operator)
    if dtype is None:
        return inputs
    given = list(inputs)
    for at in reversed(range(len(given))):
        given[at] = _cast_by_autocast(r, given[at], dtype, f"{name}_{dtype}")
    return tuple(given)


def _cast_by_autocast(r: Recorder, x: Tensor, dtype: str, name: str) -> Tensor:
    """``cached_cast``: parameters are looked for in the cache."""
    key = cached_name(x, dtype)
    if key is None:
        return cast(r, x, dtype, name)
    if key not in r.casts:
        r.casts[key] = cast(r, x, dtype, f"{key}_{dtype}")
    return r.casts[key]


def elementwise(
    r: Recorder,
    name: str,
    inputs: Sequence[Tensor],
    saves: Sequence[Tensor] = (),
    *,
    dtype: str | None = None,
    shape: Shape | None = None,
    saves_output: bool = False,
    category: Category = TEMPORARIES,
    issue: tuple[work.Issue, work.Issue] | None = None,
) -> Tensor:
    """An operator with one fresh output whose gradients are one fresh tensor per input that needs one. ``issue``: of
    each direction's kernel."""
    like = tuple((x.shape, x.dtype) if x.node is not None else None for x in inputs)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        return [x and r.empty(*x, f"grad_{name}", category) for x in like]

    shape, dtype = shape or inputs[0].shape, dtype or inputs[0].dtype
    done = work.Operator(issue=(issue[0].of(prod(shape)), issue[1].of(prod(shape))) if issue else (0, 0))
    if not saves_output:
        return r.output(inputs, saves, backward, shape, dtype, name, category, done)
    out = r.empty(shape, dtype, name, category)
    return out.by(r.node(inputs, (*saves, out), backward, work=done))


def add(
    r: Recorder, x: Tensor, y: Tensor, name: str = "add", *, negated: bool = False, issue: work.Issue | None = None
) -> Tensor:
    """``x + y``: saves nothing; both inputs receive the incoming gradient itself, summed if y was broadcast.

    ``negated``: ``x - y``, whose gradient of y is a fresh tensor. ``issue``: of forward's kernel, where elements of
    both
    are in different orders.
    """
    out = r.empty(x.shape, promoted(x.dtype, y.dtype), name)
    shape = y.shape
    broadcast, negates = prod(y.shape) < prod(x.shape), negated and y.node is not None

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        gradient = incoming(gradients)
        other = r.empty(gradient.shape, gradient.dtype, f"grad_{name}_negated") if negates else gradient.alias()
        return [gradient, Unsummed(other, shape, f"grad_{name}_sum") if broadcast else other]

    own = _issued(x.shape, out.dtype, x, y) if issue is None else issue.of(prod(x.shape))
    out.node = r.node((x, y), (), backward, work=work.Operator(issue=(own, 0)))
    if out.node is not None:
        out.node.together = broadcast and negates
    return out


def _issued(shape: Shape, dtype: str, *operands: Tensor) -> int:
    return work.issued([(x.shape, x.dtype) for x in operands], shape, dtype)


def add_in_place(r: Recorder, x: Tensor, y: Tensor) -> Tensor:
    """``x += y`` of one shape and dtype."""
    r.ran(work.Stream(3 * size_of(x.shape, x.dtype)))
    node = r.node((x, y), (), lambda r, gradients: [incoming(gradients), incoming(gradients).alias()])
    return Tensor(x.storage, x.shape, x.dtype, node)


def add_constant(r: Recorder, x: Tensor, name: str = "add", y: Tensor | None = None) -> Tensor:
    """``x + c`` with a number, or with ``y``, a tensor without gradient (an attention mask)."""
    dtype = x.dtype if y is None else promoted(x.dtype, y.dtype)
    done = work.Operator(issue=(0 if y is None else _issued(x.shape, dtype, x, y), 0))
    return r.empty(x.shape, dtype, name).by(r.node((x,), (), lambda r, gradients: gradients, work=done))


def scale(r: Recorder, x: Tensor, name: str = "scaled") -> Tensor:
    """``x * c`` or ``x / c`` with a number: saves nothing, one fresh gradient."""
    return elementwise(r, name, (x,))


def multiply(r: Recorder, x: Tensor, y: Tensor, name: str = "mul") -> Tensor:
    """``x * y``: ``MulBackward0`` saves each factor that the other's gradient needs.

    The gradient of ``other`` is computed before that of ``self``, of a broadcast factor at the full shape.
    """
    full = x.shape if prod(x.shape) >= prod(y.shape) else y.shape
    dtype = promoted(x.dtype, y.dtype)
    shape_x, shape_y = x.shape, y.shape
    need_x, need_y = x.node is not None, y.node is not None
    saves = ([y] if need_x else []) + ([x] if need_y else [])

    def gradient(r: Recorder, shape: Shape, name: str) -> Tensor | Unsummed:
        whole = r.empty(full, dtype, name)
        return Unsummed(whole, shape, f"{name}_sum") if prod(shape) < prod(full) else whole

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        grad_y = gradient(r, shape_y, f"grad_{name}_other") if need_y else None
        grad_x = gradient(r, shape_x, f"grad_{name}_self") if need_x else None
        return [grad_x, grad_y]

    read, whole = 2 * size_of(full, dtype), Tensor(x.storage, full, dtype)
    back = [
        work.Stream(read + size_of(own.shape, own.dtype), issue=_issued(full, dtype, whole, own)) for own in saves[::-1]
    ]
    done = work.Operator(None, back, (_issued(full, dtype, x, y), 0))
    return r.output((x, y), saves, backward, full, dtype, name, work=done)


def cast(r: Recorder, x: Tensor, dtype: str, name: str, category: Category = TEMPORARIES) -> Tensor:
    """``x.to(dtype)``; nothing where the dtype is that already. The gradient is cast back."""
    if x.dtype == dtype:
        return x
    back = x.dtype

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        return [r.empty(incoming(gradients).shape, back, f"grad_{name}", category)]

    wide = Tensor(x.storage, x.shape, dtype)
    done = work.Operator(issue=(_issued(x.shape, dtype, x), _issued(x.shape, back, wide)))
    return r.empty(x.shape, dtype, name, category).by(r.node((x,), (), backward, work=done))


def contiguous(r: Recorder, x: Tensor, shape: Shape, name: str) -> Tensor:
    """``contiguous`` or ``reshape`` of a transposed tensor: a copy whose gradient goes back as a view."""
    return r.empty(shape, x.dtype, name).by(r.node((x,), (), viewed(x)))


def copied_gradient(r: Recorder, x: Tensor, name: str) -> Tensor:
    """A view whose gradient cannot be one (a transpose, then a reshape): it is copied on the way back."""
    shape = x.shape

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        return [r.empty(shape, incoming(gradients).dtype, f"grad_{name}_contiguous")]

    return Tensor(x.storage, shape, x.dtype, r.node((x,), (), backward))


def linear(
    r: Recorder,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    name: str = "linear",
    conv1d: bool = False,
    category: Category = TEMPORARIES,
    parallel: Callable[[int, int, int, str], work.Operator] | None = None,
    tag: str = "",
) -> Tensor:
    """``x @ weight (+ bias)`` of shape (…, n) from (…, k); weight (n, k) or (k, n).

    With bias ``addmm`` (gradients: mat1 = x, mat2 = weight; the engine sums that of self = bias), without
    ``mm`` (mat2 = weight before self = x). Saves x and the weight, each only if the other needs a gradient;
    ZeRO-3's own function its input always.
    The gradient of x is a product of matrices, of which x of more dimensions has a view.
    ``conv1d``: transformers' ``Conv1D``, which calls ``addmm`` itself. ``parallel``: what it does beside collectives.
    ``tag``: put behind the name of the weight's gradient.
    """
    if bias is None:
        x, weight = entering(r, "linear", x, weight, name=f"{name}_input")
    elif conv1d:
        bias, x, weight = entering(r, "addmm", bias, x, weight, name=f"{name}_input")
    else:
        x, weight, bias = entering(r, "linear", x, weight, bias, name=f"{name}_input")
    k = x.shape[-1]
    n = weight.shape[0] if weight.shape[1] == k else weight.shape[1]
    shape, dtype = x.shape, x.dtype
    weight_shape = weight.shape
    needs_x, needs_weight = x.node is not None, weight.node is not None
    has_bias = bias is not None

    def product(r: Recorder) -> Tensor:
        made = r.empty(shape, dtype, f"grad_{name}_input")
        return made.view(*shape) if len(shape) != 2 and r.views_products else made

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        if has_bias:
            gradient = gradients[0]
            assert gradient is not None
            grad_x = product(r) if needs_x else None
            grad_w = r.empty(weight_shape, dtype, f"grad_{name}_weight") if needs_weight else None
            return [grad_x, grad_w, Unsummed(gradient, (n,), f"grad_{name}_bias")]
        grad_w = r.empty(weight_shape, dtype, f"grad_{name}_weight{tag}") if needs_weight else None
        grad_x = product(r) if needs_x else None
        return [grad_x, grad_w]

    inputs = (x, weight) if bias is None else (x, weight, bias)
    keeps_x = needs_weight or (needs_x and not r.views_products)
    saves = [saved for saved, needed in ((x, keeps_x), (weight, needs_x)) if needed]
    saves = saves if has_bias else saves[::-1]
    tokens = prod(x.shape[:-1])
    if parallel is None:
        done = work.linear(tokens, n, k, x.dtype, needs_x=needs_x, needs_weight=needs_weight)
    else:
        done = parallel(tokens, n, k, x.dtype)
    return r.output(inputs, saves, backward, (*x.shape[:-1], n), x.dtype, name, category, done)


def matmul(r: Recorder, x: Tensor, y: Tensor, shape: Shape, name: str) -> Tensor:
    """Batched ``x @ y`` (``bmm``): saves each that the other's gradient needs; the gradient of ``mat2`` comes before
    that of ``self``."""
    x, y = entering(r, "matmul", x, y, name=f"{name}_operand")
    needs_x, needs_y = x.node is not None, y.node is not None
    backward = needed((x, f"grad_{name}_self"), (y, f"grad_{name}_mat2"), last_first=True)
    saves = [saved for saved, needed in ((y, needs_x), (x, needs_y)) if needed]
    done = work.batched(shape, x.shape[-1], x.dtype, needs_x=needs_x, needs_y=needs_y)
    return r.output((x, y), saves, backward, shape, x.dtype, name, work=done)


def split(
    r: Recorder, x: Tensor, shapes: Sequence[Shape], name: str, *, keeps: bool = False, divides: int | None = None
) -> list[Tensor]:
    """Views of ``x`` along the last dimension; in backward one ``cat`` (``split_with_sizes_backward``).

    ``keeps``: somebody holds a view until then. ``divides``: the one whose gradient is divided before.
    """
    whole, dtype = x.shape, x.dtype

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        gradients.reverse()  # they end from the first on, a list's items from the last
        _divided = None if divides is None else r.empty(shapes[divides], dtype, f"grad_{name}_divided")
        return [r.empty(whole, dtype, f"grad_{name}_cat")]

    node = r.node((x,), (x,) if keeps else (), backward, outputs=len(shapes))
    return [Tensor(x.storage, shape, dtype, node, slot) for slot, shape in enumerate(shapes)]


def softmax(r: Recorder, x: Tensor, name: str = "softmax", dtype: str | None = None) -> Tensor:
    """Saves its result. ``_softmax`` may convert (half to float) within the kernel; its backward multiplies gradient
    and result first (``aten/src/ATen/native/cuda/SoftMax.cu``, ``softmax_backward_cuda_out``)."""
    taken = x
    if dtype is None and (dtype := set_by_autocast(r, "softmax")):
        taken = x if x.dtype == "fp16" else cast(r, x, dtype, f"{name}_input_fp32")
    out = r.empty(x.shape, dtype or x.dtype, name)
    shape, back, kept = x.shape, taken.dtype, out.dtype

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        gradient = r.empty(shape, back, f"grad_{name}")
        if r.kernel_workspaces:
            r.empty(shape, kept, f"grad_{name}_product", Category.WORKSPACES)
        return [gradient]

    n = prod(shape)
    once = work.SOFTMAX_OF_ODD_ROWS if shape[-1] % 8 else work.SOFTMAX
    done = work.Operator(issue=(once.of(n), work.SOFTMAX_BACKWARD.of(n)))
    out.node = r.node((taken,), (out,), backward, work=done)
    del taken
    return out


def dropout(r: Recorder, x: Tensor, p: float, name: str = "dropout") -> Tensor:
    """``native_dropout``, whose mask is saved; none in evaluation."""
    if p == 0.0 or r.evaluates:
        return x
    out, mask = native_dropout(r, x.shape, x.dtype, name)
    done = work.Operator(issue=(work.DROPOUT.of(prod(x.shape)), 0))

    out.node = r.node((x,), (mask,), fresh(x, f"grad_{name}"), work=done)
    return out


def native_dropout(r: Recorder, shape: Shape, dtype: str, name: str) -> tuple[Tensor, Tensor]:
    """A fresh output and a mask of one byte an element. CUDA makes the mask first
    (``aten/src/ATen/native/cuda/Dropout.cu``, ``dropout_cuda``), but for releases that have ``fused_dropout_cuda``
    alone; fake tensors the output."""
    early = [r.empty(shape, "bool", f"{name}_mask")] if r.kernel_workspaces and r.masks_first else []
    out = r.empty(shape, dtype, name)
    return out, early.pop() if early else r.empty(shape, "bool", f"{name}_mask")


def embedding(r: Recorder, weight: Tensor, indices: Tensor, name: str) -> Tensor:
    """Rows of ``weight`` by ``indices`` (saved); backward makes a dense gradient of the whole table."""
    table, dtype, rows = weight.shape, weight.dtype, prod(indices.shape)

    return r.output(
        (weight,),
        (indices,),
        lambda r, gradients: [table_gradient(r, table, dtype, rows, name)],
        (*indices.shape, weight.shape[1]),
        weight.dtype,
        name,
        work=work.looked_up((*indices.shape, weight.shape[1]), weight.dtype),
    )


def layer_norm(r: Recorder, x: Tensor, weight: Tensor, bias: Tensor, name: str, statistics: str = "fp32") -> Tensor:
    """``native_layer_norm``: saves input, mean and reciprocal deviation (fp32 on CUDA), and the weight."""
    x, weight, bias = entering(r, "layer_norm", x, weight, bias, name=f"{name}_input")
    out = r.empty(x.shape, x.dtype, name)
    mean = r.empty((*x.shape[:-1], 1), statistics, f"{name}_mean")
    rstd = r.empty((*x.shape[:-1], 1), statistics, f"{name}_rstd")
    backward = needed((x, f"grad_{name}_input"), (weight, f"grad_{name}_weight"), (bias, f"grad_{name}_bias"))
    saved = (x, mean, rstd) if r.autocast is None else (bias, x, weight, mean, rstd)
    n, rows = prod(x.shape), prod(x.shape[:-1])
    done = work.Operator(issue=(work.LAYER_NORM.of(n, rows), work.LAYER_NORM_BACKWARD.of(n, rows)))
    out.node = r.node((x, weight, bias), saved, backward, work=done)
    del mean, rstd
    return out


def log_softmax(r: Recorder, x: Tensor, name: str = "log_probabilities") -> Tensor:
    """Saves its result; logits-sized in both directions. Forward reads a row for its maximum, its sum and the result,
    backward the gradient for its sum and both for the result (``SoftMax.cu``, ``cunn_SoftMaxForward`` and
    ``cunn_SoftMaxBackward``: rows too long to keep)."""
    out = r.empty(x.shape, x.dtype, name, Category.LOGITS)
    shape, dtype = x.shape, x.dtype

    each = (work.Stream(4.0 * size_of(shape, dtype), 1, True),)
    out.node = r.node((x,), (out,), fresh(x, "grad_logits", Category.LOGITS), work=work.Operator(each, each))
    return out


def nll_loss(r: Recorder, x: Tensor, labels: Tensor) -> Tensor:
    """Mean negative log likelihood of (n, v): saves x, labels and the total weight; a scalar."""
    (x,) = entering(r, "nll_loss", x, name="log_probabilities")
    out = r.empty((), x.dtype, "loss")
    weight = r.empty((), x.dtype, "total_weight")
    shape, dtype = x.shape, x.dtype

    # forward reads the labels' elements alone; backward fills zeros
    done = work.Operator(
        (work.Stream(2 * size_of(labels.shape, dtype)),), (work.Stream(size_of(shape, dtype), 2, True),)
    )
    out.node = r.node((x,), (x, labels, weight), fresh(x, "grad_log_probabilities", Category.LOGITS), work=done)
    return out


def power(r: Recorder, x: Tensor, name: str = "pow") -> Tensor:
    """``x.pow(n)``: saves x; backward makes ``x^(n-1)``, that times n, and the product with the gradient."""
    (x,) = entering(r, "pow", x, name=f"{name}_input")
    made = (f"{name}_lower", f"{name}_lower_scaled", f"grad_{name}")
    backward = by_way_of(*((x.shape, x.dtype, one) for one in made))
    return r.output((x,), (x,), backward, x.shape, x.dtype, name)


def tanh(r: Recorder, x: Tensor, name: str = "tanh") -> Tensor:
    """Saves its result."""
    return elementwise(r, name, (x,), saves_output=True)


def mean_last(r: Recorder, x: Tensor, name: str = "mean") -> Tensor:
    """``x.mean(-1, keepdim=True)``: saves nothing; the gradient is expanded and divided (full size)."""
    return r.empty((*x.shape[:-1], 1), x.dtype, name).by(
        r.node(
            (x,),
            (),
            fresh(x, f"grad_{name}"),
            work=work.Operator(issue=(0, work.STRIDED.of(prod(x.shape)))),
        )
    )


def rsqrt(r: Recorder, x: Tensor, name: str = "rsqrt") -> Tensor:
    """Saves its result; backward makes its cube in two steps."""
    (x,) = entering(r, "rsqrt", x, name=f"{name}_input")
    out = r.empty(x.shape, x.dtype, name)
    backward = by_way_of(*((x.shape, x.dtype, one) for one in (f"{name}_cube", f"{name}_scaled", f"grad_{name}")))
    out.node = r.node((x,), (out,), backward)
    return out


def alias(r: Recorder, x: Tensor) -> Tensor:
    """A view of all of ``x`` that is a node of its own: gradients of its readers are summed there first."""
    return Tensor(x.storage, x.shape, x.dtype, r.node((x,), (), lambda r, gradients: gradients))


def sliced_whole(r: Recorder, x: Tensor, times: int, name: str, category: Category = TEMPORARIES) -> Tensor:
    """``x[..., :]`` before torch 2.9: each ``:`` is a slice of all of a dimension, whose backward copies the gradient
    into zeros of the same size (``applySlice`` of ``ATen/TensorIndexing.h`` compares a dimension with the open end,
    2^63 - 1, which it never equals)."""
    shape, dtype = x.shape, x.dtype
    for _ in range(times):
        node = r.node((x,), (), lambda r, gradients: [r.empty(shape, dtype, f"grad_{name}_whole", category)])
        x = Tensor(x.storage, shape, dtype, node)
    return x


def slice_last(r: Recorder, x: Tensor, width: int, name: str) -> Tensor:
    """A view of part of the last dimension; ``slice_backward`` fills a tensor of the whole size."""
    shape = (*x.shape[:-1], width)
    done = work.Operator(issue=(0, work.STRIDED.of(prod(shape))))
    node = r.node((x,), (), fresh(x, f"grad_{name}_slice"), work=done)
    return Tensor(x.storage, shape, x.dtype, node)


def cat_last(r: Recorder, x: Tensor, y: Tensor, name: str) -> Tensor:
    """``cat``: a copy; the gradients are views of the incoming one."""
    whole = (*x.shape[:-1], x.shape[-1] + y.shape[-1])
    done = work.Operator(issue=(work.CAT_OF_ODD_ROWS.of(prod(whole)) if whole[-1] % 8 else 0, 0))
    return r.empty(whole, promoted(x.dtype, y.dtype), name).by(r.node((x, y), (), viewed(x, y), work=done))


def expanded(r: Recorder, x: Tensor, shape: Shape, name: str, *, copies: bool) -> Tensor:
    """``expand`` then ``reshape`` to ``shape``: a copy or a view; backward sums to the size before."""
    out = r.empty(shape, x.dtype, name) if copies else Tensor(x.storage, shape, x.dtype)
    out.node = r.node((x,), (), fresh(x, f"grad_{name}_sum"))
    return out
