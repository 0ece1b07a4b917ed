"""The campaign on a GPU, rehearsed without one: its cases are plans that memplan takes, and whatever a case does, the
next one runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.campaign import bundle, cases, causes, journal, machine, page, running, summary
from benchmarks.campaign.cases import Case
from memplan.estimate import estimate
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.validate import devices as validate_devices
from memplan.validate.devices import Device
from memplan.validate.native import own_code, planned
from tests.records.made import TWO_STAGES, record_of

ROOT = Path(__file__).resolve().parents[2]
OURS = ("emulate", "with", "stage", "device")
"""Flags of the command, not of a plan."""
REFUSED = (("llama-3-8b-offload", "cpu"),)
"""A CPU has nothing to offload to."""
BOOLEAN = ("autocast", "fsdp-offload")
MEMORY = 139 << 30
"""Bytes of an H200 that a process gets."""
LONGEST = 28 * 60
"""Seconds of a borrowed GPU."""
ALL = {case.name: case for case in cases.cases()}
VALIDATED = {name: case for name, case in ALL.items() if case.kind == "validate"}


def flags_of(words: tuple[str, ...]) -> tuple[dict[str, str], str]:
    """Of a plan, and whose code runs it."""
    flags, code, at = dict[str, str](), "torch", 0
    while at < len(words):
        name, at = words[at].removeprefix("--"), at + 1
        if name.startswith("no-"):
            flags[name.removeprefix("no-")] = "false"
        elif name in ("emulate", *BOOLEAN):
            flags |= {} if name in OURS else {name: "true"}
        else:
            code = words[at] if name == "with" else code
            flags |= {} if name in OURS else {name: words[at]}
            at += 1
    return flags, code


# -- cases --------------------------------------------------------------------------------------------------


def test_cases_fit_half_an_hour_and_the_first_commands_have_what_is_worth_most() -> None:
    assert len(ALL) == len(cases.cases())
    assert sum(case.seconds for case in ALL.values()) < LONGEST
    names = list(ALL)
    assert names[0] == "allocator"
    assert sum(ALL[name].seconds for name in names[: names.index("fsdp-64") + 1]) < 9 * 60


@pytest.mark.parametrize(
    ("name", "device"),
    [(name, device) for name in VALIDATED for device in ("cuda", "cpu") if (name, device) not in REFUSED],
)
def test_every_validation_is_a_plan_that_runs_and_fits(name: str, device: str) -> None:
    """On the H200, in the PyTorch that is there; and small on a CPU."""
    words = VALIDATED[name].command if device == "cuda" else VALIDATED[name].small
    assert words is not None
    flags, code = flags_of(words)
    hardware = {"gpu": "h200", "torch": "2.11"} if device == "cuda" else {}
    plan = resolve(read_plan(None, {**flags, **hardware}).plan)
    found = own_code(code).planned(plan)  # type: ignore[arg-type]
    found.check_device(device)
    if device == "cuda":
        assert max(stage.reserved for stage in estimate(found.runs).stages) < MEMORY


@pytest.mark.parametrize(("name", "device"), REFUSED)
def test_what_is_refused_is_refused_in_one_line(name: str, device: str) -> None:
    flags, code = flags_of(VALIDATED[name].small or ())
    with pytest.raises(PlanError, match=r"must be false with --device cpu: its tensors are all on one device"):
        planned(code, resolve(read_plan(None, flags).plan), device)  # type: ignore[arg-type]


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--list"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == list(ALL)


def test_probes_are_modules() -> None:
    for case in ALL.values():
        if case.kind == "probe":
            assert (ROOT / "benchmarks" / "campaign" / f"{case.command[0]}.py").exists()


# -- processes ----------------------------------------------------------------------------------------------

ANSWER = '{"readings": [{"name": "allocated", "unit": "bytes", "measured": 3, "estimated": 4}], "note": ""}'
PROGRAMS = {
    "good": f"print('{ANSWER}')",
    "raises": "raise ValueError('no such kernel')",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "garbage": "print('not JSON')",
    "nothing": 'print(\'{"readings": [], "note": ""}\')',
    "wrong plan": "import sys; print('--lora-rank: refused', file=sys.stderr); sys.exit(2)",
    "in use": "import sys; print('GPU 0 is in use', file=sys.stderr); sys.exit(3)",
    "hangs": "import time; time.sleep(60)",
}
STATUS = {
    "good": "measured",
    "raises": "failed",
    "killed": "failed",
    "garbage": "failed",
    "nothing": "failed",
    "wrong plan": "refused",
    "in use": "lacking",
    "hangs": "failed",
}


def case_of(name: str, seconds: float = 1.0) -> Case:
    return Case(name, "", seconds, "probe", ("x",), ("x",))


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases are the programs above."""
    monkeypatch.setattr(running, "command_of", lambda case, device: [sys.executable, "-c", PROGRAMS[case.name]])
    monkeypatch.setattr(running, "GRACE", 0.2)
    monkeypatch.setattr(Case, "limit", property(lambda case: 1.0 if case.name == "hangs" else 30.0))


def way(tmp_path: Path, minutes: float = 5.0, says: Callable[[str], None] = lambda text: None) -> running.Way:
    deadline = time.monotonic() + 60 * minutes
    return running.Way("cpu", tmp_path / "out.jsonl", deadline, tmp_path, lambda: False, says)


@pytest.mark.usefixtures("made_up")
def test_whatever_a_case_does_the_next_one_runs(tmp_path: Path) -> None:
    running.campaign([case_of(name) for name in PROGRAMS], way(tmp_path))
    found = journal.last_of_each(journal.read([tmp_path / "out.jsonl"]))
    assert {name: line["status"] for name, line in found.items()} == STATUS
    assert found["raises"]["error"] == "ValueError: no such kernel"
    assert found["wrong plan"]["error"] == "--lora-rank: refused"
    assert found["hangs"]["error"] == "ended after 1 s"
    assert journal.done(found.values()) == {name for name, status in STATUS.items() if status != "lacking"}


@pytest.mark.usefixtures("made_up")
def test_a_campaign_ends_in_time(tmp_path: Path) -> None:
    """What should take longer than is left is not begun, and what was begun is cut short, and not done."""
    said: list[str] = []
    minutes = (running.CLOSING + 0.6) / 60
    running.campaign([case_of("good", 100.0), case_of("hangs", 0.1)], way(tmp_path, minutes, said.append))
    (line,) = journal.read([tmp_path / "out.jsonl"])
    assert (line["case"], line["status"]) == ("hangs", "unfinished")
    assert journal.done([line]) == set()
    assert "good" in said[0]
    assert "not begun: it should take 100 s" in said[0]


@pytest.mark.usefixtures("made_up")
def test_the_next_case_waits_for_the_device(tmp_path: Path) -> None:
    answers = [True, True, False]
    one = running.Way("cuda", tmp_path / "out.jsonl", float("inf"), tmp_path, lambda: answers.pop(0), lambda text: None)
    running.campaign([case_of("good")], one)
    assert answers == []


def test_children_of_a_case_end_with_it(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    program = f"import subprocess; p = subprocess.Popen(['sleep', '60']); open({str(place)!r}, 'w').write(str(p.pid))"
    running._ended([sys.executable, "-c", program], 30.0, tmp_path / "log")
    deadline = time.monotonic() + 5
    while _runs(int(place.read_text())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(int(place.read_text()))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# -- the command --------------------------------------------------------------------------------------------


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "stops", lambda: None)
    names = "name torch cuda driver memplan began"
    known = {name: name for name in names.split()}
    monkeypatch.setattr(machine, "described", lambda device: {**known, "device": device, "packages": {}})


@pytest.mark.usefixtures("made_up", "described")
def test_a_campaign_goes_on_where_another_one_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second file has everything, so it alone has to come back."""
    monkeypatch.setattr(gpu, "cases", lambda: tuple(case_of(name) for name in ("good", "in use")))
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    assert gpu.main(["--device", "cpu", "--out", str(first), "--minutes", "5"]) == 0
    monkeypatch.setitem(PROGRAMS, "in use", PROGRAMS["good"])
    capsys.readouterr()
    assert gpu.main(["--device", "cpu", "--out", str(second), "--resume", str(first)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("1 cases")
    assert {line["case"]: line["status"] for line in journal.read([second]) if "case" in line} == {
        "good": "measured",
        "in use": "measured",
    }
    assert "allocated: 2 readings, 0 equal, median difference 33.333%, worst +33.333%" in printed
    assert (tmp_path / "second.tar.gz").exists()


@pytest.mark.usefixtures("made_up", "described")
def test_what_a_cpu_rehearsed_is_not_done_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "cases", lambda: (case_of("good"),))
    monkeypatch.setattr(machine, "busy", lambda: False)
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    assert gpu.main(["--device", "cpu", "--out", str(first)]) == 0
    assert gpu.main(["--out", str(second), "--resume", str(first)]) == 0
    assert capsys.readouterr().out.count("1 cases") == 2
    assert [line["device"] for line in journal.read([second]) if "case" in line] == ["cuda"]


@pytest.mark.usefixtures("made_up", "described")
def test_one_case_runs_again_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "cases", lambda: tuple(case_of(name) for name in ("good", "raises")))
    out = tmp_path / "out.jsonl"
    assert gpu.main(["--device", "cpu", "--out", str(out), "--only", "raises"]) == 1
    again = ["--device", "cpu", "--out", str(out), "--resume", str(out), "--only", "good"]
    assert gpu.main(again) == 1
    assert [line["case"] for line in journal.read([out]) if "case" in line] == ["raises", "good"]


def test_wrong_names_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--only", "no-such-case"]) == 2
    assert gpu.main(["--resume", str(tmp_path / "none.jsonl")]) == 2
    assert gpu.main(["--bundle", str(tmp_path)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "no case is called no-such-case" in errors[0]
    assert "none.jsonl" in errors[1]
    assert "has no wheels" in errors[2]


def test_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate_devices, "NVML", "no_such_bindings")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.main(["--out", str(tmp_path / "out.jsonl")]) == 3
    assert "no CUDA device here" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_a_gpu_that_is_in_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Device(0, "GPU-0", "NVIDIA H200", "580.1", 100 << 30, 5 << 30, 95 << 30)
    monkeypatch.setattr(machine, "devices", lambda: (busy,))
    assert gpu.main(["--out", str(tmp_path / "out.jsonl")]) == 3
    assert "GPU 0 (NVIDIA H200) is in use" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "gpu_name"), [("NVIDIA H200", "h200"), ("NVIDIA X1", None)])
def test_the_machine(name: str, gpu_name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a GPU that memplan has no row for."""
    idle = Device(0, "GPU-0", name, "580.1", 143_771 << 20, 0, 143_771 << 20)
    monkeypatch.setattr(machine, "devices", lambda: (idle,))
    found = machine.described("cuda")
    assert (found["gpu"], found["name"], found["driver"]) == (gpu_name, name, "580.1")
    assert found["total"] == 143_771 << 20
    assert not machine.busy()


# -- the file -----------------------------------------------------------------------------------------------


def test_a_line_that_was_cut_short_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    journal.append(path, {"case": "one", "status": "measured"})
    with path.open("ab") as file:
        file.write(b'{"case": "two", "sta')
    journal.append(path, {"case": "three", "status": "failed"})
    assert [line["case"] for line in journal.read([path])] == ["one", "three"]


def test_what_was_measured_once_stays_measured() -> None:
    lines = [{"case": "one", "status": status} for status in ("failed", "measured", "unfinished")]
    assert journal.last_of_each(lines)["one"]["status"] == "measured"
    assert journal.done(lines[2:]) == set()


# -- the bundle ---------------------------------------------------------------------------------------------


def test_only_one_cuda_of_bitsandbytes_travels(tmp_path: Path) -> None:
    wheel = tmp_path / "bitsandbytes-1-py3-none-any.whl"
    names = ["bitsandbytes/nn.py", *(f"bitsandbytes/lib_{kind}.so" for kind in ("cuda124", "cuda130", "rocm70", "cpu"))]
    with zipfile.ZipFile(wheel, "w") as file:
        for name in names:
            file.writestr(name, "x")
    bundle.strip(wheel, bundle.is_wanted)
    with zipfile.ZipFile(wheel) as file:
        assert file.namelist() == [names[0], names[2], names[4]]


def test_wheels_are_unpacked_once(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "one-1-py3-none-any.whl", "w") as file:
        file.writestr("one/__init__.py", "x = 1\n")
    site = bundle.unpacked(tmp_path, tmp_path)
    assert (site / "one" / "__init__.py").exists()
    (site / "one" / "__init__.py").unlink()
    assert bundle.unpacked(tmp_path, tmp_path) == site
    assert not (site / "one" / "__init__.py").exists()


def test_the_bundle_has_the_releases_that_are_tested_here() -> None:
    """Where they are pinned: what is rehearsed is what runs."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pinned = {name: line for line in bundle.WHEELS for name in [line.partition("==")[0]]}
    for name in ("transformers", "peft", "megatron-core"):
        assert f'"{pinned[name]}"' in text


def test_nothing_but_pythons_own_modules_is_needed_to_unpack() -> None:
    code = (
        "import sys, benchmarks.gpu; print([name for name in ('pydantic', 'memplan', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


# -- the way back -------------------------------------------------------------------------------------------


def gpu_lines(**more: Any) -> list[dict[str, Any]]:
    named = {
        "gpu": "h200",
        "name": "NVIDIA H200",
        "torch": "2.11.0",
        "cuda": "13.0",
        "driver": "580",
        "memplan": "0.1.0",
    }
    described = {**named, "device": "cuda", "began": "2026-11-22T12:00:00Z", "packages": {}}
    readings = [
        {"name": "allocated", "unit": "bytes", "measured": 100 << 20, "estimated": 101 << 20},
        {"name": "static", "unit": "bytes", "measured": 10 << 20, "estimated": None},
    ]
    line = {"case": "gpt2", "device": "cuda", "status": "measured", "seconds": 9.0, "error": "", "readings": readings}
    return [{"machine": described}, {**line, **more}]


def test_no_campaign_no_figures() -> None:
    text = page.section([])
    assert page.NONE in text
    assert "|" not in text
    assert page.section([[{**line, "device": "cpu", "readings": []} for line in gpu_lines()[1:]]]) == text


def test_the_page_says_what_is_kept() -> None:
    """None has been run, or the pages have what the file has."""
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.page(text, page.kept()) == text
    assert page.whole(page.kept()) == page.RESULTS.read_text(encoding="utf-8")


def test_every_reserved_reading_that_is_far_off_has_a_cause_or_is_not_explained() -> None:
    """And no cause is of a reading that is near."""
    reserved = [
        row
        for row in (row for lines in page.kept() for row in summary.rows_of(lines))
        if row.reading.name.partition(",")[0] == "reserved"
    ]
    far = {", ".join(filter(None, (row.case, row.reading.name[10:]))) for row in reserved if row.size > 0.01}
    assert far == set(causes.RESERVED)


def test_the_section() -> None:
    text = page.section([gpu_lines()])
    assert text.count("- NVIDIA H200, torch 2.11.0, CUDA 13.0, driver 580, memplan 0.1.0, 2026-11-22") == 1
    assert "| allocated | 1 | 0 | 1 | 1 | 1.000% | +1.00% | gpt2 |  |" in text
    whole = page.whole([[*gpu_lines(), *gpu_lines()]])
    assert "| gpt2 | – | 100.0 (+1.0) | – | – | – | 10.0 (–) | – | – | – |" in whole
    assert whole.count("- NVIDIA H200") == 1


def test_only_what_a_gpu_measured_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "accuracy.md"
    target.write_text(f"before\n{page.section([])}\nafter\n")
    (tmp_path / "records").mkdir()
    places = {"ROOT": tmp_path, "KEPT": tmp_path, "PAGE": target, "RESULTS": tmp_path / "results.md"}
    for name, place in places.items():
        monkeypatch.setattr(page, name, place)
    monkeypatch.setattr(page, "RECORDS", tmp_path / "records")
    out = tmp_path / "out.jsonl"
    for line in [{"case": "rehearsed", "device": "cpu", "status": "measured", "readings": [], "error": ""}]:
        journal.append(out, line)
    assert gpu.main(["report", str(out), "--write"]) == 2
    assert "nothing in these files was measured on a GPU" in capsys.readouterr().err
    from memplan.records.record import to_json

    for line in gpu_lines(record=to_json(record_of(TWO_STAGES)), tail="secret"):
        journal.append(out, line)
    assert gpu.main(["report", str(out), "--write"]) == 0
    text = target.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "| gpt2, stage 0 |" in text, "what today estimates of the record"
    assert "secret" not in (tmp_path / "measured_on_h200.jsonl").read_text()
    assert "rehearsed" not in text + (tmp_path / "measured_on_h200.jsonl").read_text()
    assert len(list((tmp_path / "records").glob("*.json"))) == 1


def test_failures_are_in_the_summary() -> None:
    lines = gpu_lines(status="failed", error="out-of-memory: CUDA out of memory", readings=[])
    assert "failed: gpt2: out-of-memory: CUDA out of memory" in list(summary.summary(lines))


# -- on this CPU --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rehearsal(tmp_path: Path) -> None:
    """Real processes from the command to the file: a validation, a stage of Megatron-Core, a probe; and SIGTERM."""
    out = tmp_path / "out.jsonl"
    names = ["gpt2-xl-fp32-eager", "torchtitan-pp2-tp2", "products", "allocator", "learned"]
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--out", str(out), "--only", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = journal.last_of_each(journal.read([out]))
    assert [found[name]["status"] for name in names] == ["measured", "measured", "measured", "refused", "measured"]
    requested = found["gpt2-xl-fp32-eager"]["readings"][0]
    assert requested["measured"] == pytest.approx(requested["estimated"], rel=0.005)


@pytest.mark.slow
def test_sigterm_leaves_a_summary(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--out", str(out), "--only", "learned"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("1 cases")
        time.sleep(1.0)
        os.kill(process.pid, signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "reading" in rest
    assert json.loads(out.read_text().splitlines()[0])["machine"]["device"] == "cpu"
