"""EXAONE 4 (``models/exaone4/modeling_exaone4.py``): Llama's layer with norms behind attention and MLP, none before
them, and norms of queries and keys; where it has windows, every fourth layer sees all tokens, without positions."""

from __future__ import annotations

from ..layers.autograd import Recorder
from ..layers.coverage import LLAMA, reads
from ..layers.ends import Embedded, causal_mask, positions, rotary_tables, word_embeddings
from ..layers.huggingface import LayerShape, Shared
from ..plan.releases import LIBRARIES
from ..values import replace
from .base import NO_BIASES, Config, Submodules, key
from .gemma2 import gemma2_layer
from .llama import (
    ATTENTION,
    CONSTANTS,
    KEYS_BUT_BIASES,
    LLAMA_FAMILY,
    NORMED_LAST,
    SILU,
    SUBMODULES,
)


def embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``Exaone4Model.forward`` up to the first layer: a mask of each kind of layers that is there."""
    inputs_embeds = r.embedded(word_embeddings(r, shape))
    position_ids = positions(r, shape.s)
    mask, full = causal_mask(r, shape, window=False), None
    if shape.spec.sliding_window is not None:
        mask, full = causal_mask(r, shape), mask
    cos, sin = rotary_tables(r, shape)
    return Embedded(inputs_embeds, Shared(mask, cos, sin, position_ids, full))


EXAONE4 = replace(
    LLAMA_FAMILY,
    name="exaone4",
    config=Config(
        keys={
            **KEYS_BUT_BIASES,
            "kv_heads": key("num_key_value_heads", default=32),
            "sliding_window": key("sliding_window", default=4096),
            "nope_interval": key("layer_types", default=None),
        },
        constants={**CONSTANTS, **NO_BIASES, "norm_place": "post", "qk_norm": True},
        activation=SILU,
        activations=("silu", "swish"),
    ),
    covers={
        **reads(LLAMA, "nope_interval"),
        **dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), (False,)),
        "norm_place": ("post",),
        "qk_norm": (True,),
    },
    layer=gemma2_layer,
    embedding=embedding,
    projecting=NORMED_LAST,
    kernels=(),
    megatron_core=None,
    lora_targets=None,
    registered=(*ATTENTION, "gate", "up", "down", "attention_output_norm", "mlp_output_norm"),
    since=LIBRARIES["transformers"].newest,
    submodules={
        **SUBMODULES,
        "layer": Submodules(
            before_forward={"query": 2, "gate": 1},
            after_forward={"gate": 1},
            before_backward={"mlp_output_norm": 1, "down": 1, "attention_output": 1},
            after_backward={"up": 1},
            not_recomputed="query",
        ),
    },
)

FAMILIES = {"exaone4": EXAONE4}
