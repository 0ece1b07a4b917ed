"""``memplan init``: a commented plan to start from."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..plan.errors import Origin, PlanError, one_line, wrong_at
from ..plan.fields import by_flag
from ..plan.library import examples
from ..plan.read import Flags, read_plan
from ..plan.text import read_text
from .output import Overwrite, print_file, write_whole

DEFAULT_MODEL = "gpt2-xl"


def init(
    path: Annotated[str | None, typer.Argument(help="File to write; standard output if left out.")] = None,
    example: Annotated[
        str | None, typer.Option("--example", metavar="NAME", help="write a copy of a built-in example")
    ] = None,
    force: Overwrite = False,
    flags: Flags = {},  # noqa: B006 (replaced by a flag for every field)
) -> int:
    """A commented plan with every field. Flags set fields: memplan init plan.yaml --model llama-3-8b --gpu h200.

    Exit code 2: memplan estimate would refuse the plan that the flags make.
    """
    text = _example(example, flags) if example is not None else _template(path, flags)
    if path is None or path == "-":
        print_file(text)
        return 0
    write_whole(path, text.encode(), force=force)
    return 0


def _template(path: str | None, flags: Flags) -> str:
    from ..estimate import check
    from ..plan.write import plan_template

    flags = {"model": DEFAULT_MODEL, **flags}
    read = read_plan(None, flags, traced=True)
    plan = read.plan
    try:
        check(plan)
    except PlanError as error:
        raise read.located(error) from None
    values = {by_flag()[name].path: _as_yaml(value) for name, value in flags.items()}
    values["framework"] = plan.framework
    if plan.device_map is not None:
        values["device_map"] = json.dumps({str(device): list(layers) for device, layers in plan.device_map.items()})
    return plan_template(values, one_line(path or "plan.yaml"))


def _as_yaml(value: str | tuple[str, ...]) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(dict(pair.split("=", 1) for pair in value))


def _example(name: str, flags: Flags) -> str:
    if flags:
        raise wrong_at("--example", "copies the example as it is; change fields when estimating it, or in the file")
    if name not in examples():
        problem = f"is not a built-in example ({', '.join(examples())})"
        raise PlanError("example", name, problem, origin=Origin("--example"), known=examples())
    return read_text(examples()[name])
