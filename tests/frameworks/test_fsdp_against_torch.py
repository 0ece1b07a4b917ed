"""``fsdp`` against PyTorch's own ``fully_shard``, event by event, on small models of transformers.

Equal but for what ``tests/layers/test_against_transformers.py`` names, and one tensor of HSDP's mesh,
which is on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from memplan.families import family as family_of
from memplan.frameworks.fsdp import programs as fsdp
from memplan.frameworks.fsdp.units import Sharding
from memplan.layers.module import Module, Options
from memplan.plan.framework_sections import Fsdp
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import ROUND, rounded
from memplan.tape.program import Program, fold_program, static

from ..layers.test_against_transformers import (
    LINEAR,
    MODELS,
    Event,
    config_of,
    drops_sorted,
    named,
    sizes,
    without_grad_loss,
    without_scalars,
    without_sum_of_tied,
)
from ..oracle import fsdp as oracle
from ..oracle.tracer import Change

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # OPT's layers return a view


@dataclass(frozen=True)
class Case:
    """A model under some arguments of ``fully_shard``."""

    model: str
    sharding: oracle.Sharding
    recompute: str = "none"
    attention: str = "flash"
    b: int = 2
    s: int = 64

    def __str__(self) -> str:
        given = self.sharding
        shape = "" if (self.b, self.s) == (2, 64) else f"{self.b}x{self.s}"
        changed = [f"{name}={getattr(given, name)}" for name in given.__dataclass_fields__ if _differs(given, name)]
        return "-".join([self.model, *changed, self.recompute, self.attention, *filter(None, [shape])])


def _differs(given: oracle.Sharding, name: str) -> bool:
    return bool(getattr(given, name) != getattr(oracle.Sharding(), name))


def attention_of(model: str, turn: int) -> str:
    """With the precision of that turn; fp32 has no flash kernel."""
    return "flash" if turn % 3 < 2 and not family_of(MODELS[model][0]).no_flash else "eager"


def recompute_of(model: str, recompute: str) -> str:
    return "none" if family_of(MODELS[model][0]).returns_weights else recompute


TWICE = (True, True)
SHARDINGS = (
    oracle.Sharding(),
    oracle.Sharding(synced=TWICE),
    oracle.Sharding(shards=5, synced=TWICE),
    oracle.Sharding(reshard_after_forward=False, synced=TWICE),
    oracle.Sharding(reshard_after_forward=4),
    oracle.Sharding(reshard_after_forward=1),
    oracle.Sharding(shards=4, root_reshard=True),
    oracle.Sharding(shards=4, replicas=2, synced=TWICE),
    oracle.Sharding(shards=4, replicas=2, reduce_dtype="bf16", synced=TWICE),
    oracle.Sharding(reduce_dtype="bf16", synced=TWICE),
    oracle.Sharding(reduce_dtype=None),
    oracle.Sharding(original="bf16", param_dtype=None, reduce_dtype="fp32", synced=TWICE),
    oracle.Sharding(original="bf16", param_dtype="bf16", reduce_dtype=None, synced=TWICE),
    oracle.Sharding(shards=1, synced=TWICE),
)
OTHERS = (
    Case("llama-tied-dropout", oracle.Sharding(), attention="eager"),
    Case("llama-mha-biased", oracle.Sharding(shards=3), recompute="full"),
    Case("qwen3", oracle.Sharding(synced=TWICE), recompute="full"),
    Case("mistral", oracle.Sharding(reshard_after_forward=2), attention="eager"),
    Case("gpt2-untied", oracle.Sharding(shards=7)),
    Case("gpt2", oracle.Sharding(synced=TWICE), recompute="full", attention="eager"),
    Case("qwen2-tied-dropout", oracle.Sharding(), recompute="full"),
    Case("phi3-partial-dropout", oracle.Sharding(shards=3)),
    Case("gemma", oracle.Sharding(shards=3, synced=TWICE)),
    Case("gemma-one-key", oracle.Sharding(shards=5, original="bf16"), recompute="full", attention="eager"),
    Case("gemma2", oracle.Sharding(synced=TWICE), attention="eager"),
    Case("opt", oracle.Sharding(shards=5), attention="eager"),
    Case("gpt_neox-dropout", oracle.Sharding(root_reshard=True), attention="eager"),
    Case("gptj", oracle.Sharding(shards=3, original="bf16"), attention="eager"),
    Case("falcon", oracle.Sharding(reduce_dtype="bf16"), attention="eager"),
    Case("mixtral", oracle.Sharding(shards=6, original="bf16", synced=TWICE)),
    Case("qwen3_moe-unnormed-tied-dense", oracle.Sharding(shards=3), recompute="full"),
    Case("qwen2_moe", oracle.Sharding(shards=3, synced=TWICE)),
    Case("qwen2_moe-one-key", oracle.Sharding(shards=6, original="bf16"), recompute="full", attention="eager"),
    Case("gpt_oss", oracle.Sharding(shards=3), recompute="full", attention="eager"),
    Case("olmoe", oracle.Sharding()),
    Case("gpt_bigcode", oracle.Sharding(shards=3)),
    Case("granite", oracle.Sharding(shards=3)),
    Case("granitemoe", oracle.Sharding(shards=3), attention="eager"),
    Case("granitemoehybrid", oracle.Sharding(shards=3, synced=TWICE), recompute="full"),
    Case("deepseek_v2-lite", oracle.Sharding(shards=3, original="bf16", synced=TWICE)),
    Case("glm", oracle.Sharding(shards=3, synced=TWICE)),
    Case("glm-one-key", oracle.Sharding(shards=5, original="bf16"), recompute="full", attention="eager"),
    Case("glm4", oracle.Sharding(shards=3, synced=TWICE), recompute="full"),
    Case("glm4-whole-unbiased-tied-dropout", oracle.Sharding(shards=5), attention="eager"),
    Case("glm4_moe", oracle.Sharding(shards=6, original="bf16", synced=TWICE)),
    Case("ernie4_5", oracle.Sharding(shards=3, synced=TWICE)),
    Case("ernie4_5-one-key", oracle.Sharding(shards=6, original="bf16"), recompute="full", attention="eager"),
    Case("dots1", oracle.Sharding(shards=3, synced=TWICE)),
    Case("dots1-one-key", oracle.Sharding(shards=6, original="bf16"), recompute="full", attention="eager"),
    Case("deepseek_v3", oracle.Sharding(shards=6), recompute="full"),
    Case("glm4_moe_lite", oracle.Sharding(shards=6)),
    Case("deepseek_v32", oracle.Sharding(shards=6, original="bf16", synced=TWICE)),
    Case("minimax_m2", oracle.Sharding(shards=3)),
    Case("ministral3", oracle.Sharding(shards=3, original="bf16")),
    Case("exaone4", oracle.Sharding(shards=6)),
    Case("olmo2", oracle.Sharding(shards=3, synced=TWICE)),
    Case("olmo2", oracle.Sharding(shards=6), recompute="full", attention="eager"),
    Case("smollm3", oracle.Sharding(shards=3, synced=TWICE), recompute="full"),
    Case("seed_oss", oracle.Sharding(shards=5, original="bf16", synced=TWICE)),
    Case("cohere", oracle.Sharding(shards=3, synced=TWICE)),
    Case("cohere-normed", oracle.Sharding(shards=5, original="bf16"), recompute="full"),
    Case("cohere2", oracle.Sharding(shards=3, synced=TWICE)),
    Case("cohere2", oracle.Sharding(shards=6), recompute="full", attention="eager"),
    Case("olmo3", oracle.Sharding(shards=3, synced=TWICE)),
    Case("olmo3", oracle.Sharding(shards=6), recompute="full", attention="eager"),
    Case("starcoder2", oracle.Sharding(shards=3, synced=TWICE)),
    Case("starcoder2-dropout-untied-unbiased", oracle.Sharding(shards=5, original="bf16"), recompute="full"),
    Case("gemma3_text", oracle.Sharding(shards=3, synced=TWICE)),
    Case("qwen3_5", oracle.Sharding(shards=3, synced=TWICE)),
    Case("qwen3_5-mha-biased-tied", oracle.Sharding(shards=5, original="bf16"), recompute="full"),
    Case("qwen3_5_moe", oracle.Sharding(shards=3)),
    Case("qwen3_next", oracle.Sharding(shards=6), recompute="full"),
    Case("llama4_text", oracle.Sharding(shards=3, synced=TWICE), recompute="full"),
    Case("llama4_text-dense-unnormed-dropout", oracle.Sharding(shards=5, original="bf16"), attention="eager"),
    Case("llama4_text-biased", oracle.Sharding(shards=6), recompute="full", attention="eager"),
    Case("mistral-masked", oracle.Sharding(shards=3, synced=TWICE), b=3, s=37),
    Case("gemma3_text-masked", oracle.Sharding(shards=3), recompute="full"),
    Case("gemma4_text", oracle.Sharding(shards=3, synced=TWICE)),
    Case("gemma4_text-keys-as-values", oracle.Sharding(shards=3, synced=TWICE), recompute="full"),
    Case("gemma4_text-keys-as-values", oracle.Sharding(shards=5, original="bf16"), attention="eager"),
    Case("gemma4_text-masked-keys-as-values", oracle.Sharding(shards=3)),
    Case("gemma4_unified_text", oracle.Sharding(shards=3, synced=TWICE)),
    Case("gemma4_text-experts", oracle.Sharding(shards=3, synced=TWICE)),
    Case("gemma4_text-experts-untied", oracle.Sharding(shards=5, original="bf16"), recompute="full"),
)
APART = oracle.Sharding(ends_apart=True)
ENDS_APART = (
    Case("llama", replace(APART, shards=5, synced=TWICE)),
    Case("llama", replace(APART, reshard_after_forward=False, synced=TWICE), recompute="full"),
    Case("llama", replace(APART, reshard_after_forward=4)),
    Case("llama", replace(APART, shards=4, replicas=2, reduce_dtype="bf16", synced=TWICE)),
    Case("llama-tied-dropout", replace(APART, shards=3, synced=TWICE), attention="eager"),
    Case("qwen3-tied", replace(APART, original="bf16", param_dtype=None, reduce_dtype=None), recompute="full"),
    Case("gpt2", replace(APART, synced=TWICE), recompute="full", attention="eager"),
    Case("gpt2-untied", replace(APART, shards=7)),
    Case("gemma", replace(APART, synced=TWICE)),
    Case("gemma2", replace(APART, synced=TWICE), attention="eager"),
    Case("opt", replace(APART, shards=5), attention="eager"),
    Case("opt-dropout", replace(APART, shards=3), attention="eager"),
    Case("gpt_neox", replace(APART, shards=3), recompute="full"),
    Case("gptj-dropout-tied", replace(APART, shards=3, original="bf16"), attention="eager"),
    Case("falcon", replace(APART, reduce_dtype="bf16"), attention="eager"),
    Case("mixtral", replace(APART, shards=6, original="bf16", synced=TWICE)),
    Case("llama4_text", replace(APART, shards=3, synced=TWICE), recompute="full"),
    Case("llama4_text-dense-unnormed-dropout", replace(APART, shards=5, original="bf16"), attention="eager"),
    Case("gemma4_text-keys-as-values", replace(APART, synced=TWICE)),
)
"""Embedding and head are units of their own."""
FAMILIES = tuple(name for name, (family, _) in MODELS.items() if name == family and family != "bert")
PRECISIONS = (
    oracle.Sharding(),
    oracle.Sharding(original="bf16", reduce_dtype=None),
    oracle.Sharding(shards=3, param_dtype=None, reduce_dtype=None),
)
"""Mixed, 16 bits, and fp32, which has no flash kernel."""
OTHER_SHAPES = (((1, 64), "full"), ((3, 37), "none"))
IN_OTHER_SHAPES = [
    Case(model, PRECISIONS[(at + turn) % 3], recompute_of(model, recompute), attention_of(model, at + turn), *shape)
    for at, model in enumerate(FAMILIES)
    for turn, (shape, recompute) in enumerate(OTHER_SHAPES)
]
IN_OTHER_SHAPES += [
    Case("llama", PRECISIONS[0], "none", "flash", 1, 64),
    Case("llama", PRECISIONS[2], "full", "eager", 3, 37),
]
CASES = [*(Case("llama", sharding) for sharding in SHARDINGS), *OTHERS, *ENDS_APART, *IN_OTHER_SHAPES]
IN_TURN = {case for at, case in enumerate(IN_OTHER_SHAPES) if at // 2 % 2 == at % 2}
"""Of each family in one other shape; its second one is slow."""


UNSYNCED = tuple(
    Case(model, replace(given, synced=synced))
    for model, given in (
        ("llama", oracle.Sharding()),
        ("llama", oracle.Sharding(reduce_dtype="bf16")),
        ("llama", oracle.Sharding(shards=4, replicas=2, reshard_after_forward=False)),
        ("qwen3", oracle.Sharding(original="bf16", param_dtype=None, reduce_dtype="fp32")),
        ("gpt2-untied", oracle.Sharding(original="bf16", param_dtype=None, reduce_dtype=None)),
        ("llama", APART),
        ("gpt2", replace(APART, reduce_dtype="bf16")),
    )
    for synced in ((False, True), (False, False, True))
)
"""Gradients are reduced in the last micro-batch only."""


@dataclass(frozen=True)
class Compared:
    """An iteration as the plan tells it and as it was traced."""

    case: Case
    program: Program
    steps: oracle.Steps

    @property
    def named(self) -> int:
        """Bytes that the plan holds and the trace does not: labels; less HSDP's mesh."""
        return rounded(8 * self.case.b * self.case.s) - (ROUND if self.case.sharding.replicas > 1 else 0)

    def modules(self, role: str) -> list[Module]:
        spans = self.program.last if role == "last" else self.program.spans
        return [span.module for span in spans for _ in span.names]

    def forward(self) -> list[Event]:
        return [event for module in self.modules("first") for event in named(module, module.steady.forward)]

    def backward(self, role: str) -> list[Event]:
        modules = self.modules(role)[::-1]
        tapes = [(module, (module.steady if role == "steady" else module.first).backward) for module in modules]
        return [event for module, tape in tapes for event in named(module, tape)]

    def traced(self, microbatch: int) -> tuple[list[Change], list[Change]]:
        forward, backward = self.steps.stretches[2 * microbatch : 2 * microbatch + 2]
        if microbatch:
            forward = forward[1:]  # the loss of the micro-batch before
        backward = without_grad_loss(backward)
        shapes = {one.name: one.shape for one in self.program.parameter_tensors()}
        return forward, backward if "head.weight" in shapes else without_sum_of_tied(backward, shapes["word.weight"])


def planned(case: Case, folder: Path) -> tuple[Plan, Sharding]:
    given = case.sharding
    compute = given.param_dtype or given.original
    flags = {"model": str(folder), "framework": "single", "dtype": compute, "mbs": str(case.b), "seq": str(case.s)}
    flags |= {"attention": case.attention, "recompute": case.recompute, "optimizer": "adamw"}
    flags |= {"delta-kernel": "fla"} if case.model in LINEAR else {}
    plan = resolve(read_plan(None, flags).plan)
    gbs = case.b * given.shards * given.replicas * len(given.synced)
    layout = plan.layout.model_copy(update={"dp": given.shards * given.replicas})
    batch, fsdp = plan.batch.model_copy(update={"gbs": gbs}), Fsdp.model_validate({"parameters": given.original})
    plan = plan.model_copy(update={"layout": layout, "batch": batch, "fsdp": fsdp})
    return plan, Sharding(given.shards, given.replicas, given.original, compute, given.reduce_dtype or compute)


def compared(case: Case, folder: Path) -> Compared:
    config = config_of(case.model)
    config.to_json_file(folder / "config.json", use_diff=False)
    plan, sharding = planned(case, folder)
    given = case.sharding
    options, reshard_root = Options(accumulates_in_place=False), bool(given.root_reshard)
    apart, reshard = given.ends_apart, given.reshard_after_forward
    model = fsdp.transformers_model(plan, options, reshard=reshard, reshard_root=reshard_root, ends_apart=apart)
    program = fsdp.unsynced_program(plan, model, sharding)
    if all(given.synced):
        program = fsdp.program(plan, model, sharding)
    flash, recompute = case.attention == "flash", case.recompute == "full"
    steps = oracle.traced_steps(config, case.b, case.s, given, flash=flash, recompute=recompute)
    return Compared(case, program, steps)


def _marked(case: Case) -> Any:
    is_slow = case in IN_OTHER_SHAPES and case not in IN_TURN
    return pytest.param(case, id=str(case), marks=[pytest.mark.slow] if is_slow else [])


@pytest.fixture(params=map(_marked, CASES), scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    return compared(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(params=UNSYNCED, ids=str, scope="module")
def unsynced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    return compared(request.param, tmp_path_factory.mktemp("model"))


def test_every_event(case: Compared) -> None:
    _every_event(case, ("first", "steady")[: len(case.case.sharding.synced)])


def test_every_event_unsynced(unsynced: Compared) -> None:
    _every_event(unsynced, ("first", *["steady"] * (len(unsynced.case.sharding.synced) - 2), "last"))


def _every_event(case: Compared, roles: Sequence[str]) -> None:
    for microbatch, role in enumerate(roles):
        forward, backward = case.traced(microbatch)
        assert drops_sorted(sizes(case.forward())) == drops_sorted(sizes(forward))
        assert drops_sorted(sizes(without_scalars(case.backward(role)))) == drops_sorted(sizes(backward))


def test_readings(case: Compared) -> None:
    """Between iterations, after forward, at the peak of both passes and of the step."""
    folded, steps = fold_program(case.program), case.steps
    assert folded.static == steps.before + case.named
    assert folded.after_forward == steps.levels()[0] + case.named
    assert steps.end == steps.before

    highest = max(steps.peaks()[:-1])
    scalars = 2 * ROUND  # the loss and its gradient end later in the trace
    assert 0 <= highest + case.named - folded.backward_peak <= scalars
    assert folded.step_peak == steps.peaks()[-1] + case.named


def test_peak_unsynced(unsynced: Compared) -> None:
    program, steps = unsynced.program, unsynced.steps
    folded = static(program).then(program.order.whole)
    highest = max(steps.peaks()[:-1])
    assert 0 <= highest + unsynced.named - folded.peak <= 2 * ROUND
    assert folded.net == steps.levels()[-2] + unsynced.named - ROUND  # the loss ends later in the trace
