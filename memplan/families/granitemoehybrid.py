"""Granite 4 (``models/granitemoehybrid/modeling_granitemoehybrid.py``) where every layer has attention and an MLP, as
in its models without Mamba and experts: Granite's layer, with one projection for gate and up in what it calls shared.
"""

from __future__ import annotations

from ..layers import ops
from ..layers.autograd import Recorder, Tensor
from ..layers.ends import Embedded
from ..layers.huggingface import LayerShape, activation, linear
from ..plan.releases import LIBRARIES
from ..plan.spec import ModelSpec
from ..values import replace
from .base import Config, Submodules, key
from .granite import GRANITE, SCALES
from .llama import ATTENTION, CONSTANTS, KEYS, SILU, SUBMODULES, llama_embedding


def mlp(r: Recorder, hidden: Tensor, spec: ModelSpec) -> Tensor:
    """``GraniteMoeHybridMLP.forward``: ``activation(gate) * up``, both views of one projection."""
    hidden = linear(r, hidden, "gate_up", 2 * spec.ffn, spec.mlp_bias)
    half = (*hidden.shape[:-1], spec.ffn)
    gate, up = ops.split(r, hidden, [half, half], "gate_up")
    hidden = ops.multiply(r, activation(r, gate, spec), up, "gated")
    return linear(r, hidden, "down", spec.hidden, spec.mlp_bias)


def embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``GraniteMoeHybridModel.forward`` up to the first layer: positions are a variable of it, which layers get not."""
    embedded = llama_embedding(r, shape, packed=False, scales_first=True)
    shared = embedded.shared
    assert shared.position_ids is not None
    return Embedded(embedded.hidden, replace(shared, position_ids=None), [shared.position_ids])


assert GRANITE.covers is not None

GRANITE_4 = replace(
    GRANITE,
    name="granitemoehybrid",
    config=Config(
        keys={
            **{name: key for name, key in KEYS.items() if name != "mlp_bias"},
            "attention_output_bias": KEYS["attention_bias"],
            "ffn": key("shared_intermediate_size", default=1024),
        },
        constants={**CONSTANTS, "mlp_bias": False, **SCALES},
        activation=SILU,
        activations=("silu", "swish"),
        wanted={
            "layer_types": ("full_attention", "attention"),
            "num_local_experts": (0,),
            "position_embedding_type": ("rope",),
        },
    ),
    covers={**GRANITE.covers, "mlp_bias": (False,), "qk_norm": (False,), "sliding_window": (None,)},
    mlp=mlp,
    embedding=embedding,
    padded=False,
    takes_positions=lambda r: False,
    kernels=(),
    lora_targets=None,
    linear_layers={
        **{name: where for name, where in GRANITE.linear_layers.items() if where.startswith("self_attn")},
        "gate_up": "shared_mlp.input_linear",
        "down": "shared_mlp.output_linear",
    },
    registered=("attention_norm", "mlp_norm", "gate_up", "down", *ATTENTION),
    since=LIBRARIES["transformers"].newest,
    submodules={
        **SUBMODULES,
        "layer": Submodules(
            before_forward={"attention_norm": 1, "query": 1, "gate_up": 1},
            after_forward={"gate_up": 1},
            before_backward={"down": 2, "attention_output": 1},
            after_backward={"down": 1},
            not_recomputed="attention_norm",
        ),
    },
)

FAMILIES = {"granitemoehybrid": GRANITE_4}
