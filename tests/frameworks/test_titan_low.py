"""torchao's MXFP8 and NVFP4 in torchtitan's newest models, against torchao's own code as it ran on fake tensors
(``tests/oracle/titan_low.py``)."""

from __future__ import annotations

import gzip
import json
from functools import cache
from typing import Any

import pytest

from memplan.assumptions import assumptions
from memplan.estimate import programs_of
from memplan.frameworks.fsdp import programs as fsdp, titan_low
from memplan.frameworks.fsdp.titan_experts import cut_of_experts
from memplan.frameworks.fsdp.torchtitan import ActivationCheckpointing, recipes, torchtitan_model
from memplan.frameworks.fsdp.units import Sharding
from memplan.layers.autograd import Recorder
from memplan.layers.float8 import Float8
from memplan.layers.low_linear import MXFP8, NVFP4, Blocks
from memplan.layers.module import Options
from memplan.layers.torchtitan import Policy
from memplan.layers.work import Kernel, Product, Stream
from memplan.plan.errors import PlanError
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import ROUND, Category, Drop, Hold
from memplan.tape.program import fold_program

from ..layers.test_against_transformers import drops_sorted, named, sizes, without_scalars
from ..oracle.titan_low import CASES, RECORDED, Case
from . import test_fsdp_gpt_oss as gpt_oss, test_fsdp_muse as muse, test_fsdp_titan as titan

OF_PROCESS = 131072 + ROUND
"""NVFP4's workspace and matrix, which the stand-ins of its kernels do not make."""


@cache
def recorded() -> Any:
    return json.loads(gzip.decompress(RECORDED.read_bytes()))


def plan_of(case: Case) -> ResolvedPlan:
    if case.model == "deepseek":
        plan = titan.plan_of(case.sizes)
    elif case.model == "qwen3-moe":
        plan = gpt_oss.plan_of(case.sizes, case.shards, newest=True)
    else:
        model = {"llama": "llama-3-8b", "qwen3": "qwen3-8b"}[case.model]
        plan = muse.plan_of(case.sizes, case.shards, case.chunks, model=model, **{"fsdp-newest": "true"})
    low: dict[str, object] = {"fp4" if case.recipe == "nvfp4" else "fp8": case.recipe}
    names = "filter_fqns" if case.recipe.startswith("rowwise") else "fqns"
    changes: dict[str, dict[str, object]] = {
        "batch": {"gbs": case.sizes.b * case.shards},
        "layout": {"dp": case.shards, "ep": case.ranks},
        "hardware": {"gpu": "b200"},
        "precision": low,
        "loss": {"kind": "chunked", "chunks": case.chunks} if case.chunks else {},
        "fsdp": {"code": "torchtitan", "newest": True, names: case.fqns, "pad_multiple": case.pad or None},
    }
    return plan.model_copy(
        update={name: getattr(plan, name).model_copy(update=changed) for name, changed in changes.items()}
    )


@pytest.mark.parametrize("name", CASES)
def test_every_event(name: str) -> None:
    case, steps = CASES[name], recorded()[name]
    plan = plan_of(case)
    recompute = ActivationCheckpointing(case.recompute)  # type: ignore[arg-type]
    model = torchtitan_model(plan, Options(accumulates_in_place=False), recompute, ends_apart=True)
    cut = cut_of_experts(plan) if case.ranks > 1 else None
    program = fsdp.program(plan, model, Sharding(case.shards, divides=case.ranks > 1, experts=cut))
    modules = [span.module for span in program.spans for _ in span.names]
    forward = [event for module in modules for event in named(module, module.steady.forward)]
    backward = [event for module in modules[::-1] for event in named(module, module.first.backward)]
    assert drops_sorted(sizes(forward)) == drops_sorted(steps["forward"])
    assert drops_sorted(sizes(without_scalars(backward))) == drops_sorted(steps["backward"])
    folded, beside = fold_program(program), OF_PROCESS * (case.recipe == "nvfp4")
    assert folded.static == steps["before"] + beside
    assert folded.after_forward == steps["levels"][0] + beside
    assert 0 <= max(steps["peaks"][:2]) + beside - folded.backward_peak <= 2 * ROUND
    assert folded.step_peak == steps["peaks"][2] + beside


LLAMA = {"model": "llama-3-8b", "framework": "fsdp", "fsdp-code": "torchtitan", "fsdp-newest": "true", "gpus": "8"}
LLAMA |= {"gpu": "b200", "layers": "2", "seq": "4096", "mbs": "1", "loss": "chunked"}


def resolved(**flags: str) -> ResolvedPlan:
    return resolve(read_plan(None, {**LLAMA, **flags}).plan)


def saved(*, names: str, **flags: str) -> int:
    """Bytes between forward and backward that are more than in bf16, of layers whose names have a part of ``names``."""
    plain, low = (programs_of(resolved(**one), Options())[0] for one in ({}, {**flags, "fqns": names}))
    counts = []
    for program in (plain, low):
        block = next(span.module for span in program.spans if span.module.name == "layer")
        counts.append(
            sum(
                one.bytes * (1 if isinstance(one, Hold) else -1)
                for one in block.steady.forward
                if isinstance(one, (Hold, Drop)) and one.category is Category.ACTIVATIONS
            )
        )
    return counts[1] - counts[0]


def test_saved_by_hand() -> None:
    """Of the gate (n, k) = (14336, 4096) with t = 4096 tokens: MXFP8 saves nothing but the input, as bf16 does. NVFP4
    saves 4 bits of each element of the input and of the weight, 8 of every 16, and two maxima of 512 bytes; the input
    stays in bf16 for the other layer that reads it. With both of them, it does not."""
    t, n, k = 4096, 14336, 4096
    assert saved(names="feed_forward.w1", fp8="mxfp8") == 0
    own = (t * k + n * k) * 9 // 16 + 2 * ROUND
    assert saved(names="feed_forward.w1", fp4="nvfp4") == own
    assert saved(names="feed_forward.w1,feed_forward.w3", fp4="nvfp4") == 2 * own - 2 * t * k


def test_rows_of_experts_by_hand() -> None:
    """Of 4,096 tokens with 6 experts of 64 each, L = 24,576 rows and 128 more for every expert: what is saved of an
    expert's MLP is input, gate and up, (L, f) each in bf16, and their product; in MXFP8 a cast beside it is a byte for
    an element, and one for 32, whose rows and columns tensor cores read in tiles of 128 by 4."""
    flags = {"model": "deepseek-v2-lite", "fp8": "mxfp8", "fqns": "attention", "pad-multiple": "128"}
    plan = resolved(**flags)
    rows, h, f, e = 6 * 4096 + 64 * 128, 2048, 1408, 64
    block = recipes(plan).block("none", Options(), 1)
    held = [(one.name, one.bytes) for one in block.steady.forward if isinstance(one, Hold)]
    assert ("rows_padded", 2 * rows * h) in held
    assert ("experts_gate", 2 * rows * f) in held
    assert ("experts_gate_input_fp8", rows * h) in held
    assert ("experts_gate_input_scale", rows * h // 32) in held
    assert ("experts_gate_weight_fp8", e * f * h) in held
    assert ("experts_down_weight_scales", e * h * f // 32) in held
    back = [(one.name, one.bytes) for one in block.steady.backward if isinstance(one, Hold)]
    assert ("grad_experts_gate_scales", 1408 * (rows // 32 + 4 * e)) in back


def test_buffers_by_hand() -> None:
    """A seed and signs of every layer that is converted, and once a workspace of 128 KiB and a matrix."""
    (program,) = programs_of(resolved(fp4="nvfp4", fqns="layers.1.,lm_head"), Options())
    found = [one.name for one in program.extra if one.name.startswith("nvfp4")]
    counts = {name: found.count(name) for name in found}
    assert counts == {"nvfp4_seed": 6, "nvfp4_signs": 6, "nvfp4_workspace": 1, "nvfp4_hadamard": 1}


def test_stages_have_their_own_layers() -> None:
    """Two layers in two stages, of which the second is converted: five linear layers, but not the head."""
    found = programs_of(resolved(fp4="nvfp4", fqns="layers.1.", pp="2", loss="plain", gbs="8"), Options())
    seeds = [sum(one.name == "nvfp4_seed" for one in program.extra) for program in found]
    assert seeds == [0, 5]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"fp8": "mxfp8", "gpu": "h100-80gb"}, r"hardware\.gpu = h100-80gb: must be of Blackwell or later"),
        ({"fp8": "mxfp8", "fsdp-newest": "false"}, r"precision\.fp8 = mxfp8: needs torchtitan's newest layers"),
        (
            {"fp4": "nvfp4", "fsdp-code": "transformers", "fsdp-newest": "false", "loss": "plain"},
            r"precision\.fp4 = nvfp4: needs torchtitan's layers",
        ),
        ({"fp8": "mxfp8", "compile": "true"}, r"fsdp\.compile = true: must be false with mxfp8"),
        ({"fp4": "nvfp4", "tp": "2"}, r"layout\.tp = 2: must be 1 with nvfp4"),
        ({"fp4": "nvfp4", "filter-fqns": "output"}, r"fsdp\.filter_fqns = .*: must be left out with nvfp4"),
        ({"fp8": "tensorwise", "fqns": "layers"}, r"fsdp\.fqns = .*: must be left out without precision\.fp8 mxfp8"),
        ({"fqns": "layers"}, r"fsdp\.fqns = .*: must be left out without precision\.fp8 mxfp8"),
        ({"fp4": "nvfp4", "seq": "4160"}, r"batch\.seq = 4160: must give a chunk of the loss a multiple of 128 tokens"),
        ({"fp4": "nvfp4", "seq": "4160", "fqns": "layers"}, "must give a micro-batch a multiple of 128 tokens"),
        (
            {"fp4": "nvfp4", "vocab": "1000"},
            "must name layers other than lm_head, whose 4,096 and 1,000 features",
        ),
        (
            {"fp8": "mxfp8", "ffn": "14000"},
            r"must name layers other than layers\.0\.feed_forward\.w1, whose 4,096 and 14,000",
        ),
        (
            {"fp8": "mxfp8", "model": "llama-3.2-1b"},
            "must name layers other than lm_head with an embedding that shares its weight",
        ),
        (
            {"fp8": "mxfp8", "model": "deepseek-v2-lite"},
            r"precision\.fp8 = mxfp8: needs fsdp\.fqns, which must name layers other than layers\.1\.moe\.router\.gate"
            r".*\(--fqns attention,shared_experts,feed_forward,lm_head\)",
        ),
        (
            {"fp8": "rowwise", "model": "deepseek-v2-lite", "gpu": "h100-80gb"},
            r"precision\.fp8 = rowwise: needs fsdp\.filter_fqns, .*\(--filter-fqns output,router\.gate\)",
        ),
        (
            {"fp8": "mxfp8", "model": "deepseek-v2-lite", "fqns": "layers"},
            r"fsdp\.fqns = \[layers\]: must name layers other than layers\.1\.moe\.router\.gate",
        ),
        (
            {"fp8": "mxfp8", "fqns": "attention.wq"},
            r"fsdp\.fqns = \[attention\.wq\]: must have a part of a linear layer's name: they are lm_head, "
            r"attention\.qkv_linear\.wqkv",
        ),
        ({"pad-multiple": "128"}, r"fsdp\.pad_multiple = 128: must be left out without precision\.fp8 mxfp8"),
        ({"fp4": "nvfp4", "pad-multiple": "128"}, r"fsdp\.pad_multiple = 128: must be left out without precision"),
        (
            {"fp8": "mxfp8", "pad-multiple": "128"},
            r"fsdp\.pad_multiple = 128: must be left out: llama-3-8b has no experts",
        ),
        (
            {"fp8": "mxfp8", "pad-multiple": "32", "model": "deepseek-v2-lite", "fqns": "attention"},
            r"fsdp\.pad_multiple = 32: must be a multiple of 128",
        ),
        ({"fp8": "mxfp8", "model": "gpt-oss-20b"}, "needs torchtitan's newest layers"),
        ({"fp4": "nvfp4", "fp8-parameters": "true"}, r"precision\.fp8_parameters = true: must be left out"),
    ],
)
def test_refused(flags: dict[str, str], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        programs_of(resolved(**flags), Options())


@pytest.mark.parametrize(
    ("flags", "unknown"),
    [
        ({"fp8": "mxfp8", "fqns": "attention.wq,attention.wo"}, "attention.wq"),
        ({"fp4": "nvfp4", "fqns": "attention.wo,output"}, "output"),
        ({"fp8": "rowwise", "filter-fqns": "output,wqkv,layers.99."}, "layers.99."),
        ({"fp8": "rowwise", "filter-fqns": "output,layers.1."}, ""),
        ({"fp8": "mxfp8", "fqns": "inner_experts", "model": "deepseek-v2-lite", "pad-multiple": "128"}, ""),
        ({"fp8": "mxfp8"}, ""),
        ({}, ""),
    ],
)
def test_parts_of_names_that_no_layer_has(flags: dict[str, str], unknown: str) -> None:
    told = titan_low.parts_without_layer(resolved(**flags))
    assert told.startswith(f"no linear layer has {unknown} in its name" if unknown else "")
    assert bool(told) == bool(unknown)


def test_assumptions_name_what_is_saved() -> None:
    eight = " ".join(assumptions(resolved(fp8="mxfp8")))
    four = " ".join(assumptions(resolved(fp4="nvfp4", fqns="layers")))
    assert "all linear layers are torchao's MXFP8Linear" in eight
    assert "has a part of fqns (layers) are torchao's NVFP4Linear" in four
    assert "Float8Linear" not in eight + four
    flags = {"model": "deepseek-v2-lite", "fp8": "mxfp8", "fqns": "attention"}
    for pad, says, not_so in ((None, "without padding", "with padding"), ("128", "128 more", "without padding")):
        told = " ".join(assumptions(resolved(**flags, **({"pad-multiple": pad} if pad else {}))))
        assert says in told
        assert not_so not in told


def kernels(low: Blocks | Float8, *, experts: bool) -> list[Kernel]:
    """Of forward and backward of t = 256 rows of 512 features by weights (384, 512), or those of 2 experts."""
    r = Recorder(counts=True, closed=True)
    x, weight = (
        r.leaf(r.outside(shape, "bf16"))[0] for shape in ((256, 512), (2, 384, 512) if experts else (384, 512))
    )
    if experts:
        out = low.grouped(r, x, weight, r.outside((2,), "int32"), "experts")
    else:
        out = low.product(r, x, weight, "linear", Policy(False))
    r.backward([out.alias()], [r.outside(out.shape, "bf16")])
    return [*r.work]


@pytest.mark.parametrize(
    ("low", "element", "experts", "casts"),
    [
        (MXFP8(), 1, False, 6 * (2 + 1 + 1 / 32)),
        (MXFP8(rows=128), 1, True, 0),
        (NVFP4(), 0.5, False, 0),
        (Float8("rowwise", rows=16), 1, True, 0),
    ],
)
def test_kernels_by_hand(low: Blocks | Float8, element: float, experts: bool, casts: float) -> None:
    """Three products of as many operations as in bf16, of elements of 8 or 4 bits; MXFP8 casts input, weight and
    gradient twice each, reading 2 bytes of an element and writing 1, and 1 for every 32."""
    t, n, k = 256, 384, 512
    found = kernels(low, experts=experts)
    products = [one for one in found if isinstance(one, Product)]
    assert len(products) == 3
    assert {one.element for one in products} == {element}
    assert [one.flops for one in products] == [2.0 * t * n * k] * 3
    if casts:
        streams = sum(one.bytes for one in found if isinstance(one, Stream))
        scales = 4 / 32 * ((t + n) * k + (t + k) * n + (n + k) * t)  # copied twice before a product
        assert streams == casts / 3 * (t * k + n * k + t * n) + scales


@pytest.mark.parametrize(
    ("newest", "word", "stays"),
    [
        (False, "output", True),
        (False, "out", True),
        (False, "head", False),
        (True, "output", True),
        (True, "lm_head", True),
        (True, "head", True),
        (True, "out", False),
    ],
)
def test_the_head_is_named_as_the_code_names_it(newest: bool, word: str, stays: bool) -> None:
    """``output`` in older code and ``lm_head`` in the newest, where a plan may say ``output`` all the same."""
    flags = {"model": "llama-3-8b", "layers": "2", "framework": "fsdp", "fsdp-code": "torchtitan", "fp8": "rowwise"}
    plan = resolve(read_plan(None, {**flags, "fsdp-newest": str(newest).lower(), "filter-fqns": word}).plan)
    assert (recipes(plan).low_head is None) is stays
