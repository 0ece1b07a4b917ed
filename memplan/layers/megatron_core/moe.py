"""``megatron/core/transformer/moe/moe_layer.py``, ``MoELayer.forward``: router, dispatch, experts, and shared experts
(``shared_experts.py``)."""

from __future__ import annotations

from collections.abc import Iterator

from ...values import replace
from .. import ops
from ..autograd import Recorder, Shape, Tensor
from ..coverage import applying
from ..recompute import recomputed_reentrant
from . import adapters, dispatch, flex, graphs, grouped, grouped_chain, local, router, te
from .mappings import moved
from .shape import CoreShape, ExpertShape

SHARED = "mlp.shared_experts"
DOWN, UP = "mlp.fc1_latent_proj", "mlp.fc2_latent_proj"
"""Projections of tokens on their way to experts, and back (``moe_latent_size``)."""


def uncovered(shape: CoreShape) -> Iterator[str]:
    """What these recipes do not cover of ``shape``."""
    experts, spec = shape.experts, shape.spec
    if experts is None:
        return
    yield from applying(
        (
            shape.implementation == "local" and spec.expert_latent,
            "experts of projected rows in local layers; those of Transformer Engine are covered",
        ),
        (
            shape.t > 1 and not shape.sequence_parallel,
            "experts with tensor parallelism but no sequence parallelism, which Megatron-Core refuses in training "
            "(--sequence-parallel)",
        ),
        (
            spec.router_weighs_inputs and spec.expert_top_k > 1,
            "scores that weigh what several experts of a token get, which Megatron-Core refuses (expert_top_k: 1)",
        ),
        (spec.mlp_bias and spec.shared_expert_ffn, "biases in shared experts, which Megatron-Core refuses"),
        (
            spec.mlp_bias and experts.grouped and shape.bias_dropout_fusion,
            "grouped experts with biases beside bias_dropout_fusion; Megatron-Core wants --no-bias-dropout-fusion",
        ),
        (spec.mlp_bias and not experts.grouped, "biases of experts that run one after the other"),
        (
            spec.mlp_bias and shape.expert_ranks > 1,
            "biases of experts that are divided over tensor-parallel ranks (--etp 1)",
        ),
        (shape.bias_activation_fusion and not spec.gated, "bias_gelu_fusion in experts, which Megatron-Core refuses"),
        (
            shape.bias_activation_fusion and spec.mlp_bias and spec.activation != "quick_geglu",
            "bias_swiglu_fusion of experts with biases, which Megatron-Core refuses",
        ),
        (
            experts.router_fusion and spec.router_dtype == "fp64",
            "a fused router in fp64, which Transformer Engine refuses",
        ),
        (experts.router_fusion and shape.te < (2, 7), "a fused router before Transformer Engine 2.7"),
        (
            spec.expert_latent and experts.shared_overlap,
            "shared experts beside the exchange of projected tokens, which Megatron-Core refuses in training",
        ),
        (spec.expert_latent and spec.mlp_bias, "biases of projections on the way to experts"),
        (
            experts.shared_overlap and experts.dispatcher != "alltoall",
            "shared experts beside the exchange of a dispatcher other than alltoall (--moe-dispatcher alltoall)",
        ),
    )
    fixed = experts.dispatcher == "hybridep" and experts.padded and shape.low is None  # ``_HybridEPManager``
    if experts.dispatcher != "alltoall" and experts.capacity_factor is not None and not fixed:
        other = "allgather" if experts.dispatcher == "allgather" else "flex"
        how = " but HybridEP's that pads to it" * (experts.dispatcher == "hybridep")
        yield f"the {other} dispatcher with a capacity{how} (--moe-dispatcher alltoall)"
    if experts.dispatcher == "allgather" and experts.permute_fusion:
        yield "the allgather dispatcher with permute fusion (--no-moe-permute-fusion)"
    yield from _uncovered_flex(shape, experts)


def _uncovered_flex(shape: CoreShape, experts: ExpertShape) -> Iterator[str]:
    if not experts.flex:
        return
    yield from applying(
        (
            experts.ep * experts.etp == 1,
            "the flex dispatcher with one expert-parallel rank, which Megatron refuses (--moe-dispatcher alltoall)",
        ),
        (
            experts.etp > 1,
            "the flex dispatcher with experts that are divided over tensor-parallel ranks (--etp 1 leaves them whole)",
        ),
        (
            experts.dispatcher == "deepep" and not experts.permute_fusion,
            "DeepEP without permute fusion (--moe-permute-fusion)",
        ),
        (
            experts.dispatcher == "deepep" and experts.ep not in flex.CONFIGS,
            f"DeepEP with {experts.ep} ranks; it has settings for {', '.join(map(str, flex.CONFIGS))}",
        ),
        (shape.spec.router_dtype == "fp64", "the flex dispatcher with probabilities in fp64"),
    )


def parameters(r: Recorder, shape: CoreShape) -> None:
    """In the order in which modules register: router, projections, experts, shared experts."""
    spec, experts = shape.spec, shape.mixture
    r.parameter(router.WEIGHT, (spec.experts, spec.hidden), shape.dtype)
    if spec.mlp_bias:
        r.parameter("mlp.router.bias", (spec.experts,), shape.dtype)
    for name, size in latent_sizes(shape).items():
        r.parameter(f"{name}.weight", size, shape.dtype, low=shape.within(name).low)
    for name, size in grouped.parameters(shape):
        r.parameter(name, size, shape.dtype, expert=experts.apart, low=shape.low if ".weight" in name else None)
    weights = [(one.split(".")[2], size) for one, size in grouped.parameters(shape) if ".weight" in one]
    sizes = dict(weights) if experts.grouped else {}
    for name in (one for one in sizes if adapters.adapts(r, f"{grouped.EXPERTS}.{one}")):
        n, k = sizes[name]
        adapters.parameters_of_experts(r, f"{grouped.EXPERTS}.{name}", n, k, shape)
    if spec.shared_expert_gate:
        r.parameter(f"{SHARED}.gate_weight", (1, spec.hidden), shape.dtype)


def layer(r: Recorder, hidden: Tensor, shape: CoreShape) -> Tensor:
    """The normed (s, b, h), or (s/t, b, h), to the same."""
    parameters(r, shape)
    if "moe" in shape.recompute_modules:
        return recomputed_reentrant(r, lambda r, x: _forward(r, x, shape), (hidden,))
    return _forward(r, hidden, shape)


def _forward(r: Recorder, hidden: Tensor, shape: CoreShape) -> Tensor:
    """``custom_forward``, whose variables hold what the router gave until it returns."""
    with graphs.captured(r, shape, "moe_router"):
        alone = shared(r, hidden, shape) if shape.spec.shared_expert_ffn else None
        probabilities, chosen = router.route(r, hidden, shape)
    with graphs.captured(r, shape, "moe_preprocess"):
        sent = projected(r, hidden, DOWN, shape)
    way = flex if shape.mixture.flex else dispatch
    out, held = way.dispatched(
        r, sent, probabilities, chosen, lambda r, x, weights: grouped.experts(r, x, weights, shape), shape
    )
    del sent
    with graphs.captured(r, shape, graphs.POSTPROCESS):
        out = projected(r, out, UP, shape)
        out = out if alone is None else ops.add(r, out, alone, "experts_and_shared")
    held.clear()
    return out


def latent_sizes(shape: CoreShape) -> dict[str, Shape]:
    """Weights of the projections on the way to experts and back, which every tensor-parallel rank has whole."""
    h, latent = shape.spec.hidden, shape.spec.expert_latent
    return {DOWN: (latent, h), UP: (h, latent)} if latent else {}


def projected(r: Recorder, x: Tensor, name: str, shape: CoreShape) -> Tensor:
    """``fc1_latent_proj`` (``MoELayer.preprocess``) or ``fc2_latent_proj`` (``postprocess``): Transformer Engine's
    linear layer without collectives (``parallel_mode="duplicated"``)."""
    sizes = latent_sizes(shape)
    if not sizes:
        return x
    alone = replace(shape, t=1, sequence_parallel=False)
    out, _ = te.column_linear(r, x, name, sizes[name][0], alone, bias=False, skip_bias=False)
    return out


def shared(r: Recorder, hidden: Tensor, shape: CoreShape) -> Tensor:
    if "shared_experts" in shape.recompute_modules:
        return recomputed_reentrant(r, lambda r, x: shared_experts(r, x, shape), (hidden,))
    return shared_experts(r, hidden, shape)


def shared_sizes(shape: CoreShape) -> tuple[Shape, Shape]:
    """Weights of the two projections of the shared experts on this rank."""
    inner, h = shape.spec.shared_expert_ffn // shape.t, shape.spec.hidden
    return (inner * (2 if shape.spec.gated else 1), h), (h, inner)


def dummy_gradients(shape: CoreShape) -> frozenset[Shape]:
    """Shapes of the static stand-ins for weight gradients of a layer's experts and shared experts."""
    if shape.experts is None or not shape.gradient_fusion:
        return frozenset()
    shared = shared_sizes(shape) if shape.spec.shared_expert_ffn else ()
    return grouped.dummy_gradients(shape) | {*shared, *latent_sizes(shape).values()}


def shared_experts(r: Recorder, hidden: Tensor, shape: CoreShape) -> Tensor:
    """``SharedExpertMLP.forward``. Beside the exchange of tokens (``pre_forward_comm`` to ``post_forward_comm``) the
    input is gathered outside of the projection, which saves it whole."""
    (f, _), _ = shared_sizes(shape)
    apart = shape.mixture.shared_overlap and shape.sequence_parallel
    if shape.mixture.shared_chain:
        return _chained(r, hidden, shape)
    inner_shape = replace(shape, sequence_parallel=False) if apart else shape
    x = _whole(r, hidden, shape) if apart else hidden
    inner = grouped.column_linear(r, x, f"{SHARED}.linear_fc1", f, inner_shape, original=shape.saves_original)
    x = hidden
    if shape.te_activation:
        inner = te.activation(r, inner, f"{SHARED}.linear_fc1", shape)
    elif shape.spec.gated and shape.bias_activation_fusion:
        inner = local.bias_swiglu(r, inner, None, f"{SHARED}.linear_fc1")
    else:
        name = f"{SHARED}.linear_fc1"
        inner = local.swiglu(r, inner, name) if shape.spec.gated else local.ungated(r, inner, name, shape)
    out = grouped.row_linear(r, inner, f"{SHARED}.linear_fc2", inner_shape)
    if apart:
        out = _part(r, out, shape)
    return _gated(r, out, hidden, shape) if shape.spec.shared_expert_gate else out


def _chained(r: Recorder, hidden: Tensor, shape: CoreShape) -> Tensor:
    """``FusedSharedExpertMLP.forward``: one chain of operations, as of one expert whose rows have no probabilities."""
    sizes = zip(("linear_fc1", "linear_fc2"), shared_sizes(shape), strict=True)
    first, second = ([r.parameter(f"{SHARED}.{name}.weight", size, shape.dtype, low=shape.low)] for name, size in sizes)
    gathers = shape.sequence_parallel
    x = _whole(r, hidden, shape) if gathers else hidden
    out = grouped_chain.experts(r, x, None, (first, second), "shared_experts", shape)
    out = _part(r, out, shape) if gathers else out
    return _gated(r, out, hidden, shape) if shape.spec.shared_expert_gate else out


def _gated(r: Recorder, x: Tensor, hidden: Tensor, shape: CoreShape) -> Tensor:
    """Times the sigmoid of a projection of the input to one number."""
    weight = r.parameter(f"{SHARED}.gate_weight", (1, shape.spec.hidden), shape.dtype)
    logits = ops.linear(r, hidden, weight, name="shared_gate")
    scores = ops.elementwise(r, "shared_gate_score", (logits,), (), saves_output=True)
    return ops.multiply(r, x, scores, "shared_gated")


def _whole(r: Recorder, x: Tensor, shape: CoreShape) -> Tensor:
    return moved(r, x, x.shape[0] * shape.t, "all-gather", ("shared_gathered", "grad_shared_scattered"))


def _part(r: Recorder, x: Tensor, shape: CoreShape) -> Tensor:
    return moved(r, x, x.shape[0] // shape.t, "reduce-scatter", ("shared_scattered", "grad_shared_gathered"))
