"""A flag for every field of a plan, made from the fields' table, for the commands that take a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import Annotated, Any

import typer
from typer.models import OptionInfo

from ..plan.fields import Kind, PlanField, by_flag
from ..plan.library import model_specs
from ..plan.spellings import with_said_at_once
from .output import beginning

_PANELS = {
    "": "Job",
    "hardware": "Hardware",
    "layout": "Layout",
    "batch": "Batch",
    "precision": "Precision",
    "optimizer": "Optimizer",
    "recompute": "Recompute",
    "loss": "Loss",
    "lora": "Fine-tuning",
    "quantisation": "Fine-tuning",
    "frozen": "Fine-tuning",
    "kernels": "Fine-tuning",
    "pipeline": "Pipeline",
    "megatron": "Megatron-Core",
    "experts": "Experts",
    "ddp": "DDP and ZeroRedundancyOptimizer",
    "fsdp": "FSDP (fully_shard)",
    "deepspeed": "DeepSpeed",
    "trainer": "Hugging Face Trainer",
    "model": "Architecture, over the model's own",
}
_METAVARS = {
    Kind.INTEGER: "N",
    Kind.NUMBER: "X",
    Kind.TEXT: "TEXT",
    Kind.CHOICE: "NAME",
    Kind.INTEGERS: "N,N,…",
    Kind.NAMES: "NAME,…",
    Kind.PARTITION: "METHOD",
    Kind.SIZE: "SIZE",
    Kind.DEVICE_MAP: "MAP|FILE",
    Kind.VARIABLES: "NAME=VALUE",
    Kind.MODEL: "NAME|PATH",
}
_MARK, _OFF = "plan_", "off_"


def with_plan_flags(command: Callable[..., int], words: Collection[str] | None = None) -> Callable[..., int]:
    """``command`` with a flag for every field, all of them given to it as ``flags``: those that were set. With the
    ``words`` of a command line, only flags among them, fields' and the command's own, since each takes time to make."""
    if "flags" not in inspect.signature(command).parameters:
        return command

    @wraps(command)
    def with_flags(**values: Any) -> int:
        flags: dict[str, str | tuple[str, ...]] = {}
        for name in [name for name in values if name.startswith(_MARK)]:
            value = values.pop(name)
            if value is None or value == []:
                continue
            flag = name.removeprefix(_MARK).removeprefix(_OFF).replace("_", "-")
            if flag in flags:
                raise typer.BadParameter(f"--{flag} and --no-{flag} contradict each other; give one of them")
            flags[flag] = "false" if name.startswith(_MARK + _OFF) else _as_text(value)
        return command(**values, flags=with_said_at_once(flags))

    signature = inspect.signature(command, eval_str=True)
    own = [one for one in signature.parameters.values() if one.name != "flags" and _may_be_among(words, one)]
    fields = _shown_order(field for field in by_flag().values() if words is None or _is_among(words, field.flag))
    parameters = [*own, *(one for field in fields for one in _parameters(field))]
    with_flags.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_flags


def _may_be_among(words: Collection[str] | None, parameter: inspect.Parameter) -> bool:
    """Whether one of ``words`` names ``parameter``, or is an argument, or short flags, which can be written as one."""
    option = next((one for one in parameter.annotation.__metadata__ if isinstance(one, OptionInfo)), None)
    if words is None or option is None or parameter.default is parameter.empty:
        return True
    short = any(len(word) > 1 and word[0] == "-" and word[1] != "-" for word in words)
    names = (str(option.default), *(option.param_decls or ()))  # typer takes the first name for the default
    return any(name in words or (short and not name.startswith("--")) for name in names)


def _is_among(words: Collection[str], flag: str) -> bool:
    return flag in words or f"--no-{flag[2:]}" in words


def _as_text(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, bool):
        return "true" if value else "false"
    return tuple(value) if isinstance(value, list) else str(value)


def _shown_order(fields: Iterable[PlanField]) -> list[PlanField]:
    """The order of the help: the model's own sizes, which few jobs change, last."""
    return sorted(fields, key=lambda field: field.section == "model" and field.name != "layers")


def _parameters(field: PlanField) -> list[inspect.Parameter]:
    """The flag of ``field``. A switch has two, of which the help shows the one that changes something."""
    name = field.flag[2:].replace("-", "_")
    if field.kind is not Kind.SWITCH:
        annotation = list[str] | None if field.kind is Kind.VARIABLES else str | None
        return [_parameter(field, _MARK + name, annotation, field.flag, metavar=_METAVARS.get(field.kind))]
    return [
        _parameter(field, _MARK + name, bool | None, field.flag, hidden=field.default is True),
        _parameter(field, _MARK + _OFF + name, bool | None, f"--no-{field.flag[2:]}", hidden=field.default is not True),
    ]


def _parameter(field: PlanField, name: str, annotation: Any, flag: str, **more: Any) -> inspect.Parameter:
    panel = "Job" if field.path == "model.layers" else _PANELS[field.section]
    text = f"off: {_help(field)}" if name.startswith(_MARK + _OFF) else _help(field)
    option = typer.Option(flag, help=text, rich_help_panel=panel, autocompletion=_completion(field), **more)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation, option]
    )


def _completion(field: PlanField) -> Callable[[str], list[str]] | None:
    """What a shell offers for a value of ``field``, from the characters that it begins with."""
    if field.path == "hardware.gpu":
        return beginning(_gpus)
    if field.kind is Kind.MODEL:
        return beginning(model_specs)
    return beginning(lambda: field.choices) if field.choices else None


def assignments(incomplete: str) -> list[str]:
    """What a shell offers for ``FLAG=A,B`` from its characters so far: fields, as ``optimizer=``; behind the sign, and
    behind each comma, names that the field takes and that are not there yet."""
    flag, equals, values = incomplete.partition("=")
    if not equals:
        return [f"{name}=" for name in by_flag() if name.startswith(flag.lower())]
    field = by_flag().get(flag)
    complete = _completion(field) if field is not None else None
    before, comma, last = values.rpartition(",")
    taken = before.split(",")
    found = [name for name in complete(last) if name not in taken] if complete is not None else []
    return [f"{flag}={before}{comma}{name}" for name in found]


def _gpus() -> Iterable[str]:
    from ..device.gpus import GPUS

    return GPUS


def _help(field: PlanField) -> str:
    return f"{field.description} ({', '.join(field.choices)})" if field.choices else field.description


__all__ = ["assignments", "with_plan_flags"]
