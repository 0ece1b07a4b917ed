"""Which linear layers of torchtitan's models are in fewer than 16 bits, and what is refused of MXFP8 and NVFP4
(``MXFP8LinearConverter``, ``NVFP4LinearConverter``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...device.gpus import GPUS
from ...layers.float8 import MULTIPLE
from ...layers.low_linear import MXFP8, NVFP4, Blocks, LowLinear
from ...layers.module import Module
from ...plan.errors import PlanError
from ...plan.plan import ResolvedPlan
from ...values import dataclass, replace
from . import float8
from .titan import OF_CONVERTER, newest, titan_of_plan

BLOCKS: Mapping[str, Blocks] = {"mxfp8": MXFP8(), "nvfp4": NVFP4()}
"""With a scale for each block."""
ROWS = 128
"""For products in 8 bits each expert's rows are padded to a multiple of this (``mxfp8_quantize_2d_1x32_cutedsl``)."""
HEAD, ROUTER = float8.NEWEST_HEAD, "moe.router.gate"
EXPERTS = "moe.inner_experts"
"""No linear layer; a configuration that converts experts alone names it (``formats/torchtitan/low_precision.py``)."""
CAPABLE = (10, 0)
"""The first GPUs that multiply so (``has_cuda_capability(10, 0)``)."""


@dataclass(frozen=True, slots=True)
class Names:
    """Parts of the names that layers have in torchtitan."""

    parts: tuple[str, ...] = ()
    chosen: bool = False
    """Those with one of ``parts`` are converted, or all if there are none (``fqns``); else they stay
    (``filter_fqns``)."""
    newest: bool = False
    """They are those of the newest code."""

    def stays(self, name: str) -> bool:
        """Whether the layer ``name`` stays in 16 bits."""
        named = any(one in name for one in self.parts)
        return bool(self.parts) and not named if self.chosen else named

    @property
    def keep_head(self) -> bool:
        """The head stays, by its name in the code; a plan may call it as older code does (``filter_fqns``)."""
        if self.chosen or not self.newest:
            return self.stays(HEAD if self.chosen else float8.HEAD)
        return self.stays(HEAD) or float8.HEAD in self.parts

    def staying(self, layer: int, linears: Iterable[tuple[str, str]]) -> frozenset[str]:
        """Those of ``linears`` of layer ``layer``, by their names here, that stay."""
        return frozenset(name for name, full in linears if self.stays(f"layers.{layer}.{full}"))


def low_of(plan: ResolvedPlan) -> LowLinear | None:
    """As a plan has it, of a layer that no name leaves out."""
    blocks = BLOCKS.get(plan.precision.low or "")
    return replace(blocks, rows=plan.fsdp.pad_multiple or 0) if blocks is not None else float8.low_of(plan)


def names_of(plan: ResolvedPlan) -> Names:
    if plan.precision.low in BLOCKS:
        return Names(plan.fsdp.fqns or (), chosen=True)
    return Names(plan.fsdp.words, newest=newest(plan))


def check(plan: ResolvedPlan) -> None:
    """Refuses what has no recipe, or contradicts itself; ``check_sizes`` looks at the layers themselves."""
    given, recipe = plan.fsdp, plan.precision.low
    if recipe is None or recipe not in BLOCKS:
        if given.fqns is not None:
            raise plan.wrong(
                "fsdp.fqns",
                "must be left out without precision.fp8 mxfp8 or precision.fp4 nvfp4; with other float8 "
                "fsdp.filter_fqns names layers that stay",
            )
        float8.check(plan, keep_head=names_of(plan).keep_head)
        _check_experts(plan)
        return
    field = "precision.fp4" if plan.precision.fp4 else "precision.fp8"
    for name in ("filter_fqns", "float8_all_gather", "float8_scales"):
        if getattr(given, name):
            problem = f"must be left out with {recipe}, whose layers fsdp.fqns names"
            raise plan.wrong(f"fsdp.{name}", problem)
    float8.check_code(plan, field)
    gpu = GPUS.get(plan.hardware.gpu or "")
    if gpu is not None and gpu.compute_capability is not None and gpu.compute_capability < CAPABLE:
        raise plan.wrong("hardware.gpu", f"must be of Blackwell or later for {field} {recipe}: torchtitan asks for it")
    plan.refuse(
        ("fsdp.compile", given.compile, f"must be false with {recipe}: no such layers were learnt (--no-compile)"),
        ("layout.tp", plan.layout.tp > 1, f"must be 1 with {recipe}: layers in parts are modelled only in bf16"),
        (
            field,
            not newest(plan),
            "needs torchtitan's newest layers (--fsdp-newest), of Llama, Qwen 3 or DeepSeek V3, in bf16, with "
            "--ends-apart, and with no more shards than experts unless ranks share these (--ep)",
        ),
    )
    head = not names_of(plan).stays(HEAD)
    _check_experts(plan)
    if head and plan.model.tied_embeddings:
        problem = (
            f"must name layers other than {HEAD} with an embedding that shares its weight, with which it is in bf16"
        )
        raise plan.wrong("fsdp.fqns", problem)
    tokens, multiple = plan.batch.mbs * plan.batch.seq // plan.layout.cp, BLOCKS[recipe].multiple
    if head and plan.loss.kind == "chunked":
        tokens //= plan.loss.chunks
    if tokens % multiple:
        what = "a chunk of the loss" if head and plan.loss.kind == "chunked" else "a micro-batch"
        raise plan.wrong("batch.seq", f"must give {what} a multiple of {multiple} tokens for {recipe}, not {tokens:,}")


def _check_experts(plan: ResolvedPlan) -> None:
    """Refuses routers that are converted, and products of experts that kernels do not take."""
    pad, spec, recipe, names = plan.fsdp.pad_multiple, plan.model, plan.precision.low, names_of(plan)
    taken = recipe in BLOCKS or (recipe is not None and not (spec.experts % MULTIPLE or spec.hidden % MULTIPLE))
    routers = [f"layers.{at}.{ROUTER}" for at in range(spec.layers) if taken and spec.has_experts(at)]
    if wrong := next((one for one in routers if not names.stays(one)), ""):
        raise _converted_router(plan, wrong)
    if pad is None:
        return
    rows, multiple = (ROWS, MXFP8.multiple) if recipe == "mxfp8" else (MULTIPLE, MULTIPLE)
    known = recipe == "mxfp8" or recipe in OF_CONVERTER
    plan.refuse(
        (
            "fsdp.pad_multiple",
            not known,
            f"must be left out without precision.fp8 mxfp8 or {' or '.join(OF_CONVERTER)}",
        ),
        ("fsdp.pad_multiple", not spec.experts, f"must be left out: {spec.name} has no experts"),
        ("fsdp.pad_multiple", not newest(plan), "must be left out without torchtitan's newest layers (--fsdp-newest)"),
        ("fsdp.pad_multiple", pad % rows > 0, f"must be a multiple of {rows}: torchao's kernels take no other"),
    )
    for name in ("hidden", "expert_ffn"):
        if (size := getattr(spec, name)) % multiple:
            problem = f"must be a multiple of {multiple} with fsdp.pad_multiple, not {size:,}"
            raise plan.wrong(f"model.{name}", problem)


def _converted_router(plan: ResolvedPlan, name: str) -> PlanError:
    """Of the field that names layers, or of the recipe where nobody named any, and with names that leave the router."""
    low, spec, names = plan.precision, plan.model, names_of(plan)
    if names.chosen:
        dense = not all(map(spec.has_experts, range(spec.layers)))
        others = {"shared_experts": spec.shared_expert_ffn > 0, "feed_forward": dense, HEAD: not spec.tied_embeddings}
        field, flag, verb = "fsdp.fqns", "--fqns", "name layers other than"
        instead = ["attention", *(one for one, there in others.items() if there)]
    else:
        field, flag, verb = "fsdp.filter_fqns", "--filter-fqns", "have a part of"
        instead = [*names.parts, "router.gate"]
    problem = f"{name}: the router is modelled only in fp32 ({flag} {','.join(instead)})"
    if plan.at(field) is not None:
        return plan.wrong(field, f"must {verb} {problem}")
    return plan.wrong("precision.fp4" if low.fp4 else "precision.fp8", f"needs {field}, which must {verb} {problem}")


def parts_without_layer(plan: ResolvedPlan) -> str:
    """What to say of parts of names, in ``fqns`` or ``filter_fqns``, that no layer of the model's code has; or
    nothing."""
    names, spec = names_of(plan), plan.model
    field = "fsdp.fqns" if names.chosen else "fsdp.filter_fqns"
    if plan.precision.low is None or not plan.at(field):
        return ""
    own = list(dict.fromkeys(full for _, full in titan_of_plan(plan).linears))
    routed = [ROUTER, *([EXPERTS] if plan.fsdp.pad_multiple else [])]
    every = [HEAD] if names.chosen else [HEAD, float8.HEAD]
    for at in range(spec.layers):
        every += [f"layers.{at}.{one}" for one in (*own, *(routed if spec.has_experts(at) else ()))]
    unknown = [part for part in names.parts if not any(part in name for name in every)]
    what = f"no linear layer has {' or '.join(unknown)} in its name, which {field} gives: nothing changes by it; "
    return f"{what}layers are called {', '.join((*own, HEAD))}" if unknown else ""


def check_sizes(plan: ResolvedPlan, blocks: Sequence[Module]) -> None:
    """Refuses linear layers of ``blocks``, all of the model, or a head whose features kernels do not take."""
    names, linears, spec = names_of(plan), dict(titan_of_plan(plan).linears), plan.model
    multiple = BLOCKS[plan.precision.low or ""].multiple
    found: dict[str, tuple[int, ...]] = {HEAD: (spec.vocab, spec.hidden)}
    for layer, block in enumerate(blocks):
        for one in block.parameters:
            if own := linears.get(one.name.removesuffix(".weight")):
                found[f"layers.{layer}.{own}"] = one.shape
    if not plan.fsdp.pad_multiple and all(map(names.stays, found)):
        own_names = dict.fromkeys(name.split(".", 2)[-1] for name in found)
        raise plan.wrong("fsdp.fqns", f"must have a part of a linear layer's name: they are {', '.join(own_names)}")
    for name, shape in found.items():
        if any(size % multiple for size in shape) and not names.stays(name):
            features = " and ".join(f"{size:,}" for size in shape[::-1])
            problem = f"must name layers other than {name}, whose {features} features in and out"
            raise plan.wrong("fsdp.fqns", f"{problem} are no multiples of {multiple}")


def assumed(plan: ResolvedPlan) -> str:
    """Which layers, and what is saved."""
    names = plan.fsdp.fqns
    which = f"linear layers whose name has a part of fqns ({', '.join(names)})" if names else "all linear layers"
    kind, saved = {
        "mxfp8": (
            "MXFP8Linear",
            "inputs are saved in bf16, and inputs and weights are cast for every product by one kernel, so that MXFP8 "
            "saves no activations",
        ),
        "nvfp4": (
            "NVFP4Linear",
            "inputs and weights are saved in 4 bits for backward; selective recompute keeps no result of theirs",
        ),
    }[plan.precision.low or ""]
    return (
        f"{which} are torchao's {kind} (of August 2026), without torch.compile: {saved}; weights are gathered in bf16"
    )


def assumed_of_experts(plan: ResolvedPlan) -> str:
    """Which precision products of experts have, and of how many rows."""
    if (pad := plan.fsdp.pad_multiple) is None:
        return "products of experts stay in bf16, and the router in fp32"
    kind = "MXFP8" if plan.precision.low == "mxfp8" else "float8 with a scale for each row"
    return (
        f"products of experts are in {kind}, as torchao has them in August 2026, of rows with padding: {pad} more for "
        "each expert, whatever the routing; every expert gets as many rows as any other"
    )
