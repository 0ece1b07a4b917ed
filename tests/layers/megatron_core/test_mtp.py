"""Multi-token prediction: hidden states mixed across depths beside PyTorch's own operators, and detached layers."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from unittest import mock
from warnings import catch_warnings, simplefilter

import pytest
import torch

from memplan.frameworks.megatron.from_plan import core_shape
from memplan.frameworks.megatron.modules import module_shapes, mtp_module, recomputed
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
from .test_overlapped_real import Storages

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
    plan = resolve(read_plan(None, given).plan)
    layer, end = module_shapes(core_shape(plan))
    return mtp_module(end, layer, True, Options(), recomputed="mtp" in recomputed(plan.recompute, ["mtp"]))


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


# -- recomputed -----------------------------------------------------------------------------------------


def kept_by_megatron(depths: int) -> int:
    """Bytes that the forward pass of Megatron-Core's own block leaves when each depth is recomputed, of layers that
    would keep activations."""
    with catch_warnings():
        simplefilter("ignore")
        real = pytest.importorskip("megatron.core.transformer.multi_token_prediction", exc_type=ImportError)
        random = pytest.importorskip("megatron.core.tensor_parallel.random", exc_type=ImportError)
    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    config = SimpleNamespace(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1, mtp_num_layers=depths,
        distribute_saved_activations=False, sequence_parallel=False, fp8=None, fp4=None, mtp_detach_heads=False,
        pipeline_model_parallel_size=1, mtp_hsm=False,
    )  # fmt: skip
    layers = [torch.nn.Module.__new__(real.MultiTokenPredictionLayer) for _ in range(depths)]
    weight = torch.randn(H, 2 * H, dtype=torch.bfloat16)
    for layer in layers:
        torch.nn.Module.__init__(layer)
        parts: dict[str, object] = {
            "config": config, "cp_group": one, "tp_group": one, "sequence_parallel": False, "mtp_layer_pattern": None,
            "enorm": Twice(), "hnorm": Twice(), "final_layernorm": Twice(),
            "eh_proj": lambda x: (torch.nn.functional.linear(x, weight), None),
        }  # fmt: skip
        parts |= dict.fromkeys(("mtp_model_layer", "transformer_layer"), _layer)  # as releases call it
        vars(layer).update(parts)
    block = torch.nn.Module.__new__(real.MultiTokenPredictionBlock)
    torch.nn.Module.__init__(block)
    vars(block).update(config=config, layers=layers, vp_stage=None, mtp_use_repeated_layer=False, tp_group=one)
    vars(block).update(sequence_parallel=False, cp_group=one)
    table = torch.randn(8, H, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.zeros((B, S), dtype=torch.int64)
    hidden = torch.randn((S, B, H), dtype=torch.bfloat16, requires_grad=True)
    with ExitStack() as patches:
        for name in ("_get_all_rng_states", "_set_all_rng_states"):
            patches.enter_context(mock.patch.object(random, name, return_value=()))
        patches.enter_context(mock.patch.object(random, "_fork_rng", side_effect=nullcontext))
        patches.enter_context(mock.patch.object(real, "gather_from_tensor_model_parallel_region", lambda x, **_: x))
        storages = patches.enter_context(Storages())
        out = block.forward(
            input_ids=tokens, position_ids=tokens, hidden_states=hidden, attention_mask=None,
            embedding=lambda input_ids, position_ids: torch.nn.functional.embedding(input_ids.T, table),
        )  # fmt: skip
        kept = storages.live()
        out.sum().backward()
        assert hidden.grad is not None
        assert table.grad is not None
    return kept


def _layer(hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
    return torch.nn.functional.gelu(hidden_states), None


class Twice(torch.nn.Module):
    """A norm that saves nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("depths", [1, 2, 3])
def test_a_recomputed_depth_keeps_embedding_and_hidden_state(depths: int) -> None:
    """Of each depth the tokens, and what has been looked up; of all but the last what they hand on; and hidden states
    of all, one behind the other. The first hidden state is the caller's."""
    expected = depths * B * S * 8 + (depths + (depths - 1) + (1 + depths)) * UNIT
    assert kept_by_megatron(depths) == expected
    again = module(mtp_layers=str(depths), mbs=str(B), seq=str(S), recompute="full")
    rows, h = S * B, 2048
    assert again.first.forward_fold.net == depths * rows * 8 + (3 * depths) * rows * h * 2
    plain = module(mtp_layers=str(depths), mbs=str(B), seq=str(S))
    assert [one.name for one in again.parameters] == [one.name for one in plain.parameters]
    left = [one.first.forward_fold.net + one.first.backward_fold.net for one in (again, plain)]
    assert left[0] == left[1]


def test_blocks_of_recomputed_layers_leave_further_ones_out() -> None:
    """Megatron-Core skips block recompute with a warning. A depth whose embedding is detached gives it no gradient."""
    plain, block = module(), module(recompute="full", recompute_method="block")
    assert block.first == plain.first
    detached = module(recompute="full", mtp_detach_heads="true")
    assert "grad_word_embeddings_weight" not in names(detached.first.backward)
    assert "grad_word_embeddings_weight" in names(module(recompute="full").first.backward)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"mtp_layers": "1", "mtp-hsm": "true"}, "fewer than two"),
        ({"cp": "2", "dp": "1", "ep": "1", "mtp-hsm": "true"}, "context parallelism"),
        ({"recompute": "full", "recompute-layers": "2"}, "recompute.layers = 2: must be 1 with multi-token prediction"),
        ({"recompute": "full", "megatron-fsdp": "optim_grads_params"}, "must not be full with multi-token prediction"),
    ],
)
def test_refused(flags: dict[str, str], said: str) -> None:
    given = {name.replace("_", "-"): value for name, value in (FLAGS | flags).items()}
    with pytest.raises(PlanError, match=said):
        programs(resolve(read_plan(None, given).plan), Options())


def test_distributed_inputs_of_recomputed_layers_are_refused() -> None:
    """What each depth has been given would be 1/t of it, in one dimension, when the states of all are joined."""
    flags = {"model": "llama-3-8b", "framework": "megatron", "layers": "2", "gpus": "2", "tp": "2", "mtp-layers": "1"}
    flags |= {"recompute": "full", "distribute-saved-activations": "true", "sequence-parallel": "false"}
    with pytest.raises(PlanError, match="whose inputs are distributed"):
        programs(resolve(read_plan(None, flags).plan), Options())
