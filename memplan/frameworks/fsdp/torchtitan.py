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
from functools import lru_cache, partial
from typing import Literal

from ...device.gpus import GPUS
from ...layers import compiled, tensor_parallel, titan_loss, torchtitan, torchtitan_tp
from ...layers.autograd import Recorder, Shape, Tensor
from ...layers.edges import with_waiting_gradient
from ...layers.fused_losses import HeadLoss, chunked_head
from ...layers.huggingface import LayerShape
from ...layers.low_linear import LowLinear
from ...layers.module import LEFT, Interface, Module, Options, Run, build
from ...layers.titan_models import TABLE
from ...plan.plan import ResolvedPlan
from ...plan.releases import FP32_HEAD_MULTIPLE
from ...plan.spec import ModelSpec
from ...tape.events import Category, Drop, Hold, Stretch, Tape, ahead, behind
from ...tape.program import Span
from ...values import dataclass, replace
from ..plain import programs as plain
from . import chunked, float8, titan_low
from .modules import MODEL, Model, with_parameters, with_seams, with_stored
from .titan import Titan, newest, titan_of, titan_of_plan
from .titan_experts import (
    crosswise,
    cut_of_experts,
    groups_of,
    parts_of_experts,
    places,
    shards_of,
    with_experts,
    with_groups,
)
from .titan_lora import registering, tuning_of
from .titan_low import Names
from .units import Cut, Unit

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
    parallel_loss: bool = False
    """Logits stay in parts."""
    chunks: HeadLoss | None = None
    """Head and loss run chunk by chunk, outside of the model."""
    compiled: bool = False
    """Every layer runs by ``torch.compile``,"""
    compiled_loss: bool = False
    """and so does the loss."""
    low: LowLinear | None = None
    """How torchao's linear layers multiply in fewer than 16 bits,"""
    names: Names = Names()
    """and what they are called."""
    newest: bool = False
    """The code is the newest."""

    def block(self, mode: Checkpointing, options: Options, layer: int = 0) -> Module:
        """That numbered ``layer``, from 0; its input and output are (b, s / t, h)."""
        own = replace(self, shape=self.shape.of_layer(layer), low=self.low_of(layer), names=Names())
        return _block(own, mode, options, layer > 0 or options.tuning is None)

    def blocks(self, modes: Sequence[Checkpointing], options: Sequence[Options], first: int = 0) -> list[Module]:
        """Those from ``first`` on; equal ones are made once."""
        known = dict[object, Module]()
        result = []
        for at, (mode, own) in enumerate(zip(modes, options, strict=True), first):
            key = mode, own, self.shape.of_layer(at), self.low_of(at), at > 0 or own.tuning is None
            if key not in known:
                known[key] = self.block(mode, own, at)
            result.append(known[key])
        return result

    def low_of(self, layer: int) -> LowLinear | None:
        """What of layer ``layer`` is in fewer than 16 bits."""
        if self.low is None or not self.names.parts:
            return self.low
        linears = self.titan.linears
        skips = self.names.staying(layer, linears)
        return self.low.leaving(skips) if len(skips) < len(linears) or self.low.rows else None

    @property
    def low_head(self) -> LowLinear | None:
        """What of the head is."""
        spec, stays = self.shape.spec, self.names.keep_head
        return self.low if self.low and not stays and self.low.takes("head", spec.vocab, spec.hidden) else None

    def beside(self, spans: Sequence[Span], first: int = 0, *, head: bool = True) -> tuple[Hold, ...]:
        """What a rank keeps of linear layers in fewer than 16 bits beside their weights: of ``spans``, whose layers
        begin with ``first``, and of the head if it is there."""
        if self.low is None:
            return ()
        linears, count = dict(self.titan.linears), int(head and self.low_head is not None)
        for layer, block in enumerate((one.module for one in spans if one.module.name == "layer"), first):
            names = {one.name.removesuffix(".weight") for one in block.parameters} & linears.keys()
            low = self.low_of(layer)
            count += len(names - low.skips) if low is not None else 0
        return self.low.beside(count)

    def ends(self, options: Options) -> tuple[Module, Module, Module, Module]:
        """Embedding, final norm, head, and the loss outside of the model; with chunks the head has it."""
        return _ends(self, options)

    def behind(self, embedding: Module, blocks: Sequence[Module]) -> list[Module]:
        """The embedding and the blocks behind it, of which a stage may have none."""
        if self.tensor == 1:
            return [embedding, *blocks]
        return [embedding, _first(blocks[0], embedding), *blocks[1:]] if blocks else [_sent(embedding)]

    @property
    def tensor(self) -> int:
        """Ranks of tensor parallelism."""
        return self.shape.tensor

    @property
    def titan(self) -> Titan:
        """The model's code."""
        return titan_of(self.shape.spec, newest=self.newest)

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


def local_shape(plan: ResolvedPlan) -> LayerShape:
    """Of what a rank has of a micro-batch: with context parallelism a part of every sequence."""
    whole, ranks = plain.layer_shape(plan), plan.layout.cp
    return replace(whole, s=whole.s // ranks, context=ranks)


def recipes(plan: ResolvedPlan) -> Recipes:
    return Recipes(
        replace(
            local_shape(plan),
            expert_ranks=plan.layout.ep,
            tensor=plan.layout.tp,
            expert_parts=parts_of_experts(plan),
            in_flight=plan.layout.pp > 1,
        ),
        plan.loss.kind == "vocab-parallel",
        chunked.loss_of(plan),
        plan.fsdp.compile,
        plan.fsdp.compile_loss,
        titan_low.low_of(plan),
        titan_low.names_of(plan),
        newest(plan),
    )


@lru_cache(maxsize=1024)
def _block(of: Recipes, mode: Checkpointing, options: Options, leads: bool) -> Module:
    """``leads``: its input leads to something that is trained."""
    shape, titan = of.shape, of.titan
    low = of.low

    def recipe(r: Recorder, x: Tensor) -> Run:
        if of.compiled:
            return Run(compiled.block(r, x, shape, mode, float8.in_compiled(low, shape.spec)))
        hidden, table = x, titan.table and titan.table(r, shape)
        if mode == "none":
            return Run(titan.block(r, hidden, shape, torchtitan.Policy(False, low=low), table))
        return Run(
            torchtitan.checkpointed(
                r,
                lambda policy: titan.block(r, hidden, shape, policy, table),
                keeps=mode == "op",
                early_stop=titan.early_stop,
                keeps_exchanged=titan.keeps_exchanged,
                low=low,
            )
        )

    made = build("layer", recipe, replace(of.interface, requires_grad=leads), options)
    return _cast_first(made) if titan.table is not None else made


def _cast_first(block: Module) -> Module:
    """``block`` whose inputs are cast before its parameters are gathered (``FSDPState._pre_forward``): what its tapes
    hold first, behind the hook's place, comes in front of it."""

    def turned(tape: Tape) -> Tape:
        events = list(tape)
        at = next((i for i, event in enumerate(events) if isinstance(event, Hold)), 0)
        return tape if not events else Stretch([events[at], *events[:at], *events[at + 1 :]])

    return block.changed(turned)


@lru_cache(maxsize=1024)
def _ends(of: Recipes, options: Options) -> tuple[Module, Module, Module, Module]:
    shape, t = of.shape, of.tensor
    tied = frozenset({"word.weight"}) if shape.spec.tied_embeddings else frozenset[str]()
    apart = tied if of.chunks is not None else frozenset[str]()  # hooks have taken the head's gradient long before

    def embed(r: Recorder, x: Tensor) -> Run:
        return Run(of.titan.embedding(r, shape)) if t == 1 else Run(*torchtitan_tp.embedding(r, shape, t))

    def norm(r: Recorder, x: Tensor) -> Run:
        normed = ((t > 1 and of.titan.norm_of_parts) or of.titan.norm)(r, x, "final_norm")
        return Run(tensor_parallel.gathered(r, normed, t, "head_input") if t > 1 and of.chunks else normed)

    def head(r: Recorder, x: Tensor) -> Run:
        if of.chunks is not None:
            return Run(None, loss=chunked_head(r, x, shape, _of_chunk(of.chunks, of.low_head), t))
        if t == 1:
            product = partial(torchtitan.output, x=x, shape=shape, low=of.low_head)
            return Run(of.titan.around_head(r, product) if of.titan.around_head else product(r))
        return Run(torchtitan_tp.output(r, x, shape, t, parallel_loss=of.parallel_loss))

    def loss(r: Recorder, x: Tensor) -> Run:
        if of.compiled_loss:
            labels = r.outside((shape.b, shape.s), "int64", Category.INPUTS)
            return Run(None, loss=titan_loss.compiled(r, x, labels, averages=True))
        return Run(None, loss=(torchtitan_tp if of.parallel_loss else torchtitan).loss(r, x, shape))

    return (
        build("embedding", embed, Interface(None, shape.dtype), options, tied - apart),
        build("final_norm", norm, of.interface, options),
        build(
            "head",
            head,
            replace(of.interface, shape=(shape.b, shape.s, shape.spec.hidden)) if of.chunks else of.interface,
            options,
            apart,
        ),
        build("loss", loss, Interface(of.logits, "fp32" if of.titan.around_head else shape.dtype), options),
    )


def _of_chunk(loss: HeadLoss, low: LowLinear | None) -> HeadLoss:
    """``loss`` of a head whose products may be in fewer than 16 bits."""
    return loss if low is None else replace(loss, product=partial(low.product, policy=torchtitan.Policy(False)))


@lru_cache(maxsize=1024)
def _first(block: Module, embedding: Module) -> Module:
    """``block`` as the first one, whose first operator waits for the embedding's collective and ends its input."""
    waited = _waited(embedding)

    def ahead_of(tape: Tape) -> Tape:
        """Behind the cast of a table (``_cast_first``)."""
        casts = sum(isinstance(one, Hold) and one.name == TABLE for one in tape[:1])
        return (*tape[:casts], *ahead(tape[casts:], waited))

    return block.changed(ahead_of)


@lru_cache(maxsize=1024)
def _sent(embedding: Module) -> Module:
    """``embedding`` as a stage of its own, whose collective is waited for as soon as its output is sent."""
    waited = _waited(embedding)
    return replace(embedding.changed(lambda tape: behind(tape, waited)), left=())


def _waited(embedding: Module) -> Tape:
    """What ends where somebody waits for the embedding's collective."""
    (held,) = embedding.left
    return (Drop(LEFT, held.bytes, held.category),)


CONTEXT = (
    "only the newest layers are modelled with it (Llama, Qwen 3, DeepSeek V3: --fsdp-newest, without tp, compiled "
    "layers)"
)


def check(plan: ResolvedPlan) -> None:
    """Refuses what these recipes do not cover."""
    spec, layout = plan.model, plan.layout
    titan = titan_of_plan(plan)
    if plan.attention != "flash":
        raise plan.wrong("attention", f"must be flash: torchtitan's {titan.name} always runs a fused kernel")
    for name, has, what in (
        ("tp", titan.norm_of_parts, "tensor parallelism"),
        ("cp", titan.shares_sequences, f"context parallelism; {CONTEXT}"),
    ):
        if getattr(layout, name) > 1 and not has:
            problem = f"must be 1 with torchtitan's {titan.name}, which is modelled without {what}"
            raise plan.wrong(f"layout.{name}", problem)
    for name, cuts in (("shared_expert_ffn", layout.tp), ("expert_ffn", parts_of_experts(plan))):
        if getattr(spec, name) % cuts:
            raise plan.wrong(
                f"model.{name}", f"must be a multiple of {cuts}: tensor parallelism gives each rank a part"
            )
    if spec.tied_embeddings:
        _check_tied(plan)
    if layout.pp > 1 and titan.groups_experts:
        _check_staged_experts(plan, titan)
    if plan.fsdp.compile_loss and plan.loss.kind not in ("plain", "chunked"):
        raise plan.wrong(
            "fsdp.compile_loss",
            "must be false unless loss.kind is plain or chunked: no other was learnt (--no-compile-loss)",
        )
    if plan.fsdp.compile_loss and titan.around_head is not None:
        problem = f"must be false with torchtitan's {titan.name}, whose logits are in fp32: no such loss was learnt "
        problem += "(--no-compile-loss)"
        raise plan.wrong("fsdp.compile_loss", problem)
    if plan.fsdp.compile:
        _check_compiled(plan, titan)
    if plan.precision.low in titan_low.BLOCKS:
        layers = range(spec.layers)
        titan_low.check_sizes(plan, recipes(plan).blocks(["none" for _ in layers], [Options() for _ in layers]))
    if titan.complete:
        _check_kernel(plan)
        return
    if plan.precision.dtype != "bf16":
        raise plan.wrong(
            "precision.dtype",
            f"must be bf16 with torchtitan's {titan.name}: other dtypes have no fused kernel, or experts are cast",
        )
    if not plan.fsdp.ends_apart:
        raise plan.wrong(
            "fsdp.ends_apart",
            f"must be true with torchtitan's {titan.name}, whose release shards the ends as units of their own",
        )
    _check_gpu(plan, titan)
    if titan.groups_experts and plan.layout.ep == 1:
        _check_experts_here(plan)


def _check_tied(plan: ResolvedPlan) -> None:
    """A weight that embedding and head share is one unit with the norm (``apply_fsdp_to_decoder`` since March 2026)."""
    for path, kept, why in (
        ("layout.pp", 1, "torchtitan itself refuses pipeline stages"),
        ("layout.tp", 1, "its gradient's placements are not modelled"),
        ("fsdp.ends_apart", True, "older releases do not share a weight"),
    ):
        if plan.at(path) != kept:
            raise plan.wrong(path, f"must be {str(kept).lower()} with tied embeddings: {why}")


def _check_staged_experts(plan: ResolvedPlan, titan: Titan) -> None:
    """Experts of one unit with their layer that are cut otherwise than it are not modelled in stages."""
    experts = plan.model.experts
    if plan.layout.ep == 1 and shards_of(plan) > experts:
        most = experts * plan.fsdp.replicas // plan.layout.cp
        where = f"with pipeline stages of torchtitan's {titan.name} without expert parallelism"
        problem = f"must be at most {most} {where}: experts that are cut across their rows are not modelled there"
        raise plan.wrong("layout.dp", problem)


def _check_experts_here(plan: ResolvedPlan) -> None:
    """Experts that every shard has a part of, along the first dimension (``apply_fsdp_to_decoder``)."""
    shards, experts = shards_of(plan), plan.model.experts
    for name, size in (("expert_ffn", 2 * plan.model.expert_ffn), ("hidden", plan.model.hidden)):
        if shards > experts and size % shards:
            raise plan.wrong(
                f"model.{name}", f"must be a multiple of {shards}: with more shards than experts they are cut along it"
            )


def _check_kernel(plan: ResolvedPlan) -> None:
    """What ``scaled_dot_product_attention`` takes."""
    spec = plan.model
    if plan.precision.dtype != "fp32":
        plain.check_flash(plan)
    elif spec.head_dim % FP32_HEAD_MULTIPLE:
        raise plan.wrong(
            "model.head_dim",
            f"must be a multiple of {FP32_HEAD_MULTIPLE} in fp32: PyTorch's fused kernels run no other head size",
        )


def _check_compiled(plan: ResolvedPlan, titan: Titan) -> None:
    """What was learnt of compiled layers."""
    spec, layout = plan.model, plan.layout
    plan.refuse(
        (
            "fsdp.compile",
            not titan.compiles,
            f"must be false with torchtitan's {titan.name}: of its models only Llama's layers were learnt compiled "
            "(--no-compile)",
        ),
        (
            "fsdp.compile",
            layout.tp > 1,
            "must be false with tensor parallelism: such layers were not learnt (--no-compile)",
        ),
        ("fsdp.compile", plan.precision.dtype != "bf16", "must be false unless precision.dtype is bf16"),
    )
    sizes = {"hidden": spec.hidden, "ffn": spec.ffn, "kv_heads": spec.kv_heads * spec.head_dim}
    wrong = next((name for name, size in sizes.items() if size % compiled.ALIGNED), None)
    if wrong is not None:
        raise plan.wrong(
            f"model.{wrong}",
            f"must give a multiple of {compiled.ALIGNED} features with fsdp.compile: Inductor pads others",
        )
    if not 1 < spec.kv_heads < spec.heads or spec.heads * spec.head_dim != spec.hidden:
        raise plan.wrong(
            "model.kv_heads",
            f"must be from 2 to below the {spec.heads} heads, of hidden / heads features, with "
            "fsdp.compile: other layers were not learnt (--no-compile)",
        )
    made = recipes(plan)
    float8.check_compiled(plan, [float8.in_compiled(made.low_of(at), spec) for at in range(spec.layers)])


GROUPED_MM = (9, 0)
"""GPUs with ``torch._grouped_mm`` in torchtitan (``has_cuda_capability(9, 0)``)."""


def _check_gpu(plan: ResolvedPlan, titan: Titan) -> None:
    """Kernels of Hopper and later."""
    spec, gpu = plan.model, GPUS.get(plan.hardware.gpu or "")
    capability = gpu.compute_capability if gpu is not None else None
    if capability is None:
        return
    plan.refuse(
        (
            "hardware.gpu",
            spec.experts and capability < GROUPED_MM,
            "must be of Hopper or later: on others torchtitan runs one expert after the other, which is not modelled",
        ),
        (
            "hardware.gpu",
            titan.kernel_of is not None and capability < titan.kernel_of,
            f"must be of Hopper or later: on others attention of torchtitan's {titan.name} runs operator by operator, "
            "which is not modelled",
        ),
        (
            "model.head_dim",
            spec.head_dim > FLASH_HEADS,
            f"must be at most {FLASH_HEADS}: PyTorch's fused kernels run no larger heads",
        ),
    )


FLASH_HEADS = 256


def torchtitan_model(
    plan: ResolvedPlan,
    options: Options,
    recompute: ActivationCheckpointing,
    *,
    reshard: bool = True,
    ends_apart: bool = False,
    reshard_ends: bool = False,
) -> Model:
    """Blocks, then the model; ``reshard``: they are resharded after forward, but for the last block, which is
    wanted again at once.

    ``ends_apart``: the embedding is a unit, and norm and head are one that stays after forward, while the last
    block is resharded (``torchtitan/distributed/fsdp.py``, ``apply_fsdp_to_decoder``, of later releases). With a
    weight that embedding and head share these two units are one, which comes first. ``reshard_ends``: norm and head
    are resharded, too, which are gathered again in backward (``fsdp_reshard_after_forward`` "always").
    """
    check(plan)
    experts = cut_of_experts(plan) if plan.layout.ep > 1 or crosswise(plan) else None
    stored = plan.fsdp.parameters if plan.lora.rank is not None else ""
    shared, graphed, scaled = plan.layout.ep > 1, plan.fsdp.cuda_graphs, plan.fsdp.float8_scales
    given = Wrapping(reshard, ends_apart, reshard_ends, experts, shared, graphed, scaled, stored)
    options = replace(with_seams(options), tuning=tuning_of(plan))
    return _model(plan.model, recipes(plan), recompute, options, given)


@dataclass(frozen=True, slots=True)
class Wrapping:
    """How units are made of a model."""

    reshard: bool
    ends_apart: bool
    reshard_ends: bool
    experts: Cut | None
    """How experts are cut, if otherwise than other parameters."""
    shared: bool
    """Ranks share experts."""
    graphed: bool
    """The step runs in CUDA graphs."""
    scaled_before: bool
    """Shards that are gathered in 8 bits have their scales already."""
    stored: str
    """Dtype of all shards, where some are frozen."""


@lru_cache(maxsize=64)
def _spans(spec: ModelSpec, made: Recipes, recompute: ActivationCheckpointing, options: Options) -> tuple[Span, ...]:
    """Modules of a model, however units are made of them."""
    names = plain.layer_names(spec.layers)
    embedding, norm, head, loss = made.ends(options)
    blocks = made.blocks([recompute.of(at) for at in range(len(names))], [options] * len(names))
    if spec.tied_embeddings and made.chunks is None:
        embedding, head = with_waiting_gradient(embedding, head)
    embedding, *blocks = made.behind(embedding, blocks)
    layers = [Span(block, (name,)) for block, name in zip(blocks, names, strict=True)]
    after = [Span(norm, ("final_norm",)), Span(head, ("head",))]
    if made.chunks is None:
        after.append(Span(loss, ("loss",)))
    return (Span(embedding, ("embedding",)), *layers, *after)


@lru_cache(maxsize=64)
def _model(
    spec: ModelSpec, made: Recipes, recompute: ActivationCheckpointing, options: Options, given: Wrapping
) -> Model:
    """Of all plans whose layers and units are alike, whatever the number of shards and micro-batches."""
    names, spans = plain.layer_names(spec.layers), _spans(spec, made, recompute, options)
    if given.stored:
        spans = tuple(replace(one, module=with_stored(one.module, given.stored, given.stored)) for one in spans)
    last, every = len(names), range(len(names))
    kept = 0 if given.ends_apart else last
    own_cut = None if given.shared else given.experts
    units = [
        Unit(name, (), at, at, given.reshard and at != kept, bool(span.module.first.grad_input), cut=own_cut)
        for at, (name, span) in enumerate(zip(names, spans[1:], strict=False), 1)
    ]
    opening, closing = names[:1], names[-1:]
    if given.shared:
        assert given.experts is not None
        mixed = [spec.has_experts(at) for at in every]
        if made.titan.groups_experts:
            units = with_groups(units, mixed, given.experts)
            opening, closing = groups_of(units, 0), groups_of(units, -1)
        else:
            units = with_experts(units, mixed, given.experts)
    if spec.tied_embeddings:
        units = [Unit(chunked.ENDS, (), 0, last + 2, False, False), *units]
    elif given.ends_apart:
        ahead_of = given.shared
        behind = closing if ahead_of else ()
        apart = Unit(chunked.ENDS, (), last + 1, last + 2, given.reshard_ends, next_backward=behind)
        first = Unit(
            "embedding", (), 0, 0, given.reshard, with_gradient=False, next_forward=opening if ahead_of else ()
        )
        units = [first, *units, apart]
    else:
        units = [Unit(MODEL, (), 0, last + 2, False, False), *units]
    titan, shape = made.titan, made.shape
    tables = titan.buffers(spec, shape.s * shape.context, every)
    buffers = (*tables, *titan.given(shape), *places(shape, titan, every))
    buffers += made.beside(spans)
    own = with_parameters(spans, units, registering(titan, options.tuning))
    buffers += float8.scales(own, precomputed=given.scaled_before)
    if made.chunks is None:
        return Model(spans, own, "head", buffers)
    own = chunked.apart(own, accumulates=made.chunks.accumulates or given.graphed)
    return Model(spans, own, "final_norm", buffers)
