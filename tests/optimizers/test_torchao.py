"""torchao's AdamW: what it keeps and what its compiled step takes, by hand and beside the real one."""

from __future__ import annotations

from itertools import accumulate
from typing import Any
from unittest.mock import patch

import pytest

import memplan
from memplan.layers.module import Parameter
from memplan.optimizers.base import optimizer_states, step_tape, step_temporaries
from memplan.plan.errors import PlanError
from memplan.plan.plan import Optimizer
from memplan.plan.read import read_plan
from memplan.tape.events import Drop, Hold, rounded

EIGHT, FOUR = (Optimizer(name=name) for name in ("ao_adamw_8bit", "ao_adamw_4bit"))


def kept(optimizer: Optimizer, parameter: Parameter, dtype: str = "bf16") -> int:
    return sum(state.size(parameter) for state in optimizer_states(optimizer, dtype, embeddings_32bit=True))


def test_states_by_hand() -> None:
    """Of 1,000 x 4,096 elements, twice: a byte each, an fp32 scale for 256 and 256 fp32 values; half a byte, a scale
    for 128 and 16 values, in 512 bytes. A bias of 4,095 elements has moments in its own dtype, as has one of 101 x 99,
    which no whole number of blocks holds."""
    matrix = Parameter("up.weight", (1000, 4096))
    assert kept(EIGHT, matrix) == 2 * (4_096_000 + 4 * 16_000 + 1024)
    assert kept(FOUR, matrix) == 2 * (2_048_000 + 4 * 32_000 + 512)
    for parameter, elements in ((Parameter("bias", (4095,)), 4095), (Parameter("odd", (101, 99)), 9999)):
        assert kept(EIGHT, parameter) == 2 * rounded(2 * elements)
        assert kept(EIGHT, parameter, "fp32") == 2 * rounded(4 * elements)


@pytest.mark.parametrize(
    ("optimizer", "shape", "elements", "scales"),
    [
        (EIGHT, (1000, 4096), 8, 16_000),
        (EIGHT, (8, 512, 1024), 8, 16_384),
        (EIGHT, (512, 256), 0, 0),  # a row is a block
        (EIGHT, (8192,), 0, 0),
        (EIGHT, (4095,), 0, 0),
        (FOUR, (1000, 4096), 24, 32_000),
        (FOUR, (8192,), 24, 64),
        (FOUR, (512, 128), 24, 0),
    ],
)
def test_the_step_holds_both_moments_between_its_kernels(
    optimizer: Optimizer, shape: tuple[int, ...], elements: int, scales: int
) -> None:
    """Inductor's code (torch 2.13, torchao 0.18): two scales of a block in fp32, both moments in fp32, and of 4 bits
    both moments' codes in int64; none of it where rows are blocks and one kernel does all."""
    parameter = Parameter("weight", shape)
    peak = sum(hold.bytes for hold in step_temporaries(optimizer, [parameter], "bf16"))
    assert peak == elements * parameter.elements + (2 * rounded(4 * scales) if scales else 0)


def peak(changes: list[Any]) -> int:
    return max(accumulate(changes), default=0)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("block", [128, 256])
@pytest.mark.parametrize("shape", [(100, 4096), (512, 256), (512, 128), (16, 4096), (4096, 16), (4096,)])
@pytest.mark.parametrize("name", ["ao_adamw_8bit", "ao_adamw_4bit"])
def test_states_and_step_are_those_of_torchao(name: str, shape: tuple[int, ...], block: int, dtype: str) -> None:
    """What the real step compiles to for CUDA: its buffers in order, each until its last kernel."""
    adam = pytest.importorskip("torchao.optim.adam", reason="torchao is not installed")
    torch = pytest.importorskip("torch")
    from memplan.trace import inductor

    if torch.__version__.partition("+")[0] != "2.13.0":
        pytest.skip("Inductor's code is that of torch 2.13.0")
    optimizer, parameter = Optimizer(name=name, block_size=block), Parameter("weight", shape)
    kind = {"ao_adamw_8bit": adam.AdamW8bit, "ao_adamw_4bit": adam.AdamW4bit}[name]
    weight = torch.nn.Parameter(torch.zeros(shape, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]))
    weight.grad = torch.zeros_like(weight)
    graphs: list[Any] = []

    def kept_graph(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return inductor.make_boxed_func(graph.forward)

    compiled = torch.compile

    def compiling(function: Any, **how: Any) -> Any:
        torch._dynamo.reset()
        return compiled(function, backend=inductor.aot(kept_graph, kept_graph), **how)

    real = kind([weight], block_size=block)
    with patch.object(torch, "compile", compiling), torch.no_grad():
        real.step()
    states = [value for value in real.state[weight].values() if isinstance(value, torch.Tensor) and value.ndim]
    parts = [getattr(one, part) for one in states for part in getattr(one, "tensor_attrs", ())]
    assert sum(rounded(one.numel() * one.itemsize) for one in parts or states) == kept(optimizer, parameter, dtype)

    written: list[str] = []
    call_of = inductor._call_of
    with patch.object(inductor, "_call_of", lambda text: written.append(text) or call_of(text)):
        inductor.code_of(graphs[0], is_backward=False, reuse=True)
    sizes: dict[str, int] = {}
    changes: list[int] = []
    for line in written[0][written[0].index("def call(") :].splitlines():
        made, _, call = line.strip().partition(" = empty_strided_cuda(")
        if call:
            size, _, rest = call[1:].partition(")")
            count = torch.Size(int(one) for one in size.split(",") if one.strip()).numel()
            sizes[made] = rounded(count * getattr(torch, rest.rpartition("torch.")[2].rstrip(")")).itemsize)
            changes.append(sizes[made])
        elif made.startswith("del buf"):
            changes.append(-sizes[made.removeprefix("del ")])
        assert "reuse" not in line or line.lstrip().startswith("#")
    ours = [
        event.bytes if isinstance(event, Hold) else -event.bytes
        for event in step_tape(optimizer, [parameter], dtype)
        if isinstance(event, Hold | Drop)
    ]
    assert peak(ours) == peak(changes)


JOB = {"model": "llama-3.2-1b", "seq": "1024", "gpu": "h100"}


@pytest.mark.parametrize(
    ("name", "called"), [("ao_adamw_8bit", "adamw_torch_8bit"), ("ao_adamw_4bit", "adamw_torch_4bit")]
)
def test_the_trainers_names_mean_them(name: str, called: str) -> None:
    """In blocks of 256, whatever their number of bits (``_get_torchao_optimizer`` of ``trainer_optimizer.py``)."""
    plan = read_plan(None, {**JOB, "optimizer": called}).plan
    assert (plan.optimizer.name, plan.optimizer.block_size) == (name, 256)


def answer(optimizer: Optimizer, **flags: str) -> dict[str, Any]:
    plan = read_plan(None, {**JOB, "optimizer": optimizer.name, **flags}).plan
    (stage,) = memplan.estimate(plan).to_dict()["stages"]
    found: dict[str, Any] = stage
    return found


def test_the_embedding_decides_the_peak_of_few_tokens() -> None:
    """128,256 x 2,048 elements: 8 bytes each, and 24 with 4-bit states, whose step takes more than 8-bit ones save;
    and scales of blocks."""
    eight, four = answer(EIGHT), answer(FOUR)
    saved = eight["breakdown"]["optimizer_states"] - four["breakdown"]["optimizer_states"]
    taken = four["breakdown"]["temporaries"] - eight["breakdown"]["temporaries"]
    assert taken == (16 + 2 * 4 / 128 - 2 * 4 / 256) * 128_256 * 2048
    assert four["allocated_bytes"] - eight["allocated_bytes"] == pytest.approx(taken - saved, abs=2**20)
    assert taken > saved > 0


def test_fsdp2_steps_with_it_and_fsdp1_does_not() -> None:
    """Two bytes and two scales for each element of a shard in place of eight bytes."""
    job = {"framework": "fsdp", "gpus": "8"}
    adamw, eight = (answer(one, **job)["breakdown"] for one in (Optimizer(name="adamw"), EIGHT))
    assert eight["optimizer_states"] == pytest.approx(adamw["optimizer_states"] / 4 * (1 + 4 / 256), rel=0.01)
    with pytest.raises(PlanError, match="under FSDP1: of flat parameters torchao's states are not modelled"):
        answer(EIGHT, **job, **{"fsdp-version": "1"})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"optimizer-block-size": "2048"}, "must be 128 or 256"),
        ({"paged-optimizer": "true"}, "must be false: ao_adamw_8bit is not bitsandbytes'"),
        ({"optimizer-implementation": "foreach"}, "ao_adamw_8bit has one implementation"),
        ({"embeddings-32bit": "false"}, "ao_adamw_8bit has no states of bitsandbytes'"),
        ({"framework": "deepspeed", "gpus": "2"}, "must be one of sgd, adam, adamw, adam8bit"),
        ({"framework": "ddp", "gpus": "2", "zero": "1"}, "ZeroRedundancyOptimizer"),
    ],
)
def test_refusals(flags: dict[str, str], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        memplan.estimate(read_plan(None, {**JOB, "optimizer": EIGHT.name, **flags}).plan)
