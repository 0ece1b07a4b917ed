"""What LLaMA-Factory's own DPO loss holds, on real tensors of the CPU: written to JSON, since it is no dependency.

Run with LLaMA-Factory of August 2026 and trl 0.24 importable: ``python -m tests.oracle.llama_factory_step``. Its code
runs as it is, but for ``log_softmax``, which copies a view first, as CUDA's kernel does inside.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import transformers

from .trl_step import LENGTH, PAIRS, peaks, policy

STEPS = Path(__file__).parents[1] / "frameworks" / "llama_factory_dpo_steps.json"
of_view = torch.Tensor.log_softmax


def step(*, adapters: bool, recompute: bool) -> dict[str, Any]:
    """Peaks of forward with loss, and of backward, beyond what is held before, of ``get_batch_loss_metrics``."""
    model, base = policy(adapters=adapters, recompute=recompute)
    reference = None
    if not adapters:
        made: Any = transformers.AutoModelForCausalLM
        reference = made.from_config(base.config, dtype=torch.bfloat16).eval()
        reference.requires_grad_(False)
    loss = paired(model, reference)
    ids = torch.randint(0, base.config.vocab_size, (2 * PAIRS, LENGTH))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    models = [one for one in (model, reference) if one is not None]
    with patch.object(torch.Tensor, "log_softmax", lambda x, dim: of_view(x.contiguous(), dim)):
        found = peaks(models, inputs, lambda: loss(model, inputs))
    return {"adapters": adapters, "recompute": recompute, **found}


def paired(model: Any, reference: Any) -> Callable[[Any, Any], Any]:
    """``CustomDPOTrainer.get_batch_loss_metrics`` with its defaults."""
    from llamafactory.train.dpo.trainer import CustomDPOTrainer  # type: ignore[import-not-found]

    class Own(CustomDPOTrainer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.finetuning_args = SimpleNamespace(use_ref_model=True)
            same = lambda x: x  # noqa: E731
            self.accelerator = SimpleNamespace(device=torch.device("cpu"), unwrap_model=same, gather_for_metrics=same)
            self.ref_model, self.beta, self.loss_type, self.label_smoothing = reference, 0.1, "sigmoid", 0.0
            self.ftx_gamma = self.bco_gemma = self.simpo_gamma = 0.0
            self.ld_alpha, self.f_divergence_type, self.reference_free = None, "reverse_kl", False
            self._stored_metrics: Any = defaultdict(lambda: defaultdict(list))

    own = Own()
    return lambda outer, inputs: own.get_batch_loss_metrics(outer, inputs)[0]


def main() -> None:
    both = (False, True)
    STEPS.write_text(json.dumps([step(adapters=a, recompute=r) for a in both for r in both], indent=1) + "\n")


if __name__ == "__main__":
    main()
