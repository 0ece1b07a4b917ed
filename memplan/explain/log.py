"""Reading a log for what went out of memory: from its beginning to its end, in pieces, whatever else is in it.

Only the text around messages is looked at: what lies between is searched for where one begins, at the speed at which
it is read. A rank's lines may stand between those of others, carry its number, a time and colours, and follow a
progress bar on one line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise, takewhile

from ..plan.errors import one_line
from ..values import dataclass
from .message import BEGINS, OutOfMemory, parse

BEFORE, BEHIND = 1 << 17, 1 << 13
"""Bytes before and behind the beginning of a message that are looked at: a traceback, and the rest of the message."""
MOST_MESSAGES = 64
"""Messages of one log: of a thousand ranks that fail alike the first ones say it."""
MOST_FRAMES = 100
MOST_LINES = 4000
"""Lines before a message in which its traceback is looked for."""

_MARKS = (
    b"ut of memory", b"UT OF MEMORY", b"ried to allocate", b"OutOfMemoryError", b"CUDA calloc", b"ALLOC_FAILED",
    b"NOT_INITIALIZED", b"shared memory", b"ignal 9",
    b"llocation failed for", b"cudaErrorMemoryAllocation", b"DefaultCPUAllocator", b"Killed", b"SIGKILL",
    b"oom-kill", b"oom_kill", b"able to allocate ", b"WinError 1455", b"out-of-memory h",
)  # fmt: skip
_CODES = (b" -9", b" 137")
_BEFORE_A_CODE = (b"code", b"Code", b"status", b"Status")
"""Exit codes, and what stands before them and their blanks, colon or equals sign."""
_LONGEST_MARK = max(map(len, _MARKS))


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of a traceback."""

    file: str
    line: int
    function: str
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.function}" + (f": {self.code}" if self.code else "")

    @property
    def place(self) -> str:
        """``trainer.py:88 in evaluate``; of a line without a frame, the line itself."""
        if not self.file:
            return self.code
        return f"{self.file.rpartition('/')[2]}:{self.line}" + (f" in {self.function}" if self.function else "")


@dataclass(frozen=True, slots=True)
class Reported:
    """A message, and what its log says around it."""

    message: OutOfMemory
    rank: int | None = None
    frames: tuple[Frame, ...] = ()
    """From the outermost to the one that asked."""
    steps: int | None = None
    """Iterations that were done, as the last progress bar or log line before it says."""


# -- the places in a log -------------------------------------------------------------------------------------------


def windows(pieces: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    """Text around the places in ``pieces`` of a log at which a message may begin, and where in it they begin; places
    that are near each other are together. Of what is passed over, ``BEFORE`` bytes are kept."""
    held, first = b"", -1
    for piece in pieces:
        start = max(len(held) - _LONGEST_MARK, 0) if first < 0 else 0
        held += piece
        while True:
            if first < 0:
                first = _next_mark(held, start)
            if first < 0:
                held = held[-BEFORE:]
                break
            end = first + BEHIND
            while end < len(held) and (more := _a_mark(held, end - BEHIND + 1, end)) >= 0 and more + BEHIND > end:
                end = more + BEHIND
                if end - first > 4 * BEFORE:
                    break
            if end >= len(held):
                break
            yield held[max(first - BEFORE, 0) : end], min(first, BEFORE)
            held, start, first = held[max(end - BEFORE, 0) :], min(end, BEFORE), -1
    if first >= 0:
        yield held[max(first - BEFORE, 0) :], min(first, BEFORE)


def _next_mark(data: bytes, start: int, end: int | None = None) -> int:
    end = end if end is not None else len(data)
    find = _finder(has_nul=data.find(0, start) >= 0)
    found = [at for at in (find(data, mark, start, end) for mark in _MARKS) if at >= 0]
    return min([*found, *_codes(data, start, min(found, default=end), find)], default=-1)


def _a_mark(data: bytes, start: int, end: int) -> int:
    """The last one, so that a log of nothing else is passed over in few steps; of exit codes the first."""
    last = max(data.rfind(mark, start, end) for mark in _MARKS)
    return last if last >= 0 else _next_mark(data, start, end)


def _codes(data: bytes, start: int, end: int, find: _Find) -> Iterator[int]:
    """Where the first of each exit code stands: no number that begins so."""
    for code in _CODES:
        at, rare = find(data, code, start, end), True
        while at >= 0 and not (
            data[at + len(code) : at + len(code) + 1] not in _OF_A_NUMBER
            and data[max(at - 12, 0) : at].rstrip(b" :=").endswith(_BEFORE_A_CODE)
        ):
            before, at = at, (find if rare else bytes.find)(data, code, at + 1, end)
            rare = at - before > _OFTEN
        if at >= 0:
            yield at


_OFTEN = 4096
"""Bytes apart within which what begins as an exit code comes often: then a call costs more than what it searches."""
_OF_A_NUMBER = tuple(b"%c" % character for character in b"0123456789.")


_Find = Callable[[bytes, bytes, int, int], int]
SHORT = 9
"""Bytes of a mark up to which ``strstr`` is faster than ``memmem``, which skips by the mark's length: of a GB 0.04 s
beside 0.12 s for six bytes, 0.06 s beside 0.4 s for three, with AVX-512; without it about as fast."""


@cache
def _finder(*, has_nul: bool) -> _Find:
    """``bytes.find``, by the C library where it has ``memmem``: that is four times as fast (0.07 s beside 0.3 s for a
    GB and a mark of twelve bytes), and a large log is searched for each mark. ``strstr`` ends at a NUL."""
    import ctypes

    try:
        library = ctypes.CDLL(None)
        memmem, strstr = library.memmem, library.strstr
    except (OSError, AttributeError, TypeError):
        return bytes.find
    memmem.restype = strstr.restype = ctypes.c_void_p
    memmem.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t)
    strstr.argtypes = (ctypes.c_void_p, ctypes.c_char_p)

    def find(data: bytes, mark: bytes, start: int, end: int) -> int:
        address, end = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0, min(end, len(data))
        if not 0 <= start < end:
            return -1
        if len(mark) < SHORT and end == len(data) and not has_nul:
            found: int | None = strstr(address + start, mark)
        else:
            found = memmem(address + start, end - start, mark, len(mark))
        return -1 if found is None else found - address

    return find


def reports(pieces: Iterable[bytes]) -> tuple[Reported, ...]:
    """Every message in a log, in its order, and each only once."""
    found: dict[tuple[object, ...], Reported] = {}
    told_before: set[tuple[str, str]] = set()
    for text, start in windows(pieces):
        for one in _in_window(text, start, told_before):
            sizes = one.message.tried, one.message.gpu, one.message.allocated, one.message.free
            found.setdefault((one.rank, one.message.who, sizes), one)
            if len(found) >= MOST_MESSAGES:
                return tuple(found.values())
    every = tuple(found.values())
    best = [one for one in every if one.message.who not in _FAINT or one.message.tried is not None]
    return tuple(best or [one for one in every if one.message.who == "driver"] or every)


_FAINT = ("driver", "handle", "killed")
"""Who asked in messages that say little: they count where there is no other."""


# -- around a message ----------------------------------------------------------------------------------------------

_COLOUR = re.compile(r"\x1b\[[0-9;?]{0,40}[ -/]{0,4}[@-~]")
_QUOTED = re.compile(r"(?:> ?){1,4}")
"""What a message that somebody has quoted begins with."""
_HOST = re.compile(r"[\w.-]{1,60}: (?=\[rank)")
"""What pdsh, which DeepSpeed starts several machines with, puts before the lines of each."""
_STAMP = re.compile(
    r"\s{0,8}(?:\[?[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9:.,]{5,20}(?:Z|[+-][0-9:]{4,6})?\]?[ :|-]{0,4})?"
    r"(?:(?:\[(?:rank:? ?([0-9]{1,7})|(default[0-9]{1,7}))\]|\[([0-9]{1,7})\]|\(rank[= ]([0-9]{1,7})\)"
    r"|rank: {0,3}([0-9]{1,7}) ?[|:]|([0-9]{1,7})(?=:)|\((\w{1,60} pid=[0-9]{1,9})[^)\n]{0,60}\)"
    r"|\[pod/([\w./-]{1,200})\])[:|]? ?)?",
    re.IGNORECASE,
)
_BOX = re.compile(r"^[│┃|╭╰╮╯─ ]{0,4}|[ ]{0,400}[│┃╮╯]$")
_FRAME = re.compile(r'File "?([^",\n]{1,500}?)"?(?:, line |:)([0-9]{1,7}),? in (\S{1,200})')
_BOXED = re.compile(r"(\S{1,400}\.py):([0-9]{1,7}) in (\S{1,200})")
_NOTEBOOK = re.compile(
    r"\[?((?:/|~|[A-Za-z]:)[^\]\s]{1,400}\.py|<ipython-input-[^>\s]{1,80}>)(?:\]\([^)\s]{0,200}\))?()"
    r" in ([A-Za-z_<]\S{0,200})"
)
"""What older IPython and Colab print: the line's number follows, at the arrow."""
_WARNED = re.compile(r"(\S{1,400}\.py):([0-9]{1,7}): \w{0,40}Warning: (.{1,300})")
_CODE = re.compile(r"(?:❱|-{2,4}>) ?([0-9]{1,7}) ?[│|]? ?(.{1,400})")
_STEPS = re.compile(
    r"\b([0-9]{1,9})/[0-9]{1,9} \[[0-9:?]{1,12}<|\biteration\s{1,9}([0-9]{1,9})/|\bstep: {0,3}([0-9]{1,9})\b"
)
LONGEST_LINE = 2000


@dataclass(frozen=True, slots=True)
class _Line:
    stream: str
    """The rank's number; ``default0`` of torchrun's, which is one of its node, ``worker pid=7`` of Ray's, a pod's name;
    empty where the line has none."""
    text: str
    counts: bool
    """It begins behind the first place of its window."""


def _in_window(data: bytes, start: int, known: set[tuple[str, str]]) -> Iterator[Reported]:
    """The messages in a window, whose first one begins at ``start``, but for those that are ``known``."""
    lines = list(_lines(data, start))
    for at, line in enumerate(lines):
        match = BEGINS.search(line.text) if line.counts else None
        text = line.text[match.start() :] if match is not None else ""
        if match is None or (line.stream, text) in known:
            continue
        known.add((line.stream, text))
        if len(known) > 4 * MOST_MESSAGES:
            return
        own = [one for one in lines[max(at - MOST_LINES, 0) : at + 1] if one.stream == line.stream]
        behind = lines[at + 1 : at + 40]
        following = [*takewhile(lambda one: not one.stream, behind), *(one for one in behind if one.stream)]
        following = [one for one in following if one.stream in (line.stream, "")]
        text = _whole(text, [one.text for one in following])
        message = parse(text, line.text if "ried to" not in text else "")
        if message.tried is None and message.who == "driver" and "memory" not in line.text:
            continue
        rank = int(line.stream) if line.stream.isdecimal() else None
        frames = _frames(own) or _code_before(own) or _frames(following[:MIXED]) or _bar(lines[max(at - MIXED, 0) : at])
        yield Reported(message, rank, tuple(frames), _steps(own))


def _whole(first: str, following: list[str]) -> str:
    """A message that terminals or loggers broke, in one line, up to the next one's beginning or a traceback's."""
    parts = [first]
    for text in following[:12]:
        begun = "ut of memory" in text or "OutOfMemory" in text
        if not text.strip() or begun or text.lstrip().startswith(("File ", "Traceback")):
            break
        parts.append(text)
    joined = parts[0]
    for before, text in pairwise(parts):
        cut = (before[-1:].isdigit() and text[:1] in _OF_NUMBERS) or _is_word_cut(before, text)
        joined += text if cut else f" {text}"
    return " ".join(joined.split())


_OF_NUMBERS = frozenset("0123456789.")
_WORDS = frozenset(
    """
    cuda out of memory tried to allocate gpu has a total capacity capacty which is free including non pytorch process
    in use the allocated by with private pools reserved but unallocated already cached gib mib kib bytes
    """.split()  # noqa: SIM905
)
"""Words of PyTorch's message."""


def _is_word_cut(before: str, text: str) -> bool:
    """Whether a terminal broke a word of PyTorch's message between two lines."""
    head, tail = re.search(r"[A-Za-z]+$", before), re.match(r"[A-Za-z]+", text)
    if head is None or tail is None or {head[0].lower(), tail[0].lower()} <= _WORDS:
        return False
    return (head[0] + tail[0]).lower() in _WORDS


_PYTHON = re.compile(r"\s{0,40}(?:return |[A-Za-z_][\w.,\[\] ]{0,60} = )?[A-Za-z_][\w.]{0,80}\(")
"""A call, as a line of code."""
MIXED = 12
"""Lines behind a message in which frames are looked for where none are before it: of several ranks that write at once,
which fail alike."""


def _code_before(lines: list[_Line]) -> list[Frame]:
    """Where somebody pasted no frames: what the warning that holds the message says, or the lines of code before
    it."""
    warned = _WARNED.search(lines[-1].text)
    if warned is not None:
        return [Frame(one_line(warned[1]), int(warned[2]), "", one_line(warned[3]))]
    code = takewhile(lambda one: _PYTHON.match(one.text), reversed(lines[-4:-1]))
    return [Frame("", 0, "", one_line(one.text.strip()[:200])) for one in code][::-1]


_LOADING = re.compile(r"Loading (?:checkpoint shards|weights)\b[^%]{0,8}?\b([0-9]{1,2})%")


def _bar(lines: list[_Line]) -> list[Frame]:
    """Where no frame is anywhere: the bar of transformers that was not yet at its end."""
    loading = any(_LOADING.search(one.text) for one in lines)
    return [Frame("", 0, "", "Loading checkpoint shards")] if loading else []


def _lines(data: bytes, start: int) -> Iterator[_Line]:
    """Without colours, boxes, times and ranks' numbers; a bar that is drawn again and again is many lines."""
    split = data.replace(b"\r", b"\n").split(b"\n")
    for raw, end in zip(split, accumulate(len(raw) + 1 for raw in split), strict=True):
        for text in _unpacked(raw):
            yield _line(text, counts=end > start)


def _line(raw: bytes, *, counts: bool) -> _Line:
    text = raw[: LONGEST_LINE * 4].decode("utf-8", "replace")
    text = _BOX.sub("", _COLOUR.sub("", text)) if "\x1b" in text or text[:1] in "│┃╭╰ " else text
    for before in (_QUOTED, _HOST):
        text = text[found.end() :] if (found := before.match(text)) is not None else text
    stamp = _STAMP.match(text)
    numbers = [group for group in stamp.groups() if group] if stamp else []
    if stamp is not None and (numbers or stamp.end() > 12):
        text = text[stamp.end() :]
    return _Line(numbers[0].lower() if numbers else "", text[:LONGEST_LINE], counts)


LONGEST_JSON = 1 << 16


def _unpacked(raw: bytes) -> Sequence[bytes]:
    """The lines that a line of a log in JSON holds (Docker's ``json-file``, clouds', torchelastic's ``error.json``), a
    traceback first; where it is cut off, as it stands. Another line as it is."""
    if not raw.startswith(b"{"):
        return (raw,)
    try:
        texts = list(_texts(json.loads(raw[:LONGEST_JSON])))
    except (ValueError, RecursionError):
        return raw.replace(b'\\"', b'"').split(b"\\n")
    return [line for text in sorted(texts, key=_is_no_traceback) for line in text.encode().split(b"\n")]


def _is_no_traceback(text: str) -> bool:
    return "Traceback (most" not in text


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(one)


def _frames(lines: list[_Line]) -> list[Frame]:
    """Those of the last traceback: ``Traceback (most recent call last)`` begins it, unless it is a notebook's or a
    logger's, which begin otherwise."""
    begin = next((at for at in range(len(lines) - 1, -1, -1) if "Traceback (most" in lines[at].text), 0)
    found: list[Frame] = []
    for at in range(begin, len(lines)):
        text = lines[at].text
        match = _FRAME.search(text) or _BOXED.match(text.strip()) or _NOTEBOOK.match(text)
        if match is not None:
            code = (
                lines[at + 1].text.strip() if at + 1 < len(lines) and _FRAME.search(lines[at + 1].text) is None else ""
            )
            plain = "" if BEGINS.search(code) else code
            function = match[3].partition("(")[0].rpartition(".")[2]  # a notebook has Class.method(self,
            found.append(Frame(one_line(match[1]), int(match[2] or 0), one_line(function), one_line(plain[:200])))
        elif found and (code_of := _CODE.search(text)) is not None:
            last = found[-1]
            line = last.line or int(code_of[1])
            found[-1] = Frame(last.file, line, last.function, one_line(code_of[2].strip()[:200]))
    return found[-MOST_FRAMES:]


def _steps(lines: list[_Line]) -> int | None:
    for line in reversed(lines):
        found = _STEPS.findall(line.text)
        if found:
            return int(next(group for group in found[-1] if group))
    return None
