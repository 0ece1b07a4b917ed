"""Modules of a virtual stage: their names, its ends, its layers, and which of them run again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType

from ...layers.autograd import Recorder, Tensor
from ...layers.megatron_core import (
    bert,
    ends,
    graphs,
    mtp,
    offload,
    overlapped,
    replaced,
    t5,
)
from ...layers.megatron_core.distributed import distributed
from ...layers.megatron_core.ends import Role
from ...layers.megatron_core.shape import CoreShape
from ...layers.module import Interface, Module, Options, Parameter, Run, build, forward_alone
from ...layers.recompute import RERUN, recomputed_reentrant
from ...plan import megatron_layout
from ...plan.module_precision import wide_modules
from ...plan.plan import Pipeline, Recompute, ResolvedPlan
from ...plan.spec import LayerBlock
from ...tape.events import Category, Hook
from ...values import NamedTuple, replace

HEAD, LOSS = "head", "loss"
"""Entries: the output layer, with the loss where that is not apart, and what is behind it."""
DECODER, DECODER_EMBEDDING = "decoder.", "decoder_embedding"
"""Entries of a decoder behind an encoder: its layers begin so."""


End = Callable[..., Tensor]


class Ends(NamedTuple):
    """What a kind of model has beside layers."""

    batch: Callable[[CoreShape, Role], Module]
    embedding: End
    head: End
    masks_in_middle: bool = True
    """Stages in the middle are given masks."""
    others: Mapping[str, End] = MappingProxyType({})
    """Recipes of further entries, and of those that differ, by name."""


GPT = Ends(ends.batch, ends.gpt_embedding, ends.gpt_head, masks_in_middle=False)
ENDS = {
    "bert": Ends(
        lambda shape, role: bert.batch(shape, first=role in ("only", "first")), bert.bert_embedding, bert.bert_head
    ),
    "t5": Ends(
        lambda shape, role: t5.batch(shape),
        t5.encoder_embedding,
        t5.t5_head,
        others={
            "encoder_norm": t5.encoder_norm,
            DECODER_EMBEDDING: t5.decoder_embedding,
            "final_norm": t5.decoder_norm,
        },
    ),
}
"""Those of families whose model is not GPT's."""


def ends_of(shape: CoreShape) -> Ends:
    return ENDS.get(shape.spec.family, GPT)


@lru_cache(maxsize=1024)
def layers_module(
    shapes: tuple[CoreShape, ...], options: Options, *, recomputed: bool = False, requires_grad: bool = True
) -> Module:
    """One layer, or a group of layers under one recompute (``_checkpointed_forward``)."""
    return build("layer", partial(_group, shapes=shapes, recomputed=recomputed), _given(shapes, requires_grad), options)


@lru_cache(maxsize=1024)
def layer_forward(shape: CoreShape, options: Options, recomputed: bool) -> tuple[tuple[Parameter, ...], int]:
    """Of ``layers_module``: the parameters, and the bytes that forward leaves of a micro-batch that adds to
    gradients."""
    return forward_alone(partial(_group, shapes=(shape,), recomputed=recomputed), _given((shape,), True), options)


def _given(shapes: tuple[CoreShape, ...], requires_grad: bool) -> Interface:
    return Interface(shapes[0].hidden, hidden_dtype(shapes[0]), requires_grad)


def _group(r: Recorder, x: Tensor, *, shapes: tuple[CoreShape, ...], recomputed: bool) -> Run:
    if not recomputed:
        return Run(_layers(r, x, shapes))
    if all(map(replaced.is_empty, shapes)):
        return Run(replaced.recomputed_nothing(r, x))
    run = partial(distributed, shapes[0].t) if shapes[0].distributes else recomputed_reentrant
    out = run(r, partial(_again, shapes=shapes), (x,))
    ends.keep_mask(r, shapes[0])
    return Run(out)


def _again(r: Recorder, hidden: Tensor, *, shapes: Sequence[CoreShape]) -> Tensor:
    """A region that is recomputed, with the seam behind its second pass, which alone has a graph."""
    out = _layers(r, hidden, shapes)
    if r.seams and r.grad_enabled:
        r.seam(RERUN, Hook.AFTER_FORWARD)
    return out


def _layers(r: Recorder, hidden: Tensor, shapes: Sequence[CoreShape]) -> Tensor:
    for i, shape in enumerate(shapes):
        r.prefix = f"{i}." if len(shapes) > 1 else ""
        hidden = overlapped.layer(r, hidden, shape)
    r.prefix = ""
    return hidden


def hidden_dtype(shape: CoreShape) -> str:
    return "fp32" if shape.fp32_residual else shape.dtype


@lru_cache(maxsize=1024)
def end_module(name: str, shape: CoreShape, tied_here: bool, options: Options, *, every: bool = False) -> Module:
    """Embedding, final norm, head with loss, or what a chunk without layers runs before them. ``every``: hidden states
    of all depths come from the stage before."""

    known = ends_of(shape)

    def recipe(r: Recorder, x: Tensor) -> Run:
        if name == "embedding":
            return Run(known.embedding(r, shape, tied_here=tied_here))
        if name == "head" and shape.overlap is not None:
            r.seam(overlapped.TAIL, Hook.PIECE)
        if name in known.others:
            return Run(known.others[name](r, x, shape))
        if name == "final_norm":
            return Run(ends.final_norm(r, x, shape))
        if name == "output_layer":
            return Run(ends.output_layer(r, x, shape))
        if name == LOSS:
            return Run(None, loss=ends.gpt_loss_of(r, x, shape))
        if name == "passthrough":  # neither layers nor the final norm (``TransformerBlock.forward``)
            return Run(ends.cloned(r, x, "hidden_cloned"))
        if shape.spec.mtp_layers:
            return Run(None, loss=mtp.head(r, x, shape))
        return Run(None, loss=known.head(r, x, shape, tied_here=tied_here))

    behind = (name == "head" and shape.spec.mtp_layers) or (name == "passthrough" and every)
    hidden = None if name == "embedding" else mtp.hidden_of_all(shape) if behind else shape.hidden
    if shape.decoder and name in ("final_norm", "head"):
        hidden = t5.decoder_shape(shape).hidden
    interface = Interface(hidden, hidden_dtype(shape))
    logits = Category.LOGITS
    if name == "output_layer":
        interface = replace(interface, gradient=logits)
    if name == LOSS:
        whole = (shape.s, shape.b, shape.vocab // shape.t)
        interface = Interface(whole, shape.logits or hidden_dtype(shape), category=logits)
    present = frozenset({ends.WORD}) if name == "head" and tied_here else frozenset()
    if name == DECODER_EMBEDDING:
        present = frozenset({ends.WORD, "position.weight"})
    return build(name, recipe, interface, options, present)


@lru_cache(maxsize=1024)
def mtp_module(
    shape: CoreShape, layer_shape: CoreShape, embedded_here: bool, options: Options, *, recomputed: bool = False
) -> Module:
    """Layers of multi-token prediction. Their embedding is the stage's own where this has one."""
    if layer_shape.wide_further:
        shape, layer_shape = replace(shape, low=None), replace(layer_shape, low=None, wide=frozenset(), precision_of=())
    present = frozenset({ends.WORD, "position.weight"}) if embedded_here else frozenset()
    return build(
        "mtp",
        lambda r, x: Run(mtp.block(r, x, shape, layer_shape, overlapped.layer, recomputed)),
        Interface(shape.hidden, hidden_dtype(shape)),
        options,
        present,
    )


Keeping = tuple[tuple[str, tuple[str, ...]], ...]
"""Of entries of a chunk, modules whose saved tensors do not go to the host in the first micro-batch."""


def layer_shape_in(shape: CoreShape, name: str, keeping: Keeping = (), at_once: bool = False) -> CoreShape:
    """``shape`` as the entry ``name`` has it, and with those modules whose saved tensors go to the host there."""
    stack = shape.spec.mtp_pattern
    further = shape
    if stack:
        further = replace(shape, kind=stack, graphs=shape.graphs if graphs.STACK in (shape.graphs or ()) else None)
    own = further if name == "mtp" else layer_shape_of(shape, int(name.removeprefix("layer.")))
    if not shape.offload:
        return own
    groups, kept = offload.groups_of(own, experts=own.experts is not None), dict(keeping).get(name, ())
    if at_once:
        return replace(own, offload=tuple(group for group in groups if group not in kept))
    return replace(own, offload=groups, offload_kept=kept)


def kept_first(shape: CoreShape, chunks: Sequence[Sequence[str]]) -> tuple[Keeping, ...]:
    """The last group of every name in the chunk whose backward is first stays in the first micro-batch
    (``post_warmup_callback``); of a name that this chunk has not, that in the next one."""
    found: list[dict[str, tuple[str, ...]]] = [{} for _ in chunks]
    left = set(shape.offload)
    for at in reversed(range(len(chunks)) if left else ()):
        for name in reversed([one for one in chunks[at] if one == "mtp" or one.startswith("layer.")]):
            own = layer_shape_in(shape, name).offload
            mine = tuple(group for group in own if group in left)
            left -= set(mine)
            if mine:
                found[at][name] = mine
    return tuple(tuple(one.items()) for one in found)


@lru_cache(maxsize=1024)
def module_shapes(shape: CoreShape) -> tuple[CoreShape, CoreShape]:
    """Of layers, which have no loss, and of ends, which are not recomputed: equal ones are recorded once."""
    layers = replace(shape, cross_entropy="unfused", per_token_loss=False, logits=None, defers=False)
    layers = replace(layers, detaches_heads=False, mixes_states=False)
    ends_shape = replace(shape, recompute_modules=(), experts=None, sixteen_bit=(0, 0), layers=0)
    ends_shape = replace(ends_shape, offload=(), graphs=None, defers=False, mlp_chunks=1, largest_logit=False)
    ends_shape = replace(ends_shape, precision_of=(), starts=())
    ends_shape = replace(ends_shape, distributes=False, fuses_operations=False, mamba_apart=False, mamba_states=None)
    return layers, replace(ends_shape, te_activation=False, norm_takes_residual=False, joint_latent_down=False)


@lru_cache(maxsize=1 << 12)
def layer_shapes(shape: CoreShape, entries: tuple[str, ...]) -> tuple[CoreShape, ...]:
    """``shape`` as each layer among ``entries`` has it."""
    return tuple([layer_shape_of(shape, int(name[6:])) for name in entries if is_layer(name)])


def is_layer(entry: str) -> bool:
    return entry.startswith("layer.")


def layer_shape_of(shape: CoreShape, layer: int) -> CoreShape:
    """``shape`` as ``layer``, numbered from 0, has it: with experts or without, in 8 bits or in 16. One object for
    layers that are alike."""
    spec, experts, turns = shape.spec, shape.experts, shape.turns
    first, last = shape.sixteen_bit
    wide = layer < first or layer >= shape.layers - last
    if interval := spec.nope_interval:
        turns = (layer + 1) % interval != 0
    imbalance = None
    if experts is not None and not spec.has_experts(layer):
        experts = None
    elif experts is not None and experts.imbalances:
        imbalance = experts.imbalances[sum(map(spec.has_experts, range(layer)))]
    wide, routed = bool(shape.layers) and wide, experts is not None
    own = replace(shape, wide=_wide(shape, layer), precision_of=(), starts=()) if shape.precision_of else shape
    if spec.alternating_windows and shape.cp > 1 and shape.cp_communication == "all_gather":
        own = _windowed(own, layer % 2 == 0)
    linear = spec.is_linear(layer)
    return _alike(own, wide, spec.kind_of(layer), turns, linear, routed, imbalance, spec.block_of(layer))


@lru_cache(maxsize=1024)
def _windowed(shape: CoreShape, windowed: bool) -> CoreShape:
    """A layer's ``shape`` with the window in all layers or in none (``is_layer_window_attention``, every second one),
    which tells how many keys ``AttnFuncWithCPAndKVAllGather`` copies; other ways have tensors of the same sizes."""
    update = {"alternating_windows": False, **({} if windowed else {"sliding_window": None})}
    return replace(shape, spec=shape.spec.model_copy(update=update))


def _wide(shape: CoreShape, layer: int) -> frozenset[str]:
    """Modules of ``layer`` in 16 bits: their names number the layers of a chunk."""
    start = max((one for one in shape.starts if one <= layer), default=0)
    return wide_modules(shape.precision_of, layer - start)


@lru_cache(maxsize=1 << 12)
def _alike(
    shape: CoreShape,
    wide: bool,
    kind: str,
    turns: bool,
    linear: bool,
    has_experts: bool,
    imbalance: float | None,
    block: LayerBlock | None,
) -> CoreShape:
    """``shape`` as all layers have it that agree in this."""
    shape = shape if block is None else shape.with_block(block)
    experts = shape.experts if has_experts else None
    if experts is not None and imbalance is not None:
        experts = replace(experts, imbalance=imbalance, imbalances=())
    low = None if wide else shape.low
    shape = replace(shape, wide=shape.wide if low is not None else frozenset())
    shape = replace(shape, sixteen_bit=(0, 0), layers=0, low=low, kind=kind or shape.kind)
    return replace(shape, turns=turns, linear=linear, experts=experts)


def makes_masks(shape: CoreShape, role: Role) -> bool:
    """Local layers of a stage in the middle, which is given no mask, make their own."""
    return role == "middle" and shape.implementation == "local" and not ends_of(shape).masks_in_middle


def recompute_groups(recompute: Recompute, entries: Sequence[str]) -> list[list[str]]:
    """Layers that are recomputed together, everything else alone (``_checkpointed_forward``, uniform)."""
    size = recompute.layers or 1 if recompute.mode == "full" and recompute.method == "uniform" else 1
    groups: list[list[str]] = []
    for entry in entries:
        together = groups and entry.startswith("layer.") and groups[-1][0].startswith("layer.")
        if together and len(groups[-1]) < size:
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return groups


def recomputed(recompute: Recompute, entries: Sequence[str]) -> frozenset[str]:
    """The layers among ``entries`` that are run again in backward; those of multi-token prediction, too, but for some
    of a stage's layers (``MultiTokenPredictionLayer._checkpointed_forward`` skips block recompute)."""
    layers = [entry for entry in entries if entry.startswith("layer.")]
    count = 0 if recompute.mode != "full" else None if recompute.method == "uniform" else recompute.layers or None
    return frozenset(layers[:count]) | ({"mtp"} & set(entries) if recomputes_further(recompute) else set())


def recomputes_further(recompute: Recompute) -> bool:
    """Layers of multi-token prediction run again in backward."""
    return recompute.mode == "full" and recompute.method == "uniform"


def role_of(entries: Sequence[str]) -> Role:
    """A stage with multi-token prediction has all of the batch (``mtp_on_this_rank``)."""
    first, last = "embedding" in entries or "mtp" in entries, "head" in entries or "mtp" in entries
    return "only" if first and last else "first" if first else "last" if last else "middle"


def stage_entries(plan: ResolvedPlan) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Names of the entries of every chunk of every stage."""
    layers = plan.model.layers
    if plan.batch.decoder_seq is not None:
        encoder = ("embedding", *(f"layer.{at}" for at in range(layers)), "encoder_norm")
        decoder = (DECODER_EMBEDDING, *(f"{DECODER}{at}" for at in range(layers)), "final_norm", "head")
        return (((*encoder, *decoder),),)
    has_mtp = plan.model.mtp_layers > 0
    return _named_entries(plan.model.layers, plan.layout.pp, plan.layout.vpp, plan.pipeline, has_mtp)


@lru_cache(maxsize=1024)
def _named_entries(
    layers: int, stages: int, chunks: int, pipeline: Pipeline, has_mtp: bool
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    found = megatron_layout.stages(
        layers,
        stages,
        chunks,
        first_layers=pipeline.first_layers,
        last_layers=pipeline.last_layers,
        count_embedding=pipeline.count_embedding,
        count_loss=pipeline.count_loss,
        layout=pipeline.layout,
    )
    apart = any(chunk.further for stage in found for chunk in stage)
    return tuple(tuple(_entries(chunk, layers, has_mtp, apart) for chunk in stage) for stage in found)


def _entries(chunk: megatron_layout.Chunk, layers: int, has_mtp: bool, apart: bool) -> tuple[str, ...]:
    """The final norm is where the head is; before multi-token prediction, where the last layer is
    (``has_final_layernorm_in_this_stage``). That is where the head is, or ``apart``, where a layout string says."""
    normed = layers - 1 in chunk.layers if has_mtp else chunk.head
    return (
        *(("embedding",) if chunk.embedding else ()),
        *(f"layer.{i}" for i in chunk.layers),
        *(("final_norm",) if normed else ()),
        *(("mtp",) if has_mtp and (chunk.further if apart else chunk.head) else ()),
        *(("head",) if chunk.head else ()),
    )
