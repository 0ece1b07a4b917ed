"""The ``memplan`` command: runs one command, and turns whatever ends it into an exit code and at most one line.

Exit codes: 0 done and it fits, 1 done and it does not fit, 2 the input is wrong, 3 the environment is
missing something, 4 a fault in memplan itself, 130 interrupted. Everything that Python has not imported already is
imported inside ``main``, so that Ctrl-C during the imports is quiet, too.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from .interrupts import Interrupts

WRONG_INPUT = 2
WRONG_ENVIRONMENT = 3
FAULT = 4
INTERRUPTED = 130
RESERVE = 4 << 20
"""Bytes that are kept for telling that there are no more; until then they take none."""
DEBUG = "--debug"
"""The flag of every command that shows a fault's traceback."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``memplan`` with ``arguments`` and returns the exit code. Without, they are the process's own, and so are
    its signals."""
    _leave_out_plugins()
    collects = gc.isenabled()
    gc.disable()  # a tenth of a start is a search for garbage among what stays; commands that run long turn it on
    try:
        return _alone(sys.argv[1:]) if arguments is None else _ended(list(arguments))
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if collects:
            gc.enable()


FEW = 100_000, 50, 50
"""Objects, and rounds, after which garbage is looked for: a search makes millions that stay, and hardly a circle."""


def _alone(arguments: list[str]) -> int:
    """As ``_ended``; the process is asked to end by signals, and ignores them once it does."""
    atexit.register(gc.freeze)  # at its end no garbage is looked for: everything is freed
    gc.set_threshold(*FEW)
    if arguments == ["--version"]:  # is over before the handlers would be there
        return _ended(arguments)
    from .interrupts import Interrupts

    interrupts = Interrupts()
    try:
        interrupts.install()
        code = _ended(arguments, interrupts)
        if interrupts.fault is not None and not interrupts.came:
            code = _told(interrupts.fault, arguments)
        return _leave() if interrupts.end() else code
    except KeyboardInterrupt:
        interrupts.end()
        return _leave()


def _leave() -> int:
    """Ends the interrupted process without Python's own end, in which a library can fail whose import the interrupt
    fell into: numpy's has aborted the process there."""
    atexit._run_exitfuncs()
    from contextlib import suppress

    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(INTERRUPTED)


def _ended(arguments: list[str], interrupts: Interrupts | None = None) -> int:
    """What the command's end means, whichever it is; it is told already."""
    from .streams import prepare, silence

    code, reserve = 0, bytearray(RESERVE)
    try:
        prepare()
        code = _run([word for at, word in enumerate(arguments) if word != DEBUG or "--" in arguments[:at]])
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise
    except (BrokenPipeError, SystemExit):  # SystemExit is how rich, printing the help, says the same
        silence(sys.stdout)
    except BaseException as error:
        if interrupts is not None and interrupts.came:  # and somebody made another error of it
            raise KeyboardInterrupt from None
        del reserve
        return _told(error, arguments)
    return code


def _leave_out_plugins() -> None:
    """Plugins of pydantic do nothing here, and it takes 20 ms to look for them, half of that to import with what.
    It imports ``secrets`` for one comparison of bytes: OpenSSL, a tenth of a start, which waits until that is used."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    loader = type(sys)("pydantic.plugin._loader")
    loader.get_plugins = tuple  # type: ignore[attr-defined]
    sys.modules.setdefault(loader.__name__, loader)
    sys.modules.setdefault("secrets", _later("secrets"))


def _later(name: str) -> ModuleType:
    """A module that hands on what is in the one called ``name``, which is imported once something is asked for."""
    module = type(sys)(name)

    def found(attribute: str) -> object:
        if sys.modules.get(name) is module:
            del sys.modules[name]
        return getattr(__import__(name), attribute)

    module.__getattr__ = found  # type: ignore[method-assign]
    return module


def _run(arguments: list[str]) -> int:
    if arguments == ["--version"]:  # without the commands, whose flags take longer to make than this
        from . import __version__

        print(f"memplan {__version__}")
        return 0
    from .commands.app import run_command

    return run_command(arguments)


LAST_LINE = b"memplan: a fault in memplan itself, of which no more can be told (is memory short?)\n"


def _told(error: BaseException, arguments: list[str]) -> int:
    """The exit code of ``error``, once it is told, or cannot be."""
    try:
        return _failed(error, arguments)
    except Exception:
        try:  # noqa: SIM105 (contextlib takes memory)
            os.write(2, LAST_LINE)
        except OSError:
            pass
        return FAULT


def _failed(error: BaseException, arguments: list[str]) -> int:
    if isinstance(error, MemoryError):
        _let_go(error)
        gc.collect()
    from .plan.errors import LackingError, PlanError, one_line
    from .streams import silence, tell

    if isinstance(error, PlanError):
        tell(str(error))
        return WRONG_INPUT
    if isinstance(error, LackingError):
        tell(str(error))
        return WRONG_ENVIRONMENT
    if isinstance(error, OSError):
        silence(sys.stdout)  # what is still to be written would fail once more, when Python ends
        named = "" if error.filename is None else f"{error.filename}: "
        tell(one_line(f"memplan: {named}{error.strerror or error}"))
        return WRONG_ENVIRONMENT
    if isinstance(error, ImportError) and not (error.name or "").startswith("memplan"):
        tell(one_line(f"memplan: {error}: pip install memplan installs what it needs"))
        return WRONG_ENVIRONMENT
    from .faults import report

    report(error, arguments, debug=DEBUG in arguments)
    return FAULT


def _let_go(error: BaseException | None) -> None:
    """Of what the frames hold that ``error`` has ended: to say so takes memory, too."""
    while error is not None:
        traceback = error.__traceback__
        while traceback is not None:
            try:  # noqa: SIM105 (contextlib takes memory)
                traceback.tb_frame.clear()
            except RuntimeError:  # it still runs
                pass
            traceback = traceback.tb_next
        error = error.__context__


if __name__ == "__main__":
    raise SystemExit(main())
