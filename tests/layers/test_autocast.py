"""Autocast against PyTorch's own: every event of a training step of real transformers models, and the lists it follows.

Differences that have a name are those of ``test_against_transformers``; besides, the copies that autocast's cache alone
holds end in the order of a hash table.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from memplan.estimate import detail, estimate, fold
from memplan.families import family as family_of
from memplan.frameworks.plain import programs as plain, trainer as plain_step
from memplan.layers.autocast import POLICIES, Policy
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Category, Hold, rounded
from memplan.tape.program import fold_program

from ..oracle.autocast import cuda_lists, policies
from ..oracle.tracer import Follow, Trace
from ..oracle.training_step import traced_step
from .test_against_transformers import (
    MODELS,
    Case,
    Compared,
    Event,
    config_of,
    drops_sorted,
    named,
    peak,
    sizes,
    traced_backward,
    without_scalars,
    word_shape,
)

SHAPES = ((1, 64), (2, 128), (3, 37))
SETTINGS = tuple(
    (dtype, attention, recompute)
    for recompute in ("none", "full")
    for attention in ("eager", "flash")
    for dtype in ("bf16", "fp16")
)


def settings_of(model: str) -> list[tuple[str, str, str]]:
    family = MODELS[model][0]
    return [
        setting
        for setting in SETTINGS
        if setting[1] == "eager" or not family_of(family).no_flash
        if setting[2] == "none" or not family_of(family).returns_weights
    ]


def shape_of(at: int, setting: tuple[str, str, str]) -> list[tuple[int, int]]:
    """Every shape in bf16, with the two kinds of attention in turn; of the first families one in fp16."""
    dtype, attention, recompute = setting
    turn = at + (recompute == "full")
    if dtype == "fp16" and at > 2:
        return []
    if dtype == "fp16":
        return [SHAPES[turn % 3]] if (attention == "flash") == bool(turn % 2) else []
    eager = [shape for number, shape in enumerate(SHAPES) if (number + turn) % 3]
    return eager if attention == "eager" else [shape for shape in SHAPES if shape not in eager]


CASES = [
    Case(model, *shape, *setting)
    for at, model in enumerate(name for name, (family, _) in MODELS.items() if name == family)
    for setting in settings_of(model)
    for shape in (SHAPES if family_of(MODELS[model][0]).no_flash and setting[0] == "bf16" else shape_of(at, setting))
] + [
    Case(model, *SHAPES[at % 3], *settings_of(model)[3 * at % len(settings_of(model))])
    for at, model in enumerate(MODELS)
    if model != MODELS[model][0]
]
"""Every family in every shape, with and without recompute; and its other models in one setting."""
CLASSIFIERS = [
    Case("llama", 2, 64, "bf16", "flash", "none", labels=3),
    Case("llama", 3, 37, "bf16", "eager", "full", labels=1),
    Case("bert", 2, 64, "bf16", "flash", "none", labels=3),
    Case("bert", 3, 37, "bf16", "eager", "full", labels=1),
]
OWN = [
    Case("qwen3_5", 2, 128, "bf16", "flash", "none", eager=True),
    Case("qwen3_5-mha-biased-tied", 1, 64, "bf16", "flash", "full", eager=True),
    Case("qwen3_next", 3, 37, "bf16", "flash", "full", eager=True),
    Case("qwen3_next-one-key", 1, 100, "bf16", "eager", "none", eager=True),
]
CASES = [case for case in CASES if not family_of(MODELS[case.model][0]).no_autocast]
CASES += [*CLASSIFIERS, *OWN, Case("gemma3_text-masked", 3, 37, "bf16", "flash", "none")]
CASES += [Case("gemma4_text-masked-keys-as-values", 3, 37, "bf16", "flash", "none")]
ONE_OF_EACH = {name for name, (family, _) in MODELS.items() if name == family}
EACH_TIME = {
    case
    for at, case in enumerate(CASES)
    if case.model in ("gpt2", "llama")
    or case in CLASSIFIERS
    or case in OWN[::3]
    or case.model not in ONE_OF_EACH
    or at % 2 == (case.recompute == "full")
}
"""The rest is slow: every second shape of most families."""


def compared(case: Case, folder: Path, accumulates: bool = False, parameters: str = "fp32") -> Compared:
    """``case`` planned from its ``config.json`` with autocast in its dtype, and traced."""
    config = config_of(case.model)
    config.to_json_file(folder / "config.json", use_diff=False)
    flags = {
        "model": str(folder),
        "autocast": "true",
        "autocast-parameters": parameters,
        "dtype": case.dtype,
        "mbs": str(case.b),
        "seq": str(case.s),
        "attention": case.attention,
        "recompute": case.recompute,
        "labels": str(case.labels),
        **case.flags,
    }
    plan = resolve(read_plan(None, flags).plan)
    (program,) = plain.programs(plan, Options(accumulates_in_place=False))
    flash, full = case.attention == "flash", case.recompute == "full"
    step = traced_step(
        config,
        case.b,
        case.s,
        parameters,
        flash=flash,
        recompute=full,
        accumulates=accumulates,
        autocast=case.dtype,
        labels=case.labels,
        delta_kernels=not case.eager,
    )
    beside = 2 if case.labels and plan.model.token_types else 1
    return Compared(program, step, beside * rounded(8 * case.b * case.s))


def unscaled(events: list[Event]) -> list[Event]:
    """Without what belongs to ``GradScaler``, which the trace has none of."""
    return [event for event in events if event.name not in ("loss_scaled", "grad_loss_scaled")]


def forward_of(case: Compared) -> list[Event]:
    """Forward, and the end of autocast."""
    modules = [span.module for span in case.program.spans for _ in span.names]
    ended = [event for module in modules for event in named(module, module.steady.end)]
    return unscaled([*case.events(False), *ended])


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in EACH_TIME else [pytest.mark.slow]) for case in CASES], ids=str
)
def test_step_of_real_model(case: Case, tmp_path: Path) -> None:
    """Parameters, what is held and when, and every event of forward and backward."""
    found = compared(case, tmp_path)
    program, step = found.program, found.step
    folded = fold_program(program)
    scaler = sum(hold.bytes for hold in plain_step.SCALER) if case.dtype == "fp16" else 0
    scaled = rounded(4) if case.dtype == "fp16" else 0
    assert program.parameters() == step.parameters
    assert folded.static == step.before + found.ids + scaler
    assert folded.after_forward == step.before + found.ids + sum(sizes(step.forward)) + scaler + scaled

    forward, backward = forward_of(found), unscaled(without_scalars(found.events(True)))
    traced = traced_backward(found, word_shape(program))
    pooled = (
        case.labels and case.model == "bert"
    )  # whose model returns, and lets go of the embedding, behind its pooler
    in_order = sorted if pooled else drops_sorted
    assert in_order(sizes(forward)) == in_order(sizes(step.forward))
    assert drops_sorted(sizes(backward)) == drops_sorted(sizes(traced))
    both = sizes(forward + backward)
    assert peak(step.before, both) == peak(step.before, sizes(step.forward + traced))


@pytest.mark.parametrize(
    "case",
    [
        Case("gpt2", 2, 64, "bf16", "flash", "none"),
        Case("llama", 3, 37, "bf16", "eager", "full"),
        Case("bert", 2, 64, "bf16", "eager", "none"),
        Case("falcon", 2, 64, "bf16", "eager", "none"),
        Case("gemma", 2, 64, "bf16", "flash", "none"),
        Case("gemma2", 1, 64, "bf16", "eager", "full"),
        Case("gemma4_text-keys-as-values", 2, 64, "bf16", "flash", "none"),
    ],
    ids=str,
)
def test_step_over_bf16_parameters(case: Case, tmp_path: Path) -> None:
    """A model that was loaded in bf16: norms alone are fp32, and their outputs are cast back."""
    found = compared(case, tmp_path, parameters="bf16")
    traced = traced_backward(found, word_shape(found.program))
    backward = without_scalars(found.events(True))
    assert fold_program(found.program).static == found.step.before + found.ids
    assert drops_sorted(sizes(forward_of(found))) == drops_sorted(sizes(found.step.forward))
    assert drops_sorted(sizes(backward)) == drops_sorted(sizes(traced))


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_later_microbatch_of_real_model(model: str, tmp_path: Path) -> None:
    """Backward where gradients are there already: weights are cast anew, every cast gradient is added and dropped."""
    found = compared(Case(model, 2, 64, "bf16", "eager", "none"), tmp_path, accumulates=True)
    modules = [span.module for span in reversed(found.program.spans) for _ in span.names]
    backward = without_scalars(event for module in modules for event in named(module, module.steady.backward))
    assert sorted(sizes(backward)) == sorted(sizes(traced_backward(found, word_shape(found.program))))


# -- rules ------------------------------------------------------------------------------------------


def test_policies_are_those_of_pytorch() -> None:
    """Every operator with a policy is in the list of ``ATen/autocast_mode.h`` that stands for it."""
    lists = {Policy.LOWER: "lower", Policy.FP32: "fp32", Policy.FP32_OUTPUT: "fp32-output"}
    for operator, policy in POLICIES.items():
        names = {re.sub(r"\..*", "", name) for name in policies()[lists[policy]]}
        assert operator in names
    known = {re.sub(r"\..*", "", name) for names in policies().values() for name in names}
    assert not known & {"embedding", "add", "mul", "gelu", "silu", "tanh", "relu", "cat", "native_dropout", "mean"}


def test_lists_of_the_oracle_end_with_it() -> None:
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        with cuda_lists():
            assert torch.softmax(x, -1).dtype == torch.float32
        assert torch.softmax(x, -1).dtype == torch.bfloat16


SMALL = {"model": "gpt2", "layers": "3", "seq": "128", "attention": "eager", "autocast": "true"}


def plan(**flags: object) -> Plan:
    merged = {**SMALL, **{k.replace("_", "-"): str(v) for k, v in flags.items()}}
    return resolve(read_plan(None, merged).plan)


def test_states_are_fp32() -> None:
    """Parameters, gradients and moments: 4, 4 and 8 bytes a parameter."""
    stage = estimate(plan()).stages[0]
    assert stage.of(Category.PARAMETERS) == pytest.approx(4 * stage.parameters, rel=1e-3)
    assert stage.of(Category.OPTIMIZER_STATES) == pytest.approx(8 * stage.parameters, rel=1e-3)


def test_recompute_keeps_copies_of_weights_until_the_model_returns() -> None:
    """A layer's end drops 2 bytes for every parameter of its products, which recompute would not have kept."""
    (program,) = plain.programs(plan(recompute="full"), Options())
    layer = next(span.module for span in program.spans if span.module.name == "layer")
    products = sum(p.elements for p in layer.parameters if "norm" not in p.name)
    assert -layer.first.end_fold.net == pytest.approx(2 * products, rel=1e-3)
    ended = [tape for tape in detail(plan(recompute="full"), 0) if tape.module == "layer.0" and tape.phase == "forward"]
    assert len(ended) == 2


def test_evaluation_keeps_copies_of_all_weights() -> None:
    """Without a graph nothing else keeps them, and the cache does: 2 bytes a parameter beside fp32 ones."""
    (program,) = plain.programs(plan(), Options())
    layer = next(span.module for span in program.spans if span.module.name == "layer")
    products = sum(p.elements for p in layer.parameters if "norm" not in p.name)
    assert layer.evaluation_fold.net == pytest.approx(2 * products, rel=1e-2)


@pytest.mark.parametrize("framework", ["single", "ddp", "device-map"])
def test_replay_ends_what_the_fold_ends(framework: str) -> None:
    """Requested bytes never exceed allocated ones, and an iteration leaves nothing behind."""
    gpus = 1 if framework == "single" else 2
    chosen = plan(framework=framework, gpus=gpus, recompute="full", gpu="h100-80gb", mbs=2, gbs=8)
    for stage, folded in zip(estimate(chosen).stages, fold(chosen), strict=True):
        assert stage.requested == folded.peak
        assert stage.allocated is not None
        assert folded.peak <= stage.allocated


def test_buckets_of_ddp_are_fp32() -> None:
    stage = estimate(plan(framework="ddp", gpus=2)).stages[0]
    assert stage.of(Category.COMMUNICATION_BUFFERS) == pytest.approx(4 * stage.parameters, rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"dtype": "fp32"}, "precision.autocast"),
        ({"framework": "fsdp", "gpus": 2}, "FSDP1 takes it"),
        ({"framework": "deepspeed", "gpus": 2}, "have it"),
        ({"loss": "chunked"}, "which is not modelled under autocast"),
        ({"loss": "cut"}, "--autocast-parameters bf16 is"),
        ({"loss": "liger"}, "--autocast-parameters bf16 is"),
        ({"logits_to_keep": 4}, "logits_to_keep is not modelled"),
        ({"gradients": "bf16"}, "precision.gradients"),
        ({"dtype": "fp16", "autocast_parameters": "fp16"}, "GradScaler"),
        ({"autocast": "false", "autocast_parameters": "fp32"}, "needs precision.autocast"),
    ],
)
def test_what_is_not_modelled_is_refused(flags: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        estimate(plan(**flags))


# -- fp16 -------------------------------------------------------------------------------------------


def test_scaler_of_fp16() -> None:
    """``GradScaler`` keeps two numbers, and has one more while the optimizer steps."""
    trace = Trace()
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([weight], lr=0.1, foreach=False)
    scaler = torch.amp.GradScaler("cpu")
    alive: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: alive.append(trace.live))
    with Follow(trace):
        loss = (weight * 2).sum()
        before = trace.live
        scaled = scaler.scale(loss)
        kept = sum(hold.bytes for hold in plain_step.SCALER)
        assert trace.live - before == kept + rounded(4)  # and the scaled loss
        scaled.backward()
        start = trace.live
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        del loss, scaled
    assert alive == [start + plain_step.FOUND_INF.bytes]
    step = plain.programs(plan(dtype="fp16"), Options())[0].step
    assert isinstance(step[0], Hold)
    assert step[0].name == "found_inf"
