"""Ends of Megatron-Core's models by hand. Stories name a hold ``+name`` and a drop ``-name``, of 1 MiB and more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memplan.layers.autograd import Recorder, Tensor
from memplan.layers.megatron_core import bert, ends
from memplan.layers.megatron_core.shape import CoreShape
from memplan.layers.module import SHARED, Interface, Module, Options, Run, build
from memplan.plan.spec import ModelSpec
from memplan.tape.events import GRAD_OUTPUT, INPUT, Category, Drop, Hold, Seam, Tape, compose

MIB = 2**20
SPEC = ModelSpec(
    name="ci",
    family="gpt",
    layers=12,
    hidden=512,
    heads=8,
    kv_heads=8,
    head_dim=64,
    ffn=2048,
    vocab=50257,
    positions_max=1024,
    norm="layernorm",
    positions="learned",
    activation="gelu",
    embedding_dropout=0.1,
    attention_dropout=0.1,
    hidden_dropout=0.1,
)
CI = CoreShape(SPEC, 4, 1024, 1, "bf16", 50304, deterministic=True, gradient_fusion=False)
"""Most GPT rows of Megatron-LM's own functional tests."""

OPTIONS = Options(consumes_gradients=True)
FP32 = 4 * 4096 * 50304
"""Bytes of the fp32 logits: 786 MiB."""


def head(shape: CoreShape, *, tied_here: bool = False, options: Options = OPTIONS) -> Module:
    def recipe(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(None, loss=ends.gpt_head(r, x, shape, tied_here=tied_here))

    return build("head", recipe, Interface(shape.hidden, shape.dtype), options)


def embedding(shape: CoreShape, *, tied_here: bool = False, options: Options = OPTIONS) -> Module:
    def recipe(r: Recorder, x: Tensor | None) -> Run:
        return Run(ends.gpt_embedding(r, shape, tied_here=tied_here))

    present = frozenset({ends.WORD}) if tied_here else frozenset()
    return build("embedding", recipe, Interface(None, shape.dtype), options, present)


def story(module: Module, least: int = MIB) -> tuple[list[str], list[str]]:
    """Forward and backward of tensors of ``least`` bytes and more."""
    first = module.first
    names = {INPUT: "input", GRAD_OUTPUT: "grad_output", ends.TIED_GRADIENT: "grad_head_weight"}
    names |= {event.tensor: event.name for event in first.forward + first.backward if isinstance(event, Hold)}

    def told(tape: Tape) -> list[str]:
        events = [event for event in tape if not isinstance(event, Seam) and event.bytes >= least]
        return ["+-"[isinstance(event, Drop)] + names[event.tensor] for event in events]

    return told(first.forward), told(first.backward)


# -- head --------------------------------------------------------------------------------------------


def test_peak_of_the_unfused_loss() -> None:
    """16-bit and fp32 logits side by side, forward and backward: 1,179 MiB at CI's size."""
    made = head(CI)
    forward, backward = story(made)
    assert forward == ["+logits", "+logits_fp32", "-logits"]
    assert backward == [
        "+grad_logits",
        "-logits_fp32",
        "+grad_head_input",
        "+grad_head_weight",
        "-grad_logits",
        "-input",
        "-grad_head_weight",
    ]
    small = 160 * 1024  # tensors of (b, s) elements
    assert made.first.forward_fold.peak == pytest.approx(1.5 * FP32, abs=small)
    assert made.first.backward_fold.peak == pytest.approx(0.5 * FP32, abs=small)
    assert made.first.forward_fold.peak_by[Category.LOGITS] == FP32 * 1.5


def test_peak_of_the_native_loss() -> None:
    """Backward copies the softmax: two fp32 logits and the bf16 gradient."""
    made = head(replace(CI, cross_entropy="native"))
    assert story(made)[1][:4] == ["+softmax_copied", "+grad_logits", "-softmax_copied", "-logits_fp32"]
    held = made.first.forward_fold.net_by[Category.LOGITS]
    assert held == FP32
    assert held + made.first.backward_fold.peak_by[Category.LOGITS] == 2.5 * FP32


def test_native_gradient_is_bf16_whatever_the_logits() -> None:
    _, backward = story(head(replace(CI, cross_entropy="native", dtype="fp16")))
    assert backward[:3] == ["+softmax_copied", "+grad_logits_bf16", "-softmax_copied"]
    assert backward[3:5] == ["+grad_logits", "-grad_logits_bf16"]


def test_fused_accumulation_makes_no_weight_gradient() -> None:
    _, backward = story(head(replace(CI, gradient_fusion=True)))
    assert backward == ["+grad_logits", "-logits_fp32", "+grad_head_input", "-grad_logits", "-input"]


def test_bias_of_the_head_is_added_out_of_place() -> None:
    """BERT's logits exist twice in 16-bit, before their fp32 copy."""
    spec = SPEC.model_copy(update={"family": "bert", "mlm_head": True, "token_types": 2})

    def recipe(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(None, loss=bert.bert_head(r, x, replace(CI, spec=spec)))

    forward, _ = story(build("head", recipe, Interface(CI.hidden, "bf16"), OPTIONS), 64 * MIB)
    assert forward == ["+logits", "+logits_biased", "-logits", "+logits_fp32", "-logits_biased"]


# -- embedding ---------------------------------------------------------------------------------------


def test_tied_gradient_waits_for_the_embedding() -> None:
    """Autograd adds both gradients of the word table before the hook sees them, so the head's lives
    through the backward of all layers."""
    last, first = head(CI, tied_here=True), embedding(CI, tied_here=True)
    table = 2 * 50304 * 512
    assert last.first.backward_fold.net_by[Category.GRADIENTS] == table
    assert story(last)[1][3:] == ["+grad_head_weight", "-grad_logits", "-input"]
    backward = story(first, 4 * MIB)[1]
    assert backward == [
        "+grad_embedding_dropout",
        "-grad_output",
        "+grad_word_embeddings_weight",
        "-grad_head_weight",
        "-grad_embedding_dropout",
        "-grad_word_embeddings_weight",
    ]
    assert not any(event.tensor == ends.TIED_GRADIENT for event in first.evaluation if not isinstance(event, Seam))


@pytest.mark.parametrize("changes", [{}, {"t": 2}, {"t": 2, "sequence_parallel": True}, {"gradient_fusion": True}])
@pytest.mark.parametrize("tied", [False, True])
def test_a_micro_batch_leaves_nothing(changes: dict[str, Any], tied: bool) -> None:
    """Embedding, head and batch of one stage: what forward holds, backward drops."""
    shape = replace(CI, **changes)
    first, last = embedding(shape, tied_here=tied), head(shape, tied_here=tied)
    batch = ends.batch(shape, "only")
    saved = first.saved_shared | last.saved_shared
    begins, stops = ends.batch_released(batch, saved), ends.batch_ends(batch, saved)
    modules = (begins, batch, first, last, stops)
    for role in ("first", "steady"):
        tapes = [getattr(module, role) for module in modules]
        whole = compose([*(t.forward_fold for t in tapes), *(t.backward_fold for t in reversed(tapes))])
        assert not any(whole.net_by), (role, whole.net_by)


def test_rows_of_one_token_are_summed_in_fp32() -> None:
    """``F.embedding``'s gradient outside deterministic mode: a tenth more than one fp32 row a token, at most."""
    shape = replace(CI, deterministic=False)
    _, backward = story(embedding(shape, options=replace(OPTIONS, kernel_workspaces=True)), 8 * MIB)
    assert "+grad_weight_per_segment" in backward
    segments = next(e for e in embedding_tape(shape) if isinstance(e, Hold) and e.name == "grad_weight_per_segment")
    assert segments.shape == (1024 + 409, 512)  # of the positions, the first to run


def embedding_tape(shape: CoreShape) -> Tape:
    return embedding(shape, options=replace(OPTIONS, kernel_workspaces=True)).first.backward


# -- a micro-batch -----------------------------------------------------------------------------------

KEPT = {
    "only": {"attention_mask", "labels", "loss_mask", "position_ids", "tokens"},
    "first": {"attention_mask", "position_ids", "tokens"},
    "middle": set(),
    "last": {"attention_mask", "labels", "loss_mask"},
}


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("role", ["only", "first", "middle", "last"])
def test_inputs_of_a_stage(role: ends.Role, cp: int) -> None:
    shape = replace(CI, cp=cp, s=1024 // cp)
    batch = ends.batch(shape, role)
    assert {hold.name for hold in batch.shares} == KEPT[role]
    assert all(hold.tensor <= SHARED for hold in batch.shares)
    assert batch.steady.forward_fold.net == sum(hold.bytes for hold in batch.shares)
    for hold in batch.shares:
        cut = (4, 1, 1024 // cp, 1024) if hold.name == "attention_mask" else (4, 1024 // cp)
        assert hold.shape == cut
    ended = ends.batch_ends(batch, frozenset({ends.TOKENS, ends.LOSS_MASK}))
    released = ends.batch_released(batch, frozenset({ends.TOKENS, ends.LOSS_MASK}))
    left = batch.steady.forward_fold.net + ended.steady.forward_fold.net
    assert left == -released.steady.backward_fold.net


def test_inputs_without_a_mask() -> None:
    """``--no-create-attention-mask-in-dataloader``."""
    names = {hold.name for hold in ends.batch(replace(CI, attention_mask=False), "only").shares}
    assert names == KEPT["only"] - {"attention_mask"}


def test_rotary_table() -> None:
    assert [hold.shape for hold in ends.rotary_table(CI)] == [(32,), (1024, 1, 1, 64)]
    half = replace(CI, spec=CI.spec.model_copy(update={"rotary_fraction": 0.5}))
    assert [hold.shape for hold in ends.rotary_table(half)] == [(16,), (1024, 1, 1, 32)]
