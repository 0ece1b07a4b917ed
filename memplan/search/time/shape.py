"""What the time of a step depends on: the shape of a layer's work, what stages hold, and the FLOPs of products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ...frameworks import framework
from ...layers.autograd import ITEMSIZE as ITEMSIZE
from ...plan import count
from ...plan.errors import PlanError
from ...plan.lora import adapted
from ...plan.resolved import ResolvedPlan
from ...plan.spec import ModelSpec, of_any_depth
from ...values import dataclass


class Code(NamedTuple):
    """How a framework's code runs a layer, as far as it takes another time. The defaults are transformers'."""

    norm_in_python: bool = True
    """RMSNorm is Python in fp32: cast, square, mean, multiply, cast, multiply (``LlamaRMSNorm.forward``)."""
    complex_rope: bool = False
    """Rotary embedding is a product of complex numbers in fp32."""
    joined_inputs: bool = False
    """Queries, keys and values are one product, and so are gate and up."""
    joined_gradients: bool = False
    """Attention's backward joins the gradients of queries, keys and values into one tensor."""
    packed_attention: bool = False
    """Flash attention takes and gives what the products beside it have, without copies."""
    fused_softmax: bool = False
    """Scale, mask and softmax of scores that are kept are one kernel."""
    parallel_loss: bool = False
    """The cross entropy is Megatron's, of a rank's part of the vocabulary."""
    fused_loss: str = "none"
    """Its fused kernel: native, te, or none."""
    fused_rope: bool = False
    fused_activation: bool = False
    fused_residual: bool = False
    fused_accumulation: bool = False
    """Weight gradients are added to fp32 buffers by the products themselves."""
    gradient_buffer: bool = False
    """Gradients are added to buffers that outlive the step."""
    reduces_blocks_apart: bool = False
    """Attention and MLP of a parallel block are reduced one by one."""
    scattered_sends: bool = False
    """Between stages every rank sends its ``1 / t`` of a hidden state, also where the sequence is whole."""
    overlapped: bool = False
    """A column-parallel layer's communication runs beside its weight gradient."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One micro-batch on one rank. Equal shapes take equal time."""

    spec: ModelSpec
    code: Code
    b: int
    s: int
    t: int
    c: int
    """Context-parallel size."""
    dtype: str
    sequence_parallel: bool
    flash: bool
    recompute: str
    """none, selective, full, or per-operator."""
    modules: tuple[str, ...]
    """Those that selective recompute names."""
    loss: str
    cutoffs: tuple[int, ...]
    div_value: float
    vocab: int
    """With padding."""
    gradients: str
    """dtype in which gradients are accumulated."""
    accumulates: bool
    """A step has several micro-batches."""
    all_to_all: bool
    """Context parallelism exchanges heads, not keys and values."""
    scattered_sends: bool
    """Between stages every rank sends its ``1 / t`` of a hidden state."""
    overlapped_sends: bool
    """Sends between interleaved stages run beside their passes."""
    blocking: bool
    """The host waits for every kernel (``CUDA_LAUNCH_BLOCKING``)."""
    casts: bool
    """Autocast turns fp32 weights into ``dtype`` for every pass, and their gradients back."""
    rank: int
    """Of LoRA's adapters, beside which nothing is trained; 0 without."""
    adapted: frozenset[str]
    """Linear layers that have one, as ``plan.lora`` names them."""
    adapter: str
    """dtype of adapters."""
    quantised: bool
    """Linear layers are kept in 4 bits."""

    @property
    def tokens(self) -> int:
        """Of a rank, in regions that tensor parallelism does not shard."""
        return self.b * self.s // self.c

    @property
    def sharded_tokens(self) -> int:
        """Of norms, dropouts and residuals."""
        return self.tokens // self.t if self.sequence_parallel else self.tokens

    @property
    def element(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def hidden_bytes(self) -> int:
        """Of the hidden state of one micro-batch."""
        return self.tokens * self.spec.hidden * self.element


def without_recompute(shape: Shape) -> Shape:
    """The same where backward computes nothing again: what layers and ends share that are recomputed or not."""
    return shape if shape.recompute == "none" else replace(shape, recompute="none", modules=())


def shape_of(plan: ResolvedPlan) -> Shape:
    """The shape of a resolved plan. ``PlanError`` for what takes a time that is not modelled."""
    _check(plan)
    layout, batch, own = plan.layout, plan.batch, framework(plan.framework)
    code = own.time.code(plan)
    return Shape(
        spec=of_any_depth(plan.model),
        code=code,
        b=plan.sequences,
        s=batch.seq,
        t=layout.tp,
        c=layout.cp,
        dtype=plan.precision.dtype,
        sequence_parallel=layout.sequence_parallel,
        flash=plan.attention == "flash",
        recompute="per-operator" if plan.fsdp.per_operator else plan.recompute.mode,
        modules=plan.recompute.modules or (),
        loss=plan.loss.kind,
        cutoffs=plan.loss.cutoffs or (),
        div_value=plan.loss.div_value,
        vocab=plan.padded_vocab,
        gradients=plan.precision.gradients or "fp32",
        accumulates=plan.microbatches > 1 or code.gradient_buffer,
        all_to_all=plan.megatron.cp_communication == "a2a",
        scattered_sends=layout.sequence_parallel or code.scattered_sends,
        overlapped_sends=own.time.overlapped_sends(plan, layout.vpp),
        blocking=plan.environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"),
        casts=plan.precision.autocast and plan.precision.stored == "fp32",
        rank=plan.lora.rank or 0,
        adapted=adapted(plan),
        adapter=plan.lora.dtype or "fp32",
        quantised=plan.quantisation.kind != "none",
    )


def _check(plan: ResolvedPlan) -> None:
    if plan.frozen.embedding or plan.frozen.layers:
        problem = "must be 0 where time is asked for: frozen layers are not timed"
        raise PlanError("frozen.layers", plan.frozen.layers, problem)
    if plan.fsdp.recompute_every > 1:
        problem = "must be 1 where time is asked for"
        raise PlanError("fsdp.recompute_every", plan.fsdp.recompute_every, problem)


class StageWork(NamedTuple):
    """Entries of one chunk of a stage."""

    layers: int
    recomputed: int = 0
    """Layers whose forward pass backward runs again, whole or in part."""
    embedding: bool = False
    final_norm: bool = False
    head: bool = False


Work = tuple[tuple[StageWork, ...], ...]
"""By stage, then by chunk."""


def work_of(plan: ResolvedPlan) -> Work:
    """The stages of a resolved plan, as its framework cuts it. ``PlanError`` where it cannot."""
    return framework(plan.framework).time.stages(plan)


def named(names: Sequence[str], plan: ResolvedPlan) -> StageWork:
    """Entries of these ``names``."""
    layers = sum(name.startswith("layer.") for name in names)
    return StageWork(layers, recomputed(plan, layers), "embedding" in names, "final_norm" in names, "head" in names)


def recomputed(plan: ResolvedPlan, layers: int) -> int:
    """Of ``layers`` of a chunk."""
    recompute = plan.recompute
    if recompute.mode == "none":
        return 0
    if recompute.mode == "full" and recompute.method == "block" and recompute.layers is not None:
        return min(layers, recompute.layers)
    return layers


@lru_cache(maxsize=4096)
def elements(spec: ModelSpec, work: tuple[StageWork, ...], tp: int, vocab: int, positions_twice: bool = False) -> float:
    """Parameters of a stage on one tensor-parallel rank; the last of several stages has a tied weight of its own, and
    with ``positions_twice`` the learned positions, too."""
    h = spec.hidden
    one_norm = count.norm(spec)
    norms = 1 if spec.blocks == "parallel_one_norm" else 4 if spec.norm_place == "both" else 2
    whole = norms * one_norm + h * (spec.attention_output_bias + spec.mlp_bias)
    layer = (count.layer(spec) - whole) / tp + whole
    word = vocab * h / tp
    positions = (spec.positions_max + spec.position_offset) * h if spec.positions == "learned" else 0
    beside = positions + spec.token_types * h + (one_norm if spec.embedding_norm else 0)
    first = any(chunk.embedding for chunk in work)
    total = word + beside if first else 0.0
    for chunk in work:
        total += chunk.layers * layer
        total += one_norm if chunk.final_norm and spec.final_norm else 0
        if chunk.head:
            tied = spec.tied_embeddings
            total += 0 if tied and first else word
            total += positions if tied and not first and positions_twice else 0
            total += (h * h + h + one_norm + spec.vocab) if spec.mlm_head else 0
    return total


def model_flops(plan: ResolvedPlan) -> float:
    """FLOPs of a step's products, forward and backward: 6 for each weight of a matrix and token, 12 for each layer,
    feature and score (arXiv 2205.05198, appendix A)."""
    spec, batch = plan.model, plan.batch
    head = spec.vocab * spec.hidden
    matrices = spec.layers * matrix_elements(plan) + head
    attended = 12.0 * spec.layers * spec.attention_features * batch.seq
    return batch.gbs * batch.seq * (6.0 * matrices + attended)


def matrix_elements(plan: ResolvedPlan) -> int:
    """Weights of a layer's products."""
    spec = plan.model
    return spec.hidden * (spec.qkv_features + spec.attention_features) + mlp_elements(plan)


def mlp_elements(plan: ResolvedPlan) -> int:
    """Those of its MLP."""
    return (3 if plan.model.gated else 2) * plan.model.hidden * plan.model.ffn


def recomputed_flops(plan: ResolvedPlan, work: Sequence[Sequence[StageWork]]) -> float:
    """FLOPs of products that backward computes again."""
    spec, batch = plan.model, plan.batch
    layers = sum(chunk.recomputed for stage in work for chunk in stage)
    scores = 4.0 * spec.attention_features * batch.seq
    if plan.fsdp.per_operator:
        each = float(matrix_elements(plan))
    elif plan.recompute.mode == "selective":
        modules = plan.recompute.modules or ("core_attn",)
        each = (scores if "core_attn" in modules else 0.0) + (2.0 * mlp_elements(plan) if "mlp" in modules else 0.0)
    else:
        each = 2.0 * matrix_elements(plan) + scores
    return batch.gbs * batch.seq * layers * each
