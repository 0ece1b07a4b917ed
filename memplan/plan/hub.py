"""Names of models as the Hugging Face Hub has them: a built-in twin, or the local cache; never the network."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ..values import pattern
from .errors import Node, Origin, PlanError, is_slip, one_line, wrong_at
from .library import hub_ids, nicknames
from .not_modelled import why_not
from .spellings import meant
from .text import is_folder, is_there, path_of, read_text

_REPOSITORY = pattern(r"(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}")
_ENDING = pattern(r"(?i)(?:[-_ ](?:hf|instruct|chat|it|base|thinking|qat))+$")
"""What tells models of the same shape apart; several of them, as in ``-it-qat`` and ``-chat-hf``."""
_PACKED = pattern(r"(?i)-(?:unsloth-)?(?:bnb-4bit|(awq|gptq))(?:-int([48]))?$")
"""And what tells a checkpoint of quantised weights."""
_FEWER_BITS = pattern(
    r"(?i)[-_.](?:qat-)?(fp8|nvfp4|mxfp4|fp4|[2-8]bit|int[48]|awq-int4|quantized\.w[48]a[0-9]+)(?:[-_](?:dynamic|block|dwq))?$"
)
"""And of weights in fewer bits, which inference takes: those of MLX (``4bit``), and of vLLM (``quantized.w4a16``)."""
_IMAGES = pattern(r"(?i)-(?:VL|Omni)(?=-)")
"""And what tells a model that reads images beside the one of text that it grew from (Qwen's)."""
_GGUF = pattern(r"(?i)(?:[-_.](?:ud-)?(?:i?q[0-9]\w*|b?f16|f32|fp16))?[-_.]gguf$")
"""And what tells weights of llama.cpp, behind how they are packed."""
MIRRORS = frozenset({"unsloth", "nousresearch"})
"""Owners who keep others' checkpoints under their names, and in their shapes."""
_SIZE = pattern(r"-[0-9.]+[bm](?:-v[0-9.]+)?$")
"""How large a model is, and its release: a name without them means the only one of that name."""
_ACTIVE = pattern(r"-a[0-9.]+b$")
"""How much of a mixture every token runs through: the same."""


def twin(name: str, node: Node) -> str | None:
    """The built-in model that is also called ``name``: in other letters, or by a repository that holds its shape.

    A name with a colon that stands with a model means it, whatever it would mean without: Ollama serves the newest
    release. A name that could be two models is refused at ``node``. A repository of an owner that is not listed is
    none, but for ``MIRRORS``: what stands in it may have other sizes.
    """
    served = [model for model, also in nicknames().items() if ":" in name and name.lower() in also]
    if len(served) == 1:
        return served[0]
    name = name.removesuffix(":latest")
    owner, _, repository = name.partition("/")
    if owner.lower() in MIRRORS and not _PACKED.search(name):
        name = repository
    called = {
        model: {model, *ids, *(() if "/" in name else (*_nicknames(model), *(_last(one) for one in ids)))}
        for model, ids in hub_ids().items()
    }
    found = (
        [model for model, names in called.items() if name.lower() in map(str.lower, names)]
        or meant(name, called.items())
        or meant(without_ending(name), ((model, set(map(without_ending, names))) for model, names in called.items()))
        or meant(name, ((model, {_SIZE.sub("", model)}) for model in called if _SIZE.search(model)))
        or meant(name, ((model, {_ACTIVE.sub("", model)}) for model in called if _ACTIVE.search(model)))
    )
    if len(found) > 1:
        raise PlanError("model", name, f"could be {' or '.join(found)}; name one", origin=node.origin)
    return found[0] if found else None


def _nicknames(model: str) -> Iterator[str]:
    """But for those of Ollama's that mean this model because of their colon."""
    return (one for one in nicknames().get(model, ()) if ":" not in one)


def _last(repository: str) -> str:
    return repository.rpartition("/")[2]


def without_ending(name: str) -> str:
    """``name`` without what tells it apart from a model of the same shape: ``-base``, ``-instruct``."""
    return _ENDING.sub("", name)


def in_four_bits(name: str, node: Node) -> str | None:
    """The built-in model whose weights the repository ``name`` of a mirror holds as bitsandbytes packs them: NF4,
    doubly quantised (``quantization_config`` of unsloth's). Its dynamic ones leave some layers whole, and are none."""
    owner, _, repository = name.partition("/")
    whole = repository.removesuffix("-bnb-4bit")
    if owner.lower() not in MIRRORS or whole == repository or whole.endswith("-unsloth"):
        return None
    return twin(whole, node)


def namesakes(name: str) -> tuple[str, ...]:
    """Built-in models of the family that ``name`` begins with, and of its version where it says one; where there is no
    such family, those that ``name`` is a slip of."""
    own = name.rpartition("/")[2]
    alike = [model for model in hub_ids() if _word(model) == _word(own)]
    if not alike:
        return tuple(model for model in hub_ids() if is_slip(own, model))
    version = _version(own)
    sizes = _HOW_LARGE.findall(own.lower())
    if version is None or (not sizes and any(f"-{version}b" in model for model in alike)):  # a size without its letter
        return tuple(alike)
    return tuple(model for model in alike if _version(model) == version)


def of_same_size(name: str) -> tuple[str, ...]:
    """Of ``namesakes`` those as large as ``name`` says: the 7b of ``qwen-7b``."""
    size = _SIZES.search(name.rpartition("/")[2].lower())
    return tuple(one for one in namesakes(name) if size is not None and size[1] in _SIZES.findall(one))


def without_size(name: str) -> tuple[str, float]:
    """``deepseek-v3-671b`` without its size, and that in billions; an empty name where it says none at its end."""
    size = _HOW_LARGE.search(name.lower())
    if size is None or size.end() != len(name) or float(size[1][:-1]) == 0:
        return "", 0.0
    return name[: size.start()].rstrip("-_"), float(size[1][:-1]) / (1 if size[1][-1] == "b" else 1000)


def of_size(name: str) -> tuple[str, ...]:
    """Models of the size that ``name`` is, where it is nothing else: ``70b``, ``8x7b``."""
    return tuple(one for one in hub_ids() if name.lower() in one.split("-")) if _BARE.fullmatch(name) else ()


_BARE = pattern(r"(?i)(?:[0-9]+x)?[0-9]+(?:\.[0-9]+)?[bmt]")


def guesses(name: str) -> tuple[str, ...]:
    """Of ``namesakes`` those that ``name`` may be meant for: with a size of its own it is none of another size, but for
    a slip or what its name goes on with."""
    if _HOW_LARGE.search(name.rpartition("/")[2].lower()) is None:
        return namesakes(name)
    own = name.lower()
    return tuple(one for one in namesakes(name) if is_slip(own, one) or one.startswith(own))


_HOW_LARGE = pattern(r"(?<![0-9.])([0-9]+(?:\.[0-9]+)?[bm])(?![a-z0-9])")
_SIZES = pattern(r"(?<![0-9.])((?:(?<=[-_])a)?[0-9]+(?:\.[0-9]+)?[bm])(?![a-z0-9])")
"""Sizes in a name, what one token uses of a model with experts apart from others: ``30b`` and ``a3b``."""


def _version(name: str) -> str | None:
    """The number behind a family's name, unless it is a size: ``3`` of ``gemma-3-4b``."""
    found = re.match(r"(?i)[a-z]+-?([0-9]+(?:\.[0-9]+)?)(?![0-9.]*[bm])", name)
    return found[1] if found is not None else None


def _word(name: str) -> str:
    return re.split(r"[^a-z]", name.lower(), maxsplit=1)[0]


_PAGE = pattern(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?:models/)?([\w.-]+/[\w.-]+?)(?:/.*)?/?")


def without_address(name: str) -> str:
    """The repository whose page on the Hub ``name`` is the address of; else ``name``."""
    page = _PAGE.fullmatch(name)
    return page[1] if page is not None else name


def check_trained(name: str, node: Node) -> None:
    """Refuses a file, or a repository, of weights that llama.cpp runs: they are not trained, and none has a
    ``config.json``."""
    own = name.rpartition("/")[2]
    whole = _GGUF.sub("", own)
    if whole != own and not is_folder(path_of(name)):
        same = twin(whole, node)
        problem = "holds weights for llama.cpp (GGUF), which are not trained: name the model that they were made from"
        raise PlanError("model", name, problem + (f", --model {same}" if same else ""), origin=node.origin)


def check_no_address(name: str, node: Node) -> None:
    """Refuses the address of anything else: nothing is fetched."""
    if re.match(r"[a-z][a-z0-9+]{1,9}://", name):
        raise wrong_at(
            Origin(one_line(name)) if node.origin.line is None else node.origin,
            "is an address, and memplan never uses the network: fetch it first (curl -O), and name the file",
        )


def cached_config(name: str) -> Path | None:
    """``config.json`` of the repository ``name`` in the local cache, of the revision that was fetched as ``main``.

    As ``huggingface_hub``'s ``try_to_load_from_cache`` (``file_download.py``) finds it.
    """
    if _REPOSITORY.fullmatch(name) is None:
        return None
    folder = cache_folder() / f"models--{name.replace('/', '--')}"
    revision = folder / "refs" / "main"
    if not is_there(revision):
        return None
    config = folder / "snapshots" / read_text(revision, "model").strip() / "config.json"
    return config if is_there(config) else None


def cache_folder() -> Path:
    """Where the Hub's files are kept (``huggingface_hub``'s ``constants.py``)."""
    environment = os.environ
    whole = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    if whole:
        return path_of(whole)
    home = environment.get("HF_HOME")
    if home:
        return path_of(home) / "hub"
    return path_of(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def refused(name: str, node: Node) -> PlanError:
    """Why the repository ``name`` is no model here, and how to have it."""
    tail = name.rpartition("/")[2]
    similar = twin(_PACKED.sub("", _FEWER_BITS.sub("", _IMAGES.sub("", tail))), node)
    problem = f"is no file, no built-in model, and not in the local Hugging Face cache ({cache_folder()})"
    if similar and _IMAGES.search(tail):
        images = f"reads images, which is not modelled; its text part has the sizes of {similar}: --model {similar}"
        return PlanError("model", name, images, origin=node.origin)
    if similar and (fewer := _FEWER_BITS.search(tail)) is not None and not _PACKED.search(tail):
        bits = f"holds weights in {fewer[1].lower()}, on which training is not modelled; in 16 bits it is {similar}: "
        bits += f"--model {similar}"
        return PlanError("model", name, bits, origin=node.origin)
    if not similar and (why := why_not(name)):
        return PlanError("model", name, why, origin=node.origin)
    wanted = f"fetch its configuration with: hf download {name} config.json"
    hint = f"; {similar} is built in" if similar else ""
    packed = _PACKED.search(tail)
    if similar and packed is not None and packed[2] != "8":  # in 8 bits neither is modelled
        hint += f", in 4 bits with --quantisation {(packed[1] or 'nf4').lower()}"
    return PlanError("model", name, f"{problem}; {wanted}{hint}", origin=node.origin)


def nowhere(name: str, node: Node) -> PlanError:
    """A path ``name`` at which nothing is, with the built-in model that its last part is called like."""
    tail = name.rstrip("/").rpartition("/")[2].rpartition("--")[2]
    try:
        similar = twin(tail, node)
    except PlanError:  # it could be two
        similar = None
    hint = f"; {similar} is built in: --model {similar}" if similar else ""
    return PlanError("model", name, f"no such file{hint}", origin=node.origin)


def config_name(path: Path) -> str:
    """The model's name that the place of its configuration says: of its folder, or of its repository in the cache."""
    for part in path.parts:
        if part.startswith("models--"):
            return part.rpartition("--")[2]
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def is_repository(name: str) -> bool:
    """Whether ``name`` is written as a repository of the Hub: ``owner/name``."""
    return (
        name.count("/") == 1
        and _REPOSITORY.fullmatch(name) is not None
        and not name.endswith((".yaml", ".yml", ".json"))
    )
