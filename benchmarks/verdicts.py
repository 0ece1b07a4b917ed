"""Verdicts beside what became of the runs.

    python benchmarks/verdicts.py [--measured DIR] [--markdown docs/verdicts.md]

Every modelled row of every file of measured runs, which all ran; the published rows of ``published_steps.jsonl``, which
did, too; and configurations that are known, or likely, to have run out of memory.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import (  # noqa: E402
    fms as tuning,
    megatron,
    nvidia,
)
from benchmarks.accuracy import MEASURED  # noqa: E402
from benchmarks.comparison import GIB  # noqa: E402
from benchmarks.markdown import line  # noqa: E402
from benchmarks.measured import Row, bigscience_plan, plan_of, read_rows  # noqa: E402
from benchmarks.timing import PUBLISHED, bigscience_timed_plan, published_plan  # noqa: E402
from memplan.estimate import estimate  # noqa: E402
from memplan.plan.errors import PlanError  # noqa: E402
from memplan.plan.plan import Plan  # noqa: E402
from memplan.result import Estimate  # noqa: E402

RAN, DIED, FAILED = "ran", "out of memory", "failed, cause not recorded"


@dataclass(frozen=True)
class Case:
    """A run, and what became of it."""

    file: str
    id: str
    became: str
    plan: Callable[[], Plan] | None
    """``None`` where it is not modelled."""
    note: str = ""
    """What is not modelled, or how the plan differs from the run."""


# -- the files ----------------------------------------------------------------------------------------


def bigscience(rows: Sequence[Row]) -> Iterator[Case]:
    """Ten trials that ran, and three of the 72-layer model that the chronicles call out of memory."""
    name = "bigscience_a100.jsonl"
    for row in rows:
        yield Case(name, row["id"], RAN, lambda row=row: bigscience_plan(row))  # type: ignore[misc]
    base = next(row for row in rows if row["layers"] == 72)
    for tp, pp, dp, mbs in ((8, 1, 48, 1), (2, 6, 32, 1), (2, 6, 32, 2)):
        batch = 2048 // (dp * mbs) * dp * mbs
        changed = {"tp": tp, "pp": pp, "dp": dp, "micro_batch_size": mbs, "global_batch_size": batch}
        row = {**base, **changed}
        identifier = f"bigscience/h14336-l72-tp{tp}-pp{pp}-dp{dp}-mbs{mbs}-z1"
        yield Case(name, identifier, DIED, lambda row=row: bigscience_plan(row))  # type: ignore[misc]


def ci(rows: Sequence[Row]) -> Iterator[Case]:
    for row in rows:
        why = megatron.why_not(row)
        plan = None if why else (lambda row=row: megatron.ci_plan(row))  # type: ignore[misc]
        yield Case("megatron_lm_ci.jsonl", row["id"], RAN, plan, why or "")


def b200(rows: Sequence[Row]) -> Iterator[Case]:
    for row in rows:
        yield Case("megatron_b200.jsonl", row["id"], RAN, lambda row=row: megatron.b200_plan(row))  # type: ignore[misc]


def torchtitan(rows: Sequence[Row]) -> Iterator[Case]:
    for row in rows:
        batch = row["local_batch_size"]
        flags = {"model": "llama-3-8b", "framework": "fsdp", "fsdp_code": "torchtitan", "gpu": "h100-96gb"}
        sizes = {"gpus": row["gpus"], "mbs": batch, "gbs": batch * row["gpus"], "seq": row["sequence_length"]}
        own = {"dtype": "bf16", "recompute_per_operator": "true", "compile": str(row["compile"]).lower()}
        plan = lambda a=flags, b=sizes, c=own: plan_of(None, **a, **b, **c)  # type: ignore[misc]  # noqa: E731
        yield Case("torchtitan_h100.jsonl", row["id"], RAN, plan)


def fms(rows: Sequence[Row]) -> Iterator[Case]:
    """Fine-tuning on one to four GPUs."""
    for row in rows:
        outcome = FAILED if row.get("outcome") else RAN
        yield Case(tuning.NAME, row["id"], outcome, lambda row=row: tuning.plan_of(row))  # type: ignore[misc]


def published(rows: Sequence[Row]) -> Iterator[Case]:
    for row in rows:
        of = published_plan if "gpu" in row else bigscience_timed_plan
        yield Case("published_steps.jsonl", row["id"], RAN, lambda row=row, of=of: of(row))  # type: ignore[misc]


def throughput(rows: Sequence[Row]) -> Iterator[Case]:
    for row in rows:
        yield Case(nvidia.NAME, nvidia.short(row), RAN, lambda row=row: nvidia.plan_of_row(row))  # type: ignore[misc]


READERS: dict[str, Callable[[Sequence[Row]], Iterator[Case]]] = {
    "bigscience_a100.jsonl": bigscience,
    "megatron_lm_ci.jsonl": ci,
    "megatron_b200.jsonl": b200,
    "torchtitan_h100.jsonl": torchtitan,
    "fms_a100_finetuning.jsonl": fms,
    nvidia.NAME: throughput,
}
OTHERS = {
    "megatron_bridge_moonlight.jsonl": "mixture of experts with latent attention",
    "llm_foundry_throughput.jsonl": "Composer's MPT models under FSDP1",
    "korthikanti_2022.jsonl": "formulas, no runs",
    "traced_transformers_5_23.jsonl": "fake tensors, no devices",
}
"""Files without a plan that could be judged, and why."""


def cases(folder: Path) -> Iterator[Case]:
    for name, reader in READERS.items():
        if (folder / name).exists():
            yield from reader(read_rows(folder / name))
    yield from published(read_rows(PUBLISHED))


# -- verdicts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judgement:
    """A case, and the estimate of its plan, or why there is none."""

    case: Case
    estimate: Estimate | None
    refused: str = ""

    @property
    def verdict(self) -> str:
        return self.estimate.judged.verdict.value if self.estimate is not None else "not modelled"

    @property
    def right(self) -> bool | None:
        """``None`` where nobody knows: nothing was judged, or the cause of a failure was not recorded."""
        if self.estimate is None or self.estimate.fits is None or self.case.became == FAILED:
            return None
        return self.estimate.fits is (self.case.became == RAN)


def judged(case: Case) -> Judgement:
    if case.plan is None:
        return Judgement(case, None, case.note)
    try:
        return Judgement(case, estimate(case.plan()))
    except PlanError as error:
        return Judgement(case, None, str(error))


# -- the page -----------------------------------------------------------------------------------------

HEAD = """# Verdicts

Written by `python benchmarks/verdicts.py --markdown docs/verdicts.md`; do not edit by hand.

What `memplan estimate` says of runs of which it is known what became of them. PyTorch's allocator is replayed within
the device's memory, less what lies outside PyTorch: `fits` where every request gets its block, `fits-with-retries`
where cached memory has to be given back for that, `tight` where either is so only at the low end of what CUDA and NCCL
take, `does-not-fit` where a request fails. `unknown`, where nothing is known of a device, is not judged.
"""

_LLAMA = (
    "Meta's own code, which shards with FSDP beside pipelines and frees what stages exchange early (arXiv 2407.21783, "
    "section 3.3.2); the plan is as Megatron-Core would run it"
)
CAUSES = {
    "llama-3-2024/8192": _LLAMA,
    "llama-3-2024/16384": _LLAMA,
    "llama-3-2024/16384-131072": _LLAMA,
    "bigscience-2022/h14400-l80-a96-pp10-dp4-mbs8": (
        "before PyTorch 2.13 equal free blocks go by falling addresses, which are known of one driver of 2025 alone; "
        "by age this run fits, with retries"
    ),
}
"""Of wrong verdicts, by the run's id."""


def page(found: Sequence[Judgement]) -> str:
    rows = [["file", "runs", "judged", "right", "wrong", "verdicts"], ["---", *["---:"] * 4, "---"]]
    for name in dict.fromkeys(one.case.file for one in found):
        own = [one for one in found if one.case.file == name]
        known = [one for one in own if one.right is not None]
        counts = Counter(one.verdict for one in own if one.estimate is not None)
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
        right = sum(bool(one.right) for one in known)
        rows.append(
            [
                name,
                str(len(own)),
                str(sum(counts.values()) - counts["unknown"]),
                str(right),
                str(len(known) - right),
                verdicts,
            ]
        )
    plain = "fits", "not modelled", "unknown"
    told = [one for one in found if one.estimate is not None and (one.case.became != RAN or one.verdict not in plain)]
    lines = [HEAD, "## Files", "", *map(line, rows), "", *_left_out(found)]
    lines += ["", "## Runs that died, and verdicts other than `fits`", "", line(COLUMNS), line(["---"] * len(COLUMNS))]
    lines += [line(_cells(one)) for one in told]
    return "\n".join([*lines, ""])


COLUMNS = ("run", "became", "verdict", "fullest stage GiB", "of", "request that fails", "right", "cause")


def _cells(one: Judgement) -> list[str]:
    estimate = one.estimate
    assert estimate is not None
    failing = ""
    if estimate.failures:
        stage, failure = estimate.failures[0]
        where = f"{failure.tensor} in {failure.module}, {failure.phase}, stage {stage.stage}"
        failing = f"{failure.moment}: {where}" if failure.tensor else failure.moment
    right = {True: "yes", False: "no", None: "not known"}[one.right]
    cause = CAUSES.get(one.case.id, "" if one.right is not False else "not explained") or one.case.note
    peak, capacity = (f"{size / GIB:,.2f}" for size in (estimate.peak, estimate.capacity or 0))
    return [one.case.id, one.case.became, one.verdict, peak, capacity, failing, right, cause]


def _left_out(found: Iterable[Judgement]) -> Iterator[str]:
    reasons = Counter((one.case.file, one.refused) for one in found if one.estimate is None)
    yield (
        "Not judged: "
        + "; ".join(
            [f"{name}, {count} of {why}" for (name, why), count in sorted(reasons.items())]
            + [f"{name} ({why})" for name, why in OTHERS.items()]
        )
        + "."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="verdicts beside what became of runs")
    parser.add_argument("--measured", type=Path, default=MEASURED, metavar="DIR", help="folder of measured runs")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the page to this file")
    chosen = parser.parse_args(arguments)
    if not chosen.measured.is_dir():
        print(f"skipped: no measured runs in {chosen.measured} (--measured DIR names their folder)")
        return 0
    found = [judged(case) for case in cases(chosen.measured)]
    text = page(found)
    print(text)
    if chosen.markdown is not None:
        chosen.markdown.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
