"""What the recipes of Megatron-Core's modules read: sizes and choices of implementation."""

from __future__ import annotations

from dataclasses import field
from math import ceil
from typing import Literal

from ...plan.spec import LayerBlock, ModelSpec
from ...values import HashedOnce, dataclass, replace
from ..fused_attention import Release
from ..work import ITEMSIZE, Ranks
from .precision import Low, LowAttention, up

TransformerImpl = Literal["local", "transformer_engine"]
CoreAttention = Literal["local", "unfused", "fused", "flash"]
CrossEntropy = Literal["unfused", "native", "te"]
ContextCommunication = Literal["p2p", "a2a", "all_gather"]

Version = tuple[int, int]


GROUPED_ROWS = 256
"""Rows of which every expert has a multiple in a grouped tensor (``get_align_size_for_quantization``)."""

Dispatcher = Literal["allgather", "alltoall", "deepep", "hybridep"]


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """What recipes of a layer with experts read beside its spec."""

    ep: int
    """Expert-parallel size."""
    etp: int
    """Expert-tensor-parallel size."""
    dispatcher: Dispatcher
    grouped: bool
    """Experts of a rank in one grouped product (``TEGroupedMLP``), not one after the other (``SequentialMLP``)."""
    permute_fusion: bool
    shared_overlap: bool
    """Shared experts run beside the exchange of tokens."""
    capacity_factor: float | None
    padded: bool
    """Every expert's input is padded to its capacity."""
    imbalance: float
    """Tokens of this rank's experts, as a factor of the mean over ranks; at most what routing allows."""
    imbalances: tuple[float, ...] = field(default=(), kw_only=True)
    """The same of each layer that has experts, where they differ."""
    apart: bool
    """Experts' parameters are shared by other ranks than the layer's: ep > 1, or etp is not tp."""

    @property
    def flex(self) -> bool:
        """``MoEFlexTokenDispatcher`` over the library that the dispatcher is named after."""
        return self.dispatcher in ("deepep", "hybridep")

    jitters: bool = False
    """The router's input is multiplied by noise (``moe_input_jitter_eps``)."""
    router_fusion: bool = False
    """Scores and the choice of experts in one kernel of Transformer Engine (``moe_router_fusion``)."""
    wgrad_beside: bool = False
    """Gradients of experts' weights are computed beside the exchange of tokens in backward
    (``overlap_dispatch_backward_with_experts_wgrad``)."""
    grouped_tensor: bool = False
    """Counts of the grouped product's rows stay on the GPU, and each is a multiple of 256
    (``moe_use_grouped_tensor``)."""
    rank_capacity: float | None = None
    """Rows that HybridEP gives a rank's experts, as a factor of the mean (``moe_expert_rank_capacity_factor``)."""
    router_pads: bool = False
    """The router sends every expert a multiple of the rows that quantised products want
    (``moe_router_padding_for_quantization``)."""
    shared_chain: bool = False
    """Shared experts are one chain of operations (``use_grouped_gemm_for_shared_expert``)."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """How layers run in parts beside those of another micro-batch (``overlap_moe_expert_parallel_comm``)."""

    delays: bool = False
    """Products for gradients of weights follow parts of backward (``delay_wgrad_compute``)."""
    early: bool = False
    """Attention's backward comes before the forward pass of experts
    (``ep_overlap_early_attn_memory_release``)."""
    together: bool = False
    """Delayed gradients are summed once all of a part are there (Megatron-FSDP's ``post_wgrad_grad_acc_hook``), not
    one by one (``register_wgrad_accumulation_and_reduce_hooks``)."""


@dataclass(frozen=True, slots=True)
class Routed:
    """Tokens of a micro-batch on their way through experts, counted on one rank."""

    own: int
    """T: tokens of the router, s b / t."""
    sent: int
    """Rows that the rank sends: k T, or the experts' capacity."""
    received: int
    """Rows that arrive from other expert-parallel ranks, before ranks of one expert share them (etp)."""
    held: int
    """Rows of the rank's experts."""


@dataclass(frozen=True, slots=True)
class CoreShape(HashedOnce):
    """One micro-batch of one architecture on one tensor- and context-parallel rank.

    Everything that a recipe reads is here, so that equal shapes share one recorded module.
    """

    spec: ModelSpec
    """Of any depth (``plan.spec.of_any_depth``)."""
    b: int
    """Micro-batch size."""
    s: int
    """Tokens of one sequence on this rank: sequence length / context-parallel size."""
    t: int
    """Tensor-parallel size."""
    dtype: str
    """Of parameters and activations."""
    vocab: int
    """Padded vocabulary, whole: this rank holds vocab / t."""
    cp: int = 1
    """Context-parallel size."""
    cp_communication: ContextCommunication = "p2p"
    cp_inner: int = 1
    """Ranks that trade heads before a ring of cp / cp_inner passes keys and values."""
    sequence_parallel: bool = False
    implementation: TransformerImpl = "transformer_engine"
    te: Version = (2, 18)
    """Version of Transformer Engine whose saved tensors are meant."""
    attention: CoreAttention = "flash"
    """``local`` is Megatron's own ``DotProductAttention``; the others are back ends of Transformer Engine."""
    flash: Release = Release()
    """Of flash-attention, where that is the back end."""
    deterministic: bool = False
    """``--deterministic-mode``: Megatron's own embedding and cross entropy."""
    deterministic_attention: bool = False
    """``NVTE_ALLOW_NONDETERMINISTIC_ALGO=0``, which that mode demands, too: Transformer Engine's attention."""
    gradient_fusion: bool = True
    """``gradient_accumulation_fusion``: weight gradients are added to ``main_grad`` by the GEMM itself."""
    bias_activation_fusion: bool = True
    """``bias_gelu_fusion`` or ``bias_swiglu_fusion``, whichever the activation has."""
    bias_dropout_fusion: bool = True
    rope_fusion: bool = True
    rotary_interleaved: bool = False
    masked_softmax_fusion: bool = True
    softmax_in_fp32: bool = True
    query_key_layer_scaling: bool = False
    cross_entropy: CrossEntropy = "unfused"
    fp32_residual: bool = False
    recompute_modules: tuple[str, ...] = ()
    """Selective recompute: of ``core_attn``, ``layernorm``, ``mlp``, as ``--recompute-modules``."""
    offload: tuple[str, ...] = ()
    """Modules of a layer whose saved tensors go to the host (``--offload-modules``),"""
    offload_kept: tuple[str, ...] = ()
    """of which these keep them in the first micro-batch;"""
    offload_least: int = 1 << 20
    """tensors of fewer elements stay (``min_offloaded_tensor_size``)."""
    defers: bool = False
    """The head's weight gradients are computed behind the last micro-batch (``defer_embedding_wgrad_compute``)."""
    graphs: tuple[str, ...] | None = None
    """Parts of a layer that CUDA graphs run (``--cuda-graph-modules``), all of it where none are named;"""
    attention_mask: bool = True
    """An attention mask is made in the data loader and given to the layers."""
    clones_embedding: bool = True
    """This rank's tokens of the embedding are copied under sequence parallelism."""
    per_token_loss: bool = False
    largest_logit: bool = False
    """Attention returns each head's largest score, too (``log_max_attention_logit``)."""
    te_activation: bool = False
    """Activation functions are Transformer Engine's modules (``use_te_activation_func``)."""
    norm_takes_residual: bool = False
    """RMSNorms apart return the residual, too (``fused_residual_rmsnorm``)."""
    joint_latent_down: bool = False
    """Latent attention's projections to a lower rank are one, with the norm in it (``mla_down_proj_fusion``)."""
    fuses_operations: bool = False
    """A dense MLP is one chain of Transformer Engine's operations (``use_transformer_engine_op_fuser``), or a rank's
    experts are."""
    mamba_apart: bool = False
    """Convolution and scan of Mamba layers are operators of their own (``use_mamba_mem_eff_path=False``)."""
    mamba_states: str | None = None
    """Dtype of the states between chunks of their scan, where it is not that of activations
    (``mamba_training_ssm_states_dtype``)."""
    mamba_chunk: int = 128
    """Tokens that their scan takes at once."""
    packed: int = 0
    """Sequences that are one behind the other in the one of a micro-batch, each of documents that do not attend to one
    another; 0: none are."""
    detaches_heads: bool = False
    """Multi-token prediction trains its own layers alone (``mtp_detach_heads``)."""
    mixes_states: bool = False
    """Its depths take hidden states of all depths before (``mtp_hsm``)."""
    logits: str | None = None
    """Dtype of logits, where it is not that of the hidden state (``logit_dtype``)."""
    mlp_chunks: int = 1
    """Parts of the sequence that an MLP takes one after the other (``mlp_chunks_for_training``)."""
    distributes: bool = False
    """Layers that are recomputed whole keep a part of their input on each tensor-parallel rank
    (``distribute_saved_activations``)."""
    multiprocessors: int = 132
    """Of the GPU (H100 132, B200 148, GB200 152): flash attention's deterministic backward splits by it."""
    experts: ExpertShape | None = None
    """Of a layer that has them."""
    weighted_fusion: bool = True
    """Experts' activation and the product with a row's probability in one kernel, where the activation has a choice."""
    kind: str = ""
    """Of a hybrid's layer, its letter in ``layer_pattern``: it has one block. Else all."""
    decoder: int = 0
    """Tokens of the decoder's sequence, where there is an encoder, whose sequence has ``s``."""
    replaced: tuple[str, str] = ("", "")
    """What stands in place of this layer's attention and of its MLP (``plan.spec.OTHERS``), if anything."""
    linear: bool = False
    """This layer has a gated delta net in place of attention, as one of kind G has."""
    turns: bool = True
    """Rotary positions, where the model has them, are applied in this layer (``no_rope_freq``)."""
    keys: int = 0
    """Of a decoder's layer: tokens of the encoder, to which it attends, too."""
    core: Version = (0, 20)
    """Version of Megatron-Core, as far as layers with experts differ."""

    overlap: Overlap | None = None
    """Layers run in parts, beside which those of another micro-batch run."""
    low: Low | None = None
    """Precision of linear layers' products, if that is not ``dtype``,"""
    low_attention: LowAttention | None = None
    """and that of attention (``fp8_dpa``);"""
    low_head: bool = False
    """the output layer is one of Transformer Engine's linear layers, and multiplies so, too (``fp8_output_proj``)."""
    wide_further: bool = False
    """Linear layers of multi-token prediction have ``dtype`` all the same;"""
    wide: frozenset[str] = frozenset()
    """of this layer's linear layers, by the names of recipes, those that have ``dtype`` all the same."""
    precision_of: tuple[str, ...] = ()
    """Patterns of names that say which (``plan.module_precision``),"""
    starts: tuple[int, ...] = ()
    """and first layers of chunks, in each of which layers are numbered from 0."""
    sixteen_bit: tuple[int, int] = (0, 0)
    """which so many layers at the start of the model, and at its end, have."""
    layers: int = 0
    """Of the whole model, where some of them differ."""
    asynchronous: bool = True
    """Collectives of a column-parallel layer run beside its products
    (``LinearWithGradAccumulationAndAsyncCommunication``), as they do since 2022."""

    user_buffers: bool = False
    """Collectives of Transformer Engine's linear layers run beside their products (``--tp-comm-overlap``)."""

    def within(self, module: str) -> CoreShape:
        """As the linear layer ``module`` has it (``TELinear.forward``: its own autocast)."""
        return replace(self, low=None, wide=frozenset()) if module in self.wide else self

    def with_block(self, block: LayerBlock) -> CoreShape:
        """Of one layer among others that differ (``HeterogeneousTransformerConfig.get_config_for_layer``)."""
        sizes = {"kv_heads": block.kv_heads or self.spec.kv_heads, "ffn": block.ffn or self.spec.ffn}
        return replace(self, spec=self.spec.model_copy(update={**sizes, "layer_blocks": ()}), replaced=block.replaced)

    @property
    def has_delta(self) -> bool:
        return self.linear or self.kind == "G"

    @property
    def ranks(self) -> Ranks:
        """How tensor-parallel ranks share linear layers."""
        return Ranks(self.t, self.sequence_parallel, self.asynchronous)

    @property
    def te_ranks(self) -> Ranks:
        """The same of Transformer Engine's."""
        return replace(self.ranks, buffers=self.user_buffers)

    def added(self, dtype: str | None) -> int:
        """Bytes that move for each element of a weight's gradient which the product adds to a buffer of ``dtype``; 0
        where it is a tensor of its own."""
        return 2 * ITEMSIZE[dtype] if self.gradient_fusion and dtype is not None else 0

    @property
    def saves_original(self) -> bool:
        """Linear layers whose input another operator saves anyway save that, not a quantised copy
        (``set_save_original_input``)."""
        return self.low is not None and self.low.recipe != "delayed"

    @property
    def attended(self) -> tuple[int, int]:
        """Sequences, and tokens of each, within which queries see keys."""
        return (self.packed, self.s // self.packed) if self.packed else (self.b, self.s)

    @property
    def mixture(self) -> ExpertShape:
        """``experts`` of a layer that has them."""
        assert self.experts is not None
        return self.experts

    @property
    def local_experts(self) -> int:
        """Experts of this rank, whole or a part of each (etp)."""
        return self.spec.experts // self.experts.ep if self.experts is not None else 0

    @property
    def expert_ranks(self) -> int:
        """Ranks that divide each expert."""
        return self.experts.etp if self.experts is not None else 1

    @property
    def capacity(self) -> int:
        """Rows of one rank's tokens that an expert takes (``get_capacity``)."""
        factor = self.mixture.capacity_factor
        assert factor is not None
        return ceil(self.local_s * self.b * self.spec.expert_top_k / self.spec.experts * factor)

    @property
    def multiple_of_rows(self) -> int:
        """Of what every expert's rows are a multiple (``get_align_size_for_quantization``); 0: of nothing."""
        if self.experts is not None and self.experts.grouped_tensor:
            return GROUPED_ROWS
        return self.low.multiple if self.low is not None else 0

    @property
    def routed(self) -> Routed:
        """``MoEAlltoAllTokenDispatcher.preprocess``; capacity: ``get_capacity`` of a rank's own tokens."""
        experts, spec = self.mixture, self.spec
        own = self.local_s * self.b
        sent = own * spec.expert_top_k
        if experts.padded:
            sent = self.capacity * spec.experts
            return Routed(own, sent, sent, sent * experts.etp)
        multiple = self.multiple_of_rows
        if experts.router_pads and self.low is not None:
            sent = up(ceil(sent / spec.experts), multiple) * spec.experts
        most = max(sent, own * experts.ep * min(spec.expert_top_k, self.local_experts))
        if experts.capacity_factor is not None:
            sent = min(sent, min(self.capacity, own) * spec.experts)
            most = min(most, self.capacity * experts.ep * self.local_experts)
        received = min(ceil(sent * experts.imbalance), most)
        if multiple and experts.dispatcher == "hybridep":  # HybridEPDispatch: pad_multiple
            used = up(ceil(received / self.local_experts), multiple) * self.local_experts
            budget = experts.rank_capacity
            received = used if budget is None else up(int(sent * budget), multiple)
        return Routed(own, sent, received, received * experts.etp)

    @property
    def fewest_experts(self) -> tuple[CoreShape, int]:
        """The shape with two experts on a rank, on as many more ranks, and how many times the rank has these: layers
        differ in the groups of their products alone. The shape itself, once, where they differ in more."""
        experts, local = self.experts, self.local_experts
        if experts is None or experts.ep == 1 or local < 4 or local % 2 or self.spec.mlp_bias or self.low is not None:
            return self, 1
        same = experts.grouped and not experts.grouped_tensor and experts.dispatcher == "alltoall"
        if not same or (experts.imbalance != 1.0 and not experts.padded):
            return self, 1
        return replace(self, experts=replace(experts, ep=self.spec.experts // 2)), local // 2

    @property
    def local_s(self) -> int:
        """Tokens of one sequence outside the tensor-parallel regions: s / t with sequence parallelism."""
        return self.s // self.t if self.sequence_parallel else self.s

    @property
    def hidden(self) -> tuple[int, int, int]:
        """Shape of the hidden state outside the tensor-parallel regions: (s, b, h), or (s/t, b, h)."""
        return (self.local_s, self.b, self.spec.hidden)
