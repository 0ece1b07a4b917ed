"""What a user should know about a plan: warnings that teach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .device.gpus import GPUS
from .frameworks import framework
from .layers.module import hold_bytes
from .plan.checks import no_padding
from .plan.lora import left_out, named_layers
from .plan.loss_checks import FUSED
from .plan.plan import ResolvedPlan
from .plan.releases import WIDEST_FLASH, sdpa_kernel, takes_package, unmasked_scores
from .plan.traced_spec import TracedSpec
from .result import Notice
from .tape.events import Category, Hold
from .tape.program import Program

GIB, MIB = 2**30, 2**20

OF_BITSANDBYTES = ("nf4", "fp4", "int8")


def warnings(plan: ResolvedPlan, programs: Sequence[Program]) -> tuple[Notice, ...]:
    """All warnings for ``plan``, most consequential first."""
    return tuple(
        notice
        for source in (
            _targets,
            _logits,
            _compiled,
            _managed_states,
            _whole_experts,
            _scores,
            _masks,
            _delta_operators,
            _padding,
            _traced_masks,
            _traced_operators,
            framework(plan.framework).notices,
            _padded_vocab,
            _batch,
            _nodes,
        )
        for notice in source(plan, programs)
    )


def _targets(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """Names beside others that no layer has: an adapter less than was meant, if one is misspelt."""
    if nothing := left_out(plan):
        yield Notice(
            "targets-left-out",
            f"{plan.model.name} has no module called {' or '.join(nothing)} (lora.targets), so peft adds no adapter "
            f"there; {named_layers(plan)}",
        )


def _whole_experts(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """Stacks of experts, which bitsandbytes leaves as they are where every linear layer is quantised
    (``replace_with_bnb_linear`` of transformers 5, which looks for ``nn.Linear`` alone)."""
    experts = plan.model.experts
    if not experts or plan.quantisation.kind not in OF_BITSANDBYTES:
        return
    held = (one for program in programs for one in program.parameter_tensors())
    stacks = [one for one in held if len(one.shape) == 3 and one.shape[0] == experts]
    if size := sum(hold_bytes(one.shape, plan.precision.dtype) for one in stacks):
        yield Notice(
            "experts-not-quantised",
            f"experts stay in {plan.precision.dtype} and take {size / GIB:.2f} GiB: transformers 5 keeps the experts "
            "of a layer in one parameter, and bitsandbytes quantises only linear layers (in transformers 4 each "
            "expert of most models had linear layers of its own)",
        )


def _scores(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """Scores of attention in fp32, where one layer's take a quarter of a gibibyte or more."""
    b, s, own = plan.sequences, plan.batch.seq, framework(plan.framework)
    if isinstance(plan.model, TracedSpec) or own.own_layers or plan.code == "2020" or sdpa_kernel(plan) == "flash":
        return
    size = hold_bytes((b, plan.model.heads, s, s), "fp32")
    of_some = unmasked_scores(plan)
    if 4 * size < GIB or not (of_some or own.attention_words(plan) in ("math", "eager")):
        return
    if plan.attention == "eager":
        why = "attention is eager, an upper bound of transformers' default, sdpa"
    else:
        where = " in layers without a window" if of_some else ""
        why = f"transformers' default, sdpa, keeps scores{where}: no fused kernel of PyTorch takes such heads in fp32"
    yield Notice(
        "scores-kept",
        f"{why}: each score tensor of a layer has {size:,} bytes ({size / GIB:.2f} GiB); a 16-bit dtype keeps none",
    )


def _masks(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """Masks of sliding windows that sdpa copies, where those of all layers take half a gibibyte or more."""
    spec = plan.model
    if isinstance(spec, TracedSpec) or not plan.masked_kernel or plan.recompute.mode == "full":
        return
    layers = sum(plan.padded or not spec.sees_all(layer) for layer in _with_backward(programs))
    size = hold_bytes((plan.sequences, 1, plan.batch.seq, plan.batch.seq), plan.precision.dtype)
    if 2 * layers * size < GIB:
        return
    repeated = spec.kv_heads != spec.heads  # no fused kernel takes fewer heads of keys beside a mask
    kept, keeps = (", and keys and values once for every query head", "neither") if repeated else ("", "none")
    package = f"flash_attention_2{' without --padding' * plan.padded}"
    instead = f"--attention {package} (needs flash-attn) keeps {keeps} and is faster"
    if not takes_package(plan):
        needs = "a 16-bit dtype and a GPU from Ampere on"
        if spec.full_head_dim > WIDEST_FLASH:
            needs = f"heads of at most {WIDEST_FLASH} features in all layers, not of {spec.full_head_dim}"
        instead = f"flash_attention_2, which keeps {keeps}, needs {needs}"
    when = "a batch has padding"
    if not plan.padded:
        when = f"sequences have {spec.sliding_window} tokens (the sliding window) or more"
    yield Notice(
        "masks-kept",
        f"transformers' default attention, sdpa, gets a mask where {when}: each of {layers} layers keeps a copy "
        f"of it, {size:,} bytes ({layers * size / GIB:.2f} GiB together){kept}; {instead}",
    )


def _with_backward(programs: Sequence[Program]) -> set[int]:
    """Numbers of the layers that keep what their backward reads: not of those before all that is trained."""
    spans = (span for program in programs for span in program.spans if span.module.first.backward)
    names = (name for span in spans for name in span.names)
    return {int(name.removeprefix("layer.")) for name in names if name.startswith("layer.")}


def _delta_operators(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """Gated delta nets without their kernels, which keep products of tokens in fp32."""
    spec = plan.model
    if isinstance(spec, TracedSpec) or not framework(plan.framework).runs_transformers(plan):
        return
    layers = sum(spec.is_linear(layer) for layer in range(spec.layers))
    if not layers or plan.kernels.delta == "fla":
        return
    from .layers.gated_delta import CHUNK  # of which few plans have any

    chunks = (plan.batch.mbs, spec.linear_value_heads, -(-plan.batch.seq // CHUNK))
    size = KEPT_PRODUCTS * hold_bytes((*chunks, CHUNK, CHUNK), "fp32")
    kept = layers if plan.recompute.mode == "none" else 1
    yield Notice(
        "delta-operators",
        f"the gated delta nets of {layers} layers run transformers' own operators, as they do without "
        "flash-linear-attention and causal-conv1d: these are far slower, and keep products of tokens in fp32 for "
        f"backward, {kept * size / GIB:.2f} GiB at once; if both packages are installed, add --delta-kernel fla",
    )


KEPT_PRODUCTS = 5
"""Of a chunk's tokens with one another, which autograd keeps of ``torch_chunk_gated_delta_rule`` for each head."""


def _padding(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """What padding would add in a trainer's batches of several sequences, which are assumed to be full, where that is
    half a gibibyte or more: masks, and keys and values repeated, of layers that have none yet."""
    spec, b, s, dtype = plan.model, plan.sequences, plan.batch.seq, plan.precision.dtype
    loop, takes_masks = plan.trainer.loop, not plan.compile and plan.layout.cp == 1
    if (
        loop == "none"
        or plan.batch.padding
        or b == 1
        or plan.attention != "flash"
        or not (spec.has_sizes and takes_masks)
    ):
        return
    layers = sum(not plan.masked_kernel or spec.sees_all(layer) for layer in range(spec.layers))
    layers = min(layers, 1) if plan.recompute.mode == "full" else layers
    repeated = 2 * hold_bytes((b, spec.heads - spec.kv_heads, s, spec.head_dim), dtype)
    size = hold_bytes((b, 1, s, s), dtype) + repeated
    if 2 * layers * size < GIB:
        return
    why = no_padding(plan)
    yield Notice(
        "padding",
        f"every sequence is assumed to have {s} tokens, as after packing: if your micro-batches are padded, sdpa gets "
        f"a mask, and the attention of a layer keeps {size:,} bytes more (mask, repeated keys and values; "
        f"{layers * size / GIB:.2f} GiB in all layers that are kept at once); "
        + (f"memplan cannot count it {why}" if why else "add --padding to count it"),
    )


def _traced_masks(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """Models that are known from traces, which hand sdpa fewer heads of keys beside a mask, too (``trace/step.py``)."""
    spec = plan.model
    if not isinstance(spec, TracedSpec) or plan.attention != "flash":
        return
    heads, keys = (spec.config.get(f"num_{name}_heads") for name in ("attention", "key_value"))
    window = spec.config.get("sliding_window") if spec.config.get("use_sliding_window") is not False else None
    if type(window) is int and plan.batch.seq >= window and keys not in (None, heads):
        yield Notice(
            "masks-traced",
            f"this estimate is far too high: from {window} tokens on (the sliding window), the trace of {spec.name} "
            f"keeps attention's scores, because it passes {keys} heads of keys beside a mask, which no fused kernel of "
            f"PyTorch takes; a real run repeats them to {heads}, and a fused kernel runs. Shorter sequences are not "
            "affected",
        )


def _traced_operators(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """Models of text that are known from traces, and have convolutions: for such layers there are kernels of other
    packages (transformers, ``use_kernel_func_from_hub_with_fallback``), which no trace runs."""
    inputs = {one.dtype for program in programs for one in program.extra if one.category == Category.INPUTS}
    if not isinstance(plan.model, TracedSpec) or inputs != {"int64"}:
        return
    events = (event for span in programs[0].spans for event in span.module.first.forward)
    if any(isinstance(event, Hold) and "convolution" in event.name for event in events):
        yield Notice(
            "operators-traced",
            f"layers of {plan.model.name} run transformers' own operators for convolutions and scans along the "
            "sequence: where causal-conv1d, mamba-ssm or flash-linear-attention are installed, their kernels run "
            "instead, and what they keep for backward is not what this estimate counts",
        )


def _logits(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """The upcast of the logits, where one tensor takes a gibibyte or more."""
    b, s = plan.batch.mbs, plan.batch.seq
    if plan.loss.kind in ("adaptive-softmax", *FUSED) or plan.loop.own_loss:
        return
    if (plan.compile and not plan.compile_regions) or plan.fsdp.compile_loss:
        return
    s = plan.loss.logits_to_keep or s
    vocab = framework(plan.framework).logits_vocab(plan)
    s //= plan.layout.cp
    size = hold_bytes((b, s, vocab), "fp32")
    if size < GIB or plan.precision.dtype == "fp32" or (plan.precision.autocast and not plan.model.causal):
        return
    yield Notice(
        "logits-upcast",
        f"the loss casts ({b}, {s}, {vocab}) logits to fp32 in one tensor of {size:,} bytes ({size / GIB:.2f} GiB); "
        f"{f'a smaller micro-batch than {b} shrinks' if b > 1 else 'fewer tokens on each GPU shrink'} this tensor",
    )


def _compiled(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """A graph that was learnt for another GPU than the plan's (``layers.compiled_model``)."""
    gpu = plan.hardware.gpu
    if plan.compile and gpu is not None and GPUS[gpu].compute_capability != GPUS["h100-80gb"].compute_capability:
        yield Notice(
            "compiled-for-h100",
            f"the graph is the one that Inductor writes for an H100; for {gpu} it may split sums and keep tensors "
            "differently",
        )


def _managed_states(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """States of a paged optimizer, which no reading of the device shows."""
    size = max(program.managed for program in programs)
    if size:
        yield Notice(
            "states-in-managed-memory",
            f"{size:,} bytes ({size / GIB:.2f} GiB) of each rank's optimizer states are in CUDA's unified memory "
            "(paged): memplan counts these states as host memory, not on the device; in use, "
            "they fill free device memory",
        )


def tied_head(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """Where each pipeline stage keeps its own parameters, a tied head's among them."""
    if not plan.model.tied_embeddings or len(programs) == 1 or plan.loss.kind == "adaptive-softmax":
        return
    words = next((p for p in programs[-1].parameter_tensors() if p.name == "word.weight"), None)
    if words is not None:
        away = "1 stage" if len(programs) == 2 else f"{len(programs) - 1} stages"
        yield Notice(
            "tied-head-replicated",
            f"the head is tied to the embedding {away} away: the last stage keeps its own copy of this weight "
            f"({words.elements:,} parameters per rank) with its own gradients and optimizer states",
        )


def _padded_vocab(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    padded = plan.padded_vocab
    if padded == plan.model.vocab:
        return
    multiple = framework(plan.framework).vocab_multiple(plan) // plan.layout.tp
    yield Notice(
        "vocab-padded",
        f"the vocabulary of {plan.model.vocab:,} is padded to {padded:,}, "
        f"a multiple of {multiple * plan.layout.tp:,} ({multiple} x tp {plan.layout.tp})",
    )


def _batch(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    if plan.batch.multiply_by_visible_gpus and plan.hardware.gpus and plan.hardware.gpus > 1:
        gpus, mbs = plan.hardware.gpus, plan.batch.mbs
        yield Notice(
            "batch-multiplied",
            f"the Trainer multiplies the per-device batch by the number of visible GPUs: {mbs} x {gpus} = {mbs * gpus} "
            "sequences pass through every layer at once in one process, so a layer needs more memory on more GPUs. "
            "Set multiply_by_visible_gpus to false (TrainingArguments: one visible GPU, or model parallel)",
        )


def _nodes(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    if plan.layout.tp > plan.hardware.gpus_per_node:
        yield Notice(
            "tp-beyond-node",
            f"tp = {plan.layout.tp} is larger than a node of {plan.hardware.gpus_per_node} GPUs: every layer's "
            "all-reduces cross the network",
        )
