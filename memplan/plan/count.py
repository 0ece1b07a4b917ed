"""Parameters of a whole, unsharded model, module by module; a tied head's weight counts once.

Letters as in the papers: ``h`` hidden size, ``a`` heads, ``d`` features of a head, ``f`` the MLP's width,
``v`` vocabulary. All results are element counts.
"""

from __future__ import annotations

from .spec import ModelSpec


def parameters(spec: ModelSpec) -> int:
    """Elements of every parameter of the model."""
    final_norm = norm(spec) if spec.final_norm else 0
    return embedding(spec) + spec.layers * layer(spec) + final_norm + head(spec)


def embedding(spec: ModelSpec) -> int:
    """Token, position and token-type tables, and the norm after them: ``(v + p + types) h``."""
    h = spec.hidden
    positions = spec.positions_max + spec.position_offset if spec.positions == "learned" else 0
    rows = spec.vocab + positions + spec.token_types
    return rows * h + (norm(spec) if spec.embedding_norm else 0)


def layer(spec: ModelSpec) -> int:
    """One transformer layer: attention, MLP and their norms: one or two each, or one for both."""
    norms = 1 if spec.blocks == "parallel_one_norm" else 4 if spec.norm_place == "both" else 2
    return attention(spec) + mlp(spec) + norms * norm(spec)


def attention(spec: ModelSpec) -> int:
    """Query/key/value and output projections: ``h (a + 2 a_kv) d + a d h``, biases, and the norms of heads."""
    h, qkv, out = spec.hidden, spec.qkv_features, spec.attention_features
    biases = (qkv if spec.attention_bias else 0) + (h if spec.attention_output_bias else 0)
    head_norms = 2 * spec.head_dim if spec.qk_norm else 0
    return h * qkv + out * h + biases + head_norms


def mlp(spec: ModelSpec) -> int:
    """``2 h f``, or ``3 h f`` with a gate, and biases."""
    h, f = spec.hidden, spec.ffn
    up = 2 if spec.gated else 1
    return (up + 1) * h * f + (up * f + h if spec.mlp_bias else 0)


def norm(spec: ModelSpec) -> int:
    """Weight, and for LayerNorm a bias, over the hidden size."""
    h = spec.hidden
    return 2 * h if spec.norm == "layernorm" else h


def head(spec: ModelSpec) -> int:
    """The output projection ``v h`` unless tied, and its bias; BERT's adds a dense layer, a norm and the decoder's
    bias."""
    h, v = spec.hidden, spec.vocab
    projection = 0 if spec.tied_embeddings else v * h
    transform = h * h + h + norm(spec) + v if spec.mlm_head else 0
    return projection + transform + (v if spec.head_bias else 0)
