"""Which test proves which recipe: ``docs/proof.md``, from the lists of cases that the tests run.

    python benchmarks/proof.py

writes the page anew. Needs torch and transformers, as the tests do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.markdown import line  # noqa: E402
from memplan.estimate import programs_of  # noqa: E402
from memplan.layers.coverage import TRANSFORMERS, covered  # noqa: E402
from memplan.layers.module import Options  # noqa: E402
from memplan.plan.errors import PlanError  # noqa: E402
from memplan.plan.read import read_plan  # noqa: E402
from memplan.plan.resolve import resolve  # noqa: E402

PAGE = ROOT / "docs" / "proof.md"
ENOUGH = 3
"""Shapes in which a recipe has to equal what it describes."""

HEAD = """# What proves a recipe

Written by `python benchmarks/proof.py`; do not edit by hand.

A recipe is a claim about code that others wrote. It is proven where a test runs that code on fake tensors, follows
every storage, and finds what the recipe says, event by event: what is held, how large it is, what forward leaves for
backward, and when it ends. Figures are numbers of shapes (sequences × tokens), *without · with* recompute; three make a
proof.
**Bold** is less than that, and *unproven* is none; – is what memplan refuses to plan.
"""


@dataclass(frozen=True)
class Setting:
    """A column of the table of families."""

    title: str
    dtype: str
    attention: tuple[str, ...]
    autocast: bool = False


SETTINGS = (
    Setting("fp32", "fp32", ("eager",)),
    Setting("bf16, eager", "bf16", ("eager",)),
    Setting("bf16, flash", "bf16", ("flash",)),
    Setting("fp16, eager", "fp16", ("eager",)),
    Setting("autocast", "bf16", ("eager", "flash"), autocast=True),
)
SAME_RECIPE = {"gpt": "gpt2"}
"""Families of specs that run another family's code in transformers, which has no configuration of their own."""
Shape = tuple[Any, ...]
Proofs = dict[tuple[str, str, str, bool, str], set[Shape]]
"""Shapes by family, dtype, attention, autocast and recompute."""


@dataclass(frozen=True)
class Other:
    """A recipe beside those of families, the test that compares it with what it describes, and its cases."""

    recipe: str
    conditions: str
    test: str
    """``module::function`` below ``tests``; empty where there is none."""
    shapes: int
    note: str = ""


# -- from the tests' lists ---------------------------------------------------------------------------------


def proofs() -> Proofs:
    """What the tests of plain PyTorch run."""
    from tests.layers import test_against_transformers as plain, test_autocast as autocast
    from tests.trace import test_step as trace

    found: Proofs = {}
    for cases, is_autocast in ((plain.CASES, False), (autocast.CASES, True)):
        for case in cases:
            family = plain.EVERY[case.model][0]
            dtype = "bf16" if is_autocast else case.dtype
            found.setdefault((family, dtype, case.attention, is_autocast, case.recompute), set()).add((case.b, case.s))
    for family, setting in (case.values for case in trace.CASES):
        given = trace.SETTINGS[setting]
        key = (family, given["dtype"], given["attention"], False, given.get("recompute", "none"))
        found.setdefault(key, set()).add((int(trace.SMALL["mbs"]), int(trace.SMALL["seq"])))
    return found


def sharded_proofs() -> dict[tuple[str, str, str], set[Shape]]:
    """Shapes by family, precision and recompute, of ``fully_shard``."""
    from tests.frameworks import test_fsdp_against_torch as fsdp
    from tests.layers.test_against_transformers import EVERY

    found: dict[tuple[str, str, str], set[Shape]] = {}
    for case in fsdp.CASES:
        found.setdefault((EVERY[case.model][0], "", case.recompute), set()).add((case.b, case.s))
        precision = _precision(case.sharding)
        found.setdefault((EVERY[case.model][0], precision, ""), set()).add((case.b, case.s))
    return found


def _precision(sharding: Any) -> str:
    compute = sharding.param_dtype or sharding.original
    return compute if compute == sharding.original else f"{compute} over {sharding.original}"


def others() -> Iterator[Other]:
    """Recipes that families have in common."""
    from tests.frameworks import (
        test_fsdp_gpt_oss as gpt_oss,
        test_fsdp_pipeline as pipeline,
        test_fsdp_tensor_parallel as tp,
        test_fsdp_torchtitan as titan,
    )
    from tests.layers import (
        test_against_transformers as plain,
        test_four_bit as four_bit,
        test_fused_attention as efficient,
        test_fused_losses as losses,
        test_tuning_against_peft as tuned,
    )
    from tests.optimizers import test_steps as steps
    from tests.oracle import ddp, titan_low as low

    def sized(cases: Iterable[Any]) -> int:
        return len({case.sizes for case in cases})

    def of(mode: str, cases: Mapping[str, Any] = titan.CASES) -> list[Any]:
        return [case for case in cases.values() if _mode(case.recompute) == mode]

    name = "torchtitan's Llama under fully_shard"
    for mode, title in RECOMPUTE.items():
        yield Other(name, title, "frameworks.test_fsdp_torchtitan::test_every_event", sized(of(mode)))
    name = "torchtitan's gpt-oss under fully_shard, also with shared experts and loss in chunks"
    for mode, title in RECOMPUTE.items():
        yield Other(name, title, "frameworks.test_fsdp_gpt_oss::test_every_event", sized(of(mode, gpt_oss.CASES)))
    for recipe in dict.fromkeys(case.recipe for case in low.CASES.values()):
        shapes = sized(case for case in low.CASES.values() if case.recipe == recipe)
        name = "torchao's layers of few bits in torchtitan, also of experts"
        yield Other(name, recipe, "frameworks.test_titan_low::test_every_event", shapes)
    name = "torchtitan's tensor and sequence parallelism (DTensor)"
    for mode, title in RECOMPUTE.items():
        cases = of(mode, tp.CASES)
        shapes = len({(case.sizes, case.tp) for case in cases})
        sizes = ", ".join(str(size) for size in sorted({case.tp for case in cases}))
        yield Other(name, f"{title}; t = {sizes}", "frameworks.test_fsdp_tensor_parallel::test_every_event", shapes)
    shapes = len(efficient.SHAPES)
    yield Other("memory-efficient attention", "fp32", "layers.test_fused_attention::test_as_the_operator", shapes)
    families, test = _families(plain.MASKED), "layers.test_against_transformers::test_step_of_real_model"
    yield Other("attention with a mask, from a sliding window on", families, test, len(plain.SHAPES))
    test = "frameworks.test_fsdp_pipeline::test_every_pass"
    for title, staged in _stages(pipeline.CASES.values()).items():
        schedules = ", ".join(sorted({case.schedule for case in staged}))
        shapes = len({case.edges for case in staged})
        yield Other(f"pipeline stages of torchtitan{title}", schedules, test, shapes, "shapes are partitions")
    families = ", ".join(sorted({case.family for case in ddp.CASES.values()}))
    test = "frameworks.test_ddp_against_torch::test_every_tensor_of_an_iteration"
    yield Other("DistributedDataParallel", f"fp32, eager; {families}", test, 1, "real processes on CPUs")
    families = _families(case.model for case in tuned.ADAPTED)
    yield Other("LoRA (peft)", families, "layers.test_tuning_against_peft::test_step_with_adapters", len(tuned.SHAPES))
    families = _families(case.model for case in tuned.PARTLY)
    yield Other(
        "frozen parts", families, "layers.test_tuning_against_peft::test_step_with_frozen_parts", len(tuned.SHAPES)
    )
    families = _families(case.model for case in four_bit.CASES)
    yield Other("4-bit weights", families, "layers.test_four_bit::test_step_with_four_bit_weights", 1)
    for kind in ("liger", "cut", "chunked", "logits_to_keep"):
        test = f"layers.test_fused_losses::test_{kind}"
        yield Other(f"loss: {kind.replace('_', ' ')}", "16 and 32 bits", test, len({*losses.SIZES}))
    kinds = ", ".join(dict.fromkeys(optimizer.name for optimizer, _ in steps.PYTORCH))
    test = "optimizers.test_steps::test_any_shapes_in_any_order"
    yield Other(
        "optimizers", f"fp32, bf16, fp16; {kinds}", test, len(steps.MODEL), "any shapes of parameters, at random"
    )
    yield Other(
        "GPT-2 of 2020", "fp32, eager", "", 0, "that code does not run beside today's PyTorch; its measured growth"
    )


def _stages(cases: Iterable[Any]) -> dict[str, list[Any]]:
    """Cases by what they have besides stages."""
    found: dict[str, list[Any]] = {"": [], ", tensor-parallel": [], ", one shard": []}
    for case in cases:
        if case.tensor > 1:
            found[", tensor-parallel"].append(case)
        if case.shards == 1:
            found[", one shard"].append(case)
        if case.tensor == 1 and case.shards > 1:
            found[""].append(case)
    return found


RECOMPUTE = {"none": "without recompute", "op": "recompute per operator", "full": "with recompute"}


def _mode(given: Any) -> str:
    return str(getattr(given, "mode", given))


def _families(models: Iterable[str]) -> str:
    from tests.layers.test_against_transformers import EVERY

    return ", ".join(sorted({EVERY[model][0] for model in models}))


# -- the page ----------------------------------------------------------------------------------------------


def is_planned(family: str, setting: Setting, attention: str, recompute: str) -> bool:
    """Whether memplan has an estimate."""
    from tests.trace.test_step import model_flags

    flags = {
        **model_flags(family),
        "framework": "single",
        "layers": "2",
        "mbs": "1",
        "seq": "32",
        "dtype": setting.dtype,
    }
    flags |= {"attention": attention, "recompute": recompute, "autocast": str(setting.autocast).lower()}
    try:
        programs_of(resolve(read_plan(None, flags).plan), Options())
    except PlanError:
        return False
    return True


def cell(family: str, setting: Setting, found: Proofs) -> str:
    """Shapes without and with recompute."""
    parts = []
    for recompute in ("none", "full"):
        planned = [kind for kind in setting.attention if is_planned(family, setting, kind, recompute)]
        keys = [(family, setting.dtype, kind, setting.autocast, recompute) for kind in planned]
        shapes = set().union(*(found.get(key, set()) for key in keys))
        parts.append(_counted(len(shapes)) if planned else "–")
    return " · ".join(parts) if set(parts) != {"–"} else "–"


def _counted(shapes: int) -> str:
    if not shapes:
        return "*unproven*"
    return str(shapes) if shapes >= ENOUGH else f"**{shapes}**"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield line(columns)
    yield line(["---"] * len(columns))
    for row in rows:
        yield line(row)


def families_table() -> Iterator[str]:
    found = proofs()

    def row(family: str) -> list[str]:
        if family in SAME_RECIPE:
            same = f"as {SAME_RECIPE[family]}: the same recipe, for specs that transformers has no configuration of"
            return [family, same, *[""] * (len(SETTINGS) - 1)]
        return [family, *(cell(family, setting, found) for setting in SETTINGS)]

    yield from table(
        ["family", *(setting.title for setting in SETTINGS)], (row(family) for family in covered(TRANSFORMERS))
    )


def sharded_table() -> Iterator[str]:
    found = sharded_proofs()
    families = dict.fromkeys(family for family, _, _ in found)
    for family in families:
        without, full = (len(found.get((family, "", recompute), set())) for recompute in ("none", "full"))
        recomputes = is_planned(family, SETTINGS[1], "eager", "full")
        together = {
            shape for one, _, recompute in found if one == family and recompute for shape in found[one, "", recompute]
        }
        precisions = "; ".join(sorted(name for one, name, _ in found if one == family and name))
        yield line(
            [
                family,
                _counted(len(together)),
                f"{_counted(without)} · {_counted(full) if recomputes else '–'}",
                precisions,
            ]
        )


def others_table() -> Iterator[str]:
    def row(one: Other) -> list[str]:
        test = f"`tests/{one.test.replace('.', '/').replace('::', '.py::')}`" if one.test else ""
        return [one.recipe, one.conditions, _counted(one.shapes), "; ".join(filter(None, [test, one.note]))]

    yield from table(["recipe", "conditions", "shapes", "test"], map(row, others()))


def page() -> str:
    lines = [HEAD, "## Plain PyTorch: transformers' models", ""]
    lines += [
        "`tests/layers/test_against_transformers.py`, `tests/layers/test_autocast.py`, `tests/trace/test_step.py`",
        "",
    ]
    lines += [*families_table(), "", "## `fully_shard` of transformers' models", ""]
    lines += [
        "`tests/frameworks/test_fsdp_against_torch.py`. Layers have the recipes above; `fully_shard` is woven in.",
        "",
    ]
    lines += [line(["family", "shapes", "without · with recompute", "parameters and compute"]), line(["---"] * 4)]
    lines += [*sharded_table(), "", "## Others", "", *others_table(), ""]
    return "\n".join(lines)


def exists(test: str) -> bool:
    """Whether the test that a row names is there."""
    module, _, function = test.partition("::")
    return hasattr(import_module(f"tests.{module}"), function)


def main() -> int:
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
