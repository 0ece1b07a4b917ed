"""Launch scripts of Megatron-LM whose layers have linear attention."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.arguments import plan_of_arguments
from memplan.formats.megatron.script import TARGET
from memplan.frameworks.megatron.programs import programs
from memplan.layers.module import Options
from memplan.plan.count import parameters
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.resolve import resolve

from ..plans import round_trip

VARIANT = "experimental_attention_variant"
DELTA = {VARIANT: "gated_delta_net", "linear_attention_freq": "4"}


def read(family: Any = "gpt", **more: Any) -> Plan:
    given: dict[str, Any] = {
        "--num-layers": 8, "--hidden-size": 1024, "--num-attention-heads": 16, "--seq-length": 1024,
        "--max-position-embeddings": 1024, "--micro-batch-size": 1, "--global-batch-size": 8, "--bf16": True,
        "--position-embedding-type": "rope", "--untie-embeddings-and-output-weights": True, "--swiglu": True,
        "--disable-bias-linear": True, "--normalization": "RMSNorm", "--hidden-dropout": 0.0,
    }  # fmt: skip
    given |= {f"--{name.replace('_', '-')}": value for name, value in more.items()}
    return plan_of_arguments(given, gpus=8, family=family, vocabulary=32000).plan


@pytest.mark.parametrize("frequency", ["4", "([1]*3+[0])*2", "[1,1,1,0,1,1,1,0]"])
def test_every_fourth_layer_has_attention(frequency: str) -> None:
    """Sizes default to those of ``TransformerConfig``."""
    model = read(**{**DELTA, "linear_attention_freq": frequency, "linear_num_value_heads": 16}).model
    assert model.linear_interval == 4
    assert [model.is_linear(layer) for layer in range(8)] == [True, True, True, False] * 2
    assert (model.linear_key_heads, model.linear_value_heads) == (16, 16)
    assert (model.linear_key_head_dim, model.linear_value_head_dim, model.linear_conv_kernel) == (128, 128, 4)


def test_all_layers_and_names() -> None:
    assert read(**{VARIANT: "gdn", "linear_attention_freq": "[1]*8"}).model.linear_interval == 9
    assert read(linear_num_key_heads=4).model.linear_interval == 0


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({VARIANT: "dsa"}, "must be gdn or left out: sparse attention is not modelled yet"),
        ({VARIANT: "gdn2", "linear_attention_freq": 4}, "gates of each channel are not modelled yet"),
        ({VARIANT: "gdn"}, "--linear-attention-freq: is missing"),
        ({**DELTA, "linear_attention_freq": "[1,0]*4+[1]"}, "other patterns are not modelled yet"),
        ({**DELTA, "linear_attention_freq": "[0]*2+[1]*6"}, "other patterns are not modelled yet"),
        ({**DELTA, "linear_num_key_heads": 12}, "must be a multiple of the 12 heads of keys"),
        (
            {**DELTA, "tensor_model_parallel_size": 8, "linear_num_key_heads": 4},
            "must divide, tp and cp together, the 4",
        ),
        ({**DELTA, "swiglu": False}, "stops at all but silu"),
        ({**DELTA, "transformer_impl": "local"}, "gated delta nets with local layers"),
        ({**DELTA, "mtp_num_layers": 1, "num_layers": 7}, "must divide the 7 layers"),
        (
            {**DELTA, "fp8_format": "hybrid", "linear_num_value_heads": 16, "tensor_model_parallel_size": 4},
            "no multiple of 16",
        ),
    ],
)
def test_what_is_not_modelled_is_one_line(more: dict[str, object], problem: str) -> None:
    with pytest.raises(PlanError) as raised:
        programs(resolve(read(**more)), Options())
    assert problem in str(raised.value)


@pytest.mark.parametrize("family", ["gpt", "hybrid"])
def test_written_and_read_again(family: str) -> None:
    more: dict[str, object] = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64}
    if family == "hybrid":
        spec = "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
        more |= {"hybrid_layer_pattern": "GM*-G-", "spec": f"[{spec}]", "position_embedding_type": "none"}
    plan = read(family=family, **more, **(DELTA if family == "gpt" else {}))
    assert bool(plan.model.linear_interval) is (family == "gpt")
    text = round_trip(plan, TARGET).text
    assert ("--experimental-attention-variant gated_delta_net" in text) is (family == "gpt")
    assert "--linear-num-key-heads 4" in text


@pytest.mark.parametrize("tp", [1, 2])
def test_every_parameter_is_in_the_program(tp: int) -> None:
    """Of layers with attention and of gated delta nets, in a model that takes turns and in a hybrid."""
    spec = "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
    more: dict[str, object] = {"tensor_model_parallel_size": tp, "sequence_parallel": tp > 1}
    hybrid = {"hybrid_layer_pattern": "GM*-G-", "spec": f"[{spec}]", "position_embedding_type": "none"}
    for plan in (read(**DELTA, **more), read(family="hybrid", **hybrid, **more)):
        (stage,) = programs(resolve(plan), Options())
        chunk = stage.order.chunks[0]
        spans = [(one, len(span.names)) for span in chunk.spans for one in span.module.parameters]
        held = sum(one.elements * times for one, times in spans)
        whole = parameters(plan.model)
        if tp == 1:
            assert held == whole
        else:
            assert whole / 2 < held < whole / 2 * 1.01, "norms are whole on each rank"
