"""Estimates made up for the tests of the report: the right shape, not the right figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memplan.plan.plan import Batch, Hardware, Layout, Optimizer, Pipeline, Plan, Precision, Recompute
from memplan.plan.spec import ModelSpec
from memplan.result import BeyondAllocated, Estimate, Judged, ModuleTape, Notice, Peak, StageEstimate, Verdict
from memplan.tape.events import Bytes, Category, Drop, Hold, Seam

MIB, GIB = 1 << 20, 1 << 30
CAPACITY = 32_510 * MIB

SPEC = ModelSpec(
    name="bigscience-104b-250k",
    family="gpt",
    layers=62,
    hidden=11600,
    heads=80,
    kv_heads=80,
    head_dim=145,
    ffn=46400,
    vocab=250100,
    positions_max=2048,
    norm="layernorm",
    positions="learned",
    activation="gelu",
    embedding_dropout=0.1,
    attention_dropout=0.1,
    hidden_dropout=0.1,
)
PLAN = Plan(
    model=SPEC,
    framework="megatron-deepspeed",
    hardware=Hardware(gpu="v100-32gb", gpus=128, gpus_per_node=4),
    layout=Layout(tp=4, pp=32, dp=1),
    batch=Batch(mbs=1, gbs=2048, seq=2048),
    precision=Precision(dtype="fp16"),
    optimizer=Optimizer(name="adam"),
    recompute=Recompute(mode="full"),
    pipeline=Pipeline(partition="type:embed|transformer"),
)


def by_category(**sizes: int) -> Bytes:
    """Bytes by category from keyword arguments named as in JSON."""
    assert set(sizes) <= {category.key for category in Category}
    return tuple(sizes.get(category.key, 0) for category in Category)


def stage(
    number: int,
    modules: tuple[str, ...],
    parameters: int,
    peak: Peak,
    *,
    activations: int,
    logits: int = 0,
    cache: int = 700 * MIB,
    in_flight: int = 1,
) -> StageEstimate:
    """A stage under fp16 Adam, with ``activations`` and ``logits`` bytes at its peak."""
    breakdown = by_category(
        parameters=2 * parameters,
        main_parameters=4 * parameters,
        gradients=2 * parameters,
        optimizer_states=8 * parameters,
        activations=activations,
        logits=logits,
        temporaries=200 * MIB,
        workspaces=8 * MIB + 519_680,
        block_rounding=11 * MIB,
    )
    allocated = sum(breakdown)
    context = 1271 * MIB
    return StageEstimate(
        stage=number,
        ranks=tuple(range(4 * number, 4 * number + 4)),
        modules=modules,
        parameters=parameters,
        requested=allocated - 11 * MIB,
        allocated=allocated,
        reserved=allocated + cache,
        device=allocated + cache + context + 300 * MIB,
        static=16 * parameters,
        peak=peak,
        breakdown=breakdown,
        beyond=BeyondAllocated(cache, context, 300 * MIB, 0),
        moments={"initialisation": 14 * parameters, "steady": allocated + cache + context, "evaluation": None},
        in_flight=in_flight,
    )


def bigscience() -> Estimate:
    """32 stages: one embedding and a layer, thirty times two layers, a layer and the head."""
    layer, embedding = 404_000_000, 726_000_000
    first = stage(
        0,
        ("embedding", "layer.0"),
        layer + embedding,
        Peak("steady", "backward", "layer.0", "scores", 0),
        activations=1470 * MIB,
        in_flight=32,
    )
    middle = [
        stage(
            number,
            (f"layer.{2 * number - 1}", f"layer.{2 * number}"),
            2 * layer,
            Peak("steady", "backward", f"layer.{2 * number}", "scores", 32 - number),
            activations=(1000 + 45 * (32 - number)) * MIB,
            in_flight=32 - number,
        )
        for number in range(1, 31)
    ]
    last = stage(
        31,
        ("layer.61", "final_norm", "head", "float16_to_fp32"),
        layer + embedding,
        Peak("steady", "forward", "float16_to_fp32", "logits_fp32", 0),
        activations=410 * MIB,
        logits=14_406_087_936,
    )
    estimate = Estimate(
        plan=PLAN,
        capacity=CAPACITY,
        headroom=0,
        stages=(first, *middle, last),
        warnings=(
            Notice(
                "padded-vocabulary",
                "The vocabulary of 250,100 is padded to 250,368, a multiple of 128 x TP, so that it divides.",
            ),
            Notice(
                "tied-head-far",
                "The head shares its weights with the embedding on stage 0: both stages keep them, their gradients "
                "and their optimizer states, and sum the gradients over the link between them.",
            ),
        ),
        assumptions=(
            "Gradients are accumulated in fp16, as DeepSpeed does.",
            "CUDA context of 1271 MiB, as seen on V100.",
            "NCCL takes 300 MiB for its channels.",
            "The optimizer is apex FusedAdam.",
            "No fragmentation over the first iteration.",
        ),
    )
    return judged_by_size(estimate)


def fitting() -> Estimate:
    """The same job with smaller logits: it fits."""
    estimate = bigscience()
    last = stage(
        31,
        ("layer.61", "final_norm", "head", "float16_to_fp32"),
        404_000_000 + 726_000_000,
        Peak("steady", "forward", "float16_to_fp32", "logits_fp32", 0),
        activations=410 * MIB,
        logits=1_538_260_992,
    )
    return judged_by_size(replace(estimate, stages=(*estimate.stages[:-1], last)))


def single() -> Estimate:
    """One GPU, of which nothing beyond the requested bytes is known, and no capacity."""
    peak = Peak("steady", "step", "optimizer", "", None, upper_bound=True)
    only = replace(
        stage(
            0, ("embedding", *(f"layer.{i}" for i in range(48)), "final_norm", "head"), 15_000_000, peak, activations=0
        ),
        allocated=None,
        reserved=None,
        device=None,
        ranks=(0,),
        beyond=BeyondAllocated(None, None, None, None),
    )
    only = replace(only, requested=sum(only.breakdown))
    plan = PLAN.model_copy(update={"framework": "single", "hardware": Hardware(), "layout": Layout()})
    estimate = replace(bigscience(), plan=plan, capacity=None, stages=(only,), warnings=(), assumptions=())
    return judged_by_size(estimate)


def lighter(estimate: Estimate, *, of: Category, by: int) -> Estimate:
    """``estimate`` with ``by`` bytes less of one category on every stage that has them."""

    def spared(before: StageEstimate) -> StageEstimate:
        saved = min(by, before.of(of))
        breakdown = tuple(size - saved * (index == of) for index, size in enumerate(before.breakdown))
        readings: dict[str, Any] = {
            name: None if (size := getattr(before, name)) is None else size - saved
            for name in ("requested", "allocated", "reserved", "device")
        }
        return replace(before, breakdown=breakdown, **readings)

    return judged_by_size(replace(estimate, stages=tuple(map(spared, estimate.stages))))


def judged_by_size(estimate: Estimate) -> Estimate:
    """``estimate`` with the verdict that every stage fits whose fullest moment does, with what lies outside PyTorch."""

    def judged(stage: StageEstimate) -> Judged:
        if estimate.capacity is None:
            return Judged()
        replayed = next((one for one in (stage.reserved, stage.allocated) if one is not None), stage.requested)
        held = max(replayed, *(size or 0 for moment, size in stage.moments.items() if moment != "steady"))
        fits = held + stage.headline - replayed <= estimate.capacity - estimate.headroom
        return Judged(Verdict.FITS if fits else Verdict.DOES_NOT_FIT)

    return replace(estimate, stages=tuple(replace(stage, judged=judged(stage)) for stage in estimate.stages))


def tapes(layers: int = 4) -> tuple[ModuleTape, ...]:
    """Forward and backward of a stage: each layer saves its input and its scores, all with the same ids."""
    hidden, scores = 2048 * 11600 * 2, 20 * 2048 * 2048 * 2
    made: list[ModuleTape] = []
    for index in range(layers):
        forward = (
            Seam(f"layer.{index}/forward"),
            Hold(1, hidden, Category.ACTIVATIONS, "norm_out", (2048, 1, 11600), "fp16"),
            Hold(2, scores, Category.ACTIVATIONS, "scores", (1, 20, 2048, 2048), "fp16"),
            Hold(3, hidden, Category.TEMPORARIES, "context", (2048, 1, 11600), "fp16"),
            Drop(3, hidden, Category.TEMPORARIES),
        )
        made.append(ModuleTape(f"layer.{index}", "forward", forward))
    logits = Hold(9, 4_102_029_312, Category.LOGITS, "logits_fp32", (2048, 8, 62592), "fp32")
    made.append(ModuleTape("head", "forward", (Seam("head/forward"), logits)))
    made.append(ModuleTape("head", "backward", (Seam("head/backward"), Drop(9, logits.bytes, logits.category))))
    for index in reversed(range(layers)):
        backward = (
            Seam(f"layer.{index}/backward"),
            Drop(2, scores, Category.ACTIVATIONS),
            Drop(1, hidden, Category.ACTIVATIONS),
            Hold(4, 404_000_256, Category.GRADIENTS, f"layer.{index}.grad", (404_000_000,), "fp16"),
        )
        made.append(ModuleTape(f"layer.{index}", "backward", backward))
    return tuple(made)
