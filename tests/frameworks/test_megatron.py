"""Megatron-Core as a whole: what holds for every plan, and hand calculations."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.replay import replay
from memplan.estimate import estimate, fold
from memplan.frameworks.megatron.from_plan import core_shape, padded_vocab
from memplan.frameworks.megatron.modules import layer_shape_of, layers_module
from memplan.frameworks.megatron.programs import programs
from memplan.layers.megatron_core.te_context import seen_keys
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.fields import plan_fields
from memplan.plan.megatron_section import Megatron
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.result import StageEstimate
from memplan.tape.events import Category, Hold
from memplan.tape.program import fold_program

MIB = 2**20

SMALL = {
    "model": "llama-3-8b", "framework": "megatron", "layers": 8, "hidden": 256, "heads": 16, "kv_heads": 16,
    "head_dim": 16, "ffn": 256, "vocab": 1000, "seq": 256, "dtype": "bf16",
}  # fmt: skip


def plan(**flags: object) -> Plan:
    """A small model with some fields changed."""
    said = SMALL | {"gbs": 8 * int(str(flags.get("mbs", 1))) * int(str(flags.get("dp", 1)))} | flags
    return resolve(read_plan(None, {name.replace("_", "-"): str(value) for name, value in said.items()}).plan)


def refusal(**flags: object) -> str:
    with pytest.raises(PlanError) as found:
        estimate(plan(**flags))
    return str(found.value)


def test_the_vocabulary_is_padded_to_a_multiple_that_tensor_parallelism_divides() -> None:
    """128,256 = 1,002 x 128; with tp = 8 the multiple is 1,024: 126 x 1,024 = 129,024."""
    assert padded_vocab(plan(vocab=128_256)) == 128_256
    assert padded_vocab(plan(vocab=128_256, tp=4, vocab_multiple=256)) == 129_024


@pytest.mark.parametrize(
    ("model", "parameters"), [("qwen2.5-7b", 7_615_616_512), ("qwen3-8b", 8_190_735_360), ("phi-4", 14_659_507_200)]
)
def test_models_of_llamas_kind_have_the_parameters_that_the_hub_counts(model: str, parameters: int) -> None:
    """Biases of queries, keys and values, norms of queries and keys, fused projections; vocabularies are multiples of
    128. The counts are those of the safetensors files of Qwen/Qwen2.5-7B, Qwen/Qwen3-8B and microsoft/phi-4."""
    read = read_plan(None, {"model": model, "framework": "megatron", "seq": "512"})
    (program,) = programs(resolve(read.plan), Options())
    assert sum(one.elements for one in program.parameter_tensors()) == parameters


def test_between_iterations_a_stage_keeps_its_states_and_the_last_hidden_state() -> None:
    """18 bytes a parameter without the distributed optimizer, and b s h 2 = 128 KiB of input and of its gradient
    on the stage that receives one. Norms are 512 B tensors of 256 and 512 B: the rounding is listed exactly."""
    first, last = fold(plan(pp=2))
    once = programs(plan(pp=2), Options())
    for program, folded in zip(once, (first, last), strict=True):
        tensors = program.parameter_tensors()
        states = sum(p.bytes("bf16") + 3 * p.bytes("fp32") for p in tensors)
        buffer = -(-sum(p.elements for p in tensors) * 4 // 512) * 512
        kept = program.kept
        assert kept is not None
        small = 512  # the unit scale
        exchanged = 0 if program.stage == 0 else 2 * 256 * 256 * 2
        assert folded.static == states + buffer + small + exchanged + kept.workspaces.excursion.net


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from(["local", "transformer_engine"]),
    st.sampled_from(["flash", "unfused"]),
    st.integers(1, 3),
)
def test_fold_and_replay_agree_and_categories_sum(
    tp: int, pp: int, vpp: int, dp: int, sharded: bool, recompute: str, impl: str, attention: str, rounds: int
) -> None:
    """With expandable segments the allocator rounds nothing, so what is allocated is what was requested."""
    flags: dict[str, object] = {"attention_backend": attention} if impl == "transformer_engine" else {}
    vpp = vpp if pp > 2 else 1
    given_plan = plan(
        tp=tp, pp=pp, vpp=vpp, dp=dp, zero=int(sharded), recompute=recompute, transformer_impl=impl,
        gbs=dp * pp * rounds, sequence_parallel=str(tp > 1 and impl != "local").lower(), **flags,
    )  # fmt: skip
    every = programs(given_plan, Options())
    replayed = replay(every, AllocatorSettings(expandable_segments=True), ())
    for program, result in zip(every, replayed, strict=True):
        folded = fold_program(program)
        assert result.allocated == folded.peak == sum(folded.peak_by)
        assert result.static == folded.static <= folded.peak
        assert sum(result.breakdown) == result.allocated
        assert result.breakdown[Category.BLOCK_ROUNDING] == 0


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from(["adam", "adamw"]))
def test_more_shards_never_cost_more_static_memory(tp: int, pp: int, optimizer: str) -> None:
    """Beyond the padding of buffers and tensors."""
    sizes = [
        max(once.static for once in fold(plan(tp=tp, pp=pp, dp=dp, zero=1, optimizer=optimizer))) for dp in (1, 2, 4, 8)
    ]
    padding = 64 * 1024
    assert all(more <= less + padding for less, more in pairwise(sizes))


def test_recompute_and_sequence_parallelism_save_activations() -> None:
    def activations(**flags: object) -> int:
        (stage,) = estimate(plan(tp=2, mbs=4, gpu="h100-80gb", **flags)).stages
        return stage.of(Category.ACTIVATIONS)

    plain = activations()
    assert activations(sequence_parallel="true") < plain
    assert (
        activations(recompute="full")
        < activations(recompute="selective", attention_backend="unfused")
        < activations(attention_backend="unfused")
    )


def test_the_deepest_stage_has_the_most_in_flight() -> None:
    stages = estimate(plan(pp=4, gpu="h100-80gb")).stages
    assert [stage.in_flight for stage in stages] == [4, 3, 2, 1]
    held = [stage.of(Category.ACTIVATIONS) for stage in stages[:3]]
    assert held == sorted(held, reverse=True)


def test_every_peak_names_its_place() -> None:
    for stage in estimate(plan(pp=4, vpp=2, gpu="h100-80gb")).stages:
        assert stage.peak.phase in ("forward", "backward")
        assert stage.peak.module
        assert stage.peak.tensor
        assert stage.peak.microbatch is not None


def readings(stage: StageEstimate) -> list[int]:
    assert stage.allocated is not None
    assert stage.reserved is not None
    return [stage.static, stage.requested, stage.allocated, stage.reserved]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_readings_are_in_order_for_every_dtype(dtype: str, zero: int) -> None:
    extra = {} if dtype != "fp32" else {"transformer_impl": "local"}
    (stage,) = estimate(plan(dtype=dtype, zero=zero, dp=2, gpu="h100-80gb", **extra)).stages
    _, requested, allocated, reserved = readings(stage)
    assert requested <= allocated <= reserved


@pytest.mark.parametrize(("cp", "inner", "way"), [(1, 2, "a2a"), (4, 4, "a2a"), (4, 1, "p2p"), (4, 2, "p2p")])
def test_two_levels_with_one_rank_in_either_are_the_other_alone(cp: int, inner: int, way: str) -> None:
    shape = core_shape(plan(cp=cp, cp_communication="a2a+p2p", cp_inner=inner))
    assert (shape.cp_communication, shape.cp_inner) == (way, 2 if (cp, inner) == (4, 2) else 1)


def test_two_levels_are_read_as_they_were_written() -> None:
    """One rank that trades heads is a size that was given."""
    given = plan(cp=4, cp_communication="a2a+p2p", cp_inner=1)
    assert resolve(Plan.model_validate_json(given.model_dump_json())) == given


def test_layers_without_a_window_copy_the_keys_of_all_ranks() -> None:
    """``all_gather``, cp 4: a rank's two chunks of 32 tokens see a window of 16 and themselves, 2 x 47 keys, or as a
    causal mask has them 32 and 256. Of one sequence each step's keys and values are parts of what was gathered, of two
    they are copied: of the 288 - 94 further keys, two tensors of 2 x 16 heads of 16 features in 2 bytes each."""
    model = {"sliding_window": 16, "alternating_windows": True, "layers": 2, "cp": 4, "cp_communication": "all_gather"}
    shape = core_shape(plan(**model, mbs=2, attention_backend="flash"))
    windowed, whole = (layer_shape_of(shape, layer) for layer in range(2))
    assert (windowed.spec.sliding_window, whole.spec.sliding_window) == (16, None)
    assert seen_keys(64, windowed) == (47, 47)
    assert seen_keys(64, whole) == (32, 256)
    made = [
        sum(event.bytes for event in layers_module((one,), Options()).steady.forward if isinstance(event, Hold))
        for one in (windowed, whole)
    ]
    assert made[1] - made[0] == (288 - 94) * 2 * 2 * 16 * 16 * 2


def test_estimates_are_deterministic() -> None:
    once, again = (estimate(plan(pp=4, vpp=2, gpu="h100-80gb")) for _ in range(2))
    assert once == again


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"tp": 3}, "layout.tp = 3: must divide"),
        ({"pp": 3}, "layout.pp"),
        ({"pp": 1, "vpp": 2}, "layout.vpp = 2: virtual stages need layout.pp above 1"),
        ({"pp": 4, "vpp": 3}, "layout.vpp = 3: must divide the 2 layers of a stage"),
        ({"cp": 2, "seq": 250}, "batch.seq = 250: must be a multiple of 2 x cp = 4"),
        ({"cp": 4, "cp_inner": 2}, "megatron.cp_inner = 2: must be 1 without megatron.cp_communication a2a+p2p"),
        ({"cp": 4, "cp_inner": 3, "cp_communication": "a2a+p2p"}, "megatron.cp_inner = 3: must divide layout.cp 4"),
        ({"cp": 4, "cp_inner": 2, "cp_communication": "a2a+p2p", "te_version": "2.14"}, "must be 1 before"),
        ({"cp": 4, "cp_communication": "a2a+p2p"}, "a2a+p2p: needs megatron.cp_inner (--cp-inner)"),
        (
            {"flash_attention_release": 3, "cp": 2},
            "megatron.flash_attention = 3: must be 2 or 4 with context parallelism",
        ),
        ({"flash_attention_release": 4, "packed_sequences": "true"}, "must be 2 with packed sequences"),
        ({"model": "mistral-7b", "cp": 4, "cp_communication": "p2p"}, "p2p: must be a2a or all_gather"),
        ({"model": "mistral-7b", "cp": 32}, "because a2a distributes heads; --cp-communication all_gather has no such"),
        ({"optimizer_implementation": "foreach"}, "foreach: must be apex with Transformer Engine's layers"),
        ({"zero": 2}, "layout.zero = 2: must be"),
        ({"optimizer": "adam8bit"}, "optimizer.name = adam8bit: must be one of sgd, adam, adamw"),
        ({"precision_aware_optimizer": "true"}, "must be false without the distributed optimizer"),
        ({"transformer_impl": "local", "attention_backend": "flash"}, "must be auto, unfused or local"),
        ({"pipeline_layout": "Ettt|tttttL", "pp": 4}, "pipeline.layout"),
        ({"loss": "adaptive-softmax"}, "must be vocab-parallel with framework megatron"),
        ({"distributed_optimizer_instances": 2}, "must be 1 without the distributed optimizer"),
        ({"te_version": "1.2"}, "megatron.transformer_engine"),
        ({"ep": 2}, "layout.ep = 2: must be 1: llama-3-8b has no experts"),
        ({"heads": 12, "kv_heads": 3, "tp": 2}, "layout.tp = 2: must divide the 3 key/value heads"),
        ({"fp32_residual": "true"}, "has no recipe for fp32 residual connections"),
        (
            {
                "model": "bert-5.1b",
                "norm_place": "pre",
                "embedding_norm": "false",
                "final_norm": "true",
                "packed_sequences": "true",
            },
            "has no recipe for packed sequences with encoders",
        ),
        (
            {"optimizer": "sgd", "zero": 1},
            "optimizer.name = sgd: must be adam, adamw or muon with the distributed optimizer",
        ),
        (
            {"zero": 1, "precision_aware_optimizer": "true", "main_params_dtype": "fp8"},
            "optimizer.main_parameters = fp8: must be fp32 or fp16",
        ),
        ({"deterministic": "true", "cross_entropy_fusion": "te"}, "must be none with megatron.deterministic"),
    ],
    ids=str,
)
def test_a_contradiction_gets_one_line(flags: dict[str, object], words: str) -> None:
    assert words in refusal(**flags)


SAME_MEMORY = {
    "megatron.overlap_param_gather", "megatron.log_params_norm", "megatron.clip_grad", "megatron.check_for_nan",
    "megatron.rotary_interleaved",
}  # fmt: skip
"""Fields that change no memory; docs/megatron.md says why."""

SHARDED = {"megatron_fsdp": "optim_grads_params", "dp": 4}
OTHER_VALUES: dict[str, list[dict[str, object]]] = {
    "megatron.transformer_engine": [{"te_version": "2.4"}],
    "megatron.attention_backend": [{"attention_backend": "unfused"}],
    "megatron.deterministic": [{"deterministic": "true"}],
    "megatron.rope_fusion": [{"rope_fusion": "false"}],
    "megatron.rotary_interleaved": [{"rotary_interleaved": "true"}],
    "megatron.masked_softmax_fusion": [{"masked_softmax_fusion": "false", "transformer_impl": "local"}],
    "megatron.attention_softmax_in_fp32": [
        {"attention_softmax_in_fp32": "true", "masked_softmax_fusion": "false", "transformer_impl": "local"}
    ],
    "megatron.query_key_layer_scaling": [
        {"query_key_layer_scaling": "true", "masked_softmax_fusion": "false", "transformer_impl": "local"}
    ],
    "megatron.cross_entropy_fusion": [{"cross_entropy_fusion": "native"}, {"cross_entropy_fusion": "te"}],
    "megatron.distributed_optimizer_instances": [{"distributed_optimizer_instances": 2, "zero": 1, "dp": 4}],
    "megatron.overlap_grad_reduce": [{"overlap_grad_reduce": "true", "bucket_size": 1000, "zero": 1, "dp": 4}],
    "megatron.overlap_param_gather": [
        {"overlap_param_gather": "true", "overlap_grad_reduce": "true", "zero": 1, "dp": 4, "bucket_size": 10**9}
    ],
    "megatron.bucket_size": [{"overlap_grad_reduce": "true", "bucket_size": 1000, "zero": 1, "dp": 4}],
    "megatron.empty_cache": [{"empty_unused_memory_level": 1}, {"empty_unused_memory_level": 2}],
    "megatron.optimizer_graph": [{"optimizer_cuda_graph": "true"}],
    "megatron.distribute_saved": [
        {"distribute_saved_activations": "true", "recompute": "full", "tp": 2, "sequence_parallel": "false"}
    ],
    "megatron.optimizer_offload": [
        {"optimizer_offload_fraction": 0.5, "precision_aware_optimizer": "true", "zero": 1, "dp": 4}
    ],
    "megatron.offload_modules": [{"offload_modules": "qkv_linear", "min_offloaded_tensor_size": 1}],
    "megatron.offload_least": [{"min_offloaded_tensor_size": 1, "offload_modules": "qkv_linear"}],
    "megatron.cuda_graphs": [
        {"cuda_graph_impl": "transformer_engine"},
        {"cuda_graph_impl": "full_iteration", "check_for_nan": "false"},
        {"cuda_graph_impl": "local"},
    ],
    "megatron.cuda_graph_modules": [{"cuda_graph_modules": "mlp", "cuda_graph_impl": "transformer_engine"}],
    "megatron.cuda_graph_warmup": [
        {"cuda_graph_warmup_steps": 0, "cuda_graph_modules": "attn", "cuda_graph_impl": "transformer_engine"}
    ],
    "megatron.pad_buckets": [{"pad_buckets": "true", "zero": 1, "dp": 4}],
    "megatron.fsdp": [
        {"megatron_fsdp": strategy, "dp": 4} for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params")
    ],
    "megatron.fsdp_communication": [{**SHARDED, "megatron_fsdp_communication": "fp32"}],
    "megatron.fsdp_outer": [{**SHARDED, "megatron_fsdp_outer": "optim", "distributed_optimizer_instances": 2}],
    "megatron.fsdp_double_buffer": [{**SHARDED, "megatron_fsdp_double_buffer": "true"}],
    "megatron.fsdp_unit_size": [{**SHARDED, "megatron_fsdp_unit_size": 1000}],
    "megatron.fsdp_meta_device": [{**SHARDED, "megatron_fsdp_meta_device": "true"}],
    "megatron.fsdp_max_pool": [{**SHARDED, "megatron_fsdp_max_pool": "true"}],
    "megatron.fsdp_persistent": [
        {**SHARDED, "megatron_fsdp_persistent": "true", "megatron_fsdp_double_buffer": "true"}
    ],
    "megatron.fsdp_keep_transposes": [
        {**SHARDED, "megatron_fsdp_keep_transposes": "true", "fp8": "delayed", "fp8_parameters": "true", "seq": 512}
    ],
    "megatron.torch_fsdp": [{"torch_fsdp": "reshard", "dp": 4}, {"torch_fsdp": "keep", "dp": 4}],
    "megatron.torch_fsdp_host_init": [{"torch_fsdp_host_init": "true", "torch_fsdp": "reshard", "dp": 4}],
    "megatron.offload_layers": [{"offload_layers": 2}],
    "megatron.cp_communication": [{"cp": 2, "cp_communication": "a2a"}],
    "megatron.flash_attention": [
        {"flash_attention_release": release, "attention_backend": "flash", "head_dim": 128} for release in "34"
    ],
    "megatron.cp_inner": [{"cp": 4, "cp_communication": "a2a+p2p", "cp_inner": 2}],
    "megatron.clip_grad": [{"clip_grad": 0}],
    "megatron.bias_gelu_fusion": [{"bias_gelu_fusion": "false", "activation": "gelu", "mlp_bias": "true"}],
    "megatron.log_num_zeros_in_grad": [{"log_num_zeros_in_grad": "true"}],
    "megatron.vocab_multiple": [{"vocab_multiple": 384}],
    "megatron.transformer_impl": [{"transformer_impl": "local"}],
    "megatron.buckets": [{"num_buckets": 9, "overlap_grad_reduce": "true", "zero": 1, "dp": 2}],
    "megatron.largest_logit": [{"log_max_attention_logit": "true"}],
    "megatron.packed": [{"packed_sequences": "true"}],
    "megatron.fuses_operations": [{"use_transformer_engine_op_fuser": "true"}],
    "megatron.te_activation": [{"use_te_activation_func": "true", "bias_swiglu_fusion": "false"}],
    "megatron.clips_queries": [{"qk_clip": "true"}],
    "megatron.norm_takes_residual": [
        {"fused_residual_rmsnorm": "true", "experts": 4, "expert_ffn": 64, "expert_top_k": 2}
    ],
    "megatron.registers_buffers": [{"use_nccl_ub": "true"}],
    "megatron.sums_in_fp32": [
        {"ddp_reduce_scatter_with_fp32_accumulation": "true", "gradients": "bf16", "zero": 1, "dp": 4}
    ],
    "megatron.fp32_gradients_of": [{"fp32_gradients_of": "*linear_fc1.weight", "gradients": "bf16"}],
    "megatron.logits_dtype": [{"logits_dtype": "fp32"}],
    "megatron.precision_of": [{"precision_of_modules": "*linear_fc1=16bit", "fp8": "tensorwise"}],
    "megatron.fp8_output": [{"fp8_output_proj": "true", "gpu": "b200", "fp8": "mxfp8", "tied_embeddings": "false"}],
    "megatron.fp8_attention": [
        {"fp8_dot_product_attention": "true", "fp8": "delayed", "heads": 2, "kv_heads": 2, "head_dim": 128}
    ],
    "megatron.mlp_chunks": [{"mlp_chunks": 2}],
    "megatron.clone_scattered_embedding": [
        {"clone_scattered_embedding": "false", "tp": 2, "dp": 1, "sequence_parallel": "true"}
    ],
}
"""Where a field's other value does something: with these beside it."""


def footprint(**flags: object) -> list[object]:
    given = plan(**{"pp": 1, "mbs": 2, "gpu": "h100-80gb", "hidden_dropout": 0.1} | flags)
    (program,) = programs(given, Options(kernel_workspaces=True))
    folded = fold_program(program)
    kept = program.kept
    assert kept is not None
    tapes = [(span.module.steady.forward, span.module.steady.backward) for span in program.spans]
    kept_of = [kept.step, kept.pool, kept.construction, kept.workspaces]
    return [folded.static, folded.peak_by, program.empties, *kept_of, tapes]


OTHER_PLANS = (
    "fp32_residual", "gather_in_step", "defer_embedding_wgrad", "wgrad_deferral_limit", "tp_comm_overlap",
    "joint_latent_down", "nccl_blocks", "sharp", "detaches_heads", "mixes_states", "mamba_apart", "mamba_states",
    "mamba_chunk",
)  # fmt: skip
"""Refused, or only with several stages, latent attention, Mamba-2 layers, or of an evaluation."""


@pytest.mark.parametrize(("low", "bytes_each"), [({}, 12 * 2), ({"fp8": "tensorwise"}, 8 * 1 + 4 * 2)])
def test_user_buffers_lie_outside_of_pytorch(low: dict[str, object], bytes_each: int) -> None:
    """Of s b h elements, one for each of 12 exchanges: 8 of them gather, in 8 bits with fp8, and 4 reduce."""
    flags = {"tp": 2, "dp": 1, "sequence_parallel": "true", "gpu": "h100-80gb", **low}
    given, without = (estimate(plan(**flags, **more)).stages[0] for more in ({"tp_comm_overlap": "true"}, {}))
    assert given.requested == without.requested
    assert given.device is not None
    assert without.device is not None
    assert given.device - without.device == 256 * 256 * bytes_each


@pytest.mark.parametrize(("limit", "waiting"), [(0, 7), (3, 3), (8, 7)])
def test_deferred_weight_gradients_of_the_head(limit: int, waiting: int) -> None:
    """Of 8 micro-batches the gradients of 7 logits (2 s b v) and the head's inputs (2 s b h) wait beside the last one;
    with a limit as many as that."""
    flags = {"pp": 2, "dp": 1, "gpu": "h100-80gb"}
    deferred = {"defer_embedding_wgrad_compute": "true", "wgrad_deferral_limit": limit}
    given, without = (estimate(plan(**flags, **more)).stages[1] for more in (deferred, {}))
    assert given.requested - without.requested == waiting * 2 * 256 * (padded_vocab(plan()) + 256)
    assert given.static == without.static
    assert given.allocated - given.requested == without.allocated - without.requested


@pytest.mark.parametrize("name", [name for name in Megatron.model_fields if name not in OTHER_PLANS])
def test_every_choice_of_megatron_changes_memory_or_is_listed(name: str) -> None:
    path = f"megatron.{name}"
    default = Megatron.model_fields[name].default
    said = OTHER_VALUES.get(path, [{name: str(not default).lower()}])
    for flags in said:
        without = {key: value for key, value in flags.items() if key != by_name(name)}
        if name == "cp_inner":  # without which a2a+p2p is refused
            without[name] = 1
        changed = footprint(**flags) != footprint(**without)
        assert changed is (path not in SAME_MEMORY), flags


def by_name(name: str) -> str:
    """The flag of a field of the section, as the tests here write it."""
    return plan_fields()[f"megatron.{name}"].flag[2:].replace("-", "_")


def test_a_precision_aware_step_casts_its_states() -> None:
    """bf16 moments: with Transformer Engine 2.12 a group's are cast to fp32 at once, 4 bytes an element each; from
    2.13 the kernel reads them as they are."""
    flags = {"zero": 1, "precision_aware_optimizer": "true", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    steps = [programs(plan(te_version=te, **flags), Options())[0].kept for te in ("2.12", "2.13")]
    older, newer = (kept.step.excursion.peak for kept in steps if kept is not None)
    elements = sum(p.elements for p in programs(plan(), Options())[0].parameter_tensors() if len(p.shape) > 1)
    assert newer == 0
    assert older == pytest.approx(2 * 4 * elements, rel=0.01)


def test_an_emptied_cache_leaves_less_reserved() -> None:
    """fp16's step finds what passes have left given back, and passes what the step has left; requests stay."""
    flags = {"dtype": "fp16", "zero": 1, "hidden": 1024}
    kept, *emptied = (estimate(plan(empty_unused_memory_level=level, **flags)).stages[0] for level in (0, 1, 2))
    for one in emptied:
        assert one.requested == kept.requested
        assert one.reserved is not None
        assert kept.reserved is not None
        assert one.allocated is not None
        assert one.allocated <= one.reserved <= kept.reserved


def test_a_captured_step_has_memory_of_its_own() -> None:
    """What every later step takes is reserved beside what passes and the first step have; blocks differ in what is
    left of them. With moments in bf16 Transformer Engine 2.12 casts a group's to fp32, 8 bytes an element."""
    flags = {"zero": 1, "precision_aware_optimizer": "true", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    more: list[dict[str, object]] = [{}, {"optimizer_cuda_graph": "true"}]
    without, graphed = (estimate(plan(te_version="2.12", hidden=1024, **flags, **one)).stages[0] for one in more)
    assert without.requested == graphed.requested
    assert without.reserved is not None
    assert graphed.reserved is not None
    elements = sum(
        p.elements for p in programs(plan(hidden=1024), Options())[0].parameter_tensors() if len(p.shape) > 1
    )
    assert 8 * elements <= graphed.reserved - without.reserved <= 8 * elements + 20 * MIB
    assert "adam" in refusal(optimizer_cuda_graph="true", optimizer="sgd")
    assert "fp16" in refusal(optimizer_cuda_graph="true", dtype="fp16")


def test_an_empty_stage_passes_its_hidden_state_on() -> None:
    """``Et*4|t*4||L`` on 4 ranks: the third has no layers, and copies what it receives."""
    first, second, third, last = estimate(plan(pp=4, pipeline_layout="Et*4|t*4||L", gpu="h100-80gb")).stages
    assert third.modules == ()
    assert third.parameters == 0
    assert third.requested < second.requested
    assert first.modules[0] == "embedding"
    assert last.modules == ("final_norm", "head")


def test_a_step_of_torch_optim_is_what_an_h200_ran() -> None:
    """Record d008bcd0194b: Megatron-Core 0.16.1 without Transformer Engine and apex, 8 layers of Llama 3 8B at TP 2 and
    PP 2. The last stage's peak is the step's, with square roots of fp32 moments."""
    flags = {
        "model": "llama-3-8b", "dtype": "bf16", "framework": "megatron", "transformer-impl": "local", "layers": "8",
        "attention": "eager", "tp": "2", "pp": "2", "gpus": "4", "gbs": "8", "seq": "2048", "gpu": "h200",
        "torch": "2.11", "optimizer-implementation": "foreach", "gradient-accumulation-fusion": "false",
        "bias-dropout-fusion": "false", "masked-softmax-fusion": "false", "bias-swiglu-fusion": "false",
        "rope-fusion": "false",
    }  # fmt: skip
    first, last = estimate(read_plan(None, flags).plan).stages
    measured = (
        (first, 16_110_025_216, 7_048_725_504, 13_188_564_480),
        (last, 15_612_916_736, 7_516_414_976, 13_609_697_280),
    )
    for stage, allocated, initialisation, evaluation in measured:
        assert abs((stage.moments["evaluation"] or 0) - evaluation) <= 8192
        assert abs((stage.allocated or 0) - allocated) <= 512
        assert abs((stage.moments["initialisation"] or 0) - initialisation) <= 3 << 20  # tensors, beside blocks
    assert last.peak.tensor == "exp_avg_sq_sqrt"
