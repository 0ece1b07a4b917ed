"""Megatron-LM's arguments and the plan's fields that they are, both ways.

Defaults and derivations are those of ``validate_args`` (``megatron/training/arguments.py``), of
``core_transformer_config_from_args`` (``argument_utils.py``) and of the builders (``gpt_builders.py``,
``examples/bert/pretrain_bert.py``), at the commit of ``formats/arguments/megatron.txt``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from ...bash.values import Value
from ...plan.errors import ABSENT, PlanError
from ...plan.framework_sections import OffloadModule
from ...plan.megatron_layout import stages, virtual_stages, written_out
from ...plan.node import Node
from ...plan.notes import VOCAB_UNUSED
from ...plan.plan import Plan
from ...plan.spec import MOST_LAYERS
from ...values import dataclass
from ..rows import NEEDED, OFF, Building, Reader, Row, elsewhere, positive, read_rows, switch
from ..settings import Settings
from . import experts, graphs, hybrid, low_precision, sharding
from .vocabulary import tokens_of

Family = Literal["gpt", "bert", "t5", "hybrid"]
_MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj")


@dataclass(frozen=True, slots=True)
class Context:
    """Facts beside the arguments: the model's kind and name, and values that flags or launchers give."""

    family: Family
    name: str
    folder: Path
    gpus: Node | None = None
    gpus_per_node: Node | None = None
    vocabulary: Node | None = None
    files: Mapping[str, Value] | None = None
    """Files that the script writes, by name."""


def plan_of(settings: Settings, context: Context) -> Building:
    """The plan of a training that ``settings`` start."""
    building = Building(settings.origin)
    version = settings.integer("--flash-attention-version")
    if version is not None and version.value != 2:
        problem = "is not modelled yet; flash-attention 2 is"
        raise PlanError("--flash-attention-version", version.value, problem, origin=version.origin)
    start(building, "megatron", context)
    building.put("model.causal", context.family in ("gpt", "hybrid"))
    building.put("model.mlm_head", context.family == "bert")
    read_rows(ROWS, Reader(settings, building, context))
    return building


def start(building: Building, framework: str, context: Context) -> None:
    """Puts the values that launchers, flags and the script's name give."""
    building.put("framework", framework)
    building.put("model.name", context.name)
    building.put("model.family", context.family)
    for path, node in (("hardware.gpus", context.gpus), ("hardware.gpus_per_node", context.gpus_per_node)):
        if node is not None:
            building.put(path, node)


# -- the model ----------------------------------------------------------------------------------------


def _ffn(reader: Reader) -> Node:
    hidden = reader.building.items["model.hidden"]
    h = reader.building.size("model.hidden")
    two_thirds = int((4 * h * 2 / 3) / 64) * 64 if h < 1 << 40 else 4 * h
    return Node(two_thirds if reader.settings.has("--swiglu") else 4 * h, hidden.origin)


def _head_dim(reader: Reader) -> Node:
    h, a = reader.building.size("model.hidden"), reader.building.size("model.heads")
    origin = reader.building.items["model.heads"].origin
    if h % a:
        problem = f"must divide --hidden-size {h} unless --kv-channels is given"
        raise PlanError("--num-attention-heads", a, problem, origin=origin)
    return Node(h // a, origin)


def _kv_heads(reader: Reader) -> None:
    settings, put = reader.settings, reader.building.put
    grouped, number = "--group-query-attention", "--num-query-groups"
    if settings.has(grouped):
        put("model.kv_heads", settings.integer(number) or Node(1, settings.where(grouped)), grouped, number)
    else:
        reader.building.because(number, f"no effect without {grouped}")
        put("model.kv_heads", reader.building.items["model.heads"], grouped, "--num-attention-heads")


def _decoder(reader: Reader) -> None:
    """The decoder's sequence. It has as many layers as the encoder (``validate_args``; ``pretrain_t5.py``,
    ``model_provider``)."""
    settings, building, is_t5 = reader.settings, reader.building, reader.context.family == "t5"
    layers, name = settings.integer(DECODER_LAYERS), "--decoder-seq-length"
    if not is_t5:
        building.because(DECODER_LAYERS, "no effect: the model has no decoder of its own")
        building.because(name, "no effect: the model has no decoder of its own")
        return
    building.because(DECODER_LAYERS, "not read: the decoder has as many layers as the encoder")
    encoder = building.size("model.layers")
    if layers is not None and layers.value != encoder:
        said = f"--decoder-num-layers {layers.value} is not used: pretrain_t5.py builds as many as the encoder has"
        building.note("decoder-layers-unused", f"{said}, {encoder}")
    seq = settings.integer(name)
    if seq is None:
        raise PlanError(name, ABSENT, "is missing: the training cannot start without it", origin=settings.origin)
    building.put("batch.decoder_seq", seq, name)


DECODER_LAYERS = "--decoder-num-layers"

_POSITIONS = {"learned_absolute": "learned", "rope": "rotary", "yarn": "rotary", "none": "none"}


def _positions(reader: Reader) -> None:
    settings, put = reader.settings, reader.building.put
    name, rotary = "--position-embedding-type", "--use-rotary-position-embeddings"
    if reader.context.family == "bert":  # pretrain_bert.py does not pass it on
        put("model.positions", "learned", name)
    elif settings.has(rotary):
        put("model.positions", Node("rotary", settings.where(rotary)), rotary)
    elif (kind := settings.word(name)) is None:
        put("model.positions", "learned", name)
    elif kind.value not in _POSITIONS:
        problem = f"is not modelled yet; {', '.join(_POSITIONS)} are"
        raise PlanError(name, kind.value, problem, origin=kind.origin)
    else:
        put("model.positions", Node(_POSITIONS[str(kind.value)], kind.origin), name)


def _without_rotary(reader: Reader) -> str:
    rotary = reader.building.items["model.positions"].value == "rotary" and not reader.settings.has(experts.LATENT)
    return "" if rotary else "no effect without rotary positions of whole heads"


def _quick_geglu(reader: Reader) -> None:
    name = "--quick-geglu"
    if reader.settings.has(name):
        reader.building.put("model.activation", Node("quick_geglu", reader.settings.where(name)), name)


def _squared_relu(reader: Reader) -> None:
    name = "--squared-relu"
    if not reader.settings.has(name):
        return
    if reader.settings.has("--swiglu"):
        raise PlanError(name, ABSENT, "must be left out with --swiglu", origin=reader.settings.where(name))
    reader.building.put("model.activation", Node("relu2", reader.settings.where(name)), name)


def _sinks(reader: Reader) -> None:
    name = "--softmax-type"
    kind = reader.settings.word(name)
    if kind is not None and kind.value == "off-by-one":
        raise PlanError(name, kind.value, "is not modelled yet; vanilla and learnable are", origin=kind.origin)
    if kind is not None:
        reader.building.put("model.attention_sinks", Node(kind.value == "learnable", kind.origin), name)


def _without_weight(plan: Plan) -> bool:
    return plan.model.qk_norm and plan.model.qk_norm_over == "head_without_weight"


def _query_key_norm(reader: Reader) -> None:
    """A norm of each head, or one without a weight, which comes first (``gpt_layer_specs.py``)."""
    name, without = "--qk-layernorm", "--qk-l2-norm"
    one = reader.settings.has(without)
    node = Node(one or reader.settings.has(name), reader.settings.where(without if one else name))
    reader.building.put("model.qk_norm", node, name)
    if one:
        reader.building.put("model.qk_norm_over", Node("head_without_weight", node.origin), without)


def _no_rope(reader: Reader) -> None:
    """Every n-th layer has no rotary positions (``transformer_config.py``, ``no_rope_freq``)."""
    name = "--no-rope-freq"
    node = reader.settings.word(name)
    if node is None:
        return
    if not str(node.value).isdigit() or not 0 < int(str(node.value)) <= MOST_LAYERS:
        raise PlanError(name, node.value, "must be a whole number above 0; a list is not read", origin=node.origin)
    reader.building.put("model.nope_interval", Node(int(str(node.value)), node.origin), name)


def _window(reader: Reader) -> None:
    """Tokens to the left and right of a query that it sees; in every layer, or in all but every second one."""
    name, frequency = "--window-size", "--window-attn-skip-freq"
    node, skipped = reader.settings.word(name), reader.settings.word(frequency)
    if node is None:
        reader.building.because(frequency, f"no effect without {name}")
        return
    left, _, right = str(node.value).strip("()").replace(" ", "").partition(",")
    if not left.isdigit() or right != "0":
        problem = "must be tokens to the left and 0 to the right, such as 127,0; other windows are not modelled"
        raise PlanError(name, node.value, problem, origin=node.origin)
    if skipped is not None and str(skipped.value) != "2":
        problem = "must be 2 or left out: windows in every second layer, or in all"
        raise PlanError(frequency, skipped.value, problem, origin=skipped.origin)
    reader.building.put("model.sliding_window", Node(int(left) + 1, node.origin), name)
    if skipped is not None:
        reader.building.put("model.alternating_windows", Node(True, skipped.origin), frequency)


def _windowed(plan: Plan) -> bool:
    return plan.model.sliding_window is not None


def _attention_bias(reader: Reader) -> None:
    names = ("--add-qkv-bias", "--disable-bias-linear")
    biased = reader.settings.has(names[0]) or not reader.settings.has(names[1])
    reader.building.put("model.attention_bias", Node(biased, reader.settings.where(*names)), *names)


def _token_types(reader: Reader) -> None:
    name = "--bert-no-binary-head"
    kinds = 2 if reader.context.family == "bert" and not reader.settings.has(name) else 0
    reader.building.put("model.token_types", Node(kinds, reader.settings.where(name)), name)


def _vocabulary(reader: Reader) -> None:
    """Tokens before padding, and what they are padded to a multiple of (times the tensor-parallel size)."""
    settings, building, context = reader.settings, reader.building, reader.context
    multiple = settings.integer("--make-vocab-size-divisible-by") or Node(128, settings.origin)
    padded = settings.integer("--padded-vocab-size")
    if context.vocabulary is not None:
        building.put("model.vocab", context.vocabulary)
    elif padded is not None:
        building.put("model.vocab", padded, "--padded-vocab-size")
    else:
        default = "BertWordPieceLowerCase" if context.family == "bert" else "GPT2BPETokenizer"
        node, names = tokens_of(settings, context.folder, default)
        building.put("model.vocab", node, *names)
        size = settings.integer("--vocab-size")
        if size is not None and "--vocab-size" not in names and size.value != node.value:
            kind = settings.word("--tokenizer-type")
            who = str(kind.value) if kind is not None else f"{default}, since no --tokenizer-type is named,"
            unused = f"--vocab-size {size.value} is not used: {who} has {node.value} tokens"
            building.note(VOCAB_UNUSED, f"{unused}; --tokenizer-type NullTokenizer would use it")
        for name in ("--vocab-file", "--tokenizer-model"):
            if name not in names:
                building.because(name, f"not read: model.vocab = {node.value} without it")
    if padded is not None or settings.has("--no-pad-vocab-size"):
        multiple = Node(1, settings.where("--padded-vocab-size", "--no-pad-vocab-size"))
    building.put("megatron.vocab_multiple", multiple, "--make-vocab-size-divisible-by", "--no-pad-vocab-size")


SIZES = (
    Row("--hidden-size", "model.hidden", "MODEL", default=NEEDED, least=1),
    Row("--ffn-hidden-size", "model.ffn", "MODEL", default=_ffn),
    Row("--num-attention-heads", "model.heads", "MODEL", default=NEEDED, least=1),
    Row("--kv-channels", "model.head_dim", "MODEL", default=_head_dim),
)
DROPOUTS = (
    Row("--hidden-dropout", "model.embedding_dropout", "", "number", 0.1),
    Row("--hidden-dropout", "model.hidden_dropout", "MODEL", "number", 0.1),
    Row("--attention-dropout", "model.attention_dropout", "MODEL", "number", 0.1),
)
MODEL = (
    *hybrid.LAYERS,
    *SIZES,
    switch(
        "--group-query-attention",
        "model.kv_heads",
        "MODEL",
        read=elsewhere,
        value=lambda plan: plan.model.kv_heads != plan.model.heads,
    ),
    Row(
        "--num-query-groups",
        "model.kv_heads",
        "MODEL",
        read=_kv_heads,
        when=lambda plan: plan.model.kv_heads != plan.model.heads,
    ),
    Row("--max-position-embeddings", "model.positions_max", "MODEL", default=NEEDED),
    Row(
        "--position-embedding-type",
        "model.positions",
        "MODEL",
        words=_POSITIONS,
        read=_positions,
        when=lambda plan: plan.model.family != "bert",
    ),
    Row(
        "--rotary-percent",
        "model.rotary_fraction",
        "MODEL",
        "number",
        1.0,
        without_effect=_without_rotary,
        when=lambda plan: plan.model.rotary_fraction != 1.0,
    ),
    Row(
        "--normalization",
        "model.norm",
        "MODEL",
        "word",
        "layernorm",
        words={"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"},
    ),
    switch(
        "--swiglu",
        "model.activation",
        "MODEL",
        {True: "swiglu", False: "gelu"},
        value=lambda plan: plan.model.activation == "swiglu",
    ),
    switch(
        "--quick-geglu",
        "model.activation",
        "MODEL",
        read=_quick_geglu,
        value=lambda plan: plan.model.activation == "quick_geglu",
    ),
    switch(
        "--squared-relu",
        "model.activation",
        "MODEL",
        read=_squared_relu,
        value=lambda plan: plan.model.activation == "relu2",
    ),
    Row(
        "--activation-func-clamp-value",
        "model.activation_clamp",
        "MODEL",
        "number",
        when=lambda plan: plan.model.activation_clamp is not None,
    ),
    Row(
        "--softmax-type",
        "model.attention_sinks",
        "MODEL",
        "word",
        read=_sinks,
        value=lambda plan: "learnable",
        when=lambda plan: plan.model.attention_sinks,
    ),
    Row(
        "--window-size",
        "model.sliding_window",
        "MODEL",
        "word",
        read=_window,
        value=lambda plan: f"{plan.model.sliding_window - 1},0" if plan.model.sliding_window else None,
        when=_windowed,
    ),
    Row(
        "--window-attn-skip-freq",
        "model.alternating_windows",
        "MODEL",
        "word",
        read=elsewhere,
        value=lambda plan: 2,
        when=lambda plan: _windowed(plan) and plan.model.alternating_windows,
    ),
    switch("--disable-bias-linear", "model.mlp_bias", "MODEL", OFF),
    switch("--disable-bias-linear", "model.attention_output_bias", "", OFF),
    switch(
        "--add-qkv-bias",
        "model.attention_bias",
        "MODEL",
        read=_attention_bias,
        value=lambda plan: plan.model.attention_bias and not plan.model.mlp_bias,
    ),
    switch(
        "--qk-layernorm",
        "model.qk_norm",
        "MODEL",
        read=_query_key_norm,
        value=lambda plan: plan.model.qk_norm and not _without_weight(plan),
    ),
    switch("--qk-l2-norm", "model.qk_norm_over", "MODEL", read=elsewhere, value=_without_weight),
    Row(
        "--no-rope-freq",
        "model.nope_interval",
        "MODEL",
        "word",
        read=_no_rope,
        when=lambda plan: plan.model.nope_interval > 0,
    ),
    switch("--untie-embeddings-and-output-weights", "model.tied_embeddings", "MODEL", OFF),
    switch(
        "--bert-no-binary-head",
        "model.token_types",
        "MODEL",
        read=_token_types,
        value=lambda plan: plan.model.family == "bert" and not plan.model.token_types,
    ),
    Row("--make-vocab-size-divisible-by", "megatron.vocab_multiple", "MODEL", read=_vocabulary),
    *DROPOUTS,
)

# -- layout and batch ---------------------------------------------------------------------------------


def _sequence_parallel(reader: Reader) -> None:
    name = "--sequence-parallel"
    on = reader.settings.has(name) and reader.building.size("layout.tp") != 1
    reader.building.put("layout.sequence_parallel", Node(on, reader.settings.where(name)), name)


def _without_context(reader: Reader) -> str:
    return "no effect with one context-parallel rank" if reader.building.size("layout.cp") == 1 else ""


def _context_communication(reader: Reader) -> None:
    name = "--cp-comm-type"
    kinds = reader.settings.words(name)
    if kinds is None:
        return
    different = {kind.value for kind in kinds}
    if len(different) != 1 or not different <= {"p2p", "a2a", "all_gather"}:
        shown = " ".join(str(kind.value) for kind in kinds)
        problem = "is not modelled yet; p2p, a2a or all_gather, the same for every layer, is"
        raise PlanError(name, shown, problem, origin=reader.settings.where(name))
    reader.building.put("megatron.cp_communication", kinds[0], name)


_LAYOUT = "--pipeline-model-parallel-layout"
_VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
_VIRTUAL_LAYERS = "--num-layers-per-virtual-pipeline-stage"
_COUNTED = tuple(f"--account-for-{end}-in-pipeline-split" for end in ("embedding", "loss"))


def _chunks(reader: Reader) -> None:
    """Virtual stages of a rank: a number, or what a layout string or the layers of each make of them."""
    settings, put = reader.settings, reader.building.put
    if (cut := hybrid.chunks(reader, (_VIRTUAL_LAYERS, _VIRTUAL, _LAYOUT, *_COUNTED))) is not None:
        put("layout.vpp", cut, hybrid.PATTERN)
        return
    given = [name for name in (_VIRTUAL_LAYERS, _VIRTUAL, _LAYOUT) if settings.has(name)]
    if len(given) > 1:
        problem = f"must be left out with {given[0]}: only one of them says how many virtual stages there are"
        raise PlanError(given[1], ABSENT, problem, origin=settings.where(given[1]))
    if not given:
        put("layout.vpp", 1)
        return
    (name,) = given
    node = settings.word(name) if name == _LAYOUT else settings.integer(name)
    try:
        chunks = _counted_chunks(reader, name, node)
    except PlanError as error:
        raise PlanError(name, node.value, error.problem, origin=node.origin) from None
    put("layout.vpp", Node(chunks, node.origin), name)


def _counted_chunks(reader: Reader, name: str, node: Node) -> int:
    pp = reader.building.size("layout.pp")
    if name == _VIRTUAL and isinstance(node.value, int):
        return positive("", node)
    if isinstance(node.value, int):
        layers = positive("--num-layers", reader.building.items["model.layers"])
        return virtual_stages(layers, pp, node.value, *map(reader.settings.has, _COUNTED))
    count = written_out(str(node.value)).count("|") + 1
    if count % pp:
        raise PlanError("", count, f"has {count} stages, which the {pp} ranks of the pipeline must divide")
    return count // pp


def _without_chunks(reader: Reader) -> str:
    return "no effect without virtual stages" if reader.building.items["layout.vpp"].value == 1 else ""


def _interleaved(plan: Plan) -> bool:
    return plan.layout.vpp > 1


_BATCH_SCHEDULE = "--step-batch-size-schedule"


def _last_batch(steps: Node) -> Node:
    """``"0:768 250B:1536"``: of a batch that grows in steps its last size, beside which there is no other."""
    last = str(steps.value).replace('"', "").split()[-1:]
    size = last[0].rpartition(":")[2] if last else ""
    if not size.isdigit():
        problem = "must be steps such as 0:768 250B:1536"
        raise PlanError(_BATCH_SCHEDULE, steps.value, problem, origin=steps.origin)
    return Node(int(size), steps.origin)


def _gbs(reader: Reader) -> None:
    """Where nobody says, one micro-batch on every data-parallel rank."""
    settings, building, gpus = reader.settings, reader.building, reader.context.gpus
    steps = settings.word(_BATCH_SCHEDULE)
    gbs = settings.integer("--global-batch-size") if steps is None else _last_batch(steps)
    if gbs is not None:
        building.put("batch.gbs", gbs, _BATCH_SCHEDULE if steps is not None else "--global-batch-size")
    elif gpus is not None:
        ranks = building.size("layout.tp") * building.size("layout.pp") * building.size("layout.cp")
        mbs = building.items["batch.mbs"]
        dp = max(positive("--gpus", gpus) // ranks, 1)
        building.put("batch.gbs", Node(positive("--micro-batch-size", mbs) * dp, mbs.origin))


PARALLEL = (
    Row("--tensor-model-parallel-size", "layout.tp", "PARALLEL", default=1, least=1),
    Row("--pipeline-model-parallel-size", "layout.pp", "PARALLEL", default=1, least=1),
)
LAYOUT = (
    *PARALLEL,
    Row("--context-parallel-size", "layout.cp", "PARALLEL", default=1, least=1, when=lambda plan: plan.layout.cp > 1),
    Row(
        "--cp-comm-type",
        "megatron.cp_communication",
        "PARALLEL",
        read=_context_communication,
        without_effect=_without_context,
        when=lambda plan: plan.layout.cp > 1,
    ),
    Row(
        "--expert-model-parallel-size",
        "layout.ep",
        "PARALLEL",
        default=1,
        least=1,
        when=lambda plan: plan.layout.ep > 1,
    ),
    switch("--sequence-parallel", "layout.sequence_parallel", "PARALLEL", read=_sequence_parallel),
    Row(
        _VIRTUAL,
        "layout.vpp",
        "PARALLEL",
        read=_chunks,
        when=lambda plan: plan.pipeline.layout is None and _interleaved(plan) and hybrid.is_plain(plan),
    ),
    Row(_LAYOUT, "pipeline.layout", "PARALLEL", "word", when=hybrid.is_plain),
    Row("--decoder-first-pipeline-num-layers", "pipeline.first_layers", "PARALLEL", when=hybrid.is_plain),
    Row("--decoder-last-pipeline-num-layers", "pipeline.last_layers", "PARALLEL", when=hybrid.is_plain),
    switch(_COUNTED[0], "pipeline.count_embedding", "PARALLEL", when=hybrid.is_plain),
    switch(_COUNTED[1], "pipeline.count_loss", "PARALLEL", when=hybrid.is_plain),
    Row(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "pipeline.group",
        "PARALLEL",
        without_effect=_without_chunks,
        when=_interleaved,
    ),
    switch(
        "--no-overlap-p2p-communication",
        "pipeline.overlap_p2p",
        "PARALLEL",
        OFF,
        without_effect=_without_chunks,
        when=_interleaved,
    ),
    switch(
        "--overlap-p2p-communication-warmup-flush",
        "pipeline.overlap_p2p_warmup",
        "PARALLEL",
        without_effect=_without_chunks,
    ),
)
BATCH = (
    Row("--micro-batch-size", "batch.mbs", "BATCH", default=NEEDED),
    Row("--global-batch-size", "batch.gbs", "BATCH", read=_gbs),
    Row(
        "--eval-micro-batch-size",
        "megatron.evaluation_mbs",
        "BATCH",
        when=lambda plan: plan.megatron.evaluation_mbs is not None,
    ),
    Row("--seq-length", "batch.seq", "BATCH", default=NEEDED, older=("--encoder-seq-length",)),
    Row(
        "--decoder-seq-length",
        "batch.decoder_seq",
        "BATCH",
        read=_decoder,
        when=lambda plan: plan.batch.decoder_seq is not None,
    ),
    Row(DECODER_LAYERS, "model.layers", "BATCH", read=elsewhere, when=lambda plan: plan.batch.decoder_seq is not None),
)

# -- precision, optimizer, recompute ------------------------------------------------------------------


def _precision(reader: Reader) -> None:
    """bf16 accumulates in fp32 unless it is told to reduce in bf16 or to keep its main gradients in it. Megatron-FSDP
    has an argument of its own."""
    settings = reader.settings
    if settings.has("--fp16") and settings.has("--bf16"):
        raise PlanError("--fp16", ABSENT, "must be left out with --bf16", origin=settings.where("--fp16"))
    dtype = put_dtype(reader)
    if sharding.runs(reader):
        sharding.put_dtypes(reader, dtype)
        return
    accumulates = settings.has("--accumulate-allreduce-grads-in-fp32")
    reduces = dtype == "bf16" and settings.has("--grad-reduce-in-bf16")
    main = settings.word("--main-grads-dtype")
    in_fp32 = accumulates or (dtype == "bf16" and (main is None or main.value == "fp32"))
    names = ("--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16", "--main-grads-dtype")
    gradients = "fp32" if in_fp32 and not reduces else dtype
    where = settings.where(*reversed(names[:2]), names[2])
    reader.building.put("precision.gradients", Node(gradients, where), *names)


def put_dtype(reader: Reader) -> str:
    """Puts the dtype of the parameters, and returns it."""
    names = ("--fp16", "--bf16")
    dtype = next((name[2:] for name in names if reader.settings.has(name)), "fp32")
    reader.building.put("precision.dtype", Node(dtype, reader.settings.where(*names)), *names)
    return dtype


def _reduces_in_bf16(plan: Plan) -> bool:
    return not sharding.is_sharded(plan) and plan.precision.dtype == plan.precision.gradients == "bf16"


def _accumulates_in_fp32(plan: Plan) -> bool:
    return not sharding.is_sharded(plan) and plan.precision.dtype != "fp32" and plan.precision.gradients == "fp32"


def _optimizer(reader: Reader) -> None:
    name = "--optimizer"
    kind = reader.settings.word(name) or Node("adam", reader.settings.origin)
    kind = Node("muon", kind.origin) if kind.value == "dist_muon" else kind
    if kind.value not in ("adam", "sgd", "muon"):
        raise PlanError(name, kind.value, "is not modelled yet; adam, sgd and muon are", origin=kind.origin)
    reader.building.put("optimizer.name", kind, name)


def its_optimizer(plan: Plan) -> Any:
    """Adam is AdamW there (``OptimizerConfig.decoupled_weight_decay``)."""
    return plan.optimizer.algorithm.megatron


def _recompute(reader: Reader) -> None:
    settings, building = reader.settings, reader.building
    name = "--recompute-granularity"
    mode = settings.word(name)
    if settings.has("--recompute-activations"):
        name, mode = "--recompute-activations", Node("selective", settings.where("--recompute-activations"))
    if mode is None:
        for unused in ("--recompute-method", "--recompute-num-layers", "--recompute-modules"):
            building.because(unused, "no effect without --recompute-granularity")
        return
    building.put("recompute.mode", mode, name)
    if mode.value == "selective":
        modules = settings.words("--recompute-modules")
        if modules is not None:
            kept = Node(_recomputed(building, modules), settings.where("--recompute-modules"))
            building.put("recompute.modules", kept, "--recompute-modules")
        return
    method = settings.word("--recompute-method")
    if method is None:
        problem = "is missing: full recompute needs it, uniform or block"
        raise PlanError("--recompute-method", ABSENT, problem, origin=mode.origin)
    layers = settings.integer("--recompute-num-layers")
    if method.value == "block" and layers is not None and layers.value == 0:
        building.put("recompute.mode", Node("none", layers.origin), name, "--recompute-num-layers")
        building.because("--recompute-method", "block of 0 layers: none is recomputed")
        return
    building.put("recompute.method", method, "--recompute-method")
    if layers is not None:
        building.put("recompute.layers", layers, "--recompute-num-layers")


def _recomputed(building: Building, modules: list[Node]) -> list[Node]:
    """Modules that are recomputed, each once; those of layers that the model has not are not there."""
    absent = {
        **dict.fromkeys(("moe", "moe_act", "shared_experts"), not building.items["model.experts"].value),
        "mla_up_proj": "model.latent_kv_rank" not in building.items,
    }
    kept: dict[object, Node] = {}
    for module in modules:
        if absent.get(str(module.value)):
            building.because("--recompute-modules", f"{module.value}: not in a layer of this model")
        elif module.value in _MODULES:
            kept[module.value] = module
        else:
            problem = f"is not modelled yet; {', '.join(_MODULES)} are"
            raise PlanError("--recompute-modules", module.value, problem, origin=module.origin, known=_MODULES)
    return list(kept.values())


def _in_full(plan: Plan) -> bool:
    return plan.recompute.mode == "full"


def largest_chunk(plan: Plan) -> int:
    """Layers of the virtual stage of Megatron-Core that has most."""
    pipeline, layout = plan.pipeline, plan.layout
    found = stages(
        plan.model.layers,
        layout.pp,
        layout.vpp,
        pipeline.first_layers,
        pipeline.last_layers,
        pipeline.count_embedding,
        pipeline.count_loss,
        pipeline.layout,
    )
    return max(len(chunk.layers) for stage in found for chunk in stage)


OFFLOAD = "--optimizer-cpu-offload"


def _offload(reader: Reader) -> None:
    settings, name = reader.settings, "--optimizer-offload-fraction"
    if not settings.has(OFFLOAD):
        reader.building.because(name, f"no effect without {OFFLOAD}")
        return
    fraction = settings.number(name) or Node(1.0, settings.where(OFFLOAD))
    reader.building.put("megatron.optimizer_offload", fraction, OFFLOAD, name)


OFFLOADING = "--fine-grained-activation-offloading"


def _offloading(reader: Reader) -> None:
    """Modules whose saved tensors go to the host, each once."""
    settings, building, name = reader.settings, reader.building, "--offload-modules"
    if not settings.has(OFFLOADING):
        for unused in (name, *_OFFLOADING_PARTS):
            building.because(unused, f"no effect without {OFFLOADING}")
        return
    modules = settings.words(name)
    if not modules:
        problem = f"is missing: {OFFLOADING} needs modules, of {', '.join(OFFLOAD_MODULES)}"
        raise PlanError(name, ABSENT, problem, origin=settings.where(OFFLOADING))
    for module in modules:
        if module.value not in OFFLOAD_MODULES:
            problem = f"is not modelled yet; {', '.join(OFFLOAD_MODULES)} are"
            raise PlanError(name, module.value, problem, origin=module.origin, known=OFFLOAD_MODULES)
    for part, plain in _OFFLOADING_PARTS.items():
        given = settings.number(part)
        if given is not None and given.value != plain:
            raise PlanError(part, given.value, f"is not modelled yet; {plain} is", origin=given.origin)
    once = {module.value: module for module in modules}
    building.put("megatron.offload_modules", Node(list(once.values()), settings.where(name)), OFFLOADING, name)


OFFLOAD_MODULES = get_args(OffloadModule)
_OFFLOADING_PARTS = {"--delta-offload-bytes-across-pp-ranks": 0, "--activation-offload-fraction": 1}
"""Arguments that share out what goes to the host, and the value that leaves it as it is."""


def _has_offloading(plan: Plan) -> bool:
    return plan.megatron.offload_modules is not None


def _offloads(plan: Plan) -> bool:
    return plan.megatron.optimizer_offload > 0


def _precisely(plan: Plan) -> bool:
    return plan.optimizer.precision_aware


TRAINING = (
    switch(
        "--fp16", "precision.dtype", "PRECISION", read=_precision, value=lambda plan: plan.precision.dtype == "fp16"
    ),
    switch("--bf16", "precision.dtype", "PRECISION", read=elsewhere, value=lambda plan: plan.precision.dtype == "bf16"),
    switch("--grad-reduce-in-bf16", "precision.gradients", "PRECISION", read=elsewhere, value=_reduces_in_bf16),
    switch(
        "--accumulate-allreduce-grads-in-fp32",
        "precision.gradients",
        "PRECISION",
        read=elsewhere,
        value=_accumulates_in_fp32,
    ),
    Row("--optimizer", "optimizer.name", "OPTIMIZER", read=_optimizer, value=its_optimizer),
    Row("--clip-grad", "megatron.clip_grad", "OPTIMIZER", "number"),
    switch("--use-distributed-optimizer", "layout.zero", "OPTIMIZER", {True: 1, False: 0}),
    Row(
        "--num-distributed-optimizer-instances",
        "megatron.distributed_optimizer_instances",
        "OPTIMIZER",
        when=lambda plan: plan.megatron.distributed_optimizer_instances > 1,
    ),
    switch("--use-precision-aware-optimizer", "optimizer.precision_aware", "OPTIMIZER"),
    switch(OFFLOAD, "megatron.optimizer_offload", "OPTIMIZER", read=_offload, value=_offloads),
    Row("--optimizer-offload-fraction", "megatron.optimizer_offload", "OPTIMIZER", read=elsewhere, when=_offloads),
    switch(OFFLOADING, "megatron.offload_modules", "RECOMPUTE", read=_offloading, value=_has_offloading),
    Row(
        "--offload-modules",
        "megatron.offload_modules",
        "RECOMPUTE",
        read=elsewhere,
        when=_has_offloading,
        value=lambda plan: plan.megatron.offload_modules or (),
    ),
    Row(
        "--min-offloaded-tensor-size",
        "megatron.offload_least",
        "RECOMPUTE",
        without_effect=lambda reader: "" if reader.settings.has(OFFLOADING) else f"no effect without {OFFLOADING}",
        when=_has_offloading,
    ),
    Row("--main-params-dtype", "optimizer.main_parameters", "OPTIMIZER", "word", when=_precisely),
    Row("--exp-avg-dtype", "optimizer.exp_avg", "OPTIMIZER", "word", when=_precisely),
    Row("--exp-avg-sq-dtype", "optimizer.exp_avg_sq", "OPTIMIZER", "word", when=_precisely),
    Row(
        "--recompute-granularity",
        "recompute.mode",
        "RECOMPUTE",
        read=_recompute,
        when=lambda plan: plan.recompute.mode != "none",
    ),
    Row(
        "--recompute-modules",
        "recompute.modules",
        "RECOMPUTE",
        read=elsewhere,
        when=lambda plan: plan.recompute.mode == "selective",
        value=lambda plan: plan.recompute.modules or (),
    ),
    Row("--recompute-method", "recompute.method", "RECOMPUTE", read=elsewhere, when=_in_full),
    Row(
        "--recompute-num-layers",
        "recompute.layers",
        "RECOMPUTE",
        read=elsewhere,
        when=_in_full,
        value=lambda plan: plan.recompute.layers or largest_chunk(plan),
    ),
)

# -- implementations, and the loop around the model ---------------------------------------------------


def _implementation(reader: Reader) -> None:
    """BERT's script reads ``--spec``, GPT's ``--transformer-impl`` unless a specification of layers is named."""
    settings, path = reader.settings, "megatron.transformer_impl"
    spec = settings.words("--spec") or []
    if reader.context.family == "hybrid":
        _hybrid_spec(reader, spec)
        return
    local = bool(spec) and spec[0].value == "local"
    if reader.context.family == "bert" or local:
        chosen = Node("local" if local else "transformer_engine", settings.where("--spec"))
        reader.building.put(path, chosen, "--spec")
        return
    if spec:
        problem = "names a specification of layers, which is not modelled; leave it out for Megatron's own, or local"
        raise PlanError("--spec", spec[0].value, problem, origin=spec[0].origin)
    name = "--transformer-impl"
    node = settings.word(name) or Node("transformer_engine", settings.origin)
    if node.value == "inference_optimized":
        raise PlanError(name, node.value, "is not for training; transformer_engine and local are", origin=node.origin)
    reader.building.put(path, node, name)


def _hybrid_spec(reader: Reader, spec: list[Node]) -> None:
    """``hybrid_builder`` takes layers from ``--spec`` alone, and those that there are from Transformer Engine."""
    if not spec or spec[-1].value not in hybrid.STACKS:
        given = " ".join(str(one.value) for one in spec) or ABSENT
        problem = (
            f"must be {' '.join(hybrid.SPEC)}: hybrids need a specification of layers, and others are not modelled"
        )
        raise PlanError("--spec", given, problem, origin=reader.settings.where("--spec"))
    reader.building.put("megatron.transformer_impl", Node("transformer_engine", spec[0].origin), "--spec")


def _fused_where(name: str, path: str, condition: str, wanted: object, when: Callable[[Plan], bool]) -> Row:
    """A fusion that ``name`` turns off; there is one where the model's field ``condition`` is ``wanted``."""

    def read(reader: Reader) -> None:
        there = reader.building.items[condition].value == wanted and not reader.settings.has(name)
        reader.building.put(path, Node(there, reader.settings.where(name)), name)

    return switch(name, path, "LAYERS", OFF, read=read, when=when)


def _softmax(reader: Reader) -> None:
    names = ("--attention-softmax-in-fp32", "--apply-query-key-layer-scaling")
    wide = any(map(reader.settings.has, names))
    reader.building.put("megatron.attention_softmax_in_fp32", Node(wide, reader.settings.where(*names)), *names)


def _fused_loss(reader: Reader) -> None:
    settings = reader.settings
    fused, whose = "--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl"
    kind = settings.word(whose) or Node("native", settings.where(fused))
    kind = kind if settings.has(fused) else Node("none", settings.origin)
    reader.building.put("megatron.cross_entropy_fusion", kind, fused, whose)


def _check_for_nan(reader: Reader) -> None:
    """Dynamic loss scaling turns it off by itself."""
    settings, name = reader.settings, "--no-check-for-nan-in-loss-and-grad"
    scale = settings.number("--loss-scale")
    dynamic = settings.has("--fp16") and not (scale is not None and scale.value)
    checks = Node(not (settings.has(name) or dynamic), settings.where(name, "--fp16"))
    reader.building.put("megatron.check_for_nan", checks, name)


def _is_bert(plan: Plan) -> bool:
    return plan.model.family == "bert"


def _fuses_loss(plan: Plan) -> bool:
    return plan.megatron.cross_entropy_fusion != "none"


def _without_ranks(reader: Reader) -> str:
    return "no effect with one tensor-parallel rank" if reader.building.size("layout.tp") == 1 else ""


LAYERS = (
    Row(
        "--spec",
        "megatron.transformer_impl",
        "LAYERS",
        read=_implementation,
        when=lambda plan: hybrid.is_hybrid(plan) or (_is_bert(plan) and plan.megatron.transformer_impl == "local"),
        value=lambda plan: hybrid.SPEC if hybrid.is_hybrid(plan) else "local",
    ),
    Row(
        "--transformer-impl",
        "megatron.transformer_impl",
        "LAYERS",
        read=elsewhere,
        when=lambda plan: not _is_bert(plan),
    ),
    Row(
        "--attention-backend",
        "megatron.attention_backend",
        "LAYERS",
        "word",
        when=lambda plan: plan.megatron.attention_backend != "auto",
    ),
    switch("--deterministic-mode", "megatron.deterministic", "LAYERS"),
    switch("--no-gradient-accumulation-fusion", "megatron.gradient_accumulation_fusion", "LAYERS", OFF),
    _fused_where(
        "--no-bias-gelu-fusion",
        "megatron.bias_gelu_fusion",
        "model.mlp_bias",
        True,
        lambda plan: plan.model.mlp_bias and plan.model.activation != "swiglu",
    ),
    switch(
        "--no-bias-swiglu-fusion",
        "megatron.bias_swiglu_fusion",
        "LAYERS",
        OFF,
        when=lambda plan: plan.model.activation == "swiglu",
    ),
    switch("--no-bias-dropout-fusion", "megatron.bias_dropout_fusion", "LAYERS", OFF),
    _fused_where(
        "--no-rope-fusion",
        "megatron.rope_fusion",
        "model.positions",
        "rotary",
        lambda plan: plan.model.positions == "rotary",
    ),
    switch("--no-masked-softmax-fusion", "megatron.masked_softmax_fusion", "LAYERS", OFF),
    switch("--rotary-interleaved", "megatron.rotary_interleaved", "LAYERS"),
    switch("--apply-query-key-layer-scaling", "megatron.query_key_layer_scaling", "LAYERS"),
    switch(
        "--attention-softmax-in-fp32",
        "megatron.attention_softmax_in_fp32",
        "LAYERS",
        read=_softmax,
        when=lambda plan: not plan.megatron.query_key_layer_scaling,
    ),
    switch("--fp32-residual-connection", "megatron.fp32_residual", "LAYERS"),
    switch("--no-clone-scatter-output-in-embedding", "megatron.clone_scattered_embedding", "LAYERS", OFF),
    switch("--calculate-per-token-loss", "megatron.per_token_loss", "LAYERS"),
    switch("--no-create-attention-mask-in-dataloader", "megatron.attention_mask_in_dataloader", "LAYERS", OFF),
    switch(
        "--cross-entropy-loss-fusion", "megatron.cross_entropy_fusion", "LAYERS", read=_fused_loss, value=_fuses_loss
    ),
    Row("--cross-entropy-fusion-impl", "megatron.cross_entropy_fusion", "LAYERS", read=elsewhere, when=_fuses_loss),
    switch("--ddp-pad-buckets-for-high-nccl-busbw", "megatron.pad_buckets", "REDUCTION"),
    switch(
        "--tp-comm-overlap",
        "megatron.tp_comm_overlap",
        "REDUCTION",
        without_effect=_without_ranks,
    ),
    switch("--defer-embedding-wgrad-compute", "megatron.defer_embedding_wgrad", "REDUCTION"),
    Row(
        "--wgrad-deferral-limit",
        "megatron.wgrad_deferral_limit",
        "REDUCTION",
        when=lambda plan: plan.megatron.wgrad_deferral_limit > 0,
    ),
    switch("--overlap-grad-reduce", "megatron.overlap_grad_reduce", "REDUCTION"),
    switch("--overlap-param-gather", "megatron.overlap_param_gather", "REDUCTION"),
    Row("--ddp-bucket-size", "megatron.bucket_size", "REDUCTION"),
    Row("--ddp-num-buckets", "megatron.buckets", "REDUCTION", when=lambda plan: plan.megatron.buckets is not None),
    switch("--log-num-zeros-in-grad", "megatron.log_num_zeros_in_grad", "REDUCTION"),
    switch("--log-params-norm", "megatron.log_params_norm", "REDUCTION"),
    switch(
        "--no-check-for-nan-in-loss-and-grad",
        "megatron.check_for_nan",
        "REDUCTION",
        OFF,
        read=_check_for_nan,
        when=lambda plan: plan.precision.dtype != "fp16",
    ),
)

ROWS = (
    *MODEL,
    *hybrid.ROWS,
    *experts.ROWS,
    *LAYOUT,
    *BATCH,
    *TRAINING,
    *low_precision.ROWS,
    *LAYERS,
    *graphs.ROWS,
    *sharding.ROWS,
)
