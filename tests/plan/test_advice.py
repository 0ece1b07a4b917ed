"""What a refusal says to do instead is done: at its end stands an estimate, and nothing is offered twice."""

from __future__ import annotations

import re

import pytest

import memplan

OFFER = re.compile(r"([a-z_]+) ([a-z0-9-]+)(?: is| and \S+ \S+ are|\))$")
FOUR_BITS = {"lora_rank": "8", "quantisation": "nf4"}
TUNINGS: list[dict[str, str]] = [{}, {"lora_rank": "8"}, FOUR_BITS, {**FOUR_BITS, "kbit_preparation": "true"}]


def refused(given: dict[str, str]) -> str:
    """Why the plan is refused; empty where it is estimated."""
    try:
        memplan.estimate(**given)
    except memplan.PlanError as error:
        return str(error)
    return ""


def followed(**flags: str) -> dict[str, str]:
    """All flags of the plan that is estimated at the end of what each refusal offers; it fails where one offers
    nothing."""
    given = {"model": "llama-3.2-1b", "seq": "512", "gpu": "h100", **flags}
    while problem := refused(given):
        offered = OFFER.search(problem)
        assert offered is not None, problem
        name, value = offered.groups()
        assert given.get(name) != value, f"offered already: {problem}"
        given[name] = value
    return given


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("loss", ["plain", "liger", "cut"])
@pytest.mark.parametrize("tuning", TUNINGS)
def test_advice_on_autocast_ends_in_an_estimate(tuning: dict[str, str], loss: str, dtype: str) -> None:
    followed(framework="single", loss=loss, dtype=dtype, autocast="true", **tuning)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("loss", ["plain", "liger", "cut"])
@pytest.mark.parametrize("tuning", TUNINGS[:-1])  # under FSDP nobody prepares a model in 4 bits, and no way is offered
def test_advice_on_autocast_under_fsdp(tuning: dict[str, str], loss: str, dtype: str) -> None:
    followed(framework="fsdp", gpus="2", loss=loss, dtype=dtype, autocast="true", **tuning)


def test_fsdp_2_sends_autocast_to_fsdp_1_at_once() -> None:
    """And not by way of parameters in bf16, which it refuses then."""
    found = followed(framework="fsdp", gpus="8", loss="liger", autocast="true")
    assert (found.get("fsdp_version"), found.get("autocast_parameters")) == ("1", None)


def test_torchtitan_offers_no_fsdp_1_for_autocast() -> None:
    """FSDP1 is refused with its code."""
    with pytest.raises(memplan.PlanError, match="must be false with torchtitan's code") as caught:
        memplan.estimate(model="llama-3-8b", framework="torchtitan", gpus=8, autocast=True)
    assert "fsdp_version" not in str(caught.value)
