"""Saved tensors that go to the host: counted by hand."""

from collections import Counter
from dataclasses import replace

import pytest

from memplan.frameworks.megatron import programs
from memplan.frameworks.megatron.from_plan import core_shape
from memplan.frameworks.megatron.modules import layers_module, module_shapes
from memplan.frameworks.megatron.notices import notices
from memplan.layers.megatron_core.shape import CoreShape
from memplan.layers.module import Module, Options
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Drop, Hold

S, B, H, HEADS = 128, 2, 256, 2
FLAGS = {
    "model": "gpt2-xl", "layers": 4, "hidden": H, "heads": HEADS, "vocab": 512, "seq": S, "mbs": B, "gbs": 16,
    "gpus": 2, "pp": 2, "dp": 1, "framework": "megatron", "attention-backend": "flash", "attention-dropout": 0,
    "hidden-dropout": 0, "embedding-dropout": 0,
}  # fmt: skip
MODULES = ("qkv_linear", "core_attn", "attn_proj")
"""All that a dense layer of Transformer Engine sends: its norms are in its linear layers."""


def shape(*modules: str, least: int = 1) -> CoreShape:
    plan = resolve(read_plan(None, {name: str(value) for name, value in FLAGS.items()}).plan)
    return replace(module_shapes(core_shape(plan))[0], offload=modules, offload_least=least)


def layer(*modules: str, least: int = 1) -> Module:
    return layers_module((shape(*modules, least=least),), Options())


def test_saved() -> None:
    """Of attention's three modules the norm's statistics stay (mean and deviation of s b rows in fp32). What goes is
    the layer's input and the norm's output (2 s b h each), queries, keys and values in one (6 s b h), the context
    (2 s b h), batch first and back again, its log-sum-exp (4 s b a) and the random state (512, of two integers)."""
    unit = 2 * S * B * H
    kept = layer().steady.forward_fold.net
    sent = layer(*MODULES).steady.forward_fold.net
    assert kept - sent == 2 * unit + 3 * unit + 2 * unit + 4 * S * B * HEADS + 512


def test_small_tensors_stay() -> None:
    """At 2 s b h / 2 elements and more: all but log-sum-exp and random state."""
    difference = layer(*MODULES, least=S * B * H).steady.forward_fold.net - layer(*MODULES).steady.forward_fold.net
    assert difference == 4 * S * B * HEADS + 512


@pytest.mark.parametrize("modules", [("core_attn",), ("core_attn", "attn_proj"), MODULES])
def test_everything_ends(modules: tuple[str, ...]) -> None:
    """What is fetched ends, too, and each tensor once."""
    tapes = layer(*modules).steady
    events = (*tapes.forward, *tapes.backward)
    holds = Counter(one.tensor for one in events if isinstance(one, Hold))
    drops = Counter(one.tensor for one in events if isinstance(one, Drop))
    assert set(holds.values()) == set(drops.values()) == {1}
    assert set(holds) - set(drops) == {tapes.grad_input} - {-2} | {tapes.output}
    fetched = [one for one in tapes.backward if isinstance(one, Hold) and one.name.endswith("_reloaded")]
    sent = layer().steady.forward_fold.net - tapes.forward_fold.net
    assert sum(one.bytes for one in fetched) >= sent


def test_first_microbatch() -> None:
    """Of the chunk whose backward is first, the last layer keeps its tensors in the first micro-batch, on a last stage
    in all: their backward comes at once."""
    plan = resolve(
        read_plan(None, {**{name: str(value) for name, value in FLAGS.items()}, "offload-modules": "core_attn"}).plan
    )
    plan = plan.model_copy(update={"megatron": plan.megatron.model_copy(update={"offload_least": 1})})
    first, last = programs.programs(plan, Options())

    def saved(program: object, role: str) -> list[int]:
        (chunk,) = program.order.chunks  # type: ignore[attr-defined]
        spans = [span for span in chunk.spans if span.names[0].startswith("layer.")]
        return [getattr(span.module, role).forward_fold.net for span in spans for _ in span.names]

    without, sent = layer().steady.forward_fold.net, layer("core_attn").steady.forward_fold.net
    taken = without - sent
    assert taken > 0
    steady, at_first = saved(first, "steady"), saved(first, "first")
    assert at_first[1] - steady[1] == taken
    assert at_first[0] == steady[0]
    assert saved(last, "steady") == saved(last, "first")
    assert saved(last, "steady")[1] - steady[1] == taken


@pytest.mark.parametrize(("modules", "codes"), [("core_attn", []), ("expert_fc1,core_attn", ["offload-without-gain"])])
def test_modules_that_no_layer_has(modules: str, codes: list[str]) -> None:
    """Megatron-Core says nothing of them, and nothing goes to the host."""
    given = {name: str(value) for name, value in FLAGS.items()} | {"offload-modules": modules}
    plan = resolve(read_plan(None, given).plan)
    assert [one.code for one in notices(plan, programs.programs(plan, Options())) if "offload" in one.code] == codes
