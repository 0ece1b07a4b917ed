"""Real Megatron-Core layers, followed on fake tensors.

The layers run as they are, on one rank of a tensor-parallel group that only has a size. What they need from
elsewhere is stood in for by code that allocates what the original does:

* apex's ``FusedLayerNormAffineFunction`` and the fused softmax kernels (``csrc/layer_norm_cuda.cpp``,
  ``csrc/megatron/scaled_*_softmax_cuda.cu``, whose backward works in place); the GEMM that adds to ``main_grad``;
* functions under ``torch.compile`` (``oracle.compiled``);
* collectives, which work in place; a parameter's gradient ends as it arrives, as under Megatron's hook.
"""
# mypy: disable-error-code="import-not-found, no-untyped-call, union-attr, arg-type"

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .compiled import compiled
from .tracer import Change, Follow, Trace, run

# -- what is not installed --------------------------------------------------------------------------


class FusedLayerNormAffineFunction(torch.autograd.Function):
    """apex ``normalization/fused_layer_norm.py``: saves input, weight, bias, and fp32 mean and deviation."""

    @staticmethod
    def forward(
        ctx: Any, input: Any, weight: Any, bias: Any, shape: Any, eps: Any, memory_efficient: Any = False
    ) -> Any:
        input = input.contiguous()
        out = torch.empty_like(input)
        mean = torch.empty(input.numel() // weight.numel(), dtype=torch.float32)
        deviation = torch.empty_like(mean)
        ctx.save_for_backward(input, weight, bias, mean, deviation)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        input, weight, bias, _, _ = ctx.saved_tensors
        gradient = gradient.contiguous()
        return torch.empty_like(input), torch.empty_like(weight), torch.empty_like(bias), None, None, None


class FusedRMSNorm(torch.autograd.Function):
    """``_fused_rms_norm`` as CUDA runs it (PyTorch ``aten/src/ATen/native/cuda/layer_norm_kernel.cu``)."""

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any) -> Any:
        out = torch.empty_like(input, memory_format=torch.contiguous_format)
        deviation = torch.empty((*input.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(input, weight, deviation)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        input, weight, _ = ctx.saved_tensors
        grad_input = torch.empty_like(input, memory_format=torch.contiguous_format)
        return grad_input, torch.empty_like(weight) if ctx.needs_input_grad[1] else None  # ``grad_input_mask``


def _softmax_kernel(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.forward = lambda scores, *rest: torch.empty_like(scores)  # type: ignore[attr-defined]
    module.backward = lambda gradient, *rest: gradient.contiguous()  # type: ignore[attr-defined]
    module.get_batch_per_block = lambda sq, sk, b, heads: 8 if sk <= 128 else 4  # type: ignore[attr-defined]
    return module


def _module(name: str, **contents: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(contents)
    return module


class _Anything(types.ModuleType):
    """A module of which everything is a decorator."""

    __path__ = []  # noqa: RUF012 - as the import system sets it
    __version__ = "3.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) and not named else self


@contextlib.contextmanager
def megatron_with_stand_ins() -> Iterator[None]:
    """``megatron.core`` with stand-ins for apex, its kernels and Triton, beside the one that others import;
    ``ImportError`` where it is absent."""
    others = _taken()
    try:
        if not _OURS:
            _import_megatron()
        sys.modules.update(_OURS)
        yield
        _OURS.update(_taken())
    finally:
        _taken()
        sys.modules.update(others)


_OURS: dict[str, types.ModuleType] = {}


def _taken() -> dict[str, types.ModuleType]:
    """Megatron's modules, taken out of those that are imported."""
    names = [name for name in sys.modules if name == "megatron" or name.startswith("megatron.")]
    return {name: sys.modules.pop(name) for name in names}


def _import_megatron() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch._inductor.compile_fx")  # before there is a triton
    norm = _module("apex.normalization.fused_layer_norm", FusedLayerNormAffineFunction=FusedLayerNormAffineFunction)
    stand_ins = {
        "apex": _module("apex", __path__=[]),
        "apex.normalization": _module("apex.normalization", __path__=[]),
        "apex.normalization.fused_layer_norm": norm,
        "fused_weight_gradient_mlp_cuda": _module(
            "fused_weight_gradient_mlp_cuda",
            wgrad_gemm_accum_fp32=lambda *_: None,
            wgrad_gemm_accum_fp16=lambda *_: None,
        ),
    }
    for name in ("scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda", "scaled_softmax_cuda"):
        stand_ins[name] = _softmax_kernel(name)
    sys.modules.update(stand_ins)
    temporary = {name: _Anything(name) for name in ("triton", "triton.language")}
    sys.modules.update(temporary)
    original, torch.compile = torch.compile, compiled  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
            importlib.import_module("megatron.core.models.bert.bert_layer_specs")
        _OURS.update({name: sys.modules[name] for name in sys.modules if name.split(".")[0] == "megatron"})
    finally:
        torch.compile = original
        for name in temporary:
            del sys.modules[name]
        del sys.modules["apex"], sys.modules["apex.normalization"]


def discards_apart() -> bool:
    """``CheckpointWithoutOutput`` has a function of its own that ends its outputs (Megatron-Core 0.20)."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    return hasattr(random.CheckpointWithoutOutput, "_discard_outputs")


# -- the layer --------------------------------------------------------------------------------------


class Group:
    """A process group that only has a size."""

    def __init__(self, size: int) -> None:
        self.count = size

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return 0


class _OnHost(TorchFunctionMode):
    """Tensors that ask for a GPU are on the host, where fake tensors have an autograd."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class _Tracker:
    """Random-number states, which are not followed."""

    def fork(self, name: str = "") -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@dataclass(frozen=True)
class Setting:
    """One layer on one rank: b sequences of s tokens, t-way tensor parallel, and arguments of its configuration."""

    b: int
    s: int
    t: int = 1
    dtype: str = "bf16"
    bert: bool = False
    mask: bool = True
    """An attention mask is given to the layer."""
    rotary: int = 0
    """Features of a head that turn."""
    keys: int = 0
    """Tokens of an encoder's output, to which T5's layer attends, too."""
    recompute: bool = False
    """Every layer is a region of its own that is recomputed (``tensor_parallel.checkpoint``)."""
    block: str = ""
    """``ATTENTION:MLP`` of layers that differ (``plan.spec``)."""
    config: dict[str, Any] = field(default_factory=dict, hash=False)
    """Arguments of ``TransformerConfig``."""


@dataclass
class LayerTrace:
    """What the middle of three equal layers did, and the layer's parameters in their order."""

    forward: list[Change]
    backward: list[Change]
    parameters: list[tuple[str, tuple[int, ...]]]


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@contextlib.contextmanager
def one_rank(group: Group, following: list[Follow]) -> Iterator[None]:
    """Collectives of ``group`` that do nothing, and no CUDA."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers, mappings, random
    from megatron.core.transformer import dot_product_attention

    done = types.SimpleNamespace(wait=lambda: None)

    def nothing(*_: Any, **__: Any) -> Any:
        return done

    def discard(checkpoint: Any) -> None:
        for output in checkpoint.outputs:
            following[0].end(output)

    def dummy(shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
        key = (*shape, dtype)
        if key not in dummies:
            dummies[key] = torch.empty(tuple(shape), dtype=dtype)
        return dummies[key].detach()

    dummies: dict[Any, torch.Tensor] = {}
    patched: list[tuple[Any, str, Any]] = [
        (torch.distributed, "is_initialized", lambda: True),
        (torch.distributed, "get_rank", lambda *_: 0),
        (torch.distributed, "all_reduce", nothing),
        (torch.cuda, "current_device", lambda: "cpu"),
        (parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", group),
        (parallel_state, "_GLOBAL_MEMORY_BUFFER", _Buffer()),
        (layers, "dist_all_gather_func", nothing),
        (layers, "dist_reduce_scatter_func", nothing),
        (mappings, "dist_all_gather_func", nothing),
        (mappings, "dist_reduce_scatter_func", nothing),
        (mappings, "get_tensor_model_parallel_group_if_none", lambda given, *_, **__: given or group),
        (layers, "get_tensor_model_parallel_group_if_none", lambda given, *_, **__: given or group),
        (layers, "HAVE_TE", True),
        (layers, "get_dummy_wgrad", dummy),
        (random, "_get_all_rng_states", lambda: ()),
        (random, "_set_all_rng_states", lambda *_: None),
        (random, "get_cuda_rng_tracker", _Tracker),
        (random, "FP8GlobalStateManager", types.SimpleNamespace(is_fp8_enabled=lambda: False)),
        (random, "activation_recompute_forward", lambda **_: contextlib.nullcontext()),
        (random, "fp8_autocast", lambda **_: contextlib.nullcontext()),
        (random, "_get_share_storage", lambda: nothing),
        (random.CheckpointWithoutOutput, "_discard_outputs", discard),
        (torch.nn.functional, "rms_norm", lambda x, shape, weight, eps: FusedRMSNorm.apply(x, weight)),
        (dot_product_attention.tensor_parallel, "get_cuda_rng_tracker", _Tracker),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in patched:
            stack.callback(_restore, owner, name, getattr(owner, name, _MISSING))
            setattr(owner, name, value)
        with _OnHost():
            yield


_MISSING = object()


def _restore(owner: Any, name: str, value: Any) -> None:
    if value is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


class _Buffer:
    """``GlobalMemoryBuffer``, whose memory is static."""

    def __init__(self) -> None:
        self.known: dict[Any, torch.Tensor] = {}

    def get_tensor(self, shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        key = (tuple(shape), dtype)
        if key not in self.known:
            self.known[key] = torch.empty(tuple(shape), dtype=dtype)
        return self.known[key]


def _layers(setting: Setting, group: Group, count: int) -> list[torch.nn.Module]:
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    from megatron.core.models import backends
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer

    dtype = DTYPES[setting.dtype]
    backends.LNImpl = FusedLayerNorm  # a specification with RMSNorm changes it for all that follow
    config = TransformerConfig(
        num_layers=count,
        tensor_model_parallel_size=setting.t,
        params_dtype=dtype,
        bf16=setting.dtype == "bf16",
        fp16=setting.dtype == "fp16",
        perform_initialization=False,
        **setting.config,
    )
    groups = ProcessGroupCollection()
    groups.tp, groups.cp, groups.pp = group, Group(1), Group(1)
    if setting.keys:
        from megatron.core.models.T5 import t5_spec

        t5_spec.LNImpl = FusedLayerNorm
        spec = t5_spec.decoder_model_with_local_spec()
    elif setting.bert:
        spec = bert_layer_local_spec
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    own, specs = [config] * count, [spec] * count
    if setting.block:
        own, specs = _of_blocks(setting.block, count, config)
    layers = []
    for at in range(count):
        with _default_dtype(dtype):
            layer = TransformerLayer(own[at], specs[at].submodules, at + 1, pg_collection=groups)
        for module in layer.modules():  # those of cross attention are given none (0.16)
            if getattr(module, "tp_group", group) is None:
                module.tp_group = group
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(_consume)
            if config.gradient_accumulation_fusion:
                parameter.main_grad = torch.empty(parameter.shape, dtype=torch.float32)
                parameter.grad_added_to_main_grad = False
        layers.append(layer)
    return layers


def _of_blocks(text: str, count: int, config: Any) -> tuple[list[Any], list[Any]]:
    """Configurations and specifications of layers as ``TransformerBlock`` has them where they differ."""
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    from megatron.core.models.gpt.heterogeneous import heterogeneous_layer_specs
    from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig

    attention, mlp = ({"no_op": part == "none", "replace_with_linear": part == "linear"} for part in text.split(":"))
    sizes = [int(part) if part.isdigit() else None for part in text.split(":")]
    block = {
        "attention": {**attention, "num_query_groups": sizes[0]}, "mlp": {**mlp, "ffn_hidden_size": sizes[1]}
    }  # fmt: skip
    given = {one.name: getattr(config, one.name) for one in fields(config) if one.init}
    whole = HeterogeneousTransformerConfig(
        **given, heterogeneous_layers_config_encoded_json=json.dumps({"block_configs": [block] * count})
    )
    heterogeneous_layer_specs.LNImpl = FusedLayerNorm
    submodules: Any = heterogeneous_layer_specs.get_gpt_heterogeneous_layer_spec(whole, use_te=False, pp_rank=0)
    return [whole.get_config_for_layer(at + 1) for at in range(count)], submodules.layer_specs


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _consume(parameter: torch.Tensor) -> None:
    parameter.grad = None


def traced_layer(setting: Setting, count: int = 3) -> LayerTrace:
    """The middle one of ``count`` layers in its second step; static buffers are there since the first."""
    group = Group(setting.t)
    marks: list[int] = []
    following: list[Follow] = []
    parameters: list[tuple[str, tuple[int, ...]]] = []

    def body(trace: Trace, follow: Follow) -> None:
        layers = _layers(setting, group, count)
        parameters.extend((name, tuple(parameter.shape)) for name, parameter in layers[0].named_parameters())
        config = layers[0].config
        following.append(follow)
        dtype = DTYPES[setting.dtype]
        rows = setting.s // setting.t if config.sequence_parallel else setting.s
        given: dict[str, Any] = {"attention_mask": None}
        if setting.mask:
            given["attention_mask"] = torch.empty(
                (setting.b if setting.bert else 1, 1, setting.s, setting.s), dtype=torch.bool
            )
        if setting.rotary:
            given["rotary_pos_emb"] = torch.empty((setting.s, 1, 1, setting.rotary))
        if setting.keys:
            own = setting.keys // setting.t if config.sequence_parallel else setting.keys
            given["context"] = torch.empty((own, setting.b, config.hidden_size), dtype=dtype)
            given["context_mask"] = torch.empty((setting.b, 1, setting.s, setting.keys), dtype=torch.bool)
        for _ in range(2):
            marks.clear()
            source = torch.empty((rows, setting.b, config.hidden_size), dtype=dtype, requires_grad=True)
            hidden = source * 1.0
            for at, layer in enumerate(layers):
                if at == count // 2:
                    marks.append(len(trace.changes))
                    hidden.register_hook(_marker(trace, marks))
                if setting.recompute:
                    hidden = checkpoint(lambda x, layer=layer: layer(hidden_states=x, **given)[0], False, hidden)
                else:
                    hidden, _ = layer(hidden_states=hidden, **given)
                if at == count // 2:
                    marks.append(len(trace.changes))
                    hidden.register_hook(_marker(trace, marks))
            out = hidden * 1.0
            del hidden
            gradient = torch.empty_like(out)
            out.backward(gradient)
            del out, gradient, source
        marks.append(0)

    with warnings.catch_warnings(), one_rank(group, following):
        warnings.simplefilter("ignore")
        from megatron.core.tensor_parallel.random import checkpoint

        trace = run(body)
    start, end, back, done, _ = marks
    on_host = {change.storage for change in trace.changes if change.op == "aten.lift_fresh.default"}
    forward, backward = (
        [change for change in trace.changes[span] if change.storage not in on_host]
        for span in (slice(start, end), slice(back, done))
    )
    return LayerTrace(forward, backward, parameters)


def _marker(trace: Trace, marks: list[int]) -> Callable[[torch.Tensor], None]:
    return lambda _: marks.append(len(trace.changes))
