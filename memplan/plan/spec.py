"""What a model is: its architecture, independent of how it is trained.

A spec is one YAML file in ``model_specs/`` (or a Hugging Face ``config.json`` read into the same
fields). Sizes are element counts; nothing here knows about ranks, bytes or frameworks.

Layers that differ from one another in attention and MLP, as a search of architectures leaves them (Puzzle,
arXiv 2411.19146; Megatron-Core's ``transformer/heterogeneous/heterogeneous_config.py``).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from ..families import ROOMS as FAMILIES
from .errors import PlanError
from .section import OneOf, Terse

NONE, LINEAR = "none", "linear"
OTHERS = (NONE, LINEAR)
"""What stands in place of attention or an MLP: nothing, or one linear layer behind a norm."""

_PART = r"(?:[1-9]\d{0,8}|none|linear)"

BlockText = Annotated[str, Field(pattern=rf"^{_PART}:{_PART}$")]


class LayerBlock(NamedTuple):
    """One layer."""

    kv_heads: int
    """Of its attention; 0 where there is none."""
    ffn: int
    """Width of its MLP; 0 where there is none."""
    attention: str = ""
    """What stands in place of attention (``OTHERS``), if anything does,"""
    mlp: str = ""
    """and in place of the MLP."""

    @property
    def replaced(self) -> tuple[str, str]:
        return self.attention, self.mlp


@lru_cache(maxsize=4096)
def block_of(text: str) -> LayerBlock:
    """``KV_HEADS:FFN``, either of which may be ``none`` or ``linear``."""
    attention, _, mlp = text.partition(":")
    kv_heads, ffn = (0 if part in OTHERS else int(part) for part in (attention, mlp))
    return LayerBlock(kv_heads, ffn, *(part if part in OTHERS else "" for part in (attention, mlp)))


def kinds_of(blocks: Sequence[str]) -> tuple[str, ...]:
    """Blocks that differ, each once, in the order of layers."""
    return tuple(dict.fromkeys(blocks))


# -- spec ----------------------------------------------------------------------------------------------


Family = Annotated[str, OneOf(FAMILIES)]
Norm = Literal["layernorm", "layernorm_without_bias", "rmsnorm"]
Positions = Literal["learned", "rotary", "alibi", "none"]
Activation = Literal["gelu", "gelu_new", "gelu_fast", "relu", "relu2", "swiglu", "geglu", "quick_geglu"]
Blocks = Literal["sequential", "parallel", "parallel_one_norm"]
RouterScore = Literal["softmax", "sigmoid"]
RouterBalancing = Literal["none", "sinkhorn", "aux_loss", "seq_aux_loss", "global_aux_loss"]

MOST_LAYERS = 1024
"""Of a model: each is followed through the allocator. The deepest that were trained have a thousand."""

Size = Annotated[int, Field(ge=1, le=2**31)]
LayerCount = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Rows = Annotated[int, Field(ge=0, le=2**31)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class ModelSpec(Terse):
    """The architecture of a transformer.

    ``family`` names the code that the model usually runs as (Hugging Face ``model_type``, or ``gpt``
    for Megatron's GPT); it selects the recipe of a layer where a framework has several.
    """

    unsaid: ClassVar[frozenset[str]] = frozenset(
        (
            "experts", "expert_top_k", "expert_ffn", "expert_latent", "dense_layers", "shared_expert_ffn",
            "shared_expert_gate", "router_score", "router_score_first", "router_expert_bias", "router_groups",
            "router_group_top_k", "router_scaling", "router_dtype", "router_balancing", "router_aux_loss",
            "router_z_loss", "latent_q_rank", "latent_kv_rank", "nope_head_dim", "rope_head_dim", "value_head_dim",
            "mtp_layers", "attention_sinks", "attention_chunk", "nope_interval", "qk_norm_over", "activation_clamp",
            "attention_gate", "residual_scale", "logit_scale", "router_weighs_inputs", "layer_pattern", "mtp_pattern",
            "mtp_shared", "labels", "mamba_heads", "mamba_head_dim", "mamba_groups", "mamba_state_dim", "layer_blocks",
            "linear_interval", "linear_key_heads", "linear_value_heads", "linear_key_head_dim", "linear_value_head_dim",
            "linear_conv_kernel", "yarn_factor", "full_interval", "router_loss", "index_heads", "index_head_dim",
            "index_top_k", "full_head_dim", "full_kv_heads", "keys_as_values",
        )
    )  # fmt: skip

    has_sizes: ClassVar[bool] = True
    """Its sizes are those of its layers."""

    name: str = Field(
        description="name of the model", json_schema_extra={"flag": "--model-name"}, min_length=1, max_length=200
    )
    family: Family = Field(description="code of the model: Hugging Face's model_type, or gpt for Megatron's GPT")
    layers: LayerCount = Field(description="transformer layers")
    hidden: Size = Field(description="hidden size")
    heads: Size = Field(description="attention heads")
    kv_heads: Size = Field(description="key/value heads: as many as heads for MHA, 1 for MQA, between for GQA")
    head_dim: Size = Field(description="features of one head")
    ffn: Size = Field(description="width of the MLP's inner layer (of one of the two up projections for SwiGLU)")
    vocab: Size = Field(description="tokens in the vocabulary, before any padding")
    positions_max: Size = Field(
        description="rows of the learned position table; for rotary and ALiBi the longest sequence trained"
    )

    norm: Norm = Field(
        description="LayerNorm (weight and bias), LayerNorm without a bias (Command R) or RMSNorm (weight)"
    )
    norm_place: Literal["pre", "post", "both"] = Field(
        "pre", description="norms before each block, after it as in BERT, or before and after as in Gemma 2"
    )
    blocks: Blocks = Field(
        "sequential",
        description="attention then MLP, or both side by side with two norms (GPT-NeoX) or one norm (GPT-J)",
    )
    positions: Positions = Field(description="position encoding")
    position_offset: Rows = Field(0, description="unused first rows of the learned position table (OPT: 2)")
    rotary_fraction: float = Field(
        1.0, gt=0.0, le=1.0, description="fraction of each head's features that rotary positions rotate"
    )
    yarn_factor: float | None = Field(
        None,
        ge=1.0,
        description="factor by which YaRN stretches rotary positions, whose sines and cosines it scales "
        "(gpt-oss); default: plain ones",
    )
    activation: Activation = Field(
        description="MLP activation; gelu_new and gelu_fast are the tanh form in Python; relu2 is the square of relu; "
        "swiglu, geglu and quick_geglu (x sigmoid(1.702 x), and 1 added to the other half) have a gate"
    )
    activation_clamp: float | None = Field(
        None, gt=0.0, description="largest value that enters a gated activation (gpt-oss); default: no limit"
    )
    attention_bias: bool = Field(True, description="bias on the query/key/value projections")
    attention_output_bias: bool = Field(True, description="bias on the attention's output projection")
    mlp_bias: bool = Field(True, description="bias on the MLP's projections")
    qk_norm: bool = Field(False, description="RMSNorm of queries and keys, as in Qwen 3")
    qk_norm_over: Literal["head", "heads", "each_head", "head_without_weight"] = Field(
        "head",
        description="what it takes: each head, all heads together (OLMoE), each head with weights of its own (Command "
        "R+), or each head without a weight (Llama 4)",
    )
    attention_sinks: bool = Field(
        False, description="a learned number of each head that joins its softmax and takes no value (gpt-oss)"
    )
    attention_gate: bool = Field(
        False, description="the output of attention is multiplied by a sigmoid, of as many features (Qwen3-Next)"
    )
    causal: bool = Field(True, description="causal attention; false for an encoder")
    sliding_window: Size | None = Field(None, description="attention window in tokens; default: no limit")
    alternating_windows: bool = Field(
        False, description="apply the window to every second layer only, from the first layer on (Gemma 2)"
    )
    full_interval: Rows = Field(
        0,
        description="every how many layers one sees all tokens, by rotary positions of its own, and the others those "
        "of the window (Gemma 3: 6); 0: layers are alike",
    )
    full_head_dim: Rows = Field(
        0, description="features of one head in layers that see all tokens (Gemma 4: 512); 0: head_dim in all layers"
    )
    full_kv_heads: Rows = Field(
        0, description="key/value heads of layers that see all tokens (Gemma 4); 0: kv_heads in all layers"
    )
    keys_as_values: bool = Field(
        False,
        description="layers that see all tokens have no projection of values, and take that of keys (Gemma 4: "
        "attention_k_eq_v)",
    )
    attention_chunk: Size | None = Field(
        None, description="tokens see those of their own chunk of this many, where the layer has positions (Llama 4)"
    )
    nope_interval: Rows = Field(0, description="every how many layers one has no positions (Llama 4: 4); 0: none")
    attention_softcap: float | None = Field(
        None, gt=0.0, description="cap c of attention scores: a score x becomes c tanh(x / c) (Gemma 2)"
    )

    tied_embeddings: bool = Field(True, description="the head shares the embedding's weight")
    embedding_norm: bool = Field(False, description="norm after the embedding, as in BLOOM and BERT")
    embedding_scale: bool = Field(False, description="multiply the embedding's output by a number (Gemma 2)")
    final_norm: bool = Field(True, description="norm before the head")
    head_bias: bool = Field(False, description="bias on the head, as in GPT-J")
    logit_softcap: float | None = Field(None, gt=0.0, description="cap c of logits: a logit x becomes c tanh(x / c)")
    residual_scale: bool = Field(False, description="multiply each block's output by a number (Granite)")
    logit_scale: bool = Field(False, description="divide logits by a number (Granite)")
    labels: Rows = Field(
        0,
        description="scores of a sequence, from a head in the place of the vocabulary's (num_labels), as a classifier "
        "has them, whose loss is a cross entropy, or of one score a squared error; 0: words",
    )
    token_types: Rows = Field(0, description="rows of the token-type table (BERT); 0 where there is none")
    mlm_head: bool = Field(
        False, description="BERT's head: dense, activation and norm before a decoder that has a bias"
    )

    experts: Rows = Field(0, description="routed experts of a layer that has them; 0: dense layers")
    expert_top_k: Rows = Field(0, description="experts to which the router sends each token")
    expert_ffn: Rows = Field(0, description="width of an expert's inner layer")
    expert_latent: Rows = Field(
        0, description="features that tokens are projected to on their way to experts (Nemotron 3 Super); 0: all"
    )
    dense_layers: tuple[int, ...] = Field(
        (), max_length=MOST_LAYERS, description="layers, numbered from 0, with an MLP in place of experts, as 0,1,2"
    )
    shared_expert_ffn: Rows = Field(0, description="width of all shared experts together; 0: none")
    shared_expert_gate: bool = Field(False, description="a gate on the output of the shared experts (Qwen 2)")
    router_score: RouterScore = Field("softmax", description="scores of the router")
    router_score_first: bool = Field(
        False, description="softmax over all experts before the choice, not over the chosen (moe-router-pre-softmax)"
    )
    router_expert_bias: bool = Field(
        False, description="a bias for each expert that balances them without a loss (DeepSeek V3)"
    )
    router_groups: Rows = Field(0, description="groups of experts, of which some are chosen first; 0: no groups")
    router_group_top_k: Rows = Field(0, description="groups from which a token's experts are chosen")
    router_scaling: float | None = Field(
        None, gt=0.0, description="factor of the chosen experts' scores; default: none is multiplied"
    )
    router_weighs_inputs: bool = Field(
        False, description="multiply what experts get by the router's scores, not what they give (Llama 4)"
    )
    router_dtype: Literal["fp32", "fp64"] | None = Field(
        None, description="dtype of the router's logits and probabilities; default: that of activations"
    )
    router_balancing: RouterBalancing = Field(
        "aux_loss", description="how training balances experts: a loss of a micro-batch, sequence or batch, or sinkhorn"
    )
    router_aux_loss: float = Field(0.0, ge=0.0, description="coefficient of the balancing loss; 0: it is not computed")
    router_loss: bool = Field(
        False, description="transformers' model adds the routers' loss to its own (output_router_logits)"
    )
    router_z_loss: float = Field(0.0, ge=0.0, description="coefficient of the loss of large router logits; 0: none")

    latent_q_rank: Rows = Field(0, description="latent attention: rank of queries; 0: queries are projected at once")
    latent_kv_rank: Rows = Field(0, description="latent attention: rank of keys and values; 0: no latent attention")
    nope_head_dim: Rows = Field(0, description="latent attention: features of a query's or key's head without rotation")
    rope_head_dim: Rows = Field(0, description="latent attention: rotated features of a head, one for all heads' keys")
    value_head_dim: Rows = Field(0, description="latent attention: features of a value's head")
    index_heads: Rows = Field(
        0, description="heads of the indexer that picks the keys of each query (DeepSeek V3.2); 0: none is picked"
    )
    index_head_dim: Rows = Field(0, description="features of one head of the indexer, whose keys have one head")
    index_top_k: Rows = Field(0, description="keys that the indexer picks for each query")
    mtp_layers: Annotated[int, Field(ge=0, le=16)] = Field(
        0, description="layers behind the last that predict further tokens (multi-token prediction)"
    )

    layer_pattern: str = Field(
        "",
        max_length=MOST_LAYERS,
        description="kind of each layer of a hybrid, which has one block: M Mamba-2, * attention, - MLP, E experts, "
        "G gated delta net",
    )
    mtp_pattern: str = Field(
        "",
        max_length=16,
        description="kinds of a hybrid's layers that predict one token further",
    )
    mtp_shared: bool = Field(False, description="one layer predicts all further tokens, one after the other")
    mamba_heads: Rows = Field(0, description="heads of a Mamba-2 layer")
    mamba_head_dim: Rows = Field(0, description="features of one Mamba-2 head")
    mamba_groups: Rows = Field(0, description="groups of Mamba-2 heads that share their B and C")
    mamba_state_dim: Rows = Field(0, description="size of a Mamba-2 head's state, for each of its features")
    linear_interval: Rows = Field(
        0,
        description="every how many layers one has attention, and the others gated delta nets (Qwen3-Next: 4); 0: all",
    )
    linear_key_heads: Rows = Field(0, description="heads of queries and keys of a gated delta net")
    linear_value_heads: Rows = Field(0, description="heads of values of a gated delta net, and of its gate")
    linear_key_head_dim: Rows = Field(0, description="features of a query's or key's head of a gated delta net")
    linear_value_head_dim: Rows = Field(0, description="features of a value's head of a gated delta net")
    linear_conv_kernel: Rows = Field(4, description="tokens under the convolution of a gated delta net")
    layer_blocks: tuple[BlockText, ...] = Field(
        (),
        max_length=MOST_LAYERS,
        description="of each layer, where they differ (Llama-Nemotron): KV_HEADS:FFN, either of which may be none or "
        "linear, as 8:28672,none:7168,linear:none",
    )

    embedding_dropout: Probability = Field(description="dropout after the embedding")
    attention_dropout: Probability = Field(description="dropout of the attention's probabilities")
    hidden_dropout: Probability = Field(description="dropout of each block's output")

    published_parameters: int | None = Field(
        None,
        ge=1,
        description="number of parameters that the authors published, to test memplan's count",
        json_schema_extra={"flag": ""},
    )
    source: str = Field("", description="source of the sizes", json_schema_extra={"flag": ""})

    @property
    def patches(self) -> int | None:
        """What stands for a sequence's tokens where images are read: of each its patches, and a token before them."""
        return None

    @property
    def qkv_features(self) -> int:
        """Output features of the fused query/key/value projection: ``(a + 2 a_kv) d``, and a d of a gate."""
        return (self.heads * (1 + self.attention_gate) + 2 * self.kv_heads) * self.head_dim

    @property
    def rotary_features(self) -> int:
        """Features of a head that rotary positions turn; a fraction of whole features is no less than them."""
        return int(self.head_dim * self.rotary_fraction + 1e-6)

    @property
    def gated(self) -> bool:
        """The MLP's activation has a gate: two up projections."""
        return self.activation in ("swiglu", "geglu", "quick_geglu")

    @property
    def expert_hidden(self) -> int:
        """Features of a row that an expert gets and gives."""
        return self.expert_latent or self.hidden

    @property
    def attention_features(self) -> int:
        """Features that enter the attention's output projection: ``a d``, of values where these differ."""
        return self.heads * (self.value_head_dim or self.head_dim)

    def wrong(self, name: str, problem: str) -> PlanError:
        """What is wrong with the size ``name``."""
        value = getattr(self, name)
        return PlanError(f"model.{name}", list(value) if isinstance(value, tuple) else value, problem)

    def has_experts(self, layer: int) -> bool:
        """Whether ``layer``, numbered from 0, has experts in place of an MLP."""
        if self.layer_pattern:
            return self.kind_of(layer) == "E"
        return self.experts > 0 and layer not in self.dense_layers

    def has_positions(self, layer: int) -> bool:
        """Whether attention in ``layer``, numbered from 0, turns queries and keys, where some layers' does not."""
        return not self.nope_interval or (layer + 1) % self.nope_interval != 0

    @property
    def limits_turned(self) -> bool:
        """Layers with positions have a window or chunks, and so a mask of their own, where some have no positions."""
        return self.nope_interval > 0 and (self.sliding_window or self.attention_chunk) is not None

    def sees_all(self, layer: int) -> bool:
        """Whether ``layer``, numbered from 0, is of the second of two kinds: without a window, without positions, or
        with attention beside gated delta nets."""
        interval = self.nope_interval or self.full_interval or self.linear_interval or 2 * self.alternating_windows
        return interval > 0 and (layer + 1) % interval == 0

    @property
    def turns_twice(self) -> bool:
        """Layers of two kinds are there, each with rotary positions of its own."""
        return 0 < self.full_interval <= self.layers

    @property
    def of_full_layers(self) -> "ModelSpec":
        """The model with the sizes that its layers that see all tokens have, where these are their own."""
        return _of_full_layers(self) if self.full_head_dim else self

    def is_full(self, layer: int) -> bool:
        """Whether ``layer``, numbered from 0, has sizes of its own since it sees all tokens."""
        return self.full_head_dim > 0 and self.sees_all(layer)

    def is_linear(self, layer: int) -> bool:
        """Whether ``layer``, numbered from 0, has a gated delta net in place of attention."""
        return self.linear_interval > 0 and (layer + 1) % self.linear_interval != 0

    def kind_of(self, layer: int) -> str:
        """Its letter in ``layer_pattern``; empty where every layer has attention and an MLP or experts."""
        return self.layer_pattern[layer : layer + 1]

    def block_of(self, layer: int) -> LayerBlock | None:
        """Its sizes in ``layer_blocks``; ``None`` where all layers have those of the model."""
        return block_of(self.layer_blocks[layer]) if self.layer_blocks else None

    @property
    def mamba_inner(self) -> int:
        """Features between the projections of a Mamba-2 layer."""
        return self.mamba_heads * self.mamba_head_dim


@lru_cache(maxsize=256)
def _of_full_layers(spec: ModelSpec) -> ModelSpec:
    sizes = {"head_dim": spec.full_head_dim, "kv_heads": spec.full_kv_heads or spec.kv_heads}
    return spec.model_copy(update={**sizes, "full_head_dim": 0, "full_kv_heads": 0})


@lru_cache(maxsize=256)
def of_any_depth(spec: ModelSpec) -> ModelSpec:
    """``spec`` with one layer of each kind and without its names: models that agree in the rest are made of equal
    layers."""
    layers = spec.full_interval if spec.turns_twice else 1
    return spec.model_copy(update={"name": "", "layers": layers, "published_parameters": None, "source": ""})
