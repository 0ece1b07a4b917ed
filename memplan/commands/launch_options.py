"""The flags of a launch file in place of a plan, for the commands that take one."""

from __future__ import annotations

from typing import Annotated

import typer

LAUNCH = "A launch file in place of a plan"

From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="FRAMEWORK",
        help="PLAN is a launch script, list or mapping of arguments of megatron or megatron-deepspeed, the "
        "ds_config.json of deepspeed, the TOML or saved JSON of a job of torchtitan, or the arguments of trainer",
        rich_help_panel=LAUNCH,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=value",
        help="a variable of the script ($1 as 1=value), or a key of torchtitan's; over the script's own",
        rich_help_panel=LAUNCH,
    ),
]
VocabSize = Annotated[
    int | None,
    typer.Option("--vocab-size", metavar="N", help="tokens of a tokenizer that is not here", rich_help_panel=LAUNCH),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="arguments that are unknown or not modelled are errors", rich_help_panel=LAUNCH),
]
