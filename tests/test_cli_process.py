"""``memplan`` as a real process: pipes that close, Ctrl-C, standard input, and how fast it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MEMPLAN = [sys.executable, "-m", "memplan.cli"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
ENVIRONMENT.pop("PYTHONUNBUFFERED", None)


def memplan(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MEMPLAN, *arguments], input=stdin, capture_output=True, text=True, env=ENVIRONMENT, timeout=60
    )


def test_python_cli_py_is_memplan() -> None:
    command = [sys.executable, str(ROOT / "cli.py"), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout[:8], done.stderr) == (0, "memplan ", "")


def test_wrong_standard_input_gives_its_line() -> None:
    done = memplan("estimate", "-", stdin="model: gpt2\nlayout:\n  tp: no\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "standard input:3: layout.tp = no: must be a whole number\n"


def test_standard_input_that_is_not_text_gives_its_line() -> None:
    done = subprocess.run(
        [*MEMPLAN, "estimate", "-"], input=b"\xff\xfe", capture_output=True, env=ENVIRONMENT, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == b"standard input:1: is not UTF-8 text (byte 0xff); save it as UTF-8\n"


def test_a_gigabyte_on_standard_input_is_refused_without_being_read() -> None:
    zeros = subprocess.Popen(
        ["head", "-c", "1000000000", "/dev/zero"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    done = subprocess.run(
        [*MEMPLAN, "estimate", "-"], stdin=zeros.stdout, capture_output=True, env=ENVIRONMENT, timeout=20
    )
    zeros.stdout.close()  # type: ignore[union-attr]
    zeros.wait()
    assert done.returncode == 2
    assert b"is larger than a plan can be (1 MiB)" in done.stderr


@pytest.mark.parametrize("arguments", [["models", "--json"], ["schema"], ["init"], ["estimate", "--help"]])
def test_a_closed_pipe_ends_quietly(arguments: list[str]) -> None:
    for reader in (["head", "-1"], ["true"]):
        first = subprocess.Popen(
            [*MEMPLAN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
        )
        subprocess.run(reader, stdin=first.stdout, stdout=subprocess.DEVNULL, timeout=60, check=True)
        first.stdout.close()  # type: ignore[union-attr]
        errors = first.stderr.read()  # type: ignore[union-attr]
        first.stderr.close()  # type: ignore[union-attr]
        assert (errors, first.wait(60)) == (b"", 0)


def heed_interrupts() -> None:
    """What a shell starts in the background ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("delay", [0.03, 0.1, 1.0])
def test_ctrl_c_ends_quietly_at_any_time(delay: float) -> None:
    process = subprocess.Popen(
        [*MEMPLAN, "estimate", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        preexec_fn=heed_interrupts,
    )
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    if errors and b"memplan" not in errors:
        pytest.skip("Python itself was still starting")
    # CPython ends itself with SIGINT where the interrupt fell into an exec(), as of a dataclass: 130 to a shell, too.
    assert (process.returncode in (130, -signal.SIGINT), out, errors) == (True, b"", b"")


def test_a_full_disk_is_said_to_be_so() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*MEMPLAN, "models"], stdout=full, stderr=subprocess.PIPE, env=ENVIRONMENT, timeout=60)
    assert (done.returncode, done.stderr) == (3, b"memplan: No space left on device\n")


def test_a_terminal_that_lacks_characters_gets_others() -> None:
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}
    for arguments in (["init"], ["models"], ["estimate", "--help"]):
        done = subprocess.run([*MEMPLAN, *arguments], capture_output=True, env=environment, timeout=60)
        assert (done.returncode, done.stderr) == (0, b"")


def test_a_standard_output_that_is_closed_is_no_matter() -> None:
    command = ["sh", "-c", '"$@" >&-', "sh", *MEMPLAN, "init"]
    done = subprocess.run(command, stderr=subprocess.PIPE, env=ENVIRONMENT, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_nothing_heavy_is_imported_to_estimate() -> None:
    code = (
        "import sys; from memplan.cli import main; main(['estimate', '--model', 'gpt2']);"
        "heavy = ('torch', 'numpy', 'transformers', 'hypothesis', 'yaml', 'hashlib');"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert done.stderr == "[]\n"


def test_what_is_put_off_is_there_once_it_is_asked_for() -> None:
    """pydantic compares secrets by a function of the standard library's, from a module that is imported then."""
    code = (
        "import sys, memplan.cli as cli; cli._leave_out_plugins(); import pydantic, secrets;"
        "before = 'hmac' in sys.modules; same = pydantic.SecretStr('a') == pydantic.SecretStr('a');"
        "from secrets import token_hex; print(before, same, len(token_hex(2)), sys.modules['secrets'].__file__ is None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert (done.stdout, done.stderr) == ("False True 4 False\n", "")


def test_a_start_makes_validators_of_the_sections_that_a_plan_has() -> None:
    code = (
        "from memplan.cli import main; main(['estimate', '--model', 'gpt2', '--mbs', '2', '-q']);"
        "from memplan.plan.plan import Batch, Fsdp, Megatron, ModelSpec;"
        "print([one.__name__ for one in (Batch, Fsdp, Megatron, ModelSpec) if one.__pydantic_complete__])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert done.stdout.endswith("\n['Batch']\n")
