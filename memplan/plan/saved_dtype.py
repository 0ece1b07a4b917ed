"""Parameters of dtype ``saved``: in which the checkpoint of the model was saved (transformers' ``modeling_utils.py``,
``_get_dtype``)."""

from __future__ import annotations

from pathlib import Path

from .errors import Node
from .models import saved_dtype
from .notes import Note

SAVED = "saved"
_PATHS = ("precision.dtype", "precision.parameters", "fsdp.parameters", "fsdp.reduce")
"""Fields of a plan that may say so."""
TAKEN = (
    "parameters are taken to be fp32; transformers 5 loads a checkpoint in the dtype that it was saved in: if "
    "the model was loaded so, give --autocast-parameters bf16"
)
"""Where no dtype of the checkpoint is known, under autocast."""


def with_saved_dtype(plan: Node, folder: Path) -> tuple[Node, tuple[Note, ...]]:
    """``plan`` with a dtype in place of ``saved``: the checkpoint's, or fp32 where nobody knows that, or where
    GradScaler would stop at gradients of that dtype."""
    asked = {path: node for path in _PATHS if (node := plan.at(path)) is not None and node.value == SAVED}
    if not asked:
        return plan, ()
    quantised, autocast, adapters = map(plan.at, ("quantisation.kind", "precision.autocast", "lora.rank"))
    is_mixed, model = autocast is not None and autocast.value is True, plan.mapping.get("model")
    known = saved_dtype(model, folder) if model is not None else None
    dtype, note = "fp32", TAKEN if is_mixed else TAKEN.replace("--autocast-parameters", "--dtype")
    if quantised is not None and quantised.value not in (None, "none"):
        note = ""
    elif known is not None:
        dtype, source = known
        mixed = plan.at("precision.dtype")
        scaled = is_mixed and mixed is not None and mixed.value == "fp16" and dtype != "fp32"
        flag = "--autocast-parameters" if is_mixed else "--dtype"
        note = f"parameters are {dtype}, as the checkpoint was saved ({source}), which is how transformers 5 loads a "
        note += f"model where nobody names a dtype; {flag} says another"
        if scaled and not (dtype == "fp16" and adapters is not None and adapters.value):
            note = f"parameters are taken to be fp32: the checkpoint was saved in {dtype} ({source}), and transformers "
            note += f"5 loads it so where nobody names a dtype, but GradScaler stops at gradients in {dtype}"
            dtype = "fp32"
    for path, node in asked.items():
        without = path == "precision.parameters" and (known is None or not note or not is_mixed)
        plan = plan.put(path, Node(None if without else dtype, node.origin))
    return plan, (Note("loaded-dtype", note),) if note else ()
