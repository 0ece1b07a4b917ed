"""``--from deepspeed``: a ``ds_config.json`` as a plan, and the batch that it leaves to the number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

from ...plan.errors import ABSENT, Guesses, Node, Origin, PlanError, guessed, nearest, wrong_at
from ...plan.fields import by_flag
from ...plan.normalise import normalised
from ...plan.notes import Note
from ...plan.read import ReadPlan, Source, build_plan
from ...plan.text import parse_yaml, text_at
from ...plan.traced_spec import TracedSpec
from ..launch import Asked, Launch, data_parallel, left_out, with_sizes
from ..settings import Building, positive
from .config import AUTO, NOT_MODELLED, Configuration, configuration_of, integer

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


def read(place: str, asked: Asked) -> Launch:
    """The plan in the ``ds_config.json`` at ``place``. The model and the number of GPUs are
    flags."""
    return ds_config_of(*text_at(place), asked)


def ds_config_of(text: str, name: str, asked: Asked) -> Launch:
    """The plan in the configuration ``text``, which errors call ``name``."""
    # Tabs may indent JSON, and not YAML.
    written = parse_yaml(text.expandtabs(2), name)
    if written.mapping.keys() & {"model", "framework", "extends"}:
        raise wrong_at(written.origin, "is a plan, not a ds_config.json; leave out --from")
    return ds_config_in(written, asked, Building(written.origin))


def ds_config_in(written: Node, asked: Asked, building: Building) -> Launch:
    """The plan in the configuration ``written``, with what ``building`` has from elsewhere."""
    names = asked.names
    given = {*building.items, *(by_flag()[flag].path for flag in names if flag in by_flag())}
    hidden = _hidden(asked, building.items.get("model"))
    ours = Building(written.origin)
    config = configuration_of(written, ours, hidden=hidden, given=given)
    if not names & {"gpus", "dp"} and "hardware.gpus" not in building.items:
        config.lack("--gpus N", "nothing here says how many there are")
    config.check()
    notes = (*_unknown(written, strict=asked.strict), *_optimizer(written, given), *_dtype(ours, given))
    ours.items.update(building.items)
    return Launch(Source(normalised(ours.plan()), Path()), notes, finish=partial(with_batch, config=config))


def _dtype(ours: Building, given: Collection[str]) -> Iterator[Note]:
    """Without fp16 and bf16 the engine leaves a model as it was loaded (``_configure_distributed_model`` of
    ``runtime/engine.py``, whose ``__check_params`` checks nothing)."""
    found = ours.items.get("precision.dtype")
    if found is not None and found.value == "fp32" and "precision.dtype" not in given:
        yield Note(
            "loaded-dtype",
            "parameters are assumed to be fp32: neither fp16 nor bf16 is enabled, and DeepSpeed's engine keeps a model "
            "as it was loaded (transformers 5: as its checkpoint was saved); --dtype bf16 is what bf16.enabled does",
        )


def with_batch(read: ReadPlan, config: Configuration) -> ReadPlan:
    """``read`` with the batch sizes that follow from the number of ranks (``_set_batch_related_parameters``)."""
    batch = read.plan.batch
    gbs, mbs = read.origins.get("batch.gbs"), read.origins.get("batch.mbs")
    given = integer(config, "gradient_accumulation_steps", 1)
    steps = positive("", given) if given is not None else batch.accumulation
    dp = data_parallel(read)
    ranks = f"{dp} rank{'s' if dp > 1 else ''}"
    if gbs is None and mbs is None:
        problem = "is missing, and so is train_batch_size; give one of them, or --mbs"
        raise PlanError("train_micro_batch_size_per_gpu", ABSENT, problem, origin=Origin(config.origin.source))
    if gbs is None:
        return with_sizes(read, gbs=batch.mbs * (steps or 1) * dp)
    if mbs is None:
        assert batch.gbs is not None
        if batch.gbs % (dp * (steps or 1)):
            what = f"gradient_accumulation_steps {steps} x {ranks}" if steps else ranks
            raise PlanError("train_batch_size", batch.gbs, f"must be a multiple of {what}", origin=gbs)
        return with_sizes(read, mbs=batch.gbs // (dp * (steps or 1)))
    written = gbs.source == mbs.source == config.origin.source
    if written and steps is not None and batch.gbs != batch.mbs * steps * dp:
        sizes = f"{batch.mbs} x gradient_accumulation_steps {steps} x {ranks} = {batch.mbs * steps * dp}"
        problem = f"must be train_micro_batch_size_per_gpu {sizes}"
        raise PlanError("train_batch_size", batch.gbs, problem, origin=gbs)
    return read


def _hidden(asked: Asked, model: Node | None) -> int | None:
    """The hidden size, from which three sizes follow, of the ``model`` or of another that a flag names; ``None`` where
    it is not known or varies."""
    flags = asked.flags
    if ("model" not in flags and model is None) or {"model", "hidden"} & {*asked.varied}:
        return None
    own = {flag: value for flag, value in flags.items() if flag == "model" or by_flag()[flag].section == "model"}
    below = normalised(Node({} if model is None else {"model": model}, Origin("command line")))
    spec = build_plan(Source(below, Path()), own, traced=True).plan.model
    if not isinstance(spec, TracedSpec):
        return spec.hidden
    width = spec.config.get("hidden_size")  # ``HfTrainerDeepSpeedConfig.trainer_config_finalize``
    return width if type(width) is int else None


def _unknown(written: Node, *, strict: bool) -> Iterator[Note]:
    """Top-level keys that DeepSpeed would ignore; errors if ``strict``."""
    known = (*KNOWN, *WITHOUT_EFFECT, *NOT_MODELLED)
    guesses = Guesses(lambda key: nearest(key, known))
    for key, node in written.mapping.items():
        if key in known or key.startswith("_"):
            continue
        guess = "bf16" if key == "bfloat16" else guesses.of(key)
        problem = guessed("is no key that is read", guess)
        if guess in KNOWN:
            raise node.lacks(key, problem)
        yield left_out("argument-unknown", key, ABSENT, problem, node.origin, strict=strict)


def _optimizer(written: Node, given: Collection[str]) -> Iterator[Note]:
    """The assumption where the training script makes the optimizer."""
    kind = written.at("optimizer.type")
    if {"optimizer.name", "optimizer.implementation"} & {*given} or (kind is not None and kind.value != AUTO):
        return
    yield Note(
        "optimizer-elsewhere",
        f"{written.origin.source} makes no optimizer: AdamW by DeepSpeed's FusedAdam is assumed; "
        "--optimizer-implementation foreach is PyTorch's, --param-groups decay has the Trainer's groups",
    )
