"""torchtitan's Llama under ``fully_shard``, as its trainer runs it without pipeline parallelism.

``torchtitan/parallelisms/parallelize_llama.py`` (``apply_ac``, ``apply_fsdp``) and ``train.py`` of December
2024 (commit 9dec370): every block is recomputed or not, then sharded; the last block's parameters stay after
forward, and so do the root's. Logits leave the model, and the loss is taken outside of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ..layers import torchtitan
from ..layers.autograd import Recorder, Shape, Tensor
from ..layers.efficient import HEAD_MULTIPLE
from ..layers.huggingface import LayerShape
from ..layers.module import Interface, Module, Options, Run, build, hold_bytes
from ..plan.errors import PlanError
from ..plan.plan import Plan
from ..program import Span
from ..tape import Category, Hold
from . import fsdp_torchtitan_tp, plain
from .fsdp import MODEL, Model, with_parameters
from .fsdp_units import Unit

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


@lru_cache(maxsize=1024)
def block(shape: LayerShape, mode: Checkpointing, options: Options) -> Module:
    def recipe(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        hidden = x
        if mode == "none":
            return Run(torchtitan.block(r, hidden, shape, torchtitan.Policy(False)))
        region = torchtitan.checkpointed
        return Run(region(r, lambda policy: torchtitan.block(r, hidden, shape, policy), keeps=mode == "op"))

    return build("layer", recipe, plain.hidden_interface(shape), options)


@lru_cache(maxsize=1024)
def ends(shape: LayerShape, options: Options) -> tuple[Module, Module, Module, Module]:
    """Embedding, final norm, head, and the loss outside of the model."""

    def embed(r: Recorder, x: Tensor | None) -> Run:
        return Run(torchtitan.embedding(r, shape))

    def norm(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(torchtitan.rms_norm(r, x, "final_norm"))

    def head(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(torchtitan.output(r, x, shape))

    def loss(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(None, loss=torchtitan.loss(r, x, shape))

    hidden = plain.hidden_interface(shape)
    logits = Interface((shape.b, shape.s, shape.spec.vocab), shape.dtype)
    return (
        build("embedding", embed, Interface(None, shape.dtype), options),
        build("final_norm", norm, hidden, options),
        build("head", head, hidden, options),
        build("loss", loss, logits, options),
    )


def check(plan: Plan) -> None:
    """Refuses what these recipes do not cover."""
    spec = plan.model
    if spec.family != "llama" or spec.attention_bias or spec.mlp_bias or spec.tied_embeddings:
        problem = "must be an untied Llama without biases: torchtitan's other models have no recipe"
        raise PlanError("model", spec.name, problem)
    if plan.attention != "flash":
        raise PlanError("attention", plan.attention, "must be flash, a fused kernel: torchtitan's Llama has no other")
    if plan.precision.dtype != "fp32":
        plain.check_flash(plan)
    elif spec.head_dim % HEAD_MULTIPLE:
        problem = f"must be a multiple of {HEAD_MULTIPLE} in fp32: for others no fused kernel of PyTorch's runs"
        raise PlanError("model.head_dim", spec.head_dim, problem)


@dataclass(frozen=True, slots=True)
class Recipes:
    """The modules of one rank, of which tensor parallelism may have a part."""

    shape: LayerShape
    """That of all tensor-parallel ranks together."""
    tensor: int = 1
    parallel_loss: bool = False
    """Logits stay in parts."""

    def block(self, mode: Checkpointing, options: Options) -> Module:
        if self.tensor == 1:
            return block(self.shape, mode, options)
        return fsdp_torchtitan_tp.block(self.shape, self.tensor, mode, options)

    def behind(self, embedding: Module, blocks: Sequence[Module]) -> list[Module]:
        """The embedding and the blocks behind it, of which a stage may have none."""
        if self.tensor == 1:
            return [embedding, *blocks]
        if not blocks:
            return [fsdp_torchtitan_tp.sent(embedding)]
        return [embedding, fsdp_torchtitan_tp.first_block(blocks[0], embedding), *blocks[1:]]

    def ends(self, options: Options) -> tuple[Module, Module, Module, Module]:
        """Embedding, final norm, head, and the loss outside of the model."""
        if self.tensor == 1:
            return ends(self.shape, options)
        return fsdp_torchtitan_tp.ends(self.shape, self.tensor, self.parallel_loss, options)

    @property
    def hidden(self) -> Shape:
        """Of the residual stream: (b, s / t, h)."""
        return self.shape.b, self.shape.s // self.tensor, self.shape.spec.hidden

    @property
    def logits(self) -> Shape:
        """(b, s, v), or (b, s, v / t)."""
        parts = self.tensor if self.parallel_loss else 1
        return self.shape.b, self.shape.s, self.shape.spec.vocab // parts


def recipes(plan: Plan) -> Recipes:
    return Recipes(plain.layer_shape(plan), plan.layout.tp, plan.loss.kind == "vocab-parallel")


def torchtitan_model(
    plan: Plan,
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
    made = recipes(plan)
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
    return Model(spans, with_parameters(spans, units, "torchtitan"), "head", (freqs,))
