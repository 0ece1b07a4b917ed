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
WARMUP = "--cuda-graph-warmup-steps"
OLDER = {"--enable-cuda-graph": "local", "--external-cuda-graph": "transformer_engine"}
"""Switches, and the implementation that they are today."""
KNOWN = get_args(GraphModule)


def _graphs(reader: Reader) -> None:
    settings, put = reader.settings, reader.building.put
    given = [Node(kind, settings.where(name)) for name, kind in OLDER.items() if settings.has(name)]
    node = settings.word(IMPLEMENTATION) or next(iter(given), Node("none", settings.origin))
    names = (MODULES, "--cuda-graph-scope")
    modules = [one for name in names for one in _each(settings.words(name) or [])]
    if node.value == "none":
        for name in (*names, WARMUP):
            reader.building.because(name, f"no effect without {IMPLEMENTATION}")
        return
    if any(one.value == "full_iteration" for one in modules):
        node, modules = Node("full_iteration", modules[0].origin), []
    if node.value == "local":
        said = f"{IMPLEMENTATION} local is not modelled yet and pushes memory up: graphs keep buffers of their own"
        reader.building.note("argument-not-modelled", f"{said}; transformer_engine and full_iteration are modelled")
        for name in (IMPLEMENTATION, *OLDER, *names):
            reader.building.because(name, "not modelled yet: graphs of Megatron-Core's own")
        return
    put("megatron.cuda_graphs", node, IMPLEMENTATION, *OLDER)
    for one in modules:
        if one.value not in (*KNOWN, "full"):
            problem = f"must be {', '.join(KNOWN)}, or left out"
            raise PlanError(MODULES, one.value, problem, origin=one.origin, known=KNOWN)
    parts = {one.value: one for one in modules if one.value != "full"}
    if parts:
        put("megatron.cuda_graph_modules", Node(list(parts.values()), settings.where(*names)), *names)
    warmup = settings.integer(WARMUP)
    if warmup is not None:
        put("megatron.cuda_graph_warmup", warmup, WARMUP)


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
