"""Megatron-Core's T5 as a whole, against hand calculations. Its decoder's layer: ``test_local_layer.py``."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.arguments import plan_of_arguments
from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.replay import replay
from memplan.estimate import estimate
from memplan.frameworks.megatron.programs import programs
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Hold
from memplan.tape.program import Program, fold_program

ARGUMENTS: dict[str, object] = {
    "--encoder-num-layers": 3, "--decoder-num-layers": 3, "--hidden-size": 256, "--num-attention-heads": 4,
    "--kv-channels": 64, "--ffn-hidden-size": 1024, "--encoder-seq-length": 256, "--decoder-seq-length": 64,
    "--max-position-embeddings": 256, "--micro-batch-size": 2, "--global-batch-size": 12, "--bf16": True,
    "--tokenizer-type": "NullTokenizer", "--vocab-size": 999, "--transformer-impl": "local",
}  # fmt: skip


def plan(**more: object) -> ResolvedPlan:
    said = ARGUMENTS | {f"--{name.replace('_', '-')}": value for name, value in more.items()}
    given = {name: value for name, value in said.items() if value is not None}
    return resolve(plan_of_arguments(given, {}, gpus=6, family="t5").plan)


def program(**more: object) -> Program:
    (made,) = programs(plan(**more), Options())
    return made


def test_parameters_of_encoder_and_decoder() -> None:
    """h = 256, f = 1,024, 1,024 tokens (of 1,000) and 256 positions. A layer of the encoder: 12 h² of matrices and
    13 h of biases and norms; of the decoder 4 h² and 6 h more, for queries, keys, values, output and a norm. Two final
    norms, and the head's bias, which is there because the table is the embedding's."""
    h = 256
    encoder = 12 * h * h + 13 * h
    decoder = encoder + 4 * h * h + 6 * h
    assert program().parameters() == 3 * (encoder + decoder) + (1024 + 256) * h + 4 * h + 1024


def test_a_decoder_saves_what_it_reads_of_the_encoder() -> None:
    """Beyond a layer of a GPT with 64 tokens, in 2 bytes, b = 2, h = 256, d = 64 and s = 256 tokens: the norm's input
    (a residual) and output, its mean and deviation, queries, the projection to keys and values (2 h wide), the
    probabilities of 4 heads before and after dropout, with its mask of one byte, the context, and the mask of the
    output's dropout."""
    b, h, d, s, a = 2, 256, 64, 256, 4
    own = next(span for span in program().spans if "decoder.0" in span.names)
    alone = {**ARGUMENTS, "--encoder-seq-length": d}
    gpt = plan_of_arguments(alone, {}, gpus=6)
    (same,) = programs(resolve(gpt.plan), Options())
    other = next(span for span in same.spans if "layer.0" in span.names)
    norm = 2 * (2 * b * d * h) + 2 * 4 * b * d
    scores = b * a * d * s
    crossing = norm + 2 * b * d * h + 2 * b * s * 2 * h + 2 * scores + 2 * scores + scores + 2 * b * d * h + b * d * h
    saved = own.module.steady.forward_fold.net - other.module.steady.forward_fold.net
    assert saved == crossing


@pytest.mark.parametrize("more", [{}, {"transformer_impl": "transformer_engine"}, {"deterministic_mode": True}])
def test_every_iteration_leaves_nothing_behind_and_the_replay_agrees(more: dict[str, Any]) -> None:
    made = program(**more)
    passes = made.order.chunks[0].passes
    assert passes.forward.net + passes.backward.net == 0
    folded = fold_program(made)
    (replayed,) = replay((made,), AllocatorSettings(), ())
    assert 0 <= replayed.allocated - folded.peak < 12 * 2**20


def test_the_sum_of_the_gradients_of_the_encoder_s_output_waits() -> None:
    """(256, 2, 256) in 2 bytes, from the decoder's backward to that of its embedding."""
    names = {name: span.module for span in program().spans for name in span.names}
    begun = [event for event in names["final_norm"].steady.backward if isinstance(event, Hold)]
    assert [event.bytes for event in begun if event.name == "grad_encoder_output_sum"] == [2 * 256 * 2 * 256]
    assert names["decoder_embedding"].steady.backward_fold.net >= -2 * 256 * 2 * 256


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"decoder_seq_length": None}, "--decoder-seq-length: is missing"),
        ({"pipeline_model_parallel_size": 3}, "layout.pp = 3: must be 1 with family t5, which has no pipeline"),
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, "recompute.mode = full: must be none"),
        ({"position_embedding_type": "rope"}, "model.positions = rotary: must be learned for family t5"),
        ({"use_megatron_fsdp": True}, "megatron.fsdp = optim_grads_params: must be none with family t5"),
    ],
)
def test_what_is_not_modelled_is_refused(more: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError) as found:
        estimate(plan(**more))
    assert said in str(found.value)


def test_a_decoder_that_nobody_has_is_refused() -> None:
    found = plan()
    gpt = found.model_copy(update={"model": found.model.model_copy(update={"family": "gpt", "causal": True})})
    with pytest.raises(PlanError, match=r"batch\.decoder_seq = 64: must be left out"):
        estimate(gpt)


def test_no_other_framework_has_a_decoder_of_another_length() -> None:
    """transformers' T5 is known from traces, whose decoder reads as many tokens as its encoder."""
    flags = {"model": "t5-small", "framework": "single", "seq": "512", "decoder-seq": "64"}
    with pytest.raises(PlanError, match=r"batch\.decoder_seq = 64: must be left out with framework single; megatron"):
        resolve(read_plan(None, flags, traced=True).plan)


@pytest.mark.parametrize(
    ("gpu", "more", "said"),
    [
        (
            "gb200",
            {"attention_dropout": 0.1},
            "attention_backend = auto: means flash attention on gb200: cuDNN's is not deterministic there with "
            "attention dropout 0.1 (NVTE_ALLOW_NONDETERMINISTIC_ALGO=0)",
        ),
        ("a100-80gb", {}, "cuDNN's is not deterministic there (NVTE_ALLOW_NONDETERMINISTIC_ALGO=0), and"),
        ("h100-80gb", {"attention_backend": "flash"}, "attention_backend = flash: must be auto or fused: flash"),
        ("gb200", {"attention_dropout": 0.0}, ""),
        ("h100-80gb", {}, ""),
    ],
)
def test_flash_attention_behind_a_padding_mask(gpu: str, more: dict[str, Any], said: str) -> None:
    """``get_attention_backend``: deterministic, cuDNN's is left to Hopper, and to Blackwell without dropout."""
    given = ARGUMENTS | {"--transformer-impl": "transformer_engine", "--deterministic-mode": True}
    given |= {f"--{name.replace('_', '-')}": value for name, value in more.items()}
    environment = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    read = plan_of_arguments(given, environment, gpus=6, family="t5").plan
    made = resolve(read.model_copy(update={"hardware": read.hardware.model_copy(update={"gpu": gpu})}))
    if said:
        with pytest.raises(PlanError) as found:
            estimate(made)
        assert said in str(found.value)
    else:
        estimate(made)
