"""Our order and lives of tensors against Megatron-Core's own schedules, run in one process.

Skipped where ``megatron.core`` cannot be imported. The real functions run on tiny modules; only what
needs other ranks or a GPU is replaced: requests of sends and receives hold their tensor, as NCCL's do.
Where shapes are exchanged, all ranks run, as processes.
"""

from __future__ import annotations

import multiprocessing
import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from memplan.schedules.megatron_interleaved import FINALIZE
from memplan.schedules.megatron_schedule import Schedule, trace
from memplan.tape.program import Action

from .megatron_events import STANDALONE, comparable, configurations, fingerprint, is_further, recorded, standalone

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    p2p = pytest.importorskip("megatron.core.pipeline_parallel.p2p_communication")
    pytest.importorskip("megatron.core.transformer.multi_token_prediction")
    version = pytest.importorskip("megatron.core").package_info.VERSION

pytestmark = pytest.mark.skipif(
    tuple(version[:2]) < (0, 20),
    reason="needs the schedules of Megatron-Core 0.20 (August 2026); its events are recorded",
)

HIDDEN = 16


class Recorder:
    """Follows storages between stages."""

    def __init__(self) -> None:
        self.events: list[Action] = []
        self.numbers: dict[str, int] = {}
        self.known: set[Any] = set()

    def follow(self, kind: Any, tensor: Any) -> None:
        number = self.numbers.get(kind, 0)
        self.numbers[kind] = number + 1
        depths = tensor.shape[0] if tensor.dim() == 3 else 0
        self.events.append(Action("begin", depths, number, kind))
        weakref.finalize(tensor.untyped_storage(), self.events.append, Action("end", 0, number, kind)).atexit = False


class Group:
    """A process group that only knows its size and rank."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class Request:
    """``WorkNCCL``: holds the tensor that it sends or receives."""

    def __init__(self, tensor: Any, work: Any = None) -> None:
        self.tensor, self.work = tensor, work

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()


class Chunk(torch.nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
    """A chunk of layers: one weight, and the input as ``TransformerBlock`` keeps it. With multi-token prediction its
    output is that of two depths."""

    def __init__(self, recorder: Recorder, plan: Schedule, config: Any, chunk: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, 1, HIDDEN))
        self.recorder, self.plan, self.config, self.vp_stage = recorder, plan, config, chunk
        self.model_type = None
        self.input_tensor = None
        self.forwards = self.backwards = 0

    def set_input_tensor(self, input_tensor: list[Any]) -> None:
        self.input_tensor = input_tensor[0]

    def forward(self) -> Any:
        self.recorder.events.append(Action("forward", self.vp_stage, self.forwards))
        self.forwards += 1
        x = self.weight * 1 if self.input_tensor is None else self.input_tensor
        if self.plan.sends(self.vp_stage):
            output = x * self.weight
            if self.config.mtp_standalone and is_further(self.plan, self.vp_stage):
                output = torch.cat([x, output])
            self.recorder.follow("output", output)
            return output
        return (x * self.weight).sum()


def run(plan: Schedule, group: Any = None) -> list[Action]:
    """The events of the second iteration of Megatron-Core's own schedule; ``group`` of the ranks that run, if all do,
    with multi-token prediction in the chunk before the last."""
    recorder = Recorder()
    config = schedules_config(plan)
    config.mtp_standalone = group is not None
    chunks = [Chunk(recorder, plan, config, i) for i in range(plan.chunks)]
    with ExitStack() as patches:
        for patch in replaced(recorder, plan, chunks, with_others=group is not None):
            patches.enter_context(patch)
        for _ in range(2):
            recorder.events.clear()
            for chunk in chunks:
                chunk.forwards = chunk.backwards = 0
            reports = iteration(plan, chunks, config, group)
            events = list(recorder.events)
            del reports
    return events


def schedules_config(plan: Schedule) -> Any:
    config = p2p.ModelParallelConfig(
        pipeline_model_parallel_size=plan.stages,
        virtual_pipeline_model_parallel_size=plan.chunks if plan.chunks > 1 else None,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=plan.overlap,
        batch_p2p_comm=not plan.overlap,
        overlap_p2p_comm_warmup_flush=plan.overlap_warmup,
        deallocate_pipeline_outputs=True,
        microbatch_group_size_per_vp_stage=plan.group,
    )
    config.hidden_size = HIDDEN
    config.hybrid_context_parallel, config.calculate_per_token_loss = False, True
    return config


def iteration(plan: Schedule, chunks: list[Chunk], config: Any, group: Any) -> Any:
    function = schedules.get_forward_backward_func(plan.stages, plan.chunks if plan.chunks > 1 else None)
    groups = schedules.ProcessGroupCollection()
    groups.tp, groups.cp, groups.pp = Group(1, 0), Group(1, 0), group or Group(plan.stages, plan.stage)
    config.finalize_model_grads_func = lambda *_, **__: chunks[0].recorder.events.append(FINALIZE)
    communicator = p2p.P2PCommunicator(groups.pp, config) if plan.stages > 1 else None
    return function(
        forward_step_func=partial(forward_step, chunks[0].recorder),
        data_iterator=[None] * plan.chunks,
        model=chunks,
        num_microbatches=plan.microbatches,
        seq_length=1,
        micro_batch_size=1,
        p2p_communicator=communicator,
        pg_collection=groups,
    )


def forward_step(recorder: Recorder, data: Any, model: Chunk) -> Any:
    return model(), partial(loss, recorder)


def loss(recorder: Recorder, output: Any) -> Any:
    report = output.detach().clone()
    recorder.follow("report", report)
    return output, torch.tensor(1, dtype=torch.int), {"lm loss": report}


def replaced(recorder: Recorder, plan: Schedule, chunks: list[Chunk], with_others: bool) -> Iterator[Any]:
    """What stands for other ranks and the GPU, and what listens."""
    real = p2p._p2p_ops

    def ops(batched: bool, **tensors: Any) -> Any:
        requests = {}
        works = real(**tensors) if with_others else {}
        for name in ("recv_prev", "recv_next", "send_prev", "send_next"):
            tensor = tensors[f"tensor_{name}"]
            if tensor is not None:
                requests[name] = Request(tensor, works.get(name))
                if name.startswith("recv"):
                    recorder.follow("input" if name == "recv_prev" else "output_grad", tensor)
        return list(requests.values()) if batched else requests

    deallocate = schedules.deallocate_output_tensor

    def deallocate_and_follow(out: Any, wanted: bool = False) -> None:
        tensor = out[0] if isinstance(out, list) else out
        if tensor is not None and plan.sends(chunk_of(tensor)):
            deallocate(tensor, wanted)

    def empty(shape: Any, **kinds: Any) -> Any:
        tensor = torch.empty(shape, **kinds)
        recorder.follow("stub", tensor)
        return tensor

    backward_step = schedules.backward_step

    def backward(output: Any, gradient: Any) -> None:
        chunk = chunks[running[0]]
        recorder.events.append(Action("backward", running[0], chunk.backwards))
        chunk.backwards += 1
        torch.autograd.Variable._execution_engine.run_backward(
            (output,), (torch.ones(()) if gradient is None else gradient,), False, False, (), True, True
        )

    running = [0]

    def step(input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, config: Any) -> Any:
        running[0] = chunk_of(output_tensor)
        return follow_gradient(backward_step(input_tensor, output_tensor, output_tensor_grad, config))

    def follow_gradient(gradient: Any) -> Any:
        tensor = gradient[0] if isinstance(gradient, list) else gradient
        if tensor is not None:
            recorder.follow("input_grad", tensor)
        return gradient

    def chunk_of(output: Any) -> int:
        """The chunk whose weight the output's graph ends in."""
        tensor = output[0] if isinstance(output, list) else output
        todo, weights = [tensor.grad_fn], {id(chunk.weight): i for i, chunk in enumerate(chunks)}
        while todo:
            node = todo.pop()
            if id(getattr(node, "variable", None)) in weights:
                return weights[id(node.variable)]
            todo.extend(next for next, _ in node.next_functions if next is not None)
        raise AssertionError("no chunk")

    on_host = SimpleNamespace(**{name: getattr(torch, name) for name in dir(torch)})
    on_host.zeros = lambda *shape, device=None, **kinds: torch.zeros(*shape, **kinds)
    on_host.empty = empty
    yield mock.patch.object(schedules, "torch", on_host)
    if not with_others:
        yield mock.patch.object(torch.distributed, "is_initialized", return_value=True)
    yield mock.patch.object(torch.cuda, "current_device", return_value="cpu")
    yield mock.patch.object(torch.cuda, "synchronize", return_value=None)
    yield mock.patch.object(p2p.dist, "get_global_rank", lambda group, rank: rank)
    yield mock.patch.object(p2p, "_p2p_ops", lambda **tensors: ops(False, **tensors))
    yield mock.patch.object(p2p, "_batched_p2p_ops", lambda **tensors: ops(True, **tensors))
    yield mock.patch.object(schedules, "deallocate_output_tensor", deallocate_and_follow)
    yield mock.patch.object(schedules, "custom_backward", backward)
    yield mock.patch.object(schedules, "backward_step", step)


@pytest.mark.parametrize("plan", configurations(), ids=str)
def test_events_are_those_of_megatron_core(plan: Schedule) -> None:
    events = run(plan)
    assert comparable(trace(plan)) == comparable(events)
    assert fingerprint(events) == recorded()[str(plan)], "write megatron_events.json anew: see megatron_events.py"


def rank_of(stage: int, store: str, plans: list[Schedule], pipe: Any) -> None:
    """A process that is ``stage`` of each of ``plans``."""
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=stage, world_size=plans[0].stages)
    pipe.send([run(plan, torch.distributed.group.WORLD) for plan in plans])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("stages", sorted({plan.stages for plan in standalone()}))
def test_hidden_states_of_all_depths_are_those_of_megatron_core(stages: int, tmp_path: Path) -> None:
    """Shapes are exchanged before tensors, so every stage runs (``mtp_standalone``)."""
    plans = [[plan for plan in standalone() if (plan.stages, plan.stage) == (stages, stage)] for stage in range(stages)]
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(False) for _ in plans]
    ranks = [
        fork.Process(target=rank_of, args=(stage, str(tmp_path / "store"), own, pipes[stage][1]))
        for stage, own in enumerate(plans)
    ]
    for rank in ranks:
        rank.start()
    for own, (pipe, _) in zip(plans, pipes, strict=True):
        assert pipe.poll(120)
        for plan, events in zip(own, pipe.recv(), strict=True):
            assert fingerprint(events, sized=True) == recorded()[f"{plan} {STANDALONE}"], (
                "write megatron_events.json anew: see megatron_events.py"
            )
    for rank in ranks:
        rank.join(60)
