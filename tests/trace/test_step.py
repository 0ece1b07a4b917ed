"""Traces beside estimates and beside an independent tracer, for every family that has a recipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import transformers

from memplan.estimate import programs_of
from memplan.families import family as family_of
from memplan.layers.module import Options
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Category, Drop, Event, Hold, fold
from memplan.tape.program import Program
from memplan.trace.comparison import ENDS, Comparison, compared
from memplan.trace.framework import job_of_plan
from memplan.trace.job import Job
from memplan.trace.recording import BACKWARD, EMBEDDING, FORWARD, HEAD, OPTIMIZER, Traced
from memplan.trace.run import planned
from memplan.trace.step import traced_step

from ..oracle.training_step import traced_step as witnessed_step

SMALL = {"layers": "3", "mbs": "2", "seq": "64", "framework": "single"}
SIZES = {"hidden": "64", "heads": "4", "kv-heads": "4", "head-dim": "16", "ffn": "160", "vocab": "1003"}
LATENT = {"head-dim": "48", "nope-head-dim": "32", "rope-head-dim": "16", "value-head-dim": "24"}
LATENT |= {"latent-kv-rank": "40", "shared-expert-ffn": "96"}
FAMILIES = {
    "gpt2": "gpt2",
    "gpt_bigcode": "santacoder",
    "bert": "bert-large",
    "llama": "llama-2-7b",
    "mistral": "mistral-7b",
    "qwen3": "qwen3-8b",
    "qwen2": "qwen2.5-7b",
    "phi3": "phi-3-mini",
    "gemma": "gemma-7b",
    "gemma2": "gemma-2-9b",
    "opt": "opt-6.7b",
    "gpt_neox": "gpt-neox-20b",
    "gptj": "gpt-j-6b",
    "falcon": "falcon-7b",
    "mixtral": "mixtral-8x7b",
    "qwen2_moe": "qwen2-57b-a14b",
    "qwen3_moe": "qwen3-30b-a3b",
    "olmoe": "olmoe-1b-7b",
    "gpt_oss": "gpt-oss-20b",
    "granite": "granite-3.1-2b",
    "granitemoehybrid": "granite-4.0-micro",
    "granitemoe": "granite-3.0-3b-a800m",
    "deepseek_v2": "deepseek-v2-lite",
    "deepseek_v3": "moonlight-16b",
    "glm": "glm-4-9b-chat",
    "glm4": "glm-4-9b-0414",
    "glm4_moe": "glm-4.5-air",
    "dots1": "dots.llm1",
    "ernie4_5": "ernie-4.5-0.3b",
    "glm4_moe_lite": "glm-4.7-flash",
    "minimax_m2": "minimax-m2",
    "ministral3": "ministral-3-8b",
    "llama4_text": "llama-4-scout",
    "gemma3_text": "gemma-3-4b",
    "gemma4_text": "gemma-4-31b",
    "gemma4_unified_text": "gemma-4-31b",
    "exaone4": "exaone-4.0-32b",
    "olmo3": "olmo-3-7b",
    "starcoder2": "starcoder2-3b",
    "olmo2": "olmo-2-7b",
    "smollm3": "smollm3-3b",
    "seed_oss": "seed-oss-36b",
    "cohere": "command-r-plus",
    "cohere2": "command-r7b",
}
DELTA = {"qwen3_next": "qwen3-next-80b-a3b", "qwen3_5": "qwen3.5-9b", "qwen3_5_moe": "qwen3.5-35b-a3b"}
"""Families with gated delta nets, which a trace runs by transformers' own operators alone, in 16 bits."""
UNTRACED = {"deepseek_v32": "deepseek-v3.2"}
"""Families that no trace is made of."""
LAID_OUT = 2 * 64 * 32 * 2
"""Bytes of a copy of the rates' gradients, 2 x 64 tokens of 32 heads, which ``softplus_backward`` gives token by token
on fake tensors and, like all operators of their kind, as they arrive elsewhere. There the convolution's weight has its
gradient behind that of the input, too, and variables end in an order of Python's own: no order is compared."""
SCALARS = 1024
"""Bytes of the loss and of its gradient, which end in a caller's frame."""


def of(**flags: str) -> tuple[Job, Program]:
    plan = resolve(read_plan(None, {**SMALL, **flags}).plan)
    (program,) = programs_of(plan, Options())
    return job_of_plan(plan), program


def model_flags(family: str) -> dict[str, str]:
    sizes = SIZES | ({"kv-heads": "1"} if family in ("falcon", "gpt_bigcode") else {})
    if family_of(family).mixture is not None:
        sizes |= {"experts": "4", "expert-top-k": "2", "expert-ffn": "48"}
    if family.startswith("deepseek") or family == "glm4_moe_lite":
        sizes |= LATENT
    if family == "deepseek_v32":
        sizes |= {"router-groups": "2", "router-group-top-k": "1", "index-heads": "3", "index-head-dim": "40"}
        sizes |= {"index-top-k": "24"}
    if family in ("glm4_moe", "dots1", "qwen2_moe", "llama4_text"):
        sizes |= {"shared-expert-ffn": "48"}
    if family.startswith("gemma4"):
        sizes |= {"family": family}
        sizes |= {"kv-heads": "2", "full-head-dim": "32", "full-kv-heads": "1", "full-interval": "3"}
    if family == "starcoder2":  # its model itself drops features of the embedding, which a trace counts to layer 0
        sizes |= {"embedding-dropout": "0.0"}
    return {"model": (FAMILIES | DELTA | UNTRACED)[family], **sizes}


def targets_of(family: str) -> dict[str, str]:
    """Adapters are refused of experts, and those of attention taken."""
    if family.startswith("deepseek") or family == "glm4_moe_lite":
        return {"lora-targets": "q_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj"}
    return {"lora-targets": "q_proj,k_proj,v_proj,o_proj"} if family_of(family).mixture is not None else {}


def sizes(events: Iterable[Event]) -> list[int]:
    return [e.bytes if isinstance(e, Hold) else -e.bytes for e in events if isinstance(e, Hold | Drop)]


def step(**flags: str) -> tuple[Traced, Comparison]:
    job, program = of(**flags)
    traced = traced_step(job)
    return traced, compared(traced, program)


SETTINGS = {
    "fp32": {"dtype": "fp32", "attention": "eager", "gbs": "4"},
    "recomputed": {"dtype": "bf16", "attention": "eager", "recompute": "full"},
    "flash": {"dtype": "bf16", "attention": "flash", "gbs": "2"},
    "fp16": {"dtype": "fp16", "attention": "eager"},
}
EVERYWHERE = ("gpt2", "bert", "llama", "qwen3_moe")
"""In every setting; other families in one, and in a second one that is slow."""
CASES = [
    pytest.param(family, setting, marks=[] if family in EVERYWHERE or turn == at % 4 else [pytest.mark.slow])
    for at, family in enumerate(FAMILIES)
    for turn, (setting, flags) in enumerate(SETTINGS.items())
    if family in EVERYWHERE or turn % 2 == at % 2
    if flags["attention"] == "eager" or not family_of(family).no_flash
    if "recompute" not in flags or not family_of(family).returns_weights
]
CASES += [
    pytest.param(family, setting, marks=[] if (family, setting) == ("qwen3_5", "flash") else [pytest.mark.slow])
    for family, setting in product(DELTA, ("flash", "recomputed"))
]


@pytest.mark.parametrize(("family", "setting"), CASES)
def test_trace_equals_estimate(family: str, setting: str) -> None:
    """Every named point but for the loss's scalars, every layer to the byte, and every event of the middle one:
    in the first micro-batch in order, in a later one but for when gradients of weights and biases end."""
    job, program = of(**model_flags(family), **SETTINGS[setting])
    traced = traced_step(job)
    comparison = compared(traced, program)
    module = next(span.module for span in program.spans if "layer.1" in span.names)
    for microbatch in range(job.microbatches):
        tapes = module.steady if microbatch else module.first
        for phase, tape in ((FORWARD, tapes.forward), (BACKWARD, tapes.backward)):
            found, expected = sizes(traced.events("layer.1", phase, microbatch)), sizes(tape)
            lacking = Counter(expected) - Counter(found)
            assert not Counter(found) - Counter(expected)
            if family in DELTA:
                assert set(map(abs, lacking)) <= {LAID_OUT}
                continue
            assert not lacking
            assert found == expected or (microbatch and phase == BACKWARD)
    assert comparison.furthest <= SCALARS
    layers = [row for row in comparison.rows if row.entry not in (EMBEDDING, HEAD)]
    assert len(layers) >= 6
    for row in layers:
        assert row.estimated is not None
        assert (row.traced.net, row.traced.peak) == (row.estimated.net, row.estimated.peak), row
    for row in comparison.rows:
        assert row.estimated is not None
        assert abs(row.traced.net - row.estimated.net) <= SCALARS


@pytest.mark.parametrize(
    "optimizer",
    [
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "momentum": "0.9"},
        {"optimizer": "adam", "optimizer-implementation": "for-loop"},
        {"optimizer": "adamw", "optimizer-implementation": "fused"},
        {"optimizer": "adafactor", "optimizer-implementation": "foreach"},
        {"optimizer": "adafactor", "optimizer-implementation": "for-loop"},
    ],
)
def test_optimizers(optimizer: dict[str, str]) -> None:
    _, comparison = step(**model_flags("gpt2"), **optimizer)
    assert comparison.furthest <= SCALARS


def test_same_sizes_as_an_independent_tracer() -> None:
    """The tests' own tracer, which sums gradients out of place as PyTorch does under a mode."""
    job, _ = of(**model_flags("gpt2"), dtype="fp32", attention="eager")
    traced = traced_step(job, sums_in_place=False)
    config = transformers.AutoConfig.for_model(
        job.config["model_type"], **{k: v for k, v in job.config.items() if k != "model_type"}
    )
    witness = witnessed_step(config, job.b, job.s, "fp32", flash=False, recompute=False)
    for phase, changes in ((FORWARD, witness.forward), (BACKWARD, witness.backward), (OPTIMIZER, witness.optimizer)):
        excursion = traced.recording.of(0, phase)
        net = sum(change.sign * change.bytes for change in changes)
        loss = 512 * (phase == BACKWARD) - 512 * (phase == OPTIMIZER)  # ends with backward here, with the step there
        assert excursion.net == net - loss


def test_categories_and_places() -> None:
    traced, _ = step(**model_flags("llama") | {"hidden": "128"}, recompute="full", dtype="fp32", attention="eager")
    recording = traced.recording
    whole = fold(recording.events)
    assert sum(whole.peak_by) == whole.peak
    setup = traced.setup.net_by
    n = traced.outline.parameters
    assert setup[Category.PARAMETERS] == 4 * n
    assert setup[Category.OPTIMIZER_STATES] == 8 * n
    assert recording.of(0, BACKWARD).net_by[Category.GRADIENTS] == 4 * n
    assert recording.of(0, OPTIMIZER).net_by[Category.GRADIENTS] == -4 * n
    assert any(place.recompute and place.module == "model.layers.1.mlp" for place in recording.places)
    logits = [e for e in recording.events if isinstance(e, Hold) and e.category is Category.LOGITS]
    assert {event.shape[-1] for event in logits} == {1003}
    assert set(traced.entries) == {"", EMBEDDING, "layer.0", "layer.1", "layer.2", *ENDS[::2], "optimizer"}


def test_json_and_back() -> None:
    traced, _ = step(**model_flags("bert"))
    again = Traced.from_json(traced.to_json())
    assert again.recording.events == traced.recording.events
    assert again.recording.places == traced.recording.places
    assert again.outline == traced.outline


SIZED: dict[str, Any] = {"vocab_size": 1003, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZED |= {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 66}
GROUPED = {**SIZED, "num_key_value_heads": 2}
WHISPER: dict[str, Any] = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_source_positions": 40}
WHISPER |= {"encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_target_positions": 64}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
WITHOUT_RECIPE: dict[str, dict[str, Any]] = {
    "flex_olmo": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0, "eos_token_id": 0},
    "olmo": SIZED,
    "helium": {**GROUPED, "head_dim": 16},
    "roberta": SIZED,
    "t5": {"vocab_size": 1003, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    "vit": {**SIZED, "image_size": 64, "patch_size": 16},
    "whisper": {"vocab_size": 1003, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, **WHISPER},
    "bloom": {"vocab_size": 1003, "hidden_size": 64, "n_layer": 2, "n_head": 4},
}


@pytest.mark.parametrize("kind", WITHOUT_RECIPE)
def test_models_without_a_recipe(kind: str, tmp_path: Path) -> None:
    """End to end: what was there before is there after, and every layer has its activations."""
    made = transformers.AutoConfig.for_model(kind, **WITHOUT_RECIPE[kind])
    made.to_json_file(tmp_path / "config.json", use_diff=False)
    asked = planned(None, {"model": str(tmp_path), "mbs": "2", "seq": "32", "attention": "eager"})
    assert asked.program is None
    assert asked.reason
    traced = traced_step(asked.job)
    points = {one.name: one.traced for one in compared(traced, None).points}
    assert points["between steps"] == points["after the step"] < points["peak of forward and backward"]
    layers = [row for row in compared(traced, None).rows if row.phase == FORWARD and "." in row.entry]
    assert len(layers) == (4 if kind in ("t5", "whisper") else 2)
    assert all(row.traced.net > 0 for row in layers)


SHARDED: dict[str, dict[str, str]] = {
    "default": {"gpus": "8", "gbs": "32"},
    "hsdp": {"gpus": "8", "fsdp-replicas": "2", "gbs": "32"},
    "kept": {"gpus": "4", "reshard-after-forward": "false"},
    "partly": {"gpus": "8", "reshard-to": "4", "recompute": "full"},
    "unsynced": {"gpus": "8", "gradient-sync": "false", "gbs": "32"},
    "bf16": {"gpus": "5", "fsdp-reduce": "bf16", "fsdp-parameters": "bf16", "attention": "eager"},
    "root": {"gpus": "8", "reshard-root": "true", "ends-apart": "false", "gbs": "64"},
}


@pytest.mark.parametrize("sharding", SHARDED)
def test_fully_shard(sharding: str) -> None:
    """One rank of several, under torch's own fully_shard."""
    traced, comparison = step(**model_flags("llama") | SHARDED[sharding] | {"framework": "fsdp"})
    assert comparison.furthest <= SCALARS
    assert traced.setup.net_by[Category.PARAMETERS] > 0
