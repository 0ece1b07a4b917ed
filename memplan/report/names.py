"""Stages, ranks and modules in few characters: ``1–30``, ``embedding, layers 0–2``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise

from ..plan.plan import Plan

DASH = "–"
_NUMBERED = re.compile(r"(.+)\.(\d+)")


def kind_of(module: str) -> str:
    """The module without its number: ``layer`` of ``layer.12``; other names as they are."""
    match = _NUMBERED.fullmatch(module)
    return match[1] if match else module


def span(first: int | str, last: int | str) -> str:
    """``3–7``, or ``3`` where both ends are the same."""
    return f"{first}" if first == last else f"{first}{DASH}{last}"


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The stretches of consecutive ``numbers``, each as its first and last."""
    for _, pairs in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in pairs]
        yield members[0], members[-1]


def modules_text(modules: Sequence[str]) -> str:
    """``embedding, layer.0, layer.1, layer.2`` as ``embedding, layers 0–2``, in the stage's order."""
    parts = []
    for (kind, numbered), members in groupby(modules, key=lambda name: (kind_of(name), kind_of(name) != name)):
        if not numbered:
            count = len(list(members))
            parts.append(kind if count == 1 else f"{count} × {kind}")
            continue
        runs = list(_runs(int(name.rpartition(".")[2]) for name in members))
        several = len(runs) > 1 or runs[0][0] != runs[0][1]
        parts.append(f"{kind}{'s' * several} " + ", ".join(_shortened(runs)))
    return ", ".join(parts)


def in_order(modules: Sequence[str]) -> list[str]:
    """``modules`` with neighbours of one kind in the order of their numbers: those of several virtual stages."""
    result: list[str] = []
    for _, members in groupby(modules, key=lambda name: (kind_of(name), kind_of(name) != name)):
        result += sorted(members, key=lambda name: int(name.rpartition(".")[2]) if kind_of(name) != name else 0)
    return result


def numbers_text(numbers: Iterable[int]) -> str:
    """``0, 2–5`` of ascending ``numbers``."""
    return ", ".join(span(*run) for run in _runs(numbers))


def _shortened(runs: Sequence[tuple[int, int]]) -> list[str]:
    """``15, 31, …, 111`` where more than three stretches are equal and equally far apart, as virtual stages are."""
    texts = [span(*run) for run in runs]
    steps = {(later[0] - run[0], later[1] - run[1]) for run, later in pairwise(runs)}
    return texts if len(runs) <= 3 or len(steps) > 1 else [*texts[:2], "…", texts[-1]]


def ranks_text(ranks: Sequence[int]) -> str:
    """``4–7`` where the ranks are consecutive, else how many they are: ``×16``."""
    runs = list(_runs(sorted(ranks)))
    return span(*runs[0]) if len(runs) == 1 else f"×{len(ranks)}"


def stage_word(plan: Plan) -> str:
    """What a row of the table is: a pipeline stage, or a device of a device map."""
    return "device" if plan.framework == "device-map" else "stage"


def plan_text(plan: Plan) -> str:
    """The plan in a line: ``gpt2-xl · single · mbs 1 · seq 1024 · fp32 · adamw``."""
    layout, batch = plan.layout, plan.batch
    degrees = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "ep": layout.ep, "vpp": layout.vpp}
    parts = [plan.model.name, *_who(plan)]
    parts += [f"{name} {degree}" for name, degree in degrees.items() if degree not in (None, 1)]
    parts += [f"zero {layout.zero}"] if layout.zero else []
    parts += [f"mbs {batch.mbs}"]
    parts += [f"gbs {batch.gbs}"] if batch.gbs is not None else []
    dtype = f"{plan.precision.dtype} autocast" if plan.precision.autocast else plan.precision.dtype
    parts += [f"seq {batch.seq or plan.model.positions_max}", dtype, plan.optimizer.name]
    parts += [f"{plan.recompute.mode} recompute"] if plan.recompute.mode != "none" else []
    parts += [f"{_attention(plan)} attention"]
    return " · ".join([*parts, *_tuning(plan)])


def _attention(plan: Plan) -> str:
    """Fused attention under ``fsdp`` is that of PyTorch, whose kernel for fp32 is another one."""
    fused = plan.attention == "flash" and plan.precision.dtype == "fp32" and plan.framework == "fsdp"
    return "memory-efficient" if fused else str(plan.attention)


def _who(plan: Plan) -> list[str]:
    """The framework, and what of it makes another plan."""
    parts: list[str] = [plan.framework]
    if plan.framework == "fsdp":
        parts += ["torchtitan"] if plan.fsdp.code == "torchtitan" else []
        parts += [f"{plan.fsdp.replicas} replicas"] if plan.fsdp.replicas > 1 else []
        parts += ["offload"] if plan.fsdp.offload else []
    if plan.framework == "deepspeed":
        for what, place in (
            ("optimizer", plan.deepspeed.offload_optimizer),
            ("parameters", plan.deepspeed.offload_param),
        ):
            parts += [f"{what} on {place}"] if place != "none" else []
    return [*parts, "Trainer"] if plan.trainer.loop != "none" else parts


def _tuning(plan: Plan) -> list[str]:
    """What is trained, where that is not everything, and what the rest is stored as."""
    parts = [f"LoRA {plan.lora.rank}"] if plan.lora.rank is not None else []
    parts += [str(plan.quantisation.kind)] if plan.quantisation.kind != "none" else []
    frozen = ["embedding"] if plan.frozen.embedding else []
    frozen += [f"{plan.frozen.layers} layers"] if plan.frozen.layers else []
    return [*parts, f"frozen {' and '.join(frozen)}"] if frozen else parts
