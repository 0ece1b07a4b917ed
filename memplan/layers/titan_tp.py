"""torchtitan's Qwen 3 and DeepSeek V3 with tensor parallelism: one rank's part of ``titan_models``.

``apply_non_moe_tp`` of ``torchtitan/models/{qwen3,deepseek_v3}/infra/parallelize.py`` and ``apply_moe_ep_tp`` of
``torchtitan/models/llama4/infra/parallelize.py``, of release 0.2.2: the residual stream is (b, s / t, h), norms are
``SequenceParallel``, attention, MLP and experts gather their input and scatter their output. Shapes: b micro-batch, s
sequence, h hidden, t tensor-parallel size.
"""

from __future__ import annotations

from . import ops, tensor_parallel as tp
from .autograd import Recorder, Tensor
from .huggingface import LayerShape
from .titan_models import Attention
from .titan_moe import fused_rms_norm, mixture
from .torchtitan import Policy, feed_forward
from .torchtitan_tp import local


def rms_norm(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``nn.RMSNorm`` of (b, s / t, h)."""
    return fused_rms_norm(r, tp.apart(ops.alias(r, x)), name, placed="parts")


def block(
    r: Recorder, x: Tensor, shape: LayerShape, policy: Policy, attention: Attention, table: Tensor | None = None
) -> Tensor:
    """``TransformerBlock.forward`` on (b, s / t, h); ``shape`` is that of all ranks together."""
    t = shape.tensor
    part = local(shape, t)

    def attended(normed: Tensor) -> Tensor:
        return attention(r, tp.gathered(r, normed, t, "attention_input"), part, policy, table)

    def scattered(r: Recorder, x: Tensor) -> Tensor:
        return tp.scattered(r, x, t, "mlp_output_part", policy.run)

    def fed(normed: Tensor) -> Tensor:
        return feed_forward(r, tp.gathered(r, normed, t, "mlp_input"), part, policy, scattered)

    def mixed(normed: Tensor) -> Tensor:
        whole = tp.everywhere(r, normed, t, "experts_input")
        return scattered(r, mixture(r, whole, part, policy))

    x = ops.add(r, x, attended(rms_norm(r, x, "attention_norm")), "residual_attention")
    inner = mixed if shape.mixture else fed
    return ops.add(r, x, inner(rms_norm(r, x, "mlp_norm")), "residual_mlp")
