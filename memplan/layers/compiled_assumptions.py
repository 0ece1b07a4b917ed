"""What an estimate of a model under ``torch.compile`` takes for granted."""

from __future__ import annotations

from collections.abc import Mapping

INDUCTOR = (
    "as Inductor of PyTorch 2.13 writes {} for an H100, run on fake tensors at these sizes{}; other GPUs split sums "
    "otherwise"
)
ZEROS = "autograd fills a gradient of the logits with zeros, which the loss does not need; "
MASK = (
    "compiled, transformers passes a mask of (b, 1, s, s) to sdpa even where no token is masked: PyTorch leaves its "
    "flash kernel for the memory-efficient one, or cuDNN's, and keys and values are repeated for every head"
)
WHOLE = "torch.compile of the whole model, backend inductor, mode default: "
OF_LAYERS = "a layer's gradients of parameters are there when its backward graph ends"
HOW: Mapping[str, tuple[str, str, str]] = {
    "one graph": (
        f"{WHOLE}one graph, {INDUCTOR.format('it', ' with a few layers')}",
        MASK,
        f"{ZEROS}all gradients of parameters are there when the backward graph ends, and only then added to those of "
        "earlier micro-batches",
    ),
    "buckets": (
        f"{WHOLE}DDPOptimizer (optimize_ddp, as by default) cuts the graph wherever parameters fill a bucket, and each "
        f"part is compiled by itself, {INDUCTOR.format('it', '')}",
        MASK,
        f"{ZEROS}a part's gradients of parameters are there when its backward graph ends",
    ),
    "layers": (
        f"{WHOLE}fully_shard's hooks, which torch does not compile (skip_fsdp_hooks, as by default), cut the graph; "
        "every layer, the final norm, and head with loss are graphs of their own, "
        f"{INDUCTOR.format('them', '')}",
        MASK,
        f"{ZEROS}(Accelerate 1.14 and later gives the head hooks, too: its loss alone is a graph, without these zeros)"
        f"; {OF_LAYERS}",
    ),
    "regions": (
        "torch.compile of every layer and of the final norm (Accelerate's use_regional_compilation), backend inductor, "
        f"mode default, {INDUCTOR.format('them', '')}; embedding, head and loss run as they do without it",
        "no token is masked: a layer that is compiled by itself is given no mask, as without the compiler",
        f"the model's own unit has embedding and head, as up to Accelerate 1.13; {OF_LAYERS}",
    ),
}
"""By how torch cuts the graph (``Supports.compiled_as``): what is compiled, which attention runs, and when gradients
are there."""
SHAPES = (
    "batches have one shape: others compile another graph, for any shape; a batch without gradients has a graph of its "
    "own, which takes no more; what kernels and their compilation take inside is not counted; times, where shown, are "
    "of the code without the compiler"
)


def assumptions(how: str) -> tuple[str, ...]:
    """Taken for granted, with the graph cut so."""
    return (*HOW[how], SHAPES)
