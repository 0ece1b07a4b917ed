"""A layer in parts, beside which those of another micro-batch run (``overlap_moe_expert_parallel_comm``).

``megatron/core/models/gpt/fine_grained_callables.py`` (what each part computes), ``models/common/utils.py``
(``TransformerLayerNode``, ``should_free_input``), ``pipeline_parallel/utils.py`` (``ScheduleNode``) and
``models/common/model_chunk_schedule_plan.py`` (``TransformerLayerSchedulePlan.run``: their order).

A layer with experts has four parts: attention to the sorted rows (``pre``), their exchange, the experts (``mlp``), and
the exchange back to the output (``combine``); one without has ``pre`` and ``mlp``. Each is a graph of its own: its
inputs are leaves, and what a later part reads beside its input is detached, too. So between forward and backward a part
keeps its inputs and outputs, but for those whose memory is given back once they have been read; and in backward the
gradients that it was given live until it has ended. Exchanges take memory of their own stream.

Tapes are cut at the seams where parts begin (``Hook.PIECE``). ``mlp_dw`` and ``pre_dw`` are the delayed products for
gradients of weights, ``front`` is what comes before the first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import field

from ...tape.events import Hook
from ...values import dataclass
from .. import ops
from ..autograd import Gradients, Leaf, Node, Recorder, Tensor
from ..coverage import applying
from ..graph import Delayed
from ..work import NOTHING
from . import block, dispatch, flex, graphs, grouped, local, moe, offload, router
from .flex import Flight
from .grouped import Discard, joined
from .shape import CoreShape, Overlap

STREAM = 3
"""Of exchanges (``get_comm_stream``)."""

PRE, DISPATCH, MLP, COMBINE = "pre", "dispatch", "mlp", "combine"
MLP_DW, PRE_DW, FRONT, TAIL = "mlp_dw", "pre_dw", "front", "tail"


def uncovered(shape: CoreShape) -> Iterator[str]:
    """What parts of layers do not cover of ``shape``."""
    if shape.overlap is None:
        return
    beside = "the exchange of tokens beside another micro-batch's computation with"
    yield from applying(
        (shape.experts is not None and shape.experts.dispatcher == "allgather", f"{beside} the allgather dispatcher"),
        (shape.spec.layer_pattern, f"{beside} hybrids"),
        (
            shape.overlap.delays and "mlp" in shape.recompute_modules,
            "delayed weight gradients of an MLP that is recomputed, whose products run within its backward",
        ),
    )


def layer(r: Recorder, hidden: Tensor, shape: CoreShape) -> Tensor:
    """As ``block.layer``. Without a graph it runs whole."""
    if not r.grad_enabled or shape.overlap is None:
        return block.layer(r, hidden, shape)
    return _Layer(shape, shape.overlap).forward(r, hidden)


@dataclass(eq=False, frozen=True)
class Part:
    """``TransformerLayerNode``."""

    pool: int
    """Stream whose memory it takes."""
    delays: bool
    inputs: list[tuple[Tensor, Leaf]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    detached: list[tuple[Tensor, Leaf]] = field(default_factory=list)
    """For later parts,"""
    before: list[Tensor] = field(default_factory=list)
    """and what they were,"""
    reached: Gradients = field(default_factory=list)
    """whose graphs end in leaves: inputs, with their gradients."""
    later: list[Delayed] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    """Recomputed for products that are delayed."""

    def forward(
        self, r: Recorder, run: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...], *, frees: bool = False
    ) -> tuple[Tensor, ...]:
        """``frees``: inputs give their memory back."""
        outer, outer_kept = r.pool, r.until_delayed
        r.pool, r.until_delayed = self.pool or outer, self.kept if self.delays else None
        self.inputs.extend(_leaf(r, one) for one in inputs)
        self.outputs.extend(run(*(one for one, _ in self.inputs)))
        r.pool, r.until_delayed = outer, outer_kept
        if frees:
            for one in inputs:
                r.end(one)
        return tuple(self.outputs)

    def detach(self, r: Recorder, x: Tensor) -> Tensor:
        """``x`` for a later part, whose gradient for it this one's backward takes."""
        self.before.append(x)
        self.detached.append(_leaf(r, x))
        return self.detached[-1][0]

    def backward(self, r: Recorder, given: Gradients) -> Gradients:
        """Gradients of the inputs; those ``given`` for the outputs live until it has ended."""
        gradients: Gradients = [*given, *(leaf.gradient for _, leaf in self.detached)]
        outputs = [*self.outputs, *self.before]
        outer, r.later_products = r.later_products, self.later if self.delays else None
        root = [joined(r, outputs, [one and one.alias() for one in gradients])]
        gradients.clear()
        outputs.clear()
        r.backward(root, [r.outside((), "fp32")])
        r.later_products = outer
        made = [leaf.take() for _, leaf in self.inputs]
        reached = _leaves(self.before)
        for (one, leaf), gradient in zip(self.inputs, made, strict=True):
            if leaf.node in reached:
                self.reached.extend((one, gradient))
        self.inputs.clear()
        self.outputs.clear()
        given.clear()
        return made

    def backward_dw(self, r: Recorder, *, together: bool) -> None:
        """The delayed products."""
        outer, r.pool = r.pool, self.pool or r.pool
        made = []
        while self.later:
            made += self.later.pop(0)(r)
            if not together:
                _arrive(r, made)
        _arrive(r, made)
        self.kept.clear()
        r.pool = outer

    def release(self) -> None:
        """``release_state``. A leaf and its node hold one another."""
        for _, leaf in self.detached:
            leaf.take()
        self.detached.clear()
        self.before.clear()
        self.reached.clear()


def _leaves(tensors: Sequence[Tensor]) -> set[Node]:
    """Where the graphs of ``tensors`` begin, which hold those leaves for as long as they are there themselves."""
    todo = [one.node for one in tensors if one.node is not None]
    seen = set(todo)
    while todo:
        for edge in todo.pop().inputs:
            if edge is not None and edge[0] not in seen:
                seen.add(edge[0])
                todo.append(edge[0])
    return seen


def _arrive(r: Recorder, made: list[tuple[Tensor, Gradients]]) -> None:
    while made:
        r.arrives(*made.pop(0))


def _leaf(r: Recorder, x: Tensor) -> tuple[Tensor, Leaf]:
    found, leaf = r.leaf(x)
    leaf.copies = True
    return found, leaf


@dataclass(eq=False, slots=True)
class _Shared:
    """``LayerState``: what parts leave for others."""

    residual: Tensor
    shared: Tensor | None
    """Output of shared experts."""
    order: Tensor | Flight
    """What restores the order of tokens."""
    discard: Discard
    """Ends the norm's output, where that is recomputed."""
    commit: offload.Commit
    """Sends what the norm has saved to the host."""
    weights: Tensor | None = None
    """Probabilities of the rows that have arrived."""


class _Layer:
    """``TransformerLayerSchedulePlan``."""

    def __init__(self, shape: CoreShape, overlap: Overlap) -> None:
        self.shape, self.overlap = shape, overlap
        self.pre, self.mlp = (Part(0, overlap.delays) for _ in range(2))
        self.dispatch, self.combine = (Part(STREAM, overlap.delays) for _ in range(2))

    def forward(self, r: Recorder, hidden: Tensor) -> Tensor:
        r.seam(PRE, Hook.PIECE)
        block.begins(r, self.shape)
        out = self._with_experts(r, hidden) if self.shape.experts is not None else self._dense(r, hidden)
        node = r.node((hidden,), (), self.backward, work=NOTHING)
        return Tensor(out.storage, out.shape, out.dtype, node)

    def _dense(self, r: Recorder, hidden: Tensor) -> Tensor:
        shape = self.shape
        attended = self.pre.forward(r, lambda x: (self._attended(r, x),), (hidden,))
        r.seam(MLP, Hook.PIECE)
        (out,) = self.mlp.forward(r, lambda x: (offload.fetched_ahead(r, block.mlp_block(r, x, shape)),), attended)
        return out

    def _attended(self, r: Recorder, x: Tensor) -> Tensor:
        with graphs.captured(r, self.shape, "attn"):
            return block.attention_block(r, x, self.shape)

    def _with_experts(self, r: Recorder, hidden: Tensor) -> Tensor:
        shape, states = self.shape, list[_Shared]()
        sent = self.pre.forward(r, lambda x: self._sorted(r, x, states), (hidden,))
        (state,) = states
        r.seam(DISPATCH, Hook.PIECE)
        given, flies = shape.experts, isinstance(state.order, Flight)
        assert given is not None
        frees = not flies and not (shape.graphs and "moe_preprocess" in shape.graphs)
        arrived = self.dispatch.forward(r, lambda *rows: self._exchanged(r, rows, state), sent, frees=frees)
        del sent
        r.seam(MLP, Hook.PIECE)
        sorts = given.dispatcher == "deepep" or (shape.local_experts > 1 and not flies)
        frees = shape.low is not None or sorts
        made = self.mlp.forward(r, lambda rows: self._through(r, rows, state), arrived, frees=frees)
        del arrived
        r.seam(COMBINE, Hook.PIECE)
        (out,) = self.combine.forward(r, lambda rows: self._back(r, rows, state, hidden.shape), made, frees=True)
        return out

    def _sorted(self, r: Recorder, x: Tensor, states: list[_Shared]) -> tuple[Tensor, Tensor]:
        """``submodule_pre_dispatch_forward``."""
        shape = self.shape
        hidden = self._attended(r, x)
        with graphs.captured(r, shape, "moe_router"):
            with offload.group(r, hidden, "mlp_norm", shape) as (hidden, commit):
                normed, discard = block.norm_of_mlp(r, hidden, shape)
            moe.parameters(r, shape)
            shared = moe.shared(r, normed, shape) if shape.spec.shared_expert_ffn else None
            probabilities, chosen = router.route(r, normed, shape)
        with graphs.captured(r, shape, "moe_preprocess"):
            projected = moe.projected(r, normed, moe.DOWN, shape)
            rows, weights, order = self._preprocessed(r, projected, probabilities, chosen)
        residual = self.pre.detach(r, hidden)
        shared = self.pre.detach(r, shared) if shared is not None else None
        states.append(_Shared(residual, shared, order, discard, commit))
        return rows, weights

    def _preprocessed(
        self, r: Recorder, x: Tensor, probabilities: Tensor, chosen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | Flight]:
        shape = self.shape
        if shape.mixture.flex:
            return flex.preprocessed(r, x, probabilities, shape)
        return dispatch.preprocessed(r, x, probabilities, chosen, shape)

    def _exchanged(self, r: Recorder, rows: tuple[Tensor, ...], state: _Shared) -> tuple[Tensor, ...]:
        """``submodule_dispatch_forward``."""
        if isinstance(state.order, Flight):
            tokens, probabilities = rows
            arrived, weights = flex.sent(r, tokens, probabilities, state.order, self.shape)
        else:
            count = self.shape.routed.received
            arrived, weights = (dispatch.exchanged_rows(r, one, count, self.shape) for one in rows)
        state.weights = self.dispatch.detach(r, weights)
        return (arrived,)

    def _through(self, r: Recorder, rows: Tensor, state: _Shared) -> tuple[Tensor, ...]:
        """``submodule_moe_forward``."""
        shape = self.shape
        assert state.weights is not None
        weights = state.weights

        def experts(r: Recorder, x: Tensor, weights: Tensor) -> Tensor:
            return grouped.experts(r, x, weights, shape)

        if isinstance(state.order, Flight):
            out = flex.through_experts(r, rows, weights, experts, state.order, shape)
        else:
            out = dispatch.through_experts(r, rows, weights, experts, shape)
        state.weights = None
        del weights
        state.discard(r, out)
        return (out,)

    def _back(self, r: Recorder, rows: Tensor, state: _Shared, like: tuple[int, ...]) -> tuple[Tensor, ...]:
        """``submodule_combine_forward``."""
        shape, routed = self.shape, self.shape.routed
        if isinstance(state.order, Flight):
            out = flex.back(r, rows, state.order, shape)
        else:
            back = dispatch.exchanged_rows(r, rows, routed.sent, shape)
            out = dispatch.unpermuted(r, back, state.order, routed.own, shape)
            del back
        out = moe.projected(r, out.view(*like[:-1], out.shape[-1]), moe.UP, shape)
        if state.shared is not None:
            out = ops.add(r, out, state.shared, "experts_and_shared")
        out = local.bias_dropout_add(r, out, None, state.residual, block.FC2, shape)
        state.commit([state.residual])
        return (offload.fetched_ahead(r, out),)

    def backward(self, r: Recorder, gradients: Gradients) -> Gradients:
        """In the order of ``run`` without a layer beside it."""
        given, routed = [gradients[0]], self.shape.experts is not None
        gradients.clear()
        if routed:
            r.seam(COMBINE, Hook.PIECE)
            given = self.combine.backward(r, given)
        r.seam(MLP, Hook.PIECE)
        given = self.mlp.backward(r, given)
        r.seam(MLP_DW, Hook.PIECE)
        for part in (self.mlp, self.combine):
            part.backward_dw(r, together=self.overlap.together)
        if routed:
            r.seam(DISPATCH, Hook.PIECE)
            given = self.dispatch.backward(r, given)
        r.seam(PRE, Hook.PIECE)
        given = self.pre.backward(r, given)
        r.seam(PRE_DW, Hook.PIECE)
        self.pre.backward_dw(r, together=self.overlap.together)
        for part in (self.pre, self.dispatch, self.mlp, self.combine):
            part.release()
        r.seam(FRONT, Hook.PIECE)
        return given
