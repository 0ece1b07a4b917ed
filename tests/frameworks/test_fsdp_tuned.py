"""LoRA and QLoRA under ``fully_shard`` against peft's, bitsandbytes' and PyTorch's own code, event by event: frozen
parameters are gathered and not reduced, adapters are cast on their way from fp32 shards, 4-bit weights are packed.

bitsandbytes is large, so its steps are on file: ``python -m tests.frameworks.test_fsdp_tuned`` records them anew, with
what ``VERSIONS`` names.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, dropwhile, takewhile
from pathlib import Path

import pytest

from memplan.frameworks.fsdp import programs as fsdp
from memplan.layers.module import Options
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import ROUND, Hold, rounded
from memplan.tape.program import Program, fold_program

from ..layers.test_against_transformers import drops_sorted, named, sizes, without_grad_loss, without_scalars
from ..layers.tuned_comparison import config_of
from ..oracle import fsdp as oracle
from ..oracle.tracer import Change
from ..oracle.tuned_step import lora

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("peft", reason="peft is not installed (the extra dev has it)")

RANK, B, S = 8, 2, 64
VERSIONS = "bitsandbytes 0.50.2, peft 0.21.2, accelerate 1.15.0, transformers 5.23.0, torch 2.13.0"
RECORDED = Path(__file__).with_name("fsdp_four_bit_steps.json")


@dataclass(frozen=True)
class Case:
    model: str
    targets: str
    recompute: str = "none"
    attention: str = "flash"
    shards: int = 4
    adapters: str = "fp32"
    reduce: str = "fp32"
    dropout: float = 0.0
    reshard: bool = True
    microbatches: int = 1
    ends_apart: bool = False
    """As Accelerate shards since 1.14."""
    four_bit: str = ""
    """``nf4``, or ``double``: its scales are quantised, too."""

    def __str__(self) -> str:
        return "-".join(str(value) for name, value in vars(self).items() if value or name != "ends_apart")


CASES = (
    Case("llama", "q_proj,v_proj"),
    Case("llama", "q_proj,v_proj", shards=1, reduce="bf16"),
    Case("llama", "q_proj,v_proj", "full"),
    Case("llama", "all-linear", "full", shards=3, reduce="bf16", dropout=0.1, microbatches=2),
    Case("llama", "q_proj,v_proj", adapters="bf16", reshard=False, microbatches=2),
    Case("qwen3", "all-linear", "none", reduce="bf16"),
    Case("gpt2-untied", "c_attn,c_proj", "full", "eager"),
    Case("llama-tied-dropout", "all-linear", "none", "eager"),
    Case("phi3", "all-linear", "full", shards=5),
    Case("llama", "q_proj,v_proj", ends_apart=True),
    Case("llama", "all-linear", "full", shards=3, reduce="bf16", microbatches=2, ends_apart=True),
    Case("llama-tied-dropout", "all-linear", "none", "eager", ends_apart=True),
    Case("gpt2-untied", "c_attn,c_proj", "full", "eager", ends_apart=True),
    Case("gpt2", "c_attn,c_proj", "none", "eager", reshard=False, microbatches=2, ends_apart=True),
)


QUANTISED = (
    Case("llama", "q_proj,v_proj", "none", "eager", reduce="bf16", four_bit="nf4"),
    Case("llama", "all-linear", "full", "eager", shards=3, reduce="bf16", four_bit="double"),
    Case("qwen3", "all-linear", "full", "eager", shards=8, reduce="bf16", four_bit="double"),
)


def program_of(case: Case, folder: Path) -> Program:
    config_of(case.model).to_json_file(folder / "config.json", use_diff=False)
    flags = {
        "model": str(folder),
        "framework": "fsdp",
        "gpus": str(case.shards),
        "mbs": str(B),
        "seq": str(S),
        "accumulation": str(case.microbatches),
        "attention": case.attention,
        "recompute": case.recompute,
        "lora-rank": str(RANK),
        "lora-targets": case.targets,
        "lora-dropout": str(case.dropout),
        "lora-dtype": case.adapters,
        "fsdp-reduce": case.reduce,
        "reshard-after-forward": str(case.reshard).lower(),
        "ends-apart": str(case.ends_apart).lower(),
    }
    if case.four_bit:
        flags |= {"quantisation": "nf4", "double-quantisation": str(case.four_bit == "double").lower()}
    (program,) = fsdp.programs(resolve(read_plan(None, flags).plan), Options(accumulates_in_place=False))
    return program


def sharding_of(case: Case) -> oracle.Sharding:
    return oracle.Sharding(
        shards=case.shards,
        original="bf16",
        reduce_dtype=case.reduce,
        reshard_after_forward=case.reshard,
        ends_apart=case.ends_apart,
        synced=(True,) * case.microbatches,
    )


def _with_loss(stretch: Sequence[Change]) -> list[Change]:
    """What the graph holds until the loss ends, which here is when the next stretch begins: an embedding's output that
    is a leaf, and its gradient."""
    return [one for one in takewhile(lambda one: one.sign < 0, stretch) if one.bytes > ROUND]


def _behind_loss(stretch: Sequence[Change]) -> list[Change]:
    return list(dropwhile(lambda one: one.sign < 0, stretch))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_with_adapters(case: Case, tmp_path: Path) -> None:
    program = program_of(case, tmp_path)
    steps = oracle.traced_steps(
        config_of(case.model),
        B,
        S,
        sharding_of(case),
        flash=case.attention == "flash",
        recompute=case.recompute == "full",
        tune=lora(RANK, tuple(case.targets.split(",")), case.dropout, case.adapters),
    )
    modules = [span.module for span in program.spans for _ in span.names]
    for microbatch in range(case.microbatches):
        forward, backward, following = steps.stretches[2 * microbatch : 2 * microbatch + 3]
        backward = [*backward, *_with_loss(following)]
        told = [event for one in modules for event in named(one, one.steady.forward)]
        back = [(one, one.steady if microbatch else one.first) for one in reversed(modules)]
        told_back = [event for one, tapes in back for event in named(one, tapes.backward)]
        assert drops_sorted(sizes(told)) == drops_sorted(sizes(_behind_loss(forward)))
        assert drops_sorted(sizes(without_scalars(told_back))) == drops_sorted(sizes(without_grad_loss(backward)))
    folded, labels = fold_program(program), rounded(8 * B * S)
    assert folded.static == steps.before + labels
    assert 0 <= max(steps.peaks()[:-1]) + labels - folded.backward_peak <= 2 * ROUND
    step = steps.stretches[-1]
    before = steps.levels()[-2] - sum(one.bytes for one in _with_loss(step))
    rises = accumulate(one.sign * one.bytes for one in step if one not in _with_loss(step))
    assert folded.step_peak == before + max(0, *rises) + labels
    assert steps.end == steps.before


@pytest.mark.parametrize("case", QUANTISED, ids=str)
def test_step_with_four_bit_weights(case: Case, tmp_path: Path) -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["steps"][str(case)]
    program = program_of(case, tmp_path)
    modules = [span.module for span in program.spans for _ in span.names]
    forward = [event for one in modules for event in named(one, one.steady.forward)]
    backward = [event for one in reversed(modules) for event in named(one, one.first.backward)]
    assert drops_sorted(sizes(forward)) == drops_sorted(recorded["forward"])
    assert drops_sorted(sizes(without_scalars(backward))) == drops_sorted(recorded["backward"])
    folded, labels = fold_program(program), rounded(8 * B * S)
    assert folded.static == recorded["before"] + labels
    assert folded.step_peak == recorded["step_peak"] + labels


def test_storage_that_cannot_be_cut_stays_whole(tmp_path: Path) -> None:
    """Of 4 layers' 4-bit weights every rank has all instead of a quarter; nothing of them is gathered."""
    flags = {"model": "llama-3-8b", "layers": "4", "framework": "fsdp", "gpus": "4", "seq": "64", "lora-rank": "8"}
    flags |= {"quantisation": "nf4"}
    cut, whole = (
        fsdp.programs(resolve(read_plan(None, {**flags, **more}).plan), Options())[0]
        for more in ({}, {"quant-storage": "uint8"})
    )
    of_layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert fold_program(whole).static - fold_program(cut).static == 4 * of_layer // 2 * 3 // 4
    gathered = {event.name for event in whole.spans[1].module.first.forward if isinstance(event, Hold)}
    assert "query.weight" not in gathered
    assert "query.lora_A.weight" in gathered


def record() -> None:
    """Writes ``RECORDED``."""
    import peft

    from ..oracle.fsdp_four_bit import traced_sharded_four_bit

    steps = {}
    for case in QUANTISED:
        targets = case.targets if case.targets == "all-linear" else case.targets.split(",")
        step = traced_sharded_four_bit(
            config_of(case.model),
            B,
            S,
            peft.LoraConfig(r=RANK, target_modules=targets),
            sharding_of(case),
            double=case.four_bit == "double",
            recompute=case.recompute == "full",
        )
        forward, backward, _ = step.stretches
        loss = [one for one in backward if one.sign < 0 and one.op.startswith("aten.nll_loss_forward")][-1]
        steps[str(case)] = {
            "before": step.before,
            "step_peak": step.peaks()[-1],
            "forward": sizes(forward),
            "backward": sizes(one for one in without_grad_loss(backward) if one is not loss),
        }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(step, separators=(',', ':'))}" for name, step in steps.items())
    RECORDED.write_text(f'{{"versions": {json.dumps(VERSIONS)}, "steps": {{\n{lines}\n}}}}\n', encoding="utf-8")


if __name__ == "__main__":
    record()
