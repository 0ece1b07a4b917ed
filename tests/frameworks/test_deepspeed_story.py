"""BERT 5.1B under ZeRO-3 on 8 ranks (pull request 1188 of DeepSpeed), and DeepSpeed's documented formulas."""

from __future__ import annotations

import importlib.util
from importlib import import_module

import pytest
from hypothesis import given, settings, strategies as st

from memplan.frameworks.deepspeed import states as zero_states
from memplan.frameworks.deepspeed.buckets import ScatteringBucket
from memplan.frameworks.deepspeed.config import Zero
from memplan.frameworks.deepspeed.engine import model_of
from memplan.frameworks.deepspeed.hooks import Inserted, insert_hooks
from memplan.frameworks.deepspeed.notices import gathering, layer_shards
from memplan.frameworks.deepspeed.states import groups, sub_groups
from memplan.frameworks.plain.hooked import Model
from memplan.layers.huggingface import LayerShape
from memplan.layers.module import Options
from memplan.plan.models import load_spec
from memplan.plan.plan import Optimizer
from memplan.tape.events import Category, Drop, Hold

from . import deepspeed_documented as zero_documented

RANKS = 8
FUSED = Optimizer(name="adamw", implementation="fused")


DEFAULTS = Zero(stage=3)


def bert(zero: Zero = DEFAULTS) -> tuple[Model, Inserted]:
    """One micro-batch of 8 sequences of 512 tokens."""
    spec = load_spec("bert-5.1b")
    model = model_of(LayerShape(spec, 8, 512, "fp16", False), spec.layers, Options(), 3, False)
    return model, insert_hooks(model, zero, RANKS, ScatteringBucket(zero, RANKS, "fp16", "fp16"), first=True)


def test_one_layer() -> None:
    """4 h² + 8 h² matrices with h = 2560, and 13 h of norms and biases: 78,643,200 + 33,280 elements.

    The thread's micro-benchmark gathers 9,834,560 elements a rank: 78,676,480 / 8.
    """
    model, _ = bert()
    layer = layer_shards(model, DEFAULTS, RANKS, "layer.3")
    assert layer.elements == 12 * 2560**2 + 13 * 2560 == 78_676_480
    assert layer.shard == 9_834_560
    assert layer.whole == 157_352_960
    assert layer.persistent == 66_560
    assert layer.gathered == 157_286_400


def test_how_many_layers_are_whole_at_once() -> None:
    """At the defaults 10⁹ live parameters do not bind; buckets of 5 · 10⁷ do, one for each module that begins."""
    model, inserted = bert()
    layer = layer_shards(model, DEFAULTS, RANKS, "layer.3")
    found = gathering(model, inserted)
    assert found.most == 2_184_985_600
    assert found.most / layer.gathered == pytest.approx(13.9, abs=0.05)
    none = Zero(stage=3, stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=0)
    model, inserted = bert(none)
    assert gathering(model, inserted).most == 166_476_800, "the decoder, 32003 x 2560, and its bias are largest"


def test_traffic_and_copies_of_a_step() -> None:
    """Every layer is gathered in forward; what is near the turn is still whole when backward begins.

    Before the change every gather was copied whole, 157,352,960 bytes a layer and pass: 20.1 GB a step. Today a
    gather of one weight alone needs no copy, but prefetched ones share a buffer and are copied out of it.
    """
    model, inserted = bert()
    found = gathering(model, inserted)
    layer = layer_shards(model, DEFAULTS, RANKS, "layer.3")
    assert found.forward >= 64 * layer.gathered
    assert found.forward - found.backward == 2_064_399_360
    assert found.copied == 11_729_648_640
    assert 2 * 64 * layer.whole == 20_141_178_880
    assert found.reduced == 2 * 5_125_136_643
    assert found.moved(RANKS) == 25_471_485_765


@settings(max_examples=20, deadline=None)
@given(
    live=st.sampled_from([0, 10**7, 10**8, 10**9]),
    bucket=st.sampled_from([0, 10**6, 5 * 10**7, 10**9]),
    reuse=st.sampled_from([0, 10**8, 10**9]),
    ranks=st.sampled_from([1, 2, 3, 8, 64]),
)
def test_everything_gathered_is_released(live: int, bucket: int, reuse: int, ranks: int) -> None:
    zero = Zero(
        stage=3, stage3_max_live_parameters=live, stage3_prefetch_bucket_size=bucket, stage3_max_reuse_distance=reuse
    )
    spec = load_spec("gpt2").model_copy(update={"layers": 3})
    model = model_of(LayerShape(spec, 1, 64, "bf16", False), 3, Options(), 3, False)
    inserted = insert_hooks(model, zero, ranks, ScatteringBucket(zero, ranks, "bf16", "bf16"), first=True)
    held: dict[int, int] = {}
    for event in (event for tape in (*inserted.forward, *reversed(inserted.backward)) for event in tape):
        if isinstance(event, Hold) and event.category is Category.GATHERED_PARAMETERS:
            assert event.tensor not in held
            held[event.tensor] = event.bytes
        elif isinstance(event, Drop) and event.category is Category.GATHERED_PARAMETERS:
            assert held.pop(event.tensor) == event.bytes
    assert not held


T5_3B, LARGEST = 2_851_000_000, 32_000_000


def test_documented_formulas_of_t5_3b_on_8_gpus() -> None:
    """In units of 2³⁰: 11.28 (5.31 with offload) at stage 2, 6.09 (0.78, 0.12) at stage 3."""
    assert zero_documented.zero2(T5_3B, 8).device == 12_116_750_000
    assert zero_documented.zero2(T5_3B, 8, offload=True).device == 5_702_000_000
    assert zero_documented.zero3(T5_3B, LARGEST, 8).device == 6_542_750_000
    assert zero_documented.zero3(T5_3B, LARGEST, 8, offload=True).device == 840_750_000
    assert zero_documented.zero3(T5_3B, LARGEST, 8, offload=True, offload_parameters=True).device == 128_000_000


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("offload", [False, True])
def test_formulas_are_deepspeeds(offload: bool) -> None:
    theirs3 = import_module("deepspeed.runtime.zero.stage3").estimate_zero3_model_states_mem_needs
    theirs2 = import_module("deepspeed.runtime.zero.stage_1_and_2").estimate_zero2_model_states_mem_needs
    host, device = theirs2(T5_3B, 8, 2, cpu_offload=offload)
    assert zero_documented.zero2(T5_3B, 8, 2, offload=offload) == zero_documented.Documented(device, host)
    host, device, _ = theirs3(T5_3B, LARGEST, 8, 2, cpu_offload=offload, cpu_offload_params=offload)
    ours = zero_documented.zero3(T5_3B, LARGEST, 8, 2, offload=offload, offload_parameters=offload)
    assert ours == zero_documented.Documented(device, host)


@pytest.mark.parametrize("stage", [2, 3])
def test_model_states_come_out_as_documented(stage: int) -> None:
    """What stays, the reduced 16-bit gradients of stage 2 and the fp32 ones of the step: equal up to padding."""
    spec = load_spec("gpt2-xl")
    model = model_of(LayerShape(spec, 1, 64, "bf16", False), spec.layers, Options(), stage, False)
    parts = groups(model.parameters, "one", RANKS)
    zero = Zero(stage=stage, reduce_bucket_size=1, stage3_param_persistence_threshold=0)
    sizes = [parameter.elements for parameter in model.parameters]
    if stage == 2:
        kept = zero_states.partitioned(model, parts, zero, FUSED, "bf16").on("device")
        step = (2 + 4) * parts[0].share
    else:
        subs = [sub_groups(part.ids, sizes, RANKS, 10**12) for part in parts]
        kept = zero_states.sharded_states(model, zero, RANKS, subs, FUSED, "bf16", "bf16").on("device")
        step = 4 * parts[0].share
    assert kept + step == pytest.approx(zero_documented.counted_alike(stage, sum(sizes), RANKS), abs=20_000)
