"""``memplan models``, ``gpus`` and ``schema``: what is built in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from ..plan.errors import one_line, wrong_at
from ..plan.library import LearnedModel, hub_ids, learned_models, model_specs
from ..plan.spellings import plain
from .output import Json, NoColor, console, print_json, printing

_CALLED = {
    "layers": ("num_hidden_layers", "num_layers", "n_layers", "encoder_layers"),
    "hidden": ("hidden_size", "d_model", "dim"),
    "heads": ("num_attention_heads", "num_heads", "n_heads", "encoder_attention_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim", "d_kv"),
    "ffn": ("intermediate_size", "d_ff", "hidden_dim", "encoder_ffn_dim"),
    "vocab": ("vocab_size",),
}
"""What configurations of Hugging Face call them."""

Part = Annotated[str, typer.Argument(metavar="NAME", help="Only those whose names hold this.")]


def models(part: Part = "", json: Json = False, no_color: NoColor = False) -> int:
    """Models that are built in, with their sizes."""
    from ..plan.count import parameters
    from ..plan.models import load_spec

    found = _holding(part, [*model_specs(), *learned_models()])
    specs = [load_spec(name) for name in found if name in model_specs()]
    learned = [learned_models()[name] for name in found if name in learned_models()]
    if json:
        known = [
            {
                **spec.model_dump(mode="json"),
                "parameters": parameters(spec),
                "learned": False,
                "hub": hub_ids()[spec.name],
            }
            for spec in specs
        ]
        print_json([*known, *map(_learned, learned)])
        return 0
    from ..report.names import elements

    rows: list[tuple[str, ...]] = [
        (
            spec.name,
            elements(parameters(spec)),
            str(spec.layers),
            str(spec.hidden),
            str(spec.heads) if spec.heads == spec.kv_heads else f"{spec.heads}/{spec.kv_heads}",
            str(spec.vocab),
            str(spec.positions_max),
            "",
        )
        for spec in specs
    ]
    for one in learned:
        sizes = _sizes(one)
        heads = dict.fromkeys(str(sizes[name]) for name in ("heads", "kv_heads") if name in sizes)
        others = [str(sizes.get(name, "")) for name in ("layers", "hidden", "vocab", "positions_max")]
        rows.append((one.name, elements(one.parameters), *others[:2], "/".join(heads), *others[2:], "*"))
    headings = ("model", "params", "layers", "hidden", "heads", "vocab", "longest", "")
    under = "* without a recipe, learned from traces: framework single, most with ddp, deepspeed and fsdp"
    _print_table(headings, rows, no_color, under if learned else "")
    return 0


def _learned(model: LearnedModel) -> dict[str, Any]:
    """A model without a recipe, as JSON: of what others say the sizes, null where its configuration names none."""
    config = model.configuration()
    known = {"name": model.name, "family": config["model_type"], **dict.fromkeys((*_CALLED, "positions_max"))}
    known |= _sizes(model)
    published = {"published_parameters": model.parameters, "source": model.source, "parameters": model.parameters}
    return {**known, **published, "learned": True, "hub": model.hub, "config": config}


def _sizes(model: LearnedModel) -> dict[str, int]:
    """Sizes by their names in a spec; none that the configuration does not name."""
    from ..plan.traced_spec import length_in

    config = model.configuration()
    found = {
        size: next((config[name] for name in names if type(config.get(name)) is int), None)
        for size, names in _CALLED.items()
    }
    found["positions_max"] = length_in(config, model.config)
    return {size: value for size, value in found.items() if value is not None}


def gpus(part: Part = "", json: Json = False, no_color: NoColor = False) -> int:
    """GPUs that are built in, with the memory that their drivers show."""
    from dataclasses import asdict

    from ..device.contexts import context_causes
    from ..device.gpus import GPUS

    def contexts(gpu: str) -> tuple[int, int] | None:
        found = context_causes(gpu)
        return (sum(one.least for one in found), sum(one.most for one in found)) if found else None

    listed = [GPUS[name] for name in _holding(part, GPUS)]
    if json:
        print_json([{**asdict(gpu), "context_range_bytes": contexts(gpu.name)} for gpu in listed])
        return 0
    rows = [
        (
            gpu.name,
            f"{gpu.capacity_bytes / 2**20:,.0f}",
            ".".join(map(str, gpu.compute_capability or ())),
            "" if (span := contexts(gpu.name)) is None else f"{span[0] / 2**20:,.0f} to {span[1] / 2**20:,.0f}",
        )
        for gpu in listed
    ]
    _print_table(("GPU", "memory MiB", "compute capability", "CUDA context MiB"), rows, no_color)
    return 0


def schema() -> int:
    """The JSON Schema of a plan, for editors."""
    from ..plan.schema import plan_schema

    print_json(plan_schema())
    return 0


def _holding(part: str, names: Iterable[str]) -> list[str]:
    """Those of ``names`` in which ``part`` is; to refuse what is in none."""
    found = [name for name in names if plain(part) in plain(name)]
    if not found:
        raise wrong_at("NAME", f"no name of this list holds {one_line(part)}")
    return found


def _print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], no_color: bool, under: str = "") -> None:
    """The first column is of names, the others of figures; ``under`` it a line."""
    from ..report.printing import left, plain_table, put, right

    table = plain_table(left(headings[0]), *map(right, headings[1:]))
    for row in rows:
        table.add_row(*row)
    with printing():
        put(console(no_color), table)
        if under:
            put(console(no_color), under)
