"""Everything that reads what a user writes, by the name that ``python -m tests.fuzz`` calls it."""

# ruff: noqa: E501 (tables)

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import yaml

from memplan.formats import reader
from memplan.formats.deepspeed.config import ROWS as DEEPSPEED_ROWS
from memplan.formats.launch import Asked, launched_plan
from memplan.formats.megatron_bridge.table import RENAMED, TURNED_OFF
from memplan.formats.torchtitan.keys import keys
from memplan.formats.trainer.keys import NOTED, READ, REFUSED
from memplan.plan.errors import PlanError
from memplan.plan.fields import by_flag, plan_fields
from memplan.plan.library import examples, model_specs
from memplan.plan.models import load_spec
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve

from ..formats.launch.scripts import BERT, BIGSCIENCE, GPT, LLAMA, SMALL
from ..formats.launch.test_megatron_bridge import RUN as BRIDGE
from ..formats.launch.test_megatron_bridge_recipes import COMMON, RECIPES
from .documents import as_json, as_toml, changed, extreme, scalar, tree
from .driver import Target
from .estimates import TARGETS as ESTIMATES
from .explained import TARGETS as EXPLAINED
from .records import TARGETS as RECORDS
from .scripts import Grammar
from .texts import NUMBERS, SIGNS, mutated, repeated, text

GOLDEN = Path(__file__).parents[1] / "golden"
_FOLDER = Path(tempfile.mkdtemp(prefix="memplan-fuzz-"))
FRAMEWORKS = ("megatron", "megatron-deepspeed")


def _golden(pattern: str) -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(GOLDEN.glob(pattern))]


@dataclass(frozen=True)
class File:
    """A file as a user may give it, and the flags beside it."""

    name: str
    content: bytes
    flags: Mapping[str, str] = field(default_factory=dict)
    variables: Sequence[str] = ()

    def __str__(self) -> str:
        beside = " ".join([*(f"--{name} {value}" for name, value in self.flags.items()), *self.variables])
        return f"{self.name} ({len(self.content)} bytes) {beside}\n    {self.content[:300]!r}"

    def written(self) -> str:
        """Where the file now is."""
        path = _FOLDER / self.name
        path.write_bytes(self.content)
        return str(path)


def _file(random: Random, name: str, content: str, flags: Mapping[str, str] | None = None) -> File:
    encoded = content.encode("utf-8", "surrogatepass")
    if random.random() < 0.02:
        encoded = encoded[: random.randrange(len(encoded) + 1)] + random.randbytes(3) + encoded
    return File(name, encoded, flags or {})


def _launched(framework: str) -> Callable[[File], object]:
    def run(file: File) -> object:
        asked = Asked(
            framework, file.flags, assignments=file.variables, vocab_size=None if "vocab" in file.flags else 512
        )
        if framework in ("deepspeed", "trainer"):
            asked = Asked(framework, file.flags)
        return launched_plan(reader(framework)(file.written(), asked), file.flags)

    return run


def _script_target(name: str, make: Callable[[Random, str], str]) -> Target:
    def file(random: Random) -> File:
        framework = random.choice(FRAMEWORKS)
        flags = {"gpus": random.choice(("8", "64"))} if random.random() < 0.9 else {}
        made = _file(random, f"{framework}.sh", make(random, framework), flags)
        given = [f"{random.choice(('A', 'N', 'U', '1', '3'))}={random.choice((*NUMBERS, 'a b'))}"]
        return File(made.name, made.content, flags, given if random.random() < 0.2 else ())

    return Target(name, file, lambda made: _launched(made.name.removesuffix(".sh"))(made), str)


_SCRIPTS = (GPT, LLAMA, BERT, BIGSCIENCE, *_golden("launch/*.sh"))


def _arguments(random: Random, framework: str) -> str:
    """A bare list of arguments, or a mapping of them."""
    grammar = Grammar(random, framework)
    match random.randrange(5):
        case 0:
            pairs = [one.partition(" ") for one in grammar.arguments()]
            mapping = {name: value or True for name, _, value in pairs}
            return as_json(random, mapping) if random.random() < 0.5 else yaml.safe_dump(mapping)
        case 1:
            return f"{SMALL} {repeated(random)}"
        case 2:
            return "\n".join(f"--unknown-{n} {n}" for n in range(int(9_000 ** random.random())))
        case 3:
            return mutated(random, "\n".join(grammar.arguments()))
        case _:
            return random.choice((" ", "\n", " \\\n")).join(grammar.arguments())


_DEEPSPEED = [json.loads(content) for content in _golden("launch/ds_*.json")]
_TRAINER = [json.loads(content) for content in _golden("launch/trainer*.json")]
_NOTEBOOK = {
    "cells": [
        {
            "cell_type": "code",
            "source": ["!pip install trl\n", "from trl import SFTTrainer, SFTConfig\n", "x = SFTConfig(max_length=8)"],
        },
        {"cell_type": "code", "source": "SFTTrainer(model='gpt2', args=x).train()"},
    ]
}
_CONFIGS = [json.loads(content) for content in _golden("configs/*.json")]
_TOML = _golden("launch/*.toml")
_PLANS = [path.read_text(encoding="utf-8") for path in (*examples().values(), *model_specs().values())]
_DEEPSPEED_NAMES = [part for row in DEEPSPEED_ROWS for name in row.names for part in (name, name.rpartition(".")[2])]
_PLAN_NAMES = [part for path in plan_fields() for part in (path, path.rpartition(".")[2])]


def _document(
    suffix: str, seeds: Sequence[Any], names: Sequence[str], flags: Mapping[str, str] | None = None
) -> Callable[[Random], File]:
    """A maker of JSON or YAML files."""

    def make(random: Random) -> File:
        given = dict(flags or {})
        match random.randrange(6):
            case 0:
                content = extreme(random, names)
            case 1:
                content = as_json(random, tree(random, names))
            case 2:
                content = mutated(random, as_json(random, random.choice(seeds)), SIGNS)
            case _:
                content = as_json(random, changed(random, random.choice(seeds), names))
        return _file(random, f"file{suffix}", content, given)

    return make


def _toml(random: Random) -> File:
    names = list(keys())
    match random.randrange(5):
        case 0:
            content = extreme(random, names)
        case 1:
            content = as_toml(tree(random, names))
        case 2:
            content = f"[model]\nname = 'llama3'\n{extreme(random, names)}"
        case _:
            content = mutated(random, random.choice(_TOML), SIGNS, _TOML)
    return _file(random, "job.toml", content, {"gpus": "8"})


def _plan(random: Random) -> File:
    match random.randrange(6):
        case 0:
            content = extreme(random, _PLAN_NAMES)
        case 1:
            content = as_json(random, {"model": "gpt2", **tree(random, _PLAN_NAMES)})
        case 2:
            sections = {path.partition(".")[0]: {} for path in random.sample(list(plan_fields()), 4)}
            for path in random.sample(list(plan_fields()), 8):
                section, _, name = path.partition(".")
                if name:
                    sections.setdefault(section, {})[name] = tree(random, _PLAN_NAMES, 1)
            content = as_json(random, {"model": random.choice(("gpt2", "llama-3-8b")), **sections})
        case 3:
            content = yaml.safe_dump(changed(random, yaml.safe_load(random.choice(_PLANS)), _PLAN_NAMES))
        case _:
            content = mutated(random, random.choice(_PLANS), SIGNS, _PLANS)
    return _file(random, "plan.yaml", content)


def _read_plan(file: File) -> object:
    read = read_plan(file.written(), dict(file.flags), traced=True)
    try:
        return resolve(read.plan)
    except PlanError as error:
        raise error.located(read.origins) from None


def _flags(random: Random) -> dict[str, str]:
    flags = {name: _flag(random) for name in random.sample(list(by_flag()), random.randrange(1, 6))}
    model = random.choice(("gpt2", "llama-3-8b", "bigscience-104b")) if random.random() < 0.95 else _flag(random)
    return {**flags, "model": model}


def _flag(random: Random) -> str:
    value = scalar(random) if random.random() < 0.5 else random.randrange(64)
    return str(value) if random.random() < 0.95 else repeated(random).replace("\0", "")


def _read_flags(flags: dict[str, str]) -> object:
    read = read_plan(None, flags)
    try:
        return resolve(read.plan)
    except PlanError as error:
        raise error.located(read.origins) from None


def _device_map(random: Random) -> File:
    match random.randrange(4):
        case 0:
            return _file(random, "map.json", extreme(random, ["0", "model.layers.0"]))
        case 1:
            made: Any = tree(random, ["0", "1", "lm_head", "transformer.h.0"])
        case 2:
            several = [f"{low}-{low + random.choice((1, 11, 99_999))}" for low in (0, 12, 24)]
            devices = range(random.choice((1, 2, 4, 100)))
            made = {str(n): random.choice(several) if random.random() < 0.9 else scalar(random) for n in devices}
        case _:
            names = [
                "transformer.wte",
                "transformer.wpe",
                *(f"transformer.h.{n}" for n in range(12)),
                "transformer.ln_f",
                "lm_head",
            ]
            made = {
                name: random.choice((0, 0, 1, "cuda:1")) if random.random() < 0.95 else scalar(random) for name in names
            }
    content = as_json(random, made)
    return _file(random, "map.json", mutated(random, content) if random.random() < 0.3 else content)


def _read_device_map(file: File) -> object:
    return _read_flags({"model": "gpt2", "framework": "device-map", "device-map": file.written()})


def _read_config(file: File) -> object:
    path = file.written()
    try:
        load_spec(path)
    except PlanError:
        return read_plan(None, {"model": path}), read_plan(None, {"model": path}, traced=True)  # type: ignore[arg-type]
    return read_plan(None, {"model": path})


_IN_SCRIPTS = (
    "",
    "echo ",
    "export ",
    "function f",
    "[[ ",
    "x=$((",
    "arr=(",
    "if [ -f x ]; then ",
    "#SBATCH ",
    "case x in ",
    "s=",
)
_IN_JSON = ("", "[", "{", '{"a": [', '{"a": "', '{"fp16": {', '{"model_type": "')
_BEGINS = {
    "train.sh": _IN_SCRIPTS,
    "list.args": (f"{SMALL} ", f"{SMALL} --save '"),
    "job.toml": ("", "[model]\n", "[", "a = ", "a = [", 'a = "', "a = {", 'a = """\n', "[a"),
    "job.json": _IN_JSON,
    "ds_config.json": _IN_JSON,
    "config.json": _IN_JSON,
    "trainer.yaml": ("", "a: ", "a: [", "a: &a [", "optim: "),
    "plan.yaml": ("", "model: gpt2\nenvironment: {", "model: gpt2\npipeline: {partition: '", "model: gpt2\ndevice_map: {", "model: {",
                  "model: gpt2\nenvironment: {PYTORCH_CUDA_ALLOC_CONF: '", "a: &a [", "extends: "),
}  # fmt: skip
"""What may stand before something that is repeated, by the name of the file."""
_ENDS = ("", "", "x", "]", "}", ")", "'", '"', "1 ]]", "\nb: *a")


def _repeats(random: Random) -> File:
    """Any file that is one sign thousands of times: what takes the square of its size shows here."""
    name = random.choice(list(_BEGINS))
    unit = random.choice(SIGNS) if random.random() < 0.8 else text(random, most=4) or "a"
    size = random.choice((3_000, 30_000, 60_000, 200_000))
    content = random.choice(_BEGINS[name]) + unit * (size // len(unit)) + random.choice(_ENDS)
    return _file(random, name, content, {"gpus": "8", "model": "gpt2"})


def _read_any(file: File) -> object:
    match file.name:
        case "train.sh" | "list.args":
            return _launched("megatron")(File(file.name, file.content, {"gpus": "8"}))
        case "job.toml" | "job.json":
            return _launched("torchtitan")(File(file.name, file.content, {"gpus": "8"}))
        case "ds_config.json":
            return _launched("deepspeed")(file)
        case "trainer.yaml":
            return _launched("trainer")(file)
        case "config.json":
            return _read_config(file)
        case _:
            return _read_plan(File(file.name, file.content))


def _tokenizer(random: Random) -> File:
    """The files of a tokenizer: JSON with a vocabulary, or SentencePiece's."""
    if random.random() < 0.3:
        content = random.choice((b"\n\x03\n\x01a", b"\x12\x02ab", random.randbytes(3))) * random.randrange(200_000)
        return File("t.model", content + random.randbytes(random.randrange(3)))
    tokens = {f"t{n}": n for n in range(random.choice((0, 1, 30, 300, 3000)))}
    vocabulary = random.choice((tokens, [[name, -1.5] for name in tokens], scalar(random)))
    merges = [[name, "b"] for name in tokens] if random.random() < 0.5 else tree(random, ["a"])
    made = {"added_tokens": [{"id": 0, "content": "t0"}], "model": {"vocab": vocabulary, "merges": merges}}
    chosen = random.choice((made, tokens, made))
    content = as_json(random, changed(random, chosen, ["vocab", "content"]) if random.random() < 0.3 else chosen)
    return _file(random, "t.json", mutated(random, content) if random.random() < 0.5 else content)


def _read_tokenizer(file: File) -> object:
    path = file.written()
    script = f"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 {SMALL} --bf16 "
    script += f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {path}"
    asked = Asked("megatron", {"gpus": "8"})
    return launched_plan(reader("megatron")(File("tokens.args", script.encode()).written(), asked), asked.flags)


def _recipe(random: Random) -> File:
    """Megatron-Bridge's template of recipes and some that begin with it, in one file of Python, mutated."""
    whole = COMMON + RECIPES.replace("from megatron.bridge.recipes.common import _pretrain_common\n", "")
    made = _file(random, "recipes.py", mutated(random, whole, SIGNS, [COMMON, RECIPES]), {"gpus": "16"})
    names = ("llama3_8b_pretrain_8gpu_h100_bf16_config", "qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config")
    return File(made.name, made.content, made.flags, (f"RECIPE={random.choice(names)}",))


def _registry(random: Random) -> File:
    """A configuration of torchtitan in Python, mutated."""
    sources = _golden("launch/torchtitan_*.py")
    content = mutated(random, random.choice(sources), SIGNS, sources)
    made = _file(random, "registry.py", content, {"gpus": "8"})
    function = random.choice(("selective", "in_parts", "older", "gpt_oss", "none"))
    return File(made.name, made.content, made.flags, (f"CONFIG={function}",))


_CONFIG_NAMES = sorted({name for config in _CONFIGS for name in config})
_TRAINER_NAMES = [*READ, *NOTED, *REFUSED]

TARGETS = {
    target.name: target
    for target in (
        _script_target("scripts", lambda random, framework: Grammar(random, framework).script()),
        _script_target("script-mutants", lambda random, _: mutated(random, random.choice(_SCRIPTS), SIGNS, _SCRIPTS)),
        _script_target("arguments", _arguments),
        Target("toml", _toml, _launched("torchtitan"), str),
        Target(
            "torchtitan-json",
            _document(
                ".json", [json.loads(one) for one in _golden("launch/torchtitan_*.json")], list(keys()), {"gpus": "8"}
            ),
            _launched("torchtitan"),
            str,
        ),
        Target("torchtitan-python", _registry, _launched("torchtitan"), str),
        Target(
            "bridge",
            _document(".yaml", [BRIDGE], [*RENAMED, *TURNED_OFF, "mixed_precision", "_target_"], {"gpus": "16"}),
            _launched("megatron-bridge"),
            str,
        ),
        Target("bridge-recipes", _recipe, _launched("megatron-bridge"), str),
        Target(
            "deepspeed",
            _document(".json", _DEEPSPEED, _DEEPSPEED_NAMES, {"gpus": "8", "model": "gpt2"}),
            _launched("deepspeed"),
            str,
        ),
        Target("trainer", _document(".json", _TRAINER, _TRAINER_NAMES, {"model": "gpt2"}), _launched("trainer"), str),
        Target("notebooks", _document(".ipynb", [_NOTEBOOK], ["cells", "source"]), _launched("trainer"), str),
        Target("config", _document("-config.json", _CONFIGS, _CONFIG_NAMES), _read_config, str),
        Target("plans", _plan, _read_plan, str),
        Target("device-maps", _device_map, _read_device_map, str),
        Target("flags", _flags, _read_flags),
        *ESTIMATES,
        *RECORDS,
        *EXPLAINED,
        Target("repeats", _repeats, _read_any, str),
        Target("tokenizers", _tokenizer, _read_tokenizer, str),
    )
}
"""By name."""
