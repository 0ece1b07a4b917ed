"""The sections of a plan about fine-tuning: adapters, quantised and frozen parameters, kernels."""

from typing import ClassVar, Literal

from pydantic import Field

from .section import Count, Dtype, FrameworkSection
from .spec import MOST_LAYERS


class Lora(FrameworkSection):
    """Low-rank adapters as peft makes them: the model is frozen, and two small matrices beside a layer are trained."""

    shorthand = "rank"
    unsaid: ClassVar[frozenset[str]] = frozenset({"dora", "alpha", "rslora", "modules_to_save", "target_parameters"})

    rank: int | None = Field(
        None,
        ge=1,
        le=2**20,
        description="rank of LoRA adapters (r); default: no adapters",
        json_schema_extra={"flag": "--lora-rank"},
    )
    targets: tuple[str, ...] | None = Field(
        None,
        max_length=64,
        description="linear layers with an adapter, by their names in transformers (q_proj, c_attn, query_key_value), "
        "or all-linear; embed_tokens and lm_head, too; default: peft's for the family",
        json_schema_extra={"flag": "--lora-targets"},
    )
    dropout: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="dropout on the input of an adapter",
        json_schema_extra={"flag": "--lora-dropout"},
    )
    dtype: Dtype | None = Field(
        None,
        description="dtype of adapters; default: fp32, by peft's autocast_adapter_dtype",
        json_schema_extra={"flag": "--lora-dtype"},
    )
    dora: bool = Field(
        False,
        description="DoRA (use_dora): the norms of adapted weights are parameters, and are made anew in every forward "
        "pass",
        json_schema_extra={"flag": "--use-dora"},
    )
    modules_to_save: tuple[str, ...] | None = Field(
        None,
        max_length=64,
        description="modules that are trained whole, in a copy beside the frozen one: the embedding and the head, by "
        "their names in transformers (embed_tokens, lm_head)",
        json_schema_extra={"flag": "--modules-to-save"},
    )
    target_parameters: tuple[str, ...] | None = Field(
        None,
        max_length=64,
        description="weights of stacked experts with an adapter (target_parameters), by their names in transformers 5 "
        "(experts.gate_up_proj, experts.down_proj)",
        json_schema_extra={"flag": "--lora-target-parameters"},
    )
    alpha: float | None = Field(
        None,
        ge=0.0,
        le=2**20,
        description="numerator of what adapters are scaled by (lora_alpha), which takes no memory",
        json_schema_extra={"flag": "--lora-alpha"},
    )
    rslora: bool = Field(
        False,
        description="scale adapters by alpha over the root of the rank (use_rslora), which takes no memory",
        json_schema_extra={"flag": "--use-rslora"},
    )


class Quantisation(FrameworkSection):
    """4-bit weights of the linear layers, but for the head: bitsandbytes' (QLoRA), GPTQ's or AWQ's; or bitsandbytes'
    8-bit ones."""

    shorthand = "kind"
    unsaid: ClassVar[frozenset[str]] = frozenset({"group"})

    kind: Literal["none", "nf4", "fp4", "gptq", "awq", "int8"] = Field(
        "none",
        description="4-bit type of the frozen linear layers (load_in_4bit, bnb_4bit_quant_type), or gptq: a model that "
        "auto_gptq has quantised, on its Triton kernel, or awq: one that autoawq has, or int8: bitsandbytes' 8-bit "
        "weights (load_in_8bit)",
        json_schema_extra={"flag": "--quantisation"},
    )
    group: Count = Field(
        128, description="gptq, awq: inputs that share a scale (group_size)", json_schema_extra={"flag": "--group-size"}
    )
    double: bool = Field(
        False,
        description="also quantise the scales (bnb_4bit_use_double_quant)",
        json_schema_extra={"flag": "--double-quantisation"},
    )
    compute: Dtype | None = Field(
        None,
        description="dtype of compute in quantised layers (bnb_4bit_compute_dtype); default: precision.dtype "
        "(bitsandbytes' own default is fp32)",
        json_schema_extra={"flag": "--compute-dtype"},
    )
    storage: Literal["uint8", "bf16", "fp16", "fp32"] | None = Field(
        None,
        description="dtype of the storage that 4-bit weights are packed into (bnb_4bit_quant_storage); default: "
        "precision.dtype where they are sharded (bitsandbytes' own default, uint8, cannot be)",
        json_schema_extra={"flag": "--quant-storage"},
    )
    prepared: bool = Field(
        False,
        description="peft's prepare_model_for_kbit_training: cast embedding, norms and head to fp32 (trl before 0.26 "
        "casts embedding and head back in bf16 training)",
        json_schema_extra={"flag": "--kbit-preparation"},
    )


class Frozen(FrameworkSection):
    """Parts of the model that are not trained, where all of the rest is."""

    embedding: bool = Field(
        False,
        description="freeze the embedding's tables and norm",
        json_schema_extra={"flag": "--freeze-embedding"},
    )
    layers: int = Field(
        0, ge=0, le=MOST_LAYERS, description="freeze the first n layers", json_schema_extra={"flag": "--freeze-layers"}
    )


Piece = Literal["eager", "liger", "unsloth"]


class Kernels(FrameworkSection):
    """Kernels that take the place of transformers' Python operators: Liger's, Unsloth's in fms-acceleration, or those
    of flash-linear-attention."""

    shorthand = "set"

    set: Literal["none", "liger", "fms"] = Field(
        "none",
        description="a set of kernels: liger (use_liger_kernel: norms, rope, swiglu, fused linear loss) or fms "
        "(fms-acceleration's of Unsloth: norms, rope, cross entropy, and LoRA's functions on 4-bit weights)",
        json_schema_extra={"flag": "--kernels"},
    )
    norm: Piece | None = Field(
        None, description="RMSNorm (rms_norm); default: the set's", json_schema_extra={"flag": "--norm-kernel"}
    )
    rope: Piece | None = Field(
        None, description="rotary embedding (rope); default: the set's", json_schema_extra={"flag": "--rope-kernel"}
    )
    mlp: Literal["eager", "liger"] | None = Field(
        None, description="SwiGLU (swiglu); default: the set's", json_schema_extra={"flag": "--mlp-kernel"}
    )
    lora: Literal["eager", "unsloth"] | None = Field(
        None,
        description="LoRA's layers: peft's, or Unsloth's one function for queries, keys and values, one for the "
        "attention's output, one for the MLP (fused_lora); default: the set's, on 4-bit weights",
        json_schema_extra={"flag": "--lora-kernel"},
    )
    delta: Literal["eager", "fla"] | None = Field(
        None,
        description="gated delta nets of Qwen3-Next and Qwen 3.5: fla (flash-linear-attention and causal-conv1d, which "
        "transformers takes where both are installed); default: eager, its own operators, to which it falls back with "
        "a warning",
        json_schema_extra={"flag": "--delta-kernel"},
    )
