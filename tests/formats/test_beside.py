"""Fields as flags, and models as the flags that name them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from memplan.formats.exported import as_text, model_flags
from memplan.plan.errors import Node
from memplan.plan.fields import plan_fields
from memplan.plan.library import model_specs
from memplan.plan.models import load_spec
from memplan.plan.read import COMMAND_LINE, Source, build_plan
from memplan.plan.spec import ModelSpec

OF_SPEC = [field.name for field in plan_fields().values() if field.section == "model" and field.flag]


def named(spec: ModelSpec) -> ModelSpec:
    return build_plan(Source(Node({}, COMMAND_LINE), Path()), model_flags(spec)).plan.model


@pytest.mark.parametrize("name", model_specs())
def test_a_built_in_model_is_its_name(name: str) -> None:
    assert model_flags(load_spec(name)) == {"model": name}


@settings(deadline=None)  # every built-in spec is read once
@given(
    st.sampled_from(list(model_specs())),
    st.fixed_dictionaries(
        {},
        optional={
            "name": st.sampled_from(["mine", "llama-3-8b", "a b"]),
            "layers": st.integers(1, 200),
            "hidden": st.sampled_from([64, 4096, 11600]),
            "heads": st.sampled_from([4, 32, 80]),
            "kv_heads": st.sampled_from([1, 4]),
            "head_dim": st.sampled_from([16, 128]),
            "ffn": st.sampled_from([64, 11008]),
            "vocab": st.integers(1, 10**6),
            "sliding_window": st.sampled_from([None, 4096]),
            "rotary_fraction": st.sampled_from([0.25, 1 / 3]),
            "logit_softcap": st.sampled_from([None, 30.0]),
            "tied_embeddings": st.booleans(),
            "hidden_dropout": st.sampled_from([0.0, 1 / 3]),
        },
    ),
)
def test_any_model_is_a_built_in_one_with_fields_changed(base: str, changes: dict[str, object]) -> None:
    spec = load_spec(base).model_copy(update=changes)
    found = named(spec)
    assert {name: getattr(found, name) for name in OF_SPEC} == {name: getattr(spec, name) for name in OF_SPEC}


def test_values_are_written_as_flags_take_them() -> None:
    assert as_text((3,)) == "3,"
    assert as_text((0, 4, 9)) == "0,4,9"
    assert as_text(("core_attn",)) == "core_attn"
    assert as_text(None) == "null"
    assert as_text({"A": "b c"}) == ("A=b c",)
    assert as_text(1 / 3) == "0.3333333333333333"
