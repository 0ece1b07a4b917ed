"""Plans of every framework, from valid to nonsense, as flags and as files; and what every answer must keep to."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from memplan.plan.fields import Kind, PlanField, by_flag
from memplan.plan.library import examples, model_specs
from tests.golden.cases import FOLDER, estimates

from .commands import ended, refused
from .driver import Target
from .texts import mutated

USUAL = ("1", "1", "2", "2", "3", "4", "6", "8", "16", "64")
LARGE = ("128", "512", "1000", "1024", "2048", "4096", "100000", "1048576", "2147483648", str(1 << 62))
ODD = (
    "0", "-1", "1.5", "1e3", "x", "", "null", "true", "auto", "²", "9" * 400, str(1 << 63), "NaN", "inf", "1,2",
    "{}", "[1]", "\x1b[31m", "a\nb", "\0", "~nobody/x", "/dev/zero", "0-99999", "é" * 300,
)  # fmt: skip
VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64",
    "PYTORCH_ALLOC_CONF=roundup_power2_divisions:8", "PYTORCH_CUDA_ALLOC_CONF=garbage_collection_threshold:0.8",
    "PYTORCH_CUDA_ALLOC_CONF=roundup_power2_divisions:[256:1,512:2,>:8]", "CUBLAS_WORKSPACE_CONFIG=:4096:8",
    "CUBLAS_WORKSPACE_CONFIG=:99999999999:99999999", "CUBLAS_WORKSPACE_CONFIG=:16:8",
    "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "CUDA_DEVICE_MAX_CONNECTIONS=1", "NCCL_BUFFSIZE=1", "A=", "=B", "A",
    "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:1", "PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync",
)  # fmt: skip

LONG = ("llama-3-405b-1024gpu",)
"""Examples that take most of the time that a case has, as they are."""
DEEP = ("layers", "pp", "vpp")
"""Sizes that time grows with."""

Flags = tuple[tuple[str, str], ...]


class Case(NamedTuple):
    """A plan as flags, and what else is tried with it."""

    plan: str | None
    flags: Flags
    also: str
    width: int

    @property
    def arguments(self) -> list[str]:
        return [*([] if self.plan is None else [self.plan]), *words(self.flags)]


def words(flags: Iterable[tuple[str, str]]) -> list[str]:
    return [word for name, value in flags for word in ((f"--{name}={value}",) if value != SWITCHED else (f"--{name}",))]


SWITCHED = "(switched on)"
"""In place of a value."""


@cache
def _seeds() -> tuple[tuple[str | None, Flags], ...]:
    """Command lines of the golden net, as flags; those of a file of their own are left out."""
    found = []
    for line in estimates():
        _, *rest = shlex.split(line)
        taken = _taken(rest)
        if taken is not None and taken[0] not in LONG:
            found.append(taken)
    return tuple(found)


def _taken(rest: list[str]) -> tuple[str | None, Flags] | None:
    plan, flags = None, []
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            if plan is not None or word not in examples():
                return None
            plan = word
            continue
        name, equals, value = word[2:].partition("=")
        if name.removeprefix("no-") not in by_flag() and name not in by_flag():
            return None
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else SWITCHED
        if name == "model" and value not in model_specs():
            value = str(FOLDER / value) if (FOLDER / value).exists() else value
        flags.append((name, value))
    return plan, tuple(flags)


def _value(random: Random, field: PlanField) -> str:
    """What ``field`` may have, mostly."""
    if random.random() < 0.06:
        return random.choice(ODD)
    if field.choices:
        return random.choice(field.choices)
    match field.kind:
        case Kind.SWITCH:
            return random.choice(("true", "false"))
        case Kind.NUMBER:
            return random.choice(("0", "0.1", "0.5", "1", "0.9", "2", "1e9"))
        case Kind.SIZE:
            return random.choice(("16GiB", "80GB", "1", "1KiB", "1000TiB"))
        case Kind.VARIABLES:
            return random.choice(VARIABLES)
        case Kind.MODEL:
            return random.choice(("gpt2", "gpt2", *model_specs()))
        case Kind.INTEGERS | Kind.PARTITION:
            return random.choice(("1,1", "2,2", "6,6", "3,3,3,3", "1,2,3", "uniform", "memory", "type:layer"))
        case Kind.DEVICE_MAP:
            return random.choice(("{0: 0-5, 1: 6-11}", "{0: 0-11}", "{0: 0-99999}", "{0: [embedding, 0-11, head]}"))
        case Kind.NAMES:
            return random.choice(("q_proj", "q_proj,v_proj", "core_attn", "core_attn,mlp", "all"))
        case Kind.TEXT:
            return random.choice(("x", "h100-80gb", "v100-16gb", "llama", "transformers", "2.6", "\x1b[31mred"))
    if field.name in DEEP:
        return random.choice(("1", "2", "4", "12", "60"))
    return random.choice(LARGE if random.random() < 0.05 else USUAL)


def made(random: Random) -> Case:
    """One of the golden net's, with a few flags changed, taken out or added."""
    plan, known = random.choice(_seeds())
    flags = list(known)
    for _ in range(random.choice((0, 1, 1, 2, 3, 5))):
        at = random.randrange(len(flags)) if flags else 0
        change = random.random()
        if change < 0.15 and flags:
            del flags[at]
        elif change < 0.6 and flags and flags[at][0] in by_flag():
            flags[at] = (flags[at][0], _value(random, by_flag()[flags[at][0]]))
        else:
            name = random.choice((*by_flag(), "mbs", "gbs", "seq", "gpus", "dp", "tp", "pp", "zero", "optimizer"))
            flags = [*(one for one in flags if one[0] != name), (name, _value(random, by_flag()[name]))]
    also = random.choice(("", "", "", "again", "dp", "dp", "text", "detail", "init", "export"))
    return Case(plan, tuple(flags), also, random.choice((1, 10, 20, 40, 79, 80, 100, 200)))


def estimated(case: Case) -> object:
    """The command, and what its answer must keep to."""
    done = ended("estimate", *case.arguments, "--json", "--no-records")
    if done.code > 1:
        raise refused(done)
    answer = json.loads(done.out)
    _check(answer, done.code)
    match case.also:
        case "again":
            assert ended("estimate", *case.arguments, "--json", "--no-records") == done, "another answer"
        case "dp":
            _check_doubled(case, answer)
        case "text":
            _in_columns(case, "--no-records")
            _in_columns(case, "--no-records", "-v")
        case "detail":
            _in_columns(case, "--detail", "0", codes=(0,))
        case "init":
            ended("init", *words(case.flags), codes=(0, 2))
        case "export":
            ended("export", *case.arguments, "-q", codes=(0, 2))
    return done


def _in_columns(case: Case, *more: str, codes: tuple[int, ...] = (0, 1)) -> None:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(case.width)
    try:
        ended("estimate", *case.arguments, *more, codes=codes)
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


READINGS = ("requested_bytes", "allocated_bytes", "reserved_bytes", "device_bytes")


def _check(answer: Mapping[str, Any], code: int) -> None:
    """Categories sum to the total, readings are in order, nothing is negative, and the code is the verdict's."""
    assert code == (1 if answer["fits"] is False else 0), (code, answer["fits"])
    for number, stage in enumerate(answer["stages"]):
        assert stage["stage"] == number
        known = [stage[name] for name in READINGS if stage[name] is not None]
        assert known == sorted(known), f"out of order: {[stage[name] for name in READINGS]}"
        assert 0 <= stage["static_bytes"] <= known[min(1, len(known) - 1)], stage["static_bytes"]
        total = stage["allocated_bytes"] if stage["allocated_bytes"] is not None else stage["requested_bytes"]
        assert sum(stage["breakdown"].values()) == total, (sum(stage["breakdown"].values()), total)
        least = min([stage["parameters"], stage["host_bytes"], stage["nvme_bytes"], *stage["breakdown"].values()])
        assert least >= 0, f"negative: {stage}"
        beyond = [size for size in stage["beyond_allocated"].values() if size is not None]
        assert all(size >= 0 for size in beyond), beyond
        assert all(size >= 0 for size in stage["moments"].values() if size is not None), stage["moments"]
        if stage["device_bytes"] is not None:
            assert stage["allocated_bytes"] + sum(beyond) == stage["device_bytes"], beyond
    assert answer["peak_bytes"] >= max(stage["requested_bytes"] for stage in answer["stages"])


def _check_doubled(case: Case, answer: Mapping[str, Any]) -> None:
    """Twice the replicas need no more between iterations, on any stage, but for Megatron-FSDP's double buffers: they
    hold whole buckets, which end at a multiple of all ranks' chunks (``build_data_parallel_buffer_index``)."""
    plan = answer["plan"]
    if (plan["megatron"] or {}).get("fsdp_max_pool") or (plan["megatron"] or {}).get("fsdp_double_buffer"):
        return
    gpus, dp, gbs = plan["hardware"]["gpus"], plan["layout"]["dp"], plan["batch"]["gbs"]
    if not gpus or not dp or not gbs:
        return
    sizes = {"gpus": 2 * gpus, "dp": 2 * dp, "gbs": 2 * gbs}
    given = tuple(one for one in case.flags if one[0] not in ("gpus", "dp", "gbs", "accumulation"))
    changed = (*given, *((name, str(size)) for name, size in sizes.items()))
    double = ended("estimate", *case._replace(flags=changed).arguments, "--json", "--no-records")
    if double.code > 1:
        return
    other = json.loads(double.out)
    same = {**plan, "hardware": None, "layout": None, "batch": None}
    if {**other["plan"], "hardware": None, "layout": None, "batch": None} != same:
        return
    for one, two in zip(answer["stages"], other["stages"], strict=True):
        assert two["static_bytes"] <= one["static_bytes"], (one["stage"], one["static_bytes"], two["static_bytes"])


# -- files --------------------------------------------------------------------------------------------------


@cache
def _texts() -> tuple[str, ...]:
    plans = [path.read_text(encoding="utf-8") for name, path in examples().items() if name not in LONG]
    return (*plans, ended("init", "--model", "gpt2").out, ended("init", "--model", "llama-3-8b", "--gpus", "8").out)


def made_file(random: Random) -> str:
    return mutated(random, random.choice(_texts()), others=_texts())


def estimated_file(case: str) -> object:
    with TemporaryDirectory(prefix="memplan-fuzz-") as folder:
        path = Path(folder) / "plan.yaml"
        path.write_bytes(case.encode(errors="surrogatepass"))
        done = ended("estimate", str(path), "--json", "--no-records")
    if done.code > 1:
        raise refused(done)
    _check(json.loads(done.out), done.code)
    return done


TARGETS = (
    Target("estimates", made, estimated, lambda case: f"memplan estimate {shlex.join(case.arguments)}  ({case.also})"),
    Target("estimate-files", made_file, estimated_file),
)
