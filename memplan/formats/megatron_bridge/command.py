"""A script that starts one of Megatron-Bridge's recipes: the recipe's model, and what its command says over it.

``scripts/training/run_recipe.py`` of August 2026: ``--recipe`` or ``--model`` name a recipe, options of its own are
overrides by shorter names (``COMMON_OVERRIDE_FIELDS``), and all other words are overrides.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from ...bash.origin import ScriptError
from ...bash.shell import read_script
from ...bash.values import Value, is_known, text
from ...device.instances import gpu_of_folder
from ...plan.errors import Node, Origin, PlanError, refused
from ...plan.hub import twin
from ...plan.read import Flags
from ...plan.spellings import gpus_called
from ..files import not_in
from ..launch import Asked
from ..launchers import beside, training_in
from ..settings import needed
from . import benchmark as benchmarks
from .overrides import is_override, laid_over
from .recipes import RECIPE as RECIPE_IN_FILE, Recipe, checkout_of, file_of, followed, no_recipe_of, of_other_gpus
from .table import LENGTHS

OPTIONS = {
    **dict.fromkeys(("-ms", "--max_steps"), "train.train_iters"),
    **dict.fromkeys(("-gb", "--global_batch_size"), "train.global_batch_size"),
    **dict.fromkeys(("-mb", "--micro_batch_size"), "train.micro_batch_size"),
    **dict.fromkeys(("-sl", "--seq_length"), "dataset.seq_length"),
    **dict.fromkeys(("-tp", "--tensor_model_parallel_size"), "model.tensor_model_parallel_size"),
    **dict.fromkeys(("-pp", "--pipeline_model_parallel_size"), "model.pipeline_model_parallel_size"),
    **dict.fromkeys(("-cp", "--context_parallel_size"), "model.context_parallel_size"),
    **dict.fromkeys(("-vp", "--virtual_pipeline_model_parallel_size"), "model.virtual_pipeline_model_parallel_size"),
    **dict.fromkeys(("-ep", "--expert_model_parallel_size"), "model.expert_model_parallel_size"),
    **dict.fromkeys(("-et", "-etp", "--expert_tensor_parallel_size"), "model.expert_tensor_parallel_size"),
}
"""Options of ``run_recipe.py`` and of benchmark scripts, and the fields that they set."""
RECIPE = ("--recipe", "--model", "-mr", "--model_recipe_name")
BENCHMARK = {
    **dict.fromkeys(("-ng", "--num_gpus"), "gpus"),
    **dict.fromkeys(("-g", "--gpu"), "gpu"),
    **dict.fromkeys(("-c", "--compute_dtype"), "dtype"),
    "--task": "task",
}
"""Those of ``scripts/performance`` that name one of ``perf_recipes``,"""
_OF_JOB = {
    "--nodes": "nodes",
    **dict.fromkeys(("--gpus-per-node", "--gpus_per_node", "--devices"), "each"),
}
"""Those of ``scripts/training/setup_experiment.py``, which ``train.sh`` starts, and of ``launch_with_nemo_run.py``
that say how many GPUs there are."""
GPU_OF_BENCHMARK = "gpu of the benchmark"
"""What they are run on, where no flag says it: as a flag that no command line has."""
_TASK = re.compile(r"_(?:pretrain|sft|peft|lora|dora|finetune)(?:_\w+)?$")
"""What follows a model in the name of a recipe."""
_RELEASE = re.compile(r"(?<=[a-z])([0-9])([0-9])(?=_)")
"""``llama32_1b`` is Llama 3.2."""
_MILLIONS = re.compile(r"_([0-9])00m\b")
"""``qwen3_600m`` is called 0.6B elsewhere."""
_NEMOTRON_3 = {"nano": "30b-a3b", "super": "120b-a12b", "ultra": "550b-a55b"}
"""Recipes of ``recipes/nemotronh`` name no sizes."""
_LOW = re.compile(r"fp8|fp4")
_SIZES = frozenset(("tp", "pp", "cp", "ep"))
_LAYOUT = re.compile(r"_([0-9]+)gpu_([a-z0-9]+)_")
"""Recipes of ``perf_recipes`` (``llama3_8b_pretrain_8gpu_h100_bf16_config``)."""
_LENGTH = re.compile(r"_([0-9]+)k(?=_)")
"""``qwen3_600m_sft_yarn_128k_config``, which has a layout for so many tokens, too."""
_ADAPTERS = re.compile(r"_(?:peft|lora|dora)(?:_|$)")
_DORA = re.compile(r"_dora(?:_|$)")
SCHEME = ("--peft_scheme", "--peft-scheme")
"""Of the same script in release 0.3, which calls a recipe without it where that takes none (``load_recipe``)."""
_TASK_OF_NAME = re.compile(r"_(pretrain|sft|finetune|dora|peft|lora)(?:_|$)")
"""``infer_recipe_mode`` (``recipe_metadata.py``)."""
_SCHEMES = ("lora", "dora")
_NO_SCHEME = re.compile(r"_(?:pretrain|sft)(?:_|$)")
_OF_MEMORY = ("model.", "train.", "dataset.", "ddp.", "optimizer.", "mixed_precision", "comm_overlap.", "peft")
_PLACE = re.compile(r"dataset\.[\w.]*(?:path|root|dir|dataset_name)\w*(?:=.*)?", re.DOTALL)
"""Where data lie, which changes no memory."""


def started(content: str, source: str, folder: Path, asked: Asked) -> tuple[Node, Asked, str, Recipe | None]:
    """What the script ``content`` says over its recipe, ``asked`` with the recipe's model and the GPUs, where these are
    known, the recipe's name, and what it says itself where its Python is found from ``folder``."""
    try:
        reading = read_script(content.replace("\r\n", "\n"), source, asked.variables(), beside(folder))
    except ScriptError as error:
        raise refused(error) from None
    training = training_in(reading, source, folder, lambda word: word in RECIPE or word in OPTIONS or is_override(word))
    recipe, scheme, mode, flags, of_benchmark = "", "", "", dict(asked.flags), dict[str, str]()
    over: list[tuple[Sequence[str], Origin]] = []
    names_one = any(text(word).partition("=")[0] in RECIPE[:2] for word in training.words)
    is_benchmark, job = training.script in benchmarks.SCRIPTS and not names_one, dict[str, str]()
    benchmark, sets = (BENCHMARK, benchmarks.NAMES) if is_benchmark else ({}, frozenset[str]())
    library = any(text(word) == "--use_recipes" for word in training.words)
    words = iter(training.words)
    for word in words:
        name, equals, _ = text(word).partition("=")
        value: Value = word
        if name in OPTIONS or name in sets or name in (*RECIPE, *SCHEME, *benchmark, *_OF_JOB, "--mode"):
            value = () if equals else next(words, ())
            said = text(word).partition("=")[2] if equals else text(value)
        elif is_override(text(word)):
            said = ""
        elif is_known(word):
            continue
        else:
            said = ""
        path = OPTIONS.get(name, name).lstrip("+")
        unknowns = () if is_known(value) else reading.ledger.unknowns(value)
        if unknowns and all(one.options and not _of_memory(one.options) for one in unknowns):
            continue  # a condition between overrides such as checkpoint.load
        if unknowns:
            if not is_override(text(word)) or (path.startswith(_OF_MEMORY) and not _PLACE.fullmatch(path)):
                named = is_override(text(word)) or name in OPTIONS or name in sets
                field = path.partition("=")[0] if named else "an override"
                raise needed(field, reading.ledger.shown(value), unknowns[0], training.origin)
            continue
        origin = word[0].origin if word else training.origin
        if name in RECIPE:
            recipe = said
        elif name in benchmark:
            of_benchmark[benchmark[name]] = said
        elif name in _OF_JOB:
            job[_OF_JOB[name]] = said
        elif name == "--mode":
            mode = said
        elif name in SCHEME:
            scheme = said
        elif name in sets:
            over.append((benchmarks.overrides_of(name, said, origin), origin))
        else:
            over.append(([f"{path}={said}" if name in OPTIONS else text(word)], origin))
    for name, value in training.environment.items():
        if name.startswith(("NVTE_", "NCCL_", "PYTORCH_", "CUDA_", "CUBLAS_")) and is_known(value):
            over.append(([f"env_vars.{name}={text(value)}"], training.origin))
    names, recipe = _names(recipe, mode), f"{recipe}_{mode}" if mode else recipe
    dtype = of_benchmark.get("dtype", "bf16")
    gpus, gpu = of_benchmark.get("gpus", "0"), of_benchmark.get("gpu", "")
    if benchmark:
        task = of_benchmark.get("task", "pretrain")
        names = _names(recipe, task)
        recipe = f"{recipe}_{task}_{gpus}gpu_{gpu}_{dtype.replace('_', '')}_config"
        names = names if library else [recipe]
        if not gpus.isdecimal():
            raise PlanError("--num_gpus", gpus, "must be a whole number", origin=training.origin)
    elif (layout := _LAYOUT.search(recipe)) is not None:
        gpus, gpu = layout[1], layout[2]
    if mode and not benchmark:
        _check_mode(mode, names, training.origin)
    given_over, package = [word for words, _ in over for word in words], checkout_of((folder, Path()))
    if mode in _SCHEMES:
        scheme = mode
    if package is not None and benchmark and not library and not (package / "perf_recipes").is_dir():
        package = None  # of a release whose benchmarks are no recipes
    if package is not None and benchmark and not library and file_of(names[0], package) is None:
        names = [of_other_gpus(names[0], package) or names[0]]
    ran = _ran_on(gpus, _machines_gpu(folder) or gpu, asked)
    found = _found(package, names, scheme, _said(given_over, asked), gpu_of({**flags, **ran}), training.origin)
    root = found.root if found is not None else Node({}, training.origin)
    for one, where in over:
        root = laid_over(root, one, where)
    given = root.mapping.get("peft")
    if _NO_SCHEME.search(recipe):
        scheme = ""
    elif _ADAPTERS.search(recipe):
        scheme = scheme or ("dora" if _DORA.search(recipe) else "lora")
    if scheme and (given is None or (given.mapping and "_target_" not in given.mapping)):
        root = laid_over(root, [f"peft._target_={scheme}"], training.origin)
    if benchmark and found is None:
        root = benchmarks.precision(root, dtype, training.origin, library=library)
        if not library:
            root = benchmarks.common(root, recipe, training.origin)
    if found is not None or benchmark:
        flags |= ran
    if found is None:
        _check(recipe, root, asked, training.origin)
    model = found.model if found is not None else model_of_recipe(recipe, training.origin)
    if model is not None and "model" not in asked.names:
        flags["model"] = model
    counts = [int(one) for one in job.values() if one.isdecimal()]
    total = training.gpus.whole if training.gpus is not None else prod(counts) if len(counts) == 2 else 0
    if total and not asked.names & {"gpus", "dp"}:
        flags["gpus"] = str(total)
    unused = not_in(content, asked.variables())
    left = [one for one in asked.assignments if one.partition("=")[0] in unused]
    return root, replace(asked, flags=flags, assignments=left), recipe, found


def _names(recipe: str, mode: str) -> list[str]:
    """What the recipe is called, or the one of a model's stem and ``mode`` (``run_recipe.py``:
    ``_selected_recipe_name``)."""
    if not recipe:
        return []
    task = "peft" if mode in _SCHEMES else mode
    return [recipe, f"{recipe}_{task}_config"] if mode else [recipe]


def _check_mode(mode: str, names: Sequence[str], origin: Origin) -> None:
    """``_validate_recipe_mode`` (``run_recipe.py``)."""
    task = _TASK_OF_NAME.search(names[0]) if names else None
    if task is None:
        return
    wanted = _SCHEMES if task[1] in ("peft", *_SCHEMES) else ("pretrain",) if task[1] == "pretrain" else ("sft",)
    if mode not in wanted:
        problem = f"must be {' or '.join(wanted)} with the recipe {names[0]}, as in Megatron-Bridge"
        raise PlanError("--mode", mode, problem, origin=origin)


def _found(
    package: Path | None, names: Sequence[str], scheme: str, said: Collection[str], gpu: str | None, origin: Origin
) -> Recipe | None:
    """The first recipe of ``names`` that the checkout's ``package`` has, as it is on ``gpu``; refused where it has
    none, unless ``--model`` is ``said``."""
    if package is None or not names:
        return None
    for name in names:
        if (place := file_of(name, package)) is not None:
            return followed(place, name, scheme, said, gpu)
    if "model" in said:
        return None
    raise no_recipe_of(package, names[-1], origin)


def _said(over: Sequence[str], asked: Asked) -> set[str]:
    """Fields that overrides say, whose values a recipe need not know."""
    given = {word.lstrip("+~").partition("=")[0] for word in (*over, *asked.overrides)}
    return {*given, *({"model"} & set(asked.names))}


def of_python(path: Path, asked: Asked) -> tuple[Recipe, Asked]:
    """The recipe of a Python file that ``--set RECIPE=NAME`` names, and ``asked`` with its model and GPUs."""
    variables = asked.variables()
    name = next((variables[key] for key in RECIPE_IN_FILE if key in variables), "")
    flags = dict(asked.flags)
    if (layout := _LAYOUT.search(name or path.stem)) is not None:
        flags |= _ran_on(layout[1], layout[2], asked)
    found = followed(path, name, "", _said((), asked), gpu_of(flags))
    if found.model is not None and "model" not in asked.names:
        flags["model"] = found.model
    left = [one for one in asked.assignments if one.partition("=")[0] not in RECIPE_IN_FILE]
    return found, replace(asked, flags=flags, assignments=left)


def _ran_on(gpus: str, gpu: str, asked: Asked) -> dict[str, str]:
    """The GPUs that a recipe is for, as flags, where no flag says them."""
    flags = {"gpus": gpus} if gpus != "0" and not asked.names & {"gpus", "dp"} else {}
    called = gpus_called(gpu)
    if len(called) == 1 and not asked.names & {"gpu", "capacity"}:
        flags[GPU_OF_BENCHMARK] = called[0]
    return flags


def gpu_of(flags: Flags) -> str | None:
    """The GPU that ``--gpu`` names, or else a recipe or its folder."""
    named = flags.get("gpu", flags.get(GPU_OF_BENCHMARK))
    called = gpus_called(named) if isinstance(named, str) else []
    return called[0] if len(called) == 1 else None


def _machines_gpu(folder: Path) -> str | None:
    """Google's recipes name NVIDIA's for H100 on machines that have H200, and lie in a folder of the machine's name."""
    found = map(gpu_of_folder, reversed(folder.resolve().parts))
    return next((gpu for gpu in found if gpu is not None), None)


def _of_memory(options: Iterable[str]) -> bool:
    return any(one.lstrip("+").startswith(_OF_MEMORY) or one.startswith("--") for one in options)


def _check(recipe: str, root: Node, asked: Asked, origin: Origin) -> None:
    """Refuses a recipe whose name says that it sets what no override says: a precision, or what so many GPUs run."""
    given = {word.lstrip("+~").partition("=")[0] for word in asked.overrides}
    sections = {*root.mapping, *(name.partition(".")[0] for name in given)}
    fields = {*given, *(f"{one}.{name}" for one in root.mapping for name in root.mapping[one].mapping)}
    wanted = ""
    if _LOW.search(recipe) and "mixed_precision" not in sections and not asked.names & {"fp8", "fp4"}:
        wanted = "a precision below 16 bits, for example mixed_precision=bf16_with_fp8_current_scaling_mixed"
    of_benchmark, length = _LAYOUT.search(recipe), _LENGTH.search(recipe)
    if of_benchmark or length:
        tokens = 1024 * int(length[1]) if length else 8192
        is_said = {
            "a layout (--tp 2)": any(one.endswith("_parallel_size") for one in fields) or asked.names & _SIZES,
            f"a length (--seq {tokens})": fields & {*LENGTHS} or "seq" in asked.names,
        }
        if of_benchmark:
            is_said |= {
                "a micro-batch size (--mbs 1)": "train.micro_batch_size" in fields or "mbs" in asked.names,
                "a global batch size (--gbs 128)": "train.global_batch_size" in fields or "gbs" in asked.names,
            }
        wanted = wanted or ", ".join(what for what, said in is_said.items() if not said)
    if wanted:
        problem = (
            f"says {wanted}, which only its Python has: give what it says behind the file, or the run_config.yaml "
        )
        raise PlanError("--recipe", recipe, f"{problem}that a run writes", origin=origin)


def model_of_recipe(recipe: str, origin: Origin) -> str | None:
    """The built-in model that the recipe ``llama32_1b_pretrain_config`` trains."""
    stem = _MILLIONS.sub(r"_0.\1b", _TASK.sub("", recipe).removesuffix("_config"))
    series, _, size = stem.rpartition("_")
    stem = f"{stem}_{_NEMOTRON_3[size]}" if series == "nemotron_3" and size in _NEMOTRON_3 else stem
    names = (stem.replace("_", "-"), _RELEASE.sub(r"\1.\2", stem).replace("_", "-"))
    return next((found for name in names if (found := twin(name, Node(name, origin))) is not None), None)
