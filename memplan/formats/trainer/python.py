"""The Trainer's arguments in a training script that says them itself: ``TrainingArguments(…)`` or a configuration of
trl's, ``from_pretrained``, ``LoraConfig`` and ``BitsAndBytesConfig``.

The script is parsed, never run. Values are literals, and names that the file gives one literal alone; what else a
keyword has that is read is asked for by the flag that says it here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from pathlib import Path

from ...plan.errors import ABSENT, Node, Origin, PlanError, one_line, together, wrong_at
from ...plan.text import is_there, read_text
from ...values import dataclass
from ..elsewhere_commands import OF_UNSLOTH
from ..in_flags import in_flags
from ..launchers import IsMark, found_from
from ..python_text import parsed_python
from . import changes, several
from .keys import FROM_PRETRAINED, FROM_SCRATCH, K_BIT, LOADED_BY, READ
from .parsed import FLAGS, INSTEAD, LOADED, STARTED, Parsed
from .settled import positions
from .syntax import UNKNOWN, name_of, owner_of

_OF_TRL = (
    "SFT",
    "DPO",
    "GRPO",
    "KTO",
    "ORPO",
    "CPO",
    "RLOO",
    "PPO",
    "Reward",
    "GKD",
    "OnlineDPO",
    "XPO",
    "NashMD",
    "BCO",
    "PRM",
)
_CONFIGS = {
    **dict.fromkeys(("TrainingArguments", "Seq2SeqTrainingArguments"), ""),
    **{f"{name}Config": name.lower() for name in _OF_TRL},
}
"""Classes whose keywords are the Trainer's arguments, and the script of trl's that has them."""
_TRAINERS = {f"{name}Trainer": name.lower() for name in _OF_TRL}
_MODELS = re.compile(
    r"AutoModelFor(?:CausalLM|MaskedLM|Seq2SeqLM|SpeechSeq2Seq)"
    r"|\w+(?:ForCausalLM|LMHeadModel|ForMaskedLM|ForConditionalGeneration)"
)
_SCORING = re.compile(r"(?:AutoModel|\w+)ForSequenceClassification")
"""What trl's RewardTrainer trains."""
_OTHER_HEADS = re.compile(r"\w+For(?:Sequence|Token|Question|MultipleChoice|Image|Audio|Speech|Vision)\w*")
_LORA = {
    "r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save", "bias": "lora_bias", "use_dora": "use_dora", "use_rslora": "use_rslora",
    "target_parameters": "lora_target_parameters",
}  # fmt: skip
_NOT_OF_LORA = (
    *("layers_to_transform", "layers_pattern", "rank_pattern", "layer_replication", "trainable_token_indices"),
    *(
        "exclude_modules",
        "use_qalora",
        "lora_bias",
        "megatron_config",
        "eva_config",
        "corda_config",
        "alora_invocation_tokens",
    ),
)
"""Keywords of ``LoraConfig`` that make other adapters, or more of them."""
_QUANTISED = {
    "load_in_4bit": "load_in_4bit", "load_in_8bit": "load_in_8bit", "bnb_4bit_quant_type": "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant", "bnb_4bit_quant_storage": "bnb_4bit_quant_storage",
    "bnb_4bit_compute_dtype": "bnb_4bit_compute_dtype",
}  # fmt: skip
_BESIDE = ("max_seq_length", "packing")
"""What trl's trainers took themselves before their configurations did."""
_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "LoraConfig": {"lora_r": 8, "lora_dropout": 0.0, "use_peft": True},
    "BitsAndBytesConfig": {"bnb_4bit_quant_type": "fp4", "bnb_4bit_compute_dtype": "float32"},
}
"""What their own keywords are where a script does not say (peft's ``tuners/lora/config.py``, transformers'
``utils/quantization_config.py``), which differs from what trl's scripts do."""
_OWN_CODE = {
    "unsloth": "Unsloth's layers and offloaded checkpoints are code of its own, which is not modelled",
    "sentence_transformers": "its losses of pairs of sentences are not modelled",
}
_OTHER_WEIGHTS = re.compile(
    r"(?:GPTQ|Gptq|Awq|Hqq|TorchAo|Quanto|FineGrainedFP8|FbgemmFp8|Eetq|Aqlm|Vptq|Higgs|SpQR|AutoRound|BitNetQuant"
    r"|CompressedTensors|Mxfp4|Metal|FourOverSix|Sinq)Config"
)
"""Of ``transformers.utils.quantization_config`` but bitsandbytes': how the base's weights are stored."""
_WEIGHTS = re.compile(f"BitsAndBytesConfig|{_OTHER_WEIGHTS.pattern}")
_OF_ARGUMENTS: Mapping[str, Sequence[str]] = {
    "get_peft_config": (
        *("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters"),
        *("lora_modules_to_save", "lora_task_type", "use_rslora", "use_dora"),
    ),
    "get_quantization_config": (
        *("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"),
    ),
}
"""trl's functions that make adapters and weights of its arguments, and which (``trainer/utils.py``)."""
_ARGUMENTS = "ModelConfig"
"""trl's class that has them (``trainer/model_config.py``)."""
_ADAPTERS = re.compile("LoraConfig")


@dataclass(frozen=True, slots=True)
class Script:
    """What a training script says of its job."""

    arguments: Node
    """A mapping, as ``TrainingArguments`` and scripts of trl take it."""
    script: str
    """The script of trl's that has these arguments; empty where transformers' own Trainer has."""
    environment: Mapping[str, Node] = field(default_factory=dict)
    """Variables that the script sets itself."""
    used: frozenset[str] = frozenset()
    """Arguments of the command line that are the script's own, and were followed in it."""
    declared: frozenset[str] = frozenset()
    """All arguments that it declares itself."""
    wrong: PlanError | None = None
    """What it does beside the arguments of its command line and only the running script knows."""


def holds_arguments(text: str) -> bool:
    """Whether ``text`` may be of a Python file in which the Trainer's arguments stand."""
    return any(f"{name}(" in text for name in (*_CONFIGS, *_TRAINERS))


_PARSES = re.compile(r"\.(?:parse_args_into_dataclasses|parse_args_and_config|parse_args|parse_known_args|Fire)\(")


def takes_arguments(text: str) -> bool:
    """Whether ``text`` may be of a Python file that trains by the Trainer with arguments of a command line."""
    return bool(_PARSES.search(text)) and bool(_TRAINS.search(text))


_TRAINS = re.compile(r"Trainer\(")


def python_in(folder: Path) -> IsMark:
    """Whether a word of a command in ``folder`` is a Python file in which the Trainer's arguments stand."""

    def holds(word: str) -> bool:
        path = found_from(word, folder)
        return word.endswith(".py") and is_there(path) and holds_arguments(read_text(path))

    return holds


def script_in(
    text: str,
    source: str,
    asked: Collection[str],
    flags: Mapping[str, Node] | None = None,
    unknown: Collection[str] = (),
) -> Script:
    """What the Python file ``text`` says; ``asked`` are the flags that are given besides, by name, ``flags`` the
    arguments that a command starts it with, and ``unknown`` those of which only the running script knows the value."""
    try:
        return _Reading(_parsed(text, source), source, frozenset(asked), flags, unknown).script()
    except RecursionError:
        raise wrong_at(source, f"is nested too deeply to be read; {INSTEAD}") from None


def positions_in(text: str) -> list[str]:
    """Arguments that the Python file ``text`` takes by their place; none where it is no Python."""
    try:
        return positions(parsed_python(text))
    except (SyntaxError, RecursionError):
        return []


class UnreadError(PlanError):
    """Python of a newer release than the one that runs, or none."""


def _parsed(text: str, source: str) -> ast.Module:
    try:
        module = parsed_python(text)
    except SyntaxError as error:
        origin = Origin(source, error.lineno)
        raise UnreadError(
            "", ABSENT, f"is no Python that can be read ({one_line(error.msg)}); {INSTEAD}", origin=origin
        ) from None
    made = {
        target.id
        for node in ast.walk(module)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and name_of(node.value).endswith("Trainer")
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    last = max((n for n, node in enumerate(module.body) if _trains(node, made)), default=len(module.body))
    module.body = module.body[: last + 1]  # names that are given anew behind it are another model's
    return module


def _trains(node: ast.stmt, trainers: Collection[str]) -> bool:
    """Whether ``node`` is ``trainer.train()`` by itself, outside functions and conditions."""
    call = node.value if isinstance(node, (ast.Expr, ast.Assign)) else None
    of = call.func.value if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else None
    name = name_of(of) if isinstance(of, ast.Call) else getattr(of, "id", "")
    return isinstance(call, ast.Call) and name_of(call) == "train" and (name in trainers or "trainer" in name.lower())


class _Reading(Parsed):
    def script(self) -> Script:
        for package, why in _OWN_CODE.items():
            if package in self.imported:
                raise self.refused(in_flags(OF_UNSLOTH, self.keywords(), f"is of {package}: {why}"), None)
        configs = self.of(*_CONFIGS)
        parser = self.of("parse_args_into_dataclasses", "parse_args_and_config")
        several.ask_for_undecided(self)
        if parser and self.settled.is_started and not configs:
            configs = parser[:1]
        if not configs and not parser:  # trl's trainers make their own arguments where they are given none
            parser = configs = self.of(*_TRAINERS)[:1]
        if len(configs) != 1:
            if not configs:
                none = f"is Python, in which no TrainingArguments stand; {INSTEAD}"
                raise self.refused(STARTED if parser else none, None)
            lines = " and ".join(str(call.lineno) for call in configs[:3])
            raise self.refused(f"makes the Trainer's arguments in lines {lines}; {INSTEAD}", configs[1])
        config = configs[0]
        changes.liger(self)
        self.of_arguments()
        model = self.model()
        for name, keys in (("BitsAndBytesConfig", _QUANTISED), ("LoraConfig", _LORA)):
            for call in self.of(name):
                for key, value in _DEFAULTS[name].items():
                    self.found.setdefault(key, Node.of(value, Origin(self.source, call.lineno)))
                self.take(call, keys)
                task = self.keyword(call, "task_type") if name == "LoraConfig" else None
                if task is not None and ast.unparse(task).rpartition(".")[2].strip("'\"") == "SEQ_CLS":
                    self.found["lora_task_type"] = Node.of("SEQ_CLS", Origin(self.source, call.lineno))
        self.check_base()
        own = changes.subclasses(self, *_TRAINERS, "Trainer", "Seq2SeqTrainer")
        trainers = self.of(*_TRAINERS, *(name for name, base in own.items() if base in _TRAINERS))
        calls = [*trainers, *self.of("Trainer", "Seq2SeqTrainer", *(name for name in own if name not in _TRAINERS))]
        several.check_alone(self, calls, own)
        for call in calls:
            for keyword in call.keywords:
                if keyword.arg in _BESIDE:
                    self.put(keyword.arg, keyword.value)
                elif keyword.arg == "model_init_kwargs":  # of trl's trainers, before their configurations had it
                    self.take_mapping(keyword.value, LOADED)
            self.check_made(self.keyword(call, "peft_config"), "adapters", "lora_r", _ADAPTERS)
            self.optimizer_of(call)
        if config in parser:
            defaults = {name: value for name, value in self.settled.declared.items() if name in READ}
            known = {name: value for name, value in defaults.items() if value is not UNKNOWN and value is not None}
            self.found = {
                name: Node.of(value, Origin(self.source, config.lineno)) for name, value in known.items()
            } | self.found
        else:
            self.take(config, None)
        changes.of_config(self, config)
        changes.own_code(self, own, calls, scores=model is not None and bool(_SCORING.fullmatch(owner_of(model))))
        changes.of_reference(self, trainers, model)
        changes.of_rewards(self, trainers)
        for call in self.of(K_BIT):
            self.found[K_BIT] = Node(True, Origin(self.source, call.lineno))
            kept = self.keyword(call, "use_gradient_checkpointing")
            if kept is None or self.value(kept) is not False:
                self.found["gradient_checkpointing"] = Node(True, Origin(self.source, call.lineno))
        if self.methods("gradient_checkpointing_enable") and "gradient_checkpointing" not in self.found:
            self.found["gradient_checkpointing"] = Node(True, Origin(self.source, config.lineno))
        for node in ast.walk(self.module):
            if isinstance(node, ast.Attribute) and node.attr == "compile" and ast.unparse(node.value) not in _REGEX:
                problem = (
                    "is called by the script itself, and what it compiles then is not modelled; torch_compile=True "
                )
                problem += "among the Trainer's arguments is, by which Accelerate compiles the whole model"
                where = Origin(self.source, node.lineno)
                self.wrong.append(PlanError(ast.unparse(node)[:60], ABSENT, problem, origin=where))
        self.frozen()
        script = _CONFIGS.get(name_of(config), "")
        if not script and trainers:  # which makes trl's arguments of them, every value as it stands
            script = _TRAINERS[own.get(name_of(trainers[0]), name_of(trainers[0]))]
            for key in () if config in parser else ("gradient_checkpointing", "bf16"):
                self.found.setdefault(key, Node(False, Origin(self.source, config.lineno)))
        wrong = together(self.wrong) if self.wrong else None
        if wrong is not None and not self.settled.is_started:
            raise wrong
        used = frozenset(self.settled.used - {*READ} | self.later)
        said = Node(self.found, Origin(self.source, config.lineno))
        return Script(
            said,
            script,
            changes.environment(self),
            used,
            frozenset({*self.settled.declared, *self.settled.options}),
            wrong,
        )

    def of_arguments(self) -> None:
        """What the script gives trl's ``ModelConfig`` itself, as far as it hands that on."""
        made = self.of(_ARGUMENTS) if "trl" in self.imported else []
        if len(made) > 1:
            problem = f"makes trl's {_ARGUMENTS} in lines {made[0].lineno} and {made[1].lineno}; {INSTEAD}"
            raise self.refused(problem, made[1])
        for call in made:
            self.settled.give({one.arg: self.value(one.value) for one in call.keywords if one.arg is not None})
            for function in self.of(*_OF_ARGUMENTS):
                self.take(call, {key: key for key in _OF_ARGUMENTS[name_of(function)]})

    def model(self) -> ast.Call | None:
        """The model that is loaded, or that a trainer of trl's is given by name."""
        loaded = [
            call
            for call in self.methods("from_pretrained")
            if not any(changes.ANOTHER.search(name) for name in changes.names_of(self, call))
        ]
        known = _SCORING if self.of("RewardTrainer", "RewardConfig") else _MODELS
        takers = self.of(*_TRAINERS, "Trainer", "Seq2SeqTrainer", "get_peft_model", K_BIT)
        models = several.trained(self, [call for call in loaded if known.fullmatch(owner_of(call))], takers)
        if not models and not self.of(*_TRAINERS, *(name for name, script in _CONFIGS.items() if script)):
            models = [call for call in loaded if _SCORING.fullmatch(owner_of(call))]
            self.labels(models[:1])
        other = next((call for call in loaded if _OTHER_HEADS.fullmatch(owner_of(call))), None)
        if other is not None and not models:
            problem = f"trains a {owner_of(other)}: heads and losses of language models, and of a plain Trainer's "
            problem += "classifiers of sequences, alone are modelled"
            raise self.refused(problem, other)
        for call in models[:1]:
            named = call.args[0] if call.args else self.keyword(call, "pretrained_model_name_or_path")
            if named is not None:
                self.put("model_name_or_path", named)
            self.take(call, LOADED)
            self.check_made(self.keyword(call, "quantization_config"), "weights", "load_in_4bit", _WEIGHTS)
            changes.of_model(self, call)
        for call in self.of(*_TRAINERS) if not models else ():
            given = call.args[0] if call.args else self.keyword(call, "model")
            if given is not None and isinstance(self.value(given), str):
                self.put("model_name_or_path", given)
        scratch = [call for call in self.calls if name_of(call) == "from_config" or known.fullmatch(name_of(call))]
        if scratch and "model_name_or_path" not in self.found and "model" not in self.asked:
            problem = "is made from a configuration, which only the running script knows: give the folder that "
            problem += "config.save_pretrained writes as --model, or the model's name"
            self.ask(ast.unparse(scratch[0].func)[:60], problem, scratch[0].lineno)
        if made := (models or scratch)[:1]:
            self.found[LOADED_BY] = Node(self.made_by(made[0], loaded), Origin(self.source, made[0].lineno))
        return models[0] if models else None

    def made_by(self, model: ast.Call, loaded: Sequence[ast.Call]) -> str:
        """Who decides the dtype of ``model`` that no argument names: a checkpoint, or its configuration that
        ``from_config`` is given (``_from_config`` of ``modeling_utils.py``), or nobody, so that torch's default is."""
        of_saved = name_of(model) == "from_config" and any(owner_of(call).endswith("Config") for call in loaded)
        return FROM_PRETRAINED if of_saved or name_of(model) == "from_pretrained" else FROM_SCRATCH

    def labels(self, models: Sequence[ast.Call]) -> None:
        """How many labels a classifier has: transformers' default is 2 (``configuration_utils.py``)."""
        for call in models:
            made, said = changes.configuration(self, call) or call, ("problem_type", "num_labels", "id2label")
            kind, number, names = (self.keyword(call, name) or self.keyword(made, name) for name in said)
            pairs = self.pairs(names) if names else []
            if number is not None or pairs is None:
                self.put("num_labels", number or names or call)
            else:
                self.found["num_labels"] = Node.of(len(pairs) or 2, Origin(self.source, call.lineno))
            count = self.found["num_labels"].value if "num_labels" in self.found else 0
            usual = "regression" if count == 1 else "single_label_classification"
            if kind is not None and self.value(kind) not in (None, usual):
                problem = (
                    f"trains a {owner_of(call)} with problem_type {one_line(ast.unparse(kind))[:40]}: one label of a "
                )
                raise self.refused(f"{problem}sequence is modelled, or one score", call)

    def check_base(self) -> None:
        """Refuses weights and adapters that no argument says, and which are not read."""
        of_peft = {
            name.name
            for node in ast.walk(self.module)
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "peft"
            for name in node.names
            if name.name.endswith("Config") and name.name not in ("LoraConfig", "PeftConfig")
        }
        for call in sorted(self.calls, key=lambda call: call.lineno):
            name = name_of(call)
            if name in of_peft and "lora-rank" not in self.asked:
                raise self.refused(f"makes a {name}: of peft's methods only LoRA is modelled", call)
            if _OTHER_WEIGHTS.fullmatch(name) and "quantisation" not in self.asked:
                dequantised = self.keyword(call, "dequantize")
                if dequantised is None or self.value(dequantised) is not True:
                    problem = f"loads weights as {name} has them: nf4, fp4, int8, gptq and awq are modelled "
                    raise self.refused(f"{problem}(--quantisation gptq)", call)
            if name == "LoraConfig" and "lora-rank" not in self.asked:
                for key in _NOT_OF_LORA:
                    given = self.keyword(call, key)
                    if given is not None and self.value(given) not in (None, False, [], {}):
                        raise self.refused(f"makes a LoraConfig with {key}, which is not modelled", call)

        for call in (*self.of("get_peft_model"), *self.methods("from_pretrained")):
            if name_of(call) == "get_peft_model" or owner_of(call).startswith(("Peft", "AutoPeft")):
                self.check_made(call.args[-1] if call.args else call, "adapters", "lora_r", _ADAPTERS)

    def check_made(self, given: ast.expr | None, what: str, key: str, made: re.Pattern[str]) -> None:
        """Asks for weights or adapters that no configuration of the script's own says."""
        here = given is None or self.value(given) is None or any(made.fullmatch(name_of(call)) for call in self.calls)
        source = self.once.get(given.id, given) if isinstance(given, ast.Name) else given
        of_arguments = isinstance(source, ast.Call) and name_of(source) in _OF_ARGUMENTS
        here = here or (of_arguments and (self.settled.is_started or bool(self.of(_ARGUMENTS))))
        if given is not None and not here and FLAGS[key] not in self.asked:
            problem = f"takes {what} from {one_line(ast.unparse(given))[:60]}, which only the running script knows: "
            problem += f"say it with --{FLAGS[key]}"
            self.wrong.append(wrong_at(Origin(self.source, given.lineno), problem))

    def frozen(self) -> None:
        """Parameters that the script freezes itself, unless adapters leave all of them frozen, or a flag says which."""
        if self.of("LoraConfig", "get_peft_model") or self.asked & {"lora-rank", "freeze-layers", "freeze-embedding"}:
            return
        loops = [one for one in ast.walk(self.module) if isinstance(one, ast.For)]
        lines = [
            (ast.unparse(loop.iter), node.lineno)
            for loop in loops
            for node in ast.walk(loop)
            if isinstance(node, ast.Assign) and _freezes(node.targets[0], node.value)
        ]
        lines += [
            (ast.unparse(call.func), call.lineno)
            for call in self.methods("requires_grad_")
            if call.args and self.value(call.args[0]) is False
        ]
        for of, line in lines:
            if not changes.ANOTHER.search(of):
                problem = f"freezes parameters ({one_line(of)[:60]}), which only the running script knows: say which "
                problem += "with --freeze-layers N, from the first on, or --freeze-embedding"
                self.wrong.append(wrong_at(Origin(self.source, line), problem))
                return

    def optimizer_of(self, call: ast.Call) -> None:
        """An optimizer that the script makes itself is none that the arguments name."""
        for key in ("optimizers", "optimizer_cls_and_kwargs"):
            given = self.keyword(call, key)
            named = given is not None and self.value(given) is not None
            if given is not None and named and "optimizer" not in self.asked:
                problem = "is an optimizer that the script makes itself: say which (--optimizer adamw)"
                self.wrong.append(PlanError(key, ABSENT, problem, origin=Origin(self.source, given.lineno)))


_REGEX = ("re", "regex")
"""Modules whose ``compile`` is not PyTorch's; a model's own is (``nn.Module.compile``)."""


def _freezes(target: ast.expr, value: ast.expr) -> bool:
    named = isinstance(target, ast.Attribute) and target.attr == "requires_grad"
    return named and isinstance(value, ast.Constant) and value.value is False
