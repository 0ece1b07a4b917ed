"""How many tokens a tokenizer has: from the arguments, from a tokenizer's file if it is here, else asked for.

``megatron/core/tokenizers/utils/build_tokenizer.py``: NullTokenizer takes ``--vocab-size`` as it is (until
2025 it added a token for the end of a document), TikTokenizer 2**17 unless told otherwise, a Hugging Face
tokenizer all its entries (``len``), SentencePiece its pieces, a BERT WordPiece the lines of its file and,
if cased, 100 more (``<extra_id_0>`` …).

Tokens of a ``tokenizer.json`` or ``vocab.json``, counted in the bytes of the file.

Such a file has up to 40 MB, of which ``json`` makes a gigabyte of objects; only the names of tokens are kept here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from ...bash.origin import MOST_STEPS, Budget, ScriptError
from ...plan.errors import ABSENT, Node, Origin, PlanError, refused, wrong_at
from ...plan.text import is_folder, is_there, read_bytes
from ..settings import Settings
from .context import found_in

_TEXT = rb'"[^"\\]*(?:\\.[^"\\]*){0,1000}"'
_PLAIN = rb'[^"\[\]{}]*'
_FLAT = rb"[\[{]" + _PLAIN + rb"(?:" + _TEXT + _PLAIN + rb"){0,1000}[\]}]"
_STRING = re.compile(_TEXT, re.DOTALL)
_SCALAR = re.compile(rb"[-+.0-9A-Za-z]+")
_BLANK = re.compile(rb"[ \t\r\n]*")
_UP_TO_BRACKET = re.compile(_PLAIN + rb"(?:(?:" + _TEXT + rb"|" + _FLAT + rb")" + _PLAIN + rb"){0,1000}", re.DOTALL)
"""Past text, and lists and mappings in which there are no others: most of a file is pairs of merged tokens."""
_NUMBERED = re.compile(rb"\s*(" + _TEXT + rb")\s*:\s*-?[0-9]{1,9}\s*(?:,|(?=}))", re.DOTALL)
"""A token of a vocabulary, and its number, up to the comma or the end: no part of a longer number is one."""
_STEPS = 15
"""Of a value that is read or a bracket that is passed."""


class NoTokenizerError(ValueError):
    """The file is not the JSON that it should be."""


def tokens_in(content: bytes, origin: Origin) -> int | None:
    """Tokens in ``content``: vocabulary and added tokens, or the keys of a plain mapping; nothing where it has none."""
    reader = _Reader(content, Budget(origin, most=2 * MOST_STEPS))
    if reader.next() != b"{":
        reader.skip()
        return None
    top: set[str] = set()
    vocabulary: set[str] | None = None
    added: set[str] = set()
    has_model = False
    for name in reader.members():
        top.add(name)
        if name == "model" and reader.next() == b"{":
            has_model = True
            for part in reader.members():
                if part == "vocab":
                    vocabulary = reader.names()
                else:
                    reader.skip()
        elif name == "added_tokens" and reader.next() == b"[":
            added.update(token for _ in reader.items() for token in reader.contents())
        else:
            reader.skip()
    tokens = top if not has_model else (vocabulary | added if vocabulary is not None else set())
    return len(tokens) or None


class _Reader:
    """One pass over ``content``."""

    def __init__(self, content: bytes, budget: Budget) -> None:
        self._content = content
        self._budget = budget
        self._at = 3 if content.startswith(b"\xef\xbb\xbf") else 0

    def next(self) -> bytes:
        """The first byte of what follows."""
        blank = _BLANK.match(self._content, self._at)
        self._at = blank.end() if blank is not None else self._at
        return self._content[self._at : self._at + 1]

    def members(self) -> Iterator[str]:
        """The keys of the mapping that begins here; whoever takes one reads or skips its value."""
        self._take(b"{")
        while self._goes_on(b"}"):
            name = self._string()
            self._take(b":")
            yield name

    def items(self) -> Iterator[None]:
        """The items of the list that begins here, each to be read or skipped."""
        self._take(b"[")
        while self._goes_on(b"]"):
            yield

    def names(self) -> set[str] | None:
        """The tokens of a vocabulary: keys of a mapping, or first items of lists; nothing if it is neither."""
        found: set[str] = set()
        if self.next() == b"{":
            self._take(b"{")
            while (entry := _NUMBERED.match(self._content, self._at)) is not None:
                self._at = entry.end()
                found.add(self._decoded(entry[1]))
            while self._goes_on(b"}"):
                found.add(self._string())
                self._take(b":")
                self.skip()
        elif self.next() == b"[":
            for _ in self.items():
                if self.next() != b"[":
                    self.skip()
                    continue
                for position, _ in enumerate(self.items()):
                    if not position and self.next() == b'"':
                        found.add(self._string())
                    else:
                        self.skip()
        else:
            self.skip()
            return None
        return found

    def contents(self) -> list[str]:
        """``content`` of the mapping that follows, where it is one and has text there."""
        found: list[str] = []
        if self.next() != b"{":
            self.skip()
            return found
        for name in self.members():
            if name == "content" and self.next() == b'"':
                found.append(self._string())
            else:
                self.skip()
        return found

    def skip(self) -> None:
        """Passes the value that follows, whatever it is."""
        first = self.next()
        if first == b'"':
            self._match(_STRING)
        elif first not in (b"[", b"{"):
            self._match(_SCALAR)
        else:
            depth = 0
            while True:
                at = self._at
                depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(self._content[at : at + 1], 0)
                self._at += 1
                if not depth:
                    return
                self._match(_UP_TO_BRACKET)
                if self._at >= len(self._content):
                    raise NoTokenizerError
                if self._content[self._at : self._at + 1] == b'"':
                    self._match(_STRING)

    def _goes_on(self, end: bytes) -> bool:
        """Whether another item follows; passes a comma before it, or the ``end``."""
        if self.next() == end:
            self._at += 1
            return False
        if self.next() == b",":
            self._at += 1
        return True

    def _string(self) -> str:
        self.next()
        return self._decoded(self._match(_STRING))

    def _decoded(self, written: bytes) -> str:
        self._budget.make(1, len(written), steps=_STEPS)
        try:
            return json.loads(written) if b"\\" in written else written[1:-1].decode()
        except ValueError:
            raise NoTokenizerError from None

    def _take(self, byte: bytes) -> None:
        if self.next() != byte:
            raise NoTokenizerError
        self._at += 1

    def _match(self, pattern: re.Pattern[bytes]) -> bytes:
        match = pattern.match(self._content, self._at)
        if match is None:
            raise NoTokenizerError
        self._budget.spend(_STEPS + len(match[0]) // 64)
        self._at = match.end()
        return match[0]


# -- vocabulary ----------------------------------------------------------------------------------------


GPT2_TOKENS = 50_257
TIKTOKEN_TOKENS = 1 << 17
LARGEST_FILE = 64 << 20
"""Bytes of the largest tokenizer file that is read."""
_FIELD = 15
"""Steps of a field of a protocol buffer."""

_SENTENCEPIECE = frozenset({"SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"})
_HUGGING_FACE = frozenset({"HuggingFaceTokenizer", "SFTTokenizer", "PretrainedFromHF"})


def tokens_of(settings: Settings, folder: Path, default: str) -> tuple[Node, tuple[str, ...]]:
    """Number of tokens before padding, and the arguments that it was read from.

    ``default`` is the type of tokenizer that the training script takes if none is named.
    """
    named = settings.word("--tokenizer-type")
    kind = str(named.value) if named is not None else default
    names = ("--tokenizer-type",) if named is not None else ()
    size = settings.integer("--vocab-size")
    if size is not None and (kind.startswith("Null") or kind == "TikTokenizer"):
        return size, (*names, "--vocab-size")
    if kind == "TikTokenizer":
        return Node(TIKTOKEN_TOKENS, settings.where("--tokenizer-type")), names
    if kind.startswith("Null"):
        raise PlanError("--vocab-size", ABSENT, f"is missing: {kind} needs it", origin=settings.where(*names))
    source, counter = _file_of(kind, settings)
    name = settings.loose_word(source)
    path = found_in(folder, name) if name else None
    count = counter(path) if path is not None else None
    if count is not None:
        return Node(count, settings.where(source)), (*names, source)
    if kind == "GPT2BPETokenizer":
        return Node(GPT2_TOKENS, settings.where("--tokenizer-type", source)), names
    if size is not None:
        return size, (*names, "--vocab-size")
    raise _asked(kind, settings, source)


def _asked(kind: str, settings: Settings, source: str) -> PlanError:
    raw = settings.raw(source)
    file = settings.ledger.shown(raw) if raw is not None else ""
    where = f"{kind} {file} is not here" if file else f"{kind} has no file that is named"
    problem = f"is needed: only the tokenizer knows it, and {where}; give the number of its tokens as --vocab-size N"
    return PlanError("--vocab-size", ABSENT, problem, origin=settings.where(source, "--tokenizer-type"))


def _file_of(kind: str, settings: Settings) -> tuple[str, Callable[[Path], int | None]]:
    """The argument that names the tokenizer's file, and what counts its tokens."""
    if kind in _SENTENCEPIECE:
        return "--tokenizer-model", _pieces
    if kind in _HUGGING_FACE:
        name = "--tokenizer-name-or-path" if settings.has("--tokenizer-name-or-path") else "--tokenizer-model"
        return name, _entries
    if kind == "BertWordPieceCase":
        return "--vocab-file", lambda path: _lines(path, 100)
    if kind == "BertWordPieceLowerCase":
        return "--vocab-file", lambda path: _lines(path, 0)
    return "--vocab-file" if settings.has("--vocab-file") else "--tokenizer-model", _entries


def _entries(path: Path) -> int | None:
    """Tokens of ``tokenizer.json`` (its vocabulary and added tokens) or of ``vocab.json``."""
    if is_folder(path):
        for name in ("tokenizer.json", "tokenizer.model", "vocab.json"):
            if is_there(path / name):
                return _entries(path / name)
        return None
    if path.suffix == ".model":
        return _pieces(path)
    try:
        return tokens_in(_bytes(path), Origin(str(path)))
    except NoTokenizerError:
        raise wrong_at(str(path), "is not a tokenizer's JSON") from None
    except ScriptError as error:
        raise refused(error) from None


def _lines(path: Path, further: int) -> int | None:
    """Lines of ``vocab.txt``, each a token, and the tokens that are added to them."""
    content = _bytes(path)
    count = content.count(b"\n") + (0 if content.endswith(b"\n") or not content else 1)
    return count + further if count else None


def _pieces(path: Path) -> int | None:
    """Pieces of a SentencePiece model: the occurrences of field 1 of its protocol buffer."""
    content = _bytes(path)
    try:
        count = _pieces_in(content, Budget(Origin(str(path)), most=2 * MOST_STEPS))
    except ScriptError as error:
        raise refused(error) from None
    if not count:
        raise wrong_at(str(path), "is not a SentencePiece model")
    return count


def _pieces_in(content: bytes, budget: Budget) -> int:
    """Occurrences of field 1; 0 in what is no protocol buffer."""
    at = count = 0
    while at < len(content):
        budget.spend(_FIELD)
        key, at = _varint(content, at)
        wire = key & 7
        match wire:
            case 2:
                size, at = _varint(content, at)
                count += key >> 3 == 1
                at += size
            case 1 | 5:
                at += 8 if wire == 1 else 4
            case 0:
                _, at = _varint(content, at)
            case _:
                at = len(content) + 1
    return count if at == len(content) else 0


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(content) and shift < 70:
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return value, len(content) + 1


def _bytes(path: Path) -> bytes:
    return read_bytes(path, largest=LARGEST_FILE, what="a tokenizer's file")
