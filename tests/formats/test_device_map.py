"""Plans as maps of modules to devices."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from memplan.cli import main
from memplan.formats.device_map import TARGET, device_map
from memplan.formats.exported import exported
from memplan.plan.errors import PlanError
from memplan.plan.library import examples
from memplan.plan.module_names import modules
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve

from .device_map_plans import plans, tiny
from .plans import round_trip


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(plans())
def test_what_is_exported_reads_back_as_the_plan(plan: Plan) -> None:
    round_trip(plan, TARGET)


def test_a_dtype_without_which_the_map_cannot_be_read_is_a_flag_beside_it() -> None:
    """Without it the plan is one in fp16, the dtype of a V100, in which gated delta nets need another kernel."""
    flags = {"model": "qwen3.5-9b", "framework": "device-map", "gpu": "v100-16gb", "gpus": "2", "layers": "4"}
    assert round_trip(read_plan(None, flags | {"dtype": "bf16"}).plan, TARGET).flags["dtype"] == "bf16"


@pytest.mark.parametrize("name", ["gpt2-xl-4gpu", "gpt2-xl-8gpu"])
def test_examples(name: str) -> None:
    assert name in examples()
    done = round_trip(read_plan(name).plan, TARGET)
    placed = json.loads(done.text)
    assert placed["transformer.wte"] == placed["transformer.wpe"] == placed["lm_head"] == 0
    assert placed["transformer.ln_f"] == max(placed.values())
    assert [name for name in placed if ".h." in name] == [f"transformer.h.{layer}" for layer in range(48)]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", sorted(modules()))
def test_transformers_models_have_these_modules_and_no_others(family: str, tied: bool) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("accelerate.utils.modeling")
    from memplan.trace.job import config_of_spec
    from memplan.trace.models import model_class

    if tied and family in ("gptj",):
        pytest.skip("GPT-J's head is its own")
    sizes = tiny(family, 5, tied_embeddings=tied or family == "gemma2")
    if family == "gpt":
        sizes = tiny("gpt2", 5, tied_embeddings=tied)
    plan = resolve(Plan.model_validate({"model": sizes, "framework": "device-map", "hardware": {"gpus": 3}}))
    written = config_of_spec(plan.model)
    config = transformers.AutoConfig.for_model(written.pop("model_type"), **{**written, "pad_token_id": 0})
    with torch.device("meta"):
        model = model_class(config)(config)
    placed = device_map(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of keys that are no modules
        buffers = dict(model.named_buffers())  # of a module that is not placed as a whole
        modeling.check_device_map(model, {name: device for name, device in placed.items() if name not in buffers})
    tensors = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    for name in tensors:
        assert any(f"{name}.".startswith(f"{module}.") for module in placed), name
    tied_names = {alias: name for name, alias in (getattr(model, "all_tied_weights_keys", None) or {}).items()}
    for pair in tied_names.items():
        first, second = ({device for module, device in placed.items() if one.startswith(module + ".")} for one in pair)
        assert first == second


def plan_of(content: str, folder: Path) -> Plan:
    path = folder / "map.json"
    path.write_text(content, encoding="utf-8")
    flags = {"model": "gpt2", "framework": "device-map", "device-map": str(path), "layers": "4"}
    return resolve(read_plan(None, flags).plan)


def test_maps_as_infer_auto_device_map_writes_them(tmp_path: Path) -> None:
    placed = {"transformer.wte": 0, "lm_head": "cuda:0", "transformer.wpe": 0, "transformer.drop": 0}
    placed |= {f"transformer.h.{layer}": layer // 2 for layer in (3, 1, 0, 2)} | {"transformer.ln_f": 1}
    assert plan_of(json.dumps(placed), tmp_path).device_map == {0: (1, 0), 1: (3, 2)}


@pytest.mark.parametrize(
    ("placed", "line"),
    [
        ({"": 0}, "device_map.: cannot be placed by itself; place embedding, layers, final norm and head"),
        ({"transformer.h": 0}, "device_map.transformer.h: cannot be placed by itself"),
        ({"transformer.h.0": "cpu"}, "device_map.transformer.h.0 = cpu: must be the number of a GPU"),
        ({"transformer.h.0": True}, "device_map.transformer.h.0 = true: must be the number of a GPU"),
        ({"lm_head": 1, "transformer.h.0": 0, "transformer.h.1": 1}, "lm_head = 1: must be 0, the first device"),
        ({"transformer.h.0": 0, "transformer.h.1": 1, "transformer.ln_f": 0}, "ln_f = 0: must be 1, the last device"),
        ({"transformer.wte": 0}, "device_map: places no layers"),
        ({"transformer.h.0": 0, "transformer.h.1": 0}, "device_map: misses layers 2, 3"),
    ],
)
def test_what_is_wrong_in_a_map_is_named(placed: dict[str, object], line: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        plan_of(json.dumps(placed), tmp_path)
    assert line in str(caught.value)


def test_plans_of_other_frameworks_are_refused() -> None:
    with pytest.raises(PlanError, match=r"^framework = single: must be device-map for --to device-map"):
        exported(read_plan("llama-3-8b").plan, TARGET)


def test_a_map_in_the_place_of_a_plan_says_where_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The flags that the refusal names read the map."""
    file = tmp_path / "map.json"
    assert main(["export", "gpt2-xl-4gpu", "--to", "device-map", "-o", str(file)]) == 0
    assert main(["estimate", str(file), "--model=gpt2-xl", "--gpu=v100-32gb"]) == 2
    said = capsys.readouterr().err
    flags = said.partition("modules: ")[2].partition(", with")[0]
    assert flags == f"--framework device-map --device-map {file}"
    assert main(["estimate", *flags.split(), "--model=gpt2-xl", "--gpu=v100-32gb", "-q"]) in (0, 1)
