"""A plan as the launch script of BigScience's Megatron-DeepSpeed: arguments, ``ds_config.json``, stages.

``megatron/model/gpt_model.py`` (``GPTModelPipe``) and ``pretrain_gpt.py`` of bigscience-workshop/Megatron-DeepSpeed;
the form of the script is that of BigScience's own trainings. Stages are a partition method where one makes the plan's
cut, and otherwise a class of a few lines (``pipe_methods``).
"""

from __future__ import annotations

import json
from typing import Any

from ...frameworks import framework
from ...plan.plan import Plan, ResolvedPlan
from ...plan.read import Flags
from ..exported import PLACE, Arguments, Draft, Script, Target, heredoc, sizes_of
from ..megatron.script import names_settled
from ..megatron.vocabulary import GPT2_TOKENS
from ..training_scripts import read_back
from .pipe_methods import STAGES, cut_today, has_no_weights, method_of, python_of
from .table import ROWS, config_of

CONFIG = "./ds_config.json"
YOURS = (
    ("--data-path", "your-data_text_document"),
    ("--split", "949,50,1"),
    ("--train-iters", 10),
    ("--lr", "1.0e-4"),
)


def write(plan: ResolvedPlan) -> Draft:
    """The script that trains ``plan``."""
    method, python, warning = _stages(plan)
    arguments = Arguments()
    arguments.rows(ROWS, plan)
    if method is not None:
        arguments.add("PARALLEL", "--pp-partition-method", method)
    arguments.add("DEEPSPEED", "--deepspeed")
    arguments.add("DEEPSPEED", "--deepspeed_config", CONFIG)
    arguments.add("DEEPSPEED", "--zero-stage", plan.layout.zero)
    is_gpt2s = plan.model.vocab == GPT2_TOKENS  # GPT-2's own vocabulary needs no other word than its tokenizer's name
    for name, *values in (*_tokenizer(is_gpt2s), *YOURS):
        arguments.add("YOURS", str(name), *values)
    config = config_of(plan)
    before = ["", "# gradient_clipping is in no plan: BigScience's."]
    before += heredoc(CONFIG, json.dumps(config, indent=2))
    if python:
        before += ["", *heredoc(f"{STAGES}.py", python)]
    yours = f"Not in a plan, and yours to replace: a tokenizer of {plan.model.vocab:,} tokens, data, steps."
    script = Script(
        f"{plan.model.name}: BigScience's Megatron-DeepSpeed on {sizes_of(plan, 'tp', 'pp', 'dp', 'zero')}.",
        "python -u -m torch.distributed.launch",
        "pretrain_gpt.py",
        arguments,
        plan.environment,
        before,
        {"YOURS": yours, "PARALLEL": warning},
    )
    content = {
        "environment": dict(plan.environment),
        "arguments": arguments.content(),
        "ds_config": config,
        "stages": python or None,
    }
    return Draft(script.text(plan), content, {} if is_gpt2s else {"vocab": str(plan.model.vocab)})


def _stages(plan: ResolvedPlan) -> tuple[str | None, str, str]:
    """The partition method, or the Python that makes the cut, and a word of warning."""
    chosen = plan.pipeline.partition
    own = framework(plan.framework)
    entries, bounds = own.layer_list(plan), own.stage_edges(plan)
    if plan.precision.dtype == "fp32":  # then nothing is converted behind the head
        entries, bounds = entries[:-1], [*bounds[:-1], bounds[-1] - 1]
    if isinstance(chosen, str) and has_no_weights(chosen):
        if cut_today(chosen, entries, plan.layout.pp) == bounds:
            return chosen, "", ""
        cut = ",".join(map(str, bounds))
        return chosen, "", f"DeepSpeed of 2021 is meant, which cuts at {cut}; newer ones cut otherwise by this method."
    method = method_of(bounds, entries)
    if method is not None:
        return method, "", ""
    told = f"No partition method makes these stages: pretrain_gpt.py takes GPTModelPipe from {STAGES}.py instead."
    return None, python_of(bounds), told


def _tokenizer(is_gpt2s: bool) -> tuple[tuple[str, str], ...]:
    if is_gpt2s:
        files = (("--vocab-file", "gpt2-vocab.json"), ("--merge-file", "gpt2-merges.txt"))
        return (("--tokenizer-type", "GPT2BPETokenizer"), *files)
    return (("--tokenizer-type", "PretrainedFromHF"), ("--tokenizer-name-or-path", "your-tokenizer"))


def read(text: str, flags: Flags, settings: tuple[str, ...]) -> Plan:
    """The plan that ``--from megatron-deepspeed`` reads from the script."""
    return read_back(text, "megatron-deepspeed", flags)


def settled(plan: ResolvedPlan) -> dict[str, Any]:
    """Whatever method makes it, the cut is the cut."""
    bounds = framework(plan.framework).stage_edges(plan)
    return {**names_settled(plan), "pipeline": plan.pipeline.model_copy(update={"partition": tuple(bounds)})}


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
    settled=settled,
)
