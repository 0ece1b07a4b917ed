"""``docs/proof.md`` is what its script writes, names tests that are there, and leaves no recipe out."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks import proof
from memplan.layers.coverage import TRANSFORMERS, covered


def test_page_is_up_to_date() -> None:
    assert proof.PAGE.read_text(encoding="utf-8") == proof.page(), "python benchmarks/proof.py"


def test_every_family_is_proven_in_fp32_bf16_and_autocast() -> None:
    """In three shapes, with recompute and without, wherever there is an estimate."""
    found = proof.proofs()
    for family in covered(TRANSFORMERS):
        if family in proof.SAME_RECIPE:
            continue
        for setting in proof.SETTINGS:
            if setting.dtype != "fp16":
                text = proof.cell(family, setting, found)
                assert "*" not in text, (family, setting.title, text)


def test_every_family_is_proven_under_fully_shard() -> None:
    found = proof.sharded_proofs()
    families = {family for family, _, _ in found}
    assert families == set(covered(TRANSFORMERS)) - set(proof.SAME_RECIPE) - {"bert"}, "fsdp has no recipe of BERT"
    assert all(len(found["llama", "", recompute]) >= proof.ENOUGH for recompute in ("none", "full"))
    for family in families:
        shapes = set().union(*(found.get((family, "", recompute), set()) for recompute in ("none", "full")))
        assert len(shapes) >= proof.ENOUGH, family


def test_tests_that_rows_name_are_there() -> None:
    for one in proof.others():
        assert proof.exists(one.test) if one.test else one.shapes == 0, one.recipe
