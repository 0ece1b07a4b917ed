"""torchtitan's Llama under ``fully_shard``: the modules of one rank, and the model without pipeline parallelism.

``torchtitan/parallelisms/parallelize_llama.py`` (``apply_ac``, ``apply_fsdp``) and ``train.py`` of December
2024 (commit 9dec370): every block is recomputed or not, then sharded; the last block's parameters stay after
forward, and so do the root's. Logits leave the model, and the loss is taken outside of it. Tensor parallelism
(``apply_tp``) comes before ``apply_fsdp``: ``fully_shard`` cuts each rank's local part of a parameter along dimension 0
once more, and brings a gradient into its parameter's placement before it is reduced (``_fsdp_param.py``,
``_init_sharding_spec_tp``, ``unsharded_grad_data``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from ...layers import torchtitan, torchtitan_tp
from ...layers.autograd import Recorder, Shape, Tensor
from ...layers.huggingface import LayerShape
from ...layers.module import LEFT, Interface, Module, Options, Run, Tapes, build, hold_bytes
from ...plan.errors import PlanError
from ...plan.releases import FP32_HEAD_MULTIPLE
from ...plan.resolved import ResolvedPlan
from ...tape.events import Category, Drop, Hold, Tape, ahead, behind
from ...tape.program import Span
from ...values import dataclass
from ..plain import programs as plain
from .modules import MODEL, Model, with_parameters, with_seams
from .units import Unit

REGISTERED = (
    *("query", "key", "value", "attention_output", "query_norm", "key_norm"),
    *("gate", "down", "up", "attention_norm", "mlp_norm"),
)
"""Modules of torchtitan's layer in the order in which they register their parameters."""

Checkpointing = Literal["none", "full", "op"]


@dataclass(frozen=True, slots=True)
class ActivationCheckpointing:
    """``activation_checkpoint.mode`` and ``selective_ac_option``."""

    mode: Checkpointing = "op"
    every: int = 1
    """With ``full``: every n-th block is recomputed, those numbered n, 2n, … from 1 (per-layer selective)."""

    def of(self, layer: int) -> Checkpointing:
        """What becomes of block ``layer``, from 0."""
        return self.mode if self.mode != "full" or (layer + 1) % self.every == 0 else "none"


@dataclass(frozen=True, slots=True)
class Recipes:
    """The modules of one rank, of which tensor parallelism may have a part."""

    shape: LayerShape
    """That of all tensor-parallel ranks together."""
    tensor: int = 1
    parallel_loss: bool = False
    """Logits stay in parts."""

    def block(self, mode: Checkpointing, options: Options) -> Module:
        """Its input and output are (b, s / t, h)."""
        return _block(self, mode, options)

    def ends(self, options: Options) -> tuple[Module, Module, Module, Module]:
        """Embedding, final norm, head, and the loss outside of the model."""
        return _ends(self, options)

    def behind(self, embedding: Module, blocks: Sequence[Module]) -> list[Module]:
        """The embedding and the blocks behind it, of which a stage may have none."""
        if self.tensor == 1:
            return [embedding, *blocks]
        return [embedding, _first(blocks[0], embedding), *blocks[1:]] if blocks else [_sent(embedding)]

    @property
    def hidden(self) -> Shape:
        """Of the residual stream: (b, s / t, h)."""
        return self.shape.b, self.shape.s // self.tensor, self.shape.spec.hidden

    @property
    def logits(self) -> Shape:
        """(b, s, v), or (b, s, v / t)."""
        parts = self.tensor if self.parallel_loss else 1
        return self.shape.b, self.shape.s, self.shape.spec.vocab // parts

    @property
    def interface(self) -> Interface:
        return Interface(self.hidden, self.shape.dtype)


def recipes(plan: ResolvedPlan) -> Recipes:
    return Recipes(plain.layer_shape(plan), plan.layout.tp, plan.loss.kind == "vocab-parallel")


@lru_cache(maxsize=1024)
def _block(of: Recipes, mode: Checkpointing, options: Options) -> Module:
    shape, t = of.shape, of.tensor

    def run(r: Recorder, x: Tensor, policy: torchtitan.Policy) -> Tensor:
        return torchtitan.block(r, x, shape, policy) if t == 1 else torchtitan_tp.block(r, x, shape, t, policy)

    def recipe(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        hidden = x
        if mode == "none":
            return Run(run(r, hidden, torchtitan.Policy(False)))
        return Run(torchtitan.checkpointed(r, lambda policy: run(r, hidden, policy), keeps=mode == "op"))

    return build("layer", recipe, of.interface, options)


@lru_cache(maxsize=1024)
def _ends(of: Recipes, options: Options) -> tuple[Module, Module, Module, Module]:
    shape, t = of.shape, of.tensor

    def embed(r: Recorder, x: Tensor | None) -> Run:
        return Run(torchtitan.embedding(r, shape)) if t == 1 else Run(*torchtitan_tp.embedding(r, shape, t))

    def norm(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run((torchtitan if t == 1 else torchtitan_tp).rms_norm(r, x, "final_norm"))

    def head(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        if t == 1:
            return Run(torchtitan.output(r, x, shape))
        return Run(torchtitan_tp.output(r, x, shape, t, parallel_loss=of.parallel_loss))

    def loss(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(None, loss=(torchtitan_tp if of.parallel_loss else torchtitan).loss(r, x, shape))

    return (
        build("embedding", embed, Interface(None, shape.dtype), options),
        build("final_norm", norm, of.interface, options),
        build("head", head, of.interface, options),
        build("loss", loss, Interface(of.logits, shape.dtype), options),
    )


@lru_cache(maxsize=1024)
def _first(block: Module, embedding: Module) -> Module:
    """``block`` as the first one, whose first operator waits for the embedding's collective and ends its input."""
    waited = _waited(embedding)

    def tapes(own: Tapes) -> Tapes:
        return replace(own, forward=ahead(own.forward, waited))

    return replace(
        block, first=tapes(block.first), steady=tapes(block.steady), evaluation=ahead(block.evaluation, waited)
    )


@lru_cache(maxsize=1024)
def _sent(embedding: Module) -> Module:
    """``embedding`` as a stage of its own, whose collective is waited for as soon as its output is sent."""
    waited = _waited(embedding)

    def tapes(own: Tapes) -> Tapes:
        return replace(own, forward=behind(own.forward, waited))

    evaluation = behind(embedding.evaluation, waited)
    return replace(
        embedding, first=tapes(embedding.first), steady=tapes(embedding.steady), evaluation=evaluation, left=()
    )


def _waited(embedding: Module) -> Tape:
    """What ends where somebody waits for the embedding's collective."""
    (held,) = embedding.left
    return (Drop(LEFT, held.bytes, held.category),)


def check(plan: ResolvedPlan) -> None:
    """Refuses what these recipes do not cover."""
    spec = plan.model
    if spec.family != "llama" or spec.attention_bias or spec.mlp_bias or spec.tied_embeddings:
        problem = "must be an untied Llama without biases: torchtitan's other models have no recipe"
        raise PlanError("model", spec.name, problem)
    if plan.attention != "flash":
        raise PlanError("attention", plan.attention, "must be flash: torchtitan's Llama always runs a fused kernel")
    if plan.precision.dtype != "fp32":
        plain.check_flash(plan)
    elif spec.head_dim % FP32_HEAD_MULTIPLE:
        problem = f"must be a multiple of {FP32_HEAD_MULTIPLE} in fp32: PyTorch's fused kernels run no other head size"
        raise PlanError("model.head_dim", spec.head_dim, problem)


def torchtitan_model(
    plan: ResolvedPlan,
    options: Options,
    recompute: ActivationCheckpointing,
    *,
    reshard: bool = True,
    ends_apart: bool = False,
) -> Model:
    """Blocks, then the model; ``reshard``: they are resharded after forward, but for the last block, which is
    wanted again at once.

    ``ends_apart``: the embedding is a unit, and norm and head are one that stays after forward, while the last
    block is resharded (``torchtitan/distributed/fsdp.py``, ``apply_fsdp_to_decoder``, of later releases).
    """
    check(plan)
    made, options = recipes(plan), with_seams(options)
    names = plain.layer_names(plan.model.layers)
    embedding, norm, head, loss = made.ends(options)
    blocks = [made.block(recompute.of(at), options) for at in range(len(names))]
    embedding, *blocks = made.behind(embedding, blocks)
    layers = [Span(block, (name,)) for block, name in zip(blocks, names, strict=True)]
    after = [Span(norm, ("final_norm",)), Span(head, ("head",)), Span(loss, ("loss",))]
    spans = (Span(embedding, ("embedding",)), *layers, *after)
    last = len(names)
    kept = 0 if ends_apart else last
    units = [Unit(name, (), at, at, reshard and at != kept) for at, name in enumerate(names, 1)]
    if ends_apart:
        apart = Unit("ends", (), last + 1, last + 2, False)
        units = [Unit("embedding", (), 0, 0, reshard, False), *units, apart]
    else:
        units = [Unit(MODEL, (), 0, last + 2, False, False), *units]
    table = (made.shape.s, plan.model.head_dim // 2)
    freqs = Hold(0, hold_bytes((*table, 2), "fp32"), Category.BUFFERS, "freqs_cis", table, "complex64")
    return Model(spans, with_parameters(spans, units, REGISTERED), "head", (freqs,))
