"""What trl's DPOTrainer and GRPOTrainer before 1.15 hold, on real tensors of the CPU: added to JSON under their
release.

Run with each of ``RELEASES`` (and datasets) importable: ``python -m tests.oracle.trl_whole_step``. Autocast is the
CPU's, around the model's ``forward``, whose outputs are then cast to fp32 as Accelerate does it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from .trl_step import COMPLETION, LENGTH, PAIRS, SAMPLES, evaluation_peak, grouped, paired, peaks, policy

STEPS = Path(__file__).parents[1] / "frameworks" / "trl_whole_steps.json"
RELEASES = ("1.0.0", "1.5.1", "1.9.2", "1.13.0")
"""Between which the code that makes log-probabilities, entropies and metrics is the same."""


def converted(model: Any) -> None:
    """As ``Accelerator.prepare_model`` wraps a model under mixed precision."""
    from accelerate.utils import convert_outputs_to_fp32

    model.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))


def reference_of(model: Any, dtype: torch.dtype) -> Any:
    made: Any = transformers.AutoModelForCausalLM
    reference = made.from_config(model.config, dtype=dtype).eval()
    reference.requires_grad_(False)
    return reference


def step(*, adapters: bool, precomputed: bool, recompute: bool, dtype: str, autocast: bool = False) -> dict[str, Any]:
    """Peaks of ``DPOTrainer._compute_loss``."""
    model, base = policy(adapters=adapters, recompute=recompute)
    if dtype == "float32":
        model.float()
    reference = None if adapters or precomputed else reference_of(base, getattr(torch, dtype))
    models = [one for one in (model, reference) if one is not None]
    for one in models if autocast else ():
        converted(one)
    loss = paired(model, reference, precomputed=precomputed)
    ids = torch.randint(0, base.config.vocab_size, (2 * PAIRS, LENGTH))
    ones = torch.ones_like(ids)
    inputs = {"input_ids": ids, "attention_mask": ones, "completion_mask": ones.clone()}
    if precomputed:
        inputs |= {"ref_chosen_logps": torch.zeros(PAIRS), "ref_rejected_logps": torch.zeros(PAIRS)}
    how = {
        "adapters": adapters,
        "precomputed": precomputed,
        "recompute": recompute,
        "dtype": dtype,
        "autocast": autocast,
    }
    found = how | peaks(models, inputs, lambda: loss(model, inputs))
    model.eval()
    return found | {"evaluation": evaluation_peak(models, inputs, lambda: loss(model, inputs))}


def grouped_step(*, adapters: bool, recompute: bool, dtype: str, autocast: bool = False) -> dict[str, Any]:
    """The same of ``GRPOTrainer._compute_loss``."""
    model, _ = policy(adapters=adapters, recompute=recompute)
    if dtype == "float32":
        model.float()
    if autocast:
        converted(model)
    loss, inputs = grouped(model, SAMPLES, LENGTH, COMPLETION)
    how = {"adapters": adapters, "recompute": recompute, "dtype": dtype, "autocast": autocast}
    return how | peaks([model], inputs, lambda: loss(model, inputs))


def main() -> None:
    import trl  # type: ignore[import-untyped]

    assert trl.__version__ in RELEASES, trl.__version__
    both = (False, True)
    made = [
        {"loop": "dpo", **step(adapters=a, precomputed=p, recompute=r, dtype="bfloat16")}
        for a in both for p in both for r in both
    ]  # fmt: skip
    made += [{"loop": "grpo", **grouped_step(adapters=a, recompute=r, dtype="bfloat16")} for a in both for r in both]
    for autocast in both:
        made += [
            {"loop": "dpo", **step(adapters=a, precomputed=a, recompute=a, dtype="float32", autocast=autocast)}
            for a in both
        ]
        made.append(
            {
                "loop": "dpo",
                **step(adapters=True, precomputed=False, recompute=False, dtype="float32", autocast=autocast),
            }
        )
        made += [
            {"loop": "grpo", **grouped_step(adapters=a, recompute=a, dtype="float32", autocast=autocast)} for a in both
        ]
    kept = json.loads(STEPS.read_text()) if STEPS.exists() else []
    others = [one for one in kept if one["trl"] != trl.__version__]
    every = sorted(
        [*others, *({"trl": trl.__version__, **one} for one in made)], key=lambda one: RELEASES.index(one["trl"])
    )
    STEPS.write_text("[\n" + ",\n".join(json.dumps(one) for one in every) + "\n]\n")


if __name__ == "__main__":
    main()
