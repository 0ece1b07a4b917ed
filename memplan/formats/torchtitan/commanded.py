"""torchtitan's own command line, given to memplan: ``--module llama3 --config llama3_8b --training.seq_len 4096``.

``torchtitan/config/manager.py`` (``ConfigManager._load_config``, ``parse_args``): the module, the function, and keys
over what that gives, as tyro takes them: ``-`` may stand for ``_``, and a switch has no value, or ``no-`` before its
name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from ...plan.errors import Origin
from .keys import key_of
from .registry import CONFIG, place_of

_MODULE, _CONFIG, _FILE = "--module", "--config", "--job.config_file"
_ENDINGS = (".toml", ".py", ".json", ".sh")
"""Of files that a job of torchtitan's may be in."""
_FROM = "--from"


def as_settings(words: Sequence[str], ours: str) -> list[str]:
    """``words`` with torchtitan's flags as memplan takes them: the file, and ``--set`` with each key. They stay as they
    are where nothing says that a job of torchtitan's is meant: its module, a file, or ``--from`` with the name
    ``ours``."""
    names = {word.partition("=")[0] for word in words}
    read_as = {after if word == _FROM else word.removeprefix(f"{_FROM}=") for word, after in pairwise([*words, ""])}
    meant = bool({_MODULE, _FILE} & names) or (_FROM in names and ours in read_as)
    if not meant and not any(map(_is_file, words)):
        return [*words]
    made, rest, said = list[str](), list(words), dict[str, str]()
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if meant and flag in (_MODULE, _CONFIG, _FILE) and (equals or rest):
            said[flag] = value if equals else rest.pop(0)
            continue
        key, off = _key(flag)
        if not key or not (meant or key_of(key) is not None):
            made.append(word)
            continue
        if not off and not equals and rest and not rest[0].startswith("--") and not _is_file(rest[0]):
            equals, value = "=", rest.pop(0)
        made.append(f"--set={key}={'false' if off else value if equals else 'true'}")
    return [*made, *_placed(said, made, ours)]


def _key(flag: str) -> tuple[str, bool]:
    """The key that ``flag`` is, and whether it turns it off; nothing where it is none."""
    if not flag.startswith("--") or "." not in flag:
        return "", False
    key = flag[2:].replace("-", "_")
    section, _, last = key.rpartition(".")
    on = f"{section}.{last.removeprefix('no_')}"
    off = key != on and key_of(key) is None and key_of(on) is not None
    return (on, True) if off else (key, False)


def _placed(said: Mapping[str, str], made: Sequence[str], ours: str) -> list[str]:
    """What ``said`` the file, and the function in it."""
    found = [f"--set={CONFIG[0]}={said[_CONFIG]}"] if _CONFIG in said else []
    if _MODULE not in said and _FILE not in said:
        return found
    if not any(word.partition("=")[0] == _FROM for word in made):
        found.append(f"{_FROM}={ours}")
    place = said.get(_FILE) or place_of(said[_MODULE], (Path(),), Origin("command line"))
    return [*found, place]


def _is_file(word: str) -> bool:
    return word.endswith(_ENDINGS) and not word.startswith("--")
