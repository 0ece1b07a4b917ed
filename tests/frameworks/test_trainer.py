"""What the Trainer adds, against the real code of PyTorch and transformers that it calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments
from transformers.trainer_pt_utils import EvalLoopContainer

from memplan.allocator import replay
from memplan.estimate import estimate, fold
from memplan.frameworks.plain import programs as plain
from memplan.frameworks.plain.programs import trainer
from memplan.layers.module import Options, Parameter
from memplan.plan.errors import PlanError
from memplan.plan.plan import Optimizer, Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Category, Drop, Hold, Tape, fold_once, rounded
from memplan.tape.program import fold_program

from ..oracle.tracer import Follow, Trace, run
from ..oracle.training_step import update

SHAPES = st.lists(st.sampled_from([(7,), (64, 48), (1000, 48), (3, 5)]), min_size=1, max_size=6)


def peak_of(tape: Tape) -> int:
    held = highest = 0
    for event in tape:
        held += event.bytes if isinstance(event, Hold) else -event.bytes if isinstance(event, Drop) else 0
        highest = max(highest, held)
    assert held == 0
    return highest


@settings(max_examples=15, deadline=None)
@given(SHAPES, st.sampled_from(["fp32", "bf16"]))
def test_clipping_is_pytorchs(shapes: list[tuple[int, ...]], dtype: str) -> None:
    """Peak of ``clip_grad_norm_`` above what was held, and nothing left but the norm that the caller takes."""
    peaks: list[int] = []

    def body(trace: Trace, follow: Follow) -> None:
        parameters = [torch.nn.Parameter(torch.empty(shape, dtype=getattr(torch, NAMES[dtype]))) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        start, at = trace.live, len(trace.changes)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        assert trace.live == start
        live = highest = 0
        for change in trace.changes[at:]:
            live += change.sign * change.bytes
            highest = max(highest, live)
        peaks.append(highest)

    run(body)
    parameters = [Parameter(str(at), shape) for at, shape in enumerate(shapes)]
    assert peak_of(trainer.clipping(parameters, dtype, kernel_workspaces=False)) == peaks[0]


NAMES = {"fp32": "float32", "bf16": "bfloat16"}


def test_kernels_of_clipping_take_a_number_for_every_chunk_of_the_largest() -> None:
    """Two gradients of 2 and 1 chunks: 2 x 2 numbers, and 16,016 chunks of two more of 2**30 elements: 64 KiB each."""
    small = [Parameter("a", (2, 65_536)), Parameter("b", (5,))]
    inside = next(event for event in trainer.clipping(small, "bf16", kernel_workspaces=True) if isinstance(event, Hold))
    assert (inside.shape, inside.dtype, inside.category) == ((4,), "fp32", Category.WORKSPACES)
    large = [*small, Parameter("c", (2**15, 2**15))]
    inside = next(event for event in trainer.clipping(large, "bf16", kernel_workspaces=True) if isinstance(event, Hold))
    assert inside.shape == (3 * 2**14,)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_step_of_two_groups_is_pytorchs(name: str, decay: float) -> None:
    """Temporaries of weights that decay have ended when those of the rest appear; names tell, not shapes."""
    shapes = {"up.weight": (64, 48), "up.bias": (48,), "experts.down_bias": (100, 48), "sinks": (7,)}
    peaks: list[int] = []

    def body(trace: Trace, follow: Follow) -> None:
        made = {name: torch.nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()}
        parameters = list(made.values())
        groups = [
            {"params": [made["up.weight"], made["sinks"]], "weight_decay": decay},
            {"params": [made["up.bias"], made["experts.down_bias"]], "weight_decay": 0.0},
        ]
        kind: Any = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
        optimizer = kind(groups, lr=0.1, foreach=True)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            start, at = trace.live, len(trace.changes)
            update(optimizer, trace)
        live = highest = start
        for change in trace.changes[at:]:
            live += change.sign * change.bytes
            highest = max(highest, live)
        peaks.append(highest - start)

    run(body)
    optimizer = Optimizer.model_validate({"name": name, "implementation": "foreach", "weight_decay": decay})
    parameters = [Parameter(*one) for one in shapes.items()]
    assert sum(hold.bytes for hold in trainer.step_by_groups(optimizer, parameters, "fp32")) == peaks[0]


SMALL = {"model": "gpt2", "layers": "2", "seq": "64", "attention": "eager", "trainer": "transformers", "dtype": "bf16"}


def plan(**flags: object) -> Plan:
    merged = {**SMALL, **{k.replace("_", "-"): str(v) for k, v in flags.items()}}
    return resolve(read_plan(None, merged).plan)


@pytest.mark.parametrize("batches", [1, 2, 3, 7])
def test_logits_of_evaluation_are_kept_as_by_transformers(batches: int) -> None:
    """``EvalLoopContainer`` of logits and of labels, as ``evaluation_loop`` fills them."""
    chosen = plan(mbs=2, eval_batches=batches, autocast="true")
    b, s, v = 2, 64, chosen.model.vocab
    held: list[int] = []
    peaks: list[int] = []

    def body(trace: Trace, follow: Follow) -> None:
        predictions, references = EvalLoopContainer(), EvalLoopContainer()
        for _ in range(batches):
            held.append(trace.live)
            logits, labels = torch.empty(b, s, v), torch.empty(b, s, dtype=torch.int64)
            at, live = len(trace.changes), trace.live
            predictions.add(logits)
            references.add(labels)
            highest = live
            for change in trace.changes[at:]:
                live += change.sign * change.bytes
                highest = max(highest, live)
            peaks.append(highest)

    run(body)
    during, appended = trainer.kept_logits(chosen, plain.layer_shape(chosen))
    assert during == held[-1]
    one, every = rounded(8 * b * s), rounded(8 * batches * b * s)
    assert peaks[-1] <= appended <= peaks[-1] + one + every  # labels and logits are counted as appended at once


def test_evaluation_keeps_logits_of_all_ranks() -> None:
    one = plan(eval_batches=4, framework="single")
    two = plan(eval_batches=4, framework="ddp", gpus=2)
    shape = plain.layer_shape(one)
    gathered, own = trainer.kept_logits(two, shape)[1], trainer.kept_logits(one, shape)[1]
    assert gathered == pytest.approx(2 * own, abs=2 * rounded(1))
    with_logits, without = (
        estimate(one).stages[0].moments["evaluation"],
        estimate(plan()).stages[0].moments["evaluation"],
    )
    assert with_logits is not None
    assert without is not None
    assert with_logits > without


def test_evaluation_has_a_batch_size_of_its_own() -> None:
    small, large = estimate(plan(eval_mbs=1, mbs=2)).stages[0], estimate(plan(eval_mbs=16, mbs=2)).stages[0]
    assert small.requested == large.requested
    assert small.moments["evaluation"] is not None
    assert large.moments["evaluation"] is not None
    assert small.moments["evaluation"] < large.moments["evaluation"]


def test_micro_batches_of_a_step_are_on_the_device_together() -> None:
    """Token ids and labels of 8 micro-batches, where a plain loop has those of one."""
    alone, together = estimate(plan(trainer="none", accumulation=8)), estimate(plan(accumulation=8))
    size = rounded(8 * 64)
    assert alone.stages[0].of(Category.INPUTS) == 2 * size
    assert together.stages[0].of(Category.INPUTS) == 16 * size


def test_logits_leave_autocast_in_fp32() -> None:
    """``ConvertOutputsToFp32``: the head's last tensor, when the casts of weights have ended."""
    (program,) = plain.programs(plan(autocast="true", recompute="full"), Options())
    head = program.spans[-1].module
    assert isinstance(head.steady.end[-1], Drop)
    converted = [event for event in head.steady.end if isinstance(event, Hold)]
    assert [event.name for event in converted] == ["logits_converted"]
    assert converted[0].dtype == "fp32"
    (plainly,) = plain.programs(plan(autocast="true", trainer="none"), Options())
    assert not any(isinstance(event, Hold) for event in plainly.spans[-1].module.steady.end)


def test_clipping_precedes_the_step() -> None:
    folded, without = fold(plan(gpu="h100-80gb"))[0], fold(plan(gpu="h100-80gb", trainer="none"))[0]
    assert folded.step_peak >= without.static
    (program,) = plain.programs(plan(), Options())
    assert fold_program(program).static - without.static == sum(hold.bytes for hold in trainer.SCALARS)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"trainer": "none", "eval_batches": 3}, "trainer.evaluation_batches"),
        ({"framework": "fsdp", "gpus": 2}, "trainer.loop"),
        ({"loss": "cut", "eval_batches": 2}, "no logits to keep"),
        ({"accumulation": 3, "gbs": 4}, "batch.accumulation"),
    ],
)
def test_contradictions_are_refused(flags: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        plan(**flags)


def test_states_appear_as_transformers_groups_parameters(tmp_path: Path) -> None:
    """Of ``create_optimizer``: the table of words first, though the head has it, too; then what decays, layer by layer,
    and all that does not; behind the clipping of gradients."""
    chosen = plan(model="qwen3-0.6b", optimizer="adam8bit", vocab=900, hidden=128, ffn=192, heads=2, kv_heads=1)
    (program,) = plain.programs(chosen, Options())
    spec = chosen.model
    config = Qwen3Config(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.ffn,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    trainer_ = Trainer(model=model, args=TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    decaying, others = (group["params"] for group in trainer_.create_optimizer().param_groups)
    moments = [one for one in replay.states(program, named=True) if one.name.endswith("/state1")]
    made = [hold.bytes for hold in moments]
    assert made[: len(decaying)] == [_moment(one, one is decaying[0]) for one in decaying]
    assert sorted(made[len(decaying) :]) == sorted(_moment(one, False) for one in others)
    assert program.clipping > 0
    assert fold_once(program.step[: program.clipping]).net == 0


def _moment(parameter: torch.Tensor, in_32bit: bool) -> int:
    """Bytes of ``get_state_buffer``; embeddings have ``optim_bits`` 32."""
    return rounded(parameter.numel() * (4 if in_32bit or parameter.numel() < 4096 else 1))


def test_weights_of_a_quantised_model_lie_where_one_request_was() -> None:
    """What a run with transformers 5.23 asked for first: the table (128,256 x 2,048) and 33 norms in bf16, half a byte
    for each element of the layers' matrices; neither adapters, nor what is cast to fp32 later."""
    lora = {"lora_rank": 16, "quantisation": "nf4", "kbit_preparation": "true", "recompute": "full"}
    (program,) = plain.programs(plan(model="llama-3.2-1b", layers=16, **lora), Options())
    made, ended = program.before
    assert isinstance(made, Hold)
    assert (made.bytes, ended.bytes) == (1_012_011_008, 1_012_011_008)
    (older,) = plain.programs(plan(model="llama-3.2-1b", versions="transformers=4.57.0", **lora), Options())
    assert not older.before
