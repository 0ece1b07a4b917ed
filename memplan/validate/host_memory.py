"""Whether this machine has the memory for ranks that run on its CPU: Linux ends processes where there is none."""

from __future__ import annotations

import re
from pathlib import Path

from ..plan.errors import ABSENT, Origin, PlanError
from ..report.units import size
from ..result import Estimate

MEMORY = Path("/proc/meminfo")
_AVAILABLE = re.compile(r"^MemAvailable: +(\d+) kB$", re.MULTILINE)


def check_host(estimated: Estimate, ranks: int, memory: Path = MEMORY) -> None:
    """``PlanError`` where ``ranks`` of the largest stage at once need more than is available; what PyTorch itself takes
    comes on top. Nothing is checked where that is not known."""
    available = _available(memory)
    needed = ranks * max(stage.requested for stage in estimated.stages)
    if available is not None and needed > available:
        who = "a rank is" if ranks == 1 else f"{ranks} ranks are"
        problem = f"cpu has {size(available)} available, and {who} estimated to need {size(needed)}; --force runs it"
        raise PlanError("", ABSENT, problem, origin=Origin("--device"))


def _available(memory: Path) -> int | None:
    """Bytes."""
    try:
        found = _AVAILABLE.search(memory.read_text())
    except OSError:
        return None
    return int(found[1]) << 10 if found else None
