"""Models of transformers that Liger has patched, beside their recipes: ``python -m tests.oracle.liger_models MODEL …``.

A process of its own: what imports Liger's functions here goes on with kernels that do nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from . import training_step, triton_functions


def main(models: Sequence[str]) -> None:
    """Asserts that every event of a step with Liger's layers is the recipe's, with and without recompute."""
    patches = triton_functions.kept("liger_kernel", "transformers.monkey_patch")
    from ..layers import test_against_transformers as against

    class WithKernels(against.Case):
        flags = {"kernels": "liger", "loss": "plain", "gpu": "a100-80gb"}  # type: ignore[assignment]  # noqa: RUF012

    plain = training_step._model

    def patched(*given: Any) -> Any:
        model = plain(*given)
        patches._apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=False)
        return model

    with TemporaryDirectory() as folder, patch.object(training_step, "_model", patched):
        for model in models:
            for recompute in ("none", "full"):
                case = WithKernels(model, 2, 37, "bf16", "eager", recompute)
                against.test_step_of_real_model(against.compared(case, Path(folder)))


if __name__ == "__main__":
    main(sys.argv[1:])
