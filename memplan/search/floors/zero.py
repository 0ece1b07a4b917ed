"""DeepSpeed's engine: what its wrapper keeps is counted as ``frameworks.deepspeed`` does, hooks add to what passes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ...frameworks import deepspeed
from ...frameworks.deepspeed import Setting
from ...frameworks.deepspeed_programs import zero_of
from ...frameworks.plain import layer_shape
from ...frameworks.plain_buffers import buffers
from ...frameworks.states import quantisation_maps
from ...frameworks.zero_layout import touched
from ...frameworks.zero_weave import Model
from ...layers.autograd import ITEMSIZE
from ...layers.huggingface import LayerShape
from ...layers.module import Options
from ...plan.plan import Plan
from ...tape import Category, change, compose, fold, rounded
from .parts import Kept, peaks, raised


def kept(plan: Plan) -> Kept:
    """Of the rank that keeps most, of a resolved plan."""
    zero, setting = zero_of(plan), _setting(plan)
    deepspeed.check(plan, zero)
    model = _parameters(layer_shape(plan), plan.model.layers)
    parts = deepspeed._groups(setting, model)
    rank, gradients = 0, 0
    if zero.stage in (1, 2):
        owned = touched(parts, setting.dp)
        rank = max(range(setting.dp), key=lambda one: (owned[one], one))
    if zero.stage < 2:
        gradients = sum(model.bytes(id) for id in range(len(model.parameters)))
        gradients += deepspeed._bucket_bytes(setting) if zero.stage == 1 and not setting.bf16_wrapper else 0
    elif zero.stage == 2 and zero.offload_optimizer == "none":
        wide = setting.accumulates == "fp32" and setting.dtype != "fp32"
        shares = [part.share for part in parts if part.share_of(rank)]
        gradients = sum(rounded(4 * one) for one in shares) if wide else rounded(owned[rank] * ITEMSIZE[setting.dtype])
    step = deepspeed._step(setting, model, parts, rank)
    ended = change(-gradients, Category.GRADIENTS)
    held = change(gradients, Category.GRADIENTS)
    static = sum(hold.bytes for hold in (*buffers(plan, 0), *quantisation_maps(plan.optimizer)))
    static += deepspeed._placed(setting, model, parts).on("device")
    return Kept(static, gradients, compose((held, fold(step.before), ended, fold(step.after))).peak)


def passing(plan: Plan, accumulates: bool) -> tuple[int, ...]:
    """What one micro-batch takes beside what is static and what ``accumulates``, where others went before it.

    Gathered parameters are left out, and buckets until the first layer in backward has ended.
    """
    zero, setting = zero_of(plan), _setting(plan)
    shape = layer_shape(plan)
    stays = zero.stage < 2
    model = deepspeed.model_of(shape, plan.model.layers, Options(), zero.stage, setting.recompute)
    tapes = [instance.hooked.module.first if stays else instance.hooked.module.steady for instance in model.instances]
    if stays and accumulates:
        tapes = [instance.hooked.module.steady for instance in model.instances]
    bucket = 0
    if zero.stage == 2 or (zero.stage == 1 and not setting.bf16_wrapper and not accumulates):
        bucket = deepspeed._bucket_bytes(setting) * (2 if zero.stage == 2 and zero.overlaps else 1)
    last = max(at for at, instance in enumerate(model.instances) if instance.name.startswith("layer."))
    backward = [raised(one.backward_fold, bucket if at < last else 0) for at, one in enumerate(tapes)]
    return peaks([*(one.forward_fold for one in tapes), *reversed(backward)], 2 * len(tapes) - last)


def _setting(plan: Plan) -> Setting:
    shape = layer_shape(plan)
    assert plan.layout.dp is not None
    assert plan.batch.gbs is not None
    microbatches = plan.batch.gbs // (shape.b * plan.layout.dp)
    recompute = plan.recompute.mode == "full"
    return Setting(zero_of(plan), plan.layout.dp, shape.dtype, plan.optimizer, recompute, microbatches)


def _parameters(shape: LayerShape, layers: int) -> Model:
    """The model for its parameters, whatever the batch."""
    return _model(replace(shape, b=1, s=2), layers)


@lru_cache(maxsize=32)
def _model(shape: LayerShape, layers: int) -> Model:
    return deepspeed.model_of(shape, layers, Options(), 2, False)
