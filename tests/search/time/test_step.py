from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from timeit import timeit

import pytest
from hypothesis import given, strategies as st

from memplan.plan.errors import PlanError
from memplan.search.time import (
    EntryTimes,
    LayerTimes,
    StageWork,
    assemble,
    cost_of_step,
    cost_of_tokens,
    entry_times,
    step_seconds,
    step_time,
    work_of,
)
from memplan.search.time.efficiency import default
from memplan.search.time.kernels import GAP
from memplan.search.time.shape import KINDS, counts_of_kinds, model_flops, named
from memplan.search.time.step import step_total

from .plans import EVERY_FRAMEWORK, megatron_22b, plan

PARTS = (
    "compute",
    "recompute",
    "tensor_parallel",
    "pipeline_bubble",
    "pipeline_send",
    "data_parallel",
    "optimizer",
    "offload",
)
seconds = st.floats(1e-4, 1.0)
entry = st.builds(LayerTimes, seconds, seconds, seconds)
times = st.builds(EntryTimes, entry, entry, entry, entry, seconds)


@pytest.mark.parametrize("framework", EVERY_FRAMEWORK)
def test_the_parts_add_up(framework: str) -> None:
    given = plan(**EVERY_FRAMEWORK[framework])
    time = step_time(given)
    assert step_total(given) == time.total
    assert sum(getattr(time, part) for part in PARTS) == pytest.approx(time.total)
    assert all(getattr(time, part) >= -1e-12 for part in PARTS)
    assert 0 < time.mfu <= time.hfu < 1
    assert time.tokens_per_second > 0
    assert time.assumptions


@given(
    times=times,
    layers=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6),
    chunks=st.integers(1, 3),
    m=st.integers(1, 64),
    overlapped=st.booleans(),
)
def test_the_short_way_gives_the_same(
    times: EntryTimes, layers: list[tuple[int, int]], chunks: int, m: int, overlapped: bool
) -> None:
    """``step_seconds`` of groups of equal stages, and ``assemble`` of all of them."""
    stages = [[StageWork(n, min(n, again))] * chunks for n, again in layers]
    stages[0] = [stages[0][0]._replace(embedding=True), *stages[0][1:]]
    stages[-1] = [*stages[-1][:-1], stages[-1][-1]._replace(final_norm=True, head=True)]
    groups = [(1, stages[0])] if len(stages) == 1 else []
    if len(stages) > 1:
        middle = [(len(list(same)), work) for work, same in groupby(stages[1:-1])]
        groups = [(1, stages[0]), *middle, (1, stages[-1])]
    whole = assemble(times, stages, m, overlapped_sends=overlapped).total
    assert step_seconds(times, groups, m, overlapped_sends=overlapped) == pytest.approx(whole)


def test_a_candidate_is_evaluated_in_twenty_microseconds() -> None:
    """16 stages of four chunks; three times as long is allowed for a busy machine."""
    flags = {"gpus": 1024, "gbs": 512, "pp": 16, "vpp": 4, "layers": 128}
    given = megatron_22b(**flags)
    found, work = entry_times(given), work_of(given)
    groups = [(len(list(same)), stage) for stage, same in groupby(work)]
    step_seconds(found, groups, 512)
    assert min(timeit(lambda: step_seconds(found, groups, 512), number=500) / 500 for _ in range(5)) < 60e-6


def test_utilisation_is_counted_as_the_paper_counts_it() -> None:
    """arXiv 2205.05198, table 5: 22B in 1.10 s is 41.5 % of the peak."""
    time = step_time(megatron_22b(recompute="selective", sequence_parallel="true"))
    assert time.mfu * time.total / 1.10 == pytest.approx(0.415, rel=0.02)
    full = step_time(megatron_22b(recompute="full"))
    assert full.hfu / full.mfu == pytest.approx(4 / 3, rel=0.02)
    assert 1 < time.hfu / time.mfu < 1.05


def test_recompute_costs_time_and_fewer_layers_cost_less() -> None:
    flags = {"gpus": 32, "pp": 4, "gbs": 64}
    none = step_time(megatron_22b(**flags)).total
    some = step_time(megatron_22b(**flags, recompute="full", recompute_method="block", recompute_layers=3)).total
    every = step_time(megatron_22b(**flags, recompute="full")).total
    assert none < some < every


def test_more_microbatches_have_less_of_a_bubble() -> None:
    few, many = (step_time(megatron_22b(gpus=32, pp=4, gbs=gbs)) for gbs in (16, 256))
    assert few.pipeline_bubble / few.total > 3 * many.pipeline_bubble / many.total


def test_interleaving_shrinks_the_bubble() -> None:
    plain, interleaved = (step_time(megatron_22b(gpus=32, pp=4, gbs=32, **flags)) for flags in ({}, {"vpp": 4}))
    assert interleaved.pipeline_bubble < plain.pipeline_bubble / 2


def test_overlap_hides_gradients_between_replicas() -> None:
    flags = {**EVERY_FRAMEWORK["megatron"]}
    exposed = step_time(plan(**flags)).data_parallel
    hidden = step_time(plan(**flags, overlap_grad_reduce="true", overlap_param_gather="true")).data_parallel
    assert hidden < exposed / 2


def test_a_slow_network_slows_sharded_data_parallelism() -> None:
    flags = EVERY_FRAMEWORK["fsdp"]
    fast, slow = (step_time(plan(**flags, network=rate)).data_parallel for rate in (50, 2))
    assert slow > 5 * fast


def test_eight_bit_states_and_offload() -> None:
    flags = {**EVERY_FRAMEWORK["deepspeed"], "zero": 2}
    usual = step_time(plan(**flags))
    away = step_time(plan(**flags, offload_optimizer="cpu"))
    assert usual.offload == 0.0
    assert away.offload > 0.1
    assert away.optimizer < usual.optimizer


def test_eight_bit_adam_is_bound_by_its_instructions() -> None:
    """63.6 ms for 2,270 million parameters of Llama 3 on an H200 (``kOptimizerStatic8bit2StateBlockwise``), and half as
    much again on a GPU with as many multiprocessors at two thirds of the clock; Lion has one moment."""
    job = {"model": "llama-3-8b", "gpu": "h200", "framework": "single", "dtype": "bf16"}
    spent = {name: step_time(plan(**job, optimizer=name)).optimizer for name in ("adam8bit", "lion8bit", "adamw")}
    assert spent["adam8bit"] == pytest.approx(63.6e-3 / 2.27e9 * 8.03e9, rel=0.01)
    assert spent["lion8bit"] == pytest.approx(spent["adam8bit"] / 2, abs=GAP)
    assert spent["adamw"] < spent["adam8bit"]


def test_a_device_map_runs_one_device_after_the_other() -> None:
    """Devices change nothing but the sends: GPT-2 XL on one and on four takes as long."""
    flags = {"model": "gpt2-xl", "framework": "device-map", "gpu": "v100-32gb", "dtype": "fp32", "mbs": 4}
    four = step_time(plan(**flags, gpus=4))
    one = step_time(plan(**flags, gpus=1))
    assert four.total - four.pipeline_send == pytest.approx(one.total - one.pipeline_send, rel=0.05)


def test_measured_efficiencies_replace_the_table() -> None:
    given = megatron_22b()
    usual = step_time(given)
    slower = replace(default("a100-80gb", (8, 0)), matrix=0.4)
    assert step_time(given, slower).total > 1.4 * usual.total


def test_the_price_of_a_step_and_of_a_billion_tokens() -> None:
    given = megatron_22b(price=2.0)
    time = step_time(given)
    assert cost_of_step(given, time) == pytest.approx(8 * 2.0 * time.total / 3600)
    assert cost_of_tokens(given, time) == pytest.approx(8 * 2.0 * 1e9 / time.tokens_per_second / 3600)
    assert cost_of_step(megatron_22b(), time) is None


def test_adapters_leave_out_the_gradients_of_weights() -> None:
    """A third of the products of a trained linear layer, and almost all of the optimizer."""
    flags = {"model": "llama-3-8b", "gpu": "a100-80gb", "dtype": "bf16", "seq": 2048}
    whole, adapters = step_time(plan(**flags)), step_time(plan(**flags, lora_rank=8))
    assert adapters.compute < 0.85 * whole.compute
    assert adapters.optimizer < 0.01 * whole.optimizer
    packed = step_time(plan(**flags, lora_rank=8, quantisation="nf4"))
    assert packed.compute > adapters.compute


def test_a_frozen_weight_counts_for_four_operations() -> None:
    """Llama 3 8B has 7.504 B elements in matrices (32 layers of 218.1 M, and the head's 525.3 M) and 32 layers of 2 x
    4,096 features of scores: of a token of 2,048, 6 x 7.504 B + 6 x 32 x 8,192 x 2,048 operations, and 4 x 7.504 B of
    weights that adapters leave frozen."""
    flags = {"framework": "ddp", "gpus": 2, "gpu": "h100-80gb", "mbs": 1, "seq": 2048}
    whole, adapted = (model_flops(plan("llama-3-8b", **flags, **own)) for own in ({}, {"lora_rank": 16}))
    weights, scores = 32 * (4096 * (6144 + 4096) + 3 * 4096 * 14336) + 4096 * 128256, 32 * 8192 * 2048
    assert whole == 2 * 2048 * 6 * (weights + scores)
    assert adapted == 2 * 2048 * (4 * weights + 6 * scores)


def test_a_pair_is_two_sequences() -> None:
    """DPO's 8 pairs have the tokens of 16 sequences: as many operations, and as many a second."""
    flags = {"model": "qwen2.5-1.5b", "framework": "ddp", "gpus": 2, "gpu": "a100-80gb", "seq": 1024}
    pairs = plan(**flags, mbs=4, gbs=8, trainer="dpo", precompute_ref_log_probs="true")
    sequences = plan(**flags, mbs=8, gbs=16)
    assert model_flops(pairs) == model_flops(sequences)
    assert step_time(pairs).tokens_per_second * step_time(pairs).total == pytest.approx(16 * 1024)


def test_the_last_bucket_of_ddp_is_not_hidden() -> None:
    """A bucket of 25 MiB is the default: the last one ends sooner than one of 100 MiB, and there are more latencies.
    One that holds all gradients is summed when backward has ended."""
    caps = (25, 100, 1_000, 10_000, 20_000)
    exposed = [step_time(plan(**EVERY_FRAMEWORK["ddp"], bucket_cap_mb=cap)).data_parallel for cap in caps]
    assert exposed[0] == step_time(plan(**EVERY_FRAMEWORK["ddp"])).data_parallel
    assert exposed[0] < exposed[2]
    assert exposed[1] < exposed[2] < exposed[3] == exposed[4]


def test_autocast_casts_weights() -> None:
    flags = {"model": "gpt2-xl", "gpu": "a100-80gb", "dtype": "bf16"}
    assert step_time(plan(**flags, autocast="true")).compute > 1.05 * step_time(plan(**flags)).compute


def test_layers_at_the_ends_keep_16_bits() -> None:
    """Of four layers two in 16 bits lie in the middle between all in 8 and all in 16, which is a step in bf16 (a B300's
    products in 16 bits have one rate, beside others in 8 or not)."""
    job = {"model": "llama-3-8b", "layers": 4, "seq": 4096, "framework": "megatron", "gpu": "b300", "gpus": 2}
    job |= {"tp": 2, "sequence_parallel": "true", "gbs": 4, "dtype": "bf16"}

    def compute(first: int, last: int) -> float:
        ends = {"first_16bit_layers": first, "last_16bit_layers": last}
        return step_time(plan(**job, fp8="tensorwise", **ends)).compute

    sixteen = step_time(plan(**job)).compute
    assert compute(2, 2) == compute(4, 0) == pytest.approx(sixteen, rel=1e-12)
    assert compute(1, 1) == compute(0, 2) == pytest.approx((compute(0, 0) + sixteen) / 2, rel=1e-12)
    assert compute(0, 0) < 0.9 * sixteen


def test_a_few_layers_in_16_bits_leave_others_their_clock() -> None:
    """Products in 16 bits lower an H200's clock, those in 8 bits less. Two layers of 32 in 16 bits add two of what 32
    add, and what the head takes longer at their clock, a 2 % part; the 30 others draw what they did."""
    job = {"model": "llama-3-8b", "seq": 4096, "framework": "megatron", "gpu": "h200", "gpus": 2, "tp": 2, "gbs": 4}

    def compute(first: int, last: int) -> float:
        ends = {"first_16bit_layers": first, "last_16bit_layers": last}
        return step_time(plan(**job, dtype="bf16", fp8="tensorwise", **ends)).compute

    none, few, half, every = compute(0, 0), compute(1, 1), compute(8, 8), compute(16, 16)
    assert every == pytest.approx(step_time(plan(**job, dtype="bf16")).compute, rel=1e-12)
    assert half - few == pytest.approx(14 / 16 * (every - half), rel=1e-9)
    assert 2 / 32 < (few - none) / (every - none) < 2 / 32 + 0.02


def test_layers_in_16_bits_are_counted_by_kind() -> None:
    """Of a hybrid's M, E, * and M the last two keep 16 bits, and the first three are recomputed: M and E of the others
    are, of those two * alone."""
    model = plan(model="nemotron-3-nano-30b-a3b", framework="megatron").model
    spec = model.model_copy(update={"layers": 4, "layer_pattern": "ME*M"})
    names = ("embedding", *(f"layer.{at}" for at in range(4)))
    block = plan(model="llama-3-8b", framework="megatron", recompute="full").recompute
    three = block.model_copy(update={"method": "block", "layers": 3})
    counts = named(names, spec, three, (0, 2)).kinds
    low, wide = (dict(zip(KINDS, part, strict=True)) for part in (counts[:5], counts[5:]))
    assert {kind: found for kind, found in low.items() if any(found)} == {"M": (1, 1), "E": (1, 1)}
    assert {kind: found for kind, found in wide.items() if any(found)} == {"*": (1, 1), "M": (1, 0)}


def test_layers_in_16_bits_are_counted_by_their_mlp() -> None:
    """Of six layers, the first two of which have an MLP where others have experts, the first and the last two keep 16
    bits, and five are recomputed: of the
    others two have experts and one an MLP, and so of those."""
    spec = plan(model="deepseek-v3", framework="megatron").model
    spec = spec.model_copy(update={"layers": 6, "dense_layers": (0, 1)})
    assert counts_of_kinds(spec, range(6), 5, (1, 2)) == ((2, 2), (1, 1), (2, 1), (1, 1))


def test_frozen_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="frozen layers are not timed"):
        step_time(plan(model="llama-3-8b", gpu="b200", freeze_layers=2))
