"""Megatron-LM's arguments of hybrids (``pretrain_hybrid.py``, until 2026 ``pretrain_mamba.py``), and the plan's fields
that they are, both ways (``megatron/core/models/hybrid/hybrid_layer_allocation.py``; ``validate_args``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...plan.errors import Node, PlanError
from ...plan.megatron_layout import Stages, layout_text, stages
from ...plan.plan import Plan
from ...plan.spec import MOST_LAYERS
from ..settings import NEEDED, Reader, Row, elsewhere, switch

PATTERN, OLDER = "--hybrid-layer-pattern", "--hybrid-override-pattern"
FURTHER = "--mtp-num-layers"
OLDER_FURTHER = "--mtp-hybrid-override-pattern"
RATIOS = ("--hybrid-attention-ratio", "--hybrid-mlp-ratio")
SPEC = ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec")
STACKS = (SPEC[1], "mamba_stack_spec")
"""Specifications of layers that are modelled, the second as it was called until 2026."""

KINDS = "M*-EG"
OTHERS = {"D": "sparse attention", "+": "latent attention"}
"""Kinds of layers that are not modelled, by their letters."""


def is_hybrid(plan: Plan) -> bool:
    return bool(plan.model.layer_pattern)


def is_plain(plan: Plan) -> bool:
    """A model whose stages are cut by other arguments than its pattern."""
    return not is_hybrid(plan)


def without_pattern(reader: Reader) -> str:
    return "" if reader.context.family == "hybrid" else f"no effect without {PATTERN}"


def _pattern(reader: Reader) -> None:
    """The main pattern, its layers, and where ``|`` cuts it."""
    settings, building = reader.settings, reader.building
    names = [name for name in (PATTERN, OLDER, *RATIOS) if settings.has(name)]
    if len(names) > 1 and names[0] in (PATTERN, OLDER):
        raise settings.wrong(names[1], f"must be left out with {names[0]}")
    node = settings.word(names[0]) if names and names[0] in (PATTERN, OLDER) else _of_ratios(reader)
    name, text = (names or [PATTERN])[0], str(node.value)
    main, *further = text.split("/")
    said = (name,) if any(further) else (OLDER_FURTHER, FURTHER)
    further = [one for one in further if one] or _older_further(reader)
    if len(set(further)) > 1:
        problem = "has different layers behind each /, which Megatron-Core refuses"
        raise PlanError(name, text[:100], problem, origin=node.origin)
    for letter in main + "".join(further[:1]):
        if letter not in KINDS + "|":
            known = OTHERS.get(letter)
            why = f"{known} are not modelled yet" if known else "it is no kind of layer"
            problem = (
                f"has {letter!r}: {why}; M Mamba-2, * attention, - MLP, E experts and G gated delta nets are, "
                "and | between stages"
            )
            raise PlanError(name, text[:100], problem, origin=node.origin)
    segments = main.split("|")
    pattern = "".join(segments)
    if not 0 < len(pattern) <= MOST_LAYERS:
        raise PlanError(name, text[:100], f"must have 1 to {MOST_LAYERS} layers", origin=node.origin)
    building.put("model.layer_pattern", Node(pattern, node.origin), *(names or [PATTERN]))
    building.items["model.layers"] = Node(len(pattern), node.origin)
    if further:
        building.put("model.mtp_pattern", Node(further[0], node.origin), *said)
        building.put("model.mtp_layers", Node(len(further), node.origin), *said)
    if len(segments) > 1:
        layout = "E" + "|".join("t" * len(segment) for segment in segments) + "L"
        building.put("pipeline.layout", Node(layout, node.origin), name)


def _older_further(reader: Reader) -> list[str]:
    """Layers of multi-token prediction in an argument of their own, as before 2026."""
    pattern, count = reader.settings.word(OLDER_FURTHER), reader.settings.integer(FURTHER)
    return [] if pattern is None or count is None else [str(pattern.value)] * int(str(count.value))


def further_layers(reader: Reader) -> None:
    """``--mtp-num-layers``; of a hybrid its pattern says how many, unless these layers have one of their own."""
    node = reader.settings.integer(FURTHER)
    if reader.context.family == "hybrid":
        if FURTHER not in reader.building.became:
            reader.building.because(FURTHER, f"not read: {PATTERN} says how many")
    elif node is not None:
        reader.building.put("model.mtp_layers", node, FURTHER)


def _of_ratios(reader: Reader) -> Node:
    """``pattern_from_ratios``: attention at even distances, Mamba at both ends, and MLPs among the rest; older releases
    without a ratio have Mamba alone."""
    settings = reader.settings
    layers = settings.integer("--num-layers")
    if layers is None:
        raise settings.wrong(PATTERN, "is missing: the training cannot start without it")
    total, where = int(str(layers.value)), settings.where(*RATIOS, "--num-layers")
    parts = [float(str(node.value)) if (node := settings.number(name)) is not None else 0.0 for name in RATIOS]
    if not 0 < total <= MOST_LAYERS or min(parts) < 0 or sum(parts) > 1:
        problem = f"needs ratios from 0 to 1 together, of 1 to {MOST_LAYERS} layers"
        raise PlanError(RATIOS[0], parts[0], problem, origin=where)
    attention, mlps = (round(total * part) for part in parts)
    section = (total - attention) / (attention + 1)
    kinds = _spread(["M"] * total, "*", section)
    return Node("".join(_spread(kinds, "-", (total - attention - mlps) / mlps) if mlps else kinds), where)


def _spread(kinds: list[str], letter: str, distance: float) -> list[str]:
    """``letter`` in the place of a Mamba layer after every ``distance`` of them."""
    left, made = distance, []
    for kind in kinds:
        if kind != "M":
            made.append(kind)
        elif left < 0.5:
            made.append(letter)
            left += distance
        else:
            made.append("M")
            left -= 1
    return made


def _layers(reader: Reader) -> None:
    """A pattern's length counts, whatever ``--num-layers`` says."""
    name, building = "--num-layers", reader.building
    given = reader.settings.integer(name) or reader.settings.integer("--encoder-num-layers")
    if "model.layers" in building.items:
        building.because(name, f"not read: model.layers = {building.size('model.layers')} from the pattern")
    elif given is None:
        raise reader.settings.wrong(name, "is missing: the training cannot start without it")
    else:
        building.put("model.layers", given, name)


def chunks(reader: Reader, others: Sequence[str]) -> int | None:
    """Virtual stages of a rank; ``None`` unless a pattern says so. Hybrids have no arguments of ``others``."""
    if reader.context.family != "hybrid":
        return None
    settings, building = reader.settings, reader.building
    for name in others:
        if settings.has(name):
            raise settings.wrong(name, f"must be left out with {PATTERN}, whose | cut it into stages")
    layout, pp = building.items.get("pipeline.layout"), building.size("layout.pp")
    count = 1 if layout is None else str(layout.value).count("|") + 1
    if layout is not None and count % pp:
        raise layout.lacks(PATTERN, f"has {count} segments, which the {pp} ranks of the pipeline must divide")
    return max(1, count // pp)


def _heads(reader: Reader) -> Node:
    """As many as fill twice the hidden size (``MambaMixer.__init__``)."""
    inner, size = 2 * reader.building.size("model.hidden"), reader.building.items["model.mamba_head_dim"]
    if not isinstance(size.value, int) or inner % size.value:
        raise size.wrong(
            "--mamba-head-dim", f"must divide {inner}, twice the hidden size, unless --mamba-num-heads is given"
        )
    return Node(inner // size.value, size.origin)


def stages_of(plan: Plan) -> Stages:
    """What each stage and virtual chunk of ``plan`` holds."""
    layout, pipeline = plan.layout, plan.pipeline
    return stages(
        plan.model.layers, layout.pp, layout.vpp, pipeline.first_layers, pipeline.last_layers,
        pipeline.count_embedding, pipeline.count_loss, pipeline.layout,
    )  # fmt: skip


def _written(plan: Plan) -> str:
    """The pattern, cut where the plan's stages are, and what predicts further tokens."""
    pattern = plan.model.layer_pattern
    further = f"/{plan.model.mtp_pattern}" * plan.model.mtp_layers
    if plan.layout.pp == 1:
        return pattern + further
    parts = [stage[chunk].layers for chunk in range(plan.layout.vpp) for stage in stages_of(plan)]
    return "|".join("".join(pattern[layer] for layer in part) for part in parts) + further


def settled(plan: Plan) -> dict[str, Any]:
    """Stages as the pattern cuts them."""
    if not is_hybrid(plan):
        return {}
    cut: dict[str, Any] = {"first_layers": None, "last_layers": None, "count_embedding": False, "count_loss": False}
    if plan.layout.pp > 1:
        cut["layout"] = layout_text([[len(chunk.layers) for chunk in stage] for stage in stages_of(plan)])
    return {"pipeline": plan.pipeline.model_copy(update=cut)}


def _without_mamba(reader: Reader) -> str:
    items = reader.building.items
    patterns = (items[path].value for path in ("model.layer_pattern", "model.mtp_pattern") if path in items)
    return "" if any("M" in str(pattern) for pattern in patterns) else "no effect without Mamba-2 layers"


def _of(name: str, path: str, default: Any) -> Row:
    return Row(name, path, "HYBRID", default=default, least=1, without_effect=without_pattern, when=is_hybrid)


LAYERS: Sequence[Row] = (
    Row(
        PATTERN, "model.layer_pattern", "MODEL", "word", read=_pattern, older=(OLDER, *RATIOS),
        without_effect=without_pattern, when=is_hybrid, value=_written,
    ),
    Row("--num-layers", "model.layers", "MODEL", default=NEEDED, read=_layers, when=is_plain),
)  # fmt: skip
"""Before all rows that look at the model's layers."""

ROWS: Sequence[Row] = (
    _of("--mamba-state-dim", "model.mamba_state_dim", 128),
    _of("--mamba-head-dim", "model.mamba_head_dim", 64),
    _of("--mamba-num-groups", "model.mamba_groups", 8),
    _of("--mamba-num-heads", "model.mamba_heads", _heads),
    Row("--hybrid-mlp-ratio", "model.layer_pattern", "", "number", read=elsewhere),
    switch(
        "--disable-mamba-mem-eff-path", "megatron.mamba_apart", "HYBRID", without_effect=_without_mamba,
        when=lambda plan: plan.megatron.mamba_apart,
    ),
    Row(
        "--mamba-training-ssm-states-dtype", "megatron.mamba_states", "HYBRID", "word", without_effect=_without_mamba,
        when=lambda plan: plan.megatron.mamba_states is not None,
    ),
    Row(
        "--mamba-chunk-size", "megatron.mamba_chunk", "", without_effect=_without_mamba,
        when=lambda plan: plan.megatron.mamba_chunk != 128,
    ),  # of no parser
)  # fmt: skip
