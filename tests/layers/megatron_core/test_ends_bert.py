"""Recipes of BERT's ends against Megatron-Core itself, event by event, on fake tensors (see ``test_ends_real``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from warnings import catch_warnings, simplefilter

import pytest
import torch

from memplan.layers.autograd import Recorder, Tensor
from memplan.layers.megatron_core import bert
from memplan.layers.megatron_core.ends import output_layer
from memplan.layers.megatron_core.shape import CoreShape
from memplan.layers.module import Interface, Run, build
from memplan.tape.events import Hold

from ...oracle import tracer
from .test_ends_real import (
    OPTIONS,
    ROWS,
    TORCH,
    VOCAB,
    H,
    Step,
    agree,
    both,
    built_in,
    config,
    consume,
    language_model,
    shape,
    static_buffer,
    step,
    told,
    traced,
)

with catch_warnings():
    simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.models.bert.bert_lm_head import BertLMHead
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.bert.pooler import Pooler
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.transformer.utils import get_linear_layer

pytestmark = pytest.mark.filterwarnings("ignore")


def bert_shape(t: int = 1, b: int = 3, s: int = 16, **changes: Any) -> CoreShape:
    return shape(t, b, s, **{"family": "bert", "causal": False, "mlm_head": True, "token_types": 2, **changes})


def losses(output: Any, mask: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """What ``loss_func`` and ``forward_step_calc_loss`` compute."""
    per_token, logits = output
    words = torch.sum(per_token.float().view(-1) * mask.reshape(-1)) / mask.sum()
    if logits is None:
        joined = torch.cat([words.clone().detach().view(1)])
        loss = words
    else:
        orders = torch.nn.functional.cross_entropy(logits.view(-1, 2).float(), order.view(-1), ignore_index=-1)
        loss = words + orders
        joined = torch.cat([one.clone().detach().view(1) for one in (words, orders)])
    averaged = joined / 4
    del averaged
    return loss


def bert_model(like: CoreShape) -> Any:
    model = language_model(like, bias=True)
    of = config(like)
    binary = like.spec.token_types > 0
    with built_in(like.dtype):
        model.lm_head = BertLMHead(H, replace(of, sequence_parallel=False))
        model.pooler = Pooler(H, torch.nn.init.zeros_, of, like.sequence_parallel) if binary else None
        model.binary_head = get_linear_layer(H, 2, torch.nn.init.zeros_, False) if binary else None
    for part in (model.lm_head, model.pooler, model.binary_head):
        if part is not None:
            consume(part)
    model.add_binary_head = binary
    model.return_embeddings = False
    model.position_embedding_type = "learned_absolute"
    model.bert_extended_attention_mask = lambda padding: padding
    model.bert_position_ids = lambda tokens: tokens
    return model


def real(like: CoreShape, first: bool, monkeypatch: pytest.MonkeyPatch) -> Step:
    """Embedding (on a first stage) and heads, without layers between."""

    def body(trace: tracer.Trace, mark: Callable[[], None]) -> None:
        monkeypatch.setattr(parallel_state, "is_pipeline_first_stage", lambda *_, **__: first)
        model = bert_model(like)
        model.pre_process = first
        b, s = like.b, like.s
        flat = torch.zeros(bert.batch_shape(like), dtype=torch.int64)
        tokens = types = labels = padding = flat[: b * s].view(b, s)
        mask = torch.zeros((b, s), dtype=torch.float32)
        if first:
            with built_in(like.dtype):
                model.embedding = LanguageModelEmbedding(
                    config(like), VOCAB, ROWS, num_tokentypes=like.spec.token_types
                )
            consume(model.embedding)
            model.encoder = lambda hidden_states, **_: hidden_states
        else:
            hidden = torch.zeros(like.hidden, dtype=TORCH[like.dtype], requires_grad=True)
            model.encoder = lambda **_: hidden
        with static_buffer(like):
            mark()
            output = BertModel.forward(
                model, tokens, padding, tokentype_ids=types if like.spec.token_types else None, lm_labels=labels
            )
            loss = losses(output, mask, flat[:b])
            loss *= 1
            loss /= 8
            del output
            mark()
            loss.backward()
            del loss
            mark()

    return traced(body, like.t)


def head(r: Recorder, x: Tensor | None, like: CoreShape) -> Run:
    assert x is not None
    return Run(None, loss=bert.bert_head(r, x, like))


CASES = [(1, False), (2, False), (2, True)]


@pytest.mark.parametrize("token_types", [0, 2])
@pytest.mark.parametrize(("t", "sequence_parallel"), CASES)
def test_last_stage(t: int, sequence_parallel: bool, token_types: int, monkeypatch: pytest.MonkeyPatch) -> None:
    like = bert_shape(t, sequence_parallel=sequence_parallel, token_types=token_types)
    found = build("head", lambda r, x: head(r, x, like), Interface(like.hidden, like.dtype), OPTIONS)
    agree(real(like, False, monkeypatch), step(found))


@pytest.mark.parametrize("token_types", [0, 2])
@pytest.mark.parametrize(("t", "sequence_parallel"), CASES)
def test_only_stage(t: int, sequence_parallel: bool, token_types: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Untied."""
    like = bert_shape(t, sequence_parallel=sequence_parallel, token_types=token_types)
    ending = replace(OPTIONS, drops_gradient=True)
    first = build("embedding", lambda r, x: Run(bert.bert_embedding(r, like)), Interface(None, like.dtype), ending)
    last = build("head", lambda r, x: head(r, x, like), Interface(like.hidden, like.dtype), OPTIONS)
    forward, backward = real(like, True, monkeypatch)
    assert backward.pop() == (-1, 512)  # the loss
    agree((forward, backward), both(first, last))


@pytest.mark.parametrize("attention", ["local", "unfused"])
def test_attention_mask(attention: Any) -> None:
    """(b, 1, s, s) from products of int64 for Megatron's own attention, (b, 1, 1, s) for Transformer Engine's."""
    like = bert_shape(attention=attention)
    made = bert.batch(like, first=True)

    def body(trace: tracer.Trace, mark: Callable[[], None]) -> None:
        model: Any = SimpleNamespace(attn_mask_dimensions="b1ss" if attention == "local" else "b11s")
        padding = torch.zeros((like.b, like.s), dtype=torch.int64)
        mark()
        extended = BertModel.bert_extended_attention_mask(model, padding)
        positions = BertModel.bert_position_ids(model, padding)
        mark()
        assert extended.shape == bert.attention_mask_shape(like)
        del extended, positions
        mark()

    forward, _ = traced(body, 1)
    assert told(made.steady.forward)[2:] == forward


def test_the_sum_of_the_heads_bias_is_the_peak_of_bert() -> None:
    """``grad_output.sum(dim=0)`` of 2,048 tokens and 15,360 words on an H100: 120 blocks across, of 4 x 32 threads with
    4 words each, by 18, which is 132 x 2,048 threads / (128 x 120) rounded up; each has 128 x 4 sums of 4 bytes, and
    Megatron-LM's functional tests of BERT have their peak there."""
    spec = {"hidden": 1024, "heads": 16, "kv_heads": 16, "head_dim": 64}
    given = bert_shape(2, 4, 512, **spec)
    given = replace(given, vocab=2 * 15_360, gradient_fusion=False)
    options = replace(OPTIONS, kernel_workspaces=True, threads=132 * 2048)

    def head(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(output_layer(r, x, given, bias=True))

    tapes = build("output_layer", head, Interface(given.hidden, "bf16"), options).first
    (sums,) = [event.bytes for event in tapes.backward if isinstance(event, Hold) and event.name == "partial_sums"]
    assert sums == 4 * 15_360 * 18 * 128
