"""A plan as Megatron-Core runs it where it is installed: the user's own, estimated as it is."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from ...layers.megatron_core.local import softmax_is_fused
from ...plan.errors import LackingError, PlanError
from ...plan.plan import ResolvedPlan
from ...plan.resolve import resolve
from ...records.readings import World
from ...trace.framework import OtherRunning
from ...trace.run import check_packages, installed
from ...validate.native import Native, OwnCode, Runner
from ...values import dataclass
from .. import framework

CODE = "megatron"
PACKAGES = {"torch": (2, 6), "megatron-core": (0, 16)}
"""Oldest releases that run."""
WITHOUT_APEX = "apex is not installed: norms of local layers are PyTorch's; the estimate is for apex's"
WITHOUT_EITHER = (
    "neither Transformer Engine nor apex is installed: the step is torch.optim's, and so it is estimated "
    "(optimizer.implementation = foreach)"
)
OTHER_ENGINE = "Transformer Engine {} is installed and estimated, where the plan says {}"
COMPILED = (
    "what Megatron-Core compiles (torch.compile) runs operator by operator while an iteration is followed: categories "
    "and the first place apart are of that; allocated and reserved bytes are of an iteration that is not followed"
)
ALONE = "what other ranks would have sent is zeros: losses mean nothing"
ON_CPU = (
    "torch.cuda.current_device is the CPU, and device='cuda' means it; synchronize does nothing",
    "random states of tensor-parallel regions are the host's (CudaRNGStatesTracker on torch.get_rng_state)",
    "Tensor.type() names CUDA's types, which optimizers tell parameters by; Tensor.cuda() does nothing",
    "DistributedDataParallel is made on no stream of its own",
    "dropout is native_dropout, and a bias on a strided input is added in place, as on CUDA",
    "gloo's threads let go of what was sent when they come to it, in whatever module that is",
    "torch.compile is off; single numbers that Megatron-Core keeps on the host do not count",
)
RMSNORM_ON_CPU = "RMSNorm on a CPU is several operators, which save more than CUDA's kernel, for which the estimate is"
ENGINE = "transformer_engine"
FROM_ENGINE = "Transformer Engine (pip install 'transformer-engine[pytorch]', with CUDA)"
FROM_APEX = "apex, built with its CUDA extensions (github.com/NVIDIA/apex)"
FUSIONS = ("gradient_accumulation_fusion", "bias_dropout_fusion")
"""Of local layers, kernels or compiled functions that only CUDA has."""


@dataclass(frozen=True, slots=True)
class MegatronCore(Native):
    """Which ranks there are, and which of them differ."""

    @property
    def ranks(self) -> int:
        layout = self.runs.layout
        return layout.tp * layout.cp * layout.pp * (layout.dp or 1)

    def distinct(self) -> tuple[int, ...]:
        """The first rank of each stage: of the distributed optimizer's shards it has as much as any, to a rounding."""
        return tuple(range(0, self.ranks, self.ranks // self.stages))

    def check_device(self, device: str) -> None:
        if device == "fake":
            raise PlanError(
                "", "fake", "must be cuda or cpu with --with megatron: on fake tensors Megatron-Core does not run"
            )
        if device == "cpu":
            _check_cpu(self.runs)
        else:
            _check_kernels(self.runs)

    def check_packages(self) -> None:
        check_packages(PACKAGES, "memplan validate --with megatron")

    @property
    def packages(self) -> tuple[str, ...]:
        return ("megatron-core", "transformer-engine", "apex")

    def notes(self, world: World, device: str) -> tuple[str, ...]:
        """What is not as it is on the machine that the estimate is for."""
        plan, found = self.runs, list[str]()
        engine = plan.megatron.transformer_engine
        if engine != self.given.megatron.transformer_engine:
            found.append(OTHER_ENGINE.format(engine, self.given.megatron.transformer_engine))
        if find_spec("apex") is None and plan.megatron.transformer_impl == "local":
            found.append(WITHOUT_APEX)
        if plan.optimizer.implementation == "foreach":
            found.append(WITHOUT_EITHER)
        if device == "cuda":
            found.append(COMPILED)
        if world == "emulated":
            found.append(ALONE)
        if device == "cpu":
            found += [RMSNORM_ON_CPU] * (plan.model.norm == "rmsnorm")
            found += ON_CPU
        return tuple(found)


def megatron_core(plan: ResolvedPlan) -> MegatronCore:
    """What runs for ``plan``, with the Transformer Engine that is here. ``PlanError`` where it is of another
    framework, or one that is not run."""
    given = resolve(plan)
    given.refuse(
        (
            "framework",
            framework(given.framework).measured_code != CODE,
            "must be megatron: Megatron-Core runs plans of its own (--with torch runs others)",
        ),
        ("model.family", given.model.family == "bert", "must be a GPT: BERT's batches and losses are not run yet"),
        ("lora.rank", given.lora.rank is not None, "must be left out: Megatron-Bridge's adapters are not run yet"),
        (
            "megatron.optimizer_offload",
            given.megatron.optimizer_offload,
            "must be 0: states on the host are not run yet",
        ),
        (
            "megatron.offload_modules",
            given.megatron.offload_modules is not None,
            "must be left out: activations on the host are not run yet",
        ),
        ("megatron.offload_layers", given.megatron.offload_layers, "must be 0: layers on the host are not run yet"),
        (
            "megatron.buckets",
            given.megatron.buckets is not None,
            "must be left out: give megatron.bucket_size instead",
        ),
        ("megatron.cuda_graphs", given.megatron.cuda_graphs != "none", "must be none: graphs are not run yet"),
        ("megatron.fsdp", given.megatron.fsdp != "none", "must be none: Megatron-FSDP is not run yet"),
    )
    if given.model.experts or given.model.latent_kv_rank or given.model.mtp_layers:
        raise PlanError(
            "model", given.model.name, "has experts, latent attention or multi-token prediction, which are not run yet"
        )
    if given.model.layer_blocks:
        raise PlanError("model", given.model.name, "has layers that differ in size, which are not run yet")
    if given.megatron.precision_of is not None:
        raise given.wrong(
            "megatron.precision_of", "must be left out: precision that differs from module to module is not run yet"
        )
    engine = installed("transformer-engine")
    if engine is None:
        return MegatronCore(given, given if find_spec("apex") is not None else stepped_by_torch(given))
    release = ".".join(engine.split("+")[0].split(".")[:2])
    megatron = given.megatron.model_copy(update={"transformer_engine": release})
    return MegatronCore(given, resolve(given.model_copy(update={"megatron": megatron})))


def stepped_by_torch(plan: ResolvedPlan) -> ResolvedPlan:
    """With ``torch.optim``'s step in place of a fused one (``megatron/core/optimizer/__init__.py``)."""
    if plan.optimizer.implementation is None or plan.megatron.transformer_impl != "local":
        return plan  # without Transformer Engine its layers do not run at all
    optimizer = plan.optimizer.model_copy(update={"implementation": "foreach"})
    return resolve(plan.model_copy(update={"optimizer": optimizer}))


def _check_cpu(plan: ResolvedPlan) -> None:
    """In one line everything that has kernels on CUDA alone."""
    wrong = [f"{name} {value} (must be {needed})" for name, value, needed in _only_on_cuda(plan)]
    if wrong:
        raise plan.wrong("framework", f"cannot run on a CPU, where Megatron-Core has no kernels for {', '.join(wrong)}")


def _only_on_cuda(plan: ResolvedPlan) -> Iterator[tuple[str, object, object]]:
    megatron, layout = plan.megatron, plan.layout
    if megatron.transformer_impl != "local":
        yield "megatron.transformer_impl", megatron.transformer_impl, "local"
    activation = "bias_swiglu_fusion" if plan.model.activation == "swiglu" else "bias_gelu_fusion"
    rope = ("rope_fusion",) if plan.model.positions == "rotary" else ()
    for name in (*FUSIONS, activation, *rope):
        if getattr(megatron, name):
            yield f"megatron.{name}", "true", "false"
    if _fuses_softmax(plan):
        yield "megatron.masked_softmax_fusion", "true", "false"
    if megatron.cross_entropy_fusion != "none":
        yield "megatron.cross_entropy_fusion", megatron.cross_entropy_fusion, "none"
    if layout.sequence_parallel:
        yield "layout.sequence_parallel", "true", "false"
    if layout.cp > 1:
        yield "layout.cp", layout.cp, 1
    if megatron.distributed_optimizer_instances > 1:
        yield "megatron.distributed_optimizer_instances", megatron.distributed_optimizer_instances, 1


def _fuses_softmax(plan: ResolvedPlan) -> bool:
    spec, seq = plan.model, plan.batch.seq
    wants = plan.megatron.masked_softmax_fusion and plan.megatron.transformer_impl == "local"
    heads = spec.heads // plan.layout.tp
    return wants and softmax_is_fused(plan.batch.mbs, seq, heads, spec.causal, plan.precision.dtype)


def _check_kernels(plan: ResolvedPlan) -> None:
    """What Megatron-Core itself would ask for in the middle of a run."""
    if plan.megatron.transformer_impl == "transformer_engine" and find_spec(ENGINE) is None:
        raise LackingError(f"the plan's layers need {FROM_ENGINE}; megatron.transformer_impl: local needs none")
    if plan.megatron.deterministic:
        raise plan.wrong(
            "megatron.deterministic",
            "must be false: a validation does not switch PyTorch to deterministic algorithms, as the mode would",
        )
    for what, where, module in _kernels(plan):
        if find_spec(module) is None:
            raise LackingError(f"{what} needs {where}, or the plan without it")
    if plan.optimizer.precision_aware and find_spec(ENGINE) is None:
        raise LackingError(f"optimizer.precision_aware needs {FROM_ENGINE}")


def _kernels(plan: ResolvedPlan) -> Iterator[tuple[str, str, str]]:
    """A choice of the plan, what it needs, and the module by which that is known."""
    megatron, layout, spec = plan.megatron, plan.layout, plan.model
    if megatron.gradient_accumulation_fusion:
        yield "megatron.gradient_accumulation_fusion", FROM_APEX, "fused_weight_gradient_mlp_cuda"
    if _fuses_softmax(plan):
        yield "megatron.masked_softmax_fusion", FROM_APEX, "scaled_upper_triang_masked_softmax_cuda"
    if megatron.transformer_impl == "local" and layout.sequence_parallel:
        yield "layout.sequence_parallel with local layers", FROM_APEX, "apex"
    if megatron.rope_fusion and spec.positions == "rotary":
        yield "megatron.rope_fusion", FROM_ENGINE, ENGINE
    if megatron.cross_entropy_fusion == "te":
        yield "megatron.cross_entropy_fusion: te", FROM_ENGINE, ENGINE


class MegatronCode(OwnCode):
    """Megatron-Core, as its launch scripts start it."""

    title = "Megatron-Core's code"

    def planned(self, plan: ResolvedPlan) -> Native:
        return megatron_core(plan)

    def layout(self, plan: ResolvedPlan) -> Native:
        return MegatronCore(plan, plan)

    def runner(self) -> Runner:
        from . import core_followed

        return core_followed


class MegatronRunning(OtherRunning):
    @property
    def own_code(self) -> OwnCode:
        return MegatronCode()
