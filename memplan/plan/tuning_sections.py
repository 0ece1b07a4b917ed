"""The sections of a plan about what is trained: adapters, quantised and frozen parameters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .section import Dtype, Section


class Lora(Section):
    """Low-rank adapters as peft makes them: the model is frozen, and two small matrices beside a layer are trained."""

    shorthand = "rank"

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
        description="linear layers that have one, by the names that transformers gives them (q_proj, c_attn, "
        "query_key_value), or all-linear; default: peft's for the family",
        json_schema_extra={"flag": "--lora-targets"},
    )
    dropout: float = Field(
        0.0, ge=0.0, lt=1.0, description="dropout of an adapter's input", json_schema_extra={"flag": "--lora-dropout"}
    )
    dtype: Dtype | None = Field(
        None,
        description="dtype of adapters; default: fp32, to which peft casts them (autocast_adapter_dtype)",
        json_schema_extra={"flag": "--lora-dtype"},
    )


class Quantisation(Section):
    """bitsandbytes' 4-bit weights of the linear layers, but for the head (QLoRA)."""

    shorthand = "kind"

    kind: Literal["none", "nf4", "fp4"] = Field(
        "none",
        description="what the frozen linear layers are stored as (load_in_4bit, bnb_4bit_quant_type)",
        json_schema_extra={"flag": "--quantisation"},
    )
    double: bool = Field(
        False,
        description="the scales are quantised, too (bnb_4bit_use_double_quant)",
        json_schema_extra={"flag": "--double-quantisation"},
    )
    compute: Dtype | None = Field(
        None,
        description="dtype in which quantised layers compute (bnb_4bit_compute_dtype); default: that of the plan "
        "(bitsandbytes' own default is fp32)",
        json_schema_extra={"flag": "--compute-dtype"},
    )
    prepared: bool = Field(
        False,
        description="prepare_model_for_kbit_training: embedding, norms and head are cast to fp32",
        json_schema_extra={"flag": "--prepared"},
    )


class Frozen(Section):
    """Parts of the model that are not trained, where all of the rest is."""

    embedding: bool = Field(
        False,
        description="the embedding's tables and norm are frozen",
        json_schema_extra={"flag": "--freeze-embedding"},
    )
    layers: int = Field(
        0, ge=0, le=100_000, description="the first n layers are frozen", json_schema_extra={"flag": "--freeze-layers"}
    )
