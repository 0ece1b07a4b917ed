"""What a user is told about a plan that is valid and might still not be what was meant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..values import NamedTuple, pattern
from .environment import READ, is_followed, is_irrelevant
from .errors import Guesses, Node, nearest, one_line, shown
from .plan import DEFAULT_SEQ, Plan
from .releases import beyond_known

MOST_OF_A_CODE = 50
"""Notes of one kind that are told one by one."""

FRAMEWORK_CHOSEN = "framework-chosen"
"""Code of the note on a plan that names no framework."""
SEQ_DEFAULT, SEQ_BEYOND, VOCAB_UNUSED = "seq-default", "seq-beyond", "vocab-size-unused"
RELEASES_PINNED, RELEASE_ASSUMED, TEXT_PART = "releases-pinned", "release-assumed", "text-part"
PASSED_OVER, TORCH_BEYOND = "model-passed-over", "torch-beyond"
FIRST = (
    PASSED_OVER,
    TEXT_PART,
    FRAMEWORK_CHOSEN,
    SEQ_DEFAULT,
    SEQ_BEYOND,
    VOCAB_UNUSED,
    RELEASES_PINNED,
    RELEASE_ASSUMED,
    TORCH_BEYOND,
)
"""Codes of notes that decide the answer and may surprise: reports begin with them."""


class Note(NamedTuple):
    """A stable ``code`` for scripts, and a ``message`` that teaches."""

    code: str
    message: str


def says_choice(code: str) -> bool:
    """Whether a note with ``code`` says why the plan has its framework, which nobody named."""
    return code == FRAMEWORK_CHOSEN


def notes_of(plan: Plan) -> tuple[Note, ...]:
    """Notes on ``plan`` as it was read, before defaults are filled in."""
    beyond = beyond_known(plan.torch)
    of_torch = () if beyond is None else (Note(TORCH_BEYOND, one_line(beyond)),)
    return limited([*of_torch, *_environment(plan), *_sequence(plan)])


def passed_over(model: Node | None, by: object) -> tuple[Note, ...]:
    """What is told of the ``model`` of a source that says nothing else, with a flag that names another."""
    if model is None or by is None or model.value == by:
        return ()
    message = f"the model is {by}, as --model says; {model.value}, which says nothing but a model, is passed over"
    return (Note(PASSED_OVER, one_line(message)),)


def text_part(name: str, reads: str = "images") -> Note:
    """What is told of a model that ``reads`` more than text."""
    tower = "vision tower" if reads == "images" else "tower"
    message = f"{name} reads {reads}, too: only its text part is planned, without the {tower} and projector"
    return Note(TEXT_PART, one_line(message))


def further_layers(path: str, key: str, count: int) -> Note:
    """What is told of a configuration in ``path`` whose ``key`` says so many layers that predict further tokens."""
    message = f"{path} names layers that predict further tokens ({key} = {count}), left out as in transformers: "
    return Note(
        "further-layers", one_line(f"{message}--mtp-layers {count} adds them where Megatron-LM trains the model")
    )


_SMALL_HEADS = pattern(r"For(SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice)$")
"""Classes of transformers whose head gives a few numbers for a token or a sequence, where a language model's gives one
for each word of the vocabulary."""


def has_small_head(name: str) -> bool:
    return _SMALL_HEADS.search(name) is not None


def head_assumed(path: str, name: str) -> Note:
    """What is told of a configuration in ``path`` that was saved from a class ``name`` with another head."""
    message = f"{path} is a {shown(name)}: a language-model head and its loss are assumed in place of its own"
    if has_small_head(name):
        message += "; its own take less"
    return Note("head-assumed", one_line(message))


def limited(notes: Iterable[Note]) -> tuple[Note, ...]:
    """``notes``, of each code the first ones; the last says how many more there would be."""
    kept: list[Note] = []
    found: dict[str, int] = {}
    for note in notes:
        found[note.code] = found.get(note.code, 0) + 1
        if found[note.code] <= MOST_OF_A_CODE:
            kept.append(note)
    more = {code: count - MOST_OF_A_CODE for code, count in found.items() if count > MOST_OF_A_CODE}
    return (*kept, *(Note(code, f"and {count:,} more like the {MOST_OF_A_CODE} above") for code, count in more.items()))


def _environment(plan: Plan) -> Iterator[Note]:
    """Variables that change nothing in the estimate."""
    guesses = Guesses(lambda name: nearest(name, READ, cutoff=0.85))
    for name in plan.environment:
        if is_followed(name, plan) or is_irrelevant(name):
            continue
        guess = guesses.of(name)
        problem = f"is not read by memplan; did you mean {guess}?" if guess else "is not modelled"
        yield Note("environment-ignored", one_line(f"{shown(name)} {problem}"))


def _sequence(plan: Plan) -> Iterator[Note]:
    """A default that is shorter than the model's longest sequence, or a sequence that is longer than it. A table of
    positions that ends there is refused elsewhere; rotary ones go on."""
    longest, seq = plan.model.positions_max, plan.batch.seq
    if seq is not None and seq > longest:
        told = f"seq {seq} is beyond the {longest} tokens of {plan.model.name}'s positions"
        yield Note(
            SEQ_BEYOND,
            f"{told}: training runs and needs this memory, but the model may not learn well at those positions",
        )
    if plan.batch.seq is None and longest > DEFAULT_SEQ:
        yield Note(
            SEQ_DEFAULT, f"seq is {DEFAULT_SEQ}, because no length was given; the model's maximum is {longest} tokens"
        )
