"""A model family is one file and a line in the registry: a toy, in this file, is estimated, searched and reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memplan.cli import main
from memplan.families import ROOMS, families, family
from memplan.families.base import Config, key
from memplan.families.llama import KEYS, LLAMA_FAMILY, llama_attention, llama_embedding
from memplan.layers import ops
from memplan.layers.autograd import Recorder, Tensor
from memplan.layers.huggingface import LayerShape, Shared, linear, relu, rms_norm
from memplan.plan.schema import plan_schema


def toy_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """Llama's attention, then one wide product with a ReLU."""
    attended, _ = llama_attention(r, rms_norm(r, hidden, "attention_norm"), shared, shape)
    hidden = ops.add(r, hidden, attended, "residual_attention")
    wide = relu(r, linear(r, hidden, "up", shape.spec.ffn, False))
    return ops.add(r, hidden, linear(r, wide, "down", shape.spec.hidden, False), "residual_mlp")


TOY = replace(
    LLAMA_FAMILY,
    name="toy",
    config=Config(
        keys={name: KEYS[name] for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "positions_max")}
        | {"tied_embeddings": key("tie_word_embeddings", default=True)},
        constants={
            **dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), False),
            **dict.fromkeys(("embedding_dropout", "attention_dropout", "hidden_dropout"), 0.0),
            "norm": "rmsnorm",
            "positions": "rotary",
            "activation": "relu",
        },
    ),
    covers={"activation": ("relu",), "norm": ("rmsnorm",), "mlp_bias": (False,)},
    layer=toy_layer,
    embedding=llama_embedding,
    megatron_core=None,
    linear_layers={"query": "mixer.q", "up": "wide.up", "down": "wide.down"},
    lora_targets=("q",),
    registered=("query", "key", "value", "attention_output", "up", "down", "attention_norm"),
    submodules=None,
    no_flash="toys have no kernel",
    no_package="toys have no kernel",
)

FAMILIES = {"toy": TOY}

HIDDEN, FFN, LAYERS, VOCAB, HEADS = 128, 512, 3, 1000, 4


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A configuration of the family, while it is registered."""
    monkeypatch.setitem(ROOMS, "toy", __name__)
    family.cache_clear()
    path = tmp_path / "config.json"
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": FFN, "vocab_size": VOCAB}
    path.write_text(json.dumps({"model_type": "toy", "num_attention_heads": HEADS, **sizes}), encoding="utf-8")
    yield path
    family.cache_clear()


def answer(capsys: pytest.CaptureFixture[str], command: str, config: Path) -> dict[str, Any]:
    job = [f"--model={config}", "--seq=64", "--gpu=a100-80gb"]
    assert main([*command.split(), *job, "--json"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(("framework", "shards"), [("single", 1), ("ddp --gpus=2", 1), ("fsdp --gpus=2", 2)])
def test_a_new_family_is_estimated_and_reported(
    capsys: pytest.CaptureFixture[str], config: Path, framework: str, shards: int
) -> None:
    """Attention 4 h², two products h f and a norm in each layer; a tied table and the final norm."""
    found = answer(capsys, f"estimate --framework={framework}", config)
    (stage,) = found["stages"]
    of_layer = 4 * HIDDEN**2 + 2 * HIDDEN * FFN + HIDDEN
    assert shards * stage["parameters"] == LAYERS * of_layer + VOCAB * HIDDEN + HIDDEN
    assert found["plan"]["model"]["family"] == "toy"
    assert found["plan"]["attention"] == "eager"


def test_a_new_family_is_searched_and_tuned(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    found = answer(capsys, "suggest-partition --framework=ddp --gpus=2 --gbs=8", config)
    assert found["recommended"]["plan"]["batch"]["gbs"] == 8
    tuned = answer(capsys, "estimate --framework=single --lora-rank=8", config)
    assert tuned["plan"]["lora"]["targets"] == ["q"]


def test_it_is_refused_where_it_has_no_recipe(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    assert main(["estimate", f"--model={config}", "--framework=megatron", "--seq=64"]) == 2
    assert "model.family = toy: has no recipe in framework megatron yet" in capsys.readouterr().err
    assert main(["estimate", f"--model={config}", "--framework=single", "--attention=flash", "--seq=64"]) == 2
    assert "must be eager for family toy: toys have no kernel" in capsys.readouterr().err


def test_the_schema_has_it(config: Path) -> None:
    assert "toy" in plan_schema()["$defs"]["ModelSpec"]["properties"]["family"]["enum"]


def test_every_family_is_whole() -> None:
    for one in families():
        assert family(one.name) is one
        assert (one.covers is None) == (one.layer is None) == (one.embedding is None)
        assert one.covers is None or (one.modules is not None and one.linear_layers)
        assert one.lora_targets is None or set(one.lora_targets) <= {
            name.rpartition(".")[2] for name in one.linear_layers.values()
        }
