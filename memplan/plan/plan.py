"""What the user says: a plan, one immutable value that every later step reads.

Section by section as in a plan file. Each field's description is what ``memplan init`` and ``--help``
print, and the JSON Schema carries. A field's flag is its name with hyphens, ``--block-size``, unless
``json_schema_extra["flag"]`` says otherwise.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from .spec import LayerCount, ModelSpec

Framework = Literal["single", "ddp", "device-map", "megatron", "megatron-deepspeed", "deepspeed", "fsdp"]
Dtype = Literal["fp32", "fp16", "bf16"]
OptimizerName = Literal["sgd", "adam", "adamw", "adam8bit"]
OptimizerImplementation = Literal["foreach", "for-loop", "fused", "apex"]
RecomputeMode = Literal["none", "selective", "full"]
AttentionImplementation = Literal["eager", "flash"]
LossKind = Literal["plain", "vocab-parallel", "adaptive-softmax"]
ScheduleName = Literal["1f1b", "gpipe"]

Degree = Annotated[int, Field(ge=1, le=1_048_576)]
Count = Annotated[int, Field(ge=1, le=2**31)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    shorthand: ClassVar[str | None] = None
    """The field that a plain value in place of the whole section sets: ``optimizer: adam8bit``."""


class Hardware(_Section):
    gpu: str | None = Field(None, description="GPU model, as `memplan gpus` lists them")
    gpus: Degree | None = Field(None, description="number of GPUs in the job; default: tp x pp x dp x cp")
    gpus_per_node: Degree = Field(8, description="GPUs in one node")
    capacity: int | None = Field(
        None, ge=1, le=2**50, description="device memory, if not the GPU table's: bytes, or as 31.7GiB"
    )


class Layout(_Section):
    tp: Degree = Field(1, description="tensor-parallel size")
    pp: Degree = Field(1, description="pipeline-parallel size (number of stages)")
    dp: Degree | None = Field(None, description="data-parallel size; default: gpus / (tp x pp x cp)")
    cp: Degree = Field(1, description="context-parallel size")
    ep: Degree = Field(1, description="expert-parallel size")
    vpp: Degree = Field(1, description="virtual stages (chunks) per pipeline stage")
    zero: int = Field(0, ge=0, le=3, description="ZeRO stage")
    sequence_parallel: bool = Field(False, description="shard norms and dropouts along the sequence (needs tp > 1)")


class Batch(_Section):
    mbs: Count = Field(1, description="micro-batch size (sequences per forward pass on one rank)")
    gbs: Count | None = Field(None, description="global batch size; default: mbs x dp x pp")
    seq: Count | None = Field(None, description="sequence length in tokens; default: the model's longest")
    multiply_by_visible_gpus: bool = Field(
        False,
        description="the Trainer's DataParallel default: the batch is multiplied by the number of visible GPUs",
    )


class Precision(_Section):
    shorthand = "dtype"

    dtype: Dtype = Field("bf16", description="dtype of parameters and activations")
    gradients: Dtype | None = Field(
        None, description="dtype in which gradients are accumulated; default: that of the parameters"
    )


class Optimizer(_Section):
    shorthand = "name"

    name: OptimizerName = Field("adamw", description="optimizer", json_schema_extra={"flag": "--optimizer"})
    implementation: OptimizerImplementation | None = Field(
        None,
        description="PyTorch's foreach, for-loop or fused; apex FusedAdam; default: the framework's",
        json_schema_extra={"flag": "--optimizer-implementation"},
    )
    block_size: int | None = Field(
        None,
        ge=1,
        le=2**31,
        description="elements per scale of 8-bit states; default: 2048, bitsandbytes' of 2021 (256 from 0.43)",
        json_schema_extra={"flag": "--optimizer-block-size"},
    )
    embeddings_32bit: bool = Field(
        True, description="8-bit Adam keeps 32-bit states for embeddings (bitsandbytes' rule)"
    )


class Recompute(_Section):
    shorthand = "mode"

    mode: RecomputeMode = Field(
        "none", description="what is recomputed in backward", json_schema_extra={"flag": "--recompute"}
    )
    method: Literal["uniform", "block"] = Field(
        "uniform",
        description="full recompute: every group, or the first layers",
        json_schema_extra={"flag": "--recompute-method"},
    )
    layers: LayerCount | None = Field(
        None,
        description="uniform: layers per recomputed group (1); block: recomputed layers per stage (all)",
        json_schema_extra={"flag": "--recompute-layers"},
    )


class Loss(_Section):
    shorthand = "kind"

    kind: LossKind | None = Field(
        None,
        description="plain, vocabulary-parallel or adaptive softmax; default: the framework's",
        json_schema_extra={"flag": "--loss"},
    )
    cutoffs: tuple[Count, ...] | None = Field(
        None, max_length=64, description="adaptive softmax: first token of each tail cluster, as 20000,80000"
    )
    div_value: float = Field(
        4.0, ge=1.0, le=1e6, description="adaptive softmax: by how much each tail cluster is narrower"
    )


class Pipeline(_Section):
    schedule: ScheduleName = Field("1f1b", description="pipeline schedule")
    partition: str | tuple[int, ...] | tuple[str, ...] = Field(
        "type:transformer",
        description="uniform, parameters, type:REGEX, type:REGEX:W|REGEX:W, or the first entry of every stage and the "
        "length of the list, as 0,4,6,…",
    )


class Plan(_Section):
    """A training job: the whole input of an estimate."""

    model: ModelSpec
    framework: Framework = Field("single", description="what runs the model")
    hardware: Hardware = Hardware()
    layout: Layout = Layout()
    batch: Batch = Batch()
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    recompute: Recompute = Recompute()
    attention: AttentionImplementation | None = Field(
        None, description="eager (scores in memory) or flash; default: flash where framework and dtype have it"
    )
    code: Literal["current", "2020"] = Field(
        "current", description="age of the model's code: transformers' of today, or of October 2020 (GPT-2 only)"
    )
    loss: Loss = Loss()
    pipeline: Pipeline = Pipeline()
    device_map: dict[int, tuple[int, ...]] | None = Field(
        None, description="device-map: the layers that each device holds, as {0: 0-11, 1: 12-23}; default: equal shares"
    )
    environment: dict[str, str] = Field(
        default_factory=dict,
        description="environment variables that change memory, as PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True",
        json_schema_extra={"flag": "--env"},
    )
    headroom: str = Field("0", description="memory kept free: bytes, 2GiB, or 5%")
