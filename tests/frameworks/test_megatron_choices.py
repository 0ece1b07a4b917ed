"""Small choices of Megatron-Core that an argument makes, by hand."""

from __future__ import annotations

from collections.abc import Iterable

from memplan.estimate import estimate
from memplan.frameworks.megatron.from_plan import core_shape, padded_vocab, rules
from memplan.frameworks.megatron.modules import layer_shape_of, layers_module, module_shapes
from memplan.frameworks.megatron.notices import unread_mask
from memplan.frameworks.megatron.programs import programs
from memplan.layers.module import Module, Options
from memplan.plan.plan import Plan
from memplan.tape.events import Category, Drop, Event, Hold

from .test_megatron import plan, refusal

S, H = 256, 256


def kept(tape: Iterable[Event]) -> list[tuple[str, int]]:
    """Names and bytes of what ``tape`` leaves."""
    holds: dict[int, Hold] = {}
    for event in tape:
        if isinstance(event, Hold):
            holds[event.tensor] = event
        elif isinstance(event, Drop):
            holds.pop(event.tensor, None)
    return [(one.name, one.bytes) for one in holds.values()]


def embedded(**flags: object) -> list[tuple[str, int]]:
    """What the embedding's forward pass leaves on one of two tensor-parallel ranks."""
    given = plan(tp=2, sequence_parallel="true", positions="learned", embedding_dropout=0, **flags)
    spans = programs(given, Options())[0].order.chunks[0].spans
    (module,) = (span.module for span in spans if span.names == ("embedding",))
    return kept(module.steady.forward)


def test_without_a_copy_the_whole_embedding_stays() -> None:
    """Half of the tokens are copied, 2 s h / 2 bytes; a view of them keeps all."""
    assert ("embedding_cloned", 2 * S * H // 2) in embedded()
    without = embedded(clone_scattered_embedding="false")
    assert not any(name == "embedding_cloned" for name, _ in without)
    assert max(size for _, size in without) == 2 * S * H


def test_ranks_that_share_a_key_value_head() -> None:
    """4 ranks, 2 groups of 8 queries of 16 features: what all ranks make is gathered, 2 s (16 + 2 x 2) 16 bytes. Of it
    nothing is kept, as queries and keys are rotated and the value is copied: as much as with a head for each rank."""
    made = []
    for groups in (2, 4):
        given = plan(tp=4, sequence_parallel="true", kv_heads=groups, gpu="h100-80gb")
        shape = layer_shape_of(module_shapes(core_shape(given))[0], 0)
        made.append(layers_module((shape,), Options()))
    shared, own = made
    gathered = 2 * S * (16 + 2 * 2) * 16
    forward, backward = (
        {one.name: one.bytes for one in tape if isinstance(one, Hold)}
        for tape in (shared.first.forward, shared.first.backward)
    )
    assert forward["qkv_received"] == forward["qkv_gathered"] == gathered
    assert kept(shared.first.forward) == kept(own.first.forward)
    assert backward["grad_query_of_group"] == 2 * S * 8 * 16, "zeros for all queries of the group"
    assert backward["grad_qkv_gathered"] == backward["grad_qkv_turned"] == gathered
    assert backward["grad_qkv_scattered"] == gathered // 4
    weights = {one.name: one.shape for one in shared.parameters}
    assert weights["self_attention.linear_qkv.weight"] == ((16 + 2 * 2) * 16 // 4, H)


def test_ranks_and_key_value_heads_that_do_not_fit() -> None:
    assert "must divide the 3 key/value heads, or be a multiple" in refusal(tp=2, heads=12, kv_heads=3, head_dim=16)
    assert "norms of queries and keys" in refusal(tp=4, kv_heads=2, qk_norm="true")


MIXTURE = {"experts": 4, "expert_top_k": 2, "expert_ffn": 64, "router_dtype": "fp32", "moe_dispatcher": "alltoall"}


def of_layer(**flags: object) -> list[tuple[str, int]]:
    shape = layer_shape_of(module_shapes(core_shape(plan(dp=2, ep=2, **MIXTURE, **flags)))[0], 0)
    return kept(layers_module((shape,), Options()).first.forward)


def test_noise_of_a_router_is_kept_beside_its_product() -> None:
    """2 s h bytes each: the product is the gating layer's input, the noise a factor of it."""
    found = dict(of_layer(moe_input_jitter="true"))
    assert found["router_noise"] == found["router_jittered"] == 2 * S * H
    assert not any("jittered" in name or "noise" in name for name, _ in of_layer())


def test_a_fused_router_keeps_scores_in_fp32_and_the_map() -> None:
    """(s b, E) each; its balancing loss scores of its own, which the scores that it returns do not outlive."""
    found = dict(of_layer(moe_router_fusion="true", router_aux_loss=0.01))
    assert (found["router_scores"], found["routing_map"]) == (4 * S * 4, S * 4)
    assert found["aux_scores_inner"] == 4 * S * 4
    assert "aux_scores" not in found
    assert "router_indices" not in found
    assert "router_indices" in dict(of_layer())
    assert "fp64" in refusal(dp=2, ep=2, moe_router_fusion="true", **{**MIXTURE, "router_dtype": "fp64"})


def evaluated(given: Plan) -> int:
    moment = estimate(given).stages[0].moments["evaluation"]
    assert moment is not None
    return moment


def test_an_evaluation_has_batches_of_its_own() -> None:
    """It needs what one of a training with such batches does: states are the same."""
    assert evaluated(plan(eval_mbs=4)) == evaluated(plan(mbs=4)) > evaluated(plan())


def test_a_number_of_buckets_and_their_size_exclude_one_another() -> None:
    assert "must be left out with megatron.bucket_size" in refusal(num_buckets=4, bucket_size=100)
    assert "with Megatron-FSDP" in refusal(num_buckets=4, megatron_fsdp="optim", dp=2)


def head_of(**flags: object) -> Module:
    given = plan(gpu="h100-80gb", tied_embeddings="false", **flags)
    spans = programs(given, Options())[0].order.chunks[0].spans
    (module,) = (span.module for span in spans if span.names == ("head",))
    return module


def largest(tape: Iterable[Event], category: Category) -> int:
    held, most, holds = 0, 0, {}
    for event in tape:
        if isinstance(event, Hold) and event.category is category:
            holds[event.tensor] = event.bytes
            held += event.bytes
        elif isinstance(event, Drop):
            held -= holds.pop(event.tensor, 0)
        most = max(most, held)
    return most


def test_logits_in_fp32_are_their_own_softmax() -> None:
    """Of n logits 2 n bytes and a copy of 4 n; in fp32 4 n alone. Backward casts the gradient, 2 n, beside the saved
    softmax of 4 n, in either (autograd's cast, or that of ``LinearWithGradAccumulationAndAsyncCommunication``)."""
    n = S * padded_vocab(plan())
    usual, wide = head_of(), head_of(logits_dtype="fp32")
    assert largest(usual.first.forward, Category.LOGITS) == 6 * n
    assert largest(wide.first.forward, Category.LOGITS) == 4 * n
    made = {one.name: one.bytes for one in wide.first.backward if isinstance(one, Hold)}
    assert made["grad_logits_cast"] == 2 * n
    assert "grad_logits" not in made
    assert kept(head_of(logits_dtype="bf16").first.forward) == kept(usual.first.forward)


def mlp_in(parts: int) -> Module:
    shape = layer_shape_of(module_shapes(core_shape(plan(mlp_chunks=parts, gpu="h100-80gb")))[0], 0)
    return layers_module((shape,), Options())


def test_an_mlp_in_chunks() -> None:
    """Two halves of the tokens keep what the whole keeps; outputs are put together in 2 s h bytes."""
    whole, halves = mlp_in(1), mlp_in(2)
    assert sum(size for _, size in kept(halves.first.forward)) == sum(size for _, size in kept(whole.first.forward))
    made = [one for one in halves.first.forward if isinstance(one, Hold)]
    assert [one.bytes for one in made if one.name == "mlp_chunks_joined"] == [2 * S * H]
    assert [p.shape for p in halves.parameters] == [p.shape for p in whole.parameters]
    assert "experts" in refusal(dp=2, ep=2, mlp_chunks=2, **MIXTURE)


def test_each_heads_largest_score_is_returned_by_cudnn() -> None:
    """4 b a s bytes beside the statistics, which end with the kernel; flash attention has no such scores."""
    flags = {"log_max_attention_logit": "true", "gpu": "a100-80gb"}
    made = [one for one in of_layers(**flags).first.forward if isinstance(one, Hold)]
    assert [one.bytes for one in made if one.name == "softmax_largest"] == [4 * plan().model.heads * S]
    assert "softmax_statistics" not in {
        one.name for one in of_layers(gpu="a100-80gb").first.forward if isinstance(one, Hold)
    }
    assert "without cuDNN" in refusal(log_max_attention_logit="true", attention_backend="unfused", gpu="h100-80gb")


def test_attention_of_transformer_engine_in_fp32() -> None:
    """No kernel of flash-attention or cuDNN takes it: of a b s s scores, 4 bytes each, masked in place, the softmax is
    kept; in backward the gradient is copied whole, as are the slice of it and its filled copy for a moment."""
    scores = 4 * plan().model.heads * S * S
    module = of_layers(dtype="fp32", gpu="h100-80gb")
    assert dict(kept(module.first.forward))["probabilities"] == scores
    made = [one for one in module.first.backward if isinstance(one, Hold)]
    copies = {one.name: one.bytes for one in made if one.name.startswith("grad_scores")}
    assert copies == dict.fromkeys(("grad_scores_copied", "grad_scores_slice", "grad_scores_masked"), scores)
    assert "unfused" in str(estimate(plan(dtype="fp32", gpu="h100-80gb")).assumptions)
    assert "megatron.attention_backend = flash" in refusal(dtype="fp32", attention_backend="flash", gpu="h100-80gb")


def of_layers(**flags: object) -> Module:
    return layers_module((layer_shape_of(module_shapes(core_shape(plan(**flags)))[0], 0),), Options())


def test_parameters_gathered_in_the_step_are_in_one_bucket() -> None:
    """Of the first virtual stage, too, which else has several, each padded (``disable_bucketing``)."""
    flags = {"pp": 2, "vpp": 2, "layers": 4, "dp": 2, "zero": 1, "overlap_grad_reduce": "true"}
    flags |= {"overlap_param_gather": "true", "bucket_size": 1000}
    given, without = (rules(plan(**flags, **more)) for more in ({STEP: "true"}, {}))
    assert (given.bucket, without.bucket) == (None, 1000)
    assert "needs virtual stages" in refusal(**{STEP: "true"})


STEP = "overlap_param_gather_with_optimizer_step"


def test_a_mask_that_no_kernel_reads_is_named_where_it_is_large() -> None:
    """A byte for each pair of 65,536 tokens, whatever context parallelism cuts; without kernels that know the mask by
    themselves it is needed."""
    long = {"seq": 65536, "cp": 2, "gpus": 2, "gpu": "h100-80gb"}

    def named(**flags: object) -> list[str]:
        return [one.message for one in estimate(plan(**flags)).warnings if one.code == "attention-mask"]

    (said,) = named(**long)
    assert "1 x 65,536 x 65,536 booleans, 4.00 GiB" in said
    assert not named(**{**long, "attention_mask_in_dataloader": "false"})
    assert not named(seq=16384, gpu="h100-80gb")
    whole = plan(seq=65536, gpu="h100-80gb")
    without = plan(seq=65536, gpu="h100-80gb", attention_mask_in_dataloader="false")
    assert unread_mask(whole) == 1 << 32
    assert estimate(whole).peak - estimate(without).peak >= 1 << 32
    assert not unread_mask(plan(seq=65536, gpu="h100-80gb", attention="eager"))
