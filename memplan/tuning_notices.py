"""What an estimate takes for granted where parameters are frozen, and of kernels."""

from __future__ import annotations

from .frameworks import framework
from .plan.lora import adapter_parameters, left_out, saved_parameters
from .plan.plan import ResolvedPlan
from .plan.tuning_checks import is_tuned


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
