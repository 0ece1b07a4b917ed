"""Megatron-Bridge's low-rank adapters beside frozen linear layers (0.6.0, ``src/megatron/bridge/peft``).

``lora_layers.py`` (``LoRALinear.forward``) adds what an adapter makes to the base layer's output; ``utils.py``
(``ParallelLinearAdapter``) is two of Megatron-Core's own linear layers, whichever implementation the base has, and a
product with ``alpha / dim``; ``get_adapter_attributes_from_linear`` says what ranks exchange. DoRA (``dora_layers.py``:
``DoRALinear.forward``) multiplies the sum by a parameter over the norms of the whole weight's rows. Canonical LoRA
(``canonical_lora.py``) has adapters of queries, keys and values, and of gate and up, that read the same input.

Shapes: s sequence, b micro-batch, k inputs, n outputs, r rank, t tensor-parallel size. A is (r / t, k) or (r, k / t), B
(n / t, r).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ...tape.events import Category
from ...values import replace
from .. import ops
from ..autograd import Recorder, Shape, Tensor
from ..gradients import viewed
from ..tuning import Part
from . import local, te
from .mappings import moved, own_rows, side_by_side
from .shape import CoreShape

DOWN, UP = "adapter.linear_in", "adapter.linear_out"
"""Both linear layers, behind the name of the one that is adapted."""
MAGNITUDE = "adapter.weight_magnitude"

COMMUNICATION = Category.COMMUNICATION_BUFFERS


def adapts(r: Recorder, name: str) -> bool:
    """Whether the linear layer ``name`` has an adapter."""
    return r.tuning is not None and r.tuning.adapts(name)


def added(r: Recorder, out: Tensor, x: Tensor, name: str, shape: CoreShape, *, columns: bool) -> Tensor:
    """``linear_output + adapter_output`` of the layer's ``out`` and of the input ``x`` of its product. With
    ``columns`` ranks share the layer's outputs, else its inputs."""
    if parts := dict(r.adapters.parts).get(name):
        return _added_in_parts(r, out, x, name, shape, parts)
    beside = (_of_columns if columns else _of_rows)(r, x, name, out.shape, shape)
    if not r.adapters.dora:
        return ops.add(r, out, beside, f"{name}_with_adapter")
    n, k = out.shape[-1], x.shape[-1]
    magnitude, norm = _magnitude(r, name, n, shape), _norm(r, name, n, k, shape, columns=columns)
    scale = ops.elementwise(r, f"{name}_magnitude_scale", (magnitude, norm), (norm,)).view(1, 1, n)
    del norm

    def product() -> Tensor:
        return ops.multiply(r, scale, ops.add(r, out, beside, f"{name}_with_adapter"), f"{name}_by_magnitude")

    return ops.add_constant(r, product(), f"{name}_dora")  # a correction of dropout, 0 without


def of_attention(heads: int, groups: int, size: int) -> tuple[Part, ...]:
    """Parts of ``linear_qkv`` (``LoRALinearSplitQKV``)."""
    return Part("q", heads, size), Part("k", groups, size), Part("v", groups, size)


def of_gated(width: int) -> tuple[Part, ...]:
    """Parts of ``linear_fc1`` (``LoRALinearSplitFC1UpGate``)."""
    return Part("gate", 1, width), Part("up", 1, width)


def _added_in_parts(r: Recorder, out: Tensor, x: Tensor, name: str, shape: CoreShape, parts: Sequence[Part]) -> Tensor:
    """``LoRALinearSplitQKV.forward`` and ``LoRALinearSplitFC1UpGate.forward``, whose variables hold what each adapter
    makes: (s, b, n / t) of the layer's ``out`` and of the input ``x`` of its product."""
    like = out.shape[:-1]
    made = [_of_columns(r, x, f"{name}.{one.name}", (*like, one.outputs // shape.t), shape) for one in parts]
    groups = parts[-1].heads
    if len(parts) > 2:
        beside = _interleaved(r, made, name, groups, shape)
    else:
        gate, up = made
        beside = ops.cat_last(r, gate, up, f"{name}_adapters_joined")
    return ops.add(r, out, beside.view(*out.shape), f"{name}_with_adapter")


def _interleaved(r: Recorder, made: Sequence[Tensor], name: str, groups: int, shape: CoreShape) -> Tensor:
    """``_interleave_qkv``: parts (s, b, n / t) of each of ``groups`` in turn, which are slices; in backward each fills
    a tensor as large as what it is a slice of, unless it is all of it. The function divides by the heads of all ranks,
    so that rows of a rank's part are put together, and gradients that are no slices' apart again."""
    part = f"{name}_adapter_of_group"
    if groups > 1:
        chunks = [ops.slice_last(r, one, one.shape[-1] // groups, part) for _ in range(groups) for one in made]
    else:
        chunks = [ops.copied_gradient(r, one, part) if shape.t > 1 else one for one in made]
    joined = r.empty((sum(prod(one.shape) for one in made),), made[0].dtype, f"{name}_adapters_joined")
    return joined.by(r.node(chunks, (), viewed(*chunks)))


def _magnitude(r: Recorder, name: str, n: int, shape: CoreShape) -> Tensor:
    """``weight_magnitude``, of what a rank has of the outputs."""
    return r.parameter(f"{name}.{MAGNITUDE}", (n,), shape.dtype)


def _norm(r: Recorder, name: str, n: int, k: int, shape: CoreShape, *, columns: bool) -> Tensor:
    """``_get_weight_norm``: (n,) of a rank's part (n, k) of the weight and its adapters' product, whose graph holds its
    operands until the function returns; where there is none, as before full recompute, B times its factor ends with the
    product. With ``columns`` ranks gather A, else B."""
    rank, t, dtype = r.adapters.rank, shape.t, shape.dtype
    held: list[Tensor] = []
    if t > 1:
        width = k if columns else rank
        length = rank if columns else n
        whole = r.empty((width * t, length // t), dtype, f"{name}_norm_gathered_ranks", COMMUNICATION)
        copy = [r.empty((width, length // t), dtype, f"{name}_norm_transposed")]
        copy.clear()
        held.append(r.empty((width, length), dtype, f"{name}_norm_gathered"))
        del whole
    scaled = [r.empty((n, rank), dtype, f"{name}_norm_scaled")]
    product = r.empty((n, k), dtype, f"{name}_norm_product")
    if r.grad_enabled:
        held += scaled
    scaled.clear()
    held.append(r.empty((n, k), dtype, f"{name}_norm_weight"))
    del product
    norm = r.empty((n,), dtype, f"{name}_norm")
    del held
    return norm


def column_linear(
    r: Recorder,
    x: Tensor,
    name: str,
    norm_name: str,
    n: int,
    shape: CoreShape,
    *,
    bias: bool,
    skip_bias: bool,
    original: bool = False,
    strided: bool = False,
) -> te.Biased:
    """Transformer Engine's layer with ``n`` outputs on this rank, with the norm in it where that has a ``norm_name``,
    and an adapter, if it has one: of the norm's output."""
    if not norm_name:
        out, own = te.column_linear(r, x, name, n, shape, bias=bias, skip_bias=skip_bias, original=original)
    elif not adapts(r, name):
        return te.norm_column_linear(r, x, name, norm_name, n, shape, bias=bias, skip_bias=skip_bias, strided=strided)
    else:
        out, own, x = te.norm_column_linear_showing(r, x, name, norm_name, n, shape, bias=bias, skip_bias=skip_bias)
    return added(r, out, x, name, shape, columns=True) if adapts(r, name) else out, own


def row_linear(r: Recorder, x: Tensor, name: str, shape: CoreShape, *, bias: bool, original: bool = False) -> te.Biased:
    """Transformer Engine's layer of what this rank has of the inputs, and an adapter, if it has one."""
    out, own = te.row_linear(r, x, name, shape, bias=bias, original=original)
    return added(r, out, x, name, shape, columns=False) if adapts(r, name) else out, own


def duplicated(r: Recorder, x: Tensor, name: str, n: int, shape: CoreShape, *, original: bool = False) -> Tensor:
    """A layer that every tensor-parallel rank has whole (``parallel_mode="duplicated"``), of its own tokens, and an
    adapter, if it has one, of which ranks have parts all the same (``base_linear_is_parallel``)."""
    alone = replace(shape, t=1, sequence_parallel=False)
    out, _ = te.column_linear(r, x, name, n, alone, bias=False, skip_bias=False, original=original)
    if not adapts(r, name):
        return out
    down, up = parameters(r, name, n, x.shape[-1], shape, columns=True)
    parts = _alone(shape)
    low = local.linear(r, _dropped(r, x, name), down, None, f"{name}.{DOWN}", _summed(parts, shape), columns=True)
    low = _gathered_last(r, low, f"{name}.{DOWN}", shape)
    low = local.linear(r, low, up, None, f"{name}.{UP}", parts, columns=True)
    low = _gathered_last(r, low, f"{name}.{UP}", shape)
    beside = ops.scale(r, low, f"{name}_adapter_scaled")
    del low
    return ops.add(r, out, beside, f"{name}_with_adapter")


def parameters(r: Recorder, name: str, n: int, k: int, shape: CoreShape, *, columns: bool) -> tuple[Tensor, Tensor]:
    """A and B on this rank, of a layer with ``n`` outputs and ``k`` inputs as a whole."""
    rank, t, dtype = r.adapters.rank, shape.t, shape.dtype
    down = (rank // t, k) if columns else (rank, k // t)
    both = (
        r.parameter(f"{name}.{DOWN}.weight", down, dtype),
        r.parameter(f"{name}.{UP}.weight", (n // t, rank), dtype),
    )
    if r.adapters.dora:
        _magnitude(r, name, n // t if columns else n, shape)
    return both


def of_experts(r: Recorder, out: Tensor, x: Tensor, name: str, shape: CoreShape) -> Tensor:
    """The same of all experts of a rank, which share an adapter, of rows (N, k) to (N, n); no rank has a part of an
    expert. Gradients are summed over expert-parallel ranks in place (``_allreduce_shared_expert_grad``)."""
    down, up = parameters_of_experts(r, name, out.shape[-1], x.shape[-1], shape)
    alone = replace(_alone(shape), t=1)
    low = local.linear(r, _dropped(r, x, name), down, None, f"{name}.{DOWN}", alone, columns=True)
    wide = local.linear(r, low, up, None, f"{name}.{UP}", alone, columns=True)
    del low
    beside = ops.scale(r, wide, f"{name}_adapter_scaled")
    del wide
    return ops.add(r, out, beside, f"{name}_with_adapter")


def parameters_of_experts(r: Recorder, name: str, n: int, k: int, shape: CoreShape) -> tuple[Tensor, Tensor]:
    """Those of a rank's experts. They are an expert's where there are expert-parallel ranks
    (``ColumnParallelLinear.expert_parallel``)."""
    rank, apart = r.adapters.rank, shape.mixture.ep > 1
    return (
        r.parameter(f"{name}.{DOWN}.weight", (rank, k), shape.dtype, expert=apart),
        r.parameter(f"{name}.{UP}.weight", (n, rank), shape.dtype, expert=apart),
    )


def _of_columns(r: Recorder, x: Tensor, name: str, like: Shape, shape: CoreShape) -> Tensor:
    """``ParallelLinearAdapter.forward``: (s, b, k) to (s, b, n / t). The gradient of what was gathered for A is not
    summed over ranks (``disable_grad_reduce``)."""
    down, up = parameters(r, name, like[-1] * shape.t, x.shape[-1], shape, columns=True)
    x = _dropped(r, x, name)
    if x.shape[0] < like[0]:
        gathered = f"{name}_adapter_gathered"
        x = moved(
            r, x, x.shape[0] * shape.t, "all-gather", (gathered, f"grad_{gathered}_scattered"), back=COMMUNICATION
        )
    alone = _alone(shape)
    x = local.linear(r, x, down, None, f"{name}.{DOWN}", _summed(alone, shape), columns=True)
    x = _gathered_last(r, x, f"{name}.{DOWN}", shape)
    x = local.linear(r, x, up, None, f"{name}.{UP}", alone, columns=True)
    return ops.scale(r, x, f"{name}_adapter_scaled")


def _of_rows(r: Recorder, x: Tensor, name: str, like: Shape, shape: CoreShape) -> Tensor:
    """Likewise, (s, b, k / t) to (s, b, n), or to a rank's part of the sequence, which is a view."""
    down, up = parameters(r, name, like[-1], x.shape[-1] * shape.t, shape, columns=False)
    x = _dropped(r, x, name)
    alone = _alone(shape)
    x = local.linear(r, x, down, None, f"{name}.{DOWN}", alone, columns=False)
    x = local.linear(r, x, up, None, f"{name}.{UP}", alone, columns=True)
    x = _gathered_last(r, x, f"{name}.{UP}", shape)
    if x.shape[0] > like[0]:
        x = own_rows(r, x, like, f"grad_{name}_adapter_scattered_gathered")
    return ops.scale(r, x, f"{name}_adapter_scaled")


def _alone(shape: CoreShape) -> CoreShape:
    """``model_parallel_config.sequence_parallel = False`` while both layers are made."""
    return replace(shape, sequence_parallel=False, low=None, wide=frozenset())


def _summed(alone: CoreShape, shape: CoreShape) -> CoreShape:
    """With sequence parallelism the gradient of A's input is not summed over ranks (``disable_grad_reduce``)."""
    return replace(alone, t=1) if shape.sequence_parallel else alone


def _dropped(r: Recorder, x: Tensor, name: str) -> Tensor:
    return ops.dropout(r, x, r.adapters.dropout, f"{name}_adapter_dropout")


def _gathered_last(r: Recorder, x: Tensor, name: str, shape: CoreShape) -> Tensor:
    return side_by_side(r, x, name, f"grad_{name}_own_part", shape.t)
