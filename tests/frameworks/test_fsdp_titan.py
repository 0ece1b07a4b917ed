"""torchtitan's Qwen 3 and DeepSeek V3 under ``fully_shard``, against the same operators run on fake tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest

from memplan.estimate import programs_of
from memplan.frameworks.fsdp import programs as fsdp
from memplan.frameworks.fsdp.communicators import communicators
from memplan.frameworks.fsdp.notices import warnings
from memplan.frameworks.fsdp.titan import newest
from memplan.frameworks.fsdp.titan_experts import cut_of_experts
from memplan.frameworks.fsdp.torchtitan import ActivationCheckpointing, torchtitan_model
from memplan.frameworks.fsdp.units import Sharding
from memplan.layers.autograd import Recorder, Tensor
from memplan.layers.module import Interface, Options, Run, build
from memplan.layers.titan_models import cudnn_attention
from memplan.plan.errors import PlanError
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import ROUND, Category, Hold
from memplan.tape.program import fold_program

from ..layers.test_against_transformers import (
    drops_sorted,
    named,
    sizes,
    without_grad_loss,
    without_scalars,
    without_sum_of_tied,
)
from ..oracle import fsdp as oracle, titan_experts, titan_tp
from ..oracle.titan_models import Sizes, builder

QWEN_3 = Sizes(hidden=192, heads=6, kv_heads=2, head_dim=64, ffn=448, vocab=1003, layers=3, b=2, s=64)
MULTI_HEAD = Sizes(hidden=128, heads=4, kv_heads=4, head_dim=32, ffn=320, vocab=515, layers=2, b=3, s=40)
TIED = replace(QWEN_3, layers=2, tied=True)
QWEN_3_MOE = replace(QWEN_3, experts=24, top_k=4, expert_ffn=96)
MANY = replace(MULTI_HEAD, experts=160, top_k=6, expert_ffn=64, score_first=True, dense=1)
LATENT = Sizes(
    hidden=256, heads=4, ffn=640, vocab=1003, layers=3, b=2, s=64, kv_rank=96, plain=48, turned=32, width=40,
    experts=16, top_k=3, expert_ffn=128, shared=256, dense=1, normed=False,
)  # fmt: skip
V3 = replace(LATENT, q_rank=64, experts=96, top_k=8, groups=8, group_top_k=4, score="sigmoid", normed=True, b=1)
MIXED = replace(QWEN_3_MOE, experts=96)


def in_parts(given: Sizes) -> Sizes:
    """Two layers, and a vocabulary that tensor parallelism divides."""
    return replace(given, vocab=1008, layers=2)


@dataclass(frozen=True)
class Case:
    recompute: str
    sizes: Sizes
    shards: int = 8
    ranks: int = 1
    """That share experts."""
    chunks: int = 0
    """Of the loss, if it has some."""
    tp: int = 1
    etp: int = 1
    parallel_loss: bool = True
    """With tensor parallelism: logits stay in parts."""


CASES = {
    "qwen3": Case("none", QWEN_3),
    "qwen3-op": Case("op", QWEN_3),
    "qwen3-full": Case("full", MULTI_HEAD, 3),
    "qwen3-tied": Case("none", TIED, 4),
    "qwen3-tied-chunked": Case("op", TIED, 4, chunks=4),
    "qwen3-moe": Case("none", QWEN_3_MOE),
    "qwen3-moe-op": Case("op", QWEN_3_MOE),
    "qwen3-moe-full": Case("full", QWEN_3_MOE, 2),
    "score-first": Case("none", MANY, 3),
    "score-first-full": Case("full", MANY, 3),
    "deepseek-v2": Case("none", LATENT),
    "deepseek-v2-op": Case("op", LATENT),
    "deepseek-v3": Case("none", V3, 4),
    "deepseek-v3-op": Case("op", V3, 4),
    "deepseek-v3-full": Case("full", V3, 4),
    "experts-shared": Case("none", MIXED, 8, 4),
    "experts-shared-full": Case("full", MIXED, 8, 4),
    "experts-shared-op": Case("op", MIXED, 8, 4),
    "experts-shared-latent-op": Case("op", replace(LATENT, experts=96), 8, 4),
    "experts-shared-v3-full": Case("full", V3, 8, 4),
    "experts-whole": Case("none", MIXED, 4, 4),
    "experts-along-the-second": Case("none", replace(QWEN_3_MOE, experts=48, top_k=2, b=1, layers=2), 96, 2),
    "tp-qwen3": Case("none", in_parts(QWEN_3), 4, tp=2),
    "tp-qwen3-op": Case("op", in_parts(QWEN_3), 4, tp=2, parallel_loss=False),
    "tp-qwen3-full": Case("full", replace(MULTI_HEAD, vocab=1008, b=1), 2, tp=4),
    "tp-experts": Case("none", in_parts(MIXED), 4, tp=2),
    "tp-experts-shared": Case("none", in_parts(MIXED), 4, 4, tp=2),
    "tp-experts-shared-full": Case("full", in_parts(MIXED), 1, 2, tp=2),
    "tp-experts-in-parts": Case("op", in_parts(MIXED), 4, 4, tp=2, etp=2),
    "tp-experts-along-the-second": Case("none", replace(QWEN_3_MOE, experts=48, vocab=1008, layers=2), 32, 2, tp=2),
    "tp-score-first": Case("none", replace(MANY, vocab=1008, b=2), 4, 4, tp=2),
    "tp-deepseek-v2": Case("none", replace(LATENT, experts=96, vocab=1008), 4, 2, tp=2),
    "tp-deepseek-v3": Case("none", replace(V3, vocab=1008), 4, 4, tp=4),
    "tp-deepseek-v3-op": Case("op", in_parts(V3), 4, 4, tp=2),
    "tp-deepseek-v3-full": Case("full", in_parts(V3), 2, tp=2, parallel_loss=False),
    "tp-chunked": Case("none", in_parts(MIXED), 4, 4, tp=2, chunks=4),
    "tp-deepseek-v3-in-parts": Case("op", in_parts(V3), 2, 2, tp=2, etp=2),
}


def plan_of(given: Sizes, **flags: str) -> ResolvedPlan:
    """A plan for ``given``, as a cut of a model of its family."""
    model = ("deepseek-v3" if given.score == "sigmoid" else "deepseek-v2-lite") if given.latent else "qwen3-30b-a3b"
    model = model if given.experts or given.latent else "qwen3-8b"
    base = {"model": model, "framework": "single", "dtype": "bf16", "mbs": str(given.b), "seq": str(given.s)}
    base |= {"layers": str(given.layers), "attention": "flash", "optimizer": "adamw", "gpu": "h100-80gb"}
    plan = resolve(read_plan(None, {**base, **flags}).plan)
    changed: dict[str, object] = {"hidden": given.hidden, "heads": given.heads, "ffn": given.ffn, "vocab": given.vocab}
    changed |= {"kv_heads": given.kv_heads or given.heads, "head_dim": given.head_dim or given.plain + given.turned}
    if given.latent:
        changed |= {"latent_q_rank": given.q_rank, "latent_kv_rank": given.kv_rank, "nope_head_dim": given.plain}
        changed |= {"rope_head_dim": given.turned, "value_head_dim": given.width}
    changed |= {"tied_embeddings": given.tied}
    changed |= {"experts": given.experts, "expert_top_k": given.top_k, "expert_ffn": given.expert_ffn}
    changed |= {"shared_expert_ffn": given.shared, "dense_layers": tuple(range(given.dense))}
    changed |= {"router_groups": given.groups, "router_group_top_k": given.group_top_k}
    changed |= {"router_score_first": not given.normed, "router_weighs_inputs": given.score_first}
    fsdp = plan.fsdp.model_copy(update={"ends_apart": True})
    return plan.model_copy(update={"fsdp": fsdp, "model": plan.model.model_copy(update=changed)})


PARALLEL = [name for name in CASES if name.startswith("tp-")]
SLOW = {"qwen3-tied", *PARALLEL} - {"tp-qwen3", "tp-deepseek-v3"}


@pytest.fixture(
    params=[pytest.param(case, marks=[pytest.mark.slow] * (name in SLOW)) for name, case in CASES.items()],
    ids=list(CASES),
    scope="module",
)
def case(request: pytest.FixtureRequest) -> Case:
    assert isinstance(request.param, Case)
    return request.param


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # hidden states for chunks are a view
def test_every_event(case: Case) -> None:
    plan = plan_of(case.sizes)
    batch = plan.batch.model_copy(update={"gbs": case.sizes.b * case.shards})
    sizes_of = {"dp": case.shards, "ep": case.ranks, "tp": case.tp, "etp": case.etp}
    layout = plan.layout.model_copy(update={**sizes_of, "sequence_parallel": case.tp > 1})
    plan = plan.model_copy(update={"batch": batch, "layout": layout})
    if case.tp > 1 and case.parallel_loss:
        plan = plan.model_copy(update={"loss": plan.loss.model_copy(update={"kind": "vocab-parallel"})})
    if case.chunks:
        loss = plan.loss.model_copy(update={"kind": "chunked", "chunks": case.chunks})
        plan = plan.model_copy(update={"loss": loss})
    recompute = ActivationCheckpointing(case.recompute)  # type: ignore[arg-type]
    model = torchtitan_model(plan, Options(accumulates_in_place=False), recompute, ends_apart=True)
    cut = cut_of_experts(plan) if case.ranks > 1 else None
    program = fsdp.program(plan, model, Sharding(case.shards, divides=case.ranks > 1, experts=cut, tensor=case.tp))
    sharding, modes = oracle.Sharding(case.shards), [case.recompute] * case.sizes.layers
    if case.tp > 1:
        steps = titan_tp.traced(
            case.sizes,
            sharding,
            case.tp,
            modes,
            ranks=case.ranks,
            etp=case.etp,
            parallel_loss=case.parallel_loss,
            chunks=case.chunks,
        )
    elif case.ranks > 1:
        steps = titan_experts.traced(case.sizes, sharding, case.ranks, modes)
    else:
        steps = oracle.traced(builder(case.sizes, sharding, modes, case.chunks), sharding)

    modules = [span.module for span in program.spans for _ in span.names]
    forward = [event for module in modules for event in named(module, module.steady.forward)]
    backward = [event for module in modules[::-1] for event in named(module, module.first.backward)]
    traced_forward, traced_backward, _ = steps.stretches
    if case.sizes.tied:
        traced_backward = without_sum_of_tied(traced_backward, (case.sizes.vocab, case.sizes.hidden))
    assert drops_sorted(sizes(forward)) == drops_sorted(sizes(traced_forward))
    assert drops_sorted(sizes(without_scalars(backward))) == drops_sorted(sizes(without_grad_loss(traced_backward)))

    folded = fold_program(program)
    assert folded.static == steps.before
    assert folded.after_forward == steps.levels()[0]
    assert 0 <= max(steps.peaks()[:2]) - folded.backward_peak <= 2 * ROUND  # scalars of the loss
    assert folded.step_peak == steps.peaks()[2]


MIXTURE = {"model": "qwen3-30b-a3b", "framework": "fsdp", "fsdp-code": "torchtitan", "gpu": "h200", "gpus": "64"}
MIXTURE |= {"seq": "4096", "mbs": "1", "layers": "2"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"ep": "5"}, "layout.ep = 5: must divide the 128 experts"),
        ({"ep": "128"}, "layout.ep = 128: must divide the 64 shards"),
        ({"ep": "16", "fsdp-replicas": "8"}, "layout.ep = 16: must divide the 8 shards"),
        ({"ep": "2", "etp": "2"}, "layout.etp = 2: must be 1"),
        ({"ep": "2", "fsdp-offload": "true"}, "fsdp.offload = true: must be false with ep 2"),
        ({"ep": "2", "reshard-after-forward": "false"}, "fsdp.reshard_after_forward = false: must be true with ep 2"),
        ({"etp": "2", "model": "llama-3-8b"}, "layout.etp = 2: must be 1: llama-3-8b has no experts"),
        ({"ep": "2", "model": "llama-3-8b"}, "layout.ep = 2: must be 1: llama-3-8b has no experts"),
        ({"ep": "2", "fsdp-code": "transformers"}, "layout.ep = 2: must be 1 with transformers' code"),
        ({"ep": "16", "expert-ffn": "760", "experts": "16"}, ""),
        ({"ep": "2", "experts": "32", "expert-ffn": "100"}, "model.expert_ffn = 100: must be a multiple of 32"),
        ({"gpu": "a100-80gb"}, "hardware.gpu = a100-80gb: must be of Hopper or later"),
        ({"dtype": "fp32"}, "precision.dtype = fp32: must be bf16"),
        ({"tp": "2"}, ""),
        ({"tp": "4", "ep": "64", "seq": "8192"}, ""),
        ({"tp": "4", "ep": "32", "etp": "2"}, "layout.etp = 2: must be 1 or tp (4): torchtitan has no other part"),
        ({"tp": "4", "ep": "32", "etp": "4"}, "layout.ep = 32: must divide the 16 shards (dp / fsdp.replicas)"),
        ({"tp": "4", "ep": "128"}, "must divide the 16 shards (dp / fsdp.replicas), 4 ranks of tensor parallelism"),
        ({"tp": "4", "expert-ffn": "770"}, "model.expert_ffn = 770: must be a multiple of 4: tensor parallelism gives"),
        ({"tp": "2", "model": "gpt-oss-20b"}, "layout.tp = 2: must be 1 with torchtitan's gpt_oss"),
        ({"ends-apart": "false"}, "fsdp.ends_apart = false: must be true"),
        (
            {"model": "llama-3-8b", "fsdp-code": "transformers", "fsdp-newest": "true"},
            "fsdp.code = transformers: must be torchtitan for fsdp.per_operator",
        ),
    ],
)
def test_what_is_refused(flags: dict[str, str], says: str) -> None:
    plan = resolve(read_plan(None, {**MIXTURE, **flags}).plan)
    if not says:
        assert len(programs_of(plan, Options())) == 1
        return
    with pytest.raises(PlanError, match=re.escape(says)) as caught:
        programs_of(plan, Options())
    assert "\n" not in str(caught.value)


def test_newest_layers_need_no_second_flag() -> None:
    """The code that has them shards embedding and head as units of their own, as every torchtitan after 2024."""
    plan = resolve(read_plan(None, {**MIXTURE, "model": "llama-3-8b", "fsdp-newest": "true"}).plan)
    assert plan.fsdp.ends_apart
    assert newest(plan)


def test_ranks_with_the_same_experts_hold_fewer_of_them() -> None:
    """8 ranks share 128 experts: each has 16, cut across 8 ranks that have the same, as 64 ranks cut all of them."""
    found = {ep: programs_of(resolve(read_plan(None, {**MIXTURE, "ep": ep}).plan), Options())[0] for ep in ("1", "8")}
    experts = {
        ep: {one.name: one.shape for one in program.parameter_tensors() if one.expert} for ep, program in found.items()
    }
    assert experts["1"]["experts.w1"] == (128, 768, 2048)
    assert experts["8"]["experts.w1"] == (16, 768, 2048)
    assert found["1"].elements == found["8"].elements


@pytest.mark.parametrize(
    ("etp", "groups"),
    [
        ("1", {"expert parallel": (8, 8, 8), "shards of experts": (8, 1, 8)}),
        ("4", {"expert tensor parallel": (4, 4, 4), "expert parallel": (8, 1, 4), "shards of experts": (2, 1, 32)}),
    ],
)
def test_groups_of_experts(etp: str, groups: dict[str, tuple[int, int, int]]) -> None:
    """64 ranks, 4 of tensor parallelism: 8 share experts, side by side, or 4 apart, with a part of each expert."""
    plan = resolve(read_plan(None, {**MIXTURE, "tp": "4", "ep": "8", "etp": etp}).plan)
    known = {one.name: (one.ranks, one.block, one.stride) for one in communicators(plan, 0)}
    assert {name: known[name] for name in known if "expert" in name} == groups
    assert (known["tensor parallel"], known["shards"]) == ((4, 4, 4), (16, 1, 4))


def test_cudnns_front_end_adds_up_the_gradient_of_queries() -> None:
    """Of 2 x 4 heads of 192 features and 64 tokens: dQ, and a sum for each token, in fp32."""

    def attended(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(cudnn_attention(r, x, x, x))

    interface, options = Interface((2, 4, 64, 192), "bf16"), Options(kernel_workspaces=True)
    tapes = build("attention", attended, interface, options).first
    inside = [one.bytes for one in tapes.backward if isinstance(one, Hold) and one.category is Category.WORKSPACES]
    assert inside == [2 * 4 * 64 * 193 * 4]


def test_layers_that_are_older_than_asked_are_told() -> None:
    words = {**MIXTURE, "model": "llama-3-8b", "fsdp-newest": "true", "gpu": "h100-80gb", "seq": "2048"}
    for more, told in (({}, False), ({"tp": "2", "gpus": "8"}, True)):
        plan = resolve(read_plan(None, {**words, **more}).plan)
        assert ("newest-not-known" in {one.code for one in warnings(plan, ())}) is told
