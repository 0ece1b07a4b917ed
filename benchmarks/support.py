"""Writes the tables of docs/support.md from what frameworks, optimizers and model families say that they support.

``python benchmarks/support.py``; a test compares the page with what this would write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from memplan.families import ROOMS as FAMILIES, family
from memplan.frameworks import ROOMS as FRAMEWORKS, framework
from memplan.optimizers import algorithms
from memplan.plan.library import learned_models
from memplan.plan.traced_spec import layers_name
from memplan.trace.learned import shipped_targets

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/support.md"
BEGIN, END = "<!-- tables: python benchmarks/support.py -->", "<!-- end of tables -->"


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def named(values: Iterable[object]) -> str:
    return ", ".join(f"`{value}`" for value in values) or "–"


def mark(value: object) -> str:
    return "yes" if value else "–"


def table(title: str, head: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    yield from (f"## {title}", "", line(head), line(["---"] * len(head)), *map(line, rows), "")


def frameworks() -> Iterator[list[str]]:
    every = [one.name for one in algorithms()]
    for name in FRAMEWORKS:
        has = framework(name).supports
        yield [
            f"`{name}`",
            named(size for size in ("tp", "pp", "dp", "cp", "vpp") if size in has.sizes),
            ", ".join(map(str, has.zero)),
            "all" if has.optimizers is None else named(one for one in every if one in has.optimizers),
            named(has.losses),
            mark(has.autocast),
            mark("lora" in has.sections),
            mark("trainer" in has.sections),
            named(has.pipeline),
        ]


def optimizers() -> Iterator[list[str]]:
    for one in algorithms():
        implementations = named(implementation for implementation in one.implementations if implementation)
        deepspeed = named([one.deepspeed.name] if one.deepspeed else [])
        others = [named([other] if other else []) for other in (one.megatron, one.torchtitan)]
        yield [f"`{one.name}`", implementations, named(one.trainer), deepspeed, *others]


def families() -> Iterator[list[str]]:
    for name in FAMILIES:
        one = family(name)
        recipe = one.layer is not None
        yield [
            f"`{name}`",
            mark(recipe) + ", not `ddp`" * (one.idle != ""),
            mark(recipe and one.shards),
            mark(recipe and not one.no_zero3 and one.submodules is not None),
            mark(one.megatron_core is not None),
            mark(one.megatron is not None),
            mark(recipe and not one.no_flash),
            mark(recipe and not one.no_4bit),
            named(one.lora_targets or ()),
        ]


def learned() -> Iterator[list[str]]:
    for one in learned_models().values():
        config = one.configuration()
        kind, layers = config["model_type"], layers_name(config)
        adapted = shipped_targets({"config": {name: value for name, value in config.items() if name != layers}})
        yield [f"`{one.name}`", f"`{kind}`", f"{one.parameters / 1e9:.2f} B", named(adapted), named(one.hub)]


def tables() -> str:
    heads = {
        "framework": [
            "framework",
            "sizes above 1",
            "ZeRO",
            "optimizers",
            "losses",
            "autocast",
            "LoRA and 4-bit",
            "Trainer",
            "pipeline",
        ],
        "optimizer": ["optimizer", "implementations", "Trainer's `optim`", "DeepSpeed", "Megatron", "torchtitan"],
        "family": [
            "family",
            "`single`, `ddp`, `device-map`",
            "`fsdp`",
            "ZeRO-3",
            "`megatron`",
            "`megatron-deepspeed`",
            "flash",
            "4-bit",
            "LoRA's targets",
        ],
        "learned": ["model", "`model_type`", "parameters", "LoRA on", "on the Hub"],
    }
    return "\n".join(
        [
            *table("Frameworks", heads["framework"], frameworks()),
            *table("Optimizers, and what other tools call them", heads["optimizer"], optimizers()),
            *table("Model families", heads["family"], families()),
            *table("Models without a recipe that ship as learned", heads["learned"], learned()),
        ]
    )


def page(text: str) -> str:
    """``text`` of the page with its tables as they are now."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def main() -> int:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
