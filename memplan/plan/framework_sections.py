"""The sections of a plan that one framework reads, or the loop around it."""

from typing import ClassVar, Literal

from pydantic import Field

from .section import Count, Degree, Dtype, Elements, FrameworkSection
from .training_loops import TRAINING_LOOPS, TrainingLoop


class Experts(FrameworkSection):
    """How a model with experts is trained; Megatron-Core's arguments are called ``--moe-…``."""

    unsaid: ClassVar[frozenset[str]] = frozenset(
        {
            "router_padding",
            "flex_backend",
            "squared_relu_fusion",
            "input_jitter",
            "router_fusion",
            "overlap_exchange",
            "delay_wgrad",
            "early_attention_release",
            "wgrad_beside_dispatch",
        }
    )

    imbalance: str = Field(
        "balanced",
        pattern=r"^(balanced|worst|\d{1,4}(\.\d{1,6})?(,\d{1,4}(\.\d{1,6})?)*|.*\.(csv|json))$",
        description="tokens of the most loaded rank: balanced, a factor of the mean, the worst that routing allows, or "
        "a record of every expert's tokens in each layer (CSV or JSON)",
        json_schema_extra={"flag": "--experts-imbalance"},
    )
    router_fusion: bool = Field(
        False,
        description="scores and choice of experts in one kernel of Transformer Engine",
        json_schema_extra={"flag": "--moe-router-fusion"},
    )
    input_jitter: bool = Field(
        False, description="multiply the router's input by noise", json_schema_extra={"flag": "--moe-input-jitter"}
    )
    dispatcher: Literal["allgather", "alltoall", "flex"] = Field(
        "alltoall", description="how tokens reach experts", json_schema_extra={"flag": "--moe-dispatcher"}
    )
    flex_backend: Literal["deepep", "hybridep"] = Field(
        "deepep",
        description="library of the flex dispatcher, with buffers of its own outside of PyTorch",
        json_schema_extra={"flag": "--moe-flex-backend"},
    )
    capacity_factor: float | None = Field(
        None,
        gt=0.0,
        le=1e6,
        description="tokens that an expert takes, as a factor of the mean; further ones are dropped; default: no limit",
        json_schema_extra={"flag": "--moe-capacity-factor"},
    )
    pad_to_capacity: bool = Field(
        False,
        description="pad the input of every expert to its capacity",
        json_schema_extra={"flag": "--moe-pad-to-capacity"},
    )
    overlap_exchange: bool = Field(
        False,
        description="tokens are exchanged beside another micro-batch's computation: its layers' forward passes take "
        "turns with this one's backward passes",
        json_schema_extra={"flag": "--moe-overlap-exchange"},
    )
    delay_wgrad: bool = Field(
        False,
        description="with overlap_exchange: products for gradients of weights come behind the rest of a layer's "
        "backward",
        json_schema_extra={"flag": "--moe-delay-wgrad"},
    )
    early_attention_release: bool = Field(
        False,
        description="with overlap_exchange: attention's backward comes before the other micro-batch's experts",
        json_schema_extra={"flag": "--moe-early-attention-release"},
    )
    wgrad_beside_dispatch: bool = Field(
        False,
        description="gradients of experts' weights are computed beside the exchange of tokens in backward, of the "
        "same micro-batch",
        json_schema_extra={"flag": "--moe-wgrad-beside-dispatch"},
    )
    grouped_gemm: bool = Field(
        True,
        description="experts of a rank in one grouped product, not one after the other",
        json_schema_extra={"flag": "--moe-grouped-gemm"},
    )
    grouped_tensor: bool = Field(
        False,
        description="that product takes counts of rows on the GPU, each expert's a multiple of 256 (GroupedTensor)",
        json_schema_extra={"flag": "--moe-use-grouped-tensor"},
    )
    rank_capacity: float | None = Field(
        None,
        gt=0.0,
        le=1e6,
        description="with grouped_tensor and HybridEP: rows of a rank's experts, whatever is routed, as a factor of "
        "the mean; more are dropped; default: as many as are routed",
        json_schema_extra={"flag": "--moe-expert-rank-capacity-factor"},
    )
    permute_fusion: bool = Field(
        True,
        description="tokens are sorted by fused kernels",
        json_schema_extra={"flag": "--moe-permute-fusion"},
    )
    megatron_core: str = Field(
        "0.20",
        pattern=r"^\d{1,3}\.\d{1,3}(\.\d{1,3})?$",
        description="version of Megatron-Core whose experts are meant",
        json_schema_extra={"flag": "--megatron-core"},
    )
    router_padding: bool = Field(
        False,
        description="fp8, fp4: the router sends every expert as many rows as products want, which are else copied",
        json_schema_extra={"flag": "--moe-router-padding"},
    )
    shared_chain: bool = Field(
        False,
        description="shared experts are one chain of Transformer Engine's operations",
        json_schema_extra={"flag": "--moe-shared-chain"},
    )
    squared_relu_fusion: bool = Field(
        False,
        description="squared ReLU of experts and the product with router's probabilities in one kernel",
        json_schema_extra={"flag": "--moe-squared-relu-fusion"},
    )
    shared_expert_overlap: bool = Field(
        False,
        description="shared experts run beside the exchange of tokens",
        json_schema_extra={"flag": "--moe-shared-expert-overlap"},
    )


BUCKET_MB = 25
"""MiB of DDP's buckets where nobody says otherwise (torch, ``nn/parallel/distributed.py``)."""


class Ddp(FrameworkSection):
    """Arguments of ``DistributedDataParallel``, and of ``ZeroRedundancyOptimizer`` (``layout.zero: 1``)."""

    bucket_cap_mb: float | None = Field(
        None, gt=0.0, le=1e6, description="size of a gradient bucket in MiB; default: 25, and 1 for the first bucket"
    )
    gradient_as_bucket_view: bool = Field(False, description="gradients are views of buckets, without a second copy")
    static_graph: bool = Field(False, description="every iteration uses the same parameters")
    find_unused_parameters: bool = Field(
        False, description="look for unused parameters in every iteration; buckets are never rebuilt"
    )
    broadcast_buffers: bool = Field(True, description="broadcast rank 0's buffers before every forward")
    gradient_sync: bool = Field(
        True,
        description="reduce gradients after every micro-batch; false: after the last micro-batch only (no_sync)",
        json_schema_extra={"flag": "--ddp-gradient-sync"},
    )
    parameters_as_bucket_view: bool = Field(
        False, description="ZeRO-1: parameters are views of one flat tensor for each owner"
    )


SMALL = "auto_filter_small_kn"
"""Stands for small layers among names of those that are not converted."""


class Fsdp(FrameworkSection):
    """Arguments of ``fully_shard``, the code of the sharded model, and how it is trained."""

    unsaid: ClassVar[frozenset[str]] = frozenset(
        {
            "compile",
            "compile_loss",
            "cuda_graphs",
            "filter_fqns",
            "fqns",
            "float8_all_gather",
            "float8_scales",
            "newest",
            "pad_multiple",
        }
    )

    code: Literal["transformers", "torchtitan"] = Field(
        "transformers", description="library whose model is sharded", json_schema_extra={"flag": "--fsdp-code"}
    )
    version: Literal["1", "2"] = Field(
        "2",
        description="1: FullyShardedDataParallel, with flat parameters, as Accelerate wraps a model; 2: fully_shard",
        json_schema_extra={"flag": "--fsdp-version"},
    )
    backward_prefetch: Literal["pre", "post", "none"] = Field(
        "pre",
        description="FSDP1: in backward the next unit is gathered before gradients are computed, behind them "
        "(BACKWARD_POST, Composer's default), or when it runs (Accelerate's default): only the first hides it",
        json_schema_extra={"flag": "--fsdp-backward-prefetch"},
    )
    replicas: Degree = Field(
        1,
        description="number of groups of ranks that hold the same shards (HSDP)",
        json_schema_extra={"flag": "--fsdp-replicas"},
    )
    reshard_after_forward: bool = Field(True, description="free a layer's gathered parameters after its forward")
    reshard_to: Degree | None = Field(
        None, description="after forward, keep shards among this many ranks (an integer reshard_after_forward)"
    )
    reshard_root: bool = Field(
        False,
        description="also reshard embedding, final norm and head (transformers; Accelerate does up to 1.13; from 1.14 "
        "on it stands for fsdp.ends_apart), or torchtitan's norm and head (its policy always)",
    )
    parameters: Dtype = Field(
        "fp32", description="dtype of the shards", json_schema_extra={"flag": "--fsdp-parameters"}
    )
    reduce: Dtype = Field(
        "fp32", description="dtype of the gradients' reduction", json_schema_extra={"flag": "--fsdp-reduce"}
    )
    offload: bool = Field(
        False,
        description="keep shards, gradients and optimizer states in host memory (CPUOffloadPolicy)",
        json_schema_extra={"flag": "--fsdp-offload"},
    )
    gradient_sync: bool = Field(
        True, description="reduce gradients after every micro-batch; false: after the last micro-batch only (no_sync)"
    )
    per_operator: bool = Field(
        False,
        description="torchtitan: recompute per operator, keeping attention and every second matrix product",
        json_schema_extra={"flag": "--recompute-per-operator"},
    )
    recompute_every: Count = Field(1, description="torchtitan: full recompute of every n-th layer only")
    compile: bool = Field(
        False,
        description="torchtitan: run every layer by torch.compile (compile.enable)",
        json_schema_extra={"flag": "--compile"},
    )
    compile_loss: bool = Field(
        False, description="torchtitan since April 2025: run the loss by torch.compile (compile.components)"
    )
    filter_fqns: tuple[str, ...] | None = Field(
        None,
        max_length=1000,
        description="torchtitan with precision.fp8: parts of names of linear layers that stay in dtype, as torchtitan "
        "has them (attention.wk, layers.0., output); auto_filter_small_kn: small ones; default: output, the head",
        json_schema_extra={"flag": "--filter-fqns"},
    )
    fqns: tuple[str, ...] | None = Field(
        None,
        max_length=1000,
        description="torchtitan with mxfp8 or nvfp4: parts of names of linear layers that are converted, as its newest "
        "code has them (layers, attention.wo, lm_head); default: all",
        json_schema_extra={"flag": "--fqns"},
    )
    pad_multiple: Count | None = Field(
        None,
        description="torchtitan with mxfp8 or float8 by rows: products of experts are in 8 bits, too, of rows that are "
        "padded to a multiple of this (MXFP8-, Float8GroupedExpertsConverter); default: in dtype, without padding",
        json_schema_extra={"flag": "--pad-multiple"},
    )
    float8_all_gather: bool = Field(
        False,
        description="torchtitan with precision.fp8: shards of weights are cast before they are gathered",
        json_schema_extra={"flag": "--enable-fsdp-float8-all-gather"},
    )
    float8_scales: bool = Field(
        False,
        description="and the scales of all of them are computed at once behind every step",
        json_schema_extra={"flag": "--precompute-float8-dynamic-scale-for-fsdp"},
    )
    ends_apart: bool = Field(
        False,
        description="shard the embedding as one unit, and final norm with head as another (torchtitan from 0.2.0 on; "
        "Accelerate from 1.14 on)",
    )
    return_outputs: bool = Field(
        False,
        description="torchtitan before October 2025: the last pipeline stage keeps the logits of all micro-batches",
    )
    cuda_graphs: bool = Field(
        False,
        description="torchtitan since August 2026: a CUDA graph replays forward and backward",
        json_schema_extra={"flag": "--fsdp-cuda-graphs"},
    )

    newest: bool = Field(
        False,
        description="torchtitan: layers of Llama, Qwen 3 and DeepSeek V3 as its code has them in August 2026, in bf16, "
        "float8 by rows, MXFP8 or NVFP4; with tensor parallelism, compiled layers or tensorwise float8 they are those "
        "of older code",
        json_schema_extra={"flag": "--fsdp-newest"},
    )

    @property
    def filters_small(self) -> bool:
        """Small layers stay in dtype."""
        return SMALL in (self.filter_fqns or ())

    @property
    def words(self) -> tuple[str, ...]:
        """Parts of names of layers that stay."""
        return ("output",) if self.filter_fqns is None else tuple(one for one in self.filter_fqns if one != SMALL)


class Deepspeed(FrameworkSection):
    """``ds_config.json`` beside ``layout.zero``, the stage; sizes in elements (``deepspeed.config.Zero``)."""

    reduce_bucket_size: Elements = Field(
        500_000_000, ge=1, description="elements of a bucket in which gradients are reduced"
    )
    allgather_bucket_size: Elements = Field(
        500_000_000,
        description="elements of a bucket for all-gathers; changes no memory where PyTorch gathers in place",
    )
    contiguous_gradients: bool = Field(True, description="copy each gradient into a bucket as soon as it is computed")
    overlap_comm: bool | None = Field(
        None, description="fill one bucket while another is reduced; default: at ZeRO-3 only"
    )
    reduce_scatter: bool = Field(True, description="each rank receives the reduced gradients of its shard only")
    round_robin_gradients: bool = Field(False, description="ZeRO-1, 2: deal parameters out to ranks in turn")
    sub_group_size: Elements = Field(
        1_000_000_000, description="ZeRO-3: elements of shards that the optimizer updates at once"
    )
    stage3_prefetch_bucket_size: Elements = Field(50_000_000, description="ZeRO-3: elements gathered ahead of use")
    stage3_max_live_parameters: Elements = Field(
        1_000_000_000, description="ZeRO-3: stop prefetching above this many gathered elements"
    )
    stage3_max_reuse_distance: Elements = Field(
        1_000_000_000, description="ZeRO-3: keep gathered if reused within this many elements"
    )
    stage3_param_persistence_threshold: Elements = Field(
        100_000, description="ZeRO-3: never shard parameters of up to this many elements"
    )
    stage3_model_persistence_threshold: Elements = Field(
        2**63 - 1, description="ZeRO-3: limit on the elements of all unsharded parameters together"
    )
    memory_efficient_linear: bool = Field(
        True, description="ZeRO-3: linear layers keep no gathered weight for backward"
    )
    offload_optimizer: Literal["none", "cpu", "nvme"] = Field(
        "none", description="where optimizer states are kept; none: on the GPU"
    )
    offload_optimizer_pin: bool = Field(True, description="keep offloaded optimizer states in pinned host memory")
    offload_optimizer_ratio: float = Field(
        1.0, ge=0.0, le=1.0, description="fraction of the optimizer states that is offloaded"
    )
    offload_optimizer_buffer_count: Elements = Field(
        4, description="nvme: number of swap buffers, each of the largest sub-group's size"
    )
    offload_param: Literal["none", "cpu", "nvme"] = Field(
        "none", description="ZeRO-3: where parameter shards are kept; none: on the GPU"
    )
    offload_param_pin: bool = Field(True, description="keep offloaded parameter shards in pinned host memory")
    offload_param_max_in_cpu: Elements = Field(
        1_000_000_000, description="nvme: elements of parameter shards that stay in host memory"
    )
    offload_param_buffer_count: Elements = Field(5, description="nvme: number of swap buffers for parameter shards")
    offload_param_buffer_size: Elements = Field(
        100_000_000, description="nvme: elements of one swap buffer for parameter shards"
    )
    gradient_accumulation_dtype: Dtype | None = Field(
        None,
        description="data_types.grad_accum_dtype; the same as precision.gradients",
        json_schema_extra={"flag": "--grad-accum-dtype"},
    )
    gradient_clipping: float = Field(
        0.0, ge=0.0, le=1e6, description="clip gradients to this norm, in place; 0: no clipping"
    )
    groups: Literal["one", "decay"] = Field(
        "one",
        description="parameter groups: one for all, or (decay) one for matrices and one for the rest, as in Trainer",
        json_schema_extra={"flag": "--param-groups"},
    )


Loop = Literal[
    "none", "transformers", "sft", "dpo", "kto", "orpo", "cpo", "simpo", "llama-factory-dpo", "axolotl-dpo", "grpo",
    "rloo", "reward",
]  # fmt: skip


class Trainer(FrameworkSection):
    """Hugging Face's Trainer, beside what it shares with a plain loop."""

    shorthand = "loop"
    unsaid: ClassVar[frozenset[str]] = frozenset(
        {"precompute_ref_log_probs", "completion_length", "generation_memory", "keeps_reference"}
    )
    everywhere: ClassVar[frozenset[str]] = frozenset({"evaluation_mbs"})

    loop: Loop = Field(
        "none",
        description="training loop: a plain loop (none), transformers' Trainer, or trl's SFTTrainer (sft), DPOTrainer "
        "(dpo), ORPOTrainer (orpo), CPOTrainer (cpo; simpo with cpo_alpha 0) or RewardTrainer (reward), "
        "LLaMA-Factory's DPO (llama-factory-dpo) or Axolotl's (axolotl-dpo), of whose batches mbs and gbs count pairs, "
        "KTOTrainer (kto), of whose they count sequences, or GRPOTrainer (grpo) or RLOOTrainer (rloo), of whose they "
        "count completions",
        json_schema_extra={"flag": "--trainer"},
    )
    precompute_ref_log_probs: bool = Field(
        False,
        description="dpo, kto, axolotl-dpo: log-probabilities of the reference are computed before training, and no "
        "second model is kept",
        json_schema_extra={"flag": "--precompute-ref-log-probs"},
    )
    completion_length: Count | None = Field(
        None,
        description="grpo, rloo: tokens of seq that the model generates, the longest completion "
        "(max_completion_length)",
        json_schema_extra={"flag": "--completion-length"},
    )
    generation_memory: int | None = Field(
        None,
        ge=0,
        le=2**50,
        description="grpo, rloo: what generation holds of each GPU while the model trains, such as vLLM's share of it "
        "in the same process; 0 where other GPUs generate, or generation gives all back",
        json_schema_extra={"flag": "--generation-memory"},
    )
    keeps_reference: bool = Field(
        False,
        description="grpo, rloo: a reference model is kept for the KL term (beta above 0); adapters are the difference "
        "to it",
        json_schema_extra={"flag": "--keeps-reference"},
    )
    evaluation_batches: Count | None = Field(
        None,
        description="batches whose logits evaluation keeps on the device for compute_metrics; default: none",
        json_schema_extra={"flag": "--eval-batches"},
    )
    evaluation_mbs: int | None = Field(
        None,
        ge=0,
        le=2**31,
        description="sequences per forward pass of evaluation on one rank; 0: the job makes none; default: mbs",
        json_schema_extra={"flag": "--eval-mbs"},
    )

    @property
    def evaluated(self) -> bool:
        """Whether the plan includes an evaluation. Of the Trainer's it says so, with the size of its batches or their
        number; another loop is assumed to evaluate with the micro-batches that it trains with, unless 0 of them."""
        if self.evaluation_mbs == 0:
            return False
        return self.loop == "none" or self.evaluation_mbs is not None or self.evaluation_batches is not None

    @property
    def kind(self) -> TrainingLoop:
        """What is known of the loop."""
        return TRAINING_LOOPS[self.loop]

    @property
    def has_reference(self) -> bool:
        """There is a reference, which adapters make the model itself without them."""
        in_step = self.kind.reference == "in-step" and not self.precompute_ref_log_probs
        return in_step or self.keeps_reference
