"""Launch scripts from a grammar: every construct that is followed, over few names, so that they meet."""

# ruff: noqa: E501 (tables)

from __future__ import annotations

from collections.abc import Callable
from random import Random

from memplan.formats.settings import Argument, arguments_of

from .texts import NUMBERS, repeated, text

NAMES = ("A", "B", "N", "s", "arr", "U", "1", "@", "f")
DEEPEST = 4
OPERATORS = (":-", "-", ":=", ":+", "+", ":?", "#", "##", "%", "%%", "/", "//", "^", "^^", ",", ",,", ":", "@")
PATTERNS = ("*", "?", "[ab]", "a*b", "*a*a*b*c", "[!a]", "[[:digit:]]", "*/", ".*", "a", "")


class Grammar:
    """Words and commands from the random numbers ``random``."""

    def __init__(self, random: Random, framework: str) -> None:
        self._random = random
        self._framework = framework
        self._depth = 0

    def script(self) -> str:
        """A script that probably ends in a training."""
        lines = [self.command() for _ in range(self._random.randrange(12))]
        return "\n".join([*lines, self.training(), ""])

    def training(self) -> str:
        launcher = self._one("torchrun --nproc_per_node 8", "python", "deepspeed", f"srun -n {self._number()} python")
        between = self._one(" ", " \\\n    ", " ", " ")
        last = self.word() if self._random.random() < 0.3 else ""
        return f"{launcher} pretrain_gpt.py {between.join(self.arguments())} {last}"

    def arguments(self) -> list[str]:
        """Most of the arguments that a training needs, and a few of all others."""
        sizes = ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "max-position-embeddings")
        needed = [f"--{name} {self._one('2', '4', '64')}" for name in (*sizes, "micro-batch-size")]
        known = list(arguments_of(self._framework).values())
        for _ in range(self._random.choice((0, 1, 2, 8))):
            argument = self._random.choice(known)
            values = [self._value(argument) for _ in range(not argument.is_switch)]
            needed.append(" ".join([self._random.choice(argument.names), *values]))
        if self._random.random() < 0.2:
            needed.append(f"--{text(self._random)}")
        self._random.shuffle(needed)
        return needed[self._random.random() < 0.1 :]

    def _value(self, argument: Argument) -> str:
        if argument.choices and self._random.random() < 0.8:
            return self._random.choice(argument.choices)
        return self.word() if self._random.random() < 0.3 else self._number()

    def command(self) -> str:
        """A command of any kind."""
        if self._depth > DEEPEST:
            return f"{self._name()}={self.word()}"
        self._depth += 1
        made = self._random.choice(_COMMANDS)(self)
        self._depth -= 1
        return made

    def word(self) -> str:
        """A word of a few parts."""
        return "".join(self._part() for _ in range(self._random.choice((1, 1, 1, 2, 3))))

    def _part(self) -> str:
        if self._depth > DEEPEST:
            return self._one("a", "$A", "1")
        self._depth += 1
        part = self._random.choice(_PARTS)(self)
        self._depth -= 1
        return part

    def inner(self) -> str:
        """A word within a word."""
        return self.word() if self._random.random() < 0.5 else "a"

    def noise(self) -> str:
        """Signs that make no sense, now and then."""
        return text(self._random, most=4).replace("\0", "") if self._random.random() < 0.03 else "b"

    def sum(self) -> str:
        """Arithmetic."""
        terms = [self._one(self._number(), self._name(), f"${self._name()}", f"({self._name()}+1)", "-1", "a?b:c")]
        while self._random.random() < 0.6 and len(terms) < 40:
            sign = self._one("+", "-", "*", "/", "%", "**", "<<", "&&", "==", ",", "?", ":")
            terms += [sign, self._one(self._number(), self._name(), "A")]
        return "".join(terms)

    def test(self) -> str:
        """A condition."""
        return self._random.choice(_TESTS)(self)

    def simple_test(self) -> str:
        """What stands in the brackets of a condition."""
        left, right = self.word(), self._random.choice(PATTERNS) if self._random.random() < 0.5 else self.word()
        return self._one(
            f"-n {left}", f"-z {left}", f"-f {left}", left, f"{left} -eq {self._number()}", f"! {left}",
            f"{left} == {right}", f"{left} = {right}", f"{left} =~ {right}", f"{left} < {right}", f"{left} != {right}",
        )  # fmt: skip

    def body(self) -> str:
        """Commands."""
        return "\n".join(self.command() for _ in range(self._random.randrange(1, 4)))

    def items(self) -> str:
        """What an array is made of."""
        return " ".join(
            self._one(self.word(), f"[{self.sum()}]={self.word()}") for _ in range(self._random.randrange(5))
        )

    def simple(self) -> str:
        """A command of words."""
        name = self._one("echo", "eval", "set --", "shift", "unset", "export", "local", "read -r", "cat", "printf", "let", "exec",
                         "exit", "return", "break", "continue", "source", "f", "bash -c", "python x.py", "tee", ".", "getopts",
                         "export A=1 B=", "set -euo pipefail", "seq", "cd", "declare -A", self.noise())  # fmt: skip
        words = " ".join(self.word() for _ in range(self._random.randrange(4)))
        redirects = self._one("", "", "", f" > {self.word()}", f" >> {self.word()}", " 2>&1 | tee log", f" <<< {self.word()}",
                              f" <<E\n{self.word()}\nE" if self._depth == 1 else "")  # fmt: skip
        return f"{name} {words}{redirects}"

    def many(self) -> str:
        """Something thousands of times."""
        unit = self._one(
            f"{self.word()} ", f"{self._name()}+", "1 && ", f"{self._name()}[ ", "\\a", "x=1\n", "export A1=1\n", "("
        )
        begins = self._one(
            "echo ", f"{self._name()}=", "x=$((", "[[ ", "export ", "python x.py ", "if [ -f x ]; then\n", "arr=(", ""
        )
        ends = self._one("", "1 ))", "1 ]]", "\nfi", ")", "\n")
        return begins + unit * int(20_000 ** self._random.random()) + ends if unit != "(" else repeated(self._random)

    def _name(self) -> str:
        return self._random.choice(NAMES)

    def _number(self) -> str:
        return self._random.choice((*NUMBERS, "1", "2", "4", "8", "8", "16"))

    def _one(self, *choices: str) -> str:
        return self._random.choice(choices)

    def rounds(self) -> str:
        """The words of a ``for``."""
        return self._one(self.word(), "1 2 3", " ".join(map(str, range(self._random.randrange(200)))), '"${arr[@]}"')


Maker = Callable[[Grammar], str]

_PARTS: tuple[Maker, ...] = (
    lambda g: "a",
    lambda g: g._number(),
    lambda g: f"${g._name()}",
    lambda g: f"${{{g._name()}}}",
    lambda g: f'"${g._name()} {g.inner()}"',
    lambda g: f"'{g.inner()}'",
    lambda g: f"${{#{g._name()}}}",
    lambda g: f"${{!{g._name()}}}",
    lambda g: f"${{{g._name()}{g._random.choice(OPERATORS)}{g.inner()}}}",
    lambda g: f"${{{g._name()}{g._random.choice(OPERATORS)}{g._random.choice((*PATTERNS, *NUMBERS))}}}",
    lambda g: f"${{{g._name()}/{g._random.choice(PATTERNS)}/{g.inner()}}}",
    lambda g: f'"${{{g._name()}[@]}}"',
    lambda g: f"${{{g._name()}[{g.sum()}]}}",
    lambda g: f"${{{g._name()}[@]:{g._number()}:{g._number()}}}",
    lambda g: f"$(({g.sum()}))",
    lambda g: f"$({g.command()})",
    lambda g: f"`echo {g.inner()}`",
    lambda g: f"$'{g.noise()}'",
    lambda g: "<PATH TO DATA>",
    lambda g: f"\\{g._one('a', ' ', '$')}",
    lambda g: g.noise(),
    lambda g: f"<({g.command()})",
    lambda g: f"--{g.inner()}",
)
_TESTS: tuple[Maker, ...] = (
    lambda g: f"[[ {g.simple_test()} ]]",
    lambda g: f"[[ {g.simple_test()} && {g.simple_test()} || ( {g.simple_test()} ) ]]",
    lambda g: f"[ {g.simple_test()} ]",
    lambda g: f"test {g.simple_test()}",
    lambda g: f"(({g.sum()}))",
    lambda g: "true",
    lambda g: "false",
    lambda g: g.command(),
)
_COMMANDS: tuple[Maker, ...] = (
    lambda g: f"{g._name()}={g.word()}",
    lambda g: f"{g._name()}+={g.word()}",
    lambda g: f"arr=({g.items()})",
    lambda g: f"arr+=({g.items()})",
    lambda g: 'arr+=("${arr[@]}")',
    lambda g: 'set -- "$@" "$@" a',
    lambda g: "s=$s$s$s",
    lambda g: f"a={'+'.join(['a'] * 9)}; N=$((a))",
    lambda g: f"arr[{g.sum()}]={g.word()}",
    lambda g: f"(({g._name()} = {g.sum()}))",
    lambda g: f"if {g.test()}; then\n{g.body()}\nelse\n{g.body()}\nfi",
    lambda g: f"{g.test()} && {g.command()} || {g.command()}",
    lambda g: f"while {g.test()}; do\n{g.body()}\ndone",
    lambda g: f"for {g._name()} in {g.rounds()}; do\n{g.body()}\ndone",
    lambda g: f"for ((i=0; i<{g.sum()}; i++)); do\n{g.body()}\ndone",
    lambda g: f"case {g.word()} in {g._random.choice(PATTERNS)}|{g.word()}) {g.body()} ;; *) {g.command()} ;; esac",
    lambda g: f"f() {{\n{g.body()}\n}}",
    lambda g: f"( {g.body()} )",
    lambda g: f"{g.command()} | {g.command()}",
    lambda g: f"cat > file <<EOF\n{g.word()}\n{g.word()}\nEOF\n",
    lambda g: f"read -r -d '' T <<'X'\n{g.word()}\nX\n",
    lambda g: f"eval {g.word()}",
    lambda g: g.simple(),
    lambda g: g.simple(),
    lambda g: g.simple(),
    lambda g: g.many() if g._random.random() < 0.3 else g.simple(),
    lambda g: f"#SBATCH --nodes={g._number()} -n {g._number()}",
    lambda g: f"# {' '.join(text(g._random).split())}",
)
