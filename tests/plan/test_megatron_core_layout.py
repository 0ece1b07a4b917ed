"""Our layers of stages against Megatron-Core's own functions. Skipped where it cannot be imported."""

from __future__ import annotations

import logging
import warnings
from typing import Any
from unittest import mock

import pytest
from hypothesis import assume, example, given, settings, strategies as st

from memplan.plan.errors import PlanError
from memplan.plan.megatron_layout import layout_string, stages

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torch")
    block = pytest.importorskip("megatron.core.transformer.transformer_block")
    layer = pytest.importorskip("megatron.core.transformer.transformer_layer")
    config = pytest.importorskip("megatron.core.transformer.transformer_config")
    pytest.importorskip("megatron.core.models.backends")
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")

NAMES = {
    "first_layers": "num_layers_in_first_pipeline_stage",
    "last_layers": "num_layers_in_last_pipeline_stage",
    "count_embedding": "account_for_embedding_in_pipeline_split",
    "count_loss": "account_for_loss_in_pipeline_split",
    "layout": "pipeline_model_parallel_layout",
}


def of_core(layers: int, pp: int, vpp: int | None, **choices: Any) -> list[list[list[int]]] | None:
    """Layers by stage and chunk, or ``None`` where Megatron-Core stops."""
    logging.disable(logging.INFO)
    state = layouts.parallel_state
    try:
        made = config.TransformerConfig(
            num_layers=layers,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            pipeline_dtype=block.torch.bfloat16,
            **{NAMES[name]: value for name, value in choices.items()},
        )
        vpp = made.virtual_pipeline_model_parallel_size
        if pp == 1 and vpp is not None:
            return None  # validate_args: the interleaved schedule needs stages
        held = []
        for stage in range(pp):
            with (
                mock.patch.object(state, "get_pipeline_model_parallel_rank", return_value=stage),
                mock.patch.object(state, "get_virtual_pipeline_model_parallel_world_size", return_value=vpp),
            ):
                held.append([of_chunk(made, stage, chunk if vpp else None) for chunk in range(vpp or 1)])
        return held
    except (AssertionError, ValueError, NotImplementedError, ZeroDivisionError, IndexError):
        return None
    finally:
        logging.disable(logging.NOTSET)


def of_chunk(made: Any, stage: int, chunk: int | None) -> list[int]:
    offset = layer.get_transformer_layer_offset(made, chunk, stage)
    return list(range(offset, offset + block.get_num_layers_to_build(made, chunk, stage)))


def of_ours(layers: int, pp: int, vpp: int | None, **choices: Any) -> list[list[list[int]]] | None:
    """The same; where a layout has layers of multi-token prediction, the check of a whole plan, whose model has none,
    refuses it."""
    try:
        held = stages(layers, pp, vpp, **choices)
    except PlanError:
        return None
    if any(chunk.further for stage in held for chunk in stage):
        return None
    return [[list(chunk.layers) for chunk in stage] for stage in held]


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=400, deadline=None)
@given(
    st.integers(1, 16),
    st.integers(1, 5),
    st.sampled_from([None, 2, 3]),
    st.fixed_dictionaries(
        {},
        optional={
            "first_layers": st.integers(0, 6),
            "last_layers": st.integers(0, 6),
            "count_embedding": st.booleans(),
            "count_loss": st.booleans(),
        },
    ),
)
def test_splits_are_those_of_megatron_core(layers: int, pp: int, vpp: int | None, choices: dict[str, Any]) -> None:
    assume(pp > 1 or not {"first_layers", "last_layers"} <= choices.keys())  # one stage twice: we refuse
    ours, theirs = of_ours(layers, pp, vpp, **choices), of_core(layers, pp, vpp, **choices)
    if theirs is not None and sorted(layer for stage in theirs for chunk in stage for layer in chunk) != list(
        range(layers)
    ):
        theirs = None  # it builds another number of layers than it was told to
    assert ours == theirs


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=400, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from([None, 2]),
    st.one_of(
        st.text("EtL|*23(),m", max_size=10),
        st.lists(st.sampled_from(["t", "tt", "|", "t|", "(t|)*2", "t*2", ","]), max_size=6).map("".join),
    ),
)
@example(1, 1, None, "EtmL")
def test_layout_strings_are_read_as_megatron_core_does(layers: int, pp: int, vpp: int | None, text: str) -> None:
    for layout in (text, f"E{text}L"):
        assert of_ours(layers, pp, vpp, layout=layout) == of_core(layers, pp, vpp, layout=layout), layout


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int, str]:
    """Layers, stages, and a layout in which every stage is written out: any cut at all, empty chunks among them."""
    layers, pp, vpp = draw(st.integers(1, 40)), draw(st.integers(2, 6)), draw(st.integers(1, 4))
    edges = sorted(draw(st.lists(st.integers(0, layers), min_size=pp * vpp - 1, max_size=pp * vpp - 1)))
    sizes = [high - low for low, high in zip([0, *edges], [*edges, layers], strict=True)]
    return layers, pp, "E" + "|".join("t" * size for size in sizes) + "L"


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=200, deadline=None)
@given(cuts())
def test_any_cut_has_a_string_that_core_reads(cut: tuple[int, int, str]) -> None:
    layers, pp, layout = cut
    held = stages(layers, pp, layout=layout)
    short = layout_string(held)
    assert stages(layers, pp, layout=short) == held
    assert layouts.PipelineParallelLayerLayout.parse_str_to_list(short) == (
        layouts.PipelineParallelLayerLayout.parse_str_to_list(layout)
    )
    expected = of_core(layers, pp, None, layout=layout)
    if expected is not None:  # a chunk without layers is refused in a few places
        assert of_core(layers, pp, None, layout=short) == expected


def test_a_layout_string_is_short() -> None:
    held = stages(126, 16, 8, count_embedding=True, count_loss=True)
    assert layout_string(held) == "E|(t|)*126,L"
    assert layout_string(stages(10, 2, first_layers=4)) == "Et*4|t*6L"
