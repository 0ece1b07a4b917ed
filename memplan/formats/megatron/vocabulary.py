"""How many tokens a tokenizer has: from the arguments, from a tokenizer's file if it is here, else asked for.

``megatron/core/tokenizers/utils/build_tokenizer.py``: NullTokenizer takes ``--vocab-size`` as it is (until
2025 it added a token for the end of a document), TikTokenizer 2**17 unless told otherwise, a Hugging Face
tokenizer all its entries (``len``), SentencePiece its pieces, a BERT WordPiece the lines of its file and,
if cased, 100 more (``<extra_id_0>`` …).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...bash.budget import MOST_STEPS, Budget
from ...bash.origin import ScriptError
from ...plan.errors import ABSENT, Node, Origin, PlanError, refused, wrong_at
from ...plan.text import is_folder, is_there, read_bytes
from ..settings import Settings
from .context import found_in
from .tokenizer_json import NoTokenizerError, tokens_in

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
