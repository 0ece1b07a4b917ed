"""BERT with its masked-language-model head (``models/bert/modeling_bert.py``)."""

from __future__ import annotations

from ..layers import ops
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import CORE_BERT, PLAIN
from ..layers.ends import Embedded, token_ids, word_embeddings
from ..layers.gradients import fresh
from ..layers.huggingface import Heads, LayerShape, Shared, activation, attention, layer_norm, linear
from ..plan.spec import ModelSpec
from .base import Config, Family, ModuleNames, Submodules, key


def bert_self_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    spec, b, s, a, d = shape.spec, shape.b, shape.s, shape.spec.heads, shape.spec.head_dim

    def project(name: str) -> Tensor:
        strided = not shape.fused and name == "key" and b > 1
        x = linear(r, hidden, name, a * d, spec.attention_bias, strided=strided)
        if not shape.fused and name != "key":
            x = ops.copied_gradient(r, x, name)
        return x.view(b, a, s, d)

    q, k, v = project("query"), project("key"), project("value")
    return attention(r, Heads(q, True), Heads(k, True), Heads(v, True), shared, shape)


def bert_output(r: Recorder, hidden: Tensor, residual: Tensor, name: str, spec: ModelSpec) -> Tensor:
    """``BertSelfOutput`` and ``BertOutput``: dense, dropout, norm of the sum."""
    hidden = linear(r, hidden, name, spec.hidden, spec.mlp_bias)
    hidden = ops.dropout(r, hidden, spec.hidden_dropout, f"{name}_dropout")
    hidden = layer_norm(r, ops.add(r, hidden, residual, f"{name}_residual"), f"{name}_norm")
    return hidden  # noqa: RET504


def bert_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``BertLayer.forward``: post-norm."""
    output, _ = bert_attention(r, hidden, shared, shape)
    attended = output
    return bert_feed_forward(r, attended, shape.spec)


def bert_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    """``BertAttention.forward``."""
    attended, weights = bert_self_attention(r, hidden, shared, shape)
    attended = bert_output(r, attended, hidden, "attention_output", shape.spec)
    return attended, weights


def bert_feed_forward(r: Recorder, attended: Tensor, spec: ModelSpec) -> Tensor:
    """``feed_forward_chunk``."""
    intermediate = activation(r, linear(r, attended, "up", spec.ffn, spec.mlp_bias), spec)
    return bert_output(r, intermediate, attended, "down", spec)


def bert_scores(r: Recorder, hidden: Tensor, shape: LayerShape) -> Tensor:
    """``BertPooler`` and the classifier of ``BertForSequenceClassification``: of each sequence's first token a dense
    layer, tanh and dropout, then one linear layer, (b, n). The gradient of the first tokens is laid into zeros.
    The pooler runs before ``BertModel.forward`` returns: the embedding's output, which is dropped then where no node
    saved it (under autocast), waits that long, and here ends before."""
    whole, dtype, spec = hidden.shape, hidden.dtype, shape.spec
    first = r.node((hidden,), (), fresh(hidden, "grad_hidden_of_tokens"))
    x = linear(r, Tensor(hidden.storage, (whole[0], whole[2]), dtype, first), "pooler", spec.hidden, True)
    x = ops.tanh(r, x, "pooled")
    x = ops.dropout(r, x, spec.hidden_dropout, "pooled_dropout")
    return linear(r, x, "head", spec.labels, True)


def bert_embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``BertEmbeddings.forward``."""
    spec, dtype, h = shape.spec, shape.dtype, shape.spec.hidden
    types = r.empty((1, shape.s), "int64", "token_type_ids")
    words = r.embedded(word_embeddings(r, shape))
    kinds = ops.embedding(
        r,
        r.parameter("token_type.weight", (spec.token_types, h), dtype),
        types.view(shape.b, shape.s),
        "token_type_embeddings",
    )
    hidden = ops.add(r, words, kinds, "embedding_sum")
    table = r.parameter("position.weight", (spec.positions_max, h), dtype)
    places = ops.embedding(r, table, token_ids(r, shape, 1), "position_embeddings")
    hidden = ops.add(r, hidden, places, "embedding_sum")
    hidden = layer_norm(r, hidden, "embedding_norm")
    hidden = ops.dropout(r, hidden, spec.embedding_dropout, "embedding_dropout")
    return Embedded(hidden, Shared())


BERT = Family(
    "bert",
    config=Config(
        keys={
            "layers": key("num_hidden_layers"),
            "hidden": key("hidden_size"),
            "heads": key("num_attention_heads"),
            "ffn": key("intermediate_size"),
            "vocab": key("vocab_size"),
            "positions_max": key("max_position_embeddings", default=512),
            "token_types": key("type_vocab_size", default=2),
            "embedding_dropout": key("hidden_dropout_prob", default=0.1),
            "attention_dropout": key("attention_probs_dropout_prob", default=0.1),
            "hidden_dropout": key("hidden_dropout_prob", default=0.1),
        },
        constants={
            "norm": "layernorm",
            "norm_place": "post",
            "positions": "learned",
            "causal": False,
            "embedding_norm": True,
            "final_norm": False,
            "mlm_head": True,
        },
        activation=key("hidden_act", default="gelu"),
        activations=("gelu", "gelu_new", "gelu_pytorch_tanh"),
        refused={
            "is_decoder": False,
            "add_cross_attention": False,
            "tie_word_embeddings": True,
            "position_embedding_type": "absolute",
            "chunk_size_feed_forward": 0,
        },
    ),
    covers={
        **PLAIN,
        "norm": ("layernorm",),
        "norm_place": ("post",),
        "positions": ("learned",),
        "activation": ("gelu", "gelu_new"),
        "attention_output_bias": (True,),
        "mlp_bias": (True,),
        "qk_norm": (False,),
        "causal": (False,),
        "sliding_window": (None,),
        "embedding_norm": (True,),
        "final_norm": (False,),
        "mlm_head": (True,),
    },
    layer=bert_layer,
    embedding=bert_embedding,
    multi_head=True,
    heads_fill_hidden=True,
    softmax_in_dtype=True,
    takes_positions=lambda r: False,
    keeps_embedding=True,
    scores=bert_scores,
    no_4bit="bitsandbytes' layers are modelled in causal models",
    megatron_core=CORE_BERT,
    modules=ModuleNames(("bert.embeddings",), "bert.encoder.layer", (), ("cls",)),
    linear_layers={
        "query": "attention.self.query",
        "key": "attention.self.key",
        "value": "attention.self.value",
        "attention_output": "attention.output.dense",
        "up": "intermediate.dense",
        "down": "output.dense",
        "transform": "cls.predictions.transform.dense",
    },
    score_layers={"pooler": "pooler.dense"},
    word_layers=("transform",),
    lora_targets=("query", "value"),
    shards=False,
    submodules={
        "embedding": Submodules(
            before_forward={"word": 3}, after_forward={"embedding_norm": 2}, before_backward={"embedding_norm": 1}
        ),
        "layer": Submodules(
            before_forward={"query": 3, "attention_output": 1, "up": 1, "down": 1},
            after_forward={"attention_output": 1, "up": 1, "down": 1},
            before_backward={
                "down_norm": 2,
                "down": 1,
                "up": 2,
                "attention_output_norm": 2,
                "attention_output": 1,
                "value": 1,
            },
            not_recomputed="query",
        ),
        "head": Submodules(
            before_forward={"transform": 3},
            after_forward={"transform": 1},
            before_backward={"word": 3, "head": 3, "transform_norm": 1, "transform": 1},
            after_backward={"transform": 2},
        ),
    },
)

FAMILIES = {"bert": BERT}
