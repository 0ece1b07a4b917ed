"""The wheel and the sdist: what is inside, and that it installs and answers in an environment without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from memplan import __version__

TOP = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(find_spec("hatchling") is None, reason="needs hatchling (pip install 'memplan[dev]')")


def built(source: Path, into: Path, *targets: str) -> list[Path]:
    run(sys.executable, "-m", "hatchling", "build", "-d", str(into), *(f"-t{target}" for target in targets), cwd=source)
    return sorted(into.iterdir())


def run(*command: str, cwd: Path, env: dict[str, str] | None = None, code: int = 0) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, encoding="utf-8", timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it as pip does."""
    folder = tmp_path_factory.mktemp("package")
    (sdist,) = built(TOP, folder / "sdist", "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (wheel,) = built(folder / f"memplan-{__version__}", folder / "wheel", "wheel")
    return sdist, wheel


def test_the_wheel_has_every_file_of_the_package(distributions: tuple[Path, Path]) -> None:
    """Sources, examples, the schema, parts of the page, tables of figures; and the model specs, which lie beside it."""
    files = [path for path in (TOP / "memplan").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {path.relative_to(TOP).as_posix() for path in files}
    expected |= {f"memplan/model_specs/{path.name}" for path in (TOP / "model_specs").glob("*.yaml")}
    with zipfile.ZipFile(distributions[1]) as wheel:
        inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert expected <= inside
    assert {Path(name).suffix for name in expected} >= {".py", ".yaml", ".json", ".js", ".css"}
    assert not [name for name in inside if not name.startswith("memplan/")]


def test_the_sdist_has_tests_and_documents(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[0]) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert inside >= {
        "pyproject.toml",
        "mkdocs.yml",
        "CITATION.cff",
        "tests/test_package.py",
        "docs/index.md",
        "Makefile",
    }


def test_it_installs_and_answers_without_the_checkout(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "empty"), cwd=tmp_path)
    python = tmp_path / "empty/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install"]
    run(*pip, "--no-deps", "--no-index", "--quiet", str(distributions[1]), cwd=tmp_path)
    # The libraries that memplan needs are this environment's; an editable memplan in it is no folder on the path.
    libraries = Path(typer.__file__).parent.parent
    env = {"PATH": os.defpath, "PYTHONPATH": str(libraries), "MEMPLAN_DATA": str(tmp_path / "records")}
    where = run(str(python), "-c", "import memplan; print(memplan.__file__)", cwd=tmp_path, env=env)
    assert where.startswith(str(tmp_path / "empty"))
    memplan = str(tmp_path / "empty/bin/memplan")
    answer = run(memplan, "estimate", "gpt2-xl-4gpu", "-q", "--html", "page.html", cwd=tmp_path, env=env, code=1)
    assert answer.startswith("Does not fit: device 1 needs")
    assert "uPlot" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "llama-3-405b" in run(memplan, "models", cwd=tmp_path, env=env)
    assert run(memplan, "schema", cwd=tmp_path, env=env) == (TOP / "memplan/plan.schema.json").read_text(
        encoding="utf-8"
    )
