"""The command line itself: which commands there are, and what happens when one is misspelt."""

from __future__ import annotations

from copy import copy
from typing import Annotated, Any

import typer

from ..plan.errors import ABSENT, Origin, PlanError, nearest
from .arguments import expanded
from .estimate import estimate
from .export import export
from .init import init
from .launched import MEANINGS
from .listings import gpus, models, schema
from .runs import runs
from .suggest_partition import MEANINGS as SEARCHED
from .suggest_partition import suggest_partition
from .trace import trace
from .validate import validate

app = typer.Typer(
    name="memplan",
    help="Plan the GPU memory of a training job before a GPU hour is spent.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_EXAMPLES = """Examples: memplan estimate bigscience-104b-250k ·
memplan estimate --model llama-3-8b --gpu h200 --mbs 2 ·
memplan estimate plan.yaml --vary optimizer=adamw,adam8bit mbs=1,2 ·
memplan estimate --from megatron train.sh --gpus 64"""


@app.callback(invoke_without_command=True)
def _memplan(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from .. import __version__

        print(f"memplan {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit()


app.command(epilog=_EXAMPLES)(estimate)
app.command("suggest-partition")(suggest_partition)
app.command()(trace)
app.command()(export)
app.command()(validate)
app.command()(runs)
app.command()(init)
app.command()(models)
app.command()(gpus)
app.command()(schema)


def run_command(arguments: list[str]) -> int:
    """Runs the command that ``arguments`` name and returns its exit code."""
    command = typer.main.get_command(_narrowed(arguments))
    try:
        with command.make_context("memplan", expanded(arguments)) as context:
            code = command.invoke(context)
    except typer.Exit as end:
        return int(end.exit_code)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except _USAGE_ERROR as error:
        raise _explained(error) from None
    return code if isinstance(code, int) else 0


def _narrowed(arguments: list[str]) -> typer.Typer:
    """The app with no other command than the one that ``arguments`` begin with: the flags of each take time to make."""
    asked = [one for one in app.registered_commands if arguments and _name_of(one) == arguments[0]]
    if not asked:
        return app
    narrow = copy(app)
    narrow.registered_commands = asked
    return narrow


def _name_of(command: Any) -> str:
    return str(command.name or command.callback.__name__)


_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""The command-line parser's error for a wrong flag, argument or command."""


def _explained(error: Any) -> PlanError:
    """The parser's error as one line that names the flag, and the flag that was probably meant."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "memplan"
    flag = getattr(error, "option_name", None)
    if flag is not None and hasattr(error, "possibilities"):
        known = [name for parameter in context.command.params for name in parameter.opts] if context else []
        return PlanError("", ABSENT, _with_guess(f"is not a flag of {path}", nearest(flag, known)), origin=Origin(flag))
    message = " ".join(error.format_message().split()).rstrip(".")
    if flag is not None and "requires" in message:
        return PlanError("", ABSENT, f"needs a value{_meaning(flag)}", origin=Origin(flag))
    return PlanError("", ABSENT, f"{message[:1].lower()}{message[1:]} (see {path} --help)", origin=Origin(path))


def _meaning(flag: str) -> str:
    from ..plan.fields import by_flag

    meanings = {**MEANINGS, **SEARCHED}
    if flag in meanings:
        return f": {meanings[flag]}"
    field = by_flag().get(flag.removeprefix("--"))
    return f": {field.description}" if field else ""


def _with_guess(problem: str, guess: str | None) -> str:
    return f"{problem}; did you mean {guess}?" if guess else f"{problem}; --help lists them"
