"""torchtitan's Qwen 3.5 under ``fully_shard``, against the same operators run on fake tensors."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from memplan.estimate import programs_of
from memplan.frameworks.fsdp import programs as fsdp
from memplan.frameworks.fsdp.titan_experts import cut_of_experts
from memplan.frameworks.fsdp.torchtitan import ActivationCheckpointing, torchtitan_model
from memplan.frameworks.fsdp.units import Sharding
from memplan.layers.module import Options
from memplan.plan.count import parameters
from memplan.plan.errors import PlanError
from memplan.plan.models import load_spec
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Category
from memplan.tape.program import fold_program

from ..layers.test_against_transformers import drops_sorted, named, sizes, without_grad_loss, without_scalars
from ..oracle import fsdp as oracle, titan_gpt_oss, titan_muse
from ..oracle.titan_gpt_oss import expert_meshes
from ..oracle.titan_qwen35 import MoESizes, Qwen35, Qwen35MoE, Sizes
from .every_event import check_every_event

SMALL = Sizes(hidden=192, heads=6, kv_heads=2, head_dim=64, ffn=448, vocab=1003, layers=2, b=2, s=96, interval=2)
FOUR = replace(SMALL, layers=4, interval=4, b=1, s=200, rotary=64)
EQUAL = replace(SMALL, key_heads=4, key_dim=64, value_dim=32)
MIXED = MoESizes(
    hidden=192, heads=6, kv_heads=2, head_dim=64, vocab=1003, layers=2, b=2, s=64, experts=8, top_k=3, expert_ffn=96,
    shared=160,
)  # fmt: skip
JOB = {"framework": "fsdp", "fsdp-code": "torchtitan", "gpu": "h200", "ends-apart": "true"}


def plan_of(given: Sizes | MoESizes, shards: int, chunks: int, **others: str) -> ResolvedPlan:
    flags = {"mbs": str(given.b), "seq": str(given.s), "gpus": str(shards), "vocab": str(given.vocab)}
    flags |= {"hidden": str(given.hidden), "heads": str(given.heads), "kv-heads": str(given.kv_heads)}
    flags |= {"head-dim": str(given.head_dim), "layers": str(given.layers), "linear-interval": str(given.interval)}
    flags |= {"rotary-fraction": str(given.rotary / given.head_dim), "linear-key-heads": str(given.key_heads)}
    flags |= {"linear-value-heads": str(given.value_heads), "linear-key-head-dim": str(given.key_dim)}
    flags |= {"linear-value-head-dim": str(given.value_dim)}
    flags |= {"loss": "chunked", "loss-chunks": str(chunks)} if chunks else {"loss": "plain"}
    if isinstance(given, MoESizes):
        flags |= {"model": "qwen3.5-35b-a3b", "experts": str(given.experts), "expert-top-k": str(given.top_k)}
        flags |= {"expert-ffn": str(given.expert_ffn), "shared-expert-ffn": str(given.shared)}
    else:
        flags |= {"model": "qwen3.5-9b", "ffn": str(given.ffn)}
    return resolve(read_plan(None, {**JOB, **flags, **others}).plan)


@pytest.mark.parametrize(
    ("recompute", "chunks", "given"),
    [
        ("none", 2, SMALL),
        ("op", 0, SMALL),
        pytest.param("full", 2, SMALL, marks=pytest.mark.slow),
        pytest.param("none", 0, EQUAL, marks=pytest.mark.slow),
        pytest.param("op", 2, FOUR, marks=pytest.mark.slow),
    ],
)
def test_every_event(recompute: str, chunks: int, given: Sizes) -> None:
    plan = plan_of(given, 4, chunks)
    policy = ActivationCheckpointing(recompute)  # type: ignore[arg-type]
    model = torchtitan_model(plan, Options(accumulates_in_place=False), policy, ends_apart=True)
    program = fsdp.program(plan, model, Sharding(4))
    sharding = oracle.Sharding(4)
    steps = oracle.traced(titan_muse.builder(given, sharding, [recompute] * given.layers, chunks, Qwen35), sharding)
    check_every_event(program, steps)


@pytest.mark.parametrize(
    ("recompute", "chunks", "ranks"),
    [
        ("op", 2, 1),
        pytest.param("none", 0, 4, marks=pytest.mark.slow),
        pytest.param("full", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_every_event_with_experts(recompute: str, chunks: int, ranks: int) -> None:
    plan = plan_of(MIXED, 8, chunks, ep=str(ranks))
    policy = ActivationCheckpointing(recompute)  # type: ignore[arg-type]
    model = torchtitan_model(plan, Options(accumulates_in_place=False), policy, ends_apart=True)
    shares = ranks > 1
    cut = cut_of_experts(plan) if shares else None
    program = fsdp.program(plan, model, Sharding(8, divides=shares, experts=cut))
    sharding = oracle.Sharding(8)
    build = titan_gpt_oss.builder(MIXED, sharding, [recompute] * MIXED.layers, chunks, ranks=ranks, decoder=Qwen35MoE)
    steps = oracle.traced(build, sharding, of=(lambda _: expert_meshes(8, ranks)) if shares else None)
    check_every_event(program, steps)


@pytest.mark.slow
def test_what_a_cuda_graph_captures() -> None:
    """Every backward adds to gradients that are there, and what passes hold lies in pools of their own."""
    plan = plan_of(SMALL, 4, 2)
    plan = plan.model_copy(update={"fsdp": plan.fsdp.model_copy(update={"cuda_graphs": True})})
    model = torchtitan_model(plan, Options(accumulates_in_place=False), ActivationCheckpointing(), ends_apart=True)
    program = fsdp.program(plan, model, Sharding(4))
    sharding = oracle.Sharding(4)
    build = titan_muse.builder(SMALL, sharding, ["op"] * SMALL.layers, 2, Qwen35)
    steps = oracle.traced(build, sharding, keeps_gradients=True)
    modules = [span.module for span in program.spans for _ in span.names]
    forward = [event for module in modules for event in named(module, module.first.forward)]
    backward = [event for module in modules[::-1] for event in named(module, module.first.backward)]
    assert drops_sorted(sizes(forward)) == drops_sorted(sizes(steps.stretches[0]))
    assert drops_sorted(sizes(without_scalars(backward))) == drops_sorted(sizes(without_grad_loss(steps.stretches[1])))
    captured = sum(one.bytes for one in program.extra if one.category is Category.INPUTS) // 2
    assert fold_program(program).static - captured == steps.before == steps.end


def own(model: str = "qwen3.5-9b", **flags: str) -> ResolvedPlan:
    flags = {"gpus": "16", "mbs": "1", "seq": "4096", "model": model, "loss": "chunked", **flags}
    return resolve(read_plan(None, {**JOB, **flags}).plan)


@pytest.mark.parametrize("name", ["qwen3.5-4b", "qwen3.5-27b"])
def test_a_model_has_as_many_parameters_as_transformers_counts(name: str) -> None:
    """Of its text part, of four layers."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    spec = load_spec(name).model_copy(update={"layers": 4})
    sizes = {"num_hidden_layers": 4, "hidden_size": spec.hidden, "intermediate_size": spec.ffn}
    sizes |= {"num_attention_heads": spec.heads, "num_key_value_heads": spec.kv_heads, "vocab_size": spec.vocab}
    given: Any = {**sizes, "linear_num_value_heads": spec.linear_value_heads}
    config = Qwen3_5TextConfig(**given, tie_word_embeddings=spec.tied_embeddings)
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config)
    assert sum(one.numel() for one in model.parameters()) == parameters(spec)


def test_parameters_are_those_of_its_code() -> None:
    """Of one layer of 35B-A3B with a delta net: 16 heads of keys, 32 of values, of 128 features each; 256 experts of
    512 features, and one more with a gate; two norms."""
    h, keys, values = 2048, 16 * 128, 32 * 128
    delta = h * (2 * keys + 2 * values + 2 * 32) + 4 * (2 * keys + values) + 2 * 32 + 128 + values * h
    layer = delta + 256 * 3 * h * 512 + 256 * h + 3 * h * 512 + h + 2 * h
    one, two = (
        sum(x.elements for x in programs_of(own("qwen3.5-35b-a3b", layers=count), Options())[0].parameter_tensors())
        for count in ("1", "2")
    )
    assert two - one == layer


def test_what_is_saved_without_recompute() -> None:
    """A delta net's layer, of each token: of two norms what enters and is normed, in fp32; queries, keys and values
    before the convolution, and of a head two numbers of its decay and its step; the rule's queries and keys, normed,
    for 32 heads, with reciprocal norms, values, sums of decays, steps, and 64 numbers of each chunk's inverse a head;
    of the gated norm what enters, is normed and weighed, the gate and its ``silu``, and the product, all but two in
    fp32; and the MLP's four."""
    (program,) = programs_of(own(layers="5", loss="plain"), Options())
    layer = next(span.module for span in program.spans if span.module.name == "layer")
    n, h, f, keys, values, v = 4096, 4096, 12288, 16 * 128, 32 * 128, 32
    norms = 2 * (8 * h + 4 + 2 * h)
    projected = 2 * (2 * keys + values) + 4 * v * 2 + 2 * v
    rule = 2 * 3 * values + 4 * v * 3 + 2 * v * 64
    gated = 4 * values * 2 + 4 * v + 2 * values + 4 * values * 2 + 2 * values
    mlp = 2 * f * 4
    kept = layer.first.forward_fold.net_by[list(Category).index(Category.ACTIVATIONS)]
    assert abs(kept - n * (norms + projected + rule + gated + mlp)) < n * 16


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"tp": "2"}, "layout.tp = 2: must be 1 with torchtitan's qwen3_5"),
        ({"cp": "2"}, "layout.cp = 2: must be 1 with torchtitan's qwen3_5"),
        (
            {"tied-embeddings": "true"},
            "must be false in torchtitan's qwen3_5, which shares no weight: --tied-embeddings false",
        ),
        ({"ep": "2"}, "layout.ep = 2: must be 1: qwen3.5-9b has no experts"),
        ({"dtype": "fp32"}, "precision.dtype = fp32: must be bf16"),
        ({"fp8": "rowwise"}, "precision.fp8 = rowwise: "),
        ({"compile": "true"}, "fsdp.compile = true: must be false with torchtitan's qwen3_5"),
    ],
)
def test_what_is_refused(flags: dict[str, str], says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)) as caught:
        programs_of(own(**flags), Options())
    assert "\n" not in str(caught.value)
