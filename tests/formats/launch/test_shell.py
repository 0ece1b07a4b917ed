"""Scripts as bash would read them, with bash itself as the judge where it is here."""

# ruff: noqa: E501 (tables of scripts, arguments and the lines that they get)

from __future__ import annotations

import shutil
import subprocess
import time

import pytest
from hypothesis import given, settings, strategies as st

from memplan.bash.shell import read_script
from memplan.bash.values import text
from memplan.formats.files import words_of

from ...plan.outcomes import error_of
from .reading import known_words, words

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not here to compare with")


def refusal(script: str) -> str:
    """The line that says why ``script`` cannot be read, empty where it can."""
    return error_of(lambda: words_of(script, "train.sh", "megatron", {}))


def by_bash(script: str) -> list[str]:
    """The words that bash itself starts ``python`` with."""
    judge = 'python() { printf "%s\\0" python "$@"; }\n'
    done = subprocess.run(
        ["bash", "-c", judge + script], capture_output=True, text=True, timeout=20, check=True, env={}
    )
    return done.stdout.split("\0")[:-1]


SCRIPTS = {
    "a function's own variable": 'X=1\nf() { python a.py "$X"; }\nX=2 f',
    "quotes": """python a.py 'single $X "inner"' "double 'inner' \\" \\$" \\ escaped\\ blank $'tab\\tquote\\''""",
    "braces": """V=9; python a.py x{a,b}y {1..3} {3..1} {01..10..4} {a..e..2} {-2..1} {a,b}{1,2} {a,{b,c}d} {a,} {,a}x z{,}""",
    "braces with more in them": """V=9; python a.py {$V,"b c",'d,e'} {"a,b",c} p{x,${V}}{1..2} "{a,b}" '{1..3}' \\{a,b} {a\\,b,c} ${V}{1,2}""",
    "braces that are none": """V=3; python a.py {} {a} {1..$V} {a..3} {1..} a{b,c a{b,c}} {{a,b} {a,{b} {x}{1,2} --one={\\"a\\":1} @{a}b,c""",
    "braces of arrays, loops and assignments": """A=({0..7}); B={a,b}; W=; for I in {1..2} c{1,2}; do W="$W $I"; done; python a.py $W ${#A[@]} $B""",
    "empty words": """E=; python a.py "" "$E" $E '' x"$E"y""",
    "splitting": """X="a  b\tc"; python a.py $X "$X" pre$X-post""",
    "arrays": """A=(1 '2 3' "4"  # five
        5 \\
        6); A+=(7 "8 9"); python a.py ${A[@]} "${A[@]}" "${A[*]}" ${#A[@]} ${A[1]} "${A[1]}" ${A[-1]} "x${A[@]}y\"""",
    "array elements": """A=(); A[0]=x; A[1]=y; A[1]+=z; python a.py "${A[@]}" ${#A[@]}""",
    "array of options": """A=("--one 1" "--two '2'"); python a.py ${A[@]}""",
    "associative": """declare -A M=([a]=1 [b]=2); M[c]=3; python a.py ${M[a]} ${M[c]}""",
    "defaults": """F=f; E=; python a.py ${U:-d} ${U-d} "${U:=x y}" $U ${F:+yes} ${U2:+no} ${E:-e} "${E-none}" ${E+set}""",
    "nested default": """X=5; python a.py ${U:-${V:-$X}} ${U:-"a b"} "${U:-"a b"}\"""",
    "arithmetic": """A=3; B=$((A*2+1)); python a.py $B $(($A**2)) $(( (A + B) / 4 )) $((B%4)) $((-7/2)) $((A>B?1:0))
        """,
    "arithmetic commands": """((X = 3)); ((X++)); let X+=2; ((Y=X*2)); python a.py $X $Y""",
    "bases": """python a.py $((0x10)) $((010)) $((1<<10))""",
    "pattern removal": """P=/a/b.c.d; python a.py ${P##*/} ${P#*/} ${P%.*} ${P%%.*} ${P/b/X} ${P//./_} ${P/#\\/a/Y} ${P/%d/Z} ${P/x/y}""",
    "cases": """P=aBc; python a.py ${P^^} ${P,,} ${P^} ${P:1} ${P:0:2} ${P: -1} ${#P}""",
    "continuation": "python \\\n  a.py --x\\\n1 \\\n  # a comment ends it\n",
    "comment in word": """python a.py a#b '#c' "#d" # e""",
    "if": """X=2; if [ "$X" = 1 ]; then Y=one; elif [[ $X == [23] ]]; then Y=two; else Y=none; fi; python a.py $Y""",
    "tests": """X=abc; N=5; Y=; [ -n "$X" ] && Y+=1; [ -z "$X" ] || Y+=2; [[ $X == a* && ! $X == b* ]] && Y+=3
        [ $N -gt 3 -a $N -le 5 ] && Y+=4; [[ $N -ne 5 ]] || Y+=5; test x = x && Y+=6; python a.py $Y""",
    "case": """M=large; case $M in small) N=1;; medium|lar*) N=2 ;; *) N=3;; esac; python a.py $N""",
    "for": """A=; for s in 1 2 "3 4"; do A="$A<$s>"; done; python a.py "$A\"""",
    "while": """I=0; A=(); while [ $I -lt 4 ]; do I=$((I+1)); if ((I==2)); then continue; fi; A+=($I); done; python a.py ${A[@]}""",
    "function": """add() { local x=$1; shift; ARGS+=" $x:$#"; }; ARGS=; add a b c; add d; python a.py $ARGS""",
    "eval": """CMD="python a.py --x '1 2'"; eval $CMD""",
    "here-document": """cat <<EOF > args.tmp.$$
EOF
rm -f args.tmp.*
read -r -d '' T <<'X' || true
 a $b
X
python a.py "$T\"""",
    "read": """S="1,2,,4,5"; IFS=',' read -r A B C D <<< "$S"; read E F <<< "  x  y z "; python a.py "$A" "$B" "$C" "$D" "$E" "$F\"""",
    "command substitution": """V=$(echo a b); W=$(cat <<EOF
one $V
EOF
); python a.py "$V" "$W" `echo x` $(expr 2 \\* 3)""",
    "output of a function": """f() { echo "--a $1" b; }; g() { f 1; f "2 3"; }; python a.py $(f x) "$(g)\"""",
    "positional": """set -- a 'b c' d; python a.py $1 "$2" $# "$@" "${@:2}"; """,
    "pipes": """X=1 python a.py 1 2>&1 | cat""",
    "subshell": """X=1; (python a.py $X)""",
    "string append": """O="--a 1"; O+=" --b 2"; O="$O --c"; python a.py $O""",
    "export": """export A=1 B="2 3"; readonly C=4; declare -i D=5; python a.py $A "$B" $C $D""",
}


@needs_bash
@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(name: str) -> None:
    assert known_words(SCRIPTS[name]) == by_bash(SCRIPTS[name])


_ATOMS = [
    "a",
    "b c",
    "${X}",
    "${Y}",
    '"$X z"',
    "'q $X'",
    "${U:-d e}",
    '"${A[@]}"',
    "${A[*]}",
    "\\ ",
    "$((N+1))",
    '""',
    "${X%b}",
]


@needs_bash
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(_ATOMS), min_size=1, max_size=3).map("".join), min_size=1, max_size=4),
    st.lists(
        st.sampled_from(["X='a  b'", "Y=y", 'X="$X$Y"', "A+=(1 '2 3')", "N=$((N*2+1))", "Y=${X:-$Y}", 'A=("$X" $X)'])
    ),
)
def test_any_words_are_those_of_bash(arguments: list[str], assignments: list[str]) -> None:
    script = "\n".join(["X=x; Y=; N=1; A=(0)", *assignments, f"python a.py {' '.join(arguments)}"])
    assert known_words(script) == by_bash(script)


def test_unknowns_travel_with_the_text() -> None:
    script = 'HOST=$(hostname)\nX="at $HOST"\npython a.py --a $X --b ${HOME}/x --c $((N * 8)) --d <your path> `date`'
    expected = [
        "python",
        "a.py",
        "--a",
        "at",
        "$(hostname)",
        "--b",
        "$HOME/x",
        "--c",
        "$((N * 8))",
        "--d",
        "<your path>",
        "`date`",
    ]
    assert words(script) == expected


def test_variables_from_outside_stand_over_the_script() -> None:
    assert words("X=1; python a.py $X $1 ${Y:-2}", X="5", Y="6") == ["python", "a.py", "5", "$1", "6"]
    assert read_script("python a.py $1", "s", {"1": "one"}).started[0].words[-1][0].text == "one"


def test_an_item_whose_index_is_not_known_is_not_known() -> None:
    """A job of an array chooses by its number: neither an empty item nor what stands for one."""
    assert words("A=(1 2); T=${A[$ID]}; python a.py ${T:-4} ${A[1]} ${A[7]:-3}")[2:] == ["${A[$ID]}", "2", "3"]
    assert words("A=(1 2); T=${A[$ID]}; python a.py ${T:-4}", ID="1")[2:] == ["2"]


def test_guards_that_exit_are_passed() -> None:
    script = 'if [ $# -lt 1 ]; then echo usage; exit 1; fi\n[ -d "$1" ] || { echo no; exit 2; }\npython a.py --ok'
    assert words(script) == ["python", "a.py", "--ok"]


@pytest.mark.parametrize("reader", ["sbatch", "sbatch --exclusive", "bash", "bash -x"])
def test_a_script_on_standard_input_is_followed(reader: str) -> None:
    """What the script knows is filled in; ``\\$`` is left to the one that is started."""
    script = (
        f"N=8\nCMD='python a.py --x 1'\n{reader} <<EOF\n#!/bin/bash\nY=2\nsrun -n $N bash -c \"$CMD --y \\$Y\"\nEOF"
    )
    assert words(script)[-6:] == ["python", "a.py", "--x", "1", "--y", "2"]


def test_shells_in_shells() -> None:
    script = "export CMD='python a.py --x'\nsrun -N 2 bash -c '$CMD --y \"$1\"' 2>&1 | tee log"
    assert words(script)[-4:] == ["python", "a.py", "--x", "--y"] or words(script)[-1] == "$1"


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("python a.py 'x", "train.sh:1: ends inside a quotation: a ' is missing"),
        ('X="a\n\npython a.py', 'train.sh:1: ends inside a quotation: a " is missing'),
        ("A=(1 2\npython a.py", "ends inside an array: a `)` is missing"),
        ("if true; then\npython a.py", "`fi` is missing here"),
        ("fi", "train.sh:1: is not a shell script that can be read: `fi` is unexpected here"),
        ("cat <<EOF\nx\n", "train.sh:2: ends inside a here-document: no line is EOF"),
        ("(" * 500, "is nested too deeply"),
        ("X=$(" * 500, "is nested too deeply"),
        ("while true; do X=$X$X$X; done; python a.py", ""),
        ("X=xxxxxxxxxxxxxxxx\n" + "X=$X$X$X$X\n" * 20 + "python a.py $X", "makes more text than a file should"),
        ("f() { f; f; f; }; f", "takes more work to read than the limit of 4,000,000 steps"),
    ],
)
def test_what_cannot_be_read(script: str, line: str) -> None:
    assert line in refusal(script)


@pytest.mark.parametrize(
    "braces",
    [
        "{1..999999999}",
        "{1..999}" * 4,
        "{a,b}" * 40,
        "{a," * 60 + "}" * 60,
        "{a," * 40_000,
        "{" * 40_000 + "}" * 40_000,
    ],
)
def test_braces_without_an_end_are_refused_or_read(braces: str) -> None:
    assert refusal(f"A=({braces})\npython a.py").count("\n") == 0


def test_gpus_that_a_range_lists_are_counted() -> None:
    """``{0..7}`` is eight words (bash), so that ``torchrun`` starts eight processes."""
    read = words_of(
        "GPUS=({0..7})\ntorchrun --nproc_per_node ${#GPUS[@]} pretrain_gpt.py --num-layers 2\n",
        "train.sh",
        "megatron",
        {},
    )
    assert read.training is not None
    assert read.training.gpus is not None
    assert read.training.gpus.value == 8


def test_thousands_of_lines_are_read_fast() -> None:
    lines = [
        f'OPTION_{n}="--data-path /d/{n}" # {n}\nif [[ $OPTION_{n} == *7* ]]; then ALL+=" $OPTION_{n}"; fi'
        for n in range(1500)
    ]
    script = "\n".join([*lines, "python a.py --num-layers 2"])
    began = time.process_time()
    assert words(script)[-1] == "2"
    assert time.process_time() - began < 10


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from(list("ab1 \t\n\"'$(){}[]`\\#;&|<>=+-*/%:!?@~^,.")) | st.characters(), max_size=80))
def test_any_text_is_read_or_refused(script: str) -> None:
    assert "\n" not in refusal(script)


INNER = "#SBATCH --nodes=2\nA=$1; python a.py $A ${B:-none} ${C:-none} ${D:-none} $SLURM_NNODES\nexit 1"


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("bash inner.sh x", "x none c d 2"),
        ("D=e ./inner.sh y z", "y none c e 2"),
        ("sbatch inner.sh w", "w none c d 2"),
        ("chmod +x inner.sh", None),
        ("sbatch --nodes=4 inner.sh w", "w none c d 4"),
        ("sbatch -N 4 --exclusive inner.sh w", "w none c d 4"),
        ("sbatch -N4 --export=ALL,D=e,B=f inner.sh w", "w f c e 4"),
        ('sbatch -N 4 --export=ALL,D=e --wrap="bash inner.sh w"', "w none c e 4"),
        ("sbatch -N 4 --wrap 'D=f bash inner.sh w'", "w none c f 4"),
        ("sbatch -N $HOW_MANY inner.sh w", None),
        ("for n in 1 4; do sbatch -N $n inner.sh w; done", "w none c d 1\nw none c d 4"),
        ("bash other.sh; sbatch -N 3 inner.sh w", "w none c d 3"),
        ("sbatch <<E\n#SBATCH -N ${N:-6}\npython a.py \\$SLURM_NNODES\nE", "6"),
        ("cat <<E | sbatch\n#SBATCH -N ${N:-6}\npython a.py \\$SLURM_NNODES\nE", "6"),
        ("cat > job.sh <<E\n#SBATCH -N ${N:-6}\npython a.py \\$SLURM_NNODES \\$1\nE\nsbatch job.sh v", "6 v"),
        ("sbatch elsewhere inner.sh w", None),
        ("bash elsewhere.sh w", None),
    ],
)
def test_a_script_that_another_runs_has_what_is_exported_to_it(call: str, arguments: str | None) -> None:
    """Neither B, which is not exported, nor what the inner script sets and how it ends, pass between them."""
    outer = f'A=a B=b; export C=c D=d\n{call}\npython b.py "$A"'
    files = {"inner.sh": (INNER, "inner.sh"), "other.sh": ("#SBATCH -N 9\n:", "other.sh")}
    reading = read_script(outer, "outer.sh", {}, files.get)
    *inner, last = [[text(word) for word in one.words] for one in reading.started]
    assert last == ["python", "b.py", "a"]
    assert inner == [["python", "a.py", *line.split()] for line in (arguments or "").splitlines()]


@pytest.mark.parametrize(
    ("branch", "is_told"),
    [("bash x.sh", True), ("./x.sh", True), ("deepspeed $CMD", True), ("chmod +x x.sh", False), ("mkdir $OUT", False)],
)
def test_what_runs_under_an_open_condition_is_told(branch: str, is_told: bool) -> None:
    reading = read_script(f'if [ "$KIND" = 1 ]; then\n{branch}\nfi', "run.sh", {})
    assert [one.ask for one in reading.perhaps] == ["KIND"] * is_told
    assert not reading.undecided


CHILDREN = {
    "train.sh": 'python train.py "$1" "${MBS-}"',
    "setup.sh": "f() { MBS=9; }\nMBS=8\nexport MBS",
    "broken.sh": "if true; then",
    "again.sh": "bash again.sh\nbash round.sh\npython again.py",
    "round.sh": "bash again.sh",
}


@pytest.mark.parametrize(
    ("line", "started"),
    [
        ("bash -x train.sh 8", "python train.py 8 2"), ("nohup bash train.sh 8 > log &", "nohup python train.py 8 2"),
        ("srun -N 2 bash train.sh 8", "srun -N 2 python train.py 8 2"),
        ("bash $(dirname $0)/train.sh 8", "python train.py 8 2"), ("sbatch --nodes=4 train.sh 8", "python train.py 8 2"),
        ("bash setup.sh\nf\nexport MBS\nbash train.sh 8", "python train.py 8 4"),
        ("bash broken.sh\npython train.py 1 1", "python train.py 1 1"), ("bash again.sh", "python again.py"),
        ("f() { bash train.sh 8; }\nMBS=3 f", "python train.py 8 3"), ("docker run -v a.sh bash train.sh", None),
    ],
)  # fmt: skip
def test_a_script_is_a_process_of_its_own(line: str, started: str | None) -> None:
    """Its functions and variables end with it; what cannot be read of it hides nothing that another one starts."""

    def beside(name: str) -> tuple[str, str] | None:
        return (CHILDREN[name], name) if name in CHILDREN else None

    reading = read_script(f"export MBS=2\nf() {{ MBS=4; }}\n{line}\n", "run.sh", {}, beside)
    first = next(iter(reading.started), None)
    assert (" ".join(map(text, first.words)) if first is not None else None) == started


def test_a_position_that_is_given_is_the_first_scripts() -> None:
    given = {"1": "4"}
    reading = read_script('bash train.sh "$1$1"', "run.sh", given, lambda name: (CHILDREN[name], name))
    assert " ".join(map(text, reading.started[0].words)).strip() == "python train.py 44"


def test_a_script_that_cannot_be_read_is_told_where_nothing_else_starts() -> None:
    with pytest.raises(ValueError, match="`fi` is missing"):
        read_script("bash broken.sh\n", "run.sh", {}, lambda name: (CHILDREN[name], name))
