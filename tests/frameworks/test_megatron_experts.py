"""Models with experts in Megatron-Core: parameters, how they are shared out, tokens on their way, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.replay import replay
from memplan.device.measured import NOTHING
from memplan.estimate import estimate
from memplan.frameworks.megatron.communicators import communicators
from memplan.frameworks.megatron.from_plan import core_shape, expert_replicas
from memplan.frameworks.megatron.notices import notices
from memplan.frameworks.megatron.programs import programs
from memplan.frameworks.megatron.timing import MegatronTime
from memplan.layers.megatron_core.ends import WORD
from memplan.layers.module import Options, joined
from memplan.plan.count import parameters
from memplan.plan.errors import PlanError
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.schedules.megatron_fold import MegatronOrder
from memplan.search.changes import proposals, stated
from memplan.search.ways_out import ways_out
from memplan.tape.events import Category, Hold, Stretch
from memplan.tape.program import fold_program

SHARED = "deepseek-v2-lite"


def plan(model: str = "mixtral-8x7b", **changes: Any) -> ResolvedPlan:
    given = {"model": model, "framework": "megatron", "layers": 2, "seq": 512, "vocab_multiple": 1, **changes}
    flags = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()}
    return resolve(read_plan(None, {name.replace("_", "-"): value for name, value in flags.items()}).plan)


def elements(of: ResolvedPlan, *, experts: bool | None = None) -> int:
    (program,) = programs(of, Options())
    return sum(p.elements for p in program.parameter_tensors() if experts is None or p.expert is experts)


LLAMA4 = {"moe_grouped_gemm": True, "moe_dispatcher": "alltoall", "layers": 4}


def test_llama_4_has_its_options_in_megatron_core() -> None:
    """Three layers of four turn 40 queries and 8 keys of 128 features, fused; each head's reciprocal root is in fp32;
    rows are multiplied before experts, in fp32; longer sequences than a chunk are refused."""
    whole = plan("llama-4-scout", **LLAMA4, router_dtype="fp32")
    assert elements(whole) == parameters(whole.model)
    (program,) = programs(whole, Options())
    layers = [span for span in program.order.chunks[0].spans if span.names[0].startswith("layer.")]
    assert [span.names for span in layers] == [("layer.0", "layer.1", "layer.2"), ("layer.3",)]
    turned, still = ([e for e in span.module.first.forward if isinstance(e, Hold)] for span in layers)
    assert sum(hold.bytes for hold in turned) - sum(hold.bytes for hold in still) == 512 * 48 * 128 * 2
    kept = {hold.name: hold.bytes for hold in still}
    assert (kept["query_reciprocal_root"], kept["key_reciprocal_root"]) == (512 * 40 * 4, 512 * 8 * 4)
    assert (kept["expert_input_weighted"], kept["expert_input"]) == (512 * 5120 * 4, 512 * 5120 * 2)
    for flags, line in (
        ({"seq": 16384}, "no attention in chunks of so many"),
        ({"expert_top_k": 2}, "Megatron-Core refuses"),
        ({"transformer_impl": "local"}, "in local layers"),
    ):
        with pytest.raises(PlanError, match=line):
            programs(plan("llama-4-scout", **LLAMA4 | flags), Options())


def test_olmoe_norms_all_heads_together_on_one_tensor_parallel_rank() -> None:
    """Copies of queries and keys, 16 heads of 128 in bf16 each, enter norms whose weights have 2,048 numbers."""
    whole = plan("olmoe-1b-7b")
    assert elements(whole) == parameters(whole.model)
    (program,) = programs(whole, Options())
    module = program.order.chunks[0].spans[3].module
    joined = [event.bytes for event in module.first.forward if isinstance(event, Hold) and event.name == "heads_joined"]
    assert joined == [512 * 16 * 128 * 2] * 2
    norms = [one.elements for one in module.parameters if "q_layernorm" in one.name or "k_layernorm" in one.name]
    assert norms == [2048, 2048]
    with pytest.raises(PlanError, match="whole on every rank"):
        programs(plan("olmoe-1b-7b", tp=2, dp=1), Options())


@pytest.mark.parametrize("mtp", [0, 1, 2])
@pytest.mark.parametrize("model", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3"])
def test_one_rank_has_every_parameter(model: str, mtp: int) -> None:
    """The count of a spec is transformers' own (``test_huggingface``); further layers are counted by hand there."""
    whole = plan(model, mtp_layers=mtp, dense_layers=0)
    norms = 2048 * (2 + mtp) if model == "deepseek-v2-lite" else 0  # queries without a rank are normed since 0.20
    assert elements(whole) - norms == parameters(whole.model)
    assert elements(plan(model, mtp_layers=mtp, dense_layers=0, megatron_core="0.19")) == parameters(whole.model)


@pytest.mark.parametrize("module", ["moe", "moe_act", "shared_experts", "layernorm", "mla_up_proj", "core_attn"])
def test_what_is_recomputed_of_a_further_layer_reads_the_parameters_of_its_first_pass(module: str) -> None:
    """No parameter more, and the further layer keeps as much less for backward as an equal one of the model does."""
    flags: dict[str, Any] = {"mtp_layers": 1, "dense_layers": 0, "moe_grouped_gemm": True}
    plain = plan("deepseek-v3", **flags)
    again = plan("deepseek-v3", **flags, recompute="selective", recompute_modules=module)
    assert elements(again) == elements(plain)
    kept: list[dict[tuple[str, ...], int]] = []
    for one in (plain, again):
        (program,) = programs(one, Options())
        spans = program.order.chunks[0].spans
        kept.append({span.names: Stretch(span.module.first.forward).excursion.net for span in spans})
    equal, further = (kept[0][name,] - kept[1][name,] for name in ("layer.1", "mtp"))
    assert equal == further > 0


def test_queries_without_a_rank_keep_what_their_norm_made() -> None:
    """Two layers of 512 tokens of 2,048 features in bf16 more, each with a reciprocal root in fp32."""
    newer, older = (plan("deepseek-v2-lite", megatron_core=core) for core in ("0.20", "0.19"))
    kept = [programs(one, Options())[0].order.chunks[0].spans for one in (newer, older)]
    more = [sum(Stretch(span.module.first.forward).excursion.net * len(span.names) for span in spans) for spans in kept]
    assert more[0] - more[1] == 2 * (512 * 2048 * 2 + 512 * 4)


@pytest.mark.parametrize("fused", [True, False])
def test_dispatchers_remember_where_tokens_go_until_they_run_again(fused: bool) -> None:
    """One layer of two has 64 experts for 512 tokens with 6 each: probabilities in bf16, a byte for each expert, and
    the map of 129 int32 a token or 3,072 indices, which end where the next iteration begins."""
    (program,) = programs(plan("deepseek-v2-lite", moe_dispatcher="alltoall", moe_permute_fusion=fused), Options())
    kept = program.kept
    assert kept is not None
    order = 512 * 129 * 4 if fused else 512 * 6 * 8
    assert kept.carried.excursion.net == order
    named = {hold.name: hold.bytes for hold in kept.workspaces if isinstance(hold, Hold)}
    assert (named["dispatcher_probabilities"], named["dispatcher_routing_map"]) == (512 * 64 * 2, 512 * 64)
    assert kept.between.net - kept.during.net == order


def test_what_experts_run_with_alone_is_their_default() -> None:
    """The sequence is cut with tensor parallelism, and experts with biases have no bias_dropout_fusion."""
    assert plan(tp=2, dp=4).layout.sequence_parallel
    assert plan("deepseek-v2-lite", tp=2, dp=4).layout.sequence_parallel
    assert not plan("llama-3-8b", tp=2, dp=4).layout.sequence_parallel
    assert not plan("gpt-oss-20b").megatron.bias_dropout_fusion
    assert plan().megatron.bias_dropout_fusion


GPT_OSS = {"moe_grouped_gemm": True, "bias_dropout_fusion": False, "moe_dispatcher": "alltoall"}


def test_sinks_and_windows_are_exchanged_by_the_one_way_that_knows_both() -> None:
    """``attn_forward_func_with_cp`` of Transformer Engine; p2p elsewhere, as in Megatron-LM."""
    ways = {name: plan(name, cp=2).megatron.cp_communication for name in ("gpt-oss-20b", "mistral-7b", "llama-3-8b")}
    assert ways == {"gpt-oss-20b": "a2a", "mistral-7b": "a2a", "llama-3-8b": "p2p"}


def test_gpt_oss_has_sinks_in_cudnns_attention() -> None:
    """Its parameters are transformers' own; a head's sink is cast to fp32 in every forward pass; the clamp keeps the
    experts' input to it and a copy, (k T, 2 f) in bf16."""
    whole = plan("gpt-oss-20b", **GPT_OSS)
    assert elements(whole) == parameters(whole.model)
    assert core_shape(whole).attention == "fused"
    (program,) = programs(whole, Options())
    kept = {
        event.name: event.bytes
        for event in program.order.chunks[0].spans[3].module.first.forward
        if isinstance(event, Hold)
    }
    assert kept["sinks_fp32"] == 512
    assert kept["expert_clamped"] == kept["experts_linear_fc1"] == 4 * 512 * 2 * 2880 * 2
    for flags, line in (
        ({"bias_dropout_fusion": True}, "wants --no-bias-dropout-fusion"),
        ({"attention_backend": "unfused"}, "attention sinks in another back end"),
        ({"cp": 2, "dp": 1, "cp_communication": "p2p"}, "must be a2a with learned sinks"),
    ):
        with pytest.raises(PlanError, match=line):
            programs(plan("gpt-oss-20b", **GPT_OSS | flags), Options())


def test_yarn_turns_queries_by_operators() -> None:
    """Transformer Engine's fused kernel has no factor of sines and cosines, as Megatron-Core knows since 0.16
    (``apply_rotary_pos_emb``); 0.1 ln(32) + 1 is 1.35. A plain model keeps its kernel, and so does YaRN by 1."""
    fused = {
        version: core_shape(plan("gpt-oss-20b", **GPT_OSS, megatron_core=version)).rope_fusion
        for version in ("0.15", "0.16", "0.19")
    }
    assert fused == {"0.15": True, "0.16": False, "0.19": False}
    assert core_shape(plan()).rope_fusion
    assert core_shape(plan("gpt-oss-20b", **GPT_OSS, yarn_factor=1.0)).rope_fusion


@pytest.mark.parametrize(("ep", "etp"), [(1, 2), (2, 2), (4, 2), (4, 1), (2, 4)])
def test_experts_are_divided_by_their_own_ranks(ep: int, etp: int) -> None:
    """Of tp 2: layers have half of every matrix, ranks of an expert a part of E / ep experts."""
    alone, shared = plan(), plan(tp=2, dp=8, ep=ep, etp=etp, sequence_parallel=True)
    experts = 2 * 8 * 3 * 4096 * 14336
    apart = ep > 1 or etp != 2
    assert elements(shared, experts=True) == (experts // ep // etp if apart else 0)
    assert elements(shared) < elements(alone) // 2 + experts // ep // etp
    assert expert_replicas(shared) == 16 // (ep * etp)


def test_states_of_experts_are_divided_by_their_replicas() -> None:
    """dp 8, ep 4: two replicas of an expert, eight of everything else; Adam's two states and main parameters."""
    shared = plan(dp=8, ep=4, zero=1)
    (program,) = programs(shared, Options())
    kept = program.kept.between.net_by
    dense, experts = elements(shared, experts=False), elements(shared, experts=True)
    expected = 8 * (dense / 8 + experts / 2)
    assert kept[Category.OPTIMIZER_STATES] == pytest.approx(expected, rel=2e-3)
    assert kept[Category.GRADIENTS] == pytest.approx(4 * (dense + experts), rel=1e-3)


@given(
    ep=st.sampled_from([1, 2, 4, 8]),
    etp=st.sampled_from([1, 2]),
    imbalance=st.floats(1.0, 16.0),
    capacity=st.none() | st.floats(0.5, 4.0),
    padded=st.booleans(),
)
def test_tokens_on_their_way(ep: int, etp: int, imbalance: float, capacity: float | None, padded: bool) -> None:
    """No rank receives more than all tokens, nor more than its experts take; all ranks' mean is what ranks send."""
    shape = core_shape(plan(dp=16, ep=8))
    assert shape.experts is not None
    given = replace(
        shape.experts, ep=ep, etp=etp, imbalance=imbalance, capacity_factor=capacity,
        padded=padded and capacity is not None,
    )  # fmt: skip
    shape = replace(shape, experts=given)
    rows, top_k = shape.routed, shape.spec.expert_top_k
    assert rows.own == 512
    assert rows.held == rows.received * etp
    if given.padded:
        assert rows.sent == rows.received == shape.capacity * 8
        return
    assert rows.sent <= rows.own * top_k
    assert rows.received <= rows.own * ep * min(top_k, 8 // ep)
    assert rows.received <= -(-rows.sent * imbalance // 1)
    if capacity is not None:
        assert rows.received <= shape.capacity * 8
    if imbalance == 1.0 and capacity is None:
        assert rows.received == rows.sent == rows.own * top_k


def test_the_peak_grows_with_imbalance_and_not_where_inputs_are_padded() -> None:
    def peak(**flags: Any) -> int:
        (program,) = programs(plan(dp=8, ep=8, **flags), Options())
        return fold_program(program).peak

    balanced, more, worst = (peak(experts_imbalance=one) for one in ("balanced", "1.5", "worst"))
    assert balanced < more < worst
    padded = {"moe_capacity_factor": 1, "moe_pad_to_capacity": True}
    assert peak(**padded) == peak(**padded, experts_imbalance="worst")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"recompute": "selective", "recompute_modules": "shared_experts,moe"},
            "recomputing shared_experts saves nothing",
        ),
        (
            {"recompute": "selective", "recompute_modules": "mlp"},
            "recomputing mlp saves nothing: no layer of mixtral-8x7b",
        ),
        ({"recompute": "selective", "recompute_modules": "moe"}, ""),
        (
            {"recompute": "selective", "recompute_modules": "mlp,shared_experts", "dense_layers": "0", "model": SHARED},
            "",
        ),
        (
            {"recompute": "selective", "recompute_modules": "moe", "model": "llama-3-8b", "ep": 1},
            "recomputing moe saves",
        ),
        (
            {"moe_shared_expert_overlap": True},
            "experts.shared_expert_overlap changes nothing: mixtral-8x7b has no shared",
        ),
        ({"moe_shared_expert_overlap": True, "model": SHARED}, ""),
        ({"dense_layers": "0,1"}, "none of the 2 layers of mixtral-8x7b has experts"),
    ],
)
def test_what_changes_nothing_is_told(changes: dict[str, Any], says: str) -> None:
    resolved = plan(**{"dp": 8, "ep": 8, "layers": 2, **changes})
    codes = {"recompute-without-gain", "overlap-without-gain", "no-layer-with-experts"}
    told = [one.message for one in estimate(resolved).warnings if one.code in codes]
    assert [one[: len(says)] for one in told] == ([says] if says else [])


@pytest.mark.parametrize("modules", ["moe", "moe_act", "layernorm", "moe_act,layernorm"])
def test_recomputed_modules_keep_less(modules: str) -> None:
    def kept(**flags: Any) -> int:
        (program,) = programs(plan(dp=8, ep=8, layers=1, **flags), Options())
        layer = next(
            span.module for chunk in program.order.chunks for span in chunk.spans if span.module.name == "layer"
        )
        assert layer.steady.forward_fold.net + layer.steady.backward_fold.net == 0
        return layer.steady.forward_fold.net

    assert kept(recompute="selective", recompute_modules=modules) < kept()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"ep": 3}, "layout.ep = 3: must divide the 8 experts of mixtral-8x7b"),
        ({"dp": 2, "ep": 4}, "layout.ep = 4: times etp 1 must divide tp x cp x dp = 2"),
        ({"dp": 8, "etp": 3}, "layout.etp = 3: must divide tp x cp x dp = 8, the ranks of a pipeline stage"),
        ({"router_groups": 3}, "model.router_groups = 3: must divide the 8 experts"),
        ({"router_groups": 4}, "model.router_groups = 4: needs model.router_group_top_k, the groups that a token's"),
        ({"expert_top_k": 9}, "model.expert_top_k = 9: must be at most the 8 experts"),
        ({"dp": 8, "ep": 2, "moe_pad_to_capacity": True}, "experts.pad_to_capacity = true: needs"),
        ({"moe_dispatcher": "flex"}, "the flex dispatcher with one expert-parallel rank"),
        ({"experts_imbalance": "much"}, "experts.imbalance = much: must say tokens of the most loaded rank: balanced"),
        ({"experts_imbalance": "0.5"}, "must be balanced, worst, or a factor of at least 1"),
        ({"tp": 2, "dp": 4, "sequence_parallel": False}, "experts with tensor parallelism but no sequence parallelism"),
        ({"moe_dispatcher": "allgather"}, "the allgather dispatcher with permute fusion (--no-moe-permute-fusion)"),
        ({"transformer_impl": "local", "expert_latent": 64}, "experts of projected rows in local layers"),
        ({"recompute": "selective", "recompute_modules": "mla_up_proj"}, "mla_up_proj without latent attention"),
        (
            {"recompute": "selective", "recompute_modules": "moe_act", "moe_grouped_gemm": False},
            "recompute.modules = [moe_act]: must not have moe_act without experts in one grouped product",
        ),
        (
            {
                "model": "deepseek-v2-lite",
                "recompute": "selective",
                "recompute_modules": "shared_experts",
                "moe_shared_expert_overlap": True,
            },
            "must not have shared_experts with experts.shared_expert_overlap",
        ),
        ({"router_balancing": "sinkhorn", "moe_capacity_factor": 1.0}, "with model.router_balancing sinkhorn"),
        ({"expert_top_k": 1}, "model.router_score_first = false: must be true with one expert for each token"),
        ({"router_expert_bias": True}, "must be false with model.router_score softmax"),
        ({"model": "deepseek-v3", "router_groups": 4, "router_group_top_k": 5}, "must be at most the 4 groups"),
        (
            {"model": "deepseek-v3", "router_groups": 128, "router_group_top_k": 2},
            "model.router_group_top_k = 2: must be larger: 4 of a token's 8 experts come from each group, which has 2",
        ),
        (
            {
                "moe_dispatcher": "allgather",
                "moe_permute_fusion": False,
                "moe_router_padding": True,
                "fp8": "blockwise",
            },
            "experts.router_padding = true: must be false with the allgather dispatcher",
        ),
        ({"framework": "megatron-deepspeed", "vocab_multiple": 128}, "must be 0 with framework megatron-deepspeed"),
    ],
)  # fmt: skip
def test_what_is_refused(flags: dict[str, Any], line: str) -> None:
    with pytest.raises(PlanError) as caught:
        programs(plan(**flags), Options())
    assert line in str(caught.value)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3"])
def test_ways_out_of_a_pipeline_name_expert_parallelism_and_cost_time(model: str) -> None:
    given = plan(model, layers=8, seq=4096, gpu="rtx-4090-24gb", dp=4, pp=2, ep=2, gbs=16, mbs=1)
    found = list(proposals(stated(given), given.hardware.capacity or 0))
    assert "ep 2 → 4" in [one.what for one in found]
    ways = ways_out(given, estimate(given), NOTHING)
    assert ways
    assert all(way.slower is not None for way in ways)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"dp": 8, "ep": 8, "experts_imbalance": 10}, "this estimate: 10, taken as the worst, since routing allows no"),
        (
            {"dp": 8, "ep": 8, "experts_imbalance": 4},
            "the worst, 4 times the mean), as requested bytes; this estimate: 4 (",
        ),
        ({"experts_imbalance": 2}, "experts.imbalance changes nothing: every rank has all experts"),
        (
            {"dp": 8, "ep": 8, "experts_imbalance": 2, "moe_capacity_factor": 1, "moe_pad_to_capacity": True},
            "experts.imbalance changes nothing: every expert's rows are padded to its capacity",
        ),
        ({"moe_flex_backend": "hybridep"}, "experts.flex_backend changes nothing: the dispatcher is alltoall"),
    ],
)
def test_choices_of_experts_that_change_nothing_are_told(flags: dict[str, Any], told: str) -> None:
    """Two of eight experts are chosen, one of which is on each of eight ranks: no rank gets more than four times the
    mean."""
    of = plan(**flags)
    assert any(told in one.message for one in notices(of, programs(of, Options())))


def test_multi_token_prediction_in_a_stage_before_the_last() -> None:
    """Its stage has an embedding and the whole batch, and sends hidden states of both depths, (2 s, b, h) in bf16,
    which the last stage receives; parameters are as many as with the head, and its time is that of its stage."""
    flags = {"dp": 8, "ep": 8, "mtp_layers": 1, "layers": 3, "dense_layers": 0, "gpu": "b200", "gbs": 64}
    apart = plan("deepseek-v2-lite", **flags, pp=3, pipeline_layout="Ettt|m|L")
    beside = plan("deepseek-v2-lite", **flags, pp=2, pipeline_layout="Ettt|mL")
    made, others = programs(apart, Options()), programs(beside, Options())
    assert [program.entries for program in made[1:]] == [("mtp",), ("head",)]
    total, whole = (sum(one.elements for p in each for one in p.parameter_tensors()) for each in (made, others))
    assert total == whole
    one = 512 * 2048 * 2
    orders = [program.order for program in made]
    assert all(isinstance(order, MegatronOrder) for order in orders)
    assert [order.edges for order in orders] == [(), ((one, 2 * one),), ((2 * one, one),)]
    batch = [event for event in orders[1].chunks[0].spans[1].module.first.forward if isinstance(event, Hold)]
    assert [one.name for one in batch] == ["attention_mask", "labels", "loss_mask", "position_ids", "tokens"]
    for order, program in zip(orders, made, strict=True):
        assert order.whole.peak <= fold_program(program).peak
    # a ``TransformerBlock`` with neither layers nor the final norm copies what it is given
    cloned = [
        [event.bytes for span in order.chunks[0].spans for event in span.module.first.forward
         if isinstance(event, Hold) and event.name == "hidden_cloned"]
        for order in orders
    ]  # fmt: skip
    assert cloned == [[], [one], [2 * one]]
    spent, alone = (MegatronTime().entries(each) for each in (apart, beside))
    assert joined(spent.further, spent.head) == alone.head
    assert [stage[0].further for stage in MegatronTime().stages(apart)] == [False, True, False]


def test_multi_token_prediction_in_a_virtual_stage_before_the_last() -> None:
    """What the second chunk of stage 1 sends, and that of stage 2 receives, is of both depths. The fold is what the
    allocator's replay of every event comes to. Both stages with an embedding sum its gradients."""
    flags = {"dp": 8, "ep": 8, "mtp_layers": 1, "layers": 4, "dense_layers": 0, "gpu": "b200", "gbs": 72, "vpp": 2}
    apart = plan("deepseek-v2-lite", **flags, pp=3, pipeline_layout="Et|t|t|t|m|L")
    made = programs(apart, Options())
    assert [program.entries for program in made] == [
        ("embedding", "layer.0", "layer.3", "final_norm"), ("layer.1", "mtp"), ("layer.2", "head")
    ]  # fmt: skip
    one = 512 * 2048 * 2
    orders = [program.order for program in made]
    assert all(isinstance(order, MegatronOrder) for order in orders)
    assert [order.edges for order in orders] == [(), ((one, one), (one, 2 * one)), ((one, one), (2 * one, one))]
    assert [order.carried.net for order in orders] == [2 * one, 4 * one, 6 * one]
    embedded = [[one.name for one in program.parameter_tensors()].count(WORD) for program in made]
    assert embedded == [1, 1, 0]
    for program, ran in zip(made, replay(made, AllocatorSettings(expandable_segments=True), ()), strict=True):
        folded = fold_program(program)
        assert (folded.peak, folded.static) == (ran.allocated, ran.static)
    groups = [{one.name for one in communicators(apart, stage)} for stage in range(3)]
    assert ["embeddings" in names for names in groups] == [True, True, False]
    with pytest.raises(PlanError, match="before that of the loss"):
        plan("deepseek-v2-lite", **flags, pp=3, pipeline_layout="Et|t|t|t|m|L", moe_overlap_exchange=True)


def test_layers_of_multi_token_prediction_in_a_layout_string() -> None:
    """The final norm is where the last layer is, also where the last stage has further layers and the loss alone."""
    flags = {"pp": 2, "dp": 1, "mtp_layers": 1, "layers": 3, "dense_layers": 0, "gradient_accumulation_fusion": True}

    def entries(layout: str) -> tuple[tuple[str, ...], ...]:
        made = programs(plan("deepseek-v2-lite", **flags, pipeline_layout=layout), Options())
        return tuple(program.entries for program in made)

    last = ("layer.2", "final_norm", "mtp", "head")
    assert entries("Ett|tmL") == entries("Ett|tL") == (("embedding", "layer.0", "layer.1"), last)
    assert plan("deepseek-v2-lite", **flags, pipeline_layout="Ett|tL").pipeline.layout == "Ett|tmL"
    alone = entries("Ettt|mL")
    assert alone == (("embedding", "layer.0", "layer.1", "layer.2", "final_norm"), ("mtp", "head"))
    for layout, line in (
        ("Ett|tmmL", "has 2 layers m of multi-token prediction; the model has 1"),
        ("Et|tm|t|L", "behind all layers t"),
        ("Ett|mtL", "behind all layers t"),
    ):
        with pytest.raises(PlanError, match=line):
            entries(layout)
