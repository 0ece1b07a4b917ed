"""Transformer Engine's own Python on fake tensors, its C++ extension replaced by what that allocates.

The package is read from a source tree of NVIDIA/TransformerEngine (a release's checkout is enough; nothing is
built), which the environment variable ``MEMPLAN_TE_SOURCE`` names. ``transformer_engine_torch`` becomes a module
whose functions return fresh tensors in the order in which ``csrc/extensions/*.cpp`` makes them, workspaces of
kernels left out; Triton's kernels do nothing. What is saved, gathered and cleared is Transformer Engine's code.
"""

from __future__ import annotations

import enum
import importlib
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from .tracer import Change, Follow, Trace, cuda_behaviour
from .transformer_engine_kernels import BACKENDS, DTYPES, FLASH, FUNCTIONS, DType, Enum, fresh

SOURCE = "MEMPLAN_TE_SOURCE"


def source() -> Path | None:
    """The source tree that the environment names, if it is one."""
    path = Path(os.environ.get(SOURCE, ""))
    return path if SOURCE in os.environ and (path / "transformer_engine" / "pytorch").is_dir() else None


# -- the module -------------------------------------------------------------------------------------


class _Extension(types.ModuleType):
    """``transformer_engine_torch``: functions above, and enumerations for every other name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Enum(name, (), {})
        setattr(self, name, value)
        return value


TENSORS = {
    "FP8FwdTensors": [f"GEMM{at}_{kind}" for at in (1, 2, 3) for kind in ("INPUT", "WEIGHT", "OUTPUT")],
    "FP8BwdTensors": [f"GRAD_{kind}{at}" for at in (1, 2, 3) for kind in ("OUTPUT", "INPUT")],
}
"""Places of quantizers (``common.h``)."""

ABSENT = ("onnxscript", "nvdlfw_inspect", "triton", "einops", "onnx")
"""Packages that Transformer Engine imports and that nothing here runs."""


class _Missing(types.ModuleType):
    """A package that is not installed: any attribute is a mock."""

    __path__: list[str] = []  # noqa: RUF012 - an attribute of every package

    __version__ = "3.5.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = mock.MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


def _installed(name: str, version: Callable[[str], str] = metadata.version) -> str:
    return "2.7.4" if name == "flash-attn" else version(name)


class _Kernel:
    """A Triton kernel: ``kernel[grid](...)`` does nothing, and keeps none of its arguments."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: None


class _Finder:
    """Finds the packages in ``ABSENT`` and whatever is below them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Missing(spec.name)
        module.jit = lambda function=None, **_: _Kernel()  # type: ignore[attr-defined]
        module.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return


def load(path: Path) -> types.ModuleType:
    """``transformer_engine.pytorch`` from the source tree at ``path``."""
    loaded = sys.modules.get("transformer_engine.pytorch")
    if loaded is not None:
        return loaded
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # common/__init__.py then loads no library
    os.environ.setdefault("NVTE_TORCH_COMPILE", "0")
    sys.meta_path.append(_Finder())
    extension: Any = _Extension("transformer_engine_torch")
    extension.DType = DType
    for name, members in TENSORS.items():
        setattr(extension, name, enum.IntEnum(name, members, start=0))  # type: ignore[misc]
    older = "NVTE_F16_max512_seqlen"
    mentioned = older in (path / "transformer_engine/pytorch/cpp_extensions/fused_attn.py").read_text()
    names = [*BACKENDS, *([older] if mentioned else [])]
    extension.NVTE_Fused_Attn_Backend = enum.IntEnum("Backend", {name: at - 1 for at, name in enumerate(names)})  # type: ignore[misc]
    for name, function in FUNCTIONS.items():
        setattr(extension, name, function)
    sys.modules["transformer_engine_torch"] = extension
    package = types.ModuleType("transformer_engine")
    package.__path__ = [str(path / "transformer_engine")]
    package.__version__ = (path / "build_tools" / "VERSION.txt").read_text().strip()  # type: ignore[attr-defined]
    sys.modules["transformer_engine"] = package
    flash = types.ModuleType("flash_attn.flash_attn_interface")
    for name, function in FLASH.items():
        setattr(flash, name, function)
    kernels = types.ModuleType("flash_attn_2_cuda")
    kernels.varlen_bwd = None  # type: ignore[attr-defined]
    sys.modules |= {"flash_attn": types.ModuleType("flash_attn"), flash.__name__: flash, kernels.__name__: kernels}
    with on_a_gpu(), mock.patch.object(metadata, "version", _installed):
        common = importlib.import_module("transformer_engine.common")
        common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]
        pytorch = importlib.import_module("transformer_engine.pytorch")
        constants = importlib.import_module("transformer_engine.pytorch.constants")
    _take_fakes_for_tensors()
    _compile_corrections()
    DTYPES.update({value: key for key, value in constants.TE_DType.items()})
    return pytorch


class OnHost(TorchFunctionMode):
    """Makes on the host what is asked for on a GPU, which PyTorch's builds for the host cannot index."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.equal:  # of a loss's gradient with 1.0; fake tensors have no elements
            return False
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _take_fakes_for_tensors() -> None:
    """``get_attention_backend`` compares the class of the queries, which here is that of fake tensors."""
    utils: Any = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    chosen = utils.get_attention_backend

    def with_tensors(parameters: Any) -> Any:
        parameters.qkv_type = torch.Tensor
        return chosen(parameters)

    utils.get_attention_backend = with_tensors
    utils.combine_tensors = _combined


def _combined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """``combine_tensors``: the whole of which ``parts`` are views, without ``set_``, which fake storages outlive."""
    like = parts[0].shape
    whole = (*like[:dim], len(parts), *like[dim:])
    return parts[0].as_strided(whole, [prod(whole[at + 1 :]) for at in range(len(whole))])


def _compile_corrections() -> None:
    """``jit_fuser`` compiles what merges the steps of context parallelism: kernels without intermediates."""
    steps: Any = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.context_parallel")
    steps.flash_attn_fwd_out_correction_init = lambda out, *rest: torch.empty_like(out)
    steps.reorder_seq_chunks_for_a2a_before_attn = _ordered
    steps.reorder_seq_chunks_for_a2a_after_attn = _by_chunks
    for name in ("out_correction", "second_half_out_correction"):
        setattr(steps, f"flash_attn_fwd_{name}", lambda *args: None)
    for name in ("softmax_lse_correction", "second_half_softmax_lse_correction"):
        setattr(steps, f"flash_attn_fwd_{name}", lambda *args: None)


def _ordered(x: torch.Tensor, ids: torch.Tensor, seq_dim: int, cp: int) -> torch.Tensor:
    moved = x.movedim(0, seq_dim).shape
    return fresh((*moved[:seq_dim], cp * 2, moved[seq_dim + 1] // 2, *moved[seq_dim + 2 :]), x.dtype)


def _by_chunks(x: torch.Tensor, ids: torch.Tensor, seq_dim: int, cp: int) -> torch.Tensor:
    return fresh((cp, 2, *x.movedim(seq_dim, 0).shape[1:]), x.dtype)


def _wrapped(*args: Any, make: Callable[..., Any] = torch.Tensor._make_wrapper_subclass, **kwargs: Any) -> Any:
    """A quantised tensor without a device, which is the GPU otherwise."""
    return make(*args, **kwargs | {"device": "cpu"})


CAPABILITY = [9, 0]
"""Of the GPU: an H100's, unless a case is about another."""


@contextmanager
def on_a_gpu() -> Iterator[None]:
    """``torch.cuda`` answers as on one GPU."""
    major, minor = CAPABILITY
    properties = types.SimpleNamespace(major=major, minor=minor, multi_processor_count=132, name="NVIDIA")
    answers: dict[str, Any] = {
        "current_device": lambda: 0,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (major, minor),
        "current_stream": lambda device=None: mock.MagicMock(),
        "is_current_stream_capturing": lambda: False,
        "device": lambda device: nullcontext(),
        "stream": lambda stream: nullcontext(),
        "Event": mock.MagicMock,
    }
    waited = nullcontext(types.SimpleNamespace(wait=lambda: None))
    at_once = mock.patch.object(dist, "_coalescing_manager", return_value=waited)
    nvtx: dict[str, Any] = {"range_push": lambda message: 0, "range_pop": lambda: 0}
    with (
        at_once,
        mock.patch.multiple(torch.cuda, **answers),
        mock.patch.multiple(torch.cuda.nvtx, **nvtx),
        mock.patch.object(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata),
        mock.patch.object(torch.Tensor, "_make_wrapper_subclass", _wrapped),
        mock.patch.object(FakeTensor, "is_cuda", property(lambda tensor: True), create=True),
        mock.patch.object(FakeTensor, "is_cpu", property(lambda tensor: False), create=True),
        OnHost(),
    ):
        yield


# -- a run ------------------------------------------------------------------------------------------


run_backward: Any = torch.autograd.Variable._execution_engine.run_backward
"""``torch.autograd.backward`` without its Python, which would leave ``OnHost``."""


class Traced(NamedTuple):
    """What one forward and its backward held and dropped, but for the inputs and the output's gradient."""

    forward: list[Change]
    backward: list[Change]


def traced(make: Callable[[], tuple[Callable[..., torch.Tensor], list[torch.Tensor]]]) -> Traced:
    """Follows ``function(*inputs)`` and its backward; ``make`` gives both under fake tensors."""
    trace = Trace()
    with FakeTensorMode(allow_non_fake_inputs=True), on_a_gpu(), cuda_behaviour(), Follow(trace):
        function, inputs = make()
        start = len(trace.changes)
        out = function(*inputs)
        middle = len(trace.changes)
        gradient = torch.empty_like(out)
        again = len(trace.changes)
        run_backward((out,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        end = len(trace.changes)
        return Traced(trace.changes[start:middle], trace.changes[again:end])


def parallel(t: int) -> dist.ProcessGroup:
    """A group of ``t`` ranks whose collectives do nothing; this process is its last."""
    if not dist.is_initialized():
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=63, world_size=64, store=FakeStore())
    group = dist.new_group(list(range(64 - t, 64)))
    assert isinstance(group, dist.ProcessGroup)
    return group
