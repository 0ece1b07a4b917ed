"""Names of values as other tools write them, made the names that a plan holds.

Case, hyphens and underscores do not matter. A name that could be two things is refused with both; one that nothing
knows stays as it is, and validation refuses it.

Flags whose value says more than one thing, taken apart: ``--gpu 8xh100``, ``--framework torchtitan``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from ..values import pattern
from .errors import Node, PlanError, scalar, wrong_at
from .fields import Kind, PlanField

_DTYPES = {
    **dict.fromkeys(("bfloat16", "bfloat", "bf16true"), "bf16"),
    **dict.fromkeys(("float16", "half", "f16", "16true"), "fp16"),
    **dict.fromkeys(("float32", "float", "f32", "32", "32true"), "fp32"),
}
"""PyTorch's names, without ``torch.``, and Lightning's."""
_MIXED = (
    "is fp32 parameters with compute in {0}: --dtype {0} --autocast in single and ddp; fsdp, deepspeed and megatron "
    "keep fp32 main parameters by themselves, with --dtype {0}"
)

_ATTENTION = {
    **dict.fromkeys(("flash-attention", "flash-attn", "fa"), "flash"),
    **dict.fromkeys(("fa2", "flash2", "flash-attn-2"), "flash_attention_2"),
    **dict.fromkeys(("fa3", "flash3", "flash-attn-3"), "flash_attention_3"),
    **dict.fromkeys(("fa4", "flash4", "flash-attn-4"), "flash_attention_4"),
    **dict.fromkeys(("kernels-community/flash-attn", "kernels-community/flash-attn2"), "flash_attention_2"),
    **dict.fromkeys(("kernels-community/flash-attn3", "kernels-community/vllm-flash-attn3"), "flash_attention_3"),
    "flex": "flex_attention",
    "sdpa": "flash",
}
"""transformers' ``attn_implementation``. ``sdpa`` takes the best kernel of PyTorch's."""

_FRAMEWORKS = {
    **dict.fromkeys(("fsdp2", "fully-shard", "fully-sharded-data-parallel"), "fsdp"),
    **dict.fromkeys(("megatron-lm", "megatron-core", "mcore"), "megatron"),
    "distributed-data-parallel": "ddp",
}

_QUANTISED = {
    **dict.fromkeys(("4bit", "int4", "bnb4bit", "bnb", "bitsandbytes", "qlora"), "nf4"),
    **dict.fromkeys(("8bit", "llmint8", "bnb8bit"), "int8"),
}
"""``load_in_4bit``, with the type that everybody takes."""

_ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "attention": _ATTENTION,
    "framework": _FRAMEWORKS,
    "quantisation.kind": _QUANTISED,
}
"""By path of a field."""

_OF_TRL = "is not modelled of trl's trainers: {}; sft, dpo, kto, orpo, cpo, simpo, grpo, rloo and reward are"

_SERVING = "is a kernel of inference servers, which training does not run; training takes {}"
_KERNELS = "eager, flash, sdpa, flash_attention_2, flash_attention_3, flash_attention_4 or flex_attention"

_REFUSED: Mapping[str, Mapping[str, str]] = {
    "precision.fp8": dict.fromkeys(
        ("hybrid", "e4m3"), "is a format, not how operands are scaled: --fp8 delayed --fp8-format hybrid, or e4m3"
    ),
    "precision.dtype": {
        **dict.fromkeys(("bf16mixed", "mixedbf16"), _MIXED.format("bf16")),
        **dict.fromkeys(("16mixed", "fp16mixed", "mixed", "mixed16", "amp"), _MIXED.format("fp16")),
        "16": "could be fp16 or bf16; name one",
        "tf32": "is how products of fp32 tensors are computed, and changes no tensor: --dtype fp32",
        **dict.fromkeys(
            ("fp8", "float8", "e4m3", "fp8e4m3", "float8e4m3fn", "mxfp8"),
            "is for matrix products of linear layers, in addition to --dtype bf16: --fp8 delayed, tensorwise, rowwise, "
            "blockwise or mxfp8",
        ),
        **dict.fromkeys(("fp4", "nvfp4", "mxfp4"), "is for matrix products of linear layers: --dtype bf16 --fp4 nvfp4"),
        **dict.fromkeys(
            ("int8", "8bit", "int4", "4bit", "nf4"),
            "is a type of frozen weights under adapters: --quantisation nf4 --lora-rank 16 keeps them in 4 bits, int8 "
            "in 8",
        ),
        "auto": "must be one of fp32, fp16, bf16: in what dtype the model is loaded",
    },
    "recompute.mode": {
        **dict.fromkeys(
            ("true", "yes", "on", "1"),
            "must be none, selective or full: gradient checkpointing of whole layers is full, Megatron-LM's "
            "--recompute-activations selective",
        ),
        **dict.fromkeys(
            ("block", "uniform"), "is a method of full recompute: --recompute full --recompute-method uniform"
        ),
    },
    "attention": {
        **dict.fromkeys(
            ("paged", "pagedattention", "vllm", "flashinfer", "tensorrt", "trtllm", "sdpapaged", "flashdecoding"),
            _SERVING.format(_KERNELS),
        ),
        **dict.fromkeys(
            ("xformers", "memoryefficient", "memefficient", "sage", "sageattention", "cudnn", "math", "ring", "linear"),
            f"is not modelled: must be {_KERNELS}; megatron's own choice of kernels is --attention-backend",
        ),
    },
    "trainer.loop": {
        **dict.fromkeys(("bco",), _OF_TRL.format("a classifier of prompts next to the policy")),
        **dict.fromkeys(("prm",), _OF_TRL.format("a head with scores of steps")),
        **dict.fromkeys(
            ("ppo", "onlinedpo", "gkd", "xpo", "nashmd"),
            _OF_TRL.format("generation between steps, and log-probabilities of what was generated"),
        ),
        **dict.fromkeys(
            ("distillation", "gold", "minillm", "sdft", "sdpo", "ssd"),
            _OF_TRL.format("what a teacher, or the model itself, generated, and log-probabilities of it"),
        ),
        "tpo": _OF_TRL.format("three completions of each prompt"),
        "asyncgrpo": _OF_TRL.format("steps on what was generated meanwhile"),
    },
    "layout.zero": {
        **dict.fromkeys(("zero2offload", "2offload"), "is more than a stage: --zero 2 --offload-optimizer cpu"),
        **dict.fromkeys(
            ("zero3offload", "3offload"), "is more than a stage: --zero 3 --offload-optimizer cpu --offload-param cpu"
        ),
        **dict.fromkeys(
            ("infinity", "zeroinfinity"), "is more than a stage: --zero 3 --offload-optimizer nvme --offload-param nvme"
        ),
    },
    "quantisation.kind": {
        **dict.fromkeys(
            ("hqq", "aqlm", "eetq", "quanto", "torchao", "fp8", "mxfp4"),
            "is not modelled: quantised weights under adapters can be nf4, fp4, gptq, awq or int8",
        ),
    },
}
"""What other tools have and is refused by name, written plainly, by path of a field."""

_MAKERS = pattern(r"(?i)nvidia|geforce|tesla|amd|instinct")
OPEN = frozenset({"auto", "?", "max", "any"})
"""What people write for a number that somebody else should find."""
_GIGA = pattern(r"(?i)(?<=[-_ (])([0-9]+)\s?g(?![a-z0-9])")
"""A size of memory without its B: ``A100-80G``."""
_STAGE = pattern(r"(?i)(?:zero|stage|zero[-_ ]?stage)[-_ ]?([0-3])")
_THOUSANDS = pattern(r"([1-9][0-9]{0,5})\s*([kKmM])")
_LENGTHS = frozenset({"batch.seq", "model.positions_max"})


def respelled(field: PlanField, node: Node) -> Node:
    """``node``, the value of ``field``, with its name as a plan writes it."""
    if not isinstance(node.value, str):
        return node
    if field.path == "hardware.gpu":
        return _renamed(node, _gpu(node))
    if field.kind is Kind.INTEGER and node.value.lower() in OPEN:
        raise node.wrong(field.path, _left_open(field))
    if field.path in _CHECKED:
        _CHECKED[field.path](node)
    if field.kind is Kind.CHOICE:
        return _choice(field, node)
    if field.path == "layout.zero" and (stage := _STAGE.fullmatch(node.value)):
        return Node(int(stage[1]), node.origin, node.text)
    if (why := _REFUSED.get(field.path, {}).get(plain(node.value))) is not None:
        raise node.wrong(field.path, why)
    if field.path in _LENGTHS and (match := _THOUSANDS.fullmatch(node.value)):
        return Node(int(match[1]) << (10 if match[2] in "kK" else 20), node.origin, node.text)
    return node


def _left_open(field: PlanField) -> str:
    if field.path == "hardware.gpus":
        return "must be a whole number, the most that there are: a search with --objective gpus finds the fewest"
    return "must be a whole number; suggest-partition finds what fits, where it is left out"


def with_optimizer(plan: Node) -> Node:
    """``plan`` with the Trainer's name of an optimizer (``adamw_torch_fused``), or its call in Python
    (``torch.optim.AdamW(fused=True)``), as the fields that it stands for."""
    section, name = plan.mapping.get("optimizer"), plan.at("optimizer.name")
    if section is None or name is None or not isinstance(name.value, str):
        return plan
    from ..optimizers import ROOMS, class_names, not_modelled, trainer_names

    if name.value in ROOMS:
        return plan
    call = _CALL.fullmatch(name.value)
    written = call[1] if call is not None else name.value
    given = {**{one: {"name": one} for one in ROOMS}, **trainer_names(), **class_names()}
    called: dict[str, Mapping[str, Any]] = {plain(name): fields for name, fields in given.items()}
    found = called.get(plain(written))
    if found is None:
        why = not_modelled(plain(written))
        if why:
            raise name.wrong("optimizer.name", why)
        return plan
    settings = dict(_settings_of(call[2], name)) if call is not None and call[2] else {}
    fields = {key: Node(value, name.origin) for key, value in {**settings, **found}.items()}
    for key, node in section.mapping.items():
        if key != "name" and key in fields and fields[key].value != node.value:
            by_flag = [one.origin.source.startswith("--") for one in (name, node)]
            if by_flag[0] != by_flag[1]:  # a flag is over what a file says
                fields[key] = fields[key] if by_flag[0] else node
                continue
            own = fields[key].value
            raise node.wrong(
                f"optimizer.{key}",
                f"is {own} with optimizer {name.value}; name the optimizer {found['name']} to choose it",
            )
    return plan.with_items({"optimizer": Node({**section.mapping, **fields}, section.origin)})


_CALL = pattern(r"\s*(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)\s*(?:\((.*)\))?\s*")
_IMPLEMENTED = {("fused", "True"): "fused", ("foreach", "True"): "foreach", ("foreach", "False"): "for-loop"}
_NO_SIZE = frozenset(
    {"params", "lr", "betas", "eps", "fused", "foreach", "capturable", "differentiable", "adam_w_mode", "maximize"}
)
"""Arguments of an optimizer that no tensor's size depends on, or that ``_IMPLEMENTED`` reads."""


def _settings_of(arguments: str, node: Node) -> Iterator[tuple[str, object]]:
    """Fields of a plan's ``optimizer`` that the keyword arguments of its call set."""
    for argument in re.split(r",(?![^(\[]*[)\]])", arguments):
        name, equals, value = (part.strip() for part in argument.partition("="))
        if not equals:
            continue
        if (name, value) in _IMPLEMENTED:
            yield "implementation", _IMPLEMENTED[name, value]
        elif name in ("weight_decay", "momentum"):
            yield name, scalar(value, node.origin).value
        elif name not in _NO_SIZE and value not in ("False", "None"):
            known = ", ".join(sorted({"weight_decay", "momentum", *_NO_SIZE}))
            raise node.wrong(
                "optimizer.name", f"{name} is not modelled; memplan reads these arguments of an optimizer: {known}"
            )


def plain(name: str) -> str:
    """What stays of a name in which case, hyphens, underscores, dots, colons and blanks do not matter."""
    return re.sub(r"[-_.:\s]", "", name.lower())


def meant(wanted: str, names: Iterable[tuple[str, Collection[str]]]) -> list[str]:
    """Those of ``names`` that are ``wanted`` once written plainly, or are also called so."""
    wanted = plain(wanted)
    return [name for name, also in names if wanted in {plain(other) for other in (name, *also)}]


def _choice(field: PlanField, node: Node) -> Node:
    name = str(node.value)
    if name in field.choices:
        return node
    same = meant(name, ((choice, ()) for choice in field.choices))
    if same:
        return _renamed(node, same[0])
    why = _REFUSED.get(field.path, {}).get(plain(name))
    if why is not None:
        raise PlanError(field.path, name, why, origin=node.origin)
    known = {plain(other): value for other, value in _ELSEWHERE.get(field.path, {}).items()}
    if plain(name) in known:
        return _renamed(node, known[plain(name)])
    dtype = _DTYPES.get(plain(name.lower().removeprefix("torch.")))
    return _renamed(node, dtype) if dtype in field.choices else node


def _renamed(node: Node, name: str) -> Node:
    return Node(name, node.origin, node.text)


def gpus_called(name: str) -> list[str]:
    """GPUs that are also called ``name``."""
    from ..device.gpus import ALSO_CALLED, GPUS

    if name in GPUS:
        return [name]
    bare = _MAKERS.sub("", name)
    called = [(gpu.name, (_MAKERS.sub("", gpu.title), *ALSO_CALLED[gpu.name])) for gpu in GPUS.values()]
    return meant(bare, called) or meant(_GIGA.sub(r"\1gb", bare), called)


def _gpu(node: Node) -> str:
    name = str(node.value)
    found = gpus_called(name)
    if len(found) > 1:
        raise PlanError("hardware.gpu", name, f"could be {' or '.join(found)}; name one", origin=node.origin)
    return found[0] if found else name


def _check_gpus(node: Node) -> None:
    """Refuses a GPU's name in the place of their number."""
    name = str(node.value)
    if gpus_called(name):
        problem = f"must be a whole number; the GPU's name is --gpu {name}, and both at once --gpu 8x{name}"
        raise PlanError("hardware.gpus", name, problem, origin=node.origin)


def _check_sequences(node: Node) -> None:
    """Refuses a global batch in tokens, ``4M``, with how many sequences that is."""
    match = _TOKENS.fullmatch(str(node.value))
    if match is None or not (match[2] or match[3]):
        return
    tokens = float(match[1]) * (1 << {"": 0, "k": 10, "m": 20}[match[2].lower()])
    each = " or ".join(f"{max(round(tokens / seq), 1):,} of {seq:,}" for seq in (4096, 8192))
    raise node.wrong("batch.gbs", f"must be a whole number of sequences: tokens divided by seq, {each} tokens")


_TOKENS = pattern(r"(?i)\s*([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([km]?)\s*(tok(?:en)?s?)?\s*")
_CHECKED = {"hardware.gpus": _check_gpus, "batch.gbs": _check_sequences}
"""Fields whose values may be of another field, or in another unit."""


Flags: TypeAlias = "Mapping[str, str | tuple[str, ...]]"

_COUNT = r"([1-9][0-9]{0,5})"
_TIMES = r"\s*[xX\u00d7*]\s*"
_GPU_AND_COUNT = pattern(rf"\s*(?:{_COUNT}{_TIMES})?{_COUNT}{_TIMES}(\S.*?)\s*")
_COUNT_LAST = pattern(rf"\s*(?:gpu:)?(\S.*?)(?:{_TIMES}|\s*:\s*){_COUNT}\s*")
_NODES_AND_GPUS = pattern(rf"\s*{_COUNT}{_TIMES}{_COUNT}\s*")


def with_said_at_once(flags: Flags) -> Flags:
    """``flags`` where each says one thing: ``--gpu 8xh100`` is ``gpu`` and ``gpus``, ``--framework torchtitan`` a
    framework and whose code runs on it."""
    from ..frameworks import STAND_FOR

    named = flags.get("framework")
    stands_for = STAND_FOR.get(plain(named), {}) if isinstance(named, str) else {}
    for name, value in stands_for.items():
        said = flags.get(name, value) if name != "framework" else value
        if said != value:
            raise wrong_at(f"--{name}", f"{said} is not the {value} of --framework {named}")
    return _counted({**flags, **stands_for})


def gpus_named(text: str) -> tuple[str, int, int | None] | None:
    """The GPU, their number, and how many of them a node has where that is said, of ``8xH100``, ``h100:8`` or
    ``2x8xH100``; ``None`` where ``text`` names no GPU with a number."""
    if gpus_called(text):
        return None
    for form, order in ((_GPU_AND_COUNT, (3, 2, 1)), (_COUNT_LAST, (1, 2, 0))):
        match = form.fullmatch(text)
        if match is not None and gpus_called(match[order[0]]):
            nodes = match[order[2]] if order[2] else None
            each = int(match[order[1]])
            return match[order[0]], each * int(nodes or 1), each if nodes else None
    return None


def _counted(flags: Flags) -> Flags:
    """``flags`` where ``gpu`` is a name alone, and ``gpus`` a number: ``8xh100`` is ``gpu`` h100 and ``gpus`` 8,
    ``--gpus 2x8`` two nodes of eight."""
    made = dict(flags)
    for flag in ("gpu", "gpus"):
        text = made.get(flag)
        if not isinstance(text, str) or text.isdigit():
            continue
        nodes = _NODES_AND_GPUS.fullmatch(text) if flag == "gpus" else None
        found = gpus_named(text)
        if found is not None:
            _say(made, "gpu", found[0], flag, text)
            _say(made, "gpus", str(found[1]), flag, text)
            if found[2] is not None:
                _say(made, "gpus-per-node", str(found[2]), flag, text)
        elif nodes is not None:
            _say(made, "gpus", str(int(nodes[1]) * int(nodes[2])), flag, text)
            _say(made, "gpus-per-node", nodes[2], flag, text)
    return made


def _say(flags: dict[str, str | tuple[str, ...]], name: str, value: str, by: str, text: str) -> None:
    """Sets the flag ``name`` to what ``--by text`` says of it, unless it says another thing itself."""
    said = value if name == by else flags.get(name, value)
    alike = said == value or (name == "gpu" and isinstance(said, str) and gpus_called(said) == gpus_called(value))
    if not alike:
        raise wrong_at(f"--{name}", f"{said} is not the {value} of --{by} {text}")
    flags[name] = value if name == by else said
