"""Tokens of a tokenizer, from arguments or from the files of tokenizers that were really built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memplan.formats.launch import Asked
from memplan.formats.training_scripts import read as read_script
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
