"""Learned models that ship with memplan, beside traces of transformers' own code at points that none was learnt at,
and as a user names them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from memplan.cli import main
from memplan.estimate import estimate, programs_of
from memplan.frameworks import framework as framework_of
from memplan.frameworks.deepspeed.learned import learnt_model
from memplan.frameworks.fsdp.learned import lacks, told_apart
from memplan.frameworks.plain.learned import ready_at
from memplan.layers.module import Options
from memplan.notices import warnings
from memplan.plan.errors import PlanError
from memplan.plan.library import LEARNED, learned_models
from memplan.plan.models import load_spec
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.plan.traced_spec import STAND_IN
from memplan.tape.events import Hook, Seam
from memplan.tape.program import fold_program
from memplan.trace import cache, learned as lookup
from memplan.trace.comparison import compared
from memplan.trace.framework import job_of_plan
from memplan.trace.learned import fit_of, job_of
from memplan.trace.periods import shortened
from memplan.trace.step import traced_step
from memplan.trace.worker import evaluated_step

from .test_step import SCALARS

LARGEST = 3 << 20
"""Bytes of all that ships."""
RELEASES = ("5.23.0", "2.13.0")
"""Of transformers and torch, as ``pyproject.toml`` pins them."""
BESIDE = {"olmo-7b"}
"""Models that every run of the tests traces; the others do where all is run."""
FROZEN = {one.name for one in learned_models().values() if one.configuration()["model_type"] == "whisper"}
"""Whisper's encoder has a table of positions that is not trained, which is not modelled under FSDP."""
IMAGES = {one.name for one in learned_models().values() if one.configuration()["model_type"] == "vit"}
"""Models that read images, whose sequences have one length; under FSDP a gathered unit and the scores' gradient are
highest in turn within the head, and equal over the whole."""
TWO_LISTS = {one.name for one in learned_models().values() if one.configuration()["model_type"] == "t5"}
"""Encoders and decoders, whose layers an estimate under FSDP counts on."""
BUFFERS_16 = {one.name for one in learned_models().values() if one.configuration()["model_type"] in ("bart", "m2m_100")}
"""Models with buffers in bf16, which shards in fp32 would have in fp32."""
SHARDED_BESIDE = {"roberta-base", "olmo-7b"}
"""Models that every run traces under FSDP: of the second it casts what layers are handed."""


GATHERED = ("phi-2",)
"""Models that ship with what DeepSpeed's stage 3 needs, too."""
WIDE = ("roberta-base", "t5-small")
"""Models that ship in fp32, too."""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    lookup.forget()


def plan_of(model: str, **flags: str) -> ResolvedPlan:
    return resolve(read_plan(None, {"model": model, "framework": "single", **flags}, traced=True).plan)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a wrong command prints."""
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("name", learned_models())
def test_parameters_are_those_published(name: str) -> None:
    """Without recompute (in a whole estimate) and with it, at the length that nobody gave, from fits of the releases
    that the tests run."""
    (stage,) = estimate(plan_of(name)).stages
    assert stage.parameters == learned_models()[name].parameters
    for flags in ({}, {"recompute": "full"}):
        plan = plan_of(name, **flags)
        (program,) = programs_of(plan, Options())
        assert fold_program(program).peak > 0
        assert program.parameters() == learned_models()[name].parameters
        fit = fit_of(plan)
        assert (fit.transformers, fit.torch.partition("+")[0]) == RELEASES


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "name", [one if one in BESIDE else pytest.param(one, marks=pytest.mark.slow) for one in learned_models()]
)
def test_same_as_a_direct_trace(name: str, recompute: str) -> None:
    """To the byte, at sizes that were not learnt from; with fewer layers where the fit says that
    it holds for them."""
    learnt = fit_of(plan_of(name, recompute=recompute))
    layers = {"layers": "7"} if learnt.extends and learnt.layers else {}
    lengths = (13 * 32, 195 * 32) if name not in IMAGES else (197,)
    points = [(b, s) for b in (4, 1) for s in lengths if learnt.piece_at(b, s) is not None]
    assert points
    for b, s in points[:: 2 if name in BESIDE else 1]:
        plan = plan_of(name, recompute=recompute, mbs=str(b), seq=str(s), gbs=str(2 * b), **layers)
        (program,) = programs_of(plan, Options())
        found = traced_step(job_of(plan), evaluates=True)
        comparison = compared(found, program)
        assert comparison.furthest == 0
        for row in comparison.rows:
            assert row.estimated is not None
            assert (row.traced.net, row.traced.peak) == (row.estimated.net, row.estimated.peak), row
        assert fold_program(program).peak == found.whole.peak


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", WIDE)
def test_same_as_a_direct_trace_in_fp32(name: str, recompute: str) -> None:
    """As these are mostly trained: 4 bytes of parameters and of two moments each between iterations."""
    plan = plan_of(name, recompute=recompute, dtype="fp32", mbs="3", seq=str(13 * 32))
    (program,) = programs_of(plan, Options())
    found = traced_step(job_of(plan), evaluates=True)
    comparison = compared(found, program)
    assert comparison.furthest == 0
    assert fold_program(program).peak == found.whole.peak
    (stage,) = estimate(plan).stages
    assert stage.static == pytest.approx(12 * learned_models()[name].parameters, rel=0.01)  # gradients are set to None


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of outputs that are views
@pytest.mark.parametrize(
    "name",
    [
        one if one in SHARDED_BESIDE else pytest.param(one, marks=pytest.mark.slow)
        for one in learned_models()
        if one not in BUFFERS_16 | FROZEN
    ],
)
def test_same_as_a_direct_trace_under_fsdp(name: str) -> None:
    """PyTorch's own ``fully_shard`` around transformers' model, traced on one of four ranks, beside its hooks around
    the layers of a fit: all that passes do, but for the loss and its gradient, and 512 bytes of a number."""
    layers = {"layers": "7"} if fit_of(plan_of(name)).extends else {}
    for recompute, b in (("none", 2), ("full", 1))[: 1 if name in SHARDED_BESIDE else 2]:
        seq = "197" if name in IMAGES else "416"
        sizes = {"mbs": str(b), "seq": seq, "gbs": str(8 * b), "recompute": recompute, **layers}
        plan = resolve(read_plan(None, {"model": name, "framework": "fsdp", "dp": "4", **sizes}, traced=True).plan)
        job = job_of_plan(plan.model_copy(update={"model": load_spec(STAND_IN)}), plan.model.config)  # type: ignore[attr-defined]
        (program,) = programs_of(plan, Options())
        found = traced_step(job, evaluates=True)
        assert compared(found, program).furthest <= SCALARS
        for row in compared(found, program).rows if name not in TWO_LISTS | IMAGES else ():
            assert row.estimated is not None
            assert abs(row.traced.net - row.estimated.net) <= 512, row
            assert abs(row.traced.peak - row.estimated.peak) <= SCALARS, row


def test_kinds_of_layers_in_turn_are_learnt_with_few_of_them() -> None:
    """Command R7B has 32 layers, of which every fourth has full attention: 12 = 32 - 5 x 4 of them are two periods, and
    the last, which may differ. What a configuration says of each layer is cut."""
    plain = job_of(plan_of("olmo-7b"))
    windows = {"sliding_window": 4096, "sliding_window_pattern": 4}
    job = replace(plain, config={**plain.config, "model_type": "cohere2", **windows})
    kinds = [("full" if at % 4 == 3 else "sliding") + "_attention" for at in range(32)]
    config, period, layers = shortened(job) or ({}, 0, 0)
    assert (config["num_hidden_layers"], period, layers) == (12, 4, 32)
    config, *_ = shortened(replace(job, config={**job.config, "layer_types": kinds})) or ({},)
    assert config["layer_types"] == kinds[:12]
    assert shortened(plain) is None


READY = {
    "t5-small": {"encoder.final_layer_norm.weight": (7, 8)},
    "bart-base": {"model.encoder.layernorm_embedding.weight": (7, 0), "model.encoder.layernorm_embedding.bias": (7, 0)},
    "xlm-roberta-base": dict.fromkeys(
        ("lm_head.bias", "lm_head.dense.weight", "lm_head.dense.bias", "lm_head.layer_norm.weight"), (0, 6)
    ),
}
"""Parameters whose gradients are ready elsewhere than in the entry that owns them: its place in the row, the other."""


@pytest.mark.parametrize("name", READY)
def test_where_gradients_are_ready(name: str) -> None:
    """As PyTorch's hooks tell of transformers' model (``Traced.ready``); tables that are shared come last."""
    piece = fit_of(plan_of(name)).pieces[0]
    kinds = [piece.kinds[kind] for kind, names in piece.row for _ in names]
    places = ready_at(piece, piece.row)
    found = {
        kinds[home].parameters[number].name: (home, at) for at, place in enumerate(places) for home, number in place
    }
    assert READY[name].items() <= found.items()
    home, number = places[0][-1]
    assert kinds[home].parameters[number].elements == max(one.elements for one in kinds[0].parameters)
    assert sum(map(len, places)) == sum(len(kind.parameters) for kind in kinds)


def test_entries_are_told_apart() -> None:
    """Layers of an encoder and of a decoder are counted on; one list is as it was."""
    row = fit_of(plan_of("t5-small")).pieces[0].row
    assert [name for one in told_apart(row) for name in one.names] == [
        "embedding",
        *(f"layer.{at}" for at in range(6)),
        "head.7",
        "embedding.8",
        *(f"layer.{at}" for at in range(6, 12)),
        "final_norm",
        "head",
    ]
    assert [one.kind for one in told_apart(row)] == [one.kind for one in row]
    one_list = fit_of(plan_of("olmo-7b")).pieces[0].row
    assert told_apart(one_list) == one_list


def test_encoder_and_decoder_are_sharded() -> None:
    """Parameters, gradients and two moments of T5 Small in fp32 on each of eight ranks, rounded up by tensors."""
    (stage,) = estimate(plan_of("t5-small", framework="fsdp", dp="8", mbs="1", seq="512")).stages
    assert 0 <= stage.static - 12 * learned_models()["t5-small"].parameters / 8 < 1 << 20


@pytest.mark.parametrize("name", [*READY, "roberta-base"])
def test_deepspeed_meets_every_gradient_once(name: str) -> None:
    """Also of parameters that are called the same, and of entries."""
    model = learnt_model(plan_of(name, framework="deepspeed", dp="2", zero="1"))
    arrived = [
        model.id_of(instance, event.name)
        for instance in model.instances
        for event in instance.hooked.module.first.backward
        if isinstance(event, Seam) and event.hook is Hook.GRADIENT
    ]
    assert sorted(arrived) == list(range(len(model.parameters)))


@pytest.mark.slow
@pytest.mark.parametrize("name", READY)
def test_same_as_a_direct_trace_under_ddp(name: str) -> None:
    """torch's DistributedDataParallel around models of two lists of layers, whose buckets are in the order in which
    gradients are ready."""
    sizes = {"framework": "ddp", "dp": "4", "mbs": "2", "seq": "416", "gbs": "16"}
    plan = resolve(read_plan(None, {"model": name, **sizes}, traced=True).plan)
    job = job_of_plan(plan.model_copy(update={"model": load_spec(STAND_IN)}), plan.model.config)  # type: ignore[attr-defined]
    (program,) = programs_of(plan, Options())
    assert compared(traced_step(job, evaluates=True), program).furthest == 0


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_fully_shard_casts_is_refused(recompute: str) -> None:
    """OLMo's layers are handed tables in fp32: what was learnt of them on one GPU has them uncast."""
    alone = fit_of(plan_of("olmo-7b", recompute=recompute))
    why = lacks(plan_of("olmo-7b", framework="fsdp", dp="4", recompute=recompute), alone)
    assert re.search(r"handed tensors in fp32, which fully_shard casts.* --framework fsdp --dp 2`", why)


def test_parameters_that_are_not_trained_are_refused_under_fsdp() -> None:
    with pytest.raises(PlanError, match="it has parameters that are not trained, whose shards no optimizer has"):
        programs_of(plan_of("whisper-tiny", framework="fsdp", dp="4"), Options())


def test_an_image_has_one_length(capsys: pytest.CaptureFixture[str]) -> None:
    """224 / 16 = 14 patches along each side, 196 in all, and the token before them."""
    assert plan_of("vit-base-patch16-224").batch.seq == 197
    wrong = error_of(
        capsys, "estimate", "--model", "google/vit-base-patch16-224", "--framework", "single", "--seq", "512"
    )
    assert "--seq: batch.seq = 512: must be 197: patches of an image" in wrong


def test_what_ships_is_what_is_listed() -> None:
    """Each folder is a model's; no file is of settings that no plan asks for; all of it is small."""
    folders = {path.name for path in LEARNED.iterdir() if path.is_dir()}
    assert folders == set(learned_models())
    asked = {
        cache.built_in_path(name, settings)
        for name in learned_models()
        for recompute in ("none", "full")
        for flags in ({}, {"framework": "fsdp"}, {"framework": "deepspeed", "zero": "3"}, {"dtype": "fp32"})
        for plan in (plan_of(name, recompute=recompute, **flags),)
        for settings in (lookup.settings_of(job_of(plan), None), lookup.settings_of(job_of(plan), plan.model.layers))
    }
    there = set(LEARNED.glob(f"*/*{cache.SUFFIX}"))
    assert there <= asked
    cast = {name for name in folders - FROZEN if name.startswith("olmo-")}
    assert len(there) == 2 * (len(folders) + len(cast) + len(GATHERED) + len(WIDE))
    assert sum(path.stat().st_size for path in LEARNED.rglob("*") if path.is_file()) < LARGEST


@pytest.mark.parametrize("name", learned_models())
def test_fits_are_this_tracers(name: str) -> None:
    """Whoever changes what traces find has them checked and written anew: ``python -m benchmarks.learned --renew``."""
    stale = [path.name for path in sorted((LEARNED / name).glob(f"*{cache.SUFFIX}")) if cache.is_stale(path)]
    assert not stale, f"python -m benchmarks.learned --renew {name}"
    for recompute in ("none", "full"):
        assert all(piece.work is not None for piece in fit_of(plan_of(name, recompute=recompute)).pieces)


@pytest.mark.parametrize("framework", ["single", "ddp", "fsdp", "deepspeed"])
def test_searched(framework: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The recommended layout needs what an estimate of the written plan says."""
    path = tmp_path / "found.yaml"
    gpus = "1" if framework == "single" else "8"
    words = [
        "--framework",
        framework,
        "--gpus",
        gpus,
        "--gpu",
        "h100",
        "--gbs",
        "16",
        "--seq",
        "1024",
        "--write",
        str(path),
    ]
    assert main(["suggest-partition", "--model", "olmo-7b", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["recommended"]
    assert best["seconds"] > 0
    assert best["device_bytes"] == peak_of(capsys, "estimate", str(path))


def test_zero_3(capsys: pytest.CaptureFixture[str]) -> None:
    """Shards of everything beside those of optimizer states alone."""
    words = ("--model", "phi-2", "--framework", "deepspeed", "--gpus", "8", "--seq", "1024")
    needs = [peak_of(capsys, "estimate", *words, "--zero", stage) for stage in ("3", "1")]
    assert needs[0] < needs[1]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", GATHERED)
def test_same_as_a_direct_trace_with_hooks(name: str, recompute: str) -> None:
    """ZeRO-3's linear function, and marks where its hooks run, at a point that was not learnt from."""
    sizes = {"recompute": recompute, "mbs": "2", "seq": "416"}
    gathers = plan_of(name, framework="deepspeed", zero="3", dp="2", gbs="8", **sizes)
    program = framework_of("single").running.learnt_program(plan_of(name, gbs="4", **sizes), fit_of(gathers), Options())
    assert compared(evaluated_step(job_of(gathers)), program).furthest == 0


def test_fsdp1(capsys: pytest.CaptureFixture[str]) -> None:
    """In one dtype nothing is cast, of an architecture that FSDP2 casts tensors of, too."""
    words = ("--model", "olmo-7b", "--framework", "fsdp", "--gpus", "8", "--seq", "1024")
    assert peak_of(capsys, "estimate", *words, "--fsdp-version", "1") < peak_of(capsys, "estimate", *words)


def test_fits_of_the_user_go_first() -> None:
    """As they are of the releases that are installed."""
    plan = plan_of("olmo-7b")
    shipped = fit_of(plan)
    job = job_of(plan)
    own = type(shipped)(shipped.torch, "5.99.0", *[getattr(shipped, name) for name in NAMES])
    cache.store(lookup.kept_as(job, own), own)
    lookup.forget()
    assert fit_of(plan).transformers == "5.99.0"


NAMES = ("layers", "verified", "pieces", "refused", "buckets")


# -- as a user names them ---------------------------------------------------------------------------


def peak_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> int:
    assert main([*arguments, "--json"]) in (0, 1)
    peak = json.loads(capsys.readouterr().out)["peak_bytes"]
    assert isinstance(peak, int)
    return peak


def test_all_names_mean_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    expected = peak_of(capsys, "estimate", "--model", "apertus-8b")
    for name in ("Apertus-8B", "swiss-ai/Apertus-8B-2509", "Apertus-8B-Instruct-2509"):
        assert peak_of(capsys, "estimate", "--model", name) == expected
    assert peak_of(capsys, "estimate", "apertus-8b") == expected
    path = tmp_path / "there" / "p.yaml"
    path.parent.mkdir()
    assert main(["init", str(path), "--model", "apertus-8b", "--seq", "1024"]) == 0
    shorter = peak_of(capsys, "estimate", str(path))
    assert shorter == peak_of(capsys, "estimate", "--model", "apertus-8b", "--seq", "1024") < expected
    above = tmp_path / "above.yaml"
    above.write_text("extends: there/p.yaml\nbatch: {seq: 4096}\n", encoding="utf-8")
    assert peak_of(capsys, "estimate", str(above)) == expected
    assert peak_of(capsys, "estimate", str(path), "--layers", "8") < shorter


def test_a_plan_in_json_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the model's name and layers, whose configuration decides: the same estimate."""
    assert main(["estimate", "--model", "phi-2", "--gpu", "a100-80gb", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    (tmp_path / "plan.json").write_text(json.dumps(first["plan"]))
    assert main(["estimate", str(tmp_path / "plan.json"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["plan"] == first["plan"]
    assert again["stages"] == first["stages"]


def test_several_gpus_are_fsdp(capsys: pytest.CaptureFixture[str]) -> None:
    """As other models are, but for one that is not known there: DDP takes it."""
    assert main(["estimate", "--model", "phi-2", "--gpus", "8", "--gpu", "a100-80gb", "--json"]) == 0
    estimated = json.loads(capsys.readouterr().out)
    assert estimated["plan"]["framework"] == "fsdp"
    (stage,) = estimated["stages"]
    assert sum(stage["breakdown"].values()) == stage["allocated_bytes"]
    assert stage["device_bytes"] > stage["reserved_bytes"] >= stage["allocated_bytes"] >= stage["requested_bytes"]
    line = error_of(capsys, "estimate", "--model", "bart-base", "--gpus", "8", "--framework", "fsdp")
    assert "framework = fsdp: must be single, ddp or deepspeed: it has buffers in bf16, which are in the" in line
    assert main(["estimate", "--model", "bart-base", "--gpus", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["framework"] == "ddp"


@pytest.mark.parametrize("framework", ["megatron", "device-map"])
def test_other_frameworks_are_refused(framework: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("estimate", "--model", "olmo-7b", "--framework", framework, "--gpus", "2")
    assert f"framework = {framework}: must be single, ddp, deepspeed or fsdp: under others" in error_of(capsys, *words)


def test_refusals_name_what_takes_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("estimate", "--model", "bart-base", "--framework", "fsdp", "--gpus", "2")
    assert "framework = fsdp: must be single, ddp or deepspeed: " in error_of(capsys, *words)


def test_other_settings_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = error_of(capsys, "estimate", "--model", "olmo-7b", "--dtype", "fp32")
    assert line.startswith("olmo-7b: ships learned in bf16 with flash attention, with --recompute full or without;")
    assert "; it is not known in fp32, flash attention: `memplan trace --learn --model olmo-7b --dtype" in line
    line = error_of(capsys, "estimate", "--model", "phi-2", "--layers", "2")
    assert line == "--layers: model.layers = 2: must be at least 5: other numbers of layers were not verified\n"
    line = error_of(capsys, "validate", "--model", "olmo-7b")
    assert "known from traces, which memplan estimate and suggest-partition take with framework single, most" in line


def test_other_releases_are_refused() -> None:
    plan = plan_of("olmo-7b")
    fit_of(plan.model_copy(update={"versions": {"transformers": "5.23", "torch": "2.13.0"}}))
    for library, version in (("transformers", "4.57.1"), ("transformers", "5.2"), ("torch", "2.7")):
        with pytest.raises(PlanError, match=rf"versions\.{library} = {version}: must be .*, whose code was traced"):
            fit_of(plan.model_copy(update={"versions": {library: version}}))


def test_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "olmo-7b"]) == 0
    assert "olmo-7b  6.89 B      32    4096     32  50304     2048  *" in capsys.readouterr().out
    assert main(["models", "olmo-7b", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["learned"], one["parameters"], one["family"]) == (True, 6_888_095_744, "olmo")
    assert main(["models", "llama-2-7b", "--json"]) == 0
    (other,) = json.loads(capsys.readouterr().out)
    assert not other["learned"]
    sizes = ("layers", "hidden", "heads", "kv_heads", "vocab", "positions_max", "published_parameters", "source")
    assert [one[name] for name in sizes[:6]] == [32, 4096, 32, 32, 50304, 2048]
    assert {*sizes} <= {*other}


@pytest.mark.parametrize(("seq", "told"), [("4096", True), ("2048", False)])
def test_scores_that_only_a_trace_keeps_are_told(seq: str, told: bool, tmp_path: Path) -> None:
    """From the window of 4,096 on, of eight heads of keys for 32 of queries, where a model has no recipe."""
    sizes = {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1003}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 16}
    config = {"model_type": "ministral", **sizes, **heads, "sliding_window": 4096, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    programs = programs_of(plan_of("olmo-7b"), Options())
    codes = [one.code for one in warnings(plan_of(str(tmp_path), seq=seq), programs)]
    assert ("masks-traced" in codes) == told
