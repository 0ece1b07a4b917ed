"""The cases of ``tests.layers.megatron_core.te_cases`` as Transformer Engine's modules.

``python -m tests.oracle.transformer_engine_modules FILE`` writes what they hold and drop to FILE, under the
version of the source tree that ``MEMPLAN_TE_SOURCE`` names.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import torch

from tests.layers.megatron_core.te_cases import CASES, INNER, Case, covered

from .megatron_bridge import wrapped
from .tracer import Change
from .transformer_engine import CAPABILITY, load, parallel, source, traced
from .transformer_engine_chain import chain

SINGLE = 512
"""Bytes of a single number."""

Golden = dict[str, list[dict[str, Any]]]
"""By case, then for each group of releases that agree: signed sizes of forward and of backward."""


def measured(case: Case, te: Any) -> list[list[int]]:
    """Signed sizes of what the real module holds (+) and drops (-), forward and backward. Single numbers of
    quantised tensors are left out."""
    torch.set_grad_enabled(True)
    _choose(case)
    run = traced(lambda: _module(case, te))
    return [[change.sign * change.bytes for change in part if _counts(change, case)] for part in run]


def _counts(change: Change, case: Case) -> bool:
    """``torch.tensor([scale])`` of the fused softmax is on the host."""
    on_host = change.op == "aten.lift_fresh.default" and change.shape == (1,)
    return not on_host and not (case.recipe and change.bytes <= SINGLE)


def _rank(group: Any) -> int:
    return torch.distributed.get_rank(group=group)


CHUNKS = (
    "_seq_chunk_ids_cache_for_reordering_before_attn",
    "_seq_chunk_ids_cache_for_reordering_after_attn",
    "_softmax_offset_chunk_ids_cache",
)


def _choose(case: Case) -> None:
    """Allows the case's back end alone, and forgets what earlier cases left: fake tensors end with their mode."""
    for name in ("flash", "fused", "unfused"):
        os.environ[f"NVTE_{name.upper()}_ATTN"] = str(int(case.attention == name))
    os.environ["NVTE_CUTEDSL_FUSED_GROUPED_MLP"] = "1"
    os.environ["NVTE_FP8_DPA_BWD"] = str(int(case.low_backward))
    package = "transformer_engine.pytorch"
    dot_product: Any = importlib.import_module(f"{package}.attention.dot_product_attention.dot_product_attention")
    dot_product._attention_backends["backend_selection_requires_update"] = True
    utils: Any = importlib.import_module(f"{package}.attention.dot_product_attention.utils")
    utils._cu_seqlens_cache.clear()
    steps: Any = importlib.import_module(f"{package}.attention.dot_product_attention.context_parallel")
    for name in ("_cu_seqlens_info_with_cp_cache", *CHUNKS):
        getattr(steps, name, {}).clear()
    steps.get_distributed_rank = (
        (lambda group: 0) if case.communication == "all_gather" and case.window is None else _rank
    )  # as recipes have it
    CAPABILITY[0] = case.major
    of_device: Any = importlib.import_module(f"{package}.utils")
    for name in ("is_non_tn_fp8_gemm_supported", "_get_device_compute_capability"):
        if hasattr(getattr(of_device, name, None), "cache_clear"):
            getattr(of_device, name).cache_clear()
    states: Any = importlib.import_module(sys.modules[f"{package}.module.base"].FP8GlobalStateManager.__module__)
    for kind in ("fp8", "mxfp8", "fp8_block_scaling"):  # which ask libraries that are not there
        setattr(states, f"check_{kind}_support", lambda: (True, ""))
    states.FP8GlobalStateManager.reset()  # with amaxes of earlier modules, which are reduced together
    base: Any = importlib.import_module(f"{package}.module.base")
    base._dummy_wgrads.clear()
    base._cublas_workspace = None
    gemm: Any = importlib.import_module(f"{package}.cpp_extensions.gemm")
    if hasattr(gemm, "get_cublas_workspace"):
        gemm.get_cublas_workspace.cache_clear()


def _module(case: Case, te: Any) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    x = torch.empty(case.input(), dtype=torch.bfloat16, requires_grad=True)
    if case.strided:
        x = torch.cat([x.detach()] * 2, -1)[..., : case.h].detach().requires_grad_()
    function, parameters = (adapted if case.rank else MODULES[case.module])(case, te)
    for parameter in parameters if case.frozen and not case.rank else ():
        parameter.requires_grad = False
    for parameter in cast(list[Any], parameters):
        if case.gradient_fusion:
            parameter.main_grad = torch.empty(parameter.shape, dtype=torch.float32)
            parameter.grad_added_to_main_grad = False
    for _ in range(2):  # what is made once is made now
        out = function(x)  # with copies of weights
        torch.autograd.Variable._execution_engine.run_backward(
            (out,), (torch.empty_like(out),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    x.grad = None
    for parameter in parameters:
        parameter.grad = None
    del out
    return function, [x]


Made = tuple[Callable[[torch.Tensor], torch.Tensor], list[torch.nn.Parameter]]


def _options(case: Case) -> dict[str, Any]:
    return {
        "params_dtype": torch.bfloat16,
        "sequence_parallel": case.sequence_parallel,
        "tp_group": parallel(case.t) if case.t > 1 else None,
        "tp_size": case.t,
        "fuse_wgrad_accumulation": case.gradient_fusion,
        "init_method": lambda weight: None,
        "bias": case.bias,
        "return_bias": case.skip_bias and case.bias,
    }


def _first(module: Any, case: Case, te: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """In 8 bits as Megatron-Core calls it: the weight is quantised in a step's first micro-batch."""
    if case.recipe and case.original:
        module.save_original_input = True
    firsts = iter((True,))

    def function(x: torch.Tensor) -> torch.Tensor:
        if case.recipe:
            with te.fp8_autocast(enabled=True, fp8_recipe=_recipe(case)):
                out = module(x, is_first_microbatch=next(firsts, False))
        else:
            out = module(x)
        if case.rank and case.module == "norm_column":
            return out  # type: ignore[no-any-return]
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

    return function


def _recipe(case: Case) -> Any:
    recipes: Any = importlib.import_module("transformer_engine.common.recipe")
    kinds = {
        "delayed": recipes.DelayedScaling,
        "tensorwise": recipes.Float8CurrentScaling,
        "blockwise": recipes.Float8BlockScaling,
        "mxfp8": recipes.MXFP8BlockScaling,
    }
    return kinds[str(case.recipe)](fp8_dpa=case.module == "attention")


def _norm(case: Case, te: Any) -> Made:
    kind = te.LayerNorm if case.norm == "layernorm" else te.RMSNorm
    module = kind(case.h, dtype=torch.bfloat16)
    return module, list(module.parameters())


def _column(case: Case, te: Any) -> Made:
    module = te.Linear(case.h, case.outputs, parallel_mode="column", **_options(case))
    return _first(module, case, te), list(module.parameters())


def _duplicated(case: Case, te: Any) -> Made:
    alone = {"sequence_parallel": False, "tp_group": None, "tp_size": 1}
    module = te.Linear(case.h, 3 * case.h, parallel_mode=None, **_options(case) | alone)
    return _first(module, case, te), list(module.parameters())


def _row(case: Case, te: Any) -> Made:
    module = te.Linear(case.h, case.h, parallel_mode="row", **_options(case) | {"return_bias": case.bias})
    return _first(module, case, te), list(module.parameters())


def _norm_column(case: Case, te: Any, **more: Any) -> Made:
    kind = "LayerNorm" if case.norm == "layernorm" else "RMSNorm"
    options = _options(case) | more
    module = te.LayerNormLinear(case.h, case.outputs, parallel_mode="column", normalization=kind, **options)
    return _first(module, case, te), list(module.parameters())


def adapted(case: Case, te: Any) -> Made:
    """The frozen module in Megatron-Bridge's adapter, whose parameters are returned; as
    ``get_adapter_attributes_from_linear`` sets both up."""
    made: Callable[..., Made] = MODULES[case.module]
    shows, together = case.module == "norm_column", case.sequence_parallel and not case.overlaps
    if shows:
        made = partial(_norm_column, return_layernorm_output=True, return_layernorm_output_gathered=together and shows)
    function, parameters = made(case, te)
    for parameter in parameters:
        parameter.requires_grad = False
    n = {"row": case.h, "grouped": INNER}.get(case.module, case.outputs)
    weight = next(one for one in parameters if one.dim() == 2) if case.dora else None
    group = parallel(case.t)
    wrapper = wrapped(
        function,
        (n, case.h),
        group,
        case.t,
        case.rank,
        sequence_parallel=case.sequence_parallel,
        input_is_parallel=case.module == "row",
        dropout=case.dropout,
        base_linear_is_parallel=case.module != "duplicated",
        weight=weight,
        parts={one.name: one.outputs for one in case.parts},
        heads=(case.heads, case.kv_heads, case.head_dim),
        disable_sequence_parallel_comm=not case.sequence_parallel or (shows and together),
    )
    return lambda x: wrapper(x)[0], list(wrapper.adapter.parameters())


def _grouped(case: Case, te: Any) -> Made:
    options = {"params_dtype": torch.bfloat16, "init_method": lambda weight: None, "bias": case.bias}
    module, rows = te.GroupedLinear(case.count, case.h, INNER, **options), case.s * case.b
    splits = torch.tensor([rows // case.count] * case.count)
    splits.tolist = lambda: [rows // case.count] * case.count  # type: ignore[method-assign]
    firsts = iter((True,))

    def function(x: torch.Tensor) -> torch.Tensor:
        if not case.recipe:
            return module(x, splits)  # type: ignore[no-any-return]
        with te.fp8_autocast(enabled=True, fp8_recipe=_recipe(case)):
            return module(x, splits, is_first_microbatch=next(firsts, False))  # type: ignore[no-any-return]

    return function, list(module.parameters())


def _rope(case: Case, te: Any) -> Made:
    from transformer_engine.pytorch.attention.rope import FusedRoPEFunc  # type: ignore[import-not-found]

    angles = torch.empty(case.s, 1, 1, case.head_dim)
    return lambda x: FusedRoPEFunc.apply(x, angles, None, "sbhd", False, None, 1, 0), []


def _cross_entropy(case: Case, te: Any) -> Made:
    labels = torch.empty(case.s, case.b, dtype=torch.int64)
    group = parallel(case.t) if case.t > 1 else None

    def function(x: torch.Tensor) -> torch.Tensor:
        loss = te.cross_entropy.parallel_cross_entropy(x.view(x.shape), labels, 0.0, False, group)
        return loss.transpose(0, 1).contiguous()  # type: ignore[no-any-return]

    return function, []


def _attention(case: Case, te: Any) -> Made:
    from transformer_engine.pytorch.attention.rope import FusedRoPEFunc
    from transformer_engine.pytorch.utils import SplitAlongDim  # type: ignore[import-not-found]

    a, g, d = case.heads, case.kv_heads, case.head_dim
    value = case.value_dim or d
    mask_type = "causal" if case.causal else "padding"
    mask = None if case.causal else torch.empty(case.b, 1, 1, case.s, dtype=torch.bool)
    more: dict[str, Any] = {} if case.window is None else {"window_size": (case.window - 1, 0)}
    more |= {"softmax_type": "learnable"} if case.sinks else {}
    module = te.DotProductAttention(
        a,
        (d, value),
        num_gqa_groups=g,
        attention_dropout=case.dropout,
        qkv_format="sbhd",
        attn_mask_type=mask_type,
        **more,
    )
    if case.sinks:  # as ``Float16Module`` casts it
        module.softmax_offset = torch.nn.Parameter(torch.empty(a, dtype=torch.bfloat16))
    angles = torch.empty(case.s, 1, 1, d)
    if case.cp > 1:
        ranks = list(range(64 - case.cp, 64))
        group: Any = parallel(case.cp)
        if case.inner > 1:
            group = [parallel(case.inner), torch.distributed.new_group(ranks[case.inner - 1 :: case.inner])]
        way = "a2a+p2p" if case.inner > 1 else case.communication
        module.set_context_parallel_group(group, ranks, MagicMock(), way)

    def function(x: torch.Tensor) -> torch.Tensor:
        mixed = x.view(case.s, case.b, g, (a // g + 1) * d + value)
        q, k, v = SplitAlongDim.apply(mixed, 3, [a // g * d, d, value])
        q = q.reshape(case.s, case.b, -1, d)
        if case.rope:
            q, k = (FusedRoPEFunc.apply(one, angles, None, "sbhd", False, None, 1, 0) for one in (q, k))
        if case.recipe is None:
            return module(q, k, v, mask, attn_mask_type=mask_type)  # type: ignore[no-any-return]
        with te.fp8_autocast(enabled=True, fp8_recipe=_recipe(case)):
            return module(q, k, v, mask, attn_mask_type=mask_type)  # type: ignore[no-any-return]

    return function, list(module.parameters())


def _chain(case: Case, te: Any) -> Made:
    return chain(case, te, _recipe(case), INNER)


MODULES: dict[str, Callable[[Case, Any], Made]] = {
    "norm": _norm,
    "column": _column,
    "row": _row,
    "norm_column": _norm_column,
    "grouped": _grouped,
    "duplicated": _duplicated,
    "rope": _rope,
    "cross_entropy": _cross_entropy,
    "attention": _attention,
    "chain": _chain,
}


def version(release: str) -> tuple[int, int]:
    """``2.17.1`` as (2, 17)."""
    major, minor, *_ = release.split(".")
    return int(major), int(minor)


def add(golden: Golden, release: str, figures: dict[str, list[list[int]]]) -> Golden:
    """``golden`` with the figures of ``release``; releases that agree share an entry."""
    out = dict(golden)
    for case, (forward, backward) in figures.items():
        entries = [
            entry | {"releases": [one for one in entry["releases"] if one != release]} for entry in golden.get(case, [])
        ]
        equal = [entry for entry in entries if (entry["forward"], entry["backward"]) == (forward, backward)]
        if not equal:
            equal = [{"releases": [], "forward": forward, "backward": backward}]
            entries += equal
        equal[0]["releases"] = sorted([*equal[0]["releases"], release])
        out[case] = [entry for entry in entries if entry["releases"]]
    return out


def main(file: Path) -> None:
    path = source()
    assert path is not None, "MEMPLAN_TE_SOURCE names no source tree of Transformer Engine"
    te = load(path)
    golden: Golden = json.loads(file.read_text()) if file.exists() else {}
    release = (path / "build_tools" / "VERSION.txt").read_text().strip()
    cases = [case for case in CASES if covered(case, version(release))]
    golden = add(golden, release, {str(case): measured(case, te) for case in cases})
    lines = (
        f" {json.dumps(case)}: [\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in entries) + "\n ]"
        for case, entries in golden.items()
    )
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
