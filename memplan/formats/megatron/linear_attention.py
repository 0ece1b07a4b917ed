"""Megatron-LM's arguments of layers with linear attention, and the plan's fields that they are, both ways
(``megatron/training/arguments.py``, ``_add_experimental_attention_variant_args``; ``transformer_config.py``;
``models/gpt/experimental_attention_variant_module_specs.py``, ``get_linear_attention_pattern``)."""

from __future__ import annotations

from collections.abc import Sequence

from ...plan.errors import Node
from ...plan.plan import Plan
from ...plan.spec import MOST_LAYERS
from ..settings import Reader, Row, elsewhere
from .experts import evaluated

VARIANT, FREQUENCY = "--experimental-attention-variant", "--linear-attention-freq"
NET = "gated_delta_net"
"""The name that all releases know; newer ones say gdn, and warn."""
OTHERS = {
    "gdn2": "gated delta nets with decays and gates of each channel are not modelled yet",
    "dsa": "sparse attention is not modelled yet: what its indexer, its loss and its kernels keep",
}


def has_delta(plan: Plan) -> bool:
    model = plan.model
    return model.linear_interval > 0 or "G" in model.layer_pattern + model.mtp_pattern


def takes_turns(plan: Plan) -> bool:
    """Layers of a model that is no hybrid."""
    return plan.model.linear_interval > 0


def _variant(reader: Reader) -> None:
    """A hybrid's pattern says by itself which layers are gated delta nets."""
    node = reader.settings.word(VARIANT)
    if node is None:
        return
    if why := OTHERS.get(str(node.value)):
        raise node.wrong(VARIANT, f"must be gdn or left out: {why}")
    if reader.context.family == "hybrid":
        reader.building.because(VARIANT, "not read: the pattern says which layers are gated delta nets (G)")
        return
    given = reader.settings.word(FREQUENCY)
    if given is None:
        raise node.lacks(FREQUENCY, f"is missing: {VARIANT} needs it")
    interval = _interval(str(given.value), reader.building.size("model.layers"))
    if interval is None:
        raise given.wrong(
            FREQUENCY,
            "must be a whole number, 2 or more, or a list of as many ones and zeros as there are layers, with a 0 "
            "at every n-th place: other patterns are not modelled yet",
        )
    reader.building.put("model.linear_interval", Node(interval, given.origin), VARIANT, FREQUENCY)


def _interval(text: str, layers: int) -> int | None:
    """``la_freq_type``: every how many layers one has attention, the others linear attention (1 in a list)."""
    found = evaluated(text)
    if isinstance(found, list):
        wanted = found.index(0) + 1 if 0 in found else layers + 1
        same = [int((at + 1) % wanted != 0) for at in range(layers)]
        found = wanted if found == same and wanted <= MOST_LAYERS else None
    return found if found is not None and found > 1 else None


def _without(reader: Reader) -> str:
    items = reader.building.items
    patterns = "".join(str(items[name].value) for name in ("model.layer_pattern", "model.mtp_pattern") if name in items)
    return "" if "G" in patterns or "model.linear_interval" in items else f"no effect without {VARIANT}"


def _of(name: str, path: str, default: int) -> Row:
    return Row(name, path, "LATENT", default=default, least=1, without_effect=_without, when=has_delta)


ROWS: Sequence[Row] = (
    Row(VARIANT, "model.linear_interval", "LATENT", "word", read=_variant, value=lambda plan: NET, when=takes_turns),
    Row(FREQUENCY, "model.linear_interval", "LATENT", "word", read=elsewhere, when=takes_turns),
    _of("--linear-conv-kernel-dim", "model.linear_conv_kernel", 4),
    _of("--linear-key-head-dim", "model.linear_key_head_dim", 128),
    _of("--linear-value-head-dim", "model.linear_value_head_dim", 128),
    _of("--linear-num-key-heads", "model.linear_key_heads", 16),
    _of("--linear-num-value-heads", "model.linear_value_heads", 32),
)
