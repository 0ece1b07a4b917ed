"""Embedding and head as units of their own, as Accelerate shards a model of transformers since 1.14.

accelerate 1.15, ``utils/fsdp_utils.py`` (``fsdp2_prepare_model``, ``_find_final_norm``); torch 2.13,
``_fully_shard/_fsdp_state.py``. Behind the layers and before the model it calls ``fully_shard`` on

* the input embedding (``get_input_embeddings``), resharded as the layers are;
* final norm and output embedding together, which stay gathered from forward to backward; with tied embeddings the
  input embedding is among them, so that they are gathered before the first layer and end with the last gradient.

The model's own unit has what is left, position embeddings of GPT-2 for example, and stays gathered: Accelerate hands it
no ``reshard_after_forward`` any more, and of a root PyTorch's default is to keep it (``_lazy_init``).

The final norm is looked for among the children of ``getattr(model, base_model_prefix)``. OPT's is one level further
down, and peft's wrapper, asked for ``model``, hands out the model with its head, whose children are no norms: there
the root has the norm. A classifier has no output embedding: its norm is a unit, and the root has the scores.

A loss within the model's forward runs behind the head, whose hooks are at the logits: what backward gathers ahead, the
last layer, is gathered when the gradient of the logits has come. A loss that takes the head's weight without running
the head leaves its unit incomplete; the root's end completes it (``_force_complete_incomplete_states``), and backward
gathers ahead at once. Where the head is a unit without the norm, nobody gathers it then (``gathers_itself``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ...families import family
from ...layers.autograd import ITEMSIZE
from ...layers.fused_losses import LOG_PROBABILITIES
from ...layers.log_probabilities import VOCABULARY
from ...plan.resolved import ResolvedPlan
from ...tape.events import Drop, Hold, Hook, Seam, Tape, ahead, behind, drops, rounded
from ...tape.program import Span
from ...values import replace
from ..plain import programs as plain
from .chunked import ENDS
from .hooks import GATHERED
from .passing import OWN
from .units import Unit

WORD, NORM, HEAD = "word", "final_norm", "head"
"""Modules as recipes call them."""

LOOKUP, SCALED = "word_embeddings", "embedding_scaled"
OF_LOOKUP = ("grad_word_embeddings_weight",)
OF_SCALED = ("grad_embedding_scaled_self",)
OF_HEAD = ("grad_logits_weight", "grad_logits_input", "grad_logits_bias")
"""What the backward of embedding and head makes first."""


def with_seams(plan: ResolvedPlan, spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """``spans`` of a model, with seams where the forward of its embedding ends, before positions and masks are made,
    and where its backward and that of the head begin."""
    scales = plan.model.embedding_scale and family(plan.model.family).scale_in_embedding
    first, *others, last = spans
    table = first.module.changed(
        partial(_behind, SCALED if scales else LOOKUP), partial(_of_table, OF_SCALED if scales else OF_LOOKUP)
    )
    head = last.module.changed(backward=partial(_before, OF_HEAD))
    return (replace(first, module=table), *others, replace(last, module=head))


def _behind(name: str, tape: Tape) -> Tape:
    """``tape`` with a seam behind what is called ``name`` and the ends of what made it."""
    at = 1 + next(at for at, one in enumerate(tape) if isinstance(one, Hold) and one.name == name)
    while isinstance(tape[at], Drop):
        at += 1
    return (*tape[:at], Seam(OWN, Hook.AFTER_FORWARD), *tape[at:])


def _before(names: tuple[str, ...], tape: Tape) -> Tape:
    at = next((at for at, one in enumerate(tape) if isinstance(one, Hold) and one.name in names), None)
    return tape if at is None else (*tape[:at], Seam(OWN, Hook.BEFORE_BACKWARD), *tape[at:])


def _of_table(names: tuple[str, ...], tape: Tape) -> Tape:
    """The same of a table. What is looked up in a frozen one may be a leaf, which ends with its gradient, behind all
    else (``enable_input_require_grads``)."""
    seamed = _before(names, tape)
    drops = [at for at, one in enumerate(tape) if isinstance(one, Drop)]
    if seamed is not tape or not drops:
        return seamed
    at = drops[-2]
    return (*tape[:at], Seam(OWN, Hook.BEFORE_BACKWARD), *tape[at:])


def units(
    plan: ResolvedPlan, spans: Sequence[Span], made: Sequence[Unit], *, reshard: bool, among: int | None
) -> list[Unit]:
    """The units of layers and model, ``made``, with those of the ends, in the order of ``named_modules()``. ``spans``
    have seams (``with_seams``)."""
    root, *layers = made
    places = {name: at for at, name in enumerate(name for span in spans for name in span.names)}
    edges = {one.name.partition(".")[0] for span in spans if not _is_layer(span) for one in span.module.parameters}
    tied = plan.model.tied_embeddings and not plan.model.labels
    norm, head = ((NORM,) if finds_norm(plan) else ()), () if plan.model.labels else (HEAD,)
    last = places[(*norm, *head)[-1]] if norm or head else 0
    narrow = any(isinstance(one, Seam) and one.name == OWN for one in spans[-1].module.first.backward)
    narrow = narrow and last == places.get(HEAD)
    if tied:
        first, own = [Unit(ENDS, (), 0, last, False, False, only=(*norm, WORD, HEAD), narrow=narrow)], []
    else:
        first = [Unit("embedding", (), 0, 0, reshard, False, only=(WORD,), narrow=True, among=among)]
        begins = places[(*norm, *head)[0]] if norm or head else 0
        own = [Unit(ENDS, (), begins, last, False, only=(*norm, *head), narrow=narrow)] if norm or head else []
    rest = edges - {name for one in (*first, *own) for name in one.only}
    return [*([root] if rest else []), *first, *layers, *own]


def gathers_itself(plan: ResolvedPlan, made: Sequence[Unit]) -> bool:
    """Whether the loss itself gathers the head's weight, a unit that no hook gathers, for the head does not run: trl's
    tiles do (1.16, ``trainer/utils.py``, ``add_fused_lm_head``: ``weight.full_tensor()``)."""
    alone = next((one for one in made if one.only == (HEAD,)), None)
    kind = plain.head_loss(plan).kind
    if alone is None or kind not in UNRUN:
        return False
    if kind != LOG_PROBABILITIES or plan.lora.rank is None or "head" in (plan.lora.modules_to_save or ()):
        raise plan.wrong(
            "fsdp.ends_apart",
            "must be false with a loss that takes the head's weight: the head is a unit without the norm here, and "
            "stays in shards where it does not run (--versions accelerate=1.13 has it in the model's own unit)",
        )
    return True


UNRUN = (LOG_PROBABILITIES, "liger", "cut")
"""Losses that take the head's weight and do not run the head."""


GATHERED_HEAD = "head.weight/gathered"


def holds_gathered_head(spans: Sequence[Span]) -> bool:
    return any(isinstance(one, Hold) and one.name == GATHERED_HEAD for one in spans[-1].module.first.forward)


def with_gathered_head(plan: ResolvedPlan, spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """``spans`` whose head's weight is whole, in the dtype of its shards, from forward to the end of the head's own
    backward, for which it is saved. In another dtype than that of compute, a tile of it is cast at a time; backward
    has the tile before it in a variable still (``kernels``, ``ChunkedLogProbFunction``). That these are counted for
    all of the head's pass puts more beside what is made before and behind tiles."""
    *others, last = spans
    weight = next(one for one in last.module.parameters if one.name == "head.weight")
    compute, dtype, id = plan.precision.dtype, plan.fsdp.parameters, last.module.largest_id + 1
    rows, columns = weight.shape
    hold = Hold(id, rounded(weight.bytes(dtype)), GATHERED, GATHERED_HEAD, weight.shape, dtype)

    def tiles(count: int) -> list[Hold]:
        own = (min(rows, count * VOCABULARY), columns)
        return [] if dtype == compute else [cast_tiles(id + count, own, compute)]

    one, two = tiles(1), tiles(2)
    head = last.module.changed(
        lambda tape: behind(ahead(tape, (hold, *one)), drops(one)),
        lambda tape: behind(ahead(tape, tuple(two)), (*drops(two), hold.end)),
    )
    return (*others, replace(last, module=replace(head, evaluation=behind(head.evaluation, (hold.end,)))))


def cast_tiles(id: int, shape: tuple[int, int], dtype: str) -> Hold:
    size = rounded(shape[0] * shape[1] * ITEMSIZE[dtype])
    return Hold(id, size, GATHERED, "head.weight/tile", shape, dtype)


def finds_norm(plan: ResolvedPlan) -> bool:
    """Whether ``_find_final_norm`` finds one."""
    known = family(plan.model.family)
    assert known.modules is not None
    base, *inside = known.modules.norm[0].split(".")
    return len(inside) == 1 and not known.no_base and not (plan.lora.rank is not None and base == "model")


def _is_layer(span: Span) -> bool:
    return span.names[0].startswith("layer.")
