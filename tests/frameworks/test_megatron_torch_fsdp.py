"""PyTorch's FSDP2 in Megatron-Core: what a rank keeps, by hand, and what is refused. Passes are compared with the real
code in ``tests/validate/test_megatron.py``."""

from __future__ import annotations

import pytest

from memplan import suggest
from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.replay import replay
from memplan.allocator.timeline import timeline
from memplan.frameworks.megatron.modules import stage_entries
from memplan.frameworks.megatron.programs import programs, stages_of
from memplan.frameworks.megatron.torch_fsdp import units_of
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Category, Hold
from memplan.tape.program import Program, fold_program

from .test_megatron import plan, refusal

KIB = 1024


def sharded(**flags: object) -> Plan:
    return plan(**{"torch_fsdp": "reshard", "dp": 4, "layers": 4} | flags)


def program(**flags: object) -> Program:
    (made,) = programs(resolve(sharded(**flags)), Options())
    return made


def bytes_of(made: Program, category: Category) -> int:
    assert made.kept is not None
    return made.kept.between.net_by[category]


# -- what a rank keeps -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "main", "copies"), [("bf16", 4, 4), ("fp32", 0, 4)])
def test_shards_of_what_is_kept(dtype: str, main: int, copies: int) -> None:
    """A quarter of parameters, of main parameters (4 bytes), of both moments (8), and of what the step leaves: copies
    of gradients in fp32, or of fp32 parameters the gradients. Each of a layer's tensors is rounded to 512 bytes."""
    made = program(dtype=dtype)
    n = made.parameters()
    assert n == sum(-(-one.shape[0] // 4) * one.elements // one.shape[0] for one in made.parameter_tensors())
    size, slack = (2 if dtype == "bf16" else 4), 50 * KIB
    assert 0 <= bytes_of(made, Category.PARAMETERS) - size * n <= slack
    assert 0 <= bytes_of(made, Category.MAIN_PARAMETERS) - main * n <= slack
    assert 0 <= bytes_of(made, Category.OPTIMIZER_STATES) - 8 * n <= slack
    assert 0 <= bytes_of(made, Category.GRADIENTS) - copies * n <= slack


def test_building_holds_the_whole_model_or_a_module_at_a_time() -> None:
    """All parameters and the first module's shards; out of host memory the largest module, the embedding, alone."""
    whole = program()
    n = sum(one.elements for one in whole.parameter_tensors())
    assert whole.initialisation is not None
    assert 0 <= whole.initialisation - 2 * n <= 2 * n // 4 + 60 * KIB
    one = program(torch_fsdp_host_init="true")
    word = next(parameter for parameter in one.parameter_tensors() if parameter.name == "word.weight")
    assert one.initialisation is not None
    assert one.initialisation < whole.initialisation
    assert one.kept is not None
    assert whole.kept is not None
    assert one.kept.between.net == whole.kept.between.net
    assert max(event.bytes for event in one.kept.construction if isinstance(event, Hold)) == 2 * word.elements


def test_a_step_lets_units_gradients_go_one_after_the_other() -> None:
    """Copies of matrices' gradients come first: when the last one, the output layer's, is made, the embedding's
    gradient has ended alone, for every layer's norms are yet to come."""
    made = program(dp=1)
    folded = fold_program(made)
    tensors = made.parameter_tensors()
    word = next(one for one in tensors if one.name == "word.weight").elements
    n, vectors = sum(one.elements for one in tensors), sum(one.elements for one in tensors if len(one.shape) == 1)
    by_hand = folded.static - 4 * vectors + 2 * (n - word)
    assert abs(folded.step_peak - by_hand) <= 60 * KIB
    (replayed,) = replay((made,), AllocatorSettings(), ())
    assert replayed.allocated >= folded.peak


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"torch_fsdp": "keep"},
        {"recompute": "full"},
        {"recompute": "selective"},
        {"transformer_impl": "local"},
        {"dtype": "fp32", "gbs": 4},
        {"cross_entropy_fusion": "te"},
        {"tp": 2, "sequence_parallel": "true"},
        {"cp": 2},
        {"optimizer": "sgd"},
        {"logits_dtype": "fp32"},
    ],
)
def test_every_iteration_leaves_what_it_found_and_the_replay_agrees(flags: dict[str, object]) -> None:
    made = program(**flags)
    folded = fold_program(made)
    (replayed,) = replay((made,), AllocatorSettings(), ())
    assert replayed.static == folded.static
    assert replayed.allocated == folded.peak
    assert all(size >= 0 for size in folded.peak_by)
    timeline(made, AllocatorSettings(), (), replayed.breakdown)


# -- units -----------------------------------------------------------------------------------------------


def wrapped(**flags: object) -> list[tuple[str, tuple[str, ...]]]:
    stages = stages_of(resolve(sharded(layers=2, **flags)), Options())
    assert stages.torch_fsdp is not None
    (chunk,) = stages.program(0, stage_entries(resolve(sharded(layers=2, **flags)))[0]).order.chunks
    _, _, *spans, _ = chunk.spans
    return [(unit.name, unit.next_backward) for unit in units_of(spans, stages.torch_fsdp)]


def test_what_is_gathered_ahead_in_backward() -> None:
    """``set_modules_to_backward_prefetch`` where something is recomputed: the module that was wrapped before. Before
    layers that is a table of rotary positions, which has no parameters; local layers' output layer is no unit."""
    nobody = [("model", ()), ("embedding", ()), ("layer.0", ()), ("layer.1", ()), ("head", ())]
    assert wrapped() == nobody
    rotary = [("embedding", ()), ("layer.0", ("layer.0",)), ("layer.1", ("layer.0",)), ("head", ("layer.1",))]
    assert wrapped(recompute="full", positions="rotary")[1:] == rotary
    learned = [("embedding", ()), ("layer.0", ("embedding",)), ("layer.1", ("layer.0",))]
    assert wrapped(recompute="selective", positions="learned", transformer_impl="local")[1:] == learned


# -- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"pp": 2}, "layout.pp = 2: must be 1 with PyTorch's FSDP2 (megatron.torch_fsdp), as in Megatron-Core"),
        ({"zero": 1}, "layout.zero = 1: must be 0 with PyTorch's FSDP2"),
        ({"tied_embeddings": "true"}, "model.tied_embeddings = true: must be false with PyTorch's FSDP2"),
        ({"dtype": "fp16"}, "precision.dtype = fp16: must be bf16 or fp32 with PyTorch's FSDP2"),
        ({"optimizer": "muon"}, "optimizer.name = muon: must be adam, adamw or sgd with PyTorch's FSDP2"),
        ({"megatron_fsdp": "optim", "zero": 0}, "must be"),
        ({"gradient_accumulation_fusion": "true"}, "megatron.gradient_accumulation_fusion = true: must be false with"),
        ({"gradients": "fp32"}, "precision.gradients = fp32: must be bf16 with PyTorch's FSDP2"),
        ({"fp8": "delayed"}, "precision.fp8 = delayed: must be left out with PyTorch's FSDP2"),
        ({"cuda_graph_impl": "full_iteration", "check_for_nan": False}, "cuda_graphs = full_iteration: must be left"),
        ({"offload_modules": "core_attn"}, "megatron.offload_modules = [core_attn]: must be left out with"),
        ({"bucket_size": 1000}, "megatron.bucket_size = 1000: must be left out with PyTorch's FSDP2"),
        ({"num_buckets": 4}, "megatron.buckets = 4: must be left out with PyTorch's FSDP2"),
        ({"recompute": "full", "recompute_layers": 2}, "recompute.layers = 2: must be 1 with PyTorch's FSDP2"),
        ({"torch_fsdp": "none", "torch_fsdp_host_init": "true"}, "must be false without PyTorch's FSDP2"),
        (
            {"experts": 4, "expert_top_k": 2, "expert_ffn": 64},
            "model.experts = 4: must be left out with PyTorch's FSDP2 (megatron.torch_fsdp): it is not modelled yet",
        ),
    ],
)
def test_what_is_refused(flags: dict[str, object], line: str) -> None:
    assert line in refusal(**{"torch_fsdp": "reshard", "dp": 4, "layers": 4, "gbs": 8} | flags)


def test_layouts_are_not_searched() -> None:
    with pytest.raises(PlanError, match=r"megatron.torch_fsdp = reshard: must be none: layouts with PyTorch's FSDP2"):
        suggest(sharded(gpu="h100-80gb"))
