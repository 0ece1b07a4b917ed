"""Megatron-LM's arguments and the plan's fields that they are, both ways.

Defaults and derivations are those of ``validate_args`` (``megatron/training/arguments.py``), of
``core_transformer_config_from_args`` (``argument_utils.py``) and of the builders (``gpt_builders.py``,
``examples/bert/pretrain_bert.py``), at the commit of ``formats/arguments/megatron.txt``.
"""

from __future__ import annotations

from ..forks import OF_MEGATRON_LM as FORKS  # noqa: F401  read beside ROWS
from ..settings import Building, Reader, Settings, read_rows
from . import experts, hybrid, linear_attention, low_precision, sharding, training
from .context import Context, start
from .layers import LAYERS
from .layout import BATCH, LAYOUT
from .model import MODEL
from .training import TRAINING


def plan_of(settings: Settings, context: Context) -> Building:
    """The plan of a training that ``settings`` start."""
    building = Building(settings.origin)
    version = settings.integer("--flash-attention-version")
    if version is not None and version.value != 2:
        problem = (
            "is not read beside what Transformer Engine chooses by itself: leave it out of the script, and say which "
        )
        problem += f"release is installed (--flash-attention-release {version.value})"
        raise version.wrong("--flash-attention-version", problem)
    start(building, "megatron", context)
    building.put("model.causal", context.family in ("gpt", "hybrid"))
    building.put("model.mlm_head", context.family == "bert")
    read_rows(ROWS, Reader(settings, building, context))
    return building


ROWS = (
    *MODEL,
    *hybrid.ROWS,
    *linear_attention.ROWS,
    *experts.ROWS,
    *LAYOUT,
    *BATCH,
    *TRAINING,
    *low_precision.ROWS,
    *LAYERS,
    *training.ROWS,
    *sharding.ROWS,
)
