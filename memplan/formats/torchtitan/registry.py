"""The configuration that a Python function makes, as the JSON that the same job saves.

``torchtitan/models/*/config_registry.py`` and ``torchtitan_recipes`` since 23 February 2026: a function without
arguments that returns a ``Trainer.Config``. ``Trainer.Config.to_dict`` (``torchtitan/trainer.py``) says what is saved.
Fields that the function does not name are left out, which readers of the JSON take for their defaults.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...plan.errors import ABSENT, Node, Origin, PlanError, nearest, one_line, together, wrong_at
from ...plan.models import load_spec
from ...plan.text import is_there, path_of, read_text, text_at
from ..followed.following import Following
from ..followed.python_values import Dialect, Kept, Made, Unknown, Value, with_parts
from ..settings import Table
from .keys import NEWEST, key_of
from .stages import DECODERS, FLAVOURS, flavour_of, without_recipe

CONFIG = ("CONFIG", "config")
"""Names that ``--set`` has for the function."""
MODULE = ("MODULE", "module")
"""and for the file that it is in."""

INSTEAD = "give the config.json that a run saves (debug.save_config_file)"


_MADE_OVER = {"to_graph_trainer_config": "GraphTrainer.Config"}
"""Functions that make another trainer's configuration of a job's (``experiments/graph_trainer/configs.py``)."""


def is_job(made: Made) -> bool:
    """Whether it is a configuration of a whole job: ``Trainer.Config``, or a class of that kind."""
    return _kind(made).replace(".", "").endswith("TrainerConfig")


def _kind(made: Made) -> str:
    return _MADE_OVER.get(made.name.partition(":")[0], made.name)


def _check_trainer(made: Made, name: str) -> None:
    """Refuses the job of a trainer that runs other code."""
    if _kind(made).removesuffix(".Config").rpartition(".")[2] == "GraphTrainer":
        problem = "makes a GraphTrainer.Config: that trainer traces a whole step into one graph, which it changes and "
        problem += "partitions itself, and is not modelled; a configuration of torchtitan/models is"
        raise PlanError("CONFIG", name, problem, origin=made.origin)


def _unset(made: Made, name: str) -> Value | None:
    """``model_registry("8B").model`` has layers to count."""
    if ":" not in made.name or name != "model":
        return None
    layers = _layers_of(made)
    one = Node(None, made.origin)
    return Made("model", {} if layers is None else {"layers": Node([one] * layers, made.origin)}, made.origin)


_DIALECT = Dialect(INSTEAD, is_job, kept=frozenset({"model_registry", *_MADE_OVER}), unset=_unset)
_IMPORTS = re.compile(r"^\s*(?:from|import) torchtitan", re.MULTILINE)
_MODULES = ("torchtitan/models/{}/config_registry.py", "torchtitan/experiments/{}/config_registry.py")
_MOST = 100
"""Files that are searched for a function."""
_POLICIES: dict[str, tuple[str, object]] = {
    "FullAC": ("determinism_check", "default"),
    "SelectiveAC": ("force_recompute_mm_shapes_by_fqns", ["moe.router.gate"]),
    "MemoryBudgetAC": ("memory_budget", 0.5),
}
"""Policies of recompute, and a field with its default by which a saved one is known (``activation_checkpoint.py``)."""
_CHUNKED = ("ChunkedLossWrapper", "ChunkedCELoss")
_CHUNKS = 8
"""``ChunkedLossWrapper.Config.num_chunks`` (``torchtitan/components/loss.py``)."""
_LOSSES = ("CrossEntropyLoss", "BaseLoss", "CELoss", "")
_ADAMW = {"optimizer_name": "AdamW", "optimizer_kwargs": {"weight_decay": 0.1}}
"""``default_adamw`` (``torchtitan/components/optimizer/optimizer.py``)."""
_OF_CONTAINER = ("param_groups", "implementation", "optimizer_factory_kwargs_by_name")
"""Fields of ``OptimizersContainer.Config`` itself, which a function may change afterwards."""
_OF_SPEC = ("name", "flavor")
"""Of a ``ModelSpec`` itself; ``model_registry`` has arguments, each of which is a key."""
_REMEDIES = {
    "optimizer": "--optimizer adamw estimates AdamW",
    "loss": "--loss plain estimates the plain one",
    "activation_checkpoint": "--recompute full or none says another",
}
"""What to give in place of a section."""


def is_registry(text: str) -> bool:
    """Whether the Python file ``text`` is one of torchtitan's configurations."""
    return _IMPORTS.search(text) is not None and "Config" in text


def chosen(assignments: Sequence[str]) -> tuple[str, list[str]]:
    """The function that ``--set CONFIG=…`` names, if it does, and the other assignments."""
    name, others = "", []
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if equals and key in CONFIG:
            name = value
        elif not (equals and key in MODULE):
            others.append(assignment)
    return name, others


def place_of(module: str, folders: Sequence[Path], origin: Origin) -> str:
    """The file that ``--module`` names, from the folder of the script or where memplan is started."""
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        raise PlanError("--module", module, "must be a model of torchtitan's, or a Python module", origin=origin)
    inside = "/".join(parts)
    names = [f"{inside}/config_registry.py", f"{inside}.py"]
    own = [one.format(inside) for one in _MODULES]
    names = own + names if len(parts) == 1 else names + own
    for folder in folders:
        for name in names:
            if is_there(folder / name):
                return str(folder / name)
    problem = (
        f"is in {names[0]}, which is not found from here: start memplan in torchtitan's folder, give that file and "
        "--set CONFIG=NAME, or the config.json that a run saves"
    )
    raise PlanError("--module", module, problem, origin=origin)


def found_at(place: str) -> tuple[str, str]:
    """The file that ``place`` is, and the function in it where ``place`` is no file but a function's name: of
    torchtitan's own configurations, from where memplan is started."""
    if not place.isidentifier() or is_there(path_of(place)):
        return place, ""
    made = re.compile(rf"^def {place}\(", re.MULTILINE)
    for pattern in _MODULES:
        for file in sorted(Path().glob(pattern.format("*")))[:_MOST]:
            if made.search(read_text(file)):
                return str(file), place
    problem = "no such file, and no configuration of torchtitan's here: start memplan in torchtitan's folder, or give "
    raise wrong_at(place, f"{problem}the file that has it and --set {CONFIG[0]}={place}")


def written_in(place: str, name: str, overridden: Collection[str]) -> Node:
    """The configuration that the function ``name`` of the file at ``place`` makes; without a name, the only one.

    ``overridden`` are keys, and sections, that are given otherwise, which need not be known.
    """
    text, source = text_at(place)
    following = Following(text, source, None if place == "-" else Path(place), _DIALECT)
    name = name or _only(following)
    made = following.configuration(name)
    if made is None:
        raise _nothing(following, name)
    if isinstance(made, Unknown) and made.why is not None:
        raise made.why
    if not isinstance(made, Made) or not is_job(made):
        raise PlanError("CONFIG", name, f"makes no Trainer.Config; {INSTEAD}", origin=Origin(source))
    _check_trainer(made, name)
    return _Written(overridden).whole(made)


def _offered(following: Following) -> list[str]:
    return [one for one in following.main.functions if not one.startswith("_")]


def _only(following: Following) -> str:
    names, origin = _offered(following), Origin(following.main.source)
    if len(names) == 1:
        return names[0]
    if not names:
        raise wrong_at(origin, f"has no function that makes a configuration; {INSTEAD}")
    shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    raise wrong_at(origin, f"has {len(names)} functions: say which with --set CONFIG=NAME ({shown})")


def _nothing(following: Following, name: str) -> PlanError:
    known = _offered(following)
    guess = nearest(name, known)
    more = f" ({', '.join(known[:8])})" if known and not guess else ""
    origin = Origin(following.main.source)
    return PlanError("CONFIG", name, f"is no function of this file that is followed{more}", origin=origin, known=known)


class _Written:
    """Turns what was made into nodes, and gathers what only running code knows."""

    def __init__(self, overridden: Collection[str]) -> None:
        self.overridden = overridden
        self.wrong: list[PlanError] = []

    def whole(self, made: Made) -> Node:
        found = {name: node for name, one in made.fields.items() if (node := self.section(name, one)) is not None}
        if self.wrong:
            raise together(self.wrong)
        return Node(found, made.origin)

    def section(self, name: str, value: Value) -> Node | None:
        """The field ``name`` of the configuration."""
        if isinstance(value, Made):
            kind = value.name.removesuffix(".Config").rpartition(".")[2]
            if name == "model_spec":
                return self.spec(value)
            if name == "loss":
                return self.loss(value, kind)
            if name == "activation_checkpoint":
                return self.policy(value, kind)
            if name == "optimizer":
                return self.optimizer(value, kind)
        return self.node(name, value)

    def node(self, path: str, value: Value) -> Node | None:
        """``value`` at ``path``; nothing where it is not known and does not matter."""
        if isinstance(value, Made):
            fields = {name: self.node(f"{path}.{name}", one) for name, one in value.fields.items()}
            return Node({name: one for name, one in fields.items() if one is not None}, value.origin)
        if not isinstance(value, Node):
            self.unknown(path, value)
            return None
        if isinstance(value.value, Kept):
            inner = value.value.value
            return self.named(inner) if isinstance(inner, Made) else self.node(path, inner)
        return with_parts(value, path, self.node)

    def named(self, made: Made) -> Node:
        """An item of a list: its fields, or its name where it is a converter."""
        if made.name.endswith("ParamGroupConfig"):
            return self.node("optimizer.param_groups", made) or Node(None, made.origin)
        return Node(made.name.removesuffix(".Config").rpartition(".")[2], made.origin)

    def unknown(self, path: str, value: Value) -> None:
        """Asks for what is not known at ``path``, where it matters."""
        key = key_of(path) or key_of(f"{path}.*")
        matters = key is None or key.table is not Table.IRRELEVANT
        section = key is None and any(one.startswith(f"{path}.") for one in self.overridden)
        if matters and path not in self.overridden and not section and isinstance(value, Unknown):
            remedy = f"say it with --set {path}=VALUE" if key is not None else _REMEDIES.get(path, INSTEAD)
            problem = f"is {one_line(value.shown)}, which only running code knows: {remedy}"
            self.wrong.append(PlanError(path, ABSENT, problem, origin=value.origin))

    def other(self, section: str, kind: str, remedy: str, made: Made) -> None:
        """A class of torchtitan's that is not modelled, or one of the user's own."""
        if section not in self.overridden:
            problem = f"is {one_line(kind)}, which is not modelled; {remedy}"
            self.wrong.append(PlanError(section, ABSENT, problem, origin=made.origin))

    def spec(self, made: Made) -> Node:
        """``model_registry("8B", …)``, or a ``ModelSpec`` whose name and flavour stand there."""
        fields, found = dict(made.fields), {}
        kind, _, module = made.name.partition(":")
        if module:
            family = module.rpartition(".")[2]
            known = "model_spec" in self.overridden or any(one == family for one, _ in (*FLAVOURS, *DECODERS))
            if module.startswith("torchtitan.models.") and not known:
                raise without_recipe(family, made.origin)
            found["name"] = Node(family, made.origin)
            if made.positional:
                fields.setdefault("flavor", made.positional[0])
        for name, value in fields.items():
            if (module or name in _OF_SPEC) and (node := self.node(f"model_spec.{name}", value)) is not None:
                found[name] = node
        for section, converter in _converters_of(fields.get("converters")):
            found[section] = self.node(f"model_spec.{section}", converter) or Node(None, made.origin)
        if not module and kind.rpartition(".")[2] != "ModelSpec":
            problem = f"is made by {kind}, which is not followed; {INSTEAD}"
            self.wrong.append(PlanError("model_spec", ABSENT, problem, origin=made.origin))
        return Node(found, made.origin)

    def loss(self, made: Made, kind: str) -> Node | None:
        if kind not in (*_CHUNKED, *_LOSSES):
            self.other("loss", kind, _REMEDIES["loss"], made)
        fields = {name: one for name, one in made.fields.items() if name != "loss_fn"}
        if kind in _CHUNKED:
            fields.setdefault("num_chunks", Node(_CHUNKS, made.origin))
        return self.node("loss", Made(made.name, fields, made.origin))

    def policy(self, made: Made, kind: str) -> Node | None:
        fields = dict(made.fields)
        if kind in _POLICIES:
            name, default = _POLICIES[kind]
            fields.setdefault(name, Node.of(default, made.origin))
        elif kind not in ("ActivationCheckpointConfig", "ActivationCheckpoint", ""):
            self.other("activation_checkpoint", kind, _REMEDIES["activation_checkpoint"], made)
        return self.node("activation_checkpoint", Made(made.name, fields, made.origin))

    def optimizer(self, made: Made, kind: str) -> Node | None:
        fields = dict(made.fields)
        if made.name.rpartition(".")[2].startswith("default_adamw"):
            given = {name: node for name, one in fields.items() if (node := self.node(f"optimizer.{name}", one))}
            own = {name: given.pop(name) for name in _OF_CONTAINER if name in given}
            group = Node.of(_ADAMW, made.origin)
            group.mapping["optimizer_kwargs"].mapping.update(given)
            return Node({"param_groups": Node([group], made.origin), **own}, made.origin)
        if kind not in ("OptimizersContainer", ""):
            self.other("optimizer", made.name, _REMEDIES["optimizer"], made)
            return None
        return self.node("optimizer", Made(made.name, fields, made.origin))


_CONVERTERS = {
    "Float8LinearConverter.Config": ("float8", ("recipe_name", "filter_fqns", "emulate")),
    "MXFP8LinearConverter.Config": ("mxfp8", ("fqns",)),
    "MXFP8GroupedExpertsConverter.Config": ("mxfp8_experts", ("pad_multiple",)),
    "NVFP4LinearConverter.Config": ("nvfp4", ("fqns",)),
    "LoRAConverter.Config": ("lora", ("rank", "alpha", "target_modules")),
}
"""Converters: the section that stands for each one's arguments, and those of them that matter."""


def _converters_of(converters: Value | None) -> Iterator[tuple[str, Made]]:
    """Sections of the converters that are there once."""
    items: Any = converters.value if isinstance(converters, Node) else None
    kept = [one.value.value for one in (items if isinstance(items, list) else ()) if isinstance(one.value, Kept)]
    for kind, (section, names) in _CONVERTERS.items():
        found = [one for one in kept if isinstance(one, Made) and one.name.endswith(kind)]
        if len(found) == 1:
            fields = {name: value for name, value in found[0].fields.items() if name in names}
            yield section, Made(found[0].name, fields, found[0].origin)


def _layers_of(registry: Made) -> int | None:
    """How many layers the model of ``model_registry("8B", …)`` has, of those that are known."""
    given = [*registry.positional[:1], *(one for name, one in registry.fields.items() if name == "flavor")]
    family = registry.name.rpartition(".")[2]
    flavour = given[0].value if given and isinstance(given[0], Node) else None
    known = flavour_of(family, flavour, NEWEST) if isinstance(flavour, str) else None
    return None if known is None else known[1].get("layers", load_spec(known[0]).layers)
