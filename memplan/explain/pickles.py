"""Reading a pickle of plain values without trusting it: nothing is imported, called or built that it names.

Python's own unpickler runs what a pickle says. This one knows the opcodes of lists, tuples, dictionaries, texts,
numbers, ``True``, ``False`` and ``None`` (protocols 2 to 5, as ``pickle.dump`` and PyTorch's C++ pickler write them)
and refuses every other: ``GLOBAL``, ``REDUCE``, ``BUILD``, ``INST``, persistent ids, extension codes. It goes through
the bytes once, and what it makes of them is bounded, whatever sizes and numbers stand in them.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import unpack_from
from typing import Any

MOST_VALUES = 30_000_000
"""Containers and texts of one pickle that may be held at once: about three gigabytes. Entries of a trace are packed."""
LONGEST_NUMBER = 16
"""Bytes of an integer. Addresses have 8."""


class UnreadableError(Exception):
    """The bytes are no pickle of plain values. ``str()`` says why."""


class PickleReader:
    """One pickle. ``pack`` may give a smaller value in the place of a dictionary that is complete, and ``gather``
    whatever a list's items are to be kept in: a snapshot has millions of alike entries."""

    def __init__(
        self, data: bytes, pack: Callable[[dict[Any, Any]], Any], gather: Callable[[list[Any], list[Any]], None]
    ) -> None:
        self.data = data
        self.pack, self.gather = pack, gather
        self.memo: dict[int, Any] = {}
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.made = 0
        self.count = 0
        """Values that were memoised, of which some are packed now."""

    def read(self) -> Any:
        """The value. ``UnreadableError`` where the bytes are no pickle of plain values, or end too early."""
        at = 0
        try:
            while at >= 0:
                at = self._frequent(at)
                step = _STEPS.get(self.data[at])
                if step is None:
                    raise UnreadableError(
                        f"holds more than plain values (opcode {self.data[at : at + 1]!r} at byte {at:,})"
                    )
                at = step(self, at + 1)
                if self.made > MOST_VALUES:
                    raise UnreadableError(f"makes more values than a snapshot has (over {MOST_VALUES:,})")
        except (IndexError, KeyError, TypeError, ValueError, UnicodeDecodeError, OverflowError):
            raise UnreadableError(f"is damaged or cut off (at byte {min(at, len(self.data)):,})") from None
        if len(self.stack) != 1 or self.marks:
            raise UnreadableError("is damaged: it ends with a value that is not whole")
        return _resolved(self.stack[0])

    def _frequent(self, at: int) -> int:
        """Goes through the opcodes of a trace's entries, nine in ten of a snapshot; where another one stands."""
        data, memo, stack, marks = self.data, self.memo, self.stack, self.marks
        push = stack.append
        while True:
            code = data[at]
            match code:
                case 0x68:  # BINGET
                    push(memo[data[at + 1]])
                    at += 2
                case 0x6A:  # LONG_BINGET
                    push(memo[data[at + 1] | data[at + 2] << 8 | data[at + 3] << 16 | data[at + 4] << 24])
                    at += 5
                case 0x8A if data[at + 1] <= LONGEST_NUMBER:  # LONG1
                    end = at + 2 + data[at + 1]
                    push(int.from_bytes(data[at + 2 : end], "little", signed=True))
                    at = end
                case 0x4B:  # BININT1
                    push(data[at + 1])
                    at += 2
                case 0x4D:  # BININT2
                    push(data[at + 1] | data[at + 2] << 8)
                    at += 3
                case 0x28:  # MARK
                    marks.append(len(stack))
                    at += 1
                case 0x7D:  # EMPTY_DICT
                    self.made += 1
                    push(_Dict())
                    at += 1
                case 0x94:  # MEMOIZE
                    at = self._put(at + 1, self.count)
                case 0x75:  # SETITEMS
                    self._set(self._items())
                    at += 1
                case _:
                    return at

    # -- the steps: each gets where its argument begins, and gives where the next opcode stands ----------------------

    def _push(self, value: Any, at: int) -> int:
        self.stack.append(value)
        return at

    def _make(self, value: Any, at: int) -> int:
        self.made += 1
        self.stack.append(value)
        return at

    def _bytes(self, at: int, size: int) -> int:
        """The end of ``size`` bytes that begin at ``at``."""
        if size < 0 or at + size > len(self.data):
            raise IndexError
        return at + size

    def _text(self, at: int, size: int) -> int:
        end = self._bytes(at, size)
        return self._make(self.data[at:end].decode("utf-8", "replace"), end)

    def _number(self, at: int, size: int) -> int:
        if size > LONGEST_NUMBER:
            raise UnreadableError(f"holds an integer of {size:,} bytes (at byte {at:,})")
        end = self._bytes(at, size)
        return self._push(int.from_bytes(self.data[at:end], "little", signed=True), end)

    def _put(self, at: int, index: int) -> int:
        value = self.stack[-1]
        if type(value) is _Dict:
            value.index = index
        self.memo[index] = value
        self.count += 1
        return at

    def _items(self) -> list[Any]:
        """What stands behind the last mark."""
        begin = self.marks.pop()
        items = self.stack[begin:]
        del self.stack[begin:]
        return items

    def _append(self, items: list[Any]) -> None:
        last = self.stack[-1]
        if type(last) is not list:
            raise TypeError
        self.gather(last, [_resolved(item) for item in items])

    def _set(self, items: list[Any]) -> None:
        last = self.stack[-1]
        if type(last) is not _Dict or type(last.value) is not dict or len(items) % 2:
            raise TypeError
        keys = items[::2]
        if not {*map(type, keys)} <= _KEYS:
            raise TypeError
        values = [value.value if type(value) is _Dict else value for value in items[1::2]]
        last.value.update(zip(keys, values, strict=True))
        packed = self.pack(last.value)
        if packed is not last.value:
            last.value = packed
            self.made -= 1
            self.memo.pop(last.index, None)

    def _tuple(self, at: int, count: int) -> int:
        if len(self.stack) < count:
            raise IndexError
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return self._make(tuple(map(_resolved, items)), at)

    def _close(self, at: int, kind: Callable[[list[Any]], Any]) -> int:
        return self._make(kind([_resolved(item) for item in self._items()]), at)

    def _append_one(self, at: int) -> int:
        self._append([self.stack.pop()])
        return at

    def _append_all(self, at: int) -> int:
        self._append(self._items())
        return at

    def _set_one(self, at: int) -> int:
        value = self.stack.pop()
        self._set([self.stack.pop(), value])
        return at


_KEYS = {str, int}


class _Dict:
    """A dictionary that is being made; something else stands in its place once it is packed."""

    __slots__ = ("index", "value")

    def __init__(self) -> None:
        self.value: Any = {}
        self.index = -1


def _resolved(value: Any) -> Any:
    return value.value if type(value) is _Dict else value


Step = Callable[[PickleReader, int], int]


def _u(form: str) -> Callable[[bytes, int], int]:
    def read(data: bytes, at: int) -> int:
        try:
            return int(unpack_from(form, data, at)[0])
        except Exception:  # struct.error, where the bytes end
            raise IndexError from None

    return read


_u4, _i4, _u8 = _u("<I"), _u("<i"), _u("<Q")


def _float(reader: PickleReader, at: int) -> int:
    end = reader._bytes(at, 8)
    return reader._push(unpack_from(">d", reader.data, at)[0], end)


_STEPS: dict[int, Step] = {
    0x80: lambda r, at: at + 1,  # PROTO
    0x95: lambda r, at: at + 8,  # FRAME
    ord("."): lambda r, at: -1,
    ord("]"): lambda r, at: r._make([], at),
    ord(")"): lambda r, at: r._push((), at),
    ord("s"): PickleReader._set_one,
    ord("a"): PickleReader._append_one,
    ord("e"): PickleReader._append_all,
    ord("t"): lambda r, at: r._close(at, tuple),
    ord("l"): lambda r, at: r._close(at, list),
    0x85: lambda r, at: r._tuple(at, 1),
    0x86: lambda r, at: r._tuple(at, 2),
    0x87: lambda r, at: r._tuple(at, 3),
    ord("q"): lambda r, at: r._put(at + 1, r.data[at]),
    ord("r"): lambda r, at: r._put(at + 4, _u4(r.data, at)),
    ord("N"): lambda r, at: r._push(None, at),
    0x88: lambda r, at: r._push(True, at),
    0x89: lambda r, at: r._push(False, at),
    ord("J"): lambda r, at: r._push(_i4(r.data, at), at + 4),
    0x8A: lambda r, at: r._number(at + 1, r.data[at]),  # LONG1
    0x8B: lambda r, at: r._number(at + 4, _u4(r.data, at)),  # LONG4
    ord("G"): _float,
    0x8C: lambda r, at: r._text(at + 1, r.data[at]),  # SHORT_BINUNICODE
    ord("X"): lambda r, at: r._text(at + 4, _u4(r.data, at)),
    0x8D: lambda r, at: r._text(at + 8, _u8(r.data, at)),  # BINUNICODE8
}
"""By opcode (``pickletools.opcodes``): those that are not frequent."""
