"""OLMo 2 and 3 (``models/olmo2/modeling_olmo2.py``, ``models/olmo3/modeling_olmo3.py``): EXAONE 4's layer with one norm
over all heads of queries and one over all of keys, and positions that are applied in fp32; OLMo 3 with windows in three
of four layers."""

from __future__ import annotations

from ..layers import ops
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import LLAMA, Allowed, reads
from ..layers.ends import Embedded, word_embeddings
from ..layers.huggingface import LayerShape, Shared, rotary_one
from ..values import replace
from .base import Config, key
from .exaone4 import EXAONE4
from .gemma2 import of_both_kinds
from .gpt_oss import norm
from .llama import CONSTANTS, KEYS, NORMED_FIRST, SILU, llama_embedding


def rotary(r: Recorder, q: Tensor, k: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
    """``apply_rotary_pos_emb``: by tables in fp32, both before either is cast back."""
    q_embed = rotary_one(r, q, shared, "query", "turned")
    k_embed = rotary_one(r, k, shared, "key", "turned")
    return ops.cast(r, q_embed, q.dtype, "query_rotary"), ops.cast(r, k_embed, k.dtype, "key_rotary")


def embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``Olmo3Model.forward`` up to the first layer."""
    return of_both_kinds(r, shape, r.embedded(word_embeddings(r, shape)))


CONFIG = Config(
    keys={
        **{name: key for name, key in KEYS.items() if name != "mlp_bias"},
        "attention_output_bias": KEYS["attention_bias"],
    },
    constants={**CONSTANTS, "mlp_bias": False, "norm_place": "post", "qk_norm": True, "qk_norm_over": "heads"},
    activation=SILU,
    activations=("silu", "swish"),
)
COVERED: Allowed = {
    **reads(LLAMA, "qk_norm_over"),
    "mlp_bias": (False,),
    "norm_place": ("post",),
    "qk_norm": (True,),
    "qk_norm_over": ("heads",),
}

OLMO2 = replace(
    EXAONE4,
    name="olmo2",
    config=CONFIG,
    covers=COVERED,
    embedding=llama_embedding,
    norm=norm,
    projecting=NORMED_FIRST,
    rotary=rotary,
    rotary_keeps_layout=True,
    wide_tables=True,
)

OLMO3 = replace(
    OLMO2,
    name="olmo3",
    config=replace(
        CONFIG,
        keys={
            **CONFIG.keys,
            "sliding_window": key("sliding_window", default=4096),
            "full_interval": key("layer_types", default=4),
        },
    ),
    covers=reads(COVERED, "full_interval"),
    needs=("full_interval",),
    embedding=embedding,
)

FAMILIES = {"olmo2": OLMO2, "olmo3": OLMO3}
