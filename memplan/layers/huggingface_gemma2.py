"""Gemma 2's layer (``models/gemma2/modeling_gemma2.py``): Llama's with a norm behind each block, too."""

from __future__ import annotations

from . import ops
from .autograd import Recorder, Tensor
from .huggingface_llama import llama_attention, llama_mlp
from .huggingface_parts import LayerShape, Shared, gemma_norm


def gemma2_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``Gemma2DecoderLayer.forward``."""
    residual = hidden
    hidden = gemma_norm(r, hidden, "attention_norm")
    hidden, _ = llama_attention(r, hidden, shared, shape)
    hidden = gemma_norm(r, hidden, "attention_output_norm")
    hidden = ops.add(r, residual, hidden, "residual_attention")
    residual = hidden
    hidden = gemma_norm(r, hidden, "mlp_norm")
    hidden = llama_mlp(r, hidden, shape.spec)
    hidden = gemma_norm(r, hidden, "mlp_output_norm")
    hidden = ops.add(r, residual, hidden, "residual_mlp")
    return hidden  # noqa: RET504 - the variable ends its tensor's life
