"""Fits on disk: one file each in the user's cache directory, written whole or not at all; and those that ship with
memplan, of the models that ``memplan/learned/models.json`` lists.

A file says what it is of (settings, versions) and is believed only if that is what was asked for; whatever cannot be
read is as good as absent, and written anew. ``MEMPLAN_CACHE`` names another directory than ``XDG_CACHE_HOME/memplan``.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple, Protocol

from ..plan.errors import wrong_at
from ..plan.library import COMPILED, LEARNED
from ..plan.text import checksum
from ..user_folders import user_folder
from .chunks import AnyFit

FORMAT = 2
VARIABLE = "MEMPLAN_CACHE"
SUFFIX = ".json.gz"
TOGETHER = ".jsonl.xz"
"""Of a file that holds the fits of one model with adapters, a line each, which are much alike."""
ABANDONED = 3600
"""Seconds after which what a writer that was killed has left is removed."""
LARGEST = 1 << 28
"""Bytes of a fit's JSON at most."""


class Learnt(Protocol):
    """What a file holds: a fit, or what else traces come to, which its ``from_json`` reads."""

    def to_json(self) -> dict[str, Any]: ...


class Versions(NamedTuple):
    """What a fit depends on besides its settings; an empty one is not installed."""

    tracer: str
    torch: str
    transformers: str

    @property
    def installed(self) -> bool:
        return bool(self.torch and self.transformers)


@lru_cache(maxsize=1)
def versions() -> Versions:
    """Those of this environment."""
    return Versions(tracer(), _installed("torch"), _installed("transformers"))


def _installed(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@lru_cache(maxsize=1)
def tracer() -> str:
    """A digest of the source that traces and learns, but for what it says in docstrings and comments: another tracer
    may find other events."""
    digest = sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        if source.stem not in NO_TRACER:
            digest.update(source.name.encode() + _code(source.read_bytes()))
    return digest.hexdigest()[:16]


NO_TRACER = frozenset(
    {"__init__", "cache", "collectives", "comparison", "framework", "job", "learned", "ranks", "run", "tapes", "timed"}
    | {"assembled", "chunked", "chunks", "gathering", "marks", "periods", "worker"}
    | {"compiled", "compiled_model", "compiled_parts", "compiled_replica", "inductor", "torchtitan", "torchtitan_step"}
)
"""Modules of this package that look things up, ask or fold, and those of torchtitan's code: no event of a fit comes
from them."""


def _code(source: bytes) -> bytes:
    """Lines without docstrings, and without those that are comments."""
    bare = re.sub(rb'\n *""".*?"""', b"", b"\n" + source, flags=re.DOTALL)
    return b"\n".join(line for line in bare.splitlines() if line.strip() and not line.lstrip().startswith(b"#"))


def folder() -> Path:
    """Where fits are; ``PlanError`` where that is in a home directory which nobody knows."""
    return user_folder(VARIABLE, "XDG_CACHE_HOME", "~/.cache", "what was learnt") / "traces"


def path_of(settings: Mapping[str, Any], known: Versions) -> Path:
    """The file of a fit under ``settings``."""
    return folder() / f"{_stem(settings)}-{digest_of(known._asdict())}{SUFFIX}"


def _stem(settings: Mapping[str, Any]) -> str:
    """What names of files of fits under ``settings`` begin with, whatever versions they are of."""
    kind = re.sub(r"[^a-z0-9]+", "-", str(settings["config"].get("model_type", "")).lower())[:40]
    return f"{kind}-{digest_of(settings)}"


def digest_of(value: Mapping[str, Any]) -> str:
    """What tells ``value`` from others in names of files."""
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def load(settings: Mapping[str, Any], kind: Any = AnyFit) -> Any:
    """The user's own fit for this environment, else the built-in one, which says of which releases it is; or another
    ``kind`` of what was learnt."""
    return _of_user(settings, kind) or built_in(settings, kind)


def built_in_path(name: str, settings: Mapping[str, Any]) -> Path:
    """The file of the learned or compiled model ``name`` under ``settings``."""
    return (COMPILED if "compiled" in settings else LEARNED) / name / f"{digest_of(settings)}{SUFFIX}"


def built_in(settings: Mapping[str, Any], kind: Any = AnyFit) -> Any:
    """The fit that ships with memplan, whichever tracer made it: tests see to it that it is this one."""
    stem, folder = digest_of(settings), COMPILED if "compiled" in settings else LEARNED
    found = [shipped(path) for path in folder.glob(f"*/{stem}{SUFFIX}")]
    if settings.get("tuned") is not None:
        paths = folder.glob(f"*/{digest_of(settings['config'])}{TOGETHER}")
        found += [_checked(_together(path, stem).get(stem)) for path in paths]
    return next((kind.from_json(one["fit"]) for one in found if one is not None and one["settings"] == settings), None)


def shipped(path: Path) -> dict[str, Any] | None:
    """What is in the file of a fit that ships; nothing where it is not whole, or of another format."""
    return _checked(_json(path))


def _checked(data: dict[str, Any] | None) -> dict[str, Any] | None:
    return data if data is not None and data.get("format") == FORMAT and _is_whole(data) else None


def is_stale(path: Path) -> bool:
    """Whether a fit of a file that ships is not what this tracer is known to find."""
    found = [*map(_checked, _together(path).values())] if path.name.endswith(TOGETHER) else [shipped(path)]
    return not found or any(data is None or data.get("versions", {}).get("tracer") != tracer() for data in found)


def together_path(name: str, settings: Mapping[str, Any]) -> Path:
    """The file of the learned model ``name`` with adapters, of any ``settings``."""
    return LEARNED / name / f"{digest_of(settings['config'])}{TOGETHER}"


def shipped_together(path: Path) -> dict[str, dict[str, Any]]:
    """What is in a file of fits of one model that ships, by digests of their settings."""
    return {stem: data for stem, line in _together(path).items() if (data := _checked(line)) is not None}


def _together(path: Path, stem: str = "") -> dict[str, dict[str, Any]]:
    """Each line of the file, or the one that begins with ``stem``; nothing where there is none."""
    try:
        with lzma.open(path) as file:
            lines = [line for line in file if line.startswith(stem.encode())]
        return {key.decode(): json.loads(text) for key, _, text in (line.partition(b" ") for line in lines)}
    except (OSError, EOFError, ValueError, lzma.LZMAError):
        return {}


def written_together(fits: Mapping[str, Mapping[str, Any]]) -> bytes:
    """What a file holds of ``fits``, by digests of their settings; the same for the same fits."""
    lines = (f"{stem} {json.dumps(data, separators=(',', ':'))}\n" for stem, data in sorted(fits.items()))
    return lzma.compress("".join(lines).encode())


def _of_user(settings: Mapping[str, Any], kind: Any) -> Any:
    """The fit for this environment; where torch or transformers are not installed, the newest of this tracer's."""
    try:
        found = sorted(
            folder().glob(f"{_stem(settings)}-*{SUFFIX}"), key=lambda path: path.stat().st_mtime, reverse=True
        )
    except OSError:
        return None
    if not found:  # before finding out which versions are installed, which takes longer
        return None
    known = versions()
    if known.installed:
        return _read(path_of(settings, known), settings, known, kind)
    return next((fit for path in found if (fit := _read(path, settings, known, kind)) is not None), None)


def others(settings: Mapping[str, Any]) -> str:
    """Of which other versions than this environment's there is a fit; those of one."""
    known = versions()
    for path in folder().glob(f"{_stem(settings)}-*{SUFFIX}"):
        data = _json(path)
        if data is None or data.get("settings") != settings or not _is_whole(data):
            continue
        try:
            found = Versions(**data["versions"])
        except (TypeError, KeyError):
            continue
        if found.tracer != known.tracer:
            return "another memplan"
        if found != known:
            return f"torch {found.torch} and transformers {found.transformers}"
    return ""


def _read(path: Path, settings: Mapping[str, Any], known: Versions, kind: Any) -> Any:
    data = _json(path)
    if data is None or data.get("format") != FORMAT or data.get("settings") != settings:
        return None
    if not _is_whole(data):
        return None
    try:
        made = Versions(**data["versions"])
        if made.tracer != known.tracer or (known.installed and made != known):
            return None
        return kind.from_json(data["fit"])
    except (TypeError, KeyError, ValueError, AttributeError, IndexError):
        return None


def _is_whole(data: Mapping[str, Any]) -> bool:
    """The fit is as it was stored: one that was changed since may be well formed, and wrong."""
    return "fit" in data and data.get("sha256") == checksum(data["fit"])


def _json(path: Path) -> dict[str, Any] | None:
    """What is in the file, or nothing where it is corrupt, foreign or gone."""
    try:
        with gzip.open(path) as file:
            text = file.read(LARGEST + 1)
        data = json.loads(text) if len(text) <= LARGEST else None
    except (OSError, EOFError, ValueError, zlib.error, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def written(settings: Mapping[str, Any], fit: Learnt) -> bytes:
    """What a file holds of ``fit``; the same for the same fit."""
    return gzip.compress(json.dumps(told(settings, fit), separators=(",", ":")).encode(), mtime=0)


def told(settings: Mapping[str, Any], fit: Learnt) -> dict[str, Any]:
    """``fit`` with what it is of."""
    fitted = fit.to_json()
    data = {"format": FORMAT, "settings": settings, "versions": versions()._asdict(), "fit": fitted}
    return {**data, "sha256": checksum(fitted)}


def store(settings: Mapping[str, Any], fit: Learnt) -> Path:
    """Writes ``fit`` whole, over what was there; the last of several writers wins. ``PlanError`` where it cannot be."""
    path = path_of(settings, versions())
    content = written(settings, fit)
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        with NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".tmp", delete=False) as file:
            temporary = file.name
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except OSError as error:
        raise wrong_at(
            str(path),
            f"cannot be written: {(error.strerror or str(error)).lower()}; {VARIABLE} names another directory",
        ) from None
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
    return path


def _remove_abandoned(directory: Path) -> None:
    """What writers that were killed have left."""
    for path in directory.glob(".*.tmp"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED:
                path.unlink()
