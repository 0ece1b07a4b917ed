"""trl's trainers whose losses are of labels' log-probabilities, DPO's, KTO's, ORPO's, CPO's, GRPO's and RLOO's, and
RewardTrainer, of scores.

trl 1.15 and 1.16, ``trainer/dpo_trainer.py`` (``_compute_loss``): the policy runs on the chosen and the rejected
sequences of a batch together; then, without a graph and without recompute, the reference does, while the policy's
activations wait for backward. The reference is a second model, or the same one with its adapters off; of
log-probabilities that were computed before training there is none.

``trainer/grpo_trainer.py`` (``_compute_loss``): completions were generated and, for a KL term, scored by the reference
between steps; in a step the policy alone runs, and a reference that is a second model waits beside it, as does what
generation keeps of the GPU.

Before 1.15 both losses are taken of all logits (``layers.whole_logits``): those of DPOTrainer's reference stay until
metrics of the policy's have been computed, behind the loss.

``trainer/kto_trainer.py`` (``_compute_loss``, ``_compute_kl_logps``): sequences are no pairs. Before the policy's pass
it scores as many prompts with others' completions, without a graph, and so does the reference before its own.

``trainer/rloo_trainer.py``: as GRPO, but for a loss of whole completions.

``experimental/cpo/cpo_trainer.py`` and ``experimental/orpo/orpo_trainer.py`` (``concatenated_forward``): the policy
runs on both of each pair together, and its loss, of all logits, has no reference.

``trainer/reward_trainer.py`` (``compute_loss``): the model scores the chosen and the rejected sequences of a batch
together; there is no reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

from ...families import family
from ...layers.fused_losses import WHOLE_LOGITS, HeadLoss
from ...layers.module import Module, Parameter, hold_bytes
from ...layers.whole_logits import hidden_ended, hooked_behind_loss
from ...plan.plan import ResolvedPlan
from ...plan.releases import has_trl, release
from ...plan.resolve import LOSSES
from ...plan.spec import ModelSpec
from ...tape.events import INPUT, Category, Drop, Event, Hold, Scope, Tape, drops, rounded
from ...tape.program import Span
from ...values import replace
from .returned import CACHED, LAYER, NOTHING, UNTIL_LOGITS, Returned, before, ids
from .trainer import runs

LOSS = "loss"

DROPOUTS = ("embedding_dropout", "attention_dropout", "hidden_dropout")

MOST = 2
"""Layers of the reference that run here: the first, whose input the model's frame may keep, and one of all others,
which take the same one after the other."""


def check(plan: ResolvedPlan) -> None:
    """Refuses what is not modelled with a loss of log-probabilities or of scores."""
    if not plan.loop.own_loss:
        return
    model, loop = plan.model, plan.trainer.loop
    if plan.loop.loss_of == "labels":
        _check_labels(plan)
    if not model.labels and (not model.causal or model.mlm_head or model.head_bias):
        raise plan.wrong(
            "trainer.loop",
            f"must be none or transformers: {model.name} has no head for causal language modelling without a bias",
        )
    if model.experts:
        _check_experts(plan)
    if plan.lora.dora:
        raise plan.wrong("lora.dora", f"must be false with trainer.loop {loop}: both together are not modelled")
    if plan.trainer.kind.prepares:
        kind, prepared = plan.quantisation.kind, plan.quantisation.prepared
        problem = f"with trainer.loop {loop}, which prepares quantised models"
        if kind not in ("none", "nf4", "fp4"):
            raise plan.wrong("quantisation.kind", f"must be none, nf4 or fp4 {problem}: others are not modelled")
        if kind != "none" and not prepared:
            raise plan.wrong("quantisation.prepared", f"must be true {problem} (--kbit-preparation)")
    if plan.loss.kind != "plain":
        problem = f"must be plain with trainer.loop {loop}, which has a loss of its own"
        if LOSSES.get(plan.kernels.set) == plan.loss.kind:
            problem += f"; kernels {plan.kernels.set} brings {plan.loss.kind}: add --loss plain"
        raise plan.wrong("loss.kind", problem)
    plan.refuse(
        (
            "loss.logits_to_keep",
            plan.loss.logits_to_keep is not None,
            f"must be left out with trainer.loop {loop}, whose loss takes all tokens",
        ),
        (
            "trainer.evaluation_batches",
            plan.trainer.evaluation_batches is not None and plan.loop.loss_of != "labels",
            f"must be left out with trainer.loop {loop}, whose logits are not kept",
        ),
    )
    if not plan.trainer.kind.evaluates and (plan.trainer.evaluation_mbs or 0) > plan.batch.mbs:
        problem = f"must be at most batch.mbs, {plan.batch.mbs}, with trainer.loop {loop}: larger ones are not modelled"
        raise plan.wrong("trainer.evaluation_mbs", problem)


def _check_experts(plan: ResolvedPlan) -> None:
    """With a loss of all tokens experts run as in any other loop, unless trl adds the routers' auxiliary loss, which it
    does where the configuration has a coefficient (``SFTTrainer.__init__``, ``aux_loss_enabled``)."""
    if plan.trainer.kind.reduced != "tokens":
        raise plan.wrong("trainer.loop", "must be none, transformers or sft with experts: others are not modelled")
    if plan.model.router_aux_loss:
        problem = "must be none or transformers with experts, or run without the routers' auxiliary loss, which keeps "
        problem += "scores of all layers and is not modelled (router_aux_loss_coef 0: --router-aux-loss 0)"
        raise plan.wrong("trainer.loop", problem)


def _check_labels(plan: ResolvedPlan) -> None:
    """Refuses what is not modelled with a classifier, in the words of its field."""
    wrong = {
        "with experts: their loss is not modelled": plan.model.experts,
        "with DoRA: both together are not modelled": plan.lora.dora,
        f"with loss.kind {plan.loss.kind}, which is of words": plan.loss.kind != "plain",
        f"with code {plan.code}": plan.code != "current",
        "with loss.logits_to_keep: the head sees all tokens": plan.loss.logits_to_keep is not None,
    }
    for why, found in wrong.items():
        if found:
            raise plan.wrong("model.labels", f"must be left out {why}")


def without_dropout(spec: ModelSpec) -> ModelSpec:
    """``disable_dropout_in_model``, which turns off modules."""
    kept = family(spec.family).dropout_functions
    return spec.model_copy(update={name: 0.0 for name in DROPOUTS if name not in kept})


def batch(plan: ResolvedPlan, shape: tuple[int, ...]) -> list[Hold]:
    """What the collator makes beside token ids and labels."""
    made = [(name, shape) for name in plan.loop.masks or ("attention_mask",) * plan.batch.padding]
    if plan.loop.loss_of == "labels":
        made += [("labels", shape[:1]), *[("token_type_ids", shape)] * bool(plan.model.token_types)]
    return [Hold(0, hold_bytes(one, "int64"), Category.INPUTS, name, one, "int64") for name, one in made]


def beside(plan: ResolvedPlan, shape: tuple[int, int]) -> list[Hold]:
    """What is held besides, but for a second model."""
    at_once = plan.microbatches if plan.loop.own_loss else 1
    return [*batch(plan, shape) * at_once, *generation(plan)]


def loss_of_reference(loss: HeadLoss) -> HeadLoss:
    """The policy's without what is computed beside it."""
    return HeadLoss(kind=loss.kind, trl=loss.trl, logits_to_keep=loss.logits_to_keep, reduced=loss.reduced)


def layers_of_reference(plan: ResolvedPlan, loss: HeadLoss) -> int:
    """How many run here: all where each leaves something."""
    every = of_reference(plan, returned(plan, loss))
    return plan.model.layers if every else min(plan.model.layers, MOST)


def has_model(plan: ResolvedPlan) -> bool:
    """The reference is a model of its own."""
    return plan.trainer.has_reference and plan.lora.rank is None


def generation(plan: ResolvedPlan) -> list[Hold]:
    """What its engine holds while the model trains."""
    size = plan.trainer.generation_memory or 0
    return [Hold(0, rounded(size), Category.BUFFERS, "generation", (), "")] if size else []


def reference_parameters(parameters: Sequence[Parameter], buffers: Sequence[Hold], dtype: str) -> list[Hold]:
    """The second model, in the dtype of the first."""

    def held(one: Parameter) -> Hold:
        return Hold(0, one.bytes(dtype), Category.PARAMETERS, f"reference/{one.name}", one.shape, dtype)

    return [*map(held, parameters), *buffers]


def returning(head: Module, loss: HeadLoss) -> Module:
    """``head``, whose input ends where the model returns, if that is before its loss is there."""
    how = loss.of_pairs
    return _returning(head, how is not None and how.hidden_states) if loss.kind == WHOLE_LOGITS else head


def released(plan: ResolvedPlan) -> tuple[int, ...]:
    """The release of trl that a loss of whole logits is computed by, or that measures those of the model's own."""
    measures = has_trl(plan) and runs(plan) and not plan.loop.own_loss and plan.model.causal
    return release(plan, "trl") if measures or plan.loop.loss_of == WHOLE_LOGITS else ()


def returned(plan: ResolvedPlan, loss: HeadLoss) -> Returned:
    """What the policy returns beside its logits."""
    pairs, groups = loss.of_pairs, loss.of_groups
    trained = plan.recompute.mode == "none"
    if groups is not None:
        return Returned(cache=groups.cache, cache_of_training=groups.cache and trained, until=UNTIL_LOGITS)
    if pairs is None:
        return NOTHING
    return Returned(pairs.hidden_states, pairs.cache, pairs.cache and trained)


def of_reference(plan: ResolvedPlan, what: Returned) -> Returned:
    """What the reference does: a model of its own is evaluated, else it is the policy, in training."""
    return replace(what, cache=what.cache if has_model(plan) else what.cache_of_training)


@lru_cache(maxsize=64)
def _returning(head: Module, hidden_states: bool) -> Module:
    ended = partial(hidden_ended, behind=(LOSS,)) if hidden_states else hidden_ended
    return head.changed(ended, hooked_behind_loss)


def with_reference(
    spans: Sequence[Span], own: Sequence[Span], keeps_input: bool, what: Returned = NOTHING, passes: int = 1
) -> tuple[Span, ...]:
    """``spans``, of which the last is the head, with so many passes of the reference's modules ``own`` behind its
    loss."""
    *others, head = spans
    return (*others, Span(_behind(head.module, tuple(own), keeps_input, what, passes), head.names))


@lru_cache(maxsize=64)
def _behind(head: Module, own: tuple[Span, ...], keeps_input: bool, what: Returned, passes: int) -> Module:
    events = passed(own, head.largest_id + 1, keeps_input, what)
    return head.changed(lambda tape: _inserted(tape, events * passes))


def scored_before(spans: Sequence[Span], own: Sequence[Span], keeps_input: bool) -> tuple[Span, ...]:
    """``spans`` behind a pass of the policy's modules ``own`` without a graph."""
    first, *others = spans
    events = passed(own, first.module.largest_id + 1, keeps_input)
    return (replace(first, module=first.module.changed(lambda tape: (*events, *tape))), *others)


def _inserted(tape: Tape, events: Tape) -> Tape:
    """``events`` behind the loss of ``tape``, where its input has ended. If metrics follow, what the reference leaves
    in variables ends behind them."""
    at = 1 + max(place for place, event in enumerate(tape) if isinstance(event, Hold) and event.name == LOSS)
    ended = [one for one in tape[at:] if isinstance(one, Drop) and one.tensor == INPUT]
    rest = [one for one in tape[at:] if one not in ended]
    metrics = any(isinstance(one, Hold) and one.name != f"{LOSS}_scaled" for one in rest)
    left = len(events)
    while metrics and not isinstance(events[left - 1], Hold):
        left -= 1
    return (*tape[:at], *ended, *events[:left], *rest, *events[left:])


def passed(own: Sequence[Span], first: int, keeps_input: bool, what: Returned = NOTHING) -> Tape:
    """The evaluation of modules one after the other, as one tape that leaves nothing behind; ids begin at ``first``.
    What a module leaves besides its output ends with the model's frame, before the last module, the head; what
    it returns besides ends behind that."""
    result: list[Event] = []
    given: Hold | None = None
    frame: list[Hold] = []
    states: list[Hold] = []
    gathered: dict[int, int] = {}
    for place, span in enumerate(own):
        if place == len(own) - 1:
            result += [hold.end for hold in frame]
            frame = []
        for _ in span.names[:1]:
            events, left = _numbered(span.module.evaluation, first, given, gathered)
            first += span.module.largest_id + 1 + len(events)
            layer = span.names[0].startswith(LAYER)
            state = layer and what.hidden_states
            if (state or (keeps_input and place == 1)) and given is not None:
                events = [one for one in events if not (isinstance(one, Drop) and one.tensor == given.tensor)]
                (states if state else frame).append(given)
            if layer and what.cache:
                cached = ids(events, [f"reference/{name}" for name in CACHED])
                states += [one for one in events if isinstance(one, Hold) and one.tensor in cached]
                events = [one for one in events if not (isinstance(one, Drop) and one.tensor in cached)]
            if what.until is UNTIL_LOGITS and place == len(own) - 1:
                events = list(before(events, drops(states), [f"reference/{name}" for name in what.until]))
                states = []
            result += events
            outputs = left[-1:] if place else _hidden(left)
            frame += [hold for hold in left if hold not in outputs]
            given = outputs[0] if outputs else None
    result += [hold.end for hold in frame]
    if given is not None:
        result.append(given.end)
    return (*result, *drops(states))


def _hidden(left: Sequence[Hold]) -> list[Hold]:
    """The embedding's output of three dimensions that is largest; the rest are positions and tables."""
    return sorted(left, key=lambda hold: (len(hold.shape) == 3, hold.bytes))[-1:]


def _numbered(tape: Tape, first: int, given: Hold | None, gathered: dict[int, int]) -> tuple[list[Event], list[Hold]]:
    """The module's holds and drops with ids from ``first`` on, its input that of ``given``; and what it leaves. Hooks'
    own, which other modules may end, are ``gathered`` under new ids."""
    events: list[Event] = []
    left: dict[int, Hold] = {}
    beyond = first + max((event.tensor for event in tape if isinstance(event, Hold)), default=0)
    for event in tape:
        match event:
            case Hold() if event.tensor <= Scope.CALLER.id():
                beyond += 1
                gathered[event.tensor] = beyond
                events.append(event._replace(tensor=beyond, name=f"reference/{event.name}"))
            case Drop() if event.tensor in gathered:
                events.append(event._replace(tensor=gathered.pop(event.tensor)))
            case Hold():
                hold = event._replace(tensor=first + event.tensor, name=f"reference/{event.name}")
                left[hold.tensor] = hold
                events.append(hold)
            case Drop() if event.tensor == INPUT and given is not None:
                events.append(given.end)
            case Drop() if event.tensor > 0:
                events.append(event._replace(tensor=first + event.tensor))
                del left[first + event.tensor]
    return events, list(left.values())
