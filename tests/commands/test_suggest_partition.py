"""``memplan suggest-partition`` as a user runs it."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from memplan.cli import main
from memplan.commands.fixed import AXES
from memplan.frameworks import ROOMS, framework
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.search.answer import suggest as search_for

ROOT = Path(__file__).parent.parent.parent
MEMPLAN = [sys.executable, "-m", "memplan.cli"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
JOB = [
    "--model=llama-3-8b", "--framework=megatron", "--layers=2", "--gpus=2", "--gpu=h100-80gb", "--gbs=4", "--seq=512",
]  # fmt: skip
TOO_LARGE = ["--model=llama-3-8b", "--framework=single", "--gpu=rtx-4090", "--layers=30", "--seq=8192", "--gbs=1"]


def suggest(*arguments: str) -> list[str]:
    return ["suggest-partition", *arguments]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = main(suggest(*arguments, "--json"))
    captured = capsys.readouterr()
    assert captured.err == ""
    found: dict[str, Any] = json.loads(captured.out)
    assert code == (0 if found["fits"] else 1)
    return found


ALONE = ["--model=llama-3.2-1b", "--layers=4", "--framework=single", "--gpu=a100-40gb", "--gbs=4", "--seq=2048"]


def test_a_loss_is_where_the_search_starts_and_states_in_8_bits_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """Liger's loss is one of two that are searched, so that naming it changes no answer; to 32 bits nothing goes back
    from 8, and none is said to."""
    found = [answer(capsys, *ALONE, *more) for more in ([], ["--loss=liger"], ["--optimizer=adam8bit"])]
    searched, named, small = ([one["recommended"], *one["alternatives"]] for one in found)
    assert [one["layout"] for one in named] == [one["layout"] for one in searched]
    assert {one["plan"]["loss"]["kind"] for one in named} == {"plain", "liger"}
    assert {one["plan"]["optimizer"]["name"] for one in small} == {"adam8bit"}
    assert [one["started_from"] for one in found] == [[], ["loss liger"], []]
    kept = answer(capsys, *ALONE, "--loss=liger", "--fix=loss")
    assert {one["plan"]["loss"]["kind"] for one in (kept["recommended"], *kept["alternatives"])} == {"liger"}


def test_the_answer_in_print(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(suggest(*JOB, "--fix=tp=1")) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("Recommended: ")
    assert "tp 1 fixed" in out
    for part in ("MFU", "Fits: ", "Why this one", "as given: ", "Searched ", "a billion tokens"):
        assert part in out


def test_top_and_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(answer(capsys, *JOB, "--top=1")["alternatives"]) == 0
    assert len(answer(capsys, *JOB, "--top=3")["alternatives"]) == 2
    assert main(suggest(*JOB, "-q")) == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_quiet_says_the_framework_that_nobody_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model=bert-base", "--layers=2", "--seq=128", "--gpu=h100", "--gpus=2", "--gbs=4"]
    found = answer(capsys, *words)
    assert main(suggest(*words, "-q")) == 0
    assert capsys.readouterr().out.startswith(f"Recommended: {found['recommended']['plan']['framework']} · ")


PLAN = (
    "{model: {base: llama-3-8b, layers: 2}, framework: megatron, layout: {pp: 2}, batch: {mbs: 1, gbs: 4, seq: 512}"
    ", hardware: {gpus: 2, gpu: h100-80gb}}"
)


def test_what_is_fixed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert answer(capsys, *JOB, "--fix", "pp=2,mbs=1")["fixed"] == {"layout.pp": 2, "batch.mbs": 1}
    (tmp_path / "plan.yaml").write_text(PLAN, encoding="utf-8")
    free = answer(capsys, str(tmp_path / "plan.yaml"))
    assert free["fixed"] == {}
    assert free["given"]["layout"]["pp"] == 2
    assert free["recommended"]["seconds"] <= free["given"]["seconds"] * (1 + free["equally_fast_within"])
    kept = answer(capsys, str(tmp_path / "plan.yaml"), "--fix", "pp,mbs")
    assert kept["fixed"] == {"layout.pp": 2, "batch.mbs": 1}
    assert (kept["recommended"]["layout"]["pp"], kept["recommended"]["layout"]["mbs"]) == (2, 1)


def test_an_attention_mask_that_is_fixed_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """Left out from 8,192 tokens on, but where the user keeps it."""
    long = [*JOB[:-1], "--seq=8192", "--top=1"]
    path = ("megatron", "attention_mask_in_dataloader")
    for words, left in ((["--fix", "attention-mask-in-dataloader=true"], True), ([], False)):
        found = answer(capsys, *long, *words)
        assert found["recommended"]["plan"][path[0]][path[1]] is left
        assert found["fixed"] == ({".".join(path): True} if left else {})


@pytest.mark.parametrize("name", ["fsdp", "deepspeed", "megatron"])
def test_whatever_a_search_adds_can_be_fixed(name: str) -> None:
    """Of each extra the field that it is named after: groups of shards, offload, losses, masks."""
    flags = {"model": "llama-3-8b", "framework": name, "gpus": "32", "gpu": "h100-80gb", "gbs": "64", "seq": "8192"}
    plan = resolve(read_plan(None, flags).plan)
    search = framework(name).search
    added = [*search.free(plan), *(extra for group in search.extras(plan) for extra in group)]
    assert added
    assert {next(iter(extra.fields))[0] for extra in added} <= AXES


def test_flags_have_what_is_fixed(capsys: pytest.CaptureFixture[str]) -> None:
    """``estimate`` takes the same words without ``--fix``: values that it alone says are among the flags."""
    found = answer(capsys, *JOB, "--fix", "tp=2,recompute=full,mbs=2", "--mbs=2")
    words = shlex.split(found["flags"])
    assert "--mbs" not in words
    assert main(["estimate", *JOB, "--mbs=2", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"] == found["recommended"]["plan"]


def test_flags_over_another_tools_file_say_the_batch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Launchers of Megatron-Bridge scale a recipe's batch to the sizes: what was searched is said."""
    text = "model: {tensor_model_parallel_size: 2}\ntrain: {micro_batch_size: 1, global_batch_size: 32}\n"
    (tmp_path / "overrides.yaml").write_text(text, encoding="utf-8")
    job = ("--model=llama-3-8b", "--layers=2", "--seq=2048", "--gpus=4", "--gpu=h100-80gb")
    found = answer(capsys, str(tmp_path / "overrides.yaml"), *job)
    assert "--gbs 32" in found["flags"]


def test_a_flag_and_the_same_field_in_a_file_have_one_answer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Both are where the search starts, and the report says it of the flags."""
    (tmp_path / "plan.yaml").write_text(PLAN, encoding="utf-8")
    file, flags = answer(capsys, str(tmp_path / "plan.yaml")), answer(capsys, *JOB, "--pp=2", "--mbs=1")
    assert flags.pop("started_from") == ["pp 2", "mbs 1"]
    assert file.pop("started_from") == []
    assert flags["fixed"] == {}
    for found in (file, flags):
        del found["search"]["seconds"], found["warnings"], found["assumptions"]
    assert file == flags
    assert main(suggest(*JOB, "--pp=2", "--mbs=1")) == 0
    assert "Started from pp 2, mbs 1, which the search may change; --fix pp,mbs keeps it.\n" in capsys.readouterr().out


def test_numbers_of_gpus_that_work_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    seven = ["--gpus=7", "--gbs=56", "--tp=4"]
    assert "4 and 8 GPUs work" in answer(capsys, *JOB[:3], "--gpu=h100-80gb", *seven)["given_refused"]
    assert main(suggest(*JOB[:3], "--gpu=h100-80gb", *seven[:2], "--fix=tp=4")) == 2
    assert capsys.readouterr().err == "--fix tp: layout.tp = 4: leaves no layout of 7 GPUs; 4 and 8 GPUs work\n"


def test_what_is_kept_free(capsys: pytest.CaptureFixture[str]) -> None:
    """2 % and at least 1 GiB, unless the user says how much."""
    kept = answer(capsys, *JOB)
    assert (kept["default_headroom"], kept["limit_bytes"]) == (
        "2%",
        kept["capacity_bytes"] - int(kept["capacity_bytes"] * 0.02),
    )
    small = answer(capsys, *JOB, "--capacity=24GiB")
    assert (small["default_headroom"], small["limit_bytes"]) == ("1GiB", 23 * 2**30)
    own = answer(capsys, *JOB, "--headroom=0")
    assert (own["default_headroom"], own["limit_bytes"]) == (None, own["capacity_bytes"])
    least = answer(capsys, *JOB, "--objective=memory", "--headroom=0")["recommended"]["device_bytes"]
    exact = [*JOB, f"--capacity={least / 2**30 + 0.5:.2f}GiB"]
    assert answer(capsys, *exact, "--headroom=0")["fits"]
    assert main(suggest(*exact)) == 1
    assert re.match(r"Nothing (fits|is sure to\nfit|is sure to fit): with 1GiB kept free", capsys.readouterr().out)


def test_objectives(capsys: pytest.CaptureFixture[str]) -> None:
    fastest = answer(capsys, *JOB)["recommended"]
    least = answer(capsys, *JOB, "--objective=memory")["recommended"]
    assert least["requested_bytes"] < fastest["requested_bytes"]
    assert least["seconds"] > fastest["seconds"]
    fewest = answer(capsys, *JOB, "--objective=gpus")["recommended"]
    assert fewest["layout"]["gpus"] == 1
    assert main(suggest(*JOB, "--objective=gpus", "-q")) == 0
    assert capsys.readouterr().out.startswith("Recommended: 1 GPU · ")


@pytest.mark.parametrize("objective", ["memory", "gpus"])
def test_a_gpu_without_a_published_speed(objective: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Has no times, which the least memory and the fewest GPUs do not need."""
    job = [flag for flag in JOB if not flag.startswith("--gpu=")] + ["--gpu=mi250x"]
    found = answer(capsys, *job, f"--objective={objective}")
    for one in (found["recommended"], *found["alternatives"], *found["front"]):
        assert one["device_bytes"] is None or one["device_bytes"] < found["limit_bytes"]
        assert one["seconds"] is one["parts_seconds"] is one["tokens_per_second"] is one["mfu"] is None
    assert main(suggest(*job, f"--objective={objective}")) == 0
    out = capsys.readouterr().out
    assert " s · " not in out
    assert "Memory against time" not in out
    assert "Nobody has published the speed of mi250x" in out
    assert main(suggest(*job)) == 2
    assert "has no published speed, and so no time: --objective memory and gpus need none" in capsys.readouterr().err


def test_nodes_whose_network_nobody_has_published(capsys: pytest.CaptureFixture[str]) -> None:
    """The least memory needs no time; a plan that does not fit has ways out; the network can be said."""
    job = ["--model=gpt2", "--layers=2", "--framework=fsdp", "--gpus=16", "--gpu=rtx-4090", "--gbs=256", "--seq=1024"]
    found = answer(capsys, *job, "--objective=memory")
    assert found["recommended"]["seconds"] is None
    assert main(suggest(*job, "--objective=memory")) == 0
    assert "published network adapters beside rtx-4090" in capsys.readouterr().out
    assert main(suggest(*job)) == 2
    assert "hardware.network: is missing: " in (told := capsys.readouterr().err)
    assert "--network 50 says 50 GB/s for each GPU" in told
    assert answer(capsys, *job, "--network=50")["recommended"]["seconds"] > 0
    assert main(["estimate", *job[:-2], "--seq=1024", "--mbs=128", "--json"]) == 1
    ways = json.loads(capsys.readouterr().out)["ways_out"]
    assert ways
    assert {way["slower"] for way in ways} == {None}


@pytest.mark.slow
def test_no_alternative_is_as_fast_and_takes_less_than_the_recommended_layout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """TP 4, CP 2 requests 1 byte in 10^4 less than TP 4, DP 2 does, takes longer, and 0.6 GiB more of the device."""
    job = ["--model=llama-3.2-1b", "--framework=megatron", "--gpus=8", "--gpu=a100-40gb", "--gbs=8", "--optimizer=sgd"]
    found = answer(capsys, *job)
    best = found["recommended"]
    assert (best["layout"]["tp"], best["layout"]["cp"], best["layout"]["dp"]) == (4, 1, 2)
    for other in found["alternatives"]:
        assert other["seconds"] > best["seconds"] or other["device_bytes"] >= best["device_bytes"]


def test_headroom_and_price(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *JOB, "--headroom=5%", "--price=3.6")
    assert found["limit_bytes"] == found["capacity_bytes"] - int(found["capacity_bytes"] * 0.05)
    best = found["recommended"]
    assert best["cost_per_step"] == pytest.approx(2 * 3.6 * best["seconds"] / 3600)
    assert best["cost_per_billion_tokens"] == pytest.approx(best["cost_per_step"] * 1e9 / (4 * 512))


def test_what_is_written_reads_back_as_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    best = answer(capsys, *JOB, "--fix=pp=2", "--write", str(file))["recommended"]
    assert file.read_text(encoding="utf-8").startswith("# A plan by memplan suggest-partition.")
    assert resolve(read_plan(str(file)).plan).model_dump(mode="json") == best["plan"]
    assert main(["estimate", str(file), "--json"]) == 0
    estimated = json.loads(capsys.readouterr().out)
    assert estimated["stages"] == best["stages"]
    assert max(stage["requested_bytes"] for stage in estimated["stages"]) == best["requested_bytes"]


def test_nothing_fits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = answer(capsys, *TOO_LARGE, "--write", str(tmp_path / "plan.yaml"))
    assert found["recommended"] is None
    assert found["front"] == []
    assert found["closest"]["device_bytes"] > found["limit_bytes"]
    assert all(change["gained_bytes"] > 0 or change["fits"] for change in found["changes"])
    assert found["written"] == []
    assert not list(tmp_path.iterdir())
    assert main(suggest(*TOO_LARGE)) == 1
    assert capsys.readouterr().out.startswith("Nothing fits: ")


def test_csv(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(suggest(*JOB, "--csv")) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert rows[0]["kind"] == "recommended"
    assert {row["kind"] for row in rows} >= {"recommended", "alternative", "front"}
    assert float(rows[0]["seconds"]) <= float(rows[1]["seconds"])


def test_csv_in_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "layouts.csv"
    assert answer(capsys, *JOB, "--csv", str(file))["written"] == [str(file)]
    rows = list(csv.DictReader(io.StringIO(file.read_text(encoding="utf-8"))))
    assert rows[0]["kind"] == "recommended"


def test_the_same_in_every_run(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = answer(capsys, *JOB), answer(capsys, *JOB)
    assert first["search"].pop("seconds") > 0
    second["search"].pop("seconds")
    assert first == second


def test_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    svg, png = tmp_path / "front.svg", tmp_path / "front.png"
    assert main(suggest(*JOB, "-q", "--plot", str(svg))) == 0
    assert main(suggest(*JOB, "-q", "--plot", str(png))) == 0
    assert capsys.readouterr().err == ""
    assert "h100-80gb: 77.5 GiB less headroom" in svg.read_text(encoding="utf-8")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert {file.name for file in tmp_path.iterdir()} == {"front.svg", "front.png"}


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--fix", "tp=3"], "--fix tp: layout.tp = 3: is not one of 1, 2, the values that are searched"),
        (["--fix", "tp=2,pp=2"], "contradict each other on 2 GPUs: "),
        (["--fix", "tp=2", "--tp=1"], "--fix: tp=2 contradicts --tp 1; give one of them"),
        (["--fix", "tp=1", "--fix", "tp=2"], "--fix: tp is there twice, with different values"),
        (["--fix", "tpp=2"], "--fix: tpp=2 names no field; "),
        (["--fix", "optimser=adamw"], "; did you mean optimizer?"),
        (["--fix", "optimizer=adamx"], "--fix optimizer: optimizer.name = adamx: must be one of "),
        (["--fix", "tp="], "--fix: tp needs a value, as --fix tp=A"),
        (["--fix", "zero=9"], "--fix zero: layout.zero = 9: must be at most 3"),
        (["--fix"], "--fix: needs a value: a field to keep fixed"),
        (["--gpus=0"], "--gpus: hardware.gpus = 0: must be at least 1"),
        (["--gpus=7"], "--gpus: hardware.gpus = 7: has no layout: "),
        (["--fix=mbs=3"], "--fix mbs: batch.mbs = 3: leaves no layout of 2 GPUs: "),
        (["--gpu=v100-16gb", "--dtype=bf16"], "precision.dtype = bf16: must be fp16 or fp32 on v100-16gb: "),
        (["--gpu=h101"], "--gpu: hardware.gpu = h101: is not a known GPU"),
        (["--top=0"], "--top: 0 must be from 1 to 50"),
        (["--objective=x"], "--objective: x must be one of time, memory, gpus"),
        (["--objective=tim"], "; did you mean time?"),
        (["--plot=file.txt"], "--plot: file.txt must end in .svg or .png"),
        (["--write=/no/such/folder/plan.yaml"], "/no/such/folder/plan.yaml: there is no folder /no/such/folder"),
        (["--write", __file__], "is there already; --overwrite replaces it"),
        (["--json", "--csv"], "--json and --csv exclude each other"),
        (["--set", "A=1"], "--set: belongs to --from, which reads a launch file"),
    ],
)
def test_wrong_inputs(flags: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(suggest(*JOB, *flags)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert line in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("left_out", "line"),
    [
        ("--gpu=", "hardware.gpu: is missing: a search needs the GPU's memory"),
        ("--gbs=", "batch.gbs: is missing: a search keeps the global batch"),
    ],
)
def test_what_is_missing(left_out: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(suggest(*(flag for flag in JOB if not flag.startswith(left_out)))) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(line)
    assert captured.err.count("\n") == 1


# -- as a process --------------------------------------------------------------------------------------------


def memplan(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [*MEMPLAN, *suggest(*arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120, **more)


def test_exit_codes() -> None:
    done = memplan(*JOB, "--fix=pp=2,mbs=1,recompute=none", "-q")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Recommended")
    done = memplan(*TOO_LARGE, "-q")
    assert (done.returncode, done.stderr) == (1, "")
    done = memplan("-", "--gpu=h101", input="{model: gpt2, batch: {gbs: 8}}")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_without_matplotlib(tmp_path: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from memplan.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *suggest(*JOB, "--plot", str(tmp_path / "front.png"))]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "--plot needs matplotlib, which is not installed: pip install 'memplan[plot]'\n"


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from memplan.cli import main; main(sys.argv[1:]);"
        "print([name for name in ('torch', 'numpy', 'matplotlib', 'transformers') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, *suggest(*JOB, "--fix=pp=2,mbs=1", "-q")]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert done.stdout.endswith("\n[]\n")


def heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    large = ["--model=llama-3-70b", "--framework=megatron", "--gpus=512", "--gpu=h100-80gb", "--gbs=1024"]
    command = [*MEMPLAN, *suggest(*large, "--seq=8192", "--write", str(tmp_path / "plan.yaml"))]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT, preexec_fn=heed_interrupts
    )
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    if errors and b"memplan" not in errors:
        pytest.skip("Python itself was still starting")
    assert (process.returncode in (0, 130, -signal.SIGINT), errors) == (True, b"")
    assert process.returncode == 0 or (out, list(tmp_path.iterdir())) == (b"", [])


ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def in_terminal(command: list[str], columns: int) -> tuple[int, str]:
    """Exit code, and what a terminal of so many columns was sent."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(leader)
    return process.wait(60), shown.decode()


@pytest.mark.parametrize("columns", [80, 160])
def test_in_a_terminal(columns: int) -> None:
    code, shown = in_terminal([*MEMPLAN, *suggest(*JOB, "--fix=pp=2")], columns)
    assert code == 0
    assert "\x1b[" in shown
    assert "■" in shown
    lines = [line.rpartition("\r")[2] for line in ANSI.sub("", shown).replace("\r\n", "\n").split("\n")]
    assert max(map(len, lines)) <= columns


def test_progress_appears_late_and_goes() -> None:
    code = (
        "import time; from memplan.report.progress import progress\n"
        "with progress('searching') as report:\n"
        "    time.sleep({})\n"
        "    report('layouts', 3, 1000)\n"
        "    time.sleep(0.4)\n"
        "print('done')"
    )
    ended, shown = in_terminal([sys.executable, "-c", code.format(0.9)], 80)
    assert ended == 0
    assert "searching" in shown
    assert "layouts: 3 of 1,000" in shown
    assert shown.index("\x1b[2K", shown.index("layouts: 3")) < shown.index("done")
    assert in_terminal([sys.executable, "-c", code.format(0.0).replace("0.4", "0.0")], 80) == (0, "done\r\n")


def test_without_a_framework_all_are_searched(capsys: pytest.CaptureFixture[str]) -> None:
    """Each is searched as if it had been named, the best stands above, and one that keeps no fp32 copy is last."""
    flags = ["--model", "gpt2", "--gpus", "4", "--gpu", "h100-80gb", "--gbs", "32", "--seq", "1024", "--json"]
    assert main(["suggest-partition", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    offers = {one["framework"]: one for one in found["frameworks"]}
    assert set(offers) == set(ROOMS)
    fitting = {name: one["recommended"] for name, one in offers.items() if one["fits"]}
    assert {"fsdp", "megatron", "deepspeed", "ddp"} <= set(fitting)
    best = found["recommended"]["plan"]["framework"]
    assert best != "ddp"
    assert fitting[best] == found["recommended"]
    assert found["recommended"]["seconds"] == min(one["seconds"] for name, one in fitting.items() if name != "ddp")
    assert "single" in offers["single"]["refused"]
    notes = {note["code"]: note["message"] for note in found["warnings"]}
    assert f"were searched, and {best} is the best" in notes["framework-chosen"]
    other = next(name for name in fitting if name not in (best, "megatron"))
    assert main(["suggest-partition", *flags, "--framework", best]) == 0
    named = json.loads(capsys.readouterr().out)
    own = {"frameworks", "warnings"}
    assert found.pop("flags") == f"--framework {best} {named.pop('flags')}"
    assert all(named[key] == found[key] for key in named.keys() - own - {"search"})
    assert named["search"] | {"seconds": 0} == found["search"] | {"seconds": 0}
    assert main(["suggest-partition", *flags, "--framework", other]) == 0
    assert json.loads(capsys.readouterr().out)["recommended"] == fitting[other]
    assert "frameworks" not in named


@pytest.mark.parametrize("batch", [["--gbs", "2"], []])
def test_on_one_gpu_others_are_searched_where_one_process_does_not_fit(
    batch: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Others need a global batch, which is then that of one process's micro-batch. Eight layers of Llama 3 have 2.8
    billion parameters (two tables of 128,256 x 4,096, eight layers of 218 million): in bf16 with gradients and 8-bit
    states 15.6 GiB. A card of 16 GB holds them where they are kept in host memory."""
    flags = ["--model", "llama-3-8b", "--layers", "8", "--gpu", "rtx-4080", *batch, "--seq", "512"]
    found = answer(capsys, *flags)
    offers = {one["framework"]: one for one in found["frameworks"]}
    assert not offers["single"]["fits"]
    assert found["recommended"]["plan"]["framework"] == "deepspeed"
    assert "deepspeed is the best" in {note["code"]: note["message"] for note in found["warnings"]}["framework-chosen"]
    assert main(["estimate", *flags, *shlex.split(found["flags"]), "--json"]) == 0
    pasted = json.loads(capsys.readouterr().out)
    assert pasted["peak_bytes"] == found["recommended"]["device_bytes"]
    assert main(suggest(*flags, "--framework", "single")) == 1
    assert "In each framework" not in capsys.readouterr().out
    assert main(suggest(*flags, "--optimizer", "sgd", "--json")) == 0
    assert "frameworks" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("model", "framework"), [("llama-2-7b", "megatron-deepspeed"), ("bloom-176b", "fsdp")])
def test_an_architecture_that_a_framework_lacks_is_refused_at_once(model: str, framework: str) -> None:
    """Not layout by layout."""
    flags = {"model": model, "framework": framework, "gpus": "64", "gpu": "h100-80gb", "gbs": "1024"}
    considered: list[str] = []
    with pytest.raises(PlanError, match=f"has no recipe in framework {framework}"):
        search_for(read_plan(None, flags).plan, {}, report=lambda what, done, of: considered.append(what))
    assert len(considered) < 10


@pytest.mark.parametrize(
    "job",
    [
        {"framework": "megatron", "seq": "8192"},
        {"framework": "fsdp", "gpus": "32"},
        {"framework": "deepspeed", "zero": "3"},
        {"framework": "ddp"},
        {"framework": "megatron-deepspeed", "model": "bigscience-104b", "dtype": "fp16", "tp": "4"},
    ],
    ids=lambda job: job["framework"],
)
def test_whatever_a_search_changes_can_be_fixed(job: dict[str, str]) -> None:
    """``--fix`` keeps fields of ``AXES``: each that a search's choices set is one of them."""
    plan = resolve(read_plan(None, {"model": "llama-3-8b", "gpu": "h100-80gb", "gpus": "8", "gbs": "64", **job}).plan)
    search = framework(plan.framework).search
    groups = (search.free(plan), *search.extras(plan))
    assert {path for group in groups for one in group for path, _ in one.fields} <= AXES


def test_a_mask_that_is_fixed_stays(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model=llama-3-8b", "--framework=megatron", "--gpus=2", "--gpu=h200", "--gbs=4", "--seq=8192"]
    words += ["--layers=2", "--fix=tp=2,pp=1,mbs=1"]
    found = [answer(capsys, *words, *fix) for fix in ([], ["--fix=attention-mask-in-dataloader=true"])]
    masks = [one["recommended"]["plan"]["megatron"]["attention_mask_in_dataloader"] for one in found]
    assert masks == [False, True]
