"""Llama as torchtitan writes it, and what its activation checkpointing keeps.

``torchtitan/models/llama/model.py`` and ``norms.py`` of December 2024 (commit 9dec370): the residual stream
and the linears are those of any Llama; queries and keys are turned as complex fp32 numbers, keys and
values are repeated to the number of query heads, and the norm is made of Python operators.
``torchtitan/parallelisms/parallelize_llama.py``, ``_apply_ac_to_transformer_block``: full, every n-th
layer, or per operator. Shapes: b micro-batch, s sequence, h hidden, a heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..tape.events import Category
from . import ops, titan_lora
from .autograd import Gradients, Recorder, Shape, Storage, Tensor
from .fused_attention import efficient_attention, flash_attention
from .fused_losses import head_weight
from .huggingface import LayerShape, linear as plain_linear, silu
from .low_linear import LowLinear
from .recompute import Frame

Operator = Callable[[Recorder], Tensor]


# -- activation checkpointing -----------------------------------------------------------------------


class _Keeping(Recorder):
    """The same recorder, while an operator runs whose outputs are kept for its recomputation."""

    outer: Recorder
    outputs: list[Storage]
    again: bool

    @classmethod
    def of(cls, recorder: Recorder, kept: list[Storage], again: bool) -> _Keeping:
        twin = cls.__new__(cls)
        twin.__dict__ = {**recorder.__dict__, "outer": recorder, "outputs": kept, "again": again}
        twin.counts = recorder.counts and not again
        return twin

    def empty(self, shape: Shape, dtype: str, name: str, category: Category = Category.TEMPORARIES) -> Tensor:
        if self.again:
            return Tensor(self.outputs.pop(0), shape, dtype)
        made = super().empty(shape, dtype, name, category)
        made.storage.recorder = self.outer
        self.outputs.append(made.storage)
        return made


class Policy:
    """Which operators' outputs a region keeps: fused attention's, and every second matrix product's, the first
    one among them (``_get_custom_policy``). Without ``keeps``, none."""

    def __init__(self, keeps: bool, *, keeps_exchanged: bool = False, low: LowLinear | None = None) -> None:
        self.keeps = keeps
        self.low = low
        """Which linear layers are torchao's."""
        self.keeps_exchanged = keeps_exchanged
        """Also what an all-to-all gives (``_op_sac_save_list`` of some models)."""
        self.outputs: list[Storage] = []
        """``create_selective_checkpoint_contexts``: taken out one by one as the region runs again."""
        self.products = 0
        self.again = False

    def linear(self, r: Recorder, x: Tensor, name: str, n: int) -> Tensor:
        """A linear layer of ``n`` features, without bias."""
        if r.tuning is not None and r.tuning.adapts(name):
            return titan_lora.adapted(r, x, name, n, self.product)
        if self.low is not None and self.low.takes(name, n, x.shape[-1]):
            return in_low(r, x, name, n, self.low, self)
        return self.product(r, lambda r: plain_linear(r, x, name, n, False))

    def product(self, r: Recorder, operator: Operator) -> Tensor:
        return self.run(r, operator) if self.counted() else operator(r)

    def counted(self) -> bool:
        """Whether the matrix product that comes next is one of those."""
        self.products += 1
        return self.products % 2 == 1

    def run(self, r: Recorder, operator: Operator) -> Tensor:
        """An operator whose outputs are kept."""
        if not self.keeps:
            return operator(r)
        inner = _Keeping.of(r, self.outputs, self.again)
        out = operator(inner)
        r.next_id, r.sequence = inner.next_id, inner.sequence
        return out


def in_low(
    r: Recorder,
    x: Tensor,
    name: str,
    n: int,
    low: LowLinear,
    policy: Policy,
    category: Category = Category.TEMPORARIES,
) -> Tensor:
    """A linear layer of ``n`` features whose products are in fewer than 16 bits."""
    weight = r.parameter(f"{name}.weight", (n, x.shape[-1]), x.dtype, gathered="fp8" if low.gathered else None)
    return low.product(r, x, weight, name, policy, category)


def checkpointed(
    r: Recorder,
    region: Callable[[Policy], Tensor],
    *,
    keeps: bool,
    early_stop: bool = True,
    keeps_exchanged: bool = False,
    low: LowLinear | None = None,
) -> Tensor:
    """``region`` under ``checkpoint(use_reentrant=False)``; ``keeps``: per operator."""
    policy = Policy(keeps and r.grad_enabled, keeps_exchanged=keeps_exchanged, low=low)

    def again() -> Tensor:
        policy.products, policy.again = 0, True
        return region(policy)

    outer, r.frame = r.frame, Frame(again, early_stop=early_stop)
    out = region(policy)
    r.frame = outer
    return out


# -- layer ------------------------------------------------------------------------------------------


def rms_norm(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``RMSNorm.forward``: fp32 inside, the product with the weight in the input's dtype."""
    weight = r.parameter(f"{name}.weight", (x.shape[-1],), x.dtype)
    output = ops.cast(r, normed(r, ops.cast(r, x, "fp32", f"{name}_fp32"), name), x.dtype, f"{name}_cast")
    return ops.multiply(r, output, weight, name)


def normed(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``x * rsqrt(mean(x²) + eps)``."""

    def variance() -> Tensor:
        mean = ops.mean_last(r, ops.power(r, x, f"{name}_square"), f"{name}_variance")
        return ops.add_constant(r, mean, f"{name}_eps")

    return ops.multiply(r, x, ops.rsqrt(r, variance(), f"{name}_rstd"), f"{name}_normed")


def turned(r: Recorder, x: Tensor, name: str) -> Tensor:
    """A query or key times ``freqs_cis`` as complex numbers: an fp32 tensor of its size, in both directions.

    Backward's product is with the conjugate, which ``mul`` has made a tensor first (``ConjugateFallback.cpp``).
    """
    shape = x.shape

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        gradient = r.in_turn(
            ((1, shape[1], 1, shape[3]), "fp32", "freqs_conjugate"), (shape, "fp32", f"grad_{name}_complex")
        )
        return [gradient]

    return r.empty(shape, "fp32", f"{name}_complex").by(r.node((x,), (), backward))


def rotary(r: Recorder, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """``apply_rotary_emb``."""
    q_fp32 = ops.cast(r, q, "fp32", "query_fp32")
    k_fp32 = ops.cast(r, k, "fp32", "key_fp32")
    q_out = turned(r, q_fp32, "query")
    k_out = turned(r, k_fp32, "key")
    return ops.cast(r, q_out, q.dtype, "query_rotary"), ops.cast(r, k_out, k.dtype, "key_rotary")


def same(r: Recorder, x: Tensor) -> Tensor:
    """``x`` itself."""
    return x


def attention(
    r: Recorder, x: Tensor, shape: LayerShape, policy: Policy, then: Callable[[Recorder, Tensor], Tensor] = same
) -> Tensor:
    """``Attention.forward``, by the kernel that ``scaled_dot_product_attention`` takes; ``then``: a hook behind ``wo``,
    within the function."""
    spec, b, s, d = shape.spec, shape.b, shape.s, shape.spec.head_dim
    a, groups = spec.heads, spec.kv_heads
    q = policy.linear(r, x, "query", a * d).view(b, s, a, d)
    k = policy.linear(r, x, "key", groups * d).view(b, s, groups, d)
    v = policy.linear(r, x, "value", groups * d).view(b, s, groups, d)
    q, k = rotary(r, q, k)
    keys = repeated(r, k, (b, s, a, d), "key")
    values = repeated(r, v, (b, s, a, d), "value")
    q, k, v = q.view(b, a, s, d), keys.view(b, a, s, d), values.view(b, a, s, d)
    fused = efficient_attention if q.dtype == "fp32" else flash_attention
    out = policy.run(r, lambda r: fused(r, q, k, v))
    out = out.view(b, s, a * d)
    return then(r, policy.linear(r, out, "attention_output", spec.hidden))


def repeated(r: Recorder, x: Tensor, shape: Shape, name: str) -> Tensor:
    """``repeat_kv``: nothing with as many key heads as query heads, and a view with one key head."""
    return x if x.shape == shape else ops.expanded(r, x, shape, f"{name}_repeated", copies=x.shape[2] > 1)


def feed_forward(
    r: Recorder, x: Tensor, shape: LayerShape, policy: Policy, then: Callable[[Recorder, Tensor], Tensor] = same
) -> Tensor:
    """``FeedForward.forward``: ``w2(silu(w1(x)) * w3(x))``; ``then``: a hook behind ``w2``, within the function."""
    spec = shape.spec

    def gated() -> Tensor:
        gate = silu(r, policy.linear(r, x, "gate", spec.ffn))
        return ops.multiply(r, gate, policy.linear(r, x, "up", spec.ffn), "gated")

    def down(product: Tensor) -> Tensor:
        return then(r, policy.linear(r, product, "down", spec.hidden))

    return down(gated())


def block(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy) -> Tensor:
    """``TransformerBlock.forward``."""
    h = ops.add(r, x, attention(r, rms_norm(r, x, "attention_norm"), shape, policy), "residual_attention")
    return ops.add(r, h, feed_forward(r, rms_norm(r, h, "mlp_norm"), shape, policy), "residual_mlp")


# -- ends -------------------------------------------------------------------------------------------


def embedding(r: Recorder, shape: LayerShape) -> Tensor:
    weight = r.parameter("word.weight", (shape.spec.vocab, shape.spec.hidden), shape.dtype)
    tokens = r.outside((shape.b, shape.s), "int64", Category.INPUTS)
    return ops.embedding(r, weight, tokens, "word_embeddings")


def output(r: Recorder, x: Tensor, shape: LayerShape, low: LowLinear | None = None) -> Tensor:
    """``Transformer.output``: the logits."""
    if low is not None:
        return in_low(r, x, "head", shape.spec.vocab, low, Policy(False), Category.LOGITS)
    return ops.linear(r, x, head_weight(r, shape), name="logits", category=Category.LOGITS)


def loss(r: Recorder, logits: Tensor, shape: LayerShape) -> Tensor:
    """``loss_fn`` of ``train.py``: cross entropy of the logits in fp32."""
    upcast = ops.cast(r, logits, "fp32", "logits_fp32", Category.LOGITS)
    labels = r.outside((shape.b, shape.s), "int64", Category.INPUTS)
    return ops.nll_loss(r, ops.log_softmax(r, upcast), labels)
