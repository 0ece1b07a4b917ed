"""Programs of learnt adapters where parameters are cut across ranks, beside recipes, which are compared with peft's,
PyTorch's and DeepSpeed's own code elsewhere (``tests/frameworks``), and beside traces of ``fully_shard``."""

from __future__ import annotations

import gzip
import json
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import transformers

from memplan.estimate import programs_of
from memplan.layers.module import Options
from memplan.plan.models import load_spec
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.plan.traced_spec import STAND_IN, TracedSpec
from memplan.tape.events import fold
from memplan.tape.program import fold_program
from memplan.trace import cache, learned as lookup
from memplan.trace.comparison import compared
from memplan.trace.fit import Fit
from memplan.trace.framework import job_of_plan
from memplan.trace.learning import learn

from .test_fits import plan_of, program_of, traced
from .test_step import SCALARS

pytest.importorskip("peft", reason="peft is not installed (the extra dev has it)")

VERSIONS = "bitsandbytes 0.50.2, peft 0.21.2, transformers 5.23.0, torch 2.13.0"
RECORDED = Path(__file__).with_name("four_bit_fits.json.gz")
"""Fits with 4-bit weights: ``python -m tests.trace.test_fits_tuned`` learns them anew, with what ``VERSIONS`` names."""
ADAPTERS = {"lora-rank": "8", "lora-targets": "all-linear"}
LONGEST = 160
POINTS = ("static", "after_forward", "backward_peak", "step_peak", "peak")
SIZES = {"layers": "3", "dtype": "bf16"}


QUANTISED = {"quantisation": "nf4", "double-quantisation": "true"}
CAST = {"lora-dtype": "bf16"}
"""Adapters in the dtype of compute, as hooks of shards leave them to the passes."""


@lru_cache(maxsize=4)
def fit_of(*flags: tuple[str, str]) -> Fit:
    """Of one device."""
    fit, _, _ = learn(job_of_plan(plan_of("llama", 1, 64, **{**SIZES, **ADAPTERS, **dict(flags)})), traced, LONGEST)
    return Fit.from_json(json.loads(json.dumps(fit.to_json())))


FLAT = {"framework": "fsdp", "fsdp-version": "1", **CAST}
SHARDED: dict[str, dict[str, str]] = {
    "fsdp": {"framework": "fsdp", "dp": "4"},
    "fsdp-uneven": {"framework": "fsdp", "dp": "3", "fsdp-reduce": "bf16", "reshard-after-forward": "false"},
    "fsdp-bf16": {"framework": "fsdp", "dp": "4", "lora-dtype": "bf16"},
    "hsdp": {"framework": "fsdp", "dp": "4", "fsdp-replicas": "2"},
    "offload": {"framework": "fsdp", "dp": "4", "fsdp-offload": "true"},
    "fsdp1": {**FLAT, "dp": "4"},
    "fsdp1-post": {**FLAT, "dp": "3", "fsdp-backward-prefetch": "post"},
    "zero-0": {"framework": "deepspeed", "dp": "3", "zero": "0"},
    "zero-1": {"framework": "deepspeed", "dp": "3", "zero": "1", "reduce-bucket-size": "3000"},
    "zero-2": {"framework": "deepspeed", "dp": "3", "zero": "2", "reduce-bucket-size": "3000"},
}


def assert_as_the_recipe(fit: Fit, **flags: str) -> None:
    """But for the loss and its gradient."""
    plan = plan_of("llama", 2, 77, **{**SIZES, **ADAPTERS, **flags})
    (recipe,) = programs_of(plan, Options())
    made = program_of(plan, fit, Options())
    ours, theirs = fold_program(made), fold_program(recipe)
    assert {name: getattr(ours, name) - getattr(theirs, name) for name in POINTS} == pytest.approx(
        dict.fromkeys(POINTS, 0), abs=SCALARS
    )
    assert (made.host, made.saving) == (recipe.host, recipe.saving)
    if plan.fsdp.version == "1":
        wrapped = zip((made.before, *made.before_elsewhere), (recipe.before, *recipe.before_elsewhere), strict=True)
        assert all(fold(one).peak == fold(other).peak for one, other in wrapped)
    if plan.quantisation.kind == "none" or plan.layout.dp != 3:  # of packed weights a fit does not know the rows
        assert made.elements == recipe.elements


@pytest.mark.parametrize("recompute", ["full", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.parametrize("sharding", SHARDED)
@pytest.mark.parametrize("accumulated", [1, 3])
def test_same_as_the_recipe(sharding: str, accumulated: int, recompute: str) -> None:
    flags = {**SHARDED[sharding], "recompute": recompute}
    fit = fit_of(*CAST.items(), ("recompute", recompute))
    assert_as_the_recipe(fit, **flags, gbs=str(2 * int(flags["dp"]) * accumulated))


WHOLE: dict[str, dict[str, str]] = {
    "single": {"gbs": "4"},
    "fp4": {"gbs": "2", "quantisation": "fp4"},
    "ddp": {"framework": "ddp", "dp": "3", "gbs": "12"},
}
CUT = {name: flags for name, flags in SHARDED.items() if name != "fsdp-bf16"} | {
    "whole": {"framework": "fsdp", "dp": "4", "quant-storage": "uint8"}
}


def four_bit_fit(**flags: str) -> Fit:
    """As it is on file: bitsandbytes is large."""
    with gzip.open(RECORDED) as file:
        data = json.load(file)
    assert data["versions"] == VERSIONS
    return Fit.from_json(data["fits"][",".join(flags.values())])


PREPARED = {"kbit-preparation": "true", "recompute": "full", "attention": "eager"}
KINDS: tuple[dict[str, str], ...] = ({}, CAST, PREPARED)


@pytest.mark.slow
@pytest.mark.parametrize("flags", KINDS)
def test_what_is_on_file_is_what_is_learnt(flags: dict[str, str]) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    found = fit_of(*QUANTISED.items(), *flags.items())
    assert json.dumps(found.to_json()) == json.dumps(four_bit_fit(**flags).to_json())


@pytest.mark.parametrize("setting", WHOLE)
def test_four_bit_weights(setting: str) -> None:
    """Packed, with what belongs to each weight, and bitsandbytes' own table."""
    assert_as_the_recipe(four_bit_fit(), **{**QUANTISED, **WHOLE[setting]})


@pytest.mark.parametrize("setting", CUT)
def test_four_bit_weights_that_are_cut(setting: str) -> None:
    """Packed into numbers of the dtype of compute, which are gathered as others are."""
    flags = {"gbs": str(2 * int(CUT[setting]["dp"])), **CUT[setting]}
    assert_as_the_recipe(four_bit_fit(**CAST), **QUANTISED, **flags)


def test_four_bit_weights_prepared() -> None:
    """``prepare_model_for_kbit_training``: the rest in fp32."""
    assert_as_the_recipe(four_bit_fit(**PREPARED), **QUANTISED, **PREPARED, gbs="4")


WHOLE_MODULES = Path(__file__).with_name("saved_fit.json.gz")
"""A fit of Llama whose embedding and head are trained whole: ``python -m tests.trace.test_fits_tuned saved``."""
SAVED = {"lora-targets": "q_proj,v_proj", "modules-to-save": "embed_tokens,lm_head", "recompute": "full"}


def saved_fit() -> Fit:
    data = json.loads(gzip.decompress(WHOLE_MODULES.read_bytes()))
    assert data["versions"] == VERSIONS.partition(", ")[2]
    return Fit.from_json(data["fit"])


@pytest.mark.parametrize("setting", ["single", "ddp", "fsdp", "fsdp-uneven", "hsdp", "zero-0", "zero-1", "zero-2"])
def test_modules_that_are_trained_whole(setting: str) -> None:
    """peft's copies beside the frozen tables, in the dtype of the model; under ``fully_shard`` in that of adapters."""
    flags = {**WHOLE, **SHARDED}[setting]
    dtypes = {} if "zero" in setting or flags.get("framework") == "fsdp" else CAST
    assert_as_the_recipe(saved_fit(), **{**SAVED, **dtypes, "gbs": str(4 * int(flags.get("dp", "1"))), **flags})


@pytest.mark.slow
def test_the_fit_on_file_of_whole_modules() -> None:
    assert json.dumps(fit_of(*CAST.items(), *SAVED.items()).to_json()) == json.dumps(saved_fit().to_json())


@pytest.mark.parametrize("recompute", ["full", pytest.param("none", marks=pytest.mark.slow)])
def test_same_as_fully_shard(recompute: str) -> None:
    """Entry by entry: frozen parameters are gathered and not reduced, adapters are cast on their way from fp32 shards,
    and where the embedding's output needs no gradient the first layer is reduced when all of backward has ended."""
    sizes = {"framework": "fsdp", "dp": "4", "gbs": "16", "recompute": recompute}
    plan = plan_of("llama", 2, 150, **{**SIZES, **ADAPTERS, **sizes})
    comparison = compared(
        traced(job_of_plan(plan)), program_of(plan, fit_of(*CAST.items(), ("recompute", recompute)), Options())
    )
    assert comparison.furthest <= SCALARS
    for row in comparison.rows:
        assert row.estimated is not None
        assert abs(row.traced.net - row.estimated.net) <= 512, row
        assert abs(row.traced.peak - row.estimated.peak) <= SCALARS, row


@pytest.mark.slow
def test_same_as_fully_shard_that_casts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OLMo's layers are handed fp32 tables: of an architecture without a recipe, learnt as a user has it learnt."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    sizes = {"vocab_size": 1003, "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}
    sizes |= {"intermediate_size": 96, "max_position_embeddings": 160}
    config = transformers.AutoConfig.for_model("olmo", **sizes)
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    flags = {"model": str(tmp_path), "framework": "fsdp", "dp": "4", "mbs": "2", "seq": "77", "gbs": "16", **ADAPTERS}
    plan = resolve(read_plan(None, flags, traced=True).plan)
    lookup.learned(plan)
    (program,) = programs_of(plan, Options())
    assert isinstance(plan.model, TracedSpec)
    job = job_of_plan(plan.model_copy(update={"model": load_spec(STAND_IN)}), plan.model.config)
    comparison = compared(traced(job), program)
    assert comparison.furthest <= SCALARS
    for row in comparison.rows:
        assert row.estimated is not None
        assert abs(row.traced.peak - row.estimated.peak) <= SCALARS, row


def record() -> None:
    """Writes ``RECORDED``."""
    fits = {",".join(flags.values()): fit_of(*QUANTISED.items(), *flags.items()).to_json() for flags in KINDS}
    data = json.dumps({"versions": VERSIONS, "fits": fits}, separators=(",", ":"))
    RECORDED.write_bytes(gzip.compress(data.encode(), 9, mtime=0))


def record_saved() -> None:
    """Writes ``WHOLE_MODULES``."""
    data = {"versions": VERSIONS.partition(", ")[2], "fit": fit_of(*CAST.items(), *SAVED.items()).to_json()}
    WHOLE_MODULES.write_bytes(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), 9, mtime=0))


if __name__ == "__main__":
    (record_saved if "saved" in sys.argv else record)()
