"""Arguments of Megatron-FSDP and of PyTorch's FSDP2: ``validate_args`` of ``megatron/training/arguments.py``, and
``get_megatron_ddp_config`` of ``training.py``."""

from __future__ import annotations

from ...plan.errors import ABSENT, Node, PlanError
from ...plan.plan import Plan
from ..settings import Reader, Row, elsewhere, switch

RUNS = "--use-megatron-fsdp"
STRATEGY = "--data-parallel-sharding-strategy"
DTYPES = "--megatron-fsdp-{}-dtype"
MAIN, GRADIENTS, COMMUNICATION = map(DTYPES.format, ("main-params", "main-grads", "grad-comm"))


TORCH, KEEPS = "--use-torch-fsdp2", "--torch-fsdp2-no-reshard-after-forward"
ON_HOST, ON_META = "--use-cpu-initialization", "--init-model-with-meta-device"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def runs_torch(reader: Reader) -> bool:
    return bool(reader.settings.has(TORCH))


def is_torch_sharded(plan: Plan) -> bool:
    return plan.megatron.torch_fsdp != "none"


def runs(reader: Reader) -> bool:
    return bool(reader.settings.has(RUNS))


def is_sharded(plan: Plan) -> bool:
    return plan.megatron.fsdp != "none"


def _without(reader: Reader) -> str:
    return "" if runs(reader) else f"no effect without {RUNS}"


def _meets(reader: Reader, name: str, formats: tuple[str, ...]) -> None:
    """What ``validate_args`` asks of both: streams that do not wait for one another, and a checkpoint's format."""
    connections = (reader.context.environment or {}).get(CONNECTIONS)
    if connections is not None and str(connections.value) == "1":
        problem = f"must be left out or above 1 with {name}: Megatron-LM stops"
        raise PlanError(CONNECTIONS, "1", problem, origin=connections.origin)
    written = reader.settings.word("--ckpt-format")
    if written is not None and written.value not in formats:
        raise written.wrong("--ckpt-format", f"must be {' or '.join(formats)} with {name}")


def _strategy(reader: Reader) -> None:
    """What is sharded; the distributed optimizer belongs to it."""
    settings, building = reader.settings, reader.building
    if not runs(reader):
        return
    _meets(reader, RUNS, ("fsdp_dtensor",))
    node = settings.word(STRATEGY) or Node("optim_grads_params", settings.where(RUNS))
    building.put("megatron.fsdp", node, RUNS, STRATEGY)
    building.put("layout.zero", Node(1, settings.where(RUNS)), "--use-distributed-optimizer")


OTHERS = {
    "--megatron-fsdp-version": "2",
    "--megatron-fsdp-enable-fine-grained-param-gather": None,
}
"""What of Megatron-FSDP is not modelled, and the value that says so; ``None`` for switches."""


def _others(reader: Reader) -> None:
    settings = reader.settings
    for name, value in OTHERS.items():
        node = settings.word(name) if value is not None and settings.has(name) else None
        if settings.has(name) and (node is None or node.value == value):
            raise PlanError(name, value or ABSENT, "is not modelled yet", origin=settings.where(name))


STOPS = {
    RUNS: "there is one or the other",
    "--use-distributed-optimizer": "its optimizer states are shards anyway",
    "--fp16": "Megatron-LM stops",
    ON_META: "nothing gives the model memory then, and its first pass stops",
}
"""What there is not beside FSDP2, and why."""

NEEDS = ("--no-gradient-accumulation-fusion", "--untie-embeddings-and-output-weights")
FORMATS = ("torch_dist", "torch_dcp")


def _torch(reader: Reader) -> None:
    """FSDP2, with what ``validate_args`` asks of it."""
    settings, building = reader.settings, reader.building
    if not runs_torch(reader):
        building.because(KEEPS, f"no effect without {TORCH}")
        building.because(ON_HOST, "values that weights begin with")
        return
    where = settings.where(TORCH)
    for name, why in STOPS.items():
        if settings.has(name):
            raise PlanError(TORCH, ABSENT, f"must be left out with {name}: {why}", origin=where)
    for name in NEEDS:
        if not settings.has(name):
            raise PlanError(name, ABSENT, f"is missing: {TORCH} needs it", origin=where)
    _meets(reader, TORCH, FORMATS)
    building.put("megatron.torch_fsdp", Node("keep" if settings.has(KEEPS) else "reshard", where), TORCH, KEEPS)
    building.put("megatron.torch_fsdp_host_init", Node(settings.has(ON_HOST), where), ON_HOST)


NOT_READ = ("--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16", "--main-grads-dtype")


def put_torch_dtype(reader: Reader, dtype: str) -> None:
    """``fully_shard`` is told none, and there is no buffer of gradients (``get_megatron_ddp_config``)."""
    reader.building.because(NOT_READ, f"not read with {TORCH}: gradients have the parameters' dtype")
    reader.building.put("precision.gradients", Node(dtype, reader.settings.where(TORCH)), *NOT_READ)


def put_dtypes(reader: Reader, dtype: str) -> None:
    """Of main gradients and of their reduction; ``auto`` is the dtype of parameters, and that of main gradients."""
    settings, building = reader.settings, reader.building
    building.because(NOT_READ, f"not read by Megatron-FSDP; {GRADIENTS} is")
    main = settings.word(MAIN)
    if main is not None and main.value != "fp32":
        raise main.wrong(MAIN, "is not modelled yet; fp32 is")
    building.because(MAIN, "main parameters are in fp32")
    given = settings.word(GRADIENTS)
    gradients = Node(dtype, settings.origin) if given is None or given.value == "auto" else given
    building.put("precision.gradients", gradients, GRADIENTS)
    reduced = settings.word(COMMUNICATION)
    if reduced is not None and reduced.value != "auto":
        building.put("megatron.fsdp_communication", reduced, COMMUNICATION)
    else:
        building.because(COMMUNICATION, "as main gradients")


ROWS = (
    *(
        Row(name, "megatron.fsdp", read=_others if not at else elsewhere, without_effect=_without)
        for at, name in enumerate(OTHERS)
    ),
    switch(TORCH, "megatron.torch_fsdp", "REDUCTION", read=_torch, value=is_torch_sharded),
    switch(
        KEEPS,
        "megatron.torch_fsdp",
        "REDUCTION",
        read=elsewhere,
        value=lambda plan: plan.megatron.torch_fsdp == "keep",
    ),
    switch(ON_HOST, "megatron.torch_fsdp_host_init", "REDUCTION", read=elsewhere),
    switch(RUNS, "megatron.fsdp", "REDUCTION", read=_strategy, value=is_sharded),
    Row(STRATEGY, "megatron.fsdp", "REDUCTION", read=elsewhere, without_effect=_without, when=is_sharded),
    Row(
        "--outer-dp-sharding-strategy",
        "megatron.fsdp_outer",
        "REDUCTION",
        "word",
        without_effect=_without,
        when=lambda plan: plan.megatron.fsdp_outer != "no_shard",
    ),
    switch("--fsdp-double-buffer", "megatron.fsdp_double_buffer", "REDUCTION", without_effect=_without),
    Row("--suggested-communication-unit-size", "megatron.fsdp_unit_size", "REDUCTION", without_effect=_without),
    switch(ON_META, "megatron.fsdp_meta_device", "REDUCTION", without_effect=_without),
    switch("--megatron-fsdp-max-pool-double-buffer", "megatron.fsdp_max_pool", "REDUCTION", without_effect=_without),
    switch("--fsdp-db-use-persist-buf-on-alloc-fail", "megatron.fsdp_persistent", "REDUCTION", without_effect=_without),
    switch("--keep-fp8-transpose-cache", "megatron.fsdp_keep_transposes", "REDUCTION", without_effect=_without),
    Row(
        MAIN,
        "precision.gradients",
        "PRECISION",
        read=elsewhere,
        without_effect=_without,
        when=is_sharded,
        value=lambda _: "fp32",
    ),
    Row(GRADIENTS, "precision.gradients", "PRECISION", read=elsewhere, without_effect=_without, when=is_sharded),
    Row(
        COMMUNICATION,
        "megatron.fsdp_communication",
        "PRECISION",
        read=elsewhere,
        without_effect=_without,
        when=lambda plan: is_sharded(plan) and plan.megatron.fsdp_communication is not None,
    ),
)
