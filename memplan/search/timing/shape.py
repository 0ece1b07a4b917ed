"""What the time of a layer depends on: model, micro-batch and shards, and whose code runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...plan.errors import PlanError
from ...plan.lora import adapted
from ...plan.plan import Plan
from ...plan.spec import ModelSpec, of_any_depth

Code = Literal["transformer-engine", "megatron", "transformers", "torchtitan"]
"""Transformer Engine's fused layers, Megatron's own (also those of Megatron-DeepSpeed), and plain PyTorch."""

ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2}

SCATTERED = (1, 13)
"""PyTorch before which a plan's Megatron is that of 2021 and 2022, before Megatron-Core: its pipeline sent a hidden
state in ``tp`` parts (arXiv 2104.04473, section 4.1), and waited for sends between interleaved stages, too."""

NOT_OVERLAPPED = (1, 11)
"""PyTorch before which it is Megatron-LM up to 2.5: the reduction of a column-parallel layer's input gradient was not
yet beside its weight gradient, and the latter was added to the buffer by a kernel of its own."""


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
    """none, selective, full, or per-operator (torchtitan)."""
    modules: tuple[str, ...]
    """Megatron-Core, selective recompute."""
    loss: str
    cutoffs: tuple[int, ...]
    div_value: float
    fused_loss: str
    vocab: int
    """With padding."""
    fused_accumulation: bool
    """Weight gradients are added to fp32 buffers by the products themselves."""
    gradients: str
    """dtype in which gradients are accumulated."""
    accumulates: bool
    """A step has several micro-batches."""
    fused_rope: bool
    fused_activation: bool
    fused_residual: bool
    all_to_all: bool
    """Context parallelism exchanges heads, not keys and values."""
    scattered_sends: bool
    """Between stages every rank sends its ``1 / t`` of a hidden state."""
    overlapped: bool
    """A column-parallel layer's communication runs beside its weight gradient."""
    overlapped_sends: bool
    """So do sends between interleaved stages and their passes."""
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


def shape_of(plan: Plan) -> Shape:
    """The shape of a resolved plan. ``PlanError`` for what takes a time that is not modelled."""
    _check(plan)
    layout, batch, megatron, framework = plan.layout, plan.batch, plan.megatron, plan.framework
    assert batch.seq is not None
    assert batch.gbs is not None
    assert plan.loss.kind is not None
    core = framework == "megatron"
    once = core or framework == "megatron-deepspeed"
    visible = (plan.hardware.gpus or 1) if batch.multiply_by_visible_gpus else 1
    count = batch.gbs // (batch.mbs * visible * (layout.dp or 1))
    recompute = "per-operator" if plan.fsdp.per_operator else plan.recompute.mode
    return Shape(
        spec=of_any_depth(plan.model),
        code=_code(plan),
        b=batch.mbs * visible,
        s=batch.seq,
        t=layout.tp,
        c=layout.cp,
        dtype=plan.precision.dtype,
        sequence_parallel=layout.sequence_parallel,
        flash=plan.attention == "flash",
        recompute=recompute,
        modules=(plan.recompute.modules or ()) if core else (),
        loss=plan.loss.kind,
        cutoffs=plan.loss.cutoffs or (),
        div_value=plan.loss.div_value,
        fused_loss=megatron.cross_entropy_fusion if core else "none",
        vocab=padded_vocab(plan),
        fused_accumulation=core and megatron.gradient_accumulation_fusion and not _older(plan, NOT_OVERLAPPED),
        gradients=plan.precision.gradients or "fp32",
        accumulates=count > 1 or core,
        fused_rope=core and megatron.rope_fusion,
        fused_activation=once and megatron.bias_gelu_fusion and megatron.bias_swiglu_fusion,
        fused_residual=once and megatron.bias_dropout_fusion,
        all_to_all=megatron.cp_communication == "a2a",
        scattered_sends=layout.sequence_parallel or framework == "megatron-deepspeed" or _older(plan, SCATTERED),
        overlapped=core and not _older(plan, NOT_OVERLAPPED),
        overlapped_sends=overlapped_sends(plan, layout.vpp),
        blocking=plan.environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"),
        casts=plan.precision.autocast and plan.precision.stored == "fp32",
        rank=plan.lora.rank or 0,
        adapted=adapted(plan),
        adapter=plan.lora.dtype or "fp32",
        quantised=plan.quantisation.kind != "none",
    )


def overlapped_sends(plan: Plan, vpp: int) -> bool:
    """Whether, with so many chunks a stage, sends run beside passes."""
    return vpp > 1 and plan.pipeline.overlap_p2p and not _older(plan, SCATTERED)


def _code(plan: Plan) -> Code:
    if plan.framework == "megatron":
        return "transformer-engine" if plan.megatron.transformer_impl == "transformer_engine" else "megatron"
    if plan.framework == "megatron-deepspeed":
        return "megatron"
    return "torchtitan" if plan.framework == "fsdp" and plan.fsdp.code == "torchtitan" else "transformers"


def _older(plan: Plan, version: tuple[int, int]) -> bool:
    """Whether ``plan`` is of Megatron's code before a version of PyTorch."""
    if plan.framework != "megatron" or plan.torch is None:
        return False
    major, minor, *_ = (int(part) for part in plan.torch.split("."))
    return (major, minor) < version


def padded_vocab(plan: Plan) -> int:
    """Rows of the embedding and of the head, over all ranks."""
    if plan.framework == "megatron":
        multiple = plan.megatron.vocab_multiple * plan.layout.tp
    elif plan.framework == "megatron-deepspeed":
        multiple = 128 * plan.layout.tp
    else:
        multiple = 1
    return -(-plan.model.vocab // multiple) * multiple


def _check(plan: Plan) -> None:
    if plan.frozen.embedding or plan.frozen.layers:
        problem = "must be 0 where time is asked for: frozen layers are not timed"
        raise PlanError("frozen.layers", plan.frozen.layers, problem)
    if plan.fsdp.recompute_every > 1:
        problem = "must be 1 where time is asked for"
        raise PlanError("fsdp.recompute_every", plan.fsdp.recompute_every, problem)
