"""A plan as the arguments of Megatron-Core's ``pretrain_gpt.py`` and ``pretrain_bert.py``, in a script that starts it.

Data, tokenizer and learning rate are in no plan: the last group of arguments stands for them.
"""

from __future__ import annotations

from typing import Any

from ...plan.plan import Plan, ResolvedPlan
from ...plan.read import Flags
from ..exported import PLACE, Arguments, Draft, Script, Target, sizes_of
from ..training_scripts import read_back
from . import blocks
from .hybrid import settled as settled_hybrid
from .sharding import is_sharded, is_torch_sharded
from .table import ROWS
from .training import largest_chunk

YOURS = (
    ("--mock-data",),
    ("--split", "99,1,0"),
    ("--train-iters", 10),
    ("--lr", "1.0e-4"),
    ("--eval-iters", 0),
)


SCRIPTS = {"bert": "pretrain_bert.py", "t5": "pretrain_t5.py", "hybrid": "pretrain_hybrid.py"}
"""Those that train families of their own."""


def write(plan: ResolvedPlan) -> Draft:
    """The script that trains ``plan``."""
    arguments = Arguments()
    arguments.rows(ROWS, plan)
    for name in blocks.BESIDE:
        arguments.switch("MODEL", name, blocks.differs(plan))
    for name, *values in (("--tokenizer-type", "NullTokenizer"), ("--vocab-size", plan.model.vocab), *YOURS):
        arguments.add("YOURS", str(name), *values)
    sharded = is_sharded(plan) or is_torch_sharded(plan)
    if is_sharded(plan):
        arguments.add("REDUCTION", "--ckpt-format", "fsdp_dtensor")
    parallel = not sharded and (plan.layout.tp > 1 or plan.layout.cp > 1)  # validate_args demands the variable of both
    environment = {**({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if parallel else {}), **plan.environment}
    kind = "hybrid" if plan.model.layer_pattern else plan.model.family
    python = SCRIPTS.get(kind, "pretrain_gpt.py")
    sizes = sizes_of(plan, "tp", "pp", "vpp", "cp", *(("ep",) if plan.layout.ep > 1 else ()), "dp")
    yours = "Not in a plan, and yours to replace: the tokenizer (here one of as many tokens), data, steps."
    script = Script(
        f"{plan.model.name}: Megatron-LM's {python} on {sizes}.",
        "torchrun",
        python,
        arguments,
        environment,
        remarks={"YOURS": yours},
    )
    content = {"environment": environment, "script": python, "arguments": arguments.content()}
    return Draft(script.text(plan), content)


def read(text: str, flags: Flags, settings: tuple[str, ...]) -> Plan:
    """The plan that ``--from megatron`` reads from the script."""
    return read_back(text, "megatron", flags)


def names_settled(plan: ResolvedPlan) -> dict[str, Any]:
    """Both Megatrons have AdamW alone, and call it adam; their GELU, which is fused, is the tanh form."""
    updates: dict[str, Any] = {}
    if plan.optimizer.name == "adamw":
        updates["optimizer"] = plan.optimizer.model_copy(update={"name": "adam"})
    if plan.model.activation == "gelu_new":
        updates["model"] = plan.model.model_copy(update={"activation": "gelu"})
    return updates


def settled(plan: ResolvedPlan) -> dict[str, Any]:
    """Fusions of what the model has not, and what Megatron-LM turns off by itself (``validate_args``); a block that is
    recomputed whole is as many layers as the largest chunk has; chunks of attention are no shorter than sequences."""
    model, given, recompute, changes = plan.model, plan.megatron, plan.recompute, {}
    if model.gated or not model.mlp_bias:
        changes["bias_gelu_fusion"] = False
    if not model.gated:
        changes["bias_swiglu_fusion"] = False
    if model.positions != "rotary":
        changes["rope_fusion"] = False
    if plan.precision.dtype == "fp16":  # dynamic loss scaling finds them
        changes["check_for_nan"] = False
    softmax = given.attention_softmax_in_fp32 or given.query_key_layer_scaling
    megatron: dict[str, Any] = {**changes, "attention_softmax_in_fp32": softmax}
    if plan.layout.cp == 1:
        megatron["cp_communication"] = "p2p"
    if recompute.mode == "full" and recompute.method == "block":
        most = largest_chunk(plan)
        layers = most if recompute.layers is None else min(recompute.layers, most)
        recompute = recompute.model_copy(update={"layers": layers})
    updates = names_settled(plan) | settled_hybrid(plan)
    own = {"attention_chunk": None} | ({} if model.qk_norm else {"qk_norm_over": "head"})
    if any(getattr(model, name) != value for name, value in own.items()):
        updates["model"] = updates.get("model", model).model_copy(update=own)
    return {**updates, "megatron": given.model_copy(update=megatron), "recompute": recompute}


TARGET = Target(
    name="megatron",
    framework="megatron",
    what="Megatron-LM's arguments",
    write=write,
    read=read,
    command=("--from", "megatron", PLACE),
    beside=frozenset(
        {"hardware", "headroom", "torch", "megatron.transformer_engine", "model.name", "model.family", "environment"}
    ),
    settled=settled,
)
"""Beside it are the machine, versions of libraries, and names."""
