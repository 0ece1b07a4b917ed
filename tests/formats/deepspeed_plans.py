"""Plans of framework deepspeed."""

from __future__ import annotations

from hypothesis import strategies as st

from memplan.plan.plan import Plan

from .device_map_plans import tiny
from .plans import chosen, made, names

SIZES = st.sampled_from([0, 1, 2, 1000, 12346, 10**9, 2**40])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    family = draw(st.sampled_from(["gpt2", "bert", "llama", "qwen2", "opt", "falcon"]))
    mbs, dp, stage = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 8])), draw(st.integers(0, 3))
    dtype = draw(st.sampled_from(["fp32", "fp16", "bf16"]))
    devices = st.sampled_from(["none", "cpu", "nvme"])
    section = {
        "reduce_bucket_size": st.sampled_from([1, 1000, 500_000_000]),
        "allgather_bucket_size": st.sampled_from([0, 2, 1000]),
        "contiguous_gradients": st.booleans(),
        "overlap_comm": st.booleans(),
        "reduce_scatter": st.booleans(),
        "round_robin_gradients": st.booleans(),
        "sub_group_size": st.sampled_from([1000, 10**9]),
        "stage3_prefetch_bucket_size": SIZES,
        "stage3_max_live_parameters": SIZES,
        "stage3_max_reuse_distance": SIZES,
        "stage3_param_persistence_threshold": SIZES,
        "stage3_model_persistence_threshold": SIZES,
        "offload_optimizer": devices,
        "offload_optimizer_pin": st.booleans(),
        "offload_optimizer_buffer_count": st.sampled_from([4, 7]),
        "offload_param": devices,
        "offload_param_pin": st.booleans(),
        "offload_param_max_in_cpu": SIZES,
        "offload_param_buffer_count": st.sampled_from([5, 6]),
        "offload_param_buffer_size": SIZES,
        "gradient_accumulation_dtype": st.sampled_from([None, "fp32", dtype]),
        "gradient_clipping": st.sampled_from([0.0, 0.3, 1.0]),
        "groups": st.sampled_from(["one", "decay"]),
    }
    optimizer = {
        "name": st.sampled_from(["adam", "adamw", "sgd", "lion", "adafactor", "adam8bit", "lion8bit"]),
        "implementation": st.sampled_from(["foreach", "for-loop", "fused", "transformers"]),
        "weight_decay": st.sampled_from([0.0, 0.01, 1 / 3]),
        "momentum": st.sampled_from([0.0, 0.9]),
        "block_size": st.sampled_from([256, 2048]),
        "embeddings_32bit": st.booleans(),
    }
    return made(
        model=tiny(family, draw(st.integers(1, 4)), name=draw(names)),
        framework="deepspeed",
        hardware=draw(chosen({"gpu": st.just("a100-40gb"), "gpus_per_node": st.sampled_from([1, 2, 3, 4])})),
        layout={"zero": stage, "dp": dp},
        batch={"mbs": mbs, "gbs": mbs * dp * draw(st.integers(1, 3)), "seq": draw(st.sampled_from([1, 9, 64]))},
        precision={"dtype": dtype, **draw(chosen({"gradients": st.sampled_from([None, "fp32", dtype])}))},
        optimizer=draw(chosen(dict(draw(st.permutations(list(optimizer.items())))[:3]))),
        recompute={"mode": draw(st.sampled_from(["none", "full"]))},
        attention=draw(st.sampled_from([None, "eager"])),
        deepspeed=draw(chosen(dict(draw(st.permutations(list(section.items())))[:6]))),
        environment=draw(chosen({"PYTORCH_CUDA_ALLOC_CONF": st.just("expandable_segments:True")})),
        headroom=draw(st.sampled_from(["0", "5%"])),
    )
