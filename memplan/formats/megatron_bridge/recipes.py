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

from ...plan.errors import ABSENT, Node, Origin, PlanError, nearest, together
from ...plan.hub import twin
from ...plan.text import is_there, read_text
from ...values import dataclass
from ..followed.following import LONGEST, Following, Raised
from ..followed.python_values import Dialect, Elsewhere, Function, Kept, Made, Module, Unknown, Value, with_parts
from ..rows import Table, arguments_of
from . import table

INSTEAD = "give the run_config.yaml that a run writes (ConfigContainer.to_yaml)"
RECIPE = ("RECIPE", "recipe")
"""Names that ``--set`` has for the function of a Python file."""
_PLACES = ("src/megatron/bridge", "megatron/bridge")
_PACKAGES = ("perf_recipes", "recipes")
"""Of both the benchmark's recipe is taken (``scripts/training/recipe_runner.py``: ``load_recipe``)."""
_MOST = 2000
"""Files that are searched for a recipe."""
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
_LAYOUT = "model.pipeline_model_parallel_layout"
_BUCKET = 128 * 1024 * 1024
"""``CommOverlapConfig._get_optimizer_overlap_cfgs`` (``training/comm_overlap.py``)."""


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
    around = [place for folder in map(Path.absolute, folders) for place in (folder, *folder.parents[:4])]
    roots = (one / place for one in dict.fromkeys(around) for place in _PLACES)
    return next((root for root in roots if is_there(root / "recipes" / "common.py")), None)


def file_of(name: str, package: Path) -> Path | None:
    """The file of the checkout's ``package`` in which the recipe ``name`` is."""
    if not name.isidentifier():
        return None
    made = re.compile(rf"^def {name}\(|\bas {name}\b|^{name} = ", re.MULTILINE)
    return next((path for path in _files_of(package) if made.search(read_text(path)[:LONGEST])), None)


def _files_of(package: Path) -> Iterator[Path]:
    return islice((path for one in _PACKAGES for path in sorted((package / one).rglob("*.py"))), _MOST)


def no_recipe_of(package: Path, name: str, origin: Origin) -> PlanError:
    """Megatron-Bridge stops at a name that neither of its packages has (``recipe_runner.py``: ``load_recipe``)."""
    known = {found for path in _files_of(package) for found in _NAME.findall(read_text(path)[:LONGEST])}
    problem = f"is no recipe of the checkout that holds {_shown(package)}"
    guess = nearest(name, sorted(known, key=lambda one: (len(one), one))) if name else None
    return PlanError("--recipe", name, f"{problem}; did you mean {guess}?" if guess else problem, origin=origin)


def followed(path: Path, name: str, scheme: str, said: Collection[str]) -> Recipe:
    """The recipe ``name`` of the file at ``path``; without a name, its only one. ``said`` are fields that are given
    otherwise, and need not be known; ``scheme`` is a kind of adapters."""
    if "model" not in said:
        _check_text(name, "", Origin(_shown(path)))
    following = Following(read_text(path), _shown(path), path, _DIALECT)
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
        problem = f"is missing: the file has {len(offered)} functions; say which with --set RECIPE=NAME ({shown})"
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
    return replace(found, layout=_layouts(following, made))


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
            node = _Written(()).node(_LAYOUT, value)
        except Raised:
            node = None
        if node is None:
            problem = (
                f"has no layout for pp {stages} and vpp {virtual or 1} in {builder.definition.name}: say {_LAYOUT}"
            )
            raise PlanError("model.pipeline_model_parallel_size", stages, problem, origin=where)
        return node

    return layout


def in_step(recipe: Recipe, before: Node, root: Node) -> Node:
    """``root``, which has overrides over ``before``, with the recipe's own layout where they say other stages
    (``recipe_runner.py``: ``sync_model_pipeline_layout``)."""
    sizes = [f"model.{one}pipeline_model_parallel_size" for one in ("", "virtual_")]
    stages, virtual = (one.value if (one := root.at(path)) is not None else None for path in sizes)
    moved = any(root.at(path) is not before.at(path) for path in sizes)
    if moved and recipe.layout is not None and root.at(_LAYOUT) is before.at(_LAYOUT) and isinstance(stages, int):
        root = root.put(_LAYOUT, recipe.layout(stages, virtual if isinstance(virtual, int) else None))
    return root


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


def _of_bridge(owner: Value | None, given: Sequence[Value], where: Origin) -> Value | None:
    """``to_megatron_provider`` and ``get_model_config`` of what ``AutoBridge`` made."""
    return owner if isinstance(owner, Made) and owner.name == _MODEL else None


def _dispatches(owner: Value | None, given: Sequence[Value], where: Origin) -> Value | None:
    """``apply_flex_dispatcher_backend`` on a GPU that has the backend (``training/flex_dispatcher_backend.py``)."""
    model, backend, *_ = (*given, None, None)
    if isinstance(model, Made) and isinstance(backend, Node) and backend.value in ("deepep", "hybridep"):
        values = {"moe_token_dispatcher_type": "flex", "moe_shared_expert_overlap": False}
        model.fields |= {**{name: Node.of(one, where) for name, one in values.items()}}
        model.fields["moe_flex_dispatcher_backend"] = backend
    return Node(None, where)


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


def _unset(made: Made, field: str) -> Value | None:
    """A field that the recipe has not set: the model's own, or the default of its class."""
    if made.name == _MODEL and isinstance(made.positional[0], Node):
        from .overrides import arguments_of_model

        name = str(made.positional[0].value)
        argument = table.RENAMED.get(field, f"--{field.replace('_', '-')}")
        given = arguments_of_model(found)[0] if (found := twin(name, made.positional[0])) is not None else {}
        if (node := given.get(argument)) is not None:
            written = node.value
            return Node(int(written), made.origin) if isinstance(written, str) and written.isdecimal() else node
    return Node.of(_UNSET[field], made.origin) if field in _UNSET else None


_DIALECT = Dialect(
    INSTEAD,
    _is_job,
    follows=lambda module: module.startswith(_FOLLOWED),
    known={
        "from_hf_pretrained": _of_hub,
        "to_megatron_provider": _of_bridge,
        "get_model_config": _of_bridge,
        "apply_flex_dispatcher_backend": _dispatches,
        "set_cuda_graph_modules": _captures,
        "clear_cuda_graph_modules": _captures,
        "get_mixed_precision_config": _precision,
        "warn_deprecated_model": lambda owner, given, where: Node(None, where),
    },
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
        base = None
        if model.name == _MODEL and isinstance(model.positional[0], Node):
            base = str(model.positional[0].value)
            if "model" not in self.said:
                _check_text(name, base, model.origin)
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


def _check_text(name: str, hub: str, origin: Origin) -> None:
    """Refuses a recipe whose model has towers beside the language model, or layers of its own, unless ``--model`` names
    what to estimate in its place."""
    words = {*re.split(r"[^a-z0-9]+", f"{name} {hub}".lower())}
    towers = [one for one in (*table.OTHER_MODELS, "wan", "flux") if one in words]
    layers = [one for one in ("gemma", "exaone", "minimax") if any(word.startswith(one) for word in words)]
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


def as_it_starts(recipe: Recipe, root: Node) -> Node:
    """``root``, which has overrides over ``recipe``, with what starting a run writes into it: the tokenizer's
    vocabulary where that counts (``training/setup.py``: ``_validate_and_set_vocab_size``), the data's length of a
    sequence in the model (``recipe_runner.py``: ``sync_model_dataset_sequence_length``; one that overrides give the
    model alone is undone there, and left here to be refused), and buckets of ``CommOverlapConfig.setup``."""
    tokenizer = root.mapping["tokenizer"].mapping if "tokenizer" in root.mapping else {}
    size, counts = tokenizer.get("vocab_size"), tokenizer.get("use_tokenizer_vocab_size")
    if size is not None and isinstance(size.value, int) and counts is not None and counts.value is True:
        pads = Node(True, size.origin)
        root = root.with_items(
            {"model": root.mapping["model"].with_items({"vocab_size": size, "should_pad_vocab": pads})}
        )
    *of_data, of_model = table.LENGTHS
    length = next((one for path in of_data if (one := root.at(path)) is not None), None)
    if length is not None and length.value is not None and root.at(of_model) is recipe.root.at(of_model):
        root = root.put(of_model, length)
    overlap = root.mapping.get("comm_overlap")
    shards = [root.at(f"{section}.use_distributed_optimizer") for section in ("ddp", "optimizer")]
    if overlap is not None and overlap.mapping and any(one is not None and one.value is True for one in shards):
        set_up = {"bucket_size": _BUCKET, "overlap_grad_reduce": True, "overlap_param_gather": True}
        given = {name: Node.of(value, overlap.origin) for name, value in set_up.items()}
        said = {name: node for name, node in overlap.mapping.items() if name in set_up and node.value is not None}
        ddp = root.mapping.get("ddp", Node({}, overlap.origin))
        root = root.with_items({"ddp": ddp.with_items({**given, **said})})
    return root
