"""PyTorch and Hugging Face transformers with nothing in between: ``single``, ``ddp``, ``device-map``.

One micro-batch at a time: forward, backward, and after the last one the optimizer step and
``zero_grad(set_to_none=True)``. As in transformers' Trainer, the model's output (and its logits) is
gone before backward begins.

What a model of transformers holds besides parameters: its inputs and its registered buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice

from ...device.gpus import GPUS, MULTIPROCESSORS
from ...families import family
from ...layers.coverage import TRANSFORMERS, check_covered, check_kernel, check_recompute
from ...layers.edges import arrive, depart, with_waiting_gradient
from ...layers.fused_attention import Release
from ...layers.fused_losses import LOG_PROBABILITIES, HeadLoss
from ...layers.huggingface import LayerShape
from ...layers.kernels import LIGER_ROPE, UNSLOTH_ROPE, Kernels, RmsNorm, liger_swiglu
from ...layers.module import Module, Options, hold_bytes
from ...optimizers.base import full, optimizer_states
from ...optimizers.bitsandbytes import managed_bytes, quantisation_maps
from ...plan.loss_checks import FUSED, liger_version
from ...plan.plan import ResolvedPlan
from ...plan.releases import (
    CLAMPED_SLICES,
    MASKS,
    PACKAGES,
    SUMMED_POSITIONS,
    WIDEST_FLASH,
    casts_back,
    parsed,
    release,
    sdpa_kernel,
    shown,
)
from ...plan.spec import of_any_depth
from ...plan.training_loops import NONE
from ...plan.tuning_checks import is_tuned
from ...schedules.one_chunk import one_chunk
from ...tape.events import Category, Hold, Stretch, rounded
from ...tape.program import Program, Span
from ...values import replace
from .. import framework
from . import preferences, returned, trainer
from .contexts import check_contexts, outlived
from .recipes import (
    EMBEDDED,
    TABLES,
    Kinds,
    LayerKind,
    Row,
    casts_tables,
    end_modules,
    hidden_interface,
    is_drop_of_input,
    keeps_embedded,
    kinds_of,
    layer_module,
    layer_row,
    layers,
    leaves_embedding,
    returns,
    with_kept_input,
    with_leaf,
)
from .trainer import FOUND_INF, SCALER, optimizer_step, registered, tensors_of, trainer_step
from .tuned import check_tuned, frozen_layer, shared_table, trained_only, trains_layers, tuned_states, tuning_of, warmup


def inputs(shape: LayerShape, stage: int, names: Sequence[str] = NONE.inputs) -> list[Hold]:
    """Token ids and labels, (b, s) int64 each, on the first device."""
    if stage:
        return []
    size = hold_bytes((shape.b, shape.s), "int64")
    return [Hold(0, size, Category.INPUTS, name, (shape.b, shape.s), "int64") for name in names]


def buffers(plan: ResolvedPlan, stage: int) -> list[Hold]:
    """Registered buffers: rotary frequencies, BERT's position and token-type ids, the masks of 2020's GPT-2."""
    spec = plan.model
    kept = Category.BUFFERS
    result: list[Hold] = []
    if plan.code == "2020":
        assert plan.device_map is not None or plan.framework != "device-map"
        count = len(plan.device_map[stage]) if plan.device_map is not None else spec.layers
        n = spec.positions_max
        for _ in range(count):
            result.append(Hold(0, hold_bytes((n, n), "uint8"), kept, "causal_mask", (1, 1, n, n), "uint8"))
            result.append(Hold(0, rounded(4), kept, "masked_bias", (), "fp32"))
    if spec.router_expert_bias:
        placed = plan.device_map[stage] if plan.device_map is not None else range(spec.layers)
        size = (spec.experts,)
        bias = Hold(0, hold_bytes(size, "fp32"), kept, "e_score_correction_bias", size, "fp32")
        result += [bias] * sum(map(spec.has_experts, placed))
    if family(spec.family).scales_layers:
        placed = plan.device_map[stage] if plan.device_map is not None else range(spec.layers)
        stored = layer_shape(plan).stored or layer_shape(plan).dtype
        result += [Hold(0, hold_bytes((1,), stored), kept, "layer_scalar", (1,), stored) for _ in placed]
    if family(spec.family).tables_in_layers:
        count = len(plan.device_map[stage]) if plan.device_map is not None else spec.layers
        table = (spec.positions_max, spec.rotary_features)
        result += [Hold(0, hold_bytes(table, "fp32"), kept, "embed_positions", table, "fp32") for _ in range(count)]
        return result
    if stage:
        return result
    if spec.positions == "rotary":
        older = release(plan, "transformers") < family(spec.family).as_llama_since
        names = ["inv_freq"] * spec.layers if older else ["inv_freq", "original_inv_freq"]
        for own in (spec, spec.of_full_layers)[: 1 + spec.turns_twice]:
            pairs = ((own.rope_head_dim or own.rotary_features) // 2,)
            result += [Hold(0, hold_bytes(pairs, "fp32"), kept, name, pairs, "fp32") for name in names]
    if family(spec.family).scale_in_embedding:
        result.append(Hold(0, rounded(4), kept, "embedding_scale", (), "fp32"))
    if family(spec.family).mask_buffer:
        n = spec.positions_max
        result.append(Hold(0, hold_bytes((n, n), "bool"), kept, "bias", (n, n), "bool"))
    if spec.token_types:
        n = spec.positions_max
        result += [
            Hold(0, hold_bytes((n,), "int64"), kept, name, (1, n), "int64")
            for name in ("position_ids", "token_type_ids")
        ]
    return result


# -- programs ------------------------------------------------------------------------------------------


def _everything(embedding: Module) -> frozenset[int]:
    return frozenset(hold.tensor for hold in embedding.shares)


def layer_shape(plan: ResolvedPlan) -> LayerShape:
    """Sizes of one micro-batch."""
    spec = of_any_depth(plan.model)
    if not plan.trainer.kind.drops_out:
        spec = preferences.without_dropout(spec)
    in_fp32 = plan.quantisation.prepared and not casts_back(plan)
    dtype = "fp32" if in_fp32 else plan.precision.stored
    stored = plan.fsdp.parameters if plan.framework == "fsdp" and plan.fsdp.parameters != dtype else ""
    stored = plan.precision.dtype if in_fp32 else stored
    return LayerShape(
        spec,
        plan.sequences,
        plan.batch.seq,
        dtype,
        plan.flash,
        stored,
        release(plan, "transformers"),
        bool(plan.recompute.reentrant),
        plan.precision.dtype if plan.flash and plan.attention != "flash" else "",
        _package(plan),
        torch=parsed(plan.torch) if plan.torch is not None and plan.code != "2020" else CLAMPED_SLICES,
        kernel=sdpa_kernel(plan),
        full_kernel=sdpa_kernel(plan, full=True),
        masked_kernel=plan.masked_kernel,
        padded=plan.padded,
    )


def _package(plan: ResolvedPlan) -> Release:
    """The flash-attention package that the plan names."""
    number = list(PACKAGES).index(plan.attention) + 2 if plan.attention in PACKAGES else 2
    return Release(number, _capability(plan)[0]) if number == 4 else Release(number)


def _capability(plan: ResolvedPlan) -> tuple[int, int]:
    """Of the GPU; an H100's without one."""
    gpu = GPUS.get(plan.hardware.gpu or "")
    return (gpu.compute_capability if gpu is not None else None) or (9, 0)


def head_loss(plan: ResolvedPlan) -> HeadLoss:
    """The loss as the head's recipe takes it."""
    loss = plan.loss
    gpu = GPUS.get(plan.hardware.gpu or "")
    capability = gpu.compute_capability if gpu is not None else None
    return HeadLoss(
        kind=plan.loop.loss_of if plan.loop.own_loss else loss.kind,
        outputs=plan.trainer.kind.beside,
        reduced=plan.trainer.kind.reduced,
        chunks=loss.chunks,
        fp32_accumulators=loss.fp32_accumulators,
        liger=liger_version(loss),
        fused_addmm=capability is None or capability >= (8, 0),
        logits_to_keep=plan.trainer.completion_length or loss.logits_to_keep,
        trl=preferences.released(plan),
        accumulates=loss.kind == "chunked" and plan.microbatches > 1,
    )


def recipe_options(plan: ResolvedPlan, options: Options) -> Options:
    """``options`` with what the plan says of autocast, adapters and what the model returns."""
    shape, autocast = layer_shape(plan), plan.precision.dtype if plan.precision.autocast else None
    return replace(
        options,
        autocast=autocast,
        parameters=shape.dtype if autocast else None,
        converts_outputs=trainer.converts_outputs(plan),
        tuning=tuning_of(plan),
        kernels=kernels_of(plan),
        casts_given=framework(plan.framework).casts_given(plan),
    )


def kernels_of(plan: ResolvedPlan) -> Kernels | None:
    """What the plan's pieces are in the recipes; ``None`` where all are eager."""
    given = plan.kernels
    processors = MULTIPROCESSORS.get(plan.hardware.gpu or "", LIKELY_PROCESSORS)
    sums_frozen = liger_version(plan.loss) < SKIPS_FROZEN
    made = Kernels(
        norm={"liger": RmsNorm(processors, sums_frozen), "unsloth": RmsNorm()}.get(given.norm or ""),
        rope={"liger": LIGER_ROPE, "unsloth": UNSLOTH_ROPE}.get(given.rope or ""),
        gated={"liger": liger_swiglu}.get(given.mlp or ""),
        delta=given.delta == "fla",
    )
    return None if made == Kernels() else made


SKIPS_FROZEN = (0, 8, 5)
"""Liger from which norms sum no gradient of a frozen weight."""

LIKELY_PROCESSORS = 132
"""Multiprocessors of a GPU that nobody named: an H100's."""


def check(plan: ResolvedPlan) -> None:
    """Refuses what these recipes do not cover."""
    recompute, precision = plan.recompute, plan.precision
    check_covered(plan.model, TRANSFORMERS, plan.framework)
    check_release(plan)
    if recompute.mode == "full":
        check_recompute(plan.model)
    plan.refuse(
        ("recompute.mode", recompute.mode == "selective", "must be none or full: transformers recomputes whole layers"),
        (
            "recompute.method",
            recompute.mode == "full" and (recompute.method, recompute.layers) != ("uniform", 1),
            "must be uniform with layers 1: transformers recomputes every layer by itself",
        ),
        (
            "precision.gradients",
            precision.gradients != precision.stored,
            f"must be {precision.stored}: gradients have the parameters' dtype in this framework",
        ),
    )
    if plan.flash:
        check_flash(plan)
    check_tuned(plan)
    preferences.check(plan)


def check_release(plan: ResolvedPlan) -> None:
    """Releases of transformers whose layers nobody has compared with the recipes."""
    known, named = family(plan.model.family), plan.versions.get("transformers")
    if named is None:
        return
    before, since = known.not_followed or ((0,), (0,))
    plan.refuse(
        (
            "versions.transformers",
            parsed(named) < known.since,
            f"must be {shown(known.since)} or later for family {known.name}: earlier layers are not modelled",
        ),
        (
            "versions.transformers",
            before <= parsed(named) < since,
            f"must be before {shown(before)}, or {shown(since)} or later for family {known.name}: layers between are "
            "not modelled",
        ),
        (
            "attention",
            parsed(named) < known.alone_before and plan.attention != "flash_attention_2",
            f"must be flash_attention_2 with transformers {named}: the family's other attention is not modelled",
        ),
        (
            "attention",
            parsed(named) < SUMMED_POSITIONS and plan.model.attention_chunk and not plan.flash,
            f"must be flash with transformers {named}: masks of chunks of releases before "
            f"{shown(SUMMED_POSITIONS)} are not modelled",
        ),
        (
            "attention",
            parsed(named) < MASKS and not plan.flash,
            f"must be flash or flash_attention_2 with transformers {named}: masks of releases before "
            f"{shown(MASKS)} are not modelled",
        ),
    )


def check_flash(plan: ResolvedPlan) -> None:
    """Where PyTorch would not take its flash kernel (``sdp_utils.cpp``), another one has another footprint. The
    package's takes windows (``window_size``), and casts what it is given to 16 bits."""
    spec, seq, named = plan.model, plan.batch.seq, plan.attention
    if named == "flash":
        check_kernel(spec)
    plan.refuse(
        (
            "attention",
            plan.precision.dtype == "fp32" and named != "flash",
            "must be sdpa or eager with dtype fp32: the package takes fp16 and bf16 only",
        ),
        (
            "attention",
            named != "flash" and _capability(plan) < (8, 0),
            f"must be sdpa or eager on {plan.hardware.gpu}: the package needs a GPU from Ampere on",
        ),
        (
            "attention",
            spec.head_dim > WIDEST_FLASH,
            f"must be eager: the flash kernel takes heads of up to {WIDEST_FLASH}, not {spec.head_dim}",
        ),
        (
            "attention",
            named != "flash" and spec.full_head_dim > WIDEST_FLASH,
            f"must be sdpa or eager: the package takes heads of up to {WIDEST_FLASH} features, not of "
            f"{spec.full_head_dim} as layers have that see all tokens",
        ),
        (
            "attention",
            spec.full_head_dim and plan.precision.dtype != "fp32" and sdpa_kernel(plan, full=True) == "math",
            f"must be eager: no fused kernel of PyTorch takes heads of {spec.full_head_dim} features, which layers "
            "have that see all tokens",
        ),
    )
    if named != "flash":
        if why := family(spec.family).no_package:
            instead = "eager" if family(spec.family).no_flash else "flash (sdpa) or eager"
            raise plan.wrong("attention", f"must be {instead} for family {spec.family}: {why}")
        if release(plan, "transformers") < (since := PACKAGES[named]):
            raise plan.wrong("attention", f"comes with transformers {shown(since)}: choose flash_attention_2")
        if named == "flash_attention_4":
            _check_fourth(plan)
        return
    if plan.quantisation.prepared and not plan.precision.autocast:
        raise plan.wrong(
            "attention",
            "must be eager or flash_attention_2 with quantisation.prepared and without autocast: hidden states "
            "are fp32, and what sdpa runs of them is not modelled",
        )
    if plan.masks_windows:
        window, older = spec.sliding_window or 0, release(plan, "transformers")
        passes = f"for sequences of {seq}: from the sliding window of {window} on transformers passes a mask, which"
        none = f"--seq {window - 1} needs none"
        plan.refuse(
            (
                "attention",
                older < MASKS,
                f"must be flash_attention_2 {passes} in {shown(older)} is one of before {shown(MASKS)}, not modelled; "
                f"{none}",
            ),
            (
                "attention",
                plan.masked_kernel == "math",
                f"must be flash_attention_2 or eager {passes} no fused kernel of PyTorch takes for heads of "
                f"{spec.head_dim} features; {none}",
            ),
        )
    if (size := spec.attention_chunk) is not None and seq >= size:
        raise plan.wrong(
            "attention",
            f"must be eager for sequences of {seq}: from the chunk of {size} on transformers passes a mask, and "
            f"PyTorch leaves its flash kernel; --seq {size - 1} needs none",
        )


def _check_fourth(plan: ResolvedPlan) -> None:
    """What flash-attn 4 trains (``flash_attn/cute/interface.py``, ``_validate_head_dims``, ``_flash_attn_bwd``)."""
    d, major = plan.model.head_dim, _capability(plan)[0]
    with_heads = f"must be flash_attention_2 with heads of {d} features"
    plan.refuse(
        (
            "attention",
            major < 9,
            f"must be flash_attention_2 on {plan.hardware.gpu}: release 4 has a backward from Hopper on",
        ),
        ("attention", d % 8, f"{with_heads}: release 4 takes multiples of 8"),
        (
            "attention",
            major in (10, 11) and d > 128 and d != 256,
            f"{with_heads}: on Blackwell release 4 takes up to 128, and 256",
        ),
    )


@lru_cache(maxsize=128)
def layer_names(count: int) -> tuple[str, ...]:
    return tuple(f"layer.{i}" for i in range(count))


def programs(plan: ResolvedPlan, options: Options) -> tuple[Program, ...]:
    """One program per device: of a device map, embedding and head on the first, final norm on the last,
    as ``parallelize`` places them."""
    check(plan)
    shape, options = layer_shape(plan), recipe_options(plan, options)
    compiled_parts = None
    if plan.compile and framework(plan.framework).supports.compiled_as == "layers":
        from .compiled import compiled_of

        compiled_parts = compiled_of(plan, shape, options)
    elif plan.compile:
        from . import compiled

        return (_program(plan, shape, 0, (Span(compiled.module(plan, options), ("model",)),), options),)
    autocast, tuning = options.autocast, options.tuning
    recompute, later = plan.recompute.mode == "full", ""
    if tuning is not None and tuning.fp32:
        later = layer_module(shape.of_layer(0), recompute, plan.code, options).first.output_dtype
    embedding, norm, head = end_modules(shape, plan.code, options, head_loss(plan), dtype=later)
    if not embedding.first.backward and not trains_layers(plan, tuning):
        embedding, norm, head = end_modules(shape, plan.code, options, head_loss(plan), False, later)
    if compiled_parts is not None:
        embedding, norm, head = compiled_parts.ends(embedding, norm, head)
    returning = head.first.grad_input != 0
    waits = plan.model.tied_embeddings and plan.loss.kind != "chunked"  # each chunk has a backward of its own
    if waits and (tuning is None or tuning.trains("word.weight")):
        fused = head_loss(plan).kind in (*FUSED, LOG_PROBABILITIES)
        embedding, head = with_waiting_gradient(embedding, head, apart=options.kernel_workspaces and not fused)

    def make(kind: LayerKind, ended: frozenset[int]) -> Module:
        if compiled_parts is not None:
            return compiled_parts.layer(ended)
        own = shape.of_kind(kind.mixture, kind.turns, kind.linear, kind.window, kind.full)
        return layer_module(own, recompute, plan.code, kind.options, ended, kind.requires_grad, kind.dtype)

    def trains(kind: LayerKind) -> bool:
        return any(one.trained for one in make(kind, frozenset()).parameters)

    def kinds(numbers: Iterable[int]) -> Kinds:
        return kinds_of(plan, options, bool(embedding.first.backward), numbers, trains, later)

    everything = _everything(embedding) - {EMBEDDED} - (TABLES if casts_tables(shape, options) else frozenset())
    numbers = range(plan.model.layers) if plan.device_map is None else plan.device_map[min(plan.device_map)]
    keeps = recompute and compiled_parts is None
    row, kept = layer_row(make, kinds(numbers), everything, keeps, [*map(plan.model.sees_all, numbers)])
    if keeps_embedded(shape):
        embedding, row, kept = _with_embedded(embedding, row, kept, leaves_embedding(tuning, shape))
    first = [Span(embedding, ("embedding",))]
    normed = [Span(norm, ("final_norm",))] if norm is not None else []
    head = preferences.returning(head, head_loss(plan))
    last = [Span(returns(embedding, kept), ("return",)), Span(head, ("head",))]
    if plan.framework != "device-map":
        middle = layers(row, layer_names(plan.model.layers))
        whole: tuple[Span, ...] = (*first, *middle, *normed, *last)
        what = preferences.returned(plan, head_loss(plan))
        whole = returned.kept(whole, what, EMBEDDED) if what else whole
        if plan.runs_reference:
            own, keeps = reference(plan, shape, options, later), keeps_embedded(shape)
            of_own, passes = preferences.of_reference(plan, what), 1 + plan.loop.mismatched
            whole = preferences.with_reference(whole, own, keeps, of_own, passes)
        if plan.loop.mismatched:
            own, keeps = without_graph(plan, shape, options, later), keeps_embedded(shape)
            whole = preferences.scored_before(whole, own, keeps)
        check_contexts(plan, whole)
        whole = outlived(whole)
        return (_program(plan, shape, 0, whole, options),)
    assert plan.device_map is not None
    hidden = (shape.b, shape.s, shape.spec.hidden)
    dtype = hidden_interface(shape, autocast=autocast, dtype=later).dtype
    devices = sorted(plan.device_map)
    result = []
    going = True
    for device, following in zip(devices, [*devices[1:], None], strict=True):
        names = tuple(f"layer.{i}" for i in plan.device_map[device])
        if device != devices[0]:
            row, _ = layer_row(make, kinds(plan.device_map[device]), frozenset(), False, ())
            first = [Span(arrive(hidden, dtype, going), ("arrive",))]
        spans = [*first, *layers(row, names), *(normed if following is None else [])]
        if len(devices) > 1:
            going = returning if following is None else kinds(plan.device_map[following])[0][0].requires_grad
            spans.append(Span(depart(hidden, dtype, going), ("depart",)))
        if device == devices[0]:
            spans += [*([Span(arrive(hidden, dtype, returning), ("arrive",))] if len(devices) > 1 else []), *last]
        result.append(_program(plan, shape, device, tuple(spans), options))
    return tuple(result)


def reference(
    plan: ResolvedPlan, shape: LayerShape, options: Options, later: str, *, seams: bool = False
) -> tuple[Span, ...]:
    """The reference's modules, of which every layer but the first runs once: the model's own without adapters."""
    tuning = options.tuning and replace(frozen_layer(options.tuning), fused=False)
    return without_graph(plan, shape, replace(options, tuning=tuning, seams=seams), later)


def without_graph(plan: ResolvedPlan, shape: LayerShape, options: Options, later: str) -> tuple[Span, ...]:
    """The model's modules as they score a batch, with what ``options`` say of adapters."""
    loss = preferences.loss_of_reference(head_loss(plan))
    embedding, norm, head = end_modules(shape, plan.code, options, loss, dtype=later)
    names = layer_names(plan.model.layers)

    def kind(number: int) -> tuple[bool, bool]:
        return plan.model.is_linear(number), plan.model.is_full(number)

    def layer(number: int) -> Span:
        linear, full = kind(number)
        own = shape.of_kind(shape.mixture, shape.turns, linear, full=full)
        return Span(layer_module(own, False, plan.code, options), (names[number],))

    count = preferences.layers_of_reference(plan, loss)
    others = (number for number in range(count, len(names)) if kind(number) != kind(0))
    middle = [*map(layer, range(count)), *map(layer, islice(others, 1))]
    normed = [Span(norm, ("final_norm",))] if norm is not None else []
    return (Span(embedding, ("embedding",)), *middle, *normed, Span(preferences.returning(head, loss), ("head",)))


def _with_embedded(embedding: Module, row: Row, kept: frozenset[int], leaf: bool) -> tuple[Module, Row, frozenset[int]]:
    """The embedding's output as the first layer's input, which ``model.forward`` keeps in a variable. ``leaf``: it
    requires a gradient without having a node."""
    foremost, count = row[0]
    if leaf or not any(map(is_drop_of_input, foremost.first.forward)):
        kept = kept | {EMBEDDED}
    foremost = with_kept_input(foremost)
    if leaf:
        embedding, foremost = with_leaf(embedding, foremost)
    further = [(row[0][0], count - 1)] if count > 1 else []
    return embedding, [(foremost, 1), *further, *row[1:]], kept


def _program(plan: ResolvedPlan, shape: LayerShape, stage: int, spans: tuple[Span, ...], options: Options) -> Program:
    dtype = plan.precision.stored
    states = (
        full("parameter", Category.PARAMETERS, dtype),
        *optimizer_states(plan.optimizer, dtype, embeddings_32bit=plan.optimizer.embeddings_32bit),
    )
    groups = tuple((span.module.parameters, len(span.names)) for span in spans if span.module.parameters)
    at_once = plan.microbatches if trainer.runs(plan) else 1
    given = inputs(shape, stage, plan.loop.inputs)
    extra = [*given * at_once, *buffers(plan, stage), *quantisation_maps(plan.optimizer)]
    extra += preferences.batch(plan, (shape.b, shape.s)) * at_once
    if preferences.has_model(plan):
        tensors = [one for span in spans for _ in span.names for one in span.module.parameters]
        extra += preferences.reference_parameters(tensors, buffers(plan, stage), dtype)
    extra += preferences.generation(plan)
    groups = trained = registered(groups)
    if is_tuned(plan):
        states, dtype = tuned_states(plan.optimizer, dtype), plan.lora.dtype or dtype
        extra += shared_table(plan)
    if is_tuned(plan) or family(plan.model.family).idle:
        trained = trained_only(groups)
    before = warmup(plan, groups)
    step, clipping = optimizer_step(trained, plan.optimizer, dtype), 0
    if trainer.runs(plan):
        extra += trainer.SCALARS
        step, clipping = trainer_step(trained, plan.optimizer, dtype, options.kernel_workspaces)
    if plan.precision.autocast and plan.precision.dtype == "fp16":
        extra += SCALER
        step = Stretch((FOUND_INF, *step, FOUND_INF.end))
        clipping += bool(clipping)
    return Program(
        stage=stage,
        ranks=tuple(range(plan.layout.dp)) if plan.framework == "ddp" else (stage,),
        entries=tuple(name for span in spans if span.module.name not in EDGES for name in span.names),
        order=one_chunk(spans, plan.microbatches),
        states=states,
        extra=tuple(extra),
        step=step,
        before=before,
        clipping=clipping,
        groups=groups,
        managed=managed_bytes(plan.optimizer, tensors_of(trained)),
        evaluated=trainer.kept_logits(plan, shape) if not stage else (0, 0),
        late_states=True,
    )


EDGES = frozenset({"return", "arrive", "depart"})
"""Modules that are no entries of the layer list."""
