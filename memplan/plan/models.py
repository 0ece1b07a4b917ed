"""From ``model:`` to a complete architecture: a built-in spec, a file, or either with fields changed."""

from __future__ import annotations

from pathlib import Path

from ..values import NamedTuple
from .count import parameters
from .errors import Node, Origin, PlanError, is_slip, one_line, wrong_at
from .hub import (
    cached_config,
    check_no_address,
    check_trained,
    guesses,
    is_repository,
    nowhere,
    of_same_size,
    of_size,
    refused,
    twin,
    without_address,
    without_ending,
    without_size,
)
from .library import (
    SAVED_DTYPE,
    SPEC_NAMES,
    hub_ids,
    learned_models,
    model_specs,
    published_dtype,
    text_parts,
)
from .normalise import section_fields
from .not_modelled import why_not
from .notes import Note, text_part
from .spec import ModelSpec
from .spellings import plain
from .text import is_folder, is_there, parse_yaml, path_of, read_text

_CHANGES_NOTHING = frozenset({"name", "embedding_dropout", "attention_dropout", "hidden_dropout", "source"})
"""Fields of a spec that leave its parameter count as it is."""


WEIGHTS = frozenset({".gguf", ".ggml", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".onnx"})
"""Endings of files that hold a model's weights."""
HOLDS_WEIGHTS = "is of a model's weights, which are not read: give its config.json, or name the model (--model)"


class Found(NamedTuple):
    """A mapping of spec fields, and what the reader should know about how it was found."""

    spec: Node
    notes: tuple[Note, ...] = ()


def complete_model(model: Node, folder: Path) -> Found:
    """The mapping of spec fields that ``model`` describes. Relative paths start from ``folder``.

    ``{base: NAME, layers: 62}`` is the base with fields changed. Sizes that follow from others are
    filled in: head_dim = hidden / heads, kv_heads = heads, and ffn = 4 hidden where the base has it so.
    """
    items = dict(model.mapping)
    base = items.pop("base", None)
    if base is None:
        changes = Node(items, model.origin)
        return Found(_with_derived_sizes(changes, {}, changes.mapping) if items else model)
    found = _base(base, folder)
    if not items:
        return found
    changed = found.spec.with_items(items)
    if items.keys() - _CHANGES_NOTHING:
        changed = changed.without(*({"published_parameters"} - items.keys()))
    return Found(_with_derived_sizes(changed, found.spec.mapping, items), found.notes)


def read_spec(path: Path, name: str | None = None) -> Found:
    """The mapping of spec fields in the YAML or JSON file at ``path``; a Hugging Face configuration is converted.

    ``name`` is what errors call the file, if not its path.
    """
    if is_folder(path):
        path = path / "config.json"
    if path.suffix.lower() in WEIGHTS and is_there(path):
        raise wrong_at(name or str(path), HOLDS_WEIGHTS)
    source = parse_yaml(read_text(path, "model"), name or str(path))
    if not isinstance(source.value, dict):
        raise source.wrong("model", "a model spec is a mapping of fields")
    if "weight_map" in source.mapping:
        raise wrong_at(source.origin, HOLDS_WEIGHTS)
    is_configuration = path.suffix == ".json" or "model_type" in source.mapping
    if is_configuration and not {"family", "norm"} <= source.mapping.keys():
        from .huggingface import spec_of_config, warnings_of_config

        return Found(spec_of_config(source, path), warnings_of_config(source, path))
    items = dict(source.mapping)
    for key in (SAVED_DTYPE, *SPEC_NAMES):
        items.pop(key, None)
    items.setdefault("name", Node(one_line(path.stem), source.origin))
    spec = section_fields("model", Node(items, source.origin))
    return Found(_with_derived_sizes(spec, {}, spec.mapping))


def load_spec(name: str) -> ModelSpec:
    """The built-in spec ``name``, or the spec or configuration at that path."""
    from .validation import validated_spec

    return validated_spec(_base(Node(name, MODEL), Path()).spec)


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_SAVED = {name: short for short, long in _DTYPES.items() for name in (short, long)}


def saved_dtype(model: Node, folder: Path) -> tuple[str, str] | None:
    """The dtype in which the checkpoint of ``model`` was saved, and where that stands: in its ``config.json``, or in
    the built-in spec; nothing where neither says it."""
    base = model.mapping.get("base") if isinstance(model.value, dict) else model
    if base is None or not isinstance(base.value, str) or not base.value:
        return None
    name = without_address(base.value)
    path = model_path(name, folder, base.origin or MODEL)
    same = name if name in model_specs() else None if is_there(path) else twin(name, base)
    if same is not None and same in model_specs():
        said = published_dtype(same)
        return (said, f"model spec {same}") if said is not None else None
    path = path / "config.json" if is_folder(path) else path
    if not is_there(path) or path.suffix not in (".json", ".yaml", ".yml"):
        return None
    config = parse_yaml(read_text(path, "model"), str(path))
    for keys in (SAVED_DTYPE, "dtype", "torch_dtype", "text_config.dtype", "text_config.torch_dtype"):
        node = config.at(keys) if isinstance(config.value, dict) else None
        if node is not None and (saved := _SAVED.get(str(node.value).removeprefix("torch."))) is not None:
            return saved, one_line(str(path))
    return None


def _base(base: Node, folder: Path) -> Found:
    name = base.value
    if not isinstance(name, str) or not name:
        raise base.wrong("model", "must be the name of a model spec, or a path to a spec, a config.json or its folder")
    name = without_address(name)
    check_no_address(name, base)
    check_trained(name, base)
    if name in model_specs() or name in learned_models():
        return _built_in(name)
    path = model_path(name, folder, base.origin)
    same = None if is_there(path) else twin(name, base)
    if same is not None:
        read, *parts = (without_ending(one.rpartition("/")[2]) for one in (name.lower(), *text_parts()))
        told = (text_part(one_line(name)),) if read in parts else ()
        found = _built_in(same)
        return Found(found.spec, (*found.notes, *told))
    if _looks_like_path(name) or is_there(path):
        try:
            return read_spec(path)
        except PlanError as error:
            if error.problem != "no such file":
                raise
        if is_folder(path):
            raise PlanError("model", name, "is a folder without config.json", origin=base.origin)
        raise refused(name, base) if is_repository(name) else nowhere(name, base)
    own = plain(name)
    like = f", `memplan models {name}` those like it" if any(own in plain(one) for one in hub_ids()) else ""
    why = why_not(name)
    alike = of_same_size(name) or of_size(name)
    few = 0 < len(alike) <= MOST_ALIKE and not any(is_slip(name, one) for one in alike)
    problem = f"of that size {'are' if alike[1:] else 'is'} {', '.join(alike)}" if few else ""
    if few and not why:
        raise PlanError("model", name, f"is no built-in model; {problem}", origin=base.origin)
    begun = tuple(one for one in hub_ids() if one.startswith(name.lower()))
    if why and not begun:
        raise PlanError("model", name, f"{why}; built in {problem}" if few else why, origin=base.origin)
    if (same := _of_unsaid_size(name, base)) is not None:
        raise PlanError(
            "model", name, f"is not a built-in model; the built-in one of that size is {same}", origin=base.origin
        )
    problem = (
        f"is neither a built-in model (`memplan models` lists them{like}) nor a path; for another model give its "
        "config.json, or its id on the Hub once it is in the local cache: hf download OWNER/NAME config.json"
    )
    raise PlanError("model", name, problem, origin=base.origin, known=alike or begun or guesses(name))


def _of_unsaid_size(name: str, base: Node) -> str | None:
    """The built-in model ``deepseek-v3`` that somebody calls ``deepseek-v3-671b``, within a tenth."""
    whole, billions = without_size(name)
    try:
        same = twin(whole, base) if whole else None
    except PlanError:  # it could be several, of other sizes
        return None
    if same is None or same not in model_specs():
        return None
    fields = _built_in(same).spec.plain()
    assert isinstance(fields, dict)
    size = parameters(ModelSpec.model_validate(fields))
    return same if abs(size / (billions * 10**9) - 1) < 0.1 else None


MODEL = Origin("model")
MOST_ALIKE = 6
"""Models of a size that are all named."""


def model_path(name: str, folder: Path, origin: Origin = MODEL) -> Path:
    """The file or folder that ``name`` means, from ``folder``; else the configuration of the learned model that it
    means; else its configuration in the Hub's local cache, unless a built-in model has it."""
    path = path_of(name, folder)
    if name in learned_models():
        return learned_models()[name].config
    if name in model_specs() or is_there(path):
        return path
    same = twin(name, Node(name, origin))
    if same is None:
        return cached_config(name) or path
    return learned_models()[same].config if same in learned_models() else path


def _built_in(name: str) -> Found:
    """``PlanError`` of a learned model, at its configuration: there is no spec of it."""
    if name in learned_models():
        return read_spec(learned_models()[name].config)
    return read_spec(model_specs()[name], f"model spec {name}")


def _looks_like_path(name: str) -> bool:
    return "/" in name or name.startswith((".", "~")) or name.endswith((".yaml", ".yml", ".json"))


def _with_derived_sizes(spec: Node, base: dict[str, Node], given: dict[str, Node]) -> Node:
    """``spec`` with the sizes that nobody gave, or that followed from others in the base, derived."""

    def size(fields: dict[str, Node], name: str) -> int | None:
        value = fields[name].value if name in fields else None
        return value if type(value) is int and value > 0 else None

    def follows(name: str, rule: int | None) -> bool:
        return name not in given and (not base or size(base, name) == rule)

    pattern = spec.mapping.get("layer_pattern")
    if pattern is not None and isinstance(pattern.value, str) and "layers" not in given and pattern.value:
        spec = spec.with_items({"layers": Node(len(pattern.value), pattern.origin)})
    hidden, heads = size(spec.mapping, "hidden"), size(spec.mapping, "heads")
    base_hidden, base_heads = size(base, "hidden"), size(base, "heads")
    derived: dict[str, Node] = {}
    if heads and follows("kv_heads", base_heads):
        derived["kv_heads"] = Node(heads, spec.mapping["heads"].origin)
    if hidden and heads and follows("head_dim", base_hidden // base_heads if base_hidden and base_heads else None):
        if hidden % heads:
            wrong = "heads" if "heads" in given else "hidden"
            value = spec.mapping[wrong]
            raise value.wrong(
                f"model.{wrong}", f"heads must divide hidden ({hidden} / {heads}) unless head_dim is given"
            )
        derived["head_dim"] = Node(hidden // heads, spec.mapping["heads"].origin)
    gated = "activation" in spec.mapping and spec.mapping["activation"].value == "swiglu"
    if hidden and not gated and follows("ffn", 4 * base_hidden if base_hidden else None):
        derived["ffn"] = Node(4 * hidden, spec.mapping["hidden"].origin)
    return spec.with_items(derived) if derived else spec
