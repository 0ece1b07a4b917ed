"""Which optimizer there is where, and which of its fields belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from .errors import PlanError
from .plan import Optimizer, Plan

IMPLEMENTATIONS: Mapping[str, tuple[str | None, ...]] = MappingProxyType(
    {
        "sgd": ("foreach", "for-loop", "fused"),
        "adam": ("foreach", "for-loop", "fused", "apex", "bitsandbytes"),
        "adamw": ("foreach", "for-loop", "fused", "apex", "bitsandbytes"),
        "adam8bit": (None,),
        "adafactor": ("transformers", "for-loop", "foreach"),
        "lion": ("bitsandbytes",),
        "lion8bit": (None,),
        "muon": ("foreach", "for-loop", "fused"),
    }
)
"""Implementations of each optimizer, the default first; Muon's is that of the AdamW beside it."""

SHARDED_OPTIMIZERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "megatron-deepspeed": ("sgd", "adam", "adamw", "adam8bit"),
        "deepspeed": ("sgd", "adam", "adamw", "adam8bit", "adafactor", "lion", "lion8bit"),
        "fsdp": ("sgd", "adam", "adamw"),
    }
)
"""Optimizers that are modelled where a framework cuts or flattens the parameters that they see."""

_NO_KERNEL = "bitsandbytes' kernels take no DTensor"
WHY_NOT: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("fsdp", "adafactor"): "PyTorch's and transformers' Adafactor both fail on DTensor shards",
        ("fsdp", "adam8bit"): _NO_KERNEL,
        ("fsdp", "lion"): _NO_KERNEL,
        ("fsdp", "lion8bit"): _NO_KERNEL,
        ("fsdp", "muon"): "it runs on DTensor shards, but what its products gather is not modelled",
        ("deepspeed", "muon"): "DeepSpeed's own Muon takes whole matrices out of ZeRO's buckets, which is not modelled",
    }
)
"""Why an optimizer is not among those of a framework."""

WHOLE = ("single", "ddp", "device-map")
"""Frameworks whose optimizer sees whole parameters."""

EIGHT_BIT = ("adam8bit", "lion8bit")


def check_optimizer(plan: Plan) -> None:
    """Which implementation there is of which optimizer, where."""
    optimizer = plan.optimizer
    _check_momentum(plan)
    if plan.framework == "megatron":
        _check_megatron_optimizer(plan)
        return
    for name in ("precision_aware", "main_parameters", "exp_avg", "exp_avg_sq"):
        if getattr(optimizer, name) != Optimizer.model_fields[name].default:
            problem = f"must be left out with framework {plan.framework}; megatron has a precision-aware optimizer"
            raise PlanError(f"optimizer.{name}", getattr(optimizer, name), problem)
    check_sharded(optimizer.name, plan.framework)
    _check_implementation(plan)
    _check_bitsandbytes(plan)


def check_sharded(name: str, framework: str) -> None:
    """Refuses what does not run, or is not modelled, on pieces of parameters."""
    known = SHARDED_OPTIMIZERS.get(framework)
    if known is not None and name not in known:
        why = WHY_NOT.get((framework, name), f"{', '.join(WHOLE)} have the others")
        raise PlanError("optimizer.name", name, f"must be one of {', '.join(known)} with framework {framework}: {why}")


def _check_momentum(plan: Plan) -> None:
    """Fields that one optimizer alone has, or that Megatron-Core sets by itself."""
    optimizer = plan.optimizer
    for name in ("momentum", "weight_decay", "paged"):
        value = getattr(optimizer, name)
        if plan.framework == "megatron" and value != Optimizer.model_fields[name].default:
            problem = "must be left out with framework megatron, whose step it does not change"
            raise PlanError(f"optimizer.{name}", value, problem)
    if optimizer.momentum and optimizer.name != "sgd":
        problem = f"must be left out: it is SGD's, and optimizer.name is {optimizer.name}"
        raise PlanError("optimizer.momentum", optimizer.momentum, problem)


def _check_implementation(plan: Plan) -> None:
    name, value = plan.optimizer.name, plan.optimizer.implementation
    field = "optimizer.implementation"
    known = [one for one in IMPLEMENTATIONS[name] if one is not None]
    if value is not None and not known:
        raise PlanError(field, value, f"must be left out: {name} has one implementation, bitsandbytes'")
    if plan.framework != "megatron-deepspeed" and "apex" in known:
        known.remove("apex")
    if plan.framework not in WHOLE and "bitsandbytes" in known:
        known.remove("bitsandbytes")
    if plan.framework == "fsdp" and name == "sgd" and value == "fused":
        raise PlanError(field, value, "must be foreach or for-loop: PyTorch's fused SGD takes no DTensor")
    if plan.framework == "deepspeed" and name == "lion" and value is not None:
        raise PlanError(field, value, "must be left out for DeepSpeed's own FusedLion; single and ddp have others")
    if plan.framework == "deepspeed" and name in ("adam", "adamw") and value == "fused":
        problem = "must be left out for DeepSpeed's own FusedAdam, or be foreach or for-loop for PyTorch's (torch_adam)"
        raise PlanError(field, value, problem)
    if value is not None and value not in known:
        problem = f"must be {_either(known)} for {name} with framework {plan.framework}"
        raise PlanError(field, value, problem)


BLOCK_SIZES = (256, 2048)
"""Elements per scale (``bitsandbytes/optim/optimizer.py``, ``init_state``)."""


def _check_bitsandbytes(plan: Plan) -> None:
    """Fields of bitsandbytes' optimizers."""
    optimizer = plan.optimizer
    if optimizer.paged and plan.framework not in WHOLE:
        problem = f"must be false with framework {plan.framework}; {', '.join(WHOLE)} have paged optimizers"
        raise PlanError("optimizer.paged", True, problem)
    if optimizer.name in EIGHT_BIT:
        if optimizer.block_size not in (None, *BLOCK_SIZES):
            problem = f"must be {' or '.join(map(str, BLOCK_SIZES))}: bitsandbytes' since 0.44, and before"
            raise PlanError("optimizer.block_size", optimizer.block_size, problem)
        return
    if optimizer.paged and optimizer.implementation != "bitsandbytes":
        problem = f"must be false: {optimizer.name} is not bitsandbytes'; --optimizer-implementation bitsandbytes is"
        raise PlanError("optimizer.paged", True, problem)
    problem = f"must be left out: {optimizer.name} has no 8-bit states; {' and '.join(EIGHT_BIT)} have"
    if optimizer.block_size is not None:
        raise PlanError("optimizer.block_size", optimizer.block_size, problem)
    if not optimizer.embeddings_32bit:
        raise PlanError("optimizer.embeddings_32bit", False, problem)


def _check_megatron_optimizer(plan: Plan) -> None:
    """Transformer Engine's (or apex') FusedAdam, with the distributed optimizer in dtypes of choice."""
    optimizer = plan.optimizer
    if optimizer.name not in ("adam", "adamw", "sgd"):
        raise PlanError("optimizer.name", optimizer.name, "must be adam, adamw or sgd with framework megatron")
    if optimizer.implementation not in ("apex", None):
        problem = "must be apex with framework megatron: FusedAdam or FusedSGD of Transformer Engine or apex"
        raise PlanError("optimizer.implementation", optimizer.implementation, problem)
    if optimizer.block_size is not None:
        raise PlanError("optimizer.block_size", optimizer.block_size, "must be left out: there are no 8-bit states")
    if not optimizer.embeddings_32bit:
        raise PlanError("optimizer.embeddings_32bit", False, "must be left out: there are no 8-bit states")
    if optimizer.name == "sgd" and plan.layout.zero == 1:
        problem = "must be adam or adamw with the distributed optimizer (zero: 1), which Megatron-Core has for them"
        raise PlanError("optimizer.name", "sgd", problem)
    if optimizer.precision_aware:
        _check_state_dtypes(plan)
        if plan.layout.zero != 1:
            problem = "must be false without the distributed optimizer (zero: 1)"
            raise PlanError("optimizer.precision_aware", True, problem)
        if optimizer.name == "sgd":
            raise PlanError("optimizer.precision_aware", True, "must be false with sgd: FusedAdam has it")
        return
    for name in ("main_parameters", "exp_avg", "exp_avg_sq"):
        if getattr(optimizer, name) != "fp32":
            problem = "must be fp32 unless optimizer.precision_aware is true"
            raise PlanError(f"optimizer.{name}", getattr(optimizer, name), problem)


def _either(names: Sequence[str]) -> str:
    """``a, b or c``."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _check_state_dtypes(plan: Plan) -> None:
    """What FusedAdam keeps states in (``fused_adam.py``, ``__init__``)."""
    optimizer, te = plan.optimizer, tuple(int(part) for part in plan.megatron.transformer_engine.split(".")[:2])
    if plan.precision.dtype == "fp32":
        problem = "must be false with fp32 parameters, whose states are not modelled"
        raise PlanError("optimizer.precision_aware", True, problem)
    if optimizer.main_parameters not in ("fp32", "fp16"):
        raise PlanError("optimizer.main_parameters", optimizer.main_parameters, "must be fp32 or fp16")
    for name in ("exp_avg", "exp_avg_sq"):
        if getattr(optimizer, name) == "bf16" and te < (2, 3):
            raise PlanError(f"optimizer.{name}", "bf16", "must be fp32, fp16 or fp8 before Transformer Engine 2.3")
