"""Reading a user's file, or standard input, without being hurt by it: the one place where that is done.

YAML (and so JSON) to nodes that know their lines.

Documents that are nothing but ``field: value`` and sections of such lines, as most plans and specs are, are read here;
all others by ``yaml_parser``, which takes longer to import than a plan takes to read.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from ..bash.origin import Budget, ScriptError
from ..values import pattern
from .errors import ABSENT, VALUE, Node, Origin, PlanError, refused, scalar, wrong_at

LARGEST = 1 << 20
"""Bytes of the largest file that is read as a plan. Real ones are a few kilobytes."""

PATIENCE = 10.0
"""Seconds that a pipe may give nothing for while it is read."""

STANDARD_INPUT = "standard input"


def path_of(text: str, folder: Path | None = None) -> Path:
    """The path that ``text`` names, from ``folder`` if it is relative; ``~`` is the user's home."""
    try:
        path = Path(text).expanduser()
    except (RuntimeError, ValueError):  # no such user, or none that can be: then it is a name like any other
        path = Path(text)
    return path if folder is None else folder / path


def is_there(path: Path) -> bool:
    """Whether there is anything at ``path``; not if nobody can say."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a folder; not if nobody can say."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def folder_of(path: Path) -> Path:
    """Where relative paths in the file at ``path`` start: its folder; of a pipe (``<(…)``) the working directory."""
    try:
        return Path() if _is_nameless(path.stat()) else path.parent
    except (OSError, ValueError):
        return path.parent


def read_text(path: Path, field: str = "") -> str:
    """The text of the file at ``path``, of at most 1 MiB of UTF-8. ``field`` names who asked for it."""
    return _decoded(read_bytes(path, field), field, Origin(str(path)))


def read_bytes(path: Path, field: str = "", *, largest: int = LARGEST, what: str = "a plan") -> bytes:
    """The content of a user's file: a regular file, or a pipe that something writes to; ``PlanError`` for anything
    else, for more than ``largest`` bytes, and for a pipe that gives nothing for ``PATIENCE`` seconds.

    ``field`` names who asked for the file, ``what`` what the file is to be.
    """
    origin = Origin(str(path))
    try:
        _check_kind(path.stat(), field, origin, largest, what)  # before it is opened: to open a device may move it
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            _check_kind(status, field, origin, largest, what)
            if not stat.S_ISFIFO(status.st_mode):
                data = b"".join(_chunks(file, largest + 1))
            else:
                data = _piped(file, status, field, origin, largest)
        finally:
            os.close(file)
    except (OSError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        raise _unreadable(field, origin, error) from None
    if len(data) > largest:
        raise _too_large(field, origin, len(data), largest, what)
    return data


LARGEST_LOG = 1 << 34
"""Bytes of the longest log that is read to its end. It is read in pieces, of which only what is looked for stays."""


def pieces_of(place: str, *, largest: int = LARGEST_LOG, what: str = "a log") -> Iterator[bytes]:
    """The content of the file at ``place`` (``-``: standard input), piece by piece; errors as of ``read_bytes``."""
    origin = Origin(STANDARD_INPUT if place == "-" else place)
    left = largest
    try:
        for piece in _standard_pieces(origin) if place == "-" else _file_pieces(path_of(place), origin, largest, what):
            left -= len(piece)
            if left < 0:
                raise _too_large("", origin, largest - left, largest, what)
            yield piece
    except (OSError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        raise _unreadable("", origin, error) from None


def _standard_pieces(origin: Origin) -> Iterator[bytes]:
    if sys.stdin is None:
        raise wrong_at(origin, "is closed")
    return iter(lambda: sys.stdin.buffer.read(1 << 20), b"")


def _file_pieces(path: Path, origin: Origin, largest: int, what: str) -> Iterator[bytes]:
    _check_kind(path.stat(), "", origin, largest, what)
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        _check_kind(status, "", origin, largest, what)
        yield from _pipe_pieces(file, "", origin) if stat.S_ISFIFO(status.st_mode) else _chunks(file, largest + 1)
    finally:
        os.close(file)


def _check_kind(status: os.stat_result, field: str, origin: Origin, largest: int, what: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise PlanError(field, ABSENT, "is a directory; name a file in it", origin=origin)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISFIFO(status.st_mode):
        raise PlanError(field, ABSENT, "is not a regular file", origin=origin)
    if status.st_size > largest:
        raise _too_large(field, origin, status.st_size, largest, what)


def _chunks(file: int, most: int) -> Iterator[bytes]:
    """What ``file`` gives until it ends, ``most`` bytes at most."""
    while most > 0 and (chunk := os.read(file, min(most, 1 << 20))):
        yield chunk
        most -= len(chunk)


_PIPED: dict[tuple[int, int], bytes] = {}
"""What pipes without a name (``<(…)``) gave, by device and inode: they can be read once, and commands that try variants
read a file again."""


def _piped(file: int, status: os.stat_result, field: str, origin: Origin, largest: int) -> bytes:
    """What the pipe ``file`` gives until its last writer is gone. It is open without blocking: a read that finds no
    writer would look like the end, so each waits for one."""
    key = status.st_dev, status.st_ino
    if key in _PIPED:
        return _PIPED[key]
    data = bytearray()
    for chunk in _pipe_pieces(file, field, origin):
        data += chunk
        if len(data) > largest:
            break
    if len(data) <= LARGEST and _is_nameless(status):
        _PIPED[key] = bytes(data)
    return bytes(data)


def _pipe_pieces(file: int, field: str, origin: Origin) -> Iterator[bytes]:
    import select

    poll = select.poll()
    poll.register(file, select.POLLIN)
    while True:
        if not poll.poll(PATIENCE * 1000):
            raise PlanError(field, ABSENT, f"is a pipe that gave nothing for {PATIENCE:g} s", origin=origin)
        try:
            chunk = os.read(file, 1 << 16)
        except BlockingIOError:  # another reader was quicker
            continue
        if not chunk:
            return
        yield chunk


def _is_nameless(status: os.stat_result) -> bool:
    """Whether it is a pipe without a name: all of them are on one device."""
    if not stat.S_ISFIFO(status.st_mode):
        return False
    ends = os.pipe()
    try:
        return os.fstat(ends[0]).st_dev == status.st_dev
    finally:
        for end in ends:
            os.close(end)


def text_at(place: str) -> tuple[str, str]:
    """The text at ``place``, a path or ``-`` for standard input, and what errors call it."""
    if place == "-":
        return read_standard_input(), STANDARD_INPUT
    return read_text(path_of(place)), place


_standard_input: tuple[object, bytes] | None = None
"""The stream that was read as standard input, and what it gave: it, too, can be read once."""


def read_standard_input() -> str:
    """The text on standard input, at most 1 MiB of UTF-8."""
    global _standard_input
    origin = Origin(STANDARD_INPUT)
    if sys.stdin is None:
        raise wrong_at(origin, "is closed")
    if _standard_input is None or _standard_input[0] is not sys.stdin:
        try:
            _standard_input = sys.stdin, sys.stdin.buffer.read(LARGEST + 1)
        except OSError as error:
            raise _unreadable("", origin, error) from None
    return _decoded(_standard_input[1], "", origin)


def _decoded(data: bytes, field: str, origin: Origin) -> str:
    if len(data) > LARGEST:
        raise _too_large(field, origin, len(data), LARGEST, "a plan")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = f"is not UTF-8 text (byte 0x{data[error.start]:02x}); save it as UTF-8"
        raise PlanError(field, ABSENT, problem, origin=Origin(origin.source, line)) from None


def _too_large(field: str, origin: Origin, size: int, largest: int, what: str) -> PlanError:
    problem = f"is larger than {what} can be ({largest >> 20} MiB): at least {size:,} bytes"
    return PlanError(field, ABSENT, problem, origin=origin)


def _unreadable(field: str, origin: Origin, error: OSError | ValueError) -> PlanError:
    if isinstance(error, FileNotFoundError):
        return PlanError(field, ABSENT, "no such file", origin=origin)
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return PlanError(field, ABSENT, f"cannot be read: {reason.lower()}", origin=origin)


def checksum(content: object) -> str:
    """A digest of what JSON holds, however it is written."""
    from hashlib import sha256  # OpenSSL, which few commands need

    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# -- yaml events ---------------------------------------------------------------------------------------


_WORD = r"-A-Za-z0-9_.,;/+()|"
_LINE = pattern(
    r"(?P<section>  )?(?P<key>[A-Za-z0-9_]+):"
    rf"(?: (?:\"(?P<quoted>[^\"\\]*)\"|(?P<plain>[A-Za-z0-9.](?:[{_WORD} ]*[{_WORD}])?"
    rf"|[A-Za-z](?:[{_WORD} ]|:(?! ))*[{_WORD}])))?"
)
"""A line of a simple document: a field, alone or in a section, with a value that has one meaning in all of YAML. Behind
a letter that may have colons, as ``mistral:7b``; ``1:30`` is a number in YAML 1.1."""


def parse_yaml(text: str, source: str, *, line: bool = True) -> Node:
    """The document in ``text``. ``source`` is what errors call it; ``line`` whether they add the line."""
    try:
        simple = _simple(text, source, line)
    except ScriptError as error:
        raise refused(error) from None
    if simple is not None:
        return simple
    from .yaml_parser import parse_events

    return parse_events(text, source, line)


def _simple(text: str, source: str, numbered: bool) -> Node | None:
    """The document, if each of its lines is empty, a comment, or ``_LINE``; a section has at least one field."""
    if not (text.isascii() and text.replace("\n", "").isprintable()):
        return None
    root: dict[str, Node] = {}
    section: dict[str, Node] | None = None
    budget = Budget(Origin(source))
    for number, line in enumerate(text.split("\n"), 1):
        if not line or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            return None
        inside, key, quoted, plain = found.groups()
        into = section if inside else root
        if into is None or key in into or (section == {} and not inside):
            return None
        origin = Origin(source, number if numbered else None)
        budget.make(1, 0, origin, steps=VALUE)
        if quoted is None and plain is None:
            if inside:
                return None
            into[key] = Node(section := {}, origin)
            continue
        into[key] = scalar(plain, origin) if quoted is None else Node(quoted, origin)
        section = section if inside else None
    if not root or section == {}:
        return None
    return Node(root, next(iter(root.values())).origin)
