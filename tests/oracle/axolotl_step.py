"""What Axolotl's DPO holds, on real tensors of the CPU: trl's loss with Axolotl's own functions in it, written to JSON,
since neither is a dependency.

Run with trl 1.9 (and datasets, triton, and Axolotl's sources of July 2026) importable:
``python -m tests.oracle.axolotl_step``. Triton's kernels, which allocate nothing, do nothing; what the functions ask of
a tensor's device is answered as a GPU's would be.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .trl_alone_step import NoKernel
from .trl_step import EVALUATED, LENGTH, PAIRS, evaluation_peak, paired, peaks, policy
from .trl_whole_step import converted, reference_of

STEPS = Path(__file__).parents[1] / "frameworks" / "axolotl_dpo_steps.json"


def patched() -> None:
    """``PatchManager._apply_trl_trainer_utils_patches``, before the trainer is imported."""
    import axolotl.monkeypatch.trainer.utils as own  # type: ignore[import-not-found]
    import trl.trainer.dpo_trainer as trainer  # type: ignore[import-untyped]

    source = inspect.getsource(own).replace("logits.is_cuda", "True").replace("@register_kernel_op", "@as_function")
    made: Any = ModuleType("axolotl_on_cuda")
    made.as_function = lambda name: plain
    sys.modules[made.__name__] = made
    exec(compile(source, own.__file__, "exec"), made.__dict__)
    for name in [one for one in vars(made) if one.endswith(("_kernel", "_kernel_strided"))]:
        setattr(made, name, NoKernel())
    trainer.selective_log_softmax, trainer.entropy_from_logits = made.selective_log_softmax, made.entropy_from_logits


def plain(function: Any) -> Any:
    """An operator as its function, which allocates what the operator does."""
    function.register_fake = lambda fake: fake
    return function


def step(*, adapters: bool, precomputed: bool, recompute: bool, autocast: bool = False) -> dict[str, Any]:
    """Peaks of ``DPOTrainer._compute_loss``."""
    model, base = policy(adapters=adapters, recompute=recompute)
    if autocast:
        model.float()
    dtype = torch.float32 if autocast else torch.bfloat16
    reference = None if adapters or precomputed else reference_of(base, dtype)
    models = [one for one in (model, reference) if one is not None]
    for one in models if autocast else ():
        converted(one)
    loss = paired(model, reference, precomputed=precomputed)
    ids = torch.randint(0, base.config.vocab_size, (2 * PAIRS, LENGTH))
    ones = torch.ones_like(ids)
    inputs = {"input_ids": ids, "attention_mask": ones, "completion_mask": ones.clone()}
    if precomputed:
        inputs |= {"ref_chosen_logps": torch.zeros(PAIRS), "ref_rejected_logps": torch.zeros(PAIRS)}
    how = {"adapters": adapters, "precomputed": precomputed, "recompute": recompute, "autocast": autocast}
    found = how | peaks(models, inputs, lambda: loss(model, inputs))
    model.eval()
    repeated = {name: torch.cat([one] * EVALUATED) for name, one in inputs.items()}
    return found | {"evaluation": evaluation_peak(models, repeated, lambda: loss(model, repeated))}


def main() -> None:
    patched()
    both = (False, True)
    steps = [step(adapters=a, precomputed=p, recompute=a) for a in both for p in both]
    steps.append(step(adapters=True, precomputed=False, recompute=True, autocast=True))
    STEPS.write_text("[\n" + ",\n".join(map(json.dumps, steps)) + "\n]\n")


if __name__ == "__main__":
    main()
