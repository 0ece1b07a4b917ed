"""What a model is: its architecture, independent of how it is trained.

A spec is one YAML file in ``model_specs/`` (or a Hugging Face ``config.json`` read into the same
fields). Sizes are element counts; nothing here knows about ranks, bytes or frameworks.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Family = Literal["gpt2", "gpt", "bert", "bloom", "llama", "mistral", "qwen3"]
Norm = Literal["layernorm", "rmsnorm"]
Positions = Literal["learned", "rotary", "alibi", "none"]
Activation = Literal["gelu", "gelu_new", "swiglu"]

Size = Field(ge=1, le=2**31)
Probability = Field(ge=0.0, lt=1.0)


class ModelSpec(BaseModel):
    """The architecture of a transformer.

    ``family`` names the code that the model usually runs as (Hugging Face ``model_type``, or ``gpt``
    for Megatron's GPT); it selects the recipe of a layer where a framework has several.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    family: Family
    layers: int = Size
    hidden: int = Size
    heads: int = Size
    kv_heads: int = Size
    """Key/value heads: equal to ``heads`` for MHA, 1 for MQA, between for GQA."""
    head_dim: int = Size
    ffn: int = Size
    """Width of the MLP's inner layer (of one of the two up projections for SwiGLU)."""
    vocab: int = Size
    positions_max: int = Size
    """Rows of the learned position table; for rotary and ALiBi the longest sequence trained."""

    norm: Norm
    norm_place: Literal["pre", "post"] = "pre"
    positions: Positions
    activation: Activation
    attention_bias: bool = True
    """Bias on the query/key/value projections."""
    attention_output_bias: bool = True
    mlp_bias: bool = True
    qk_norm: bool = False
    """RMSNorm over each head of queries and keys (Qwen 3)."""
    causal: bool = True
    sliding_window: int | None = Field(default=None, ge=1)

    tied_embeddings: bool = True
    embedding_norm: bool = False
    final_norm: bool = True
    token_types: int = Field(default=0, ge=0)
    """Rows of the token-type table (BERT); 0 where there is none."""
    mlm_head: bool = False
    """BERT's head: dense, activation and norm before the decoder, which has a bias."""

    embedding_dropout: float = Probability
    attention_dropout: float = Probability
    hidden_dropout: float = Probability

    published_parameters: int | None = Field(default=None, ge=1)
    """Parameter count as published by the model's authors, for the test that counts ours."""
    source: str = ""

    @property
    def qkv_features(self) -> int:
        """Output features of the fused query/key/value projection: ``(a + 2 a_kv) d``."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention_features(self) -> int:
        """Features that enter the attention's output projection: ``a d``."""
        return self.heads * self.head_dim
