"""torchtitan's Llama with tensor parallelism: one rank's part of ``layers.torchtitan``.

``torchtitan/parallelisms/parallelize_llama.py``, ``apply_tp``, of December 2024 (commit 9dec370): the residual
stream is (b, s / t, h), norms are ``SequenceParallel``, attention and MLP gather their input and scatter their
output, and the head's logits stay (b, s, v / t) for ``loss_parallel``, or are gathered. Shapes: b micro-batch, s
sequence, h hidden, a heads, v vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable

from ..tape.events import Category
from ..values import replace
from . import ops, tensor_parallel as tp
from .autograd import Recorder, Tensor
from .huggingface import LayerShape
from .torchtitan import Policy, attention, feed_forward, normed


def local(shape: LayerShape, t: int) -> LayerShape:
    """What one rank computes: a / t heads, and as much of each MLP and expert."""
    spec = shape.spec
    parts = {name: getattr(spec, name) // t for name in ("heads", "kv_heads", "ffn", "shared_expert_ffn")}
    parts["expert_ffn"] = spec.expert_ffn // shape.expert_parts
    return replace(shape, spec=spec.model_copy(update=parts))


def rms_norm(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``RMSNorm.forward`` on (b, s / t, h)."""
    weight = r.parameter(f"{name}.weight", (x.shape[-1],), x.dtype)
    x = tp.apart(ops.alias(r, x))
    output = ops.cast(r, normed(r, tp.upcast(r, x, f"{name}_fp32"), name), x.dtype, f"{name}_cast")
    return tp.weighted(r, output, weight, name)


def block(r: Recorder, x: Tensor, shape: LayerShape, t: int, policy: Policy) -> Tensor:
    """``TransformerBlock.forward`` on (b, s / t, h); ``shape`` is that of all ranks together."""
    part = local(shape, t)

    def scattered(name: str) -> Callable[[Recorder, Tensor], Tensor]:
        return lambda r, x: tp.scattered(r, x, t, name, policy.run)

    def attended(normed: Tensor) -> Tensor:
        inputs = tp.gathered(r, normed, t, "attention_input")
        return attention(r, inputs, part, policy, scattered("attention_output_part"))

    def fed(normed: Tensor) -> Tensor:
        return feed_forward(r, tp.gathered(r, normed, t, "mlp_input"), part, policy, scattered("mlp_output_part"))

    h = ops.add(r, x, attended(rms_norm(r, x, "attention_norm")), "residual_attention")
    return ops.add(r, h, fed(rms_norm(r, h, "mlp_norm")), "residual_mlp")


def embedding(r: Recorder, shape: LayerShape, t: int) -> tuple[Tensor, list[Tensor]]:
    """``Transformer.tok_embeddings``, and what is held until the first block reads its output."""
    weight = r.parameter("word.weight", (shape.spec.vocab // t, shape.spec.hidden), shape.dtype)
    tokens = r.outside((shape.b, shape.s), "int64", Category.INPUTS)
    return tp.embedding(r, weight, tokens, t, "word_embeddings")


def output(r: Recorder, x: Tensor, shape: LayerShape, t: int, *, parallel_loss: bool) -> Tensor:
    """``Transformer.output``: (b, s, v / t), or all logits."""
    weight = r.parameter("head.weight", (shape.spec.vocab // t, shape.spec.hidden), shape.dtype)
    inputs = tp.gathered(r, x, t, "head_input")
    if parallel_loss:
        return ops.linear(r, inputs, weight, name="logits", category=Category.LOGITS)
    return tp.gathered_logits(r, ops.linear(r, inputs, weight, name="logits", category=Category.LOGITS), t)


def loss(r: Recorder, logits: Tensor, shape: LayerShape) -> Tensor:
    """``loss_fn`` of ``train.py`` under ``loss_parallel``."""
    upcast = ops.cast(r, logits, "fp32", "logits_fp32", Category.LOGITS)
    labels = r.outside((shape.b, shape.s), "int64", Category.INPUTS)
    return tp.nll_loss(r, tp.log_softmax(r, upcast), labels)
