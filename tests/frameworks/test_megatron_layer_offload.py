"""Whole layers on the host, by hand: Transformer Engine's own words are that (N - k) layers' memory is left."""

from __future__ import annotations

import pytest

from memplan import suggest
from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.replay import replay
from memplan.allocator.timeline import timeline
from memplan.estimate import estimate
from memplan.frameworks.megatron.layer_offload import LEAST, pinned
from memplan.frameworks.megatron.programs import programs
from memplan.layers.module import Module, Options
from memplan.plan.errors import PlanError
from memplan.plan.resolve import resolve
from memplan.tape.events import Category, Drop, Hold
from memplan.tape.program import Program, fold_program

from .test_megatron import plan, refusal

LAYERS = 8


def program(layers: int, **flags: object) -> Program:
    given = {"layers": LAYERS, "dp": 2, "seq": 2048, "gbs": 4} | flags
    (made,) = programs(plan(**given, offload_layers=layers), Options())
    return made


def live(tape: object, ids: set[int]) -> int:
    """Bytes of tensors with ``ids`` that ``tape`` begins, less those that it ends."""
    assert isinstance(tape, tuple)
    sign = {Hold: 1, Drop: -1}
    return sum(sign.get(type(one), 0) * one.bytes for one in tape if getattr(one, "tensor", 0) in ids)


def module_at(made: Program, name: str) -> Module:
    return next(span.module for span in made.spans if name in span.names)


@pytest.mark.parametrize("count", [1, 3, 7])
@pytest.mark.parametrize("flags", [{}, {"hidden_dropout": 0.1, "tp": 2, "sequence_parallel": "true"}, {"gbs": 8}])
def test_so_many_layers_are_left_when_forward_has_ended(count: int, flags: dict[str, object]) -> None:
    """Of each layer that is away nothing is left but its small tensors: attention's sums of exponentials (16 heads,
    fp32), deviations of two norms, and a random state."""
    whole, away = program(0, **flags), program(count, **flags)
    tp = 2 if "tp" in flags else 1
    small = 4 * 16 // tp * 2048 + 2 * 4 * 2048 // tp + 512
    saved = module_at(whole, "layer.1").steady.forward_fold.net
    gone = fold_program(whole).after_forward - fold_program(away).after_forward
    assert gone == count * (saved - small)
    assert away.host >= gone
    folded = fold_program(away)
    passes = away.order.chunks[0].passes
    assert passes.forward.net + passes.backward.net == 0
    (replayed,) = replay((away,), AllocatorSettings(), ())
    assert (replayed.static, replayed.allocated) == (folded.static, folded.peak)
    timeline(away, AllocatorSettings(), (), replayed.breakdown)


def test_when_layers_leave_and_come_back() -> None:
    """Two of eight: the first one's tensors end before layer 6 runs forward, the second one's before layer 7; they come
    back before the backward of layers 5 and 6, and end before that of the layer below."""
    made = program(2)
    names = [f"layer.{at}" for at in range(LAYERS)]
    forward = {name: module_at(made, name).steady.forward for name in (*names, "head")}
    backward = {name: module_at(made, name).steady.backward for name in (*names, "embedding")}

    def begun(tape: object) -> set[int]:
        return {one.tensor for one in tape if isinstance(one, Hold) and one.tensor < -10}  # type: ignore[attr-defined]

    first, second = begun(forward["layer.0"]), begun(forward["layer.1"])
    assert first
    assert live(forward["layer.6"], first) < 0
    assert live(forward["layer.7"], second) < 0
    assert all(live(forward[name], first | second) == 0 for name in names[2:6])
    again = {name: begun(backward[name]) for name in names}
    assert [name for name, ids in again.items() if ids] == ["layer.5", "layer.6"]
    emptied = 2 * 2 * 2048 * 256  # outputs of both norms, which backward empties itself
    assert [live(backward[at], again[by]) for at, by in (("layer.1", "layer.6"), ("layer.0", "layer.5"))] == [
        -emptied
    ] * 2
    ended = [live(backward[at], again[by]) for at, by in (("layer.0", "layer.6"), ("embedding", "layer.5"))]
    assert ended == [emptied - live(backward[by], again[by]) for by in ("layer.6", "layer.5")]


MB = 1 << 20
LOW = {
    "delayed": ({"gpu": "h100-80gb"}, ("fp8_transposed",), 4),
    "tensorwise": ({"gpu": "h100-80gb"}, ("fp8_transposed",), 3),
    "blockwise": ({"gpu": "h100-80gb"}, ("columns",), 3),
    "mxfp8": ({"gpu": "b200"}, ("columns", "column_scales"), 3),
}
"""By recipe, what Transformer Engine 2.17's own ``OffloadableLayerState.push_tensor`` took of ``Linear`` and
``LayerNormLinear`` (8,192 tokens of 1,024 features): the columns of the input, and scales of 262,144 elements and more.
The input of the projection behind attention is saved in 16 bits but with delayed scaling."""


@pytest.mark.parametrize("recipe", LOW)
def test_quantised_inputs_go_in_parts(recipe: str) -> None:
    more, parts, count = LOW[recipe]
    made = program(2, seq=8192, hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn=1024, fp8=recipe, **more)
    layer = module_at(made, "layer.0").steady
    gone = [one for one in layer.forward if isinstance(one, Hold) and one.tensor < -10]
    low = [one for one in gone if one.name.rpartition("linear_")[2].endswith(parts)]
    assert len(low) == count * len(parts)
    assert sum(one.bytes for one in low) == count * (8 * MB + (MB // 4 if recipe == "mxfp8" else 0))
    assert {one.name for one in gone if one.shape == (8192, 1, 1024)} == {
        "self_attention.linear_proj_residual", "mlp.linear_fc2_residual"
    }  # fmt: skip
    assert sum(one.bytes for one in gone) == sum(one.bytes for one in low) + 2 * 16 * MB + 4 * 16 * MB + 32 * MB
    whole = program(0, seq=8192, hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn=1024, fp8=recipe, **more)
    kept = fold_program(whole).after_forward - fold_program(made).after_forward
    assert kept == 2 * sum(one.bytes for one in gone)
    assert [made.order.chunks[0].passes.forward.net + made.order.chunks[0].passes.backward.net] == [0]


FSDP = {"megatron_fsdp": "optim_grads_params", "gradient_accumulation_fusion": "false"}


@pytest.mark.parametrize("more", [{}, {"megatron_fsdp_double_buffer": "true", "tp": 2, "sequence_parallel": "true"}])
@pytest.mark.parametrize("low", [{}, {"fp8": "tensorwise", "fp8_parameters": "true"}])
def test_the_same_goes_beside_megatron_fsdp(more: dict[str, object], low: dict[str, object]) -> None:
    whole, away = (program(count, **FSDP, **more, **low) for count in (0, 2))
    gone = fold_program(whole).after_forward - fold_program(away).after_forward
    plain = {"zero": 1, "gradient_accumulation_fusion": "false"} | more | low
    plain.pop("megatron_fsdp_double_buffer", None)
    alone = [fold_program(program(count, **plain)).after_forward for count in (0, 2)]
    assert gone == alone[0] - alone[1] > 0
    assert away.host - whole.host == program(2, **plain).host
    folded, passes = fold_program(away), away.order.chunks[0].passes
    assert passes.forward.net + passes.backward.net == 0
    (replayed,) = replay((away,), AllocatorSettings(), ())
    assert (replayed.static, replayed.allocated) == (folded.static, folded.peak)
    timeline(away, AllocatorSettings(), (), replayed.breakdown)


def test_whose_hooks_run_first() -> None:
    """The offloading's context is around a layer's call, so that it ends tensors before parameters are gathered; hooks
    on a tensor, which gather, run before those on its node."""
    made = program(2, **FSDP, megatron_fsdp_unit_size=1)
    tapes = module_at(made, "layer.6").steady

    def first(tape: object, category: Category, kind: type = Hold) -> int:
        found = [at for at, one in enumerate(tape) if isinstance(one, kind) and one.category is category]  # type: ignore[arg-type, var-annotated]
        return found[0]

    gathered, saved = Category.GATHERED_PARAMETERS, Category.ACTIVATIONS
    assert first(tapes.forward, saved, Drop) < first(tapes.forward, gathered)
    assert first(tapes.backward, gathered) < first(tapes.backward, saved)


def test_small_tensors_stay() -> None:
    """Layers whose every tensor has fewer than 262,144 elements lose nothing: 64 tokens of 1,024 features at most."""
    assert LEAST == 262_144
    small = program(4, seq=64, hidden=256, heads=16, kv_heads=16, head_dim=16, ffn=1024)
    assert small.host == 0
    assert [pinned(size) for size in (1 << 20, (1 << 20) + 512)] == [1 << 20, 1 << 21]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"offload_layers": 8}, "megatron.offload_layers = 8: must be less than the 8 layers, as in Megatron-Core"),
        ({"pp": 2}, "megatron.offload_layers = 2: must be 0 with pipeline parallelism"),
        ({"recompute": "selective"}, "must be 0 with recompute, as in Megatron-Core"),
        ({"transformer_impl": "local"}, "must be 0 with local layers, as in Megatron-Core"),
        ({"offload_modules": "core_attn"}, "must be 0 with megatron.offload_modules, as in Megatron-Core"),
        ({"cuda_graph_impl": "local"}, "must be 0 with CUDA graphs of layers, as in Megatron-Core"),
        (
            {"cuda_graph_impl": "full_iteration", "check_for_nan": "false"},
            "must be 0 with a CUDA graph of the iteration: it is not modelled yet",
        ),
        (
            {"cuda_graph_impl": "local", "offload_layers": 0, "offload_modules": "core_attn"},
            "must not be local with activations on the host other than expert_fc1 and moe_act, as in Megatron-Core",
        ),
        ({"te_version": "2.9"}, "must be 0 before Transformer Engine 2.10"),
        ({"cp": 2}, "must be 0 with context parallelism: it is not modelled yet"),
        ({"attention": "eager"}, "must be 0 with unfused attention: it is not modelled yet"),
        ({"torch_fsdp": "reshard"}, "must be 0 with PyTorch's FSDP2: it is not modelled yet"),
    ],
)
def test_what_is_refused(flags: dict[str, object], line: str) -> None:
    given = {"layers": LAYERS, "dp": 2, "gbs": 4, "offload_layers": 2}
    assert line in refusal(**given | flags)


def test_layouts_are_not_searched() -> None:
    with pytest.raises(PlanError, match=r"megatron.offload_layers = 2: must be 0: layouts with layers on the host"):
        suggest(plan(layers=LAYERS, dp=2, offload_layers=2, gpu="h100-80gb"))


def test_which_code_of_transformer_engine_offloads() -> None:
    """Fine-grained offloading wants NVTE_CPU_OFFLOAD_V1=1 (``validate_args``), whole layers the other code."""
    name = "NVTE_CPU_OFFLOAD_V1"
    modules = plan(offload_modules="core_attn")
    with_one = estimate(resolve(modules.model_copy(update={"environment": {name: "1"}})))
    assert with_one.stages == estimate(modules).stages
    assert not [note for note in with_one.warnings if name in note.message]
    for given, value, line in (
        (modules, "0", f"environment.{name} = 0: must be 1 with megatron.offload_modules"),
        (
            plan(offload_layers=2, layers=LAYERS),
            "1",
            "megatron.offload_layers = 2: must be 0 with NVTE_CPU_OFFLOAD_V1=1",
        ),
    ):
        with pytest.raises(PlanError, match=line):
            resolve(given.model_copy(update={"environment": {name: value}}))
