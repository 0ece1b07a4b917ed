"""A spec written as a Hugging Face configuration reads back as itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from memplan.families import family
from memplan.plan.errors import PlanError
from memplan.plan.library import model_specs
from memplan.plan.models import load_spec
from memplan.trace.job import config_of_spec
from memplan.trace.run import planned

SPECS = [name for name in model_specs() if family(load_spec(name).family).config]
OURS = {"name", "source", "published_parameters"}


@pytest.mark.parametrize("name", SPECS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    spec = load_spec(name)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of_spec(spec)), encoding="utf-8")
    again = load_spec(str(path))
    config = family(spec.family).config
    assert config is not None
    unsaid = OURS if {"router_aux_loss"} <= config.keys.keys() else OURS | {"router_aux_loss"}
    assert again.model_dump(exclude=unsaid) == spec.model_dump(exclude=unsaid)


@pytest.mark.parametrize("name", [name for name in SPECS if family(load_spec(name).family).covers])
def test_transformers_reads_it(name: str) -> None:
    """Every key is one that the class of the configuration knows, or one of rotary positions; ``head_dim`` is read
    where it is there, ``aux_loss_alpha`` by DeepSeek's own code, ``sliding_window_pattern`` and
    ``full_attention_interval`` by ``__post_init__`` of Gemma 3's and Qwen's, which keep ``layer_types``, and heads of
    layers that see all tokens by that of Gemma 4's, which keeps ``per_layer_config``."""
    config = config_of_spec(load_spec(name))
    known = transformers.AutoConfig.for_model(config.pop("model_type"))
    rotary = getattr(known, "rope_parameters", None) or {}
    said = known.to_dict()  # where layers differ, it raises for an attribute that they say
    others = [key for key in config if key not in said and not hasattr(known, key) and key not in rotary]
    allowed = ("head_dim", "aux_loss_alpha", "sliding_window_pattern", "full_attention_interval")
    assert others in ([], ["global_head_dim", "num_global_key_value_heads"], *([key] for key in allowed))


def test_what_a_configuration_cannot_say() -> None:
    with pytest.raises(PlanError, match=r"^model\.family = gpt: has no Hugging Face configuration"):
        config_of_spec(load_spec("megatron-22b"))
    biased = load_spec("mistral-7b").model_copy(update={"attention_bias": True})
    with pytest.raises(PlanError, match=r"^model\.attention_bias = true: must be false"):
        config_of_spec(biased)


@pytest.mark.parametrize(
    ("model", "seq", "says"),
    [
        ("mistral-7b", 4096, "must be below the sliding window of 4096 in a trace: it repeats no heads of keys"),
        ("phi-3-mini", 2050, "must be below the sliding window of 2047 in a trace, or a multiple of 16"),
        ("phi-3-mini", 2048, ""),
    ],
)
def test_masks_that_a_trace_has_otherwise_than_a_gpu(model: str, seq: int, says: str) -> None:
    flags = {"model": model, "seq": str(seq), "layers": "2"}
    if not says:
        assert planned(None, flags).job.attention == "flash"
        return
    with pytest.raises(PlanError, match=says):
        planned(None, flags)
