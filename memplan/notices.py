"""What a user should know about a plan: warnings that teach, and the assumptions behind the figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .frameworks import fsdp_notices
from .frameworks.states import managed_bytes
from .layers.module import hold_bytes
from .plan.loss_checks import FUSED
from .plan.optimizer_checks import EIGHT_BIT as EIGHT_BIT_NAMES
from .plan.plan import Plan
from .plan.resolve import MEGATRONS
from .plan.traced_spec import TracedSpec
from .program import Program
from .result import Notice
from .tuning_notices import of_tuning

GIB, MIB = 2**30, 2**20


def warnings(plan: Plan, programs: Sequence[Program]) -> tuple[Notice, ...]:
    """All warnings for ``plan``, most consequential first."""
    return tuple(
        notice
        for source in (
            _logits,
            _managed_states,
            _scores,
            fsdp_notices.warnings,
            _recompute,
            _recomputed_for_nothing,
            _empty_stages,
            _tied_head,
            _zero_and_embed,
            _zero_alone,
            _zero,
            _padded_vocab,
            _batch,
            _nodes,
        )
        for notice in source(plan, programs)
    )


def _scores(plan: Plan, programs: Sequence[Program]) -> Iterator[Notice]:
    """Scores of eager attention in fp32, where one layer's take a quarter of a gibibyte or more."""
    b, s, fp32 = plan.batch.mbs, plan.batch.seq, plan.precision.dtype == "fp32" or plan.quantisation.prepared
    if isinstance(plan.model, TracedSpec):
        return
    if plan.attention != "eager" or not fp32 or plan.code == "2020" or plan.framework in MEGATRONS or s is None:
        return
    size = hold_bytes((b, plan.model.heads, s, s), "fp32")
    if 4 * size < GIB:
        return
    yield Notice(
        "scores-kept",
        f"attention is eager, since PyTorch's flash kernel takes 16 bits only: a layer's scores are tensors of {size:,}"
        f" bytes ({size / GIB:.2f} GiB). transformers' default, sdpa, would take the memory-efficient kernel, which "
        "keeps none and is not modelled: for it these figures are an upper bound",
    )


def _logits(plan: Plan, programs: Sequence[Program]) -> Iterator[Notice]:
    """The upcast of the logits, where one tensor takes a gibibyte or more."""
    b, s = plan.batch.mbs, plan.batch.seq
    if plan.loss.kind in ("adaptive-softmax", *FUSED) or s is None:
        return
    s = plan.loss.logits_to_keep or s
    if plan.framework == "megatron" and plan.megatron.cross_entropy_fusion == "te":
        return
    vocab = _vocab_of_a_rank(plan)
    s //= plan.layout.cp
    size = hold_bytes((b, s, vocab), "fp32")
    if size < GIB or plan.precision.dtype == "fp32" or (plan.precision.autocast and not plan.model.causal):
        return
    yield Notice(
        "logits-upcast",
        f"the loss casts ({b}, {s}, {vocab}) logits to fp32 in one tensor of {size:,} bytes ({size / GIB:.2f} GiB); "
        f"it shrinks with the micro-batch size ({b})",
    )


def _managed_states(plan: Plan, programs: Sequence[Program]) -> Iterator[Notice]:
    """States of a paged optimizer, which no reading of the device shows."""
    if not plan.optimizer.paged:
        return
    size = max(managed_bytes(plan.optimizer, program.parameter_tensors()) for program in programs)
    if size:
        yield Notice(
            "states-in-managed-memory",
            f"{size:,} bytes ({size / GIB:.2f} GiB) of each rank's optimizer states are in CUDA's unified memory "
            "(paged): counted as host memory, and in no device reading; in use, they take what room the device has",
        )


def _padded_vocab_size(plan: Plan) -> int:
    """The vocabulary as the framework pads it."""
    if plan.framework == "megatron":
        from .frameworks.megatron import padded_vocab

        return padded_vocab(plan)
    if plan.framework == "megatron-deepspeed":
        from .frameworks.megatron_deepspeed import padded_vocab as padded

        return padded(plan.model.vocab, plan.layout.tp)
    return plan.model.vocab


def _vocab_of_a_rank(plan: Plan) -> int:
    """Of the logits that the loss takes; without ``loss_parallel`` DTensor gathers them."""
    if plan.framework == "fsdp" and plan.loss.kind == "plain":
        return plan.model.vocab
    return _padded_vocab_size(plan) // plan.layout.tp


def _recompute(plan: Plan, programs: Sequence[Program]) -> Iterator[Notice]:
    """Chunks of several layers that do not line up with a stage are not recomputed at all."""
    size = plan.recompute.layers
    deepspeed = plan.framework == "megatron-deepspeed"
    if not deepspeed or plan.recompute.mode != "full" or plan.recompute.method != "uniform" or size in (None, 1):
        return
    alone = sum(
        len(span.names)
        for program in programs
        for span in program.spans
        if span.module.name == "layer" and not any(RECOMPUTED in name for name in span.names)
    )
    if alone:
        yield Notice(
            "not-recomputed",
            f"{alone} of {plan.model.layers} layers are not recomputed: DeepSpeed cuts a stage into chunks of {size} "
            "entries from its beginning, and recomputes those that hold transformer layers only",
        )


def _recomputed_for_nothing(plan: Plan, programs: Sequence[Program]) -> Iterator[Notice]:
    """Selective recompute under Transformer Engine of what its layers do not keep."""
    modules = plan.recompute.modules or ()
    te = plan.framework == "megatron" and plan.megatron.transformer_impl == "transformer_engine"
    if not te or plan.recompute.mode != "selective":
        return
    backend = _attention(plan)
    if "core_attn" in modules and backend != "unfused":
        yield Notice(
            "recompute-without-gain",
            f"core_attn is recomputed, and {backend} attention keeps no scores that this could save: it takes time and "
            "may take memory; leave it out, or recompute mlp",
        )
    if "layernorm" in modules:
        yield Notice(
            "recompute-without-gain",
            "layernorm is recomputed, and Transformer Engine's layers have none of their own: norms are part of the "
            "linear layers behind them",
        )


def _attention(plan: Plan) -> str:
    """The back end that Transformer Engine takes: the one of the plan, or its choice for ``auto``."""
    from .frameworks.megatron import core_shape

    return core_shape(plan).attention


RECOMPUTED = "–"
"""In the name of a group of layers: ``layer.0–3``."""


def _empty_stages(plan: Plan, programs: Sequence[Program]) -> Iterator[Notice]:
    without = [p.stage for p in programs if not any(name.startswith("layer.") for name in p.entries)]
    if without and plan.framework == "megatron-deepspeed":
        named = ", ".join(map(str, without))
        yield Notice(
            "stage-without-layer",
            f"stage {named} holds no transformer layer; BigScience's pipeline of 2021 could not run such a stage",
        )


def _tied_head(plan: Plan, programs: Sequence[Program]) -> Iterator[Notice]:
    tied = plan.framework in ("megatron", "megatron-deepspeed") and plan.model.tied_embeddings
    if not tied or len(programs) == 1 or plan.loss.kind == "adaptive-softmax":
        return
    words = next((p for p in programs[-1].parameter_tensors() if p.name == "word.weight"), None)
    if words is not None:
        away = "1 stage" if len(programs) == 2 else f"{len(programs) - 1} stages"
        yield Notice(
            "tied-head-replicated",
            f"the head is tied to the embedding {away} away: the last stage keeps a copy of it "
            f"({words.elements:,} parameters a rank) with gradients and optimizer states of its own",
        )


def _zero_and_embed(plan: Plan, programs: Sequence[Program]) -> Iterator[Notice]:
    method = plan.pipeline.partition
    by_embedding = isinstance(method, str) and ("embed" in method.lower() or method.lower() == "parameters")
    if plan.framework == "megatron-deepspeed" and plan.layout.zero == 1 and by_embedding:
        yield Notice(
            "zero1-with-embed-partition",
            "DeepSpeed of that time hung when ZeRO-1 met a partition by embedding (its issue 1522), "
            "which is why BigScience turned to 8-bit Adam",
        )


def _zero_alone(plan: Plan, programs: Sequence[Program]) -> Iterator[Notice]:
    if plan.framework == "megatron" and plan.layout.zero == 1 and plan.layout.dp == plan.layout.cp == 1:
        yield Notice(
            "zero1-without-dp",
            "the distributed optimizer has nothing to shard at dp x cp = 1",
        )
    if plan.framework == "megatron-deepspeed" and plan.layout.zero == 1 and plan.layout.dp == 1:
        yield Notice(
            "zero1-without-dp",
            "ZeRO-1 has nothing to shard at dp = 1, and its wrapper needs more in the step than plain fp16",
        )


def _zero(plan: Plan, programs: Sequence[Program]) -> Iterator[Notice]:
    if plan.framework == "deepspeed":
        from .frameworks.zero_notices import notices

        yield from notices(plan, programs)


def _padded_vocab(plan: Plan, programs: Sequence[Program]) -> Iterator[Notice]:
    padded = _padded_vocab_size(plan)
    if padded == plan.model.vocab:
        return
    multiple = plan.megatron.vocab_multiple
    yield Notice(
        "vocab-padded",
        f"the vocabulary of {plan.model.vocab:,} is padded to {padded:,}, "
        f"a multiple of {multiple} tp = {multiple * plan.layout.tp}",
    )


def _batch(plan: Plan, programs: Sequence[Program]) -> Iterator[Notice]:
    if plan.batch.multiply_by_visible_gpus and plan.hardware.gpus and plan.hardware.gpus > 1:
        gpus, mbs = plan.hardware.gpus, plan.batch.mbs
        yield Notice(
            "batch-multiplied",
            f"the Trainer multiplies the per-device batch by the number of visible GPUs: {mbs} x {gpus} = {mbs * gpus} "
            "sequences pass through every block at once, although one process runs them; so a block costs more on "
            "more GPUs. Set multiply_by_visible_gpus to false (TrainingArguments: one visible GPU, or model parallel)",
        )


def _nodes(plan: Plan, programs: Sequence[Program]) -> Iterator[Notice]:
    if plan.layout.tp > plan.hardware.gpus_per_node:
        yield Notice(
            "tp-beyond-node",
            f"tp = {plan.layout.tp} is larger than a node of {plan.hardware.gpus_per_node} GPUs: every layer's "
            "all-reduce crosses the network",
        )


COMMON = (
    "bytes of the most loaded rank of each stage, in steady state, after the first applied optimizer step",
    "requested: live tensors, each rounded up to 512 bytes; allocated and reserved: their events replayed through "
    "PyTorch's caching allocator (by torch 2.13's rules, whichever torch the plan has)",
    "the allocator never runs out of memory and empty_cache is not called",
    "evaluation: the same batch, no graph, one micro-batch at a time; saving a checkpoint copies nothing on the device",
)

PLAIN = (
    "layers as in transformers 5.x, dropout active, no KV cache",
    "nothing is compiled (torch.compile is not modelled)",
    "the model's output, and its logits with it, is dropped before backward begins, as in transformers' Trainer",
    "zero_grad(set_to_none=True) behind every step; PyTorch's optimizer states have the parameters' dtype",
)

TORCHTITAN = (
    "layers as torchtitan's Llama of December 2024 has them; loss and logits outside of the model",
    "zero_grad(set_to_none=True) behind every step; nothing is compiled (torch.compile is not modelled)",
)

OLD = (
    "GPT-2 as in transformers of October 2020 on PyTorch 1.6: the dividend of w / sqrt(d) is saved; keys and values "
    "stay as views of the fused projection (inferred from the thread's readings)",
)

MEGATRON = (
    "BigScience's Megatron-DeepSpeed of November 2021 on PyTorch 1.8: fused softmax (s <= 2048), bias-GELU and "
    "bias-dropout-add, apex norms; tensor-parallel collectives in place",
    "DeepSpeed's pipeline engine of v0.5: activations travel as 1/tp parts and are gathered whole; the last stage "
    "keeps the logits of two micro-batches",
)

MEGATRON_CORE = (
    "Megatron-Core as of August 2026, with apex, Transformer Engine and flash-attention 2 installed, as in NVIDIA's "
    "container; FusedAdam; collectives in place but for gathers and reduce-scatters of sequence parallelism",
    "side streams (overlapped communication) keep the order of events of the main stream",
    "of the distributed optimizer's shards the largest is shown, tensors in the order of the module's parameters",
    "a chunk's last input and its gradient live until its next forward (TransformerBlock.input_tensor)",
    "attention_backend auto: cuDNN 9.20; without a named GPU an H100's choice, and no library workspaces",
)

BACK_ENDS = {
    "flash": "flash-attention 2",
    "fused": "cuDNN; what its engine asks for besides the workspace of its front end is not published",
    "unfused": "scores in memory",
}
"""What the back ends of Transformer Engine are."""

FSDP = (
    "fully_shard of PyTorch 2.13 on every layer and the root; gathers and reductions on streams of their own, whose "
    "pools the allocator keeps apart; sizes of rank 0, whose shards are the largest",
)

TENSOR_PARALLEL = (
    "DTensor's tensor and sequence parallelism as torchtitan's Llama has it, its collectives those of PyTorch 2.13, "
    "each with a buffer of its own; async TP (symmetric memory), float8 and NCCL's own buffers are not counted",
)

UNFUSED = (
    "fp16 without ZeRO: FP16_UnfusedOptimizer (DeepSpeed's branch big-science takes it for apex FusedAdam, too), so "
    "every gradient is cast to fp32 at once in the step",
)

EIGHT_BIT = (
    "8-bit Adam keeps 32-bit states for embeddings (bitsandbytes' rule) unless embeddings_32bit is false; in "
    "BigScience's fork the override did not take effect",
)


def assumptions(plan: Plan) -> tuple[str, ...]:
    """What the estimate takes for granted."""
    result = [*COMMON]
    if isinstance(plan.model, TracedSpec):
        from .trace.lookup import assumptions as of_traces

        return (*result, *of_traces(plan), *PLAIN[1:], *_of_optimizer(plan))
    if plan.framework == "megatron":
        result += MEGATRON_CORE
        if plan.megatron.transformer_impl == "transformer_engine":
            result.append(
                f"Transformer Engine {plan.megatron.transformer_engine}, PyTorch {plan.torch}; attention by its back "
                f"end {_attention(plan)} ({BACK_ENDS[_attention(plan)]})"
            )
        if plan.optimizer.name == "sgd":
            result.append("SGD with momentum (one fp32 state a parameter)")
        return tuple(result)
    if plan.framework == "fsdp":
        result += FSDP
        if plan.fsdp.offload:
            result.append(
                "host memory is the tensors' own; PyTorch rounds what is pinned up to a power of two, at most twice it"
            )
        result += TENSOR_PARALLEL if plan.layout.tp > 1 else ()
        result += fsdp_notices.assumptions(plan)
    if plan.framework == "megatron-deepspeed":
        result += MEGATRON
        if plan.precision.dtype == "fp16" and plan.layout.zero == 0:
            result += UNFUSED
        if plan.optimizer.name == "adam8bit":
            result += EIGHT_BIT
        if plan.loss.kind == "adaptive-softmax":
            result.append("adaptive softmax: an upper bound, every tail cluster is given all tokens; not sharded by tp")
    elif plan.framework == "deepspeed":
        from .frameworks.zero_notices import assumptions as of_zero

        result += of_zero(plan)
    else:
        result += OLD if plan.code == "2020" else ()
        plain = TORCHTITAN if plan.framework == "fsdp" and plan.fsdp.code == "torchtitan" else PLAIN
        result += plain if plan.code != "2020" else PLAIN[1:]
    result += of_tuning(plan)
    result += _of_autocast(plan)
    result += TRAINER if plan.trainer.loop == "transformers" else ()
    result += _of_optimizer(plan)
    if plan.loss.kind in FUSED_LOSSES:
        result.append(FUSED_LOSSES[plan.loss.kind].format(plan.loss.liger))
    if plan.loss.logits_to_keep is not None:
        result.append("logits_to_keep: labels of the same tokens are given; evaluation keeps as few")
    if plan.framework == "ddp":
        from .frameworks.ddp_notices import assumptions as of_ddp

        result += of_ddp(plan)
    if plan.framework == "device-map":
        result.append(
            "embedding and head on the first device, final norm on the last; masks and rotary tables that later "
            "devices copy are not counted"
        )
    if plan.attention == "flash" and plan.framework != "megatron-deepspeed":
        result.append(_fused(plan))
    if plan.recompute.mode == "full" and plan.framework != "megatron-deepspeed":
        result.append("recompute by torch.utils.checkpoint(use_reentrant=False), which stops at the last saved tensor")
    return tuple(result)


def _fused(plan: Plan) -> str:
    if plan.precision.dtype == "fp32" and plan.framework == "fsdp":
        return (
            "in fp32 scaled_dot_product_attention takes the memory-efficient kernel, with what it allocates inside in "
            "backward on sm80 and later"
        )
    return "flash attention through PyTorch's own kernel, with what it allocates inside in backward"


FUSED_LOSSES = {
    "liger": "Liger {}'s fused linear cross entropy, reduction mean or sum, which makes gradients in forward; in "
    "evaluation the model's own loss on all logits; Liger's other kernels are not applied",
    "cut": "Apple's cut cross entropy (main of June 2025; implementation cce), no label ignored; in evaluation, too",
    "chunked": "torchtitan's ChunkedLossWrapper on this model's hidden states: head, loss and their backward chunk by "
    "chunk within forward",
}


TRAINER = (
    "Trainer of transformers 5.23: the model returns its loss; token ids and labels of all micro-batches of a step are "
    "on the device, no attention mask is; evaluation computes no metrics unless --eval-batches says of how many",
)


def _of_autocast(plan: Plan) -> tuple[str, ...]:
    """What is taken for granted of autocast."""
    dtype = plan.precision.dtype
    if not plan.precision.autocast:
        return ()
    where = "kept for backward" if plan.recompute.mode == "none" else "dropped when the model returns"
    cached = f"autocast: every weight of a product is cast to {dtype} once a forward pass; the copies count as"
    scaler = ("GradScaler: gradients are unscaled in place, and no step is skipped",) if dtype == "fp16" else ()
    return (f"{cached} activations and are {where}; norms and the residual stream are fp32", *scaler)


OPTIMIZERS = {
    "adafactor": "Adafactor without first moment; transformers' (implementation transformers) as the Trainer calls it: "
    "scale_parameter=False, fp32 states, one parameter at a time in fp32",
    "lion": "Lion of bitsandbytes, whose states are fp32 whatever the parameters' dtype",
    "muon": "torch.optim.Muon on the matrices of the layers, its Newton-Schulz rounds in bf16; AdamW on embeddings, "
    "head, norms and biases",
}


def _of_optimizer(plan: Plan) -> tuple[str, ...]:
    """What is taken for granted of the optimizer."""
    optimizer = plan.optimizer
    if optimizer.implementation == "bitsandbytes" and optimizer.name != "lion":
        return ("32-bit Adam of bitsandbytes, whose states are fp32 whatever the parameters' dtype",)
    if optimizer.name in EIGHT_BIT_NAMES:
        size = optimizer.block_size or 0
        whose = {256: "bitsandbytes' from 0.44", 2048: "bitsandbytes' before 0.44"}.get(size, "as given")
        return (f"an fp32 scale for every {size} elements of 8-bit states ({whose})",)
    if optimizer.name == "sgd":
        momentum = "with momentum (one state)" if optimizer.momentum else "without momentum (no state)"
        decay = "with" if optimizer.weight_decay else "without"
        return (f"SGD {momentum} and {decay} weight decay (which adds a copy of the gradients); no Nesterov",)
    if optimizer.name == "adam" and plan.framework != "megatron-deepspeed":
        decay = "with" if optimizer.weight_decay else "without"
        return (f"Adam {decay} weight decay (with it, each gradient is added to in a copy) and without amsgrad",)
    if optimizer.name == "adamw":
        return ("AdamW decays weights in place; without amsgrad",)
    return (OPTIMIZERS[optimizer.name],) if optimizer.name in OPTIMIZERS else ()
