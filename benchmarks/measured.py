"""The files of measurements, each read into a table of comparisons.

Every function takes the rows of one file (one JSON object each) and estimates them with memplan.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memplan.device.contexts import context_causes
from memplan.estimate import estimate, programs_of
from memplan.layers.autograd import Recorder, Tensor
from memplan.layers.megatron import ParallelShape, layer
from memplan.layers.module import Interface, Module, Options, Run, build
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.plan.spec import ModelSpec
from memplan.tape.program import Program, fold_program

from . import fms, megatron, moonlight
from .comparison import GIB, MIB, Comparison, Table, near

Row = Mapping[str, Any]


def plan_of(source: str | None, /, **flags: object) -> Plan:
    """A plan from flags, with hyphens for underscores."""
    return read_plan(source, {name.replace("_", "-"): str(value) for name, value in flags.items()}).plan


# -- training steps traced on fake tensors ------------------------------------------------------------

MODELS = {
    "gpt2-xl": "gpt2-xl",
    "gpt2-xl-ckpt": "gpt2-xl",
    "gpt2-xl-bf16": "gpt2-xl",
    "llama3-8b-L8": "llama-3-8b",
    "llama3-8b-L8-eager": "llama-3-8b",
    "bert-5.1b": "bert-5.1b",
}
DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16"}
TRACED_LIMIT = 0.002


def traced(rows: Sequence[Row]) -> Table:
    """Live bytes at named points of a step of Hugging Face transformers."""
    single = [row for row in rows if "fsdp" not in row]
    sharded = [row for row in rows if "fsdp" in row]
    return Table(
        "traced_transformers_5_23.jsonl",
        "requested bytes at four points of a training step on fake tensors (no kernel's own workspaces)",
        "transformers 5.23 on PyTorch 2.13, fake tensors with CUDA's dropout and flash-attention operators; "
        "recipes: transformers' modeling files and PyTorch's derivatives.yaml",
        "0.2 %",
        tuple(comparison for row in (*single, *sharded) for comparison in _traced(row)),
        (),
        (
            "Fake tensors, being a subclass, never add a second gradient in place as CUDA tensors do "
            "(input_buffer.cpp, can_accumulate_inplace), so these estimates are made with "
            "`Options(accumulates_in_place=False)`. " + _on_cuda(single),
            "Causes by name; each accounts for its difference to the byte. *steps*: the trace runs on fake CPU tensors "
            "and counts AdamW's step counters, one scalar of 512 B for each parameter tensor; on a GPU they stay in "
            "host memory unless fused or capturable. *labels*: a plan counts input_ids and labels, the trace has one "
            "tensor for both. *norm statistics*: of bf16 input the CPU's LayerNorm saves mean and rstd in bf16, "
            "CUDA's in fp32. What is not explained is one scalar, with recompute two, while backward runs; of the FSDP "
            "rows one norm's weight (8,192 B), too, once forward has ended.",
        ),
    )


def traced_plan(row: Row) -> Plan:
    """The plan of one traced row."""
    if "fsdp" in row:
        return resolve(
            plan_of(
                None,
                model="llama-3-8b",
                framework="fsdp",
                gpus=row["fsdp"],
                dtype="bf16",
                mbs=row["b"],
                gbs=row["b"] * row["fsdp"],
                seq=row["s"],
                recompute="full" if row["ckpt"] else "none",
            )
        )
    flags: dict[str, object] = {"layers": 8} if "L8" in row["name"] else {}
    return resolve(
        plan_of(
            None,
            model=MODELS[row["name"]],
            framework="single",
            dtype=DTYPES[row["dtype"]],
            mbs=row["b"],
            gbs=row["b"],
            seq=row["s"],
            attention="eager" if row["attn"] == "eager" else "flash",
            recompute="full" if row["ckpt"] else "none",
            **flags,
        )
    )


def _traced(row: Row) -> list[Comparison]:
    plan = traced_plan(row)
    (program,) = programs_of(plan, Options(accumulates_in_place=False))
    folded = fold_program(program)
    always, graph = _named_differences(plan, program)
    points = (
        ("held after forward", row.get("held", row.get("after_forward")), folded.after_forward, {**always, **graph}),
        ("peak of forward and backward", row["peak_fwd_bwd"], folded.backward_peak, {**always, **graph}),
        ("peak of the step", row["peak_step"], folded.step_peak, always),
        ("between iterations", row["end"], folded.static, always),
    )
    return [
        Comparison(
            row["id"],
            point,
            measured,
            estimated,
            near(measured, estimated, TRACED_LIMIT),
            _explained(estimated - measured, causes),
        )
        for point, measured, estimated, causes in points
    ]


def _named_differences(plan: Plan, program: Program) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by which an estimate differs from the trace for known causes: always, and while the graph lives."""
    tensors = program.parameter_tensors()
    assert plan.batch.seq is not None
    tokens = plan.batch.mbs * plan.batch.seq
    always = {"steps": -512 * len(tensors), "labels": 8 * tokens}
    norms = sum(tensor.name.endswith("norm.weight") for tensor in tensors)
    lower = plan.precision.dtype != "fp32" and plan.model.norm == "layernorm" and plan.recompute.mode == "none"
    return always, {"norm statistics": norms * 2 * 2 * tokens} if lower else {}


def _explained(error: int, causes: Mapping[str, int]) -> str:
    """The named parts of ``error``, and what is left of it."""
    parts = [f"{name} {size:+,}" for name, size in causes.items()]
    rest = error - sum(causes.values())
    return ", ".join([*parts, f"not explained {rest:+,}"] if rest else parts) + " B"


def _on_cuda(rows: Sequence[Row]) -> str:
    """How the same peaks come out where gradients are added in place."""
    changed = []
    for row in rows:
        plan = traced_plan(row)
        fake, cuda = (
            fold_program(programs_of(plan, Options(accumulates_in_place=in_place))[0]) for in_place in (False, True)
        )
        if fake.peak != cuda.peak or fake.backward_peak != cuda.backward_peak:
            changed.append(f"{row['id']} {(cuda.backward_peak - fake.backward_peak) / MIB:+,.2f} MiB")
    if not changed:
        return "With in-place addition, as on CUDA, every figure of this table is the same."
    return f"In place, as on CUDA, peaks of forward and backward differ: {'; '.join(changed)}; the others do not."


# -- formulas of a paper ------------------------------------------------------------------------------

SPECS = {"korthikanti/megatron-22B": "megatron-22b", "korthikanti/gpt3-175B": "gpt3-175b"}
BYTES_PER_PARAMETER = 18
"""The paper's: fp16 parameter, fp32 gradient, main parameter and two Adam states."""


def korthikanti(rows: Sequence[Row]) -> Table:
    """Saved tensors of Megatron's layer beside the paper's formulas."""
    return Table(
        "korthikanti_2022.jsonl",
        "Figure 1 of the paper: formulas for activations and states of the layers, no embedding",
        "Korthikanti et al., arXiv 2205.05198, sections 4 and 5; recipe: Megatron-LM's transformer layer",
        "0 bytes",
        tuple(comparison for row in rows for comparison in _korthikanti(row)),
        notes=(
            "The paper neglects the fp32 mean and inverse deviation that each norm saves, and biases and norms among "
            "the parameters; they are taken off the recipe's figures here, and nothing else is.",
            "States: weight matrices on one rank times the 18 bytes that the paper counts. Interleaving: the first "
            "stage holds L (1 + (p − 1) / (p m)) layers of activations, m chunks a stage (section 4.2.3).",
        ),
    )


def _korthikanti(row: Row) -> list[Comparison]:
    spec = plan_of(None, model=SPECS[row["id"]]).model
    plain = _parallel_layer(row, spec, sharded=False)
    weights = sum(parameter.elements for parameter in plain.parameters if len(parameter.shape) > 1)
    states = BYTES_PER_PARAMETER * weights * row["layers"] // row["pp"]
    figures = (
        ("states of the layers", "layer_states_gib_18_bytes", states),
        ("activations, no recompute", "activations_gib_no_recompute", _activations(row, plain, 1)),
        (
            "activations, sequence parallel and selective recompute",
            "activations_gib_sp_selective",
            _activations(row, _parallel_layer(row, spec, sharded=True), row["tp"]),
        ),
    )
    return [
        Comparison(row["id"], reading, int(row[key] * GIB), estimated, int(row[key] * GIB) == estimated)
        for reading, key, estimated in figures
    ]


def _parallel_layer(row: Row, spec: ModelSpec, sharded: bool) -> Module:
    b, s, t = row["micro_batch_size"], row["sequence_length"], row["tp"]
    shape = ParallelShape(spec, b, s, t, "fp16", row["vocab_size"], sequence_parallel=sharded, selective=sharded)

    def recipe(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(layer(r, x, shape))

    return build("layer", recipe, Interface(shape.hidden, "fp16"), Options())


def _activations(row: Row, module: Module, shards: int) -> int:
    """Bytes that the first stage's layers keep, without the norms' statistics."""
    tokens = int(row["micro_batch_size"]) * int(row["sequence_length"]) // shards
    saved = module.first.forward_fold.net - 2 * 2 * 4 * tokens  # two norms, two statistics, fp32
    p, m, layers = int(row["pp"]), int(row.get("virtual_pipeline", 1)), int(row["layers"])
    return saved * (layers * (p * m + p - 1) // (p * m) if m > 1 else layers)


# -- BigScience on A100 -------------------------------------------------------------------------------

THOUSAND_MIB = 1000 * MIB
"""nvidia-smi shows MiB; "47 GB" was written for 47,xxx MiB."""


def bigscience(rows: Sequence[Row]) -> Table:
    """Device memory of the first or last stage, whichever needs more."""
    return Table(
        "bigscience_a100.jsonl",
        "device (nvidia-smi, thousands of MiB) on the first or last stage of the 176B model's trials, good to 1 GB",
        "bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md; dropout 0.1 as in that folder's "
        "README, ALiBi and embedding norm as in its slurm script; recipes: Megatron-DeepSpeed (November 2021), "
        "DeepSpeed v0.5.7",
        "6 % or 2 GB",
        tuple(_bigscience(row) for row in rows),
        notes=(
            "The estimate is the middle of a range by what CUDA and NCCL take; its ends stand beside each row. "
            "Network buffers lie in host memory (NCCL_NET_GDR_LEVEL=LOC): NCCL's log of these nodes in the month of "
            "the trials has no GDRDMA (experiments/bandwidth/all_reduce_bench-a100-n4.txt; NCCL 2.10.3, of PyTorch "
            "1.10). It has two channels between nodes, too, where the range counts six to sixteen: 0.1 to 0.6 GB more. "
            f"CUDA context: {_context()}.",
            "A reading is the most of all GPUs of two nodes, of which the range covers one.",
            "The two rows of 72 layers on 6 stages, and one of four sequences, are 5 % low, which is not explained.",
            "Not a blind test: DeepSpeed's order of allocations in ZeRO-1 was read from its source while these rows "
            "were in view.",
        ),
    )


OMNI_PATH = "NCCL_NET_GDR_LEVEL=LOC"
"""Of Jean Zay's network, which carries verbs in software on the host: NCCL's network buffers lie there (its log says
``via NET/IB``, without ``GDRDMA``)."""


def bigscience_plan(row: Row) -> Plan:
    """The plan of one trial."""
    hidden, heads = row["hidden_size"], row["heads"]
    return plan_of(
        None,
        model="bloom-176b",
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        layers=row["layers"],
        vocab=row["vocab_size"],
        embedding_dropout=0.1,
        attention_dropout=0.1,
        hidden_dropout=0.1,
        framework="megatron-deepspeed",
        dtype="fp16",
        seq=row["sequence_length"],
        mbs=row["micro_batch_size"],
        gbs=row["global_batch_size"],
        tp=row["tp"],
        pp=row["pp"],
        dp=row["dp"],
        zero=row["zero_stage"],
        partition=row["partition"],
        recompute=row["recompute"],
        attention="eager",
        optimizer="adam",
        gpu="a100-80gb",
        torch="1.10",
        env=OMNI_PATH,
    )


def _bigscience(row: Row) -> Comparison:
    stages = estimate(bigscience_plan(row)).stages
    stage = max((stages[0], stages[-1]), key=lambda stage: stage.device or 0)
    assert stage.device is not None
    assert stage.reading_range is not None
    measured, (least, most) = row["first_or_last_stage_device_gb"] * THOUSAND_MIB, stage.reading_range
    beside = max(least - measured, measured - most, 0)
    within = near(measured, stage.device, 0.06, 2 * THOUSAND_MIB)
    cause = "within the range" if not beside else _device_cause(beside)
    span = f"{least / MIB:,.0f} to {most / MIB:,.0f}: {cause}"
    return Comparison(row["id"], "device", measured, stage.device, within, span)


def _context() -> str:
    found = [one for one in context_causes("a100-80gb", {}, (1, 10)) if one.name == "CUDA context"]
    return "; ".join(f"{one.least / MIB:,.0f} to {one.most / MIB:,.0f} MiB ({one.source})" for one in found)


def _device_cause(beside: int) -> str:
    """What can be said of a reading in whole GB that is so far beside the range."""
    return "rounding to 1 GB" if beside <= THOUSAND_MIB // 2 else f"{beside / MIB:,.0f} MiB beside, not explained"


# -- torchtitan ---------------------------------------------------------------------------------------


def torchtitan(rows: Sequence[Row]) -> Table:
    """Peak reserved of a rank."""
    return Table(
        "torchtitan_h100.jsonl",
        "peak reserved, Llama 3.1 8B under FSDP2 on 8 H100 with 96 GB",
        "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md; recipes: its Llama of that commit (9dec370)",
        "4 %",
        tuple(map(_torchtitan, rows)),
        (),
        ("Gathers and reductions run on streams with pools of their own; with one pool for all it would be 7 % low.",),
    )


def _torchtitan(row: Row) -> Comparison:
    plan = plan_of(
        None,
        model="llama-3-8b",
        framework="fsdp",
        fsdp_code="torchtitan",
        recompute_per_operator="true",
        compile=str(row["compile"]).lower(),
        gpus=row["gpus"],
        gpu="h100-96gb",
        dtype="bf16",
        mbs=row["local_batch_size"],
        gbs=row["local_batch_size"] * row["gpus"],
        seq=row["sequence_length"],
    )
    (stage,) = estimate(plan).stages
    assert stage.reserved is not None
    measured = int(row["peak_reserved_gib"] * GIB)
    return Comparison(row["id"], "reserved", measured, stage.reserved, near(measured, stage.reserved, 0.04))


READERS: dict[str, Callable[[Sequence[Row]], Table]] = {
    "traced_transformers_5_23.jsonl": traced,
    "korthikanti_2022.jsonl": korthikanti,
    "bigscience_a100.jsonl": bigscience,
    "megatron_lm_ci.jsonl": megatron.ci,
    "megatron_b200.jsonl": megatron.b200,
    "megatron_bridge_moonlight.jsonl": moonlight.table,
    "torchtitan_h100.jsonl": torchtitan,
    fms.NAME: fms.table,
}

TIMES = ("llm_foundry_throughput.jsonl", "nvidia_throughput.jsonl")
"""Files without readings of memory."""


def read_rows(path: Path) -> list[Row]:
    """One JSON object a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def table_of(path: Path) -> Table:
    """The table of one file; an unknown file is listed as not modelled."""
    rows = read_rows(path)
    reader = READERS.get(path.name)
    if reader is None:
        what = (
            "times, beside which timing.md puts predicted ones" if path.name in TIMES else "a file that has no reader"
        )
        return Table(path.name, "", "", "", not_modelled=(f"{len(rows)} rows of {what}",))
    return reader(rows)
