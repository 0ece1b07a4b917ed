"""Experts of rows that a projection makes smaller first (``--moe-latent-size``): parameters, tensors and work."""

from __future__ import annotations

import pytest

from memplan.estimate import estimate
from memplan.frameworks.megatron.from_plan import core_shape
from memplan.frameworks.megatron.modules import layer_shape_of, layers_module, module_shapes
from memplan.layers.autograd import Recorder
from memplan.layers.megatron_core import flex, moe
from memplan.layers.megatron_core.shape import CoreShape
from memplan.layers.module import Options
from memplan.layers.work import Exchange
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.search.time.shape import shape_of
from memplan.tape.events import Drop, Hold

T, H, L, F, E, K, EP = 512, 4096, 1024, 2688, 512, 22, 64
"""Of Nemotron 3 Super with sequences of 512 tokens: L features of a row."""

FLAGS = {
    "model": "nemotron-3-super-120b-a12b", "layer-pattern": "ME", "framework": "megatron", "gpus": "64", "ep": "64",
    "seq": "512", "gbs": "64", "zero": "1", "moe-dispatcher": "flex", "moe-flex-backend": "hybridep",
    "moe-squared-relu-fusion": "true",
}  # fmt: skip


def shape(**flags: str) -> CoreShape:
    given = {**FLAGS, **{name.replace("_", "-"): value for name, value in flags.items()}}
    return layer_shape_of(module_shapes(core_shape(resolve(read_plan(None, given).plan)))[0], 1)


def kept(of: CoreShape) -> dict[str, int]:
    tape = layers_module((of,), Options()).first.forward
    holds = {event.tensor: event for event in tape if isinstance(event, Hold)}
    for event in tape:
        if isinstance(event, Drop):
            holds.pop(event.tensor, None)
    return {one.name: one.bytes for one in holds.values()}


def test_parameters_by_hand() -> None:
    """A router over the hidden size, two projections, 8 experts of 512 from L to F and back, and a shared one."""
    r = Recorder()
    moe.parameters(r, shape())
    sizes = {name: leaf.shape for name, leaf in r.parameters.items()}
    assert sizes["mlp.router.weight"] == (E, H)
    assert sizes["mlp.fc1_latent_proj.weight"] == (L, H)
    assert sizes["mlp.fc2_latent_proj.weight"] == (H, L)
    assert [*sizes].index("mlp.fc2_latent_proj.weight") < [*sizes].index("mlp.experts.linear_fc1.weight0")
    experts = [size for name, size in sizes.items() if ".experts." in name]
    assert experts == [(F, L)] * 8 + [(L, F)] * 8


def test_rows_are_of_the_smaller_size_and_both_projections_keep_their_inputs() -> None:
    names = kept(shape())
    assert names["rows_received"] == K * T * L * 2
    assert names["experts_linear_fc1"] == K * T * F * 2
    assert names["tokens_combined"] == T * L * 2, "the input of the projection back"
    whole = kept(shape(expert_latent="0"))
    assert whole["rows_received"] == K * T * H * 2
    assert "tokens_combined" not in whole, "added to the residual, which keeps nothing"


def test_tensor_parallel_ranks_have_projections_whole() -> None:
    """``parallel_mode="duplicated"``: no collectives, each rank projects its own part of the tokens."""
    of = shape(tp="2", sequence_parallel="true", etp="1")
    r = Recorder()
    moe.parameters(r, of)
    assert r.parameters["mlp.fc1_latent_proj.weight"].shape == (L, H)
    assert kept(of)["tokens_combined"] == T // 2 * L * 2


def test_exchanges_are_of_the_smaller_size() -> None:
    whole = resolve(read_plan(None, FLAGS).plan)
    own, _ = shape_of(whole).entries.kinds[-1]
    sent = [kernel for kernel, _ in own.forward if isinstance(kernel, Exchange) and kernel.axis == "ep"]
    n = flex.arriving(shape())
    assert {one.bytes for one in sent} == {n * L * 2, T * EP * E}, "rows, and which experts all tokens go to"


def test_outside_buffer_is_of_the_smaller_size() -> None:
    assert flex.outside(shape()) == ("HybridEP's buffer", flex.hybrid_ep_buffers(T, EP, L, E))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"moe-shared-expert-overlap": "true", "moe-dispatcher": "alltoall", "moe-flex-backend": "deepep"}, "refuses"),
        ({"mlp-bias": "true"}, "biases"),
        ({"experts": "0", "layer-pattern": "M"}, "has no experts"),
    ],
)
def test_refused(flags: dict[str, str], said: str) -> None:
    given = {**FLAGS, **flags}
    if said == "refuses":
        del given["moe-flex-backend"]
    with pytest.raises(PlanError, match=said):
        estimate(resolve(read_plan(None, given).plan))
