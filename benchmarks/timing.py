"""Predicted beside measured time of a training step, row by row. Nothing is fitted to a published row; steps of an H200
of our own, which are rows here, gave its watts and one optimizer's kernel (``memplan/search/time/efficiency.py``).

    python benchmarks/timing.py [--measured DIR] [--markdown FILE]

Published tables are in ``published_steps.jsonl``, each row with its source. DIR holds runs that somebody measured,
``../shared/measured`` beside the repository unless said; where it is absent one line says so.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import correlation, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import fms, kernel_times, nvidia  # noqa: E402
from benchmarks.measured import bigscience_plan, plan_of, read_rows  # noqa: E402
from benchmarks.megatron import b200_plan  # noqa: E402
from memplan.layers.work import SOFTMAX, STRIDED, WIDENED, Stream  # noqa: E402
from memplan.plan.count import parameters  # noqa: E402
from memplan.plan.errors import PlanError  # noqa: E402
from memplan.plan.plan import Plan, ResolvedPlan  # noqa: E402
from memplan.plan.resolve import resolve  # noqa: E402
from memplan.search.time import Efficiency, rates_of, step_time  # noqa: E402
from memplan.search.time.efficiency import POWER, default  # noqa: E402
from memplan.search.time.kernels import alone  # noqa: E402
from memplan.search.time.rates import EXPERTS, compared  # noqa: E402
from memplan.search.time.shape import model_flops, shape_of  # noqa: E402

MEASURED = ROOT.parent / "shared" / "measured"
PUBLISHED = Path(__file__).with_name("published_steps.jsonl")

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Timed:
    """One step. Seconds; ``baseline`` is the one-line rule's, where a table has one."""

    id: str
    measured: float
    predicted: float
    baseline: float | None = None
    kind: str = ""
    """What it is a step of (``rates.compared``)."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of one source on one GPU."""

    name: str
    gpu: str
    rows: tuple[Timed, ...]
    note: str = ""

    @property
    def median_error(self) -> float:
        return median(abs(row.error) for row in self.rows)

    @property
    def worst_error(self) -> float:
        return max(abs(row.error) for row in self.rows)

    @property
    def rank_correlation(self) -> float:
        return spearman([row.measured for row in self.rows], [row.predicted for row in self.rows])


def _timed(name: str, measured: float, plan: ResolvedPlan, efficiency: Efficiency | None = None) -> Timed:
    return Timed(name, measured, step_time(plan, efficiency).total, kind=compared(plan))


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; equal values share the mean of their ranks."""
    return correlation(ranks(first), ranks(second))


def ranks(values: Sequence[float]) -> list[float]:
    """From 0, ties in their middle."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


# -- published tables ---------------------------------------------------------------------------------


def published_plan(row: Row) -> Plan:
    """The plan of a published row: Megatron-LM with layers of its own, or as Megatron-Core would run it."""
    flags: dict[str, object] = {
        "framework": "megatron",
        "gpu": row["gpu"],
        "gpus": row["gpus"],
        "tp": row["tp"],
        "pp": row["pp"],
        "mbs": row["micro_batch_size"],
        "gbs": row["global_batch_size"],
        "seq": row["sequence_length"],
        "recompute": row["recompute"],
    }
    if row["vpp"] > 1:
        flags["vpp"] = row["vpp"]
    if row["sequence_parallel"]:
        flags["sequence_parallel"] = "true"
    if "model" in row:
        overlapped = {"zero": 1, "overlap_grad_reduce": "true", "overlap_param_gather": "true"}
        ends = {"count_embedding": "true", "count_loss": "true"}
        job = {"model": row["model"], "dtype": "bf16", "torch": "2.4"}  # of the paper's months
        job["attention_mask_in_dataloader"] = "false"  # documents are masked in the kernel (section 3.2)
        if "cp" in row:
            job |= {"cp": row["cp"], "cp_communication": "all_gather"}
        return resolve(plan_of(None, **job, **flags, **overlapped, **ends))
    h, a = row["hidden"], row["heads"]
    sizes = {"hidden": h, "layers": row["layers"], "heads": a, "kv_heads": a, "head_dim": h // a, "ffn": 4 * h}
    own = {"attention": "eager", "transformer_impl": "local", "dtype": "fp16", "torch": row["torch"]}
    return resolve(plan_of(None, model="gpt3-175b", vocab=row["vocab"], **sizes, **own, **flags))


def published_seconds(row: Row) -> float:
    """As the paper states it, or from its teraFLOP/s by its formula: 96 B s l h^2 (1 + s / 6h + v / 16lh), which
    counts a forward pass again for recompute (arXiv 2104.04473, equation 3).

    Llama 3's paper does not say what its table 4 counts. It is half of causal scores, as far as can be told: with all
    of them the 380 teraFLOP/s of its row with 131,072 tokens, where scores are more than a half, would be 271 of what
    kernels compute, beside 385 and 413 in the rows with 8,192, whose MFU is 3 to 5 points higher."""
    if "step_seconds" in row:
        return float(row["step_seconds"])
    rate = row["teraflops_per_gpu"] * 1e12 * row["gpus"]
    if "model" in row:
        return model_flops(published_plan(row), halves=True) / rate
    h, layers, s, v = row["hidden"], row["layers"], row["sequence_length"], row["vocab"]
    flops = 96 * row["global_batch_size"] * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    return float(flops / rate)


def published(name: str) -> Table:
    """One table of ``published_steps.jsonl``."""
    rows = [row for row in read_rows(PUBLISHED) if row["table"] == name]
    timed = [_timed(row["id"], published_seconds(row), published_plan(row)) for row in rows]
    gpu = next(row["gpu"] for row in rows)
    return Table(name, gpu, tuple(timed))


# -- measured runs ------------------------------------------------------------------------------------

JEAN_ZAY = 40.491e9 / 8 / 8
"""Bytes/s of a GPU's share of its node's Omni-Path links: what four nodes of eight A100 reached in an all-reduce of
February 2022, the month of the trials (bigscience-workshop/bigscience, experiments/bandwidth,
all_reduce_bench-a100-n4.txt: busbw 40.491 Gb/s)."""


def bigscience_timed_plan(row: Row) -> Plan:
    """A trial on that network, whose jobs ran with ``CUDA_LAUNCH_BLOCKING`` because they hung without
    (chronicles-prequel.md, "dealing with JZ hanging on the large model")."""
    plan = resolve(bigscience_plan(row))
    hardware = plan.hardware.model_copy(update={"network": JEAN_ZAY / 1e9})
    return plan.model_copy(update={"hardware": hardware, "environment": {"CUDA_LAUNCH_BLOCKING": "1"}})


def bigscience(rows: Sequence[Row]) -> Table:
    """The trials beside the model and beside constant x parameters x batch / GPUs, whose constant is the median of the
    other rows'."""
    efficiency = replace(default("a100-80gb", (8, 0)), network=1.0)
    plans = [bigscience_timed_plan(row) for row in rows]
    sizes = [_parameters_times_batch(row) for row in rows]
    constants = [row["step_seconds"] / size for row, size in zip(rows, sizes, strict=True)]
    timed = [
        Timed(
            row["id"],
            row["step_seconds"],
            step_time(plan, efficiency).total,
            sizes[at] * median(constants[:at] + constants[at + 1 :]),
            compared(plan),
        )
        for at, (row, plan) in enumerate(zip(rows, plans, strict=True))
    ]
    return Table(
        "bigscience_a100.jsonl",
        "a100-80gb",
        tuple(timed),
        "no row is fitted to, so leaving one out changes nothing",
    )


def trials() -> Table:
    """Further trials of the same days, from the same log: no choice of the model was made for them."""
    rows = [row for row in read_rows(PUBLISHED) if row["table"] == TRIALS]
    return replace(bigscience(rows), name=TRIALS, note="")


def _parameters_times_batch(row: Row) -> float:
    h, gpus = row["hidden_size"], row["tp"] * row["pp"] * row["dp"]
    parameters = 12 * row["layers"] * h * h + row["vocab_size"] * h
    return float(parameters * row["global_batch_size"] / gpus)


def b200(rows: Sequence[Row]) -> list[Table]:
    """Those of the dense model, in sequences of 4,096 and, with context parallelism, of 32,768; DeepSeek V2's apart."""
    timed = [_timed(row["id"], row["step_ms"] / 1e3, resolve(b200_plan(row))) for row in rows]
    apart = {"b200": [one for one in timed if one.kind != EXPERTS]}
    apart["b200 in 16 bits with experts"] = [one for one in timed if one.kind == EXPERTS]
    return [Table("megatron_b200.jsonl", name, tuple(of)) for name, of in apart.items()]


def grand_teton() -> Efficiency:
    """Meta's H100 with 96 GB: HBM2e of 2.4 TB/s, where the GPU table's (of GH200) has 4 (pytorch/torchtitan,
    docs/performance.md), and a power limit of 500 W instead of 700 W, of which they keep as far below."""
    usual = default("h100-80gb", (9, 0))
    return replace(usual, memory=usual.memory * 2.4 / 4.0, power=POWER._replace(limit=POWER.limit * 500 / 700))


def torchtitan(rows: Sequence[Row]) -> Table:
    """Tokens per second and GPU, turned into seconds."""
    timed = []
    for row in rows:
        gpus, b, s = row["gpus"], row["local_batch_size"], row["sequence_length"]
        flags = {"model": "llama-3-8b", "framework": "fsdp", "fsdp_code": "torchtitan", "dtype": "bf16"}
        sizes = {"gpus": gpus, "mbs": b, "gbs": b * gpus, "seq": s, "compile": str(row["compile"]).lower()}
        job = {"recompute_per_operator": "true", "gpu": "h100-96gb", "torch": "2.6"}
        plan = resolve(plan_of(None, **job, **flags, **sizes))
        measured = b * s / row["tokens_per_second_per_gpu"]
        timed.append(_timed(row["id"], measured, plan, grand_teton()))
    return Table("torchtitan_h100.jsonl", "h100-96gb", tuple(timed), "GPUs limited to 500 W")


MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}
"""Hidden size, heads and layers (llm-foundry, scripts/train/yamls/pretrain)."""


LARGE = "Large Scale"
"""In the name of a table: llm-foundry's second sweep, of January 2024."""


def mpt_plan(row: Row) -> Plan:
    """An MPT as the GPT-2 that it is, but for its activation, which is one kernel, and dropout: none. Rows under
    ``PURE`` precision are of May 2023 (PyTorch 1.13), the others of October and of January 2024 (2.1; some of October's
    on H100 may have run 2.0.1: mosaicml/llm-foundry, pull request 543, named that image first).

    FlashAttention 1 in Triton (``attn_impl: triton``), gathers behind gradients (Composer's default,
    ``BACKWARD_POST``); in the large sweep ``flash`` (flash-attn 2.4) but for 13b and 30b, and ``BACKWARD_PRE``
    (scripts/train/benchmarking/sweep.py). Gradients are reduced in fp32 there: so says Composer's ``DEFAULT``
    (``get_mixed_precision``) from 0.16.4 of 11 October 2023 on, and llm-foundry asked for 0.17.2 in January. Before, it
    gave FSDP no ``reduce_dtype``, which then is ``param_dtype`` (``MixedPrecision``'s docstring); the first sweep ran
    llm-foundry 0.3.0 of September (``submit_benchmarks.py``), whose Composer is 0.16.3 or later. The loss is
    flash-attn's (``ComposerMPTCausalLM``, ``loss_fn``: ``fused_crossentropy``), of which Liger's has the bytes."""
    h, heads, layers = MPT[row["Model"]]
    b, gpus, s = int(row["MicroBatchSize"]), int(row["# GPUs"]), int(row["SeqLen (T)"])
    large = LARGE in row["table"]
    sizes = {"hidden": h, "heads": heads, "kv_heads": heads, "head_dim": h // heads, "ffn": 4 * h, "layers": layers}
    none = dict.fromkeys(("embedding_dropout", "attention_dropout", "hidden_dropout"), 0)
    flags: dict[str, object] = {
        "attention": "flash_attention_2" if large and row["Model"] not in ("13b", "30b") else "sdpa",
        "fsdp_reduce": "fp32" if large else "bf16",
        "loss": "liger-cross-entropy",
        "recompute": "full" if row["Activation Checkpointing"] == "True" else "none",
        "fsdp_backward_prefetch": "pre" if large else "post",
        "reshard_after_forward": str(row["Sharding Strategy"] == "FULL_SHARD").lower(),
        "torch": "1.13" if row["MP Mode"] == "PURE" else "2.1",
    }
    run = {
        "gpu": row["GPU"].replace("_", "-"),
        "gpus": gpus,
        "mbs": b,
        "gbs": b * gpus * int(row["GradAccum"]),
        "seq": s,
    }
    job = {"model": "gpt2", "framework": "fsdp", "dtype": "bf16", "activation": "gelu", "vocab": 50368}
    return plan_of(None, positions_max=s, capacity="900GiB", **job, **sizes, **none, **run, **flags)


def composer(plan: ResolvedPlan) -> float:
    """Seconds a step of what llm-foundry and Composer run otherwise than the plan says, or beside it:

    - the loss reads logits in bf16 (``ComposerMPTCausalLM.loss``), where transformers' GPT-2 casts them to fp32: twice
      forward, and in backward it reads them and writes their gradient (flash-attn's ``xentropy``);
    - metrics of training: after each micro-batch the cross entropy twice more, in PyTorch (``train_metrics``:
      ``LanguageCrossEntropy`` and ``LanguagePerplexity``; Composer's ``Trainer._eval_train_metrics``), under autocast:
      ``cross_entropy_loss`` tells ``log_softmax`` the dtype of the logits, so that it stays in bf16, and its result is
      cast for ``nll_loss`` (``LossNLL.cpp``; ``fp32_set_opt_dtype`` of ``autocast_mode.h``);
    - gradients are clipped (``gradient_clipping`` of scripts/train/yamls/pretrain): read, and multiplied in place;
    - ``attn_impl: flash`` copies queries, keys and values of every layer into sequences without padding, and the
      context back (flash-attn's ``bert_padding``), by kernels that compute an index for each element."""
    rates, entries, tokens = rates_of(plan), shape_of(plan).entries, plan.batch.mbs * plan.batch.seq
    logits, features = tokens * plan.model.vocab, tokens * plan.model.hidden

    def spent(*kernels: Stream) -> float:
        return sum(alone(one, rates) for one in kernels)

    head = (*entries.head.forward, *entries.head.backward)
    upcast = sum(times * spent(one) for one, times in head if isinstance(one, Stream) and one.loss)
    loss = spent(*[Stream(4 * logits, loss=True)] * 2)
    metric = spent(Stream(8 * logits, 1, True, SOFTMAX.of(logits)), Stream(6 * logits, 1, True, WIDENED.of(logits)))
    copies = 0.0
    if plan.attention == "flash_attention_2":
        copied, zeroed = Stream(4 * features, issue=STRIDED.of(features)), Stream(2 * features)
        forward, backward = spent(*[copied] * 4, zeroed), spent(*[copied] * 4, *[zeroed] * 3)
        copies = plan.model.layers * (forward * (2 if plan.recompute.mode == "full" else 1) + backward)
    owned = parameters(plan.model) / (plan.layout.dp or 1)
    return plan.microbatches * (loss - upcast + 2 * metric + copies) + spent(Stream(12 * owned))


def foundry(rows: Sequence[Row]) -> list[Table]:
    """Seconds of a step from tokens a second; where the last micro-batch is smaller than the others, as if all were."""
    by_gpu: dict[str, list[Timed]] = {}
    for row in rows:
        plan, batch = resolve(mpt_plan(row)), int(row["GlobalBatchSize"])
        measured = batch * plan.batch.seq / float(row["Throughput (T/s)"])
        predicted = (step_time(plan).total + composer(plan)) * batch / plan.batch.gbs
        one = Timed(row["id"], measured, predicted, kind=compared(plan))
        by_gpu.setdefault(row["GPU"].replace("_", "-"), []).append(one)
    return [Table("llm_foundry_throughput.jsonl", gpu, tuple(timed)) for gpu, timed in by_gpu.items()]


def finetuning(rows: Sequence[Row]) -> list[Table]:
    """All runs that say how fast they were: Mistral 7B and Mixtral 8x7B, full, with LoRA, and with LoRA on 4-bit
    weights of bitsandbytes and GPTQ, with and without fused kernels; experts apart."""
    timed: dict[str, list[Timed]] = {}
    for row in rows:
        if row.get("outcome") or not row.get("train_tokens_per_second"):
            continue
        plan = resolve(fms.plan_of(row))
        parts = [" with experts" if plan.model.experts else "", " with adapters" if row["peft_method"] else ""]
        measured = plan.batch.mbs * plan.batch.seq / row["train_tokens_per_second"]
        timed.setdefault(f"a100-80gb{''.join(parts)}", []).append(_timed(row["id"], measured, plan))
    return [Table(fms.NAME, name, tuple(of)) for name, of in timed.items()]


def throughput(rows: Sequence[Row]) -> list[Table]:
    """NVIDIA's published rows that are modelled, by GPU: apart from dense steps in 16 bits."""
    by_gpu: dict[str, list[Timed]] = {}
    refused: Counter[str] = Counter()
    for row in rows:
        gpu = nvidia.gpu_of(row)
        try:
            one = _timed(nvidia.short(row), nvidia.seconds_of(row), resolve(nvidia.plan_of_row(row)))
        except PlanError:
            refused[gpu] += 1
            continue
        by_gpu.setdefault(gpu, []).append(one)
    return [
        Table(nvidia.NAME, f"{gpu} in low precision or with experts", tuple(timed), f"{refused[gpu]} not modelled")
        for gpu, timed in by_gpu.items()
    ]


READERS: Mapping[str, Callable[[Sequence[Row]], Table | list[Table]]] = {
    "bigscience_a100.jsonl": bigscience,
    "megatron_b200.jsonl": b200,
    "torchtitan_h100.jsonl": torchtitan,
    fms.NAME: finetuning,
    "llm_foundry_throughput.jsonl": foundry,
    nvidia.NAME: throughput,
}
TRIALS = "bigscience-trials-february-2022"
PAPERS = ("arxiv-2205.05198-table-5", "arxiv-2104.04473-table-1", "arxiv-2407.21783-table-4")


def own() -> list[Table]:
    """Steps of ``memplan validate`` on an H200 (``records``), those with adapters apart."""
    by: dict[str, list[Timed]] = {}
    for name, spent, plan in kernel_times.steps():
        gpu = "h200" if plan.lora.rank is None else "h200 with adapters"
        by.setdefault(gpu, []).append(_timed(name, spent, plan))
    return [Table("records", gpu, tuple(timed)) for gpu, timed in by.items()]


# -- print --------------------------------------------------------------------------------------------


def lines(table: Table) -> list[str]:
    """A line for each row, and a summary."""
    printed = []
    for row in table.rows:
        rule = "" if row.baseline is None else f"  one-line rule {row.baseline:9.3f} s"
        printed.append(
            f"{row.id:52s} measured {row.measured:9.3f} s  predicted {row.predicted:9.3f} s  {row.error:+7.1%}{rule}"
        )
    return [*printed, summary(table)]


def summary(table: Table) -> str:
    text = f"median error {table.median_error:.1%}, worst {table.worst_error:.1%}"
    if len(table.rows) > 2:
        text += f", rank correlation {table.rank_correlation:.3f}"
    rules = [Timed(row.id, row.measured, row.baseline) for row in table.rows if row.baseline is not None]
    if rules:
        rule = Table("", table.gpu, tuple(rules))
        text += f"; one-line rule {rule.median_error:.1%}, {rule.rank_correlation:.3f}"
    return f"{text} ({table.note})" if table.note else text


def by_hardware(tables: Sequence[Table]) -> list[Table]:
    """All rows of a GPU."""
    rows: dict[str, tuple[Timed, ...]] = {}
    for table in tables:
        rows[table.gpu] = (*rows.get(table.gpu, ()), *table.rows)
    return [Table(gpu, gpu, of) for gpu, of in sorted(rows.items())]


def by_kind(tables: Sequence[Table]) -> list[Table]:
    """All rows of a kind on one GPU; of experts and hybrids on all of them, which a search shows for each."""
    rows: dict[tuple[str, str], tuple[Timed, ...]] = {}
    for table in tables:
        for row in table.rows:
            key = row.kind, "all" if row.kind == EXPERTS else table.gpu.split()[0]
            rows[key] = (*rows.get(key, ()), row)
    return [Table(kind, gpu, of) for (kind, gpu), of in sorted(rows.items()) if len(of) > 1]


def markdown(tables: Sequence[Table]) -> str:
    """The same as tables."""
    parts = ["| GPU | steps | median error | worst | rank correlation |\n| --- | ---: | ---: | ---: | ---: |"]
    for table in by_hardware(tables):
        rank = f"{table.rank_correlation:.3f}" if len(table.rows) > 2 else "–"
        parts[0] += (
            f"\n| {table.gpu} | {len(table.rows)} | {table.median_error:.1%} | {table.worst_error:.1%} | {rank} |"
        )
    parts[0] += "\n"
    parts.append("| steps of | GPU | steps | median error | worst |\n| --- | --- | ---: | ---: | ---: |")
    for table in by_kind(tables):
        parts[1] += (
            f"\n| {table.name} | {table.gpu} | {len(table.rows)} | {table.median_error:.1%} | {table.worst_error:.1%} |"
        )
    parts[1] += "\n"
    for table in tables:
        body = "\n".join(
            f"| {row.id} | {row.measured:,.3f} | {row.predicted:,.3f} | {row.error:+.1%} |" for row in table.rows
        )
        parts.append(
            f"**{table.name}** ({table.gpu}): {summary(table)}.\n\n| step | measured (s) | predicted (s) | error |\n"
            f"| --- | ---: | ---: | ---: |\n{body}\n"
        )
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="predicted beside measured time of a step")
    parser.add_argument("--measured", type=Path, default=MEASURED, metavar="DIR", help="folder of measured runs")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables to this file")
    chosen = parser.parse_args(arguments)
    tables = [*(published(name) for name in PAPERS), trials(), *own()]
    if chosen.measured.is_dir():
        found = [(name, chosen.measured / name) for name in READERS]
        for name, path in found:
            if path.exists():
                read = READERS[name](read_rows(path))
                tables += read if isinstance(read, list) else [read]
    else:
        print(f"skipped: no measured runs in {chosen.measured} (--measured DIR names their folder)")
    for table in tables:
        print(f"\n{table.name}, {table.gpu}", *lines(table), sep="\n  ")
    print()
    for table in by_hardware(tables):
        print(f"{table.gpu}: {len(table.rows)} steps, {summary(table)}")
    if chosen.markdown is not None:
        chosen.markdown.write_text(markdown(tables), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
