"""torchtitan's compiled layers: what was learnt holds together, and what they save, by hand."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import pytest

from memplan.estimate import programs_of
from memplan.frameworks.fsdp.torchtitan import recipes
from memplan.layers.compiled import Begins, Sizes, parameters_of, regime_of, sizes_of, structures
from memplan.layers.module import Options, Passes
from memplan.layers.work import Product, Stream
from memplan.plan.errors import PlanError
from memplan.plan.models import load_spec
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve

LLAMA = {"model": "llama-3-8b", "framework": "fsdp", "fsdp-code": "torchtitan", "compile": "true", "gpus": "8"}
B, S, H, F = 2, 8192, 4096, 14336


def plan_of(**flags: str) -> ResolvedPlan:
    return resolve(read_plan(None, {**LLAMA, "layers": "2", **flags}).plan)


@pytest.mark.parametrize("name", structures())
def test_every_tensor_ends_or_is_handed_on(name: str) -> None:
    """Once; gradients have the shapes of the input and of the parameters."""
    one, spec = structures()[name], load_spec("llama-3-8b")
    begun: dict[int, Begins] = {}
    ended: list[int] = []
    for event in (*one.forward, *one.backward):
        if isinstance(event, int):
            ended.append(event)
        else:
            begun[event.number] = event
    handed = {one.output, *one.gradients}
    assert sorted(ended) == sorted({0, 1, *begun} - handed)
    within = {number for number in one.forward if isinstance(number, int)}
    made = {event.number for event in one.forward if isinstance(event, Begins)}
    assert set(one.saved) == {1, *made} - within - {one.output}
    sizes = {**sizes_of(Sizes(B, S, 32, 8, 128, F)), "1": 1}
    shapes = [tuple(sizes[size] for size in begun[number].sizes) for number in one.gradients]
    assert shapes[0] in ((B, S, H), (B * S, H))
    assert shapes[1:] == [shape for _, shape in parameters_of(spec)]


def test_what_a_layer_saves_by_hand() -> None:
    """Selective: query, value, attention's output and logarithms, gate, beside the input. torchtitan's list has the
    down projection, too, which backward does not read. Full: the input alone."""
    made = recipes(plan_of(mbs=str(B), seq=str(S)))
    hidden, ffn, value, logarithms = 2 * B * S * H, 2 * B * S * F, 2 * B * S * 1024, 4 * B * S * 32
    states = 2 * 512  # of attention's random numbers
    assert made.block("full", Options()).first.forward_fold.net == hidden
    assert made.block("op", Options()).first.forward_fold.net == 3 * hidden + value + ffn + logarithms + states


def test_kernels_multiply_as_the_layer_does_and_stream_less() -> None:
    """The products of a layer without torch.compile, in another order; fewer bytes, by fewer kernels."""

    def work(compiles: str, mode: Literal["none", "op"]) -> Passes:
        plan = plan_of(mbs=str(B), seq=str(S), compile=compiles)
        return recipes(plan).block(mode, Options(counts="first")).work

    def products(passes: Passes) -> Counter[frozenset[int]]:
        found = Counter[frozenset[int]]()
        for kernel, times in (*passes.forward, *passes.backward):
            if isinstance(kernel, Product):
                found[frozenset((kernel.m, kernel.n, kernel.k))] += times
        return found

    def streams(passes: Passes) -> tuple[float, int]:
        moved, launches = 0.0, 0
        for kernel, times in (*passes.forward, *passes.backward):
            if isinstance(kernel, Stream):
                moved, launches = moved + kernel.bytes * times, launches + kernel.launches * times
        return moved, launches

    eager, compiled = work("false", "none"), work("true", "none")
    assert products(eager) == products(compiled)
    assert eager.flops == compiled.flops
    assert streams(compiled)[0] < streams(eager)[0] / 2
    assert streams(compiled)[1] == 11 + 15  # as Inductor's code has them
    assert work("true", "op").flops > compiled.flops


def test_the_loss_saves_two_numbers_a_token() -> None:
    """And keeps the logits, whose gradient is in their dtype."""
    *_, loss = recipes(plan_of(mbs=str(B), seq=str(S), **{"compile-loss": "true"})).ends(Options())
    assert loss.first.forward_fold.net == 2 * 4 * B * S + 2 * 512
    assert loss.first.backward_fold.peak == 2 * B * S * 128256 + 512


def test_regimes() -> None:
    llama = Sizes(2, 8192, 32, 8, 128, 14336)
    assert regime_of(llama) == "mixed"
    assert regime_of(Sizes(1, 4096, 32, 8, 128, 14336)) == "plain"
    assert regime_of(Sizes(1, 2048, 32, 8, 128, 14336)) == "few"
    assert sizes_of(llama)["c"] == 1024  # of the 16384 tokens, as Inductor's code has them


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"fsdp-code": "transformers"}, r"must be false: it is torchtitan's setting"),
        ({"tp": "2"}, r"fsdp\.compile = true: must be false with tensor parallelism"),
        ({"dtype": "fp32"}, r"fsdp\.compile = true: must be false unless precision\.dtype is bf16"),
        ({"kv-heads": "32"}, r"model\.kv_heads = 32: must be from 2 to below the 32 heads"),
        ({"ffn": "14337"}, r"model\.ffn = 14337: must give a multiple of 64"),
        ({"fp8": "tensorwise", "filter-fqns": "attention.wq"}, r"fsdp\.filter_fqns = \[attention\.wq\]: must leave"),
        ({"model": "qwen3-8b"}, r"fsdp\.compile = true: must be false with torchtitan's qwen3"),
    ],
)
def test_refused(flags: dict[str, str], line: str) -> None:
    with pytest.raises(PlanError, match=line):
        programs_of(plan_of(**flags), Options())
