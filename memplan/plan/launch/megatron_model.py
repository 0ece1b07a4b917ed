"""The architecture that Megatron-LM's arguments describe: sizes, biases, positions, dropout and vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import ABSENT, PlanError
from ..node import Node
from .building import Building
from .settings import Settings
from .vocabulary import tokens_of

Family = Literal["gpt", "bert"]

_POSITIONS = {"learned_absolute": "learned", "rope": "rotary", "yarn": "rotary", "none": "none"}


@dataclass(frozen=True, slots=True)
class Context:
    """What a plan needs beside arguments: the model's kind and name, and what flags or launchers say."""

    family: Family
    name: str
    folder: Path
    gpus: Node | None = None
    gpus_per_node: Node | None = None
    vocabulary: Node | None = None


def needs(settings: Settings, *names: str) -> Node:
    """The whole number of the first of ``names`` that is given."""
    for name in names:
        node = settings.integer(name)
        if node is not None:
            return node
    raise PlanError(names[0], ABSENT, "is missing: Megatron needs it", origin=settings.origin)


def positive(name: str, node: Node) -> int:
    """``node`` as a number that can be a size."""
    assert isinstance(node.value, int)
    if node.value < 1:
        raise PlanError(name, node.value, "must be at least 1", origin=node.origin)
    return node.value


def model_fields(building: Building, settings: Settings, context: Context) -> None:
    """Fields of the section ``model``, and what the vocabulary is padded to."""
    _refuse_experts(settings)
    bert = context.family == "bert"
    origin = settings.origin
    put = building.put
    put("model.name", Node(context.name, origin))
    put("model.family", Node(context.family, origin))
    layers = "--num-layers" if settings.has("--num-layers") else "--encoder-num-layers"
    put("model.layers", needs(settings, "--num-layers", "--encoder-num-layers"), layers)
    sizes(building, settings)
    put("model.kv_heads", *_kv_heads(building, settings))
    put("model.positions_max", needs(settings, "--max-position-embeddings"), "--max-position-embeddings")
    _vocabulary(building, settings, context)
    norm = settings.word("--normalization")
    put(
        "model.norm",
        Node(str(norm.value).lower() if norm else "layernorm", settings.where("--normalization")),
        "--normalization",
    )
    put("model.positions", *_positions(settings, bert))
    put(
        "model.activation",
        Node("swiglu" if settings.has("--swiglu") else "gelu", settings.where("--swiglu")),
        "--swiglu",
    )
    linear = settings.switch("--disable-bias-linear", inverted=True)
    put("model.mlp_bias", linear, "--disable-bias-linear")
    put("model.attention_output_bias", linear, "--disable-bias-linear")
    attention = Node(
        bool(linear.value) or settings.has("--add-qkv-bias"), settings.where("--add-qkv-bias", "--disable-bias-linear")
    )
    put("model.attention_bias", attention, "--add-qkv-bias", "--disable-bias-linear")
    put("model.qk_norm", settings.switch("--qk-layernorm"), "--qk-layernorm")
    put("model.causal", Node(not bert, origin))
    put("model.mlm_head", Node(bert, origin))
    binary = settings.switch("--bert-no-binary-head", inverted=True)
    put("model.token_types", Node(2 if bert and binary.value else 0, binary.origin), "--bert-no-binary-head")
    put(
        "model.tied_embeddings",
        settings.switch("--untie-embeddings-and-output-weights", inverted=True),
        "--untie-embeddings-and-output-weights",
    )
    dropouts(building, settings)


def _refuse_experts(settings: Settings) -> None:
    experts = settings.integer("--num-experts")
    if experts is not None and experts.value:
        problem = "must be left out: models with experts are not modelled yet; dense ones are"
        raise PlanError("--num-experts", experts.value, problem, origin=experts.origin)


def sizes(building: Building, settings: Settings) -> None:
    """Hidden size, heads, features of a head, width of the MLP."""
    hidden, heads = needs(settings, "--hidden-size"), needs(settings, "--num-attention-heads")
    h, a = positive("--hidden-size", hidden), positive("--num-attention-heads", heads)
    building.put("model.hidden", hidden, "--hidden-size")
    building.put("model.heads", heads, "--num-attention-heads")
    channels = settings.integer("--kv-channels")
    if channels is None:
        if h % a:
            problem = f"must divide --hidden-size {h} unless --kv-channels is given"
            raise PlanError("--num-attention-heads", a, problem, origin=heads.origin)
        channels = Node(h // a, heads.origin)
    building.put("model.head_dim", channels, "--kv-channels")
    ffn = settings.integer("--ffn-hidden-size")
    if ffn is None:
        two_thirds = int((4 * h * 2 / 3) / 64) * 64 if h < 1 << 40 else 4 * h
        ffn = Node(two_thirds if settings.has("--swiglu") else 4 * h, hidden.origin)
    building.put("model.ffn", ffn, "--ffn-hidden-size")


def dropouts(building: Building, settings: Settings) -> None:
    """Dropout of the embedding is that of the hidden state."""
    for path, name in (
        ("model.embedding_dropout", "--hidden-dropout"),
        ("model.hidden_dropout", "--hidden-dropout"),
        ("model.attention_dropout", "--attention-dropout"),
    ):
        building.put(path, settings.number(name) or Node(0.1, settings.origin), name)


def _kv_heads(building: Building, settings: Settings) -> tuple[Node, str, str]:
    grouped, number = "--group-query-attention", "--num-query-groups"
    if not settings.has(grouped):
        building.because(number, f"no effect without {grouped}")
        return needs(settings, "--num-attention-heads"), grouped, "--num-attention-heads"
    return settings.integer(number) or Node(1, settings.where(grouped)), grouped, number


def _positions(settings: Settings, bert: bool) -> tuple[Node, str]:
    name = "--position-embedding-type"
    if bert:  # pretrain_bert.py does not pass it on
        return Node("learned", settings.origin), name
    if settings.has("--use-rotary-position-embeddings"):
        return Node("rotary", settings.where("--use-rotary-position-embeddings")), "--use-rotary-position-embeddings"
    kind = settings.word(name)
    if kind is None:
        return Node("learned", settings.origin), name
    if kind.value not in _POSITIONS:
        problem = f"is not modelled yet; {', '.join(_POSITIONS)} are"
        raise PlanError(name, kind.value, problem, origin=kind.origin)
    return Node(_POSITIONS[str(kind.value)], kind.origin), name


def _vocabulary(building: Building, settings: Settings, context: Context) -> None:
    """Tokens before padding, and what they are padded to a multiple of (times the tensor-parallel size)."""
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
        for name in ("--vocab-file", "--tokenizer-model"):
            if name not in names:
                building.because(name, f"not read: model.vocab = {node.value} without it")
    if padded is not None or settings.has("--no-pad-vocab-size"):
        multiple = Node(1, settings.where("--padded-vocab-size", "--no-pad-vocab-size"))
    building.put("megatron.vocab_multiple", multiple, "--make-vocab-size-divisible-by", "--no-pad-vocab-size")
