"""The section ``megatron`` of a plan."""

from typing import ClassVar, Literal

from pydantic import Field

from .module_precision import Text as ModulePrecision
from .section import Count, Degree, Dtype, Elements, FrameworkSection

TRANSFORMER_ENGINE = "2.18"
"""The newest release of Transformer Engine whose source the recipes follow."""


MegatronSharding = Literal["none", "no_shard", "optim", "optim_grads", "optim_grads_params"]
"""What Megatron-FSDP shards; ``none``: it does not run."""

TorchSharding = Literal["none", "reshard", "keep"]
"""PyTorch's FSDP2 in Megatron-Core: what becomes of gathered parameters behind forward; ``none``: it does not run."""


GraphModule = Literal["attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"]

OffloadModule = Literal["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]


class Megatron(FrameworkSection):
    """Choices that only Megatron-Core has; each is an argument of its own launch script."""

    unsaid: ClassVar[frozenset[str]] = frozenset(
        {
            "fsdp",
            "fsdp_communication",
            "fsdp_outer",
            "fsdp_double_buffer",
            "fsdp_unit_size",
            "fsdp_meta_device",
            "fsdp_keep_transposes",
            "fsdp_max_pool",
            "fsdp_persistent",
            "torch_fsdp",
            "torch_fsdp_host_init",
            "optimizer_offload",
            "offload_modules",
            "offload_least",
            "offload_layers",
            "cuda_graphs",
            "cuda_graph_modules",
            "defer_embedding_wgrad",
            "optimizer_graph",
            "empty_cache",
            "distribute_saved",
            "wgrad_deferral_limit",
            "tp_comm_overlap",
            "pad_buckets",
            "buckets",
            "clone_scattered_embedding",
            "logits_dtype",
            "largest_logit",
            "gather_in_step",
            "mlp_chunks",
            "cp_inner",
            "flash_attention",
            "te_activation",
            "clips_queries",
            "norm_takes_residual",
            "joint_latent_down",
            "sums_in_fp32",
            "fp32_gradients_of",
            "registers_buffers",
            "nccl_blocks",
            "detaches_heads",
            "mixes_states",
            "packed",
            "cuda_graph_warmup",
            "fuses_operations",
            "sharp",
            "mamba_apart",
            "mamba_states",
            "mamba_chunk",
            "precision_of",
            "fp8_attention",
            "fp8_output",
        }
    )

    transformer_impl: Literal["transformer_engine", "local"] = Field(
        "transformer_engine", description="implementation of the layers"
    )
    transformer_engine: str = Field(
        TRANSFORMER_ENGINE,
        pattern=r"^\d{1,3}\.\d{1,3}(\.\d{1,3})?$",
        description="version of Transformer Engine",
        json_schema_extra={"flag": "--te-version"},
    )
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = Field(
        "auto", description="attention back end; auto: Transformer Engine's choice"
    )
    flash_attention: Literal["2", "3", "4"] = Field(
        "2",
        description="newest release of the flash-attention package; Transformer Engine takes it where it can",
        json_schema_extra={"flag": "--flash-attention-release"},
    )
    deterministic: bool = Field(
        False, description="bitwise reproducible training, with other kernels for attention and embedding"
    )
    gradient_accumulation_fusion: bool = Field(True, description="the GEMM of a weight gradient adds to main_grad")
    bias_gelu_fusion: bool = Field(True, description="bias and GELU in one kernel")
    bias_swiglu_fusion: bool = Field(True, description="bias and SwiGLU in one kernel")
    bias_dropout_fusion: bool = Field(True, description="bias, dropout and residual in one kernel")
    rope_fusion: bool = Field(True, description="rotary embedding in one kernel")
    masked_softmax_fusion: bool = Field(True, description="scale, mask and softmax in one kernel")
    rotary_interleaved: bool = Field(False, description="rotary embedding rotates pairs of neighbouring features")
    attention_softmax_in_fp32: bool = Field(False, description="unfused attention: softmax in fp32")
    query_key_layer_scaling: bool = Field(
        False, description="scale attention scores by the layer's number; softmax in fp32"
    )
    fp32_residual: bool = Field(False, description="hidden states between layers in fp32 (refused)")
    cross_entropy_fusion: Literal["none", "native", "te"] = Field(
        "none",
        description="fused vocabulary-parallel cross entropy: none, Megatron's own (native) or Transformer Engine's "
        "(te)",
    )
    largest_logit: bool = Field(
        False,
        description="attention returns each head's largest score, which is logged",
        json_schema_extra={"flag": "--log-max-attention-logit"},
    )
    gather_in_step: bool = Field(
        False,
        description="the first virtual stage's parameters are gathered beside the optimizer's step of the others",
        json_schema_extra={"flag": "--overlap-param-gather-with-optimizer-step"},
    )
    logits_dtype: Literal["bf16", "fp32"] | None = Field(
        None, description="dtype in which the head's product returns logits; default: that of the hidden state"
    )
    mlp_chunks: int = Field(
        1,
        ge=1,
        le=2**20,
        description="parts of the sequence that an MLP takes one after the other",
        json_schema_extra={"flag": "--mlp-chunks"},
    )
    te_activation: bool = Field(
        False,
        description="activation functions are modules of Transformer Engine",
        json_schema_extra={"flag": "--use-te-activation-func"},
    )
    clips_queries: bool = Field(
        False,
        description="each head's largest score is returned, and weights of queries and keys are made smaller where it "
        "is too large (Muon's clip)",
        json_schema_extra={"flag": "--qk-clip"},
    )
    norm_takes_residual: bool = Field(
        False,
        description="an RMSNorm that stands apart adds the residual's gradient to its own in one kernel",
        json_schema_extra={"flag": "--fused-residual-rmsnorm"},
    )
    joint_latent_down: bool = Field(
        False,
        description="latent attention: both projections to a lower rank are one, with the norm before them in it",
        json_schema_extra={"flag": "--mla-down-proj-fusion"},
    )
    fuses_operations: bool = Field(
        False,
        description="a dense MLP, with the norm before it, or a rank's experts are one chain of Transformer Engine's "
        "operations",
        json_schema_extra={"flag": "--use-transformer-engine-op-fuser"},
    )
    mamba_apart: bool = Field(
        False,
        description="convolution and scan of Mamba-2 layers are operators of their own, and save what they read",
        json_schema_extra={"flag": "--disable-mamba-mem-eff-path"},
    )
    mamba_states: Literal["bf16", "fp32"] | None = Field(
        None,
        description="dtype of the states between chunks of a Mamba-2 layer's scan; default: that of activations",
        json_schema_extra={"flag": "--mamba-training-ssm-states-dtype"},
    )
    mamba_chunk: Count = Field(
        128,
        description="tokens that a Mamba-2 layer's scan takes at once (chunk_size of its config.json)",
        json_schema_extra={"flag": "--mamba-chunk-size"},
    )
    packed: bool = Field(
        False,
        description="documents or conversations are packed: all sequences of a micro-batch are one, and none of their "
        "documents attends to another",
        json_schema_extra={"flag": "--packed-sequences"},
    )
    detaches_heads: bool = Field(
        False,
        description="multi-token prediction trains only its own layers: neither the model, nor embedding and head",
        json_schema_extra={"flag": "--mtp-detach-heads"},
    )
    mixes_states: bool = Field(
        False,
        description="multi-token prediction: tokens take hidden states of all depths before as a depth's input",
        json_schema_extra={"flag": "--mtp-hsm"},
    )
    per_token_loss: bool = Field(False, description="sum the loss over tokens and divide at the end")
    attention_mask_in_dataloader: bool = Field(True, description="the data loader creates an attention mask")
    vocab_multiple: Count = Field(128, description="pad the vocabulary to a multiple of this number x tp")
    distributed_optimizer_instances: Degree = Field(
        1, description="number of replicas of the distributed optimizer's shards"
    )
    overlap_grad_reduce: bool = Field(False, description="reduce gradients bucket by bucket during backward")
    overlap_param_gather: bool = Field(False, description="gather parameters bucket by bucket during forward")
    bucket_size: int | None = Field(
        None, ge=1, le=2**40, description="parameters in a bucket; default: max(40,000,000, 1,000,000 x dp x cp)"
    )
    buckets: int | None = Field(
        None,
        ge=1,
        le=2**20,
        description="buckets of a rank's gradients, in place of bucket_size",
        json_schema_extra={"flag": "--num-buckets"},
    )
    clone_scattered_embedding: bool = Field(
        True, description="copy this rank's tokens of the embedding under sequence parallelism, so that all can end"
    )
    fsdp: MegatronSharding = Field(
        "none",
        description="Megatron-FSDP, and what it shards; none: Megatron's own data parallelism",
        json_schema_extra={"flag": "--megatron-fsdp"},
    )
    fsdp_communication: Dtype | None = Field(
        None,
        description="Megatron-FSDP: dtype in which gradients are reduced; default: precision.gradients",
        json_schema_extra={"flag": "--megatron-fsdp-communication"},
    )
    fsdp_outer: Literal["no_shard", "optim"] = Field(
        "no_shard",
        description="Megatron-FSDP with several distributed_optimizer_instances: share states out to all of them",
        json_schema_extra={"flag": "--megatron-fsdp-outer"},
    )
    fsdp_double_buffer: bool = Field(
        False,
        description="Megatron-FSDP: two buffers for gathered layers and two for gradients, kept for good",
        json_schema_extra={"flag": "--megatron-fsdp-double-buffer"},
    )
    fsdp_unit_size: Count | None = Field(
        None,
        description="Megatron-FSDP: elements that wait to be reduced; half as many are gathered ahead",
        json_schema_extra={"flag": "--megatron-fsdp-unit-size"},
    )
    fsdp_meta_device: bool = Field(
        False,
        description="Megatron-FSDP: build the model on the meta device",
        json_schema_extra={"flag": "--megatron-fsdp-meta-device"},
    )
    fsdp_max_pool: bool = Field(
        False,
        description="Megatron-FSDP: double buffers are as large as any layer's, and layers of all kinds share them",
        json_schema_extra={"flag": "--megatron-fsdp-max-pool"},
    )
    fsdp_persistent: bool = Field(
        False,
        description="Megatron-FSDP: with double buffers, what does not share them has buffers of its own for good",
        json_schema_extra={"flag": "--megatron-fsdp-persistent"},
    )
    fsdp_keep_transposes: bool = Field(
        False,
        description="Megatron-FSDP: transposed copies of weights in 8 bits stay once they have been made",
        json_schema_extra={"flag": "--megatron-fsdp-keep-transposes"},
    )
    torch_fsdp: TorchSharding = Field(
        "none",
        description="PyTorch's FSDP2 in the place of Megatron's own data parallelism: gathered parameters end behind "
        "forward (reshard), or stay until backward (keep)",
        json_schema_extra={"flag": "--torch-fsdp"},
    )
    torch_fsdp_host_init: bool = Field(
        False,
        description="PyTorch's FSDP2: build the model in host memory, from where a module at a time is sharded",
        json_schema_extra={"flag": "--torch-fsdp-host-init"},
    )
    optimizer_offload: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="fraction of the optimizer's states that the host keeps (HybridDeviceOptimizer)",
        json_schema_extra={"flag": "--optimizer-offload-fraction"},
    )
    offload_modules: tuple[OffloadModule, ...] | None = Field(
        None,
        min_length=1,
        max_length=7,
        description="modules of layers whose saved tensors go to the host (fine-grained activation offloading)",
        json_schema_extra={"flag": "--offload-modules"},
    )
    offload_least: Elements = Field(
        1 << 20,
        description="elements of the smallest tensor that goes to the host with offload_modules",
        json_schema_extra={"flag": "--min-offloaded-tensor-size"},
    )
    offload_layers: int = Field(
        0,
        ge=0,
        le=10_000,
        description="layers, from the first one on, whose saved tensors go to the host (Transformer Engine's CPU "
        "offloading)",
        json_schema_extra={"flag": "--offload-layers"},
    )
    cuda_graphs: Literal["none", "local", "transformer_engine", "full_iteration"] = Field(
        "none",
        description="CUDA graphs of layers (transformer_engine, or local: Megatron-Core's own), or of an iteration's "
        "passes (full_iteration)",
        json_schema_extra={"flag": "--cuda-graph-impl"},
    )
    cuda_graph_modules: tuple[GraphModule, ...] | None = Field(
        None,
        max_length=6,
        description="parts of layers that CUDA graphs run; default: whole layers",
        json_schema_extra={"flag": "--cuda-graph-modules"},
    )
    sums_in_fp32: bool = Field(
        False,
        description="the distributed optimizer sums gradients in 16 bits in fp32: every rank receives its shard of all "
        "others",
        json_schema_extra={"flag": "--ddp-reduce-scatter-with-fp32-accumulation"},
    )
    fp32_gradients_of: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        max_length=100,
        description="patterns of names of parameters that accumulate gradients in fp32 beside the 16-bit buffer; all: "
        "every one",
        json_schema_extra={"flag": "--fp32-gradients-of"},
    )
    precision_of: tuple[ModulePrecision, ...] | None = Field(
        None,
        min_length=1,
        max_length=1000,
        description="PATTERN=16bit or PATTERN=low for names of linear layers, of which the first that matches counts: "
        "products in 16 bits, or as precision.fp8 or fp4 has them",
        json_schema_extra={"flag": "--precision-of-modules"},
    )
    fp8_attention: bool = Field(
        False,
        description="cuDNN's attention multiplies in 8 bits, too, with the recipe of precision.fp8, or another that "
        "NVTE_DPA_FP8_RECIPE names",
        json_schema_extra={"flag": "--fp8-dot-product-attention"},
    )
    fp8_output: bool = Field(
        False,
        description="the output layer is Transformer Engine's, and multiplies in 8 bits, too, with precision.fp8 mxfp8",
        json_schema_extra={"flag": "--fp8-output-proj"},
    )
    registers_buffers: bool = Field(
        False,
        description="buffers of parameters and gradients come from NCCL (ncclMemAlloc), in memory pools of their own",
        json_schema_extra={"flag": "--use-nccl-ub"},
    )
    sharp: bool = Field(
        False,
        description="switches may sum gradients of data-parallel ranks (SHARP)",
        json_schema_extra={"flag": "--use-sharp"},
    )
    nccl_blocks: str | None = Field(
        None,
        max_length=1000,
        pattern=r"^[a-z_]{1,30}=\d{0,3}-\d{0,3}(,[a-z_]{1,30}=\d{0,3}-\d{0,3}){0,30}$",
        description="fewest and most channels of NCCL's communicators, by Megatron-Core's names of groups, such as "
        "tp=-8,dp_cp=2-16",
        json_schema_extra={"flag": "--nccl-blocks"},
    )
    cuda_graph_warmup: int = Field(
        3,
        ge=0,
        le=2**31,
        description="iterations before CUDA graphs of layers are captured; 0: nothing else is in memory then",
        json_schema_extra={"flag": "--cuda-graph-warmup-steps"},
    )
    pad_buckets: bool = Field(
        False,
        description="the distributed optimizer pads buckets to multiples of 65,536 elements, for NCCL's bandwidth",
        json_schema_extra={"flag": "--pad-buckets"},
    )
    tp_comm_overlap: bool = Field(
        False,
        description="tensor-parallel ranks exchange beside products, through user buffers outside of PyTorch",
        json_schema_extra={"flag": "--tp-comm-overlap"},
    )
    optimizer_graph: bool = Field(
        False,
        description="the optimizer's step is a CUDA graph, whose memory lies in a pool of its own",
        json_schema_extra={"flag": "--optimizer-cuda-graph"},
    )
    empty_cache: int = Field(
        0,
        ge=0,
        le=2,
        description="the allocator's cache is emptied before every step (1), or before and behind it (2)",
        json_schema_extra={"flag": "--empty-unused-memory-level"},
    )
    distribute_saved: bool = Field(
        False,
        description="full recompute: each tensor-parallel rank keeps its part of a layer's input",
        json_schema_extra={"flag": "--distribute-saved-activations"},
    )
    defer_embedding_wgrad: bool = Field(
        False,
        description="the head's weight gradients are computed when all micro-batches have ended",
        json_schema_extra={"flag": "--defer-embedding-wgrad-compute"},
    )
    wgrad_deferral_limit: int = Field(
        0,
        ge=0,
        le=2**31,
        description="micro-batches whose weight gradient of the head is deferred; 0: all",
        json_schema_extra={"flag": "--wgrad-deferral-limit"},
    )
    log_num_zeros_in_grad: bool = Field(False, description="count the zeros in gradients at every step")
    log_params_norm: bool = Field(False, description="compute the norm of parameters at every step")
    clip_grad: float = Field(1.0, ge=0.0, le=1e6, description="clip gradients to this norm; 0: no clipping")
    check_for_nan: bool = Field(True, description="look for NaN in loss and gradients")
    cp_communication: Literal["p2p", "a2a", "all_gather", "a2a+p2p"] = Field(
        "p2p", description="how context parallelism exchanges keys and values"
    )
    cp_inner: int | None = Field(
        None,
        ge=1,
        le=2**16,
        description="with a2a+p2p, context-parallel neighbours that trade heads; groups of so many are a ring",
    )

    @property
    def doubles_buffers(self) -> bool:
        """Megatron-FSDP has double buffers, which buffers that come from NCCL need (``validate_args``)."""
        return self.fsdp_double_buffer or self.fsdp_max_pool or (self.fsdp != "none" and self.registers_buffers)
