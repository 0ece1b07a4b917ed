"""Pages: what is on them, that names stay text, and that nothing is loaded from anywhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import memplan
from memplan.cli import main
from memplan.estimate import estimate, timelines
from memplan.plan.read import read_plan
from memplan.records.readings import Failure
from memplan.report.estimate import verdict
from memplan.report.html import markup, page
from memplan.report.html.estimate import estimate_page, suggestion_page
from memplan.report.html.markup import Markup, tag
from memplan.report.html.page import run_page, runs_page
from memplan.report.html.stages import MOST
from memplan.report.suggestion import Answer
from memplan.result import Estimate
from memplan.search.result import Suggestion
from memplan.tape.events import Category
from tests.records.made import TWO_STAGES, record_of
from tests.report.test_suggestion import answer

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\"'&"


class Read(HTMLParser):
    """A page, read: the text and the attributes of its elements, and whether they are closed in order."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(content.decode())
        self.close()
        assert not self.open

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        if name not in markup.VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, text: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(text)

    @property
    def said(self) -> str:
        return " ".join(text for name, texts in self.texts.items() if name not in ("script", "style") for text in texts)

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.texts["script"][0])
        return found

    def attributes(self, name: str) -> Iterator[str]:
        for _, given in self.elements:
            value = given.get(name)
            if value is not None:
                yield value


def paged(**flags: str) -> tuple[Estimate, Read, bytes]:
    found = estimate(read_plan(None, flags).plan)
    content = estimate_page(found, tuple(timelines(found)))
    return found, Read(content), content


def of_fullest(one: Suggestion) -> Estimate:
    return estimate(one.plan, stage=one.fullest)


LLAMA = {"model": "llama-3-8b", "layers": "8", "seq": "1024", "gbs": "8", "gpu": "h100-80gb", "gpus": "4", "pp": "4"}


def test_a_page_has_all_of_an_estimate() -> None:
    found, read, _ = paged(framework="megatron", **LLAMA)
    assert verdict(found).plain.partition(": ")[2] in read.said.replace("  ", " ")
    assert list(read.attributes("data-stage")) == [*"0123", *"0123"]  # buttons, and what is shown of each stage
    for assumption in found.assumptions:
        assert assumption in read.said
    for notice in found.warnings:
        assert notice.message in read.said
    assert {"requested", "allocated", "reserved", "device"} <= set(read.texts["dt"])
    assert "kv_heads" in read.texts["dt"]
    assert "ddp" not in read.texts["h3"]  # a section that megatron does not read


def test_charts_are_of_the_same_figures() -> None:
    found, read, _ = paged(framework="megatron", **LLAMA)
    for stage, drawn in zip(found.stages, read.data["stages"], strict=True):
        by: dict[int, int] = {}
        for category, size, *_ in drawn["contents"]:
            by[category] = by.get(category, 0) + size
        known = {at: size for at, size in enumerate(stage.breakdown) if size and at != Category.BLOCK_ROUNDING}
        assert by == known
        highest = max(sum(own) for own in zip(*drawn["by"], strict=True)) * read.data["unit"]
        assert 0.999 * stage.requested <= highest <= 1.001 * stage.requested + stage.breakdown[Category.WORKSPACES]
        assert {len(drawn[name]) for name in ("at", "tensors", "microbatch", "phases", "begins")} == {len(drawn["at"])}
        assert max(drawn["tensors"]) < len(read.data["tensors"])


def test_a_plan_that_does_not_fit_says_what_ends_it() -> None:
    found = memplan.estimate(model="gpt2-xl", gpu="v100-16gb", mbs=4, seq=1024, dtype="fp32")
    read = Read(found.to_html().encode())
    assert found.ways_out
    assert "Changes that help" in read.texts["h2"]
    for way in found.ways_out:
        assert way.what in read.said
    assert "CUDA out of memory. Tried to allocate" in read.texts["pre"][0]


def test_nothing_is_loaded_and_nothing_else_runs() -> None:
    _, read, content = paged(model="gpt2", framework="single", seq="128")
    names = {name for name, _ in read.elements}
    assert not names & {"link", "img", "iframe", "object", "embed", "base", "form"}
    assert not list(read.attributes("src")) + list(read.attributes("href"))
    scripts = [given for name, given in read.elements if name == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}, {}, {}]
    (policy,) = [value for value in read.attributes("content") if "default-src" in value]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert b"unsafe-inline" not in policy.partition("style-src")[0].encode()
    assert b"uPlot (v1.6.32)" in content


def test_names_stay_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "<script>alert(1)<" / "img onerror='x'>&amp;"
    place.mkdir(parents=True)
    shutil.copy(Path(__file__).parents[1] / "golden/configs/gpt2.json", place / "config.json")
    out = tmp_path / "<b>.html"
    words = ["--model", str(place), "--seq", "64", "--env", f"NCCL_{EVIL.partition(chr(27))[0]}=1"]
    assert main(["estimate", *words, "--html", str(out)]) == 0
    assert "<b>.html" in capsys.readouterr().out
    content = out.read_bytes()
    read = Read(content)
    assert "<script>alert(1)<" in read.said
    assert {name for name, _ in read.elements} <= KNOWN
    assert content.count(b"<script>alert") == 0
    assert not any(name.startswith("on") for _, given in read.elements for name in given)


KNOWN = frozenset(
    re.findall(
        r"\w+",
        "html head meta title style body header span button main h1 h2 h3 p b dl dt dd div section i u ul li table "
        "thead tbody tr th td details summary pre footer script",
    )
)


def test_texts_of_every_kind_are_escaped() -> None:
    escaped = tag("p", EVIL, title=EVIL, class_=None, hidden=False, open=True)
    assert escaped.startswith('<p title="&lt;/script&gt;')
    assert " open>" in escaped
    assert escaped.count("<") == 2
    assert "\x1b" not in escaped
    assert tag("p", Markup("<b>x</b>")) == "<p><b>x</b></p>"
    data = page.page("x", data={"name": EVIL})
    assert Read(data).data == {"name": EVIL}
    assert data.count(b"</script>") == 3


def test_a_search_opens_each_layout() -> None:
    found = answer("megatron")
    content = suggestion_page(found, of_fullest, lambda own: tuple(timelines(own)))
    read = Read(content)
    points = read.data["front"]["points"]
    layouts = {value for value in read.attributes("id") if value.startswith("layout-")}
    assert {f"layout-{point['layout']}" for point in points} == layouts
    assert len(layouts) >= len(found.found.front) > 1
    assert [point["kind"] for point in points].count("recommended") == 1
    assert {(one.requested, one.seconds) for one in found.found.front} <= {(p["bytes"], p["seconds"]) for p in points}
    assert "Why this one" in read.texts["h2"]
    assert "recommended" in read.said
    assert len(read.data["stages"]) == len(found.found.best[0].estimate.stages if found.found.best[0].estimate else ())


def test_a_search_without_a_layout_that_fits() -> None:
    found = answer("does not fit").found
    assert found.given is not None
    closest = replace(found, best=(), front=(), closest=found.given, given=None)
    read = Read(suggestion_page(Answer(closest), of_fullest, lambda own: tuple(timelines(own))))
    assert "Nothing fits" in read.said
    assert any(title.startswith("Single changes") for title in read.texts["h2"])
    assert [point["kind"] for point in read.data["front"]["points"]] == ["over"]
    assert "The closest layout" in read.texts["h2"]


def test_runs_are_measured_beside_estimated() -> None:
    failure = Failure(rank=1, kind="error", message=EVIL, lines=(EVIL,))
    records = [record_of(minute=1), record_of(TWO_STAGES, minute=2, apart=0.04, failures=(failure,))]
    records[1] = records[1].model_copy(update={"command": EVIL})
    for content in (*map(run_page, records), runs_page(records, [one.id for one in records])):
        read = Read(content)
        assert {name for name, _ in read.elements} <= KNOWN
        assert "Measured and estimated" in read.texts["h2"]
        widths = [float(width) for value in read.attributes("style") for width in re.findall(r"width:([\d.]+)%", value)]
        assert max(widths) == 100.0
    assert all(one.id[:6] in read.said for one in records)


def test_a_page_of_many_stages_stays_small() -> None:
    found = estimate(read_plan("llama-3-405b-1024gpu").plan)
    lines = tuple(timelines(found))
    content = estimate_page(replace(found, stages=found.stages * 4), lines * 4)
    assert len(content) < 2_000_000
    data = Read(content).data
    assert sum(len(stage["at"]) for stage in data["stages"]) <= MOST


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node to read the script with")
def test_the_script_is_javascript() -> None:
    script = Path(page.__file__).parent / "assets/page.js"
    done = subprocess.run(["node", "--check", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["estimate", "gpt2-xl-4gpu", "--html", "/no/such/place.html"], "/no/such/place.html: there is no folder"),
        (["estimate", "gpt2-xl-4gpu", "--html", "x.html", "--vary", "mbs=1,2"], "--html shows one plan"),
        (["estimate", "gpt2-xl-4gpu", "--overwrite"], "--overwrite: is for --csv, --html"),
        (["runs", "--html", "x.html", "--import", "y.json"], "--html shows runs"),
        (["suggest-partition", "gpt2-xl-4gpu", "--html", "a.html", "--write", "a.html"], "is the file of --write, too"),
    ],
)
def test_what_is_refused(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert line in capsys.readouterr().err


def test_a_file_is_replaced_only_with_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    out.write_text("mine")
    assert main(["estimate", "--model", "gpt2", "--html", str(out)]) == 2
    assert out.read_text() == "mine"
    assert main(["estimate", "--model", "gpt2", "--html", str(out), "--overwrite", "--json"]) == 0
    assert out.read_text().startswith("<!doctype html>")
    assert json.loads(capsys.readouterr().out)["schema"] == 1
