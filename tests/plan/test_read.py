"""Reading plans: every source, every form, and the line that a wrong one gets."""

from __future__ import annotations

import io
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings, strategies as st

from memplan.plan.errors import PlanError
from memplan.plan.fields import plan_fields
from memplan.plan.plan import Plan
from memplan.plan.read import ReadPlan, read_plan

from .outcomes import error_of


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(text: str, **flags: str) -> Plan:
    return read_with_origins(text, **flags).plan


def read_with_origins(text: str, **flags: str) -> ReadPlan:
    Path("plan.yaml").write_text(text)
    return read_plan("plan.yaml", {name.replace("_", "-"): value for name, value in flags.items()})


def refusal(text: str | None, **flags: str) -> str:
    if text is not None:
        return error_of(lambda: read(text, **flags))
    return error_of(lambda: read_plan(None, {name.replace("_", "-"): value for name, value in flags.items()}))


def test_a_plan_is_read_with_the_line_of_every_field() -> None:
    found = read_with_origins("model: gpt2\nlayout:\n  tp: 4\nbatch: {seq: 512}\n", pp="2")
    assert (found.plan.model.name, found.plan.layout.tp, found.plan.layout.pp, found.plan.batch.seq) == (
        "gpt2",
        4,
        2,
        512,
    )
    assert str(found.origins["layout.tp"]) == "plan.yaml:3"
    assert str(found.origins["batch.seq"]) == "plan.yaml:4"
    assert str(found.origins["layout.pp"]) == "--pp"


def test_sections_have_shorthands() -> None:
    plan = read("model: gpt2\noptimizer: adam8bit\nrecompute: full\nloss: plain\nprecision: fp16\nlayout:\n")
    assert (plan.optimizer.name, plan.recompute.mode, plan.loss.kind, plan.precision.dtype) == (
        *("adam8bit", "full", "plain", "fp16"),
    )


def test_text_that_looks_like_a_number_is_text_where_text_is_wanted() -> None:
    plan = read("model: gpt2\ncode: 2020\nheadroom: 5\nenvironment: {A: 1, B: true, C: 010}\n")
    assert (plan.code, plan.headroom) == ("2020", "5")
    assert plan.environment == {"A": "1", "B": "true", "C": "010"}


def test_lists_may_be_written_with_commas_and_ranges() -> None:
    plan = read(
        "model: gpt2\npipeline: {partition: '0,4,12'}\nloss:\n  cutoffs: 10,20\ndevice_map: "
        "{0: 0-2, 1: [3, 5-6], 2: '4, 7'}\n"
    )
    assert plan.pipeline.partition == (0, 4, 12)
    assert plan.loss.cutoffs == (10, 20)
    assert plan.device_map == {0: (0, 1, 2), 1: (3, 5, 6), 2: (4, 7)}


def test_sizes_have_units() -> None:
    assert read("model: gpt2\nhardware: {capacity: 16GiB}\n").hardware.capacity == 16 << 30
    assert read("model: gpt2\n", capacity="85899345920").hardware.capacity == 80 << 30


def test_a_model_is_a_base_with_changes() -> None:
    plan = read("model: {base: bigscience-104b-250k, layers: 62}\n")
    assert (plan.model.name, plan.model.layers, plan.model.hidden) == ("bigscience-104b-250k", 62, 11600)
    assert plan.model.published_parameters is None
    assert read("model: gpt2\n", layers="3").model.layers == 3


def test_sizes_that_follow_from_others_follow() -> None:
    model = read("model: {base: gpt2, hidden: 1024, heads: 16}\n").model
    assert (model.head_dim, model.kv_heads, model.ffn) == (64, 16, 4096)
    model = read("model: {base: llama-3-8b, hidden: 2048}\n").model
    assert (model.head_dim, model.kv_heads, model.ffn) == (64, 8, 14336)
    assert "heads must divide hidden (1000 / 12)" in refusal("model: {base: gpt2, hidden: 1000}\n")


def test_a_flag_that_names_a_model_replaces_the_plan_s_model_and_its_changes() -> None:
    assert read("model: {base: gpt2, layers: 3}\n", model="gpt2-xl").model.layers == 48
    assert read("model: {base: gpt2, layers: 3}\n", model="gpt2-xl", layers="5").model.layers == 5


def test_a_model_may_be_written_out_or_named_by_its_path() -> None:
    spec = """
      name: mine
      family: gpt2
      layers: 2
      hidden: 64
      heads: 4
      vocab: 100
      positions_max: 32
      norm: layernorm
      positions: learned
      activation: gelu
      embedding_dropout: 0
      attention_dropout: 0
      hidden_dropout: 0
    """
    written_out = read(f"model:{spec}").model
    assert (written_out.ffn, written_out.head_dim, written_out.kv_heads) == (256, 16, 4)
    Path("specs").mkdir()
    Path("specs/mine.yaml").write_text("\n".join(line.strip() for line in spec.splitlines()))
    assert read("model: specs/mine.yaml\n").model == written_out
    assert read_plan(None, {"model": "specs/mine.yaml"}).plan.model == written_out
    Path("elsewhere").mkdir()
    Path("elsewhere/plan.yaml").write_text("model: ../specs/mine.yaml\n")
    assert read_plan("elsewhere/plan.yaml").plan.model == written_out
    Path("extending.yaml").write_text("extends: elsewhere/plan.yaml\nbatch: {seq: 16}\n")
    assert read_plan("extending.yaml").plan.model == written_out


def test_one_plan_may_extend_another() -> None:
    Path("base.yaml").write_text(
        "model: {base: gpt2, layers: 3}\nlayout: {tp: 2, pp: 4}\noptimizer: adam\ndevice_map: {0: 1}\n"
    )
    plan = read("extends: base.yaml\nlayout: {pp: 8}\nmodel: {hidden: 960}\ndevice_map: {1: 2}\n")
    assert (plan.layout.tp, plan.layout.pp, plan.optimizer.name) == (2, 8, "adam")
    assert (plan.model.layers, plan.model.hidden, plan.device_map) == (3, 960, {1: (2,)})
    assert read("extends: llama-3-8b\n").model.name == "llama-3-8b"
    assert "plan.yaml:1: extends = plan.yaml: makes a chain" in refusal("extends: plan.yaml\n")
    assert refusal("extends: lama-3-8b\n") == (
        "plan.yaml:1: extends = lama-3-8b: no such file; did you mean llama-3-8b?"
    )


def test_a_json_plan_is_read_as_well() -> None:
    Path("plan.json").write_text('{\n\t"$schema": "x",\n\t"model": "gpt2",\n\t"layout": {"tp": -1}\n}')
    with pytest.raises(PlanError, match=r"^plan.json:4: layout.tp = -1: must be at least 1$"):
        read_plan("plan.json")


def test_standard_input_is_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"model: gpt2\nlayout: {tp: 0}\n")))
    with pytest.raises(PlanError, match=r"^standard input:2: layout.tp = 0: must be at least 1$"):
        read_plan("-")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "plan.yaml: is empty"),
        ("- 1\n", "plan.yaml:1: a plan is a mapping of fields, such as `model: gpt2-xl`"),
        ("layout: {tp: 1}\n", "plan.yaml:1: model: is missing: name one"),
        ("model: gpt2-xll\n", "plan.yaml:1: model = gpt2-xll: is neither a built-in model"),
        ("model: [gpt2]\n", "plan.yaml:1: model = [gpt2]: must be the name of a model spec"),
        ("model: nowhere/config.json\n", "plan.yaml:1: model = nowhere/config.json: no such file"),
        ("model: {base: gpt2, hiden: 1}\n", "plan.yaml:1: model.hiden: is not a field; did you mean hidden?"),
        ("model: {name: x}\n", "plan.yaml:1: model.family: is missing: code of the model: "),
        ("model: gpt2\nlayuot: {tp: 1}\n", "plan.yaml:2: layuot: is not a field"),
        ("model: gpt2\nbf16: true\n", "plan.yaml:2: bf16 = true: is not a field; write precision: {dtype: bf16}"),
        ("model: gpt2\nlayout: {tp: 2}\ntp: 1\n", "plan.yaml:3: tp = 1: is the same field as layout.tp, which is 2"),
        ("model: gpt2\nlayout:\n  tpp: 1\n", "plan.yaml:3: layout.tpp: is not a field; the fields are tp, pp, dp"),
        ("model: gpt2\nlayout: 8\n", "plan.yaml:2: layout = 8: must be a mapping of tp, pp, dp"),
        ("model: gpt2\nlayout: {tp: -4}\n", "plan.yaml:2: layout.tp = -4: must be at least 1"),
        ("model: gpt2\nlayout: {tp: 8.0}\n", "plan.yaml:2: layout.tp = 8.0: must be a whole number; write 8"),
        (
            "model: gpt2\nlayout: {tp: '8'}\n",
            "plan.yaml:2: layout.tp = 8: must be a whole number; write 8 without quotes",
        ),
        (
            "model: gpt2\nlayout: {tp: 010}\n",
            "plan.yaml:2: layout.tp = 010: must be a whole number; write 10 (a leading",
        ),
        ("model: gpt2\nlayout: {tp: 1_0}\n", "plan.yaml:2: layout.tp = 1_0: must be a whole number; write 10"),
        ("model: gpt2\nlayout: {tp: 1:30}\n", "plan.yaml:2: layout.tp = 1:30: must be a whole number"),
        ("model: gpt2\nlayout: {tp: true}\n", "plan.yaml:2: layout.tp = true: must be a whole number"),
        ("model: gpt2\nlayout: {tp: null}\n", "plan.yaml:2: layout.tp = null: must be a whole number"),
        ("model: gpt2\nlayout: {tp: 1e3}\n", "plan.yaml:2: layout.tp = 1000.0: must be a whole number; write 1000"),
        (
            "model: gpt2\nlayout: {tp: 99999999999999999999}\n",
            "plan.yaml:2: layout.tp = 99999999999999999999: must be at most",
        ),
        (f"model: gpt2\nlayout: {{tp: {'9' * 300}}}\n", "plan.yaml:2: layout.tp = a number of 300 digits"),
        (
            "model: gpt2\nlayout: {sequence_parallel: no}\n",
            "plan.yaml:2: layout.sequence_parallel = no: must be true or false",
        ),
        ("model: gpt2\nprecision: fp17\n", "plan.yaml:2: precision.dtype = fp17: must be one of fp32, fp16, bf16"),
        ("model: gpt2\nloss: {div_value: x}\n", "plan.yaml:2: loss.div_value = x: must be a number"),
        ("model: gpt2\nloss: {div_value: 0.5}\n", "plan.yaml:2: loss.div_value = 0.5: must be at least 1"),
        ("model: {base: gpt2, hidden_dropout: 1}\n", "plan.yaml:1: model.hidden_dropout = 1: must be less than 1"),
        ("model: gpt2\ndevice_map: {a: 1}\n", "plan.yaml:2: device_map.a"),
        ("model: gpt2\ndevice_map: {0: 5-3}\n", "plan.yaml:2: device_map.0.0 = 5-3: must be a whole number"),
        ("model: gpt2\ndevice_map: {0: 0-999999}\n", "plan.yaml:2: device_map.0"),
        ("model: gpt2\npipeline: {partition: [0, x]}\n", "plan.yaml:2: pipeline.partition = [0, x]: must be"),
        ("model: gpt2\nenvironment: {A: [1]}\n", "plan.yaml:2: environment.A = [1]: must be text"),
        ("model: gpt2\nheadroom: [1]\n", "plan.yaml:2: headroom = [1]: must be text"),
        ("model: gpt2\nmodel: gpt2\n", "plan.yaml:2: gives model twice"),
    ],
)
def test_a_wrong_plan_gets_one_line(text: str, line: str) -> None:
    found = refusal(text)
    assert found.startswith(line)
    assert len(found.splitlines()) == 1


def test_the_fields_that_there_are_stand_once() -> None:
    found = refusal("model: gpt2\nzzz: 1\nqqq: 2\n")
    assert found.count("the fields are") == 1
    assert found.endswith("plan.yaml:3: qqq: is not a field")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({}, "command line: model: is missing: name one (`memplan models` lists them), as --model gpt2-xl"),
        ({"model": "lama-3-8b"}, "--model: model = lama-3-8b: is neither a built-in model"),
        (
            {"model": "deepseek-v2-lite-16b"},
            "--model: model = deepseek-v2-lite-16b: is not a built-in model; the built-in one of that size is deepseek",
        ),
        ({"model": "deepseek-v3-16b"}, "--model: model = deepseek-v3-16b: is neither a built-in model"),
        (
            {"model": "qwen3-a3b"},
            "--model: model = qwen3-a3b: is no built-in model; of that size are qwen3-30b-a3b, qwen3-30b-a3b-2507",
        ),
        ({"model": "gpt2", "tp": "x"}, "--tp: layout.tp = x: must be a whole number"),
        ({"model": "gpt2", "dtype": "fp7"}, "--dtype: precision.dtype = fp7: must be one of"),
        ({"model": "gpt2", "dtype": "fp8"}, "--dtype: precision.dtype = fp8: is for matrix products of linear layers"),
        ({"model": "gpt2", "env": "A"}, "--env: environment = A: must be NAME=VALUE"),
        ({"model": "gpt2", "device_map": "{0: x}"}, "--device-map: device_map.0.0 = x: must be a whole number"),
        ({"model": "gpt2", "device_map": "map.yaml"}, "map.yaml: device_map: no such file"),
        ({"model": "gpt2", "partition": ""}, "--partition: pipeline.partition = null: must be a method"),
    ],
)
def test_a_wrong_flag_gets_one_line(flags: dict[str, str], line: str) -> None:
    assert refusal(None, **flags).startswith(line)


@pytest.mark.parametrize("name", ["gemma-4-e4b", "google/gemma-4-E2B-it", "google/gemma-3n-E4B-it"])
def test_what_is_known_and_not_modelled_says_what_of_it(name: str) -> None:
    """Not that it reads images, whose text part would be planned; and no model that uses 4 billion parameters for a
    token is of its size."""
    found = refusal(None, model=name)
    assert "memplan has no recipe for its layers that share keys and values, each with an embedding" in found
    assert "built in" not in found


def test_what_is_no_file_is_said_to_be_none() -> None:
    for source, line in (
        ("nothere.yaml", "nothere.yaml: no such file"),
        (".", ".: is a directory; name a file in it"),
        ("/dev/zero", "/dev/zero: is not a regular file"),
        ("~nobody-of-that-name/plan.yaml", "~nobody-of-that-name/plan.yaml: no such file"),
        ("nul\0byte.yaml", "embedded null "),
        ("x" * 5000 + "/", "cannot be read: file name too long"),
        ("lama-3-8b", "plan = lama-3-8b: is neither a file nor a built-in example"),
    ):
        with pytest.raises(PlanError) as caught:
            read_plan(source)
        assert line in str(caught.value)


def test_a_model_is_a_plan_that_says_no_more() -> None:
    """A name, a repository of the Hub that holds the same shape, a folder, a configuration, a spec."""
    assert read_plan("gpt2-xl").plan.model.name == "gpt2-xl"
    assert read_plan("meta-llama/Llama-3.1-8B").plan.model.name == "llama-3.1-8b"
    Path("m").mkdir()
    Path("m/config.json").write_text('{"model_type": "llama"}')
    Path("spec.yaml").write_text("name: x\nfamily: gpt2\n")
    for source, line in (("m", "num_hidden_layers"), ("m/config.json", "num_hidden_layers"), ("spec.yaml", "layers")):
        assert f"{line}: is missing" in error_of(lambda source=source: read_plan(source))  # type: ignore[misc]
    assert "Foo: is no file, no built-in model" in error_of(lambda: read_plan("Qwen/Foo"))


def test_text_that_is_not_utf_8_is_refused_with_its_line() -> None:
    Path("latin.yaml").write_bytes("model: gpt2\nheadroom: 5é\n".encode("latin-1"))
    with pytest.raises(PlanError, match=r"^latin.yaml:2: is not UTF-8 text \(byte 0xe9\); save it as UTF-8$"):
        read_plan("latin.yaml")
    Path("utf16.yaml").write_text("model: gpt2\n", encoding="utf-16")
    with pytest.raises(PlanError, match=r"utf16.yaml:1: is not UTF-8"):
        read_plan("utf16.yaml")
    Path("bom.yaml").write_text("model: gpt2\n", encoding="utf-8-sig")
    assert read_plan("bom.yaml").plan.model.name == "gpt2"


def test_a_file_of_a_gigabyte_is_refused_at_once() -> None:
    with Path("huge.yaml").open("wb") as file:
        os.truncate(file.fileno(), 1 << 30)
    start = time.process_time()
    with pytest.raises(PlanError, match=r"^huge.yaml: is larger than a plan can be \(1 MiB\)"):
        read_plan("huge.yaml")
    assert time.process_time() - start < 0.5


def test_a_file_that_may_not_be_read_is_said_to_be_so() -> None:
    Path("secret.yaml").write_text("model: gpt2\n")
    Path("secret.yaml").chmod(0)
    if os.access("secret.yaml", os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(PlanError, match=r"^secret.yaml: cannot be read: permission denied$"):
        read_plan("secret.yaml")


@pytest.mark.parametrize("values", [{"model": {".": 1}}, {"a.b": 1}, {".": 1}, {"layout": {".tp": 1}}, {"": 1}])
def test_names_with_dots(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"model": "gpt2", **values}), encoding="utf-8")
    with pytest.raises(PlanError, match="is not a field"):
        read_plan(str(tmp_path / "plan.json"))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3)
)
FIELDS = sorted(plan_fields())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
def test_any_value_anywhere_gives_a_plan_or_one_line(values: dict[str, Any]) -> None:
    plan: dict[str, Any] = {"model": "gpt2"}
    for path, value in values.items():
        section, _, name = path.rpartition(".")
        if not section:
            plan[name] = value
        elif isinstance(plan.setdefault(section, {"base": "gpt2"} if section == "model" else {}), dict):
            plan[section][name] = value
    Path("any.yaml").write_text(yaml.safe_dump(plan, allow_unicode=True), encoding="utf-8")
    assert len(error_of(lambda: read_plan("any.yaml")).splitlines()) <= 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.text(max_size=200) | st.text("amodel: gpt2\nlayout{}[]-", max_size=100))
def test_any_text_gives_a_plan_or_one_line(text: str) -> None:
    Path("any.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    assert len(error_of(lambda: read_plan("any.yaml")).splitlines()) <= 1


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("FSDP1", "that is fsdp"),
        ("torchtitan", "--fsdp-code torchtitan"),
        ("zero3", "that is deepspeed with --zero 3"),
        ("huggingface", "--trainer transformers"),
        ("accelerate", "it launches others: fsdp, deepspeed or ddp"),
        ("ddpp", "did you mean ddp?"),
    ],
)
def test_names_of_other_tools_are_answered_with_what_they_are_here(name: str, hint: str) -> None:
    with pytest.raises(PlanError, match=re.escape(hint)):
        read_plan(None, {"model": "gpt2", "framework": name})
