"""What the report says of BigScience's Megatron-DeepSpeed: layers not recomputed, empty stages, ZeRO-1, assumptions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...notices import tied_head
from ...plan.plan import ResolvedPlan
from ...result import Notice
from ...tape.program import Program

CODE = (
    "BigScience's Megatron-DeepSpeed of November 2021 on PyTorch 1.8: fused softmax (s <= 2048), bias-GELU and "
    "bias-dropout-add, apex norms; tensor-parallel collectives in place",
    "DeepSpeed's pipeline engine of v0.5: stages send activations as 1/tp parts and gather each after "
    "receiving; the last stage keeps the logits of two micro-batches",
)

UNFUSED = (
    "fp16 without ZeRO: FP16_UnfusedOptimizer (in DeepSpeed's branch big-science also for apex "
    "FusedAdam) casts all gradients to fp32 at once in the step",
)

EIGHT_BIT = (
    "8-bit Adam keeps 32-bit states for embeddings (bitsandbytes' rule) unless embeddings_32bit is "
    "false; in BigScience's fork this rule had no effect",
)

RECOMPUTED = "–"
"""In the name of a group of layers: ``layer.0–3``."""


def assumptions(plan: ResolvedPlan) -> tuple[str, ...]:
    result = [*CODE]
    if plan.precision.dtype == "fp16" and plan.layout.zero == 0:
        result += UNFUSED
    if plan.optimizer.algorithm.eight_bit:
        result += EIGHT_BIT
    if plan.loss.kind == "adaptive-softmax":
        result.append(
            "adaptive softmax is an upper bound: every tail cluster counts all tokens, and tp does not shard it"
        )
    return tuple(result)


def notices(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    for source in (_selective, _recompute, _empty_stages, tied_head, _zero_and_embed, _zero_alone):
        yield from source(plan, programs)


def _selective(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """The code has no argument for it (``megatron/arguments.py``: ``--checkpoint-activations`` alone)."""
    if plan.recompute.mode == "selective":
        yield Notice(
            "selective-elsewhere",
            "BigScience's Megatron-DeepSpeed can recompute only whole layers: memplan counts the selective recompute "
            "of Korthikanti et al. (arXiv 2205.05198) instead",
        )


def _recompute(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """Chunks of several layers that do not line up with a stage are not recomputed at all."""
    size = plan.recompute.layers
    if plan.recompute.mode != "full" or plan.recompute.method != "uniform" or size in (None, 1):
        return
    alone = sum(
        len(span.names)
        for program in programs
        for span in program.spans
        if span.module.name == "layer" and not any(RECOMPUTED in name for name in span.names)
    )
    if alone:
        yield Notice(
            "not-recomputed",
            f"{alone} of {plan.model.layers} layers are not recomputed: from a stage's beginning DeepSpeed forms "
            f"groups of {size} entries, and recomputes only groups of nothing but transformer layers",
        )


def _empty_stages(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    without = [p.stage for p in programs if not any(name.startswith("layer.") for name in p.entries)]
    if without:
        named = ", ".join(map(str, without))
        yield Notice(
            "stage-without-layer",
            f"stage {named} holds no transformer layer; BigScience's pipeline of 2021 could not run such a stage",
        )


def _zero_and_embed(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    method = plan.pipeline.partition
    by_embedding = isinstance(method, str) and ("embed" in method.lower() or method.lower() == "parameters")
    if plan.layout.zero == 1 and by_embedding:
        yield Notice(
            "zero1-with-embed-partition",
            "DeepSpeed of 2021 hung with ZeRO-1 and a partition by embedding (DeepSpeed issue 1522); "
            "BigScience therefore chose 8-bit Adam",
        )


def _zero_alone(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    if plan.layout.zero == 1 and plan.layout.dp == 1:
        problem = "ZeRO-1 has nothing to shard at dp = 1, and ZeRO-1's wrapper needs more memory in the step than "
        "plain fp16"
        yield Notice("zero1-without-dp", problem)
