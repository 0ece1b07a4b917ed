"""The models of torchtitan that have a recipe, by the family that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...layers import (
    titan_gpt_oss,
    titan_models,
    titan_moe,
    titan_muse,
    titan_newest,
    titan_qwen35,
    torchtitan,
    torchtitan_tp,
)
from ...layers.autograd import Recorder, Tensor
from ...layers.coverage import LLAMA, Allowed, reads
from ...layers.huggingface import LayerShape
from ...layers.module import hold_bytes
from ...plan.plan import Plan
from ...plan.spec import ModelSpec
from ...tape.events import Category, Hold
from ...values import dataclass, replace

Buffers = Callable[[ModelSpec, int, range], tuple[Hold, ...]]
Norm = Callable[[Recorder, Tensor, str], Tensor]
Block = Callable[[Recorder, Tensor, LayerShape, torchtitan.Policy, "Tensor | None"], Tensor]
"""With the layer's table of rotary positions, if it is a tensor of its own."""


KERNELS = (
    "attention by scaled_dot_product_attention, whose tensors are counted (flex attention, which torchtitan compiles, "
    "is not modelled), and the workspace of cuDNN's front end, which is as large as flash attention's; what cuDNN's "
    "engine takes is not published, and what sorting of rows allocates inside is not counted"
)
"""Taken for granted of torchtitan's models of release 0.2.2."""

EXPERTS = (
    "every expert gets as many rows as any other; all rows, and room for 8 more of each expert, are held with padding "
    "(TOKEN_GROUP_ALIGN_SIZE_M, bf16); torch._grouped_mm, not the loop over experts"
)
"""and of their experts."""

VARLEN_OF_DENSE = "varlen_attn by flash attention 3, as on Hopper, with one document a sequence; windows change no size"
VARLEN = f"{VARLEN_OF_DENSE}; what sorting of rows allocates inside is counted for their sum alone"

DOCUMENTS = (
    "convolutions and gated delta rule of flash-linear-attention, which know where each sequence begins; the few KiB "
    "of tables that say so are not counted"
)
"""Of Qwen 3.5's."""

ROWS = "every expert gets as many rows as any other, without padding; torch._grouped_mm"
"""The same of gpt-oss."""


@dataclass(frozen=True, eq=False)
class Titan:
    """One model of torchtitan."""

    name: str
    title: str
    """Its name, for people."""
    release: str
    """The code that its recipe follows, for people."""
    block: Block
    norm: Norm
    registered: tuple[str, ...]
    """Modules of a layer in the order in which they register their parameters."""
    covers: Allowed
    buffers: Buffers
    """With so many tokens a sequence, of some of the layers."""
    embedding: Callable[[Recorder, LayerShape], Tensor] = torchtitan.embedding
    around_head: Callable[[Recorder, torchtitan.Operator], Tensor] | None = None
    """What its head does to its product, which is in fp32 then."""
    table: Callable[[Recorder, LayerShape], Tensor] | None = None
    """What ``fully_shard`` makes of the table of rotary positions for every layer that it is given to."""
    early_stop: bool = False
    """Recompute ends with the last saved tensor (``ActivationCheckpoint.early_stop``)."""
    keeps_exchanged: bool = False
    """Selective recompute keeps what an all-to-all gives."""
    norm_of_parts: Norm | None = None
    """The same of sequences that tensor parallelism cuts, if ``block`` has a recipe with it."""
    complete: bool = False
    """It is modelled in every dtype, memplan has a module of it that runs, and a search may cut it into stages."""
    compiles: bool = False
    """It has a recipe as ``torch.compile`` runs it."""
    linears: tuple[tuple[str, str], ...] = ()
    """Linear layers that torchao's float8, MXFP8 or NVFP4 may take, by their names here and in torchtitan; none: it has
    no recipe with them."""
    ends_apart: bool = True
    """Its code has the embedding, and norm with head, as units of their own."""
    kernel_of: tuple[int, int] | None = None
    """The first GPUs that have a fused kernel for its attention, by their compute capability."""
    groups_experts: bool = False
    """Experts that ranks share are a second group of their layer's unit (``ShardPlacementResult``), and no unit."""
    shares_sequences: bool = False
    """It has a recipe with context parallelism."""
    given: Callable[[LayerShape], tuple[Hold, ...]] = lambda _: ()
    """What a batch has beside tokens and labels."""
    assumes: tuple[str, ...] = ()
    """What is taken for granted of its layers, for people."""


def _llama_block(r: Recorder, x: Tensor, shape: LayerShape, policy: torchtitan.Policy, _: Tensor | None) -> Tensor:
    if shape.tensor > 1:
        return torchtitan_tp.block(r, x, shape, shape.tensor, policy)
    return torchtitan.block(r, x, shape, policy)


def _table(name: str, shape: tuple[int, ...], dtype: str, counted: tuple[int, ...]) -> Hold:
    """``counted``: its shape as numbers of the dtype ``fp32``."""
    return Hold(0, hold_bytes(counted, "fp32"), Category.BUFFERS, name, shape, dtype)


def _complex_table(spec: ModelSpec, seq: int, _: range) -> tuple[Hold, ...]:
    pairs = (seq, (spec.rope_head_dim or spec.rotary_features) // 2)
    return (_table("freqs_cis", pairs, "complex64", (*pairs, 2)),)


def _cosines(spec: ModelSpec, seq: int, _: range) -> tuple[Hold, ...]:
    table = (seq, 2 * spec.head_dim)
    return (_table("rope_cache", table, "fp32", table),)


def _cosines_of_layers(spec: ModelSpec, seq: int, layers: range) -> tuple[Hold, ...]:
    """Every layer has a table of its own (``RoPE.__init__``), as long as a sequence
    (``Decoder.Config.update_from_config``)."""
    return _cosines(spec, seq, layers) * len(layers)


def _cosines_of_attention(spec: ModelSpec, seq: int, layers: range) -> tuple[Hold, ...]:
    """Tables of the features that turn (``MRoPE``), of layers with attention."""
    table = (seq, 2 * spec.rotary_features)
    return (_table("rope_cache", table, "fp32", table),) * sum(not spec.is_linear(layer) for layer in layers)


def _complex_tables_of_layers(spec: ModelSpec, seq: int, layers: range) -> tuple[Hold, ...]:
    """The same of complex numbers, of layers without positions, too."""
    return _complex_table(spec, seq, layers) * len(layers)


def _places(shape: LayerShape) -> tuple[Hold, ...]:
    """Positions of a micro-batch's tokens, and where its documents begin (``create_varlen_metadata_for_document``)."""
    tokens = (shape.b * shape.s,)
    positions = Hold(0, hold_bytes(tokens, "int64"), Category.INPUTS, "positions", tokens, "int64")
    return positions, Hold(0, hold_bytes((2,), "int32"), Category.INPUTS, "document_starts", (2,), "int32")


def _with_experts(tables: Buffers) -> Buffers:
    """And what every mixture has (``MoE.__init__``): a bias of each expert, and how many rows it got since the last
    step."""

    def buffers(spec: ModelSpec, seq: int, layers: range) -> tuple[Hold, ...]:
        every = (spec.experts,)
        of_layer = tuple(_table(name, every, "fp32", every) for name in ("expert_bias", "tokens_per_expert"))
        return (*tables(spec, seq, layers), *of_layer * sum(map(spec.has_experts, layers)))

    return buffers


DENSE = {"attention_bias": (False,), "attention_output_bias": (False,), "mlp_bias": (False,), "sliding_window": (None,)}
TIES = {"tied_embeddings": (False, True)}
UNTIED = {"tied_embeddings": (False,), "final_norm": (True,), "attention_dropout": (0.0,), **DENSE}
ROUTED = {"router_dtype": (None,), "router_z_loss": (0.0,), "shared_expert_gate": (False,), "router_scaling": (None,)}
ATTENTION = ("query", "key", "value", "attention_output")
LATENT = ("query", "query_down", "query_down_norm", "query_up", "key_value_down", "key_value_norm", "key_value_up")
MIXTURE = (
    *(titan_moe.EXPERTS, "router"),
    *("shared_gate", "shared_down", "shared_up"),
)
NORMS = ("attention_norm", "mlp_norm")
OF_0_2_2 = "release 0.2.2"

OF_MLP = (("gate", "feed_forward.w1"), ("down", "feed_forward.w2"), ("up", "feed_forward.w3"))
LINEARS = (
    *(("query", "attention.wq"), ("key", "attention.wk"), ("value", "attention.wv")),
    *(("attention_output", "attention.wo"), *OF_MLP),
)

LLAMA_3 = Titan(
    "llama3",
    "Llama",
    "December 2024",
    block=_llama_block,
    norm=torchtitan.rms_norm,
    registered=(*ATTENTION, "query_norm", "key_norm", "gate", "down", "up", *NORMS),
    covers={**LLAMA, **UNTIED, **TIES, "qk_norm": (False,)},
    buffers=_complex_table,
    early_stop=True,
    norm_of_parts=torchtitan_tp.rms_norm,
    complete=True,
    compiles=True,
    linears=LINEARS,
    ends_apart=False,
)

QWEN_3 = Titan(
    "qwen3",
    "Qwen 3",
    OF_0_2_2,
    block=titan_models.qwen3_block,
    norm=titan_moe.fused_rms_norm,
    norm_of_parts=titan_models.norm_of_parts,
    registered=("query_norm", "key_norm", *ATTENTION, *MIXTURE, "gate", "down", "up", *NORMS),
    covers={**reads(LLAMA, "experts", "router_weighs_inputs"), **UNTIED, **TIES, **ROUTED, "qk_norm": (True,)},
    buffers=_cosines,
    table=titan_models.rope_cache,
    linears=LINEARS,
    assumes=(KERNELS,),
)

QWEN_3_MOE = Titan(
    "qwen3",
    "Qwen 3",
    OF_0_2_2,
    block=titan_models.qwen3_block,
    norm=titan_moe.fused_rms_norm,
    norm_of_parts=titan_models.norm_of_parts,
    registered=QWEN_3.registered,
    covers={**QWEN_3.covers, **UNTIED},
    buffers=_with_experts(_cosines),
    table=titan_models.rope_cache,
    assumes=(KERNELS, EXPERTS),
)

DEEPSEEK_V3 = Titan(
    "deepseek_v3",
    "DeepSeek V3",
    OF_0_2_2,
    block=titan_models.deepseek_block,
    norm=titan_moe.fused_rms_norm,
    norm_of_parts=titan_models.norm_of_parts,
    registered=(*LATENT, "attention_output", *NORMS, *MIXTURE, "gate", "down", "up"),
    covers=reads(
        {**reads(LLAMA, "experts", "latent_kv_rank", "router_weighs_inputs"), **UNTIED, **ROUTED, "qk_norm": (True,)},
        "router_scaling",
    ),
    buffers=_with_experts(_complex_table),
    keeps_exchanged=True,
    kernel_of=(9, 0),
    assumes=(KERNELS, EXPERTS),
)

GPT_OSS = Titan(
    "gpt_oss",
    "gpt-oss",
    "August 2026",
    block=titan_newest.gpt_oss_block,
    norm=titan_moe.fused_rms_norm,
    registered=("qkv", "attention_output", "sinks", *NORMS, titan_gpt_oss.GATE_UP, titan_gpt_oss.DOWN, "router"),
    covers={
        **reads(LLAMA, "experts", "activation", "attention_sinks", "activation_clamp", "alternating_windows"),
        **{**UNTIED, **ROUTED},
        **{"activation": ("quick_geglu",), "activation_clamp": (7.0,), "qk_norm": (False,), "dense_layers": ((),)},
        **dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), (True,)),
        **{"attention_sinks": (True,), "alternating_windows": (True,), "sliding_window": (128,)},
        **{"router_groups": (0,), "shared_expert_ffn": (0,), "router_score": ("softmax",)},
    },
    buffers=_with_experts(_cosines_of_layers),
    groups_experts=True,
    shares_sequences=True,
    given=_places,
    assumes=(VARLEN, ROWS),
)

MUSE_GLIMMER = Titan(
    "muse_glimmer",
    "Muse Glimmer",
    "August 2026",
    block=titan_muse.block,
    norm=titan_muse.gain_norm,
    embedding=titan_muse.embedding,
    around_head=titan_muse.capped,
    registered=(*ATTENTION, "output_gate", "gate", "down", "up", *NORMS, "post_attention_norm", "post_mlp_norm"),
    covers={
        **reads(LLAMA, "nope_interval"),
        **{**UNTIED, "norm_place": ("both",), "qk_norm": (True,), "qk_norm_over": ("head_without_weight",)},
        **{"attention_gate": (True,), "logit_softcap": (20.0,)},
        **{"sliding_window": (2048,)},
    },
    buffers=_complex_tables_of_layers,
    shares_sequences=True,
    given=_places,
    assumes=(VARLEN_OF_DENSE,),
)

DELTA = (
    *("query", "key", "value", "delta_gate", "delta_a", "delta_b"),
    *("query_convolution", "key_convolution", "value_convolution", "delta_norm"),
)
DELTA_SIZES = (
    *("linear_interval", "linear_key_heads", "linear_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel",
)

QWEN_3_5 = Titan(
    "qwen3_5",
    "Qwen 3.5",
    "August 2026",
    block=titan_qwen35.block,
    norm=titan_qwen35.offset_norm,
    registered=(
        *(*DELTA, "attention_output", "numbers", "query_norm", "key_norm", titan_moe.EXPERTS, "router", "shared_gate"),
        *("shared_down", "shared_up", "shared_opens", "gate", "down", "up", *NORMS),
    ),
    covers={
        **reads(LLAMA, *DELTA_SIZES, "rotary_fraction", "attention_gate"),
        **{**UNTIED, "qk_norm": (True,), "attention_gate": (True,)},
    },
    buffers=_cosines_of_attention,
    given=_places,
    assumes=(VARLEN_OF_DENSE, DOCUMENTS),
)

QWEN_3_5_MOE = replace(
    QWEN_3_5,
    covers={
        **reads(QWEN_3_5.covers, "experts"),
        **{**ROUTED, "shared_expert_gate": (True,), "router_groups": (0,), "router_score": ("softmax",)},
    },
    buffers=_with_experts(_cosines_of_attention),
    groups_experts=True,
    assumes=(VARLEN, ROWS, DOCUMENTS),
)

FUSED_LINEARS = (("qkv", "attention.qkv_linear.wqkv"), ("attention_output", "attention.wo"), *OF_MLP)
LATENT_LINEARS = (
    *(("query", "attention.wq"), ("query_down", "attention.wq_a"), ("query_up", "attention.wq_b")),
    *(("key_value_down", "attention.wkv_a"), ("key_value_up", "attention.wkv_b"), ("attention_output", "attention.wo")),
    *(("shared_gate", "moe.shared_experts.w1"), ("shared_down", "moe.shared_experts.w2")),
    *(("shared_up", "moe.shared_experts.w3"), *OF_MLP),
)

LLAMA_NEWEST = Titan(
    "llama3",
    "Llama",
    "August 2026",
    block=titan_newest.llama_block,
    norm=titan_moe.fused_rms_norm,
    registered=("qkv", "attention_output", "gate", "down", "up", *NORMS),
    covers=LLAMA_3.covers,
    buffers=_complex_tables_of_layers,
    linears=FUSED_LINEARS,
    shares_sequences=True,
    given=_places,
    assumes=(VARLEN_OF_DENSE,),
)

QWEN_3_NEWEST = replace(
    LLAMA_NEWEST,
    name="qwen3",
    title="Qwen 3",
    block=titan_newest.qwen3_block,
    registered=("qkv", "attention_output", "query_norm", "key_norm", "gate", "down", "up", *NORMS),
    covers=QWEN_3.covers,
    buffers=_cosines_of_layers,
)

QWEN_3_MOE_NEWEST = replace(
    QWEN_3_NEWEST,
    registered=("qkv", "attention_output", "query_norm", "key_norm", titan_moe.EXPERTS, "router", *NORMS),
    covers={**QWEN_3_MOE.covers, "shared_expert_ffn": (0,), "router_groups": (0,), "router_score": ("softmax",)},
    buffers=_with_experts(_cosines_of_layers),
    groups_experts=True,
    assumes=(VARLEN, ROWS),
)

DEEPSEEK_V3_NEWEST = replace(
    DEEPSEEK_V3,
    release="August 2026",
    block=titan_newest.deepseek_block,
    norm_of_parts=None,
    linears=LATENT_LINEARS,
    buffers=_with_experts(_complex_tables_of_layers),
    keeps_exchanged=False,
    groups_experts=True,
    shares_sequences=True,
    given=_places,
    assumes=(VARLEN, ROWS),
)

NEWEST: Mapping[str, Titan] = {
    "llama": LLAMA_NEWEST,
    "qwen3": QWEN_3_NEWEST,
    "qwen3_moe": QWEN_3_MOE_NEWEST,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), DEEPSEEK_V3_NEWEST),
}
"""The newest code, where it has a recipe of its own,"""

MODELS: Mapping[str, Titan] = {
    "llama": LLAMA_3,
    "qwen3": QWEN_3,
    "qwen3_moe": QWEN_3_MOE,
    "deepseek_v2": DEEPSEEK_V3,
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
    "gpt_oss": GPT_OSS,
    "muse_glimmer": MUSE_GLIMMER,
    "qwen3_5": QWEN_3_5,
    "qwen3_5_moe": QWEN_3_5_MOE,
}
"""and the code of which every other job is."""


OF_CONVERTER = ("rowwise", "rowwise_with_gw_hp")
"""Recipes of float8 that the newest code has (``Float8LinearConverter.Config.recipe_name``)."""


def newest(plan: Plan) -> bool:
    """Whether the newest code is asked for, and has a recipe."""
    given, layout, precision = plan.fsdp, plan.layout, plan.precision
    if not given.newest or plan.model.family not in NEWEST:
        return False
    if plan.model.experts and layout.ep == 1 and ((layout.dp or 0) // given.replicas * layout.cp > plan.model.experts):
        return False  # experts are cut across their rows
    plain = layout.tp == 1 and not given.compile and given.ends_apart
    return plain and precision.dtype == "bf16" and precision.fp8 in (None, "mxfp8", *OF_CONVERTER)


def titan_of_plan(plan: Plan) -> Titan:
    return titan_of(plan.model, newest=newest(plan))


def titan_of(spec: ModelSpec, *, newest: bool = False) -> Titan:
    """torchtitan's code of a model; ``PlanError`` where there is none, or none that has a recipe."""
    found = NEWEST[spec.family] if newest else MODELS.get(spec.family)
    if found is None:
        raise spec.wrong("family", f"has no recipe in torchtitan's code; families with one: {', '.join(MODELS)}")
    for field, values in found.covers.items():
        if getattr(spec, field) not in values:
            shown = " or ".join("left out" if one is None else str(one).lower() for one in values)
            untied = ", which shares no weight: --tied-embeddings false" if field == "tied_embeddings" else ""
            raise spec.wrong(field, f"must be {shown} in torchtitan's {found.name}{untied}")
    _check_sizes(spec, found)
    return found


def _check_sizes(spec: ModelSpec, titan: Titan) -> None:
    turned = spec.rope_head_dim or spec.rotary_features
    if turned % 2 or not turned:
        raise spec.wrong(
            "rotary_fraction", f"must make an even number of a head's {spec.head_dim} features turn, not {turned}"
        )
    if spec.latent_kv_rank and spec.kv_heads != spec.heads:
        raise spec.wrong("kv_heads", f"must equal the {spec.heads} attention heads in torchtitan's {titan.name}")
    groups = spec.router_groups
    if groups and (spec.experts % groups or spec.experts // groups < 2):
        raise spec.wrong(
            "router_groups",
            f"must divide the {spec.experts} experts into groups of 2 or more in torchtitan's {titan.name}",
        )
