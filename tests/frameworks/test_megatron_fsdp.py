"""Megatron-FSDP: its buckets against the real code, and what its hooks hold by hand."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.arguments import plan_of_arguments
from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.replay import replay
from memplan.frameworks.megatron.fsdp import Sharding, buckets_of, laid_out, sites_of
from memplan.frameworks.megatron.fsdp_hooks import Hooks, ahead, persistent
from memplan.frameworks.megatron.programs import programs
from memplan.layers.module import Module, Options, Parameter, Tapes
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.resolve import resolve
from memplan.tape.events import OWN_POOL, Category, Drop, Hold
from memplan.tape.program import Program, Span, fold_program

from .test_megatron import plan, refusal
from .test_megatron_experts import plan as expert_plan

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    real = pytest.importorskip(
        "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer",
        reason="megatron-core is not installed (the extra dev has it)",
    )

FULL = Sharding("optim_grads_params", 4, 2, 1, "bf16", None, None, False, False, False, False)
KIB = 1024


def sharded(**flags: object) -> Plan:
    return plan(**{"megatron_fsdp": "optim_grads_params", "dp": 4, "layers": 4} | flags)


def program(**flags: object) -> Program:
    (made,) = programs(sharded(**flags), Options())
    return made


def module(**shapes: tuple[int, ...]) -> Module:
    nothing = Tapes((), (), 0, 0)
    parameters = tuple(Parameter(name.replace("_", "."), shape) for name, shape in shapes.items())
    return Module("layer", nothing, nothing, (), parameters)


# -- buckets against megatron-core's own functions ----------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_parameters_lie_in_a_bucket_as_the_real_index_says(seed: int) -> None:
    chance = random.Random(seed)
    chunk, ranks = chance.choice([1, 7, 64, 192, 512]), chance.choice([1, 2, 3, 8])
    sizes = [
        chance.choice([1, 3, chunk, 5 * chunk, chance.randint(1, 9 * chunk)]) for _ in range(chance.randint(1, 14))
    ]
    config = SimpleNamespace(data_parallel_sharding_strategy="optim")
    items, bucket, _ = real.build_data_parallel_buffer_index(
        [torch.Size([size]) for size in sizes], 0, ranks, True, config, chunk_size_factor=chunk
    )
    starts, end = laid_out(sizes, chunk)
    assert starts == [items[at].global_data_index for at in range(len(sizes))]
    assert -(-end // (ranks * chunk)) * ranks * chunk == bucket.size


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(48, 144)
        self.experts = nn.ModuleList(nn.Linear(48, 96, bias=False) for _ in range(2))
        self.out = nn.Linear(96, 48)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(100, 48)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(48, 100)


@pytest.mark.parametrize("size", [None, 4000])
def test_parameters_are_grouped_as_the_real_model_is(size: int | None) -> None:
    policy = real.BucketingPolicy(
        suggested_bucket_size=size, fsdp_unit_modules=[Layer], data_parallel_sharding_strategy="optim_grads_params"
    )
    model = Model()
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups, _, _ = real._get_parameter_groups(model, policy, {})
    config = SimpleNamespace(data_parallel_sharding_strategy="optim")
    expected = []
    for group in groups:
        ranks = FULL.expert_ranks if group.is_expert_param else FULL.ranks
        shapes = [parameter.shape for parameter in group.params]
        index = real.build_data_parallel_buffer_index(
            shapes, 0, ranks, True, config, chunk_size_factor=group.chunk_size_factor
        )
        expected.append(([names[parameter] for parameter in group.params], index[1].size))

    def span(prefix: str, name: str, own: nn.Module) -> Span:
        parameters = tuple(Parameter(f"{prefix}{n}", tuple(p.shape)) for n, p in own.named_parameters())
        return Span(replace(module(), parameters=parameters), (name,))

    layers = [span(f"layers.{at}.", f"layer.{at}", layer) for at, layer in enumerate(model.layers)]
    spans = (span("word.", "embedding", model.word), *layers, span("head.", "head", model.head))
    found = buckets_of(spans, replace(FULL, bucket=size))
    assert [([m.parameter.name for m in one.members], one.elements) for one in found] == expected


# -- what a rank keeps --------------------------------------------------------------------------------


def bytes_of(made: Program, category: Category) -> int:
    assert made.kept is not None
    return made.kept.between.net_by[category]


@pytest.mark.parametrize(
    ("strategy", "shares"),
    [("no_shard", (1, 1, 1)), ("optim", (1, 4, 1)), ("optim_grads", (1, 4, 4)), ("optim_grads_params", (4, 4, 4))],
)
def test_shards_of_what_is_kept(strategy: str, shares: tuple[int, int, int]) -> None:
    """Of parameters (2 bytes), main parameters (4) and states (8), and gradients (2, as parameters). Buckets are padded
    to 4 rows at most, each tensor rounded to 512 bytes; the fp32 copies of gradients are shares as main parameters are,
    and end when the next iteration begins."""
    made = program(megatron_fsdp=strategy)
    parameters, main, gradients = shares
    n = sum(parameter.elements for parameter in made.parameter_tensors())
    slack = 40 * KIB
    assert 0 <= bytes_of(made, Category.PARAMETERS) - 2 * n // parameters <= slack
    assert 0 <= bytes_of(made, Category.MAIN_PARAMETERS) - 4 * n // main <= slack
    assert -slack <= bytes_of(made, Category.OPTIMIZER_STATES) - 8 * n // main <= 2 * slack
    assert -slack <= bytes_of(made, Category.GRADIENTS) - 2 * n // gradients - 4 * n // main <= 2 * slack


def test_precision_aware_states() -> None:
    """Moments in 2 bytes, no fp32 copies of gradients; the buffers' main parameters stay, and FusedAdam has none."""
    aware = program(precision_aware_optimizer="true", exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16", gpu="h100-80gb")
    plain = program()
    n = sum(parameter.elements for parameter in aware.parameter_tensors())
    assert bytes_of(aware, Category.MAIN_PARAMETERS) == bytes_of(plain, Category.MAIN_PARAMETERS)
    assert abs(bytes_of(aware, Category.OPTIMIZER_STATES) - 4 * n // 4) <= 80 * KIB
    assert abs(bytes_of(aware, Category.GRADIENTS) - 2 * n // 4) <= 80 * KIB


def test_optimizer_states_of_instances_are_shared_out_where_the_plan_says_so() -> None:
    """Two groups of two ranks: states are halves, or, shared out to both groups, quarters."""
    halves = program(distributed_optimizer_instances=2)
    quarters = program(distributed_optimizer_instances=2, megatron_fsdp_outer="optim")
    for category, ratio in ((Category.OPTIMIZER_STATES, 2), (Category.MAIN_PARAMETERS, 2), (Category.PARAMETERS, 1)):
        assert bytes_of(halves, category) / bytes_of(quarters, category) == pytest.approx(ratio, rel=0.03)


# -- hooks --------------------------------------------------------------------------------------------


def buckets(layers: int, elements: int) -> tuple[Any, ...]:
    whole = module(weight=(elements, 1))
    names = [("embedding", module(word=(40, 1))), *((f"layer.{at}", whole) for at in range(layers))]
    return buckets_of(tuple(Span(one, (name,)) for name, one in (*names, ("final_norm", module(norm=(8,))))), FULL)


def held(hooks: Hooks) -> list[int]:
    hooks.take()
    return sorted(hooks.gathered)


def test_layers_are_gathered_ahead_until_the_limit() -> None:
    """Six layers of 100 elements, half of 400 ahead: every layer gathers its next two, and nothing else does."""
    hooks = Hooks(buckets(6, 100), replace(FULL, capacity=400), "bf16")
    hooks.before_forward(0)
    assert held(hooks) == []
    hooks.before_forward(1)
    assert held(hooks) == [1, 2, 3]
    for place in range(1, 7):
        hooks.before_forward(place)
        hooks.after_forward(place)
    assert held(hooks) == []
    hooks.before_forward(7)
    assert held(hooks) == []
    hooks.begin_backward()
    hooks.before_backward(6)
    assert held(hooks) == [4, 5, 6]
    hooks.after_backward(6)
    hooks.before_backward(5)
    assert held(hooks) == [3, 4, 5]


def test_reduced_gradients_wait_until_more_than_the_capacity_do() -> None:
    """Layers of 100 elements in 2 bytes, capacity 250: the first four of backward begin; with three waiting, 300 > 250,
    the first ends when the fourth is reduced."""
    hooks = Hooks(buckets(6, 100), replace(FULL, capacity=250), "bf16")
    ends = []
    for place in (6, 5, 4, 3):
        hooks.gradient(place, "weight")
        assert [event.bytes for event in hooks.take() if isinstance(event, Hold)] == [512]
        hooks.gradient(place, "weight")
        assert not hooks.take()
        hooks.after_backward(place)
        ends.append(sum(isinstance(event, Drop) for event in hooks.take()))
    assert ends == [0, 0, 0, 1]


def test_double_buffers_are_kept_for_good() -> None:
    """Two gathered layers and two of gradients; only the embedding's bucket comes and goes."""
    many = buckets(6, 1000)
    double = replace(FULL, double_buffer=True)
    assert not ahead(many, double, "bf16")
    assert [hold.bytes for hold in persistent(many, double, "bf16")] == [512, *[2048] * 4]
    assert len(persistent(many, FULL, "bf16")) == 1


def test_every_iteration_leaves_nothing_behind_and_the_replay_agrees() -> None:
    for flags in (
        {},
        {"megatron_fsdp_unit_size": 300_000},
        {"recompute": "full"},
        {"megatron_fsdp": "optim_grads"},
        {"megatron_fsdp_double_buffer": "true"},
        {"gradient_accumulation_fusion": "false"},
    ):
        made = program(**flags)
        passes = made.order.chunks[0].passes
        assert passes.forward.net + passes.backward.net == 0
        folded = fold_program(made)
        (replayed,) = replay((made,), AllocatorSettings(), ())
        assert abs(replayed.static - folded.static) < 8 * 2**20
        assert 0 <= replayed.allocated - folded.peak < 16 * 2**20


def test_every_layer_of_a_hybrid_is_a_unit() -> None:
    """``TransformerLayer``, ``MoETransformerLayer`` and ``MambaLayer`` are (``mcore_fsdp_adapter.py``); experts have a
    bucket of their own. Every iteration leaves nothing behind."""
    sizes = {"mamba_heads": 8, "mamba_head_dim": 64, "mamba_groups": 2, "mamba_state_dim": 16}
    mixture = {"experts": 4, "expert_top_k": 2, "expert_ffn": 64, "ep": 2, "etp": 1}
    made = program(family="hybrid", layers=4, layer_pattern="MM*E", positions="none", **sizes, **mixture)
    found = buckets_of(tuple(made.order.chunks[0].spans), replace(FULL, ranks=4))
    units = [(one.unit, one.experts) for one in found if one.unit is not None]
    first = min(unit for unit, _ in units)
    assert units == [*((first + at, False) for at in range(4)), (first + 3, True)]
    passes = made.order.chunks[0].passes
    assert passes.forward.net + passes.backward.net == 0
    (replayed,) = replay((made,), AllocatorSettings(), ())
    assert abs(replayed.static - fold_program(made).static) < 8 * 2**20


def test_sharded_parameters_need_less_the_less_is_gathered_ahead() -> None:
    sizes = [fold_program(program(layers=8, megatron_fsdp_unit_size=size)).peak for size in (100, 3_000_000, 10**9)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[2]


def test_the_norm_of_parameters_ends_what_the_step_has_gathered() -> None:
    """256 x 256 x (4 attention + 3 MLP) and two norms of 256, in 2 bytes, of each of the four layers."""
    gathered = fold_program(program()).static - fold_program(program(log_params_norm="true")).static
    assert gathered == 4 * 2 * (7 * 256 * 256 + 2 * 256 + 512)


# -- weights in 8 bits --------------------------------------------------------------------------------

BYTES: dict[str, object] = {"fp8": "delayed", "fp8_parameters": "true", "gpu": "h100-80gb", "seq": 512}
N = 4 * 7 * 256 * 256
"""Weights of linear layers: of four attentions, (3 + 1) x 256 x 256 each, and MLPs, 3 x 256 x 256 (``plan``)."""


@pytest.mark.parametrize(
    ("flags", "copies", "shares"),
    [
        ({}, 1, 4), ({"megatron_fsdp_keep_transposes": "true"}, 1 + 4, 4), ({"megatron_fsdp": "optim_grads"}, 2, 1),
        ({"megatron_fsdp": "optim"}, 2, 1), ({"fp8": "blockwise"}, 1, 4), ({"fp8": "mxfp8", "gpu": "b200"}, 2, 4),
        ({"fp8": "tensorwise", "gpu": "b200", "megatron_fsdp": "optim"}, 1, 1),
    ],
)  # fmt: skip
def test_bytes_of_weights_that_are_kept(flags: dict[str, object], copies: int, shares: int) -> None:
    """Rows, and columns where they are no copy of rows or stay; the rest is in 2 bytes."""
    made = program(**BYTES | flags)
    rest = sum(one.elements for one in made.parameter_tensors()) - N
    divided = 1 if flags.get("megatron_fsdp") else 4
    expected = copies * N // shares + 2 * rest // divided
    assert 0 <= bytes_of(made, Category.PARAMETERS) - expected <= 40 * KIB


def test_scales_are_whole_on_every_rank() -> None:
    """MXFP8: a byte for 32 elements, of rows and of columns; blocks: 4 bytes for 128 x 128 elements, of rows."""
    for flags, size in (({"fp8": "mxfp8", "gpu": "b200"}, 2 * N // 32), ({"fp8": "blockwise"}, 4 * N // 128**2)):
        kept = program(**BYTES | flags).kept
        assert kept is not None
        scales = [one for one in kept.construction if isinstance(one, Hold) and one.name.endswith("_scales")]
        assert size <= sum(one.bytes for one in scales) <= size + 512 * len(scales)


def columns(made: Program, *, backward: bool) -> list[int]:
    """Bytes of columns that come and go in a layer's pass."""
    chunk = made.order.chunks[0]
    span = next(one for one in chunk.spans if one.names[0] == "layer.2")
    tape = span.module.steady.backward if backward else span.module.steady.forward
    found = [one for one in tape if isinstance(one, Hold) and one.category is Category.GATHERED_PARAMETERS]
    ended = {one.tensor for one in tape if isinstance(one, Drop)}
    own = [one for one in found if one.name != "parameter_bucket"]
    assert all(one.tensor in ended for one in own)
    return [one.bytes for one in own]


def test_columns_live_as_long_as_a_pass() -> None:
    """Of delayed scaling on Hopper a byte for each element; a layer that runs again has them twice in backward. On
    Blackwell products take rows as they are."""
    assert sum(columns(program(**BYTES), backward=False)) == N // 4
    assert sum(columns(program(**BYTES), backward=True)) == N // 4
    assert sum(columns(program(**BYTES | {"recompute": "full"}), backward=True)) == 2 * N // 4
    assert not columns(program(**BYTES | {"gpu": "b200"}), backward=True)
    assert not columns(program(**BYTES | {"megatron_fsdp_keep_transposes": "true"}), backward=True)
    assert sum(columns(program(**BYTES | {"fp8": "blockwise"}), backward=True)) > N // 4


def test_the_step_casts_all_shards() -> None:
    """In 2 bytes, a quarter of the weights; with block scaling all buckets, of a byte, are gathered beside."""
    for recipe, gathered in (("delayed", 0), ("blockwise", N)):
        kept = program(**BYTES | {"fp8": recipe}).kept
        assert kept is not None
        held = [one for one in kept.step if isinstance(one, Hold)]
        cast = sum(one.bytes for one in held if one.name.endswith("_cast"))
        assert abs(cast - 2 * N // 4) <= 40 * KIB
        buckets = sum(one.bytes for one in held if one.name == "bucket")
        assert 0 <= buckets - gathered <= 40 * KIB


# -- buffers from NCCL, further layers ------------------------------------------------------------------


def test_buffers_from_nccl_lie_in_its_pool() -> None:
    """Parameters, gradients and double buffers do, which they need; main parameters and what no layer has do not."""
    kept = program(use_nccl_ub="true").kept
    assert kept is not None
    holds = [one for one in (*kept.construction, *kept.workspaces) if isinstance(one, Hold)]
    pooled = {one.name for one in holds if one.stream >= OWN_POOL}
    assert pooled == {"model_weight_buffer", "bucket", "main_grad_buffer", "parameter_bucket", "gradient_buffer"}
    doubles = [one for one in holds if one.name in ("parameter_bucket", "gradient_buffer") and one.stream >= OWN_POOL]
    assert len(doubles) == 4
    assert {one.stream for one in holds if one.name == "main_weight_buffer"} == {0}


def test_the_layer_within_multi_token_prediction_is_a_unit() -> None:
    """Beside it the block's norms and projection lie with what no layer has; each pass of it gathers its bucket."""
    flags = {"dp": 4, "ep": 4, "layers": 3, "mtp_layers": 2, "megatron_fsdp": "optim_grads_params"}
    (made,) = programs(expert_plan("deepseek-v2", **flags, megatron_fsdp_unit_size=1), Options())
    spans = tuple(made.order.chunks[0].spans)
    inner = [site for site in sites_of(spans) if site.name.startswith("mtp.")]
    assert [site.name for site in inner] == ["mtp.0.", "mtp.1."]
    assert not any(one.name.split(".")[2] in ("enorm", "hnorm", "eh_proj") for site in inner for one in site.parameters)
    found = buckets_of(spans, FULL)
    outside = {member.parameter.name for one in found if one.unit is None for member in one.members}
    assert {"mtp.0.eh_proj.weight", "mtp.1.hnorm.weight", "head.weight"} <= outside
    (span,) = (one for one in spans if one.names == ("mtp",))
    for tape in (span.module.steady.forward, span.module.steady.backward):
        names = [one.name for one in tape if isinstance(one, Hold) and one.name == "parameter_bucket"]
        assert len(names) == 4  # of experts and of the rest, each twice
    passes = made.order.chunks[0].passes
    assert passes.forward.net + passes.backward.net == 0
    (replayed,) = replay((made,), AllocatorSettings(), ())
    assert abs(replayed.static - fold_program(made).static) < 16 * 2**20


def test_columns_of_mxfp8_outside_of_layers_are_not_gathered() -> None:
    flags = {"dp": 4, "ep": 4, "mtp_layers": 1, "gpu": "b200", "fp8": "mxfp8", "fp8_parameters": True}
    with pytest.raises(PlanError, match="sharded parameters and multi-token prediction"):
        expert_plan("deepseek-v2", **flags, megatron_fsdp="optim_grads_params")


def test_a_stage_s_output_is_a_view_that_schedules_refuse() -> None:
    """What hooks return is ``view_as`` of the output (``create_custom_backward_hook``)."""
    from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

    output = torch.ones(2, requires_grad=True) * 2
    with pytest.raises(AssertionError, match="view of another tensor"):
        deallocate_output_tensor(output.view_as(output), True)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"pp": 2}, "layout.pp = 2: must be 1 with Megatron-FSDP (--use-megatron-fsdp): its hooks return views of"),
        ({"megatron_fsdp": "no_shard"} | BYTES, "with megatron.fsdp no_shard (--data-parallel-sharding-strategy)"),
        (
            {"fp4": "nvfp4", "fp8_parameters": "true", "gpu": "b200"},
            "must be false (no --fp4-param-gather) with Megatron-FSDP",
        ),
        (
            BYTES | {"fp8": "blockwise", "use_nccl_ub": "true"},
            "with blockwise scaling (--fp8-recipe) and double buffers",
        ),
        ({"optimizer": "muon"}, "optimizer.name = muon"),
        (
            {"precision_aware_optimizer": "true", "main_params_dtype": "fp16"},
            "optimizer.main_parameters = fp16: must be fp32",
        ),
        ({"megatron_fsdp": "none", "megatron_fsdp_double_buffer": "true"}, "must be left out without Megatron-FSDP"),
        ({"megatron_fsdp": "optim", "megatron_fsdp_communication": "fp32"}, "must be bf16, as precision.gradients"),
        ({"megatron_fsdp_outer": "optim"}, "distributed_optimizer_instances above 1"),
        (
            {"megatron_fsdp": "no_shard", "megatron_fsdp_meta_device": "true"},
            "must be false with megatron.fsdp no_shard",
        ),
    ],
)
def test_what_is_not_modelled_is_refused(flags: dict[str, object], said: str) -> None:
    assert said in refusal(**{"megatron_fsdp": "optim_grads_params", "dp": 4, "layers": 4} | flags)


def test_megatron_s_own_arguments_are_read() -> None:
    """``auto``: main gradients are as parameters are, and reduced so. The distributed optimizer belongs to it."""
    arguments = {
        "--num-layers": 4, "--hidden-size": 256, "--num-attention-heads": 4, "--seq-length": 256,
        "--max-position-embeddings": 256, "--micro-batch-size": 1, "--global-batch-size": 8, "--bf16": True,
        "--vocab-size": 999, "--tokenizer-type": "NullTokenizer", "--use-megatron-fsdp": True,
        "--outer-dp-sharding-strategy": "optim", "--num-distributed-optimizer-instances": 2,
        "--suggested-communication-unit-size": 1000, "--init-model-with-meta-device": True,
        "--megatron-fsdp-grad-comm-dtype": "auto", "--use-nccl-ub": True, "--fsdp-manual-registration": True,
        "--fp8-format": "hybrid", "--fp8-param-gather": True, "--keep-fp8-transpose-cache": True,
    }  # fmt: skip
    found = resolve(plan_of_arguments(arguments, {}, gpus=8).plan)
    megatron = found.megatron
    assert (megatron.fsdp, megatron.fsdp_outer, megatron.fsdp_unit_size) == ("optim_grads_params", "optim", 1000)
    assert (found.layout.zero, found.precision.gradients, megatron.fsdp_communication) == (1, "bf16", None)
    assert (found.precision.fp8, found.precision.fp8_parameters) == ("delayed", True)
    assert (megatron.doubles_buffers, megatron.registers_buffers, megatron.fsdp_keep_transposes) == (True,) * 3
    fp32 = {**arguments, "--megatron-fsdp-main-grads-dtype": "fp32", "--data-parallel-sharding-strategy": "optim"}
    del fp32["--outer-dp-sharding-strategy"]
    found = resolve(plan_of_arguments(fp32, {}, gpus=8).plan)
    assert (found.megatron.fsdp, found.precision.gradients) == ("optim", "fp32")
