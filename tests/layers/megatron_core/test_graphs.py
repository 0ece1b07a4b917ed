"""CUDA graphs: what they keep, by hand, and what lies in their pool."""

import pytest

from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.passes import passes
from memplan.estimate import estimate
from memplan.frameworks.megatron.programs import programs
from memplan.layers.megatron_core.graphs import POOL
from memplan.layers.module import Module, Options
from memplan.plan.errors import PlanError
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.schedules.megatron_fold import layers_in_flight
from memplan.schedules.megatron_schedule import schedule
from memplan.tape.events import Drop, Hold, Tape
from memplan.tape.program import static

S, B, H = 128, 2, 256
FLAGS = {
    "model": "gpt2-xl", "layers": 8, "hidden": H, "heads": 2, "vocab": 512, "seq": S, "mbs": B, "gbs": 16, "gpus": 2,
    "pp": 2, "dp": 1, "framework": "megatron", "attention-dropout": 0, "hidden-dropout": 0, "embedding-dropout": 0,
}  # fmt: skip


def plan(**flags: object) -> ResolvedPlan:
    said = {name.replace("_", "-"): str(value) for name, value in flags.items()}
    return resolve(read_plan(None, {name: str(value) for name, value in FLAGS.items()} | said).plan)


@pytest.mark.parametrize(
    ("modules", "mask"), [({}, 1), ({"cuda_graph_modules": "attn"}, 1), ({"cuda_graph_modules": "mlp"}, 0)]
)
def test_what_layers_graphs_keep(modules: dict[str, str], mask: int) -> None:
    """On the first of two stages two micro-batches of 4 layers are in flight: 8 times the input (2 s b h) and, where
    attention is captured, a mask of s s b bytes; the gradients of an output and of an input."""
    with_graphs = programs(plan(cuda_graph_impl="transformer_engine", **modules), Options())[0]
    without = programs(plan(), Options())[0]
    hidden = 2 * S * B * H
    assert static(with_graphs).net - static(without).net == 8 * (hidden + mask * S * S * B) + 2 * hidden


@pytest.mark.parametrize(
    ("modules", "ends"), [({"cuda_graph_modules": "mlp"}, 1), ({"cuda_graph_modules": "attn"}, 0), ({}, 0)]
)
def test_what_attention_made_ends_where_a_graph_behind_it_has_a_copy(modules: dict[str, str], ends: int) -> None:
    """2 s b h bytes of each layer, whose norm would have saved them; the copy is among what graphs keep."""
    layers = [
        next(span.module for span in programs(one, Options())[0].spans if span.names[0] == "layer.0")
        for one in (plan(), plan(cuda_graph_impl="transformer_engine", **modules))
    ]
    usual, graphed = (one.steady.forward_fold.net for one in layers)
    assert usual - graphed == ends * 2 * S * B * H


DELTA = {
    "model": "qwen3.5-0.8b", "layers": 4, "hidden": H, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 512, "pp": 1,
    "gpus": 1, "gbs": B, "linear_key_heads": 2, "linear_value_heads": 4,
}  # fmt: skip


@pytest.mark.parametrize("modules", ["attn,mlp", "attn", "mlp"])
def test_gated_delta_nets_are_attention_of_a_graph(modules: str) -> None:
    """``get_layer_static_inputs`` and ``_layer_is_graphable`` ask whether a layer attends, not how: three of the four
    have gated delta nets, and where attention is captured all have a mask of s s b bytes among their inputs. In the
    pool is what captured parts make."""
    names = {name: value for name, value in DELTA.items() if name != "layers"}
    given = plan(layers=4, cuda_graph_impl="transformer_engine", cuda_graph_modules=modules, **names)
    with_graphs, without = (programs(one, Options())[0] for one in (given, plan(layers=4, **names)))
    hidden = 2 * S * B * H
    mask = S * S * B * ("attn" in modules)
    assert static(with_graphs).net - static(without).net == 4 * (hidden + mask) + 2 * hidden
    layer = next(span.module for span in with_graphs.spans if span.names[0] == "layer.0")
    pooled = {one.name: one.stream == POOL for one in layer.steady.forward if isinstance(one, Hold)}
    assert (pooled["rule"], pooled["mlp.linear_fc1"]) == ("attn" in modules, "mlp" in modules)


HYBRID = {
    "model": "nemotron-3-nano-30b-a3b", "layer_pattern": "MME*E", "hidden": H, "experts": 8, "expert_top_k": 2, "pp": 1,
    "gpus": 2, "ep": 2, "dp": 2, "vocab": 512, "heads": 4, "kv_heads": 2, "head_dim": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("modules", "inputs", "masks"), [("mamba", 2, 0), ("attn", 1, 1), ("attn,mamba,moe_router,moe_preprocess", 5, 1)]
)
@pytest.mark.parametrize("latent", [0, 64])
def test_what_graphs_of_a_hybrid_keep(modules: str, inputs: int, masks: int, latent: int) -> None:
    """Each layer is captured alone, and one micro-batch without a pipeline. Layers with experts, of which the router is
    captured, end with the experts' input (its projection, if there is one), the shared experts' output, the residual
    and the probabilities (s b, E) in bf16."""
    names = {name: value for name, value in HYBRID.items() if name != "layers"} | {"expert_latent": latent}
    given = plan(layers=5, cuda_graph_impl="transformer_engine", cuda_graph_modules=modules, **names)
    with_graphs, without = (static(programs(one, Options())[0]).net for one in (given, plan(layers=5, **names)))
    hidden = 2 * S * B * H
    ends = 2 * hidden + (2 * S * B * (latent or H) + 2 * hidden + 2 * S * B * 8 if inputs == 5 else 0)
    assert with_graphs - without == inputs * hidden + masks * S * S * B + ends


def test_layers_that_predict_further_tokens_are_in_no_graph_of_a_hybrid() -> None:
    """They are one stack of layers, which no graph runs."""
    given = plan(
        layers=5, cuda_graph_impl="transformer_engine", cuda_graph_modules="mamba", mtp_layers=1, mtp_pattern="M",
        **HYBRID,
    )  # fmt: skip
    pooled = {
        span.names[0]: any(isinstance(one, Hold) and one.stream == POOL for one in span.module.steady.forward)
        for span in programs(given, Options())[0].order.chunks[0].spans
    }
    assert pooled["layer.0"]
    assert not pooled["mtp"]


def test_layers_in_flight() -> None:
    """Interleaved with 4 chunks of 2 layers on the last of 2 stages: 6 passes ahead, and one more."""
    assert layers_in_flight(schedule(1, 2, 16, 4, 2, True, False), [2, 2, 2, 2]) == 14


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({}, set()),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "attn"}, {"attention"}),
        ({"cuda_graph_impl": "transformer_engine"}, {"attention", "mlp"}),
        ({"cuda_graph_impl": "full_iteration", "check_for_nan": "false"}, {"attention", "mlp", "ends"}),
    ],
)
def test_what_lies_in_the_pool(flags: dict[str, str], parts: set[str]) -> None:
    """What attention, the MLP and the ends of the model make, in forward and backward."""
    found = set()
    for program in programs(plan(**flags), Options()):
        for span in program.order.chunks[0].spans:
            tapes, is_layer = span.module.steady, span.names[0].startswith("layer.")
            for one in (*tapes.forward, *tapes.backward):
                if isinstance(one, Hold) and one.stream == POOL:
                    attends = "query" in one.name or "qkv" in one.name or "context" in one.name
                    found.add(
                        "ends" if not is_layer else "attention" if attends else "mlp" if "fc1" in one.name else ""
                    )
    assert found - {""} == parts


def test_the_pool_is_nobody_elses() -> None:
    """Memory of captured parts serves no other request: more is reserved for the same tensors."""
    given = estimate(plan(gpu="h100-80gb", cuda_graph_impl="full_iteration", check_for_nan=False)).stages[0]
    without = estimate(plan(gpu="h100-80gb")).stages[0]
    assert given.requested == without.requested
    assert given.reserved >= without.reserved


def test_an_output_from_the_pool_goes_back_into_it() -> None:
    """What a captured layer hands to the next stage, and what the schedule lets go of, is a block of the pool."""
    given = plan(pp=2, cuda_graph_impl="transformer_engine", cuda_graph_modules="mlp")
    order = programs(given, Options())[0].order
    of = passes(order.chunks[0], AllocatorSettings())
    assert of.of("forward", "steady").stream == POOL
    assert of.of("backward", "steady").stream == 0, "no gradient leaves the first stage"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"cuda_graph_impl": "transformer_engine", "transformer_impl": "local"}, "local layers"),
        ({"cuda_graph_modules": "attn"}, "without megatron.cuda_graphs"),
        (
            {"cuda_graph_impl": "transformer_engine", "env": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"},
            "NCCL_GRAPH_REGISTER=0",
        ),
    ],
)
def test_refused(flags: dict[str, str], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        estimate(plan(**flags))


def test_captures_before_the_first_iteration() -> None:
    """Attention of two micro-batches of 4 layers is captured beside parameters, gradients and main parameters; then no
    iteration allocates what lies in the graphs' pool, which stays reserved."""
    flags = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "attn", "gpu": "h100-80gb"}
    first, later = (estimate(plan(cuda_graph_warmup_steps=steps, **flags)).stages[0] for steps in (0, 3))
    assert first.static == later.static
    assert first.allocated is not None
    assert later.allocated is not None
    assert first.allocated < later.allocated
    begun, usual = first.moments["initialisation"], later.moments["initialisation"]
    assert begun is not None
    assert usual is not None
    assert begun > usual
    program, without = (programs(plan(cuda_graph_warmup_steps=steps, **flags), Options())[0] for steps in (0, 3))
    pooled = [pool_of(span.module.first.forward) for span in without.spans if span.names[0].startswith("layer.")]
    assert all(pooled)
    assert not any(pool_of(span.module.first.forward) for span in program.spans)
    assert program.kept is not None
    there = sum(one.bytes for one in program.kept.workspaces if isinstance(one, Hold) and one.name.startswith("graph_"))
    in_flight = 8 * saved_in_pool(next(span.module for span in without.spans if span.names[0].startswith("layer.")))
    assert program.initialisation is not None
    left = program.initialisation - program.kept.construction.excursion.net - there
    assert in_flight <= left <= in_flight + 20 * 2 * S * B * H + 2**26
    assert program.set_aside % 2**21 == 0
    assert program.set_aside >= in_flight
    (whole,) = (programs(plan(cuda_graph_impl="transformer_engine", cuda_graph_warmup_steps=0), Options())[:1],)
    assert whole[0].set_aside == 0, "graphs of whole layers: an iteration before captures is estimated"


@pytest.mark.parametrize("modules", [{}, {"cuda_graph_modules": "attn"}])
@pytest.mark.parametrize("pp", [1, 2])
def test_own_graphs_take_layers_out_of_iterations(pp: int, modules: dict[str, str]) -> None:
    """Megatron-Core's own graphs run whole layers, whichever part is named. What a layer saves lies in the pool, for
    as many micro-batches as are in flight, beside a copy of each one's input; the first iteration has it, too."""
    given, without = plan(pp=pp, gpus=pp, cuda_graph_impl="local", **modules), plan(pp=pp, gpus=pp)
    for of, plain in zip(programs(given, Options()), programs(without, Options()), strict=True):
        chunk, usual = of.order.chunks[0].passes, plain.order.chunks[0].passes
        layers = [span for span in plain.spans if span.names[0].startswith("layer.")]
        count = sum(len(span.names) for span in layers)
        flight = pp - of.stage
        saved = count * layers[0].module.steady.forward_fold.net
        left = usual.forward.net - chunk.forward.net
        hidden = 2 * S * B * H
        sends = hidden * (of.stage < pp - 1)
        embedded = hidden * (of.stage == 0)
        assert left == saved - sends + embedded, "a graph keeps a copy of its input; what is sent is no graph's"
        assert left + usual.backward.net == chunk.backward.net
        assert flight * saved <= of.set_aside <= flight * (saved + hidden) + 24 * hidden + 4 * S * S * B * 2
        assert of.kept is not None
        assert plain.kept is not None
        assert of.initialisation is not None
        assert static(of).net == static(plain).net
        begun = plain.kept.construction.excursion.net + plain.kept.workspaces.excursion.net
        assert of.initialisation >= begun + plain.order.whole.peak
        assert of.order.whole.peak < plain.order.whole.peak


def test_own_graphs_of_a_hybrid() -> None:
    """Of experts two graphs are made, before and behind their exchange; layers that predict further have graphs."""
    names = dict(HYBRID, layers=5, mtp_layers=1, mtp_pattern="M", cuda_graph_impl="local")
    several: list[dict[str, object]] = [{"cuda_graph_modules": "moe_router"}, {"cuda_graph_modules": "attn,mamba"}]
    program, plain = (programs(plan(**names, **more), Options())[0] for more in several)
    assert program.set_aside > 0
    kept, left = ({span.names[0]: span.module.steady for span in one.spans} for one in (program, plain))
    mamba, experts = "layer.0", "layer.2"
    assert len(left[mamba].forward) < len(kept[mamba].forward), "no graph of the first runs Mamba"
    names_of = {one.name for one in kept[experts].forward if isinstance(one, Hold)}
    assert any("fc1" in name for name in names_of), "experts are outside"
    assert not any("router" in name for name in names_of)


FEW_EXPERTS: dict[str, object] = {"experts": 4, "expert_top_k": 2, "expert_ffn": 512}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"recompute": "full"}, "full_iteration or none with full recompute"),
        ({"cuda_graph_impl": "full_iteration"}, "needs megatron.check_for_nan false"),
        ({"cuda_graph_modules": "moe"}, "experts only"),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "moe_preprocess"}, "moe_router beside"),
        ({"recompute": "selective", "recompute_modules": "mlp", "hidden_dropout": 0.1}, "hidden dropout"),
        (FEW_EXPERTS, "captures layers whole"),
        (
            {**FEW_EXPERTS, "cuda_graph_impl": "full_iteration", "check_for_nan": False},
            "the host waits for numbers of rows otherwise",
        ),
    ],
)
def test_what_megatron_core_forbids_of_graphs(flags: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        estimate(plan(**{"cuda_graph_impl": "local", **flags}))


def pool_of(tape: Tape) -> list[int]:
    return [one.bytes for one in tape if isinstance(one, Hold) and one.stream == POOL]


def saved_in_pool(module: Module) -> int:
    """Bytes that one layer's attention keeps from forward to backward."""
    ended = {event.tensor for event in module.steady.forward if isinstance(event, Drop)}
    holds = [one for one in module.steady.forward if isinstance(one, Hold) and one.stream == POOL]
    return sum(one.bytes for one in holds if one.tensor not in ended)
