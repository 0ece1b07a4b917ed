"""Several files of one job, or what stands in them: arguments of Hugging Face's Trainer or a script that gives them,
Accelerate's configuration, a ``ds_config.json``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..plan.errors import Node, wrong_at
from ..plan.text import folder_of, parse_yaml, path_of, text_at
from ..values import dataclass
from . import accelerate
from .accelerate import Accelerated, accelerated
from .deepspeed.reader import ds_config_in
from .launch import Asked, Launch
from .settings import Building
from .trainer import reader as trainer
from .trainer.script import Started

Content = str | Node
"""A file's place, or what stands in one."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of the files."""

    format: str
    content: Content

    @property
    def name(self) -> str:
        return self.content if isinstance(self.content, str) else str(self.content.origin)

    @property
    def folder(self) -> Path:
        return folder_of(path_of(self.content)) if isinstance(self.content, str) else Path()

    def mapping(self) -> Node:
        """What stands in it."""
        if isinstance(self.content, Node):
            return self.content
        text, name = text_at(self.content)
        return parse_yaml(text.expandtabs(2), name)

    def started(self, asked: Asked) -> Started:
        """The Trainer's arguments."""
        if isinstance(self.content, str):
            return trainer.started_at(self.content, asked)
        return Started(self.content, Path())


def read_together(parts: Sequence[Part], asked: Asked) -> Launch:
    """The plan that ``parts`` say together: of each format one, but several of the Trainer's with other keys each."""
    of: dict[str, list[Part]] = {}
    for part in parts:
        if part.format not in _TOGETHER:
            raise wrong_at(
                part.name,
                f"is a file of {part.format}, which stands alone; those of {', '.join(_TOGETHER)} go together",
            )
        of.setdefault(part.format, []).append(part)
        if part.format != "trainer" and len(of[part.format]) > 1:
            raise wrong_at(part.name, f"is a file of {part.format}, as {of[part.format][0].name} is; give one")
    engine = of["deepspeed"][0].mapping() if "deepspeed" in of else None
    if "trainer" in of:
        return _trained(of["trainer"], of.get("accelerate", [None])[0], engine, asked)
    if "accelerate" not in of:
        assert engine is not None
        return ds_config_in(engine, asked, Building(engine.origin))
    (part,) = of["accelerate"]
    return accelerate.launched(_with_engine(part.mapping(), engine), part.folder, asked)


_TOGETHER = ("trainer", "accelerate", "deepspeed")


def _trained(parts: Sequence[Part], launcher: Part | None, engine: Node | None, asked: Asked) -> Launch:
    found = parts[0].started(asked)
    for part in parts[1:]:
        found = replace(found, arguments=_merged(found.arguments, part.started(asked).arguments))
    if launcher is not None:
        configured = _configured(launcher, engine)
        found = replace(found, accelerate=configured, gpus=found.gpus or configured.processes)
    if engine is not None:
        found = replace(found, arguments=found.arguments.with_items({"deepspeed": engine}))
    return trainer.launched(found, asked)


def _configured(launcher: Part, engine: Node | None) -> Accelerated:
    written = launcher.mapping()
    runs_engine = str(written.mapping.get("distributed_type", written).value).upper().endswith("DEEPSPEED")
    return accelerated(_with_engine(written, engine if runs_engine else None), launcher.folder)


def _with_engine(written: Node, engine: Node | None) -> Node:
    """Accelerate's configuration with a ``ds_config.json`` as the file that it names."""
    if engine is None:
        return written
    section = written.mapping.get("deepspeed_config", Node({}, engine.origin))
    kind = written.mapping.get("distributed_type", Node("DEEPSPEED", engine.origin))
    if not str(kind.value).upper().endswith("DEEPSPEED"):
        raise kind.wrong("distributed_type", f"must be DEEPSPEED beside {engine.origin.source}")
    file = section.with_items({"deepspeed_config_file": engine})
    return written.with_items({"distributed_type": kind, "deepspeed_config": file})


def _merged(first: Node, second: Node) -> Node:
    for key, node in second.mapping.items():
        before = first.mapping.get(key)
        if before is not None and before.plain() != node.plain():
            raise node.wrong(key, f"is {before.plain()} at {before.origin}; give one")
    return first.with_items(second.mapping)
