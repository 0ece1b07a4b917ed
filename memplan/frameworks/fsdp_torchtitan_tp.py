"""torchtitan's Llama with tensor parallelism under ``fully_shard``: its modules on one rank.

``torchtitan/parallelisms/parallelize_llama.py`` (``apply_tp``, before ``apply_fsdp``) of December 2024 (commit
9dec370). ``fully_shard`` cuts each rank's local part of a parameter along dimension 0 once more, and brings a
gradient into its parameter's placement before it is reduced (``_fsdp_param.py``, ``_init_sharding_spec_tp``,
``unsharded_grad_data``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..layers import torchtitan, torchtitan_tp
from ..layers.autograd import Recorder, Tensor
from ..layers.huggingface import LayerShape
from ..layers.module import LEFT, Interface, Module, Options, Run, Tapes, build
from ..tape import Drop, Tape

Modules = tuple[Module, Module, Module, Module]


@lru_cache(maxsize=1024)
def block(shape: LayerShape, t: int, mode: str, options: Options) -> Module:
    """A block whose input and output are (b, s / t, h)."""

    def recipe(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        hidden = x
        if mode == "none":
            return Run(torchtitan_tp.block(r, hidden, shape, t, torchtitan.Policy(False)))
        region = torchtitan.checkpointed
        return Run(region(r, lambda policy: torchtitan_tp.block(r, hidden, shape, t, policy), keeps=mode == "op"))

    return build("layer", recipe, hidden_interface(shape, t), options)


def hidden_interface(shape: LayerShape, t: int) -> Interface:
    return Interface((shape.b, shape.s // t, shape.spec.hidden), shape.dtype)


@lru_cache(maxsize=1024)
def first_block(block: Module, embedding: Module) -> Module:
    """``block`` as the first one, whose first operator waits for the embedding's collective and ends its input."""
    waited = _waited(embedding)

    def after(tapes: Tapes) -> Tapes:
        return replace(tapes, forward=waited + tapes.forward)

    return replace(block, first=after(block.first), steady=after(block.steady), evaluation=waited + block.evaluation)


@lru_cache(maxsize=1024)
def sent(embedding: Module) -> Module:
    """``embedding`` as a stage of its own, whose collective is waited for as soon as its output is sent."""
    waited = _waited(embedding)

    def before(tapes: Tapes) -> Tapes:
        return replace(tapes, forward=tapes.forward + waited)

    first, steady = before(embedding.first), before(embedding.steady)
    return replace(embedding, first=first, steady=steady, evaluation=embedding.evaluation + waited, left=())


def _waited(embedding: Module) -> Tape:
    """What ends where somebody waits for the embedding's collective."""
    (held,) = embedding.left
    return (Drop(LEFT, held.bytes, held.category),)


@lru_cache(maxsize=1024)
def ends(shape: LayerShape, t: int, parallel_loss: bool, options: Options) -> Modules:
    """Embedding, final norm, head, and the loss outside of the model."""

    def embed(r: Recorder, x: Tensor | None) -> Run:
        embedded, sent = torchtitan_tp.embedding(r, shape, t)
        return Run(embedded, sent)

    def norm(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(torchtitan_tp.rms_norm(r, x, "final_norm"))

    def head(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(torchtitan_tp.output(r, x, shape, t, parallel_loss=parallel_loss))

    def loss(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(None, loss=(torchtitan_tp if parallel_loss else torchtitan).loss(r, x, shape))

    hidden = hidden_interface(shape, t)
    logits = Interface((shape.b, shape.s, shape.spec.vocab // (t if parallel_loss else 1)), shape.dtype)
    return (
        build("embedding", embed, Interface(None, shape.dtype), options),
        build("final_norm", norm, hidden, options),
        build("head", head, hidden, options),
        build("loss", loss, logits, options),
    )
