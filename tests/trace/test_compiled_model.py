"""A whole compiled model, as it was learnt, beside a count by hand, and (slow) beside Inductor's own code of more
layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compiled_models import PLANS, plan_of
from memplan.cli import main
from memplan.estimate import fold, programs_of
from memplan.frameworks.plain import compiled
from memplan.layers.compiled_model import Begins, Ends, Graph, model
from memplan.layers.module import Interface, Module, Options, build
from memplan.notices import warnings
from memplan.plan.errors import PlanError
from memplan.plan.library import COMPILED
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.report.names import plan_text
from memplan.tape.events import Category, Drop, Hold, rounded
from memplan.trace import cache

B, S, H, F, HEADS, KV, VOCAB = 2, 4096, 2048, 8192, 32, 512, 128256
ONE = {
    "model": "llama-3.2-1b",
    "framework": "single",
    "gpu": "h100-80gb",
    "mbs": str(B),
    "seq": str(S),
    "torch-compile": "true",
}


def planned(**flags: str) -> Any:
    return resolve(read_plan(None, ONE | flags).plan)


LEARNT = compiled.learnt_of(planned())
"""Llama 3.2 1B, two sequences of 4096 tokens, in bf16: it ships."""


def made(layers: int) -> Module:
    return build("model", lambda r, _: model(r, LEARNT, layers, "bf16"), Interface(None, "bf16"), Options())


def test_what_a_layer_saves_counted_by_hand() -> None:
    """In bf16: the residual stream twice, both norms' outputs, the query, keys and values repeated for every head,
    attention's output and what its projection makes of it; gate, up and their product; in fp32 two norms' factors and
    the softmax's; and the two numbers of attention's random state."""
    tokens = B * S
    wide, of_ffn = rounded(2 * tokens * H), rounded(2 * tokens * F)
    small = 2 * rounded(4 * tokens) + rounded(4 * tokens * HEADS) + 2 * rounded(8)
    assert made(17).first.forward_fold.net - made(16).first.forward_fold.net == 8 * wide + 3 * of_ffn + small


def test_peak_by_hand() -> None:
    """At the start of backward: zeros for the gradient of the logits, and the gradient itself, beside the logits that
    were saved, and no other tensor than the loss's gradient; and gradients of all parameters are there at the end."""
    both = made(16).first
    logits = rounded(2 * B * S * VOCAB)
    assert both.backward_fold.peak == 2 * logits + rounded(4)
    assert both.forward_fold.net_by[Category.LOGITS] == logits
    parameters = VOCAB * H + 16 * (2 * H * H + 2 * H * KV + 3 * H * F + 2 * H) + H
    assert sum(one.elements for one in made(16).parameters) == parameters
    assert both.backward_fold.net_by[Category.GRADIENTS] == 2 * parameters
    assert both.forward_fold.net + both.backward_fold.net == 2 * parameters


def test_all_gradients_wait_before_the_first_is_added() -> None:
    """A second micro-batch ends with a second set of them: none ends before the last one is there."""
    module = made(16)
    tape = module.steady.backward
    last = max(at for at, event in enumerate(tape) if isinstance(event, Hold))
    assert sum(event.bytes for event in tape[last:] if isinstance(event, Drop)) >= 2 * sum(
        one.elements for one in module.parameters
    )


def test_an_estimate_with_what_was_learnt() -> None:
    (found,) = fold(planned())
    both = made(16).first
    assert found.peak - found.static == both.forward_fold.net + both.backward_fold.peak
    with pytest.raises(PlanError, match="must be at least 4"):
        fold(planned(layers="1"))


def test_what_was_not_learnt_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path))
    with pytest.raises(PlanError, match="`memplan trace --learn` with the same plan"):
        fold(planned(mbs="7"))


def test_learnt_and_estimated_from_the_trainers_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path))
    monkeypatch.setattr("memplan.frameworks.plain.compiled.learn", lambda plan, report: LEARNT)
    given = {"model_name_or_path": "meta-llama/Llama-3.2-1B", "per_device_train_batch_size": B, "block_size": S}
    file = tmp_path / "args.json"
    file.write_text(json.dumps({**given, "dtype": "bfloat16", "bf16": True, "torch_compile": True}), encoding="utf-8")
    assert main(["estimate", str(file), "--gpu", "h100-80gb"]) == 2
    assert "args.json:1: compile = true: was not learnt" in capsys.readouterr().err
    assert main(["trace", "--learn", str(file), "--gpu", "h100-80gb"]) == 0
    assert main(["estimate", str(file), "--gpu", "h100-80gb", "-q"]) == 0
    assert "llama-3.2-1b" in capsys.readouterr().out


def test_files_that_ship_are_of_the_plans_that_are_listed() -> None:
    """Each checked at three depths when it was made, of the releases that tests pin."""
    paths = {cache.built_in_path(plan.model.name, compiled.settings_of(plan)) for plan in map(plan_of, PLANS)}
    assert set(COMPILED.glob("*/*")) == paths
    for path in paths:
        data = cache.shipped(path)
        assert data is not None
        assert (data["versions"]["torch"].partition("+")[0], data["versions"]["transformers"]) == ("2.13.0", "5.23.0")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"framework": "deepspeed", "zero": "2"}, "it puts hooks into the graph"),
        ({"attention": "flash_attention_2"}, r"must be flash \(sdpa\)"),
        ({"dtype": "fp32"}, "must be bf16"),
        ({"lora-rank": "8"}, "must be false with adapters"),
        ({"model": "gpt2-xl", "seq": "1024", "dtype": "bf16"}, "dropout"),
        ({"model": "qwen3-30b-a3b"}, "experts"),
        ({"trainer": "transformers", "eval-batches": "2"}, "evaluation's batches"),
        ({"autocast": "true"}, "was not learnt of 16 layers with mbs 2 and seq 4096 in bf16, autocast over fp32: `"),
        ({"mbs": "3"}, r"no GPU\); it ships learnt with .*mbs 2 and seq 4096 in bf16"),
    ],
)
def test_what_else_is_refused_in_one_line(flags: dict[str, str], says: str) -> None:
    with pytest.raises(PlanError, match=says) as caught:
        fold(planned(**flags))
    assert "\n" not in str(caught.value)


def test_a_report_says_what_was_compiled_and_for_which_gpu() -> None:
    for gpu, codes in (("h200", []), ("a100-80gb", ["compiled-for-h100"])):
        plan = planned(gpu=gpu)
        assert [
            notice.code for notice in warnings(plan, programs_of(plan, Options())) if notice.code.startswith("compiled")
        ] == codes
        assert plan_text(plan).endswith(" · sdpa attention")


def test_layers_further_take_the_numbers_of_their_own() -> None:
    """Forward makes two tensors a layer, and ends one; backward ends the other, the last layer's first."""
    forward = Graph(
        (Begins((1,), "bf16", "x"),), (Begins((2,), "bf16", "y"), Begins((3,), "bf16", "z"), Ends("f", 1)), ()
    )
    assert [one for one in forward.events("f", 2, {"f": 2}) if isinstance(one, Ends)] == [Ends("f", 1), Ends("f", 3)]
    backward = Graph((), (Ends("f", 2),), (Ends("f", 0),))
    assert [*backward.events("b", 3, {"f": 2, "b": 0})] == [Ends("f", 6), Ends("f", 4), Ends("f", 2), Ends("f", 0)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layers", [7, 12])
def test_more_layers_are_inductors(layers: int) -> None:
    """Every event of the whole graph, as AOTAutograd and Inductor make it of so many layers."""
    from memplan.trace.compiled_model import check, depth_of
    from memplan.trace.framework import job_of_plan

    check(LEARNT, depth_of(job_of_plan(compiled.without_compiler(planned())), layers), layers)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_graph_is_the_one_that_accelerate_compiles() -> None:
    """Of a tiny Llama on the CPU, as the Trainer calls it after ``prepare_model``: one graph, of the same operations;
    and its backward is given zeros for the logits."""
    import torch
    from accelerate import Accelerator
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from transformers import AutoModelForCausalLM, LlamaConfig

    from memplan.trace.compiled_model import Model
    from memplan.trace.framework import job_of_plan

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 128, "num_key_value_heads": 2, **sizes}
    job = job_of_plan(
        plan_of({"model": "llama-3-8b", "trainer": "transformers", "autocast": "true", "torch-compile": "false"}),
        config,
    )
    ours = Model(job)
    theirs = AutoModelForCausalLM.from_config(LlamaConfig(**config, use_cache=False), attn_implementation="sdpa")
    ids = torch.randint(0, 128, (2, 16))
    given = (ids, torch.ones_like(ids), torch.tensor(30))
    batch = dict(zip(("input_ids", "attention_mask", "num_items_in_batch"), given, strict=True), labels=ids)
    graphs: list[list[str]] = []
    zeros: list[bool] = []

    def backward(graph: Any, _: Any) -> Any:
        def run(*arguments: Any) -> Any:
            last = [one for one in arguments if isinstance(one, torch.Tensor) and one.shape == (2, 16, 128)][-1]
            zeros.append(
                last.dtype is torch.float32 and not last.any() and last.untyped_storage().nbytes() == 4 * 2 * 16 * 128
            )
            return graph(*arguments)

        return make_boxed_func(run)

    aot = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=backward)

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op not in ("placeholder", "output")])
        return aot(graph, examples)

    prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(theirs.train())
    torch.compile(prepared, backend=backend)(**batch).loss.backward()
    torch._dynamo.reset()
    torch.compile(ours, backend=backend)(*given)[0].backward()
    first, second = graphs
    assert first == second
    assert zeros == [True, True]
