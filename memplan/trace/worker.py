"""What runs a job: ``traced_job`` and ``training_of`` in this process, and in one of its own ``python -m
memplan.trace.worker traced|learned``, with JSON on standard input and output, which traces a job or learns an
architecture.

Some operators on fake tensors of another device end the whole process on a CPU-only build; whoever started this
one sees it die. What libraries print goes to standard error.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

from .job import Job
from .recording import Traced

if TYPE_CHECKING:
    from .step import Training
    from .surroundings import Surroundings
    from .torchtitan_step import PipelineTraining

    AnyTraining: TypeAlias = Training | PipelineTraining


def main(arguments: list[str]) -> int:
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    gc.disable()  # while torch and transformers are imported, of which nothing is garbage
    with answer:
        json.dump(answered(WORK[arguments[0]], json.load(sys.stdin)), answer)
    return 0


def answered(work: Work, data: Mapping[str, Any]) -> dict[str, Any]:
    """What was found; or ``error`` and where it happened; or ``lacking``: the package that cannot be imported, why."""
    job = Job.from_json(data["job"])
    needed = ("torch",) if job.torchtitan is not None else ("torch", "transformers")
    try:
        versions = {package: imported(package).__version__ for package in needed}
    except NotImportableError as error:
        return {"lacking": error.args}

    from .models import UnknownModelError
    from .places import UntraceableError, explained
    from .structure import UnfitError

    gc.freeze()  # a trace looks for garbage twice: not among all that was imported
    gc.enable()
    try:
        _check_attention(job)
        return work(job, data, versions)
    except UnfitError as error:
        return {"error": f"cannot be written as polynomials: {error}"}
    except (UnknownModelError, UntraceableError) as error:
        return {"error": f"cannot be traced: {error}"}
    except Exception as error:  # whatever a model's code raises is the user's to read
        return {"error": f"cannot be traced: {explained(error)}"}


def _check_attention(job: Job) -> None:
    """``UntraceableError`` where transformers' model has no ``scaled_dot_product_attention``, which it refuses."""
    if job.torchtitan is not None or job.attention != "flash":
        return
    from .models import config_of, model_class
    from .places import UntraceableError

    model: Any = model_class(config_of(job))
    if not model._supports_sdpa:
        raise UntraceableError(f"transformers' {model.__name__} takes none of PyTorch's kernels: --attention eager")


class NotImportableError(Exception):
    """A package, and why it cannot be imported."""


def imported(package: str) -> Any:
    try:
        return import_module(package)
    except (ImportError, OSError) as error:
        raise NotImportableError(package, str(error).partition("\n")[0]) from error


def traced_job(job: Job, within: Surroundings) -> Traced:
    """A recorded step of the job. torchtitan's needs a newer torch than others do, and is imported where it runs."""
    if job.torchtitan is not None:
        from .torchtitan_step import SUBSTITUTIONS, traced_torchtitan

        return replace(traced_torchtitan(job, within=within), substitutions=SUBSTITUTIONS)
    from .step import traced_step
    from .substitutions import SUBSTITUTIONS as OF_TRANSFORMERS

    with copied_fakes(), asked_of_cuda(within.device), as_loaded(job):
        return replace(traced_step(job, within=within), substitutions=OF_TRANSFORMERS)


@contextmanager
def copied_fakes() -> Iterator[None]:
    """``copy.deepcopy`` of a fake tensor, as peft's of modules that are trained whole, has a storage of which every
    view is another one in torch 2.13; a clone has not."""
    from unittest.mock import patch

    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    def cloned(one: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        made = one.detach().clone()
        memo[id(one)] = torch.nn.Parameter(made, one.requires_grad) if isinstance(one, torch.nn.Parameter) else made
        return memo[id(one)]  # type: ignore[no-any-return]

    with patch.object(FakeTensor, "__deepcopy__", cloned, create=True):
        yield


@contextmanager
def as_loaded(job: Job) -> Iterator[None]:
    """Parameters that ``from_pretrained`` keeps in fp32 beside others in 16 bits, such as routers' weights, are so in
    the model that is made (transformers 5.23, ``modeling_utils.py``: ``_keep_in_fp32_modules_strict``); not those that
    it keeps so beside fp16 alone (``_get_dtype_plan``). ``fully_shard``'s are as its plan says."""
    from unittest.mock import patch

    step: Any = import_module("memplan.trace.step")
    made = step.made

    def made_as_loaded(job: Job, *, on_meta: bool = False) -> Any:
        model: Any = made(job, on_meta=on_meta)
        kept = "|".join(rf"(^|\.){one}($|\.)" for one in sorted(model._keep_in_fp32_modules_strict or ()))
        for name, parameter in model.named_parameters() if kept else ():
            if re.search(kept, name) and parameter.is_floating_point():
                parameter.data = parameter.data.float()
        return model

    if job.fsdp is not None or job.dtype == "fp32":
        yield
        return
    with patch.object(step, "made", made_as_loaded):
        yield


@contextmanager
def asked_of_cuda(device: str) -> Iterator[None]:
    """``torch.is_autocast_enabled()`` of no device asks CUDA's, as peft's layers of quantised weights do
    (``requires_conversion`` in ``tuners/lora/bnb.py``): autocast of ``device`` is in its place."""
    from unittest.mock import patch

    import torch

    of_device = torch.is_autocast_enabled

    def asked(*devices: str) -> bool:
        return of_device(*(devices or (device,)))

    with patch.object(torch, "is_autocast_enabled", asked):
        yield


def training_of(job: Job, within: Surroundings) -> AbstractContextManager[AnyTraining]:
    """The job's model on its rank, with its optimizer, before the first iteration; nothing looks on."""
    if job.torchtitan is not None:
        from .torchtitan_step import torchtitan_training_of

        return torchtitan_training_of(job, within)
    from .step import transformers_training_of

    return transformers_training_of(job, within)


def evaluated_step(job: Job) -> Traced:
    """A step of transformers' with an evaluation behind it. 4-bit weights stay as they are in it: that ``Linear4bit``
    packs them anew is for CPUs with AVX-512 alone (bitsandbytes 0.50, ``nn/modules.py``)."""
    from unittest.mock import patch

    from .gathering import gathering
    from .step import traced_step

    is_quantised = job.tuned is not None and job.tuned.four_bit is not None
    packs = patch("bitsandbytes.nn.modules.has_avx512bf16", lambda: False) if is_quantised else nullcontext()
    gathers = gathering() if job.gathers else nullcontext()
    with packs, copied_fakes(), asked_of_cuda("cpu"), as_loaded(job), gathers:
        return traced_step(job, evaluates=True)


def traced(job: Job, data: Mapping[str, Any], versions: dict[str, str]) -> dict[str, Any]:
    """What was traced, and what was put in CUDA's place."""
    from .surroundings import FAKE

    return {**versions, **traced_job(job, FAKE).to_json()}


def learned(job: Job, data: Mapping[str, Any], versions: dict[str, str]) -> dict[str, Any]:
    """The fit up to sequences of ``longest`` tokens, and a traced step to compare it with."""
    from .comparison import compared
    from .periods import learn

    traces = 0

    def trace(one: Job) -> Traced:
        nonlocal traces
        print(PROGRESS, traces, max(USUAL, traces + 1), file=sys.stderr, flush=True)
        traces += 1
        gc.collect()
        gc.freeze()  # nor among what was traced before
        return evaluated_step(one)

    fit, whole, point = learn(job, trace, data["longest"])
    points = {one.name: one.traced for one in compared(whole, None).points}
    return {"fit": {**fit.to_json(), **versions}, "point": point, "points": points, "traces": traces}


def compiled(job: Job, data: Mapping[str, Any], versions: dict[str, str]) -> dict[str, Any]:
    """What ``torch.compile`` makes of the whole model, or of each part between hooks."""
    from . import compiled_model, compiled_parts, compiled_replica

    def report(done: int) -> None:
        print(PROGRESS, done, max(3, done + 1), file=sys.stderr, flush=True)

    if job.fsdp is not None:
        return {**versions, "compiled": compiled_parts.learnt(job, regions=data["regions"]).to_json()}
    depth = (compiled_model if job.ddp is None else compiled_replica).depth_of
    found = compiled_model.learnt(job, data["layers"], report, depth)
    return {**versions, "compiled": found.to_json()}


PROGRESS = "memplan-progress"
"""What a line on standard error begins with that says how many steps were traced, and of how many, as far as is
known."""
USUAL = 22
"""Steps that are traced of an architecture whose layers repeat and whose step is one for all lengths."""

Work: TypeAlias = Callable[[Job, Mapping[str, Any], dict[str, str]], dict[str, Any]]
WORK: Mapping[str, Work] = {"traced": traced, "learned": learned, "compiled": compiled}

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
