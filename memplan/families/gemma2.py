"""Gemma 2 (``models/gemma2/modeling_gemma2.py``): Llama's layer with a norm behind each block, too."""

from __future__ import annotations

from ..layers import ops
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import LLAMA, reads
from ..layers.ends import Embedded, causal_mask, positions, rotary_tables, word_embeddings
from ..layers.huggingface import LayerShape, Shared, norm
from ..tape.events import Category
from ..values import replace
from . import family
from .base import PLAIN_ROTARY, Config, Submodules, key
from .llama import CONSTANTS, KEYS, LLAMA_FAMILY, SUBMODULES, llama_attention, llama_mlp


def normed(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``_norm``, ``x * rsqrt(mean(x ** 2) + eps)``."""

    def shifted(x: Tensor) -> Tensor:
        variance = ops.mean_last(r, ops.power(r, x, f"{name}_square"), f"{name}_variance")
        return ops.add_constant(r, variance, f"{name}_eps")

    return ops.multiply(r, x, ops.rsqrt(r, shifted(x), f"{name}_rstd"), f"{name}_normed")


def gemma_norm(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``Gemma2RMSNorm.forward``: multiplied by ``1 + weight`` in fp32, then cast; or a kernel."""

    def one_plus(weight: Tensor) -> Tensor:
        return ops.add_constant(r, ops.cast(r, weight, "fp32", f"{name}_weight_fp32"), f"{name}_scale")

    weight = r.parameter(f"{name}.weight", (x.shape[-1],), x.dtype)
    if r.kernels is not None and r.kernels.norm is not None:
        by_head = name in ("query_norm", "key_norm") and x.shape[-2] > 1  # Gemma 3's, of views
        return r.kernels.norm(r, x, weight, name, in_place=False, by_head=by_head)
    output = normed(r, ops.cast(r, x, "fp32", f"{name}_fp32"), name)
    output = ops.multiply(r, output, one_plus(weight), f"{name}_scaled")
    return ops.cast(r, output, x.dtype, name)


def gemma2_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``Gemma2DecoderLayer.forward`` and ``Glm4DecoderLayer.forward``; ``Exaone4DecoderLayer.forward`` has no norms
    before attention and MLP."""
    spec, both = shape.spec, shape.spec.norm_place == "both"
    residual = hidden  # variables end in the order in which they come to be: it before attention's weights
    hidden, _ = attended(r, hidden, shared, shape)
    residual = hidden
    hidden = norm(r, hidden, spec, "mlp_norm") if both else hidden
    hidden = (family(spec.family).mlp or llama_mlp)(r, hidden, spec)
    hidden = norm(r, hidden, spec, "mlp_output_norm")
    hidden = ops.add(r, residual, hidden, "residual_mlp")
    return hidden  # noqa: RET504 - the variable ends its tensor's life


def attended(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    """Its first half: attention between its norms, and the sum; and attention's weights."""
    spec = shape.spec
    residual = hidden
    hidden = norm(r, hidden, spec, "attention_norm") if spec.norm_place == "both" else hidden
    hidden, weights = (family(spec.family).attention or llama_attention)(r, hidden, shared, shape)
    hidden = norm(r, hidden, spec, "attention_output_norm")
    hidden = ops.add(r, residual, hidden, "residual_attention")
    return hidden, weights


def gemma2_embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``Gemma2Model.forward`` and ``Gemma3TextModel.forward`` up to the first layer:
    ``Gemma2TextScaledWordEmbedding``, and a mask of each kind."""
    return of_both_kinds(r, shape, r.embedded(scaled(r, word_embeddings(r, shape), shape)))


def of_both_kinds(r: Recorder, shape: LayerShape, inputs_embeds: Tensor, *, packed: bool = True) -> Embedded:
    """A mask of each kind of layers, with a window and without, and tables of those that are there. ``packed``: masks
    look for packed rows."""
    position_ids = positions(r, shape.s)
    full = causal_mask(r, shape, window=False, packed=packed)
    mask = causal_mask(r, shape, packed=packed)
    cos, sin = rotary_tables(r, shape)
    of_full = rotary_tables(r, shape.of_layer(shape.spec.full_interval - 1)) if shape.spec.turns_twice else None
    return Embedded(inputs_embeds, Shared(mask, cos, sin, position_ids, full, of_full))


def scaled(r: Recorder, embeddings: Tensor, shape: LayerShape) -> Tensor:
    """``* embed_scale.to(weight.dtype)``, a buffer of no dimension."""
    scale = r.outside((), shape.stored or shape.dtype, Category.BUFFERS)
    if scale.dtype != shape.dtype:
        scale = ops.cast(r, scale, shape.dtype, "embedding_scale_cast")
    return ops.multiply(r, embeddings, scale, "embedding_scaled")


GEMMA2 = replace(
    LLAMA_FAMILY,
    name="gemma2",
    config=Config(
        keys={
            **{name: key for name, key in KEYS.items() if name != "mlp_bias"},
            "attention_output_bias": KEYS["attention_bias"],
            "kv_heads": key("num_key_value_heads", default=4),
            "head_dim": key("head_dim", default=256),
            "positions_max": key("max_position_embeddings", default=8192),
            "sliding_window": key("sliding_window", default=4096),
            "tied_embeddings": key("tie_word_embeddings", default=True),
            "attention_softcap": key("attn_logit_softcapping", default=50.0),
            "logit_softcap": key("final_logit_softcapping", default=30.0),
        },
        constants={
            **CONSTANTS,
            "mlp_bias": False,
            "norm_place": "both",
            "alternating_windows": True,
            "embedding_scale": True,
        },
        activation=key("hidden_activation", default="gelu_pytorch_tanh"),
        activations=("gelu_pytorch_tanh", "gelu"),
        gated_gelu=True,
        refused={**PLAIN_ROTARY, "use_bidirectional_attention": False},
    ),
    covers={
        **reads(LLAMA, "attention_softcap", "logit_softcap"),
        "norm_place": ("both",),
        "activation": ("geglu",),
        "qk_norm": (False,),
        "mlp_bias": (False,),
        "alternating_windows": (True,),
        "embedding_scale": (True,),
    },
    kernels=("liger",),
    layer=gemma2_layer,
    embedding=gemma2_embedding,
    norm=gemma_norm,
    no_flash="soft-capped scores are not in PyTorch's flash kernel, and transformers refuses sdpa for the family",
    scale_in_embedding=True,
    megatron_core=None,
    registered=(
        *("query", "key", "value", "attention_output", "gate", "up", "down"),
        *("attention_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm"),
    ),
    submodules={
        **SUBMODULES,
        "layer": Submodules(
            before_forward={"attention_norm": 1, "query": 1, "gate": 1},
            after_forward={"gate": 1},
            before_backward={"mlp_output_norm": 1, "down": 1, "attention_output": 1},
            after_backward={"up": 1},
            not_recomputed="attention_norm",
        ),
    },
)

FAMILIES = {"gemma2": GEMMA2}
