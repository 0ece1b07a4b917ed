"""Which loss there is where, and which of its fields belong together."""

from __future__ import annotations

from ..families import family
from ..frameworks import framework
from .checks import listed, require
from .errors import ABSENT, PlanError
from .plan import Loss, ResolvedPlan

FUSED = ("liger", "cut", "chunked")
"""Losses that never hold all logits at once."""

OVER_LOGITS = ("liger-cross-entropy", "unsloth")
"""Kernels that take all logits, and write their gradient over them."""

FIELDS = {
    "chunks": ("chunked",),
    "fp32_accumulators": ("liger", "cut"),
    "liger": ("liger",),
    "cutoffs": ("adaptive-softmax",),
    "div_value": ("adaptive-softmax",),
}
"""Fields that belong to some kinds of loss only."""

OLDEST_LIGER = (0, 5, 3)

SHIFTING_LIGER = (0, 3, 1), (0, 4, 2)
"""The first and the last of the releases before, whose loss shifts hidden states and upcasts logits, that are known."""

ACCUMULATES = (0, 6, 2)
"""Liger from which the weight's gradient can be accumulated in fp32."""


def check_loss(plan: ResolvedPlan) -> None:
    """Which loss there is where, and what it asks of the rest of the plan."""
    loss, supports = plan.loss, framework(plan.framework).supports
    _check_fields(plan)
    must, why = listed(supports.losses), supports.losses_refused.get(loss.kind)
    require(plan, "loss.kind", loss.kind, must, "losses", loss.kind, loss.kind, why)
    if loss.kind in FUSED:
        _check_fused_kind(plan)
    elif loss.kind == "adaptive-softmax":
        _check_clusters(plan)
    elif loss.kind in OVER_LOGITS:
        _check_over_logits(plan)


def _check_over_logits(plan: ResolvedPlan) -> None:
    """Liger's is in the place of the loss of every causal model; fms-acceleration patches some families alone."""
    kind, spec, known = plan.loss.kind, plan.model, family(plan.model.family)
    plan.refuse(
        (
            "loss.kind",
            not spec.causal or spec.mlm_head,
            f"must be plain: {spec.name} has no head for causal language modelling",
        ),
        (
            "loss.kind",
            kind == "unsloth" and kind not in known.kernels and "fms" not in known.loss_alone,
            f"must be plain, or one of Liger's, for family {spec.family}: its loss is not among fms-acceleration's",
        ),
        ("loss.kind", plan.code != "current", "must be plain with code 2020"),
    )


def _check_clusters(plan: ResolvedPlan) -> None:
    """Tail clusters of the adaptive softmax."""
    loss, vocab = plan.loss, plan.model.vocab
    if plan.model.mlm_head:
        raise plan.wrong(
            "loss.kind", f"must be plain or vocab-parallel: the head of {plan.model.name} has no adaptive softmax"
        )
    if loss.cutoffs is None:
        problem = f"is missing: a vocabulary of {vocab} has no default; give the first token id of each tail cluster"
        raise PlanError("loss.cutoffs", ABSENT, problem)
    if list(loss.cutoffs) != sorted(set(loss.cutoffs)) or not loss.cutoffs or loss.cutoffs[-1] >= vocab:
        raise plan.wrong("loss.cutoffs", f"must increase and stay below the vocabulary of {vocab}")


def liger_version(loss: Loss) -> tuple[int, ...]:
    return tuple(map(int, loss.liger.split(".")))


def _check_fields(plan: ResolvedPlan) -> None:
    """Fields that belong to other kinds of loss, and logits of the last tokens alone."""
    loss = plan.loss
    for name, _ in loss.changed():
        kinds = FIELDS.get(name, (loss.kind,))
        if loss.kind not in kinds:
            raise plan.wrong(f"loss.{name}", f"needs loss.kind {listed(kinds)}, not {loss.kind}")
    kept, seq = loss.logits_to_keep, plan.batch.seq
    if kept is None:
        return
    require(plan, "loss.logits_to_keep", kept, "left out", "last_logits")
    plan.refuse(
        (
            "loss.logits_to_keep",
            loss.kind != "plain" or not plan.model.causal,
            "needs a causal model and loss.kind plain",
        ),
        ("loss.logits_to_keep", kept > seq, f"must be at most the {seq} tokens of a sequence"),
    )


def _check_fused_kind(plan: ResolvedPlan) -> None:
    """What each fused loss asks of the rest of the plan."""
    loss, kind, batch = plan.loss, plan.loss.kind, plan.batch
    if not plan.model.causal or plan.model.mlm_head:
        raise plan.wrong("loss.kind", f"must be plain: {plan.model.name} has no head for causal language modelling")
    if plan.model.head_bias or plan.model.logit_scale:
        what = "the head of {} has a bias" if plan.model.head_bias else "{} divides its logits by a number"
        raise plan.wrong("loss.kind", f"must be plain: {what.format(plan.model.name)}")
    if plan.code != "current":
        raise plan.wrong("loss.kind", "must be plain with code 2020")
    first, last = SHIFTING_LIGER
    if kind == "liger" and liger_version(loss) < OLDEST_LIGER and not first <= liger_version(loss) <= last:
        older = f"{'.'.join(map(str, first))} to {'.'.join(map(str, last))}"
        raise plan.wrong("loss.liger", f"must be at least {'.'.join(map(str, OLDEST_LIGER))}, or {older}")
    if kind == "liger" and loss.fp32_accumulators and liger_version(loss) < ACCUMULATES:
        raise plan.wrong(
            "loss.fp32_accumulators",
            f"must be false with Liger {loss.liger}; Liger 0.6.2 and later support fp32 accumulators",
        )
    if kind == "cut" and batch.seq == 1:
        raise PlanError("batch.seq", 1, "must be at least 2: cut cross entropy drops the first token")
    if kind == "chunked":
        _check_chunks(plan)


def _check_chunks(plan: ResolvedPlan) -> None:
    loss = plan.loss
    plan.refuse(
        (
            "loss.kind",
            plan.model.logit_softcap is not None and not family(plan.model.family).caps_in_head,
            f"cannot be {loss.kind}: {plan.model.name} caps its logits behind its head, which runs in chunks",
        ),
        ("loss.chunks", plan.tokens % loss.chunks, f"must divide the {plan.tokens} tokens of a micro-batch"),
    )
