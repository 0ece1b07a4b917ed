"""A training script that is parsed: its calls, names that have one value, what was found of the Trainer's arguments."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping

from ...plan.errors import ABSENT, Node, Origin, PlanError, one_line, wrong_at
from .keys import READ
from .settled import Settled, conditions
from .syntax import UNKNOWN, bound_once, constants, imports, name_of, pairs_of, untaken

LOADED = {
    name: name
    for name in (
        *("torch_dtype", "dtype", "attn_implementation", "use_flash_attention_2"),
        *("load_in_4bit", "load_in_8bit", "experts_implementation"),
    )
}
FLAGS = {
    "per_device_train_batch_size": "mbs", "gradient_accumulation_steps": "accumulation", "optim": "optimizer",
    "per_device_eval_batch_size": "eval-mbs",
    "model_name_or_path": "model", "num_labels": "labels", "bf16": "dtype bf16 --autocast",
    "fp16": "dtype fp16 --autocast", "max_length": "seq", "max_seq_length": "seq",
    "gradient_checkpointing": "recompute", "attn_implementation": "attention", "lora_r": "lora-rank",
    "torch_dtype": "autocast-parameters", "dtype": "autocast-parameters", "load_in_4bit": "quantisation",
    "lora_target_modules": "lora-targets", "max_completion_length": "completion-length",
    "torch_compile": "torch-compile", "lora_modules_to_save": "modules-to-save",
    "lora_alpha": "lora-alpha", "lora_dropout": "lora-dropout", "lora_target_parameters": "lora-target-parameters",
}  # fmt: skip
"""Flags that say what a keyword does."""
_OF_OTHERS = ("LoraConfig", "BitsAndBytesConfig")
"""What does nothing by itself: beside a trainer, one that nothing is given is no part of the job."""
INSTEAD = (
    "give what TrainingArguments.to_json_string() writes, or the job in flags, as --model llama-3-8b --mbs 1 --seq 4096"
)
STARTED = f"takes its arguments from a command line: give a shell script with the command that starts it; or {INSTEAD}"


class Parsed:
    def __init__(
        self,
        module: ast.Module,
        source: str,
        asked: frozenset[str],
        flags: Mapping[str, Node] | None = None,
        unknown: Collection[str] = (),
    ) -> None:
        self.source, self.asked = source, asked
        self.module = module
        self.once = bound_once(module)
        said: dict[str, object] | None = None
        if flags is not None:
            said = {**dict.fromkeys(unknown, UNKNOWN), **{name: node.plain() for name, node in flags.items()}}
        self.settled = Settled(module, constants(self.once), self.once, said)
        self.tests = conditions(module)
        calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
        idle = untaken(module) if any(name_of(call).endswith("Trainer") for call in calls) else ()
        self.calls = [
            call
            for call in calls
            if self.stands(call) is not False and not (id(call) in idle and name_of(call) in _OF_OTHERS)
        ]
        self.imported = {name.partition(".")[0] for name in imports(module)}
        self.assigned: dict[int, list[str]] = {}
        """Names that calls are given to, by the call's identity."""
        for node in ast.walk(module):
            if isinstance(node, ast.Assign):
                targets = [one for target in node.targets for one in getattr(target, "elts", [target])]
                names = [ast.unparse(target) for target in targets]
                self.assigned |= {id(one): names for one in ast.walk(node.value) if isinstance(one, ast.Call)}
        self.found: dict[str, Node] = {}
        self.later: set[str] = set()
        """Arguments that are set anew behind the call which makes them."""
        self.wrong: list[PlanError] = []

    def take(self, call: ast.Call, keys: Mapping[str, str] | None) -> None:
        """Keywords of ``call``, those of ``keys`` under their names there, or all of them under their own."""
        for keyword in call.keywords:
            if keyword.arg is None:
                self.take_mapping(keyword.value, keys)
            elif keys is None or keyword.arg in keys:
                self.put(keys[keyword.arg] if keys is not None else keyword.arg, keyword.value)
            if keyword.arg == "model_init_kwargs":
                self.take_mapping(keyword.value, LOADED)
                self.found.pop("model_init_kwargs", None)

    def take_mapping(self, given: ast.expr, keys: Mapping[str, str] | None) -> None:
        pairs = self.pairs(given)
        if pairs is None and self.settled.is_started and keys is not None:  # a command line says them
            return
        if pairs is None:
            problem = f"takes what the script computes (**{one_line(ast.unparse(given))[:60]}); {INSTEAD}"
            self.ask("", problem, given.lineno)
            return
        for key, item in pairs:
            if keys is None or key in keys:
                self.put(keys[key] if keys is not None else key, item)

    def put(self, key: str, given: ast.expr) -> None:
        """``key`` with the value that ``given`` has; what is computed is asked for if it matters, and left out else."""
        value = self.value(given)
        if value is not UNKNOWN:
            self.found[key] = Node.of(value, Origin(self.source, given.lineno))
        elif key in READ and FLAGS.get(key, key).partition(" ")[0] not in self.asked:
            flag = f"say it with --{FLAGS[key]}" if key in FLAGS else INSTEAD
            problem = f"is {one_line(ast.unparse(given))[:60]}, which only the running script knows: {flag}"
            self.ask(key, problem, given.lineno)

    def put_later(self, key: str, given: ast.Assign) -> None:
        """``key``, which ``given`` sets anew; asked for where a flag says it and only the running script knows whether
        it comes to that."""
        stands, flag, before = self.stands(given), FLAGS.get(key, ""), self.found.get(key)
        same = before is not None and before.plain() == self.value(given.value)
        if stands is None and flag and flag.partition(" ")[0] not in self.asked and not same:
            test = one_line(ast.unparse(self.tests[id(given)][-1][0]))[:60]
            self.ask(
                key,
                f"is set anew under {test}, which only the running script knows: say it with --{flag}",
                given.lineno,
            )
        elif stands is not False:
            self.put(key, given.value)
            self.later.add(key)

    def stands(self, node: ast.Call | ast.Assign) -> bool | None:
        """Whether the script comes to ``node``, by the conditions around it; nothing where only it knows."""
        holds = [self.settled.holds(test) for test, _ in self.tests.get(id(node), ())]
        wanted = [needed for _, needed in self.tests.get(id(node), ())]
        if any(one is (not needed) for one, needed in zip(holds, wanted, strict=True)):
            return False
        return None if None in holds else True

    def either(self, one: ast.Call, other: ast.Call) -> bool:
        """Whether a condition leads to ``one`` and its other branch to ``other``."""
        needed = {id(test): is_true for test, is_true in self.tests.get(id(one), ())}
        return any(needed.get(id(test), is_true) != is_true for test, is_true in self.tests.get(id(other), ()))

    def value(self, given: ast.expr) -> object:
        """What ``given`` is without running anything: a literal, a name for one, an argument of the command line."""
        return self.settled.value(given)

    def pairs(self, given: ast.expr) -> list[tuple[str, ast.expr]] | None:
        return pairs_of(self.once.get(given.id, given) if isinstance(given, ast.Name) else given)

    def keyword(self, call: ast.Call, name: str) -> ast.expr | None:
        """What ``call`` is given as ``name``, by itself or in a mapping that the script makes."""
        for one in call.keywords:
            pairs = (self.pairs(one.value) or []) if one.arg is None else [(one.arg, one.value)]
            for key, value in pairs:
                if key == name:
                    return value
        return None

    def keywords(self) -> Node:
        """Every keyword of a call that has a value here, and what is called."""
        origin = Origin(self.source)
        given = [(one.arg, self.value(one.value)) for call in self.calls for one in call.keywords if one.arg]
        known = {name: Node.of(value, origin) for name, value in given if value is not UNKNOWN}
        return Node({**{name_of(call): Node(True, origin) for call in self.calls}, **known}, origin)

    def of(self, *names: str) -> list[ast.Call]:
        """Calls of what is named so, in whatever module."""
        return sorted((call for call in self.calls if name_of(call) in names), key=lambda call: call.lineno)

    def methods(self, name: str) -> list[ast.Call]:
        found = [call for call in self.calls if isinstance(call.func, ast.Attribute) and call.func.attr == name]
        return sorted(found, key=lambda call: call.lineno)

    def ask(self, field: str, problem: str, line: int) -> None:
        """An error beside others, which are told together."""
        self.wrong.append(PlanError(field, ABSENT, problem, origin=Origin(self.source, line)))

    def refused(self, problem: str, where: ast.Call | None) -> PlanError:
        return wrong_at(Origin(self.source, where.lineno if where is not None else None), problem)
