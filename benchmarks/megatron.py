"""Megatron-Core's measured runs: NVIDIA's functional tests, and eight B200.

Each run's plan is read from its own launch arguments, as ``memplan estimate --from megatron`` reads them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from json import dumps
from statistics import median
from typing import Any

from memplan.estimate import estimate
from memplan.formats.megatron.context import Family
from memplan.frameworks.megatron import programs
from memplan.frameworks.megatron.modules import stage_entries
from memplan.layers.module import Options
from memplan.plan.plan import Plan, ResolvedPlan
from memplan.plan.resolve import resolve
from memplan.result import Estimate, StageEstimate
from memplan.tape.events import Category
from memplan.tape.program import static

from .arguments import plan_of_arguments
from .comparison import MIB, Comparison, Table, near

Row = Mapping[str, Any]

# -- functional tests ---------------------------------------------------------------------------------

STATIC, PEAK = "between iterations", "peak allocated"
LIMITS = {STATIC: (0.005, 32 * MIB), PEAK: (0.015, 64 * MIB)}
"""Share of the measured figure, or bytes, whichever is more."""

TORCH = "2.11"
"""Nothing records it: five of six GB200 rows without CUBLAS_WORKSPACE_CONFIG show workspaces as before 2.12, the
sixth as since, so golden values of two containers stand side by side (``docker/Dockerfile.ci.dev`` says 26.06)."""

TRANSFORMER_ENGINE = "2.17.1"
"""As ``uv.lock`` of that Megatron-LM pins it."""

BERT_VOCABULARY = 30_522
"""Lines of ``vocab.txt``, that of bert-base-uncased and bert-large-uncased; the rows do not say."""

KINDS: tuple[Family, ...] = ("bert", "t5", "hybrid")
"""Models of their own, which begin the ids of rows."""

GPUS = {"H100 80GB": "h100-80gb", "GB200": "gb200"}

FAMILIES = {
    "BERT": r"^bert/",
    "T5": r"^t5/",
    "hybrids": r"^(hybrid|nemotron)/",
    "7B": r"gpt3_7b",
    "Megatron-FSDP": r"zp_z3",
    "local layers": r"gpt3_mcore_tp",
    "one stage": r"te_tp1_pp1",
    "two stages, rotary": r"te_tp1_pp2",
    "virtual stages": r"te_tp1_pp4_vp1",
    "four stages": r"te_tp1_pp4_resume",
    "tp 2, optimizer instances": r"te_tp2_pp1",
    "tp 2, fused loss": r"te_tp2_pp2",
    "tp 4": r"te_tp4",
}
EXPERTS = "experts"
"""The group of rows with experts, whose peaks depend on where tokens went, too."""

"""Groups of rows that share what is special about them, by their ids."""

NOT_MODELLED: tuple[tuple[str, Callable[[Row], bool]], ...] = (
    ("elastic hybrids", lambda row: "--flextron" in row["arguments"]),
)
"""Why a row is not estimated, first match."""


def why_not(row: Row) -> str | None:
    return next((name for name, applies in NOT_MODELLED if applies(row)), None)


def family_of(row_id: str) -> str:
    if row_id.startswith("moe/"):
        return EXPERTS
    return next(name for name, pattern in FAMILIES.items() if re.search(pattern, row_id))


SHARDED = "--use-megatron-fsdp"
MAIN_GRADIENTS = {"--megatron-fsdp-main-grads-dtype": "fp32"}
"""Of Megatron-FSDP's rows that do not say it: their gradients are in fp32, as before that argument (2 March 2026)."""


def ci_plan(row: Row, torch: str = TORCH) -> ResolvedPlan:
    """The plan of one functional test, from its arguments and environment."""
    arguments = row["arguments"]
    family: Family = next((known for known in KINDS if row["id"].startswith(f"{known}/")), "gpt")
    family = "hybrid" if "--hybrid-layer-pattern" in arguments else family
    read = plan_of_arguments(
        {**MAIN_GRADIENTS, **arguments} if SHARDED in arguments else arguments,
        row["environment"],
        gpus=row["world_size"],
        family=family,
        vocabulary=BERT_VOCABULARY if family == "bert" else row["tokenizer"]["vocab_size"],
        flags={"gpu": GPUS[row["hardware"]], "torch": torch, "te-version": TRANSFORMER_ENGINE},
    )
    return resolve(read.plan)


def ci(rows: Sequence[Row]) -> Table:
    """Static memory and peak of the last rank."""
    modelled = [row for row in rows if why_not(row) is None]
    left = Counter(f"{why_not(row)} on {row['hardware']}" for row in rows if why_not(row) is not None)
    compared = tuple(comparison for row in modelled for comparison in _ci(row, modelled))
    return Table(
        "megatron_lm_ci.jsonl",
        "allocated by the last rank of Megatron-LM's functional tests, between iterations and at the peak",
        "NVIDIA/Megatron-LM, tests/functional_tests, of August 2026; recipes: that Megatron-Core, Transformer Engine "
        "2.17",
        "0.5 % or 32 MiB (between iterations), 1.5 % or 64 MiB (peak)",
        compared,
        tuple(f"{count} rows ({name})" for name, count in left.items()),
        (
            _by_reading(compared),
            _families(compared),
            "What was chosen with rows in view: PyTorch 2.11, before 2.12 gave Blackwell a larger cuBLAS workspace (of "
            "six GB200 rows without CUBLAS_WORKSPACE_CONFIG five show the smaller one, one the larger; two families "
            f"have them, so either without the other says the same), and BERT's vocabulary (30,522, which the rows "
            f"leave open). {_without_the_choice(modelled)} Transformer Engine's version is that of the lock file. No "
            "constant is fitted, so a family that is left out is estimated as it is here: its line above is the "
            "held-out figure.",
            _contradictions(modelled),
            "Megatron-FSDP's rows are 25 to 29 MiB high between iterations: since 30 May 2026 what no layer has stays "
            "gathered (25.6 MiB), and their golden values look older. Rows without --megatron-fsdp-main-grads-dtype "
            "are taken to be older than it (2 March 2026), with gradients in fp32: chosen with the rows in view.",
            "Golden values are of different months, as the history of their files says: the row of memory_speed of 14"
            " January 2026 (PyTorch's container 25.11, Transformer Engine 2.11, which would change nothing here), "
            "expert rows of 7 May (26.04), those on eight GB200 of 8 July (26.06). The container is not what makes "
            "these three high: a Muon row on one node is of 26.06, too, and 1.3 % low, as its twins of 26.04. All "
            "three are alike in the first iteration, whose routers are untrained, with three optimizers: of the mean,"
            " the last rank's experts got 0.65 to 0.67 there, if nothing else differs, 0.94 on eight H100, and 1.02 "
            "to 1.03 on four GB200 with two experts each. Routing does that: in six such models with random weights, "
            "on tokens by Zipf's law, an expert gets 0.56 to 1.38 of the mean in all layers together (standard "
            "deviation 0.20). Weights are not the same on both GPUs, for PyTorch's normal_ draws by the number of "
            "multiprocessors (aten/src/ATen/native/cuda/DistributionTemplates.h, calc_execution_policy). The last "
            "rank of memory_speed would have 1.19 of the mean in the first iteration (eight such models: 0.69 to "
            "1.26), and 1.83 at its peak, with a loss of 1e-4 to balance experts. Megatron-FSDP's two rows of "
            "top2router have their states, and their peak, from the first iteration on, as its dense runs have to the "
            "byte: those of a checkpoint. If nothing else differs, the last rank got 1.13 (H100) and 1.20 (GB200) of "
            "the mean there, and that of deepseek_proxy 1.04 to 1.15: a peak is the most of all iterations so far "
            "(training.py never resets it), so that routing which varies about the mean reads above it.",
            "Hybrids: one row is not estimated, of an elastic model (--flextron), whose router slices layers. In "
            "the first iteration Triton's autotuner holds 256 MiB beside each Mamba kernel that it times, which no "
            "estimate has: it ends before there are optimizer states.",
            "Fine-grained offloading: copies to the host are taken to keep up with the layers, which was chosen after "
            "its one row was seen (with blocks free as soon as they are sent it is 11 % low), and so were what a CUDA "
            "graph keeps of gradients and workspaces of streams with the rows of graphs. A graph of attention alone is "
            "captured before the first iteration, which is its row's peak.",
        ),
    )


def _ci(row: Row, rows: Sequence[Row]) -> Iterator[Comparison]:
    plan = ci_plan(row)
    last, fewer = estimated(plan).stages[-1], _fewer(plan)
    assert last.allocated is not None
    for reading, key, size in (
        (STATIC, "allocated_bytes", last.static - fewer),
        (PEAK, "peak_allocated_bytes", max(last.allocated - fewer, _captured(plan, last))),
    ):
        measured = row[key]
        within = near(measured, size, *LIMITS[reading])
        cause = "" if within else _cause(row, rows, key, size)
        yield Comparison(row["id"], reading, measured, size, within, cause)


def _captured(plan: ResolvedPlan, stage: StageEstimate) -> int:
    """Bytes while CUDA graphs are captured before the first iteration, or behind it."""
    given = plan.megatron
    first = given.cuda_graphs == "local" or (given.cuda_graphs != "none" and not given.cuda_graph_warmup)
    return stage.moments["initialisation"] or 0 if first else 0


@lru_cache(maxsize=256)
def _estimated(plan: str) -> Estimate:
    return estimate(Plan.model_validate_json(plan))


def estimated(plan: Plan) -> Estimate:
    """The estimate; rows with equal plans share one."""
    return _estimated(plan.model_dump_json())


def _without_the_choice(rows: Sequence[Row]) -> str:
    """How the rows that depend on it would stand with the newest PyTorch."""
    within = 0
    for row in rows:
        static = estimated(ci_plan(row, "2.13")).stages[-1].static
        within += near(row["allocated_bytes"], static, *LIMITS[STATIC])
    return f"With PyTorch 2.13 for all rows {within} of {len(rows)} are within the limit between iterations."


def _cause(row: Row, rows: Sequence[Row], key: str, size: int) -> str:
    """Whether the newer PyTorch, or a rerun of the same configuration, is nearer."""
    stage = estimated(ci_plan(row, "2.13")).stages[-1]
    reading, newer = (STATIC, stage.static) if key == "allocated_bytes" else (PEAK, stage.allocated or 0)
    if near(row[key], newer, *LIMITS[reading]):
        error = (newer - row[key]) / MIB
        return f"cuBLAS workspaces of PyTorch 2.12 or later: with 2.13 it is {error:+,.1f} MiB"
    if key == "peak_allocated_bytes" and family_of(row["id"]) == EXPERTS:
        return _routed(row, size)
    twins = [other[key] for other in rows if other is not row and _same_job(row, other)]
    nearer = [twin for twin in twins if abs(twin - size) < abs(row[key] - size)]
    if nearer:
        return f"a rerun of the same job shows {nearer[0] / MIB:,.1f} MiB; not explained"
    return "not explained"


def _routed(row: Row, size: int) -> str:
    """How far off the first iteration is, whose routers are untrained; states come behind it, unless a checkpoint of
    Megatron-FSDP's format was loaded (``sharded_param_state_fsdp_dtensor``, ``is_loading``): its dense runs have the
    same peak in their first and in their last iteration, to the byte."""
    plan = ci_plan(row)
    states = estimated(plan).stages[-1].breakdown[Category.OPTIMIZER_STATES] - _fewer(plan)  # as ``size`` is
    untrained = "balanced experts are estimated, and where tokens go is not recorded"
    if "--use-megatron-fsdp" in row["arguments"] and "_resume_" in row["id"]:
        return f"{untrained}; the first iteration has states and needs as much: trained routers of a checkpoint"
    measured, first = row["first_iteration_peak_bytes"], size - states
    error = 100 * (first - measured) / measured
    if near(measured, first, *LIMITS[PEAK]):
        return f"{untrained}; before its routers are trained, in the first iteration, it is {error:+.1f} % off"
    return f"{untrained}; already in the first iteration it is {error:+.1f} % off; not explained further"


def _fewer(plan: ResolvedPlan) -> int:
    """Bytes of states that the last rank has less than the one with most, where Muon's whole parameters are dealt out
    to ranks: one of them has the embedding's."""
    if plan.optimizer.name != "muon" or not plan.layout.zero:
        return 0
    made, entries = programs.stages_of(plan, Options()), stage_entries(plan)
    most, last = (
        static(replace(made, rules=replace(made.rules, member=member)).program(len(entries) - 1, entries[-1]))
        for member in (None, -1)
    )
    return most.net - last.net


IRRELEVANT = ("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-args", "--no-mmap-bin-files", "--fim-data")
"""Arguments in which runs of one job differ."""


def _job(row: Row) -> str:
    arguments = {
        name: value
        for name, value in row["arguments"].items()
        if name not in IRRELEVANT and not name.startswith(("--fim-", "--ckpt", "--no-ckpt"))
    }
    return dumps([row["hardware"], row["world_size"], arguments, row["environment"]], sort_keys=True)


def _same_job(one: Row, other: Row) -> bool:
    return _job(one) == _job(other)


def _contradictions(rows: Sequence[Row]) -> str:
    """Runs of one job on one hardware that differ."""
    jobs: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        jobs[_job(row)].append(row)
    found = []
    for runs in jobs.values():
        spreads = [
            max(run[key] for run in runs) - min(run[key] for run in runs)
            for key in ("allocated_bytes", "peak_allocated_bytes")
        ]
        if max(spreads) >= MIB:
            names = ", ".join(run["id"] for run in runs)
            found.append(
                f"{names}: {spreads[0] / MIB:,.1f} MiB between iterations, {spreads[1] / MIB:,.1f} at the peak"
            )
    if not found:
        return "No two runs of one job differ by 1 MiB or more."
    return "Runs of one job that differ from one another by 1 MiB or more: " + "; ".join(found) + "."


def _by_reading(rows: Sequence[Comparison]) -> str:
    lines = []
    for reading in (STATIC, PEAK):
        chosen = [row for row in rows if row.reading == reading]
        within = sum(bool(row.within) for row in chosen)
        middle = median(abs(row.percent) for row in chosen)
        lines.append(
            f"{reading}: {within} of {len(chosen)} ({100 * within / len(chosen):.1f} %), median |error| {middle:.3f} %"
        )
    return "By reading: " + "; ".join(lines) + "."


def _families(rows: Sequence[Comparison]) -> str:
    """Leave one family out: its own figures, and those of the others without it."""
    lines = []
    for name in (*FAMILIES, EXPERTS):
        parts = []
        for reading in (STATIC, PEAK):
            chosen = [row for row in rows if row.reading == reading]
            held = [row for row in chosen if family_of(row.id) == name]
            others = [row for row in chosen if family_of(row.id) != name]
            if held:
                parts.append(
                    f"{reading} {sum(bool(row.within) for row in held)} of {len(held)}, "
                    f"median {median(abs(row.percent) for row in held):.2f} % "
                    f"(the others {100 * sum(bool(row.within) for row in others) / len(others):.1f} %)"
                )
        lines.append(f"{name}: {', '.join(parts)}")
    return "Leaving one family out: " + "; ".join(lines) + "."


# -- eight B200 ---------------------------------------------------------------------------------------

DEEPSEEK: Mapping[str, object] = {
    "--num-layers": 4, "--hidden-size": 5120, "--ffn-hidden-size": 12288, "--num-attention-heads": 128,
    "--max-position-embeddings": 4096, "--vocab-size": 102401, "--num-experts": 160, "--moe-router-topk": 6,
    "--moe-router-score-function": "softmax", "--moe-router-pre-softmax": True, "--moe-router-group-topk": 3,
    "--moe-router-topk-scaling-factor": 16, "--moe-router-load-balancing-type": ["seq_aux_loss"],
    "--moe-aux-loss-coeff": [3e-3], "--moe-expert-capacity-factor": 1, "--moe-pad-expert-input-to-capacity": True,
    "--moe-ffn-hidden-size": 1536, "--moe-shared-expert-intermediate-size": 3072, "--moe-layer-freq": "([0]*1+[1]*3)*1",
    "--moe-token-dispatcher-type": "alltoall", "--moe-grouped-gemm": True, "--moe-permute-fusion": True,
    "--multi-latent-attention": True, "--qk-layernorm": True, "--q-lora-rank": 1536, "--kv-lora-rank": 512,
    "--qk-head-dim": 128, "--qk-pos-emb-head-dim": 64, "--v-head-dim": 128,
}  # fmt: skip
"""Arguments of SimuMax's ``run_pretrain_deepseekv2.sh`` beside those of the other script. It ran Megatron-Core 0.14."""

B200_SCRIPT: Mapping[str, object] = {
    "--num-layers": 12, "--hidden-size": 8192, "--ffn-hidden-size": 28672, "--num-attention-heads": 64,
    "--group-query-attention": True, "--num-query-groups": 8, "--max-position-embeddings": 4096,
    "--attention-dropout": 0.0, "--hidden-dropout": 0.0, "--disable-bias-linear": True,
    "--position-embedding-type": "rope", "--swiglu": True, "--normalization": "RMSNorm",
    "--untie-embeddings-and-output-weights": True, "--vocab-size": 128257, "--no-bias-dropout-fusion": True,
    "--use-distributed-optimizer": True, "--use-flash-attn": True, "--sequence-parallel": True, "--bf16": True,
    "--attention-softmax-in-fp32": True, "--no-masked-softmax-fusion": True,
    "--accumulate-allreduce-grads-in-fp32": True, "--tokenizer-type": "NullTokenizer",
    "--no-create-attention-mask-in-dataloader": True, "--cross-entropy-loss-fusion": True,
    "--cross-entropy-fusion-impl": "te", "--transformer-impl": "transformer_engine",
}  # fmt: skip
"""Arguments of SimuMax's ``run_pretrain_llama3.sh`` that all four runs share. It says 128,256 tokens, to which
NullTokenizer of that time (until 2025) added one."""


def b200_plan(row: Row) -> Plan:
    """The plan of one run of llama3-70b cut to 12 layers, or of DeepSeek-V2 cut to 4. PyTorch 2.10 and TE 2.11 are the
    benchmark's own."""
    match = re.fullmatch(r"tp(\d+)(?:cp(\d+))?(?:ep(\d+))?pp(\d+)", row["parallel"])
    assert match is not None
    tp, cp, ep, pp = (int(size or 0) for size in match.groups())
    script = {**B200_SCRIPT, **DEEPSEEK, "--expert-model-parallel-size": ep, "--moe-router-num-groups": ep}
    for name in ("--group-query-attention", "--num-query-groups"):
        del script[name]
    dp = row["gpus"] // tp // pp // (cp or 1)
    context = {"--context-parallel-size": cp, "--cp-comm-type": "a2a"} if cp else {}
    read = plan_of_arguments(
        {
            **(script if ep else B200_SCRIPT),
            "--tensor-model-parallel-size": tp,
            "--pipeline-model-parallel-size": pp,
            **context,
            "--seq-length": row["sequence_length"],
            "--micro-batch-size": row["micro_batch_size"],
            "--global-batch-size": row["micro_batch_size"] * row["microbatches"] * dp,
        },
        {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        gpus=row["gpus"],
        flags={"gpu": "b200", "torch": "2.10", "te-version": "2.11", **({"megatron-core": "0.14"} if ep else {})},
    )
    return resolve(read.plan)


def b200(rows: Sequence[Row]) -> Table:
    """Every rank's allocated and reserved memory."""
    compared = tuple(comparison for row in rows for comparison in _b200(row))
    errors = [abs(row.percent) for row in compared if row.reading.startswith("allocated")]
    return Table(
        "megatron_b200.jsonl",
        "peak allocated and reserved by every rank of Megatron-Core on 8 B200",
        "SimuMax 1.2's public benchmark (MooreThreads/SimuMax, docs/b200; PyTorch 2.10, Transformer Engine 2.11)",
        "0.4 % (allocated)",
        compared,
        (),
        (
            f"Allocated, {len(errors)} ranks: mean |error| {sum(errors) / len(errors):.4f} %, "
            f"worst {max(errors):.4f} %. "
            "SimuMax's own estimate is off by 0.17 to 0.74 % on these runs.",
            "Of the distributed optimizer's shards the largest is estimated, so ranks with a smaller one show less. "
            "Reserved is stated beside the measured: it depends on the order of allocations on side streams.",
            "Arguments are those of the benchmark's launch script, which has context parallelism by a2a; NullTokenizer "
            "of that time adds one to its 128,256 tokens.",
        ),
    )


def _b200(row: Row) -> Iterator[Comparison]:
    stages = estimated(b200_plan(row)).stages
    per_stage = len(row["per_rank_mib"]) // len(stages)
    for rank in row["per_rank_mib"]:
        stage = stages[rank["rank"] // per_stage]
        assert stage.allocated is not None
        assert stage.reserved is not None
        measured = int(rank["peak_allocated"] * MIB)
        yield Comparison(
            row["id"],
            f"allocated, rank {rank['rank']}",
            measured,
            stage.allocated,
            near(measured, stage.allocated, 0.004),
        )
        yield Comparison(row["id"], f"reserved, rank {rank['rank']}", int(rank["peak_reserved"] * MIB), stage.reserved)
