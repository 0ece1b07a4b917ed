"""The kind of a launch file, and its words: a shell script, a list of arguments, or a mapping."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path

from ..bash.origin import Budget, ScriptError
from ..bash.shell import read_script
from ..bash.values import Cause, Ledger, Piece, Unknown, Value, cleaned, text
from ..plan.errors import ABSENT, Node, Origin, PlanError, refused, wrong_at
from ..plan.text import STANDARD_INPUT, folder_of, parse_yaml, path_of, read_standard_input, read_text
from ..values import dataclass
from .launchers import Training, beside, is_megatron, training_in, unread
from .settings import Argument, Given, Table, arguments_of, taken_apart

_MAGIC = {"%PDF": "a PDF", "\x7fELF": "a program", "PK\x03\x04": "an archive", "{\\rtf": "a document"}
_PYTHON = re.compile(r"\s*(?:#!.*python|(?:import|from) [\w.]+(?: import .*)?$|def \w+\(|class \w+)", re.MULTILINE)
_KEY = re.compile(r"[\"']?(?:--)?[\w-]+[\"']?\s*:(?:\s|$)")
_COMMENT = re.compile(r"\s*(?:#.*)?$")
_PART_OF_WORD = re.compile(
    r"""(?P<plain>[^\s\\'"]+)|(?P<single>'[^']*')|(?P<double>"[^"\\]*(?:\\.[^"\\]*)*")|(?P<escape>\\(?:[^\n]|\Z))""",
    re.DOTALL,
)
_NAME = re.compile(r"(?<![\w-])--[\w-]+")
_OF_OTHERS = ("belongs to models", "was renamed long ago")
"""How the reason begins why an argument is refused that models of another kind have, or older scripts."""
_DRAFTED = re.compile(r"^[^#\n]*(?<![\w-])--algorithm[ =](eagle\w*|medusa)", re.MULTILINE)
"""What Megatron-LM's ``examples/post_training/modelopt/convert_model.py`` is told in front of such a training."""
_OF_ITS_OWN = 2
"""Arguments of Megatron's beside one that any script may have."""
_BETWEEN_WORDS = re.compile(r"(?:\s+|\\\n|#[^\n]*)*")
_WORD = 100
"""Steps of an argument: what becomes of it later is among them."""
_PART = 20
"""Steps of a part of a word."""
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_SECTIONS = ("MODEL_ARGS", "arguments")
_ENVIRONMENTS = ("ENV_VARS", "environment")


@dataclass(frozen=True, slots=True)
class Words:
    """Arguments of a training command, taken apart, and what was found around them."""

    given: list[Given]
    loose: list[Value]
    ledger: Ledger
    origin: Origin
    folder: Path = field(default_factory=Path)
    training: Training | None = None
    environment: Mapping[str, Value] = field(default_factory=dict)
    files: Mapping[str, Value] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    """Variables given from outside that the file does not mention."""
    unread: tuple[str, ...] = ()
    """What it sources and was not read, in words."""


def read_words(name: str, framework: str, given: Mapping[str, str]) -> Words:
    """The arguments in the file ``name``, or on standard input for ``-``. ``given`` are variables from outside."""
    if name == "-":
        content, source, folder = read_standard_input(), STANDARD_INPUT, Path()
    else:
        path = path_of(name)
        content, source, folder = read_text(path), str(path), folder_of(path)
    words = words_of(content, source, framework, given, folder)
    return replace(words, unused=not_in(content, given)) if given and words.training is None else words


def not_in(content: str, names: Iterable[str]) -> tuple[str, ...]:
    """Those of ``names`` that are not in ``content``; a positional parameter may be meant by ``$@`` and the like."""
    found = set(re.findall(r"[A-Za-z0-9_]+", content))
    numbers = set(re.findall(r"\$\{?([0-9]+)", content))
    any_number = re.search(r"\$(?:\{?[@*#]|\{[0-9])|\bshift\b", content) is not None
    return tuple(name for name in names if not ((any_number or name in numbers) if name.isdigit() else name in found))


def words_of(content: str, source: str, framework: str, given: Mapping[str, str], folder: Path | None = None) -> Words:
    """The arguments in ``content``, which errors call ``source``."""
    try:
        return _words_of(content, source, framework, given, folder or Path())
    except ScriptError as error:
        raise refused(error) from None


def _words_of(content: str, source: str, framework: str, given: Mapping[str, str], folder: Path) -> Words:
    _refuse_what_is_none(content, source)
    arguments = arguments_of(framework)
    content = content.replace("\r\n", "\n")
    first = next((line.strip() for line in content.splitlines() if not _COMMENT.fullmatch(line)), "")
    origin = Origin(source)
    ledger = Ledger(Budget(origin))
    if source.endswith((".yaml", ".yml", ".json")) or first.startswith(("{", "[")) or _KEY.match(first):
        root = parse_yaml(content, source)
        if not isinstance(root.value, list) or not any(str(item.value).startswith("--") for item in root.value):
            return _mapping(root, arguments, given, folder)
        listed = ((_written(item), item.origin) for item in root.value)
        return _list(listed, arguments, given, ledger, origin, folder)
    if first.startswith("-"):
        return _list(_listed(content, source, ledger.budget), arguments, given, ledger, origin, folder)
    texts = [content]

    def read_beside(name: str) -> tuple[str, str] | None:
        found = beside(folder)(name)
        texts.extend(found[:1] if found is not None else ())
        return found

    reading = read_script(content, source, given, read_beside)
    drafted = _DRAFTED.search(content)
    if drafted is not None:
        problem = "converts the model to one with a draft head, which trains beside a base that is not estimated"
        where = Origin(source, 1 + content.count("\n", 0, drafted.start()))
        raise PlanError("--algorithm", drafted[1], problem, origin=where)
    try:
        training = training_in(reading, source, folder)
    except PlanError as error:
        raise _other_model(content, source, arguments) or error from None
    reading.ledger.budget.spend(_WORD * len(training.words), training.origin)
    taken, loose = taken_apart(training.words, arguments, training.origin)
    return Words(
        taken,
        loose,
        reading.ledger,
        training.origin,
        folder,
        training,
        training.environment,
        reading.files,
        unread=unread(reading),
        unused=not_in("\n".join(texts), given) if given else (),
    )


def _other_model(content: str, source: str, arguments: Mapping[str, Argument]) -> PlanError | None:
    """An error for an argument of a model or an old script that is refused, wherever it stands: what decides whether
    the script starts a training need not be known then."""
    for number, line in enumerate(content.splitlines(), 1):
        for name in () if _COMMENT.fullmatch(line) else _NAME.findall(line):
            argument = arguments.get(name)
            if name == "--batch-size" and len({*filter(is_megatron, _NAME.findall(content))}) < _OF_ITS_OWN:
                continue  # anybody's, as --seq-length is
            if argument is not None and argument.table is Table.REFUSED and argument.why.startswith(_OF_OTHERS):
                return PlanError(name, ABSENT, argument.why, origin=Origin(source, number))
    return None


def _list(
    words: Iterable[tuple[str, Origin]],
    arguments: Mapping[str, Argument],
    given: Mapping[str, str],
    ledger: Ledger,
    origin: Origin,
    folder: Path,
) -> Words:
    """The arguments in a bare list of them."""
    values = [_expanded(word, where, ledger, given) for word, where in words]
    ledger.budget.spend(_WORD * len(values))
    taken, loose = taken_apart(values, arguments, origin)
    return Words(taken, loose, ledger, origin, folder)


def words_of_node(root: Node, framework: str, more: Mapping[str, Argument] | None = None) -> Words:
    """The arguments in a mapping that a file holds: ``arguments``, and ``environment`` beside them. ``more`` are known
    beside those of the framework's parser."""
    return _mapping(root, {**arguments_of(framework), **(more or {})}, {}, Path())


def node_of_written(content: Value, origin: Origin) -> Node:
    """The mapping in a file that the script itself writes, a here-document, with the script's lines."""
    lines = [origin]
    for piece in content:
        lines[-1] = piece.origin if lines[-1] is origin else lines[-1]
        lines.extend([origin] * piece.text.count("\n"))
    return _relocated(parse_yaml(text(content).expandtabs(2), "configuration.json"), lines)


def _relocated(node: Node, lines: list[Origin]) -> Node:
    line = node.origin.line or 1
    origin = lines[min(line, len(lines)) - 1]
    if isinstance(node.value, dict):
        return Node({key: _relocated(item, lines) for key, item in node.value.items()}, origin)
    if isinstance(node.value, list):
        return Node([_relocated(item, lines) for item in node.value], origin)
    return Node(node.value, origin, node.text)


def _refuse_what_is_none(content: str, source: str) -> None:
    origin = Origin(source)
    for magic, what in _MAGIC.items():
        if content.startswith(magic):
            raise wrong_at(origin, f"is {what}, not a launch script")
    if "\0" in content:
        raise wrong_at(origin, "is a binary file, not a launch script")
    if not content.strip():
        raise wrong_at(origin, "is empty")
    start = "\n".join(
        line for line in content[:4096].splitlines() if not _COMMENT.fullmatch(line) or line.startswith("#!")
    )
    if source.endswith(".py") or _PYTHON.match(start):
        raise wrong_at(origin, "is a Python file; name the shell script that starts it")


def _listed(content: str, source: str, budget: Budget) -> Iterator[tuple[str, Origin]]:
    """The words of a bare list of arguments, over one line or many, with comments and quotes but no shell."""
    at, line = 0, 1
    while True:
        between = _BETWEEN_WORDS.match(content, at)
        if between is not None:
            at, line = between.end(), line + between[0].count("\n")
        if at == len(content):
            return
        parts: list[str] = []
        origin = Origin(source, line)
        while (match := _PART_OF_WORD.match(content, at)) is not None:
            budget.spend(_PART, origin)
            parts.append(_unquoted(match.lastgroup, match[0]))
            at, line = match.end(), line + match[0].count("\n")
        if content[at : at + 1] in ("'", '"'):
            raise wrong_at(Origin(source, line), "ends inside a quotation")
        yield "".join(parts), origin


def _unquoted(kind: str | None, written: str) -> str:
    if kind == "double":
        return re.sub(r'\\(?:(["\\])|\n)', lambda escape: escape[1] or "", written[1:-1])
    return written[1:-1] if kind == "single" else written[1:] if kind == "escape" else written


def _expanded(word: str, origin: Origin, ledger: Ledger, given: Mapping[str, str]) -> Value:
    """``word`` with ``$NAME`` and ``${NAME}`` replaced by what was given, or unknown."""
    pieces: list[Piece] = []
    at = 0
    word = cleaned(word)
    for match in _VARIABLE.finditer(word):
        name = match[1] or match[2]
        pieces.append(Piece(word[at : match.start()], origin))
        if name in given:
            pieces.append(Piece(cleaned(given[name]), Origin(f"--set {name}")))
        else:
            pieces.extend(ledger.value(Unknown(f"${name}", name, Cause.UNSET, origin)))
        at = match.end()
    pieces.append(Piece(word[at:], origin))
    return tuple(piece for piece in pieces if piece.text) or (Piece("", origin),)


def _mapping(root: Node, arguments: Mapping[str, Argument], given: Mapping[str, str], folder: Path) -> Words:
    """``{"--num-layers": 12}``, ``{"num-layers": 12}``, or Megatron's ``{MODEL_ARGS: …, ENV_VARS: …}``."""
    ledger = Ledger(Budget(root.origin))
    if not isinstance(root.value, dict):
        raise wrong_at(root.origin, "is no mapping of arguments to values, such as {--num-layers: 12}")
    if "framework" in root.mapping and not arguments.keys() & root.mapping.keys():
        raise wrong_at(root.origin, "is a plan, not a launch file; leave out --from")
    mode = root.mapping.get("MODE")
    if mode is not None and mode.value in ("inference", "rl"):  # of Megatron-LM's functional tests (run_ci_test.sh)
        raise mode.wrong(
            "MODE", "runs no pretraining: it generates text, or trains on what it generates, which is not estimated"
        )
    name = next((name for name in _SECTIONS if name in root.mapping), "")
    section = root.mapping[name] if name else root
    if not isinstance(section.value, dict):
        raise section.wrong(name, "must be a mapping of arguments to values, such as {--num-layers: 12}")
    if section.mapping and not any(_named(key, arguments) in arguments for key in section.mapping):
        key, node = next(iter(section.mapping.items()))
        raise node.lacks(key, "is no argument of the framework, and neither is any other key here")
    variables = next((root.mapping[name] for name in _ENVIRONMENTS if name in root.mapping), Node({}, root.origin))
    environment = {
        name: _expanded(_written(node), node.origin, ledger, given)
        for name, node in variables.mapping.items()
        if not isinstance(node.value, (dict, list))
    }
    taken = [
        entry
        for key, node in section.mapping.items()
        if (entry := _entry(key, node, arguments, ledger, given)) is not None
    ]
    return Words(taken, [], ledger, root.origin, folder, None, environment)


def _named(key: str, arguments: Mapping[str, Argument]) -> str:
    """The argument that the key of a mapping is."""
    name = key if key.startswith("--") else f"--{key}"
    return name if name in arguments or name.replace("_", "-") not in arguments else name.replace("_", "-")


def _entry(
    key: str, node: Node, arguments: Mapping[str, Argument], ledger: Ledger, given: Mapping[str, str]
) -> Given | None:
    name = _named(key, arguments)
    argument = arguments.get(name)
    if node.value is None or node.value is False:
        return None
    if node.value is True and (argument is None or argument.is_switch):
        return Given(name, argument, (), node.origin)
    if isinstance(node.value, dict):
        raise node.lacks(name, "must be a value or a list of values")
    if isinstance(node.value, list):
        values = [(_written(item), item.origin) for item in node.value]
    else:
        plain = _written(node)
        several = argument is not None and bool(argument.count)
        plain = plain[1:-1].replace(",", " ") if several and plain[:1] + plain[-1:] == "[]" else plain
        values = [(word, node.origin) for word in (plain.split() if several else (plain,))]
    return Given(name, argument, tuple(_expanded(word, where, ledger, given) for word, where in values), node.origin)


def _written(node: Node) -> str:
    if isinstance(node.value, (dict, list)):
        raise wrong_at(node.origin, "holds a list or mapping where a value should be")
    if node.text is not None:
        return node.text
    return str(node.value)
