"""The sections of a plan that one framework reads, or the loop around it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .section import Count, Degree, Dtype, Elements, Section

TRANSFORMER_ENGINE = "2.18"
"""The newest release of Transformer Engine whose source the recipes follow."""


class Megatron(Section):
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


class Ddp(Section):
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


class Fsdp(Section):
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


class Deepspeed(Section):
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
    offload_optimizer_pin: bool = Field(True, description="pinned host memory")
    offload_optimizer_ratio: float = Field(1.0, ge=0.0, le=1.0, description="part of the states that is away")
    offload_optimizer_buffer_count: Elements = Field(4, description="nvme: buffers of the largest sub-group")
    offload_param: Literal["none", "cpu", "nvme"] = Field("none", description="ZeRO-3: where shards are")
    offload_param_pin: bool = Field(True, description="pinned host memory")
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


class Trainer(Section):
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
