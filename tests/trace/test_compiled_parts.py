"""A compiled model that ``fully_shard``'s hooks cut at every layer: as it was learnt, beside counts by hand, and (slow)
beside torch's own run of it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compiled_models import SHARDED
from memplan.cli import main
from memplan.estimate import fold, programs_of
from memplan.frameworks.plain import compiled
from memplan.layers.compiled_parts import CompiledParts
from memplan.layers.module import Options
from memplan.notices import warnings
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.report.names import plan_text
from memplan.tape.events import Category, rounded
from memplan.tape.program import Program

B, S, H, F, KV, HEADS, VOCAB = 1, 4096, 4096, 14336, 1024, 32, 128256
EIGHT = {"model": "llama-3-8b", "gpu": "h100-80gb", "mbs": str(B), "seq": str(S), "torch-compile": "true"}
REGIONS = {"compile-regions": "true"}
FULL = {"recompute": "full"}


def planned(**flags: str) -> Any:
    return resolve(read_plan(None, EIGHT | SHARDED | flags).plan)


def program(**flags: str) -> Program:
    (made,) = programs_of(planned(**flags), Options())
    return made


def saved(**flags: str) -> int:
    """Bytes that one of the middle layers keeps, of what is no parameter."""
    part = compiled.parts_of(planned(**flags)).parts["layer"]
    begun = {one.number: one for one in part.forward if not isinstance(one, int)}
    sizes = {"bf16": 2, "fp32": 4, "int64": 8}

    def size(number: int) -> int:
        elements = 1
        for dim in begun[number].shape:
            elements *= dim
        return rounded(elements * sizes[begun[number].dtype])

    return sum(size(number) for number in part.saved if number in begun)


T = B * S
WIDE, OF_FFN, NARROW, PER_TOKEN = (rounded(2 * T * size) for size in (H, F, KV, 2))
LOGARITHMS, RANDOM = rounded(4 * T * HEADS), 2 * 512


def test_what_a_layer_saves_counted_by_hand() -> None:
    """Beside its input, in bf16: both norms' outputs, the query, keys and values repeated for every head, attention's
    output and what its projection makes of it, the mask; gate, up and their product; in fp32 the norms' factors and the
    softmax's; and attention's random state."""
    assert saved() == 7 * WIDE + rounded(2 * B * S * S) + 3 * OF_FFN + 2 * PER_TOKEN + LOGARITHMS + RANDOM


def test_what_a_region_saves_counted_by_hand() -> None:
    """The same without a mask, and keys and values of fewer heads as they are: of flash attention."""
    assert saved(**REGIONS) == 5 * WIDE + 2 * NARROW + 3 * OF_FFN + 2 * PER_TOKEN + LOGARITHMS + RANDOM


@pytest.mark.parametrize("flags", [{}, REGIONS])
def test_recomputed_it_saves_its_input_alone(flags: dict[str, str]) -> None:
    assert saved(**flags, **FULL) == 0


@pytest.mark.parametrize("flags", [{}, REGIONS, FULL, {**REGIONS, **FULL}])
def test_every_tensor_ends_or_is_handed_on(flags: dict[str, str]) -> None:
    """Once; gradients have the shapes of the parameters."""
    learnt = compiled.parts_of(planned(**flags))
    assert CompiledParts.from_json(learnt.to_json()).to_json() == learnt.to_json()
    assert learnt.parts.keys() == {"layer", "norm"} | (set() if "compile-regions" in flags else {"head"})
    for part in learnt.parts.values():
        begun = {one.number: one for one in (*part.forward, *part.backward) if not isinstance(one, int)}
        ended = [one for one in (*part.forward, *part.backward) if isinstance(one, int) and one in begun]
        handed = {part.input_gradient, *(number for _, _, number in part.parameters)}
        returned = set(part.outputs) - set(part.saved)
        assert sorted(ended) == sorted(begun.keys() - handed - returned)
        for _, shape, number in part.parameters:
            assert [size for size in begun[number].shape if size > 1] == [*shape]


def test_the_peak_by_hand() -> None:
    """In the head's backward: 30 layers more add what each saves, with its input; and of logits there are those that
    were saved, zeros for their gradient, and the gradient itself."""
    (whole,), (fewer,) = fold(planned()), fold(planned(layers="2"))
    assert whole.peak - whole.static - (fewer.peak - fewer.static) == 30 * (saved() + WIDE)
    assert whole.peak_by[Category.LOGITS] == 3 * rounded(2 * T * VOCAB)


def test_units_are_those_of_the_model_without_the_compiler() -> None:
    plain = program(**{"torch-compile": "false"})
    for compiled_one in (program(), program(**REGIONS)):
        assert compiled_one.entries == plain.entries
        assert compiled_one.elements == plain.elements
        assert {one.name for one in compiled_one.parameter_tensors()} == {one.name for one in plain.parameter_tensors()}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"mbs": "3"}, "was not learnt of mbs 3 and seq 4096 in bf16, under fsdp: `memplan trace --learn`"),
        ({"fsdp-version": "1"}, "must be false with fsdp.version 1, whose units are views of flat parameters"),
        ({"framework": "ddp", **REGIONS}, r"compile_regions = true: must be false with framework ddp"),
        ({"torch-compile": "false", **REGIONS}, "compile_regions = true: must be false without compile"),
        ({"autocast": "true"}, "precision.autocast = true: must be false under FSDP2"),
        ({"framework": "deepspeed", "zero": "3"}, "compile = true: must be false with framework deepspeed"),
        ({"fsdp-code": "torchtitan"}, r"must be false with torchtitan's code, .* \(--compile\)"),
        ({"lora-rank": "8"}, "must be false with adapters"),
    ],
)
def test_what_is_refused_in_one_line(flags: dict[str, str], says: str) -> None:
    with pytest.raises(PlanError, match=says) as caught:
        fold(planned(**flags))
    assert "\n" not in str(caught.value)


def test_a_report_says_which_attention_runs() -> None:
    assert plan_text(planned()).endswith(" · sdpa attention")
    assert plan_text(planned(**REGIONS)).endswith(" · flash attention")
    codes = {one.code for one in warnings(planned(gpu="a100-80gb"), programs_of(planned(), Options()))}
    assert "compiled-for-h100" in codes


def test_variants_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for flag, value in (EIGHT | SHARDED).items() for word in (f"--{flag}", value) if value != "true"]
    assert main(["estimate", *words, "--torch-compile", "--vary", "compile-regions=false,true", "-q"]) == 0
    assert "compile" in capsys.readouterr().out


SMALL = {"hidden": "512", "heads": "8", "kv-heads": "2", "head-dim": "64", "ffn": "1408", "vocab": "1008"}
SMALL |= {"layers": "4", "mbs": "2", "seq": "640", "gpus": "4"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("regions", [False, True])
def test_a_step_that_runs_inductors_code(regions: bool, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ``fully_shard``: every named point, and every layer."""
    import torch
    from transformers.models.llama import modeling_llama

    from memplan.trace import compiled_parts, step
    from memplan.trace.comparison import compared
    from memplan.trace.framework import job_of_plan

    from ..oracle.compiled_parts import compiled as running
    from .test_step import SCALARS

    flags = {**SMALL, "recompute": recompute, **(REGIONS if regions else {})}
    plan = planned(**flags)
    job = job_of_plan(compiled.without_compiler(plan))
    parts, *within = compiled_parts.parts_in(job, regions=regions)
    again = {name: one._replace(directions=deepcopy(one.directions)) for name, one in parts.items()}
    learnt = compiled_parts.code_of_parts(parts, *within)  # Inductor's passes change its graphs
    monkeypatch.setattr(compiled.cache, "load", lambda *_: learnt)
    (estimated,) = programs_of(plan, Options())
    made = step.made
    monkeypatch.setattr(step, "made", lambda job, **how: running(made(job, **how), again))
    if not regions:
        mask = 2, 1, 640, 640
        monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **_: torch.empty(mask, dtype=torch.bool))
    found = compared(step.traced_step(job), estimated)
    for point in found.points:
        assert point.estimated is not None
        assert 0 <= point.traced - point.estimated <= SCALARS, point
    ahead = {("layer.3", "backward")}  # which gathers for itself in the head's backward, as the estimate has it
    rows = [row for row in found.rows if row.entry.startswith("layer.") and (row.entry, row.phase) not in ahead]
    assert len(rows) == 7
    for row in rows:
        assert row.estimated is not None
        assert (row.traced.net, row.traced.peak) == (row.estimated.net, row.estimated.peak), row


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("regions", [False, True])
def test_parts_are_those_of_a_real_run(
    regions: bool, recompute: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a tiny Llama on the CPU, whose layers are more than Dynamo compiles anew (``recompile_limit``): compiled as
    Accelerate does, then sharded. The same graphs, operation by operation, and the same tensors saved."""
    import torch
    from accelerate.utils.other import compile_regions_fsdp2
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM, LlamaConfig

    from memplan.trace import compiled_parts, inductor
    from memplan.trace.framework import job_of_plan

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 10, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 128, "num_key_value_heads": 2, **sizes}
    flags = {"mbs": "2", "seq": "16", "recompute": recompute}
    job = job_of_plan(compiled.without_compiler(planned(**flags)), config)
    monkeypatch.setattr(inductor, "fused_attention", torch.nn.functional.scaled_dot_product_attention)
    ours, model, _ = compiled_parts.found_in(job, regions=regions)

    net = AutoModelForCausalLM.from_config(LlamaConfig(**config, use_cache=False), attn_implementation="sdpa").train()
    if recompute == "full":
        net.gradient_checkpointing_enable()
    theirs = list[compiled_parts.Found]()
    backend = compiled_parts.noting(theirs)
    monkeypatch.setenv("TRANSFORMERS_SDPA_FORCE_GQA", "1" if regions else "")
    torch._dynamo.reset()
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        given: Any = {"mesh": init_device_mesh("cpu", (1,)), "mp_policy": MixedPrecisionPolicy(torch.bfloat16)}
        layers = [*net.model.layers]
        net = compile_regions_fsdp2(net, backend=backend) if regions else torch.compile(net, backend=backend)
        for layer in layers:
            fully_shard(layer, **given)
        fully_shard(net, **given)
        ids = torch.randint(0, 128, (2, 16))
        fields = {"attention_mask": torch.ones_like(ids), "labels": ids, "num_items_in_batch": torch.tensor(30)}
        with inductor.as_fused():  # random numbers as on a GPU
            for _ in range(2):
                net(input_ids=ids, **fields).loss.backward()
    finally:
        distributed.destroy_process_group()

    def told(found: list[compiled_parts.Found]) -> dict[str, Any]:
        parts = compiled_parts.named_parts(found, model, regions=regions)
        return {name: (one.inputs, *map(operations, one.directions.values())) for name, one in parts.items()}

    def operations(graph: Any) -> list[Any]:
        values = lambda node: [getattr(x.meta.get("val"), "shape", None) for x in node.all_input_nodes]  # noqa: E731
        return [(str(node.target), node.name, values(node)) for node in graph.graph.nodes if node.op != "placeholder"]

    assert told(ours) == told(theirs)
