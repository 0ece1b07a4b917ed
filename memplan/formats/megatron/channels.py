"""``--nccl-communicator-config-path``: a YAML file with options of NCCL's communicators by the names of groups
(``parallel_state.py``, ``get_nccl_options``). Fewest and most channels are read; clusters of thread blocks decide no
memory, and a priority of streams none, either."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...plan.errors import Node
from ...plan.text import parse_yaml, read_text
from ..settings import Reader

NAME = "--nccl-communicator-config-path"
MOST = 999


def read(reader: Reader) -> None:
    """Of a file that is not here nothing is known, which is told."""
    place = reader.settings.word(NAME)
    if place is None:
        return
    path = reader.context.found(place.value)
    if path is None:
        reader.building.note(
            "nccl-configuration-missing", f"{NAME} {place.value} is not here: NCCL's own limits are meant"
        )
        reader.building.because(NAME, "not here: NCCL's own limits of channels are meant")
        return
    found = ",".join(
        limits
        for name, options in parse_yaml(read_text(path), str(path)).mapping.items()
        if (limits := _limits(name, options.mapping))
    )
    if found:
        reader.building.put("megatron.nccl_blocks", Node(found, place.origin), NAME)
    else:
        reader.building.because(NAME, "no group has min_ctas or max_ctas")


def _limits(name: str, options: Mapping[str, Node]) -> str:
    """``name=least-most``; empty where neither is given. Through sockets NCCL has no buffers on the device."""
    network = options.get("net_name")
    if network is not None and str(network.value).lower() == "socket":
        raise network.wrong(
            "net_name", "is not modelled for a single group; the variable NCCL_NET=Socket is, for all groups"
        )
    values = [options.get(key) for key in ("min_ctas", "max_ctas")]
    if not any(values) or not re.fullmatch(r"[a-z_]{1,30}", name):
        return ""
    return f"{name}=" + "-".join("" if one is None else str(_number(one)) for one in values)


def _number(node: Node) -> int:
    if type(node.value) is not int or not 0 < node.value <= MOST:
        raise node.wrong(NAME, f"must be a whole number of channels from 1 to {MOST}")
    return node.value
