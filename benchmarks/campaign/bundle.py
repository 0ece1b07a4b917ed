"""What a machine with a GPU and no network lacks, as wheels in one folder, and how they are put to use there.

Imports nothing but Python's own modules: it runs where nothing else is installed yet.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

PYTHON = "3.12"
"""Of the machine with the GPU."""
GLIBC = ("2_17", "2_24", "2_27", "2_28")
PLATFORMS = ("manylinux1_x86_64", "manylinux2014_x86_64", *(f"manylinux_{one}_x86_64" for one in GLIBC))
LARGEST = 60 << 20
"""Bytes of all wheels together."""
CUDA = "130"
"""The one CUDA, 13.0, whose library of bitsandbytes is kept."""

WHEELS = (
    "pydantic==2.14.3",
    "pydantic-core==2.50.4",
    "annotated-types==0.8.0",
    "typing-inspection==0.4.5",
    "typing-extensions==4.16.0",
    "typer==0.29.2",
    "annotated-doc==0.0.7",
    "shellingham==1.5.4",
    "rich==15.0.0",
    "markdown-it-py==4.3.0",
    "mdurl==0.1.2",
    "pygments==2.21.0",
    "nvidia-ml-py==13.615.71",
    "transformers==5.23.0",
    "peft==0.21.2",
    "megatron-core==0.16.1",
    "bitsandbytes==0.50.2",
)
"""What memplan and its tests need besides torch 2.11 or later, numpy, PyYAML, packaging, accelerate, safetensors,
tokenizers and huggingface-hub, which every machine with transformers has. Nothing here brings a torch of its own."""


def bundled(arguments: Sequence[str]) -> int:
    """``gpu.py bundle FOLDER``. Exit code 1: it is too large; 3: the package index has not what is wanted."""
    parser = argparse.ArgumentParser(prog="gpu.py bundle", description="downloads wheels that a GPU's machine lacks")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--python", default=PYTHON, metavar="VERSION", help=f"of that machine; {PYTHON} by default")
    given = parser.parse_args(arguments)
    folder: Path = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    if subprocess.run(command(folder, given.python), check=False).returncode:
        print("gpu.py: the package index has not all of these wheels", file=sys.stderr)
        return 3
    for wheel in folder.glob("bitsandbytes-*.whl"):
        strip(wheel, is_wanted)
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{len(list(folder.glob('*.whl')))} wheels, {size / 2**20:.1f} MiB, in {folder}")
    return 0 if size <= LARGEST else 1


def command(folder: Path, python: str) -> list[str]:
    """What downloads the wheels, whatever Python runs here."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    fixed = ["--quiet", "--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    return [sys.executable, "-m", "pip", "download", *fixed, *platforms, "--dest", str(folder), *WHEELS]


def is_wanted(name: str) -> bool:
    """Of bitsandbytes' files all but the libraries for other devices."""
    return not name.endswith(".so") or name.endswith((f"_cuda{CUDA}.so", "_cpu.so"))


def strip(wheel: Path, wanted: Callable[[str], bool]) -> None:
    """Leaves files out of a wheel."""
    smaller = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            if wanted(entry.filename):
                new.writestr(entry, old.read(entry), zipfile.ZIP_DEFLATED)
    smaller.replace(wheel)


def unpacked(bundle: Path, place: Path | None = None) -> Path:
    """A folder with what all wheels of ``bundle`` hold, for ``PYTHONPATH``; made once. ``FileNotFoundError`` where it
    has none."""
    wheels = sorted(bundle.glob("*.whl"))
    if not wheels:
        raise FileNotFoundError(f"{bundle} has no wheels: gpu.py bundle {bundle} downloads them")
    names = "\n".join(f"{wheel.name} {wheel.stat().st_size}" for wheel in wheels)
    digest = sha256(names.encode()).hexdigest()[:12]
    site = (place or Path(tempfile.gettempdir())) / f"memplan-site-{digest}"
    complete = site / ".complete"
    if not complete.exists():
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as opened:
                opened.extractall(site)
        complete.touch()
    return site
