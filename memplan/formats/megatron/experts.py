"""Megatron-LM's arguments of experts, latent attention and multi-token prediction, and the plan's fields that they
are, both ways (``megatron/training/arguments.py``, ``_add_moe_args``, ``_add_mla_args``; ``transformer_config.py``)."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from ...plan.errors import ABSENT, Node, PlanError
from ...plan.plan import Plan
from ...plan.spec import MOST_LAYERS
from ..settings import LEFT, Reader, Row, elsewhere, switch
from . import hybrid

NUMBER = "--num-experts"
LATENT = "--multi-latent-attention"


def mixed(plan: Plan) -> bool:
    return plan.model.experts > 0


def latent(plan: Plan) -> bool:
    return plan.model.latent_kv_rank > 0


def without_experts(reader: Reader) -> str:
    return "" if reader.building.items["model.experts"].value else f"no effect without {NUMBER}"


def _stops_without_experts(name: str, reader: Reader) -> str:
    reason, settings = without_experts(reader), reader.settings
    if reason and settings.has(name):
        raise settings.wrong(
            name, "must be left out without experts on several ranks (--expert-model-parallel-size), as Megatron has it"
        )
    return reason


def without_latent(reader: Reader) -> str:
    return "" if reader.settings.has(LATENT) else f"no effect without {LATENT}"


def of_experts(name: str, path: str, kind: Any = "integer", default: Any = 0, **more: Any) -> Row:
    """A row that counts, and is written, where there are experts."""
    when = more.pop("when", mixed)
    return Row(name, path, "EXPERTS", kind, default, without_effect=without_experts, when=when, **more)


def switch_of_experts(name: str, path: str, **more: Any) -> Row:
    return switch(name, path, "EXPERTS", without_effect=without_experts, when=mixed, **more)


def of_latent(name: str, path: str, default: int, **more: Any) -> Row:
    return Row(name, path, "LATENT", **{"default": default, "without_effect": without_latent, "when": latent, **more})


def _of(path: str) -> Callable[[Reader], Node]:
    """The default is another field's value."""
    return lambda reader: reader.building.items[path]


# -- layers with experts ------------------------------------------------------------------------------------

FREQUENCY = "--moe-layer-freq"


def _frequency(reader: Reader) -> None:
    """Every n-th layer has experts, from the first on; or a list of ones and zeros, in Python."""
    node = reader.settings.word(FREQUENCY)
    if node is None:
        return
    layers = reader.building.size("model.layers")
    text = str(node.value)
    pattern = evaluated(text)
    if isinstance(pattern, int) and pattern >= 1:
        pattern = [int(i % pattern == 0) for i in range(layers)]
    if not isinstance(pattern, list) or len(pattern) != layers or not set(pattern) <= {0, 1}:
        problem = f"must be a whole number, or a list of {layers} zeros and ones, such as ([0]*1+[1]*{layers - 1})"
        raise PlanError(FREQUENCY, text, problem, origin=node.origin)
    dense = [Node(layer, node.origin) for layer, experts in enumerate(pattern) if not experts]
    reader.building.put("model.dense_layers", Node(dense, node.origin), FREQUENCY)


def evaluated(text: str) -> int | list[int] | None:
    """A number, or a list in Python (``moe_freq_type``); ``None`` where ``text`` is neither."""
    try:
        return _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _evaluated(part: ast.expr) -> int | list[int]:
    """The value of sums and products of numbers and lists, of at most as many numbers as a model has layers."""
    if isinstance(part, ast.Constant) and type(part.value) is int:
        return part.value
    if isinstance(part, ast.List):
        found = [_evaluated(one) for one in part.elts]
        if all(isinstance(one, int) for one in found) and len(found) <= MOST_LAYERS:
            return [one for one in found if isinstance(one, int)]
    if isinstance(part, ast.BinOp):
        left, right = _evaluated(part.left), _evaluated(part.right)
        if isinstance(part.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return _short(left + right)
        if isinstance(part.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            return _short(left * right if 0 <= right * len(left) <= MOST_LAYERS else [])
    raise ValueError


def _short(pattern: list[int]) -> list[int]:
    if not pattern or len(pattern) > MOST_LAYERS:
        raise ValueError
    return pattern


def _pattern(plan: Plan) -> str:
    ones = [int(plan.model.has_experts(layer)) for layer in range(plan.model.layers)]
    return "(" + "+".join(f"[{one}]*{len([*run])}" for one, run in groupby(ones)) + ")"


# -- the router ---------------------------------------------------------------------------------------------

BALANCING, COEFFICIENT = "--moe-router-load-balancing-type", "--moe-aux-loss-coeff"


def _balancing(reader: Reader) -> None:
    """One kind of balancing, and its coefficient."""
    kinds = reader.settings.words(BALANCING) or []
    if len(kinds) > 1:
        problem = "is not modelled yet with several kinds of losses; one of them is"
        raise PlanError(BALANCING, " ".join(str(one.value) for one in kinds), problem, origin=kinds[1].origin)
    if kinds and kinds[0].value == "quantile_balancing":
        problem = "is not modelled yet; aux_loss, seq_aux_loss, global_aux_loss, sinkhorn and none are"
        raise PlanError(BALANCING, "quantile_balancing", problem, origin=kinds[0].origin)
    if kinds:
        reader.building.put("model.router_balancing", kinds[0], BALANCING)
    weights = reader.settings.words(COEFFICIENT) or []
    if weights:
        node = reader.settings.number(COEFFICIENT) if len(weights) == 1 else None
        if node is None:
            problem = "must be one number: losses of several kinds are not modelled yet"
            raise PlanError(COEFFICIENT, " ".join(str(one.value) for one in weights), problem, origin=weights[1].origin)
        reader.building.put("model.router_aux_loss", node, COEFFICIENT)


def _jitter(reader: Reader) -> None:
    """How much is no matter of memory or time."""
    name = "--moe-input-jitter-eps"
    node = reader.settings.number(name)
    if node is not None:
        reader.building.put("experts.input_jitter", Node(True, node.origin), name)


def _grouped(plan: Plan) -> bool:
    return plan.model.router_groups > 0


# -- latent attention ---------------------------------------------------------------------------------------


def _head_dim(reader: Reader) -> None:
    """A head has the features of both parts."""
    items = reader.building.items
    if reader.settings.has(LATENT):
        both = reader.building.size("model.nope_head_dim") + reader.building.size("model.rope_head_dim")
        items["model.head_dim"] = Node(both, items["model.nope_head_dim"].origin)


def _joint_down(reader: Reader) -> None:
    name = "--mla-down-proj-fusion"
    if not reader.settings.has(name):
        return
    if not reader.settings.has(LATENT):
        raise reader.settings.wrong(name, f"needs {LATENT}: Megatron stops without")
    reader.building.put("megatron.joint_latent_down", Node(True, reader.settings.where(name)), name)


DEEPEP = "--moe-enable-deepep"
"""The older name of ``--moe-flex-dispatcher-backend deepep`` (``TransformerConfig.__post_init__``)."""


def _without_flex(reader: Reader) -> str:
    if reason := without_experts(reader):
        return reason
    flex = reader.building.items["experts.dispatcher"].value == "flex"
    if not flex and reader.settings.has(DEEPEP):
        raise reader.settings.wrong(DEEPEP, "needs --moe-token-dispatcher-type flex: Megatron stops without it")
    return "" if flex else "no effect without --moe-token-dispatcher-type flex"


def _shared(plan: Plan) -> bool:
    return plan.model.shared_expert_ffn > 0


def _without_further(reader: Reader, least: int) -> str:
    """``validate_args`` turns the mixing of fewer than two depths off."""
    depths = reader.building.items.get("model.mtp_layers")
    enough = depths is not None and isinstance(depths.value, int) and depths.value >= least
    return "" if enough else f"no effect with fewer than {least} layers of multi-token prediction"


def _predicts(plan: Plan) -> bool:
    return plan.model.mtp_layers > 0


GROUPED = "--moe-use-grouped-tensor"
SHARED_COLUMNS, COLUMNS = "--moe-shared-expert-glu-interleave-size", "--moe-mlp-glu-interleave-size"
INTERLEAVED = 32
"""Columns of a gated MLP's halves that take turns where experts are a chain of operations: kernels have no other."""


def _interleaved(name: str, path: str, chains: Callable[[Plan], bool]) -> Row:
    """Written beside a chain of gated experts; read where that is."""
    return of_experts(
        name,
        path,
        read=elsewhere,
        value=lambda plan: INTERLEAVED,
        when=lambda plan: mixed(plan) and plan.model.gated and chains(plan),
    )


def _shared_chain(reader: Reader) -> None:
    """``FusedSharedExpertMLP``, which stops without columns that take turns."""
    settings, name, size = reader.settings, "--use-grouped-gemm-for-shared-expert", SHARED_COLUMNS
    if not settings.has(name):
        return
    if not reader.building.items["model.shared_expert_ffn"].value:
        reader.building.because(name, "no effect without --moe-shared-expert-intermediate-size")
        return
    given = settings.integer(size)
    if given is None or given.value != INTERLEAVED:
        problem = f"must be {INTERLEAVED} with {name}: Megatron stops without it, and others are not modelled"
        raise PlanError(size, ABSENT if given is None else given.value, problem, origin=settings.where(size, name))
    reader.building.put("experts.shared_chain", Node(True, settings.where(name)), name)
    reader.building.because(size, "experts.shared_chain needs it")


RANK_CAPACITY = "--moe-expert-rank-capacity-factor"


ROWS: Sequence[Row] = (
    Row(NUMBER, "model.experts", "EXPERTS", default=0, when=mixed),
    of_experts("--moe-router-topk", "model.expert_top_k", default=2, least=1),
    of_experts("--moe-ffn-hidden-size", "model.expert_ffn", default=_of("model.ffn"), least=1),
    of_experts(
        "--moe-latent-size", "model.expert_latent", default=LEFT, when=lambda plan: plan.model.expert_latent > 0,
    ),
    of_experts(
        FREQUENCY, "model.dense_layers", "word", read=_frequency, value=_pattern,
        when=lambda plan: mixed(plan) and bool(plan.model.dense_layers),
    ),
    of_experts("--moe-shared-expert-intermediate-size", "model.shared_expert_ffn", when=_shared),
    switch_of_experts("--moe-shared-expert-gate", "model.shared_expert_gate"),
    of_experts(
        "--moe-router-score-function", "model.router_score", "word", LEFT,
        refused={"sqrtsoftplus": "is not modelled yet; softmax and sigmoid are"},
        when=lambda plan: mixed(plan) and plan.model.router_score != "softmax",
    ),
    switch_of_experts("--moe-router-pre-softmax", "model.router_score_first"),
    of_experts(
        "--moe-input-jitter-eps", "experts.input_jitter", "number", read=_jitter,
        value=lambda plan: 0.01, when=lambda plan: plan.experts.input_jitter,
    ),
    switch_of_experts("--moe-router-enable-expert-bias", "model.router_expert_bias"),
    switch_of_experts("--moe-apply-probs-on-input", "model.router_weighs_inputs"),
    of_experts("--moe-router-num-groups", "model.router_groups", when=_grouped),
    of_experts("--moe-router-group-topk", "model.router_group_top_k", when=_grouped),
    of_experts(
        "--moe-router-topk-scaling-factor", "model.router_scaling", "number", LEFT,
        when=lambda plan: mixed(plan) and plan.model.router_scaling is not None,
    ),
    of_experts(
        "--moe-router-dtype", "model.router_dtype", "word", LEFT,
        when=lambda plan: mixed(plan) and plan.model.router_dtype is not None,
    ),
    switch_of_experts("--use-fused-weighted-squared-relu", "experts.squared_relu_fusion"),
    switch_of_experts("--moe-router-fusion", "experts.router_fusion"),
    of_experts(BALANCING, "model.router_balancing", "word", read=_balancing),
    of_experts(
        COEFFICIENT, "model.router_aux_loss", "number", read=elsewhere,
        when=lambda plan: mixed(plan) and plan.model.router_aux_loss > 0,
    ),
    of_experts(
        "--moe-z-loss-coeff", "model.router_z_loss", "number", 0.0,
        when=lambda plan: mixed(plan) and plan.model.router_z_loss > 0,
    ),
    of_experts("--expert-tensor-parallel-size", "layout.etp", default=LEFT),
    of_experts("--moe-token-dispatcher-type", "experts.dispatcher", "word", "allgather"),
    Row(
        "--moe-flex-dispatcher-backend", "experts.flex_backend", "EXPERTS", "word", without_effect=_without_flex,
        when=lambda plan: mixed(plan) and plan.experts.dispatcher == "flex",
        refused={"ncclep": "is not modelled yet; deepep and hybridep are"},
    ),
    switch_of_experts("--moe-grouped-gemm", "experts.grouped_gemm"),
    switch_of_experts(
        GROUPED, "experts.grouped_tensor", words={True: True, False: LEFT},
        without=dict.fromkeys(
            ("--moe-single-grouped-weight", "--moe-single-grouped-bias"),
            f"must be left out: it is not modelled yet with {GROUPED}",
        ),
    ),
    of_experts(
        RANK_CAPACITY, "experts.rank_capacity", "number", LEFT,
        without={
            "--moe-paged-stash": "must be left out: pages that hold what experts save until their backward "
            "(paged_stash.py) are not modelled yet; without it all rows that "
            f"{RANK_CAPACITY} allows stay where they were made",
        },
        when=lambda plan: mixed(plan) and plan.experts.rank_capacity is not None,
    ),
    switch_of_experts("--moe-permute-fusion", "experts.permute_fusion"),
    of_experts(
        "--moe-expert-capacity-factor", "experts.capacity_factor", "number", LEFT,
        when=lambda plan: plan.experts.capacity_factor is not None,
    ),
    switch_of_experts("--moe-pad-expert-input-to-capacity", "experts.pad_to_capacity"),
    switch_of_experts("--moe-shared-expert-overlap", "experts.shared_expert_overlap"),
    switch(
        "--use-grouped-gemm-for-shared-expert", "experts.shared_chain", "EXPERTS", read=_shared_chain,
        without_effect=without_experts, when=_shared,
    ),
    _interleaved(SHARED_COLUMNS, "experts.shared_chain", lambda plan: plan.experts.shared_chain),
    _interleaved(COLUMNS, "megatron.fuses_operations", lambda plan: plan.megatron.fuses_operations),
    *(
        switch(name, path, "EXPERTS", without_effect=partial(_stops_without_experts, name), when=mixed)
        for name, path in (
            ("--overlap-moe-expert-parallel-comm", "experts.overlap_exchange"),
            ("--delay-wgrad-compute", "experts.delay_wgrad"),
        )
    ),
    switch_of_experts("--ep-overlap-early-attn-memory-release", "experts.early_attention_release"),
    switch_of_experts("--overlap-dispatch-backward-with-experts-wgrad", "experts.wgrad_beside_dispatch"),
    switch(LATENT, "model.latent_kv_rank", "LATENT", read=elsewhere, value=latent, when=latent),
    of_latent("--q-lora-rank", "model.latent_q_rank", 0, when=lambda plan: plan.model.latent_q_rank > 0),
    of_latent("--kv-lora-rank", "model.latent_kv_rank", 32, least=1),
    of_latent("--qk-head-dim", "model.nope_head_dim", 128, least=1),
    of_latent("--qk-pos-emb-head-dim", "model.rope_head_dim", 64, least=1),
    of_latent("--v-head-dim", "model.value_head_dim", 128, least=1),
    switch(
        "--mla-down-proj-fusion", "megatron.joint_latent_down", "LATENT", read=_joint_down,
        value=lambda plan: plan.megatron.joint_latent_down,
    ),
    Row(LATENT, "model.head_dim", "", "switch", read=_head_dim),
    Row(hybrid.FURTHER, "model.mtp_layers", "LATENT", read=hybrid.further_layers, when=_predicts),
    switch("--mtp-use-repeated-layer", "model.mtp_shared", "LATENT", when=_predicts),
    switch(
        "--mtp-detach-heads", "megatron.detaches_heads", "LATENT",
        without_effect=lambda reader: _without_further(reader, 1), when=_predicts,
    ),
    switch(
        "--mtp-hsm", "megatron.mixes_states", "LATENT",
        without_effect=lambda reader: _without_further(reader, 2), when=_predicts,
    ),
)  # fmt: skip
