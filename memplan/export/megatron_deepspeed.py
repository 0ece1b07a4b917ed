"""A plan as the launch script of BigScience's Megatron-DeepSpeed: arguments, ``ds_config.json``, stages.

``megatron/arguments.py``, ``megatron/model/gpt_model.py`` (``GPTModelPipe``) and ``pretrain_gpt.py`` of
bigscience-workshop/Megatron-DeepSpeed; the form of the script is that of BigScience's own trainings. Stages are a
partition method where one makes the plan's cut, and otherwise a class of a few lines (``pipe_methods``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import __version__
from ..frameworks.megatron_deepspeed import parallel_shape, stage_bounds
from ..plan.completion import launched_plan
from ..plan.errors import Origin
from ..plan.launch.files import words_of
from ..plan.launch.read import Choices, launched
from ..plan.launch.vocabulary import GPT2_TOKENS
from ..plan.node import Node
from ..plan.plan import Plan
from ..plan.read import Flags
from .exported import PLACE, READ_BACK, Draft, Target
from .pipe_methods import cut_today, is_deepspeeds, method_of, python_of
from .script import Arguments, array, comment, exports, heredoc, nodes, started

POSITIONS = {"learned": "absolute", "alibi": "alibi"}
CONFIG = "./ds_config.json"
STAGES = "planned_stages"
"""The module with the stages, where a method does not make them."""

LAUNCHER = (
    "python -u -m torch.distributed.launch",
    "--nproc_per_node {per_node}",
    "--nnodes {nodes}",
    '--node_rank "${{NODE_RANK:-0}}"',
    '--master_addr "${{MASTER_ADDR:-localhost}}"',
    '--master_port "${{MASTER_PORT:-6000}}"',
)


def write(plan: Plan) -> Draft:
    """The script that trains ``plan``."""
    method, python, warning = _stages(plan)
    arguments = Arguments()
    _model(arguments, plan)
    _layout(arguments, plan, method)
    _optimizer(arguments, plan)
    _deepspeed(arguments, plan)
    _yours(arguments, plan)
    config = json.dumps(_config(plan), indent=2)
    lines = [*_head(plan), *exports(plan.environment)]
    lines += ["", "# gradient_clipping is in no plan: BigScience's.", *heredoc(CONFIG, config)]
    if python:
        lines += ["", *heredoc(f"{STAGES}.py", python)]
    for group, given in arguments.groups.items():
        if group == "YOURS":
            told = f"Not in a plan, and yours to replace: a tokenizer of {plan.model.vocab:,} tokens, data, steps."
            lines += ["", *comment(told)]
        elif group == "PARALLEL" and warning:
            lines += ["", *comment(warning)]
        else:
            lines.append("")
        lines += array(group, given)
    count, per_node = nodes(plan)
    launcher = [word.format(per_node=per_node, nodes=count) for word in LAUNCHER]
    lines += ["", *started(launcher, "pretrain_gpt.py", list(arguments.groups))]
    content = {
        "environment": dict(plan.environment),
        "arguments": arguments.content(),
        "ds_config": _config(plan),
        "stages": python or None,
    }
    flags = {} if _is_gpt2s(plan) else {"vocab": str(plan.model.vocab)}
    return Draft("\n".join(lines) + "\n", content, flags)


def _head(plan: Plan) -> Iterator[str]:
    layout = plan.layout
    sizes = ", ".join(f"{name} {getattr(layout, name)}" for name in ("tp", "pp", "dp", "zero"))
    yield "#!/bin/bash"
    yield from comment(f"{plan.model.name}: BigScience's Megatron-DeepSpeed on {plan.hardware.gpus:,} GPUs ({sizes}).")
    yield f"# Written by memplan {__version__}. Estimate it with"
    yield READ_BACK


def _stages(plan: Plan) -> tuple[str | None, str, str]:
    """The partition method, or the Python that makes the cut, and a word of warning."""
    chosen = plan.pipeline.partition
    entries, bounds = stage_bounds(plan, parallel_shape(plan))
    if plan.precision.dtype == "fp32":  # then nothing is converted behind the head
        entries, bounds = entries[:-1], [*bounds[:-1], bounds[-1] - 1]
    if isinstance(chosen, str) and is_deepspeeds(chosen):
        now = cut_today(chosen, entries, plan.layout.pp)
        if now == bounds:
            return chosen, "", ""
        cut = ",".join(map(str, bounds))
        return chosen, "", f"DeepSpeed of 2021 is meant, which cuts at {cut}; newer ones cut otherwise by this method."
    method = method_of(bounds, entries)
    if method is not None:
        return method, "", ""
    told = f"No partition method makes these stages: pretrain_gpt.py takes GPTModelPipe from {STAGES}.py instead."
    return None, python_of(bounds, STAGES), told


def _model(arguments: Arguments, plan: Plan) -> None:
    spec, group = plan.model, "MODEL"
    for name, value in (
        ("--num-layers", spec.layers),
        ("--hidden-size", spec.hidden),
        ("--ffn-hidden-size", spec.ffn),
        ("--num-attention-heads", spec.heads),
        ("--kv-channels", spec.head_dim),
        ("--seq-length", plan.batch.seq),
        ("--max-position-embeddings", spec.positions_max),
        ("--position-embedding-type", POSITIONS[spec.positions]),
        ("--hidden-dropout", spec.hidden_dropout),
        ("--attention-dropout", spec.attention_dropout),
    ):
        arguments.add(group, name, value)
    arguments.switch(group, "--embed-layernorm", spec.embedding_norm)


def _layout(arguments: Arguments, plan: Plan, method: str | None) -> None:
    group = "PARALLEL"
    arguments.add(group, "--tensor-model-parallel-size", plan.layout.tp)
    arguments.add(group, "--pipeline-model-parallel-size", plan.layout.pp)
    if method is not None:
        arguments.add(group, "--pp-partition-method", method)
    arguments.add("BATCH", "--micro-batch-size", plan.batch.mbs)
    arguments.add("BATCH", "--global-batch-size", plan.batch.gbs)
    dtype = plan.precision.dtype
    arguments.switch("BATCH", f"--{dtype}", dtype != "fp32")


def _optimizer(arguments: Arguments, plan: Plan) -> None:
    optimizer, recompute, group = plan.optimizer, plan.recompute, "OPTIMIZER"
    arguments.add(group, "--optimizer", "sgd" if optimizer.name == "sgd" else "adam")
    arguments.switch(group, "--use-bnb-optimizer", optimizer.name == "adam8bit")
    if optimizer.name == "sgd":
        arguments.add(group, "--sgd-momentum", optimizer.momentum)
    if recompute.mode == "full":
        arguments.add("RECOMPUTE", "--checkpoint-activations")
        if recompute.layers is not None:
            arguments.add("RECOMPUTE", "--checkpoint-num-layers", recompute.layers)


def _deepspeed(arguments: Arguments, plan: Plan) -> None:
    arguments.add("DEEPSPEED", "--deepspeed")
    arguments.add("DEEPSPEED", "--deepspeed_config", CONFIG)
    arguments.add("DEEPSPEED", "--zero-stage", plan.layout.zero)


def _config(plan: Plan) -> dict[str, Any]:
    """DeepSpeed's configuration, whose ZeRO stage counts; without ``grad_accum_dtype`` gradients of bf16 accumulate
    in fp32 at stage 0 (``get_data_types``)."""
    dtype, gradients, stage = plan.precision.dtype, plan.precision.gradients, plan.layout.zero
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.batch.mbs,
        "train_batch_size": plan.batch.gbs,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if gradients != ("fp32" if dtype == "bf16" and stage == 0 else dtype):
        config["data_types"] = {"grad_accum_dtype": gradients}
    return config


def _yours(arguments: Arguments, plan: Plan) -> None:
    """Tokenizer, data and steps."""
    group = "YOURS"
    if _is_gpt2s(plan):
        arguments.add(group, "--tokenizer-type", "GPT2BPETokenizer")
        arguments.add(group, "--vocab-file", "gpt2-vocab.json")
        arguments.add(group, "--merge-file", "gpt2-merges.txt")
    else:
        arguments.add(group, "--tokenizer-type", "PretrainedFromHF")
        arguments.add(group, "--tokenizer-name-or-path", "your-tokenizer")
    arguments.add(group, "--data-path", "your-data_text_document")
    arguments.add(group, "--split", "949,50,1")
    arguments.add(group, "--train-iters", 10)
    arguments.add(group, "--lr", "1.0e-4")


def _is_gpt2s(plan: Plan) -> bool:
    """GPT-2's own vocabulary needs no other word than its tokenizer's name."""
    return plan.model.vocab == GPT2_TOKENS


def read(text: str, flags: Flags, settings: tuple[str, ...]) -> Plan:
    """What ``--from megatron-deepspeed`` makes of the script."""
    vocab = flags.get("vocab")
    tokens = Node(int(vocab), Origin("--vocab")) if isinstance(vocab, str) else None
    words = words_of(text, "train.sh", "megatron-deepspeed", {}, Path())
    return launched_plan(launched(words, "megatron-deepspeed", Choices({}, vocabulary=tokens)), flags).plan


TARGET = Target(
    name="megatron-deepspeed",
    framework="megatron-deepspeed",
    what="the arguments of BigScience's Megatron-DeepSpeed",
    write=write,
    read=read,
    command=("--from", "megatron-deepspeed", PLACE),
    beside=frozenset(
        {"hardware", "headroom", "torch", "environment", "model.name", "model.family", "optimizer.block_size"}
        | {"pipeline.partition"}
    ),
)
