"""``--from deepspeed``: a ``ds_config.json`` as a plan, and the batch that it leaves to the number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from ..deepspeed_config import AUTO, NOT_MODELLED, DeepSpeedConfig, read_deepspeed_config
from ..errors import ABSENT, Origin, PlanError, nearest, one_line
from ..fields import by_flag
from ..node import Node
from ..normalise import normalised
from ..notes import Note
from ..read import Flags, ReadPlan, Source, build_plan
from ..text import STANDARD_INPUT, path_of, read_standard_input, read_text
from ..yaml_nodes import parse_yaml
from .read import Launch

KNOWN = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "optimizer",
        "fp16",
        "bf16",
        "data_types",
        "zero_optimization",
        "gradient_clipping",
    }
)
"""Top-level keys that are read."""

WITHOUT_EFFECT = frozenset(
    {
        "scheduler",
        "prescale_gradients",
        "gradient_predivide_factor",
        "gradient_allreduce_op",
        "steps_per_print",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "disable_python_gc",
        "check_overflow",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "seq_parallel_communication_data_type",
        "activation_checkpointing",
        "aio",
        "tensorboard",
        "wandb",
        "comet",
        "csv_monitor",
        "monitor_config",
        "flops_profiler",
        "comms_logger",
        "autotuning",
        "elasticity",
        "checkpoint",
        "nebula",
        "dataloader_drop_last",
        "use_data_before_expert_parallelism",
        "log_level",
        "pipeline",
        "timers",
    }
)
"""Those without effect on the memory of a training step of a transformers model."""


def read_ds_config(place: str, flags: Flags, varied: Collection[str] = (), *, strict: bool = False) -> Launch:
    """The plan in the ``ds_config.json`` at ``place``. What it does not say is in ``flags``: the model and the number
    of GPUs; ``varied`` are names of flags that take several values."""
    if place == "-":
        return ds_config_of(read_standard_input(), STANDARD_INPUT, flags, varied, strict=strict)
    return ds_config_of(read_text(path_of(place)), place, flags, varied, strict=strict)


def ds_config_of(text: str, name: str, flags: Flags, varied: Collection[str] = (), *, strict: bool = False) -> Launch:
    """The plan in the configuration ``text``, which errors call ``name``."""
    # Tabs may indent JSON, and not YAML.
    written = parse_yaml(text.expandtabs(2), name)
    if written.mapping.keys() & {"model", "framework", "extends"}:
        problem = "is a plan, not a ds_config.json; leave out --from"
        raise PlanError("", ABSENT, problem, origin=written.origin)
    names = {*flags, *varied}
    if not names & {"gpus", "dp"}:
        problem = "is needed: the configuration does not say how many GPUs there are; give it as --gpus N"
        raise PlanError("hardware.gpus", ABSENT, problem, origin=Origin(name))
    given = frozenset(by_flag()[flag].path for flag in names if flag in by_flag())
    config = read_deepspeed_config(written, hidden=_hidden(flags, varied), given=given)
    plan = normalised(config.plan.with_items({"deepspeed": Node(dict(config.zero), written.origin)}))
    notes = (*_unknown(written, strict=strict), *_optimizer(written, config, given))
    return Launch(Source(plan, Path()), notes, (), config=config)


def with_batch(read: ReadPlan, config: DeepSpeedConfig) -> ReadPlan:
    """``read`` with the batch sizes that follow from the number of ranks (``_set_batch_related_parameters``)."""
    plan, layout, batch = read.plan, read.plan.layout, read.plan.batch
    gbs, mbs = read.origins.get("batch.gbs"), read.origins.get("batch.mbs")
    steps = config.steps.value if config.steps is not None else None
    assert steps is None or isinstance(steps, int)
    dp = layout.dp or max((plan.hardware.gpus or 1) // (layout.tp * layout.pp * layout.cp), 1)
    ranks = f"{dp} rank{'s' if dp > 1 else ''}"
    if gbs is None and mbs is None:
        problem = "is missing, and so is train_batch_size; give one of them, or --mbs"
        raise PlanError("train_micro_batch_size_per_gpu", ABSENT, problem, origin=Origin(config.plan.origin.source))
    if gbs is None:
        update = {"gbs": batch.mbs * (steps or 1) * dp}
    elif mbs is None:
        assert batch.gbs is not None
        if batch.gbs % (dp * (steps or 1)):
            what = f"gradient_accumulation_steps {steps} x {ranks}" if steps else ranks
            raise PlanError("train_batch_size", batch.gbs, f"must be a multiple of {what}", origin=gbs)
        update = {"mbs": batch.gbs // (dp * (steps or 1))}
    else:
        written = gbs.source == mbs.source == config.plan.origin.source
        if written and steps is not None and batch.gbs != batch.mbs * steps * dp:
            sizes = f"{batch.mbs} x gradient_accumulation_steps {steps} x {ranks} = {batch.mbs * steps * dp}"
            problem = f"must be train_micro_batch_size_per_gpu {sizes}"
            raise PlanError("train_batch_size", batch.gbs, problem, origin=gbs)
        return read
    plan = plan.model_copy(update={"batch": batch.model_copy(update=update)})
    return ReadPlan(plan, read.origins, read.warnings)


def _hidden(flags: Flags, varied: Collection[str]) -> int | None:
    """The model's hidden size, from which three sizes follow; ``None`` where it is not known or varies."""
    if "model" not in flags or {"model", "hidden"} & {*varied}:
        return None
    own = {flag: value for flag, value in flags.items() if flag == "model" or by_flag()[flag].section == "model"}
    return build_plan(Source(Node({}, Origin("command line")), Path()), own).plan.model.hidden


def _unknown(written: Node, *, strict: bool) -> Iterator[Note]:
    """Top-level keys that DeepSpeed would ignore; errors if ``strict``."""
    known = (*KNOWN, *WITHOUT_EFFECT, *NOT_MODELLED)
    for key, node in written.mapping.items():
        if key in known or key.startswith("_"):
            continue
        guess = "bf16" if key == "bfloat16" else nearest(key, known)
        problem = "is no key that is read" + (f"; did you mean {guess}?" if guess else "")
        if strict or guess in KNOWN:
            raise PlanError(key, ABSENT, problem, origin=node.origin)
        yield Note("argument-unknown", one_line(f"{key} ({node.origin}) {problem}"))


def _optimizer(written: Node, config: DeepSpeedConfig, given: Collection[str]) -> Iterator[Note]:
    """What is assumed where the optimizer is made elsewhere."""
    section = written.mapping.get("optimizer")
    kind = section.mapping.get("type") if section is not None else None
    if {"optimizer.name", "optimizer.implementation"} & {*given} or (kind is not None and kind.value != AUTO):
        return
    yield Note(
        "optimizer-elsewhere",
        f"{config.plan.origin.source} makes no optimizer: AdamW by DeepSpeed's FusedAdam is assumed; "
        "--optimizer-implementation foreach is PyTorch's, --param-groups decay has the Trainer's groups",
    )
