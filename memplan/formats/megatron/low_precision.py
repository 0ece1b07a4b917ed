"""Megatron-LM's arguments of fp8 and fp4, and the plan's fields that they are, both ways
(``transformer_config.py``; ``megatron/training/arguments.py``, ``_add_mixed_precision_args``)."""

from __future__ import annotations

from collections.abc import Sequence

from ...plan.errors import Node
from ...plan.plan import Plan
from ..settings import Reader, Row, elsewhere, switch
from . import module_precision
from .sharding import TORCH, runs_torch

FP8, FP4 = "--fp8-format", "--fp4-format"
RECIPE, RECIPE_FP4 = "--fp8-recipe", "--fp4-recipe"
PARAMETERS, PARAMETERS_FP4 = "--fp8-param-gather", "--fp4-param-gather"
ENDS, START, END = "--first-last-layers-bf16", "--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16"
PADDING, PADDING_OLD = "--moe-router-padding-for-quantization", "--moe-router-padding-for-fp8"
REUSED = "--reuse-grad-buf-for-mxfp8-param-ag"

WIDE_WEIGHT_GRADIENTS = "--no-fp8-wgrad"
AWARE = "--use-precision-aware-optimizer"

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


def without_low(reader: Reader) -> str:
    has = reader.settings.has
    return "" if has(FP8) or has(FP4) else f"no effect without {FP8} or {FP4}"


def without_fp8(reader: Reader) -> str:
    return "" if reader.settings.has(FP8) else f"no effect without {FP8}"


def in_fp8(plan: Plan) -> bool:
    return plan.precision.fp8 is not None


def in_fp4(plan: Plan) -> bool:
    return plan.precision.fp4 is not None


def _recipe(reader: Reader) -> None:
    settings, put = reader.settings, reader.building.put
    if settings.has(WIDE_WEIGHT_GRADIENTS):
        reader.building.because(
            WIDE_WEIGHT_GRADIENTS, "Transformer Engine 2 has no such choice (override_linear_precision), and reads none"
        )
    node = settings.word(RECIPE) or Node("delayed", settings.where(FP8))
    if node.value not in RECIPES:
        raise node.wrong(RECIPE, f"is not modelled yet; {', '.join(RECIPES)} are", known=RECIPES)
    put("precision.fp8", node, FP8, RECIPE)
    put("precision.fp8_format", settings.word(FP8), FP8)


def _told(reader: Reader) -> None:
    """Without products in 8 bits the optimizer alone is told (``OptimizerConfig.fp8_recipe``)."""
    node = reader.settings.word(RECIPE)
    if node is not None and not reader.settings.has(FP8):
        reader.building.put("optimizer.fp8_recipe", node, RECIPE)


def _told_nobody(reader: Reader) -> str:
    return "" if reader.settings.has(AWARE) else without_fp8(reader)


def _fp4(reader: Reader) -> None:
    settings = reader.settings
    if not settings.has(FP4):
        return
    node = settings.word(RECIPE_FP4) or Node("nvfp4", settings.where(FP4))
    if node.value != "nvfp4":
        raise node.wrong(RECIPE_FP4, "is not modelled yet; nvfp4 is")
    reader.building.put("precision.fp4", node, FP4, RECIPE_FP4)


def _parameters(reader: Reader) -> None:
    """Parameters that are stored in 8 or 4 bits; in MXFP8 their gradients' buffer receives them."""
    names = (PARAMETERS, PARAMETERS_FP4)
    stored = any(map(reader.settings.has, names))
    where = reader.settings.where(*names)
    if stored and runs_torch(reader):
        reader.building.because(names, f"Megatron-LM turns it off with {TORCH}")
        return
    reader.building.put("precision.fp8_parameters", Node(stored, where), *names)
    if reader.settings.has(REUSED):
        reader.building.because(REUSED, "MXFP8 parameters are received in the gradients' buffer, as they have to be")


def _ends(reader: Reader) -> None:
    settings = reader.settings
    if not settings.has(ENDS):
        reader.building.because((START, END), f"no effect without {ENDS}")
        return
    for name, field in ((START, "first"), (END, "last")):
        count = settings.integer(name) or Node(1, settings.where(ENDS))
        reader.building.put(f"precision.{field}_16bit_layers", count, ENDS, name)


def _padding(reader: Reader) -> None:
    names = (PADDING, PADDING_OLD)
    reader.building.put("experts.router_padding", Node(True, reader.settings.where(*names)), *names)


def _padded(reader: Reader) -> str:
    return without_low(reader) or ("" if any(map(reader.settings.has, (PADDING, PADDING_OLD))) else "not given")


def _has_ends(plan: Plan) -> bool:
    return bool(plan.precision.first_16bit_layers or plan.precision.last_16bit_layers)


ROWS: Sequence[Row] = (
    Row(FP8, "precision.fp8_format", "PRECISION", "word", read=_recipe, without_effect=without_fp8, when=in_fp8),
    Row(
        RECIPE, "precision.fp8", "PRECISION", "word", read=_told, without_effect=_told_nobody,
        value=lambda plan: plan.precision.fp8 or plan.optimizer.fp8_recipe,
        when=lambda plan: in_fp8(plan) or plan.optimizer.fp8_recipe is not None,
    ),
    Row(
        FP4, "precision.fp4", "PRECISION", "word", read=_fp4, when=in_fp4, value=lambda plan: "e2m1"
    ),
    Row(RECIPE_FP4, "precision.fp4", "PRECISION", "word", read=elsewhere, without_effect=without_low, when=in_fp4),
    switch(
        PARAMETERS, "precision.fp8_parameters", "PRECISION", read=_parameters, without_effect=without_low, when=in_fp8
    ),
    switch(
        PARAMETERS_FP4, "precision.fp8_parameters", "PRECISION", read=elsewhere, without_effect=without_low, when=in_fp4
    ),
    switch(
        REUSED, "precision.fp8_parameters", "PRECISION", read=elsewhere,
        when=lambda plan: plan.precision.fp8 == "mxfp8" and plan.precision.fp8_parameters,
    ),
    switch(
        ENDS, "precision.first_16bit_layers", "PRECISION", read=_ends, without_effect=without_low, value=_has_ends,
        when=_has_ends,
    ),
    Row(START, "precision.first_16bit_layers", "PRECISION", read=elsewhere, when=_has_ends),
    Row(END, "precision.last_16bit_layers", "PRECISION", read=elsewhere, when=_has_ends),
    Row(
        "--fp8-amax-history-len", "precision.amax_history", "PRECISION", default=1, least=1, without_effect=without_fp8,
        when=lambda plan: plan.precision.fp8 == "delayed",
    ),
    switch(
        PADDING, "experts.router_padding", "EXPERTS", read=_padding, without_effect=_padded,
        when=lambda plan: plan.experts.router_padding,
    ),
    switch(PADDING_OLD, "experts.router_padding", "", read=elsewhere),
    switch("--fp8-dot-product-attention", "megatron.fp8_attention", without_effect=without_low),  # of no parser
    switch("--fp8-output-proj", "megatron.fp8_output", "PRECISION", without_effect=without_fp8),
    *module_precision.ROWS,
)  # fmt: skip
