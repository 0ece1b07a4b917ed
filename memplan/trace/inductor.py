"""A function as ``torch.compile`` runs it on a GPU: Inductor's own code, run on fake tensors.

torch 2.13.0. Dynamo and AOTAutograd trace the function on the CPU's fake tensors, Inductor's passes and its min-cut
partitioner (``torch/_inductor/compile_fx.py``, ``partition_fn``) split what runs forward from what runs backward, and
both graphs, moved to fake tensors of ``cuda``, are lowered, fused, ordered and written as Python (``GraphLowering
.codegen``). That needs a GPU's properties, and neither a GPU nor Triton: kernels are written and never built. The code
allocates and lets go of each buffer by name; its kernels move nothing here.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import combinations_with_replacement
from math import prod
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
import torch._inductor.scheduler
import torch.utils._triton
from torch._decomp import decomposition_table
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import partitioners
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor
from torch._inductor.compile_fx import compile_fx_inner, partition_fn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_iter

from ..tape.events import Drop, Hold
from ..values import dataclass
from .recording import FORWARD, Place, Recording
from .storages import Follow
from .substitutions import fused_attention

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 * 2**30,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
)
"""What Inductor asks of a GPU (``cudaDeviceProp``)."""


class _WrittenError(Exception):
    """The code is there; nothing is built."""


class Launched(NamedTuple):
    """A kernel that has run: a product, fused attention, or one that streams, and tensors that it reads or writes,
    twice those that it writes over."""

    kind: Literal["product", "attention", "stream"]
    tensors: list[tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, eq=False)
class Code:
    """One direction of a compiled function."""

    call: Callable[[list[Any]], Sequence[Any]]
    """Of the list of its arguments, which it empties."""
    kernels: list[str]
    """What first has each buffer that it makes, in order."""
    launched: list[Launched]
    """What it has launched, once it has run."""


@dataclass(frozen=True, eq=False)
class Graphs:
    """What AOTAutograd hands to a compiler; the forward graph returns the output, and what is saved."""

    forward: GraphModule
    backward: GraphModule
    inputs: list[str]
    """What Dynamo calls those of the function, parameters among them."""


def graphs_of(function: Any, arguments: Sequence[Any], mode: FakeTensorMode) -> Graphs:
    """``function`` of fake tensors of the CPU, under ``mode``, in one graph (``fullgraph``), whose backward starts at
    the first output. What is recomputed takes its random numbers from a generator, which is no tensor
    (``graphsafe_rng_functionalization``)."""
    found: dict[str, GraphModule] = {}
    inputs: list[str] = []

    def kept(name: str) -> Callable[[GraphModule, Any], GraphModule]:
        def compiler(graph: GraphModule, _: Any) -> Any:
            found[name] = graph
            return make_boxed_func(graph.forward)

        return compiler

    def named(graph: GraphModule, examples: Any) -> Any:
        inputs.extend(node.name for node in graph.graph.nodes if node.op == "placeholder")
        return backend(graph, examples)

    torch._dynamo.reset()
    backend = aot(kept("forward"), kept("backward"))
    with mode, as_fused():
        run: Any = torch.compile(function, backend=named, fullgraph=True)
        out = run(*arguments)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    return Graphs(found["forward"], found["backward"], inputs)


def aot(forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """AOTAutograd as Inductor calls it, with these compilers of both directions."""
    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        partition_fn=partition_fn,
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,
    )


@contextmanager
def as_fused() -> Iterator[None]:
    """While a function of the CPU's fake tensors is traced as a GPU would run it."""
    attention = patch.object(torch.nn.functional, "scaled_dot_product_attention", fused_attention)
    with attention, patch.object(partitioners, "has_recomputable_rng_ops", lambda _: False):
        yield


def code_of(graph: GraphModule, *, is_backward: bool, reuse: bool = False) -> Code:
    """What Inductor writes for ``graph`` on an H100. Unless ``reuse``, a buffer that it would take for another of the
    same size ends, and another begins: Inductor does so only where its own estimate of the peak stays what it is
    (``AllocateLine.should_reuse_buffer``)."""
    written: list[str] = []

    def stop(lowering: GraphLowering) -> None:
        written.append(lowering.codegen()[0].value)
        raise _WrittenError

    with _as_on_a_gpu(reuse), _without_copies(), patch.object(GraphLowering, "compile_to_module", stop):
        mode = FakeTensorMode()
        inputs = _moved(graph, mode)
        with tracing(TracingContext(mode)):
            try:
                compile_fx_inner(graph, inputs, is_backward=is_backward, static_input_idxs=[])
            except Exception:
                if not written:
                    raise
    call, launched = _call_of(written[-1]), list[Launched]()
    return Code(_runner(call, written[-1], launched), _made_by(call), launched)


@contextmanager
def _without_copies() -> Iterator[None]:
    """What fake tensors of a GPU ask a build without CUDA for: copies and fills, which change no size."""
    index_put: Any = torch.ops.aten._unsafe_masked_index_put_accumulate.default

    def copied(into: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return into

    summed = patch.dict(decomposition_table, {index_put: lambda x, *_: torch.empty_like(x)})
    with summed, patch.object(FakeTensor, "copy_", copied, create=True):
        yield


def _moved(graph: GraphModule, mode: FakeTensorMode) -> list[Any]:
    """The inputs of ``graph``, whose nodes are put on the GPU."""
    inputs: list[Any] = []
    with mode:
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
            if node.op == "placeholder":
                value = node.meta["val"]
                if isinstance(value, torch.Tensor):
                    sizes = tuple(int(one) for one in value.shape)
                    value = torch.empty_strided(sizes, value.stride(), dtype=value.dtype, device="cuda")
                inputs.append(value)
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs)
    return inputs


@contextmanager
def _as_on_a_gpu(reuse: bool) -> Iterator[None]:
    """What Inductor asks ``torch.cuda`` and Triton for."""
    cuda: Any = torch.cuda
    answers: list[tuple[Any, dict[str, Any]]] = [
        (
            cuda,
            {
                "is_available": True,
                "is_initialized": True,
                "device_count": 1,
                "current_device": 0,
                "get_device_properties": H100,
                "_get_device_properties": H100,
                "get_device_capability": (H100.major, H100.minor),
                "get_rng_state": torch.zeros(1),
                **dict.fromkeys(("set_rng_state", "synchronize", "_lazy_init"), None),
                **dict.fromkeys(("_exchange_device", "_maybe_exchange_device"), 0),
            },
        ),
        (
            torch._C,
            dict.fromkeys(
                (
                    "_cuda_getCurrentRawStream",
                    "_cuda_getDevice",
                    "_cuda_setDevice",
                    "_cuda_exchangeDevice",
                    "_cuda_maybeExchangeDevice",
                    "_cuda_init",
                ),
                0,
            ),
        ),
        (torch._inductor.utils, {"is_big_gpu": True}),
        (torch._inductor.scheduler, {"has_triton": True}),
        (torch.utils._triton, {"triton_hash_with_backend": "0"}),
    ]
    with ExitStack() as stack:
        for owner, names in answers:
            for name, answer in names.items():
                stack.enter_context(patch.object(owner, name, lambda *_, a=answer, **__: a, create=True))
        stack.enter_context(patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(inductor.patch(fx_graph_cache=False, force_disable_caches=True, allow_buffer_reuse=reuse))
        yield


# -- running what was written -------------------------------------------------------------------------


class _Nothing:
    """A kernel, a stream, a device: takes anything and does nothing."""

    def __getattr__(self, _: str) -> _Nothing:
        return self

    def __call__(self, *_: Any, **__: Any) -> _Nothing:
        return self

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: Any) -> None:
        return


_SIGNATURE = re.compile(r"^def (triton_\w+)\((.*?)\):", re.MULTILINE)


class _Kernels(_Nothing):
    """A kernel of Triton's, or all of libraries': says what it is given, and does nothing."""

    def __init__(self, launched: list[Launched], names: Sequence[str] = ()) -> None:
        self.launched = launched
        self.names = names

    def run(self, *given: Any, **_: Any) -> None:
        named = zip(self.names, given, strict=False)
        each = [(one, 2 if name.startswith("in_out") else 1) for name, one in named if isinstance(one, torch.Tensor)]
        tensors = [(tuple(one.shape), one.dtype) for one, times in each for _ in range(times)]
        self.launched.append(Launched("stream", tensors))

    def mm(self, *given: Any, **_: Any) -> None:
        self.launched.append(Launched("product", [(tuple(one.shape), one.dtype) for one in given[:2]]))

    _scaled_mm = mm


class _Names(dict[str, Any]):
    """Names of the written module that its ``call`` uses."""

    signatures: Mapping[str, Sequence[str]]
    launched: list[Launched]

    def __missing__(self, name: str) -> Any:
        if name == "extern_kernels":
            return _Kernels(self.launched)
        if name in self.signatures:
            return _Kernels(self.launched, self.signatures[name])
        return getattr(builtins, name, None) or _Nothing()


class _Torch:
    """``torch`` without its GPU."""

    cuda = _Nothing()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _viewed(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    """Without the tie that a view has to its base, so that autograd sums into one that nobody else has
    (``guards.cpp``, ``_reinterpret_tensor``)."""
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset).data


def _call_of(text: str) -> ast.FunctionDef:
    owners = (one for one in ast.parse(text).body if isinstance(one, ast.ClassDef))
    (call,) = [one for owner in owners for one in owner.body if isinstance(one, ast.FunctionDef) and one.name == "call"]
    return call


def _runner(call: ast.FunctionDef, text: str, launched: list[Launched]) -> Callable[[list[Any]], Sequence[Any]]:
    names = _Names(
        torch=_Torch(), empty_strided_cuda=_empty, reinterpret_tensor=_viewed, copy_if_misaligned=lambda one: one
    )
    names.signatures = {name: given.replace(" ", "").split(",") for name, given in _SIGNATURE.findall(text)}
    names.launched = launched
    exec(compile(ast.Module([call], []), "<inductor>", "exec"), names)
    return lambda arguments: names["call"](None, arguments)


_KERNEL = re.compile(r"triton_(?:poi|red|per)_fused_+(.*?)_*\d+")


def _made_by(call: ast.FunctionDef) -> list[str]:
    """The kernel that first has each buffer of ``empty_strided_cuda``, in order."""
    calls = [one for one in ast.walk(call) if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute)]
    used = [(_kernel(one), {x.id for x in ast.walk(one) if isinstance(x, ast.Name)}, one.lineno) for one in calls]
    used = sorted((one for one in used if one[0]), key=lambda one: one[2])
    made = sorted(
        (one.lineno, ast.unparse(one.targets[0]))
        for one in ast.walk(call)
        if isinstance(one, ast.Assign) and ast.unparse(one.value).startswith("empty_strided_cuda(")
    )
    return [next((by for by, names, at in used if at > line and name in names), "buffer") for line, name in made]


def _kernel(call: ast.Call) -> str:
    words = ast.unparse(call.func).split(".")
    if words[-1] == "run":
        found = _KERNEL.fullmatch(words[0])
        return found[1] if found else words[0]
    return words[-1] if words[0] == "extern_kernels" else words[-2] if words[:2] == ["torch", "ops"] else ""


# -- what happens to tensors, in sizes that have names ------------------------------------------------

Event = int | list[Any]
"""A tensor's number as it ends, or its number, dimensions, dtype and name as it begins."""


class Numbered(Follow):  # type: ignore[no-untyped-call]
    launched: list[Launched]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        given, made = _tensors((args, kwargs)), _tensors(out)
        views = {one.untyped_storage()._cdata for one in given}
        if given and any(one.untyped_storage()._cdata not in views for one in made):
            kind: Literal["attention", "stream"] = "attention" if "attention" in str(func) else "stream"
            self.launched.append(Launched(kind, [(tuple(one.shape), one.dtype) for one in (*given, *made)]))
        return out

    def number(self, tensor: torch.Tensor) -> int:
        """Of the storage of ``tensor``, as events have it."""
        return self._followed[tensor.untyped_storage()._cdata].hold.tensor


@dataclass(frozen=True, eq=False)
class Happened:
    """One direction: its events, and which tensors it returned."""

    events: list[Event]
    returned: list[int | None]
    work: list[str]
    """What ``layers.compiled`` reads as kernels: ``product`` of sizes and bytes of an element, ``attention``, and all
    that streams together: how many kernels, and bytes of each product of sizes."""


def happened(
    code: Code, arguments: list[Any], numbers: Sequence[int], sizes: Mapping[str, int], above: int = 0
) -> Happened:
    """What ``code`` makes and lets go of, given fake ``arguments`` under their ``numbers``; those that it makes have
    larger ones, and above ``above``. It empties ``arguments``."""
    recording = Recording()
    follow = Numbered(recording, lambda: Place(0, FORWARD, ""), sums_in_place=False)
    follow.launched = code.launched
    own: dict[int, int] = {}
    with follow:
        for one, number in zip(arguments, numbers, strict=True):
            if isinstance(one, torch.Tensor):
                follow.adopt(one, "")
                own[follow.number(one)] = number
        del one
        begin = len(recording.events)
        returned = code.call(arguments)
        numbered = [follow.number(one) if isinstance(one, torch.Tensor) else None for one in returned]
        events = recording.events[begin:]
    follow.close()
    names, first = iter(code.kernels), max(above, *numbers) + 1
    made: list[Event] = []
    for event in events:
        if isinstance(event, Hold):
            own[event.tensor] = first
            name = next(names) if event.name == "aten.empty_strided.default" else event.name.split(".")[1]
            made.append([first, _named(event.shape, sizes), event.dtype, name.strip("_")])
            first += 1
        elif isinstance(event, Drop):
            made.append(own[event.tensor])
    return Happened(made, [None if one is None else own[one] for one in numbered], _work(code.launched, sizes))


def _tensors(given: Any) -> list[torch.Tensor]:
    return [one for one in tree_iter(given) if isinstance(one, torch.Tensor)]


def _work(launched: Sequence[Launched], sizes: Mapping[str, int]) -> list[str]:
    result, moved, streams = list[str](), Counter[str](), 0
    for kind, tensors in launched:
        if kind == "product":
            ((m, k), dtype), ((_, n), _) = tensors
            dims = ["*".join(_named((size,), sizes)) or "1" for size in (m, n, k)]
            result.append(f"product {' '.join(dims)} {dtype.itemsize}")
        elif kind == "attention":
            result.append(kind)
        else:
            streams += 1
            for shape, dtype in tensors:
                moved["*".join(sorted(_named(shape, sizes))) or "1"] += dtype.itemsize
    return [*result, f"stream {streams} {' '.join(f'{size}:{count}' for size, count in moved.items())}"]


FEW = 1 << 16
"""Numbers of a tensor that may have a dimension without a name."""


def _named(shape: Sequence[int], sizes: Mapping[str, int]) -> list[str]:
    """Dimensions by their names: each one of ``sizes``, or a product of few; as they are where nothing has a name.
    Parts of the maximum of a whole tensor are as many as Inductor finds best, and stand as a number."""
    if not sizes:
        return list(map(str, shape))
    return [name for size in shape if size != 1 for name in _factors(size, sizes, 3) or _part(size, shape)]


def _part(size: int, shape: Sequence[int]) -> list[str]:
    if prod(shape) > FEW:
        raise ValueError(f"{size} of {tuple(shape)} is no product of the sizes that have names")
    return [str(size)]


def _factors(size: int, sizes: Mapping[str, int], most: int) -> list[str]:
    """As few as there can be; none where there are more than ``most``."""
    for count in range(1, most + 1):
        for names in combinations_with_replacement(sizes, count):
            if prod(sizes[name] for name in names) == size:
                return list(names)
    return []
