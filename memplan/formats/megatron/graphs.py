"""Megatron-LM's arguments of CUDA graphs (``validate_args``; ``cuda_graph_config.py``,
``normalize_cuda_graph_modules``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from ...plan.errors import Node, PlanError
from ...plan.megatron_section import GraphModule
from ...plan.plan import Plan
from ..rows import Reader, Row, elsewhere

IMPLEMENTATION, MODULES = "--cuda-graph-impl", "--cuda-graph-modules"
OLD_MODULES = "--cuda-graph-scope"
WARMUP, INFERENCE = "--cuda-graph-warmup-steps", "--inference-cuda-graph-scope"
OLDER = {"--enable-cuda-graph": "local", "--external-cuda-graph": "transformer_engine"}
"""Switches, and the implementation that they are today."""
KNOWN = get_args(GraphModule)


def _graphs(reader: Reader) -> None:
    settings, put = reader.settings, reader.building.put
    given = [Node(kind, settings.where(name)) for name, kind in OLDER.items() if settings.has(name)]
    said = settings.word(IMPLEMENTATION)
    node = said or next(iter(given), Node("none", settings.origin))
    if len(given) + (said is not None and said.value != "none") > 1:
        both = " and ".join(name for name in (*OLDER, IMPLEMENTATION) if settings.has(name))
        raise node.wrong(both, "must be one of them, as in Megatron-Core")
    names = (MODULES, OLD_MODULES)
    modules = [one for name in names for one in _each(settings.words(name) or [])]
    if all(map(settings.has, names)) and modules:
        raise modules[0].wrong(f"{OLD_MODULES} and {MODULES}", "must be one of them, as in Megatron-Core")
    older = {one.value: one for one in modules if str(one.value).startswith("full_iteration")}
    modules = [one for one in modules if one.value not in older]
    if "full_iteration" in older:
        if node.value == "transformer_engine":
            problem = "must be left out beside transformer_engine, as in Megatron-Core"
            raise PlanError(MODULES, "full_iteration", problem, origin=older["full_iteration"].origin)
        node, modules = Node("full_iteration", older["full_iteration"].origin), []
    inference = settings.word(INFERENCE)
    blocks = (inference is not None and inference.value == "block") or "full_iteration_inference" in older
    if node.value == "local" and blocks and not any(one.value != "full" for one in modules):
        node = Node("none", node.origin)  # layers make no graphs of their own then (``create_mcore_cudagraph_manager``)
    if node.value == "none":
        reader.building.because((*names, WARMUP, IMPLEMENTATION, *OLDER), f"no effect without {IMPLEMENTATION}")
        return
    put("megatron.cuda_graphs", node, IMPLEMENTATION, *OLDER)
    for one in modules:
        if one.value not in (*KNOWN, "full"):
            raise one.wrong(MODULES, f"must be {', '.join(KNOWN)}, or left out", known=KNOWN)
    if len(modules) > 1 and any(one.value == "full" for one in modules):
        raise PlanError(MODULES, "full", "must be alone, as in Megatron-Core", origin=modules[0].origin)
    parts = {one.value: one for one in modules if one.value != "full"}
    if parts:
        put("megatron.cuda_graph_modules", Node(list(parts.values()), settings.where(*names)), *names)
    reader.building.put_said("megatron.cuda_graph_warmup", settings.integer(WARMUP), WARMUP)


def _each(words: list[Node]) -> Iterator[Node]:
    for word in words:
        yield from (Node(part, word.origin) for part in str(word.value).strip("[]").split(",") if part)


def _graphed(plan: Plan) -> bool:
    return plan.megatron.cuda_graphs != "none"


ROWS = (
    Row(IMPLEMENTATION, "megatron.cuda_graphs", "LAYERS", "word", read=_graphs, when=_graphed),
    Row(
        MODULES,
        "megatron.cuda_graph_modules",
        "LAYERS",
        "word",
        read=elsewhere,
        when=lambda plan: _graphed(plan) and bool(plan.megatron.cuda_graph_modules),
        value=lambda plan: plan.megatron.cuda_graph_modules or (),
    ),
    Row(
        WARMUP,
        "megatron.cuda_graph_warmup",
        "LAYERS",
        read=elsewhere,
        when=lambda plan: _graphed(plan) and plan.megatron.cuda_graph_warmup != 3,
    ),
)
