"""What an estimate takes for granted, as its report lists it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .device.measured import takes_oldest
from .families import family
from .frameworks import framework
from .layers.whole_logits import GROUPS, OF_PAIRS, POLICY_ALONE, form
from .plan.lora import adapter_parameters, left_out, saved, saved_parameters
from .plan.plan import ResolvedPlan
from .plan.releases import (
    TRL_NEWEST,
    TRL_TILES,
    WIDEST_FLASH,
    beyond_known,
    prefers_cudnn,
    release,
    shown,
    takes_package,
    unmasked_scores,
)
from .plan.traced_spec import TracedSpec
from .plan.tuning_checks import is_tuned

COMMON = (
    "figures are for the most loaded rank of each stage, in steady state: after the first applied optimizer step",
    "requested: the sum of live tensors, each rounded up to 512 bytes; allocated and reserved: a replay of every "
    "allocation through PyTorch's caching allocator (torch 2.13's rules for every torch version, except the choice "
    "between free blocks of equal size)",
    "readings assume an allocator that never runs out of memory; the verdict assumes one that gives cached memory back "
    "and tries again when memory runs out; nothing calls empty_cache",
)
BLOCKS_OF_ONE_SIZE = {
    True: "among free blocks of equal size, the allocator takes the one in the oldest segment, as torch does since "
    "2.13; older releases (--torch) choose by address, so their reserved memory may differ by a few percent",
    False: "among free blocks of equal size, the allocator takes the one at the lowest address, as torch did before "
    "2.13; each new segment is assumed to lie below the earlier ones, as most did on an H200 with driver 580 (reserved "
    "memory was within 0.6 % of a replay with the real addresses)",
}
"""By whether the older segment is preferred."""
EVALUATION = "evaluation runs the same batch without gradients, one micro-batch at a time"

PLAIN = (
    "layers as in transformers 5.x, dropout active, no KV cache",
    "no torch.compile",
    "the model's output and logits are freed before backward begins, as in transformers' Trainer",
    "zero_grad(set_to_none=True) after every step; PyTorch's optimizer states have the parameters' dtype",
)


OLD = (
    "GPT-2 as in transformers of October 2020 on PyTorch 1.6: w / sqrt(d) saves w; keys and values stay as views of "
    "the fused projection (inferred from the thread's readings)",
)


def plain(plan: ResolvedPlan) -> tuple[str, ...]:
    """Of transformers' models in plain PyTorch."""
    if plan.code == "2020":
        return (*OLD, *PLAIN[1:])
    if plan.compile:
        from .layers.compiled_assumptions import assumptions

        compiled_as = framework(plan.framework).supports.compiled_as
        return (PLAIN[0], *assumptions("regions" if plan.compile_regions else compiled_as), *PLAIN[2:])
    own = (*PLAIN, *family(plan.model.family).assumptions, *of_delta_nets(plan))
    if not plan.versions:
        return own
    followed = ", ".join(f"{library} {'.'.join(map(str, release(plan, library)))}" for library in plan.versions)
    return (f"code followed: {followed}; of other libraries the newest", *own)


def _loaded(plan: ResolvedPlan) -> str:
    """The rule by which a Trainer's model has its parameters' dtype."""
    if plan.precision.stored != "fp32":
        return f"the model is loaded in {plan.precision.stored}, as the plan says"
    return (
        "the model is loaded in fp32, the rule before transformers 5 where no dtype is given; from 5 on a checkpoint "
        "keeps its own (--autocast-parameters bf16)"
    )


def assumptions(plan: ResolvedPlan) -> tuple[str, ...]:
    """What the estimate takes for granted."""
    ties = BLOCKS_OF_ONE_SIZE[takes_oldest(plan)]
    result = [*COMMON, ties, f"{EVALUATION}; {framework(plan.framework).saving(plan)}"]
    if (beyond := beyond_known(plan.torch)) is not None:
        result.append(beyond)
    if isinstance(plan.model, TracedSpec):
        traces = framework(plan.framework).running.learnt_assumptions(plan)
        return (*result, *traces, *PLAIN[1:], *framework(plan.framework).optimizer_assumptions(plan))
    own = framework(plan.framework)
    result += own.assumptions(plan) or plain(plan)
    result += (*of_tuning(plan), *of_kernels(plan))
    result += _of_autocast(plan)
    mask = "and an" if plan.loop.loss_of == "labels" else "but no"
    result += (TRAINER.format(mask=mask), _loaded(plan)) if plan.trainer.loop != "none" else ()
    result += _OF_LOOP.get(plan.trainer.loop, _nothing)(plan) + _of_labels(plan)
    result += own.optimizer_assumptions(plan)
    if plan.loss.kind in FUSED_LOSSES:
        result.append(FUSED_LOSSES[plan.loss.kind].format(plan.loss.liger))
    if plan.loss.logits_to_keep is not None:
        result.append(
            "logits_to_keep: the labels cover the same tokens; evaluation keeps the logits of these tokens only"
        )
    result += own.layout_assumptions(plan)
    if plan.flash and not own.own_layers:
        result.append(_fused(plan))
    if plan.recompute.mode == "full" and not own.own_layers:
        result.append(RECOMPUTED[bool(plan.recompute.reentrant)])
    return tuple(result)


def _fused(plan: ResolvedPlan) -> str:
    wide = plan.attention == "flash" and plan.model.has_sizes and plan.model.full_head_dim > WIDEST_FLASH
    return _of_others(plan) + (WIDE_HEADS.format(plan.model.full_head_dim) if wide else "")


WIDE_HEADS = (
    "; layers that see all tokens have heads of {} features, which only the memory-efficient kernel takes, with keys "
    "and values once for every query head"
)
"""``sdp_utils.cpp`` (``check_head_dim_size_flash``); ``integrations/sdpa_attention.py`` (``use_gqa_in_sdpa``)."""


def _of_others(plan: ResolvedPlan) -> str:
    """Of layers with heads that the flash kernel takes, if dtype and masks let it."""
    words = framework(plan.framework).attention_words(plan)
    if plan.masked_kernel and not plan.compile:
        return _masked(plan)
    if words == "math":
        return (
            "in fp32 scaled_dot_product_attention runs operator by operator and keeps scores: PyTorch's flash kernel "
            "takes no fp32, the memory-efficient one neither fewer heads of keys than of queries nor broken words"
        )
    if words == "memory-efficient":
        return (
            "in fp32 scaled_dot_product_attention runs the memory-efficient kernel; the kernel's temporary tensors in "
            "backward are counted as on sm80 and later"
        )
    if plan.attention != "flash":
        return f"{plan.attention}: the package's kernel, whose temporary tensors in backward are counted"
    if prefers_cudnn(plan):
        return CUDNN_ATTENTION
    return (
        "PyTorch's own flash attention kernel; the kernel's temporary tensors in backward are counted (from 2.11 on "
        "PyTorch prefers cuDNN's on Hopper and Blackwell, whose tensors are assumed to be as large)"
    )


def _masked(plan: ResolvedPlan) -> str:
    """transformers' ``masking_utils.py`` (``sdpa_mask``) and ``integrations/sdpa_attention.py``; PyTorch's
    ``aten/src/ATen/native/transformers/attention.cpp`` (``convert_boolean_attn_mask``, ``preprocess_mask``)."""
    kernel = "cuDNN's kernel" if plan.masked_kernel == "cudnn" else "the memory-efficient kernel"
    runs = f"PyTorch takes {kernel} in place of its flash kernel"
    when = f"sequences of {plan.model.sliding_window} tokens (the sliding window) or more give it a mask"
    layers, tokens = "layer with a window", "no token is padding"
    without = " (flash_attention_2 does none of this)"
    repeated = ", and keys and values once for every query head" * (plan.model.kv_heads != plan.model.heads)
    if not takes_package(plan):
        without = ""
    if plan.padded:
        when, layers = "a batch with padding gives it a mask in every layer", "layer"
        tokens, without = "every batch is padded to the sequence length", ""
    if plan.precision.dtype == "fp32":  # which has no flash kernel
        runs, without = f"PyTorch runs {kernel}", ""
        if unmasked_scores(plan):
            without = "; layers without one run operator by operator, and keep scores as such"
    return (
        f"attention is transformers' default, sdpa: {when}, and {runs}; each {layers} keeps a copy of the mask in its "
        f"dtype{repeated}, and computes all scores{without}; {tokens}"
    )


CUDNN_ATTENTION = (
    "cuDNN's attention kernel, which PyTorch prefers on Hopper and Blackwell since 2.11 "
    "(TORCH_CUDNN_SDPA_DEPRIORITIZED=1 turns it off): its log-sum-exp, its gradients and the backward workspace of its "
    "front end (dQ and the sums of dO x O in fp32) are as large as flash attention's; the workspace of its engine is "
    "not published; where query heads share keys, dK and dV of every query head are counted, as flash attention "
    "allocates them"
)
"""``aten/src/ATen/native/cudnn/MHA.cpp`` (``run_cudnn_SDP_fprop``, ``run_cudnn_SDP_bprop``); cuDNN front end 1.23,
``node/scaled_dot_product_flash_attention.h`` (``get_fe_workspace_size_node``)."""


RECOMPUTED = {
    False: "recompute by torch.utils.checkpoint(use_reentrant=False), which stops recomputing at the last saved tensor",
    True: "recompute by torch.utils.checkpoint(use_reentrant=True), which runs a layer again as a whole",
}
"""By reentrance."""


FUSED_LOSSES = {
    "liger": "Liger {}'s fused linear cross entropy, reduction mean or sum, computes gradients in forward; "
    "evaluation computes the model's own loss on all logits",
    "cut": "Apple's cut cross entropy (main of June 2025, or Axolotl's fork; implementation cce) without ignored "
    "labels, in training and evaluation; backward is timed as if it filtered no blocks of the vocabulary",
    "liger-cross-entropy": "Liger's cross entropy on all logits writes their gradient over them in forward; evaluation "
    "computes the model's own",
    "unsloth": "fms-acceleration's copy of Unsloth's cross entropy on all logits, which are shifted, writes their "
    "gradient over them; evaluation computes the model's own",
    "chunked": "torchtitan's ChunkedLossWrapper on the model's hidden states: forward runs head, loss and their "
    "backward chunk by chunk",
}


def _trl(plan: ResolvedPlan) -> str:
    """The release whose trainer runs."""
    return plan.versions.get("trl", shown(TRL_NEWEST))


def _of_whole_logits(plan: ResolvedPlan) -> str:
    """What a loss of whole logits holds; empty where there are tiles."""
    if plan.loop.loss_of != "whole-logits":
        return ""
    how = (
        form(OF_PAIRS[plan.trainer.kind.reduced], release(plan, "trl"))
        if plan.trainer.kind.reduced in OF_PAIRS
        else None
    )
    kept = "stay until their entropies have been computed"
    if how is None and not form(GROUPS, release(plan, "trl")).entropies:
        kept = "end once log-probabilities are there"
    elif how is not None and not how.measures:
        kept = "stay until the loss is there" if how.stays else "end before the reference runs, or the loss begins"
        kept += " (those of the reference before the loss)" * plan.runs_reference
    elif plan.runs_reference:
        kept = "and those of its reference, stay until metrics have been computed"
    at_once = "at once" if how is not None and (how.at_once or how.kernel) else "sequence by sequence"
    return (
        f"the loss reads all logits, {at_once} (from trl {shown(TRL_TILES)} on in tiles, which need far less); "
        f"the model's logits, {kept}; every token is assumed to belong to a completion"
    )


def _of_pairs(plan: ResolvedPlan) -> tuple[str, ...]:
    """What is taken for granted of trl's DPOTrainer."""
    reference = "is the model itself, with its adapters off"
    if plan.lora.rank is None:
        reference = f"is a second model in {plan.precision.stored}, {framework(plan.framework).reference(plan)}"
    if plan.trainer.precompute_ref_log_probs:
        reference = (
            f"ran before training (precompute_ref_log_probs), which {framework(plan.framework).scored_ahead(plan)}"
        )
    head = (
        "trl's fused head computes log-probabilities of labels in tiles of 4,096 tokens and 32,768 words; every token "
        "but the first is assumed to belong to a completion (of a prompt it takes none of the head's memory)"
    )
    name = f"DPOTrainer of trl {_trl(plan)}"
    if plan.trainer.kind.reduced == "rows-of-copy":
        name = "Axolotl's DPOTrainer (July 2026, of trl 1.8 with kernels of its own, which keep a copy of the logits)"
    samples = (
        f"{name}: mbs and gbs count pairs, and both sequences of each, {plan.batch.seq} tokens, run in one batch; "
        "dropout is off; no MoE auxiliary loss, no weights of WPO"
    )
    if plan.loop.mismatched:
        samples = (
            f"KTOTrainer of trl {_trl(plan)}, loss_type kto: mbs and gbs count sequences of {plan.batch.seq} tokens; "
            "as many prompts with others' completions are scored as well, by the policy before its own pass (dropout "
            "of adapters is not counted there) and by the reference; dropout is off; no MoE auxiliary loss"
        )
    return samples, _of_whole_logits(plan) or head, f"the reference {reference}; predicted times are without its pass"


def _of_policy_alone(plan: ResolvedPlan) -> tuple[str, ...]:
    """What is taken for granted of trl's ORPOTrainer and CPOTrainer."""
    likelihood = "with a cross entropy of the chosen sequences"
    if plan.trainer.kind.reduced == "rows-alone":
        likelihood = "without a cross entropy of the chosen sequences (cpo_alpha 0)"
    how = form(POLICY_ALONE, release(plan, "trl"))
    made = "by trl's kernel, which keeps logits and makes their gradient at once" if how.kernel else "row by row"
    return (
        f"{plan.trainer.kind.trainer} of trl {_trl(plan)} (trl.experimental): mbs and gbs count pairs, and both "
        f"sequences of each, {plan.batch.seq} tokens, run in one batch; there is no reference; dropout is off; no MoE "
        "auxiliary loss",
        f"the loss reads all logits, {likelihood}; log-probabilities of labels are made {made}",
    )


def _of_pairs_of_llama_factory(plan: ResolvedPlan) -> tuple[str, ...]:
    """What is taken for granted of LLaMA-Factory's DPO."""
    reference = "the model itself, with its adapters off"
    if plan.lora.rank is None:
        reference = f"a second model in {plan.precision.stored}, {framework(plan.framework).reference(plan)}"
    return (
        f"DPO of LLaMA-Factory (August 2026): mbs and gbs count pairs, and both sequences of each, {plan.batch.seq} "
        "tokens, run in one batch; dropout is off; the loss reads all logits in fp32, which stay while the reference "
        "runs; any pref_loss with a reference takes as much, but for a few numbers of a token each",
        f"the reference is {reference}; predicted times are without its pass",
    )


def _of_tokens(plan: ResolvedPlan) -> tuple[str, ...]:
    """What is taken for granted of trl's SFTTrainer."""
    if not plan.loop.own_loss:
        return (
            f"SFTTrainer of trl {_trl(plan)}: the model's own loss and the metrics read all logits (from trl "
            f"{shown(TRL_TILES)} on in tiles, which need far less); no MoE auxiliary loss",
        )
    return (
        f"SFTTrainer of trl {_trl(plan)}, loss_type nll: its fused head computes log-probabilities of labels in tiles "
        "of 4,096 tokens and 32,768 words, and never logits (before trl 1.15 it held them: --versions trl=1.9.0); "
        "every token but the first has a label; no MoE auxiliary loss",
    )


def _of_groups(plan: ResolvedPlan) -> tuple[str, ...]:
    """What is taken for granted of trl's GRPOTrainer and RLOOTrainer."""
    trainer = plan.trainer
    reference = "no reference model (beta 0)"
    if trainer.keeps_reference:
        reference = "the reference is the model itself, with its adapters off"
        if plan.lora.rank is None:
            where = framework(plan.framework).reference(plan)
            reference = f"the reference is a second model in {plan.precision.stored}, {where}"
    name, loss = "GRPOTrainer", "loss dapo, grpo, bnpo or dr_grpo with ratios of tokens; no MoE auxiliary loss; "
    loss += "the KL term's few numbers for each token are not counted"
    if trainer.kind.reduced == "clipped-rows":
        name, loss = "RLOOTrainer", "the loss is of ratios of whole completions; no MoE auxiliary loss"
    return (
        f"{name} of trl {_trl(plan)}: mbs and gbs count completions; every sequence of a batch has {plan.batch.seq} "
        f"tokens, its last {trainer.completion_length} generated; {reference}; {loss}",
        *filter(None, (_of_whole_logits(plan),)),
        f"generation holds {trainer.generation_memory or 0:,} bytes while the model trains (--generation-memory); "
        "memory during generation and evaluation is not estimated, and predicted times cover training only",
    )


def _of_scores(plan: ResolvedPlan) -> tuple[str, ...]:
    """What is taken for granted of trl's RewardTrainer."""
    head = "is trained"
    if plan.lora.rank is not None:
        head = "is frozen (--modules-to-save score trains a copy, as peft does for task type SEQ_CLS)"
        if saved(plan):
            head = "has a copy that is trained"
    return (
        f"RewardTrainer of trl {_trl(plan)}: mbs and gbs count pairs, and both sequences of each, {plan.batch.seq} "
        "tokens without padding, run in one batch; dropout is off where a module does it; metrics of a number each are "
        "not counted",
        f"the model is transformers' for sequence classification with one label, whose head of {plan.model.hidden:,} "
        f"numbers takes the place of the vocabulary's and {head}",
    )


def _of_labels(plan: ResolvedPlan) -> tuple[str, ...]:
    """What is taken for granted of a classifier."""
    if plan.loop.loss_of != "labels":
        return ()
    loss = "cross entropy" if plan.model.labels > 1 else "squared error of labels in the scores' dtype"
    return (
        f"the model is transformers' for sequence classification: its head gives {plan.model.labels} numbers of each "
        f"sequence, and its loss is the {loss}; one label of each sequence is on the device, beside an attention mask, "
        f"and all sequences have {plan.batch.seq} tokens without padding",
    )


def _nothing(plan: ResolvedPlan) -> tuple[str, ...]:
    return ()


_OF_LOOP: Mapping[str, Callable[[ResolvedPlan], tuple[str, ...]]] = {
    "sft": _of_tokens,
    "dpo": _of_pairs,
    **dict.fromkeys(("kto", "axolotl-dpo"), _of_pairs),
    **dict.fromkeys(("orpo", "cpo", "simpo"), _of_policy_alone),
    "llama-factory-dpo": _of_pairs_of_llama_factory,
    "grpo": _of_groups,
    "rloo": _of_groups,
    "reward": _of_scores,
}
"""By ``trainer.loop``."""


TRAINER = (
    "Trainer of transformers 5.23: the model returns its loss; the device holds token ids and labels of all "
    "micro-batches of a step, {mask} attention mask; evaluation computes no metrics unless --eval-batches is given"
)


def _of_autocast(plan: ResolvedPlan) -> tuple[str, ...]:
    """What is taken for granted of autocast."""
    dtype = plan.precision.dtype
    if not plan.precision.autocast:
        return ()
    where = "kept for backward" if plan.recompute.mode == "none" else "freed when the model returns"
    cached = f"autocast casts every weight of a matrix product to {dtype} once per forward pass; the copies count as"
    scaler = ("GradScaler unscales gradients in place and skips no step",) if dtype == "fp16" else ()
    return (f"{cached} activations and are {where}; norms and the residual stream are fp32", *scaler)


# -- of frozen parameters, and of kernels ----------------------------------------------------------------


def of_tuning(plan: ResolvedPlan) -> tuple[str, ...]:
    """Assumptions of adapters, 4-bit weights and frozen parts."""
    if not is_tuned(plan):
        return ()
    return (*_of_lora(plan), *_of_quantisation(plan), *_of_graph(plan))


def _of_lora(plan: ResolvedPlan) -> tuple[str, ...]:
    lora = plan.lora
    if lora.rank is None:
        return ()
    if not plan.model.has_sizes:
        named = ", ".join(lora.targets or ())
        besides = f"; {', '.join(lora.modules_to_save)} trained whole" if lora.modules_to_save else ""
        return (f"{'DoRA' if lora.dora else 'LoRA'} by peft on {named}, traced in its place, in {lora.dtype}{besides}",)
    count, whole, kind = adapter_parameters(plan), lora.modules_to_save, "DoRA" if lora.dora else "LoRA"
    if (made_by := framework(plan.framework).adapters_by(plan)) is not None:
        return (
            f"{kind} by {made_by} on {', '.join(lora.targets or ())}: {count:,} trained parameters in {lora.dtype}",
        )
    given = {"biases": False, "DoRA": lora.dora, "rsLoRA": lora.rslora, "modules_to_save": whole}
    *others, last = [name for name, used in given.items() if not used]
    nothing = left_out(plan)
    targets = [one for one in lora.targets or () if one not in nothing]
    return (
        f"{kind} by peft 0.21 on {', '.join(targets)}: {count:,} trained parameters in {lora.dtype}; no "
        f"{', '.join(others)} or {last}",
        *([_OF_DORA] if lora.dora else []),
        *([_saved(plan)] if whole else []),
    )


def _saved(plan: ResolvedPlan) -> str:
    named = ", ".join(plan.lora.modules_to_save or ())
    return (
        f"{named}: {saved_parameters(plan):,} parameters are trained whole, in a copy; the frozen one stays beside it"
    )


_OF_DORA = (
    "DoRA: every adapted layer makes a unit matrix of its inputs, the product of its adapters and the whole weight in "
    "the adapters' dtype in each forward pass; with dropout the weight so made is kept for backward"
)


def _of_quantisation(plan: ResolvedPlan) -> tuple[str, ...]:
    quantisation = plan.quantisation
    match quantisation.kind:
        case "none":
            return ()
        case "int8":
            return (
                "8-bit weights by bitsandbytes 0.50 (LLM.int8); embedding, norms and head are not quantised",
                "no column of a layer's inputs is assumed to reach the threshold (6.0): that depends on the data; each "
                "column that does adds itself and its weights in 16 bits while a product runs",
                "inputs of 8-bit layers are kept until backward, recomputed or not: bitsandbytes has them in its "
                "function's context, which checkpoints leave alone",
            )
        case "gptq":
            return (
                f"4-bit weights by auto_gptq's QuantLinear (Triton, version 2) in groups of {quantisation.group}, "
                "without biases; embedding, norms and head are not quantised",
                "a 4-bit layer dequantises its whole weight in forward and in backward",
            )
        case "awq":
            return (
                f"4-bit weights by autoawq's WQLinear_GEMM in groups of {quantisation.group}; embedding, norms and "
                "head are not quantised",
                "a 4-bit layer keeps its input for backward, which copies the whole weight for each sequence of a "
                "micro-batch; forward makes the whole weight from 1,024 tokens per micro-batch on, and eight partial "
                "sums of its output below",
            )
    prepared = "prepare_model_for_kbit_training" if quantisation.prepared else "without prepare_model_for_kbit_training"
    return (
        f"4-bit weights by bitsandbytes 0.50, blocks of 64, compute in {quantisation.compute} ({prepared}); embedding, "
        "norms and head are not quantised",
        "a 4-bit layer dequantises its whole weight in forward and in backward; below 1,536 tokens per micro-batch "
        "bitsandbytes may choose a kernel without this copy, so forward is an upper bound",
    )


def of_kernels(plan: ResolvedPlan) -> tuple[str, ...]:
    """Assumptions of kernels in the place of transformers' operators."""
    given = plan.kernels
    pieces = {"norm": given.norm, "rope": given.rope, "mlp": given.mlp, "lora": given.lora}
    result = []
    for whose, code in _WHOSE.items():
        own = [_PIECES[name] for name, value in pieces.items() if value == whose]
        result += [f"{code}: {', '.join(own)}, which write over what they are given"] if own else []
    if given.norm == "unsloth":
        result.append("Unsloth's norms have no gradient of their weights, whose gradients and states are counted still")
    if given.lora == "unsloth" and plan.fsdp.version == "1":
        result.append("adapters are whole on every rank: FSDP is told to ignore them, and hooks reduce their gradients")
    return tuple(result)


def of_delta_nets(plan: ResolvedPlan) -> tuple[str, ...]:
    """Assumptions of gated delta nets where transformers' layers run."""
    if not plan.model.linear_interval:
        return ()
    if plan.kernels.delta == "fla":
        return (
            "gated delta nets run the kernels of flash-linear-attention 0.5 (chunk_gated_delta_rule) and causal-conv1d "
            "1.6 (causal_conv1d_fn), which transformers takes where both are installed",
        )
    return (
        "gated delta nets run transformers' own operators (torch_chunk_gated_delta_rule, causal_conv1d_fn), as it does "
        "where flash-linear-attention and causal-conv1d are not installed (--delta-kernel fla: where both are)",
    )


_WHOSE = {"liger": "Liger 0.8's kernels", "unsloth": "fms-acceleration's kernels of Unsloth"}
_PIECES = {
    "norm": "RMSNorm",
    "rope": "rotary embedding",
    "mlp": "SwiGLU",
    "lora": "one function for LoRA on queries, keys and values, one on the attention's output",
}


def _of_graph(plan: ResolvedPlan) -> tuple[str, ...]:
    if plan.recompute.mode != "full":
        return ()
    return (
        "the embedding's output requires a gradient: transformers 5 sets this with gradient checkpointing "
        "(enable_input_require_grads)",
    )
