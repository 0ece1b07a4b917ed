"""Recipes of GPT's ends against Megatron-Core itself, event by event, on fake tensors.

Skipped where ``megatron.core`` (and ``triton``, which it imports) are not on the path; no GPU is needed.
Megatron-Core runs as one rank of a fake process group. Within a run of drops the order is not compared. Where
fake tensors differ from a GPU, the difference has a name:

* the gradient of the loss (512 B) is a variable of ``backward``, and ends with the head in a tape;
* Python numbers that are written through an index are on the host (``lift_fresh``, ``zeros`` of no dimension).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any
from unittest import mock
from warnings import catch_warnings, simplefilter

import pytest
import torch

from memplan.layers.autograd import Recorder, Tensor
from memplan.layers.megatron_core import ends
from memplan.layers.megatron_core.shape import CoreShape
from memplan.layers.module import Interface, Module, Options, Run, build
from memplan.layers.tuning import Tuning
from memplan.plan.spec import ModelSpec
from memplan.tape.events import INPUT, Drop, Hold, Seam, Tape

from ...oracle import tracer

with catch_warnings():
    simplefilter("ignore")
    pytest.importorskip("megatron.core.models.gpt.gpt_model", exc_type=ImportError)
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig

pytestmark = pytest.mark.filterwarnings("ignore")

H, VOCAB, ROWS = 64, 1024, 96
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Seen = tuple[int, int]
"""Sign and bytes."""
Step = tuple[list[Seen], list[Seen]]
"""Forward and backward."""


def spec(**changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "name": "small",
        "family": "gpt",
        "layers": 1,
        "hidden": H,
        "heads": 4,
        "kv_heads": 4,
        "head_dim": 16,
        "ffn": 4 * H,
        "vocab": VOCAB,
        "positions_max": ROWS,
        "norm": "layernorm",
        "positions": "learned",
        "activation": "gelu",
        "embedding_dropout": 0.1,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
    }
    return ModelSpec(**fields | changes)


def shape(t: int = 1, b: int = 3, s: int = 16, dtype: str = "bf16", **changes: Any) -> CoreShape:
    of_spec = {key: changes.pop(key) for key in list(changes) if key in ModelSpec.model_fields}
    return CoreShape(spec(**of_spec), b, s, t, dtype, VOCAB, gradient_fusion=False, **changes)


# -- the real code -----------------------------------------------------------------------------------


@contextmanager
def one_rank_of(t: int) -> Iterator[None]:
    """A fake world of ``t`` tensor-parallel ranks, on the CPU."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=t - 1, world_size=t, store=FakeStore())
    with mock.patch("torch.cuda.current_device", return_value="cpu"):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=t, create_gloo_process_groups=False)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def config(like: CoreShape) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=4,
        tensor_model_parallel_size=like.t,
        sequence_parallel=like.sequence_parallel,
        params_dtype=TORCH[like.dtype],
        deterministic_mode=like.deterministic,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        hidden_dropout=like.spec.embedding_dropout,
        fp32_residual_connection=like.fp32_residual,
        calculate_per_token_loss=like.per_token_loss,
    )


@contextmanager
def built_in(dtype: str) -> Iterator[None]:
    """New parameters are in ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(TORCH[dtype])
    yield
    torch.set_default_dtype(before)


def consume(module: torch.nn.Module) -> None:
    """Gradients end as they arrive, as under Megatron's DDP hook."""
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))


def traced(body: Callable[[tracer.Trace, Callable[[], None]], None], t: int) -> Step:
    """Forward and backward of ``body``, which calls ``mark`` before, between and behind them."""
    marks: list[int] = []
    with one_rank_of(t), mock.patch("megatron.core.tensor_parallel.random.CudaRNGStatesTracker.fork", same_state):
        trace = tracer.run(lambda trace, _: body(trace, lambda: marks.append(len(trace.changes))))
    before, between, behind = marks
    return seen(trace.changes[before:between]), seen(trace.changes[between:behind])


@contextmanager
def same_state(*_: object, **__: object) -> Iterator[None]:
    """Random states take no memory here."""
    yield


def seen(changes: Iterable[tracer.Change]) -> list[Seen]:
    """Changes on a GPU."""
    result = []
    for change in changes:
        host = not change.shape and change.op in ("aten.lift_fresh.default", "aten.zeros.default")
        if not host and change.op != "aten.ones_like.default":
            result.append((change.sign, change.bytes))
    return result


def real_embedding(like: CoreShape) -> Step:
    def body(trace: tracer.Trace, mark: Callable[[], None]) -> None:
        kind = "learned_absolute" if like.spec.positions == "learned" else "rope"
        with built_in(like.dtype):
            made = LanguageModelEmbedding(config(like), VOCAB, ROWS, kind)
        consume(made)
        tokens = torch.zeros((like.b, like.s), dtype=torch.int64)
        positions = torch.zeros((like.b, like.s), dtype=torch.int64)
        gradient = torch.zeros(like.hidden, dtype=torch.float32 if like.fp32_residual else TORCH[like.dtype])
        mark()
        out = made(tokens, positions)
        mark()
        out.backward(gradient)
        mark()

    return traced(body, like.t)


def scaled_loss(loss_mask: torch.Tensor, output: torch.Tensor, per_token: bool) -> torch.Tensor:
    """What ``loss_func`` and ``forward_step_calc_loss`` compute."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    report = torch.cat([loss.clone().detach().view(1), tokens.view(1)])
    if not per_token:
        loss /= torch.clamp(tokens, min=1)
        loss /= 8
    del report
    return loss


def language_model(like: CoreShape, bias: bool = False) -> Any:
    """What the models' methods read of themselves, with a head."""
    of = config(like)
    with built_in(like.dtype):
        layer = ColumnParallelLinear(H, VOCAB, config=of, init_method=torch.nn.init.zeros_, bias=bias)
    consume(layer)
    group = parallel_state.get_tensor_model_parallel_group()
    model: Any = SimpleNamespace(
        share_embeddings_and_output_weights=False,
        post_process=True,
        config=of,
        output_layer=layer,
        pg_collection=SimpleNamespace(tp=group),
        tp_group=group,
    )
    model._scale_logits = lambda logits: logits
    model.compute_language_model_loss = partial(LanguageModule.compute_language_model_loss, model)
    return model


@contextmanager
def static_buffer(like: CoreShape) -> Iterator[None]:
    """The buffer that inputs are gathered into was made before."""
    buffer = torch.empty((like.s, like.b, H), dtype=TORCH[like.dtype])
    of_rank = SimpleNamespace(get_tensor=lambda *_: buffer)
    with mock.patch("megatron.core.tensor_parallel.layers.get_global_memory_buffer", return_value=of_rank):
        yield


def real_head(like: CoreShape, *, frozen: bool = False) -> Step:
    def body(trace: tracer.Trace, mark: Callable[[], None]) -> None:
        model = language_model(like)
        model.output_layer.weight.requires_grad = not frozen
        labels = torch.zeros((like.b, like.s), dtype=torch.int64)
        mask = torch.zeros((like.b, like.s), dtype=torch.float32)
        hidden = torch.zeros(like.hidden, dtype=TORCH[like.dtype], requires_grad=True)
        with static_buffer(like):
            mark()
            output = GPTModel._postprocess(model, hidden, None, None, labels, None, None, None, loss_mask=mask)
            loss = scaled_loss(mask, output, like.per_token_loss)
            del output
            mark()
            loss.backward()
            del loss
            mark()

    return traced(body, like.t)


def real_tied(like: CoreShape) -> Step:
    """Embedding and head of one stage, without layers between."""

    def body(trace: tracer.Trace, mark: Callable[[], None]) -> None:
        model = language_model(like)
        with built_in(like.dtype):
            made = LanguageModelEmbedding(config(like), VOCAB, ROWS)
        consume(made)
        model.share_embeddings_and_output_weights = True
        model.shared_embedding_or_output_weight = lambda: made.word_embeddings.weight
        ids = torch.zeros((like.b, like.s), dtype=torch.int64)
        mask = torch.zeros((like.b, like.s), dtype=torch.float32)
        with static_buffer(like):
            mark()
            output = GPTModel._postprocess(model, made(ids, ids), None, None, ids, None, None, None, loss_mask=mask)
            loss = scaled_loss(mask, output, like.per_token_loss)
            del output
            mark()
            loss.backward()
            del loss
            mark()

    return traced(body, like.t)

    return traced(body, like.t)


# -- the recipes -------------------------------------------------------------------------------------

OPTIONS = Options(accumulates_in_place=False, drops_gradient=False, consumes_gradients=True)


def told(tape: Tape, *kept: int) -> list[Seen]:
    """Events of a tape, without the loss's gradient and the end of the input, which the real code's caller holds."""
    left_out = {INPUT, *(event.tensor for event in tape if isinstance(event, Hold) and event.name == "grad_loss")}
    left_out -= set(kept)
    return [
        (1 if isinstance(event, Hold) else -1, event.bytes)
        for event in tape
        if not isinstance(event, Seam) and event.tensor not in left_out
    ]


def step(module: Module) -> Step:
    return told(module.first.forward), told(module.first.backward)


def tied_modules(like: CoreShape) -> Step:
    def head(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(None, loss=ends.gpt_head(r, x, like, tied_here=True))

    options = replace(OPTIONS, drops_gradient=True, accumulates_in_place=True)
    tied = frozenset({ends.WORD})
    first = build(
        "embedding",
        lambda r, x: Run(ends.gpt_embedding(r, like, tied_here=True)),
        Interface(None, like.dtype),
        options,
        tied,
    )
    last = build("head", head, Interface(like.hidden, like.dtype), options)
    return both(first, last)


def both(first: Module, last: Module) -> Step:
    """An embedding and a head behind it. The loss outlives both."""
    loss = [e.tensor for e in last.first.forward if isinstance(e, Hold) and e.name == "loss"][-1]
    head = tuple(e for e in last.first.backward if not isinstance(e, Drop) or e.tensor != loss)
    forward = told(first.first.forward) + told(last.first.forward)
    return forward, told(head, INPUT) + told(first.first.backward)


def embedding_module(like: CoreShape) -> Module:
    return build("embedding", lambda r, x: Run(ends.gpt_embedding(r, like)), Interface(None, like.dtype), OPTIONS)


def head_module(like: CoreShape, options: Options = OPTIONS) -> Module:
    def recipe(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(None, loss=ends.gpt_head(r, x, like))

    return build("head", recipe, Interface(like.hidden, like.dtype), options)


def ordered(events: list[Seen]) -> list[Seen]:
    """With every run of drops in order of size."""
    return [event for _, run in groupby(events, lambda event: event[0]) for event in in_run(list(run))]


def in_run(run: list[Seen]) -> list[Seen]:
    return sorted(run) if run[0][0] < 0 else run


def agree(expected: Step, found: Step) -> None:
    for real, ours in zip(expected, found, strict=True):
        assert ordered(ours) == ordered(real)


# -- tests -------------------------------------------------------------------------------------------

SHAPES = ((3, 16), (1, 48), (4, 96))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("b", "s"), SHAPES)
@pytest.mark.parametrize(("t", "sequence_parallel"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_embedding(b: int, s: int, t: int, sequence_parallel: bool, positions: str, deterministic: bool) -> None:
    like = shape(t, b, s, positions=positions, deterministic=deterministic, sequence_parallel=sequence_parallel)
    agree(real_embedding(like), step(embedding_module(like)))


@pytest.mark.parametrize("changes", [{"fp32_residual": True}, {"embedding_dropout": 0.0}, {"dtype": "fp32"}])
def test_embedding_of_other_kinds(changes: dict[str, Any]) -> None:
    like = shape(2, **changes)
    agree(real_embedding(like), step(embedding_module(like)))


@pytest.mark.parametrize("per_token_loss", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("b", "s"), SHAPES)
@pytest.mark.parametrize(("t", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_head_and_loss(b: int, s: int, t: int, sequence_parallel: bool, dtype: str, per_token_loss: bool) -> None:
    like = shape(t, b, s, dtype, per_token_loss=per_token_loss, sequence_parallel=sequence_parallel)
    agree(real_head(like), step(head_module(like)))


@pytest.mark.parametrize(("b", "s"), SHAPES[:2])
@pytest.mark.parametrize(("t", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_frozen_head(b: int, s: int, t: int, sequence_parallel: bool) -> None:
    """``linear_with_frozen_weight``."""
    like = shape(t, b, s, sequence_parallel=sequence_parallel)
    agree(real_head(like, frozen=True), step(head_module(like, replace(OPTIONS, tuning=Tuning()))))


def test_frozen_embedding_has_no_backward() -> None:
    made = build(
        "embedding",
        lambda r, x: Run(ends.gpt_embedding(r, shape(2))),
        Interface(None, "bf16"),
        replace(OPTIONS, tuning=Tuning()),
    )
    assert made.first.backward == ()
    assert not any(one.trained for one in made.parameters)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("t", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_tied_on_one_stage(t: int, sequence_parallel: bool, deterministic: bool) -> None:
    """The head's gradient of the word table waits for the embedding's; their sum takes no memory on a GPU."""
    like = shape(t, deterministic=deterministic, sequence_parallel=sequence_parallel)
    forward, backward = real_tied(like)
    table = 2 * VOCAB // t * H
    assert backward.count((1, table)) == 3  # the head's, the embedding's, and a sum that only fake tensors make
    backward.reverse()
    backward.remove((1, table))
    backward.remove((-1, table))
    backward.reverse()
    assert backward.pop() == (-1, 512)  # the loss
    agree((forward, backward), tied_modules(like))
