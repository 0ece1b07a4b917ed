"""Sizes that torchtitan's code has by name, and where it cuts a model into pipeline stages.

``torchtitan/models/llama3/__init__.py`` (``llama3_args``; ``llama3_configs`` and ``llama2_configs`` of
``torchtitan/models/llama/__init__.py`` before it); the flavours with which a model is tested have sizes of their own.
``torchtitan/distributed/pipeline_parallel.py`` of release 0.2.2 (``pipeline_llm``,
``generate_llm_fqn_per_model_part``), ``pipeline.py`` of 0.1.0 (``generate_split_points``), which cuts alike, and
``torchtitan/parallelisms/pipelining_utils.py`` of December 2024, which does not count embedding and head.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from ...plan.errors import ABSENT, Node, Origin, PlanError
from ...schedules.partition import weighted
from .settings import Settings

SIZED = "2025-07-22"
"""The day from which a model's vocabulary is in the code, and no longer its tokenizer's."""

TEST_TOKENIZER = "test_tiktoken.model", 2256
"""The tokenizer in torchtitan's own tests (``tests/assets``) until then: 2,000 tokens and 256 special ones."""

_DEBUG_SIZES = MappingProxyType({"hidden": 256, "heads": 16, "kv_heads": 16, "head_dim": 16, "ffn": 768})
"""``debugmodel``: ffn = 256 ⌈int(2/3 · 4 · 256) / 256⌉."""

FLAVOURS = MappingProxyType(
    {
        ("llama3", "1B"): "llama-3.2-1b",
        ("llama3", "3B"): "llama-3.2-3b",
        ("llama3", "8B"): "llama-3-8b",
        ("llama3", "70B"): "llama-3-70b",
        ("llama3", "405B"): "llama-3-405b",
        ("llama2", "7B"): "llama-2-7b",
        ("llama2", "13B"): "llama-2-13b",
        ("llama2", "70B"): "llama-2-70b",
        ("deepseek_v3", "16B"): "deepseek-v2-lite",
        ("deepseek_v3", "236B"): "deepseek-v2",
        ("deepseek_v3", "671B"): "deepseek-v3",
        ("qwen3", "0.6B"): "qwen3-0.6b",
        ("qwen3", "1.7B"): "qwen3-1.7b",
        ("qwen3", "4B"): "qwen3-4b",
        ("qwen3", "8B"): "qwen3-8b",
        ("qwen3", "14B"): "qwen3-14b",
        ("qwen3", "32B"): "qwen3-32b",
        ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
        ("qwen3", "235B-A22B"): "qwen3-235b-a22b",
        ("gpt_oss", "20b"): "gpt-oss-20b",
        ("gpt_oss", "120b"): "gpt-oss-120b",
        ("muse_glimmer", "30B"): "muse-glimmer-30b",
        ("kimi_k2_7", "moonlight-16B-A3B"): "moonlight-16b",
    }
)
"""Specs by ``model.name`` and ``model.flavor``."""

DECODERS = MappingProxyType(
    {
        **{("qwen3_5", size): f"qwen3.5-{size.lower()}" for size in ("9B", "27B", "35B-A3B", "122B-A10B", "397B-A17B")},
        **{("qwen3_5", size): f"qwen3.5-{size.lower()} --tied-embeddings false" for size in ("0.8B", "2B", "4B")},
        **{("muse_glimmer", size): "muse-glimmer-30b" for size in ("30B_mm", "debugmodel_mm")},
        **{("qwen3_5", size): "qwen3.5-9b" for size in ("debugmodel",)},
        **{("qwen3_5", size): "qwen3.5-35b-a3b" for size in ("debugmodel_moe",)},
    }
)
"""What ``--model`` takes in place of flavours with a vision tower, by ``model.name`` and ``model.flavor``: the decoder,
or, of one to debug with, another."""

OTHER_ATTENTION = ("_flex", "_flex_attn", "_varlen", "_varlen_attn")
"""Ends of flavours whose attention is FlexAttention or a kernel for sequences of several lengths."""


UNFUSED = "_non_fused_qkv"
"""End of a flavour with products of their own for queries, keys and values, which are those of the recipe."""


def debug_model(day: str) -> dict[str, int]:
    """Sizes of llama3's ``debugmodel``, with the vocabulary where it is in the code: 8 layers until 15 April 2025,
    2000 tokens until 22 September 2025."""
    sizes = {"layers": 8 if day < "2025-04-15" else 6, **_DEBUG_SIZES}
    return {**sizes, "vocab": 2000 if day < "2025-09-22" else 2048} if day >= SIZED else sizes


_DEBUG_SIZES_OF: dict[tuple[str, str], tuple[str, dict[str, int]]] = {
    ("deepseek_v3", "debugmodel"): (
        "deepseek-v2-lite",
        {
            **{"layers": 6, "hidden": 256, "heads": 16, "kv_heads": 16, "ffn": 1024, "vocab": 2048},
            **{"experts": 8, "expert_top_k": 3, "expert_ffn": 256, "shared_expert_ffn": 512},
        },
    ),
    ("gpt_oss", "debugmodel"): (
        "gpt-oss-20b",
        {
            **{"layers": 4, "hidden": 256, "heads": 64, "kv_heads": 8, "head_dim": 64, "ffn": 2880, "vocab": 2048},
            **{"experts": 8, "expert_top_k": 4, "expert_ffn": 2880},
        },
    ),
    ("muse_glimmer", "debugmodel"): (
        "muse-glimmer-30b",
        {"layers": 8, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 768, "vocab": 2048},
    ),
    ("qwen3", "debugmodel"): (
        "qwen3-0.6b",
        {"layers": 8, "hidden": 256, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 3072, "vocab": 2048},
    ),
    ("qwen3", "debugmodel_moe"): (
        "qwen3-30b-a3b",
        {
            **{"layers": 8, "hidden": 256, "heads": 16, "kv_heads": 8, "ffn": 3072, "vocab": 2048},
            **{"experts": 64, "expert_top_k": 8, "expert_ffn": 768},
        },
    ),
}


def flavour_of(family: str, flavour: str, day: str) -> tuple[str, dict[str, int]] | None:
    """The spec of a model of torchtitan's by its name and flavour, and sizes of a model to debug with that are not the
    spec's."""
    flavour = flavour.removesuffix(UNFUSED)
    if (family, flavour) == ("llama3", "debugmodel"):
        return "llama-3-8b", debug_model(day)
    known = FLAVOURS.get((family, flavour))
    return (known, {}) if known is not None else _DEBUG_SIZES_OF.get((family, flavour))


def without_recipe(family: str, origin: Origin, key: str = "model_spec.name") -> PlanError:
    """What is wrong with a model of torchtitan's that memplan does not know."""
    known = ", ".join(sorted({one for one, _ in (*FLAVOURS, *DECODERS)}))
    why = f": {_OTHER[family]}" if family in _OTHER else ""
    problem = f"has no recipe{why}; torchtitan's models with one: {known} (--model names another in its place)"
    return PlanError(key, family, problem, origin=origin)


_OTHER = {
    "flux": "it makes images",
    "llama4": "torchtitan has taken it out, and its attention has chunks",
}
"""Why models of torchtitan's have none."""
VARLEN = "gpt_oss"
"""The model whose attention is that of packed sequences by itself, and is estimated so."""
PACKED = (VARLEN, "muse_glimmer", "qwen3_5")
"""Models that are estimated with it."""
FLEX = "deepseek_v3"
"""The model whose flavours, but for the one to debug with, ask for FlexAttention by themselves (``attn_type``)."""

SCHEDULES = {"1f1b": ("1f1b", False), "gpipe": ("gpipe", False), "interleaved1f1b": ("1f1b", True)}
"""A plan's schedule, and whether a rank has several stages, by torchtitan's name in small letters."""
WEIGHED = "2025-04-15"
"""The day from which embedding and head count as layers."""
ROUNDED = "2025-07-30"
"""The day until which layers per stage must divide the model."""
GIVEN = "2024-10-10"
"""The day until which stages must be given."""

_LAYER = re.compile(r"layers\.(\d+)")


class Stages(NamedTuple):
    """How a model of ``layers`` layers is cut."""

    schedule: str
    chunks: int
    """Virtual stages of a rank."""
    first: tuple[int, ...]
    """The first entry of every (virtual) stage in the list embedding, layers, final norm, head, and its length."""


def stages(settings: Settings, layers: int, pp: int) -> Stages:
    """The cut that ``settings`` make of ``layers`` layers on ``pp`` ranks."""
    names = ("parallelism.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule")
    written = settings.word(*names, default="1F1B")
    key = settings.name(*names)
    schedule = SCHEDULES.get(str(written.value).replace("_", "").lower())
    if schedule is None:
        known = "1F1B, GPipe or Interleaved1F1B"
        raise written.wrong(key, f"must be {known}: others are not modelled yet")
    name, several = schedule
    starts = _given(settings, layers)
    if starts is None:
        count = _count(settings, layers, pp, several=several)
        starts = _even(settings, layers, count)
    chunks, rest = divmod(len(starts), pp)
    if rest or not chunks or (chunks > 1) != several:
        each = "two or more" if several else "one"
        raise written.wrong(
            key, f"needs {each} of the stages on every rank, and there are {len(starts)} for {pp} ranks"
        )
    return Stages(name, chunks, (*starts, layers + 3))


def _given(settings: Settings, layers: int) -> tuple[int, ...] | None:
    """First entries that the file names: split points, or the modules of every part."""
    parts = settings.given.get("parallelism.module_fqns_per_model_part")
    if parts is not None and parts.value is not None:
        return _parts(parts, layers)
    found = settings.first("parallelism.pipeline_parallel_split_points", "experimental.pipeline_parallel_split_points")
    points = settings.words(found[0]) if found is not None else []
    if found is None or not points:
        return None
    starts = [0, *(_entry(point, layers, *found) for point in points)]
    if starts != sorted(set(starts)):
        raise PlanError(found[0], points, "must name modules in their order", origin=found[1].origin)
    return tuple(starts)


def _parts(parts: Node, layers: int) -> tuple[int, ...]:
    name = "parallelism.module_fqns_per_model_part"
    plain = parts.plain()
    if not isinstance(plain, list) or not all(isinstance(part, list) and part for part in plain):
        raise PlanError(name, plain, "must be a list of lists of modules", origin=parts.origin)
    entries = [_entry(module, layers, name, parts) for part in plain for module in part]
    if entries != list(range(layers + 3)):
        problem = f"must name tok_embeddings, layers.0 to layers.{layers - 1}, norm and output in this order"
        raise PlanError(name, plain, problem, origin=parts.origin)
    starts = [0]
    for part in plain[:-1]:
        starts.append(starts[-1] + len(part))
    return tuple(starts)


def _entry(module: object, layers: int, name: str, node: Node) -> int:
    """The place of ``module`` in the list embedding, layers, final norm, head."""
    ends = {"tok_embeddings": 0, "norm": layers + 1, "output": layers + 2, "lm_head": layers + 2}
    match = _LAYER.fullmatch(str(module))
    place = int(match[1]) + 1 if match is not None and len(match[1]) < 6 else ends.get(str(module))
    if place is None or (match is not None and place > layers):
        raise PlanError(name, module, f"is no module of a model of {layers} layers", origin=node.origin)
    return place


def _count(settings: Settings, layers: int, pp: int, *, several: bool) -> int:
    """Number of (virtual) stages where the file does not name them."""
    name = "parallelism.pipeline_parallel_layers_per_stage"
    each = settings.optional(name)
    if each is None:
        return pp * (2 if several else 1)
    counted = layers + sum(_weights(settings))
    if settings.era.day < ROUNDED and counted % (each.whole * pp):
        raise each.wrong(name, f"must make equal stages of {layers} layers, embedding and head on {pp} ranks")
    return -(-counted // each.whole)


def _weights(settings: Settings) -> tuple[int, int]:
    """How many layers embedding and head count as."""
    if settings.era.day < WEIGHED:
        return 0, 0
    first, last = (
        settings.integer(f"parallelism.pipeline_parallel_{end}_stage_less_layers", default=1, least=0).whole
        for end in ("first", "last")
    )
    return first, last


def _even(settings: Settings, layers: int, count: int) -> tuple[int, ...]:
    """``count`` stages of as many layers each; the first ones (until April 2025 the second and on) have one more."""
    day = settings.era.day
    if day < GIVEN or "2025-04-07" <= day < WEIGHED:
        name = settings.name(
            "parallelism.pipeline_parallel_split_points", "experimental.pipeline_parallel_split_points"
        )
        problem = f"is needed with {settings.era.label}, whose way to choose stages is not modelled"
        raise PlanError(name, ABSENT, problem, origin=settings.origin)
    first, last = _weights(settings)
    each, more = divmod(layers + first + last, count)
    degree = settings.name("parallelism.pipeline_parallel_degree", "experimental.pipeline_parallel_degree")
    if each == 0 or each < max(first, last):
        problem = f"makes {count} stages of {layers} layers, which are too many"
        origin = settings.given[degree].origin if degree in settings.given else settings.origin
        raise PlanError(degree, ABSENT, problem, origin=origin)
    starts, layer = [0], 0
    for stage in range(count - 1):
        longer = stage < more if day >= WEIGHED else 0 < stage <= more
        layer += each + longer - (first if stage == 0 else 0)
        starts.append(layer + 1)
    return tuple(starts)


def torchtitans_own(layers: int, pp: int, vpp: int) -> tuple[int, ...] | None:
    """The cut that torchtitan makes from its degree alone (``generate_llm_fqn_per_model_part``): one stage on a rank,
    or two where the schedule is interleaved; ``None`` where it would make others."""
    if vpp > 2 or pp * vpp > layers + 2:
        return None
    _, *inner, _ = weighted(layers, pp * vpp)
    return (0, *(layer + 1 for layer in inner), layers + 3)


def parts(edges: Sequence[int], layers: int) -> list[list[str]]:
    """``module_fqns_per_model_part``: the modules of every stage."""
    names = modules(layers)
    return [names[low:high] for low, high in pairwise(edges)]


def split_points(edges: Sequence[int], layers: int) -> list[str]:
    """``pipeline_parallel_split_points``: the first module of every stage behind the first."""
    names = modules(layers)
    return [names[edge] for edge in edges[1:-1]]


def modules(layers: int) -> list[str]:
    return ["tok_embeddings", *(f"layers.{layer}" for layer in range(layers)), "norm", "output"]
