"""What a user of ``fully_shard`` should know of a pipeline, and of one shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...assumptions import plain
from ...layers import compiled
from ...layers.autograd import ITEMSIZE
from ...plan.plan import ResolvedPlan
from ...result import Notice
from ...schedules.torch_schedules import Pipelined
from ...tape.events import Category
from ...tape.program import Program
from ..plain.preferences import has_model
from . import titan_low
from .flat import on_meta
from .titan import ROWS, newest, titan_of_plan
from .units import lacks_fully_shard

GIB = 2**30

PIPELINE = (
    "torchtitan's layers in stages of torch.distributed.pipelining 2.13; NCCL keeps the tensor of a "
    "lone send, so GPipe and the interleaved schedule hold all sent tensors until the iteration ends",
    "one call of the schedule is an iteration; the last stage frees each micro-batch's logits unless "
    "fsdp.return_outputs is set (torchtitan before October 2025); receive buffers are never freed",
    "shapes of sent tensors are known; the first iteration's extra pass to infer these shapes is not replayed",
)
"""Taken for granted with pipeline parallelism."""

CHUNKS = (
    "the loss in chunks of the last stage reduces its head with every micro-batch; the norm's gradients are counted "
    "from the first one to the end: an upper bound by them, and with two micro-batches by the head's shard",
)
CONTEXT = (
    "context parallelism: keys and values are gathered in every layer; torchtitan asks for FlexAttention there, whose "
    "tensors have the sizes of varlen_attn's, which is estimated (not counted: masks, and what Inductor allocates)",
)
ONE_SHARD = (
    "fully_shard over one rank, as in torchtitan since 9 April 2026 (#2900; before, without "
    "fully_shard): parameters are copied, no all-gather; gradients are divided by 1.0 "
    "(set_gradient_divide_factor) in a copy",
)
"""Taken for granted of torchtitan's models where no two ranks share a parameter's shards."""


FSDP = (
    "fully_shard of PyTorch 2.13 on every layer and the root; gathers and reductions run on separate "
    "streams, each with its own pool in the allocator; sizes are of rank 0, which has the largest "
    "shards",
)

PARTS_OF_TOKENS = (
    "every rank of tensor parallelism keeps its own part of the gradient of experts' inputs, as torchtitan 0.2.2 does "
    "(it sums them over these ranks since 2 March 2026, #2416)"
)
"""Taken for granted of mixtures of experts."""

TENSOR_PARALLEL = (
    "DTensor's tensor and sequence parallelism as in torchtitan's {}, with PyTorch 2.13's "
    "collectives, each with its own buffer; not counted: async TP (symmetric memory), float8, NCCL's "
    "own buffers"
)

TORCHTITAN = "zero_grad(set_to_none=True) after every step"

COMPILED = (
    f"torch.compile of every layer as torch {compiled.TORCH}'s Inductor writes it for an H100, which was run on fake "
    "tensors: what its partitioner saves, and each buffer between kernels, made and let go of at once (it takes a "
    "buffer again where that leaves the peak as it is, but for up to 2 % of a layer with few tokens); "
    "other releases may choose otherwise",
    "predicted times are of the kernels that Inductor writes, each of which reads and writes its tensors once",
)
"""Taken for granted of compiled layers."""

FLOAT8_COMPILED = (
    "with fewer than twice as many tokens as features in a micro-batch, Inductor orders a layer's backward in float8 "
    "by its sizes: its own peak may be up to a tenth lower than in the order that is followed here; what is saved is "
    "the same",
)
"""and of those in float8."""

SAVES_WEIGHTS = (
    "weights of the feed-forward that were gathered in 8 bits are saved as copies laid out for backward, as large as "
    "they are (AOTAutograd of torch 2.13 does not know all of them for parameters); recompute saves none"
)
"""Of compiled layers without recompute."""

FLOAT8_EAGER = (
    "without torch.compile every cast to 8 bits takes two tensors in fp32 beside what it casts, and with scales by "
    "rows a product in backward takes one in fp32 as large as its result: more memory and time than in bf16, which "
    "torch.compile saves; not counted: what kernels of maxima and of products by rows take inside",
)
"""Of those that are not compiled."""

EXPERT_PARALLEL = (
    "experts of a layer are a unit of their own within it, of the ranks with the same experts; every rank sends as "
    "many rows to any other, by all-to-all of NCCL; the indices of the last pass stay with each layer"
)

EXPERT_GROUPS = (
    "experts of a layer are a second group of parameters of its unit, of the ranks with the same experts; every rank "
    "sends as many rows to any other, by spmd_types' all-to-all, which copies what comes from each rank into one tensor"
)

PLACES_IN_FLIGHT = (
    "in pipeline stages every pass in flight has indices of its own; those that stay with a layer are counted as well, "
    "though they are the last pass's"
)

NOT_GATHERED_AHEAD = (
    "recompute per operator as PyTorch before 2.13 runs it, which raises an error where fully_shard gathers experts "
    "within a recomputed layer"
)


FSDP_1 = (
    "FSDP1 as Accelerate wraps a model: FULL_SHARD (SHARD_GRAD_OP without reshard_after_forward), a unit for each "
    "layer and, by peft's policy, for each adapter's weight, BACKWARD_PRE, use_orig_params; every micro-batch reduces "
    "its gradients; adapters of a layer are counted as gathered together",
    "layers are wrapped on the GPU one by one, and rank 0 sends its weights to all (sync_module_states): the allocator "
    "keeps what that took; the block of a gathered layer comes free once the next layer has been gathered, since the "
    "host runs ahead",
    "where parameters are frozen, FSDP1's hooks keep each recomputed layer's input and its gradient until backward has "
    "ended (reentrant recompute)",
)


PIECES = (
    "bitsandbytes' states are of the pieces of parameters that a rank's shards cover; readings are of the rank that "
    "has most of them on its GPU"
)

WITHOUT_FULLY_SHARD = "PyTorch before 2.4 has no fully_shard (FSDP2), so that FSDP1 runs"

RUNS_AHEAD = (
    "weights are loaded by rank 0 alone (cpu_ram_efficient_loading); the other ranks have them on the meta device"
    " while FSDP1 wraps them, and run ahead of rank 0, which copies its own to the GPU: buckets that wait for it "
    "stay in their allocators' cache. Readings are of these ranks; reserved is the middle of what they keep if "
    "rank 0 copies as fast as PCIe 4 lets it, and if it is so slow that only full streams hold them back"
)
"""Taken for granted where that is so (``flat.on_meta``)."""


def of_adapters(plan: ResolvedPlan) -> Iterator[str]:
    """Of shards that are trained, and of those that are not."""
    dtype = plan.precision.dtype
    if plan.lora.rank is not None:
        yield (
            f"adapters are shards in {plan.lora.dtype}, frozen parameters in {plan.fsdp.parameters}; both are gathered "
            f"in {dtype} (MixedPrecisionPolicy), in the unit of their layer, and adapters alone are reduced"
        )
    if plan.quantisation.kind != "none" and plan.quantisation.storage != "uint8":
        yield (
            f"4-bit weights are stored in {dtype} (bnb_4bit_quant_storage) and sharded; their scales are whole on "
            "every rank; in uint8, bitsandbytes' default, Accelerate 1.14 and later leaves the weights whole, too "
            "(--quant-storage uint8), and earlier ones fail"
        )


def assumptions(plan: ResolvedPlan) -> tuple[str, ...]:
    if plan.fsdp.version == "1":
        told = {
            PIECES: plan.optimizer.of_bitsandbytes,
            WITHOUT_FULLY_SHARD: lacks_fully_shard(plan),
            RUNS_AHEAD: on_meta(plan),
        }
        return (*FSDP_1, *(text for text, holds in told.items() if holds), *plain(plan))
    result = [*FSDP, *of_adapters(plan)]
    if plan.fsdp.offload:
        result.append(
            "host memory counts the tensors' bytes; not counted: PyTorch rounds pinned tensors up to a "
            "power of two, at most twice their bytes"
        )
    result += _tensor_parallel(plan) if plan.layout.tp > 1 else ()
    result += layouts(plan)
    return (*result, *(of_torchtitan(plan) if plan.fsdp.code == "torchtitan" else plain(plan)))


def _tensor_parallel(plan: ResolvedPlan) -> Iterator[str]:
    yield TENSOR_PARALLEL.format(titan_of_plan(plan).title)
    if plan.model.experts:
        yield PARTS_OF_TOKENS


def of_torchtitan(plan: ResolvedPlan) -> Iterator[str]:
    """Of the layers of torchtitan's model."""
    titan = titan_of_plan(plan)
    yield f"layers as in torchtitan's {titan.title} of {titan.release}; logits and loss are computed outside the model"
    yield from (one for one in titan.assumes if one != ROWS or plan.fsdp.pad_multiple is None)
    if plan.layout.ep > 1 and titan.groups_experts:
        yield EXPERT_GROUPS
    elif plan.layout.ep > 1:
        yield EXPERT_PARALLEL
        if plan.layout.pp > 1:
            yield PLACES_IN_FLIGHT
        if plan.fsdp.per_operator:
            yield NOT_GATHERED_AHEAD
    yield (TORCHTITAN if plan.fsdp.compile or plan.fsdp.compile_loss else f"{TORCHTITAN}; no torch.compile")
    if plan.fsdp.compile:
        yield from COMPILED
    if plan.precision.low and plan.model.experts:
        yield titan_low.assumed_of_experts(plan)
    if plan.precision.low in titan_low.BLOCKS:
        yield titan_low.assumed(plan)
    elif plan.precision.fp8:
        yield of_float8(plan)
        yield from FLOAT8_COMPILED if plan.fsdp.compile else FLOAT8_EAGER
        if plan.fsdp.compile and plan.fsdp.float8_all_gather and plan.recompute.mode == "none":
            yield SAVES_WEIGHTS
    if plan.fsdp.compile_loss:
        yield f"torch.compile of the loss, as torch {compiled.TORCH}'s Inductor writes it"


def of_float8(plan: ResolvedPlan) -> str:
    """Which layers, and what is saved and gathered."""
    given = plan.fsdp
    stays = ", ".join(given.filter_fqns) if given.filter_fqns else "none" if given.filter_fqns is not None else "output"
    gathered = (
        "in 8 bits, cast from shards (in predicted times in bf16)"
        if given.float8_all_gather
        else "in bf16, and cast for every product"
    )
    return (
        f"linear layers are torchao 0.18's Float8Linear ({plan.precision.fp8}), but for those whose name has a part of "
        f"filter_fqns ({stays}), or whose features are no multiple of 16; inputs are saved in bf16, so that float8 "
        f"saves no activations; weights are gathered {gathered}"
    )


def layouts(plan: ResolvedPlan) -> tuple[str, ...]:
    """Of layouts, beside what holds for all of ``fully_shard``."""
    alone = plan.fsdp.code == "torchtitan" and plan.layout.dp * plan.layout.cp == plan.fsdp.replicas
    staged = plan.layout.pp > 1
    chunked = staged and plan.loss.kind == "chunked"
    parts = ((ONE_SHARD, alone), (PIPELINE, staged), (CHUNKS, chunked), (CONTEXT, plan.layout.cp > 1))
    return tuple(one for told, holds in parts if holds for one in told)


def warnings(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """What a pipeline's schedule keeps and few expect, where it comes to a gibibyte or more on a rank; 4-bit weights
    that are not sharded; a second model that is gathered whole."""
    if plan.quantisation.storage == "uint8" and plan.layout.dp > plan.fsdp.replicas:
        yield Notice(
            "whole-4bit",
            "4-bit weights in uint8 are not sharded: every rank holds all of them; --quant-storage "
            f"{plan.precision.dtype} (bnb_4bit_quant_storage) shards them",
        )
    if plan.fsdp.newest and not newest(plan):
        yield Notice(
            "newest-not-known",
            "this estimate has torchtitan's layers of before August 2026, although --fsdp-newest asks for newer ones: "
            "of the newest, those of Llama, Qwen 3 and DeepSeek V3 are known, in bf16, float8 by rows, MXFP8 or NVFP4, "
            "without tensor parallelism and torch.compile, with --ends-apart, and with no more shards than experts "
            "unless ranks share these (--ep)",
        )
    yield from _padded_experts(plan, programs)
    if told := titan_low.parts_without_layer(plan):
        yield Notice("fqns-without-layer", told)
    if plan.runs_reference and has_model(plan):
        yield from _whole_reference(plan, programs)
    orders = [(program.stage, program.order) for program in programs if isinstance(program.order, Pipelined)]
    if not orders:
        return
    size, stage = max((_whole_gradients(order), -stage) for stage, order in orders)
    if size >= GIB:
        yield Notice(
            "gradients-whole",
            f"a pipeline reduces gradients once, after its last backward: until then stage {-stage} holds unsharded "
            f"gradients, {size:,} bytes ({size / GIB:.2f} GiB) in {plan.fsdp.reduce}, on every rank",
        )
    size, stage = max((_sent(order), -stage) for stage, order in orders)
    if size >= GIB:
        yield Notice(
            "sends-kept",
            f"stage {-stage} keeps all sent tensors, {size:,} bytes ({size / GIB:.2f} GiB), until the iteration ends: "
            "the schedule waits for its sends only there; fewer micro-batches, or 1f1b without virtual stages, help",
        )


def _padded_experts(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """Experts that are no multiple of the shards: ``fully_shard`` gives each of these ceil(experts / shards), and pads
    what is gathered (``_init_sharded_param``). torchtitan cuts them along another dimension, FSDP1 what is flat."""
    shards, experts = plan.layout.dp // plan.fsdp.replicas, plan.model.experts
    if not experts or plan.fsdp.code == "torchtitan" or plan.fsdp.version == "1":
        return
    elements = sum(one.elements for program in programs for one in program.parameter_tensors())
    each = -(-experts // shards)
    padded = sum(
        one.elements // experts * (each * shards - experts)
        for program in programs
        for one in program.parameter_tensors()
        if one.shape[0] == experts and len(one.shape) == 3
    )
    if 20 * padded < elements:
        return
    fewer = next(one for one in range(1, shards + 1) if shards % one == 0 and experts % (shards // one) == 0)
    yield Notice(
        "experts-padded",
        f"fully_shard cuts weights along dimension 0, where layers have {experts} experts: {shards} shards get {each} "
        f"each, {shards - -(-experts // each)} of them get none, and gathers are padded to {each * shards} experts; "
        f"--fsdp-replicas {plan.fsdp.replicas * fewer} cuts them into {shards // fewer}, without padding",
    )


def _whole_reference(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """Under FSDP2, where a second model is one unit."""
    elements = sum(one.elements for program in programs for one in program.parameter_tensors())
    size = elements * ITEMSIZE[plan.precision.dtype]
    if plan.fsdp.version == "2" and size >= GIB and plan.layout.dp > plan.fsdp.replicas:
        yield Notice(
            "reference-whole",
            f"trl shards the second model under FSDP2 as one unit: every step gathers all of it, {size:,} bytes "
            f"({size / GIB:.2f} GiB), and holds the buffer of that gather as long, as much again, on every rank; "
            "--precompute-ref-log-probs, adapters (--lora-rank), deepspeed or FSDP1 need less",
        )


def _whole_gradients(order: Pipelined) -> int:
    """Bytes of gradients in front of the first reduction."""
    total = 0
    for action in order.actions:
        if action.what == "reduce":
            break
        total += order.excursion(action).net_by[Category.GRADIENTS]
    return total


def _sent(order: Pipelined) -> int:
    """Bytes of the hidden states and gradients that end behind the last pass."""
    last = max(at for at, action in enumerate(order.actions) if action.what == "backward")
    ended = (one for one in order.actions[last:] if one.tensor in ("output", "input_gradient"))
    return sum(-order.excursion(one).net for one in ended if not order.kept or one.tensor == "input_gradient")
