"""Which files are launch files: scripts, lists and mappings; and one clear line for what is none."""

# ruff: noqa: E501 (tables of scripts, arguments and the lines that they get)

from __future__ import annotations

import json
import re
import shlex
import time
from pathlib import Path

import pytest
from hypothesis import assume, given, settings, strategies as st

from memplan.bash.values import text
from memplan.formats.files import not_in, read_words, words_of
from memplan.formats.launch import Asked, completed
from memplan.formats.settings import arguments_of
from memplan.formats.training_scripts import read as read_script
from memplan.plan.errors import MOST_GUESSES, PlanError
from memplan.plan.notes import MOST_OF_A_CODE
from memplan.plan.read import build_plan

from ...plan.outcomes import error_of
from .reading import launch, plan
from .scripts import SMALL, script


def pairs(content: str, source: str = "args", **variables: str) -> list[tuple[str, tuple[str, ...], int | None]]:
    """Name, values and line of each argument."""
    words = words_of(content, source, "megatron", variables)
    return [(given.name, tuple(map(words.ledger.shown, given.values)), given.origin.line) for given in words.given]


def test_a_bare_list() -> None:
    content = "# sizes\n--num-layers 12 --bf16 \\\n  --pipeline-model-parallel-layout Et|(tt|)*6L # layout\n\n--save '/my path'  --lr=1e-4\n--x $Y\n"
    assert pairs(content) == [
        ("--num-layers", ("12",), 2),
        ("--bf16", (), 2),
        ("--pipeline-model-parallel-layout", ("Et|(tt|)*6L",), 3),
        ("--save", ("/my path",), 5),
        ("--lr", ("1e-4",), 5),
        ("--x", ("$Y",), 6),
    ]
    assert pairs("--num-layers ${N}", N="4") == [("--num-layers", ("4",), 1)]


def test_mappings() -> None:
    expected = [("--num-layers", ("12",)), ("--bf16", ()), ("--spec", ("a", "b"))]
    for content, source in (
        (json.dumps({"--num-layers": 12, "--bf16": True, "--fp16": False, "--spec": ["a", "b"]}), "a.json"),
        ("num-layers: 12\nbf16: true\nfp16: false\nspec: [a, b]\nlr:\n", "a"),
        ("num_layers: 12\nbf16: true\nspec: '[a b]'\n", "a.yaml"),
        ("ENV_VARS:\n  X: 1\nMODEL_ARGS:\n  --num-layers: 12\n  --bf16: true\n  --spec: [a, b]\n", "model_config.yaml"),
        (
            json.dumps({"arguments": {"--num-layers": 12, "--bf16": True, "--spec": "[a b]"}, "environment": {}}),
            "a.json",
        ),
    ):
        assert [(name, values) for name, values, _ in pairs(content, source)] == expected
    assert pairs("--num-layers: 2\n\n--bf16: true\n")[1][2] == 3


def test_of_arguments_in_a_mapping_the_last_one_counts() -> None:
    """Megatron-LM's functional tests repeat arguments and merge them (``yq``'s ``explode``); argparse takes the last."""
    assert pairs("--num-layers: 2\n--bf16: true\n--num-layers: 3\n", "a.yaml") == [
        ("--num-layers", ("3",), 3),
        ("--bf16", (), 2),
    ]
    content = "BASE: &BASE\n  --num-layers: 2\n  --lr: 1\nMODEL_ARGS:\n  <<: *BASE\n  --lr: 2\n"
    assert pairs(content, "a.yaml") == [("--num-layers", ("2",), 2), ("--lr", ("2",), 6)]


def test_environment_of_a_mapping() -> None:
    content = f"ENV_VARS: {{CUBLAS_WORKSPACE_CONFIG: ':16:8', SKIP: 1}}\nMODEL_ARGS: {json.dumps(dict(zip(SMALL.split()[::2], SMALL.split()[1::2], strict=True)))}"
    assert plan(content).environment == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}


def test_taking_apart_as_argparse_does() -> None:
    assert pairs("--data-path a b 0.5 c --num-layers=3 --cp-comm-type p2p a2a --min-lr -1e-5 --bf16 stray --lr -1") == [
        ("--data-path", ("a", "b", "0.5", "c"), 1),
        ("--num-layers", ("3",), 1),
        ("--cp-comm-type", ("p2p", "a2a"), 1),
        ("--min-lr", (), 1),
        ("--bf16", (), 1),
        ("--lr", ("-1",), 1),
    ]
    words = words_of("--bf16 stray", "args", "megatron", {})
    assert [text(word) for word in words.loose] == ["stray"]


@pytest.mark.parametrize(
    ("content", "source", "line"),
    [
        ("", "train.sh", "train.sh: is empty"),
        ("  \n\n", "train.sh", "train.sh: is empty"),
        ("%PDF-1.7\n…", "paper.pdf", "paper.pdf: is a PDF, not a launch script"),
        ("\x7fELF\2", "a.out", "a.out: is a program, not a launch script"),
        ("abc\0def", "x", "x: is a binary file, not a launch script"),
        ("import torch\nprint(1)", "pretrain_gpt", "pretrain_gpt: is a Python file; name the shell script that starts it"),
        ("#!/usr/bin/env python3\nx = 1", "run", "run: is a Python file"),
        ('"""Trains."""\nx = 1', "train.py", "train.py: is a Python file"),
        ("#!/bin/bash\necho hello\n", "train.sh", "train.sh: starts no training that can be read: no command runs"),
        ("Dear all,\nplease find attached the results.\n", "mail.txt", "mail.txt: starts no training that can be read"),
        ("<html><body>it's</body></html>", "x.html", "x.html:1:"),
        ("- 1\n- 2", "x.yaml", "x.yaml:1: is no mapping of arguments to values"),
        ("MODE: inference\nMODEL_ARGS:\n  --num-layers: 2\n", "x.yaml", "x.yaml:1: MODE = inference: runs no pretraining"),
        ("MODEL_ARGS:\n", "x.yaml", "x.yaml:1: MODEL_ARGS = null: must be a mapping of arguments to values, such as"),
        ("MODEL_ARGS:\n  trainer.devices: 8\n", "x.yaml", "x.yaml:2: trainer.devices: is no argument of the framework"),
        ("{", "x.json", "x.json:1: is not valid YAML"),
        ("--num-layers 'x", "args", "args:1: ends inside a quotation"),
        ("#!/bin/bash\n. ./env.sh\n$CMD", "s.sh", "s.sh: starts no training that can be read: no command runs a Python file with arguments such as --per_device_train_batch_size or --num-layers; ./env.sh (line 2) is sourced, and not found below the script's folder"),
        ("#!/bin/bash\nbash scripts/train.sh 8", "s.sh", "s.sh: starts no training that can be read: no command runs a Python file with arguments such as --per_device_train_batch_size or --num-layers; scripts/train.sh, which line 2 runs, is not found below the script's folder"),
        ('if [ "$1" = big ]; then\npython pretrain_gpt.py --num-layers 2\nfi', "s.sh", "s.sh:1: whether training starts depends on [ $1 = big ], which cannot be decided; give --set 1=value"),
        ("python pretrain_gpt.py $ALL", "s.sh", "s.sh:1: starts no training that can be read: $ALL is not set in the script; give it as --set ALL=value"),
    ],
)  # fmt: skip
def test_what_is_no_launch_file(content: str, source: str, line: str) -> None:
    assert error_of(lambda: words_of(content, source, "megatron", {})).startswith(line)


@pytest.mark.parametrize("sizes", ["2 4", "[2, 4]", "[2,4]", '"[2 4]"'])
def test_several_values_of_a_mapping_are_words(sizes: str) -> None:
    """As a shell splits them, and as Megatron-LM's functional tests write them (``_run_training.sh``)."""
    name = "--hierarchical-context-parallel-sizes"
    found = pairs(f"MODEL_ARGS:\n  --num-layers: 2\n  {name}: {sizes}\n", "x.yaml")
    assert (name, ("2", "4"), 3) in found


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    def error(path: Path) -> str:
        return error_of(lambda: read_words(str(path), "megatron", {}))

    assert error(tmp_path).endswith("is a directory; name a file in it")
    assert error(tmp_path / "x.sh").endswith("no such file")
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in error(tmp_path / "a.bin")
    (tmp_path / "large.sh").write_text("#" * (2 << 20))
    assert "is larger than" in error(tmp_path / "large.sh")


def test_ten_thousand_lines(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(script(*(f"OPTION_{n}='--save /x/{n}'  # {n}" for n in range(10_000)), arguments="--bf16"))
    assert read_script(str(file), Asked("megatron")).explained[-1].name == "--bf16"


LAUNCHED: tuple[str, ...] = ("megatron", "megatron-deepspeed")
_NAMES = st.sampled_from(sorted(arguments_of("megatron"))) | st.sampled_from(sorted(arguments_of("megatron-deepspeed")))
_VALUES = st.sampled_from(
    ["", "1", "2", "0", "-1", "1e3", "x", "$X", "'a b'", "none", "local", "E|t*3|L", "9" * 30, "fp8"]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(_NAMES, _VALUES), max_size=12), st.sampled_from(LAUNCHED))
def test_any_arguments_give_a_plan_or_one_line(arguments: list[tuple[str, str]], framework: str) -> None:
    content = script(arguments=" ".join(f"{name} {value}" for name, value in arguments))
    line = error_of(lambda: plan(content, framework))
    assert "\n" not in line
    line = re.sub(r"^\d+ errors: \(1\) ", "", line)
    assert not line or line.startswith(("train.sh:", "--gpus"))


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=120), st.sampled_from(["x.sh", "x.yaml", "x.json", "x", "x.txt"]))
def test_any_text_gives_a_plan_or_one_line(content: str, source: str) -> None:
    assert "\n" not in error_of(lambda: launch(content, source=source))


@settings(max_examples=80, deadline=None)
@given(st.text(max_size=60))
def test_any_text_in_a_script_gives_a_plan_or_one_line(content: str) -> None:
    assert "\n" not in error_of(lambda: launch(script(content, arguments=content)))


@settings(max_examples=300, deadline=None)
@given(st.text("ab \n\t'\"\\=", max_size=14))
def test_words_of_a_list_are_those_of_shlex(content: str) -> None:
    assume("\\\n" not in content)
    lexer = shlex.shlex(content, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    content = f"-x {content}"
    try:
        expected = list(lexer)
    except ValueError:
        assert "ends inside a quotation" in error_of(
            lambda: words_of(content, "args", "megatron", {})
        ) or content.endswith("\\")
        return
    given_words = words_of(content, "args", "megatron", {})
    found = [text(word) for given in given_words.given for word in given.values]
    assert sorted(
        [*found, *(text(word) for word in given_words.loose), *(given.name for given in given_words.given)]
    ) == sorted(["-x", *expected])


@pytest.mark.parametrize("unit", ["-a", "'a'", '"a"', "\\a", "a ", "#", "# ", '"', "$a", "--a\n", "\\\n"])
def test_a_long_list_is_read_in_one_pass(unit: str) -> None:
    began = time.process_time()
    error_of(lambda: words_of("--num-layers " + unit * (300_000 // len(unit)), "args", "megatron", {}))
    assert time.process_time() - began < 3


@settings(max_examples=10, deadline=None)
@given(st.integers(200, 3000))
def test_of_many_unknown_arguments_the_first_are_guessed_at(count: int) -> None:
    unknown = " ".join(f"--num-layerz{n} 1" for n in range(count))
    read = completed(made := launch(f"{SMALL} {unknown} --bf16", gpus=8), build_plan(made.source, {}))
    messages = [note.message for note in read.warnings if note.code == "argument-unknown"]
    assert len(messages) == MOST_OF_A_CODE + 1
    assert messages[-1] == f"and {count - MOST_OF_A_CODE:,} more like the {MOST_OF_A_CODE} above"
    assert sum("did you mean" in message for message in messages) <= MOST_GUESSES
    assert "did you mean" in messages[0]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["$A", "${A}", "AB", "A", " ", "1", "$1", "${1}", "$12", "$@", "shift", "\n", "-"])).map(
        "".join
    )
)
def test_variables_that_a_file_does_not_mention(content: str) -> None:
    """As a search for each of them by itself has it."""
    words = {name: re.search(rf"(?<![A-Za-z0-9_]){name}(?![A-Za-z0-9_])", content) for name in ("A", "AB", "B")}
    numbers = {name: re.search(rf"\$(?:\{{?{name}\b|\{{?[@*#]|\{{\d)|\bshift\b", content) for name in ("1", "12", "3")}
    if not re.search(r"\$[0-9]+[A-Za-z]", content):  # ``$1A``: a search takes it for none
        found = {**words, **numbers}
        assert not_in(content, found) == tuple(name for name, match in found.items() if match is None)
    assert not_in("$1A", ["1"]) == ()


def test_thousands_of_variables_are_looked_for_at_once() -> None:
    began = time.process_time()
    not_in("A=1\n" * 50_000, [f"V{n}" for n in range(20_000)])
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "name",
    [
        "sizes.sh",
        "$(dirname $0)/sizes.sh",
        '"$(dirname "${BASH_SOURCE[0]}")/sizes.sh"',
        "$(dirname $SELF)/sizes.sh",
        '"$(dirname "$(readlink -f "$0")")/sizes.sh"',
        '"$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/sizes.sh"',
        '"$( cd -- "$(dirname -- "$0")" >/dev/null 2>&1; pwd -P )/sizes.sh"',
        "$(dirname $(realpath $0))/sizes.sh",
        '"$(realpath "$(dirname "$0")")/sizes.sh"',
        "`dirname $0`/sizes.sh",
        "$(pwd)/sizes.sh",
        "${PWD}/sizes.sh",
    ],
)
def test_a_script_beside_the_script_is_read_however_it_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "sizes.sh").write_text("TP=4\n")
    started = script(arguments="--tensor-model-parallel-size $TP").replace("#!/bin/bash", f"source {name}")
    (tmp_path / "train.sh").write_text(started)
    found = read_script(str(tmp_path / "train.sh"), Asked("megatron", vocab_size=1024))
    assert build_plan(found.source, {}).plan.layout.tp == 4


def test_a_variable_that_a_sourced_script_uses_is_not_told_to_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "sizes.sh").write_text("TP=$1\n")
    (tmp_path / "train.sh").write_text(". $(pwd)/sizes.sh\npython pretrain_gpt.py --num-layers $TP\n")
    assert read_words(str(tmp_path / "train.sh"), "megatron", {"1": "4", "2": "4"}).unused == ("2",)


def test_a_draft_head_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("ARGS='\n --algorithm eagle3'\npython pretrain_gpt.py --num-layers 2\n")
    with pytest.raises(PlanError, match=r"train.sh:2: --algorithm = eagle3: converts the model"):
        read_words(str(tmp_path / "train.sh"), "megatron", {})


def test_an_argument_that_is_missing_names_the_script_that_may_set_it(tmp_path: Path) -> None:
    started = 'HERE="$(dirname "$(readlink -f "$0")")"\nsource "${HERE}/conf/sizes.sh"\n'
    (tmp_path / "train.sh").write_text(
        f"{started}torchrun --nproc_per_node 8 pretrain_gpt.py --micro-batch-size 1 $SIZES\n"
    )
    named = r"sizes\.sh \(line 2\) is sourced, and not found"
    with pytest.raises(PlanError, match=r"--num-layers: is missing: .*; \$\(dirname \$0\)/conf/" + named):
        read_script(str(tmp_path / "train.sh"), Asked("megatron", vocab_size=1024))
