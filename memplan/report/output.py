"""Output as the terminal or pipe can take it: no blanks at a line's end, no characters that it lacks."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

_PLAIN = str.maketrans("–−—×·■│→≤…", "---x.#|><.")


class _Tidy:
    """A renderable without blanks at the end of its lines and, in an ASCII encoding, without dashes and bars."""

    def __init__(self, renderable: RenderableType) -> None:
        self.renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in console.render_lines(self.renderable, options, pad=False):
            while line and not line[-1].text.rstrip():
                line.pop()
            for index, (text, style, control) in enumerate(line):
                kept = text.rstrip() if index == len(line) - 1 else text
                yield Segment(_plain(kept) if options.ascii_only else kept, style, control)
            yield Segment.line()


def _plain(text: str) -> str:
    """``text`` in ASCII, each character replaced by one of the same width."""
    return text.translate(_PLAIN).encode("ascii", "replace").decode()


def put_line(console: Console, text: Text) -> None:
    """Prints ``text`` on one line, however long, for scripts that read lines."""
    plain = Text(_plain(text.plain), spans=text.spans) if console.options.ascii_only else text
    console.print(plain, soft_wrap=True)


def put(console: Console, *renderables: RenderableType) -> None:
    """Prints each of ``renderables``."""
    for renderable in renderables:
        console.print(_Tidy(renderable), end="")
