"""Tokens of a tokenizer, from arguments or from the files of tokenizers that were really built."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import example, given, settings, strategies as st

from memplan.formats.launch import Asked
from memplan.formats.megatron.vocabulary import tokens_in
from memplan.formats.training_scripts import read as read_script
from memplan.plan.errors import Origin
from memplan.plan.read import build_plan

from ...plan.outcomes import error_of
from .scripts import SMALL


def vocabulary(folder: Path, arguments: str, name: str = "pretrain_gpt") -> int:
    file = folder / "train.sh"
    file.write_text(f"torchrun --nproc_per_node 8 {name}.py {SMALL} {arguments}")
    return build_plan(read_script(str(file), Asked("megatron")).source, {}).plan.model.vocab


def varint(number: int) -> bytes:
    low = bytes([number & 0x7F | (0x80 if number > 0x7F else 0)])
    return low + (varint(number >> 7) if number > 0x7F else b"")


def test_arguments_alone(tmp_path: Path) -> None:
    assert vocabulary(tmp_path, "--tokenizer-type NullTokenizer --vocab-size 131073") == 131073
    assert vocabulary(tmp_path, "--tokenizer-type TikTokenizer") == 131072
    assert vocabulary(tmp_path, "--tokenizer-type TikTokenizer --vocab-size 1000") == 1000
    assert vocabulary(tmp_path, "--tokenizer-type GPT2BPETokenizer --vocab-file not-here.json") == 50257
    assert vocabulary(tmp_path, "") == 50257
    assert vocabulary(tmp_path, "--padded-vocab-size 64000") == 64000
    assert (
        vocabulary(tmp_path, "--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta/x --vocab-size 128256")
        == 128256
    )


def test_files(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({f"t{n}": n for n in range(300)}))
    assert vocabulary(tmp_path, "--vocab-file vocab.json --merge-file merges.txt") == 300
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\na\nb")
    assert vocabulary(tmp_path, "--vocab-file vocab.txt", "pretrain_bert") == 4
    assert vocabulary(tmp_path, "--tokenizer-type BertWordPieceCase --vocab-file vocab.txt") == 104
    piece = b"\n\x03\n\x01a"
    (tmp_path / "sp.model").write_bytes(piece * 700 + b"\x12" + varint(300) + b"x" * 300 + b"\x18\x05")
    for kind in ("Llama2Tokenizer", "SentencePieceTokenizer"):
        assert vocabulary(tmp_path, f"--tokenizer-type {kind} --tokenizer-model sp.model") == 700


def test_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not here to build a file with")
    words = {f"w{n}": n for n in range(90)} | {"[UNK]": 90}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["<s>", "</s>", "[UNK]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size(with_added_tokens=True) == 93
    assert vocabulary(tmp_path, f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}") == 93


def test_what_is_asked_for(tmp_path: Path) -> None:
    def error(arguments: str) -> str:
        return error_of(lambda: vocabulary(tmp_path, arguments))

    asked = "give the number of its tokens as --vocab-size N"
    assert asked in error("--tokenizer-type HuggingFaceTokenizer --tokenizer-model $MODEL")
    assert "HuggingFaceTokenizer $MODEL is not here" in error(
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model $MODEL"
    )
    assert asked in error("--tokenizer-type Llama2Tokenizer")
    assert "--vocab-size: is missing: NullTokenizer needs it" in error("--tokenizer-type NullTokenizer")
    (tmp_path / "bad.model").write_bytes(b"\xff\xff\xff")
    assert "bad.model: is not a SentencePiece model" in error(
        "--tokenizer-type Llama2Tokenizer --tokenizer-model bad.model"
    )
    (tmp_path / "bad.json").write_text("[")
    assert "bad.json: is not a tokenizer's JSON" in error(
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model bad.json"
    )


def in_python(content: object) -> int | None:
    """Tokens of a tokenizer's JSON, from all of it in memory."""
    if not isinstance(content, dict):
        return None
    model = content.get("model")
    if not isinstance(model, dict):
        return len(content) or None
    found = model.get("vocab")
    if isinstance(found, list):
        tokens = {entry[0] for entry in found if isinstance(entry, list) and entry and isinstance(entry[0], str)}
    elif isinstance(found, dict):
        tokens = set(found)
    else:
        return None
    added = content.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str):
            tokens.add(entry["content"])
    return len(tokens) or None


NAMES = st.sampled_from(["a", "b", "é", '"', "\\", "[", "{}", ",", "", "\n"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | NAMES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
VOCABULARIES = (
    st.dictionaries(NAMES, st.integers(0, 99)) | st.lists(st.lists(NAMES | st.floats(-9, 0), max_size=2)) | ANYTHING
)
TOKENIZERS = st.fixed_dictionaries(
    {
        "added_tokens": st.lists(st.fixed_dictionaries({"id": st.integers(), "content": NAMES})) | ANYTHING,
        "model": st.fixed_dictionaries({"type": ANYTHING, "vocab": VOCABULARIES, "merges": ANYTHING}) | ANYTHING,
        "other": ANYTHING,
    }
)


@settings(max_examples=300, deadline=None)
@example({"model": {"vocab": {"a": 1_000_000_000, "b": 0}}}, None, False)
@example({"model": {"vocab": {"a": 1.5, "b": 0}}}, None, False)
@given(TOKENIZERS | ANYTHING, st.sampled_from([None, 1]), st.booleans())
def test_tokens_are_counted_as_json_has_them(content: object, indent: int | None, ascii: bool) -> None:
    written = json.dumps(content, indent=indent, ensure_ascii=ascii).encode()
    assert tokens_in(written, Origin("tokenizer.json")) == in_python(content)


@pytest.mark.parametrize("end", ["", "[" * 3_000_000, '{"a":' * 800_000, '"', "1", ":", '{"a" 1}'])
def test_a_file_that_is_no_tokenizer_is_refused_in_time(tmp_path: Path, end: str) -> None:
    (tmp_path / "t.json").write_text('{"model": {"vocab": ' + end)
    began = time.process_time()
    said = error_of(
        lambda: vocabulary(tmp_path, f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}/t.json")
    )
    assert "t.json: is not a tokenizer's JSON" in said or "the limit of" in said
    assert time.process_time() - began < 4


def test_a_large_tokenizer_takes_little_memory() -> None:
    """Of tokens and merges only the names of the tokens are kept; the largest in use has sixteen times as many."""
    tokens = ",".join(f'"token{n}":{n}' for n in range(1 << 14))
    merges = ",".join(f'["token{n}","x"]' for n in range(32_000))
    content = f'{{"added_tokens":[],"model":{{"vocab":{{{tokens}}},"merges":[{merges}]}}}}'.encode()
    tracemalloc.start()
    assert tokens_in(content, Origin("tokenizer.json")) == 1 << 14
    assert tracemalloc.get_traced_memory()[1] < 5 << 20
    tracemalloc.stop()
