"""The ``memplan`` command: runs one command, and turns whatever ends it into an exit code and at most one line.

Exit codes: 0 done and it fits, 1 done and it does not fit, 2 the input is wrong, 3 the environment is
missing something, 130 interrupted. Everything is imported inside ``main``, so that Ctrl-C during the
imports is quiet, too.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from types import ModuleType

WRONG_INPUT = 2
WRONG_ENVIRONMENT = 3
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``memplan`` with ``arguments`` (the process's own by default) and returns the exit code."""
    _leave_out_plugins()
    collects = gc.isenabled()
    gc.disable()  # a tenth of a start is a search for garbage among what stays; commands that run long turn it on
    atexit.register(gc.freeze)  # nor is any looked for at the end of the process, which frees everything
    _prepare_standard_output()
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except (BrokenPipeError, SystemExit):  # SystemExit is how rich, printing the help, says the same
        _silence()
        return 0
    except OSError as error:
        _silence()  # what is still to be written would fail once more, when Python ends
        return _fail(f"memplan: {error.strerror or error}", WRONG_ENVIRONMENT)
    finally:
        if collects:
            gc.enable()
    return code


def _leave_out_plugins() -> None:
    """Plugins of pydantic do nothing here, and it takes 20 ms to look for them, half of that to import with what."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    loader = ModuleType("pydantic.plugin._loader")
    loader.get_plugins = tuple  # type: ignore[attr-defined]
    sys.modules.setdefault(loader.__name__, loader)


def _silence() -> None:
    from .commands.output import silence

    silence()


def _run(arguments: list[str]) -> int:
    if arguments == ["--version"]:  # without the commands, whose flags take longer to make than this
        from . import __version__

        print(f"memplan {__version__}")
        return 0
    from .commands.app import run_command
    from .plan.errors import LackingError, PlanError

    try:
        return run_command(arguments)
    except PlanError as error:
        return _fail(str(error), WRONG_INPUT)
    except LackingError as error:
        return _fail(str(error), WRONG_ENVIRONMENT)


def _prepare_standard_output() -> None:
    """Characters that the terminal lacks become ``?``; a standard output that is closed swallows everything."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 (stays open for the process)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _fail(line: str, code: int) -> int:
    print(line, file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
