"""One rank of many in one process: torch's fake process group, and over it torch's own DistributedDataParallel with its
C++ reducer, or ``fully_shard``.

The reducer reads values of a few integer tensors of its own (the order of buckets, which parameters were used): those
are real. Its all-reduce expects the buckets back from the process group, and the fake one returns nothing: they are
given back as they were. Buckets, their views and all copies are fake, and followed like other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings, simplefilter
from weakref import finalize

import torch
from torch._C import _distributed_c10d
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group, _fully_shard
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only

from ..tape.events import Category
from .job import Job, Replicated, Sharded
from .models import DTYPES, outline_of
from .storages import Follow
from .surroundings import FAKE, Surroundings

INTEGERS = (torch.int32, torch.int64)


class Replica:
    """A job's model as its micro-batches call it: wrapped where the job is one of replicas."""

    def __init__(self, job: Job, model: Any, reducing: Reducing | None = None) -> None:
        self.given, self.last = job.ddp, job.microbatches - 1
        self.inner = self.model = model
        self.reducing = reducing
        if self.given is not None:
            with self._bookkeeping():
                self.model = wrapped(self.given, model)

    def _bookkeeping(self) -> AbstractContextManager[None]:
        return nullcontext() if self.reducing is None else self.reducing.bookkeeping()

    def settle(self, iterate: Callable[[], None], least: int = 1) -> None:
        """Iterations until buckets are what they stay, or ``least`` of them: the reducer rebuilds them when the second
        begins, of a static graph the third."""
        for _ in range(max(least, 2 if self.given is not None and self.given.static_graph else 1)):
            iterate()
            if self.given is not None:
                with self._bookkeeping():
                    self.model.reducer._rebuild_buckets()

    def synced(self, microbatch: int) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch of the step."""
        if self.given is None or self.given.syncs_each or microbatch == self.last:
            return nullcontext()
        return self.model.no_sync()  # type: ignore[no-any-return]


def wrapped(given: Replicated, model: torch.nn.Module) -> Any:
    known = signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return DistributedDataParallel(
        model,
        bucket_cap_mb=given.bucket_cap_mb,
        gradient_as_bucket_view=given.gradient_as_bucket_view,
        static_graph=given.static_graph,
        find_unused_parameters=given.find_unused_parameters,
        **{buffers: given.broadcast_buffers},  # type: ignore[arg-type]
    )


def distributed(
    given: Replicated | None, parameters: list[Any], kind: Any, how: dict[str, Any]
) -> torch.optim.Optimizer:
    """The optimizer ``kind`` with the settings ``how``; the rank's part of it where ranks share its states."""
    if given is None or not given.zero:
        return kind(parameters, **how)  # type: ignore[no-any-return]
    with catch_warnings():
        simplefilter("ignore", DeprecationWarning)  # scripts its other optimizers when it is imported
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(parameters, kind, parameters_as_bucket_view=given.parameters_as_bucket_view, **how)


@contextmanager
def reducing(job: Job, follow: Follow, within: Surroundings) -> Iterator[Reducing | None]:
    """Above ``follow``, what the job's reducer needs; to be entered before ``follow`` is calibrated. Where nothing
    follows, ``answered`` is all that it needs."""
    if job.ddp is None:
        yield None
        return
    with Reducing(follow, within) as mode:
        yield mode


@contextmanager
def answered(job: Job, within: Surroundings) -> Iterator[None]:
    """c10d's own all-reduce gives buckets back where a rank is alone. A mode could, too, and would keep autograd from
    summing gradients in place (``TensorSubclassLikeUtils.h``, ``isTensorSubclassLike``)."""
    if job.ddp is None or not within.alone:
        yield
        return
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    with catch_warnings():
        simplefilter("ignore")  # a kernel is overridden, and means to be
        library.impl("allreduce_", lambda buckets, *_: (buckets, reduced(buckets)), within.device.upper())
    try:
        yield
    finally:
        library._destroy()


class Reducing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Above a ``Follow``: keeps the reducer's own integers real, and its all-reduce whole where there are no others to
    give anything back."""

    def __init__(self, follow: Follow, within: Surroundings) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.follow, self.within = follow, within
        self._keeps_books = False
        self._books: set[int] = set()
        """Addresses of the storages of the reducer's integers."""

    @contextmanager
    def bookkeeping(self) -> Iterator[None]:
        """Integers that are made now are the reducer's."""
        self._keeps_books = self.within.fake
        try:
            yield
        finally:
            self._keeps_books = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], FakeTensor):  # nearly all
            return func(*args, **kwargs)
        if self.within.fake:
            tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if self._is_of_books(tensors, kwargs):
                return self._kept(func, args, kwargs)
        out = func(*args, **kwargs)
        if func is torch.ops.c10d.allreduce_.default:
            for bucket in args[0]:
                self.follow.suppose(bucket, Category.COMMUNICATION_BUFFERS)
            if self.within.alone:
                return out[0], reduced(args[0])
        return out

    def _is_of_books(self, tensors: list[torch.Tensor], kwargs: Any) -> bool:
        """Whether an operator makes integers of the reducer, or works on them."""
        if not tensors:
            return self._keeps_books and kwargs.get("dtype") in INTEGERS
        return all(not isinstance(one, FakeTensor) and _address(one) in self._books for one in tensors)

    def _kept(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What ``func`` returns for real integers. Those that are not zero at first are copies on the device of others
        on the host (``reducer.cpp``, ``initialize_local_used_map``): they alone are followed."""
        with _disable_current_modes():
            out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and _address(out) not in self._books:
            self._books.add(_address(out))
            end = finalize(out.untyped_storage(), self._books.discard, _address(out))
            end.atexit = False
            if func is torch.ops.aten.empty.memory_format and out.dtype is torch.int32:
                self.follow.adopt(out, "reducer_integers", Category.COMMUNICATION_BUFFERS)
        return out


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def reduced(tensors: list[torch.Tensor]) -> Any:
    """The handle of an all-reduce that has ended (``c10d::Work``), with its results."""
    future: Future[list[torch.Tensor]] = Future()
    future.set_result(list(tensors))
    bindings: Any = _distributed_c10d
    return bindings._create_work_from_future(future).boxed()


@contextmanager
def rank_of(job: Job, within: Surroundings = FAKE) -> Iterator[DeviceMesh | None]:
    """The mesh of the job's ranks, of which this process, where it is alone, is the first, or the one that a replica
    names; made of real tensors, whose elements are known, and so before a fake mode is entered. Replicas need none."""
    if job.fsdp is not None:
        rank, size = 0, job.fsdp.shards * job.fsdp.replicas
    elif job.ddp is not None:
        rank, size = job.ddp.rank, job.ddp.ranks
    else:
        yield None
        return
    with within.group(rank, size), _real_meshes():
        yield _mesh_of(job.fsdp, within.device) if job.fsdp is not None else None


def _mesh_of(sharded: Sharded, device: str) -> DeviceMesh:
    if sharded.replicas == 1:
        return init_device_mesh(device, (sharded.shards,), mesh_dim_names=("shard",))
    return init_device_mesh(device, (sharded.replicas, sharded.shards), mesh_dim_names=("replicate", "shard"))


@contextmanager
def _real_meshes() -> Iterator[None]:
    """The mesh of an integer ``reshard_after_forward`` is made later, of real tensors too."""
    module: Any = _fully_shard
    make = module._get_post_forward_mesh_info

    def made(*args: Any) -> Any:
        with _disable_current_modes():
            return make(*args)

    with patch.object(_fully_shard, "_get_post_forward_mesh_info", made):
        yield


def shard(job: Job, model: torch.nn.Module, mesh: DeviceMesh | None) -> None:
    """Every layer is a unit, and so is the model; in place."""
    if job.casts:
        _cast_inputs(model, DTYPES[job.dtype])
    if job.fsdp is None:
        return
    given = job.fsdp
    how: dict[str, Any] = {"mesh": mesh}
    how["mp_policy"] = MixedPrecisionPolicy(param_dtype=DTYPES[job.dtype], reduce_dtype=DTYPES[given.reduce])
    if given.offload:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh is not None and mesh.device_type == "cuda")
    for path in outline_of(model).blocks:
        layers: Any = model.get_submodule(path)
        for layer in layers:
            fully_shard(layer, **how, reshard_after_forward=given.reshard)
    if given.reshard_root:
        fully_shard(model, **how, reshard_after_forward=True)
    else:
        fully_shard(model, **how)


def _cast_inputs(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """As ``FSDPState._cast_forward_inputs`` does before a layer's forward, and before it is recomputed."""

    def cast(_: torch.nn.Module, *given: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, given)

    for path in outline_of(model).blocks:
        layers: Any = model.get_submodule(path)
        for layer in layers:
            layer.register_forward_pre_hook(cast, with_kwargs=True)


BUFFERS, GATHERED, GRADIENTS = Category.COMMUNICATION_BUFFERS, Category.GATHERED_PARAMETERS, Category.GRADIENTS


@contextmanager
def categories_of_fsdp(follow: Follow) -> Iterator[None]:
    """While ``follow`` is told of them. A gradient's buffer is a gradient once its parameter has it."""
    parameter, collectives = _fsdp_param.FSDPParam, _fsdp_collectives.DefaultAllocMixin
    allocate, gathered = collectives.allocate, parameter.init_all_gather_outputs
    accumulated, inputs = parameter.to_accumulated_grad_if_needed, _fsdp_collectives._get_param_all_gather_inputs
    reduce = _fsdp_collectives.foreach_reduce

    def told(tensors: Any, category: Category) -> None:
        for tensor in tensors:  # a variable that ends here, before any of them may
            follow.suppose(tensor, category)

    def told_allocate(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = allocate(self, *args, **kwargs)
        follow.suppose(result, BUFFERS)
        return result

    def told_gathered(self: Any, *args: Any, **kwargs: Any) -> None:
        gathered(self, *args, **kwargs)
        told(self.all_gather_outputs, GATHERED)

    def told_inputs(*args: Any) -> Any:
        result = inputs(*args)
        for tensors in result:
            told(tensors, BUFFERS)
        return result

    def told_accumulated(self: Any) -> None:
        accumulated(self)
        if self.unsharded_accumulated_grad is not None:
            follow.suppose(self.unsharded_accumulated_grad, GRADIENTS)

    def told_reduce(parameters: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        told(gradients, GRADIENTS)
        return reduce(parameters, gradients, *args, **kwargs)

    with (
        patch.object(collectives, "allocate", told_allocate),
        patch.object(parameter, "init_all_gather_outputs", told_gathered),
        patch.object(parameter, "to_accumulated_grad_if_needed", told_accumulated),
        patch.object(_fsdp_collectives, "_get_param_all_gather_inputs", told_inputs),
        patch.object(_fsdp_param_group, "foreach_reduce", told_reduce),
    ):
        yield
