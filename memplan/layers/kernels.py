"""Kernels that take the place of a model's Python operators, each an object of its own: Liger's, and Unsloth's as
fms-acceleration ships them.

Unsloth: foundation-model-stack/fms-acceleration, ``plugins/fused-ops-and-kernels``, ``kernels/unsloth``
(``rms_layernorm.py``, ``rope_embedding.py``, ``cross_entropy_loss.py``). Liger 0.8.5: ``ops/rms_norm.py``,
``ops/rope.py``, ``ops/swiglu.py``, ``ops/cross_entropy.py``. All of them write over what they are given: gradients of
norms and rotary embeddings over those that arrive, queries and keys over themselves, gradients of logits over logits.
Shapes: b micro-batch, s sequence, h hidden, a heads, d features of a head, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from ..values import dataclass
from .autograd import Gradients, Recorder, Tensor, incoming, size_of
from .work import Operator, Stream

VOCAB_CHUNK = 65_536
"""Tokens of the vocabulary that one block of Unsloth's cross entropy takes (``MAX_FUSED_SIZE``)."""


Gated = Callable[[Recorder, Tensor, Tensor], Tensor]
"""Of a gate and what it lets through."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Turns queries and keys in place."""

    together: bool
    """Both in one function, whose backward has copies of both gradients at once where their layout asks for them."""

    def __call__(
        self,
        r: Recorder,
        q: Tensor,
        k: Tensor,
        tables: Sequence[Tensor],
        copied: tuple[bool, bool],
        by_head: tuple[bool, bool] = (False, False),
    ) -> tuple[Tensor, Tensor]:
        """``copied``: the gradients of q and k arrive head by head, and are laid out token by token. ``by_head``: q and
        k do so themselves, and copies of them are turned (``rope_forward``)."""
        if not self.together:
            return turned(r, (q,), (), copied[:1])[0], turned(r, (k,), (), copied[1:])[0]
        both = turned(r, (q, k), tables, copied, by_head)
        return both[0], both[1]


def turned(
    r: Recorder,
    inputs: tuple[Tensor, ...],
    saved: Sequence[Tensor],
    copied: Sequence[bool],
    by_head: Sequence[bool] = (),
) -> list[Tensor]:
    """``inputs`` themselves, (b, a, s, d), written over; or copies of those that are laid out ``by_head``."""
    shapes = [(x.shape, x.dtype) for x in inputs]

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        laid_out = zip(shapes, copied, strict=True)
        made = [r.empty(*like, "grad_rotary_contiguous") if copies else None for like, copies in laid_out]
        return [copy or given for copy, given in zip(made, gradients, strict=True)]

    sizes = sum(size_of(*like) for like in shapes)
    done = Operator((Stream(2 * sizes),), (Stream(2 * sizes),))
    node = r.node(inputs, saved, backward, outputs=len(inputs), work=done)
    again = [x for x, copies in zip(inputs, by_head, strict=False) if copies]
    made = [r.empty(x.shape, x.dtype, "rotary_contiguous") if x in again else x for x in inputs]
    return [Tensor(x.storage, x.shape, x.dtype, node, slot) for slot, x in enumerate(made)]


UNSLOTH_ROPE, LIGER_ROPE = Rope(together=False), Rope(together=True)


# -- norms --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Saves its input and the reciprocal deviations, fp32; the gradient of the input is written over its output's."""

    processors: int = 0
    """Liger: every multiprocessor of the GPU sums a gradient of the weight in fp32. 0: Unsloth's, which has no gradient
    of the weight: frameworks that lay out all gradients together fill it with zeros."""
    sums_frozen: bool = False
    """Liger before 0.8.5: of a frozen weight, too (``rms_norm_backward``, which had no ``needs_dw``)."""

    def __call__(
        self, r: Recorder, x: Tensor, weight: Tensor, name: str, *, in_place: bool = True, by_head: bool = False
    ) -> Tensor:
        """Of hidden states (…, h) and a weight (h). Not ``in_place``: the gradient of the input is a tensor of its own,
        where a residual still needs that of the output (``LigerRMSNormForGemma2``). ``by_head``: the input is a view of
        heads, and its output's gradient another one: both are copied (``ensure_contiguous``)."""
        h, dtype, trained, processors = x.shape[-1], weight.dtype, weight.node is not None, self.processors
        sums, like = processors > 0 and (trained or self.sums_frozen), (x.shape, x.dtype)
        kept = r.empty(*like, f"{name}_contiguous") if by_head else x
        out = r.empty(*like, name)
        deviations = r.empty((prod(x.shape[:-1]),), "fp32", f"{name}_rstd")

        def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
            gradient = incoming(gradients)
            laid_out = r.empty(*like, f"grad_{name}_contiguous") if by_head else None
            parts = r.empty((processors, h), "fp32", f"grad_{name}_parts") if sums else None
            made = gradient.view(*gradient.shape) if in_place else r.empty(*like, f"grad_{name}")
            summed = r.empty((h,), "fp32", f"grad_{name}_sum") if sums and dtype != "fp32" else None
            of_weight = r.empty((h,), dtype, f"grad_{name}_weight") if sums or trained else None
            del parts, summed, laid_out
            return [made, of_weight if trained else None]

        out.node = r.node((x, weight), (kept, deviations), backward)
        del kept, deviations
        return out


# -- SwiGLU -------------------------------------------------------------------------------------------


def liger_swiglu(r: Recorder, gate: Tensor, up: Tensor) -> Tensor:
    """``LigerSiLUMulFunction``: saves both, and writes their gradients over them."""
    likes = ((gate.shape, gate.dtype), (up.shape, up.dtype))
    out = r.empty(gate.shape, gate.dtype, "gated")

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        pairs = zip(r.unpacked, likes, strict=True)
        return [Tensor(storage, shape, dtype).view(*shape) for storage, (shape, dtype) in pairs]

    out.node = r.node((gate, up), (gate, up), backward, work=Operator(None, (Stream(5 * size_of(*likes[0])),)))
    return out


# -- losses -------------------------------------------------------------------------------------------

CrossEntropy = Callable[[Recorder, Tensor, Tensor], Tensor]
"""Mean loss, fp32, of logits (…, v) and labels."""


def _over_logits(r: Recorder, total: Tensor, logits: Tensor, saved: Sequence[Tensor]) -> Tensor:
    """``total`` as the loss of ``logits``, which it saves first, and over which it writes their gradient."""
    shape, dtype = logits.shape, logits.dtype

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        return [Tensor(r.unpacked[0], shape, dtype).view(*shape)]

    size = size_of(shape, dtype)
    done = Operator((Stream(size, 1, True),), (Stream(2 * size, 1, True),))
    return total.by(r.node((logits,), (logits, *saved), backward, work=done))


def unsloth_cross_entropy(r: Recorder, logits: Tensor, labels: Tensor) -> Tensor:
    """``Fast_CrossEntropyLoss``: saves logits, log-sum-exp and labels; of a large vocabulary, chunk by chunk."""
    n, chunks = prod(logits.shape[:-1]), -(-logits.shape[-1] // VOCAB_CHUNK)
    losses = r.empty((n,), "fp32", "losses")
    lse = r.empty((n,) if chunks == 1 else (n, chunks), "fp32", "log_sum_exp")
    if chunks > 1:
        lse = r.empty((n,), "fp32", "log_sum_exp_of_chunks")
    r.empty((n,), "bool", "labels_ignored")
    total = r.empty((), "fp32", "loss")
    del losses
    return _over_logits(r, total, logits, (lse, labels))


def liger_cross_entropy(r: Recorder, logits: Tensor, labels: Tensor) -> Tensor:
    """``LigerCrossEntropyFunction``: forward writes the gradient over the logits, and backward multiplies it."""
    n = prod(logits.shape[:-1])
    losses = r.empty((n,), "fp32", "losses")
    r.empty((n,), "bool", "target_mask")
    total = r.empty((), "fp32", "loss")
    del losses
    return _over_logits(r, total, logits, ())


CROSS_ENTROPIES: dict[str, CrossEntropy] = {
    "unsloth": unsloth_cross_entropy,
    "liger-cross-entropy": liger_cross_entropy,
}
"""Losses on all logits, by the name of the kind."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What runs in the place of the model's own operators; ``None``: these."""

    norm: RmsNorm | None = None
    rope: Rope | None = None
    gated: Gated | None = None
    delta: bool = False
    """Gated delta nets run those of flash-linear-attention and causal-conv1d."""
