"""How fast memplan is: plans in process, events in the allocator, parts of a search, the command as a cold process, and
user seconds of whole answers as multiples of what it imports.

    python benchmarks/speed.py [--runs 10] [--traces]

Times depend on the machine, so they are read beside those of ``python -c pass`` from the same run.
The process runs with compiled byte code, as an installed package has it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.search import LARGE, answering, cutting, searching  # noqa: E402
from benchmarks.start import AIMS, COMMANDS, lines, per_layer  # noqa: E402
from memplan.allocator.caching import AllocatorSettings  # noqa: E402
from memplan.allocator.limited import replay_within  # noqa: E402
from memplan.allocator.memory import DeviceMemory  # noqa: E402
from memplan.allocator.replay import replay  # noqa: E402
from memplan.estimate import estimate, fold, programs_of  # noqa: E402
from memplan.frameworks.plain import programs as plain  # noqa: E402, F401 (imported here, so that no plan pays for it)
from memplan.layers.module import Options  # noqa: E402
from memplan.plan.plan import Plan  # noqa: E402
from memplan.plan.read import read_plan  # noqa: E402
from memplan.plan.resolve import resolve  # noqa: E402
from memplan.plan.traced_spec import MEANINGLESS, TracedSpec  # noqa: E402
from memplan.tape.events import Hold  # noqa: E402
from tests.oracle.caching_allocator import CachingAllocator  # noqa: E402

EXAMPLE = "bigscience-104b-250k"
LARGE_FLAGS = tuple(part for name, value in LARGE.items() for part in (f"--{name}", value))
MEMPLAN = ("-c", "from memplan.cli import main; raise SystemExit(main())")


# -- processes ----------------------------------------------------------------------------------------


def process_times(arguments: Sequence[str], runs: int, cache: str) -> list[float]:
    """Seconds of each run of a Python process, after one that compiles what is imported."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    times = []
    for _ in range(runs + 1):
        start = perf_counter()
        done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, check=False)
        times.append(perf_counter() - start)
        if done.returncode not in (0, 1):  # 1: it does not fit
            raise RuntimeError(done.stderr.decode())
    return times[1:]


def processes(runs: int) -> Iterator[tuple[str, str]]:
    commands = {
        "python -c pass": ("-c", "pass"),
        "memplan --version": (*MEMPLAN, "--version"),
        f"memplan estimate {EXAMPLE} --json": (*MEMPLAN, "estimate", EXAMPLE, "--json"),
        "memplan suggest-partition, 16,384 GPUs": (*MEMPLAN, "suggest-partition", *LARGE_FLAGS, "--json"),
    }
    empty = 0.0
    with tempfile.TemporaryDirectory() as cache:
        for name, arguments in commands.items():
            times = process_times(arguments, runs, cache)
            empty = empty or median(times)
            ratio = median(times) / empty
            yield name, f"best {min(times):.3f} s, median {median(times):.3f} s, {ratio:.1f} x an empty process"


# -- plans in process ---------------------------------------------------------------------------------


def distinct_plans() -> Iterator[Plan]:
    """480 resolved plans of llama-3-405b, no two alike: what a search would ask for."""
    for framework, gpus in (("single", 1), ("ddp", 8)):
        flags = {"model": "llama-3-405b", "framework": framework, "gpus": str(gpus), "dtype": "bf16", "gbs": "1024"}
        base = resolve(read_plan(None, {**flags, "attention": "flash"}).plan)
        sizes = product((1, 2, 4, 8), (2048, 4096, 8192), (42, 63, 84, 105, 126), ("none", "full"), ("adamw", "sgd"))
        for mbs, seq, layers, recompute, optimizer in sizes:
            grouped = 1 if recompute == "full" else None
            sections = {
                "model": base.model.model_copy(update={"layers": layers}),
                "batch": base.batch.model_copy(update={"mbs": mbs, "seq": seq}),
                "recompute": base.recompute.model_copy(update={"mode": recompute, "layers": grouped}),
                "optimizer": base.optimizer.model_copy(update={"name": optimizer}),
            }
            yield base.model_copy(update=sections)


def distinct_pipelines() -> Iterator[Plan]:
    """1,152 resolved plans of llama-3-405b on Megatron-Core at TP8 PP16 VPP8, no two alike."""
    flags = {
        "model": "llama-3-405b", "framework": "megatron", "tp": "8", "pp": "16", "vpp": "8", "dp": "8", "zero": "1",
        "count_embedding": "true", "count_loss": "true", "sequence_parallel": "true", "dtype": "bf16", "seq": "8192",
        "gbs": "1024", "gpu": "h100-80gb",
    }  # fmt: skip
    base = resolve(read_plan(None, {name.replace("_", "-"): value for name, value in flags.items()}).plan)
    sizes = product(
        (1, 2), (4096, 8192), (32, 64, 128), ("none", "selective", "full"), (4, 8, 16, 32), (False, True),
        (False, True), (1, 2),
    )  # fmt: skip
    for mbs, seq, microbatches, recompute, dp, fused, precise, instances in sizes:
        modules = ("core_attn",) if recompute == "selective" else None
        layers = 1 if recompute == "full" else None
        sections = {
            "batch": base.batch.model_copy(update={"mbs": mbs, "seq": seq, "gbs": mbs * microbatches * dp}),
            "layout": base.layout.model_copy(update={"dp": dp}),
            "hardware": base.hardware.model_copy(update={"gpus": 128 * dp}),
            "recompute": base.recompute.model_copy(update={"mode": recompute, "modules": modules, "layers": layers}),
            "optimizer": base.optimizer.model_copy(update={"precision_aware": precise}),
            "megatron": base.megatron.model_copy(
                update={"gradient_accumulation_fusion": fused, "distributed_optimizer_instances": instances}
            ),
        }
        yield base.model_copy(update=sections)


def seconds(function: Callable[[Plan], object], plans: Sequence[Plan]) -> float:
    start = perf_counter()
    for plan in plans:
        function(plan)
    return perf_counter() - start


def in_process() -> Iterator[tuple[str, str]]:
    plans = list(distinct_plans())
    cold = seconds(fold, plans)  # the first use in this process: every layer is computed, once
    warm = min(seconds(fold, plans) for _ in range(3))
    yield "fold llama-3-405b, cold caches", f"{len(plans) / cold:,.0f} plans/s ({len(plans)} distinct plans)"
    yield "fold llama-3-405b, warm caches", f"{len(plans) / warm:,.0f} plans/s"
    pipelines = list(distinct_pipelines())
    cold = seconds(fold, pipelines)
    warm = min(seconds(fold, pipelines) for _ in range(3))
    name = "fold llama-3-405b, tp 8, pp 16, vpp 8"
    yield f"{name}, cold caches", f"{len(pipelines) / cold:,.0f} plans/s ({len(pipelines)} distinct plans)"
    yield f"{name}, warm caches", f"{len(pipelines) / warm:,.0f} plans/s"
    yield "full estimate of one of them", f"{2 / seconds(estimate, pipelines[:2]):,.2f} plans/s"
    few = plans[:: len(plans) // 10]
    yield "full estimate llama-3-405b", f"{len(few) / seconds(estimate, few):,.1f} plans/s"
    job = read_plan(EXAMPLE).plan
    yield f"full estimate {EXAMPLE}, 32 stages", f"{5 / seconds(estimate, [job] * 5):,.1f} plans/s"


# -- traced architectures -----------------------------------------------------------------------------


def traced_plans() -> tuple[list[Plan], list[Plan]]:
    """384 resolved plans of llama-3-8b, no two of one size; and the same of its configuration as if it had no recipe,
    which is learnt from traces here."""
    from memplan.trace.job import config_of_spec
    from memplan.trace.learned import learned

    flags = {"model": "llama-3-8b", "framework": "single", "dtype": "bf16", "gbs": "5040", "seq": "8192"}
    base = resolve(read_plan(None, flags).plan)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MEMPLAN_CACHE"] = folder
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config_of_spec(base.model)), encoding="utf-8")
        spec = TracedSpec(
            **{**MEANINGLESS, "layers": base.model.layers, "positions_max": 8192},
            name="llama-3-8b, traced", family="llama", source=str(path),
            config=config_of_spec(base.model), counted=True, reason="", digest="llama-3-8b",
        )  # fmt: skip
        traced = base.model_copy(update={"model": spec})
        learned(traced)
        fold(traced)
    sizes = [{"mbs": mbs, "seq": seq} for mbs, seq in product((1, 2, 3, 4, 5, 6, 7, 8), range(128, 6272, 128))]
    batches = [base.batch.model_copy(update=size) for size in sizes]
    return tuple([one.model_copy(update={"batch": batch}) for batch in batches] for one in (base, traced))  # type: ignore[return-value]


def traces() -> Iterator[tuple[str, str]]:
    recipes, traced = traced_plans()
    fold(recipes[0].model_copy(update={"batch": recipes[0].batch.model_copy(update={"seq": 64})}))
    rates = {}
    for name, plans in (("recipe", recipes), ("traces", traced)):
        rates[name] = len(plans) / seconds(fold, plans), len(plans) / min(seconds(fold, plans) for _ in range(3))
        cold, warm = rates[name]
        yield f"fold llama-3-8b from {name}", f"{cold:,.0f} plans/s each size for the first time, {warm:,.0f} again"
    ratios = [ours / theirs for ours, theirs in zip(rates["traces"], rates["recipe"], strict=True)]
    yield "from traces / from recipe", f"{ratios[0]:.1f} x the first time, {ratios[1]:.1f} x again"


# -- the allocator ------------------------------------------------------------------------------------


LIMITED: tuple[dict[str, str], ...] = (
    {"framework": "single", "recompute": "full", "mbs": "4", "gbs": "4"},
    {"framework": "fsdp", "gpus": "8"},
    {"framework": "deepspeed", "zero": "3", "gpus": "8"},
    {"framework": "megatron", "tp": "4", "pp": "4", "gpus": "64", "gbs": "128"},
    {"framework": "megatron", "tp": "2", "pp": "4", "vpp": "2", "gpus": "64", "gbs": "128"},
)
"""Plans of Llama 3 8B whose replay within a device's memory is timed."""


def limited_ratio() -> float:
    """The time of a replay within as much memory as it reserves, against that of a replay without a limit."""
    return median(_limited_ratio(flags) for flags in LIMITED)


def _limited_ratio(flags: dict[str, str]) -> float:
    plan = resolve(read_plan(None, {"model": "llama-3-8b", "gpu": "h100-80gb", **flags}).plan)
    program, settings = programs_of(plan, Options(kernel_workspaces=True))[0], AllocatorSettings()
    (unlimited,) = replay((program,), settings, ())
    memory = DeviceMemory(unlimited.reserved)

    def best(run: Callable[[], object]) -> float:
        return min(seconds(lambda _: run(), [plan]) for _ in range(7))

    return best(lambda: replay_within(program, settings, (), memory)) / best(lambda: replay((program,), settings, ()))


def allocator() -> Iterator[tuple[str, str]]:
    """The example's 32 stages replayed, and one event of a layer's tensors: half of them allocate, half free."""
    plan = resolve(read_plan(EXAMPLE).plan)
    programs = programs_of(plan, Options())
    best = min(seconds(lambda _: replay(programs, AllocatorSettings(), ()), [plan]) for _ in range(3))
    yield f"replay {EXAMPLE}", f"{1e3 * best:.1f} ms for 32 stages"
    yield (
        "  within memory that just suffices",
        f"{limited_ratio():.2f} times as long, in the median of {len(LIMITED)} plans",
    )
    tape = programs[1].spans[2].module.steady.backward
    sizes = [event.bytes for event in tape if isinstance(event, Hold)]
    pool, rounds = CachingAllocator(), 400
    start = perf_counter()
    for _ in range(rounds):
        for key, size in enumerate(sizes):
            pool.allocate(key, size)
        for key in range(len(sizes)):
            pool.free(key)
    each = (perf_counter() - start) / (2 * rounds * len(sizes))
    yield "allocator", f"{1e6 * each:.2f} us an event"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="how fast an estimate is")
    parser.add_argument("--runs", type=int, default=10, help="runs of each process")
    parser.add_argument("--traces", action="store_true", help="also learn llama-3-8b from traces (torch; a minute)")
    given = parser.parse_args(arguments)
    runs = max(1, given.runs)
    ratios = (lines(COMMANDS, AIMS, runs), per_layer(-(-runs // 3)), answering(-(-runs // 3)))
    measures = (in_process(), allocator(), cutting(), searching(), processes(runs), *ratios)
    for measure in (*measures, traces()) if given.traces else measures:
        for name, result in measure:
            print(f"{name:<80} {result}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
