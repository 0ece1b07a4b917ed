"""Plans of torchtitan's Llama under ``fully_shard``."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from memplan.plan.plan import Plan

from .plans import chosen, made, names, spec


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    base = draw(st.sampled_from(["llama-3-8b", "llama-2-7b"]))
    layers = draw(st.integers(1, 9))
    sizes = {"hidden": 64, "heads": 4, "kv_heads": draw(st.sampled_from([2, 4])), "head_dim": 16, "ffn": 176}
    vocab = draw(st.sampled_from([1004, 128]))
    return spec(base, **{"name": draw(names), "layers": layers, **sizes, "vocab": vocab, "positions_max": 128})


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    model = draw(models())
    pp = draw(st.sampled_from([1, 1, 2, 3, 4]))
    vpp = draw(st.sampled_from([1, 2, 3])) if pp > 1 else 1
    replicas, shards = draw(st.sampled_from([1, 2])), draw(st.sampled_from([2, 3]))
    tp = draw(st.sampled_from([1, 2])) if pp == 1 else 1
    mbs, dp, entries = draw(st.integers(1, 3)), replicas * shards, model["layers"] + 3
    pipeline: dict[str, Any] = {}
    if pp > 1:
        pipeline = draw(chosen({"schedule": st.sampled_from(["1f1b", "gpipe"])}))
        if draw(st.booleans()):
            cuts = st.lists(st.integers(1, entries - 2), min_size=pp * vpp - 1, max_size=pp * vpp - 1)
            pipeline["partition"] = [0, *sorted(draw(cuts)), entries]
    fsdp = {"reduce": st.sampled_from(["fp32", "bf16"]), "offload": st.booleans()}
    if pp == 1:
        fsdp["reshard_after_forward"] = st.booleans()
    later = draw(st.booleans())
    if pp == 1 and later and draw(st.booleans()):
        fsdp |= {"reshard_after_forward": st.just(True), "reshard_root": st.booleans()}
    if later:
        fsdp["parameters"] = st.sampled_from(["fp32", "bf16"])
    outputs = pp > 1 and (not later or draw(st.booleans()))
    recompute = draw(
        st.sampled_from(
            [
                ({"mode": "none"}, {}),
                ({"mode": "full"}, {}),
                ({"mode": "full"}, {"recompute_every": 2}),
                ({"mode": "selective"}, {"recompute_every": 3}),
                ({}, {"per_operator": True}),
            ]
        )
    )
    optimizer = {
        "name": st.sampled_from(["adam", "adamw"]),
        "implementation": st.sampled_from(["foreach", "for-loop", "fused"]),
        "weight_decay": st.sampled_from([0.0, 0.1, 1 / 3]),
    }
    return made(
        model=model,
        framework="fsdp",
        hardware=draw(chosen({"gpu": st.just("h100-80gb"), "gpus_per_node": st.sampled_from([1, 2, 4])})),
        layout={"tp": tp, "pp": pp, "vpp": vpp, "dp": dp},
        batch={"mbs": mbs, "gbs": mbs * dp * draw(st.integers(1, 6)), "seq": draw(st.sampled_from([2, 16, 64]))},
        precision={"dtype": "bf16"},
        optimizer=draw(chosen(optimizer)),
        recompute=recompute[0],
        loss=draw(chosen({"kind": st.sampled_from(["plain", "vocab-parallel"])})),
        pipeline=pipeline,
        fsdp={"code": "torchtitan", "replicas": replicas, "ends_apart": later, "return_outputs": outputs}
        | {**recompute[1], **draw(chosen(fsdp))},
        environment=draw(chosen({"PYTORCH_CUDA_ALLOC_CONF": st.just("expandable_segments:True")})),
    )
