"""``fsdp``: PyTorch's fully_shard, on transformers' models and torchtitan's Llama."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...plan.checks import listed
from ...plan.errors import PlanError
from ...plan.lora import refuse_apart
from ...plan.releases import ENDS_APART, TIED_TOGETHER, release, shown
from ..base import SHARDED, Adaptable, Framework, Parts, Supports

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...layers.module import Options
    from ...plan.plan import AttentionImplementation, Hardware, Layout, LossKind, Plan, Recompute, ResolvedPlan
    from ...plan.section import Dtype
    from ...tape.program import Program

SAVING = (
    "saving or loading a checkpoint gathers a unit at a time in the dtype of its shards (FULL_STATE_DICT, Accelerate's "
    "default for FSDP1; SHARDED_STATE_DICT copies nothing on the device)"
)
OF_TRANSFORMERS = ("liger", "cut", "liger-cross-entropy", "unsloth")
"""Losses that take the place of transformers'."""

OF_TORCH = ("sgd", "adam", "adamw")
OF_BITSANDBYTES = ("adam8bit", "lion", "lion8bit")
"""What steps on FSDP1's, besides."""
OF_TORCHAO = ("ao_adamw_8bit", "ao_adamw_4bit")
"""What steps on FSDP2's, besides."""
NO_DTENSOR = (
    f"must be {listed(OF_TORCH)} of PyTorch or torchao's {listed(OF_TORCHAO)} under FSDP2: bitsandbytes' kernels take "
    "no DTensor (the first step ends in 'got mixed torch.Tensor and DTensor'); FSDP1 runs them (--fsdp-version 1)"
)
"""As bitsandbytes 0.50.2 runs with torch 2.11, and issues 1403 (FSDP2) and 2080 (FSDP1)."""


OF_VERSION_1 = "under FSDP2; FSDP1 takes it (--fsdp-version 1)"
"""Of what is modelled under FSDP1 alone."""
NO_INTEGERS = "Cannot flatten integer dtype tensors"
"""What it says of bitsandbytes' 8-bit weights (torch 2.13, ``distributed/fsdp/_flat_param.py``,
``_validate_tensors_to_flatten``)."""


class Fsdp(Framework):
    name = "fsdp"
    parts = Parts(
        ".searching:FsdpSearch",
        ".timing:FsdpTime",
        ".running:FsdpRunning",
        notices=".notices:warnings",
        assumptions=".notices:assumptions",
        communicators=".communicators:communicators",
    )
    own_streams = True
    configuration = "torchtitan"
    supports = Supports(
        mixtures=("experts", "latent_kv_rank", "index_heads", "linear_interval"),
        compiled="",
        compiled_as="layers",
        loops=("transformers", "sft", "dpo", "orpo", "cpo", "simpo", "grpo", "rloo", "reward"),
        sizes=frozenset({"tp", "pp", "dp", "cp", "vpp", "ep"}),
        shards_as_zero={
            3: "fsdp shards as ZeRO-3 does where --zero is left out (with --fsdp-code torchtitan beside tp or pp, "
            "and with --fsdp-newest beside cp alone)"
        },
        sequence_parallel=True,
        tp_divides=("heads", "kv_heads", "ffn", "vocab"),
        sections=("fsdp", "lora", "quantisation", "kernels", "trainer"),
        pipeline=("schedule", "partition"),
        optimizers=(*OF_TORCH, *OF_TORCHAO, *OF_BITSANDBYTES),
        optimizers_refused={
            "adafactor": "PyTorch's and transformers' Adafactor both fail on DTensor shards (FSDP2); on flat ones "
            "(FSDP1) it is not modelled",
            "muon": "Muon runs on DTensor shards, but the gathers of its matrix products are not modelled",
        },
        implementations=("foreach", "for-loop", "fused", "bitsandbytes"),
        implementations_refused={("sgd", "fused"): "PyTorch's fused SGD takes no DTensor"},
        optimizer_fields=frozenset({"momentum", "weight_decay", "paged", "block_size", "embeddings_32bit"}),
        losses=("plain", "vocab-parallel", "chunked", *OF_TRANSFORMERS),
        last_logits=False,
        code_2020=False,
        low_precision=("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "nvfp4"),
    )

    def default_layout(self, plan: Plan) -> Layout:
        """torchtitan's tensor parallelism always shards norms along the sequence (``SequenceParallel``), and experts
        that no ranks share like the layers around them (``TensorParallel``); others it leaves whole
        (``expert_tensor_parallel_degree``)."""
        layout = plan.layout
        if layout.tp > 1 and plan.fsdp.code != "torchtitan":
            raise plan.wrong(
                "layout.tp",
                "must be 1 with framework fsdp and transformers' code, whose tp_plan is not modelled; torchtitan's is",
            )
        if layout.tp == 1:
            return layout
        if "sequence_parallel" in layout.model_fields_set and not layout.sequence_parallel:
            raise plan.wrong(
                "layout.sequence_parallel",
                "must be true with framework fsdp and tp > 1: torchtitan shards the sequence; that it need not since "
                "March 2026 (enable_sequence_parallel) is not modelled (--sequence-parallel)",
            )
        shared = {"etp": layout.tp if layout.ep == 1 else layout.etp or 1} if plan.model.experts else {}
        return layout.model_copy(update={"sequence_parallel": True, **shared})

    def casts_given(self, plan: ResolvedPlan) -> bool:
        """``MixedPrecisionPolicy.cast_forward_inputs``, which FSDP1 has off by default."""
        return plan.fsdp.version != "1"

    def no_autocast(self, plan: ResolvedPlan) -> str:
        """``fully_shard`` casts by itself (``MixedPrecisionPolicy``), as torchtitan has it
        (``torchtitan/distributed/utils.py``, ``maybe_enable_amp``)."""
        if not self.runs_transformers(plan):
            return "with torchtitan's code, which computes in dtype over fp32 parameters without it"
        return "" if plan.fsdp.version == "1" else OF_VERSION_1

    def default_loss(self, plan: Plan) -> LossKind:
        return "vocab-parallel" if plan.layout.tp > 1 else "plain"

    def default_attention(self, plan: Plan) -> AttentionImplementation | None:
        """torchtitan's models have fused kernels alone."""
        return "flash" if plan.fsdp.code == "torchtitan" else None

    def default_recompute(self, plan: Plan) -> Recompute:
        recompute = super().default_recompute(plan)
        if recompute.mode == "none" and plan.fsdp.per_operator:
            return recompute.model_copy(update={"mode": "selective"})
        return recompute

    def default_sections(self, plan: Plan, hardware: Hardware, layout: Layout) -> dict[str, object]:
        """FSDP1's dtypes are those of Accelerate, which alone reshards FSDP2's root, until its units are others
        (``ENDS_APART``; compiled graphs are learnt of a root that has all, as their assumptions say). torchtitan keeps
        parameters gathered between the micro-batches of a pipeline (``pp_enabled`` in ``apply_fsdp``). A
        PyTorch without ``fully_shard`` runs FSDP1 where nobody says a version, or dtypes that only FSDP2 has here."""
        from .units import lacks_fully_shard

        given = plan.fsdp.model_fields_set
        unsaid = self.runs_transformers(plan) and not given & {"version", "parameters", "reduce"}
        if plan.fsdp.version == "1" or (unsaid and lacks_fully_shard(plan)):
            precision = plan.precision
            dtypes = {"parameters": "fp32" if precision.autocast else precision.dtype, "reduce": precision.dtype}
            update = {name: dtype for name, dtype in dtypes.items() if name not in given}
            return {"fsdp": plan.fsdp.model_copy(update={**update, "version": "1"})}
        changed = dict[str, object]()
        if plan.lora.rank is not None and "parameters" not in given and self.runs_transformers(plan):
            changed["parameters"] = plan.precision.dtype
        later = release(plan, "accelerate") >= ENDS_APART
        root = plan.fsdp.reshard_root and self.runs_transformers(plan)
        if root and not plan.compile and "ends_apart" not in given and later:
            changed |= {"ends_apart": True, "reshard_root": False}
        if layout.pp > 1 and "reshard_after_forward" not in given:
            changed["reshard_after_forward"] = False
        if plan.fsdp.code == "torchtitan":
            changed |= _ends_of_torchtitan(plan, layout)
        return {"fsdp": plan.fsdp.model_copy(update=changed)} if changed else {}

    def runs_transformers(self, plan: Plan) -> bool:
        return plan.fsdp.code == "transformers"

    def adaptable(self, plan: Plan) -> Mapping[str, tuple[Adaptable, ...]] | None:
        if self.runs_transformers(plan) or plan.lora.rank is None:
            return None
        from . import titan_lora

        return titan_lora.adaptable(plan)

    def adapters_by(self, plan: Plan) -> str | None:
        return None if self.runs_transformers(plan) else "torchtitan (August 2026)"

    def adapter_dtype(self, plan: Plan) -> Dtype:
        return plan.fsdp.parameters

    def runs_newest(self, plan: Plan) -> bool:
        from .titan import newest

        return newest(plan)

    def check(self, plan: ResolvedPlan) -> None:
        from . import titan_low

        if self.runs_transformers(plan):
            refuse_apart(plan, "under fsdp")
        _check_ends(plan)
        titan_low.check(plan)
        if plan.quantisation.kind in ("int8", "awq"):
            weights = "8-bit" if plan.quantisation.kind == "int8" else "AWQ's"
            problem = (
                f"must be none, nf4 or fp4 (gptq with --fsdp-version 1) under fsdp: {weights} weights are modelled "
            )
            no_integers = plan.quantisation.kind == "int8" and plan.fsdp.version == "1"
            why = f"; FSDP1 refuses integers ({NO_INTEGERS})" if no_integers else ""
            raise plan.wrong("quantisation.kind", f"{problem}in single and ddp{why}")
        if plan.lora.dora and plan.quantisation.kind != "none":
            raise plan.wrong(
                "lora.dora", "must be false with sharded 4-bit weights, which FSDP hands to peft as they are packed"
            )
        if plan.trainer.kind.own_loss:
            _check_loss_of_trl(plan)
        elif plan.fsdp.version == "2":
            for field, _ in plan.trainer.changed_here():
                raise plan.wrong(f"trainer.{field}", f"must be left out {OF_VERSION_1}")
        if plan.fsdp.version == "2":
            _check_version_2(plan)
        elif plan.optimizer.name in OF_TORCHAO:
            must = f"must be one of {', '.join(self.optimizers_of(plan))} under FSDP1"
            own = "of flat parameters torchao's states are not modelled; FSDP2 has them (--fsdp-version 2)"
            raise plan.wrong("optimizer.name", f"{must}: {own}")
        elif plan.model.index_heads:
            idle = "whose parameters never have a gradient: not modelled of flat shards"
            raise plan.wrong("fsdp.version", f"must be 2 with an indexer (model.index_heads), {idle}")
        elif plan.loss.kind == "chunked":
            raise plan.wrong("loss.kind", "must be another under FSDP1: only torchtitan has chunks, under FSDP2")
        if plan.layout.tp == 1 and plan.loss.kind == "vocab-parallel":
            raise plan.wrong("loss.kind", "must be plain with tp 1: the vocabulary is not sharded")

    def stage_edges(self, plan: Plan) -> list[int]:
        from .stages import partition

        return partition(plan)

    def logits_vocab(self, plan: ResolvedPlan) -> int:
        """Without ``loss_parallel`` DTensor gathers the logits."""
        return plan.model.vocab if plan.loss.kind == "plain" else super().logits_vocab(plan)

    def optimizers_of(self, plan: ResolvedPlan) -> tuple[str, ...]:
        return (*OF_TORCH, *(OF_BITSANDBYTES if plan.fsdp.version == "1" else OF_TORCHAO))

    def attention_words(self, plan: Plan) -> str:
        """PyTorch's fused attention has another kernel for fp32."""
        own, fused = self.runs_transformers(plan), plan.attention == "flash" and plan.precision.dtype == "fp32"
        return "memory-efficient" if fused and not own else super().attention_words(plan)

    def visiting_processes(self, plan: ResolvedPlan) -> int:
        """With GPTQ's weights, which fms-acceleration loads as gptqmodel does: every rank asks how much memory each GPU
        of its node has, and makes a tensor there (``models/base.py``, ``from_quantized``; Accelerate 1.0.1,
        ``utils/modeling.py``, ``get_max_memory``)."""
        if plan.quantisation.kind != "gptq":
            return 0
        return min(plan.hardware.gpus, plan.hardware.gpus_per_node) - 1

    def sharded(self, plan: ResolvedPlan) -> str:
        if (plan.layout.dp or 1) * plan.layout.cp == 1:
            return SHARDED[0]
        return f"{SHARDED[3]} in {plan.fsdp.replicas} groups" if plan.fsdp.replicas > 1 else SHARDED[3]

    def reference(self, plan: ResolvedPlan) -> str:
        if plan.fsdp.version == "1":
            return "in flat shards, wrapped as the policy; its embedding, final norm and head stay gathered"
        return (
            f"one unit of fully_shard (trl wraps none of its layers), which is gathered whole, in shards of "
            f"{plan.fsdp.parameters}, as the policy's; loaded in 16 bits they are smaller"
        )

    def scored_ahead(self, plan: ResolvedPlan) -> str:
        if plan.fsdp.version == "1" or plan.lora.rank is not None:
            return super().scored_ahead(plan)
        return "gathers a second model as a whole, twice, before there are optimizer states, and is not counted"

    def described(self, plan: Plan) -> list[str]:
        given = plan.fsdp
        parts = ["torchtitan"] if given.code == "torchtitan" else []
        parts += [f"{given.replicas} replicas"] if given.replicas > 1 else []
        parts += ["compiled"] if given.compile else []
        return [*parts, "offload"] if given.offload else parts

    def saving(self, plan: ResolvedPlan) -> str:
        return SAVING if plan.fsdp.version == "1" else super().saving(plan)

    def programs(self, plan: ResolvedPlan, options: Options) -> tuple[Program, ...]:
        from . import flat, programs

        return flat.programs(plan, options) if plan.fsdp.version == "1" else programs.programs(plan, options)


def _ends_of_torchtitan(plan: Plan, layout: Layout) -> dict[str, object]:
    """Pipeline stages are those of its newest releases: from 0.2.0 on ``apply_fsdp`` has embedding, and norm with head,
    as units of their own with and without stages, and from 0.2.1 on the schedule returns no outputs. Where these are
    no units (0.1.0, and in December 2024) it returns them. A plan whose release does has no outputs without stages."""
    from .titan import MODELS

    given, titan = plan.fsdp.model_fields_set, MODELS.get(plan.model.family)
    none: dict[str, object] = {"return_outputs": False} if plan.fsdp.return_outputs and layout.pp == 1 else {}
    if "ends_apart" in given:
        outputs = layout.pp > 1 and not plan.fsdp.ends_apart and "return_outputs" not in given
        return {"return_outputs": True} if outputs else none
    newer = plan.fsdp.newest or plan.loss.kind == "chunked" or layout.pp > 1
    return none | ({"ends_apart": True} if titan is not None and (titan.ends_apart or newer) else {})


def _check_ends(plan: ResolvedPlan) -> None:
    """Embedding and head of transformers' models as units of their own."""
    if not plan.fsdp.ends_apart or plan.fsdp.code != "transformers":
        return
    if plan.fsdp.version == "1":
        raise plan.wrong("fsdp.ends_apart", "must be false with fsdp.version 1, whose root has embedding and head")
    accelerate = release(plan, "accelerate")
    if plan.model.tied_embeddings and not plan.model.labels and ENDS_APART <= accelerate < TIED_TOGETHER:
        raise plan.wrong(
            "versions.accelerate",
            f"must be before {shown(ENDS_APART)}, or {shown(TIED_TOGETHER)} or later, with a head that is the "
            "embedding: it leaves the head out of the embedding's unit, and fully_shard refuses weights of two units",
        )


def _check_resharded(plan: ResolvedPlan) -> None:
    """torchtitan's policy "always", which no unit is exempt from."""
    for path, kept, why in (
        ("layout.pp", 1, "in stages it is not modelled"),
        ("fsdp.ends_apart", True, "norm and head are no unit of their own otherwise"),
        ("fsdp.reshard_after_forward", True, "the policy is one for all units"),
        ("model.tied_embeddings", False, "the unit that has the embedding, too, is not modelled so"),
        ("layout.ep", 1, "it is not modelled where ranks share experts"),
    ):
        if plan.at(path) != kept:
            unless = f"{path} is {str(kept).lower()}"
            raise plan.wrong(
                "fsdp.reshard_root", f"must be false (torchtitan's policy default or never) unless {unless}: {why}"
            )


def _check_loss_of_trl(plan: ResolvedPlan) -> None:
    """With trl's reference, which waits or runs (``reference``)."""
    trainer, loop = plan.trainer, plan.trainer.loop
    if plan.fsdp.code == "torchtitan":
        raise plan.wrong("trainer.loop", "must be none with fsdp.code torchtitan, which has a loop of its own")
    for field in ("offload", "reshard_to") if trainer.has_reference else ():
        if getattr(plan.fsdp, field):
            raise plan.wrong(f"fsdp.{field}", f"must be left out with the reference of trainer.loop {loop}")
    if trainer.keeps_reference and plan.lora.rank is None and plan.fsdp.version == "2":
        raise plan.wrong(
            "trainer.keeps_reference",
            "must be false without adapters under FSDP2, which gathers a whole second model between steps: that "
            "is not modelled",
        )


def _check_version_2(plan: ResolvedPlan) -> None:
    """What is modelled under FSDP1 alone, or of transformers' models."""
    from . import chunked, graphs

    chunked.check(plan)
    graphs.check(plan)
    if plan.kernels.lora == "unsloth" or plan.quantisation.kind == "gptq":
        field = "kernels.lora" if plan.kernels.lora == "unsloth" else "quantisation.kind"
        raise plan.wrong(field, f"must be left out {OF_VERSION_1}")
    if plan.fsdp.code == "torchtitan":
        if plan.fsdp.reshard_root:
            _check_resharded(plan)
        for field, _ in plan.kernels.changed():
            raise plan.wrong(f"kernels.{field}", "must be left out: torchtitan has its own layers")
        if plan.loss.kind in OF_TRANSFORMERS:
            raise plan.wrong(
                "loss.kind", "must be plain, vocab-parallel or chunked: of torchtitan's jobs no other loss is modelled"
            )
    if plan.optimizer.of_bitsandbytes:
        raise PlanError("optimizer.name", plan.optimizer.called, NO_DTENSOR)
    plan.refuse(
        (
            "recompute.reentrant",
            plan.recompute.reentrant,
            f"must be false {OF_VERSION_1}; --no-use-reentrant leaves it out",
        )
    )
    if plan.fsdp.backward_prefetch != "pre":
        from .timing import is_flat

        if not is_flat(plan):
            raise plan.wrong(
                "fsdp.backward_prefetch",
                "must be pre under FSDP2, which PyTorch has from 2.4 on; FSDP1 takes it (--fsdp-version 1)",
            )


FRAMEWORK = Fsdp()
