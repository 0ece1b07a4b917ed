"""Models of transformers under ``torch.compile`` that ship with memplan, learnt from torch's own Inductor at the sizes
of some plans: writes ``memplan/compiled``. Needs the torch and transformers that the tests pin, no GPU; about a minute
of a processor for each.

python -m benchmarks.compiled_models [NAME]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from memplan.frameworks.plain.compiled import learn, settings_of
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.trace.cache import built_in_path, written

ALONE: Mapping[str, str] = {"framework": "single", "torch-compile": "true"}
TRAINER = {"trainer": "transformers", "autocast": "true", "mbs": "1", "seq": "4096"}
LOADED = {**TRAINER, "autocast-parameters": "bf16"}
"""Over parameters as transformers 5 loads them from a checkpoint in bf16."""
REPLICAS = {"framework": "ddp", "gpus": "8"}
SHARDED = {"framework": "fsdp", "gpus": "8"}
EIGHT = {"model": "llama-3-8b", "mbs": "1", "seq": "4096", **SHARDED}
REGIONS = {"compile-regions": "true"}
PLANS: tuple[Mapping[str, str], ...] = (
    {"model": "llama-3.2-1b", "mbs": "2", "seq": "4096"},
    {"model": "llama-3-8b", **TRAINER},
    {"model": "llama-3-8b", **TRAINER, "recompute": "full"},
    {"model": "qwen3-8b", **TRAINER},
    {"model": "mistral-7b-v0.3", "mbs": "1", "seq": "2048"},
    {"model": "llama-3-8b", "mbs": "1", "seq": "4096"},
    {"model": "llama-3-8b", **LOADED},
    {"model": "llama-3-8b", **LOADED, "recompute": "full"},
    *({"model": name, **LOADED} for name in ("llama-3.2-1b", "mistral-7b-v0.3", "qwen2.5-7b", "qwen3-8b")),
    {"model": "llama-3.2-1b", **REPLICAS, "mbs": "2", "seq": "4096"},
    *({"model": name, **LOADED, **REPLICAS} for name in ("llama-3.2-1b", "llama-3.2-3b")),
    *({**EIGHT, **regions, **recompute} for regions in ({}, REGIONS) for recompute in ({}, {"recompute": "full"})),
    *({**EIGHT, "model": name} for name in ("llama-3.2-1b", "mistral-7b-v0.3")),
)
"""Flags of the plans that are learnt."""


def plan_of(flags: Mapping[str, str]) -> ResolvedPlan:
    return resolve(read_plan(None, {**ALONE, **flags}).plan)


def main(names: list[str]) -> None:
    for plan in map(plan_of, PLANS):
        if not names or plan.model.name in names:
            settings = settings_of(plan)
            path = built_in_path(plan.model.name, settings)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(written(settings, learn(plan)))
            print(path, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
