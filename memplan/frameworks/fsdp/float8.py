"""torchao's float8 in torchtitan's models (``Float8Converter``): which linear layers, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...device.gpus import GPUS
from ...layers import compiled
from ...layers.float8 import MULTIPLE, Float8
from ...layers.low_linear import LowLinear
from ...layers.module import hold_bytes
from ...plan.framework_sections import SMALL
from ...plan.plan import ResolvedPlan
from ...plan.spec import ModelSpec
from ...tape.events import Category, Hold
from .titan import titan_of_plan
from .units import Unit

HEAD, NEWEST_HEAD = "output", "lm_head"
"""The head's name, and that of the newest code."""
CAPABLE = (8, 9)
"""The first GPUs that multiply in 8 bits (``has_cuda_capability(8, 9)``)."""


def low_of(plan: ResolvedPlan) -> Float8 | None:
    """As a plan has it, of a layer that no filter names."""
    given, recipe = plan.fsdp, plan.precision.fp8
    if recipe is None:
        return None
    shards = plan.layout.dp > given.replicas  # ``dp_shard_enabled``
    gathered = given.float8_all_gather and shards
    return Float8(recipe, auto=given.filters_small, gathered=gathered, rows=given.pad_multiple or 0)


def scales(units: Sequence[Unit], *, precomputed: bool) -> tuple[Hold, ...]:
    """Of weights that are gathered in 8 bits, which stay with them until they are gathered anew: one each, or a tensor
    of all that a step has left, and the one before it (``precompute_float8_dynamic_scale_for_fsdp``)."""
    count = sum(parameter.gathered is not None for unit in units for parameter in unit.parameters)
    if not count:
        return ()
    shape = (count,) if precomputed else ()
    one = Hold(0, hold_bytes(shape, "fp32"), Category.BUFFERS, "float8_scales", shape, "fp32")
    return (one,) * (2 if precomputed else count)


def check(plan: ResolvedPlan, *, keep_head: bool) -> None:
    """Refuses what has no recipe, or contradicts itself."""
    given, recipe = plan.fsdp, plan.precision.fp8
    if recipe is None:
        for field in ("filter_fqns", "float8_all_gather", "float8_scales"):
            if getattr(given, field):
                raise plan.wrong(f"fsdp.{field}", "must be left out without precision.fp8")
        return
    check_code(plan, "precision.fp8")
    _check_recipe(plan, recipe, keep_head=keep_head)
    if given.float8_scales and not given.float8_all_gather:
        raise plan.wrong("fsdp.float8_scales", "must be false without fsdp.float8_all_gather, whose scales they are")
    if not given.float8_all_gather:
        return
    problems = {
        "with tensorwise scaling only: torchao gathers no other": recipe != "tensorwise",
        "left out with fsdp.offload: that combination is not modelled": given.offload,
        "left out with pipeline stages: that combination is not modelled": plan.layout.pp > 1,
    }
    if problem := next((one for one, wrong in problems.items() if wrong), ""):
        raise plan.wrong("fsdp.float8_all_gather", f"must be {problem}")


def check_code(plan: ResolvedPlan, field: str) -> None:
    """Refuses other code than torchtitan's, and what its converters do not have."""
    if plan.fsdp.code != "torchtitan":
        raise plan.wrong(field, "needs torchtitan's layers (--fsdp-code torchtitan): no other float8 is modelled")
    for name in ("fp8_parameters", "first_16bit_layers", "last_16bit_layers"):
        if getattr(plan.precision, name):
            raise plan.wrong(f"precision.{name}", "must be left out with framework fsdp, whose torchao has none")


def _check_recipe(plan: ResolvedPlan, recipe: str, *, keep_head: bool) -> None:
    titan, precision, layout = titan_of_plan(plan), plan.precision, plan.layout
    if not titan.linears:
        raise plan.wrong(
            "precision.fp8",
            f"must be left out with torchtitan's {titan.name}: float8 is modelled in layers without experts, and "
            "with them by rows in the newest ones of Qwen 3 and DeepSeek V3 (--fsdp-newest)",
        )
    gpu = GPUS.get(plan.hardware.gpu or "")
    if gpu is not None and gpu.compute_capability is not None and gpu.compute_capability < CAPABLE:
        raise plan.wrong(
            "hardware.gpu", f"must have products in 8 bits for precision.fp8 {recipe}: it needs compute capability 8.9"
        )
    tokens = plan.batch.mbs * plan.batch.seq
    if not keep_head:
        chunked = plan.loss.kind == "chunked"
        tokens //= plan.loss.chunks if chunked else 1
        gathered = chunked and plan.fsdp.float8_all_gather
        if plan.model.tied_embeddings or gathered:
            what = "a head that is gathered in 8 bits for chunks" if gathered else "an embedding that shares its weight"
            raise plan.wrong("fsdp.filter_fqns", f"must have {HEAD} with {what}: the head is modelled in bf16 there")
    problems = {
        "left out with tensor parallelism: torchtitan's Float8ColwiseParallel is not modelled (a file's own "
        "model.converters=, in Python model_spec.converters=, with --set estimates bf16)": layout.tp > 1,
        "left out unless precision.dtype is bf16": precision.dtype != "bf16",
        f"another with {SMALL}, which torchao has for tensorwise and rowwise": (
            plan.fsdp.filters_small and recipe == "rowwise_with_gw_hp"
        ),
        f"rowwise_with_gw_hp, or left out, unless a micro-batch, or a chunk of the loss, has a multiple of {MULTIPLE} "
        f"tokens, not {tokens:,}": (tokens % MULTIPLE > 0 and recipe != "rowwise_with_gw_hp"),
    }
    if problem := next((one for one, wrong in problems.items() if wrong), ""):
        raise plan.wrong("precision.fp8", f"must be {problem}")


def in_compiled(low: LowLinear | None, spec: ModelSpec) -> Float8 | None:
    """The same of a layer that is compiled: the layers that stay, whatever lets them, by their names."""
    if not isinstance(low, Float8):
        return None
    sizes = {name.removesuffix(".weight"): size for name, size in compiled.parameters_of(spec) if len(size) > 1}
    stay = frozenset(name for name, (n, k) in sizes.items() if not low.takes(name, n, k))
    return None if len(stay) == len(sizes) else replace(low, skips=stay, auto=False)


def check_compiled(plan: ResolvedPlan, every: Sequence[Float8 | None]) -> None:
    """Refuses layers that were not learnt; ``every``: what of each one is in 8 bits."""
    spec, batch = plan.model, plan.batch
    sizes = compiled.Sizes(batch.mbs, batch.seq, spec.heads, spec.kv_heads, spec.head_dim, spec.ffn)
    for low in set(every) - {None}:
        if low is None or (not low.skips - compiled.SKIPS and len(low.skips) in (0, len(compiled.SKIPS))):
            if compiled.name_of("none", sizes, low) in compiled.structures():
                continue
            kind = " ".join(compiled.name_of("none", sizes, low).split()[2:])
            raise plan.wrong(
                "precision.fp8",
                f"must be left out or another with fsdp.compile: layers of these sizes were not learnt ({kind})",
            )
        raise plan.wrong(
            "fsdp.filter_fqns",
            "must leave out no linear layer of a layer, attention.wk and attention.wv together, or all with "
            f"fsdp.compile, not {', '.join(sorted(low.skips))}: others were not learnt",
        )
