"""Plans of framework megatron-deepspeed."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from memplan.plan.plan import Plan

from .plans import chosen, made, names, spec

METHODS = st.sampled_from(
    [
        "type:transformer",
        "type:embed|transformer",
        "type:TRANSFORMER",
        "type:embed:2|transformer:1",
        "type:embed:1|transformer:1",
        "type:ParallelTransformerLayerPipe",
        "parameters",
        "uniform",
    ]
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    heads, layers = draw(st.sampled_from([4, 8])), draw(st.integers(1, 12))
    dropout = draw(st.sampled_from([0.0, 0.1, 1 / 3]))
    model = spec(
        draw(st.sampled_from(["bigscience-104b", "bloom-176b", "gpt2"])),
        name=draw(names),
        layers=layers,
        hidden=heads * 16,
        heads=heads,
        kv_heads=heads,
        head_dim=16,
        ffn=draw(st.sampled_from([256, 1000])),
        vocab=draw(st.sampled_from([50_257, 1, 1003, 250_100])),
        positions_max=64,
        hidden_dropout=dropout,
        embedding_dropout=dropout,
        attention_dropout=draw(st.sampled_from([0.0, 0.1])),
    )
    pp, tp, dp = (
        draw(st.integers(1, min(4, layers))),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 2, 3])),
    )
    entries = layers + 7
    cut = st.lists(st.integers(1, entries - 2), min_size=pp - 1, max_size=pp - 1).map(
        lambda inner: [0, *sorted(inner), entries]
    )
    mbs, dtype = draw(st.integers(1, 2)), draw(st.sampled_from(["fp16", "bf16", "fp32"]))
    zero = draw(st.sampled_from([0, 1]))
    optimizer: dict[str, Any] = {"name": draw(st.sampled_from(["adam", "adamw", "sgd", "adam8bit"]))}
    if optimizer["name"] == "sgd":
        optimizer["momentum"] = draw(st.sampled_from([0.0, 0.9]))
    if optimizer["name"] == "adam8bit":
        optimizer |= {"embeddings_32bit": not zero, **draw(chosen({"block_size": st.sampled_from([256, 2048])}))}
    recompute: dict[str, Any] = {"mode": draw(st.sampled_from(["none", "full"]))}
    if recompute["mode"] == "full":
        recompute |= draw(chosen({"layers": st.integers(1, layers)}))
    return made(
        model=model,
        framework="megatron-deepspeed",
        hardware=draw(chosen({"gpu": st.just("v100-32gb"), "gpus_per_node": st.sampled_from([1, 2, 4])})),
        layout={"tp": tp, "pp": pp, "dp": dp, "zero": zero},
        batch={"mbs": mbs, "gbs": mbs * dp * draw(st.integers(1, 9)), "seq": draw(st.sampled_from([1, 16, 64]))},
        precision={"dtype": dtype, **draw(chosen({"gradients": st.sampled_from(["fp32", dtype])}))},
        optimizer=optimizer,
        recompute=recompute,
        pipeline=draw(chosen({"partition": draw(st.sampled_from([METHODS, cut]))})),
        environment=draw(
            chosen(
                {
                    "PYTORCH_CUDA_ALLOC_CONF": st.just("max_split_size_mb:64"),
                    "MINE": st.just("it's $HOME # here"),
                }
            )
        ),
    )
