"""DeepSpeed's model against the engine: bytes held and dropped, module by module, rank by rank.

``deepspeed_0_19_8.json`` is what ``tests/oracle/deepspeed.py`` measured: real processes, gloo, CPUs. Gradients are
never added in place there, since the tracer's references keep storages from being the engine's alone.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import transformers
from hypothesis import given, strategies as st

from memplan.families import family
from memplan.formats.deepspeed.config import configuration_of
from memplan.formats.settings import Building
from memplan.frameworks.deepspeed import engine as deepspeed, states as zero_states, step as zero_step
from memplan.frameworks.deepspeed.buckets import ReducingBucket
from memplan.frameworks.deepspeed.config import Zero, check_zero
from memplan.frameworks.deepspeed.states import Group, groups, shard, sub_groups
from memplan.frameworks.plain.hooked import Model
from memplan.frameworks.plain.programs import head_loss, kernels_of
from memplan.layers.huggingface import LayerShape
from memplan.layers.module import Options, Parameter
from memplan.layers.tuning import Adapters, Tuning
from memplan.plan.errors import PlanError
from memplan.plan.framework_sections import Trainer
from memplan.plan.models import load_spec
from memplan.plan.plan import Batch, Hardware, Layout, Loss, Optimizer, Plan, Precision, Recompute, ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.spec import ModelSpec
from memplan.plan.text import parse_yaml
from memplan.plan.tuning_sections import Kernels as KernelsNamed, Lora
from memplan.tape.events import Category, Drop, Hold, Tape
from memplan.tape.program import fold_program

from ..oracle.deepspeed import AVAILABLE, CASES, COMPLETION, RANK as ADAPTER_RANK, SIZES, Case, measure, summary

GOLDEN: dict[str, list[dict[str, Any]]] = json.loads((Path(__file__).parent / "deepspeed_0_19_8.json").read_text())[
    "cases"
]

OPTIONS = Options(accumulates_in_place=False)

SCALARS = 20_000
"""Bytes of scalars that the engine keeps on the CPU: losses, PyTorch's step counters of 512 B each."""

COMMON: dict[str, Any] = {
    "name": "tiny",
    "layers": 3,
    "hidden": 64,
    "heads": 4,
    "head_dim": 16,
    "vocab": 1000,
    "positions_max": 128,
    "embedding_dropout": 0.0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
LLAMA = ModelSpec(
    **COMMON,
    family="llama",
    kv_heads=2,
    ffn=176,
    norm="rmsnorm",
    positions="rotary",
    activation="swiglu",
    attention_bias=False,
    attention_output_bias=False,
    mlp_bias=False,
    tied_embeddings=False,
)
GPT2 = ModelSpec(
    **COMMON, family="gpt2", kv_heads=4, ffn=256, norm="layernorm", positions="learned", activation="gelu_new"
)
BERT = ModelSpec(
    **COMMON,
    family="bert",
    kv_heads=4,
    ffn=256,
    norm="layernorm",
    norm_place="post",
    positions="learned",
    activation="gelu",
    causal=False,
    token_types=2,
    embedding_norm=True,
    final_norm=False,
    mlm_head=True,
)
SPECS = {"llama": LLAMA, "gpt2": GPT2, "bert": BERT}


@cache
def spec_of(family: str) -> ModelSpec:
    """Of the others, what memplan reads from the configuration that the oracle makes a model of."""
    if family in SPECS:
        return SPECS[family]
    config = transformers.AutoConfig.for_model(family, vocab_size=1000, **SIZES[family])
    with TemporaryDirectory() as folder:
        config.to_json_file(Path(folder) / "config.json", use_diff=False)
        return read_plan(None, {"model": folder}).plan.model


def zero_of(case: Case) -> Zero:
    sums: Any = case.sums
    groups: Any = case.groups
    section = {name: value["device"] if isinstance(value, dict) else value for name, value in case.zero.items()}
    return Zero(stage=case.stage, gradient_accumulation_dtype=sums, groups=groups, **section)


def optimizer_of(case: Case) -> Optimizer:
    chosen: dict[str, dict[str, Any]] = {
        "adamw": {"name": "adamw", "implementation": None if case.fused else "foreach"},
        "momentum": {"name": "sgd", "implementation": "foreach", "momentum": 0.9, "weight_decay": 0.1},
        "adafactor": {"name": "adafactor", "implementation": "foreach"},
        "adafactor-transformers": {"name": "adafactor", "implementation": "transformers"},
        "lion": {"name": "lion"},
        "adam8bit": {"name": "adam8bit", "block_size": 256},
        "lion8bit": {"name": "lion8bit", "block_size": 256},
    }
    return Optimizer(**chosen[case.optimizer])


TRAINERS = {
    "": Trainer(),
    "dpo": Trainer(loop="dpo"),
    "grpo": Trainer(loop="grpo", completion_length=COMPLETION, generation_memory=0),
}


def plan_of(case: Case) -> ResolvedPlan:
    dtype: Any = case.dtype
    mbs = 1 if case.trainer == "dpo" else 2
    plan = Plan(
        model=spec_of(case.family),
        framework="deepspeed",
        hardware=Hardware(gpus=case.ranks, gpu="a100-80gb" if case.liger else None),
        layout=Layout(dp=case.ranks, zero=case.stage),
        batch=Batch(mbs=mbs, gbs=mbs * case.ranks * case.microbatches, seq=32),
        precision=Precision(dtype=dtype, gradients=dtype),
        optimizer=optimizer_of(case),
        recompute=Recompute(mode="full" if case.recompute else "none"),
        attention="eager",
        loss=Loss(kind="liger" if case.liger == "all" else "plain"),
        lora=Lora(rank=ADAPTER_RANK, targets=tuple(case.lora.split(",")), dtype="fp32") if case.lora else Lora(),
        trainer=TRAINERS[case.trainer],
        kernels=kernels_named(case),
    )
    return ResolvedPlan.model_construct(**dict(plan))


def kernels_named(case: Case) -> KernelsNamed:
    if case.liger:
        return KernelsNamed(norm="liger", rope="liger", mlp="liger")
    return KernelsNamed(delta="fla") if spec_of(case.family).linear_interval else KernelsNamed()


@cache
def model_of(name: str) -> Model:
    case = CASES[name]
    spec, plan = spec_of(case.family), plan_of(case)
    shape = LayerShape(spec, 2, 32, case.dtype, False)
    options = replace(OPTIONS, tuning=tuning_of(case), kernels=kernels_of(plan))
    return deepspeed.model_of(shape, spec.layers, options, case.stage, case.recompute, head_loss(plan))


def tuning_of(case: Case) -> Tuning | None:
    """Adapters in the dtype of training, whatever peft made."""
    if not case.lora:
        return None
    targets = family(case.family).linear_layers
    named = frozenset(part for part, name in targets.items() if name.rpartition(".")[2] in case.lora.split(","))
    return Tuning(adapters=Adapters(ADAPTER_RANK, named, 0.0, case.dtype), input_requires_grad=case.recompute)


def setting_of(case: Case) -> deepspeed.Setting:
    plan = plan_of(case)
    how = (case.recompute, case.microbatches, tuning_of(case), head_loss(plan))
    return deepspeed.Setting(zero_of(case), case.ranks, case.dtype, plan.optimizer, *how)


def changes(*tapes: Tape) -> list[tuple[int, int]]:
    events = (event for tape in tapes for event in tape)
    return [(1 if isinstance(event, Hold) else -1, event.bytes) for event in events if isinstance(event, (Hold, Drop))]


def ours(name: str, rank: int) -> dict[str, dict[str, Any]]:
    """Summaries of every forward and backward of an iteration."""
    case, model, setting = CASES[name], model_of(name), setting_of(CASES[name])
    parts = groups(model.parameters, case.groups, case.ranks)
    modules = deepspeed.rank_of(setting, model, parts, rank).modules
    found = {}
    for microbatch in range(case.microbatches):
        tapes = [module.first if microbatch == 0 else module.steady for module in modules]
        backward = [tape.backward for tape in reversed(tapes)]
        if case.stage == 1 and microbatch == case.microbatches - 1:
            bucket = ReducingBucket(setting.zero, parts, rank, case.dtype, clears=False)
            size = deepspeed.bucket_bytes(setting)
            bucket.buffers = [Hold(zero_step.BUCKET, size, Category.GRADIENTS)]
            backward.append(zero_step.reduction(model, bucket))
        found[f"{microbatch}/forward"] = summary(changes(*(tape.forward for tape in tapes)))
        found[f"{microbatch}/backward"] = summary(changes(*backward))
    return found


RANKS = [(name, rank) for name, case in CASES.items() if not case.trainer for rank in range(case.ranks)]
OF_TRL = [(name, rank) for name, case in CASES.items() if case.trainer for rank in range(case.ranks)]


@pytest.mark.parametrize(("name", "rank"), OF_TRL)
def test_passes_of_trls_trainers(name: str, rank: int) -> None:
    """Net and peak of forward, with the reference's behind it, and of backward: of stages below 3 the reference's
    layers run fewer times."""
    case = CASES[name]
    spans = deepspeed.by_rank(plan_of(case), OPTIONS, zero_of(case), rank)[rank].spans
    for microbatch in range(case.microbatches):
        tapes = [span.module.first if microbatch == 0 else span.module.steady for span in spans]
        passes = {"forward": [one.forward for one in tapes], "backward": [one.backward for one in reversed(tapes)]}
        for phase, parts in passes.items():
            found = summary(changes(*parts))
            measured = GOLDEN[name][rank]["phases"][f"{microbatch}/{phase}"]
            assert (found["net"], found["peak"]) == (measured["net"], measured["peak"]), phase


WHOLE_LOGITS: dict[str, Any] = json.loads((Path(__file__).parent / "deepspeed_whole_logits.json").read_text())


@pytest.mark.parametrize("name", WHOLE_LOGITS["cases"])
def test_passes_of_trls_trainers_before_tiles(name: str) -> None:
    """The same with the release of trl whose loss is of all logits (``python -m tests.oracle.deepspeed FILE NAME``)."""
    case = CASES[name]
    plan = plan_of(case)
    plan = plan.model_copy(update={"versions": {**plan.versions, "trl": WHOLE_LOGITS["trl"]}})
    for rank, measured in enumerate(WHOLE_LOGITS["cases"][name]):
        spans = deepspeed.by_rank(plan, OPTIONS, zero_of(case), rank)[rank].spans
        tapes = [span.module.first for span in spans]
        passes = {"forward": [one.forward for one in tapes], "backward": [one.backward for one in reversed(tapes)]}
        for phase, parts in passes.items():
            found, given = summary(changes(*parts)), measured["phases"][f"0/{phase}"]
            assert (found["net"], found["peak"]) == (given["net"], given["peak"]), phase


@pytest.mark.parametrize(("name", "rank"), [case for case in RANKS if case[0] != "z3-offload"])
def test_forward_is_the_engines_event_by_event(name: str, rank: int) -> None:
    measured = GOLDEN[name][rank]["phases"]
    for phase, found in ours(name, rank).items():
        if phase.endswith("forward"):
            left = {"windows"} if (name, rank) in TIMED else {"windows", "sizes"} if name in GROUPED else set()
            left |= {"windows"} if name in RELEASED else set()
            same = [key for key in found if key not in left]
            for size, count in RELEASED.get(name, {}).items():
                found["sizes"][size] -= count
            found["sizes"] = {size: count for size, count in found["sizes"].items() if count}
            assert [found[key] for key in same] == [measured[phase][key] for key in same], phase


def released(layers: int, *sizes: int) -> dict[str, int]:
    return dict.fromkeys((f"{sign}{size}" for sign in "+-" for size in sizes), layers)


RELEASED = {
    "z3-mixtral": released(3, 180224, 90112),
    **dict.fromkeys(("z3-olmoe", "z3-granitemoe"), released(3, 49152, 24576)),
    **dict.fromkeys(("z3-deepseek_v2", "z3-deepseek_v3", "z3-glm4_moe", "z3-dots1"), released(2, 49152, 24576)),
}
"""Experts' weights of a layer that are released behind its forward while nodes have them: their end, and their
beginning as saved tensors, are no events of the engine's."""

OTHERWISE = ("z0", "z0-fused", "z0-liger", "z0-adapters", "z0-lion", "z0-adafactor", "z1-sums", "z3-offload")
"""Gradients are averaged, or cast, where backward ends; the model counts that to the step. Shards that return from
the host to the device are none where both are the same."""

KNOWN: dict[str, dict[str, int]] = {
    "z3-recompute": {"+8192": 3, "-8192": 3},
    "z3-gpt2": {"+256000": 1, "-256000": 1},
    "z2-gpt2": {"+256000": 1, "-256000": 1},
    "z3-bert": {"+256000": 1, "-256000": 1, "+16384": 3, "-16384": 3},
    **{key: {"+128000": 1, "-128000": 1} for key in ("z3-gemma", "z2-gemma", "z3-ernie4_5", "z2-ernie4_5")},
    "z3-gemma-recompute": {"+128000": 1, "-128000": 1, "+8192": 3, "-8192": 3},
    "z3-gemma2": {"+128000": 1, "-128000": 1},
    "z3-gemma2-recompute": {"+128000": 1, "-128000": 1},
    "z2-gemma2": {"+128000": 1, "-128000": 1},
    **{key: {"+128000": 1, "-128000": 1} for key in ("z3-gemma3_text", "z3-gemma3_text-recompute", "z2-gemma3_text")},
    **{key: {"+128000": 1, "-128000": 1} for key in ("z3-gemma4_text", "z3-gemma4_text-recompute", "z2-gemma4_text")},
    "z3-phi3-recompute": {"+8192": 3, "-8192": 3},
    "z3-glm-recompute": {"+8192": 3, "-8192": 3},
    "z3-granitemoehybrid-recompute": {"+8192": 3, "-8192": 3},
    "z3-smollm3-recompute": {"+8192": 3, "-8192": 3},
    "z3-gpt_neox-recompute": {"+16384": 3, "-16384": 3},
    "z3-starcoder2-recompute": {"+16384": 3, "-16384": 3},
    "z3-opt": {"+256000": 1, "-256000": 1, "+16384": 3, "-16384": 3},
    "z3-opt-recompute": {"+256000": 1, "-256000": 1, "+16384": 6, "-16384": 6},
    "z1-opt": {"+256000": 1, "-256000": 1},
    "z1-falcon": {"+256000": 1, "-256000": 1, "+24576": 6, "-24576": 6},
    "z3-adapters-default": {"+8192": 3, "-8192": 3},
    "z3-deepseek_v3-recompute": {"+8192": 3, "-8192": 3},
    "z3-llama4_text-recompute": {"+8192": 3, "-8192": 3},
    "z3-deepseek_v2-recompute": {"+8192": 3, "-8192": 3, **released(-2, 49152, 24576)},
    **dict.fromkeys(("z3-liger", "z2-liger", "z1-liger"), released(-1, 128000, 8192)),
    **dict.fromkeys(("z3-liger-adapters", "z3-liger-tied"), released(-1, 8192)),
    "z3-liger-recompute": {**released(-1, 128000), **released(2, 8192)},
}
"""What the engine holds besides. Recompute: the output of the last linear, whose Python function returns before early
stop ends it; without DeepSeek's experts, ``RELEASED`` again before shared ones run. BERT and OPT: the keys' gradient, a
transposed view, which that function copies for each of its products. A tied embedding: the sum of its two gradients,
which is in place where nobody follows storages; so are zeros that Falcon's gradients are put into. Fewer: gradients
that Liger's loss has made in forward have another name in our backward."""

GROUPED = (
    "z3-adapters", "z3-adapters-all", "z3-adapters-recompute", "z3-deepseek_v3-adapters", "z3-gemma3_text-adapters",
    "z3-olmo3-adapters", "z3-starcoder2-adapters", "z3-smollm3-adapters", "z3-gemma-adapters",
    "z3-glm4-adapters", "z3-gemma4_text-adapters",
)  # fmt: skip
"""Small buckets: a few of what is gathered ahead come in other groups, as many bytes in all."""

TIMED = {("z3-opt", 1), ("z3-opt-recompute", 0), ("z3-olmo3-recompute", 1), ("z3-liger-tied", 0)}
"""Ranks that waited for a gather later than the other one did, which moves the curve and not its peak."""


@pytest.mark.parametrize(("name", "rank"), [case for case in RANKS if case[0] not in OTHERWISE])
def test_backward_holds_and_drops_what_the_engine_does(name: str, rank: int) -> None:
    measured = GOLDEN[name][rank]["phases"]
    for phase, found in ours(name, rank).items():
        if phase.endswith("backward"):
            sizes = dict(measured[phase]["sizes"])
            for size, count in KNOWN.get(name, {}).items():
                sizes[size] -= count
            if name not in GROUPED:
                assert found["sizes"] == {size: count for size, count in sizes.items() if count}, phase
            assert (found["net"], found["peak"]) == (measured[phase]["net"], measured[phase]["peak"])


@pytest.mark.parametrize(("name", "rank"), [case for case in RANKS if case[0] in ("z1", "z1-4", "z2", "z2-overlap-4")])
def test_backward_peaks_where_the_engine_does(name: str, rank: int) -> None:
    measured = GOLDEN[name][rank]["phases"]
    for phase, found in ours(name, rank).items():
        assert found["windows"] == measured[phase]["windows"], phase


@pytest.mark.parametrize("name", CASES)
def test_the_whole_iteration(name: str) -> None:
    """Static bytes, and the peak of an iteration on the rank that needs most. The engine's host is its device."""
    case = CASES[name]
    zero = zero_of(case)
    _, program = deepspeed.fullest(plan_of(case), OPTIONS, zero)
    folded = fold_program(program)
    fullest = max(GOLDEN[name], key=lambda record: record["peak"])
    host = deepspeed.host_bytes(plan_of(case), zero)[0]
    assert abs(folded.static + host - fullest["static"]) <= SCALARS
    if not host:
        scalars = SCALARS if case.lora else 0  # beside the few states of adapters
        assert abs(folded.peak - fullest["peak"]) <= max(0.0025 * fullest["peak"], scalars)


@pytest.mark.parametrize(
    "name", [name for name, records in GOLDEN.items() if "initialise" in records[0] and CASES[name].stage in (1, 2)]
)
def test_building_the_engine(name: str) -> None:
    """The model's own tensors, flat groups, shares and their first gradients; ids and buffers are there before."""
    case, model = CASES[name], model_of(name)
    parts = groups(model.parameters, case.groups, case.ranks)
    own = sum(parameter.bytes(case.dtype) for parameter in model.parameters)
    for record in GOLDEN[name]:
        found = record["initialise"]
        peak = zero_states.initialisation_peak(model, parts, found["before"] - own, None)
        assert found["peak"] == peak
    full = zero_states.initialisation_peak(model, parts, 0, 0)
    assert full <= zero_states.initialisation_peak(model, parts, 0, None)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.optimizer != "adamw" and case.stage])
def test_the_step_of_each_optimizer(name: str) -> None:
    _, program = deepspeed.fullest(plan_of(CASES[name]), OPTIONS, zero_of(CASES[name]))
    highest = 0
    for record in GOLDEN[name]:
        *passes, step = record["phases"].values()
        highest = max(highest, record["static"] + sum(one["net"] for one in passes) + step["peak"])
    assert fold_program(program).step_peak == pytest.approx(highest, rel=0.0025)


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_in_the_order_of_registration(name: str) -> None:
    shapes = [sorted(shape) for shape in GOLDEN[name][0]["shapes"]]
    assert [sorted(parameter.shape) for parameter in model_of(name).parameters] == shapes


@pytest.mark.skipif(not AVAILABLE, reason="DeepSpeed is not installed: pip install deepspeed with DS_BUILD_OPS=0")
@pytest.mark.parametrize("name", ["z3", "z2-overlap-4", "z1"])
def test_the_engine_still_does_what_was_measured(name: str) -> None:
    for found, measured in zip(measure(name), GOLDEN[name], strict=True):
        now, then = found["phases"]["0/forward"], measured["phases"]["0/forward"]
        assert (now["net"], now["peak"], now["sizes"]) == (then["net"], then["peak"], then["sizes"])
        assert found["peak"] == pytest.approx(measured["peak"], rel=0.005)


# -- layout -----------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=12), st.integers(1, 64))
def test_shares_cover_a_group_once(sizes: list[int], dp: int) -> None:
    group = Group("all", tuple(range(len(sizes))), tuple(sizes), dp)
    assert group.padded % (2 * dp) == 0
    assert 0 <= group.padded - sum(sizes) < 2 * dp
    covered = dict.fromkeys(group.ids, 0)
    for rank in range(dp):
        for piece in group.share_of(rank):
            assert piece.start == covered[piece.id]
            covered[piece.id] += piece.elements
    assert list(covered.values()) == sizes
    for id in group.ids:
        assert sum(n for _, n in group.pieces(id)) == sizes[id]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.integers(1, 16), st.integers(1, 3000))
def test_sub_groups_are_closed_when_they_are_full(sizes: list[int], dp: int, limit: int) -> None:
    found = sub_groups(range(len(sizes)), sizes, dp, limit)
    assert [id for group in found for id in group] == list(range(len(sizes)))
    for group in found[:-1]:
        shards = [shard(sizes[id], dp) for id in group]
        assert sum(shards) >= limit > sum(shards[:-1])


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30))
def test_ranks_that_may_need_most(kept: list[int]) -> None:
    """No rank is left out that keeps more than all behind it; the last is one, and so is one that keeps most."""
    found = deepspeed.foremost(kept)
    assert found[0] == len(kept) - 1
    assert kept[found[-1]] == max(kept)
    for rank in set(range(len(kept))) - set(found):
        assert kept[rank] <= max(kept[other] for other in found if other > rank)


@given(st.integers(1, 30), st.integers(1, 9))
def test_round_robin_is_an_order_of_the_group(count: int, dp: int) -> None:
    parameters = [Parameter(str(i), (i + 1,)) for i in range(count)]
    (group,) = groups(parameters, "one", dp, round_robin=True)
    assert sorted(group.ids) == list(range(count))
    assert group.ids[: -(-count // dp)] == tuple(range(0, count, dp))


# -- refusals and the host --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        (Zero(stage=2, offload_param="cpu"), "needs stage 3, not 2"),
        (Zero(stage=0, offload_optimizer="cpu"), "needs stage 1, 2 or 3"),
        (Zero(stage=1, offload_optimizer="nvme"), "needs stage 3, not 1"),
        (Zero(stage=3, memory_efficient_linear=False), "keeps every gathered weight"),
        (Zero(stage=3, reduce_scatter=False), "not modelled"),
        (Zero(stage=2, allgather_bucket_size=3), "must be even"),
        (Zero(stage=3, offload_optimizer="cpu", offload_optimizer_ratio=0.5), "must be 1"),
    ],
)
def test_refusals(zero: Zero, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        check_zero(zero)


def test_offload_moves_states_to_the_host() -> None:
    """266,688 parameters on 2 ranks, S = 133,344. Stage 3, both offloaded: 2 S of shards, 4 + 8 S of parameters and
    states, 4 S of fp32 gradients and 2 S of accumulated ones, on each rank."""
    case = CASES["z3"]
    plan = plan_of(case)
    share = 133_344
    both = Zero(stage=3, offload_optimizer="cpu", offload_param="cpu")
    assert deepspeed.host_bytes(plan, both) == (20 * share, 0)
    stage2 = Zero(stage=2, offload_optimizer="cpu")
    plan = plan.model_copy(update={"layout": Layout(dp=2, zero=2)})
    largest = 64_000
    assert deepspeed.host_bytes(plan, stage2) == (18 * share + 2 * largest, 0)


def test_what_a_configuration_says_are_fields_of_zero() -> None:
    text = """{"zero_optimization": {"stage": 3, "overlap_comm": false, "stage3_max_live_parameters": 1e9,
      "offload_param": {"device": "nvme", "nvme_path": "/local", "buffer_size": 1e8, "pin_memory": true},
      "offload_optimizer": {"device": "cpu", "buffer_count": 5, "ratio": 1.0}},
      "data_types": {"grad_accum_dtype": "fp32"}, "gradient_clipping": 1.0}"""
    written = parse_yaml(text, "ds_config.json")
    building = Building(written.origin)
    configuration_of(written, building)
    read = building.plan().mapping["deepspeed"].mapping
    values: dict[str, Any] = {name: node.plain() for name, node in read.items()}
    assert Zero(stage=3, **values).offload_param_buffer_size == 10**8


def test_nvme_has_states_of_large_sub_groups_and_parameters_beyond_the_limit() -> None:
    """GPT-2 on 2 ranks, S = 62,219,904, one sub-group: 16 S of states and gradients on NVMe, and as much in the four
    buffers that they pass through; 10⁷ elements of parameters stay on the host, where no sub-group fits."""
    plan = plan_of(CASES["z3"]).model_copy(update={"model": load_spec("gpt2")})
    share = 62_219_904
    away = Zero(stage=3, offload_optimizer="nvme", offload_param="nvme", offload_param_max_in_cpu=10**7)
    host, nvme = deepspeed.host_bytes(plan, away)
    assert nvme == (16 + 2) * share
    assert host == (2 * 10**7 + 2 * 5 * 10**8 + 2 * share + 4 * 4 * share)
    host, nvme = deepspeed.host_bytes(plan, away.model_copy(update={"offload_param_max_in_cpu": 10**9}))
    assert nvme == 16 * share
