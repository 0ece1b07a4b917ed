"""FSDP1, as Accelerate runs it: sizes counted by hand, and runs that others measured.

The measured ones are of foundation-model-stack's benchmark of fms-acceleration (``scripts/benchmarks/refs``): Mistral
7B on two A100s, transformers 4.48.1, peft 0.13.2, torch 2.4.1.
"""

from __future__ import annotations

from typing import Any

import pytest

from memplan.estimate import estimate
from memplan.frameworks.fsdp.flat import FlatHooks
from memplan.frameworks.fsdp.flat_states import Flat
from memplan.frameworks.fsdp.modules import MODEL
from memplan.frameworks.fsdp.passing import pass_through
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.result import StageEstimate
from memplan.tape.events import Category, Drop, Hold

LAYER = 218_112_000
"""Parameters of a layer of Mistral 7B: 4 matrices of attention, 3 of the feed-forward, 2 norms."""
ROOT = 2 * 32_000 * 4_096 + 4_096
ADAPTERS = 13_631_488
"""32 layers x 16 x (8,192 + 5,120 + 5,120 + 8,192)."""

LORA = {"lora-rank": "16", "lora-targets": "q_proj,k_proj,v_proj,o_proj", "lora-dropout": "0.1"}
FOUR_BIT = {**LORA, "quantisation": "nf4", "double-quantisation": "true", "autocast": "true"}


def plan(**flags: str) -> Plan:
    settings = {
        "model": "mistral-7b",
        "framework": "fsdp",
        "fsdp-version": "1",
        "gpus": "2",
        "gpu": "a100-80gb",
        "trainer": "transformers",
        "recompute": "full",
        "attention": "flash_attention_2",
        "seq": "4096",
        "versions": "transformers=4.48.1,peft=0.13.2,bitsandbytes=0.43.3",
        **{name.replace("_", "-"): value for name, value in flags.items()},
    }
    return read_plan(None, settings).plan


def stage(**flags: str) -> StageEstimate:
    (only,) = estimate(plan(**flags)).stages
    return only


@pytest.mark.parametrize("prefetch", ["post", "none"])
def test_nothing_is_gathered_ahead_unless_asked_for(prefetch: str) -> None:
    """Beside the layer that runs, ``pre`` holds the one before it: at the peak of an optimizer without states."""
    flags = {"optimizer": "sgd", "momentum": "0", "vocab": "1024", "use_reentrant": "false", "mbs": "1", "gbs": "2"}
    ahead, behind = stage(**flags), stage(**flags, fsdp_backward_prefetch=prefetch)
    assert (ahead.peak.module, behind.peak.module) == ("layer.1", "layer.0")
    assert ahead.of(Category.GATHERED_PARAMETERS) - behind.of(Category.GATHERED_PARAMETERS) == 2 * LAYER


def test_fully_shard_has_no_other_order() -> None:
    flags = {"model": "gpt2", "framework": "fsdp", "gpus": "2", "fsdp-backward-prefetch": "post"}
    resolve(read_plan(None, {**flags, "torch": "2.1"}).plan)
    with pytest.raises(PlanError, match="must be pre under FSDP2"):
        resolve(read_plan(None, flags).plan)


@pytest.mark.parametrize(
    ("flags", "mbs", "peak", "after"),
    [
        ({}, 2, 36_225_939_968, 28_984_199_680),
        ({}, 4, 36_226_136_576, 28_984_396_288),
        (LORA, 2, 15_144_870_400, 7_368_030_720),
        (LORA, 4, 21_959_827_968, 7_368_227_328),
        (FOUR_BIT, 2, 9_424_594_432, 2_244_525_568),
        (FOUR_BIT, 4, 15_970_067_968, 2_244_722_176),
    ],
)
def test_measured_runs(flags: dict[str, str], mbs: int, peak: int, after: int) -> None:
    """Allocated at the peak of training, and after it, when gradients are still there."""
    found = stage(**flags, mbs=str(mbs), gbs=str(2 * mbs))
    assert found.allocated is not None
    gradients = ADAPTERS * 4 // 2 if flags else 7_241_732_096 * 2 // 2
    assert found.allocated == pytest.approx(peak, rel=0.0005)
    assert found.static + gradients == pytest.approx(after, rel=0.001)


def test_what_is_gathered_at_once() -> None:
    """The root and, in backward, a layer with its adapters; the root alone in the head's forward, where the peak is
    without reentrance."""
    adapters = ADAPTERS // 32 * 4
    both = stage(**LORA, mbs="8", gbs="16")
    assert both.of(Category.GATHERED_PARAMETERS) == 2 * (ROOT + LAYER) + adapters
    root = stage(**LORA, mbs="8", gbs="16", use_reentrant="false")
    assert root.peak.module == "head"
    assert root.of(Category.GATHERED_PARAMETERS) == 2 * ROOT


@pytest.mark.parametrize(("ahead", "trained", "layers"), [(False, 1, 1), (True, 1, 2), (False, 0, 1), (True, 0, 3)])
def test_the_layer_before_is_gathered_ahead(ahead: bool, trained: int, layers: int) -> None:
    """Four layers of 1 MiB between an embedding and a head, which the root of 512 KiB has."""
    units = (
        Flat(MODEL, 0, 5, 1 << 19, trained, False),
        *(Flat(f"layer.{i}", i + 1, i + 1, 1 << 20, trained) for i in range(4)),
    )
    arounds = pass_through(FlatHooks(units, 2, "bf16", False, [()] * 5, True, ahead), 6, 5)
    backward = [event for around in arounds[::-1] for event in (*around.before_backward, *around.after_backward)]
    held = {Category.GATHERED_PARAMETERS: [1 << 19]}
    for event in backward:
        if isinstance(event, Hold | Drop) and event.category in held:
            now = held[event.category]
            now.append(now[-1] + (event.bytes if isinstance(event, Hold) else -event.bytes))
    assert max(held[Category.GATHERED_PARAMETERS]) == (1 << 19) + layers * (1 << 20)
    assert held[Category.GATHERED_PARAMETERS][-1] == 0


def test_frozen_layers_keep_inputs_and_gradients_until_backward_has_ended() -> None:
    """For each further sequence the peak is the last layer's to be recomputed, and two hidden states of the 31 others,
    but for the one gradient that is that layer's own."""
    hidden = 4_096 * 4_096 * 2
    small, large = stage(**LORA, mbs="4", gbs="8"), stage(**LORA, mbs="8", gbs="16")
    assert small.peak.module == large.peak.module == "layer.0"
    assert small.requested is not None
    each = (large.requested - small.requested) / 4
    assert each / hidden == pytest.approx(63 + 38.5, abs=0.06)


def test_a_step_is_on_pieces() -> None:
    """AdamW (foreach): parameters, gradients, two states, and square roots of the second."""
    found = stage(mbs="1", gbs="2")
    assert found.peak.phase == "step"
    assert found.requested == pytest.approx(5 * 7_241_732_096, rel=1e-4)


def test_eight_bit_states_of_pieces() -> None:
    """The rank that has a part of the embedding has more than the others: its states are in fp32. Rank 0's half of the
    root is nearly all embedding (131,072,000 of 131,074,048 elements), and of a layer it has 109,056,000 elements."""
    embedding, of_layers = 131_072_000, 32 * LAYER // 2
    found = stage(mbs="1", gbs="2", optimizer="adam8bit")
    assert found.of(Category.OPTIMIZER_STATES) == pytest.approx(8 * embedding + 2 * of_layers * (1 + 4 / 256), rel=1e-4)
    paged = stage(mbs="1", gbs="2", optimizer="paged_adamw_8bit")
    assert paged.host == pytest.approx(8 * embedding + 2 * (2 * of_layers + embedding), rel=1e-4)
    assert paged.of(Category.OPTIMIZER_STATES) == pytest.approx(2 * (of_layers + embedding) * 4 / 256, rel=1e-2)


@pytest.mark.parametrize("model", ["deepseek-v2-lite", "glm-4.5-air"])
def test_layers_of_several_kinds_have_shards_of_their_own(model: str) -> None:
    """A dense layer before those with experts."""
    (found,) = estimate(plan(model=model, gpus="8", seq="512", versions="")).stages
    assert found.of(Category.PARAMETERS) == pytest.approx(2 * found.parameters, rel=1e-5)


def test_mixed_precision_has_fp32_pieces() -> None:
    found = stage(mbs="1", gbs="2", autocast="true")
    assert found.of(Category.PARAMETERS) == pytest.approx(7_241_732_096 * 4 / 2, rel=1e-5)
    assert found.of(Category.OPTIMIZER_STATES) == pytest.approx(7_241_732_096 * 8 / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"fsdp_version": "2", **LORA}, "--fsdp-version 1"),
        ({"fsdp_version": "2"}, "must be left out under FSDP2; FSDP1 takes it"),
        ({"fsdp_offload": "true"}, "it is modelled with FSDP2 only (--fsdp-version 2)"),
        ({"fsdp_code": "torchtitan", "versions": ""}, "must be transformers"),
        ({**FOUR_BIT, "kbit_preparation": "true"}, "unprepared"),
        ({"fsdp_parameters": "fp32"}, "must be bf16 with fsdp.version 1"),
    ],
)
def test_what_is_not_modelled_is_one_line(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        estimate(plan(**flags))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["llama-3-8b", "gpt2-xl", "gemma-2-9b", "opt-6.7b", "phi-3-mini"])
@pytest.mark.parametrize(
    "flags",
    [
        {"gbs": "8"},
        {**LORA, "lora-targets": "all-linear"},
        {**LORA, "lora-targets": "all-linear", "recompute": "full", "use-reentrant": "true", "gbs": "8"},
        {**FOUR_BIT, "lora-targets": "all-linear", "recompute": "full", "use-reentrant": "false"},
        {"autocast": "true", "reshard-after-forward": "false"},
    ],
    ids=["full", "lora", "lora-reentrant", "four-bit", "mixed"],
)
def test_any_model_has_readings_in_order_and_categories_that_sum(model: str, flags: dict[str, str]) -> None:
    """Each hold is dropped once: ``fold_program`` asserts it. Also where an embedding has no backward, whose hooks the
    first layer's backward runs."""
    sizes = {"model": model, "layers": "3", "seq": "256", "framework": "fsdp", "fsdp-version": "1", "gpus": "4"}
    (found,) = estimate(read_plan(None, {**sizes, **flags}).plan).stages
    assert found.allocated is not None
    assert found.reserved is not None
    assert found.requested <= found.allocated <= found.reserved
    assert sum(found.breakdown) == found.allocated


# ---- checkpoints ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "gathered"),
    [
        ({}, 2 * ROOT + ROOT),
        ({"autocast": "true"}, 4 * ROOT + 2 * ROOT),
        (LORA, 2 * ROOT),
    ],
)
def test_a_checkpoint_gathers_the_largest_unit(flags: dict[str, str], gathered: int) -> None:
    """The root is Mistral's largest unit: 2 x 32,000 x 4,096 + 4,096 parameters in the dtype of their shards, and of
    what is trained a state of the optimizer beside the copy of half of it. A frozen root has no states."""
    one = stage(mbs="2", gbs="4", **flags)
    assert one.static is not None
    assert one.moments["checkpoint"] == one.static + gathered


@pytest.mark.parametrize(("more", "refused"), [({}, True), ({"recompute": "full"}, False)])
def test_adapters_that_begin_behind_the_first_layer(more: dict[str, str], refused: bool) -> None:
    """Qwen 3.5's first three layers have no ``q_proj``: nothing of them is trained, and they have no backward."""
    flags = {"model": "qwen3.5-9b", "lora-rank": "8", "lora-targets": "q_proj", "framework": "fsdp", "gpus": "2"}
    read = read_plan(None, {**flags, "fsdp-version": "1", "seq": "64", **more})
    if refused:
        with pytest.raises(PlanError, match="must be in the first layer"):
            estimate(read.plan)
    else:
        assert estimate(read.plan).peak > 0
