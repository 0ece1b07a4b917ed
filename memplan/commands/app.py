"""The command line itself: which commands there are, and how one runs."""

from __future__ import annotations

import gc
import inspect
import os
import re
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..plan.errors import PlanError, together, wrong_at
from ..values import pattern
from .plan_flags import with_plan_flags
from .words import expanded, spelled, with_file_of_csv, wrong_flags, wrong_values

COMMANDS = {
    "estimate": "estimate",
    "suggest-partition": "suggest_partition",
    "explain": "explain",
    "trace": "trace",
    "export": "export",
    "validate": "validate",
    "runs": "runs",
    "init": "init",
    "models": "listings",
    "gpus": "listings",
    "schema": "listings",
}
"""Every command, and the module beside this one that has it. One that is not asked for is not imported."""

_MEANT = {
    **dict.fromkeys(("suggest", "search", "partition", "tune", "optimize", "optimise", "auto"), "suggest-partition"),
    **dict.fromkeys(("est", "plan", "fit", "fits", "check", "memory", "calc", "run", "predict"), "estimate"),
    **dict.fromkeys(("oom", "why", "debug", "diagnose"), "explain"),
    **dict.fromkeys(("measure", "verify", "profile"), "validate"),
    **dict.fromkeys(("list", "list-models", "model"), "models"),
    **dict.fromkeys(("list-gpus", "gpu", "hardware"), "gpus"),
    **dict.fromkeys(("convert", "write"), "export"),
    **dict.fromkeys(("new", "template", "create"), "init"),
    **dict.fromkeys(("completion", "completions"), "--install-completion (or --show-completion)"),
    "compare": "estimate … --compare",
    "version": "--version",
    "help": "--help, or memplan estimate --help",
}
"""Commands that people try, and which they may mean."""

_EXAMPLES = """Examples: memplan estimate bigscience-104b-250k ·
memplan estimate --model llama-3-8b --gpu h200 --mbs 2 ·
memplan estimate plan.yaml --vary optimizer=adamw,adam8bit mbs=1,2 ·
memplan estimate --from megatron train.sh --gpus 64"""


def run_command(arguments: list[str]) -> int:
    """Runs the command that ``arguments`` name and returns its exit code."""
    words = with_file_of_csv(expanded(arguments))
    if _COMPLETION in os.environ or {"--install-completion", "--show-completion"} & {*words[:1]}:
        return _complete(words)
    if "--help-all" in words:
        return _run(["--help" if word == "--help-all" else word for word in words], None)
    flags = {word.partition("=")[0] for word in words}
    try:
        return _run(words, {*COMMON} if {"-h", "--help"} & flags else flags)
    except _USAGE_ERROR as error:
        raise _explained(error) from None


_COMPLETION = "_MEMPLAN_COMPLETE"
"""The variable with which a shell asks for what may stand where the cursor is (typer's completion)."""


def _complete(words: list[str]) -> int:
    """Answers a shell, or writes what makes it ask."""
    app = _app("", None, completion=True)
    try:
        typer.main.get_command(app).main(args=words, prog_name="memplan", complete_var=_COMPLETION)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


_TRUTHS = {"True", "true", "False", "false"}
"""What others write behind a switch."""


def _with_settings(asked: str, words: list[str]) -> list[str]:
    """``words`` with flags of other tools' own as ``--set``, if the command ``asked`` has that."""
    from ..formats import as_settings

    return as_settings(words) if "set_" in inspect.signature(_function(asked)).parameters else words


def _run(words: list[str], flags: set[str] | None) -> int:
    """The command that ``words`` begin with, with no other flags of fields than ``flags``."""
    asked = words[0] if words else ""
    if asked in _MEANT:
        raise wrong_at(f"memplan {asked}", f"no such command; did you mean memplan {_MEANT[asked]}?")
    command = typer.main.get_command(_app(asked, flags))
    if asked in COMMANDS and not {"-h", "--help"} & {*words}:
        parameters = command.commands[asked].params  # type: ignore[attr-defined]
        wrong = wrong_flags(words[1:], parameters, f"memplan {asked}")
        if (
            wrong or _TRUTHS & {*words}
        ) and flags is not None:  # flags that other tools call so, or all of which the nearest is looked for
            known, left_out = spelled(_with_settings(asked, words), {str(one.origin) for one in wrong})
            code = _run(known, None)
            for flag in left_out:  # said beside an answer: an error is one line
                print(f"memplan: {flag} changes no memory and is left out", file=sys.stderr)
            return code
        if wrong:
            raise together([*wrong, *wrong_values(words[1:])])
    if asked != "estimate":
        gc.enable()
    try:
        with command.make_context("memplan", words) as context:
            code = command.invoke(context)
    except typer.Exit as end:
        return int(end.exit_code)
    except typer.Abort:
        raise KeyboardInterrupt from None
    return code if isinstance(code, int) else 0


COMMON = (
    *("--from", "--set", "--vary", "--compare", "--fix", "--objective", "--top", "--write", "--to", "--output", "-o"),
    *("--device", "--record", "--steps", "--learn", "--events", "--example"),
    *("--detail", "--html", "--plot", "--json", "--quiet", "-q", "--verbose", "-v", "--help", "-h"),
    *("--model", "--layers", "--framework", "--attention", "--headroom", "--gpu", "--gpus"),
    *("--tp", "--pp", "--dp", "--cp", "--ep", "--vpp", "--zero", "--mbs", "--gbs", "--accumulation", "--seq"),
    *("--dtype", "--optimizer", "--recompute", "--lora-rank", "--quantisation"),
)
"""Flags that most people use: those of ``--help``; ``--help-all`` has every one."""


def _app(asked: str, flags: set[str] | None, *, completion: bool = False) -> typer.Typer:
    """The app with the command that is ``asked`` for; with all of them where that is none."""
    app = typer.Typer(
        name="memplan",
        help="Plan the GPU memory of a training job before a GPU hour is spent.",
        epilog="memplan --install-completion: flags, models, GPUs and plans at the Tab key of your shell",
        add_completion=completion,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        cls=_Commands,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )
    app.callback(invoke_without_command=True)(_memplan)
    for name in [asked] if asked in COMMANDS else COMMANDS:
        function = _function(name)
        command = with_plan_flags(function, flags if asked in COMMANDS or completion else ())
        shown = _Common if flags is not None and "flags" in inspect.signature(function).parameters else _ByPanel
        app.command(name, cls=shown, epilog=_EXAMPLES if name == "estimate" else None)(command)
    return app


def _function(name: str) -> Callable[..., int]:
    """What the command ``name`` runs."""
    found: Callable[..., int] = getattr(import_module(f".{COMMANDS[name]}", __package__), name.replace("-", "_"))
    return found


class _ByPanel(TyperCommand):
    """A command whose help has its flags in their panels, written line by line: rich takes half a second for them."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                other = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or other, []).append(record)
        for name, rows in panels.items():
            with formatter.section(name):
                formatter.write_dl(rows, col_max=_LONGEST_FLAG)


class _Common(_ByPanel):
    """A command whose help has its common flags, a line each."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        width = formatter.width - _SHORT_FLAG
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and not {*parameter.opts} & _RARE:
                panel = _MERGED.get(getattr(parameter, "rich_help_panel", None) or "", "Job")
                name = _UNTYPED.sub("", record[0])
                said = _SAID.get(parameter.opts[0]) or _brief(record[1], width)
                panels.setdefault(panel, []).append((name, said))
        for name, rows in panels.items():
            formatter.write(f"\n{name}:\n")
            with formatter.indentation():
                formatter.write_dl(rows, col_max=_SHORT_FLAG - 4)
        example = _EXAMPLE.get(ctx.command_path.rpartition(" ")[2])
        if example is not None:
            formatter.write(f"\nFor example: {ctx.command_path} {example}")
        formatter.write(f"\nAll flags: {ctx.command_path} --help-all\n")

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        return


def _brief(text: str, width: int) -> str:
    """The first clause of ``text``, in one line."""
    import textwrap

    return textwrap.shorten(re.split(r"; |: | \(|  \[", text, maxsplit=1)[0], max(width, 20), placeholder=" …")


_UNTYPED = pattern(r" <[^>]*>+$")
_RARE = frozenset(("--help", "--set", "--plot", "--layers", "--accumulation", "--strict", "--vocab-size"))
"""Flags that only the whole help has."""
_SAID = {
    "plan": "plan, launch file, or built-in example",
    "log": "a log, a memory snapshot, or the message in quotes",
    "--objective": "time (the default), memory or gpus",
    "--from": "tool that PLAN is a launch file of, if memplan asks",
    "--compare": "other plans, shown side by side with PLAN",
    "--vary": "values to compare: --vary mbs=1,2,4",
    "--model": "built-in name, Hub id, or path of a config.json",
    "--gpu": "such as h100, a100-80gb, 4090; or 8xh100",
    "--recompute": "none, selective or full",
    "--quantisation": "frozen weights: nf4, fp4, int8, gptq, awq",
    "--headroom": "memory kept free: 2GiB, 5%",
    "--device": "cuda, cpu, or fake (no computation)",
    "--events": "write every event to FILE, as JSON lines",
    "--learn": "learn a model that has no recipe",
    "--to": "megatron, deepspeed, … (default: the plan's own)",
    "--html": "write the answer as a page for a browser",
}
"""Of the short help, in place of a first clause that says less."""
_EXAMPLE = {
    "estimate": "--model llama-3-8b --gpus 8 --gpu h100",
    "suggest-partition": "llama-3-8b-8gpu --gbs 64",
    "explain": "train.log plan.yaml",
    "export": "plan.yaml --to megatron",
    "validate": "plan.yaml --gpus 8",
    "trace": "--model gpt2 --mbs 1 --seq 1024",
}
_SHORT_FLAG = 30
_MERGED = {
    **dict.fromkeys(("", "A launch file in place of a plan", "Side by side"), "Plan"),
    **{name: name for name in ("Output", "Search")},
    **dict.fromkeys(("Layout", "Batch"), "Layout and batch"),
}
"""Panels of the whole help to those of the short one; ``Job`` for the others."""
_LONGEST_FLAG = 34
"""Characters of a flag and its value that the help puts beside what they mean; longer ones have a line of their own."""


class _Commands(TyperGroup):
    """All commands, whose help has the first sentence of each in full."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [(name, (command.help or "").partition("\n\n")[0]) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(text.split())) for name, text in rows])


def _memplan(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="Show the version and exit.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Print the traceback of a fault in memplan itself (with any command).")
    ] = False,  # the command line takes it out
) -> None:
    if version:
        from .. import __version__

        print(f"memplan {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit()


_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""The command-line parser's error for a wrong value, argument or command."""


def _explained(error: Any) -> PlanError:
    """The parser's error as one line."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "memplan"
    message = " ".join(error.format_message().split()).rstrip(".")
    return wrong_at(path, f"{message[:1].lower()}{message[1:]} (see {path} --help)")
