"""What a training script makes several times, or only where a condition holds: trainers, models, adapters, weights.

Each is one job's or it is asked for: the first is no better guess than the last.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from . import changes
from .parsed import FLAGS, INSTEAD, LOADED, Parsed
from .syntax import UNKNOWN, name_of

_OF_LOADED = {
    "": FLAGS["model_name_or_path"],
    **{key: FLAGS.get(key, FLAGS["attn_implementation"]) for key in LOADED},
    **dict.fromkeys((*changes.WEIGHTS, "load_in_8bit"), FLAGS["load_in_4bit"]),
}
"""What a model is loaded with, its name first, and the flag that says it."""


def check_alone(script: Parsed, trainers: Sequence[ast.Call], own: Mapping[str, str]) -> None:
    """Refuses trainers of which each is a job of its own, and those of which a condition chooses one kind."""
    for at, one in enumerate(trainers):
        for other in trainers[at + 1 :]:
            kinds = [own.get(name_of(call), name_of(call)) for call in (one, other)]
            if script.either(one, other) and kinds[0] == kinds[1]:
                continue
            first, last = sorted((one, other), key=lambda call: call.lineno)
            problem = f"makes a {name_of(first)} in line {first.lineno} and a {name_of(last)} in line {last.lineno}"
            raise script.refused(f"{problem}, each of them a job of its own: keep one of them; or {INSTEAD}", last)


def ask_for_undecided(script: Parsed) -> None:
    """Asks for adapters and weights that the script makes under a condition that the command does not decide, or
    makes in several ways."""
    for name, key, keyword in (("LoraConfig", "lora_r", "r"), ("BitsAndBytesConfig", "load_in_4bit", "load_in_4bit")):
        if FLAGS[key] in script.asked:
            continue
        made = [call for call in script.of(name) if script.stands(call)]
        other = next((call for call in made[1:] if ast.dump(call) != ast.dump(made[0])), None)
        if other is not None:
            problem = f"is made in line {made[0].lineno}, too, and otherwise: keep one, or say it with --{FLAGS[key]}"
            script.ask(name, problem, other.lineno)
        for call in script.of(name):
            given = script.keyword(call, keyword)
            is_known = given is None or script.value(given) is not UNKNOWN  # it is asked for by itself else
            if script.stands(call) is None and is_known:
                problem = f"is made where only the running script knows: say it with --{FLAGS[key]}"
                script.ask(name, problem, call.lineno)


def trained(script: Parsed, models: list[ast.Call], takers: list[ast.Call]) -> list[ast.Call]:
    """Those of ``models`` that one of ``takers`` is given; what differs between several of them is asked for."""
    given = [call.args[0] if call.args else script.keyword(call, "model") for call in takers]
    taken = {ast.unparse(one) for one in given if one is not None}
    found = [call for call in models if not taken.isdisjoint(changes.names_of(script, call))] or models
    for other in found[1:]:
        for key, flag in _OF_LOADED.items():
            same = changes.said_of(script, other, key) == changes.said_of(script, found[0], key)
            if not same and flag not in script.asked:
                problem = f"differs between the models that are loaded in lines {found[0].lineno} and "
                problem += f"{other.lineno}: keep the one that is trained, or say it with --{flag}"
                script.ask(key or "model", problem, other.lineno)
    return found
