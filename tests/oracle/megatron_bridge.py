"""Megatron-Bridge's own adapter around a module of Transformer Engine, on fake tensors.

``peft/utils.py``, ``peft/lora_layers.py``, ``peft/dora_layers.py`` and ``peft/canonical_lora.py`` are read from a
source tree of NVIDIA-NeMo/Megatron-Bridge, which the environment variable ``MEMPLAN_BRIDGE_SOURCE`` names;
Megatron-Core is the installed one.
"""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch

BRIDGE = "MEMPLAN_BRIDGE_SOURCE"


def bridge() -> Path | None:
    """The source tree that the environment names, if it is one."""
    path = Path(os.environ.get(BRIDGE, "")) / "src" / "megatron" / "bridge"
    return path if BRIDGE in os.environ and (path / "peft").is_dir() else None


def _modules() -> tuple[Any, Any, Any, Any]:
    """``peft/utils.py``, ``peft/lora_layers.py``, ``peft/dora_layers.py`` and ``peft/canonical_lora.py``."""
    path = bridge()
    assert path is not None, f"{BRIDGE} names no source tree of Megatron-Bridge"
    for name in ("bridge", "bridge.peft", "bridge.utils"):
        package = types.ModuleType(f"megatron.{name}")
        package.__path__ = [str(path.parent.joinpath(*name.split(".")))]
        sys.modules.setdefault(package.__name__, package)
    for name in ("megatron.bridge.utils.common_utils", "megatron.bridge.utils.activation_map"):
        sys.modules.setdefault(name, mock.MagicMock())
    for name in ("base", "module_matcher"):  # which read checkpoints
        module: Any = types.ModuleType(f"megatron.bridge.peft.{name}")
        module.PEFT, module.ModuleMatcher = type("PEFT", (), {}), type("ModuleMatcher", (), {})
        sys.modules.setdefault(module.__name__, module)
    names = (f"megatron.bridge.peft.{name}" for name in ("utils", "lora_layers", "dora_layers", "canonical_lora"))
    with mock.patch.object(importlib.metadata, "version", return_value="2.17.1"):
        first, second, third, fourth = map(importlib.import_module, names)
    return first, second, third, fourth


class _Base(torch.nn.Module):
    """A module of Transformer Engine as Megatron-Core's wrappers call it: the output and a bias, or the output with the
    norm's, and a bias (``TELayerNormColumnParallelLinear.forward``)."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: torch.Tensor) -> Any:
        out = self.run(x)
        return (out, None) if isinstance(out, torch.Tensor) else (tuple(out), None)


def wrapped(run: Any, sizes: tuple[int, int], group: Any, t: int, rank: int, **settings: Any) -> Any:
    """``run`` in a ``LoRALinear`` with an adapter of ``rank``, or in a ``DoRALinear`` over its ``weight``, or with one
    for each of ``parts``: outputs by their names; ``sizes``: outputs and inputs as a whole."""
    utils, layers, decomposed, canonical = _modules()
    weight, parts, heads = settings.pop("weight", None), settings.pop("parts", None), settings.pop("heads", (0, 0, 0))
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection

    config = ModelParallelConfig(
        tensor_model_parallel_size=t,
        sequence_parallel=settings.pop("sequence_parallel"),
        params_dtype=torch.bfloat16,  # ``bf16`` would cast parameters that are bf16, which fakes do not always bear
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    config.cpu_offloading = False
    config.defer_embedding_wgrad_compute = False
    config._cpu_offloading_context = None
    collection = ProcessGroupCollection()
    collection.tp = group
    n, k = sizes
    kind = utils.ParallelLinearAdapter if weight is None else decomposed.ParallelLinearDoRAAdapter

    def adapted(outputs: int) -> Any:
        return kind(
            k,
            outputs,
            rank,
            "decoder.layers.0.self_attention.linear_qkv",
            activation="identity",
            model_parallel_config=config,
            alpha=rank,
            pg_collection=collection,
            **settings,
        )

    base = _Base(run)
    if parts:
        names = ("num_attention_heads", "num_query_groups", "kv_channels")
        base.config = types.SimpleNamespace(**dict(zip(names, heads, strict=True)))
        together = canonical.ModuleDict({f"adapter_{name}": adapted(width) for name, width in parts.items()})
        is_attention = "q" in parts
        return (canonical.LoRALinearSplitQKV if is_attention else canonical.LoRALinearSplitFC1UpGate)(base, together)
    adapter = adapted(n)
    if weight is None:
        return layers.LoRALinear(base, adapter)
    from megatron.core.tensor_parallel import mappings

    gather = mappings.gather_from_tensor_model_parallel_region
    decomposed.gather_from_tensor_model_parallel_region = lambda x: gather(x, group)
    base.weight = weight
    return decomposed.DoRALinear(base, adapter)
