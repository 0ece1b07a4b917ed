"""The Llama of ``torchtitan.py`` with tensor parallelism as torchtitan applies it, one iteration of rank 0 on fake
tensors, followed by the tests' own tracer."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import _disable_current_modes

from memplan.trace.torchtitan import Transformer, apply_tp, cross_entropy

from . import fsdp, titan_loss
from .fsdp import ResizedFollow, Sharding, Steps, _cut, fake_ranks, resizing, undivided
from .torchtitan import Sizes, llama, recomputed
from .tracer import Trace, cuda_behaviour
from .training_step import DTYPES, update

FUNCTIONAL = torch.ops._c10d_functional
COLLECTIVES = (
    FUNCTIONAL.all_gather_into_tensor.default,
    FUNCTIONAL.reduce_scatter_tensor.default,
)
"""Those that do not copy their input first."""


class LocalFollow(ResizedFollow):  # type: ignore[no-untyped-call]
    """Lets ``DTensor`` and ``AsyncCollectiveTensor`` run first, so that what they make of local tensors is seen
    operator by operator.

    A collective's input is held until its output has been waited for (``ProcessGroupNCCL.cpp``,
    ``stashed_for_allocator_safety_``), and waiting gives back the output itself.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.stashed: dict[int, Any] = {}
        self.paused = False

    def adopt(self, tensor: torch.Tensor, op: str) -> None:
        if tensor.dtype != torch.int32:  # the ranks of a mesh, which are on the host
            super().adopt(tensor, op)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, (DTensor, AsyncCollectiveTensor)) for one in types):
            return NotImplemented
        if self.paused or func is torch.ops.aten.lift_fresh.default:  # a number, which stays on the host
            return func(*args, **(kwargs or {}))
        if func is FUNCTIONAL.wait_tensor.default:
            self.stashed.pop(args[0].untyped_storage()._cdata, None)
            return args[0]
        if func is FUNCTIONAL._wrap_tensor_autograd.default:
            return AsyncCollectiveTensor(args[0])
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func in COLLECTIVES:
            self.stashed[out.untyped_storage()._cdata] = args[0]
        return out


@contextmanager
def as_on_devices(follow: LocalFollow) -> Iterator[None]:
    """Collectives are asynchronous, though tensors are fake, and the fake tensors with which ``DTensor`` finds out
    shapes are not followed."""
    propagator: Any = ShardingPropagator
    propagate = propagator._propagate_tensor_meta_non_cached

    def propagated(*args: Any) -> Any:
        follow.paused = True
        try:
            return propagate(*args)
        finally:
            follow.paused = False

    with (
        patch.object(_functional_collectives, "_are_we_tracing", lambda: False),
        patch.object(propagator, "_propagate_tensor_meta_non_cached", propagated),
    ):
        yield


@contextmanager
def real_meshes() -> Iterator[None]:
    """Meshes that ``fully_shard`` makes of those of data and tensor parallelism, of real tensors."""
    concatenate: Any = DeviceMesh._concatenate

    def made(meshes: list[DeviceMesh]) -> Any:
        with _disable_current_modes():
            return concatenate(meshes)

    with patch.object(DeviceMesh, "_concatenate", made):
        yield


def run_local(body: Callable[[Trace, ResizedFollow], None]) -> None:
    """As ``fsdp.run``, with ``DTensor``s."""
    trace = Trace()
    with (
        warnings.catch_warnings(),
        FakeTensorMode(allow_non_fake_inputs=True),
        cuda_behaviour(),
        LocalFollow(trace) as follow,
        resizing(follow),
        real_meshes(),
        as_on_devices(follow),
    ):
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        body(trace, follow)


@contextmanager
def local() -> Iterator[None]:
    """``fsdp.run`` and stages with collectives of local tensors, and no ``DTensor`` but parameters: what is in int32 is
    no mesh then."""
    with patch.object(LocalFollow, "adopt", ResizedFollow.adopt), patch.object(fsdp, "run", run_local):
        yield


def traced(
    sizes: Sizes,
    sharding: Sharding,
    tp: int,
    modes: Sequence[str],
    *,
    parallel_loss: bool,
    ends_apart: bool = False,
    evaluates: bool = False,
    chunks: int = 0,
) -> Steps:
    """An iteration with AdamW (foreach), whose states exist; or ``evaluates``: forward without a graph. ``chunks``: of
    the loss, whose logits are in parts then."""
    steps = Steps()
    with fake_ranks(tp * sharding.shards * sharding.replicas):
        mesh = init_device_mesh("cpu", (sharding.replicas, sharding.shards, tp), mesh_dim_names=("r", "dp", "tp"))
        data, parts = mesh["dp"] if sharding.replicas == 1 else mesh["r", "dp"], mesh["tp"]

        def body(trace: Trace, follow: ResizedFollow) -> None:
            model = _model(sizes, sharding.original)
            apply_tp(model, parts, parallel_loss=parallel_loss)
            if chunks:
                without_head(model)
            _shard(model, sizes, data, sharding, modes, ends_apart)
            for tensor in (*model.parameters(), *model.buffers()):
                follow.adopt(tensor, "state")
            optimizer = torch.optim.AdamW(list(model.parameters()), foreach=True)
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter)
            update(optimizer, trace)
            tokens, labels = (torch.randint(0, sizes.vocab, (sizes.b, sizes.s)) for _ in range(2))
            gc.collect()
            if chunks:
                head: Any = model.output
                head.set_reshard_after_forward(True)  # as the iteration before has left it
            losses: list[torch.Tensor] = []
            steps.before, trace.changes = trace.live, []
            for sync in sharding.synced:
                model.set_requires_gradient_sync(sync)
                if chunks:
                    loss = titan_loss.chunked(model(tokens), labels.view(-1), head, chunks, parts.get_group())
                    _cut(trace, steps)
                    loss.backward()
                    _cut(trace, steps)
                    losses.append(loss)
                    del loss
                    continue
                with loss_parallel() if parallel_loss else nullcontext(), torch.set_grad_enabled(not evaluates):
                    logits = model(tokens)
                    loss = cross_entropy(logits, labels)
                    del logits
                    _cut(trace, steps)
                    if not evaluates:
                        loss.backward()
                    _cut(trace, steps)
                del loss
            losses.clear()
            update(optimizer, trace)
            _cut(trace, steps)
            steps.end = trace.live

        run_local(body)
    return steps


class Headless(Transformer):
    """Hidden states (n, h) leave the model, on every rank all (``Decoder.forward`` with ``_skip_lm_head``)."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)  # type: ignore[misc]
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis)
        h = self.everywhere(self.norm(h))  # type: ignore[misc]
        return h.view(-1, h.shape[-1])

    @staticmethod
    def everywhere(h: Any) -> torch.Tensor:
        return h.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])  # type: ignore[no-any-return]


def without_head(model: Any, headless: type = Headless) -> None:
    """``model`` whose loss runs its head."""
    given: Any = model.output
    head = titan_loss.Head(given.in_features, given.out_features, bias=False)
    head.weight = given.weight
    model.__class__, model.output = headless, head


def _model(sizes: Sizes, dtype: str) -> Transformer:
    default = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[dtype])
    model = llama(sizes)
    torch.set_default_dtype(default)
    return model


def _shard(
    model: Transformer, sizes: Sizes, mesh: DeviceMesh, sharding: Sharding, modes: Sequence[str], ends_apart: bool
) -> None:
    common: dict[str, Any] = {"mesh": mesh, "mp_policy": sharding.policy}
    if ends_apart:
        fully_shard(model.tok_embeddings, **common)
        fully_shard([model.norm, model.output], **common, reshard_after_forward=False)
    last = len(model.layers) - 1
    for name, block in list(model.layers.items()):
        kept = not ends_apart and int(name) == last
        model.layers[name] = recomputed(block, sizes, modes[int(name)])
        fully_shard(model.layers[name], **common, reshard_after_forward=not kept)
    fully_shard(model, **common)
    undivided(model, sharding)
