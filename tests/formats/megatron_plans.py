"""Plans of framework megatron."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from memplan.plan.plan import Plan

from .plans import chosen, made, names, spec

FAMILIES = ("gpt", "gpt2", "llama", "bert", "hybrid")


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    family = draw(st.sampled_from(FAMILIES))
    heads = draw(st.sampled_from([4, 8, 12]))
    sizes = {
        "name": draw(names),
        "family": family,
        "layers": draw(st.integers(1, 12)),
        "hidden": heads * draw(st.sampled_from([16, 24, 64])),
        "heads": heads,
        "kv_heads": draw(st.sampled_from([heads, heads // 2, 4])) if family != "bert" else heads,
        "head_dim": draw(st.sampled_from([16, 24, 64])),
        "ffn": draw(st.sampled_from([192, 480, 1000])),
        "vocab": draw(st.integers(1, 5000)),
        "positions_max": draw(st.sampled_from([64, 1000, 4096])),
        "hidden_dropout": (dropout := draw(st.sampled_from([0.0, 0.1, 0.25]))),
        "embedding_dropout": dropout,
        "attention_dropout": draw(st.sampled_from([0.0, 0.1, 1 / 3])),
    }
    if family == "bert":
        return spec("bert-5.1b", **{**sizes, "token_types": 2, "norm_place": "pre", "embedding_norm": False,
                                   "final_norm": True, "tied_embeddings": draw(st.booleans()),
                                   "activation": draw(st.sampled_from(["gelu", "gelu_new"]))})  # fmt: skip
    bias = draw(st.booleans())
    if family == "hybrid":
        sizes |= {
            "layer_pattern": (pattern := draw(st.text("M*-", min_size=1, max_size=12))),
            "layers": len(pattern),
            "mamba_heads": 8,
            "mamba_head_dim": draw(st.sampled_from([32, 64])),
            "mamba_groups": draw(st.sampled_from([4, 8])),
            "mamba_state_dim": 128,
        }
    return spec(
        "gpt2",
        **sizes,
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        positions=draw(st.sampled_from(["learned", "rotary", "none"])),
        activation=draw(st.sampled_from(["gelu", "gelu_new", "swiglu"])),
        attention_bias=bias or draw(st.booleans()),
        attention_output_bias=bias,
        mlp_bias=bias,
        qk_norm=draw(st.booleans()),
        tied_embeddings=draw(st.booleans()),
    )


@st.composite
def pipelines(draw: st.DrawFn, layers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sizes of the layout, and the section ``pipeline``."""
    pp, vpp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 1, 2, 3]))
    kind = draw(st.sampled_from(["even", "counted", "ends", "layout"]))
    pipeline: dict[str, Any] = {}
    if kind == "counted":
        pipeline = draw(chosen({"count_embedding": st.booleans(), "count_loss": st.booleans()}))
    elif kind == "ends":
        pipeline = draw(chosen({"first_layers": st.integers(1, layers), "last_layers": st.integers(1, layers)}))
    elif kind == "layout" and pp > 1:
        cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=pp * vpp - 1, max_size=pp * vpp - 1)))
        sizes = [high - low for low, high in zip([0, *cuts], [*cuts, layers], strict=True)]
        pipeline = {"layout": "E" + "|".join("t" * size for size in sizes) + "L"}
    if vpp > 1:
        pipeline |= draw(
            chosen({"group": st.integers(1, 8), "overlap_p2p": st.booleans(), "overlap_p2p_warmup": st.booleans()})
        )
    return {"pp": pp, "vpp": vpp if pp > 1 else 1}, pipeline


SWITCHES = (
    "deterministic",
    "gradient_accumulation_fusion",
    "bias_gelu_fusion",
    "bias_swiglu_fusion",
    "bias_dropout_fusion",
    "rope_fusion",
    "masked_softmax_fusion",
    "rotary_interleaved",
    "attention_softmax_in_fp32",
    "query_key_layer_scaling",
    "per_token_loss",
    "attention_mask_in_dataloader",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "log_num_zeros_in_grad",
    "log_params_norm",
    "check_for_nan",
    "sums_in_fp32",
    "packed",
    "registers_buffers",
    "te_activation",
    "sharp",
    "fuses_operations",
    "clips_queries",
    "norm_takes_residual",
)

STATES = st.sampled_from(["fp32", "bf16", "fp16", "fp8"])
AWARE = chosen(
    {
        "precision_aware": st.just(True),
        "main_parameters": st.sampled_from(["fp32", "fp16"]),
        "exp_avg": STATES,
        "exp_avg_sq": STATES,
        "fp8_recipe": st.sampled_from(["delayed", "tensorwise", "blockwise", "mxfp8"]),
    }
)
MEGATRON = chosen(
    {
        **dict.fromkeys(SWITCHES, st.booleans()),
        "attention_backend": st.sampled_from(["auto", "flash", "fused", "unfused", "local"]),
        "transformer_engine": st.sampled_from(["2.0", "2.11", "2.18"]),
        "cross_entropy_fusion": st.sampled_from(["none", "native", "te"]),
        "vocab_multiple": st.sampled_from([1, 7, 128]),
        "bucket_size": st.sampled_from([1, 12345, 40_000_000]),
        "clip_grad": st.sampled_from([0.0, 1.0, 0.3]),
        "cp_communication": st.sampled_from(["p2p", "a2a"]),
    }
)
IN_FP32 = chosen({"fp32_gradients_of": st.sampled_from([("all",), ("*.bias", "it's"), ("*[1]*",)])})
"""Of gradients that are not in fp32 already."""
INSTANCES = chosen({"distributed_optimizer_instances": st.sampled_from([1, 2])})
ENVIRONMENT = chosen(
    {
        "PYTORCH_CUDA_ALLOC_CONF": st.just("expandable_segments:True"),
        "CUBLAS_WORKSPACE_CONFIG": st.just(":4096:8"),
        "NCCL_DEBUG": st.just("INFO"),
        "NVTE_TORCH_COMPILE": st.just("0"),
        "MINE": st.just("it's $HOME # here"),
    }
)
HARDWARE = chosen(
    {
        "gpu": st.sampled_from(["h200", "a100-40gb"]),
        "gpus_per_node": st.sampled_from([1, 2, 4, 8]),
        "capacity": st.sampled_from([1 << 30, 10**12]),
    }
)
"""Made once: hypothesis looks into each strategy that it meets for the first time."""


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    model = draw(models())
    sizes, pipeline = draw(pipelines(model["layers"]))
    local = draw(st.booleans())
    tp, cp, dp = (draw(st.sampled_from(each)) for each in ([1, 2, 4], [1] if local else [1, 1, 2], [1, 2, 3]))
    mbs = draw(st.integers(1, 3))
    mode = draw(st.sampled_from(["none", "selective", "full"]))
    recompute: dict[str, Any] = {"mode": mode}
    if mode == "full":
        recompute |= draw(
            chosen({"method": st.sampled_from(["uniform", "block"]), "layers": st.integers(1, model["layers"])})
        )
    elif mode == "selective":
        modules = st.lists(st.sampled_from(["core_attn", "layernorm", "mlp"]), min_size=1, max_size=3, unique=True)
        recompute |= draw(chosen({"modules": modules}))
    dtype = draw(st.sampled_from(["bf16", "fp16", "fp32"])) if local else draw(st.sampled_from(["bf16", "fp16"]))
    precision = {"dtype": dtype, **draw(chosen({"gradients": st.sampled_from(["fp32", dtype])}))}
    in_fp32 = draw(IN_FP32) if precision.get("gradients", "fp32") != "fp32" else {}
    zero = draw(st.sampled_from([0, 1]))
    optimizer = draw(st.sampled_from(["adam", "adamw", "adamw"] if zero else ["adam", "adamw", "adamw", "sgd"]))
    is_aware = zero == 1 and draw(st.booleans())
    return made(
        model=model,
        framework="megatron",
        hardware=draw(HARDWARE),
        layout={
            "tp": tp,
            "cp": cp,
            "dp": dp,
            **sizes,
            "zero": zero,
            "sequence_parallel": tp > 1 and draw(st.booleans()),
        },
        batch={
            "mbs": mbs,
            "gbs": mbs * dp * draw(st.integers(1, 9)),
            **draw(chosen({"seq": st.sampled_from([1, 16, 32, 64])})),
        },
        precision=precision,
        optimizer={"name": optimizer, **(draw(AWARE) if is_aware else {})},
        recompute=recompute,
        pipeline=pipeline,
        megatron={
            **draw(MEGATRON),
            **in_fp32,
            **(draw(INSTANCES) if zero else {}),
            "transformer_impl": "local" if local else "transformer_engine",
        },
        environment=draw(ENVIRONMENT),
        headroom=draw(st.sampled_from(["0", "5%", "2GiB"])),
    )
