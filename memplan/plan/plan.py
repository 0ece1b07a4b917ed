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
OptimizerName = Literal["sgd", "adam", "adamw", "adam8bit", "adafactor", "lion", "lion8bit", "muon"]
StateDtype = Literal["fp32", "bf16", "fp16", "fp8"]
OptimizerImplementation = Literal["foreach", "for-loop", "fused", "apex", "bitsandbytes", "transformers"]
RecomputeModule = Literal["core_attn", "layernorm", "mlp"]
RecomputeMode = Literal["none", "selective", "full"]
AttentionImplementation = Literal["eager", "flash"]
LossKind = Literal["plain", "vocab-parallel", "adaptive-softmax", "liger", "cut", "chunked"]
ScheduleName = Literal["1f1b", "gpipe"]

TRANSFORMER_ENGINE = "2.18"
"""The newest release of Transformer Engine whose source the recipes follow."""

Degree = Annotated[int, Field(ge=1, le=1_048_576)]
Count = Annotated[int, Field(ge=1, le=2**31)]
Elements = Annotated[int, Field(ge=0, le=2**63 - 1)]


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
    accumulation: Count | None = Field(
        None, description="micro-batches of a rank before a step; default: what gbs makes of it"
    )
    seq: Count | None = Field(None, description="sequence length in tokens; default: the model's longest")
    multiply_by_visible_gpus: bool = Field(
        False,
        description="the Trainer's DataParallel default: the batch is multiplied by the number of visible GPUs",
    )


class Precision(_Section):
    shorthand = "dtype"

    dtype: Dtype = Field("bf16", description="dtype of parameters and activations")
    autocast: bool = Field(
        False, description="PyTorch's autocast computes in dtype (bf16=True of a Trainer), over fp32 parameters"
    )
    parameters: Dtype | None = Field(
        None,
        description="autocast: dtype of parameters; default: fp32 (transformers 5 loads them as they were saved)",
        json_schema_extra={"flag": "--autocast-parameters"},
    )
    gradients: Dtype | None = Field(
        None,
        description="dtype in which gradients are accumulated; default: that of the parameters (megatron: fp32)",
    )

    @property
    def stored(self) -> Dtype:
        """The dtype of parameters, where a framework has no other."""
        return self.parameters or ("fp32" if self.autocast else self.dtype)


class Optimizer(_Section):
    shorthand = "name"

    name: OptimizerName = Field("adamw", description="optimizer", json_schema_extra={"flag": "--optimizer"})
    implementation: OptimizerImplementation | None = Field(
        None,
        description="PyTorch's foreach, for-loop or fused; apex FusedAdam; bitsandbytes' in 32 bits; transformers' "
        "Adafactor; default: the framework's",
        json_schema_extra={"flag": "--optimizer-implementation"},
    )
    block_size: int | None = Field(
        None,
        ge=1,
        le=2**31,
        description="elements per scale of 8-bit states; default: 256, with older code 2048 (bitsandbytes before 0.44)",
        json_schema_extra={"flag": "--optimizer-block-size"},
    )
    embeddings_32bit: bool = Field(
        True, description="8-bit optimizers keep 32-bit states for embeddings (bitsandbytes' rule)"
    )
    paged: bool = Field(
        False,
        description="bitsandbytes: states of 100,000 elements and more are in CUDA's unified memory",
        json_schema_extra={"flag": "--paged-optimizer"},
    )
    momentum: float = Field(0.0, ge=0.0, lt=1.0, description="SGD: with momentum there is a buffer per parameter")
    weight_decay: float | None = Field(
        None,
        ge=0.0,
        le=100.0,
        description="decay of weights; default: the optimizer's own (AdamW 0.01, Muon 0.1, else 0)",
    )
    precision_aware: bool = Field(
        False,
        description="megatron: Transformer Engine's FusedAdam keeps main parameters and states in dtypes of choice",
        json_schema_extra={"flag": "--precision-aware-optimizer"},
    )
    main_parameters: StateDtype = Field(
        "fp32",
        description="dtype of main parameters (precision-aware)",
        json_schema_extra={"flag": "--main-params-dtype"},
    )
    exp_avg: StateDtype = Field(
        "fp32", description="dtype of the first moment (precision-aware)", json_schema_extra={"flag": "--exp-avg-dtype"}
    )
    exp_avg_sq: StateDtype = Field(
        "fp32",
        description="dtype of the second moment (precision-aware)",
        json_schema_extra={"flag": "--exp-avg-sq-dtype"},
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
    modules: tuple[RecomputeModule, ...] | None = Field(
        None,
        max_length=8,
        description="megatron, selective recompute: core_attn, layernorm, mlp; default: core_attn",
        json_schema_extra={"flag": "--recompute-modules"},
    )


class Loss(_Section):
    shorthand = "kind"

    kind: LossKind | None = Field(
        None,
        description="plain, vocabulary-parallel or adaptive softmax; Liger's fused linear, cut, or torchtitan's "
        "chunked cross entropy; default: the framework's",
        json_schema_extra={"flag": "--loss"},
    )
    cutoffs: tuple[Count, ...] | None = Field(
        None, max_length=64, description="adaptive softmax: first token of each tail cluster, as 20000,80000"
    )
    div_value: float = Field(
        4.0, ge=1.0, le=1e6, description="adaptive softmax: by how much each tail cluster is narrower"
    )
    chunks: Count = Field(
        8,
        description="chunked: equal parts of the tokens of a micro-batch (num_chunks)",
        json_schema_extra={"flag": "--loss-chunks"},
    )
    fp32_accumulators: bool = Field(
        False,
        description="liger: accum_dtype=torch.float32; cut: accum_e_fp32 and accum_c_fp32",
        json_schema_extra={"flag": "--loss-fp32-accumulators"},
    )
    liger: str = Field(
        "0.8.5",
        pattern=r"^\d{1,3}\.\d{1,3}\.\d{1,3}$",
        description="version of Liger",
        json_schema_extra={"flag": "--liger-version"},
    )
    logits_to_keep: Count | None = Field(
        None, description="plain: logits (and labels) of this many last tokens of each sequence only; default: all"
    )


class Pipeline(_Section):
    schedule: ScheduleName = Field("1f1b", description="pipeline schedule")
    partition: str | tuple[int, ...] | tuple[str, ...] = Field(
        "type:transformer",
        description="uniform, parameters, type:REGEX, type:REGEX:W|REGEX:W, or the first entry of every stage and the "
        "length of the list, as 0,4,6,…",
    )
    first_layers: LayerCount | None = Field(
        None, description="megatron: layers of the first stage (decoder-first-pipeline-num-layers)"
    )
    last_layers: LayerCount | None = Field(
        None, description="megatron: layers of the last stage (decoder-last-pipeline-num-layers)"
    )
    count_embedding: bool = Field(
        False, description="megatron: the embedding counts as a layer when layers are split into stages"
    )
    count_loss: bool = Field(
        False, description="megatron: the loss counts as a layer when layers are split into stages"
    )
    layout: str | None = Field(
        None,
        max_length=10_000,
        description="megatron: pipeline-model-parallel-layout, as Et*3|(tt|)*29,m|L",
        json_schema_extra={"flag": "--pipeline-layout"},
    )
    group: Count | None = Field(
        None,
        description="megatron: micro-batches that a virtual stage runs in a row; default: pp",
        json_schema_extra={"flag": "--microbatch-group-size"},
    )
    overlap_p2p: bool = Field(True, description="megatron: interleaved schedule overlaps its sends and receives")
    overlap_p2p_warmup: bool = Field(False, description="megatron: overlap-p2p-communication-warmup-flush")


class Megatron(_Section):
    """Choices that only Megatron-Core has; each is an argument of its own launch script."""

    transformer_impl: Literal["transformer_engine", "local"] = Field(
        "transformer_engine", description="implementation of the layers"
    )
    transformer_engine: str = Field(
        TRANSFORMER_ENGINE,
        pattern=r"^\d+\.\d+(\.\d+)?$",
        description="version of Transformer Engine",
        json_schema_extra={"flag": "--te-version"},
    )
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = Field(
        "auto", description="back end of the attention; auto: as Transformer Engine chooses"
    )
    deterministic: bool = Field(False, description="bitwise reproducible: other kernels for attention and embedding")
    gradient_accumulation_fusion: bool = Field(True, description="weight gradients are added to main_grad by the GEMM")
    bias_gelu_fusion: bool = Field(True, description="bias and GELU in one kernel")
    bias_swiglu_fusion: bool = Field(True, description="bias and SwiGLU in one kernel")
    bias_dropout_fusion: bool = Field(True, description="bias, dropout and residual in one kernel")
    rope_fusion: bool = Field(True, description="rotary embedding in one kernel")
    masked_softmax_fusion: bool = Field(True, description="scale, mask and softmax in one kernel")
    rotary_interleaved: bool = Field(False, description="rotary embedding turns neighbouring features")
    attention_softmax_in_fp32: bool = Field(False, description="unfused attention: softmax in fp32")
    query_key_layer_scaling: bool = Field(False, description="scores are scaled by the layer's number; softmax in fp32")
    fp32_residual: bool = Field(False, description="hidden states between layers in fp32 (refused)")
    cross_entropy_fusion: Literal["none", "native", "te"] = Field(
        "none", description="fused vocabulary-parallel cross entropy, and whose"
    )
    per_token_loss: bool = Field(False, description="the loss is summed over tokens and divided at the end")
    attention_mask_in_dataloader: bool = Field(True, description="the data loader makes an attention mask")
    vocab_multiple: Count = Field(128, description="the vocabulary is padded to a multiple of this times tp")
    distributed_optimizer_instances: Degree = Field(1, description="replicas of the distributed optimizer's shards")
    overlap_grad_reduce: bool = Field(False, description="gradients are reduced bucket by bucket during backward")
    overlap_param_gather: bool = Field(False, description="parameters are gathered bucket by bucket during forward")
    bucket_size: int | None = Field(
        None, ge=1, le=2**40, description="parameters in a bucket; default: max(40,000,000, 1,000,000 x dp x cp)"
    )
    log_num_zeros_in_grad: bool = Field(False, description="counts zeros in gradients at every step")
    log_params_norm: bool = Field(False, description="computes the norm of parameters at every step")
    clip_grad: float = Field(1.0, ge=0.0, le=1e6, description="clip gradients to this norm; 0: not")
    check_for_nan: bool = Field(True, description="look for NaN in loss and gradients")
    cp_communication: Literal["p2p", "a2a"] = Field(
        "p2p", description="how context parallelism exchanges keys and values"
    )


class Ddp(_Section):
    """Arguments of ``DistributedDataParallel``, and of ``ZeroRedundancyOptimizer`` (``layout.zero: 1``)."""

    bucket_cap_mb: float | None = Field(
        None, gt=0.0, le=1e6, description="MiB at which a gradient bucket is closed; default: 25, of the first one 1"
    )
    gradient_as_bucket_view: bool = Field(
        False, description="gradients are views of buckets: there is no second copy of them"
    )
    static_graph: bool = Field(False, description="what is used is known after the first iteration")
    find_unused_parameters: bool = Field(
        False, description="looks for unused parameters in every iteration; buckets are never rebuilt"
    )
    broadcast_buffers: bool = Field(True, description="rank 0's buffers are broadcast before every forward")
    gradient_sync: bool = Field(
        True,
        description="every micro-batch reduces its gradients; false: the last one alone (no_sync)",
        json_schema_extra={"flag": "--ddp-gradient-sync"},
    )
    parameters_as_bucket_view: bool = Field(
        False, description="ZeRO-1: parameters are views of one flat tensor for each owner"
    )


class Fsdp(_Section):
    """Arguments of ``fully_shard``, whose model it is, and how it is trained. ``precision.dtype`` computes."""

    code: Literal["transformers", "torchtitan"] = Field(
        "transformers", description="whose model is sharded", json_schema_extra={"flag": "--fsdp-code"}
    )
    replicas: Degree = Field(
        1, description="groups of ranks with the same shards (HSDP)", json_schema_extra={"flag": "--fsdp-replicas"}
    )
    reshard_after_forward: bool = Field(True, description="parameters of a layer are freed behind its forward")
    reshard_to: Degree | None = Field(
        None, description="they are kept as shards among so many ranks (an integer reshard_after_forward)"
    )
    reshard_root: bool = Field(
        False, description="those of embedding, norm and head, too (transformers; Accelerate asks for it)"
    )
    parameters: Dtype = Field(
        "fp32", description="dtype of the shards", json_schema_extra={"flag": "--fsdp-parameters"}
    )
    reduce: Dtype = Field(
        "fp32", description="dtype in which gradients are reduced", json_schema_extra={"flag": "--fsdp-reduce"}
    )
    offload: bool = Field(False, description="CPUOffloadPolicy", json_schema_extra={"flag": "--fsdp-offload"})
    gradient_sync: bool = Field(
        True, description="every micro-batch reduces its gradients; false: the last one alone (no_sync)"
    )
    per_operator: bool = Field(
        False,
        description="torchtitan: recompute keeps attention and every second product",
        json_schema_extra={"flag": "--recompute-per-operator"},
    )
    recompute_every: Count = Field(1, description="torchtitan: full recompute of every n-th layer")
    ends_apart: bool = Field(
        False, description="torchtitan after 2024: the embedding is a unit, and so are norm and head"
    )
    return_outputs: bool = Field(
        False, description="torchtitan before October 2025: a pipeline's last stage keeps all logits"
    )


class Lora(_Section):
    """Low-rank adapters as peft makes them: the model is frozen, and two small matrices beside a layer are trained."""

    shorthand = "rank"

    rank: int | None = Field(
        None,
        ge=1,
        le=2**20,
        description="rank of LoRA adapters (r); default: no adapters",
        json_schema_extra={"flag": "--lora-rank"},
    )
    targets: tuple[str, ...] | None = Field(
        None,
        max_length=64,
        description="linear layers that have one, by the names that transformers gives them (q_proj, c_attn, "
        "query_key_value), or all-linear; default: peft's for the family",
        json_schema_extra={"flag": "--lora-targets"},
    )
    dropout: float = Field(
        0.0, ge=0.0, lt=1.0, description="dropout of an adapter's input", json_schema_extra={"flag": "--lora-dropout"}
    )
    dtype: Dtype | None = Field(
        None,
        description="dtype of adapters; default: fp32, to which peft casts them (autocast_adapter_dtype)",
        json_schema_extra={"flag": "--lora-dtype"},
    )


class Quantisation(_Section):
    """bitsandbytes' 4-bit weights of the linear layers, but for the head (QLoRA)."""

    shorthand = "kind"

    kind: Literal["none", "nf4", "fp4"] = Field(
        "none",
        description="what the frozen linear layers are stored as (load_in_4bit, bnb_4bit_quant_type)",
        json_schema_extra={"flag": "--quantisation"},
    )
    double: bool = Field(
        False,
        description="the scales are quantised, too (bnb_4bit_use_double_quant)",
        json_schema_extra={"flag": "--double-quantisation"},
    )
    compute: Dtype | None = Field(
        None,
        description="dtype in which quantised layers compute (bnb_4bit_compute_dtype); default: that of the plan "
        "(bitsandbytes' own default is fp32)",
        json_schema_extra={"flag": "--compute-dtype"},
    )
    prepared: bool = Field(
        False,
        description="prepare_model_for_kbit_training: embedding, norms and head are cast to fp32",
        json_schema_extra={"flag": "--prepared"},
    )


class Frozen(_Section):
    """Parts of the model that are not trained, where all of the rest is."""

    embedding: bool = Field(
        False,
        description="the embedding's tables and norm are frozen",
        json_schema_extra={"flag": "--freeze-embedding"},
    )
    layers: int = Field(
        0, ge=0, le=100_000, description="the first n layers are frozen", json_schema_extra={"flag": "--freeze-layers"}
    )


class Deepspeed(_Section):
    """``ds_config.json`` beside ``layout.zero``, the stage; sizes in elements (see ``frameworks.zero_config.Zero``)."""

    reduce_bucket_size: Elements = Field(500_000_000, ge=1, description="bucket in which gradients are reduced")
    allgather_bucket_size: Elements = Field(500_000_000, description="changes no memory where PyTorch gathers in place")
    contiguous_gradients: bool = Field(True, description="gradients are copied into a bucket as they arrive")
    overlap_comm: bool | None = Field(None, description="two buckets, one being reduced; default: at ZeRO-3 only")
    reduce_scatter: bool = Field(True, description="each rank receives the sums of its share only")
    round_robin_gradients: bool = Field(False, description="ZeRO-1, 2: every dp-th parameter beside the last")
    sub_group_size: Elements = Field(1_000_000_000, description="ZeRO-3: shards that are updated at once")
    stage3_prefetch_bucket_size: Elements = Field(50_000_000, description="ZeRO-3: parameters gathered ahead of use")
    stage3_max_live_parameters: Elements = Field(1_000_000_000, description="ZeRO-3: prefetch stops at so many whole")
    stage3_max_reuse_distance: Elements = Field(1_000_000_000, description="ZeRO-3: used again so soon, it stays whole")
    stage3_param_persistence_threshold: Elements = Field(
        100_000, description="ZeRO-3: parameters up to this size are never sharded"
    )
    stage3_model_persistence_threshold: Elements = Field(
        2**63 - 1, description="ZeRO-3: all of those together, at most"
    )
    memory_efficient_linear: bool = Field(True, description="ZeRO-3: linear layers keep no gathered weight")
    offload_optimizer: Literal["none", "cpu", "nvme"] = Field("none", description="where optimizer states are")
    offload_optimizer_pin: bool = Field(True, description="pinned host memory, as much as pageable")
    offload_optimizer_ratio: float = Field(1.0, ge=0.0, le=1.0, description="part of the states that is away")
    offload_optimizer_buffer_count: Elements = Field(4, description="nvme: buffers of the largest sub-group")
    offload_param: Literal["none", "cpu", "nvme"] = Field("none", description="ZeRO-3: where shards are")
    offload_param_pin: bool = Field(True, description="pinned host memory, as much as pageable")
    offload_param_max_in_cpu: Elements = Field(1_000_000_000, description="nvme: shards that stay on the host")
    offload_param_buffer_count: Elements = Field(5, description="nvme: buffers for shards")
    offload_param_buffer_size: Elements = Field(100_000_000, description="nvme: size of each")
    gradient_accumulation_dtype: Dtype | None = Field(
        None,
        description="data_types.grad_accum_dtype, the same as gradients",
        json_schema_extra={"flag": "--grad-accum-dtype"},
    )
    gradient_clipping: float = Field(0.0, ge=0.0, le=1e6, description="clip gradients to this norm: in place")
    groups: Literal["one", "decay"] = Field(
        "one",
        description="parameter groups: one, or matrices and the rest (as the Trainer makes them)",
        json_schema_extra={"flag": "--param-groups"},
    )


class Trainer(_Section):
    """Hugging Face's Trainer, beside what it shares with a plain loop."""

    shorthand = "loop"

    loop: Literal["none", "transformers"] = Field(
        "none",
        description="who runs the model: a plain loop, or transformers' Trainer",
        json_schema_extra={"flag": "--trainer"},
    )
    evaluation_batches: Count | None = Field(
        None,
        description="batches whose logits evaluation keeps on the device, as compute_metrics needs them; default: none",
        json_schema_extra={"flag": "--eval-batches"},
    )
    evaluation_mbs: Count | None = Field(
        None,
        description="sequences per forward pass of evaluation on one rank; default: mbs",
        json_schema_extra={"flag": "--eval-mbs"},
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
    lora: Lora = Lora()
    quantisation: Quantisation = Quantisation()
    frozen: Frozen = Frozen()
    pipeline: Pipeline = Pipeline()
    megatron: Megatron = Megatron()
    ddp: Ddp = Ddp()
    fsdp: Fsdp = Fsdp()
    deepspeed: Deepspeed = Deepspeed()
    trainer: Trainer = Trainer()
    device_map: dict[int, tuple[int, ...]] | None = Field(
        None, description="device-map: the layers that each device holds, as {0: 0-11, 1: 12-23}; default: equal shares"
    )
    environment: dict[str, str] = Field(
        default_factory=dict,
        description="environment variables that change memory, as PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True",
        json_schema_extra={"flag": "--env"},
    )
    torch: str | None = Field(
        None,
        pattern=r"^\d{1,3}\.\d{1,3}(\.\d{1,3})?$",
        description="version of PyTorch; default: 2.13, and what older code ran on",
    )
    headroom: str = Field("0", description="memory kept free: bytes, 2GiB, or 5%")
