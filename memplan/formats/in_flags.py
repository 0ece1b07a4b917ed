"""A job of another tool in memplan's flags."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from shlex import quote

from ..plan.errors import Node, one_line, shown
from ..plan.hub import twin
from ..plan.read import SAVED
from ..values import NamedTuple
from .omegaconf import for_shell


class Elsewhere(NamedTuple):
    """A tool whose configurations are not read."""

    name: str
    marks: tuple[str, ...]
    """As of ``Format``, at the top or one level below."""
    flags: tuple[tuple[str, str], ...] = ()
    """Keys, dotted where they are below the top, and the flags here that say the same; one with a value of its own
    stands for a key that is on."""
    before: str = ""
    """Flags that every file of it comes to."""
    shortened: str = ""
    """What is cut off the front of a value, as a regular expression."""
    implied: tuple[tuple[str, str, str], ...] = ()
    """Keys, what their value begins with, and flags that this means."""
    unmodelled: tuple[tuple[str, str, str], ...] = ()
    """Keys, what their value begins with, and what is trained then that no flag says; ``a!b`` is a where b is off, and
    an empty one whatever a configuration says."""
    otherwise: tuple[tuple[str, str], ...] = ()
    """Keys that are on where a configuration leaves them out, and flags that this means; ``a|b`` is left out where both
    are."""
    asks: tuple[str, ...] = ()
    """Flags that stand with N where a configuration says nothing of them: the tool's own default is not known."""
    recipe: str = ""
    """A regular expression of what Python files of it call, and of the model's name in that."""
    instead: str = ""
    """What to give in its place, where that is no flags."""
    files: tuple[str, ...] = ()
    """Keys whose value may be a file of JSON that is read: the first one is given beside the flags."""
    completed: Callable[[Node], Node] | None = None
    """What the tool itself makes of its keys, some of which mean something only beside others."""


def in_flags(tool: Elsewhere, written: Node, what: str = "") -> str:
    """What to give in place of a file of ``tool``, or of ``what`` is wrong."""
    if tool.instead:
        return f"{what or f'is {tool.name}'}: {tool.instead}"
    before = what or f"is a configuration of {tool.name}, which is not read"
    written = tool.completed(written) if tool.completed is not None else written
    for key, begins, why in tool.unmodelled:
        if not key:
            return f"{before}: {why}"
        if (node := _at(written, key)) is not None and re.match(begins, str(node.value)):
            return f"{before}; {why}, which is not modelled either"
    given = {flag: _for_shell(written, node) for key, flag in tool.flags if (node := _at(written, key)) is not None}
    said = [text for flag, node in given.items() if (text := _said(flag, node, tool.shortened))]
    means = [
        flags
        for key, begins, flags in tool.implied
        if (node := _at(written, key)) is not None and re.match(begins, str(node.value))
    ]
    means += [flags for keys, flags in tool.otherwise if all(_at(written, key) is None for key in keys.split("|"))]
    means += [f"{flag} N" for flag in tool.asks if flag not in given]
    if "--tp" not in given or given["--tp"].value == 1:  # Megatron turns it off then
        said, means = ([one for one in part if one != "--sequence-parallel"] for part in (said, means))
    named = any(one.startswith("--model") for one in said)
    always = tool.before.replace("--model NAME", "").replace("  ", " ").strip() if named else tool.before
    if (gpus := _at(written, "_gpus_")) is not None:
        always = always.replace("--gpus N", f"--gpus {gpus.plain()}")
    file = next((one for key in tool.files if (one := _file(_at(written, key)))), "")
    if file or "--zero" in given:  # says the stage
        means = [one.replace(" --zero N", "") for one in means]
    once: dict[str, str] = {}
    for one in filter(None, (*said, *means)):
        once.setdefault(one.partition(" ")[0], one)
    if "--lora-rank" not in once:
        once.pop("--lora-targets", None)
    same = " ".join(one for one in (file, always, *once.values()) if one)
    left = _left(tool, written) if said or file else []
    return (
        f"{before}: say the job in flags"
        + (f": memplan estimate {same}" if said or file else " (memplan estimate --help)")
        + (f", beside what these flags do not say: {', '.join(left)}" if left else "")
    )


_WEIGHS = re.compile(
    "(?i)offload|lora_(?:dim|module|rank|r$|target|attn|key|proj|mlp|head|to_output)|target_modules|lora.r(?:ank)?$|dora|zero_"
    "|only_optimize|shard|recompute|activ.*checkpoint|checkpoint.*activ|fp8|quanti|capacity|num_layers|^mtp_|_layout$"
    "|[48]bit|liger|^compile|torch_compile|parallel|ulysses|precision|dtype|remove_padding|packing_|freeze|partition"
    "|attention_config|attn_impl|modules_to_save|additional_target"
)
"""What keys are called of which memory depends."""
_FEW = 6


def _left(tool: Elsewhere, written: Node) -> list[str]:
    """What ``written`` says of memory and nothing of ``tool`` stands for, as ``key=value``."""
    taken = {*tool.files, *(part for key, _ in tool.flags for part in key.split("+"))}
    found = [
        one_line(f"{key}={shown(node.plain())}")
        for key, node in _leaves(written)
        if key not in taken and _WEIGHS.search(".".join(key.split(".")[-2:]))
        if (node.value is True or node.value not in _OFF) and not key.startswith("_")
        if not any(key == one and re.match(begins, str(node.value)) for one, begins, _ in tool.implied)
    ]
    return [*found[:_FEW], *(["…"] if len(found) > _FEW else [])]


_OFF: tuple[object, ...] = (
    None,
    False,
    0,
    1,
    "",
    "none",
    "None",
    "no",
    "false",
    "False",
    "auto",
    "null",
    [],
    {},
    SAVED,
)
"""Values that turn nothing on; a size of 1 cuts nothing. ``True`` is 1, too, and no size."""


def _leaves(node: Node, before: str = "") -> Iterator[tuple[str, Node]]:
    """Keys of ``node`` that hold no mapping, dotted where they are below the top."""
    for key, inner in node.mapping.items():
        if inner.mapping:
            yield from _leaves(inner, f"{before}{key}.")
        else:
            yield f"{before}{key}", inner


def _at(written: Node, path: str, *seen: str) -> Node | None:
    """What ``written`` says at ``path``, or the sum of what it says at several, ``a.b+a.c``; of ``a!b`` what stands at
    a unless b is on."""
    if "!" in path:
        path, _, other = path.partition("!")
        return None if (node := _at(written, other)) is not None and node.value is True else _at(written, path)
    if "+" in path:
        parts = [_at(written, part) for part in path.split("+")]
        whole = [part.value for part in parts if part is not None and isinstance(part.value, int)]
        return Node(sum(whole), written.origin) if len(whole) == len(parts) else None
    node = written.mapping.get(path) or written.at(path)
    named = _REFERENCE.fullmatch(node.value) if node is not None and isinstance(node.value, str) else None
    if named is None or named[1] in (path, *seen):
        return node
    return _at(written, named[1], path, *seen) or node  # a key of another file that Hydra puts together with it


def started_as(
    written: Node, called: str, by_deepspeed: bool, gpus: Node | None = None, stage: Node | None = None
) -> Node:
    """``written``, arguments of a script, with what is known beside them: what its launch file and it are ``called``,
    whether DeepSpeed shards what it trains, at which ``stage``, and on how many ``gpus``."""
    folders = called.split("/")
    said = {
        "_called_": Node("/".join(folders[-_NEAR:]), written.origin),
        "_gpus_": gpus,
        "deepspeed": Node(True, written.origin) if by_deepspeed else None,
        "zero_stage": stage,
    }
    return written.with_items({**{key: node for key, node in said.items() if node is not None}, **written.mapping})


_NEAR = 6
"""Names of folders that say what a script trains (``step2_dpo_finetuning/training_scripts/llama2/run.sh``)."""


def _file(node: Node | None) -> str:
    """The file of JSON that ``node`` names."""
    named = node.value if node is not None and isinstance(node.value, str) else ""
    return one_line(named) if named.endswith(".json") else ""


_SIZES = frozenset(("--tp", "--pp", "--cp", "--ep"))
_TARGETS = {**dict.fromkeys(("all", "ALL", "auto", "*"), "all-linear"), "output_proj": "o_proj"}
_TARGETS |= dict.fromkeys(("*.proj", "*_proj"), "all-linear")
"""Other tools' words for linear layers: LLaMA-Factory's, ms-swift's and NeMo AutoModel's for all of them, torchtune's
for the last one of attention."""
_GPUS = frozenset(("--gpus", "--gpus-per-node"))
"""What tools take from the machine, too (``devices: auto`` of LitGPT, -1 of Lightning)."""
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
"""Another key's value, as OmegaConf writes it."""


_UNKNOWN = "${?}"
"""A value that no command can say."""


def _for_shell(written: Node, node: Node) -> Node:
    """``node`` with what OmegaConf puts in it."""
    if isinstance(node.value, list):
        return Node([_for_shell(written, one) for one in node.value], node.origin)
    if not isinstance(node.value, str) or "${" not in node.value:
        return node
    text = for_shell(node.value, lambda path: one.value if (one := _at(written, path)) is not None else None)
    if text is None:
        return Node(_UNKNOWN, node.origin)
    return Node(int(text) if text.isdecimal() else text, node.origin)


def _said(flag: str, node: Node, shortened: str) -> str:
    """``flag`` as the value of another tool's key says it; nothing where that is off."""
    if node.value in (None, False, "false", []):
        return ""
    if " " in flag:
        return flag.strip()
    if flag in _SIZES and node.value == 1:
        return ""
    if node.value == _UNKNOWN:
        return f"{flag} {'NAME' if flag == '--model' else 'N'}"
    items = node.value if isinstance(node.value, list) else [node]
    if isinstance(node.value, dict) or any(isinstance(item.value, (dict, list)) for item in items):
        return ""
    if flag == "--model":
        if not isinstance(node.value, str):
            return ""
        model = re.sub(f"^{shortened}", "", str(node.value)) if shortened else str(node.value)
        return f"{flag} {one_line(model) if '$' in model else twin(model, node) or one_line(model)}"
    if flag in _GPUS and not str(node.value).isdecimal() and "$" not in str(node.value):
        return f"{flag} N"
    if flag == "--lora-targets":
        targets = [str(item.value) for item in items if item.value is not True]
        named = one_line(",".join(_TARGETS.get(one, one) for one in targets))
        return f"{flag} {quote(named)}" if named else ""
    text = ",".join(re.sub(f"^{shortened}", "", str(item.value)) if shortened else str(item.value) for item in items)
    return f"{flag} {one_line(text) if '$' in text else quote(one_line(text))}"
