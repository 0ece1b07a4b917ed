"""DeepSpeed in a search: offload, and bounds that count what its wrapper keeps as ``engine`` does; hooks add to what
passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from ...layers.autograd import ITEMSIZE
from ...layers.huggingface import LayerShape
from ...layers.module import Options
from ...optimizers.bitsandbytes import quantisation_maps
from ...plan.plan import Plan, ResolvedPlan
from ...search.framework import FrameworkSearch, eight_bit_adam, fused_losses
from ...search.lower_bounds import Kept, LowerBounds, peaks, raised
from ...search.point import Extra
from ...search.space import Space
from ...tape.events import Category, change, compose, fold, rounded
from ...values import replace
from ..plain.hooked import Model
from ..plain.programs import buffers, layer_shape
from . import engine
from .config import check, zero_of
from .states import touched


class DeepspeedSearch(FrameworkSearch):
    zero_of_one_rank = True

    def extras(self, plan: ResolvedPlan) -> list[tuple[Extra, ...]]:
        offload = [(_OFFLOAD_STATES, _OFFLOAD_ALL)] if plan.deepspeed.offload_optimizer == "none" else []
        return [*fused_losses(plan), *offload, *eight_bit_adam(plan)]

    def without_extras(self, base: Plan) -> Iterator[Mapping[str, Any]]:
        """Offload to NVMe stays, as it is not searched."""
        yield from super().without_extras(base)
        if "nvme" not in [base.at(path) for path, _ in _OFFLOAD_ALL.fields]:
            yield {path: "none" for path, value in _OFFLOAD_ALL.fields if base.at(path) == value}

    def lower_bounds(self, space: Space) -> LowerBounds:
        return _Bounds(space)


_OFFLOAD_STATES = Extra(
    "optimizer on the CPU", (("deepspeed.offload_optimizer", "cpu"),), least_zero=1, moves_states=True
)
_OFFLOAD_ALL = Extra(
    "optimizer and parameters on the CPU",
    (("deepspeed.offload_optimizer", "cpu"), ("deepspeed.offload_param", "cpu")),
    least_zero=3,
    moves_states=True,
)


class _Bounds(LowerBounds):
    passes_depend_on_zero = True

    def kept(self, plan: ResolvedPlan) -> Kept:
        """Of the rank that keeps most, of a resolved plan."""
        setting = engine.setting_of(plan, zero_of(plan))
        zero = setting.zero
        check(plan, zero)
        model = _parameters(layer_shape(plan), plan.model.layers, setting)
        parts = engine.groups_of(setting, model)
        rank, gradients = 0, 0
        if zero.stage in (1, 2):
            owned = touched(parts, setting.dp)
            rank = max(range(setting.dp), key=lambda one: (owned[one], one))
        if zero.stage < 2:
            gradients = sum(map(model.bytes, model.trained))
            gradients += engine.bucket_bytes(setting) if zero.stage == 1 and not setting.bf16_wrapper else 0
        elif zero.stage == 2 and zero.offload_optimizer == "none":
            wide = setting.accumulates == "fp32" and setting.dtype != "fp32"
            shares = [part.share for part in parts if part.share_of(rank)]
            gradients = (
                sum(rounded(4 * one) for one in shares) if wide else rounded(owned[rank] * ITEMSIZE[setting.dtype])
            )
        step = engine.step_of(setting, model, parts, rank)
        ended = change(-gradients, Category.GRADIENTS)
        held = change(gradients, Category.GRADIENTS)
        static = sum(hold.bytes for hold in (*buffers(plan, 0), *quantisation_maps(plan.optimizer)))
        static += engine.placed_of(setting, model, parts).on("device")
        static += sum(hold.bytes for hold in engine.scales_of(setting, layer_shape(plan), plan))
        return Kept(static, gradients, compose((held, fold(step.before), ended, fold(step.after))).peak)

    def passing(self, plan: ResolvedPlan, accumulates: bool) -> tuple[int, ...]:
        """What one micro-batch takes beside what is static and what ``accumulates``, where others went before it.

        Gathered parameters are left out, and buckets until the first layer in backward has ended.
        """
        setting = engine.setting_of(plan, zero_of(plan))
        zero = setting.zero
        shape = layer_shape(plan)
        stays = zero.stage < 2
        how = (setting.options, zero.stage, setting.recompute, setting.loss)
        model = engine.model_of(shape, plan.model.layers, *how)
        tapes = [
            instance.hooked.module.first if stays else instance.hooked.module.steady for instance in model.instances
        ]
        if stays and accumulates:
            tapes = [instance.hooked.module.steady for instance in model.instances]
        bucket = 0
        if zero.stage == 2 or (zero.stage == 1 and not setting.bf16_wrapper and not accumulates):
            bucket = engine.bucket_bytes(setting) * (2 if zero.stage == 2 and zero.overlaps else 1)
        last = max(at for at, instance in enumerate(model.instances) if instance.name.startswith("layer."))
        backward = [raised(one.backward_fold, bucket if at < last else 0) for at, one in enumerate(tapes)]
        return peaks([*(one.forward_fold for one in tapes), *reversed(backward)], 2 * len(tapes) - last)


def _parameters(shape: LayerShape, layers: int, setting: engine.Setting) -> Model:
    """The model for its parameters, whatever the batch."""
    return _model(replace(shape, b=1, s=2), layers, setting.options)


@lru_cache(maxsize=32)
def _model(shape: LayerShape, layers: int, options: Options) -> Model:
    return engine.model_of(shape, layers, options, 2, False)
