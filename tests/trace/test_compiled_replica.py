"""A compiled model in DistributedDataParallel: the parts that ``DDPOptimizer`` makes of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.compiled_models import REPLICAS
from memplan.estimate import fold, programs_of
from memplan.frameworks.plain import compiled
from memplan.layers.compiled_model import Begins, CompiledModel, Ends, Graph, Weight, model
from memplan.layers.module import Interface, Module, Options, build
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Category, Drop, Hold, Hook, Seam, rounded

B, S, H, F, HEADS, VOCAB = 2, 4096, 2048, 8192, 32, 128256
ONE = {"model": "llama-3.2-1b", "gpu": "h100-80gb", "mbs": str(B), "seq": str(S), "torch-compile": "true"}


def planned(**flags: str) -> Any:
    return resolve(read_plan(None, ONE | REPLICAS | flags).plan)


LEARNT = compiled.learnt_of(planned())
"""Llama 3.2 1B in buckets of 25 MiB: it ships."""


def made(learnt: CompiledModel, layers: int, seams: bool = False) -> Module:
    return build("model", lambda r, _: model(r, learnt, layers, "bf16"), Interface(None, "bf16"), Options(seams=seams))


def test_what_a_layer_saves_counted_by_hand() -> None:
    """As one graph would (``test_compiled_model``), and what crosses from a part to the next, or is made in each: the
    activated gate, which the product's part would have made again, and the mask in bf16."""
    tokens = B * S
    wide, of_ffn, mask = rounded(2 * tokens * H), rounded(2 * tokens * F), rounded(2 * B * S * S)
    small = 2 * rounded(4 * tokens) + rounded(4 * tokens * HEADS) + 2 * rounded(8)
    more = made(LEARNT, 17).first.forward_fold.net - made(LEARNT, 16).first.forward_fold.net
    assert more == 8 * wide + 4 * of_ffn + mask + small


def test_gradients_are_ready_part_by_part() -> None:
    """Those of a later layer before others begin; every parameter's once, and none waits for the end."""
    module = made(LEARNT, 16, seams=True)
    tape = module.steady.backward
    ready = [one.name for one in tape if isinstance(one, Seam) and one.hook is Hook.GRADIENT]
    assert sorted(ready) == sorted(one.name for one in module.parameters)
    assert ready.index("model.layers.15.mlp.up_proj.weight") < ready.index("model.layers.14.mlp.down_proj.weight")
    held = peak = 0
    gradients = {one.elements * 2 for one in module.parameters}
    for event in tape:
        if isinstance(event, Hold | Drop) and event.bytes in gradients:
            held += event.bytes if isinstance(event, Hold) else -event.bytes
            peak = max(peak, held)
    assert peak < sum(one.elements * 2 for one in module.parameters)


def test_buckets_hold_every_gradient_in_the_order_of_the_parts() -> None:
    (program,) = programs_of(planned(), Options())
    buckets = [one.bytes for one in program.extra if one.name == "ddp_bucket"]
    parameters = VOCAB * H + 16 * (2 * H * H + 2 * H * 512 + 3 * H * F + 2 * H) + H
    assert 2 * parameters <= sum(buckets) < 2 * parameters + 512 * len(buckets)
    assert buckets[0] == rounded(2 * H * F)  # of the last layer's last product, which its part has first
    (views,) = fold(planned(**{"gradient-as-bucket-view": "true"}))
    (copies,) = fold(planned())
    assert copies.step_peak - views.step_peak == 2 * parameters


def small(layer: tuple[Any, ...] = ()) -> CompiledModel:
    """One parameter whose gradient is ready before another tensor begins."""
    forward = Graph((Begins((), "fp32", "loss"), Begins((4,), "bf16", "logits"), Ends("f", 1)), (), ())
    events = (Begins((8,), "bf16", "w"), Ends("r", 0), Begins((16,), "bf16", "x"), Ends("b", 1))
    weights: Any = ((Weight("w", (8,), (), (0,), ()),), (), ())
    outputs = Ends("f", 0), Ends("f", 1)
    return CompiledModel(1, 1, forward, Graph(events, layer, ()), outputs, Begins((4,), "bf16", "logits"), weights)


def test_a_gradient_stays_the_first_time_and_ends_the_next() -> None:
    """What no node has saved of the outputs ends with them."""
    found = small()
    assert CompiledModel.from_json(found.to_json()) == found
    assert not found.repeats
    assert LEARNT.repeats
    module = made(found, 1)
    names = {one.tensor: one.name for one in (*module.first.forward, *module.first.backward) if isinstance(one, Hold)}
    ends = [names[one.tensor] for one in module.first.backward if isinstance(one, Drop)]
    assert "w" not in ends
    assert "logits" not in ends
    assert [one.name for one in module.steady.backward if isinstance(one, Hold)] == ["grad_loss", "w", "x"]
    assert isinstance(module.steady.backward[2], Drop)
    assert [one.category for one in module.first.backward if isinstance(one, Hold) and one.name == "w"] == [
        Category.GRADIENTS
    ]


def test_what_does_not_repeat_is_of_its_own_number_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.cache, "load", lambda *_: small())
    assert compiled.learnt_of(planned(layers="1")) == small()
    with pytest.raises(PlanError, match="was not learnt of 2 layers"):
        compiled.learnt_of(planned(layers="2"))


@pytest.mark.slow
def test_autograd_sums_into_what_compiled_code_returns() -> None:
    """Of two gradients of a tensor that two parts read, where views that Inductor makes have no base: real tensors."""
    import torch

    seen: list[int] = []

    class Part(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.new_empty(4)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            buffer = torch.empty(2, 2)
            seen.append(buffer.data_ptr())
            return torch._C._dynamo.guards._reinterpret_tensor(buffer, (4,), (1,), 0)  # type: ignore[no-any-return]

    arrived: list[int] = []
    x = torch.ones(4, requires_grad=True) * 2
    x.register_hook(lambda gradient: arrived.append(gradient.data_ptr()))
    (Part.apply(x) + Part.apply(x)).sum().backward()  # type: ignore[no-untyped-call]
    assert arrived == [seen[0]]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"mbs": "3"}, "was not learnt .* under ddp with buckets of 25 MiB: `memplan trace --learn`"),
        ({"find-unused-parameters": "true"}, "must be false with torch.compile"),
        ({"static-graph": "true"}, "must be false with torch.compile"),
        ({"bucket-cap-mb": "0.5"}, "at least 1 with torch.compile"),
        ({"layers": "17"}, "was not learnt of 17 layers"),
    ],
)
def test_what_is_refused_in_one_line(flags: dict[str, str], says: str) -> None:
    with pytest.raises(PlanError, match=says) as caught:
        fold(planned(**flags))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_more_layers_are_inductors() -> None:
    from memplan.trace.compiled_model import check, unrepeated
    from memplan.trace.compiled_replica import depth_of
    from memplan.trace.framework import job_of_plan

    depth = depth_of(job_of_plan(compiled.without_compiler(planned())), 8)
    check(LEARNT, depth, 8)
    check(unrepeated(depth, 8), depth, 8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("trainer", "recompute"), [(True, "none"), (False, "none"), (True, "full")])
def test_parts_and_order_of_gradients_are_those_of_a_real_run(
    trainer: bool, recompute: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a tiny Llama on the CPU in real DDP, as the Trainer calls it after Accelerate's ``prepare_model``."""
    import torch
    from accelerate import Accelerator
    from torch import distributed
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.distributed import DDPOptimizer
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.parallel import DistributedDataParallel
    from transformers import AutoModelForCausalLM, LlamaConfig

    from memplan.trace import compiled_replica
    from memplan.trace.compiled_model import Model, batch
    from memplan.trace.framework import job_of_plan

    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 512, "num_key_value_heads": 2, **sizes}
    mixed = {"trainer": "transformers", "autocast": "true"} if trainer else {}
    flags = {"mbs": "2", "seq": "16", "bucket-cap-mb": "1", "torch-compile": "false", "recompute": recompute, **mixed}
    job = job_of_plan(planned(**flags), config)

    def noting(graphs: list[list[str]], compiler: Any) -> Any:
        def note(graph: Any, examples: Any, **how: Any) -> Any:
            graphs.append([str(node.target) for node in graph.graph.nodes if node.op not in ("placeholder", "output")])
            return compiler(graph, examples, **how)

        return note

    def as_it_is(graph: Any, **_: Any) -> Any:
        return SimpleNamespace(call=lambda given: graph(*given), kernels=())

    ours, theirs = list[list[str]](), list[list[str]]()
    monkeypatch.setattr(
        compiled_replica, "DDPOptimizer", lambda cap, compiler: DDPOptimizer(cap, noting(ours, compiler))
    )
    monkeypatch.setattr(compiled_replica, "code_of", as_it_is)
    monkeypatch.setattr(compiled_replica, "BUFFER", "none")
    monkeypatch.setattr(compiled_replica, "fused_attention", torch.nn.functional.scaled_dot_product_attention)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        replica, given = Model(job), batch(job)
    depth = compiled_replica.step(compiled_replica.cut(replica, given, fake, 1), replica.model, fake)
    names = {number: name for name, number in depth.gradients.items()}
    order = [names[one.number] for one in depth.streams["backward"] if isinstance(one, Ends) and one.stream == "r"]

    net = AutoModelForCausalLM.from_config(LlamaConfig(**config, use_cache=False), attn_implementation="sdpa").train()
    if recompute == "full":
        net.gradient_checkpointing_enable()
    ready: list[str] = []
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    net = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(net) if trainer else net.to(torch.bfloat16)
    torch._dynamo.reset()
    aot = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
    )
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        ids = torch.randint(0, 512, (2, 16))
        fields = ids, torch.ones_like(ids), torch.tensor(30)
        named = dict(zip(("input_ids", "attention_mask", "num_items_in_batch"), fields, strict=True), labels=ids)
        wrapped = DistributedDataParallel(net, bucket_cap_mb=1)
        torch.compile(wrapped, backend=noting(theirs, aot))(**named).loss.backward()
    finally:
        distributed.destroy_process_group()
    assert len(ours) > 3
    assert ours == theirs
    assert order == ready
