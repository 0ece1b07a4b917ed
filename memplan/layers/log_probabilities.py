"""trl's fused head: log-probabilities of the labels, by tiles of tokens and vocabulary, without the logits.

trl 1.16: ``trainer/utils.py`` (``add_fused_lm_head``), ``kernels/chunked_logprob.py`` (``ChunkedLogProbFunction``), in
SFTTrainer and DPOTrainer from 1.15 on. Hidden states and labels of the tokens that have one are gathered by a mask;
a tile of logits is a buffer of 4,096 x 32,768, made again in backward; gradients are summed in fp32, as large as the
head's weight where that is trained, and cast at the end. What Triton's kernels and the sort behind ``index_put`` take
inside is not counted. Shapes: b sequences, s tokens, n = b (s - 1) labels, or those of
completions, h hidden, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..tape.events import Category
from . import ops
from .autograd import Gradients, Recorder, Tensor, incoming
from .gradients import fresh, viewed
from .work import linear

TOKENS, VOCABULARY = 4096, 32_768
"""Of a tile (``TOKEN_CHUNK_SIZE``, ``_CHUNKED_LOGPROB_CHUNK_SIZE``)."""

STATISTICS = (
    "running_max", "sum_exp", "x_sum_exp", "sq_sum_exp", "z_sum", "max_before_target", "target_logit",
)  # fmt: skip

OUTPUTS = ("entropy", "mean_logits", "is_top1")
"""What is computed beside log-probabilities for metrics, in fp32, but for the last."""


def of_labels(
    r: Recorder, hidden: Tensor, weight: Tensor, outputs: Sequence[str], kept: int | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities (b, s - 1), fp32, and ``outputs``, of the last ``kept`` tokens of each sequence, or all."""
    b, s, _ = hidden.shape
    n = b * (kept or s - 1)
    mask = r.empty((b, s - 1), "bool", "label_mask")
    given = gathered(r, hidden, mask, n)
    targets = r.in_turn(((n, 2), "int64", "label_indices"), ((n,), "int64", "targets"))
    made = by_tiles(r, given, weight, targets, outputs)
    del given, targets
    scattered = [laid_out(r, x, mask) for x in made]
    made.clear()
    log_probabilities, *others = scattered
    return log_probabilities, [*others, mask]


def gathered(r: Recorder, hidden: Tensor, mask: Tensor, n: int) -> Tensor:
    """``hidden[:, :-1][mask]``, (n, h)."""
    b, s, h = hidden.shape
    dtype = hidden.dtype
    sliced = r.node((hidden,), (), fresh(hidden, "grad_hidden_sliced"))
    view = Tensor(hidden.storage, (b, s - 1, h), dtype, sliced)
    out = r.in_turn(((n, 2), "int64", "label_indices"), ((n, h), dtype, "hidden_of_labels"))

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        zeros = r.empty((b, s - 1, h), dtype, "grad_hidden_of_labels")
        r.empty((n, 2), "int64", "label_indices")
        return [zeros]

    return out.by(r.node((view,), (mask,), backward))


def laid_out(r: Recorder, x: Tensor, mask: Tensor) -> Tensor:
    """``x.new_zeros(mask.shape).masked_scatter(mask, x)``."""
    out = r.in_turn((mask.shape, x.dtype, "zeros"), (mask.shape, x.dtype, f"scattered_{x.dtype}"))
    return out.by(r.node((x,), (mask,), fresh(x, "grad_log_probabilities")))


def by_tiles(r: Recorder, x: Tensor, weight: Tensor, targets: Tensor, outputs: Sequence[str]) -> list[Tensor]:
    """``ChunkedLogProbFunction.apply``: (n,) each."""
    (n, h), v = x.shape, weight.shape[0]
    like, of_weight = (x.shape, x.dtype), (weight.shape, weight.dtype)
    compute = r.autocast or x.dtype

    def tiles(r: Recorder, *, held: bool) -> tuple[Tensor, list[Tensor]]:
        """The buffer of a tile, and the last parts of hidden states and weight in the dtype of compute: ``held`` in a
        variable until the next one is there, or ended with their product."""
        tile = r.empty((min(n, TOKENS), VOCABULARY), compute, "tile_of_logits", Category.LOGITS)
        rows = part = None
        for token in range(0, n, TOKENS):
            if like[1] != compute:
                rows = r.empty((min(TOKENS, n - token), h), compute, "hidden_of_tile")
            for word in range(0, v if of_weight[1] != compute else 0, VOCABULARY):
                part = r.empty((min(VOCABULARY, v - word), h), compute, "weight_of_tile")
                part = part if held else None
        return tile, [one for one in (rows, part) if one is not None]

    statistics = [r.empty((n,), "fp32", name) for name in STATISTICS]
    buffers = tiles(r, held=False)
    log_z = r.in_turn(((n,), "fp32", "log_sum_exp"), ((n,), "fp32", "log_z"))
    made = [r.empty((n,), "fp32", "log_probabilities")]
    if "entropy" in outputs:
        mean = r.empty((n,), "fp32", "mean_of_logits")
        made.append(r.empty((n,), "fp32", "entropy"))
        del mean
    if "mean_logits" in outputs:
        made.append(r.empty((n,), "fp32", "mean_logits"))
    if "is_top1" in outputs:
        both = [r.empty((n,), "bool", name) for name in ("is_largest", "is_first")]
        made.append(r.empty((n,), "bool", "is_top1"))
        del both
    needs_x, needs_weight = x.node is not None, weight.node is not None

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        of_x = r.empty(like[0], "fp32", "grad_head_input_fp32") if needs_x else None
        of_w = r.empty(of_weight[0], "fp32", "grad_head_weight_fp32") if needs_weight else None
        buffers = tiles(r, held=True)
        cast_x = of_x and ops.cast(r, of_x, like[1], "grad_head_input")
        cast_w = of_w and ops.cast(r, of_w, of_weight[1], "grad_head_weight")
        del buffers, of_x, of_w
        return [cast_x, cast_w]

    product = linear(n, v, h, compute)
    work = product.after((), product.forward or ())
    kept = (x, weight, targets, log_z, made[1] if "entropy" in outputs else log_z)
    node = r.node((x, weight), kept, backward, outputs=len(made), work=work)
    del buffers, statistics, log_z
    return [Tensor(one.storage, one.shape, one.dtype, node, slot) for slot, one in enumerate(made)]


def summed(r: Recorder, log_probabilities: Tensor) -> Tensor:
    """A loss of the sums of all rows, ``log_probabilities[:, -s:].sum(dim=1)``."""
    whole = log_probabilities.shape
    node = r.node((log_probabilities,), (), fresh(log_probabilities, "grad_sliced"))
    view = Tensor(log_probabilities.storage, whole, "fp32", node)
    sums = r.empty(whole[:1], "fp32", "log_probabilities_of_rows")
    sums.node = r.node((view,), (), viewed(view))
    loss = r.empty((), "fp32", "loss")
    return loss.by(r.node((sums,), (), fresh(sums, "grad_rows")))


def averaged(r: Recorder, log_probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """SFT's loss, ``(-log_probabilities).sum() / n`` (``SFTTrainer.compute_loss``), and that of tokens, which is in a
    variable."""
    of_tokens = ops.elementwise(r, "loss_of_tokens", (log_probabilities,))
    total = r.empty((), "fp32", "loss_summed").by(r.node((of_tokens,), (), viewed(of_tokens)))
    return ops.elementwise(r, "loss", (total,)), of_tokens


def clipped(r: Recorder, log_probabilities: Tensor, kept: int) -> Tensor:
    """GRPO's loss of the last ``kept`` tokens (``GRPOTrainer._compute_loss``: dapo, grpo, bnpo or dr_grpo, ratios of
    tokens, no KL term), (b, kept) each: what its variables hold, and what backward needs."""
    like = (log_probabilities.shape[0], kept)

    def made(name: str, *inputs: Tensor, saved: tuple[Tensor, ...] = (), passes: bool = False) -> Tensor:
        def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
            return [incoming(gradients) if passes else r.empty(like, "fp32", f"grad_{name}") for _ in inputs]

        return r.empty(like, "fp32", name).by(r.node(inputs, saved, backward))

    sliced = r.node((log_probabilities,), (), fresh(log_probabilities, "grad_sliced"))
    view = Tensor(log_probabilities.storage, like, "fp32", sliced)
    taken = made("completion_log_probabilities", view, passes=True)
    log_ratio = made("log_ratio", taken, passes=True)
    ratio = r.empty(like, "fp32", "ratio")
    ratio.node = r.node((log_ratio,), (ratio,), fresh(ratio, "grad_ratio"))
    bounded = made("clipped_ratio", ratio, saved=(ratio,))
    weighted = made("ratio_advantages", ratio), made("clipped_ratio_advantages", bounded)
    least = made("least_advantages", *weighted, saved=weighted)
    per_token = made("loss_of_tokens", least)
    del least
    masked = made("masked_loss", per_token)
    loss = r.empty((), "fp32", "loss")
    return loss.by(r.node((masked,), (), viewed(masked)))


def clipped_rows(r: Recorder, log_probabilities: Tensor, kept: int) -> Tensor:
    """RLOO's loss of the last ``kept`` tokens (``RLOOTrainer._compute_loss``): ratios are of the sums of rows."""
    like = (log_probabilities.shape[0], kept)
    view = Tensor(
        log_probabilities.storage,
        like,
        "fp32",
        r.node((log_probabilities,), (), fresh(log_probabilities, "grad_sliced")),
    )
    taken = r.empty(like, "fp32", "completion_log_probabilities").by(r.node((view,), (), viewed(view)))
    entropies = r.empty(like, "fp32", "completion_entropies")
    masked = r.empty(like, "fp32", "masked_log_probabilities").by(
        r.node((taken,), (), fresh(taken, "grad_log_probabilities"))
    )
    sums = r.empty(like[:1], "fp32", "log_probabilities_of_rows").by(r.node((masked,), (), viewed(masked)))
    del masked
    loss = r.empty((), "fp32", "loss").by(r.node((sums,), (), fresh(sums, "grad_rows")))
    del entropies, taken
    return loss
