"""Arguments of Megatron-FSDP: ``validate_args`` of ``megatron/training/arguments.py``, and ``get_megatron_ddp_config``
of ``training.py``."""

from __future__ import annotations

from ...plan.errors import ABSENT, Node, PlanError
from ...plan.plan import Plan
from ..rows import Reader, Row, elsewhere, switch

RUNS = "--use-megatron-fsdp"
STRATEGY = "--data-parallel-sharding-strategy"
DTYPES = "--megatron-fsdp-{}-dtype"
MAIN, GRADIENTS, COMMUNICATION = map(DTYPES.format, ("main-params", "main-grads", "grad-comm"))


def runs(reader: Reader) -> bool:
    return bool(reader.settings.has(RUNS))


def is_sharded(plan: Plan) -> bool:
    return plan.megatron.fsdp != "none"


def _without(reader: Reader) -> str:
    return "" if runs(reader) else f"no effect without {RUNS}"


def _strategy(reader: Reader) -> None:
    """What is sharded; the distributed optimizer belongs to it."""
    settings, building = reader.settings, reader.building
    if not runs(reader):
        return
    node = settings.word(STRATEGY) or Node("optim_grads_params", settings.where(RUNS))
    building.put("megatron.fsdp", node, RUNS, STRATEGY)
    building.put("layout.zero", Node(1, settings.where(RUNS)), "--use-distributed-optimizer")


OTHERS = {
    "--megatron-fsdp-version": "2",
    "--megatron-fsdp-enable-fine-grained-param-gather": None,
    "--megatron-fsdp-max-pool-double-buffer": None,
    "--fsdp-db-use-persist-buf-on-alloc-fail": None,
    "--enable-full-sharding-in-hsdp": None,
}
"""What of Megatron-FSDP is not modelled, and the value that says so; ``None`` for switches."""


def _others(reader: Reader) -> None:
    settings = reader.settings
    for name, value in OTHERS.items():
        node = settings.word(name) if value is not None and settings.has(name) else None
        if settings.has(name) and (node is None or node.value == value):
            raise PlanError(name, value or ABSENT, "is not modelled yet", origin=settings.where(name))


NOT_READ = ("--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16", "--main-grads-dtype")


def put_dtypes(reader: Reader, dtype: str) -> None:
    """Of main gradients and of their reduction; ``auto`` is the dtype of parameters, and that of main gradients."""
    settings, building = reader.settings, reader.building
    for name in NOT_READ:
        building.because(name, f"not read by Megatron-FSDP; {GRADIENTS} is")
    main = settings.word(MAIN)
    if main is not None and main.value != "fp32":
        raise PlanError(MAIN, main.value, "is not modelled yet; fp32 is", origin=main.origin)
    building.because(MAIN, "main parameters are in fp32")
    given = settings.word(GRADIENTS)
    gradients = Node(dtype, settings.origin) if given is None or given.value == "auto" else given
    building.put("precision.gradients", gradients, GRADIENTS)
    reduced = settings.word(COMMUNICATION)
    if reduced is not None and reduced.value != "auto":
        building.put("megatron.fsdp_communication", reduced, COMMUNICATION)
    else:
        building.because(COMMUNICATION, "as main gradients")


def _main(_: Plan) -> str:
    return "fp32"


ROWS = (
    *(
        Row(name, "megatron.fsdp", read=_others if not at else elsewhere, without_effect=_without)
        for at, name in enumerate(OTHERS)
    ),
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
    switch("--init-model-with-meta-device", "megatron.fsdp_meta_device", "REDUCTION", without_effect=_without),
    Row(
        MAIN, "precision.gradients", "PRECISION", read=elsewhere, without_effect=_without, when=is_sharded, value=_main
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
