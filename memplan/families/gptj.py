"""GPT-J (``models/gptj/modeling_gptj.py``): attention and MLP side by side behind one norm."""

from __future__ import annotations

from ..layers import ops
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import GPT2, reads
from ..layers.ends import Embedded, causal_mask, positions, word_embeddings
from ..layers.huggingface import (
    Heads,
    LayerShape,
    Shared,
    activation,
    layer_norm,
    linear,
    product,
    weights_before,
)
from ..plan.spec import ModelSpec
from .base import HEAD, NORM, Config, Family, ModuleNames, Submodules, key


def turned(r: Recorder, x: Tensor, sincos: Tensor, name: str) -> Tensor:
    """``apply_rotary_pos_emb`` on (b, s, a, d), neighbouring features in pairs; sines and cosines are widened first."""

    def widened(name: str) -> Tensor:
        """``repeat_interleave`` of half of (1, s, d): (1, s, 1, d)."""
        _, s, d = sincos.shape
        return r.empty((1, s, 1, d), sincos.dtype, name)

    def rotate_every_two() -> Tensor:
        half = x.shape[-1] // 2
        even = ops.slice_last(r, x, half, f"{name}_even")
        odd = ops.slice_last(r, x, half, f"{name}_odd")
        return ops.cat_last(r, ops.scale(r, odd, f"{name}_negated"), even, f"{name}_rotated")

    sin = widened(f"{name}_sin")
    cos = widened(f"{name}_cos")
    kept = ops.multiply(r, x, cos, f"{name}_kept")
    crossed = ops.multiply(r, rotate_every_two(), sin, f"{name}_crossed")
    return ops.add(r, kept, crossed, f"{name}_turned")


def gptj_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor]:
    """``GPTJAttention.forward``: every layer repeats its table of positions and gathers rows of it."""
    spec, b, s, a, d = shape.spec, shape.b, shape.s, shape.spec.heads, shape.spec.head_dim
    n = spec.rotary_features
    query = linear(r, hidden, "query", a * d, spec.attention_bias).view(b, s, a, d)
    key = linear(r, hidden, "key", a * d, spec.attention_bias).view(b, s, a, d)
    value = linear(r, hidden, "value", a * d, spec.attention_bias)
    if a > 1:
        value = ops.copied_gradient(r, value, "value")
    value = value.view(b, a, s, d)
    _table = r.empty((1, spec.positions_max, n), "fp32", "positions_repeated")
    _rows = r.empty((1, s, n), "int64", "position_ids_repeated")
    sincos = ops.cast(r, r.empty((1, s, n), "fp32", "sincos_fp32"), key.dtype, "sincos")
    k_rot = ops.slice_last(r, key, n, "key_rotary")
    k_pass = ops.slice_last(r, key, d - n, "key_passed")
    q_rot = ops.slice_last(r, query, n, "query_rotary")
    q_pass = ops.slice_last(r, query, d - n, "query_passed")
    k_rot = turned(r, k_rot, sincos, "key")
    q_rot = turned(r, q_rot, sincos, "query")
    key = ops.cat_last(r, k_rot, k_pass, "key_whole").view(b, a, s, d)
    query = ops.cat_last(r, q_rot, q_pass, "query_whole").view(b, a, s, d)
    out, weights = gptj_scores(r, query, key, value, shared, spec)
    if b > 1:
        out = ops.copied_gradient(r, out, "context")
    out = ops.contiguous(r, out, (b, s, a * d), "context_contiguous")
    out = linear(r, out, "attention_output", spec.hidden, spec.attention_output_bias)
    out = ops.dropout(r, out, spec.hidden_dropout, "attention_output_dropout")
    return out, weights


def gptj_scores(
    r: Recorder, query: Tensor, key: Tensor, value: Tensor, shared: Shared, spec: ModelSpec
) -> tuple[Tensor, Tensor]:
    """``GPTJAttention._attn``: queries, keys and scores in fp32."""
    dtype, (b, a, s, d) = value.dtype, value.shape
    query = ops.cast(r, query, "fp32", "query_fp32")
    key = ops.cast(r, key, "fp32", "key_fp32")
    weights = product(r, Heads(query, True), Heads(key, True), ("query", "key"), (b, a, s, s), "scores")
    weights = ops.scale(r, weights, "scores_scaled")
    if shared.mask is not None:
        weights = ops.add_constant(r, weights, "scores_masked", shared.mask)
    weights = ops.softmax(r, weights, "probabilities_fp32")
    weights = ops.cast(r, weights, dtype, "probabilities")
    weights = ops.dropout(r, weights, spec.attention_dropout, "attention_dropout")
    out = product(r, Heads(weights, False), Heads(value, True), ("", "value"), (b, a, s, d), "context")
    return out, weights


def gptj_mlp(r: Recorder, hidden: Tensor, spec: ModelSpec) -> Tensor:
    hidden = linear(r, hidden, "up", spec.ffn, spec.mlp_bias)
    hidden = activation(r, hidden, spec)
    hidden = linear(r, hidden, "down", spec.hidden, spec.mlp_bias)
    hidden = ops.dropout(r, hidden, spec.hidden_dropout, "mlp_dropout")
    return hidden  # noqa: RET504 - the variable ends its tensor's life


def gptj_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``GPTJBlock.forward``."""
    _before = weights_before(r, shape, r.autocast)
    residual = hidden
    hidden = layer_norm(r, hidden, "attention_norm")
    attended, _ = gptj_attention(r, hidden, shared, shape)
    fed = gptj_mlp(r, hidden, shape.spec)
    hidden = ops.add(r, ops.add(r, attended, fed, "blocks_sum"), residual, "residual")
    return hidden  # noqa: RET504


def gptj_embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``GPTJModel.forward`` up to the first layer; each layer makes its own sines and cosines."""
    spec = shape.spec
    inputs_embeds = r.embedded(word_embeddings(r, shape))
    position_ids = positions(r, shape.s)
    mask = causal_mask(r, shape)
    hidden = ops.dropout(r, inputs_embeds, spec.embedding_dropout, "embedding_dropout")
    frame = [inputs_embeds] if spec.embedding_dropout else []
    return Embedded(hidden, Shared(mask, position_ids=position_ids), frame)


GPTJ = Family(
    "gptj",
    dropout_functions=(),
    config=Config(
        keys={
            "layers": key("n_layer", "num_hidden_layers"),
            "hidden": key("n_embd", "hidden_size"),
            "heads": key("n_head", "num_attention_heads"),
            "ffn": key("n_inner", default=None),
            "vocab": key("vocab_size"),
            "positions_max": key("n_positions", "max_position_embeddings", default=2048),
            "rotary_fraction": key("rotary_dim", default=64),
            "tied_embeddings": key("tie_word_embeddings", default=False),
            "embedding_dropout": key("embd_pdrop", default=0.0),
            "attention_dropout": key("attn_pdrop", default=0.0),
            "hidden_dropout": key("resid_pdrop", default=0.0),
        },
        constants={
            "norm": "layernorm",
            "positions": "rotary",
            "blocks": "parallel_one_norm",
            "attention_bias": False,
            "attention_output_bias": False,
            "head_bias": True,
        },
        activation=key("activation_function", default="gelu_new"),
        activations=("gelu", "gelu_new", "gelu_pytorch_tanh"),
    ),
    covers={
        **reads(GPT2, "rotary_fraction", "head_bias"),
        "positions": ("rotary",),
        "blocks": ("parallel_one_norm",),
    },
    layer=gptj_layer,
    embedding=gptj_embedding,
    multi_head=True,
    heads_fill_hidden=True,
    tables_in_layers=True,
    returns_weights=True,
    no_package="its own class around the package's kernel is not modelled",
    no_flash="transformers has no sdpa for the family",
    modules=ModuleNames(("transformer.wte",), "transformer.h", ("transformer.ln_f",), ("lm_head",)),
    linear_layers={
        "query": "attn.q_proj",
        "key": "attn.k_proj",
        "value": "attn.v_proj",
        "attention_output": "attn.out_proj",
        "up": "mlp.fc_in",
        "down": "mlp.fc_out",
    },
    lora_targets=("q_proj", "v_proj"),
    registered=("attention_norm", "key", "value", "query", "attention_output", "up", "down"),
    submodules={
        "embedding": Submodules(before_forward={"word": 2}, after_forward={"word": 1}),
        "layer": Submodules(
            before_forward={"attention_norm": 1, "query": 1, "attention_output": 1, "up": 1},
            after_forward={"attention_output": 1, "up": 1, "down": 1},
            before_backward={"down": 3, "attention_output": 2},
            after_backward={"down": 1, "attention_output": 1},
        ),
        "final_norm": NORM,
        "head": HEAD,
    },
)

FAMILIES = {"gptj": GPTJ}
