"""``single``, ``ddp`` and ``device-map``: what is refused, and what the frameworks add."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings, strategies as st

from memplan.estimate import detail, estimate
from memplan.frameworks import framework
from memplan.frameworks.plain.programs import programs as programs_of
from memplan.layers.module import SHARED, Module, Options
from memplan.layers.work import Attention
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Category, Drop, Hold
from memplan.tape.program import Program, fold_program

SMALL = {"model": "gpt2", "layers": "3", "gpu": "a100-80gb", "seq": "128", "attention": "eager"}


def plan(**flags: object) -> Plan:
    merged = {**SMALL, **{k.replace("_", "-"): str(v) for k, v in flags.items()}}
    return resolve(read_plan(None, merged).plan)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"model": "bloom-176b", "framework": "single"}, "has no recipe in framework single"),
        ({"recompute": "selective"}, "whole layers"),
        ({"recompute": "full", "recompute_layers": 2}, "uniform with layers 1"),
        ({"dtype": "fp32", "attention": "flash_attention_2"}, "fp16 and bf16 only"),
        ({"dtype": "fp16", "gpu": "v100-32gb", "attention": "flash_attention_2"}, "a GPU from Ampere on"),
        ({"model": "mistral-7b", "attention": "flash", "seq": 4096, "versions": "transformers=4.52"}, "of before 4.53"),
        (
            {"model": "mistral-7b", "attention": "flash", "seq": 4096, "head_dim": 100},
            "for heads of 100 features",
        ),
        ({"model": "opt-1.3b", "padding": "true"}, "not modelled for family opt"),
        ({"model": "llama-3-8b", "padding": "true", "attention": "flash_attention_2"}, "must be false with attention"),
        ({"model": "llama-3-8b", "padding": "true", "versions": "transformers=4.52"}, "with transformers 4.52"),
        ({"model": "llama-3-8b", "padding": "true", "framework": "device-map", "gpus": 2}, "device map"),
        ({"model": "llama-3-8b", "padding": "true", "framework": "megatron"}, "must be false with megatron"),
        ({"dtype": "bf16", "gradients": "fp32"}, "precision.gradients"),
        ({"loss": "adaptive-softmax"}, "loss.kind"),
    ],
)
def test_what_has_no_recipe_is_refused_in_one_line(flags: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        estimate(plan(**flags))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


LLAMA = {"model": "llama-3-8b", "layers": 8, "dtype": "bf16", "attention": "flash", "mbs": 4, "seq": 2048}


@pytest.mark.parametrize(
    ("framework", "trainer"), [("single", "transformers"), ("ddp", "sft"), ("fsdp", "sft"), ("deepspeed", "sft")]
)
def test_padding_keeps_a_mask_and_keys_and_values_of_every_head(framework: str, trainer: str) -> None:
    """Of 4 sequences of 2,048 tokens in 16 bits a mask has 32 MiB, keys and values of 24 further heads of 128 features
    48 MiB each: 128 MiB a layer, 1 GiB of 8. A notice of the plan without padding says so. What the step holds further
    is small: masks of booleans, 16 MiB, the tokens' own, and random numbers' places."""
    flags = {**LLAMA, "framework": framework, "gpus": 1 if framework == "single" else 64, "trainer": trainer}
    flags |= {"zero": 2} if framework == "deepspeed" else {}
    full, padded = estimate(plan(**flags)), estimate(plan(**flags, padding="true"))
    (told,) = (one.message for one in full.warnings if one.code == "padding")
    assert "134,217,728 bytes more" in told
    assert "1.00 GiB in all layers that are kept at once" in told
    more = padded.stages[0].requested - full.stages[0].requested
    assert 2**30 <= more < 2**30 + 2**25
    assert not [one for one in padded.warnings if one.code == "padding"]


def test_padding_that_no_estimate_counts_is_told() -> None:
    """Both sequences of 4 pairs are in a batch: twice the bytes above, in each of 8 layers."""
    found = estimate(plan(**LLAMA, framework="single", trainer="dpo"))
    (told,) = (one.message for one in found.warnings if one.code == "padding")
    assert "268,435,456 bytes more" in told
    assert "2.00 GiB in all layers that are kept at once); memplan cannot count it with trainer.loop dpo" in told


MISTRAL = {"model": "mistral-7b", "layers": 3, "framework": "single", "dtype": "bf16"}


@pytest.mark.parametrize(
    ("flags", "attention", "kernel"),
    [
        ({"seq": 4095, "gpu": "h100"}, "flash", ""),
        ({"seq": 4096, "gpu": "a100-80gb"}, "flash", "memory-efficient"),
        ({"seq": 4096, "gpu": "h100"}, "flash", "cudnn"),
        ({"seq": 4096, "gpu": "h100", "torch": "2.10"}, "flash", "memory-efficient"),
        ({"seq": 4096, "gpu": "h100", "dtype": "fp32"}, "flash", "memory-efficient"),
        ({"seq": 4096, "gpu": "h100", "attention": "flash_attention_2"}, "flash_attention_2", ""),
        ({"seq": 4096, "gpu": "h100", "versions": "transformers=4.52"}, "flash_attention_2", ""),
    ],
)
def test_attention_from_a_sliding_window_on(flags: dict[str, object], attention: str, kernel: str) -> None:
    """transformers' default is sdpa, with a mask where the sequence is as long as the window: PyTorch 2.11 prefers
    cuDNN's kernel on Hopper, in 16 bits. Masks of transformers before 4.53 are not modelled."""
    made = plan(**{**MISTRAL, **flags, "attention": flags.get("attention", "")})
    assert (made.attention, made.masked_kernel) == (attention, kernel)


def test_what_a_mask_costs() -> None:
    """Of 4,096 tokens each layer keeps 4,096 x 4,096 scores, and keys and values of 32 heads of 128 features in place
    of 8, all of 2 bytes."""
    sdpa, package = (
        fold_program(programs_of(plan(**{**MISTRAL, "seq": 4096, "attention": name}), Options())[0]).after_forward
        for name in ("flash", "flash_attention_2")
    )
    assert sdpa - package == 3 * (4096 * 4096 * 2 + 2 * 4096 * 24 * 128 * 2)


def test_masks_are_told_with_their_bytes() -> None:
    found = estimate(plan(**MISTRAL | {"layers": 32, "seq": 8192, "attention": "flash"}))
    told = next(one.message for one in found.warnings if one.code == "masks-kept")
    assert "32 layers keeps a copy of it, 134,217,728 bytes (4.00 GiB together)" in told
    assert any("the memory-efficient kernel" in one for one in found.assumptions)


def test_no_package_is_named_where_none_runs() -> None:
    """``mha_fwd`` of flash-attn: "FlashAttention only supports Ampere GPUs or newer"."""
    found = estimate(
        plan(**MISTRAL | {"layers": 16, "seq": 8192, "gpu": "v100-32gb", "dtype": "fp16"} | {"attention": ""})
    )
    (said,) = (one.message for one in found.warnings if one.code == "masks-kept")
    assert "--attention flash_attention_2" not in said
    assert "from Ampere on" in said


def test_masks_of_pairs_are_of_both_sequences() -> None:
    """trl's DPO makes one batch of chosen and rejected sequences: scores are of twice as many as the micro-batch has
    samples, 2 x 4,096 x 4,096 of 2 bytes."""
    found = estimate(plan(**MISTRAL | {"layers": 32, "seq": 4096, "trainer": "dpo", "attention": "flash"}))
    assert any("a copy of it, 67,108,864 bytes" in one.message for one in found.warnings)


def test_layers_that_have_no_backward_keep_no_mask() -> None:
    """Behind a frozen embedding nothing leads back to the first 20 of 32 layers."""
    frozen = {"freeze_layers": 20, "freeze_embedding": "true"}
    found = estimate(plan(**MISTRAL | {"layers": 32, "seq": 8192, "attention": "flash"} | frozen))
    assert any("each of 12 layers keeps a copy" in one.message for one in found.warnings)


def test_scores_of_pairs_are_of_both_sequences() -> None:
    """As above: 2 sequences, 32 heads, 4,096 x 4,096 scores of 4 bytes."""
    found = estimate(plan(**MISTRAL | {"seq": 4096, "trainer": "dpo", "attention": "eager", "dtype": "fp32"}))
    (told,) = (one.message for one in found.warnings if one.code == "scores-kept")
    assert f"{2 * 32 * 4096 * 4096 * 4:,} bytes" in told


def test_a_named_sdpa_is_not_another_kernel() -> None:
    """Named, it is refused where its masks are not modelled; ``flash_attention_2`` is the default's place alone."""
    with pytest.raises(PlanError, match=r"must be flash_attention_2 for sequences of 4096: from the sliding window"):
        estimate(plan(**MISTRAL | {"seq": 4096, "attention": "sdpa", "versions": "transformers=4.52"}))


def test_in_fp32_some_layers_keep_a_mask_and_others_their_scores() -> None:
    """Gemma 3's full layers have no mask, so that sdpa is handed 1 head of keys for 4 of queries (``use_gqa_in_sdpa``),
    which no fused kernel takes in fp32: 4 x 4,096 x 4,096 scores of 4 bytes. The package takes no fp32."""
    found = estimate(plan(model="gemma-3-1b", layers=26, framework="single", dtype="fp32", seq=4096, attention="flash"))
    told = {one.code: one.message for one in found.warnings}
    assert "in layers without a window" in told["scores-kept"]
    assert "268,435,456 bytes" in told["scores-kept"]
    assert "--attention flash_attention_2" not in told["masks-kept"]
    (said,) = (one for one in found.assumptions if "give it a mask" in one)
    assert "flash" not in said
    assert "layers without one run operator by operator" in said


def test_keys_are_told_to_be_repeated_only_where_they_are() -> None:
    """OLMo 3 7B has as many heads of keys as of queries."""
    found = estimate(plan(model="olmo-3-7b", layers=32, framework="single", seq=8192, attention="flash"))
    told = next(one.message for one in found.warnings if one.code == "masks-kept")
    assert "24 layers keeps a copy" in told
    assert "query head" not in told


def test_layers_without_a_window_are_timed_apart() -> None:
    """Every sixth of Gemma 3's 26 layers sees all tokens, and runs the flash kernel, which computes half of its scores;
    other layers compute all of theirs."""
    made = plan(model="gemma-3-1b", layers=26, framework="single", seq=4096, attention="flash")
    own = framework("single").time
    ((work,),) = own.stages(made)
    assert (work.layers, work.dense, work.dense_recomputed) == (26, 4, 0)
    entries = own.entries(made)
    parts = [
        (one.efficient, one.part)
        for layer in (entries.layer, entries.dense)
        for one, _ in layer.forward
        if isinstance(one, Attention)
    ]
    assert parts == [(True, 1), (False, 0.5)]


def test_layers_with_attention_are_timed_apart_from_gated_delta_nets() -> None:
    """Every fourth of Qwen 3.5's layers, of transformers' code (``Qwen3_5TextConfig.full_attention_interval``)."""
    made = plan(model="qwen3.5-9b", layers=8, framework="fsdp", gpus=2, seq=512, recompute="full", attention="flash")
    own = framework("fsdp").time
    ((work,),), entries = own.stages(made), own.entries(made)
    assert (work.layers, work.dense, work.dense_recomputed) == (8, 2, 2)
    scores = [any(isinstance(one, Attention) for one, _ in layer.forward) for layer in (entries.layer, entries.dense)]
    assert scores == [False, True]


def test_the_first_layers_of_deepseek_have_an_mlp() -> None:
    """The first three of six layers, on two devices, and the kinds of Llama 4 Maverick: experts in every second layer,
    positions in three of four."""
    own, flags = framework("device-map").time, {"framework": "device-map", "gpus": 2, "seq": 512}
    first, last = (stage[0] for stage in own.stages(plan(model="deepseek-v3", layers=6, recompute="full", **flags)))
    assert [one.counts for one in (first, last)] == [((3, 3), (0, 0)), ((0, 0), (3, 3))]
    ((work,),) = framework("single").time.stages(plan(model="llama-4-maverick", layers=8, seq=512))
    assert work.counts == ((4, 0), (2, 0), (2, 0))


def test_ddp_adds_buckets_as_large_as_the_gradients() -> None:
    mib = 2**20
    one, two = estimate(plan(framework="single")), estimate(plan(framework="ddp", gpus=2))
    added = two.stages[0].of(Category.COMMUNICATION_BUFFERS)
    gradients = two.stages[0].parameters * 2
    assert gradients <= added <= gradients + 512 * 64
    assert two.stages[0].static - one.stages[0].static == pytest.approx(added, abs=4 * mib)  # blocks round
    assert two.stages[0].device is not None
    assert not one.stages[0].beyond.nccl
    assert two.stages[0].beyond.nccl


def test_expandable_segments_leave_no_rest_in_blocks() -> None:
    plain = estimate(plan(dtype="fp32"))
    expandable = estimate(plan(dtype="fp32", env="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"))
    assert expandable.stages[0].requested == plain.stages[0].requested
    assert expandable.stages[0].of(Category.BLOCK_ROUNDING) <= plain.stages[0].of(Category.BLOCK_ROUNDING)


def test_a_wrong_allocator_setting_names_its_variable() -> None:
    with pytest.raises(PlanError, match="PYTORCH_CUDA_ALLOC_CONF"):
        estimate(plan(env="PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:few"))


TIED_SUM = 50257 * 768 * 2
"""The sum of the tied table's two gradients, which counts as a workspace until they end. Bytes."""


def test_without_a_gpu_there_is_nothing_to_fit_into() -> None:
    flags = {k: v for k, v in SMALL.items() if k != "gpu"}
    result = estimate(resolve(read_plan(None, flags).plan))
    assert result.fits is None
    assert result.stages[0].device is None
    assert result.stages[0].of(Category.WORKSPACES) == TIED_SUM


def test_workspaces_follow_the_environment() -> None:
    """``:4096:8``: eight times 4096 KiB = 32 MiB (33,554,432 bytes); the default is 8,519,680 on an A100.

    Each once for the main thread's handle and once for autograd's.
    """
    by_default = estimate(plan()).stages[0].of(Category.WORKSPACES)
    larger = estimate(plan(env="CUBLAS_WORKSPACE_CONFIG=:4096:8")).stages[0].of(Category.WORKSPACES)
    assert by_default == TIED_SUM + 2 * 8_519_680
    assert larger == TIED_SUM + 2 * 33_554_432


def test_optimizers_cost_what_they_keep() -> None:
    """bf16 parameters: SGD nothing, Adam 2 x 2 bytes, 8-bit Adam 2 bytes and 8 per 256."""
    sgd, adam = estimate(plan(optimizer="sgd")), estimate(plan(optimizer="adamw"))
    eight = estimate(plan(optimizer="adam8bit", embeddings_32bit="false"))
    p = sgd.stages[0].parameters
    states = Category.OPTIMIZER_STATES
    assert sgd.stages[0].of(states) == 0
    assert adam.stages[0].of(states) == pytest.approx(4 * p, rel=1e-3)
    assert eight.stages[0].of(states) == pytest.approx(2 * p + 8 * p / 256, rel=5e-3)


def test_a_detail_of_a_stage_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match="from 0 to 0"):
        detail(plan(), 1)


def test_detail_tapes_name_every_tensor_with_shape_and_dtype() -> None:
    tapes = detail(plan(), 0)
    assert [tape.module for tape in tapes][:2] == ["embedding", "layer.0"]
    assert tapes[-1].phase == "step"
    for tape in tapes:
        for event in tape.events:
            assert getattr(event, "name", "held") != ""


FAMILIES = st.sampled_from(["gpt2", "llama-3-8b", "qwen3-8b", "bert-large", "mistral-7b"])


@settings(max_examples=40, deadline=None)
@given(
    FAMILIES,
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([16, 33, 128]),
    st.sampled_from(["fp32", "bf16", "fp16"]),
    st.sampled_from(["none", "full"]),
    st.sampled_from(["eager", "flash"]),
    st.integers(1, 3),
    st.sampled_from(["single", "ddp", "device-map"]),
)
def test_any_small_plan_has_readings_in_order_and_categories_that_sum(
    model: str,
    layers: int,
    b: int,
    s: int,
    dtype: str,
    recompute: str,
    attention: str,
    microbatches: int,
    framework: str,
) -> None:
    if attention == "flash" and dtype == "fp32":
        attention = "eager"
    gpus = {"single": 1, "ddp": 2, "device-map": min(2, layers)}[framework]
    replicas = gpus if framework == "ddp" else 1
    flags = {
        "model": model,
        "layers": layers,
        "mbs": b,
        "gbs": b * microbatches * replicas,
        "seq": s,
        "dtype": dtype,
        "recompute": recompute,
        "attention": attention,
        "framework": framework,
        "gpu": "h100-80gb",
        "gpus": gpus,
        "hidden": 64,
        "heads": 4,
        "kv-heads": 4 if model in ("gpt2", "bert-large") else 2,
        "head-dim": 16,
        "ffn": 96,
        "vocab": 1000,
    }
    result = estimate(resolve(read_plan(None, {k: str(v) for k, v in flags.items()}).plan))
    for stage in result.stages:
        assert stage.allocated is not None
        assert stage.reserved is not None
        assert stage.requested <= stage.allocated <= stage.reserved
        assert sum(stage.breakdown) == stage.allocated
        evaluation = stage.moments["evaluation"]
        assert evaluation is not None
        assert evaluation <= stage.allocated


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model", ["gemma-3-4b", "gemma-2-9b", "llama-4-scout", "llama-3-8b"])
def test_what_modules_share_begins_and_ends_once(model: str, recompute: str) -> None:
    """A mask or table of one kind of layers, or a tied gradient that waits, is no other tensor under the same id; the
    first layer of its kind, the sixth of Gemma 3's with all tokens, is the last to end it."""
    (program,) = programs_of(plan(model=model, layers=8, recompute=recompute), Options())
    alive: set[int] = set()
    steps = [module.steady.forward for module in modules_of(program)]
    for event in chain(*steps, *(module.steady.backward for module in reversed(modules_of(program)))):
        if isinstance(event, Hold | Drop) and event.tensor <= SHARED:
            assert (event.tensor in alive) == isinstance(event, Drop), event
            alive ^= {event.tensor}
    assert not alive


def modules_of(program: Program) -> list[Module]:
    return [span.module for span in program.spans for _ in span.names]
