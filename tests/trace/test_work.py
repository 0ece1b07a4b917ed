"""What kernels of traced steps do, beside what recipes say of the same models: products and attention one by one, bytes
and times within what the two count differently."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from memplan.frameworks.plain import timing
from memplan.layers.module import Counted
from memplan.layers.work import Attention, Product, Stream
from memplan.plan.plan import ResolvedPlan
from memplan.plan.traced_spec import MEANINGLESS, TracedSpec
from memplan.search.time import shape_of, step_time
from memplan.trace.fit import Fit, Polynomial
from memplan.trace.operators import done_by
from memplan.trace.recording import Done
from memplan.trace.work import NoWorkError, check_work

from .test_fits import CASES, fit_of, plan_of

aten = torch.ops.aten
ENTRIES = ("embedding", "layer", "recomputed", "final_norm", "head")


def both(family: str, b: int, s: int, monkeypatch: pytest.MonkeyPatch) -> tuple[ResolvedPlan, ResolvedPlan]:
    """A plan with the recipe, and the same of an architecture that only traces know."""
    plan: Any = plan_of(family, b, s, gpu="h100-80gb")
    fit = fit_of(family)
    monkeypatch.setattr(timing, "fit_of", lambda plan: fit)
    names: dict[str, Any] = {"name": "x", "family": family, "source": "x", "reason": "", "digest": family}
    sizes = {**MEANINGLESS, "layers": 7, "positions_max": 1 << 20}
    spec = TracedSpec.model_construct(**sizes, **names, config={}, counted=True)
    return plan, plan.model_copy(update={"model": spec})


def computed(counted: Counted) -> Counter[object]:
    """Products and attention, each so often; of a product whichever side is called m."""
    found: Counter[object] = Counter()
    for kernel, times in counted:
        if isinstance(kernel, Product):
            found[frozenset((kernel.m, kernel.n)), kernel.k, kernel.times, kernel.element] += times
        elif isinstance(kernel, Attention):
            found[kernel] += times
    return found


def moved(counted: Counted) -> tuple[float, int]:
    """Bytes and launches of what is bound by memory."""
    streams = [(one, times) for one, times in counted if isinstance(one, Stream)]
    return sum(one.bytes * times for one, times in streams), sum(one.launches * times for one, times in streams)


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("point", [(4, 200), (1, 152)])
def test_same_kernels_as_the_recipe(family: str, point: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, traced = (shape_of(plan).entries for plan in both(family, *point, monkeypatch))
    for entry in ENTRIES:
        ours, theirs = getattr(traced, entry), getattr(recipe, entry)
        for one, other in ((ours.forward, theirs.forward), (ours.backward, theirs.backward)):
            assert computed(one) == computed(other), entry
        assert ours.flops == theirs.flops
    for one, other in (
        (traced.layer.forward, recipe.layer.forward),
        (traced.layer.backward, recipe.layer.backward),
        (traced.recomputed.backward, recipe.recomputed.backward),
    ):
        (bytes, launches), (expected, expected_launches) = moved(one), moved(other)
        assert bytes == pytest.approx(expected, rel=0.03)
        assert abs(launches - expected_launches) <= 2


@pytest.mark.parametrize("family", CASES)
def test_same_time_as_the_recipe(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, traced = map(step_time, both(family, 4, 200, monkeypatch))
    assert traced.total == pytest.approx(recipe.total, rel=0.02)
    assert traced.optimizer == recipe.optimizer
    assert (traced.recompute > 0) == (recipe.recompute > 0)


def test_work_is_checked() -> None:
    """At other sizes, entry by entry; and comes back from a file."""
    fit = fit_of("bert")
    assert Fit.from_json(fit.to_json()).to_json() == fit.to_json()
    piece = fit.pieces[0]
    work = piece.work
    assert work is not None
    wrong = replace(piece, work=replace(work, polynomials=(Polynomial((1, 0, 0, 0, 0, 0)),) * len(work.polynomials)))
    with pytest.raises(NoWorkError, match=r"what embedding does at b = 2, s = 128 is not what is said of it"):
        check_work(wrong, (2, 128), {"embedding": ((Done("stream", (1,), (512,)),), (), (), ())})


def test_without_work_there_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As fits of earlier releases have none; layouts are ranked by what else a step does."""
    _, plan = both("bert", 4, 200, monkeypatch)
    fit = fit_of("bert")
    data = fit.to_json()
    for piece in data["pieces"]:
        del piece["work"]
    old = Fit.from_json(data)
    monkeypatch.setattr(timing, "fit_of", lambda plan: old)
    monkeypatch.setattr(timing, "checked_fit", lambda plan: old)
    assert not timing.has_work(plan)
    assert step_time(plan).total == step_time(plan).optimizer > 0


def test_operators() -> None:
    """Counted by hand, in bytes of fp32."""
    x, y, bias = torch.empty(6, 8), torch.empty(8, 4), torch.empty(4)
    assert done_by(aten.mm.default, (x, y), {}, x @ y) == Done("product", (4,), (6, 4, 8, 1))
    assert done_by(aten.addmm.default, (bias, x, y), {}, x @ y) == Done("product", (4,), (6, 4, 8, 1))
    assert done_by(aten.add.Tensor, (x, x), {}, x + 1) == Done("stream", (1,), (3 * 192,))
    assert done_by(aten.add_.Tensor, (x, x), {}, x) == Done("stream", (1,), (3 * 192,))
    assert done_by(aten.view.default, (x, [48]), {}, x.view(48)) is None
    assert done_by(aten.empty_like.default, (x,), {}, torch.empty_like(x)) is None
    assert done_by(aten.zero_.default, (x,), {}, x) == Done("stream", (1,), (192,))
    table, ids = torch.empty(1000, 8), torch.zeros(6, dtype=torch.int64)
    assert done_by(aten.embedding.default, (table, ids), {}, x) == Done("stream", (1,), (2 * 192 + 48,))
    assert done_by(aten.mul.Tensor, (x, x[:1].expand(6, 8)), {}, x + 1) == Done("stream", (1,), (2 * 192 + 32,))
    assert done_by(aten._softmax.default, (x, -1, False), {}, x + 1, vocab=8) == Done("loss", (1,), (2 * 192,))
    made = (x + 1, bias + 1, bias + 1)
    assert done_by(aten.native_layer_norm_backward.default, (x, x), {}, made) == Done(
        "stream", (3,), (192 + 2 * 16 + 2 * 192 + 2 * 192,)
    )
