"""Megatron-Core with products in 8 and 4 bits: what is kept, against hand calculations, and what is refused.

Tensors within layers are compared with Transformer Engine's own code in ``tests.layers.megatron_core.test_te_modules``.
"""

from __future__ import annotations

from typing import Any

import pytest

from memplan.estimate import estimate
from memplan.frameworks import framework
from memplan.frameworks.megatron.notices import notices
from memplan.frameworks.megatron.programs import programs
from memplan.frameworks.megatron.states import Rules, keep
from memplan.layers.megatron_core.precision import Low, Recipe
from memplan.layers.module import Options, Parameter
from memplan.layers.work import Stream
from memplan.plan.errors import PlanError
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.search.time import step_time
from memplan.tape.events import Category, Drop, Hold, Tape, rounded

MIB = 1024**2
SMALL: dict[str, Any] = {
    "model": "llama-3-8b", "framework": "megatron", "gpu": "h100-80gb", "gpus": 8, "zero": 1, "layers": 4, "seq": 4096,
}  # fmt: skip
WEIGHTS = (4096 + 2 * 1024) * 4096 + 4096 * 4096 + 2 * 14336 * 4096 + 4096 * 14336
"""Elements of a layer's four linear layers."""


def plan_of(given: dict[str, Any], **environment: str) -> ResolvedPlan:
    plan = read_plan(None, {name.replace("_", "-"): str(value).lower() for name, value in given.items()}).plan
    return resolve(plan.model_copy(update={"environment": environment}) if environment else plan)


def static(**flags: Any) -> int:
    return estimate(plan_of(SMALL | flags)).stages[0].static


def held(tape: Tape, category: Category) -> int:
    return sum(
        event.bytes if isinstance(event, Hold) else -event.bytes
        for event in tape
        if isinstance(event, Hold | Drop) and event.category is category
    )


@pytest.mark.parametrize(
    ("flags", "bytes_each"),
    [
        ({"fp8": "tensorwise"}, 2.0),
        ({"fp8": "delayed"}, 2.0),
        ({"fp8": "tensorwise", "gpu": "b200"}, 1.0),
        ({"fp8": "blockwise"}, 2.0 + 2 * 4 / 128**2),
        ({"fp8": "mxfp8", "gpu": "b200"}, 2.0 + 2 / 32),
        ({"fp4": "nvfp4", "gpu": "b200"}, 1.0 + 2 / 16),
    ],
)
def test_quantised_copies_of_weights_stay_between_steps(flags: dict[str, Any], bytes_each: float) -> None:
    """A byte for each orientation that products read; scales of 128 x 128, 32 or 16 elements. Beside them: single
    numbers of 512 bytes, with delayed scaling four small tensors a layer, and what blocks are larger than tensors."""
    plain = static(**{name: value for name, value in flags.items() if name == "gpu"})
    more = static(**flags) - plain
    assert more == pytest.approx(4 * WEIGHTS * bytes_each, abs=8 * MIB)


def test_layers_at_both_ends_in_16_bits_have_no_copies() -> None:
    every, inner = static(fp8="tensorwise"), static(fp8="tensorwise", first_16bit_layers=1, last_16bit_layers=1)
    assert every - inner == pytest.approx(2 * 2 * WEIGHTS, abs=2 * 4 * 512)


def test_further_tokens_in_16_bits_have_no_copies() -> None:
    """MXFP8's two copies, with a scale for each 32 elements, of a layer's linear layers and of the projection of two
    hidden states, and what blocks are larger. Products, norms and losses are then those of a run in 16 bits."""
    further = {"mtp_layers": 1, "gpu": "b200", "fp8": "mxfp8"}
    wide = further | {"precision_of_modules": "mtp.*=16bit"}
    copies = (2 + 2 / 32) * (WEIGHTS + 2 * 4096**2)
    assert static(**further) - static(**wide) == pytest.approx(copies, abs=8 * MIB)
    one, other = (
        framework("megatron").time.entries(plan_of(SMALL | flags)) for flags in (wide, further | {"fp8": "null"})
    )
    assert (one.head.forward, one.head.backward) == (other.head.forward, other.head.backward)


@pytest.mark.parametrize(("recipe", "normed", "bytes_each", "kernels"), [
    ("nvfp4", False, 2 + 2 + 2 / 2, 2), ("nvfp4", True, 2 + 2 + 2 / 2, 2), ("mxfp8", False, 2 + 2, 1),
    ("tensorwise", False, 2 + 2 + 2, 2), ("tensorwise", True, 2 + 2, 1),
])  # fmt: skip
def test_a_cast_with_one_scale_of_a_tensor_reads_it_twice(
    recipe: Recipe, normed: bool, bytes_each: float, kernels: int
) -> None:
    """Its largest element is found first, 2 bytes of an element, unless a norm did so; then 2 bytes are read to write
    one for rows and one for columns, or half of one."""
    assert Low(recipe, True, (2, 17)).work((1024, 512), normed=normed) == Stream(1024 * 512 * bytes_each, kernels)


@pytest.mark.parametrize(("recipe", "turns", "parameters", "stay"), [
    ("tensorwise", True, 1, 1), ("tensorwise", False, 1, 0), ("delayed", True, 1, 1), ("mxfp8", False, 0, 2 + 2 / 32),
])  # fmt: skip
def test_weights_in_8_bits_are_in_a_buffer_of_their_own(
    recipe: Recipe, turns: bool, parameters: float, stay: float
) -> None:
    """A weight of 1024 x 1024 and 1024 numbers in bf16: two buffers, of a byte and of two bytes an element. The
    transposed copy stays where products want it, and of MXFP8 everything, which has no buffer for parameters."""
    weight = Parameter("a.weight", (1024, 1024), low=Low(recipe, turns, (2, 18), parameters=True))
    rules = Rules("bf16", "fp32", True, 8, None, "adam", False, "fp32", "fp32", "fp32", False)
    kept = keep(((((weight, Parameter("a.bias", (1024,))), 1),),), rules, False)
    single = 0 if recipe == "mxfp8" else 512
    assert held(kept.construction, Category.PARAMETERS) == parameters * MIB + stay * MIB + single + 2 * 1024
    assert held(kept.construction, Category.GRADIENTS) == 4 * MIB + 4 * 1024
    assert held(kept.construction, Category.MAIN_PARAMETERS) == rounded(4 * MIB // 8) + rounded(4 * 1024 // 8)


@pytest.mark.parametrize(
    ("low", "more"),
    [
        (Low("tensorwise", False, (2, 18), parameters=True), 2 * 512),
        (Low("tensorwise", True, (2, 18), parameters=True), MIB // 8 + 2 * 512),
        (Low("delayed", False, (2, 18), parameters=True), 2 * 512),
        (Low("blockwise", True, (2, 18), parameters=True), 2 * 512),
        (Low("mxfp8", False, (2, 18), parameters=True), None),
        (Low("nvfp4", False, (2, 18), parameters=True), 2 * 4 * 64**2 + 2 * 512),
        (Low("nvfp4", False, (2, 14), parameters=True), 4 * MIB // 8 + 2 * 4 * 64**2 + 2 * 512),
    ],
)
def test_the_step_casts_main_parameters_of_weights_in_8_bits(low: Low, more: int | None) -> None:
    """A weight of 1024 x 1024 over 8 ranks: each casts its eighth to 16 bits, 2/8 MiB, before it is quantised. Beside
    that what is largest in the weight and its scale, a number of 4 bytes (512 rounded) each, of a tensor or of the
    8 x 8 blocks of 128 x 128, or of 64 x 64 blocks of 16 x 16; where products want it a transposed eighth, in bytes;
    with NVFP4 the eighth in fp32 once more before 2.15. MXFP8 is received in the gradients' buffer."""
    rules = Rules("bf16", "fp32", True, 8, None, "adam", False, "fp32", "fp32", "fp32", False, te=low.te)
    kept = keep(((((Parameter("a.weight", (1024, 1024), low=low),), 1),),), rules, False)
    assert kept.step.excursion.net == 0
    assert kept.step.excursion.peak == (0 if more is None else 2 * MIB // 8 + more)


def test_a_precision_aware_optimizer_writes_delayed_weights_itself() -> None:
    """FusedAdam casts them (``use_precision_aware_optimizer_no_fp8_or_ds_fp8``); its state scales end with nothing."""
    weight = Parameter("a.weight", (1024, 1024), low=Low("delayed", True, (2, 18), parameters=True))
    rules = Rules(
        "bf16", "fp32", True, 8, None, "adam", True, "fp32", "fp32", "fp32", False, low=weight.low, fp8_recipe="delayed"
    )
    assert keep(((((weight,), 1),),), rules, False).step.excursion.peak == 0


def test_main_parameters_of_a_precision_aware_optimizer_stay_whole_in_8_bits() -> None:
    """Beside current scaling FusedAdam has none, so that no 16 bits of them are saved."""
    aware = {"precision_aware_optimizer": True}
    elements = estimate(plan_of(SMALL)).stages[0].parameters
    saved = static() - static(**aware)
    assert saved == pytest.approx(2 * elements / 8, rel=0.01)
    assert static(fp8="tensorwise") - static(fp8="tensorwise", **aware) == pytest.approx(0, abs=MIB)
    assert static(fp8="delayed") - static(fp8="delayed", **aware) == pytest.approx(saved, abs=MIB)


@pytest.mark.parametrize(
    ("flags", "field", "words"),
    [
        ({"fp8": "rowwise"}, "precision.fp8", "must be left out or delayed, tensorwise, blockwise or mxfp8"),
        ({"fp8": "mxfp8"}, "precision.fp8", "10.0; this GPU runs --fp8 delayed, --fp8 tensorwise and --fp8 blockwise"),
        ({"fp8": "mxfp8", "gpu": "a100-80gb"}, "precision.fp8", "10.0; this GPU runs none in 8 bits"),
        ({"fp8": "tensorwise", "gpu": "a100-80gb"}, "precision.fp8", "it needs compute capability 8.9"),
        ({"fp8": "tensorwise", "fp4": "nvfp4"}, "precision.fp4", "must be left out with precision.fp8"),
        ({"fp8_parameters": True}, "precision.fp8_parameters", "needs precision.fp8 or precision.fp4"),
        ({"fp8": "tensorwise", "fp8_parameters": True, "zero": 0}, "precision.fp8_parameters", "zero: 1"),
        (
            {"fp8": "delayed", "first_16bit_layers": 1},
            "precision.first_16bit_layers",
            "must be left out with delayed scaling",
        ),
        ({"fp8": "tensorwise", "last_16bit_layers": 9}, "precision.last_16bit_layers", "must be at most 4"),
        ({"fp8": "tensorwise", "te_version": "2.8"}, "megatron.transformer_engine", "must be 2.14 or later"),
        ({"fp8": "tensorwise", "transformer_impl": "local"}, "precision.fp8", "must be left out with local layers"),
        (
            {"fp8": "tensorwise", "framework": "fsdp", "zero": 0},
            "precision.fp8",
            "needs torchtitan's layers",
        ),
        ({"fp8": "mxfp8", "gpu": "b200", "seq": 4080}, "precision.fp8", "needs a multiple of 32 tokens"),
    ],
)
def test_what_is_refused(flags: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        estimate(plan_of(SMALL | flags))
    assert field in str(caught.value)
    assert words in str(caught.value)


def test_the_report_says_what_is_not_smaller() -> None:
    plan = plan_of(SMALL | {"fp8": "tensorwise"})
    (notice,) = [one for one in notices(plan, programs(plan, Options())) if one.code == "low-precision"]
    assert "weights stay in bf16 and have quantised copies beside them" in notice.message


def test_weights_in_8_bits_under_megatron_fsdp_are_gathered_as_bytes() -> None:
    """Of a layer's weights a byte of two is sharded over 8 ranks, three layers stay gathered, and no copies stay."""
    sharded = {"gpu": "b200", "megatron_fsdp": "optim_grads_params"}
    kept, stored = static(**sharded, fp8="tensorwise"), static(**sharded, fp8="tensorwise", fp8_parameters=True)
    plain = static(**sharded)
    assert kept - plain == pytest.approx(4 * WEIGHTS, abs=8 * MIB)
    assert plain - stored == pytest.approx(4 * WEIGHTS / 8 + 3 * WEIGHTS, rel=0.01)


@pytest.mark.parametrize(("flags", "faster", "products"), [
    ({"fp8": "tensorwise"}, 1.15, 1280 / 720), ({"fp8": "blockwise"}, 1.15, 2.0),
    ({"gpu": "b200", "fp8": "mxfp8"}, 1.2, 2.0), ({"gpu": "b200", "fp4": "nvfp4"}, 1.3, 4.0),
])  # fmt: skip
def test_a_step_is_faster_but_not_by_as_much_as_products_are(
    flags: dict[str, Any], faster: float, products: float
) -> None:
    """Attention, logits, norms and casts are not; MFU refers to the peak in 8 or 4 bits. On H100 products with a
    scale for each tensor are 1,280 beside 720 TFLOP/s (SemiAnalysis' figures of both)."""
    plain = {name: value for name, value in flags.items() if name == "gpu"}
    times = [step_time(plan_of(SMALL | one | {"gbs": 128})) for one in (plain, flags)]
    ratio = times[0].total / times[1].total
    assert faster < ratio < products
    assert times[1].mfu < times[0].mfu


LOW_ATTENTION = SMALL | {"fp8": "delayed", "fp8_dot_product_attention": True}


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"fp8": "blockwise"}, "no back end"),
        ({"fp8": "tensorwise"}, "before Blackwell"),
        ({"fp8": "mxfp8", "gpu": "b200", "seq": 4128}, "multiples of 128 tokens"),
        ({"fp8": "mxfp8", "gpu": "b200", "head_dim": 48}, "multiples of 32"),
        ({"fp8": "tensorwise", "gpu": "rtx-pro-6000"}, "compute capability 12.0"),
        ({"te_version": "2.17"}, "before Transformer Engine 2.18"),
        ({"attention_backend": "flash"}, "attention_backend"),
        ({"fp8": "mxfp8", "gpu": "b200", "cp": 2, "seq": 4352}, "multiples of 128 tokens"),
        ({"head_dim": 64}, "64 features"),
        ({"log_max_attention_logit": True}, "largest score"),
        ({"packed_sequences": True}, "no back end for both"),
        ({"attention_dropout": 0.1, "gpu": "b200"}, "NVTE_FP8_DPA_BWD=0"),
        ({"NVTE_DPA_FP8CS_O_in_F16": "0"}, "NVTE_DPA_FP8CS_O_in_F16"),
    ],
)
def test_attention_in_8_bits_is_refused_where_it_would_be_another(flags: dict[str, Any], why: str) -> None:
    environment = {name: value for name, value in flags.items() if name.startswith("NVTE")}
    given = {name: value for name, value in flags.items() if name not in environment}
    with pytest.raises(PlanError, match=why):
        plan_of(LOW_ATTENTION | given, **environment)


BLACKWELL = SMALL | {"gpu": "b200", "fp8_dot_product_attention": True}


@pytest.mark.parametrize("flags", [{"fp8": "mxfp8"}, {"fp8": "tensorwise"}, {"fp4": "nvfp4"}])
def test_attention_may_scale_otherwise_than_linear_layers(flags: dict[str, Any]) -> None:
    """``NVTE_DPA_FP8_RECIPE``: with a tensor's own scale queries, keys and values have one byte, with MXFP8 two, and a
    byte for 32 features or tokens (of 128 features and 4,096 tokens), in each of four layers and micro-batches."""
    names = ("Float8CurrentScaling", "MXFP8BlockScaling")
    peaks = [estimate(plan_of(BLACKWELL | flags, NVTE_DPA_FP8_RECIPE=name)).stages[0].requested for name in names]
    elements = 4096 * (4096 + 2 * 1024)
    assert peaks[1] - peaks[0] == pytest.approx(4 * elements * (1 + 2 / 32), abs=MIB)


def test_an_output_layer_in_8_bits_has_copies_of_its_weight() -> None:
    """Of 128,256 x 4,096 a byte each way and a scale for 32; of the input of 4,096 tokens one copy is saved, beside the
    hidden state, which ``_postprocess`` holds while it computes the loss (``TELMHeadColumnParallelLinear``)."""
    flags = SMALL | {"gpu": "b200", "fp8": "mxfp8"}
    plain, low = (estimate(plan_of(flags | more)).stages[0] for more in ({}, {"fp8_output_proj": True}))
    copies = 128256 * 4096 * (2 + 2 / 32)
    assert low.static - plain.static == pytest.approx(copies, abs=MIB)
    assert low.requested - plain.requested == pytest.approx(copies + 4096**2 * (1 + 1 / 32), abs=MIB)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"fp8": "tensorwise"}, "needs precision.fp8 mxfp8"),
        ({"tied_embeddings": True}, "tied embeddings"),
        ({"tp_comm_overlap": True, "tp": 2, "sequence_parallel": True}, "tp_comm_overlap"),
    ],
)
def test_an_output_layer_in_8_bits_is_refused_where_megatron_does(flags: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        plan_of(SMALL | {"gpu": "b200", "fp8": "mxfp8", "fp8_output_proj": True} | flags)


@pytest.mark.parametrize(
    ("flags", "named", "history"),
    [
        ({"fp8": "delayed", "amax_history": 1024}, {}, 1024),
        ({"fp8": "tensorwise"}, {}, 1),
        ({"fp8": "mxfp8"}, {"NVTE_DPA_FP8_RECIPE": "DelayedScaling", "NVTE_DPA_FP8DS_AMAX_HISTLEN": "512"}, 512),
        ({"fp8": "mxfp8"}, {}, 0),
        ({"fp8": "mxfp8"}, {"NVTE_DPA_FP8_RECIPE": "F16"}, 0),
    ],
)
def test_attention_in_8_bits_keeps_scales_and_amaxes_of_each_layer(
    flags: dict[str, Any], named: dict[str, str], history: int
) -> None:
    """Nine tensors forward and six backward (``DelayedScalingRecipeState``), in fp32; with tensorwise scaling of scores
    alone, and without a history; none of MXFP8."""
    plans = (plan_of(BLACKWELL | flags, **named), plan_of(SMALL | flags | {"gpu": "b200"}))
    low, plain = (estimate(plan).stages[0].static for plan in plans)
    sizes = [rounded(4 * count) + rounded(4 * count * history) for count in (9, 6) if history]
    assert low - plain == 4 * sum(sizes)
