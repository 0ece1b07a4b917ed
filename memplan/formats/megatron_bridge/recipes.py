"""A recipe of Megatron-Bridge: the Python function that builds its configuration, followed without being run.

``src/megatron/bridge/recipes`` and ``perf_recipes`` of a checkout: functions without arguments that begin with a
template (``recipes/common.py``), set its fields and return a ``ConfigContainer``. A model that ``AutoBridge`` makes of
a repository's ``config.json`` is the built-in one of that name, with the fields that the recipe sets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from ...device.gpus import GPUS
from ...plan.errors import ABSENT, Node, Origin, PlanError, nearest, together
from ...plan.hub import twin
from ...plan.text import is_there, read_text
from ...values import dataclass
from ..followed.following import LONGEST, Following, Raised
from ..followed.python_values import Dialect, Elsewhere, Function, Kept, Made, Module, Unknown, Value, with_parts
from ..settings import Table, arguments_of
from . import table

INSTEAD = "give the run_config.yaml that a run writes (ConfigContainer.to_yaml)"
RECIPE = ("RECIPE", "recipe")
"""Names that ``--set`` has for the function of a Python file."""
_PLACES = ("src/megatron/bridge", "megatron/bridge")
_ABOVE = 8
"""Folders above a script in which a checkout is looked for; the deepest of its ``examples`` lie six below it."""
_PACKAGES = ("perf_recipes", "recipes")
"""Of both the benchmark's recipe is taken (``scripts/training/recipe_runner.py``: ``load_recipe``)."""
_MOST = 2000
"""Files that are searched for a recipe."""
_FEWEST = ("llama3_8b_", "nemotronh_56b_", "qwen3_30b_a3b_")
"""Models whose benchmark is by default that for the fewest GPUs (``_DEFAULT_GPU_COUNT_OVERRIDES``, August 2026)."""
_MAKES = re.compile(r"^def \w+\([^)]*\)\s*->\s*[\"']?ConfigContainer\b", re.MULTILINE)
_NAMES_OTHERS = re.compile(r"^from megatron\.bridge\.(?:perf_)?recipes\.[\w.]+ import\b", re.MULTILINE)
_DOES_MORE = re.compile(r"^(?:def|class|if|for|while|with|try|async|@)", re.MULTILINE)
_NAME = re.compile(r"(?:^def |\bas |^)(\w+_config)\b(?=\(| = |,?$)", re.MULTILINE)
"""What a recipe is called where it is made, or under another name."""
_FOLLOWED = ("megatron.bridge.recipes.", "megatron.bridge.perf_recipes.", "megatron.bridge.training.mixed_precision")
_MODEL = "AutoBridge"
"""What a model is called that ``AutoBridge.from_hf_pretrained`` makes."""
_FUNCTIONS = ("F.", "torch.nn.functional.", "torch.")
_MEMBERS = re.compile(r"\b(?:AttnBackend|CudaGraphScope|CudaGraphModule)\.(\w+)$")
_UNSET: Mapping[str, object] = {
    "cuda_graph_impl": "none",
    "cuda_graph_scope": None,
    "te_rng_tracker": False,
    "use_te_rng_tracker": False,
    "use_transformer_engine_op_fuser": False,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "pipeline_model_parallel_layout": None,
    "num_moe_experts": None,
    "moe_flex_dispatcher_backend": "deepep",
    "mtp_num_layers": None,
    "apply_rope_fusion": False,
}
"""Fields of ``TransformerConfig`` and ``RNGConfig`` that functions of recipes read, and their defaults."""
LAYOUT = "model.pipeline_model_parallel_layout"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a recipe says."""

    root: Node
    """``ConfigContainer``'s sections."""
    model: str | None
    """The built-in model below the fields of ``model``; nothing where they are all of a provider's."""
    name: str
    layout: Callable[[int, int | None], Node] | None = None
    """The recipe's own layout of so many stages and virtual stages, where it has a function for that."""
    benchmark: bool = False
    """Whether it is one of ``perf_recipes``."""


def is_recipe(text: str) -> bool:
    """Whether the Python file ``text`` has functions that make Megatron-Bridge's configurations, or does no more than
    give such functions other names (``recipes/llama/llama3.py``)."""
    if "megatron.bridge" not in text:
        return False
    return _MAKES.search(text) is not None or (
        "_config" in text and _NAMES_OTHERS.search(text) is not None and _DOES_MORE.search(text) is None
    )


def checkout_of(folders: Sequence[Path]) -> Path | None:
    """The package of a checkout that holds one of ``folders`` or is in it: ``src/megatron/bridge``."""
    around = [place for folder in map(Path.absolute, folders) for place in (folder, *folder.parents[:_ABOVE])]
    roots = (one / place for one in dict.fromkeys(around) for place in _PLACES)
    return next((root for root in roots if is_there(root / "recipes" / "common.py")), None)


def file_of(name: str, package: Path) -> Path | None:
    """The file of the checkout's ``package`` in which the recipe ``name`` is: where it is made, or given another name;
    of both packages the library gives names, and benchmarks take some for their own use."""
    if not name.isidentifier():
        return None
    made, named = re.compile(rf"^def {name}\(", re.MULTILINE), re.compile(rf"\bas {name}\b|^{name} = ", re.MULTILINE)
    found: Path | None = None
    for path in _files_of(package):
        text = read_text(path)[:LONGEST]
        if made.search(text):
            return path
        if named.search(text) and (found is None or package / _PACKAGES[0] in found.parents):
            found = path
    return found


def of_other_gpus(name: str, package: Path) -> str | None:
    """The benchmark that the launcher takes where none is for so many GPUs: the one of the same name for most, of some
    models for fewest (``scripts/performance/utils/utils.py``: ``_select_default_recipe_name``)."""
    stem = re.fullmatch(r"(\w+_)[0-9]+(gpu_\w+)", name)
    if stem is None:
        return None
    same = re.compile(rf"^def ({stem[1]}([0-9]{{1,6}}){stem[2]})\(", re.MULTILINE)
    benchmarks = sorted((package / _PACKAGES[0]).rglob("*.py"))[:_MOST]
    found = [one for path in benchmarks for one in same.findall(read_text(path)[:LONGEST])]
    chosen = min if name.startswith(_FEWEST) else max
    return chosen(found, key=lambda one: int(one[1]))[0] if found else None


def _files_of(package: Path) -> Iterator[Path]:
    return islice((path for one in _PACKAGES for path in sorted((package / one).rglob("*.py"))), _MOST)


def no_recipe_of(package: Path, name: str, origin: Origin) -> PlanError:
    """Megatron-Bridge stops at a name that neither of its packages has (``recipe_runner.py``: ``load_recipe``)."""
    known = {found for path in _files_of(package) for found in _NAME.findall(read_text(path)[:LONGEST])}
    problem = f"is no recipe of the checkout that holds {_shown(package)}"
    guess = nearest(name, sorted(known, key=lambda one: (len(one), one))) if name else None
    return PlanError("--recipe", name, f"{problem}; did you mean {guess}?" if guess else problem, origin=origin)


def followed(path: Path, name: str, scheme: str, said: Collection[str], gpu: str | None) -> Recipe:
    """The recipe ``name`` of the file at ``path`` as it is on ``gpu``; without a name, its only one. ``said`` are
    fields that are given otherwise, and need not be known; ``scheme`` is a kind of adapters."""
    if "model" not in said:
        _check_text(name, "", Origin(_shown(path)))
    following = Following(read_text(path), _shown(path), path, _dialect(gpu))
    offered = _offered(following.main)
    if not offered:
        raise PlanError(
            "RECIPE",
            name or ABSENT,
            f"has no function that returns a ConfigContainer; {INSTEAD}",
            origin=Origin(_shown(path)),
        )
    if not name and len(offered) != 1:
        shown = ", ".join(offered[:4]) + (", …" if len(offered) > 4 else "")
        ways = f"as {path.name}:NAME, or with --set RECIPE=NAME"
        problem = f"is missing: the file has {len(offered)} functions; say which {ways} ({shown})"
        raise PlanError("RECIPE", ABSENT, problem, origin=Origin(_shown(path)))
    name = name or offered[0]
    made = following.configuration(name, {"peft_scheme": Node(scheme, Origin("--mode"))} if scheme else {})
    if isinstance(made, Unknown) and made.why is not None:
        raise made.why
    if not isinstance(made, Made) or not _is_whole(made):
        guess = nearest(name, offered)
        problem = f"is no function that is followed to a ConfigContainer; {INSTEAD}"
        problem = f"is no function of this file; did you mean {guess}?" if made is None and guess else problem
        raise PlanError("RECIPE", name, problem, origin=Origin(_shown(path)))
    found = _Written({*said}).recipe(made, name, Origin(_shown(path)))
    return replace(found, layout=_layouts(following, made), benchmark=_PACKAGES[0] in path.absolute().parts)


def _offered(module: Module) -> list[str]:
    """Recipes of a file; where it makes none, those that it gives other names."""
    if any(isinstance(one, Function) for one in module.names.values()):
        return [name for name in module.functions if not name.startswith("_")]
    return [name for name, one in module.names.items() if isinstance(one, Elsewhere) and name.endswith("_config")]


def _layouts(following: Following, made: Made) -> Callable[[int, int | None], Node] | None:
    model = made.fields.get("model")
    builder = model.fields.get("_pipeline_model_parallel_layout_builder") if isinstance(model, Made) else None
    if not isinstance(builder, Function):
        return None

    def layout(stages: int, virtual: int | None) -> Node:
        where = Origin(builder.module.source, builder.definition.lineno)
        try:
            value = following.result(builder, [Node(stages, where), Node(virtual, where)], {})
            node = _Written(()).node(LAYOUT, value)
        except Raised:
            node = None
        if node is None:
            problem = f"has no layout for pp {stages} and vpp {virtual or 1} in {builder.definition.name}: say {LAYOUT}"
            raise PlanError("model.pipeline_model_parallel_size", stages, problem, origin=where)
        return node

    return layout


def _shown(path: Path) -> str:
    here = Path().absolute()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


# -- what Megatron-Bridge's own functions do ------------------------------------------------------------


def _is_whole(made: Made) -> bool:
    return made.name.rpartition(".")[2] == "ConfigContainer"


def _is_job(made: Made) -> bool:
    return _is_whole(made) or made.name == _MODEL or made.name.endswith(("ModelProvider", "ModelConfig"))


def _of_hub(owner: Value | None, given: Sequence[Value], where: Origin) -> Value | None:
    """``AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B")``."""
    return Made(_MODEL, {}, where, tuple(given[:1])) if given and isinstance(given[0], Node) else None


def _text_of_hub(owner: Value | None, given: Sequence[Value], where: Origin) -> Value | None:
    """``AutoConfig.from_pretrained("Qwen/Qwen3.5-9B")``, whose ``text_config`` is of the same repository."""
    return Made("AutoConfig", {}, where, tuple(given[:1])) if given and isinstance(given[0], Node) else None


def _of_config(owner: Value | None, given: Sequence[Value], where: Origin) -> Value | None:
    """``AutoBridge.from_hf_config(config)``."""
    config = given[0] if given else None
    return Made(_MODEL, {}, where, config.positional) if isinstance(config, Made) and config.positional else None


def _of_bridge(owner: Value | None, given: Sequence[Value], where: Origin) -> Value | None:
    """``to_megatron_provider`` and ``get_model_config`` of what ``AutoBridge`` made."""
    return owner if isinstance(owner, Made) and owner.name == _MODEL else None


def runs_backend(backend: str, gpu: str | None) -> bool:
    """Whether Megatron-Bridge takes ``backend`` on ``gpu``: HybridEP on Ampere, Hopper and Blackwell, DeepEP on these
    but Grace-Blackwell, whose name does not begin with ``NVIDIA B200`` or ``NVIDIA B300``."""
    found = GPUS.get(gpu or "")
    if found is None or found.compute_capability is None:
        return True
    major = found.compute_capability[0]
    if backend == "deepep":
        return major in (8, 9) or found.name.startswith(("b200", "b300"))
    return major in (8, 9, 10)


def _dispatches(model: Value | None, backend: Value | None, where: Origin, gpu: str | None) -> Value:
    """``apply_flex_dispatcher_backend``, which takes ``alltoall`` on a GPU that has no such backend, and changes
    nothing of a dense model (``training/flex_dispatcher_backend.py``)."""
    none, experts = Node(None, where), None
    if isinstance(model, Made):
        experts = model.fields.get("num_moe_experts") or _unset(model, "num_moe_experts")
    dense = isinstance(experts, Node) and not experts.value
    named = backend.value if isinstance(backend, Node) else None
    if dense or not isinstance(model, Made) or not isinstance(named, str) or named not in ("deepep", "hybridep"):
        return none
    if not runs_backend(named, gpu):
        model.fields |= {"moe_token_dispatcher_type": Node("alltoall", where), "moe_flex_dispatcher_backend": none}
        return none
    values = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": named}
    model.fields |= {name: Node(one, where) for name, one in values.items()}
    model.fields["moe_shared_expert_overlap"] = Node(False, where)
    return none


def _captures(owner: Value | None, given: Sequence[Value], where: Origin) -> Value | None:
    """``set_cuda_graph_modules`` and ``clear_cuda_graph_modules`` (``utils/cuda_graph.py``)."""
    model, modules, *_ = (*given, None, None)
    if isinstance(model, Made):
        model.fields["cuda_graph_modules"] = modules or Node([], where)
        model.fields["cuda_graph_scope"] = Node(None, where)
    return Node(None, where)


def _precision(owner: Value | None, given: Sequence[Value], where: Origin) -> Value | None:
    """``get_mixed_precision_config("bf16_mixed")`` (``training/mixed_precision.py``)."""
    name = given[0].value if given and isinstance(given[0], Node) else None
    fields = table.PRECISIONS.get(str(name).replace("-", "_"))
    return Made("MixedPrecisionConfig", dict(Node.of(fields, where).mapping), where) if fields is not None else None


def _hub_of(made: Made) -> str | None:
    """The repository whose model ``made`` is: ``AutoBridge``'s, or that of a class that is one model's."""
    if made.name == _MODEL and isinstance(made.positional[0], Node):
        return str(made.positional[0].value)
    return table.MODELS_OF_CLASSES.get(made.name)


def _unset(made: Made, field: str) -> Value | None:
    """A field that the recipe has not set: the model's own, or the default of its class."""
    if made.name == "AutoConfig" and field == "text_config":
        return made
    if (name := _hub_of(made)) is not None:
        from .overrides import arguments_of_model

        argument = table.RENAMED.get(field, f"--{field.replace('_', '-')}")
        given = (
            arguments_of_model(found).arguments if (found := twin(name, Node(name, made.origin))) is not None else {}
        )
        if (node := given.get(argument)) is not None:
            written = node.value
            return Node(int(written), made.origin) if isinstance(written, str) and written.isdecimal() else node
    return Node.of(_UNSET[field], made.origin) if field in _UNSET else None


_KNOWN = {
    "from_hf_pretrained": _of_hub,
    "from_pretrained": _text_of_hub,
    "from_hf_config": _of_config,
    "to_megatron_provider": _of_bridge,
    "get_model_config": _of_bridge,
    "set_cuda_graph_modules": _captures,
    "clear_cuda_graph_modules": _captures,
    "get_mixed_precision_config": _precision,
    "warn_deprecated_model": lambda owner, given, where: Node(None, where),
}


def _dialect(gpu: str | None) -> Dialect:
    def dispatches(owner: Value | None, given: Sequence[Value], where: Origin) -> Value:
        model, backend, *_ = (*given, None, None)
        return _dispatches(model, backend, where, gpu)

    return Dialect(
        INSTEAD,
        _is_job,
        follows=lambda module: module.startswith(_FOLLOWED),
        known={**_KNOWN, "apply_flex_dispatcher_backend": dispatches},
        unset=_unset,
    )


class _Written:
    """Turns what was made into nodes, and gathers what only running code knows."""

    def __init__(self, said: Collection[str]) -> None:
        self.said = said
        self.wrong: list[PlanError] = []

    def recipe(self, made: Made, name: str, file: Origin) -> Recipe:
        fields = dict(made.fields)
        model = fields.get("model")
        if not isinstance(model, Made) or not model.name:
            what = model.shown if isinstance(model, Unknown) else "made by code"
            problem = f"is {what} that is not followed; {INSTEAD}"
            raise PlanError("model", ABSENT, problem, origin=made.origin)
        if (base := _hub_of(model)) is not None:
            if "model" not in self.said:
                _check_text(name, base, model.origin, model.fields)
            fields["model"] = Made("", model.fields, model.origin)
        found = {section: node for section, one in fields.items() if (node := self.node(section, one)) is not None}
        if self.wrong:
            raise together(self.wrong)
        return Recipe(Node(found, file), base, name)

    def node(self, path: str, value: Value) -> Node | None:
        """``value`` at ``path``; nothing where it is not known and does not matter."""
        if isinstance(value, Made):
            fields = {name: self.node(f"{path}.{name}", one) for name, one in value.fields.items()}
            target = {"_target_": Node(value.name, value.origin)} if value.name else {}
            return Node({**target, **{name: one for name, one in fields.items() if one is not None}}, value.origin)
        if not isinstance(value, Node):
            return self.named(path, value)
        if isinstance(value.value, Kept):
            return self.node(path, value.value.value)
        return with_parts(value, path, self.node)

    def named(self, path: str, value: Value) -> Node | None:
        """A dtype, a function or a member of an enumeration as a run writes it; else what only running code knows."""
        shown = value.shown if isinstance(value, Unknown) else ""
        shown = ".".join(filter(None, (value.module, value.name))) if isinstance(value, Elsewhere) else shown
        origin = value.origin if isinstance(value, Unknown) else Origin("")
        if shown.startswith(_FUNCTIONS) and "(" not in shown:
            whole = shown.replace("F.", "torch.nn.functional.", 1) if shown.startswith("F.") else shown
            return Node({"_target_": Node(whole, origin)}, origin)
        if (member := _MEMBERS.search(shown)) is not None:
            return Node(member[1], origin)
        if path == "model.activation_func":
            return Node({"_target_": Node(shown, origin)}, origin)
        if path not in self.said and _matters(path):
            problem = f"is {shown or 'a function'}, which only running code knows: say it behind the file, {path}=VALUE"
            self.wrong.append(PlanError(path, ABSENT, problem, origin=origin))
        return None


_LAYERS = ("gemma", "exaone", "minimax", "deepseek_v4")
"""What names of models begin with whose layers are their own."""
_READS_IMAGES = re.compile(r"_[0-9]+v_")
"""``glm_45v``."""


_OF_TOWER = "freeze_vision"
"""What fields of a provider begin with that builds a tower of vision, too, whatever it is called (Ministral 3)."""


def _check_text(name: str, hub: str, origin: Origin, fields: Collection[str] = ()) -> None:
    """Refuses a recipe whose model, of which it sets ``fields``, has towers beside the language model, or layers of its
    own, unless ``--model`` names what to estimate in its place."""
    words = {*re.split(r"[^a-z0-9]+", f"{name} {hub}".lower())}
    towers = [one for one in (*table.OTHER_MODELS, "wan", "flux") if one in words]
    reads = _READS_IMAGES.search(name) or any(field.startswith(_OF_TOWER) for field in fields)
    towers += ["vision"] if reads else []
    layers = [one for one in _LAYERS if any(word.startswith(one) for word in (name, *words))]
    if towers or layers:
        what = f"more than a language model ({towers[0]})" if towers else f"layers of its own ({layers[0]})"
        problem = f"has {what}, which is not modelled; --model NAME estimates a language model in its place"
        raise PlanError("--recipe", name, problem, origin=origin)


def _matters(path: str) -> bool:
    """Whether the field at ``path`` is one that memory depends on."""
    section, _, field = path.partition(".")
    if section not in (*table.SECTIONS, "comm_overlap", "mixed_precision", "peft") or field in table.IGNORED:
        return path in table.LENGTHS
    if section in ("mixed_precision", "peft"):
        return True
    argument = arguments_of("megatron").get(table.RENAMED.get(field, f"--{field.replace('_', '-')}"))
    return field in table.BY_ITSELF - {"transformer_layer_spec", "hybrid_stack_spec", "mamba_stack_spec"} or (
        argument is not None and argument.table is not Table.IRRELEVANT
    )
