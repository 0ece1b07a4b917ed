"""Parameters of a whole, unsharded model, module by module; a tied head's weight counts once.

Letters as in the papers: ``h`` hidden size, ``a`` heads, ``d`` features of a head, ``f`` the MLP's width,
``v`` vocabulary. All results are element counts.
"""

from __future__ import annotations

from functools import partial

from ..families import family
from .spec import LINEAR, NONE, ModelSpec, block_of


def parameters(spec: ModelSpec) -> int:
    """Elements of every parameter of the model."""
    final_norm = norm(spec) if spec.final_norm else 0
    if spec.layer_pattern:
        return embedding(spec) + blocks(spec, spec.layer_pattern) + final_norm + head(spec) + furthers(spec)
    if spec.layer_blocks:
        return embedding(spec) + sum(map(partial(block_of_sizes, spec), spec.layer_blocks)) + final_norm + head(spec)
    experts, linear = (sum(map(of, range(spec.layers))) for of in (spec.has_experts, spec.is_linear))
    layers = (spec.layers - experts) * layer(spec) + experts * layer(spec, experts=True)
    layers += linear * (delta(spec) - attention(spec)) if linear else 0
    full = sum(map(spec.is_full, range(spec.layers)))
    layers += full * (full_attention(spec) - attention(spec)) if full else 0
    return embedding(spec) + layers + final_norm + head(spec) + furthers(spec)


def embedding(spec: ModelSpec) -> int:
    """Token, position and token-type tables, and the norm after them: ``(v + p + types) h``."""
    h = spec.hidden
    positions = spec.positions_max + spec.position_offset if spec.positions == "learned" else 0
    rows = spec.vocab + positions + spec.token_types
    return rows * h + (norm(spec) if spec.embedding_norm else 0)


def layer(spec: ModelSpec, *, experts: bool = False) -> int:
    """One transformer layer: attention, MLP or experts, and their norms: one or two each, or one for both."""
    norms = 1 if spec.blocks == "parallel_one_norm" else 4 if spec.norm_place == "both" else 2
    beside = beside_experts(spec) if experts and family(spec.family).mlp_beside_experts else 0
    return attention(spec) + (mixture(spec) + beside if experts else mlp(spec)) + norms * norm(spec)


def beside_experts(spec: ModelSpec) -> int:
    """An MLP beside experts: with its weights norms of both outputs and of what experts take, and scales of a router's
    features and experts, ``h + E``."""
    return mlp(spec) + 3 * norm(spec) + spec.hidden + spec.experts


def block_of_sizes(spec: ModelSpec, text: str) -> int:
    """A layer that differs from others: attention, an MLP, or in place of one ``h h`` and perhaps a bias, each with the
    norm before it."""
    own, h = block_of(text), spec.hidden
    sized = spec.model_copy(update={"kv_heads": own.kv_heads, "ffn": own.ffn})
    linear = norm(spec) + h * h + (h if spec.mlp_bias else 0)
    others = {LINEAR: linear, NONE: 0}
    return sum(
        (
            others[own.attention] if own.attention else attention(sized) + norm(spec),
            others[own.mlp] if own.mlp else mlp(sized) + norm(spec),
        )
    )


def further(spec: ModelSpec) -> int:
    """One layer of multi-token prediction: two norms, a projection ``2 h h`` of hidden state and embedding, a layer,
    and a norm."""
    pattern = spec.mtp_pattern
    layer_of = blocks(spec, pattern) if pattern else layer(spec, experts=spec.has_experts(spec.layers - 1))
    return 2 * spec.hidden * spec.hidden + layer_of + 3 * norm(spec)


def blocks(spec: ModelSpec, pattern: str) -> int:
    """Layers of a hybrid, each with its norm."""
    return sum(block(spec, kind) + norm(spec) for kind in pattern)


def furthers(spec: ModelSpec) -> int:
    """Layers of multi-token prediction, of which there may be one for all tokens."""
    return (1 if spec.mtp_shared and spec.mtp_layers else spec.mtp_layers) * further(spec)


def block(spec: ModelSpec, kind: str) -> int:
    """The one block of a hybrid's layer."""
    return {"M": mamba, "*": attention, "-": mlp, "E": mixture, "G": delta}[kind](spec)


def mamba(spec: ModelSpec) -> int:
    """With d inner features, g groups of n states and a heads: projections ``h (2 d + 2 g n + a) + d h``, a convolution
    of 4 tokens with a bias over ``d + 2 g n`` channels, three numbers of each head, and the weight of a norm."""
    d, channels, a = spec.mamba_inner, spec.mamba_inner + 2 * spec.mamba_groups * spec.mamba_state_dim, spec.mamba_heads
    return spec.hidden * (d + channels + a + d) + 5 * channels + 3 * a + d


def delta(spec: ModelSpec) -> int:
    """A gated delta net: with q features of all queries and v of all values, a projection to two of each and two
    numbers of each value head, one back, a convolution over ``2 q + v`` channels without a bias, two numbers of each
    value head, and a norm of one head's values."""
    heads, e = spec.linear_value_heads, spec.linear_value_head_dim
    q, v = spec.linear_key_heads * spec.linear_key_head_dim, heads * e
    norms = e * norm(spec) // spec.hidden
    return spec.hidden * (2 * q + 3 * v + 2 * heads) + spec.linear_conv_kernel * (2 * q + v) + 2 * heads + norms


def attention(spec: ModelSpec) -> int:
    """Query/key/value and output projections: ``h (a + 2 a_kv) d + a d h``, biases, norms of heads, sinks."""
    if spec.latent_kv_rank:
        return latent(spec)
    h, qkv, out = spec.hidden, spec.qkv_features, spec.attention_features
    biases = (qkv if spec.attention_bias else 0) + (h if spec.attention_output_bias else 0)
    return h * qkv + out * h + biases + head_norms(spec) + (spec.heads if spec.attention_sinks else 0)


def full_attention(spec: ModelSpec) -> int:
    """Of layers that see all tokens, by heads of their own, perhaps without a projection of values."""
    own = spec.of_full_layers
    features = own.kv_heads * own.head_dim if spec.keys_as_values else 0
    return attention(own) - features * (spec.hidden + (1 if spec.attention_bias else 0))


def head_norms(spec: ModelSpec) -> int:
    """Norms of queries and keys: a weight of one head's features, of all heads', or none."""
    if not spec.qk_norm or spec.qk_norm_over == "head_without_weight":
        return 0
    return spec.head_dim * (2 if spec.qk_norm_over == "head" else spec.heads + spec.kv_heads)


def latent(spec: ModelSpec) -> int:
    """Queries, by a rank of their own or at once, one rotated key for all heads, keys and values by their rank; norms
    of the ranks; the output projection."""
    h, a, r, d = spec.hidden, spec.heads, spec.latent_kv_rank, spec.nope_head_dim + spec.rope_head_dim
    q = spec.latent_q_rank
    queries = (h + 1 + a * d) * q if q else h * a * d
    keys = h * (r + spec.rope_head_dim) + r + r * a * (spec.nope_head_dim + spec.value_head_dim)
    return queries + keys + h * spec.attention_features + indexer(spec)


def indexer(spec: ModelSpec) -> int:
    """Queries of n heads of d features from their rank, one key and a weight of each head from the hidden state, and a
    LayerNorm of the key: ``q n d + h d + h n + 2 d``."""
    n, d = spec.index_heads, spec.index_head_dim
    return spec.latent_q_rank * n * d + spec.hidden * (n + d) + 2 * d if n else 0


def mixture(spec: ModelSpec) -> int:
    """Router ``E h``, ``E`` experts of rows of ``l`` features, projections to these and back, and shared experts with
    their gate; biases as in an MLP."""
    h, e, f, shared, latent = spec.hidden, spec.experts, spec.expert_ffn, spec.shared_expert_ffn, spec.expert_latent
    up, rows = 2 if spec.gated else 1, spec.expert_hidden
    biases = e * (up * f + h + 1) if spec.mlp_bias else 0
    matrices = (up + 1) * (rows * e * f + h * shared) + 2 * h * latent
    return e * h + matrices + biases + (h if spec.shared_expert_gate else 0)


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
    bias. A head of scores has a row for each and no bias; BERT's has biases, and a dense layer before it."""
    h, v = spec.hidden, spec.vocab
    if spec.labels:
        own = family(spec.family).scores is not None
        return spec.labels * h + (h * h + h + spec.labels if own else 0)
    projection = 0 if spec.tied_embeddings else v * h
    transform = h * h + h + norm(spec) + v if spec.mlm_head else 0
    return projection + transform + (v if spec.head_bias else 0)
