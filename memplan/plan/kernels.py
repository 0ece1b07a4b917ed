"""Kernels in the place of transformers' operators: what each set has, and what a piece asks of the rest of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..families import family
from .lora import adapted

if TYPE_CHECKING:
    from .plan import Plan
    from .resolved import ResolvedPlan
    from .tuning_sections import Kernels

PIECES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "none": {},
        "liger": {"norm": "liger", "rope": "liger", "mlp": "liger"},
        "fms": {"norm": "unsloth", "rope": "unsloth", "lora": "unsloth"},
    }
)
"""What each set has; the rest is eager. Liger: ``transformers/monkey_patch.py``, the defaults of
``apply_liger_kernel_to_llama``; fms-acceleration: ``framework_plugin_fast_kernels.py``, all switched on."""

LOSSES: Mapping[str, str] = MappingProxyType({"liger": "liger", "fms": "unsloth"})
"""The loss that comes with a set."""

NAMES = ("norm", "rope", "mlp", "lora")


def of_set(plan: Plan) -> Kernels:
    """The section with every piece of the set named; LoRA's functions are for 4-bit weights alone."""
    given = plan.kernels
    pieces = {} if given.set in family(plan.model.family).loss_alone else PIECES[given.set]
    quantised = plan.quantisation.kind != "none"
    update = {name: piece for name, piece in pieces.items() if getattr(given, name) is None}
    return given.model_copy(update={name: piece for name, piece in update.items() if name != "lora" or quantised})


def check_kernels(plan: ResolvedPlan) -> None:
    """Pieces that the family, or the weights, are not patched with."""
    own = family(plan.model.family)
    for name in NAMES:
        value = getattr(plan.kernels, name)
        if value not in (None, "eager", *own.kernels):
            allowed = " or ".join(("eager", *own.kernels))
            why = "others are not modelled for its layers" if own.kernels else "no kernels are modelled for its layers"
            raise plan.wrong(f"kernels.{name}", f"must be {allowed} for family {own.name}: {why}")
    if plan.kernels.lora == "unsloth" and (plan.lora.rank is None or plan.quantisation.kind == "none"):
        raise plan.wrong(
            "kernels.lora", "must be eager without adapters on 4-bit weights, which Unsloth's functions are for"
        )
    if plan.kernels.lora == "unsloth":
        _check_functions(plan)


def _check_functions(plan: ResolvedPlan) -> None:
    """What fms-acceleration's functions do not run with."""

    def refuse(why: str) -> None:
        raise plan.wrong("kernels.lora", f"must be eager {why}")

    adapted_layers, given = adapted(plan), plan.quantisation
    if not plan.precision.autocast:
        refuse("without autocast, which fms-acceleration asks for beside 4-bit weights")
    if given.kind == "int8":
        refuse("with int8 weights: the functions dequantise 4-bit ones")
    if given.kind == "fp4" or (given.kind == "nf4" and not given.double):
        refuse(f"with {given.kind} weights: the functions dequantise nf4 with double quantisation")
    if given.prepared:
        refuse("after prepare_model_for_kbit_training, whose fp32 hidden states are not modelled with it")
    if not {"query", "key", "value"} <= adapted_layers:
        refuse("unless q_proj, k_proj and v_proj all have adapters")
    if plan.lora.dora:
        refuse("with DoRA, whose norms the functions leave out")
    if {"gate", "up", "down"} <= adapted_layers:
        refuse("with adapters on the whole MLP: backward of its function multiplies shapes that do not match")
