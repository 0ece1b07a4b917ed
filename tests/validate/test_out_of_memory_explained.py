"""The request that failed, in the plan's terms."""

from __future__ import annotations

import pytest

from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.records.readings import Failure
from memplan.validate.failing import explained

PLAN = resolve(read_plan(None, {"model": "gpt2", "vocab": "256000", "mbs": "4", "seq": "1024"}).plan)
STAGES = {0: 0}


def failure(failing: int | None) -> Failure:
    return Failure(rank=0, kind="out-of-memory", message="Tried to allocate.", failing=failing)


def test_a_request_of_the_logits_size_is_the_logits() -> None:
    """4 x 1023 or 1024 tokens x 256,000 scores in bf16 are 1.95 GiB, as PyTorch prints them."""
    found = explained(failure(round(1.95 * 2**30)), PLAN, STAGES).message
    assert found.startswith("Tried to allocate. 1.95 GiB is logits of head in forward (4 x 1,024 x 256,000 in bf16)")


@pytest.mark.parametrize("failing", [None, 12_345_678])
def test_what_is_of_no_tensors_size_is_left_as_it_is(failing: int | None) -> None:
    assert explained(failure(failing), PLAN, STAGES) == failure(failing)


def test_a_request_is_printed_as_the_segment_that_it_needs() -> None:
    """4 x 1,023 x 50,257 scores in bf16 are 392.23 MiB; what cannot be had is a segment of 394."""
    plan = resolve(read_plan(None, {"model": "gpt2", "mbs": "4", "seq": "1023"}).plan)
    found = explained(failure(394 << 20), plan, STAGES).message
    assert found.startswith("Tried to allocate. 394 MiB is logits of head in forward (4 x 1,023 x 50,257 in bf16)")


def test_segments_that_small_requests_share_say_nothing() -> None:
    assert explained(failure(20 << 20), PLAN, STAGES) == failure(20 << 20)


def test_a_failure_of_no_known_rank_is_of_no_stages_tensor() -> None:
    nobodys = failure(round(1.95 * 2**30)).model_copy(update={"rank": None})
    assert explained(nobodys, PLAN, STAGES) == nobodys
    assert explained(failure(round(1.95 * 2**30)), PLAN, {1: 0}).message == "Tried to allocate."
