"""Megatron-FSDP's buffers and what its hooks allocate, against the real class on the CPU, among four fake ranks."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memplan.frameworks.megatron.fsdp import Sharding, buckets_of, keep
from memplan.frameworks.megatron.fsdp_hooks import persistent, with_hooks
from memplan.frameworks.megatron.states import Rules
from memplan.layers.megatron_core.precision import Low
from memplan.layers.module import Module, Parameter, Tapes
from memplan.tape.events import Drop, Event, Hold, Hook, Seam
from memplan.tape.program import Span

PACKAGE = "megatron.core.distributed.fsdp.src.megatron_fsdp"
pytest.importorskip(f"{PACKAGE}.param_and_grad_buffer", reason="megatron-core is not installed (the extra dev has it)")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

RANKS, LAYERS, H, V = 4, 5, 64, 160
SHARDING = Sharding("optim_grads_params", RANKS, RANKS, 1, "bf16", 8_000, 20_000, False, False, False, False)
RULES = Rules(
    dtype="bf16", gradients="bf16", distributed=True, shards=RANKS, bucket=None, optimizer="adam",
    precision_aware=False, main_parameters="fp32", exp_avg="fp32", exp_avg_sq="fp32", counts_zeros=False, sharded=True,
)  # fmt: skip
LOW = {recipe: Low(recipe, True, (2, 18), parameters=True) for recipe in ("delayed", "mxfp8")}
DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.uint8: "uint8"}


class Layer(nn.Module):
    log: Log

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(H, width, bias=False)
        self.norm = nn.LayerNorm(H)
        self.down = nn.Linear(width, H, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in (self.up, self.down):  # as Transformer Engine's ``quantize_weight`` does
            Layer.log.turned(linear.weight)
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(V, H)
        self.layers = nn.ModuleList(Layer(H if at else 2 * H) for at in range(LAYERS))
        self.final_norm = nn.LayerNorm(H)
        self.head = nn.Linear(H, V, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.word(ids)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(self.final_norm(x))
        return out


class Log:
    """Bytes that come and go: of buckets, and of what is made of rows."""

    def __init__(self, low: Low | None) -> None:
        self.low, self.changes = low, list[int]()
        self.live: dict[Any, int] = {}

    def begins(self, key: Any, size: int) -> None:
        if key not in self.live:
            self.live[key] = size
            self.changes.append(size)

    def ends(self, key: Any) -> None:
        if key in self.live:
            self.changes.append(-self.live.pop(key))

    def turned(self, weight: torch.Tensor) -> None:
        if self.low is not None and hasattr(weight, "_rowwise_data") and not self.low.two_buffers:
            self.begins(id(weight), weight.numel())

    def turned_back(self, weight: torch.Tensor) -> None:
        self.ends(id(weight))


class Memory:
    """``GlobalMemoryBuffer``."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get_tensor(
        self, size: list[int], dtype: torch.dtype, name: str, mem_alloc_context: object = None
    ) -> torch.Tensor:
        if (name, dtype) not in self.buffers or self.buffers[name, dtype].numel() < size[0]:
            self.buffers[name, dtype] = torch.empty(size, dtype=dtype)
        return self.buffers[name, dtype][: size[0]]


class Stream:
    """In the place of CUDA's streams and events."""

    def wait_stream(self, _: object) -> None: ...
    def wait(self, *_: object) -> None: ...
    def record_event(self, *_: object) -> Stream:
        return self


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = ("param_and_grad_buffer", "megatron_fsdp", "mixed_precision", "utils")
        found = SimpleNamespace(**{name: importlib.import_module(f"{PACKAGE}.{name}") for name in names})
        found.config = importlib.import_module("megatron.core.distributed.distributed_data_parallel_config")
        state = importlib.import_module("megatron.core.parallel_state")
    for name, value in {
        "Stream": lambda *_: Stream(), "current_stream": lambda *_: Stream(), "current_device": lambda: 0,
        "stream": lambda _: contextlib.nullcontext(), "empty_cache": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(state, "has_separate_all_gather_group", lambda: False)
    monkeypatch.setattr(found.param_and_grad_buffer, "validate_uneven_dtensor", lambda *_: None)  # of other ranks
    yield found
    torch.distributed.destroy_process_group()


def sharded(
    real: SimpleNamespace, patch: pytest.MonkeyPatch, sharding: Sharding, recipe: str | None
) -> tuple[Any, Model, Log, Memory]:
    """The model in the real class."""
    log, model = Log(LOW[recipe] if recipe and sharding.ends_columns else None), Model().to(torch.bfloat16)
    patch.setattr(Layer, "log", log, raising=False)
    for linear in (linear for layer in model.layers for linear in (layer.up, layer.down) if recipe):
        weight: Any = linear.weight
        weight._rowwise_data = torch.zeros(weight.shape, dtype=torch.uint8)
        weight._columnwise_data = torch.zeros(weight.shape, dtype=torch.uint8)
        weight.get_high_precision_init_val = weight.float
        weight.clear_high_precision_init_val = lambda: None
    replaced = {
        "is_float8tensor": lambda one: hasattr(one, "_rowwise_data"),
        "fp8_need_transpose_data": lambda _: recipe == "mxfp8",
        "fp8_create_transpose_cache": lambda one: log.turned(one),
        "fp8_discard_transpose_cache": lambda one: log.turned_back(one),
    }
    for module in (real.param_and_grad_buffer, real.megatron_fsdp, real.mixed_precision):
        for name, value in replaced.items():
            if hasattr(module, name):
                patch.setattr(module, name, value)
    memory = Memory()
    patch.setattr(real.param_and_grad_buffer, "get_global_memory_buffer", lambda: memory)
    mesh = torch.distributed.init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("dp", "tp"))
    index = real.utils.FSDPDistributedIndex(mesh, dp_shard_dim="dp", tp_dim="tp")
    config = real.config.DistributedDataParallelConfig(
        data_parallel_sharding_strategy=sharding.strategy, overlap_grad_reduce=True, overlap_param_gather=True,
        bucket_size=sharding.bucket, suggested_communication_unit_size=sharding.capacity,
        fsdp_double_buffer=sharding.double_buffer,
    )  # fmt: skip
    made = real.megatron_fsdp.MegatronFSDP(
        model, index, config, fsdp_unit_modules=[Layer], device=torch.device("cpu"),
        enable_fine_grained_param_gather_hook=recipe == "mxfp8",
    )  # fmt: skip
    for allocator in ("StorageResizeBasedBucketAllocator", "TemporaryBucketAllocator"):
        _watch(patch, getattr(real.param_and_grad_buffer, allocator), log)
    return made, model, log, memory


def _watch(patch: pytest.MonkeyPatch, allocator: Any, log: Log) -> None:
    allocate, free = allocator.allocate, allocator.free

    def allocated(self: Any, bucket_id: int, size: int, dtype: torch.dtype, *rest: Any, **named: Any) -> Any:
        log.begins((id(self), bucket_id), size * dtype.itemsize)
        return allocate(self, bucket_id, size, dtype, *rest, **named)

    def freed(self: Any, bucket_id: int) -> Any:
        log.ends((id(self), bucket_id))
        return free(self, bucket_id)

    patch.setattr(allocator, "allocate", allocated)
    patch.setattr(allocator, "free", freed)


def spans(low: Low | None) -> tuple[Span, ...]:
    """The same model as memplan's modules, which hold nothing but seams."""

    def module(name: str, **shapes: tuple[int, ...]) -> Module:
        own = {key.replace("__", "."): shape for key, shape in shapes.items()}
        matrix = {key for key in own if name == "layer" and "norm" not in key}
        parameters = tuple(Parameter(key, shape, low=low if key in matrix else None) for key, shape in own.items())
        arrived = [Seam(key, Hook.GRADIENT) for key in reversed(own)]
        forward = (Seam(name, Hook.BEFORE_FORWARD), Seam(name, Hook.AFTER_FORWARD))
        backward = (Seam(name, Hook.BEFORE_BACKWARD), *arrived, Seam(name, Hook.AFTER_BACKWARD))
        tapes = Tapes(forward, backward, 0, 0)
        return Module(name, tapes, tapes, forward, parameters)

    def layer(width: int) -> Module:
        return module("layer", up__weight=(width, H), norm__weight=(H,), norm__bias=(H,), down__weight=(H, width))

    return (
        Span(module("embedding", word__weight=(V, H)), ("embedding",)),
        Span(layer(2 * H), ("layer.0",)),
        Span(layer(H), tuple(f"layer.{at}" for at in range(1, LAYERS))),
        Span(module("final_norm", norm__weight=(H,), norm__bias=(H,)), ("final_norm",)),
        Span(module("head", head__weight=(V, H)), ("head",)),
    )


def runs(changes: list[int]) -> list[list[int]]:
    """What comes at once, or goes."""
    return [sorted(run) for _, run in groupby(changes, key=lambda size: size > 0)]


def exact(event: Event) -> int:
    """Bytes without rounding."""
    assert isinstance(event, Hold)
    (elements,) = event.shape if len(event.shape) == 1 else (event.shape[0] * event.shape[1],)
    return elements * {"uint8": 1, "bf16": 2, "fp32": 4}[event.dtype]


def outside_of_units(one: Hold) -> bool:
    """A gathered bucket of the embedding, or of the final norm and the head."""
    return one.name == "parameter_bucket" and V * H <= one.shape[0] <= V * H + 4 * H and one.dtype == "bf16"


CASES: list[tuple[str | None, dict[str, Any]]] = [
    (None, {}), ("delayed", {}), ("mxfp8", {}), ("delayed", {"capacity": 60_000}), ("delayed", {"double_buffer": True}),
    ("mxfp8", {"double_buffer": True}), ("delayed", {"strategy": "optim_grads"}), ("mxfp8", {"strategy": "optim"}),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "flags"), CASES)
def test_what_hooks_allocate(
    real: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, recipe: str | None, flags: dict[str, Any]
) -> None:
    """Of a later micro-batch, run by run of what comes and goes. Later releases differ from 0.16: modules outside of
    units gather nothing ahead (``_root_pre_backward`` tells all modules that backward has begun), those within do
    (``_post_backward_release_module``), and columns end only where parameters are shards."""
    sharding = replace(SHARDING, **flags)
    made, model, log, memory = sharded(real, monkeypatch, sharding, recipe)
    states: Any = real.megatron_fsdp.TrainingState
    for _ in range(3):
        log.changes.clear()
        made(torch.zeros(2, 4, dtype=torch.long)).float().sum().backward()
        for outside in (model.word, model.final_norm, model.head):
            outside._training_state = states.PRE_BACKWARD
        for within in model.layers.modules():
            within._training_state = states.IDLE
    low = LOW[recipe] if recipe else None
    own = spans(low)
    hooked = with_hooks(own, buckets_of(own, sharding), sharding, "bf16")
    events = [event for span in hooked for event in span.module.steady.forward]
    events += [event for span in reversed(hooked) for event in span.module.steady.backward]
    live: dict[int, int] = {}
    changes = []
    for event in events:
        if isinstance(event, Hold):
            live[event.tensor] = exact(event)
            changes.append(live[event.tensor])
        elif isinstance(event, Drop):
            changes.append(-live.pop(event.tensor))
    assert not live
    assert runs(changes) == runs(log.changes)
    stays = persistent(buckets_of(own, sharding), sharding, "bf16")
    doubles = sorted(exact(one) for one in stays if sharding.persists or not outside_of_units(one))
    assert doubles == sorted(one.numel() * one.dtype.itemsize for one in memory.buffers.values())


@pytest.mark.parametrize(("recipe", "flags"), CASES)
def test_what_buffers_hold(
    real: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, recipe: str | None, flags: dict[str, Any]
) -> None:
    sharding = replace(SHARDING, **flags)
    made, *_ = sharded(real, monkeypatch, sharding, recipe)
    low, expected = LOW[recipe] if recipe else None, list[tuple[str, int, str]]()
    for group in made.param_and_grad_buffer.parameter_groups:
        for name in ("model_weight_buffer", "transpose_weight_buffer", "main_weight_buffer"):
            buffer = getattr(group, name)
            if buffer is not None:
                expected.append((name, buffer.data.numel(), DTYPES[buffer.dtype]))
    gradients = sum(group.main_grad_buffer.data_size for group in made.param_and_grad_buffer.parameter_groups)
    own = spans(low)
    construction = keep(buckets_of(own, sharding), RULES, sharding, ()).construction
    found = [(one.name, one.shape[0], one.dtype) for one in construction if isinstance(one, Hold)]
    assert [one for one in found if one[0].endswith("_weight_buffer")] == expected
    assert [size for name, size, _ in found if name == "main_grad_buffer"] == [gradients]
