"""A job of another tool in memplan's flags."""

from __future__ import annotations

import re

from ..plan.errors import Node, one_line
from ..plan.hub import twin
from .elsewhere import Elsewhere


def in_flags(tool: Elsewhere, written: Node, what: str = "") -> str:
    """What to give in place of a file of ``tool``, or of ``what`` is wrong."""
    if tool.instead:
        return f"{what or f'is {tool.name}, and no configuration'}: {tool.instead}"
    before = what or f"is a configuration of {tool.name}, which is not read"
    for key, begins, why in tool.unmodelled:
        if (node := _at(written, key)) is not None and re.match(begins, str(node.value)):
            return f"{before}; {why}, which is not modelled either"
    given = {flag: node for key, flag in tool.flags if (node := _at(written, key)) is not None}
    said = [text for flag, node in given.items() if (text := _said(flag, node, tool.shortened))]
    means = [
        flags
        for key, begins, flags in tool.implied
        if (node := _at(written, key)) is not None and re.match(begins, str(node.value))
    ]
    if "--tp" not in given or given["--tp"].value == 1:  # Megatron turns it off then
        said = [one for one in said if one != "--sequence-parallel"]
    named = any(one.startswith("--model") for one in said)
    always = tool.before.replace("--model NAME", "").replace("  ", " ").strip() if named else tool.before
    file = next((one for key in tool.files if (one := _file(_at(written, key)))), "")
    if file or "--zero" in given:  # says the stage
        means = [one.replace(" --zero N", "") for one in means]
    same = " ".join(one for one in (file, always, *said, *means) if one)
    return f"{before}: say the job in flags" + (
        f": memplan estimate {same}" if said or file else " (memplan estimate --help)"
    )


def _at(written: Node, path: str, *seen: str) -> Node | None:
    """What ``written`` says at ``path``, or the sum of what it says at several: ``a.b+a.c``."""
    if "+" in path:
        parts = [_at(written, part) for part in path.split("+")]
        whole = [part.value for part in parts if part is not None and isinstance(part.value, int)]
        return Node(sum(whole), written.origin) if len(whole) == len(parts) else None
    node = written.mapping.get(path) or written.at(path)
    named = _REFERENCE.fullmatch(node.value) if node is not None and isinstance(node.value, str) else None
    return _at(written, named[1], path, *seen) if named is not None and named[1] not in (path, *seen) else node


def with_engine(written: Node, by_deepspeed: bool) -> Node:
    """``written``, arguments of a script, with what its launcher says: DeepSpeed's starts what DeepSpeed shards."""
    said = {"deepspeed": Node(True, written.origin)} if by_deepspeed else {}
    return written.with_items({**said, **written.mapping})


def _file(node: Node | None) -> str:
    """The file of JSON that ``node`` names."""
    named = node.value if node is not None and isinstance(node.value, str) else ""
    return one_line(named) if named.endswith(".json") else ""


_SIZES = frozenset(("--tp", "--pp", "--cp", "--ep"))
_GPUS = frozenset(("--gpus", "--gpus-per-node"))
"""What tools take from the machine, too (``devices: auto`` of LitGPT, -1 of Lightning)."""
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
"""Another key's value, as OmegaConf writes it."""


def _said(flag: str, node: Node, shortened: str) -> str:
    """``flag`` as the value of another tool's key says it; nothing where that is off."""
    if node.value in (None, False, "false", []):
        return ""
    if " " in flag:
        return flag.strip()
    if flag in _SIZES and node.value == 1:
        return ""
    items = node.value if isinstance(node.value, list) else [node]
    if isinstance(node.value, dict) or any(isinstance(item.value, (dict, list)) for item in items):
        return ""
    if flag == "--model":
        model = re.sub(f"^{shortened}", "", str(node.value)) if shortened else str(node.value)
        return f"{flag} {twin(model, node) or one_line(model)}"
    if flag in _GPUS and not str(node.value).isdecimal():
        return f"{flag} N"
    text = ",".join(re.sub(f"^{shortened}", "", str(item.value)) if shortened else str(item.value) for item in items)
    return f"{flag} {one_line(text)}"
