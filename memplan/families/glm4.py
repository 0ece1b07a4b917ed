"""GLM-4 (``models/glm/modeling_glm.py``, ``models/glm4/modeling_glm4.py``): Llama's attention, whose positions turn the
first half of a head, neighbour by neighbour, and Phi 3's MLP; the models of April 2025 (``glm4``) have a norm behind
each block, too."""

from __future__ import annotations

from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import LLAMA, Allowed, reads
from ..layers.huggingface import Shared
from ..plan.releases import LIBRARIES
from ..values import replace
from .base import Config, Submodules, key
from .gemma2 import gemma2_layer
from .glm4_moe import rotary as turned_in_part
from .llama import ATTENTION, CONSTANTS, KEYS_BUT_BIASES, LLAMA_FAMILY, SILU, SUBMODULES
from .phi3 import PHI3, phi3_mlp


def interleaved(r: Recorder, table: Tensor, name: str) -> Tensor:
    """``table[..., : n // 2].repeat_interleave(2, dim=-1)``: a table as large, made anew in each layer."""
    return r.empty(table.shape, table.dtype, f"{name}_interleaved")


def rotary(r: Recorder, q: Tensor, k: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
    """``apply_rotary_pos_emb``."""
    cos, sin = shared.tables
    cos = interleaved(r, cos, "cos")
    sin = interleaved(r, sin, "sin")
    return turned_in_part(r, q, k, replace(shared, cos=cos, sin=sin))


CONFIG = Config(
    keys={
        **KEYS_BUT_BIASES,
        "attention_bias": key("attention_bias", default=True),
        "kv_heads": key("num_key_value_heads", default=2),
        "head_dim": key("head_dim", default=128),
        "positions_max": key("max_position_embeddings", default=131_072),
        "rotary_fraction": key("partial_rotary_factor", "rope_parameters.partial_rotary_factor", default=0.5),
    },
    constants={**CONSTANTS, "attention_output_bias": False, "mlp_bias": False},
    activation=SILU,
    activations=("silu", "swish"),
)
COVERED: Allowed = {
    **reads(LLAMA, "rotary_fraction"),
    "qk_norm": (False,),
    "attention_output_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (None,),
}
HOOKED = Submodules(
    before_forward={"attention_norm": 1, "query": 1, "gate_up": 1},
    after_forward={"gate_up": 1},
    before_backward={"down": 2, "attention_output": 1},
    after_backward={"down": 1},
    not_recomputed="attention_norm",
)

GLM = replace(
    LLAMA_FAMILY,
    name="glm",
    config=CONFIG,
    covers=COVERED,
    kernels=(),
    rotary=rotary,
    mlp=phi3_mlp,
    megatron_core=None,
    lora_targets=None,
    linear_layers={
        **{part: name for part, name in LLAMA_FAMILY.linear_layers.items() if part in ATTENTION},
        **{part: PHI3.linear_layers[part] for part in ("gate_up", "down")},
    },
    registered=("query", "key", "value", "attention_output", "gate_up", "down", "attention_norm", "mlp_norm"),
    since=LIBRARIES["transformers"].newest,
    submodules={**SUBMODULES, "layer": HOOKED},
)

GLM4 = replace(
    GLM,
    name="glm4",
    config=replace(CONFIG, constants={**CONFIG.constants, "norm_place": "both"}),
    covers={**COVERED, "norm_place": ("both",)},
    layer=gemma2_layer,
    registered=(*GLM.registered, "attention_output_norm", "mlp_output_norm"),
    submodules={
        **SUBMODULES,
        "layer": replace(HOOKED, before_backward={"mlp_output_norm": 1, "down": 1, "attention_output": 1}),
    },
)

FAMILIES = {"glm": GLM, "glm4": GLM4}
