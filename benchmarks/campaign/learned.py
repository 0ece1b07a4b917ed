"""An architecture without a recipe: learnt here, estimated from that, and run.

python -m benchmarks.campaign.learned [--device cpu]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from memplan.estimate import estimate
from memplan.plan.read import read_plan
from memplan.trace.run import planned

from .readings import Reading, answer

ROOT = Path(__file__).resolve().parents[2]
LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_hidden_layers": 8}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 6}
FLAGS = {"framework": "single", "dtype": "bf16"}
LARGE_BATCH, SMALL_BATCH = {"mbs": "4", "seq": "2048"}, {"mbs": "2", "seq": "64"}
WARMUP, STEPS = 2, 2


def config(sizes: dict[str, int], vocab: int) -> dict[str, Any]:
    """StableLM's, of which memplan has no recipe."""
    heads = {"num_key_value_heads": sizes["num_attention_heads"]}
    return {"model_type": "stablelm", "vocab_size": vocab, "max_position_embeddings": 4096, **sizes, **heads}


def learn(flags: dict[str, str]) -> None:
    """``RuntimeError`` with the command's own words where it cannot be learnt."""
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    command = [sys.executable, "cli.py", "trace", "--learn", "-q", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())


def ran(flags: dict[str, str], device: str) -> dict[str, int]:
    """Readings of a few iterations, by name."""
    from memplan.trace.surroundings import Surroundings
    from memplan.trace.worker import traced_job, training_of
    from memplan.validate.clean import measured
    from memplan.validate.worker import footprint_of

    job = planned(None, flags).job
    within = Surroundings(fake=False, device=device, warmup=WARMUP)
    found: dict[str, int] = {}
    if device == "cuda":
        built = training_of(job, within)
        clean = measured(built, within, STEPS, 0, lambda: None, lambda what: None, communicates=False)
        found = {"allocated": clean.allocated, "reserved": clean.reserved, "static": clean.static}
        gc.collect()
    footprint = footprint_of(traced_job(job, within), None)
    return {"requested": footprint.peak, **found}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    sizes, vocab, batch = (LARGE, 100_352, LARGE_BATCH) if device == "cuda" else (SMALL, 512, SMALL_BATCH)
    with tempfile.TemporaryDirectory() as place:
        os.environ["MEMPLAN_CACHE"] = place
        path = Path(place) / "config.json"
        path.write_text(json.dumps(config(sizes, vocab)), encoding="utf-8")
        flags = {**FLAGS, **batch, "model": str(path)}
        learn(flags)
        (stage,) = estimate(read_plan(None, {**flags, **_gpu(device)}, traced=True).plan).stages
        measured = ran(flags, device)
    known = {"requested": stage.requested, "allocated": stage.allocated, "reserved": stage.reserved}
    known["static"] = stage.static
    print(json.dumps(answer([Reading(name, "bytes", size, known[name]) for name, size in measured.items()])))
    return 0


def _gpu(device: str) -> dict[str, str]:
    """Its name and the installed torch, by which workspaces are known."""
    if device != "cuda":
        return {}
    from importlib.metadata import version

    from memplan.validate.devices import devices, gpu_of, visible

    shown = visible(devices(), os.environ)[0]
    gpu = gpu_of(shown.name, shown.total)
    torch = ".".join(version("torch").split("+")[0].split(".")[:2])
    return {"torch": torch, **({} if gpu is None else {"gpu": gpu})}


if __name__ == "__main__":
    raise SystemExit(main())
