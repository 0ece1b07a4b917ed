"""Megatron-LM's arguments of ranks and batches (``_add_distributed_args``; ``validate_args``)."""

from __future__ import annotations

import re

from ...plan.errors import ABSENT, Node, PlanError
from ...plan.megatron_layout import virtual_stages, written_out
from ...plan.plan import Plan
from ..settings import NEEDED, OFF, Reader, Row, elsewhere, positive, switch
from . import hybrid


def _sequence_parallel(reader: Reader) -> None:
    name = "--sequence-parallel"
    on = reader.settings.has(name) and reader.building.size("layout.tp") != 1
    reader.building.put("layout.sequence_parallel", Node(on, reader.settings.where(name)), name)


def _without_context(reader: Reader) -> str:
    return "no effect with one context-parallel rank" if reader.building.size("layout.cp") == 1 else ""


def _context_communication(reader: Reader) -> None:
    name = "--cp-comm-type"
    kinds = reader.settings.words(name)
    if kinds is None:  # Megatron-LM's own default, whatever the model
        if reader.building.size("layout.cp") > 1:
            reader.building.put("megatron.cp_communication", "p2p", name)
        return
    different = {kind.value for kind in kinds}
    if len(different) != 1 or not different <= {"p2p", "a2a", "all_gather", LEVELS}:
        shown = " ".join(str(kind.value) for kind in kinds)
        problem = "is not modelled yet; p2p, a2a, all_gather or a2a+p2p, the same for every layer, is"
        raise PlanError(name, shown, problem, origin=reader.settings.where(name))
    reader.building.put("megatron.cp_communication", kinds[0], name)


LEVELS, LEVEL_SIZES = "a2a+p2p", "--hierarchical-context-parallel-sizes"


def _context_levels(reader: Reader) -> None:
    """Two sizes, whose product is that of context parallelism (``validate_args``, ``attn_forward_func_with_cp``)."""
    sizes = reader.settings.words(LEVEL_SIZES)
    way = reader.building.items.get("megatron.cp_communication")
    if way is None or way.value != LEVELS:
        reader.building.because(LEVEL_SIZES, f"no effect without --cp-comm-type {LEVELS}")
        return
    cp = reader.building.size("layout.cp")
    shown = " ".join(str(size.value) for size in sizes) if sizes else ABSENT
    numbers = [int(str(size.value)) for size in sizes or () if str(size.value).isdecimal() and len(str(size.value)) < 9]
    if len(numbers) != 2 or len(sizes or ()) != 2 or numbers[0] * numbers[1] != cp:
        problem = f"must be two sizes with the product {cp} (--context-parallel-size), such as 2 {max(cp // 2, 1)}"
        raise PlanError(LEVEL_SIZES, shown, problem, origin=reader.settings.where(LEVEL_SIZES))
    reader.building.put("megatron.cp_inner", Node(numbers[0], reader.settings.where(LEVEL_SIZES)), LEVEL_SIZES)


_LAYOUT = "--pipeline-model-parallel-layout"
_VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
_VIRTUAL_LAYERS = "--num-layers-per-virtual-pipeline-stage"
_COUNTED = tuple(f"--account-for-{end}-in-pipeline-split" for end in ("embedding", "loss"))


def _chunks(reader: Reader) -> None:
    """Virtual stages of a rank: a number, or what a layout string or the layers of each make of them."""
    settings, put = reader.settings, reader.building.put
    if (cut := hybrid.chunks(reader, (_VIRTUAL_LAYERS, _VIRTUAL, _LAYOUT, *_COUNTED))) is not None:
        put("layout.vpp", cut, hybrid.PATTERN)
        return
    given = [name for name in (_VIRTUAL_LAYERS, _VIRTUAL, _LAYOUT) if settings.has(name)]
    if len(given) > 1:
        raise settings.wrong(
            given[1], f"must be left out with {given[0]}: only one of them says how many virtual stages there are"
        )
    if not given:
        put("layout.vpp", 1)
        return
    (name,) = given
    node = settings.word(name) if name == _LAYOUT else settings.integer(name)
    try:
        chunks = _counted_chunks(reader, name, node)
    except PlanError as error:
        raise node.wrong(name, error.problem) from None
    put("layout.vpp", Node(chunks, node.origin), name)


def _counted_chunks(reader: Reader, name: str, node: Node) -> int:
    pp = reader.building.size("layout.pp")
    if name == _VIRTUAL and isinstance(node.value, int):
        return positive("", node)
    if isinstance(node.value, int):
        layers = positive("--num-layers", reader.building.items["model.layers"])
        return virtual_stages(layers, pp, node.value, *map(reader.settings.has, _COUNTED))
    count = written_out(str(node.value)).count("|") + 1
    if count % pp:
        raise PlanError("", count, f"has {count} stages, which the {pp} ranks of the pipeline must divide")
    return count // pp


def _without_chunks(reader: Reader) -> str:
    return "no effect without virtual stages" if reader.building.items["layout.vpp"].value == 1 else ""


def _interleaved(plan: Plan) -> bool:
    return plan.layout.vpp > 1


BATCH_SCHEDULE = "--step-batch-size-schedule"
_COUNT = r"(\d+(?:\.\d+)?)([KMBT]?)"
_STEP = re.compile(f"{_COUNT}:{_COUNT}", re.ASCII | re.IGNORECASE)


def _last_batch(steps: Node) -> Node:
    """``"0:768 250B:1536"``: of a batch that grows in steps its last size, beside which there is no other
    (``num_microbatches_calculator.py``, ``StepBatchsizeNumMicroBatchesCalculator._parse_schedule``: blanks or commas
    part the steps, in order of the samples or tokens at which each begins, the first at 0)."""
    found = [_STEP.fullmatch(step) for step in str(steps.value).replace('"', "").replace(",", " ").split()]
    sizes = {_in_ones(step[1], step[2]): int(_in_ones(step[3], step[4])) for step in found if step is not None}
    if not sizes or len(sizes) < len(found) or min(sizes) != 0 or not all(sizes.values()):
        raise steps.wrong(
            BATCH_SCHEDULE, "must be steps such as 0:768 250B:1536, the first from 0 on, each from another number on"
        )
    return Node(sizes[max(sizes)], steps.origin)


def _in_ones(number: str, unit: str) -> float:
    return float(number) * 1e3 ** " KMBT".index(unit.upper() or " ")


def _decoder(reader: Reader) -> None:
    """The decoder's sequence. It has as many layers as the encoder (``validate_args``; ``pretrain_t5.py``,
    ``model_provider``)."""
    settings, building, is_t5 = reader.settings, reader.building, reader.context.family == "t5"
    layers, name = settings.integer(DECODER_LAYERS), "--decoder-seq-length"
    if not is_t5:
        building.because((DECODER_LAYERS, name), "no effect: the model has no decoder of its own")
        return
    building.because(DECODER_LAYERS, "not read: the decoder has as many layers as the encoder")
    encoder = building.size("model.layers")
    if layers is not None and layers.value != encoder:
        said = f"--decoder-num-layers {layers.value} is not used: pretrain_t5.py builds as many as the encoder has"
        building.note("decoder-layers-unused", f"{said}, {encoder}")
    seq = settings.integer(name)
    if seq is None:
        raise settings.wrong(name, "is missing: the training cannot start without it")
    building.put("batch.decoder_seq", seq, name)


DECODER_LAYERS = "--decoder-num-layers"


def _gbs(reader: Reader) -> None:
    """Where nobody says, one micro-batch on every data-parallel rank."""
    settings, building, gpus = reader.settings, reader.building, reader.context.gpus
    steps = settings.word(BATCH_SCHEDULE)
    gbs = settings.integer("--global-batch-size")
    if steps is not None:
        if gbs is not None:
            raise gbs.wrong("--global-batch-size", f"must be left out with {BATCH_SCHEDULE}: Megatron-LM stops")
        gbs = _last_batch(steps)
    if gbs is not None:
        building.put("batch.gbs", gbs, BATCH_SCHEDULE if steps is not None else "--global-batch-size")
    elif gpus is not None:
        ranks = building.size("layout.tp") * building.size("layout.pp") * building.size("layout.cp")
        mbs = building.items["batch.mbs"]
        dp = max(positive("--gpus", gpus) // ranks, 1)
        building.put("batch.gbs", Node(positive("--micro-batch-size", mbs) * dp, mbs.origin))


SHARDS, EXPERT_SHARDS = (f"--{kind}tensor-parallel-num-weight-shards" for kind in ("", "expert-"))


def _weight_shards(reader: Reader) -> None:
    """Into how many parts a weight is cut, among tensor-parallel ranks and beyond
    (``resolve_tensor_parallel_weight_shards``): so far no further than among them."""
    building, tp = reader.building, reader.building.size("layout.tp")
    etp = reader.settings.integer("--expert-tensor-parallel-size")
    sizes = {
        SHARDS: ("--tensor-model-parallel-size", tp),
        EXPERT_SHARDS: ("--expert-tensor-parallel-size", tp if etp is None else positive("", etp)),
    }
    for name, (among, size) in sizes.items():
        shards = reader.settings.integer(name)
        if shards is None:
            continue
        count = positive(name, shards)
        if count % size:
            problem = f"must be a multiple of {among}, which is {size}: Megatron-LM stops"
            raise PlanError(name, count, problem, origin=shards.origin)
        if count > size:
            problem = f"must be {size}, as {among}: weights in more shards than that, which are gathered for every "
            raise PlanError(name, count, f"{problem}product, are not modelled yet", origin=shards.origin)
        building.because(name, f"as many shards as {among} has ranks: nothing is gathered")


PARALLEL = (
    Row("--tensor-model-parallel-size", "layout.tp", "PARALLEL", default=1, least=1),
    Row("--pipeline-model-parallel-size", "layout.pp", "PARALLEL", default=1, least=1),
)
LAYOUT = (
    *PARALLEL,
    Row(SHARDS, "layout.tp", read=_weight_shards),
    Row(EXPERT_SHARDS, "layout.etp", read=elsewhere),
    Row("--context-parallel-size", "layout.cp", "PARALLEL", default=1, least=1, when=lambda plan: plan.layout.cp > 1),
    Row(
        "--cp-comm-type",
        "megatron.cp_communication",
        "PARALLEL",
        read=_context_communication,
        without_effect=_without_context,
        when=lambda plan: plan.layout.cp > 1,
    ),
    Row(
        LEVEL_SIZES,
        "megatron.cp_inner",
        "PARALLEL",
        read=_context_levels,
        without_effect=_without_context,
        when=lambda plan: plan.layout.cp > 1 and plan.megatron.cp_communication == LEVELS,
        value=lambda plan: (inner := plan.megatron.cp_inner or 1, plan.layout.cp // inner),
    ),
    Row(
        "--expert-model-parallel-size",
        "layout.ep",
        "PARALLEL",
        default=1,
        least=1,
        when=lambda plan: plan.layout.ep > 1,
    ),
    switch("--sequence-parallel", "layout.sequence_parallel", "PARALLEL", read=_sequence_parallel),
    Row(
        _VIRTUAL,
        "layout.vpp",
        "PARALLEL",
        read=_chunks,
        when=lambda plan: plan.pipeline.layout is None and _interleaved(plan) and hybrid.is_plain(plan),
    ),
    Row(_LAYOUT, "pipeline.layout", "PARALLEL", "word", when=hybrid.is_plain),
    Row("--decoder-first-pipeline-num-layers", "pipeline.first_layers", "PARALLEL", when=hybrid.is_plain),
    Row("--decoder-last-pipeline-num-layers", "pipeline.last_layers", "PARALLEL", when=hybrid.is_plain),
    switch(_COUNTED[0], "pipeline.count_embedding", "PARALLEL", when=hybrid.is_plain),
    switch(_COUNTED[1], "pipeline.count_loss", "PARALLEL", when=hybrid.is_plain),
    Row(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "pipeline.group",
        "PARALLEL",
        without_effect=_without_chunks,
        when=_interleaved,
    ),
    switch(
        "--no-overlap-p2p-communication",
        "pipeline.overlap_p2p",
        "PARALLEL",
        OFF,
        without_effect=_without_chunks,
        when=_interleaved,
    ),
    switch(
        "--overlap-p2p-communication-warmup-flush",
        "pipeline.overlap_p2p_warmup",
        "PARALLEL",
        without_effect=_without_chunks,
    ),
)
BATCH = (
    Row("--micro-batch-size", "batch.mbs", "BATCH", default=NEEDED),
    Row("--global-batch-size", "batch.gbs", "BATCH", read=_gbs),
    Row(
        "--eval-micro-batch-size",
        "trainer.evaluation_mbs",
        "BATCH",
        when=lambda plan: bool(plan.trainer.evaluation_mbs),
    ),
    Row("--seq-length", "batch.seq", "BATCH", default=NEEDED, older=("--encoder-seq-length",)),
    Row(
        "--decoder-seq-length",
        "batch.decoder_seq",
        "BATCH",
        read=_decoder,
        when=lambda plan: plan.batch.decoder_seq is not None,
    ),
    Row(DECODER_LAYERS, "model.layers", "BATCH", read=elsewhere, when=lambda plan: plan.batch.decoder_seq is not None),
)
