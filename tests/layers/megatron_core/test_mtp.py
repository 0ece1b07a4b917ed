"""Multi-token prediction: hidden states mixed across depths beside PyTorch's own operators, and detached layers."""

from __future__ import annotations

import pytest
import torch

from memplan.frameworks.megatron.from_plan import core_shape
from memplan.frameworks.megatron.modules import module_shapes, mtp_module
from memplan.frameworks.megatron.programs import programs
from memplan.layers import ops
from memplan.layers.autograd import Recorder, Tensor, incoming
from memplan.layers.megatron_core.mtp import History
from memplan.layers.module import Interface, Module, Options, Run, Tapes, build
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Hold, Tape

from ...oracle.tracer import Change, Follow, Trace, run

S, B, H = 256, 2, 64
UNIT = S * B * H * 2


def chosen(older: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
    """Of each token one of the states: the newest where an older one has ended."""
    count, (s, b, h) = older.size(0), newest.shape
    drawn = torch.randint(count + 1, (1, s, b, 1))
    is_newest, index = drawn.eq(count), drawn.clamp_max(count - 1)
    ended = torch.gather(older.eq(0).all(dim=-1, keepdim=True), 0, index)
    use = is_newest | ended
    gathered = torch.gather(older, 0, index.expand(-1, -1, -1, h))
    return torch.where(use.expand_as(gathered), newest.unsqueeze(0), gathered).squeeze(0)


def mixing(hidden: torch.Tensor, depths: int) -> torch.Tensor:
    """A layer of each depth multiplies by 1."""
    history, states, made = [hidden], [hidden], hidden
    for _ in range(depths):
        if len(history) > 1:
            *older, newest = history
            count, (s, b, h) = len(older), newest.shape
            stacked = torch.stack(older)
            flat = stacked.permute(0, 2, 3, 1).reshape(count * b, h, s)
            moved = torch.roll(flat, -1, -1)
            moved.select(-1, -1).fill_(0)
            back = moved.reshape(count, b, h, s).permute(0, 3, 1, 2)
            mixture = chosen(back, newest)
            history = [*back.unbind(0), newest]
        else:
            mixture = made
        made = mixture * 1
        history.append(made)
        states.append(made)
    return torch.cat(states)


def recipe(depths: int) -> Tapes:
    def mixed(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        states = [x]
        history = History([x])
        for _ in range(depths):
            below = history.mixed(r, 1)
            made = ops.scale(r, below, "layer")
            states.append(made)
            history.states.append(made)
            del made
        shapes = [one.shape for one in states]
        out = r.empty((S * len(states), B, H), "bf16", "joined")
        node = r.node(states, (), lambda r, gradients: [incoming(gradients).view(*one) for one in shapes])
        return Run(out.by(node))

    return build("mtp", mixed, Interface((S, B, H), "bf16"), Options(accumulates_in_place=False)).first


def large(changes: list[Change]) -> list[tuple[int, int]]:
    return [(change.sign, change.bytes) for change in changes if change.bytes >= UNIT // 2]


@pytest.mark.parametrize("depths", [2, 3])
def test_states_mixed_across_depths(depths: int) -> None:
    """Tensors of at least half a hidden state, in the order in which they begin, and how many are held at most."""
    forward: list[Change] = []

    def body(trace: Trace, follow: Follow) -> None:
        hidden = torch.empty((S, B, H), dtype=torch.bfloat16, requires_grad=True)
        given = hidden.view_as(hidden)
        trace.changes = []
        out = mixing(given, depths)
        forward.extend(trace.changes)
        gradient = torch.empty_like(out)
        trace.changes = []
        torch.autograd.backward([out], [gradient])

    backward = run(body).changes
    tapes = recipe(depths)
    assert begun(tapes.forward) == [size for sign, size in large(forward) if sign > 0]
    assert most(tapes.forward) == highest(forward)
    expected = [size for sign, size in large(backward) if sign > 0]
    assert sorted(begun(tapes.backward)) == sorted(expected)
    assert abs(most(tapes.backward) - highest(backward)) <= 2 * 512


def begun(tape: Tape) -> list[int]:
    return [event.bytes for event in tape if isinstance(event, Hold) and event.bytes >= UNIT // 2]


def most(tape: Tape) -> int:
    return largest([event.bytes if isinstance(event, Hold) else -event.bytes for event in tape])


def highest(changes: list[Change]) -> int:
    return largest([change.sign * change.bytes for change in changes])


def largest(steps: list[int]) -> int:
    held = top = 0
    for step in steps:
        held += step
        top = max(top, held)
    return top


# -- detached -------------------------------------------------------------------------------------------

FLAGS = {
    "model": "deepseek-v2-lite", "framework": "megatron", "layers": "2", "dense_layers": "0", "experts": "4",
    "expert_top_k": "2", "mtp_layers": "2", "seq": "256", "gbs": "8", "dp": "2", "ep": "2", "gpu": "h100-80gb",
    "tied_embeddings": "false",
}  # fmt: skip


def module(**flags: str) -> Module:
    given = {name.replace("_", "-"): value for name, value in (FLAGS | flags).items()}
    layer, end = module_shapes(core_shape(resolve(read_plan(None, given).plan)))
    return mtp_module(end, layer, True, Options())


def names(tape: Tape) -> list[str]:
    return [event.name for event in tape if isinstance(event, Hold)]


def test_detached_layers_train_neither_model_nor_embedding() -> None:
    """Nothing is looked up in backward, and the model's hidden state gets the gradient of its own copy alone."""
    given, without = module(mtp_detach_heads="true"), module()
    assert "grad_word_embeddings_weight" in names(without.first.backward)
    assert "grad_word_embeddings_weight" not in names(given.first.backward)
    assert names(given.first.forward) == names(without.first.forward)
    assert [one.name for one in given.parameters] == [one.name for one in without.parameters]


def test_detached_hidden_state_stays_until_the_next_forward() -> None:
    flags = {name.replace("_", "-"): value for name, value in FLAGS.items()}
    orders = [
        programs(resolve(read_plan(None, flags | more).plan), Options())[-1].order
        for more in ({"mtp-detach-heads": "true"}, {})
    ]
    assert [one.detached for one in orders] == [2 * 2 * 256 * 2048, 0]  # type: ignore[attr-defined]


def test_a_detached_head_saves_no_input() -> None:
    flags = {name.replace("_", "-"): value for name, value in FLAGS.items()}
    made = []
    for more in ({"mtp-detach-heads": "true"}, {}):
        (program,) = programs(resolve(read_plan(None, flags | more).plan), Options())
        (head,) = (span.module for span in program.order.chunks[0].spans if span.names == ("head",))  # type: ignore[attr-defined]
        made.append(names(head.first.backward))
    assert made[0].count("logits") == made[1].count("logits")
    assert made[0].count("grad_head_input") == made[1].count("grad_head_input") == 3


@pytest.mark.parametrize(
    ("flags", "said"),
    [({"mtp_layers": "1"}, "fewer than two"), ({"cp": "2", "dp": "1", "ep": "1"}, "context parallelism")],
)
def test_refused(flags: dict[str, str], said: str) -> None:
    given = {name.replace("_", "-"): value for name, value in (FLAGS | flags | {"mtp-hsm": "true"}).items()}
    with pytest.raises(PlanError, match=said):
        programs(resolve(read_plan(None, given).plan), Options())
