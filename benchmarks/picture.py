"""A real run as a picture: ``python -m benchmarks.picture PLAN OUT.svg [FLAG …]``, as ``make picture`` does.

The command line runs as it does for anyone, in a colour terminal of ``WIDTH`` columns; what it
prints is drawn. No fonts are fetched: the picture takes the reader's monospaced one.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

WIDTH = 100
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
THEME = TerminalTheme(
    background=(22, 24, 29),
    foreground=(214, 218, 224),
    normal=[
        *((40, 44, 52), (226, 104, 104), (120, 186, 122), (224, 188, 104)),
        *((97, 150, 208), (178, 132, 196), (100, 178, 182), (214, 218, 224)),
    ],
)
_FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code, monospace", FONTS
)
_RUN = "import sys; from memplan.cli import main; sys.exit(main())"


def picture(printed: str, command: str, width: int = WIDTH) -> str:
    """The SVG of a terminal of ``width`` columns in which ``command`` printed ``printed`` (text with ANSI colours)."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "dim"), (command, "bold")), Text(), sep="\n")
    for line in printed.rstrip().splitlines():
        console.print(Text.from_ansi(line), soft_wrap=True)
    console.print()
    return console.export_svg(title="memplan", theme=THEME, code_format=_FORMAT, unique_id="memplan")


def run(*arguments: str, width: int = WIDTH) -> str:
    """What ``memplan`` prints in a colour terminal; exit code 1 means only that the job does not fit."""
    terminal = {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color", "COLUMNS": str(width)}
    inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *arguments],
        env={**inherited, **terminal, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
    )
    if done.returncode not in (0, 1) or not done.stdout:
        raise SystemExit(done.stderr or f"memplan ended with exit code {done.returncode} and printed nothing")
    return done.stdout


def main() -> None:
    if len(sys.argv) < 3:
        raise SystemExit("usage: python -m benchmarks.picture PLAN OUT.svg [FLAG …]")
    plan, out, *flags = sys.argv[1:]
    command = ("estimate", plan, *flags)
    Path(out).write_text(picture(run(*command), " ".join(("memplan", *command))), encoding="utf-8")


if __name__ == "__main__":
    main()
