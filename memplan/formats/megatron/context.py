"""What is known of a training beside Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ...bash.values import Value
from ...plan.errors import Node
from ...plan.text import is_there
from ...values import dataclass
from ..settings import Building

Family = Literal["gpt", "bert", "t5", "hybrid"]


@dataclass(frozen=True, slots=True)
class Context:
    """Facts beside the arguments: the model's kind and name, and values that flags or launchers give."""

    family: Family
    name: str
    folder: Path
    gpus: Node | None = None
    gpus_per_node: Node | None = None
    vocabulary: Node | None = None
    files: Mapping[str, Value] | None = None
    """Files that the script writes, by name."""
    environment: Mapping[str, Node] | None = None
    """Variables that the script sets, those, too, that are in no plan."""

    def found(self, name: object) -> Path | None:
        """The file that an argument calls ``name``: from here, or beside the script."""
        return found_in(self.folder, name)


def found_in(folder: Path, name: object) -> Path | None:
    """The file ``name``, from here or in ``folder``."""
    return next((path for path in (Path(str(name)), folder / str(name)) if is_there(path)), None)


def start(building: Building, framework: str, context: Context) -> None:
    """Puts the values that launchers, flags and the script's name give."""
    building.put("framework", framework)
    building.put("model.name", context.name)
    building.put("model.family", context.family)
    building.put_said("hardware.gpus", context.gpus)
    building.put_said("hardware.gpus_per_node", context.gpus_per_node)
