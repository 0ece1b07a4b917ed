"""What trl's KTOTrainer, RLOOTrainer, CPOTrainer and ORPOTrainer hold, on real tensors of the CPU: added to JSON under
their release, since trl is no dependency.

Run with each of ``RELEASES`` (and datasets, and triton) importable: ``python -m tests.oracle.trl_alone_step``. Triton's
kernels, which allocate nothing, do nothing.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import transformers

from .trl_fsdp import sharded as in_shards
from .trl_step import (
    COMPLETION,
    EVALUATED,
    LENGTH,
    PAIRS,
    SAMPLES,
    as_on_cuda,
    evaluation_peak,
    grouped,
    peaks,
    policy,
)
from .trl_whole_step import converted

STEPS = Path(__file__).parents[1] / "frameworks" / "trl_alone_steps.json"
RELEASES = ("1.0.0", "1.13.0", "1.16.0")
"""Until 1.13 log-probabilities of CPO and ORPO are made row by row; KTO and RLOO are followed from 1.15 on."""


class NoKernel:
    """In the place of one of Triton's."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *given, **named: None


def with_kernels() -> None:
    """Log-probabilities of logits as a GPU has them, where this release has kernels for them."""
    import trl.trainer.utils as utils  # type: ignore[import-untyped]

    if not hasattr(utils, "_supports_trl_loss_kernel"):
        return
    import trl.kernels.logprob_entropy as kernel  # type: ignore[import-untyped]

    utils.is_triton_available = utils._supports_trl_loss_kernel = lambda *given: True
    utils._fused_logprob_entropy = kernel.selective_log_softmax_and_entropy
    kernel._forward_kernel = kernel._backward_kernel = NoKernel()


def measured(models: list[Any], own: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Peaks of a step, and of an evaluation of more."""
    model = models[0]
    found = peaks(models, inputs, lambda: own(model, inputs))
    model.eval()
    repeated = {name: torch.cat([one] * EVALUATED) for name, one in inputs.items()}
    return found | {"evaluation": evaluation_peak(models, repeated, lambda: own(model, repeated))}


def bound(kind: Any, names: tuple[str, ...], **said: Any) -> Any:
    """What stands for a trainer of class ``kind``, with these of its methods."""
    same: Any = lambda x, **named: x  # noqa: E731
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather_for_metrics=same, gather=same, reduce=same, unwrap_model=same,
        autocast=contextlib.nullcontext, num_processes=1,
    )  # fmt: skip
    own = SimpleNamespace(
        accelerator=accelerator, aux_loss_enabled=False, _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0, _tp_size=1, **said,
    )  # fmt: skip
    for name in names:
        made = inspect.getattr_static(kind, name)
        function = inspect.unwrap(getattr(kind, name))
        setattr(own, name, function if isinstance(made, staticmethod) else MethodType(function, own))
    return own


def unpaired_step(*, adapters: bool, precomputed: bool, recompute: bool) -> dict[str, Any]:
    """``KTOTrainer._compute_loss``: as many sequences that were chosen as were not."""
    from trl.trainer.kto_trainer import KTOTrainer  # type: ignore[import-untyped]

    utils, _ = as_on_cuda()
    model, base = policy(adapters=adapters, recompute=recompute)
    reference = None
    if not adapters and not precomputed:
        reference = transformers.AutoModelForCausalLM.from_config(base.config, dtype=torch.bfloat16).eval()
        reference.requires_grad_(False)  # type: ignore[no-untyped-call]
        utils.add_fused_lm_head(reference)
    utils.add_fused_lm_head(base, outputs=("log_probs", "entropy", "mean_logits"))
    own = bound(
        KTOTrainer, ("_compute_kl_logps",), model=model, ref_model=reference, precompute_ref_logps=precomputed,
        calculate_KL=True, args=SimpleNamespace(gradient_checkpointing_kwargs=None), beta=0.1, loss_type="kto",
        desirable_weight=1.0, undesirable_weight=1.0,
    )  # fmt: skip
    ids = torch.randint(0, base.config.vocab_size, (SAMPLES, LENGTH))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": torch.ones_like(ids)}
    inputs |= {f"KL_{name}": one.clone() for name, one in inputs.items()}
    inputs["label"] = torch.arange(SAMPLES) % 2 == 0
    if precomputed:
        inputs |= {"ref_logps": torch.zeros(SAMPLES), "ref_KL_logps": torch.zeros(SAMPLES)}
    models = [one for one in (model, reference) if one is not None]
    how = {"loop": "kto", "adapters": adapters, "precomputed": precomputed, "recompute": recompute}
    return how | measured(models, lambda outer, given: KTOTrainer._compute_loss(own, outer, given, False), inputs)


def grouped_step(*, adapters: bool, recompute: bool, sharded: bool = False) -> dict[str, Any]:
    """``RLOOTrainer._compute_loss``."""
    utils, _ = as_on_cuda()
    model, base = policy(adapters=adapters, recompute=recompute)
    utils.add_fused_lm_head(base, outputs=("log_probs", "entropy"))
    how = {"loop": "rloo", "adapters": adapters, "recompute": recompute}
    if sharded:
        return how | {"sharded": True} | in_shards(model, base, of_completions, apart=True)
    return how | measured([model], *of_completions(model))


def of_completions(model: Any) -> tuple[Callable[[Any, Any], Any], dict[str, Any]]:
    """``RLOOTrainer._compute_loss`` of a model, which an engine may be around, and a batch for it."""
    from trl.trainer.rloo_trainer import RLOOTrainer  # type: ignore[import-untyped]

    own = bound(RLOOTrainer, ("_get_per_token_logps_and_entropies",), model=model, epsilon_low=0.2, epsilon_high=0.2)
    _, inputs = grouped(model, SAMPLES, LENGTH, COMPLETION)
    inputs = {**inputs, "old_logps": torch.randn(SAMPLES)}
    del inputs["num_items_in_batch"]
    return lambda outer, given: RLOOTrainer._compute_loss(own, outer, given), inputs


def alone_step(
    loop: str, *, adapters: bool, recompute: bool, dtype: str, autocast: bool = False, sharded: bool = False
) -> dict[str, Any]:
    """The same of a policy without a reference, in ``dtype``, or under autocast, or in shards."""
    with_kernels()
    model, base = policy(adapters=adapters, recompute=recompute)
    how = {"loop": loop, "adapters": adapters, "recompute": recompute, "dtype": dtype, "autocast": autocast}
    if sharded:
        return how | {"sharded": True} | in_shards(model, base, partial(alone, loop), apart=True)
    if dtype == "float32":
        model.float()
    if autocast:
        converted(model)
    return how | measured([model], *alone(loop, model))


def alone(loop: str, model: Any) -> tuple[Callable[[Any, Any], Any], dict[str, Any]]:
    """``get_batch_loss_metrics`` of ORPOTrainer, or of CPOTrainer with a cross entropy (cpo) or without (simpo), of a
    model, which an engine may be around, and a batch for it."""
    from trl.experimental.cpo import CPOTrainer  # type: ignore[import-untyped]
    from trl.experimental.orpo import ORPOTrainer  # type: ignore[import-untyped]

    kind = ORPOTrainer if loop == "orpo" else CPOTrainer
    methods = ("concatenated_inputs", "get_batch_logps", "concatenated_forward")
    own = bound(
        kind, (*methods, "odds_ratio_loss" if loop == "orpo" else "cpo_loss"), model=model, is_encoder_decoder=False,
        padding_value=0, pad_token_id=0, beta=0.1, alpha=0.0, label_smoothing=0.0,
        loss_type="simpo" if loop == "simpo" else "sigmoid", cpo_alpha=float(loop != "simpo"), simpo_gamma=0.5,
    )  # fmt: skip
    ids = torch.randint(0, model.config.vocab_size, (PAIRS, LENGTH))
    inputs = {
        f"{one}_{name}": made.clone()
        for one in ("chosen", "rejected")
        for name, made in (("input_ids", ids), ("attention_mask", torch.ones_like(ids)), ("labels", ids))
    }
    return lambda outer, given: kind.get_batch_loss_metrics(own, outer, given, "train")[0], inputs


def main() -> None:
    import trl  # type: ignore[import-untyped]

    assert trl.__version__ in RELEASES, trl.__version__
    both = (False, True)
    made = [
        alone_step(one, adapters=a, recompute=a, dtype="bfloat16") for one in ("orpo", "cpo", "simpo") for a in both
    ]
    made += [alone_step("orpo", adapters=False, recompute=False, dtype="float32")]
    made += [
        alone_step(one, adapters=a, recompute=a, dtype="float32", autocast=True)
        for one, a in (("cpo", True), ("simpo", False))
    ]
    if trl.__version__ == RELEASES[-1]:
        made += [unpaired_step(adapters=a, precomputed=p, recompute=r) for a in both for p in both for r in both]
        made += [grouped_step(adapters=a, recompute=r) for a in both for r in both]
        made += [grouped_step(adapters=a, recompute=a, sharded=True) for a in both]
        made += [
            alone_step(one, adapters=a, recompute=a, dtype="bfloat16", sharded=True)
            for one in ("orpo", "simpo")
            for a in both
        ]
    kept = json.loads(STEPS.read_text()) if STEPS.exists() else []
    others = [one for one in kept if one["trl"] != trl.__version__]
    every = sorted(
        [*others, *({"trl": trl.__version__, **one} for one in made)], key=lambda one: RELEASES.index(one["trl"])
    )
    STEPS.write_text("[\n" + ",\n".join(json.dumps(one) for one in every) + "\n]\n")


if __name__ == "__main__":
    main()
