"""``deepspeed``: DeepSpeed's ZeRO on a Hugging Face model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base import Communicator, Framework, Parts, Supports, world

if TYPE_CHECKING:
    from ...plan.plan import Plan, ResolvedPlan
    from ...plan.section import Dtype

FUSED = ("liger", "cut")
"""Losses that read the head's weight by themselves."""

OWN_IS_DEFAULT = "left out, it is DeepSpeed's own FusedAdam: --optimizer adamw"


class Deepspeed(Framework):
    name = "deepspeed"
    parts = Parts(
        ".searching:DeepspeedSearch",
        ".timing:DeepspeedTime",
        ".validating:DeepspeedRunning",
        programs=".engine:programs",
        notices=".notices:notices",
        assumptions=".notices:assumptions",
    )
    configuration = "deepspeed"
    measured_code = "deepspeed"
    supports = Supports(
        loops=("sft", "dpo", "orpo", "cpo", "simpo", "grpo", "rloo", "reward"),
        mixtures=("experts", "latent_kv_rank", "linear_interval"),
        sizes=frozenset({"dp"}),
        zero=(0, 1, 2, 3),
        sections=("deepspeed", "lora", "quantisation", "kernels", "trainer"),
        optimizers=("sgd", "adam", "adamw", "adam8bit", "adafactor", "lion", "lion8bit"),
        optimizers_refused={
            "muon": "DeepSpeed's own Muon takes whole matrices out of ZeRO's buckets, which is not modelled"
        },
        implementations=("foreach", "for-loop", "fused", "transformers"),
        implementations_refused={
            ("adam", "apex"): OWN_IS_DEFAULT,
            ("adamw", "apex"): OWN_IS_DEFAULT,
        },
        default_implementations={"adam": None, "adamw": None, "lion": None},
        optimizer_fields=frozenset({"momentum", "weight_decay", "block_size", "embeddings_32bit", "paged"}),
        losses=("plain", *FUSED),
        last_logits=False,
        autocast=False,
        reentrant=False,
        gradients_in_fp32=True,
        code_2020=False,
    )

    def default_gradients(self, plan: Plan) -> Dtype:
        """``data_types.grad_accum_dtype``, else the parameters' dtype."""
        named, allowed = plan.deepspeed.gradient_accumulation_dtype, {plan.precision.stored, "fp32"}
        if named is not None and named not in allowed:
            raise plan.wrong(
                "deepspeed.gradient_accumulation_dtype",
                f"must be {' or '.join(sorted(allowed))} with dtype {plan.precision.stored}",
            )
        return named or plan.precision.stored

    def check(self, plan: ResolvedPlan) -> None:
        if plan.deepspeed.gradient_accumulation_dtype not in (None, plan.precision.gradients):
            raise plan.wrong(
                "deepspeed.gradient_accumulation_dtype",
                f"must be {plan.precision.gradients}, as precision.gradients: both fields set the same dtype",
            )

    def fuses_biases(self, plan: ResolvedPlan) -> bool:
        """``LinearFunctionForZeroStage3`` adds a bias behind its product (``zero/linear.py``)."""
        return plan.layout.zero < 3 or not plan.deepspeed.memory_efficient_linear

    def communicators(self, plan: ResolvedPlan, stage: int) -> tuple[Communicator, ...]:
        """ZeRO's collectives, the norm and the loss run in a copy of the default group (``groups.py``,
        ``_clone_world_group``); barriers, if there are any, in the default group itself."""

        ranks = plan.hardware.gpus
        zero = world(ranks)._replace(name="data parallel", gathers=True, few_bytes=False)
        return (zero, world(ranks, certain=False)) if ranks > 1 else ()

    def reference(self, plan: ResolvedPlan) -> str:
        return "partitioned by an engine of its own" if plan.layout.zero == 3 else super().reference(plan)

    def described(self, plan: Plan) -> list[str]:
        places = {"optimizer": plan.deepspeed.offload_optimizer, "parameters": plan.deepspeed.offload_param}
        return [f"{what} on {place}" for what, place in places.items() if place != "none"]


FRAMEWORK = Deepspeed()
