"""What the report says of Megatron-Core: recompute without gain, copies of the head, and what is taken for granted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from ...device.measured import NOTHING, causes, outside_range
from ...layers.megatron_core import offload
from ...layers.module import Options
from ...notices import tied_head
from ...plan.plan import ResolvedPlan
from ...report.names import size
from ...result import Notice
from ...tape.events import Hold
from ...tape.program import Program, fold_program
from ...values import replace
from . import captures
from .from_plan import core_shape
from .programs import programs as programs_of

CODE = (
    "Megatron-Core as of August 2026, with apex, Transformer Engine and flash-attention 2 installed, as "
    "in NVIDIA's container; FusedAdam (with optimizer.implementation foreach neither is installed, and torch.optim "
    "steps); all collectives in place except "
    "sequence parallelism's gathers and reduce-scatters",
    "side streams (overlapped communication) run in the main stream's order",
    "the report shows the largest of the distributed optimizer's shards, with tensors in the order of "
    "the module's parameters",
    "a chunk's last input and that input's gradient live until the chunk's next forward "
    "(TransformerBlock.input_tensor)",
    "attention_backend auto: cuDNN 9.20; without --gpu, an H100's choice without library workspaces",
)

BACK_ENDS = {
    "flash": "flash-attention {}",
    "fused": "cuDNN; NVIDIA publishes its front end's workspace only, not its engine's other allocations",
    "unfused": "scores are stored",
}
"""What the back ends of Transformer Engine are."""

LOW_ATTENTION = (
    "attention in 8 bits is that of cuDNN 9.21 or later, whose front end takes no workspace; what its engine takes is "
    "not published; a step's time has products of attention at the speed of 16 bits"
)


SHARDED = (
    "Megatron-FSDP 1 as of August 2026: whole layers are its units; what no layer has stays gathered (from 30 May "
    "2026); such modules gather layers ahead in the very first micro-batch alone, which is no part of the steady state"
)

SHARDED_BYTES = (
    "Megatron-FSDP with weights in 8 bits: transposed copies of a layer's weights are counted from the start of the "
    "layer's pass; casts of single tensors while the model is built are not counted"
)

REGISTERED = (
    "buffers that come from NCCL (ncclMemAlloc) are segments of PyTorch's sizes in a memory pool of their own, as NCCL "
    "of August 2026 has them: older NCCL rounds each up to what multicast wants"
)


TORCH_SHARDED = (
    "PyTorch's FSDP2 as Megatron-Core calls it: layers, embedding and (but for local layers) the output layer are its "
    "units, what is left is the model's own; gradients have the parameters' dtype, and the step's fp32 copies of them "
    "stay until the next iteration; hooks of PyTorch 2.13"
)


OFFLOADED = (
    "activations that go to the host leave the GPU when the layer behind sends the same ones, as if copies just kept "
    "up with layers; they are there again when backward asks for them, and take no time"
)


LAYERS_OFFLOADED = (
    "tensors of layers on the host leave the GPU and come back when Transformer Engine (2.10 and later) says so, which "
    "waits for their copies; they take no time here; tensors of fewer than 262,144 elements stay, and host memory is "
    "rounded up to powers of two, as PyTorch pins it"
)


GRAPHED = (
    "allocated bytes are those of iterations before CUDA graphs are captured, with what graphs keep: later PyTorch "
    "counts what lies in the graphs' pool as reserved alone"
)


GRAPHED_FIRST = (
    "CUDA graphs of attention are captured before the first iteration, which is part of the initialisation: what their "
    "kernels allocate stays reserved, and iterations allocate the rest"
)


GRAPHED_BEHIND = (
    "Megatron-Core's own CUDA graphs, as of August 2026, are captured behind the passes of the first iteration: that "
    "iteration without graphs, and the captures, are part of the initialisation; what graphs' kernels allocate stays "
    "reserved, iterations allocate the rest; what the driver keeps for graphs themselves is not known"
)


BESIDE = (
    "exchanges of tokens beside another micro-batch: blocks that two streams use are free once their tensors have "
    "ended, as allocated bytes have it; the allocator hands them out again a little later, when both streams are done; "
    "a step's time hides exchanges in all passes, though nothing runs beside the first and the last ones"
)


def assumptions(plan: ResolvedPlan) -> tuple[str, ...]:
    given = plan.megatron
    own = given.cuda_graphs == "local"
    first = not own and given.cuda_graph_warmup == 0 and captures.separable(core_shape(plan))
    further = {
        SHARDED: given.fsdp != "none",
        SHARDED_BYTES: given.fsdp == "optim_grads_params" and plan.precision.fp8_parameters,
        REGISTERED: given.fsdp != "none" and given.registers_buffers,
        TORCH_SHARDED: given.torch_fsdp != "none",
        OFFLOADED: given.offload_modules is not None,
        LAYERS_OFFLOADED: given.offload_layers > 0,
        GRAPHED_FIRST: first,
        GRAPHED_BEHIND: own,
        GRAPHED: given.cuda_graphs != "none" and not (first or own),
        BESIDE: plan.experts.overlap_exchange,
        LOW_ATTENTION: given.fp8_attention,
    }
    return (*_code(plan), *(said for said, applies in further.items() if applies))


def _code(plan: ResolvedPlan) -> tuple[str, ...]:
    if plan.megatron.transformer_impl != "transformer_engine":
        return CODE
    shape = core_shape(plan)
    back_end, what = shape.attention, BACK_ENDS[shape.attention].format(shape.flash.number)
    te = f"Transformer Engine {plan.megatron.transformer_engine}, PyTorch {plan.torch}; attention back end "
    return (*CODE, f"{te}{back_end} ({what})")


def notices(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    for source in (
        _recomputed_for_nothing,
        _offloaded_for_nothing,
        _without_experts,
        _unread_mask,
        tied_head,
        _zero_alone,
        _imbalance,
        _low_precision,
    ):
        yield from source(plan, programs)


def _has_experts(plan: ResolvedPlan) -> bool:
    model = plan.model
    return any(map(model.has_experts, range(model.layers))) or (model.experts > 0 and model.mtp_layers > 0)


def _without_experts(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """Models that were cut to the dense layers in front, and shared experts that the model has not."""
    model = plan.model
    if model.experts and not _has_experts(plan):
        yield Notice(
            "no-layer-with-experts",
            f"none of the {model.layers} layers of {model.name} has experts, since its dense ones come first: ep, "
            "dispatcher and imbalance change nothing; raise --layers or lower --dense-layers to have experts",
        )
    if plan.experts.shared_expert_overlap and not model.shared_expert_ffn:
        yield Notice(
            "overlap-without-gain",
            f"experts.shared_expert_overlap changes nothing: {model.name} has no shared experts (--shared-expert-ffn)",
        )
    given = plan.experts
    if model.experts and given.dispatcher != "flex" and "flex_backend" in given.model_fields_set:
        yield Notice(
            "flex-backend-unused",
            f"experts.flex_backend changes nothing: the dispatcher is {given.dispatcher} (--moe-dispatcher flex)",
        )


LARGE_MASK = 1 << 30
"""Bytes of a mask from which on it is worth a word."""


def unread_mask(plan: ResolvedPlan) -> int:
    """Bytes of a micro-batch's attention mask, one for each pair of tokens (``gpt_dataset.py``,
    ``_get_ltor_masks_and_position_ids``), that no kernel reads; 0 where one does, or where there is none."""
    shape, seq = core_shape(plan), plan.batch.seq
    causal = plan.model.causal and plan.batch.decoder_seq is None
    unread = shape.attention_mask and causal and shape.attention in ("flash", "fused")
    return plan.batch.mbs * seq * seq if unread else 0


def _unread_mask(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """The data loader's mask of a long sequence, which goes to the GPU all the same."""
    mask = unread_mask(plan)
    if mask >= LARGE_MASK:
        s = plan.batch.seq
        yield Notice(
            "attention-mask",
            f"the data loader makes a mask of {plan.batch.mbs} x {s:,} x {s:,} booleans, {size(mask)} on the first and "
            f"the last stage, which {core_shape(plan).attention} attention does not read: "
            "--no-attention-mask-in-dataloader (Megatron-LM's --no-create-attention-mask-in-dataloader) leaves it out",
        )


def _offloaded_for_nothing(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """Modules that no layer has send nothing to the host, and Megatron-Core does not say so."""
    asked = plan.megatron.offload_modules or ()
    shape, experts = core_shape(plan), any(map(plan.model.has_experts, range(plan.model.layers)))
    had = offload.groups_of(replace(shape, recompute_modules=()), experts=experts)
    if none := [one for one in asked if one not in had]:
        which = "latent attention's norm" if none == ["attn_norm"] else "experts"
        yield Notice(
            "offload-without-gain",
            f"offload_modules names {', '.join(none)}, which no layer has, so it moves nothing to the host; {which} "
            "would",
        )


def _recomputed_for_nothing(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """Selective recompute of modules that no layer has, and under Transformer Engine of what its layers do not keep."""
    modules, model = plan.recompute.modules or (), plan.model
    if plan.recompute.mode == "selective" and not model.layer_pattern:
        mixed = [model.has_experts(layer) for layer in range(model.layers)]
        had = {"mlp": not all(mixed), "moe": any(mixed), "shared_experts": any(mixed) and model.shared_expert_ffn > 0}
        if none := [one for one in modules if not had.get(one, True)]:
            yield Notice(
                "recompute-without-gain",
                f"recomputing {' and '.join(none)} saves nothing: no layer of {model.name} has it; its layers have "
                f"{', '.join(one for one, there in had.items() if there)}",
            )
    te = plan.megatron.transformer_impl == "transformer_engine"
    if not te or plan.recompute.mode != "selective":
        return
    backend = core_shape(plan).attention
    if "core_attn" in modules and backend != "unfused":
        yield Notice(
            "recompute-without-gain",
            f"recomputing core_attn saves nothing: {backend} attention keeps no scores; the recompute takes time and "
            "may take memory; leave out core_attn, or recompute mlp",
        )
    if "layernorm" in modules and not (plan.model.experts or plan.model.latent_kv_rank):
        yield Notice(
            "recompute-without-gain",
            "recomputing layernorm saves nothing: Transformer Engine's layers have no separate norms, each "
            "norm is part of the following linear layer",
        )


def _imbalance(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """What the peak is where tokens go to some experts more than to others. Buffers that are padded do not grow."""
    shape = core_shape(plan)
    experts = shape.experts
    if experts is None or not _has_experts(plan):
        return
    if experts.ep == 1 or experts.padded:
        if plan.experts.imbalance != "balanced":
            why = "every expert's rows are padded to its capacity" if experts.padded else "every rank has all experts"
            yield Notice("imbalance-for-nothing", f"experts.imbalance changes nothing: {why}")
        return
    sent = shape.routed.sent
    worst = replace(shape, experts=replace(experts, imbalance=float(experts.ep))).routed.received / sent
    names = {"balanced": "balanced", "1.5": "1.5 times the mean", "worst": f"the worst, {worst:g} times the mean"}
    outside, _ = outside_range(causes(plan, 0, NOTHING))
    room = inf if plan.hardware.capacity is None else plan.hardware.capacity - outside
    peaks = {name: _peak(plan, given) for given, name in names.items() if given != "1.5" or worst > 1.5}
    told = {name for name, peak in peaks.items() if peak > room >= peaks["balanced"]}
    parts = [f"{size(peak)} ({name}{': does not fit' if name in told else ''})" for name, peak in peaks.items()]
    yield Notice(
        "experts-imbalance",
        f"the peak depends on how many tokens the most loaded rank's experts get: {', '.join(parts)}, as requested "
        f"bytes; this estimate: {_said(plan.experts.imbalance, worst)} (--experts-imbalance)",
    )


def _said(imbalance: str, worst: float) -> str:
    """Of a record the factors of its rank, the one that has most tokens in all layers together."""
    factors = imbalance.split(",")
    if len(factors) == 1:
        above = imbalance not in ("balanced", "worst") and float(imbalance) > worst
        return f"{imbalance}, taken as the worst, since routing allows no more" if above else imbalance
    each = sorted(map(float, factors))
    mean = sum(each) / len(each)
    return f"{mean:.2f} times the mean in {len(each)} layers, from {each[0]:g} to {each[-1]:g}"


def _low_precision(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """What fp8 and fp4 add, and what they leave as it is (Megatron-LM's issue 2063 is of somebody surprised)."""
    given = plan.precision
    if given.low is None:
        return
    copies = max(sum(_weight_copies(program)) for program in programs)
    kept = (
        f"weights stay in {given.dtype} and have quantised copies beside them, {size(copies)} on the fullest stage "
        "(--fp8-parameters stores weights only in it)"
    )
    stored = "weights of these layers are stored only in it, in every orientation that products read"
    attention = "" if plan.megatron.fp8_attention else "attention's saved tensors, "
    output = "" if plan.megatron.fp8_output else ", output layer"
    yield Notice(
        "low-precision",
        f"{given.low} covers only linear layers' products and the inputs that they save: "
        f"{stored if given.fp8_parameters else kept}; gradients, main parameters, optimizer states, hidden states and "
        f"outputs of products, {attention}embedding{output} and logits are as large as without it",
    )


def _weight_copies(program: Program) -> Iterator[int]:
    """Bytes of what modules keep of each weight in fewer bits."""
    assert program.kept is not None
    return (one.bytes for one in program.kept.workspaces if isinstance(one, Hold) and ".weight" in one.name)


def _peak(plan: ResolvedPlan, imbalance: str) -> int:
    """Bytes that the fullest stage requests."""
    other = plan.model_copy(update={"experts": plan.experts.model_copy(update={"imbalance": imbalance})})
    return max(fold_program(program).peak for program in programs_of(other, Options()))


def _zero_alone(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    if plan.layout.zero == 1 and plan.layout.dp == plan.layout.cp == 1:
        yield Notice("zero1-without-dp", "the distributed optimizer has nothing to shard: dp x cp = 1")
