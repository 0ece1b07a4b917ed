"""Pages in a real browser: nothing fails, nothing is asked of a network, and what can be clicked answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from memplan.cli import main
from memplan.estimate import estimate, timelines
from memplan.report.html.estimate import suggestion_page
from tests.browser import Page, browser, program
from tests.report.test_suggestion import answer

pytestmark = pytest.mark.skipif(program() is None, reason="there is no Chromium on this machine (apt: chromium)")

MEGATRON = {"model": "llama-3-8b", "layers": 8, "seq": 1024, "gbs": 8, "gpu": "h100", "gpus": 4, "pp": 4}
WIDTHS = (360, 768, 1280, 2400)


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture(scope="module")
def estimated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pages") / "estimate.html"
    words = [f"--{name}={value}" for name, value in MEGATRON.items()]
    assert main(["estimate", *words, "--framework=megatron", "--html", str(out), "-q"]) == 0
    return out


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pages") / "search.html"
    out.write_bytes(
        suggestion_page(
            answer("megatron"), lambda one: estimate(one.plan, stage=one.fullest), lambda own: tuple(timelines(own))
        )
    )
    return out


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_fits_its_screen(width: int, dark: bool, tab: Page, estimated: Path, searched: Path) -> None:
    for path in (estimated, searched):
        tab.errors.clear()
        tab.requests.clear()
        tab.open(path, width=width, dark=dark)
        assert tab.errors == []
        assert set(tab.requests) == {path.resolve().as_uri()}
        assert tab.run("document.documentElement.scrollWidth") <= width
        background = tab.run("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
        assert tab.run("document.querySelectorAll('#timeline canvas').length") == 1
        assert tab.run("document.querySelector('#timeline canvas').getBoundingClientRect().width") <= width
        assert tab.picture().startswith(b"\x89PNG")


def test_a_point_of_the_timeline_is_read(tab: Page, estimated: Path) -> None:
    tab.open(estimated)
    said = "document.querySelector('#reading').textContent"
    at_peak = tab.run(said)
    tab.hover("#timeline .u-over", across=0.05)
    early = tab.run(said)
    tab.hover("#timeline .u-over", across=0.6)
    later = tab.run(said)
    assert len({at_peak, early, later}) == 3
    assert "forward of micro-batch 0" in early
    assert any(f" in {place}" in later for place in ("layer.", "pipeline", "head"))
    assert "activations" in later
    assert "GiB" in later


def test_arrow_keys_read_it_too(tab: Page, estimated: Path) -> None:
    tab.open(estimated)
    tab.run("document.querySelector('#timeline').focus()")
    event = "Number(document.querySelector('#reading').dataset.event)"
    before = tab.run(event)
    tab.press("ArrowRight")
    after = tab.run(event)
    tab.press("ArrowLeft")
    assert after > before == tab.run(event)
    tab.press("Home")
    assert tab.run(event) < before


def test_another_stage_is_shown_when_it_is_clicked(tab: Page, estimated: Path) -> None:
    tab.open(estimated)
    pressed = "[...document.querySelectorAll('button.stage')].map((one) => one.getAttribute('aria-pressed'))"
    assert tab.run(pressed).count("true") == 1
    tab.click("button.stage[data-stage='3']")
    assert tab.run(pressed) == ["false", "false", "false", "true"]
    assert tab.run("document.querySelector('#iteration').textContent").startswith("Stage 3: ")
    assert tab.run("document.querySelector('#contents-of').textContent").startswith("Stage 3: ")
    shown = "[...document.querySelectorAll('.of-stage')].filter((one) => !one.hidden).map((one) => one.dataset.stage)"
    assert tab.run(shown) == ["3"]
    assert tab.run("document.querySelectorAll('#timeline canvas').length") == 1


def test_a_category_opens_into_tensors(tab: Page, estimated: Path) -> None:
    tab.open(estimated)
    closed = "document.querySelectorAll('#contents details:not([open])').length"
    before = tab.run(closed)
    tab.click("#contents details:not([open]) > summary", across=0.05)
    assert tab.run(closed) == before - 1
    assert tab.run("document.querySelectorAll('#contents details[open] tbody tr').length") > 3


def test_light_becomes_dark_with_a_click(tab: Page, estimated: Path) -> None:
    tab.open(estimated)
    ground = "getComputedStyle(document.body).backgroundColor"
    before, pixels = tab.run(ground), tab.picture()
    tab.click("#theme")
    assert tab.run(ground) != before
    assert tab.picture() != pixels
    tab.click("#theme")
    assert tab.run(ground) == before


def test_zooming_shows_less_and_a_double_click_all_again(tab: Page, estimated: Path) -> None:
    tab.open(estimated)
    drawn = "document.querySelector('#timeline canvas').toDataURL()"
    before = tab.run(drawn)
    (left, height), (right, _) = (tab.point("#timeline .u-over", across) for across in (0.3, 0.5))
    tab.mouse("mousePressed", left, height)
    tab.mouse("mouseMoved", right, height, buttons=1)
    tab.mouse("mouseReleased", right, height)
    assert tab.run(drawn) != before
    for count in (1, 2):
        tab.mouse("mousePressed", right, height, clickCount=count)
        tab.mouse("mouseReleased", right, height, clickCount=count)
    assert tab.run(drawn) == before


def test_a_point_of_the_front_opens_its_layout(tab: Page, searched: Path) -> None:
    tab.open(searched)
    assert tab.run("document.querySelectorAll('details.layout[open]').length") == 0
    tab.click("#front .u-over", across=0.5)
    assert tab.run("document.querySelectorAll('details.layout[open]').length") == 1
    assert tab.run("document.querySelector('details.layout[open] .stage .bar i').getBoundingClientRect().width") > 0
    assert tab.run("document.querySelector('#front-reading').textContent")
    tab.click("details.layout:not([open]) > summary", across=0.3)
    assert tab.run("document.querySelectorAll('details.layout[open]').length") == 2


def test_what_slips_in_as_markup_does_not_run(tab: Page, tmp_path: Path, estimated: Path) -> None:
    """Were a name not escaped, the page's policy would still keep its script from running."""
    harmed = tmp_path / "harmed.html"
    evil = (
        "<script>document.title = 'harmed'</script><img src='http://127.0.0.1:9/x' onerror=\"document.title='harmed'\">"
    )
    harmed.write_text(estimated.read_text(encoding="utf-8").replace("<main>", f"<main>{evil}", 1), encoding="utf-8")
    tab.open(harmed)
    assert tab.run("document.title") == "llama-3-8b: Fits"
    assert tab.blocked == ["csp"]
