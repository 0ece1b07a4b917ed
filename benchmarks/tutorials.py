"""Runs the commands of the tutorials, and writes what they print below them.

``python benchmarks/tutorials.py [PAGE …]``; a test compares every page with what this would write. In a page's blocks
of code a line that begins with ``$`` is a command for the shell; a block with ``title="NAME"`` is a file that later
commands find.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs/tutorials").glob("*.md"))
BLOCK = re.compile(r'^```(?P<word>\w*)(?: title="(?P<file>[^"]+)")?\n(?P<text>.*?)^```$', re.DOTALL | re.MULTILINE)
MEMPLAN = """
memplan() {{
  {python} {cli} "$@"; code=$?
  [ $code -le 1 ] || echo "memplan $*: exit code $code" >&3
  return $code
}}
"""


def page(text: str, run: Callable[[str, Path], str] | None = None) -> str:
    """``text`` of a page with what its commands print today, as ``run`` runs each in a folder: if nothing is said, in a
    process."""
    with tempfile.TemporaryDirectory() as folder:
        return BLOCK.sub(lambda block: _block(block, Path(folder), run or printed), text)


def _block(block: re.Match[str], folder: Path, run: Callable[[str, Path], str]) -> str:
    if block["file"]:
        (folder / block["file"]).write_text(block["text"], encoding="utf-8")
    commands = re.findall(r"^\$ (?:.*\\\n)*.*$", block["text"], re.MULTILINE)
    if not commands:
        return block[0]
    return "\n".join([f"```{block['word']}", *(f"{line}\n{run(line[2:], folder)}".strip() for line in commands), "```"])


def environment(folder: Path) -> dict[str, str]:
    return {"MEMPLAN_DATA": str(folder / "no-records"), "COLUMNS": "80", "NO_COLOR": "1"}


def printed(command: str, folder: Path) -> str:
    """What ``command`` prints on both streams. A memplan in it that neither answers 0 nor 1 is a ``RuntimeError``."""
    lines = MEMPLAN.format(python=sys.executable, cli=ROOT / "cli.py") + command
    answer = subprocess.run(
        ["bash", "-c", f"exec 3>failed; {lines}"],
        cwd=folder,
        env={**os.environ, **environment(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        timeout=120,
    )
    failed = (folder / "failed").read_text(encoding="utf-8")
    if failed:
        raise RuntimeError(failed + answer.stdout)
    return "\n".join(line.rstrip() for line in answer.stdout.splitlines())


def main(names: list[str]) -> int:
    for path in [Path(name).resolve() for name in names] or PAGES:
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
