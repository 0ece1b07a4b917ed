"""Arguments of BigScience's Megatron-DeepSpeed and the plan's fields that they are, both ways, with the DeepSpeed
configuration that they name.

``megatron/arguments.py`` and ``megatron/model/gpt_model.py`` of bigscience-workshop/Megatron-DeepSpeed; what
gradients are accumulated in is DeepSpeed's ``get_data_types`` (``runtime/engine.py``): fp32 for bf16
without ZeRO, else the parameters' dtype.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...bash.values import origin_of, text
from ...plan.errors import Node, PlanError, wrong_at
from ...plan.plan import Plan
from ...plan.text import parse_yaml, read_text
from ..files import node_of_written
from ..forks import OF_MEGATRON_DEEPSPEED as FORKS  # noqa: F401  read beside ROWS
from ..megatron.context import Context, start
from ..megatron.layout import PARALLEL
from ..megatron.model import DROPOUTS, SIZES
from ..megatron.training import in_full, its_optimizer, put_dtype
from ..megatron.vocabulary import tokens_of
from ..settings import NEEDED, Building, Reader, Row, Settings, elsewhere, positive, read_rows, switch

_PADDING = 128
"""What the estimate pads a vocabulary to a multiple of (times the tensor-parallel size)."""
SGD_MOMENTUM = 0.9
"""Of ``--sgd-momentum`` where nobody says."""
_DTYPES = ("fp32", "fp16", "bf16")


def plan_of(settings: Settings, context: Context) -> Building:
    """The plan of a training that ``settings`` start."""
    if context.family != "gpt":
        problem = "is not modelled yet under megatron-deepspeed; pretrain_gpt.py is"
        raise wrong_at(settings.origin, f"{context.name}.py {problem}")
    building = Building(settings.origin)
    start(building, "megatron-deepspeed", context)
    building.put("model.norm", "layernorm")
    read_rows(ROWS, Reader(settings, building, context))
    return building


def _vocabulary(reader: Reader) -> None:
    settings, building, context = reader.settings, reader.building, reader.context
    padded = settings.integer("--pad-vocab-size-to")
    if context.vocabulary is not None:
        building.put("model.vocab", context.vocabulary)
        return
    if padded is not None:
        building.put("model.vocab", padded, "--pad-vocab-size-to")
        return
    node, names = tokens_of(settings, context.folder, "GPT2BPETokenizer")
    name = "--make-vocab-size-divisible-by"
    multiple = settings.integer(name)
    if multiple is not None and multiple.value != _PADDING:
        tp = building.size("layout.tp")
        step = positive(name, multiple) * tp
        tokens = -(-positive("--vocab-size", node) // step) * step
        if tokens % (_PADDING * tp):
            building.note("argument-not-modelled", f"{name} {multiple.value} is not modelled yet: {_PADDING} is taken")
        node, names = Node(tokens, multiple.origin), (*names, name)
    building.put("model.vocab", node, *names)


def _dtype(reader: Reader) -> None:
    """Dtypes and ZeRO's stage; the stage is DeepSpeed's to say, the argument only repeats it."""
    settings, building = reader.settings, reader.building
    configuration = _configuration(reader)
    dtype = put_dtype(reader)
    stage, name = settings.integer("--zero-stage") or Node(1, settings.origin), "--zero-stage"
    if configuration is not None:
        stage = _at(configuration, "zero_optimization.stage") or Node(0, configuration.origin)
        name = "--deepspeed_config"
        building.because("--zero-stage", "the DeepSpeed configuration decides")
    building.put("layout.zero", stage, name)
    gradients = Node("fp32" if dtype == "bf16" and stage.value == 0 else dtype, stage.origin)
    accumulated = _at(configuration, "data_types.grad_accum_dtype") if configuration is not None else None
    if accumulated is not None and accumulated.value is not None:
        if accumulated.value not in _DTYPES:
            problem, path = "must be fp32, fp16 or bf16", "data_types.grad_accum_dtype"
            raise accumulated.wrong(path, problem)
        gradients = accumulated
    building.put("precision.gradients", gradients)


def config_of(plan: Plan) -> dict[str, Any]:
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


def _optimizer(reader: Reader) -> None:
    settings, building, eight_bits = reader.settings, reader.building, "--use-bnb-optimizer"
    kind = settings.word("--optimizer") or Node("adam", settings.origin)
    if settings.has(eight_bits):
        where = settings.where(eight_bits)
        building.put("optimizer.name", Node("adam8bit", where), eight_bits)
        building.put("optimizer.embeddings_32bit", Node(building.items["layout.zero"].value == 0, where))
        building.because("--optimizer", f"bitsandbytes' instead ({eight_bits})")
        return
    building.put("optimizer.name", kind, "--optimizer")
    if kind.value == "sgd":
        momentum = settings.number("--sgd-momentum") or Node(SGD_MOMENTUM, kind.origin)
        building.put("optimizer.momentum", momentum, "--sgd-momentum")


def _recompute(reader: Reader) -> None:
    settings, name, layers = reader.settings, "--checkpoint-activations", "--checkpoint-num-layers"
    if not settings.has(name):
        reader.building.because(layers, f"no effect without {name}")
        return
    origin = settings.where(name)
    reader.building.put("recompute.mode", Node("full", origin), name)
    reader.building.put("recompute.layers", settings.integer(layers) or Node(1, origin), layers)


ROWS = (
    Row("--num-layers", "model.layers", "MODEL", default=NEEDED),
    *SIZES,
    Row("--seq-length", "batch.seq", "MODEL", default=NEEDED, older=("--encoder-seq-length",)),
    Row("--max-position-embeddings", "model.positions_max", "MODEL", default=NEEDED, older=("--seq-length",)),
    Row(
        "--position-embedding-type",
        "model.positions",
        "MODEL",
        "word",
        "learned",
        words={"absolute": "learned", "rotary": "rotary", "alibi": "alibi"},
    ),
    *DROPOUTS,
    switch("--embed-layernorm", "model.embedding_norm", "MODEL"),
    Row(
        "--glu-activation",
        "model.activation",
        kind="word",
        default="gelu",
        refused=dict.fromkeys(("geglu", "liglu", "reglu"), "is not modelled yet; swiglu is"),
    ),
    *PARALLEL,
    Row("--vocab-size", "model.vocab", read=_vocabulary),
    Row("--pp-partition-method", "pipeline.partition", "", "word"),
    Row("--micro-batch-size", "batch.mbs", "BATCH", default=NEEDED),
    Row("--global-batch-size", "batch.gbs", "BATCH"),
    switch("--fp16", "precision.dtype", "BATCH", read=_dtype, value=lambda plan: plan.precision.dtype == "fp16"),
    switch("--bf16", "precision.dtype", "BATCH", read=elsewhere, value=lambda plan: plan.precision.dtype == "bf16"),
    Row("--optimizer", "optimizer.name", "OPTIMIZER", read=_optimizer, value=its_optimizer),
    switch(
        "--use-bnb-optimizer",
        "optimizer.name",
        "OPTIMIZER",
        read=elsewhere,
        value=lambda plan: plan.optimizer.algorithm.eight_bit,
    ),
    Row(
        "--sgd-momentum",
        "optimizer.momentum",
        "OPTIMIZER",
        read=elsewhere,
        when=lambda plan: plan.optimizer.algorithm.has_momentum,
    ),
    switch("--checkpoint-activations", "recompute.mode", "RECOMPUTE", read=_recompute, value=in_full),
    Row("--checkpoint-num-layers", "recompute.layers", "RECOMPUTE", read=elsewhere, when=in_full),
)


# -- DeepSpeed's configuration ------------------------------------------------------------------------


def _configuration(reader: Reader) -> Node | None:
    """The DeepSpeed configuration: a here-document of the script, or a file beside it."""
    settings, name = reader.settings, "--deepspeed_config"
    raw, files = settings.raw(name), reader.context.files or {}
    if raw is None:
        return None
    if text(raw) in files:
        return node_of_written(files[text(raw)], origin_of(raw, settings.origin))
    path = settings.word(name)
    file: Path = reader.context.folder / str(path.value)
    try:
        content = read_text(file, name)
    except PlanError as error:
        raise path.wrong(name, error.problem) from None
    return parse_yaml(content, str(file))


def _at(configuration: Node, path: str) -> Node | None:
    found = configuration.at(path)
    if found is not None and isinstance(found.value, str) and any(ord(c) >= 0xF0000 for c in found.value):
        raise found.lacks(path, "is not known from the script")
    return found
