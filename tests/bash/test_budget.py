"""Scripts that ask for more than reading may cost: each kind of growth, over random sizes."""

# ruff: noqa: E501 (tables)

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings, strategies as st

from memplan.bash.origin import MOST_MEMORY, MOST_STEPS, Budget, Origin, ScriptError
from memplan.bash.shell import read_script

ROUNDS = " ".join(map(str, range(300)))


def refusal(script: str) -> str:
    began = time.process_time()
    try:
        read_script(script, "train.sh")
        said = ""
    except ScriptError as error:
        said = f"{error.origin}: {error.problem}"
    assert time.process_time() - began < 3, "reading takes long"
    return said


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from(
        [
            'arr+=("${arr[@]}")', 'arr=("${arr[@]}" "${arr[@]}" x)', 'set -- "$@" "$@" "$e"', "s=$s$s$s", 's+="$s$s"',
            "f() { f; f; f; }; f", "x=$((a))", "eval 'f() { f; f; }; f'",
        ]
    ),
    st.integers(2, 12),
)  # fmt: skip
def test_what_grows_without_end_is_refused(command: str, width: int) -> None:
    """Of empty values, too: they are as large as others."""
    wide = "+".join(["a"] * (8 + width))
    said = refusal(f"e=; s=x; arr=(''); a={wide}; for i in {ROUNDS}; do for j in {ROUNDS}; do {command}; done; done")
    assert "limit" in said or "makes more text than a file should" in said
    assert said.startswith("train.sh:1: ")


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from(
        [
            ("", "x=${s%%a*b}"), ("", "x=${s//*a*a*b*c/}"), ("", "[[ $s == *a*a*a*b ]]"), ("", f"x=$(({'+'.join('1' * 4000)}))"),
            ("", "if [ -f x ]; then\n" + "A=1\n" * 900 + "fi"), ("", "case $s in *b*c) x=1;; esac"),
            ("\n".join(f"export A{n}=1" for n in range(3000)), "python x.py"),
        ]
    ),
    st.integers(1000, 2000),
)  # fmt: skip
def test_work_in_loops_is_refused(work: tuple[str, str], size: int) -> None:
    before, body = work
    script = f"{before}\ns={'a' * size}; for i in {ROUNDS}; do for j in {ROUNDS}; do {body}; done; done"
    assert f"the limit of {MOST_STEPS:,} steps" in refusal(script)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["", "echo ", "export ", "function f", "[[ ", "x=$((", "arr=(", "if true; then ", "cat <<A\n", "case x in "]),
    st.sampled_from(["\\a", "a[ ", " ", "\n", "1 && ", "(", "$((", "$(", "`", "${a[", "\"", "<", "<a ", "#SBATCH -n1\n", "f(", ";", "[a"]),
    st.sampled_from([200, 3_000, 60_000]),
)  # fmt: skip
def test_what_is_repeated_is_read_in_one_pass(before: str, unit: str, size: int) -> None:
    assert "\n" not in refusal(before + unit * (size // len(unit)))


def test_a_large_script_is_not_near_the_limit() -> None:
    """A thousand lines with a function and loops take less than a quarter of it."""
    lines = [f'add "--option-{n}" "$VALUE_{n}"; VALUE_{n}=${{VALUE_{n}:-{n}}}' for n in range(900)]
    loops = [
        "for i in $(seq 10); do",
        *(f"  for j in {' '.join(map(str, range(50)))}; do X+=($j); done" for _ in range(5)),
        "done",
    ]
    script = "\n".join(["add() { ARGS+=($1 $2); }", *lines, *loops, 'python a.py "${ARGS[@]}"'])
    reading = read_script(script, "train.sh")
    assert len(reading.started[0].words) == 1802
    assert reading.ledger.budget.steps < MOST_STEPS / 4


def test_both_limits() -> None:
    budget = Budget(Origin("f", 3))
    budget.spend(MOST_STEPS)
    with pytest.raises(ScriptError, match="takes more work to read than the limit of 4,000,000 steps"):
        budget.spend(1)
    with pytest.raises(ScriptError, match="over the limit of 128 MiB") as caught:
        Budget(Origin("f", 3)).make(1, MOST_MEMORY)
    assert str(caught.value.origin) == "f:3"
