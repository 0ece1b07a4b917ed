"""DeepSeek V3.2 (``models/deepseek_v32/modular_deepseek_v32.py``): V3, with an indexer in every layer that picks keys
for each query (DeepSeek sparse attention).

transformers runs the indexer without a graph (``torch.no_grad``): it trains neither it nor what it reads, and keeps
nothing of it for backward. Its parameters want gradients and never get any. While it runs, its scores of every head are
there in fp32, (b, s, n, s), two at a time; what it picks becomes a mask of each sequence, for eager attention or sdpa,
which take all keys. Shapes: b micro-batch, s sequence, n heads of the indexer, d features of one, k picked keys.
"""

from __future__ import annotations

from functools import partial

from ..layers import ops, selecting
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import reads
from ..layers.huggingface import LayerShape, Shared, layer_norm, linear, relu, rotary
from ..values import replace
from .base import Config, Family, key
from .deepseek import COVERS, DEEPSEEK, IN_ORDER, LATENT, LATENT_LAYERS, V3, latent_attention
from .llama import SILU
from .mixtral import SHARED_LAYERS, SHARED_REGISTERED

INDEXER = ("index_query", "index_key", "index_key_norm", "index_weights")


def picked(r: Recorder, hidden: Tensor, small: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``DeepseekV32Indexer.forward``: of hidden states and queries' rank ``small``, k keys of each token, (b, s, k) in
    int32."""
    spec, b, s = shape.spec, shape.b, shape.s
    n, d, turned = spec.index_heads, spec.index_head_dim, spec.rope_head_dim
    cos, sin = (table.view(1, s, 1, turned) for table in shared.tables)
    q = linear(r, small, "index_query", n * d, False).view(b, s, n, d)
    q_rot, q_pass = ops.split(r, q, [(b, s, n, turned), (b, s, n, d - turned)], "index_query_parts")
    k = layer_norm(r, linear(r, hidden, "index_key", d, False), "index_key_norm").view(b, s, 1, d)
    k_rot, k_pass = ops.split(r, k, [(b, s, 1, turned), (b, s, 1, d - turned)], "index_key_parts")
    q_rot, k_rot = rotary(r, q_rot, k_rot, Shared(cos=cos, sin=sin))
    q = ops.cat_last(r, q_rot, q_pass, "index_query_states")
    k = ops.cat_last(r, k_rot, k_pass, "index_key_states")
    scores = ops.scale(r, products(r, q, k), "index_scores_scaled")
    scores = relu(r, scores)
    weights = weights_of_heads(r, hidden, n)
    scores_of_keys = ops.matmul(r, weights.view(b, s, 1, n), scores, (b, s, 1, s), "index_scores").view(b, s, s)
    scores_of_keys = causal(r, scores_of_keys, shared)
    return highest(r, scores_of_keys, min(spec.index_top_k, s))


def highest(r: Recorder, scores: Tensor, k: int) -> Tensor:
    """``index_scores.topk(topk, dim=-1).indices.to(torch.int32)``."""
    values, indices = selecting.top_k(r, scores, k, "picked")
    del values
    return ops.cast(r, indices, "int32", "picked_int32")


def products(r: Recorder, q: Tensor, k: Tensor) -> Tensor:
    """``torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1))``, (b, s, n, s): ``matmul`` expands the keys,
    which are for all queries of a sequence, to one copy for each query, unless there is one sequence."""
    b, s, n, d = q.shape
    q, k = ops.cast(r, q, "fp32", "index_query_fp32"), ops.cast(r, k, "fp32", "index_key_fp32")
    q, k = ops.entering(r, "matmul", q, k.view(b, 1, d, s), name="index_operand")
    expanded = k if b == 1 else r.empty((b, s, d, s), k.dtype, "index_keys_of_each_query")
    out = ops.matmul(r, q, expanded, (b, s, n, s), "index_products")
    del expanded
    return out


def weights_of_heads(r: Recorder, hidden: Tensor, n: int) -> Tensor:
    """``weights_proj(hidden_states.to(…)).float() * n ** -0.5``."""
    hidden = ops.cast(r, hidden, r.stored or hidden.dtype, "index_weights_input")
    weights = ops.cast(r, linear(r, hidden, "index_weights", n, False), "fp32", "index_weights_fp32")
    return ops.scale(r, weights, "index_weights_scaled")


def causal(r: Recorder, scores: Tensor, shared: Shared) -> Tensor:
    """Scores (b, s, s) of later keys, and of padding, are -infinity. sdpa's mask is seen as one of each sequence."""
    assert shared.mask is not None
    if shared.mask.dtype != "bool":
        return ops.add_constant(r, scores, "index_scores_masked", shared.mask)
    outside = r.empty(scores.shape, "bool", "index_outside")
    masked = r.empty(scores.shape, scores.dtype, "index_scores_masked")
    del outside
    return masked


def picking(r: Recorder, hidden: Tensor, small: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, ...]:
    """The mask of attention, (b, 1, s, s), and what stays in variables: where no index points, and the indices."""
    with r.without_graph():
        indices = picked(r, hidden, small, shared, shape)
    assert shared.mask is not None
    pairs = (shape.b, shape.s, shape.s)
    ones, wide = r.empty(pairs, "bool", "keys"), ops.cast(r, indices, "int64", "picked_int64")
    others = r.empty(pairs, "bool", "keys_not_picked")
    del ones, wide
    whole = (shape.b, 1, shape.s, shape.s)
    if shared.mask.dtype != "bool":
        return r.empty(whole, shared.mask.dtype, "mask_of_picked"), others, indices
    these = r.empty(whole, "bool", "keys_picked")
    mask = r.empty(whole, "bool", "mask_of_picked")
    del these
    return mask, others, indices


SIZES = {
    "index_heads": key("index_n_heads", default=64),
    "index_head_dim": key("index_head_dim", default=128),
    "index_top_k": key("index_topk", default=2048),
}

CONFIG = Config(
    keys={
        **{name: key for name, key in DEEPSEEK.items() if name != "router_aux_loss"},
        **SIZES,
        "positions_max": key("max_position_embeddings", default=163_840),
        "expert_top_k": key("num_experts_per_tok", default=8),
        "router_groups": key("n_group", default=8),
        "router_group_top_k": key("topk_group", default=4),
        "first_dense": key("first_k_dense_replace", default=3),
        "mlp_kinds": key("mlp_layer_types", default=None),
        "shared_experts": key("n_shared_experts", default=1),
        "latent_q_rank": key("q_lora_rank", default=1536),
    },
    constants={**LATENT, "router_score": "sigmoid", "router_expert_bias": True, "router_aux_loss": 0.0001},
    activation=SILU,
    activations=("silu", "swish"),
    refused={"attention_bias": False, "mlp_bias": False, "norm_topk_prob": True},
    published_in=("fp8",),
)

V32 = replace(
    V3,
    name="deepseek_v32",
    classifies=False,
    config=CONFIG,
    covers={**reads(COVERS, "index_heads"), "router_score": ("sigmoid",), "router_expert_bias": (True,)},
    attention=partial(latent_attention, picking=picking),
    linear_layers={
        **LATENT_LAYERS,
        "index_query": "indexer.wq_b",
        "index_key": "indexer.wk",
        "index_weights": "indexer.weights_proj",
        **SHARED_LAYERS,
    },
    registered=(*IN_ORDER, "attention_output", *INDEXER, *SHARED_REGISTERED),
    since=(5, 23),
    submodules=None,
    no_package="transformers' class hands no package's kernel the keys that its indexer picks (_supports_flash_attn)",
    assumptions=(
        "transformers runs the indexer without a graph: it is not trained, has no gradients and no optimizer states, "
        "and its scores of every head are in fp32, two tensors at a time",
    ),
    no_autocast="casts of its indexer's weights, which run without a graph, are not modelled",
    idle="its indexer's parameters never have a gradient",
    megatron_core=None,
)
"""The balancing loss is weighed as V3's, arXiv 2412.19437, section 4.2."""

GLM_MOE_DSA = Family(
    "glm_moe_dsa",
    config=replace(
        CONFIG,
        keys={
            **CONFIG.keys,
            "index_heads": key("index_n_heads", default=32),
            "positions_max": key("max_position_embeddings", default=202_752),
            "router_groups": key("n_group", default=1),
            "router_group_top_k": key("topk_group", default=1),
            "latent_q_rank": key("q_lora_rank", default=2048),
        },
    ),
    no_transformers="transformers has it (glm_moe_dsa), and memplan has no recipe for layers that hand the keys that "
    "their indexer picks to the next one; it has one for DeepSeek V3.2, whose layers pick their own",
)
"""GLM-5: each layer returns its indices, which the model holds until the next one returns, and checkpoints keep."""

FAMILIES = {"deepseek_v32": V32, "glm_moe_dsa": GLM_MOE_DSA}
