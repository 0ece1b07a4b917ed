"""``megatron-deepspeed``: BigScience's Megatron-DeepSpeed of 2021."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..base import OLD_BLOCK_SIZE, Framework, Parts, Supports

if TYPE_CHECKING:
    from ...plan.plan import AttentionImplementation, LossKind, Plan, ResolvedPlan
    from ...schedules.partition import Entry


LONGEST_LIST = 12
"""Entries of a partition that are printed without ``-v``."""


class MegatronDeepspeed(Framework):
    name = "megatron-deepspeed"
    parts = Parts(
        ".searching:MegatronDeepspeedSearch",
        ".timing:MegatronDeepspeedTime",
        "...trace.framework:OtherRunning",
        notices=".notices:notices",
        assumptions=".notices:assumptions",
        communicators=".communicators:communicators",
    )
    configuration = "megatron-deepspeed"
    measured_code = "megatron-deepspeed"
    holds_workspaces = True
    supports = Supports(
        loops=(),
        mixtures=(),
        sizes=frozenset({"tp", "pp", "dp"}),
        zero=(0, 1),
        stages_without_layers=False,
        sections=(),
        pipeline=("schedule", "partition"),
        optimizers=("sgd", "adam", "adamw", "adam8bit"),
        implementations=("foreach", "for-loop", "fused", "apex", "transformers"),
        default_implementations={"adam": "apex", "adamw": "apex"},
        optimizer_fields=frozenset({"momentum", "weight_decay", "block_size", "embeddings_32bit"}),
        losses=("plain", "vocab-parallel", "adaptive-softmax"),
        last_logits=False,
        autocast=False,
        reentrant=False,
        gradients_in_fp32=True,
        code_2020=False,
    )

    default_torch = "1.8"
    default_block_size = OLD_BLOCK_SIZE

    def default_loss(self, plan: Plan) -> LossKind:
        return "vocab-parallel"

    def default_attention(self, plan: Plan) -> AttentionImplementation:
        return "eager"

    def vocab_multiple(self, plan: Plan) -> int:
        """``_vocab_size_with_padding``: 128 times t."""
        return 128 * plan.layout.tp

    def layer_list(self, plan: Plan) -> Sequence[Entry]:
        from .programs import layer_list, parallel_shape

        return layer_list(plan, parallel_shape(plan))

    def stage_edges(self, plan: Plan) -> list[int]:
        from .programs import parallel_shape, stage_bounds

        return stage_bounds(plan, parallel_shape(plan))[1]

    own_layers = True

    def optimizer_assumptions(self, plan: ResolvedPlan) -> tuple[str, ...]:
        return () if plan.optimizer.name == "adam" else super().optimizer_assumptions(plan)

    def cut_field(self, plan: Plan, *, whole: bool) -> str:
        partition = plan.pipeline.partition
        if isinstance(partition, str):
            return f"--partition {partition}"
        shown = [str(entry) for entry in partition]
        if len(shown) > LONGEST_LIST and not whole:
            shown = [*shown[: LONGEST_LIST - 3], "…", *shown[-2:]]
        return f"--partition {','.join(shown)}"


FRAMEWORK = MegatronDeepspeed()
