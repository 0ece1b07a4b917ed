"""Which loss there is where, and which of its fields belong together."""

from __future__ import annotations

from .errors import ABSENT, PlanError
from .optimizer_checks import WHOLE
from .plan import Loss, Plan

FUSED = ("liger", "cut", "chunked")
"""Losses that never hold all logits at once."""

OLDEST_LIGER = (0, 5, 3)

ACCUMULATES = (0, 6, 2)
"""Liger from which the weight's gradient can be accumulated in fp32."""


def check_loss(plan: Plan) -> None:
    """Which loss there is where, and clusters that rise below the vocabulary."""
    loss, vocab = plan.loss, plan.model.vocab
    if plan.framework == "megatron" and loss.kind != "vocab-parallel":
        problem = "must be vocab-parallel with framework megatron; megatron.cross_entropy_fusion names its kernel"
        raise PlanError("loss.kind", loss.kind, problem)
    _check_fused(plan)
    if loss.kind in FUSED:
        _check_fused_kind(plan)
    elif loss.kind == "vocab-parallel" and plan.framework == "fsdp":
        _check_loss_parallel(plan)
    elif loss.kind != "plain" and plan.framework not in ("megatron", "megatron-deepspeed"):
        what = "adaptive softmax" if loss.kind == "adaptive-softmax" else "the vocabulary-parallel loss"
        problem = f"must be plain with framework {plan.framework}; {what} is modelled under megatron-deepspeed"
        raise PlanError("loss.kind", loss.kind, problem)
    if loss.kind != "adaptive-softmax":
        problem = f"belongs to the adaptive softmax, and loss.kind is {loss.kind}"
        if loss.cutoffs is not None:
            raise PlanError("loss.cutoffs", list(loss.cutoffs), problem)
        if loss.div_value != Loss().div_value:
            raise PlanError("loss.div_value", loss.div_value, problem)
        return
    if plan.model.mlm_head:
        problem = f"must be plain or vocab-parallel: the head of {plan.model.name} has no adaptive softmax"
        raise PlanError("loss.kind", loss.kind, problem)
    if loss.cutoffs is None:
        problem = f"is missing: a vocabulary of {vocab} has no default; name the first token of each tail cluster"
        raise PlanError("loss.cutoffs", ABSENT, problem)
    if list(loss.cutoffs) != sorted(set(loss.cutoffs)) or not loss.cutoffs or loss.cutoffs[-1] >= vocab:
        problem = f"must rise and stay below the vocabulary of {vocab}"
        raise PlanError("loss.cutoffs", list(loss.cutoffs), problem)


def _check_loss_parallel(plan: Plan) -> None:
    """``loss_parallel`` of PyTorch, which torchtitan enters with tensor parallelism."""
    if plan.layout.tp == 1:
        raise PlanError("loss.kind", plan.loss.kind, "must be plain with tp 1: there are no parts of the vocabulary")


def liger_version(loss: Loss) -> tuple[int, ...]:
    return tuple(map(int, loss.liger.split(".")))


def _check_fused(plan: Plan) -> None:
    """Fields that belong to some kinds of loss only."""
    loss = plan.loss
    for name, kinds in (("chunks", ("chunked",)), ("fp32_accumulators", ("liger", "cut")), ("liger", ("liger",))):
        value = getattr(loss, name)
        if loss.kind not in kinds and value != Loss.model_fields[name].default:
            problem = f"belongs to loss {' or '.join(kinds)}, and loss.kind is {loss.kind}"
            raise PlanError(f"loss.{name}", value, problem)
    kept, seq = loss.logits_to_keep, plan.batch.seq
    if kept is None:
        return
    assert seq is not None
    if plan.framework not in WHOLE or loss.kind != "plain" or not plan.model.causal:
        problem = f"belongs to causal models with loss plain and framework {', '.join(WHOLE)}"
        raise PlanError("loss.logits_to_keep", kept, problem)
    if kept > seq:
        raise PlanError("loss.logits_to_keep", kept, f"must be at most the {seq} tokens of a sequence")


def _check_fused_kind(plan: Plan) -> None:
    """What each fused loss asks of the rest of the plan."""
    loss, kind, batch = plan.loss, plan.loss.kind, plan.batch
    if plan.framework not in WHOLE:
        problem = f"must be plain with framework {plan.framework}, where fused losses are not modelled yet; "
        problem += f"{', '.join(WHOLE)} have them"
        raise PlanError("loss.kind", kind, problem)
    if not plan.model.causal or plan.model.mlm_head:
        raise PlanError(
            "loss.kind", kind, f"must be plain: {plan.model.name} has no head for causal language modelling"
        )
    if plan.model.head_bias:
        raise PlanError("loss.kind", kind, f"must be plain: the head of {plan.model.name} has a bias")
    if plan.code != "current":
        raise PlanError("loss.kind", kind, "must be plain with code 2020")
    if kind == "liger" and liger_version(loss) < OLDEST_LIGER:
        raise PlanError("loss.liger", loss.liger, f"must be at least {'.'.join(map(str, OLDEST_LIGER))}")
    if kind == "liger" and loss.fp32_accumulators and liger_version(loss) < ACCUMULATES:
        raise PlanError(
            "loss.fp32_accumulators", True, f"must be false with Liger {loss.liger}; 0.6.2 and later have it"
        )
    if kind == "cut" and batch.seq == 1:
        raise PlanError("batch.seq", 1, "must be at least 2: cut cross entropy leaves out the first token")
    if kind == "chunked":
        _check_chunks(plan)


def _check_chunks(plan: Plan) -> None:
    batch, loss = plan.batch, plan.loss
    assert batch.seq is not None
    assert plan.hardware.gpus is not None
    if plan.model.logit_softcap is not None:
        problem = f"must be another: {plan.model.name} caps its logits, which torchtitan's models do not"
        raise PlanError("loss.kind", loss.kind, problem)
    if plan.framework == "ddp":
        problem = "must be another with ddp: chunks run backward within forward, where DDP's hooks fire too early"
        raise PlanError("loss.kind", loss.kind, problem)
    tokens = batch.mbs * batch.seq * (plan.hardware.gpus if batch.multiply_by_visible_gpus else 1)
    if tokens % loss.chunks:
        raise PlanError("loss.chunks", loss.chunks, f"must divide the {tokens} tokens of a micro-batch")
