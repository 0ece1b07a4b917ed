"""Fine-tuning runs of foundation-model-stack's benchmark of fms-acceleration, on A100s with 80 GB.

Its scenarios, and what its plugins do with them: ``scripts/benchmarks/scenarios.yaml`` and ``defaults.yaml``,
``plugins/accelerated-peft``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from memplan.estimate import estimate
from memplan.plan.count import parameters
from memplan.plan.lora import adapter_parameters
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.result import StageEstimate

from .comparison import MIB, Comparison, Table

NAME = "fms_a100_finetuning.jsonl"
FOLLOWED = ("transformers", "peft", "trl", "accelerate", "bitsandbytes")
"""Libraries whose release a row names and a plan takes."""


MODELS = {
    "Mistral-7B": "mistral-7b",
    "Mixtral-8x7B": "mixtral-8x7b",
    "Meta-Llama-3-8B": "llama-3-8b",
    "Llama-2-70b": "llama-2-70b",
    "Llama-2-70B": "llama-2-70b",
}
"""By a part of the names of the benchmark's models and of their quantised copies."""

DTYPES = {"bfloat16": "bf16", "float16": "fp16"}

PADDED_VOCABULARY = 32_001
"""Of Mistral and Mixtral, whose tokenizer has no token to pad with: fms-hf-tuning adds one, and a row to the embedding
and to the head (``tuning/sft_trainer.py``, ``tokenizer_and_embedding_resize``)."""

FULL = 76_000
"""MiB of a device from which on its memory may have been short."""

NARROW = 3 << 30
"""Bytes: a wider range says little."""

UNGROUPED = 14_336
"""Inputs of the widest layer: the card of TheBloke's Mixtral says that its weights have no groups."""

LIGER = "0.4.2"
"""The release that ``fused_ops/liger_ce`` is a copy of."""


LOADING = {"4.45.2": "LAZY", "4.48.1": "EAGER"}
"""CUDA_MODULE_LOADING of the two containers, which transformers' release tells apart. No row says it: it is inferred
from those of LoRA without quantisation on one GPU, 519 and 1,690 MiB above what the allocator reserves."""


def plan_of(row: Mapping[str, Any]) -> Plan:
    """One run; on several GPUs under FSDP1, where trl prepares no 4-bit
    model."""
    framework, gpus = row["framework_config"], row["gpus"]
    flags: dict[str, object] = {}
    if row["peft_method"]:
        targets = ",".join(row["target_modules"].split())
        flags |= {"lora-rank": int(float(row["lora_rank"])), "lora-targets": targets}
        flags["lora-dropout"] = float(row["lora_dropout"])
    if "bnb" in framework:
        flags |= {"quantisation": "nf4", "double-quantisation": "true"}
        flags["kbit-preparation"] = str(framework.startswith("baseline") and gpus == 1).lower()
    if "gptq" in framework:
        flags["quantisation"] = "gptq"
        if "Mixtral" in row["model"]:
            flags["group-size"] = UNGROUPED
    if row["trainer_bf16"] or row["trainer_fp16"]:
        flags["autocast"] = "true"
        if gpus == 1:
            flags["autocast-parameters"] = DTYPES[row["dtype"]]
    if "foak" in framework:
        flags["kernels"] = "fms"
    if "liger" in framework:
        flags |= {"loss": "liger", "liger-version": LIGER}
    if gpus > 1:
        flags |= {"gpus": gpus, "fsdp-version": "1"}
    versions = [f"{name}={row['versions'][name]}" for name in FOLLOWED if name in row["versions"]]
    flags |= {
        "model": next(spec for name, spec in MODELS.items() if name in row["model"]),
        "vocab": PADDED_VOCABULARY,
        "framework": "single" if gpus == 1 else "fsdp",
        "trainer": "transformers",
        "gpu": "a100-80gb",
        "dtype": DTYPES[row["dtype"]],
        "attention": "flash_attention_2",
        "recompute": "full",
        "mbs": row["micro_batch_size"],
        "gbs": row["micro_batch_size"] * gpus,
        "seq": row["sequence_length"],
        "versions": ",".join(versions),
        "torch": row["versions"]["torch"],
        "env": f"CUDA_MODULE_LOADING={LOADING[row['versions']['transformers']]}",
    }
    return read_plan(None, {name: str(value) for name, value in flags.items()}).plan


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Allocated, at the peak of training and after it."""
    ran = [row for row in rows if not row.get("outcome")]
    return Table(
        NAME,
        "allocated at the peak of training and after it, Mistral 7B and Mixtral 8x7B on one and two A100s with 80 GB: "
        "full, LoRA, 4-bit LoRA",
        "foundation-model-stack/fms-acceleration, scripts/benchmarks; recipes: transformers 4.48.1, peft 0.13.2, trl "
        "0.13.0, bitsandbytes 0.43.3",
        "1 % (peak; 2 % under FSDP1), 0.1 % (after training)",
        tuple(one for row in ran for one in _compared(row)),
        (),
        (
            "After training every row is low by an attention mask of int64, which a plan does not know of. Under FSDP1 "
            "gradients are there still.",
            "Under FSDP1 with Unsloth's functions on 4-bit or GPTQ weights, both readings of 24 rows lack 54,525,952 "
            "bytes, 4 for each adapter parameter, and these are added to what was measured. Inferred from that "
            "remainder, not shown: adapters are moved to the GPU between the Trainer's second probe and its third "
            "(get_callbacks_and_ready_for_train). Without it peaks are 0.1 to 0.4 % high, and after training about 4 % "
            "on 4 GPUs.",
            "Where Mixtral's tokens went is not recorded: balanced experts are estimated, and what an expert takes "
            "while it runs grows with its own tokens.",
        ),
    )


@cache
def _estimated(row: str) -> tuple[Plan, StageEstimate]:
    plan = plan_of(json.loads(row))
    (stage,) = estimate(plan).stages
    return plan, stage


def devices(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What ``nvidia-smi`` showed, beside the range of what the allocator keeps and what lies outside it."""
    ran = [row for row in rows if not row.get("outcome") and row["nvidia_smi_mib"] < FULL]
    found = [_on_device(row) for row in ran]
    alone = [one for row, one in zip(ran, found, strict=True) if row["gpus"] == 1 and not row["peft_method"]]
    narrow = sum(bool(one.within) and _width(row) <= NARROW for row, one in zip(ran, found, strict=True))
    return Table(
        f"{NAME}, device",
        "device (nvidia-smi, sampled each second, less its first sample; mean of the GPUs), the largest of a run; rows "
        f"of less than {FULL:,} MiB, above which the allocator was full",
        "foundation-model-stack/fms-acceleration, benchmark.py of scripts/benchmarks, get_peak_mem_usage_by_device_id",
        "the range of readings",
        tuple(found),
        (),
        (
            f"Full fine-tuning on one GPU: {sum(bool(one.within) for one in alone)} of {len(alone)} within. The "
            "estimate is the middle of device_reading_range_bytes: what CUDA and NCCL take, what ranks keep, and what "
            "the replay of the allocator misses, as 95 % of readings of eight runs of Megatron-Core on B200 (1.0 % "
            f"below to 2.4 % above). {narrow} of {len(found)} are within a range of at most 3 GiB.",
            "How CUDA loads kernels is not recorded, and inferred from LoRA without quantisation on one GPU: 519 to "
            "521 MiB above what the allocator reserves in one container (transformers 4.45), kernels that load when "
            "they are first used; 1,690 MiB in another (4.48), all kernels of PyTorch and the libraries that it links, "
            "which are 1,240 MiB in torch 2.4.1's wheels. Each container's rows are estimated with CUDA_MODULE_LOADING "
            "so. Other libraries add to both: on one GPU 521 to 523 MiB with GPTQ and 531 with bitsandbytes in the "
            "first, 1,840 to 1,842 with bitsandbytes in the second.",
            "Where a run gave cached memory back (verdict fits-with-retries) the reading is what the allocator keeps "
            "afterwards: what it held before lasts for less than a second.",
            "Logits of all tokens but the last are two slices before torch 2.9, each with a gradient of its own: a row "
            "more of the vocabulary makes these logits 2,000.06 MiB of four sequences, those without the last token "
            "1,999.57, and a block of the one kind cannot serve the other.",
            "Under FSDP1 what wrapping takes on each rank stays in the allocator's cache, and a gathered layer's block "
            "is not free again when the next layer is gathered. Quantised weights of all ranks but the first are on "
            "the meta device: these ranks copy nothing while they wrap, run ahead of rank 0, and keep every bucket "
            "that it has not sent yet (104 MiB a layer of Mistral, 692 of Mixtral). The reading is the mean of all "
            "GPUs.",
            "With GPTQ every rank's process has a context on all GPUs: loading asks how much memory each has "
            "(get_max_memory of Accelerate). Triton tunes the kernels that dequantise, beside 256 MB with which it "
            "flushes the L2 cache (do_bench), in the first forward pass.",
            "Not explained: full fine-tuning with micro-batch 4 on two GPUs, 3.5 GiB above the range, and 8 on four, "
            "up to 1.5 GiB below; transformers' own kernels with micro-batch 8 on one GPU, 0.1 GiB above; Mixtral in 4 "
            "bits with k-bit preparation on one GPU, up to 1.8 GiB above (whose experts' tokens are not recorded); "
            "Liger's loss under LoRA with micro-batch 8 on two and four GPUs, up to 0.4 GiB above.",
            "Not a blind test: these causes, and how the range is put together, were found with the rows in view.",
        ),
    )


def _width(row: Mapping[str, Any]) -> int:
    """Of the range, in bytes."""
    _, stage = _estimated(json.dumps(row))
    assert stage.reading_range is not None
    return stage.reading_range[1] - stage.reading_range[0]


def _on_device(row: Mapping[str, Any]) -> Comparison:
    _, stage = _estimated(json.dumps(row))
    assert stage.reserved is not None
    assert stage.reading_range is not None
    measured = int(row["nvidia_smi_mib"]) * MIB
    released = stage.reserved - (stage.judged.reserved or stage.reserved)
    least, most = stage.reading_range
    within = least <= measured <= most
    beside = "within" if within else f"{max(least - measured, measured - most) / MIB:,.0f} MiB beside"
    above = (measured - stage.reserved + released) / MIB
    span = f"{least / MIB:,.0f} to {most / MIB:,.0f}: {beside}; {above:+,.0f} MiB to what is reserved"
    return Comparison(row["id"], "device", measured, (least + most) // 2, within, span)


def _compared(row: Mapping[str, Any]) -> list[Comparison]:
    plan, stage = _estimated(json.dumps(row))
    assert stage.allocated is not None
    alone, missed = row["gpus"] == 1, 0
    left = 0 if alone else _gradients(plan) // row["gpus"]
    if not alone and (plan.kernels.set, plan.quantisation.kind != "none") == ("fms", True):
        left = 0
        missed = 4 * adapter_parameters(plan)
    readings = (
        ("peak", row["peak_allocated_bytes"] + missed, stage.allocated, 0.01 if alone else 0.02),
        ("after training", row["allocated_after_training_bytes"] + missed, stage.static + left, 0.001),
    )
    mask = 8 * row["micro_batch_size"] * row["sequence_length"]
    return [
        Comparison(
            row["id"],
            reading,
            measured,
            estimated,
            abs(estimated - measured) <= limit * measured,
            f"attention mask -{mask:,}, not explained {estimated - measured + mask:+,} B",
        )
        for reading, measured, estimated, limit in readings
    ]


def _gradients(plan: Plan) -> int:
    """Bytes of all gradients under FSDP1: of adapters in fp32, or of all parameters, in fp32 with autocast."""
    if plan.lora.rank is not None:
        return 4 * adapter_parameters(plan)
    return (4 if plan.precision.autocast else 2) * parameters(plan.model)
