"""Fits on disk: believed only if they are what was asked for, and never half there."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from memplan.layers.module import Parameter
from memplan.plan.errors import PlanError
from memplan.tape.events import Category
from memplan.trace import cache
from memplan.trace.fit import Born, Domain, Fit, Gone, Kind, Piece, Places, Polynomial

ROOT = Path(__file__).resolve().parents[2]
SETTINGS: dict[str, Any] = {"config": {"model_type": "made-up", "hidden_size": 64}, "dtype": "bf16", "layers": None}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    cache.versions.cache_clear()
    return tmp_path / "traces"


def fit(note: str = "") -> Fit:
    """One layer that makes a tensor of 4bs bytes and ends it in backward."""
    born = Born(0, Category.ACTIVATIONS, "aten.mul.Tensor", "float32", (1, 2))
    gone = Gone(0, Category.ACTIVATIONS, 0, False, True, 0)
    parameter = Parameter("weight", (64, 64), "bf16", True)
    kind = Kind(((born,), (gone,), (gone,), ()), (parameter,), (0,), ((256, "fp32"),))
    polynomials = ((0, 0, 0, 0, 4, 0), (0, 0, 0, 1, 0, 0), (0, 1, 0, 0, 0, 0))
    piece = Piece(
        Domain(2, None, 8, 4096, 8),
        tuple(map(Polynomial, polynomials)),  # type: ignore[arg-type]
        (kind,),
        (Places(0, ("layer.0", "layer.1")),),
        (Born(1, Category.INPUTS, "input_ids", "int64", ()),),
        0,
    )
    return Fit("2.13.0", "5.23.0", 2, (2, 3), (piece,), (note,) if note else ())


def same(one: Fit | None, other: Fit) -> bool:
    return one is not None and one.to_json() == other.to_json()


def test_stored_and_loaded(own_cache: Path) -> None:
    path = cache.store(SETTINGS, fit())
    assert path.parent == own_cache
    assert path.name.startswith("made-up-")
    found = cache.load(SETTINGS)
    assert same(found, fit())
    assert found is not None
    assert found.pieces[0].kinds == fit().pieces[0].kinds
    assert [one.name for one in own_cache.iterdir()] == [path.name]


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.folder() == tmp_path / "xdg" / "memplan" / "traces"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification: relative paths are ignored
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "memplan" / "traces"


@pytest.mark.parametrize("given", ["~nosuchuser", "~nosuchuser/x"])
def test_home_that_is_not_known(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, given)
    for act in (cache.folder, lambda: cache.load(SETTINGS), lambda: cache.store(SETTINGS, fit())):
        with pytest.raises(PlanError, match=f"^environment: MEMPLAN_CACHE = {given}: must be a directory: no home "):
            act()


@pytest.mark.parametrize("change", [{"dtype": "fp32"}, {"layers": 3}, {"config": {"model_type": "made-up"}}])
def test_other_settings_are_another_file(change: dict[str, Any]) -> None:
    cache.store(SETTINGS, fit())
    assert cache.load({**SETTINGS, **change}) is None
    cache.store({**SETTINGS, **change}, fit("other"))
    assert same(cache.load(SETTINGS), fit())


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda content: content[: len(content) // 2],
    "not compressed": lambda _: b"{}",
    "not JSON": lambda _: gzip.compress(b"hello"),
    "a list": lambda _: gzip.compress(b"[1, 2]"),
    "of another format": lambda content: changed(content, format=99),
    "of other settings": lambda content: changed(content, settings={**SETTINGS, "dtype": "fp16"}),
    "without a fit": lambda content: changed(content, fit={}),
    "with half a piece": lambda content: changed(content, fit={**fit().to_json(), "pieces": [{"domain": [1]}]}),
    "with one polynomial": lambda content: altered(content, polynomials=[[0, 0, 0, 0, 4, 0]]),
    "with another polynomial": lambda content: altered(content, polynomials=[[0, 0, 0, 0, 8, 0]] * 3),
    "with an empty row": lambda content: altered(content, row=[]),
    "without pieces": lambda content: changed(content, fit={**fit().to_json(), "pieces": []}),
    "without a checksum": lambda content: changed(content, sha256=None),
    "of another tracer": lambda content: changed(content, versions={**cache.versions()._asdict(), "tracer": "0"}),
    "of another torch": lambda content: changed(content, versions={**cache.versions()._asdict(), "torch": "1.0"}),
    "of no versions": lambda content: changed(content, versions={"python": "3"}),
    "deeply nested": lambda _: gzip.compress(b"[" * 100_000),
}


def changed(content: bytes, **fields: Any) -> bytes:
    return gzip.compress(json.dumps({**json.loads(gzip.decompress(content)), **fields}).encode())


def altered(content: bytes, **fields: Any) -> bytes:
    """With other ``fields`` of the one piece, and nothing else changed."""
    found = json.loads(gzip.decompress(content))["fit"]
    return changed(content, fit={**found, "pieces": [{**found["pieces"][0], **fields}]})


@pytest.mark.parametrize("how", BROKEN)
def test_what_is_not_a_fit_is_ignored_and_rewritten(how: str) -> None:
    path = cache.store(SETTINGS, fit())
    path.write_bytes(BROKEN[how](path.read_bytes()))
    assert cache.load(SETTINGS) is None
    named = {"of another tracer": "another memplan", "of another torch": "torch 1.0 and transformers "}
    assert cache.others(SETTINGS).startswith(named.get(how, "")), "of other versions alone"
    assert bool(cache.others(SETTINGS)) == (how in named)
    cache.store(SETTINGS, fit())
    assert same(cache.load(SETTINGS), fit())


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_a_flipped_byte_is_never_an_error(data: st.DataObject) -> None:
    path = cache.store(SETTINGS, fit())
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(content))
    found = cache.load(SETTINGS)
    assert found is None or same(found, fit()), "a change that the check sum does not see changes nothing"


def versioned(monkeypatch: pytest.MonkeyPatch, torch: str, transformers: str = "5.23.0", tracer: str = "t") -> None:
    monkeypatch.setattr(cache, "versions", lambda: cache.Versions(tracer, torch, transformers))


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a file of its own; without torch the newest of this tracer's is good enough."""
    for at, torch in enumerate(("2.12.0", "2.13.0")):
        versioned(monkeypatch, torch)
        os.utime(cache.store(SETTINGS, fit(torch)), (at, at))
    versioned(monkeypatch, "2.12.0")
    assert same(cache.load(SETTINGS), fit("2.12.0"))
    versioned(monkeypatch, "2.14.0")
    assert cache.load(SETTINGS) is None
    assert cache.others(SETTINGS).startswith("torch 2.1")
    versioned(monkeypatch, "")
    assert same(cache.load(SETTINGS), fit("2.13.0"))
    versioned(monkeypatch, "", tracer="u")
    assert cache.load(SETTINGS) is None


def test_directory_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One line, and nothing left behind. A file in the directory's place stands for one without permission, which
    does not stop root."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file"))
    with pytest.raises(PlanError, match=r"cannot be written: .*; MEMPLAN_CACHE names another directory$") as caught:
        cache.store(SETTINGS, fit())
    assert "\n" not in str(caught.value)
    assert cache.load(SETTINGS) is None
    assert cache.others(SETTINGS) == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_read_only_directory(own_cache: Path) -> None:
    cache.store(SETTINGS, fit())
    own_cache.chmod(0o500)
    try:
        with pytest.raises(PlanError, match="cannot be written: permission denied"):
            cache.store(SETTINGS, fit("again"))
        assert same(cache.load(SETTINGS), fit()), "what was there is still read"
    finally:
        own_cache.chmod(0o700)


WRITER = """
import sys
from tests.trace.test_cache import SETTINGS, cache, fit
for _ in range(int(sys.argv[2])):
    cache.store(SETTINGS, fit(sys.argv[1] * 20_000))
"""


def writer(letter: str, times: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WRITER, letter, str(times)], cwd=ROOT)


def test_two_writers_at_once(own_cache: Path) -> None:
    """A reader sees one or the other, whole, at any time."""
    whole = [fit(letter * 20_000).to_json() for letter in "ab"]
    writers = [writer(letter, 30) for letter in "ab"]
    seen = 0
    while any(one.poll() is None for one in writers):
        found = cache.load(SETTINGS)
        if found is not None:
            assert found.to_json() in whole
            seen += 1
    assert [one.returncode for one in writers] == [0, 0]
    assert seen
    assert len(list(own_cache.iterdir())) == 1


def test_killed_in_the_middle(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there stays; what the writer left is no fit, and goes after a while."""
    cache.store(SETTINGS, fit())
    one = writer("a", 10_000)
    path = cache.path_of(SETTINGS, cache.versions())
    first = path.stat().st_ino
    while path.stat().st_ino == first and one.poll() is None:
        pass
    one.kill()
    one.wait()
    assert same(cache.load(SETTINGS), fit("a" * 20_000))
    half = own_cache / ".half.tmp"
    half.write_bytes(path.read_bytes()[:100])
    assert same(cache.load(SETTINGS), fit("a" * 20_000))
    cache.store(SETTINGS, fit())
    assert half.exists(), "another writer may be at it"
    monkeypatch.setattr(cache, "ABANDONED", -1)
    cache.store(SETTINGS, fit())
    assert [one.name for one in own_cache.iterdir()] == [path.name]
