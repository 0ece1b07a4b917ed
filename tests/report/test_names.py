"""Stages, ranks and modules in few characters (``memplan/report/names.py``)."""

from __future__ import annotations

import pytest

from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.report.names import in_order, kind_of, modules_text, plan_text, ranks_text

from .fabricated import PLAN


@pytest.mark.parametrize(
    ("modules", "text"),
    [
        (("embedding", "layer.0", "layer.1", "layer.2"), "embedding, layers 0–2"),
        (("layer.61", "final_norm", "head"), "layer 61, final_norm, head"),
        (("layer.0", "layer.1", "layer.5"), "layers 0–1, 5"),
        (("lambda", "lambda", "layer.0"), "2 × lambda, layer 0"),
        (("layer.0", "layer.0"), "layers 0, 0"),
        (("model.decoder.layers.0", "model.decoder.layers.1"), "model.decoder.layers 0–1"),
        ((), ""),
    ],
)
def test_neighbouring_layers_share_a_range(modules: tuple[str, ...], text: str) -> None:
    assert modules_text(modules) == text


def test_ranks_are_a_range_or_a_count() -> None:
    assert ranks_text((4, 5, 6, 7)) == "4–7"
    assert ranks_text((3,)) == "3"
    assert ranks_text((0, 8, 16)) == "×3"


def test_the_kind_of_a_module_is_its_name_without_the_number() -> None:
    assert (kind_of("layer.12"), kind_of("head"), kind_of("decoder.layer.3")) == ("layer", "head", "decoder.layer")


def test_the_plan_in_a_line_leaves_out_degrees_of_one() -> None:
    text = plan_text(PLAN)
    assert text.startswith("bigscience-104b-250k · megatron-deepspeed · tp 4 · pp 32 · mbs 1 ")
    assert "dp" not in text


def test_what_makes_another_plan_is_in_the_line() -> None:
    flags = {"model": "llama-3-8b", "framework": "ddp", "gpus": "8", "lora-rank": "8", "quantisation": "nf4"}
    assert plan_text(resolve(read_plan(None, flags).plan)).endswith("flash attention · LoRA 8 · nf4")
    assert plan_text(resolve(read_plan(None, {**flags, "use-dora": "true"}).plan)).endswith("DoRA 8 · nf4")
    flags = {"model": "gpt2", "framework": "deepspeed", "gpus": "8", "zero": "3", "offload-param": "cpu"}
    assert plan_text(resolve(read_plan(None, flags).plan)).startswith("gpt2 · deepspeed · parameters on cpu · dp 8")
    flags = {"model": "gpt2", "freeze-layers": "3", "freeze-embedding": "true", "trainer": "transformers"}
    line = plan_text(resolve(read_plan(None, flags).plan))
    assert line.startswith("gpt2 · single · Trainer · ")
    assert line.endswith("frozen embedding and 3 layers")


def test_virtual_stages_are_shortened() -> None:
    """Layers of equal chunks that are equally far apart: the first two and the last."""
    chunks = [f"layer.{first + i}" for first in (0, 16, 32, 48) for i in range(2)]
    assert modules_text(["embedding", *chunks]) == "embedding, layers 0–1, 16–17, …, 48–49"
    assert modules_text(["layer.0", "layer.4", "layer.8"]) == "layers 0, 4, 8"
    assert modules_text(["layer.0", "layer.4", "layer.8", "layer.20"]) == "layers 0, 4, 8, 20"
    assert in_order(["embedding", "layer.4", "layer.0", "layer.2"]) == ["embedding", "layer.0", "layer.2", "layer.4"]
