"""Transformer Engine's modules in settings of Megatron-Core: as recipes, and as the real modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from memplan.layers import ops
from memplan.layers.autograd import Gradients, Recorder, Tensor
from memplan.layers.megatron_core import (
    adapters,
    block,
    grouped,
    grouped_chain,
    te,
    te_attention,
    te_facts,
    te_low_context,
)
from memplan.layers.megatron_core.adapters import of_attention, of_gated
from memplan.layers.megatron_core.precision import Low, LowAttention, Recipe
from memplan.layers.megatron_core.shape import ContextCommunication, CoreAttention, CoreShape, ExpertShape, Version
from memplan.layers.module import Run
from memplan.layers.tuning import Adapters, Part, Tuning
from memplan.plan.spec import ModelSpec
from memplan.values import replace

S, B, H = 128, 2, 512
"""Sequence, micro-batch, hidden; large enough that no tensor of a size is mistaken for another's."""


@dataclass(frozen=True)
class Case:
    """One module in one setting."""

    module: str
    t: int = 1
    b: int = B
    s: int = S
    h: int = H
    norm: str = "layernorm"
    bias: bool = True
    skip_bias: bool = False
    sequence_parallel: bool = False
    gradient_fusion: bool = False
    heads: int = 8
    kv_heads: int = 8
    rope: bool = False
    causal: bool = True
    dropout: float = 0.1
    attention: CoreAttention = "flash"
    cp: int = 1
    communication: ContextCommunication = "p2p"
    recipe: Recipe | None = None
    major: int = 9
    original: bool = False
    low_backward: bool = True
    window: int | None = None
    sinks: bool = False
    inner: int = 1
    activation: str = "gelu"
    again: bool = False
    count: int = 4
    frozen: bool = False
    rank: int = 0
    """Of Megatron-Bridge's adapter around the frozen module; 0: none."""
    dora: bool = False
    """Whether the adapter is DoRA's."""
    split: bool | None = None
    """Whether parts of the outputs have adapters of their own: queries, keys and values, or, false, gate and up."""
    overlaps: bool = False
    value_dim: int = 0
    """Of each head's values, with latent attention; 0: the heads' size."""
    strided: bool = False
    """Whether the input is a slice of a larger tensor, as keys are of what ``linear_qkv`` gives."""

    def __str__(self) -> str:
        default = Case(self.module)
        parts = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(default, name)]
        return "-".join((self.module, *parts))

    @property
    def head_dim(self) -> int:
        return self.h // self.heads

    @property
    def outputs(self) -> int:
        """Of a layer that is divided by columns."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim if self.split else 3 * self.h

    @property
    def parts(self) -> tuple[Part, ...]:
        if self.split is None:
            return ()
        if self.split:
            return of_attention(self.heads, self.kv_heads, self.head_dim)
        return of_gated(self.outputs // 2)

    def spec(self) -> ModelSpec:
        return ModelSpec(
            name="case",
            family="gpt",
            layers=1,
            hidden=self.h,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            ffn=4 * self.h,
            vocab=1024,
            positions_max=self.s,
            norm=self.norm,
            positions="learned",
            activation=self.activation,
            causal=self.causal,
            embedding_dropout=0.0,
            attention_dropout=self.dropout,
            hidden_dropout=0.0,
            sliding_window=self.window,
            attention_sinks=self.sinks,
        )

    def shape(self, version: Version) -> CoreShape:
        return CoreShape(
            self.spec(),
            self.b,
            self.s,
            self.t,
            "bf16",
            1024,
            sequence_parallel=self.sequence_parallel,
            user_buffers=self.overlaps,
            te=version,
            cp=self.cp,
            cp_communication=self.communication,
            cp_inner=self.inner,
            attention=self.attention,
            gradient_fusion=self.gradient_fusion,
            low=Low(self.recipe, self.major < 10, version) if self.recipe is not None else None,
            low_attention=LowAttention(self.recipe, self.low_backward) if self.recipe is not None else None,
            recompute_modules=("moe_act",) if self.again else (),
        )

    def input(self) -> tuple[int, ...]:
        """Shape of the module's input on one rank."""
        if self.module == "attention":
            heads = self.heads + self.kv_heads
            return (self.s, self.b, heads * self.head_dim + self.kv_heads * (self.value_dim or self.head_dim))
        if self.module == "cross_entropy":
            return (self.s, self.b, 1024 // self.t)
        if self.module == "rope":
            return (self.s, self.b, self.heads, self.head_dim)
        if self.module == "chain":
            return (self.s * self.b, self.h)
        if self.module == "grouped":
            return (self.s * self.b, self.h)
        if self.module == "row":
            return (self.s, self.b, self.h // self.t)
        sharded = self.sequence_parallel and self.module != "norm"
        return (self.s // self.t if sharded else self.s, self.b, self.h)


PARALLEL: dict[str, Any] = {"t": 4, "sequence_parallel": True}
LOW: tuple[tuple[Recipe, int], ...] = (
    ("delayed", 9), ("delayed", 10), ("tensorwise", 9), ("tensorwise", 10), ("blockwise", 9), ("blockwise", 10),
    ("mxfp8", 10),
)  # fmt: skip
"""Recipes, and the major compute capability of a GPU that has them."""

LARGE: dict[str, Any] = {"h": 1024, "s": 1024, "bias": False}
LOW_CASES = [
    Case(module, recipe=recipe, major=major, norm="rmsnorm", gradient_fusion=fusion, **LARGE, **more)
    for recipe, major in LOW
    for module in ("column", "row", "norm_column")
    for fusion, more in ((True, {}), (True, PARALLEL), (False, {"t": 4}))
]
LOW_CASES += [
    Case(module, recipe=recipe, major=major, original=True, **LARGE, **more)
    for recipe, major in LOW
    for module in ("column", "row")
    for more in ({}, PARALLEL)
    if recipe != "delayed"
]
LOW_CASES += [
    Case(module, recipe=recipe, major=major, norm="layernorm", gradient_fusion=True, h=1024, s=1024)
    for recipe, major in LOW
    for module in ("column", "norm_column")
]
WAYS: tuple[ContextCommunication, ...] = ("a2a", "p2p", "all_gather")
OTHERS: tuple[tuple[Recipe, int, bool, float, bool], ...] = (
    ("delayed", 9, True, 0.1, True), ("mxfp8", 10, True, 0.1, False), ("delayed", 9, False, 0.0, True),
    ("tensorwise", 10, False, 0.0, True), ("mxfp8", 10, False, 0.0, True), ("delayed", 10, False, 0.0, False),
)  # fmt: skip
"""Attention in 8 bits with dropout, and with a padding mask: causal or not, dropout, whether gradients are, too."""
ATTENTIONS: tuple[CoreAttention, ...] = ("flash", "fused")
WINDOWS: tuple[tuple[ContextCommunication, CoreAttention, int, int], ...] = (
    ("a2a", "flash", 2, 32), ("a2a", "fused", 4, 300), ("all_gather", "flash", 2, 32), ("all_gather", "fused", 2, 32),
    ("all_gather", "fused", 4, 300),
)  # fmt: skip
"""Ways, back ends, ranks, and tokens of a sliding window."""
CHAIN: dict[str, Any] = {"s": 512, "recipe": "mxfp8", "major": 10, "gradient_fusion": True}
CHAINS = [
    *(
        Case("chain", activation=activation, again=again, **CHAIN)
        for activation in ("swiglu", "relu2")
        for again in (False, True)
    ),
    Case("chain", activation="swiglu", **CHAIN | {"gradient_fusion": False}),
    Case("chain", activation="swiglu", count=1, **CHAIN),
]
FROZEN_CASES = [
    *(
        Case(module, frozen=True, rank=rank, norm=norm, bias=False, dropout=dropout, **more)
        for module, norm in (("column", "layernorm"), ("row", "layernorm"), ("norm_column", "rmsnorm"))
        for rank, dropout in ((0, 0.0), (16, 0.0), (16, 0.1))
        for more in ({}, {"t": 4}, PARALLEL)
    ),
    *(
        Case(module, frozen=True, rank=16, dora=True, norm=norm, bias=False, dropout=0.0, **more)
        for module, norm in (("column", "layernorm"), ("row", "layernorm"), ("norm_column", "rmsnorm"))
        for more in ({}, {"t": 4}, PARALLEL)
    ),
    *(
        Case(module, frozen=True, rank=16, norm="rmsnorm", bias=False, dropout=dropout, **given, **more)
        for module in ("column", "norm_column")
        for given in ({"split": True, "kv_heads": 2}, {"split": True, "kv_heads": 1}, {"split": False})
        for dropout in (0.0, 0.1)
        for more in ({}, {"t": 4}, PARALLEL)
    ),
    Case("norm_column", frozen=True, rank=16, bias=True, dropout=0.0),
    *(Case("duplicated", frozen=True, rank=16, bias=False, dropout=0.0, **more) for more in ({}, {"t": 4}, PARALLEL)),
    *(Case("grouped", frozen=True, rank=rank, bias=False, dropout=0.0) for rank in (0, 16)),
    *(
        Case("grouped", frozen=True, recipe=recipe, major=major, dropout=0.0, count=2, **LARGE)
        for recipe, major in LOW
        if recipe in ("delayed", "tensorwise")
    ),
    Case("norm_column", frozen=True, rank=16, bias=False, dropout=0.0, overlaps=True, **PARALLEL),
    *(
        Case(module, frozen=True, rank=rank, norm="rmsnorm", recipe=recipe, major=major, dropout=0.0, **LARGE, **more)
        for recipe, major in LOW
        for module, rank in (("column", 0), ("row", 16), ("norm_column", 0), ("norm_column", 16))
        for more in ({}, PARALLEL)
    ),
]
"""Without gradients of weights, and in Megatron-Bridge's adapters."""
CASES = [
    *CHAINS,
    *FROZEN_CASES,
    *(Case("norm", norm=norm, strided=strided) for norm in ("layernorm", "rmsnorm") for strided in (False, True)),
    *(Case("column", gradient_fusion=fusion, **more) for fusion in (False, True) for more in ({}, {"t": 4}, PARALLEL)),
    *(Case("column", bias=bias, skip_bias=True) for bias in (False, True)),
    *(Case("row", gradient_fusion=fusion, **more) for fusion in (False, True) for more in ({}, {"t": 4}, PARALLEL)),
    *(
        Case("norm_column", norm=norm, gradient_fusion=fusion, **more)
        for norm in ("layernorm", "rmsnorm")
        for fusion in (False, True)
        for more in ({}, {"t": 4}, PARALLEL)
    ),
    Case("norm_column", norm="rmsnorm", bias=False, **PARALLEL),
    Case("norm_column", skip_bias=True),
    Case("rope"),
    *(Case("cross_entropy", t=t, b=b) for t in (1, 4) for b in (1, 2)),
    *(
        Case("attention", attention=attention, b=b, rope=rope, kv_heads=groups, dropout=dropout)
        for attention in ("flash", "fused", "unfused")
        for b in (1, 2)
        for rope in (False, True)
        for groups in (8, 2, 1)
        for dropout in (0.0, 0.1)
    ),
    *(
        Case("attention", attention=attention, b=b, rope=rope, kv_heads=groups, cp=cp, communication=communication)
        for communication in WAYS
        for attention in ("flash", "fused")
        for b, rope, groups, cp in ((2, False, 8, 2), (1, True, 4, 4), (2, True, 8, 4))
    ),
    *(
        Case("attention", attention="flash", value_dim=32, b=b, dropout=0.0, cp=cp, communication=way)
        for b in (1, 2)
        for cp, way in ((1, WAYS[0]), *((2, way) for way in WAYS))
    ),
    Case("attention", attention="flash", h=1024, s=256),
    Case("attention", attention="flash", h=1024, s=256, rope=True),
    *(Case("attention", attention=attention, causal=False) for attention in ("fused", "unfused")),
    Case("attention", attention="unfused", causal=False, dropout=0.0),
    *LOW_CASES,
    *(
        Case(
            "attention", attention="fused", recipe=recipe, major=major, kv_heads=groups, rope=rope, dropout=0.0, **LARGE
        )
        for recipe, major in LOW
        for groups, rope in ((8, False), (8, True), (2, True))
        if recipe == "delayed" or (major > 9 and recipe != "blockwise")
    ),
    *(
        Case(
            "attention",
            attention="fused",
            recipe=recipe,
            major=10,
            kv_heads=groups,
            rope=rope,
            dropout=0.0,
            low_backward=False,
            **LARGE,
        )
        for recipe in ("delayed", "tensorwise", "mxfp8")
        for groups, rope in ((8, False), (2, True))
    ),
    *(
        Case(
            "attention",
            attention="fused",
            recipe=recipe,
            major=10,
            kv_heads=groups,
            dropout=0.0,
            cp=cp,
            communication=way,
            **LARGE,
        )
        for way in WAYS
        for recipe in ("delayed", "tensorwise", "mxfp8")
        for groups, cp in ((8, 2), (4, 4))
    ),
    *(
        Case(
            "attention",
            attention="fused",
            recipe=recipe,
            major=major,
            causal=causal,
            dropout=dropout,
            low_backward=low_backward,
            **LARGE,
        )
        for recipe, major, causal, dropout, low_backward in OTHERS
    ),
    Case("attention", attention="fused", dropout=0.0, kv_heads=2, window=32, sinks=True),
    *(
        Case("attention", attention=attention, dropout=0.0, kv_heads=4, cp=cp, communication=way, window=window)
        for way, attention, cp, window in WINDOWS
    ),
    *(
        Case("attention", attention="fused", dropout=0.0, kv_heads=4, cp=cp, communication="a2a", window=32, sinks=True)
        for cp in (2, 4)
    ),
    *(
        Case(
            "attention",
            attention="fused",
            recipe=recipe,
            major=10,
            kv_heads=4,
            dropout=0.0,
            cp=2,
            communication=way,
            window=129,
            sinks=way == "a2a",
            **LARGE,
        )
        for recipe in ("delayed", "tensorwise", "mxfp8")
        for way in WAYS
        if way != "p2p"
    ),
    *(
        Case(
            "attention",
            attention="fused",
            recipe=recipe,
            major=10,
            kv_heads=4,
            dropout=0.0,
            cp=4,
            communication=way,
            low_backward=False,
            **LARGE,
        )
        for way in WAYS
        for recipe in ("delayed", "tensorwise", "mxfp8")
    ),
    Case(
        "attention",
        attention="fused",
        recipe="delayed",
        major=10,
        kv_heads=4,
        dropout=0.0,
        cp=4,
        inner=2,
        low_backward=False,
        **LARGE,
    ),
    *(
        Case("attention", attention=attention, b=b, rope=rope, kv_heads=groups, cp=cp, inner=2)
        for attention in ATTENTIONS
        for b, rope, groups, cp in ((2, False, 8, 4), (1, True, 4, 8), (2, True, 8, 8))
    ),
    *(
        Case("attention", attention="fused", recipe=recipe, major=10, kv_heads=4, dropout=0.0, cp=4, inner=2, **LARGE)
        for recipe in ("delayed", "tensorwise", "mxfp8")
    ),
]
"""Every module in every setting that changes its tensors."""


def covered(case: Case, version: Version) -> bool:
    """A recipe covers ``case`` in this release."""
    if case.recipe is not None and version < te_facts.OLDEST_LOW_PRECISION:
        return False
    if case.recipe is not None and case.module == "attention" and version < te_low_context.OLDEST:
        return False
    if case.module == "chain" and version < (grouped_chain.OLDEST if case.count > 1 else grouped_chain.OLDEST_SHARED):
        return False
    if case.inner > 1 and version < te_facts.OLDEST_TWO_LEVELS:
        return False
    if case.frozen and version < te_facts.OLDEST_FROZEN:
        return False
    if case.module == "grouped" and version < (2, 17):  # which take no tensor of rows
        return False
    if case.value_dim and version < te_facts.OLDEST_PADDED_VALUES:
        return False
    return (case.cp == 1 and not case.sinks) or version >= te_facts.OLDEST_CONTEXT_PARALLEL


# -- as recipes -------------------------------------------------------------------------------------


def recipe(case: Case, version: Version, shape: CoreShape | None = None) -> Callable[[Recorder, Tensor | None], Run]:
    """The module's recipe, on its input."""
    shape = shape or case.shape(version)

    def run(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run((ADAPTED if case.rank else RECIPES)[case.module](r, x, case, shape))

    return run


def tuning(case: Case) -> Tuning | None:
    """What is trained of it: all, or nothing but an adapter."""
    if not case.frozen:
        return None
    names = frozenset({"linear", "mlp.experts.linear_fc1"})
    parts = {"linear": case.parts} if case.parts else {}
    given = Adapters(case.rank, names, case.dropout, "bf16", dora=case.dora, parts=tuple(parts.items()))
    return Tuning(adapters=given if case.rank else None)


def _adapted_column(r: Recorder, x: Tensor, case: Case, shape: CoreShape) -> Tensor:
    return block.column_linear(r, x, "linear", "", case.outputs // case.t, shape, bias=case.bias, skip_bias=False)[0]


def _adapted_norm_column(r: Recorder, x: Tensor, case: Case, shape: CoreShape) -> Tensor:
    return block.column_linear(r, x, "linear", "norm", case.outputs // case.t, shape, bias=case.bias, skip_bias=False)[
        0
    ]


def _adapted_row(r: Recorder, x: Tensor, case: Case, shape: CoreShape) -> Tensor:
    return block.row_linear(r, x, "linear", shape, bias=case.bias)[0]


def _grouped(r: Recorder, x: Tensor, case: Case, shape: CoreShape) -> Tensor:
    spec = shape.spec.model_copy(update={"experts": case.count, "expert_top_k": 1, "expert_ffn": INNER})
    experts = ExpertShape(1, 1, "alltoall", True, False, False, None, False, 1.0, apart=False)
    return grouped.linear(r, x, "linear_fc1", replace(shape, spec=spec, experts=experts))


ADAPTED: dict[str, Callable[[Recorder, Tensor, Case, CoreShape], Tensor]] = {
    "grouped": _grouped,
    "duplicated": lambda r, x, case, shape: adapters.duplicated(r, x, "linear", 3 * case.h, shape),
    "column": _adapted_column,
    "row": _adapted_row,
    "norm_column": _adapted_norm_column,
}


def _norm(r: Recorder, x: Tensor, case: Case, shape: CoreShape) -> Tensor:
    return te.norm(r, x, "norm", shape, strided=case.strided)


def _column(r: Recorder, x: Tensor, case: Case, shape: CoreShape) -> Tensor:
    n = 3 * case.h // case.t
    return te.column_linear(r, x, "linear", n, shape, bias=case.bias, skip_bias=case.skip_bias, original=case.original)[
        0
    ]


def _row(r: Recorder, x: Tensor, case: Case, shape: CoreShape) -> Tensor:
    return te.row_linear(r, x, "linear", shape, bias=case.bias, original=case.original)[0]


def _norm_column(r: Recorder, x: Tensor, case: Case, shape: CoreShape) -> Tensor:
    n = 3 * case.h // case.t
    return te.norm_column_linear(r, x, "linear", "norm", n, shape, bias=case.bias, skip_bias=case.skip_bias)[0]


def _rope(r: Recorder, x: Tensor, case: Case, shape: CoreShape) -> Tensor:
    return te.fused_rope(r, x, "query")


def _cross_entropy(r: Recorder, x: Tensor, case: Case, shape: CoreShape) -> Tensor:
    loss = te.cross_entropy(r, x, shape)
    return ops.contiguous(r, loss, (case.b, case.s), "loss_contiguous") if case.b > 1 else loss


def _attention(r: Recorder, x: Tensor, case: Case, shape: CoreShape) -> Tensor:
    s, b, a, g, d = case.s, case.b, case.heads, case.kv_heads, case.head_dim
    q, k, v = _split(r, x, [(s, b, a, d), (s, b, g, d), (s, b, g, case.value_dim or d)], packed=case.cp == 1)
    if a > g and case.attention == "unfused" and not case.rope:
        q = ops.copied_gradient(r, q, "query")  # a transposed gradient has no view of the group's shape
    if a > g > 1:
        q = ops.contiguous(r, q, q.shape, "query")
    if case.rope:
        q, k = te.fused_rope(r, q, "query"), te.fused_rope(r, k, "key")
    return te_attention.core_attention(r, q, k, v, shape)


def _split(r: Recorder, x: Tensor, shapes: Sequence[tuple[int, ...]], *, packed: bool) -> list[Tensor]:
    """``SplitAlongDim``: no copy in backward where the gradients are parts of one packed tensor, which they are not
    where they lie one behind the other."""
    whole, dtype = x.shape, x.dtype

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        first = gradients[0]
        assert first is not None
        if packed and all(one is not None and one.storage is first.storage for one in gradients):
            return [first.view(*whole)]
        return [r.empty(whole, dtype, "grad_qkv")]

    node = r.node((x,), (), backward, outputs=len(shapes))
    return [Tensor(x.storage, shape, dtype, node, slot) for slot, shape in enumerate(shapes)]


INNER = 384
"""Width of experts in a chain."""


def _chain(r: Recorder, x: Tensor, case: Case, shape: CoreShape) -> Tensor:
    wide = (INNER * (2 if shape.spec.gated else 1), case.h)
    first, second = (
        [r.parameter(f"{name}{i}", size, "bf16", low=shape.low) for i in range(case.count)]
        for name, size in (("fc1", wide), ("fc2", (case.h, INNER)))
    )
    scale = r.outside((x.shape[0],), "fp32") if case.count > 1 else None
    return grouped_chain.experts(r, x, scale, (first, second), "experts", shape)


RECIPES: dict[str, Callable[[Recorder, Tensor, Case, CoreShape], Tensor]] = {
    "norm": _norm,
    "column": _column,
    "row": _row,
    "norm_column": _norm_column,
    "grouped": _grouped,
    "rope": _rope,
    "cross_entropy": _cross_entropy,
    "attention": _attention,
    "chain": _chain,
}
