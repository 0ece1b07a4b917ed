"""What Megatron-Core keeps, against hand calculations of its buffers and shards."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, strategies as st

from memplan.frameworks.megatron.states import Chunk, Rules, keep, offloaded, saved
from memplan.layers.module import Parameter
from memplan.tape.events import Category, Drop, Hold, Tape, rounded
from memplan.tape.program import Kept

PLAIN = Rules("bf16", "fp32", False, 1, None, "adam", False, "fp32", "fp32", "fp32", False)


def chunk_of(*shapes: tuple[int, ...], times: int = 1) -> tuple[Chunk, ...]:
    """One chunk of ``times`` equal modules with these parameters."""
    parameters = tuple(Parameter(f"p{i}.weight", shape) for i, shape in enumerate(shapes))
    return (((parameters, times),),)


def held(tape: Tape, category: Category) -> int:
    """Bytes of ``category`` that ``tape`` leaves."""
    size = 0
    for event in tape:
        if isinstance(event, Hold | Drop) and event.category is category:
            size += event.bytes if isinstance(event, Hold) else -event.bytes
    return size


def everything(kept: Kept) -> int:
    return kept.construction.excursion.net + kept.states.excursion.net


def test_without_the_distributed_optimizer_every_tensor_is_its_own() -> None:
    """1,000 x 100 = 100,000 and 7 elements. bf16: 200,192 + 512; fp32, each of three: 400,384 + 512 (28 bytes);
    one gradient buffer of 100,007 fp32 numbers: 400,028, rounded to 400,384."""
    kept = keep(chunk_of((1000, 100), (7,)), PLAIN, False)
    assert held(kept.construction, Category.PARAMETERS) == 200_192 + 512
    assert held(kept.construction, Category.GRADIENTS) == 400_384
    assert held(kept.construction, Category.MAIN_PARAMETERS) == 400_384 + 512
    assert held(kept.states, Category.OPTIMIZER_STATES) == 2 * (400_384 + 512)
    assert not kept.step


def test_buffers_of_the_distributed_optimizer_are_padded() -> None:
    """Backward order: 7 elements first, then 64 (aligned) + 100,000 = 100,064, up to a multiple of lcm(8, 128):
    100,096. A rank's eighth is 12,512 elements; seven of the eight hold nothing but the matrix."""
    kept = keep(chunk_of((1000, 100), (7,)), replace(PLAIN, distributed=True, shards=8), False)
    assert held(kept.construction, Category.PARAMETERS) == rounded(100_096 * 2)
    assert held(kept.construction, Category.GRADIENTS) == rounded(100_096 * 4)
    # the first eighth has 7 and 12,448 elements, each rounded: 512 + 50,176 = 50,688; the others 12,512: 50,176
    assert held(kept.construction, Category.MAIN_PARAMETERS) == 512 + rounded(12_448 * 4) == 50_688
    assert held(kept.states, Category.OPTIMIZER_STATES) == 2 * 50_688


def test_a_tied_table_has_a_bucket_of_its_own() -> None:
    """900 + 64 x 16 rows: the table's bucket is padded by itself: 1,024 and 1,024 elements, not 1,924 + padding."""
    parameters = (Parameter("word.weight", (64, 16)), Parameter("rest.weight", (30, 30)))
    chunk: tuple[Chunk, ...] = (((parameters, 1),),)
    rules = replace(PLAIN, distributed=True, shards=2)
    assert held(keep(chunk, rules, True).construction, Category.GRADIENTS) == (1024 + 1024) * 4
    assert held(keep(chunk, rules, False).construction, Category.GRADIENTS) == rounded(2048 * 4)


def test_gradients_in_16_bits_are_copied_until_the_next_iteration() -> None:
    kept = keep(chunk_of((1000, 100)), replace(PLAIN, dtype="fp16", gradients="fp16"), False)
    assert held(kept.construction, Category.GRADIENTS) == 200_192
    assert held(kept.carried, Category.GRADIENTS) == 400_384
    assert kept.step.excursion.net == kept.carried.excursion.net


def test_a_precision_aware_optimizer_keeps_what_it_says() -> None:
    """bf16 parameters keep the lower halves of their main parameters: 2 bytes; moments in bf16 with a scale each."""
    rules = replace(
        PLAIN, distributed=True, shards=1, precision_aware=True, exp_avg="bf16", exp_avg_sq="bf16", gradients="bf16"
    )
    kept = keep(chunk_of((1024, 128)), rules, False)
    n = 1024 * 128
    assert held(kept.construction, Category.MAIN_PARAMETERS) == 0
    assert held(kept.states, Category.MAIN_PARAMETERS) == 2 * n
    assert held(kept.states, Category.OPTIMIZER_STATES) == 4 * n
    assert held(kept.states, Category.BUFFERS) == 2 * 512
    assert not kept.carried


@pytest.mark.parametrize("recipe", [None, "delayed", "tensorwise", "mxfp8"])
def test_a_recipe_that_the_optimizer_is_told_of_takes_main_parameters_out_of_it(recipe: str | None) -> None:
    """But with delayed scaling: 4 bytes an element for main parameters, and as many for the step's fp32 gradients."""
    rules = replace(PLAIN, distributed=True, precision_aware=True, gradients="bf16", fp8_recipe=recipe)
    kept, n = keep(chunk_of((1024, 128)), rules, False), 1024 * 128 // PLAIN.shards
    outside = recipe in ("tensorwise", "mxfp8")
    assert held(kept.construction, Category.MAIN_PARAMETERS) == 4 * n * outside
    assert held(kept.states, Category.MAIN_PARAMETERS) == 2 * n * (not outside)
    assert held(kept.carried, Category.GRADIENTS) == 4 * n * outside


def test_a_checkpoint_casts_what_is_no_fp32() -> None:
    """Two moments in bf16 for 131,072 elements: 8 bytes each as fp32. The lower halves of main parameters stay as they
    are; main parameters in fp16 are a third copy."""
    rules = replace(PLAIN, distributed=True, shards=1, precision_aware=True, exp_avg="bf16", exp_avg_sq="bf16")
    halves = replace(rules, main_parameters="fp16")
    chunk, n = chunk_of((1024, 128)), 1024 * 128
    assert saved(keep(chunk, rules, False), rules) == 8 * n
    assert saved(keep(chunk, halves, False), halves) == 12 * n
    assert saved(keep(chunk, PLAIN, False), PLAIN) == 0


def test_counting_zeros_takes_a_mask_of_the_largest_gradient() -> None:
    kept = keep(chunk_of((1000, 100), (10, 10)), replace(PLAIN, counts_zeros=True), False)
    assert kept.step.excursion.peak == rounded(100_000)
    assert kept.step.excursion.net == 0


SHAPES = st.lists(
    st.one_of(st.tuples(st.integers(1, 400), st.integers(1, 90)), st.tuples(st.integers(1, 500))),
    min_size=1,
    max_size=6,
)


@given(SHAPES, st.integers(1, 3), st.sampled_from([1, 2, 3, 4, 7, 8, 16, 64]))
def test_shards_sum_to_at_least_the_whole_and_the_largest_is_shown(
    shapes: list[tuple[int, ...]], times: int, shards: int
) -> None:
    """``shards`` times the largest shard's elements cover all parameters."""
    rules = replace(PLAIN, distributed=True, shards=shards)
    kept = keep(chunk_of(*shapes, times=times), rules, False)
    elements = times * sum(Parameter("", shape).elements for shape in shapes)
    assert held(kept.construction, Category.MAIN_PARAMETERS) * shards >= 4 * elements
    assert held(kept.construction, Category.GRADIENTS) >= 4 * elements


@given(SHAPES, st.integers(1, 3))
def test_more_shards_never_cost_more(shapes: list[tuple[int, ...]], times: int) -> None:
    """Doubling the ranks that share the states; buffers may grow by their padding, states may not."""
    states = [
        held(keep(chunk_of(*shapes, times=times), replace(PLAIN, distributed=True, shards=n), False).states,
             Category.OPTIMIZER_STATES)
        for n in (1, 2, 4, 8)
    ]  # fmt: skip
    pieces = 2 * 512 * len(shapes) * times  # each tensor is rounded once more at most
    assert all(more <= less + pieces for less, more in pairwise(states))


@pytest.mark.parametrize("bucket", [1, 1000, 10**6])
def test_where_buckets_end_changes_only_padding(bucket: int) -> None:
    rules = replace(PLAIN, distributed=True, shards=4)
    one = keep(chunk_of((100, 100), (50,), times=3), rules, False)
    many = keep(chunk_of((100, 100), (50,), times=3), replace(rules, bucket=bucket), False)
    padding = 6 * 128 * 4
    grads = Category.GRADIENTS
    assert held(one.construction, grads) <= held(many.construction, grads) <= held(one.construction, grads) + padding


def test_a_number_of_buckets_is_a_size() -> None:
    """``resolve_ddp_bucket_size``: 2,100 elements in 20 buckets end behind 105 or more each, and are padded there."""
    rules = replace(PLAIN, distributed=True, shards=4)
    parameters = chunk_of((10, 10), (5,), times=20)
    made = [keep(parameters, one, False) for one in (replace(rules, buckets=20), replace(rules, bucket=105), rules)]
    cut, same, whole = (held(one.construction, Category.GRADIENTS) for one in made)
    assert cut == same > whole


def test_muon_keeps_one_state_of_matrices_and_deals_whole_parameters_out() -> None:
    """Embedding and norms have Adam's two states. Two ranks get parameters from small to large, to and fro: the norm
    and the embedding go to the first, both matrices to the second."""
    names = {"norm.weight": (64,), "fc1.weight": (64, 256), "fc2.weight": (256, 64), "word.weight": (1000, 64)}
    chunk = (tuple(Parameter(name, shape) for name, shape in names.items()), 1)
    rules = Rules("bf16", "fp32", False, 2, None, "muon", False, "fp32", "fp32", "fp32", False)
    whole = keep(((chunk,),), rules, False)
    sizes = {name: rounded(4 * prod(shape)) for name, shape in names.items()}
    moments = sum(size * (1 if name.startswith("fc") else 2) for name, size in sizes.items())
    assert whole.states.excursion.net == moments
    dealt = keep(((chunk,),), replace(rules, distributed=True), False)
    assert dealt.states.excursion.net == 2 * (sizes["norm.weight"] + sizes["word.weight"])
    main = sum(event.bytes for event in dealt.construction if getattr(event, "name", "") == "main_param")
    assert main == sizes["norm.weight"] + sizes["word.weight"]
    assert not any(getattr(event, "name", "") == "param_data" for event in dealt.construction)


OFFLOADED = replace(PLAIN, distributed=True, precision_aware=True, offload=0.5)


def test_the_first_parameters_go_to_the_host_until_they_are_the_fraction() -> None:
    """Of 100, 60, 30 and 10 elements half is 100: the first alone; 0.6 of them is 120, which the second exceeds."""
    sizes = [100, 60, 30, 10]
    assert offloaded(sizes, 0.5) == [True, False, False, False]
    assert offloaded(sizes, 0.6) == [True, True, False, False]
    assert offloaded(sizes, 1.0) == [True] * 4


def test_states_of_half_of_the_parameters_are_the_host_s() -> None:
    """Two matrices of 1,000 x 100, the first of which goes: 16 bytes an element there, and on the device 4 of the main
    parameter and 8 of moments for the other. Building clones a matrix of 2 bytes, and made main parameters of all first
    (here the same)."""
    kept = keep(chunk_of((1000, 100), (1000, 100)), OFFLOADED, False)
    assert kept.host == 100_000 * 16
    assert held(kept.construction, Category.MAIN_PARAMETERS) == rounded(400_000)
    assert held(kept.states, Category.OPTIMIZER_STATES) == 2 * rounded(400_000)
    assert kept.step.excursion.peak == 0
    names = {event.name: event.bytes for event in kept.construction if isinstance(event, Hold)}
    assert names["main_param_of_all"] == rounded(400_000)
    assert names["parameter_cloned"] == rounded(200_000)


def test_gradients_in_16_bits_are_cast_on_their_way_to_the_host() -> None:
    """One of 4 bytes an element for the host's, which ends at once, and one that stays for the device's."""
    kept = keep(chunk_of((1000, 100), (1000, 100)), replace(OFFLOADED, gradients="bf16"), False)
    assert kept.step.excursion.peak == rounded(400_000)
    assert held(kept.states, Category.GRADIENTS) == rounded(400_000)
    assert not kept.carried


def test_all_states_on_the_host() -> None:
    kept = keep(chunk_of((1000, 100), (7,)), replace(OFFLOADED, offload=1.0), False)
    assert held(kept.states, Category.OPTIMIZER_STATES) == held(kept.construction, Category.MAIN_PARAMETERS) == 0
    assert kept.host == 100_007 * 16
