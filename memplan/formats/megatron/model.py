"""Megatron-LM's arguments of the model (``arguments.py``, ``_add_network_size_args``; ``transformer_config.py``)."""

from __future__ import annotations

from ...plan.errors import Node, PlanError
from ...plan.notes import VOCAB_UNUSED
from ...plan.plan import Plan
from ...plan.spec import MOST_LAYERS
from ..settings import LEFT, NEEDED, OFF, Reader, Row, elsewhere, switch
from . import blocks, experts, hybrid
from .vocabulary import tokens_of


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


YARN = "yarn"
_POSITIONS = {"learned_absolute": "learned", "rope": "rotary", YARN: "rotary", "none": "none"}


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
        raise kind.wrong(name, f"is not modelled yet; {', '.join(_POSITIONS)} are")
    else:
        put("model.positions", Node(_POSITIONS[str(kind.value)], kind.origin), name)


def _without_rotary(reader: Reader) -> str:
    rotary = reader.building.items["model.positions"].value == "rotary" and not reader.settings.has(experts.LATENT)
    return "" if rotary else "no effect without rotary positions of whole heads"


def _without_yarn(reader: Reader) -> str:
    """``--rotary-scaling-factor`` is also one of latent attention's, whose kernels scale by themselves."""
    kind = reader.settings.word("--position-embedding-type")
    return "" if kind is not None and kind.value == YARN else "no effect without --position-embedding-type yarn"


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
        raise node.wrong(name, "must be a whole number above 0; a list is not read")
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
        raise node.wrong(
            name, "must be tokens to the left and 0 to the right, such as 127,0; other windows are not modelled"
        )
    if skipped is not None and str(skipped.value) != "2":
        raise skipped.wrong(frequency, "must be 2 or left out: windows in every second layer, or in all")
    reader.building.put("model.sliding_window", Node(int(left) + 1, node.origin), name)
    if skipped is not None:
        reader.building.put("model.alternating_windows", Node(True, skipped.origin), frequency)


def _windowed(plan: Plan) -> bool:
    return plan.model.sliding_window is not None


def _attention_bias(reader: Reader) -> None:
    """Latent attention's queries, keys and values have none, whatever is said (``multi_latent_attention.py``)."""
    names = ("--add-qkv-bias", "--disable-bias-linear")
    biased = reader.settings.has(names[0]) or not reader.settings.has(names[1])
    biased = biased and not reader.settings.has("--multi-latent-attention")
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


def _checkpoint_args(reader: Reader) -> None:
    """``load_args_from_checkpoint``: what the script says of sizes stays, while numbers of key/value heads, of experts
    and kinds of layers are the checkpoint's, whatever it says."""
    name = "--use-checkpoint-args"
    if reader.settings.has(name):
        said = f"{name}: memplan estimates the model of the arguments; the checkpoint, whose key/value heads, "
        reader.building.note("checkpoint-args", f"{said}experts and kinds of layers replace theirs, is not read")
        reader.building.because(name, "the checkpoint is not read: its model is assumed to be that of the arguments")


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
    Row("--use-checkpoint-args", "model.layers", read=_checkpoint_args),
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
        value=lambda plan: YARN if plan.model.yarn_factor else plan.model.positions,
    ),
    Row(
        "--rotary-scaling-factor",
        "model.yarn_factor",
        "MODEL",
        "number",
        without_effect=_without_yarn,
        when=lambda plan: plan.model.yarn_factor is not None,
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
        without={"--squared-relu": "must be left out with --swiglu"},
        value=lambda plan: plan.model.activation == "swiglu",
    ),
    switch(
        "--quick-geglu",
        "model.activation",
        "MODEL",
        {True: "quick_geglu", False: LEFT},
        value=lambda plan: plan.model.activation == "quick_geglu",
    ),
    switch(
        "--squared-relu",
        "model.activation",
        "MODEL",
        {True: "relu2", False: LEFT},
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
        words={"vanilla": False, "learnable": True},
        refused={"off-by-one": "is not modelled yet; vanilla and learnable are"},
        when=lambda plan: plan.model.attention_sinks,
    ),
    switch("--attention-output-gate", "model.attention_gate", "MODEL"),
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
    *blocks.ROWS,
)
