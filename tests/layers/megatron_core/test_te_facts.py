"""What Transformer Engine keeps, which back end it takes, and what it allocates inside kernels."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, cast

import pytest

from memplan.layers.fused_attention import Call, Release, inside
from memplan.layers.megatron_core import te_attention, te_facts
from memplan.layers.module import Interface, Options, build
from memplan.plan.errors import PlanError
from memplan.tape.events import Category, Hold

from .te_cases import Case, recipe

HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)
MIB = 1024**2


def backend(asked: str = "auto", **changes: Any) -> str:
    settings: dict[str, Any] = {
        "te": (2, 17),
        "capability": HOPPER,
        "dtype": "bf16",
        "head_dim": 64,
        "dropout": 0.1,
        "deterministic": True,
    }
    return te_attention.backend(cast(Any, asked), **(settings | changes))


def test_deterministic_dropout_is_cudnn_on_hopper_and_flash_on_blackwell() -> None:
    assert backend() == "fused"
    assert backend(capability=BLACKWELL) == "flash"
    assert backend(capability=BLACKWELL, flash_installed=False) == "unfused"
    assert backend(capability=BLACKWELL, deterministic=False) == "fused"
    assert backend(capability=BLACKWELL, dropout=0.0) == "fused"
    assert backend(sinks=True, deterministic=False) == "fused"
    assert backend(sinks=True) == "unfused"


def test_deterministic_blackwell_by_version() -> None:
    at: dict[str, Any] = {"capability": BLACKWELL, "dropout": 0.0}
    assert backend(te=(2, 11), **at) == "flash"
    assert backend(te=(2, 12), **at) == "fused"
    assert backend(te=(2, 12), cudnn=(9, 17, 0), **at) == "flash"


def test_before_hopper_flash_comes_first() -> None:
    assert backend(capability=AMPERE, deterministic=False) == "flash"
    assert backend(capability=AMPERE, deterministic=False, flash_installed=False) == "fused"


def test_values_of_another_size_are_padded_for_flash_since_2_17() -> None:
    """DeepSeek's heads, 192 features of keys beside 128 of values: on Ampere cuDNN has no backward of them."""
    latent: dict[str, Any] = {"head_dim": 192, "value_dim": 128, "dropout": 0.0, "deterministic": False}
    assert backend(te=(2, 16), capability=AMPERE, **latent) == "unfused"
    assert backend(capability=AMPERE, **latent) == "flash"
    assert backend("flash", **latent) == "flash"
    assert backend(**latent) == "fused"
    with pytest.raises(PlanError, match=r"is not possible in Transformer Engine 2\.16"):
        backend("flash", te=(2, 16), **latent)


@pytest.mark.parametrize("asked", ["flash", "fused", "unfused"])
def test_the_back_end_asked_for(asked: str) -> None:
    assert backend(asked) == asked


def test_a_back_end_that_is_not_possible() -> None:
    with pytest.raises(PlanError, match=r"is not possible in Transformer Engine 2\.17"):
        backend("fused", dtype="fp32")
    assert backend(dtype="fp32") == "unfused"


def test_cublas_workspace() -> None:
    assert te_facts.cublas_workspace((2, 7), 9) == 32 * MIB
    assert te_facts.cublas_workspace((2, 8), 9) == 32 * MIB + 1024
    assert te_facts.cublas_workspace((2, 17), 8) == 4 * MIB


def test_what_is_kept() -> None:
    shape = Case("attention").shape((2, 17))
    assert te_facts.kept(shape, 9, []) == {"te_cublas_workspace": 32 * MIB + 1024, "te_cu_seqlens": 512}
    fused = replace(shape, gradient_fusion=True)
    weights = [(1536, 512), (512, 512), (1536, 512)]
    kept = te_facts.kept(fused, 9, weights)
    assert kept["te_dummy_weight_gradient_1536x512"] == 2 * 1536 * 512
    assert len(kept) == 4
    assert len(te_facts.kept(replace(fused, te=(2, 2)), 9, weights)) == 2


def workspaces(case: Case, *, deterministic: bool = False) -> dict[str, int]:
    shape = replace(case.shape((2, 17)), deterministic_attention=deterministic)
    module = build(
        "attention", recipe(case, (2, 17), shape), Interface(case.input(), "bf16"), Options(kernel_workspaces=True)
    )
    holds = [event for event in module.first.backward if isinstance(event, Hold)]
    return {hold.name: hold.bytes for hold in holds if hold.category is Category.WORKSPACES}


def test_flash_attention_accumulates_in_fp32() -> None:
    b, s, a, d = 2, 128, 8, 64
    once = 4 * b * s * a * d
    splits = -(-132 // (b * a))
    assert workspaces(Case("attention")) == {"dq_accum": once}
    assert workspaces(Case("attention"), deterministic=True) == {"dq_accum": splits * once}
    expanded = 2 * b * s * a * d
    grouped = workspaces(Case("attention", kv_heads=2))
    assert grouped == {"dq_accum": once, "dk_expanded": expanded, "dv_expanded": expanded}


def test_cudnn_front_end_workspace() -> None:
    b, s, a, d = 2, 128, 8, 64
    case = Case("attention", attention="fused")
    assert workspaces(case) == {"cudnn_workspace": 4 * b * a * s * (1 + d)}
    assert workspaces(case, deterministic=True) == {"cudnn_workspace": 4 * b * a * s}
    second = inside(Release(), Call((b, a, s, d), a, "bf16"))
    assert sum(4 * prod(shape) for _, shape, _ in second) == 4 * b * a * s * (1 + d)  # as PyTorch's assumption says


@pytest.mark.parametrize(
    ("installed", "capability", "changes", "taken"),
    [
        (2, HOPPER, {}, (2, 9)),
        (3, HOPPER, {}, (3, 9)),
        (3, BLACKWELL, {}, (2, 9)),
        (3, HOPPER, {"dropout": 0.1}, (2, 9)),
        (3, HOPPER, {"deterministic": True}, (3, 9)),
        (3, HOPPER, {"deterministic": True, "head_dim": 256}, (2, 9)),
        (4, HOPPER, {"head_dim": 192}, (4, 9)),
        (4, BLACKWELL, {}, (4, 10)),
        (4, BLACKWELL, {"head_dim": 192}, (2, 9)),
        (4, BLACKWELL, {"te": (2, 14)}, (2, 9)),
        (4, BLACKWELL, {"context_parallel": True}, (2, 9)),
        (4, AMPERE, {}, (2, 9)),
        (4, (12, 0), {"deterministic": True}, (2, 9)),
    ],
)
def test_the_release_of_flash_attention(
    installed: int, capability: tuple[int, int], changes: dict[str, Any], taken: tuple[int, int]
) -> None:
    """Filters of ``get_attention_backend`` that name releases 3 and 4."""
    said: dict[str, Any] = {
        "te": (2, 18), "head_dim": 128, "dropout": 0.0, "deterministic": False, "context_parallel": False
    }  # fmt: skip
    te = (said | changes)["te"]
    rest = {name: value for name, value in (said | changes).items() if name != "te"}
    assert te_facts.flash_release(installed, te, capability, **rest) == taken


def test_later_releases_save_no_random_state() -> None:
    """Nor do they give Σ dO·O back: all that their backward allocates is theirs alone."""
    case = Case("attention", dropout=0.0)
    shape = replace(case.shape((2, 18)), flash=Release(3))
    module = build("attention", recipe(case, (2, 18), shape), Interface(case.input(), "bf16"), Options())
    names = {event.name for event in (*module.first.forward, *module.first.backward) if isinstance(event, Hold)}
    assert "softmax_logsumexp" in names
    assert not names & {"rng_state", "softmax_d"}


def test_flash_saves_one_context_more_than_cudnn() -> None:
    """Packed queries, keys and values, b > 1: why GB200 held more than H100 in deterministic runs with dropout."""

    def saved(attention: str) -> int:
        case = Case("attention", attention=attention)  # type: ignore[arg-type]
        module = build("attention", recipe(case, (2, 17)), Interface(case.input(), "bf16"), Options())
        return module.first.forward_fold.net

    b, s, n = 2, 128, 512
    assert saved("flash") - saved("fused") == 2 * b * s * n


@pytest.mark.parametrize(
    "case",
    [
        Case("attention", attention="unfused", s=36),
        Case("attention", attention="unfused", cp=2),
        Case("attention", cp=2, causal=False),
    ],
    ids=str,
)
def test_what_no_recipe_covers_is_refused(case: Case) -> None:
    with pytest.raises(PlanError):
        build("attention", recipe(case, (2, 17)), Interface(case.input(), "bf16"), Options())
