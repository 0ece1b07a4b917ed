"""What lies before and after the layers in Hugging Face transformers: embeddings, final norm, head and loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

from ..families import family
from ..plan.releases import LOSS_FUNCTION, MASKS, MULTIPLIED_ANGLES, PADDED_LABELS, SCALED_ANGLES
from ..tape.events import Category
from ..values import dataclass, replace
from . import ops
from .autograd import Recorder, Tensor
from .huggingface import LayerShape, Shared, activation, layer_norm, linear, norm
from .kernels import CrossEntropy
from .tuning import Layer, adapted_embedding, lora


@dataclass(slots=True)
class Embedded:
    """What the embedding leaves behind for the rest of the model."""

    hidden: Tensor
    shared: Shared
    frame: list[Tensor] = field(default_factory=list)
    """Tensors in variables of ``model.forward``, alive until it returns."""


Embedding = Callable[[Recorder, LayerShape], Embedded]


def token_ids(r: Recorder, shape: LayerShape, b: int | None = None) -> Tensor:
    """int64 indices made outside the model (held as inputs, not here)."""
    return r.outside((shape.b if b is None else b, shape.s), "int64", Category.INPUTS)


def positions(r: Recorder, s: int, *, summed: bool = True) -> Tensor:
    """``torch.arange(s) + past_seen_tokens``, or, unless ``summed``, ``torch.arange`` from there."""
    arange = r.empty((s,), "int64", "arange")
    if not summed:
        return arange.view(1, s)
    ids = r.empty((s,), "int64", "position_ids")
    del arange
    return ids.view(1, s)


def causal_mask(r: Recorder, shape: LayerShape, *, window: bool = True, packed: bool = True) -> Tensor | None:
    """The additive mask (b, 1, s, s) of eager attention (``masking_utils.py``), or sdpa's of layers with a window that
    is no longer than the sequence, (1, 1, s, s) bool, and of all layers with padding, (b, 1, s, s) bool; flash
    attention needs none.

    ``packed``: packed rows are looked for either way (``find_packed_sequence_indices``), which takes the positions,
    unless there is padding. ``window``: with the spec's, if any.
    """
    b, s = shape.b, shape.s
    if shape.padded:
        return padded_mask(r, shape, window=window)
    if packed and shape.transformers >= MASKS:
        look_for_packed_rows(r, b, s)
    if shape.flash:
        return allowed_pairs(r, shape, window=True) if window and shape.masked_kernel else None
    return additive_mask(r, shape, allowed_pairs(r, shape, window=window))


def padded_mask(r: Recorder, shape: LayerShape, *, window: bool) -> Tensor:
    """``causal_mask`` of a batch with padding: (b, s) int64 of the collator become bool
    (``_preprocess_mask_arguments``), and unless a window asks for a mask anyhow, sdpa's looks for zeros among them
    twice (``_ignore_causal_mask_sdpa``)."""
    b, s, widest = shape.b, shape.s, shape.spec.sliding_window
    tokens = r.empty((b, s), "bool", "attention_mask_bool")
    windowed = window and widest is not None and s >= widest
    if shape.flash and not windowed:
        for _ in range(2):
            count = r.empty((), "int64", "tokens_count")
            full = r.empty((), "bool", "tokens_full")
            del count, full
    allowed = allowed_pairs(r, shape, window=window)
    mask = allowed if shape.flash else additive_mask(r, shape, allowed)
    del tokens
    return mask


def additive_mask(r: Recorder, shape: LayerShape, allowed: Tensor) -> Tensor:
    """``eager_mask``: zeros where ``allowed``, the lowest number elsewhere, (b, 1, s, s)."""
    zero, lowest = r.empty((), shape.dtype, "zero"), r.empty((), shape.dtype, "lowest")
    mask = r.empty((shape.b, 1, shape.s, shape.s), shape.dtype, "causal_mask")
    del lowest, zero, allowed
    return mask


def look_for_packed_rows(r: Recorder, b: int, s: int) -> None:
    """Where position ids do not rise by one: seven short temporaries."""
    before = r.empty((b, 1), "int64", "position_before")
    steps = r.in_turn(((b, s + 1), "int64", "positions_prepended"), ((b, s), "int64", "position_steps"))
    breaks = r.empty((b, s), "bool", "position_breaks")
    rows = r.empty((b, s), "int64", "packed_rows")
    del breaks, before, steps, rows


def allowed_pairs(r: Recorder, shape: LayerShape, *, window: bool) -> Tensor:
    """Which token may look at which (``sdpa_mask``), (1, 1, s, s) bool; a sliding window is one more condition, and
    padding another, with which the result is (b, 1, s, s) (``padding_mask_function``)."""
    b, s = shape.b, shape.s
    pairs = (1, 1, s, s)
    batch, head = r.empty((b,), "int64", "batch_indices"), r.empty((1,), "int64", "head_indices")
    q, k = positions(r, s), positions(r, s)
    every = r.empty((), "bool", "true") if shape.padded else None
    if shape.spec.sliding_window is None or not window:
        allowed = r.empty(pairs, "bool", "causal_mask_bool")
    else:
        true = r.empty((), "bool", "true")
        inside = r.in_turn(((1, 1, s, 1), "int64", "window_begins"), (pairs, "bool", "inside_window"))
        windowed = r.empty(pairs, "bool", "window_mask_bool")
        del inside, true
        before = r.empty(pairs, "bool", "causal_mask_bool")
        allowed = r.empty(pairs, "bool", "sliding_mask_bool")
        del before, windowed
    if every is not None:
        earlier = r.empty(pairs, "bool", "earlier_mask_bool")
        del allowed, every
        tokens = r.empty((b, 1, 1, s), "bool", "tokens_of_pairs")
        allowed = r.empty((b, 1, s, s), "bool", "padded_mask_bool")
        del tokens, earlier
    del batch, head, q, k
    return allowed


def rotary_tables(r: Recorder, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    """``LlamaRotaryEmbedding.forward``: cos and sin (1, s, d), made in fp32, scaled and cast; d features turn.

    gpt-oss has one angle for two features, (1, s, d / 2); DeepSeek V2 complex numbers, of two fp32 each.
    """
    s, d = shape.s, shape.table

    def unscaled(name: str) -> Tensor:
        return r.empty((1, s, d), "fp32", f"{name}_unscaled")

    def scaled(x: Tensor, name: str) -> Tensor:
        return ops.scale(r, x, f"{name}_fp32")

    position_ids: Tensor | None = r.empty((1, s, 1), "fp32", "position_ids_fp32")
    if shape.transformers < MULTIPLIED_ANGLES:
        r.multiply()
    frequencies = r.empty((1, s, shape.turned // 2), "fp32", "rotary_frequencies")
    if shape.transformers >= MULTIPLIED_ANGLES:
        position_ids = None
    if shape.tables == "complex":
        table = r.in_turn(
            (frequencies.shape, "fp32", "rotary_ones"),
            ((1, s, d), "fp32", "rotary_unscaled"),
            ((1, s, d), "fp32", "rotary"),
        )
        return table, None
    angles = frequencies if frequencies.shape[-1] == d else r.empty((1, s, d), "fp32", "rotary_angles")
    if shape.older:
        cos, sin = unscaled("cos"), unscaled("sin")
    elif shape.transformers >= SCALED_ANGLES:
        cos, sin = scaled(unscaled("cos"), "cos"), scaled(unscaled("sin"), "sin")
    else:
        cos, sin = unscaled("cos"), unscaled("sin")
        cos = scaled(cos, "cos")
        sin = scaled(sin, "sin")
    tables = ops.cast(r, cos, shape.table_dtype, "cos"), ops.cast(r, sin, shape.table_dtype, "sin")
    del position_ids, frequencies, angles, cos, sin
    return tables


def word_embeddings(r: Recorder, shape: LayerShape) -> Tensor:
    """Rows of the table of words, (b, s, h)."""
    word = r.parameter("word.weight", (shape.spec.vocab, shape.spec.hidden), shape.dtype)
    ids = token_ids(r, shape)
    if r.tuning is None or not r.tuning.adapts("word"):
        return ops.embedding(r, word, ids, "word_embeddings")
    return adapted_embedding(r, word, ids, shape.spec.vocab)


def final_norm(r: Recorder, hidden: Tensor, shape: LayerShape) -> Tensor:
    return norm(r, hidden, shape.spec, "final_norm")


def mlm_transform(r: Recorder, hidden: Tensor, shape: LayerShape) -> Tensor:
    """``BertPredictionHeadTransform``."""
    hidden = linear(r, hidden, "transform", shape.spec.hidden, True)
    hidden = activation(r, hidden, shape.spec)
    hidden = layer_norm(r, hidden, "transform_norm")
    return hidden  # noqa: RET504


def head(
    r: Recorder, hidden: Tensor, shape: LayerShape, of_kernel: CrossEntropy | None = None, *, shifts: bool = False
) -> tuple[Tensor, Tensor]:
    """The language-model head and its loss: ``(loss, logits)``, with the logits as the model returns them.

    Causal: ``ForCausalLMLoss`` (``loss/loss_utils.py``) upcasts the logits to fp32 and pads the labels; before 4.46
    the model itself upcasts them, and returns them so.
    BERT: the cross entropy is taken in the logits' own dtype.
    ``of_kernel``: in the place of PyTorch's cross entropy, of logits that are shifted in all releases if ``shifts``.
    """
    spec, b, s = shape.spec, shape.b, shape.s
    logits = logits_of(r, hidden, shape)
    if not spec.causal:
        return cross_entropy(r, logits, token_ids(r, shape)), logits
    alone = shape.transformers < family(spec.family).alone_before
    upcast = logits if alone else ops.cast(r, logits, "fp32", "logits_fp32", Category.LOGITS)
    if shape.transformers < LOSS_FUNCTION:
        logits = upcast
    entropy = of_kernel or cross_entropy
    if shifts or shape.transformers < PADDED_LABELS:
        return shifted_loss(r, upcast, shape, entropy), logits
    labels = shifted = r.empty((b, s + 1), "int64", "labels_padded")
    if b > 1:
        shifted = r.empty((b, s), "int64", "labels_shifted")
    loss = entropy(r, upcast, shifted)
    del upcast, labels
    return loss, logits


def logits_of(r: Recorder, hidden: Tensor, shape: LayerShape) -> Tensor:
    """The head's logits (b, s, v), in the dtype of its product."""
    spec, dtype = shape.spec, shape.dtype
    table = "word.weight" if spec.tied_embeddings else "head.weight"
    weight = r.parameter(table, (spec.vocab, spec.hidden), dtype)
    transformed = mlm_transform(r, hidden, shape) if spec.mlm_head else hidden
    bias = r.parameter("head.bias", (spec.vocab,), dtype) if spec.mlm_head or spec.head_bias else None
    if r.tuning is not None and r.tuning.adapters is not None and r.tuning.adapts("head"):
        of_head = Layer("head", spec.vocab, False, False, weight=table, category=Category.LOGITS)
        logits = lora(r, transformed, of_head, r.tuning.adapters)
    else:
        logits = ops.linear(r, transformed, weight, bias, name="logits", category=Category.LOGITS)
    del transformed
    if spec.logit_softcap is not None:
        logits = ops.elementwise(r, "logits_divided", (logits,), category=Category.LOGITS)
        logits = ops.elementwise(r, "logits_tanh", (logits,), saves_output=True, category=Category.LOGITS)
        logits = ops.elementwise(r, "logits_capped", (logits,), category=Category.LOGITS)
    if spec.logit_scale:
        logits = ops.elementwise(r, "logits_divided", (logits,), category=Category.LOGITS)
    return logits


def shifted_loss(r: Recorder, logits: Tensor, shape: LayerShape, entropy: CrossEntropy) -> Tensor:
    """The loss of transformers before 4.49, which shifts a copy of the upcast logits."""
    shifted = all_but_last(r, logits, shape, "logits", Category.LOGITS)
    labels = shifted_labels(r, shape)
    loss = entropy(r, shifted, labels)
    del shifted, labels
    return loss


def shifted_labels(r: Recorder, shape: LayerShape) -> Tensor:
    """``labels[..., 1:].contiguous()``: a copy, but of one sequence."""
    return r.empty((shape.b, shape.s - 1), "int64", "labels_shifted") if shape.b > 1 else token_ids(r, shape)


def all_but_last(r: Recorder, x: Tensor, shape: LayerShape, name: str, category: Category) -> Tensor:
    """``x[..., :-1, :].contiguous()``: a copy, but of one sequence; the gradient is laid into zeros."""
    b, s, v = whole = x.shape
    dtype = x.dtype
    sliced = r.node((x,), (), lambda r, gradients: [r.empty(whole, dtype, f"grad_{name}_sliced", category)])
    view = ops.sliced_whole(r, Tensor(x.storage, (b, s - 1, v), dtype, sliced), shape.slices_whole, name, category)
    if b == 1:
        return view
    copied = r.empty(view.shape, dtype, f"{name}_shifted", category)
    return copied.by(r.node((view,), (), lambda r, gradients: gradients))


def last_tokens(r: Recorder, hidden: Tensor, shape: LayerShape, kept: int) -> tuple[Tensor, LayerShape]:
    """``slice_logits_to_keep``: a view of (b, kept, h), whose gradient is laid into zeros; the head's ``linear``
    copies it, unless it is the whole, or of one sequence or one token."""
    b, s, h = hidden.shape
    kept = min(kept, s)
    if kept == s:
        return hidden, shape

    view = Tensor(
        hidden.storage,
        (b, kept, h),
        hidden.dtype,
        r.node((hidden,), (), lambda r, gradients: [r.empty((b, s, h), shape.dtype, "grad_hidden_sliced")]),
    )
    if b > 1 and kept > 1:
        view = ops.contiguous(r, view, (b, kept, h), "kept_hidden")
    return view, replace(shape, s=kept)


def cross_entropy(r: Recorder, logits: Tensor, labels: Tensor) -> Tensor:
    """``F.cross_entropy``: ``log_softmax``, then ``nll_loss``."""
    log_probabilities = ops.log_softmax(r, logits)
    return ops.nll_loss(r, log_probabilities, labels)
