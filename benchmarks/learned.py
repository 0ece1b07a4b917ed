"""The fits that ship with memplan, of architectures without a recipe: learnt here from transformers' own code.

python -m benchmarks.learned [MODEL …] [--again] [--renew] [--check] [--zero-3] [--fp32]
python -m benchmarks.learned [MODEL …] --adapters [--dropout] [--again]

A model is an entry of ``memplan/learned/models.json`` with its ``config.json`` beside it. What is there already is
left alone, unless ``--again``; files of other settings than a plan asks for today are removed. ``--renew`` takes
those that another tracer made, traces each model at a dozen points that it was not learnt at, and writes the fit
anew where they are what it says, with what operators do; else it learns it. ``--zero-3`` learns what DeepSpeed's
stage 3 needs, too, and ``--fp32`` parameters in fp32, both of which few models ship with. ``--adapters`` learns LoRA
of any rank on models whose fits are there (``adapted``): peft's own targets, else queries and values, and all linear
layers; with ``--dropout``, or where it is there already, dropout on the input of adapters, too. ``--check`` learns
nothing: it counts the parameters of each model as transformers makes it, and names fits that another tracer made.
``pytest -m slow tests/trace/test_built_in.py`` traces each beside its fit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Generator, Iterator
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

from memplan.frameworks.fsdp.learned import ENDS, cast_of
from memplan.plan.errors import PlanError
from memplan.plan.library import LEARNED, LearnedModel, learned_models
from memplan.plan.lora import ALL_LINEAR, default_targets
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.trace import cache
from memplan.trace.fit import LAYER, Fit, Piece
from memplan.trace.job import Job
from memplan.trace.learned import fit_by_traces, fit_of, forget, job_of, kept_as, longest_of, settings_of
from memplan.trace.structure import UnfitError
from memplan.trace.work import NoWorkError

VARIANTS: tuple[dict[str, str], ...] = ({"recompute": "full"}, {})
"""Flags of the plans that are learnt of every model: bf16 and the flash kernel, without recompute and with it."""
SHARDED = {"framework": "fsdp", "dp": "2"}
"""And besides, where ``fully_shard`` casts what layers are handed."""
GATHERED = {"framework": "deepspeed", "zero": "3", "dp": "2"}
"""And where ZeRO-3's hooks run, of models that it was asked for, or is there already."""
WIDE = {"dtype": "fp32"}
"""And in fp32, of models that it was asked for, or is there already: small ones, which many train so."""
LONGEST = 131072
"""Tokens of a sequence up to which a fit goes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="all that are listed if left out")
    parser.add_argument("--again", action="store_true", help="also what is there already")
    parser.add_argument("--renew", action="store_true", help="what another tracer made, checked beside traces")
    parser.add_argument("--zero-3", action="store_true", help="DeepSpeed's stage 3, too")
    parser.add_argument("--fp32", action="store_true", help="parameters in fp32, too")
    parser.add_argument("--adapters", action="store_true", help="LoRA on what is there")
    parser.add_argument("--dropout", action="store_true", help="with --adapters: dropout above 0, too")
    parser.add_argument("--check", action="store_true", help="count parameters, learn nothing")
    asked = parser.parse_args()
    models = [learned_models()[name] for name in asked.models or learned_models()]
    work = (
        checked
        if asked.check
        else partial(adapted, again=asked.again, drops=asked.dropout)
        if asked.adapters
        else partial(learnt, again=asked.again, renew=asked.renew, gathers=asked.zero_3, wide=asked.fp32)
    )
    wrong = [line for one in models for line in work(one)]
    print(*wrong, sep="\n", end="\n" * bool(wrong), file=sys.stderr)
    return 1 if wrong else 0


def learnt(model: LearnedModel, *, again: bool, renew: bool, gathers: bool, wide: bool) -> Iterator[str]:
    """Writes the fits of ``model``; what could not be learnt, in words."""
    wanted = set()
    recomputed: Fit | None = None
    cast = ({**SHARDED, **one} for one in VARIANTS if is_cast(model, one))
    gathered = ({**GATHERED, **one} for one in VARIANTS)
    further = [(one, gathers) for one in gathered] + [({**WIDE, **one}, wide) for one in VARIANTS]
    asked = (one for one, is_asked in further if is_asked or paths_of(model, plan_of(model, one)))
    for flags in chain(VARIANTS, cast, asked):
        words = " ".join([model.name, *flags.values()])
        plan = plan_of(model, flags)
        job = job_of(plan)
        there = paths_of(model, plan)
        if there and renew:
            known = None if job.recompute else recomputed
            there = [path for path in there if not cache.is_stale(path) or renewed(path, job, words, known)]
            recomputed = fit_in(there[0]) if there and job.recompute else recomputed
        if there and not again:
            wanted.update(there)
            continue
        started = time.monotonic()
        try:
            fit, traces = fit_by_traces(job, plan, min(longest_of(plan), LONGEST), model.name)
        except PlanError as error:
            yield f"{words}: {error}"
            return
        settings = kept_as(job, fit)
        path = cache.built_in_path(model.name, settings)
        path.write_bytes(cache.written(settings, fit))
        wanted.add(path)
        took = f"{traces} traces, {time.monotonic() - started:.0f} s, {path.stat().st_size:,} bytes"
        domains = "; ".join(str(one.domain) for one in fit.pieces)
        print(f"{words}: {took}: {domains}; {', '.join(map(str, fit.verified))} layers", flush=True)
    for path in (LEARNED / model.name).glob(f"*{cache.SUFFIX}"):
        if path not in wanted:
            path.unlink()


QUERIES_AND_VALUES = (("q_proj", "v_proj"), ("query", "value"), ("q_lin", "v_lin"), ("q", "v"))
"""What architectures call the linear layers that LoRA's paper adapts."""


def adapted(model: LearnedModel, *, again: bool, drops: bool) -> Iterator[str]:
    """Writes the fits of ``model`` with adapters; what could not be learnt, in words."""
    path = cache.together_path(model.name, settings_of(job_of(plan_of(model, {})), None))
    there = cache.shipped_together(path)
    kept = {} if again else dict(there)
    drops = drops or any(one["settings"]["tuned"]["dropout"] for one in there.values())
    for targets, variant, dropout in product(targets_of(model), VARIANTS, ("0", "0.1")[: 1 + drops]):
        flags = {"lora-rank": "8", "lora-targets": ",".join(targets), "lora-dropout": dropout, **variant}
        yield from adapted_to(model, {**flags, "lora-dtype": "fp32"}, variant, kept)
        flags["lora-dtype"] = "bf16"
        fit = yield from adapted_to(model, flags, variant, kept)
        others = [SHARDED] if fit is not None and is_cast_piece(fit.pieces[0], "bf16") else []
        others += [GATHERED] if paths_of(model, plan_of(model, {**GATHERED, **variant})) else []
        for other in others:
            yield from adapted_to(model, {**other, **flags}, {**other, **variant}, kept)
        path.write_bytes(cache.written_together(kept))
    print(f"{model.name}: {len(kept)} fits with adapters, {path.stat().st_size:,} bytes", flush=True)


def adapted_to(
    model: LearnedModel, flags: dict[str, str], without: dict[str, str], kept: dict[str, dict[str, Any]]
) -> Generator[str, None, Fit | None]:
    """The fit of ``flags``, which is ``kept``, from that of the flags ``without`` adapters."""
    from .adapted import adapted_fit
    from .renewing import NotRenewedError

    job = job_of(plan_of(model, flags))
    for layers in (None, plan_of(model, flags).model.layers):
        if (there := kept.get(cache.digest_of(settings_of(job, layers)))) is not None:
            return Fit.from_json(there["fit"])
    started, words = time.monotonic(), " ".join([model.name, *flags.values()])
    try:
        fit, traces = adapted_fit(job, fit_of(plan_of(model, without)))
    except (PlanError, UnfitError, NotRenewedError, NoWorkError) as error:
        yield f"{words}: {error}"
        return None
    settings = kept_as(job, fit)
    kept[cache.digest_of(settings)] = cache.told(settings, fit)
    print(f"{words}: {traces} traces, {time.monotonic() - started:.0f} s", flush=True)
    return fit


def targets_of(model: LearnedModel) -> list[tuple[str, ...]]:
    """peft's, else queries and values; and all linear layers."""
    plan = plan_of(model, {})
    kinds = (kind for piece in fit_of(plan).pieces for kind in piece.kinds)
    names = {part for kind in kinds for one in kind.parameters for part in one.name.split(".")}
    usual = default_targets(plan.model) or next((one for one in QUERIES_AND_VALUES if names >= {*one}), None)
    return [*([usual] if usual is not None else []), (ALL_LINEAR,)]


def paths_of(model: LearnedModel, plan: ResolvedPlan) -> list[Path]:
    """Files that are there of ``plan``'s fit."""
    job = job_of(plan)
    asked = [cache.built_in_path(model.name, settings_of(job, layers)) for layers in (None, plan.model.layers)]
    return [path for path in dict.fromkeys(asked) if path.is_file()]


def fit_in(path: Path) -> Fit | None:
    data = cache.shipped(path)
    return Fit.from_json(data["fit"]) if data is not None else None


def renewed(path: Path, job: Job, words: str, recomputed: Fit | None) -> bool:
    """Whether the fit in ``path`` is what this tracer finds; it is written anew then."""
    from .renewing import NotRenewedError, renewed_fit

    data = cache.shipped(path)
    if data is None:
        return False
    started = time.monotonic()
    try:
        fit, traces = renewed_fit(job, Fit.from_json(data["fit"]), recomputed)
    except NotRenewedError as error:
        print(f"{words}: {error}: it is learnt anew", flush=True)
        return False
    path.write_bytes(cache.written(data["settings"], fit))
    print(f"{words}: renewed, {traces} traces, {time.monotonic() - started:.0f} s", flush=True)
    return True


def plan_of(model: LearnedModel, flags: dict[str, str]) -> ResolvedPlan:
    return resolve(read_plan(None, {"model": model.name, "framework": "single", **flags}, traced=True).plan)


def is_cast(model: LearnedModel, flags: dict[str, str]) -> bool:
    """Whether layers of ``model`` are handed tensors that ``fully_shard`` casts, by what was learnt without it."""
    forget()
    plan = plan_of(model, flags)
    return is_cast_piece(fit_of(plan).pieces[0], plan.precision.dtype)


def is_cast_piece(piece: Piece, dtype: str) -> bool:
    one_list = {name for _, names in piece.row for name in names if not name.startswith(LAYER)} <= ENDS
    return one_list and bool(cast_of(piece, piece.row, dtype))


def checked(model: LearnedModel) -> Iterator[str]:
    """What is not as it should be of ``model``, in words."""
    counted = parameters_of(model.configuration())
    if counted != model.parameters:
        yield f"{model.name}: transformers makes {counted:,} parameters, published are {model.parameters:,}"
    for suffix, flags in ((cache.SUFFIX, "--renew"), (cache.TOGETHER, "--adapters --again")):
        for path in sorted((LEARNED / model.name).glob(f"*{suffix}")):
            if cache.is_stale(path):
                renew = f"python -m benchmarks.learned {flags} {model.name}"
                yield f"{model.name}: {path.name} is of another tracer: {renew}"


def parameters_of(config: dict[str, Any]) -> int:
    """Of the model that transformers makes of ``config``, with its head; no memory is taken."""
    import torch
    from transformers import AutoConfig

    from memplan.trace.models import model_class

    made = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = model_class(made)._from_config(made)
    model.tie_weights()
    return sum(one.numel() for one in model.parameters())


if __name__ == "__main__":
    raise SystemExit(main())
